"""Ranks stop together, for what any of them sees; signals let the step finish, and a second one does not."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import io
import itertools
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.checkpoint.format import CheckpointError
from megatron.data.index.indexed import DataError
from megatron.options.config import TrainingConfig
from megatron.options.progress import Progress
from megatron.parallel.context import ParallelContext
from megatron.resilience import job
from megatron.resilience import shutdown as stop
from megatron.resilience.errors import OtherRankFailed, exit_status, message_of
from megatron.resilience.shutdown import KillSwitch, Shutdown, Signals
from megatron.runtime.commands import FAILED, REFUSED
from megatron.training.checkpoints import Checkpoints
from tests import runs
from tests.ranks import HANG_S, RankPools

ROOT = Path(__file__).resolve().parents[2]
NAMES = ["SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2", "SIGHUP", "SIGXCPU"]


def alone(**options: Any) -> Shutdown:
    return Shutdown(TrainingConfig(**options), ParallelContext.single())


def at(iteration: int) -> Progress:
    return Progress(iteration=iteration, consumed_samples=8 * iteration)


class World:
    """Several ranks as threads of this process."""

    def __init__(self, size: int) -> None:
        self.numbers = [0] * size
        self.calls = 0
        self._all_are_here = threading.Barrier(size, timeout=HANG_S)

    def context(self, rank: int) -> Any:
        def largest(number: int) -> int:
            self.numbers[rank] = number
            self.calls += rank == 0
            self._all_are_here.wait()
            found = max(self.numbers)
            self._all_are_here.wait()
            return found

        return SimpleNamespace(rank=rank, world_size=len(self.numbers), largest=largest)


def ask_all(decisions: list[Shutdown], progress: Progress | None = None) -> list[bool]:
    with ThreadPoolExecutor(len(decisions)) as threads:
        return list(threads.map(lambda decision: decision.decide(progress), decisions))


def of_world(world: World, **options: Any) -> list[Shutdown]:
    size = len(world.numbers)
    return [Shutdown(TrainingConfig(**options), world.context(rank), Signals()) for rank in range(size)]


# ---------------------------------------------------------------------------------------------------------------------
# One rank


def test_kill_switch_stops_with_the_contracts_text(tmp_path: Path) -> None:
    path = tmp_path / "kill"
    decision = alone(kill_switch_path=str(path))
    assert not decision.decide()
    assert not decision.decide(at(6))
    path.touch()
    assert decision.decide(at(7))
    assert decision.reason == f"Detected kill switch at {path}, iteration=7. Exiting"
    assert path.exists(), "the kill switch is the user's file; it is not removed"


def test_exit_interval_stops_at_its_multiples_only() -> None:
    assert [number for number in range(1, 21) if alone(exit_interval=5).check_exit_interval(at(number))] == [
        5,
        10,
        15,
        20,
    ]
    decision = alone(exit_interval=5)
    decision.check_exit_interval(at(5))
    assert decision.reason == "Reached exit_interval=5, iteration=5, consumed_samples=40. Exiting"
    assert not any(alone(exit_interval=0).check_exit_interval(at(number)) for number in range(1, 100))


@pytest.mark.parametrize("began_s", ["4400.0", None])
def test_exit_duration_counts_from_the_start_of_the_job(monkeypatch: pytest.MonkeyPatch, began_s: str | None) -> None:
    """That of the agent, before its restarts, or of a process without one."""
    now_s = 5000.0
    if began_s is not None:
        monkeypatch.setenv(job.BEGAN, began_s)
    monkeypatch.setattr(job, "process_age_s", lambda: 600.0 if began_s is None else 2.0)
    for module in (stop, job):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now_s))
    decision = alone(exit_duration_in_mins=12.5)
    assert not decision.decide(at(1))
    now_s += 149
    assert not decision.decide(at(2))
    now_s += 1
    assert decision.decide(at(3))
    assert decision.reason == "Reached exit_duration_in_mins=12.5, iteration=3, consumed_samples=24. Exiting"


def test_the_age_of_the_process_is_known() -> None:
    code = "import time; time.sleep(1.5); from megatron.resilience.job import process_age_s; print(process_age_s())"
    began_s = time.monotonic()
    shown = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    # the kernel tells its own start in whole seconds
    assert 0.4 < float(shown) < time.monotonic() - began_s + 1.1


def test_a_decision_stands() -> None:
    decision = alone(exit_duration_in_mins=1e-6, exit_interval=1)
    assert decision.decide(at(1))
    reason = decision.reason
    assert decision.decide(at(2))
    assert decision.check_exit_interval(at(2))
    assert decision.reason == reason


@pytest.mark.parametrize("name", NAMES)
def test_a_signal_lets_the_step_finish(name: str) -> None:
    number = getattr(signal, name)
    before = signal.getsignal(number)
    with alone() as decision:
        assert not decision.decide(at(1))
        signal.raise_signal(number)
        assert decision.decide(at(2))
        assert decision.reason == f"Received {name} on rank 0, iteration=2, consumed_samples=16. Exiting"
    assert signal.getsignal(number) is before


def test_before_the_training_a_request_leaves_the_block(capsys: pytest.CaptureFixture[str]) -> None:
    with alone() as decision:
        decision.exit_if_requested()
        signal.raise_signal(signal.SIGUSR2)
        decision.exit_if_requested()
        pytest.fail("not left")
    assert capsys.readouterr().out == "Received SIGUSR2 on rank 0, before the first iteration. Exiting\n"


def test_handlers_are_restored_when_training_fails() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(ZeroDivisionError), alone():
        raise ZeroDivisionError
    assert signal.getsignal(signal.SIGTERM) is before
    assert signal.set_wakeup_fd(-1) == -1
    assert "signals" not in {thread.name for thread in threading.enumerate()}


def test_an_ignored_signal_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with alone() as decision:
            signal.raise_signal(signal.SIGHUP)
            assert not decision.decide(at(1))
    finally:
        signal.signal(signal.SIGHUP, before)


def test_enters_outside_the_main_thread_without_handlers() -> None:
    def train() -> bool:
        stops = False
        with alone(exit_interval=1) as decision:
            stops = decision.decide(at(1)) or decision.check_exit_interval(at(1))
        return stops

    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(train).result()


# ---------------------------------------------------------------------------------------------------------------------
# The kill switch on a bad file system


@contextlib.contextmanager
def file_system(monkeypatch: pytest.MonkeyPatch, stat: Callable[[str], object]) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setattr(stop, "os", SimpleNamespace(stat=stat, environ=os.environ))
        yield


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EACCES, errno.EIO])
def test_a_look_that_fails_is_reported_once_and_repeated(
    number: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    def stat(path: str) -> None:
        raise OSError(number, os.strerror(number), path)

    path = tmp_path / "kill"
    path.touch()
    switch = KillSwitch(str(path))
    with file_system(monkeypatch, stat), caplog.at_level(logging.WARNING):
        assert [switch.is_there() for _ in range(3)] == [False] * 3
    (record,) = caplog.records
    assert os.strerror(number) in record.getMessage()
    assert str(path) in record.getMessage()
    assert switch.is_there(), "the file system is well again"


def test_a_look_that_hangs_is_reported_and_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(stop, "LOOK_S", 0.05)
    answers = threading.Event()
    switch = KillSwitch("/net/kill")
    with file_system(monkeypatch, lambda path: answers.wait()), caplog.at_level(logging.WARNING):
        assert [switch.is_there() for _ in range(20)] == [False] * 20
        (record,) = caplog.records
        assert "no answer within 0.05 s" in record.getMessage()
        assert [thread.name for thread in threading.enumerate()].count("kill switch") == 1
        answers.set()
        deadline_s = time.monotonic() + HANG_S
        while not switch.is_there():
            assert time.monotonic() < deadline_s, "the answer that came late was not heard"
    assert len(caplog.records) == 1


def test_a_missing_folder_is_no_fault(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    assert not KillSwitch(str(tmp_path / "absent" / "kill")).is_there()
    assert not KillSwitch(str(tmp_path / "file" / "kill")).is_there()
    assert not caplog.records


def test_one_rank_a_node_looks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "kill"
    path.touch()
    for local_rank, looks in (("0", True), ("1", False), ("7", False)):
        monkeypatch.setenv("LOCAL_RANK", local_rank)
        training = TrainingConfig(kill_switch_path=str(path))
        assert Shutdown(training, ParallelContext.single()).decide(at(1)) == looks


# ---------------------------------------------------------------------------------------------------------------------
# Several ranks


def test_what_one_rank_sees_stops_all_in_one_exchange() -> None:
    world = World(4)
    decisions = of_world(world)
    assert ask_all(decisions, at(1)) == [False] * 4
    decisions[2]._signals.first = signal.SIGUSR1  # type: ignore[union-attr]
    assert ask_all(decisions, at(2)) == [True] * 4
    assert world.calls == 2
    expected = "Received SIGUSR1 on rank 2, iteration=2, consumed_samples=16. Exiting"
    assert [decision.reason for decision in decisions] == [expected] * 4
    assert ask_all(decisions, at(2)) == [True] * 4
    assert world.calls == 2, "what is decided is not asked again"


def test_the_time_is_rank_0s() -> None:
    decisions = of_world(World(2), exit_duration_in_mins=60.0)
    decisions[1]._began_s -= 7200
    assert ask_all(decisions, at(1)) == [False, False]
    decisions[0]._began_s -= 7200
    assert ask_all(decisions, at(2)) == [True, True]


def test_of_several_reasons_all_ranks_tell_the_same(tmp_path: Path) -> None:
    path = tmp_path / "kill"
    path.touch()
    for seen, told in (
        ({0: "time"}, "Reached exit_duration_in_mins"),
        ({0: "time", 1: signal.SIGTERM}, "Received SIGTERM on rank 1"),
        ({3: signal.SIGTERM, 1: signal.SIGTERM}, "Received SIGTERM on rank 1"),
        ({0: "time", 1: signal.SIGHUP, 2: signal.SIGXCPU}, "Received SIGXCPU on rank 2"),
        ({0: "time", 1: signal.SIGXCPU, 3: "file"}, "Detected kill switch"),
    ):
        decisions = of_world(World(4), exit_duration_in_mins=60.0, kill_switch_path=str(tmp_path / "no"))
        for rank, reason in seen.items():
            if reason == "time":
                decisions[rank]._began_s -= 7200
            elif reason == "file":
                decisions[rank]._kill_switch.path = str(path)  # type: ignore[union-attr]
            else:
                decisions[rank]._signals.first = reason  # type: ignore[union-attr,assignment]
        assert ask_all(decisions, at(5)) == [True] * 4
        reasons = {decision.reason for decision in decisions}
        assert len(reasons) == 1
        assert str(reasons.pop()).startswith(told)


def largest_of_each_place(world_size: int) -> list[int]:
    """The largest number among the first `world_size` ranks, for each of them that has it."""
    import torch.distributed as dist

    from megatron.options.config import ParallelConfig

    ctx = ParallelContext.build(ParallelConfig(), "cpu")
    group = dist.new_group(list(range(world_size)), backend="gloo")
    if ctx.rank >= world_size:
        return []
    ctx = dataclasses.replace(ctx, num_batch_ranks=world_size, control_group=group)
    return [ctx.largest(100 + place if ctx.rank == place else ctx.rank) for place in range(world_size)]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_the_largest_number_reaches_every_rank(ranks: RankPools, world_size: int) -> None:
    expected = [100 + place for place in range(world_size)]
    assert ranks(4)(largest_of_each_place, world_size)[:world_size] == [expected] * world_size


# ---------------------------------------------------------------------------------------------------------------------
# Whole runs on 4 ranks, each of which sees files of its own


def stopped_run(arguments: str, folder: Path, happens: dict[tuple[int, int], list[str]]) -> dict[str, Any]:
    """A run on this rank, and what became of it.

    `happens`: what this rank meets, by rank and iteration (-1: before the training), one after the other where it asks
    several times: a signal, "file" for its own kill switch, "late" for the clock.
    """
    rank = int(os.environ["RANK"])
    went: dict[str, Any] = {"saves": 0, "reason": None, "steps": 0}
    mine = {iteration: list(events) for (of, iteration), events in happens.items() if of == rank}
    sees_reason, decide, save = Shutdown.sees_reason, Shutdown.decide, Checkpoints.save
    steps = itertools.count(1)

    def happen(self: Shutdown, iteration: int) -> None:
        event = mine[iteration].pop(0) if mine.get(iteration) else ""
        if event.startswith("SIG"):
            signal.raise_signal(getattr(signal, event))
        elif event == "file":
            Path("kill").touch()
        elif event == "late":
            self._began_s -= 7200

    def sees_reason_after_event(self: Shutdown) -> bool:
        happen(self, next(steps))
        return sees_reason(self)

    def decide_after_event(
        self: Shutdown, progress: Progress | None = None, *, is_reason_seen: bool | None = None
    ) -> bool:
        iteration = -1 if progress is None else progress.iteration
        if is_reason_seen is None:
            happen(self, iteration)
        stops = decide(self, progress, is_reason_seen=is_reason_seen)
        went["reason"], went["steps"] = self.reason, max(0, iteration)
        return stops

    def counted_save(self: Checkpoints, *arguments: Any, **options: Any) -> None:
        went["saves"] += 1
        save(self, *arguments, **options)

    before, node = os.getcwd(), folder / f"node{rank}"
    node.mkdir(exist_ok=True)
    shown = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(shown):
        patch.setattr(Shutdown, "sees_reason", sees_reason_after_event)
        patch.setattr(Shutdown, "decide", decide_after_event)
        patch.setattr(Checkpoints, "save", counted_save)
        patch.setenv("LOCAL_RANK", "0")  # as on four nodes
        os.chdir(node)
        try:
            went["fault"] = runs.train(arguments)
        finally:
            os.chdir(before)
    return {**went, "shown": shown.getvalue()}


LATE = "Reached exit_duration_in_mins=60, iteration=3, consumed_samples=24. Exiting"
PATHS = {
    # nodes 3 and 1 see the file at different times, the others never
    "kill switch": ({(3, 2): ["file"], (1, 3): ["file"]}, 2, "Detected kill switch at kill, iteration=2. Exiting"),
    # of every rank, as a launcher sends it
    "signal": ({(rank, 3): ["SIGTERM"] for rank in range(4)}, 3, "Received SIGTERM on rank 0, iteration=3"),
    "signal to one rank": ({(2, 1): ["SIGUSR1"]}, 1, "Received SIGUSR1 on rank 2, iteration=1"),
    # the first question is that within the step, the next one that of the save at every second iteration
    "signal during a save": ({(1, 2): ["", "SIGHUP"]}, 2, "Received SIGHUP on rank 1, iteration=2"),
    # those of the second and third batch of the validation
    "signal during the validation": ({(1, 4): ["", "", "SIGINT"]}, 4, "Received SIGINT on rank 1, iteration=4"),
    "time": ({(1, 1): ["late"], (0, 3): ["late"]}, 3, LATE),
    "exit interval": ({}, 5, "Reached exit_interval=5, iteration=5, consumed_samples=40. Exiting"),
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runs.write_dataset(tmp_path_factory.mktemp("data") / "data")


RARE = {"signal to one rank", "time", "signal during a save"}
"""Of these the ranks agree as of the others; -m slow."""


@pytest.mark.parametrize("path", [pytest.param(path, marks=pytest.mark.slow if path in RARE else ()) for path in PATHS])
def test_all_ranks_leave_after_the_same_step_with_one_save(
    ranks: RankPools, tmp_path: Path, data: Path, path: str
) -> None:
    happens, steps, reason = PATHS[path]
    saved, results = tmp_path / "saved", tmp_path / "results"
    flags = f"--data-path {data} --train-iters 9 --pipeline-model-parallel-size 2 --tensor-model-parallel-size 2"
    flags += f" --kill-switch-path kill --exit-interval 5 --exit-duration-in-mins 60 --save {saved} --save-interval 2"
    # the pool is older than any limit: all begin anew
    told = ranks(4)(stopped_run, f"{flags} --results-dir {results}", tmp_path, happens)
    assert {went["fault"] for went in told} == {""}
    assert {went["steps"] for went in told} == {steps}
    assert {went["saves"] for went in told} == {(steps + 1) // 2}, "none at odd steps but the last, none twice"
    assert (saved / "latest").read_text().split()[0] == f"global_step{steps}"
    assert [row["iteration"] for row in runs.rows(results)] == list(range(1, steps + 1))
    # the interval alone leaves time for a validation, here at 0 and 4
    valid = [row["iteration"] for row in runs.rows(results, "valid")]
    assert valid == ([0, 4] if path == "exit interval" else [0])
    assert reason in told[0]["shown"]
    assert [went["shown"] for went in told[1:]] == [""] * 3
    assert "complete" not in told[0]["shown"]


def test_a_run_stops_before_its_model_is_built(ranks: RankPools, tmp_path: Path, data: Path) -> None:
    saved, results = tmp_path / "saved", tmp_path / "results"
    flags = f"--data-path {data} --train-iters 3 --kill-switch-path kill --save {saved} --results-dir {results}"
    for happens, reason in (
        ({(3, -1): ["file"]}, "Detected kill switch at kill, before the first iteration. Exiting\n"),
        # after the first question: while the checkpoint is looked for
        ({(1, -1): ["", "SIGXCPU"]}, "Received SIGXCPU on rank 1, before the first iteration. Exiting\n"),
    ):
        told = ranks(4)(stopped_run, flags, tmp_path, happens)
        assert {went["fault"] for went in told} == {""}
        assert told[0]["shown"] == reason
        assert not saved.exists()
        assert not results.exists()
        (tmp_path / "node3" / "kill").unlink(missing_ok=True)


def test_the_end_of_the_samples_is_told(ranks: RankPools, tmp_path: Path, data: Path) -> None:
    # 16 of 20 samples make whole steps; the exit interval falls on the last one, and changes nothing
    flags = f"--data-path {data} --train-samples 20 --exit-interval 2 --results-dir {tmp_path}"
    told = ranks(4)(stopped_run, flags, tmp_path, {})
    assert {went["saves"] for went in told} == {0}, "there is no --save"
    assert "Training is complete, iteration=2, 16 samples\n" in told[0]["shown"]
    assert "exit_interval" not in told[0]["shown"]
    assert [row["iteration"] for row in runs.rows(tmp_path, "test")] == [2]


# ---------------------------------------------------------------------------------------------------------------------
# Processes

PROGRAM = """
import signal, sys
from megatron.options.config import TrainingConfig
from megatron.parallel.context import ParallelContext
from megatron.resilience import shutdown as stop
from megatron.options.progress import Progress
stop.REPEAT_S = float(sys.argv[1])
with stop.Shutdown(TrainingConfig(), ParallelContext.single()) as decision:
    for name in sys.argv[2:]:
        signal.raise_signal(getattr(signal, name))
    decision.decide(Progress(3, 24))
