"""PREFIX.manifest.json: every file that was found for a dataset, what was read of it, and what was passed over and why.

It is plain JSON with a file a line under "files". `documents` of a file are those of it in the dataset, so that their
sum is the dataset's. `blank`, `empty` and `bad` count what is not in the dataset; `crc32` is that of the decompressed
content that was read. Reading may have stopped within a file (`stopped_after`), and left out those behind it.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, TypeGuard

import orjson

from megatron.data.index.indexed import DataError, IndexedDataset
from megatron.data.read.document_blocks import Block
from megatron.data.read.input_shards import InputShard
from megatron.data.read.sources import UNCOMPRESSED_ONLY, InputListing, SourceFile, reasons_in_words
from megatron.runtime.commands import counted
from megatron.runtime.files import sync_file

FORMAT = "manifest of an indexed dataset"
VERSION = 1
SUFFIX = ".manifest.json"
LOG_NAME = "manifest.jsonl"
COUNTS = ("bytes", "documents", "blank", "empty", "bad")
COUNTS_OF_ALL = ("files_read", "files_passed_over", *COUNTS)

WriteManifest = Callable[[IO[bytes], dict[str, Any]], None]
"""Called with the file to write, and the facts of the dataset: documents, sequences, tokens, dtype, sha256."""


@dataclass(frozen=True)
class BlockCounts:
    """Documents of a block in the dataset, and those that are not."""

    block: Block
    """The block without its content."""
    documents: int
    """Documents in the dataset."""
    blank: int = 0
    empty: int = 0
    """Documents without a token that are left out."""
    bad: int = 0


@dataclass
class _Entry:
    """A file as far as it has been read."""

    source_number: int
    member: int
    name: str
    bytes: int | None
    part: Sequence[int] | None = None
    passed_over: str = ""
    documents: int = 0
    blank: int = 0
    empty: int = 0
    bad: int = 0
    crc32: int | None = None
    read_bytes: int = 0
    stopped_after: int | None = None
    """Documents of the input after which reading stopped, in this file."""

    def line(self) -> dict[str, Any]:
        if self.passed_over:
            return {"name": self.name, "passed_over": self.passed_over}
        size = self.read_bytes if self.bytes is None else self.bytes
        line: dict[str, Any] = {"name": self.name, "bytes": size, "documents": self.documents}
        lost = {"blank": self.blank, "empty": self.empty, "bad": self.bad}
        line |= {name: count for name, count in lost.items() if count}
        if self.crc32 is not None:
            line["crc32"] = f"{self.crc32:08x}"
        if self.part is not None:
            line["part"] = list(self.part)
        if self.stopped_after is not None:
            line["stopped_after"] = self.stopped_after
        return line


class ManifestLog:
    """Entries of the files read so far, in a file that grows, so that memory and saved states do not."""

    def __init__(
        self,
        path: Path,
        sources: Sequence[SourceFile],
        saved: dict[str, Any] | None = None,
        *,
        max_documents: int | None = None,
    ):
        """Start empty, or after what `save_state` returned. Raises OSError."""
        self._sources, self._max_documents = sources, max_documents
        self._file = path.open("r+b" if saved and path.exists() else "wb")
        self._current: _Entry | None = None
        self._next_source = 0
        self.counts: Counter[str] = Counter()
        if saved:
            # what a killed run wrote after its last save is read again
            self._file.truncate(saved["num_bytes"])
            self._file.seek(saved["num_bytes"])
            if saved["current"]:
                self._current = _Entry(**saved["current"])
            self._next_source = saved["next_source"]
            self.counts.update(saved["counts"])

    def add(self, counts: BlockCounts) -> None:
        """Add the next block of the input."""
        block = counts.block
        entry = self._entry_of(block)
        entry.documents += counts.documents
        entry.blank += counts.blank
        entry.empty += counts.empty
        entry.bad += counts.bad
        entry.read_bytes += block.num_input_bytes
        # a block of damage ends where the next file begins, which has a checksum of its own
        ends_in_file = (block.end.source, block.end.member) == (entry.source_number, entry.member)
        if ends_in_file and block.source.kind not in UNCOMPRESSED_ONLY:
            entry.crc32 = block.end.crc32
        # the limit may fall on the end of a file: then this is the last one that was read
        if block.end.documents == self._max_documents:
            entry.stopped_after = self._max_documents

    def _entry_of(self, block: Block) -> _Entry:
        """Return the entry of a block's file, a new one for the first block of it."""
        number, member, source = block.begin.source, block.begin.member, block.source
        entry = self._current
        if entry is not None and (entry.source_number, entry.member, entry.name) == (
            number,
            member,
            source.public_name,
        ):
            return entry
        self._end_entry()
        self._add_unread(number)
        self._current = _Entry(number, member, source.public_name, source.size, source.part, block.passed_over)
        self._next_source = number + 1
        return self._current

    def _add_unread(self, end: int, passed_over: str = "") -> None:
        """Add the files before number `end` that gave no block: those without a byte of text, or passed over."""
        for number in range(self._next_source, end):
            source = self._sources[number]
            # every file of the input has an entry, so that none vanishes
            self._write(_Entry(number, 0, source.public_name, source.size, source.part, passed_over))
        self._next_source = max(self._next_source, end)

    def _end_entry(self) -> None:
        if self._current is not None:
            self._write(self._current)
            self._current = None

    def _write(self, entry: _Entry) -> None:
        line = entry.line()
        _count(self.counts, line)
        self._file.write(_json(line) + b"\n")

    def save_state(self) -> dict[str, Any]:
        """Flush to disk, and return how much that is."""
        sync_file(self._file)
        return {
            "num_bytes": self._file.tell(),
            # the entry of the file that is being read is not in the log yet
            "current": asdict(self._current) if self._current else None,
            "next_source": self._next_source,
            "counts": dict(self.counts),
        }

    def finish(self) -> None:
        """Add the last entries: all input has been read, or the first `max_documents`."""
        has_stopped = self._current is not None and self._current.stopped_after is not None
        self._end_entry()
        self._add_unread(len(self._sources), "beyond --max-documents" if has_stopped else "")

    def lines(self) -> Iterator[bytes]:
        """Yield the entries as JSON."""
        self._file.flush()
        with open(self._file.name, "rb") as file:
            for line in file:
                yield line.rstrip(b"\n")

    def close(self) -> None:
        self._file.close()


