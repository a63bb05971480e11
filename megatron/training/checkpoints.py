"""Saving and resuming a run: which checkpoint, what of it, and what becomes of a save.

The format is `checkpoint/format.py`'s, what a rank owns is `state.py`'s; here they meet the run's options.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import platform
import random
from collections.abc import Callable, Mapping
from importlib import metadata as packages
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Union

from megatron.checkpoint.format import MANIFEST, CheckpointError
from megatron.checkpoint.reader import Checkpoint, holds_checkpoints, newest_checkpoint
from megatron.checkpoint.saver import Saver
from megatron.config.options import CheckpointConfig, Config
from megatron.interop.huggingface_start import HuggingFaceStart, is_huggingface
from megatron.parallel.context import ParallelContext
from megatron.resilience.errors import raise_on_all_ranks
from megatron.resilience.host_consistency import check_same_start, check_shared
from megatron.resilience.replica_check import ReplicaCheck
from megatron.training import state
from megatron.training.engine import Engine
from megatron.training.exports import Exports, is_due
from megatron.training.progress import Progress, SavedData

if TYPE_CHECKING:
    from megatron.interop.universal import ForeignCheckpoint

logger = logging.getLogger(__name__)

TAG = "global_step"
VERSIONS = ("torch", "deepspeed", "numpy")
RANK_TIMEOUT_S = 1800.0
"""How long a save waits for a rank that writes nothing."""


# Resuming


Resumable = Union[Checkpoint, "ForeignCheckpoint", HuggingFaceStart]


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

    return own if ctx.broadcast_object(raise_on_all_ranks(ctx, has_saved)) else options


def find_checkpoint(config: Config, ctx: ParallelContext) -> Resumable | None:
    """The checkpoint to go on from, every byte of it checked, or None where a run starts anew. Collective.

    A Hugging Face folder is recognised; its files have no checksums.

    Rank 0 chooses; all ranks share the checking. With load_fallback, a damaged one is passed over for the newest that
    is whole, and a warning says so. Raises CheckpointError.
    """
    options = config.checkpoint
    if options.load is None:
        return None
    folder = Path(options.load)
    if options.universal_checkpoint:
        opened = raise_on_all_ranks(ctx, lambda: _opened_universal(folder, config, ctx))
        check_same_start(ctx, folder, opened.folder)
        return opened
    if ctx.broadcast_object(raise_on_all_ranks(ctx, lambda: ctx.rank == 0 and is_huggingface(folder))):
        check_same_start(ctx, folder, folder)
        return raise_on_all_ranks(ctx, lambda: _opened_huggingface(folder, config))
    damaged: list[str] = []
    tag = None if options.ckpt_step is None else f"{TAG}{options.ckpt_step}"
    while True:

        def choose() -> Path | None:
            if ctx.rank:
                return None
            found = newest_checkpoint(folder, tag=tag, fall_back=options.load_fallback, excluding=damaged)
            return None if found is None else found.folder

        chosen = ctx.broadcast_object(raise_on_all_ranks(ctx, choose))
        check_same_start(ctx, folder, chosen)
        if chosen is None:
            return None
        checkpoint, damage = raise_on_all_ranks(ctx, lambda: _opened(chosen, ctx))  # noqa: B023 - used at once
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
    from megatron.interop import universal  # late: it knows every format of DeepSpeed's

    checkpoint = universal.read(folder, config)
    checkpoint.verify((ctx.rank, ctx.world_size))
    return checkpoint


def _opened_huggingface(folder: Path, config: Config) -> HuggingFaceStart:
    """Raises CheckpointError, also for options that say of an optimizer or a progress what becomes of it."""
    options = config.checkpoint
    # finetune says what happens anyway
    given = [name for name in HOW_IT_STARTS[1:] if name != "finetune" and getattr(options, name) != _DEFAULTS[name]]
    if given:
        said = ", ".join(f"{name}={getattr(options, name)}" for name in given)
        raise CheckpointError(
            f"load={folder} is a Hugging Face folder, of which a run takes the weights and starts at iteration 0: "
            f"{said} would do nothing; leave {'it' if len(given) == 1 else 'them'} out"
        )
    return HuggingFaceStart(folder, config)


def read_progress(checkpoint: Resumable, options: CheckpointConfig) -> tuple[Progress, SavedData | None]:
    """How far the run had come, and what it knew of its data; a fresh start with `finetune`, or from Hugging Face.

    Raises CheckpointError if the metadata is damaged.
    """
    content = checkpoint.metadata
    if options.finetune or isinstance(checkpoint, HuggingFaceStart):
        return Progress(), None
    try:
        progress = Progress.from_saved(content["progress"])
        if "data_fingerprint" not in content:  # converted from elsewhere
            return progress, None
        return progress, SavedData(checkpoint.folder, content["data_fingerprint"], content["config"])
    except (KeyError, TypeError, ValueError) as error:
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
    _count_from(engine, progress)
    what = ["weights", *(["optimizer"] if saved is not None else []), *(["random streams"] if with_rng else [])]
    verb = "started from" if isinstance(checkpoint, HuggingFaceStart) else "resumed"
    return f"{verb} {checkpoint.folder}: {', '.join(what)}"


def _count_from(engine: Engine, progress: Progress) -> None:
    """DeepSpeed's own counters."""
    engine.deepspeed.global_steps = progress.iteration
    engine.deepspeed.global_samples = progress.consumed_samples
    engine.deepspeed.skipped_steps = progress.skipped_iterations


