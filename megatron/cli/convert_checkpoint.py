"""Weights from one format to another: Hugging Face, this project's own, DeepSpeed's universal one.

    python tools/convert_checkpoint.py --load Llama-3.1-8B --save checkpoints/llama31_8b --to native
    python tools/convert_checkpoint.py --load checkpoints/run --save exported --to hf --tokenizer Llama-3.1-8B

What --load holds is recognised. One tensor is in memory at a time. The result appears under its name only when it is
whole and has been compared with the source: tensor by tensor, and by the logits of both.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import re
import secrets
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from megatron.cli.command import run_command
from megatron.command_names import command_name
from megatron.files import appearing

if TYPE_CHECKING:
    from torch import Tensor

    from megatron.checkpoint.reader import Checkpoint
    from megatron.config.options import Config
    from megatron.interop.huggingface_files import Precision
    from megatron.interop.universal import ForeignCheckpoint

NATIVE_TAG = "global_step0"
NAMES = {
    "hf": "Hugging Face",
    "native": "native",
    "universal": "DeepSpeed universal",
    "deepspeed": "DeepSpeed",
    "megatron-deepspeed": "Megatron-DeepSpeed",
}
DTYPES: dict[str, Precision] = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
COMPARED = 1 << 22
"""Of a tensor, so many elements are compared at once."""
LOGIT_TOLERANCE = 1e-4
"""Of the largest logit. Two orders of summing in float32 differ by far less, two models by far more."""
VERIFY_LIMIT = 2 * 10**9
"""Parameters of the largest model whose logits are compared by default: 8 GB in float32."""


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=command_name("convert_checkpoint"),
        description="Convert the weights of a checkpoint: Hugging Face, native, DeepSpeed universal.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--load",
        required=True,
        metavar="PATH",
        help="a Hugging Face folder; a folder that a run saved in, or one checkpoint in it; a DeepSpeed or "
        "Megatron-DeepSpeed checkpoint",
    )
    parser.add_argument("--save", required=True, metavar="PATH", help="folder to write; must be new or empty")
    parser.add_argument("--to", required=True, choices=("hf", "native", "universal"), help="what to write")
    parser.add_argument(
        "--config",
        metavar="PRESET",
        help="the model, where the source lacks it (Megatron-DeepSpeed): a preset (megatron/presets/), or a YAML file",
    )
    parser.add_argument("--dtype", choices=tuple(DTYPES), help="of the hf weights (default: the run's precision)")
    parser.add_argument(
        "--tokenizer", metavar="DIR", help="folder whose tokenizer files go with hf (default: --load, if that is one)"
    )
    parser.add_argument(
        "--max-shard-size", default="5GB", metavar="SIZE", help="of an hf weights file, such as 5GB (default: 5GB)"
    )
    parser.add_argument(
        "--verify",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="compare the result with the source, tensors and logits (default: if transformers is installed)",
    )
    parser.add_argument(
        "--verify-limit",
        type=int,
        default=VERIFY_LIMIT,
        metavar="N",
        help=f"compare logits, in float32, up to so many parameters (default: {VERIFY_LIMIT:,}); tensors of any number",
    )
    arguments = parser.parse_args(argv)
    size = re.fullmatch(r"([0-9]+) *([KMG]I?B)?", arguments.max_shard_size.upper())
    if not size or not int(size[1]):
        parser.error(f"--max-shard-size {arguments.max_shard_size} must be a number with KB, MB, GB, KiB, MiB or GiB")
    arguments.max_shard_bytes = int(size[1]) * UNITS[size[2] or ""]
    for name in ("dtype", "tokenizer"):
        if getattr(arguments, name) and arguments.to != "hf":
            parser.error(f"--{name} is for --to hf; {arguments.to} keeps float32 weights alone")
    if arguments.verify and importlib.util.find_spec("transformers") is None:
        parser.error("--verify needs transformers; install it, or leave the option out")
    return arguments


# ---------------------------------------------------------------------------------------------------------------------
# Sources


@dataclass(frozen=True)
class Model:
    """A checkpoint opened for reading, whatever its format."""

    kind: str
    path: Path
    config: Config
    num_parameters: int
    tensors: Callable[[], Iterator[tuple[str, Tensor]]]
    """(our name, full float32 tensor), each parameter once."""
    read: Callable[[str], Tensor]
    """One of them by our name."""
    read_range: Callable[[str, int, int], Tensor] | None = None
    """(name, start, numel) -> that stretch of the flattened tensor. None: this format gives whole tensors only."""
    verify: Callable[[], object] | None = None
    """Compare the checksums that came with it. Raises CheckpointError."""
    source: dict[str, Any] | None = None
    """What Hugging Face said of it, where it came from there."""
    checkpoint: Checkpoint | ForeignCheckpoint | None = None
    """Where it is not Hugging Face's: with all that is in it beside the weights."""


