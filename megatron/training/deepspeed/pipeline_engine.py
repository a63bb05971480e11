"""DeepSpeed's pipeline engine behind the face of an engine, and the stage of the model that it runs."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from deepspeed.pipe import LayerSpec
from deepspeed.runtime.pipe.schedule import BackwardPass, ForwardPass, RecvActivation, SendActivation
from torch import Tensor, nn

from megatron.generation.graphs import PassGraphs
from megatron.models.sequential import compute_dtype, default_dtype
from megatron.observability.timers import around
from megatron.options.config import Config
from megatron.parallel.context import ParallelContext
from megatron.parallel.messages import check_filled, mark
from megatron.parallel.shards import shard_of
from megatron.plan.flops import declared_layers
from megatron.plan.pipeline import stage_bounds
from megatron.runtime.accelerator import marked
from megatron.training.deepspeed import pipeline_executor
from megatron.training.deepspeed.releases import prints_steps
from megatron.training.engine import Engine, to_device
from megatron.training.losses import StepLosses

MOST_GRAPHS = 64
"""Largest number of graphs of a stage, more than the lengths of rows of a fine-tuning run."""


class EvaluationGraphs:
    """The forward pass of a stage: within `on` by a graph, which reads the weights where training updates them."""

    def __init__(self, module: nn.Module, ctx: ParallelContext, losses: StepLosses) -> None:
        """Take the place of the module's forward pass. Raises ConfigError where the device has no graphs."""
        self._losses = losses
        self._graphs = PassGraphs(ctx, "eval_graphs", MOST_GRAPHS)
        self._is_last = ctx.is_last_stage
        self._forward: Callable[[Any], Any] = module.forward
        self._is_on = False
        # on the module: DeepSpeed's engine calls it, whatever schedule it runs
        module.forward = self._run  # type: ignore[method-assign]

    @property
    def count(self) -> int:
        """Number of graphs captured."""
        return self._graphs.count

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        self._is_on = True
        try:
            yield
        finally:
            self._is_on = False

    def _run(self, inputs: Tensor | tuple[Tensor, ...]) -> Any:
        if not self._is_on:
            return self._forward(inputs)
        is_one = isinstance(inputs, Tensor)
        tensors: tuple[Tensor, ...] = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
        # a graph replays the very sizes that it was captured with
        key = tuple((tensor.shape, tensor.dtype) for tensor in tensors)

        def forward(*given: Tensor) -> Any:
            # a replay runs no Python: what the layers record is among the outputs of the graph
            return self._losses.of_layers(lambda: self._forward(given[0] if is_one else given))

        outputs, rows = self._graphs.run(key, forward, tensors)
        if rows is not None:
            # the next replay writes into the same memory
            self._losses.join_of_layers(rows.clone())
        if isinstance(outputs, Tensor):
            return self._taken(outputs)
        return tuple(map(self._taken, outputs))

    def _taken(self, output: Tensor) -> Tensor:
        """Return an output; a copy where it is yet to be sent when a graph overwrites it.

        A weight is among those of the last stage. Autograd would refuse its view of an earlier evaluation.
        """
        if not self._is_last:
            return output.clone()
        taken = output.detach()
        vars(taken).update(vars(output))
        return taken


