"""Pipeline stages of a plan are those of DeepSpeed."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.planning.pipeline import balanced_bounds, bubble_fraction, stage_bounds, stage_text, uniform_bounds
from megatron.planning.sizes import declared_layers
from tests.planning.configs import BLOOM_13B, config


def test_bubble_of_bloom_176b() -> None:
    assert bubble_fraction(12, 128) == pytest.approx(0.079, abs=5e-4)
    assert bubble_fraction(1, 7) == 0


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(0, 50), min_size=1, max_size=24), st.integers(1, 9))
def test_balanced_bounds_equal_deepspeed(weights: list[int], num_stages: int) -> None:
    from deepspeed.runtime.utils import partition_balanced, partition_uniform

    expected = [int(bound) for bound in partition_balanced(weights, num_stages)]
    assert balanced_bounds(tuple(weights), num_stages) == expected
    assert uniform_bounds(len(weights), num_stages) == partition_uniform(len(weights), num_stages)


@pytest.mark.parametrize("method", ["parameters", "uniform", "type:TransformerLayer"])
def test_stages_hold_every_layer_once(method: str) -> None:
    run = config(BLOOM_13B, parallel={"pipeline_model_parallel_size": 3, "pipeline_partition_method": method})
    bounds = stage_bounds(run, declared_layers(run))
    assert bounds[0] == 0
    assert bounds[-1] == 44
    assert all(start < stop for start, stop in itertools.pairwise(bounds))


def test_stage_text_names_what_a_stage_holds() -> None:
    layers = declared_layers(config({"num_layers": 4}))
    cuts = [(0, 8), (0, 1), (0, 2), (0, 4), (2, 3), (3, 6), (4, 7), (6, 7), (6, 8), (7, 8), (3, 3)]
    assert [stage_text(layers, *cut) for cut in cuts] == [
        *("embed 0-3 head", "embed", "embed", "embed 0-1", "0", "1-3", "2-3 norm", "norm", "head", "head", "nothing")
    ]
