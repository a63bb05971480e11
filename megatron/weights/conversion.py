"""Conversion of weights between Hugging Face, native and DeepSpeed universal checkpoints, tensor by tensor."""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import multiprocessing
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from megatron.checkpoint.folders import Run
from megatron.checkpoint.foreign import foreign_format
from megatron.checkpoint.format import CheckpointError, Fragment
from megatron.checkpoint.reader import Checkpoint, use_average
from megatron.checkpoint.source import AVERAGE, Slice, WeightSource
from megatron.checkpoint.writer import ManifestEntries, Part, write_checkpoint, write_checkpoint_by, write_files
from megatron.models.sequential import SequentialModel, build_layers
from megatron.options.config import Config, TrainingConfig
from megatron.options.progress import Progress
from megatron.options.stored import from_dict, read_preset
from megatron.parallel.context import ParallelContext
from megatron.parallel.losses import gather_logits
from megatron.parallel.shards import named_parameters, shard_of
from megatron.runtime.accelerator import free_memory_bytes
from megatron.runtime.commands import command_name, train_name
from megatron.weights.deepspeed import universal
from megatron.weights.folder_files import Precision
from megatron.weights.formats import (
    DEEPSPEED,
    HUGGINGFACE,
    MEGATRON_CORE,
    MEGATRON_LM,
    META,
    NATIVE,
    PEFT,
    TORCHTITAN,
    Format,
    Given,
)
from megatron.weights.huggingface import NameMap, export_huggingface, name_map, parameters_of, write_tensors
from megatron.weights.huggingface_config import form_of
from megatron.weights.huggingface_files import DTYPES, WeightsWriter
from megatron.weights.model import ReportNumel, WholeModel, whole_model
from megatron.weights.peft.export import NativeAdapter, native_adapter
from megatron.weights.tokenizer_files import tokenizer_files

log = logging.getLogger(__name__)

NATIVE_TAG = "global_step0"

Target = Literal["hf", "native", "universal", "megatron-core"]
CHUNK_NUMEL = 1 << 22
"""Elements of a tensor compared at a time."""
LOGIT_TOLERANCE = 1e-4
"""Relative to the largest logit. Orders of summation in float32 differ by far less, two models by far more."""


def recognise(path: Path) -> Format:
    """Return the format of the checkpoint in `path`. Raises CheckpointError."""
    if not path.is_dir():
        there = "a file" if path.exists() else "not there"
        raise CheckpointError(foreign_format(path) or f"--load {path} is {there}; give a folder")
    # apart from config.json, to see whether a folder is two things at once
    held = next((known for known in (NATIVE, DEEPSPEED, MEGATRON_CORE, MEGATRON_LM) if known.holds(path)), None)
    if TORCHTITAN.holds(path):
        return TORCHTITAN
    has_config = (path / "config.json").exists()
    if held is not None and has_config:
        raise CheckpointError(f"--load {path} holds config.json beside a {held.name} checkpoint; keep one")
    if held is not None:
        return held
    if has_config:
        return HUGGINGFACE
    if META.holds(path):
        return META
    if PEFT.holds(path):
        raise CheckpointError(
            f"--load {path} holds adapters in PEFT's format: train them further with {train_name()} --load, or merge "
            f"them into their base with {command_name('merge_adapter')}"
        )
    raise CheckpointError(
        foreign_format(path)
        or f"--load {path} holds no checkpoint: neither config.json (Hugging Face), nor params.json (Meta), nor "
        "checkpoint.json there or a folder below (native), nor the files of DeepSpeed, megatron-core or Megatron-LM"
    )


@dataclass(frozen=True)
class Opening:
    """Way to open a checkpoint, by which each process opens one for itself."""

    path: Path
    preset: str | None = None
    """Describes a model without a config."""
    max_drift: float | None = None
    """Largest of Megatron's copies; replaces deepspeed_checkpoint.MAX_DRIFT."""
    architecture: str | None = None
    """Family outside this package that a folder of transformers may be of."""
    weights: str = "trained"
    """Or "ema", the moving average of a run's."""


