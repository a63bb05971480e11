"""Merge an adapter under the flags of TRL's merge_peft_adapter.py; merge_adapter is the same with more.

    python tools/merge_peft_adapter.py --base_model_name=Llama-2-7b-hf --adapter_model_name=sft --output_name=sft/merged

Models are folders, or names on the hub. TRL's script uploads its result; this one does with --push-to-hub NAME alone.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from megatron.cli.command import command, command_parser
from megatron.cli.convert_checkpoint import add_push_flag
from megatron.cli.merging.merge_adapter import merge_command


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = command_parser(
        "merge_peft_adapter", "Merge an adapter of PEFT into its base, under the flags of TRL's script."
    )
    # `dest`: the name of merge_adapter's flag
    for flag, name, read, text in (
        ("--base_model_name", "base", str, "folder of the Hugging Face model, or its name on the hub"),
        ("--adapter_model_name", "adapter", _whole, "folder of the adapter, or its name on the hub"),
        ("--output_name", "save", Path, "folder to write; must be new or empty"),
    ):
        parser.add_argument(flag, dest=name, type=read, required=True, metavar="FOLDER", help=text)
    parser.set_defaults(verify=False, flags=("--base_model_name", "--adapter_model_name"))
    parser.add_argument(
        # not TRL's: in our spelling, and in that of its other flags
        "--allow-other-base",
        "--allow_other_base",
        action="store_true",
        help="merge with a warning into another base than the one that the adapter was trained on",
    )
    add_push_flag(parser)
    return parser.parse_args(argv)


def _whole(text: str) -> list[tuple[str, float]]:
    """Return the one adapter, of weight 1: a name with = is a folder's here."""
    return [(text, 1.0)]


@command
def main(argv: Sequence[str] | None = None) -> int:
    return merge_command(parse_arguments(argv))
