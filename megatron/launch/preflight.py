"""Validation of a run before it starts: hosts, devices, layout, options, files. Imports neither torch nor deepspeed."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron.hub.names import pinned
from megatron.launch import checks, plan
from megatron.launch.agents.mpirun import check_mpirun
from megatron.launch.checks import check_start, is_empty, missing_start
from megatron.launch.child_processes import threads_per_rank
from megatron.launch.host_environment import check_variables, sent_variables
from megatron.launch.plan import (
    FineTuning,
    Host,
    LaunchPlan,
    LaunchRequest,
    RefusedError,
    check_addresses,
    find_hosts,
)
from megatron.options.config import Config, on_device
from megatron.options.data import parse_data_path
from megatron.options.dependents import slow_mode
from megatron.options.dialect import flag_words
from megatron.options.flags import flag
from megatron.parallel.layout import Layout
from megatron.plan.pipeline import partition_warnings
from megatron.runtime import devices
from megatron.runtime.device import Device
from megatron.runtime.device_hpu import LAZY_MODE
from megatron.runtime.devices import detect_device
from megatron.settings.command_line import OF_HUB, CommandLine, read_command_line
from megatron.settings.stand_ins import faults_in_all
from megatron.settings.validation import check, idle
from megatron.training.deepspeed.config import check_deepspeed
from megatron.weights.model_folder import names_on_hub

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

    @property
    def device(self) -> Device | None:
        """Record of the device; None: other machines must detect theirs themselves."""
        name = self.config.parallel.device
        if not devices.is_device(name):
            return None
        return devices.find_device(name)


@dataclasses.dataclass(frozen=True)
class _Draft:
    """A request as far as it can be read."""

    request: LaunchRequest
    command: CommandLine
    flags: list[str]
    """Flags of megatron.train, those that follow from the request before the user's own."""
    lazy: bool | None
    """HPU: lazy mode; None elsewhere."""
    layouts: list[ConfigOnRanks]
    """Several where a value cannot be read: one for each of several values in its place."""
    hosts: list[Host]

    def in_all(self, check: Callable[[ConfigOnRanks], Iterable[str]]) -> list[str]:
        """Return what is wrong in every layout, and so does not depend on a value that cannot be read."""
        return faults_in_all(check(layout) for layout in self.layouts)


def preflight(request: LaunchRequest) -> LaunchPlan:
    """Validate a request. Starts and writes nothing. Raises RefusedError with every fault found.

    A value that cannot be read is a fault of its own, and removes only the checks that need it: there is a layout for
    each of several values in its place, and only what is wrong in all of them is reported.
    """
    # first: the folders that follow from the request are checked with the user's own
    command, flags = _with_derived_flags(request)
    device = _choose_device(request, command)
    if device is None and request.devices_per_node is None:  # their number depends on the device
        request = dataclasses.replace(request, unread=request.unread | {"devices_per_node"})
    # before the layouts: compilation and kernels of an HPU depend on the mode
    lazy, faults_of_mode = _lazy_mode(request, command.config, device)
    layouts = [layout for config in command.configs for layout in _layouts(request, config, device, lazy=lazy)]
    hosts, faults_of_hosts = _find_hosts(request, layouts)
    draft = _Draft(request, command, flags, lazy, layouts, hosts)
    faults = [*request.faults, *command.faults, *faults_of_mode]
    faults += draft.in_all(lambda layout: _check_layout(request, layout))
    faults += draft.in_all(lambda layout: _check_graphs(request, layout, lazy=lazy))
    faults += faults_of_hosts
    faults += draft.in_all(lambda layout: _check_machine(request, layout, is_remote=bool(hosts)))
    faults += [*_check_launcher(draft), *check_environment(request)]
    warnings = list(_warnings(draft))
    if request.dry_run:  # a plan needs neither data nor hosts
        warnings += _check_inputs(draft)
    else:
        faults += _check_inputs(draft)
    if faults:
        raise RefusedError(faults, warnings)
    return _plan(draft, warnings)


