"""File descriptors of a process: how many a rank needs, and how many it may have.

Each rank holds a socket to every other one in each of gloo's process groups, so the usual limit of 1024 is reached at
some 200 ranks.
"""

from __future__ import annotations

import errno
import os
import resource

from megatron.runtime.device import Device

BASE = 256
"""Descriptors of a rank alone: libraries, devices, logs. Measured on the CPU: 74."""
SOCKETS_OVER_GLOO = 5
"""Sockets to each other rank where all collectives are gloo's: up to four groups of all ranks, and rank 0 the store."""
SOCKETS_OF_CONTROL = 3
"""The same where only the control messages go over gloo."""
FILES_PER_RANK = 2
"""Files of a checkpoint, for each rank that saved it. All may be open at once while another layout reads them."""
FILES_PER_DATASET = 12
"""A dataset's two files, its document index, and three index files for each of the three splits."""
HIGHEST = 1 << 20
"""Soft limit that is enough for any run: where the hard limit is infinite, some programs walk over all numbers."""
FALLBACKS = (65536, 10240)
"""Limits of kernels that refuse a higher one, whatever the hard limit: 10240 on macOS."""
SPARE = 8
"""A process that cannot open this many files fails for lack of them."""


def needed(device: Device, world_size: int, num_datasets: int) -> int:
    """Return an upper estimate of the descriptors that a rank has open."""
    sockets = SOCKETS_OVER_GLOO if device.collectives_are_gloo else SOCKETS_OF_CONTROL
    return BASE + (sockets + FILES_PER_RANK) * world_size + FILES_PER_DATASET * num_datasets


def raise_limit() -> int:
    """Raise this process's limit as far as it may, for itself and its children; return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = HIGHEST if hard == resource.RLIM_INFINITY else min(hard, HIGHEST)
    if soft == resource.RLIM_INFINITY or soft >= highest:
        return HIGHEST if soft == resource.RLIM_INFINITY else soft
    # from the highest on, until the kernel takes one
    for limit in (highest, *(limit for limit in FALLBACKS if soft < limit < highest)):
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        except (OSError, ValueError):
            continue
        break
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def limit_fault(device: Device, world_size: int, num_datasets: int) -> str | None:
    """Return an error message where a rank needs more descriptors than it may have, else None. Raises the limit."""
    limit, need = raise_limit(), needed(device, world_size, num_datasets)
    if need <= limit:
        return None
    return (
        f"the limit of open files is {limit} (ulimit -Hn), but a rank of {world_size} needs up to {need}; raise it "
        "on every host (nofile in limits.conf, LimitNOFILE of systemd, --ulimit nofile of docker)"
    )


def shortage() -> OSError | None:
    """Return an error that names the limit where this process can hardly open another file, else None."""
    opened: list[int] = []
    try:
        for _ in range(SPARE):
            # a copy of stderr needs a number and nothing else, neither a file nor memory
            opened.append(os.dup(2))
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):  # stderr may be closed
            return None
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        reason = f"{error.strerror}: the limit is {limit} (ulimit -n); raise it, or open fewer"
        return OSError(error.errno, reason)
    finally:
        for descriptor in opened:
            os.close(descriptor)
    return None
