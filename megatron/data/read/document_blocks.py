"""Blocks of raw documents, and the reader of JSONL and text files.

A JSONL file holds a document a line; a text file is one document, or several with a separator between them. Blocks
come in order and are parsed later (document_parser.py), so that threads can share the parsing. Memory does not grow
with a file: the size of a document and the expansion of a compressed file are limited.
"""

from __future__ import annotations

import codecs
import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from isal import isal_zlib

from megatron.data.read.contents import ContentReader, Damage
from megatron.data.read.json_array import begins_array, lines_of_array
from megatron.data.read.sources import InputRules, SourceFile

if TYPE_CHECKING:
    import pyarrow

BLOCK_BYTES = 1 << 20
BOM = b"\xef\xbb\xbf"
LARGEST_DOCUMENT_BYTES = 64 << 20


@dataclass(frozen=True)
class Position:
    """Place between two blocks, from which reading can resume."""

    source: int = 0
    """Index of the source."""
    member: int = 0
    """Entries before this one in a tar file, those that are passed over included."""
    offset: int = 0
    """Bytes into it after decompression; rows into a Parquet file."""
    documents_of_source: int = 0
    """Documents before this place in the source or its part, unusable ones included."""
    documents: int = 0
    """The same in all sources together."""
    crc32: int = 0
    """CRC-32 of the content of the source, or of its part, up to here. Tables: 0."""
    array: Literal["", "open", "ended"] = ""
    """The source is a JSON array, in which this place is, or which has ended."""


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
    passed_over: str = ""
    """Reason why the source, in an archive, is not read. Such a block has no documents."""

    def without_content(self) -> Block:
        """Return the block without its documents, whose memory it would keep."""
        return Block(
            self.source,
            self.begin,
            self.end,
            self.num_input_bytes,
            fault=self.fault,
            passed_over=self.passed_over,
        )

    def place(self, number: int) -> str:
        """Return the place of document `number` for a message. Lines, rows and documents count from 1."""
        return _place(self.source, self.begin.documents_of_source + number, bool(self.delimiter))


def first_documents(block: Block, count: int) -> Block:
    """Return the block without what follows its first `count` documents."""
    begin = block.begin
    if block.end.documents - begin.documents <= count:
        return block
    if block.rows is not None:
        return replace(block, rows=block.rows.slice(0, count), end=after_rows(begin, count))
    rest = block.raw.split(block.delimiter, count)[-1]
    raw = block.raw.removesuffix(rest)
    return replace(block, raw=raw.removesuffix(block.delimiter), end=advanced(begin, raw, count))


def _place(source: SourceFile, number: int, is_one_of_many: bool) -> str:
    if source.part is not None and source.part[0]:
        return f"{source.name}, line {number + 1} after byte {source.part[0]}"
    if source.kind == "jsonl":
        return f"{source.name}:{number + 1}"
    if source.kind in ("parquet", "arrow", "array"):
        return f"{source.name}, row {number + 1}"
    return f"{source.name}, document {number + 1}" if is_one_of_many else source.name


@dataclass(frozen=True)
class ReadingRules:
    """Options of a reader."""

    keys: tuple[str, ...] = ()
    """Columns of tables: of texts those that are read, of rows those of which at least one must be there."""
    separator: str | None = None
    """Text between the documents of a text file. None: each file is one document."""
    largest_document_bytes: int = LARGEST_DOCUMENT_BYTES
    remedy: str = "cut it into several documents, or raise --max-document-mb"
    """End of the message for a document that is too long."""
    block_bytes: int | None = None
    """Content of a block. None: BLOCK_BYTES."""
    max_documents: int | None = None
    """Documents of all sources together, blank and unusable ones included, after which reading stops."""
    goes_on: bool = True
    """False: a block with a fault comes at once and is the last."""
    names: InputRules = field(default_factory=InputRules)
    """Rules for the files of an archive."""
    as_rows: bool = False
    """Documents are objects: read JSON arrays too, and all columns of a table, of any type. False: read the columns of
    strings under `keys`."""

    @property
    def content_bytes(self) -> int:
        """Content of a block."""
        return self.block_bytes or BLOCK_BYTES


def delimited_blocks(
    source: SourceFile, rules: ReadingRules, start: Position, opened: Callable[[], Any]
) -> Iterator[Block]:
    """Yield the blocks of a JSONL or text file, whose content `opened` returns."""
    delimiter = b"\n" if source.kind == "jsonl" else (rules.separator or "").encode()
    file = _DelimitedFile(source, delimiter, start, rules)
    return file.blocks(opened, rules.content_bytes, rules.goes_on)