def _plan(draft: _Draft, warnings: list[str]) -> LaunchPlan:
    """Return the plan of a request without faults, so that there is one layout."""
    (layout,), given, request, lazy = draft.layouts, draft.command.config, draft.request, draft.lazy
    # behind the user's own, so that all ranks have what was resolved here
    flags = [*draft.flags, *_flags_of_layout(given, layout.config), *_pinned_flags(layout.config)]
    checkpoint = layout.config.checkpoint
    environment = _rank_environment(request, layout, lazy=lazy)
    if draft.hosts:
        # ssh passes on nothing of the environment that a run is launched from
        environment = sent_variables(os.environ) | environment
    data = request.fine_tuning
    if data is not None:
        data = dataclasses.replace(data, folder=str(Path(given.data.data_path[-1]).parent))
    resolved = {
        "device": layout.config.parallel.device,
        "devices_per_node": layout.devices_per_node,
        "data_parallel_size": Layout.of(layout.config.parallel, layout.world_size).num_batch_ranks,
        "min_nodes": request.min_nodes or request.nodes,
        "dry_run": False,
    }
    return LaunchPlan(
        **request.options() | resolved,
        config=layout.config,
        train_flags=tuple(flags),
        hosts=tuple(draft.hosts),
        environment=environment,
        warnings=(*warnings, *idle(layout.config), *partition_warnings(layout.config), *_warn_of_devices(layout)),
        notes=(*request.notes, *draft.command.notes, *_notes_of_device(layout, lazy=lazy)),
        run_id=run_id(request, flags),
        fine_tuning=data,
        models=names_on_hub(checkpoint.load, checkpoint.save, layout.config.lora.lora_base),
    )


def _find_hosts(request: LaunchRequest, layouts: Sequence[ConfigOnRanks]) -> tuple[list[Host], list[str]]:
    if request.unread & MEETING:
        return [], []
    numbers = {layout.devices_per_node for layout in layouts}
    is_known = len(numbers) == 1 and not request.unread & SIZES
    # where the devices of a node are not known, no host has too few
    return find_hosts(request, numbers.pop() if is_known else 1)


def _warnings(draft: _Draft) -> Iterator[str]:
    yield from checks.warn_of_rendezvous(draft.request)
    yield from checks.warn_of_spare_hosts(draft.request)
    if draft.request.dry_run and _lacks_data(draft.command, draft.request):
        yield "no dataset is given; the run itself will need --data-path"


def _check_inputs(draft: _Draft) -> Iterator[str]:
    """Yield the faults of what the run reads and where it runs, which its plan does without."""
    request = draft.request
    yield from check_addresses(draft.hosts, request.hostsfile)
    yield from draft.in_all(lambda layout: _check_data(request, layout))
    if "model" not in request.unread:
        yield from draft.in_all(lambda layout: missing_start(layout.config))


def _with_derived_flags(request: LaunchRequest) -> tuple[CommandLine, list[str]]:
    """Return the command line with the folders and settings that follow from the request, and its flags.

    They stand before the user's own flags, which override them.
    """
    own = list(request.train_flags)
    # read twice: the derived flags follow from the user's, and are then read with them
    command = read_command_line(own, request.unread - UNREADABLE)
    flags = [*_output_flags(request, command), *own]
    if _lacks_data(command, request) and request.dry_run:
        flags = ["--data-path", "DATASET", *flags]
    return read_command_line(flags, request.unread - UNREADABLE), flags


def _lacks_data(command: CommandLine, request: LaunchRequest) -> bool:
    placeholder = ("DATASET",) if request.dry_run else ()
    paths = [config.data.paths[0][1] for config in command.configs]
    return request.fine_tuning is None and all(path in ((), placeholder) for path in paths)


def _choose_device(request: LaunchRequest, command: CommandLine) -> str | None:
    """Return a device's name; `auto` if other machines must detect theirs themselves; None if it cannot be read."""
    names = {config.parallel.device for config in command.configs}
    if len(names) > 1:
        return None
    requested = names.pop()
    if requested == "auto":  # else the flag of training wins over the launcher's own, which HL_DEVICE sets
        requested = request.device
    if devices.is_device(requested):
        return requested
    if request.nodes > 1 and request.rendezvous is None:
        return "auto"
    if request.dry_run and requested == "auto":  # a plan for devices that this machine need not have
        chips = [devices.known_chip(config.parallel.device_memory) for config in command.configs]
        if chips[0] is not None and chips.count(chips[0]) == len(chips):
            return chips[0][0].name
    return detect_device(allow_hpu=requested != "no-hpu")


def _lazy_mode(request: LaunchRequest, config: Config, device: str | None) -> tuple[bool | None, list[str]]:
    """Return whether an HPU runs in lazy mode, None elsewhere, and the faults of it."""
    if device is None or not any(record.has_lazy_mode for record in devices.candidates(device)):
        return None, []
    lazy, compiled = request.lazy, config.training.torch_compile
    # what the ranks are given comes before what this process has
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
    if device == "auto" and not lazy and not given:
        return None, []  # the hosts may have no HPU, and nothing was said that only an HPU has
    return lazy, []


