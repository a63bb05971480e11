"""Reader of source files as blocks of raw documents.

A JSONL file holds a document a line, a Parquet file a document a row, a text file is one document or several with a
separator between them. JSONL and text may be compressed with gzip or zstd. Blocks come in order and are parsed later
(document_parser.py), so that threads can share the parsing. Memory does not grow with a file: the size of a document
and the expansion of a compressed file are limited.
"""

from __future__ import annotations

import codecs
import gzip
import itertools
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any

from megatron.data.indexed import DataError
from megatron.data.sources import SourceFile, unreadable

if TYPE_CHECKING:
    import pyarrow

BLOCK_BYTES = 1 << 20
COMPRESSED_BLOCK_BYTES = 1 << 12
"""Input of one zstd call, whose output may be 32,768 times as large."""
BOM = b"\xef\xbb\xbf"
LARGEST_DOCUMENT_BYTES = 64 << 20
LARGEST_EXPANSION = 300
"""Decompressed bytes a byte of the file. Ordinary text shrinks to a hundredth at best."""
EXPANSION_COUNTS_FROM_BYTES = 64 << 20


@dataclass(frozen=True)
class Position:
    """Place between two blocks, from which reading can resume."""

    source: int = 0
    """Index of the source."""
    offset: int = 0
    """Bytes into it after decompression; rows into a Parquet file."""
    documents_of_source: int = 0
    """Documents before this place in the source, unusable ones included."""
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
    """Consecutive documents of one source."""

    source: SourceFile
    begin: Position
    end: Position
    num_input_bytes: int
    """Bytes read from disk for it, compressed if the file is."""
    raw: bytes = b""
    """JSONL and text: the documents with `delimiter` between them."""
    delimiter: bytes = b"\n"
    """Empty: `raw` is one document."""
    rows: pyarrow.RecordBatch | None = None
    """Parquet."""
    fault: Fault | None = None
    """Damage that prevents reading. Such a block has no documents."""

    def place(self, number: int) -> str:
        """Return the place of document `number` for a message. Lines, rows and documents count from 1."""
        return _place(self.source, self.begin.documents_of_source + number, bool(self.delimiter))


def _place(source: SourceFile, number: int, is_one_of_many: bool) -> str:
    if source.kind == "jsonl":
        return f"{source.path}:{number + 1}"
    if source.kind == "parquet":
        return f"{source.path}, row {number + 1}"
    return f"{source.path}, document {number + 1}" if is_one_of_many else str(source.path)


def check_columns(sources: Sequence[SourceFile], keys: Sequence[str]) -> None:
    """Raise DataError for a Parquet file without a string column for each key, before hours are spent on others."""
    for source in sources:
        if source.kind == "parquet":
            _open_parquet(source, keys)


def read_blocks(
    sources: Sequence[SourceFile],
    keys: Sequence[str],
    *,
    separator: str | None = None,
    start: Position | None = None,
    largest_document_bytes: int = LARGEST_DOCUMENT_BYTES,
    remedy: str = "cut it into several documents, or raise --max-document-mb",
    block_bytes: int | None = None,
    goes_on: bool = True,
) -> Iterator[Block]:
    """Yield all documents from `start` in order, in blocks of about block_bytes, by default BLOCK_BYTES.

    `separator` divides the documents of a text file; None: each file is one document. A damaged or too long document
    gives a block with a fault, and reading continues with the next document or file. `remedy` ends the message for one
    that is too long. Without `goes_on` a block with a fault comes at once and is the last. Raises DataError if a file
    cannot be opened.
    """
    start, block_bytes = start or Position(), block_bytes or BLOCK_BYTES
    documents = start.documents
    for number, source in itertools.islice(enumerate(sources), start.source, None):
        at = start if number == start.source else Position(source=number, documents=documents)
        if source.kind == "parquet":
            blocks = _parquet_blocks(source, keys, at, block_bytes)
        else:
            delimiter = b"\n" if source.kind == "jsonl" else (separator or "").encode()
            delimited = _DelimitedFile(source, delimiter, at, largest_document_bytes, remedy)
            blocks = delimited.blocks(block_bytes, goes_on)
        for block in blocks:
            documents = block.end.documents
            yield block
            if block.fault is not None and not goes_on:
                return


class _Damage(Exception):
    """The rest of a file cannot be read, with the reason."""


class _Reader:
    """Decompressed content of a file, and the number of bytes read for it."""

    def __init__(self, source: SourceFile, file: IO[bytes], block_bytes: int):
        self._source, self._file, self._block_bytes = source, file, block_bytes
        self._counted_bytes = 0
        self._content_bytes = 0

    def chunks(self, skip_bytes: int) -> Iterator[bytes]:
        """Yield the content after its first skip_bytes in pieces of about block_bytes. Raises _Damage."""
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
                f"the gzip file {reason} after {self._content_bytes} bytes of content; copy it again"
            ) from error
        except OSError as error:
            raise _Damage(
                f"the file cannot be read on: {error.strerror or error}; repair it, or leave it out"
            ) from error

    def take_count(self) -> int:
        """Return the bytes of the file read since the previous call."""
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

        # its stream_reader would take a truncated file for a whole one
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
                "again, or compress it without --long"
            ) from error
        if frame is not None:
            raise _Damage(f"the zstd file is cut off after {self._content_bytes} bytes of content; copy it again")


