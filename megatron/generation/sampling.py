"""Choice of tokens: random numbers that depend on a key alone, then penalties, filters and draws."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron.generation.options import GenerationOptions

Key = tuple[int, ...]


def exponentials(keys: Sequence[Key], count: int) -> Tensor:
    """Return [keys, count] independent exponential variables of mean 1 in float32 on the CPU, a row for each key.

    SHAKE-128 of the key is the generator: a row is the same on every machine and in every batch. 32 bits for each
    number, of which none is 0.
    """
    if not keys:
        return torch.empty(0, count)
    # torch's generators give other numbers on other devices, and by other batch shapes
    rows = b"".join(hashlib.shake_128(repr(key).encode()).digest(4 * count) for key in keys)
    # + 0.5: within (0, 1), so the logarithm is finite. In float64: float32 has no number between 1 - 2^-24 and 1, so
    # uniform would round to 1 and the variable to 0
    uniform = (np.frombuffer(rows, dtype="<u4").astype(np.float64) + 0.5) * 2.0**-32
    return torch.from_numpy(-np.log(uniform)).to(torch.float32).view(len(keys), count)


class Draws:
    """Draws of one id from each row of a batch of distributions, by keys.

    A row of V probabilities is drawn from in two steps: a block of about sqrt(V) ids, then an id in it. In each step
    the largest quotient of a probability and an exponential variable wins, which chooses in proportion to the
    probabilities. So a draw needs 2 sqrt(V) random numbers, and probabilities that differ by rounding, as on another
    layout, give another id only where two quotients are as close as that. Inverting the cumulative distribution would
    add up the roundings of all V.
    """

    def __init__(self, vocab_size: int):
        # the root of V rounded up: block + num_blocks numbers a draw is least where both are about equal
        self.block = math.isqrt(vocab_size - 1) + 1
        self.num_blocks = -(-vocab_size // self.block)
        self.padded_size = self.num_blocks * self.block
        """Ids with those that fill the last block; their probabilities must be 0."""

    def draw(self, weights_BV: Tensor, keys: Sequence[Key]) -> Tensor:
        """Return ids, int64 [B], drawn in proportion to weights: float32 [B, padded_size], not negative, of any sum."""
        batch = len(keys)
        noise = exponentials(keys, self.num_blocks + self.block).to(weights_BV.device)
        blocks_BNK = weights_BV.view(batch, self.num_blocks, self.block)
        # exponential races: with E_i exponential of mean 1, P(argmax w_i / E_i = i) = w_i / sum w
        chosen_B = (blocks_BNK.sum(dim=2) / noise[:, : self.num_blocks]).argmax(dim=1)
        rows_BK = blocks_BNK[torch.arange(batch, device=weights_BV.device), chosen_B]
        return chosen_B * self.block + (rows_BK / noise[:, self.num_blocks :]).argmax(dim=1)


# ---------------------------------------------------------------------------------------------------------------------
# Choice of the next tokens from logits: penalties, filters, draws, log-probabilities.
#
# The definitions and their order are those of transformers' logits processors, with vLLM's frequency and presence
# penalties after the repetition penalty: logit_bias, repetition, frequency, presence, min_new_tokens, temperature,
# top_k, top_p, min_p. Tokens exactly as probable as the last one that a filter keeps are kept too, so that no result
# depends on the order of a sort.
#
# Dimensions: B rows of the batch, V ids of the vocabulary.


class Alternatives(NamedTuple):
    """The most probable tokens of each row, the most probable first."""

    ids_BK: Tensor
    logprobs_BK: Tensor


class Choice(NamedTuple):
    """Tokens chosen for a batch."""

    ids_B: Tensor
    """int64"""
    logprobs_B: Tensor | None = None
    """float32, in the model's distribution before penalties and filters; None unless options.logprobs is set."""
    alternatives: Alternatives | None = None


