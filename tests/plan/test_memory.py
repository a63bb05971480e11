"""Memory of a plan is what a run holds, what Korthikanti et al. count, and what DeepSpeed is configured to."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from benchmarks.allocations import Allocations
from benchmarks.plan_memory import BLOOM, COMMON, CPU_CASES, GPT2, LIMIT, LLAMA, Case, compare
from megatron.options.deepspeed_file import zero_settings
from megatron.parallel.layout import Layout
from megatron.plan.attention_core import stores_attention_scores
from megatron.plan.flops import count_parameters, declared_layers, parameters_of_layer
from megatron.plan.memory import memory_by_stage
from megatron.plan.partitions import whole_parameters
from megatron.plan.zero import held_layers, reduce_bucket_size, shared_state
from megatron.settings.command_line import parse_arguments
from megatron.settings.validation import check
from megatron.training.deepspeed.config import deepspeed_config
from tests.plan.configs import BLOOM_13B, bytes_of_a_layer, config, copies
from tests.ranks import RankPools
from tests.runs import TINY, train, write_dataset

OFTEN = {
    "Llama GQA, fp32, frozen layers",
    "weights in nf4, bf16, LoRA",
    "Llama, bf16, loss in chunks",
    "Llama GQA, bf16, layernorm, mlp_act",
    "Llama GQA, bf16, full",
    "Bloom, fp32, selective, dropout",
    "weights, fp32, ZeRO 2, offload",
    "weights, bf16, sums in bf16, DP 2",
    "weights, fp32, ZeRO 2, DP 2",
    "Bloom, bf16, ZeRO 3, one microbatch, DP 2",
    "weights, bf16, ZeRO 3, DP 2",
    "weights, bf16, LoRA, ZeRO 3, DP 2",
    "layers, bf16, LoRA, ZeRO 3, full, DP 2",
    "weights, fp32, average, DP 2",
    "weights, bf16, Muon, DP 2",
    "Llama GQA, bf16, interleaved",
    "Bloom, bf16, zero-bubble",
    "Bloom, fp32, TP 2, SP",
    "Llama GQA, fp32, CP 2, ring",
    "Bloom, fp32, CP 2, all-to-all",
    "experts, bf16, full",
    "experts, bf16, EP 2, TP 2, SP",
}
"""One of each kind; -m slow: the others, which differ in precision, model or ZeRO stage."""


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=case.name, marks=() if case.name in OFTEN else pytest.mark.slow) for case in CPU_CASES],
)
def test_the_plan_is_within_5_percent_of_a_run(ranks: RankPools, case: Case) -> None:
    results = [result for result in ranks(case.ranks)(compare, case.flags, "cpu") if result is not None]
    assert [result for result in results if abs(result.ratio - 1) > LIMIT] == []


CP = "--context-parallel-size 2"
LORA = "--lora-rank 8 --lora-target-modules all-linear"


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Any valid run of a small model on one rank or two."""
    layout = draw(
        st.sampled_from(("", "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2", "data", CP))
    )
    heads, per_microbatch = draw(st.sampled_from((4, 8))), draw(st.integers(1, 3))
    numbers = {
        "num-layers": draw(st.integers(2, 4)),
        "hidden-size": draw(st.sampled_from((256, 384, 512))),
        "num-attention-heads": heads,
        "vocab-size": draw(st.integers(2000, 8000)),
        "seq-length": draw(st.sampled_from((128, 200, 512))),
        "micro-batch-size": per_microbatch,
        "global-batch-size": per_microbatch * draw(st.sampled_from((2, 4))),
        "zero-stage": draw(st.integers(0, 3)),
        "hidden-dropout": draw(st.sampled_from((0, 0.1))),
    }
    flags = [f"--{name} {number}" for name, number in numbers.items()]
    flags += [
        "" if layout == "data" else layout,
        f"--context-parallel-exchange {draw(st.sampled_from(('ring', 'all-to-all')))}" if layout == CP else "",
        draw(st.sampled_from((f"{LLAMA} --num-query-groups 2 --ffn-hidden-size 352", LLAMA, BLOOM, GPT2))),
        draw(st.sampled_from(("--bf16", ""))),
        draw(st.sampled_from(("", "selective", "full")).map(lambda kind: kind and f"--recompute-granularity {kind}")),
        draw(st.sampled_from(("", "", LORA, f"{LORA} --use-dora"))),
        draw(st.sampled_from(("", "--sequence-parallel"))),
    ]
    case = Case("drawn", " ".join(flags), 2 if layout else 1)
    config, _ = parse_arguments([*COMMON.split(), *case.flags.split(), "--device", "cpu"])
    assume(not check(config, case.ranks))
    return case