class _DelimitedFile:
    """A file whose documents end with `delimiter`, read block by block; without one the file is one document."""

    def __init__(self, source: SourceFile, delimiter: bytes, start: Position, largest_bytes: int, remedy: str):
        self._source, self._delimiter, self._at, self._largest_bytes = source, delimiter, start, largest_bytes
        self._too_long = f"longer than {largest_bytes} bytes; {remedy}"
        self._held = bytearray()  # read, but not yet in a block
        self._is_too_long = False  # the document being read, which is discarded up to its end

    def blocks(self, block_bytes: int, goes_on: bool) -> Iterator[Block]:
        """Yield the blocks. Without `goes_on` a document that is too long is the last, before its end is found."""
        try:
            file = self._source.path.open("rb", buffering=0)
        except OSError as error:
            raise unreadable(self._source, error) from error
        with file:
            self._reader = _Reader(self._source, file, block_bytes)
            try:
                yield from self._read(goes_on)
            except _Damage as damage:
                yield _rest_is_lost(self._source, self._at, self._reader.take_count(), str(damage))

    def _read(self, goes_on: bool) -> Iterator[Block]:
        held, delimiter = self._held, self._delimiter
        searched = 0
        for chunk in self._reader.chunks(self._at.offset):
            if not chunk:
                continue
            held += chunk
            if self._at.offset == 0:
                self._drop_byte_order_mark()
            end, num_ends = _last_end(held, delimiter, searched)
            if num_ends and self._is_too_long:
                self._is_too_long = False
                first_end = held.find(delimiter) + len(delimiter)
                yield self._take(first_end, 1, self._too_long)
                end, num_ends = end - first_end, num_ends - 1
            if num_ends:
                yield self._take(end, num_ends)
                end = 0
            # the delimiter may span two chunks
            searched = max(end, len(held) - len(delimiter) + 1)
            if self._is_too_long or len(held) > self._largest_bytes:
                self._is_too_long = True
                if not goes_on:
                    break
                self._drop(searched if delimiter else len(held))
                searched = 0
        if held or self._is_too_long:
            yield self._take(len(held), 1, self._too_long if self._is_too_long else None)

    def _take(self, num_bytes: int, num_documents: int, fault: str | None = None) -> Block:
        """Return a block of the first held bytes, or an empty one with the fault that makes them unusable."""
        begin, self._at = self._at, _advanced(self._at, num_bytes, num_documents)
        raw = b""
        if fault is None:
            with memoryview(self._held) as view:
                raw = bytes(view[:num_bytes]).removesuffix(self._delimiter)
        del self._held[:num_bytes]
        place = _place(self._source, begin.documents_of_source, bool(self._delimiter))
        damage = None if fault is None else Fault(place, fault)
        return Block(self._source, begin, self._at, self._reader.take_count(), raw, self._delimiter, fault=damage)

    def _drop(self, num_bytes: int) -> None:
        self._at = _advanced(self._at, num_bytes, 0)
        del self._held[:num_bytes]

    def _drop_byte_order_mark(self) -> None:
        if self._source.kind == "jsonl" and self._held.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            raise _Damage("the file is UTF-16; convert it to UTF-8")
        self._drop(len(BOM) if self._held.startswith(BOM) else 0)


def _last_end(content: bytearray, delimiter: bytes, start: int) -> tuple[int, int]:
    """Return the end of the last delimiter after `start`, found from the left as `split` does, and their number."""
    if len(delimiter) == 1:
        return content.rfind(delimiter, start) + 1, content.count(delimiter, start)
    end, num_ends = start, 0
    while delimiter and (found := content.find(delimiter, end)) >= 0:
        end, num_ends = found + len(delimiter), num_ends + 1
    return end, num_ends


def _rest_is_lost(source: SourceFile, at: Position, num_input_bytes: int, reason: str) -> Block:
    """Return a block that names the damage; reading resumes with the next source."""
    end = Position(source=at.source + 1, documents=at.documents)
    return Block(source, at, end, num_input_bytes, fault=Fault(_place(source, at.documents_of_source, True), reason))


def _advanced(position: Position, offset: int, documents: int) -> Position:
    return Position(
        position.source,
        position.offset + offset,
        position.documents_of_source + documents,
        position.documents + documents,
    )


def _open_parquet(source: SourceFile, keys: Sequence[str]) -> Any:
    import pyarrow
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(source.path)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(
            f"{source.path} is not a readable Parquet file ({error}); copy it again, or leave it out"
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


def _parquet_blocks(source: SourceFile, keys: Sequence[str], start: Position, block_bytes: int) -> Iterator[Block]:
    import pyarrow

    file = _open_parquet(source, keys)
    file_bytes, num_rows = source.path.stat().st_size, max(1, file.metadata.num_rows)
    at = start
    try:
        first_row = 0
        for group in range(file.metadata.num_row_groups):
            rows_of_group = file.metadata.row_group(group).num_rows
            if first_row + rows_of_group > at.offset:
                # rows of one block, if all rows of the group are of one size
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