def _json(line: dict[str, Any]) -> bytes:
    try:
        # a million files have a million lines: json takes several times as long
        return orjson.dumps(line)
    except TypeError:  # a file name that is not UTF-8
        return json.dumps(line).encode()


def _count(counts: Counter[str], line: dict[str, Any]) -> None:
    if "passed_over" in line:
        counts["files_passed_over"] += 1
        return
    # the later parts of a file that shards have divided are not further files
    counts["files_read"] += not (line.get("part") and line["part"][0])
    for name in COUNTS:
        counts[name] += line.get(name, 0)


def manifest_writer(
    listing: InputListing,
    log: ManifestLog,
    tokenizer: dict[str, Any],
    options: dict[str, Any],
    shard: InputShard | None,
    input_digest: str,
    outcomes: Mapping[str, int] | None = None,
) -> WriteManifest:
    """Return the function that writes the manifest of a dataset made of a listing.

    `outcomes`: numbers of rows that were changed or left out, by what happened to them.
    """

    def write(file: IO[bytes], dataset: dict[str, Any]) -> None:
        skipped = [{"name": name, "passed_over": reason} for name, reason in listing.passed_over]
        # a copy: several datasets of one run are written from one log
        counts = Counter(log.counts)
        for line in skipped:
            _count(counts, line)
        header = {
            "tokenizer": tokenizer,
            "options": options,
            "shard": {"number": shard.number, "count": shard.count, "input": input_digest} if shard else None,
            "outcomes": dict(outcomes or {}),
        }
        _write(file, dataset, header, counts, itertools.chain(map(_json, skipped), log.lines()))

    return write


def _write(
    file: IO[bytes],
    dataset: dict[str, Any],
    header: dict[str, Any],
    counts: Counter[str],
    lines: Iterable[bytes],
) -> None:
    whole = {
        "format": FORMAT,
        "version": VERSION,
        "dataset": dataset,
        **header,
        "counts": {name: counts[name] for name in COUNTS_OF_ALL},
    }
    # the files one by one: a list of a million of them is not built
    file.write(json.dumps(whole, indent=1)[:-2].encode() + b',\n "files": [')
    before = b"\n  "
    for line in lines:
        file.write(before + line)
        before = b",\n  "
    file.write(b"\n ]\n}\n")


