"""Agent of the doctor on a host: takes commands as lines on stdin, and replies by sealed lines on stdout.

    python -m megatron.launch.doctor.agent

ssh brings both. Ports are opened for the tests of links, which both ends authenticate, and while groups exchange by
torch and the device's library, as in a run. All that the agent starts ends with it, and it ends with its connection.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any, NoReturn

from megatron.launch.agents.ownership import owned
from megatron.launch.child_processes import end_with_parent, interruptible, kill_tree, noted_signals
from megatron.launch.doctor import links
from megatron.launch.doctor.facts import RESULT, plain, read_facts
from megatron.launch.doctor.replies import LARGEST_LINE, Clock, DiskRates, Port, Received, sealed_line
from megatron.measuring.disk import disk_rate, sync_seconds
from megatron.resilience.shutdown import SIGNALS
from megatron.runtime.commands import counted
from megatron.runtime.devices import find_device, rank_variables
from megatron.runtime.network import STORE_SOCKET, listen_address, listening_socket

PROGRAM = "megatron.launch.doctor.device_program"
LOOK_S = 0.05


class TaskError(Exception):
    """The host could not carry out a command."""


class HostCommands:
    """Commands of a host, a method each, which takes the arguments of the command."""

    def __init__(self, key: bytes, device: str, folder: str) -> None:
        self._key, self._device, self._folder = key, device, Path(folder)
        self._listener: socket.socket | None = None
        self._store: socket.socket | None = None

    def facts(self, towards: str) -> Any:
        facts = read_facts(self._device, self._folder, towards)
        self._device = facts.device
        return facts

    def clock(self) -> Clock:
        return Clock(time.time())

    def disk(self, size: int) -> DiskRates:
        return DiskRates(disk_rate(self._folder, size), sync_seconds(self._folder))

    def devices(self, count: int, seconds: float, size: int, limit_s: float) -> dict[str, Any]:
        """Check the cores of a CPU, or all devices at once, a process each."""
        is_host = find_device(self._device).is_host
        count = 1 if is_host else count
        commands, environments = [], []
        for rank in range(count):
            words = ["--local-rank", str(rank), "--seconds", str(seconds), "--bytes", str(size)]
            commands.append([sys.executable, "-m", PROGRAM, "--device", self._device, *words])
            environments.append({"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(count)})
        found = [result for result in run_programs(commands, environments, limit_s) if result is not None]
        if len(found) != count:
            raise TaskError(f"{count - len(found)} of {counted(count, 'device')} gave no result")
        whole = {name: [each for part in found for each in part[name]] for name in ("products", "memory")}
        return whole

    def listen(self, host: str) -> Port:
        """Listen for the other ends of links."""
        address = listen_address(host)
        self._listener = listening_socket(address, 0)
        return Port(address, self._listener.getsockname()[1])

    def serve(self, test: dict[str, Any], seconds: float) -> Received:
        assert self._listener is not None
        return links.serve(self._listener, self._key, test, seconds)

    def connect(self, address: str, port: int, test: dict[str, Any], seconds: float) -> Received:
        return links.connect(address, port, self._key, test, seconds)

    def store(self, host: str) -> Port:
        """Hold the port at which the first rank of all is to serve the store."""
        address = listen_address(host)
        self._store = listening_socket(address, 0)
        return Port(address, self._store.getsockname()[1])

    def groups(
        self, node: int, nodes: int, per_node: int, address: str, port: int, sizes: list[int], limit_s: float
    ) -> dict[str, Any]:
        """Run this host's ranks, which exchange in their groups. The first host's reply has the seconds of all."""
        command = [sys.executable, "-m", PROGRAM, "--device", self._device, "--groups", *map(str, sizes)]
        environments, kept = [], []
        for local_rank in range(per_node):
            rank = node * per_node + local_rank
            placed: dict[str, str | int] = {"RANK": rank, "WORLD_SIZE": nodes * per_node, "LOCAL_RANK": local_rank}
            placed |= {"LOCAL_WORLD_SIZE": per_node, "MASTER_ADDR": address, "MASTER_PORT": port}
            if rank == 0:
                assert self._store is not None
                placed[STORE_SOCKET] = self._store.fileno()
                kept.append(self._store.fileno())
            environments.append({name: str(value) for name, value in placed.items()})
        variables = rank_variables(self._device)
        results = run_programs([command] * per_node, [variables | each for each in environments], limit_s, kept)
        if self._store is not None:
            self._store.close()
        groups = results[0]["groups"] if node == 0 and results[0] is not None else []
        return {"groups": groups}


def run_programs(
    commands: Sequence[Sequence[str]],
    environments: Sequence[Mapping[str, str]],
    limit_s: float,
    kept: Sequence[int] = (),
) -> list[dict[str, Any] | None]:
    """Run programs at once, and return the result that each printed, if any. `kept`: descriptors that they inherit.

    Raises TaskError where one fails, or has not ended within the limit; all are killed then.
    """
    started = [
        subprocess.Popen(
            command,
            env=os.environ | environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=kept,
            preexec_fn=end_with_parent(),
        )
        for command, environment in zip(commands, environments, strict=True)
    ]
    outputs: list[tuple[bytes, bytes]] = [(b"", b"")] * len(started)

    def collect(place: int) -> None:
        outputs[place] = started[place].communicate()

    readers = [threading.Thread(target=collect, args=(place,), daemon=True) for place in range(len(started))]
    for reader in readers:
        reader.start()
    deadline_s = time.monotonic() + limit_s
    try:
        left = set(range(len(readers)))
        while left:
            for place in sorted(left):
                readers[place].join(LOOK_S)
            ended = {place for place in left if not readers[place].is_alive()}
            left -= ended
            # at once: the others may wait for it
            for place in sorted(ended):
                _check_status(started[place].returncode, outputs[place][1])
            if left and time.monotonic() > deadline_s:
                unended = " ".join(commands[min(left)][2:])
                raise TaskError(f"a program has not ended within {limit_s:.0f} s: {unended}")
    finally:
        for process in started:
            if process.poll() is None:
                kill_tree(process.pid)
    return [_result(output) for output, _ in outputs]


def _check_status(status: int, errors: bytes) -> None:
    if status:
        last = errors.decode(errors="replace").strip().splitlines()[-1:]
        raise TaskError(f"a program ended with status {status}: {''.join(last)}")


def _result(output: bytes) -> dict[str, Any] | None:
    for line in output.splitlines():
        if line.startswith(RESULT):
            found: dict[str, Any] = json.loads(line.removeprefix(RESULT))
            return found
    return None


def run(commands: IO[bytes], replies: int) -> int:
    """Do what the lines say until they end. `replies`: descriptor that the replies are written to."""
    first = json.loads(commands.readline(LARGEST_LINE))
    key = bytes.fromhex(first.pop("key"))
    agent = HostCommands(key, **first)
    number = 0
    while line := commands.readline(LARGEST_LINE):
        command = json.loads(line)
        try:
            found = getattr(agent, command.pop("do"))(**command)
            message = found if isinstance(found, dict) else asdict(found)
        except (TaskError, links.LinkError, OSError, ValueError) as error:
            message = {"error": plain(str(error) or type(error).__name__)}
        content = memoryview(sealed_line(key, number, message))
        number += 1
        while content:
            content = content[os.write(replies, content) :]
    return 0


def run_until_signal() -> int:
    """Run, and end at a signal."""
    # what libraries print must not stand amid the replies
    replies = os.dup(1)
    os.dup2(2, 1)
    with noted_signals(SIGNALS) as received, interruptible(SIGNALS, received):
        return run(sys.stdin.buffer, replies)


def main() -> NoReturn:
    owned(run_until_signal, (sys.stdout.fileno(),))


if __name__ == "__main__":
    main()
