"""A prompt to continue, and what was generated for it."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from megatron.generation.options import GenerationOptions

Reason = Literal["stop", "length", "interrupted"]


@dataclass(frozen=True)
class Request:
    """A prompt as ids."""

    number: int
    """Place among all prompts of a run, a resumed one too: what is drawn depends on it."""
    prompt: tuple[int, ...]
    is_chat: bool = False
    """The text is an answer, which ends where the chat template ends a turn."""


@dataclass(frozen=True)
class Completion:
    """A text that was generated, as ids."""

    request: int
    """Number of its request."""
    sample: int
    """Place among the texts of its request."""
    ids: tuple[int, ...]
    """The generated ids, with the one that ended the text."""
    reason: Reason
    """stop: an end-of-text token, a stop token or a stop string; length: max_new_tokens, or the model's positions."""
    score: float | None = None
    """Score of a beam search."""
    logprobs: tuple[float, ...] | None = None
    """Log-probability of each id, where the options request it."""
    alternatives: tuple[tuple[tuple[int, float], ...], ...] | None = None
    """For each id the most probable ones in its place, with their log-probabilities."""


# ---------------------------------------------------------------------------------------------------------------------
# Rows of a batch and the texts in them: the host's part of generation, the same on every rank of a replica.

REASONS: tuple[Reason | None, ...] = (None, "stop", "length", "interrupted")
"""By their numbers in messages. None: the text has not ended."""


ABSENT = 1.0
"""Stands for no log-probability in a message: none is above 0."""


class Verdict(NamedTuple):
    """Next token of a row, as the deciding rank sends it to the others."""

    token: int
    reason: Reason | None
    source: int
    """Beam search: the row that this row continues."""
    logprob: float | None = None
    alternatives: tuple[tuple[int, float], ...] = ()

    def encode(self) -> list[float]:
        """Return numbers for a message in float64, which holds each id and each float32 as it is."""
        logprob = ABSENT if self.logprob is None else self.logprob
        pairs = itertools.chain.from_iterable(self.alternatives)
        return [self.token, REASONS.index(self.reason), self.source, logprob, *pairs]

    @classmethod
    def decode(cls, numbers: Sequence[float]) -> Verdict:
        token, reason, source, logprob, *rest = numbers
        pairs = tuple((int(rest[i]), rest[i + 1]) for i in range(0, len(rest), 2))
        given = None if logprob == ABSENT else logprob
        return cls(int(token), REASONS[int(reason)], int(source), given, pairs)


@dataclass
class Unit:
    """A prompt with the texts that are generated for it together: its samples or beams, a row for each."""

    request: Request
    samples: Sequence[int]
    """Their numbers; those of the beams."""


def units_of(requests: Sequence[Request], options: GenerationOptions, most_rows: int) -> deque[Unit]:
    """Return the units of all requests in order, of at most `most_rows` rows each."""
    if options.num_beams > 1:
        return deque(Unit(request, range(options.num_beams)) for request in requests)
    # more samples than rows become units of their own, each of which reads the prompt again
    starts = range(0, options.num_samples, most_rows)
    return deque(
        Unit(request, range(start, min(start + most_rows, options.num_samples)))
        for request in requests
        for start in starts
    )


@dataclass
class ActiveRow:
    """A row of the batch in use, and its text so far."""

    request: Request
    sample: int
    most_tokens: int
    """Largest number of new tokens."""
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    alternatives: list[tuple[tuple[int, float], ...]] = field(default_factory=list)

    @property
    def position(self) -> int:
        """Place of its newest token, which the next pass reads."""
        return len(self.request.prompt) + len(self.ids) - 1

    def completion(self, reason: Reason) -> Completion:
        found = Completion(self.request.number, self.sample, tuple(self.ids), reason)
        if not self.logprobs:
            return found
        return replace(found, logprobs=tuple(self.logprobs), alternatives=tuple(self.alternatives))


class RowGroup:
    """Rows that go through the stages together."""

    def __init__(self, first: int, size: int) -> None:
        self.first, self.size = first, size
        self.active: dict[int, ActiveRow] = {}
        """By row of the cache."""

    @property
    def rows(self) -> range:
        return range(self.first, self.first + self.size)

    def place(self, waiting: deque[Unit], most_tokens: MostTokens, block: int) -> list[tuple[Unit, list[int]]]:
        """Take units from the front of the queue into free rows, and return them with these.

        `block`: rows of a beam search, which begin at a multiple of it.
        """
        placed = []
        free = [row for row in self.rows if row not in self.active]
        # strictly from the front: a unit of many rows would wait for ever if smaller ones went past it
        while waiting and len(waiting[0].samples) <= len(free):
            unit = waiting.popleft()
            rows, free = free[: len(unit.samples)], free[len(unit.samples) :]
            assert block == 1 or (rows[0] - self.first) % block == 0
            for row, sample in zip(rows, unit.samples, strict=True):
                self.active[row] = ActiveRow(unit.request, sample, most_tokens(unit.request))
            placed.append((unit, rows))
        return placed

    def at(self, position: int | None) -> list[int]:
        """Return the rows whose newest token is at this place."""
        return [row for row in self.rows if row in self.active and self.active[row].position == position]

    def apply(self, rows: Sequence[int], verdicts: Sequence[Verdict]) -> Iterator[tuple[ActiveRow, Verdict]]:
        """Append the tokens, and free the rows of texts that ended. Yields each row in use that got a token."""
        moved = [(row, each) for row, each in zip(rows, verdicts, strict=True) if each.source != row]
        # before they change: a beam continues the text of another
        texts = {verdict.source: tuple(self.active[verdict.source].ids) for _, verdict in moved}
        for row, verdict in zip(rows, verdicts, strict=True):
            # a pass computes rows without a text too
            if row not in self.active:
                continue
            active = self.active[row]
            if verdict.source != row:
                active.ids = list(texts[verdict.source])
            active.ids.append(verdict.token)
            if verdict.logprob is not None:
                active.logprobs.append(verdict.logprob)
                active.alternatives.append(verdict.alternatives)
            if verdict.reason:
                del self.active[row]
            yield active, verdict


class MostTokens(NamedTuple):
    """Largest number of new tokens of a request."""

    max_new_tokens: int
    max_positions: int | None

    def __call__(self, request: Request) -> int:
        if self.max_positions is None:
            return self.max_new_tokens
        # the last token is never read, so it needs no position
        return min(self.max_new_tokens, self.max_positions - len(request.prompt) + 1)
