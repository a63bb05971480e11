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
import time
from collections.abc import Iterator, Sequence
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
    from megatron.data.chat.encoder import Sample
    from megatron.data.chat.job import ChatJob, ChatSetup
    from megatron.data.chat.preprocessing import ChatInput, ChatTotals

TRAINED, DIMMED, PLAIN = "\033[1;32m", "\033[2m", "\033[0m"
WITHOUT_COLOUR = ("\u27e6", "\u27e7")
"""Brackets around trained tokens on output without colour."""
SHOWN_LINES_OF_A_SAMPLE = 60


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=command_name("preprocess_chat"),
        description="Tokenize chats into PREFIX.bin and .idx, and what is trained into PREFIX_loss_mask.bin and .idx.",
        allow_abbrev=False,
    )
    source = parser.add_argument_group("input")
    add_file_flags(
        source,
        "files, folders, globs, URLs, or - for standard input: .jsonl and .json with a conversation a line, .parquet "
        "and .arrow with one a row, .tar of JSONL; all but tables also compressed: .gz, .zst, .xz, .bz2",
    )
    add_row_flags(source)
    add_share_flags(source)
    source.add_argument(
        "--bad-rows",
        choices=("error", "skip"),
        default="error",
        help="what to do with a row that cannot be used: skipped rows are counted by reason (default: error)",
    )
    source.add_argument(
        "--skip-bad-rows", dest="bad_rows", action="store_const", const="skip", help="the same as --bad-rows skip"
    )
    text = parser.add_argument_group("tokenizer and template")
    text.add_argument("--tokenizer-model", required=True, metavar="PATH", help="tokenizer.json, or its folder")
    text.add_argument(
        "--chat-template",
        metavar="NAME",
        help="a preset, a .jinja file, or a .py file with CHAT_TEMPLATE and SPECIAL_TOKENS (default: the tokenizer's)",
    )
    text.add_argument(
        "--add-special-tokens", action="store_true", help="add the template's tokens that the tokenizer lacks"
    )
    text.add_argument(
        "--tokenizer-output", metavar="FOLDER", help="write the tokenizer with the added tokens and the template here"
    )
    text.add_argument(
        "--no-append-eos",
        dest="append_eos",
        action="store_false",
        help="do not append EOS to a last turn that the template leaves without an end (default: append it)",
    )
    add_sample_and_output_flags(parser)
    arguments = parser.parse_args(argv)
    check_sample_flags(parser, arguments)
    for name in ("max_length", "min_length"):
        if getattr(arguments, name) is not None and getattr(arguments, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    arguments.shard = shard_given(parser, arguments)
    return arguments


def add_row_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--split", metavar="NAME", help="read the files of this split of a downloaded dataset, such as train"
    )
    group.add_argument(
        "--row-format",
        choices=("auto", "mixed", "messages", "sharegpt", "prompt_completion", "alpaca", "question_answer", "text"),
        default="auto",
        metavar="FORM",
        help="form of the rows: auto (one for each file, found by their keys), mixed (found for each row), or one of "
        "messages, sharegpt, prompt_completion, alpaca, question_answer, text (default: auto)",
    )
    group.add_argument(
        "--prompt-template",
        metavar="TEXT",
        help="for other columns: the prompt, such as 'Question: {question}\n\nAnswer: ', or alpaca",
    )
    group.add_argument("--answer-key", metavar="COLUMN", help="column of the answer to --prompt-template")
    add_column_flag(group)