class PipelineEngine(Engine):
    """A pipeline of one stage or more: DeepSpeed's 1F1B, or a schedule that PipelineExecutor runs."""

    def __init__(self, engine: Any, *arguments: Any) -> None:
        super().__init__(engine, *arguments)
        table = engine._INSTRUCTION_MAP
        # innermost, so that the marks, counters and timers around it see all of a pass
        fp8 = self.ctx.state.fp8
        table = table | {
            ForwardPass: fp8.around(table[ForwardPass]),
            BackwardPass: fp8.around_backward(table[BackwardPass]),
        }
        # the table of DeepSpeed has no WeightPass
        passes = (kind for kind in (ForwardPass, BackwardPass, pipeline_executor.WeightPass) if kind in table)
        engine._INSTRUCTION_MAP = table | {kind: marked(table[kind]) for kind in passes}
        if not self.config.uses_own_schedule:  # ours leaves out what is frozen by itself
            engine._INSTRUCTION_MAP[BackwardPass] = marked(_if_needed(table[BackwardPass]))
            _announce_on_hosts(engine, self.ctx)
        # kept for a step that DeepSpeed refuses, whose loss the gate never sees
        self._aggregate: Callable[[], Tensor] = engine._aggregate_total_loss
        if not prints_steps(engine) and not engine.monitor.enabled:
            engine._aggregate_total_loss = lambda: None  # the gate reduces the loss; DeepSpeed's own log needs it too
        self._graphs: EvaluationGraphs | None = None
        if self.config.data.eval_graphs:
            self._graphs = EvaluationGraphs(self.module, self.ctx, self._losses)
        self.passes.watch_pipeline(engine)
        self.timers.watch_pipeline(engine)
        if self.trace.wanted:
            engine._INSTRUCTION_MAP = {
                kind: self.trace.recorded(kind.__name__, method) for kind, method in engine._INSTRUCTION_MAP.items()
            }

    @property
    def num_graphs(self) -> int:
        if self._graphs is None:
            return 0
        return self._graphs.count

    def _watch_microbatches(self, before_forward: Callable[[], None], after_backward: Callable[[], None]) -> None:
        table = self.deepspeed._INSTRUCTION_MAP
        # there the gradients of weights are deferred until this instruction
        last = pipeline_executor.WeightPass if self.config.parallel.schedule == "zero-bubble" else BackwardPass
        self.deepspeed._INSTRUCTION_MAP = table | {
            ForwardPass: _of_first_chunk(table[ForwardPass], before=before_forward),
            last: _of_first_chunk(table[last], after=after_backward),
        }

    def _train(self, batches: Iterator[tuple[Any, Any]]) -> None:
        engine = self.deepspeed
        engine.train_batch(self._on_device(batches))
        # DeepSpeed's hooks on a loss hold the engine, and this cycle through autograd would never be collected
        engine.loss = None
        for kept in engine.pipe_buffers.values():
            kept[:] = [None] * len(kept)

    def _mean_loss(self) -> Tensor:
        return self._aggregate()

    def _evaluate(self, batches: Sequence[tuple[Any, Any]], num_microbatches: int) -> Tensor:
        replayed = contextlib.nullcontext() if self._graphs is None else self._graphs.on()
        with replayed:
            # DeepSpeed leaves the module in its evaluation mode
            loss: Tensor = self.deepspeed.eval_batch(self._on_device(batches), num_micro_batches=num_microbatches)
        self.module.train()
        return loss

    def _run_forward(self, batches: Sequence[tuple[Any, Any]], num_microbatches: int) -> None:
        self.deepspeed.eval_batch(
            self._on_device(batches), num_micro_batches=num_microbatches, reduce_output=None, bcast_loss=False
        )
        self.module.train()

    def _on_device(self, batches: Iterable[tuple[Any, Any]]) -> Iterator[tuple[Any, Any]]:
        """Copy what this stage uses of each microbatch when DeepSpeed takes it, whose own copies wait."""
        ctx = self.ctx
        for inputs, targets in batches:
            if ctx.is_first_stage:
                inputs = to_device(inputs, ctx.device)
            if ctx.is_last_stage:
                targets = to_device(targets, ctx.device)
            yield inputs, targets


def _if_needed(backward: Callable[..., None]) -> Callable[..., None]:
    """Return the backward pass of a microbatch, left out where the first stage has nothing to train."""

    @functools.wraps(backward)
    def run(engine: Any, buffer_id: int) -> None:
        outputs = pipeline_executor.tensors_of(engine.pipe_buffers["outputs"][buffer_id])
        # frozen layers before the first trained one: autograd would raise an error
        if engine.is_last_stage() or any(tensor.requires_grad for tensor in outputs):
            backward(engine, buffer_id)
        else:
            engine.pipe_buffers["outputs"][buffer_id] = None

    return run


