"""Memory of each rank of each pipeline stage at the peak of a step, from the declared layers and the config."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import partial

from megatron.options.config import Config, num_microbatches
from megatron.parallel.layout import Layout
from megatron.parallel.operators.fp8_weights import kept_bytes
from megatron.parallel.shards import LayerDeclaration
from megatron.plan.activations import LayerMemory, deferred_bytes, layer_memory
from megatron.plan.attention_core import attention_mask_bytes, rotary_bytes
from megatron.plan.flops import declared_layers, of_layers, parameters_of_layer
from megatron.plan.loss_memory import adds_to_optimizers_sum, loss_memory
from megatron.plan.microbatch import BYTES, MicrobatchSizes
from megatron.plan.pipeline import schedule_of, stage_ranges
from megatron.plan.pipeline_schedules import PipelineSchedule
from megatron.plan.zero import SharedState, held_layers, shared_state


@dataclass(frozen=True)
class StageMemory:
    """Bytes on each device of one pipeline stage, at the peak of a step."""

    weights: int
    gradients: int
    """Accumulated, and the buckets through which they are reduced."""
    master_weights: int
    optimizer_states: int
    """With the average of the weights (ema_decay)."""
    activations: int
    temporary: int
    """Loss, gradients of activations, recomputed layer, copies for a reduction."""

    @property
    def total(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True)
class Stage:
    """One pipeline stage: the entries of the list of layers it holds, and what each of its ranks needs."""

    ranges: tuple[tuple[int, int], ...]
    """[start, stop) of each chunk."""
    parameters: int
    """Held by one rank, before ZeRO cuts anything."""
    in_flight: int
    """Forward passes, of one chunk each, whose activations are alive at once."""
    memory: StageMemory
    peak: str
    """Moment of the step at which it needs most."""
    host_bytes: int
    """Offloaded to host memory by each rank."""
    moved_bytes: int = 0
    """Activations of one microbatch that a rank moves to the host and back."""


def memory_by_stage(config: Config, layout: Layout) -> list[Stage]:
    """Return what each rank of each pipeline stage needs, with the activations that its schedule keeps alive.

    Not counted: what the allocator and the communication library keep for themselves, and kernels' work space; and of
    cuda_graph_impl=local the graphs' own memory, which holds inputs, activations and outputs of each microbatch in
    flight from the second step on.
    """
    layers, stages = declared_layers(config), []
    schedule = schedule_of(config, num_microbatches(config.training, layout.num_batch_ranks))
    for number, ranges in enumerate(stage_ranges(config, layers)):
        chunks = [layers[start:stop] for start, stop in ranges]
        held = held_layers(list(itertools.chain(*chunks)))  # a tied weight is held once a stage
        state = shared_state(config, layout, held)
        step = _Step(config, chunks, state, number, schedule)
        peak, memory = max(step.moments(), key=lambda moment: moment[1].total)
        parameters = sum(of_layers(held, partial(parameters_of_layer, layout=layout)))
        host = state.host + step.host_activations()
        stages.append(Stage(tuple(ranges), parameters, step.in_flight, memory, peak, host, step.moved))
    return stages


Moment = tuple[str, StageMemory]
"""A moment of a step, and the bytes that are alive then."""


@dataclass(frozen=True)
class _Layer:
    """A layer of the stage, and bytes of one microbatch in it."""

    declaration: LayerDeclaration
    memory: LayerMemory
    gradient: int
    """Gradients of its trained parameters, in the dtype of the weights."""
    moved: int
    """Its activations that are on the host between its forward and its backward pass."""
    returned: int
    """Those that have come back at its backward pass: its own, and those of the layer before it."""

    @property
    def name(self) -> str:
        return self.declaration.name

    @property
    def stays(self) -> int:
        """Its activations that are on the device."""
        return self.memory.kept - self.moved


class _Step:
    """A step of one stage: what is alive as activations come and go and gradients appear."""

    def __init__(
        self,
        config: Config,
        chunks: Sequence[Sequence[LayerDeclaration]],
        state: SharedState,
        stage: int,
        schedule: PipelineSchedule,
    ) -> None:
        self.config, self.state, self.schedule, self.stage = config, state, schedule, stage
        self.in_flight = schedule.in_flight(stage)
        self.is_last_stage = stage == schedule.num_stages - 1
        self.number_bytes = BYTES[config.training.precision]
        by_chunk = [self._layers_of(chunk, number) for number, chunk in enumerate(chunks)]
        self.layers = list(itertools.chain(*by_chunk))
        self._kept = [sum(layer.stays for layer in chunk) for chunk in by_chunk]
        self._moved = [sum(layer.moved for layer in chunk) for chunk in by_chunk]
        self._deferred = [sum(of_layers(chunk, partial(deferred_bytes, config=config))) for chunk in chunks]
        self._messages = self._message_bytes()
        layout = Layout.of(config.parallel)
        declared = itertools.chain(*chunks)
        self._fp8_weights = 0 if config.training.skip_train else sum(kept_bytes(x, config, layout) for x in declared)

    def _layers_of(self, chunk: Sequence[LayerDeclaration], number: int) -> list[_Layer]:
        layout = Layout.of(self.config.parallel)
        trained = of_layers(chunk, partial(parameters_of_layer, layout=layout, trained_only=True))
        memory = of_layers(chunk, partial(layer_memory, config=self.config))
        moved = self._moved_by(chunk, memory, is_fed=number > 0 or self.stage > 0)
        layers: list[_Layer] = []
        for index, declaration in enumerate(chunk):
            gradient = trained[index] * self.number_bytes
            layers.append(_Layer(declaration, memory[index], gradient, moved[index], self._returned(moved, index)))
        return layers

    def _moved_by(
        self, chunk: Sequence[LayerDeclaration], memory: Sequence[LayerMemory], *, is_fed: bool
    ) -> Sequence[int]:
        """Return what the layers of a chunk move to the host (models/offload.py). `is_fed`: another sends its input."""
        moved = [0] * len(chunk)
        if not self.config.training.offload_activations:
            return moved
        for index, layer in enumerate(chunk):
            if layer.number is not None:
                moved[index] = memory[index].kept
        # our own schedules hold what was received, from which they read its gradient
        if is_fed and self.config.uses_own_schedule and moved[0]:
            moved[0] -= MicrobatchSizes(self.config).stream_bytes
        return moved

    def _returned(self, moved: Sequence[int], index: int) -> int:
        of_layers = [number for number in moved[: index + 1] if number]
        returned = sum(of_layers[-2:])
        # the last layer of the microbatch whose forward pass came before is still leaving
        if moved[index] and not any(moved[index + 1 :]) and self.in_flight > 1:
            returned += moved[index]
        return returned

    @property
    def moved(self) -> int:
        """Bytes of one microbatch that go to the host and back."""
        return max(0, sum(self._moved) - self._never_moved)

    @property
    def _never_moved(self) -> int:
        """Bytes of the last layer, if no other forward pass comes before its backward pass."""
        if self.in_flight > 1:
            return 0
        return next((layer.moved for layer in reversed(self.layers) if layer.moved), 0)

    def host_activations(self) -> int:
        """Return the most bytes of activations that are in host memory at a time."""
        if self.config.training.skip_train:
            return 0
        nothing = [0] * len(self._moved)
        return self.schedule.kept(self.stage, self._moved, nothing) - self._never_moved

    def _message_bytes(self) -> int:
        """Bytes that layers share, and of what is received from and sent to other stages: as large as the stream."""
        sizes = MicrobatchSizes(self.config)
        # its own schedules: outputs until their gradients come, and one gradient each way
        num_tensors = self.in_flight + 2
        if not self.config.uses_own_schedule:
            num_tensors = self._messages_of_deepspeed()
        return attention_mask_bytes(sizes) + rotary_bytes(sizes) + num_tensors * sizes.stream_bytes

    def _messages_of_deepspeed(self) -> int:
        """Tensors that DeepSpeed's pipeline engine holds for messages."""
        num_tensors = 0
        if self.stage > 0:
            num_tensors += max(2, self.in_flight)  # received, beside the copy that the first layer is given
        if not self.is_last_stage:
            num_tensors += self.in_flight + 1  # sent, and the gradient received for it
        elif self.config.uses_pipeline:
            num_tensors += 1  # the previous microbatch's output, be it of the step before
            if self.stage > 0:
                num_tensors += 2  # what was received for it, and its gradient: the engine holds its loss and graph
        return num_tensors

    @property
    def whole_gradients(self) -> dict[str, int]:
        """Bytes of the gradient of each parameter of a layer by the layer's name: of a tied one once."""
        return {layer.name: layer.gradient for layer in self.layers}

    def alive_activations(self, *, without: int) -> int:
        """Return the most that forward passes keep, as if there were so many fewer microbatches."""
        return self.schedule.kept(self.stage, self._kept, self._deferred, without=without)

    def moments(self) -> Iterator[Moment]:
        """Yield each moment at which the total may be largest."""
        state = self.state
        if self.config.training.skip_train:
            yield from self._moments_of_evaluation()
            return
        yield from _BackwardPass(self, is_first=True).moments()
        # what autograd makes for a later microbatch is added to the gradients that are there
        if self.schedule.num_microbatches > 1:
            yield from _BackwardPass(self, is_first=False).moments()
        gradients = state.gradients + state.step_gradients + state.later_gradients
        if state.keeps_gradients:
            gradients += sum(self.whole_gradients.values())
        if not state.bucket:  # or each bucket is reduced when it is full, within the backward pass
            yield "reduction", self.at(gradients, 0, state.at_reduction)
        yield "update", self.at(gradients, 0, state.at_update)

    def _moments_of_evaluation(self) -> Iterator[Moment]:
        """Yield those of a pass that keeps nothing for another: a layer's activations are freed by the next one's."""
        gathered = self.state.gathered
        yield from self.beginning(gradients=0)
        yield "forward", self.at(0, max(layer.memory.kept for layer in self.layers), gathered)
        yield "end of the forward pass", self.at(0, 0, gathered + self.state.prefetched)
        if self.is_last_stage:
            last = self.layers[-1]
            loss = loss_memory(last.declaration, self.config)
            entered = MicrobatchSizes(self.config).stream_bytes
            yield "loss", self.at(0, entered + last.memory.kept, gathered + loss.forward)

    def beginning(self, gradients: int) -> Iterator[Moment]:
        """Yield that of a microbatch's first layer, before which ZeRO-3 waits for all that it gathers ahead.

        It has each number of that twice, weights that the forward pass alone reads among them. No other microbatch is
        alive, since ZeRO-3 has no pipeline.
        """
        if self.state.prefetched:
            work = 2 * self.state.prefetched + self.layers[0].memory.forward
            yield "beginning of the forward pass", self.at(gradients, 0, work)

    def at(self, gradients: int, activations: int, temporary: int) -> StageMemory:
        state = self.state
        return StageMemory(
            weights=state.weights + self._fp8_weights,
            gradients=gradients,
            master_weights=state.master_weights,
            optimizer_states=state.optimizer_states,
            activations=self._messages + activations,
            temporary=temporary,
        )


