"""Reports of the ranks on their state, and the verdict on a run that they lead to."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

from megatron.runtime.commands import first_of

SHOWN = 8
"""Number of ranks that a verdict names one by one."""

RUNNING, FAILED, LOST, STUCK = "running", "failed", "lost", "stuck"
"""States of a rank: `failed` by an error of its own, `lost` when a collective failed, `stuck` without progress."""


@dataclasses.dataclass(frozen=True)
class Report:
    """State of a rank."""

    rank: int
    host: str
    pid: int
    phase: str
    step: int
    since_s: float
    """Time since its last progress."""
    state: str = RUNNING
    fault: str = ""
    where: str = ""
    """Innermost call of its main thread."""
    waits: bool = False
    """It waits for other ranks in a collective."""
    unreachable: Sequence[str] = ()
    """Hosts that this rank's host does not reach, once a rank has called (report_channel.py, HostProbe)."""
    may_pass: bool = False
    """Its error may not come again (errors.is_passing)."""
    repeats_another: bool = False
    """Its error only names the error of another rank (errors.OtherRankFailed)."""
    remark: str = ""
    """Fault of its own part of an earlier step (attribution.py), which may be the cause."""

    @property
    def name(self) -> str:
        return f"rank {self.rank} on {self.host} (process {self.pid})"

    @property
    def at(self) -> str:
        if self.step == 0:
            return f"before the first step, {self.phase}"
        return f"in step {self.step}, {self.phase}"


LastSign = tuple[Report | str, float]
"""Last report of a rank that does not answer, or its host if there is none, and how many seconds ago it came."""


def verdict(
    call: str,
    world_size: int,
    answers: Mapping[int, Report],
    silent: Mapping[int, LastSign],
    endings: Mapping[int, str] = MappingProxyType({}),
    stragglers: str = "",
) -> str:
    """Return the state of every rank when the run ended, the ranks that caused it first.

    `answers`: reports of the ranks that answered the call; `silent`: the other ranks. `endings`: how the processes of
    silent ranks ended, where known. `stragglers`: ranks that were slower than the others, as text.
    """
    reports = [report for _, report in sorted(answers.items())]
    lost = [report for report in reports if report.state == LOST]
    others = [report for report in reports if report.state not in (FAILED, LOST)]
    links = _link_lines(answers, silent)
    hanging: list[Report] = []
    description, ended = "", "ran on"
    if call == STUCK:
        hanging, description = _hanging(others, is_link_broken=bool(links))
        ended = "came no further"
    causes = [*links, *_silent_lines(answers, silent, endings)]
    causes += [_failed(report) for report in reports if report.state == FAILED]
    causes += [_hangs(report, description) for report in hanging]
    lines = _first(causes)
    if not causes:
        lines = _faults(lost)
    lines += _grouped(lost, "lost touch with another rank", world_size)
    bystanders = [report for report in others if report not in hanging]
    lines += _bystander_lines(bystanders, ended, world_size)
    if stragglers:
        lines.append(f"slower than expected {stragglers}")
    return "\n".join(f"  {line}" for line in lines)


def _first(causes: Sequence[str]) -> list[str]:
    lines = list(causes[:SHOWN])
    if len(causes) > SHOWN:
        lines.append(f"and {len(causes) - SHOWN} more such ranks")
    return lines


def _faults(lost: Sequence[Report]) -> list[str]:
    """Return the errors of ranks that lost touch, which no other rank explains."""
    return [f"{report.name}: {report.fault}" for report in lost[:SHOWN] if report.fault]


def _bystander_lines(reports: Sequence[Report], description: str, world_size: int) -> Iterator[str]:
    yield from _grouped([report for report in reports if report.waits], "waited for others", world_size)
    yield from _grouped([report for report in reports if not report.waits], description, world_size)


def _silent_lines(
    answers: Mapping[int, Report], silent: Mapping[int, LastSign], endings: Mapping[int, str]
) -> Iterator[str]:
    """Yield what is known of each rank that does not answer, but on hosts that are not reached."""
    unreached = _unreached_hosts(answers, silent)
    for rank, (last, ago_s) in sorted(silent.items()):
        if isinstance(last, Report) and last.state == FAILED:
            yield _failed(last)
        elif _host(last) in unreached:
            continue  # the line of the host names it
        elif isinstance(last, str):
            yield f"rank {rank} on {last} {endings.get(rank, 'was never heard of')}"
        else:
            ending = endings.get(rank, "does not answer: it ended, is stopped, or is stuck in native code")
            yield f"{last.name} {ending}; last heard of {ago_s:.1f} s ago, {last.at}{_earlier(last)}"


