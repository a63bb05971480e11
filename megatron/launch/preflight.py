"""What can be known of a run before it starts: its hosts, devices, layout, files. Without torch or deepspeed."""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import ipaddress
import os
import re
import shutil
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megatron.accelerator import count_devices, detect_device
from megatron.config.command_line import build_parser, load_config, parse_arguments
from megatron.config.options import Config, ConfigError
from megatron.config.validation import check
from megatron.launch.hl_requests import FineTuning, Request
from megatron.training.deepspeed_config import deepspeed_config

DEVICES_PER_NODE = 8  # of a Gaudi or DGX server, and Habana's default
# addresses that no machine has: RFC 5737
EXAMPLE_NETWORK = ipaddress.ip_network("192.0.2.0/24")
LOOPBACK = ("localhost", "127.0.0.1", "::1")
# Which network interface the nodes talk through: passed on from our environment, as it has one name on every node.
INTERFACES = ("GLOO_SOCKET_IFNAME", "HCCL_SOCKET_IFNAME")


# ---------------------------------------------------------------------------------------------------------------------
# Hostsfile


@dataclass(frozen=True)
class Host:
    name: str
    slots: int
    line: int

    @property
    def address(self) -> str:
        """Without the user that ssh is to log in as."""
        return self.name.rsplit("@", 1)[-1]


