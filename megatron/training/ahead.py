"""Compilation before the first step: one refused step for each shape of the run's microbatches."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from megatron.options.progress import Progress
from megatron.options.schedule import Schedule
from megatron.resilience.shutdown import Shutdown
from megatron.resilience.watchdog import Watchdog
from megatron.runtime import accelerator
from megatron.tasks.task import Task
from megatron.training.engine import Engine, pinned

MICROBATCHES = 3
"""The first of a step stores its gradients, further ones add to them, and the last begins their sum over ranks."""


def compile_ahead(
    engine: Engine,
    task: Task,
    dataset: Any,
    schedule: Schedule,
    progress: Progress,
    *,
    shutdown: Shutdown,
    watchdog: Watchdog,
    say: Callable[[str], None],
) -> None:
    """Run each shape that the rest of the run has, where the task names them; losses and weights do not change.

    Collective. Ends early once a shutdown is requested. Raises DataError.
    """
    began_s, watched = time.perf_counter(), "compiling each shape of rows"
    watchdog.phase(watched, progress.iteration)
    begin = progress.consumed_samples
    keys = task.data.keys_of_shapes(dataset, schedule.global_batch_size, begin, schedule.total_samples)
    done = 0
    for key in keys:
        watchdog.phase(watched, progress.iteration)
        batches = [pinned(task.read(dataset, key), engine.ctx.device)] * MICROBATCHES if engine.reads_data else []
        engine.run_without_update(batches, num_microbatches=MICROBATCHES, consumed_samples=begin)
        accelerator.mark_step()
        done += 1
        if shutdown.decide(progress):
            break
    if done:
        say(f"compiled {done} {'shape' if done == 1 else 'shapes'} in {time.perf_counter() - began_s:.1f} s")
