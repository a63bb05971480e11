"""Memory of a plan is what DeepSpeed holds, and what Korthikanti et al. count."""

from __future__ import annotations

from typing import Any

import pytest

from megatron.planning.memory import memory_by_stage, stores_attention_scores
from megatron.planning.sizes import count_parameters, declared_layers, parameters_of_layer
from tests.planning.configs import BLOOM_13B, bytes_of_a_layer, config


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
    assert bytes_of_a_layer(run) == 2048 * 2 * 5120 * expected


def test_stored_scores_add_korthikantis_5as() -> None:
    training = {"bf16": True, "seq_length": 2048}
    fused = config(BLOOM_13B, training=training)
    stored = config(BLOOM_13B, training=training, parallel={"device": "cpu"})
    assert not stores_attention_scores(fused)
    assert stores_attention_scores(stored)
    assert bytes_of_a_layer(stored) - bytes_of_a_layer(fused) == 5 * 32 * 2048**2


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
    assert stage.memory.weights == stage.parameters * 2 / 4 + 2 * max(
        parameters_of_layer(layer, 1) for layer in declared_layers(run)
    )


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
    assert only.parameters == count_parameters(single)
    assert sum(stage.parameters for stage in memory_by_stage(piped, 1)) == only.parameters + vocabulary


def test_frozen_parameters_have_weights_alone() -> None:
    for zero_stage in (0, 1, 2):
        options: dict[str, Any] = {"training": {"bf16": True}, "optimizer": {"zero_stage": zero_stage}}
        (whole,) = memory_by_stage(config(**options), 4)
        (frozen,) = memory_by_stage(config({"freeze": ("layers.*",)}, **options), 4)
        trained = sum(parameters_of_layer(layer, 1) for layer in declared_layers(config())[:-1] if layer.number is None)
        assert frozen.memory.weights == whole.memory.weights
        for part in ("gradients", "master_weights", "optimizer_states"):
            ratio = getattr(frozen.memory, part) / getattr(whole.memory, part)
            assert ratio == pytest.approx(trained / whole.parameters, rel=1e-3)
