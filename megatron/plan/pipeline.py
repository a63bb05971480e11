"""Pipeline stages of a plan: which layers each holds, and the part of a step that stages wait."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import operator
from collections.abc import Callable, Iterator, Sequence

from megatron.options.config import Config
from megatron.options.flags import flag
from megatron.parallel.shards import LayerDeclaration
from megatron.plan.activations import deferred_bytes, layer_memory
from megatron.plan.flops import declared_layers, layer_flops, parameters_of_layer
from megatron.plan.pipeline_schedules import PipelineSchedule

STATE_BYTES = 16
"""Bytes of weights, gradients and optimizer states for each parameter, to choose between cuts of one cost."""
SLOWER = 1.1
"""Times the cost of the best cuts' slowest stage, above which a partition is warned of."""


def bubble_fraction(num_stages: int, num_microbatches: int) -> float:
    """Part of a 1F1B step that a stage waits: (p - 1) / (m + p - 1), of p stages and m microbatches."""
    return (num_stages - 1) / (num_microbatches + num_stages - 1)


# Megatron-LM gives every stage as many layers, torchtitan counts embedding and output as a layer each. At a
# vocabulary of 128,256 Llama 3.2 1B's output costs as much as four layers, the embedding nothing.
def stage_bounds(config: Config, layers: Sequence[LayerDeclaration]) -> list[int]:
    """Return the cuts through the list of layers that `pipeline_partition_method` gives.

    Range i holds the layers [bounds[i], bounds[i + 1]). Every method but a list makes its largest range as small as
    possible, in FLOPs, parameters or layers; of equal cuts, it takes those that need the least memory.
    """
    method, num_ranges = config.parallel.pipeline_partition_method, config.parallel.num_pipeline_ranges
    listed = config.parallel.listed_layers
    if num_ranges == 1:
        return [0, len(layers)]
    if listed is not None:
        return _listed_bounds(listed, layers)
    t = config.parallel.tensor_model_parallel_size
    trained = [parameters_of_layer(layer, t, trained_only=True) for layer in layers]
    if method == "parameters":
        weights = trained
    elif method == "uniform":
        weights = [1] * len(layers)
    elif method == "cost":
        weights = [flops.total for flops in layer_flops(config)]
    else:  # type:TransformerLayer
        weights = [0 if layer.number is None else 1 for layer in layers]
    # a range holds a transformer layer or the output projection, and the optimizer needs something to train there
    holds = [layer.number is not None or layer is layers[-1] for layer in layers]
    of_trained = [is_held and size > 0 for is_held, size in zip(holds, trained, strict=True)]
    holds = of_trained if sum(of_trained) >= num_ranges else holds
    if sum(holds) < num_ranges:  # refused by the rules, which need sizes all the same
        return [min(place, len(layers)) for place in range(num_ranges + 1)]
    state = [STATE_BYTES * parameters_of_layer(layer, t) for layer in layers]
    kept = [layer_memory(layer, config).kept for layer in layers]
    deferred = [deferred_bytes(layer, config) for layer in layers]
    alive = _alive(schedule_of(config, 2 * config.parallel.pipeline_model_parallel_size))
    return list(_balanced(tuple(weights), tuple(state), tuple(kept), tuple(deferred), tuple(holds), alive))


@functools.lru_cache(maxsize=256)
def _alive(schedule: PipelineSchedule) -> tuple[tuple[int, int], ...]:
    """Return `alive` of each range."""
    by_stage = [schedule.alive(stage) for stage in range(schedule.num_stages)]
    return tuple(alive for of_chunk in zip(*by_stage, strict=True) for alive in of_chunk)


def _listed_bounds(listed: Sequence[int], layers: Sequence[LayerDeclaration]) -> list[int]:
    """Cut after so many transformer layers; the first range begins with the embedding, the last ends with the head."""
    places = [place for place, layer in enumerate(layers) if layer.number is not None]
    return [0, *(places[0] + done for done in itertools.accumulate(listed[:-1])), len(layers)]


@functools.lru_cache(maxsize=256)
def _balanced(
    weights: tuple[int, ...],
    state: tuple[int, ...],
    kept: tuple[int, ...],
    deferred: tuple[int, ...],
    holds: tuple[bool, ...],
    alive: tuple[tuple[int, int], ...],
) -> tuple[int, ...]:
    """Return the cuts with the lightest heaviest range, of these with the least largest memory, and then the most even.

    Each range has at least one of the layers marked in `holds`. `state`, `kept` and `deferred`: bytes of a layer,
    once, for each forward pass and for each deferred gradient that is alive; `alive`: numbers of these of each range.
    """
    num_ranges = len(alive)
    weight_before = [0, *itertools.accumulate(weights)]
    before = [[0, *itertools.accumulate(sizes)] for sizes in (state, kept, deferred)]

    def weight(_: int, start: int, stop: int) -> int:
        return weight_before[stop] - weight_before[start]

    def memory(index: int, start: int, stop: int) -> float:
        if weight(index, start, stop) > lightest:
            return math.inf
        return sum(n * (sizes[stop] - sizes[start]) for n, sizes in zip((1, *alive[index]), before, strict=True))

    def squared_memory(index: int, start: int, stop: int) -> float:
        size = memory(index, start, stop)
        return size**2 if size <= least else math.inf

    lightest, _ = _best_cuts(weight, max, holds, num_ranges)
    least, _ = _best_cuts(memory, max, holds, num_ranges)
    return _best_cuts(squared_memory, operator.add, holds, num_ranges)[1]


