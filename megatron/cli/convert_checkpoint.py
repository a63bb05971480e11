"""Convert the weights of a checkpoint between Hugging Face, this project's native format and DeepSpeed's universal one.

    python tools/convert_checkpoint.py --load Llama-3.1-8B --save checkpoints/llama31_8b --to native
    python tools/convert_checkpoint.py --load checkpoints/run --save exported --to hf --tokenizer Llama-3.1-8B
    python tools/convert_checkpoint.py --load checkpoints/lora --save adapters --to peft

The format of --load is recognised. Each process (--workers) has one tensor in memory at a time. The result appears
under its name only when it is complete and has been compared with the source: tensor by tensor, and by the logits of
both.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import math
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.cli.command import command, command_parser, progress_bar, run_command
from megatron.runtime.commands import command_name

if TYPE_CHECKING:
    from megatron.weights.conversion import Opening, Workers
    from megatron.weights.folder_files import Precision
    from megatron.weights.model import WholeModel

# Rules by which vLLM serves adapters in PEFT's format: those of its vllm/lora/peft_helper.py and lora_model.py.
# vllm-gaudi is a plug-in of vLLM with the same loaders.

WITH_ADAPTERS = (
    "gemma2", "gemma3", "granite", "granitemoe", "llama", "mistral", "mixtral", "phi3", "qwen2", "qwen3", "qwen3_moe",
)  # fmt: skip
"""Our families whose class in vLLM has the interface SupportsLoRA, by its table of supported models. Those of Bloom,
Falcon, GPT-2, GPT-NeoX and OLMoE do not; OLMo 2 and StarCoder2 have no class of their own in its newer releases."""
WITH_EMBEDDINGS = ("llama",)
"""Those of them whose class takes adapters of the embedding and the output; Mistral's, a subclass, declines them."""
EMBEDDINGS = ("embed_tokens", "lm_head")
EXPERTS = ".experts."
MAX_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values of --max-lora-rank."""


def not_served(content: Mapping[str, Any], architecture: str, modules: Sequence[str] = ()) -> list[str]:
    """Return what vLLM does not take of adapters; none: it serves them.

    Args:
        content: adapter_config.json.
        architecture: our family of the base.
        modules: transformers' names of what is adapted.
    """
    found = list(_targets_not_served(content["target_modules"], architecture, modules))
    if content.get("use_dora"):
        found.append("DoRA")
    if content.get("modules_to_save"):
        found.append(f"modules_to_save ({', '.join(content['modules_to_save'])})")
    if content.get("bias", "none") != "none":
        found.append(f"trained biases (bias={content['bias']})")
    patterns = [name for name in ("rank_pattern", "alpha_pattern") if content.get(name)]
    if patterns:  # read by no line of vLLM's: it would scale each module alike, and say nothing
        found.append(f"ranks or scales of single modules ({', '.join(patterns)})")
    if content["r"] > MAX_RANKS[-1]:
        found.append(f"ranks above {MAX_RANKS[-1]} (r={content['r']})")
    return found


def _targets_not_served(targets: Sequence[str], architecture: str, modules: Sequence[str]) -> Iterator[str]:
    embeddings = [name for name in EMBEDDINGS if any(target.endswith(name) for target in targets)]
    if architecture not in WITH_ADAPTERS:
        yield f"adapters of architecture={architecture}"
    elif embeddings and architecture not in WITH_EMBEDDINGS:
        yield f"adapters of {' and '.join(embeddings)} of architecture={architecture}"
    # its names of them are those of PEFT in some releases alone
    if any(EXPERTS in module for module in modules):
        yield "adapters of experts"


def served(content: Mapping[str, Any], architecture: str, modules: Sequence[str] = ()) -> str:
    """Return a line that says how vLLM serves adapters, or what to do where it does not. Arguments of `not_served`."""
    if refused := not_served(content, architecture, modules):
        return f"vLLM does not serve {', '.join(refused)}: for it, merge them with {command_name('merge_adapter')}"
    # vLLM takes these values alone
    rank = next(limit for limit in MAX_RANKS if limit >= content["r"])
    return f"vLLM serves these adapters with --enable-lora --max-lora-rank {rank}"


# ---------------------------------------------------------------------------------------------------------------------
# The command

NAMES = {
    "hf": "Hugging Face",
    "peft": "PEFT",
    "native": "native",
    "universal": "DeepSpeed universal",
    "megatron-core": "megatron-core",
}
DTYPES: dict[str, Precision] = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
PARAMETERS = " parameters"
"""Unit of the bars."""
VERIFY_LIMIT = 2 * 10**9
"""Parameters of the largest model whose logits are compared by default: 8 GB in float32."""


def fraction(text: str) -> float:
    """Return the number. Raises ValueError for what no drift can be compared with."""
    value = float(text)
    # nan fails the comparison too
    if not 0 <= value < math.inf:
        raise ValueError(text)
    return value


def add_source_flags(parser: argparse.ArgumentParser) -> None:
    """Add the options that describe a checkpoint of Megatron-DeepSpeed."""
    parser.add_argument(
        "--config",
        metavar="PRESET",
        help="model of a source without a config (Megatron, torchtitan): a preset (megatron/presets/) or a YAML file",
    )
    parser.add_argument(
        "--max-drift",
        type=fraction,
        metavar="FRACTION",
        help="Megatron-LM, Megatron-DeepSpeed: largest drift of a norm's or bias's copies over tensor-parallel ranks "
        "that is averaged, as a fraction of its largest value (default: 0.0156)",
    )


def add_weights_flag(parser: argparse.ArgumentParser) -> None:
    """Add the choice between the weights of a run's checkpoint."""
    parser.add_argument(
        "--weights",
        choices=("trained", "ema"),
        default="trained",
        help="weights of a run's checkpoint: those that it trains, or their moving average (--ema-decay of the run)",
    )


