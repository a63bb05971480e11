"""Encoding of blocks of chat rows."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from megatron.data.block_workers import rows_of
from megatron.data.chat.conversation import BadRow, Chat
from megatron.data.chat.encoder import TOO_LONG, ChatCounts, ChatEncoder, Sample
from megatron.data.chat.job import ChatJob, prepare_chats
from megatron.data.chat.row_forms import EXAMPLE
from megatron.data.document_blocks import Block, Fault
from megatron.data.indexed import DataError
from megatron.data.manifest import BlockCounts

SHOWN_FAULTS = 10


@dataclass
class EncodedBlock:
    """The samples of a block of rows, concatenated."""

    ids: NDArray[np.int32]
    mask: NDArray[np.uint8]
    lengths: NDArray[np.int64]
    counts: ChatCounts
    faults: list[str]
    num_blank: int = 0
    of_blocks: list[BlockCounts] = field(default_factory=list)

    def samples(self) -> Iterator[Sample]:
        """Yield the samples in order."""
        ends = np.cumsum(self.lengths)
        for start, end in zip(ends - self.lengths, ends, strict=True):
            yield Sample(self.ids[start:end], self.mask[start:end])


def encode_batch(encoder: ChatEncoder, blocks: Sequence[Block], job: ChatJob) -> EncodedBlock:
    """Encode consecutive blocks. Raises DataError for the first bad row unless bad rows are skipped."""
    encoded = [encode_block(encoder, block, job) for block in blocks]
    if len(encoded) == 1:
        return encoded[0]
    counts = ChatCounts()
    for one in encoded:
        counts.add(one.counts)
    return EncodedBlock(
        np.concatenate([one.ids for one in encoded]),
        np.concatenate([one.mask for one in encoded]),
        np.concatenate([one.lengths for one in encoded]),
        counts,
        [fault for one in encoded for fault in one.faults][:SHOWN_FAULTS],
        sum(one.num_blank for one in encoded),
        [of_block for one in encoded for of_block in one.of_blocks],
    )


def encode_block(encoder: ChatEncoder, block: Block, job: ChatJob) -> EncodedBlock:
    """Encode the rows of a block. Raises DataError for the first bad row unless bad rows are skipped."""
    rows, problems, num_blank = rows_of(block, EXAMPLE, job.reader.keys)
    counts = ChatCounts(num_rows=len(rows) + len(problems))
    chats: list[Chat] = []
    numbers: list[int] = []
    for number, row in rows:
        try:
            form, chat, unread = job.reader.read(row)
            chats.append(chat)
            numbers.append(number)
            counts.unread.update(unread)
            counts.num_unanswered += not chat.ends_with_answer
            counts.num_of_forms[form] += 1
            counts.forms.setdefault(block.source.name, {}).setdefault(form, block.place(number))
        except BadRow as error:
            problems.append((number, error.kind, str(error)))
    samples: list[Sample] = []
    for number, result in zip(numbers, encoder.encode(chats, counts), strict=True):
        if isinstance(result, BadRow) and result.kind == TOO_LONG:
            counts.num_too_long += 1
            counts.first_too_long = counts.first_too_long or f"{block.place(number)}, {result}"
        elif isinstance(result, BadRow):
            problems.append((number, result.kind, str(result)))
        else:
            samples += result
    problems.sort()
    counts.bad.update(kind for _, kind, _ in problems)
    faults = [str(Fault(block.place(number), reason)) for number, _, reason in problems[:SHOWN_FAULTS]]
    if faults and job.bad_rows == "error":
        raise DataError(f"{faults[0]} (or leave such rows out: tools/preprocess_chat.py --bad-rows skip)")
    return EncodedBlock(
        np.concatenate([sample.ids for sample in samples] or [np.empty(0, np.int32)]),
        np.concatenate([sample.mask for sample in samples] or [np.empty(0, np.uint8)]),
        np.array([sample.length for sample in samples], np.int64),
        counts,
        faults,
        num_blank,
        [BlockCounts(block.without_content(), len(samples), num_blank, 0, len(problems))],
    )


@lru_cache(maxsize=1)
def _encoder_of(job: ChatJob) -> ChatEncoder:
    setup = prepare_chats(job)
    setup.tokenizer.expected_bytes = sys.maxsize  # workers are started for large inputs only
    return setup.encoder


def encode_in_worker(job: ChatJob, batch: list[Block]) -> EncodedBlock:
    """Encode a batch in a process that has the job alone."""
    return encode_batch(_encoder_of(job), batch, job)
