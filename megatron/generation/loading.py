"""Load a model to generate with or to evaluate: from a run's checkpoint of any layout, or a Hugging Face folder, with
or without adapters, onto the layout of now.

Each rank reads the slices that it holds, and nothing of an optimizer's state.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.checkpoint.format import MANIFEST, CheckpointError, iteration_of
from megatron.checkpoint.reader import Checkpoint, checkpoint_folders, newest_checkpoint, open_checkpoint
from megatron.data.index.indexed import DataError
from megatron.data.tokenizers.base import Tokenizer
from megatron.data.tokenizers.build import build_tokenizer, tokenizer_of_run
from megatron.generation.model import InferenceModel, ModelOrigin, build_stage
from megatron.generation.options import LoadOptions
from megatron.generation.saved_model import inference_config
from megatron.models.rules import check_layout
from megatron.options.config import Config, ConfigError
from megatron.parallel.context import ParallelContext
from megatron.parallel.operators.nf4 import quantized_weights
from megatron.parallel.shards import Shard, declared_shards, named_parameters, shard_of
from megatron.plan.flops import declared_layers
from megatron.resilience.errors import raise_on_all_ranks
from megatron.resilience.host_consistency import check_same_start
from megatron.runtime.accelerator import check_precision, is_lazy, widened_line
from megatron.weights.adapter_start import AdapterStart, check_quantization, holds_adapters, open_adapters
from megatron.weights.folder_files import is_adapter_folder
from megatron.weights.foreign_files import ForeignFiles
from megatron.weights.huggingface import TOKENIZER_FILES, tokenizer_files
from megatron.weights.huggingface_config import find_base
from megatron.weights.huggingface_start import HuggingFaceStart, is_huggingface
from megatron.weights.merging import AdapterMerge, merged_config
from megatron.weights.native import config_of_run, source_of
from megatron.weights.opening import TAG, Resumable, first_whole, tokenizer_of
from megatron.weights.peft.folder import open_adapter
from megatron.weights.peft.start import PeftStart, with_options_of

WEIGHTS = ("weight",)

log = logging.getLogger(__name__)


def load_model(
    options: LoadOptions, ctx: ParallelContext, say: Callable[[str], object] = lambda line: None
) -> InferenceModel:
    """Load the model onto this rank, with its tokenizer if one is found. Collective.

    `say` receives lines for the user. Raises CheckpointError, ConfigError, DataError or DeviceError.
    """
    found, saved = _open(options, ctx)
    config = raise_on_all_ranks(ctx, lambda: _config(options, saved, ctx))
    source: Resumable | AdapterStart = found
    if config.lora.lora_rank is not None:
        source = open_adapters(found, config, ctx)
        if isinstance(found, Checkpoint):
            for line in check_quantization(found, config, resumes=False):
                say(line)
    reader, merge = _WeightReader(source, config, ctx), None
    if options.merge_adapter:
        merge = AdapterMerge(config, reader.whole, ctx.tensor_rank, ctx.tensor_size)
        config = _merged(config)
    layers, module = raise_on_all_ranks(ctx, lambda: build_stage(config, ctx, ctx.device))
    raise_on_all_ranks(ctx, lambda: _fill(module, reader, merge, ctx))
    for _, weight in quantized_weights(module):
        weight.finish()
    if isinstance(source, AdapterStart):
        for line in source.check_base(source.identity(ctx.gather_objects(reader.totals))):
            say(line)
    if widened := widened_line(ctx.device.type, config.training.precision):
        say(widened)
    step = iteration_of(found.folder.name) if isinstance(found, Checkpoint) else None
    origin = dataclasses.replace(_origin(options, source, saved), ckpt_step=step)
    tokenizer = raise_on_all_ranks(ctx, lambda: _tokenizer(options, config, origin))
    return InferenceModel(config, ctx, layers, module, tokenizer=tokenizer, origin=origin)


# ---------------------------------------------------------------------------------------------------------------------
# What the folder holds


def _open(options: LoadOptions, ctx: ParallelContext) -> tuple[Resumable, Config]:
    """Return what the folder holds, its weights verified, and the options of the model in it. Collective."""
    folder = Path(options.load)
    kind = ctx.broadcast_object(raise_on_all_ranks(ctx, lambda: None if ctx.rank else _kind(folder, options)))
    if kind == "run":
        checkpoint = _open_checkpoint(folder, options, ctx)
        return checkpoint, raise_on_all_ranks(ctx, lambda: config_of_run(checkpoint))
    check_same_start(ctx, folder, folder)
    found: HuggingFaceStart | PeftStart
    if kind == "huggingface":
        found = raise_on_all_ranks(ctx, lambda: HuggingFaceStart(folder))
        saved = found.config
    else:
        saved = raise_on_all_ranks(ctx, lambda: _with_adapters(folder, options))
        found = raise_on_all_ranks(ctx, lambda: PeftStart(folder, saved))
    raise_on_all_ranks(ctx, lambda: found.verify((ctx.rank, ctx.world_size)))
    return found, saved


def _kind(folder: Path, options: LoadOptions) -> str:
    if not folder.is_dir():
        there = "is a file" if folder.exists() else "is not there"
        raise CheckpointError(f"load={folder} {there}; give the folder of a run's checkpoints, or of a model")
    kind = "huggingface" if is_huggingface(folder) else "adapters" if is_adapter_folder(folder) else "run"
    if kind != "run" and options.ckpt_step is not None:
        raise CheckpointError(f"load={folder} holds one model, not the steps of a run; leave ckpt_step out")
    if kind == "huggingface" and options.lora_base is not None:
        raise CheckpointError(
            f"load={folder} and lora_base={options.lora_base} are both whole models; leave lora_base out, or give "
            "the folder of adapters as load"
        )
    return kind


def _open_checkpoint(folder: Path, options: LoadOptions, ctx: ParallelContext) -> Checkpoint:
    """Open a run's checkpoint: the folder itself, the one of `ckpt_step`, or the newest that is whole. Collective."""
    step, alone = options.ckpt_step, ctx.broadcast_object((folder / MANIFEST).exists())
    fall_back = options.load_fallback and step is None and not alone
    if alone and step is not None:
        raise CheckpointError(f"load={folder} is one checkpoint; leave ckpt_step out, or give {folder.parent}")

    def choose(damaged: set[Path]) -> Path | None:
        if alone:
            return folder
        tag = None if step is None else f"{TAG}{step}"
        found = newest_checkpoint(folder, tag=tag, fall_back=fall_back, excluding=[path.name for path in damaged])
        return None if found is None else found.folder

    try:
        found = first_whole(ctx, choose, load=folder, may_fall_back=fall_back, kinds=WEIGHTS)
    except CheckpointError as error:
        if alone or step is not None or fall_back or len(checkpoint_folders(folder)) < 2:
            raise
        remedy = "Here, name another by ckpt_step, or set load_fallback for the newest one that is intact"
        raise CheckpointError(f"the newest checkpoint of load={folder} cannot be used: {error}\n{remedy}") from None
    if found is None:
        raise CheckpointError(f"load={folder} is empty; give the folder of a run's checkpoints, or of a model")
    return found


