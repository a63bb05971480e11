"""Shared parts of the comparisons: sides that run in turn, medians and ratios, and a peer in an interpreter of its own.

megatron-core owns the package name `megatron`, as this project does, so the two never live in one interpreter. The peer
runs in an environment that holds megatron-core and not this project:

    python -m venv peer
    peer/bin/pip install megatron-core==0.16.1 torch tokenizers sentencepiece

and every script takes it as `--peer-python peer/bin/python`. megatron-core's C++ helpers come compiled in its wheels.
Where pip had to build it from source without them, `make -C` the folder `megatron/core/datasets` of that environment
(it needs a C++ compiler and pybind11) compiles them.

Packing is compared with TRL's and InstructLab's, which have an environment of their own too:

    python -m venv tuning
    tuning/bin/pip install trl==1.16.0 instructlab-training==0.16.2
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import secrets
import shutil
import socket
import statistics
import subprocess
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing import Self

PEERS = Path(__file__).resolve().parent / "peers"
PEER_HELP = "interpreter of an environment with megatron-core 0.16.1; benchmarks/alternating.py says how to make one"
TUNING_PEER_HELP = (
    "interpreter of an environment with TRL 1.16.0 and instructlab-training 0.16.2; benchmarks/alternating.py says how "
    "to make one"
)


POLL_S = 0.1


class RankError(Exception):
    """A rank of a benchmark ended without its result."""


class PeerError(Exception):
    """The peer answered a request with a fault, or not at all."""


def free_port() -> int:
    """Return a port that is free, below those that the kernel gives to connections in the meantime."""
    while True:
        port = 15_000 + secrets.randbelow(15_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def on_ranks(rank: Callable[..., None], number: int, *arguments: Any) -> Any:
    """Return what one of `number` processes puts into its queue: rank(index, port, *arguments, queue) on each.

    Raises RankError at once where one ends by a fault, whose traceback is its own; the others are killed, since they
    wait for it.
    """
    port = free_port()
    spawn = multiprocessing.get_context("spawn")
    results: Any = spawn.SimpleQueue()
    processes = [spawn.Process(target=rank, args=(index, port, *arguments, results)) for index in range(number)]
    for process in processes:
        process.start()
    try:
        return _result_of(processes, results)
    finally:
        for process in processes:
            process.kill()
            process.join()


def _result_of(processes: Sequence[BaseProcess], results: Any) -> Any:
    found: list[Any] = []
    while True:
        running = [process.sentinel for process in processes if process.exitcode is None]
        # before the end of its rank, which waits until a long result is taken
        while not results.empty():
            found.append(results.get())
        for index, process in enumerate(processes):
            if process.exitcode:
                raise RankError(f"rank {index} of {len(processes)} ended with exit status {process.exitcode}")
        if not running:
            break
        connection.wait(running, timeout=POLL_S)
    if not found:
        raise RankError(f"none of {len(processes)} ranks gave a result")
    return found[0]


def alternate(sides: Mapping[str, Callable[[], float]], rounds: int, *, warm_up: bool = True) -> dict[str, list[float]]:
    """Results of each side, usually seconds, round by round.

    The order is reversed from round to round: whichever goes first may find colder caches. `warm_up` runs a round
    before that is not counted.
    """
    measured: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(rounds + warm_up):
        for name in list(sides)[:: 1 if turn % 2 else -1]:
            value = sides[name]()
            if turn >= warm_up:
                measured[name].append(value)
    return measured


def positive(text: str) -> int:
    """For argparse: a number of rounds, samples or megabytes."""
    if (value := int(text)) < 1:
        raise ValueError
    return value


def spread(values: Sequence[float], digits: int = 3) -> str:
    """Median, and from where to where."""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def quotients(above: Sequence[float], below: Sequence[float]) -> list[float]:
    """Round by round, so that a slow minute of the machine affects both sides."""
    return [a / b for a, b in zip(above, below, strict=True)]


def peer_environment() -> dict[str, str]:
    """This process's environment without what would lead another interpreter to this project."""
    return {
        name: value for name, value in os.environ.items() if not name.startswith("PYTHON") and name != "VIRTUAL_ENV"
    }


def peer_command(python: str, script: str) -> list[str]:
    """A script of benchmarks/peers under the peer's interpreter, for any current folder."""
    found = os.path.abspath(shutil.which(python) or python)  # a link stays one: it is what makes an environment
    # -I: neither the current folder nor the script's is searched for modules
    return [found, "-I", str(PEERS / script)]


class Peer:
    """A script of benchmarks/peers in its own interpreter: requests and answers, one JSON line each. A context manager.

    The requests are the functions of the script; arrays travel in files.
    """

    def __init__(self, python: str, script: str, interpreter: str):
        """`interpreter` says which one is needed, for the error."""
        self._interpreter = interpreter
        try:
            self._process = subprocess.Popen(
                peer_command(python, script),
                cwd=tempfile.gettempdir(),
                env=peer_environment(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        except OSError as error:
            raise PeerError(f"--peer-python {python} cannot be started: {error.strerror}; {interpreter}") from error
        self._python = python
        self.versions: str = self.ask("versions", {})

    def ask(self, request: str, arguments: Mapping[str, Any], timeout_s: float = 600) -> Any:
        """The answer. Raises PeerError with the peer's own words; one that hangs is ended after timeout_s."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        watchdog = threading.Timer(timeout_s, self._process.kill)
        watchdog.start()
        try:
            self._process.stdin.write(json.dumps({"request": request, "arguments": arguments}) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            watchdog.cancel()
        if not line:
            status = self._process.wait()
            hint = f"; give the {self._interpreter}" if request == "versions" else ""
            raise PeerError(f"--peer-python {self._python} ended with status {status} at {request!r}{hint}")
        answer = json.loads(line)
        if "error" in answer:
            raise PeerError(answer["error"])
        return answer["answer"]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._process.kill()
        assert self._process.stdin is not None
        self._process.stdin.close()  # the end of its input ends it
        self._process.wait()


class MegatronCore(Peer):
    """megatron-core: the requests of benchmarks/peers/megatron_core_peer.py."""

    def __init__(self, python: str):
        super().__init__(python, "megatron_core_peer.py", PEER_HELP)


class TuningPeer(Peer):
    """TRL and InstructLab: the requests of benchmarks/peers/tuning_peer.py."""

    def __init__(self, python: str):
        super().__init__(python, "tuning_peer.py", TUNING_PEER_HELP)
