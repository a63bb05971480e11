"""Tokenize text into indexed datasets, PREFIX_KEY_document.bin and .idx, for --data-path PREFIX_KEY_document.

    python tools/preprocess_data.py --input corpus.jsonl --output-prefix data/corpus \\
        --tokenizer-type GPT2BPETokenizer --vocab-file vocab.json --merge-file merges.txt --append-eod --workers 4

The work of a killed or failed run stays in PREFIX.unfinished/, and --resume continues from there.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from megatron.cli import text_flags
from megatron.cli.command import command, run_command
from megatron.cli.text_flags import (
    add_input_flags,
    add_overwrite_flag,
    add_share_flags,
    add_tokenizer_flags,
    check_input_flags,
    find_input,
    name_rules,
    separator,
    shard_given,
    tokenizer_of,
)
from megatron.runtime.commands import command_name

if TYPE_CHECKING:
    from megatron.data.prepare.document_encoder import TextTotals
    from megatron.data.prepare.preprocess import PreprocessJob


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=command_name("preprocess_data"),
        description="Tokenize text into PREFIX_KEY_document.bin and .idx, Megatron's indexed format.",
        allow_abbrev=False,
    )
    source = add_input_flags(parser, "keys or columns to tokenize, each into a dataset (default: text)")
    source.add_argument(
        "--max-document-mb",
        type=int,
        default=64,
        metavar="N",
        help="treat a longer document as one that cannot be used (default: 64)",
    )
    add_share_flags(source)
    tokenizer = add_tokenizer_flags(parser, required=True)
    tokenizer.add_argument("--append-eod", action="store_true", help="end every document with the end-of-document id")
    tokenizer.add_argument(
        "--reference-tokenizer",
        action="store_true",
        help="do not use the accelerated tokenizer, whose ids are compared with the reference's on a sample",
    )
    output = parser.add_argument_group("output")
    output.add_argument(
        "--output-prefix", required=True, metavar="PREFIX", help="files are PREFIX_KEY_document.bin, .idx, .sha256"
    )
    add_overwrite_flag(output)
    output.add_argument(
        "--workers", type=int, default=os.cpu_count() or 1, metavar="N", help="threads (default: all cores)"
    )
    output.add_argument(
        "--partitions",
        type=int,
        default=1,
        metavar="N",
        help="order documents as Megatron's N partitions do: every Nth from the first, every Nth from the second, ...",
    )
    output.add_argument(
        "--keep-sequential-samples", action="store_true", help="keep the order of the input, whatever --partitions says"
    )
    output.add_argument("--dataset-impl", choices=("mmap",), default="mmap", help="Megatron's; only mmap is written")
    output.add_argument("--keep-newlines", action="store_true", help="Megatron's; newlines are always kept")
    output.add_argument("--log-interval", type=int, default=10000, metavar="N", help="documents between progress lines")
    output.add_argument("--resume", action="store_true", help="continue the unfinished work of an earlier run")
    output.add_argument(
        "--resume-interval",
        type=float,
        default=20.0,
        metavar="SECONDS",
        help="time between saves of the state that --resume continues from (default: 20)",
    )
    arguments = text_flags.parse(parser, argv)
    check_numbers(parser, arguments)
    check_input_flags(parser, arguments)
    check_keys(parser, arguments.json_keys)
    arguments.shard = shard_given(parser, arguments)
    if arguments.shard is not None and arguments.partitions > 1 and not arguments.keep_sequential_samples:
        parser.error("--shard with --partitions: merged shards would not have the order of the partitions; drop one")
    return arguments


def check_keys(parser: argparse.ArgumentParser, keys: Sequence[str]) -> None:
    """Exit with a message for a key that cannot be part of a file's name."""
    wrong = next((key for key in keys if "/" in key), None)
    if wrong is not None:
        parser.error(
            f"--json-keys {wrong}: the files are named PREFIX_KEY_document, so a key must not contain /; rename the key"
        )