# Rolling back


def checkpoint_before(sample: int, config: Config, ctx: ParallelContext) -> Checkpoint | None:
    """The newest whole checkpoint, optimizer included, that has not seen `sample` or a later one: of this run's folder,
    or else of the one it resumed from. None where there is none. Collective.
    """
    options, damaged = config.checkpoint, set[Path]()
    folders = [options.save]
    if options.load != options.save and not (options.universal_checkpoint or options.finetune or options.no_load_optim):
        folders.append(options.load)

    def choose() -> Path | None:
        if ctx.rank:
            return None
        for folder in (Path(folder) for folder in folders if folder is not None):
            steps = [(path, path.name.removeprefix(TAG)) for path in folder.glob(f"{TAG}*")]
            for path, _ in sorted(((p, int(step)) for p, step in steps if step.isdigit()), key=lambda x: -x[1]):
                if path not in damaged and _is_before(path, sample):
                    return path
        return None

    while (chosen := ctx.broadcast_object(raise_on_all_ranks(ctx, choose))) is not None:
        checkpoint, damage = raise_on_all_ranks(ctx, lambda: _opened(chosen, ctx))
        damages = [told for told in ctx.gather_objects(damage) if told]
        if not damages:
            return checkpoint
        if ctx.rank == 0:
            logger.warning("%s is passed over: %s", chosen, damages[0])
        damaged.add(chosen)
    return None


def _is_before(folder: Path, sample: int) -> bool:
    try:
        checkpoint = Checkpoint(folder)
        return len(checkpoint.kinds) > 1 and int(checkpoint.metadata["progress"]["consumed_samples"]) <= sample
    except (CheckpointError, KeyError, TypeError, ValueError):
        return False


def restore_whole(engine: Engine, checkpoint: Checkpoint, progress: Progress) -> None:
    """Put a running engine back to where one of its own checkpoints was saved. Collective."""
    raise_on_all_ranks(engine.ctx, lambda: state.restore(engine, checkpoint, checkpoint.metadata["optimizer"]))
    state.gather_again(engine)
    engine.dropout_seed = checkpoint.metadata["rng"]["seed"]
    _count_from(engine, progress)


# Saving