def peak_of_a_whole_run(arguments: str) -> int:
    """Bytes of tensors and communication, from before the model to after the last step."""
    gc.collect()
    allocations = Allocations()
    allocations.start()
    allocations.reset_peak()
    assert train(arguments) == ""
    allocations.stop()
    peak = allocations.peak()
    return peak.tensors + peak.communication


def test_a_whole_run_with_its_data_and_watchdog_is_within_5_percent_too(ranks: RankPools, tmp_path: Path) -> None:
    write_dataset(tmp_path / "data", 400, 4000)
    arguments = (
        f"{COMMON} {LLAMA} --data-path {tmp_path}/data --train-iters 3 --eval-iters 0 --num-layers 3 --hidden-size 256 "
        "--num-attention-heads 4 --ffn-hidden-size 704 --vocab-size 4000 --seq-length 512 --zero-stage 2 "
        "--recompute-granularity full"
    )
    run = parse_arguments([*TINY.split(), *arguments.split()])[0]
    (stage,) = memory_by_stage(run, copies(run, 2))
    for measured in ranks(2)(peak_of_a_whole_run, arguments):
        assert stage.memory.total == pytest.approx(measured, rel=LIMIT)


@pytest.mark.parametrize("more", ["", "--seq-length 128 --zero-stage 3"])
def test_an_evaluation_is_within_5_percent_too(ranks: RankPools, tmp_path: Path, more: str) -> None:
    write_dataset(tmp_path / "data", 400, 4000)
    arguments = (
        f"{COMMON} {LLAMA} --data-path {tmp_path}/data --split 50,50,0 --train-iters 1 --num-layers 3 "
        "--hidden-size 256 --num-attention-heads 4 --ffn-hidden-size 704 --vocab-size 4000 --seq-length 512 "
    )
    saved = f"{arguments} --eval-iters 0 --save {tmp_path}/saved"
    assert ranks(1)(train, saved) == [""]
    evaluation = f"{arguments} {more} --eval-iters 2 --skip-train --load {tmp_path}/saved"
    run = parse_arguments([*TINY.split(), *evaluation.split()])[0]
    (stage,) = memory_by_stage(run, copies(run, 2))
    for measured in ranks(2)(peak_of_a_whole_run, evaluation):
        assert stage.memory.total == pytest.approx(measured, rel=LIMIT)


@pytest.mark.slow
@settings(max_examples=300, suppress_health_check=list(HealthCheck))
@given(case=cases())
def test_the_plan_of_any_run_is_within_5_percent(ranks: RankPools, case: Case) -> None:
    test_the_plan_is_within_5_percent_of_a_run(ranks, case)


