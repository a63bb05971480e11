"""Identity of the weights that a run started from, and what a task computes with them before training."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from megatron.data.blend import digest
from megatron.tasks.task import StartWeights, Task
from megatron.training.engine import Engine
from megatron.training.objective_check import check_objective
from megatron.training.resume import Start
from megatron.weights.adapter_start import bits_sum, joined_checksums


def prepare_task(
    engine: Engine, task: Task, datasets: Sequence[Any], start: Start, beat: Callable[[], None]
) -> list[str]:
    """Let the task complete its datasets with what the weights at the start compute, and return lines to print.

    `beat` is called after each of its forward passes. Collective. Raises DataError or LossError.
    """
    if task.objective is not None:
        check_objective(engine, task, datasets)
    if type(task).before_training is Task.before_training:
        return []
    weights = start_weights(engine, start)
    engine.start_fingerprint = weights.fingerprint

    def forward(*arguments: Any, **options: Any) -> list[Tensor]:
        results = engine.forward(*arguments, **options)
        beat()
        return results

    return task.before_training(datasets, forward, weights, engine.ctx)


def start_weights(engine: Engine, start: Start) -> StartWeights:
    """Return the weights that the run started from: those in the engine, or those that its checkpoint names.

    Of adapters it is their base, which stays as it is. Collective.
    """
    if engine.base is not None:
        return StartWeights(digest(json.dumps(engine.base.get("checksums") or engine.base, sort_keys=True)), True)
    saved = None if start.checkpoint is None else start.checkpoint.metadata.get("start_fingerprint")
    if saved is not None and start.progress.iteration:
        return StartWeights(str(saved), False)
    sums: dict[str, int] = {}
    for piece in engine.state.owned():
        if piece.is_saved_here:
            sums[piece.name] = sums.get(piece.name, 0) + bits_sum(piece.weight)
    checksums = joined_checksums(engine.ctx.gather_objects(sums))
    return StartWeights(digest(json.dumps(checksums, sort_keys=True)), not start.progress.iteration)
