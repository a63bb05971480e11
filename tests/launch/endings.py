"""Runs of agents whose ranks only wait, each disturbed once: `python -m tests.launch.endings` reads trials, in JSON.

This process has all imports, and each trial forks it once for each node: an owner of an agent, with a real fork server.
So hundreds of moments can be tried. The process adopts what a run leaves behind, and so finds it.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NoReturn
from unittest.mock import patch

import psutil

from megatron.launch.agents import agent, helper_processes, ownership, restart_policy
from megatron.launch.agents.agent_command import AgentOptions
from megatron.launch.child_processes import end_quietly_without_agent, end_with_parent
from megatron.resilience.shutdown import SIGNALS, Signals
from megatron.runtime.commands import FAILED
from megatron.runtime.messages import SECRET

ROOT = Path(__file__).resolve().parent.parent.parent
LIMIT_S = 1200.0
"""It ends a hang alone, as HANG_S of tests/ranks.py, which imports more than the ranks of these trials need."""
LEFT_S = 3.0
"""Time for a node to end after another one's agent was killed. Then it is stopped, as a launcher does."""
STEPS = 20
STEP_S = 0.01
IN_SERVER = "MEGATRON_TEST_FORK_SERVER"
DISTURBED = "MEGATRON_TEST_DISTURBED"
"""Names a file that exists once the run was disturbed."""


def say(text: str) -> None:
    os.write(1, f"{text}\n".encode())


def rank() -> NoReturn:
    """Run some steps of 10 ms, or fewer when a signal comes: `process` of megatron.train."""
    name = f"{os.environ['RANK']} in attempt {os.environ['TORCHELASTIC_RESTART_COUNT']}"
    with Signals() as signals:
        say(f"runs: {name}")
        if "--fail" in sys.argv and name == "1 in attempt 0":
            while "--once-disturbed" in sys.argv and not Path(os.environ[DISTURBED]).exists():
                time.sleep(0.001)
            os.kill(os.getpid(), signal.SIGKILL)
        for _ in range(STEPS):
            time.sleep(STEP_S)
            if signals.first:
                break
        say(f"done: {name}")
        os._exit(0)  # signals are received to the end of the process, as in megatron.train


def run(trial: dict[str, Any], node: int, folder: str) -> NoReturn:
    """Own the agent of a node; says what it does."""
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    ownership.MEMORY = Path(folder)  # so that the memory of an agent that restarts its ranks is seen to be left
    os.environ["DS_ACCELERATOR"] = "cpu"
    os.environ[IN_SERVER] = "1"
    os.environ[SECRET] = "of the nodes of a test"
    several: dict[str, Any] = {"node_rank": node, "run_id": "trial"} if trial["options"].get("nodes", 1) > 1 else {}
    options = AgentOptions(ranks_per_node=2, **trial["options"], **several)
    original = forkserver.set_forkserver_preload
    patch.object(forkserver, "set_forkserver_preload", lambda names: original([__spec__.name])).start()
    restart_policy.FIRST_DELAY_S = 0.05
    agent.FAILED_GRACE_S = 0.2
    end_processes = ownership.end_processes

    def slow_end(*arguments: Any) -> list[int]:  # the longest part of a clean-up
        if trial.get("slow_end"):
            say("cleans up")
            time.sleep(0.2)
        return end_processes(*arguments)

    patch.object(ownership, "end_processes", slow_end).start()
    start = BaseProcess.start

    def start_and_lose_server(process: BaseProcess) -> None:
        start(process)
        times = trial.get("lost_servers", 0)
        if times and process.name == "rank 0":
            trial["lost_servers"] = times - 1
            server = psutil.Process(helper_processes._server_pid())
            server.kill()
            while server.status() != psutil.STATUS_ZOMBIE:
                time.sleep(0.001)

    patch.object(BaseProcess, "start", start_and_lose_server).start()

    def work() -> int:
        say("owned")
        status = agent.run_agent(options, trial["flags"])
        say("returned")
        return status

    # what comes before the first statement of `owned` waits for it: its default effect is that of no owner
    signal.pthread_sigmask(signal.SIG_BLOCK, [*SIGNALS, ownership.END_AT_ONCE])
    say("starts")
    ownership.owned(work)


def target(what: str, owner: int) -> int | None:
    """Return the process that is to get a signal."""
    if what == "owner":
        return owner
    children = psutil.Process(owner).children()
    if what == "agent":
        return children[0].pid if children else None
    words = {"fork server": "forkserver import", "tracker": "resource_tracker import"}[what]
    for process in children[0].children() if children else []:
        if words in " ".join(process.cmdline()) and process.ppid() == children[0].pid:
            return process.pid
    return None


def disturb(trial: dict[str, Any], owners: list[int]) -> bool:
    """Send the signal, to all owners or to another process of the last node; return whether there was one."""
    found = False
    for owner in owners if trial["what"] == "owner" else owners[-1:]:
        with contextlib.suppress(psutil.Error, ProcessLookupError, IndexError):
            if (pid := target(trial["what"], owner)) is not None:
                os.kill(pid, trial["signal"])
                found = True
    return found


