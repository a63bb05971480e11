"""Ends a run that makes no progress, and reports which rank is the cause.

The loop reports its position (`phase`, `beat`: an attribute store and a clock read). A thread of each rank watches the
clock. A rank that makes no progress for too long writes the stacks of all its threads to the results folder and calls
the others, which do the same; one of them reports which rank does not answer, or does not wait for others; all end with
HUNG.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any

from megatron.options.config import Config
from megatron.parallel.context import ParallelContext
from megatron.parallel.messages import wait_for
from megatron.resilience.errors import OtherRankFailed, PeerLostError, is_lost_peer, is_passing
from megatron.resilience.rank_reports import FAILED, LOST, RUNNING, STUCK, LastSign, Report, verdict
from megatron.resilience.report_channel import Channel
from megatron.runtime.agent_link import AgentLink
from megatron.runtime.alerts import Alert, shortened
from megatron.runtime.commands import HUNG
from megatron.runtime.descriptors import shortage
from megatron.runtime.network import LOOPBACK, address_towards
from megatron.runtime.places import Places

if TYPE_CHECKING:
    from types import CodeType, FrameType

FOLDER = "faults"
"""In results_dir: a folder for each start of the run that ended by an error, with a file for each rank."""

ANSWER_S = 1.5
"""Time in which a rank that runs answers a call."""
DEPUTY_S = 2.0
"""Time after which the last rank prints the verdict in place of a rank 0 that does not."""
GIVE_UP_S = 2.5
"""Time after which a rank without a verdict prints its own state."""
LINGER_S = 2.0
"""Time that a rank that lost another stays: a launcher must see the other one end first, for its status."""
TIMER_SLACK_S = 2.3
"""Delay of faulthandler's timer behind the thread. The other ranks have ended by then, so theirs is the status."""


