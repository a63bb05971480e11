"""The end of a launch: its status is fixed once, by the first cause, at whatever moment a signal or a death comes."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.runtime.commands import FAILED
from megatron.runtime.network import bound_socket
from tests.launch.endings import IN_SERVER, ROOT, Trials
from tests.ranks import free_port

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux adopts orphans")

KILL, QUIT, TERM = signal.SIGKILL, signal.SIGQUIT, signal.SIGTERM
STOPS = (TERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
BLAME = "the fork server of the ranks on "


@pytest.fixture(scope="module")
def trial() -> Iterator[Trials]:
    with Trials() as trials:
        yield trials


def check(came: SimpleNamespace, *, what: str, number: int, restarts: int, fails: bool) -> None:
    """Assert what holds of any trial, whenever it was disturbed."""
    out, statuses = came.output, set(came.statuses)
    assert None not in statuses, out
    assert (came.left, came.files) == (0, []), out
    for words in ("Traceback", "Warning", "EOFError", "status 255"):
        assert words not in out, out
    assert f" on {socket.gethostname()} was killed by SIGTERM" not in out
    if fails:  # by design, once: its node, where there are several, the restart and a stop in its delay may name it
        assert out.count("rank 1 on") <= 1 + len(came.statuses), out
        assert "rank 1 on" not in out.partition("runs: 1 in attempt 1")[2], out
    if what == "owner" and number == QUIT:
        assert statuses <= {0, 128 + QUIT}, out
    elif what == "owner":
        # several nodes that wait for each other have nothing to save
        waits = {128 + number} if len(came.statuses) > 1 and "runs:" not in out else set()
        assert statuses <= {0} | waits, out
    elif what == "agent":
        # a first node that is left alone waits for another one, until the launcher stops it
        stopped = {128 + TERM} if came.was_stopped else set()
        assert statuses <= {0, 128 + KILL} | stopped, out
    elif what == "fork server":
        assert "rank 0 on" not in out, out
        if not statuses <= {0}:
            assert statuses == {128 + KILL}, out
            assert BLAME in out, out
            assert restarts == 0, out
        elif BLAME not in out:
            assert "done: 0" in out, out
            assert "done: 1" in out, out
    else:
        assert statuses == {0}, out


CASES: list[tuple[str, str, int, int, bool, str]] = [
    # after these words, to whom, what, restarts, a rank fails in the first attempt, what is said
    ("owned", "owner", TERM, 0, False, "SIGTERM: the ranks stop after this step and save"),
    ("owned", "owner", signal.SIGINT, 2, False, "SIGINT: the ranks stop after this step and save"),
    ("runs: 1 in attempt 0", "owner", signal.SIGHUP, 0, False, "SIGHUP: the ranks stop after this step and save"),
    ("restart 1 of 3", "owner", TERM, 3, True, "SIGTERM: the "),
    ("runs: 0 in attempt 1", "owner", signal.SIGUSR1, 3, True, "SIGUSR1: the ranks stop after this step and save"),
    ("cleans up", "owner", TERM, 0, False, "returned"),
    ("cleans up", "owner", signal.SIGINT, 0, False, "returned"),
    ("cleans up", "owner", QUIT, 0, False, "returned"),
    ("runs: 0 in attempt 0", "agent", KILL, 2, False, "runs"),
    ("owned", "fork server", KILL, 2, False, f"{BLAME}HOST "),  # before or after it could fork
    ("owned", "fork server", KILL, 0, False, f"{BLAME}HOST "),
    ("runs: 1 in attempt 0", "fork server", KILL, 2, False, f"{BLAME}HOST was killed by SIGKILL; restart 1 of 2"),
    ("runs: 1 in attempt 0", "fork server", KILL, 0, False, f"{BLAME}HOST was killed by SIGKILL\n"),
    ("restart 1 of 3", "fork server", KILL, 3, True, f"{BLAME}HOST "),  # before or after it forked the new ranks
    ("owned", "tracker", KILL, 0, False, "returned"),
    ("runs: 1 in attempt 0", "tracker", KILL, 3, True, "resource tracker was killed by SIGKILL; no rank needs it"),
]


SWEPT = {1, 4, 6, 10, 12}
"""Places of the cases that differ from others in the signal or the number of restarts alone."""


@pytest.mark.parametrize(
    ("after", "what", "number", "restarts", "fails", "said"),
    [pytest.param(*case, marks=pytest.mark.slow if place in SWEPT else ()) for place, case in enumerate(CASES)],
)
def test_the_first_cause_fixes_the_status(
    trial: Trials, after: str, what: str, number: int, restarts: int, fails: bool, said: str
) -> None:
    flags = ["--fail"] if fails else []
    if what == "tracker":
        flags += ["--once-disturbed"]  # its death is said by the start that follows
    came = trial(after, 0.0, what, number, *flags, slow_end=after == "cleans up", max_restarts=restarts)
    check(came, what=what, number=number, restarts=restarts, fails=fails)
    assert said.replace("HOST", socket.gethostname()) in came.output, came.output


@pytest.mark.parametrize(("times", "restarts"), [pytest.param(1, 0, marks=pytest.mark.slow), (2, 0), (2, 1)])
def test_ranks_of_a_fork_server_that_ends_between_two_starts_are_started_again(
    trial: Trials, times: int, restarts: int
) -> None:
    came = trial("never said", 0.0, "owner", TERM, lost_servers=times, max_restarts=restarts)
    server, out = f"{BLAME}{socket.gethostname()}", came.output
    assert f"{server} had ended, and was started again" in out
    assert "rank 0 on" not in out, out
    assert (came.left, came.files) == (0, []), out
    if times > restarts + 1:
        assert came.statuses == [FAILED], out
        assert "it ends whenever ranks are started" in out
    else:
        assert came.statuses == [0], out
        assert out.count("done: ") == 2, out


def test_a_rank_that_is_forked_as_its_agent_dies_ends_without_a_traceback() -> None:
    code = (
        "import os, time\n"
        "from multiprocessing import forkserver\n"
        "forkserver.set_forkserver_preload(['tests.launch.endings'])\n"
        "sentinel, pipe = forkserver.connect_to_new_process([])\n"
        "os.close(pipe)\n"  # as the kernel does where the agent is killed before it has said what to run
        "os.read(sentinel, 8)\n"  # its number
        "os.read(sentinel, 8)\n"  # its end
    )
    environment = os.environ | {IN_SERVER: "1"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""


STEP_MS = 5
AT_ONCE = 4
"""Trials at a time: most of their time is waiting."""
DISTURBANCES = [
    *(("owner", number) for number in (*STOPS, QUIT)),
    ("agent", KILL),
    ("fork server", KILL),
    ("tracker", KILL),
]
PHASES = {
    # after these words, for so many milliseconds, restarts, a rank fails in the first attempt, the clean-up is slow
    "start": ("starts", 400, 2, False, False),
    "restart": ("restart 1 of 3", 300, 3, True, False),
    "shutdown": ("done: 0 in attempt 0", 250, 0, False, True),
}


@pytest.fixture(scope="module")
def pool() -> Iterator[SimpleQueue[Trials]]:
    with contextlib.ExitStack() as stack:
        free: SimpleQueue[Trials] = SimpleQueue()
        for _ in range(AT_ONCE):
            free.put(stack.enter_context(Trials()))
        yield free


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize(("what", "number"), DISTURBANCES)
def test_every_five_milliseconds_of_a_run(
    pool: SimpleQueue[Trials], what: str, number: int, phase: str, nodes: int
) -> None:
    after, span_ms, restarts, fails, slow_end = PHASES[phase]

    def disturbed(at_ms: int) -> bool:
        flags = ["--fail"] if fails else []
        trial = pool.get()
        # bound until the trial ends, or another program might take the port before the first node listens there
        with bound_socket("127.0.0.1", free_port()) as held:
            endpoint = f"127.0.0.1:{held.getsockname()[1]}"
            two: dict[str, Any] = {"nodes": nodes, "rendezvous": endpoint} if nodes > 1 else {}
            try:
                came = trial(after, at_ms / 1000, what, number, *flags, slow_end=slow_end, max_restarts=restarts, **two)
            finally:
                pool.put(trial)
        try:
            check(came, what=what, number=number, restarts=restarts, fails=fails)
        except AssertionError as error:
            raise AssertionError(f"{at_ms} ms after {after!r}: {came.statuses}, {error}") from None
        return bool(came.was_disturbed)

    with ThreadPoolExecutor(AT_ONCE) as threads:
        found = list(threads.map(disturbed, range(0, span_ms, STEP_MS)))
    assert sum(found) > len(found) / 4, "the moments are those of the run"
