"""A user's own Trainer, `--trainer FILE.py:Class`: a subclass of transformers' Trainer whose compute_loss is trained.

The class is not instantiated: compute_loss is called with stand-ins for the trainer, the model and its outputs, which
have what this project can give on every layout, and refuse everything else by name. Without torch; the class's own
file imports what it needs.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.options.config import ConfigError
from megatron.options.plugins import import_attribute
from megatron.tasks.trainer.file_import import check_import, importable

LIBRARIES = ("transformers", "optimum", "trl")
BASES = ("Trainer", "GaudiTrainer", "SFTTrainer", "GaudiSFTTrainer")
"""Classes of these libraries whose own loss is the cross-entropy of next tokens."""
GIVEN = ("input_ids", "attention_mask", "labels")
"""The inputs of a model, as transformers' collators name them."""
VALIDATES = "prediction_step"
"""Method that a class may override without effect: a validation computes compute_loss."""
GUIDE = "docs/guides/own_loss.md"


@dataclass(frozen=True)
class UserTrainer:
    """A class that can be trained, and what its compute_loss is called with."""

    name: str
    """As in `--trainer`."""
    owner: type
    base: type
    """The library's class that it extends."""
    file: str
    takes_count: bool
    """compute_loss takes num_items_in_batch."""
    unpacked: tuple[str, ...] = ()
    """Names that compute_loss unpacks its inputs to, where its collator makes tuples."""

    @property
    def own_classes(self) -> list[type]:
        return _own_classes(self.owner, self.base)

    def line_of(self, method: str) -> str:
        """Return where a method is defined, as messages say it; empty where its source is not at hand."""
        for each in self.own_classes:
            if method in vars(each):
                return _line(vars(each)[method])
        return ""


def load_trainer(name: str) -> UserTrainer:
    """Return the class that `--trainer` names. Raises ConfigError for one that cannot be loaded, or needs more."""
    file = Path(name.rpartition(":")[0])
    stamp = None
    # a relative path may lead elsewhere, and a file may have been edited, in a process that goes on
    if file.is_file():
        status = file.stat()
        stamp = str(file.resolve()), status.st_mtime_ns, status.st_size
    return _loaded(name, stamp)


@functools.cache
def _loaded(name: str, stamp: tuple[str, int, int] | None) -> UserTrainer:
    check_import("trainer", name)
    with importable(name):
        owner = import_attribute("trainer", name)
    if not inspect.isclass(owner):
        raise ConfigError([f"trainer={name} is a {type(owner).__name__}; give a subclass of transformers' Trainer"])
    base = next((each for each in owner.__mro__ if each.__module__.partition(".")[0] in LIBRARIES), None)
    if base is None:
        raise ConfigError(
            [f"trainer={name} does not extend transformers' Trainer; extend it, or give a function as --loss ({GUIDE})"]
        )
    if base.__name__ not in BASES:
        raise ConfigError(
            [
                f"trainer={name} extends {base.__name__}, whose batches and loss are others; extend Trainer, or write "
                "a task (docs/internals/extending.md)"
            ]
        )
    faults = list(_faults_of_class(name, owner, base))
    if faults:
        raise ConfigError(faults)
    function = owner.compute_loss  # type: ignore[attr-defined]
    parameters = inspect.signature(function).parameters
    takes_count = "num_items_in_batch" in parameters or any(
        each.kind is each.VAR_KEYWORD for each in parameters.values()
    )
    unpacked = _unpacked(name, function, list(parameters)[2])
    # not the class's: inspect finds no module of a file that was given by its path
    file = inspect.unwrap(function).__code__.co_filename
    return UserTrainer(name, owner, base, file, takes_count, unpacked)


def _own_classes(owner: type, base: type) -> list[type]:
    return [each for each in owner.__mro__ if each not in base.__mro__]


def _faults_of_class(name: str, owner: type, base: type) -> Iterator[str]:
    """Yield a message for each method of the class that would be trained by, but is not called here."""
    own = _own_classes(owner, base)
    if not any("compute_loss" in vars(each) for each in own):
        yield f"trainer={name} has no compute_loss of its own; leave it out: the loss of {base.__name__} is trained"
        return
    for each in own:
        for method, value in vars(each).items():
            is_special = method.startswith("__") and not inspect.isfunction(value)
            if is_special or method in ("compute_loss", VALIDATES) or not hasattr(base, method):
                continue
            remedy = "of this class compute_loss alone is run: leave the method out, or write a task"
            if method == "__init__":
                remedy = "of this class compute_loss alone is run: set as attributes of the class what it sets"
            yield f"trainer={name} has its own {method}{_line(value)}; {remedy}"
    function = owner.compute_loss  # type: ignore[attr-defined]
    if not inspect.isfunction(inspect.unwrap(function)):
        yield f"trainer={name} has a compute_loss that is a {type(function).__name__}; write a method"
        return
    try:
        inspect.signature(function).bind(None, None, None)
    except TypeError as error:
        yield (
            f"trainer={name} has a compute_loss that cannot be called with (self, model, inputs): {error}; give what "
            "is more a default"
        )


def _line(value: Any) -> str:
    try:
        return f" (line {inspect.getsourcelines(inspect.unwrap(value))[1]})"
    except (OSError, TypeError):
        return ""


def _unpacked(name: str, function: Callable[..., Any], argument: str) -> tuple[str, ...]:
    """Return the names in `a, b, c = inputs`. Raises ConfigError for others than those of a model's inputs."""
    try:
        lines, first = inspect.getsourcelines(inspect.unwrap(function))
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, TypeError, SyntaxError):
        return ()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Name) or node.value.id != argument:
            continue
        for target in node.targets:
            if not isinstance(target, ast.Tuple | ast.List):
                continue
            names = tuple(each.id if isinstance(each, ast.Name) else "" for each in target.elts)
            if not set(names) <= {*GIVEN, "_"}:
                raise ConfigError(
                    [
                        f"trainer={name} unpacks its inputs to {ast.unparse(target)} (line {first + node.lineno - 1}), "
                        f"and what these are is known by {', '.join(GIVEN)} alone; name them so, or write a loss "
                        f"function, which knows the dataset of each label ({GUIDE})"
                    ]
                )
            return names
    return ()
