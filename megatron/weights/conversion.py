"""Conversion of weights between Hugging Face, native and DeepSpeed universal checkpoints, tensor by tensor."""

from __future__ import annotations

import dataclasses
import logging
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from megatron.checkpoint.foreign import foreign_format
from megatron.checkpoint.format import MANIFEST, CheckpointError, Fragment
from megatron.checkpoint.lineage import Run
from megatron.checkpoint.reader import Checkpoint, open_checkpoint
from megatron.checkpoint.writer import write_checkpoint
from megatron.models.sequential import SequentialModel, build_layers
from megatron.options.config import Config, TrainingConfig
from megatron.options.presets import read_preset
from megatron.options.progress import Progress
from megatron.options.stored import from_dict
from megatron.parallel.context import ParallelContext
from megatron.parallel.losses import gather_logits
from megatron.parallel.shards import named_parameters, shard_of
from megatron.runtime.commands import command_name, train_name
from megatron.weights.deepspeed import deepspeed_checkpoint, universal
from megatron.weights.deepspeed.deepspeed_checkpoint import DeepSpeedCheckpoint
from megatron.weights.folder_files import Precision, is_adapter_folder
from megatron.weights.huggingface import export_huggingface, import_huggingface, parameters_of, tokenizer_files
from megatron.weights.huggingface_config import form_of
from megatron.weights.huggingface_files import DTYPES
from megatron.weights.native import count, native_model, source_of
from megatron.weights.peft.export import NativeAdapter, native_adapter

log = logging.getLogger(__name__)

NATIVE_TAG = "global_step0"

Target = Literal["hf", "native", "universal"]
ReportNumel = Callable[[int], object]
"""Callback for progress: receives the number of elements processed since its previous call."""


@dataclass(frozen=True)
class ModelWeights:
    """Weights of a checkpoint of any format, by our names, as full float32 tensors."""

    kind: str
    """`hf`, `native`, or a layout that deepspeed_checkpoint.py recognises."""
    path: Path
    config: Config
    num_parameters: int
    tensors: Callable[[], Iterator[tuple[str, Tensor]]]
    """Yields (name, tensor), each parameter once."""
    read: Callable[[str], Tensor]
    """Returns one of them."""
    verify: Callable[[], str]
    """Compares the checksums that the files carry, and returns which do and which do not. Raises CheckpointError."""
    read_range: Callable[[str, int, int], Tensor] | None = None
    """(name, start, numel) -> that stretch of the flattened tensor. None: this format gives full tensors only."""
    source: dict[str, Any] | None = None
    """Hugging Face's config.json and generation_config.json, where the model came from there."""
    checkpoint: Checkpoint | DeepSpeedCheckpoint | None = None
    """Whole checkpoint, moments and metadata included; None: Hugging Face's."""

    def reported(self, progress: ReportNumel) -> Iterator[tuple[str, Tensor]]:
        """Yield `tensors`, reporting each when the next is requested."""
        for name, tensor in self.tensors():
            numel = tensor.numel()
            yield name, tensor
            del tensor  # before the next one is made
            progress(numel)


# ---------------------------------------------------------------------------------------------------------------------
# Reading


def recognise(path: Path) -> str:
    """Return the kind of checkpoint in `path`: see `ModelWeights.kind`. Raises CheckpointError."""
    if not path.is_dir():
        if (other := foreign_format(path)) is not None:
            raise CheckpointError(other)
        raise CheckpointError(f"--load {path} is {'a file' if path.exists() else 'not there'}; give a folder")
    has_native = _holds_native(path)
    foreign = None if has_native else deepspeed_checkpoint.recognise(path)
    has_hf = (path / "config.json").exists()
    if has_hf and (has_native or foreign):
        raise CheckpointError(f"--load {path} holds config.json beside a {foreign or 'native'} checkpoint; keep one")
    kind = "hf" if has_hf else "native" if has_native else foreign
    if kind is None and is_adapter_folder(path):
        raise CheckpointError(
            f"--load {path} holds adapters in PEFT's format: train them further with {train_name()} --load, or merge "
            f"them into their base with {command_name('merge_adapter')}"
        )
    if kind is None:
        raise CheckpointError(
            foreign_format(path)
            or f"--load {path} holds no checkpoint: neither config.json (Hugging Face), nor checkpoint.json there or a "
            "folder below (native), nor DeepSpeed's files"
        )
    return kind


def open_any(path: Path, preset: str | None = None, max_drift: float | None = None) -> Checkpoint | DeepSpeedCheckpoint:
    """Open a native or DeepSpeed checkpoint, or the newest of a run's folder; `preset` describes one without a config.

    `max_drift`, of Megatron's copies, replaces deepspeed_checkpoint.MAX_DRIFT. Raises CheckpointError, ConfigError.
    """
    if not path.is_dir():
        raise CheckpointError(f"{path} is {'a file' if path.exists() else 'not there'}; give a checkpoint's folder")
    if not _holds_native(path):
        config = None if preset is None else from_dict(read_preset(preset))
        limit = deepspeed_checkpoint.MAX_DRIFT if max_drift is None else max_drift
        foreign = deepspeed_checkpoint.read(path, config, limit)
        if foreign.uncompared:
            options = ", ".join(foreign.uncompared)
            log.warning("%s does not state %s: compare --config %s with its run yourself", path, options, preset)
        return foreign
    _refuse_options(path, preset, max_drift)
    checkpoint = open_checkpoint(path)
    if checkpoint is None:
        raise CheckpointError(f"{path} holds no checkpoint")
    return checkpoint