@dataclass(frozen=True)
class DatasetManifest:
    """Content of PREFIX.manifest.json."""

    path: Path
    dataset: dict[str, Any]
    header: dict[str, Any]
    """Tokenizer, options, shard, and outcomes: rows that were changed or left out, by what happened to them."""
    counts: dict[str, int]
    files: list[dict[str, Any]] = field(repr=False)

    @property
    def shard(self) -> dict[str, Any] | None:
        shard: dict[str, Any] | None = self.header["shard"]
        return shard

    def describe(self, *, with_outcomes: bool = True) -> str:
        """Return one line for the user."""
        skipped = Counter(line["passed_over"] for line in self.files if "passed_over" in line)
        files = f"{counted(self.counts['files_read'], 'file')} read, {skipped.total():,} passed over"
        if skipped:
            files += f" ({reasons_in_words(skipped)})"
        clauses = [files]
        lost = [f"{self.counts[name]:,} {name}" for name in ("blank", "empty", "bad") if self.counts[name]]
        if lost:
            clauses.append(f"documents left out: {', '.join(lost)}")
        if with_outcomes:
            clauses += [f"{name}: {count:,}" for name, count in self.header["outcomes"].items()]
        stops = {line["stopped_after"] for line in self.files if "stopped_after" in line}
        for number in sorted(stops):
            clauses.append(f"reading stopped after {counted(number, 'document')} of the input (--max-documents)")
        if self.shard is not None:
            clauses.append(f"shard {self.shard['number']}/{self.shard['count']}")
        return "; ".join(clauses)

    def faults(self, data: IndexedDataset, sha256: dict[str, str]) -> Iterator[str]:
        """Yield what disagrees with the dataset, whose SHA-256 are given by suffix, or within the manifest."""
        for name, count in data.sizes.items():
            if self.dataset.get(name) != count:
                yield f"{self.path} says {self.dataset.get(name)} {name}, but the dataset has {count}"
        if self.dataset.get("dtype") != str(data.dtype):
            yield f"{self.path} says {self.dataset.get('dtype')}, but the dataset holds {data.dtype}"
        for suffix, digest in sha256.items():
            if self.dataset["sha256"].get(suffix) != digest:
                yield f"{self.path} is of another {suffix} than {data.prefix}{suffix}, by its SHA-256"
        yield from self._count_faults(data)

    def _count_faults(self, data: IndexedDataset) -> Iterator[str]:
        counts: Counter[str] = Counter()
        for line in self.files:
            _count(counts, line)
        for name, count in self.counts.items():
            if counts[name] != count:
                yield f"{self.path}: its files add up to {counts[name]} {name}, but its counts say {count}"
        if counts["documents"] != data.num_documents:
            yield f"{self.path}: its files have {counts['documents']} documents, but the dataset {data.num_documents}"


def read_manifest(prefix: str | Path) -> DatasetManifest | None:
    """Read PREFIX.manifest.json; None if there is none, as for datasets written by Megatron. Raises DataError."""
    path = Path(f"{prefix}{SUFFIX}")
    try:
        content = json.loads(path.read_bytes())
        _require(isinstance(content, dict) and content.get("format") == FORMAT, "it is not a manifest")
        _require(_is_count(content.get("version")), "its version")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise _damaged(path, error) from error
    # before the form is looked at, which a later version may have changed
    if content["version"] > VERSION:
        raise DataError(f"{path} has version {content['version']}, this program reads {VERSION}; update it")
    try:
        _check_content(content)
    except ValueError as error:
        raise _damaged(path, error) from error
    # outcomes came later than the rest
    header = {name: content.get(name, {}) for name in ("tokenizer", "options", "shard", "outcomes")}
    return DatasetManifest(path, content["dataset"], header, content["counts"], content["files"])


def _damaged(path: Path, error: Exception) -> DataError:
    return DataError(f"{path} is damaged ({error}); copy it again, or delete it")


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(what)


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _check_content(content: dict[str, Any]) -> None:
    """Raise ValueError that names a part which has not the form that this program writes."""
    dataset = content.get("dataset")
    _require(isinstance(dataset, dict) and isinstance(dataset.get("sha256"), dict), "its dataset")
    _require(isinstance(content.get("tokenizer", 0), dict | None), "its tokenizer")
    _require(isinstance(content.get("options"), dict), "its options")
    _require("shard" in content and _is_shard(content["shard"]), "its shard")
    _require(_are_counts(content.get("outcomes", {})), "its outcomes")  # older manifests have none
    counts = content.get("counts")
    _require(_are_counts(counts) and set(counts) == set(COUNTS_OF_ALL), "its counts")
    _require(isinstance(content.get("files"), list), "its files")
    for number, line in enumerate(content["files"]):
        _require(_is_entry(line), f"entry {number} of its files")


def _are_counts(value: Any) -> TypeGuard[dict[str, int]]:
    return isinstance(value, dict) and all(map(_is_count, value.values()))


def _is_shard(value: Any) -> bool:
    if value is None:
        return True
    return isinstance(value, dict) and "input" in value and _has_counts(value, ("number", "count"))


def _has_counts(line: dict[str, Any], names: Iterable[str]) -> bool:
    return all(_is_count(line.get(name)) for name in names)


