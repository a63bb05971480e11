"""DeepSpeed's plain engine behind the face of an engine: the layers in sequence, for ZeRO-2, ZeRO-3 and offload."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec
from torch import Tensor, nn

from megatron.accelerator import marked
from megatron.config.options import Config
from megatron.models.sequential import SequentialModel, compute_dtype, default_dtype
from megatron.observability.timers import around
from megatron.parallel.context import ParallelContext
from megatron.training.engine import Engine, to_device


class SequentialEngine(Engine):
    """One microbatch after the other through the whole model, for ZeRO-2, ZeRO-3 and offload."""

    def __init__(self, engine: Any, *arguments: Any) -> None:
        super().__init__(engine, *arguments)
        self.timers.watch_sequential(engine)
        if self.trace.wanted:
            engine.allreduce_gradients = self.trace.recorded("ReduceGrads", engine.allreduce_gradients)
            engine.step = self.trace.recorded("OptimizerStep", engine.step)
        forward = self.passes.counted("ForwardPass", marked(self.ctx.fp8.around(self._loss)))
        self._forward = self.trace.recorded("ForwardPass", forward)
        backward = self.passes.counted("BackwardPass", marked(engine.backward))
        self._backward = self.trace.recorded("BackwardPass", backward)

    def _watch_microbatches(self, before_forward: Callable[[], None], after_backward: Callable[[], None]) -> None:
        self._forward = around(self._forward, before=before_forward)
        self._backward = around(self._backward, after=after_backward)

    def _train(self, batches: Iterator[tuple[Any, Any]]) -> None:
        engine, steps = self.deepspeed, self.deepspeed.gradient_accumulation_steps()
        for index, (inputs, targets) in enumerate(batches):
            engine.set_gradient_accumulation_boundary(index == steps - 1)
            with self.timers("forward-compute"):
                loss = self._forward(inputs, targets)
            with self.timers("backward-compute"):
                self._backward(loss)
            with self.timers("optimizer"):
                engine.step()

    def _evaluate(self, batches: Sequence[tuple[Any, Any]], num_microbatches: int) -> Tensor:
        self._run_forward(batches, num_microbatches)
        return self._mean_loss()

    def _run_forward(self, batches: Sequence[tuple[Any, Any]], num_microbatches: int) -> None:
        self.deepspeed.eval()
        with torch.no_grad():
            for inputs, targets in batches:
                self._forward(inputs, targets)
        self.deepspeed.train()

    def _loss(self, inputs: Any, targets: Any) -> Tensor:
        with self.timers("batch-generator"):
            inputs, targets = (to_device(part, self.ctx.device) for part in (inputs, targets))
        loss: Tensor = self.deepspeed(inputs, partial(self._losses.compute, targets=targets))
        self._losses.keep(loss)
        return loss

    def _mean_loss(self) -> Tensor:
        loss = torch.stack(self._losses.values).mean()
        if self.ctx.grad_group is not None:
            dist.all_reduce(loss, group=self.ctx.grad_group)
            loss /= self.ctx.grad_size
        return loss


def sequential_module(
    config: Config, ctx: ParallelContext, specs: list[LayerSpec], settings: dict[str, Any]
) -> nn.Module:
    """Allocate the whole model, in ZeRO-3 cut up over the data-parallel ranks. Collective there."""
    if config.optimizer.zero_stage < 3:
        with default_dtype(compute_dtype(config)):
            return SequentialModel(specs)
    # each parameter is cut up over the data-parallel ranks as soon as it is made: the whole never fits.
    # its `dtype` argument must stay unset: DeepSpeed 0.19.8 takes it for bfloat16 where float16 is unsupported
    with deepspeed.zero.Init(
        data_parallel_group=ctx.grid.get_data_parallel_group(),
        config_dict_or_path=settings,
        mem_efficient_linear=False,  # would replace torch's linear for the whole process
        mpu=ctx.grid,
    ):
        return SequentialModel(specs)
