"""A user's loss function: `--loss package.module:function`, in place of the cross-entropy of a task.

B rows of a microbatch, S tokens of a row, H hidden size; N samples in it, of at most L tokens. docs/guides/own_loss.md
shows functions.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron.options.config import Config, ConfigError
from megatron.options.data import parse_data_path
from megatron.tasks.loss_function import loss_function
from megatron.tasks.loss_result import LossError, LossResult, Metric

if TYPE_CHECKING:
    from torch import Tensor

    from megatron.data.label_file import StoredLabels
    from megatron.parallel.context import ParallelContext

IGNORED = -100
"""Label of what is not in the loss, as in torch and transformers."""


# Torch has no tensor that refuses to be written: what the loss needs afterwards is computed before the user's
# function, and version counters are compared after it.
@dataclasses.dataclass(frozen=True)
class LossBatch:
    """Microbatch as a loss function sees it: [B, S], or with `rows` [N, L]. Its tensors are not to be written."""

    labels: Tensor
    """Next tokens, int64; IGNORED where the weight is 0."""
    weights: Tensor
    """Weight of each label in the loss, float32; 0: the label does not count."""
    sources: Tensor
    """Place in `data_path` of the dataset that each label is from, int64, from 0."""
    begins: Tensor
    """Place in its row at which the sample of each label begins, int64: a chat, or in pretraining the row."""
    output_weight: Tensor
    """This rank's rows of the vocabulary: input of `megatron.parallel.losses`."""
    ctx: ParallelContext
    tokens: Tensor | None = None
    """Next tokens, int64, also where they are not in the loss; 0 where there is no sample. None: made by hand."""

    def sample_sums(self, values: Tensor) -> Tensor:
        """Return the sum of `values` over all labels of the same sample that are in the loss, in their shape.

        So a loss of a whole chat is given to each of its labels.
        """
        import torch

        counted = torch.where(self.weights == 0, 0.0, values)
        return torch.zeros_like(counted).scatter_add(1, self.begins, counted).gather(1, self.begins)


class Teacher(NamedTuple):
    """The likeliest tokens of a stored teacher at each label, [B, S, K] or [N, L, K], the likeliest first."""

    ids: Tensor
    """int64"""
    log_probs: Tensor
    """Log-probabilities that the teacher gives them, float32. The others have the rest."""
    student_log_probs: Tensor
    """Those that the model in training gives the same tokens, float32, with a gradient."""


@dataclasses.dataclass(frozen=True)
class _Targets:
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


