"""Ranks that share rows of tokens train as one process does that has the whole rows."""

from __future__ import annotations

import functools
import itertools
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import RankPools
from tests.training import layouts
from tests.training.test_checkpoints import assert_same_state, newest

SLOW = pytest.mark.slow
STEPS = 2
CP2, CP4 = "--context-parallel-size 2", "--context-parallel-size 4"
TP2, PP2, SP = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2", "--sequence-parallel"
EP2, FULL = "--expert-model-parallel-size 2", "--recompute-granularity full"
CORE = "--recompute-granularity selective"
PACKED = f"--eod-token-id {layouts.EOD} --reset-position-ids --reset-attention-mask --eod-mask-loss"
WINDOW = "--architecture mistral --position-embedding-type rope --num-query-groups 2 --attention-window 7"
EXPERTS = (
    "--architecture llama --position-embedding-type rope --num-layers 2 --ffn-hidden-size 48 --num-experts 4 "
    "--moe-router-topk 2 --moe-aux-loss-coeff 0.1 --moe-z-loss-coeff 0.01"
)
MODELS = {
    "llama": layouts.MODELS["llama_gqa"],
    "llama packed": f"{layouts.MODELS['llama_gqa_tied']} {PACKED}",
    "bloom": layouts.MODELS["bloom_alibi"],
    "bloom packed": f"{layouts.MODELS['bloom_alibi']} {PACKED}",
    "learned packed": f"{layouts.MODELS['bloom_learned']} {PACKED}",
    "mistral": WINDOW,
    "mistral packed": f"{WINDOW} {PACKED}",
    "experts": f"{EXPERTS} {PACKED}",
    "experts capacity": f"{EXPERTS} --moe-expert-capacity-factor 0.75",
    "llama lora": f"{layouts.MODELS['llama_gqa']} --lora-rank 4 --lora-target-modules all-linear",
}
LAYOUTS = {
    "CP2": (2, CP2),
    "CP2 core recomputed": (2, f"{CP2} {CORE}"),
    "CP4 recomputed": (4, f"{CP4} {FULL}"),
    "CP2 DP2 ZeRO-1": (4, f"{CP2} --zero-stage 1"),
    "CP2 ZeRO-1": (2, f"{CP2} --zero-stage 1"),
    "CP2 ZeRO-3": (2, f"{CP2} --zero-stage 3"),
    "CP2 TP2": (4, f"{CP2} {TP2}"),
    "CP2 TP2 SP ZeRO-1": (4, f"{CP2} {TP2} {SP} --zero-stage 1"),
    "CP2 PP2 recomputed": (4, f"{CP2} {PP2} {FULL}"),
    "CP2 PP2 ZeRO-1": (4, f"{CP2} {PP2} --zero-stage 1"),
    "CP2 EP2": (2, f"{CP2} {EP2}"),
    "CP2 EP2 DP2 ZeRO-1": (4, f"{CP2} {EP2} --zero-stage 1"),
    "CP2 EP2 PP2": (4, f"{CP2} {EP2} {PP2}"),
    "CP2 TP2 SP EP4": (4, f"{CP2} {TP2} {SP} --expert-model-parallel-size 4 --expert-tensor-parallel-size 1"),
}
EXCHANGES = ["ring", "all-to-all"]
QUICK = {
    ("llama", "CP2"): "ring",
    ("llama packed", "CP2 TP2 SP ZeRO-1"): "all-to-all",
    ("bloom packed", "CP4 recomputed"): "ring",
    ("mistral packed", "CP2 PP2 ZeRO-1"): "ring",
    ("learned packed", "CP2 DP2 ZeRO-1"): "all-to-all",
    ("experts", "CP2 EP2"): "ring",
    ("experts capacity", "CP2 TP2 SP EP4"): "all-to-all",
    ("llama lora", "CP2 core recomputed"): "all-to-all",
}
"""Cases of CI."""


