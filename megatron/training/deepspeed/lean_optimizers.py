"""DeepSpeed's optimizers with fewer passes over memory, and fewer waits for the device.

DeepSpeed sums gradients over ranks in one call after the last backward pass, and gives all of the sums to every
rank, though under bf16 and ZeRO-1 each needs its shard alone. For that its BF16_Optimizer copies all of them into one
tensor and back; its ZeRO-1 copies them into buckets, and the shard into a partition. It zeroes, converts, scales and
zeroes gradients in passes of their own, and reads the norm on the host, once or twice. Here a gradient is added to its
place in a flat buffer (the first of a step is copied) as soon as it exists, and freed, and the loss adds that of the
output weight itself, which never exists in 16 bits; the buffers are reduced while the backward pass runs
(reduction.py); norm, clipping and update read the shard; and the host reads the norm once, with the loss, in the update
gate. ZeRO-2 and 3, and offloaded optimizers, reduce as DeepSpeed does; they too clip in the update, and divide by the
loss scale that the gradients carry.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.pipe.schedule import ReduceGrads, ReduceTiedGrads
from torch import Tensor, nn

from megatron.options.config import Config
from megatron.options.deepspeed_file import zero_settings
from megatron.parallel.context import ParallelContext
from megatron.parallel.finite_checks import GRADIENT, UPDATE, PassPlace
from megatron.parallel.operators.products import DTYPES
from megatron.parallel.phase_clock import WAIT
from megatron.parallel.shards import shard_of
from megatron.plan.zero import reduce_bucket_size
from megatron.training.deepspeed.reduction import GradientBuffers, ReductionOptions
from megatron.training.deepspeed.replicas import average_over_replicas
from megatron.training.optimizers.gated import clip_divisor

Group = tuple[Tensor, list[tuple[nn.Parameter, int]]]
"""A flat buffer, and its parameters with the index of their first number."""
ZERO_3_REDUCTION = "_DeepSpeedZeroOptimizer_Stage3__reduce_and_partition_ipg_grads"
"""Method of ZeRO-3's optimizer that sums a bucket of gradients, by the name that Python gives it."""


