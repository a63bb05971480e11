"""A byte-level BPE tokenizer, as GPT-2's, learned from text.

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

from megatron.cli.command import run_command
from megatron.cli.text_flags import add_input_flags, check_input_flags, find_input, separator
from megatron.command_names import command_name
from megatron.files import replacing

NUM_BYTE_SYMBOLS = 256


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=command_name("train_tokenizer"),
        description="Train a byte-level BPE tokenizer (GPT-2's kind) on text.",
        allow_abbrev=False,
    )
    add_input_flags(parser, "keys whose text is learned from (default: text)")
    parser.add_argument("--vocab-size", type=int, required=True, metavar="N", help="entries, <|endoftext|> included")
    parser.add_argument(
        "--min-frequency", type=int, default=2, metavar="N", help="rarer pairs are not merged (default: 2)"
    )
    parser.add_argument("--output-dir", required=True, metavar="DIR", help="folder of the tokenizer's files")
    arguments = parser.parse_args(argv)
    check_input_flags(parser, arguments)
    if arguments.vocab_size <= NUM_BYTE_SYMBOLS:
        parser.error(f"--vocab-size {arguments.vocab_size} must be at least 257: 256 bytes and <|endoftext|>")
    return arguments


def run(arguments: argparse.Namespace) -> None:
    """The whole command. Raises DataError or OSError, with no final file written."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    from megatron.data.document_parser import read_texts
    from megatron.data.indexed import DataError
    from megatron.data.tokenizers.base import END_OF_TEXT

    sources = find_input(arguments)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = byte_level
    trainer = trainers.BpeTrainer(
        vocab_size=arguments.vocab_size - 1,  # the last id is END_OF_TEXT's, as in GPT-2
        min_frequency=arguments.min_frequency,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    texts = read_texts(sources, arguments.json_keys, arguments.on_bad_line, separator(arguments))
    learner.train_from_iterator(texts, trainer)
    learned = json.loads(learner.to_str())["model"]
    vocab: dict[str, int] = learned["vocab"]
    merges: list[tuple[str, str]] = [tuple(pair) for pair in learned["merges"]]
    if not merges:
        raise DataError(f"nothing to learn from in {len(sources)} files; give text that is not empty")
    vocab[END_OF_TEXT] = len(vocab)

    finished = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    finished.pre_tokenizer = byte_level
    finished.decoder = decoders.ByteLevel()
    finished.add_special_tokens([END_OF_TEXT])
    config = {
        "tokenizer_class": "GPT2TokenizerFast",
        "add_prefix_space": False,
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "unk_token": END_OF_TEXT,
    }
    folder = Path(arguments.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    by_id = dict(sorted(vocab.items(), key=lambda item: item[1]))
    contents = {
        "vocab.json": json.dumps(by_id, ensure_ascii=False),
        "merges.txt": "#version: 0.2\n" + "".join(f"{left} {right}\n" for left, right in merges),
        "tokenizer.json": finished.to_str(pretty=False),
        "tokenizer_config.json": json.dumps(config, indent=2) + "\n",
    }
    for name, content in contents.items():
        with replacing(folder / name) as file:
            file.write(content.encode())
    print(f"{folder}: {', '.join(contents)} with {len(vocab)} entries, {END_OF_TEXT} = {vocab[END_OF_TEXT]}")
    if len(vocab) < arguments.vocab_size:
        print(
            f"the text supports {len(vocab)} entries only, not {arguments.vocab_size}: set the model's vocab_size to "
            f"{len(vocab)}, or give more text",
            file=sys.stderr,
        )


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    from megatron.data.indexed import DataError

    return run_command(lambda: run(arguments), (DataError,), arguments.output_dir)
