"""Preference training: answers that are preferred to others, packed so that few tokens are padding.

B rows of a microbatch, S places of a row, P pairs in it. A row holds one pair after another, each the prompt with the
chosen answer and the prompt with the rejected one. A token sees its own sequence alone; positions restart with each.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from megatron.config.dependents import idle_options
from megatron.tasks.loss_result import LossResult, Metric
from megatron.tasks.packed import PackedTask, samples_of
from megatron.tasks.task import Forward, Microbatch, StartWeights

if TYPE_CHECKING:
    from torch import Tensor

    from megatron.data.preference.dataset import PairDataset
    from megatron.parallel.context import ParallelContext
    from megatron.tasks.packed import PackedDataset, Rows
    from megatron.tasks.preference_losses import PairScores


@dataclasses.dataclass(frozen=True)
class PairRows:
    """A microbatch by the numbers of its pairs, and what its loss needs to know of the whole step."""

    rows: Rows
    pairs_per_label: float
    """Pairs of the step, divided by the tokens of their chosen answers."""


class PreferenceTask(PackedTask):
    """DPO and related objectives over pairs of answers."""

    sections: ClassVar[tuple[str, ...]] = ("preference", "sft")
    sample_name = "pair"
    loss_unit = "pairs"
    preprocessor = "preprocess_preferences"
    metrics = (
        "rewards/accuracies",
        "rewards/margins",
        "rewards/chosen",
        "rewards/rejected",
        "logps/chosen",
        "logps/rejected",
    )
    order_options: ClassVar[tuple[str, ...]] = (
        *PackedTask.order_options,
        "preference.max_prompt_length",
        "preference.truncation",
    )

    # Rules and plan

    def faults(self, world_size: int) -> Iterator[str]:
        yield from super().faults(world_size)
        options, lora = self.config.preference, self.config.lora
        limit, longest = options.max_prompt_length, self.config.training.seq_length
        if limit is not None and limit > longest:
            yield (
                f"max_prompt_length={limit} leaves no token of an answer in seq_length={longest} and one more; lower "
                "it, or raise seq_length"
            )
        if options.needs_reference and options.reference == "adapters_off" and lora.lora_rank is None:
            yield "reference=adapters_off needs adapters; give lora_rank, or use reference=stored"
        whole = [name for name in ("lora_modules_to_save", "lora_bias") if getattr(lora, name) not in ((), "none")]
        if whole and self.uses_base:
            value = getattr(lora, whole[0])
            yield (
                f"{whole[0]}={value if isinstance(value, str) else ' '.join(value)} trains a part of the base, which "
                "is the reference of reference=adapters_off; leave it out, or use reference=stored"
            )

    def idle(self) -> Iterator[str]:
        yield from super().idle()
        options = self.config.preference
        for objective, name in (("robust", "label_smoothing"), ("simpo", "simpo_gamma")):
            if options.preference_loss != objective:
                yield from idle_options(self.config, f"preference_loss={objective}", "choose that", [name])
        if not options.needs_reference:
            needed = f"a reference, which preference_loss={options.preference_loss} does not need"
            yield from idle_options(self.config, needed, "choose another objective", ["reference"])

    @property
    def uses_base(self) -> bool:
        """The reference is the base of the adapters, computed before each step."""
        options, has_base = self.config.preference, self.config.lora.lora_rank is not None
        return options.needs_reference and (has_base if options.reference == "auto" else options.reference != "stored")

    @property
    def stores_reference(self) -> bool:
        """The reference is computed once and stored beside the data."""
        return self.config.preference.needs_reference and not self.uses_base

    @property
    def sample_length(self) -> int:
        return 2 * self.config.training.seq_length

    # The data

    def open_samples(self) -> Sequence[Any]:
        from megatron.data.preference.dataset import open_pairs

        return open_pairs(self.config, needs_both=True)

    def describe(self, dataset: Any) -> str:
        pairs: PairDataset = samples_of(dataset)
        rows = "" if pairs is dataset else f" in {len(dataset):,} rows"
        tokens, share = self.share_of_epoch(dataset, pairs.labels.sum(axis=1))
        cut = [(pairs.num_cut_prompts, "prompts"), (pairs.num_truncated, "answers")]
        said = ", ".join(f"{count:,} {what} cut" for count, what in cut if count)
        return (
            f"preference: {len(pairs):,} pairs{rows}, {tokens:,} tokens an epoch, {share:.1%} of them answers"
            f"{f', {said}' if said else ''}; {self.describe_packing(dataset)}"
        )

    def keys_of_step(self, dataset: PackedDataset, cells: Sequence[Rows]) -> Sequence[Any]:
        pairs: PairDataset = samples_of(dataset)
        numbers = [int(pair) for rows in cells for row in rows for pair in row]
        factor = len(numbers) / max(1, int(pairs.labels[numbers, 0].sum()))
        return [PairRows(rows, factor) for rows in cells]

    def samples_of(self, key: PairRows) -> list[int]:
        return super().samples_of(key.rows)

    def read(self, dataset: PackedDataset, key: PairRows) -> Microbatch:
        """Return a microbatch of packed pairs. Its targets, of K tokens that are predicted, are:

        - labels [K], -1 outside of answers
        - for each label, the index of its answer [K]
        - for each label, its place s * B + b [K]
        - numbers of tokens of the answers [P, 2]
        - factor of the supervised term [1]
        - log-probabilities of the answers under the reference [P, 2], if they are stored
        """
        import numpy as np
        import torch

        pairs: PairDataset = samples_of(dataset)
        read = [[side for pair in row for side in pairs.read(int(pair))] for row in key.rows]
        rows = self.filled_rows([[side.ids for side in row] for row in read])
        labels, numbers = np.full_like(rows.labels, -1), np.zeros_like(rows.labels)
        sides = [side for row in read for side in row]
        lengths = np.zeros((len(sides) // 2, 2), np.float32)
        for number, ((row, places), side) in enumerate(zip(rows.places, sides, strict=True)):
            answer = row, slice(places.start + side.begin - 1, places.stop)
            labels[answer], numbers[answer] = rows.labels[answer], number
            lengths[divmod(number, 2)] = len(side.ids) - side.begin
        of_labels = labels.T.ravel(), numbers.T.ravel()
        # a number of labels that varies would be a further shape
        kept = np.flatnonzero(of_labels[0] >= 0) if self.bucketing == "off" else np.arange(labels.size)
        factor = np.array([key.pairs_per_label], np.float32)
        stored = [] if pairs.reference is None else [pairs.reference[self.samples_of(key)]]
        parts = (*(part[kept] for part in of_labels), kept, lengths, factor, *stored)
        targets = tuple(torch.from_numpy(part) for part in parts)
        return Microbatch(rows.inputs, targets, float(len(lengths)))

    # The loss

    def before_step(
        self, microbatches: Sequence[Microbatch], forward: Forward, ctx: ParallelContext
    ) -> list[Microbatch]:
        """Add the log-probabilities of the answers under the base, if that is the reference."""
        if not self.uses_base:
            return list(microbatches)
        from megatron.tasks.preference_losses import answer_logps

        found = forward(microbatches, partial(answer_logps, ctx=ctx), adapters=False)
        if not ctx.is_last_stage:
            return list(microbatches)
        return [
            dataclasses.replace(batch, targets=(*batch.targets, reference))
            for batch, reference in zip(microbatches, found, strict=True)
        ]

    def before_training(
        self, datasets: Sequence[Any], forward: Forward, start: StartWeights, ctx: ParallelContext
    ) -> list[str]:
        """Compute the reference of all pairs that lack it, and give it to the datasets. Raises DataError."""
        if not self.stores_reference:
            return []
        from megatron.data.separate_sets import sets_of
        from megatron.tasks.stored_reference import StoredReference

        references = [
            StoredReference(self, samples_of(dataset), start, ctx) for each in datasets for dataset in sets_of(each)
        ]
        return [line for reference in references for line in reference.complete(forward)]

    def loss(self, outputs: tuple[Tensor, Tensor], targets: Any, scale: float, ctx: ParallelContext) -> LossResult:
        """Return the sum over pairs, and the metrics, each a sum over pairs and their number."""
        from megatron.tasks.preference_losses import PAIR_LOSSES, PairScores, answer_logps

        options = self.config.preference
        _, _, _, lengths_P2, factor, *reference = targets
        sums_P2 = answer_logps(outputs, targets, ctx)
        scores = PairScores(sums_P2, reference[0], lengths_P2) if options.needs_reference else None
        if scores is None:
            scores = PairScores(sums_P2 / lengths_P2.clamp(min=1), 0.0, lengths_P2)
        losses = PAIR_LOSSES[options.preference_loss](scores, options).sum()
        if weight := options.effective_sft_weight:
            losses = losses - weight * factor.squeeze() * sums_P2[:, 0].sum()
        return LossResult(scale * losses, self._metrics(scores))

    def _metrics(self, scores: PairScores) -> dict[str, Metric]:
        rewards_P2 = (self.config.preference.beta * scores.ratios_P2).detach()
        logps_P2, margins = scores.logps_P2.detach(), rewards_P2[:, 0] - rewards_P2[:, 1]
        values = (
            (margins > 0).float(),
            margins,
            *rewards_P2.unbind(1),
            *logps_P2.unbind(1),
        )
        return {name: Metric(value.sum(), float(len(value))) for name, value in zip(self.metrics, values, strict=True)}


TASK = PreferenceTask
