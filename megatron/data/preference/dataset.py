"""Datasets of pairs: a prompt and two answers to it, in the order of each epoch.

The files are those of preference/preprocessing.py. A prompt with an answer is cut to seq_length + 1 tokens here, so
that one dataset serves runs of any length; of its n tokens, n - 1 take a place of a row.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron.data.blend import SeparateSets, digest, sets_of
from megatron.data.gpt import SPLITS
from megatron.data.index.indexed import DataError, IndexedDataset, Tokens, check_vocabulary
from megatron.data.preference.preprocessing import SEQUENCES
from megatron.data.samples import SampleDataset, SampleFile, shuffled
from megatron.data.splits import Splits, open_splits, rows_of_split
from megatron.options.config import Config
from megatron.runtime.commands import command_name

logger = logging.getLogger(__name__)

CHOSEN, REJECTED = 1, 2
"""Sequences of a document."""


# Pairs are cut when they are read: TRL cuts prompt and answer together, for each side apart, so a stored cut could
# not share the prompt, and each length would need a dataset of its own.
@dataclass(frozen=True)
class PairLimits:
    """Limits of the length of a pair."""

    max_length: int
    """Tokens of a prompt with an answer."""
    max_prompt_length: int | None
    """Tokens of a prompt, of which the last are kept."""
    truncation: Literal["keep_start", "keep_end"]

    @classmethod
    def of(cls, config: Config) -> PairLimits:
        options = config.preference
        limit = options.prompt_limit(config.training.seq_length)
        return cls(config.training.seq_length + 1, limit, options.truncation)

    def prompt_lengths(self, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the tokens of prompts of these lengths."""
        return lengths if self.max_prompt_length is None else np.minimum(lengths, self.max_prompt_length)


class Answer(NamedTuple):
    """A prompt with an answer to it."""

    ids: Tokens
    """[n]"""
    begin: int
    """First id of the answer; at least 1, so that all its tokens are labels."""
    shared: int | None = None
    """Tokens of the shorter answer of its pair; None for one by itself."""


@dataclass(frozen=True)
class PairFile(SampleFile):
    """A dataset of pairs, each of prompt, chosen and rejected, and the numbers of those in use."""

    split: int
    sequences: ClassVar[int] = SEQUENCES