def _is_entry(line: Any) -> bool:
    if not isinstance(line, dict) or not isinstance(line.get("name"), str):
        return False
    if "passed_over" in line:
        return isinstance(line["passed_over"], str)
    part = line.get("part", [0, 0])
    is_part = isinstance(part, list) and len(part) == 2 and all(map(_is_count, part))
    return is_part and _has_counts(line, line.keys() & {*COUNTS, "stopped_after"})


def merged_writer(
    inputs: Sequence[tuple[IndexedDataset, DatasetManifest | None]], options: Mapping[str, Any]
) -> WriteManifest | None:
    """Return the function that writes the manifest of datasets joined in this order; None if none has one.

    A dataset without a manifest stands as one file. `options` are those of the merge.
    """
    if all(manifest is None for _, manifest in inputs):
        return None

    def write(file: IO[bytes], dataset: dict[str, Any]) -> None:
        lines = _joined_lines(inputs)
        counts: Counter[str] = Counter()
        for line in lines:
            _count(counts, line)
        none: dict[str, Any] = {"tokenizer": None, "options": {}}
        headers = [none if manifest is None else manifest.header for _, manifest in inputs]
        header = _joined_header(headers)
        header["options"] |= options
        _write(file, dataset, header, counts, map(_json, lines))

    return write


def _joined_lines(inputs: Sequence[tuple[IndexedDataset, DatasetManifest | None]]) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = []
    passed_over: set[Any] = set()
    for data, manifest in inputs:
        if manifest is None:
            num_bytes = data.num_tokens * data.dtype.itemsize
            # so that the documents of all files are those of the dataset
            stands_for = {"name": str(data.prefix), "bytes": num_bytes, "documents": data.num_documents}
            lines.append({**stands_for, "is_dataset": True})
            continue
        for line in manifest.files:
            if "passed_over" in line:
                # the shards of one input have all passed over the same files
                if line["name"] in passed_over:
                    continue
                passed_over.add(line["name"])
            lines.append(line)
    return lines


def _joined_header(headers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return what all manifests say, and the sums of what happened to rows."""
    first, outcomes = headers[0], Counter[str]()
    options = dict(first["options"])
    for header in headers:
        options = {name: value for name, value in options.items() if header["options"].get(name, ...) == value}
        outcomes.update(header.get("outcomes", {}))
    has_one_tokenizer = all(header["tokenizer"] == first["tokenizer"] for header in headers)
    return {
        "tokenizer": first["tokenizer"] if has_one_tokenizer else None,
        "options": options,
        "shard": None,
        "outcomes": dict(outcomes),
    }


def check_shards(inputs: Sequence[tuple[str, DatasetManifest | None]]) -> None:
    """Raise DataError unless the datasets are no shards, or all shards of one input, each once and in order."""
    shards = [(prefix, manifest.shard) for prefix, manifest in inputs if manifest and manifest.shard]
    if not shards:
        return
    others = [prefix for prefix, manifest in inputs if not (manifest and manifest.shard)]
    first_prefix, first = shards[0]
    if others:
        raise DataError(
            f"{first_prefix} is shard {first['number']}/{first['count']} of an input, {others[0]} is none; merge the "
            "shards first, and their result with other datasets then"
        )
    for prefix, shard in shards:
        # the digest of the whole input: shards of two corpora may have equal counts
        if (shard["count"], shard["input"]) != (first["count"], first["input"]):
            raise DataError(
                f"{first_prefix} is shard {first['number']}/{first['count']} of an input, {prefix} is shard "
                f"{shard['number']}/{shard['count']} of another; merge the shards of each input by themselves"
            )
    fault = _order_fault(shards, first["count"])
    if fault is not None:
        raise DataError(f"{fault}: merged, the datasets would not be what one machine had made of the whole input")


def _order_fault(shards: Sequence[tuple[str, dict[str, Any]]], count: int) -> str | None:
    """Return what is wrong with the numbers of shards; None if each is there once and in order."""
    numbers = [shard["number"] for _, shard in shards]
    expected = list(range(1, count + 1))
    if numbers == expected:
        return None
    # a missing shard explains the rest, so it is named first
    missing = sorted(set(expected) - set(numbers))
    twice = [number for number, times in Counter(numbers).items() if times > 1]
    if missing:
        return f"shard {', '.join(map(str, missing))} of {count} is missing"
    if twice:
        return f"shard {twice[0]} of {count} is given twice"
    right = " ".join(prefix for prefix, _ in sorted(shards, key=lambda pair: pair[1]["number"]))
    return f"the shards are not in order; give --input {right}"
