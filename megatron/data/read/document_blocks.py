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
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

from isal import isal_zlib

from megatron.data.read.contents import ContentReader, Damage
from megatron.data.read.json_array import begins_array, lines_of_array
from megatron.data.read.sources import InputRules, SourceFile

if TYPE_CHECKING:
    import pyarrow

BLOCK_BYTES = 1 << 20
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

    def after_content(self, content: bytes | memoryview, num_documents: int) -> Position:
        """Return the place after the next documents of a source, which `content` holds."""
        return Position(
            self.source,
            self.member,
            self.offset + len(content),
            self.documents_of_source + num_documents,
            self.documents + num_documents,
            isal_zlib.crc32(content, self.crc32),
            self.array,
        )

    def after_rows(self, count: int) -> Position:
        """Return the place after the next rows of a table."""
        return replace(
            self,
            offset=self.offset + count,
            documents_of_source=self.documents_of_source + count,
            documents=self.documents + count,
        )

    def after_source(self, source: SourceFile) -> Position:
        """Return the beginning of the next file, or of the next one in the same archive."""
        if source.archive:
            return Position(self.source, self.member + 1, documents=self.documents)
        return Position(self.source + 1, documents=self.documents)


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
        return replace(self, raw=b"", rows=None)

    def place(self, number: int) -> str:
        """Return the place of document `number` for a message. Lines, rows and documents count from 1."""
        return _place(self.source, self.begin.documents_of_source + number, bool(self.delimiter))


def first_documents(block: Block, count: int) -> Block:
    """Return the block without what follows its first `count` documents."""
    begin = block.begin
    if block.end.documents - begin.documents <= count:
        return block
    if block.rows is not None:
        return replace(block, rows=block.rows.slice(0, count), end=begin.after_rows(count))
    # cut as the parser will: a line more or less would be another dataset
    rest = block.raw.split(block.delimiter, count)[-1]
    raw = block.raw.removesuffix(rest)
    return replace(block, raw=raw.removesuffix(block.delimiter), end=begin.after_content(raw, count))


def _place(source: SourceFile, number: int, is_one_of_many: bool) -> str:
    # the lines before the part are not read, so their number is unknown
    if source.part is not None and source.part[0]:
        return f"{source.name}, line {number + 1} after byte {source.part[0]}"
    if source.kind == "jsonl":
        return f"{source.name}:{number + 1}"
    if source.kind in ("parquet", "arrow", "array"):
        return f"{source.name}, row {number + 1}"
    if is_one_of_many:
        return f"{source.name}, document {number + 1}"
    return source.name


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


@cache
def cuts_at_dots(key: str) -> list[tuple[str, str]]:
    """Return a key cut at each of its dots, where it may step into an object: `a.b.c` into (a, b.c) and (a.b, c)."""
    dots = [offset for offset, character in enumerate(key) if character == "."]
    return [(key[:dot], key[dot + 1 :]) for dot in dots]


def delimited_blocks(
    source: SourceFile, rules: ReadingRules, start: Position, opened: Callable[[], Any]
) -> Iterator[Block]:
    """Yield the blocks of a JSONL or text file, whose content `opened` returns."""
    delimiter = b"\n" if source.kind == "jsonl" else (rules.separator or "").encode()
    # an empty delimiter: the file is one document
    file = _DelimitedFile(source, delimiter, start, rules)
    return file.blocks(opened, rules.content_bytes, rules.goes_on)


