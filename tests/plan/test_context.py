"""Ranks that share rows of tokens in a plan: what each holds, sends and computes, and the longest row that fits."""

from __future__ import annotations

import dataclasses
import math
import re
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.cli.plan import main
from megatron.options.config import Config
from megatron.parallel.costs import Attention
from megatron.parallel.layout import Layout
from megatron.plan.context_exchange import attention_core, sent_by_layers
from megatron.plan.fit import Capacity, largest_rank, longest_sequence
from megatron.plan.flops import declared_layers
from megatron.plan.memory import memory_by_stage
from megatron.plan.microbatch import MicrobatchSizes
from megatron.plan.pipeline import stage_work
from megatron.runtime.devices import GIB
from tests.plan.configs import BLOOM_13B, LLAMA_8B, bytes_of_a_layer, config

TOKENS = 131_072


def llama(size: int, recompute: str = "none", **parallel: Any) -> Config:
    training = {"bf16": True, "seq_length": TOKENS, "global_batch_size": 8, "recompute_granularity": recompute}
    parallel = {"device": "cuda", "context_parallel_size": size, **parallel}
    return config(LLAMA_8B, training=training, parallel=parallel)


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_ranks_of_a_ring_keep_their_share_of_a_layer_and_no_more(size: int, recompute: str) -> None:
    alone, shared = llama(1, recompute), llama(size, recompute, context_parallel_exchange="ring")
    assert bytes_of_a_layer(shared) == bytes_of_a_layer(alone) / size
    # activations, logits and the gradients of both; the angles of whole rows are 64 MiB
    (whole,), (part,) = (memory_by_stage(run, Layout.of(run.parallel, 8)) for run in (alone, shared))
    angles = TOKENS * 128 * 4
    assert part.memory.activations - angles == pytest.approx((whole.memory.activations - angles) / size, rel=0.05)


@pytest.mark.parametrize("size", [2, 4, 8, 16])
def test_an_exchange_of_heads_keeps_what_came_and_its_own_output_beside(size: int) -> None:
    run = llama(size, context_parallel_exchange="all-to-all")
    sizes, attention = MicrobatchSizes(run), Attention(32, 8, 128)
    # q, k and v as they came, with as many key/value heads as ranks; both outputs, and the sums of the softmax
    channels = 4096 + 2 * math.lcm(8, size) * 128 + 2 * 4096
    assert attention_core(attention, sizes).kept_bytes(is_read=True) == TOKENS // size * (2 * channels + 4 * 32)
    # in place of the fused projection, rotated q and k, and the output
    replaced = TOKENS // size * 2 * (channels - (4096 + 2 * 1024 + 4096 + 1024 + 4096))
    assert bytes_of_a_layer(run) - bytes_of_a_layer(llama(1)) / size == replaced


def test_zero_shards_over_the_ranks_that_share_rows_too() -> None:
    optimizer = {"zero_stage": 2}
    plans = [
        memory_by_stage(run, Layout.of(run.parallel, 8))[0].memory
        for run in (
            dataclasses.replace(llama(size), optimizer=config(optimizer=optimizer).optimizer) for size in (1, 8)
        )
    ]
    for part in ("weights", "gradients", "master_weights", "optimizer_states"):
        assert getattr(plans[0], part) == getattr(plans[1], part)


@pytest.mark.parametrize(("recompute", "ring", "heads"), [("none", 3, 2), ("full", 4, 3), ("selective", 4, 3)])
def test_what_a_rank_sends_is_counted_by_passes(recompute: str, ring: int, heads: int) -> None:
    run = llama(4, recompute)
    sent = list(sent_by_layers(declared_layers(run), MicrobatchSizes(run)))
    assert len(sent) == 32
    own = TOKENS // 4
    # three quarters of the keys and values to each other rank; of q, k, v and the output all but a quarter
    of_pass = {"ring": own * 3 * 3 / 4 * 2 * 1024 * 2, "all-to-all": own * 3 / 4 * (2 * 4096 + 2 * 1024) * 2}
    passes = {"ring": ring, "all-to-all": heads}
    assert sent[0].by_exchange == {name: of_pass[name] * passes[name] for name in of_pass}
    assert sent[0].size_bytes == min(sent[0].by_exchange.values())
    odd = llama(16, tensor_model_parallel_size=4)
    assert list(next(sent_by_layers(declared_layers(odd), MicrobatchSizes(odd))).by_exchange) == ["ring"]