class Watchdog:
    """Watches from entering to leaving this context. Without entering it, all methods do nothing.

    Without a timeout nothing watches, but the agent of the rank is informed all the same. `phase` and `beat` may be
    called from the main thread only, `beat_of` from any.
    """

    def __init__(self, config: Config):
        self._timeout_s = config.effective_watchdog_timeout_s
        # checkpoints are read, indices built and layers compiled: collectives wait as long for a rank that does
        self._startup_s = max(self._timeout_s, config.parallel.distributed_timeout_minutes * 60)
        self._allowed_s = self._startup_s
        self._results_dir = config.logging.results_dir
        self._alerts = bool(config.logging.alert_command or config.logging.alert_webhook)
        self._verbose = os.environ.get("MEGATRON_VERBOSE") == "1"
        self.rank, self._world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        self._host, self._main = socket.gethostname(), threading.main_thread().ident
        self._look_s = min(2.0, max(0.1, self._timeout_s / 20))
        self._thread: threading.Thread | None = None
        self._leaving = threading.Event()
        self._channel: Channel | None = None
        self._agent: AgentLink | None = None
        self._folder: Path | None = None
        self._file: IO[str] | None = None
        self._state, self._fault = RUNNING, ""
        self._may_pass = self._repeats_another = False
        self._remark = self._stragglers = ""
        self._has_verdict = threading.Event()
        self._phase: tuple[str, int, float] = ("start", 0, time.monotonic())
        self._beat_s = self._phase[2]
        self._helped: tuple[object, float] = (None, 0.0)
        self._next_look_s, self._stuck_s = 0.0, 0.0
        self._broken = False

    @property
    def step(self) -> int:
        """Step of the current phase."""
        return self._phase[1]

    # Called by the main thread

    def phase(self, name: str, step: int = 0) -> None:
        """Begin a phase of a step (0: before the first)."""
        now_s = time.monotonic()
        self._beat_s = now_s
        is_new = step > self._phase[1]
        # one assignment: the other thread reads all three at once
        self._phase = (name, step, now_s)
        if is_new:  # the agent has to know it also of a rank that is killed
            self._inform_agent(step=step)

    def saved(self, iteration: int) -> None:
        """Report a complete checkpoint to the agent, which counts restarts from there."""
        self._inform_agent(saved=iteration)

    def note(self, remark: str) -> None:
        """Report a fault of this rank's own part of a step, so that it is known if the rank ends."""
        self._remark = remark
        self._send(self._report())

    def alert(self, event: str, message: str) -> None:
        """Have the agent alert of an event of the run (`megatron.runtime.alerts`). From rank 0 alone."""
        if self.rank == 0:
            alert = Alert(event, shortened(message), self.rank, self.step or None)
            self._inform_agent(alert=dataclasses.asdict(alert))

    def note_stragglers(self, stragglers: str) -> None:
        """Keep the text that names the slow ranks, empty where there are none, for the verdict. On rank 0."""
        self._stragglers = stragglers

    def beat(self) -> None:
        """Report progress in the current phase."""
        self._beat_s = time.monotonic()

    def beat_of(self, phase: str) -> None:
        """Report progress from another thread. It counts only while the main thread is in this phase."""
        present = self._phase
        if present[0] == phase:
            self._helped = (present, time.monotonic())

    def started(self) -> None:
        """Shorten the timeout: the first step, which takes longest, is done."""
        self._allowed_s = self._timeout_s

    # Start and end

    def __enter__(self) -> Watchdog:
        self._agent = AgentLink()
        if self._alerts and self.rank == 0 and not self._agent.is_connected:
            self._print("WARNING: no alerts are sent: the launcher's agent does, which has not started this rank")
        if self._timeout_s:
            faulthandler.enable()  # a segmentation fault prints its stacks too
            self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
            self._thread.start()
        return self

    def connect(self, ctx: ParallelContext) -> None:
        """Connect to the other ranks. Collective."""
        if self._thread is None:
            return
        address = address_towards(os.environ["MASTER_ADDR"]) or LOOPBACK
        channel = Channel(ctx, address)
        started = time.strftime("%Y%m%d-%H%M%S", time.localtime(ctx.broadcast(int(time.time()))))
        if self._results_dir is not None:
            self._folder = Path(self._results_dir) / FOLDER / started
        self._channel = channel
        self._inform_agent(watchdogs=channel.for_agent())

    def open(self) -> None:
        """Open the file for the stacks: while native code holds the interpreter's lock it cannot be opened."""
        if self._thread is not None and self._folder is not None:
            with contextlib.suppress(OSError):
                self._open()

    def _open(self) -> IO[str] | None:
        """Return this rank's file; None where the run has no folder. Raises OSError."""
        if self._file is None and self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
            file = open(self._folder / f"rank_{self.rank:05d}.txt", "w", encoding="utf-8")  # noqa: SIM115 - kept open
            file.write(f"rank {self.rank} on {self._host} (process {os.getpid()}); removed when the run succeeds\n")
            file.flush()
            self._file = file
        return self._file

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._thread is None:
            return
        self._leaving.set()
        if self._channel is not None:
            self._channel.interrupt()
        self._thread.join(timeout=GIVE_UP_S)
        faulthandler.cancel_dump_traceback_later()
        if self._channel is not None:
            self._channel.close()
        if self._file is not None:
            with contextlib.suppress(OSError):  # on a full disk the error that ends the run must remain
                self._file.close()
            if error is None or self._state == RUNNING:
                with contextlib.suppress(OSError):
                    os.unlink(self._file.name)
                    assert self._folder is not None
                    os.rmdir(self._folder)  # by the last rank
                    os.rmdir(self._folder.parent)

    def await_place(self, places: Places, error: BaseException) -> bool:
        """Report that this rank has left its round by `error`, and wait for its place in the next; False: none comes.

        The traceback goes to the folder before, and is removed where a place comes: an agent that ends kills this rank.
        """
        if self._thread is not None:
            self._write_traceback(self._report(), error, LOST)
        self.phase("waiting for a new rank", self.step)
        self._inform_agent(left=True)
        has_come = places.take_next(self.beat)
        if not has_come:
            self._inform_agent(left=False)  # else the agent counts on this rank until it has ended
        return has_come

    def fail(self, error: BaseException) -> BaseException:
        """Report `error`, which ends this rank, to the others and to the folder. Return the error to raise.

        Where a collective failed because another rank has ended, this waits for the verdict that names it and returns
        PeerLostError; the traceback goes to the folder, and to stderr with MEGATRON_VERBOSE=1.
        """
        own = shortage()
        if own is not None:  # under which torch and gloo report other things
            error = own
        reported_s = time.monotonic()
        lost = self._world_size > 1 and is_lost_peer(error)
        self._may_pass, self._repeats_another = is_passing(error), isinstance(error, OtherRankFailed)
        if self._thread is not None and self._is_stuck():
            time.sleep(GIVE_UP_S + TIMER_SLACK_S)  # the thread ends the process
        # the fault first, and the state at once: the other thread may report in between
        self._fault, self._state = _reason(error, lost=lost), LOST if lost else FAILED
        report = self._report()
        if self._thread is not None:
            self._write_traceback(report, error, self._state)
        self._send(report)
        if lost:
            return self._lost_peer(report, error, reported_s)
        if self._thread is not None:
            if report.step and not isinstance(error, OtherRankFailed):
                self._print(f"{report.name} failed {report.at}:")
            self.beat()  # ending may take as long
        return error

    def _is_stuck(self) -> bool:
        return self._state == STUCK or (self._channel is not None and self._channel.call == STUCK)

    def _write_traceback(self, report: Report, error: BaseException, state: str) -> None:
        """Write it to the folder, but for a run that is refused at its start, which writes no file."""
        with contextlib.suppress(OSError, ValueError):
            if state == FAILED and self._file is None:
                return
            file = self._open()
            if file:
                file.write(f"{report.name} {state} {report.at}\n")
                traceback.print_exception(error, file=file)
                file.flush()

    def _lost_peer(self, report: Report, error: BaseException, reported_s: float) -> PeerLostError:
        """Wait for the verdict that names the rank that has ended, and return the error to raise."""
        if self._thread is None:
            return PeerLostError(f"lost touch with another rank {report.at}: {self._fault}")
        if self._verbose:
            self._print("".join(traceback.format_exception(error)))
        heard = self._channel is not None and self._has_verdict.wait(timeout=GIVE_UP_S + self._look_s)
        time.sleep(max(0.0, reported_s + LINGER_S - time.monotonic()))
        self.beat()
        if heard:
            return PeerLostError("")
        story = f"{report.name} lost touch with another rank {report.at}: {self._fault}"
        if self._folder is not None:
            story += f"; tracebacks: {self._folder}"
        return PeerLostError(story)

    # The thread

    def _watch(self) -> None:
        while not self._leaving.is_set():
            try:
                self._look()
            except Exception as error:
                if not self._leaving.is_set() and not self._broken:
                    self._broken = True
                    self._print(f"rank {self.rank}: the watchdog goes on after {type(error).__name__}: {error}")
                time.sleep(0.1)

    def _look(self) -> None:
        """Read the clock, send and print what is due, then receive until the next look."""
        now_s = time.monotonic()
        is_over = now_s >= self._deadline_s()
        if not self._stuck_s and (is_over or (self._channel and self._channel.call == STUCK)):
            self._stuck_s = self._next_look_s = now_s
            self._become_stuck(is_over)
        if now_s >= self._next_look_s:
            self._next_look_s = now_s + self._look_s
            if self._state != RUNNING:  # until the verdict, reports are sent often: datagrams may get lost
                self._next_look_s = now_s + 0.1
            self._set_timer()  # first: it would end a healthy run in which what follows fails
            self._send(self._report())
        self._print_verdict()
        if self._stuck_s and (self._has_verdict.is_set() or now_s - self._stuck_s > GIVE_UP_S):
            if not self._has_verdict.is_set():
                self._print(f"watchdog: {self._own_story()}")
            os._exit(HUNG)  # a collective that hangs cannot be left in another way
        until_s = self._deadline_s()
        if self._called:
            until_s = now_s + 0.1
        self._listen(min(self._next_look_s, until_s) - now_s)

    def _send(self, report: Report) -> None:
        """Send a report to the other ranks and to the agent."""
        if self._channel is not None:
            self._channel.send(report)
        self._inform_agent(report=dataclasses.asdict(report))

    @property
    def _called(self) -> bool:
        return self._state != RUNNING or (self._channel is not None and self._channel.call != "")

    def _listen(self, timeout_s: float) -> None:
        if self._channel is None:
            self._leaving.wait(min(max(0.0, timeout_s), self._look_s))
        elif self._channel.wait(timeout_s):
            self._channel.send(self._report())

    def _deadline_s(self) -> float:
        last_s = self._beat_s
        helped_phase, helped_s = self._helped
        # the very tuple: a later phase of the same name is another one
        if helped_phase is self._phase:
            last_s = max(last_s, helped_s)
        return last_s + self._allowed_s

    # A thread cannot run while native code holds the interpreter's lock, so each rank also keeps a timer of
    # faulthandler, which needs no lock.
    def _set_timer(self) -> None:
        if self._stuck_s:
            return  # _become_stuck has set it
        left_s = max(0.0, self._deadline_s() - time.monotonic()) + TIMER_SLACK_S
        faulthandler.dump_traceback_later(left_s, exit=True, file=self._file or sys.__stderr__)  # type: ignore[arg-type]

    def _become_stuck(self, by_itself: bool) -> None:
        # if writing hangs too, on a file system that is gone, this timer still ends the process
        faulthandler.dump_traceback_later(GIVE_UP_S + TIMER_SLACK_S, exit=True, file=sys.__stderr__)  # type: ignore[arg-type]
        self._state, self._fault = STUCK, ""
        report = self._report()
        self._send(report)
        how = "stuck" if by_itself else "ended with the others"
        text = f"{report.name} {how} {report.at}, {report.where}\n"
        try:
            if file := self._open():
                file.write(f"{text}no sign of progress for {report.since_s:.1f} s\n")
                file.flush()
                faulthandler.dump_traceback(file, all_threads=True)
                return
        except (OSError, ValueError) as error:
            text += f"its stacks could not be written to {self._folder}: {error}\n"
        self._print(text.rstrip())
        faulthandler.dump_traceback(sys.__stderr__, all_threads=True)  # type: ignore[arg-type]

    def _print_verdict(self) -> None:
        """Print the verdict if this rank collects reports, and a call was answered or its time is over."""
        channel = self._channel
        if channel is None or self._has_verdict.is_set():
            return
        if channel.has_verdict:
            self._has_verdict.set()
            return
        if not channel.collects or not channel.call:
            return
        answers, silent = channel.sorted_reports(self._world_size)
        waited_s = time.monotonic() - channel.call_s
        if self.rank and waited_s < DEPUTY_S:
            return
        if waited_s < ANSWER_S and not _all_ended(channel, answers, silent):
            return
        lines = [
            f"watchdog: {self._headline(channel.call)}",
            verdict(channel.call, self._world_size, answers, silent, channel.endings, self._stragglers),
        ]
        if self._folder is not None:
            lines.append(f"  stacks and tracebacks of each rank: {self._folder}")
        text = "\n".join(lines)
        self._print(text)
        # where no agent has informed how rank 0 ended, that one may be lost with its host
        alone = self.rank != 0 and 0 not in channel.endings
        self._inform_agent(verdict={"text": shortened(text), "alone": alone})
        with contextlib.suppress(OSError):
            if self._folder is not None:
                self._folder.mkdir(parents=True, exist_ok=True)
                (self._folder / "verdict.txt").write_text(text + "\n", encoding="utf-8")
        channel.end()
        self._has_verdict.set()

    def _inform_agent(self, **message: Any) -> None:
        if self._agent is not None:
            self._agent.send(**message)

    def _headline(self, call: str) -> str:
        if call == LOST:
            return "ranks lost touch with each other; the run ends"
        return f"no progress for {self._allowed_s:g} s; the run ends"

    def _own_story(self) -> str:
        report = self._report()
        story = f"no progress for {self._allowed_s:g} s: {report.name} {report.at}, {report.where}"
        if self._world_size > 1:
            story += "; neither rank 0 nor the last rank answers"
        return story

    def _print(self, text: str) -> None:
        # not print(): the main thread may be stuck in it and hold its lock
        with contextlib.suppress(OSError):
            os.write(2, (text + "\n").encode())

    def _report(self) -> Report:
        name, step, _ = self._phase
        where, waits = _innermost(self._main)
        since_s = round(time.monotonic() - self._deadline_s() + self._allowed_s, 1)
        unreachable: list[str] = []
        if self._channel is not None:
            unreachable = self._channel.unreachable
        return Report(
            *(self.rank, self._host, os.getpid(), name, step, since_s, self._state, self._fault, where[-200:], waits),
            unreachable,
            self._may_pass,
            self._repeats_another,
            self._remark,
        )


