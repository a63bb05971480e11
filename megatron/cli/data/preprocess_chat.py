"""Tokenize chats for supervised fine-tuning: PREFIX.bin and .idx, and their loss mask, PREFIX_loss_mask.bin and .idx.

    python tools/preprocess_chat.py --input chats.jsonl --output-prefix data/chats \\
        --tokenizer-model tokenizer.json --chat-template chatml --max-length 4096 --workers 4 --show 3

Each row is {"messages": [{"role": "user", "content": "..."}, ...]}, or of another form that people have: ShareGPT's,
Alpaca's, prompt and completion, question and answer. The loss is on what the assistant writes (docs/guides/chats.md).
All that is left out is counted, and the files get their names only when all of them are complete.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from megatron.cli.command import command, command_parser
from megatron.cli.data import flags, jobs

if TYPE_CHECKING:
    from megatron.data.chat.encoder import Sample
    from megatron.data.chat.preprocessing import ChatJob, ChatRows, ChatTotals
    from megatron.data.prepare.block_encoder import JobInput

TRAINED, DIMMED, PLAIN = "\033[1;32m", "\033[2m", "\033[0m"
WITHOUT_COLOUR = ("\u27e6", "\u27e7")
"""Brackets around trained tokens on output without colour."""
SHOWN_LINES_OF_A_SAMPLE = 60

GROUPS = {
    "input": (
        *flags.FILES,
        *("--split", "--row-format", "--prompt-template", "--answer-key", "--ignore-columns"),
        *(*flags.SHARE, "--bad-rows", "--skip-bad-rows"),
    ),
    "tokenizer and template": (
        *("--tokenizer-model", "--chat-template", "--add-special-tokens", "--tokenizer-output", "--no-append-eos"),
    ),
    "samples": ("--max-length", "--too-long", "--min-length", "--train-on", "--turns"),
    "output": ("--output-prefix", "--overwrite", "--workers", *flags.RESUME, "--show"),
}
HELPS = {
    "--input": "files, folders, globs, URLs, or - for standard input: .jsonl and .json with a conversation a line, "
    ".parquet and .arrow with one a row, .tar of JSONL; all but tables also compressed: .gz, .zst, .xz, .bz2",
    "--split": "read this split of a dataset, also on the hub, such as train",
    "--tokenizer-model": flags.TOKENIZER_FOLDER,
    "--chat-template": "a preset, a .jinja file, or a .py file with CHAT_TEMPLATE and SPECIAL_TOKENS (default: the "
    "tokenizer's)",
    "--no-append-eos": "do not append EOS to a last turn that the template leaves without an end (default: append it)",
    "--output-prefix": "files are PREFIX.bin, PREFIX_loss_mask.bin, ...",
    "--show": "print the first N samples with their trained tokens in colour; without --output-prefix do nothing else",
}


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = command_parser(
        "preprocess_chat",
        "Tokenize chats into PREFIX.bin and .idx, and what is trained into PREFIX_loss_mask.bin and .idx.",
    )
    flags.add_groups(parser, GROUPS, HELPS, required="--tokenizer-model")
    return flags.parse(parser, argv)


# ---------------------------------------------------------------------------------------------------------------------
# Samples to print


def pieces(sample: Sample, rows: ChatRows) -> Iterator[tuple[str, bool]]:
    """Yield the text in pieces, and for each whether it is trained."""
    start = 0
    # runs of tokens of one kind: the text of a token alone may be a part of a letter
    for end in range(1, sample.length + 1):
        if end == sample.length or sample.mask[end] != sample.mask[start]:
            yield rows.tokenizer.decode(sample.ids[start:end].tolist()), bool(sample.mask[start])
            start = end


def styles(has_colour: bool) -> tuple[tuple[str, str], tuple[str, str]]:
    """Return what stands before and behind trained tokens, and others."""
    if has_colour:
        return (TRAINED, PLAIN), (DIMMED, PLAIN)
    return WITHOUT_COLOUR, ("", "")


def in_colour(sample: Sample, rows: ChatRows, has_colour: bool) -> str:
    """Return a sample as text, its trained tokens bold and green, or between double brackets."""
    trained, other = styles(has_colour)
    parts = []
    for text, is_trained in pieces(sample, rows):
        begin, end = trained if is_trained else other
        if has_colour:
            # line by line: a terminal extends a colour to the next line
            text = text.replace("\n", f"{end}\n{begin}")
        parts.append(f"{begin}{text}{end}")
    lines = "".join(parts).split("\n")
    if len(lines) > SHOWN_LINES_OF_A_SAMPLE:
        left_out = len(lines) - SHOWN_LINES_OF_A_SAMPLE
        middle = SHOWN_LINES_OF_A_SAMPLE // 2
        lines = [*lines[:middle], f"... {left_out} lines ...", *lines[-middle:]]
    return "\n".join(lines)


def show_samples(job: ChatJob, files: JobInput, count: int) -> None:
    rows, samples = jobs.samples_to_show(job, files, count)
    # NO_COLOR: https://no-color.org, whatever its value
    has_colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    begin, end = styles(has_colour)[0]
    print(f"template: {rows.source.origin}; tokens that are {begin}trained{end}:")
    # in a sample they look like tokens
    if as_text := rows.tokenizer.without_token(rows.source.tokens_to_add()):
        print(f"markers of the template that are not tokens: {' '.join(as_text)}; --add-special-tokens makes them so")
    for number, sample in enumerate(samples, start=1):
        num_trained = int(sample.mask.sum())
        print(f"\n--- sample {number}: {sample.length} tokens, {num_trained} trained ---")
        print(in_colour(sample, rows, has_colour))
    print()


# ---------------------------------------------------------------------------------------------------------------------
# The command


def run(arguments: argparse.Namespace) -> None:
    """Run the command. Raises DataError or OSError, with no final file written, and Finished."""
    from megatron.data.chat.preprocessing import ChatJob, preprocess_chats

    jobs.prepare_rows(jobs.job_of(ChatJob, arguments), arguments.show, show_samples, preprocess_chats, summarize)


def summarize(job: ChatJob, totals: ChatTotals, elapsed_s: float) -> None:
    from megatron.data.index.indexed import LOSS_MASK_SUFFIX
    from megatron.data.prepare.manifest import read_manifest

    counts = totals.counts
    share = 100 * counts.num_loss_tokens / totals.num_tokens
    rows = [
        ("rows read", f"{counts.num_rows:,}"),
        *((f"format: {form}", f"{count:,}") for form, count in counts.forms.items()),
        ("samples", f"{totals.num_samples:,}"),
        ("tokens", f"{totals.num_tokens:,}"),
        ("trained tokens", f"{counts.num_loss_tokens:,} ({share:.1f} %)"),
        ("lengths", jobs.spread(totals.length_percentiles)),
        ("vocabulary", f"{totals.vocab_size:,}"),
    ]
    if totals.added_tokens:
        rows.append(("added tokens", " ".join(totals.added_tokens)))
    jobs.print_table(rows, {"blank lines": counts.num_blank, **counts.outcomes()})
    manifest = read_manifest(job.output_prefix)
    if manifest is not None:
        print(f"{manifest.path}: {manifest.describe(with_outcomes=False)}")
    written = [f"{job.output_prefix}.bin", f"{job.output_prefix}{LOSS_MASK_SUFFIX}.bin"]
    if job.tokenizer_output:
        written.append(f"{job.tokenizer_output}/tokenizer.json")
    print(f"written in {elapsed_s:.1f} s: {', '.join(written)}")


@command
def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    return jobs.run_preparation(lambda: run(arguments), arguments.output_prefix)
