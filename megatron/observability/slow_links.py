"""Slow links, as against slow ranks and a busy machine.

Where steps take longer than before, or at an interval, all ranks measure their links between two steps
(resilience/link_probe.py). A link is slow if it is far below links like it, or below itself at the start, in two probes
some steps apart, while neither of its ranks computes longer.
"""

from __future__ import annotations

import math
import socket
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron.observability.rank_times import gather_numbers
from megatron.observability.slow_steps import divides_passes
from megatron.parallel.phase_clock import WAIT
from megatron.resilience.link_probe import REPEATS, REPEATS_OF_SECOND, Link, LinkProbe
from megatron.resilience.rank_record import RankPlace
from megatron.runtime.commands import first_of
from megatron.runtime.devices import device_of

if TYPE_CHECKING:
    from megatron.options.config import Config
    from megatron.parallel.context import ParallelContext

CHECK = 10
"""Steps from one look at their times to the next, which is also where a second probe follows a first."""
WARM_UP = 3
"""First steps that are not counted: they allocate and compile."""
LONGER = 1.15
"""Median time of the last steps divided by the usual one, above which links are probed."""
APART = 20
"""Least steps between a probe and the next, but for the second of two."""
SAID_APART = 500
"""Least steps between two warnings of the same links."""
LOW = 0.5
"""Share of the expected rate below which a link is slow."""
LEAST_LIKE = 2
"""Other links like it that a link is compared with at least."""
OWN_SHARE = 0.5
"""Share of what a step takes longer above which a rank that computes longer by it is the reason."""
LEAST_OWN = 0.1
"""The same as a share of the usual step: less is noise."""
SHOWN = 4

REMEMBER, PROBE, SECOND = 1, 2, 4
"""Bits of rank 0's decision at a check; REMEMBER: the last steps are the usual ones; SECOND: of two probes."""
LINK, RANK, WAITING = "link", "rank", "waiting"
"""Causes of steps that take longer. `waiting`: neither a link nor a rank, such as a busy network or machine."""


class Rated(NamedTuple):
    """A link's rate in a probe, and the one expected of it."""

    link: Link
    bytes_per_s: float
    expected: float
    basis: str
    """Description of what is expected."""

    @property
    def share(self) -> float:
        return self.bytes_per_s / self.expected

    def to_json(self) -> dict[str, Any]:
        ranks = [self.link.one, self.link.other]
        return {"ranks": ranks, "kind": self.link.kind, "bytes_per_s": self.bytes_per_s, "of_expected": self.share}


@dataclass(frozen=True)
class Pace:
    """Seconds of the last steps: of all of it, and of each rank's own work."""

    step_s: float
    own_s: Sequence[float]


# ---------------------------------------------------------------------------------------------------------------------
# Verdicts, as pure functions of what all ranks measured


def rate_links(rates: Mapping[Link, float], at_start: Mapping[Link, float]) -> list[Rated]:
    """Return each link with the rate expected of it, the larger of the two that are known; the slowest first."""
    by_like: dict[str, list[float]] = {}
    for link in sorted(rates, key=lambda link: rates[link]):
        by_like.setdefault(link.like, []).append(rates[link])
    changes = {link: rates[link] / at_start[link] for link in rates}
    ordered = sorted(changes.values())
    rated = []
    for link, rate in rates.items():
        # all may have become slower, as on a machine that does something else too
        change = min(1.0, _median_of_others(ordered, changes[link])) if len(ordered) > 1 else 1.0
        expected = [(change * at_start[link], "its rate at the start")]
        if len(by_like[link.like]) > LEAST_LIKE:
            expected.append((_median_of_others(by_like[link.like], rate), f"the median {link.like}"))
        rated.append(Rated(link, rate, *max(expected)))
    return sorted(rated, key=lambda each: each.share)


def _median_of_others(ordered: Sequence[float], own: float) -> float:
    """Return the median, the higher of two, of all but one of these numbers, which are in order."""
    middle = (len(ordered) - 1) // 2
    # the others after it are one place further
    if ordered[middle] >= own:
        middle += 1
    return ordered[middle]


def longer_ranks(now: Pace, usual: Pace) -> list[int]:
    """Return the ranks whose own work, beyond the others', is the reason of what a step takes longer."""
    excess = [own - before for own, before in zip(now.own_s, usual.own_s, strict=True)]
    # of longer rows and larger batches all have more; of two ranks the lower one is what both have
    common_s = statistics.median_low(excess)
    least_s = max(OWN_SHARE * (now.step_s - usual.step_s - common_s), LEAST_OWN * usual.step_s)
    return [rank for rank, more_s in enumerate(excess) if more_s - common_s > least_s]