@pytest.mark.parametrize(
    ("sequence_parallel", "recompute", "expected"),
    [
        # Korthikanti et al. 2022, table 2, in units of S B H, at t = 4; a fused kernel keeps no scores, as they keep
        # none with selective recomputation
        (False, "none", 10 + 24 / 4),
        (True, "none", 34 / 4),
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
    # theirs leaves out the statistics of the softmax, 4 bytes a head
    assert bytes_of_a_layer(run) == pytest.approx(2048 * 2 * 5120 * expected, rel=2e-3)


def test_stored_scores_add_korthikantis_5as() -> None:
    training = {"bf16": True, "seq_length": 2048}
    fused, stored = (
        config({**BLOOM_13B, "attention_backend": backend}, training=training, parallel={"device": "hpu"})
        for backend in ("fused_hpu", "sdpa")
    )
    assert not stores_attention_scores(fused)
    assert stores_attention_scores(stored)
    assert bytes_of_a_layer(stored) - bytes_of_a_layer(fused) == 5 * 32 * 2048**2


def test_dropout_within_flex_keeps_what_a_gpu_was_seen_to_keep() -> None:
    """16 heads of 128 channels over 4,096 tokens in bf16: 34.50 MiB beside 16.25, torch 2.11 on an H200."""
    model = {"num_layers": 2, "hidden_size": 2048, "num_attention_heads": 16, "position_embedding_type": "alibi"}
    training = {"bf16": True, "seq_length": 4096, "micro_batch_size": 1}
    without, dropped = (
        config({**model, "attention_dropout": rate}, training=training, parallel={"device": "cuda"})
        for rate in (0.0, 0.1)
    )
    assert bytes_of_a_layer(dropped) - bytes_of_a_layer(without) == (34.5 - 16.25) * 2**20


def test_first_stage_holds_as_many_microbatches_as_there_are_stages() -> None:
    run = config(
        {"num_layers": 8},
        parallel={"pipeline_model_parallel_size": 4},
        training={"global_batch_size": 8},
    )
    assert [stage.in_flight for stage in memory_by_stage(run, copies(run, 1))] == [4, 3, 2, 1]
    assert [stage.in_flight for stage in memory_by_stage(run, copies(run, 4))] == [2, 2, 2, 1]


def test_offload_moves_states_to_the_host() -> None:
    run = config(training={"bf16": True}, optimizer={"zero_stage": 2, "offload_optimizer": True})
    (stage,) = memory_by_stage(run, copies(run, 4))
    assert stage.memory.optimizer_states == stage.memory.master_weights == 0
    assert stage.host_bytes >= 12 * stage.parameters / 4


def test_a_bucket_is_no_larger_than_the_gradients_that_it_takes(tmp_path: Path) -> None:
    """DeepSpeed's own default is a buffer of 500 million numbers, whatever the model."""
    zero_2 = {"zero_stage": 2}
    assert reduce_bucket_size(config(optimizer=zero_2)) == memory_by_stage(config(), copies(config(), 1))[0].parameters
    assert reduce_bucket_size(config(BLOOM_13B, optimizer=zero_2)) == 500_000_000
    # ours: several in a model, so that some are reduced while the backward pass still runs
    assert reduce_bucket_size(config()) == 1_000_000
    assert reduce_bucket_size(config(BLOOM_13B)) == 40_000_000
    for zero in (1, 2, 3):
        staged = config(optimizer={"zero_stage": zero})
        assert deepspeed_config(staged, Layout())["zero_optimization"]["reduce_bucket_size"] == reduce_bucket_size(
            staged
        )
    users = tmp_path / "deepspeed.json"
    users.write_text('{"zero_optimization": {"reduce_bucket_size": 1000} /* as DeepSpeed allows */}', encoding="utf-8")
    run = config(optimizer={"zero_stage": 2}, training={"deepspeed_config": str(users)})
    assert zero_settings(run) == {"reduce_bucket_size": 1000}
    assert deepspeed_config(run, Layout())["zero_optimization"]["reduce_bucket_size"] == 1000


@pytest.mark.parametrize("partitions", [1, 2, 3, 5, 64])
def test_a_partition_keeps_whole_gradients_of_the_parameters_that_deepspeed_puts_into_it(partitions: int) -> None:
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    run = config({"num_layers": 3, "freeze": ("layers.1.*",)}, optimizer={"zero_stage": 2})
    layers, sizes = held_layers(declared_layers(run)), []
    trained = [shard for layer in layers for shard in layer.shards.values() if shard.trained]
    for partition in range(partitions):
        kept = 0
        for matrices in (True, False):
            group = [
                torch.empty(shard.local_shape(1), device="meta")
                for shard in trained
                if (len(shard.shape) > 1) == matrices
            ]
            length = -(-sum(each.numel() for each in group) // partitions)
            inside, *_ = DeepSpeedZeroOptimizer.get_partition_info(None, group, length, partition)
            kept += sum(each.numel() for each in inside)
        sizes.append(kept)
    assert whole_parameters(layers, copies(run, partitions)) == max(sizes)


def test_tied_embedding_is_held_once_on_one_stage_and_on_both_ends_of_a_pipeline() -> None:
    single, piped = config(), config(parallel={"pipeline_model_parallel_size": 2})
    vocabulary = single.model.padded_vocab_size(1) * single.model.hidden_size
    (only,) = memory_by_stage(single, copies(single, 1))
    assert only.parameters == count_parameters(single)
    assert sum(stage.parameters for stage in memory_by_stage(piped, copies(piped, 1))) == only.parameters + vocabulary


def test_frozen_parameters_have_weights_alone() -> None:
    whole, frozen = (
        shared_state(run, Layout(num_batch_ranks=4), held_layers(declared_layers(run)))
        for run in (config(training={"bf16": True}), config({"freeze": ("layers.*",)}, training={"bf16": True}))
    )
    trained = sum(
        parameters_of_layer(layer, Layout()) for layer in declared_layers(config())[:-1] if layer.number is None
    )
    assert frozen.weights == whole.weights
    for part in ("gradients", "master_weights", "optimizer_states"):
        assert getattr(frozen, part) / getattr(whole, part) == pytest.approx(2 * trained / whole.weights, rel=1e-3)
