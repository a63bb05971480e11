"""Memory of each rank of each pipeline stage at the peak of a step, from the declared layers and the config."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

from megatron.options.config import Config, num_microbatches
from megatron.parallel.layout import Layout
from megatron.parallel.shards import LayerDeclaration
from megatron.plan.activations import (
    adds_to_optimizers_sum,
    deferred_bytes,
    layer_memory,
    loss_memory,
    mask_bytes,
    stream_bytes,
)
from megatron.plan.flops import declared_layers, number_size, parameters_of_layer
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
        walk = _Walk(config, chunks, state, number, schedule)
        peak, memory = max(walk.moments(), key=lambda moment: moment[1].total)
        parameters = sum(parameters_of_layer(layer, layout.tensor_size) for layer in held)
        stages.append(Stage(tuple(ranges), parameters, walk.in_flight, memory, peak, state.host))
    return stages


class _Walk:
    """A step of one stage, moment by moment: what is alive as activations come and go and gradients appear."""

    def __init__(
        self,
        config: Config,
        chunks: Sequence[Sequence[LayerDeclaration]],
        state: SharedState,
        stage: int,
        schedule: PipelineSchedule,
    ) -> None:
        num_stages, layers = schedule.num_stages, list(itertools.chain(*chunks))
        self.config, self.layers, self.state, self.schedule = config, layers, state, schedule
        self.microbatches, self.stage = schedule.num_microbatches, stage
        self.in_flight = schedule.in_flight(stage)
        self.is_last = stage == num_stages - 1
        t, number = config.parallel.tensor_model_parallel_size, number_size(config)
        self.memories = [layer_memory(layer, config) for layer in layers]
        self.gradients = [parameters_of_layer(layer, t, trained_only=True) * number for layer in layers]
        self.kept = [sum(layer_memory(layer, config).kept for layer in chunk) for chunk in chunks]
        self.deferred = [sum(deferred_bytes(layer, config) for layer in chunk) for chunk in chunks]
        self.passed = self._passed(stage)

    def _passed(self, stage: int) -> int:
        """Bytes of what is received from and sent to other stages."""
        config, stream, others = self.config, stream_bytes(self.config), self.in_flight
        size = mask_bytes(config)
        if config.uses_own_schedule:  # outputs until their gradients come, and one gradient each way
            return size + (others + 2) * stream
        if stage > 0:  # received, beside the copy that the first layer is given
            size += max(2, others) * stream
        if not self.is_last:  # sent, and the gradient received for it
            size += (others + 1) * stream
        elif config.uses_pipeline and self.microbatches > 1:
            size += stream  # DeepSpeed holds the previous microbatch's output
        return size

    def moments(self) -> Iterator[tuple[str, StageMemory]]:
        """Yield each moment at which the total may be largest, with the bytes then alive."""
        state, config = self.state, self.config
        if config.training.skip_train:
            yield "forward", self._at(0, 0, max(memory.kept for memory in self.memories))
            return
        yield from self._backward(0)
        if self.microbatches > 1:
            yield from self._backward(1)
        whole = sum(self._own_gradients().values()) if state.keeps_gradients else 0
        held = state.gradients + state.step_gradients + state.later_gradients + whole
        if not state.bucket:
            yield "reduction", self._at(held, 0, state.at_reduction)
        yield "update", self._at(held, 0, state.at_update)

    def _own_gradients(self) -> dict[str, int]:
        return {layer.name: size for layer, size in zip(self.layers, self.gradients, strict=True)}

    def _backward(self, index: int) -> Iterator[tuple[str, StageMemory]]:
        """The backward pass of the first or second microbatch, which comes after all forward passes in flight."""
        state = self.state
        activations = self.schedule.kept(self.stage, self.kept, self.deferred, without=index)
        seen = self._own_gradients() if index and state.keeps_gradients else {}
        gradients = state.gradients + sum(seen.values())
        gradients += state.step_gradients + state.later_gradients if index else 0
        temporary = state.gathered
        if self.is_last:
            loss = loss_memory(self.layers[-1], self.config)
            yield "loss, forward", self._at(gradients, activations, temporary + loss.forward)
            yield "loss, backward", self._at(gradients, activations, temporary + loss.backward)
        gradients += state.microbatch_gradients + (0 if index else state.step_gradients)
        output = self.layers[-1] if self.is_last and adds_to_optimizers_sum(self.config) else None
        tied = self.layers[-1].name if self.layers[-1].name in {layer.name for layer in self.layers[:-1]} else None
        tied = None if output else tied
        pending, number, waiting = 0, number_size(self.config), 0
        for layer, memory, size in reversed(list(zip(self.layers, self.memories, self.gradients, strict=True))):
            # a gradient that is added to another is alive beside it for a moment, also in the dtype of the sum
            added = number if state.keeps_gradients or state.bucket else number + 4
            is_added = (layer.name in seen or not state.keeps_gradients) and layer is not output
            work = max(size + is_added * added * numel for size, numel in memory.products)
            if layer.name == tied and waiting:  # the sum of both uses too
                work = max(work, memory.backward + 2 * size)
            alive = temporary + max(memory.backward, work) + waiting
            yield f"backward of {layer.name}", self._at(gradients, activations, alive)
            if state.bucket and pending + size // number > state.bucket:
                yield "reduction", self._at(gradients, activations, temporary + waiting + state.at_reduction)
                pending = 0
            pending += size // number
            activations -= memory.kept
            if layer.name == tied:  # autograd adds both uses before it hands on the gradient
                waiting = 0 if waiting else size
            if state.keeps_gradients and layer.name not in seen and not waiting:
                seen[layer.name] = size
                gradients += size
        if state.bucket:
            yield "reduction", self._at(gradients, activations, state.at_reduction)

    def _at(self, gradients: int, activations: int, temporary: int) -> StageMemory:
        state = self.state
        return StageMemory(
            state.weights, gradients, state.master_weights, state.optimizer_states, self.passed + activations, temporary
        )
