"""Start of the agents by Open MPI's mpirun: on this machine, or one on each host of a hostsfile.

mpirun starts agents, not ranks, so restarts, reports, time to save and clean-up are those of any other run. Each finds
the first node by its address, since mpirun puts the machine that it runs on before the first line of a hostsfile.
Versions 4 and 5 take the same command for that. mpirun passes on SIGUSR1 and SIGUSR2 alone; at any other signal it
gives processes a second or so, in which no checkpoint is saved.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from megatron.launch.agents.agent import FAILED_GRACE_S
from megatron.launch.agents.agent_command import AgentsOutput, agent_command, send_secret, started
from megatron.launch.agents.restart_policy import ending
from megatron.launch.child_processes import noted_signals
from megatron.launch.host_environment import deepspeed_env
from megatron.launch.plan import Host, LaunchPlan, LaunchRequest
from megatron.resilience.shutdown import REPEAT_S, SIGNALS
from megatron.runtime.commands import shell_status
from megatron.runtime.descriptors import raise_limit
from megatron.runtime.network import STDOUT, stdout_of_launcher

VERSION_S = 20.0
# Time for mpirun to end after an agent has failed: it may wait for a host that is lost.
ENDING_S = FAILED_GRACE_S + 20.0
# Seconds that mpirun gives processes between SIGTERM and SIGKILL once one has failed, instead of one second
KILL_TIMEOUT_S = "5"
# Idle seconds, interval and number of probes after which mpirun and its daemons give each other up: like ssh with pdsh
# they are patient with a network that fails. Where ranks restart, the agents give up a host after half a minute anyway.
KEEP_ALIVE, SHORT_KEEP_ALIVE = ("30", "30", "19"), ("15", "10", "3")
# The largest status of a process that a signal ended, and that of a run that has lost a host, as with ssh.
OF_SIGNALS, LOST_HOST = 192, 255
# variables of the kinds that DeepSpeed's launcher passes on too
PREFIXES = ("PYTHON", "UCX", "MLFLOW")
PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)


def find_mpirun() -> str | None:
    """Return the path of mpirun: of the folder MPI_ROOT, where that is set, else of PATH."""
    root, folder = os.environ.get("MPI_ROOT"), None
    if root:
        folder = str(Path(root, "bin"))
    return shutil.which("mpirun", path=folder)


def mpirun_fault() -> str | None:
    """Return why mpirun cannot start a run, with the remedy."""
    path, root, other = find_mpirun(), os.environ.get("MPI_ROOT"), "or set HL_LAUNCHER_TYPE=pdsh (--launcher pdsh)"
    if path is None:
        lacks = "mpirun is not installed"
        if root:
            lacks = f"MPI_ROOT={root} holds no bin/mpirun"
        return f"{lacks}; install Open MPI 4 or 5 on every host, {other}"
    command = [path, "--version"]
    try:
        asked = subprocess.run(command, capture_output=True, text=True, timeout=VERSION_S, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.SubprocessError) as error:
        return f"{path} --version fails ({error}); install Open MPI 4 or 5 on every host, {other}"
    output = asked.stdout
    version = re.search(r"\(Open MPI\) (\d+)\.", output)
    if version and int(version[1]) >= 4:
        return None
    kind = repr(output.partition("\n")[0])
    if "HYDRA" in output.upper():
        kind = "that of MPICH or Intel MPI (Hydra)"
    return f"{path} is {kind}, but the launcher needs Open MPI 4 or newer; put its folder first in PATH, {other}"


def check_mpirun(request: LaunchRequest, hosts: Sequence[Host]) -> Iterator[str]:
    """Yield what a run by mpirun cannot have."""
    alone = "; leave it out, or set HL_LAUNCHER_TYPE=pdsh (--launcher pdsh)"
    if request.min_nodes is not None and request.min_nodes < request.nodes:
        yield f"min_nodes={request.min_nodes}: mpirun ends the run on all hosts when it loses one{alone}"
    if request.spare_hosts:
        yield f"spare_hosts={request.spare_hosts}: mpirun ends the run on all hosts when it loses one{alone}"
    if request.rendezvous is not None:
        yield (
            f"rendezvous={request.rendezvous}: this launcher is started on each node by itself, where mpirun has "
            "nothing to start; leave HL_LAUNCHER_TYPE (--launcher) out"
        )
    for host in hosts:
        if ":" in host.name or "@" in host.name:
            yield (
                f"{request.hostsfile}, line {host.line}: mpirun takes a name or an IPv4 address, not {host.name}; set "
                "`User` and `HostName` for a name of it in ~/.ssh/config"
            )
    if not request.dry_run:
        yield from filter(None, [mpirun_fault()])


# mpirun starts agents, not ranks: it would end all ranks a second after a failure or a SIGTERM, before they save.
def mpirun_command(plan: LaunchPlan, names: Sequence[str], hostfile: str | None) -> list[str]:
    """Return the command that starts an agent on each node. `names`: variables whose values they get."""
    command = [find_mpirun() or "mpirun"]
    if os.geteuid() == 0:
        command += ["--allow-run-as-root"]
    if hostfile:
        command += ["--hostfile", hostfile]
    command += ["-n", str(plan.nodes), "--map-by", "ppr:1:node"]
    command += ["--bind-to", "none"]  # the agents bind the ranks, also in a run by pdsh
    command += ["--wdir", os.getcwd()]
    for name in names:
        command += ["-x", name]
    return command + agent_command(plan)


def run_with_mpirun(plan: LaunchPlan, environment: dict[str, str]) -> int:
    """Run the plan; return the exit status of the agent that failed first, 0 if none did."""
    theirs = deepspeed_env()
    environment = environment | theirs | {STDOUT: stdout_of_launcher()}
    # mpirun passes variables on by name, so that no value stands in its command line, which every user reads
    names = {STDOUT, *plan.environment, *theirs, *[name for name in environment if name.startswith(PREFIXES)]}
    # by variables, which a user's own precede: versions 4 and 5 have other flags for them
    for name, value in _parameters(has_restarts=plan.max_restarts > 0).items():
        environment.setdefault(f"OMPI_MCA_{name}", value)
        environment.setdefault(f"PRTE_MCA_{name.replace('rsh', 'ssh')}", value)
    if plan.nodes > 1:
        raise_limit()  # of open files: several for each host
        send_secret(plan, environment)
    with hostfile_of(plan) as hostfile:
        return _run(mpirun_command(plan, sorted(names), hostfile), environment, plan)


def _parameters(*, has_restarts: bool) -> dict[str, str]:
    """Return parameters of mpirun, by the names that version 4 gives them."""
    alive = KEEP_ALIVE
    if has_restarts:
        alive = SHORT_KEEP_ALIVE
    names = [f"oob_tcp_keepalive_{name}" for name in ("time", "intvl", "probes")]
    own = {"odls_base_sigkill_timeout": KILL_TIMEOUT_S, **dict(zip(names, alive, strict=True))}
    shared = os.environ.get("PDSH_SSH_ARGS_APPEND")
    if shared:
        own["plm_rsh_args"] = shared
    return own


@contextlib.contextmanager
def hostfile_of(plan: LaunchPlan) -> Iterator[str | None]:
    """Write a file of the run's hosts, one slot for each agent, and remove it at the end. None: this machine."""
    if not plan.hosts:
        yield None
        return
    with tempfile.NamedTemporaryFile("w", prefix="megatron-hosts-") as file:
        file.writelines(f"{host.address} slots=1\n" for host in plan.hosts)
        file.flush()
        yield file.name