def open_any(opening: Opening) -> WeightSource:
    """Open a checkpoint of a run, of DeepSpeed or of Megatron-LM, or the newest of a run's folder.

    Raises CheckpointError, ConfigError.
    """
    path = opening.path
    if not path.is_dir():
        raise CheckpointError(f"{path} is {'a file' if path.exists() else 'not there'}; give a checkpoint's folder")
    known = next((known for known in (NATIVE, MEGATRON_CORE, MEGATRON_LM) if known.holds(path)), DEEPSPEED)
    return _opened(opening, known)


def _opened(opening: Opening, known: Format) -> WeightSource:
    """Open a folder of this format. Raises CheckpointError also for options that would have no effect on it."""
    path, preset, max_drift, architecture = opening.path, opening.preset, opening.max_drift, opening.architecture
    if known not in (DEEPSPEED, MEGATRON_CORE, MEGATRON_LM, TORCHTITAN) and preset is not None:
        raise CheckpointError(f"--config {preset}: {path} contains its model's config; leave the option out")
    if known not in (DEEPSPEED, MEGATRON_LM) and max_drift is not None:
        raise CheckpointError(f"--max-drift {max_drift}: {path} has no copies that may differ; leave the option out")
    if known is not HUGGINGFACE and architecture is not None:
        raise CheckpointError(f"--architecture {architecture}: {path} names its own family; leave the option out")
    config = None if preset is None else from_dict(read_preset(preset))
    source = known.open(path, Given(config, architecture=architecture, max_drift=max_drift))
    if source.uncompared:
        options = ", ".join(source.uncompared)
        log.warning("%s does not state %s: compare --config %s with its run yourself", path, options, preset)
    return source


def open_model(opening: Opening) -> WholeModel:
    """Open and check a whole model in any format. Raises CheckpointError or ConfigError."""
    known = recognise(opening.path)
    source = _opened(opening, known)
    if opening.weights == AVERAGE:
        use_average(source)
    if known is DEEPSPEED and source.config is None:
        raise CheckpointError(
            f"{source.folder} ({source.title}) does not contain its model's config; describe it with --config PRESET"
        )
    return whole_model(source)


# ---------------------------------------------------------------------------------------------------------------------
# Processes, each of which converts shares of the parameters


SMALL_MODEL = 50_000_000
"""Parameters below which starting processes costs more than they save."""
SHARES_OF_WORKER = 4
"""Shares for each process, by turns as they end: one that is slower gets fewer."""
T = TypeVar("T")


_opened_by = functools.cache(open_model)
"""The model of an opening, opened once in each process."""


def num_workers(model: WholeModel, given: int | None) -> int:
    """Return how many processes convert a model: as given, else the cores whose tensors half of the memory holds."""
    if given is not None:
        return given
    if model.num_parameters < SMALL_MODEL:
        return 1
    # each has its largest tensor in float32, and what it makes of it
    largest = 8 * max(math.prod(shard.shape) for shard in model.source.parameters.values())
    fitting = free_memory_bytes() // (2 * largest)
    return max(1, min(len(os.sched_getaffinity(0)), fitting))


