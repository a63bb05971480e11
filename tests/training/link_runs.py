"""Runs of a tiny model over hosts whose links the kernel limits. Runs inside ranks that have entered these hosts."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from megatron.training.loop import Loop
from tests import runs
from tests.training.slowed import slowed

ADDRESS = "10.77.0.{}"
"""Of rank 0 and host 1, and so on (tests/hosts.py)."""
INTERFACE = "eth0"
USUAL_MBIT = 400
"""Far below what a busy machine sends, so that the limit sets the rate."""
BURNERS = 2
"""Programs that share a core with a rank."""


def enter(namespaces: Sequence[Sequence[str]]) -> None:
    """Enter this rank's host, by the files of its namespaces: threads that begin later are there too."""
    libc = ctypes.CDLL(None, use_errno=True)
    for path in namespaces[int(os.environ["RANK"])]:
        descriptor = os.open(path, os.O_RDONLY)
        if libc.setns(descriptor, 0):
            raise OSError(ctypes.get_errno(), path)
        os.close(descriptor)
    os.environ |= {"MASTER_ADDR": ADDRESS.format(1), "GLOO_SOCKET_IFNAME": INTERFACE}


def why_not() -> str | None:
    """Why the kernel cannot limit links; None: it can."""
    if shutil.which("tc") is None:
        return "needs tc: apt-get install iproute2"
    attempt = ["unshare", "--net", "tc", "qdisc", "add", "dev", "lo", "root", "htb"]
    tried = subprocess.run(attempt, capture_output=True, text=True)
    return None if tried.returncode == 0 else f"this Linux limits no links: {tried.stderr.strip()}"


def _tc(*words: str) -> None:
    # it warns of rates that are far apart
    subprocess.run(["tc", *words], check=True, stderr=subprocess.DEVNULL)


def _rate(megabits: float) -> list[str]:
    return ["htb", "rate", f"{megabits:g}mbit", "burst", "128k"]


@contextlib.contextmanager
def limited() -> Iterator[None]:
    """Send at the usual rate to each other host, apart: no link is slow because another one is used."""
    _tc("qdisc", "add", "dev", INTERFACE, "root", "handle", "1:", "htb")
    for host in range(1, int(os.environ["WORLD_SIZE"]) + 1):
        number = f"1:{host}0"
        _tc("class", "replace", "dev", INTERFACE, "parent", "1:", "classid", number, *_rate(USUAL_MBIT))
        match = ("u32", "match", "ip", "dst", f"{ADDRESS.format(host)}/32", "flowid", number)
        _tc("filter", "add", "dev", INTERFACE, "parent", "1:", "protocol", "ip", "prio", str(host), *match)
    try:
        yield
    finally:
        _tc("qdisc", "del", "dev", INTERFACE, "root")


def slow_down(rank: int) -> None:
    """Send at a third of the usual rate to one rank from now on."""
    number = f"1:{rank + 1}0"
    _tc("class", "replace", "dev", INTERFACE, "parent", "1:", "classid", number, *_rate(USUAL_MBIT / 3))


@contextlib.contextmanager
def at_step(number: int, act: Callable[[], None]) -> Iterator[None]:
    """Do this before a step."""
    step = Loop._step

    def count(loop: Loop) -> bool:
        if loop.progress.iteration + 1 == number:
            act()
        return step(loop)

    with patch.object(Loop, "_step", count):
        yield


def _run_on(cores: set[int]) -> None:
    """Have all threads of this process run on these cores."""
    for thread in os.listdir("/proc/self/task"):
        # one may have ended since
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread), cores)


@contextlib.contextmanager
def shared_core() -> Iterator[Callable[[], None]]:
    """Yield a function that has this rank share one core with programs that always run, until the end of the block."""
    cores, burners = os.sched_getaffinity(0), list[subprocess.Popen[bytes]]()

    def share() -> None:
        _run_on({min(cores)})
        burners.extend(subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(BURNERS))

    try:
        yield share
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()
        _run_on(cores)


@dataclass(frozen=True)
class Disturbance:
    """What becomes slow with a step of a run."""

    from_step: int
    links: Sequence[tuple[int, int]] = ()
    """Ranks (sender, receiver) between which a third of the usual rate is left."""
    computes_longer: int | None = None
    """Rank that computes longer."""
    shares_core: int | None = None
    """Rank that shares its core with other programs."""


def train(folder: str, arguments: str, planned: Disturbance) -> list[dict[str, Any]]:
    """Probes of a run over limited links."""
    with limited():
        return train_unlimited(folder, arguments, planned)


def train_unlimited(folder: str, arguments: str, planned: Disturbance) -> list[dict[str, Any]]:
    """Probes of a run."""
    rank = int(os.environ["RANK"])
    # of each layer: a busy machine delays whole steps by as much as one twentieth of a second
    pause_s = 0.25 if rank == planned.computes_longer else 0.0
    with slowed("forward", pause_s, planned.from_step), shared_core() as share:

        def change() -> None:
            for sender, receiver in planned.links:
                if sender == rank:
                    slow_down(receiver)
            if rank == planned.shares_core:
                share()

        with at_step(planned.from_step, change):
            fault = runs.train(f"--results-dir {folder} {arguments}")
    assert not fault, fault
    return runs.rows(Path(folder), "links") if rank == 0 else []
