"""A user's loss function: `--loss package.module:function`, in place of the cross-entropy of a task.

B rows of a microbatch, S tokens of a row, H hidden size. docs/tasks.md shows functions.
"""

from __future__ import annotations

import dataclasses
import inspect
import traceback
from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron.config.data import parse_data_path
from megatron.config.options import Config, ConfigError
from megatron.config.plugins import import_attribute
from megatron.tasks.loss_result import LossError, LossResult, Metric

if TYPE_CHECKING:
    from torch import Tensor

    from megatron.data.label_file import StoredLabels
    from megatron.parallel.context import ParallelContext

FORMS = (
    ("log_probs", "batch"),
    ("log_probs", "batch", "reference"),
    ("log_probs", "batch", "teacher"),
    ("hidden", "batch"),
)
"""Names of the arguments that a function may have."""


@dataclasses.dataclass(frozen=True)
class LossBatch:
    """Microbatch as a loss function sees it."""

    labels: Tensor
    """Next tokens, [B, S] int64."""
    weights: Tensor
    """Weight of each label in the loss, [B, S] float32; 0: the label does not count."""
    sources: Tensor
    """Place in `data_path` of the dataset that each label is from, [B, S] int64, from 0."""
    begins: Tensor
    """Place in its row at which the sample of each label begins, [B, S] int64: a chat, or in pretraining the row."""
    output_weight: Tensor
    """This rank's rows of the vocabulary: input of `megatron.parallel.losses`."""
    ctx: ParallelContext

    def sample_sums(self, values: Tensor) -> Tensor:
        """Return the sum of `values` [B, S] over all labels of the same sample that are in the loss, [B, S].

        So a loss of a whole chat is given to each of its labels.
        """
        import torch

        counted = torch.where(self.weights == 0, 0.0, values)
        return torch.zeros_like(counted).scatter_add(1, self.begins, counted).gather(1, self.begins)


class Teacher(NamedTuple):
    """The likeliest tokens of a stored teacher at each label, [B, S, K], the likeliest first."""

    ids: Tensor
    """int64"""
    log_probs: Tensor
    """Log-probabilities that the teacher gives them, float32. The others have the rest."""
    student_log_probs: Tensor
    """Those that the model in training gives the same tokens, float32, with a gradient."""


