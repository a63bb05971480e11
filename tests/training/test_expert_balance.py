"""Balance of experts by a bias, and jitter of the routers' input, on every layout."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpoint.reader import newest_checkpoint
from megatron.checkpoint.source import Slice
from megatron.models.experts import TokenRouter
from megatron.observability.expert_loads import LoadWatch
from megatron.parallel.shards import named_parameters
from tests.ranks import RankPools
from tests.training import layouts
from tests.training.test_experts import EP2, ETP1, FLAGS, PP2, SP, TP2

RATE, STEPS = 0.01, 3
BIAS = f"--moe-router-enable-expert-bias --moe-router-bias-update-rate {RATE}"


def balanced(flags: str) -> dict[str, Any]:
    """Losses, and the biases of this rank's layers after each step beside the loads of the global batch."""
    engine, task = layouts.build(f"{FLAGS} {flags}")
    watch = LoadWatch(engine.config, engine.ctx)
    found: dict[str, Any] = {"losses": [], "biases": [], "loads": []}

    def step(number: int) -> Any:
        return {
            "microbatches": layouts.step_batches(engine, task, number),
            "num_microbatches": layouts.num_microbatches(engine),
            "consumed_samples": 8 * number,
        }

    for number in range(STEPS):
        engine.run_without_update(**step(7))  # its loads are others, and move nothing
        result = engine.train_step(**step(number), lr=1e-3)
        watch.add(result.loads)
        record = watch.record()
        assert record is not None
        found["losses"].append(result.loss)
        found["loads"].append(record["tokens"])
        parameters = {name: p for name, p in named_parameters(engine.module) if name.endswith("router.bias")}
        assert all(p.dtype == torch.float32 and not p.requires_grad for p in parameters.values())
        found["biases"].append({name.split(".")[1]: p.tolist() for name, p in parameters.items()})
    return found


@pytest.fixture(scope="module")
def alone(ranks: RankPools) -> Any:
    return functools.cache(lambda flags="": ranks(1)(balanced, f"{BIAS} --micro-batch-size 4 {flags}")[0])


@pytest.mark.parametrize("flags", ["", "--moe-router-score-function sigmoid", "--bf16"])
def test_a_bias_moves_against_the_load_of_the_global_batch(alone: Any, flags: str) -> None:
    found = alone(flags)
    expected = {layer: torch.zeros(4) for layer in "01"}
    for loads, biases in zip(found["loads"], found["biases"], strict=True):
        for layer, counts in loads.items():
            mean = sum(counts) / 4
            expected[layer] += RATE * torch.tensor([float(mean > load) - float(mean < load) for load in counts])
            # in 16 bits the third move would be rounded
            assert biases[layer] == pytest.approx(expected[layer].tolist(), abs=1e-7)


@pytest.mark.parametrize(
    ("num_ranks", "flags", "size"),
    [
        pytest.param(2, f"{EP2} --zero-stage 1", 2, marks=pytest.mark.slow),
        (2, f"{TP2} {SP} {EP2} {ETP1}", 4),
        (4, f"{PP2} {EP2} --recompute-granularity full", 2),
    ],
)
def test_biases_are_equal_on_every_layout(ranks: RankPools, alone: Any, num_ranks: int, flags: str, size: int) -> None:
    expected, layers = alone(), set[str]()
    for found in ranks(num_ranks)(balanced, f"{BIAS} --micro-batch-size {size} {flags}"):
        assert found["losses"] == pytest.approx(expected["losses"], rel=1e-6)
        for own, theirs in zip(found["biases"], expected["biases"], strict=True):
            assert all(theirs[layer] == bias for layer, bias in own.items())
            layers |= own.keys()
    assert layers == {"0", "1"}


@pytest.mark.parametrize(("num_ranks", "flags"), [(1, "--bf16"), (2, f"{EP2} --bf16 --zero-stage 1")])
def test_a_run_with_bias_and_jitter_resumes_bit_for_bit(
    ranks: RankPools, tmp_path: Path, num_ranks: int, flags: str
) -> None:
    flags = f"{FLAGS} {BIAS} --moe-input-jitter-eps 0.1 {flags}"
    for whole, resumed in ranks(num_ranks)(layouts.train_interrupted, flags, 3, 5, str(tmp_path)):
        assert whole[3:] == resumed
    checkpoint = newest_checkpoint(tmp_path)
    assert checkpoint is not None
    name = "layers.1.mlp.router.bias"
    bias = checkpoint.read(Slice(name, checkpoint.parameters[name], 0, 4))
    assert checkpoint.dtypes[name] == "float32"
    # after three moves none is back where it began
    assert (bias / RATE).abs().round().tolist() != [0, 0, 0, 0]


def test_the_bias_chooses_and_weighs_nothing() -> None:
    router: Any = TokenRouter.__new__(TokenRouter)
    torch.nn.Module.__init__(router)
    router.topk, router.scaling, router.is_sigmoid, router.keeps_scores, router.jitter = 1, 1.0, True, True, 0.0
    router.num_groups = None
    router.weight = torch.nn.Parameter(torch.tensor([[1.0], [0.0], [-1.0]]))
    router.bias = torch.nn.Parameter(torch.tensor([0.0, 0.4, 0.0]), requires_grad=False)
    routing = router(torch.ones(1, 1, 1), in_training=True)
    assert routing.experts_SBK.item() == 1  # 0.731 < 0.5 + 0.4
    assert routing.weights_SBK.item() == 0.5


JITTER = "--moe-input-jitter-eps 0.2 --micro-batch-size 4"


def test_jitter_is_alike_on_tensor_parallel_ranks_and_in_recomputation(ranks: RankPools) -> None:
    plain = ranks(1)(layouts.train, f"{FLAGS} --micro-batch-size 4", 2)[0]
    expected = ranks(1)(layouts.train, f"{FLAGS} {JITTER}", 2)[0]
    assert expected["losses"][0] != plain["losses"][0]
    assert expected["losses"][0] == pytest.approx(plain["losses"][0], rel=0.05)
    for num_ranks, flags in [(1, "--recompute-granularity full"), (2, TP2), (2, f"{TP2} {ETP1}")]:
        for found in ranks(num_ranks)(layouts.train, f"{FLAGS} {JITTER} {flags}", 2):
            for name in ("losses", "norms"):
                assert found[name] == pytest.approx(expected[name], rel=1e-6), (flags, name)


def test_jitter_of_a_shared_sequence_is_drawn_by_each_rank(ranks: RankPools) -> None:
    """Ranks that hold other tokens draw other factors, and the losses stay near."""
    plain = ranks(1)(layouts.train, f"{FLAGS} --micro-batch-size 4", 1)[0]
    first, second = ranks(2)(layouts.train, f"{FLAGS} {JITTER} {TP2} {SP}", 1)
    assert first == second
    assert first["losses"] != plain["losses"]