def be_node(trial: dict[str, Any], node: int, folder: str, output: int) -> NoReturn:
    """Run in a forked process. It never returns to its parent's code, which would remove the parent's folders."""
    try:
        os.setsid()
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.closerange(3, 64)
        run(trial, node, folder)
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(FAILED)


def attempt(trial: dict[str, Any]) -> dict[str, Any]:
    """Make a run, disturb it so many seconds after its output has the words `after`, and return what came of it."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as signs:
        disturbed = Path(signs, "disturbed")
        os.environ[DISTURBED] = str(disturbed)
        reader, writer = os.pipe()
        owners = []
        for node in range(trial["options"].get("nodes", 1)):
            owners.append(os.fork())
            if owners[-1] == 0:
                be_node(trial, node, folder, writer)
        os.close(writer)
        output, at_s, was_disturbed, was_stopped = b"", None, False, False
        end_s, left_s = time.monotonic() + LIMIT_S, None
        while True:
            now_s = time.monotonic()
            wanted = len(owners) if trial["after"] == "starts" else 1  # before that an owner is not one yet
            if at_s is None and output.count(trial["after"].encode()) >= wanted:
                at_s = now_s + trial["delay_s"]
            if at_s is not None and now_s >= at_s and not was_disturbed:
                was_disturbed = disturb(trial, owners)
                if was_disturbed:
                    disturbed.touch()
            if now_s > end_s:
                break
            if trial["what"] == "agent" and len(owners) > 1 and has_ended(owners[-1]):
                left_s = left_s or now_s + LEFT_S
                if now_s > left_s and not was_stopped and not has_ended(owners[0]):
                    os.kill(owners[0], signal.SIGTERM)
                    was_stopped = True
            pause_s = 0.2 if at_s is None or was_disturbed else max(0.001, at_s - now_s)
            if not select.select([reader], [], [], min(pause_s, 0.2))[0]:
                continue
            part = os.read(reader, 65536)
            output += part
            if not part:
                break
        os.close(reader)
        statuses = [status_of(owner, end_s) for owner in owners]
        left = [process.pid for process in psutil.Process().children(recursive=True) if process.status() != "zombie"]
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        return {
            "statuses": statuses,
            "output": output.decode(),
            "was_disturbed": was_disturbed,
            "was_stopped": was_stopped,
            "left": len(left),
            "files": [path.name for path in Path(folder).rglob("*")],
        }


def has_ended(owner: int) -> bool:
    """Return whether an owner has ended, and leave it to be waited for."""
    return os.waitid(os.P_PID, owner, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def status_of(owner: int, end_s: float) -> int | None:
    """Return the exit status of an owner; None: it does not end."""
    while True:
        ended, status = os.waitpid(owner, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > end_s:
            return None
        time.sleep(0.002)


def serve() -> None:
    ownership.adopt_orphans()
    for line in sys.stdin:
        print(json.dumps(attempt(json.loads(line))), flush=True)


class Trials:
    """Client of such a process. One that ends fails its trial, and another takes its place."""

    def __enter__(self) -> Trials:
        self._start()
        return self

    def _start(self) -> None:
        self._errors = tempfile.TemporaryFile(mode="w+")  # noqa: SIM115  # as long as the process
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.launch.endings"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            cwd=ROOT,
            preexec_fn=end_with_parent(),
        )

    def __exit__(self, *error: object) -> None:
        self._end()

    def _end(self) -> str:
        """End the process, and return its status and its words."""
        with contextlib.suppress(BrokenPipeError):
            self._process.communicate()
        status = self._process.wait()
        self._errors.seek(0)
        with self._errors:
            return f"status {status}: {self._errors.read()}"

    def __call__(
        self,
        after: str,
        delay_s: float,
        what: str,
        number: int,
        *flags: str,
        slow_end: bool = False,
        lost_servers: int = 0,
        **options: Any,
    ) -> SimpleNamespace:
        """`lost_servers`: starts of ranks in which the fork server is killed once rank 0 has begun."""
        trial = {"after": after, "delay_s": delay_s, "what": what, "signal": int(number), "flags": flags}
        trial |= {"options": options, "slow_end": slow_end, "lost_servers": lost_servers}
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # then it does not answer
            self._process.stdin.write(json.dumps(trial) + "\n")
            self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            words = self._end()
            self._start()
            raise RuntimeError(f"{trial}: its process ended without an answer, {words}")
        return SimpleNamespace(**json.loads(answer))


if IN_SERVER in os.environ and __name__ != "__main__":  # preloaded by the fork server, as launch/preload.py is
    end_with_parent()()
    end_quietly_without_agent()
    sys.modules["megatron.train"] = SimpleNamespace(process=rank)  # type: ignore[assignment]
    sys.modules["megatron.launch.preload"] = ModuleType("preload")  # the ranks need no torch

if __name__ == "__main__":
    serve()
