"""lm-eval's tasks while a run trains, with its weights of now (`lm_eval_tasks`)."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from deepspeed.accelerator import get_accelerator

from megatron.evaluation.commands import Commands
from megatron.evaluation.options import EvaluationOptions
from megatron.generation.generator import BatchSettings
from megatron.observability.metrics import MetricsLog
from megatron.planning.progress import Progress
from megatron.resilience.errors import raise_on_all_ranks
from megatron.resilience.watchdog import Watchdog
from megatron.training.engine import Engine
from megatron.training.interludes import Interlude, origin_of_run, tokenizer_of_texts
from megatron.weights.opening import tokenizer_of


class TaskEvaluation(Interlude):
    """Measures the model by lm-eval's tasks and logs the results. Collective in construction and use.

    lm-eval runs on rank 0; all ranks compute. Raises ConfigError without lm-eval, DataError for a task that cannot be
    read or a run without a tokenizer.
    """

    def __init__(self, engine: Engine, progress: Progress, log: MetricsLog, watchdog: Watchdog) -> None:
        config, logging = engine.config, engine.config.logging
        super().__init__(engine, progress, log, watchdog, logging.lm_eval_interval)
        self._options = EvaluationOptions(
            tasks=logging.lm_eval_tasks, task_path=logging.lm_eval_task_path, limit=logging.lm_eval_limit
        )
        folder = tokenizer_of(config)
        self._origin = origin_of_run(folder)
        # on every rank: stop strings end texts on the last stage
        self._tokenizer = raise_on_all_ranks(engine.ctx, lambda: tokenizer_of_texts(config, folder, "lm_eval_tasks"))
        with kept_random_state():
            raise_on_all_ranks(engine.ctx, lambda: None if engine.ctx.rank else self._check())

    def run(self) -> None:
        """Run the tasks and log their results. Collective. Raises ConfigError or DataError."""
        self._watchdog.phase("lm-eval", self._progress.iteration)
        with self._engine.timers.on_host("lm-eval"), kept_random_state(), self._model() as model:
            model.tokenizer, model.origin = self._tokenizer, self._origin
            # no graphs: they would be captured at each evaluation, and hold memory that training needs
            settings = BatchSettings(batch_size=self._options.batch_size, use_graphs=False)
            found = Commands(model, settings, self._watchdog.beat).lead(self._measure)
        if found is not None:
            self._log.log_tasks(self._progress.iteration, self._progress.consumed_samples, found)

    def _check(self) -> None:
        from megatron.evaluation import harness  # late: it needs lm-eval

        harness.check_tasks(self._options)

    def _measure(self, commands: Commands) -> dict[str, dict[str, float]]:
        from megatron.evaluation import harness

        # none of a bootstrap's processes is forked from one that trains
        return metrics_of(harness.run_tasks(commands, self._options, bootstrap_iters=0))


def metrics_of(results: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Return the metrics of each task and group of lm-eval's results: `acc`, or `exact_match,FILTER` of a filter."""
    return {
        task: {
            name.removesuffix(",none"): float(value)
            for name, value in values.items()
            if isinstance(value, int | float) and "," in name and "_stderr," not in name
        }
        for task, values in results["results"].items()
    }


@contextmanager
def kept_random_state() -> Iterator[None]:
    """Restore the random generators of Python, NumPy and torch, which lm-eval seeds."""
    accelerator = get_accelerator()
    states = random.getstate(), np.random.get_state(), torch.get_rng_state(), accelerator.get_rng_state()  # noqa: NPY002
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002
        torch.set_rng_state(states[2])
        accelerator.set_rng_state(states[3])
