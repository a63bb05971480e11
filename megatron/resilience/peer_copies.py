"""Copies of each rank's state in the memory of the agents, of its own host and of the next one; restarts from them.

A copy is a checkpoint whose files lie in memory (checkpoint/copies.py). The agent of a host outlives its ranks, so a
copy survives the end of all ranks; where there are several hosts, each rank sends its copy to a rank of the next one,
so that it survives the loss of a host.
"""

from __future__ import annotations

import logging
import os
import socket
import stat
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from megatron.checkpoint.copies import (
    COPIES,
    TAG,
    RankCopies,
    held_bytes,
    part_paths,
    read_part,
    remove_others,
    write_manifest,
)
from megatron.checkpoint.folders import CheckpointError, iteration_of
from megatron.checkpoint.format import Fragment
from megatron.checkpoint.reader import Checkpoint
from megatron.parallel.context import ParallelContext
from megatron.resilience import job
from megatron.resilience.copy_exchange import CopyExchange, Hosts, bring_missing
from megatron.resilience.errors import OtherRankFailed, raise_on_all_ranks
from megatron.runtime.commands import first_of
from megatron.runtime.device_cpu import free_host_memory

WHOLE, FAILED, WRITING = range(3)
"""State of a rank's last copy. The largest of all ranks is that of the copy."""
GIB = 2**30
LEAVE_S = 2.0
"""Longest wait for a copy that is being made, once this rank is leaving."""

logger = logging.getLogger(__name__)


def agents_folder() -> Path:
    """Return the folder in memory that the agent of this rank keeps. Raises CheckpointError."""
    name = os.environ.get(job.COPIES)
    if name is None:
        raise CheckpointError(
            "peer_copy_interval keeps copies in the memory of the agent that restarts the ranks, but none restarts "
            "these; start them by megatron-launch with --max-restarts (HL_MAX_RESTARTS), or leave it out"
        )
    if name == job.NO_MEMORY:
        raise CheckpointError(
            f"the agent of {socket.gethostname()} could make no folder in /dev/shm, in whose memory peer_copy_interval "
            "keeps copies; have it mounted, writable for this user and with free space (containers: --shm-size), or "
            "leave the option out"
        )
    folder = Path(name)
    try:
        status = os.lstat(folder)
    except OSError as error:
        raise CheckpointError(f"{folder}, the agent's memory for copies, is not there: {error.strerror}") from None
    # in a folder that all users write to: one of another user, or a link, is not our memory
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise CheckpointError(f"{folder} is not a folder of this user alone; no copies are kept in it")
    return folder


