"""Policy of restarts: after each failure, whether and when the ranks start again, and why not.

A new checkpoint, of a later iteration than every one before, is progress. Without it restarts come later and later, are
limited, and end where the same error repeats.
"""

from __future__ import annotations

import random
import re
import signal
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from megatron.runtime.commands import ABORTED, FAILED, shell_status

FIRST_DELAY_S = 1.0
"""Delay of the second restart without progress. It doubles with each further one; the first comes at once."""
LONGEST_DELAY_S = 60.0
JITTER = 0.5
"""Largest part of a delay that chance takes away, so that runs that failed together do not read together."""
REPEATS = 3
"""Attempts that end by the same error, without progress between, before the run ends."""
MOST_FAILURES = 8
"""Failures of one node that are compared."""
NO_RANK = -1
_PATH = re.compile(r"(?:[\w.~-]*/)+[\w.~-]*")
_NUMBER = re.compile(r"0x[0-9a-fA-F]+|\d+")


@dataclass(frozen=True)
class Failure:
    """Rank, or other member of the run, that failed: how its process ended, and what it reported last."""

    rank: int
    """NO_RANK: another member."""
    host: str
    returncode: int
    step: int = 0
    """The last one begun; 0: none."""
    phase: str = ""
    state: str = ""
    """As in `megatron.resilience.rank_reports.Report`; empty where it sent none."""
    fault: str = ""
    may_pass: bool = False
    """Its error is one of a file system, a network or a lack of memory, which may not come again."""
    repeats_another: bool = False
    """Its error only names the error of another rank."""
    waits: bool = False
    """It waited for other ranks."""
    remark: str = ""
    """Fault of its own part of an earlier step; empty: none is known."""
    member: str = ""
    """Name of a member other than a rank, such as the process that ranks are forked from; empty: a rank."""

    @classmethod
    def of(cls, rank: int, host: str, returncode: int, step: int, report: Mapping[str, Any]) -> Failure:
        """Return the failure of a rank. `report`: the fields of its last report. `step`: the last one it began."""
        own = {"rank": rank, "host": host, "returncode": returncode, "step": max(step, int(report.get("step", 0)))}
        return cls.from_json({**report, **own})

    @classmethod
    def of_member(cls, member: str, host: str, returncode: int, *, fault: str = "") -> Failure:
        """Return the failure of a member other than a rank. `fault`: an error of the system, which may pass."""
        state = ""
        if fault:
            state = "failed"
        return cls(NO_RANK, host, returncode, state=state, fault=fault, may_pass=bool(fault), member=member)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Failure:
        """Return the failure with these values; others are left out. Raises ValueError, TypeError and KeyError."""
        kinds: dict[str, type] = {"rank": int, "returncode": int, "step": int}
        kinds |= {"may_pass": bool, "repeats_another": bool, "waits": bool}
        names = [field.name for field in fields(cls) if field.name in values]
        given: dict[str, Any] = {name: kinds.get(name, str)(values[name]) for name in names}
        return cls(**given)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def is_own(self) -> bool:
        """True if the rank is at fault, rather than one that it has lost.

        Libraries abort a rank that has lost another, so SIGABRT alone says nothing.
        """
        if self.member:
            return True
        if self.state == "failed":
            return not self.repeats_another
        return self.returncode < 0 and self.returncode != -signal.SIGABRT

    @property
    def hangs(self) -> bool:
        """True if it made no progress, and did not wait for other ranks."""
        return self.state == "stuck" and not self.waits

    @property
    def error(self) -> str:
        """Its error, or how it ended."""
        if self.state == "failed":
            return self.fault
        if self.hangs:
            return "no progress"
        return ending(self.returncode)

    @property
    def signature(self) -> tuple[int, int, str]:
        """Rank, step and error, without the numbers and paths that differ from attempt to attempt."""
        return self.rank, self.step, _NUMBER.sub("N", _PATH.sub("PATH", self.error))

    @property
    def when(self) -> str:
        """Step and phase."""
        if not self.step:
            return "before the first step"
        return ", ".join(filter(None, (f"in step {self.step}", self.phase)))

    @property
    def end(self) -> str:
        """The rank and its end."""
        name = self.member or f"rank {self.rank}"
        text = f"{name} on {self.host} {ending(self.returncode)}"
        if self.state == "failed":
            text += f" {self.when}: {self.fault}"
        return text

    def __str__(self) -> str:
        return "; ".join(filter(None, (self.end, self.remark)))


