"""The processes of a run: a rank a device on this machine, or DeepSpeed's launcher for those of several hosts."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import IO

from megatron.exit_codes import HUNG
from megatron.files import IMPORT_ROOT
from megatron.launch.agent import Supervision, supervise
from megatron.launch.child_processes import end_with_parent, kill_tree, noted_signals
from megatron.launch.preflight import Plan
from megatron.resilience.shutdown import SIGNALS

MASTER_PORT = 29500  # where the nodes meet, unless --master-port says otherwise: torch's and DeepSpeed's default
# After one rank has failed the others wait in a collective for ever, and hold their devices: all are gone within 5 s.
# Time to end by themselves: on gloo and in `raise_on_all_ranks` they notice, and report, within a second or two.
FAILED_GRACE_S = 3.0
# After the watchdog of one rank has ended it: the others end by themselves, unless they are stopped or stuck.
HUNG_GRACE_S = 1.5
# Then after SIGTERM. For a rank of ours that is a request to stop after the step, which never ends: SIGTERM is for what
# else a user's environment runs, and SIGKILL ends the rest, be it stopped.
TERMINATED_GRACE_S = 1.0
# Of another host, once its ranks have been killed: a host that is gone answers nobody. pdsh tries to reach it for 10 s.
UNREACHABLE_GRACE_S = 20.0
# A host that loses its power or its network says nothing, and ssh would wait for it for ever. A backstop, and patient:
# a network that fails for some minutes between here and the hosts need not concern the ranks.
ALIVE = ("-oServerAliveInterval=30", "-oServerAliveCountMax=20")
# Where agents supervise, the run may have gone on, and ended, without a host that is gone.
SUPERVISED_ALIVE = ("-oServerAliveInterval=15", "-oServerAliveCountMax=3")
# How often a signal is tried again on hosts whose ranks have not been started yet.
RETRY_S = 1.0


def train_command(plan: Plan) -> list[str]:
    """What each rank runs."""
    command = [sys.executable, "-u", "-m", "megatron.train", *plan.train_flags]
    if not plan.hosts:
        return command  # on this machine the script has sourced `activate` already
    command[1:1] = ["-X", f"run={plan.run_id}"]
    if plan.activate_dir is None:
        return command
    return ["/bin/bash", "-c", 'source "$0/activate" && exec "$@"', plan.activate_dir, *command]


def supervision(plan: Plan) -> Supervision:
    """How the agent of each node starts its ranks."""
    rendezvous = plan.rendezvous
    if plan.hosts:
        rendezvous = f"{plan.hosts[0].address}:{plan.master_port or MASTER_PORT}"
    return Supervision(
        ranks_per_node=plan.devices_per_node,
        nodes=plan.nodes,
        min_nodes=plan.min_nodes,
        rendezvous=rendezvous,
        run_id=plan.run_id,
        max_restarts=plan.max_restarts,
    )


def agent_command(plan: Plan) -> list[str]:
    """What each node of a supervised run runs: one agent, which starts its ranks."""
    own = [*supervision(plan).arguments(), "--", *plan.train_flags]
    # by the file, not as a module: the repository need not be in the path there
    command = [
        sys.executable,
        "-X",
        f"run={plan.run_id}",
        "-u",
        str(IMPORT_ROOT / "megatron" / "launch" / "agent.py"),
        *own,
    ]
    if not plan.hosts or plan.activate_dir is None:
        return command
    return ["/bin/bash", "-c", 'source "$0/activate" && exec "$@"', plan.activate_dir, *command]


def remote_command(plan: Plan) -> list[str]:
    """DeepSpeed's launcher over the hosts of the plan."""
    variables = [f"{name}={value}" for name, value in sorted(plan.environment.items())]
    # the environment reaches other machines only in the command, or by the user's own .deepspeed_env
    of_process = ["/usr/bin/env", *variables, *train_command(plan)]
    per_node = plan.devices_per_node
    if plan.is_supervised:
        # DeepSpeed's launcher shows its one process one device; the agent's ranks need all of the node
        of_process = ["/usr/bin/env", "-u", "CUDA_VISIBLE_DEVICES", "-u", "HABANA_VISIBLE_MODULES", *variables]
        of_process += agent_command(plan)
        per_node = 1
    return [
        *(sys.executable, "-m", "deepspeed.launcher.runner"),
        *("--hostfile", plan.hostsfile or ""),
        *("--num_nodes", str(plan.nodes), "--num_gpus", str(per_node)),
        *("--master_addr", plan.hosts[0].address, "--master_port", str(plan.master_port or MASTER_PORT)),
        *([] if len(plan.hosts) > 1 else ["--force_multi"]),  # or it would run here instead of on the one host
        *("--no_local_rank", "--no_python"),
        *[for_pdsh(word) for word in of_process],
    ]


