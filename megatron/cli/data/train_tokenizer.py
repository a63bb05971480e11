"""Train a byte-level BPE tokenizer, GPT-2's kind, on text.

    python tools/train_tokenizer.py --input corpus.jsonl --vocab-size 8192 --output-dir tokenizer

Writes vocab.json and merges.txt (for GPT2BPETokenizer), tokenizer.json and tokenizer_config.json (for HFTokenizer). The
same input gives the same files.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron.cli.command import command, command_parser, run_command
from megatron.cli.data.flags import TEXT, TEXT_INPUT, add_flags, add_groups, check, separator_of

# byte-level BPE begins with a symbol for each byte, so that no text has an unknown token
NUM_BYTE_SYMBOLS = 256


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = command_parser("train_tokenizer", "Train a byte-level BPE tokenizer (GPT-2's kind) on text.")
    keys = "keys of the text to learn from (default: text)"
    add_groups(parser, {"input": TEXT}, {"--input": TEXT_INPUT, "--json-keys": keys})
    add_flags(parser, "--vocab-size", required=True, help="entries, <|endoftext|> included")
    parser.add_argument(
        "--min-frequency", type=int, default=2, metavar="N", help="merge no pairs that are rarer (default: 2)"
    )
    parser.add_argument("--output-dir", required=True, metavar="DIR", help="folder of the tokenizer's files")
    add_flags(parser, "--overwrite", help="replace another tokenizer in that folder")
    arguments = parser.parse_args(argv)
    check(parser, arguments)
    if arguments.vocab_size <= NUM_BYTE_SYMBOLS:
        parser.error(f"--vocab-size {arguments.vocab_size} must be at least 257: 256 bytes and <|endoftext|>")
    return arguments


def run(arguments: argparse.Namespace) -> None:
    """Run the command. Raises DataError or OSError, with no final file written."""
    from megatron.data.prepare.block_encoder import find_files
    from megatron.data.read.document_blocks import ReadingRules
    from megatron.data.read.document_parser import read_texts
    from megatron.data.read.sources import InputRules
    from megatron.data.tokenizers.base import END_OF_TEXT
    from megatron.data.tokenizers.training import train_tokenizer, write_tokenizer

    names = InputRules(arguments.text_files, tuple(arguments.exclude), arguments.stdin_filename)
    rules = ReadingRules(tuple(arguments.json_keys), separator_of(arguments), names=names)
    listing = find_files(arguments.input, rules)
    print(listing.describe(), file=sys.stderr)
    texts = read_texts(listing.sources, rules, arguments.on_bad_line)
    files = train_tokenizer(texts, arguments.vocab_size, arguments.min_frequency)
    write_tokenizer(files, Path(arguments.output_dir), overwrite=arguments.overwrite)
    num_entries = len(json.loads(files["vocab.json"]))
    print(f"{arguments.output_dir}: {', '.join(files)} with {num_entries} entries, {END_OF_TEXT} = {num_entries - 1}")
    # merges end where no pair is as frequent as --min-frequency
    if num_entries < arguments.vocab_size:
        print(
            f"the text supports {num_entries} entries only, not {arguments.vocab_size}: set the model's vocab_size to "
            f"{num_entries}, or give more text",
            file=sys.stderr,
        )


@command
def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    return run_command(lambda: run(arguments), arguments.output_dir)
