"""A plan of experts: parameters in all and active, what each rank holds and sends, and layouts that fit."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from megatron.options.config import Config
from megatron.parallel.layout import Layout
from megatron.plan.describe import describe
from megatron.plan.expert_memory import exchange_bytes
from megatron.plan.flops import (
    active_parameters,
    count_parameters,
    declared_layers,
    flops_per_token,
    parameters_of_layer,
)
from megatron.plan.memory import memory_by_stage
from megatron.plan.microbatch import MicrobatchSizes
from megatron.plan.zero import held_layers, shared_state
from megatron.settings.validation import check
from tests.plan.configs import LLAMA_8B, config

MIXTRAL_8X7B = {**LLAMA_8B, "vocab_size": 32000, "num_experts": 8, "moe_router_topk": 2}


def mixtral(model: dict[str, Any] | None = None, **sections: dict[str, Any]) -> Config:
    return config({**MIXTRAL_8X7B, **(model or {})}, **sections)


def test_mixtral_has_its_published_sizes() -> None:
    run = mixtral(training={"seq_length": 4096})
    # transformers counts 46,702,792,704; of each layer 6 of 8 experts of 3 x 4096 x 14336 are idle
    assert count_parameters(run) == 46_702_792_704
    active = 46_702_792_704 - 32 * 6 * 3 * 4096 * 14336
    assert active_parameters(run) == active
    multiplied = active - 32000 * 4096 - 65 * 4096
    assert flops_per_token(run) == 6 * multiplied + 12 * 32 * 4096 * 4096


@pytest.mark.parametrize(
    ("parallel", "world_size"),
    [
        ({"expert_model_parallel_size": 4}, 4),
        ({"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2}, 4),
        ({"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}, 2),
        ({"tensor_model_parallel_size": 4, "expert_tensor_parallel_size": 1}, 4),
    ],
)
def test_a_rank_holds_what_it_allocates(parallel: dict[str, Any], world_size: int) -> None:
    from megatron.models.sequential import build_layers
    from megatron.parallel.context import ParallelContext
    from megatron.parallel.shards import named_parameters

    run = mixtral({"num_layers": 2, "moe_shared_expert_intermediate_size": 64}, parallel=parallel)
    layout = Layout.of(run.parallel, world_size)
    for rank in range(world_size):
        with torch.device("meta"):
            specs = build_layers(run, ParallelContext(**vars(dataclasses.replace(layout, rank=rank))))
            built = [sum(p.numel() for _, p in named_parameters(spec.build())) for spec in specs]
        assert [parameters_of_layer(layer, layout) for layer in declared_layers(run)] == built


def test_states_of_experts_are_shared_by_the_ranks_that_hold_them() -> None:
    run = mixtral(parallel={"expert_model_parallel_size": 4}, training={"bf16": True}, optimizer={"zero_stage": 1})
    state = shared_state(run, Layout.of(run.parallel, 8), held_layers(declared_layers(run)))
    experts = 32 * 2 * 3 * 4096 * 14336
    others = 46_702_792_704 - 4 * experts
    assert state.weights == 2 * (others + experts)
    assert state.master_weights == 4 * (others // 8 + experts // 2)
    assert state.optimizer_states == 2 * state.master_weights


def test_a_rank_sends_its_choices_less_those_that_stay() -> None:
    """There and back, forward and backward: 4 vectors a choice, of which 3 of 4 go to other ranks."""
    training = {"bf16": True, "seq_length": 4096, "micro_batch_size": 2}
    run = mixtral({"moe_layer_freq": [0, 1]}, parallel={"expert_model_parallel_size": 4}, training=training)
    of_layer = 4 * (2 * 4096) * 2 * 4096 * 2 * 3 // 4
    assert exchange_bytes(declared_layers(run), MicrobatchSizes(run)) == 16 * of_layer
    alone = mixtral(training=training)
    assert exchange_bytes(declared_layers(alone), MicrobatchSizes(alone)) == 0
    # whole experts: each tensor-parallel rank sends its own share of the tokens
    parallel = {"expert_model_parallel_size": 4, "tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1}
    whole = mixtral(parallel=parallel, training=training)
    assert exchange_bytes(declared_layers(whole), MicrobatchSizes(whole)) == 32 * of_layer // 2


def test_experts_over_ranks_are_a_layout_that_fits() -> None:
    """Weights of 87 GiB fit no device of 80 GB whole; the text says it in lines of a terminal."""
    run = mixtral(
        training={"bf16": True, "seq_length": 4096, "train_iters": 10, "global_batch_size": 64},
        parallel={"device_memory": "h100", "device": "cuda", "expert_model_parallel_size": 8},
        data={"data_path": ["none"]},
    )
    text = describe(run, nodes=4, devices_per_node=8, title="a plan", check=check)
    assert max(map(len, text.splitlines())) <= 100
    assert "46,702,792,704 in all" in text
    assert "12,879,925,248 active: those that compute with one token" in text
    assert "8 experts a layer, 2 a token; EP 8 x TP 1 x DP 4" in text
    assert "GiB that a rank sends to experts elsewhere" in text
    whole = dataclasses.replace(run, parallel=dataclasses.replace(run.parallel, expert_model_parallel_size=1))
    text = describe(whole, nodes=4, devices_per_node=8, title="a plan", check=check)
    assert "does not fit" in text
    assert "--expert-model-parallel-size" in text


def test_layers_of_experts_weigh_as_their_active_part() -> None:
    run = mixtral(parallel={"pipeline_model_parallel_size": 4}, training={"seq_length": 4096})
    held = [stage.ranges[0][1] - stage.ranges[0][0] for stage in memory_by_stage(run, Layout.of(run.parallel, 4))]
    assert max(held) - min(held) <= 2


def test_ranks_that_experts_do_not_divide_are_refused() -> None:
    """A training is refused as a plan and a generation are."""
    options: Any = {"training": {"train_iters": 10, "global_batch_size": 64}, "data": {"data_path": ["none"]}}
    too_many = mixtral(parallel={"tensor_model_parallel_size": 8, "expert_model_parallel_size": 2}, **options)
    assert any(
        "expert_model_parallel_size=2 does not divide the 1 data-parallel" in each for each in check(too_many, 8)
    )
    cut_up = mixtral({"moe_router_enable_expert_bias": True}, optimizer={"zero_stage": 3}, **options)
    assert any("moe_router_enable_expert_bias with zero_stage=3" in each for each in check(cut_up, 8))