def _holds_native(path: Path) -> bool:
    return (path / MANIFEST).exists() or any(path.glob(f"*/{MANIFEST}"))


def _refuse_options(path: Path, preset: str | None, max_drift: float | None) -> None:
    """Raise CheckpointError for options that have no effect on this checkpoint."""
    if preset is not None:
        raise CheckpointError(f"--config {preset}: {path} contains its model's config; leave the option out")
    if max_drift is not None:
        raise CheckpointError(f"--max-drift {max_drift}: {path} has no copies that may differ; leave the option out")


def open_weights(path: Path, preset: str | None = None, max_drift: float | None = None) -> ModelWeights:
    """Open and check a checkpoint of any format; options as of `open_any`. Raises CheckpointError or ConfigError."""
    kind = recognise(path)
    if kind == "hf":
        _refuse_options(path, preset, max_drift)
        hf = import_huggingface(path)
        return ModelWeights("hf", path, hf.config, hf.num_parameters, hf.tensors, hf.read, hf.verify, source=hf.source)
    checkpoint = open_any(path, preset, max_drift)
    if isinstance(checkpoint, Checkpoint):
        native = native_model(checkpoint)
        return ModelWeights(
            kind,
            checkpoint.folder,
            native.config,
            native.num_parameters,
            native.tensors,
            checkpoint.read_full,
            checkpoint.verify,
            native.read_range,
            native.source,
            checkpoint,
        )
    metadata = checkpoint.facts.get("metadata") or {}
    if metadata.get("config") is None:
        raise CheckpointError(
            f"{checkpoint.folder} ({kind}) does not contain its model's config; describe it with --config PRESET"
        )
    config = from_dict(metadata["config"])
    names = parameters_of(config)

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for name in names:
            yield name, checkpoint.read_full(name)

    return ModelWeights(
        kind,
        checkpoint.folder,
        config,
        count(names),
        tensors,
        checkpoint.read_full,
        checkpoint.verify,
        source=source_of(metadata),
        checkpoint=checkpoint,
    )


def open_adapters(path: Path, preset: str | None = None, max_drift: float | None = None) -> NativeAdapter:
    """Open a checkpoint of adapters; options as of `open_any`. Raises CheckpointError."""
    if (kind := recognise(path)) != "native":
        raise CheckpointError(f"--load {path} ({kind}) is a whole model; only checkpoints of a run hold adapters")
    checkpoint = open_any(path, preset, max_drift)
    assert isinstance(checkpoint, Checkpoint)
    return native_adapter(checkpoint)


# ---------------------------------------------------------------------------------------------------------------------
# Writing


def write_native(model: ModelWeights, folder: Path, progress: ReportNumel) -> Checkpoint:
    """Write the weights as the first checkpoint of a run, and open it."""
    shards = parameters_of(model.config)
    dtype = str(DTYPES[model.config.training.precision]).removeprefix("torch.")
    run = Run.new({}, model.checkpoint).to_json()
    metadata = {"run": run, "config": model.config.to_dict(), "progress": asdict(Progress()), "source": model.source}
    fragments = (
        Fragment(name, "weight", shards[name], 0, 1, 0, tensor.flatten(), dtype)
        for name, tensor in model.reported(progress)
    )
    return Checkpoint(write_checkpoint(folder, NATIVE_TAG, fragments, metadata))


def write_universal(model: ModelWeights, folder: Path, progress: ReportNumel) -> None:
    """Write a universal folder, with the moments of the source; a Hugging Face model is written as native first."""
    with tempfile.TemporaryDirectory(prefix=f"{folder.name}.", dir=folder.parent) as native:
        checkpoint = model.checkpoint or write_native(model, Path(native), progress)
        universal.write(checkpoint, folder)


def write_huggingface(
    model: ModelWeights,
    folder: Path,
    *,
    precision: Precision | None,
    max_shard_bytes: int,
    tokenizer: Path | None,
    progress: ReportNumel,
) -> list[str]:
    """Write a Hugging Face folder and return the names of its tokenizer files.

    `tokenizer` is the folder that has them; None: the source, if it is Hugging Face's. `precision` is the run's unless
    given.
    """
    if tokenizer is not None and not tokenizer_files(tokenizer):
        raise CheckpointError(f"--tokenizer {tokenizer} holds no tokenizer.json or other tokenizer files")
    return export_huggingface(
        folder,
        model.config,
        model.reported(progress),
        precision=precision,
        max_shard_bytes=max_shard_bytes,
        source=model.source,
        tokenizer=tokenizer or (model.path if model.kind == "hf" else None),
    )


def needed_bytes(model: ModelWeights, to: Target, precision: Precision) -> int:
    """Return the size of the result; `precision` is that of a Hugging Face folder."""
    width = DTYPES[precision].itemsize if to == "hf" else 4
    if to == "universal":
        # each moment beside the weights; a Hugging Face source needs a native copy meanwhile
        width *= len(model.checkpoint.kinds) if model.checkpoint else 2
    return model.num_parameters * width


# ---------------------------------------------------------------------------------------------------------------------
# Verification of a conversion: every tensor bit by bit, and the logits of our model against transformers'.

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
