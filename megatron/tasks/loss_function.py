"""A user's loss function as it is declared: its arguments, options and metrics. No torch, no data."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import traceback
import typing
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

from megatron.options.config import Config, ConfigError
from megatron.options.plugin_options import filled_options
from megatron.runtime.plugins import import_attribute
from megatron.tasks.loss_result import REDUCTIONS

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
