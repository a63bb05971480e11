"""Flags of the commands for data, each declared once.

--help must be quick, so nothing heavy is imported.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron.data.tokenizers.base import Tokenizer

_TRIAL = "there is nothing to search for: threads share one tokenizer; use --workers, by default all cores"
_VOCABULARY = "a dataset does not depend on it; give it to the training"
_SENTENCES = "sentences are for BERT and T5; BLOOM and Llama train on whole documents"
# flags of Megatron's tools/preprocess_data.py that this project does not have, with the reason or what to use
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


SHUFFLE_MEMORY_GB = 2

# Arguments of `add_argument` by flag; a command adds what is its own, such as a help text (`add_flags`).
FLAGS: dict[str, dict[str, Any]] = {
    # input
    "--input": {"nargs": "+", "required": True, "metavar": "PATH"},
    "--exclude": {
        "nargs": "+",
        "default": [],
        "metavar": "PATTERN",
        "help": "pass over files and folders of this name, or path within the folder, such as '*.pdf' or 'drafts/*'",
    },
    "--stdin-filename": {
        "default": "stdin.jsonl",
        "metavar": "NAME",
        "help": "read standard input as a file of this name, such as x.txt.gz (default: stdin.jsonl)",
    },
    "--text-files": {
        "metavar": "PATTERN",
        "help": "read files of this name, such as '*.py', as text, and only these in folders and archives",
    },
    "--document-separator": {
        "metavar": "TEXT",
        "help": "text between the documents of a text file, such as '<|endoftext|>' or '\\n\\n\\n' (default: a file is "
        "one document)",
    },
    "--json-keys": {"nargs": "+", "default": ["text"], "metavar": "KEY"},
    "--on-bad-line": {
        "choices": ("fail", "skip"),
        "default": "fail",
        "help": "what to do with a document that cannot be used (default: fail)",
    },
    "--max-document-mb": {
        "type": int,
        "default": 64,
        "metavar": "N",
        "help": "treat a longer document as one that cannot be used (default: 64)",
    },
    "--split": {"metavar": "NAME"},
    "--row-format": {
        "choices": ("auto", "mixed", "messages", "sharegpt", "prompt_completion", "alpaca", "question_answer", "text"),
        "default": "auto",
        "metavar": "FORM",
        "help": "form of the rows: auto (one for each file, found by their keys), mixed (found for each row), or one "
        "of messages, sharegpt, prompt_completion, alpaca, question_answer, text (default: auto)",
    },
    "--prompt-template": {
        "metavar": "TEXT",
        "help": "for other columns: the prompt, such as 'Question: {question}\n\nAnswer: ', or alpaca",
    },
    "--answer-key": {"metavar": "COLUMN", "help": "column of the answer to --prompt-template"},
    "--ignore-columns": {
        "nargs": "+",
        "default": [],
        "metavar": "COLUMN",
        "help": "leave these columns out: one that looks like a part of the prompt is refused otherwise",
    },
    "--shard": {
        "metavar": "NUMBER/COUNT",
        "help": "process one of COUNT shares of the input, of equal bytes, numbered from 1: one on each of several "
        "machines. merge_datasets joins them to what one machine would have made",
    },
    "--max-documents": {
        "type": int,
        "metavar": "N",
        "help": "stop after the first N documents of the input, blank and bad ones counted (default: read all of it)",
    },
    "--bad-rows": {
        "choices": ("error", "skip"),
        "default": "error",
        "help": "what to do with a row that cannot be used: skipped rows are counted by reason (default: error)",
    },
    "--skip-bad-rows": {
        "dest": "bad_rows",
        "action": "store_const",
        "const": "skip",
        "help": "the same as --bad-rows skip",
    },
    # tokenizer and template
    "--tokenizer-type": {
        "metavar": "TYPE",
        "help": "GPT2BPETokenizer, HFTokenizer, SentencePieceTokenizer, TikTokenizer or NullTokenizer; also "
        "HuggingFaceTokenizer, GPTSentencePieceTokenizer, Llama2Tokenizer",
    },
    "--tokenizer-model": {
        "metavar": "PATH",
        "help": "tokenizer.json, its folder, or a name on the hub; SentencePiece .model; tiktoken rank file, or "
        "Megatron's JSON vocabulary",
    },
    "--vocab-file": {"metavar": "PATH", "help": "GPT2BPETokenizer: vocab.json"},
    "--merge-file": {"metavar": "PATH", "help": "GPT2BPETokenizer: merges.txt"},
    "--vocab-size": {
        "type": int,
        "metavar": "N",
        "help": "NullTokenizer: one more than the largest id of a text, which is the end of document. TikTokenizer, "
        "JSON: number of ids, special tokens included (default: 131072)",
    },
    "--tiktoken-pattern": {
        "metavar": "NAME",
        "help": "TikTokenizer: pattern that splits text (default: found from the size of the file; of JSON: v2)",
    },
    "--tiktoken-num-special-tokens": {
        "type": int,
        "metavar": "N",
        "help": "TikTokenizer's JSON: ids before those of the text (default: 1000)",
    },
    "--prepend-bos": {
        "action": argparse.BooleanOptionalAction,
        "help": "begin each text with the begin-of-text id (default: as Megatron's tokenizer of that name; "
        "docs/guides/pretrain.md)",
    },
    "--parse-special": {
        "action": argparse.BooleanOptionalAction,
        "help": "encode special tokens written out in a document as their ids, not as text (default: likewise)",
    },
    "--eod-token": {
        "metavar": "TOKEN",
        "help": "the end-of-document token (default: the tokenizer's own)",
    },
    "--append-eod": {"action": "store_true", "help": "end every document with the end-of-document id"},
    "--reference-tokenizer": {
        "action": "store_true",
        "help": "do not use the accelerated tokenizer, whose ids are compared with the reference's on a sample",
    },
    "--chat-template": {"metavar": "NAME"},
    "--as-chat": {
        "action": "store_true",
        "help": "make messages of user and assistant of rows of texts, which the template then writes (default: texts "
        "stay as they are)",
    },
    "--add-special-tokens": {
        "action": "store_true",
        "help": "add the template's tokens that the tokenizer lacks",
    },
    "--tokenizer-output": {
        "metavar": "FOLDER",
        "help": "write the tokenizer with the added tokens and the template here (--overwrite replaces another)",
    },
    "--no-append-eos": {"dest": "append_eos", "action": "store_false"},
    # samples of chats
    "--max-length": {"type": int, "metavar": "N", "help": "tokens in a sample (default: no limit)"},
    "--too-long": {
        "choices": ("drop", "truncate", "split", "error"),
        "default": "drop",
        "help": "longer samples: drop them, keep the beginning, cut before questions, or count them and write nothing "
        "(default: drop)",
    },
    "--min-length": {"type": int, "default": 1, "metavar": "N", "help": "drop shorter samples (default: 1)"},
    "--train-on": {
        "choices": ("assistant", "all_but_system", "all"),
        "default": "assistant",
        "help": 'turns to train on in rows without "unmask"; all: every token, whatever a row says '
        "(default: assistant)",
    },
    "--turns": {
        "choices": ("together", "as_prompted"),
        "default": "together",
        "help": "a conversation is one sample, or each turn follows exactly its inference prompt, in as many samples "
        "as that needs (default: together)",
    },
    # output
    "--output-prefix": {"metavar": "PREFIX"},
    "--overwrite": {"action": "store_true", "help": "replace a finished dataset of this name"},
    "--shuffle": {
        "type": int,
        "metavar": "SEED",
        "help": "put the documents in a random order, the same for the same seed and datasets (default: keep the "
        "order)",
    },
    "--shuffle-memory-gb": {
        "type": float,
        "metavar": "GB",
        "help": f"memory for the documents that are shuffled at a time; the order does not depend on it (default: "
        f"{SHUFFLE_MEMORY_GB})",
    },
    "--workers": {
        "type": int,
        "default": os.cpu_count() or 1,
        "metavar": "N",
        "help": "processes at most (default: all cores)",
    },
    "--partitions": {
        "type": int,
        "default": 1,
        "metavar": "N",
        "help": "order documents as Megatron's N partitions do: every Nth from the first, every Nth from the second, "
        "...",
    },
    "--keep-sequential-samples": {
        "action": "store_true",
        "help": "keep the order of the input, whatever --partitions says",
    },
    "--dataset-impl": {"choices": ("mmap",), "default": "mmap", "help": "Megatron's; only mmap is written"},
    "--keep-newlines": {"action": "store_true", "help": "Megatron's; newlines are always kept"},
    "--log-interval": {"type": int, "default": 10000, "metavar": "N", "help": "documents between progress lines"},
    "--resume": {"action": "store_true", "help": "continue the unfinished work of an earlier run"},
    "--resume-interval": {
        "type": float,
        "default": 20.0,
        "metavar": "SECONDS",
        "help": "time between saves of the state that --resume continues from (default: 20)",
    },
    "--show": {"type": int, "default": 0, "metavar": "N"},
}

FILES = ("--input", "--exclude", "--stdin-filename")
TEXT = (*FILES, "--text-files", "--document-separator", "--json-keys", "--on-bad-line")
SHARE = ("--shard", "--max-documents")
TOKENIZER = (
    *("--tokenizer-type", "--tokenizer-model", "--vocab-file", "--merge-file", "--vocab-size", "--tiktoken-pattern"),
    *("--tiktoken-num-special-tokens", "--prepend-bos", "--parse-special", "--eod-token"),
)
RESUME = ("--resume", "--resume-interval")

LEAST = {
    "workers": 1,
    "log_interval": 1,
    "partitions": 1,
    "max_document_mb": 1,
    "max_documents": 1,
    "max_length": 1,
    "min_length": 1,
    "show": 0,
    "resume_interval": 0,
    "shuffle": 0,
    "shuffle_memory_gb": 0.001,
}
"""Smallest values of numbers."""

TEXT_INPUT = (
    "files, folders, globs, URLs, or - for standard input: .jsonl and .json with a JSON object a line, .parquet and "
    ".arrow with a document a row, .txt with one document, .tar of such files; all but tables also compressed: .gz, "
    ".zst, .xz, .bz2"
)

TOKENIZER_FOLDER = "tokenizer.json, its folder, or a model's name on the hub"


def add_flags(group: argparse._ActionsContainer, *names: str, **changes: Any) -> None:
    """Add flags; what is declared may be changed for a command, such as `help`."""
    for name in names:
        group.add_argument(name, **{**FLAGS[name], **changes})


def add_groups(
    parser: argparse.ArgumentParser, groups: Mapping[str, Sequence[str]], helps: Mapping[str, str], required: str = ""
) -> None:
    """Add flags in groups by title. `helps`: texts of this command alone; `required`: flags that it needs too."""
    for title, names in groups.items():
        group = parser.add_argument_group(title)
        for name in names:
            own: dict[str, Any] = {"required": True} if name in required.split() else {}
            if name in helps:
                own["help"] = helps[name]
            add_flags(group, name, **own)


def parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the flags. Exits with a message, which says what to do about those of Megatron that are refused."""
    arguments, unknown = parser.parse_known_args(argv)
    # --flag=VALUE is one word
    names = [word.partition("=")[0] for word in unknown]
    reasons = [f"{name} is not supported: {REFUSED[name]}" for name in dict.fromkeys(names) if name in REFUSED]
    if reasons:
        parser.error("\n  ".join(reasons))
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    check(parser, arguments)
    return arguments


