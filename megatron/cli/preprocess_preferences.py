"""Tokenize preferences for DPO and related objectives: PREFIX.bin and .idx, with a prompt and its two answers a row.

    python tools/preprocess_preferences.py --input pairs.jsonl --output-prefix data/pairs \\
        --tokenizer-model models/llama --workers 4 --show 2

Each line is {"prompt": ..., "chosen": ..., "rejected": ...}, of texts or lists of messages; docs/guides/preference.md
has all formats. All that is left out is counted, and the files get their names only when both are complete.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from megatron.cli.command import command, run_command
from megatron.cli.text_flags import (
    add_column_flag,
    add_file_flags,
    add_sample_flags,
    add_share_flags,
    check_sample_flags,
    name_unshown,
    shard_given,
)
from megatron.runtime.commands import command_name

if TYPE_CHECKING:
    from megatron.data.preference.encoder import PairCounts
    from megatron.data.preference.preprocessing import PreferenceJob, PreferenceTotals


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=command_name("preprocess_preferences"),
        description="Tokenize preferences, a prompt and two answers a row, into PREFIX.bin and .idx.",
        allow_abbrev=False,
    )
    source = parser.add_argument_group("input")
    add_file_flags(
        source,
        "files, folders, globs, URLs, or - for standard input: .jsonl and .json with a row a line, .tar of such files, "
        "all also compressed: .gz, .zst, .xz, .bz2; .parquet and .arrow",
    )
    source.add_argument(
        "--split", metavar="NAME", help="read the files of this split of a downloaded dataset, such as train_prefs"
    )
    add_column_flag(source)
    add_share_flags(source)
    source.add_argument(
        "--bad-rows",
        choices=("error", "skip"),
        default="error",
        help="what to do with a row that cannot be used: skipped rows are counted by reason (default: error)",
    )
    text = parser.add_argument_group("tokenizer and template")
    text.add_argument("--tokenizer-model", required=True, metavar="PATH", help="tokenizer.json, or its folder")
    text.add_argument(
        "--chat-template",
        metavar="NAME",
        help="for rows of messages: a preset, a .jinja file, or a .py file with CHAT_TEMPLATE (default: the "
        "tokenizer's)",
    )
    text.add_argument(
        "--as-chat",
        action="store_true",
        help="make messages of user and assistant of rows of texts, which the template then writes (default: texts "
        "stay as they are)",
    )
    text.add_argument(
        "--no-append-eos",
        dest="append_eos",
        action="store_false",
        help="do not append EOS to texts, and to conversations that the template leaves without an end (default: "
        "append it)",
    )
    add_sample_flags(parser, files="PREFIX.bin and PREFIX.idx", shown="pairs as they are tokenized")
    arguments = parser.parse_args(argv)
    check_sample_flags(parser, arguments)
    arguments.shard = shard_given(parser, arguments)
    return arguments


def job_of(arguments: argparse.Namespace) -> PreferenceJob:
    from megatron.data.preference.preprocessing import PreferenceJob

    return PreferenceJob(
        inputs=tuple(arguments.input),
        output_prefix=arguments.output_prefix or "",
        tokenizer=arguments.tokenizer_model,
        chat_template=arguments.chat_template,
        as_chat=arguments.as_chat,
        append_eos=arguments.append_eos,
        bad_rows=arguments.bad_rows,
        ignore_columns=tuple(arguments.ignore_columns),
        split=arguments.split,
        workers=arguments.workers,
        exclude=tuple(arguments.exclude),
        stdin_filename=arguments.stdin_filename,
        shard=arguments.shard,
        max_documents=arguments.max_documents,
        overwrite=arguments.overwrite,
    )


def show_pairs(job: PreferenceJob, count: int) -> None:
    """Print the first pairs of the input, without bad rows: named if pairs run short. Raises DataError."""
    from dataclasses import replace

    from megatron.data.chat.job import SHOWN_FAULTS
    from megatron.data.preference.preprocessing import encode_pairs, find_pairs, prepare_preferences
    from megatron.data.read.archives import read_blocks

    setup, number, faults = prepare_preferences(job), 0, list[str]()
    for block in read_blocks(find_pairs(job).sources, job.reading(1 << 16)):
        encoded = encode_pairs(setup.encoder, replace(job, bad_rows="skip"), [block])
        faults += encoded.faults
        for pair in encoded.pairs():
            if number == count:
                return
            number += 1
            print(f"--- pair {number} ---")
            for name, ids in zip(("prompt", "chosen", "rejected"), pair.parts, strict=True):
                print(f"[{name}: {len(ids)} tokens]\n{setup.tokenizer.decode(ids.tolist())}")
            print()
    if number < count:
        name_unshown(faults[:SHOWN_FAULTS], number)


def run(arguments: argparse.Namespace) -> None:
    """Run the command. Raises DataError or OSError, with no final file written."""
    from megatron.data.preference.preprocessing import preprocess_preferences

    job = job_of(arguments)
    if arguments.show:
        show_pairs(job, arguments.show)
    if not job.output_prefix:
        return
    started_s = time.monotonic()
    summarize(job, preprocess_preferences(job), time.monotonic() - started_s)


def summarize(job: PreferenceJob, totals: PreferenceTotals, elapsed_s: float) -> None:
    for fault in totals.faults:
        print(f"skipped {fault}", file=sys.stderr)
    counts = totals.counts
    rows = [
        ("rows read", f"{counts.num_rows:,}"),
        *((f"format: {form}", _of_form(counts, form)) for form in counts.forms),
        ("pairs", f"{totals.num_pairs - counts.num_unpaired:,}"),
        ("tokens", ", ".join(f"{name}: {count:,}" for name, count in totals.num_tokens.items())),
        *(
            (f"lengths, {name}", ", ".join(f"{percent} %: {length}" for percent, length in levels.items()))
            for name, levels in totals.length_percentiles.items()
        ),
        ("vocabulary", f"{totals.vocab_size:,}"),
    ]
    counted = {"blank lines": totals.num_blank, **counts.outcomes()}
    rows += [(name, f"{count:,}") for name, count in counted.items() if count]
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        print(f"{name:<{width}}  {value}")
    print(f"written in {elapsed_s:.1f} s: {job.output_prefix}.bin, {job.output_prefix}.idx")


def _of_form(counts: PairCounts, form: str) -> str:
    """Return the number of rows of a format, and where it begins if it is not the only one."""
    return f"{counts.forms[form]:,}" + (f", first {counts.first_rows[form]}" if len(counts.forms) > 1 else "")


@command
def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    from megatron.data.index.indexed import DataError

    return run_command(lambda: run(arguments), (DataError,), arguments.output_prefix or "")
