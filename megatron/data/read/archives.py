"""Reader of the documents in tar files, which are streamed: nothing is extracted, and no name in them is a path here.

Here an archive ends with its end mark, or is damaged. Python's tarfile ends in silence at a damaged or missing header,
and so does fsspec's tar://, which also lists an archive before it reads it, and so cannot read a pipe.
"""

from __future__ import annotations

import contextlib
import itertools
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import IO, Any, cast

from megatron.data.read.contents import ContentReader, Damage, open_source
from megatron.data.read.document_blocks import (
    Block,
    Fault,
    Position,
    ReadingRules,
    delimited_blocks,
    first_documents,
)
from megatron.data.read.sources import UNCOMPRESSED_ONLY, InputRules, SourceFile

PIECE_BYTES = 1 << 16
"""Read at a time: tarfile copies what is left of a piece at every header."""


def archive_blocks(archive: SourceFile, rules: ReadingRules, start: Position) -> Iterator[Block]:
    """Yield the blocks of all members from `start`, in their order.

    A member that is passed over, refused or empty gives one block without documents.
    """
    at = start
    with contextlib.closing(open_source(archive)) as file:
        content = ContentReader(archive, file, PIECE_BYTES)
        try:
            for number, (tar, entry) in enumerate(_entries(_Stream(content))):
                # a folder in an archive holds nothing: its files are entries of their own
                if number < start.member or entry.isdir():
                    continue
                begin = at
                if number != at.member:
                    begin = Position(at.source, number, documents=at.documents)
                source = _member(archive, entry, rules.names)
                block = None
                for block in _member_blocks(source, tar, entry, rules, begin):
                    at = block.end
                    yield replace(block, num_input_bytes=content.take_count())
                # without it the manifest would not name an empty member
                if block is None:
                    yield Block(source, begin, begin, content.take_count())
                    at = begin
            return
        except (Damage, _ArchiveDamage) as damage:
            reason = str(damage)
        except tarfile.TarError as error:
            reason = f"the tar file is damaged ({error}); copy it again"
        after = Position(at.source + 1, documents=at.documents)
        yield Block(archive, at, after, content.take_count(), fault=Fault(archive.name, reason))


class _ArchiveDamage(Exception):
    """Damage of the archive that shows while a member is read: the members behind it are lost too."""


class _MemberFile:
    """The content of a member."""

    def __init__(self, file: IO[bytes]):
        self._file = file
        self.close = file.close

    def read(self, size: int) -> bytes:
        try:
            return self._file.read(size)
        except Damage as damage:
            raise _ArchiveDamage(str(damage)) from damage


def _member(archive: SourceFile, entry: tarfile.TarInfo, names: InputRules) -> SourceFile:
    # a member without a form is passed over or refused, and its kind does not matter
    kind, compression = names.form(_base_name(entry)) or ("text", "")
    return SourceFile(
        f"{archive.public_name}!{entry.name}",
        kind,
        compression,
        entry.size,
        "pipe",
        f"{archive.relative_name}!{entry.name}",
        archive=archive.name,
    )


def _base_name(entry: tarfile.TarInfo) -> str:
    return entry.name.rstrip("/").rpartition("/")[2]


def _member_blocks(
    source: SourceFile, tar: tarfile.TarFile, entry: tarfile.TarInfo, rules: ReadingRules, begin: Position
) -> Iterator[Block]:
    passed_over = _reason_to_pass_over(entry, rules.names)
    if passed_over is not None:
        return iter([Block(source, begin, begin.after_source(source), 0, passed_over=passed_over)])
    refusal = _refusal(entry, rules.names)
    if refusal is not None:
        return iter([Block(source, begin, begin.after_source(source), 0, fault=Fault(source.name, refusal))])
    return delimited_blocks(source, rules, begin, lambda: _MemberFile(cast(IO[bytes], tar.extractfile(entry))))


def _reason_to_pass_over(entry: tarfile.TarInfo, names: InputRules) -> str | None:
    # a link may lead out of the archive
    if entry.issym() or entry.islnk():
        return "a link in an archive"
    if not entry.isreg():
        return "a device or pipe in an archive"
    name = _base_name(entry)
    return names.reason_to_pass_over(name, entry.name, names.form(name))


