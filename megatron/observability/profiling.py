"""Trace of a few iterations by torch.profiler."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator

from megatron.config.options import LoggingConfig

logger = logging.getLogger(__name__)


def trace_file(rank: int) -> str:
    """Return the name of a rank's trace in the results folder, for a viewer such as Perfetto."""
    return f"profile_rank{rank}.json.gz"


def is_profiled(logging: LoggingConfig, rank: int) -> bool:
    """Return True if the rank writes a trace."""
    return logging.profile and rank in logging.profile_ranks


class Profile:
    """Records the iterations from profile_step_start to before profile_step_end, on the host and the device, and writes
    them to the results folder. Does nothing unless `profile` is set and `rank` is among profile_ranks.

    `iteration`: iterations done so far. A run that resumes within the steps to record records the rest. As in torch's
    own schedules, a step is marked `ProfilerStep#N`; the timers mark its phases.
    """

    def __init__(self, logging: LoggingConfig, *, rank: int, iteration: int) -> None:
        self._file = Path(logging.results_dir or ".") / trace_file(rank)
        self._first, self._last = max(logging.profile_step_start, 1), logging.profile_step_end - 1
        self._with_shapes = logging.pytorch_profiler_collect_shapes
        self._with_stack = logging.pytorch_profiler_collect_callstack
        self._iteration = iteration
        self._profiler: Any = None
        self._wanted = is_profiled(logging, rank)

    def __enter__(self) -> Profile:
        if self._wanted and self._first - 1 <= self._iteration < self._last:
            self._start()
        return self

    def mark(self, iteration: int) -> contextlib.AbstractContextManager[Any]:
        """Mark an iteration in the trace."""
        if self._profiler is None:
            return contextlib.nullcontext()
        return torch.profiler.record_function(f"ProfilerStep#{iteration}")

    def step(self, iteration: int) -> None:
        """Start or stop as due after this iteration."""
        if self._wanted and iteration == self._first - 1:
            self._start()
        elif self._profiler is not None and iteration == self._last:
            self._stop()

    def _start(self) -> None:
        # by default torch records the devices it finds: HPU only once Habana's plugin is imported
        activities = [torch.profiler.ProfilerActivity.CPU]
        device = get_accelerator().device_name().upper()
        if device != "CPU":
            activities.append(getattr(torch.profiler.ProfilerActivity, device))
        self._profiler = torch.profiler.profile(
            activities=activities,
            record_shapes=self._with_shapes,
            with_stack=self._with_stack,
            profile_memory=self._with_stack,
        )
        self._profiler.start()

    def _stop(self) -> None:
        profiler, self._profiler = self._profiler, None
        profiler.stop()
        part = self._file.with_name("part_" + self._file.name)
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(part))
            part.replace(self._file)
        except OSError as error:  # a full disk does not end the run
            part.unlink(missing_ok=True)
            logger.warning("%s was not written: %s", self._file, error)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._profiler is not None:
            self._stop()