class UpdateFromBuffers:
    """The update of DeepSpeed's bf16 and ZeRO-1 optimizers, from buffers of which a rank has the sums of its shard."""

    def __init__(self, optimizer: Any, buffers: GradientBuffers, partitions: Sequence[Tensor]) -> None:
        """`partitions`: the optimizer's flat float32 weights of this rank, one a buffer."""
        self._optimizer, self._buffers, self._partitions = optimizer, buffers, partitions

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Update the float32 weights through the gate, and round them to those of the model."""
        wrapper, gated = self._optimizer, self._optimizer.optimizer
        scaler, scale = getattr(wrapper, "loss_scaler", None), 1.0
        if scaler is not None:
            scale = float(scaler.cur_scale)
        # one collective for norm and decision; only a dynamic loss scale reads the norm before the gate does
        norm = gated.gate.find_norm(self._buffers.counted, self._buffers.uncounted, scale)
        wrapper._global_grad_norm = norm
        wrapper.overflow = scaler is not None and scaler.dynamic and not gated.gate.is_norm_finite()
        if wrapper.overflow:
            # as DeepSpeed does: the scale falls, the step counts as skipped, nothing is updated
            wrapper._update_scale(True)
            wrapper._global_grad_norm = float("inf")
            return
        gated.divisor = _divisor(norm, wrapper.clip_grad, scale)
        for partition, gradient in zip(self._partitions, self._buffers.shards, strict=True):
            # the shard itself where it has the dtype already, and else a copy for the time of the update
            partition.grad = gradient.to(partition.dtype)
        gated.step()
        for partition in self._partitions:
            # frees a copy; the buffer keeps its own until the next step
            partition.grad = None
        wrapper._lazy_init_hp_params_optimizer_state()  # knows the moments only after the first update
        wrapper.update_lp_params()
        if scaler is not None:
            wrapper._update_scale(False)  # after the division by the scale that these gradients carry


def lean(engine: Any, config: Config, ctx: ParallelContext) -> None:
    """Let a DeepSpeed engine that is built around an optimizer of ours reduce early, wait less and scale right.

    The optimizer's `buffers` then are those of its gradients; those of ZeRO-2 and 3, and an offloaded one, have none,
    nor has a bare optimizer on one rank, which has nothing to reduce.
    """
    optimizer, stage = engine.optimizer, config.effective_zero_stage
    if config.training.skip_train:
        return
    if stage >= 2 or config.optimizer.offload_optimizer:
        optimizer.unscale_and_clip_grads = partial(_clip_in_update, optimizer)
        _check_before_reduction(optimizer, ctx)
        average_over_replicas(optimizer, ctx)
        _grow_scale_after_update(optimizer)
    elif stage == 1:
        groups = _wrapped_groups(optimizer, DTYPES[config.training.grad_accum_dtype])
        buffers = GradientBuffers(engine.module, groups, _options(engine, config, ctx), ctx)
        _update_through(optimizer, buffers)
        _reduce_through(engine, buffers, buffers.finish)
    elif max(ctx.grad_size, ctx.expert_grad_size) > 1:
        groups = _bare_groups(optimizer, ctx)
        buffers = optimizer.buffers = GradientBuffers(engine.module, groups, _options(engine, config, ctx), ctx)

        def finish() -> None:
            buffers.finish()
            buffers.assign()

        _reduce_through(engine, buffers, finish)
    else:
        _reduce_through(engine, None, lambda: None)


def _bare_groups(optimizer: Any, ctx: ParallelContext) -> list[Group]:
    """Allocate buffers for an optimizer that DeepSpeed wraps nothing around."""
    groups = []
    for parameters in (group["params"] for group in optimizer.param_groups):
        # [0, n1, n1 + n2, ...]: the last is the length of all
        *starts, numel = itertools.accumulate((p.numel() for p in parameters), initial=0)
        # rounded up, so that the shards of all ranks are equally long
        _, size = ctx.grad_place(shard_of(parameters[0]))
        flat = torch.zeros(-(-numel // size) * size, dtype=parameters[0].dtype, device=ctx.device)
        groups.append((flat, list(zip(parameters, starts, strict=True))))
    return groups


def _wrapped_groups(optimizer: Any, dtype: torch.dtype) -> list[Group]:
    """Return the buffers for an optimizer of DeepSpeed's, whose flat weights they resemble."""
    if isinstance(optimizer, BF16_Optimizer):
        parameters, weights = optimizer.bf16_groups, optimizer.bf16_groups_flat
        buffers = optimizer.fp32_groups_gradients_flat
    else:
        parameters, weights = optimizer.bit16_groups, optimizer.bit16_groups_flat
        buffers = [torch.zeros_like(flat, dtype=dtype) for flat in weights]
    groups = []
    for buffer, group, flat in zip(buffers, parameters, weights, strict=True):
        # DeepSpeed's parameters are views of its flat weights, so a gradient takes the same place in its buffer
        starts = [(parameter.data_ptr() - flat.data_ptr()) // flat.element_size() for parameter in group]
        groups.append((buffer, list(zip(group, starts, strict=True))))
    return groups


def _update_through(optimizer: Any, buffers: GradientBuffers) -> None:
    """Let an optimizer of DeepSpeed's take its gradients from buffers, and no longer from its hooks."""
    for hook in optimizer._grad_acc_hooks:
        hook.remove()
    # BF16_Optimizer's add each gradient to a float32 copy, ZeRO-1's put it into a bucket
    optimizer._grad_acc_hooks.clear()
    if isinstance(optimizer, BF16_Optimizer):
        partitions = optimizer.fp32_groups_flat_partition
        optimizer.clear_hp_grads = lambda: None  # the buffers discard the gradients when a step begins
    else:
        partitions = optimizer.single_partition_of_fp32_groups
    optimizer.buffers = buffers
    optimizer.step = UpdateFromBuffers(optimizer, buffers, partitions).step


def _options(engine: Any, config: Config, ctx: ParallelContext) -> ReductionOptions:
    training, user, zero = config.training, zero_settings(config), engine._config.zero_config
    divisor = ctx.grad_size
    # unless the user's prescale_gradients is on: by a factor, 1 by default, before the sum, by the rest after it
    if engine.postscale_gradients():
        divisor = engine.gradient_predivide_factor()
    bucket_numel = reduce_bucket_size(config)
    # DeepSpeed's value of it has a default; only one that is given counts
    if "reduce_bucket_size" in user:
        bucket_numel = zero.reduce_bucket_size
    return ReductionOptions(
        DTYPES[training.grad_reduce_dtype or training.grad_accum_dtype],
        bucket_numel,
        # ours overlaps unless the user has said no: DeepSpeed's default is for its own reduction
        overlaps="overlap_comm" not in user or zero.overlap_comm,
        is_sharded=config.effective_zero_stage == 1 and zero.reduce_scatter,
        scale_before=1 / divisor,
        scale_after=divisor / ctx.grad_size,
    )


def _reduce_through(engine: Any, buffers: GradientBuffers | None, finish: Callable[[], None]) -> None:
    """Let DeepSpeed's engine `finish` the reduction of the buffers where it would reduce itself."""

    def finish_at_boundary() -> None:
        if engine.is_gradient_accumulation_boundary():
            finish()

    engine.allreduce_gradients = finish_at_boundary
    if hasattr(engine, "_INSTRUCTION_MAP"):
        # a table of this engine's own: the class's is shared
        engine._INSTRUCTION_MAP = engine._INSTRUCTION_MAP | {ReduceGrads: lambda _: finish()}
        if buffers is not None:
            engine._INSTRUCTION_MAP |= {ReduceTiedGrads: lambda _: buffers.sum_tied()}


def _check_before_reduction(optimizer: Any, ctx: ParallelContext) -> None:
    """Check this rank's own gradients before DeepSpeed sums them, and count the sum as a wait for other ranks."""
    is_zero_3 = hasattr(optimizer, ZERO_3_REDUCTION)
    name = ZERO_3_REDUCTION if is_zero_3 else "average_tensor"
    reduce = getattr(optimizer, name)

    def own_gradients(*arguments: Any) -> list[Tensor]:
        if not is_zero_3:
            return [arguments[0]]
        if arguments:
            bucket = optimizer.ipg_buckets[arguments[0]].params
        else:  # the fork has one for all dtypes
            bucket = optimizer.params_in_ipg_bucket
        return [parameter.grad for parameter in bucket]

    def call(*arguments: Any) -> None:
        for gradients in own_gradients(*arguments):
            ctx.state.checks.whole(gradients, GRADIENT, PassPlace(UPDATE))
        with ctx.state.clock.phase(WAIT):
            reduce(*arguments)

    setattr(optimizer, name, call)


def _grow_scale_after_update(optimizer: Any) -> None:
    """Let the loss scale grow after the update, not before it.

    DeepSpeed doubles it first, and divides gradients of the old scale by the new one: every `loss_scale_window`
    steps the update would be that of half the gradient, and ZeRO-3 would report and clip by half the norm.
    """
    step, update_scale = optimizer.step, optimizer._update_scale

    def step_then_grow(closure: Any = None) -> None:
        step(closure)
        if not optimizer.overflow:
            update_scale(False)

    def fall_at_once(has_overflow: bool) -> None:
        if has_overflow:
            update_scale(True)

    optimizer._update_scale, optimizer.step = fall_at_once, step_then_grow


def _clip_in_update(optimizer: Any, gradients: list[Tensor] | int, norm: Tensor) -> None:
    """Let the update divide by the loss scale and clip, in place of ZeRO's own passes and, in ZeRO-2, its wait.

    `gradients`: those of a parameter group, or ZeRO-3's number of one. `norm`: of the gradients times the loss scale.
    """
    # ZeRO-3 calls with the number of a group, ZeRO-2 with a list of one flat gradient
    flat = optimizer.fp32_partitioned_groups_flat[gradients] if isinstance(gradients, int) else gradients[0]
    scale = float(optimizer.loss_scale)
    divisor = _divisor(norm / scale, optimizer.clip_grad, scale)
    if divisor is not None:  # offloaded gradients are on the host
        divisor = divisor.to(flat.device, torch.float32)
    optimizer.optimizer.divisor = divisor


def _divisor(norm: Tensor, max_norm: float, scale: float) -> Tensor | None:
    """Return what the update divides gradients by that carry a loss scale, and have this norm without it."""
    divisor = clip_divisor(norm, max_norm)
    if scale == 1.0:
        return divisor
    if divisor is None:
        # on the norm's device, without a copy from the host
        return torch.full_like(norm, scale)
    return divisor * scale
