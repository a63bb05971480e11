"""Documents out of files: what tools/preprocess_data.py and tools/train_tokenizer.py read.

A JSONL file holds a document a line, a Parquet file a document a row, a text file is one document or several with a
separator between them. JSONL and text may be compressed with gzip or zstd. Files are read as blocks of raw documents,
in order, and a block is parsed apart from its reading, so that the parsing can be spread over threads. Memory does not
grow with a file: a document has a largest size, and so has what a compressed file may expand to.
"""

from __future__ import annotations

import codecs
import fnmatch
import glob
import gzip
import itertools
import json
import os
import stat
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal

import orjson

from megatron.data.indexed import DataError

if TYPE_CHECKING:
    import pyarrow

Kind = Literal["jsonl", "text", "parquet"]
Compression = Literal["", ".gz", ".zst"]
OnBadLine = Literal["fail", "skip"]

KINDS: dict[str, Kind] = {
    ".jsonl": "jsonl",
    ".json": "jsonl",
    ".ndjson": "jsonl",
    ".txt": "text",
    ".parquet": "parquet",
}
COMPRESSIONS: tuple[Compression, ...] = (".gz", ".zst")
KNOWN_NAMES = f"{', '.join('*' + suffix for suffix in KINDS)}; all but *.parquet also with .gz or .zst behind"

BLOCK_BYTES = 1 << 20
COMPRESSED_BLOCK_BYTES = 1 << 12
"""What zstd is given at once: 32,768 times as much may come out."""
BOM = b"\xef\xbb\xbf"
LARGEST_DOCUMENT_BYTES = 64 << 20
LARGEST_EXPANSION = 300
"""Text that is no bomb shrinks to a hundredth at best."""
EXPANSION_COUNTS_FROM_BYTES = 64 << 20


@dataclass(frozen=True)
class Source:
    """A file of documents."""

    path: Path
    kind: Kind
    compression: Compression = ""


@dataclass(frozen=True)
class Position:
    """Where in the sources a block ends, and reading can begin again."""

    source: int = 0
    """Number of the source."""
    offset: int = 0
    """Bytes into it, after decompression; rows into a Parquet file."""
    documents_of_source: int = 0
    """Documents before this place in the source, those that cannot be used included."""
    documents: int = 0
    """The same in all sources together."""


@dataclass(frozen=True)
class Fault:
    """A document, or the rest of a file, that cannot be used."""

    place: str
    reason: str

    def __str__(self) -> str:
        return f"{self.place}: {self.reason}"


@dataclass(frozen=True)
class Block:
    """Documents that follow each other in one source."""

    source: Source
    begin: Position
    end: Position
    num_input_bytes: int
    """What was read of the file for it, as it lies on the disk."""
    raw: bytes = b""
    """JSONL and text: the documents with `delimiter` between them."""
    delimiter: bytes = b"\n"
    """Empty: `raw` is one document."""
    rows: pyarrow.RecordBatch | None = None
    """Parquet."""
    fault: Fault | None = None
    """What could not even be read. Such a block has no documents."""

    def place(self, number: int) -> str:
        """Where document `number` of this block is, for a message. Lines, rows and documents count from 1."""
        return _place(self.source, self.begin.documents_of_source + number, bool(self.delimiter))


@dataclass
class Parsed:
    """The documents of a block."""

    numbers: list[int] = field(default_factory=list)
    """Which of the block's documents each is."""
    columns: list[list[str]] = field(default_factory=list)
    """For each key, the text of every document."""
    faults: list[Fault] = field(default_factory=list)
    num_blank: int = 0
    """Documents with nothing in them."""


def _place(source: Source, number: int, is_one_of_many: bool) -> str:
    if source.kind == "jsonl":
        return f"{source.path}:{number + 1}"
    if source.kind == "parquet":
        return f"{source.path}, row {number + 1}"
    return f"{source.path}, document {number + 1}" if is_one_of_many else str(source.path)


