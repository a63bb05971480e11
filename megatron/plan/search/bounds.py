"""Lower bounds of a layout's time and memory, cheap enough for the layouts that are never planned. No torch."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from megatron.options.config import Config
from megatron.parallel.layout import Layout
from megatron.parallel.shards import Shard, declared_shards
from megatron.plan.activations import layer_memory
from megatron.plan.flops import declared_layers, flops_per_token, layer_flops, of_layers
from megatron.plan.microbatch import BYTES
from megatron.plan.pipeline import schedule_of, stage_ranges
from megatron.plan.pipeline_schedules import PipelineSchedule
from megatron.plan.rates.rates import Rates
from megatron.plan.search.space import NEUTRAL, Values, changed, divisors_of
from megatron.plan.timing.cluster import Cluster
from megatron.plan.timing.operations import Machine
from megatron.plan.timing.stages import StageTimes
from megatron.plan.timing.update import StageUpdate
from megatron.plan.zero import FLOAT32, has_gradient_buffers
from megatron.runtime.devices import planned_device
from megatron.tasks.registry import load_task

OF_PASSES = (
    "tensor_model_parallel_size",
    "context_parallel_size",
    "context_parallel_exchange",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "sequence_parallel",
    "micro_batch_size",
    "recompute_granularity",
    "recompute_modules",
    "offload_activations",
)
"""Options on which the passes of a microbatch through all layers depend, on all stages together."""


@dataclass(frozen=True)
class ModelSize:
    """Numbers of a model that a run holds in its precision, without padding."""

    parameters: int
    trained: int
    in_layers: float
    """Share of them that is in transformer layers."""

    @classmethod
    def of(cls, config: Config) -> ModelSize:
        layers = declared_layers(config)
        parameters, trained = _count(declared_shards(layers).values())
        in_layers = sum(_count(layer.shards.values())[0] for layer in layers if layer.number is not None)
        return cls(parameters, trained, in_layers / max(1, parameters))


def _count(shards: Iterable[Shard]) -> tuple[int, int]:
    held = [shard for shard in shards if not shard.quantized]
    sizes = [math.prod(shard.shape) for shard in held]
    return sum(sizes), sum(size for size, shard in zip(sizes, held, strict=True) if shard.trained)


# Most candidates for a large model lack memory for its parameters alone: these are neither checked nor planned.
def least_bytes(config: Config, num_devices: int, size: ModelSize) -> float:
    """Return no more than a plan's size: weights, gradients and optimizer states, as if spread evenly."""
    layout, training = Layout.of(config.parallel, num_devices), config.training
    parts = layout.tensor_size * layout.num_stages * layout.expert_size
    shards = num_devices / layout.num_replicas
    least = BYTES[training.precision] * size.parameters / (shards if config.effective_zero_stage == 3 else parts)
    # in host memory, and gathered from there layer by layer
    if config.optimizer.offload_param:
        least = 0.0
    if training.skip_train:
        return least
    if not config.optimizer.offload_optimizer:
        states = min(len(config.optimizer.states), len(config.optimizer.matrix_states))
        least += FLOAT32 * states * size.trained / shards
    if has_gradient_buffers(config) and layout.grad_size > 1:
        least += BYTES[training.grad_accum_dtype] * size.trained / parts
    return least


OF_DIVISION = (
    "tensor_model_parallel_size",
    "context_parallel_size",
    "pipeline_model_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
)
OF_STATES = ("zero_stage", "offload_optimizer", "offload_param", "num_replicas")


class PassWork(NamedTuple):
    """Seconds of a microbatch forward and backward, on one rank of each of the ranks that share it."""

    all_layers: float
    """Those of all stages together."""
    lightest_layer: float
    """The transformer layer that takes least."""
    head: float = 0.0
    """The output projection with the loss, all of which is on the last stage."""


