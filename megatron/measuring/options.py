"""Extent of a measurement: flags of the ranks that measure, and the sizes that they measure at. Without torch."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.plan.rates.rates import Precision


@dataclass(frozen=True)
class Sizes:
    """Sizes of the points, and how often each is measured."""

    tokens: tuple[int, ...]
    channels: tuple[int, ...]
    """Outputs and inputs of products."""
    heads: tuple[int, ...]
    row_tokens: tuple[int, ...]
    head_size: tuple[int, ...]
    numbers: tuple[int, ...]
    bytes: tuple[int, ...]
    """Copies and exchanges."""
    hidden: tuple[int, ...]
    """Widths of the models whose updates are timed."""
    steps: int
    """Steps of each training."""
    rounds: int
    """Repeats of each point; points alternate, so that a passing disturbance reaches them all."""
    pool_numbers: int
    """Numbers of the memory that operands rotate through, as weights of layers do: more than caches hold."""
    disk_bytes: int


ON_HOST = Sizes(
    tokens=(16, 64, 256, 1024),
    channels=(32, 64, 128, 256, 512, 1024),
    heads=(4,),
    row_tokens=(32, 64, 128, 256, 512, 1024),
    head_size=(16, 64),
    numbers=(2**10, 2**13, 2**16, 2**18, 2**21),
    bytes=(2**8, 2**12, 2**15, 2**18, 2**20, 2**23),
    hidden=(64, 256, 640),
    steps=14,
    rounds=6,
    pool_numbers=2**23,
    disk_bytes=2**27,
)
ON_ACCELERATOR = Sizes(
    tokens=(256, 1024, 4096, 16384),
    channels=(256, 1024, 4096, 16384),
    heads=(8, 64),
    row_tokens=(256, 1024, 4096, 8192),
    head_size=(64, 128),
    numbers=(2**12, 2**16, 2**20, 2**24, 2**27),
    bytes=(2**10, 2**14, 2**18, 2**22, 2**26, 2**28),
    hidden=(256, 1024, 4096),
    steps=20,
    rounds=5,
    pool_numbers=2**29,
    disk_bytes=2**30,
)
TINY = Sizes(
    tokens=(8, 16),
    channels=(16, 32),
    heads=(2,),
    row_tokens=(8, 16),
    head_size=(8,),
    numbers=(2**8, 2**10),
    bytes=(2**8, 2**12),
    hidden=(32, 64),
    steps=4,
    rounds=2,
    pool_numbers=2**16,
    disk_bytes=2**12,
)
"""Those of tests."""


@dataclass(frozen=True)
class MeasureOptions:
    """Flags of a rank that measures."""

    output: str
    folder: str
    device: str
    precisions: tuple[Precision, ...]
    is_tiny: bool
    alone: str | None
    """File for the rates of a single rank, which a process of its own measures; None: this rank joins the others."""

    def sizes(self, *, is_host: bool) -> Sizes:
        if self.is_tiny:
            return TINY
        return ON_HOST if is_host else ON_ACCELERATOR


def read_options(arguments: Sequence[str]) -> MeasureOptions:
    """Return the flags of a rank, which the command writes."""
    parser = argparse.ArgumentParser(prog="python -m megatron.measuring.ranks", allow_abbrev=False)
    parser.add_argument("--output", required=True)
    parser.add_argument("--folder", default=".")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--precisions", nargs="+", default=("fp32", "bf16", "fp16"))
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--alone")
    given = parser.parse_args(list(arguments))
    return MeasureOptions(given.output, given.folder, given.device, tuple(given.precisions), given.tiny, given.alone)