def recognise(path: Path) -> str:
    """What `path` holds: hf, native, or a kind that universal.py knows. Raises CheckpointError."""
    from megatron.checkpoint.format import CheckpointError
    from megatron.interop import universal

    if not path.is_dir():
        raise CheckpointError(f"--load {path} is {'a file' if path.exists() else 'not there'}; give a folder")
    has_native = (path / "checkpoint.json").exists() or any(path.glob("*/checkpoint.json"))
    foreign = None if has_native else universal.recognise(path)
    has_hf = (path / "config.json").exists()
    if has_hf and (has_native or foreign):
        raise CheckpointError(f"--load {path} holds config.json beside a {foreign or 'native'} checkpoint; keep one")
    kind = "hf" if has_hf else "native" if has_native else foreign
    if kind is None:
        raise CheckpointError(
            f"--load {path} holds no checkpoint: neither config.json (Hugging Face), nor checkpoint.json there or a "
            "folder below (native), nor DeepSpeed's files"
        )
    return kind


def open_model(path: Path, preset: str | None = None) -> Model:
    """Open and check what is there. Raises CheckpointError or ConfigError."""
    from megatron.checkpoint.format import CheckpointError

    kind = recognise(path)
    if kind not in ("hf", "native"):
        return open_foreign(path, kind, preset)
    if preset is not None:
        raise CheckpointError(f"--config {preset}: --load {path} tells its model itself; leave the option out")
    return open_huggingface(path) if kind == "hf" else open_native(path)


def open_huggingface(path: Path) -> Model:
    from megatron.interop.huggingface import import_huggingface

    model = import_huggingface(path)
    return Model("hf", path, model.config, model.num_parameters, model.tensors, model.read, source=model.source)


def open_native(path: Path) -> Model:
    from megatron.checkpoint.reader import Checkpoint, newest_checkpoint
    from megatron.interop.native import native_model

    checkpoint = Checkpoint(path) if (path / "checkpoint.json").exists() else newest_checkpoint(path)
    assert checkpoint is not None  # `recognise` has seen one
    model = native_model(checkpoint)
    return Model(
        "native",
        checkpoint.folder,
        model.config,
        model.num_parameters,
        model.tensors,
        checkpoint.read_full,
        model.read_range,
        checkpoint.verify,
        model.source,
        checkpoint,
    )


def open_foreign(path: Path, kind: str, preset: str | None) -> Model:
    from megatron.checkpoint.format import CheckpointError
    from megatron.config.command_line import from_dict, read_preset
    from megatron.interop import universal
    from megatron.interop.native import count, matched

    config = from_dict(read_preset(preset)) if preset is not None else None
    checkpoint = universal.read(path, config)
    if config is None:
        saved = (checkpoint.facts.get("metadata") or {}).get("config")
        if saved is None:
            raise CheckpointError(
                f"{checkpoint.folder} ({kind}) does not tell which model it holds; describe it with --config PRESET"
            )
        config = from_dict(saved)
    expected = matched(checkpoint.folder, config, checkpoint.shards)

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for name in expected:
            yield name, checkpoint.tensor(name)

    return Model(kind, checkpoint.folder, config, count(expected), tensors, checkpoint.tensor, checkpoint=checkpoint)


# ---------------------------------------------------------------------------------------------------------------------
# Targets


def write(model: Model, folder: Path, arguments: argparse.Namespace) -> str:
    """Write the model into an empty folder, and say what there is to say of it."""
    from megatron.checkpoint.format import CheckpointError
    from megatron.interop import universal
    from megatron.interop.huggingface import export_huggingface, tokenizer_files

    if arguments.to == "native":
        write_native(model, folder)
        return ""
    if arguments.to == "universal":
        with tempfile.TemporaryDirectory(prefix=f"{folder.name}.", dir=folder.parent) as native:
            checkpoint = model.checkpoint
            if checkpoint is None:
                write_native(model, Path(native))
                checkpoint = open_native(Path(native)).checkpoint
            assert checkpoint is not None
            universal.write(checkpoint, folder)
        return ""
    tokenizer = Path(arguments.tokenizer) if arguments.tokenizer else model.path if model.kind == "hf" else None
    if arguments.tokenizer and not (tokenizer and tokenizer_files(tokenizer)):
        raise CheckpointError(f"--tokenizer {tokenizer} holds no tokenizer.json or other tokenizer files")
    with progress_bar(model, "writing") as bar:
        copied = export_huggingface(
            folder,
            model.config,
            counted(model, bar),
            precision=DTYPES[arguments.dtype] if arguments.dtype else None,
            max_shard_bytes=arguments.max_shard_bytes,
            source=model.source,
            tokenizer=tokenizer,
        )
    return f"with {', '.join(copied)}" if copied else "without tokenizer files: --tokenizer DIR copies them along"