def describe(slow: Sequence[Rated], rated: Sequence[Rated], places: Sequence[RankPlace]) -> str:
    """Return the text that names slow links, and hosts all of whose links are slow."""
    slow_ends = {each.link for each in slow}
    texts = []
    hosts: set[str] = set()
    for host in dict.fromkeys(place.host for place in places):
        own = [each for each in rated if each.link.is_across_hosts and host in _hosts_of(each.link, places)]
        if len(own) > 1 and all(each.link in slow_ends for each in own):
            hosts.add(host)
            texts.append(f"all {len(own)} links of {host} with other hosts, {_rate_text(own[0])}")
    for each in slow:
        if not hosts & {*_hosts_of(each.link, places)}:
            one, other = (places[rank].name for rank in (each.link.one, each.link.other))
            texts.append(f"between {one} and {other}, {_rate_text(each)}")
    return first_of(texts, SHOWN, separator="; ")


def _hosts_of(link: Link, places: Sequence[RankPlace]) -> tuple[str, str]:
    return places[link.one].host, places[link.other].host


def _rate_text(rated: Rated) -> str:
    return f"{rated.bytes_per_s / 1e6:.0f} MB/s, {rated.share:.2f} of {rated.basis}"


# ---------------------------------------------------------------------------------------------------------------------


class LinkReport(NamedTuple):
    """A probe, on rank 0: its row of metrics.jsonl, and the text that names slow links, empty where it names none."""

    row: dict[str, Any]
    warning: str
    slowest_share: float


