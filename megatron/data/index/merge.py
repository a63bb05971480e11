"""One indexed dataset out of several: end to end, byte for byte as Megatron's tool makes it, or shuffled."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from megatron.data.index.checksums import ReportBytes, file_sha256, read_checksums
from megatron.data.index.indexed import DataError, IndexedDataset
from megatron.data.index.indexed_builder import IndexedDatasetBuilder
from megatron.data.index.shuffle import Shuffle
from megatron.data.index.work_folder import SEALED_NAME, check_absent
from megatron.data.prepare.manifest import check_shards, merged_writer, read_manifest
from megatron.runtime.files import disk_shortage, locked_output, natural_order

SHUFFLE_NOTE = "shuffle_seed"

ReportPhase = Callable[[str, int], AbstractContextManager[ReportBytes]]
"""Called with a phase ("copying", "reading back") and its bytes; the block receives them as they are processed."""


def find_prefixes(inputs: Sequence[str]) -> list[str]:
    """Return the prefixes of the inputs, in order. Raises DataError for a folder without, or with half, a dataset."""
    prefixes: list[str] = []
    for given in inputs:
        prefix = given.removesuffix(".idx")
        # a dataset may have the name of a folder beside it
        if os.path.isdir(given) and not os.path.exists(prefix + ".idx"):
            prefixes += datasets_in(Path(given))
        else:
            prefixes.append(prefix)
    _check_named_once(prefixes)
    return prefixes


def _check_named_once(prefixes: Sequence[str]) -> None:
    seen: dict[str, str] = {}
    for prefix in prefixes:
        # by its file, since links give one dataset several names
        file = os.path.realpath(prefix + ".bin")
        if file in seen:
            other = "" if seen[file] == prefix else f", as {seen[file]} too"
            raise DataError(
                f"{prefix} is named twice{other}; to train on it more often give it more weight in --data-path"
            )
        seen[file] = prefix


def datasets_in(folder: Path) -> list[str]:
    paths = [*folder.glob("*.bin"), *folder.glob("*.idx")]
    files = {path.name for path in paths if not path.is_dir()}
    stems = sorted({os.path.splitext(name)[0] for name in files}, key=natural_order)
    if not stems:
        raise DataError(f"{folder} holds no datasets; give a folder of PREFIX.bin and PREFIX.idx")
    for stem in stems:
        for present, missing in ((".idx", ".bin"), (".bin", ".idx")):
            if stem + missing not in files:
                raise DataError(
                    f"{folder / stem}{present} lacks its other half, {stem}{missing}; copy it there, or remove what "
                    "is not a dataset"
                )
    return [str(folder / stem) for stem in stems]


def common_notes(inputs: Sequence[IndexedDataset], output_prefix: str) -> dict[str, Any]:
    """Return the notes that all inputs share.

    Raises DataError if they do not fit together, or would be overwritten.
    """
    first = inputs[0]
    all_notes: list[dict[str, Any]] = []
    for data in inputs:
        if _files_of(data.prefix) & _files_of(output_prefix):
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
        # a dataset of Megatron has no notes, so that none is common then
        all_notes.append(checksums.notes if checksums else {})
    _check_tokenizers([data.prefix for data in inputs], all_notes)
    common = dict(all_notes[0])
    for notes in all_notes:
        common = {name: note for name, note in common.items() if notes.get(name, ...) == note}
    # of shuffled datasets, end to end, the whole is not shuffled
    if len(inputs) > 1:
        common.pop(SHUFFLE_NOTE, None)
    return common


def _files_of(prefix: str) -> set[str]:
    return {os.path.realpath(prefix + suffix) for suffix in (".bin", ".idx")}


def _check_tokenizers(prefixes: Sequence[str], all_notes: Sequence[dict[str, Any]]) -> None:
    """Raise DataError if two notes name different tokenizers; datasets of Megatron have none."""
    pairs = zip(prefixes, all_notes, strict=True)
    noted = [(prefix, notes["tokenizer"]) for prefix, notes in pairs if "tokenizer" in notes]
    for prefix, tokenizer in noted:
        first_prefix, first = noted[0]
        if tokenizer != first:
            raise DataError(
                f"{first_prefix} was made with the tokenizer {json.dumps(first)}, {prefix} with "
                f"{json.dumps(tokenizer)}; preprocess both with one tokenizer (or, if the notes are wrong, delete the "
                ".sha256 of one)"
            )


def check_space(inputs: Sequence[IndexedDataset], folder: Path) -> None:
    # besides the result, lengths and ends of documents are stored until the .idx is written; a shuffle's files are
    # removed as the result grows, so that both together take no more than the result
    needed = 0
    for data in inputs:
        needed += data.num_tokens * data.dtype.itemsize + (12 + 4) * len(data) + (8 + 8) * data.num_documents
    shortage = disk_shortage(folder, needed)
    if shortage:
        raise DataError(f"{shortage}; free space, or put --output-prefix on another disk")


def verify_sealed(prefix: Path, inputs: Sequence[IndexedDataset], progress: ReportBytes) -> None:
    """Read back what was written. Raises DataError if it differs from the inputs."""
    merged, checksums = IndexedDataset(prefix), read_checksums(prefix)
    assert checksums is not None
    for name, written in merged.sizes.items():
        expected = sum(data.sizes[name] for data in inputs)
        if written != expected:
            raise DataError(f"{prefix} holds {written} {name}, its inputs {expected}; they changed during the merge")
    for suffix in (".bin", ".idx"):
        checksums.compare(str(prefix), suffix, file_sha256(f"{prefix}{suffix}", progress))


def open_inputs(
    inputs: Sequence[str], output_prefix: str, *, overwrite: bool = False
) -> tuple[list[IndexedDataset], dict[str, Any]]:
    """Return the datasets to merge, in their order, and the notes that they share.

    Raises DataError, also where they do not fit together, and if the output exists unless `overwrite`.
    """
    if output_prefix.endswith("/"):
        raise DataError(f"--output-prefix {output_prefix} is a folder; give {output_prefix}NAME for NAME.bin in it")
    datasets = [IndexedDataset(prefix) for prefix in find_prefixes(inputs)]
    # before hours of copying: the order of shards cannot be repaired afterwards
    check_shards([(str(data.prefix), read_manifest(data.prefix)) for data in datasets])
    notes = common_notes(datasets, output_prefix)
    check_absent([output_prefix], overwrite)
    folder = Path(output_prefix).parent
    folder.mkdir(parents=True, exist_ok=True)
    return datasets, notes


def merge(
    inputs: Sequence[IndexedDataset],
    notes: dict[str, Any],
    output_prefix: str,
    report: ReportPhase,
    shuffle: Shuffle | None = None,
) -> IndexedDataset:
    """Write what `open_inputs` returned as one dataset, and verify it. Raises DataError or OSError.

    `shuffle`: the order of the documents, otherwise that of the inputs.
    """
    num_bytes = sum(data.num_tokens * data.dtype.itemsize for data in inputs)
    options: dict[str, Any] = {}
    if shuffle is not None:
        notes = {**notes, SHUFFLE_NOTE: shuffle.seed}
        options["--shuffle"] = shuffle.seed
    with _work_folder(output_prefix) as folder:
        # after what a killed merge left is removed
        check_space(inputs, folder.parent)
        builder = IndexedDatasetBuilder(output_prefix, inputs[0].dtype, notes=notes, work_dir=folder)
        with builder:
            _copy(inputs, builder, num_bytes, report, shuffle)
            builder.seal(merged_writer([(data, read_manifest(data.prefix)) for data in inputs], options))
            # before the names are given: what a disk or its cache made of it is seen here
            with report("reading back", num_bytes) as progress:
                verify_sealed(builder.work_dir / SEALED_NAME, inputs, progress)
            builder.finalize()
    return IndexedDataset(output_prefix)


def _copy(
    inputs: Sequence[IndexedDataset],
    builder: IndexedDatasetBuilder,
    num_bytes: int,
    report: ReportPhase,
    shuffle: Shuffle | None,
) -> None:
    if shuffle is not None:
        with report("dividing", num_bytes) as progress:
            parts = shuffle.divide(builder, progress)
        with report("sorting", num_bytes) as progress:
            shuffle.add_sorted(builder, parts, progress)
        return
    with report("copying", num_bytes) as progress:
        for data in inputs:
            builder.append_dataset(data, progress)


@contextlib.contextmanager
def _work_folder(output_prefix: str) -> Iterator[Path]:
    """Give an empty folder beside the output, and remove it at the end, as what a killed process left in it.

    Raises DataError if another process works there.
    """
    folder = Path(f"{output_prefix}.merging")
    with locked_output(folder) as is_held:
        if not is_held:
            raise DataError(
                f"another process is writing {output_prefix}; wait until it ends, or give another --output-prefix"
            )
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