class PeerCopies:
    """Copies of the state of all ranks, every `peer_copy_interval` steps. Collective in construction and use.

    Each rank has COPIES files, which are written in turn: the copy that is whole on all ranks stays until the next one
    is. Training waits only while the state is copied; checksums and the way to the next host are a thread's.
    """

    def __init__(
        self, ctx: ParallelContext, token: str, kept: int | None, on_whole: Callable[[int], None] = lambda step: None
    ) -> None:
        """`token`: letters and digits that no other start has had. `kept`: iteration of the copy that the run begins
        at; others are given up. `on_whole` is called with the iteration of each copy that is whole on all ranks.
        Raises CheckpointError."""
        self._ctx, self._token, self._on_whole = ctx, token, on_whole
        self._folder = raise_on_all_ranks(ctx, agents_folder)
        self._hosts = Hosts(ctx)
        self._count = 0
        self._whole, self._last = kept, kept
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._warned, self._is_late = "", False
        raise_on_all_ranks(ctx, self._remove_others)
        self._own = raise_on_all_ranks(ctx, lambda: RankCopies(self._folder, ctx.rank, ctx.world_size, kept))
        self._exchange: CopyExchange | None = None
        if self._hosts.count > 1:
            before = self._hosts.previous_rank
            theirs = raise_on_all_ranks(ctx, lambda: RankCopies(self._folder, before, ctx.world_size, kept))
            self._exchange = CopyExchange(ctx, self._hosts, theirs)

    def _kept_here(self, ranks: Iterable[int]) -> set[int]:
        """Return the ranks whose copies lie on a host. `ranks`: its own."""
        if self._hosts.count == 1:
            return {*ranks}
        return {*ranks, *((rank - self._hosts.per_host) % self._ctx.world_size for rank in ranks)}

    def _remove_others(self) -> None:
        """Remove what no rank takes over, as of another layout. Before any of them does."""
        if self._hosts.local_rank == 0:
            remove_others(self._folder, self._kept_here(self._hosts.ranks_of(self._hosts.own)))

    def reserve(self, num_bytes: int) -> None:
        """Check that the copies of all ranks fit into the free memory of their hosts. `num_bytes`: of this rank's.

        Raises CheckpointError on all ranks where they do not.
        """
        sizes: list[int] = self._ctx.gather_objects(num_bytes)
        if self._exchange is not None:
            self._exchange.largest_bytes = max(sizes)
        here = self._kept_here(self._hosts.ranks_of(self._hosts.own))
        # of the others one, while a restart reads: weights lie in the files of all ranks that hold them
        others = sum(size for rank, size in enumerate(sizes) if rank not in here)
        needed = COPIES * sum(sizes[rank] for rank in here) + others

        def check() -> None:
            memory = os.statvfs(self._folder)
            free = min(memory.f_bavail * memory.f_frsize, free_host_memory())
            # a restart finds the memory of the attempt before it
            free += held_bytes(self._folder)
            if needed > free:
                raise CheckpointError(
                    f"peer_copy_interval: {COPIES} copies of each rank's state"
                    f"{', and in a restart one of those of other hosts,' if others else ''} take "
                    f"{needed / GIB:.2f} GiB of the memory of {socket.gethostname()}, of which {free / GIB:.2f} GiB "
                    f"are free, in {self._folder.parent} and within the limit of a container; give it more, or leave "
                    "the option out"
                )

        raise_on_all_ranks(self._ctx, check)

    def keep(self, step: int, fragments: Sequence[Fragment], metadata: Callable[[], str]) -> None:
        """Copy the state of now, unless a rank still makes the copy before. `metadata`: rank 0's, as JSON."""
        state = self._ctx.largest(self._state())
        if state == WRITING:
            self._warn_of_late(step)
            return
        if state == WHOLE and self._last is not None and self._last != self._whole:
            self._whole = self._last
            self._on_whole(self._last)
        self._count += 1
        self._last, self._error, text = step, None, ""
        try:
            self._own.copy(step, f"{self._token}k{self._count:06d}", fragments, self._whole)
            if self._ctx.rank == 0:
                text = metadata()
        except (OSError, MemoryError, CheckpointError) as error:  # other ranks go on, and learn of it at the next copy
            self._fail(error)
        # a daemon: at the end of a run the copy is not needed
        self._thread = threading.Thread(
            target=self._carry_out, args=(step, text), name=f"copy of iteration {step}", daemon=True
        )
        self._thread.start()

    def _warn_of_late(self, step: int) -> None:
        if not self._is_late and self._ctx.rank == 0:
            self._is_late = True
            logger.warning(
                "no copy of iteration %d is kept in memory, since that of iteration %s is still being made; where this "
                "lasts, a restart loses more than peer_copy_interval steps: raise it",
                step,
                self._last,
            )

    def discard(self) -> None:
        """Give all copies up, as of a state that a rollback has left. Every rank calls it."""
        if self._thread is not None:
            self._thread.join()
        self._own.discard()
        if self._exchange is not None:
            self._exchange.theirs.discard()
        self._whole = self._last = None

    def close(self) -> None:
        """Wait for the copy that is being made, for a limited time."""
        if self._thread is not None:
            self._thread.join(LEAVE_S)

    def _state(self) -> int:
        if self._thread is not None and self._thread.is_alive():
            return WRITING
        if self._error is not None:
            return FAILED
        return WHOLE

    def _carry_out(self, step: int, metadata: str) -> None:
        part, content = b"", torch.empty(0, dtype=torch.uint8)
        try:
            if self._error is None:
                part = self._own.complete(metadata)
                content = self._own.content
            if self._exchange is not None:
                self._exchange.run(step, part, content, self._whole)
        except Exception as error:  # of any kind: in a thread it would otherwise be lost
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        """Note that this rank's copy is not whole: the next one takes its place, and the whole one stays."""
        self._error = error
        if str(error) != self._warned:  # at each interval it would be the same
            self._warned = str(error)
            logger.warning("rank %d keeps no copy of iteration %s in memory: %s", self._ctx.rank, self._last, error)