class Objective:
    """The function and what it needs."""

    def __init__(self, config: Config) -> None:
        """Raise ConfigError if the function cannot be loaded or has other arguments than those of FORMS."""
        assert config.training.loss is not None
        self.name = config.training.loss
        self._function = _load(self.name)
        arguments = tuple(inspect.signature(self._function).parameters)
        self.needs_reference, self.needs_teacher = "reference" in arguments, "teacher" in arguments
        self.stores_reference = self.needs_reference and config.lora.lora_rank is None
        """The reference is the model at the start, and is computed once; else it is the model without its adapters."""
        self.stored: dict[str, StoredLabels] = {}
        """Numbers that are stored for the labels of each dataset, by its fingerprint."""
        self._takes_hidden = arguments[0] == "hidden"
        self._sources = source_numbers(config)
        count = 1 + max(self._sources.values(), default=0)
        self._num_sources = count if count > 1 else 0
        self.metrics: tuple[str, ...] = ()
        """Mean of -log_probs over all labels, and over those of each dataset where there are several."""
        if not self._takes_hidden:
            self.metrics = ("nll", *(f"nll/{source}" for source in range(self._num_sources)))

    def source_of(self, prefix: str) -> int:
        return self._sources.get(prefix, 0)

    def __call__(self, outputs: tuple[Tensor, Tensor], targets: Any, scale: float, ctx: ParallelContext) -> LossResult:
        """Return the sum of the weighted losses of a microbatch. Raises LossError."""
        import torch

        labels, weights, sources, begins, *stored = completed(targets)
        hidden, output_weight = outputs
        batch = LossBatch(labels, weights, sources, begins, output_weight, ctx)
        if self._takes_hidden:
            first = hidden
        elif self.needs_teacher:
            first, *stored = self._beside_teacher(outputs, labels, stored, ctx)
        else:
            first = self.log_probs(outputs, targets, ctx)
        try:
            losses = self._function(first, batch, *stored)
        except Exception as error:  # a user's function may raise anything
            raise LossError(f"loss={self.name} raised {type(error).__name__}: {error}{self._place(error)}") from error
        self._check(losses, labels, first)
        total = torch.where(weights == 0, 0.0, losses * (weights * scale)).sum()
        return LossResult(total, self._metrics(first, weights, sources))

    @staticmethod
    def log_probs(outputs: tuple[Tensor, Tensor], targets: Any, ctx: ParallelContext) -> Tensor:
        """Return the log-probability of each label, [B, S] float32."""
        from megatron.parallel.losses import token_log_probs

        return token_log_probs(*outputs, targets[0], ctx)

    @staticmethod
    def _beside_teacher(
        outputs: tuple[Tensor, Tensor], labels: Tensor, stored: Sequence[Tensor], ctx: ParallelContext
    ) -> tuple[Tensor, Teacher]:
        """Return the log-probabilities of the labels, and the teacher with those of its tokens."""
        import torch

        from megatron.parallel.chosen_log_probs import chosen_log_probs

        log_probs, ids = stored
        found = chosen_log_probs(*outputs, torch.cat([labels.unsqueeze(-1), ids], -1), ctx)
        return found[..., 0], Teacher(ids, log_probs, found[..., 1:])

    def stored_at(
        self, fingerprint: str, places: Sequence[tuple[int, int, slice]], shape: Sequence[int]
    ) -> list[Tensor]:
        """Return what is stored for the labels of a microbatch of `shape` [B, S]; nothing if nothing is stored.

        That is the reference [B, S], or log-probabilities and ids of the teacher's tokens, both [B, S, K].
        """
        import torch

        if fingerprint not in self.stored:
            return []
        return [torch.from_numpy(part) for part in self.stored[fingerprint].read(places, shape)]

    def _check(self, losses: Any, labels: Tensor, first: Tensor) -> None:
        import torch

        if not isinstance(losses, torch.Tensor):
            raise LossError(f"loss={self.name} returned a {type(losses).__name__}; return a tensor {_shape(labels)}")
        if losses.shape != labels.shape or not losses.is_floating_point():
            raise LossError(
                f"loss={self.name} returned {losses.dtype} {_shape(losses)}; return the loss of each label, of which "
                f"the sum is taken and divided over the whole global batch: floating point {_shape(labels)}"
            )
        if torch.is_grad_enabled() and first.requires_grad and not losses.requires_grad:
            raise LossError(
                f"loss={self.name} returned losses without a gradient; compute them of its first argument, without "
                "detach() or item()"
            )

    def _place(self, error: Exception) -> str:
        """Return the line of the function's file at which the error was raised."""
        file = inspect.getsourcefile(self._function)
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
        return f" (line {lines[-1]} of {file})" if lines else ""

    def _metrics(self, log_probs: Tensor, weights: Tensor, sources: Tensor) -> dict[str, Metric]:
        if not self.metrics:
            return {}
        nll = -log_probs.detach().masked_fill(weights == 0, 0.0) * weights
        chosen = [sources >= 0, *(sources == source for source in range(self._num_sources))]
        return {
            name: Metric((nll * mask).sum(), (weights * mask).sum())
            for name, mask in zip(self.metrics, chosen, strict=True)
        }


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


@cache
def _load(name: str) -> Callable[..., Any]:
    function = import_attribute("loss", name)
    if not callable(function):
        raise ConfigError([f"loss={name} is a {type(function).__name__}; give a function"])
    try:
        arguments = tuple(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        arguments = ()
    if arguments not in FORMS:
        known = ", ".join(f"({', '.join(form)})" for form in FORMS)
        raise ConfigError([f"loss={name} has the arguments ({', '.join(arguments)}); use one of {known}"])
    return function  # type: ignore[no-any-return]


def _shape(tensor: Tensor) -> str:
    return str(list(tensor.shape))