class Objective:
    """The function and what it needs."""

    def __init__(self, config: Config) -> None:
        """Raise ConfigError if the function cannot be loaded, or declares what it cannot be given."""
        self.function = loss_function(config)
        arguments = self.function.arguments
        self.needs_reference, self.needs_teacher = "reference" in arguments, "teacher" in arguments
        self.stores_reference = self.needs_reference and config.lora.lora_rank is None
        """The reference is the model at the start, and is computed once; else it is the model without its adapters."""
        self.stored_reference: dict[str, StoredLabels] = {}
        """Numbers that are stored for the labels of each dataset, by its fingerprint."""
        self.stored_teacher: dict[str, StoredLabels] = {}
        self._sources = source_numbers(config)
        count = 1 + max(self._sources.values(), default=0)
        self._num_sources = count if count > 1 else 0
        self._own_metrics: tuple[str, ...] = ()
        """Mean of -log_probs over all labels, and over those of each dataset where there are several."""
        if self.function.takes != "hidden":
            self._own_metrics = ("nll", *(f"nll/{source}" for source in range(self._num_sources)))
        self._is_checked = False
        self._is_in_backward = False
        """The gradient of the function's losses is known, that of its first argument not yet."""

    @property
    def metrics(self) -> dict[str, str]:
        """The reduction of each metric, by its name."""
        return {**dict.fromkeys(self._own_metrics, "mean"), **self.function.metrics}

    @property
    def takes_rows(self) -> bool:
        """The function is given one sample a row, and the loss is divided by samples."""
        return self.function.takes == "rows"

    def source_of(self, prefix: str) -> int:
        return self._sources.get(prefix, 0)

    # A microbatch

    def __call__(self, outputs: tuple[Tensor, Tensor], targets: Any, scale: float, ctx: ParallelContext) -> LossResult:
        """Return the sum of the weighted losses of a microbatch. Raises LossError."""
        import torch

        from megatron.parallel.finite_checks import LOSS_FUNCTION

        given = self._targets(targets)
        # computed before the function could write them
        factors, left_out = given.weights * scale, given.weights == 0
        first, extras, nll = self._inputs(outputs, given, ctx)
        batch = self._batch(given, outputs[1], ctx)
        if given.places is not None:
            left_out = (batch.weights == 0).all(1)
            factors = torch.full_like(left_out, scale, dtype=torch.float32)
        values = _Values(first, batch, extras)
        returned = self._call(values, ctx)
        losses, metrics = self._split(returned, left_out)
        self._check(losses, left_out, first)
        if losses.requires_grad:
            losses.register_hook(self._enter_backward)
        total = torch.where(left_out, 0.0, losses * factors).sum()
        ctx.state.checks.whole(total, LOSS_FUNCTION)
        return LossResult(total, {**nll, **self._metrics(metrics, values.kept, left_out)})

    def _call(self, values: _Values, ctx: ParallelContext) -> Any:
        """Call the function. Raises LossError if it raises, or writes what it was given."""
        label = self.function.label
        # a comparison of contents would wait for a device
        seen = values.seen(contents=ctx.device.type == "cpu" or not self._is_checked, weight=not self._is_checked)
        try:
            with ctx.state.streams.loss(), _settings_kept(label):
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

    def _targets(self, targets: Any) -> _Targets:
        labels, weights, *rest = targets
        if not rest and self.takes_rows:
            raise LossError(
                f"{self.function.label} takes rows, but the task gives labels without their samples; complete its "
                "microbatches by with_label_origins"
            )
        labels, weights, sources, begins, *rest = completed(targets)
        places = rest.pop(0) if self.takes_rows else None
        teacher = (rest.pop(0), rest.pop(0)) if self.needs_teacher else None
        return _Targets(labels, weights, sources, begins, places, teacher, rest[0] if rest else None)

    def _inputs(
        self, outputs: tuple[Tensor, Tensor], given: _Targets, ctx: ParallelContext
    ) -> tuple[Tensor, dict[str, Any], dict[str, Metric]]:
        """Return the function's first argument, those after the batch, and the metrics of the log-probabilities.

        What is not in the loss has no gradient: one of 0 times an infinite one would be NaN.
        """
        import torch

        from megatron.parallel.finite_checks import LOSS_INPUT

        if self.function.takes == "hidden":
            return self._watched(outputs[0].view_as(outputs[0]), ctx), {}, {}
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
        found = _rows_of(found, given.places, 0.0)
        extras: dict[str, Any] = {}
        if given.teacher is not None:
            log_probs, ids = (_rows_of(part, given.places, 0) for part in given.teacher)
            extras["teacher"] = Teacher(ids, log_probs, found[..., 1:])
        if self.needs_reference:
            assert given.reference is not None
            extras["reference"] = _rows_of(given.reference, given.places, 0.0)
        return found[..., 0], extras, nll

    def _batch(self, given: _Targets, output_weight: Tensor, ctx: ParallelContext) -> LossBatch:
        parts = (given.labels, given.weights, given.sources, given.begins)
        tokens, weights, sources, begins = (_rows_of(part, given.places, 0) for part in parts)
        if given.places is not None:
            begins = begins.new_zeros(begins.shape)
        labels = tokens.masked_fill(weights == 0, IGNORED)
        return LossBatch(labels, weights, sources, begins, output_weight, ctx, tokens)

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

        found = [row_places(places, shape)] if self.takes_rows else []
        for stored in (self.stored_teacher, self.stored_reference):
            if fingerprint in stored:
                found += [torch.from_numpy(part) for part in stored[fingerprint].read(places, shape)]
        return found

    # What it returns

    def _split(self, returned: Any, left_out: Tensor) -> tuple[Any, Mapping[str, Any]]:
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
                shapes = f"{_shape(kept)}{f', or of each sample {_shape(left_out)}' if self.takes_rows else ''}"
                what = type(value).__name__ if shape is None else f"tensor {list(shape)}"
                raise LossError(
                    f"{self.function.label} returned a {what} as metric {name}; return its value of each label "
                    f"{shapes}, so that it does not depend on the microbatches"
                )
        return found

    def _nll(self, log_probs: Tensor, given: _Targets) -> dict[str, Metric]:
        nll = -log_probs.masked_fill(given.weights == 0, 0.0) * given.weights
        chosen = [given.sources >= 0, *(given.sources == source for source in range(self._num_sources))]
        return {
            name: Metric((nll * mask).sum(), (given.weights * mask).sum())
            for name, mask in zip(self._own_metrics, chosen, strict=True)
        }


