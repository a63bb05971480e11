"""A checkpoint as DeepSpeed's universal folder, which any layout of DeepSpeed and of this project resumes from.

    python tools/ds_to_universal.py --input_folder checkpoints/global_step100 \\
        --output_folder checkpoints/global_step100_universal

Takes this project's own checkpoints, DeepSpeed's of our models (ZeRO 1, 2, 3, bf16), and those of Megatron-DeepSpeed,
whose names and row order become ours. The flags are those of DeepSpeed's own tool. One tensor is in memory at a time;
the folder appears when it is whole, and `latest_universal` beside it then names it.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.cli.command import run_command
from megatron.command_names import command_name

if TYPE_CHECKING:
    from megatron.checkpoint.reader import Checkpoint
    from megatron.interop.universal import ForeignCheckpoint


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=command_name("ds_to_universal"),
        description="Convert a checkpoint to DeepSpeed's universal folder.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--input_folder",
        required=True,
        type=Path,
        metavar="FOLDER",
        help="a checkpoint of this project, of DeepSpeed or of Megatron-DeepSpeed; or a run's folder, for its newest",
    )
    parser.add_argument(
        "--output_folder", required=True, type=Path, metavar="FOLDER", help="what to write; must not exist"
    )
    parser.add_argument(
        "--config",
        metavar="PRESET",
        help="the model, where the checkpoint does not tell: a preset (megatron/presets/), or a YAML file",
    )
    for name in ("extract", "merge"):
        parser.add_argument(
            f"--num_{name}_workers",
            type=int,
            metavar="N",
            help="taken, so that scripts for DeepSpeed's tool run; changes nothing: one process streams the tensors",
        )
    return parser.parse_args(argv)


def open_checkpoint(folder: Path, preset: str | None) -> Checkpoint | ForeignCheckpoint:
    """Ours or a foreign one, every checksum compared. Raises CheckpointError, ConfigError."""
    from megatron.checkpoint.format import CheckpointError
    from megatron.checkpoint.reader import Checkpoint, newest_checkpoint
    from megatron.config.command_line import from_dict, read_preset
    from megatron.interop.universal import read

    if not folder.is_dir():
        raise CheckpointError(f"--input_folder {folder} is {'a file' if folder.exists() else 'not there'}")
    native: Checkpoint | None = None
    if (folder / "checkpoint.json").exists():
        native = Checkpoint(folder)
    elif any(folder.glob("*/checkpoint.json")):
        native = newest_checkpoint(folder)
    if native is None:
        foreign = read(folder, None if preset is None else from_dict(read_preset(preset)))
        foreign.verify()
        return foreign
    if preset is not None:
        raise CheckpointError(f"--config {preset}: {native.folder} tells its model itself; leave the option out")
    native.verify()
    return native


def run(arguments: argparse.Namespace) -> str:
    """Convert, and say what was written."""
    from megatron.interop.deepspeed_files import FILE_OF_KIND
    from megatron.interop.universal import ForeignCheckpoint, point_latest, write

    checkpoint = open_checkpoint(arguments.input_folder, arguments.config)
    shards = checkpoint.shards if isinstance(checkpoint, ForeignCheckpoint) else checkpoint.parameters
    output = Path(arguments.output_folder)
    write(checkpoint, output)
    point_latest(output.resolve())
    kinds = ", ".join(FILE_OF_KIND[kind] for kind in checkpoint.kinds)
    return f"{output}: {len(shards)} parameters ({kinds}) from {checkpoint.folder}; latest_universal names it"


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse_arguments(argv)

    from megatron.checkpoint.format import CheckpointError
    from megatron.config.options import ConfigError

    return run_command(lambda: print(run(arguments)), (CheckpointError, ConfigError), arguments.output_folder)