print(decision.reason)
"""


def run_program(repeat_s: float, *names: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, str(repeat_s), *names], cwd=ROOT, capture_output=True, text=True, timeout=HANG_S
    )


def test_a_terminals_signals_are_one_request() -> None:
    # its SIGINT, the SIGTERM of DeepSpeed's launcher, the SIGINT of torchrun
    result = run_program(60.0, "SIGINT", "SIGTERM", "SIGINT")
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == "Received SIGINT on rank 0, iteration=3, consumed_samples=24. Exiting\n"


def test_the_kernels_repeated_sigxcpu_is_one_request() -> None:
    result = run_program(0.0, "SIGXCPU", "SIGXCPU", "SIGXCPU")
    assert (result.returncode, result.stdout[:16]) == (0, "Received SIGXCPU")


# a signal comes when the work of a rank is done, and its process is about to end
AT_THE_END = """
import os, signal
from megatron import train
from megatron.resilience import process
train.main = lambda arguments, signals: None
def leave(status):
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        os.kill(os.getpid(), number)
    process.leave(status)
train.leave = leave
train.process()
"""


def test_a_signal_between_the_end_of_the_work_and_of_the_process_changes_no_status() -> None:
    done = subprocess.run([sys.executable, "-c", AT_THE_END], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


# its main thread waits in C for ever, as in a collective whose other side is gone: no handler of Python's runs
HANGING = """
import ctypes
from megatron.resilience import shutdown as stop
stop.REPEAT_S = 0.0
with stop.Signals():
    mutex = ctypes.create_string_buffer(64)
    ctypes.CDLL(None).pthread_mutex_lock(mutex)
    print("ready", flush=True)
    ctypes.CDLL(None).pthread_mutex_lock(mutex)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="a mutex of zeros is a free one on Linux")
