"""A mixture of experts on every layout, against one process."""

from __future__ import annotations

import dataclasses
import functools
import math
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from megatron.models import experts
from megatron.parallel.operators.products import grouped_linear
from megatron.runtime.device_cpu import CPU
from tests.ranks import RankPools
from tests.tasks import chats, pairs
from tests.training import layouts
from tests.training.test_checkpoints import assert_same_state, newest

FLAGS = (
    "--architecture llama --position-embedding-type rope --untie-embeddings-and-output-weights --num-layers 2 "
    "--ffn-hidden-size 48 --num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 0.1 --moe-z-loss-coeff 0.01"
)
STEPS = 2
TP2, PP2, SP = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2", "--sequence-parallel"
EP2, EP4, ETP1 = "--expert-model-parallel-size 2", "--expert-model-parallel-size 4", "--expert-tensor-parallel-size 1"


@pytest.fixture(scope="module")
def alone(ranks: RankPools) -> Any:
    return functools.cache(lambda flags="": ranks(1)(layouts.train, f"{FLAGS} {flags}", STEPS)[0])


EXPERT_LAYOUTS = [
    (2, EP2, 2),
    (2, f"{EP2} --zero-stage 1", 2),
    (4, f"{EP4} --zero-stage 1", 1),
    (4, EP2, 1),
    (4, f"{EP2} --zero-stage 1", 1),
    (2, TP2, 4),
    (2, f"{TP2} {ETP1}", 4),
    (2, f"{TP2} {SP} {ETP1}", 4),
    (2, f"{TP2} {SP} {EP2} {ETP1}", 4),
    (2, f"{TP2} {EP2} {ETP1} --zero-stage 1", 4),
    (4, f"{TP2} {SP} {EP2}", 2),
    (4, f"{TP2} {EP4} {ETP1}", 2),
    (4, f"{PP2} {EP2} --recompute-granularity full", 2),
    (4, f"{PP2} {EP2} --zero-stage 1", 2),
    (2, "--zero-stage 3", 2),
]
CAPACITIES = ["", "--moe-expert-capacity-factor 0.75"]


@pytest.mark.parametrize(
    ("ranks_needed", "flags", "micro_batch_size", "capacity"),
    [
        # each layout with a capacity or without, in turn; -m slow: with both
        pytest.param(*layout, capacity, marks=() if (place + number) % 2 == 0 else pytest.mark.slow)
        for place, layout in enumerate(EXPERT_LAYOUTS)
        for number, capacity in enumerate(CAPACITIES)
    ],
)
def test_every_layout_trains_as_one_process(
    ranks: RankPools, alone: Any, ranks_needed: int, flags: str, micro_batch_size: int, capacity: str
) -> None:
    expected = alone(f"--micro-batch-size 4 {capacity}")
    for found in ranks(ranks_needed)(
        layouts.train, f"{FLAGS} --micro-batch-size {micro_batch_size} {flags} {capacity}", STEPS
    ):
        for name in ("losses", "norms", "validation"):
            assert found[name] == pytest.approx(expected[name], rel=1e-6), name


def validation(arguments: str) -> dict[str, float]:
    engine, task = layouts.build(arguments)
    evaluated = engine.evaluate(layouts.step_batches(engine, task, 0), layouts.num_microbatches(engine))
    return engine.read_metrics(evaluated.metrics)


def test_a_validation_has_the_routers_terms(ranks: RankPools) -> None:
    expected = ranks(1)(validation, f"{FLAGS} --micro-batch-size 4")[0]
    assert 1.0 <= expected["load_balancing_loss"] < 4.0
    assert expected["router_z_loss"] == pytest.approx(math.log(4) ** 2, rel=0.2)  # logits that are almost zero
    for found in ranks(2)(validation, f"{FLAGS} {EP2} --micro-batch-size 2"):
        assert found == pytest.approx(expected, rel=1e-6)


CHAIN = [
    (4, f"{EP4} --zero-stage 1 --micro-batch-size 1"),
    (1, "--micro-batch-size 4"),
    (4, f"{TP2} {SP} {EP4} {ETP1} --micro-batch-size 2"),
    (4, f"{PP2} {EP2} --micro-batch-size 2"),
    (2, f"{TP2} {EP2} {ETP1} --micro-batch-size 4"),
]


def test_a_checkpoint_resumes_on_every_other_layout(ranks: RankPools, tmp_path: Path) -> None:
    """From layout to layout: the state is bit for bit the same, and the next loss."""
    (world_size, flags), *others = CHAIN
    expected = ranks(world_size)(layouts.train_then_save, f"{FLAGS} {flags}", STEPS, str(tmp_path / "0"))[0]
    for number, (world_size, flags) in enumerate(others, 1):
        before, after = tmp_path / str(number - 1), tmp_path / str(number)
        losses = ranks(world_size)(layouts.resume_then_save, f"{FLAGS} {flags}", str(before), str(after))
        assert losses[0] == pytest.approx(expected, rel=1e-6)
        assert_same_state(newest(before), newest(after))
    names = {f"layers.1.mlp.experts.{number}.down.weight" for number in range(4)}
    assert names < set(newest(tmp_path / "0").parameters)


@pytest.mark.parametrize(
    "flags",
    [f"{TP2} {SP} {EP2} {ETP1}", f"{EP2} --bf16", pytest.param(f"{EP2} --zero-stage 1", marks=pytest.mark.slow)],
)
def test_a_resumed_run_repeats_the_losses_bit_for_bit(ranks: RankPools, tmp_path: Path, flags: str) -> None:
    flags = f"{FLAGS} {flags} --hidden-dropout 0.1 --attention-dropout 0.1"
    whole, resumed = ranks(2)(layouts.train_interrupted, flags, 2, 4, str(tmp_path))[0]
    assert whole[2:] == resumed


