"""Check a run, then start its ranks: on this machine, or on the hosts of a hostsfile through DeepSpeed's launcher.

    python tools/launch.py [--nodes N] [--devices-per-node M] [--hostsfile F] [--dry-run] -- FLAGS OF megatron.train
    scripts/run_bloom13b.sh, scripts/run_llama.sh: the same from HL_* variables

Everything that can be known beforehand is judged before anything starts or is written, without importing torch or
deepspeed: one message lists every fault, and the exit status is 2. Otherwise it is that of the first rank that failed.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib.util
import ipaddress
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.command_line import build_parser, load_config, parse_arguments, to_yaml
from megatron.config import Config, ConfigError
from megatron.estimate import describe
from megatron.rules import check
from megatron.training.deepspeed_config import deepspeed_config
from tools.hl_variables import VARIABLES, Request, from_environment, legend

REPOSITORY = Path(__file__).resolve().parent.parent
REFUSED_STATUS = 2
DEVICES_PER_NODE = 8  # of a Gaudi or DGX server, and Habana's default
MASTER_PORT = 29500  # where the nodes meet, unless --master-port says otherwise: torch's and DeepSpeed's default
# After one rank has failed the others wait in a collective for ever. Time to end by themselves, then after SIGTERM.
FAILED_GRACE_S = 3.0
TERMINATED_GRACE_S = 10.0
# Of another host, once its ranks have been killed: a host that is gone answers nobody.
UNREACHABLE_GRACE_S = 30.0
# How often a signal is tried again on hosts whose ranks have not been started yet.
RETRY_S = 1.0
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
        if nodes > 1:
            found.faults.append(f"{nodes} nodes need a hostsfile (HL_HOSTSFILE, --hostsfile) that lists them; give one")
        return [], found
    try:
        text = Path(hostsfile).read_text(encoding="utf-8")
    except FileNotFoundError:
        return [], Findings([f"hostsfile {hostsfile} does not exist; write one line `<host> slots=<n>` for each node"])
    except (OSError, UnicodeDecodeError) as error:
        return [], Findings([f"hostsfile {hostsfile} cannot be read ({error}); make it a readable text file"])
    hosts, found.faults = parse_hostsfile(text, hostsfile)
    if len(hosts) < nodes and not found.faults:
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
# Devices


def detect_device(*, allow_hpu: bool = True) -> str:
    """The first of hpu, cuda and cpu that is there, judged by device files and installed packages."""
    if allow_hpu and count_devices("hpu") and importlib.util.find_spec("habana_frameworks") is not None:
        return "hpu"
    return "cuda" if count_devices("cuda") and _torch_has_cuda() else "cpu"


def count_devices(device: str) -> int:
    """Accelerators of a kind that this machine shows to us."""
    visible = {"cuda": "CUDA_VISIBLE_DEVICES", "hpu": "HABANA_VISIBLE_MODULES"}[device]
    if visible in os.environ:
        return len([name for name in os.environ[visible].split(",") if name.strip() not in ("", "-1", "NoDevFiles")])
    if device == "cuda":
        nvidia = [path for path in Path("/dev").glob("nvidia[0-9]*") if path.name[6:].isdecimal()]
        return len(nvidia) or len(list(Path("/sys/class/kfd/kfd/topology/nodes").glob("*/gpu_id")))
    accelerators = [path for path in Path("/dev/accel").glob("accel[0-9]*") if path.name[5:].isdecimal()]
    return len(accelerators) or len([path for path in Path("/dev").glob("hl[0-9]*") if path.name[2:].isdecimal()])


def _torch_has_cuda() -> bool:
    spec = importlib.util.find_spec("torch")  # finds, does not import
    if spec is None or spec.origin is None:
        return False
    libraries = Path(spec.origin).parent / "lib"
    return any((libraries / name).exists() for name in ("libtorch_cuda.so", "libtorch_hip.so"))


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
    """In the command line of each rank on another machine, by which it is found there."""


class RefusedError(ValueError):
    """The run may not start. Carries every fault."""

    def __init__(self, faults: Sequence[str], warnings: Sequence[str] = ()):
        self.faults, self.warnings = list(faults), list(warnings)
        super().__init__("\n".join(self.faults))


def preflight(request: Request) -> Plan:
    """Judge a request. Starts and writes nothing. Raises RefusedError with every fault found."""
    found = Findings(list(request.faults))
    flags = list(request.train_flags)
    config = _parsed(flags)
    asked = build_parser().parse_known_args(flags)[0]
    if config is not None:
        t, p = config.parallel.tensor_model_parallel_size, config.parallel.pipeline_model_parallel_size
        sizes_known = request.layout_known
    else:
        sizes = _size(asked.tensor_model_parallel_size), _size(asked.pipeline_model_parallel_size)
        t, p = sizes[0] or 1, sizes[1] or 1
        sizes_known = request.layout_known and None not in sizes
    device = _resolve_device(request, config)
    devices_per_node = request.devices_per_node or _default_devices(request, device, t * p)
    world_size = request.nodes * devices_per_node
    if not sizes_known:
        world_size = t * p  # what can be judged without the layout is judged
    elif request.data_parallel_size is not None:
        found.faults += _check_product(request, t, p, devices_per_node)
        world_size = t * p * request.data_parallel_size

    lacks_data = not (config.data.data_path if config is not None else asked.data_path)
    if lacks_data and request.dry_run:
        flags += ["--data-path", "DATASET"]
        found.warnings.append("no dataset is given; the run itself will need --data-path")
    if config is not None:
        flags += _output_flags(request, config, world_size // (t * p))
    try:
        config = load_config(flags, world_size)
    except ConfigError as error:
        found.faults += error.faults
        config = _parsed(flags)
    if config is not None:
        if not lacks_data:
            found.add(_check_data_files(config, request.dry_run))
        found.faults += [*_check_deepspeed(config, world_size), *_check_outputs(config), *_check_load(config)]

    hosts, of_hosts = _check_hosts(request, devices_per_node if sizes_known else 1)
    found.add(of_hosts)
    if hosts and not request.dry_run:
        found.faults += _check_remote(flags, request)
    elif not hosts and request.nodes == 1 and not request.dry_run:
        found.faults += _check_local_devices(device, devices_per_node)
    if request.activate_dir and not Path(request.activate_dir, "activate").is_file():
        found.faults.append(
            f"HL_QNPU_DIR={request.activate_dir} holds no file `activate`; set it to a folder that does"
        )
    if found.faults or config is None:
        raise RefusedError(found.faults, found.warnings)

    flags += ["--device", device] if config.parallel.device != device else []
    return Plan(
        config=load_config(flags, world_size),
        train_flags=tuple(flags),
        nodes=request.nodes,
        devices_per_node=devices_per_node,
        hosts=tuple(hosts),
        hostsfile=request.hostsfile,
        master_port=request.master_port,
        activate_dir=request.activate_dir,
        environment=_rank_environment(request, device, devices_per_node),
        warnings=tuple(found.warnings),
        run_id=f"{socket.gethostname()}.{os.getpid()}.{time.time_ns()}",
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
    if request.nodes > 1:
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
    # a blend is WEIGHT PREFIX WEIGHT PREFIX ...
    prefixes = data.data_path if len(data.data_path) == 1 else data.data_path[1::2]
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
        deepspeed_config(config, world_size // model_ranks, config.training.global_batch_size)
    except ConfigError as error:
        return error.faults
    return []


def _check_outputs(config: Config) -> Iterator[str]:
    """Folders that the run will write to, judged without creating any."""
    folders = {
        "results_dir": config.logging.results_dir,
        "tensorboard_dir": config.logging.tensorboard_dir,
        "save": config.checkpoint.save,
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
    load = config.checkpoint.load
    if load is None or not os.path.lexists(load):
        return
    folder = Path(load)
    if not folder.is_dir():
        yield f"load={load} is no folder; give the folder of a run's checkpoints"
        return
    latest = folder / "latest"
    if not latest.is_file():
        if any(folder.iterdir()):
            yield f"load={load} holds no checkpoint (no file `latest`), yet is not empty; give another, or empty it"
        return
    tag = latest.read_text(encoding="utf-8", errors="replace").strip()
    if not tag or not (folder / tag).is_dir():
        yield f"{latest} names {tag!r}, which is not there; write the name of a checkpoint that is into it"


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


# ---------------------------------------------------------------------------------------------------------------------
# Launch


def train_command(plan: Plan) -> list[str]:
    """What each rank runs."""
    command = [sys.executable, "-u", "-m", "megatron.train", *plan.train_flags]
    if not plan.hosts:
        return command  # on this machine the script has sourced `activate` already
    command[1:1] = ["-X", f"run={plan.run_id}"]
    if plan.activate_dir is None:
        return command
    return ["/bin/bash", "-c", 'source "$0/activate" && exec "$@"', plan.activate_dir, *command]


def remote_command(plan: Plan) -> list[str]:
    """DeepSpeed's launcher over the hosts of the plan."""
    variables = [f"{name}={value}" for name, value in sorted(plan.environment.items())]
    # the environment reaches other machines only in the command, or by the user's own .deepspeed_env
    of_rank = ["/usr/bin/env", *variables, *train_command(plan)]
    return [
        *(sys.executable, "-m", "deepspeed.launcher.runner"),
        *("--hostfile", plan.hostsfile or ""),
        *("--num_nodes", str(plan.nodes), "--num_gpus", str(plan.devices_per_node)),
        *("--master_addr", plan.hosts[0].address, "--master_port", str(plan.master_port or MASTER_PORT)),
        *([] if len(plan.hosts) > 1 else ["--force_multi"]),  # or it would run here instead of on the one host
        *("--no_local_rank", "--no_python"),
        *[for_pdsh(word) for word in of_rank],
    ]


