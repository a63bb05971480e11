"""The content of a page: numbers and texts of a plan, as they are drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from megatron.runtime.devices import GIB


class Fact(NamedTuple):
    """A line about the run: 'layout', 'PP 4 x TP 2 x DP 8'. Without a name it continues the one above."""

    name: str
    text: str


class Figure(NamedTuple):
    """A headline: 'time of a step', '1.24 s', 'of 2,097,152 tokens'."""

    name: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class StageRow:
    """Memory of each rank of a pipeline stage, in bytes at the peak of a step."""

    name: str
    parts: Mapping[str, int]
    host_bytes: int
    """Bytes in the host's memory."""
    peak: str
    """Moment of the peak."""
    holds: str
    """Its layers."""

    @property
    def total(self) -> int:
        return sum(self.parts.values())


@dataclass(frozen=True)
class MemoryByStage:
    """Memory of all stages beside their device's."""

    stages: Sequence[StageRow]
    device: str = ""
    device_bytes: int | None = None
    """None: the device is unknown."""
    usable_bytes: int | None = None
    """Memory that is left by the reserve for allocators and kernels."""

    @property
    def part_names(self) -> list[str]:
        return list(self.stages[0].parts)

    @property
    def fullest(self) -> StageRow:
        return max(self.stages, key=lambda stage: stage.total)


class Bar(NamedTuple):
    """A time of a row of a timeline: one of KINDS."""

    row: int
    kind: str
    start: float
    end: float
    text: str


KINDS = {
    "forward": "forward pass",
    "backward": "backward pass",
    "weight": "gradients of weights",
    "message": "message",
    "reduction": "reduction of gradients",
    "update": "update",
    "other": "data and host",
}
"""Kinds of bars, with the words of the legend."""


@dataclass(frozen=True)
class Timeline:
    """A step of all pipeline stages. Times in seconds since its start."""

    title: str
    rows: Sequence[str]
    bars: Sequence[Bar]
    seconds: float
    note: str = ""


class LayoutRow(NamedTuple):
    """A row of a search."""

    title: str
    seconds: float
    tokens_per_second: float
    mfu: float | None
    memory_bytes: int
    wait: float
    """Share of a step that its stages wait."""
    sent_bytes: float
    """Bytes that a rank sends in a step."""
    limit: str
    command: str


class Compared(NamedTuple):
    """A part of a step, in seconds as predicted and as measured."""

    name: str
    predicted: float
    measured: float


@dataclass(frozen=True)
class PageContent:
    """All that a page shows. What a plan does not know is left out, and so is its section."""

    title: str
    facts: Sequence[Fact]
    figures: Sequence[Figure]
    memory: MemoryByStage
    parts: Mapping[str, float] = field(default_factory=dict)
    """Seconds of a step by what they are spent on."""
    timelines: Sequence[Timeline] = ()
    layouts: Sequence[LayoutRow] = ()
    refused: Mapping[str, int] = field(default_factory=dict)
    """Layouts that a search refused, by the reason."""
    compared: Sequence[Compared] = ()
    measured_in: str = ""
    """Folder of the run that it is compared with."""


def gib_text(size_bytes: float) -> str:
    """Return GiB with two digits, or more for less than 0.1."""
    size = size_bytes / GIB
    if size == 0 or size >= 0.1:
        return f"{size:,.2f}"
    return f"{size:.4f}"
