"""Preparation of datasets, resumable: blocks of an input become tokens, which are written in the order of the input.

Text, chats and pairs differ in their BlockEncoder alone. A bounded number of blocks is in flight, so memory does not
grow with the input. The files get their names only when all of them are complete. The work of a killed or failed run
stays in PREFIX.unfinished/, from where it is resumed.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Generic, Protocol

import numpy as np
from numpy.typing import NDArray

from megatron.data.index.checksums import read_checksums
from megatron.data.index.indexed import DataError, IndexedDataset
from megatron.data.index.indexed_builder import IndexedDatasetBuilder
from megatron.data.index.work_folder import WorkFolder
from megatron.data.prepare.block_encoder import BlockEncoder, C, Counts, EncodedBatch, Output, StartOver
from megatron.data.prepare.manifest import LOG_NAME, ManifestLog, manifest_writer, read_manifest
from megatron.data.prepare.resume_state import State, UnfinishedWork, kept_work
from megatron.data.read.document_blocks import Position
from megatron.data.read.sources import InputListing


class Finished(Exception):
    """The datasets of a job that is to be resumed are finished."""


class PreparationReport(Protocol):
    """Receiver of what a run reports while it works."""

    def note(self, text: str) -> None:
        """Say what is done otherwise than the options say, or left out."""

    def describe(self, listing: InputListing) -> None:
        """Say which files are read."""

    def start(self, num_bytes: int | None, counts: Counts) -> None:
        """`num_bytes`: of the whole input, None if unknown. `counts`: what earlier runs have done of it."""

    def show(self, counts: Counts) -> None:
        """Show how far the work is."""

    def finish(self, counts: Counts) -> None:
        """All input is processed."""

    def close(self) -> None:
        """Called after `start`, also after an error."""


class Silence:
    """Receiver that says nothing."""

    def note(self, text: str) -> None: ...
    def describe(self, listing: InputListing) -> None: ...
    def start(self, num_bytes: int | None, counts: Counts) -> None: ...
    def show(self, counts: Counts) -> None: ...
    def finish(self, counts: Counts) -> None: ...
    def close(self) -> None: ...


class _GrowingDatasets(Generic[C]):
    """Datasets being built, with the state from which they are resumed."""

    def __init__(self, encoder: BlockEncoder[C], work: UnfinishedWork, saved: State | None):
        """Start empty, or from `saved`. Raises DataError."""
        self._encoder, self._work = encoder, work
        self.is_complete = saved is not None and saved.is_complete
        """All input has been added."""
        self.counts = encoder.no_counts()
        self.position = Position()
        """End of the input that has been added."""
        logged = None
        if saved is not None:
            self.counts.restore(saved.totals)
            self.position = saved.position
            logged = saved.manifest
        self._log = ManifestLog(
            work.folder / LOG_NAME, encoder.files.sources, logged, max_documents=encoder.job.max_documents
        )
        self._unsealed: list[list[IndexedDatasetBuilder]] = []
        """Builders of the partitions of each dataset that is not sealed."""
        for number, output in enumerate(encoder.outputs):
            folders = [work.work_dir(f"{number}.{part}") for part in range(output.num_partitions)]
            if self.is_complete and not WorkFolder(folders[0]).is_open:
                continue  # sealed, or even published, by the run that was killed
            self._unsealed.append([self._builder(output, folder, saved) for folder in folders])

    def _builder(self, output: Output, folder: Path, saved: State | None) -> IndexedDatasetBuilder:
        notes = self._encoder.notes
        if saved is None:
            return IndexedDatasetBuilder(output.prefix, output.dtype, notes=notes, work_dir=folder)
        state = saved.builders[folder.name]
        return IndexedDatasetBuilder.resume(output.prefix, output.dtype, state, notes=notes, work_dir=folder)

    def add(self, batch: EncodedBatch[C]) -> None:
        """Add the next batch, or nothing of it if it raises DataError."""
        # before anything is written, so that a refused batch leaves no trace
        self.counts.check_next(batch.counts)
        streams = iter(batch.streams)
        for output, builders in zip(self._encoder.outputs, self._unsealed, strict=True):
            for builder in builders:
                stream = next(streams)
                builder.add_documents(
                    stream.tokens,
                    stream.lengths,
                    keeps_empty_sequences=output.keeps_empty_sequences,
                    sequences_per_document=output.sequences_per_document,
                )
        # the builders may refuse a batch, the log and the counts take it
        for of_block in batch.of_blocks:
            self._log.add(of_block)
            batch.counts.add_block(of_block)
        self.counts.add(batch.counts)
        self.position = batch.of_blocks[-1].block.end

    def save(self) -> None:
        """Save the state, from which a later run can resume."""
        states = {builder.work_dir.name: builder.save_state() for part in self._unsealed for builder in part}
        log = self._log.save_state()
        self._work.save(State(self.position, self.is_complete, self.counts.to_json(), log, states))

    def complete(self) -> None:
        """All input has been added."""
        self._log.finish()
        self.is_complete = True
        if self._work.is_kept:
            self.save()

    def seal(self) -> None:
        job, files = self._encoder.job, self._encoder.files
        write_manifest = manifest_writer(
            files.listing,
            self._log,
            self._encoder.notes["tokenizer"],
            self._encoder.options,
            job.shard,
            files.whole.digest,
            self.counts.outcomes(),
        )
        for first, *others in self._unsealed:
            for other in others:
                first.absorb(other)
            first.seal(write_manifest)
        self._log.close()

    def publish(self) -> None:
        """Give the datasets their names, the first one last."""
        prefixes = [output.prefix for output in self._encoder.outputs]
        folders = [WorkFolder(self._work.work_dir(f"{number}.0")) for number in range(len(prefixes))]
        pairs = list(zip(folders, prefixes, strict=True))
        # datasets of one run belong together: an older one must not be read with a new one, nor the first, by which the
        # others are found, without them
        for folder, prefix in pairs:
            if folder.is_sealed:
                Path(f"{prefix}.idx").unlink(missing_ok=True)
        for folder, prefix in reversed(pairs):
            folder.publish(prefix)


class Pipeline(Generic[C]):
    """A run of a preparation."""

    def __init__(self, encoder: BlockEncoder[C], report: PreparationReport):
        self._encoder, self._report = encoder, report
        self._job, self._files = encoder.job, encoder.files

    def run(self) -> C:
        """Write the datasets, and return the counts.

        Raises DataError or OSError, with no final file written, and Finished.
        """
        job = self._job
        Path(job.output_prefix).parent.mkdir(parents=True, exist_ok=True)
        # a job that cannot be resumed works in a folder of its own, under a random name
        is_kept = job.resume or job.resume_interval_s is not None
        with UnfinishedWork(job.output_prefix, self._encoder.identity(), self._files.sources, is_kept) as work:
            datasets = self._opened(work)
            if not datasets.is_complete:
                datasets = self._filled(datasets, work)
            # all datasets are whole before the first gets its name
            datasets.seal()
            self._encoder.before_publishing()
            datasets.publish()
            work.remove()
        return datasets.counts

    def _opened(self, work: UnfinishedWork) -> _GrowingDatasets[C]:
        job, pipe = self._job, self._files.pipe
        saved = None
        if job.resume:
            saved = work.load()
        # of a complete run only the names are missing
        if job.resume and pipe and not (saved and saved.is_complete):
            raise DataError(
                f"--resume: {pipe} cannot be read again from where an earlier run stopped; give files, or leave "
                "out --resume and start over"
            )
        if saved is not None:
            self._report.note(f"resuming after {saved.position.documents} documents")
        elif job.resume and is_finished(self._encoder):
            raise Finished
        else:
            work.start()
            # before hours of work, not at its end
            self._encoder.check_outputs()
        self._report.describe(self._files.listing)
        return _GrowingDatasets(self._encoder, work, saved)

    def _filled(self, datasets: _GrowingDatasets[C], work: UnfinishedWork) -> _GrowingDatasets[C]:
        """Add the rest of the input, and return the datasets. Raises DataError."""
        begin = datasets.position
        try:
            self._add_input(datasets, work, self._encoder)
        # the accelerated tokenizer gave other ids than the reference somewhere in the input
        except StartOver as difference:
            self._report.note(str(difference))
            if datasets.position != begin:  # what was added may have wrong tokens in it
                if self._files.pipe:
                    raise DataError(
                        f"{self._files.pipe} cannot be read again with the reference tokenizer; repeat the command "
                        "with --reference-tokenizer"
                    ) from None
                work.clear()
                datasets = _GrowingDatasets(self._encoder, work, None)
            self._add_input(datasets, work, difference.encoder)
        try:
            self._encoder.check(datasets.counts)
        except DataError:
            work.clear()  # nothing of it is of use
            raise
        datasets.complete()
        return datasets

    def _add_input(self, datasets: _GrowingDatasets[C], work: UnfinishedWork, encoder: BlockEncoder[C]) -> None:
        """Add the rest of the input to the datasets. Raises DataError, StartOver."""
        report, counts = self._report, datasets.counts
        num_bytes = None
        if self._job.max_documents is None:  # with a limit, most of the bytes may never be read
            num_bytes = self._files.listing.num_bytes
        report.start(num_bytes, counts)
        # closing the encoder ends its threads or processes, also after Ctrl-C
        with contextlib.closing(report), contextlib.closing(encoder.encode(datasets.position)) as encoded:
            try:
                self._add_batches(datasets, encoded)
                report.finish(counts)
            except (DataError, KeyboardInterrupt) as error:
                # nothing was saved yet
                if not work.is_saved:  # the work so far is too short to keep
                    raise
                datasets.save()
                if isinstance(error, DataError):
                    raise DataError(f"{error}{kept_work(self._job.output_prefix)}") from None
                raise

    def _add_batches(self, datasets: _GrowingDatasets[C], batches: Iterable[EncodedBatch[C]]) -> None:
        """Add the batches, show what is done, and save it every `resume_interval_s`."""
        interval_s = math.inf
        if self._job.resume_interval_s is not None and self._files.pipe is None:
            interval_s = self._job.resume_interval_s
        saved_s = time.monotonic()
        for batch in batches:
            num_shown = len(datasets.counts.faults)
            datasets.add(batch)
            for fault in datasets.counts.faults[num_shown:]:
                self._report.note(f"skipped {fault}")
            self._report.show(datasets.counts)
            if time.monotonic() - saved_s >= interval_s:
                datasets.save()
                saved_s = time.monotonic()


def is_finished(encoder: BlockEncoder[Any]) -> bool:
    """Return True if the datasets of this job exist already."""
    return all(_is_written(output.prefix, encoder) for output in encoder.outputs)


def _is_written(prefix: str, encoder: BlockEncoder[Any]) -> bool:
    try:
        checksums, manifest = read_checksums(prefix), read_manifest(prefix)
        # a manifest without its dataset is of no use
        IndexedDataset(prefix)
    except DataError:
        return False
    if checksums is None or checksums.notes != encoder.notes or manifest is None:
        return False
    written = manifest.header["options"]
    for name, value in encoder.options.items():
        if name not in encoder.free_options and written.get(name) != value:
            return False
    shard = encoder.job.shard
    if shard is None or manifest.shard is None:
        return shard is None and manifest.shard is None
    return (shard.number, shard.count) == (manifest.shard["number"], manifest.shard["count"])


# nearest ranks, so that each is a length that occurs
PERCENTILES = (0, 5, 25, 50, 75, 95, 99, 100)


def percentiles(lengths: NDArray[Any]) -> dict[int, int]:
    """Return percentile -> length."""
    # an interpolated length would be one that no sample has
    levels = np.percentile(lengths, PERCENTILES, method="nearest")
    return {percent: int(level) for percent, level in zip(PERCENTILES, levels, strict=True)}
