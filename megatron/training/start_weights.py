"""Identity of the weights that a run started from, and what a task computes with them before training."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from megatron.data.blend import digest
from megatron.interop.base_identity import BaseSums, joined, own_parts
from megatron.resilience.errors import raise_on_all_ranks
from megatron.tasks.stored_labels import complete, label_jobs, open_stored, open_teacher
from megatron.tasks.task import StartWeights, Task
from megatron.training.engine import Engine
from megatron.training.objective_check import check_objective
from megatron.training.resume import Start


def prepare_task(
    engine: Engine, task: Task, datasets: Sequence[Any], start: Start, beat: Callable[[], None]
) -> list[str]:
    """Let the task complete its datasets with what the weights at the start compute, and return lines to print.

    `beat` is called after each of its forward passes. Collective. Raises DataError or LossError.
    """
    objective, writes_teacher = task.objective, task.config.training.teacher_top_k is not None
    if objective is not None:
        raise_on_all_ranks(engine.ctx, lambda: open_teacher(task, datasets))
        check_objective(engine, task, datasets)
    stores = writes_teacher or (objective is not None and objective.stores_reference)
    if not stores and type(task).before_training is Task.before_training:
        return []

    def forward(*arguments: Any, **options: Any) -> list[Tensor]:
        results = engine.forward(*arguments, **options)
        beat()
        return results

    if writes_teacher:
        weights = StartWeights(fingerprint_of(engine), True)
    else:
        weights = start_weights(engine, start)
        engine.start_fingerprint = weights.fingerprint
    lines = []
    for job in label_jobs(task, datasets, weights.fingerprint) if stores else []:
        done = complete(job, forward, engine.ctx, may_compute=weights.are_loaded)
        lines.append(f"{'teacher' if writes_teacher else 'reference'} of {done}")
        if not writes_teacher:
            raise_on_all_ranks(engine.ctx, partial(open_stored, job))
    return lines + task.before_training(datasets, forward, weights, engine.ctx)


def start_weights(engine: Engine, start: Start) -> StartWeights:
    """Return the weights that the run started from: those in the engine, or those that its checkpoint names.

    Of adapters it is their base, which stays as it is. Collective.
    """
    if engine.base is not None:
        return StartWeights(_fingerprint(engine, _tensors_of(engine.base)), True)
    saved = None if start.checkpoint is None else start.checkpoint.metadata.get("start_fingerprint")
    if saved is not None and start.progress.iteration:
        return StartWeights(str(saved), False)
    return StartWeights(fingerprint_of(engine), not start.progress.iteration)


def fingerprint_of(engine: Engine) -> str:
    """Return the fingerprint of the model in the engine, adapters and their base included. Collective."""
    pieces = [piece for piece in engine.state.owned() if piece.is_saved_here]
    sums = BaseSums(own_parts({piece.name: piece.shard for piece in pieces}), rounded=False)
    for piece in pieces:
        sums.add(piece.name, piece.shard, *engine.state.place(piece.shard), piece.start, piece.weight)
    known: Any = joined(engine.ctx.gather_objects(sums.totals))
    if engine.base is not None:
        known = [known, _tensors_of(engine.base)]
    return _fingerprint(engine, known)


def _tensors_of(base: Mapping[str, Any]) -> Any:
    """Return what identifies the weights of a base, wherever these are."""
    return base.get("identity", {}).get("tensors") or base


def _fingerprint(engine: Engine, weights: Any) -> str:
    """Return a digest of weights with the options by which they compute: a folder's rope_theta may be edited."""
    config = engine.config
    return digest(json.dumps([weights, config.model.computed(config.training.seq_length)], sort_keys=True))