def _announce_on_hosts(engine: Any, ctx: ParallelContext) -> None:
    """Replace DeepSpeed's announcement of shapes: its receiver reads ten numbers from the device, a wait each.

    What is sent is compared with what was announced, and what is received must be whole. Gradients have the shapes of
    what was received.
    """
    headers = pipeline_executor.Headers(ctx)
    announced: pipeline_executor.Shapes = []

    def send(stream: Any, stage: int) -> None:
        # in place: the instruction that compares holds this list
        announced[:] = headers.send(stream, engine.grid.stage_to_global(stage_id=stage))

    def receive(stage: int) -> Any:
        is_tuple, shapes = headers.receive(engine.grid.stage_to_global(stage_id=stage))
        buffers = tuple(torch.empty(shape, dtype=dtype, device=ctx.device) for dtype, shape in shapes)
        # a message that is too short leaves the mark at its end; gloo gives it without a word
        for buffer in buffers:
            mark(buffer)
        return buffers if is_tuple else buffers[0]

    engine._send_tensor_meta, engine._recv_tensor_meta = send, receive
    table = engine._INSTRUCTION_MAP
    engine._INSTRUCTION_MAP = table | {
        SendActivation: _checked_send(table[SendActivation], announced),
        RecvActivation: _checked_receive(table[RecvActivation]),
    }


def _checked_send(send: Callable[..., None], announced: pipeline_executor.Shapes) -> Callable[..., None]:
    """Return DeepSpeed's instruction, which sends nothing of another shape than was announced before."""

    @functools.wraps(send)
    def run(engine: Any, buffer_id: int) -> None:
        # else DeepSpeed announces the shape in this very instruction
        if not (engine.dynamic_shape or engine.first_output_send):
            pipeline_executor.check_stream(engine.pipe_buffers["outputs"][buffer_id], announced)
        send(engine, buffer_id)

    return run


def _checked_receive(receive: Callable[..., None]) -> Callable[..., None]:
    """Return DeepSpeed's instruction, whose buffer, used again and again, must be filled each time."""

    @functools.wraps(receive)
    def run(engine: Any, buffer_id: int) -> None:
        # the first one of all has been marked where its shape was received
        for buffer in pipeline_executor.tensors_of(engine.pipe_recv_buf):
            mark(buffer)
        receive(engine, buffer_id)
        for buffer in pipeline_executor.tensors_of(engine.pipe_recv_buf):
            check_filled(buffer)

    return run


def _of_first_chunk(function: Callable[..., Any], **calls: Callable[[], None]) -> Callable[..., Any]:
    """Return an instruction with calls around the first of a stage's chunks: each microbatch begins and ends there."""
    watched = around(function, **calls)

    def call(engine: Any, buffer_id: int, chunk: int = 0) -> None:
        if chunk:
            function(engine, buffer_id, chunk=chunk)
        else:  # DeepSpeed's own instructions know no chunks
            watched(engine, buffer_id)

    return call


def pipeline_module(
    config: Config, ctx: ParallelContext, specs: list[LayerSpec], losses: StepLosses, varies_shapes: bool
) -> nn.Module:
    """Allocate the layers of this rank's stage. Collective."""
    # without no_grad, its broadcast of tied weights would become part of their autograd graph
    with default_dtype(compute_dtype(config)), torch.no_grad():
        module = pipeline_executor.StageModule(
            specs,
            stage_bounds(config, declared_layers(config)),
            topology=ctx.topology,
            loss_fn=losses,
            activation_checkpoint_interval=0,
            dynamic_shape=varies_shapes,
        )
    for parameter in module.parameters():
        if shard_of(parameter).added:
            # beside a tied weight: DeepSpeed takes all of the last stage's module for copies of the first's
            parameter.ds_pipe_replicated = False  # type: ignore[attr-defined]
    if config.training.cuda_graph_impl == "local" and not config.training.skip_train:
        module.replay_layers(ctx)
    return module
