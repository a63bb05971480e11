"""Verification of a conversion: every tensor bit by bit, and the logits of our model against transformers'."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from megatron.checkpoint.format import CheckpointError
from megatron.config.options import Config, TrainingConfig
from megatron.interop.conversion import ModelWeights, ReportNumel
from megatron.interop.folder_files import Precision
from megatron.interop.huggingface_config import form_of
from megatron.interop.huggingface_files import DTYPES
from megatron.models.sequential import SequentialModel, build_layers
from megatron.parallel.context import ParallelContext
from megatron.parallel.losses import gather_logits
from megatron.parallel.shards import named_parameters, shard_of

CHUNK_NUMEL = 1 << 22
"""Elements of a tensor compared at a time."""
LOGIT_TOLERANCE = 1e-4
"""Relative to the largest logit. Orders of summation in float32 differ by far less, two models by far more."""


def compare_tensors(source: ModelWeights, result: ModelWeights, precision: Precision, progress: ReportNumel) -> int:
    """Compare every tensor, rounded to the result's `precision`, bit by bit, and return the number of tensors.

    Raises CheckpointError that names the first one that differs.
    """
    dtype, compared = DTYPES[precision], 0
    one, other = (result, source) if source.read_range else (source, result)
    for name, tensor in one.reported(progress):
        step = CHUNK_NUMEL if other.read_range else max(1, tensor.numel())
        for start in range(0, tensor.numel(), step):
            numel = min(step, tensor.numel() - start)
            found = other.read_range(name, start, numel) if other.read_range else other.read(name).flatten()
            # as bytes: NaN equals itself, and minus zero differs from zero
            pair = [side.to(dtype).view(torch.uint8) for side in (tensor.flatten()[start : start + numel], found)]
            if not torch.equal(*pair):
                raise CheckpointError(f"{name} has other values in the result than in the source; nothing was kept")
        compared += 1
        del tensor, found, pair
    return compared


def compare_logits(source: ModelWeights, result: ModelWeights, precision: Precision) -> str:
    """Compare the logits of both for random tokens, in float32 on the CPU, and return the difference as a text.

    One side is Hugging Face's. Raises CheckpointError where they differ.
    """
    model = source.config.model
    length = min(16, source.config.training.seq_length)
    tokens_BS = torch.randint(0, model.vocab_size, (2, length), generator=torch.Generator().manual_seed(0))
    expected, found = (
        their_logits(side, tokens_BS, precision) if side.kind == "hf" else our_logits(side, tokens_BS, precision)
        for side in (source, result)
    )
    difference, largest = float((found - expected).abs().max()), float(expected.abs().max())
    limit = LOGIT_TOLERANCE * largest
    text = f"largest logit difference {difference:.1e}, of logits up to {largest:.3g}"
    if not difference <= limit:  # NaN neither
        raise CheckpointError(f"{text}, above the tolerance of {limit:.1e}: they are two models; nothing was kept")
    return text


def our_logits(side: ModelWeights, tokens_BS: Tensor, precision: Precision) -> Tensor:
    """Return our model's logits [B, S, vocabulary], from the weights rounded to `precision`."""
    ctx = ParallelContext.single()
    plain = dataclasses.replace(side.config.model, attention_backend="sdpa", kernels="plain")
    config = Config(model=plain, training=TrainingConfig(seq_length=side.config.training.seq_length))
    model = SequentialModel(build_layers(config, ctx)).eval()
    parameters = dict(named_parameters(model))
    with torch.no_grad():
        for name, tensor in side.tensors():
            rounded = tensor.to(DTYPES[precision]).float()
            parameters[name].copy_(shard_of(parameters[name]).take(rounded, 0, 1))
        logits_SBV: Tensor = model(tokens_BS, project=lambda outputs: gather_logits(outputs[0], outputs[1], ctx))
    return logits_SBV.transpose(0, 1)


def their_logits(side: ModelWeights, tokens_BS: Tensor, precision: Precision) -> Tensor:
    """Return the logits [B, S, vocabulary] of transformers' model, every weight of which must come from the folder."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model, loaded = getattr(transformers, form_of(side.config.model).class_name).from_pretrained(
        side.path, local_files_only=True, output_loading_info=True, attn_implementation="eager"
    )
    missing = [*loaded["missing_keys"], *loaded["mismatched_keys"]]
    if missing:
        raise CheckpointError(f"transformers finds no {missing[0]} in {side.path}; nothing was kept")
    with torch.no_grad():
        model = model.eval().float()
        for parameter in model.parameters():  # not the buffers: the rotary frequencies stay float32
            parameter.copy_(parameter.to(DTYPES[precision]))
        logits: Tensor = model(tokens_BS, use_cache=False).logits
    return logits
