"""The state of a run, by what its results folder holds: no process of the job is needed. No torch."""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.checkpoint.folders import checkpoint_folders
from megatron.observability.report.recorded import ReportedRun
from megatron.observability.run_plots import Row
from megatron.plan.campaign.failures import duration
from megatron.runtime.commands import counted, first_of

RECENT = 16
"""Rows of steps over which rates are medians."""
SILENT_ROWS, LEAST_SILENCE_S = 10, 120.0
"""Times of a row, and seconds at least, without a new row after which a run without an end is called silent: saves and
validations take their time too."""
FIRST_SILENCE_S = 1800.0
"""The same before the first row of a step: compiling may take as long as collectives wait, by default."""
SHOWN_WARNINGS = SHOWN_FAULTS = 3
"""Newest ones that are shown."""
SHOWN_HOSTS = 4
MARGIN = 16
"""Columns before a value."""


@dataclass(frozen=True)
class RunStatus:
    """A run at a moment."""

    name: str
    state: str
    """running, silent, done, stopped or failed."""
    reason: str
    """The reason of its end, the time for which it has been silent, or that no step is logged yet."""
    iteration: int
    last_iteration: int | None
    loss: float | None
    tokens_per_second: float | None
    step_s: float | None
    left_s: float | None
    """Seconds until the end at this rate; None: it has ended, or its end is not known."""
    ends_s: float | None
    """Unix time of that end."""
    row_age_s: float
    save: str
    hosts: tuple[str, ...]
    ranks: int
    starts: int
    refused_steps: int
    wrong_ranks: str
    """Number of the rechecks that named ranks, and the finding of the last; empty: none did."""
    faults: tuple[str, ...]
    """Ends of the starts that were none, the newest last."""
    warnings: tuple[str, ...]

    @property
    def is_well(self) -> bool:
        return self.state in ("running", "done", "stopped")

    def lines(self) -> Iterator[str]:
        """Yield the status, a name and a value of MARGIN columns on a line."""
        step = (
            f"{self.iteration:,}" if self.last_iteration is None else f"{self.iteration:,} of {self.last_iteration:,}"
        )
        facts = {
            "state": f"{self.state}{self.reason and f': {self.reason}'}",
            "step": step if self.loss is None else f"{step}, loss {self.loss:.4f}",
            "rate": _rate(self.tokens_per_second, self.step_s),
            "left": self._end(),
            "newest row": f"{duration(self.row_age_s)} ago",
            "newest save": self.save,
            "ranks": f"{self.ranks} on {first_of(self.hosts, SHOWN_HOSTS)}" if self.ranks else "",
            "starts": f"{self.starts}, {counted(len(self.faults), 'fault')}" if self.starts else "",
            "refused steps": f"{self.refused_steps:,}" if self.refused_steps else "",
            "wrong ranks": self.wrong_ranks,
        }
        yield self.name
        yield from (f"  {name:<14}{text}" for name, text in facts.items() if text)
        yield from (f"  {'fault':<14}{text}" for text in self.faults[-SHOWN_FAULTS:])
        yield from (f"  {'warning':<14}{text}" for text in self.warnings)

    def _end(self) -> str:
        if self.left_s is None or self.ends_s is None:
            return ""
        # in a terminal's own time zone
        at = time.strftime("%Y-%m-%d %H:%M", time.localtime(self.ends_s))
        return f"{duration(self.left_s)} at this rate, until {at}"


def _rate(tokens_per_second: float | None, step_s: float | None) -> str:
    parts = []
    if tokens_per_second is not None:
        parts.append(f"{tokens_per_second:,.0f} tokens/s")
    if step_s is not None:
        parts.append(f"{duration(step_s)} a step")
    return ", ".join(parts)