def for_pdsh(word: str) -> str:
    """`word` so that it is one word, unchanged, in the shell of the remote machine.

    DeepSpeed puts double quotes around words that hold a blank, escaping the double quotes inside, and leaves the
    others as they are.
    """
    if " " not in word:
        return shlex.quote(word)
    return re.sub(r"([\\\\$`])", r"\\\1", word)


def launch(plan: Plan) -> int:
    """Run the plan; returns the exit status of the first process that failed, 0 if none did."""
    environment = dict(os.environ) | dict(plan.environment)
    environment["PYTHONPATH"] = os.pathsep.join([str(IMPORT_ROOT), *filter(None, [environment.get("PYTHONPATH")])])
    if plan.hosts:
        # the user's own come first, and ssh keeps the first it is given of each
        alive = SUPERVISED_ALIVE if plan.is_supervised else ALIVE
        of_ssh = [os.environ.get("PDSH_SSH_ARGS_APPEND"), *alive]
        environment["PDSH_SSH_ARGS_APPEND"] = " ".join(filter(None, of_ssh))
        return run_on_hosts(remote_command(plan), environment, plan)
    if plan.is_supervised:
        os.environ.update(environment)
        return supervise(supervision(plan), plan.train_flags)
    master = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(plan.master_port or _free_port())}
    size = str(plan.devices_per_node)
    ranks = [
        environment | master | {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
        for rank in map(str, range(plan.devices_per_node))
    ]
    return run_processes(train_command(plan), ranks)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def rank_pattern(plan: Plan) -> str:
    """What pkill -f knows the ranks of this run by: neither the launchers, whose command lines end so, nor other runs.

    Needs no quotes in a shell.
    """
    return "^" + re.sub(r"[^\w/=]", ".", f"{sys.executable} -X run={plan.run_id} ")


def signal_ranks(plan: Plan, number: int) -> bool:
    """Send a signal to the ranks on all hosts; whether any host had some."""
    hosts = ",".join(host.name for host in plan.hosts)
    name = signal.Signals(number).name.removeprefix("SIG")
    command = ["pdsh", "-R", "ssh", "-w", hosts, "pkill", f"-{name}", "-e", "-f", rank_pattern(plan)]
    told = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    return bool(told.stdout.strip())


class PdshOutput(threading.Thread):
    """Passes on what pdsh and the ranks write to stderr, and notes there which host failed first, and why."""

    def __init__(self, lines: IO[bytes]):
        super().__init__(daemon=True)
        self._lines = lines
        self.failed: tuple[str, int] | None = None
        """The host, and its status."""
        self.num_failed = 0
        self.gloo_failed = False

    def run(self) -> None:
        for line in self._lines:
            sys.stderr.write(line.decode(errors="replace"))
            sys.stderr.flush()
            match = re.match(rb"pdsh@[^:]+: (\S+): ssh exited with exit code (\d+)", line)
            self.num_failed += match is not None
            if match and self.failed is None:
                status = int(match[2])
                # DeepSpeed's launcher ends with -n for a rank that signal n killed; 255 is ssh's own failure
                self.failed = match[1].decode(), status if status < 192 or status == 255 else 128 + 256 - status
            self.gloo_failed |= b"Gloo connectFullMesh failed" in line


def run_on_hosts(command: Sequence[str], environment: Mapping[str, str], plan: Plan) -> int:
    """Run DeepSpeed's launcher until the ranks on all hosts have ended. Returns the status of the first that failed.

    Signals go to the ranks past that launcher, which would end every DeepSpeed run on the hosts, allow 30 s for a
    checkpoint, and return before the ranks have ended. Where one host fails, it waits for the others, whose ranks wait
    for that one.
    """
    with noted_signals(SIGNALS) as received:
        runner = subprocess.Popen(
            command, env=environment, stderr=subprocess.PIPE, start_new_session=True, preexec_fn=end_with_parent()
        )
        assert runner.stderr is not None
        output = PdshOutput(runner.stderr)
        output.start()
        try:
            _wait_for_hosts(runner, output, plan, received)
            output.join(timeout=FAILED_GRACE_S)
        finally:
            if runner.poll() is None:
                signal_ranks(plan, signal.SIGKILL)
            kill_tree(runner.pid)  # pdsh starts each ssh in a session of its own
            runner.wait()
    if output.gloo_failed:
        print(
            "gloo could not connect the hosts: each of them takes the address that its own name resolves to, which the "
            "others must reach. Set GLOO_SOCKET_IFNAME to the network interface between them, e.g. eth0",
            file=sys.stderr,
        )
    if plan.is_supervised and plan.nodes - output.num_failed >= plan.min_nodes:
        return 0  # those that were left went on to the end
    if output.failed is not None:
        return output.failed[1]
    return runner.returncode if runner.returncode >= 0 else 128 - runner.returncode


def _wait_for_hosts(runner: subprocess.Popen[bytes], output: PdshOutput, plan: Plan, received: deque[int]) -> None:
    failed_s: float | None = None
    steps = deque(
        [
            (FAILED_GRACE_S, signal.SIGTERM),
            (FAILED_GRACE_S + TERMINATED_GRACE_S, signal.SIGKILL),
            (FAILED_GRACE_S + TERMINATED_GRACE_S + UNREACHABLE_GRACE_S, None),
        ]
    )
    tried_s = -RETRY_S
    while runner.poll() is None:
        time.sleep(0.05)
        # a signal may come before the ranks: it waits for them
        if received and time.monotonic() - tried_s > RETRY_S:
            if signal_ranks(plan, received[0]):
                _acknowledge(received.popleft())
            tried_s = time.monotonic()
        if output.failed is None or plan.is_supervised:
            continue  # the agents see to it themselves
        if failed_s is None:
            failed_s = time.monotonic()
        if steps and time.monotonic() - failed_s > steps[0][0]:
            number = steps.popleft()[1]
            if number is None:
                print("some hosts do not answer; ranks may still run there", file=sys.stderr)
                return
            if number == signal.SIGTERM:
                host, status = output.failed
                print(f"host {host} ended with status {status}; ending the ranks that still run", file=sys.stderr)
            # not waited for: it returns once every host has answered, and one may be gone
            threading.Thread(target=signal_ranks, args=(plan, number), daemon=True).start()


def run_processes(command: Sequence[str], environments: Sequence[Mapping[str, str]]) -> int:
    """Run `command` once in each environment, until all have ended. Returns the first status that is not 0.

    Signals are passed on to every process, and how long they take to heed them is theirs. When one fails by itself, the
    others, which may wait for it for ever, are ended. No process outlives this one, nor do their children.
    """
    with noted_signals(SIGNALS) as received:
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for environment in environments:
                # a session of its own: a Ctrl-C reaches it once, through us
                processes.append(
                    subprocess.Popen(command, env=environment, start_new_session=True, preexec_fn=end_with_parent())
                )
            return _wait(processes, received)
        finally:
            for process in processes:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)  # its children too
                process.wait()