def cases() -> list[Any]:
    """Every model on every layout by both exchanges, and those that are not slow."""
    found = []
    for model, layout, exchange in itertools.product(MODELS, LAYOUTS, EXCHANGES):
        if "EP" in layout and "experts" not in model:
            continue
        is_quick = QUICK.get((model, layout)) == exchange
        found.append(pytest.param(model, layout, exchange, marks=() if is_quick else SLOW))
    return found


@pytest.fixture(scope="module")
def alone(ranks: RankPools, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What one process computes of a model, and the folder of its first update."""

    @functools.cache
    def run(model: str) -> tuple[dict[str, Any], Path]:
        folder = tmp_path_factory.mktemp("alone")
        flags = f"{MODELS[model]} --micro-batch-size 4"
        return ranks(1)(layouts.train, flags, STEPS, first=str(folder))[0], folder

    return run


def assert_same_gradients(folder: Path, expected: Path) -> None:
    """Compare the first moments after one step, a tenth of each gradient."""
    one, other = newest(folder), newest(expected)
    assert one.parameters == other.parameters
    compared = 0
    for name in other.parameters:
        if "exp_avg" not in other.kinds_of(name):
            continue
        found, gradient = one.read_full(name, "exp_avg"), other.read_full(name, "exp_avg")
        assert float((found - gradient).abs().max()) <= 1e-6 * float(gradient.abs().max()), name
        compared += 1
    assert compared


@pytest.mark.parametrize(("model", "layout", "exchange"), cases())
def test_every_layout_trains_as_one_process(
    ranks: RankPools, alone: Any, tmp_path: Path, model: str, layout: str, exchange: str
) -> None:
    expected, folder = alone(model)
    world_size, flags = LAYOUTS[layout]
    # routers are balanced within a microbatch of all ranks
    micro_batch_size = 2 if "DP2" in layout else 4
    flags = f"{MODELS[model]} {flags} --context-parallel-exchange {exchange} --micro-batch-size {micro_batch_size}"
    for found in ranks(world_size)(layouts.train, flags, STEPS, first=str(tmp_path)):
        for name in ("losses", "norms", "validation"):
            assert found[name] == pytest.approx(expected[name], rel=1e-6), name
    assert_same_gradients(tmp_path, folder)


CHAIN = [
    (4, f"{CP2} {TP2} {SP} --zero-stage 1"),
    (1, ""),
    (4, f"{CP4} --zero-stage 1"),
    (4, f"{CP2} {PP2}"),
    (2, "--zero-stage 3"),
    (2, f"{CP2} --zero-stage 3"),
    (4, f"{PP2} {TP2}"),
    (2, CP2),
]


def test_a_checkpoint_resumes_on_every_other_layout(ranks: RankPools, tmp_path: Path) -> None:
    """From layout to layout: the state is bit for bit the same, and the next loss."""
    model = MODELS["llama packed"]
    (world_size, flags), *others = CHAIN
    expected = ranks(world_size)(layouts.train_then_save, f"{model} {flags}", STEPS, str(tmp_path / "0"))[0]
    for number, (world_size, flags) in enumerate(others, 1):
        before, after = tmp_path / str(number - 1), tmp_path / str(number)
        losses = ranks(world_size)(layouts.resume_then_save, f"{model} {flags}", str(before), str(after))
        assert losses[0] == pytest.approx(expected, rel=1e-6)
        assert_same_state(newest(before), newest(after))


@pytest.mark.parametrize(
    ("flags", "exchange"),
    [
        (f"{CP2} --hidden-dropout 0.1 --attention-dropout 0.1 --zero-stage 1", "all-to-all"),
        (f"{CP2} --hidden-dropout 0.1 --bf16", "ring"),
    ],
)
def test_a_resumed_run_repeats_the_losses_bit_for_bit(
    ranks: RankPools, tmp_path: Path, flags: str, exchange: str
) -> None:
    flags = f"{MODELS['bloom packed']} {flags} --context-parallel-exchange {exchange}"
    whole, resumed = ranks(2)(layouts.train_interrupted, flags, 2, 4, str(tmp_path))[0]
    assert whole[2:] == resumed
    # and run after run
    again, _ = ranks(2)(layouts.train_interrupted, flags, 2, 4, str(tmp_path / "again"))[0]
    assert again == whole
