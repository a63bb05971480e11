"""Command of a node's agent, its messages to the launcher, and the secret by which the agents of a run know each other.

pdsh and mpirun pass on what an agent prints, and little else: it says there when it takes signals, and how it ended.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import re
import secrets
import shlex
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TypeVar

from megatron.launch.addresses import RENDEZVOUS_PORT, endpoint_of, login_of
from megatron.launch.agents.rendezvous import NodeOptions
from megatron.launch.child_processes import end_with_parent, kill_tree
from megatron.launch.plan import LaunchPlan
from megatron.options.flags import cut, flag
from megatron.options.outputs import LoggingConfig
from megatron.runtime.messages import SECRET

_MARK = "\x1e"
_OF_PDSH = re.compile(rb"\S+: ")
"""Prefix that pdsh writes before each line of a host."""
_MESSAGE = re.compile(rb"\x1eagent (\S+) (ready|ended (\d+))\n?")


def announce(text: str) -> None:
    """Write a message in one piece. `text`: ready, or ended STATUS."""
    sys.stderr.flush()
    os.write(sys.stderr.fileno(), f"{_MARK}agent {socket.gethostname()} {text}\n".encode())


def without_messages(line: bytes) -> tuple[bytes, list[tuple[str, int | None]]]:
    """Return a line without the messages in it, and host and status of each; None: it is ready."""
    messages: list[tuple[str, int | None]] = []
    for match in _MESSAGE.finditer(line):
        status = None
        if match[3] is not None:
            status = int(match[3])
        messages.append((match[1].decode(), status))
    rest = _MESSAGE.sub(b"", line)
    # pdsh has put its prefix before the message, of which nothing else is left
    if messages and _OF_PDSH.fullmatch(rest):
        rest = b""
    return rest, messages


class AgentsOutput(threading.Thread):
    """Copies the stderr of pdsh or mpirun without the agents' messages, and notes these."""

    def __init__(self, lines: IO[bytes]) -> None:
        super().__init__(daemon=True)
        self._lines = lines
        self.ready = 0
        """Number of agents that take signals."""
        self.ended = 0
        """Number of agents that have ended by themselves."""
        self.failed: tuple[str, int] | None = None
        """Host and status of the first failure."""

    def run(self) -> None:
        for line in self._lines:
            text, messages = without_messages(line)
            for host, status in messages:
                self.note_agent(host, status)
            self.note_line(text)
            sys.stderr.write(text.decode(errors="replace"))
            sys.stderr.flush()

    def note_agent(self, host: str, status: int | None) -> None:
        """Take a message. `status`: with which the agent has ended; None: it takes signals."""
        if status is None:
            self.ready += 1
        else:
            self.ended += 1

    def note_line(self, line: bytes) -> None:
        """Take what else was printed."""


Output = TypeVar("Output", bound=AgentsOutput)


@contextlib.contextmanager
def started(
    command: Sequence[str], environment: Mapping[str, str], kind: type[Output], stdin: int | None = None
) -> Iterator[tuple[subprocess.Popen[bytes], Output]]:
    """Start pdsh or mpirun, with its output copied. What is left of it at the end is killed."""
    # in a session of its own a Ctrl-C at the terminal comes to the launcher alone, which passes it on
    process = subprocess.Popen(
        command,
        env=environment,
        stdin=stdin,
        stderr=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=end_with_parent(),
    )
    assert process.stderr is not None
    output = kind(process.stderr)
    output.start()
    try:
        yield process, output
    finally:
        # pdsh starts each ssh in a session of its own; what an ssh has started ends with it (ownership.py)
        kill_tree(process.pid)
        process.wait()


