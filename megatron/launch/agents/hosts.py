"""Start of a checked run: the agent of this machine, or one on each host by DeepSpeed's launcher, or by mpirun."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import IO, NoReturn

from megatron.launch.addresses import RENDEZVOUS_PORT
from megatron.launch.agents.agent import FAILED_GRACE_S, run_agent
from megatron.launch.agents.agent_command import AgentsOutput, agent_command, agent_options, send_secret, started
from megatron.launch.agents.mpirun import LOST_HOST, run_with_mpirun
from megatron.launch.agents.ownership import END_AT_ONCE, owned
from megatron.launch.agents.restart_policy import ending
from megatron.launch.child_processes import noted_signals, python_path
from megatron.launch.plan import LaunchPlan
from megatron.resilience.shutdown import SIGNALS
from megatron.runtime.commands import DONE, shell_status
from megatron.runtime.descriptors import raise_limit

# Time for hosts to answer after their agents have been killed. pdsh tries to reach a lost host for 10 s.
UNREACHABLE_GRACE_S = 20.0
# A host that loses its power or its network sends nothing, and ssh would wait for it for ever. A backstop, and patient:
# a network that fails for some minutes between this machine and the hosts need not concern the ranks.
KEEP_ALIVE = ("-oServerAliveInterval=30", "-oServerAliveCountMax=20")
# Where the run can continue without a lost host, it may also end without it.
SHORT_KEEP_ALIVE = ("-oServerAliveInterval=15", "-oServerAliveCountMax=3")
# Interval at which a signal is sent again to hosts whose agents have not started yet.
RETRY_S = 1.0


def launch(plan: LaunchPlan) -> NoReturn:
    """Run the plan, and end with the exit status of the first rank that failed, 0 if none did.

    No process outlives it.
    """
    owned(lambda: run_plan(plan))


def run_plan(plan: LaunchPlan) -> int:
    """Run the plan in this process."""
    environment = os.environ | plan.environment | {"PYTHONPATH": python_path()}
    if plan.launcher == "mpirun":
        return run_with_mpirun(plan, environment)
    if not plan.hosts:
        os.environ.update(environment)
        return run_agent(agent_options(plan), plan.train_flags)
    alive = KEEP_ALIVE
    if plan.min_nodes < len(plan.hosts):
        alive = SHORT_KEEP_ALIVE
    # the user's own come first, and ssh keeps the first value of each
    words = (os.environ.get("PDSH_SSH_ARGS_APPEND"), *alive)
    environment["PDSH_SSH_ARGS_APPEND"] = " ".join(filter(None, words))
    if plan.nodes > 1:
        raise_limit()  # of open files: several for each host
        send_secret(plan, environment)
    return run_on_hosts(remote_command(plan), environment, plan)


def remote_command(plan: LaunchPlan) -> list[str]:
    """Return the command that starts DeepSpeed's launcher over the hosts of the plan."""
    variables = [f"{name}={value}" for name, value in sorted(plan.environment.items())]
    forced = []
    if len(plan.hosts) == 1:  # or it would run here instead of on the one host
        forced.append("--force_multi")
    return [
        *(sys.executable, "-m", "deepspeed.launcher.runner"),
        *("--hostfile", plan.hostsfile or ""),
        *("--num_nodes", str(len(plan.hosts)), "--num_gpus", "1"),
        *("--master_addr", plan.hosts[0].address, "--master_port", str(plan.master_port or RENDEZVOUS_PORT)),
        *forced,
        *("--no_ssh_check", "--no_local_rank", "--no_python"),  # pdsh says which hosts ssh does not reach
        # Other machines inherit no environment: it travels in the command, or in the user's .deepspeed_env. DeepSpeed's
        # launcher shows its one process one device, by this variable also on HPU, but the agent's ranks need all that
        # the user leaves them. HABANA_VISIBLE_MODULES is the user's alone.
        *("/usr/bin/env", "-u", "CUDA_VISIBLE_DEVICES"),
        *[for_pdsh(word) for word in (*variables, *agent_command(plan))],
    ]


def for_pdsh(word: str) -> str:
    """Quote `word` so that it is one word, unchanged, in the shell of the remote machine.

    DeepSpeed puts double quotes around words that hold a blank, escaping the double quotes inside, and leaves the
    others as they are.
    """
    if " " not in word:
        return shlex.quote(word)
    return re.sub(r"([\\\\$`])", r"\\\1", word)


def agent_pattern(plan: LaunchPlan) -> str:
    """Return a pattern by which pkill -f finds the agents of this run, but neither the launchers nor other runs.

    Needs no quotes in a shell.
    """
    return "^" + re.sub(r"[^\w/=]", ".", f"{sys.executable} -X run={plan.run_id} ")