class MpirunOutput(AgentsOutput):
    """Notes which agent failed first, as it says itself: mpirun names none."""

    def note_agent(self, host: str, status: int | None) -> None:
        super().note_agent(host, status)
        if status and self.failed is None:
            self.failed = host, status

    def has_lost_host(self, status: int, nodes: int) -> bool:
        """Return whether mpirun, which ended by this status, has lost a host and made the other agents stop.

        Version 4 then ends by a negative number, version 5 by 0.
        """
        if self.failed is not None or self.ready < nodes:
            return False
        return status > OF_SIGNALS or (status == 0 and self.ended < nodes)


def _run(command: Sequence[str], environment: Mapping[str, str], plan: LaunchPlan) -> int:
    with (
        noted_signals(SIGNALS) as received,
        started(command, environment, MpirunOutput, stdin=subprocess.DEVNULL) as (mpirun, output),
    ):
        signals = _PassedSignals(mpirun, received)
        _wait(mpirun, output, signals, plan.nodes)
        output.join(timeout=FAILED_GRACE_S)
    requested = signals.requested
    # mpirun ends with the status of the agent that failed first, also of one that was killed and sent no message
    status = shell_status(mpirun.returncode)
    if mpirun.returncode <= 0 and output.failed is not None:  # it had to be killed
        status = output.failed[1]
    elif mpirun.returncode < 0 and requested is None:
        print(f"mpirun on this machine {ending(mpirun.returncode)}; the run ends on all hosts", file=sys.stderr)
    elif output.has_lost_host(status, plan.nodes):
        print("mpirun has lost a host; ranks may still run there", file=sys.stderr)
        status = LOST_HOST
    if requested is None:
        return status
    # a second signal ends the ranks by the one that mpirun has passed on, or a start by no signal of its own
    is_by_signal = status == 128 + _passed_on(requested)
    is_early = status != 0 and output.ready < plan.nodes
    if is_by_signal or is_early:
        return shell_status(-requested)
    return status


