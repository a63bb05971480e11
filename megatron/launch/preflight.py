"""Validation of a run before it starts: hosts, devices, layout, options, files. Imports neither torch nor deepspeed."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron.launch import checks, plan
from megatron.launch.agents.mpirun import check_mpirun
from megatron.launch.checks import check_start, is_empty, missing_start
from megatron.launch.child_processes import threads_per_rank
from megatron.launch.host_environment import check_variables, sent_variables
from megatron.launch.plan import Host, LaunchPlan, LaunchRequest, RefusedError, check_addresses, find_hosts
from megatron.options.config import Config, on_device
from megatron.options.data import parse_data_path
from megatron.options.dependents import slow_mode
from megatron.options.flags import flag
from megatron.parallel.layout import Layout
from megatron.plan.pipeline import partition_warnings
from megatron.runtime import devices
from megatron.runtime.device_hpu import LAZY_MODE
from megatron.runtime.devices import detect_device
from megatron.settings.command_line import CommandLine, faults_in_all, read_command_line
from megatron.settings.validation import check, idle
from megatron.training.deepspeed.config import check_deepspeed

SIZES = frozenset({"nodes", "devices_per_node", "data_parallel_size"})
MEETING = frozenset({"hostsfile", "rendezvous"})
UNREADABLE = SIZES | MEETING | {"model"}
"""Fields of a request that checks do without where their value cannot be read."""


@dataclasses.dataclass(frozen=True)
class ConfigOnRanks:
    """A config, and the ranks that run it."""

    config: Config
    devices_per_node: int
    world_size: int


def preflight(request: LaunchRequest) -> LaunchPlan:
    """Validate a request. Starts and writes nothing. Raises RefusedError with every fault found.

    A value that cannot be read is a fault of its own, and removes only the checks that need it: there is a layout for
    each of several values in its place, and only what is wrong in all of them is reported.
    """
    command, flags = _with_derived_flags(request)
    device = _choose_device(request, command)
    if device is None and request.devices_per_node is None:  # their number depends on the device
        request = dataclasses.replace(request, unread=request.unread | {"devices_per_node"})
    lazy, faults_of_mode = _lazy_mode(request, command.config, device)
    layouts = [layout for config in command.configs for layout in _layouts(request, config, device, lazy=lazy)]
    faults, warnings = [*request.faults, *command.faults, *faults_of_mode], list(checks.warn_of_rendezvous(request))
    warnings += checks.warn_of_spare_hosts(request)
    if _lacks_data(command, request) and request.dry_run:
        warnings.append("no dataset is given; the run itself will need --data-path")
    faults += faults_in_all(_check_layout(request, layout) for layout in layouts)
    faults += faults_in_all(_check_graphs(request, layout.config, lazy=lazy) for layout in layouts)
    numbers = {layout.devices_per_node for layout in layouts}
    known_devices = numbers.pop() if len(numbers) == 1 and not request.unread & SIZES else 1
    hosts, of_hosts = ([], []) if request.unread & MEETING else find_hosts(request, known_devices)
    faults += [*of_hosts, *faults_in_all(_check_machine(request, layout, is_remote=bool(hosts)) for layout in layouts)]
    faults += [*_check_launcher(request, layouts, hosts, flags), *_check_environment(request)]
    unneeded = warnings if request.dry_run else faults  # a plan needs neither data nor hosts
    unneeded += check_addresses(hosts, request.hostsfile)
    unneeded += faults_in_all(_check_data(request, layout) for layout in layouts)
    if "model" not in request.unread:
        unneeded += faults_in_all(missing_start(layout.config) for layout in layouts)
    if faults:
        raise RefusedError(list(dict.fromkeys(faults)), warnings)

    (layout,), given = layouts, command.config
    derived = _flags_of_layout(given, layout.config)
    notes = [*request.notes, *command.notes, *_notes_of_device(given, layout.config, lazy=lazy)]
    flags += derived
    data = request.fine_tuning
    if data is not None:
        data = dataclasses.replace(data, folder=str(Path(given.data.data_path[-1]).parent))
    return LaunchPlan(
        config=layout.config,
        train_flags=tuple(flags),
        nodes=request.nodes,
        devices_per_node=layout.devices_per_node,
        hosts=tuple(hosts),
        hostsfile=request.hostsfile,
        master_port=request.master_port,
        activate_dir=request.activate_dir,
        environment=(sent_variables(os.environ) if hosts else {}) | _rank_environment(request, layout, lazy=lazy),
        warnings=(*warnings, *idle(layout.config), *partition_warnings(layout.config), *_warn_of_devices(layout)),
        notes=tuple(notes),
        run_id=run_id(request, flags),
        launcher=request.launcher,
        cores_per_rank=request.cores_per_rank,
        ranks_per_socket=request.ranks_per_socket,
        max_restarts=request.max_restarts,
        min_nodes=request.min_nodes or request.nodes,
        spare_hosts=request.spare_hosts,
        rendezvous=request.rendezvous,
        fine_tuning=data,
    )


def _with_derived_flags(request: LaunchRequest) -> tuple[CommandLine, list[str]]:
    """Return the command line with the folders and settings that follow from the request, and its flags.

    They stand before the user's own flags, which override them.
    """
    own = list(request.train_flags)
    command = read_command_line(own, request.unread - UNREADABLE)
    flags = [*_output_flags(request, command), *own]
    if _lacks_data(command, request) and request.dry_run:
        flags = ["--data-path", "DATASET", *flags]
    return read_command_line(flags, request.unread - UNREADABLE), flags


def _lacks_data(command: CommandLine, request: LaunchRequest) -> bool:
    placeholder = ("DATASET",) if request.dry_run else ()
    return request.fine_tuning is None and all(
        config.data.paths[0][1] in ((), placeholder) for config in command.configs
    )


def _choose_device(request: LaunchRequest, command: CommandLine) -> str | None:
    """Return a device's name; `auto` if other machines must detect theirs themselves; None if it cannot be read."""
    names = {config.parallel.device for config in command.configs}
    if len(names) > 1:
        return None
    requested = request.device if names == {"auto"} else names.pop()
    if devices.is_device(requested):
        return requested
    if request.nodes > 1 and request.rendezvous is None:
        return "auto"
    named = {devices.known_chip(config.parallel.device_memory) for config in command.configs}
    if request.dry_run and requested == "auto" and len(named) == 1 and (known := named.pop()) is not None:
        return known[0].name  # a plan for devices that this machine need not have
    return detect_device(allow_hpu=requested != "no-hpu")