def add_sample_and_output_flags(parser: argparse.ArgumentParser) -> None:
    samples = parser.add_argument_group("samples")
    samples.add_argument("--max-length", type=int, metavar="N", help="tokens in a sample (default: no limit)")
    samples.add_argument(
        "--too-long",
        choices=("drop", "truncate", "split", "error"),
        default="drop",
        help="longer samples: drop them, keep the beginning, cut before questions, or count them and write nothing "
        "(default: drop)",
    )
    samples.add_argument("--min-length", type=int, default=1, metavar="N", help="drop shorter samples (default: 1)")
    samples.add_argument(
        "--train-on",
        choices=("assistant", "all_but_system", "all"),
        default="assistant",
        help='turns to train on in rows without "unmask"; all: every token, whatever a row says (default: assistant)',
    )
    samples.add_argument(
        "--turns",
        choices=("together", "as_prompted"),
        default="together",
        help="a conversation is one sample, or each turn follows exactly its inference prompt, in as many samples as "
        "that needs (default: together)",
    )
    add_sample_flags(
        parser, files="PREFIX.bin, PREFIX_loss_mask.bin, ...", shown="samples with their trained tokens in colour"
    )


def job_of(arguments: argparse.Namespace) -> ChatJob:
    """Return the job. Raises DataError."""
    from megatron.data.chat.job import ChatJob

    return ChatJob(
        inputs=tuple(arguments.input),
        output_prefix=arguments.output_prefix or "",
        tokenizer=arguments.tokenizer_model,
        chat_template=arguments.chat_template,
        max_length=arguments.max_length,
        too_long=arguments.too_long,
        min_length=arguments.min_length,
        bad_rows=arguments.bad_rows,
        train_on=arguments.train_on,
        row_format=arguments.row_format,
        prompt_template=arguments.prompt_template,
        answer_key=arguments.answer_key,
        ignore_columns=tuple(arguments.ignore_columns),
        split=arguments.split,
        turns=arguments.turns,
        append_eos=arguments.append_eos,
        add_special_tokens=arguments.add_special_tokens,
        tokenizer_output=arguments.tokenizer_output,
        workers=arguments.workers,
        exclude=tuple(arguments.exclude),
        stdin_filename=arguments.stdin_filename,
        shard=arguments.shard,
        max_documents=arguments.max_documents,
        overwrite=arguments.overwrite,
    )


# ---------------------------------------------------------------------------------------------------------------------
# Samples to print


def first_samples(job: ChatJob, setup: ChatSetup, chats: ChatInput, count: int) -> Iterator[Sample]:
    """Yield the first samples of the input, without bad rows: named if samples run short. Raises DataError."""
    from dataclasses import replace

    from megatron.data.chat.job import SHOWN_FAULTS, encode_block
    from megatron.data.read.archives import read_blocks
    from megatron.data.read.document_blocks import ReadingRules

    left, faults = count, list[str]()
    skipping = replace(job, bad_rows="skip")
    rules = ReadingRules(
        job.reader.keys, block_bytes=1 << 16, max_documents=job.max_documents, names=job.names, as_rows=True
    )
    for block in read_blocks(chats.listing.sources, rules):
        encoded = encode_block(setup.encoder, block, skipping)
        faults += encoded.faults
        for sample in encoded.samples():
            if not left:
                return
            left -= 1
            yield sample
    if left:
        name_unshown(faults[:SHOWN_FAULTS], count - left)


def pieces(sample: Sample, setup: ChatSetup) -> Iterator[tuple[str, bool]]:
    """Yield the text in pieces, and for each whether it is trained."""
    start = 0
    for end in range(1, sample.length + 1):
        if end == sample.length or sample.mask[end] != sample.mask[start]:
            yield setup.tokenizer.decode(sample.ids[start:end].tolist()), bool(sample.mask[start])
            start = end


def in_colour(sample: Sample, setup: ChatSetup, has_colour: bool) -> str:
    """Return a sample as text, its trained tokens bold and green, or between double brackets."""
    parts = []
    for text, is_trained in pieces(sample, setup):
        if has_colour:
            # line by line: a terminal extends a colour to the next line
            style = TRAINED if is_trained else DIMMED
            parts.append("\n".join(f"{style}{line}{PLAIN}" if line else "" for line in text.split("\n")))
        else:
            parts.append(f"{WITHOUT_COLOUR[0]}{text}{WITHOUT_COLOUR[1]}" if is_trained else text)
    lines = "".join(parts).split("\n")
    if len(lines) > SHOWN_LINES_OF_A_SAMPLE:
        left_out = len(lines) - SHOWN_LINES_OF_A_SAMPLE
        middle = SHOWN_LINES_OF_A_SAMPLE // 2
        lines = [*lines[:middle], f"... {left_out} lines ...", *lines[-middle:]]
    return "\n".join(lines)


