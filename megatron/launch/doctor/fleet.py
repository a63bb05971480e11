"""The agents of the doctor on all hosts: their start by ssh, or here for this machine, questions, answers and end.

One thread questions all hosts at once. A host that does not answer in time, answers damaged, or ends is named with the
reason and gets no further questions; the others go on.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import selectors
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import IO, Any

from megatron.launch.addresses import is_this_machine, login_of
from megatron.launch.child_processes import end_with_parent, kill_tree, python_path
from megatron.launch.doctor.facts import plain
from megatron.launch.doctor.replies import LARGEST_LINE, DamagedReplyError, Failed, Record, record_of, unsealed
from megatron.launch.host_environment import sent_variables
from megatron.launch.plan import Host
from megatron.runtime.descriptors import raise_limit

AGENT = "megatron.launch.doctor.agent"
START_S = 40.0
"""Time for an agent to start and answer first: a login, and imports from a shared disk."""
CONNECT_S = 10
AT_ONCE = 64
"""Agents that are started at one time: a handshake of ssh takes a core of this machine for some milliseconds."""
END_S = 2.0
"""Time for agents to end by themselves."""
KEPT_ERRORS = 2000


@dataclass
class HostAgent:
    """The agent of a host, as this machine sees it."""

    host: Host
    process: subprocess.Popen[bytes]
    answered: int = 0
    """Replies that have come."""
    asked_at: float = 0.0
    answered_at: float = 0.0
    """By this machine's clock."""
    fault: str | None = None
    """Reason for which it gets no further questions."""
    received: bytearray = field(default_factory=bytearray)
    unread_bytes: int = 0
    """Those that were no replies."""
    errors: bytes = b""

    def line(self) -> bytes | None:
        """Take the next whole line that has come."""
        end = self.received.find(b"\n")
        if end < 0:
            return None
        line = bytes(self.received[:end])
        del self.received[: end + 1]
        return line

    def last_error(self) -> str:
        """Return the last line that it, or ssh, has printed on stderr."""
        lines = self.errors.decode(errors="replace").strip().splitlines()
        return plain(lines[-1]) if lines else ""