def _layouts(request: LaunchRequest, config: Config, device: str | None, *, lazy: bool | None) -> list[ConfigOnRanks]:
    """Return the layout of a config on its device; several, if nodes, devices or sizes cannot be read."""
    if device is not None and devices.is_device(device):
        config = on_device(config, device, lazy=bool(lazy))
    model_ranks = Layout.of(config.parallel).model_size
    devices_per_node = request.devices_per_node or _default_devices(request, device, model_ranks)
    if request.unread & SIZES:
        # stand-ins for the sizes: a fault that all of them have does not come from the number of ranks
        return [_layout(request, config, devices_per_node, model_ranks * copies) for copies in (1, 2, 3)]
    world_size = request.nodes * devices_per_node
    if request.data_parallel_size is not None:
        world_size = model_ranks * request.data_parallel_size
    return [_layout(request, config, devices_per_node, world_size)]


def _layout(request: LaunchRequest, config: Config, devices_per_node: int, world_size: int) -> ConfigOnRanks:
    layout = ConfigOnRanks(config, devices_per_node, world_size)
    if request.samples_per_rank is None:
        return layout
    # global batch = samples of a rank x ranks that read different data
    samples = request.samples_per_rank * Layout.of(config.parallel, world_size).num_batch_ranks
    training = dataclasses.replace(config.training, global_batch_size=samples)
    return dataclasses.replace(layout, config=dataclasses.replace(config, training=training))


def _default_devices(request: LaunchRequest, device: str | None, model_ranks: int) -> int:
    """Return the devices of a node where none are given: a CPU runs as many ranks as the layout has."""
    if device is None or not devices.is_device(device) or not devices.find_device(device).is_host:
        return plan.DEVICES_PER_NODE
    if request.nodes > 1 or request.hostsfile is not None:
        return plan.DEVICES_PER_NODE
    return model_ranks * (request.data_parallel_size or 1)


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


def _check_graphs(request: LaunchRequest, layout: ConfigOnRanks, *, lazy: bool | None) -> Iterator[str]:
    """Yield what keeps an HPU from running the graphs of evaluations; another device is another fault."""
    device = layout.device
    if device is not None and layout.config.data.eval_graphs and device.replays_evaluations:
        parallel, environment = layout.config.parallel, {**os.environ, **request.environment}
        size = parallel.tensor_model_parallel_size
        yield from devices.graph_faults(
            "eval_graphs", parallel.device, lazy=lazy, tensor_size=size, environment=environment
        )


def _check_launcher(draft: _Draft) -> Iterator[str]:
    """Yield what keeps pdsh or mpirun from starting the agents, and from giving them their variables."""
    request = draft.request
    if draft.hosts and not request.dry_run:
        yield from checks.check_remote([*draft.flags, *request.environment.values()], request)
        yield from draft.in_all(
            lambda layout: check_variables(layout.config.parallel.device, layout.devices_per_node, request.launcher)
        )
    if request.launcher == "mpirun":
        yield from check_mpirun(request, draft.hosts)


def check_environment(request: LaunchRequest) -> Iterator[str]:
    """Yield the faults of what the ranks' environment is to be."""
    if request.activate and not Path(request.activate, "activate").is_file():
        yield f"HL_QNPU_DIR={request.activate} holds no file `activate`; set it (--activate) to a folder that does"
    if request.ranks_per_socket and not request.cores_per_rank:
        places = f"HL_PPR={request.ranks_per_socket} (--ranks-per-socket)"
        yield f"{places} places ranks that are bound to cores; set HL_PE (--cores-per-rank) too"
    given = request.environment.get("DS_ACCELERATOR")
    # two names for the device could contradict each other in the ranks
    if given:
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
    yield from checks.check_plugin(device, request.activate)
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


def _pinned_flags(config: Config) -> list[str]:
    """Return the flags that name models on the hub with the commits that were resolved here, for all hosts."""
    flags = []
    for name, (section, _) in OF_HUB.items():
        folder = getattr(getattr(config, section), name)
        on_hub = None if folder is None else pinned(folder)
        if on_hub is not None:
            flags += [flag(name), on_hub]
    return flags


