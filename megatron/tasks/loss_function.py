"""A user's loss function: its declaration (arguments, options, metrics), and what it is given. Without torch."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import traceback
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron.options.config import Config, ConfigError
from megatron.options.plugins import filled_options, import_attribute
from megatron.tasks.loss_result import REDUCTIONS, LossError

if TYPE_CHECKING:
    from torch import Tensor

    from megatron.parallel.context import ParallelContext

FORMS = (
    ("log_probs", "batch"),
    ("log_probs", "batch", "reference"),
    ("log_probs", "batch", "teacher"),
    ("log_probs", "batch", "reference", "teacher"),
    ("rows", "batch"),
    ("rows", "batch", "reference"),
    ("rows", "batch", "teacher"),
    ("rows", "batch", "reference", "teacher"),
    ("hidden", "batch"),
)
"""Names of the arguments that a function may have, beside its options."""


@dataclasses.dataclass(frozen=True)
class LossFunction:
    """A function, and what it declares."""

    name: str
    """As in `--loss`."""
    call: Callable[..., Any]
    options: Mapping[str, Any]
    """Values of its keyword-only arguments."""
    metrics: Mapping[str, str]
    """Reduction of each metric, by its name: the function's attribute `metrics`."""

    @property
    def arguments(self) -> tuple[str, ...]:
        return _positional(self.call)

    @property
    def takes(self) -> str:
        """Kind of its first argument: log_probs, rows or hidden."""
        return self.arguments[0]

    @property
    def file(self) -> str:
        call = self.call
        # the file of the function itself, not functools'
        while isinstance(call, functools.partial):
            call = call.func
        try:
            return inspect.getsourcefile(call if inspect.isroutine(call) else type(call)) or "a built-in"
        except TypeError:
            return "a built-in"

    @property
    def label(self) -> str:
        """The function and its file, as messages name them."""
        if self.name.startswith(self.file):
            return f"loss={self.name}"
        return f"loss={self.name} ({self.file})"

    def line_of(self, error: BaseException) -> str:
        """Return the line of the function's file at which an error was raised; empty if it was raised elsewhere."""
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == self.file]
        if not lines:
            return ""
        return f" (line {lines[-1]})"


def loss_function(config: Config) -> LossFunction:
    """Return the function that the config names. Raises ConfigError for one that cannot be loaded or called."""
    name = config.training.loss
    assert name is not None
    function = _load(name)
    return LossFunction(name, function, _options(config, function), _metrics(name, function))


@functools.cache
def _load(name: str) -> Callable[..., Any]:
    function = import_attribute("loss", name)
    if not callable(function):
        raise ConfigError([f"loss={name} is a {type(function).__name__}; give a function"])
    try:
        arguments = _positional(function)
    except (TypeError, ValueError):
        arguments = ()
    if arguments not in FORMS:
        known = ", ".join(f"({', '.join(form)})" for form in FORMS)
        raise ConfigError(
            [
                f"loss={name} has the arguments ({', '.join(arguments)}); use one of {known}, with options after a *: "
                "(log_probs, batch, *, gamma=2.0)"
            ]
        )
    return function  # type: ignore[no-any-return]