def _with_adapters(folder: Path, options: LoadOptions) -> Config:
    """Return the options of PEFT's adapters on their base."""
    named = open_adapter(folder, ForeignFiles()).base
    base = find_base(folder, named.name, named.revision, options.lora_base)
    if not base.is_dir():
        raise CheckpointError(f"lora_base={base} is not there; give the folder of the base model")
    if is_huggingface(base):
        config = HuggingFaceStart(base).config
    else:
        checkpoint = open_checkpoint(base)
        if checkpoint is None or holds_adapters(checkpoint):
            raise CheckpointError(f"lora_base={base} holds no whole model; give the folder of the base model")
        config = config_of_run(checkpoint)
    return with_options_of(config, folder, ())


def _config(options: LoadOptions, saved: Config, ctx: ParallelContext) -> Config:
    """Return the config to compute with: the saved model, and the layout, precision and kernels of now."""
    config = inference_config(options, saved, ctx.device.type, lazy=is_lazy(ctx.device.type))
    if faults := check_layout(config, ctx.world_size):
        raise ConfigError(faults)
    check_precision(ctx.device.type, config.training.precision)
    return config


def _merged(config: Config) -> Config:
    """Return the config of the model with its adapters merged, of which nothing is trained."""
    config = merged_config(config)
    return dataclasses.replace(config, training=dataclasses.replace(config.training, skip_train=True))


# ---------------------------------------------------------------------------------------------------------------------
# Weights


