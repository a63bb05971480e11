"""Time of a training step, from the declared layers, the schedule and the rates of a machine. No torch.

It is that of a steady step as `iteration_time_s` of the metrics counts it: without saves, validations and a first
compilation, its data read in time, and experts used alike.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from typing import NamedTuple

from megatron.options.config import Config
from megatron.options.deepspeed_file import zero_settings
from megatron.parallel.layout import Layout
from megatron.plan.context_exchange import sent_by_layers
from megatron.plan.expert_memory import exchange_bytes
from megatron.plan.flops import flops_per_token, layer_flops
from megatron.plan.microbatch import MicrobatchSizes
from megatron.plan.pipeline import schedule_of
from megatron.plan.pipeline_schedules import PipelineSchedule, Timed
from megatron.plan.rates.rates import Precision, Rates
from megatron.plan.timing.cluster import Cluster
from megatron.plan.timing.operations import AxisExchange, Machine
from megatron.plan.timing.stages import StageTime, StageTimes, cost_of, cost_without_gradients
from megatron.plan.timing.timeline import Simulated, Slowdown, simulate
from megatron.plan.timing.update import Reduction, StageUpdate
from megatron.plan.zero import held_layers
from megatron.runtime.devices import planned_device
from megatron.tasks.registry import load_task


@dataclass(frozen=True)
class StepParts:
    """Seconds of a step on the stage that computes longest; together they are the step's."""

    compute: float = 0.0
    recompute: float = 0.0
    tensor: float = 0.0
    """Exchanges of tensor-parallel ranks."""
    context: float = 0.0
    """Exchanges of ranks that share rows, beyond what their attention hides."""
    expert: float = 0.0
    gather: float = 0.0
    """Weights that ZeRO-3 gathers, beyond what is computed meanwhile."""
    offload: float = 0.0
    """Activations that move to the host and back, beyond what is computed meanwhile."""
    messages: float = 0.0
    """Between pipeline stages."""
    wait: float = 0.0
    """For other stages: the bubble."""
    sharing: float = 0.0
    """While ranks share the cores of a host."""
    reduction: float = 0.0
    """Sums of gradients that the backward pass does not hide."""
    update: float = 0.0
    """Norm, optimizer, and the gathering of the updated weights."""
    before: float = 0.0
    """Forward passes that the task makes before the step."""
    start: float = 0.0
    """Work of the host beside the operations of the device: for the step, its microbatches and layers."""

    @property
    def total(self) -> float:
        return sum(getattr(self, each.name) for each in fields(self))

    def largest(self) -> list[tuple[str, float]]:
        """Return the parts with their seconds, the largest first, without those that take none."""
        parts = [(each.name, getattr(self, each.name)) for each in fields(self)]
        return sorted(((name, taken) for name, taken in parts if taken > 0), key=lambda part: -part[1])


@dataclass(frozen=True)
class SentBytes:
    """Bytes that a rank of the stage which sends most sends in a step, by axis."""

    tensor: float = 0.0
    context: float = 0.0
    expert: float = 0.0
    pipeline: float = 0.0
    gradients: float = 0.0
    """Within a replica, with the updated weights."""
    replicas: float = 0.0
    weights: float = 0.0
    """Gathered by ZeRO-3."""

    @property
    def total(self) -> float:
        return sum(getattr(self, each.name) for each in fields(self))


@dataclass(frozen=True)
class PassSeconds:
    """Seconds of one microbatch in a chunk of a stage, alone on its host."""

    forward: float
    input: float
    """Gradients of inputs, and what is recomputed."""
    weight: float

    @property
    def backward(self) -> float:
        return self.input + self.weight


class Details(NamedTuple):
    """Contents of a step, computed when it is read: a search of layouts reads little of it."""

    parts: Callable[[], StepParts]
    sent_bytes: Callable[[], SentBytes]
    flops: Callable[[], float]


