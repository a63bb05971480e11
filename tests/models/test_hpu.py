"""What runs on Habana's fused kernels, with the stand-in of tests/habana, which computes the same on the CPU."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.models.attention.kernels import FusedHPUAttention, SDPAttention, build_kernel
from megatron.models.attention.scores import Scores
from megatron.models.positions import Packing, alibi_slopes
from megatron.models.sequential import SequentialModel, build_layers
from megatron.options.config import ModelConfig
from megatron.parallel.context import ParallelContext
from megatron.parallel.layers import RMSNorm
from megatron.parallel.operators.fused import PLAIN
from megatron.parallel.operators.fused import habana as habana_kernels
from megatron.runtime import accelerator
from megatron.runtime.device_hpu import HPU as HPU_RECORD
from megatron.training.interludes.step_log import StepLog
from megatron.training.optimizers.build import build_optimizer
from megatron.training.optimizers.gated import BareOptimizer, GatedOptimizer
from tests.habana import stand_in_packages
from tests.models.outputs import build_model, config_of
from tests.parallel.on_ranks import norm_shards

HPU = ParallelContext(device=torch.device("hpu"))
S, B, HEADS, HEAD_SIZE = 8, 2, 4, 8


@pytest.fixture(autouse=True)
def habana(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    with stand_in_packages(monkeypatch) as stand_in:
        yield stand_in


def kernel_calls(habana: Any) -> list[tuple[Any, ...]]:
    names = ("attn_mask", "dropout_p", "is_causal", "scale", "softmax_mode", "recompute_mode")
    return [tuple(call[name] for name in names) for call in habana.called("FusedSDPA")]


def heads(count: int, seed: int) -> Tensor:
    return torch.randn(B, count, S, HEAD_SIZE, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("alibi", [False, True], ids=["", "alibi"])
@pytest.mark.parametrize("packed", [False, True], ids=["", "packed"])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_fused_attention_equals_torchs(habana: Any, alibi: bool, packed: bool, groups: int) -> None:
    slopes = alibi_slopes(HEADS) if alibi else None
    starts = torch.tensor([[0, 0, 0, 3, 3, 3, 6, 6], [0] * 8])
    packing = Packing(torch.arange(S) - starts, starts) if packed else None
    q, k, v = heads(HEADS, 1), heads(groups, 2), heads(groups, 3)
    ours = FusedHPUAttention(Scores(slopes))(q, k, v, packing, 0.0)
    torch.testing.assert_close(ours, SDPAttention(Scores(slopes))(q, k, v, packing, 0.0), rtol=0, atol=1e-6)
    ((mask, dropout, causal, scale, softmax_mode, recompute),) = kernel_calls(habana)
    assert habana.called("FusedSDPA")[0]["num_kv_heads"] == groups  # not repeated: it takes fewer
    assert causal == (mask is None) == (not alibi and not packed)
    # an additive mask in the dtype of the operands, the only kind it takes beside none
    assert mask is None or (mask.dtype == q.dtype and not mask.isinf().any())
    assert (dropout, scale, softmax_mode, recompute) == (0.0, None, "None", True)


@pytest.mark.parametrize("recompute", [False, True])
def test_fast_softmax_recompute_and_dropout_are_passed_on(habana: Any, recompute: bool) -> None:
    model = ModelConfig(use_fast_softmax=True, fused_sdpa_recompute=recompute)
    kernel = build_kernel(model, HPU, packed=False)
    kernel(heads(HEADS, 1), heads(HEADS, 2), heads(HEADS, 3), None, 0.25)
    assert kernel_calls(habana) == [(None, 0.25, True, None, "fast", recompute)]


def test_fast_softmax_with_a_mask_runs_without_recomputation(habana: Any) -> None:
    """The combination that validation accepts; it refuses the other, which Habana's kernel does too."""
    for recompute in (False, True):
        model = ModelConfig(use_fast_softmax=True, position_embedding_type="alibi", fused_sdpa_recompute=recompute)
        kernel = build_kernel(model, HPU, packed=False)
        refused = pytest.raises(AssertionError, match="only in causal") if recompute else contextlib.nullcontext()
        with refused:
            kernel(heads(HEADS, 1).requires_grad_(), heads(HEADS, 2), heads(HEADS, 3), None, 0.0)
    assert [call[-1] for call in kernel_calls(habana)] == [False, True]


def test_hpu_takes_the_fused_attention_unless_told_otherwise() -> None:
    assert isinstance(build_kernel(ModelConfig(), HPU, packed=True), FusedHPUAttention)
    sdpa = ModelConfig(attention_backend="sdpa")
    assert isinstance(build_kernel(sdpa, HPU, packed=True), SDPAttention)
    on_cpu = ModelConfig(position_embedding_type="alibi")
    assert isinstance(build_kernel(on_cpu, ParallelContext.single(), packed=True), SDPAttention)


