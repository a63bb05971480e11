"""The one way in for weights: what a run, a generation or an evaluation loads is opened, and verified by all ranks.

Each rank then reads the slices that it needs of the source.
"""

from __future__ import annotations

import dataclasses
import errno
import logging
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from torch import Tensor

from megatron.checkpoint.folders import MANIFEST, Run
from megatron.checkpoint.foreign import deepspeed_folder, megatron_core_folder, megatron_lm_folder, needless_step
from megatron.checkpoint.format import CheckpointError
from megatron.checkpoint.reader import Checkpoint, newest_checkpoint
from megatron.checkpoint.source import Slice, WeightSource
from megatron.models.rules import upcycle_faults
from megatron.options.config import Config
from megatron.parallel.context import ParallelContext
from megatron.resilience.errors import is_passing, raise_on_all_ranks
from megatron.resilience.host_consistency import check_same_start
from megatron.weights.formats import (
    DEEPSPEED,
    FORMATS,
    MEGATRON_CORE,
    MEGATRON_LM,
    NATIVE,
    TORCHTITAN,
    Given,
    recognise,
)
from megatron.weights.huggingface import parameters_of
from megatron.weights.meta.torchtitan_folder import titan_folder
from megatron.weights.model import check_model, config_of_source, holds_adapters
from megatron.weights.tokenizer_files import TOKENIZER_FILES, tokenizer_files

TAG = "global_step"
ROUTER = re.compile(r"\.mlp\.router\.\w+$")
EXPERT = re.compile(r"\.mlp\.experts\.\d+\.")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Load:
    """Request for the weights in a folder."""

    folder: Path
    given: Given
    step: int | None = None
    """Iteration of a run's checkpoint. None: the newest one."""
    fall_back: bool = True
    """The newest one that is whole may take the place of a newer one that is damaged; never of `step`."""
    own: Run | None = None
    """Only checkpoints of this run, in a folder that others use too."""
    is_deepspeed: bool = False
    """The folder holds a checkpoint of DeepSpeed or Megatron-DeepSpeed, which are not recognised by themselves."""
    may_be_one: bool = False
    """`folder` may be one checkpoint of a run itself."""
    kinds: Collection[str] | None = None
    """Kinds of tensors that will be read; None: all."""


def open_source(load: Load, ctx: ParallelContext) -> WeightSource | None:
    """Return what the folder holds, verified and the same on every host; None: nothing, for a new run. Collective.

    safetensors of Hugging Face and PEFT carry no checksum. Raises CheckpointError.
    """

    def recognised() -> str | None:
        if ctx.rank:
            return None
        return DEEPSPEED.name if load.is_deepspeed else recognise(load.folder).name

    # rank 0 decides for all: ranks that see other files would wait in other collectives
    known = FORMATS[ctx.broadcast_object(raise_on_all_ranks(ctx, recognised))]
    if known is NATIVE:
        return _open_run(load, ctx)
    folder = load.folder
    if known in (DEEPSPEED, TORCHTITAN):
        find = deepspeed_folder if known is DEEPSPEED else titan_folder
        folder = raise_on_all_ranks(ctx, lambda: find(folder)) or folder
    elif known in (MEGATRON_CORE, MEGATRON_LM):
        newest = megatron_core_folder if known is MEGATRON_CORE else megatron_lm_folder
        # the newest may change while ranks look: rank 0's counts
        chosen = raise_on_all_ranks(ctx, lambda: None if ctx.rank else newest(load.folder, load.step))
        folder = ctx.broadcast_object(chosen) or folder
    elif load.step is not None:
        raise CheckpointError(needless_step(str(folder), load.step, known.title))
    # before it is opened: hosts whose disks differ would raise different errors, or none
    check_same_start(ctx, load.folder, folder)
    source = raise_on_all_ranks(ctx, lambda: known.open(folder, load.given))
    raise_on_all_ranks(ctx, lambda: source.verify((ctx.rank, ctx.world_size)))
    return source


def _open_run(load: Load, ctx: ParallelContext) -> Checkpoint | None:
    """Return the checkpoint of the step, or the newest one, with every byte verified. Collective."""
    # as rank 0 sees it: ranks that see other files would wait in other collectives
    is_one = load.may_be_one and ctx.broadcast_object((load.folder / MANIFEST).exists())
    if is_one and load.step is not None:
        raise CheckpointError(
            f"load={load.folder} is one checkpoint; leave ckpt_step out, or give {load.folder.parent}"
        )
    tag = None if load.step is None else f"{TAG}{load.step}"

    def choose(damaged: set[Path]) -> Path | None:
        if is_one:
            return load.folder
        names = [path.name for path in damaged]
        newest = newest_checkpoint(load.folder, tag=tag, fall_back=load.fall_back, excluding=names, run=load.own)
        return None if newest is None else newest.folder

    may_fall_back = load.fall_back and tag is None and not is_one
    checkpoint = first_whole(ctx, choose, load=load.folder, may_fall_back=may_fall_back, kinds=load.kinds)
    config = load.given.config
    if checkpoint is not None and config is not None:
        raise_on_all_ranks(ctx, lambda: check_model(checkpoint, config))
    return checkpoint


