"""DeepSpeed's pipeline engine with several chunks a stage, and with the schedules of plan/pipeline_schedules.py.

It replaces what DeepSpeed does within a step, microbatch by microbatch. Its optimizer, the reductions of gradients and
losses, and the table of instructions around which we time and trace, stay.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.pipe import schedule as deepspeed_schedule
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import Tensor

from megatron.parallel.context import LARGEST_TAG, ParallelContext
from megatron.parallel.messages import Receipt, Sends, check_shape, post_receive, receive
from megatron.parallel.pass_state import Job, compute_deferred
from megatron.plan.pipeline_schedules import Message, PassKind, PipelineSchedule
from megatron.training.deepspeed.layer_graphs import LayerGraphs
from megatron.training.deepspeed.releases import clear_backward_seen_flag, scaled

HEADER_TAG = LARGEST_TAG + 1
HEADER_SIZE = 32
Shapes = list[tuple[torch.dtype, list[int]]]
"""Dtype and shape of each tensor of a stream."""


class StageModule(PipelineModule):  # type: ignore[misc]
    """This rank's stage of the list of layers: its chunks, between the cuts `parts` of `stage_bounds`."""

    def __init__(self, specs: Sequence[LayerSpec], parts: Sequence[int], **options: Any) -> None:
        self.parts = list(parts)  # read by DeepSpeed's constructor
        super().__init__(specs, **options)

    def _partition_layers(self, method: str = "") -> None:
        # chunk c of stage s is virtual stage c * stages + s, as in Megatron's interleaved schedule
        starts = range(self.stage_id, len(self.parts) - 1, self.num_stages)
        self.bounds = [(self.parts[start], self.parts[start + 1]) for start in starts]

    def _build(self) -> None:
        self.chunks = []
        for start, stop in self.bounds:
            self._set_bounds(start, stop)
            # DeepSpeed's _build fills one list; each chunk needs its own
            self.forward_funcs: list[Any] = []
            super()._build()
            self.chunks.append(self.forward_funcs)
        self.choose(0)

    def stage_owner(self, layer_idx: int) -> int:
        """Return the stage that holds a layer."""
        place = next(place for place, stop in enumerate(self.parts[1:]) if layer_idx < stop)
        # DeepSpeed finds by it which stages share a tied weight
        return place % int(self.num_stages)

    def replay_layers(self, ctx: ParallelContext) -> None:
        """Have the transformer layers of each chunk replayed as graphs of the device."""
        for index, (start, stop) in enumerate(self.bounds):
            functions = self.chunks[index]
            numbers = [spec.layer.number for spec in self._layer_specs[start:stop]]
            places = [place for place, number in enumerate(numbers) if number is not None]
            if places:
                first, end = places[0], places[-1] + 1
                self.chunks[index] = [*functions[:first], LayerGraphs(functions[first:end], ctx), *functions[end:]]
        self.choose(0)

    def choose(self, chunk: int) -> None:
        """Have the next calls run this chunk."""
        self.forward_funcs = self.chunks[chunk]


class PostActivation(deepspeed_schedule.BufferOpInstruction):  # type: ignore[misc]
    """Have an input received in the background."""


class PostGrad(deepspeed_schedule.BufferOpInstruction):  # type: ignore[misc]
    """Have the gradient of an output received in the background."""


class WeightPass(deepspeed_schedule.BufferOpInstruction):  # type: ignore[misc]
    """Compute the deferred gradients of weights."""


_INSTRUCTIONS = {
    PassKind.FORWARD: deepspeed_schedule.ForwardPass,
    PassKind.BACKWARD: deepspeed_schedule.BackwardPass,
    PassKind.INPUT: deepspeed_schedule.BackwardPass,
    PassKind.WEIGHT: WeightPass,
    Message.POST_ACTIVATION: PostActivation,
    Message.WAIT_ACTIVATION: deepspeed_schedule.RecvActivation,
    Message.SEND_ACTIVATION: deepspeed_schedule.SendActivation,
    Message.POST_GRAD: PostGrad,
    Message.WAIT_GRAD: deepspeed_schedule.RecvGrad,
    Message.SEND_GRAD: deepspeed_schedule.SendGrad,
}


