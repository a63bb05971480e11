"""Decisions of the rank that decides: the next token of each row, and which texts end with it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import Tensor

from megatron.generation.batch import ActiveRow, Unit, Verdict
from megatron.generation.beam_search import BeamResult, BeamSearch
from megatron.generation.options import GenerationOptions
from megatron.generation.requests import Reason
from megatron.generation.sampling import TokenSampler, final_ids

IsFinished = Callable[[int, int, Sequence[int]], Reason | None]
"""(number of the request, sample, generated ids so far) -> why the text ends here, as by a stop string; None: it goes
on."""


class Chooser:
    """Chooses tokens from logits for the rows of a batch."""

    def __init__(
        self, options: GenerationOptions, vocab_size: int, eos_ids: Collection[int], is_finished: IsFinished | None
    ) -> None:
        self._options, self._is_finished = options, is_finished
        self._final = final_ids(options, eos_ids)
        self._sampler = TokenSampler(options, vocab_size, eos_ids) if options.num_beams == 1 else None
        self._beams = BeamSearch(options, vocab_size, eos_ids) if options.num_beams > 1 else None

    def add(self, unit: Unit, rows: Sequence[int], device: torch.device) -> None:
        """Begin the texts of a unit in these rows."""
        prompt = unit.request.prompt
        if self._beams is not None:
            self._beams.add(rows[0], prompt, device)
        if self._sampler is not None:
            keys = [(unit.request.number, sample) for sample in unit.samples]
            self._sampler.add(rows, keys, [prompt] * len(rows), device)

    def choose(
        self, logits_BV: Tensor, rows: Sequence[int], active: Mapping[int, ActiveRow]
    ) -> tuple[list[Verdict], list[BeamResult]]:
        """Return a verdict for each row, and the texts of beam searches that ended, in the order of their rows."""
        if self._beams is not None:
            return self._search(logits_BV, rows)
        assert self._sampler is not None
        choice = self._sampler.choose(logits_BV, rows)
        ids = choice.ids_B.tolist()
        logprobs = [None] * len(ids) if choice.logprobs_B is None else choice.logprobs_B.tolist()
        others: list[tuple[tuple[int, float], ...]] = [()] * len(ids)
        if choice.alternatives is not None:
            found = (part.tolist() for part in choice.alternatives)
            others = [tuple(zip(*pair, strict=True)) for pair in zip(*found, strict=True)]
        reasons = [self._reason(active.get(row), token) for row, token in zip(rows, ids, strict=True)]
        self._sampler.remove([row for row, reason in zip(rows, reasons, strict=True) if reason])
        verdicts = [Verdict(*each) for each in zip(ids, reasons, rows, logprobs, others, strict=True)]
        return verdicts, []

    def _reason(self, row: ActiveRow | None, token: int) -> Reason | None:
        if row is None:
            return None
        ids = [*row.ids, token]
        if token in self._final:
            return "stop"
        # before min_new_tokens a stop string does not count
        if self._is_finished is not None and len(ids) >= self._options.min_new_tokens:
            reason = self._is_finished(row.request.number, row.sample, ids)
            if reason is not None:
                return reason
        return None if len(ids) < row.most_tokens else "length"

    def _search(self, logits_BV: Tensor, rows: Sequence[int]) -> tuple[list[Verdict], list[BeamResult]]:
        assert self._beams is not None
        step, count = self._beams.choose(logits_BV, rows), self._options.num_beams
        verdicts = []
        for place, (row, token, source) in enumerate(zip(rows, step.ids_B.tolist(), step.sources, strict=True)):
            results = step.finished.get(rows[place - place % count], [])
            reason = results[0].reason if results else None
            verdicts.append(Verdict(token, reason, row if results else rows[source]))
        for first in step.finished:
            self._beams.remove(first)
        return verdicts, list(itertools.chain.from_iterable(step.finished.values()))
