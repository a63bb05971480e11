"""Checks that all hosts agree on the options, the data, and the folders to save to and resume from.

The same path leads to other files where a disk is not shared, or not mounted. These checks at the start name the hosts;
later it would be a wrong loss, or ranks that wait for each other. All are collective and raise the same on every rank.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.checkpoint.folders import MANIFEST
from megatron.checkpoint.format import LATEST, CheckpointError
from megatron.data.index.indexed import DataError
from megatron.options.config import Config, ConfigError
from megatron.parallel.context import ParallelContext
from megatron.resilience.errors import raise_on_all_ranks

SEEN_TIMEOUT_S = 10.0
"""Time until a file of one host must be visible on another: network file systems cache their lookups."""
SHOWN_HOSTS = 8


def check_same_config(ctx: ParallelContext, config: Config) -> None:
    """Raise ConfigError if hosts differ in their options, by another YAML file or another version of the code."""
    sections = config.to_dict().items()
    own = {f"{section}.{name}": value for section, options in sections for name, value in options.items()}
    expected = ctx.broadcast_object(own)
    other = sorted(name for name in {**expected, **own} if own.get(name) != expected.get(name))
    places, differing = _gathered(ctx, other)
    if apart := _apart(places, differing):
        names = ", ".join(sorted(set().union(*differing)))
        raise ConfigError([f"{names}: {apart} differs from {places[0]}; use the same code and presets on every host"])


def check_same_data(ctx: ParallelContext, config: Config, datasets: Sequence[Any]) -> None:
    """Raise DataError if hosts differ in the content of the training, validation or test data (None: no such data)."""
    places, found = _gathered(ctx, [None if dataset is None else dataset.fingerprint for dataset in datasets])
    for (option, words), *fingerprints in zip(config.data.paths, *found, strict=True):
        if apart := _apart(places, fingerprints):
            raise DataError(
                f"{option}={' '.join(words)}: the data on {apart} differs from that on {places[0]}; copy it again to "
                "where it is wrong, or put it on a file system that all hosts share"
            )


def check_same_start(ctx: ParallelContext, load: Path, chosen: Path | None) -> None:
    """Raise CheckpointError if a host does not find in `load` the checkpoint that rank 0 found (None: it found none).

    `chosen` is this rank's own choice where each has searched.
    """
    found = None
    if chosen is None:
        found = LATEST if os.path.lexists(load / LATEST) else None
    else:
        found = chosen.name
        with contextlib.suppress(OSError):  # DeepSpeed's checkpoints have no manifest
            found += hashlib.sha256((chosen / MANIFEST).read_bytes()).hexdigest()
        with contextlib.suppress(OSError):  # only Hugging Face's have this file; their weights have no checksums
            found += hashlib.sha256((chosen / "config.json").read_bytes()).hexdigest()
            found += str(sorted((path.name, path.stat().st_size) for path in chosen.glob("*.safetensors")))
    places, all_found = _gathered(ctx, found)
    if apart := _apart(places, all_found):
        holds = "no checkpoint" if chosen is None else chosen.name
        but = "one" if chosen is None else "another one, or none,"
        raise CheckpointError(
            f"load={load} holds {holds} on {places[0]}, but {but} on {apart}; put it on a file system that all hosts "
            "share, or copy it to the same path on each"
        )


def check_shared(ctx: ParallelContext, save: Path, token: str) -> None:
    """Raise CheckpointError unless `save` is one folder on all hosts, and every rank may write to it.

    Otherwise a save would wait for files that never come. `token` is equal on all ranks and unique to this run.
    """
    # if this process is killed now, the first save of a later run removes a file of this name
    sign = save / f".shared.partial-{token}"
    raise_on_all_ranks(ctx, lambda: sign.touch() if ctx.rank == 0 else None)
    seen, fault = _is_seen(sign), None
    if seen:
        try:
            own = sign.with_name(f"{sign.name}.{ctx.rank}")
            own.touch()
            own.unlink()
        except OSError as error:
            fault = error.strerror
    places, checked = _gathered(ctx, (seen, fault))
    all_seen, faults = zip(*checked, strict=True)
    if ctx.rank == 0:
        sign.unlink(missing_ok=True)
    if apart := _apart(places, all_seen):
        raise CheckpointError(
            f"save={save} is not one folder: what {places[0]} writes there is not seen on {apart}; put it on a file "
            "system that all hosts share, under the same path on each"
        )
    if apart := _apart(places, faults):
        raise CheckpointError(
            f"save={save} cannot be written to on {apart} ({next(filter(None, faults))}); give a folder that every "
            "host may write to"
        )


def _is_seen(path: Path) -> bool:
    """Return True if the file exists, or appears within SEEN_TIMEOUT_S."""
    deadline_s = time.monotonic() + SEEN_TIMEOUT_S
    while not path.exists():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.1)
    return True


def _gathered(ctx: ParallelContext, mine: Any) -> tuple[list[str], list[Any]]:
    """Return `host (rank N)` and the value of each rank, in order of rank."""
    gathered = ctx.gather_objects((f"{socket.gethostname()} (rank {ctx.rank})", mine))
    return [place for place, _ in gathered], [thing for _, thing in gathered]


def _apart(places: Sequence[str], seen: Sequence[Any]) -> str:
    """Return the first rank of each host that has another value than rank 0, as text; "" if all agree."""
    first: dict[str, str] = {}
    for place, thing in zip(places, seen, strict=True):
        if thing != seen[0]:
            first.setdefault(place.split(" ")[0], place)
    hosts = list(first.values())
    more = f" and {len(hosts) - SHOWN_HOSTS} more hosts" if len(hosts) > SHOWN_HOSTS else ""
    return ", ".join(hosts[:SHOWN_HOSTS]) + more
