"""Copies of a toy state on the ranks of one or two hosts, each with a folder for its agent's memory."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from unittest.mock import patch

from megatron.checkpoint.copies import RankCopies
from megatron.options.config import ParallelConfig
from megatron.parallel.context import ParallelContext
from megatron.resilience import job
from megatron.resilience.peer_copies import PeerCopies, open_newest
from megatron.runtime import device_cpu
from tests import runs
from tests.checkpoint.states import assert_holds, fragments_of


@contextlib.contextmanager
def agents(folders: Sequence[str]) -> Iterator[ParallelContext]:
    """As many hosts as folders, and the ranks spread over them."""
    ctx = ParallelContext.build(ParallelConfig(), "cpu")
    per_host = ctx.world_size // len(folders)
    values = {job.COPIES: folders[ctx.rank // per_host], "LOCAL_WORLD_SIZE": str(per_host)}
    with patch.dict(os.environ, values):
        yield ctx


def metadata_of(step: int) -> str:
    return json.dumps({"progress": {"iteration": step}})


def keep(folders: Sequence[str], steps: Sequence[int], kept: int | None = None) -> list[int]:
    """Copy the state of these iterations. Returns those that are whole on all ranks, as far as known."""
    whole: list[int] = []
    with agents(folders) as ctx:
        copies = PeerCopies(ctx, f"start{kept or 0}", kept, whole.append)
        copies.reserve(1 << 20)
        for step in steps:
            fragments = list(fragments_of(ctx.rank, ctx.world_size, 1, seed=step))
            copies.keep(step, fragments, lambda step=step: metadata_of(step))  # type: ignore[misc]
            thread = copies._thread
            assert thread is not None
            thread.join(60.0)
            assert copies._error is None, copies._error
    return whole


def refuse(folders: Sequence[str]) -> str:
    """Rank 1 comes to an error of an unforeseen kind where the copy of rank 0 is to lie. Returns each rank's error."""
    with agents(folders) as ctx:
        copies = PeerCopies(ctx, "start", None)
        copies.reserve(1 << 20)
        assert copies._exchange is not None
        fails = patch.object(copies._exchange.theirs, "open", side_effect=KeyError("unforeseen"))
        with fails if ctx.rank == 1 else contextlib.nullcontext():
            copies.keep(1, list(fragments_of(ctx.rank, ctx.world_size, 1, seed=1)), lambda: metadata_of(1))
            assert copies._thread is not None
            copies._thread.join(60.0)
        return str(copies._error)


def tear(folders: Sequence[str], step: int, kept: int) -> None:
    """Rank 0 completes its copy of an iteration; the others are killed in the midst of theirs."""
    with agents(folders) as ctx:
        copies = RankCopies(Path(os.environ[job.COPIES]), ctx.rank, ctx.world_size, kept)
        copies.copy(step, "torn", list(fragments_of(ctx.rank, ctx.world_size, 1, seed=step)), kept)
        if ctx.rank == 0:
            copies.complete(metadata_of(step))


def reopen(folders: Sequence[str], saved: int) -> tuple[int | None, list[str]]:
    """Return the iteration of the newest copy that is newer than `saved`, compared bit by bit, and what is said."""
    with agents(folders) as ctx:
        found, lines = open_newest(ctx, lambda step, metadata: None if step > saved else "the disk has it")
        if found is None:
            return None, lines
        step = int(found.metadata["progress"]["iteration"])
        assert_holds(found, seed=step)
    return step, lines


def reserve(folders: Sequence[str], num_bytes: int, cgroups: str = "") -> str:
    """Return what each rank says of so many bytes. `cgroups`: a folder that stands for that of the control groups."""
    places = patch.object(device_cpu, "CGROUPS", Path(cgroups)) if cgroups else contextlib.nullcontext()
    with agents(folders) as ctx, places:
        try:
            PeerCopies(ctx, "token", None).reserve(num_bytes)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return ""


def train(folders: Sequence[str], arguments: str) -> list[str]:
    """Return what rank 0 announces and warns of in a run whose agents have these folders in memory."""
    warned: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warned.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("megatron.training.copies")
    with agents(folders):
        log.addHandler(handler)
        try:
            return runs.announced(arguments) + warned
        finally:
            log.removeHandler(handler)
