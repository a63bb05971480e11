"""Trackers: services that collect the metrics of runs, such as Weights & Biases and MLflow.

One rank has them. A tracker gets the values of TensorBoard by the same tags; tracker_log.py passes them on.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from megatron.options.config import Config


@dataclass(frozen=True)
class TrackedRow:
    """Values of one iteration."""

    values: Mapping[str, float]
    """By the tags of TensorBoard, and `consumed_samples` where it is known."""
    iteration: int
    time_s: float = field(default_factory=time.time)
    """When they were logged, as time.time()."""


class Tracker(ABC):
    """A run of a service. `resumed_iteration`: 0 for a run that starts.

    A subclass connects in its constructor, and raises ConfigError where it cannot. Passwords and tokens come from
    variables of the environment, never from options: these are stored with the run.
    """

    name: ClassVar[str] = ""
    """In messages. Unset: the name of the class."""
    queues_itself: ClassVar[bool] = False
    """`log` returns at once, whatever the network does, so that it needs no thread."""

    @abstractmethod
    def __init__(self, config: Config, resumed_iteration: int) -> None: ...

    @abstractmethod
    def log(self, rows: Sequence[TrackedRow]) -> None:
        """Send rows. It may raise anything, and is called again with the same rows if `may_recover`."""

    def may_recover(self, error: Exception) -> bool:
        """Return whether a later attempt may succeed. If not, the log of this tracker ends."""
        return isinstance(error, OSError)  # those of networks, of requests too

    @abstractmethod
    def close(self, *, failed: bool) -> None:
        """End the run of the service. `failed`: by an error."""


def stored_id(results_dir: str | None, name: str) -> str | None:
    """Return the id of the service's run that the results folder keeps in a file of this name, if it does."""
    if results_dir is None:
        return None
    file = Path(results_dir) / name
    return (file.is_file() and file.read_text(encoding="utf-8").strip()) or None


def store_id(results_dir: str | None, name: str, run_id: str) -> None:
    """Keep the id of the service's run for the next start."""
    if results_dir is not None:
        (Path(results_dir) / name).write_text(run_id + "\n", encoding="utf-8")


def run_name_of(given: str | None, results_dir: str | None) -> str | None:
    """Return the name of the service's run: the user's, or the results folder's."""
    if given is None and results_dir is not None:
        # resolved: a folder given as `.` has a name too
        return Path(results_dir).resolve().name
    return given
