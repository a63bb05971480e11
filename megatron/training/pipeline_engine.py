"""DeepSpeed's pipeline engine behind the face of an engine, and the stage of the model that it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.runtime.pipe.schedule import BackwardPass, ForwardPass
from torch import Tensor, nn

from megatron.accelerator import marked
from megatron.config.options import Config
from megatron.models.sequential import compute_dtype, default_dtype
from megatron.observability.timers import around
from megatron.parallel.context import ParallelContext
from megatron.planning.pipeline import stage_bounds
from megatron.planning.sizes import declared_layers
from megatron.training.engine import Engine, to_device
from megatron.training.losses import StepLosses


class PipelineEngine(Engine):
    """DeepSpeed's 1F1B schedule over a PipelineModule, of one stage or more."""

    def __init__(self, engine: Any, *arguments: Any) -> None:
        super().__init__(engine, *arguments)
        for instruction in (ForwardPass, BackwardPass):
            engine._INSTRUCTION_MAP = engine._INSTRUCTION_MAP | {
                instruction: marked(engine._INSTRUCTION_MAP[instruction])
            }
        self._aggregate: Callable[[], Tensor] = engine._aggregate_total_loss
        if engine.steps_per_print() is None and not engine.monitor.enabled:
            engine._aggregate_total_loss = lambda: None  # the gate reduces the loss; DeepSpeed's own log needs it too
        self.timers.watch_pipeline(engine)
        if self.trace.wanted:
            engine._INSTRUCTION_MAP = {
                kind: self.trace.recorded(kind.__name__, method) for kind, method in engine._INSTRUCTION_MAP.items()
            }

    @property
    def called_module(self) -> nn.Module:
        return self.module  # the pipeline engine calls it itself

    def _watch_microbatches(self, before_forward: Callable[[], None], after_backward: Callable[[], None]) -> None:
        table = self.deepspeed._INSTRUCTION_MAP
        self.deepspeed._INSTRUCTION_MAP = table | {
            ForwardPass: around(table[ForwardPass], before=before_forward),
            BackwardPass: around(table[BackwardPass], after=after_backward),
        }

    def _train(self, batches: Iterator[tuple[Any, Any]]) -> None:
        self.deepspeed.train_batch(self._on_device(batches))

    def _mean_loss(self) -> Tensor:
        return self._aggregate()

    def _evaluate(self, batches: Sequence[tuple[Any, Any]], num_microbatches: int) -> Tensor:
        loss: Tensor = self.deepspeed.eval_batch(self._on_device(batches), num_micro_batches=num_microbatches)
        self.module.train()
        return loss

    def _on_device(self, batches: Iterable[tuple[Any, Any]]) -> Iterator[tuple[Any, Any]]:
        """Copy what this stage uses of each microbatch when DeepSpeed takes it, whose own copies wait."""
        ctx = self.ctx
        for inputs, targets in batches:
            yield (
                to_device(inputs, ctx.device) if ctx.is_first_stage else inputs,
                to_device(targets, ctx.device) if ctx.is_last_stage else targets,
            )


class StageModule(PipelineModule):
    """This rank's stage of the list of layers: DeepSpeed's PipelineModule, cut at `bounds` of `stage_bounds`."""

    def __init__(self, specs: Sequence[LayerSpec], bounds: Sequence[int], **options: Any) -> None:
        self.parts = list(bounds)  # read by DeepSpeed's constructor
        super().__init__(specs, **options)

    def _partition_layers(self, method: str = "") -> None:
        stage = self._topo.get_coord(self.global_rank).pipe
        self._set_bounds(*self.parts[stage : stage + 2])


def pipeline_module(
    config: Config, ctx: ParallelContext, specs: list[LayerSpec], losses: StepLosses, varies_shapes: bool
) -> nn.Module:
    """Allocate the layers of this rank's stage. Collective."""
    # without no_grad, its broadcast of tied weights would become part of their autograd graph
    with default_dtype(compute_dtype(config)), torch.no_grad():
        return StageModule(
            specs,
            stage_bounds(config, declared_layers(config)),
            topology=ctx.topology,
            loss_fn=losses,
            activation_checkpoint_interval=0,
            dynamic_shape=varies_shapes,
        )