@pytest.mark.parametrize(
    ("ranks_needed", "flags", "quantised"),
    [
        (2, f"{EP2} --micro-batch-size 2", False),
        (2, f"{TP2} {SP} --micro-batch-size 4", True),
        (4, f"{TP2} {EP4} {ETP1} --micro-batch-size 2", False),
        pytest.param(2, f"{EP2} --micro-batch-size 2", True, marks=pytest.mark.slow),
        pytest.param(2, f"{TP2} {SP} --micro-batch-size 4", False, marks=pytest.mark.slow),
        pytest.param(4, f"{TP2} {EP4} {ETP1} --micro-batch-size 2", True, marks=pytest.mark.slow),
    ],
)
def test_adapters_of_experts_train_on_every_layout(
    ranks: RankPools, alone: Any, ranks_needed: int, flags: str, quantised: bool
) -> None:
    lora = "--lora-rank 4 --lora-target-modules all-linear" + " --quantize-base nf4 --hidden-size 128" * quantised
    lora += " --ffn-hidden-size 128" * quantised
    expected = alone(f"--micro-batch-size 4 {lora}")
    assert expected["losses"][-1] != expected["losses"][0]
    for found in ranks(ranks_needed)(layouts.train, f"{FLAGS} {flags} {lora}", STEPS):
        for name in ("losses", "norms", "validation"):
            assert found[name] == pytest.approx(expected[name], rel=1e-6), name


def test_a_frozen_expert_on_one_rank_hangs_no_other(ranks: RankPools, alone: Any) -> None:
    """The first layer's input needs no gradient, and rank 0's experts have none: rank 1's still send theirs back."""
    frozen = "--freeze embedding.* layers.0.attention* layers.0.mlp_norm* layers.0.mlp.router.*"
    frozen += " layers.0.mlp.experts.[01].*"
    flags = f"--moe-aux-loss-coeff 0 --moe-z-loss-coeff 0 {frozen}"
    expected = alone(f"--micro-batch-size 4 {flags}")
    for found in ranks(2)(layouts.train, f"{FLAGS} {EP2} {flags}", STEPS):
        assert found["norms"] == pytest.approx(expected["norms"], rel=1e-6)


TASK_STEPS = 3
"""Losses alone are compared: the last one sees two updates."""
TASK_LAYOUTS = [(2, f"{EP2} --zero-stage 1"), (4, f"{PP2} {EP2}"), (4, f"{TP2} {SP} {EP4} {ETP1}")]


@pytest.mark.parametrize(
    ("ranks_needed", "flags"),
    [*TASK_LAYOUTS[:1], *(pytest.param(*case, marks=pytest.mark.slow) for case in TASK_LAYOUTS[1:])],
)
def test_packed_chats_train_as_on_one_process(ranks: RankPools, tmp_path: Path, ranks_needed: int, flags: str) -> None:
    """Without the balancing loss, which is of a microbatch: data-parallel ranks pack chats into other ones."""
    data = chats.write_chats(tmp_path / "chats", chats.some_lengths(40, 32))
    common = f"{FLAGS} --moe-aux-loss-coeff 0 --data-path {data} --split 1,0,0 --max-batch-len 64"
    (expected,) = ranks(1)(chats.losses, common, TASK_STEPS)
    for found in ranks(ranks_needed)(chats.losses, f"{common} {flags}", TASK_STEPS):
        assert found == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("ranks_needed", "flags"),
    [*(pytest.param(*case, marks=pytest.mark.slow) for case in TASK_LAYOUTS[:2]), TASK_LAYOUTS[2]],
)
def test_preferences_train_as_on_one_process(ranks: RankPools, tmp_path: Path, ranks_needed: int, flags: str) -> None:
    data = pairs.write_pairs(tmp_path / "pairs", pairs.some_pairs(24, 14))
    common = f"{FLAGS} --moe-aux-loss-coeff 0 --data-path {data}"
    (expected,) = ranks(1)(pairs.train, common, TASK_STEPS)
    for found in ranks(ranks_needed)(pairs.train, f"{common} {flags}", TASK_STEPS):
        # not the accuracies: in the first step rewards are zero but for rounding
        for name in ("loss", "logps/chosen", "logps/rejected"):
            assert [row[name] for row in found] == pytest.approx([row[name] for row in expected], rel=1e-6), name


@pytest.mark.parametrize(
    ("ranks_needed", "flags"),
    [(1, "--recompute-granularity selective --recompute-modules mlp_act"), (2, f"{EP2} --micro-batch-size 2 --bf16")],
)
def test_products_of_all_experts_in_one_call_train_as_one_by_one(
    ranks: RankPools, ranks_needed: int, flags: str
) -> None:
    """As on CUDA; torch has the operator for the CPU too."""
    one_by_one = ranks(ranks_needed)(layouts.train, f"{FLAGS} {flags}", STEPS)
    grouped = ranks(ranks_needed)(train_grouped, f"{FLAGS} {flags}", STEPS)
    rel = 2e-2 if "bf16" in flags else 1e-6
    for found, expected in zip(grouped, one_by_one, strict=True):
        assert found["losses"] == pytest.approx(expected["losses"], rel=rel)
        assert found["norms"] == pytest.approx(expected["norms"], rel=rel)


def train_grouped(arguments: str, steps: int) -> dict[str, Any]:
    calls = []

    def counted(*given: Any) -> Any:
        calls.append(given)
        return grouped_linear(*given)

    grouping = dataclasses.replace(CPU, groups_products=True)
    with patch.object(experts, "device_of", lambda _: grouping), patch.object(experts, "grouped_linear", counted):
        found = layouts.train(arguments, steps)
    assert calls
    return found