def _wait(processes: Sequence[subprocess.Popen[bytes]], received: deque[int]) -> int:
    failed: int | None = None
    failed_s = 0.0
    terminated = False
    while any(process.poll() is None for process in processes):
        time.sleep(0.05)
        running = [process for process in processes if process.poll() is None]
        while received:
            number = received.popleft()
            for process in running:
                process.send_signal(number)
            _acknowledge(number)
        if failed is None:
            failed = next((place for place, process in enumerate(processes) if process.returncode), None)
            failed_s = time.monotonic()
            if failed is not None and processes[failed].returncode < 0:  # it cannot have said so itself
                print(f"rank {failed} ended with {_status(processes[failed].returncode)}", file=sys.stderr)
        elif processes[failed].returncode == HUNG and time.monotonic() - failed_s > HUNG_GRACE_S:
            for process in running:
                process.kill()
        elif not terminated and time.monotonic() - failed_s > FAILED_GRACE_S:
            terminated = True
            status = _status(processes[failed].returncode)
            print(f"rank {failed} ended with {status}; ending those that still run", file=sys.stderr)
            for process in running:
                process.terminate()
        elif terminated and time.monotonic() - failed_s > FAILED_GRACE_S + TERMINATED_GRACE_S:
            for process in running:
                process.kill()
    statuses = [process.returncode for process in processes]
    first = statuses[failed] if failed is not None else next((status for status in statuses if status), 0)
    return first if first >= 0 else 128 - first


def _acknowledge(number: int) -> None:
    text = "the ranks were told; they stop after their step and save. A second signal ends them at once"
    print(f"{signal.Signals(number).name}: {text}", file=sys.stderr, flush=True)


def _status(returncode: int) -> str:
    return f"status {returncode}" if returncode >= 0 else signal.Signals(-returncode).name