class Fleet:
    """Agents on all hosts. What was started ends with the block."""

    def __init__(
        self,
        hosts: Sequence[Host],
        device: str,
        folder: str,
        activate: str | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`environment`: variables of a run, beside those that every host is sent."""
        self.hosts = tuple(hosts)
        self.device = device
        self._first = {"device": device, "folder": folder}
        self._activate, self._environment = activate, dict(environment or {})
        self._key = secrets.token_bytes(32)
        self.agents: dict[int, HostAgent] = {}

    def __enter__(self) -> Fleet:
        raise_limit()  # of open files: three for each host
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        for agent in self.agents.values():
            with contextlib.suppress(OSError):
                _pipe(agent.process.stdin).close()
        deadline_s = time.monotonic() + (END_S if error is None else 0.0)
        for agent in self.agents.values():
            self._end(agent, max(0.0, deadline_s - time.monotonic()))

    def _end(self, agent: HostAgent, within_s: float) -> None:
        # an agent ends with its connection, and all below it: ownership.py
        with contextlib.suppress(subprocess.TimeoutExpired):
            agent.process.wait(within_s)
        if agent.process.poll() is None:
            kill_tree(agent.process.pid)
            agent.process.wait()
        for stream in (agent.process.stdout, agent.process.stderr):
            _pipe(stream).close()

    @property
    def alive(self) -> list[int]:
        """Numbers of the hosts that still take questions."""
        return [number for number, agent in self.agents.items() if agent.fault is None]

    def start(self, question: Mapping[str, Any], kind: type[Record]) -> dict[int, Record | Failed]:
        """Start all agents, some at a time, and put the first question to each."""
        found: dict[int, Record | Failed] = {}
        numbers = list(range(len(self.hosts)))
        for begin in range(0, len(numbers), AT_ONCE):
            some = numbers[begin : begin + AT_ONCE]
            for number in some:
                self._start(number)
            found |= self.ask({number: dict(question) for number in some if number in self.alive}, kind, START_S)
        return found

    def _start(self, number: int) -> None:
        host = self.hosts[number]
        process = subprocess.Popen(
            self.command(host),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            # a Ctrl-C at the terminal comes to this process alone, which ends them
            start_new_session=True,
            preexec_fn=end_with_parent(),
        )
        for stream in (process.stdin, process.stdout, process.stderr):
            os.set_blocking(_pipe(stream).fileno(), False)
        self.agents[number] = HostAgent(host, process)
        # not on the command line, which every user of a host reads
        self._write(self.agents[number], self._first | {"key": self._key.hex()})

    def command(self, host: Host) -> list[str]:
        """Return the command that starts the agent of a host: here, or by ssh."""
        agent = [sys.executable, "-u", "-m", AGENT]
        if is_this_machine(host.name):
            own_variables = [f"{name}={value}" for name, value in self._environment.items()]
            return ["env", *own_variables, f"PYTHONPATH={python_path()}", *agent]
        variables = [f"{name}={value}" for name, value in (sent_variables(os.environ) | self._environment).items()]
        command = ["/usr/bin/env", "-u", "CUDA_VISIBLE_DEVICES", f"PYTHONPATH={python_path()}", *variables, *agent]
        if self._activate is not None:
            command = ["/bin/bash", "-c", 'source "$0/activate" && exec "$@"', self._activate, *command]
        in_folder = ["/bin/sh", "-c", 'cd "$0" && exec "$@"', os.getcwd(), *command]
        own = shlex.split(os.environ.get("PDSH_SSH_ARGS_APPEND", ""))  # first: ssh keeps the first value of each
        options = ["-a", "-x", "-T", "-oBatchMode=yes", f"-oConnectTimeout={CONNECT_S}"]
        return ["ssh", *own, *options, login_of(host.name), shlex.join(in_folder)]

    def ask(
        self, questions: Mapping[int, Mapping[str, Any]], kind: type[Record], limit_s: float
    ) -> dict[int, Record | Failed]:
        """Question these hosts at once, and return the answers; a host without one has a fault from here on."""
        waiting: set[int] = set()
        for number, question in questions.items():
            agent = self.agents[number]
            if agent.fault is None:
                agent.asked_at = time.time()
                self._write(agent, question)
                waiting.add(number)
        found: dict[int, Record | Failed] = {}
        deadline_s = time.monotonic() + limit_s
        with selectors.DefaultSelector() as selector:
            for number in waiting:
                process = self.agents[number].process
                for stream in (process.stdout, process.stderr):
                    selector.register(_pipe(stream), selectors.EVENT_READ, (number, stream is process.stderr))
            while waiting:
                waiting -= {number for number in waiting if self.agents[number].fault is not None}
                if time.monotonic() > deadline_s:
                    break
                for ready, _ in selector.select(min(1.0, max(0.0, deadline_s - time.monotonic()))):
                    number, is_error = ready.data
                    if not self._read(self.agents[number], is_error=is_error):
                        selector.unregister(ready.fileobj)
                    for record in self._replies(self.agents[number], kind, is_awaited=number in waiting):
                        found[number] = record
                        waiting.discard(number)
        for number in waiting:
            self.give_up(self.agents[number], f"does not answer within {limit_s:g} s")
        return found

    def _write(self, agent: HostAgent, message: Mapping[str, Any]) -> None:
        try:
            # far less than a pipe holds, and one question at a time
            stream = _pipe(agent.process.stdin)
            stream.write(json.dumps(message).encode() + b"\n")
            stream.flush()
        except (OSError, ValueError):
            self.give_up(agent, "takes no questions: its agent has ended")

    def _read(self, agent: HostAgent, *, is_error: bool) -> bool:
        """Take what has come; return False at the end of the stream."""
        stream = agent.process.stderr if is_error else agent.process.stdout
        content = _pipe(stream).read(2**16)
        if content is None:
            return True
        if is_error:
            agent.errors = (agent.errors + content)[-KEPT_ERRORS:]
        elif content:
            agent.received += content
        else:
            self._note_end(agent)
        return bool(content)

    def _note_end(self, agent: HostAgent) -> None:
        with contextlib.suppress(OSError, ValueError):
            agent.errors = (agent.errors + (_pipe(agent.process.stderr).read() or b""))[-KEPT_ERRORS:]
        said = agent.last_error()
        self.give_up(agent, f"is not reached, or its agent has ended{': ' if said else ''}{said}")

    def _replies(self, agent: HostAgent, kind: type[Record], *, is_awaited: bool) -> Iterator[Record | Failed]:
        """Yield the reply that has come, if one is awaited."""
        try:
            while (line := agent.line()) is not None:
                message = unsealed(self._key, agent.answered, line)
                if message is None:
                    agent.unread_bytes += len(line)
                    continue
                agent.answered += 1
                agent.answered_at = time.time()
                if not is_awaited:
                    raise DamagedReplyError("sent a reply without a question")
                is_awaited = False
                yield record_of(message, kind)
            if len(agent.received) + agent.unread_bytes > LARGEST_LINE:
                raise DamagedReplyError(f"sent more than {LARGEST_LINE:,} bytes that are no reply")
        except DamagedReplyError as error:
            self.give_up(agent, str(error))

    def give_up(self, agent: HostAgent, fault: str) -> None:
        """Name a host, and end what this machine holds of it."""
        if agent.fault is None:
            # a reply that is refused is quoted with its own names
            agent.fault = plain(fault)
        kill_tree(agent.process.pid)


def _pipe(stream: IO[bytes] | None) -> IO[bytes]:
    assert stream is not None
    return stream
