"""Cores that the ranks of a node are bound to, as mpirun's `--map-by ppr:N:socket:PE=K --bind-to core` binds them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.runtime.devices import VISIBLE, count_devices, query_devices

TOPOLOGY = Path("/sys/devices/system/cpu")
Sockets = Sequence[Sequence[frozenset[int]]]
"""Cores of each socket, each of which is the hardware threads that it has."""


class CoresError(ValueError):
    """The ranks cannot be bound as requested."""


def rank_cores(ranks: int, cores_per_rank: int, ranks_per_socket: int, sockets: Sockets) -> list[frozenset[int]]:
    """Return the hardware threads of each local rank. Neighbours share a socket, and no two ranks a core.

    `ranks_per_socket` 0: as many on each socket. Raises CoresError.
    """
    per_socket = ranks_per_socket or -(-ranks // max(1, len(sockets)))
    given = f"HL_PE={cores_per_rank} (--cores-per-rank)"
    if ranks > per_socket * len(sockets):
        raise CoresError(
            f"HL_PPR={per_socket} (--ranks-per-socket) leaves places for {per_socket * len(sockets)} of the {ranks} "
            f"ranks of a node, which has {len(sockets)} sockets; set it to {-(-ranks // max(1, len(sockets)))} or more"
        )
    fewest, together = min(len(cores) for cores in sockets), min(ranks, per_socket)
    if cores_per_rank * together > fewest:
        most = fewest // together
        raise CoresError(
            f"{given} for {together} ranks on each socket needs {cores_per_rank * together} cores, but a socket has "
            f"{fewest} for this process; " + (f"set it to {most} or less" if most else "leave it out")
        )
    bound = []
    for rank in range(ranks):
        first = rank % per_socket * cores_per_rank
        bound.append(frozenset[int]().union(*sockets[rank // per_socket][first : first + cores_per_rank]))
    return bound


def own_sockets() -> Sockets:
    """Return the cores that this process may use. Raises CoresError where the system does not show them."""
    if not hasattr(os, "sched_getaffinity"):
        raise CoresError("HL_PE (--cores-per-rank) binds ranks on Linux only; leave it out")
    places: dict[int, dict[int, set[int]]] = {}
    for thread in sorted(os.sched_getaffinity(0)):
        folder = TOPOLOGY / f"cpu{thread}" / "topology"
        try:
            socket, core = (int((folder / name).read_text()) for name in ("physical_package_id", "core_id"))
        except (OSError, ValueError):
            raise CoresError(
                f"HL_PE (--cores-per-rank) needs {folder}, which this system does not show; leave it out"
            ) from None
        places.setdefault(socket, {}).setdefault(core, set()).add(thread)
    return [[frozenset(cores[core]) for core in sorted(cores)] for _, cores in sorted(places.items())]


def ranges(numbers: frozenset[int]) -> str:
    """Return numbers as `0-12,64`."""
    found: list[list[int]] = []
    for number in sorted(numbers):
        if found and found[-1][1] == number - 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ",".join(f"{first}-{last}" if first != last else f"{first}" for first, last in found)


# ---------------------------------------------------------------------------------------------------------------------
# Gaudi modules of this machine that a run is to use: whether they are there, and free of other jobs.
#
# Rank i of a node takes the i-th module of HABANA_VISIBLE_MODULES, without it module i. hl-smi lists the modules; one
# is in use if a process holds its device file, or if some of its memory is used, as by a process of another container.

PROC = Path("/proc")
DEVICE_FILES = ("/dev/accel/accel", "/dev/hl")
"""Beginnings of the names of a device file, by the driver's release; its index follows."""
# An idle module reports less than 1 % of its memory as used, which the driver keeps for itself.
IDLE_SHARE = 0.05
LISTED = VISIBLE["hpu"]


class ModulesError(ValueError):
    """The ranks of this machine cannot have their modules."""


@dataclass(frozen=True)
class GaudiModule:
    """A Gaudi of this machine."""

    number: int
    holders: tuple[int, ...]
    """Ids of the processes that hold its device file, of those that this user may see."""
    memory_share: float
    """Part of its memory that is used."""

    @property
    def use(self) -> str:
        """Sign of its use; empty: nothing uses it."""
        if self.holders:
            return f"held by process {', '.join(map(str, self.holders))}"
        return f"{self.memory_share:.0%} of its memory is used" if self.memory_share > IDLE_SHARE else ""


def modules() -> list[GaudiModule]:
    """Return the modules of this machine in order; none where hl-smi does not list them."""
    try:
        listed = query_devices("hpu", "index", "module_id", "memory.used", "memory.total")
        rows = [[float(word) for word in row] for row in listed]
        holders = _holders()
        found = [
            GaudiModule(int(number), tuple(holders.get(int(index), ())), used / total if total else 0.0)
            for index, number, used, total in rows
        ]
    except (OSError, ValueError):  # the ranks report what they cannot open
        return []
    return sorted(found, key=lambda module: module.number)


def _holders() -> dict[int, list[int]]:
    """Return the processes that have opened each device file, by its index."""
    found: dict[int, list[int]] = {}
    for folder in PROC.glob("[0-9]*/fd"):
        with contextlib.suppress(OSError):  # of another user, or it has ended
            opened = {os.readlink(link) for link in folder.iterdir()}
            for path in opened:
                for beginning in DEVICE_FILES:
                    if (index := path.removeprefix(beginning)) != path and index.isdecimal():
                        found.setdefault(int(index), []).append(int(folder.parent.name))
    return {index: sorted(processes) for index, processes in found.items()}


