"""Traces of a few iterations: by torch.profiler, and of the instructions of all ranks."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator

from megatron.observability import instruction_trace
from megatron.options.config import LoggingConfig

logger = logging.getLogger(__name__)


def trace_file(rank: int) -> str:
    """Return the name of a rank's trace in the results folder, for a viewer such as Perfetto."""
    return f"profile_rank{rank}.json.gz"


def is_profiled(logging: LoggingConfig, rank: int) -> bool:
    """Return True if the rank writes a trace."""
    return logging.profile and rank in logging.profile_ranks


class Profile:
    """Records the iterations from profile_step_start to before profile_step_end, on the host and the device, and writes
    them to the results folder: with torch.profiler if `profile` is set and `rank` is among profile_ranks, and the
    instructions of all ranks if `trace` is wanted.

    `iteration`: iterations done so far. A run that resumes within the steps to record records the rest; one that fails
    among them writes no instructions. `say` is given a line on the idle time of each stage. As in torch's own
    schedules, a step is marked `ProfilerStep#N`; the timers mark its phases.
    """

    def __init__(
        self,
        logging: LoggingConfig,
        *,
        rank: int,
        iteration: int,
        trace: instruction_trace.InstructionTrace | None = None,
        say: Callable[[str], None] = logger.info,
    ) -> None:
        self._file = Path(logging.results_dir or ".") / trace_file(rank)
        # [start, end) of steps, which count from 1
        self._first, self._last = max(logging.profile_step_start, 1), logging.profile_step_end - 1
        self._with_shapes = logging.pytorch_profiler_collect_shapes
        self._with_stack = logging.pytorch_profiler_collect_callstack
        self._iteration = iteration
        self._profiler: Any = None
        self._wanted = is_profiled(logging, rank)
        self._trace = trace if trace is not None and trace.wanted else None
        self._rank, self._say, self._has_traced = rank, say, False

    def __enter__(self) -> Profile:
        # a run that resumes within the window records the rest
        if self._wanted and self._first - 1 <= self._iteration < self._last:
            self._start()
        return self

    @contextlib.contextmanager
    def mark(self, iteration: int) -> Iterator[None]:
        """Mark an iteration in the traces."""
        trace = self._trace if self._first <= iteration <= self._last else None
        with contextlib.nullcontext() if self._profiler is None else _marked_step(iteration):
            if trace is not None:
                trace.begin_step(iteration)
            yield
            if trace is not None:
                # waits for the device: of the profiled steps alone
                trace.end_step()
                self._has_traced = True

    def step(self, iteration: int) -> None:
        """Start or stop as due after this iteration."""
        if self._wanted and iteration == self._first - 1:
            self._start()
        elif self._profiler is not None and iteration == self._last:
            self._stop()
        # on all ranks, since gathering is collective
        if self._has_traced and iteration == self._last:
            self._write_trace()

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
        # torch compresses by the ending of the name, so the prefix changes
        part = self._file.with_name("part_" + self._file.name)
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(part))
            part.replace(self._file)
        except OSError as error:  # a full disk does not end the run
            part.unlink(missing_ok=True)
            logger.warning("%s was not written: %s", self._file, error)

    def _write_trace(self) -> None:
        """Collective."""
        assert self._trace is not None
        trace, self._has_traced = self._trace.gather(), False
        if self._rank != 0:
            return
        file = self._file.with_name(instruction_trace.TRACE_FILE)
        try:
            instruction_trace.write_trace(trace, file)
        except OSError as error:
            logger.warning("%s was not written: %s", file, error)
            return
        measured, simulated = instruction_trace.idle_shares(trace), instruction_trace.simulated_idle_shares(trace)
        self._say(
            f"instructions of all ranks: {file}; idle by stage: {_percents(measured)}; by the order of the passes, "
            f"if all took as long: {_percents(simulated)}"
        )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._profiler is not None:
            self._stop()
        # after an error the other ranks may never come to the collective
        if self._has_traced and kind is None:
            self._write_trace()


def _marked_step(iteration: int) -> contextlib.AbstractContextManager[Any]:
    return torch.profiler.record_function(f"ProfilerStep#{iteration}")


def _percents(shares: Sequence[float]) -> str:
    return " ".join(f"{share:.1%}" for share in shares)