# ---------------------------------------------------------------------------------------------------------------------
# A restart


def open_newest(
    ctx: ParallelContext, refusal: Callable[[int, Mapping[str, Any]], str | None]
) -> tuple[Checkpoint | None, list[str]]:
    """Return the newest copy that all ranks have whole, verified, and lines on newer ones that are passed over.

    None: there is none. All ranks come to the same one. `refusal` returns why a copy of an iteration, with this
    metadata, is not to be used; the metadata is empty before it is known. Collective. Raises CheckpointError where no
    agent restarts the ranks.
    """
    folder, hosts, lines = raise_on_all_ranks(ctx, agents_folder), Hosts(ctx), list[str]()
    found = _Found(ctx, hosts, folder)
    for step, token in found.newest_first():
        if refusal(step, {}) is not None:  # older than what lies on the disk
            continue
        fault = found.fault(step, token)
        if fault is None:
            checkpoint, fault = _opened(ctx, hosts, folder, step, found.holders[step, token])
            if checkpoint is not None:
                fault = refusal(step, checkpoint.metadata)
                if fault is None:
                    return checkpoint, lines
        lines.append(f"the copy of iteration {step} in memory is passed over: {fault}")
    return None, lines


class _Found:
    """Copies in the memory of all hosts. Collective in construction."""

    def __init__(self, ctx: ParallelContext, hosts: Hosts, folder: Path) -> None:
        self._world_size = ctx.world_size
        self.holders: dict[tuple[int, str], dict[int, set[int]]] = defaultdict(lambda: defaultdict(set))
        """By iteration and token: the hosts that hold the whole copy of each rank."""
        self._sizes: dict[tuple[int, str], int] = {}
        self._damages: dict[int, str] = {}
        parts, damages = [], []
        # each rank of a host reads its share
        for path in part_paths(folder)[hosts.local_rank :: hosts.per_host]:
            try:
                part = read_part(path)
                parts.append([part.step, part.token, part.rank, part.world_size])
            except CheckpointError as error:
                damages.append([iteration_of(path.parent.name), str(error)])
        for rank, (theirs, damaged) in enumerate(ctx.gather_objects([parts, damages])):
            for step, token, of_rank, world_size in theirs:
                self.holders[step, token][of_rank].add(rank // hosts.per_host)
                self._sizes[step, token] = world_size
            self._damages |= dict(damaged)

    def newest_first(self) -> list[tuple[int, str]]:
        return sorted(self.holders, reverse=True)

    def fault(self, step: int, token: str) -> str | None:
        """Return why a copy is not whole; None: it is."""
        world_size = self._sizes[step, token]
        if world_size != self._world_size:
            return f"it was made by {world_size} ranks, and there are {self._world_size}"
        missing = [str(rank) for rank in range(world_size) if rank not in self.holders[step, token]]
        if not missing:
            return None
        damage = self._damages.get(step)
        if damage is not None:
            return damage
        return f"rank {first_of(missing, 8)} had not completed it, or its memory is lost"


def _opened(
    ctx: ParallelContext, hosts: Hosts, folder: Path, step: int, holders: Mapping[int, set[int]]
) -> tuple[Checkpoint | None, str | None]:
    """Return a copy, every byte of it verified, or the first fault of it on any rank. Collective."""
    try:
        bring_missing(ctx, hosts, folder, step, holders)
        raise_on_all_ranks(ctx, lambda: _write_manifest(hosts, folder, step, ctx.world_size))
        return raise_on_all_ranks(ctx, lambda: _verified(hosts, folder / f"{TAG}{step}")), None
    except (CheckpointError, OSError, ValueError, OtherRankFailed) as error:
        fault = str(error)
    # one text on all ranks: that of the first that has failed itself
    return None, fault


def _write_manifest(hosts: Hosts, folder: Path, step: int, world_size: int) -> None:
    if hosts.local_rank == 0:
        write_manifest(folder, step, world_size)


def _verified(hosts: Hosts, copy: Path) -> Checkpoint:
    checkpoint = Checkpoint(copy)
    # the files of each host are its own
    checkpoint.verify((hosts.local_rank, hosts.per_host))
    return checkpoint
