"""Pipeline stages of a plan: which layers each holds, and the part of a step that stages wait."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from megatron.config.options import Config
from megatron.parallel.shards import LayerDeclaration
from megatron.planning.sizes import parameters_of_layer


def bubble_fraction(num_stages: int, num_microbatches: int) -> float:
    """Part of a 1F1B step that a stage waits: (p - 1) / (m + p - 1), of p stages and m microbatches."""
    return (num_stages - 1) / (num_microbatches + num_stages - 1)


@functools.cache
def balanced_bounds(weights: tuple[float, ...], num_stages: int) -> list[int]:
    """Return the cuts of DeepSpeed's `partition_balanced`: stage i holds the layers [bounds[i], bounds[i + 1]).

    It looks for the least difference between the heaviest and the lightest stage, one stage at a time; of equal cuts
    it takes the last.
    """
    if len(weights) <= num_stages:
        return [min(stage, len(weights)) for stage in range(num_stages + 1)]
    total_before = [0.0]
    for weight in weights:
        total_before.append(total_before[-1] + weight)
    # cut[j][i]: (spread, heaviest, lightest, start of the last stage) of the first i layers in j stages
    cut: list[dict[int, tuple[float, float, float, int]]] = [
        {end: (0.0, total_before[end], total_before[end], 0) for end in range(1, len(weights) + 1)}
    ]
    for stages in range(2, num_stages + 1):
        row: dict[int, tuple[float, float, float, int]] = {}
        for end in range(stages, len(weights) + 1):
            best: tuple[float, float, float, int] | None = None
            for start in range(stages - 1, end):
                _, heaviest, lightest, _ = cut[-1][start]
                last = total_before[end] - total_before[start]
                heaviest, lightest = max(heaviest, last), min(lightest, last)
                if best is None or heaviest - lightest <= best[0]:
                    best = heaviest - lightest, heaviest, lightest, start
            assert best is not None
            row[end] = best
        cut.append(row)
    bounds = [len(weights)]
    for row in reversed(cut):
        bounds.append(row[bounds[-1]][3])
    return bounds[::-1]


def uniform_bounds(num_layers: int, num_stages: int) -> list[int]:
    """Return the cuts of DeepSpeed's `partition_uniform`: as many layers a stage, the first take one more."""
    if num_layers <= num_stages:
        return [min(stage, num_layers) for stage in range(num_stages + 1)]
    size, over = divmod(num_layers, num_stages)
    return [stage * size + min(stage, over) for stage in range(num_stages + 1)]


def stage_bounds(config: Config, layers: Sequence[LayerDeclaration]) -> list[int]:
    """Return the cuts through the list of layers that `pipeline_partition_method` gives.

    DeepSpeed balances trained parameters, and counts a tied weight at both its places.
    """
    num_stages = config.parallel.pipeline_model_parallel_size
    method = config.parallel.pipeline_partition_method
    if num_stages == 1:
        return [0, len(layers)]
    if method == "uniform":
        return uniform_bounds(len(layers), num_stages)
    if method == "parameters":
        t = config.parallel.tensor_model_parallel_size
        weights = tuple(parameters_of_layer(layer, t, trained_only=True) for layer in layers)
        return balanced_bounds(weights, num_stages)
    return balanced_bounds(tuple(0 if layer.number is None else 1 for layer in layers), num_stages)


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
