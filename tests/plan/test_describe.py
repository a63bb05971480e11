"""The text of a plan."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import pytest

from megatron.options.stored import from_dict
from megatron.plan.describe import describe
from megatron.plan.flops import count_parameters, flops_per_token
from megatron.settings.validation import check
from tests.plan.configs import BLOOM_13B, bytes_of_a_layer, config


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
    text = describe(run, nodes=48, devices_per_node=8, title="BLOOM", check=check)
    assert max(map(len, text.splitlines())) <= 80
    assert "PP 12 x TP 4 x DP 8" in text
    assert "4.1% of a step" in text


@pytest.mark.parametrize(("nodes", "copies"), [(1, 2), (2, 2 * 2), (3, 2 * 2 + 1)])
def test_copies_in_memory_are_planned_with_the_next_nodes_and_with_what_a_restart_brings(
    nodes: int, copies: int
) -> None:
    checkpoint = {"save": "s", "peer_copy_interval": 10, "no_save_optim": True}
    run = config(BLOOM_13B, parallel={"tensor_model_parallel_size": 8}, checkpoint=checkpoint)
    text = describe(run, nodes=nodes, devices_per_node=8, title="BLOOM", check=check)
    # float32 weights and AdamW's two moments, over all ranks; of three nodes one lacks the third's
    gib = copies * 12 * count_parameters(run) / nodes / 2**30
    line = re.search(r"^     host: ([\d.]+) GiB a node for copies of the state \(--peer-copy-interval\)$", text, re.M)
    assert line is not None
    assert float(line[1]) == pytest.approx(gib, rel=1e-3)


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
    model["attention_dropout"] = 0.0  # of packed documents flex_attention computes it, which keeps more
    config = from_dict({"model": model, "training": training, "sft": sft})
    text = describe(config, nodes=1, devices_per_node=2, title="a plan", check=check)
    for said in (batch, "length     3 epochs", "a step     at most 32,768 tokens"):
        assert said in text
    pretrained = from_dict({"model": model, "training": {"seq_length": row, "bf16": True}})
    assert bytes_of_a_layer(config) == bytes_of_a_layer(pretrained)


@pytest.mark.parametrize(
    ("objective", "lora", "samples", "tokens", "passes", "tflop"),
    [
        ("sigmoid", {"lora_rank": 8}, "64 pairs", 65_536, 1, 6 / 4),
        ("sigmoid", {}, "64 pairs", 65_536, 0, 1),
        ("kto", {}, "64 answers", 32_768, 1, 4 / 3),
        ("kto", {"lora_rank": 8}, "64 answers", 32_768, 3, 10 / 4),
    ],
)
def test_preferences_are_described_with_the_forward_passes_before_a_step(
    objective: str, lora: dict[str, Any], samples: str, tokens: int, passes: int, tflop: float
) -> None:
    training = {"task": "preference", "num_epochs": 1, "seq_length": 512, "global_batch_size": 64}
    model = {"architecture": "llama", "position_embedding_type": "rope", "hidden_dropout": 0.0, "hidden_size": 1024}
    sections = {"model": model, "training": training, "lora": lora}
    text = describe(
        from_dict({**sections, "preference": {"preference_loss": objective}}),
        nodes=1,
        devices_per_node=1,
        title="a plan",
        check=check,
    )
    assert f"{samples} over DP 1" in text
    assert ("forward pass" in text) == bool(passes)
    assert passes < 2 or f"with {passes} forward passes over as many tokens before it" in text
    found = re.search(rf"at most {tokens:,} tokens, ([0-9.]+) TFLOP", text)
    assert found
    own = flops_per_token(from_dict(sections)) * tokens / 1e12
    assert float(found[1]) == pytest.approx(tflop * own, rel=0.01)
    assert max(map(len, text.splitlines())) <= 80


def test_adapters_are_described_by_what_is_trained_and_of_what_the_base_consists() -> None:
    model = {"architecture": "llama", "position_embedding_type": "rope", "hidden_size": 4096, "ffn_hidden_size": 11008}
    model |= {"num_layers": 32, "num_attention_heads": 32, "vocab_size": 32000, "quantize_base": "nf4"}
    parallel = {"pipeline_model_parallel_size": 2, "pipeline_schedule": "zero-bubble"}
    training = {"bf16": True, "global_batch_size": 8}
    run = from_dict({"model": model, "lora": {"lora_rank": 16}, "parallel": parallel, "training": training})
    text = describe(run, nodes=1, devices_per_node=2, title="a plan", check=check)
    # rank 16 at 4 x (4096 + 4096) and 3 x (4096 + 11008) channels; 4 x 4096^2 and 3 x 4096 x 11008 in 4 bits
    assert f"{32 * 16 * (4 * 8192 + 3 * 15104):,} trained (0.60%)" in text
    assert f"frozen: {32 * (4 * 4096**2 + 3 * 4096 * 11008):,} in 4 bits, 131,338,240 in bf16" in text
    assert "11.1% of a step: (p - 1) / (m + p - 1)" in text, (
        "nothing is deferred, so the stages wait as long as with 1f1b"
    )
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize(("zero", "sums"), [(1, 1), (3, 4)])
def test_replicas_hold_a_share_of_a_node_and_send_it(zero: int, sums: int) -> None:
    training = {"bf16": True, "seq_length": 2048, "global_batch_size": 64}
    run = config(BLOOM_13B, training=training, optimizer={"zero_stage": zero}, parallel={"num_replicas": 2})
    text = describe(run, nodes=2, devices_per_node=8, title="a plan", check=check)
    assert "2 replicas, each over 8 ranks within a node" in text
    assert "2 replicas, each over 8 ranks across nodes" in describe(
        run, nodes=4, devices_per_node=4, title="a plan", check=check
    )
    share = count_parameters(run) / 8 / 2**30
    # a float32 master weight and two moments of each; in a ring of two a rank sends as much as it has
    assert f"{4 * share:.2f}   {8 * share:.2f}" in text
    assert f"{sums * 4 * share:.2f} GiB of gradients that a rank sends to other replicas" in text


@pytest.mark.parametrize("tensor_size", [1, 2])
def test_one_tensor_parallel_rank_has_no_sequence_parallelism(tensor_size: int) -> None:
    run = config(parallel={"tensor_model_parallel_size": tensor_size, "sequence_parallel": True})
    text = describe(run, nodes=1, devices_per_node=2, title="a plan", check=check)
    assert ("sequence parallel" in text) == (tensor_size > 1)


@pytest.mark.parametrize("graphs", ["none", "local"])
def test_a_plan_says_that_it_counts_no_graphs(graphs: str) -> None:
    run = config(training={"cuda_graph_impl": graphs}, parallel={"device": "cuda"})
    text = describe(run, nodes=1, devices_per_node=1, title="a plan", check=check)
    assert ("CUDA graphs, whose memory and time are not counted" in text) == (graphs == "local")
    assert max(map(len, text.splitlines())) <= 80


def test_a_plan_imports_neither_torch_nor_deepspeed() -> None:
    code = "import sys, megatron.plan.describe; print(sorted({'torch', 'deepspeed', 'numpy'} & set(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "[]\n"