def _host(last: Report | str) -> str:
    return last if isinstance(last, str) else last.host


def _grouped(reports: Sequence[Report], description: str, world_size: int) -> Iterator[str]:
    """Yield a line for the ranks of each step and phase."""
    for at in dict.fromkeys(report.at for report in reports):
        ranks = [report.rank for report in reports if report.at == at]
        yield f"{_numbered(ranks, world_size)} {description} {at}"


def _failed(report: Report) -> str:
    return f"{report.name} failed {report.at}: {report.fault}{_earlier(report)}"


def _hangs(report: Report, description: str) -> str:
    since = f"since {report.since_s:.1f} s, {report.where}"
    return f"{report.name} {description}: {report.at}, {since}{_earlier(report)}"


def _earlier(report: Report) -> str:
    if not report.remark:
        return ""
    return f"; {report.remark}"


def _unreached_hosts(answers: Mapping[int, Report], silent: Mapping[int, LastSign]) -> dict[str, list[int]]:
    """Return the silent ranks of each host of which none answers, and which another host does not reach."""
    unreached = {host for report in answers.values() for host in report.unreachable}
    unreached -= {report.host for report in answers.values()}
    ranks_by_host: dict[str, list[int]] = {}
    for rank, (last, _) in sorted(silent.items()):
        if _host(last) in unreached:
            ranks_by_host.setdefault(_host(last), []).append(rank)
    return ranks_by_host


def _link_lines(answers: Mapping[int, Report], silent: Mapping[int, LastSign]) -> list[str]:
    """Return what is known of hosts that do not reach each other."""
    unreached = _unreached_hosts(answers, silent)
    lines = [_unreached_line(host, ranks, answers, silent) for host, ranks in unreached.items()]
    # each in one order, since either host may have noticed
    pairs = {
        (min(report.host, other), max(report.host, other))
        for report in answers.values()
        for other in set(report.unreachable) - set(unreached)
    }
    lines += [
        f"the link between {one} and {other} is broken: both run, and do not reach each other"
        for one, other in sorted(pairs)
    ]
    return lines


def _unreached_line(
    host: str, ranks: Sequence[int], answers: Mapping[int, Report], silent: Mapping[int, LastSign]
) -> str:
    witnesses = sorted({report.host for report in answers.values() if host in report.unreachable})
    last, ago_s = min((silent[rank] for rank in ranks), key=lambda sign: sign[1])
    are = "is" if len(ranks) == 1 else "are"
    line = (
        f"host {host} is not reached from {first_of(witnesses, SHOWN)}: it is down, or its link is; "
        f"{_numbered(ranks, 0)} on it {are} silent"
    )
    if isinstance(last, Report):
        line += f"; last heard of {ago_s:.1f} s ago, {last.at}"
    return line


def _hanging(reports: Sequence[Report], *, is_link_broken: bool) -> tuple[list[Report], str]:
    """Return the ranks that probably hang, and in which respect they differ.

    Those that do not wait, if others do; else, since waiting for an accelerator does not show, those at another step or
    phase than most.
    """
    busy = [report for report in reports if not report.waits]
    if busy and (len(busy) < len(reports) or len(reports) == 1):
        return busy, "does not wait for others"
    counts = Counter(report.at for report in reports)
    most = max(counts.values(), default=0)
    if 2 * most <= len(reports):  # no majority: either part may be the one that hangs
        return [], ""
    elsewhere = [report for report in reports if counts[report.at] < most]
    if is_link_broken and any(report.waits for report in elsewhere):
        return [], ""  # the rank behind a broken link may be a step ahead
    return elsewhere, "is elsewhere than most"


def _numbered(ranks: Sequence[int], world_size: int) -> str:
    if len(ranks) == world_size > 1:
        return "all ranks"
    plural = "s" if len(ranks) > 1 else ""
    return f"rank{plural} {first_of([str(rank) for rank in ranks], SHOWN)}"
