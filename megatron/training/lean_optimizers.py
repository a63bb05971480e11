"""DeepSpeed's optimizers with fewer passes over memory, and fewer waits for the device.

For each parameter and step, DeepSpeed 0.19.8's BF16_Optimizer zeroes the 16-bit gradient, adds to it in backward,
converts it, adds it to the float32 gradient, scales that for clipping and zeroes it twice. It reads the norm on the
host twice as well. Here a 16-bit gradient is added (the first of a step is copied) as soon as it exists, and freed; the
loss adds that of the output weight itself, which never exists in 16 bits; clipping is part of the optimizer's update;
and the host reads the norm once, with the loss, in the update gate. ZeRO's own optimizers clip in the update too, and
divide by the loss scale that the gradients carry.
"""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any, cast

import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from torch import Tensor

from megatron.parallel.context import ParallelContext
from megatron.parallel.shards import shard_of
from megatron.parallel.weight_gradient import GradientSum
from megatron.training.optimizer import clip_divisor, norm_over_model


class _BufferedSum(GradientSum):
    """A parameter's place in the optimizer's float32 gradients.

    Holds neither: a cycle of parameter and optimizer is never collected.
    """

    def __init__(self, total: Tensor, flags: list[bool], index: int) -> None:
        self._total, self._flags, self._index = total, flags, index

    def open(self) -> tuple[Tensor, bool]:
        had_gradient, self._flags[self._index] = self._flags[self._index], True
        return self._total, had_gradient

    def close(self) -> None:
        """Nothing: the gradients are reduced after the last backward pass."""


class LeanBF16Optimizer(BF16_Optimizer):  # type: ignore[misc]
    """Class that `lean` gives DeepSpeed's BF16_Optimizer once it is built.

    Needs `immediate_grad_update`, with which a hook of each parameter calls `_update_hp_grad` in the backward pass.
    """

    ctx: ParallelContext

    def offer_sums(self) -> None:
        """Let the loss add the gradients of vocabulary weights to the float32 ones itself."""
        for group_idx, group in enumerate(self.bf16_groups):
            for param_idx, lp in enumerate(group):
                if shard_of(lp).vocabulary and self.grad_acc_dtype is torch.float32:
                    lp._hp_grad = self.fp32_groups_gradients[group_idx][param_idx]  # read where weights are tied
                    total, flags = lp._hp_grad.view(lp.shape), self.fp32_groups_has_gradients[group_idx]
                    lp.gradient_sum = _BufferedSum(total, flags, param_idx)

    def expect_loss_gradient(self, value: float) -> None:
        """Set the gradient of a microbatch's loss with which the next backward passes will start."""
        for lp in itertools.chain.from_iterable(self.bf16_groups):
            if hasattr(lp, "gradient_sum"):
                lp.gradient_sum.loss_gradient = value

    @torch.no_grad()
    def _update_hp_grad(self, lp: Any, group_idx: int, param_idx: int, clear_lp_grads: bool) -> None:
        if lp.grad is None:
            return
        total = self.fp32_groups_gradients[group_idx][param_idx]
        has_gradient = self.fp32_groups_has_gradients[group_idx]
        gradient = lp.grad.view(total.shape)
        if has_gradient[param_idx]:
            total.add_(gradient)
        else:
            total.copy_(gradient)
        lp._hp_grad = total
        has_gradient[param_idx] = True

    def clear_hp_grads(self) -> None:
        """Discard the gradients. Their memory keeps its content until the first gradient of the next step."""
        for flags in self.fp32_groups_has_gradients:
            flags[:] = [False] * len(flags)

    def _zero_missing(self) -> None:
        """Zero the gradients of parameters that this step has not used."""
        for totals, flags in zip(self.fp32_groups_gradients, self.fp32_groups_has_gradients, strict=True):
            for index, has_gradient in enumerate(flags):
                if not has_gradient:
                    totals[index].zero_()
                    flags[index] = True

    def get_grads_for_reduction(self) -> Any:
        self._zero_missing()
        return super().get_grads_for_reduction()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Update the float32 weights through the gate, and round them to the 16-bit ones."""
        self._zero_missing()
        gradients = cast(list[Tensor], self.get_grads_for_norm()[0])
        norm = self._global_grad_norm = norm_over_model(gradients, self.ctx)
        divisor = clip_divisor(norm, self.clip_grad)
        partitions = self.fp32_groups_flat_partition
        for partition, gradient in zip(partitions, self.fp32_groups_gradient_flat_partition, strict=True):
            partition.grad = gradient.to(partition.dtype)
        self.optimizer.divisor = divisor
        self.optimizer.step()
        if self.grad_acc_dtype is not torch.float32:
            for partition in partitions:
                partition.grad = None
        self._lazy_init_hp_params_optimizer_state()  # knows the moments only after the first update
        self.update_lp_params()
        self.clear_hp_grads()


def lean(optimizer: Any, ctx: ParallelContext) -> None:
    """Let DeepSpeed's optimizer, as 0.19.8 builds it around one of ours, wait less and scale right."""
    if type(optimizer) is BF16_Optimizer:
        # DeepSpeed compares its class with its own while it builds the engine, so it cannot be built as this one
        optimizer.__class__ = LeanBF16Optimizer
        optimizer.ctx = ctx
        optimizer.offer_sums()
    elif hasattr(optimizer, "unscale_and_clip_grads"):
        optimizer.unscale_and_clip_grads = partial(_clip_in_update, optimizer)
        _grow_scale_after_update(optimizer)


def _grow_scale_after_update(optimizer: Any) -> None:
    """Let the loss scale grow after the update, not before it.

    DeepSpeed 0.19.8 doubles it first, and divides gradients of the old scale by the new one: every `loss_scale_window`
    steps the update would be that of half the gradient, and ZeRO-3 would report and clip by half the norm.
    """
    step, update_scale = optimizer.step, optimizer._update_scale

    def step_then_grow(closure: Any = None) -> None:
        step(closure)
        if not optimizer.overflow:
            update_scale(False)

    optimizer._update_scale = lambda has_overflow: update_scale(True) if has_overflow else None
    optimizer.step = step_then_grow


def _clip_in_update(optimizer: Any, gradients: list[Tensor] | int, norm: Tensor) -> None:
    """Let the update divide by the loss scale and clip, in place of ZeRO's own passes and, in ZeRO-1 and 2, its wait.

    `gradients`: those of a parameter group, or ZeRO-3's number of one. `norm`: of the gradients times the loss scale.
    """
    flat = optimizer.fp32_partitioned_groups_flat[gradients] if isinstance(gradients, int) else gradients[0]
    scale = float(optimizer.loss_scale)
    divisor = clip_divisor(norm / scale, optimizer.clip_grad)
    if scale != 1.0:
        divisor = torch.full_like(norm, scale) if divisor is None else divisor * scale
    optimizer.optimizer.divisor = None if divisor is None else divisor.to(flat.device, torch.float32)
