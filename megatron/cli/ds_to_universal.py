"""Convert a checkpoint to DeepSpeed's universal folder, which any layout of DeepSpeed and of this project resumes from.

    python tools/ds_to_universal.py --input_folder checkpoints/global_step100 \\
        --output_folder checkpoints/global_step100_universal

Reads this project's checkpoints, DeepSpeed's of our models (ZeRO 1, 2, 3, bf16), and Megatron-DeepSpeed's, whose names
and order of rows become ours. The flags are those of DeepSpeed's own tool. One tensor is in memory at a time. The
folder appears when it is complete, and `latest_universal` beside it then names it.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from megatron.cli.command import command, command_parser, run_command
from megatron.cli.convert_checkpoint import add_source_flags


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = command_parser("ds_to_universal", "Convert a checkpoint to DeepSpeed's universal folder.")
    parser.add_argument(
        "--input_folder",
        required=True,
        type=Path,
        metavar="FOLDER",
        help="checkpoint of this project, DeepSpeed or Megatron-DeepSpeed; or a run's folder (uses its newest)",
    )
    parser.add_argument(
        "--output_folder", required=True, type=Path, metavar="FOLDER", help="folder to write; must not exist"
    )
    add_source_flags(parser)
    # scripts that call DeepSpeed's tool set them
    for name in ("extract", "merge"):
        parser.add_argument(
            f"--num_{name}_workers",
            type=int,
            metavar="N",
            help="accepted for scripts of DeepSpeed's tool; no effect, since one process streams the tensors",
        )
    return parser.parse_args(argv)


def run(arguments: argparse.Namespace) -> str:
    """Verify and convert, and return the report."""
    from megatron.weights.conversion import Opening, open_any
    from megatron.weights.deepspeed.files import FILE_OF_KIND
    from megatron.weights.deepspeed.universal import point_latest, write

    checkpoint = open_any(Opening(arguments.input_folder, arguments.config, arguments.max_drift))
    checked = checkpoint.verify()
    output = Path(arguments.output_folder)
    write(checkpoint, output)
    # after the folder is complete: a run that resumes follows the name at once
    point_latest(output.resolve())
    kinds = ", ".join(FILE_OF_KIND[kind] for kind in checkpoint.kinds if kind in FILE_OF_KIND)
    count = len(checkpoint.parameters)
    text = f"{output}: {count} parameters ({kinds}) from {checkpoint.folder}"
    return f"{text}; checked: {checked}; latest_universal names it"


@command
def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    return run_command(lambda: print(run(arguments)), arguments.output_folder)
