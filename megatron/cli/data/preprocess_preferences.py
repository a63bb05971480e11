"""Tokenize preferences for DPO and related objectives: PREFIX.bin and .idx, with a prompt and its two answers a row.

    python tools/preprocess_preferences.py --input pairs.jsonl --output-prefix data/pairs \\
        --tokenizer-model models/llama --workers 4 --show 2

Each line is {"prompt": ..., "chosen": ..., "rejected": ...}, of texts or lists of messages; docs/guides/preference.md
has all formats. All that is left out is counted, and the files get their names only when both are complete.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from megatron.cli.command import command, command_parser
from megatron.cli.data import flags, jobs

if TYPE_CHECKING:
    from megatron.data.preference.encoder import PairCounts
    from megatron.data.preference.preprocessing import PreferenceJob, PreferenceTotals
    from megatron.data.prepare.block_encoder import JobInput

GROUPS = {
    "input": (*flags.FILES, "--split", "--ignore-columns", *flags.SHARE, "--bad-rows"),
    "tokenizer and template": ("--tokenizer-model", "--chat-template", "--as-chat", "--no-append-eos"),
    "output": ("--output-prefix", "--overwrite", "--workers", *flags.RESUME, "--show"),
}
HELPS = {
    "--input": "files, folders, globs, URLs, or - for standard input: .jsonl and .json with a row a line, .tar of such "
    "files, all also compressed: .gz, .zst, .xz, .bz2; .parquet and .arrow",
    "--split": "read this split of a dataset, also on the hub, such as train_prefs",
    "--tokenizer-model": flags.TOKENIZER_FOLDER,
    "--chat-template": "for rows of messages: a preset, a .jinja file, or a .py file with CHAT_TEMPLATE (default: the "
    "tokenizer's)",
    "--no-append-eos": "do not append EOS to texts, and to conversations that the template leaves without an end "
    "(default: append it)",
    "--output-prefix": "files are PREFIX.bin and PREFIX.idx",
    "--show": "print the first N pairs as they are tokenized; without --output-prefix do nothing else",
}


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = command_parser(
        "preprocess_preferences", "Tokenize preferences, a prompt and two answers a row, into PREFIX.bin and .idx."
    )
    flags.add_groups(parser, GROUPS, HELPS, required="--tokenizer-model")
    return flags.parse(parser, argv)


def show_pairs(job: PreferenceJob, files: JobInput, count: int) -> None:
    """Print the first pairs of the input. Raises DataError."""
    rows, pairs = jobs.samples_to_show(job, files, count)
    for number, pair in enumerate(pairs, start=1):
        print(f"--- pair {number} ---")
        for name, ids in zip(("prompt", "chosen", "rejected"), pair.parts, strict=True):
            print(f"[{name}: {len(ids)} tokens]\n{rows.tokenizer.decode(ids.tolist())}")
        print()


def run(arguments: argparse.Namespace) -> None:
    """Run the command. Raises DataError or OSError, with no final file written, and Finished."""
    from megatron.data.preference.preprocessing import PreferenceJob, preprocess_preferences

    jobs.prepare_rows(
        jobs.job_of(PreferenceJob, arguments), arguments.show, show_pairs, preprocess_preferences, summarize
    )


def summarize(job: PreferenceJob, totals: PreferenceTotals, elapsed_s: float) -> None:
    counts = totals.counts
    rows = [
        ("rows read", f"{counts.num_rows:,}"),
        *((f"format: {form}", _of_form(counts, form)) for form in counts.forms),
        ("pairs", f"{totals.num_pairs - counts.num_unpaired:,}"),
        ("tokens", ", ".join(f"{name}: {count:,}" for name, count in totals.num_tokens.items())),
        *((f"lengths, {name}", jobs.spread(levels)) for name, levels in totals.length_percentiles.items()),
        ("vocabulary", f"{totals.vocab_size:,}"),
    ]
    jobs.print_table(rows, {"blank lines": counts.num_blank, **counts.outcomes()})
    print(f"written in {elapsed_s:.1f} s: {job.output_prefix}.bin, {job.output_prefix}.idx")


def _of_form(counts: PairCounts, form: str) -> str:
    """Return the number of rows of a format, and where it begins if it is not the only one."""
    if len(counts.forms) == 1:
        return f"{counts.forms[form]:,}"
    return f"{counts.forms[form]:,}, first {counts.first_rows[form]}"


@command
def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    return jobs.run_preparation(lambda: run(arguments), arguments.output_prefix)