class Penalties:
    """Changes to the logits that depend on the tokens of each row so far. It keeps what the options need, no more.

    `final_ids` end a text: min_new_tokens excludes them.
    """

    def __init__(self, options: GenerationOptions, vocab_size: int, final_ids: Collection[int]):
        self._options = options
        self._vocab_size = vocab_size
        self._bias = dict(options.logit_bias)
        self._final = sorted(final_ids) if options.min_new_tokens else []
        self._seen_BV: Tensor | None = None
        self._counts_BV: Tensor | None = None
        self.lengths: list[int] = []
        """Tokens generated in each row; -1 for a row without a sequence."""

    @property
    def changes_logits(self) -> bool:
        options = self._options
        return bool(self._bias or self._final or options.repetition_penalty != 1.0 or self._counts)

    @property
    def _counts(self) -> bool:
        return self._options.frequency_penalty != 0.0 or self._options.presence_penalty != 0.0

    def add(self, rows: Sequence[int], prompts: Sequence[Sequence[int]], device: torch.device) -> None:
        """Begin a sequence in each of these rows, whichever it held before."""
        self._reserve(rows, device)
        for row, prompt in zip(rows, prompts, strict=True):
            self.lengths[row] = 0
            # a prompt's tokens count for the repetition penalty, but not for frequency and presence, which see the
            # generated text alone
            if self._seen_BV is not None:
                self._seen_BV[row] = False
                self._seen_BV[row, torch.tensor(prompt, dtype=torch.int64, device=device)] = True
            if self._counts_BV is not None:
                self._counts_BV[row] = 0

    def _reserve(self, rows: Sequence[int], device: torch.device) -> None:
        size = max(rows, default=-1) + 1
        if size <= len(self.lengths):
            return
        self.lengths += [-1] * (size - len(self.lengths))
        if self._options.repetition_penalty != 1.0:
            self._seen_BV = _with_rows(self._seen_BV, size, self._vocab_size, torch.bool, device)
        if self._counts:
            self._counts_BV = _with_rows(self._counts_BV, size, self._vocab_size, torch.float32, device)

    def remove(self, rows: Sequence[int]) -> None:
        """Mark rows as empty."""
        for row in rows:
            self.lengths[row] = -1

    def copy(self, sources: Sequence[int], rows: Sequence[int]) -> None:
        """Let each of `rows` continue what its source held."""
        if not self.changes_logits:
            return
        # the list of lengths is complete before the first is replaced, for the same reason as below
        for row, length in zip(rows, [self.lengths[source] for source in sources], strict=True):
            self.lengths[row] = length
        for state_BV in (self._seen_BV, self._counts_BV):
            if state_BV is not None:
                # indexing copies the sources first: a row may be a source of another one, and be overwritten itself
                index, of = torch.tensor([list(rows), list(sources)], device=state_BV.device)
                state_BV[index] = state_BV[of]

    def apply(self, logits_BV: Tensor, rows: Sequence[int]) -> None:
        """Change the logits of these rows in place."""
        options = self._options
        if not self.changes_logits:
            return
        self._reserve(rows, logits_BV.device)
        for token, bias in self._bias.items():
            logits_BV[:, token] += bias
        index = torch.tensor(rows, device=logits_BV.device)
        if self._seen_BV is not None:
            # CTRL's penalty (arXiv:1909.05858) as transformers has it: division alone would raise negative logits
            penalised = torch.where(
                logits_BV < 0, logits_BV * options.repetition_penalty, logits_BV / options.repetition_penalty
            )
            torch.where(self._seen_BV[index], penalised, logits_BV, out=logits_BV)
        if self._counts_BV is not None:
            counts_BV = self._counts_BV[index]
            logits_BV.sub_(counts_BV, alpha=options.frequency_penalty)
            # the sign of a count is 1 for every token that has been generated
            logits_BV.sub_(counts_BV.sign(), alpha=options.presence_penalty)
        if self._final:
            early = [place for place, row in enumerate(rows) if 0 <= self.lengths[row] < options.min_new_tokens]
            if early:
                places = torch.tensor(early, device=logits_BV.device)[:, None]
                logits_BV[places, torch.tensor(self._final, device=logits_BV.device)] = -math.inf

    def extend(self, ids_B: Tensor, rows: Sequence[int]) -> None:
        """Append a token to the sequence of each row."""
        self._reserve(rows, ids_B.device)
        for row in rows:
            # -1 stays: the row has no sequence
            self.lengths[row] += self.lengths[row] >= 0
        if self._seen_BV is not None or self._counts_BV is not None:
            index = torch.tensor(rows, device=ids_B.device)
            if self._seen_BV is not None:
                self._seen_BV[index, ids_B] = True
            if self._counts_BV is not None:
                self._counts_BV[index, ids_B] += 1


