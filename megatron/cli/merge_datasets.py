"""Join indexed datasets end to end into one: OUTPUT.bin, .idx and .sha256.

    python tools/merge_datasets.py --input shards --output-prefix data/corpus_text_document
    python tools/merge_datasets.py --input shards/a_text_document shards/b_text_document --output-prefix data/ab

Of a folder every dataset is taken, in natural order (shard_2 before shard_10); otherwise the order given is kept. The
result is what Megatron's tool makes of the same order, byte for byte. Memory does not grow with the data, and the
output appears only when it is whole and has been read back.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from megatron.cli.command import run_command
from megatron.command_names import command_name
from megatron.data.checksums import ReportBytes, file_sha256, read_checksums
from megatron.data.indexed import DataError, IndexedDataset
from megatron.data.indexed_builder import SEALED_NAME, IndexedDatasetBuilder


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=command_name("merge_datasets"),
        description="Join indexed datasets end to end into one.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--input",
        nargs="+",
        required=True,
        metavar="PATH",
        help="folders of datasets, and datasets: PREFIX for PREFIX.bin and PREFIX.idx, or PREFIX.idx",
    )
    parser.add_argument(
        "--output-prefix", required=True, metavar="PREFIX", help="files are PREFIX.bin, .idx and .sha256"
    )
    return parser.parse_args(argv)


def natural_order(name: str) -> list[tuple[int, int, str]]:
    """A sorting key that takes digits for numbers: shard_2 before shard_10."""
    parts = re.findall(r"([0-9]+)|([^0-9]+)", name)
    return [(0, int(digits), digits) if digits else (1, 0, text) for digits, text in parts]


def find_prefixes(inputs: Sequence[str]) -> list[str]:
    """The datasets meant, in their order. Raises DataError on a folder without any, or with half a dataset."""
    prefixes: list[str] = []
    for given in inputs:
        prefix = given.removesuffix(".idx")
        if os.path.isdir(given) and not os.path.exists(prefix + ".idx"):
            prefixes += datasets_in(Path(given))
        else:
            prefixes.append(prefix)
    seen: dict[str, str] = {}
    for prefix in prefixes:
        place = os.path.realpath(prefix + ".bin")
        if place in seen:
            raise DataError(
                f"{prefix} is named twice{'' if seen[place] == prefix else f', as {seen[place]} too'}; to train on it "
                "more often give it more weight in --data-path"
            )
        seen[place] = prefix
    return prefixes


def datasets_in(folder: Path) -> list[str]:
    files = {path.name for path in folder.iterdir() if path.suffix in (".bin", ".idx") and not path.is_dir()}
    stems = sorted({os.path.splitext(name)[0] for name in files}, key=natural_order)
    if not stems:
        raise DataError(f"{folder} holds no datasets; give a folder of PREFIX.bin and PREFIX.idx")
    for stem in stems:
        for present, missing in ((".idx", ".bin"), (".bin", ".idx")):
            if stem + missing not in files:
                raise DataError(
                    f"{folder / stem}{present} lacks its other half, {stem}{missing}; copy it there, or take away what "
                    "is no dataset"
                )
    return [str(folder / stem) for stem in stems]


def check_inputs(inputs: Sequence[IndexedDataset], output_prefix: str) -> dict[str, Any]:
    """Raises DataError if they do not fit together, or are what would be overwritten. Returns the notes they share."""
    written = {os.path.realpath(output_prefix + suffix) for suffix in (".bin", ".idx")}
    first = inputs[0]
    notes: list[dict[str, Any]] = []
    tokenizers: list[tuple[str, Any]] = []
    for data in inputs:
        if written & {os.path.realpath(data.prefix + suffix) for suffix in (".bin", ".idx")}:
            raise DataError(
                f"--output-prefix {output_prefix} is one of the inputs; give another, or, if it is left from an "
                "earlier merge, delete it first"
            )
        if data.dtype != first.dtype:
            raise DataError(
                f"{first.prefix} holds {first.dtype}, {data.prefix} {data.dtype}: they were made with different "
                "vocabularies; preprocess both with one tokenizer"
            )
        checksums = read_checksums(data.prefix)
        notes.append(checksums.notes if checksums else {})
        if "tokenizer" in notes[-1]:
            tokenizers.append((data.prefix, notes[-1]["tokenizer"]))
            if tokenizers[-1][1] != tokenizers[0][1]:
                (one, one_note), (other, other_note) = tokenizers[0], tokenizers[-1]
                raise DataError(
                    f"{one} was made with the tokenizer {json.dumps(one_note)}, {other} with {json.dumps(other_note)}; "
                    "preprocess both with one tokenizer (or, if the notes are wrong, delete the .sha256 of one)"
                )
    return {name: note for name, note in notes[0].items() if all(n.get(name, ...) == note for n in notes)}


def check_space(inputs: Sequence[IndexedDataset], folder: Path) -> None:
    # besides the result, lengths and ends of documents are kept until the .idx is composed
    needed = sum(
        data.num_tokens * data.dtype.itemsize + (12 + 4) * len(data) + (8 + 8) * data.num_documents for data in inputs
    )
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise DataError(
            f"{folder} has {free / 1e9:.1f} GB free, but the merged dataset needs {needed / 1e9:.1f} GB; make room, or "
            "put --output-prefix on another disk"
        )


def verify_sealed(prefix: Path, inputs: Sequence[IndexedDataset], progress: ReportBytes) -> None:
    """Read back what was written. Raises DataError if it is not the sum of the inputs."""
    merged, checksums = IndexedDataset(prefix), read_checksums(prefix)
    assert checksums is not None
    for what, found, expected in (
        ("documents", merged.num_documents, sum(data.num_documents for data in inputs)),
        ("sequences", len(merged), sum(len(data) for data in inputs)),
        ("tokens", merged.num_tokens, sum(data.num_tokens for data in inputs)),
    ):
        if found != expected:
            raise DataError(f"{prefix} holds {found} {what}, its inputs {expected}; they changed during the merge")
    for suffix in (".bin", ".idx"):
        checksums.compare(str(prefix), suffix, file_sha256(f"{prefix}{suffix}", progress))


def run(arguments: argparse.Namespace) -> None:
    """The whole command. Raises DataError or OSError, with no final file written."""
    output_prefix = arguments.output_prefix
    if output_prefix.endswith("/"):
        raise DataError(f"--output-prefix {output_prefix} is a folder; give {output_prefix}NAME for NAME.bin in it")
    inputs = [IndexedDataset(prefix) for prefix in find_prefixes(arguments.input)]
    notes = check_inputs(inputs, output_prefix)
    folder = Path(output_prefix).parent
    folder.mkdir(parents=True, exist_ok=True)
    check_space(inputs, folder)

    print(f"merging {len(inputs)} datasets of {inputs[0].dtype}, in this order:")
    for data in inputs:
        print(f"  {data.prefix}: {data.num_documents:,} documents, {data.num_tokens:,} tokens", flush=True)
    num_bytes = sum(data.num_tokens * data.dtype.itemsize for data in inputs)
    with IndexedDatasetBuilder(output_prefix, inputs[0].dtype, notes=notes) as builder:
        with tqdm(total=num_bytes, unit="B", unit_scale=True, desc="copying", leave=False, disable=None) as bar:
            for data in inputs:
                builder.append_dataset(data, bar.update)
        builder.seal()
        with tqdm(total=num_bytes, unit="B", unit_scale=True, desc="reading back", leave=False, disable=None) as bar:
            verify_sealed(builder.work_dir / SEALED_NAME, inputs, bar.update)
        builder.finalize()
    print(
        f"{output_prefix}.bin, .idx, .sha256: {builder.num_documents:,} documents, {builder.num_tokens:,} tokens, "
        "read back and equal"
    )


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    return run_command(lambda: run(arguments), (DataError,), arguments.output_prefix)