def signal_agents(plan: LaunchPlan, number: int) -> bool:
    """Send a signal to the owners of the agents on all hosts; return whether any host had one."""
    hosts = ",".join(host.name for host in plan.hosts)
    name = signal.Signals(number).name.removeprefix("SIG")
    command = ["pdsh", "-R", "ssh", "-w", hosts, "pkill", f"-{name}", "-e", "-o", "-f", agent_pattern(plan)]
    signalled = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    return bool(signalled.stdout.strip())


class PdshOutput(AgentsOutput):
    """Notes which hosts failed, as pdsh says it: also those whose agent never started or was killed."""

    def __init__(self, lines: IO[bytes]) -> None:
        super().__init__(lines)
        self.all_failed: set[str] = set()
        self.gloo_failed = False

    def note_line(self, line: bytes) -> None:
        self.gloo_failed |= b"Gloo connectFullMesh failed" in line
        match = re.match(rb"pdsh@[^:]+: (\S+): ssh exited with exit code (\d+)", line)
        if match:
            self._note_failure(match[1].decode(), int(match[2]))

    def _note_failure(self, host: str, status: int) -> None:
        self.all_failed.add(host)
        if self.failed is None:
            # DeepSpeed's launcher ends with -n for a process that signal n killed; 255 is ssh's own failure
            if 192 <= status < LOST_HOST:
                status = shell_status(status - 256)
            self.failed = host, status

    def ends(self, plan: LaunchPlan) -> bool:
        """Return whether the run cannot continue on the other hosts: without the first one it never does."""
        left = len(plan.hosts) - len(self.all_failed)
        return left < plan.min_nodes or plan.hosts[0].address in self.all_failed


def run_on_hosts(command: Sequence[str], environment: Mapping[str, str], plan: LaunchPlan) -> int:
    """Run DeepSpeed's launcher until the agents on all hosts have ended; return the status of the first that failed.

    Signals go to the agents past that launcher, which would end every DeepSpeed run on the hosts, allow 30 s for a
    checkpoint, and return before the ranks have ended. Where one host fails, it waits for the others, whose ranks may
    wait for that one.
    """
    with noted_signals(SIGNALS) as received, started(command, environment, PdshOutput) as (runner, output):
        _wait_for_hosts(runner, output, plan, received)
        output.join(timeout=FAILED_GRACE_S)
    if output.gloo_failed:
        print(
            "gloo could not connect the hosts: each of them takes the address that its own name resolves to, which the "
            "others must reach. Set GLOO_SOCKET_IFNAME to the network interface between them, e.g. eth0",
            file=sys.stderr,
        )
    if output.failed is None:
        return _status_without_failure(runner.returncode, output.ended, plan)
    if output.ends(plan):
        return output.failed[1]
    return DONE  # those that were left have continued to the end


def _status_without_failure(returncode: int, ended: int, plan: LaunchPlan) -> int:
    """Return the exit status where pdsh has reported no host. `ended`: number of agents that ended by themselves.

    DeepSpeed's launcher ends with 0 also where a signal has killed pdsh.
    """
    if returncode < 0:
        name = "DeepSpeed's launcher"
        print(f"{name} on this machine {ending(returncode)}; the run ends on all hosts", file=sys.stderr)
    elif returncode == 0 and ended < plan.min_nodes:
        known = f"when the agents of {ended} of {len(plan.hosts)} hosts had ended"
        print(f"pdsh on this machine was ended {known}; the run ends on all hosts", file=sys.stderr)
        return LOST_HOST
    return shell_status(returncode)


def _wait_for_hosts(
    runner: subprocess.Popen[bytes], output: PdshOutput, plan: LaunchPlan, received: deque[int]
) -> None:
    """Wait until the launcher has ended, or some hosts do not answer after a failure. Passes signals on.

    After a failure that ends the run the other agents have FAILED_GRACE_S to end, and are then ended.
    """
    failed_s: float | None = None
    ending: threading.Thread | None = None
    tried_s = -RETRY_S
    while runner.poll() is None:
        time.sleep(0.05)
        # a signal may come before the agents have started: it waits for them
        if received and time.monotonic() - tried_s > RETRY_S:
            if signal_agents(plan, received[0]):
                received.popleft()
            tried_s = time.monotonic()
        if output.failed is None or not output.ends(plan):
            continue
        failed_s = failed_s or time.monotonic()
        since_s = time.monotonic() - failed_s
        if since_s > FAILED_GRACE_S + UNREACHABLE_GRACE_S:
            print("some hosts do not answer; ranks may still run there", file=sys.stderr)
            return
        if since_s > FAILED_GRACE_S and (ending is None or not ending.is_alive()):
            if ending is None:
                host, status = output.failed
                print(f"host {host} ended with status {status}; ending the ranks that still run", file=sys.stderr)
            # again and again, since an agent may be about to start. Not waited for: it returns once every host has
            # answered, and one may be lost
            ending = threading.Thread(target=_end_agents, args=(plan,), daemon=True)
            ending.start()


def _end_agents(plan: LaunchPlan) -> None:
    signal_agents(plan, END_AT_ONCE)
    time.sleep(RETRY_S)
