"""Pipeline stages of a plan: which layers each holds, and the part of a step that stages wait."""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence

from megatron.options.config import Config
from megatron.options.flags import flag
from megatron.parallel.layout import Layout
from megatron.parallel.shards import LayerDeclaration
from megatron.plan.activations import deferred_bytes, layer_memory
from megatron.plan.flops import declared_layers, layer_flops, of_layers, parameters_of_layer
from megatron.plan.pipeline_schedules import PipelineSchedule

STATE_BYTES = 16
"""Bytes of weights, gradients and optimizer states for each parameter, to choose between cuts of one cost."""
SLOWER = 1.1
"""Times the cost of the best cuts' slowest stage, above which a partition is warned of."""


def bubble_fraction(num_stages: int, num_microbatches: int) -> float:
    """Part of a 1F1B step that a stage waits: (p - 1) / (m + p - 1), of p stages and m microbatches."""
    return (num_stages - 1) / (num_microbatches + num_stages - 1)


# A step waits for its slowest stage. Megatron-LM gives every stage as many layers, torchtitan counts embedding and
# output as a layer each, DeepSpeed by default balances parameters. At a vocabulary of 128,256 Llama 3.2 1B's output
# costs as much as four layers, the embedding nothing.
def stage_bounds(config: Config, layers: Sequence[LayerDeclaration]) -> list[int]:
    """Return the cuts through the list of layers that `pipeline_partition_method` gives.

    Range i holds the layers [bounds[i], bounds[i + 1]). Every method but a list makes its largest range as small as
    possible, in FLOPs, parameters or layers; of equal cuts, it takes those that need the least memory.
    """
    num_ranges, listed = config.parallel.num_pipeline_ranges, config.parallel.listed_layers
    if num_ranges == 1:
        return [0, len(layers)]
    if listed is not None:
        return _listed_bounds(listed, layers)
    own = declared_layers(config)
    if len(own) == len(layers) and all(map(operator.is_, own, layers)):
        return list(_own_bounds(config))
    return list(_bounds_by_method(config, layers))


# read at every turn of a plan
@functools.lru_cache(maxsize=256)
def _own_bounds(config: Config) -> tuple[int, ...]:
    return _bounds_by_method(config, declared_layers(config))


def _bounds_by_method(config: Config, layers: Sequence[LayerDeclaration]) -> tuple[int, ...]:
    num_ranges = config.parallel.num_pipeline_ranges
    required = _required_layers(config, layers)
    if sum(required) < num_ranges:  # refused by the rules, which need sizes all the same
        return tuple(min(index, len(layers)) for index in range(num_ranges + 1))
    layout = Layout.of(config.parallel)
    schedule = schedule_of(config, 2 * config.parallel.pipeline_model_parallel_size)
    return _balanced(
        weights=tuple(_weights(config, layers)),
        state=tuple(of_layers(layers, lambda layer: STATE_BYTES * parameters_of_layer(layer, layout))),
        kept=tuple(of_layers(layers, lambda layer: layer_memory(layer, config).kept)),
        deferred=tuple(of_layers(layers, lambda layer: deferred_bytes(layer, config))),
        required=required,
        alive=_alive(schedule),
    )


def _weights(config: Config, layers: Sequence[LayerDeclaration]) -> list[int]:
    """Return the weight of each layer in the measure of `pipeline_partition_method`."""
    method, layout = config.parallel.pipeline_partition_method, Layout.of(config.parallel)
    if method == "parameters":
        return of_layers(layers, lambda layer: parameters_of_layer(layer, layout, trained_only=True))
    if method == "uniform":
        return [1] * len(layers)
    if method == "cost":
        return [flops.total for flops in layer_flops(config)]
    # type:TransformerLayer
    return [int(layer.number is not None) for layer in layers]


def _required_layers(config: Config, layers: Sequence[LayerDeclaration]) -> tuple[bool, ...]:
    """Return for each layer whether it is one of those of which every range holds one or more.

    They are the transformer layers and the output projection; of these the trained ones where there are enough.
    """
    # trained ones, since the optimizer of a stage needs something to train
    layout = Layout.of(config.parallel)
    required = tuple(layer.number is not None or layer is layers[-1] for layer in layers)
    is_trained = of_layers(layers, lambda layer: parameters_of_layer(layer, layout, trained_only=True) > 0)
    trained = tuple(map(operator.and_, required, is_trained))
    if sum(trained) < config.parallel.num_pipeline_ranges:
        return required
    return trained


@functools.lru_cache(maxsize=256)
def _alive(schedule: PipelineSchedule) -> tuple[tuple[int, int], ...]:
    """Return `alive` of each range."""
    by_stage = [schedule.alive(stage) for stage in range(schedule.num_stages)]
    return tuple(alive for of_chunk in zip(*by_stage, strict=True) for alive in of_chunk)


def _listed_bounds(listed: Sequence[int], layers: Sequence[LayerDeclaration]) -> list[int]:
    """Cut after so many transformer layers; the first range begins with the embedding, the last ends with the head."""
    first = next(index for index, layer in enumerate(layers) if layer.number is not None)
    return [0, *(first + done for done in itertools.accumulate(listed[:-1])), len(layers)]


