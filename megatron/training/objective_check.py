"""Check of a user's loss function on one microbatch, before training."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.parallel.context import ParallelContext
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
            return _checked_total(task, outputs, targets, ctx)
        except LossError as error:
            errors.append(error)
            return torch.zeros((), device=ctx.device)

    totals = [float(total) for total in forward(microbatches, loss_of)]
    label = objective.function.label

    def raise_error() -> None:
        if errors:
            raise errors[0]
        if wrong := [total for total in totals if not math.isfinite(total)]:
            raise LossError(f"{label} is {wrong[0]} in a first microbatch; make it finite for every label")

    raise_on_all_ranks(ctx, raise_error)
    gathered = ctx.gather_objects([ctx.batch_rank, *totals])
    by_rank = {rank: values for rank, *values in gathered if values}
    if any(values and values != by_rank[rank] for rank, *values in gathered):
        raise LossError(
            f"{label} differs between tensor-parallel ranks, which have equal batches; make it depend on its arguments "
            "alone, and seed what is random"
        )


def _checked_total(task: Task, outputs: tuple[Tensor, Tensor], targets: Any, ctx: ParallelContext) -> Tensor:
    """Return the loss of a microbatch, once its gradient is known to be finite. Raises LossError."""
    assert task.objective is not None
    label, fault, total = task.objective.function.label, None, None
    hidden = outputs[0].detach().requires_grad_()
    with torch.enable_grad():
        try:
            total = task.loss((hidden, outputs[1]), targets, 1.0, ctx).total
            _call_without_gradients(task, outputs, targets, ctx)
        except LossError as error:
            fault = error
    # the gradient is a collective: no rank begins it while another has failed
    failed = torch.tensor(float(fault is not None), device=ctx.device)
    if ctx.tensor_size > 1:
        dist.all_reduce(failed, group=ctx.tensor_group)
    if fault is not None:
        raise fault
    assert total is not None
    if failed.item() or not math.isfinite(total.item()) or not total.requires_grad:
        return total.detach()
    try:
        with task.objective.naming_faults():
            (gradient,) = torch.autograd.grad(total, hidden, allow_unused=True)
    except LossError:
        raise
    except RuntimeError as error:
        raise LossError(f"{label} has no gradient that can be computed: {error}") from error
    if gradient is None:
        raise LossError(f"{label} returned losses that do not depend on its first argument; compute them of it")
    if not bool(gradient.isfinite().all()):
        raise LossError(
            f"{label} is finite in a first microbatch, its gradient is not; keep it away from log(0), sqrt(0) and 0/0, "
            "also where torch.where() drops the result"
        )
    return total.detach()


def _call_without_gradients(task: Task, outputs: tuple[Tensor, Tensor], targets: Any, ctx: ParallelContext) -> None:
    """Call the function as a validation does, which may come hours after the first step. Raises LossError."""
    try:
        with torch.no_grad():
            task.loss(outputs, targets, 1.0, ctx)
    except LossError as error:
        raise LossError(f"{error}. This call was without gradients, as those of validations are") from error