class _Instructions:
    """A schedule as DeepSpeed's engine runs it: microbatch by microbatch as `buffer_id`, and then the update."""

    def __init__(self, schedule: PipelineSchedule, stage: int) -> None:
        self._schedule, self._stage = schedule, stage

    def num_pipe_buffers(self) -> int:
        return 0  # the executor keeps its own

    def __iter__(self) -> Iterator[list[Any]]:
        schedule, stage = self._schedule, self._stage
        # the first chunk of the first stage reads inputs, the last of the last stage labels
        loads = {0: 0, schedule.num_stages - 1: schedule.num_chunks - 1}
        for kind, chunk, microbatch in schedule.instructions(stage):
            if kind is PassKind.FORWARD and loads.get(stage) == chunk:
                yield [deepspeed_schedule.LoadMicroBatch(microbatch)]
            yield [_INSTRUCTIONS[kind](microbatch, chunk=chunk)]
        # tied weights first: their sum over stages is then reduced with the others
        if schedule.name != "forward":
            yield [deepspeed_schedule.ReduceTiedGrads()]
            yield [deepspeed_schedule.ReduceGrads()]
            yield [deepspeed_schedule.OptimizerStep()]


class PipelineExecutor(PipelineEngine):  # type: ignore[misc]
    """DeepSpeed's engine with one of our schedules."""

    def __init__(self, name: str, ctx: ParallelContext, module: StageModule, optimizer: Any, settings: Any) -> None:
        """`name`: of the schedule. The rest: arguments of deepspeed.initialize, which knows DeepSpeed's class alone."""
        mpu = module.mpu()
        # as deepspeed.initialize does before it builds an engine
        parsed = DeepSpeedConfig(settings, mpu)
        super().__init__(args=None, model=module, optimizer=optimizer, mpu=mpu, config=settings, config_class=parsed)
        self._INSTRUCTION_MAP: dict[type, Any] = PipelineEngine._INSTRUCTION_MAP | self.OWN_INSTRUCTIONS
        self.ctx, self._schedule, self._num_chunks = ctx, name, len(module.chunks)
        self._inputs: dict[tuple[int, int], Any] = {}
        """By chunk and microbatch: what the forward pass is given, until its gradient is sent."""
        self._outputs: dict[tuple[int, int], Any] = {}
        self._grads: dict[tuple[int, int], Tensor] = {}
        """Gradients of the outputs, received or still being received."""
        self._labels: dict[int, Any] = {}
        self._receiving: dict[tuple[type, int, int], list[Receipt]] = {}
        self._sends = Sends()
        self._deferred: dict[tuple[int, int], list[Job]] = {}
        self._shapes: dict[int, tuple[bool, Shapes]] = {}
        """Shapes of the inputs of each chunk, used again where they never change."""
        self._announced: dict[int, Shapes] = {}
        """Shapes of the outputs of each chunk, as the next stage knows them."""
        self._headers = Headers(ctx)

    def _exec_schedule(self, pipe_schedule: deepspeed_schedule.PipeSchedule) -> None:
        """Run ours in place of DeepSpeed's, which not every release lets a subclass choose."""
        name = self._schedule if isinstance(pipe_schedule, deepspeed_schedule.TrainSchedule) else "forward"
        ours = PipelineSchedule(name, self.num_stages, pipe_schedule.micro_batches, self._num_chunks)
        clear_backward_seen_flag(self.optimizer)
        super()._exec_schedule(_Instructions(ours, self.stage_id))
        # each send keeps its tensor until it is received; none outlives its step
        self._sends.end()

    # Computation

    def _computes_loss(self, chunk: int) -> bool:
        return bool(self.is_last_stage()) and chunk == self._num_chunks - 1

    def _load(self, buffer_id: int) -> None:
        inputs, targets = next(self.data_iterator)
        if self.is_first_stage():
            self._inputs[0, buffer_id] = inputs
        else:
            self._labels[buffer_id] = targets

    def _forward(self, buffer_id: int, chunk: int = 0) -> None:
        key, trains = (chunk, buffer_id), torch.is_grad_enabled()
        self.module.choose(chunk)
        # the gradient of the input is read from it after the backward pass
        inputs = self._inputs[key] if trains else self._inputs.pop(key)
        outputs = self.module(inputs)
        if self._computes_loss(chunk):
            outputs = self.module.loss_fn(outputs, self._labels.pop(buffer_id))
            loss = outputs.detach()
            self.fwd_outputs.append(loss)
            # both are read by DeepSpeed, at the end of a step and of an evaluation
            self.total_loss = sum(self.fwd_outputs)
        if trains or not self._computes_loss(chunk):
            self._outputs[key] = outputs

    def _backward(self, buffer_id: int, chunk: int = 0) -> None:
        key = chunk, buffer_id
        output, gradient = tensors_of(self._outputs.pop(key))[0], self._grads.pop(key, None)
        if self._computes_loss(chunk):
            # what DeepSpeed's backward() does: mean over the microbatches, times fp16's loss scale
            output = scaled(output / self.gradient_accumulation_steps(), self.optimizer)

        def backward() -> None:
            if output.requires_grad:  # not if the chunk and all before it are frozen
                output.backward(gradient)

        self._running_engine_backward = True  # its hooks leave the rest to us
        try:
            # zero-bubble: linear layers leave the gradients of their weights for the WeightPass
            if self.ctx.state.deferred is not None:
                self._deferred[key] = self.ctx.state.deferred.collect(backward)
            else:
                backward()
        finally:
            self._running_engine_backward = False
        # others keep the input until its gradient is sent
        if chunk == 0 and self.is_first_stage():
            del self._inputs[key]

    def _compute_weights(self, buffer_id: int, chunk: int = 0) -> None:
        self._running_engine_backward = True
        try:
            compute_deferred(self._deferred.pop((chunk, buffer_id)))
        finally:
            self._running_engine_backward = False

    # Messages

    def message(self, name: str, chunk: int, microbatch: int) -> Tensor:
        """Return the hidden state, or its gradient, that an instruction is to send or has received."""
        key = chunk, microbatch
        if name == "RecvGrad":
            return self._grads[key]
        streams = self._outputs if name == "SendActivation" else self._inputs
        hidden = tensors_of(streams[key])[0]
        return hidden.grad if name == "SendGrad" else hidden  # type: ignore[return-value]

    def _neighbour(self, chunk: int, step: int) -> tuple[int, int]:
        """Return the rank and the chunk `step` virtual stages further."""
        chunk, stage = divmod(chunk * self.num_stages + self.stage_id + step, self.num_stages)
        return self.grid.stage_to_global(stage_id=stage), chunk

    def _send(self, tensors: Sequence[Tensor], rank: int) -> None:
        for tensor in tensors:
            # torch.distributed sends contiguous tensors alone
            self._sends.send(tensor.detach().contiguous(), rank)

    def _post(self, kind: type, chunk: int, buffer_id: int, buffers: Sequence[Tensor], rank: int) -> None:
        self._receiving[kind, chunk, buffer_id] = [post_receive(buffer, rank) for buffer in buffers]

    def _wait(self, kind: type, chunk: int, buffer_id: int) -> None:
        for receipt in self._receiving.pop((kind, chunk, buffer_id)):
            receipt.wait()

    def _send_activation(self, buffer_id: int, chunk: int) -> None:
        key = chunk, buffer_id
        outputs = self._outputs[key] if torch.is_grad_enabled() else self._outputs.pop(key)
        rank, _ = self._neighbour(chunk, 1)
        # both sides decide by the same rule, so a header is never waited for in vain
        if self.dynamic_shape or chunk not in self._announced:
            self._announced[chunk] = self._headers.send(outputs, rank)
        check_stream(outputs, self._announced[chunk])
        self._send(tensors_of(outputs), rank)

    def _post_activation(self, buffer_id: int, chunk: int) -> None:
        rank, _ = self._neighbour(chunk, -1)
        if self.dynamic_shape or chunk not in self._shapes:
            self._shapes[chunk] = self._headers.receive(rank)
        is_tuple, shapes = self._shapes[chunk]
        tensors = [torch.empty(shape, dtype=dtype, device=self.device) for dtype, shape in shapes]
        self._post(PostActivation, chunk, buffer_id, tensors, rank)
        self._inputs[chunk, buffer_id] = tuple(tensors) if is_tuple else tensors[0]

    def _wait_activation(self, buffer_id: int, chunk: int) -> None:
        self._wait(PostActivation, chunk, buffer_id)
        if torch.is_grad_enabled():
            tensors_of(self._inputs[chunk, buffer_id])[0].requires_grad_()

    def _send_grad(self, buffer_id: int, chunk: int) -> None:
        hidden = tensors_of(self._inputs.pop((chunk, buffer_id)))[0]
        assert hidden.grad is not None
        self._send([hidden.grad], self._neighbour(chunk, -1)[0])

    def _post_grad(self, buffer_id: int, chunk: int) -> None:
        # a gradient has the shape and dtype of what was sent, so it needs no header
        gradient = torch.empty_like(tensors_of(self._outputs[chunk, buffer_id])[0])
        self._grads[chunk, buffer_id] = gradient
        self._post(PostGrad, chunk, buffer_id, [gradient], self._neighbour(chunk, 1)[0])

    def _wait_grad(self, buffer_id: int, chunk: int) -> None:
        self._wait(PostGrad, chunk, buffer_id)

    # below the methods that it names
    OWN_INSTRUCTIONS = {  # noqa: RUF012
        deepspeed_schedule.LoadMicroBatch: _load,
        deepspeed_schedule.ForwardPass: _forward,
        deepspeed_schedule.BackwardPass: _backward,
        WeightPass: _compute_weights,
        PostActivation: _post_activation,
        deepspeed_schedule.RecvActivation: _wait_activation,
        deepspeed_schedule.SendActivation: _send_activation,
        PostGrad: _post_grad,
        deepspeed_schedule.RecvGrad: _wait_grad,
        deepspeed_schedule.SendGrad: _send_grad,
    }