def for_pdsh(word: str) -> str:
    """`word` so that it is one word, unchanged, in the shell of the remote machine.

    DeepSpeed puts double quotes around words that hold a blank, escaping the double quotes inside, and leaves the
    others as they are.
    """
    if " " not in word:
        return shlex.quote(word)
    return re.sub(r"([\\\\$`])", r"\\\1", word)


def launch(plan: Plan) -> int:
    """Run the plan; returns the exit status of the first process that failed, 0 if none did."""
    environment = dict(os.environ) | dict(plan.environment)
    environment["PYTHONPATH"] = os.pathsep.join([str(REPOSITORY), *filter(None, [environment.get("PYTHONPATH")])])
    if plan.hosts:
        return run_on_hosts(remote_command(plan), environment, plan)
    master = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(plan.master_port or _free_port())}
    size = str(plan.devices_per_node)
    ranks = [
        environment | master | {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
        for rank in map(str, range(plan.devices_per_node))
    ]
    return run_processes(train_command(plan), ranks)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def rank_pattern(plan: Plan) -> str:
    """What pkill -f knows the ranks of this run by: neither the launchers, whose command lines end so, nor other runs.

    Needs no quotes in a shell.
    """
    return "^" + re.sub(r"[^\w/=]", ".", f"{sys.executable} -X run={plan.run_id} ")


def signal_ranks(plan: Plan, number: int) -> bool:
    """Send a signal to the ranks on all hosts; whether any host had some."""
    hosts = ",".join(host.name for host in plan.hosts)
    name = signal.Signals(number).name.removeprefix("SIG")
    command = ["pdsh", "-R", "ssh", "-w", hosts, "pkill", f"-{name}", "-e", "-f", rank_pattern(plan)]
    told = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    return bool(told.stdout.strip())


class PdshOutput(threading.Thread):
    """Passes on what pdsh and the ranks write to stderr, and notes there which host failed first, and why."""

    def __init__(self, lines: IO[bytes]):
        super().__init__(daemon=True)
        self._lines = lines
        self.failed: tuple[str, int] | None = None
        """The host, and its status."""
        self.gloo_failed = False

    def run(self) -> None:
        for line in self._lines:
            sys.stderr.write(line.decode(errors="replace"))
            sys.stderr.flush()
            match = re.match(rb"pdsh@[^:]+: (\S+): ssh exited with exit code (\d+)", line)
            if match and self.failed is None:
                status = int(match[2])
                # DeepSpeed's launcher ends with -n for a rank that signal n killed; 255 is ssh's own failure
                self.failed = match[1].decode(), status if status < 192 or status == 255 else 128 + 256 - status
            self.gloo_failed |= b"Gloo connectFullMesh failed" in line


def run_on_hosts(command: Sequence[str], environment: Mapping[str, str], plan: Plan) -> int:
    """Run DeepSpeed's launcher until the ranks on all hosts have ended. Returns the status of the first that failed.

    Signals go to the ranks past that launcher, which would end every DeepSpeed run on the hosts, allow 30 s for a
    checkpoint, and return before the ranks have ended. Where one host fails, it waits for the others, whose ranks wait
    for that one.
    """
    with _noted_signals() as received:
        runner = subprocess.Popen(
            command, env=environment, stderr=subprocess.PIPE, start_new_session=True, preexec_fn=_end_with_parent()
        )
        assert runner.stderr is not None
        output = PdshOutput(runner.stderr)
        output.start()
        try:
            _wait_for_hosts(runner, output, plan, received)
            output.join(timeout=FAILED_GRACE_S)
        finally:
            if runner.poll() is None:
                signal_ranks(plan, signal.SIGKILL)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(runner.pid, signal.SIGKILL)  # pdsh and ssh
            runner.wait()
    if output.gloo_failed:
        print(
            "gloo could not connect the hosts: each of them takes the address that its own name resolves to, which the "
            "others must reach. Set GLOO_SOCKET_IFNAME to the network interface between them, e.g. eth0",
            file=sys.stderr,
        )
    if output.failed is not None:
        return output.failed[1]
    return runner.returncode if runner.returncode >= 0 else 128 - runner.returncode


def _wait_for_hosts(runner: subprocess.Popen[bytes], output: PdshOutput, plan: Plan, received: deque[int]) -> None:
    failed_s: float | None = None
    steps = deque(
        [
            (FAILED_GRACE_S, signal.SIGTERM),
            (FAILED_GRACE_S + TERMINATED_GRACE_S, signal.SIGKILL),
            (FAILED_GRACE_S + TERMINATED_GRACE_S + UNREACHABLE_GRACE_S, None),
        ]
    )
    tried_s = -RETRY_S
    while runner.poll() is None:
        time.sleep(0.05)
        # a signal may come before the ranks: it waits for them
        if received and time.monotonic() - tried_s > RETRY_S:
            if signal_ranks(plan, received[0]):
                received.popleft()
            tried_s = time.monotonic()
        if output.failed is None:
            continue
        if failed_s is None:
            failed_s = time.monotonic()
        if steps and time.monotonic() - failed_s > steps[0][0]:
            number = steps.popleft()[1]
            if number is None:
                print("some hosts do not answer; ranks may still run there", file=sys.stderr)
                return
            if number == signal.SIGTERM:
                host, status = output.failed
                print(f"host {host} ended with status {status}; ending the ranks that still run", file=sys.stderr)
            signal_ranks(plan, number)


@contextlib.contextmanager
def _noted_signals() -> Iterator[deque[int]]:
    """Collects the signals that ask a run to stop, except what is ignored already (nohup, a job in the background)."""
    received: deque[int] = deque()

    def note(number: int, frame: FrameType | None) -> None:
        # a rank saves at SIGTERM and SIGINT only; a terminal that is closed asks for no less
        received.append(signal.SIGTERM if number == signal.SIGHUP else number)

    wanted = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP]
    previous = {
        number: signal.signal(number, note) for number in wanted if signal.getsignal(number) is not signal.SIG_IGN
    }
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def run_processes(command: Sequence[str], environments: Sequence[Mapping[str, str]]) -> int:
    """Run `command` once in each environment, until all have ended. Returns the first status that is not 0.

    Signals are passed on to every process, and how long they take to heed them is theirs. When one fails by itself, the
    others, which may wait for it for ever, are ended. No process outlives this one, nor do their children.
    """
    with _noted_signals() as received:
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for environment in environments:
                # a session of its own: a Ctrl-C reaches it once, through us
                processes.append(
                    subprocess.Popen(command, env=environment, start_new_session=True, preexec_fn=_end_with_parent())
                )
            return _wait(processes, received)
        finally:
            for process in processes:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)  # its children too
                process.wait()


