"""The CPU as a device: what its processor computes by itself, memory and cores of the host. Without torch."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron.runtime.device import Device, MemoryUse

PRODUCTS = {
    "bf16": {"avx512_bf16", "amx_bf16", "avx_ne_convert"},
    "fp16": {"avx512_fp16", "amx_fp16", "avx_ne_convert"},
}
"""Processor flags of Linux, one of which oneDNN needs for products of a precision; with AVX-512 alone it has those of
bf16 too, which take six times as long as float32's. Source: oneDNN's page on CPU dispatcher control."""
MAX_CPU_ISA = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
"""oneDNN's limit of its instructions, with which another processor can be simulated."""
WIDENED = "this CPU has no {} products; they are computed in float32"
LIMITS_WITHOUT_BF16 = ("SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX512_CORE", "AVX512_CORE_VNNI")
WITHOUT_PRODUCTS = {limit: {"bf16", "fp16"} for limit in LIMITS_WITHOUT_BF16} | {"AVX512_CORE_BF16": {"fp16"}}
"""Those that a limit takes away."""
BLOCKWISE_LENGTHS = range(256, 1025)
"""Tokens that megatron/models/attention/blockwise.py is faster for. Measured at powers of two: at 128 in float32, and
at 2,048, torch's kernel takes no more time."""
CGROUPS, OWN_CGROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
"""Folder of the control groups, and those of this process."""


def missing_products() -> frozenset[str]:
    """Return those of bf16 and fp16 whose products this CPU certainly has no instruction for; read without torch."""
    limit = next((os.environ[name].upper() for name in MAX_CPU_ISA if name in os.environ), "")
    missing = frozenset(WITHOUT_PRODUCTS.get(limit, ()))
    flags = _cpu_flags()
    # /proc/cpuinfo of ARM has Features instead: what is not known is not called missing
    if not flags:  # another architecture
        return missing
    return missing | {precision for precision, instructions in PRODUCTS.items() if not flags & instructions}


def attends_blockwise(precision: str) -> bool:
    """Return True if this CPU computes attention faster from matrix products than in torch's flash kernel.

    Measured with AVX-512 and its bfloat16 products. With AMX torch's kernel uses that. Read without torch.
    """
    flags = _cpu_flags()
    if precision == "fp32":
        is_limited = os.environ.get("ATEN_CPU_CAPABILITY", "avx512") != "avx512"
        return not is_limited and flags >= {"avx512f", "avx512bw", "avx512dq", "avx512vl"}
    has_products = "avx512_bf16" in flags and "amx_tile" not in flags and "bf16" not in missing_products()
    return precision == "bf16" and has_products


def _cpu_flags() -> frozenset[str]:
    """Return what Linux says that this processor can do; nothing where it does not say."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return frozenset()
    return frozenset(" ".join(re.findall(r"^flags\s*:(.*)$", text, re.MULTILINE)).split())


def memory_use() -> MemoryUse:
    """Return the resident set of this process, and the memory of the host or container, which its ranks share."""
    allocated = resident_bytes()
    # in KiB on Linux, in bytes on macOS (getrusage(2)). The kernel's peak lags; the present may be above it
    unit = 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return MemoryUse(allocated, max(peak, allocated), host_memory())


def resident_bytes() -> int:
    """Return the host's memory that this process holds."""
    return int(_process(os.getpid()).memory_info().rss)


@functools.lru_cache(maxsize=1)
def _process(pid: int) -> Any:
    """Return the process, cached: to create one costs more than its queries in a step. `pid`: a fork has another."""
    import psutil

    return psutil.Process(pid)


@functools.cache
def host_memory() -> int:
    """Return the bytes that processes on this host, or in this container, may hold together."""
    # without psutil, which a plan has no other use for
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([whole, *(limit for limit, _ in _memory_limits())])


def free_host_memory() -> int:
    """Return the bytes that this process may still take, before others of its host or container take them."""
    import psutil

    # what the kernel would give, caches that it can drop included
    left = [limit - used for limit, used in _memory_limits()]
    return max(0, min([int(psutil.virtual_memory().available), *left]))


def host_cores() -> int:
    """Return the cores that a process may use: those that it may be on, or what its control groups have the time of."""
    count = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        count = len(os.sched_getaffinity(0))
    is_first, folders = _control_groups("cpu")
    for folder in folders:
        # without a limit the quota is "max", or in version 1 -1
        with contextlib.suppress(OSError, ValueError):
            if is_first:
                quota, period = (int((folder / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
            else:
                quota, period = map(int, (folder / "cpu.max").read_text().split())
            if quota > 0:
                count = min(count, quota // period)
    return max(1, count)


def _memory_limits() -> Iterator[tuple[int, int]]:
    """Yield the bytes that each control group of this process may hold, and holds; a container is one, or in one."""
    is_first, folders = _control_groups("memory")
    limit_name, use_name, prefix = "memory.max", "memory.current", ""
    if is_first:
        limit_name, use_name, prefix = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"
    for folder in folders:
        try:
            limit, used = (int((folder / name).read_text()) for name in (limit_name, use_name))
            counts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):  # no files at the root, "max" without a limit
            continue
        # files' caches, which the kernel drops where memory is short; those of a tmpfs are not among them
        cached = sum(int(counts.get(f"{prefix}{kind}_file", 0)) for kind in ("active", "inactive"))
        yield limit, used - cached


def _control_groups(controller: str) -> tuple[bool, list[Path]]:
    """Return whether they are of version 1, and the folders of this process's control group and of those around it.

    A container may see its own group as the root, and a path that is not there.
    """
    paths: dict[str, str] = {}
    with contextlib.suppress(OSError):  # macOS has none
        for line in OWN_CGROUPS.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            # version 2 has one line, without the names of controllers
            paths |= dict.fromkeys(controllers.split(","), path)
    is_first = controller in paths
    root, path = CGROUPS, paths.get("", "/")
    if is_first:
        root, path = CGROUPS / controller, paths[controller]
    inner = Path(path.lstrip("/"))
    return is_first, [root / inner, *(root / outer for outer in inner.parents)]


CPU = Device(
    name="cpu",
    accelerator="cpu",
    torch_type="cpu",
    collectives="gloo",
    missing=str,
    is_detected=lambda: True,
    is_host=True,
    memory=memory_use,
    waits_are_costly=False,
    survives_fork=True,
    sdpa_groups="always",
    has_blockwise_attention=True,
    pointwise="eager",  # to compile takes seconds at each start
    has_linear_algebra=True,
    fuses_adam=True,
    widened=lambda: missing_products(),
)
