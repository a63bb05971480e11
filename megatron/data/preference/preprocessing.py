"""Preparation of preferences: an indexed dataset of pairs.

PREFIX.bin and .idx hold a document a row, in the order of the input, of three sequences: the tokens of the prompt,
those of the preferred answer, and those of the other. A row with one answer has an empty sequence for the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from megatron.data.chat.conversation import BadRow
from megatron.data.chat.preprocessing import compile_templates, tokenizer_folder
from megatron.data.chat.template import find_template
from megatron.data.chat.tokenizer import ChatTokenizer, load_tokenizer
from megatron.data.index.indexed import DataError, IndexedDataset, best_dtype
from megatron.data.preference.encoder import Pair, PairCounts, PreferenceEncoder, Templates
from megatron.data.preference.formats import Preference, parse_preference
from megatron.data.preference.rows import EXAMPLE, ROW_COLUMNS
from megatron.data.prepare.block_encoder import JobInput, Output, Stream, find_input
from megatron.data.prepare.pipeline import Pipeline, PreparationReport, Silence, percentiles
from megatron.data.prepare.rows import RowEncoder, RowsJob

SEQUENCES = 3
"""Sequences of a document: prompt, chosen, rejected."""


@dataclass(frozen=True)
class PreferenceJob(RowsJob):
    """Everything that decides the output."""

    remedy: ClassVar[str] = "shorten the row, or leave the line out"
    _: KW_ONLY
    as_chat: bool = False
    """Make messages of texts, which the template then writes."""

    @property
    def columns(self) -> tuple[str, ...]:
        return ROW_COLUMNS

    def encoder(self) -> PairRows:
        """Find the template and load the tokenizer. Raises DataError."""
        folder, named = tokenizer_folder(self.tokenizer), {}
        missing, described = "", None
        try:
            source = find_template(self.chat_template, folder)
            named = source.named_tokens
            described = {"name": Path(source.origin).name, "sha256": source.sha256}
        except DataError as error:
            if self.chat_template is not None or self.as_chat:
                raise
            missing = str(error)  # matters for rows of messages alone
        # after the template, whose file may name special tokens
        tokenizer, _ = load_tokenizer(self.tokenizer, named)
        return PairRows(self, missing or compile_templates(source, tokenizer), tokenizer, described)


class PairRows(RowEncoder[Preference, Pair, PairCounts]):
    """Rows of preferences to pairs."""

    example = EXAMPLE
    command = "preprocess_preferences"

    def __init__(
        self,
        job: PreferenceJob,
        templates: Templates | str,
        tokenizer: ChatTokenizer,
        described_template: dict[str, str] | None,
    ):
        """`templates`: as PreferenceEncoder has them. `described_template`: name and SHA-256."""
        rules = {"as_chat": job.as_chat, "append_eos": job.append_eos}
        super().__init__(job, tokenizer, described_template, rules)
        self.job: PreferenceJob = job
        dtype = best_dtype(tokenizer.vocab_size)
        self.outputs = [Output(job.output_prefix, dtype, sequences_per_document=SEQUENCES)]
        self._encoder = PreferenceEncoder(templates, tokenizer, append_eos=job.append_eos)

    def no_counts(self) -> PairCounts:
        return PairCounts()

    def read(self, row: dict[str, Any], source_name: str, place: str, counts: PairCounts) -> Preference:
        parsed = parse_preference(row, as_chat=self.job.as_chat, ignored=self.job.ignore_columns)
        counts.unread.update(parsed.unread)
        counts.num_other_turns += parsed.has_other_turns
        counts.num_repeated_prompts += parsed.repeats_prompt
        counts.num_passed_over += parsed.num_passed_over
        counts.num_without_template += self.job.chat_template is not None and not parsed.is_chat
        counts.forms[parsed.form] += 1
        counts.first_rows.setdefault(parsed.form, place)
        return parsed

    def encode_rows(self, rows: Sequence[Preference], counts: PairCounts) -> list[list[Pair] | BadRow]:
        return [result if isinstance(result, BadRow) else [result] for result in self._encoder.encode(rows, counts)]

    def streams(self, samples: Sequence[Pair]) -> list[Stream]:
        parts = [part for pair in samples for part in pair.parts]
        lengths = np.array([len(part) for part in parts], np.int64)
        # the empty array is for a block without pairs, of which NumPy would refuse the list
        return [Stream(np.concatenate([np.empty(0, np.int32), *parts]), lengths)]

    def check(self, counts: PairCounts) -> None:
        if counts.num_documents:
            return
        if not counts.num_rows:
            raise DataError(f"no row in {', '.join(self.job.inputs)}; give a file with a JSON object a line, {EXAMPLE}")
        reasons = ", ".join(f"{count} {reason}" for reason, count in counts.bad.most_common())
        raise DataError(f"no pair is left of {counts.num_rows} rows: {reasons}; correct the rows")


@dataclass(frozen=True)
class PreferenceTotals:
    """Numbers of pairs and tokens."""

    counts: PairCounts
    num_pairs: int
    """Documents, also those with one answer."""
    num_tokens: dict[str, int]
    """Tokens of the prompts, and of the chosen and rejected answers."""
    vocab_size: int
    length_percentiles: dict[str, dict[int, int]]
    """Percentile -> tokens: of a prompt, and of a prompt with its longer answer."""


def preprocess_preferences(
    job: PreferenceJob, report: PreparationReport | None = None, files: JobInput | None = None
) -> PreferenceTotals:
    """Run a job, whose `files` are those of `find_input`.

    For large inputs `workers` above 1 starts other processes; they do not import the caller's script. Raises DataError
    or OSError, and then leaves no dataset, and Finished.
    """
    encoder = job.encoder()
    encoder.read_from(files or find_input(job))
    counts = Pipeline(encoder, report or Silence()).run()
    lengths = np.asarray(IndexedDataset(job.output_prefix).lengths).reshape(-1, SEQUENCES)
    sums = lengths.sum(axis=0, dtype=np.int64).tolist()
    # a pair needs as long a row as its longer side, so seq_length is chosen by that
    of_parts = {
        "prompts": percentiles(lengths[:, 0]),
        "with the longer answer": percentiles(lengths[:, 0] + lengths[:, 1:].max(axis=1)),
    }
    num_tokens = dict(zip(("prompts", "chosen", "rejected"), sums, strict=True))
    return PreferenceTotals(counts, len(lengths), num_tokens, encoder.tokenizer.vocab_size, of_parts)
