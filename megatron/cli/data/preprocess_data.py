"""Tokenize text into indexed datasets, PREFIX_KEY_document.bin and .idx, for --data-path PREFIX_KEY_document.

    python tools/preprocess_data.py --input corpus.jsonl --output-prefix data/corpus \\
        --tokenizer-type GPT2BPETokenizer --vocab-file vocab.json --merge-file merges.txt --append-eod --workers 4

The work of a killed or failed run stays in PREFIX.unfinished/, and --resume continues from there.
"""

from __future__ import annotations

import argparse
import gc
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from megatron.cli.command import command, command_parser
from megatron.cli.data import flags, jobs

if TYPE_CHECKING:
    from megatron.data.prepare.text import TextCounts, TextJob

GROUPS = {
    "input": (*flags.TEXT, "--max-document-mb", *flags.SHARE),
    "tokenizer": (*flags.TOKENIZER, "--append-eod", "--reference-tokenizer"),
    "output": (
        *("--output-prefix", "--overwrite", "--workers", "--partitions", "--keep-sequential-samples"),
        *("--dataset-impl", "--keep-newlines", "--log-interval", *flags.RESUME),
    ),
}
HELPS = {
    "--input": flags.TEXT_INPUT,
    "--json-keys": "keys or columns to tokenize, each into a dataset (default: text)",
    "--output-prefix": "files are PREFIX_KEY_document.bin, .idx, .sha256",
    "--workers": "threads (default: all cores)",
}


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = command_parser(
        "preprocess_data", "Tokenize text into PREFIX_KEY_document.bin and .idx, Megatron's indexed format."
    )
    flags.add_groups(parser, GROUPS, HELPS, required="--tokenizer-type --output-prefix")
    arguments = flags.parse(parser, argv)
    check_keys(parser, arguments.json_keys)
    if arguments.shard is not None and arguments.partitions > 1 and not arguments.keep_sequential_samples:
        parser.error("--shard with --partitions: merged shards would not have the order of the partitions; drop one")
    return arguments


def check_keys(parser: argparse.ArgumentParser, keys: Sequence[str]) -> None:
    """Exit with a message for a key that cannot be part of a file's name."""
    # a column of Parquet may have any name
    wrong = next((key for key in keys if "/" in key), None)
    if wrong is not None:
        parser.error(
            f"--json-keys {wrong}: the files are named PREFIX_KEY_document, so a key must not contain /; rename the key"
        )


def text_job(arguments: argparse.Namespace) -> TextJob:
    """Build the tokenizer, and return the job. Raises DataError."""
    from megatron.data.index.indexed import DataError
    from megatron.data.prepare.text import TextJob

    tokenizer = flags.tokenizer_of(arguments)
    if arguments.append_eod and tokenizer.eod is None:
        raise DataError("--append-eod: this tokenizer has no end-of-document token; name it with --eod-token")
    # a tokenizer.json may have a post-processor that ends each text itself
    if arguments.append_eod and tokenizer.identity["after"][-1:] == [tokenizer.eod]:
        raise DataError(
            f"--append-eod would end each document twice: the tokenizer's own files end it with id {tokenizer.eod}. "
            "Leave out --append-eod, or give --no-prepend-bos"
        )
    return jobs.job_of(
        TextJob,
        arguments,
        tokenizer=tokenizer,
        eod=tokenizer.eod if arguments.append_eod else None,
        uses_reference=arguments.reference_tokenizer or arguments.tokenizer_type == "NullTokenizer",
        separator=flags.separator_of(arguments),
        num_partitions=1 if arguments.keep_sequential_samples else arguments.partitions,
        max_document_bytes=arguments.max_document_mb << 20,
        skips_faults=arguments.on_bad_line == "skip",
    )


def run(arguments: argparse.Namespace) -> None:
    """Run the command. Raises DataError or OSError, with no final file written, and Finished."""
    # one thread a worker: --workers alone decides how many cores are used
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from megatron.data.index.indexed import DataError
    from megatron.data.prepare.block_encoder import find_input
    from megatron.data.prepare.text import preprocess_text

    job = text_job(arguments)
    files = find_input(job)
    # after the input is known: the kind of a file is found by its name
    if len(job.keys) > 1 and any(source.kind == "text" for source in files.whole.sources):
        raise DataError(f"--json-keys {' '.join(job.keys)}: text files have no keys; give JSONL, or one key")
    gc.freeze()  # a list of a million files would be searched for garbage again and again, a third of the time
    summarize(job, preprocess_text(job, files, jobs.ProgressReport(arguments.log_interval)))


def summarize(job: TextJob, counts: TextCounts) -> None:
    from megatron.data.index.indexed import IndexedDataset
    from megatron.data.prepare.manifest import read_manifest

    for prefix, num_empty in zip(job.prefixes, counts.num_empty, strict=True):
        data = IndexedDataset(prefix)
        print(
            f"{prefix}.bin, .idx: {data.num_documents} documents, {data.num_tokens} tokens "
            f"({data.dtype}, vocabulary {job.tokenizer.vocab_size}); {num_empty} empty documents "
            f"{'left out' if len(job.keys) == 1 else 'among them'}"
        )
    manifest = read_manifest(job.prefixes[0])
    if manifest is not None:
        print(f"{manifest.path}: {manifest.describe()}")
    if counts.num_bad or counts.num_blank:
        print(f"skipped {counts.num_bad} bad documents and {counts.num_blank} blank ones")


@command
def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    return jobs.run_preparation(lambda: run(arguments), arguments.output_prefix)
