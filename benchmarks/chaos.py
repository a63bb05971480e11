"""Cost of failures: ranks fail at random, and the effective training time is compared with the elapsed time.

    python benchmarks/chaos.py [--kills 4] [--every-s 30] [--seed 0] [--faults SIGKILL SIGSTOP SIGSEGV passing]
    python benchmarks/chaos.py --kills 100 --every-s 2        the same as a stress test
    python benchmarks/chaos.py --copies 5 [--keep]            restarts from copies in memory, every 5 steps; the other
                                                              ranks keep their processes

`passing` is an error of a file system or a network, which a restart may not see again.

A tiny model on 4 CPU ranks (TP 2, PP 2), saved in the background every 5 steps, with --copies only at the end. The
effective time is that of the
steps whose results were kept, over the time from the first step to the last; beside it, where the rest went: until a
failure was noticed, until the ranks had started and restored, and steps that were done again. The final weights are
compared bit by bit with those of an undisturbed run of the same length.
"""

from __future__ import annotations

import argparse
import errno
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import orjson
import psutil
import torch

from benchmarks import faulty_task
from megatron.checkpoint.reader import Checkpoint, newest_checkpoint

T = TypeVar("T")
REPOSITORY = Path(__file__).resolve().parent.parent
RANKS = 4
MODEL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --vocab-size 128 --make-vocab-size-divisible-by 8 "
    "--seq-length 16 --micro-batch-size 2 --global-batch-size 8 --lr 1e-3 --lr-decay-style constant --device cpu "
    "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --eval-iters 0 --split 1,0,0 --log-interval 1"
).split()
SAVE_INTERVAL = 5
PASSING = "passing"
FAULTS = ("SIGKILL", "SIGSTOP", "SIGSEGV", PASSING)
PASSING_ERRORS = (errno.EIO, errno.ENETUNREACH, errno.ENOMEM, errno.EMFILE, errno.EREMOTEIO, errno.ECONNRESET)
QUICK = ["--watchdog-timeout-s", "4", "--distributed-timeout-minutes", "0.25"]
"""Flags for a rank that is stopped, which the others wait for so long: before the first step, and after it.

On a busy machine they end healthy ranks too: at a load of 40 on two cores single steps take 4 s and more.
"""
KEEP = "--keep-healthy-ranks"
STAY = re.compile(r"\d+ healthy ranks? stays?: ")
ENDLESS = 100_000
"""Steps."""
TIMEOUT_S = 600.0
"""Without a word from the run."""


@dataclass
class Failure:
    """A fault, and what followed, in seconds of one clock; 0: it was not seen."""

    rank_pid: int
    killed_s: float
    noticed_s: float = 0.0
    resumed_s: float = 0.0
    stepped_s: float = 0.0
    is_kept: bool = False
    """The other ranks kept their processes."""


@dataclass
class Outcome:
    """Result of a disturbed run."""

    status: int
    failures: list[Failure] = field(default_factory=list)
    text: str = ""


def session_leaders(pid: int) -> list[int]:
    """Live processes below this one that lead a session, as ranks do, but its own child, the agent; oldest first."""
    try:
        launcher = psutil.Process(pid)
        below = set(launcher.children(recursive=True)) - set(launcher.children())
        leaders = [child for child in below if os.getsid(child.pid) == child.pid and child.status() != "zombie"]
        # not by the ids alone, which begin at the lowest again after the largest
        leaders.sort(key=lambda leader: (leader.create_time(), leader.pid))
        return [leader.pid for leader in leaders]
    except (psutil.NoSuchProcess, ProcessLookupError):
        return []