@dataclass(frozen=True)
class AgentOptions(NodeOptions):
    """Ranks of a node, and the nodes of their run. Each field is an option of the agent's command line."""

    ranks_per_node: int = 1
    main: str = "megatron.train"
    """Module that each rank runs: its `process` ends the process."""
    is_chat: bool = False
    """Ctrl-C stops an answer: it goes to the ranks, which do not end."""
    ends_with_connection: bool = False
    """Started by ssh: the run ends here when the connection is closed, which the reader of stdout shows."""
    by_mpirun: bool = False
    """Started by mpirun, whose variables give its order among the nodes, and which sends no rank a signal."""
    cores_per_rank: int = 0
    """Cores that each rank is bound to. 0: ranks are not bound."""
    ranks_per_socket: int = 0
    keep_healthy_ranks: bool = False
    """The ranks that have not failed keep their process, and go on with a new rank in the place of the lost one."""
    models: str | None = None
    """Names on the hub of the models whose weights this host is to have before its ranks start."""
    alert_command: str | None = None
    alert_webhook: str | None = None
    run_name: str | None = None
    """Name of the run in alerts. None: its run_id."""
    secret_file: str | None = None
    """File in the home folder from which the secret of the run is read, once, if no variable has it."""

    def arguments(self) -> list[str]:
        """Return the command line that `parse` reads."""
        words = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is True:
                value = 1
            if value != field.default:
                words += [flag(field.name), str(value)]
        return words


def parse(arguments: Sequence[str]) -> tuple[AgentOptions, list[str]]:
    """Return the agent's own options, and the flags of megatron.train behind `--`."""
    own, train_flags = cut(arguments)
    parser = argparse.ArgumentParser(
        prog="python -m megatron.launch.agents.agent",
        description="Start the ranks of this node. tools/launch.py calls it; megatron/launch/agents/rendezvous.py "
        "describes the options.",
        epilog="After --, the flags of megatron.train.",
        allow_abbrev=False,
    )
    for field in dataclasses.fields(AgentOptions):
        # annotations are postponed, so a type is its text here; `arguments` writes True as 1
        kind = int if "int" in str(field.type) or "bool" in str(field.type) else str
        parser.add_argument(flag(field.name), type=kind, default=field.default)
    options = AgentOptions(**vars(parser.parse_args(own)))
    if options.nodes > 1 and options.rendezvous is None:
        parser.error(f"--nodes {options.nodes} needs --rendezvous HOST:PORT, the address of the first node")
    return options, train_flags


# Connections to hosts at one time, besides those of pdsh or mpirun.
SSH_AT_ONCE = 64
# Time for an agent to read the secret of its run, before its file is removed.
SECRET_LIMIT_S = 600
# Writes the secret, and removes it where the agent has not read it in time, or the connection ends with the launcher:
# then writing to it fails. Before, removes older files, which a host left that lost its power.
KEEP_SECRET = (  # in one line, for csh
    'trap "" PIPE HUP TERM; '
    'find . -maxdepth 1 -type f -name ".megatron-*.[0-9]*.[0-9]*.[0-9]*" -mmin +60 -exec rm -f {} +; '
    "umask 077 && cat > NAME.partial && mv NAME.partial NAME || exit; left=LIMIT; "
    "while [ -e NAME ] && [ $left -gt 0 ] && echo 2> /dev/null; do sleep 0.2; left=$((left - 1)); done; "
    "rm -f NAME"
)


def agent_options(plan: LaunchPlan) -> AgentOptions:
    """Return the options that the agents of all nodes have in common."""
    rendezvous, min_nodes = plan.rendezvous, None
    if plan.min_nodes < plan.nodes:
        min_nodes = plan.min_nodes
    if plan.hosts:
        rendezvous = endpoint_of(plan.hosts[0].address, plan.master_port or RENDEZVOUS_PORT)
    elif plan.master_port is not None and rendezvous is None:
        rendezvous = f"127.0.0.1:{plan.master_port}"
    return AgentOptions(
        nodes=plan.nodes,
        min_nodes=min_nodes,
        rendezvous=rendezvous,
        run_id=plan.run_id,
        max_restarts=plan.max_restarts,
        ranks_per_node=plan.devices_per_node,
        main=plan.main,
        is_chat=plan.is_chat,
        ends_with_connection=bool(plan.hosts) or plan.launcher == "mpirun",
        by_mpirun=plan.launcher == "mpirun",
        cores_per_rank=plan.cores_per_rank,
        ranks_per_socket=plan.ranks_per_socket,
        keep_healthy_ranks=plan.config.checkpoint.keep_healthy_ranks,
        models=" ".join(plan.models) or None,
        alert_command=plan.config.logging.alert_command,
        alert_webhook=plan.config.logging.alert_webhook,
        run_name=_alerting_name(plan.config.logging),
    )