def tensors_of(stream: Any) -> Sequence[Tensor]:
    """Return the tensors that pass from layer to layer: the hidden state, which alone has a gradient, is the first."""
    if stream is None:
        return []
    return [stream] if isinstance(stream, Tensor) else stream


def check_stream(stream: Any, announced: Shapes) -> None:
    """Raise MessageError unless a stream has the shapes that its receiver knows."""
    for tensor, (dtype, shape) in zip(tensors_of(stream), announced, strict=True):
        check_shape(tensor, shape, dtype)


class Headers:
    """Messages that say of the next ones which shapes they have.

    They go from host to host: of one on the device, the host that receives it would wait for all that its device has
    to compute before.
    """

    def __init__(self, ctx: ParallelContext) -> None:
        self._group = ctx.control_group
        self._sends = Sends()

    def send(self, stream: Any, rank: int) -> Shapes:
        """Announce the tensors of a stream, and return what was announced."""
        numbers = [int(not isinstance(stream, Tensor)), len(tensors_of(stream))]
        for tensor in tensors_of(stream):
            numbers += [PipelineEngine.DTYPE_TO_ID[tensor.dtype], tensor.dim(), *tensor.shape]
        # of one size: the receiver must know it before it knows the shapes
        header = torch.tensor(numbers + [0] * (HEADER_SIZE - len(numbers)))
        self._sends.send(header, rank, group=self._group, tag=HEADER_TAG)
        return [(tensor.dtype, list(tensor.shape)) for tensor in tensors_of(stream)]

    def receive(self, rank: int) -> tuple[bool, Shapes]:
        """Return whether the tensors that come are a tuple, and dtype and shape of each."""
        header = torch.empty(HEADER_SIZE, dtype=torch.int64)
        receive(header, rank, group=self._group, tag=HEADER_TAG)
        is_tuple, count, *rest = header.tolist()
        shapes = []
        for _ in range(count):
            kind, dim, *rest = rest
            shapes.append((PipelineEngine.ID_TO_DTYPE[kind], rest[:dim]))
            rest = rest[dim:]
        return bool(is_tuple), shapes
