"""Memory of each rank of each pipeline stage at the peak of a step, from the declared layers and the config."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import partial

from megatron.options.config import Config, num_microbatches
from megatron.parallel.layout import Layout
from megatron.parallel.shards import LayerDeclaration
from megatron.plan.activations import LayerMemory, deferred_bytes, layer_memory
from megatron.plan.attention_core import attention_mask_bytes
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


def memory_by_stage(config: Config, layout: Layout) -> list[Stage]:
    """Return what each rank of each pipeline stage needs, with the activations that its schedule keeps alive.

    Not counted: what the allocator and the communication library keep for themselves, and kernels' work space.
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
        stages.append(Stage(tuple(ranges), parameters, step.in_flight, memory, peak, state.host))
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

    @property
    def name(self) -> str:
        return self.declaration.name


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
        by_chunk = [self._layers_of(chunk) for chunk in chunks]
        self.layers = list(itertools.chain(*by_chunk))
        self._kept = [sum(layer.memory.kept for layer in chunk) for chunk in by_chunk]
        self._deferred = [sum(of_layers(chunk, partial(deferred_bytes, config=config))) for chunk in chunks]
        self._messages = self._message_bytes()

    def _layers_of(self, chunk: Sequence[LayerDeclaration]) -> list[_Layer]:
        layout = Layout.of(self.config.parallel)
        trained = of_layers(chunk, partial(parameters_of_layer, layout=layout, trained_only=True))
        memory = of_layers(chunk, partial(layer_memory, config=self.config))
        return [
            _Layer(declaration, needed, numbers * self.number_bytes)
            for declaration, needed, numbers in zip(chunk, memory, trained, strict=True)
        ]

    def _message_bytes(self) -> int:
        """Bytes of what is received from and sent to other stages: tensors as large as the residual stream."""
        sizes = MicrobatchSizes(self.config)
        # its own schedules: outputs until their gradients come, and one gradient each way
        num_tensors = self.in_flight + 2
        if not self.config.uses_own_schedule:
            num_tensors = self._messages_of_deepspeed()
        return attention_mask_bytes(sizes) + num_tensors * sizes.stream_bytes

    def _messages_of_deepspeed(self) -> int:
        """Tensors that DeepSpeed's pipeline engine holds for messages."""
        num_tensors = 0
        if self.stage > 0:
            num_tensors += max(2, self.in_flight)  # received, beside the copy that the first layer is given
        if not self.is_last_stage:
            num_tensors += self.in_flight + 1  # sent, and the gradient received for it
        elif self.config.uses_pipeline and self.schedule.num_microbatches > 1:
            num_tensors += 1  # the previous microbatch's output
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
        # an evaluation keeps nothing for a backward pass: a layer's activations are freed by the next one's
        if self.config.training.skip_train:
            yield "forward", self.at(0, 0, max(layer.memory.kept for layer in self.layers))
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

    def at(self, gradients: int, activations: int, temporary: int) -> StageMemory:
        state = self.state
        return StageMemory(
            weights=state.weights,
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
        if step.is_last_stage:
            loss = loss_memory(step.layers[-1].declaration, step.config)
            yield "loss, forward", self._at(loss.forward)
            yield "loss, backward", self._at(loss.backward)
        self._gradients += state.microbatch_gradients
        if self._is_first:
            self._gradients += state.step_gradients
        for layer in reversed(step.layers):
            yield f"backward of {layer.name}", self._at(max(layer.memory.backward, self._weight_gradients(layer)))
            numbers = layer.gradient // step.number_bytes
            if state.bucket and self._bucketed + numbers > state.bucket:
                yield "reduction", self._at(state.at_reduction)
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
        self._activations -= layer.memory.kept
        if layer.name == self._tied_name:
            if self._waiting:
                self._waiting = 0  # this is the second use, and the sum is made
            else:
                self._waiting = layer.gradient
        if self._state.keeps_gradients and not self._waiting and layer.name not in self._with_gradient:
            self._with_gradient.add(layer.name)
            self._gradients += layer.gradient

    def _at(self, work: int) -> StageMemory:
        """Return what is alive with so many bytes of work for a moment."""
        return self._step.at(self._gradients, self._activations, self._state.gathered + self._waiting + work)
