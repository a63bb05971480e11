"""Join indexed datasets into one, end to end or shuffled: OUTPUT.bin, .idx and .sha256.

    python tools/merge_datasets.py --input shards --output-prefix data/corpus_text_document
    python tools/merge_datasets.py --input shards/a_text_document shards/b_text_document --output-prefix data/ab
    python tools/merge_datasets.py --input shards --shuffle 1234 --output-prefix data/corpus_text_document

Datasets of a folder are merged in natural order (shard_2 before shard_10); otherwise the order given is kept. The
result is what Megatron's tool makes of the same order, byte for byte. --shuffle puts all documents in a random order,
which depends on the seed and that order alone. Shards of one input (preprocess_data --shard) must all be there, once
and in order. Memory does not grow with the data, and the output appears only when it is complete and has been read
back.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator, Sequence

from megatron.cli.command import command, command_parser, progress_bar, run_command
from megatron.cli.data.flags import SHUFFLE_MEMORY_GB, add_flags, check
from megatron.data.index.checksums import ReportBytes
from megatron.data.index.merge import merge, open_inputs
from megatron.data.index.shuffle import Shuffle
from megatron.runtime.commands import counted


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = command_parser("merge_datasets", "Join indexed datasets into one, end to end or shuffled.")
    datasets = "folders of datasets, and datasets: PREFIX for PREFIX.bin and PREFIX.idx, or PREFIX.idx"
    add_flags(parser, "--input", help=datasets)
    files = "files are PREFIX.bin, .idx, .sha256, .manifest.json"
    add_flags(parser, "--output-prefix", required=True, help=files)
    add_flags(parser, "--overwrite", "--shuffle", "--shuffle-memory-gb")
    arguments = parser.parse_args(argv)
    check(parser, arguments)
    if arguments.shuffle is None and arguments.shuffle_memory_gb is not None:
        parser.error("--shuffle-memory-gb has no effect without --shuffle SEED; give it, or leave this out")
    return arguments


@contextlib.contextmanager
def bar(phase: str, num_bytes: int) -> Iterator[ReportBytes]:
    with progress_bar(phase, num_bytes) as shown:
        yield shown.update


def run(arguments: argparse.Namespace) -> None:
    """Run the command. Raises DataError or OSError, with no final file written."""
    inputs, notes = open_inputs(arguments.input, arguments.output_prefix, overwrite=arguments.overwrite)
    print(f"merging {len(inputs)} datasets of {inputs[0].dtype}, in this order:")
    for data in inputs:
        print(f"  {data.prefix}: {data.num_documents:,} documents, {data.num_tokens:,} tokens", flush=True)
    # the order is printed first, since it decides the result
    shuffle = None
    if arguments.shuffle is not None:
        memory_gb = arguments.shuffle_memory_gb or SHUFFLE_MEMORY_GB
        shuffle = Shuffle(inputs, arguments.shuffle, int(memory_gb * 1e9))
        print(f"shuffling by seed {arguments.shuffle}, in {counted(shuffle.num_parts, 'part')}", flush=True)
    merged = merge(inputs, notes, arguments.output_prefix, bar, shuffle)
    print(
        f"{arguments.output_prefix}.bin, .idx, .sha256: {merged.num_documents:,} documents, "
        f"{merged.num_tokens:,} tokens, read back and equal"
    )


@command
def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    return run_command(lambda: run(arguments), arguments.output_prefix)
