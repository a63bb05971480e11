"""The hostsfile: parsing, and the hosts of a run."""

from __future__ import annotations

import ipaddress
import re
import socket
from pathlib import Path

from megatron.launch.plan import Findings, Host, Request

DEVICES_PER_NODE = 8  # of a Gaudi or DGX server, and Habana's default
# addresses that no machine has: RFC 5737
EXAMPLE_NETWORK = ipaddress.ip_network("192.0.2.0/24")
LOOPBACK = ("localhost", "127.0.0.1", "::1")


def parse_hostsfile(text: str, source: str) -> tuple[list[Host], list[str]]:
    """Return the hosts in order, and every fault with its line number.

    A line is `<host> slots=<n>`; `#` starts a comment, blank lines are skipped.
    """
    hosts: list[Host] = []
    faults = []
    for number, line in enumerate(text.splitlines(), start=1):
        content = line.split("#", 1)[0].strip()
        if not content:
            continue
        where = f"{source}, line {number}: {content!r}"
        match = re.fullmatch(r"([\w.:@-]+)(?:\s+slots=(\S*))?(\s.*)?", content)
        name, slots, rest = match.groups() if match else (content, None, None)
        if not match or name.startswith("-"):
            faults.append(f"{where} does not start with a host name; write `<host> slots=<n>`")
        elif slots is None or rest:
            faults.append(f"{where} is not `<host> slots=<n>`; write for example `{name} slots={DEVICES_PER_NODE}`")
        elif not slots.isdecimal() or int(slots) == 0:
            faults.append(f"{where}: slots must be a whole number above 0, the number of devices of the host")
        elif (first := next((host for host in hosts if host.name == name), None)) is not None:
            faults.append(f"{where} repeats the host of line {first.line}; give each host one line")
        else:
            hosts.append(Host(name, int(slots), number))
    return hosts, faults


def find_hosts(request: Request, devices_per_node: int) -> tuple[list[Host], Findings]:
    """Return the hosts of a run and their faults; no hosts if the run uses this machine alone."""
    if request.hostsfile is None:
        return [], Findings(_faults_without_hostsfile(request))
    found = Findings()
    if request.rendezvous is not None:
        found.faults.append(
            f"hostsfile {request.hostsfile} and rendezvous {request.rendezvous} exclude each other: this launcher "
            "starts all hosts, or it is started on each of them; give one"
        )
    try:
        text = Path(request.hostsfile).read_text(encoding="utf-8")
    except FileNotFoundError:
        missing = f"hostsfile {request.hostsfile} does not exist; write one line `<host> slots=<n>` for each node"
        return [], Findings([missing])
    except (OSError, UnicodeDecodeError) as error:
        unreadable = f"hostsfile {request.hostsfile} cannot be read ({error}); make it a readable text file"
        return [], Findings([unreadable])
    hosts, wrong = parse_hostsfile(text, request.hostsfile)
    found.faults += wrong
    if len(hosts) < request.nodes and not wrong:
        found.faults.append(
            f"{request.hostsfile} lists {len(hosts)} hosts for {request.nodes} nodes; add hosts, or set HL_NUM_NODES "
            "(--nodes) lower"
        )
    hosts = hosts[: request.nodes]
    found.add(_check_hosts(hosts, request, devices_per_node))
    if len(hosts) == 1 and (hosts[0].address in LOOPBACK or hosts[0].name == socket.gethostname()):
        return [], found
    return hosts, found


def _faults_without_hostsfile(request: Request) -> list[str]:
    if request.nodes == 1 or request.rendezvous is not None:
        return []
    return [
        f"{request.nodes} nodes need a hostsfile (HL_HOSTSFILE, --hostsfile) that lists them; give one, or start this "
        "on each node with HL_RENDEZVOUS (--rendezvous), as scripts/slurm.sbatch does"
    ]


def _check_hosts(hosts: list[Host], request: Request, devices_per_node: int) -> Findings:
    found = Findings()
    for host in hosts:
        where = f"{request.hostsfile}, line {host.line}: {host.name}"
        if host.slots < devices_per_node:
            found.faults.append(
                f"{where} has slots={host.slots}, fewer than the {devices_per_node} devices of each node; correct it, "
                "use another host, or set HL_NGPU_PER_NODE (--devices-per-node) lower"
            )
        if request.nodes > 1 and host.address in LOOPBACK:
            found.faults.append(f"{where} means another machine on every node; give the address that all nodes know")
    examples = [host for host in hosts if _is_example(host.address)]
    if examples:
        some = ", ".join(host.name for host in examples[:2]) + (" ..." if len(examples) > 2 else "")
        text = f"{request.hostsfile}, line {examples[0].line}: {some} are example addresses; replace them by your own"
        (found.warnings if request.dry_run else found.faults).append(text)
    return found


def _is_example(name: str) -> bool:
    try:
        return ipaddress.ip_address(name) in EXAMPLE_NETWORK
    except ValueError:
        return False
