"""Published rates: the form of their file, and look-ups from peaks, bandwidths and achieved shares.

A product takes its FLOPs over the achieved peak, longer where a side of it is short, and at least as long as its bytes
take. An operation on each number takes its bytes over the memory's bandwidth. A collective is a ring's transfer and a
tree's steps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from megatron.options.types import STRICT, DeviceName, NonNegativeFloat, Number, Positive, PositiveFloat
from megatron.plan.rates.exchanges import sent_share, steps_of
from megatron.plan.rates.rates import POINTWISE, Collective, Direction, Precision, Rates, Role, Span, Starts

Share = Annotated[Number, Field(gt=0, le=1)]
Part = Annotated[Number, Field(ge=0, lt=1)]

NUMBER_BYTES: Mapping[str, int] = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
MOVED: Mapping[str, tuple[float, float]] = {
    "rmsnorm": (2, 3),
    "layernorm": (2, 3),
    "head_norm": (2, 3),
    "gelu": (2, 3),
    # it reads gate and up, writes half as much; backward reads that and the gradient of half
    "swiglu": (1.5, 2.5),
    "rotary": (2, 2),
    # backward adds the gradients of both branches
    "residual": (3, 3),
    "residual_dropout": (3.5, 3.5),
    "embedding": (2, 3),
    # logits are written, read for their sums, and become their gradient; none are kept for backward
    "cross_entropy": (4, 0),
    "router": (6, 6),
    "dispatch": (2, 2),
    # 4 bits and a scale of a block to 16
    "quantized": (1.3, 1.3),
}
"""Numbers read and written by an operation for each that `pointwise` counts, forward and backward."""
MOVED_BYTES: Mapping[str, Mapping[str, int]] = {
    # the gradient, and the float32 sum read and written
    "accumulate": {"fp32": 12, "bf16": 10, "fp16": 10},
    # float32 and 16 bits
    "cast": {"fp32": 8, "bf16": 6, "fp16": 6},
}
"""Bytes of the operations whose numbers are of two precisions."""
UPDATE_BYTES: Mapping[str, int] = {
    # the norm reads the gradient; then gradient, moments and weight are read, all but the gradient written
    **dict.fromkeys(("adamw", "adam", "fusedadamw", "paged_adamw_32bit"), 4 * (1 + 4 + 3)),
    "sgd": 4 * (1 + 3 + 2),
}
"""Bytes read and written for each float32 number by an optimizer's step."""


# ---------------------------------------------------------------------------------------------------------------------
# File


@dataclass(frozen=True, config=STRICT)
class ProductFigures:
    """Matrix products: the share of the peak that large ones achieve, and how it falls with size."""

    share: Share
    half_tokens: NonNegativeFloat = 0.0
    """Tokens with which a product achieves half of that."""
    half_channels: NonNegativeFloat = 0.0
    """Input or output channels with which it does."""


@dataclass(frozen=True, config=STRICT)
class AttentionFigures:
    """Attention: shares of the peak that its kernels achieve over the causal half, and how they fall with size."""

    forward_share: Share
    backward_share: Share
    half_tokens: NonNegativeFloat = 0.0


@dataclass(frozen=True, config=STRICT)
class LinkFigures:
    """Links of a device: bytes a second in one direction, the share of it that collectives achieve, start times."""

    bytes_per_s: PositiveFloat
    share: Share
    start_s: NonNegativeFloat
    """Start of a collective."""
    hop_s: NonNegativeFloat
    """Each step of a tree."""
    peer_bytes_per_s: PositiveFloat | None = None
    """Bytes a second to each other device of the node, where links join pairs: a group has only those between its own.
    Unset: any two devices have all of `bytes_per_s`, through a switch."""
    device_share: Part = 0.0
    """Share of the device's cores that a collective takes from what is computed meanwhile."""


@dataclass(frozen=True, config=STRICT)
class PublishedFile:
    """A file of published rates."""

    version: Literal[1]
    origin: Literal["published"]
    title: str
    device: DeviceName
    source: str
    """Papers, data sheets and benchmarks that the figures are from."""
    peak_flops: Mapping[Precision, PositiveFloat]
    products: ProductFigures
    attention: AttentionFigures
    memory_bytes_per_s: PositiveFloat
    memory_share: Share
    """Share of the bandwidth that operations on each number achieve."""
    host_bytes_per_s: PositiveFloat
    """Copies between the device and its host, in one direction."""
    kernel_start_s: NonNegativeFloat
    """Shortest time of an operation."""
    node_devices: Positive
    within_node: LinkFigures
    across_nodes: LinkFigures
    """A device's own part of the network: that of a node over its devices."""
    starts: Starts
    disk_bytes_per_s: PositiveFloat | None = None


def published_faults(file: PublishedFile) -> Iterator[str]:
    """Yield what is wrong between the values of a file."""
    if not file.peak_flops:
        yield "peak_flops is empty; give a precision's FLOP/s"


