"""The estimate counts what the model, DeepSpeed and the published sizes count."""

from __future__ import annotations

import dataclasses
import itertools
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.config.command_line import from_dict
from megatron.config.options import Config
from megatron.planning.estimate import (
    activation_bytes_per_layer,
    balanced_bounds,
    bubble_fraction,
    count_parameters,
    describe,
    flops_per_token,
    memory_by_stage,
    parameters_by_layer,
    stage_bounds,
    stage_text,
    stores_attention_scores,
    uniform_bounds,
)

BLOOM_13B = {"num_layers": 40, "hidden_size": 5120, "num_attention_heads": 32, "max_position_embeddings": 2048}
LLAMA_8B = {
    "architecture": "llama",
    "num_layers": 32,
    "hidden_size": 4096,
    "ffn_hidden_size": 14336,
    "num_attention_heads": 32,
    "num_query_groups": 8,
    "vocab_size": 128256,
    "position_embedding_type": "rope",
    "untie_embeddings_and_output_weights": True,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}


def config(model: dict[str, Any] | None = None, **sections: dict[str, Any]) -> Config:
    return from_dict({"model": model or {}, **sections})


def test_bloom_13b_has_the_parameters_that_habana_trains() -> None:
    assert count_parameters(config(BLOOM_13B).model, 2048) == 12_853_626_880


@pytest.mark.parametrize(("tensor_size", "rows"), [(1, 50304), (2, 50432), (4, 50688), (8, 51200)])
def test_parameters_grow_by_the_padding_alone(tensor_size: int, rows: int) -> None:
    model = config(BLOOM_13B).model
    more = (rows - 50304) * 5120
    assert count_parameters(model, 2048, tensor_size) == count_parameters(model, 2048) + more


@pytest.mark.parametrize(
    "model",
    [
        {},
        {"position_embedding_type": "alibi", "embed_layernorm": True, "num_query_groups": 2},
        {"architecture": "llama", "position_embedding_type": "rope", "untie_embeddings_and_output_weights": True},
        {"architecture": "llama", "position_embedding_type": "learned", "num_query_groups": 1, "ffn_hidden_size": 96},
        {"kv_channels": 32, "untie_embeddings_and_output_weights": True},
    ],
)
def test_parameters_by_layer_are_those_of_the_model(model: dict[str, Any]) -> None:
    from megatron.models.sequential import build_layers
    from megatron.parallel.context import ParallelContext

    run = config(model)
    built = [
        sum(parameter.numel() for parameter in layer.build().parameters())
        for layer in build_layers(run, ParallelContext.single())
    ]
    assert parameters_by_layer(run.model, run.training.seq_length) == built


@pytest.mark.parametrize("tensor_size", [1, 2, 4])
def test_every_matrix_is_held_once_over_tensor_parallel_ranks(tensor_size: int) -> None:
    model = dataclasses.replace(config(LLAMA_8B).model, num_query_groups=32)
    whole, rank = parameters_by_layer(model, 128)[2], parameters_by_layer(model, 128, tensor_size)[2]
    norms = 2 * model.hidden_size
    assert (rank - norms) * tensor_size == whole - norms


def test_fewer_kv_heads_than_ranks_are_replicated() -> None:
    model = dataclasses.replace(config(LLAMA_8B).model, num_query_groups=2)
    cut = parameters_by_layer(model, 128, 8)[2] * 8 - parameters_by_layer(model, 128, 1)[2]
    extra_heads = 2 * (8 - 2) * model.head_size * model.hidden_size
    assert cut == extra_heads + 7 * 2 * model.hidden_size


def test_flops_per_token_of_llama_8b_follow_palm() -> None:
    model = config(LLAMA_8B).model
    # 8,030,261,248 parameters less the embedding look-up and 65 norms
    weights = 8_030_261_248 - 128256 * 4096 - 65 * 4096
    assert flops_per_token(model, 8192) == 6 * weights + 12 * 32 * 4096 * 8192


