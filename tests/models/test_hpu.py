"""What runs on Habana's fused kernels, with stand-ins for habana_frameworks that compute the same in torch."""

from __future__ import annotations

import contextlib
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.config.options import ModelConfig
from megatron.models.attention import FusedHPUAttention, Packing, SDPAttention, alibi_slopes, build_kernel
from megatron.models.sequential import SequentialModel, build_layers
from megatron.parallel.context import ParallelContext
from megatron.parallel.kernels import PLAIN
from megatron.parallel.kernels import habana as habana_kernels
from megatron.parallel.layers import RMSNorm
from megatron.training.optimizer import build_optimizer
from tests.models.outputs import build_model, config_of
from tests.parallel.on_ranks import norm_shards

HPU = ParallelContext(device=torch.device("hpu"))
S, B, HEADS, HEAD_SIZE = 8, 2, 4, 8


class FusedSDPA:
    """Same operands in the same order as Habana's; remembers the last call."""

    calls: list[tuple[Any, ...]]
    num_kv_heads: int

    @classmethod
    def apply(
        cls,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        dropout: float,
        causal: bool,
        scale: float | None,
        softmax_mode: str,
        recompute_mode: bool | None,
    ) -> Tensor:
        # Habana's own assertion, for a call with gradients
        if softmax_mode == "fast" and recompute_mode is not False:
            assert causal, "Optimized softmax mode is supported in recompute training mode only in causal case"
        cls.calls.append((mask, dropout, causal, scale, softmax_mode, recompute_mode))
        cls.num_kv_heads = k.shape[1]
        return F.scaled_dot_product_attention(q, k, v, mask, dropout, causal, scale=scale, enable_gqa=True)


class FusedRMSNorm:
    @staticmethod
    def apply(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon) * weight + 0.0


class FusedAdamW(torch.optim.AdamW):
    """Takes what Habana's takes, and nothing of torch's own."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        bias_correction: bool = True,
    ) -> None:
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)


@pytest.fixture(autouse=True)
def habana(monkeypatch: pytest.MonkeyPatch) -> None:
    FusedSDPA.calls = []
    found: dict[str, dict[str, Any]] = {
        "kernels": {"FusedSDPA": FusedSDPA},
        "normalization": {"FusedRMSNorm": FusedRMSNorm},
        "optimizers": {"FusedAdamW": FusedAdamW},
    }
    for name in ("habana_frameworks", "habana_frameworks.torch", "habana_frameworks.torch.hpex"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for name, contents in found.items():
        module = ModuleType(f"habana_frameworks.torch.hpex.{name}")
        module.__dict__.update(contents)
        monkeypatch.setitem(sys.modules, module.__name__, module)


def heads(count: int, seed: int) -> Tensor:
    return torch.randn(B, count, S, HEAD_SIZE, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("alibi", [False, True], ids=["", "alibi"])
@pytest.mark.parametrize("packed", [False, True], ids=["", "packed"])
@pytest.mark.parametrize("groups", [2, 4])
def test_fused_attention_equals_torchs(alibi: bool, packed: bool, groups: int) -> None:
    slopes = alibi_slopes(HEADS) if alibi else None
    starts = torch.tensor([[0, 0, 0, 3, 3, 3, 6, 6], [0] * 8])
    packing = Packing(torch.arange(S) - starts, starts) if packed else None
    q, k, v = heads(HEADS, 1), heads(groups, 2), heads(groups, 3)
    ours = FusedHPUAttention(slopes)(q, k, v, packing, 0.0)
    torch.testing.assert_close(ours, SDPAttention(slopes)(q, k, v, packing, 0.0), rtol=0, atol=1e-6)
    ((mask, dropout, causal, scale, softmax_mode, recompute),) = FusedSDPA.calls
    assert FusedSDPA.num_kv_heads == groups  # not repeated: it takes fewer
    assert causal == (mask is None) == (not alibi and not packed)
    # an additive mask in the dtype of the operands, the only kind it takes beside none
    assert mask is None or mask.dtype == q.dtype
    assert (dropout, scale, softmax_mode, recompute) == (0.0, None, "None", True)


@pytest.mark.parametrize("recompute", [False, True])
def test_fast_softmax_recompute_and_dropout_are_passed_on(recompute: bool) -> None:
    model = ModelConfig(use_fast_softmax=True, fused_sdpa_recompute=recompute)
    kernel = build_kernel(model, HPU, packed=False)
    kernel(heads(HEADS, 1), heads(HEADS, 2), heads(HEADS, 3), None, 0.25)
    assert FusedSDPA.calls == [(None, 0.25, True, None, "fast", recompute)]


def test_fast_softmax_with_a_mask_runs_without_recomputation() -> None:
    """The combination that validation accepts; it refuses the other, which Habana's kernel does too."""
    for recompute in (False, True):
        model = ModelConfig(use_fast_softmax=True, position_embedding_type="alibi", fused_sdpa_recompute=recompute)
        kernel = build_kernel(model, HPU, packed=False)
        refused = pytest.raises(AssertionError, match="only in causal") if recompute else contextlib.nullcontext()
        with refused:
            kernel(heads(HEADS, 1), heads(HEADS, 2), heads(HEADS, 3), None, 0.0)
    assert [call[-1] for call in FusedSDPA.calls] == [False]


