"""Times of the ranks' own work, measured by straggler.py, and their statistics."""

from __future__ import annotations

import dataclasses
import statistics


@dataclasses.dataclass(frozen=True)
class StragglerStats:
    """Seconds a step over all ranks. Ranks are compared within their pipeline stage, where all have the same work."""

    own_time_min_s: float
    own_time_median_s: float
    own_time_max_s: float
    slowest_rank: int
    slowest_host: str
    slowest_ratio: float
    """Its own time divided by the median of its stage. own_time_max_s may be of another stage, which has more work."""
    data_wait_max_s: float
    data_wait_rank: int
    data_wait_host: str

    def __str__(self) -> str:
        low, median, high = (
            f"{seconds * 1000:.1f}" for seconds in (self.own_time_min_s, self.own_time_median_s, self.own_time_max_s)
        )
        return (
            f"own time (ms): min {low}, median {median}, max {high}"
            f" | slowest: rank {self.slowest_rank} on {self.slowest_host}, {self.slowest_ratio:.2f} x its stage"
            f" | longest wait for data (ms): {self.data_wait_max_s * 1000:.1f} on rank {self.data_wait_rank}"
        )


@dataclasses.dataclass(frozen=True)
class RankTimes:
    """Seconds a step of a single rank."""

    stage: int
    host: str
    own_s: float
    data_wait_s: float


def straggler_stats(times: list[RankTimes]) -> StragglerStats:
    """Return the statistics of all ranks' times, given in order of rank."""
    own = [each.own_s for each in times]
    medians = {
        stage: statistics.median(each.own_s for each in times if each.stage == stage)
        for stage in {each.stage for each in times}
    }
    ratios = [each.own_s / medians[each.stage] if medians[each.stage] > 0 else 1.0 for each in times]
    slowest = max(range(len(times)), key=ratios.__getitem__)
    waiting = max(range(len(times)), key=lambda rank: times[rank].data_wait_s)
    return StragglerStats(
        own_time_min_s=min(own),
        own_time_median_s=statistics.median(own),
        own_time_max_s=max(own),
        slowest_rank=slowest,
        slowest_host=times[slowest].host,
        slowest_ratio=ratios[slowest],
        data_wait_max_s=times[waiting].data_wait_s,
        data_wait_rank=waiting,
        data_wait_host=times[waiting].host,
    )