def _with_rows(state: Tensor | None, size: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the state with `size` rows, new ones zero."""
    grown = torch.zeros(size, width, dtype=dtype, device=device)
    if state is not None:
        grown[: len(state)] = state
    return grown


MOST_LIKELY = 1024
"""Tokens among which the threshold of top_p is looked for first; only if these do not suffice, all are sorted."""


def filter_logits(logits_BV: Tensor, options: GenerationOptions) -> None:
    """Divide by the temperature, and set the logits of tokens that are filtered out to -inf, in place."""
    if options.temperature != 1.0:
        logits_BV.div_(options.temperature)
    top_k = min(options.top_k, logits_BV.shape[1])
    # as transformers: each filter sees what the one before has left, so top_p sums over the top_k renormalised
    if top_k:
        _drop_below(logits_BV, logits_BV.topk(top_k, dim=1).values[:, -1:])
    if options.top_p < 1.0:
        _drop_below(logits_BV, _nucleus_threshold(logits_BV, options.top_p))
    if options.min_p > 0.0:
        # p >= min_p * max(p), in logarithms, where the normaliser cancels
        _drop_below(logits_BV, logits_BV.amax(dim=1, keepdim=True) + math.log(options.min_p))


def _drop_below(logits_BV: Tensor, threshold_B1: Tensor) -> None:
    logits_BV.masked_fill_(logits_BV < threshold_B1, -math.inf)


def _nucleus_threshold(logits_BV: Tensor, top_p: float) -> Tensor:
    """Return the logit of the last token that is needed for a probability of top_p, [B, 1]."""
    total_B1 = logits_BV.logsumexp(dim=1, keepdim=True)
    vocab_size = logits_BV.shape[1]
    for count in (MOST_LIKELY, vocab_size):
        values_BK = logits_BV.topk(min(count, vocab_size), dim=1).values
        probs_BK = (values_BK - total_B1).exp()
        # probability of all tokens before this one: it is needed if that is still below top_p, the first one always
        before_BK = probs_BK.cumsum(dim=1) - probs_BK
        kept_BK = before_BK < top_p
        # if a row keeps even the last of the 1,024, its threshold may be behind it. The bool waits for the device,
        # which is cheaper than sorting the whole vocabulary each time
        if count >= vocab_size or not bool(kept_BK[:, -1].any()):
            break
    # the smallest of those that are kept
    return values_BK.masked_fill(~kept_BK, math.inf).amin(dim=1, keepdim=True)


class TokenSampler:
    """The next tokens of the sequences in a batch of rows.

    Args:
        vocab_size: size of the true vocabulary, without padding.
        eos_ids: ids that end a text by the model's own account.

    Noise depends on (seed, request, sample, place of the token) alone. So neither the batch nor the layout nor the
    device changes what is drawn.
    """

    def __init__(self, options: GenerationOptions, vocab_size: int, eos_ids: Collection[int]):
        self.options = options
        self.vocab_size = vocab_size
        self._penalties = Penalties(options, vocab_size, final_ids(options, eos_ids))
        self._draws = Draws(vocab_size)
        self._keys: dict[int, Key] = {}
        self._work_BV: Tensor | None = None

    @property
    def needs_logits(self) -> bool:
        """False if the largest logit decides: then ranks that hold shards need to exchange only that."""
        return self.options.draws or self.options.logprobs is not None or self._penalties.changes_logits

    def add(
        self,
        rows: Sequence[int],
        keys: Sequence[Key],
        prompts: Sequence[Sequence[int]],
        device: torch.device | str = "cpu",
    ) -> None:
        """Begin sequences in these rows.

        Args:
            keys: (request, sample) of each.
            prompts: the ids of each prompt.
            device: that of the logits to come.
        """
        self._keys.update(zip(rows, keys, strict=True))
        self._penalties.add(rows, prompts, torch.device(device))

    def remove(self, rows: Sequence[int]) -> None:
        """Empty rows whose sequences have ended."""
        for row in rows:
            del self._keys[row]
        self._penalties.remove(rows)

    def choose(self, logits_BV: Tensor, rows: Sequence[int]) -> Choice:
        """Return the next token of each row, and count it as part of its sequence.

        Args:
            logits_BV: float32 [B, vocab_size]; left as they are.
            rows: the row of each sequence. Rows without a sequence get any id.
        """
        # the usual greedy case: no copy, no float32 buffer of the batch
        if not self.needs_logits:
            ids_B = logits_BV.argmax(dim=1)
            self._penalties.extend(ids_B, rows)
            return Choice(ids_B)
        work_BV = self._copy(logits_BV)
        # a view: penalties and filters write into the buffer that the draw reads
        scores_BV = work_BV[:, : self.vocab_size]
        self._penalties.apply(scores_BV, rows)
        if self.options.draws:
            filter_logits(scores_BV, self.options)
            ids_B = self._draw(work_BV, rows)
        else:
            ids_B = scores_BV.argmax(dim=1)
        self._penalties.extend(ids_B, rows)
        return self._with_logprobs(ids_B, logits_BV)

    def _copy(self, logits_BV: Tensor) -> Tensor:
        """Return the logits in a buffer with the columns that fill the last block of ids."""
        batch = len(logits_BV)
        if self._work_BV is None or len(self._work_BV) < batch or self._work_BV.device != logits_BV.device:
            self._work_BV = logits_BV.new_empty(batch, self._draws.padded_size, dtype=torch.float32)
        work_BV = self._work_BV[:batch]
        work_BV[:, : self.vocab_size] = logits_BV
        # exp makes these columns 0, as Draws demands
        work_BV[:, self.vocab_size :] = -math.inf
        return work_BV

    def _draw(self, work_BV: Tensor, rows: Sequence[int]) -> Tensor:
        # weights need not sum to 1; relative to the largest, none overflows
        work_BV.sub_(work_BV.amax(dim=1, keepdim=True)).exp_()
        lengths = self._penalties.lengths
        return self._draws.draw(
            work_BV, [(self.options.seed, *self._keys[row], lengths[row]) if row in self._keys else () for row in rows]
        )

    def _with_logprobs(self, ids_B: Tensor, logits_BV: Tensor) -> Choice:
        if self.options.logprobs is None:
            return Choice(ids_B)
        # of the logits as they came: penalties and filters have changed the copy alone
        total_B1 = logits_BV.logsumexp(dim=1, keepdim=True)
        logprobs_B = (logits_BV.gather(1, ids_B[:, None]) - total_B1)[:, 0]
        values_BK, ids_BK = logits_BV.topk(min(self.options.logprobs, self.vocab_size), dim=1)
        return Choice(ids_B, logprobs_B, Alternatives(ids_BK, values_BK - total_B1))


def final_ids(options: GenerationOptions, eos_ids: Collection[int]) -> frozenset[int]:
    """Return the ids that end a text."""
    if options.ignore_eos:
        return frozenset(options.stop_token_ids)
    return frozenset(options.stop_token_ids).union(eos_ids)