def check(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Check the flags of those above that a command has, and read --shard. Exits with a message."""
    given = vars(arguments)
    for name, least in LEAST.items():
        value = given.get(name)
        # nan, which `float` reads, fails a comparison in this form
        if value is not None and not value >= least:
            rule = f"be at least {least}" if least else "not be negative"
            parser.error(f"--{name.replace('_', '-')} must {rule}")
    keys = given.get("json_keys", [])
    if len(set(keys)) < len(keys):
        parser.error(f"--json-keys {' '.join(keys)} repeats a key; name each once")
    if given.get("document_separator") == "":
        parser.error("--document-separator is empty; leave it out if each file is one document")
    # samples alone may be looked at, without any output
    if "show" in given and not arguments.show and arguments.output_prefix is None:
        parser.error("--output-prefix is missing; give it, or look at the first samples with --show N")
    if given.get("shard") is not None:
        _read_shard(parser, arguments)


def _read_shard(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    from megatron.data.read.input_shards import InputShard

    if arguments.max_documents is not None:
        parser.error(
            "--shard with --max-documents: a shard does not know how many documents come before it; drop one of them"
        )
    try:
        # here, not by argparse: its type would import the reader for --help
        arguments.shard = InputShard.parse(arguments.shard)
    except ValueError as error:
        parser.error(f"--shard: {error}")


def separator_of(arguments: argparse.Namespace) -> str | None:
    """Return --document-separator, with \\n and other escapes replaced."""
    if arguments.document_separator is None:
        return None
    from megatron.options.flags import unescaped  # pydantic, which takes its time

    return unescaped(arguments.document_separator)


def tokenizer_of(arguments: argparse.Namespace) -> Tokenizer:
    """Build the tokenizer. Raises DataError."""
    from megatron.data.tokenizers.build import build_tokenizer

    return build_tokenizer(
        arguments.tokenizer_type,
        tokenizer_folder(arguments.tokenizer_model),
        arguments.vocab_file,
        arguments.merge_file,
        arguments.vocab_size,
        eod_token=arguments.eod_token,
        prepend_bos=arguments.prepend_bos,
        parse_special_tokens=arguments.parse_special,
        tiktoken_pattern=arguments.tiktoken_pattern,
        tiktoken_num_special_tokens=arguments.tiktoken_num_special_tokens,
    )


def tokenizer_folder(given: str | None) -> str | None:
    """Return --tokenizer-model, of a name on the hub the folder in its cache. Raises DataError."""
    if given is None:
        return None
    from megatron.data.index.indexed import DataError
    from megatron.hub.download import local_folder
    from megatron.hub.names import HubError

    try:
        return str(local_folder(given, "--tokenizer-model", "tokenizer"))
    except HubError as error:
        raise DataError(str(error)) from None
