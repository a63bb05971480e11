"""InstructLab's `callbacks=[...]`: objects of the caller's program, made again by each rank from the class's source."""

from __future__ import annotations

import inspect
import logging
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron.config.options import ConfigError
from megatron.files import replacing
from megatron.training.callbacks import TrainerCallback, load_callback

logger = logging.getLogger("megatron.api")

FOLDER = "callbacks"
HEAD = "from megatron.training.callbacks import TrainerCallback, TrainingContext\n\n\n"


def callback_faults(callbacks: Sequence[Any]) -> Iterator[str]:
    """Yield what is wrong with the objects."""
    for callback in callbacks:
        if not isinstance(callback, TrainerCallback):
            what = f"the class {callback.__name__}" if isinstance(callback, type) else f"a {type(callback).__name__}"
            yield f"callbacks has {what} in it; give objects of subclasses of TrainerCallback: callbacks=[MyCallback()]"


def write_callbacks(callbacks: Sequence[TrainerCallback], folder: Path) -> tuple[str, ...]:
    """Write the source of each class to a file of its own in `folder`, and return their names for `--callbacks`.

    Raises ConfigError for a class that cannot be made from its source alone.
    """
    names = []
    for number, callback in enumerate(callbacks):
        cls = type(callback)
        try:
            source = textwrap.dedent(inspect.getsource(cls))
        except (OSError, TypeError):
            raise ConfigError(
                [f"callbacks: the source of {cls.__name__} is not in a file; define it in a module or a script"]
            ) from None
        file = folder / FOLDER / f"{cls.__name__.lower()}_{number}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        with replacing(file) as opened:
            opened.write((HEAD + source).encode())
        name = f"{file.resolve()}:{cls.__name__}"
        try:
            again = load_callback(name)
        except ConfigError as error:
            raise ConfigError(
                [
                    f"{fault}. Ranks make a callback from the source of its class, without arguments: import what it "
                    "needs inside its methods"
                    for fault in error.faults
                ]
            ) from error
        if vars(again).keys() != vars(callback).keys():
            logger.warning(
                "callbacks: %s was changed after it was made; each rank makes its own, without these changes",
                cls.__name__,
            )
        names.append(name)
    return tuple(names)
