"""Preparation of chats: a dataset of tokens and a dataset of their loss mask.

PREFIX.bin and .idx hold one sample a document, in the order of the input. PREFIX_loss_mask.bin and .idx hold one byte a
token: 1 where it is trained. Both datasets appear together when whole, or not at all.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from megatron.data.chat.encoder import ChatCounts
from megatron.data.chat.job import ChatJob, ChatRows
from megatron.data.chat.tokenizer import write_tokenizer
from megatron.data.index.indexed import LOSS_MASK_SUFFIX, DataError, IndexedDataset, best_dtype
from megatron.data.prepare.block_encoder import JobInput, Output, find_input
from megatron.data.prepare.pipeline import Pipeline, PreparationReport, Silence, percentiles
from megatron.data.prepare.rows import RowBlockEncoder


@dataclass(frozen=True)
class ChatTotals:
    """Numbers of rows, samples and tokens."""

    counts: ChatCounts
    num_samples: int
    num_tokens: int
    vocab_size: int
    """Size of the vocabulary, added tokens included."""
    added_tokens: tuple[str, ...]
    length_percentiles: dict[int, int]
    """Percentile -> tokens in a sample."""


def preprocess_chats(
    job: ChatJob, report: PreparationReport | None = None, files: JobInput | None = None
) -> ChatTotals:
    """Run a job, whose `files` are those of `find_input`.

    For large inputs `workers` above 1 starts other processes; they do not import the caller's script. Raises DataError
    or OSError, and then leaves no dataset, and Finished.
    """
    encoder = _ChatBlocks(job, files or find_input(job), job.encoder())
    counts = Pipeline(encoder, report or Silence()).run()
    data = IndexedDataset(job.output_prefix)
    vocab_size = encoder.encoder.tokenizer.vocab_size
    added = encoder.encoder.added_tokens
    return ChatTotals(counts, len(data), data.num_tokens, vocab_size, added, percentiles(data.lengths))


class _ChatBlocks(RowBlockEncoder[ChatCounts]):
    def __init__(self, job: ChatJob, files: JobInput, encoder: ChatRows):
        super().__init__(job, files, encoder)
        self.job: ChatJob = job
        self.encoder: ChatRows = encoder
        self.outputs = [
            # uint16 where every id fits, with the ids that were added
            Output(job.output_prefix, best_dtype(encoder.tokenizer.vocab_size)),
            Output(job.output_prefix + LOSS_MASK_SUFFIX, np.uint8),
        ]
        # the name without its folder: the same template elsewhere is the same data
        template = Path(encoder.source.origin).name
        self.notes = {
            "tokenizer": self.tokenizer,
            "chat_template": {"name": template, "sha256": encoder.source.sha256},
            "rules": asdict(job.rules),
            "input": files.whole.digest,
        }
        # what decides the bytes of the output; a resume with other values is refused
        self.options = {
            **asdict(job.rules),
            "chat_template": template,
            "row_format": job.row_format,
            "prompt_template": job.prompt_template,
            "answer_key": job.answer_key,
            "ignore_columns": list(job.ignore_columns),
            "split": job.split,
            "bad_rows": job.bad_rows,
            "exclude": list(job.exclude),
            "max_documents": job.max_documents,
        }

    def check(self, counts: ChatCounts) -> None:
        job = self.job
        # after all rows are read: one run names them all, and nothing is published
        if counts.num_too_long:
            raise DataError(
                f"{counts.num_too_long} of {counts.num_rows} conversations have more than max_length={job.max_length} "
                f"tokens; the first is {counts.first_too_long}, the longest has {counts.longest} tokens; raise "
                "--max-length, or choose what becomes of them: --too-long drop, truncate or split"
            )
        if counts.num_documents:
            return
        if counts.num_rows:
            reasons = ", ".join(f"{count} {reason}" for reason, count in (counts.dropped + counts.bad).most_common())
            raise DataError(
                f"no sample is left of {counts.num_rows} rows: {reasons}; correct the rows, or raise --max-length"
            )
        blank = f", only {counts.num_blank} blank lines" if counts.num_blank else ""
        raise DataError(f"no conversation in {', '.join(job.inputs)}{blank}; give a file with a JSON object a line")

    def before_publishing(self) -> None:
        job, encoder = self.job, self.encoder
        # before the dataset appears: data with added ids is never without the tokenizer that has them
        if job.tokenizer_output is not None:
            write_tokenizer(job.tokenizer_output, encoder.tokenizer, job.tokenizer, encoder.source)