def _wait(processes: Sequence[subprocess.Popen[bytes]], received: deque[int]) -> int:
    failed: int | None = None
    failed_s = 0.0
    terminated = False
    while any(process.poll() is None for process in processes):
        time.sleep(0.05)
        running = [process for process in processes if process.poll() is None]
        while received:
            number = received.popleft()
            for process in running:
                process.send_signal(number)
        if failed is None:
            failed = next((place for place, process in enumerate(processes) if process.returncode), None)
            failed_s = time.monotonic()
        elif not terminated and time.monotonic() - failed_s > FAILED_GRACE_S:
            terminated = True
            status = _status(processes[failed].returncode)
            print(f"rank {failed} ended with {status}; ending those that still run", file=sys.stderr)
            for process in running:
                process.terminate()
        elif terminated and time.monotonic() - failed_s > FAILED_GRACE_S + TERMINATED_GRACE_S:
            for process in running:
                process.kill()
    statuses = [process.returncode for process in processes]
    first = statuses[failed] if failed is not None else next((status for status in statuses if status), 0)
    return first if first >= 0 else 128 - first


def _status(returncode: int) -> str:
    return f"status {returncode}" if returncode >= 0 else signal.Signals(-returncode).name


def _end_with_parent() -> Callable[[], None] | None:
    """What a new process does so that it dies when we are killed. Linux only."""
    if not sys.platform.startswith("linux"):
        return None
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    set_parent_death_signal = 1
    return lambda: prctl(set_parent_death_signal, signal.SIGKILL)


