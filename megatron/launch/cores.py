"""Cores that the ranks of a node are bound to, as mpirun's `--map-by ppr:N:socket:PE=K --bind-to core` binds them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

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