class Checkpoints:
    """Saves the checkpoints of a run into its folder. All ranks make one together, and save together.

    A context manager: the folder is locked against other runs inside.
    """

    def __init__(
        self,
        config: Config,
        ctx: ParallelContext,
        beat: Callable[[], None] = lambda: None,
        source: Mapping[str, Any] | None = None,
    ):
        """`beat` is called, also by a thread, whenever a save under way has made progress. `source`: what Hugging Face
        said of the model, where it came from there, however long ago.
        """
        options = config.checkpoint
        assert options.save is not None
        self._ctx, self._source = ctx, source
        self._exports: Exports | None = None
        self._last_error: CheckpointError | None = None
        # equal on all ranks, and no other run's
        self._token = f"{ctx.broadcast(random.SystemRandom().getrandbits(62)):x}"
        self._count = 0
        self._saved_tag: str | None = None
        self._saver = raise_on_all_ranks(
            ctx,
            lambda: Saver(
                Path(options.save),  # type: ignore[arg-type]
                rank=ctx.rank,
                world_size=ctx.world_size,
                asynchronous=options.async_save,
                keep_last=options.keep_last,
                retain_interval=options.save_retain_interval,
                timeout_s=RANK_TIMEOUT_S,
                beat=beat,
            ),
        )
        try:
            check_shared(ctx, self._saver.folder, self._token)
            if options.save_hf is not None:
                self._exports = raise_on_all_ranks(ctx, lambda: Exports(config, ctx.rank))
        except BaseException:
            self._saver.close()
            raise

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait for what is under way, and let other processes save into the folders."""
        self._saver.close()
        if self._exports is not None:
            self._exports.close()

    def reserve(self, engine: Engine) -> None:
        """Get the host memory of an asynchronous save now, when its lack is noticed at once."""
        self._saver.reserve(state.fragments(engine, with_optimizer=not engine.config.checkpoint.no_save_optim))

    def save(self, engine: Engine, progress: Progress, fingerprint: str, *, to_export: bool = False) -> None:
        """Begin a save, or carry it out. Every rank calls it. What fails is told by `report`, and by `finish`.

        `to_export`: `export` comes next. Noted in the checkpoint, for the run that resumes if this one is killed.
        Raises TrainingAborted if verify_checkpoint finds copies that differ.
        """
        if engine.config.checkpoint.verify_checkpoint:
            ReplicaCheck(engine).check(progress.iteration)
        with_optimizer = not engine.config.checkpoint.no_save_optim
        content = {
            "progress": dataclasses.asdict(progress),
            "data_fingerprint": fingerprint,
            "config": engine.config.to_dict(),
            "layout": _layout(engine),
            "versions": _versions(),
            "optimizer": state.scalars(engine) if with_optimizer else None,
            "rng": {"seed": engine.dropout_seed},
            "source": self._source,
            "export": to_export and self._exports is not None,
        }
        self._count += 1
        self._saved_tag = f"{TAG}{progress.iteration}"
        self._saver.save(
            self._saved_tag,
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

    def can_export(self, progress: Progress) -> bool:
        """Whether the run as it is now has a checkpoint in its own folder; true where none is needed. Collective."""
        if self._exports is None or progress.iteration == 0:
            return True
        return bool(self._ctx.broadcast_object((self._folder_of(progress) / MANIFEST).is_file()))

    def export(self, progress: Progress, say: Callable[[str], None], beat: Callable[[], None]) -> None:
        """Make a Hugging Face folder of the checkpoint just saved, where `save_hf` asks for them. Collective.

        Waits for the save under way, and calls `beat` meanwhile. What fails is said, and raised by `finish_exports`.
        """
        if self._exports is None or progress.iteration == 0:
            return
        self._saver.join()
        for line in self.report():
            say(line)
        folder = self._folder_of(progress)
        token = f"{self._token}{self._count:06d}" if self._saved_tag == folder.name else None
        if line := self._exports.export(folder, token, progress.consumed_samples, self._ctx, beat):
            say(line)

    def export_what_is_due(self, progress: Progress, say: Callable[[str], None], beat: Callable[[], None]) -> None:
        """Make up for the export that was to follow the checkpoint resumed from, if the run was killed before.

        Collective.
        """
        folder = self._folder_of(progress)
        if self._exports is not None and self._ctx.broadcast_object(self._ctx.rank == 0 and is_due(folder)):
            self.export(progress, say, beat)

    def finish_exports(self) -> None:
        """Raise CheckpointError if exports are missing at the end. On all ranks alike."""
        if self._exports is not None:
            self._exports.check()

    def _folder_of(self, progress: Progress) -> Path:
        return self._saver.folder / f"{TAG}{progress.iteration}"

    def settle(self) -> list[str]:
        """Wait for the save under way; what became of it, a line each. Collective."""

        def wait() -> list[str]:
            self._saver.wait()
            return self.report()

        return raise_on_all_ranks(self._ctx, wait)

    def finish(self, say: Callable[[str], None]) -> None:
        """Wait for the save under way, and say what became of it. Collective.

        Raises CheckpointError if the last save failed: the run's end is then nowhere.
        """
        for line in raise_on_all_ranks(self._ctx, self._end):
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
        "data_parallel_size": ctx.grad_size,
        "zero_stage": engine.config.effective_zero_stage,
        "precision": engine.config.training.precision,
    }


@functools.cache  # reads the packages' metadata, while training waits
def _versions() -> dict[str, str]:
    return {"python": platform.python_version(), **{name: packages.version(name) for name in VERSIONS}}