class Disturbed:
    """A supervised run, whose ranks can be found and made to fail."""

    def __init__(self, train_flags: Sequence[str], max_restarts: int, faults_folder: Path) -> None:
        self._keeps = KEEP in train_flags
        command = [sys.executable, "-u", str(REPOSITORY / "tools" / "launch.py"), "--max-restarts", str(max_restarts)]
        command += ["--device", "cpu", "--devices-per-node", str(RANKS), "--", *train_flags]
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1", **faulty_task.variables(faults_folder)},
        )
        self.failures: list[Failure] = []
        self.lines: list[str] = []
        self.saves = 0
        self.steps = 0
        self._faults_folder = faults_folder
        self.heard_s = time.monotonic()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._old: set[int] = set()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            now_s = self.heard_s = time.monotonic()
            self.lines.append(line)
            self.saves += line.startswith("saved ")
            self.steps += line.startswith(" iteration ")
            if not self.failures:
                continue
            last = self.failures[-1]
            if "; restart " in line:
                last.noticed_s = last.noticed_s or now_s
            elif STAY.match(line):
                last.is_kept = True
            elif line.startswith("resumed "):
                last.resumed_s = last.resumed_s or now_s
            elif line.startswith(" iteration ") and last.noticed_s:
                last.stepped_s = last.stepped_s or now_s

    def ranks(self) -> list[int]:
        """Process ids of the running ranks, those of earlier kills left out: each leads a session."""
        running = session_leaders(self.process.pid)
        self._old &= set(running)  # the id of one that has ended may be given to a new rank
        return [pid for pid in running if pid not in self._old]

    def await_ranks(self) -> list[int]:
        """All of a new try; none where the run has ended."""
        while self.process.poll() is None:
            if len(ranks := self.ranks()) == RANKS:
                return ranks
            self.check()
            time.sleep(0.005)
        return []

    def fail(self, pid: int, fault: str, generator: random.Random) -> bool:
        """Make a rank fail; return False if it had ended already: the run may be about to finish."""
        ranks, killed_s = self.ranks(), time.monotonic()
        try:
            os.kill(pid, 0 if fault == PASSING else signal.Signals[fault])
        except ProcessLookupError:
            return False
        if fault == PASSING:
            path = self._faults_folder / str(pid)
            path.with_suffix(".new").write_text(str(generator.choice(PASSING_ERRORS)))
            path.with_suffix(".new").rename(path)
        # the others of a try end with it, or stay
        self._old |= {pid} if self._keeps else set(ranks)
        self.failures.append(Failure(pid, killed_s))
        return True

    def check(self) -> None:
        """Raises TimeoutError."""
        if time.monotonic() - self.heard_s > TIMEOUT_S:
            self.process.kill()
            raise TimeoutError(f"nothing was heard for {TIMEOUT_S:.0f} s:\n" + "".join(self.lines[-40:]))

    def finish(self) -> Outcome:
        while self.process.poll() is None:
            self.check()
            time.sleep(0.02)
        self._reader.join()
        return Outcome(self.process.returncode, self.failures, "".join(self.lines))


def disturb(
    train_flags: Sequence[str],
    moments: Iterable[Callable[[Disturbed], bool]],
    seed: int,
    max_restarts: int = 1000,
    stop: bool = False,
    faults: Sequence[str] = ("SIGKILL",),
    victims: Sequence[int] = range(RANKS),
) -> Outcome:
    """Run, and make a rank fail at each of the moments: functions that return True when it has come.

    The ranks fail in turn, in random order: the same one at the same step again and again is a crash loop. So do the
    `faults`; SIGSTOP and `passing` need QUICK. `victims`: of the ranks of a try, from the oldest process to the newest.
    A moment is looked for from the instant at which all ranks of a try are there. `stop`: when the run has recovered
    from the last, make it stop and save, rather than wait for its end.
    """
    generator = random.Random(seed)
    places, kinds = in_turn(victims, generator), in_turn(faults, generator)
    with tempfile.TemporaryDirectory() as faults_folder:
        run = Disturbed(train_flags, max_restarts, Path(faults_folder))
        try:
            for moment in moments:
                ranks, place, fault = run.await_ranks(), next(places), next(kinds)
                while ranks and not moment(run) and run.process.poll() is None:
                    run.check()
                    time.sleep(0.002)
                while ranks and run.process.poll() is None and not run.fail(ranks[place], fault, generator):
                    ranks = run.await_ranks()
                if not ranks or run.process.poll() is not None:
                    break
            if stop:
                while run.process.poll() is None and not (run.failures and run.failures[-1].stepped_s):
                    run.check()
                    time.sleep(0.02)
                run.process.terminate()
            return run.finish()
        finally:
            if run.process.poll() is None:
                run.process.terminate()
                run.process.wait()


def in_turn(what: Sequence[T], generator: random.Random) -> Iterator[T]:
    """Yield each of these once, in random order, then again in another, without an end."""
    while True:
        yield from generator.sample(what, len(what))


def after(seconds: float) -> Callable[[Disturbed], bool]:
    """The moment that many seconds after all ranks were there."""
    began_s: list[float] = []

    def has_come(run: Disturbed) -> bool:
        began_s.append(time.monotonic())
        return began_s[-1] - began_s[0] >= seconds

    return has_come


def after_save(seconds: float) -> Callable[[Disturbed], bool]:
    """The moment that many seconds after the next checkpoint."""
    saves: list[int] = []
    saved = after(seconds)

    def has_come(run: Disturbed) -> bool:
        saves.append(run.saves)
        return run.saves > saves[0] and saved(run)

    return has_come


def after_steps(count: int) -> Callable[[Disturbed], bool]:
    """The moment after so many further steps."""
    steps: list[int] = []

    def has_come(run: Disturbed) -> bool:
        steps.append(run.steps)
        return run.steps >= steps[0] + count

    return has_come


def copies_flags(interval: int) -> list[str]:
    """Flags of a run that a restart finds in memory: the last value of an option counts."""
    return ["--save-interval", str(ENDLESS), "--peer-copy-interval", str(interval)]


def differing(one: Path, other: Path) -> list[str]:
    """Differences, bit by bit, between the newest checkpoints of two folders."""
    first, second = _newest(one), _newest(other)
    if first.metadata["progress"] != second.metadata["progress"]:
        return [f"progress {first.metadata['progress']} and {second.metadata['progress']}"]
    if first.parameters.keys() != second.parameters.keys():
        return ["the names of the parameters"]
    return [
        f"{kind} of {name}"
        for name in first.parameters
        for kind in first.kinds_of(name)
        if not torch.equal(
            first.read_full(name, kind).view(torch.int32), second.read_full(name, kind).view(torch.int32)
        )
    ]


