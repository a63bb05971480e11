"""Opening what a run or a generation starts from: found, verified by all ranks together, the same on every host."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Union

from megatron.checkpoint.foreign import needless_step
from megatron.checkpoint.format import CheckpointError
from megatron.checkpoint.lineage import Run
from megatron.checkpoint.model_options import check_model_options
from megatron.checkpoint.reader import Checkpoint, newest_checkpoint
from megatron.options.config import Config
from megatron.parallel.context import ParallelContext
from megatron.resilience.errors import is_passing, raise_on_all_ranks
from megatron.resilience.host_consistency import check_same_start
from megatron.weights.adapter_start import base_config, check_lora_options
from megatron.weights.folder_files import is_adapter_folder
from megatron.weights.huggingface import TOKENIZER_FILES, tokenizer_files
from megatron.weights.huggingface_start import HuggingFaceStart, is_huggingface
from megatron.weights.peft.start import PeftStart

if TYPE_CHECKING:
    from megatron.weights.deepspeed.deepspeed_checkpoint import DeepSpeedCheckpoint

Resumable = Union[Checkpoint, "DeepSpeedCheckpoint", HuggingFaceStart, PeftStart]

TAG = "global_step"

logger = logging.getLogger(__name__)


def find_checkpoint(config: Config, ctx: ParallelContext, own: Run | None = None) -> Resumable | None:
    """Return the checkpoint to resume, every byte of it verified, or None for a new run. Collective.

    `own`: only checkpoints of this run, in a folder that others use too. A Hugging Face folder is recognised; its
    safetensors carry no checksum. Raises CheckpointError.
    """
    options = config.checkpoint
    if options.load is None:
        return None
    checkpoint = _open_start(Path(options.load), config, ctx, own)
    raise_on_all_ranks(ctx, lambda: _check_model(checkpoint, config))
    return checkpoint


def _open_start(folder: Path, config: Config, ctx: ParallelContext, own: Run | None) -> Resumable | None:
    options = config.checkpoint
    if options.universal_checkpoint:
        opened = raise_on_all_ranks(ctx, lambda: _opened_universal(folder, config, ctx))
        check_same_start(ctx, folder, opened.folder)
        return opened
    if ctx.broadcast_object(raise_on_all_ranks(ctx, lambda: ctx.rank == 0 and is_huggingface(folder))):
        check_same_start(ctx, folder, folder)
        return raise_on_all_ranks(ctx, lambda: _opened_huggingface(folder, config, ctx))
    if ctx.broadcast_object(is_adapter_folder(folder)):
        check_same_start(ctx, folder, folder)
        return raise_on_all_ranks(ctx, lambda: _opened_peft(folder, config, ctx))
    tag = None if options.ckpt_step is None else f"{TAG}{options.ckpt_step}"
    # a measurement of an older model would pass for one of the newest
    fall_back = options.load_fallback and not config.training.skip_train
    may_fall_back = tag is None and fall_back

    def choose(damaged: set[Path]) -> Path | None:
        names = [path.name for path in damaged]
        found = newest_checkpoint(folder, tag=tag, fall_back=fall_back, excluding=names, run=own)
        return None if found is None else found.folder

    return first_whole(ctx, choose, load=folder, may_fall_back=may_fall_back)


def _check_model(checkpoint: Resumable | None, config: Config) -> None:
    """Raise CheckpointError if a run's checkpoint is of another model; foreign ones were compared when opened."""
    if isinstance(checkpoint, Checkpoint):
        saved = _saved_section(checkpoint, "model")
        seq_length = _saved_section(checkpoint, "training").get("seq_length")
        check_lora_options(checkpoint, config)
        check_model_options(checkpoint.folder, saved, seq_length, config)


def _saved_section(checkpoint: Checkpoint, section: str) -> Mapping[str, Any]:
    saved = checkpoint.metadata.get("config")
    found = saved.get(section) if isinstance(saved, dict) else None
    if not isinstance(found, dict):
        raise CheckpointError(f"{checkpoint.folder} does not describe its {section}; load a checkpoint of a run")
    return found


