"""CUDA as a device. NVIDIA's figures and tools; AMD's builds of torch answer by the same names."""

from __future__ import annotations

import importlib.util
import itertools
import os
from pathlib import Path

from megatron.runtime.device import Chip, Device, MemoryUse

VISIBLE = "CUDA_VISIBLE_DEVICES"
FP8_CAPABILITY = (8, 9)
GB = 2**30  # as in megatron/runtime/accelerator.py

# NVIDIA quotes most figures with sparsity, which doubles them.
PEAKS = (
    (r"\bGB200\b", 2500.0),  # GB200 NVL72 datasheet: 360 PFLOP/s sparse over 72
    (r"\bB200\b", 2250.0),  # HGX B200 datasheet: 36 PFLOP/s sparse over 8
    (r"\bH200 NVL\b", 835.5),  # H200 datasheet: 1,671 sparse
    (r"\bG?H200\b", 989.4),  # H200 datasheet, and GH200's: 1,979 sparse
    (r"\bH100 PCIe\b", 756.5),  # H100 datasheet: 1,513 sparse
    (r"\bH100 NVL\b", 835.5),  # H100 NVL datasheet: 1,671 sparse
    (r"\bH100\b", 989.4),  # H100 SXM; H100 architecture whitepaper, table 3
    (r"\bA100\b", 312.0),  # A100 datasheet, SXM and PCIe alike
    (r"\bL40S\b", 362.05),  # L40S datasheet
    (r"\bA10\b", 125.0),  # A10 datasheet. Not the A10G, another chip
    (r"\bV100-PCIE\b", 112.0),  # V100 datasheet; float16, it has no bfloat16
    (r"\bV100\b", 125.0),  # V100 datasheet, SXM2; float16
    (r"\bRTX 4090\b(?! [DL])", 165.2),  # Ada architecture whitepaper, appendix A, float32 accumulation
)


def count_devices() -> int:
    """Return the number of GPUs of this machine that this process may use."""
    if VISIBLE in os.environ:
        names = [name.strip() for name in os.environ[VISIBLE].split(",")]
        # CUDA ends the list at the first name of no device, and takes a repeated one for an error
        names = list(itertools.takewhile(lambda name: name not in ("", "-1", "NoDevFiles"), names))
        return len(names) if len(set(names)) == len(names) else 0
    # nvidia0, nvidia1, ...; nvidiactl and nvidia-uvm are no GPUs
    nvidia = [path for path in Path("/dev").glob("nvidia[0-9]*") if path.name[6:].isdecimal()]
    # AMD's driver: nodes with a gpu_id file
    return len(nvidia) or len(list(Path("/sys/class/kfd/kfd/topology/nodes").glob("*/gpu_id")))


def torch_has_cuda() -> bool:
    """Return whether torch is a build for CUDA, without importing it."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    # to import torch takes seconds, and a launcher needs no more than this
    libraries = Path(spec.origin).parent / "lib"
    return any((libraries / name).exists() for name in ("libtorch_cuda.so", "libtorch_hip.so"))


def _missing() -> str:
    import torch

    if torch.version.cuda is None and torch.version.hip is None:
        return f"torch {torch.__version__} is built without CUDA; install a CUDA build"
    if not torch.cuda.is_available():
        visible = os.environ.get(VISIBLE)
        hidden = f" under {VISIBLE}={visible!r}" if visible is not None else ""
        return f"torch sees no CUDA device{hidden}; nvidia-smi shows which are there"
    return ""


def _memory() -> MemoryUse:
    import torch

    total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    return MemoryUse(torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated(), total)


def _memory_counts() -> dict[str, float]:
    import torch

    counted = torch.cuda.memory_stats()  # empty before the first use of the device
    reserved = counted.get("reserved_bytes.all.current", 0)
    return {
        "memory_reserved (GB)": reserved / GB,
        "max_memory_reserved (GB)": counted.get("reserved_bytes.all.peak", 0) / GB,
        # reserved from the device, and in use by no tensor: cached for reuse, or too scattered for it
        "memory_fragmentation (GB)": (reserved - counted.get("allocated_bytes.all.current", 0)) / GB,
        # what torch's allocator does not know of, such as NCCL's buffers, shows here alone
        "memory_free (GB)": torch.cuda.mem_get_info()[0] / GB,
        "num_alloc_retries": float(counted.get("num_alloc_retries", 0)),
        "num_ooms": float(counted.get("num_ooms", 0)),
    }


def _chip_name() -> str:
    import torch

    return torch.cuda.get_device_name()


def _software() -> dict[str, str]:
    import torch

    return {
        "device": torch.cuda.get_device_name(),
        "cuda": str(torch.version.cuda or torch.version.hip),
        "cudnn": str(torch.backends.cudnn.version()),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
    }


def _missing_fp8() -> str:
    import torch

    if torch.version.hip is not None:
        return "torch is built for ROCm, whose fp8 products have not been tried here; leave fp8_format out"
    # Source: aten/src/ATen/native/cuda/ScaledBlas.cpp
    if torch.cuda.get_device_capability() < FP8_CAPABILITY:
        major, minor = torch.cuda.get_device_capability()
        return (
            f"{torch.cuda.get_device_name()} has compute capability {major}.{minor}, and fp8 products begin with "
            "8.9 (Ada, Hopper); use such a GPU, or leave fp8_format out"
        )
    if not hasattr(torch, "_scaled_mm"):
        return f"torch {torch.__version__} has no scaled products; install that of constraints.txt"
    return ""


def _set_deterministic() -> None:
    import torch

    # cuBLAS reads it once, at the first operation. Source: NVIDIA cuBLAS documentation, "Results Reproducibility"
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # it would choose kernels by measured time, other ones in another run
    torch.backends.cudnn.benchmark = False


CUDA = Device(
    name="cuda",
    accelerator="cuda",
    torch_type="cuda",
    collectives="nccl",
    missing=_missing,
    is_detected=lambda: count_devices() > 0 and torch_has_cuda(),
    count=lambda: count_devices(),
    visible_variable=VISIBLE,
    driver_tool="nvidia-smi",
    driver_query=lambda fields: ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"],
    # the driver's own figures, below the round ones of the data sheets (80, 80 and 141 GB)
    chips=(Chip("a100", "A100 80 GB", 79.2), Chip("h100", "H100 80 GB", 79.2), Chip("h200", "H200", 139.8)),
    memory=_memory,
    memory_counts=_memory_counts,
    chip_name=_chip_name,
    peaks=PEAKS,
    software=_software,
    graphs="CUDA",
    replays_tokens=True,
    replays_layers=True,
    set_deterministic=_set_deterministic,
    attention=frozenset({"sdpa", "flex"}),
    has_flash_attention=True,
    has_linear_algebra=True,
    groups_products=True,
    fuses_adam=True,
    has_bitsandbytes=True,
    compiles_by_triton=True,
    adds_16_bit_products=True,
    fp8_recipes=("tensorwise", "rowwise"),
    missing_fp8=_missing_fp8,
)