class _WeightReader:
    """Reader of this rank's weights, and with adapters of the sums of the base's bits, of what no other rank counts."""

    def __init__(self, source: Any, config: Config, ctx: ParallelContext) -> None:
        """`config`: with the adapters, also where they are merged."""
        layers = declared_layers(config)
        names = [layer.name for layer in layers]
        self._source, self._ctx = source, ctx
        self._tied = {name for name in names if names.count(name) > 1} if not ctx.is_first_stage else set()
        shards = declared_shards(layers) if isinstance(source, AdapterStart) else {}
        self._frozen = {name for name, shard in shards.items() if not (shard.added or shard.trained)}
        self._sums = source.new_sums() if isinstance(source, AdapterStart) else None

    @property
    def totals(self) -> dict[str, list[int]]:
        """Sums of the base, of what this rank alone counts."""
        return {} if self._sums is None else self._sums.totals

    def read(self, name: str, shard: Shard, start: int, numel: int) -> Tensor:
        """Return a part of a local tensor, float32 [numel]. Each part is read once, and counted."""
        ctx = self._ctx
        place = (0, 1) if shard.dim is None else (ctx.tensor_rank, ctx.tensor_size)
        values: Tensor = self._source.read(name, "weight", shard, *place, start, numel)
        is_first = ctx.batch_rank == 0 and (shard.dim is not None or ctx.tensor_rank == 0)
        if self._sums is not None and is_first and name in self._frozen and name.rpartition(".")[0] not in self._tied:
            self._sums.add(name, shard, *place, start, values)
        return values

    def whole(self, name: str, shard: Shard, tensor_rank: int, tensor_size: int) -> Tensor:
        """Return a local tensor of a rank, float32, which is not counted."""
        place = (0, 1) if shard.dim is None else (tensor_rank, tensor_size)
        shape = shard.local_shape(place[1])
        values: Tensor = self._source.read(name, "weight", shard, *place, 0, math.prod(shape))
        return values.view(shape)


def _fill(module: torch.nn.Module, reader: _WeightReader, merge: AdapterMerge | None, ctx: ParallelContext) -> None:
    """Read this rank's weights, with adapters merged into them by `merge`."""
    with torch.no_grad():
        for name, parameter in named_parameters(module):
            shard, held = shard_of(parameter), name if merge is None else merge.held(name)
            if held == name:
                values = reader.read(name, shard, 0, parameter.numel()).view(parameter.shape)
            else:  # counted where it is the embedding
                values = reader.whole(held, shard, ctx.tensor_rank, ctx.tensor_size)
            parameter.copy_(values if merge is None else merge.merged(name, values))
        for name, weight in quantized_weights(module):
            weight.fill(partial(reader.read, name, weight.shard))


# ---------------------------------------------------------------------------------------------------------------------
# Tokenizer


def _origin(options: LoadOptions, source: Any, saved: Config) -> ModelOrigin:
    """Find what lies beside the weights. `source`: the base too, where the model has adapters."""
    folder, parts = Path(options.load), [source]
    if isinstance(source, AdapterStart):
        folder, parts = source.folder, [source.trained, source.base]
    folders = [part.folder for part in parts if isinstance(part, HuggingFaceStart | PeftStart)]
    sources = [source_of(part.metadata) for part in parts if part is not None]
    found = [path for path in folders if tokenizer_files(path)]
    if not found and (of_run := tokenizer_of(saved)) is not None:
        found = [of_run]
    return ModelOrigin(
        folder=folder,
        tokenizer=next(iter(found), None),
        generation_config=next((_generation_config(each) for each in sources if each is not None), None),
    )


def _generation_config(source: dict[str, Any]) -> dict[str, Any] | None:
    """Return the generation config of a Hugging Face model: as transformers, that of config.json where it has none."""
    found: dict[str, Any] | None = source.get("generation_config") or source.get("config")
    return found


def _tokenizer(options: LoadOptions, config: Config, origin: ModelOrigin) -> Tokenizer | None:
    """Return the tokenizer of the options, of the folder, or of the run that saved the checkpoint."""
    is_given = options.tokenizer_type is not None or options.tokenizer_model is not None
    if not is_given and origin.tokenizer is not None and (origin.tokenizer / TOKENIZER_FILES[0]).is_file():
        return build_tokenizer("HFTokenizer", str(origin.tokenizer), eod_token=options.eod_token)
    if config.data.tokenizer_type is None:
        return None
    try:
        return tokenizer_of_run(config)
    except DataError as error:
        if is_given:
            raise
        log.warning("%s names a tokenizer that is not to be had: %s", origin.folder, error)
        return None
