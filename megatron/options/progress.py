"""Progress of a run: the counters that a checkpoint keeps and every layout continues from."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass
class RunningEstimate:
    """Exponentially weighted mean and variance, which follow a value that drifts.

    An outlier counts no more than the limit it went over: a single one moves the estimate little, a lasting change
    moves it there in time. Source: ZClip (arXiv:2504.02507), there for gradient norms.
    """

    steps: int = 0
    mean: float = 0.0
    variance: float = 0.0

    def limit(self, threshold: float, window: int) -> float:
        """Return `threshold` standard deviations above the mean; infinity before `window` steps."""
        # too few values for a deviation that means something
        if self.steps < window:
            return math.inf
        return self.mean + threshold * math.sqrt(self.variance)

    def follow(self, value: float, threshold: float, window: int) -> None:
        """Add one finite value."""
        # first clipped by the estimate so far, then added to it
        value = min(value, self.limit(threshold, window))
        self.steps += 1
        # equal weights at first, so that the estimate does not depend on the very first value alone
        weight = max(1 / self.steps, 2 / (window + 1))
        # with weight 1 / n Welford's mean and variance, then their exponential form: V = (1 - w)(V + w d^2)
        difference = value - self.mean
        self.mean += weight * difference
        self.variance = (1 - weight) * (self.variance + weight * difference * difference)


@dataclass
class BestEvaluation:
    """The best validation so far, and the count of those without an improvement."""

    measure: str = ""
    """Basis of the comparison: the metric, the better direction and the data."""
    value: float | None = None
    """None: no validation yet with a finite value."""
    iteration: int = 0
    evaluated_at: int = 0
    """Iteration of the last validation that was counted."""
    reference: float | None = None
    """The value that an improvement has to pass by early_stopping_min_delta."""
    not_improved: int = 0
    """Validations in a row that did not."""


@dataclass
class Progress:
    """Counters of a run. Global: equal on every rank, and enough to continue on any data-parallel size."""

    iteration: int = 0
    consumed_samples: int = 0
    consumed_tokens: int | None = None
    """Tokens of these samples, set when they are saved. None: not known."""
    skipped_iterations: int = 0
    nan_iterations: int = 0
    skipped_in_a_row: int = 0
    recent_skips: list[int] = field(default_factory=list)
    """Skipped iterations that the guard's window still counts."""
    rollbacks: int = 0
    """Rollbacks since the last checkpoint from beyond all samples that are left out."""
    left_out: list[tuple[int, int]] = field(default_factory=list)
    """[from, to) of the samples that rollbacks leave out; sorted, with gaps between them."""
    loss: RunningEstimate = field(default_factory=RunningEstimate)
    log_grad_norm: RunningEstimate = field(default_factory=RunningEstimate)
    best: BestEvaluation = field(default_factory=BestEvaluation)

    @classmethod
    def from_saved(cls, saved: Mapping[str, Any]) -> Progress:
        """Return the progress saved as dataclasses.asdict and JSON. Raises TypeError or ValueError."""
        # a counter that an older checkpoint lacks has its default
        values = dict(saved)
        for name in ("loss", "log_grad_norm"):
            if name in values:
                values[name] = RunningEstimate(**values[name])
        if "best" in values:
            values["best"] = BestEvaluation(**values["best"])
        if "left_out" in values:
            values["left_out"] = [(int(begin), int(end)) for begin, end in values["left_out"]]
        return cls(**values)

    def counted_in(self, seq_length: int, own_length: int) -> Progress:
        """Return the progress with samples of `seq_length` tokens counted as samples of `own_length`.

        Raises ValueError where they are no whole number of these.
        """
        tokens = self.consumed_samples * seq_length
        if tokens % own_length:
            raise ValueError(
                f"{self.consumed_samples} samples of seq_length={seq_length} are {tokens} tokens, not a multiple of "
                f"seq_length={own_length}"
            )
        # what rollbacks leave out are samples of data that is cut otherwise now
        return replace(self, consumed_samples=tokens // own_length, consumed_tokens=tokens, left_out=[])

    def leaves_out(self, begin: int, end: int) -> bool:
        """Return whether a step over any of these samples is skipped as a whole."""
        # half-open: a step that begins where a gap ends is not in it
        return any(begin < stop and start < end for start, stop in self.left_out)

    def leave_out(self, begin: int, end: int) -> None:
        merged = [(begin, end)]
        for start, stop in sorted(self.left_out):
            # touching ranges too; merged[0] is the new one, which grows over all that it reaches
            if start <= merged[0][1] and merged[0][0] <= stop:
                merged[0] = (min(start, merged[0][0]), max(stop, merged[0][1]))
            else:
                merged.append((start, stop))
        self.left_out = sorted(merged)


def tokens_of_run(of_data: Callable[[int], int], start: Progress) -> Callable[[int], int]:
    """Return a function: the number of tokens in the first samples of a run that starts, or resumes, at `start`.

    `of_data` counts the samples of its data. Of another length, as after a resume with another seq_length, are those
    before `start`: they count as they were read.
    """
    before = 0
    # the difference between what was counted while reading and what this data would give: constant from here on
    if start.consumed_tokens is not None:
        before = start.consumed_tokens - of_data(start.consumed_samples)
    return lambda samples: before + of_data(samples)