class _DelimitedFile:
    """A file whose documents end with `delimiter`, read block by block; without one the file is one document."""

    def __init__(self, source: SourceFile, delimiter: bytes, start: Position, rules: ReadingRules):
        self._source, self._delimiter, self._at = source, delimiter, start
        self._largest_bytes, self._takes_arrays = rules.largest_document_bytes, rules.as_rows
        self._too_long = f"longer than {self._largest_bytes} bytes; {rules.remedy}"
        self._held = bytearray()  # read, but not yet in a block
        self._is_too_long = False  # the document being read, which is discarded up to its end

    def blocks(self, opened: Callable[[], Any], block_bytes: int, goes_on: bool) -> Iterator[Block]:
        """Yield the blocks. Without `goes_on` a document that is too long is the last, before its end is found."""
        with contextlib.closing(opened()) as file:
            self._reader = ContentReader(self._source, file, block_bytes)
            try:
                yield from self._read(goes_on)
            except Damage as damage:
                yield rest_is_lost(self._source, self._at, self._reader.take_count(), str(damage))

    def _chunks(self) -> Iterator[bytes]:
        """Yield the content; of a part, the lines that begin in it."""
        if self._source.part is None:
            yield from self._whole_chunks()
            return
        begin, end = self._source.part
        place = self._at.offset
        is_aligned = place > begin or not begin
        if not is_aligned:
            place = begin - 1  # a line begins at `begin` if this is the end of the one before
        for chunk in self._reader.chunks(place):
            if not is_aligned:
                found = chunk.find(b"\n") + 1
                place += found or len(chunk)
                if not found:
                    continue
                chunk, is_aligned = chunk[found:], True
                self._at = replace(self._at, offset=place)
            if place >= end:
                return
            last = chunk.find(b"\n", max(0, end - 1 - place)) + 1 if place + len(chunk) >= end else 0
            yield chunk[:last] if last else chunk
            if last:
                return
            place += len(chunk)

    def _whole_chunks(self) -> Iterator[bytes]:
        at = self._at
        if at.array == "ended":
            return
        chunks = self._reader.chunks(at.offset)
        first = next(chunks, b"")
        chunks = itertools.chain([first], chunks)
        if at.array == "open" or (self._takes_arrays and not at.offset and begins_array(first)):
            self._source = self._source._replace(kind="array")
            self._at = replace(at, array="open")
            yield from lines_of_array(chunks, at.documents_of_source)
            self._at = replace(self._at, array="ended")
        else:
            yield from chunks

    def _read(self, goes_on: bool) -> Iterator[Block]:
        held, delimiter = self._held, self._delimiter
        searched, is_whole = 0, True
        for chunk in self._chunks():
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
                    is_whole = False
                    break
                self._drop(searched if delimiter else len(held))
                searched = 0
        if self._is_too_long:
            yield self._take(len(held), 1, self._too_long)
        elif held:
            yield self._take(len(held), 1)
        if is_whole:
            self._check_unchanged()

    def _check_unchanged(self) -> None:
        """Raise Damage if a plain file has not the size that was read."""
        source = self._source
        is_plain = source.transport == "file" and not source.compression and source.part is None
        if is_plain and self._at.offset != source.num_bytes:
            raise Damage(
                f"the file had {source.num_bytes} bytes when it was found, and {self._at.offset} were read: it was "
                "changed meanwhile; start again when nothing writes to it"
            )

    def _take(self, num_bytes: int, num_documents: int, fault: str | None = None) -> Block:
        """Return a block of the first held bytes, or an empty one with the fault that makes them unusable."""
        begin, raw = self._at, b""
        with memoryview(self._held) as view:
            self._at = advanced(begin, view[:num_bytes], num_documents)
            if fault is None:
                raw = bytes(view[:num_bytes]).removesuffix(self._delimiter)
        del self._held[:num_bytes]
        place = _place(self._source, begin.documents_of_source, bool(self._delimiter))
        damage = None if fault is None else Fault(place, fault)
        return Block(self._source, begin, self._at, self._reader.take_count(), raw, self._delimiter, fault=damage)

    def _drop(self, num_bytes: int) -> None:
        with memoryview(self._held) as view:
            self._at = advanced(self._at, view[:num_bytes], 0)
        del self._held[:num_bytes]

    def _drop_byte_order_mark(self) -> None:
        if self._source.kind == "jsonl" and self._held.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            raise Damage("the file is UTF-16; convert it to UTF-8")
        if self._held.startswith(BOM):
            self._drop(len(BOM))


def _last_end(content: bytearray, delimiter: bytes, start: int) -> tuple[int, int]:
    """Return the end of the last delimiter after `start`, found from the left as `split` does, and their number."""
    if len(delimiter) == 1:
        return content.rfind(delimiter, start) + 1, content.count(delimiter, start)
    end, num_ends = start, 0
    while delimiter and (found := content.find(delimiter, end)) >= 0:
        end, num_ends = found + len(delimiter), num_ends + 1
    return end, num_ends


def rest_is_lost(source: SourceFile, at: Position, num_input_bytes: int, reason: str) -> Block:
    """Return a block that names the damage; reading resumes with the next file."""
    fault = Fault(_place(source, at.documents_of_source, True), reason)
    return Block(source, at, after_source(source, at), num_input_bytes, fault=fault)


def after_source(source: SourceFile, at: Position) -> Position:
    """Return the beginning of the next file, or of the next one in the same archive."""
    if source.archive:
        return Position(at.source, at.member + 1, documents=at.documents)
    return Position(at.source + 1, documents=at.documents)


def after_rows(position: Position, count: int) -> Position:
    """Return the place `count` rows of a table later."""
    return replace(
        position,
        offset=position.offset + count,
        documents_of_source=position.documents_of_source + count,
        documents=position.documents + count,
    )


def advanced(position: Position, content: bytes | memoryview, documents: int) -> Position:
    return Position(
        position.source,
        position.member,
        position.offset + len(content),
        position.documents_of_source + documents,
        position.documents + documents,
        isal_zlib.crc32(content, position.crc32),
        position.array,
    )