def show_samples(job: ChatJob, setup: ChatSetup, chats: ChatInput, count: int) -> None:
    has_colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    legend = f"{TRAINED}trained{PLAIN}" if has_colour else f"{WITHOUT_COLOUR[0]}trained{WITHOUT_COLOUR[1]}"
    print(f"template: {setup.source.origin}; tokens that are {legend}:")
    for number, sample in enumerate(first_samples(job, setup, chats, count), start=1):
        num_trained = int(sample.mask.sum())
        print(f"\n--- sample {number}: {sample.length} tokens, {num_trained} trained ---")
        print(in_colour(sample, setup, has_colour))
    print()


# ---------------------------------------------------------------------------------------------------------------------
# The command


def progress_bar(num_bytes: int | None):  # type: ignore[no-untyped-def]  # tqdm has no types
    from tqdm import tqdm

    return tqdm(total=num_bytes, unit="B", unit_scale=True, disable=not sys.stderr.isatty(), leave=False)


def run(arguments: argparse.Namespace) -> None:
    """Run the command. Raises DataError or OSError, with no final file written."""
    from megatron.data.chat.job import prepare_chats
    from megatron.data.chat.preprocessing import find_chats, preprocess_chats

    job = job_of(arguments)
    chats = find_chats(job)
    if arguments.show:
        show_samples(job, prepare_chats(job), chats, arguments.show)
    if not job.output_prefix:
        return
    started_s = time.monotonic()
    with progress_bar(chats.listing.num_bytes if job.max_documents is None else None) as bar:
        totals = preprocess_chats(job, bar.update, chats)
    summarize(job, totals, time.monotonic() - started_s)


def summarize(job: ChatJob, totals: ChatTotals, elapsed_s: float) -> None:
    from megatron.data.index.indexed import LOSS_MASK_SUFFIX
    from megatron.data.prepare.manifest import read_manifest

    for fault in totals.faults:
        print(f"skipped {fault}", file=sys.stderr)
    share = 100 * totals.num_loss_tokens / totals.num_tokens
    rows = [
        ("rows read", f"{totals.num_rows:,}"),
        *((f"format: {form}", f"{count:,}") for form, count in totals.forms.items()),
        ("samples", f"{totals.num_samples:,}"),
        ("tokens", f"{totals.num_tokens:,}"),
        ("trained tokens", f"{totals.num_loss_tokens:,} ({share:.1f} %)"),
        ("lengths", ", ".join(f"{percent} %: {length}" for percent, length in totals.length_percentiles.items())),
        ("vocabulary", f"{totals.vocab_size:,}"),
    ]
    if totals.added_tokens:
        rows.append(("added tokens", " ".join(totals.added_tokens)))
    counted = {"blank lines": totals.num_blank, **totals.outcomes}
    rows += [(name, f"{count:,}") for name, count in counted.items() if count]
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        print(f"{name:<{width}}  {value}")
    if (manifest := read_manifest(job.output_prefix)) is not None:
        print(f"{manifest.path}: {manifest.describe(with_outcomes=False)}")
    written = [f"{job.output_prefix}.bin", f"{job.output_prefix}{LOSS_MASK_SUFFIX}.bin"]
    if job.tokenizer_output:
        written.append(f"{job.tokenizer_output}/tokenizer.json")
    print(f"written in {elapsed_s:.1f} s: {', '.join(written)}")


@command
def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    from megatron.data.index.indexed import DataError

    return run_command(lambda: run(arguments), (DataError,), arguments.output_prefix or "")