@dataclass(frozen=True)
class StepTime:
    """Predicted time of a step."""

    seconds: float
    stages: tuple[tuple[PassSeconds, ...], ...]
    """Passes of each stage by chunk."""
    tokens: int
    num_devices: int
    num_microbatches: int
    precision: Precision
    assumption: str = ""
    """Assumption on data that decides the sizes of a step; empty: nothing."""
    details: Details = field(repr=False, default_factory=lambda: Details(StepParts, SentBytes, float))
    simulated: Simulated = field(repr=False, default_factory=lambda: _nothing())

    @functools.cached_property
    def parts(self) -> StepParts:
        return self.details.parts()

    @functools.cached_property
    def sent_bytes(self) -> SentBytes:
        return self.details.sent_bytes()

    @functools.cached_property
    def flops(self) -> float:
        """FLOPs of the model, as `flops_per_token` counts them."""
        return self.details.flops()

    @functools.cached_property
    def timeline(self) -> tuple[Timed, ...]:
        """Passes with their times from the start of the passes: of many microbatches the first and the last ones."""
        return self.simulated.timeline()

    @property
    def timed_microbatches(self) -> int:
        """Microbatches of the timeline."""
        return self.simulated.schedule.num_microbatches

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    def mfu(self, peak_flops: float) -> float:
        """Return the share of the devices' peak that the model's FLOPs are."""
        return self.flops / (self.seconds * self.num_devices * peak_flops)


def _nothing() -> Simulated:
    schedule = PipelineSchedule("1f1b", 1, 1)
    return Simulated(schedule, lambda *_: 0.0, [0.0, 0.0])


def step_time(config: Config, cluster: Cluster, rates: Rates, *, num_microbatches: int | None = None) -> StepTime:
    """Return the predicted time of a step on all devices of a cluster.

    `num_microbatches`: those of a rank, where it is known better than the config says. Raises RatesError for what the
    rates do not hold, such as a precision, and LayoutError for a layout that does not fill the cluster.
    """
    return _Step(config, cluster, rates, num_microbatches).time()