def _positional(function: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names of all arguments but the keyword-only ones."""
    parameters = inspect.signature(function).parameters.values()
    return tuple(each.name for each in parameters if each.kind is not each.KEYWORD_ONLY)


def _options(config: Config, function: Callable[..., Any]) -> dict[str, Any]:
    """Return the value of each keyword-only argument, from `loss_options` or its default."""
    parameters = inspect.signature(function).parameters.values()
    fields: list[tuple[str, Any, Any]] = []
    for each in parameters:
        if each.kind is not each.KEYWORD_ONLY:
            continue
        field: Any = dataclasses.field()
        if each.default is not each.empty:
            field = dataclasses.field(default=each.default)
        fields.append((each.name, _type_of(each, function), field))
    # as a task declares its options, so that both are read and reported by the same code
    declared = dataclasses.make_dataclass("Options", fields, kw_only=True)
    words, owner = config.training.loss_options, f"loss={config.training.loss}"
    return vars(filled_options(declared, words, "loss_options", owner))


def _type_of(parameter: inspect.Parameter, function: Callable[..., Any]) -> Any:
    """Return the type of an option: that of its annotation, or else of its default; text if there is neither."""
    if parameter.annotation is not parameter.empty:
        owner = SimpleNamespace(__annotations__={parameter.name: parameter.annotation})
        try:
            return typing.get_type_hints(owner, getattr(function, "__globals__", {}))[parameter.name]
        # the annotation of an option then says nothing, but its default may
        except NameError:  # imported for type checkers alone
            pass
    if parameter.default in (parameter.empty, None):
        return str
    return type(parameter.default)


def _metrics(name: str, function: Callable[..., Any]) -> dict[str, str]:
    declared = getattr(function, "metrics", {})
    example = "{'confident': 'mean'}"
    if not isinstance(declared, Mapping):
        raise ConfigError([f"loss={name} has metrics of type {type(declared).__name__}; give a dict such as {example}"])
    faults = []
    for metric, reduction in declared.items():
        # nll and nll/SOURCE are the metrics that each such loss has
        if not isinstance(metric, str) or not metric or metric.startswith("nll"):
            faults.append(f"loss={name} has a metric {metric!r}; give it a name of its own, not nll")
        elif reduction not in REDUCTIONS:
            faults.append(f"loss={name} has metric {metric}={reduction!r}; use {', '.join(REDUCTIONS)}")
    if faults:
        raise ConfigError(faults)
    return dict(declared)


# ---------------------------------------------------------------------------------------------------------------------
# Its arguments: a microbatch, a teacher's numbers, and a check that it does not write them.
#
# B rows of a microbatch, S tokens of a row; N samples in it, of at most L tokens.

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

        # not a product with the weights: 0 times a value that is not finite would be NaN
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
class LossArguments:
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
        tensors = {"its first argument": self.first}
        tensors |= {f"batch.{name}": getattr(self.batch, name) for name in fields}
        teacher = self.extras.get("teacher")
        if teacher is not None:
            tensors |= {f"teacher.{name}": tensor for name, tensor in teacher._asdict().items()}
        if "reference" in self.extras:
            tensors["reference"] = self.extras["reference"]
        return tensors

    def seen(self, *, contents: bool, weight: bool) -> dict[str, tuple[int, Any]]:
        """Return the version of each tensor, which torch counts up when it is written, and its contents.

        These show what NumPy and `.data` write, which the version does not: of the model's `weight`, sums of its rows.
        """
        seen: dict[str, tuple[int, Any]] = {}
        for name, tensor in self._tensors().items():
            is_wanted = weight if tensor is self.batch.output_weight else contents
            seen[name] = tensor._version, None
            if is_wanted:
                seen[name] = tensor._version, self._contents(tensor)
        return seen

    def _contents(self, tensor: Tensor) -> Tensor:
        own = tensor.detach()
        if tensor is self.batch.output_weight:  # as large as the model's vocabulary
            return own.float().sum(-1)
        return own.clone()

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
def settings_kept(label: str) -> Iterator[None]:
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
        # also after its error: what follows must not compute in its settings
        torch.set_grad_enabled(gradients)
        torch.set_default_dtype(dtype)


def row_places(places: Sequence[tuple[int, int, slice]], shape: Sequence[int]) -> Tensor:
    """Return the place b * S + s of each label of each sample of a microbatch [B, S]: [N, L] int64, -1 for none."""
    import torch

    length = shape[1]
    # [(row, start, stop)] of each sample; a microbatch of padding has one of no labels
    spans = [(row, *where.indices(length)[:2]) for _, row, where in places] or [(0, 0, 0)]
    found = torch.full((len(spans), max(1, *(stop - start for _, start, stop in spans))), -1, dtype=torch.int64)
    for number, (row, start, stop) in enumerate(spans):
        found[number, : stop - start] = torch.arange(row * length + start, row * length + stop)
    return found


def rows_of(values: Tensor, places: Tensor | None, missing: float) -> Tensor:
    """Return values [B, S, ...] one sample a row, [N, L, ...], `missing` where there is none; as they are for None."""
    import torch

    if places is None:
        return values
    # -1 would be the last label of the microbatch: read the first instead, and replace it
    found = values.flatten(0, 1)[places.clamp(min=0)]
    is_none = (places < 0).view(*places.shape, *[1] * (found.dim() - 2))
    return torch.where(is_none, torch.full((), missing, dtype=found.dtype, device=found.device), found)
