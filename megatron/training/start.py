"""Checks before training: of a user's loss on one microbatch, of a resumed schedule; and what a task computes then."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.checkpoint.format import CheckpointError
from megatron.data.blend import digest
from megatron.options.config import OptimizerConfig
from megatron.options.schedule import ParamSchedule, Schedule
from megatron.parallel.context import ParallelContext
from megatron.resilience.errors import raise_on_all_ranks
from megatron.tasks.loss_result import LossError
from megatron.tasks.objective import Objective, StartWeights
from megatron.tasks.stored_labels import complete, label_jobs, open_stored, open_teacher
from megatron.tasks.task import Task
from megatron.tasks.user_loss import UserLoss
from megatron.training.engine import Engine
from megatron.training.resume import Start
from megatron.weights.base_identity import BaseSums, joined, own_parts


def check_user_loss(engine: Engine, task: Task, objective: UserLoss, datasets: Sequence[Any]) -> None:
    """Call the function on the first microbatch of each rank. Collective. Raises LossError on every rank."""
    ctx = engine.ctx
    dataset = next(dataset for dataset in datasets if dataset is not None)
    size = engine.config.training.global_batch_size
    _, keys = task.data.plan(dataset, lambda _: size, ctx.batch_rank, ctx.num_batch_ranks)(0)
    microbatches = []
    if engine.reads_data:
        microbatches = [task.read(dataset, key) for key in keys]
    forward = partial(engine.forward, num_microbatches=len(keys))
    # no step has seeded them yet: what the function draws is to be alike on ranks of equal rows
    ctx.state.streams.seed_step(engine.dropout_seed, 0, ctx)
    # the function may take a reference that is computed before each step
    microbatches = task.objective.before_step(microbatches, forward, ctx)
    errors: list[LossError] = []

    def loss_of(outputs: tuple[Tensor, Tensor], targets: Any) -> Tensor:
        # an error here would leave the other stages of the pipeline waiting
        try:
            return _checked_total(objective, outputs, targets, ctx)
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
    # exactly: equal arguments give equal numbers, unless it draws some
    if any(values and values != by_rank[rank] for rank, *values in gathered):
        raise LossError(
            f"{label} differs between {_of_equal_rows(ctx)} ranks, which have equal batches; make it depend on its "
            "arguments alone, and seed what is random"
        )


def _of_equal_rows(ctx: ParallelContext) -> str:
    """Return the kinds of parallelism whose ranks compute the same rows."""
    kinds = []
    if ctx.tensor_size > 1:
        kinds.append("tensor-parallel")
    if ctx.context_size > 1:
        kinds.append("context-parallel")
    return " or ".join(kinds)


def _checked_total(objective: UserLoss, outputs: tuple[Tensor, Tensor], targets: Any, ctx: ParallelContext) -> Tensor:
    """Return the loss of a microbatch, once its gradient is known to be finite. Raises LossError."""
    label, fault, total = objective.function.label, None, None
    # a leaf of its own: the gradient stops here, and no parameter's is touched
    hidden = outputs[0].detach().requires_grad_()
    with torch.enable_grad():
        try:
            # as a step calls it
            total = objective.loss((hidden, outputs[1]), targets, 1.0, ctx).total
        except LossError as error:
            fault = error
        try:
            # also after a fault: what precedes the function is collective, and other ranks may have met none
            _call_without_gradients(objective, outputs, targets, ctx)
        except LossError as error:
            fault = fault or error
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
        with objective.naming_faults():
            (gradient,) = torch.autograd.grad(total, hidden, allow_unused=True)
    except LossError:
        raise
    except RuntimeError as error:
        raise LossError(f"{label} has no gradient that can be computed: {error}") from error
    # allow_unused: autograd's own error would not name the function
    if gradient is None:
        raise LossError(f"{label} returned losses that do not depend on its first argument; compute them of it")
    if _has_own_parameter(total, (hidden, outputs[1])):
        raise LossError(
            f"{label} computes its losses from a parameter of its own, which no optimizer trains; make it a number or "
            "an option, or write a model family that has it (docs/internals/extending.md)"
        )
    if not bool(gradient.isfinite().all()):
        raise LossError(
            f"{label} is finite in a first microbatch, its gradient is not; keep it away from log(0), sqrt(0) and 0/0, "
            "also where torch.where() drops the result"
        )
    return total.detach()


def _has_own_parameter(total: Tensor, given: Sequence[Tensor]) -> bool:
    """Return True if a gradient of `total` reaches a parameter other than those that the function was given."""
    # by storage: what it is given may be a view of a parameter, the output weight
    known = {tensor.untyped_storage().data_ptr() for tensor in given}
    waiting, seen = [total.grad_fn], set[Any]()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, torch.nn.Parameter) and leaf.untyped_storage().data_ptr() not in known:
            return True
        waiting += [following for following, _ in node.next_functions]
    return False


def _call_without_gradients(
    objective: UserLoss, outputs: tuple[Tensor, Tensor], targets: Any, ctx: ParallelContext
) -> None:
    """Call the function as a validation does, which may come hours after the first step. Raises LossError."""
    try:
        with torch.no_grad():
            objective.loss(outputs, targets, 1.0, ctx)
    except LossError as error:
        raise LossError(f"{error}. This call was without gradients, as those of validations are") from error


def resumed_schedule(
    schedule: Schedule,
    saved: Mapping[str, Any] | None,
    where: str,
    options: OptimizerConfig,
    counted_from: int | None = None,
) -> tuple[Schedule, str | None]:
    """Return the schedule to resume `saved` with, and a line on what differs or could not be compared.

    `saved`: ParamSchedule.to_dict of the checkpoint `where`; None: it has none. As in Megatron, a difference is an
    error unless override_opt_param_scheduler selects this run's numbers, or use_checkpoint_opt_param_scheduler the
    checkpoint's. `counted_from`: seq_length of its samples, where they count as samples of this run's. Raises
    CheckpointError.
    """
    # as of a checkpoint that was converted from elsewhere
    if saved is None:
        if options.use_checkpoint_opt_param_scheduler:
            raise CheckpointError(
                f"{where} holds no learning-rate schedule for --use-checkpoint-opt-param-scheduler; leave that out, "
                "and give the options of the schedule"
            )
        return schedule, f"WARNING: {where} holds no learning-rate schedule; that of this command applies, unchecked"
    try:
        theirs = ParamSchedule.from_dict(saved)
        if counted_from is not None:
            theirs = theirs.counted_in(counted_from, schedule.training.seq_length)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{where} has no usable schedule ({error!r}); load another one") from None
    # numbers in effect: the same schedule may be given by other options
    here, there = schedule.params.in_effect(), theirs.in_effect()
    said = "; ".join(
        f"{name}={_said(here.get(name))} here, {_said(there.get(name))} there"
        for name in dict.fromkeys([*here, *there])
        if here.get(name) != there.get(name)
    )
    if options.use_checkpoint_opt_param_scheduler:
        return dataclasses.replace(schedule, restored=theirs), said and f"schedule of {where} applies: {said}"
    if said and not options.override_opt_param_scheduler:
        raise CheckpointError(
            f"{where} was trained with another schedule (lengths in samples): {said}. Give the same options, or pass "
            "--override-opt-param-scheduler for the numbers here, --use-checkpoint-opt-param-scheduler for those there"
        )
    return schedule, said and f"override_opt_param_scheduler: {said}"


def _said(value: Any) -> str:
    if value is None:
        return "unused"
    if isinstance(value, float):
        return f"{value:g}"
    if not isinstance(value, tuple):
        return str(value)
    if not value:
        return "0"
    text = f"{value[-1][0]:g}"
    if len(value) > 1:
        text += f" in {len(value)} slopes"
    return text


def prepare_task(
    engine: Engine, task: Task, datasets: Sequence[Any], start: Start, beat: Callable[[], None]
) -> list[str]:
    """Let the task complete its datasets with what the weights at the start compute, and return lines to print.

    `beat` is called after each of its forward passes. Collective. Raises DataError or LossError.
    """
    objective, writes_teacher = task.objective, task.config.training.teacher_top_k is not None
    stores = writes_teacher
    if isinstance(objective, UserLoss):
        raise_on_all_ranks(engine.ctx, lambda: open_teacher(task, datasets))
        check_user_loss(engine, task, objective, datasets)
        stores = stores or objective.stores_reference
    # most tasks: the fingerprint below reads every weight
    if not stores and type(objective).before_training is Objective.before_training:
        return []

    def forward(*arguments: Any, **options: Any) -> list[Tensor]:
        results = engine.forward(*arguments, **options)
        beat()
        return results

    # the teacher's file is of the model as it computes, adapters included; a reference is of the model at the start
    if writes_teacher:
        weights = StartWeights(fingerprint_of(engine), True)
    else:
        weights = start_weights(engine, start)
        engine.start_fingerprint = weights.fingerprint
    lines, jobs = [], []
    if stores:
        jobs = label_jobs(task, datasets, weights.fingerprint)
    for job in jobs:
        done = complete(job, forward, engine.ctx, may_compute=weights.are_loaded)
        if writes_teacher:
            lines.append(f"teacher of {done}")
        else:
            lines.append(f"reference of {done}")
            raise_on_all_ranks(engine.ctx, partial(open_stored, job))
    return lines + task.objective.before_training(datasets, forward, weights, engine.ctx)


def start_weights(engine: Engine, start: Start) -> StartWeights:
    """Return the weights that the run started from: those in the engine, or those that its checkpoint names.

    Of adapters it is their base, which stays as it is. Collective.
    """
    # adapters leave their base as it is, so it is the start at any iteration
    if engine.base is not None:
        return StartWeights(_fingerprint(engine, _tensors_of(engine.base)), True)
    saved = None
    if start.checkpoint is not None:
        saved = start.checkpoint.metadata.get("start_fingerprint")
    if saved is not None and start.progress.iteration:
        return StartWeights(str(saved), False)
    return StartWeights(fingerprint_of(engine), not start.progress.iteration)


def fingerprint_of(engine: Engine) -> str:
    """Return the fingerprint of the model in the engine, adapters and their base included. Collective."""
    # each number of the model on one rank alone
    pieces = [piece for piece in engine.state.owned() if piece.is_saved_here]
    sums = BaseSums(own_parts({piece.name: piece.shard for piece in pieces}), rounded=False)
    for piece in pieces:
        sums.add(engine.state.slice_of(piece), piece.weight)
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