class _Step:
    def __init__(self, config: Config, cluster: Cluster, rates: Rates, num_microbatches: int | None) -> None:
        device = planned_device(config.parallel.device)
        rates.check_device(device.name)
        self._config, self._cluster = config, cluster
        self._layout = Layout.of(config.parallel, cluster.num_devices)
        self._layout.check(cluster.num_devices)
        self._machine = Machine(rates, cluster, self._layout, is_host=device.is_host)
        self._sizes = MicrobatchSizes(config)
        self._task = load_task(config)
        self._assumption = ""
        self._num_microbatches = num_microbatches or self._microbatches()
        self._stages = StageTimes(config, self._layout, self._machine, self._num_microbatches).stages()
        self._updates = self._updates_of_stages()
        slowdown = self._machine.rates.slowdown
        self._busy = slowdown(self._machine.ranks_per_node)
        """Factor by which everything takes longer that all ranks do at once."""
        self._slowdown: Slowdown | None = slowdown if device.is_host else None
        ranks, stages = self._layout.world_size // self._layout.num_stages, range(self._layout.num_stages)
        self._hosts: list[dict[int, int]] = []
        """Ranks of each stage by node, where these share cores."""
        if device.is_host:
            self._hosts = [cluster.ranks_by_node(stage * ranks, (stage + 1) * ranks) for stage in stages]

    def _updates_of_stages(self) -> list[StageUpdate]:
        """Return the update of each stage: one for those of equal layers, which most are."""
        known: dict[tuple[int, ...], StageUpdate] = {}
        updates = []
        for stage in self._stages:
            layers = [layer for chunk in stage.layers for layer in chunk]
            key = tuple(id(layer.shards) for layer in layers)
            if key not in known:
                known[key] = StageUpdate(self._config, self._layout, layers, self._machine)
            updates.append(known[key])
        return updates

    def _microbatches(self) -> int:
        data, layout, training = self._task.data, self._layout, self._config.training
        known = data.num_microbatches(layout.num_batch_ranks)
        if known is not None:
            return known
        self._assumption = "rows are full, and every sample is as long as the longest"
        places = training.micro_batch_size * data.row_length * layout.num_batch_ranks
        return max(1, -(-training.global_batch_size * data.sample_length // places))

    def time(self) -> StepTime:
        schedule = schedule_of(self._config, self._num_microbatches)
        simulated = self._simulate(schedule, messages=True)
        ends = [
            self._shown_reduction(number, update.reduction, simulated) for number, update in enumerate(self._updates)
        ]
        last = [simulated.stage_end(number) + ends[number] for number in range(len(self._stages))]
        tied = self._busy * max(update.tied for update in self._updates)
        # the norm joins all ranks before any updates
        passes = max(last) + tied
        update = self._busy * max(update.update for update in self._updates)
        start = self._busy * self._machine.rates.starts.step
        before = self._before()
        seconds = before + passes + update + start
        critical = max(range(len(self._stages)), key=self._work)

        def parts() -> StepParts:
            others = {"reduction": ends[critical] + tied, "update": update, "before": before}
            return self._parts(critical, simulated, seconds, start, others)

        return StepTime(
            seconds=seconds,
            stages=tuple(self._pass_seconds(stage) for stage in self._stages),
            tokens=self._tokens(),
            details=Details(parts, self._sent_bytes, self._flops),
            num_devices=self._cluster.num_devices,
            num_microbatches=self._num_microbatches,
            precision=self._config.training.precision,
            assumption=self._assumption,
            simulated=simulated,
        )

    def _simulate(self, schedule: PipelineSchedule, *, messages: bool, with_gradients: bool = True) -> Simulated:
        costs = cost_of(self._stages) if with_gradients else cost_without_gradients(self._stages)
        message = 0.0
        if messages and self._layout.num_stages > 1:
            sent = AxisExchange("send", self._sizes.stream_bytes, "pipeline")
            message = self._machine.rates.collective(sent.kind, sent.size_bytes, self._machine.span("pipeline"))
        return simulate(schedule, costs, message, self._hosts, self._slowdown)

    def _before(self) -> float:
        """Return the seconds of the forward passes before the step."""
        count = self._task.objective.num_forwards
        if not count:
            return 0.0
        schedule = schedule_of(self._config, self._num_microbatches)._replace(name="forward")
        return count * self._simulate(schedule, messages=True, with_gradients=False).seconds

    def _work(self, number: int) -> float:
        """Return the seconds of a microbatch on a stage."""
        return sum(chunk.forward + chunk.backward for chunk in self._stages[number].chunks)

    # Gradients' sums

    def _shown_reduction(self, number: int, reduction: Reduction, simulated: Simulated) -> float:
        """Return the seconds that the sums of gradients take after a stage's last pass."""
        each = self._busy * reduction.each_microbatch * self._num_microbatches
        if not reduction.at_end:
            return each
        buckets = [self._busy * seconds for seconds in reduction.at_end]
        last = self._busy * reduction.last
        if not zero_settings(self._config).get("overlap_comm", True) or self._updates[number].is_of_deepspeed:
            return each + sum(buckets) + last
        ready, end = self._ready(number, len(buckets), simulated)
        done = 0.0
        for at, seconds in zip(ready, buckets, strict=True):
            done = max(done, at) + seconds
        shown = max(0.0, done + last - end)
        hidden = sum(buckets) + last - shown
        # what runs beside the passes takes its share of their cores
        taken = self._machine.share_of_cores - 1 + self._machine.share_of_exchanges("grad")
        return each + shown + hidden * taken

    def _ready(self, number: int, num_buckets: int, simulated: Simulated) -> tuple[list[float], float]:
        """Return when each bucket is complete, and when the stage's last pass ends."""
        gradients: list[tuple[float, float, int]] = []
        """Begin and end of the backward pass of each layer, and its numbers."""
        stage, update = self._stages[number], self._updates[number]
        last = {chunk: simulated.last(number, chunk) for chunk in range(len(stage.chunks))}
        for chunk, (begin, end) in sorted(last.items(), reverse=True):
            times, done = stage.chunks[chunk].layers, 0.0
            whole = sum(times) or 1.0
            for layer, seconds in zip(reversed(stage.layers[chunk]), reversed(times), strict=True):
                first = begin + (end - begin) * done / whole
                done += seconds
                gradients.append((first, begin + (end - begin) * done / whole, update.reduced_numbers(layer)))
        # within a layer the gradients come one after the other
        bucket, summed = sum(numbers for *_, numbers in gradients) / num_buckets, 0
        ready: list[float] = []
        for first, until, numbers in gradients:
            while numbers and len(ready) < num_buckets and summed + numbers >= bucket * (len(ready) + 1):
                ready.append(first + (until - first) * (bucket * (len(ready) + 1) - summed) / numbers)
            summed += numbers
        end = max(end for _, end in last.values())
        ready += [end] * (num_buckets - len(ready))
        return ready, end

    # Parts

    def _parts(
        self, critical: int, simulated: Simulated, seconds: float, start: float, others: dict[str, float]
    ) -> StepParts:
        """Return the parts of a step; those of the passes are of the critical stage."""
        chunks, m = self._stages[critical].chunks, self._num_microbatches
        parts = {name: m * sum(chunk.parts[name] for chunk in chunks) for name in chunks[0].parts}
        alone = sum(parts.values())
        times = zip(simulated.schedule.passes(), simulated.starts, simulated.ends, strict=True)
        taken = sum(end - begin for each, begin, end in times if each.stage == critical)
        as_simulated = simulated.schedule.num_microbatches * self._work(critical)
        parts["sharing"] = alone * (taken / as_simulated - 1) if as_simulated else 0.0
        if self._layout.num_stages > 1:
            schedule = schedule_of(self._config, m)
            without = self._simulate(schedule, messages=False).seconds
            parts["messages"] += max(0.0, simulated.seconds - without)
        parts |= others
        parts["start"] += start
        # what the stage neither computes nor sends: it waits for others
        parts["wait"] = seconds - sum(parts.values())
        return StepParts(**parts)

    @staticmethod
    def _pass_seconds(stage: StageTime) -> tuple[PassSeconds, ...]:
        return tuple(PassSeconds(chunk.forward, chunk.input, chunk.weight) for chunk in stage.chunks)

    # Figures

    def _tokens(self) -> int:
        return self._config.training.global_batch_size * self._task.data.sample_length

    def _flops(self) -> float:
        forward = self._task.objective.num_forwards * sum(flops.forward for flops in layer_flops(self._config))
        return (flops_per_token(self._config) + forward) * self._tokens()

    def _sent_bytes(self) -> SentBytes:
        return max(self._sent_by_stages(), key=lambda sent: sent.total)

    def _sent_by_stages(self) -> Iterator[SentBytes]:
        m, sizes = self._num_microbatches, self._sizes
        for number, (stage, update) in enumerate(zip(self._stages, self._updates, strict=True)):
            layers = [layer for chunk in stage.layers for layer in chunk]
            reduced: dict[str, float] = {}
            for axis, size in update.reduced_bytes(m):
                reduced[axis] = reduced.get(axis, 0.0) + size
            context = expert = 0.0
            if sizes.context_size > 1:
                context = m * sum(each.size_bytes for each in sent_by_layers(layers, sizes))
            if self._layout.expert_size > 1:
                expert = m * exchange_bytes(held_layers(layers), sizes)
            yield SentBytes(
                tensor=m * stage.sent_bytes.get("tensor", 0.0),
                context=context,
                expert=expert,
                pipeline=m * self._messages_of(number) * sizes.stream_bytes,
                gradients=reduced.get("grad", 0.0) + reduced.get("shard", 0.0),
                replicas=reduced.get("replica", 0.0),
                weights=m * stage.sent_bytes.get("shard", 0.0),
            )

    def _messages_of(self, number: int) -> int:
        """Return the messages that a rank of a stage sends for a microbatch, there and back."""
        num_stages, chunks = len(self._stages), len(self._stages[number].chunks)
        virtual = [chunk * num_stages + number for chunk in range(chunks)]
        if num_stages == 1:
            return 0
        last = num_stages * chunks - 1
        return sum((place < last) + (place > 0) for place in virtual)