@given(
    size=st.sampled_from((1, 2, 3, 4, 8)),
    stretch=st.integers(1, 40),
    window=st.none() | st.integers(1, 200),
)
def test_the_work_of_a_rank_is_that_of_its_places(size: int, stretch: int, window: int | None) -> None:
    length, attention = 2 * size * stretch, Attention(4, 2, 16, window)
    triangle = length * (length + 1) // 2
    for rank in range(size):
        places = Layout(context_size=size, rank=rank).places(length)
        seen = sum(min(place + 1, window or length) for part in places for place in part)
        exact = Fraction(seen * length**2, triangle * sum(map(len, places)))
        assert attention.flops_per_token(length, places) / (4 * 4 * 16) == pytest.approx(float(exact), abs=0.51)
        if window is None:
            assert attention.flops_per_token(length, places) == attention.flops_per_token(length)


def test_under_a_window_the_first_places_are_less_work() -> None:
    run = config(
        LLAMA_8B | {"attention_window": 2048},
        training={"seq_length": 8192},
        parallel={"context_parallel_size": 2},
    )
    of_ranks = [stage_work(run, Layout(context_size=2, rank=rank).places(8192))[0] for rank in range(2)]
    assert of_ranks[0] < stage_work(run)[0] < of_ranks[1]
    assert of_ranks[1][0] / of_ranks[0][0] < 1.1


def fits(run: Config, num_devices: int, room: Capacity, length: int) -> bool:
    longer = dataclasses.replace(run, training=dataclasses.replace(run.training, seq_length=length))
    return room.is_enough_for(largest_rank(longer, num_devices))


@pytest.mark.parametrize(
    ("run", "num_devices", "gib"),
    [
        (llama(8), 8, 200),
        (llama(1), 8, 94.6),
        (llama(2, tensor_model_parallel_size=4, sequence_parallel=True), 8, 79.2),
        (llama(2, pipeline_model_parallel_size=4), 8, 79.2),
        # its scores are kept, so that memory grows by the square
        (
            config(
                {**BLOOM_13B, "attention_backend": "sdpa", "position_embedding_type": "alibi"},
                training={"bf16": True},
                parallel={"device": "hpu", "tensor_model_parallel_size": 8},
            ),
            8,
            94.6,
        ),
    ],
)
def test_the_longest_sequence_fits_and_the_next_does_not(run: Config, num_devices: int, gib: float) -> None:
    room = Capacity("device", int(gib * GIB))
    length, unit = longest_sequence(run, num_devices, room)
    assert length > 0
    assert length % unit == 0
    assert fits(run, num_devices, room, length)
    assert not fits(run, num_devices, room, length + unit)


def test_no_sequence_is_longer_than_learned_positions_or_fits_without_room() -> None:
    learned = config({"position_embedding_type": "learned", "max_position_embeddings": 1500})
    assert longest_sequence(learned, 1, Capacity("device", 90 * GIB)) == (1024, 1024)
    assert longest_sequence(llama(1), 8, Capacity("device", GIB)) == (0, 1024)


def plan(capsys: pytest.CaptureFixture[str], flags: str) -> str:
    assert main(flags.split()) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    return text


RUN = f"--config llama31_8b --num-devices 8 --seq-length {TOKENS} --global-batch-size 8 --device-memory"


@pytest.mark.parametrize("device", ["gaudi2", "gaudi3", "h100"])
def test_llama_8b_trains_on_131072_tokens_on_a_node(capsys: pytest.CaptureFixture[str], device: str) -> None:
    """Each layout that is proposed fits by its own plan; one of them has ranks that share rows."""
    text = plan(capsys, f"{RUN} {device}")
    assert "does not fit" in text
    proposed = [re.sub(r"\s+", " ", part) for part in re.split(r"\n +[0-9.]+ GiB  ", text)[1:]]
    assert len(proposed) == 4
    assert any("--context-parallel-size" in flags for flags in proposed)
    for flags in proposed:
        own = plan(capsys, f"{RUN} {device} {flags}")
        assert "  fits: " in own
        longest = re.search(r"  longest sequence: ([0-9,]+) tokens", own)
        assert longest
        assert int(longest[1].replace(",", "")) >= TOKENS


def test_the_plan_says_what_ranks_that_share_rows_send(capsys: pytest.CaptureFixture[str]) -> None:
    text = plan(capsys, f"{RUN} gaudi2 --context-parallel-size 4 --tensor-model-parallel-size 2 --zero-stage 2")
    assert "  layout     PP 1 x TP 2 x CP 4 x DP 1" in text
    assert "  context    all-to-all: sends 0.47 GiB a layer and microbatch, 120.00 a step" in text
    assert "             ring would send 0.42 GiB a layer and microbatch, 108.00 a step" in text
    text = plan(capsys, f"{RUN} gaudi2 --context-parallel-size 8 --tensor-model-parallel-size 8 --num-devices 64")
    assert "             all-to-all: CP 8 does not divide the heads of a rank" in text
    assert "CP" not in plan(capsys, "--config llama31_8b --num-devices 8 --device-memory gaudi2")