def find_checkpoint(config: Config, ctx: ParallelContext, own: Run | None = None) -> WeightSource | None:
    """Return what a run starts from, or None for a new run; `own` as in `Load`. Collective. Raises CheckpointError."""
    options = config.checkpoint
    if options.load is None:
        return None
    load = Load(
        Path(options.load),
        # a dense model that experts start from is another one than the run's
        Given(architecture=config.model.architecture) if options.upcycle else Given(config),
        step=options.ckpt_step,
        # a measurement of an older model would pass for one of the newest
        fall_back=options.load_fallback and not config.training.skip_train,
        own=own,
        is_deepspeed=options.universal_checkpoint,
    )
    source = open_source(load, ctx)
    if source is None or not options.upcycle:
        return source
    return raise_on_all_ranks(ctx, lambda: UpcycledSource(source, config))


class UpcycledSource(WeightSource):
    """A dense model as the start of one with experts: each expert is a copy of the MLP, and the routers are drawn.

    Since the weights of a token's experts add up to 1, the model computes at first what the dense one does.
    Source: Komatsuzaki et al. 2022 (arXiv:2212.05055); He et al. 2024 (arXiv:2410.07524).

    Raises CheckpointError where the model of `config` would not compute what the dense one does.
    """

    format, holds_run = "dense", False

    def __init__(self, dense: WeightSource, config: Config) -> None:
        self._dense, self._seed = dense, config.training.seed
        self.title = f"{dense.title}, its MLPs as experts"
        if holds_adapters(dense):
            raise CheckpointError(f"upcycle: {dense.folder} holds adapters, not a whole model; merge them first")
        if faults := list(upcycle_faults(config, config_of_source(dense))):
            raise CheckpointError(f"{dense.folder}: {'; '.join(faults)}")
        super().__init__(dense.folder, parameters_of(config), metadata=dense.metadata, config=config)

    def verify(self, share: tuple[int, int] = (0, 1), kinds: Collection[str] | None = None) -> str:
        return self._dense.verify(share, kinds)

    def read(self, at: Slice, kind: str = "weight") -> Tensor:
        if kind not in self.kinds or at.name not in self.parameters:
            raise CheckpointError(f"{self.folder} has no {kind} of {at.name}: it is of another model")
        if ROUTER.search(at.name):
            drawn = at.shard.initial(at.name, self._seed, at.tensor_rank, at.tensor_size).flatten()
            return drawn[at.start : at.start + at.numel]
        shard = dataclasses.replace(at.shard, expert=None, num_experts=0)
        return self._dense.read(dataclasses.replace(at, name=EXPERT.sub(".mlp.", at.name), shard=shard))


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
        # one rank chooses, so that all open the same one while another run may be saving there
        chosen = ctx.broadcast_object(raise_on_all_ranks(ctx, lambda: None if ctx.rank else choose(damaged)))
        if load is not None:
            check_same_start(ctx, load, chosen)
        if chosen is None:
            return None
        checkpoint, damage = raise_on_all_ranks(ctx, partial(_opened, chosen, ctx, kinds))
        # all ranks must pass it over, or none
        damages = [each for each in ctx.gather_objects(damage) if each]
        if not damages:
            return checkpoint
        if not may_fall_back:
            raise CheckpointError(damages[0])
        if ctx.rank == 0:
            logger.warning("%s is passed over: %s", chosen, damages[0])
        damaged.add(chosen)


def _opened(folder: Path, ctx: ParallelContext, kinds: Collection[str] | None) -> tuple[Checkpoint | None, str | None]:
    """Return the checkpoint, or the damage in this rank's share of it.

    Raises CheckpointError where it cannot be read now, which says nothing of what it holds.
    """
    try:
        checkpoint = Checkpoint(folder)
        checkpoint.verify((ctx.rank, ctx.world_size), kinds)
    except CheckpointError as error:
        cause = error.__cause__ or error
        # a network that is down for a minute must not cost the newest checkpoint; EIO is also what a bad disk says
        if is_passing(cause) and not (isinstance(cause, OSError) and cause.errno == errno.EIO):
            raise
        return None, str(error)
    return checkpoint, None


def tokenizer_of(config: Config) -> Path | None:
    """Return the folder of a run's tokenizer files; None: there are none.

    It is that of `tokenizer_model`, or else of the Hugging Face model or adapters that the run started from, or of
    their base.
    """
    folders: list[Path] = []
    if config.data.tokenizer_model is not None:
        path = Path(config.data.tokenizer_model)
        if path.is_dir():
            folders = [path]
        elif path.name in TOKENIZER_FILES:
            folders = [path.parent]
    else:
        paths = [Path(folder) for folder in (config.checkpoint.load, config.lora.lora_base) if folder is not None]
        # checkpoints of a run hold no tokenizer
        folders = [path for path in paths if recognise(path) is not NATIVE]
    return next((folder for folder in folders if tokenizer_files(folder)), None)
