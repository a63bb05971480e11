"""What must be alike on every host: options, data, and the folders that ranks save to and resume from together.

Each host finds them by paths of its own, and the same path leads to other files where a disk is not shared, or not
mounted. Told at the start, with the names of the hosts: later it would be a wrong loss, or ranks that wait for each
other. All functions are collective, and raise the same on every rank.
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

from megatron.checkpoint.format import LATEST, MANIFEST, CheckpointError
from megatron.config.options import Config, ConfigError
from megatron.data.indexed import DataError
from megatron.parallel.context import ParallelContext
from megatron.resilience.errors import raise_on_all_ranks

SEEN_TIMEOUT_S = 10.0
"""How long what one host writes may take to be seen by another: network file systems remember what they looked up."""
SHOWN_HOSTS = 8


def check_same_config(ctx: ParallelContext, config: Config) -> None:
    """Raise ConfigError where hosts have other options: of a YAML file of their own, or another version of the code."""
    sections = config.to_dict().items()
    own = {f"{section}.{name}": value for section, options in sections for name, value in options.items()}
    expected = ctx.broadcast_object(own)
    other = sorted(name for name in {**expected, **own} if own.get(name) != expected.get(name))
    places, differing = _gathered(ctx, other)
    if apart := _apart(places, differing):
        names = ", ".join(sorted(set().union(*differing)))
        raise ConfigError([f"{names}: {apart} differs from {places[0]}; use the same code and presets on every host"])


def check_same_data(ctx: ParallelContext, config: Config, datasets: Sequence[Any]) -> None:
    """Raise DataError where hosts have other contents in the training, validation or test data. None: no such data."""
    places, found = _gathered(ctx, [None if dataset is None else dataset.fingerprint for dataset in datasets])
    for (option, words), *fingerprints in zip(config.data.paths, *found, strict=True):
        if apart := _apart(places, fingerprints):
            raise DataError(
                f"{option}={' '.join(words)}: the data on {apart} is not that on {places[0]}; copy it anew to where it "
                "is wrong, or put it on a file system that all hosts share"
            )


def check_same_start(ctx: ParallelContext, load: Path, chosen: Path | None) -> None:
    """Raise CheckpointError where a host does not find in `load` the checkpoint that rank 0 found. None: there is none.

    `chosen` is this rank's own where each has looked for itself.
    """
    found = None
    if chosen is None:
        found = LATEST if os.path.lexists(load / LATEST) else None
    else:
        found = chosen.name
        with contextlib.suppress(OSError):  # DeepSpeed's have none
            found += hashlib.sha256((chosen / MANIFEST).read_bytes()).hexdigest()
        with contextlib.suppress(OSError):  # Hugging Face's alone have this; their weights have no checksums
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

    A save would else wait for files that never come, from a rank that cannot even say so. `token` is equal on all
    ranks, and no other run's.
    """
    # should we be killed just now: the first save of a later run removes what is called like that
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
    places, told = _gathered(ctx, (seen, fault))
    all_seen, faults = zip(*told, strict=True)
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
    """Whether it is there, or soon will be."""
    deadline_s = time.monotonic() + SEEN_TIMEOUT_S
    while not path.exists():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.1)
    return True


def _gathered(ctx: ParallelContext, mine: Any) -> tuple[list[str], list[Any]]:
    """Host and rank, in words, and what each rank has; in order of rank."""
    told = ctx.gather_objects((f"{socket.gethostname()} (rank {ctx.rank})", mine))
    return [place for place, _ in told], [thing for _, thing in told]


def _apart(places: Sequence[str], seen: Sequence[Any]) -> str:
    """Where another thing was seen than on rank 0, in words: the first rank of each such host. "": nowhere."""
    first: dict[str, str] = {}
    for place, thing in zip(places, seen, strict=True):
        if thing != seen[0]:
            first.setdefault(place.split(" ")[0], place)
    hosts = list(first.values())
    more = f" and {len(hosts) - SHOWN_HOSTS} more hosts" if len(hosts) > SHOWN_HOSTS else ""
    return ", ".join(hosts[:SHOWN_HOSTS]) + more
