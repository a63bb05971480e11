"""Differences between preparations of text, chats and pairs: the job, and the encoder of blocks with its counts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields
from typing import Any, Generic, TypeVar

from numpy.typing import DTypeLike, NDArray

from megatron.data.index.work_folder import check_absent
from megatron.data.prepare.manifest import BlockCounts
from megatron.data.read.archives import read_batches
from megatron.data.read.document_blocks import Block, Position, ReadingRules
from megatron.data.read.hub_dataset import with_split
from megatron.data.read.input_shards import InputShard, of_split, shard_of
from megatron.data.read.search import find_sources
from megatron.data.read.sources import STDIN_FILENAME, UNCOMPRESSED_ONLY, InputListing, InputRules, SourceFile
from megatron.hub.names import is_dataset

SHOWN_FAULTS = 10


@dataclass(frozen=True)
class PreparationJob(ABC):
    """Input and output of a preparation."""

    inputs: tuple[str, ...]
    """Files, folders, globs or URLs, also compressed or in tar files, or of tables; "-": standard input."""
    output_prefix: str
    _: KW_ONLY
    workers: int = 1
    """Largest number of threads or processes."""
    split: str | None = None
    """Read the files of this split of a dataset, downloaded or on the hub."""
    exclude: tuple[str, ...] = ()
    """Patterns of files that are passed over."""
    stdin_filename: str = STDIN_FILENAME
    """Name whose ending says what standard input holds."""
    shard: InputShard | None = None
    max_documents: int | None = None
    """Documents of the input after which reading stops, blank and unusable ones included."""
    overwrite: bool = False
    """Replace finished datasets, and what is written beside them."""
    resume: bool = False
    """Continue the unfinished work of an earlier run."""
    resume_interval_s: float | None = None
    """Time between saves of the work that can be resumed. None: an unfinished run leaves nothing."""

    @property
    @abstractmethod
    def names(self) -> InputRules:
        """Rules for the names of files."""

    @abstractmethod
    def reading_rules(self, block_bytes: int | None = None) -> ReadingRules: ...


@dataclass(frozen=True)
class JobInput:
    """The files of a job."""

    whole: InputListing
    """All files, of which the shard may be a share."""
    listing: InputListing
    """Those of the shard."""

    @property
    def sources(self) -> list[SourceFile]:
        return self.listing.sources

    @property
    def pipe(self) -> str | None:
        """Name of an input that cannot be read again."""
        return next((source.name for source in self.sources if source.transport == "pipe"), None)


def find_input(job: PreparationJob) -> JobInput:
    """Return the files of a job. Raises DataError."""
    # all files, also for a shard: every machine computes the same cuts of the same whole
    whole = find_files(job.inputs, job.reading_rules(), job.split)
    if job.shard is None:
        return JobInput(whole, whole)
    return JobInput(whole, shard_of(whole, job.shard))


def find_files(inputs: Sequence[str], rules: ReadingRules, split: str | None = None) -> InputListing:
    """Return the files to read. Raises DataError, also for a table without the columns that are needed."""
    inputs, split = with_split(inputs, split)
    listing = find_sources(inputs, rules.names)
    # a dataset of the hub has chosen by its own splits
    if rules.as_rows and not all(map(is_dataset, inputs)):
        # text has no splits: a corpus is divided when it is trained on
        listing = of_split(listing, split, inputs)
    if any(source.kind in UNCOMPRESSED_ONLY for source in listing.sources):
        from megatron.data.read.tables import check_columns  # pyarrow, which takes its time

        check_columns(listing.sources, rules)
    return listing


@dataclass
class Counts:
    """Numbers of bytes and documents of the input. Each kind of preparation adds its own; Counters are by reason."""

    num_bytes: int = 0
    num_documents: int = 0
    """Documents that were encoded, those left out because they are empty included."""
    num_blank: int = 0
    num_bad: int = 0
    faults: list[str] = field(default_factory=list)
    """The first bad documents, each with its file and line."""

    def check_next(self, other: Counts) -> None:
        """Raise DataError if what follows does not fit to what was before."""

    def add(self, other: Counts) -> None:
        """Add the counts of what follows."""
        for counted in fields(self):
            name = counted.name
            # by the fields, so that a kind of preparation only declares its counts
            setattr(self, name, _sum(getattr(self, name), getattr(other, name)))
        # a corpus may have a million bad lines
        del self.faults[SHOWN_FAULTS:]

    def add_block(self, block: BlockCounts) -> None:
        self.num_bytes += block.block.num_input_bytes
        # an empty document was encoded, and gave no token
        self.num_documents += block.documents + block.empty
        self.num_blank += block.blank
        self.num_bad += block.bad

    def outcomes(self) -> dict[str, int]:
        """Return how many documents were changed or left out, by what happened to them."""
        return {}

    def to_json(self) -> dict[str, Any]:
        return dict(vars(self))

    def restore(self, content: dict[str, Any]) -> None:
        """Take over what `to_json` has returned."""
        for name, empty in vars(type(self)()).items():
            # JSON has no Counter, and a state of an older release lacks later counts
            setattr(self, name, type(empty)(content.get(name, empty)))


def _sum(before: Any, after: Any) -> Any:
    # Counter before dict, of which it is one
    if isinstance(before, Counter):
        return before + after
    if isinstance(before, dict):  # of first places: the earlier one stays
        return {**after, **before}
    if isinstance(before, str):
        return before or after
    return before + after


C = TypeVar("C", bound=Counts)


@dataclass
class Stream:
    """Tokens of documents, end to end, and the length of each of their sequences."""

    tokens: NDArray[Any]
    lengths: NDArray[Any]


@dataclass
class EncodedBatch(Generic[C]):
    """Consecutive blocks as tokens."""

    streams: list[Stream]
    """One for each output and its partitions, output by output."""
    counts: C
    of_blocks: list[BlockCounts]
    """Those of each block."""


@dataclass(frozen=True)
class Output:
    """A dataset that is written."""

    prefix: str
    dtype: DTypeLike
    num_partitions: int = 1
    """Streams that follow each other in the dataset."""
    sequences_per_document: int = 1
    keeps_empty_sequences: bool = True


class BlockEncoder(ABC, Generic[C]):
    """Part of a preparation that each kind has of its own: blocks of documents become tokens and counts."""

    job: PreparationJob
    files: JobInput
    outputs: Sequence[Output]
    """The first gets its name when the others have theirs."""
    notes: dict[str, Any]
    """Notes for PREFIX.sha256, among them `tokenizer`, its identity."""
    options: dict[str, Any]
    """All that determines what is written, apart from input and tokenizer. For the manifest."""
    free_options: Sequence[str] = ()
    """Options that a resumed run may change, to get past a fault."""

    @abstractmethod
    def no_counts(self) -> C: ...

    @abstractmethod
    def encode(self, start: Position) -> Generator[EncodedBatch[C]]:
        """Yield the input from `start` in order, encoded by the job's workers. Raises DataError, StartOver."""

    @abstractmethod
    def check(self, counts: C) -> None:
        """Raise DataError if the whole must not be written."""

    def batches(self, start: Position, block_bytes: int | None = None) -> Iterator[list[Block]]:
        return read_batches(self.files.sources, self.job.reading_rules(block_bytes), start=start)

    def check_outputs(self) -> None:
        """Raise DataError if something would be replaced without `overwrite`."""
        check_absent([output.prefix for output in self.outputs], self.job.overwrite)

    def before_publishing(self) -> None:
        """Write what belongs to the datasets."""

    def identity(self) -> dict[str, Any]:
        """Return what must not change before a run is resumed."""
        identity: dict[str, Any] = {}
        for name, value in self.options.items():
            # an option that only decides what happens to a fault may change between two runs
            if name not in self.free_options:
                identity[_flag(name)] = value
        if "chat_template" in self.notes:
            # by its content: a file may have been edited under the same name
            identity["chat template"] = self.notes["chat_template"]
        identity["--shard"] = str(self.job.shard) if self.job.shard else None
        identity["the tokenizer"] = self.notes["tokenizer"]
        return identity


def _flag(name: str) -> str:
    if name.startswith("--"):
        return name
    return f"--{name.replace('_', '-')}"


# found by comparing spots, when earlier batches have been written
class StartOver(Exception):
    """Tokens so far may be wrong; `encoder` is to encode the input from its beginning."""

    def __init__(self, reason: str, encoder: BlockEncoder[Any]):
        super().__init__(reason)
        self.encoder = encoder