def _lazy_mode(request: LaunchRequest, config: Config, device: str | None) -> tuple[bool | None, list[str]]:
    """Return whether an HPU runs in lazy mode, None elsewhere, and the faults of it."""
    if device is None or not any(record.has_lazy_mode for record in devices.candidates(device)):
        return None, []
    lazy, compiled = request.lazy, config.training.torch_compile
    given = request.environment.get(LAZY_MODE) or os.environ.get(LAZY_MODE)
    if lazy is None and given:
        lazy = given != "0"
    if lazy and compiled:
        return lazy, [
            f"{LAZY_MODE}=1 (HL_USE_LAZY_MODE) and torch_compile (HL_USE_TORCH_COMPILE) exclude each other; set one of "
            "them to 0"
        ]
    if lazy is None:
        lazy = request.prefers_lazy and not compiled
    return None if device == "auto" and not lazy and not given else lazy, []


def _layouts(request: LaunchRequest, config: Config, device: str | None, *, lazy: bool | None) -> list[ConfigOnRanks]:
    """Return the layout of a config on its device; several, if nodes, devices or sizes cannot be read."""
    if device is not None and devices.is_device(device):
        config = on_device(config, device, lazy=bool(lazy))
    model_ranks = Layout.of(config.parallel).model_size
    devices_per_node = request.devices_per_node or _default_devices(request, device, model_ranks)
    if request.unread & SIZES:
        return [_layout(request, config, devices_per_node, model_ranks * copies) for copies in (1, 2, 3)]
    world_size = request.nodes * devices_per_node
    if request.data_parallel_size is not None:
        world_size = model_ranks * request.data_parallel_size
    return [_layout(request, config, devices_per_node, world_size)]


def _layout(request: LaunchRequest, config: Config, devices_per_node: int, world_size: int) -> ConfigOnRanks:
    layout = ConfigOnRanks(config, devices_per_node, world_size)
    if request.samples_per_rank is None:
        return layout
    samples = request.samples_per_rank * Layout.of(config.parallel, world_size).num_batch_ranks
    training = dataclasses.replace(config.training, global_batch_size=samples)
    return dataclasses.replace(layout, config=dataclasses.replace(config, training=training))


def _default_devices(request: LaunchRequest, device: str | None, model_ranks: int) -> int:
    """Return the devices of a node where none are given: a CPU runs as many ranks as the layout has."""
    is_host = device is not None and devices.is_device(device) and devices.find_device(device).is_host
    if is_host and request.nodes == 1 and request.hostsfile is None:
        return model_ranks * (request.data_parallel_size or 1)
    return plan.DEVICES_PER_NODE


