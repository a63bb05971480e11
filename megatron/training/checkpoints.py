"""Saving and resuming a run: which checkpoint, what of it, and what becomes of a save.

The format is `checkpoint/store.py`'s, what a rank owns is `state.py`'s; here they meet the run's options.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import platform
import random
import zlib
from collections.abc import Callable
from importlib import metadata as packages
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Union

import torch

from megatron.checkpoint.store import Checkpoint, CheckpointError, Saver, holds_checkpoints, newest_checkpoint
from megatron.config import CheckpointConfig, Config
from megatron.parallel.context import ParallelContext
from megatron.parallel.shards import shard_of
from megatron.training import state
from megatron.training.engine import Engine
from megatron.training.faults import together
from megatron.training.progress import Progress, SavedData

if TYPE_CHECKING:
    from megatron.checkpoint.universal import ForeignCheckpoint

logger = logging.getLogger(__name__)

VERSIONS = ("torch", "deepspeed", "numpy")
RANK_TIMEOUT_S = 1800.0
"""How long a save waits for a rank that writes nothing."""


# Resuming


Resumable = Union[Checkpoint, "ForeignCheckpoint"]


HOW_IT_STARTS = ("load", "ckpt_step", "universal_checkpoint", "finetune", "no_load_optim", "no_load_rng")
"""The options that say where a run starts from. They are about its first start alone."""
_DEFAULTS: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(CheckpointConfig)}


def starting_options(options: CheckpointConfig, ctx: ParallelContext) -> CheckpointConfig:
    """Where this process starts from: as the options say or, once the run has saved, from its own newest checkpoint.

    A run that is started again by the same command, be it by a supervisor, a scheduler or a user, so goes on. Its own
    are those checkpoints in `save` whose run was told to start as this one is. Collective. Raises CheckpointError.
    """
    own = dataclasses.replace(options, load=options.save, **{name: _DEFAULTS[name] for name in HOW_IT_STARTS[1:]})
    if options.save is None or own == options:
        return options
    folder = Path(options.save)

    def has_saved() -> bool:
        if ctx.rank or not holds_checkpoints(folder):
            return False
        newest = newest_checkpoint(folder, fall_back=options.load_fallback)
        saved = {} if newest is None else newest.metadata.get("config", {}).get("checkpoint", {})
        return all(saved.get(name, _DEFAULTS[name]) == getattr(options, name) for name in HOW_IT_STARTS) and bool(saved)

    return own if ctx.broadcast_object(together(ctx, has_saved)) else options


def find_checkpoint(config: Config, ctx: ParallelContext) -> Resumable | None:
    """The checkpoint to go on from, every byte of it checked, or None where a run starts anew. Collective.

    Rank 0 chooses; all ranks share the checking. With load_fallback, a damaged one is passed over for the newest that
    is whole, and a warning says so. Raises CheckpointError.
    """
    options = config.checkpoint
    if options.load is None:
        return None
    folder = Path(options.load)
    if options.universal_checkpoint:
        return together(ctx, lambda: _opened_universal(folder, config, ctx))
    damaged: list[str] = []
    tag = None if options.ckpt_step is None else f"global_step{options.ckpt_step}"
    while True:

        def choose() -> Path | None:
            if ctx.rank:
                return None
            found = newest_checkpoint(folder, tag=tag, fall_back=options.load_fallback, excluding=damaged)
            return None if found is None else found.folder

        chosen = ctx.broadcast_object(together(ctx, choose))
        if chosen is None:
            return None
        checkpoint, damage = together(ctx, lambda: _opened(chosen, ctx))  # noqa: B023 - used at once
        # all ranks must pass it over, or none
        damages = [told for told in ctx.gather_objects(damage) if told]
        if not damages:
            return checkpoint
        if tag is not None or not options.load_fallback:
            raise CheckpointError(damages[0])
        if ctx.rank == 0:
            logger.warning("%s is passed over: %s", chosen, damages[0])
        damaged.append(chosen.name)


def _opened(folder: Path, ctx: ParallelContext) -> tuple[Checkpoint | None, str | None]:
    """The checkpoint, or the damage that this rank found in its share of it."""
    try:
        checkpoint = Checkpoint(folder)
        checkpoint.verify((ctx.rank, ctx.world_size))
    except CheckpointError as error:
        return None, str(error)
    return checkpoint, None


def _opened_universal(folder: Path, config: Config, ctx: ParallelContext) -> ForeignCheckpoint:
    from megatron.checkpoint import universal  # late: it knows every format of DeepSpeed's

    checkpoint = universal.read(folder, config)
    checkpoint.verify((ctx.rank, ctx.world_size))
    return checkpoint


def read_progress(checkpoint: Resumable, options: CheckpointConfig) -> tuple[Progress, SavedData | None]:
    """How far the run had come, and what it knew of its data; a fresh start with `finetune`.

    Raises CheckpointError if the metadata is damaged.
    """
    content = checkpoint.metadata
    if options.finetune:
        return Progress(), None
    try:
        progress = Progress(**content["progress"])
        if "data_fingerprint" not in content:  # converted from elsewhere
            return progress, None
        return progress, SavedData(checkpoint.folder, content["data_fingerprint"], content["config"])
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"{checkpoint.folder} has no usable progress ({error!r}); load another one") from None


def restore(engine: Engine, checkpoint: Resumable, progress: Progress, options: CheckpointConfig | None = None) -> str:
    """Put weights, optimizer and counters into a new engine; says what was restored. Not collective.

    `options`: those of `starting_options`, where they are not the engine's own.
    """
    options, content = options or engine.config.checkpoint, checkpoint.metadata
    if isinstance(checkpoint, Checkpoint):  # a foreign one was checked when it was opened
        state.check_model(engine, checkpoint)
    saved = content.get("optimizer")
    if options.finetune or options.no_load_optim or len(checkpoint.kinds) == 1:
        saved = None
    state.restore(engine, checkpoint, saved)
    seed = content.get("rng", {}).get("seed")
    with_rng = seed is not None and not (options.finetune or options.no_load_rng)
    if with_rng:
        engine.dropout_seed = seed
    engine.deepspeed.global_steps = progress.iteration
    engine.deepspeed.global_samples = progress.consumed_samples
    engine.deepspeed.skipped_steps = progress.skipped_iterations
    what = ["weights", *(["optimizer"] if saved is not None else []), *(["random streams"] if with_rng else [])]
    return f"{checkpoint.folder}: {', '.join(what)}"


# Saving


class Checkpoints:
    """Saves the checkpoints of a run into its folder. All ranks make one together, and save together.

    A context manager: the folder is locked against other runs inside.
    """

    def __init__(self, config: Config, ctx: ParallelContext):
        options = config.checkpoint
        assert options.save is not None
        self._ctx = ctx
        self._last_error: CheckpointError | None = None
        # equal on all ranks, and no other run's
        self._token = f"{ctx.broadcast(random.SystemRandom().getrandbits(62)):x}"
        self._count = 0
        self._saver = together(
            ctx,
            lambda: Saver(
                Path(options.save),  # type: ignore[arg-type]
                rank=ctx.rank,
                world_size=ctx.world_size,
                asynchronous=options.async_save,
                keep_last=options.keep_last,
                retain_interval=options.save_retain_interval,
                timeout_s=RANK_TIMEOUT_S,
            ),
        )

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait for what is under way, and let other processes save into the folder."""
        self._saver.close()

    def reserve(self, engine: Engine) -> None:
        """Get the host memory of an asynchronous save now, when its lack is noticed at once."""
        self._saver.reserve(state.fragments(engine, with_optimizer=not engine.config.checkpoint.no_save_optim))

    def save(self, engine: Engine, progress: Progress, fingerprint: str) -> None:
        """Begin a save, or carry it out. Every rank calls it. What fails is told by `report`, and by `finish`.

        Raises CheckpointError if verify_checkpoint finds copies that differ.
        """
        if engine.config.checkpoint.verify_checkpoint:
            check_replicas(engine)
        with_optimizer = not engine.config.checkpoint.no_save_optim
        content = {
            "progress": dataclasses.asdict(progress),
            "data_fingerprint": fingerprint,
            "config": engine.config.to_dict(),
            "layout": _layout(engine),
            "versions": _versions(),
            "optimizer": state.scalars(engine) if with_optimizer else None,
            "rng": {"seed": engine.dropout_seed},
        }
        self._count += 1
        self._saver.save(
            f"global_step{progress.iteration}",
            f"{self._token}{self._count:06d}",
            state.fragments(engine, with_optimizer=with_optimizer),
            content,
        )

    def report(self) -> list[str]:
        """What became of the saves that ended since the last call, a line each."""
        lines = []
        for outcome in self._saver.finished():
            self._last_error = outcome.error
            if outcome.error is not None:
                lines.append(
                    f"WARNING: {outcome.tag} was not saved, older checkpoints are as they were: {outcome.error}"
                )
                continue
            again = f", at the second try: {outcome.retried}" if outcome.retried else ""
            lines.append(f"saved {self._saver.folder / outcome.tag} in {outcome.seconds:.1f} s{again}")
        return lines

    def finish(self, say: Callable[[str], None]) -> None:
        """Wait for the save under way, and say what became of it. Collective.

        Raises CheckpointError if the last save failed: the run's end is then nowhere.
        """
        for line in together(self._ctx, self._end):
            say(line)

    def _end(self) -> list[str]:
        self._saver.wait()
        lines = self.report()
        if self._last_error is not None:
            raise self._last_error
        return lines