class _DelimitedFile:
    """A file whose documents end with `delimiter`, read block by block; without one the file is one document."""

    def __init__(self, source: SourceFile, delimiter: bytes, start: Position, rules: ReadingRules):
        self._source, self._delimiter, self._at = source, delimiter, start
        self._largest_bytes, self._takes_arrays = rules.largest_document_bytes, rules.as_rows
        self._too_long = f"longer than {self._largest_bytes} bytes; {rules.remedy}"
        self._held = bytearray()  # read, but not yet in a block
        self._searched = 0  # held bytes before which no delimiter begins
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
        """Return the content; of a part, the lines that begin in it."""
        if self._source.part is None:
            return self._whole_chunks()
        return self._chunks_of_part(*self._source.part)

    def _whole_chunks(self) -> Iterator[bytes]:
        at = self._at
        if at.array == "ended":
            return
        chunks = self._reader.chunks(at.offset)
        first = next(chunks, b"")
        chunks = itertools.chain([first], chunks)
        is_array = at.array == "open"
        if self._takes_arrays and at.offset == 0:
            is_array = begins_array(first)
        if not is_array:
            yield from chunks
            return
        self._source = self._source._replace(kind="array")
        self._at = replace(at, array="open")
        # Alpaca's and ShareGPT's files are arrays, which become lines on the way
        yield from lines_of_array(chunks, at.documents_of_source)
        self._at = replace(self._at, array="ended")

    def _chunks_of_part(self, begin: int, end: int) -> Iterator[bytes]:
        """Yield the lines of which the first byte lies in the part: every line of the file is in one part."""
        if begin == 0 or self._at.offset > begin:
            chunks = self._reader.chunks(self._at.offset)
        else:
            # a line begins at `begin` if the byte before it ends one
            chunks = self._after_line_end(begin - 1)
        offset = self._at.offset
        for chunk in chunks:
            if offset >= end:
                return
            if offset + len(chunk) >= end:
                last = chunk.find(b"\n", max(0, end - 1 - offset)) + 1
                if last:
                    yield chunk[:last]
                    return
            yield chunk
            offset += len(chunk)

    def _after_line_end(self, offset: int) -> Iterator[bytes]:
        """Return the content after the first line end from `offset` on, and set the position there."""
        chunks = self._reader.chunks(offset)
        for chunk in chunks:
            end = chunk.find(b"\n") + 1
            if end:
                self._at = replace(self._at, offset=offset + end)
                return itertools.chain([chunk[end:]], chunks)
            offset += len(chunk)
        return iter(())

    def _read(self, goes_on: bool) -> Iterator[Block]:
        for chunk in filter(None, self._chunks()):
            self._held += chunk
            if self._at.offset == 0:
                self._drop_byte_order_mark()
            yield from self._ended_documents()
            # a delimiter of n bytes may have begun in the last n - 1
            self._searched = max(0, len(self._held) - max(1, len(self._delimiter)) + 1)
            if len(self._held) > self._largest_bytes:
                self._is_too_long = True
            if not self._is_too_long:
                continue
            # its end may be gigabytes away, and the run ends here anyway
            if not goes_on:
                yield self._refuse(len(self._held))
                return
            # what is too long is not kept: its end is looked for in bounded memory
            self._drop(self._searched)
            self._searched = 0
        if self._is_too_long:
            yield self._refuse(len(self._held))
        elif self._held:
            yield self._take(len(self._held), 1)
        self._check_unchanged()

    def _ended_documents(self) -> Iterator[Block]:
        """Yield the held documents whose end has been read: one that is too long by itself, all others in a block."""
        end, num_ends = _last_end(self._held, self._delimiter, self._searched)
        if num_ends and self._is_too_long:
            self._is_too_long = False
            first_end = self._held.find(self._delimiter) + len(self._delimiter)
            yield self._refuse(first_end)
            end, num_ends = end - first_end, num_ends - 1
        if num_ends:
            yield self._take(end, num_ends)

    def _check_unchanged(self) -> None:
        """Raise Damage if a plain file has not the size that was read."""
        source = self._source
        is_plain = source.transport == "file" and not source.compression and source.part is None
        # a writer may have half a line in it: a dataset of that is neither the old file nor the new one
        if is_plain and self._at.offset != source.num_bytes:
            raise Damage(
                f"the file had {source.num_bytes} bytes when it was found, and {self._at.offset} were read: it was "
                "changed meanwhile; start again when nothing writes to it"
            )

    def _take(self, num_bytes: int, num_documents: int) -> Block:
        """Return a block of the first held bytes."""
        begin = self._at
        with memoryview(self._held) as view:
            # a copy: the buffer goes on
            raw = bytes(view[:num_bytes]).removesuffix(self._delimiter)
        self._drop(num_bytes, num_documents)
        return Block(self._source, begin, self._at, self._reader.take_count(), raw, self._delimiter)

    def _refuse(self, num_bytes: int) -> Block:
        """Return a block without the first held bytes, the end of a document that is too long."""
        begin = self._at
        self._drop(num_bytes, 1)
        fault = Fault(_place(self._source, begin.documents_of_source, bool(self._delimiter)), self._too_long)
        count = self._reader.take_count()
        return Block(self._source, begin, self._at, count, delimiter=self._delimiter, fault=fault)

    def _drop(self, num_bytes: int, num_documents: int = 0) -> None:
        with memoryview(self._held) as view:
            self._at = self._at.after_content(view[:num_bytes], num_documents)
        del self._held[:num_bytes]

    def _drop_byte_order_mark(self) -> None:
        if self._source.kind == "jsonl" and self._held.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            raise Damage("the file is UTF-16; convert it to UTF-8")
        # a mark of some editors, not a part of the first document
        if self._held.startswith(codecs.BOM_UTF8):
            self._drop(len(codecs.BOM_UTF8))


def _last_end(content: bytearray, delimiter: bytes, start: int) -> tuple[int, int]:
    """Return the end of the last delimiter after `start`, found from the left as `split` does, and their number."""
    # memchr and count are many times as fast as a loop of find
    if len(delimiter) == 1:
        return content.rfind(delimiter, start) + 1, content.count(delimiter, start)
    end, num_ends = start, 0
    if not delimiter:
        return end, num_ends
    offset = content.find(delimiter, end)
    while offset >= 0:
        end = offset + len(delimiter)
        num_ends += 1
        offset = content.find(delimiter, end)
    return end, num_ends


def rest_is_lost(source: SourceFile, at: Position, num_input_bytes: int, reason: str) -> Block:
    """Return a block that names the damage; reading resumes with the next file."""
    fault = Fault(_place(source, at.documents_of_source, True), reason)
    return Block(source, at, at.after_source(source), num_input_bytes, fault=fault)