def _check_layout(request: LaunchRequest, layout: ConfigOnRanks) -> Iterator[str]:
    """Yield the faults of the options, and of what they name."""
    config, world_size = layout.config, layout.world_size
    if not request.unread & SIZES:
        if request.data_parallel_size is not None:
            yield from checks.check_layout(request, config.parallel, layout.devices_per_node)
        yield from checks.check_fewer_nodes(request, config, layout.devices_per_node)
    yield from checks.check_restarts(request, config)
    yield from check(config, world_size)
    yield from check_deepspeed(config, world_size)
    yield from _check_folders(request, config)
    yield from checks.check_outputs(config)
    yield from check_start(config)


def _check_graphs(request: LaunchRequest, config: Config, *, lazy: bool | None) -> Iterator[str]:
    """Yield what keeps an HPU from running the graphs of evaluations; another device is another fault."""
    device = config.parallel.device
    if config.data.eval_graphs and devices.is_device(device) and devices.find_device(device).replays_evaluations:
        tensor_size = config.parallel.tensor_model_parallel_size
        environment = {**os.environ, **request.environment}
        yield from devices.graph_faults(
            "eval_graphs", device, lazy=lazy, tensor_size=tensor_size, environment=environment
        )


def _check_launcher(
    request: LaunchRequest, layouts: Sequence[ConfigOnRanks], hosts: Sequence[Host], flags: Sequence[str]
) -> Iterator[str]:
    """Yield what keeps pdsh or mpirun from starting the agents, and from giving them their variables."""
    if hosts and not request.dry_run:
        yield from checks.check_remote([*flags, *request.environment.values()], request)
        yield from faults_in_all(
            check_variables(layout.config.parallel.device, layout.devices_per_node, request.launcher)
            for layout in layouts
        )
    if request.launcher == "mpirun":
        yield from check_mpirun(request, hosts)


def _check_environment(request: LaunchRequest) -> Iterator[str]:
    """Yield the faults of what the ranks' environment is to be."""
    if request.activate_dir and not Path(request.activate_dir, "activate").is_file():
        yield f"HL_QNPU_DIR={request.activate_dir} holds no file `activate`; set it (--activate) to a folder that does"
    if request.ranks_per_socket and not request.cores_per_rank:
        places = f"HL_PPR={request.ranks_per_socket} (--ranks-per-socket)"
        yield f"{places} places ranks that are bound to cores; set HL_PE (--cores-per-rank) too"
    if given := request.environment.get("DS_ACCELERATOR"):
        yield f"DS_ACCELERATOR={given}: the launcher sets it; leave it out, and set HL_DEVICE (--device)"


def _check_data(request: LaunchRequest, layout: ConfigOnRanks) -> Iterator[str]:
    """Yield the faults of the dataset, unless it is still to be made."""
    given, data = request.fine_tuning, layout.config.data
    if data.data_path != ("DATASET",) and (given is None or (given.data is None and given.folder is not None)):
        yield from checks.check_data_files(layout.config)


def _check_machine(request: LaunchRequest, layout: ConfigOnRanks, *, is_remote: bool) -> Iterator[str]:
    """Yield what this machine lacks, if it runs ranks."""
    device = layout.config.parallel.device
    if request.dry_run or is_remote or request.unread & (SIZES | MEETING):
        return
    if request.nodes > 1 and request.rendezvous is None:
        return
    yield from checks.check_local_devices(device, layout.devices_per_node)
    yield from checks.check_plugin(device, request.activate_dir)
    yield from checks.check_cores(layout.devices_per_node, request.cores_per_rank, request.ranks_per_socket)
    yield from checks.check_precision(device, layout.config.training.precision)
    yield from checks.check_descriptors(layout.config, device, layout.world_size)


def _flags_of_layout(given: Config, config: Config) -> list[str]:
    """Return the flags that give every rank what was resolved for the device and the number of ranks."""
    flags = []
    if given.training.global_batch_size != config.training.global_batch_size:
        flags += [flag("global_batch_size"), str(config.training.global_batch_size)]
    if given.parallel.device != config.parallel.device:
        flags += ["--device", config.parallel.device]
    if config.training.torch_compile and given.training.torch_compile is None:
        flags += [flag("torch_compile"), "true"]
    return flags


def _notes_of_device(given: Config, config: Config, *, lazy: bool | None) -> Iterator[str]:
    if lazy is not None and devices.is_device(config.parallel.device):
        yield from slow_mode(config, lazy=lazy)
        compiled = "layers are compiled" if config.training.torch_compile else "nothing is compiled"
        mode = f"lazy mode ({LAZY_MODE}=1)" if lazy else f"eager mode ({LAZY_MODE}=0), {compiled}"
        yield f"HPU in {mode}; HL_USE_LAZY_MODE and HL_USE_TORCH_COMPILE (--torch-compile) choose"


