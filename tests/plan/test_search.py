"""The search of the fastest layout, against all layouts of small runs, and against answers that are known."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.options.config import Config, ConfigError
from megatron.parallel.layout import Layout
from megatron.plan.fit import Capacity, largest_rank
from megatron.plan.rates.files import load_rates
from megatron.plan.rates.rates import Rates
from megatron.plan.search.found import SearchResult
from megatron.plan.search.search import DIVISION, TOLERANCE, clusters_of, search
from megatron.plan.search.space import NEUTRAL, Space
from megatron.plan.timing.cluster import Cluster
from megatron.plan.timing.step import step_time
from megatron.runtime.devices import GIB
from megatron.settings.validation import check
from tests.plan.configs import config

DENSE = {
    "architecture": "llama",
    "num_layers": 6,
    "hidden_size": 1024,
    "num_attention_heads": 4,
    "num_query_groups": 4,
    "ffn_hidden_size": 4096,
    "vocab_size": 32000,
    "position_embedding_type": "rope",
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}
EXPERTS = {**DENSE, "architecture": "mixtral", "num_layers": 2, "num_experts": 4, "moe_router_topk": 2}
SELECTIONS = [
    (granularity, names)
    for granularity, names in [
        ("none", ()),
        ("full", ()),
        *(("selective", names) for names in [("core_attn",), ("layernorm",), ("mlp",), ("mlp_act",)]),
        ("selective", ("core_attn", "layernorm")),
        ("selective", ("core_attn", "mlp")),
        ("selective", ("core_attn", "mlp_act")),
        ("selective", ("layernorm", "mlp")),
        ("selective", ("layernorm", "mlp_act")),
        ("selective", ("core_attn", "layernorm", "mlp")),
        ("selective", ("core_attn", "layernorm", "mlp_act")),
    ]
]
"""All that selective recomputation can drop, written out."""
KEPT = {"recompute_granularity", "recompute_modules", "offload_activations"}
BATCHES = [1, 2, 4, 8, 16]


def run_of(model: Mapping[str, Any], seq_length: int = 1024, samples: int = 16) -> Config:
    training = {"bf16": True, "seq_length": seq_length, "global_batch_size": samples, "train_iters": 10}
    parallel = {"device": "cuda"}
    return config(dict(model), training=training, parallel=parallel, data={"data_path": ("DATASET",)})


def with_values(run: Config, values: Mapping[str, Any]) -> Config:
    for section in ("parallel", "training", "optimizer"):
        own = getattr(run, section)
        mine = {name: value for name, value in values.items() if hasattr(own, name)}
        run = dataclasses.replace(run, **{section: dataclasses.replace(own, **mine)})
    return run


def group_of(run: Config) -> tuple[Any, ...]:
    # one rank's experts are whole and shared by one alike
    own = dataclasses.replace(run.parallel, expert_tensor_parallel_size=None)
    parallel = run.parallel if run.parallel.tensor_model_parallel_size > 1 else own
    return tuple(getattr(parallel, name) for name in DIVISION)


def exhaustive(
    run: Config, cluster: Cluster, rates: Rates, room: Capacity, axes: Sequence[tuple[tuple[str, ...], list[Any]]]
) -> dict[tuple[Any, ...], float]:
    """Return the least time of each division, of all combinations of these values that are valid and fit."""
    best: dict[tuple[Any, ...], float] = {}
    for choice in itertools.product(*(values for _, values in axes)):
        values = dict(NEUTRAL)
        for (names, _), value in zip(axes, choice, strict=True):
            values |= dict(zip(names, value if len(names) > 1 else (value,), strict=True))
        tried = with_values(run, values)
        if check(tried, cluster.num_devices) or not room.is_enough_for(largest_rank(tried, cluster.num_devices)):
            continue
        seconds = step_time(tried, cluster, rates).seconds
        best[group_of(tried)] = min(seconds, best.get(group_of(tried), float("inf")))
    return best


def searched(
    run: Config, cluster: Cluster, rates: Rates, room: Capacity, free: set[str], count: int = 1000
) -> SearchResult:
    plain = with_values(run, NEUTRAL)
    return search(plain, [cluster], rates, room, check, count=count, fixed=NEUTRAL.keys() - free)


SIZES = [1, 2, 4]
SPACES: dict[str, tuple[Config, Cluster, float, list[tuple[tuple[str, ...], list[Any]]]]] = {
    "sizes, schedules and batches": (
        run_of(DENSE, 2048),
        Cluster.of(2, 2),
        40.0,
        [
            (("tensor_model_parallel_size",), SIZES),
            (("context_parallel_size",), [1, 2]),
            (("pipeline_model_parallel_size",), SIZES),
            (
                ("pipeline_schedule", "num_virtual_stages_per_pipeline_rank"),
                [(None, 1), ("zero-bubble", 1), ("interleaved", 2), ("interleaved", 3)],
            ),
            (("micro_batch_size",), BATCHES),
        ],
    ),
    "activations and cuts": (
        run_of(DENSE),
        Cluster.of(1, 4),
        2.0,
        [
            (("tensor_model_parallel_size",), [1, 2]),
            (("pipeline_model_parallel_size",), [2]),
            (("sequence_parallel",), [False, True]),
            (("micro_batch_size",), [1, 4]),
            (("recompute_granularity", "recompute_modules"), SELECTIONS),
            (("pipeline_partition_method",), ["cost", "parameters", "uniform", "type:TransformerLayer"]),
        ],
    ),
    "states": (
        run_of(DENSE),
        Cluster.of(2, 2),
        1.3,
        [
            (("tensor_model_parallel_size",), [1, 2]),
            (("zero_stage",), [1, 2, 3]),
            (("num_replicas",), [1, 2]),
            (("micro_batch_size",), BATCHES),
            (("offload_activations",), [False, True]),
            (("recompute_granularity", "recompute_modules"), SELECTIONS[:3]),
        ],
    ),
    "exchanges": (
        run_of(DENSE, 4096),
        Cluster.of(1, 4),
        20.0,
        [
            (("context_parallel_size",), [2, 4]),
            (("context_parallel_exchange",), ["ring", "all-to-all"]),
            (("micro_batch_size",), BATCHES),
        ],
    ),
    "experts": (
        run_of(EXPERTS),
        Cluster.of(1, 4),
        20.0,
        [
            (("tensor_model_parallel_size",), SIZES),
            (("expert_model_parallel_size",), SIZES),
            (("expert_tensor_parallel_size",), [None, 1]),
            (("micro_batch_size",), [1, 4]),
        ],
    ),
}


def misses(name: str) -> list[str]:
    """Return the divisions in which the search has not found what all layouts together show."""
    run, cluster, gib, axes = SPACES[name]
    rates, room = load_rates("h100"), Capacity("device", int(gib * GIB))
    free = {option for names, _ in axes for option in names}
    best = exhaustive(run, cluster, rates, room, axes)
    assert best, "the space is empty"
    result = searched(run, cluster, rates, room, free)
    found = {group_of(each.config): each.time.seconds for each in result.found}
    wrong = []
    for group, seconds in best.items():
        if group not in found:
            wrong.append(f"{group} is missing")
        elif found[group] > seconds * (1 + TOLERANCE):
            wrong.append(f"{group}: {found[group]} in place of {seconds}")
    for each in result.found:
        assert check(each.config, cluster.num_devices) == []
        assert room.is_enough_for(largest_rank(each.config, cluster.num_devices))
    return wrong


@pytest.mark.parametrize("name", SPACES)
def test_no_layout_is_faster_than_those_that_are_found(name: str) -> None:
    assert misses(name) == []


@pytest.mark.parametrize(
    ("name", "method", "kept"),
    [
        ("sizes, schedules and batches", "orders", lambda choices: choices[:1]),
        ("sizes, schedules and batches", "passes", lambda choices: choices[-1:]),
        ("activations and cuts", "kept", lambda choices: choices[-1:]),
        ("states", "states", lambda choices: [choice for choice in choices if choice["zero_stage"] > 1]),
        ("exchanges", "passes", lambda choices: choices[:3]),
    ],
)
def test_a_search_that_skips_an_axis_is_caught(name: str, method: str, kept: Any, monkeypatch: Any) -> None:
    own = getattr(Space, method)
    monkeypatch.setattr(Space, method, lambda *arguments: kept(list(own(*arguments))))
    assert misses(name) != []


def first(run: Config, cluster: Cluster, rates: Rates, gib: float) -> Layout:
    result = search(run, [cluster], rates, Capacity("device", int(gib * GIB)), check, count=1, fixed=KEPT)
    return result.found[0].layout


def test_a_model_that_fits_one_device_is_copied_where_links_are_fast() -> None:
    layout = first(run_of(DENSE, samples=16), Cluster.of(1, 8), load_rates("h100"), 60)
    assert (layout.tensor_size, layout.context_size, layout.num_stages, layout.num_batch_ranks) == (1, 1, 1, 8)


def test_ranks_that_share_a_layer_stay_within_a_node() -> None:
    run = run_of({**DENSE, "num_attention_heads": 8, "num_query_groups": 8}, samples=8)
    run = with_values(run, {"device": "hpu"})
    result = search(run, [Cluster.of(2, 4)], load_rates("gaudi2"), Capacity("device", 2 * GIB), check, fixed=KEPT)
    assert result.found
    assert all(found.layout.tensor_size <= 4 for found in result.found[:5])


def test_a_long_sequence_is_shared() -> None:
    run = run_of({**DENSE, "num_attention_heads": 1, "num_query_groups": 1}, seq_length=131072, samples=1)
    result = search(run, [Cluster.of(1, 8)], load_rates("h100"), Capacity("device", 24 * GIB), check, fixed=KEPT)
    assert result.found
    assert all(found.layout.context_size > 1 for found in result.found)


def test_rates_of_another_device_are_refused() -> None:
    run = with_values(run_of(DENSE), {"device": "hpu"})
    with pytest.raises(ConfigError, match="rates of h100 are those of cuda, but the run is for hpu"):
        search(run, [Cluster.of(1, 8)], load_rates("h100"), Capacity("device", GIB), check)


def test_what_no_layout_changes_is_refused() -> None:
    run = run_of({**DENSE, "hidden_size": 1023})
    with pytest.raises(ConfigError, match="hidden_size=1023"):
        search(run, [Cluster.of(1, 8)], load_rates("h100"), Capacity("device", GIB), check)


def test_nodes_of_different_sizes_start_as_many_ranks_each() -> None:
    clusters = [cluster.node_sizes for cluster in clusters_of([8, 8, 4], may_leave=False)]
    assert clusters == [(8, 8), (4, 4, 4), (4, 4)]
    assert [cluster.node_sizes for cluster in clusters_of([8, 8, 8], may_leave=False)] == [(8, 8, 8)]
    assert [len(cluster.node_sizes) for cluster in clusters_of([8] * 4, may_leave=True)] == [4, 3]


@settings(max_examples=80, deadline=None)
@given(
    st.sampled_from((DENSE, EXPERTS)),
    st.fixed_dictionaries(
        {
            "tensor_model_parallel_size": st.sampled_from((1, 2, 3, 4, 8)),
            "context_parallel_size": st.sampled_from((1, 1, 2, 3)),
            "context_parallel_exchange": st.sampled_from(("auto", "ring", "all-to-all")),
            "pipeline_model_parallel_size": st.sampled_from((1, 1, 2, 4)),
            "pipeline_schedule": st.sampled_from((None, None, "zero-bubble", "interleaved")),
            "num_virtual_stages_per_pipeline_rank": st.sampled_from((1, 1, 2, 5)),
            "expert_model_parallel_size": st.sampled_from((1, 1, 2, 3)),
            "sequence_parallel": st.booleans(),
            "micro_batch_size": st.sampled_from((1, 2, 3)),
            "num_replicas": st.sampled_from((1, 1, 2, 3)),
            "zero_stage": st.integers(0, 3),
            "offload_param": st.booleans(),
        }
    ),
)
def test_the_search_refuses_what_a_dry_run_refuses(model: Mapping[str, Any], drawn: Mapping[str, Any]) -> None:
    cluster, values = Cluster.of(1, 8), {**NEUTRAL, **drawn}
    tried = with_values(run_of(model), values)
    try:
        found = search(tried, [cluster], load_rates("h100"), Capacity("any", 2**50), check, fixed=NEUTRAL.keys()).found
    except ConfigError:
        found = []
    assert bool(found) == (not check(tried, 8))
    for layout in found:
        assert layout.config == tried