class Workers:
    """Processes that open a model again, and work on shares of its parameters. A context manager."""

    def __init__(self, model: WholeModel, opening: Opening, count: int) -> None:
        self._model, self._opening, self.count = model, opening, count
        # forked, all of them now: otherwise each would import torch for longer than it works on many a model
        self._pool = ProcessPoolExecutor(count, multiprocessing.get_context("fork"), initializer=_begin_worker)
        self._pool.submit(_begin_worker).result()

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def shares(self) -> list[list[str]]:
        """Return neighbouring parameters, in the order of the model, in shares of about the same size."""
        size = self._model.num_parameters / (SHARES_OF_WORKER * self.count)
        shares: list[list[str]] = [[]]
        numel = 0
        for name, shard in self._model.source.parameters.items():
            if shares[-1] and numel >= size * len(shares):
                shares.append([])
            shares[-1].append(name)
            numel += math.prod(shard.shape)
        return shares

    def verify(self) -> str:
        """Compare the source's checksums, and return what was checked."""
        calls = [(_verify_share, (number, self.count)) for number in range(self.count)]
        return self._results(calls)[0]

    def on_shares(self, function: Callable[..., T], progress: ReportNumel, *arguments: Any) -> list[T]:
        """Return function(opening, names, number of the share, *arguments) of all shares, in order."""
        shares = self.shares()
        sizes = [sum(math.prod(self._model.source.parameters[name].shape) for name in names) for names in shares]
        calls = [(function, names, number, *arguments) for number, names in enumerate(shares)]
        return self._results(calls, lambda number: progress(sizes[number]))

    def _results(
        self, calls: Sequence[tuple[Any, ...]], done: Callable[[int], object] = lambda number: None
    ) -> list[Any]:
        futures = {self._pool.submit(call[0], self._opening, *call[1:]): at for at, call in enumerate(calls)}
        try:
            for future in as_completed(futures):
                future.result()
                done(futures[future])
        except BrokenProcessPool:
            raise CheckpointError(
                f"a process of the {self.count} that converted {self._opening.path} was killed, perhaps for want of "
                "memory; give a smaller --workers"
            ) from None
        return [future.result() for future in futures]


def _begin_worker() -> None:
    # never the threads of OpenMP, which a fork does not have
    torch.set_num_threads(1)


def _verify_share(opening: Opening, share: tuple[int, int]) -> str:
    return _opened_by(opening).source.verify(share)


def _write_huggingface_share(
    opening: Opening, names: list[str], number: int, folder: Path, precision: Precision, max_shard_bytes: int
) -> None:
    model = _opened_by(opening)
    mapped = name_map(model.config)
    with WeightsWriter(folder, mapped.written_shapes, precision, max_shard_bytes, joins=True) as writer:
        write_tensors(writer, mapped, model.tensors(names=names), names)


def _write_native_share(opening: Opening, names: list[str], number: int, part: Part, count: int) -> ManifestEntries:
    model = _opened_by(opening)
    return write_files(dataclasses.replace(part, first=number, step=count), _fragments(model, names=names))


def _write_universal_share(opening: Opening, names: list[str], number: int, copy: Opening | None, folder: Path) -> None:
    # of a source that universal folders are not made of, its native copy
    universal.write_parameters(_opened_by(copy or opening).source, folder, names)


def _compare_share(opening: Opening, names: list[str], number: int, result: Opening, precision: Precision) -> int:
    return compare_tensors(_opened_by(opening), _opened_by(result), precision, names=names)


def open_adapters(opening: Opening) -> NativeAdapter:
    """Open a checkpoint of adapters. Raises CheckpointError."""
    path = opening.path
    known = recognise(path)
    if known is not NATIVE:
        raise CheckpointError(f"--load {path} is {known.title}, a whole model; only checkpoints of a run hold adapters")
    checkpoint = _opened(opening, known)
    assert isinstance(checkpoint, Checkpoint)
    return native_adapter(checkpoint)


def write_native(model: WholeModel, folder: Path, progress: ReportNumel, workers: Workers | None = None) -> Checkpoint:
    """Write the weights as the first checkpoint of a run, and open it."""
    run = Run.new({}, model.source if model.source.holds_run else None).to_json()
    metadata = {
        "run": run,
        "config": model.config.to_dict(),
        "progress": asdict(Progress()),
        "source": model.huggingface,
    }
    if workers is None:
        return Checkpoint(write_checkpoint(folder, NATIVE_TAG, _fragments(model, progress), metadata))

    def write(part: Part) -> ManifestEntries:
        entries = ManifestEntries({}, {})
        for of_share in workers.on_shares(_write_native_share, progress, part, len(workers.shares())):
            entries.merge(vars(of_share))
        return entries

    return Checkpoint(write_checkpoint_by(folder, NATIVE_TAG, metadata, write))


def _fragments(
    model: WholeModel, progress: ReportNumel = lambda numel: None, names: Sequence[str] | None = None
) -> Iterator[Fragment]:
    shards = parameters_of(model.config)
    dtype = str(DTYPES[model.config.training.precision]).removeprefix("torch.")
    for name, tensor in model.tensors(progress, names):
        yield Fragment(name, "weight", shards[name], 0, 1, 0, tensor.flatten(), dtype)