def test_bubble_of_bloom_176b() -> None:
    assert bubble_fraction(12, 128) == pytest.approx(0.079, abs=5e-4)
    assert bubble_fraction(1, 7) == 0


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(0, 50), min_size=1, max_size=24), st.integers(1, 9))
def test_balanced_bounds_equal_deepspeed(weights: list[int], num_stages: int) -> None:
    from deepspeed.runtime.utils import partition_balanced, partition_uniform

    assert balanced_bounds(weights, num_stages) == [int(bound) for bound in partition_balanced(weights, num_stages)]
    assert uniform_bounds(len(weights), num_stages) == partition_uniform(len(weights), num_stages)


@pytest.mark.parametrize("method", ["parameters", "uniform", "type:TransformerLayer"])
def test_stages_hold_every_layer_once(method: str) -> None:
    run = config(BLOOM_13B, parallel={"pipeline_model_parallel_size": 3, "pipeline_partition_method": method})
    bounds = stage_bounds(run)
    assert bounds[0] == 0
    assert bounds[-1] == 44
    assert all(start < stop for start, stop in itertools.pairwise(bounds))


def test_stage_text_names_what_a_stage_holds() -> None:
    run = config({"num_layers": 4})
    cuts = [(0, 8), (0, 1), (0, 2), (0, 4), (2, 3), (3, 6), (4, 7), (6, 7), (6, 8), (7, 8), (3, 3)]
    assert [stage_text(run, *cut) for cut in cuts] == [
        *("embed 0-3 head", "embed", "embed", "embed 0-1", "0", "1-3", "2-3 norm", "norm", "head", "head", "nothing")
    ]


@pytest.mark.parametrize(
    ("sequence_parallel", "recompute", "expected"),
    [
        # Korthikanti et al. 2022, table 2, in units of S B H, at t = 4
        (False, "selective", 10 + 24 / 4),
        (True, "selective", 34 / 4),
        (True, "full", 2 / 4),
        (False, "full", 2),
    ],
)
def test_activations_equal_korthikanti(sequence_parallel: bool, recompute: str, expected: float) -> None:
    run = config(
        BLOOM_13B,
        parallel={"tensor_model_parallel_size": 4, "sequence_parallel": sequence_parallel},
        training={"bf16": True, "seq_length": 2048, "micro_batch_size": 2, "recompute_granularity": recompute},
    )
    assert activation_bytes_per_layer(run) == 2048 * 2 * 5120 * expected


def test_stored_scores_add_korthikantis_5as() -> None:
    training = {"bf16": True, "seq_length": 2048}
    fused = config(BLOOM_13B, training=training)
    stored = config(BLOOM_13B, training=training, parallel={"device": "cpu"})
    assert not stores_attention_scores(fused)
    assert stores_attention_scores(stored)
    assert activation_bytes_per_layer(stored) - activation_bytes_per_layer(fused) == 5 * 32 * 2048**2


def test_first_stage_holds_as_many_microbatches_as_there_are_stages() -> None:
    run = config(
        {"num_layers": 8},
        parallel={"pipeline_model_parallel_size": 4},
        training={"global_batch_size": 8},
    )
    assert [stage.in_flight for stage in memory_by_stage(run, 1)] == [4, 3, 2, 1]
    assert [stage.in_flight for stage in memory_by_stage(run, 4)] == [2, 2, 2, 1]


@pytest.mark.parametrize(
    ("zero_stage", "expected"),
    [
        # bytes a parameter on 4 data-parallel ranks: weights, gradients (fp32), master weights, two moments
        (0, (2.0, 4.0, 1.0, 2.0)),
        (1, (2.0, 4.0, 1.0, 2.0)),
        (2, (2.0, 1.0, 1.0, 2.0)),
    ],
)
def test_zero_cuts_states_then_gradients(zero_stage: int, expected: tuple[float, ...]) -> None:
    run = config(training={"bf16": True}, optimizer={"zero_stage": zero_stage})
    (stage,) = memory_by_stage(run, 4)
    memory = stage.memory
    held = (memory.weights, memory.gradients, memory.master_weights, memory.optimizer_states)
    assert tuple(size / stage.parameters for size in held) == expected