class LinkWatch:
    """Decides when links are measured, and what follows from it. Collective."""

    def __init__(self, ctx: ParallelContext, interval: int, *, sees_waits: bool) -> None:
        """`interval`: steps between two probes in any case; 0: none. `sees_waits`: no work of the clock's has waits."""
        self._ctx, self._interval, self._sees_waits = ctx, interval, sees_waits
        self._places: list[RankPlace] = ctx.gather_objects(RankPlace.of(ctx))
        self._probe = LinkProbe(ctx, self._places)
        self.is_busy: Callable[[int], bool] = lambda iteration: False
        """Returns whether a save in the background, or a profile, slows steps and links."""
        self._left_out = WARM_UP
        self._steps: deque[tuple[float, float]] = deque(maxlen=CHECK)
        """Seconds of each of the last steps, and of this rank's own work in it."""
        self._usual: tuple[float, float] | None = None
        """Their medians in the fastest steps so far."""
        # of rank 0
        self._settled_s, self._gap = math.inf, APART // 2
        """Time of steps that are longer than usual at the last probe, and steps after which they are probed again."""
        self._at_start: dict[Link, float] = {}
        self._suspects: set[Link] = set()
        """Slow links of the first probe of two; none: the next one is a first."""
        self._probed_at = 0
        self._said: tuple[set[Link], int] = (set(), 0)

    def add(self, clocked: Sequence[Mapping[str, float]]) -> None:
        """Count steps by their phases."""
        for phases in clocked:
            if self._left_out:
                self._left_out -= 1
                continue
            step_s = sum(phases.values())
            self._steps.append((step_s, step_s - phases.get(WAIT, 0.0)))

    def drop(self) -> None:
        """Forget the last steps, which a rollback has undone."""
        self._steps.clear()

    def check(self, iteration: int) -> LinkReport | None:
        """Probe the links if it is time; return what was found, on rank 0. Collective, every CHECK steps."""
        decision = self._ctx.broadcast(self._decide(iteration))
        if decision & REMEMBER:
            self._usual = self._medians()
        if decision & PROBE:
            return self._measure(iteration, REPEATS_OF_SECOND if decision & SECOND else REPEATS)
        return None

    def _medians(self) -> tuple[float, float]:
        step_s, own_s = (statistics.median(column) for column in zip(*self._steps, strict=True))
        return step_s, own_s

    def _decide(self, iteration: int) -> int:
        """Return rank 0's decision, which all ranks follow."""
        if len(self._steps) < CHECK // 2 or self.is_busy(iteration):
            return 0
        decision, (step_s, _) = 0, self._medians()
        if self._usual is None or step_s < self._usual[0]:
            decision |= REMEMBER
        since = iteration - self._probed_at
        is_due = self._interval and since >= self._interval
        if not self._at_start or is_due or self._is_longer(step_s, since):
            decision |= PROBE
        if self._suspects:
            decision |= PROBE | SECOND
        return decision

    def _is_longer(self, step_s: float, since: int) -> bool:
        """Return whether steps are longer than usual, and that is not settled. `since`: steps since the last probe."""
        if self._usual is None or step_s <= LONGER * self._usual[0]:
            self._settled_s, self._gap = math.inf, APART // 2
            return False
        # longer rows may have made them longer for good
        return since >= APART and (since >= self._gap or step_s > LONGER * self._settled_s)

    def _measure(self, iteration: int, repeats: int) -> LinkReport | None:
        """Probe, and return what follows from it, on rank 0. Collective."""
        assert self._usual is not None
        begin_s = time.perf_counter()
        seconds = self._probe.measure(repeats)
        table = gather_numbers([*self._medians(), *self._usual, *seconds], self._ctx)
        if not table:
            return None
        now, usual = (Pace(table[0][first], [row[first + 1] for row in table]) for first in (0, 2))
        rates = self._rates([row[4:] for row in table])
        self._at_start, self._probed_at = self._at_start or rates, iteration
        rated = rate_links(rates, self._at_start)
        longer = longer_ranks(now, usual) if self._sees_waits else []
        confirmed, cause = self._conclude(rated, longer, now, usual)
        row = {
            "iteration": iteration,
            "seconds": time.perf_counter() - begin_s,
            "bytes": self._probe.num_bytes,
            "steps_over_usual": now.step_s / usual.step_s,
            "cause": cause,
            "longer_ranks": longer,
            "slowest": [each.to_json() for each in rated[:SHOWN]],
        }
        warning = ""
        if confirmed and self._is_new(confirmed, iteration):
            warning = (
                f"slow link: {describe(confirmed, rated, self._places)}; in two probes up to step {iteration}, of "
                f"{row['seconds']:.2f} s; steps take {now.step_s / usual.step_s:.2f} x the usual time"
            )
        return LinkReport(row, warning, rated[0].share)

    def _rates(self, by_rank: Sequence[Sequence[float]]) -> dict[Link, float]:
        """Return the bytes a second of each link, its slower way, by the seconds of each rank in each round."""
        num_bytes = self._probe.num_bytes
        return {
            link: num_bytes / max(by_rank[link.one][number], by_rank[link.other][number])
            for number, members in enumerate(self._probe.rounds)
            for link in members
        }

    def _conclude(
        self, rated: Sequence[Rated], longer: Sequence[int], now: Pace, usual: Pace
    ) -> tuple[list[Rated], str | None]:
        """Return the links that two probes have found slow, and the cause of longer steps; None: not known, or none."""
        slow = [each for each in rated if each.share < LOW]
        # a rank without a core of its own computes longer, and sends slowly too: its links are measured again later
        judged = [each for each in slow if not {each.link.one, each.link.other} & {*longer}]
        confirmed = [each for each in judged if each.link in self._suspects]
        is_first = not self._suspects
        self._suspects = {each.link for each in judged} if is_first else set()
        if slow and not confirmed:
            return [], None
        self._settled_s, self._gap = now.step_s, 2 * self._gap
        if confirmed:
            return confirmed, LINK
        if now.step_s < LONGER * usual.step_s or not self._sees_waits:
            return [], None
        return [], RANK if longer else WAITING

    def _is_new(self, confirmed: Sequence[Rated], iteration: int) -> bool:
        """Return whether these links are to be named, and take note of it."""
        links, (said, said_at) = {each.link for each in confirmed}, self._said
        if links <= said and iteration - said_at < SAID_APART:
            return False
        self._said = links, iteration
        return True


def watch_links(config: Config, ctx: ParallelContext) -> LinkWatch | None:
    """Return what watches the links of a run; None: nothing does. Collective."""
    interval = config.logging.link_probe_interval
    if ctx.world_size == 1 or interval == 0:
        return None
    hosts = ctx.gather_objects(socket.gethostname())
    # within a host a link is rarely slow, and then from the start; over NCCL and HCCL no probe has run yet
    if interval is None and (len({*hosts}) == 1 or not device_of(ctx.device.type).is_host):
        return None
    # a clock that runs divides the passes, or not, as it was started
    divides = divides_passes(config, ctx)
    if not ctx.state.clock.runs:
        ctx.state.clock.start(ctx.device, divides_passes=divides)
    # DeepSpeed gathers the parameters of a layer within its passes
    return LinkWatch(ctx, interval or 0, sees_waits=divides and config.optimizer.zero_stage < 3)