def test_fused_rms_norm_equals_torchs() -> None:
    norm, fused = (
        RMSNorm(norm_shards(16, bias=False), 1e-5, ParallelContext.single(), kernels=kernels)
        for kernels in (PLAIN, habana_kernels(fused_norm=True))
    )
    for parameter in (norm.weight, fused.weight):
        torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(0))
    x = torch.randn(S, B, 16)
    torch.testing.assert_close(fused(x), norm(x), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("flags", "fused"),
    [
        ("", True),
        ("--kernels fused", True),
        ("--use-fused-rmsnorm false", False),
        ("--kernels plain", False),
    ],
)
def test_llama_on_hpu_uses_the_fused_norm_where_wanted(flags: str, fused: bool) -> None:
    arguments = f"--architecture llama --position-embedding-type rope {flags}"
    model = SequentialModel(build_layers(config_of(arguments), HPU))
    norms = [module for module in model.modules() if isinstance(module, RMSNorm)]
    assert len(norms) == 5  # two a layer, and the last
    assert {norm.kernels.rms_norm is not PLAIN.rms_norm for norm in norms} == {fused}
    assert {norm.kernels.rotate is not PLAIN.rotate for norm in norms} == {"plain" not in flags}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("samples", [1, B], ids=["", "angles of each sample"])
def test_fused_rotary_embedding_equals_torchs(habana: Any, dtype: torch.dtype, samples: int) -> None:
    angles = torch.rand(S, samples, 1, HEAD_SIZE // 2, generator=torch.Generator().manual_seed(0)) * 6
    results = []
    for rotate in (PLAIN.rotate, habana_kernels(fused_norm=False).rotate):
        q, k = (heads(n, n).movedim(2, 0).to(dtype).requires_grad_() for n in (HEADS, 2))
        rotated = rotate(q, k, angles.cos(), angles.sin())
        sum(x.float().square().cumsum(-1).sum() for x in rotated).backward()  # type: ignore[union-attr]
        results.append([*rotated, q.grad, k.grad])
    for theirs, ours in zip(*results, strict=True):
        assert ours is not None
        assert ours.dtype == dtype
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    assert len(habana.called("apply_rotary_pos_emb")) == (2 if samples == 1 else 0)


def is_fused(optimizer: GatedOptimizer) -> bool:
    return type(optimizer.inner).__module__ == "habana_frameworks.torch.hpex.optimizers"


@pytest.mark.parametrize("name", ["adamw", "fusedadamw"])
def test_fused_adamw_takes_the_configured_options(name: str) -> None:
    config = config_of(
        f"--optimizer {name} --zero-stage 1 --lr 0.5 --weight-decay 0.25 --adam-eps 1e-7 --adam-beta2 0.5"
    )
    model = build_model(config, ParallelContext.single())
    optimizer = build_optimizer(model, config, HPU)
    assert is_fused(optimizer)
    decayed, kept = optimizer.param_groups
    assert (decayed["weight_decay"], kept["weight_decay"]) == (0.25, 0.0)
    assert all((g["lr"], g["betas"], g["eps"]) == (0.5, (0.9, 0.5), 1e-7) for g in optimizer.param_groups)
    assert {p.dim() for p in decayed["params"]} == {2}
    assert {p.dim() for p in kept["params"]} == {1}


def test_fused_adamw_clips_where_deepspeed_does_not() -> None:
    config = config_of("--optimizer fusedadamw")
    optimizer = build_optimizer(build_model(config, ParallelContext.single()), config, HPU)
    assert is_fused(optimizer)
    assert isinstance(optimizer, BareOptimizer)


@pytest.mark.parametrize(("tensor_rank", "named"), [(0, 2), (1, 0)])
def test_operators_computed_on_the_cpu_are_named_once_a_stage(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, habana: Any, tensor_rank: int, named: int
) -> None:
    monkeypatch.setattr(accelerator, "current", lambda: HPU_RECORD)
    ctx = dataclasses.replace(HPU, rank=4 + tensor_rank, tensor_size=2)
    log: Any = SimpleNamespace(_engine=SimpleNamespace(ctx=ctx), _fallbacks=set())
    habana.fallbacks |= {"aten::unique": 3, "aten::sort": 1}
    StepLog._name_fallbacks(log)
    StepLog._name_fallbacks(log)
    habana.fallbacks |= {"aten::unique": 9, "aten::topk": 2}
    StepLog._name_fallbacks(log)
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == named
    if named:
        assert "rank 4" in messages[0]
        assert [m.partition("each time: ")[2] for m in messages] == [
            "aten::sort (1 calls), aten::unique (3 calls)",
            "aten::topk (2 calls)",
        ]
