"""Examine the hosts of a hostsfile, or this machine, before a run; name what stands out, and why.

    megatron-doctor --hostsfile hosts.txt --folder /shared/checkpoints
    megatron-doctor --hostsfile hosts.txt --write-hostsfile healthy.txt    # leaves suspects out

The exit status is 1 if a host stands out.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron.cli.command import command, command_parser, jsonable
from megatron.launch.addresses import is_own, is_this_machine
from megatron.launch.child_processes import python_path
from megatron.launch.doctor.examination import HERE, Examined, Wanted, examine
from megatron.launch.doctor.report import text, tree
from megatron.launch.plan import Host, check_addresses, read_hostsfile
from megatron.options.flags import HelpFormatter
from megatron.runtime.commands import DONE, FAILED, REFUSED, command_name, counted, for_stderr
from megatron.runtime.devices import device_fault
from megatron.runtime.files import replacing

LAYOUT = ("tensor_model_parallel_size", "context_parallel_size", "pipeline_model_parallel_size")


def doctor_parser() -> argparse.ArgumentParser:
    """Return the parser of the command."""
    parser = command_parser(
        "doctor",
        "Examine the hosts of a hostsfile, or this machine, before a run: devices and versions, clocks, "
        "memory, disks, products bit for bit, links in a tournament. The exit status is 1 if a host stands out.",
        epilog="See docs/guides/reliability.md.",
        formatter_class=HelpFormatter,
    )
    parser.add_argument(
        "--hostsfile", metavar="FILE", help="a line `<host> slots=<n>` for each (default: this machine)"
    )
    parser.add_argument("--device", default="auto", help="device of the runs (default: what each host has)")
    parser.add_argument(
        "--devices-per-node", type=_positive, metavar="N", help="ranks of each host (default: its slots)"
    )
    parser.add_argument(
        "--folder", metavar="DIR", default=".", help="folder whose disk is tested, on every host (default: this one)"
    )
    parser.add_argument("--activate", metavar="DIR", help="folder whose `activate` every other host sources first")
    for name in LAYOUT:
        words = name.replace("_", " ")
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type=_positive,
            metavar="N",
            help=f"{words} of a layout, whose groups of ranks exchange; with none of these none do",
        )
    parser.add_argument("--json", action="store_true", help="print all that was measured as a JSON object")
    parser.add_argument("--write-hostsfile", metavar="FILE", help="write the hosts that are left without the suspects")
    parser.add_argument(
        "--measure",
        metavar="FILE",
        help="then measure the devices and links of the hosts that are left, and write their rates to FILE.yaml, for "
        "--rates of a plan",
    )
    return parser


def _positive(word: str) -> int:
    if not word.isdecimal() or int(word) == 0:
        raise argparse.ArgumentTypeError(f"{word!r} must be a whole number above 0")
    return int(word)


@command
def main(argv: Sequence[str] | None = None) -> int:
    options = doctor_parser().parse_args(argv)
    hosts, faults = hosts_of(options)
    if faults:
        for fault in faults:
            print(for_stderr(f"doctor: {fault}"), file=sys.stderr)
        return REFUSED
    sizes = [getattr(options, name) for name in LAYOUT]
    groups = None
    if any(sizes):
        groups = (sizes[0] or 1, sizes[1] or 1, sizes[2] or 1)
    findings = examine(
        hosts,
        options.device,
        str(Path(options.folder).absolute()),
        options.activate,
        Wanted(per_node=options.devices_per_node, group_sizes=groups),
        say,
    )
    print(json.dumps(jsonable(tree(findings))) if options.json else text(findings), flush=True)
    status = FAILED if findings.suspicions else DONE
    if options.write_hostsfile is not None:
        write_hostsfile(Path(options.write_hostsfile), hosts, findings)
    if options.measure is not None:
        status = measure(options, findings) or status
    return status


def say(line: str) -> None:
    """Print a line of progress."""
    print(line, file=sys.stderr, flush=True)


def hosts_of(options: argparse.Namespace) -> tuple[list[Host], list[str]]:
    """Return the hosts to examine, and what is wrong with the options."""
    hosts, faults = [Host(HERE, options.devices_per_node or 1, 1)], list[str]()
    if options.hostsfile is not None:
        hosts, faults = read_hostsfile(options.hostsfile)
        faults += check_addresses(hosts, options.hostsfile)
        if not hosts and not faults:
            faults.append(f"hostsfile {options.hostsfile} lists no host; write one line `<host> slots=<n>` for each")
    elif options.write_hostsfile is not None:
        faults.append("--write-hostsfile without --hostsfile has no effect; give that, or leave it out")
    own = [host for host in hosts if is_own(host.name)]
    if own and not all(is_this_machine(host.name) for host in hosts):
        faults.append(f"{own[0].name} means another machine on every host; give the address that all of them know")
    if (fault := device_fault(options.device)) is not None:
        faults.append(f"--device {options.device!r} {fault}")
    faults += _layout_faults(options, hosts)
    faults += _measure_faults(options)
    return hosts, faults


def _layout_faults(options: argparse.Namespace, hosts: Sequence[Host]) -> Iterator[str]:
    """Yield why the sizes of a layout have no groups; else they would not be examined, and nothing stand out."""
    sizes = [getattr(options, name) for name in LAYOUT]
    per_node = options.devices_per_node or min((host.slots for host in hosts), default=1)
    size = math.prod(each or 1 for each in sizes)
    if any(sizes) and hosts and len(hosts) * per_node < max(2, size):
        yield (
            f"{counted(len(hosts), 'host')} of {counted(per_node, 'rank')} have no groups of a layout of {size}; give "
            "hosts or --devices-per-node, or leave the sizes out"
        )


def _measure_faults(options: argparse.Namespace) -> Iterator[str]:
    if options.measure is None:
        return
    if options.activate is not None:
        yield "--measure starts hosts without --activate; leave one of them out"
    if Path(options.measure).suffix not in (".yaml", ".yml"):
        yield f"--measure {options.measure} must end with .yaml, as files of rates do"


def write_hostsfile(path: Path, hosts: Sequence[Host], findings: Examined) -> None:
    """Write the lines of the hosts that are left, with those left out as comments."""
    out = set(findings.suspects())
    lines = []
    for number, host in enumerate(hosts):
        line = f"{host.name} slots={host.slots}"
        lines.append(f"# left out by {command_name('doctor')}: {line}" if number in out else line)
    with replacing(path) as file:
        file.write(("\n".join(lines) + "\n").encode())
    say(f"{path}: {counted(len(hosts) - len(out), 'host')}")


def measure(options: argparse.Namespace, findings: Examined) -> int:
    """Let megatron-plan measure the hosts that are left, and return its exit status."""
    if findings.suspects() and options.write_hostsfile is None:
        say(f"{options.measure} is not written: hosts stand out; give --write-hostsfile, and those left are measured")
        return FAILED
    if len(findings.suspects()) == len(findings.names):
        say(f"{options.measure} is not written: no host is left")
        return FAILED
    words = ["--measure", options.measure, "--measure-folder", options.folder, "--device", options.device]
    if options.hostsfile is not None:
        words += ["--hostsfile", options.write_hostsfile or options.hostsfile]
    if options.devices_per_node is not None:
        words += ["--num-devices", str(options.devices_per_node)]
    environment = os.environ | {"PYTHONPATH": python_path()}
    started = [sys.executable, "-m", "megatron.cli.entry", "plan", *words]
    return subprocess.run(started, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
