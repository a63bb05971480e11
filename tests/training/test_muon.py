"""Muon: the published algorithm, in float64 on whole matrices, is what every layout computes."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron.checkpoint.format import CheckpointError
from megatron.options.config import ParallelConfig
from megatron.options.optimizer import OptimizerConfig
from megatron.options.progress import Progress
from megatron.parallel.context import ParallelContext
from megatron.parallel.layout import Layout
from megatron.parallel.shards import Shard, declared_shards
from megatron.plan.flops import declared_layers
from megatron.settings.command_line import parse_arguments
from megatron.training.optimizers.build import BUILDERS
from megatron.training.resume import plan_restore
from megatron.weights.deepspeed import universal
from tests.ranks import RankPools
from tests.training import layouts, matrices
from tests.training.matrices import DECAY, LR, SHARDS, STEPS, numbers
from tests.training.test_checkpoints import newest

KELLER = (3.4445, -4.7750, 2.0315)
YOU = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)
"""Coefficients of each step by You Jiacheng, as modded-nanogpt and Megatron-LM have them."""
OPTIONS: dict[str, Any] = {"muon_momentum": 0.9}


def iterated(matrix: np.ndarray, coefficients: tuple[tuple[float, float, float], ...]) -> np.ndarray:
    """Odd polynomials of the singular values, computed by them: no product of the iteration."""
    left, values, right = np.linalg.svd(matrix, full_matrices=False)
    values = values / np.sqrt((values**2).sum())
    for a, b, c in coefficients:
        values = a * values + b * values**3 + c * values**5
    return (left * values) @ right


def cut(name: str, matrix: np.ndarray, pieces: str) -> list[np.ndarray]:
    """Parts that are orthogonalised by themselves. `pieces`: as published, or a wrong way."""
    shard = SHARDS[name]
    if pieces == "fused together":
        return [matrix]
    if pieces == "rank by rank":
        return np.split(matrix, 2, axis=shard.dim or 0)
    return np.split(matrix, np.cumsum(shard.pieces[:-1]), axis=shard.dim or 0)


@functools.cache
def reference(
    pieces: str = "apart",
    *,
    nesterov: bool = True,
    scale: str = "spectral",
    coefficients: tuple[tuple[float, float, float], ...] = 5 * (KELLER,),
) -> dict[str, np.ndarray]:
    """The weights of one process after all steps: Muon (Jordan 2024; Liu et al. 2025), and AdamW for the others."""
    found = {}
    for name, shard in SHARDS.items():
        weight, momentum, second = numbers(name, -1), np.zeros(shard.shape), np.zeros(shard.shape)
        for step in range(STEPS):
            gradient = numbers(name, step)
            weight = weight * (1 - LR * DECAY)
            if shard.is_linear_weight:
                momentum = 0.9 * momentum + gradient
                ahead = gradient + 0.9 * momentum if nesterov else momentum
                cuts = cut(name, ahead, pieces)
                parts = [iterated(part, coefficients) * factor(part.shape, scale) for part in cuts]
                weight = weight - LR * np.concatenate(parts, axis=shard.dim or 0)
            else:
                momentum = 0.9 * momentum + 0.1 * gradient
                second = 0.95 * second + 0.05 * gradient**2
                root = np.sqrt(second / (1 - 0.95 ** (step + 1))) + 1e-8
                weight = weight - LR * momentum / (1 - 0.9 ** (step + 1)) / root
        found[name] = weight
    return found


def factor(shape: tuple[int, ...], scale: str) -> float:
    rows, columns = shape
    factors = {
        "spectral": 0.2 * max(rows, columns) ** 0.5,
        "spectral of 0.3": 0.3 * max(rows, columns) ** 0.5,
        "shape_scaling": max(1, rows / columns) ** 0.5,
        "unit_rms_norm": (rows / columns) ** 0.5,
    }
    return factors[scale]


def merged(parts: list[list[tuple[str, int, int, list[float]]]], sizes: dict[str, Any]) -> dict[str, np.ndarray]:
    """Each parameter, of the stretches that ranks hold; copies must be equal."""
    found = {}
    for name, shard in SHARDS.items():
        _, cuts = Layout.of(ParallelConfig(**sizes)).cut_of(shard)
        local = [torch.full(shard.local_shape(cuts), torch.nan, dtype=torch.float64) for _ in range(cuts)]
        for each, cut_rank, start, values in (part for of_rank in parts for part in of_rank):
            if each == name:
                flat = local[cut_rank].view(-1)[start : start + len(values)]
                there = torch.tensor(values, dtype=torch.float64)
                assert bool((torch.isnan(flat) | (flat == there)).all()), f"copies of {name} differ"
                flat.copy_(there)
        found[name] = shard.assemble(local).numpy()
    return found


def whole(parts: list[list[matrices.Stretch]], shards: Mapping[str, Shard], layout: Layout) -> dict[str, np.ndarray]:
    """Each parameter of a model, of the stretches that ranks save."""
    found = {}
    for name, shard in shards.items():
        _, cuts = layout.cut_of(shard)
        local = [torch.full(shard.local_shape(cuts), torch.nan) for _ in range(cuts)]
        for each, cut_rank, start, values in itertools.chain.from_iterable(parts):
            if each == name:
                local[cut_rank].view(-1)[start : start + len(values)] = torch.from_numpy(values)
        found[name] = shard.assemble(local).numpy()
        assert not np.isnan(found[name]).any(), name
    return found


def difference(found: dict[str, Any], expected: dict[str, np.ndarray]) -> float:
    return max(float(np.abs(found[name] - expected[name]).max()) for name in expected)


@pytest.mark.parametrize(
    ("world", "sizes", "flat"),
    [
        (1, {}, False),
        (2, {"tensor_model_parallel_size": 2}, False),
        (2, {}, False),
        (2, {}, True),
        (2, {"expert_model_parallel_size": 2}, True),
        (2, {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1}, False),
        (4, {"tensor_model_parallel_size": 2}, True),
        (4, {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2}, True),
        (4, {"num_replicas": 2}, True),
    ],
    ids=str,
)
def test_whole_matrices_are_orthogonalised_wherever_their_parts_lie(
    ranks: RankPools, world: int, sizes: dict[str, Any], flat: bool
) -> None:
    parts = ranks(world)(matrices.run, sizes, OPTIONS, flat=flat)
    found = merged(parts, sizes)
    assert difference(found, reference()) < 1e-9


@pytest.mark.parametrize("wrong", ["fused together", "rank by rank"])
def test_a_reference_of_other_matrices_differs(ranks: RankPools, wrong: str) -> None:
    """So the comparison above would show an orthogonalisation of slices, or of q, k and v as one."""
    found = merged(ranks(1)(matrices.run, {}, OPTIONS, flat=False), {})
    assert difference(found, reference(wrong)) > 1e-2
    assert difference(found, reference()) < 1e-9


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"muon_nesterov": False}, {"nesterov": False}),
        ({"muon_scale_mode": "shape_scaling"}, {"scale": "shape_scaling"}),
        ({"muon_scale_mode": "unit_rms_norm"}, {"scale": "unit_rms_norm"}),
        ({"muon_extra_scale_factor": 0.3}, {"scale": "spectral of 0.3"}),
        ({"muon_num_ns_steps": 3}, {"coefficients": 3 * (KELLER,)}),
        ({"muon_coefficient_type": "quintic"}, {"coefficients": YOU}),
        ({"muon_coefficient_type": "quintic", "muon_num_ns_steps": 7}, {"coefficients": (*YOU, *YOU[:2])}),
    ],
    ids=str,
)
def test_other_rules(ranks: RankPools, options: dict[str, Any], expected: dict[str, Any]) -> None:
    found = merged(ranks(1)(matrices.run, {}, OPTIONS | options, flat=False), {})
    assert difference(found, reference(**expected)) < 1e-9


# ---------------------------------------------------------------------------------------------------------------------
# Whole engines

# AdamW divides the smallest gradients by themselves, which leaves their rounding: not with a large epsilon
LLAMA = f"{layouts.MODELS['llama_gqa']} --optimizer muon --lr 1e-2 --adam-eps 1e-2"
EXPERTS = f"{LLAMA} --ffn-hidden-size 48 --num-experts 4 --moe-router-topk 2"
TP2 = "--tensor-model-parallel-size 2"


@pytest.fixture(scope="module")
def alone(ranks: RankPools) -> Any:
    """What one process without parallelism gives, computed once."""
    return functools.cache(lambda model: ranks(1)(matrices.train, model, 3)[0])


@pytest.mark.parametrize(
    ("model", "world", "flags"),
    [
        (LLAMA, 2, f"{TP2} --sequence-parallel"),
        pytest.param(LLAMA, 2, TP2, marks=pytest.mark.slow),
        (LLAMA, 2, "--pipeline-model-parallel-size 2"),
        pytest.param(LLAMA, 2, "", marks=pytest.mark.slow),
        (LLAMA, 2, "--zero-stage 1"),
        (LLAMA, 2, "--zero-stage 2"),
        pytest.param(LLAMA, 2, "--context-parallel-size 2 --zero-stage 1", marks=pytest.mark.slow),
        pytest.param(LLAMA, 2, "--recompute-granularity full --zero-stage 1", marks=pytest.mark.slow),
        pytest.param(LLAMA, 4, f"{TP2} --zero-stage 1", marks=pytest.mark.slow),
        pytest.param(
            LLAMA, 4, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2", marks=pytest.mark.slow
        ),
        pytest.param(LLAMA, 4, "--num-replicas 2 --zero-stage 1", marks=pytest.mark.slow),
        (EXPERTS, 2, "--expert-model-parallel-size 2 --zero-stage 1"),
        pytest.param(
            EXPERTS, 4, "--expert-model-parallel-size 2 --tensor-model-parallel-size 2", marks=pytest.mark.slow
        ),
    ],
    ids=str,
)
def test_every_layout_trains_the_same_weights(ranks: RankPools, alone: Any, model: str, world: int, flags: str) -> None:
    """Float32, after 3 steps that move numbers by 2e-3 each."""
    losses, weights = alone(model)
    results = ranks(world)(matrices.train, f"{model} {flags}", 3)
    assert results[0][0] == pytest.approx(losses, rel=1e-5)
    config, _ = parse_arguments([*layouts.COMMON.split(), *f"{model} {flags}".split()])
    shards = declared_shards(declared_layers(config))
    expected = whole([weights], shards, Layout())
    found = whole([parts for _, parts in results], shards, Layout.of(config.parallel, world))
    assert expected.keys() == found.keys()
    assert max(float(np.abs(found[name] - expected[name]).max()) for name in expected) < 1e-6


@pytest.mark.parametrize("flags", ["--zero-stage 1", pytest.param(f"{TP2} --bf16", marks=pytest.mark.slow)])
def test_resumed_equals_uninterrupted_bit_for_bit(ranks: RankPools, tmp_path: Path, flags: str) -> None:
    whole, rest = ranks(2)(layouts.train_interrupted, f"{LLAMA} {flags}", 2, 4, str(tmp_path))[0]
    assert rest == whole[2:]


def test_a_checkpoint_resumes_on_another_layout(ranks: RankPools, tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    expected = ranks(2)(layouts.train_then_save, f"{LLAMA} {TP2}", 3, str(first))[0]
    loss = ranks(2)(layouts.resume_then_save, f"{LLAMA} --zero-stage 1", str(first), str(second))[0]
    assert loss == pytest.approx(expected, rel=1e-6)
    saved, other = newest(second), newest(first)
    assert saved.kinds == other.kinds == ("weight", "exp_avg", "exp_avg_sq", "momentum_buffer")
    for name in saved.parameters:
        assert saved.kinds_of(name) == other.kinds_of(name)
        for kind in saved.kinds_of(name):
            assert torch.equal(saved.read_full(name, kind), other.read_full(name, kind)), f"{kind} of {name}"
    assert saved.kinds_of("layers.0.attention.qkv.weight") == ("weight", "momentum_buffer")
    assert saved.kinds_of("embedding.word.weight") == ("weight", "exp_avg", "exp_avg_sq")
    with pytest.raises(CheckpointError, match="holds the momentum of Muon beside the moments of AdamW"):
        universal.write(saved, tmp_path / "universal")
    # the reverse of what tests/training/test_resume.py shows
    config, _ = parse_arguments([*layouts.COMMON.split(), *f"{layouts.MODELS['llama_gqa']} --load {second}".split()])
    with pytest.raises(CheckpointError, match=r"momentum_buffer of another optimizer; optimizer=adamw keeps exp_avg, "):
        plan_restore(saved, Progress(), config, config.checkpoint)


@pytest.mark.parametrize("shape", [(24, 16), (16, 24), (16, 16)], ids=str)
@pytest.mark.parametrize(("rule", "adjusted"), [("spectral", "match_rms_adamw"), ("shape_scaling", "original")])
def test_torch_agrees(shape: tuple[int, int], rule: Any, adjusted: str) -> None:
    """torch.optim.Muon, which iterates in bfloat16, with its own settings."""
    torch.manual_seed(0)
    parameter: Any = torch.nn.Parameter(torch.randn(shape))
    theirs = torch.nn.Parameter(parameter.detach().clone())
    parameter.shard, parameter.full_name = Shard(shape, used_on="stream", cost=matrices.PRODUCT), "layers.0.weight"
    config = OptimizerConfig(optimizer="muon", lr=1e-2, weight_decay=0.1, muon_scale_mode=rule)
    group = {"params": [parameter], "by_muon": True, "weight_decay": 0.1, "lr": 1e-2}
    ctx = ParallelContext.single()
    ours: Any = BUILDERS["muon"]([group], config, ctx)
    ours.place([("layers.0.weight", parameter)], {"layers.0.weight": matrices.whole(parameter)}, ctx, torch.bfloat16)
    other = torch.optim.Muon([theirs], lr=1e-2, weight_decay=0.1, adjust_lr_fn=adjusted)
    for _ in range(5):
        parameter.grad = torch.randn(shape)
        theirs.grad = parameter.grad.clone()
        ours.step()
        other.step()
    # a norm of bfloat16 has 8 bits, ours more
    torch.testing.assert_close(parameter, theirs, rtol=0, atol=5 * 1e-2 * 5 * 2**-8)
