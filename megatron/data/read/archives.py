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
    after_source,
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
        stream = _Stream(content)
        try:
            for number, (tar, entry) in enumerate(_entries(stream)):
                if number < start.member or entry.isdir():
                    continue
                begin = at if number == at.member else Position(at.source, number, documents=at.documents)
                source = _member(archive, entry, rules.names)
                num_blocks = 0
                for block in _member_blocks(source, tar, entry, rules, begin):
                    num_blocks += 1
                    at = block.end
                    yield replace(block, num_input_bytes=content.take_count())
                if not num_blocks:
                    yield Block(source, begin, begin, content.take_count())
                    at = begin
        except (Damage, _ArchiveDamage, tarfile.TarError) as damage:
            reason = str(damage)
            if isinstance(damage, tarfile.TarError):
                reason = f"the tar file is damaged ({damage}); copy it again"
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
    skipped, refusal = _reasons(entry, rules.names)
    if skipped is not None:
        return iter([Block(source, begin, after_source(source, begin), 0, passed_over=skipped)])
    if refusal is not None:
        return iter([Block(source, begin, after_source(source, begin), 0, fault=Fault(source.name, refusal))])
    return delimited_blocks(source, rules, begin, lambda: _MemberFile(cast(IO[bytes], tar.extractfile(entry))))


def _reasons(entry: tarfile.TarInfo, names: InputRules) -> tuple[str | None, str | None]:
    """Return why a member is passed over, or why it is refused."""
    name = _base_name(entry)
    if entry.issym() or entry.islnk():
        return "a link in an archive", None
    if not entry.isreg():
        return "a device or pipe in an archive", None
    form = names.form(name)
    if skipped := names.reason_to_pass_over(name, entry.name, form):
        return skipped, None
    refusal = names.refusal(name, form, entry.size)
    if refusal is None and form is not None and form[0] in (*UNCOMPRESSED_ONLY, "tar"):
        refusal = f"is a .{form[0]} file in an archive, which cannot be read as a stream; extract it"
    return None, refusal


def _entries(stream: _Stream) -> Iterator[tuple[tarfile.TarFile, tarfile.TarInfo]]:
    """Yield the members of an archive, each before the next is looked for. Raises Damage, TarError."""
    with tarfile.open(mode="r|", fileobj=stream, bufsize=PIECE_BYTES, tarinfo=_Header) as tar:  # type: ignore[call-overload]
        while (entry := tar.next()) is not None:
            yield tar, entry
            tar.members.clear()  # type: ignore[attr-defined]  # all that it has seen, in memory
        # what is left are zeros up to a multiple of the writer's block
        while rest := tar.fileobj.read(PIECE_BYTES):  # type: ignore[union-attr]
            if rest.strip(b"\0"):
                raise Damage("something follows the end of the archive, which may be several joined in one; split it")


class _Header(tarfile.TarInfo):
    """A header of a member, whose damage is an error and not the end."""

    @classmethod
    def fromtarfile(cls, tarfile_: Any) -> _Header:
        try:
            return super().fromtarfile(tarfile_)
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]
            raise
        except tarfile.HeaderError as error:
            raise tarfile.ReadError(f"cut off, or a damaged header: {error}") from error


class _Stream:
    """The content of an archive, as tarfile reads it."""

    def __init__(self, content: ContentReader):
        self._pieces = content.chunks(0)

    def read(self, _: int) -> bytes:
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
        batch.append(block)
        num_bytes += block.rows.nbytes if block.rows is not None else len(block.raw)
        if num_bytes >= enough or block.fault is not None or len(batch) >= MOST_BLOCKS_OF_A_BATCH:
            yield batch
            batch, num_bytes = [], 0
    if batch:
        yield batch