def add_push_flag(parser: argparse.ArgumentParser) -> None:
    """Add the option that uploads the result."""
    parser.add_argument(
        "--push-to-hub",
        metavar="ORGANISATION/NAME",
        help="upload the result to this repository on the hub, when it is complete; a new one is private",
    )


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = command_parser(
        "convert_checkpoint",
        "Convert the weights of a checkpoint: Hugging Face, native, DeepSpeed universal, megatron-core; "
        "adapters to PEFT.",
    )
    parser.add_argument(
        "--load",
        required=True,
        metavar="PATH",
        help="a Hugging Face folder, or a model's name on the hub; a folder that a run saved in, or one checkpoint in "
        "it; a checkpoint of DeepSpeed, Megatron-DeepSpeed, megatron-core or torchtitan; Meta's weights",
    )
    parser.add_argument("--save", required=True, metavar="PATH", help="folder to write; must be new or empty")
    parser.add_argument("--to", required=True, choices=tuple(NAMES), help="what to write")
    add_source_flags(parser)
    parser.add_argument(
        "--architecture",
        metavar="MODULE:NAME",
        help="family outside this package that a Hugging Face folder in --load is of; a run's checkpoint names its own",
    )
    add_weights_flag(parser)
    parser.add_argument(
        "--dtype",
        choices=tuple(DTYPES),
        help="type of the hf weights (default: the run's precision) or peft weights (default: float32)",
    )
    parser.add_argument(
        "--tokenizer",
        metavar="DIR",
        help="folder or name on the hub whose tokenizer files are copied into hf or peft (default: --load if hf)",
    )
    add_push_flag(parser)
    parser.add_argument(
        "--max-shard-size", metavar="SIZE", help=f"largest size of an hf weights file (default: {SHARD_SIZE})"
    )
    parser.add_argument(
        "--verify",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="compare tensors with the source, and logits if transformers is installed, which --verify demands",
    )
    parser.add_argument(
        "--verify-limit",
        type=int,
        default=VERIFY_LIMIT,
        metavar="N",
        help=f"compare logits, in float32, of models up to N parameters (default: {VERIFY_LIMIT:,}); tensors always",
    )
    parser.add_argument(
        "--workers",
        type=int,
        metavar="N",
        help="processes that convert to hf, native or universal, each a share of the tensors (default: the cores whose "
        "largest tensors half of the memory holds; 1 for a small model)",
    )
    arguments = parser.parse_args(argv)
    _check(parser, arguments)
    return arguments


SHARD_SIZE = "5GB"
ONLY_FOR = {
    "max_shard_size": (("hf",), "has files of its own"),
    "dtype": (("hf", "peft"), "holds float32 weights"),
    "tokenizer": (("hf", "peft"), "holds float32 weights"),
    "push_to_hub": (("hf", "peft"), "is a format that the hub does not know"),
    "workers": (("hf", "native", "universal"), "is written by one process"),
}
"""Options of some targets alone, and why the others have none."""


