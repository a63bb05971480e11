"""Content of a source file: opened where it lies, and decompressed, with damage named.

Here each file is a sequence of whole streams, or it is damaged. The readers behind fsspec's `compression` lose data in
silence: those of xz and bzip2 what follows the first stream if it is damaged, that of zstd all of a file that is cut
off; and none bounds the expansion.
"""

from __future__ import annotations

import bz2
import contextlib
import lzma
import os
from collections.abc import Callable, Iterator
from typing import IO, Any, NamedTuple

import zstandard
from isal import isal_zlib

from megatron.data.index.indexed import DataError
from megatron.data.read.remote import lost_connection, open_remote
from megatron.data.read.sources import STDIN, UNCOMPRESSED_ONLY, SourceFile

LARGEST_EXPANSION = 300
"""Decompressed bytes a byte of the file. Ordinary text shrinks to a hundredth at best."""
EXPANSION_COUNTS_FROM_BYTES = 64 << 20
KEPT_BYTES = 1 << 20
"""Beginning of a pipe that can be read twice: the samples that are shown, or compared, before the work starts."""
XZ_MEMORY_LIMIT = 1 << 30


class Damage(Exception):
    """The rest of a file cannot be read, with the reason."""


class _Format(NamedTuple):
    name: str
    start: Callable[[], Any]
    """Returns a decompressor of one stream, with `decompress`, `eof` and `unused_data`."""
    piece_bytes: int
    """Input of one call. Its output may be 1,000 (gzip), 32,768 (zstd), 7,000 (xz) or 45,000 (bzip2) times as large."""
    errors: Any
    """Exception, or a tuple of them, that damage raises."""
    may_be_padded: bool
    """Zeros may follow a stream."""


FORMATS = {
    ".gz": _Format("gzip", lambda: isal_zlib.decompressobj(31), 1 << 16, isal_zlib.error, True),
    ".zst": _Format(
        "zstd", lambda: zstandard.ZstdDecompressor().decompressobj(), 1 << 12, (zstandard.ZstdError,), False
    ),
    ".xz": _Format("xz", lambda: lzma.LZMADecompressor(memlimit=XZ_MEMORY_LIMIT), 1 << 13, lzma.LZMAError, True),
    ".bz2": _Format("bzip2", bz2.BZ2Decompressor, 1 << 12, (OSError, ValueError), False),
}


class _Pipe:
    """A pipe of which the beginning can be read twice."""

    def __init__(self, file: IO[bytes]):
        self._file = file
        self._kept: bytearray | None = bytearray()
        self._position = 0

    def rewind(self) -> bool:
        """Start again from the beginning. Returns false if that is no longer possible."""
        self._position = 0
        return self._kept is not None

    def read(self, size: int) -> bytes:
        # what is kept is bounded, so a pipe that has been read on cannot begin again
        if self._kept is None:
            return self._file.read(size)
        if self._position < len(self._kept):
            piece = bytes(self._kept[self._position : self._position + size])
        else:
            piece = self._file.read(min(size, KEPT_BYTES))
            self._kept += piece
        self._position += len(piece)
        # too far for a sample: from here on the pipe is read once
        if self._position > KEPT_BYTES:
            self._kept = None
        return piece

    def close(self) -> None:
        """Stay open: what was not read belongs to the next reader."""


_pipes: dict[tuple[int, int], _Pipe] = {}
"""Pipes that were opened, by device and inode: what was read from one can only be found here."""


def open_source(source: SourceFile) -> Any:
    """Open a file or URL, or read a pipe from its beginning. Raises DataError if it cannot be."""
    if source.transport == "url":
        return open_remote(source.name, in_order=source.kind not in UNCOMPRESSED_ONLY)
    if source.transport == "pipe":
        return _open_pipe(source)
    try:
        return open(source.name, "rb", buffering=0)
    except OSError as error:
        raise unreadable(source, error) from error


def _open_pipe(source: SourceFile) -> _Pipe:
    is_stdin = source.relative_name == STDIN
    # by inode: /dev/stdin and - are one pipe
    status = os.fstat(0) if is_stdin else os.stat(source.name)
    identity = (status.st_dev, status.st_ino)
    pipe = _pipes.get(identity)
    if pipe is None:
        # a duplicate: closing it leaves standard input open
        file = open(os.dup(0) if is_stdin else source.name, "rb", buffering=0)  # noqa: SIM115  # the pipe keeps it
        pipe = _pipes[identity] = _Pipe(file)
    elif not pipe.rewind():
        raise DataError(
            f"{source.name} cannot be read a second time; write it to a file first, or leave out what reads it twice "
            "(--show; with --reference-tokenizer nothing is compared)"
        )
    return pipe