def _newest(folder: Path) -> Checkpoint:
    checkpoint = newest_checkpoint(folder, fall_back=False)
    assert checkpoint is not None
    return checkpoint


def steps_of(results: Path) -> list[dict[str, float]]:
    """The rows of the steps whose results were kept, each once."""
    rows = map(orjson.loads, (results / "metrics.jsonl").read_bytes().splitlines())
    return [row for row in rows if row["kind"] == "train"]


def flags_of(data: Path, folder: Path, num_steps: int, save_interval: int) -> list[str]:
    places = ["--data-path", str(data), "--save", str(folder / "saved"), "--results-dir", str(folder / "results")]
    return [*MODEL, *places, "--train-iters", str(num_steps), "--save-interval", str(save_interval), "--keep-last", "3"]


def write_dataset(prefix: Path) -> Path:
    from megatron.data.index.indexed_builder import IndexedDatasetBuilder

    generator = np.random.default_rng(0)
    with IndexedDatasetBuilder(prefix, np.uint16) as builder:
        for _ in range(200):
            builder.add_document(generator.integers(1, 128, 200).astype(np.uint16))
        builder.finalize()
    return prefix


def report(outcome: Outcome, steps: Sequence[dict[str, float]]) -> str:
    """The effective time, and where the rest of it went."""
    useful_s = sum(step["iteration_time_s"] for step in steps)
    wall_s = steps[-1]["time"] - steps[0]["time"] + steps[0]["iteration_time_s"]
    seen = [failure for failure in outcome.failures if failure.stepped_s]
    text = f"{len(outcome.failures)} kills in {wall_s:.1f} s, {len(steps)} steps\n"
    text += f"effective time: {useful_s:.1f} s of {wall_s:.1f} s = {useful_s / wall_s:.1%}\n"
    if seen:
        noticed = sum(failure.noticed_s - failure.killed_s for failure in seen) / len(seen)
        started = sum((failure.resumed_s or failure.stepped_s) - failure.noticed_s for failure in seen) / len(seen)
        stepped = sum(failure.stepped_s - (failure.resumed_s or failure.stepped_s) for failure in seen) / len(seen)
        again = (wall_s - useful_s) / len(seen) - noticed - started - stepped
        text += f"a failure costs on average {(wall_s - useful_s) / len(seen):.2f} s:\n"
        text += f"  {noticed:.2f} s until it was noticed and the other ranks had ended\n"
        text += f"  {started:.2f} s until the new ranks had met, built the engine and restored\n"
        text += f"  {stepped:.2f} s until the first step was done\n"
        text += f"  {again:.2f} s for steps done again, and the pauses of saves\n"
    for name, is_kept in (("where healthy ranks stayed", True), ("where all ranks started again", False)):
        took_s = sorted(failure.stepped_s - failure.killed_s for failure in seen if failure.is_kept == is_kept)
        if took_s:
            median_s = took_s[len(took_s) // 2]
            text += f"from a failure to the next step {name}: {median_s:.2f} s, the median of {len(took_s)}\n"
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=4)
    parser.add_argument("--every-s", type=float, default=30.0, help="mean time between two kills (default: 30)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--copies", type=int, metavar="STEPS", help="keep copies in memory this often, save at the end")
    parser.add_argument("--keep", action="store_true", help="let healthy ranks keep their processes")
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=["SIGKILL"], help="in random order")
    options = parser.parse_args()
    generator = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = write_dataset(folder / "data")
        moments = [after(generator.uniform(0.5, 1.5) * options.every_s) for _ in range(options.kills)]
        flags = [*QUICK]
        if options.copies is not None:
            flags += copies_flags(options.copies)
        if options.keep:
            flags.append(KEEP)
        disturbed = [*flags_of(data, folder / "disturbed", ENDLESS, SAVE_INTERVAL), *flags]
        outcome = disturb(disturbed, moments, options.seed, stop=True, faults=options.faults)
        print(f"seed {options.seed}")
        if outcome.status:
            print(outcome.text)
            return outcome.status
        steps = steps_of(folder / "disturbed" / "results")
        print(report(outcome, steps), end="")
        flags = [*flags_of(data, folder / "undisturbed", ENDLESS, SAVE_INTERVAL), *flags]
        undisturbed = disturb([*flags, "--exit-interval", str(len(steps))], [], options.seed)
        print(report(undisturbed, steps_of(folder / "undisturbed" / "results")), end="")
        different = differing(folder / "disturbed" / "saved", folder / "undisturbed" / "saved")
        print(f"final weights and moments: {', '.join(different) + ' differ' if different else 'equal bit by bit'}")
        return 1 if different or undisturbed.status else 0


if __name__ == "__main__":
    sys.exit(main())