def _check(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Read the largest size of a file, and exit with a message for flags that contradict each other."""
    size = re.fullmatch(r"([0-9]+) *([KMG]I?B)?", (arguments.max_shard_size or SHARD_SIZE).upper())
    if not size or not int(size[1]):
        parser.error(
            f"--max-shard-size {arguments.max_shard_size} must be a positive number with KB, MB, GB, KiB, MiB or GiB"
        )
    arguments.max_shard_bytes = int(size[1]) * UNITS[size[2] or ""]
    if arguments.workers is not None and arguments.workers < 1:
        parser.error(f"--workers {arguments.workers} must be 1 or more")
    for name, (kinds, reason) in ONLY_FOR.items():
        if getattr(arguments, name) and arguments.to not in kinds:
            targets = ", ".join(f"--to {kind}" for kind in kinds)
            parser.error(f"--{name.replace('_', '-')} is for {targets}; {arguments.to} {reason}")
    if arguments.verify and importlib.util.find_spec("transformers") is None:
        parser.error("--verify needs transformers; install it, or leave the option out")


def write(model: WholeModel, folder: Path, arguments: argparse.Namespace, workers: Workers | None) -> None:
    """Write the model into an empty folder."""
    from megatron.weights import conversion

    with progress_bar("writing", model.num_parameters, PARAMETERS) as bar:
        if arguments.to == "native":
            conversion.write_native(model, folder, bar.update, workers)
            return
        if arguments.to == "universal":
            conversion.write_universal(model, folder, bar.update, workers)
            return
        if arguments.to == "megatron-core":
            conversion.write_megatron_core(model, folder, bar.update)
            return
        copied = conversion.write_huggingface(
            model,
            folder,
            precision=DTYPES.get(arguments.dtype),
            max_shard_bytes=arguments.max_shard_bytes,
            tokenizer=arguments.tokenizer,
            progress=bar.update,
            workers=workers,
        )
    print_copied(copied)


def print_copied(names: Sequence[str]) -> None:
    print(f"with {', '.join(names)}" if names else "without tokenizer files; --tokenizer DIR adds them", flush=True)


def verify(source: WholeModel, opening: Opening, precision: Precision, limit: int, workers: Workers | None) -> str:
    """Compare every tensor, and the logits if one side is transformers'. Raises CheckpointError where they differ.

    `opening` and `precision` are those of the result.
    """
    from megatron.weights import conversion

    result = conversion.open_model(opening)
    with progress_bar("verifying", source.num_parameters, PARAMETERS) as bar:
        if workers is None:
            compared = conversion.compare_tensors(source, result, precision, bar.update)
        else:
            compared = conversion.compare_tensors_by(workers, opening, precision, bar.update)
    text = f"{compared} tensors equal"
    # logits compare two implementations of the model; two formats of ours have the same one
    if not (conversion.is_huggingface(source) or conversion.is_huggingface(result)):
        return text
    if source.num_parameters > limit:
        return f"{text}; logits not compared: more than --verify-limit {limit:,} parameters"
    if importlib.util.find_spec("transformers") is None:
        return f"{text}; logits not compared: transformers is not installed"
    if (lacking := conversion.class_not_in_transformers(source.config)) is not None:
        return f"{text}; logits not compared: transformers has no {lacking}"
    return f"{text}; {conversion.compare_logits(source, result, precision)}"


def run(arguments: argparse.Namespace) -> None:
    """Convert and verify. Raises CheckpointError, ConfigError, HubError or OSError, with nothing left behind."""
    from megatron.hub import download, upload
    from megatron.weights.folder_files import new_folder

    began_s = time.monotonic()
    target = upload.check_target(arguments.push_to_hub) if arguments.push_to_hub else None
    arguments.load = download.whole_folder(arguments.load, "--load")
    if arguments.tokenizer is not None:
        arguments.tokenizer = download.local_folder(arguments.tokenizer, "--tokenizer", "tokenizer")
    # a work folder takes the name at the end, so that nothing half written is ever found there
    with new_folder(Path(arguments.save)) as work:
        if arguments.to == "peft":
            convert_adapters(work, arguments)
        else:
            convert_model(work, arguments)
    num_bytes = sum(path.stat().st_size for path in Path(arguments.save).rglob("*") if path.is_file())
    seconds = time.monotonic() - began_s
    print(f"wrote {NAMES[arguments.to]}: {arguments.save}, {num_bytes / 1e9:.2f} GB in {seconds:.1f} s", flush=True)
    if target is not None:
        print(f"pushed: {upload.push(Path(arguments.save), target, f'Upload {NAMES[arguments.to]} export')}")


def convert_model(work: Path, arguments: argparse.Namespace) -> None:
    """Convert a whole model into an empty folder, and verify it."""
    from megatron.weights import conversion
    from megatron.weights.folder_files import check_space

    given = (arguments.config, arguments.max_drift, arguments.architecture, arguments.weights)
    opening = conversion.Opening(Path(arguments.load), *given)
    source = conversion.open_model(opening)
    precision: Precision = source.config.training.precision
    if arguments.to == "hf" and arguments.dtype:
        precision = DTYPES[arguments.dtype]
    # native and universal hold master weights
    elif arguments.to != "hf":
        precision = "fp32"
    # before anything is written
    check_space(work, conversion.needed_bytes(source, arguments.to, precision), "--save")
    print(f"reading {source.source.title}: {source.source.folder}, {source.num_parameters:,} parameters", flush=True)
    count = conversion.num_workers(source, arguments.workers)
    with contextlib.ExitStack() as stack:
        workers = None
        if count > 1:
            workers = stack.enter_context(conversion.Workers(source, opening, count))
        # before the result is written, whose own checksums fit damaged weights too
        checked = source.source.verify() if workers is None else workers.verify()
        print(f"checked: {checked}", flush=True)
        write(source, work, arguments, workers)
        if arguments.verify is False:
            return
        # DeepSpeed's folder names no model: it is opened by what the source was opened by
        preset, architecture = None, None
        if arguments.to == "universal":
            preset = arguments.config
        elif arguments.to == "hf":
            architecture = source.config.model.architecture
        result = conversion.Opening(work, preset, architecture=architecture)
        equal = verify(source, result, precision, arguments.verify_limit, workers)
        print(f"verified: {equal}; of the source, {checked}")


def convert_adapters(work: Path, arguments: argparse.Namespace) -> None:
    """Convert a checkpoint of adapters into an empty folder, in PEFT's format, and compare every tensor."""
    from megatron.checkpoint.reader import use_average
    from megatron.weights.conversion import Opening, open_adapters
    from megatron.weights.folder_files import check_space
    from megatron.weights.huggingface_files import DTYPES as TYPES
    from megatron.weights.model import count
    from megatron.weights.peft import export

    source = open_adapters(Opening(Path(arguments.load), arguments.config, arguments.max_drift))
    if arguments.weights == "ema":
        use_average(source.checkpoint)
    precision: Precision = DTYPES.get(arguments.dtype, "fp32")
    numel = count(source.shards)
    check_space(work, numel * TYPES[precision].itemsize, "--save")
    print(f"reading adapters: {source.checkpoint.folder}, {numel:,} parameters", flush=True)
    checked = source.checkpoint.verify(kinds=("weight", "ema"))
    print(f"checked: {checked}", flush=True)
    copied = export.export_adapter(
        work,
        source.config,
        source.tensors(),
        base_name=source.base_name,
        identity=source.identity,
        precision=precision,
        tokenizer=arguments.tokenizer,
    )
    print_copied(copied)
    content = export.adapter_config(source.config, source.base_name)
    adapted = [module.names[0] for module in export.AdaptedModel(source.config).adapted]
    print(served(content, source.config.model.architecture, adapted), flush=True)
    if source.config.lora.lora_init != "default":
        print(
            "PiSSA's factors lose a part of what was trained where they are held in 16 bits, 12 to 15 % in a small "
            f"run; for a server that holds them so, merge them with {command_name('merge_adapter')}",
            flush=True,
        )
    if source.base_name is None:
        print("base_model_name_or_path is null: the base was not loaded from a Hugging Face folder", flush=True)
    # needs no transformers: tensors are compared alone
    if arguments.verify is not False:
        compared = export.compare_export(work, source, precision)
        print(f"verified: {compared} tensors equal; of the source, {checked}")


@command
def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    from megatron.runtime import accelerator

    accelerator.choose_device("cpu")  # before anything imports deepspeed
    from megatron.runtime.first_steps import importing

    with importing():
        import megatron.weights.conversion  # noqa: F401 - deepspeed and torch, which take half of a small conversion
    return run_command(lambda: run(arguments), arguments.save)
