"""Choice between copies in the agents' memory and the checkpoints on the disk, as a start makes it."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.checkpoint.folders import Run, checkpoint_folders, holds_checkpoints, iteration_of, of_run, run_in
from megatron.checkpoint.format import CheckpointError
from megatron.checkpoint.reader import Checkpoint, read_latest, resumes_itself
from megatron.checkpoint.source import WeightSource
from megatron.options.config import CheckpointConfig, Config
from megatron.parallel.context import ParallelContext
from megatron.resilience.errors import raise_on_all_ranks
from megatron.resilience.peer_copies import open_newest
from megatron.training.checkpoints import Kept, layout_of
from megatron.weights.model import check_model

logger = logging.getLogger(__name__)


def keeps_copies(options: CheckpointConfig) -> bool:
    return options.peer_copy_interval is not None and options.save is not None


def newest_saved(config: Config, ctx: ParallelContext, own: Run | None) -> int:
    """Return the iteration of the newest checkpoint on the disk, damaged or not, for `newest_copy`. Collective."""
    if not keeps_copies(config.checkpoint):
        return 0
    # as rank 0 sees it: others may see an older save of a shared folder
    return ctx.broadcast(raise_on_all_ranks(ctx, lambda: _newest_saved(config.checkpoint, own)))


def newest_copy(
    config: Config, ctx: ParallelContext, own: Run | None, saved: int
) -> tuple[Checkpoint | None, Kept | None]:
    """Return the newest copy in the agents' memory that is newer than the iteration `saved`, if there is one.

    A newer one that cannot be used is reported. `own`: the run that has saved; None: nothing is saved. Collective.
    """
    if not keeps_copies(config.checkpoint):
        return None, None
    layout = layout_of(config, ctx)

    def refusal(iteration: int, metadata: Mapping[str, Any]) -> str | None:
        if not metadata:
            return None if iteration > saved else "the disk has it"
        if own is not None and Run.of(metadata).id != own.id:
            return f"it is of run {Run.of(metadata).id}"
        kept = Kept(**metadata["kept"])
        # a later checkpoint is not what was to be exported
        if kept.is_needed and kept.saved_at > saved:
            return f"the save of iteration {kept.saved_at}, to be exported or kept as the best, was cut short"
        return _differing_layout(metadata, layout)

    copy, lines = open_newest(ctx, refusal)
    for line in lines:
        if ctx.rank == 0:
            logger.warning("%s", line)
    if copy is None:
        return None, None
    raise_on_all_ranks(ctx, lambda: check_model(copy, config))
    kept = Kept(**copy.metadata["kept"])
    return copy, dataclasses.replace(kept, save_is_due=kept.save_is_due or kept.saved_at > saved)


def newer_copy(
    config: Config, ctx: ParallelContext, own: Run | None, found: WeightSource | None, saved: int
) -> tuple[WeightSource | None, Kept | None]:
    """Return a copy in place of the checkpoint `found` where the one of iteration `saved` is damaged, else `found`."""
    if not isinstance(found, Checkpoint) or iteration_of(found.tag) >= saved:
        return found, None
    copy, kept = newest_copy(config, ctx, own or Run.of(found.metadata), iteration_of(found.tag))
    if copy is None:
        return found, None
    if ctx.rank == 0:
        line = "%s in memory is loaded instead of %s, which is older: the checkpoint of iteration %d is damaged"
        logger.warning(line, copy.folder, found.folder, saved)
    return copy, kept


def _newest_saved(options: CheckpointConfig, own: Run | None) -> int:
    """Return the iteration of the newest checkpoint that the run would resume from the disk; 0: of none."""
    save = Path(str(options.save))
    if own is None and resumes_itself(options) and holds_checkpoints(save):
        own = run_in(checkpoint_folders(save)[0])
        with contextlib.suppress(CheckpointError):  # a damaged one does not say
            own = read_latest(save)[1]
    if own is None:  # it has saved none yet; what is there is another run's
        return 0
    found = of_run(own, checkpoint_folders(save), with_ancestors=False)
    return max((iteration_of(path.name) for path in found), default=0)


def _differing_layout(metadata: Mapping[str, Any], layout: Mapping[str, Any]) -> str | None:
    """Return how the layout of a copy differs from that of now."""
    there = metadata.get("layout") or {}
    apart = [f"{name}={there.get(name)}, now {value}" for name, value in layout.items() if there.get(name) != value]
    if not apart:
        return None
    return f"it was made on another layout ({'; '.join(apart)})"