def _passed_on(number: int) -> int:
    """Return the signal that mpirun passes on for one."""
    if number in PASSED_ON:
        return number
    return signal.SIGUSR1


class _PassedSignals:
    """Signals to the launcher, which mpirun passes on to the agents.

    | agents             | signal                             | then                                           |
    |--------------------|------------------------------------|------------------------------------------------|
    | all take signals   | any                                | mpirun passes it on                            |
    | all take signals   | SIGXCPU after another              | nothing: the kernel repeats it each second     |
    | some do not yet    | the first                          | waits: it would end an agent, or mpirun itself |
    | some do not yet    | another at once                    | nothing: the same request                      |
    | some do not yet    | another later                      | the run ends                                   |
    """

    def __init__(self, mpirun: subprocess.Popen[bytes], received: deque[int]) -> None:
        self._mpirun, self._received = mpirun, received
        self.requested: int | None = None
        """The first signal by which the run was to stop."""
        self._waits_since_s: float | None = None

    def pass_on(self, *, are_ready: bool) -> bool:
        """Pass on what was received; return whether the run is to end at once."""
        if not self._received:
            return False
        if are_ready:
            number = self._received.popleft()
            if self.requested is None or number != signal.SIGXCPU:
                self._mpirun.send_signal(_passed_on(number))
                self.requested = self.requested or number
            return False
        now_s = time.monotonic()
        if self._waits_since_s is None:
            self._waits_since_s = now_s
        if now_s - self._waits_since_s < REPEAT_S:
            while len(self._received) > 1:
                self._received.pop()
        elif len(self._received) > 1:
            self.requested = self._received[0]
            return True
        return False


def _wait(mpirun: subprocess.Popen[bytes], output: MpirunOutput, signals: _PassedSignals, nodes: int) -> None:
    """Wait until mpirun ends, or has to be ended."""
    failed_s: float | None = None
    while mpirun.poll() is None:
        time.sleep(0.05)
        if output.failed is not None:
            failed_s = failed_s or time.monotonic()
            if time.monotonic() - failed_s > ENDING_S:
                host, status = output.failed
                print(f"host {host} ended with status {status}, and mpirun does not end", file=sys.stderr)
                print("some hosts do not answer; ranks may still run there", file=sys.stderr)
                return
        if signals.pass_on(are_ready=output.ready >= nodes):
            return
