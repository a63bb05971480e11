"""Command of the agents of a run, and the secret by which they know each other."""

from __future__ import annotations

import os
import re
import secrets
import shlex
import subprocess
import sys
import threading
from collections.abc import Mapping

from megatron.control.run_secret import SECRET
from megatron.launch.addresses import RENDEZVOUS_PORT, endpoint_of, login_of
from megatron.launch.agent_options import AgentOptions
from megatron.launch.plan import LaunchPlan

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
    rendezvous = plan.rendezvous
    if plan.hosts:
        rendezvous = endpoint_of(plan.hosts[0].address, plan.master_port or RENDEZVOUS_PORT)
    elif plan.master_port is not None and rendezvous is None:
        rendezvous = f"127.0.0.1:{plan.master_port}"
    return AgentOptions(
        nodes=plan.nodes,
        min_nodes=plan.min_nodes if plan.min_nodes < plan.nodes else None,
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
    )


def agent_command(plan: LaunchPlan) -> list[str]:
    """Return the command of each node's agent."""
    command = [sys.executable, "-u", "-m", "megatron.launch.agent"]
    if plan.hosts:
        command[1:1] = ["-X", f"run={plan.run_id}"]
    command += agent_options(plan).arguments()
    if plan.hosts and plan.launcher == "pdsh":
        command += ["--node-rank", "%n"]  # pdsh writes the number of the host for it
    command += ["--secret-file", secret_file(plan)] if plan.hosts and plan.nodes > 1 else []
    command += ["--", *plan.train_flags]
    if plan.activate_dir is None or not plan.hosts:  # on this machine the script has sourced `activate` already
        return command
    return ["/bin/bash", "-c", 'source "$0/activate" && exec "$@"', plan.activate_dir, *command]


def send_secret(plan: LaunchPlan, environment: Mapping[str, str]) -> None:
    """Start to write a new secret for the agents into a file on each host, by ssh's standard input.

    The connection lasts until the agent has read and removed the file, and the file no longer than the connection. A
    command line, and DeepSpeed's launcher puts variables there, can be read by every user of the host.
    """
    secret = os.environ.get(SECRET) or secrets.token_hex(32)
    slots = threading.BoundedSemaphore(SSH_AT_ONCE)

    def send(host: str, name: str) -> None:
        write = KEEP_SECRET.replace("NAME", name).replace("LIMIT", str(SECRET_LIMIT_S * 5))
        own = shlex.split(environment.get("PDSH_SSH_ARGS_APPEND", ""))  # first: ssh keeps the first value of each
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
    return f".megatron-{plan.run_id}." + ("%n" if plan.launcher == "pdsh" else "*")
