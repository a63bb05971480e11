"""Ends a run that makes no progress, and says which rank is to blame.

The loop says what it is at (`phase`, `beat`: an attribute store and a clock read). A thread of each rank looks at the
clock. A rank that has been at one thing for too long writes the stacks of all its threads to the run's folder and calls
the others, which do the same; one of them tells which rank does not answer, or waits for nobody; all end with HUNG. The
process ends by os._exit: a collective that hangs cannot be left in any other way.

The ranks' threads tell each other by datagrams to two collectors, rank 0 and the last rank, which usually are on
different hosts. (torch's TCPStore blocks for ever where its server is stopped.) A thread cannot run while native code
holds the interpreter's lock, so each also keeps a timer of faulthandler's, which needs no lock.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import json
import os
import random
import select
import socket
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any

from megatron.config.options import Config
from megatron.exit_codes import HUNG
from megatron.parallel.context import ParallelContext, address_towards
from megatron.resilience.errors import OtherRankFailed, PeerLostError, is_lost_peer

if TYPE_CHECKING:
    from types import FrameType

FOLDER = "faults"
"""In results_dir: a folder for each start of the run that did not end well, with a file a rank."""

ANSWER_S = 1.5
"""In which a rank that lives answers a call."""
DEPUTY_S = 2.0
"""After which the last rank speaks for a rank 0 that does not."""
GIVE_UP_S = 2.5
"""After which a rank that heard of no verdict speaks for itself."""
LINGER_S = 2.0
"""How long a rank that lost another stays: a launcher must see the other one end first, to go by its status."""
TIMER_SLACK_S = 2.3
"""After the thread's own time, faulthandler's timer. The other ranks have ended by then, so theirs is the status."""
SHOWN = 8
"""Ranks that a verdict names one by one."""

RUNNING, FAILED, LOST, STUCK = "running", "failed", "lost", "stuck"


@dataclasses.dataclass(frozen=True)
class Report:
    """What a rank tells of itself."""

    rank: int
    host: str
    pid: int
    phase: str
    step: int
    since_s: float
    """How long ago its last sign of progress was."""
    state: str = RUNNING
    """`failed`: by a fault of its own; `lost`: a collective failed; `stuck`: no progress."""
    fault: str = ""
    where: str = ""
    """The innermost call of its main thread."""
    waits: bool = False
    """Whether it waits for other ranks in a collective."""

    @property
    def name(self) -> str:
        return f"rank {self.rank} on {self.host} (process {self.pid})"

    @property
    def at(self) -> str:
        return f"in step {self.step}, {self.phase}" if self.step else f"before the first step, {self.phase}"


def verdict(
    call: str, world_size: int, answers: Mapping[int, Report], silent: Mapping[int, tuple[Report | str, float]]
) -> str:
    """What became of the run: the ranks that are to blame first.

    `answers`: of the ranks that answered the call. `silent`: of each other rank its host, or its last report, and how
    many seconds ago that came.
    """
    lines = []
    for rank, (last, ago_s) in sorted(silent.items()):
        if isinstance(last, str):
            lines.append(f"rank {rank} on {last} was never heard of")
        elif last.state == FAILED:
            lines.append(f"{last.name} failed {last.at}: {last.fault}")
        else:
            lines.append(
                f"{last.name} does not answer: it ended, is stopped, or is stuck in native code; last heard of "
                f"{ago_s:.1f} s ago, {last.at}"
            )
    others = [report for _, report in sorted(answers.items())]
    lines += [f"{report.name} failed {report.at}: {report.fault}" for report in others if report.state == FAILED]
    left = [report for report in others if report.state not in (FAILED, LOST)]
    if call == STUCK:
        odd, what = _odd_ones(left)
        lines += [f"{one.name} {what}: {one.at}, since {one.since_s:.1f} s, {one.where}" for one in odd]
        left = [report for report in left if report not in odd]
    head = lines[:SHOWN] + ([f"and {len(lines) - SHOWN} more such ranks"] if len(lines) > SHOWN else [])
    for what, those in (
        ("lost touch with another rank", [report for report in others if report.state == LOST]),
        ("waited for others", [report for report in left if report.waits]),
        ("came no further" if call == STUCK else "ran on", [report for report in left if not report.waits]),
    ):
        for at in dict.fromkeys(report.at for report in those):
            ranks = [report.rank for report in those if report.at == at]
            head.append(f"{_numbered(ranks, world_size)} {what} {at}")
    return "\n".join(f"  {line}" for line in head)


def _odd_ones(reports: Sequence[Report]) -> tuple[list[Report], str]:
    """Those that wait for nobody, if others do; or else (an accelerator's work shows no waiting) those that are
    elsewhere than most. And what is odd about them.
    """
    busy = [report for report in reports if not report.waits]
    if busy and (len(busy) < len(reports) or len(reports) == 1):
        return busy, "waits for nobody"
    places = [report.at for report in reports]
    counts = {place: places.count(place) for place in places}
    most = max(counts.values(), default=0)
    odd = [] if 2 * most <= len(reports) else [report for report in reports if counts[report.at] < most]
    return odd, "is elsewhere than most"


def _numbered(ranks: Sequence[int], world_size: int) -> str:
    if len(ranks) == world_size > 1:
        return "all ranks"
    shown = ", ".join(map(str, ranks[:SHOWN])) + (f" and {len(ranks) - SHOWN} more" if len(ranks) > SHOWN else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


class Channel:
    """Datagrams between the watchdogs of all ranks. Used by their threads; `send` also by the main one."""

    def __init__(self, ctx: ParallelContext, address: str):
        """Collective."""
        addresses = ctx.gather_objects(address)
        elsewhere = [other for other in addresses if not _is_loopback(other)]
        if _is_loopback(address) and elsewhere:  # the first host often has its own name for an address of that kind
            address = address_towards(elsewhere[0]) or address
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_DGRAM)
        self._socket.bind((address, 0))
        self._socket.setblocking(False)
        told = ctx.gather_objects((socket.gethostname(), *self._socket.getsockname()[:2]))
        self.hosts = [host for host, _, _ in told]
        self._collectors = {rank: told[rank][1:] for rank in (0, ctx.world_size - 1)}
        # other programs' datagrams, and another run's, are none of ours
        self._token = f"{ctx.broadcast(random.SystemRandom().getrandbits(62)):x}"
        self._rank = ctx.rank
        self.collects = ctx.rank in self._collectors
        self._addresses: dict[int, Any] = {}
        self.reports: dict[int, tuple[Report, float]] = {}
        """On a collector: each rank's last, and when it came."""
        self.call = ""
        """LOST or STUCK: a rank called all others."""
        self.call_s = 0.0
        self.verdict_is_told = False

    def send(self, report: Report) -> None:
        """Tell the collectors."""
        if self.collects:
            self._take(report)
        for rank, address in self._collectors.items():
            if rank != self._rank:
                self._send(address, {"report": dataclasses.asdict(report)})

    def wait(self, timeout_s: float) -> bool:
        """Take in what comes, for so long or until something has come; whether a call did that must be answered."""
        if not select.select([self._socket], [], [], max(0.0, timeout_s))[0]:
            return False
        called = False
        with contextlib.suppress(BlockingIOError):
            while True:
                try:
                    content, sender = self._socket.recvfrom(65536)
                except ConnectionError:  # an ICMP answer to what was sent: that collector has ended
                    continue
                called |= self._read(content, sender)
        return called

    def _read(self, content: bytes, sender: Any) -> bool:
        try:
            message = json.loads(content)
            if message.pop("token") != self._token:
                return False
            if "report" in message:
                report = Report(**message["report"])
                self._addresses[report.rank] = sender
                self._take(report)
                if self.call or self.verdict_is_told:
                    self._send(sender, {"call": self.call, "told": self.verdict_is_told})
                return False
            self.verdict_is_told |= message["told"]
            return self._heed(message["call"])
        except (ValueError, KeyError, TypeError, AttributeError):
            return False

    def _take(self, report: Report) -> None:
        self.reports[report.rank] = report, time.monotonic()
        if report.state in (LOST, STUCK) and self._heed(report.state):
            self._tell_all()

    def _heed(self, call: str) -> bool:
        """Note a call; whether it is a new one. A rank that is stuck outweighs one that lost another."""
        if not call or call == self.call or self.call == STUCK:
            return False
        self.call, self.call_s = call, time.monotonic()
        return True

    def end(self) -> None:
        """The verdict has been told: nobody need wait for it any longer."""
        self.verdict_is_told = True
        for _ in range(3):  # datagrams may get lost
            self._tell_all()

    def _tell_all(self) -> None:
        for address in self._addresses.values():
            self._send(address, {"call": self.call, "told": self.verdict_is_told})

    def _send(self, address: Any, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # a full buffer, no route: it is said again
            self._socket.sendto(json.dumps({"token": self._token, **message}).encode(), address)

    def judge(self, world_size: int) -> tuple[dict[int, Report], dict[int, tuple[Report | str, float]]]:
        """The answers to the call, and of whom there is none."""
        now_s = time.monotonic()
        answers = {rank: report for rank, (report, came_s) in self.reports.items() if came_s >= self.call_s}
        silent: dict[int, tuple[Report | str, float]] = {}
        for rank in set(range(world_size)) - set(answers):
            report, came_s = self.reports.get(rank, (self.hosts[rank], now_s))
            silent[rank] = report, now_s - came_s
        return answers, silent

    def close(self) -> None:
        self._socket.close()


class Watchdog:
    """A context manager: watches from entering to leaving. Without entering it, all methods do nothing.

    `phase` and `beat` may be called from the main thread only, `beat_of` from any.
    """

    def __init__(self, config: Config):
        self._timeout_s = config.effective_watchdog_timeout_s
        # checkpoints are read, indices built, layers compiled: collectives wait as long for a rank that does
        self._startup_s = max(self._timeout_s, config.parallel.distributed_timeout_minutes * 60)
        self._allowed_s = self._startup_s
        self._results_dir = config.logging.results_dir
        self._verbose = os.environ.get("MEGATRON_VERBOSE") == "1"
        self.rank, self._world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        self._host, self._main = socket.gethostname(), threading.main_thread().ident
        self._look_s = min(2.0, max(0.1, self._timeout_s / 20))
        self._thread: threading.Thread | None = None
        self._leaving = False
        self._channel: Channel | None = None
        self._folder: Path | None = None
        self._file: IO[str] | None = None
        self._state, self._fault = RUNNING, ""
        self._verdict_is_told = threading.Event()
        self._phase: tuple[str, int, float] = ("start", 0, time.monotonic())
        self._beat_s = self._phase[2]
        self._helped: tuple[object, float] = (None, 0.0)

    @property
    def step(self) -> int:
        """Of the present phase."""
        return self._phase[1]

    # What the main thread says

    def phase(self, name: str, step: int = 0) -> None:
        """From now on this rank is at `name`, of that step (0: before the first)."""
        now_s = time.monotonic()
        self._beat_s = now_s
        self._phase = (name, step, now_s)

    def beat(self) -> None:
        """There is progress in what this rank is at."""
        self._beat_s = time.monotonic()

    def beat_of(self, phase: str) -> None:
        """The same from a thread that works at `phase`. Does not count while the main thread is at something else."""
        present = self._phase
        if present[0] == phase:
            self._helped = (present, time.monotonic())

    def started(self) -> None:
        """The first step is done: nothing takes as long as it any more."""
        self._allowed_s = self._timeout_s

    # Coming and going

    def __enter__(self) -> Watchdog:
        if self._timeout_s:
            faulthandler.enable()  # a segmentation fault tells its stacks too
            self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
            self._thread.start()
        return self

    def connect(self, ctx: ParallelContext) -> None:
        """Get to know the other ranks. Collective."""
        if self._thread is None:
            return
        address = address_towards(os.environ["MASTER_ADDR"]) or "127.0.0.1"
        channel = Channel(ctx, address)
        started = time.strftime("%Y%m%d-%H%M%S", time.localtime(ctx.broadcast(int(time.time()))))
        if self._results_dir is not None:
            self._folder = Path(self._results_dir) / FOLDER / started
        self._channel = channel

    def open(self) -> None:
        """Have a file ready for the stacks, which native code that holds the interpreter's lock lets nobody open."""
        if self._thread is not None and self._folder is not None:
            with contextlib.suppress(OSError):
                self._open()

    def _open(self) -> IO[str] | None:
        """This rank's file; None where the run has no folder. Raises OSError."""
        if self._file is None and self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
            file = open(self._folder / f"rank_{self.rank:05d}.txt", "w", encoding="utf-8")  # noqa: SIM115 - kept open
            file.write(f"rank {self.rank} on {self._host} (process {os.getpid()}); removed if it ends well\n")
            file.flush()
            self._file = file
        return self._file

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._thread is None:
            return
        self._leaving = True
        self._thread.join(timeout=GIVE_UP_S)
        faulthandler.cancel_dump_traceback_later()
        if self._channel is not None:
            self._channel.close()
        if self._file is not None:
            self._file.close()
            if error is None or self._state == RUNNING:
                with contextlib.suppress(OSError):
                    os.unlink(self._file.name)
                    assert self._folder is not None
                    os.rmdir(self._folder)  # by the last rank
                    os.rmdir(self._folder.parent)

    def fail(self, error: BaseException) -> BaseException:
        """Tell where this rank is, and the others of `error`, which ends it; the error to end with.

        Where a collective failed because another rank had gone, the others are asked which. Then it is PeerLostError,
        whose message is all there is to say: the traceback goes to the folder, with MEGATRON_VERBOSE=1 to stderr.
        """
        lost = is_lost_peer(error)
        reason = (str(error).strip().splitlines() or [""])[0][:300]
        reason = reason if lost and reason else f"{type(error).__name__}: {reason}".removesuffix(": ")
        told_s = time.monotonic()
        if self._thread is None:
            return PeerLostError(f"lost touch with another rank {self._report().at}: {reason}") if lost else error
        if self._state == STUCK or (self._channel is not None and self._channel.call == STUCK):
            time.sleep(GIVE_UP_S + TIMER_SLACK_S)  # the thread ends the process
        self._fault, self._state = reason, LOST if lost else FAILED
        report = self._report()
        with contextlib.suppress(OSError, ValueError):
            # a run that is refused at its start writes nothing
            if (lost or self._file is not None) and (file := self._open()):
                file.write(f"{report.name} {self._state} {report.at}\n")
                traceback.print_exception(error, file=file)
                file.flush()
        if self._channel is not None:
            self._channel.send(report)
        if not lost:
            if report.step and not isinstance(error, OtherRankFailed):
                self._say(f"{report.name} failed {report.at}:")
            self.beat()  # the way out has its time too
            return error
        if self._verbose:
            self._say("".join(traceback.format_exception(error)))
        heard = self._channel is not None and self._verdict_is_told.wait(timeout=GIVE_UP_S + self._look_s)
        time.sleep(max(0.0, told_s + LINGER_S - time.monotonic()))
        self.beat()
        where = f"; tracebacks: {self._folder}" if self._folder is not None else ""
        return PeerLostError(
            "" if heard else f"{report.name} lost touch with another rank {report.at}: {self._fault}{where}"
        )

    # The thread

    def _watch(self) -> None:
        next_look_s = 0.0
        stuck_s = 0.0
        while not self._leaving:
            now_s = time.monotonic()
            if not stuck_s and (now_s >= self._deadline_s() or (self._channel and self._channel.call == STUCK)):
                stuck_s = now_s
                self._become_stuck(now_s >= self._deadline_s())
                next_look_s = now_s
            if now_s >= next_look_s:
                next_look_s = now_s + (0.1 if self._state != RUNNING else self._look_s)
                if not stuck_s:
                    self._set_timer()
                if self._channel is not None:
                    self._channel.send(self._report())
            self._judge()
            if stuck_s and (self._verdict_is_told.is_set() or now_s - stuck_s > GIVE_UP_S):
                if not self._verdict_is_told.is_set():
                    self._say(f"watchdog: {self._own_story()}")
                os._exit(HUNG)
            self._listen(min(next_look_s, now_s + 0.1 if self._called else self._deadline_s()) - now_s)

    @property
    def _called(self) -> bool:
        return self._state != RUNNING or (self._channel is not None and self._channel.call != "")

    def _listen(self, timeout_s: float) -> None:
        if self._channel is None:
            time.sleep(min(max(0.0, timeout_s), self._look_s))
        elif self._channel.wait(timeout_s):
            self._channel.send(self._report())

    def _deadline_s(self) -> float:
        phase, helped = self._phase, self._helped
        last_s = max(self._beat_s, helped[1]) if helped[0] is phase else self._beat_s
        return last_s + self._allowed_s

    def _set_timer(self) -> None:
        left_s = max(0.0, self._deadline_s() - time.monotonic()) + TIMER_SLACK_S
        faulthandler.dump_traceback_later(left_s, exit=True, file=self._file or sys.__stderr__)  # type: ignore[arg-type]

    def _become_stuck(self, by_itself: bool) -> None:
        # should writing hang too, on a file system that has gone: this timer still ends the process
        faulthandler.dump_traceback_later(GIVE_UP_S + TIMER_SLACK_S, exit=True, file=sys.__stderr__)  # type: ignore[arg-type]
        self._state, self._fault = STUCK, ""
        report = self._report()
        if self._channel is not None:
            self._channel.send(report)
        text = f"{report.name} {'stuck' if by_itself else 'ended with the others'} {report.at}, {report.where}\n"
        try:
            if file := self._open():
                file.write(f"{text}no sign of progress for {report.since_s:.1f} s\n")
                file.flush()
                faulthandler.dump_traceback(file, all_threads=True)
                return
        except (OSError, ValueError) as error:
            text += f"its stacks could not be written to {self._folder}: {error}\n"
        self._say(text.rstrip())
        faulthandler.dump_traceback(sys.__stderr__, all_threads=True)  # type: ignore[arg-type]

    def _judge(self) -> None:
        """Where this rank collects the reports, and a call has been answered, or should have been: tell the verdict."""
        channel = self._channel
        if channel is None or self._verdict_is_told.is_set():
            return
        if channel.verdict_is_told:
            self._verdict_is_told.set()
            return
        if not channel.collects or not channel.call:
            return
        waited_s = time.monotonic() - channel.call_s
        answers, silent = channel.judge(self._world_size)
        # whoever has not failed may be about to: of what another one's end does to it
        ended = all(report.state != RUNNING for report in answers.values()) and not silent
        if waited_s < (DEPUTY_S if self.rank else 0.0) or (waited_s < ANSWER_S and not ended):
            return
        lines = [f"watchdog: {self._headline(channel.call)}", verdict(channel.call, self._world_size, answers, silent)]
        if self._folder is not None:
            lines.append(f"  stacks and tracebacks of each rank: {self._folder}")
        text = "\n".join(lines)
        self._say(text)
        with contextlib.suppress(OSError):
            if self._folder is not None:
                self._folder.mkdir(parents=True, exist_ok=True)
                (self._folder / "verdict.txt").write_text(text + "\n", encoding="utf-8")
        channel.end()
        self._verdict_is_told.set()

    def _headline(self, call: str) -> str:
        if call == LOST:
            return "ranks lost touch with each other; the run ends"
        return f"no progress for {self._allowed_s:g} s; the run ends"

    def _own_story(self) -> str:
        report = self._report()
        story = f"no progress for {self._allowed_s:g} s: {report.name} {report.at}, {report.where}"
        return f"{story}; neither rank 0 nor the last rank answers" if self._world_size > 1 else story

    def _say(self, text: str) -> None:
        # not print: the main thread may be stuck in it, with its lock
        with contextlib.suppress(OSError):
            os.write(2, (text + "\n").encode())

    def _report(self) -> Report:
        name, step, _ = self._phase
        where, waits = _innermost(self._main)
        since_s = round(time.monotonic() - self._deadline_s() + self._allowed_s, 1)
        return Report(
            self.rank, self._host, os.getpid(), name, step, since_s, self._state, self._fault, where[-200:], waits
        )


STANDARD_LIBRARY = os.path.dirname(threading.__file__)
COLLECTIVES = (f"torch{os.sep}distributed{os.sep}", f"deepspeed{os.sep}comm{os.sep}")


def _is_standard(path: str) -> bool:
    return path.startswith(STANDARD_LIBRARY) and "site-packages" not in path


def _innermost(main: int | None) -> tuple[str, bool]:
    """The main thread's innermost call outside of Python's own library, and whether it, or the backward pass that it
    started, is in a collective.
    """
    frames: dict[int, FrameType] = sys._current_frames()
    frame = frames.get(main or 0)
    if frame is None:
        return "", False
    ours: FrameType | None = frame
    while ours is not None and _is_standard(ours.f_code.co_filename):
        ours = ours.f_back
    told = ours or frame
    # a backward pass on an accelerator runs in threads of its own
    inner = [frame, *frames.values()] if f"autograd{os.sep}graph.py" in frame.f_code.co_filename else [frame]
    waits = any(part in each.f_code.co_filename for each in inner for part in COLLECTIVES)
    return f"in {told.f_code.co_name} ({told.f_code.co_filename}:{told.f_lineno})", waits