def status_of(run: ReportedRun, now_s: float | None = None) -> RunStatus:
    """Return the status of a run at a Unix time, by default now."""
    now_s = time.time() if now_s is None else now_s
    start = run.starts[-1].row if run.starts else {}
    steps = run.of_kind("train")
    # a run may end, or hang, before its first log line
    newest = steps[-1] if steps else {"iteration": _number(str(start.get("resumed_iteration"))) or 0}
    recent = steps[-RECENT:]
    age_s = max(0.0, now_s - _newest_s(run))
    step_s, rate = _median(recent, "iteration_time_s"), _median(recent, "tokens_per_second")
    state, reason = _state(run, age_s, step_s, recent)
    last = _number(run.options.get("train_iters"))
    left_s = None
    if state in ("running", "silent"):
        left_s = _left(run, newest, last, step_s, _median(recent, "samples_per_second"))
    hosts = start.get("hosts")
    return RunStatus(
        name=str(run.folder),
        state=state,
        reason=reason,
        iteration=newest["iteration"],
        last_iteration=last,
        loss=newest.get("lm_loss"),
        tokens_per_second=rate,
        step_s=step_s,
        left_s=left_s,
        ends_s=None if left_s is None else now_s + left_s,
        row_age_s=age_s,
        save=_newest_save(run, now_s),
        hosts=tuple(map(str, hosts)) if isinstance(hosts, dict) else (),
        ranks=start.get("world_size") or 0,
        starts=len(run.starts),
        refused_steps=len(run.of_kind("bad_step")),
        wrong_ranks=_wrong_ranks(run.of_kind("recheck")),
        faults=tuple(each.cause for each in run.starts if each.kind == "failed"),
        warnings=tuple(run.warnings)[-SHOWN_WARNINGS:],
    )


def _state(run: ReportedRun, age_s: float, step_s: float | None, recent: list[Row]) -> tuple[str, str]:
    if run.starts and run.starts[-1].kind != "open":
        kind, cause = run.starts[-1].kind, run.starts[-1].cause
        return kind, "" if kind == "done" else cause
    reason = ""
    if recent:
        steps = statistics.median(row.get("steps") or 1 for row in recent)
        limit_s = max(LEAST_SILENCE_S, SILENT_ROWS * steps * (step_s or 0.0))
    else:
        reason, limit_s = "no step is logged yet", FIRST_SILENCE_S
    if age_s > limit_s:
        return "silent", f"no row for {duration(age_s)}: it was killed, or hangs, or saves"
    return "running", reason


def _newest_s(run: ReportedRun) -> float:
    """Return the Unix time of the newest row or of the last start, whichever is later."""
    times = [float(row.get("time") or 0) for row in run.rows]
    return max([*times, *(start.began_s for start in run.starts[-1:])], default=0.0)


def _left(
    run: ReportedRun, newest: Row, last: int | None, step_s: float | None, samples_per_second: float | None
) -> float | None:
    """Return the seconds until the end of the schedule at the recent rate."""
    if last is not None and step_s is not None:
        return max(0, last - newest["iteration"]) * step_s
    samples = _number(run.options.get("train_samples"))
    if samples is not None and samples_per_second:
        return max(0, samples - int(newest.get("consumed_samples") or 0)) / samples_per_second
    return None


def _newest_save(run: ReportedRun, now_s: float) -> str:
    save = run.options.get("save", "unset")
    if save == "unset":
        return ""
    folder = Path(save)
    if not folder.is_absolute() and run.starts:  # as the run's own command had it
        folder = Path(str(run.starts[-1].row.get("folder") or "")) / folder
    with contextlib.suppress(OSError):
        if found := checkpoint_folders(folder):
            return f"{found[0].name}, {duration(max(0.0, now_s - found[0].stat().st_mtime))} ago, in {folder}"
    return f"none in {folder}"


def _wrong_ranks(rechecks: list[Row]) -> str:
    if not rechecks:
        return ""
    newest = rechecks[-1]
    text = f"{counted(len(rechecks), 'recheck')}, the last after iteration {newest['iteration']:,}: "
    text += str(newest.get("reason", ""))
    if not newest.get("is_certain"):
        text += "; it may be others that are wrong"
    return text


def _median(rows: list[Row], key: str) -> float | None:
    values = [float(row[key]) for row in rows if isinstance(row.get(key), int | float)]
    return statistics.median(values) if values and all(map(math.isfinite, values)) else None


def _number(text: Any) -> int | None:
    return int(text) if isinstance(text, str) and text.isdecimal() else None
