"""Print the model of a Hugging Face folder as a preset to train it with: its `model` section, and the precision.

    python tools/model_config.py --load Llama-3.2-1B > model.yaml
    python -m megatron.train --config model.yaml --load Llama-3.2-1B ...

Reads only config.json. Nothing in the folder is executed.
"""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

import yaml

from megatron.cli.command import command, command_parser, run_command
from megatron.options.config import option_doc

WIDTH = 100


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = command_parser(
        "model_config", "Print the model of a Hugging Face folder as the preset of a run that starts from it."
    )
    parser.add_argument(
        "--load", required=True, metavar="FOLDER", help="a Hugging Face folder, or a model's name on the hub"
    )
    parser.add_argument(
        "--vocab-size",
        type=int,
        metavar="N",
        help="size of the vocabulary, if tokens were added to it: their rows start as the mean of the others "
        "(default: the folder's own)",
    )
    return parser.parse_args(argv)


def as_yaml(preset: dict[str, Any], title: str) -> str:
    """Return the preset, with the description of each option above it."""

    def lines() -> Iterator[str]:
        yield f"# {title}"
        for section, values in preset.items():
            yield f"{section}:"
            for name, value in values.items():
                yield from textwrap.wrap(
                    option_doc(section, name), WIDTH, initial_indent="  # ", subsequent_indent="  # "
                )
                # dumped with its name: a bare 1e-05 would be read back as text
                yield f"  {yaml.safe_dump({name: value}).rstrip()}"

    return "\n".join(lines()) + "\n"


def run(arguments: argparse.Namespace) -> None:
    """Run the command. Raises CheckpointError, HubError or OSError."""
    from megatron.hub.download import local_folder
    from megatron.hub.names import pinned
    from megatron.weights.huggingface_config import described_in, preset_of

    folder = local_folder(arguments.load, "--load")
    preset = preset_of(folder, arguments.vocab_size)
    title = f"The model of {pinned(folder) or folder.name}, by its {described_in(folder)}."
    sys.stdout.write(as_yaml(preset, title))


@command
def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    return run_command(lambda: run(arguments), arguments.load)