def write_universal(model: WholeModel, folder: Path, progress: ReportNumel, workers: Workers | None = None) -> None:
    """Write a universal folder, with the moments of the source; a Hugging Face model is written as native first."""
    # beside the result, on whose disk there is room for both (`needed_bytes`)
    with tempfile.TemporaryDirectory(prefix=f"{folder.name}.", dir=folder.parent) as native:
        source = model.source
        copy = None
        if not source.holds_run:
            source = write_native(model, Path(native), progress, workers)
            # the copy's own tensors are not counted again
            copy, progress = Opening(source.folder), lambda numel: None
        if workers is None:
            universal.write(source, folder)
            return
        universal.write(source, folder, lambda work: workers.on_shares(_write_universal_share, progress, copy, work))


def write_megatron_core(model: WholeModel, folder: Path, progress: ReportNumel) -> None:
    """Write the weights as iteration 0 in megatron-core's format. Raises CheckpointError where it has no such model."""
    # torch.distributed.checkpoint, whose import takes as long as half of torch's
    from megatron.weights.megatron_core import export as megatron_core

    megatron_core.write(model, folder, progress)


def write_huggingface(
    model: WholeModel,
    folder: Path,
    *,
    precision: Precision | None,
    max_shard_bytes: int,
    tokenizer: Path | None,
    progress: ReportNumel,
    workers: Workers | None = None,
) -> list[str]:
    """Write a Hugging Face folder and return the names of its tokenizer files.

    `tokenizer` is the folder that has them; None: the source, if it is Hugging Face's. `precision` is the run's unless
    given.
    """
    if tokenizer is not None and not tokenizer_files(tokenizer):
        raise CheckpointError(f"--tokenizer {tokenizer} holds no tokenizer.json or other tokenizer files")
    if tokenizer is None and is_huggingface(model):
        tokenizer = model.source.folder
    precision = precision or model.config.training.precision

    def write(writer: WeightsWriter, mapped: NameMap, tensors: Iterable[tuple[str, Tensor]]) -> None:
        assert workers is not None
        workers.on_shares(_write_huggingface_share, progress, folder, precision, max_shard_bytes)

    return export_huggingface(
        folder,
        model.config,
        model.tensors(progress),
        write=None if workers is None else write,
        precision=precision,
        max_shard_bytes=max_shard_bytes,
        source=model.huggingface,
        tokenizer=tokenizer,
    )


def is_huggingface(model: WholeModel) -> bool:
    return model.source.format == HUGGINGFACE.name


def needed_bytes(model: WholeModel, to: Target, precision: Precision) -> int:
    """Return the size of the result; `precision` is that of a Hugging Face folder."""
    if to == "hf":
        return model.num_parameters * DTYPES[precision].itemsize
    copies = 1
    if to == "universal":
        # each moment beside the weights; a Hugging Face source needs a native copy meanwhile
        copies = len(model.source.kinds) if model.source.holds_run else 2
    return 4 * copies * model.num_parameters


def compare_tensors_by(workers: Workers, result: Opening, precision: Precision, progress: ReportNumel) -> int:
    """Compare every tensor of the workers' model with the result, as `compare_tensors` does."""
    return sum(workers.on_shares(_compare_share, progress, result, precision))


def compare_tensors(
    source: WholeModel,
    result: WholeModel,
    precision: Precision,
    progress: ReportNumel = lambda numel: None,
    names: Sequence[str] | None = None,
) -> int:
    """Compare every tensor, rounded to the result's `precision`, bit by bit, and return the number of tensors.

    `names`: some parameters alone. Raises CheckpointError that names the first one that differs.
    """
    dtype, compared = DTYPES[precision], 0
    # one side is read in order, the other by slices: a side whose slices cost whole tensors is the first
    one, other = (result, source) if source.source.reads_slices else (source, result)
    for name, tensor in one.tensors(progress, names):
        shard = other.source.parameters[name]
        step = CHUNK_NUMEL if other.source.reads_slices else max(1, tensor.numel())
        for start in range(0, tensor.numel(), step):
            numel = min(step, tensor.numel() - start)
            of_one = tensor.flatten()[start : start + numel].to(dtype)
            of_other = other.source.read(Slice(name, shard, start, numel)).to(dtype)
            # as bytes: NaN equals itself, and minus zero differs from zero
            if not torch.equal(of_one.view(torch.uint8), of_other.view(torch.uint8)):
                raise CheckpointError(f"{name} has other values in the result than in the source; nothing was kept")
        compared += 1
        del tensor, of_one, of_other  # before the next one is read
    return compared


