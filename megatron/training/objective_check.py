"""Check of a user's loss function on one microbatch, before training."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron.resilience.errors import raise_on_all_ranks
from megatron.tasks.loss_result import LossError
from megatron.tasks.task import Task
from megatron.training.engine import Engine


def check_objective(engine: Engine, task: Task, datasets: Sequence[Any]) -> None:
    """Call the function on the first microbatch of each rank. Collective. Raises LossError on every rank."""
    objective, ctx = task.objective, engine.ctx
    assert objective is not None
    dataset = next(dataset for dataset in datasets if dataset is not None)
    size = engine.config.training.global_batch_size
    _, keys = task.plan(dataset, lambda _: size, ctx.batch_rank, ctx.num_batch_ranks)(0)
    microbatches = [task.read(dataset, key) for key in keys] if engine.reads_data else []
    forward = partial(engine.forward, num_microbatches=len(keys))
    microbatches = task.before_step(microbatches, forward, ctx)
    errors: list[LossError] = []

    def loss_of(outputs: tuple[Tensor, Tensor], targets: Any) -> Tensor:
        # an error here would leave the other stages of the pipeline waiting
        try:
            with torch.enable_grad():
                hidden = outputs[0].detach().requires_grad_()
                return task.loss((hidden, outputs[1]), targets, 1.0, ctx).total.detach()
        except LossError as error:
            errors.append(error)
            return torch.zeros((), device=ctx.device)

    totals = [float(total) for total in forward(microbatches, loss_of)]

    def raise_error() -> None:
        if errors:
            raise errors[0]
        if wrong := [total for total in totals if not torch.isfinite(torch.tensor(total))]:
            raise LossError(
                f"loss={objective.name} is {wrong[0]} in a first microbatch; make it finite for every label"
            )

    raise_on_all_ranks(ctx, raise_error)
    gathered = ctx.gather_objects([ctx.batch_rank, *totals])
    by_rank = {rank: values for rank, *values in gathered if values}
    if any(values and values != by_rank[rank] for rank, *values in gathered):
        raise LossError(
            f"loss={objective.name} differs between tensor-parallel ranks, which have equal batches; make it depend on "
            "its arguments alone, and seed what is random"
        )
