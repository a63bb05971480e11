"""Rates of a machine: seconds of the pieces that a training step is made of, for the plan. Without torch.

There are two origins. A measured file holds tables of points (measured.py), a published one peaks and bandwidths
(published.py); the same look-ups follow from both. What neither knows is an error by name, never zero.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple, get_args

from megatron.options.config import ConfigError
from megatron.options.types import NonNegativeFloat

Precision = Literal["fp32", "bf16", "fp16", "fp8"]
Role = Literal["forward", "input", "weight"]
"""y = x W^T; the gradient of x; that of W."""
Direction = Literal["forward", "backward"]
Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"]
Pointwise = Literal[
    "rmsnorm",
    "layernorm",
    "head_norm",
    "gelu",
    "swiglu",
    "rotary",
    "residual",
    "residual_dropout",
    "embedding",
    "cross_entropy",
    "router",
    "dispatch",
    "quantized",
    "accumulate",
    "cast",
]
"""Operations on each number. `swiglu` stands for any gated activation, and reads both of its inputs; `rotary` reads
queries and keys; `cross_entropy` logits, beside the products of the projection; `dispatch` what experts exchange;
`quantized` a weight of 4 bits; `accumulate` adds a weight's gradient to the float32 sum."""
POINTWISE: tuple[Pointwise, ...] = get_args(Pointwise)


class Span(NamedTuple):
    """Extent of a group of ranks over nodes."""

    size: int
    """Ranks of the group."""
    per_node: int
    """Those of them on one node; `size` where all are on one."""
    sharing: int = 1
    """Groups of the same kind that use the links of the same node at once."""

    @property
    def crosses_nodes(self) -> bool:
        return self.per_node < self.size


class Starts(NamedTuple):
    """Seconds that the host takes beside the operations: Python, autograd's hooks, logging."""

    step: NonNegativeFloat
    microbatch: NonNegativeFloat
    layer_forward: NonNegativeFloat
    """A pass through a layer, forward."""
    layer_backward: NonNegativeFloat
    message: NonNegativeFloat
    """A message between pipeline stages, at each end."""


class RatesError(ConfigError):
    """A look-up of what the rates of a machine do not hold."""

    def __init__(self, fault: str) -> None:
        super().__init__([fault])


# by identity: a plan remembers seconds by the rates that they come from
@dataclass(frozen=True, eq=False, kw_only=True)
class Rates(ABC):
    """Seconds of the pieces of a step on one device of a machine, by sizes of one rank."""

    is_measured: ClassVar[bool]

    title: str
    device: str
    source: str
    """When and how it was measured, or where the figures are published."""
    origin: str
    """File that holds them, for messages."""
    starts: Starts
    peak_flops: Mapping[Precision, float]
    """FLOP/s by precision, for the MFU."""
    disk_bytes_per_s: float | None = None

    @abstractmethod
    def product(self, precision: str, role: Role, tokens: float, outputs: float, inputs: float) -> float:
        """Return the seconds of one product of a linear layer: tokens x inputs with outputs x inputs."""

    @abstractmethod
    def attention(
        self,
        precision: str,
        direction: Direction,
        *,
        rows: float,
        row_tokens: float,
        heads: float,
        kv_heads: float,
        head_size: float,
        kind: str = "causal",
        seen_share: float = 1.0,
    ) -> float:
        """Return the seconds of the core of an attention: softmax(q k^T) v.

        `seen_share`: share of the scores of the causal half that is computed, such as that of a window.
        """

    @abstractmethod
    def pointwise(self, kind: str, direction: Direction, precision: str, numbers: float) -> float:
        """Return the seconds of an operation of `Pointwise` on a tensor of so many numbers."""

    @abstractmethod
    def collective(self, kind: Collective, size_bytes: float, span: Span) -> float:
        """Return the seconds of an exchange; `size_bytes` are those of the whole tensor, reduced or gathered."""

    @abstractmethod
    def update(self, optimizer: str, precision: str, numbers: float) -> float:
        """Return the seconds of an optimizer's step on a rank's share: norm, clipping, moments, weights, casts."""

    @abstractmethod
    def copy(self, size_bytes: float) -> float:
        """Return the seconds of a copy within the memory of the device."""

    @abstractmethod
    def host_copy(self, size_bytes: float) -> float:
        """Return the seconds of a copy from the device to the host's memory, or back."""

    def share_of_exchanges(self, span: Span) -> float:
        """Return the share of the device's cores that a collective takes from what is computed meanwhile."""
        return 0.0

    def slowdown(self, busy_ranks: int) -> float:
        """Return how many times longer a pass takes while so many ranks of a host compute at once."""
        return 1.0

    def for_ranks(self, ranks: int) -> Rates:
        """Return the rates of one of so many ranks of a host, which share its cores on a CPU."""
        return self

    def check_device(self, device: str) -> None:
        """Raise RatesError if a run is for another device."""
        if device != self.device:
            raise RatesError(
                f"the rates of {self.origin} are those of {self.device}, but the run is for {device}; "
                "give rates of that device, or another --device"
            )

    def missing(self, thing: str, known: Iterable[str]) -> RatesError:
        """Return the error of a look-up: `thing` is not there, but `known` are."""
        have = ", ".join(sorted(known)) or "none"
        remedy = "measure them with megatron-plan --measure" if self.is_measured else "add them to a copy of the file"
        return RatesError(f"no {thing} in {self.origin}, which has {have}; {remedy}")