def check_numbers(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Exit with a message for a number that is out of range."""
    for name in ("workers", "log_interval", "partitions", "max_document_mb"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    if not arguments.resume_interval >= 0:
        parser.error("--resume-interval must not be negative")


class ProgressReport:
    """A bar on a terminal, elsewhere a line every `log_interval` documents. On stderr."""

    def __init__(self, log_interval: int):
        self._log_interval = log_interval
        self._is_done = False

    def note(self, text: str) -> None:
        print(text, file=sys.stderr)

    def start(self, num_bytes: int | None, totals: TextTotals) -> None:
        from tqdm import tqdm

        self._started_bytes, self._started_documents = totals.num_bytes, totals.num_documents
        self._next_line = totals.num_documents + self._log_interval
        self._started_s = time.monotonic()
        self._bar = tqdm(
            total=num_bytes,
            initial=totals.num_bytes,
            unit="B",
            unit_scale=True,
            unit_divisor=1000,
            smoothing=0.1,
            disable=not sys.stderr.isatty(),
            leave=False,
        )

    def show(self, totals: TextTotals) -> None:
        if not self._bar.disable:
            self._bar.set_postfix_str(f"{totals.num_documents} documents", refresh=False)
            self._bar.update(totals.num_bytes - self._bar.n)
        elif totals.num_documents >= self._next_line:
            self._print(totals)
            self._next_line = totals.num_documents // self._log_interval * self._log_interval + self._log_interval

    def finish(self, totals: TextTotals) -> None:
        self.close()
        self._is_done = True
        self._print(totals)

    def close(self) -> None:
        self._bar.close()

    def _print(self, totals: TextTotals) -> None:
        elapsed_s = max(time.monotonic() - self._started_s, 1e-9)
        num_documents = totals.num_documents - self._started_documents
        megabytes = (totals.num_bytes - self._started_bytes) / 1e6
        ends = f" in {elapsed_s:.1f} s"
        if not self._is_done and self._bar.total is not None:
            left_s = (self._bar.total - totals.num_bytes) / 1e6 / max(megabytes / elapsed_s, 1e-9)
            ends = f", {max(0, left_s):.0f} s left"
        print(
            f"{totals.num_documents} documents, {num_documents / elapsed_s:.0f} docs/s, "
            f"{megabytes / elapsed_s:.2f} MB/s{ends}",
            file=sys.stderr,
            flush=True,
        )


def job_of(arguments: argparse.Namespace) -> PreprocessJob:
    """Find every file and build the tokenizer. Raises DataError."""
    from megatron.data.index.indexed import DataError
    from megatron.data.prepare.preprocess import PreprocessJob

    listing, keys = find_input(arguments), tuple(arguments.json_keys)
    if len(keys) > 1 and any(source.kind == "text" for source in listing.sources):
        raise DataError(f"--json-keys {' '.join(keys)}: text files have no keys; give JSONL, or one key")
    tokenizer = tokenizer_of(arguments)
    if arguments.append_eod and tokenizer.eod is None:
        raise DataError("--append-eod: this tokenizer has no end-of-document token; name it with --eod-token")
    if arguments.append_eod and tokenizer.identity["after"][-1:] == [tokenizer.eod]:
        raise DataError(
            f"--append-eod would end each document twice: the tokenizer's own files end it with id {tokenizer.eod}. "
            "Leave out --append-eod, or give --no-prepend-bos"
        )
    return PreprocessJob(
        whole_input=listing,
        names=name_rules(arguments),
        keys=keys,
        output_prefix=arguments.output_prefix,
        tokenizer=tokenizer,
        eod=tokenizer.eod if arguments.append_eod else None,
        uses_reference=arguments.reference_tokenizer or arguments.tokenizer_type == "NullTokenizer",
        separator=separator(arguments),
        num_partitions=1 if arguments.keep_sequential_samples else arguments.partitions,
        max_document_bytes=arguments.max_document_mb << 20,
        skips_faults=arguments.on_bad_line == "skip",
        workers=arguments.workers,
        resume=arguments.resume,
        resume_interval_s=arguments.resume_interval,
        shard=arguments.shard,
        max_documents=arguments.max_documents,
        overwrite=arguments.overwrite,
    )


def run(arguments: argparse.Namespace) -> None:
    """Run the command. Raises DataError or OSError, with no final file written."""
    # one thread a worker: --workers alone decides how many cores are used
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from megatron.data.prepare.preprocess import preprocess

    job = job_of(arguments)
    gc.freeze()  # a list of a million files would be searched for garbage again and again, a third of the time
    totals = preprocess(job, ProgressReport(arguments.log_interval))
    if totals is None:
        print("nothing to resume: the datasets are finished")
    else:
        summarize(job, totals)


def summarize(job: PreprocessJob, totals: TextTotals) -> None:
    from megatron.data.index.indexed import IndexedDataset
    from megatron.data.prepare.manifest import read_manifest

    for prefix, num_empty in zip(job.prefixes, totals.num_empty, strict=True):
        data = IndexedDataset(prefix)
        print(
            f"{prefix}.bin, .idx: {data.num_documents} documents, {data.num_tokens} tokens "
            f"({data.dtype}, vocabulary {job.tokenizer.vocab_size}); {num_empty} empty documents "
            f"{'left out' if len(job.keys) == 1 else 'among them'}"
        )
    manifest = read_manifest(job.prefixes[0])
    if manifest is not None:
        print(f"{manifest.path}: {manifest.describe()}")
    if totals.num_bad or totals.num_blank:
        print(f"skipped {totals.num_bad} bad documents and {totals.num_blank} blank ones")


@command
def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    from megatron.data.index.indexed import DataError
    from megatron.data.prepare.preprocess import kept_work

    prefix = arguments.output_prefix
    return run_command(lambda: run(arguments), (DataError,), prefix, lambda: kept_work(prefix))
