"""Flags for text and tokenizers, shared by the data commands. --help must be quick, so nothing heavy is imported."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron.data.sources import SourceFile
    from megatron.data.tokenizers.base import Tokenizer


def add_input_flags(parser: argparse.ArgumentParser, keys_help: str) -> argparse._ArgumentGroup:
    group = parser.add_argument_group("input")
    group.add_argument(
        "--input",
        nargs="+",
        required=True,
        metavar="PATH",
        help="files, folders or globs: .jsonl and .json with a JSON object a line, .parquet with a document a row, "
        ".txt with one document; all but .parquet also compressed, .gz or .zst",
    )
    group.add_argument(
        "--text-files",
        metavar="PATTERN",
        help="read files of this name, such as '*.py', as text, and only these in folders",
    )
    group.add_argument(
        "--document-separator",
        metavar="TEXT",
        help="text between the documents of a text file, such as '<|endoftext|>' or '\\n\\n\\n' (default: a file is "
        "one document)",
    )
    group.add_argument("--json-keys", nargs="+", default=["text"], metavar="KEY", help=keys_help)
    group.add_argument(
        "--on-bad-line",
        choices=("fail", "skip"),
        default="fail",
        help="what to do with a document that cannot be used (default: fail)",
    )
    return group


def check_input_flags(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    keys = arguments.json_keys
    if len(set(keys)) < len(keys):
        parser.error(f"--json-keys {' '.join(keys)} repeats a key; name each once")
    if arguments.document_separator == "":
        parser.error("--document-separator is empty; leave it out if each file is one document")


def find_input(arguments: argparse.Namespace) -> list[SourceFile]:
    """Return the input files. Raises DataError."""
    from megatron.data.document_blocks import check_columns
    from megatron.data.sources import find_sources

    sources = find_sources(arguments.input, arguments.text_files)
    check_columns(sources, arguments.json_keys)
    return sources


def separator(arguments: argparse.Namespace) -> str | None:
    """Return --document-separator, with \\n, \\t, \\r and \\\\ replaced by the characters they stand for."""
    text: str | None = arguments.document_separator
    if text is None:
        return None
    for escape, character in (("\\\\", "\0"), ("\\n", "\n"), ("\\t", "\t"), ("\\r", "\r"), ("\0", "\\")):
        text = text.replace(escape, character)
    return text


def add_tokenizer_flags(
    parser: argparse.ArgumentParser, *, required: bool, description: str | None = None
) -> argparse._ArgumentGroup:
    group = parser.add_argument_group("tokenizer", description)
    group.add_argument(
        "--tokenizer-type",
        required=required,
        metavar="TYPE",
        help="GPT2BPETokenizer, HFTokenizer, SentencePieceTokenizer, TikTokenizer or NullTokenizer; also "
        "HuggingFaceTokenizer, GPTSentencePieceTokenizer, Llama2Tokenizer",
    )
    group.add_argument(
        "--tokenizer-model",
        metavar="PATH",
        help="tokenizer.json or its folder; SentencePiece .model; tiktoken rank file, or Megatron's JSON vocabulary",
    )
    group.add_argument("--vocab-file", metavar="PATH", help="GPT2BPETokenizer: vocab.json")
    group.add_argument("--merge-file", metavar="PATH", help="GPT2BPETokenizer: merges.txt")
    group.add_argument(
        "--vocab-size",
        type=int,
        metavar="N",
        help="NullTokenizer: one more than the largest id of a text, which is the end of document. TikTokenizer, JSON: "
        "number of ids, special tokens included (default: 131072)",
    )
    group.add_argument(
        "--tiktoken-pattern",
        metavar="NAME",
        help="TikTokenizer: pattern that splits text (default: found from the size of the file; of JSON: v2)",
    )
    group.add_argument(
        "--tiktoken-num-special-tokens",
        type=int,
        metavar="N",
        help="TikTokenizer's JSON: ids before those of the text (default: 1000)",
    )
    group.add_argument(
        "--prepend-bos",
        action=argparse.BooleanOptionalAction,
        help="begin each text with the begin-of-text id (default: as Megatron's tokenizer of that name; "
        "docs/data_format.md)",
    )
    group.add_argument(
        "--parse-special",
        action=argparse.BooleanOptionalAction,
        help="encode special tokens written out in a document as their ids, not as text (default: likewise)",
    )
    group.add_argument("--eod-token", metavar="TOKEN", help="the end-of-document token (default: the tokenizer's own)")
    return group


def tokenizer_of(arguments: argparse.Namespace) -> Tokenizer:
    """Build the tokenizer. Raises DataError."""
    from megatron.data.tokenizers.build import build_tokenizer

    return build_tokenizer(
        arguments.tokenizer_type,
        arguments.tokenizer_model,
        arguments.vocab_file,
        arguments.merge_file,
        arguments.vocab_size,
        eod_token=arguments.eod_token,
        prepend_bos=arguments.prepend_bos,
        parse_special_tokens=arguments.parse_special,
        tiktoken_pattern=arguments.tiktoken_pattern,
        tiktoken_num_special_tokens=arguments.tiktoken_num_special_tokens,
    )