@dataclasses.dataclass(frozen=True)
class _Values:
    """The arguments of a call."""

    first: Tensor
    batch: LossBatch
    extras: Mapping[str, Any]

    @property
    def kept(self) -> Tensor:
        return self.batch.weights

    def _tensors(self) -> dict[str, Tensor]:
        """Return what the function may read, and not write, by the names that it knows."""
        fields = ("labels", "tokens", "weights", "sources", "begins", "output_weight")
        found = {"its first argument": self.first, **{f"batch.{name}": getattr(self.batch, name) for name in fields}}
        if (teacher := self.extras.get("teacher")) is not None:
            found |= {f"teacher.{name}": tensor for name, tensor in teacher._asdict().items()}
        if "reference" in self.extras:
            found["reference"] = self.extras["reference"]
        return found

    def seen(self, *, contents: bool, weight: bool) -> dict[str, tuple[int, Any]]:
        """Return the version of each tensor, which torch counts up when it is written, and its contents.

        These show what NumPy and `.data` write, which the version does not: of the model's `weight`, sums of its rows.
        """
        found: dict[str, tuple[int, Any]] = {}
        for name, tensor in self._tensors().items():
            is_wanted = weight if tensor is self.batch.output_weight else contents
            found[name] = tensor._version, self._contents(tensor) if is_wanted else None
        return found

    def _contents(self, tensor: Tensor) -> Tensor:
        own = tensor.detach()
        return own.float().sum(-1) if tensor is self.batch.output_weight else own.clone()

    def written_since(self, seen: Mapping[str, tuple[int, Any]]) -> list[str]:
        """Return the names of the tensors that were written."""
        import torch

        def is_written(name: str, tensor: Tensor) -> bool:
            version, contents = seen[name]
            if tensor._version != version:
                return True
            # NaN equals NaN here: what was not finite before is not the function's
            return contents is not None and not torch.equal(contents.nan_to_num(), self._contents(tensor).nan_to_num())

        return [name for name, tensor in self._tensors().items() if is_written(name, tensor)]


@contextlib.contextmanager
def _settings_kept(label: str) -> Iterator[None]:
    """Raise LossError if a function leaves gradients switched off, or another dtype of new tensors, for the process."""
    import torch

    gradients, dtype = torch.is_grad_enabled(), torch.get_default_dtype()
    try:
        yield
        if torch.is_grad_enabled() != gradients:
            raise LossError(f"{label} switched gradients for the whole process; use `with torch.no_grad():`")
        if torch.get_default_dtype() != dtype:
            raise LossError(f"{label} set the default dtype of the whole process; give new tensors their own dtype")
    finally:
        torch.set_grad_enabled(gradients)
        torch.set_default_dtype(dtype)


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


def row_places(places: Sequence[tuple[int, int, slice]], shape: Sequence[int]) -> Tensor:
    """Return the place b * S + s of each label of each sample of a microbatch [B, S]: [N, L] int64, -1 for none."""
    import torch

    length = shape[1]
    spans = [(row, *where.indices(length)[:2]) for _, row, where in places] or [(0, 0, 0)]
    found = torch.full((len(spans), max(1, *(stop - start for _, start, stop in spans))), -1, dtype=torch.int64)
    for number, (row, start, stop) in enumerate(spans):
        found[number, : stop - start] = torch.arange(row * length + start, row * length + stop)
    return found


def _rows_of(values: Tensor, places: Tensor | None, missing: float) -> Tensor:
    """Return values [B, S, ...] one sample a row, [N, L, ...], `missing` where there is none; as they are for None."""
    import torch

    if places is None:
        return values
    found = values.flatten(0, 1)[places.clamp(min=0)]
    is_none = (places < 0).view(*places.shape, *[1] * (found.dim() - 2))
    return torch.where(is_none, torch.full((), missing, dtype=found.dtype, device=found.device), found)


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


def completed(targets: Any) -> Any:
    """Return the targets, with one source and one sample a row where a task gives labels and weights alone."""
    labels, weights, *rest = targets
    nothing = labels.new_zeros(labels.shape)
    return (labels, weights, *(rest or (nothing, nothing)))


def _shape(tensor: Tensor) -> str:
    return str(list(tensor.shape))
