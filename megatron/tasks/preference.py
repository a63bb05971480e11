"""Preference training: answers that are preferred to others, packed so that few tokens are padding.

B rows of a microbatch, S places of a row, A answers in it. A row holds one sequence after another, each a prompt with
an answer; those of a pair follow each other. A token sees its own sequence alone; positions restart with each.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from megatron.options.config import Config
from megatron.options.dependents import idle_options
from megatron.options.preference import OBJECTIVES
from megatron.tasks.data import Microbatch, TaskData
from megatron.tasks.loss_result import LossResult
from megatron.tasks.objective import Forward, Objective, StartWeights
from megatron.tasks.packed import PackedData, PackedFacts, samples_of
from megatron.tasks.task import Task

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from megatron.data.preference.dataset import Answer, AnswerDataset, PairDataset
    from megatron.parallel.context import ParallelContext
    from megatron.tasks.packed import PackedDataset, Rows


@dataclasses.dataclass(frozen=True)
class StepRows:
    """A microbatch by the numbers of its samples, and facts of the whole step that its loss uses."""

    rows: Rows
    step: NDArray[np.float32]
    """[3] Samples of the step, divided by the tokens of its chosen answers; its chosen and its rejected answers."""
    mismatched: Rows = dataclasses.field(default_factory=list)
    """Numbers, among those of all pairs, of answers whose prompts are read with other answers, for the KL term."""


def uses_base(config: Config) -> bool:
    """Return True if the reference is the base of the adapters, computed before each step."""
    options, has_base = config.preference, config.lora.lora_rank is not None
    if not options.needs_reference:
        return False
    # the base of adapters is there anyway, so that nothing need be stored
    return has_base if options.reference == "auto" else options.reference != "stored"


def stores_reference(config: Config) -> bool:
    """Return True if the reference is computed once and stored beside the data."""
    return config.preference.needs_reference and not uses_base(config)


class PreferenceFacts(PackedFacts):
    data: PreferenceData

    def describe(self) -> str:
        samples, name = self.samples, self.data.sample_name
        pairs = self.data.pairs_of(samples)
        # labels of a pair: those of both answers
        tokens, share = self.share_of_epoch(samples.labels.reshape(len(samples), -1).sum(axis=1))
        counted = f"{len(samples):,} {name}s"
        if pairs is not samples:
            counted += f" ({int(samples.is_chosen.sum()):,} of them desirable)"
        if samples is not self.dataset:
            counted += f" in {len(self.dataset):,} rows"
        parts = [f"preference: {counted}", f"{tokens:,} tokens an epoch", f"{share:.1%} of them answers"]
        cut = [(pairs.num_cut_prompts, "prompts"), (pairs.num_truncated, "answers")]
        parts += [f"{count:,} {what} cut" for count, what in cut if count]
        return f"{', '.join(parts)}; {self.describe_packing()}"


class PreferenceData(PackedData):
    """Pairs of answers, or single ones."""

    Facts = PreferenceFacts
    sample_name = "pair"
    content = "pairs"
    preprocessor = "preprocess_preferences"
    order_options: ClassVar[tuple[str, ...]] = (
        *PackedData.order_options,
        "preference.max_prompt_length",
        "preference.truncation",
    )

    def __init__(self, config: Config, options: Any) -> None:
        super().__init__(config, options)
        if config.preference.is_unpaired:
            self.sample_name = "answer"

    def faults(self, world_size: int) -> Iterator[str]:
        yield from super().faults(world_size)
        longest = self.config.training.seq_length
        limit = self.config.preference.prompt_limit(longest)
        if limit is not None and limit > longest:
            yield (
                f"max_prompt_length={limit} leaves no token of an answer in seq_length={longest} and one more; lower "
                "it, or raise seq_length"
            )

    @property
    def sample_length(self) -> int:
        return self.config.training.seq_length * self.answers_per_sample

    @property
    def answers_per_sample(self) -> int:
        return 1 if self.config.preference.is_unpaired else 2

    def open_samples(self) -> Sequence[Any]:
        from megatron.data.preference.dataset import open_answers, open_pairs

        if self.config.preference.is_unpaired:
            return open_answers(self.config)
        return open_pairs(self.config, needs_both=True)

    def pairs_of(self, samples: Any) -> PairDataset:
        return samples.pairs if self.config.preference.is_unpaired else samples  # type: ignore[no-any-return]

    def keys_of_step(self, dataset: PackedDataset, cells: Sequence[Rows]) -> Sequence[Any]:
        import numpy as np

        samples: PairDataset | AnswerDataset = samples_of(dataset)
        # those of the whole step, of all ranks: its loss divides by their counts
        numbers = np.array([int(sample) for rows in cells for row in rows for sample in row], np.int64)
        num_chosen, num_rejected, tokens = samples.counts_of(numbers)
        # the engine divides by samples; the loss of chosen answers beside the objective is a mean over their tokens
        step = np.array([len(numbers) / max(1, tokens), num_chosen, num_rejected], np.float32)
        if not self.config.preference.needs_kl:
            return [StepRows(rows, step) for rows in cells]
        answers: Any = samples
        # sorted: the packing of the others then depends on the step's answers alone, not on how these were dealt
        found = np.sort(answers.numbers[numbers])
        beside = self.packed_sequences(answers.mismatched_lengths.reshape(-1)[found], self.layout.num_batch_ranks)
        mismatched = [[found[row] for row in rows] for rows in beside]
        # one list of microbatches for both: the shorter is filled up with empty ones
        empty: Rows = [numbers[:0]] * self.config.training.micro_batch_size
        pairs = itertools.zip_longest(cells, mismatched, fillvalue=empty)
        return [StepRows(rows, step, others) for rows, others in pairs]

    def samples_of(self, key: StepRows) -> list[int]:
        return super().samples_of(key.rows)

    def shape_of(self, dataset: PackedDataset, key: StepRows) -> tuple[int, ...]:
        samples: Any = samples_of(dataset)
        shape = (*super().shape_of(dataset, key.rows), len(self.samples_of(key)))
        if not self.config.preference.needs_kl:
            return shape
        beside = self._shape_of_rows(samples.mismatched_lengths.reshape(-1), key.mismatched)
        return (*shape, *beside, sum(map(len, key.mismatched)))

    def read(self, dataset: PackedDataset, key: StepRows) -> Microbatch:
        """Return a microbatch. Its targets are those of `sequences`, then

        - for each answer, if it is the chosen or desirable one [A]
        - `StepRows.step` [3]
        - log-probabilities of the answers under the reference [A], if they are stored
        """
        import numpy as np

        samples: PairDataset | AnswerDataset = samples_of(dataset)
        rows = [[one for sample in row for one in samples.read(int(sample))] for row in key.rows]
        numbers = np.array(self.samples_of(key), np.int64)
        added = [samples.are_chosen(numbers), key.step]
        if stores_reference(self.config):
            added.append(samples.reference_of(numbers))
        found = self.sequences(rows, added)
        if not self.config.preference.needs_kl:
            return found
        return dataclasses.replace(found, beside=self._mismatched(samples, key.mismatched))

    def _mismatched(self, answers: Any, rows: Rows) -> Microbatch:
        """Return the prompts of answers with other answers."""
        import numpy as np

        added = []
        if stores_reference(self.config) and answers.mismatched_reference is not None:
            added.append(answers.mismatched_reference.reshape(-1)[np.concatenate(rows)])
        return self.answers(answers.mismatched, rows, added)

    def answers(self, read: Callable[[int], Answer], rows: Rows, added: Sequence[NDArray[Any]] = ()) -> Microbatch:
        return self.sequences([[read(int(number)) for number in row] for row in rows], added)

    def sequences(self, rows: Sequence[Sequence[Answer]], added: Sequence[NDArray[Any]] = ()) -> Microbatch:
        """Lay out rows of prompts with an answer each. The targets are, before `added`:

        - labels [K] of the K tokens that are predicted, -1 outside of answers
        - for each label, the index of its answer [K]
        - for each label, its place s * B + b [K]
        - numbers of tokens of the answers [A]
        - for each label, its weight in the log-probability of its answer [K]
        - the result of `own_labels`
        """
        import numpy as np
        import torch

        from megatron.parallel.chosen_log_probs import own_labels

        filled = self.filled_rows([[side.ids for side in row] for row in rows])
        labels, numbers = np.full_like(filled.labels, -1), np.zeros_like(filled.labels)
        weights, ld_alpha = np.ones(labels.shape, np.float32), self.config.preference.ld_alpha
        sides = [side for row in rows for side in row]
        # numbered over all answers of the microbatch, in the order of its rows
        for number, ((row, places), side) in enumerate(zip(filled.places, sides, strict=True)):
            # the last token of the prompt predicts the first of the answer
            answer = row, slice(places.start + side.begin - 1, places.stop)
            labels[answer], numbers[answer] = filled.labels[answer], number
            if ld_alpha is not None and side.shared is not None:
                weights[row, places.start + side.begin - 1 + side.shared : places.stop] = ld_alpha
        # float, since means divide by them
        lengths = np.array([len(side.ids) - side.begin for side in sides], np.float32)
        # a number of labels that varies would be a further shape
        kept = np.flatnonzero(labels.T.ravel() >= 0) if self.bucketing == "off" else np.arange(labels.size)
        of_labels, of_numbers, of_weights = (part.T.ravel()[kept] for part in (labels, numbers, weights))
        own = own_labels(kept, labels.shape, self.layout)
        parts = (of_labels, of_numbers, kept, lengths, of_weights, own, *added)
        targets = tuple(torch.from_numpy(part) for part in parts)
        return Microbatch(filled.inputs, targets, float(sum(map(len, rows)) / self.answers_per_sample))


class PreferenceObjective(Objective):
    """DPO and related objectives over pairs of answers; KTO and APO-zero over single ones."""

    data: PreferenceData
    loss_unit = "pairs"
    metrics = (
        "rewards/accuracies",
        "rewards/margins",
        "rewards/chosen",
        "rewards/rejected",
        "logps/chosen",
        "logps/rejected",
    )

    def __init__(self, config: Config, options: Any, data: TaskData) -> None:
        super().__init__(config, options, data)
        self.loss_name = f"{config.preference.preference_loss} loss"
        self.num_forwards = self._num_forwards()
        if config.preference.is_unpaired:
            self.loss_unit = "answers"
            self.metrics = (
                "rewards/margins",
                "rewards/chosen",
                "rewards/rejected",
                "kl",
                "logps/chosen",
                "logps/rejected",
            )

    def _num_forwards(self) -> int:
        """Passes of the base over the answers, and of model and base over the mismatched ones of the KL term."""
        of_base, of_kl = int(uses_base(self.config)), int(self.config.preference.needs_kl)
        return of_base + of_kl * (1 + of_base)

    def faults(self) -> Iterator[str]:
        options, lora = self.config.preference, self.config.lora
        if options.needs_reference and options.reference == "adapters_off" and lora.lora_rank is None:
            yield "reference=adapters_off needs adapters; give lora_rank, or use reference=stored"
        yield from self._unread_options()
        if options.preference_loss == "exo_pair" and not options.label_smoothing:
            yield "label_smoothing=0.0 makes the loss of preference_loss=exo_pair infinite; give one, such as 0.001"
        if options.needs_kl and self.config.training.global_batch_size == 1:
            yield (
                "global_batch_size=1 is one answer a step, from which preference_loss=kto can estimate no KL "
                "divergence; use 2 or more, or preference_loss=apo_zero_unpaired"
            )
        # trained without an adapter, so that switching adapters off would not give the base back
        whole = [name for name in ("lora_modules_to_save", "lora_bias") if getattr(lora, name) not in ((), "none")]
        if whole and uses_base(self.config):
            value = getattr(lora, whole[0])
            yield (
                f"{whole[0]}={value if isinstance(value, str) else ' '.join(value)} trains a part of the base, which "
                "is the reference of reference=adapters_off; leave it out, or use reference=stored"
            )

    def _unread_options(self) -> Iterator[str]:
        """Yield a message for each option of other objectives than this one: it would be another loss than is meant."""
        readers: dict[str, list[str]] = {}
        for objective, needs in OBJECTIVES.items():
            for name in needs.options:
                readers.setdefault(name, []).append(objective)
        own = self.config.preference.preference_loss
        for name, objectives in readers.items():
            if own in objectives:
                continue
            remedy = "choose that" if len(objectives) == 1 else "choose one of these"
            needed = f"preference_loss={', '.join(objectives)}, unlike {own}"
            yield from idle_options(self.config, needed, remedy, [name])

    def idle(self) -> Iterator[str]:
        options = self.config.preference
        if options.f_divergence != "alpha_divergence":
            yield from idle_options(self.config, "f_divergence=alpha_divergence", "choose that", ["f_alpha"])
        if not options.needs_reference:
            needed = f"a reference, which preference_loss={options.preference_loss} does not need"
            yield from idle_options(self.config, needed, "choose another objective", ["reference"])

    def before_step(
        self, microbatches: Sequence[Microbatch], forward: Forward, ctx: ParallelContext
    ) -> list[Microbatch]:
        """Add the reference to the targets, where that is the base of the adapters, and the KL term, if any."""
        batches = list(microbatches)
        if uses_base(self.config):
            batches = self._with_base(batches, forward, ctx)
        if self.config.preference.needs_kl:
            batches = self._with_kl(batches, forward, ctx)
        return batches

    def _with_base(self, batches: list[Microbatch], forward: Forward, ctx: ParallelContext) -> list[Microbatch]:
        """Add the log-probabilities of the answers under the base."""
        from megatron.tasks.preference_losses import answer_logps

        results = forward(batches, partial(answer_logps, ctx=ctx), adapters=False)
        if not ctx.is_last_stage:  # the others get no results, and compute no loss
            return batches
        return [batch.with_targets(result) for batch, result in zip(batches, results, strict=True)]

    def _with_kl(self, batches: list[Microbatch], forward: Forward, ctx: ParallelContext) -> list[Microbatch]:
        """Add the KL divergence of the step, from prompts that are read with other answers."""
        from megatron.tasks.preference_losses import answer_logps, mean_kl, split_targets

        logps = partial(answer_logps, ctx=ctx)
        # no rank has fewer microbatches of it than others: their passes are collective
        beside = [batch.beside for batch in batches if batch.beside is not None]
        policy = forward(beside, logps)
        base = forward(beside, logps, adapters=False) if uses_base(self.config) else []
        if not ctx.is_last_stage:
            return batches
        if not uses_base(self.config):
            # what is stored for a mismatched answer is all that follows its labels
            base = [split_targets(batch.targets)[1][0].to(ctx.device) for batch in beside]
        # each microbatch has the numbers of the whole step
        _, (_, step, *_) = split_targets(batches[0].targets)
        kl = mean_kl(policy, base, float(step[1:].sum()), ctx)
        return [batch.with_targets(kl) for batch in batches]

    def before_training(
        self, datasets: Sequence[Any], forward: Forward, start: StartWeights, ctx: ParallelContext
    ) -> list[str]:
        """Compute the reference of all answers that lack it, and give it to the datasets. Raises DataError."""
        if not stores_reference(self.config):
            return []
        from megatron.data.blend import sets_of
        from megatron.tasks.stored_reference import StoredReference

        lines = []
        for samples in (samples_of(dataset) for each in datasets for dataset in sets_of(each)):
            pairs = self.data.pairs_of(samples)
            read = partial(self.data.answers, pairs.answer)
            own = StoredReference(self.data, pairs, pairs.answer_lengths, read, start, ctx)
            pairs.reference = own.complete(forward)
            lines += own.lines
            if self.config.preference.needs_kl:
                read, lengths = partial(self.data.answers, samples.mismatched), samples.mismatched_lengths
                others = StoredReference(self.data, pairs, lengths, read, start, ctx, samples.fingerprint)
                samples.mismatched_reference = others.complete(forward)
                lines += others.lines
        return lines

    def loss(self, outputs: tuple[Tensor, Tensor], targets: Any, scale: float, ctx: ParallelContext) -> LossResult:
        """Return the sum over samples, and the metrics, each a sum over samples and their number."""
        import torch

        from megatron.tasks.preference_losses import label_logps, paired_loss, split_targets, unpaired_loss

        options = self.config.preference
        labels, (is_chosen_A, step, *_) = split_targets(targets)
        logps_K = label_logps(outputs, labels, ctx)
        logps_A = labels.sums(logps_K * labels.weights_K)
        loss_of = unpaired_loss if options.is_unpaired else paired_loss
        total, metrics = loss_of(logps_A, targets, options)
        if weight := options.effective_sft_weight:
            total = total - weight * step[0] * torch.where(is_chosen_A, labels.sums(logps_K), 0).sum()
        return LossResult(scale * total, metrics)


class PreferenceTask(Task):
    """Answers that are preferred to others."""

    Data = PreferenceData
    data: PreferenceData
    Objective = PreferenceObjective
    sections = ("preference", "sft")
