"""Runs of megatron.train under tools/hosts.py in which one rank meets a fault at a given step.

`Zygote` starts this file once; it imports what ranks need, and forks the launcher and the ranks of each run from
itself, which spares every rank the seconds of the imports. Only how a process comes to be differs from a real launch.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import faulthandler
import gc
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from megatron.runtime.first_steps import importing
from tests.ranks import HANG_S, free_port

ROOT = Path(__file__).resolve().parents[2]
STEP = 3
"""At which the fault happens."""
START_LIMIT_S = 240.0


@dataclasses.dataclass(frozen=True)
class Ended:
    """How a run ended."""

    status: int
    seconds: float
    """From the fault to the end of the launcher."""
    told: str
    """Its stdout and stderr."""
    alive: list[int]
    """Ranks whose processes are still there."""


# ---------------------------------------------------------------------------------------------------------------------
# The faults, in the rank that meets them


def raise_asynchronously() -> None:
    exception = ctypes.py_object(ArithmeticError)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(threading.main_thread().ident or 0), exception)


def deadlock() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def hold_the_interpreter() -> None:
    ctypes.PyDLL(None).sleep(600)  # of PyDLL: keeps the interpreter's lock


def fail() -> None:
    raise ArithmeticError("the fault of the test")


def fill_disk() -> None:
    """No file may become longer than a few bytes: as a full disk, but for this process alone."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, resource.RLIM_INFINITY))


def join_without_descriptors() -> None:
    """Open what gloo needs, with no descriptor left."""
    import torch.distributed as dist

    free = os.dup(2)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    dist.new_group(backend="gloo")


def signal_launcher(number: int) -> Callable[[], None]:
    def send() -> None:
        received: Any = signal.getsignal(number)
        os.kill(os.getppid(), number)
        # on a busy machine the launcher passes it on so late that a short run has trained to its end
        deadline_s = time.monotonic() + HANG_S
        while not received.__self__.first and time.monotonic() < deadline_s:
            time.sleep(0.01)

    return send


def signal_self(number: int) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


IN_STEP: dict[str, Callable[[], None]] = {
    "exception": fail,
    "async exception": raise_asynchronously,
    "SIGINT": signal_launcher(signal.SIGINT),
    "SIGTERM": signal_launcher(signal.SIGTERM),
    "SIGKILL": signal_self(signal.SIGKILL),
    "SIGSTOP": signal_self(signal.SIGSTOP),
    "segfault": faulthandler._sigsegv,  # type: ignore[attr-defined]
    "abort": os.abort,
    "deadlock": deadlock,
    "interpreter lock held": hold_the_interpreter,
    "too few descriptors": join_without_descriptors,
    "disk full while logging": fill_disk,
    "disk full while saving": fill_disk,
}


def install(fault: str, at_rank: int) -> None:
    """Let this rank meet the fault, if it is the one."""
    from megatron.data.batches import Batches
    from megatron.tasks.pretrain import PretrainTask
    from megatron.training.engine import Engine

    if int(os.environ["RANK"]) != at_rank:
        return
    steps = 0
    original_step = Engine.train_step

    def train_step(engine: Engine, *arguments: Any, **options: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps == STEP and fault in IN_STEP:
            note_time()
            IN_STEP[fault]()
        return original_step(engine, *arguments, **options)

    Engine.train_step = train_step  # type: ignore[method-assign, assignment]
    if fault in ("slow layer", "slow attention"):
        from megatron.models.attention.layer import SelfAttention
        from megatron.models.transformer import TransformerLayer

        where: Any = (TransformerLayer, "forward") if fault == "slow layer" else (SelfAttention, "_core")
        original: Any = getattr(*where)

        def slow(*arguments: Any) -> Any:
            time.sleep(0.03)
            return original(*arguments)

        setattr(where[0], where[1], slow)
    if fault == "SIGKILL in a save":
        from megatron.checkpoint import saver

        def die(*arguments: Any) -> None:
            note_time()
            os.kill(os.getpid(), signal.SIGKILL)

        saver._Job.complete = die  # type: ignore[method-assign, assignment]
    if not fault.startswith(("reader", "iterator")):
        return
    original_read, original_next = PretrainTask.read, Batches.__next__

    def read(task: PretrainTask, dataset: Any, key: range) -> Any:
        if key.start >= 8 * (STEP - 1) and fault.startswith("reader"):
            note_time()
            fail() if fault == "reader thread fails" else time.sleep(600)
        return original_read(task, dataset, key)

    def next_step(batches: Batches[Any, Any]) -> Any:
        if batches.consumed_samples >= 8 * (STEP - 1) and fault == "iterator one short":
            note_time()
            raise StopIteration
        return original_next(batches)

    PretrainTask.read, Batches.__next__ = read, next_step  # type: ignore[method-assign, assignment]


def note_time() -> None:
    path = Path(os.environ["FAULT_FOLDER"]) / "fault_s"
    if not path.exists():
        path.write_text(str(time.monotonic()))  # one clock for all processes of a machine


# ---------------------------------------------------------------------------------------------------------------------
# Processes


def launch(order: dict[str, Any]) -> int:
    """Run the agent of one run, in a process of its own."""
    from megatron.launch.agents import agent
    from megatron.launch.agents import node_ranks as rank

    reading, writing = os.pipe()  # a file of output would be on the full disk, too
    os.dup2(writing, 1)
    os.dup2(writing, 2)
    os.close(writing)
    copier = threading.Thread(target=copy_to, args=(reading, Path(order["folder"]) / "output"))
    copier.start()
    os.environ["FAULT_FOLDER"] = order["folder"]
    run_main = rank.run_main

    def train_with_fault(main: str, flags: Sequence[str]) -> None:
        (Path(order["folder"]) / f"pid_{os.environ['RANK']}").write_text(str(os.getpid()))
        install(order["fault"], order["fault_rank"])
        run_main(main, flags)

    if order["has_launcher"]:
        rank.run_main = train_with_fault
        options = agent.AgentOptions(
            ranks_per_node=order["world_size"],
            alert_command=f"tee -a {order['folder']}/alerts.jsonl",
            run_name="faulty",
        )
        status = agent.run_agent(options, order["flags"], "fork")
    else:
        status = run_without_launcher(order["world_size"], partial(train_with_fault, "megatron.train", order["flags"]))
    sys.stderr.flush()
    os.close(1)
    os.close(2)
    copier.join()  # ends once no rank is left that could write
    return status


def run_without_launcher(world_size: int, train: Callable[[], None]) -> int:
    """Fork the ranks, which nobody ends if one of them dies. Return the status of the last."""
    port, pids = free_port(), []
    for rank in range(world_size):
        pids.append(os.fork())
        if pids[-1] == 0:
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "MASTER_PORT": port}
            os.environ |= {"MASTER_ADDR": "127.0.0.1", **{name: str(value) for name, value in place.items()}}
            train()
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids][-1]


