"""Record of what a kind of device can do, read in place of comparing names. Without torch."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from megatron.runtime.commands import UserError


class DeviceError(UserError, RuntimeError):
    """The requested device is not available."""


class Chip(NamedTuple):
    """A model of a device by its name in `device_memory`."""

    name: str
    title: str
    memory_gib: float
    """Memory that its driver gives to programs."""


class MemoryUse(NamedTuple):
    """Bytes of a device that this process has allocated, the most that it has, and those of the whole device."""

    allocated: int
    peak: int
    total: int


def query_driver(command: list[str], timeout_s: float = 20.0) -> list[list[str]]:
    """Return the rows of CSV that a driver's tool prints; [] where it fails."""
    # most machines have no such tool: that is an answer, not a fault
    if shutil.which(command[0]) is None:
        return []
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [[part.strip() for part in line.split(",")] for line in answer.splitlines() if line.strip()]


def _deepspeeds_memory() -> MemoryUse:
    from deepspeed.accelerator import get_accelerator

    device = get_accelerator()
    return MemoryUse(device.memory_allocated(), device.max_memory_allocated(), device.total_memory())


@dataclass(frozen=True, kw_only=True)
class Device:
    """Abilities of a kind of device, how it is detected, and what it needs.

    The defaults are those of an accelerator that DeepSpeed supports and that torch's own kernels run on. A function
    imports what it needs when it is called: records are read before torch and deepspeed are loaded.
    """

    name: str
    """Its name in messages, as `xpu`."""
    accelerator: str
    """DeepSpeed's name of it, to which DS_ACCELERATOR is set."""
    torch_type: str
    """Type of its torch.device."""
    collectives: str
    """Backend of torch.distributed for its tensors."""

    # Presence on this machine.

    missing: Callable[[], str]
    """Return what this process lacks for it, and the remedy; empty: nothing. May import torch, not deepspeed."""
    missing_software: Callable[[], str] = str
    """Return the software that this machine lacks for devices that it has; empty: none. Without torch."""
    is_detected: Callable[[], bool] = bool
    """Return whether this machine has it and its software, so that `auto` may mean it. Without torch."""
    count: Callable[[], int] | None = None
    """Return the number on this machine. Without torch. None: it is not counted before ranks start."""
    visible_variable: str = ""
    """Variable that restricts a process and its children to some of them."""
    driver_tool: str = ""
    """Command that lists those which its driver sees."""
    driver_query: Callable[[str], list[str]] | None = None
    """Return the command that prints fields, joined by commas, of each device as rows of CSV."""
    check_ranks: Callable[[int], Iterator[str]] = lambda ranks: iter(())
    """Yield what keeps so many ranks of this machine from their devices. Without torch."""
    warn_of_ranks: Callable[[int], Iterator[str]] = lambda ranks: iter(())
    """Yield a warning for each setting that its vendor does not support for so many ranks of a machine."""

    # Memory and speed.

    is_host: bool = False
    """Its tensors are in the host's memory, which the ranks share, and torch's CPU operators compute them in threads of
    the rank: nothing is pinned or copied, and a node runs as many ranks as the layout has."""
    chips: tuple[Chip, ...] = ()
    """Models whose memory a plan may name."""
    memory: Callable[[], MemoryUse] = _deepspeeds_memory
    memory_counts: Callable[[], dict[str, float]] = dict
    """Return further counts of its allocator, always under the same keys."""
    health: Callable[[], dict[str, float]] = dict
    """Return readings of this rank's device, always under the same keys. Does not wait for the device."""
    health_warning: Callable[[], str | None] = lambda: None
    """Return a warning about this host's driver, of which the first rank of a host is to speak."""
    chip_name: Callable[[], str | None] = lambda: None
    """Return the name that its software gives this rank's chip."""
    peaks: tuple[tuple[str, float], ...] = ()
    """Dense bfloat16 matrix TFLOP/s by a regular expression of `chip_name`; the first match counts. For the MFU."""
    software: Callable[[], dict[str, str]] = dict
    """Return the name of the chip and the versions of the software between torch and it."""

    # How it runs.

    waits_are_costly: bool = True
    """Operators run behind the host: to read a tensor waits for all of them, and time is taken by events."""
    survives_fork: bool = False
    """A process that has imported deepspeed may be forked into ranks."""
    has_lazy_mode: bool = False
    """Operators may be recorded, and launched at step marks."""
    is_lazy: Callable[[], bool] = bool
    """Return whether this process records operators."""
    mark_step: Callable[[], None] = lambda: None
    """Launch the recorded operators."""
    compiles_shapes: bool = False
    """Its software compiles a graph for each new shape, so that few shapes save time."""
    static_experts: bool = False
    """Experts compute numbers of tokens that the router does not decide: any other were a new shape to compile, and a
    wait of the host, which has to know it."""
    compiled_graphs: Callable[[], int | None] = lambda: None
    """Return the number of graphs compiled in this process; None: it compiles none by itself."""
    cpu_fallbacks: Callable[[], dict[str, int]] = dict
    """Return the calls of each operator that it lacks, so that the CPU computed it."""
    compiles_layers: bool = False
    """Outside lazy mode layers are compiled by torch.compile, unless the run says otherwise."""
    graphs: str = ""
    """Name of the graphs that it can capture and replay, as `CUDA`; empty: it has none."""
    replays_tokens: bool = False
    """Tokens' passes are replayed as graphs unless the user says otherwise."""
    replays_layers: bool = False
    """Passes of layers in training may be replayed as graphs."""
    replays_evaluations: bool = False
    """Passes of an evaluation may be replayed as graphs."""
    graph_faults: Callable[[str, bool | None, int, Mapping[str, str]], Iterator[str]] = lambda *facts: iter(())
    """Yield what keeps an option's graphs from running, by the option, lazy mode (None: it will be), the ranks whose
    collectives a graph holds, and the environment."""

    # Variables.

    graph_variables: Callable[[int], dict[str, str]] = lambda tensor_size: {}
    """Return the variables with which its graphs may hold the collectives of so many ranks."""
    set_variables: Callable[[Mapping[str, str]], None] = lambda variables: None
    """Set variables of its software that are not set. Called before the software is loaded."""
    keep_compiled_graphs: Callable[[str], None] = lambda results_dir: None
    """Let its software keep compiled graphs in the run's folder, for a restart. Called before it is loaded."""
    set_deterministic: Callable[[], None] = lambda: None
    """Set, beside torch's own switch, what results need to repeat bit for bit. Called before its first operation."""

    # Kernels.

    attention: frozenset[str] = frozenset({"sdpa"})
    """Values of `attention_backend` that it has."""
    sdpa_groups: Literal["always", "unmasked", "never"] = "unmasked"
    """When torch's SDPA has a kernel for fewer key/value than query heads; `unmasked`: of 16-bit numbers, no mask."""
    has_flash_attention: bool = False
    """torch's SDPA has a flash kernel of 16-bit numbers alone, whose output comes by position."""
    stores_scores: bool = False
    """Attention keeps its S x S probabilities for the backward pass, where no kernel recomputes them."""
    has_blockwise_attention: bool = False
    """megatron/models/attention/blockwise.py may be faster than torch's kernel, document by document."""
    pointwise: Literal["eager", "compiled", "habana"] = "compiled"
    """Form of the pointwise operators that `kernels=auto` takes."""
    fp8_recipes: tuple[Literal["delayed", "tensorwise", "rowwise"], ...] = ()
    """Values of `fp8_recipe` that it has products for, the default first; empty: it has no fp8."""
    missing_fp8: Callable[[], str] = str
    """Return what this rank's chip or torch lacks for them, and the remedy; empty: nothing. May import torch."""
    has_64_bits: bool = True
    """int64 and float64 have all their bits; elsewhere those of int32 and float32, and the host computes what needs
    more."""
    has_linear_algebra: bool = False
    """It computes singular values; elsewhere the host does."""
    groups_products: bool = False
    """Experts are multiplied with their tokens in one call, which waits for no sizes."""
    fuses_adam: bool = False
    """torch's Adam has a fused kernel."""
    adamw: Callable[[], Any] | None = None
    """Import and return an AdamW of its own."""
    has_bitsandbytes: bool = False
    """bitsandbytes has kernels for it: weights of 4 bits, and optimizers whose states are paged to the host."""
    compiles_by_triton: bool = False
    """torch.compile makes kernels of Triton for it, and torch's own RMSNorm is one kernel."""
    adds_16_bit_products: bool = False
    """torch adds 16-bit products to a float32 matrix, from torch 2.10."""
    repeat_noise: float = 0.0
    """Largest relative difference between norms of what two such devices, or one twice, compute by torch's
    deterministic algorithms; 0: all bits are equal."""
    widened: Callable[[], frozenset[str]] = frozenset
    """Return those of bf16 and fp16 whose products it computes in float32. Without torch."""

    def query(self, *fields: str, timeout_s: float = 20.0) -> list[list[str]]:
        """Return these fields of each device on this machine, by its driver's tool; [] where that fails."""
        if self.driver_query is None:
            return []
        rows = query_driver(self.driver_query(",".join(fields)), timeout_s)
        # another release of the tool may print a heading or an error among the rows
        return rows if all(len(row) == len(fields) for row in rows) else []

    @property
    def collectives_are_gloo(self) -> bool:
        """Its collectives run on the host: control messages need no group of their own, and gloo makes copies."""
        return self.collectives == "gloo"