@pytest.mark.parametrize(("first", "second"), [("SIGTERM", "SIGTERM"), ("SIGUSR1", "SIGINT")])
def test_a_second_signal_ends_even_a_process_that_hangs(first: str, second: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", HANGING], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(getattr(signal, first))
        time.sleep(0.5)
        assert process.poll() is None, "the first one waits for the step"
        process.send_signal(getattr(signal, second))
        _, told = process.communicate(timeout=HANG_S)
    finally:
        process.kill()
    assert process.returncode == 128 + getattr(signal, second)
    assert told == f"rank 0: received {second}, the second signal; ends at once\n"


def heeds(pid: int, number: int) -> bool:
    """Whether the process has a handler for the signal."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    caught = int(next(line.split()[1] for line in lines if line.startswith("SigCgt")), 16)
    return bool(caught >> (number - 1) & 1)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_signal_during_the_imports_is_a_wanted_stop(data: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "megatron.train", *runs.TINY.split(), "--data-path", str(data)]
    command += ["--train-iters", "100000", "--results-dir", str(tmp_path / "results")]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        deadline_s = time.monotonic() + HANG_S
        while not heeds(process.pid, signal.SIGUSR1):
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        process.send_signal(signal.SIGUSR1)
        shown, _ = process.communicate(timeout=HANG_S)
    finally:
        process.kill()
    assert process.returncode == 0
    assert "Received SIGUSR1 on rank 0, before the first iteration. Exiting\n" in shown
    assert not (tmp_path / "results").exists()


PASSING = (
    *(errno.ENOMEM, errno.EREMOTEIO, errno.ENETUNREACH, errno.ECONNREFUSED, errno.EMFILE, errno.EAGAIN),
    *(errno.EDQUOT, errno.ENOSPC, errno.ETIMEDOUT, errno.EADDRINUSE, errno.ENETDOWN, errno.EBUSY),
)


def caused(error: Exception, cause: Exception) -> Exception:
    """Return an error raised `from` another."""
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (CheckpointError("damaged"), REFUSED),
        (PermissionError(errno.EACCES, "no"), REFUSED),
        (OSError(errno.ESTALE, "stale"), FAILED),
        (OSError(errno.EIO, "disk"), FAILED),
        (RuntimeError("out of memory"), FAILED),
        (OtherRankFailed("rank 1", REFUSED), REFUSED),
        (OtherRankFailed("rank 1", FAILED), FAILED),
        *((OSError(number, os.strerror(number)), FAILED) for number in PASSING),
        (FileNotFoundError(errno.ENOENT, "no"), REFUSED),
        (OSError("the limit of open files is 64"), REFUSED),
        (TimeoutError("timed out"), FAILED),
        (caused(CheckpointError("cannot be read"), TimeoutError(errno.ETIMEDOUT, "timed out")), FAILED),
        (caused(CheckpointError("cannot be read"), PermissionError(errno.EACCES, "no")), REFUSED),
        (caused(DataError("cannot be read"), caused(ValueError("short"), OSError(errno.EREMOTEIO, "io"))), FAILED),
        (CheckpointError("a.safetensors: I/O error: Input/output error (os error 5)"), FAILED),
        (CheckpointError("a.safetensors: No such file or directory (os error 2)"), REFUSED),
        (DataError("a.parquet: [Errno 116] Error reading bytes. Detail: [errno 116] Stale file handle"), FAILED),
    ],
)
def test_the_status_says_whether_another_try_makes_sense(error: Exception, status: int) -> None:
    assert exit_status(error) == status


def test_a_fault_of_a_file_is_its_path_and_the_reason(tmp_path: Path) -> None:
    with pytest.raises(OSError) as caught:
        (tmp_path / "missing").read_text()
    assert message_of(caught.value) == f"{tmp_path / 'missing'}: No such file or directory"
    assert message_of(OSError(28, "No space left on device")) == "[Errno 28] No space left on device"
    assert message_of(DataError("a.bin is damaged")) == "a.bin is damaged"
