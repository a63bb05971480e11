"""A user's loss function: `--loss package.module:function`, in place of the cross-entropy of a task.

B rows of a microbatch, S tokens of a row, H hidden size; N samples in it, of at most L tokens. docs/guides/own_loss.md
shows functions.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from megatron.options.config import Config, ConfigError
from megatron.options.data import parse_data_path
from megatron.runtime.devices import device_of
from megatron.tasks import loss_function
from megatron.tasks.data import Microbatch, TaskData
from megatron.tasks.loss_result import LossError, LossResult, Metric, MetricTable
from megatron.tasks.objective import Forward, Objective

if TYPE_CHECKING:
    from torch import Tensor

    from megatron.data.label_file import StoredLabels
    from megatron.parallel.context import ParallelContext


@dataclasses.dataclass(frozen=True)
class Targets:
    """The targets of a microbatch by their names."""

    labels: Tensor
    weights: Tensor
    sources: Tensor
    begins: Tensor
    places: Tensor | None = None
    """With `rows` the place b * S + s of each label of a sample, [N, L] int64, -1 for none."""
    teacher: tuple[Tensor, Tensor] | None = None
    """Log-probabilities and ids, both [B, S, K]."""
    reference: Tensor | None = None
    inputs: Tensor | None = None
    """Input tokens [B, S], where the function is a trainer's."""