def _alerting_name(logging: LoggingConfig) -> str | None:
    """Return the name of the results folder, where the run sends alerts."""
    if logging.results_dir is None or (logging.alert_command is None and logging.alert_webhook is None):
        return None
    return Path(logging.results_dir).resolve().name


def agent_command(plan: LaunchPlan) -> list[str]:
    """Return the command of each node's agent."""
    command = [sys.executable, "-u", "-m", "megatron.launch.agents.agent"]
    if plan.hosts:
        # Python ignores the option; `pkill -f` finds the agents of this run by it, and not those of another
        command[1:1] = ["-X", f"run={plan.run_id}"]
    command += agent_options(plan).arguments()
    if plan.hosts and plan.launcher == "pdsh":
        command += ["--node-rank", "%n"]  # pdsh writes the number of the host for it
    if plan.hosts and plan.nodes > 1:
        command += ["--secret-file", secret_file(plan)]
    command += ["--", *plan.train_flags]
    if plan.activate is None or not plan.hosts:  # on this machine the script has sourced `activate` already
        return command
    # the folder and the command are arguments of the shell, so that it splits no word of them
    return ["/bin/bash", "-c", 'source "$0/activate" && exec "$@"', plan.activate, *command]


# By ssh's standard input, in a second connection: pdsh passes no input on, sshd drops variables, and every user of a
# host reads its command lines.
def send_secret(plan: LaunchPlan, environment: Mapping[str, str]) -> None:
    """Start to write a new secret for the agents into a file on each host, by ssh's standard input.

    The connection lasts until the agent has read and removed the file, and the file no longer than the connection. A
    command line, and DeepSpeed's launcher puts variables there, can be read by every user of the host.
    """
    secret = os.environ.get(SECRET) or secrets.token_hex(32)
    # each connection takes a process and descriptors here, and there are as many as the run has hosts
    slots = threading.BoundedSemaphore(SSH_AT_ONCE)

    def send(host: str, name: str) -> None:
        # the loop in it looks five times a second
        write = KEEP_SECRET.replace("NAME", name).replace("LIMIT", str(SECRET_LIMIT_S * 5))
        own = shlex.split(environment.get("PDSH_SSH_ARGS_APPEND", ""))  # first: ssh keeps the first value of each
        # no agent and no display is forwarded, and no thread waits at the terminal for a password
        command = ["ssh", *own, "-a", "-x", "-oBatchMode=yes", "-oConnectTimeout=30", host, f"sh -c '{write}'"]
        with slots:
            sent = subprocess.run(
                command,
                input=secret.encode(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                env=dict(environment),
            )
        if sent.returncode:
            reason = sent.stderr.decode(errors="replace").strip()
            print(f"the secret of this run could not be written on {host}: {reason}", file=sys.stderr)

    for number, host in enumerate(plan.hosts):
        name = re.sub(r"%n|\*", str(number), secret_file(plan))
        threading.Thread(target=send, args=(login_of(host.name), name), daemon=True).start()


def secret_file(plan: LaunchPlan) -> str:
    """Return the name of the file in the home folder of a host, of which several may share one.

    An agent that pdsh starts has the number of its host, %n. One that mpirun starts takes any of the files, all
    of which are alike.
    """
    number = "*"
    if plan.launcher == "pdsh":
        number = "%n"
    return f".megatron-{plan.run_id}.{number}"
