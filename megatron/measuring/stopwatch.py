"""Seconds of operations: medians of repeats that alternate with those of all others."""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

Run = Callable[[], object]
LEAST_S = 3e-4
"""Time that a repeat lasts at least: the clock and a wait for the device cost some microseconds."""
MOST_RUNS = 24
KEPT = 8
"""Outputs that are kept at once."""
LONG_S, FEW_ROUNDS = 4e-3, 3
"""Operations that are repeated in the first rounds alone."""


def synchronise(device: torch.device) -> None:
    """Wait until a device has done what it was given."""
    if device.type != "cpu":
        from deepspeed.accelerator import get_accelerator  # late: what is timed on a CPU alone does without its import

        get_accelerator().synchronize()


class Pool:
    """Memory that operands are taken from in turn, as layer follows layer: none is in a cache because it was just used.

    The first pass over new memory would count as well.
    """

    def __init__(self, numbers: int, dtype: torch.dtype, device: torch.device) -> None:
        self._memory = torch.randn(numbers, device=device, dtype=torch.float32).to(dtype)
        self._offset = 0

    def take(self, *shape: int, trained: bool = False) -> Tensor:
        """Return random numbers of this shape."""
        count = math.prod(shape)
        if count > len(self._memory):
            self._memory = self._memory.repeat(-(-count // len(self._memory)))
        if self._offset + count > len(self._memory):
            self._offset = 0
        found = self._memory[self._offset : self._offset + count].view(shape)
        # operands begin at a multiple of 64 bytes, as allocated ones do
        self._offset += -(-count // 32) * 32
        return found.detach().requires_grad_(trained)

    def copies(self, numbers: int) -> int:
        """Return how many operands of so many numbers lie in it at once, at most 8."""
        return max(1, min(8, len(self._memory) // max(1, numbers)))


@dataclass
class Case:
    """An operation to time."""

    key: Hashable
    prepare: Callable[[], Sequence[Run]]
    """Returns the operation on several operands, which are run in turn."""
    seconds: list[float] = field(default_factory=list)
    runs: int = 0

    def repeat(self, device: torch.device) -> None:
        """Time it once more."""
        operands = self.prepare()
        operands[0]()
        synchronise(device)
        if self.runs == 0:
            self.runs = self._calibrated(operands, device)
        # as a layer keeps its outputs for the backward pass: the next ones lie in other memory, which no cache holds
        kept: deque[object] = deque(maxlen=KEPT)
        begin = time.perf_counter()
        for number in range(self.runs):
            kept.append(operands[number % len(operands)]())
        synchronise(device)
        self.seconds.append((time.perf_counter() - begin) / self.runs)

    @staticmethod
    def _calibrated(operands: Sequence[Run], device: torch.device) -> int:
        begin = time.perf_counter()
        operands[0]()
        synchronise(device)
        once = max(time.perf_counter() - begin, 1e-7)
        return max(1, min(MOST_RUNS, math.ceil(LEAST_S / once)))

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


def measure(cases: Iterable[Case], device: torch.device, rounds: int, beat: Callable[[float], None]) -> list[Case]:
    """Time all cases in several rounds, and return them. `beat` is called with the share that is done."""
    cases = list(cases)
    for number in range(rounds):
        for place, case in enumerate(cases):
            # a long one is disturbed less, and would take most of the time
            if number < FEW_ROUNDS or case.median < LONG_S:
                case.repeat(device)
            beat((number * len(cases) + place + 1) / (rounds * len(cases)))
    return cases


def spread(cases: Iterable[Case]) -> float:
    """Return the middle half of the repeats over their median, of the median case."""
    return statistics.median(_spreads(cases))


def _spreads(cases: Iterable[Case]) -> Iterator[float]:
    yield 0.0
    for case in cases:
        if len(case.seconds) >= 4:
            low, _, high = statistics.quantiles(case.seconds, n=4)
            yield (high - low) / case.median


def copies(sizes: Sequence[int], device: torch.device) -> Iterator[Case]:
    """Yield copies of so many bytes within the memory of the device, and to the host's."""
    for size in sizes:

        def prepare(size: int = size) -> list[Run]:
            source, target = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
            return [lambda: target.copy_(source)]

        yield Case(("copy", size), prepare)
        if device.type != "cpu":

            def prepare_host(size: int = size) -> list[Run]:
                source = torch.zeros(size, dtype=torch.uint8, device=device)
                target = torch.zeros(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
                return [lambda: target.copy_(source)]

            yield Case(("host_copy", size), prepare_host)