STANDARD_LIBRARY = os.path.dirname(threading.__file__)
COLLECTIVES = (f"torch{os.sep}distributed{os.sep}", f"deepspeed{os.sep}comm{os.sep}")
"""Folders of the libraries whose calls wait for other ranks; `wait_for` is our own."""


def _all_ended(channel: Channel, answers: Mapping[int, Report], silent: Mapping[int, LastSign]) -> bool:
    """Return True where nothing more is to be heard of any rank."""
    # a rank that has not failed may be about to, because another one has ended
    if any(report.state == RUNNING for report in answers.values()) or not set(silent) <= set(channel.endings):
        return False
    # whether hosts reach each other takes its time
    return channel.is_one_host or bool(silent) or any(report.state == FAILED for report in answers.values())


def _reason(error: BaseException, *, lost: bool) -> str:
    """Return the first line of an error, with its type unless it says why a peer is lost."""
    lines = str(error).strip().splitlines()
    text = lines[0][:300] if lines else ""
    if lost and text:
        return text
    return f"{type(error).__name__}: {text}".removesuffix(": ")


def _is_standard(path: str) -> bool:
    return path.startswith(STANDARD_LIBRARY) and "site-packages" not in path


def _is_collective(code: CodeType) -> bool:
    return code is wait_for.__code__ or any(part in code.co_filename for part in COLLECTIVES)


def _innermost(main: int | None) -> tuple[str, bool]:
    """Return the main thread's innermost call outside of Python's library, and True if it waits in a collective.

    The backward pass that it started counts too.
    """
    frames: dict[int, FrameType] = sys._current_frames()
    # this function's own frame holds `frames`: together they would keep the activations in the main thread's variables
    # until the next garbage collection
    del frames[threading.get_ident()]
    frame = frames.get(main or 0)
    if frame is None:
        return "", False
    ours: FrameType | None = frame
    while ours is not None and _is_standard(ours.f_code.co_filename):
        ours = ours.f_back
    shown = ours or frame
    inner = [frame]
    if f"autograd{os.sep}graph.py" in frame.f_code.co_filename:
        inner += frames.values()  # a backward pass on an accelerator runs in threads of its own
    waits = any(_is_collective(each.f_code) for each in inner)
    return f"in {shown.f_code.co_name} ({shown.f_code.co_filename}:{shown.f_lineno})", waits
