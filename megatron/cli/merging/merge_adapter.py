"""Merge LoRA adapters in PEFT's format into a Hugging Face model.

    python tools/merge_adapter.py --base Llama-3.1-8B --adapter out/lora --save out/merged
    python tools/merge_adapter.py --base Llama-3.1-8B --adapter chat=0.7 code=0.3 --save out/merged

The result is a copy of the base's folder, tokenizer and configuration included, with merged weights in its dtype. In
float32 it equals PEFT's `merge_and_unload` bit for bit. It appears under its name only when it is complete.
"""

from __future__ import annotations

import argparse
import math
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from megatron.cli.command import command, command_parser, progress_bar, run_command
from megatron.cli.convert_checkpoint import PARAMETERS, add_push_flag
from megatron.weights.folder_files import EXPORT_NAME, newest_export


def weighted(text: str) -> tuple[str, float]:
    """Return the folder and weight of FOLDER or FOLDER=WEIGHT. Raises argparse.ArgumentTypeError."""
    # from the right, and never within the name of a folder that is there
    folder, equals, number = text.rpartition("=")
    # an empty name would be the current folder
    if text and (not equals or Path(text).exists()):
        return text, 1.0
    if not folder:
        raise argparse.ArgumentTypeError(f"{text!r} names no folder; write FOLDER, or FOLDER=WEIGHT")
    try:
        weight = float(number)
    except ValueError:
        weight = math.nan
    if not math.isfinite(weight):
        raise argparse.ArgumentTypeError(
            f"{text!r}: the weight {number!r} is not a finite number; write FOLDER=WEIGHT such as {folder}=0.5, or the "
            "name of a folder that is there"
        )
    return folder, weight


def notes_on(given: Sequence[tuple[Path, float]], found: Sequence[tuple[Path, float]]) -> list[str]:
    """Return which exports were chosen, and a warning where several of one run add up."""
    chosen = [
        f"adapter: {path}, the newest export"
        for (folder, _), (path, _) in zip(given, found, strict=True)
        if path != folder
    ]
    # with weights a sum of exports may be meant, such as their mean
    whole = [path for path, weight in found if weight == 1 and EXPORT_NAME.fullmatch(path.name)]
    runs = Counter(path.absolute().parent for path in whole)
    return chosen + [
        f"warning: {count} adapters are exports of one run, {run}, and what they change adds up; give the newest "
        "alone, or weights: FOLDER=WEIGHT"
        for run, count in runs.items()
        if count > 1
    ]


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = command_parser("merge_adapter", "Merge LoRA adapters in PEFT's format into a Hugging Face model.")
    parser.add_argument(
        "--base",
        required=True,
        metavar="FOLDER",
        help="the Hugging Face model, in safetensors, unquantized: its folder, or its name on the hub",
    )
    parser.add_argument(
        "--adapter",
        required=True,
        nargs="+",
        type=weighted,
        metavar="FOLDER[=WEIGHT]",
        help="adapters of PEFT, also by their name on the hub, or a run's folder or its hf_format, whose newest are "
        "taken; a weight multiplies what they change (default: 1)",
    )
    parser.add_argument(
        "--save", required=True, type=Path, metavar="FOLDER", help="folder to write; must be new or empty"
    )
    parser.add_argument(
        "--allow-other-base",
        action="store_true",
        help="merge with a warning into another base than the one that the adapters were trained on",
    )
    parser.add_argument(
        "--verify",
        action="store_true",
        help="read the result again, and compare it with base and adapters; takes about as long as merging",
    )
    add_push_flag(parser)
    # of base and adapter, for messages
    parser.set_defaults(flags=("--base", "--adapter"))
    return parser.parse_args(argv)


def run(arguments: argparse.Namespace) -> None:
    """Merge. Raises CheckpointError, HubError or OSError, with nothing left behind."""
    from megatron.hub import upload
    from megatron.hub.download import whole_folder
    from megatron.weights.folder_files import new_folder
    from megatron.weights.peft.adapter_merge import Merge

    began_s = time.monotonic()
    target = upload.check_target(arguments.push_to_hub) if arguments.push_to_hub else None
    base_flag, adapter_flag = arguments.flags
    base, save = whole_folder(arguments.base, base_flag), arguments.save
    adapters = [(whole_folder(text, adapter_flag), weight) for text, weight in arguments.adapter]
    # once, before the work: a run that still trains may write another export meanwhile
    found = [(newest_export(folder), weight) for folder, weight in adapters]
    with new_folder(save) as work:
        merge = Merge(base, found, allow_other_base=arguments.allow_other_base, base_flag=base_flag)
        for note in (*notes_on(adapters, found), *merge.notes):
            print(note, flush=True)
        # only changed tensors take time: others are copied
        total = sum(math.prod(merge.tensors[name].shape) for name in merge.changes)
        with progress_bar("merging", total, PARAMETERS) as bar:
            copied, left = merge.write(work, bar.update)
        print(f"copied: {', '.join(copied)}")
        if left:
            print(f"left out: {', '.join(left)}")
        if arguments.verify:
            whole = sum(math.prod(tensor.shape) for tensor in merge.tensors.values())
            with progress_bar("verifying", whole, PARAMETERS) as bar:
                print(f"verified: {merge.verify(work, bar.update)}")
    num_bytes = sum(path.stat().st_size for path in save.iterdir())
    changed = f"{len(merge.changes)} of {len(merge.tensors)} tensors merged"
    print(f"wrote {save}: {changed}, {num_bytes / 1e9:.2f} GB in {time.monotonic() - began_s:.1f} s", flush=True)
    if target is not None:
        print(f"pushed: {upload.push(save, target, 'Upload merged model')}")


def merge_command(arguments: argparse.Namespace) -> int:
    """Merge, and return the exit status. `arguments`: those of `parse_arguments`."""
    from megatron.runtime import accelerator

    accelerator.choose_device("cpu")  # before anything imports deepspeed
    return run_command(lambda: run(arguments), str(arguments.save))


@command
def main(argv: Sequence[str] | None = None) -> int:
    return merge_command(parse_arguments(argv))