class Bounds:
    """Lower bounds of the layouts of a run on some devices."""

    def __init__(self, config: Config, cluster: Cluster, rates: Rates) -> None:
        self.config, self.cluster, self.rates = config, cluster, rates
        self._is_host = planned_device(config.parallel.device).is_host
        self.size = ModelSize.of(config)
        self._neutral, _ = changed(config, NEUTRAL)
        self._works: dict[tuple[Any, ...], PassWork] = {}
        self._updates: dict[tuple[Any, ...], tuple[float, float]] = {}
        self._states: dict[tuple[Any, ...], float] = {}
        self._alive: dict[tuple[Any, ...], list[float]] = {}
        self._kept: dict[tuple[Any, ...], float] = {}
        # the products alone: of attention a kernel may compute less than is counted
        training = dataclasses.replace(config.training, seq_length=1, seq_length_stages=None)
        without_attention = dataclasses.replace(config, training=training)
        self._token_flops = flops_per_token(without_attention)
        of_layers = zip(declared_layers(config), layer_flops(without_attention), strict=True)
        least = min(flops.total - flops.recomputed for layer, flops in of_layers if layer.number is not None)
        self._layer_share = least * config.model.num_layers / self._token_flops
        self._row_length = load_task(config).data.row_length

    # Seconds

    def ideal(self, values: Values) -> float:
        """Return the seconds of a step whose products run at the device's peak, without any exchange."""
        # measured rates may have no peak: nothing is ruled out by it then
        peak = self.rates.peak_flops.get(self.config.training.precision)
        if peak is None:
            return 0.0
        sharing = values["tensor_model_parallel_size"] * values["context_parallel_size"]
        tokens = values["micro_batch_size"] * self._row_length
        seconds = self._token_flops * tokens / sharing / peak
        return self._step(values, PassWork(seconds, seconds * self._layer_share / self.config.model.num_layers))

    def passes(self, values: Values) -> float:
        """Return the seconds of a step that has nothing beside the passes, and the update where states are chosen."""
        return self._step(values, self._work(values)) + self._beside(values)

    def passes_of_largest(self, values: Values) -> float:
        """Return the seconds with passes as fast as those of the largest microbatch: products gain with tokens."""
        size = values["micro_batch_size"]
        largest = size * self._num_microbatches(values)
        work = self._work({**values, "micro_batch_size": largest})
        share = size / largest
        return self._step(values, PassWork(*(seconds * share for seconds in work)))

    def _beside(self, values: Values) -> float:
        """Return the seconds of sums and updates that no pass hides, on the stage where they take least."""
        # the levels before that of the states
        if "zero_stage" not in values:
            return 0.0
        key = tuple(values[name] for name in (*OF_DIVISION, *OF_STATES))
        if key not in self._updates:
            own = {name: values[name] for name in (*OF_DIVISION, *OF_STATES)}
            config, _ = changed(self._neutral, own)
            self._updates[key] = self._update_of(config)
        of_step, of_microbatch = self._updates[key]
        return of_step + self._num_microbatches(values) * of_microbatch

    def _update_of(self, config: Config) -> tuple[float, float]:
        layout = Layout.of(config.parallel, self.cluster.num_devices)
        machine = Machine(self.rates, self.cluster, layout, is_host=self._is_host)
        layers = declared_layers(config)
        of_step, of_microbatch = [], []
        for ranges in stage_ranges(config, layers):
            update = StageUpdate(
                config, layout, [layers[i] for start, stop in ranges for i in range(start, stop)], machine
            )
            of_step.append(update.update)
            of_microbatch.append(update.reduction.each_microbatch)
        return min(of_step), min(of_microbatch)

    def _step(self, values: Values, work: PassWork) -> float:
        """Return no more than a step takes whose microbatches take so much work.

        It is that of equal stages, which fill and drain as the schedule has it. Stages of whole layers are not quite
        equal, and some wait less than they would: by a quarter of a layer at most.
        """
        stages, m = values["pipeline_model_parallel_size"], self._num_microbatches(values)
        if stages == 1:
            return m * work.all_layers
        chunks, num_layers = values["num_virtual_stages_per_pipeline_rank"], self.config.model.num_layers
        # in microbatches on one stage: (p - 1) / v, of which the zero-bubble schedule fills two thirds
        waits = (stages - 1) / chunks
        if values["pipeline_schedule"] == "zero-bubble":
            waits /= 3
        lighter = stages / (4 * num_layers)
        equal = work.all_layers / stages * (m + waits) * (1 - lighter)
        return max(equal, m * work.all_layers / stages, m * self._largest_stage(work, stages))

    def _largest_stage(self, work: PassWork, stages: int) -> float:
        """Return the least time of the stage that takes longest: stages have whole layers, the last one the head."""
        num_layers = self.config.model.num_layers
        return min(
            max(-(-(num_layers - last) // (stages - 1)) * work.lightest_layer, last * work.lightest_layer + work.head)
            for last in range(-(-num_layers // stages) + 1)
        )

    def _num_microbatches(self, values: Values) -> int:
        ranks = self.cluster.num_devices // math.prod(
            values[name]
            for name in ("tensor_model_parallel_size", "context_parallel_size", "pipeline_model_parallel_size")
        )
        return max(1, self.config.training.global_batch_size // (values["micro_batch_size"] * ranks))

    def _work(self, values: Values) -> PassWork:
        ranks = self._fewest_ranks(values)
        key = (ranks, *(values.get(name, NEUTRAL[name]) for name in OF_PASSES))
        if key not in self._works:
            self._works[key] = self._work_on(values, ranks)
        return self._works[key]

    def _work_on(self, values: Values, ranks: int) -> PassWork:
        own = {name: values[name] for name in OF_PASSES if name in values}
        config, _ = changed(self._neutral, own)
        layout = Layout.of(config.parallel, ranks)
        machine = Machine(
            self.rates, self._part_of(ranks), layout, is_host=planned_device(config.parallel.device).is_host
        )
        times = StageTimes(config, layout, machine, num_microbatches=1)
        ((chunk,),) = (stage.chunks for stage in times.stages())
        numbered = [index for index, layer in enumerate(declared_layers(config)) if layer.number is not None]
        each = [times.layer_time(index) for index in (*numbered, -1)]
        taken = [sum(time.forward.values()) + time.backward for time in each]
        return PassWork(chunk.forward + chunk.backward, min(taken[:-1]), taken[-1])

    def _fewest_ranks(self, values: Values) -> int:
        """Return the fewest ranks of a stage that exchange as all of its ranks do."""
        sharing = values["tensor_model_parallel_size"] * values["context_parallel_size"]
        of_stage = self.cluster.num_devices // values["pipeline_model_parallel_size"]
        whole, experts = values["expert_tensor_parallel_size"] == 1, values["expert_model_parallel_size"]
        in_expert = 1 if whole else values["tensor_model_parallel_size"]
        # whole nodes, since groups of other ranks may share their links
        for copies in divisors_of(of_stage // sharing):
            ranks = copies * sharing
            fills_nodes = ranks % self.cluster.node_sizes[0] == 0
            if fills_nodes and ranks // in_expert % experts == 0:
                return ranks
        return of_stage

    def _part_of(self, ranks: int) -> Cluster:
        per_node = self.cluster.node_sizes[0]
        if ranks % per_node == 0:
            return Cluster.of(ranks // per_node, per_node)
        return Cluster.of(1, ranks)

    # Bytes

    def least_states(self, values: Values) -> float:
        """Return no more than a rank's weights, gradients and optimizer states take."""
        key = tuple(values[name] for name in (*OF_DIVISION, *OF_STATES))
        if key not in self._states:
            own = {name: values[name] for name in (*OF_DIVISION, *OF_STATES)}
            config, _ = changed(self._neutral, own)
            self._states[key] = least_bytes(config, self.cluster.num_devices, self.size)
        return self._states[key]

    def least_memory(self, values: Values) -> float:
        """Return about the least that the rank needs that needs most: its states, and what its passes keep.

        A stage of n layers needs n (q + f a) bytes or more: q of states and a of activations for each layer, of f
        microbatches at once. Of equal stages the first one needs most, of others all may need as much.
        """
        states = self.least_states(values)
        stages, num_layers = values["pipeline_model_parallel_size"], self.config.model.num_layers
        of_layer = states * stages * self.size.in_layers / num_layers
        kept = self._kept_of_layer(values)
        needs = [max(1.0, of_layer + count * kept) for count in self._alive_of(values)]
        # a stage of equal ones may have a layer less than the mean, for the embedding or the output
        fewest = max(1, num_layers // stages - 1)
        return max(states, num_layers / sum(1 / need for need in needs), fewest * max(needs))

    def _alive_of(self, values: Values) -> list[float]:
        """Return for each stage the microbatches whose activations are alive at once, if its chunks are equal."""
        names = ("pipeline_model_parallel_size", "pipeline_schedule", "num_virtual_stages_per_pipeline_rank")
        own = {name: values[name] for name in names}
        key = (self._num_microbatches(values), *own.values())
        if key not in self._alive:
            config, _ = changed(self._neutral, own)
            self._alive[key] = _alive(_short(schedule_of(config, key[0])))
        return self._alive[key]

    def _kept_of_layer(self, values: Values) -> float:
        """Return the bytes that a transformer layer keeps on the device of one microbatch: of them all the least."""
        # two layers of a stage are on the device at a time, whatever it holds
        if values["offload_activations"] or self.config.training.skip_train:
            return 0.0
        names = [name for name in OF_PASSES if name != "micro_batch_size"]
        key = tuple(values[name] for name in (*names, "pipeline_schedule"))
        if key not in self._kept:
            # so that microbatches of all sizes need one look
            one, _ = changed(self.config, {**values, "micro_batch_size": 1})
            layers = [layer for layer in declared_layers(one) if layer.number is not None]
            memory = of_layers(layers, functools.partial(layer_memory, config=one))
            self._kept[key] = min(each.kept for each in memory)
        # in proportion to its tokens
        return values["micro_batch_size"] * self._kept[key]


def _short(schedule: PipelineSchedule) -> PipelineSchedule:
    """Return the schedule with no more microbatches than may be alive at once."""
    most = (schedule.num_chunks + 2) * schedule.num_stages
    return schedule._replace(num_microbatches=min(schedule.num_microbatches, most))


@functools.lru_cache(maxsize=1024)
def _alive(schedule: PipelineSchedule) -> list[float]:
    """Return for each stage the microbatches whose activations are alive at once, if its chunks are equal."""
    if schedule.name == "1f1b":
        return [min(schedule.num_microbatches, schedule.num_stages - stage) for stage in range(schedule.num_stages)]
    return [schedule.in_flight(stage) / schedule.num_chunks for stage in range(schedule.num_stages)]