# ---------------------------------------------------------------------------------------------------------------------
# Command line


def plan_text(plan: Plan, title: str) -> str:
    """What a dry run shows: layout, sizes, memory and the command."""
    config = plan.config
    text = describe(config, nodes=plan.nodes, devices_per_node=plan.devices_per_node, title=title)
    text += "\n" + (_wrapped(", ".join(host.name for host in plan.hosts), "  hosts: ") if plan.hosts else "")
    text += f"  results: {config.logging.results_dir}\n" if config.logging.results_dir else ""
    text += "" if config.checkpoint.save else "  checkpoints: none are saved\n"
    text += "".join(_wrapped(warning, "  warning: ") for warning in plan.warnings)
    return text + "\n" + command_text(plan) + "\n"


def _wrapped(text: str, label: str) -> str:
    width = min(shutil.get_terminal_size((80, 24)).columns, 100)
    return (
        textwrap.fill(label + text, width, subsequent_indent=" " * 4, break_long_words=False, break_on_hyphens=False)
        + "\n"
    )


def command_text(plan: Plan) -> str:
    """The command, a flag a line, ready to paste."""
    words = remote_command(plan) if plan.hosts else train_command(plan)
    lines: list[str] = []
    if not plan.hosts:
        lines.append(f"# {plan.devices_per_node} ranks here, each with its RANK, LOCAL_RANK, WORLD_SIZE and MASTER_*")
    line = " ".join(f"{name}={shlex.quote(value)}" for name, value in sorted(plan.environment.items()))
    for word in words:
        if word.startswith("--") and line:
            lines.append(line + " \\")
            line = " "
        line += (" " if line else "") + shlex.quote(word)
    return "\n".join([*lines, line])