def _layout(engine: Engine) -> dict[str, Any]:
    ctx = engine.ctx
    return {
        "pipeline_model_parallel_size": ctx.num_stages,
        "tensor_model_parallel_size": ctx.tensor_size,
        "data_parallel_size": ctx.data_size,
        "zero_stage": engine.config.effective_zero_stage,
        "precision": engine.config.training.precision,
    }


@functools.cache  # reads the packages' metadata, while training waits
def _versions() -> dict[str, str]:
    return {"python": platform.python_version(), **{name: packages.version(name) for name in VERSIONS}}


def check_replicas(engine: Engine) -> None:
    """Compare what several ranks hold copies of, bit by bit. Collective. Raises CheckpointError naming rank and tensor.

    Copies are: every parameter over the data-parallel ranks, those that are not cut over the tensor-parallel ones too,
    and tied ones over their stages.
    """
    ctx = engine.ctx
    if ctx.world_size == 1 or engine.config.optimizer.zero_stage == 3:  # ZeRO-3 keeps one copy of each
        return
    mine = {}
    for name, parameter in engine.module.named_parameters():
        local = parameter.detach().contiguous().view(torch.uint8).cpu().numpy()
        part = 0 if shard_of(parameter).dim is None else ctx.tensor_rank
        mine[name, part] = zlib.crc32(local.data)
    faults = []
    first: dict[tuple[str, int], tuple[int, int]] = {}
    for rank, theirs in enumerate(ctx.gather_objects(mine)):
        for key, checksum in theirs.items():
            holder, expected = first.setdefault(key, (rank, checksum))
            if checksum != expected:
                faults.append(f"{key[0]} on rank {rank} differs from its copy on rank {holder}")
    if faults:
        more = f"; and {len(faults) - 4} more" if len(faults) > 4 else ""
        raise CheckpointError(
            f"verify_checkpoint: {'; '.join(faults[:4])}{more}. Copies must be equal bit by bit: the model has drifted "
            "apart; resume from an earlier checkpoint"
        )