class UserLoss(Objective):
    """The function and what it needs."""

    draws_numbers = True

    def __init__(self, config: Config, options: Any, data: TaskData) -> None:
        """Raise ConfigError if the function cannot be loaded, or declares what it cannot be given."""
        super().__init__(config, options, data)
        self.function = self._load(config)
        self.label = self.function.label
        self.loss_name = f"{self.function.name.rpartition(':')[2]} loss"
        arguments = self.function.arguments
        self.needs_reference, self.needs_teacher = "reference" in arguments, "teacher" in arguments
        self.stores_reference = self.needs_reference and config.lora.lora_rank is None
        """The reference is the model at the start, and is computed once; else it is the model without its adapters."""
        self.stored_reference: dict[str, StoredLabels] = {}
        """Numbers that are stored for the labels of each dataset, by its fingerprint."""
        self.stored_teacher: dict[str, StoredLabels] = {}
        self._sources = source_numbers(config)
        self._num_sources = 0
        """Datasets of a mix; 0: there is one."""
        if highest := max(self._sources.values(), default=0):
            self._num_sources = 1 + highest
        self._own_metrics: tuple[str, ...] = ()
        """Mean of -log_probs over all labels, and over those of each dataset where there are several."""
        # of hidden states the function may compute anything: no log-probabilities are at hand
        if self.function.takes != "hidden":
            self._own_metrics = ("nll", *(f"nll/{source}" for source in range(self._num_sources)))
        self._reductions = {**dict.fromkeys(self._own_metrics, "mean"), **self.function.metrics}
        self.metrics = tuple(self._reductions)
        self.loss_unit = self._unit
        # a stored reference costs no pass in a step
        self.num_forwards = 1 if self.needs_reference and not self.stores_reference else 0
        self._is_checked = False
        self._is_in_backward = False
        """The gradient of the function's losses is known, that of its first argument not yet."""

    def _load(self, config: Config) -> loss_function.LossFunction:
        return loss_function.loss_function(config)

    @property
    def _unit(self) -> str:
        return "samples" if self.takes_rows else "tokens"

    @property
    def metric_table(self) -> MetricTable:
        """The metrics and their reductions: the mean, unless the function declares another."""
        return MetricTable(self.metrics, tuple(self._reductions.values()))

    @property
    def takes_rows(self) -> bool:
        """The function is given one sample a row, and the loss is divided by samples."""
        return self.function.takes == "rows"

    def faults(self) -> Iterator[str]:
        training, lora = self.config.training, self.config.lora
        uses_base = self.needs_reference and not self.stores_reference
        for name in ("lora_modules_to_save", "lora_bias"):
            if uses_base and getattr(lora, name) not in ((), "none"):
                yield f"{name} trains a part of the base, which is the reference of loss={training.loss}; leave it out"
        if self.function.takes == "hidden" and self.config.parallel.context_parallel_size > 1:
            yield (
                f"loss={training.loss} takes hidden states, and context-parallel ranks have parts of a row each; take "
                f"log_probs or rows, which are of whole rows, or leave out context_parallel_size"
            )
        if self.needs_teacher and not training.teacher:
            yield f"loss={training.loss} takes a teacher; give teacher, the files that a run with teacher_top_k wrote"
        if training.teacher and not self.needs_teacher:
            yield f"teacher={training.teacher[0]} is given, but no loss that takes a teacher; give one, or leave it out"

    def completed(self, dataset: Any, key: Any, batch: Microbatch) -> Microbatch:
        """Return a microbatch of (labels, weights) with the origins of its labels.

        These are, each [B, S]: the place in `data_path` of a label's dataset, and the place in its row at which its
        sample begins; then what is stored for each label.
        """
        import torch

        # those of every task whose own loss is the cross-entropy
        labels, weights = batch.targets
        sources, begins = torch.zeros_like(labels), torch.arange(labels.shape[1]).repeat(len(labels), 1)
        label_places, facts = self.data.labels.places(dataset, key), self.data.facts(dataset)
        for sample, row, places in label_places:
            documents = facts.documents_of(sample)
            if documents is not None:
                sources[row, places] = self._sources.get(documents[0], 0)
            begins[row, places] = places.start or 0
        stored = self.stored_at(self.data.labels.of(dataset).fingerprint, label_places, labels.shape)
        normaliser = batch.normaliser
        if self.loss_unit == "samples":
            # those in the loss: one whose labels are all masked has none
            normaliser = float(sum(bool(weights[row, places].any()) for _, row, places in label_places))
        targets = (labels, weights, sources, begins, *stored)
        return dataclasses.replace(batch, targets=targets, normaliser=normaliser)

    def before_step(
        self, microbatches: Sequence[Microbatch], forward: Forward, ctx: ParallelContext
    ) -> list[Microbatch]:
        if not self.needs_reference or self.stored_reference:
            return list(microbatches)
        references = forward(microbatches, partial(self.log_probs, ctx=ctx), adapters=False)
        if not ctx.is_last_stage:
            return list(microbatches)
        return [batch.with_targets(reference) for batch, reference in zip(microbatches, references, strict=True)]

    # A microbatch

    def loss(self, outputs: tuple[Tensor, Tensor], targets: Any, scale: float, ctx: ParallelContext) -> LossResult:
        """Return the sum of the weighted losses of a microbatch. Raises LossError."""
        import torch

        from megatron.parallel.finite_checks import LOSS_FUNCTION

        given = self._targets(targets)
        # computed before the function could write them
        factors, left_out = given.weights * scale, given.weights == 0
        # nll before the call, so that nothing that the function does to its arguments reaches the log
        first, extras, nll = self._inputs(outputs, given, ctx)
        batch = self._batch(given, outputs[1], ctx)
        if given.places is not None:
            # a whole sample here: its loss counts if any of its labels does
            left_out = (batch.weights == 0).all(1)
            # of a mean over labels a sample counts as often as it has labels
            counts = torch.ones_like(batch.weights[:, 0])
            if self.loss_unit == "tokens":
                counts = batch.weights.sum(1)
            factors = counts * scale
        values = loss_function.LossArguments(first, batch, extras)
        returned = self._call(values, ctx)
        losses, metrics = self._split(returned)
        self._check(losses, left_out, first)
        # the first thing that the backward pass reaches: what follows, until its first argument, is the function's
        if losses.requires_grad:
            losses.register_hook(self._enter_backward)
        # where: what is left out may be NaN, and 0 times NaN is NaN
        total = torch.where(left_out, 0.0, losses * factors).sum()
        ctx.state.checks.number(total, LOSS_FUNCTION)
        return LossResult(total, {**nll, **self._metrics(metrics, values.kept, left_out)})

    def _call(self, values: loss_function.LossArguments, ctx: ParallelContext) -> Any:
        """Call the function. Raises LossError if it raises, or writes what it was given."""
        label = self.function.label
        # a comparison of contents would wait for a device
        is_free = not device_of(ctx.device.type).waits_are_costly
        seen = values.seen(contents=is_free or not self._is_checked, weight=not self._is_checked)
        try:
            with ctx.state.streams.loss(), loss_function.settings_kept(label):
                returned = self.function.call(values.first, values.batch, **values.extras, **self.function.options)
        except LossError:
            raise
        except Exception as error:  # a user's function may raise anything
            line = self.function.line_of(error)
            raise LossError(f"{label} raised {type(error).__name__}: {error}{line}") from error
        if written := values.written_since(seen):
            raise LossError(
                f"{label} wrote into {' and '.join(written)}, which is not its own; compute a new tensor, or write "
                "into a clone()"
            )
        self._is_checked = True
        return returned

    @contextlib.contextmanager
    def naming_faults(self) -> Iterator[None]:
        """Within it raise LossError for an error of the function's backward pass, which autograd runs."""
        self._is_in_backward = False
        try:
            yield
        except Exception as error:
            if not self._is_in_backward:
                raise
            line = self.function.line_of(error)
            raise LossError(
                f"{self.function.label} raised {type(error).__name__} in its backward pass: {error}{line}"
            ) from error

    def _enter_backward(self, _: Tensor) -> None:
        self._is_in_backward = True

    def _targets(self, targets: Any) -> Targets:
        labels, weights, sources, begins, *rest = targets
        named: dict[str, Any] = {}
        if self.takes_rows:
            named["places"] = rest.pop(0)
        if self.needs_teacher:
            named["teacher"] = rest.pop(0), rest.pop(0)
        if rest:
            named["reference"] = rest.pop(0)
        return Targets(labels, weights, sources, begins, **named)

    def _inputs(
        self, outputs: tuple[Tensor, Tensor], given: Targets, ctx: ParallelContext
    ) -> tuple[Tensor, dict[str, Any], dict[str, Metric]]:
        """Return the function's first argument, those after the batch, and the metrics of the log-probabilities.

        What is not in the loss has no gradient: one of 0 times an infinite one would be NaN.
        """
        import torch

        from megatron.parallel.finite_checks import LOSS_INPUT

        if self.function.takes == "hidden":
            # a view, so that the hook sees the gradient from the function alone
            return self._watched(outputs[0].view_as(outputs[0]), ctx), {}, {}
        # [B, S, 1 + K]: the label's log-probability and the teacher's tokens' from one pass over the vocabulary
        ids = given.labels.unsqueeze(-1)
        if given.teacher is not None:
            from megatron.parallel.chosen_log_probs import chosen_log_probs

            found = chosen_log_probs(*outputs, torch.cat([ids, given.teacher[1]], -1), ctx)
        else:
            found = self.log_probs(outputs, (given.labels,), ctx).unsqueeze(-1)
        left_out = (given.weights == 0).unsqueeze(-1)
        ctx.state.checks.whole(found.masked_fill(left_out, 0.0), LOSS_INPUT)
        found = torch.where(left_out, found.detach(), self._watched(found, ctx))
        nll = self._nll(found[..., 0].detach(), given)
        found = loss_function.rows_of(found, given.places, 0.0)
        extras: dict[str, Any] = {}
        if given.teacher is not None:
            log_probs, ids = (loss_function.rows_of(part, given.places, 0) for part in given.teacher)
            extras["teacher"] = loss_function.Teacher(ids, log_probs, found[..., 1:])
        if self.needs_reference:
            assert given.reference is not None
            extras["reference"] = loss_function.rows_of(given.reference, given.places, 0.0)
        return found[..., 0], extras, nll

    def _batch(self, given: Targets, output_weight: Tensor, ctx: ParallelContext) -> loss_function.LossBatch:
        parts = (given.labels, given.weights, given.sources, given.begins)
        tokens, weights, sources, begins = (loss_function.rows_of(part, given.places, 0) for part in parts)
        if given.places is not None:
            # a row is one sample, which begins at 0
            begins = begins.new_zeros(begins.shape)
        labels = tokens.masked_fill(weights == 0, loss_function.IGNORED)
        return loss_function.LossBatch(labels, weights, sources, begins, output_weight, ctx, tokens)

    def _watched(self, x: Tensor, ctx: ParallelContext) -> Tensor:
        """Return `x`, whose gradient, which the function makes, is checked for numbers that are not finite."""
        from megatron.parallel.finite_checks import LOSS_GRADIENT

        def leave_backward(grad: Tensor) -> None:
            self._is_in_backward = False
            ctx.state.checks.whole(grad, LOSS_GRADIENT)

        if x.requires_grad:
            x.register_hook(leave_backward)
        return x

    @staticmethod
    def log_probs(outputs: tuple[Tensor, Tensor], targets: Any, ctx: ParallelContext) -> Tensor:
        """Return the log-probability of each label, [B, S] float32."""
        from megatron.parallel.losses import token_log_probs

        return token_log_probs(*outputs, targets[0], ctx)

    # What it is given beside the model's outputs

    def stored_at(
        self, fingerprint: str, places: Sequence[tuple[int, int, slice]], shape: Sequence[int]
    ) -> list[Tensor]:
        """Return what belongs to the labels of a microbatch of `shape` [B, S], on the host.

        That is, where the function takes it: the place of each label of a sample [N, L]; log-probabilities and ids of
        the teacher's tokens, both [B, S, K]; the reference [B, S], if it is stored.
        """
        import torch

        targets = []
        if self.takes_rows:
            targets.append(loss_function.row_places(places, shape))
        for stored in (self.stored_teacher, self.stored_reference):
            if fingerprint in stored:
                targets += map(torch.from_numpy, stored[fingerprint].read(places, shape))
        return targets

    # What it returns

    def _split(self, returned: Any) -> tuple[Any, Mapping[str, Any]]:
        """Return the losses and the metrics of what the function returned."""
        declared, label = self.function.metrics, self.function.label
        if not declared:
            return returned, {}
        if not isinstance(returned, tuple) or len(returned) != 2 or not isinstance(returned[1], Mapping):
            raise LossError(
                f"{label} declares the metrics {', '.join(declared)} and returned a {type(returned).__name__}; return "
                "the losses and a dict of these"
            )
        if set(returned[1]) != set(declared):
            raise LossError(
                f"{label} declares the metrics {', '.join(declared)} and returned {', '.join(returned[1]) or 'none'}; "
                "make them equal"
            )
        return returned

    def _check(self, losses: Any, left_out: Tensor, first: Tensor) -> None:
        import torch

        label, unit = self.function.label, "sample" if self.takes_rows else "label"
        if isinstance(losses, tuple) and not self.function.metrics:
            raise LossError(f"{label} returned a tuple, but declares no metrics; set its attribute `metrics`")
        if not isinstance(losses, torch.Tensor):
            raise LossError(f"{label} returned a {type(losses).__name__}; return a tensor {_shape(left_out)}")
        if losses.shape != left_out.shape or not losses.is_floating_point():
            raise LossError(
                f"{label} returned {losses.dtype} {_shape(losses)}; return the loss of each {unit}, of which the sum "
                f"is taken and divided over the whole global batch: floating point {_shape(left_out)}"
            )
        if torch.is_grad_enabled() and first.requires_grad and not losses.requires_grad:
            raise LossError(
                f"{label} returned losses without a gradient; compute them of its first argument, without detach() or "
                "item()"
            )

    def _metrics(self, values: Mapping[str, Any], kept: Tensor, left_out: Tensor) -> dict[str, Metric]:
        """Return the function's own metrics; `kept`: weights of its labels, `left_out`: what has no loss."""
        found = {}
        for name, reduction in self.function.metrics.items():
            value = values[name]
            shape = getattr(value, "shape", None)
            if shape == kept.shape:
                found[name] = reduced(value, kept, reduction)
            elif shape == left_out.shape:
                found[name] = reduced(value, (~left_out).float(), reduction)
            else:
                shapes, what = _shape(kept), type(value).__name__
                if self.takes_rows:
                    shapes += f", or of each sample {_shape(left_out)}"
                if shape is not None:
                    what = f"tensor {list(shape)}"
                raise LossError(
                    f"{self.function.label} returned a {what} as metric {name}; return its value of each label "
                    f"{shapes}, so that it does not depend on the microbatches"
                )
        return found

    def _nll(self, log_probs: Tensor, given: Targets) -> dict[str, Metric]:
        nll = -log_probs.masked_fill(given.weights == 0, 0.0) * given.weights
        chosen = [given.sources >= 0, *(given.sources == source for source in range(self._num_sources))]
        return {
            name: Metric((nll * mask).sum(), (given.weights * mask).sum())
            for name, mask in zip(self._own_metrics, chosen, strict=True)
        }