def parse_hostsfile(text: str, source: str) -> tuple[list[Host], list[str]]:
    """The hosts in order, and every fault with its line number.

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
            faults.append(f"{where} starts with no host name; write `<host> slots=<n>`")
        elif slots is None or rest:
            faults.append(f"{where} is not `<host> slots=<n>`; write for example `{name} slots={DEVICES_PER_NODE}`")
        elif not slots.isdecimal() or int(slots) == 0:
            faults.append(f"{where}: slots must be a whole number above 0, the number of devices of the host")
        elif (first := next((host for host in hosts if host.name == name), None)) is not None:
            faults.append(f"{where} repeats the host of line {first.line}; give each host one line")
        else:
            hosts.append(Host(name, int(slots), number))
    return hosts, faults


def _check_hosts(request: Request, devices_per_node: int) -> tuple[list[Host], Findings]:
    """The hosts of the run, and what is wrong with them; no hosts where this machine alone is meant."""
    nodes, hostsfile = request.nodes, request.hostsfile
    found = Findings()
    if hostsfile is None:
        if nodes > 1 and request.rendezvous is None:
            found.faults.append(
                f"{nodes} nodes need a hostsfile (HL_HOSTSFILE, --hostsfile) that lists them; give one, or start this "
                "on each node with HL_RENDEZVOUS (--rendezvous), as scripts/slurm.sbatch does"
            )
        return [], found
    if request.rendezvous is not None:
        found.faults.append(
            f"hostsfile {hostsfile} and rendezvous {request.rendezvous} exclude each other: this launcher starts all "
            "hosts, or it is started on each of them; give one"
        )
    try:
        text = Path(hostsfile).read_text(encoding="utf-8")
    except FileNotFoundError:
        return [], Findings([f"hostsfile {hostsfile} does not exist; write one line `<host> slots=<n>` for each node"])
    except (OSError, UnicodeDecodeError) as error:
        return [], Findings([f"hostsfile {hostsfile} cannot be read ({error}); make it a readable text file"])
    hosts, wrong = parse_hostsfile(text, hostsfile)
    found.faults += wrong
    if len(hosts) < nodes and not wrong:
        found.faults.append(
            f"{hostsfile} lists {len(hosts)} hosts for {nodes} nodes; add hosts, or set HL_NUM_NODES (--nodes) lower"
        )
    hosts = hosts[:nodes]
    for host in hosts:
        where = f"{hostsfile}, line {host.line}: {host.name}"
        if host.slots < devices_per_node:
            found.faults.append(
                f"{where} has slots={host.slots}, fewer than the {devices_per_node} devices of each node; correct it, "
                "take another host, or set HL_NGPU_PER_NODE (--devices-per-node) lower"
            )
        if nodes > 1 and host.address in LOOPBACK:
            found.faults.append(f"{where} means another machine on every node; give the address that all nodes know")
    examples = [host for host in hosts if _is_example(host.address)]
    if examples:
        some = ", ".join(host.name for host in examples[:2]) + (" ..." if len(examples) > 2 else "")
        text = f"{hostsfile}, line {examples[0].line}: {some} are example addresses; put in those of your machines"
        (found.warnings if request.dry_run else found.faults).append(text)
    if len(hosts) == 1 and (hosts[0].address in LOOPBACK or hosts[0].name == socket.gethostname()):
        return [], found
    return hosts, found


def _is_example(name: str) -> bool:
    try:
        return ipaddress.ip_address(name) in EXAMPLE_NETWORK
    except ValueError:
        return False


# ---------------------------------------------------------------------------------------------------------------------
# Preflight


@dataclass
class Findings:
    """What stands against a run, and what only deserves a word."""

    faults: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def add(self, other: Findings) -> None:
        self.faults += other.faults
        self.warnings += other.warnings


@dataclass(frozen=True)
class Plan:
    """A run that may start."""

    config: Config
    train_flags: tuple[str, ...]
    nodes: int
    devices_per_node: int
    hosts: tuple[Host, ...]
    """Empty: this machine."""
    hostsfile: str | None
    master_port: int | None
    activate_dir: str | None
    environment: Mapping[str, str]
    """For the ranks, on whatever machine."""
    warnings: tuple[str, ...]
    run_id: str
    """In the command line of each rank on another machine, by which it is found there; equal on all nodes."""
    max_restarts: int = 0
    min_nodes: int = 1
    """As many nodes may be left."""
    rendezvous: str | None = None
    """HOST:PORT where the nodes meet that each run this very launcher."""
    fine_tuning: FineTuning | None = None
    """Chats to process before the ranks start, and the folder for it."""

    @property
    def is_supervised(self) -> bool:
        """Whether each node has an agent that starts its ranks, and starts them again."""
        return self.max_restarts > 0 or self.rendezvous is not None


class RefusedError(ValueError):
    """The run may not start. Carries every fault."""

    def __init__(self, faults: Sequence[str], warnings: Sequence[str] = ()):
        self.faults, self.warnings = list(faults), list(warnings)
        super().__init__("\n".join(self.faults))


def _model_parallel_sizes(request: Request, config: Config | None, asked: argparse.Namespace) -> tuple[int, int, bool]:
    """Tensor and pipeline size, and whether they are those of the run: 1 where a flag is no number."""
    if config is not None:
        parallel = config.parallel
        return parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size, request.layout_known
    t, p = _size(asked.tensor_model_parallel_size), _size(asked.pipeline_model_parallel_size)
    return t or 1, p or 1, request.layout_known and None not in (t, p)


def preflight(request: Request) -> Plan:
    """Judge a request. Starts and writes nothing. Raises RefusedError with every fault found."""
    found = Findings(list(request.faults))
    flags = list(request.train_flags)
    config = _parsed(flags)
    asked = build_parser().parse_known_args(flags)[0]
    t, p, sizes_known = _model_parallel_sizes(request, config, asked)
    device = _resolve_device(request, config)
    devices_per_node = request.devices_per_node or _default_devices(request, device, t * p)
    world_size = request.nodes * devices_per_node
    if not sizes_known:
        world_size = t * p  # what can be judged without the layout is judged
    elif request.data_parallel_size is not None:
        found.faults += _check_product(request, t, p, devices_per_node)
        world_size = t * p * request.data_parallel_size

    chats = request.fine_tuning
    lacks_data = chats is None and not (
        config.data.paths[0][1] if config is not None else asked.data_path or asked.train_data_path
    )
    if lacks_data and request.dry_run:
        flags += ["--data-path", "DATASET"]
        found.warnings.append("no dataset is given; the run itself will need --data-path")
    if config is not None:
        if request.rendezvous is not None and request.results_parent and config.logging.results_dir is None:
            found.faults.append(
                f"rendezvous={request.rendezvous}: each node, and each try, would name the results folder after its "
                "own clock; set HL_RESULTS_DIR (--results-dir) to one folder for all"
            )
        flags += _output_flags(request, config, world_size // (t * p))
    try:
        config = load_config(flags, world_size)
    except ConfigError as error:
        found.faults += error.faults
        config = _parsed(flags)
    if config is not None and sizes_known:
        found.faults += _check_supervision(request, config, devices_per_node)
    if config is not None:
        # chats are processed first
        if not lacks_data and (chats is None or (chats.chats is None and chats.folder is not None)):
            found.add(_check_data_files(config, request.dry_run))
        found.faults += [*_check_deepspeed(config, world_size), *_check_outputs(config), *_check_load(config)]

    hosts, of_hosts = _check_hosts(request, devices_per_node if sizes_known else 1)
    found.add(of_hosts)
    if hosts and not request.dry_run:
        found.faults += _check_remote(flags, request)
    elif not hosts and (request.nodes == 1 or request.rendezvous) and not request.dry_run:
        found.faults += _check_local_devices(device, devices_per_node)
    if request.activate_dir and not Path(request.activate_dir, "activate").is_file():
        found.faults.append(
            f"HL_QNPU_DIR={request.activate_dir} holds no file `activate`; set it to a folder that does"
        )
    if found.faults or config is None:
        raise RefusedError(found.faults, found.warnings)

    flags += ["--device", device] if config.parallel.device != device else []
    config = load_config(flags, world_size)
    if chats is not None:
        chats = dataclasses.replace(chats, folder=str(Path(config.data.data_path[0]).parent))
    return Plan(
        config=config,
        train_flags=tuple(flags),
        nodes=request.nodes,
        devices_per_node=devices_per_node,
        hosts=tuple(hosts),
        hostsfile=request.hostsfile,
        master_port=request.master_port,
        activate_dir=request.activate_dir,
        environment=_rank_environment(request, device, devices_per_node),
        warnings=tuple(found.warnings),
        run_id=_run_id(request, flags),
        max_restarts=request.max_restarts,
        min_nodes=request.min_nodes or request.nodes,
        rendezvous=request.rendezvous,
        fine_tuning=chats,
    )


def _run_id(request: Request, flags: Sequence[str]) -> str:
    if request.rendezvous is not None:  # each node makes it, of what is equal on all
        return hashlib.sha256("\0".join(flags).encode()).hexdigest()[:16]
    return f"{socket.gethostname()}.{os.getpid()}.{time.time_ns()}"


def _check_supervision(request: Request, config: Config, devices_per_node: int) -> Iterator[str]:
    """Whether the run could be restarted, and go on with every number of nodes that it may be left with."""
    fewest = request.min_nodes or request.nodes
    if request.max_restarts and config.checkpoint.save is None:
        yield (
            f"max_restarts={request.max_restarts}: a restart goes on from the newest checkpoint, but none are saved; "
            "give --save (HL_SAVE=1), or no HL_MAX_RESTARTS (--max-restarts)"
        )
    if fewest > request.nodes:
        yield f"min_nodes={fewest} is more than the {request.nodes} nodes of the run; set HL_MIN_NODES lower"
    if fewest < request.nodes and not request.max_restarts:
        yield f"min_nodes={fewest}: going on with fewer nodes is a restart; set HL_MAX_RESTARTS (--max-restarts) too"
    if request.rendezvous is not None:
        host, colon, port = request.rendezvous.rpartition(":")
        if not (host and colon and port.isdecimal() and 0 < int(port) < 2**16):
            yield f"rendezvous={request.rendezvous} is not HOST:PORT; give the first node's, such as node0:29500"
    known = set(check(config, request.nodes * devices_per_node))
    for nodes in range(request.nodes - 1, fewest - 1, -1):
        world_size = nodes * devices_per_node
        for fault in [*check(config, world_size), *_check_deepspeed(config, world_size)]:
            if fault not in known:
                known.add(fault)
                yield (
                    f"with {nodes} of {request.nodes} nodes the run could not go on: {fault}; or set HL_MIN_NODES "
                    f"(--min-nodes) to {nodes + 1} or more"
                )


def _parsed(flags: Sequence[str]) -> Config | None:
    """The config of the flags, unchecked; None where they make none."""
    try:
        return parse_arguments(flags)[0]
    except ConfigError:
        return None


def _size(text: str | None) -> int | None:
    """A parallel size as it was written, 1 where it was not; None where it is no size, which the config reports."""
    if text is None:
        return 1
    return int(text) if text.isdecimal() and int(text) > 0 else None


def _resolve_device(request: Request, config: Config | None) -> str:
    """hpu, cuda or cpu; `auto` where other machines must find out for themselves."""
    asked = request.device
    if asked == "auto" and config is not None:
        asked = config.parallel.device
    if asked in ("hpu", "cuda", "cpu"):
        return asked
    if request.nodes > 1 and request.rendezvous is None:
        return "auto"
    return detect_device(allow_hpu=asked != "no-hpu")


def _default_devices(request: Request, device: str, model_ranks: int) -> int:
    """Devices of a node where none are given: a CPU runs as many ranks as the layout has."""
    if device == "cpu" and request.nodes == 1 and request.hostsfile is None:
        return model_ranks * (request.data_parallel_size or 1)
    return DEVICES_PER_NODE


def _rank_environment(request: Request, device: str, devices_per_node: int) -> dict[str, str]:
    environment = {name: os.environ[name] for name in INTERFACES if os.environ.get(name)} | request.environment
    if device != "auto":
        environment["DS_ACCELERATOR"] = device
    if device == "cpu":
        # torch takes every core for each rank, and they would fight over them
        threads = str(max(1, (os.cpu_count() or 1) // devices_per_node))
        environment["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", threads)
    return environment


def _check_product(request: Request, t: int, p: int, devices_per_node: int) -> Iterator[str]:
    dp, devices = request.data_parallel_size or 1, request.nodes * devices_per_node
    if dp * t * p == devices:
        return
    remedy = f"use a data-parallel size of {devices // (t * p)}" if devices % (t * p) == 0 else "change the layout"
    if dp * t * p % request.nodes == 0:
        remedy += f", or {dp * t * p // request.nodes} devices a node (HL_NGPU_PER_NODE, --devices-per-node)"
    yield (
        f"data-parallel {dp} x tensor-parallel {t} x pipeline-parallel {p} = {dp * t * p} ranks, but "
        f"nodes x devices = {request.nodes} x {devices_per_node} = {devices}; {remedy}"
    )


def _output_flags(request: Request, config: Config, data_parallel_size: int) -> list[str]:
    """Results and checkpoint folders, where the flags have none: the results folder is named after the run."""
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
    """ds_z0_nl40_hs5120_gb1024_mb1_D2_T4_P1_devices8_20260131_2359, as Habana's scripts name it."""
    t, p = config.parallel.tensor_model_parallel_size, config.parallel.pipeline_model_parallel_size
    training = config.training
    return (
        f"ds_z{config.optimizer.zero_stage}_nl{config.model.num_layers}_hs{config.model.hidden_size}"
        f"_gb{training.global_batch_size}_mb{training.micro_batch_size}_D{data_parallel_size}_T{t}_P{p}"
        f"_devices{data_parallel_size * t * p}_{time.strftime('%Y%m%d_%H%M%S')}"
    )