def parse_command_line(arguments: Sequence[str]) -> tuple[Request, bool]:
    """The request, and whether it came from HL_* variables."""
    own, train_flags = list(arguments), []
    if "--" in own:
        place = own.index("--")
        own, train_flags = own[:place], own[place + 1 :]
    parser = argparse.ArgumentParser(
        prog="python tools/launch.py",
        description="Check a run of megatron.train, then start it on this machine or on the hosts of a hostsfile.",
        epilog="After --, the flags of megatron.train. See docs/launching.md.",
        allow_abbrev=False,
    )
    parser.add_argument("--variables", choices=("bloom13b", "llama"), help="read HL_* variables, as this script does")
    parser.add_argument("--nodes", type=_positive, default=1, help="nodes (default: 1)")
    parser.add_argument("--devices-per-node", type=_positive, help="default: 8; on the CPU, what the layout needs")
    parser.add_argument("--data-parallel-size", type=_positive, help="default: what the layout leaves of the devices")
    parser.add_argument("--hostsfile", help="one `<host> slots=<n>` a line")
    parser.add_argument("--device", choices=("auto", "hpu", "cuda", "cpu"), default="auto")
    parser.add_argument("--master-port", type=_positive, help="default: 29500 over several nodes, else a free one")
    parser.add_argument("--dry-run", action="store_true", help="print the plan and start nothing")
    options = parser.parse_args(own)
    if options.variables is not None:
        return from_environment(os.environ, options.variables, train_flags), True
    return Request(
        nodes=options.nodes,
        devices_per_node=options.devices_per_node,
        data_parallel_size=options.data_parallel_size,
        hostsfile=options.hostsfile,
        device=options.device,
        master_port=options.master_port,
        dry_run=options.dry_run,
        train_flags=train_flags,
    ), False


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} must be 1 or more")
    return number