def first_whole(
    ctx: ParallelContext,
    choose: Callable[[set[Path]], Path | None],
    *,
    load: Path | None,
    may_fall_back: bool = True,
    kinds: Collection[str] | None = None,
) -> Checkpoint | None:
    """Return the first undamaged one of the checkpoints that `choose(damaged ones)` returns on rank 0, or None.

    Collective. All ranks share the verification. Each damaged checkpoint is reported in a warning, or raised as
    CheckpointError without `may_fall_back`. `load`: the folder in which every host must find the same one; None: no
    comparison. `kinds`: only tensors of these kinds are verified.
    """
    damaged: set[Path] = set()
    while True:
        chosen = ctx.broadcast_object(raise_on_all_ranks(ctx, lambda: None if ctx.rank else choose(damaged)))
        if load is not None:
            check_same_start(ctx, load, chosen)
        if chosen is None:
            return None
        checkpoint, damage = raise_on_all_ranks(ctx, partial(_opened, chosen, ctx, kinds))
        # all ranks must pass it over, or none
        damages = [found for found in ctx.gather_objects(damage) if found]
        if not damages:
            return checkpoint
        if not may_fall_back:
            raise CheckpointError(damages[0])
        if ctx.rank == 0:
            logger.warning("%s is passed over: %s", chosen, damages[0])
        damaged.add(chosen)


def _opened(folder: Path, ctx: ParallelContext, kinds: Collection[str] | None) -> tuple[Checkpoint | None, str | None]:
    """Return the checkpoint, or the damage that this rank found in its share of it.

    Raises CheckpointError where it cannot be read now, which says nothing of what it holds.
    """
    try:
        checkpoint = Checkpoint(folder)
        checkpoint.verify((ctx.rank, ctx.world_size), kinds=kinds)
    except CheckpointError as error:
        cause = error.__cause__ or error
        # a network that is down for a minute must not cost the newest checkpoint; EIO is also what a bad disk says
        if is_passing(cause) and not (isinstance(cause, OSError) and cause.errno == errno.EIO):
            raise
        return None, str(error)
    return checkpoint, None


def _opened_universal(folder: Path, config: Config, ctx: ParallelContext) -> DeepSpeedCheckpoint:
    from megatron.weights.deepspeed.deepspeed_checkpoint import read  # late: few runs need it

    checkpoint = read(folder, base_config(config))
    checkpoint.verify((ctx.rank, ctx.world_size))
    return checkpoint


def _opened_huggingface(folder: Path, config: Config, ctx: ParallelContext) -> HuggingFaceStart:
    """Raise CheckpointError, also for a step, which such a folder lacks."""
    _refuse_step(folder, config, "a Hugging Face folder")
    start = HuggingFaceStart(folder, base_config(config))
    start.verify((ctx.rank, ctx.world_size))
    return start


def _opened_peft(folder: Path, config: Config, ctx: ParallelContext) -> PeftStart:
    """Raise CheckpointError, also for a step, which such a folder lacks."""
    _refuse_step(folder, config, "a folder of PEFT")
    start = PeftStart(folder, config)
    start.verify((ctx.rank, ctx.world_size))
    return start


def _refuse_step(folder: Path, config: Config, what: str) -> None:
    step = config.checkpoint.ckpt_step
    if step is not None:
        raise CheckpointError(needless_step(str(folder), step, what))


def tokenizer_of(config: Config) -> Path | None:
    """Return the folder of a run's tokenizer files; None: there are none.

    It is that of `tokenizer_model`, or else of the Hugging Face model or adapters that the run started from, or of
    their base.
    """
    given, folders = config.data.tokenizer_model, [config.checkpoint.load, config.lora.lora_base]
    if given is not None:
        path = Path(given)
        found = [path] if path.is_dir() else [path.parent] if path.name in TOKENIZER_FILES else []
    else:
        paths = [Path(folder) for folder in folders if folder is not None]
        found = [path for path in paths if is_huggingface(path) or is_adapter_folder(path)]
    return next((folder for folder in found if tokenizer_files(folder)), None)