class _BackwardPass:
    """Backward pass of the step's first or a later microbatch, which comes after all forward passes in flight.

    It goes through the layers from the last to the first: activations are freed, and gradients of weights appear.
    """

    def __init__(self, step: _Step, *, is_first: bool) -> None:
        state = step.state
        self._step, self._state, self._is_first = step, state, is_first
        self._activations = step.alive_activations(without=0 if is_first else 1)
        self._gradients = state.gradients
        self._with_gradient: set[str] = set()
        """Layers whose parameters have a gradient that stays: the next microbatch's is added to it."""
        if not is_first:
            self._gradients += state.step_gradients + state.later_gradients
            if state.keeps_gradients:
                self._gradients += sum(step.whole_gradients.values())
                self._with_gradient.update(step.whole_gradients)
        self._bucketed = 0
        """Numbers of gradients in the bucket."""
        self._waiting = 0
        """Bytes of a tied weight's first gradient, which autograd holds until it can add the second."""
        self._loss_adds_gradient = step.is_last_stage and adds_to_optimizers_sum(step.config)
        self._tied_name: str | None = None
        """Name of the last layer, where an earlier one has the same weight and autograd adds the gradients of both."""
        *others, last = [layer.name for layer in step.layers]
        if last in others and not self._loss_adds_gradient:
            self._tied_name = last

    def moments(self) -> Iterator[Moment]:
        step, state = self._step, self._state
        yield from step.beginning(self._gradients)
        if step.is_last_stage:
            loss = loss_memory(step.layers[-1].declaration, step.config)
            last = step.layers[-1]
            yield "loss, forward", self._at(last, loss.forward)
            yield "loss, backward", self._at(last, loss.backward)
        if state.prefetched:
            # in the last transformer layer; its own sums and norms take no more than what is kept after it
            work = state.prefetched + max(layer.memory.forward for layer in step.layers)
            yield "end of the forward pass", self._at(step.layers[-1], work)
        self._gradients += state.microbatch_gradients
        if self._is_first:
            self._gradients += state.step_gradients
        for layer in reversed(step.layers):
            work = max(layer.memory.backward, self._weight_gradients(layer))
            yield f"backward of {layer.name}", self._at(layer, work)
            numbers = layer.gradient // step.number_bytes
            if layer.name == self._tied_name and not self._waiting:
                numbers = 0  # a tied weight has one gradient, which comes with its second use
            if state.bucket and self._bucketed + numbers > state.bucket:
                yield "reduction", self._at(layer, state.at_reduction)
                self._bucketed = 0
            self._bucketed += numbers
            self._free(layer)
        if state.bucket:
            yield "reduction", step.at(self._gradients, self._activations, state.at_reduction)

    def _weight_gradients(self, layer: _Layer) -> int:
        """Return the most bytes at the moments at which the gradient of one of the layer's weights is there."""
        state, number_bytes = self._state, self._step.number_bytes
        added_bytes = 0
        if not state.keeps_gradients or layer.name in self._with_gradient:
            # it is added to another, and alive beside it for a moment
            added_bytes = number_bytes
            if not (state.keeps_gradients or state.bucket):
                added_bytes += BYTES["fp32"]  # also in the dtype of the sum
        if self._loss_adds_gradient and layer is self._step.layers[-1]:  # and autograd gets none
            added_bytes = 0
        most = max(moment.beside + added_bytes * moment.numbers for moment in layer.memory.products)
        if self._waiting and layer.name == self._tied_name:  # the sum of both uses too
            most = max(most, layer.memory.backward + 2 * layer.gradient)
        return most

    def _free(self, layer: _Layer) -> None:
        """Count what is alive once the layer's backward pass has ended."""
        self._activations -= layer.stays
        if layer.name == self._tied_name:
            if self._waiting:
                self._waiting = 0  # this is the second use, and the sum is made
            else:
                self._waiting = layer.gradient
        if self._state.keeps_gradients and not self._waiting and layer.name not in self._with_gradient:
            self._with_gradient.add(layer.name)
            self._gradients += layer.gradient

    def _at(self, layer: _Layer, work: int) -> StageMemory:
        """Return what is alive at a layer's backward pass with so many bytes of work for a moment."""
        activations, temporary = self._activations + layer.returned, self._state.gathered + self._waiting + work
        return self._step.at(self._gradients, activations, temporary)