def copy_to(reading: int, path: Path) -> None:
    with open(reading, "rb", buffering=0) as source, open(path, "wb", buffering=0) as target:
        while content := source.read(65536):
            target.write(content)


def serve() -> None:
    """Fork a launcher for each line of stdin, and say on stdout how each ended."""
    with importing():
        import deepspeed  # noqa: F401
        import torch
        import torch.utils.tensorboard.writer

        import megatron.launch.agents.agent
        import megatron.train

        megatron.train.preload()
    gc.freeze()  # no collection of a fork writes to all of these objects

    torch.set_num_threads(1)

    def wait_for(identity: str, pid: int) -> None:
        _, status = os.waitpid(pid, 0)
        print(json.dumps([identity, os.waitstatus_to_exitcode(status), time.monotonic()]), flush=True)

    for line in sys.stdin:
        order = json.loads(line)
        pid = os.fork()
        if pid == 0:
            status = 71
            try:
                status = launch(order)
            finally:
                os._exit(status)
        threading.Thread(target=wait_for, args=(order["folder"], pid), daemon=True).start()


class Zygote:
    """Starts runs, several at a time. Call `stop` at the end."""

    def __init__(self) -> None:
        environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.training.faulty_run"],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        self._changed = threading.Condition()
        self._ended: dict[str, tuple[int, float]] = {}
        self._gone = False
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with self._changed, contextlib.suppress(ValueError):  # what else is printed
                identity, status, ended_s = json.loads(line)
                self._ended[identity] = status, ended_s
                self._changed.notify_all()
        with self._changed:
            self._gone = True
            self._changed.notify_all()

    def run(
        self,
        folder: Path,
        flags: Sequence[str],
        fault: str,
        *,
        fault_rank: int = 1,
        world_size: int = 2,
        has_launcher: bool = True,
    ) -> Ended:
        folder.mkdir(parents=True, exist_ok=True)
        order = {
            "folder": str(folder),
            "flags": list(flags),
            "fault": fault,
            "fault_rank": fault_rank,
            "world_size": world_size,
            "has_launcher": has_launcher,
        }
        assert self._process.stdin is not None
        with self._changed:
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
            known = self._changed.wait_for(lambda: self._gone or str(folder) in self._ended, START_LIMIT_S)
        assert known, f"the run in {folder} did not end: {(folder / 'output').read_text()}"
        status, ended_s = self._ended[str(folder)]
        met = folder / "fault_s"
        alive = [rank for rank in range(world_size) if _lives(int((folder / f"pid_{rank}").read_text()))]
        seconds = ended_s - float(met.read_text()) if met.exists() else float("nan")
        return Ended(status, seconds, (folder / "output").read_text(errors="replace"), alive)

    def stop(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=HANG_S)
        finally:
            self._process.kill()
            self._process.wait()
            self._reader.join()


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


if __name__ == "__main__":
    serve()