def _best_cuts(
    value: Callable[[int, int, int], float],
    combine: Callable[[float, float], float],
    holds: Sequence[bool],
    num_ranges: int,
) -> tuple[float, tuple[int, ...]]:
    """Return the least combined value of the ranges, and its cuts.

    `value` of (index, start, stop) is that of one range; a longer range has no smaller one.
    """
    found: dict[int, tuple[float, tuple[int, ...]]] = {0: (0, (0,))}  # of the layers before each place
    for index in range(num_ranges):
        longer: dict[int, tuple[float, tuple[int, ...]]] = {}
        for stop in range(index + 1, len(holds) + 1):
            best = math.inf
            for start in range(stop - 1, index - 1, -1):
                last = value(index, start, stop)
                if last >= best:
                    break
                if start in found and any(holds[start:stop]):
                    total = combine(found[start][0], last)
                    if total < best:
                        best, longer[stop] = total, (total, (*found[start][1], stop))
        found = longer
    return found[len(holds)]


def stage_work(config: Config) -> list[tuple[float, float]]:
    """Return the FLOPs of forward and backward for one token, for each stage: all its chunks and tensor ranks."""
    flops = layer_flops(config)
    return [
        (
            float(sum(layer.forward for start, stop in ranges for layer in flops[start:stop])),
            float(sum(layer.backward for start, stop in ranges for layer in flops[start:stop])),
        )
        for ranges in stage_ranges(config, declared_layers(config))
    ]


def cost_shares(config: Config, bounds: Sequence[int]) -> list[float]:
    """Return the share of each range in the FLOPs of a microbatch: `layer_flops`."""
    flops = [layer.total for layer in layer_flops(config)]
    return [sum(flops[start:stop]) / sum(flops) for start, stop in itertools.pairwise(bounds)]


def partition_warnings(config: Config) -> Iterator[str]:
    """Yield a warning if the best cuts would make the slowest stage more than a tenth faster."""
    parallel, layers = config.parallel, declared_layers(config)
    best = dataclasses.replace(config, parallel=dataclasses.replace(parallel, pipeline_partition_method="cost"))
    own, least = (max(cost_shares(config, stage_bounds(run, layers))) for run in (config, best))
    if own > SLOWER * least:
        yield (
            f"pipeline_partition_method={parallel.pipeline_partition_method} makes the slowest stage take "
            f"{own / least:.2f} times as long as the best cuts do; use {flag('pipeline_partition_method')} cost"
        )


def stage_ranges(config: Config, layers: Sequence[LayerDeclaration]) -> list[list[tuple[int, int]]]:
    """Return for each stage the ranges [start, stop) of the list of layers that it holds, one for each chunk."""
    p, ranges = config.parallel.pipeline_model_parallel_size, list(itertools.pairwise(stage_bounds(config, layers)))
    return [ranges[stage::p] for stage in range(p)]


def schedule_of(config: Config, num_microbatches: int) -> PipelineSchedule:
    """Return the schedule of a step of so many microbatches."""
    parallel = config.parallel
    p, v = parallel.pipeline_model_parallel_size, parallel.num_virtual_stages_per_pipeline_rank
    return PipelineSchedule(parallel.schedule, p, num_microbatches, v)


def waits_like_1f1b(config: Config) -> bool:
    """Return True for 1F1B, and for the zero-bubble schedule of a model whose linear layers' weights are all frozen."""
    is_zero_bubble = config.parallel.schedule == "zero-bubble"
    defers = is_zero_bubble and any(deferred_bytes(layer, config) for layer in declared_layers(config))
    return config.parallel.schedule == "1f1b" or (is_zero_bubble and not defers)


def schedule_bubble(config: Config, num_microbatches: int) -> float:
    """Return the part of a step that the stages wait, if all cost the same."""
    schedule = schedule_of(config, num_microbatches)
    if waits_like_1f1b(config):
        return bubble_fraction(schedule.num_stages, num_microbatches)
    return schedule.bubble()


def stage_text(layers: Sequence[LayerDeclaration], start: int, stop: int) -> str:
    """'embed 0-19' for entries [start, stop) of the list of layers. A norm beside the head is left out."""
    numbers = [layer.number for layer in layers[start:stop] if layer.number is not None]
    parts = ["embed"] if start == 0 < stop else []
    if numbers:
        parts.append(str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}")
    if start < len(layers) == stop:
        parts.append("head")
    elif any(layer.name == "final_norm" for layer in layers[start:stop]):
        parts.append("norm")
    return " ".join(parts) or "nothing"
