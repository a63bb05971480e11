"""Average the weights of checkpoints of one model: of the end of a run, or of several runs.

    python tools/merge_checkpoints.py --load out/checkpoints --last 5 --save merged --to native
    python tools/merge_checkpoints.py --load out/checkpoints --last 5 --ema 0.8 --save merged --to hf
    python tools/merge_checkpoints.py --load out/checkpoints --last 5 --anneal minus_sqrt --save merged --to hf
    python tools/merge_checkpoints.py --load one/global_step900=0.7 other=0.3 --save merged --to native

The result appears under its name only when it is complete and has been compared with the mean of the sources.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from pathlib import Path

from megatron.cli.command import command, command_parser, progress_bar, run_command
from megatron.cli.convert_checkpoint import DTYPES, PARAMETERS, add_weights_flag
from megatron.cli.merging.merge_adapter import weighted
from megatron.options.schedule import ANNEALING

MAX_SHARD_BYTES = 5 * 10**9


def decay(text: str) -> float:
    """Return the number. Raises argparse.ArgumentTypeError unless it is between 0 and 1."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number between 0 and 1, such as 0.9")
    return value


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = command_parser("merge_checkpoints", "Average the weights of checkpoints of one model.")
    parser.add_argument(
        "--load",
        required=True,
        nargs="+",
        type=weighted,
        metavar="FOLDER[=WEIGHT]",
        help="checkpoints in any format that convert_checkpoint reads, oldest first, or names on the hub; weights "
        "are divided by their sum (default: 1)",
    )
    parser.add_argument(
        "--save", required=True, type=Path, metavar="PATH", help="folder to write; must be new or empty"
    )
    parser.add_argument("--to", required=True, choices=("hf", "native"), help="what to write")
    parser.add_argument(
        "--last", type=int, metavar="N", help="take the newest N checkpoints of the run whose folder --load names"
    )
    parser.add_argument(
        "--ema",
        type=decay,
        metavar="DECAY",
        help="an exponential moving average: it starts as the oldest, and each later one takes 1 - DECAY of it",
    )
    parser.add_argument(
        "--anneal",
        choices=tuple(ANNEALING),
        help="weights that give what a decay of this shape over these checkpoints would have given, from a constant "
        "learning rate; they should be equally many steps apart",
    )
    add_weights_flag(parser)
    parser.add_argument("--dtype", choices=tuple(DTYPES), help="type of the hf weights (default: the run's precision)")
    parser.add_argument(
        "--tokenizer", metavar="DIR", help="folder or name on the hub whose tokenizer files are copied into hf"
    )
    arguments = parser.parse_args(argv)
    has_weights = any(weight != 1 for _, weight in arguments.load)
    if arguments.last is not None and (len(arguments.load) > 1 or has_weights or arguments.last < 2):
        parser.error(
            "--last N is the number of checkpoints of one folder, two or more; give one --load without a weight"
        )
    if arguments.last is None and len(arguments.load) < 2:
        parser.error("one checkpoint is its own mean; give several, or --last N with the folder of a run's saves")
    setting = [name for name in ("ema", "anneal") if getattr(arguments, name) is not None]
    if len(setting) + has_weights > 1:
        given = [f"--{name}" for name in setting] + ["those of --load"] * has_weights
        parser.error(f"{' and '.join(given)} each set the weights; keep one")
    if arguments.to == "native" and (arguments.dtype or arguments.tokenizer):
        parser.error("--dtype and --tokenizer are for --to hf; native holds float32 weights")
    return arguments


def run(arguments: argparse.Namespace) -> None:
    """Average. Raises CheckpointError, ConfigError, HubError or OSError, with nothing left behind."""
    from megatron.hub.download import local_folder, whole_folder
    from megatron.weights import conversion
    from megatron.weights.folder_files import check_space, new_folder
    from megatron.weights.merging import checkpoints

    began_s = time.monotonic()
    folders = [whole_folder(text, "--load") for text, _ in arguments.load]
    weights = [weight for _, weight in arguments.load]
    tokenizer = arguments.tokenizer and local_folder(arguments.tokenizer, "--tokenizer", "tokenizer")
    if arguments.last is not None:
        folders, weights = checkpoints.newest_of_run(folders[0], arguments.last), [1.0] * arguments.last
    shares = checkpoints.mean_shares(weights)
    if arguments.ema is not None:
        shares = checkpoints.moving_shares(len(folders), arguments.ema)
    if arguments.anneal is not None:
        shares = checkpoints.annealed_shares(len(folders), arguments.anneal)
    models = [conversion.open_model(conversion.Opening(folder, weights=arguments.weights)) for folder in folders]
    checkpoints.check_sequence(models, oldest_first=arguments.ema is not None or arguments.anneal is not None)
    mean = checkpoints.averaged_model(models, shares)
    for model, share in zip(models, shares, strict=True):
        print(f"{share:7.2%} of {model.source.folder}", flush=True)
    precision = "fp32" if arguments.to == "native" else DTYPES.get(arguments.dtype, mean.config.training.precision)
    with new_folder(arguments.save) as work:
        check_space(work, conversion.needed_bytes(mean, arguments.to, precision), "--save")
        # before the result is written, whose own checksums fit damaged weights too
        print(f"checked: {mean.source.verify()}", flush=True)
        with progress_bar("averaging", mean.num_parameters, PARAMETERS) as bar:
            if arguments.to == "native":
                conversion.write_native(mean, work, bar.update)
            else:
                conversion.write_huggingface(
                    mean,
                    work,
                    precision=precision,
                    max_shard_bytes=MAX_SHARD_BYTES,
                    tokenizer=tokenizer,
                    progress=bar.update,
                )
        with progress_bar("verifying", mean.num_parameters, PARAMETERS) as bar:
            family = _family(mean.config.model.architecture, arguments.to)
            result = conversion.open_model(conversion.Opening(work, architecture=family))
            compared = conversion.compare_tensors(mean, result, precision, bar.update)
    print(f"wrote {arguments.save}: {compared} tensors, verified, in {time.monotonic() - began_s:.1f} s")


def _family(architecture: str, to: str) -> str | None:
    """Return the family by which a result is opened that does not name its own."""
    return architecture if to == "hf" else None


@command
def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    from megatron.runtime import accelerator

    accelerator.choose_device("cpu")  # before anything imports deepspeed
    return run_command(lambda: run(arguments), str(arguments.save))