def write_native(model: Model, folder: Path) -> None:
    """Weights alone, as a run's first checkpoint."""
    from megatron.checkpoint.format import Fragment
    from megatron.checkpoint.writer import write_checkpoint
    from megatron.interop.huggingface import parameters_of
    from megatron.interop.huggingface_files import DTYPES as TORCH_DTYPES
    from megatron.planning.progress import Progress

    shards = parameters_of(model.config)
    dtype = str(TORCH_DTYPES[model.config.training.precision]).removeprefix("torch.")
    metadata = {"config": model.config.to_dict(), "progress": asdict(Progress()), "source": model.source}

    def fragments() -> Iterator[Fragment]:
        for name, tensor in counted(model, bar):
            yield Fragment(name, "weight", shards[name], 0, 1, 0, tensor.flatten(), dtype)

    with progress_bar(model, "writing") as bar:
        write_checkpoint(folder, NATIVE_TAG, fragments(), metadata)


def progress_bar(model: Model, what: str) -> tqdm[Any]:
    return tqdm(total=model.num_parameters, unit=" parameters", unit_scale=True, desc=what, leave=False, disable=None)


def counted(model: Model, bar: tqdm[Any]) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in model.tensors():
        count = tensor.numel()
        yield name, tensor
        del tensor  # before the next one is made
        bar.update(count)


def needed_bytes(model: Model, arguments: argparse.Namespace) -> int:
    """Of the result."""
    from megatron.interop.huggingface_files import DTYPES as TORCH_DTYPES

    precision = DTYPES[arguments.dtype] if arguments.dtype else model.config.training.precision
    width = TORCH_DTYPES[precision].itemsize if arguments.to == "hf" else 4
    if arguments.to == "universal":
        # each moment beside the weights; without a native checkpoint, one is written on the way
        width *= len(model.checkpoint.kinds) if model.checkpoint else 2
    return model.num_parameters * width


# ---------------------------------------------------------------------------------------------------------------------
# Verification


def verify(source: Model, result: Model, precision: Precision, limit: int) -> str:
    """Compare every tensor, and the logits where one side is transformers'. Returns what was found.

    `precision` is that of the result: the source's weights are compared as they are when rounded to it.
    Raises CheckpointError naming the tensor, or the logits, that differ.
    """
    compared = compare_tensors(source, result, precision)
    text = f"{compared} tensors equal"
    if "hf" not in (source.kind, result.kind):
        return text
    if source.num_parameters > limit:
        return f"{text}; logits not compared: more than --verify-limit {limit:,} parameters"
    if importlib.util.find_spec("transformers") is None:
        return f"{text}; logits not compared: transformers is not installed"
    return f"{text}; {compare_logits(source, result, precision)}"


def compare_tensors(source: Model, result: Model, precision: Precision) -> int:
    import torch

    from megatron.checkpoint.format import CheckpointError
    from megatron.interop.huggingface_files import DTYPES as TORCH_DTYPES

    dtype, compared = TORCH_DTYPES[precision], 0
    one, other = (result, source) if source.read_range else (source, result)
    with progress_bar(source, "verifying") as bar:
        for name, tensor in counted(one, bar):
            step = COMPARED if other.read_range else tensor.numel()
            for start in range(0, tensor.numel(), step):
                numel = min(step, tensor.numel() - start)
                found = other.read_range(name, start, numel) if other.read_range else other.read(name).flatten()
                # as bytes: NaN equals itself, and minus zero is not zero
                pair = [side.to(dtype).view(torch.uint8) for side in (tensor.flatten()[start : start + numel], found)]
                if not torch.equal(*pair):
                    raise CheckpointError(f"{name} has other values in the result than in the source; nothing was kept")
            compared += 1
            del tensor, found, pair
    return compared


def compare_logits(source: Model, result: Model, precision: Precision) -> str:
    """A forward of both in float32 on the CPU, over random tokens. Raises CheckpointError where the logits differ."""
    import torch

    from megatron.checkpoint.format import CheckpointError

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


