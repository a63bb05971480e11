"""Beam search: the texts of highest score, by transformers' definition.

The score of a text is the sum of the log-probabilities of its tokens, after penalties, divided by its length to the
power of length_penalty. A sequence takes num_beams neighbouring rows of the batch.

Dimensions: B rows of the batch, R sequences, N beams of one, V ids of the vocabulary.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.generation.options import GenerationOptions
from megatron.generation.requests import ActiveRow, Reason, Unit, Verdict
from megatron.generation.sampling import Penalties, TokenSampler, final_ids

IMPOSSIBLE = -1.0e9

IsFinished = Callable[[int, int, Sequence[int]], Reason | None]
"""(number of the request, sample or beam, generated ids so far) -> why the text ends here, as by a stop string; None:
it goes on. A beam may continue the ids of another one."""


class BeamResult(NamedTuple):
    """A finished text."""

    ids: tuple[int, ...]
    """The generated tokens, with the final one that ended it."""
    score: float
    reason: Reason


class BeamStep(NamedTuple):
    """One more token for every beam."""

    ids_B: Tensor
    """int64 on the host"""
    sources: list[int]
    """For each of the B rows, the place among them of the row that it continues: the cache must be reordered so."""
    finished: dict[int, list[BeamResult]]
    """First row and the best `num_samples` texts of each sequence that has ended; its rows must be removed."""


@dataclass
class _Sequence:
    """Beams of one prompt."""

    number: int
    """That of the request."""
    scores: list[float]
    texts: list[tuple[int, ...]]
    complete: list[BeamResult] = field(default_factory=list)
    """The best num_beams texts so far that have ended, the best first."""


class BeamSearch:
    """The beams of the sequences in a batch of rows.

    Args:
        vocab_size: size of the true vocabulary, without padding.
        eos_ids: ids that end a text by the model's own account.
        is_finished: is called for each candidate that may become a beam.
    """

    def __init__(
        self,
        options: GenerationOptions,
        vocab_size: int,
        eos_ids: Collection[int],
        is_finished: IsFinished,
    ):
        self.options, self._is_finished = options, is_finished
        self.num_beams = options.num_beams
        self._final = final_ids(options, eos_ids)
        # so many that num_beams of them are not final ones
        self._num_candidates = max(2, 1 + len(self._final)) * self.num_beams
        self._vocab_size = vocab_size
        self._penalties = Penalties(options, vocab_size, self._final)
        self._sequences: dict[int, _Sequence] = {}

    def add(
        self, first_row: int, prompt: Sequence[int], device: torch.device | str = "cpu", *, number: int = 0
    ) -> None:
        """Begin a sequence in num_beams rows, each of which holds the prompt.

        `device`: that of the logits to come. `number`: that of the request.
        """
        rows = range(first_row, first_row + self.num_beams)
        self._penalties.add(rows, [prompt] * self.num_beams, torch.device(device))
        scores = [0.0] + [IMPOSSIBLE] * (self.num_beams - 1)  # the beams are still the same
        self._sequences[first_row] = _Sequence(number, scores, [()] * self.num_beams)

    def remove(self, first_row: int) -> None:
        """Empty the rows of a sequence."""
        del self._sequences[first_row]
        self._penalties.remove(range(first_row, first_row + self.num_beams))

    def choose(self, logits_BV: Tensor, rows: Sequence[int]) -> BeamStep:
        """Return the next token of every beam, and the sequences that end with it.

        Args:
            logits_BV: float32 [B, vocab_size]; left as they are.
            rows: the row of each of the B, whole sequences in order. Rows without a sequence get any id.
        """
        rows = list(rows)
        # transformers' order: penalties apply to log-probabilities, which are not normalised again after them
        scores_BV = logits_BV.log_softmax(dim=1)
        self._penalties.apply(scores_BV, rows)
        firsts = rows[:: self.num_beams]
        running = [self._scores_of(first) for first in firsts]
        scores_BV += torch.tensor(running, device=scores_BV.device).view(-1, 1)
        # [R, N V]: the candidates of a sequence compete over all its beams; an index is beam * V + token
        joined = scores_BV.view(len(firsts), self.num_beams * self._vocab_size)
        values, indices = joined.topk(min(self._num_candidates, joined.shape[1]), dim=1)
        ids, sources, finished = list[int](), list[int](), dict[int, list[BeamResult]]()
        for number, (first, scores, choices) in enumerate(zip(firsts, values.tolist(), indices.tolist(), strict=True)):
            start = number * self.num_beams
            # rows without a sequence go through the pass too, since its shape is fixed: each continues itself
            if first not in self._sequences:
                ids += [0] * self.num_beams
                sources += range(start, start + self.num_beams)
                continue
            beams_and_tokens = [divmod(index, self._vocab_size) for index in choices]
            candidates = [(score, *pair) for score, pair in zip(scores, beams_and_tokens, strict=True)]
            # the best num_candidates suffice: of these at least num_beams do not end with a final id
            kept, results = self._advance(self._sequences[first], candidates)
            ids += [token for _, token in kept]
            sources += [start + beam for beam, _ in kept]
            if results:
                finished[first] = results
        # copy before extend: a beam inherits the counts of the beam that it continues, then gets its own token
        ids_B = torch.tensor(ids)
        self._penalties.copy([rows[source] for source in sources], rows)
        self._penalties.extend(ids_B.to(logits_BV.device), rows)
        return BeamStep(ids_B, sources, finished)

    def _scores_of(self, first_row: int) -> list[float]:
        if first_row in self._sequences:
            return self._sequences[first_row].scores
        return [0.0] * self.num_beams

    def _advance(
        self, sequence: _Sequence, candidates: list[tuple[float, int, int]]
    ) -> tuple[list[tuple[int, int]], list[BeamResult]]:
        """Continue the beams by the best of (score, beam, token), the best first.

        Returns the beam and the token of each continued beam, and the best texts if the search has ended.
        """
        count, options = self.num_beams, self.options
        # all beams of a sequence are of one length; + 1 for the token that is being chosen
        divisor = (len(sequence.texts[0]) + 1) ** options.length_penalty
        reasons = [self._reason(sequence, beam, token) for _, beam, token in candidates]
        # with early_stopping the search is over once num_beams texts are complete; later ones must not replace them
        if not options.early_stopping or len(sequence.complete) < count:
            self._complete(sequence, candidates[:count], reasons, divisor)
        ongoing = [candidate for candidate, reason in zip(candidates, reasons, strict=True) if reason is None]
        # those that end fill up where too few go on, and then win nothing
        ended = [candidate for candidate, reason in zip(candidates, reasons, strict=True) if reason is not None]
        ended = [(IMPOSSIBLE, beam, token) for _, beam, token in ended]
        kept = [*ongoing, *ended][:count]
        sequence.texts = [(*sequence.texts[beam], token) for _, beam, token in kept]
        sequence.scores = [score for score, _, _ in kept]
        results: list[BeamResult] = []
        if self._has_ended(sequence, divisor, ongoing):
            results = sequence.complete[: options.num_samples]
        return [(beam, token) for _, beam, token in kept], results

    def _complete(
        self,
        sequence: _Sequence,
        candidates: Sequence[tuple[float, int, int]],
        reasons: Sequence[Reason | None],
        divisor: float,
    ) -> None:
        """Add the texts that end to the best ones. `candidates`: only the first num_beams count, as in transformers."""
        for (score, beam, token), reason in zip(candidates, reasons, strict=False):
            if reason is not None:
                sequence.complete.append(BeamResult((*sequence.texts[beam], token), score / divisor, reason))
        sequence.complete = sorted(sequence.complete, key=lambda text: -text.score)[: self.num_beams]

    def _has_ended(self, sequence: _Sequence, divisor: float, ongoing: Collection[tuple[float, int, int]]) -> bool:
        """Return true if no candidate goes on, or none could be better than all texts that are complete."""
        # at max_new_tokens every candidate ends by "length"
        if not ongoing:
            return True
        if len(sequence.complete) < self.num_beams:
            return False
        # scores[0] is the best beam's sum. Log-probabilities are not positive, so at this length no continuation has a
        # higher one; transformers stops by the same estimate, though with length_penalty above 0 a longer text could
        # win
        return self.options.early_stopping or sequence.scores[0] / divisor <= sequence.complete[-1].score

    def _reason(self, sequence: _Sequence, beam: int, token: int) -> Reason | None:
        """Return why a beam ends if this token continues it."""
        # a beam's ids are a tuple, not a list that grows: several candidates branch off the same one
        ids = (*sequence.texts[beam], token)
        # of each candidate: the next ones may continue it
        reason = self._is_finished(sequence.number, beam, ids)
        if token in self._final:
            return "stop"
        if reason is None and len(ids) == self.options.max_new_tokens:
            return "length"
        return reason


class SamplingChooser:
    """Decisions of the rank that decides: the next token of each row, and which texts end with it."""

    def __init__(
        self, options: GenerationOptions, vocab_size: int, eos_ids: Collection[int], is_finished: IsFinished
    ) -> None:
        self._is_finished = is_finished
        self._final = final_ids(options, eos_ids)
        self._sampler = TokenSampler(options, vocab_size, eos_ids)

    def add(self, unit: Unit, rows: Sequence[int], device: torch.device) -> None:
        """Begin the texts of a unit in these rows."""
        keys = [(unit.request.number, sample) for sample in unit.samples]
        self._sampler.add(rows, keys, [unit.request.prompt] * len(rows), device)

    def choose(
        self, logits_BV: Tensor, rows: Sequence[int], active: Mapping[int, ActiveRow]
    ) -> tuple[list[Verdict], list[BeamResult]]:
        """Return a verdict for each row."""
        choice = self._sampler.choose(logits_BV, rows)
        ids = choice.ids_B.tolist()
        # active lacks the rows that are computed without a text; they have a verdict too, which no one applies
        reasons = [self._reason(active.get(row), token) for row, token in zip(rows, ids, strict=True)]
        self._sampler.remove([row for row, reason in zip(rows, reasons, strict=True) if reason])
        columns: list[list[Any]] = [ids, reasons, list(rows)]
        if choice.logprobs_B is not None and choice.alternatives is not None:
            tokens, values = (part.tolist() for part in choice.alternatives)
            others = [tuple(zip(*pair, strict=True)) for pair in zip(tokens, values, strict=True)]
            columns += [choice.logprobs_B.tolist(), others]
        return [Verdict(*each) for each in zip(*columns, strict=True)], []

    def _reason(self, row: ActiveRow | None, token: int) -> Reason | None:
        if row is None:
            return None
        if token in self._final:
            return "stop"
        # the row gets its token only when the verdict is applied, on all ranks alike
        ids = [*row.ids, token]
        reason = self._is_finished(row.request.number, row.sample, ids)
        if reason is None and len(ids) >= row.most_tokens:
            return "length"
        return reason


class BeamChooser:
    """Decisions of the rank that decides where texts are searched for by beams, which rank whole texts."""

    def __init__(
        self, options: GenerationOptions, vocab_size: int, eos_ids: Collection[int], is_finished: IsFinished
    ) -> None:
        self._num_beams = options.num_beams
        self._beams = BeamSearch(options, vocab_size, eos_ids, is_finished)

    def add(self, unit: Unit, rows: Sequence[int], device: torch.device) -> None:
        """Begin the search of a unit in these rows."""
        self._beams.add(rows[0], unit.request.prompt, device, number=unit.request.number)

    def choose(
        self, logits_BV: Tensor, rows: Sequence[int], active: Mapping[int, ActiveRow]
    ) -> tuple[list[Verdict], list[BeamResult]]:
        """Return a verdict for each row, and the texts of the searches that ended, in the order of their rows."""
        step, count = self._beams.choose(logits_BV, rows), self._num_beams
        verdicts = []
        for index, (row, token, source) in enumerate(zip(rows, step.ids_B.tolist(), step.sources, strict=True)):
            results = step.finished.get(rows[index - index % count])
            if results is None:
                verdicts.append(Verdict(token, None, rows[source]))
            else:
                # the rows of a search end together, under the reason of its best text; no row of the cache needs to be
                # copied any more: each is its own source
                verdicts.append(Verdict(token, results[0].reason, row))
        for first in step.finished:
            self._beams.remove(first)
        return verdicts, list(itertools.chain.from_iterable(step.finished.values()))


Chooser = SamplingChooser | BeamChooser


def chooser_of(
    options: GenerationOptions, vocab_size: int, eos_ids: Collection[int], is_finished: IsFinished
) -> Chooser:
    if options.num_beams > 1:
        return BeamChooser(options, vocab_size, eos_ids, is_finished)
    return SamplingChooser(options, vocab_size, eos_ids, is_finished)
