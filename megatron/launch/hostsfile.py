"""The hostsfile: parsing, and the hosts of a run."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron.launch.addresses import host_fault, host_key, is_example, is_own, is_this_machine
from megatron.launch.plan import Host, LaunchRequest

DEVICES_PER_NODE = 8  # of a Gaudi or DGX server, and Habana's default


def parse_hostsfile(text: str, source: str) -> tuple[list[Host], list[str]]:
    """Return the hosts in order, and every fault with its line number.

    A line is `<host> slots=<n>`; `#` starts a comment, blank lines are skipped.
    """
    hosts: list[Host] = []
    faults = []
    if text.startswith("\ufeff"):  # DeepSpeed's launcher reads the file too, and would take it for a part of the name
        faults.append(f"{source} begins with a byte order mark; save it as UTF-8 without one")
    for number, line in enumerate(text.removeprefix("\ufeff").splitlines(), start=1):
        content = line.split("#", 1)[0].strip()
        if not content:
            continue
        where = f"{source}, line {number}: {content!r}"
        match = re.fullmatch(r"([\w.:@%\[\]-]+)(?:\s+slots=(\S*))?(\s.*)?", content)
        name, slots, rest = match.groups() if match else (content, None, None)
        if not match or name.startswith("-"):
            faults.append(f"{where} does not start with a host name; write `<host> slots=<n>`")
        elif slots is None or rest:
            faults.append(f"{where} is not `<host> slots=<n>`; write for example `{name} slots={DEVICES_PER_NODE}`")
        elif not slots.isdecimal() or int(slots) == 0:
            faults.append(f"{where}: slots must be a whole number above 0, the number of devices of the host")
        elif fault := host_fault(name):
            faults.append(f"{where}: {fault}")
        elif (first := next((host for host in hosts if host_key(host.name) == host_key(name)), None)) is not None:
            also = "" if name == first.name else f", {first.name}: users and case make no other host"
            faults.append(f"{where} repeats the host of line {first.line}{also}; give each host one line")
        else:
            hosts.append(Host(name, int(slots), number))
    return hosts, faults


def find_hosts(request: LaunchRequest, devices_per_node: int) -> tuple[list[Host], list[str]]:
    """Return the hosts of a run, then the spare ones, and their faults; no hosts if it uses this machine alone."""
    path, nodes = request.hostsfile, request.nodes
    if path is None:
        if nodes == 1 or request.rendezvous is not None:
            return [], []
        return [], [
            f"{nodes} nodes need a hostsfile (HL_HOSTSFILE, --hostsfile) that lists them; give one, or start this on "
            "each node with HL_RENDEZVOUS (--rendezvous), as scripts/slurm.sbatch does"
        ]
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        return [], [f"hostsfile {path} does not exist; write one line `<host> slots=<n>` for each node"]
    except (OSError, UnicodeDecodeError) as error:
        return [], [f"hostsfile {path} cannot be read ({error}); make it a readable text file"]
    hosts, faults = parse_hostsfile(text, path)
    spare = request.spare_hosts
    if len(hosts) < nodes + spare and not faults:
        needed, lower = f"{nodes} nodes", "HL_NUM_NODES (--nodes)"
        if spare:
            needed, lower = f"{needed} and {spare} spare", "HL_SPARE_HOSTS (--spare-hosts)"
        faults.append(f"{path} lists {len(hosts)} hosts for {needed}; add hosts, or set {lower} lower")
    if request.rendezvous is not None:
        faults.append(
            f"hostsfile {path} and rendezvous {request.rendezvous} exclude each other: this launcher starts all hosts, "
            "or it is started on each of them; give one"
        )
    hosts = hosts[: nodes + spare]
    for host in hosts:
        where = f"{path}, line {host.line}: {host.name}"
        if host.slots < devices_per_node:
            faults.append(
                f"{where} has slots={host.slots}, fewer than the {devices_per_node} devices of each node; correct it, "
                "use another host, or set HL_NGPU_PER_NODE (--devices-per-node) lower"
            )
        if nodes > 1 and is_own(host.name):
            faults.append(f"{where} means another machine on every node; give the address that all nodes know")
    if len(hosts) == 1 and is_this_machine(hosts[0].name):
        return [], faults
    return hosts, faults


def check_addresses(hosts: Sequence[Host], hostsfile: str | None) -> Iterator[str]:
    """Yield a fault if the hosts are those of an example."""
    examples = [host for host in hosts if is_example(host.name)]
    if examples:
        some = ", ".join(host.name for host in examples[:2]) + (" ..." if len(examples) > 2 else "")
        yield f"{hostsfile}, line {examples[0].line}: {some} are example addresses; replace them by your own"