def _check_data_files(config: Config, dry_run: bool) -> Findings:
    """Whether the dataset and the tokenizer's files are there; a dry run does without."""
    data = config.data
    try:
        prefixes = data.prefixes
    except ValueError:  # the rules of the config say so
        prefixes = []
    faults = []
    for prefix in prefixes:
        if prefix.endswith((".bin", ".idx")) and not Path(prefix + ".idx").exists():
            faults.append(f"data_path={prefix} is a file; give the prefix that .bin and .idx share, {prefix[:-4]}")
            continue
        files = [Path(prefix + ending) for ending in (".bin", ".idx")]
        missing = [str(path) for path in files if not path.is_file()]
        empty = [str(path) for path in files if path.is_file() and path.stat().st_size == 0]
        unreadable = [str(path) for path in files if path.is_file() and not os.access(path, os.R_OK)]
        if missing:
            faults.append(
                f"dataset {prefix} lacks {' and '.join(missing)}; make it with tools/preprocess_data.py, or correct "
                "HL_DATA_DIR_ROOT and HL_DATA_FILE_PREFIX (--data-path)"
            )
        if empty:
            faults.append(f"dataset {prefix}: {' and '.join(empty)} is empty; preprocess it anew")
        if unreadable:
            faults.append(f"dataset {prefix}: {' and '.join(unreadable)} may not be read; change its permissions")
    for option in ("vocab_file", "merge_file", "tokenizer_model"):
        path = getattr(data, option)
        if path is not None and not Path(path).exists():
            faults.append(f"{option}={path} does not exist; correct the path")
    return Findings(warnings=faults) if dry_run else Findings(faults)