def compare_logits(source: WholeModel, result: WholeModel, precision: Precision) -> str:
    """Compare the logits of both for random tokens, in float32 on the CPU, and return the difference as a text.

    One side is Hugging Face's. Raises CheckpointError where they differ.
    """
    model = source.config.model
    length = min(16, source.config.training.seq_length)
    # [2, length] ids of the whole vocabulary, not of its padding
    tokens_BS = torch.randint(0, model.vocab_size, (2, length), generator=torch.Generator().manual_seed(0))
    expected, actual = _logits(source, tokens_BS, precision), _logits(result, tokens_BS, precision)
    difference, largest = float((actual - expected).abs().max()), float(expected.abs().max())
    limit = LOGIT_TOLERANCE * largest
    text = f"largest logit difference {difference:.1e}, of logits up to {largest:.3g}"
    if not difference <= limit:  # NaN neither
        raise CheckpointError(f"{text}, above the tolerance of {limit:.1e}: they are two models; nothing was kept")
    return text


def _logits(side: WholeModel, tokens_BS: Tensor, precision: Precision) -> Tensor:
    if is_huggingface(side):
        return their_logits(side, tokens_BS, precision)
    return our_logits(side, tokens_BS, precision)


def our_logits(side: WholeModel, tokens_BS: Tensor, precision: Precision) -> Tensor:
    """Return our model's logits [B, S, vocabulary], from the weights rounded to `precision`."""
    ctx = ParallelContext.single()
    # the reference kernels: a faster one may differ by more than the tolerance
    plain = dataclasses.replace(side.config.model, attention_backend="sdpa", kernels="plain")
    config = Config(model=plain, training=TrainingConfig(seq_length=side.config.training.seq_length))
    model = SequentialModel(build_layers(config, ctx)).eval()
    parameters = dict(named_parameters(model))
    with torch.no_grad():
        for name, tensor in side.tensors():
            rounded = tensor.to(DTYPES[precision]).float()  # theirs are rounded to the same, then computed in float32
            parameters[name].copy_(shard_of(parameters[name]).take(rounded, 0, 1))
        logits_SBV: Tensor = model(tokens_BS, project=lambda outputs: gather_logits(outputs[0], outputs[1], ctx))
    return logits_SBV.transpose(0, 1)


def class_not_in_transformers(config: Config) -> str | None:
    """Return the name of transformers' class of a model, if it has none of that name: of a family from elsewhere."""
    import transformers

    name = form_of(config.model).class_name
    return None if hasattr(transformers, name) else name


def their_logits(side: WholeModel, tokens_BS: Tensor, precision: Precision) -> Tensor:
    """Return the logits [B, S, vocabulary] of transformers' model, every weight of which must come from the folder."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    # eager: the plain formula, as on our side
    model, loaded = getattr(transformers, form_of(side.config.model).class_name).from_pretrained(
        side.source.folder, local_files_only=True, output_loading_info=True, attn_implementation="eager"
    )
    missing = [*loaded["missing_keys"], *loaded["mismatched_keys"]]
    # transformers would draw these at random, with no more than a warning
    if missing:
        raise CheckpointError(f"transformers finds no {missing[0]} in {side.source.folder}; nothing was kept")
    with torch.no_grad():
        # first float32, then rounded: products are computed in float32 whatever the folder's dtype is
        model = model.eval().float()
        for parameter in model.parameters():  # not the buffers: the rotary frequencies stay float32
            parameter.copy_(parameter.to(DTYPES[precision]))
        logits: Tensor = model(tokens_BS, use_cache=False).logits
    return logits