def test_hpu_takes_the_fused_attention_unless_told_otherwise() -> None:
    assert isinstance(build_kernel(ModelConfig(), HPU, packed=True), FusedHPUAttention)
    sdpa = ModelConfig(attention_backend="sdpa")
    assert isinstance(build_kernel(sdpa, HPU, packed=True), SDPAttention)
    on_cpu = ModelConfig(position_embedding_type="alibi")
    assert isinstance(build_kernel(on_cpu, ParallelContext.single(), packed=True), SDPAttention)


def test_fused_rms_norm_equals_torchs() -> None:
    norm, fused = (
        RMSNorm(norm_shards(16, bias=False), 1e-5, ParallelContext.single(), kernels=kernels)
        for kernels in (PLAIN, habana_kernels())
    )
    for parameter in (norm.weight, fused.weight):
        torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(0))
    x = torch.randn(S, B, 16)
    torch.testing.assert_close(fused(x), norm(x), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("flags", "form"),
    [
        ("", "habana"),
        ("--kernels fused", "habana"),
        ("--use-fused-rmsnorm false", "plain"),
        ("--kernels plain", "plain"),
    ],
)
def test_llama_on_hpu_uses_the_fused_norm_where_wanted(flags: str, form: str) -> None:
    arguments = f"--architecture llama --position-embedding-type rope {flags}"
    model = SequentialModel(build_layers(config_of(arguments), HPU))
    norms = [module for module in model.modules() if isinstance(module, RMSNorm)]
    assert len(norms) == 5  # two a layer, and the last
    assert {norm.kernels.form for norm in norms} == {form}


@pytest.mark.parametrize("name", ["adamw", "fusedadamw"])
def test_fused_adamw_takes_the_configured_options(name: str) -> None:
    config = config_of(
        f"--optimizer {name} --zero-stage 1 --lr 0.5 --weight-decay 0.25 --adam-eps 1e-7 --adam-beta2 0.5"
    )
    model = build_model(config, ParallelContext.single())
    optimizer = build_optimizer(model, config, HPU)
    assert isinstance(optimizer, FusedAdamW)
    decayed, kept = optimizer.param_groups
    assert (decayed["weight_decay"], kept["weight_decay"]) == (0.25, 0.0)
    assert all((g["lr"], g["betas"], g["eps"]) == (0.5, (0.9, 0.5), 1e-7) for g in optimizer.param_groups)
    assert {p.dim() for p in decayed["params"]} == {2}
    assert {p.dim() for p in kept["params"]} == {1}


def test_fused_adamw_clips_where_deepspeed_does_not() -> None:
    config = config_of("--optimizer fusedadamw")
    optimizer = build_optimizer(build_model(config, ParallelContext.single()), config, HPU)
    assert isinstance(optimizer, FusedAdamW)
    assert type(optimizer) is not FusedAdamW
    assert type(optimizer).__name__ == "FusedAdamW"