@dataclass(frozen=True)
class Decision:
    """Restart, its delay, or the end of the run, after a failure."""

    text: str
    """The failure and what follows, in a line."""
    restarts: bool
    delay_s: float = 0.0
    status: int = FAILED
    """Exit status of the run, if it ends."""
    has_progressed: bool = False
    """A new checkpoint has come since the failure before."""


class RestartPolicy:
    """Decisions on the failures of a run, in their order."""

    def __init__(self, max_restarts: int, draw: Callable[[], float] = random.random) -> None:
        """`max_restarts`: without progress between. `draw`: a number from 0 to 1 by chance."""
        self._max_restarts, self._draw = max_restarts, draw
        self.restarts = 0
        """All so far."""
        self._used = 0
        self._saved: int | None = None
        self._has_progressed = False
        self._attempts: Counter[tuple[int, int, str]] = Counter()
        """Number of attempts that ended by each error, since the last progress."""

    def note_saved(self, iteration: int | None) -> None:
        """Take note of the newest complete checkpoint that a rank knows; None: of none."""
        if iteration is not None and (self._saved is None or iteration > self._saved):
            self._saved, self._has_progressed = iteration, True

    def after(self, failures: Sequence[Failure], lost: str = "") -> Decision:
        """Decide after an attempt that ended by these failures, the first seen first; all nodes' together.

        `lost`: describes the node that was lost, which is the cause where no rank is; there may be no failure then.
        The first of these rules that holds decides:

        | without progress since             | decision                                           |
        |------------------------------------|----------------------------------------------------|
        | the same error ended REPEATS tries | the run ends, ABORTED: a restart would repeat it   |
        | all restarts are used up           | the run ends with the status of the first failure  |
        |                                    | restart; the first at once, further ones delayed   |
        """
        progressed = self._take_progress()
        causes = _causes(failures)
        first = next(iter(causes or failures), None)
        cause = str(first)
        if lost and not causes:
            cause = lost
        # an error that may pass never makes a crash loop: it uses up restarts alone
        # as a set, since attempts are counted
        self._attempts.update({one.signature for one in causes if not one.may_pass})
        repeated = [one for one in causes if self._attempts[one.signature] >= REPEATS]
        # before the restarts are counted: a rank's own status may let a scheduler start the run again, ABORTED does not
        if repeated:
            return Decision(_crash_loop(repeated[0]), restarts=False, status=ABORTED, has_progressed=progressed)
        if self._used >= self._max_restarts:
            text = f"{cause}; all {self._max_restarts} restarts are used up without a new checkpoint"
            status = FAILED
            if first is not None:
                status = shell_status(first.returncode)
            return Decision(text, restarts=False, status=status, has_progressed=progressed)
        self._used += 1
        self.restarts += 1
        delay_s = self._delay_s()
        text = f"{cause}; restart {self._used} of {self._max_restarts}"
        if self._saved:
            text += f" since the checkpoint of iteration {self._saved}"
        if delay_s:
            text += f", in {delay_s:.1f} s"
        return Decision(text, restarts=True, delay_s=delay_s, has_progressed=progressed)

    def _take_progress(self) -> bool:
        """Return whether there was progress since the last decision, with which all counts begin again."""
        progressed, self._has_progressed = self._has_progressed, False
        if progressed:
            self._used = 0
            self._attempts.clear()
        return progressed

    def _delay_s(self) -> float:
        if self._used == 1:
            return 0.0
        doublings = min(self._used - 2, 16)  # far beyond the longest delay
        return min(LONGEST_DELAY_S, FIRST_DELAY_S * 2**doublings) * (1.0 - JITTER * self._draw())


def _causes(failures: Sequence[Failure]) -> list[Failure]:
    """Return the failures that caused the others: errors of their own, else ranks that hang; none may be known."""
    # a rank that has lost another only repeats that it has
    own = [failure for failure in failures if failure.is_own]
    return own or [failure for failure in failures if failure.hangs]


def _crash_loop(failure: Failure) -> str:
    """Return the message that ends a crash loop."""
    text = failure.end
    if failure.state != "failed":  # else the end names the place
        text += f" {failure.when}"
    if failure.remark:
        text += f" ({failure.remark})"
    return (
        f"{text}: the same error {REPEATS} times without a new checkpoint, so a restart would repeat it. "
        "Correct its cause, then start the run again: it resumes the newest checkpoint"
    )


def ending(returncode: int) -> str:
    """Describe how a process ended."""
    if returncode >= 0:
        return f"ended with status {returncode}"
    try:
        return f"was killed by {signal.Signals(-returncode).name}"
    except ValueError:
        return f"was killed by signal {-returncode}"