# ---------------------------------------------------------------------------------------------------------------------
# Look-ups


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class PublishedRates(Rates):
    """Look-ups that follow from the figures of a file."""

    is_measured = False

    file: PublishedFile

    @classmethod
    def of(cls, file: PublishedFile, origin: str) -> PublishedRates:
        return cls(
            title=file.title,
            device=file.device,
            source=file.source,
            origin=origin,
            starts=file.starts,
            peak_flops=file.peak_flops,
            disk_bytes_per_s=file.disk_bytes_per_s,
            file=file,
        )

    def product(self, precision: str, role: Role, tokens: float, outputs: float, inputs: float) -> float:
        figures = self.file.products
        short = 1 + figures.half_tokens / tokens
        short *= (1 + figures.half_channels / outputs) * (1 + figures.half_channels / inputs)
        computing = 2 * tokens * outputs * inputs * short / (self._peak(precision, "products") * figures.share)
        numbers = tokens * (outputs + inputs) + outputs * inputs
        return self.file.kernel_start_s + max(computing, self._moving(numbers * NUMBER_BYTES[precision]))

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
        figures = self.file.attention
        # two products over the causal half forward; backward recomputes one, and has four gradients
        products, share = (2, figures.forward_share) if direction == "forward" else (5, figures.backward_share)
        flops = products * rows * heads * head_size * row_tokens**2 * seen_share
        computing = flops * (1 + figures.half_tokens / row_tokens) / (self._peak(precision, "attention") * share)
        passes = 1 if direction == "forward" else 2
        numbers = 2 * rows * row_tokens * head_size * (heads + kv_heads) * passes
        return self.file.kernel_start_s + max(computing, self._moving(numbers * NUMBER_BYTES[precision]))

    def pointwise(self, kind: str, direction: Direction, precision: str, numbers: float) -> float:
        if kind not in POINTWISE:
            raise self.missing(f"operation {kind!r}", POINTWISE)
        if kind in MOVED_BYTES:
            of_kind = MOVED_BYTES[kind]
            if precision not in of_kind:
                raise self.missing(f"{precision} {kind}", of_kind)
            moved = numbers * of_kind[precision]
        else:
            moved = numbers * MOVED[kind][direction == "backward"] * self._number_bytes(precision, kind)
        if moved == 0:
            return 0.0
        return self.file.kernel_start_s + self._moving(moved)

    def collective(self, kind: Collective, size_bytes: float, span: Span) -> float:
        if span.size == 1:
            return 0.0
        links, peers = self.file.within_node, min(span.size, span.per_node) - 1
        bandwidth = links.bytes_per_s * links.share
        if links.peer_bytes_per_s is not None and peers:
            bandwidth = min(bandwidth, links.peer_bytes_per_s * links.share * (1 if kind == "send" else peers))
        if span.crosses_nodes:
            links = self.file.across_nodes
            # a group has the network of its own devices, unless others share that of the node
            of_node = links.bytes_per_s * self.file.node_devices / span.sharing
            out = min(links.bytes_per_s * span.per_node, of_node) * links.share
            bandwidth = min(bandwidth, out)
        moving = size_bytes * sent_share(kind, span.size) / bandwidth
        return links.start_s + links.hop_s * steps_of(span.size) + moving

    def share_of_exchanges(self, span: Span) -> float:
        return (self.file.across_nodes if span.crosses_nodes else self.file.within_node).device_share

    def update(self, optimizer: str, precision: str, numbers: float) -> float:
        if optimizer not in UPDATE_BYTES:
            raise self.missing(f"optimizer {optimizer!r}", UPDATE_BYTES)
        # the weights in 16 bits are written too
        number_bytes = UPDATE_BYTES[optimizer]
        if self._number_bytes(precision, f"steps of {optimizer}") < NUMBER_BYTES["fp32"]:
            number_bytes += 2
        return self.file.kernel_start_s + self._moving(numbers * number_bytes)

    def copy(self, size_bytes: float) -> float:
        return self.file.kernel_start_s + self._moving(2 * size_bytes)

    def host_copy(self, size_bytes: float) -> float:
        return self.file.kernel_start_s + size_bytes / self.file.host_bytes_per_s

    def _peak(self, precision: str, name: str) -> float:
        for known, peak in self.file.peak_flops.items():
            if known == precision:
                return peak
        raise self.missing(f"{precision} {name}", self.file.peak_flops)

    def _number_bytes(self, precision: str, name: str) -> int:
        if precision not in NUMBER_BYTES:
            raise self.missing(f"{precision} {name}", NUMBER_BYTES)
        return NUMBER_BYTES[precision]

    def _moving(self, moved_bytes: float) -> float:
        return moved_bytes / (self.file.memory_bytes_per_s * self.file.memory_share)