# Which files


def find_sources(inputs: Sequence[str], text_files: str | None = None) -> list[Source]:
    """The files behind paths, folders (searched through, in order of name) and globs.

    `text_files`, such as '*.py': files of that name are text, and folders are searched for these alone. Without it the
    name's ending says what a file is, and a folder's other files are passed over. Raises DataError, also where a file
    cannot be opened.
    """
    sources: list[Source] = []
    for given in inputs:
        mode = _mode(given)
        if mode is not None and stat.S_ISDIR(mode):
            found = [s for s in (_source(path, text_files) for path in _files_below(given)) if s]
            if not found:
                raise DataError(
                    f"{given} holds no {text_files or KNOWN_NAMES}; give another folder, or --text-files 'PATTERN'"
                )
            sources += found
        elif mode is not None and not stat.S_ISREG(mode):
            raise DataError(f"{given} is a pipe or a device, in which no place can be found again; give a file")
        elif mode is not None:
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
        try:
            source.path.open("rb").close()
        except OSError as error:
            raise _unreadable(source, error) from error
    return sources


def _mode(path: str) -> int | None:
    """None: nothing of that name."""
    try:
        return os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}; correct its permissions, or --input") from error


def _files_below(folder: str) -> Iterator[Path]:
    for parent, folders, files in os.walk(folder):
        folders.sort()
        yield from (Path(parent) / name for name in sorted(files))


def _source(path: Path, text_files: str | None) -> Source | None:
    compression: Compression = next((c for c in COMPRESSIONS if path.name.endswith(c)), "")
    name = path.name.removesuffix(compression)
    if text_files is not None:
        is_text = fnmatch.fnmatch(path.name, text_files) or fnmatch.fnmatch(name, text_files)
        return Source(path, "text", compression) if is_text else None
    kind = KINDS.get(os.path.splitext(name)[1])
    if kind is None or (kind == "parquet" and compression):
        return None
    return Source(path, kind, compression)


def _named_source(path: Path, text_files: str | None) -> Source:
    source = _source(path, text_files) or _source(path, None)
    if source is None:
        raise DataError(
            f"{path} is of no known kind; known are {KNOWN_NAMES}: name it so, or say --text-files '*{path.suffix}' to "
            "read it as text"
        )
    return source


def check_columns(sources: Sequence[Source], keys: Sequence[str]) -> None:
    """Raise DataError for a Parquet file without a column of strings for each key, before hours are spent on others."""
    for source in sources:
        if source.kind == "parquet":
            _open_parquet(source, keys)


def _unreadable(source: Source, error: OSError) -> DataError:
    return DataError(f"{source.path} cannot be read: {error.strerror or error}; mend the file, or leave it out")


# Reading


def read_blocks(
    sources: Sequence[Source],
    keys: Sequence[str],
    *,
    separator: str | None = None,
    start: Position | None = None,
    largest_document_bytes: int = LARGEST_DOCUMENT_BYTES,
    remedy: str = "cut it into several documents, or raise --max-document-mb",
    block_bytes: int | None = None,
    goes_on: bool = True,
) -> Iterator[Block]:
    """All documents from `start` on, in order, in blocks of about block_bytes, by default BLOCK_BYTES.

    `separator` stands between the documents of a text file; None: each is one document. What is damaged or too long
    becomes a block with a fault, and reading goes on behind it: at the next document, or at the next file. `remedy` is
    what the fault of too long a document tells the user to do. Without `goes_on`, such a block comes at once, before
    the document's end was found, and is the last. Raises DataError where a file cannot be opened.
    """
    start, block_bytes = start or Position(), block_bytes or BLOCK_BYTES
    documents = start.documents
    for number, source in itertools.islice(enumerate(sources), start.source, None):
        at = start if number == start.source else Position(source=number, documents=documents)
        if source.kind == "parquet":
            blocks = _parquet_blocks(source, keys, at, block_bytes)
        else:
            delimiter = b"\n" if source.kind == "jsonl" else (separator or "").encode()
            blocks = _delimited_blocks(source, delimiter, at, largest_document_bytes, remedy, block_bytes, goes_on)
        for block in blocks:
            documents = block.end.documents
            yield block
            if block.fault is not None and not goes_on:
                return


