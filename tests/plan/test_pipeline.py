"""Pipeline stages: the best cuts by each measure, or those that a list gives."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron.options.config import Config
from megatron.options.training import TrainingConfig
from megatron.parallel.layout import Layout
from megatron.plan.activations import deferred_bytes, layer_memory
from megatron.plan.flops import declared_layers, layer_flops, parameters_of_layer
from megatron.plan.memory import memory_by_stage
from megatron.plan.pipeline import (
    bubble_fraction,
    partition_warnings,
    schedule_bubble,
    stage_bounds,
    stage_ranges,
    stage_text,
)
from megatron.plan.zero import reduce_bucket_size
from megatron.settings.rules import METHODS
from tests.plan.configs import BLOOM_13B, LLAMA_8B, config, copies


def test_bubble_of_bloom_176b() -> None:
    assert bubble_fraction(12, 128) == pytest.approx(0.079, abs=5e-4)
    assert bubble_fraction(1, 7) == 0


@settings(deadline=None, max_examples=60)
@given(
    st.integers(1, 7),
    st.integers(1, 4),
    st.sampled_from(METHODS),
    st.sampled_from([64, 512, 4096]),
    st.booleans(),
    st.sampled_from(["1f1b", "interleaved", "zero-bubble"]),
)
@example(5, 4, "cost", 512, False, "interleaved")
@example(5, 4, "type:TransformerLayer", 512, False, "zero-bubble")
def test_cuts_are_the_best_of_all(
    num_layers: int, num_stages: int, method: str, vocab_size: int, tied: bool, schedule: str
) -> None:
    """Against all cuts: the least largest weight, then the least largest memory, then the most even memory."""
    num_stages = min(num_stages, num_layers)
    alive = [(num_stages - stage, stage if schedule == "zero-bubble" else 0) for stage in range(num_stages)]
    parallel: dict[str, Any] = {"pipeline_model_parallel_size": num_stages}
    if schedule == "interleaved" and num_stages == 4:
        # F0 F0 F1 F1 F0, and F0 F0 F1, before the first backward pass
        alive = [(3, 0), (2, 0), (2, 0), (1, 0)]
        parallel = {"pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": 2}
    elif schedule == "zero-bubble" and num_stages > 1:
        parallel["pipeline_schedule"] = schedule
    run = _staged(num_layers, num_stages, method, vocab_size, untie_embeddings_and_output_weights=not tied)
    run = dataclasses.replace(run, parallel=dataclasses.replace(run.parallel, **parallel))
    layers = declared_layers(run)
    weights: list[int] = {
        "cost": [flops.total for flops in layer_flops(run)],
        "parameters": [sum(math.prod(shard.shape) for shard in layer.shards.values()) for layer in layers],
        "uniform": [1] * len(layers),
        "type:TransformerLayer": [int(layer.name.startswith("layers.")) for layer in layers],
    }[method]

    def measures(bounds: tuple[int, ...]) -> tuple[int, int, int]:
        held = [layers[start:stop] for start, stop in itertools.pairwise(bounds)]
        memory = [
            sum(
                16 * parameters_of_layer(layer, Layout())
                + in_flight * layer_memory(layer, run).kept
                + waiting * deferred_bytes(layer, run)
                for layer in part
            )
            for (in_flight, waiting), part in zip(alive, held, strict=True)
        ]
        heaviest = max(sum(weights[start:stop]) for start, stop in itertools.pairwise(bounds))
        return heaviest, max(memory), sum(size**2 for size in memory)

    last = 2 + num_layers  # of the places before the final norm
    allowed = [
        measures((0, *cuts, len(layers)))
        for cuts in itertools.combinations(range(1, len(layers)), num_stages - 1)
        if all(cut > 2 for cut in cuts) and all(cut < last for cut in cuts[:-1])
    ]
    assert measures(tuple(stage_bounds(run, layers))) == min(allowed)


def _staged(num_layers: int, num_stages: int, method: str, vocab_size: int = 256, **model: Any) -> Config:
    shapes = {"num_layers": num_layers, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": vocab_size} | model
    return config(shapes, parallel={"pipeline_model_parallel_size": num_stages, "pipeline_partition_method": method})


def _stages(run: Config) -> list[str]:
    layers = declared_layers(run)
    return [stage_text(layers, *cut) for cut in itertools.pairwise(stage_bounds(run, layers))]


def test_an_output_projection_counts_as_the_layers_it_costs() -> None:
    """A layer has 24 H^2 FLOPs for its products and 4 S H for attention, the output 2 V H: 3 layers at V=2,496."""
    assert _stages(_staged(5, 2, "cost", 2496)) == ["embed 0-3", "4 head"]
    assert _stages(_staged(5, 2, "type:TransformerLayer", 2496)) == ["embed 0-1", "2-4 head"]
    recomputed = dataclasses.replace(
        _staged(5, 2, "cost", 2496), training=TrainingConfig(recompute_granularity="full", seq_length=128)
    )
    assert _stages(recomputed) == ["embed 0-2", "3-4 head"]


@pytest.mark.parametrize(
    ("listed", "expected"),
    [
        ("3,1", ["embed 0-2", "3 head"]),
        ("4,0", ["embed 0-3", "head"]),
        ("0,4", ["embed", "0-3 head"]),
        ("1,2,1", ["embed 0", "1-2", "3 head"]),
    ],
)
def test_a_list_cuts_after_so_many_transformer_layers(listed: str, expected: list[str]) -> None:
    assert _stages(_staged(4, listed.count(",") + 1, listed)) == expected


@pytest.mark.parametrize("method", [*METHODS, "3,1", "9,9,9,9,9,9,9,9,9"])
def test_cuts_that_the_rules_refuse_have_sizes(method: str) -> None:
    """The rules of a DeepSpeed JSON compare its buckets in the message that refuses nine stages of four layers."""
    run = _staged(4, 9, method)
    assert len(stage_bounds(run, declared_layers(run))) >= 3
    assert reduce_bucket_size(run) > 0


def test_every_stage_has_something_to_train() -> None:
    """With half of the layers frozen, their stage takes one that is not."""
    run = _staged(4, 2, "cost")
    layers = declared_layers(run)
    frozen = [
        layer
        if layer.number in (2, 3)
        else dataclasses.replace(
            layer, shards={name: dataclasses.replace(shard, trained=False) for name, shard in layer.shards.items()}
        )
        for layer in layers
    ]
    start, stop = stage_bounds(run, frozen)[1:]
    assert [layer.name for layer in frozen[:start] if layer.number in (2, 3)] == ["layers.2"]
    assert stop == len(layers)


@pytest.mark.parametrize(
    ("options", "factor"),
    [
        ({}, 3.0),
        ({"recompute_granularity": "full"}, 4.0),
        ({"recompute_granularity": "selective"}, 3 + 4 * 4096 * 8192 / (2 * 218103808 + 4 * 4096 * 8192)),
    ],
)
def test_flops_of_a_layer_count_what_is_recomputed(options: dict[str, Any], factor: float) -> None:
    run = config(LLAMA_8B, training={"seq_length": 8192, **options})
    flops = {layer.name: flops for layer, flops in zip(declared_layers(run), layer_flops(run), strict=True)}
    assert flops["layers.7"].forward == 2 * 218103808 + 4 * 4096 * 8192
    assert flops["layers.7"].total == pytest.approx(factor * flops["layers.7"].forward)
    assert flops["output"].total == 6 * 4096 * 128256, "the loss recomputes nothing"
    assert flops["embedding.word"].total == flops["final_norm"].total == 0


def test_warning_names_cuts_that_are_a_tenth_faster() -> None:
    assert list(partition_warnings(_staged(5, 2, "cost", 2496))) == []
    assert list(partition_warnings(_staged(5, 2, "3,2", 256))) == []
    (warning,) = partition_warnings(_staged(5, 2, "2,3", 2496))
    assert warning == (
        "pipeline_partition_method=2,3 makes the slowest stage take 1.36 times as long as the best cuts do; use "
        "--pipeline-partition-method cost"
    )


def test_stage_text_names_what_a_stage_holds() -> None:
    layers = declared_layers(config({"num_layers": 4}))
    cuts = [(0, 8), (0, 1), (0, 2), (0, 4), (2, 3), (3, 6), (4, 7), (6, 7), (6, 8), (7, 8), (3, 3)]
    assert [stage_text(layers, *cut) for cut in cuts] == [
        *("embed 0-3 head", "embed", "embed", "embed 0-1", "0", "1-3", "2-3 norm", "norm", "head", "head", "nothing")
    ]


def test_the_plan_counts_the_chosen_schedule() -> None:
    sizes = {"pipeline_model_parallel_size": 4}
    common = {"training": {"global_batch_size": 8}}
    one, interleaved, zero_bubble = (
        config(BLOOM_13B, parallel=sizes | more, **common)
        for more in ({}, {"num_virtual_stages_per_pipeline_rank": 2}, {"pipeline_schedule": "zero-bubble"})
    )
    bubbles = [schedule_bubble(run, 8) for run in (one, interleaved, zero_bubble)]
    assert bubbles == pytest.approx([3 / 11, 1.5 / 9.5, 1 / 9])
    layers = declared_layers(one)
    assert [len(ranges) for ranges in stage_ranges(interleaved, layers)] == [2] * 4
    held = sorted(itertools.chain(*stage_ranges(interleaved, layers)))
    assert list(itertools.chain(*held)) == [0, *(bound for bound in held_bounds(held)), len(layers)]
    first = [memory_by_stage(run, copies(run, 1))[0].memory.activations for run in (one, interleaved)]
    assert first[1] / first[0] == pytest.approx(1 + 3 / 8, rel=0.1)  # 1 + (p - 1) / (p v)


def held_bounds(ranges: list[tuple[int, int]]) -> list[int]:
    """Where one range ends and the next begins, twice each."""
    return [bound for (_, stop), (start, _) in itertools.pairwise(ranges) for bound in (stop, start)]
