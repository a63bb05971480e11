"""Seconds of the passes of a stage: its layers' operations, what starts them, and messages. No torch."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from megatron.options.config import Config
from megatron.parallel.layout import Layout
from megatron.parallel.operators.fp8_weights import computes_in_fp8
from megatron.parallel.shards import LayerDeclaration
from megatron.plan.activations import layer_memory
from megatron.plan.flops import declared_layers, held_numel, held_shards
from megatron.plan.microbatch import MicrobatchSizes
from megatron.plan.pipeline import stage_ranges
from megatron.plan.pipeline_schedules import PassKind
from megatron.plan.timing.cluster import Axis
from megatron.plan.timing.layers import layer_passes
from megatron.plan.timing.linears import Passes
from megatron.plan.timing.loss import forward_only
from megatron.plan.timing.operations import PARTS, AxisExchange, Hidden, Item, Machine, Move, Part, Work
from megatron.plan.zero import PERSISTENT_PARAMETER, REUSE_DISTANCE
from megatron.tasks.registry import load_task

Parts = dict[Part, float]


@dataclass(frozen=True)
class LayerTime:
    """Seconds of one microbatch in a layer on one rank, by part."""

    forward: Parts
    recomputed: Parts
    input: Parts
    weight: Parts
    without_gradients: Parts
    """Forward pass that needs no gradients."""
    sent_bytes: dict[Axis, float]
    """Bytes that a rank sends in forward and backward pass."""

    @cached_property
    def backward(self) -> float:
        return sum(sum(parts.values()) for parts in (self.recomputed, self.input, self.weight))


@dataclass(frozen=True)
class ChunkTime:
    """Seconds of one microbatch in a chunk of a stage on one rank, alone on its host."""

    forward: float
    input: float
    """Gradients of inputs, with what is recomputed for them."""
    weight: float
    """Gradients of weights, of linear layers and tables, and their sums."""
    parts: dict[str, float]
    """Seconds of all its passes together."""
    without_gradients: float
    layers: tuple[float, ...] = ()
    """Backward seconds of each layer, in the order of the model."""

    @property
    def backward(self) -> float:
        return self.input + self.weight

    def of(self, kind: PassKind) -> float:
        by_kind = {
            PassKind.FORWARD: self.forward,
            PassKind.BACKWARD: self.backward,
            PassKind.INPUT: self.input,
            PassKind.WEIGHT: self.weight,
        }
        return by_kind[kind]


@dataclass
class StageTime:
    """A stage: its layers and its chunks."""

    layers: list[list[LayerDeclaration]]
    """Layers of each chunk."""
    chunks: list[ChunkTime] = field(default_factory=list)
    sent_bytes: dict[Axis, float] = field(default_factory=dict)
    """Bytes that a rank sends for one microbatch in its passes."""


class StageTimes:
    """Times of all stages of a run, each kind of layer computed once."""

    def __init__(self, config: Config, layout: Layout, machine: Machine, num_microbatches: int) -> None:
        self._config, self._layout, self._machine = config, layout, machine
        self._sizes = MicrobatchSizes(config)
        self._objective = load_task(config).objective
        self._layers = declared_layers(config)
        self._known: dict[tuple[Any, ...], LayerTime] = {}
        self._gathers = _Gathers(config, layout)
        self._summed_share = 1.0
        if not keeps_sums(config, layout):
            # the first gradient of a step is the sum itself
            self._summed_share = 1 - 1 / num_microbatches
        # no layer before the first trained one needs a gradient
        trained = (any(shard.trained for shard in layer.shards.values()) for layer in self._layers)
        self._propagates = [count > 0 for count in itertools.accumulate(trained)]

    def stages(self) -> list[StageTime]:
        ranges = stage_ranges(self._config, self._layers)
        self._gathers.keep_to_backward(self._layers)
        stages = []
        for number, of_stage in enumerate(ranges):
            stage = StageTime([self._layers[start:stop] for start, stop in of_stage])
            for chunk, (start, stop) in enumerate(of_stage):
                times = [self.layer_time(index) for index in range(start, stop)]
                ends = self._num_ends(number, chunk, len(ranges), len(of_stage))
                stage.chunks.append(self._chunk(times, ends))
                for time, count in _counted(times):
                    for axis, size in time.sent_bytes.items():
                        stage.sent_bytes[axis] = stage.sent_bytes.get(axis, 0.0) + count * size
            stages.append(stage)
        return stages

    def _num_ends(self, stage: int, chunk: int, num_stages: int, num_chunks: int) -> int:
        """Return the neighbours with which a chunk has messages."""
        virtual, last = chunk * num_stages + stage, num_stages * num_chunks - 1
        return (virtual > 0) + (virtual < last)

    def layer_time(self, index: int) -> LayerTime:
        """Return the time of a layer of the declared list."""
        layer, propagates = self._layers[index], self._propagates[index]
        methods = id(layer.methods) if layer.methods else 0
        in_fp8 = computes_in_fp8(layer, self._sizes.config)
        key = (id(layer.shards), methods, layer.dropouts, layer.projects, propagates, in_fp8)
        if key not in self._known:
            self._known[key] = self._measure(layer, propagates=propagates)
        return self._known[key]

    def _measure(self, layer: LayerDeclaration, *, propagates: bool) -> LayerTime:
        passes = layer_passes(layer, self._sizes, self._layout, propagates=propagates, objective=self._objective)
        plain = Work(list(passes.forward.items))
        if layer.projects:
            plain = forward_only(layer, self._sizes, self._layout, self._objective)
        self._gathers.add(layer, passes, plain)
        self._offload(layer, passes)
        for work in (passes.input, passes.weight):
            work.scale("accumulate", self._summed_share)
        by_part = self._machine.by_part
        trained = (passes.forward, passes.recomputed, passes.input, passes.weight)
        items = itertools.chain(*(work.items for work in trained))
        forward, recomputed, of_input, of_weight = map(by_part, trained)
        return LayerTime(forward, recomputed, of_input, of_weight, by_part(plain), _sums(self._machine, items))

    def _offload(self, layer: LayerDeclaration, passes: Passes) -> None:
        """Move what a transformer layer keeps to the host and back behind what it computes."""
        if not self._config.training.offload_activations or layer.number is None:
            return
        kept = layer_memory(layer, self._config).kept
        passes.forward.add(Hidden((Move(kept, to_host=True),), passes.forward.computed()))
        behind = passes.recomputed.computed() + passes.input.computed() + passes.weight.computed()
        passes.input.add(Hidden((Move(kept, to_host=True),), behind))

    def _chunk(self, times: Sequence[LayerTime], ends: int) -> ChunkTime:
        starts = self._machine.rates.starts
        forward, backward = starts.layer_forward * len(times), starts.layer_backward * len(times)
        of_messages, counted = ends * starts.message, _counted(times)
        # half of what a microbatch takes is in its forward pass; its messages come and go with either
        half = starts.microbatch / 2
        parts = dict.fromkeys((*PARTS, "recompute", "start", "messages"), 0.0)
        seconds = {}
        for name in ("forward", "recomputed", "input", "weight", "without_gradients"):
            by_part = [(getattr(time, name), count) for time, count in counted]
            seconds[name] = sum(count * sum(each.values()) for each, count in by_part)
            if name == "without_gradients":
                continue
            for part in PARTS:
                # what is recomputed counts apart, with its exchanges
                parts["recompute" if name == "recomputed" else part] += sum(n * each[part] for each, n in by_part)
        parts["start"] = forward + backward + 2 * half
        parts["messages"] = 2 * of_messages
        return ChunkTime(
            forward=seconds["forward"] + forward + half + of_messages,
            input=seconds["recomputed"] + seconds["input"] + backward + half + of_messages,
            weight=seconds["weight"],
            parts=parts,
            without_gradients=seconds["without_gradients"] + forward + half + of_messages,
            layers=tuple(time.backward + starts.layer_backward for time in times),
        )


def _counted(times: Sequence[LayerTime]) -> list[tuple[LayerTime, int]]:
    """Return each time once, with its number: most layers have one of a few."""
    counts = Counter(map(id, times))
    return [(time, counts[id(time)]) for time in {id(time): time for time in times}.values()]


def _sums(machine: Machine, items: Iterable[Item]) -> dict[Axis, float]:
    sums: dict[Axis, float] = {}
    for axis, size in machine.sent_bytes(items):
        sums[axis] = sums.get(axis, 0.0) + size
    return sums


class _Gathers:
    """Weights that ZeRO-3 gathers for a layer's passes, behind what is computed."""

    def __init__(self, config: Config, layout: Layout) -> None:
        self._layout, self._config = layout, config
        self._is_on = config.effective_zero_stage == 3 and layout.shard_size > 1
        self._number_bytes = MicrobatchSizes(config).number_bytes
        self._again = 0.0

    def keep_to_backward(self, layers: Sequence[LayerDeclaration]) -> None:
        """Find the share of the weights that is gathered again for the backward pass."""
        if not self._is_on:
            return
        total = sum(self._numbers(layer) for layer in {layer.name: layer for layer in layers}.values())
        # what is used again soon stays: REUSE_DISTANCE counts there and back
        self._again = max(0.0, 1 - REUSE_DISTANCE / 2 / total) if total else 0.0

    def add(self, layer: LayerDeclaration, passes: Passes, plain: Work) -> None:
        numbers = self._numbers(layer) if self._is_on else 0
        if not numbers:
            return
        gathered = AxisExchange("all_gather", numbers * self._number_bytes, "shard")
        passes.forward.add(Hidden((gathered,), passes.forward.computed()))
        plain.add(Hidden((gathered,), plain.computed()))
        again = gathered._replace(size_bytes=gathered.size_bytes * self._again)
        behind = passes.recomputed.computed() + passes.input.computed() + passes.weight.computed()
        if behind and self._again:
            passes.input.add(Hidden((again,), behind))

    def _numbers(self, layer: LayerDeclaration) -> int:
        held = (held_numel(shard, self._layout) for shard in held_shards(layer, self._layout) if not shard.quantized)
        return sum(numbers for numbers in held if numbers > PERSISTENT_PARAMETER)


def keeps_sums(config: Config, layout: Layout) -> bool:
    """Return True where gradients are added to sums beside them; else autograd keeps the first of a step as it is."""
    return config.effective_zero_stage > 0 or max(layout.grad_size, layout.expert_grad_size) > 1


CostOf = Callable[[int, int, PassKind], float]


def cost_of(stages: Sequence[StageTime]) -> CostOf:
    """Return the cost of each pass, for the timeline of a schedule."""
    return lambda stage, chunk, kind: stages[stage].chunks[chunk].of(kind)


def cost_without_gradients(stages: Sequence[StageTime]) -> CostOf:
    """Return the cost of each forward pass before a step."""
    return lambda stage, chunk, kind: stages[stage].chunks[chunk].without_gradients
