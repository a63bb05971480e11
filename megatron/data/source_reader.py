"""Reader of source files of all kinds: blocks of raw documents, in order, from any place on."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from megatron.data.archives import archive_blocks
from megatron.data.contents import open_source
from megatron.data.document_blocks import Block, Position, ReadingRules, delimited_blocks, first_documents
from megatron.data.sources import UNCOMPRESSED_ONLY, SourceFile

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
        from megatron.data.tables import table_blocks  # pyarrow, which takes its time

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