def reduced(values: Tensor, weights: Tensor, reduction: str) -> Metric:
    """Return a metric of a microbatch from its values; those of weight 0 are left out."""
    import torch

    left_out, values = weights == 0, values.detach().float()
    if reduction == "mean":
        return Metric((values.masked_fill(left_out, 0.0) * weights).sum(), weights.sum())
    if reduction == "sum":
        return Metric(values.masked_fill(left_out, 0.0).sum(), 1.0)
    largest = values.masked_fill(left_out, -torch.inf).max()
    # a maximum over ranks may lose NaN, a sum does not
    return Metric(largest, torch.where(largest.isnan(), torch.nan, (~left_out).sum().float()))


def source_numbers(config: Config) -> dict[str, int]:
    """Return the place of each dataset in its list of paths. Raises ConfigError for one at two places."""
    found: dict[str, int] = {}
    for option, words in config.data.paths:
        try:
            prefixes = parse_data_path(words)[0] if words else []
        except ValueError:  # reported by the validation of the data options
            continue
        for number, prefix in enumerate(prefixes):
            if found.setdefault(prefix, number) != number:
                raise ConfigError(
                    [f"{option} has {prefix} at two places, which loss numbers its sources by; name it at one"]
                )
    return found


def _shape(tensor: Tensor) -> str:
    return str(list(tensor.shape))