def our_logits(side: Model, tokens_BS: Tensor, precision: Precision) -> Tensor:
    """[B, S, vocabulary], of the weights as `precision` holds them."""
    import dataclasses

    import torch

    from megatron.config.options import Config, TrainingConfig
    from megatron.interop.huggingface_files import DTYPES as TORCH_DTYPES
    from megatron.models.sequential import SequentialModel, build_layers
    from megatron.parallel.context import ParallelContext
    from megatron.parallel.losses import gather_logits
    from megatron.parallel.shards import named_parameters, shard_of

    ctx = ParallelContext.single()
    plain = dataclasses.replace(side.config.model, attention_backend="sdpa")
    config = Config(model=plain, training=TrainingConfig(seq_length=side.config.training.seq_length))
    model = SequentialModel(build_layers(config, ctx)).eval()
    parameters = dict(named_parameters(model))
    with torch.no_grad():
        for name, tensor in side.tensors():
            rounded = tensor.to(TORCH_DTYPES[precision]).float()
            parameters[name].copy_(shard_of(parameters[name]).take(rounded, 0, 1))
        logits_SBV: Tensor = model(tokens_BS, project=lambda outputs: gather_logits(outputs[0], outputs[1], ctx))
    return logits_SBV.transpose(0, 1)


def their_logits(side: Model, tokens_BS: Tensor, precision: Precision) -> Tensor:
    """[B, S, vocabulary], of transformers' model, every weight of which must come from the folder."""
    import torch
    import transformers

    from megatron.checkpoint.format import CheckpointError
    from megatron.interop.huggingface_config import form_of
    from megatron.interop.huggingface_files import DTYPES as TORCH_DTYPES

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model, loaded = getattr(transformers, form_of(side.config.model).class_name).from_pretrained(
        side.path, local_files_only=True, output_loading_info=True, attn_implementation="eager"
    )
    strange = [*loaded["missing_keys"], *loaded["mismatched_keys"]]
    if strange:
        raise CheckpointError(f"transformers finds no {strange[0]} in {side.path}; nothing was kept")
    with torch.no_grad():
        model = model.eval().float()
        for parameter in model.parameters():  # not the buffers: the rotary frequencies stay float32
            parameter.copy_(parameter.to(TORCH_DTYPES[precision]))
        logits: Tensor = model(tokens_BS, use_cache=False).logits
    return logits


# ---------------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def whole_folder(save: Path) -> Iterator[Path]:
    """A folder beside `save` to write into; it becomes `save` at the end, and is removed if anything fails.

    Raises CheckpointError if `save` holds something already.
    """
    from megatron.checkpoint.format import CheckpointError

    save = Path(os.path.abspath(save))
    if os.path.lexists(save) and (save.is_symlink() or not save.is_dir() or any(save.iterdir())):
        raise CheckpointError(f"--save {save} is there already; give a new or empty folder")
    save.parent.mkdir(parents=True, exist_ok=True)
    with appearing(save, save.with_name(f".{save.name}.partial-{secrets.token_hex(4)}")) as work:
        yield work


def run(arguments: argparse.Namespace) -> None:
    """The whole command. Raises CheckpointError, ConfigError or OSError, with nothing left behind."""
    from megatron.interop.native import check_space

    began_s = time.monotonic()
    with whole_folder(Path(arguments.save)) as work:
        source = open_model(Path(arguments.load), arguments.config)
        precision: Precision = source.config.training.precision
        if arguments.to == "hf" and arguments.dtype:
            precision = DTYPES[arguments.dtype]
        elif arguments.to != "hf":
            precision = "fp32"
        check_space(work, needed_bytes(source, arguments), "--save")
        if source.verify is not None:
            source.verify()
        print(f"reading {NAMES[source.kind]}: {source.path}, {source.num_parameters:,} parameters", flush=True)
        note = write(source, work, arguments)
        if note:
            print(note, flush=True)
        wanted = arguments.verify
        if wanted is None:
            wanted = importlib.util.find_spec("transformers") is not None
        if wanted:
            result = open_model(work, arguments.config if arguments.to == "universal" else None)
            print(f"verified: {verify(source, result, precision, arguments.verify_limit)}")
    num_bytes = sum(path.stat().st_size for path in Path(arguments.save).rglob("*") if path.is_file())
    seconds = time.monotonic() - began_s
    print(f"wrote {NAMES[arguments.to]}: {arguments.save}, {num_bytes / 1e9:.2f} GB in {seconds:.1f} s")


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    from megatron import accelerator

    accelerator.choose_device("cpu")  # before anything imports deepspeed
    from megatron.checkpoint.format import CheckpointError
    from megatron.config.options import ConfigError

    return run_command(lambda: run(arguments), (CheckpointError, ConfigError), arguments.save)
