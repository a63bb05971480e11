"""Documents out of text files: what tools/preprocess_data.py and tools/train_tokenizer.py read.

A JSONL file holds a document a line, a text file is one document. Files are read as blocks of raw bytes, in order,
and a block is parsed apart from its reading, so that the parsing can be spread over threads.
"""

from __future__ import annotations

import fnmatch
import glob
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import orjson

from megatron.data.indexed import DataError

JSONL_SUFFIXES = (".jsonl", ".json")
TEXT_SUFFIXES = (".txt",)
BLOCK_BYTES = 1 << 20
BOM = b"\xef\xbb\xbf"

OnBadLine = Literal["fail", "skip"]


@dataclass(frozen=True)
class Source:
    path: Path
    kind: Literal["jsonl", "text"]


@dataclass(frozen=True)
class Block:
    """Raw documents that follow each other in one file: lines of JSONL, or a whole text file."""

    source: Source
    first_line: int
    """Counted from 1."""
    raw_documents: list[bytes]

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self.raw_documents))

    def place(self, number: int) -> str:
        """Where document `number` of this block is, for a message."""
        return (
            f"{self.source.path}:{self.first_line + number}" if self.source.kind == "jsonl" else str(self.source.path)
        )


@dataclass(frozen=True)
class Fault:
    """A document that cannot be used."""

    place: str
    reason: str

    def __str__(self) -> str:
        return f"{self.place}: {self.reason}"


@dataclass
class Parsed:
    """The documents of a block."""

    places: list[str] = field(default_factory=list)
    texts: list[tuple[str, ...]] = field(default_factory=list)
    """For each document, its text under each key."""
    faults: list[Fault] = field(default_factory=list)
    num_blank: int = 0
    """Lines with nothing on them."""


def find_sources(inputs: Sequence[str], text_files: str | None = None) -> list[Source]:
    """The files behind paths, folders (searched through, in order of name) and globs.

    `text_files`, such as '*.py': files of that name are text, and folders are searched for these alone. Without it,
    .jsonl and .json are JSONL, .txt is text, and a folder's other files are passed over. Raises DataError.
    """
    sources: list[Source] = []
    for given in inputs:
        if os.path.isdir(given):
            found = [s for s in (_source(path, text_files) for path in _files_below(given)) if s]
            if not found:
                wanted = text_files or ", ".join("*" + suffix for suffix in (*JSONL_SUFFIXES, *TEXT_SUFFIXES))
                raise DataError(f"{given} holds no {wanted}; give another folder, or --text-files 'PATTERN'")
            sources += found
        elif os.path.exists(given):
            sources.append(_named_source(Path(given), text_files))
        else:
            matches = sorted(filter(os.path.isfile, glob.glob(given, recursive=True)))
            if not matches:
                raise DataError(f"{given} does not exist, and as a pattern matches no file; correct --input")
            sources += [_named_source(Path(match), text_files) for match in matches]
    seen: set[Path] = set()
    for source in sources:
        real = source.path.resolve()
        if real in seen:
            raise DataError(f"{source.path} is named twice by --input; name it once")
        seen.add(real)
    return sources


def _files_below(folder: str) -> Iterator[Path]:
    for parent, folders, files in os.walk(folder):
        folders.sort()
        yield from (Path(parent) / name for name in sorted(files))


def _source(path: Path, text_files: str | None) -> Source | None:
    if text_files is not None:
        return Source(path, "text") if fnmatch.fnmatch(path.name, text_files) else None
    if path.suffix in JSONL_SUFFIXES:
        return Source(path, "jsonl")
    return Source(path, "text") if path.suffix in TEXT_SUFFIXES else None


def _named_source(path: Path, text_files: str | None) -> Source:
    source = _source(path, text_files) or _source(path, None)
    if source is None:
        raise DataError(
            f"{path} is of no known kind; known are {', '.join((*JSONL_SUFFIXES, *TEXT_SUFFIXES))}: name it so, or say "
            f"--text-files '*{path.suffix}' to read it as one document of text"
        )
    return source


def read_blocks(sources: Sequence[Source]) -> Iterator[Block]:
    """All documents, in order, in blocks of about BLOCK_BYTES. Raises DataError where a file cannot be read."""
    for source in sources:
        try:
            with source.path.open("rb") as file:
                if source.kind == "text":
                    yield Block(source, 1, [file.read().removeprefix(BOM)])
                    continue
                next_line = 1
                while lines := file.readlines(BLOCK_BYTES):
                    if next_line == 1:
                        lines[0] = lines[0].removeprefix(BOM)
                    yield Block(source, next_line, lines)
                    next_line += len(lines)
        except OSError as error:
            raise DataError(f"{source.path} cannot be read: {error.strerror}") from error


def parse(block: Block, keys: Sequence[str]) -> Parsed:
    """The texts under `keys` of each document of a block. A text file has the same text under every key."""
    parsed = Parsed()
    for number, raw in enumerate(block.raw_documents):
        if not raw.strip():
            parsed.num_blank += 1
            continue
        try:
            if block.source.kind == "text":
                texts = (raw.decode("utf-8"),) * len(keys)
            else:
                texts = _texts_of_line(raw, keys)
        except UnicodeDecodeError as error:
            parsed.faults.append(Fault(block.place(number), f"byte {error.start} is not UTF-8; convert the file"))
        except DataError as error:
            parsed.faults.append(Fault(block.place(number), str(error)))
        else:
            parsed.places.append(block.place(number))
            parsed.texts.append(texts)
    return parsed


def _texts_of_line(line: bytes, keys: Sequence[str]) -> tuple[str, ...]:
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise DataError(f"the line is no JSON ({error}); every line must be one JSON object") from None
    if not isinstance(row, dict):
        raise DataError(f'the line is a JSON {_json_type(row)}, not an object such as {{"{keys[0]}": ...}}')
    for key in keys:
        if key not in row:
            raise DataError(f"no key {key!r}; the line has {', '.join(map(repr, row)) or 'none'} (see --json-keys)")
        if not isinstance(row[key], str):
            raise DataError(f"the value of {key!r} is a JSON {_json_type(row[key])}, not a string")
    return tuple(row[key] for key in keys)


def _json_type(value: object) -> str:
    names = {dict: "object", list: "array", str: "string", bool: "boolean", int: "number", float: "number"}
    return names.get(type(value), "null")


def read_texts(sources: Sequence[Source], keys: Sequence[str], on_bad_line: OnBadLine) -> Iterator[str]:
    """Every text of every document. Raises DataError at the first bad one, unless they are to be skipped."""
    for block in read_blocks(sources):
        parsed = parse(block, keys)
        if parsed.faults and on_bad_line == "fail":
            raise bad_line_error(parsed.faults[0])
        # a text file has one text, however many keys
        for texts in parsed.texts:
            yield from texts if block.source.kind == "jsonl" else texts[:1]


def bad_line_error(fault: Fault) -> DataError:
    return DataError(f"{fault} (or pass --on-bad-line skip to leave such documents out)")