class ContentReader:
    """Decompressed content of a file, and the number of bytes read for it."""

    def __init__(self, source: SourceFile, file: Any, block_bytes: int):
        self._source, self._file, self._block_bytes = source, file, block_bytes
        self._raw_bytes = 0
        self._counted_bytes = 0
        self._content_bytes = 0

    def chunks(self, skip_bytes: int) -> Iterator[bytes]:
        """Yield the content after its first skip_bytes in pieces of about block_bytes. Raises Damage."""
        if skip_bytes and not self._source.compression and self._source.transport != "pipe":
            with contextlib.suppress(ValueError, OSError):  # a stream: what is skipped is read
                self._file.seek(skip_bytes)
                skip_bytes = 0
        for piece in self._pieces():
            self._content_bytes += len(piece)
            if not skip_bytes:
                yield piece
                continue
            yield piece[skip_bytes:]
            skip_bytes = max(0, skip_bytes - len(piece))

    def take_count(self) -> int:
        """Return the bytes of the file read since the previous call."""
        count, self._counted_bytes = self._raw_bytes - self._counted_bytes, self._raw_bytes
        return count

    def _read(self, size: int) -> bytes:
        try:
            piece: bytes = self._file.read(size)
        except Exception as error:
            # over a network the file itself may be whole
            if self._source.transport == "url":
                raise lost_connection(self._source.name, error) from error
            if not isinstance(error, OSError):
                raise
            raise Damage(
                f"the file cannot be read on: {error.strerror or error}; repair it, or leave it out"
            ) from error
        self._raw_bytes += len(piece)
        return piece

    def _pieces(self) -> Iterator[bytes]:
        if not self._source.compression:
            yield from iter(lambda: self._read(self._block_bytes), b"")
            return
        for piece in self._decompressed():
            self._check_expansion(self._content_bytes + len(piece))
            yield piece

    def _check_expansion(self, content_bytes: int) -> None:
        # small files may expand as they like: the bound is there for the memory and the disk
        limit = max(EXPANSION_COUNTS_FROM_BYTES, LARGEST_EXPANSION * self._raw_bytes)
        if content_bytes > limit:
            raise Damage(
                f"{self._raw_bytes} bytes of the file expand to more than {limit}: it may be a decompression bomb; if "
                "it is what you want, decompress it yourself"
            )

    def _decompressed(self) -> Iterator[bytes]:
        """Yield the content of all streams of the file, which follow each other in it."""
        form = FORMATS[self._source.compression]
        stream = None
        held = bytearray()
        for raw in iter(lambda: self._read(form.piece_bytes), b""):
            while raw:
                if stream is None:
                    # zeros after a stream are padding; those at the beginning are no stream
                    if form.may_be_padded and self._raw_bytes > len(raw):
                        raw = raw.lstrip(b"\0")
                    if not raw:
                        break
                    stream = form.start()
                try:
                    held += stream.decompress(raw)
                except form.errors as error:
                    # what came before the damage is good
                    yield bytes(held)
                    raise self._damage(f"cannot be decompressed ({error})") from error
                raw = b""
                if stream.eof:
                    raw = stream.unused_data
                    stream = None
            if len(held) >= self._block_bytes:
                yield bytes(held)
                held.clear()
        yield bytes(held)
        # a cut-off stream raises nothing: its decompressor only waits for more
        if stream is not None:
            raise self._damage("is cut off")
        # for text an empty file is whole; a compressed one has a header at least
        if not self._raw_bytes:
            raise self._damage("is empty, a failed download,")

    def _damage(self, what: str) -> Damage:
        name = FORMATS[self._source.compression].name
        hint = ""
        if name == "zstd" and "cut" not in what:  # the window of --long may exceed what a reader allows
            hint = ", or compress it without --long"
        return Damage(f"the {name} file {what} after {self._content_bytes} bytes of content; copy it again{hint}")


def unreadable(source: SourceFile, error: OSError) -> DataError:
    return DataError(f"{source.name} cannot be read: {error.strerror or error}; repair the file, or leave it out")
