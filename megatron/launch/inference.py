"""Launch of commands that load a model without training it: on this machine, or over the hosts of a hostsfile.

Imports neither torch nor deepspeed.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence

from megatron.accelerator import detect_device
from megatron.config.options import Config
from megatron.generation.load_options import LoadOptions
from megatron.launch import checks
from megatron.launch.child_processes import threads_per_rank
from megatron.launch.hl_requests import inference_request
from megatron.launch.hl_variables import VARIABLES, Script
from megatron.launch.host_environment import check_variables, sent_variables
from megatron.launch.hostsfile import check_addresses, find_hosts
from megatron.launch.plan import LaunchPlan, LaunchRequest
from megatron.launch.preflight import run_id


def add_launch_flags(parser: argparse.ArgumentParser, script: Script) -> None:
    """Add the flags that say where ranks run, and `--variables`, by which the script passes its HL_* variables."""
    group = parser.add_argument_group("launch", "Ranks and hosts. One rank runs in the process of the command itself.")
    group.add_argument("--variables", choices=(script,), help=argparse.SUPPRESS)
    group.add_argument("--nodes", type=int, metavar="INT", help="nodes (default: 1)")
    group.add_argument("--devices-per-node", type=int, metavar="INT", help="default: what the layout needs")
    group.add_argument(
        "--data-parallel-size", type=int, metavar="INT", help="copies of the model, which share the work (default: 1)"
    )
    group.add_argument("--hostsfile", metavar="STR", help="one `<host> slots=<n>` a line")
    group.add_argument("--master-port", type=int, metavar="INT", help="default: 29500 over several nodes, else free")
    group.add_argument("--dry-run", action="store_true", help="print what would be started, and start nothing")


def variables_text(script: Script) -> str:
    """Return the lines of --help on the variables of a script."""
    taken = [variable for variable in VARIABLES if script in variable.scripts]
    width = max(len(variable.name) for variable in taken) + 4
    return "\n".join(f"  {variable.name}".ljust(width) + variable.meaning for variable in taken)


def launch_request(namespace: argparse.Namespace, script: Script, environment: Mapping[str, str]) -> LaunchRequest:
    """Return what the launch flags and, with --variables, the HL_* variables request; flags come first."""
    request = inference_request(environment, script) if namespace.variables else LaunchRequest()
    for name in ("nodes", "devices_per_node", "data_parallel_size", "hostsfile", "master_port"):
        value = getattr(namespace, name)
        if value is not None:
            setattr(request, name, value)
            if isinstance(value, int) and value < 1:
                request.faults.append(f"--{name.replace('_', '-')} {value} must be 1 or more")
    request.dry_run |= namespace.dry_run
    return request


def plan_ranks(
    main: str, request: LaunchRequest, flags: Sequence[str], load: LoadOptions, *, is_chat: bool
) -> LaunchPlan:
    """Return the plan of the ranks that run the module `main`. Problems are added to request.faults."""
    device = load.device if load.device != "auto" else request.device
    if device not in ("hpu", "cuda", "cpu"):
        device = detect_device(allow_hpu=device != "no-hpu")
    model_ranks = load.tensor_model_parallel_size * load.pipeline_model_parallel_size
    copies = request.data_parallel_size
    devices = request.devices_per_node or -(-model_ranks * (copies or 1) // request.nodes)
    world_size = request.nodes * devices
    if copies is None:
        copies = request.data_parallel_size = max(1, world_size // model_ranks)
    hosts, faults = find_hosts(request, devices)
    request.faults += [*_layout_faults(request, load, world_size, devices), *faults]
    request.faults += check_addresses(hosts, request.hostsfile)
    if hosts:
        request.faults += checks.check_remote([*flags, *request.environment.values()], request)
        request.faults += check_variables(device, devices)
    else:
        request.faults += checks.check_local_devices(device, devices)
        request.faults += checks.check_precision(device, "fp32" if load.precision == "auto" else load.precision)
    if is_chat and hosts:
        request.faults.append("--chat needs its ranks on this machine; leave the hostsfile out")
    environment = dict(request.environment) | {"DS_ACCELERATOR": device}
    if device == "cpu":
        environment.setdefault("OMP_NUM_THREADS", threads_per_rank(devices))
    return LaunchPlan(
        config=Config(),
        train_flags=(*flags, "--device", device),
        nodes=request.nodes,
        devices_per_node=devices,
        hosts=tuple(hosts),
        hostsfile=request.hostsfile,
        master_port=request.master_port,
        activate_dir=request.activate_dir,
        environment=(sent_variables(os.environ) if hosts else {}) | environment,
        warnings=(),
        notes=tuple(request.notes),
        run_id=run_id(request, flags),
        min_nodes=request.nodes,
        rendezvous=request.rendezvous,
        main=main,
        is_chat=is_chat,
    )


def _layout_faults(request: LaunchRequest, load: LoadOptions, world_size: int, devices: int) -> Iterator[str]:
    model_ranks = load.tensor_model_parallel_size * load.pipeline_model_parallel_size
    if (request.data_parallel_size or 1) * model_ranks != world_size:
        yield from checks.check_layout(request, load, devices)


def with_terminal(plan: LaunchPlan, variable: str) -> LaunchPlan:
    """Return the plan with the path of this process's input in a variable of the ranks."""
    return dataclasses.replace(plan, environment={**plan.environment, variable: f"/proc/{os.getpid()}/fd/0"})