@functools.lru_cache(maxsize=256)
def _balanced(
    weights: tuple[int, ...],
    state: tuple[int, ...],
    kept: tuple[int, ...],
    deferred: tuple[int, ...],
    required: tuple[bool, ...],
    alive: tuple[tuple[int, int], ...],
) -> tuple[int, ...]:
    """Return the cuts with the lightest heaviest range, of these with the least largest memory, and then the most even.

    Each range has at least one of the layers marked in `required`. `state`, `kept` and `deferred`: bytes of a layer,
    once, for each forward pass and for each deferred gradient that is alive; `alive`: numbers of these of each range.
    """
    # sums of all layers before an index: a range's sum is the difference of two
    weight_before = [0, *itertools.accumulate(weights)]
    state_before, kept_before, deferred_before = (
        [0, *itertools.accumulate(sizes)] for sizes in (state, kept, deferred)
    )

    def memory(index: int, start: int, stop: int) -> float:
        passes, gradients = alive[index]
        kept_passes = passes * (kept_before[stop] - kept_before[start])
        kept_gradients = gradients * (deferred_before[stop] - deferred_before[start])
        return state_before[stop] - state_before[start] + kept_passes + kept_gradients

    def squared_memory(index: int, start: int, stop: int) -> float:
        size = memory(index, start, stop)
        if size > least:
            return math.inf
        return size**2

    # one after the other: each search allows only cuts that are among the best of the one before
    lightest = _lightest(weights, required, len(alive))
    first_starts = [bisect.bisect_left(weight_before, before - lightest) for before in weight_before]
    least, _ = _best_cuts(memory, max, required, first_starts, len(alive))
    return _best_cuts(squared_memory, operator.add, required, first_starts, len(alive))[1]


# the same for all sizes of a microbatch, and whatever is recomputed
@functools.lru_cache(maxsize=256)
def _lightest(weights: tuple[int, ...], required: tuple[bool, ...], num_ranges: int) -> float:
    """Return the least weight of the heaviest range."""
    before = [0, *itertools.accumulate(weights)]
    anywhere = [0] * len(before)
    return _best_cuts(lambda _, start, stop: before[stop] - before[start], max, required, anywhere, num_ranges)[0]


Cuts = tuple[float, tuple[int, ...]]
"""Combined value of ranges, and their bounds."""


def _best_cuts(
    value: Callable[[int, int, int], float],
    combine: Callable[[float, float], float],
    required: Sequence[bool],
    first_starts: Sequence[int],
    num_ranges: int,
) -> Cuts:
    """Return the least combined value of the ranges, and its cuts.

    `value` of (index, start, stop) is that of one range; a longer range has no smaller one. `first_starts`: of the
    ranges that end at each index, the first place at which one may start.
    """
    num_required = [0, *itertools.accumulate(required)]
    # the places between which each range ends if those before it, or those after it, are as long as they may be
    latest, earliest = [0], [len(required)]
    for _ in range(num_ranges):
        latest.append(bisect.bisect_right(first_starts, latest[-1]) - 1)
        earliest.append(first_starts[earliest[-1]])
    best: dict[int, Cuts] = {0: (0, (0,))}
    """The best cuts of the layers before each index into as many ranges as are done."""
    for index in range(num_ranges):
        extended = {}
        left = num_ranges - 1 - index
        for stop in range(max(index + 1, earliest[left]), latest[index + 1] + 1):
            # each of the ranges that are left needs one as well
            if num_required[-1] - num_required[stop] < left:
                break
            last_start = bisect.bisect_left(num_required, num_required[stop]) - 1
            starts = range(last_start, max(min(best), first_starts[stop]) - 1, -1)
            cuts = _with_last_range(best, functools.partial(value, index), combine, starts, stop)
            if cuts is not None:
                extended[stop] = cuts
        best = extended
    return best[len(required)]


def _with_last_range(
    best: Mapping[int, Cuts],
    value: Callable[[int, int], float],
    combine: Callable[[float, float], float],
    starts: range,
    stop: int,
) -> Cuts | None:
    """Return the best of these cuts with one more range, which starts at one of `starts`; None: there is none."""
    least, result = math.inf, None
    for start in starts:
        last = value(start, stop)
        if last >= least:  # as would be every longer range
            break
        if start not in best:
            continue
        before, bounds = best[start]
        total = combine(before, last)
        if total < least:
            least, result = total, (total, (*bounds, stop))
    return result


def stage_work(config: Config, places: Sequence[range] | None = None) -> list[tuple[float, float]]:
    """Return the FLOPs of forward and backward for one token, for each stage: all its chunks and tensor ranks.

    `places`: of the tokens of a row that a context-parallel rank computes; None: all.
    """
    flops = layer_flops(config, places)
    work = []
    for ranges in stage_ranges(config, declared_layers(config)):
        held = [layer for start, stop in ranges for layer in flops[start:stop]]
        work.append((float(sum(layer.forward for layer in held)), float(sum(layer.backward for layer in held))))
    return work


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
    if config.parallel.schedule == "zero-bubble":
        return not any(deferred_bytes(layer, config) for layer in declared_layers(config))
    return config.parallel.schedule == "1f1b"


def schedule_bubble(config: Config, num_microbatches: int) -> float:
    """Return the part of a step that the stages wait, if all cost the same."""
    schedule = schedule_of(config, num_microbatches)
    if waits_like_1f1b(config):  # by its formula: no timeline is made
        return bubble_fraction(schedule.num_stages, num_microbatches)
    return schedule.bubble()


def stage_text(layers: Sequence[LayerDeclaration], start: int, stop: int) -> str:
    """'embed 0-19' for entries [start, stop) of the list of layers. A norm beside the head is left out."""
    if start == stop:
        return "nothing"
    held = layers[start:stop]
    numbers = [layer.number for layer in held if layer.number is not None]
    has_head = stop == len(layers)
    parts = []
    if start == 0:
        parts.append("embed")
    if len(numbers) == 1:
        parts.append(str(numbers[0]))
    elif numbers:
        parts.append(f"{numbers[0]}-{numbers[-1]}")
    if has_head:
        parts.append("head")
    elif any(layer.name == "final_norm" for layer in held):
        parts.append("norm")
    return " ".join(parts) or "nothing"
