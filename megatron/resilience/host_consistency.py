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
from megatron.runtime.commands import first_of

SEEN_TIMEOUT_S = 10.0
"""Time until a file of one host must be visible on another: network file systems cache their lookups."""
SHOWN_HOSTS = 8


def check_same_config(ctx: ParallelContext, config: Config) -> None:
    """Raise ConfigError if hosts differ in their options, by another YAML file or another version of the code."""
    sections = config.to_dict().items()
    own = {f"{section}.{name}": value for section, options in sections for name, value in options.items()}
    expected = ctx.broadcast_object(own)
    # the names alone are gathered: the options of a thousand ranks would be megabytes on each
    other = sorted(name for name in {**expected, **own} if own.get(name) != expected.get(name))
    places, differing = _gathered(ctx, other)
    apart = _apart(places, differing)
    if apart:
        names = ", ".join(sorted(set().union(*differing)))
        raise ConfigError([f"{names}: {apart} differs from {places[0]}; use the same code and presets on every host"])


def check_same_data(ctx: ParallelContext, config: Config, datasets: Sequence[Any]) -> None:
    """Raise DataError if hosts differ in the content of the training, validation or test data (None: no such data)."""
    places, gathered = _gathered(ctx, [None if dataset is None else dataset.fingerprint for dataset in datasets])
    for (option, words), *fingerprints in zip(config.data.paths, *gathered, strict=True):
        apart = _apart(places, fingerprints)
        if apart:
            raise DataError(
                f"{option}={' '.join(words)}: the data on {apart} differs from that on {places[0]}; copy it again to "
                "where it is wrong, or put it on a file system that all hosts share"
            )


def check_same_start(ctx: ParallelContext, load: Path, chosen: Path | None) -> None:
    """Raise CheckpointError if a host does not find in `load` the checkpoint that rank 0 found (None: it found none).

    `chosen` is this rank's own choice where each has searched.
    """
    places, identities = _gathered(ctx, _start_identity(load, chosen))
    apart = _apart(places, identities)
    if apart:
        holds, but = "no checkpoint", "one"
        if chosen is not None:
            holds, but = chosen.name, "another one, or none,"
        raise CheckpointError(
            f"load={load} holds {holds} on {places[0]}, but {but} on {apart}; put it on a file system that all hosts "
            "share, or copy it to the same path on each"
        )


def _start_identity(load: Path, chosen: Path | None) -> str | None:
    """Return what differs where this host holds another checkpoint; None where it holds none."""
    if chosen is None:
        return LATEST if os.path.lexists(load / LATEST) else None
    identity = chosen.name
    with contextlib.suppress(OSError):  # DeepSpeed's checkpoints have no manifest
        identity += hashlib.sha256((chosen / MANIFEST).read_bytes()).hexdigest()
    with contextlib.suppress(OSError):  # only Hugging Face's have this file; their weights have no checksums
        identity += hashlib.sha256((chosen / "config.json").read_bytes()).hexdigest()
        identity += str(sorted((path.name, path.stat().st_size) for path in chosen.glob("*.safetensors")))
    return identity


def check_shared(ctx: ParallelContext, save: Path, token: str) -> None:
    """Raise CheckpointError unless `save` is one folder on all hosts, and every rank may write to it.

    Otherwise a save would wait for files that never come. `token` is equal on all ranks and unique to this run.
    """
    # if this process is killed now, the first save of a later run removes a file of this name
    sign = save / f".shared.partial-{token}"

    def make_sign() -> None:
        if ctx.rank == 0:
            sign.touch()

    raise_on_all_ranks(ctx, make_sign)
    seen, fault = _is_seen(sign), None
    if seen:
        fault = _write_fault(sign.with_name(f"{sign.name}.{ctx.rank}"))
    places, checked = _gathered(ctx, (seen, fault))
    all_seen, faults = zip(*checked, strict=True)
    if ctx.rank == 0:
        sign.unlink(missing_ok=True)
    apart = _apart(places, all_seen)
    if apart:
        raise CheckpointError(
            f"save={save} is not one folder: what {places[0]} writes there is not seen on {apart}; put it on a file "
            "system that all hosts share, under the same path on each"
        )
    apart = _apart(places, faults)
    if apart:
        raise CheckpointError(
            f"save={save} cannot be written to on {apart} ({next(filter(None, faults))}); give a folder that every "
            "host may write to"
        )


def _write_fault(own: Path) -> str | None:
    """Return why this rank cannot make a file; os.access would not know of a read-only or full file system."""
    try:
        own.touch()
        own.unlink()
    except OSError as error:
        return error.strerror
    return None


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
    return first_of(list(first.values()), SHOWN_HOSTS, noun="more hosts")
