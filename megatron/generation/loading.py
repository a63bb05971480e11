"""Load a model to generate with or to evaluate: from a run's checkpoint of any layout, or a Hugging Face folder, with
or without adapters, onto the layout of now.

Each rank reads the slices that it holds, and nothing of an optimizer's state.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.checkpoint.folders import checkpoint_folders, iteration_of
from megatron.checkpoint.format import CheckpointError
from megatron.checkpoint.reader import Checkpoint, use_average
from megatron.checkpoint.source import AVERAGE, Slice, WeightSource
from megatron.data.index.indexed import DataError
from megatron.data.tokenizers.base import Tokenizer
from megatron.data.tokenizers.build import build_tokenizer, meta_tokenizer, tokenizer_of_run
from megatron.generation.model import InferenceModel, ModelOrigin, build_stage
from megatron.generation.options import LoadOptions
from megatron.generation.saved_model import check_copies, inference_config
from megatron.options.config import Config, ConfigError
from megatron.parallel.context import ParallelContext
from megatron.parallel.operators.nf4 import quantized_weights
from megatron.parallel.shards import Shard, named_parameters, shard_of
from megatron.plan.flops import declared_layers
from megatron.resilience.errors import raise_on_all_ranks
from megatron.runtime.accelerator import check_precision, widened_line
from megatron.runtime.devices import device_of, name_of
from megatron.weights.adapted import WEIGHTS, open_adapters
from megatron.weights.formats import Given
from megatron.weights.loader import Load, open_source, tokenizer_of
from megatron.weights.merging.adapters import MergedSource, merged_config
from megatron.weights.meta.params import is_meta_folder
from megatron.weights.model import check_quantization, config_of_source, source_of
from megatron.weights.tokenizer_files import TOKENIZER_FILES, TOKENIZER_MODEL, tokenizer_files

log = logging.getLogger(__name__)


def load_model(
    options: LoadOptions, ctx: ParallelContext, say: Callable[[str], object] = lambda line: None
) -> InferenceModel:
    """Load the model onto this rank, with its tokenizer if one is found. Collective.

    `say` receives lines for the user. Raises CheckpointError, ConfigError, DataError or DeviceError.
    """
    loaded = _open(options, ctx)
    # each step on all ranks: one that cannot read a file would leave the others in the next collective
    saved = raise_on_all_ranks(ctx, lambda: config_of_source(loaded))
    # the layout is of now: a checkpoint is read by slices, whatever layout has written it
    config = raise_on_all_ranks(ctx, lambda: _config(options, saved, ctx))
    source = loaded
    if config.lora.lora_rank is not None:
        adapted = source = open_adapters(loaded, config, ctx)
        if isinstance(loaded, Checkpoint):
            for line in check_quantization(loaded, config, resumes=False):
                say(line)
        if options.merge_adapter:
            source = MergedSource(adapted, config)
            # nothing of a merged model is trained
            training = dataclasses.replace(config.training, skip_train=True)
            config = dataclasses.replace(merged_config(config), training=training)
    layers, module = raise_on_all_ranks(ctx, lambda: build_stage(config, ctx, ctx.device))
    raise_on_all_ranks(ctx, lambda: _fill(module, source, config, ctx))
    # once all their parts are read: the constants of nf4's blocks are quantised too, over the whole weight
    for _, weight in quantized_weights(module):
        weight.finish()
    # after reading: the sums that identify a base are taken from the slices as they are read
    for line in source.identify(ctx):
        say(line)
    # 16-bit products that this device computes in float32 take longer, which the user should know
    if widened := widened_line(device_of(ctx.device.type), config.training.precision):
        say(widened)
    origin = _origin(options, source, saved)
    if isinstance(loaded, Checkpoint):
        origin = dataclasses.replace(origin, ckpt_step=iteration_of(loaded.folder.name))
    tokenizer = raise_on_all_ranks(ctx, lambda: _tokenizer(options, config, origin))
    return InferenceModel(config, ctx, layers, module, tokenizer=tokenizer, origin=origin)


# What the folder holds


def _open(options: LoadOptions, ctx: ParallelContext) -> WeightSource:
    """Return what the folder holds, its weights verified. Collective."""
    folder = Path(options.load)
    raise_on_all_ranks(ctx, lambda: _check_folder(folder))
    load = Load(
        folder,
        Given(architecture=options.architecture, lora_base=options.lora_base),
        step=options.ckpt_step,
        fall_back=options.load_fallback,
        may_be_one=True,
        kinds=(*WEIGHTS, AVERAGE) if options.weights == AVERAGE else WEIGHTS,
    )
    try:
        source = open_source(load, ctx)
    except CheckpointError as error:
        if options.ckpt_step is not None or options.load_fallback or len(checkpoint_folders(folder)) < 2:
            raise
        remedy = "Here, name another by ckpt_step, or set load_fallback for the newest one that is intact"
        raise CheckpointError(f"the newest checkpoint of load={folder} cannot be used: {error}\n{remedy}") from None
    if source is None:
        raise CheckpointError(f"load={folder} is empty; give the folder of a run's checkpoints, or of a model")
    if options.weights == AVERAGE:
        raise_on_all_ranks(ctx, lambda: use_average(source))
    return source


def _check_folder(folder: Path) -> None:
    if not folder.is_dir():
        there = "is a file" if folder.exists() else "is not there"
        raise CheckpointError(f"load={folder} {there}; give the folder of a run's checkpoints, or of a model")


def _config(options: LoadOptions, saved: Config, ctx: ParallelContext) -> Config:
    """Return the config to compute with: the saved model, and the layout, precision and kernels of now."""
    device = device_of(ctx.device.type)
    config = inference_config(options, saved, name_of(device), lazy=device.is_lazy())
    if faults := check_copies(config, ctx.world_size):
        raise ConfigError(faults)
    check_precision(device, config.training.precision)
    return config


# Weights


def _fill(module: torch.nn.Module, source: WeightSource, config: Config, ctx: ParallelContext) -> None:
    """Read this rank's weights, each part once."""
    names = [layer.name for layer in declared_layers(config)]
    # a tied weight is on two stages, and counts on the first
    counted_elsewhere = {name for name in names if names.count(name) > 1} if not ctx.is_first_stage else set()

    def read(name: str, shard: Shard, start: int, numel: int) -> Tensor:
        # each number counts once in the sums that identify the base, over all copies and tensor-parallel ranks
        is_first = ctx.grad_place(shard)[0] == 0 and ctx.counts(shard)
        is_counted = is_first and name.rpartition(".")[0] not in counted_elsewhere
        return source.read(Slice(name, shard, start, numel, *ctx.cut_of(shard), is_counted))

    with torch.no_grad():
        for name, parameter in named_parameters(module):
            values = read(name, shard_of(parameter), 0, parameter.numel())
            parameter.copy_(values.view(parameter.shape))
        for name, weight in quantized_weights(module):
            weight.fill(partial(read, name, weight.shard))


# Tokenizer


def _origin(options: LoadOptions, source: WeightSource, saved: Config) -> ModelOrigin:
    """Return what lies beside the weights, and beside those of the base where the model has adapters."""
    beside = (part.folder for part in source.parts if not part.holds_run and tokenizer_files(part.folder))
    sources = [source_of(part.metadata) for part in source.parts]
    return ModelOrigin(
        folder=Path(options.load),
        tokenizer=next(beside, None) or tokenizer_of(saved),
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
    if not is_given and origin.tokenizer is not None and is_meta_folder(origin.tokenizer):
        return meta_tokenizer(origin.tokenizer / TOKENIZER_MODEL, options.eod_token)
    # ids alone are enough to score an indexed dataset
    if config.data.tokenizer_type is None:
        return None
    try:
        return tokenizer_of_run(config)
    except DataError as error:
        # a file that the user names must be there; one that a run names may have stayed on its machine
        if is_given:
            raise
        log.warning("%s names a tokenizer that is not to be had: %s", origin.folder, error)
        return None
