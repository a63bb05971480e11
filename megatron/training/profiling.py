"""A torch.profiler trace of a few iterations."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from megatron.config import LoggingConfig


class Profile:
    """Records iterations profile_steps[0] to profile_steps[1] and writes `profile.json` (for a trace viewer such as
    Perfetto) to the results folder. Does nothing unless `profile` is on and this rank writes.
    """

    def __init__(self, logging: LoggingConfig, *, writes: bool) -> None:
        self._folder = Path(logging.results_dir or ".")
        self._first, self._last = logging.profile_steps
        self._profiler: Any = None
        self._wanted = logging.profile and writes

    def __enter__(self) -> Profile:
        if self._wanted and self._first == 1:
            self._start()
        return self

    def step(self, iteration: int) -> None:
        """Call after each iteration."""
        if self._wanted and iteration == self._first - 1:
            self._start()
        elif self._profiler is not None and iteration == self._last:
            self._stop()

    def _start(self) -> None:
        self._profiler = torch.profiler.profile(record_shapes=True)
        self._profiler.start()

    def _stop(self) -> None:
        self._profiler.stop()
        self._folder.mkdir(parents=True, exist_ok=True)
        self._profiler.export_chrome_trace(str(self._folder / "profile.json"))
        self._profiler = None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._profiler is not None:
            self._stop()
