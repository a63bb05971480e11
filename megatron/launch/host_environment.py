"""Environment of the ranks on each host: the cores that they are bound to, their devices, and their variables.

Cores are bound as mpirun's `--map-by ppr:N:socket:PE=K --bind-to core` binds them. Of the environment that a run is
launched from ssh passes on nothing, so its variables are sent.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from megatron.runtime.devices import find_device, launched_device

TOPOLOGY = Path("/sys/devices/system/cpu")
Sockets = Sequence[Sequence[frozenset[int]]]
"""Cores of each socket, each of which is the hardware threads that it has."""


class CoresError(ValueError):
    """The ranks cannot be bound as requested."""


def rank_cores(ranks: int, cores_per_rank: int, ranks_per_socket: int, sockets: Sockets) -> list[frozenset[int]]:
    """Return the hardware threads of each local rank. Neighbours share a socket, and no two ranks a core.

    `ranks_per_socket` 0: as many on each socket. Raises CoresError.
    """
    # rounded up
    fitting = -(-ranks // len(sockets))
    per_socket = ranks_per_socket or fitting
    if ranks > per_socket * len(sockets):
        raise CoresError(
            f"HL_PPR={per_socket} (--ranks-per-socket) leaves places for {per_socket * len(sockets)} of the {ranks} "
            f"ranks of a node, which has {len(sockets)} sockets; set it to {fitting} or more"
        )
    # the smallest socket decides, since each has to take as many ranks
    fewest, together = min(map(len, sockets)), min(ranks, per_socket)
    needed, most = cores_per_rank * together, fewest // together
    if needed > fewest:
        remedy = "leave it out"
        if most:
            remedy = f"set it to {most} or less"
        raise CoresError(
            f"HL_PE={cores_per_rank} (--cores-per-rank) for {together} ranks on each socket needs {needed} cores, but "
            f"a socket has {fewest} for this process; {remedy}"
        )
    bound = []
    for rank in range(ranks):
        # place of the rank's first core within its socket
        first = rank % per_socket * cores_per_rank
        bound.append(frozenset[int]().union(*sockets[rank // per_socket][first : first + cores_per_rank]))
    return bound


def own_sockets() -> Sockets:
    """Return the cores that this process may use. Raises CoresError where the system does not show them."""
    if not hasattr(os, "sched_getaffinity"):
        raise CoresError("HL_PE (--cores-per-rank) binds ranks on Linux only; leave it out")
    threads_of: dict[int, dict[int, set[int]]] = {}  # by socket and core
    # the threads of this process: a scheduler or a container may leave it a part of the machine
    for thread in sorted(os.sched_getaffinity(0)):
        folder = TOPOLOGY / f"cpu{thread}" / "topology"
        try:
            socket, core = (int((folder / name).read_text()) for name in ("physical_package_id", "core_id"))
        except (OSError, ValueError):
            raise CoresError(
                f"HL_PE (--cores-per-rank) needs {folder}, which this system does not show; leave it out"
            ) from None
        # numbers of cores repeat from socket to socket
        threads_of.setdefault(socket, {}).setdefault(core, set()).add(thread)
    sockets = [threads_of[socket] for socket in sorted(threads_of)]
    return [[frozenset(cores[core]) for core in sorted(cores)] for cores in sockets]


def ranges(numbers: frozenset[int]) -> str:
    """Return numbers as `0-12,64`."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(f"{first}-{last}" if last > first else str(first) for first, last in runs)


class ModulesError(ValueError):
    """The ranks of this machine cannot have their devices."""


def require_devices(ranks: int) -> None:
    """Raise ModulesError where the launched device's record yields a fault. For agents of other machines."""
    device = launched_device()
    if device is not None and (faults := list(device.check_ranks(ranks))):
        raise ModulesError(" ".join(faults))


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
# Habana's log and the libraries of its kernels, the search path of libraries, and this project's own
NAMES = ("ENABLE_CONSOLE", "GC_KERNEL_PATH", "LD_LIBRARY_PATH", "LOG_LEVEL_ALL", "MEGATRON_VERBOSE")


def sent_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables to set on the hosts. What .deepspeed_env sets too is left to it."""
    # these stand in the command itself, and would override the user's file
    theirs = {line.partition("=")[0] for _, _, line in deepspeed_env_lines()}
    return {
        name: value
        for name, value in environment.items()
        if value and name not in theirs and (name in NAMES or name.startswith(PREFIXES))
    }


def deepspeed_env_lines() -> Iterator[tuple[Path, int, str]]:
    """Yield path, number and text of each line of the .deepspeed_env files, which DeepSpeed's launcher sends.

    DS_ENV_FILE is DeepSpeed's variable for another name.
    """
    # in DeepSpeed's order: of a name in both, the one in the current folder counts
    name = os.environ.get("DS_ENV_FILE", ".deepspeed_env")
    for path in (Path.home() / name, Path(name)):
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
    if device == "auto":
        return
    record = find_device(device)
    visible = record.visible_variable
    # unset, each host has all its devices
    if not os.environ.get(visible) or record.count is None:
        return
    left = record.count()
    if left < devices_per_node:
        yield (
            f"{visible}={os.environ[visible]} is sent to all hosts and leaves {left} of the {devices_per_node} devices "
            "that each needs; list more, or set HL_NGPU_PER_NODE (--devices-per-node) lower"
        )