def variables_text() -> str:
    return "".join(f"  {variable.name:<28}{variable.meaning}\n" for variable in VARIABLES)


def main(arguments: Sequence[str]) -> int:
    of_training = arguments[arguments.index("--") + 1 :] if "--" in arguments else []
    if "--help" in of_training or "-h" in of_training:
        if "--variables" in arguments:
            print(f"Variables (defaults: the script and its preset; docs/launching.md):\n{variables_text()}")
        build_parser().print_help()
        return 0
    request, by_variables = parse_command_line(arguments)
    print_config = "--print-config" in request.train_flags
    request.train_flags = [flag for flag in request.train_flags if flag != "--print-config"]
    try:
        plan = preflight(request)
    except RefusedError as refused:
        count = "1 fault" if len(refused.faults) == 1 else f"{len(refused.faults)} faults"
        lines = [f"refused, {count}; nothing was started or written:", *(f"  - {fault}" for fault in refused.faults)]
        lines += [f"  - warning: {warning}" for warning in refused.warnings]
        if by_variables and (names := legend(refused.faults)):
            lines.append(f"  ({names})")
        print("\n".join(lines), file=sys.stderr)
        return REFUSED_STATUS
    if print_config:
        sys.stdout.write(to_yaml(plan.config))
        return 0
    if request.dry_run:
        name = build_parser().parse_known_args(plan.train_flags)[0].config
        sys.stdout.write(plan_text(plan, f"Plan of {name or 'the run'}; nothing was started or written"))
        return 0
    for warning in plan.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    sys.stdout.flush()
    return launch(plan)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