def _refusal(entry: tarfile.TarInfo, names: InputRules) -> str | None:
    name = _base_name(entry)
    form = names.form(name)
    refusal = names.refusal(name, form, entry.size)
    # read at any place of the file, or an archive within an archive: neither streams
    if refusal is None and form is not None and form[0] in (*UNCOMPRESSED_ONLY, "tar"):
        return f"is a .{form[0]} file in an archive, which cannot be read as a stream; extract it"
    return refusal


def _entries(stream: _Stream) -> Iterator[tuple[tarfile.TarFile, tarfile.TarInfo]]:
    """Yield the members of an archive, each before the next is looked for. Raises Damage, TarError."""
    with tarfile.open(mode="r|", fileobj=stream, bufsize=PIECE_BYTES, tarinfo=_Header) as tar:  # type: ignore[call-overload]
        for entry in iter(tar.next, None):
            yield tar, entry
            tar.members.clear()  # type: ignore[attr-defined]  # all that it has seen, in memory
        # what is left are zeros up to a multiple of the writer's block
        for rest in iter(lambda: tar.fileobj.read(PIECE_BYTES), b""):  # type: ignore[union-attr]
            if rest.strip(b"\0"):
                raise Damage("something follows the end of the archive, which may be several joined in one; split it")


class _Header(tarfile.TarInfo):
    """A header of a member, whose damage is an error and not the end."""

    @classmethod
    def fromtarfile(cls, tarfile_: Any) -> _Header:
        try:
            return super().fromtarfile(tarfile_)
        # the two blocks of zeros that end an archive
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]
            raise
        except tarfile.HeaderError as error:
            raise tarfile.ReadError(f"cut off, or a damaged header: {error}") from error


class _Stream:
    """The content of an archive, as tarfile reads it."""

    def __init__(self, content: ContentReader):
        self._pieces = content.chunks(0)

    def read(self, _: int) -> bytes:
        # tarfile takes an empty piece for the end
        return next((piece for piece in self._pieces if piece), b"")


# ---------------------------------------------------------------------------------------------------------------------
# Reader of source files of all kinds: blocks of raw documents, in order, from any place on.

MOST_BLOCKS_OF_A_BATCH = 1 << 10


def read_blocks(
    sources: Sequence[SourceFile], rules: ReadingRules, *, start: Position | None = None
) -> Iterator[Block]:
    """Yield all documents from `start` in order, in blocks of one file and about `block_bytes`.

    A damaged or too long document gives a block with a fault, and reading continues with the next document or file.
    After `max_documents` nothing more is read. Raises DataError if a file cannot be opened.
    """
    start = start or Position()
    documents, most = start.documents, rules.max_documents
    # resumed exactly at the limit
    if documents == most:
        return
    for number, source in itertools.islice(enumerate(sources), start.source, None):
        at = start if number == start.source else Position(source=number, documents=documents)
        for block in blocks_of(source, rules, at):
            documents = block.end.documents
            if most is not None and documents >= most:
                yield first_documents(block, most - block.begin.documents)
                return
            yield block
            if block.fault is not None and not rules.goes_on:
                return


def blocks_of(source: SourceFile, rules: ReadingRules, start: Position) -> Iterator[Block]:
    """Yield the blocks of one file."""
    # by row groups and batches, at any place of the file
    if source.kind in UNCOMPRESSED_ONLY:
        from megatron.data.read.tables import table_blocks  # pyarrow, which takes its time

        return table_blocks(source, rules, start)
    if source.kind == "tar":
        return archive_blocks(source, rules, start)
    return delimited_blocks(source, rules, start, lambda: open_source(source))


def read_batches(
    sources: Sequence[SourceFile], rules: ReadingRules, *, start: Position | None = None
) -> Iterator[list[Block]]:
    """Yield the same blocks, those of small files joined.

    One task for each of a million files would take longer than their documents.
    """
    enough = rules.content_bytes // 2
    batch: list[Block] = []
    num_bytes = 0
    for block in read_blocks(sources, rules, start=start):
        # a fault ends a batch, so that what is before it is kept and what follows is not read in vain
        batch.append(block)
        num_bytes += block.rows.nbytes if block.rows is not None else len(block.raw)
        if num_bytes >= enough or block.fault is not None or len(batch) >= MOST_BLOCKS_OF_A_BATCH:
            yield batch
            batch, num_bytes = [], 0
    if batch:
        yield batch
