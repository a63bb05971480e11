"""Flags of Megatron's tools/preprocess_data.py that this project does not have, with the reason or what to use."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from megatron.options.flags import unescaped

if TYPE_CHECKING:
    from megatron.data.read.input_shards import InputShard
    from megatron.data.read.sources import InputListing, InputRules
    from megatron.data.tokenizers.base import Tokenizer

_TRIAL = "there is nothing to search for: threads share one tokenizer; use --workers, by default all cores"
_VOCABULARY = "a dataset does not depend on it; give it to the training"
_SENTENCES = "sentences are for BERT and T5; BLOOM and Llama train on whole documents"
REFUSED = {
    "--split-sentences": _SENTENCES,
    "--lang": _SENTENCES,
    "--find-optimal-num-workers": _TRIAL,
    "--workers-to-check": _TRIAL,
    "--performance-dir": _TRIAL,
    "--use-gigatoken": "the fast tokenizer is always used where its ids are equal; --reference-tokenizer disables it",
    "--null-tokenizer-eod-id": "use --eod-token ID",
    "--null-tokenizer-pad-id": "documents are not padded",
    "--tokenizer-hf-no-include-special-tokens": "use --no-prepend-bos",
    "--tokenizer-hf-no-use-fast": "a tokenizer.json is needed, which AutoTokenizer's save_pretrained writes",
    "--trust-remote-code": "code that comes with a tokenizer is never run; use a tokenizer.json",
    "--tokenizer-metadata": "the type is given by --tokenizer-type, the files by --tokenizer-model",
    "--tokenizer-special-tokens": "special tokens are those of the tokenizer's files; add them there",
    "--tiktoken-special-tokens": "they have Megatron's default names, in ids below --tiktoken-num-special-tokens",
    "--tokenizer-sentencepiece-legacy": "add tokens to the .model itself, as user-defined pieces",
    "--tokenizer-sentencepiece-ignore-extra-whitespaces": "the .model's own rule for white space is followed",
    "--vocab-extra-ids": "they are T5's",
    "--padded-vocab-size": _VOCABULARY,
    "--pad-vocab-size": _VOCABULARY,
    "--make-vocab-size-divisible-by": _VOCABULARY,
    "--seq-length": "documents keep their length; the training cuts them into samples",
}


def parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the flags. Exits with a message, which says what to do about those of Megatron that are refused."""
    arguments, unknown = parser.parse_known_args(argv)
    names = [word.partition("=")[0] for word in unknown]
    reasons = [f"{name} is not supported: {REFUSED[name]}" for name in dict.fromkeys(names) if name in REFUSED]
    if reasons:
        parser.error("\n  ".join(reasons))
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    return arguments


# ---------------------------------------------------------------------------------------------------------------------
# Flags for text and tokenizers, shared by the data commands. --help must be quick, so nothing heavy is imported.