class _Damage(Exception):
    """The rest of a file cannot be read. Says why."""


class _Reader:
    """A file's content, decompressed, and how much of the file was read for it."""

    def __init__(self, source: Source, file: IO[bytes], block_bytes: int):
        self._source, self._file, self._block_bytes = source, file, block_bytes
        self._counted_bytes = 0
        self._content_bytes = 0

    def chunks(self, skip_bytes: int) -> Iterator[bytes]:
        """The content in pieces of about block_bytes, without its first skip_bytes. Raises _Damage."""
        if self._source.compression == "":
            self._file.seek(skip_bytes)
            skip_bytes = 0
        pieces = {"": self._plain, ".gz": self._gzip, ".zst": self._zstd}[self._source.compression]()
        try:
            for piece in pieces:
                self._content_bytes += len(piece)
                if self._source.compression:
                    self._check_expansion()
                if skip_bytes:
                    piece, skip_bytes = piece[skip_bytes:], max(0, skip_bytes - len(piece))
                yield piece
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            reason = "is cut off" if isinstance(error, EOFError) else f"is damaged ({error})"
            raise _Damage(
                f"the gzip file {reason} after {self._content_bytes} bytes of content; copy it anew"
            ) from error
        except OSError as error:
            raise _Damage(f"the file cannot be read on: {error.strerror or error}; mend it, or leave it out") from error

    def take_count(self) -> int:
        """Bytes of the file read since the last call."""
        position = self._file.tell()
        count, self._counted_bytes = position - self._counted_bytes, position
        return count

    def _check_expansion(self) -> None:
        read_bytes = self._file.tell()
        limit = max(EXPANSION_COUNTS_FROM_BYTES, LARGEST_EXPANSION * read_bytes)
        if self._content_bytes > limit:
            raise _Damage(
                f"{read_bytes} bytes of the file expand to more than {limit}: it may be a decompression bomb; if it is "
                "what you want, decompress it yourself"
            )

    def _plain(self) -> Iterator[bytes]:
        while piece := self._file.read(self._block_bytes):
            yield piece

    def _gzip(self) -> Iterator[bytes]:
        with gzip.GzipFile(fileobj=self._file) as content:
            while piece := content.read(self._block_bytes):
                yield piece

    def _zstd(self) -> Iterator[bytes]:
        import zstandard

        # Not its stream_reader, for which a file that is cut off ends like a whole one.
        frame = None
        held = bytearray()
        try:
            while raw := self._file.read(COMPRESSED_BLOCK_BYTES):
                while raw:
                    frame = frame or zstandard.ZstdDecompressor().decompressobj()
                    held += frame.decompress(raw)
                    raw = frame.unused_data if frame.eof else b""
                    frame = None if frame.eof else frame
                if len(held) >= self._block_bytes:
                    yield bytes(held)
                    held.clear()
            yield bytes(held)
        except zstandard.ZstdError as error:
            raise _Damage(
                f"the zstd file cannot be decompressed after {self._content_bytes} bytes of content ({error}); copy it "
                "anew, or compress it again without --long"
            ) from error
        if frame is not None:
            raise _Damage(f"the zstd file is cut off after {self._content_bytes} bytes of content; copy it anew")