def test_zero_3_holds_a_share_and_the_layer_at_work() -> None:
    run = config(training={"bf16": True}, optimizer={"zero_stage": 3})
    (stage,) = memory_by_stage(run, 4)
    assert stage.memory.weights == stage.parameters * 2 / 4 + 2 * max(parameters_by_layer(run.model, 128))


def test_fp32_without_zero_has_no_second_copy_of_the_weights() -> None:
    (stage,) = memory_by_stage(config(), 4)
    assert stage.memory.master_weights == 0
    assert stage.memory.optimizer_states == 8 * stage.parameters


def test_offload_moves_states_to_the_host() -> None:
    run = config(training={"bf16": True}, optimizer={"zero_stage": 2, "offload_optimizer": True})
    (stage,) = memory_by_stage(run, 4)
    assert stage.memory.optimizer_states == stage.memory.master_weights == 0
    assert stage.host_bytes == 12 * stage.parameters / 4


def test_tied_embedding_is_held_once_on_one_stage_and_on_both_ends_of_a_pipeline() -> None:
    single, piped = config(), config(parallel={"pipeline_model_parallel_size": 2})
    vocabulary = single.model.padded_vocab_size(1) * single.model.hidden_size
    (only,) = memory_by_stage(single, 1)
    assert only.parameters == count_parameters(single.model, 128)
    assert sum(stage.parameters for stage in memory_by_stage(piped, 1)) == only.parameters + vocabulary


def test_description_fits_a_terminal_of_80_columns() -> None:
    run = config(
        BLOOM_13B,
        parallel={"pipeline_model_parallel_size": 12, "tensor_model_parallel_size": 4, "sequence_parallel": True},
        training={
            "bf16": True,
            "seq_length": 2048,
            "global_batch_size": 2048,
            "rampup_batch_size": (192, 16, 9_765_625),
            "train_samples": 220_000_000,
        },
    )
    text = describe(run, nodes=48, devices_per_node=8, title="BLOOM")
    assert max(map(len, text.splitlines())) <= 80
    assert "PP 12 x TP 4 x DP 8" in text
    assert "4.1% of a step" in text


@pytest.mark.parametrize(
    ("sft", "batch", "row"),
    [
        ({"max_batch_len": 2048}, "64 chats over DP 2, in rows of at most 2,048 tokens", 2048),
        ({"packing": "none"}, "64 chats over DP 2, 1 to a microbatch, padded", 512),
        ({"packing": "dataset"}, "64 rows of at most 512 tokens over DP 2", 512),
    ],
)
def test_fine_tuning_is_described_by_chats_and_holds_its_longest_row(sft: dict[str, Any], batch: str, row: int) -> None:
    training = {"task": "sft", "num_epochs": 3, "seq_length": 512, "global_batch_size": 64, "bf16": True}
    model = {"architecture": "llama", "position_embedding_type": "rope", "hidden_dropout": 0.0}
    config = from_dict({"model": model, "training": training, "sft": sft})
    text = describe(config, nodes=1, devices_per_node=2, title="a plan")
    for said in (batch, "length     3 epochs", "a step     at most 32,768 tokens"):
        assert said in text
    pretrained = from_dict({"model": model, "training": {"seq_length": row, "bf16": True}})
    assert activation_bytes_per_layer(config) == activation_bytes_per_layer(pretrained)


def test_estimate_imports_neither_torch_nor_deepspeed() -> None:
    code = "import sys, megatron.planning.estimate; print(sorted({'torch', 'deepspeed', 'numpy'} & set(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "[]\n"