def add_input_flags(parser: argparse.ArgumentParser, keys_help: str) -> argparse._ArgumentGroup:
    group = parser.add_argument_group("input")
    add_file_flags(
        group,
        "files, folders, globs, URLs, or - for standard input: .jsonl and .json with a JSON object a line, .parquet "
        "and .arrow with a document a row, .txt with one document, .tar of such files; all but tables also compressed: "
        ".gz, .zst, .xz, .bz2",
    )
    group.add_argument(
        "--text-files",
        metavar="PATTERN",
        help="read files of this name, such as '*.py', as text, and only these in folders and archives",
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


def add_file_flags(group: argparse._ArgumentGroup, input_help: str) -> None:
    """Add the flags that say which files are read."""
    group.add_argument("--input", nargs="+", required=True, metavar="PATH", help=input_help)
    group.add_argument(
        "--exclude",
        nargs="+",
        default=[],
        metavar="PATTERN",
        help="pass over files and folders of this name, or path within the folder, such as '*.pdf' or 'drafts/*'",
    )
    group.add_argument(
        "--stdin-filename",
        default="stdin.jsonl",
        metavar="NAME",
        help="read standard input as a file of this name, such as x.txt.gz (default: stdin.jsonl)",
    )


def add_column_flag(group: argparse._ArgumentGroup) -> None:
    """Add the flag for columns of rows that are not read."""
    group.add_argument(
        "--ignore-columns",
        nargs="+",
        default=[],
        metavar="COLUMN",
        help="leave these columns out: one that looks like a part of the prompt is refused otherwise",
    )


def add_share_flags(group: argparse._ArgumentGroup) -> None:
    """Add the flags for a share of the input."""
    group.add_argument(
        "--shard",
        metavar="NUMBER/COUNT",
        help="process one of COUNT shares of the input, of equal bytes, numbered from 1: one on each of several "
        "machines. merge_datasets joins them to what one machine would have made",
    )
    group.add_argument(
        "--max-documents",
        type=int,
        metavar="N",
        help="stop after the first N documents of the input, blank and bad ones counted (default: read all of it)",
    )


def add_overwrite_flag(group: argparse._ActionsContainer) -> None:
    group.add_argument("--overwrite", action="store_true", help="replace a finished dataset of this name")


def add_sample_flags(parser: argparse.ArgumentParser, *, files: str, shown: str) -> None:
    """Add the flags for the output of a tool that also prints `shown`, such as `samples as they are tokenized`."""
    group = parser.add_argument_group("output")
    group.add_argument("--output-prefix", metavar="PREFIX", help=f"files are {files}")
    add_overwrite_flag(group)
    group.add_argument(
        "--workers", type=int, default=os.cpu_count() or 1, metavar="N", help="processes at most (default: all cores)"
    )
    group.add_argument(
        "--show",
        type=int,
        default=0,
        metavar="N",
        help=f"print the first N {shown}; without --output-prefix do nothing else",
    )


def check_sample_flags(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    if arguments.output_prefix is None and not arguments.show:
        parser.error("--output-prefix is missing; give it, or look at the first samples with --show N")
    if arguments.workers < 1:
        parser.error("--workers must be at least 1")
    if arguments.show < 0:
        parser.error("--show must not be negative")


def name_unshown(faults: Sequence[str], num_shown: int) -> None:
    """Name the bad rows where --show has found too few others. Raises DataError if it has found none."""
    from megatron.data.index.indexed import DataError

    if not num_shown:
        raise DataError(faults[0] if faults else "no row of the input can be shown; a whole run counts why")
    for fault in faults:
        print(f"skipped {fault}", file=sys.stderr)


def shard_given(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> InputShard | None:
    """Return --shard. Exits with a message if it is not one, or not to be had with --max-documents."""
    from megatron.data.read.input_shards import InputShard

    if arguments.max_documents is not None and arguments.max_documents < 1:
        parser.error("--max-documents must be at least 1")
    if arguments.max_documents is not None and arguments.shard is not None:
        parser.error(
            "--shard with --max-documents: a shard does not know how many documents come before it; drop one of them"
        )
    try:
        return InputShard.parse(arguments.shard) if arguments.shard is not None else None
    except ValueError as error:
        parser.error(f"--shard: {error}")


def name_rules(arguments: argparse.Namespace) -> InputRules:
    """Return which names of files are read, and as what."""
    from megatron.data.read.sources import InputRules

    return InputRules(arguments.text_files, tuple(arguments.exclude), arguments.stdin_filename)


def find_input(arguments: argparse.Namespace) -> InputListing:
    """Return the input files. Raises DataError."""
    from megatron.data.read.sources import find_sources

    listing = find_sources(arguments.input, name_rules(arguments))
    if any(source.kind in ("parquet", "arrow") for source in listing.sources):
        from megatron.data.read.tables import check_columns

        check_columns(listing.sources, arguments.json_keys)
    return listing


def separator(arguments: argparse.Namespace) -> str | None:
    """Return --document-separator, with \\n and other escapes replaced."""
    text: str | None = arguments.document_separator
    return None if text is None else unescaped(text)


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
        "docs/guides/pretrain.md)",
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