def _check_deepspeed(config: Config, world_size: int) -> Sequence[str]:
    """What is wrong with the user's DeepSpeed JSON. It is judged once the config is right, which it must agree with."""
    if config.training.deepspeed_config is None or check(config, world_size):
        return []
    model_ranks = config.parallel.tensor_model_parallel_size * config.parallel.pipeline_model_parallel_size
    try:
        deepspeed_config(config, world_size // model_ranks)
    except ConfigError as error:
        return error.faults
    return []


def _check_outputs(config: Config) -> Iterator[str]:
    """Folders that the run will write to, judged without creating any."""
    folders = {
        "results_dir": config.logging.results_dir,
        "tensorboard_dir": config.logging.tensorboard_dir,
        "save": config.checkpoint.save,
        "save_hf": config.checkpoint.save_hf,
    }
    cache = config.data.data_cache_path
    if cache is not None and not Path(cache).is_dir():  # one that is there may hold all that is needed
        folders["data_cache_path"] = cache
    told: set[Path] = set()
    for option, folder in folders.items():
        if folder is None:
            continue
        there = Path(folder).absolute()
        while not os.path.lexists(there) and there != there.parent:
            there = there.parent
        if there in told:
            continue
        if not there.is_dir():
            told.add(there)
            yield f"{option}={folder} cannot be made: {there} is no folder; choose another, or remove it"
        elif not os.access(there, os.W_OK | os.X_OK):
            told.add(there)
            yield f"{option}={folder} cannot be written: no permission in {there}; choose another, or change it"


def _check_load(config: Config) -> Iterator[str]:
    """What can be told without reading: the run itself finds and checks the checkpoint."""
    load = config.checkpoint.load
    if load is None or not os.path.lexists(load):
        return
    folder = Path(load)
    if not folder.is_dir():
        yield f"load={load} is no folder; give the folder of a run's checkpoints"
        return
    # a run that was killed before its first checkpoint leaves its hidden lock
    shown = any(not path.name.startswith(".") for path in folder.iterdir())
    found = (pattern for pattern in ("latest*", "*/checkpoint.json", "config.json") if any(folder.glob(pattern)))
    if shown and not any(found):
        yield f"load={load} holds no checkpoint, yet is not empty; give another, or empty it"


def _check_local_devices(device: str, devices_per_node: int) -> Iterator[str]:
    if device not in ("hpu", "cuda"):
        return
    there = count_devices(device)
    if there < devices_per_node:
        yield (
            f"{devices_per_node} {device} devices are needed, but this machine shows {there}; set HL_NGPU_PER_NODE "
            f"(--devices-per-node) and the layout to {there} at most, or HL_DEVICE=cpu"
        )


def _check_remote(flags: Sequence[str], request: Request) -> Iterator[str]:
    """What DeepSpeed's launcher needs to reach other machines."""
    for program in ("pdsh", "ssh"):
        if shutil.which(program) is None:
            yield f"{program} is not installed; DeepSpeed's launcher reaches the hosts of {request.hostsfile} with it"
    for flag in flags:
        if "%" in flag or "\n" in flag:
            yield f"{flag!r} holds a % or a line end, which pdsh would change on its way to the hosts; write it without"
    for path in (Path.home() / ".deepspeed_env", Path(".deepspeed_env")):
        if not path.is_file():
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), start=1):
            if "=" not in line:
                yield f"{path}, line {number}: {line!r} is not NAME=VALUE, which DeepSpeed's launcher needs; remove it"