def _warn_of_devices(layout: ConfigOnRanks) -> Iterator[str]:
    device = layout.config.parallel.device
    if devices.is_device(device):
        yield from devices.find_device(device).warn_of_ranks(layout.devices_per_node)


def _check_folders(request: LaunchRequest, config: Config) -> Iterator[str]:
    if request.rendezvous is not None and request.results_parent and config.logging.results_dir is None:
        yield (
            f"rendezvous={request.rendezvous}: each node, and each attempt, would name the results folder after its "
            "own clock; set HL_RESULTS_DIR (--results-dir) to one folder for all"
        )
    given, path = request.fine_tuning, " ".join(config.data.data_path)
    if given is None:
        return
    yield from checks.check_template(given)
    try:
        prefixes = parse_data_path(config.data.data_path)[0]
    except ValueError:  # reported with the other options
        return
    if any(Path(prefix).name != "data" for prefix in prefixes):
        yield f"data_path={path}: the tokenized data are a dataset named data; give FOLDER/data, or leave it out"
    elif given.data is not None and len(prefixes) != len(given.files):
        yield f"data_path={path} does not name one dataset for each file of HL_DATA={given.data}; leave it out"


def run_id(request: LaunchRequest, flags: Sequence[str]) -> str:
    """Return a name of the run that is equal on all nodes."""
    if request.rendezvous is not None:  # each node computes it, from what is equal on all
        return hashlib.sha256("\0".join(flags).encode()).hexdigest()[:16]
    return f"{socket.gethostname()}.{os.getpid()}.{time.time_ns()}"


def _rank_environment(request: LaunchRequest, layout: ConfigOnRanks, *, lazy: bool | None) -> dict[str, str]:
    device = layout.config.parallel.device
    environment = dict(request.environment)
    if lazy is not None:
        environment[LAZY_MODE] = "1" if lazy else "0"
    environment |= devices.rank_variables(device)
    if layout.config.data.eval_graphs:
        environment |= devices.graph_variables(device, layout.config.parallel.tensor_model_parallel_size)
    if devices.is_device(device) and devices.find_device(device).is_host:
        threads = str(request.cores_per_rank) if request.cores_per_rank else threads_per_rank(layout.devices_per_node)
        environment.setdefault("OMP_NUM_THREADS", threads)
    return environment


def _output_flags(request: LaunchRequest, command: CommandLine) -> list[str]:
    """Return flags for the folders that are not given; the results folder is named after the run."""
    config, given = command.config, command.given
    flags = []
    results = config.logging.results_dir
    if request.results_parent is not None and "results_dir" not in given and request.rendezvous is None:
        first, *others = _layouts(request, config, _choose_device(request, command), lazy=None)
        # sizes that cannot be read would be in the name
        name = "" if others or len(command.configs) > 1 else _run_folder(first)
        results = str(Path(request.results_parent, name))
        flags += ["--results-dir", results]
    checkpoints = request.checkpoints_dir or (str(Path(results, "checkpoints")) if results is not None else None)
    saves = config.checkpoint.save is not None
    if checkpoints is not None:
        if request.save and "save" not in given:
            flags, saves = [*flags, "--save", checkpoints], True
        # a run that saves nothing has nothing to go on from in a new folder
        if request.resume and "load" not in given and (saves or not is_empty(Path(checkpoints))):
            flags += ["--load", checkpoints]
    if request.fine_tuning is not None:
        folder = Path(request.fine_tuning.folder or Path(results or ".", "data"))
        flags += [] if command.namespace.data_path else ["--data-path", *request.fine_tuning.data_path(folder)]
        # the exports are what is wanted, checkpoints serve a restart
        of_exports = {"save_hf": str(Path(results or ".", "hf_format")), "keep_last": "1", "save_at_epoch": "true"}
        for name, value in of_exports.items():
            flags += [flag(name), value] if saves and name not in given else []
    return flags


def _run_folder(layout: ConfigOnRanks) -> str:
    """Return ds_z0_nl40_hs5120_gb1024_mb1_D2_T4_P1_devices8_20260131_235959, as Habana's scripts name it."""
    config, training = layout.config, layout.config.training
    ranks = Layout.of(config.parallel, layout.world_size)
    return (
        f"ds_z{config.optimizer.zero_stage}_nl{config.model.num_layers}_hs{config.model.hidden_size}"
        f"_gb{training.global_batch_size}_mb{training.micro_batch_size}_D{ranks.num_batch_ranks}_T{ranks.tensor_size}_P{ranks.num_stages}"
        f"_devices{ranks.world_size}_{time.strftime('%Y%m%d_%H%M%S')}"
    )