def _delimited_blocks(
    source: Source, delimiter: bytes, start: Position, largest_bytes: int, remedy: str, block_bytes: int, goes_on: bool
) -> Iterator[Block]:
    """Blocks of a file whose documents end with `delimiter`; empty: the file is one document."""
    try:
        file = source.path.open("rb", buffering=0)
    except OSError as error:
        raise _unreadable(source, error) from error
    at = start
    held = bytearray()  # read, and in no block yet
    is_too_long = False  # of the document being read; it is thrown away up to its end
    reader = _Reader(source, file, block_bytes)

    def take(num_bytes: int, num_documents: int, fault: str | None = None) -> Block:
        """A block of the first bytes held; of none of them where they cannot be used."""
        nonlocal at
        begin, at = at, _advanced(at, num_bytes, num_documents)
        raw = b""
        if fault is None:
            with memoryview(held) as view:
                raw = bytes(view[:num_bytes]).removesuffix(delimiter)
        del held[:num_bytes]
        place = _place(source, begin.documents_of_source, bool(delimiter))
        damage = None if fault is None else Fault(place, fault)
        return Block(source, begin, at, reader.take_count(), raw, delimiter, fault=damage)

    def drop(num_bytes: int) -> None:
        nonlocal at
        at = _advanced(at, num_bytes, 0)
        del held[:num_bytes]

    too_long = f"longer than {largest_bytes} bytes; {remedy}"
    with file:
        try:
            searched = 0
            for chunk in reader.chunks(start.offset):
                if not chunk:
                    continue
                held += chunk
                if at.offset == 0:
                    if source.kind == "jsonl" and held.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
                        raise _Damage("the file is UTF-16; convert it to UTF-8")
                    drop(len(BOM) if held.startswith(BOM) else 0)
                end, num_ends = _last_end(held, delimiter, searched)
                if num_ends and is_too_long:
                    is_too_long = False
                    first_end = held.find(delimiter) + len(delimiter)
                    yield take(first_end, 1, too_long)
                    end, num_ends = end - first_end, num_ends - 1
                if num_ends:
                    yield take(end, num_ends)
                    end = 0
                # the delimiter may lie across the border of two chunks
                searched = max(end, len(held) - len(delimiter) + 1)
                if is_too_long or len(held) > largest_bytes:
                    is_too_long = True
                    if not goes_on:
                        break
                    drop(searched if delimiter else len(held))
                    searched = 0
            if held or is_too_long:
                yield take(len(held), 1, too_long if is_too_long else None)
        except _Damage as damage:
            yield _rest_is_lost(source, at, reader.take_count(), str(damage))


def _last_end(content: bytearray, delimiter: bytes, start: int) -> tuple[int, int]:
    """The end of the last delimiter from `start` on, counted from the left as `split` does, and how many there are."""
    if len(delimiter) == 1:
        return content.rfind(delimiter, start) + 1, content.count(delimiter, start)
    end, num_ends = start, 0
    while delimiter and (found := content.find(delimiter, end)) >= 0:
        end, num_ends = found + len(delimiter), num_ends + 1
    return end, num_ends


def _rest_is_lost(source: Source, at: Position, num_input_bytes: int, reason: str) -> Block:
    """A block that names the damage; reading begins again with the next source."""
    end = Position(source=at.source + 1, documents=at.documents)
    return Block(source, at, end, num_input_bytes, fault=Fault(_place(source, at.documents_of_source, True), reason))


def _advanced(position: Position, offset: int, documents: int) -> Position:
    return Position(
        position.source,
        position.offset + offset,
        position.documents_of_source + documents,
        position.documents + documents,
    )


def _open_parquet(source: Source, keys: Sequence[str]) -> Any:
    import pyarrow
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(source.path)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(
            f"{source.path} is no readable Parquet file ({error}); copy it anew, or leave it out"
        ) from error
    schema = file.schema_arrow
    for key in keys:
        if key not in schema.names:
            raise DataError(f"{source.path} has no column {key!r}, but {', '.join(schema.names)} (see --json-keys)")
        kind = schema.field(key).type
        value_kind = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
        is_text = pyarrow.types.is_string(value_kind) or pyarrow.types.is_large_string(value_kind)
        if not is_text:
            raise DataError(f"{source.path}: column {key!r} holds {kind}, not strings (see --json-keys)")
    return file