def check_modules(ranks: int) -> Iterator[str]:
    """Yield what keeps the ranks of this machine from their modules, all modules in one message."""
    if (own := os.environ.get("HLS_MODULE_ID")) and ranks > 1:
        yield f"HLS_MODULE_ID={own} gives all {ranks} ranks of a node one module; unset it, and list them in {LISTED}"
        return
    given = os.environ.get(LISTED)
    words = [word.strip() for word in given.split(",")] if given else [own] if own else [*map(str, range(ranks))]
    source = f"{LISTED}={given}" if given else f"HLS_MODULE_ID={own}" if own else f"{LISTED} is not set"
    if not all(word.isdecimal() for word in words) or len(set(words)) < len(words):
        yield f"{source} must be numbers of modules, each once, such as 0,1,2,3; correct it"
        return
    here = {module.number: module for module in modules()}
    needed = [int(word) for word in words[:ranks]]
    if not here:
        return
    problems = [f"{number} is not on this machine" for number in needed if number not in here]
    problems += [f"{number} is in use ({here[number].use})" for number in needed if number in here and here[number].use]
    if problems:
        free = [str(number) for number, module in here.items() if not module.use]
        remedy = f"set {LISTED} to {ranks} of them" if len(free) >= ranks else "wait, or use fewer devices a node"
        yield (
            f"{source}, so {ranks} ranks need the modules {','.join(map(str, needed))}: {'; '.join(problems)}. Free: "
            f"{','.join(free) or 'none'}; {remedy}"
        )


def require_modules(ranks: int) -> None:
    """Raise ModulesError where `check_modules` yields a fault and the device is HPU. For agents of other machines."""
    if os.environ.get("DS_ACCELERATOR") == "hpu" and (faults := list(check_modules(ranks))):
        raise ModulesError(" ".join(faults))


def warn_of_modules(ranks: int) -> Iterator[str]:
    """Yield a list of modules that Habana does not support, and one that restricts nothing."""
    given = os.environ.get(LISTED, "")
    words = [word.strip() for word in given.split(",") if word.strip()][:ranks]
    if given and 1 < ranks < 8 and all(word.isdecimal() for word in words):
        first = min(map(int, words), default=0)
        if ranks not in (2, 4) or first % ranks or sorted(map(int, words)) != [*range(first, first + ranks)]:
            yield (
                f"{LISTED}={given}: Habana supports parts of a node of 1, 2 or 4 modules, and of several only 0,1 2,3 "
                "4,5 6,7 0,1,2,3 or 4,5,6,7"
            )
    devices = os.environ.get("HABANA_VISIBLE_DEVICES", "all")
    if devices not in ("", "all", "none") and not given and 0 < devices.count(",") + 1 < len(modules()):
        yield (
            f"HABANA_VISIBLE_DEVICES={devices} chooses the devices of a container when it is made, and restricts no "
            f"process; set {LISTED}"
        )


# ---------------------------------------------------------------------------------------------------------------------
# Variables that agents on other hosts get: ssh passes on nothing of the environment that a run is launched from.

PREFIXES = (
    "CUBLAS_",
    "CUDA_",
    "DEEPSPEED_HPU_",
    "FI_",
    "GLOO_",
    "HABANA_",
    "HCCL_",
    "NCCL_",
    "PT_",
    "TORCH_",
    "TORCHINDUCTOR_",
)
"""Settings of communication libraries and devices."""
NAMES = ("ENABLE_CONSOLE", "GC_KERNEL_PATH", "LD_LIBRARY_PATH", "LOG_LEVEL_ALL", "MEGATRON_VERBOSE")


def sent_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables to set on the hosts. What .deepspeed_env sets too is left to it."""
    theirs = {line.partition("=")[0] for _, _, line in deepspeed_env_lines()}
    return {
        name: value
        for name, value in environment.items()
        if value and name not in theirs and (name in NAMES or name.startswith(PREFIXES))
    }


def deepspeed_env_lines() -> Iterator[tuple[Path, int, str]]:
    """Yield path, number and text of each line of the .deepspeed_env files, which DeepSpeed's launcher sends."""
    for path in (Path.home() / ".deepspeed_env", Path(".deepspeed_env")):
        if path.is_file():
            text = path.read_text(encoding="utf-8", errors="replace")
            yield from ((path, number, line) for number, line in enumerate(text.splitlines(), start=1))


def deepspeed_env() -> dict[str, str]:
    """Return the variables of the .deepspeed_env files."""
    return {name: value for _, _, line in deepspeed_env_lines() for name, _, value in [line.partition("=")]}


def check_variables(device: str, devices_per_node: int, launcher: str = "pdsh") -> Iterator[str]:
    """Yield the variables that cannot be sent, or that leave a host too few devices."""
    for name, value in sent_variables(os.environ).items():
        if launcher == "pdsh" and ("%" in value or "\n" in value):
            yield (
                f"{name}={value!r} holds a % or a line end, which pdsh would change on its way to the hosts; write it "
                "without, or unset it"
            )
    visible = VISIBLE.get(device, "")
    if os.environ.get(visible) and (left := count_devices(device)) < devices_per_node:
        yield (
            f"{visible}={os.environ[visible]} is sent to all hosts and leaves {left} of the {devices_per_node} devices "
            "that each needs; list more, or set HL_NGPU_PER_NODE (--devices-per-node) lower"
        )