class PairDataset(SampleDataset[PairFile]):
    """Pairs of several files, numbered consecutively."""

    def __init__(
        self,
        files: Sequence[PairFile],
        weights: Sequence[float] | None,
        limits: PairLimits,
        *,
        seed: int,
        vocab_size: int,
    ):
        self.limits, self._vocab_size = limits, vocab_size
        stored = np.concatenate([file.lengths() for file in files])
        prompts, answers = limits.prompt_lengths(stored[:, :1]), stored[:, CHOSEN:]
        self._stored = prompts, answers
        wholes = np.minimum(prompts + answers, limits.max_length)
        self.answer_lengths: NDArray[np.int64] = np.where(answers > 0, wholes - 1, 0)
        """[pairs, 2] Places of the chosen and of the rejected side, 0 for one that a row lacks."""
        # keep_end may leave nothing of the prompt: then the first token of the answer has none before it
        self.labels: NDArray[np.int64] = np.where(
            limits.truncation == "keep_start", wholes - prompts, np.minimum(answers, limits.max_length - 1)
        ) * (answers > 0)
        """[pairs, 2] Tokens of each answer in the loss."""
        super().__init__(files, self.answer_lengths.sum(axis=1), weights, seed)
        self.reference: NDArray[np.float32] | None = None
        """[pairs, 2] Log-probabilities of the answers under a stored reference, once that is complete."""
        self.num_cut_prompts = int((prompts < stored[:, :1]).sum())
        self.num_truncated = int((prompts + answers > limits.max_length).sum())
        """Sides that are longer than max_length."""
        identity = [(file.tokens.fingerprint, digest(file.rows.tobytes().hex())) for file in files]
        # the limits too: pairs that are cut otherwise are other samples
        self.fingerprint = self.identity("pairs", 1, identity, seed, *vars(limits).values())

    def read(self, pair: int) -> tuple[Answer, Answer]:
        """Return the chosen and the rejected side, of no ids where a row lacks it. Raises DataError."""
        return self.answer(2 * pair), self.answer(2 * pair + 1)

    def answer(self, number: int) -> Answer:
        """Return a prompt with its answer; those of pair p are 2 p, the chosen, and 2 p + 1. Raises DataError."""
        pair = number // 2
        return self.sequence(pair, number)._replace(shared=int(self.labels[pair].min()))

    def sequence(self, pair: int, number: int) -> Answer:
        """Return the prompt of a pair with any answer. Raises DataError for an id outside the vocabulary."""
        file, row = self.place(pair)
        prompt = file.tokens.read(SEQUENCES * row)
        if self.limits.max_prompt_length is not None:
            prompt = prompt[-self.limits.max_prompt_length :]
        # of another file than the prompt, perhaps: KTO's mismatched answers cross files
        of_answer, other = self.place(number // 2)
        side = self._side(prompt, of_answer.tokens.read(SEQUENCES * other + CHOSEN + number % 2))
        # `initial`, since a side that a row lacks has no ids
        largest, least = int(side.ids.max(initial=0)), int(side.ids.min(initial=0))
        if largest >= self._vocab_size or least < 0:
            raise DataError(
                f"{file.tokens.prefix}: pair {row} holds token {largest}, but vocab_size={self._vocab_size}; "
                "preprocess it with this model's tokenizer, or set vocab_size to the data's"
            )
        return side

    def places_of(self, pairs: NDArray[np.int64], numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the places of prompts with any answers, by their numbers."""
        prompts, answers = self._stored
        return np.minimum(prompts[pairs, 0] + answers.reshape(-1)[numbers], self.limits.max_length) - 1

    def counts_of(self, numbers: NDArray[np.int64]) -> tuple[int, int, int]:
        """Return the numbers of chosen answers, of rejected ones, and of tokens of the chosen ones of some samples."""
        return len(numbers), len(numbers), int(self.labels[numbers, 0].sum())

    def are_chosen(self, numbers: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return for each answer of some samples if it is the chosen one."""
        return np.tile([True, False], len(numbers))

    def reference_of(self, numbers: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return the log-probability of each answer of some samples under the stored reference."""
        assert self.reference is not None
        return self.reference[numbers].reshape(-1)

    def _side(self, prompt: Tokens, answer: Tokens) -> Answer:
        if not len(answer):
            return Answer(answer, 1)
        ids, limit = np.concatenate([prompt, answer]), self.limits.max_length
        if self.limits.truncation == "keep_start":
            return Answer(ids[:limit], len(prompt))
        num_cut = max(0, len(ids) - limit)
        return Answer(ids[-limit:], max(1, len(prompt) - num_cut))


def open_pairs(config: Config, *, needs_both: bool) -> Splits[PairDataset]:
    """Return pairs for training, validation and test; the last two None if the config leaves none.

    `needs_both`: refuse rows with one answer. Raises DataError.
    """
    opened: dict[str, IndexedDataset] = {}
    limits, refuses = PairLimits.of(config), config.preference.unusable_pairs == "error"

    def open_file(prefix: str, split: int) -> PairFile:
        # a file that serves several splits is opened and checked once
        if prefix not in opened:
            opened[prefix] = _open(prefix, config.model.vocab_size, needs_both=needs_both)
        tokens = opened[prefix]
        rows = rows_of_split(len(tokens) // SEQUENCES, config, None if config.data.per_split else split)
        return PairFile(tokens, _usable(PairFile(tokens, rows, split), limits, refuses=refuses), split)

    def build(files: Sequence[PairFile], weights: Sequence[float] | None, said: str) -> PairDataset:
        return PairDataset(files, weights, limits, seed=config.training.seed, vocab_size=config.model.vocab_size)

    return open_splits(config, "pairs", open_file, build)


def _open(prefix: str, vocab_size: int, *, needs_both: bool) -> IndexedDataset:
    tokens = IndexedDataset(prefix)
    check_vocabulary(tokens, vocab_size)
    documents = tokens.document_index
    # any dataset may hold a multiple of three sequences: its documents show whether they are pairs
    if len(tokens) % SEQUENCES or not np.array_equal(documents, np.arange(0, len(tokens) + 1, SEQUENCES)):
        raise DataError(
            f"{prefix} holds {len(tokens)} sequences in {tokens.num_documents} documents, not a prompt and two answers "
            f"in each, which task=preference needs; write it with {command_name('preprocess_preferences')}"
        )
    lengths = tokens.lengths.reshape(-1, SEQUENCES)
    unpaired = np.flatnonzero((lengths[:, CHOSEN:] == 0).any(axis=1))
    if needs_both and unpaired.size:
        raise DataError(
            f"{prefix}: {unpaired.size} of {len(lengths)} rows have one answer, row {unpaired[0]} is the first, and "
            "this objective compares two; choose preference_loss=kto, or leave such rows out of the input"
        )
    return tokens


def _usable(file: PairFile, limits: PairLimits, *, refuses: bool) -> NDArray[np.int64]:
    """Return the rows of which enough is left when they are cut.

    The others are counted in a warning, or `refuses` them. Raises DataError.
    """
    stored = file.lengths()
    prompts, answers = limits.prompt_lengths(stored[:, :1]), stored[:, CHOSEN:]
    short = np.zeros(len(stored), np.bool_)
    if limits.truncation == "keep_start":
        short = prompts[:, 0] >= limits.max_length
    # only of answers that are both cut may nothing be left in which they differ
    is_cut = prompts + answers > limits.max_length
    candidates = np.flatnonzero(~short & (answers > 0).all(axis=1) & is_cut.all(axis=1))
    equal = np.zeros(len(stored), np.bool_)
    for number in _ending_alike(file, candidates, prompts[:, 0], answers, limits):
        equal[number] = _are_equal(file, int(number), int(prompts[number, 0]), limits)
    reasons = {
        f"whose prompt has {limits.max_length} tokens or more, so that no answer is left": short,
        "whose answers are equal when they are cut": equal,
    }
    faults = [
        f"{int(left_out.sum())} pairs {reason} (the first is row {int(file.rows[left_out.argmax()])})"
        for reason, left_out in reasons.items()
        if left_out.any()
    ]
    said, remedy = f"{SPLITS[file.split]}: {file.tokens.prefix} has", "raise seq_length, or lower max_prompt_length"
    if faults and refuses:
        raise DataError(f"{said} {', and '.join(faults)}; {remedy}, or take unusable_pairs=skip")
    for fault in faults:
        logger.warning("%s %s; left out: %s", said, fault, remedy)
    return file.rows[~short & ~equal]


def _ending_alike(
    file: PairFile,
    numbers: NDArray[np.int64],
    prompts: NDArray[np.int64],
    answers: NDArray[np.int64],
    limits: PairLimits,
) -> NDArray[np.int64]:
    """Return those of the pairs whose answers have the same token where they are cut.

    Few have, of a million too, so that only those are read whole. Both tokens of all pairs are read at once, by their
    offsets in the file.
    """
    tokens, lengths = file.tokens, answers[numbers]  # [n, 2]
    # the file is indexed below without `read`, which would find that it was truncated
    tokens.files.check()
    if limits.truncation == "keep_start":
        # the last token that is kept
        offsets = np.repeat(limits.max_length - 1 - prompts[numbers, None], 2, axis=1)
    else:
        # the first one; negative where the cut is in the prompt, so that the answers are whole and differ
        offsets = lengths - limits.max_length
    sequences = SEQUENCES * file.rows[numbers, None] + np.array([CHOSEN, REJECTED])
    in_file = tokens.pointers[sequences] // tokens.dtype.itemsize + offsets
    is_inside = (in_file >= 0) & (in_file < len(tokens.tokens))  # what a damaged index says, `read` refuses
    ids = tokens.tokens[np.where(is_inside, in_file, 0)]
    # one that lies outside stays in, so that it comes to `read`
    may_be_alike = (ids[:, 0] == ids[:, 1]) | ~is_inside.all(axis=1)
    return numbers[may_be_alike & (offsets >= 0).all(axis=1)]


def _are_equal(file: PairFile, number: int, prompt_length: int, limits: PairLimits) -> bool:
    """Return True if nothing is left in which the two answers to a prompt differ."""
    left = limits.max_length - prompt_length
    first = SEQUENCES * int(file.rows[number])
    chosen, rejected = (file.tokens.read(first + part) for part in (CHOSEN, REJECTED))
    if limits.truncation == "keep_start":
        return np.array_equal(chosen[:left], rejected[:left])
    if min(len(chosen), len(rejected)) < limits.max_length:
        return False
    return np.array_equal(chosen[-limits.max_length :], rejected[-limits.max_length :])


# Answers one by one, each desirable or not: the samples of objectives that compare no pair.

BALANCED = 1.0, 4 / 3
"""Bounds of the weight of all desirable answers, divided by that of all others. Source: KTO's paper, equation 8."""


class AnswerDataset(SampleDataset[PairFile]):
    """The answers that the rows of a dataset have: one, or both of a pair.

    Each prompt is mismatched with the answer of the sample before it in the order of the first epoch, and the first
    with the last one's. So of B consecutive samples of that epoch, the mismatched answers are their own but for one,
    whatever B is, and log-probabilities under a reference can be stored for all epochs, batch sizes and layouts. Where
    files are mixed by weight, it is the order that they would have without weights.
    """

    def __init__(self, pairs: PairDataset):
        self.pairs = pairs
        self.numbers: NDArray[np.int64] = np.flatnonzero(pairs.labels)
        """[samples] Number of each answer among those of all pairs."""
        self.is_chosen: NDArray[np.bool_] = self.numbers % 2 == 0
        self.labels: NDArray[np.int64] = pairs.labels.reshape(-1)[self.numbers]
        """[samples] Tokens of each answer in the loss."""
        files = [
            replace(file, rows=file.rows[np.flatnonzero(pairs.labels[place]) // 2]) for file, place in pairs.by_file()
        ]
        super().__init__(files, pairs.answer_lengths.reshape(-1)[self.numbers], pairs.weights, pairs.seed)
        order = shuffled(len(self), self.seed, 0)
        others = np.empty_like(self.numbers)
        # the sample before, in the order; roll gives the first the last one's
        others[order] = self.numbers[np.roll(order, 1)]
        self._others: NDArray[np.int64] = np.zeros(pairs.labels.size, np.int64)
        self._others[self.numbers] = others
        self.mismatched_lengths = np.zeros_like(pairs.answer_lengths)
        """[pairs, 2] Places of the prompts with another answer, 0 where a row lacks its own."""
        self.mismatched_lengths.reshape(-1)[self.numbers] = pairs.places_of(self.numbers // 2, others)
        self.mismatched_reference: NDArray[np.float32] | None = None
        """[pairs, 2] Log-probabilities of the mismatched answers under a stored reference, once that is complete."""
        # numbers and order of the answers follow from the pairs
        self.fingerprint = digest("answers", 1, pairs.fingerprint)

    def read(self, sample: int) -> tuple[Answer]:
        """Return the prompt with its answer. Raises DataError for an id outside the vocabulary."""
        return (self.pairs.answer(int(self.numbers[sample])),)

    def mismatched(self, number: int) -> Answer:
        """Return the prompt of an answer, by its number among those of all pairs, with another answer."""
        return self.pairs.sequence(number // 2, int(self._others[number]))

    def counts_of(self, numbers: NDArray[np.int64]) -> tuple[int, int, int]:
        """Return the numbers of chosen answers, of rejected ones, and of tokens of the chosen ones of some samples."""
        chosen = numbers[self.is_chosen[numbers]]
        return len(chosen), len(numbers) - len(chosen), int(self.labels[chosen].sum())

    def are_chosen(self, numbers: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return for each of some samples if it is desirable."""
        return self.is_chosen[numbers]

    def reference_of(self, numbers: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return the log-probability of each of some samples under the stored reference."""
        assert self.pairs.reference is not None
        return self.pairs.reference.reshape(-1)[self.numbers[numbers]]


def open_answers(config: Config) -> list[AnswerDataset | SeparateSets | None]:
    """Return answers for training, validation and test; the last two None if the config leaves none.

    Raises DataError.
    """

    def build(pairs: PairDataset | SeparateSets | None) -> AnswerDataset | SeparateSets | None:
        if isinstance(pairs, SeparateSets):
            return pairs.map(AnswerDataset)
        return None if pairs is None else AnswerDataset(pairs)

    splits = [build(pairs) for pairs in open_pairs(config, needs_both=False)]
    training = splits[0]
    assert isinstance(training, AnswerDataset)
    _warn_of_imbalance(training, config)
    for split, each in zip(SPLITS, splits, strict=True):
        if config.preference.needs_kl and any(len(answers) < 2 for answers in sets_of(each)):
            raise DataError(
                f"the {split} split has one answer, from which preference_loss=kto can estimate no KL divergence; give "
                "more rows, change split, or use preference_loss=apo_zero_unpaired"
            )
    return splits


def _warn_of_imbalance(answers: AnswerDataset, config: Config) -> None:
    """Log a warning if the desirable answers together weigh much more, or less, than the others."""
    options, chosen = config.preference, int(answers.is_chosen.sum())
    rejected = len(answers) - chosen
    weight, other_weight = options.desirable_weight * chosen, options.undesirable_weight * rejected
    least, most = BALANCED
    # rounded, so that the weights that are advised below are within the bounds
    is_balanced = other_weight and least <= round(weight / other_weight, 2) <= round(most, 2)
    if chosen == rejected or is_balanced:
        return
    if chosen and other_weight:
        low, high = (bound * other_weight / chosen for bound in BALANCED)
        advice = f"; a desirable_weight of {low:.3g} to {high:.3g} would balance them"
    else:
        advice = ", so training may raise, or lower, all probabilities alike; add rows of the other kind"
    logger.warning("%d answers are desirable and %d are not%s", chosen, rejected, advice)
