"""Answers one by one, each desirable or not: the samples of objectives that compare no pair."""

from __future__ import annotations

import logging
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from megatron.config.options import Config
from megatron.data.blend import digest
from megatron.data.epochs import shuffled
from megatron.data.gpt import SPLITS
from megatron.data.indexed import DataError
from megatron.data.preference.dataset import Answer, PairDataset, PairFile, open_pairs
from megatron.data.samples import SampleDataset
from megatron.data.separate_sets import SeparateSets, sets_of

logger = logging.getLogger(__name__)

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
        others[order] = self.numbers[np.roll(order, 1)]
        self._others: NDArray[np.int64] = np.zeros(pairs.labels.size, np.int64)
        self._others[self.numbers] = others
        self.mismatched_lengths = np.zeros_like(pairs.answer_lengths)
        """[pairs, 2] Places of the prompts with another answer, 0 where a row lacks its own."""
        self.mismatched_lengths.reshape(-1)[self.numbers] = pairs.lengths_of(self.numbers // 2, others)
        self.mismatched_reference: NDArray[np.float32] | None = None
        """[pairs, 2] Log-probabilities of the mismatched answers under a stored reference, once that is complete."""
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

    found = [build(pairs) for pairs in open_pairs(config, needs_both=False)]
    assert isinstance(found[0], AnswerDataset)
    _warn_of_imbalance(found[0], config)
    for split, each in zip(SPLITS, found, strict=True):
        if config.preference.needs_kl and any(len(answers) < 2 for answers in sets_of(each)):
            raise DataError(
                f"the {split} split has one answer, from which preference_loss=kto can estimate no KL divergence; give "
                "more rows, change split, or use preference_loss=apo_zero_unpaired"
            )
    return found


def _warn_of_imbalance(answers: AnswerDataset, config: Config) -> None:
    """Log a warning if the desirable answers together weigh much more, or less, than the others."""
    options, chosen = config.preference, int(answers.is_chosen.sum())
    rejected = len(answers) - chosen
    least, most = BALANCED
    weights = options.desirable_weight * chosen, options.undesirable_weight * rejected
    if chosen == rejected or (weights[1] and least <= round(weights[0] / weights[1], 2) <= round(most, 2)):
        return
    advice = ", so training may raise, or lower, all probabilities alike; add rows of the other kind"
    if chosen and rejected and options.undesirable_weight:
        low, high = (bound * options.undesirable_weight * rejected / chosen for bound in BALANCED)
        advice = f"; a desirable_weight of {low:.3g} to {high:.3g} would balance them"
    logger.warning("%d answers are desirable and %d are not%s", chosen, rejected, advice)
