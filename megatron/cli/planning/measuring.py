"""`megatron-plan --measure FILE`: start the ranks that measure the present devices, and write their rates."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.generation.options import LoadOptions
from megatron.launch.inference import plan_ranks
from megatron.launch.plan import LaunchPlan, LaunchRequest, read_hostsfile
from megatron.options.config import ConfigError
from megatron.options.flags import flag
from megatron.resilience.process import status_of
from megatron.runtime.commands import for_stderr
from megatron.runtime.devices import device_fault

MAIN = "megatron.measuring.ranks"


def add_measure_flags(group: argparse._ArgumentGroup) -> None:
    """Add the flags of a measurement."""
    group.add_argument(
        "--measure",
        metavar="FILE",
        help="measure the present devices, and write their rates to FILE.yaml: one device, those of --num-devices, or "
        "with --hostsfile of all its nodes",
    )
    group.add_argument(
        "--measure-folder", metavar="DIR", help="folder whose disk --measure times (default: the current folder)"
    )


READ = ("measure", "measure_folder", "num_devices", "hostsfile")
"""Flags of the plan that a measurement reads."""


def check_measure_flags(options: argparse.Namespace, defaults: argparse.Namespace) -> None:
    """Raise ConfigError for flags of a measurement where there is none, and with one for those that it does not read.

    `defaults`: the options of a command line without flags.
    """
    if options.measure is not None:
        others = [name for name, value in vars(options).items() if name not in READ and value != vars(defaults)[name]]
        faults = [f"--measure FILE does not read {flag(name)}; leave one of them out" for name in others]
        if faults:
            raise ConfigError(faults)
        return
    if options.measure_folder is not None:
        raise ConfigError(["--measure-folder without --measure FILE has no effect; give that, or leave it out"])
    if options.hostsfile is not None and not options.search:
        raise ConfigError(["--hostsfile without --measure FILE or --search has no effect; give one, or leave it out"])


@dataclass(frozen=True)
class _Ranks:
    """Layout of ranks that measure: each has a device for itself."""

    load: LoadOptions
    use_graphs: bool | None = None


def measure(options: argparse.Namespace, flags: Sequence[str]) -> int:
    """Measure, and return the exit status. Several ranks end this process with theirs. Raises ConfigError."""
    plan = measure_plan(options, flags)
    for note in plan.notes:
        print(for_stderr(f"note: {note}"), file=sys.stderr)
    if plan.nodes * plan.devices_per_node == 1 and not plan.hosts:
        os.environ.update(plan.environment)
        from megatron.measuring.ranks import main  # late: it imports torch

        return status_of(main, plan.train_flags)
    from megatron.launch.agents.hosts import launch  # late: one rank needs none of it

    return launch(plan)


def measure_plan(options: argparse.Namespace, flags: Sequence[str], *, is_tiny: bool = False) -> LaunchPlan:
    """Return the launch of the ranks. Raises ConfigError with every fault. `is_tiny`: few sizes, for tests."""
    device, faults = _device(flags)
    faults += _file_faults(Path(options.measure))
    folder = Path(options.measure_folder or ".")
    if not folder.is_dir():
        faults.append(f"--measure-folder {folder} is not a folder; give one on the disk of the saves")
    request = LaunchRequest(device=device, devices_per_node=options.num_devices)
    if options.num_devices is not None and options.num_devices < 1:
        faults.append(f"--num-devices {options.num_devices} must be at least 1")
        request.devices_per_node = 1
    if options.hostsfile is not None:
        request.hostsfile = options.hostsfile
        faults += _add_hosts(request, options.hostsfile)
    words = ["--output", str(Path(options.measure).absolute()), "--folder", str(folder.absolute())]
    if is_tiny:
        words.append("--tiny")
    plan = plan_ranks(MAIN, request, words, _Ranks(LoadOptions(load="", device=device)), is_chat=False)
    faults += request.faults
    if faults:
        raise ConfigError(list(dict.fromkeys(faults)))
    return plan


def _device(flags: Sequence[str]) -> tuple[str, list[str]]:
    """Return the device of the flags, the only one that a measurement reads, and faults."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--device", default="auto")
    given, rest = parser.parse_known_args(list(flags))
    faults = []
    fault = device_fault(given.device)
    if fault is not None:
        faults.append(f"--device {given.device!r} {fault}")
        given.device = "auto"
    if rest:
        faults.append(f"--measure reads --device alone of the flags of a training, not {' '.join(rest)}; leave it out")
    return given.device, faults


def _file_faults(file: Path) -> list[str]:
    if file.suffix not in (".yaml", ".yml"):
        return [f"--measure {file} must end with .yaml, by which --rates distinguishes a file from a machine's name"]
    if not file.absolute().parent.is_dir():
        return [f"--measure {file}: its folder does not exist; make it first"]
    return []


def _add_hosts(request: LaunchRequest, path: str) -> list[str]:
    """Let a request have all hosts of a file, and as many devices as the smallest has; return faults."""
    hosts, faults = read_hostsfile(path)
    if hosts:
        request.nodes = len(hosts)
        request.devices_per_node = request.devices_per_node or min(host.slots for host in hosts)
    return faults