def _notes_of_device(layout: ConfigOnRanks, *, lazy: bool | None) -> Iterator[str]:
    if lazy is None or layout.device is None:
        return
    yield from slow_mode(layout.config, lazy=lazy)
    if lazy:
        mode = f"lazy mode ({LAZY_MODE}=1)"
    elif layout.config.training.torch_compile:
        mode = f"eager mode ({LAZY_MODE}=0), layers are compiled"
    else:
        mode = f"eager mode ({LAZY_MODE}=0), nothing is compiled"
    yield f"HPU in {mode}; HL_USE_LAZY_MODE and HL_USE_TORCH_COMPILE (--torch-compile) choose"


def _warn_of_devices(layout: ConfigOnRanks) -> Iterator[str]:
    if layout.device is not None:
        yield from layout.device.warn_of_ranks(layout.devices_per_node)


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
        environment[LAZY_MODE] = str(int(lazy))
    # after the user's: what the device needs is not to be overridden
    environment |= devices.rank_variables(device)
    if layout.config.data.eval_graphs:
        environment |= devices.graph_variables(device, layout.config.parallel.tensor_model_parallel_size)
    if layout.device is not None and layout.device.is_host:
        threads = str(request.cores_per_rank or threads_per_rank(layout.devices_per_node))
        environment.setdefault("OMP_NUM_THREADS", threads)
    return environment


def _output_flags(request: LaunchRequest, command: CommandLine) -> list[str]:
    """Return flags for the folders that are not given; the results folder is named after the run."""
    results = command.config.logging.results_dir
    flags: dict[str, Any] = {}
    # with a rendezvous each node would name the folder after its own clock (`_check_folders`)
    if request.results_parent is not None and "results_dir" not in command.given and request.rendezvous is None:
        flags["results_dir"] = results = str(Path(request.results_parent, _name_of_results(request, command)))
    flags |= _checkpoint_flags(request, command, results)
    if request.fine_tuning is not None:
        saves = "save" in flags or command.config.checkpoint.save is not None
        flags |= _fine_tuning_flags(request.fine_tuning, command, Path(results or "."), saves=saves)
    return flag_words({flag(name): value for name, value in flags.items()})


def _checkpoint_flags(request: LaunchRequest, command: CommandLine, results: str | None) -> dict[str, str]:
    checkpoints = request.checkpoints_dir
    if checkpoints is None and results is not None:
        checkpoints = str(Path(results, "checkpoints"))
    if checkpoints is None:
        return {}
    flags = {}
    if request.save and "save" not in command.given:
        flags["save"] = checkpoints
    # a run that saves nothing has nothing to go on from in a new folder
    saves = "save" in flags or command.config.checkpoint.save is not None
    if request.resume and "load" not in command.given and (saves or not is_empty(Path(checkpoints))):
        flags["load"] = checkpoints
    return flags


def _fine_tuning_flags(given: FineTuning, command: CommandLine, results: Path, *, saves: bool) -> dict[str, Any]:
    flags: dict[str, Any] = {}
    if not command.namespace.data_path:
        flags["data_path"] = given.data_path(Path(given.folder or results / "data"))
    if saves:  # the exports are what is wanted, checkpoints serve a restart
        exports = {"save_hf": str(results / "hf_format"), "keep_last": 1, "save_at_epoch": True}
        flags |= {name: value for name, value in exports.items() if name not in command.given}
    return flags


def _name_of_results(request: LaunchRequest, command: CommandLine) -> str:
    """Return the name of the results folder, "" where sizes that cannot be read would be in it."""
    # the name has sizes in it, which must be the ones that the run will have
    first, *others = _layouts(request, command.config, _choose_device(request, command), lazy=None)
    if others or len(command.configs) > 1:
        return ""
    return _run_folder(first)


def _run_folder(layout: ConfigOnRanks) -> str:
    """Return ds_z0_nl40_hs5120_gb1024_mb1_D2_T4_P1_devices8_20260131_235959, as Habana's scripts name it."""
    config, training = layout.config, layout.config.training
    ranks = Layout.of(config.parallel, layout.world_size)
    # as later scripts have it, where the older ones had no such axis
    context = f"_C{ranks.context_size}" if ranks.context_size > 1 else ""
    return (
        f"ds_z{config.optimizer.zero_stage}_nl{config.model.num_layers}_hs{config.model.hidden_size}"
        f"_gb{training.global_batch_size}_mb{training.micro_batch_size}_D{ranks.num_batch_ranks}_T{ranks.tensor_size}"
        f"{context}_P{ranks.num_stages}_devices{ranks.world_size}_{time.strftime('%Y%m%d_%H%M%S')}"
    )
