"""Models whose products run in emulated fp8: recomputed, with adapters, experts, 4 bits, and on tensor-parallel ranks.

The rest of each model is in float32, so that what differs by more than its last bits is fp8.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from megatron.parallel.linear import ParallelLinear
from megatron.parallel.operators.fp8_linear import ScaledMethod
from megatron.weights.huggingface import parameters_of
from tests.models import outputs
from tests.models.outputs import Outputs
from tests.ranks import RankPools

LLAMA = (
    "--architecture llama --position-embedding-type rope --num-query-groups 2 --ffn-hidden-size 96 "
    "--init-method-std 0.1 --bf16"
)
EXPERTS = (
    "--architecture mixtral --position-embedding-type rope --num-query-groups 2 --ffn-hidden-size 96 "
    "--init-method-std 0.1 --bf16 --num-experts 4 --moe-router-topk 2"
)
TENSORWISE = "--fp8-format hybrid --fp8-emulate"
ROWWISE = "--fp8-format e4m3 --fp8-recipe rowwise --fp8-emulate"


def run(arguments: str, ranks: RankPools | None = None) -> list[Outputs]:
    tokens = np.random.default_rng(0).integers(0, 123, (2, 25))
    given = (arguments, None, np.ascontiguousarray(tokens[:, :-1]), np.ascontiguousarray(tokens[:, 1:]))
    return [outputs.run(*given)] if ranks is None else ranks(2)(outputs.run, *given)


def full_name(parameter: Any) -> str:
    return parameter.full_name  # type: ignore[no-any-return]


def differs(one: Outputs, other: Outputs) -> float:
    """The largest difference of any gradient, over the largest number of that gradient."""
    names = [name for name in one.gradients if np.abs(one.gradients[name]).max() > 1e-6]
    assert len(names) > 5
    assert one.gradients.keys() == other.gradients.keys()
    return float(
        max(
            np.abs(one.gradients[name] - other.gradients[name]).max() / np.abs(one.gradients[name]).max()
            for name in names
        )
    )


@pytest.mark.parametrize("recipe", [TENSORWISE, ROWWISE])
def test_what_is_recomputed_is_equal_in_every_bit(recipe: str) -> None:
    (kept,) = run(f"{LLAMA} {recipe}")
    (in_16_bits,) = run(LLAMA)
    np.testing.assert_array_equal(kept.logits, in_16_bits.logits)  # an evaluation
    assert 1e-3 < differs(kept, in_16_bits) < 0.5
    assert kept.loss == pytest.approx(in_16_bits.loss, rel=0.01)
    assert kept.loss != in_16_bits.loss
    for recompute in ("full", "selective --recompute-modules core_attn layernorm mlp mlp_act"):
        (again,) = run(f"{LLAMA} {recipe} --recompute-granularity {recompute}")
        assert again.loss == kept.loss
        for name, gradient in kept.gradients.items():
            np.testing.assert_array_equal(again.gradients[name], gradient, err_msg=name)


def test_adapters_in_16_bits_are_added_to_a_base_in_fp8() -> None:
    adapted = f"{LLAMA} --lora-rank 4 --lora-dropout 0"
    (in_16_bits,), (found,) = run(adapted), run(f"{adapted} {TENSORWISE}")
    assert all("lora_" in name for name in found.gradients)
    assert found.loss != in_16_bits.loss
    # B starts at zero, so that A has no gradient yet
    assert 1e-3 < differs(found, in_16_bits) < 0.5


def test_layers_at_the_ends_and_the_output_projection_stay_in_16_bits() -> None:
    for options, in_fp8 in (("", [0, 1, 2]), ("--fp8-first-last-layers-bf16 1", [1])):
        config = outputs.config_of(f"{LLAMA} --num-layers 3 {TENSORWISE} {options}")
        model = outputs.build_model(config, outputs.context_of(config))
        linears = [module for module in model.modules() if isinstance(module, ParallelLinear)]
        names = [full_name(module.weight) for module in linears if isinstance(module.base, ScaledMethod)]
        assert [int(name.split(".")[1]) for name in names] == [number for number in in_fp8 for _ in range(4)]


@pytest.mark.parametrize("layout", ["", "--sequence-parallel"])
@pytest.mark.parametrize("recipe", [TENSORWISE, ROWWISE])
def test_tensor_parallel_ranks_scale_as_one_rank(ranks: RankPools, recipe: str, layout: str) -> None:
    found = []
    for seed in (1, 2, 3):
        model = f"{LLAMA} {recipe} --seed {seed}"
        (single,) = run(model)
        parallel = f"{model} --tensor-model-parallel-size 2 {layout}"
        found.append(largest_difference(single, run(parallel, ranks)))
        if recipe == TENSORWISE:  # without the exchange of largest values each rank has scales of its own
            assert largest_difference(single, run(f"{parallel} --fp8-amax-reduce false", ranks)) > 0.1
    if recipe == ROWWISE:
        assert max(found) < 2e-5
        return
    # where a number lies between two of fp8, the last bit of a sum decides, and that is the processor's: seldom
    assert sorted(found)[1] < 2e-5
    assert max(found) < 1e-2


def largest_difference(single: Outputs, parts: list[Outputs], arguments: str = LLAMA) -> float:
    """The largest difference of a gradient that ranks hold together, over the largest number of it."""
    found = 0.0
    for name, shard in parameters_of(outputs.config_of(arguments)).items():
        if name in ("embedding.word.weight", "output.weight"):
            continue  # padded otherwise
        whole = shard.assemble([torch.from_numpy(part.gradients[name]) for part in parts]).numpy()
        exact = single.gradients[name]
        found = max(found, float(np.abs(whole - exact).max() / np.abs(exact).max()))
    return found


@pytest.mark.parametrize("recipe", [TENSORWISE, ROWWISE])
def test_experts_are_multiplied_in_fp8_one_by_one(ranks: RankPools, recipe: str) -> None:
    (in_16_bits,), (single,) = run(EXPERTS), run(f"{EXPERTS} {recipe}")
    assert 1e-3 < differs(single, in_16_bits) < 1
    parts = run(f"{EXPERTS} {recipe} --tensor-model-parallel-size 2", ranks)
    assert largest_difference(single, parts, EXPERTS) < 1e-4