def _parquet_blocks(source: Source, keys: Sequence[str], start: Position, block_bytes: int) -> Iterator[Block]:
    import pyarrow

    file = _open_parquet(source, keys)
    file_bytes, num_rows = source.path.stat().st_size, max(1, file.metadata.num_rows)
    at = start
    try:
        first_row = 0
        for group in range(file.metadata.num_row_groups):
            rows_of_group = file.metadata.row_group(group).num_rows
            if first_row + rows_of_group > at.offset:
                # as many rows as make a block, if the group's are alike
                group_bytes = sum(
                    file.metadata.row_group(group).column(c).total_uncompressed_size
                    for c in range(file.metadata.num_columns)
                    if file.metadata.row_group(group).column(c).path_in_schema in keys
                )
                batch_size = max(1, rows_of_group * block_bytes // max(1, group_bytes))
                row = first_row
                for rows in file.iter_batches(batch_size=batch_size, row_groups=[group], columns=list(keys)):
                    row += len(rows)
                    if row <= at.offset:
                        continue
                    rows = rows.slice(max(0, at.offset - (row - len(rows))))
                    begin, at = at, _advanced(at, len(rows), len(rows))
                    read_bytes = file_bytes * at.offset // num_rows - file_bytes * begin.offset // num_rows
                    yield Block(source, begin, at, read_bytes, rows=rows)
            first_row += rows_of_group
    except (pyarrow.ArrowException, OSError) as error:
        yield _rest_is_lost(source, at, 0, f"the file is damaged from here on ({error})")


# Parsing


def parse(block: Block, keys: Sequence[str]) -> Parsed:
    """The texts under `keys` of each document of a block. A text file has the same text under every key."""
    if block.fault is not None:
        return Parsed(columns=[[] for _ in keys], faults=[block.fault])
    if block.rows is not None:
        return _parse_rows(block, block.rows, keys)
    raw_documents = block.raw.split(block.delimiter) if block.delimiter else [block.raw]
    if block.source.kind == "jsonl" and len(keys) == 1:
        texts = _texts_of_clean_lines(raw_documents, keys[0])
        if texts is not None:
            return Parsed(list(range(len(texts))), [texts])
    parsed = Parsed(columns=[[] for _ in keys])
    for number, raw in enumerate(raw_documents):
        if not raw.strip():
            parsed.num_blank += 1
            continue
        try:
            if block.source.kind == "text":
                texts = [raw.decode("utf-8")] * len(keys)
            else:
                texts = _texts_of_line(raw, keys)
        except UnicodeDecodeError as error:
            parsed.faults.append(Fault(block.place(number), f"byte {error.start} is not UTF-8; convert the file"))
        except DataError as error:
            parsed.faults.append(Fault(block.place(number), str(error)))
        else:
            parsed.numbers.append(number)
            for column, text in zip(parsed.columns, texts, strict=True):
                column.append(text)
    return parsed


def _texts_of_clean_lines(lines: Sequence[bytes], key: str) -> list[str] | None:
    """The fast way through lines without a fault. None: there may be one."""
    quoted = b'"%s"' % key.encode()
    loads = orjson.loads
    try:
        texts = [loads(line)[key] for line in lines]
    except (orjson.JSONDecodeError, KeyError, TypeError, IndexError):
        return None
    # the key's name may stand in the text itself, or twice in the object
    if set(map(type, texts)) != {str} or any(line.count(quoted) > 1 for line in lines):
        return None
    return texts


def _texts_of_line(line: bytes, keys: Sequence[str]) -> list[str]:
    row = object_of_line(line, f'{{"{keys[0]}": ...}}')
    for key in keys:
        if key not in row:
            raise DataError(f"no key {key!r}; the line has {', '.join(map(repr, row)) or 'none'} (see --json-keys)")
        if not isinstance(row[key], str):
            raise DataError(f"the value of {key!r} is a JSON {_json_type(row[key])}, not a string")
    if any(line.count(b'"%s"' % key.encode()) > 1 for key in keys):
        _check_keys_are_unique(line, keys)
    return [row[key] for key in keys]


def object_of_line(line: bytes, example: str) -> dict[str, Any]:
    """The JSON object in a line. Raises DataError, which shows `example`, or UnicodeDecodeError."""
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        line.decode("utf-8")
        raise DataError(
            f"the line is no JSON ({_json_fault(line, error)}); every line must be one JSON object"
        ) from None
    if not isinstance(row, dict):
        raise DataError(f"the line is a JSON {_json_type(row)}, not an object such as {example}")
    return row


def _check_keys_are_unique(line: bytes, keys: Sequence[str]) -> None:
    objects: list[list[tuple[str, Any]]] = []
    json.loads(line, object_pairs_hook=objects.append)
    outermost = [name for name, _ in objects[-1]]  # an object is reported after those inside it
    for key in keys:
        if outermost.count(key) > 1:
            raise DataError(
                f"the key {key!r} stands {outermost.count(key)} times in the line; one of them would be lost"
            )


def _json_fault(line: bytes, error: orjson.JSONDecodeError) -> str:
    if line.strip(b"\0 \r") == b"":
        return "it is all NUL bytes, as after a crash while it was written"
    if line.lstrip().startswith(b"[") and error.pos >= len(line.rstrip()):
        return "it begins a JSON array over several lines; `jq -c '.[]'` makes lines of it"
    for word in (b"NaN", b"Infinity"):
        if line[error.pos :].lstrip(b"-").startswith(word) or line[max(0, error.pos - 1) :].startswith(word):
            return f"{word.decode()} is no JSON number, write null"
    return str(error)


def _json_type(value: object) -> str:
    names = {dict: "object", list: "array", str: "string", bool: "boolean", int: "number", float: "number"}
    return names.get(type(value), "null")


def _parse_rows(block: Block, rows: pyarrow.RecordBatch, keys: Sequence[str]) -> Parsed:
    parsed = Parsed(columns=[[] for _ in keys])
    try:
        columns = [rows.column(key).to_pylist() for key in keys]
    except UnicodeDecodeError:
        columns = [[_text_of_cell(cell) for cell in rows.column(key)] for key in keys]
    for number, texts in enumerate(zip(*columns, strict=True)):
        wrong = [key for key, text in zip(keys, texts, strict=True) if not isinstance(text, str)]
        if wrong:
            reason = "is null" if texts[keys.index(wrong[0])] is None else "is not UTF-8"
            parsed.faults.append(Fault(block.place(number), f"the value of {wrong[0]!r} {reason}"))
        elif not any(texts):
            parsed.num_blank += 1
        else:
            parsed.numbers.append(number)
            for column, text in zip(parsed.columns, texts, strict=True):
                column.append(text)
    return parsed


def _text_of_cell(cell: Any) -> str | bytes | None:
    """bytes: it is not UTF-8."""
    try:
        text: str | None = cell.as_py()
        return text
    except UnicodeDecodeError:
        return b""


def read_texts(
    sources: Sequence[Source], keys: Sequence[str], on_bad_line: OnBadLine, separator: str | None = None
) -> Iterator[str]:
    """Every text of every document. Raises DataError at the first bad one, unless they are to be skipped."""
    for block in read_blocks(sources, keys, separator=separator):
        parsed = parse(block, keys)
        if parsed.faults and on_bad_line == "fail":
            raise bad_line_error(parsed.faults[0])
        # a text file has one text, however many keys
        columns = parsed.columns[:1] if block.source.kind == "text" else parsed.columns
        for texts in zip(*columns, strict=True):
            yield from texts


def bad_line_error(fault: Fault) -> DataError:
    return DataError(f"{fault} (or pass --on-bad-line skip to leave such documents out)")
