"""Validation of a run before it starts: hosts, devices, layout, options, files. Imports neither torch nor deepspeed."""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import os
import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron.accelerator import detect_device
from megatron.config.command_line import build_parser, load_config, parse_arguments
from megatron.config.options import Config, ConfigError
from megatron.config.validation import idle
from megatron.launch import checks
from megatron.launch.child_processes import threads_per_rank
from megatron.launch.hostsfile import DEVICES_PER_NODE, check_addresses, find_hosts
from megatron.launch.plan import LaunchPlan, RefusedError, Request

# The network interface between the nodes, passed on from this environment: it has one name on every node.
INTERFACES = ("GLOO_SOCKET_IFNAME", "HCCL_SOCKET_IFNAME")


@dataclasses.dataclass(frozen=True)
class Layout:
    """Ranks of a run. Faulty sizes count as 1, so that the rest can still be checked."""

    device: str
    devices_per_node: int
    tensor: int
    pipeline: int
    is_known: bool
    """False if a size is faulty."""
    world_size: int


def preflight(request: Request) -> LaunchPlan:
    """Validate a request. Starts and writes nothing. Raises RefusedError with every fault found."""
    faults, warnings = list(request.faults), list[str]()
    flags = list(request.train_flags)
    config = _parsed(flags)
    given = build_parser().parse_known_args(flags)[0]
    layout = _layout(request, config, given)
    if layout.is_known and request.data_parallel_size is not None:
        faults += checks.check_layout(request, layout.tensor, layout.pipeline, layout.devices_per_node)
    lacks_data = request.fine_tuning is None and not (
        config.data.paths[0][1] if config is not None else given.data_path or given.train_data_path
    )
    if lacks_data and request.dry_run:
        flags += ["--data-path", "DATASET"]
        warnings.append("no dataset is given; the run itself will need --data-path")
    if config is not None:
        faults += _check_results_folder(request, config)
        flags += _output_flags(request, config, layout.world_size // (layout.tensor * layout.pipeline))
    try:
        config = load_config(flags, layout.world_size)
    except ConfigError as error:
        faults += error.faults
        config = _parsed(flags)
    hosts, of_hosts = find_hosts(request, layout.devices_per_node if layout.is_known else 1)
    faults += [*of_hosts, *_check_machines(request, flags, layout, config, is_remote=bool(hosts))]
    # a plan needs neither data nor hosts
    unneeded = warnings if request.dry_run else faults
    unneeded += check_addresses(hosts, request.hostsfile)
    if config is not None:
        faults += _check_config(request, config, layout)
        chats = request.fine_tuning
        # chats are processed first
        if not lacks_data and (chats is None or (chats.chats is None and chats.folder is not None)):
            unneeded += checks.check_data_files(config)
    if faults or config is None:
        raise RefusedError(faults, warnings)

    flags += ["--device", layout.device] if config.parallel.device != layout.device else []
    config = load_config(flags, layout.world_size)
    warnings += idle(config)
    chats = request.fine_tuning
    if chats is not None:
        chats = dataclasses.replace(chats, folder=str(Path(config.data.data_path[0]).parent))
    return LaunchPlan(
        config=config,
        train_flags=tuple(flags),
        nodes=request.nodes,
        devices_per_node=layout.devices_per_node,
        hosts=tuple(hosts),
        hostsfile=request.hostsfile,
        master_port=request.master_port,
        activate_dir=request.activate_dir,
        environment=_rank_environment(request, layout),
        warnings=tuple(warnings),
        run_id=_run_id(request, flags),
        max_restarts=request.max_restarts,
        min_nodes=request.min_nodes or request.nodes,
        rendezvous=request.rendezvous,
        fine_tuning=chats,
    )


def _parsed(flags: Sequence[str]) -> Config | None:
    """Return the config of the flags without validating it; None if they do not make one."""
    try:
        return parse_arguments(flags)[0]
    except ConfigError:
        return None


def _layout(request: Request, config: Config | None, given: argparse.Namespace) -> Layout:
    if config is not None:
        tensor: int | None = config.parallel.tensor_model_parallel_size
        pipeline: int | None = config.parallel.pipeline_model_parallel_size
    else:
        tensor, pipeline = _size(given.tensor_model_parallel_size), _size(given.pipeline_model_parallel_size)
    is_known = request.layout_known and None not in (tensor, pipeline)
    tensor, pipeline = tensor or 1, pipeline or 1
    device = _resolve_device(request, config)
    devices_per_node = request.devices_per_node or _default_devices(request, device, tensor * pipeline)
    if not is_known:
        world_size = tensor * pipeline
    elif request.data_parallel_size is not None:
        world_size = tensor * pipeline * request.data_parallel_size
    else:
        world_size = request.nodes * devices_per_node
    return Layout(device, devices_per_node, tensor, pipeline, is_known, world_size)


def _size(text: str | None) -> int | None:
    """Return a parallel size as given, 1 by default; None for a faulty one, which the config reports."""
    if text is None:
        return 1
    return int(text) if text.isdecimal() and int(text) > 0 else None


def _resolve_device(request: Request, config: Config | None) -> str:
    """Return hpu, cuda or cpu; `auto` if other machines must detect theirs themselves."""
    requested = request.device
    if requested == "auto" and config is not None:
        requested = config.parallel.device
    if requested in ("hpu", "cuda", "cpu"):
        return requested
    if request.nodes > 1 and request.rendezvous is None:
        return "auto"
    return detect_device(allow_hpu=requested != "no-hpu")


def _default_devices(request: Request, device: str, model_ranks: int) -> int:
    """Return the devices of a node where none are given: a CPU runs as many ranks as the layout has."""
    if device == "cpu" and request.nodes == 1 and request.hostsfile is None:
        return model_ranks * (request.data_parallel_size or 1)
    return DEVICES_PER_NODE


def _check_results_folder(request: Request, config: Config) -> Iterator[str]:
    if request.rendezvous is not None and request.results_parent and config.logging.results_dir is None:
        yield (
            f"rendezvous={request.rendezvous}: each node, and each attempt, would name the results folder after its "
            "own clock; set HL_RESULTS_DIR (--results-dir) to one folder for all"
        )


def _check_config(request: Request, config: Config, layout: Layout) -> Iterator[str]:
    """Yield the faults of what the options name."""
    if layout.is_known:
        yield from checks.check_restarts(request, config, layout.devices_per_node)
    yield from checks.check_deepspeed(config, layout.world_size)
    yield from checks.check_outputs(config)
    yield from checks.check_load(config)


def _check_machines(
    request: Request, flags: Sequence[str], layout: Layout, config: Config | None, *, is_remote: bool
) -> Iterator[str]:
    if is_remote and not request.dry_run:
        yield from checks.check_remote(flags, request)
    elif (request.nodes == 1 or request.rendezvous) and not is_remote and not request.dry_run:
        yield from checks.check_local_devices(layout.device, layout.devices_per_node)
        if config is not None and layout.is_known:
            yield from checks.check_descriptors(config, layout.device, layout.world_size)
    if request.activate_dir and not Path(request.activate_dir, "activate").is_file():
        yield f"HL_QNPU_DIR={request.activate_dir} holds no file `activate`; set it to a folder that does"


def _run_id(request: Request, flags: Sequence[str]) -> str:
    if request.rendezvous is not None:  # each node computes it, from what is equal on all
        return hashlib.sha256("\0".join(flags).encode()).hexdigest()[:16]
    return f"{socket.gethostname()}.{os.getpid()}.{time.time_ns()}"


def _rank_environment(request: Request, layout: Layout) -> dict[str, str]:
    environment = {name: os.environ[name] for name in INTERFACES if os.environ.get(name)} | request.environment
    if layout.device != "auto":
        environment["DS_ACCELERATOR"] = layout.device
    if layout.device == "cpu":
        environment["OMP_NUM_THREADS"] = threads_per_rank(layout.devices_per_node)
    return environment


def _output_flags(request: Request, config: Config, data_parallel_size: int) -> list[str]:
    """Return flags for results and checkpoint folders that are not given: the results folder is named after the run."""
    flags = []
    results = config.logging.results_dir
    if results is None and request.results_parent is not None:
        results = str(Path(request.results_parent, _run_folder(config, data_parallel_size)))
        flags += ["--results-dir", results]
    checkpoints = request.checkpoints_dir or (str(Path(results, "checkpoints")) if results is not None else None)
    if checkpoints is not None:
        if request.save and config.checkpoint.save is None:
            flags += ["--save", checkpoints]
        if request.resume and config.checkpoint.load is None:
            flags += ["--load", checkpoints]
    if request.fine_tuning is not None:
        flags += ["--data-path", str(Path(request.fine_tuning.folder or Path(results or ".", "data"), "data"))]
        checkpoint = config.checkpoint
        if request.save or checkpoint.save is not None:
            # the exports are what is wanted, checkpoints serve a restart
            flags += [] if checkpoint.save_hf else ["--save-hf", str(Path(results or ".", "hf_format"))]
            flags += [] if checkpoint.keep_last else ["--keep-last", "1"]
            flags += ["--save-at-epoch"]
    return flags


def _run_folder(config: Config, data_parallel_size: int) -> str:
    """Return ds_z0_nl40_hs5120_gb1024_mb1_D2_T4_P1_devices8_20260131_235959, as Habana's scripts name it."""
    t, p = config.parallel.tensor_model_parallel_size, config.parallel.pipeline_model_parallel_size
    training = config.training
    return (
        f"ds_z{config.optimizer.zero_stage}_nl{config.model.num_layers}_hs{config.model.hidden_size}"
        f"_gb{training.global_batch_size}_mb{training.micro_batch_size}_D{data_parallel_size}_T{t}_P{p}"
        f"_devices{data_parallel_size * t * p}_{time.strftime('%Y%m%d_%H%M%S')}"
    )
