"""DoRA in float64 against its formula on transformers' weights, and against PEFT where it is there.

W' = m / |W + s B A| (W + s B A) by rows, the norm a constant to the gradient (arXiv:2402.09353, section 4.3); of an
embedding by channels. transformers' model computes with W' in place of W, so autograd gives every gradient.
"""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.allocations import Allocations
from megatron.models.registry import family_of
from megatron.parallel.context import ParallelContext
from megatron.parallel.linear import ColumnParallelLinear, RowParallelLinear
from megatron.parallel.low_rank import LowRankMethod, own_norms
from megatron.parallel.shards import Adapter, LayerDeclaration, Shard, declared_shards
from tests.models import test_adapters as lora
from tests.models.outputs import Outputs, config_of, in_float64, run_in_float64
from tests.models.test_hf_logits import CASES, to_ours
from tests.ranks import RankPools

WEIGHT = torch.randn(3000, 512, generator=torch.Generator().manual_seed(0)).bfloat16()
TARGETS = [
    ("llama_gqa", "q_proj v_proj down_proj embed_tokens lm_head"),
    ("llama_gqa_tied_wide_heads", "all-linear embed_tokens lm_head"),
    ("bloom_8_heads", "all-linear"),
    ("gpt2", "c_attn c_proj wte"),
]


def name_of(adapter: lora.Adapted) -> str:
    """Our name of a magnitude."""
    module, _, b = adapter.ours[1].rpartition(".")
    return f"{module}.{b.replace('lora_embedding_B', 'lora_embedding_magnitude_vector').replace('lora_B', VECTOR)}"


VECTOR = "lora_magnitude_vector"


def norm_of_rows(adapter: lora.Adapted, weight: Tensor) -> Tensor:
    return (adapter.in_their_order(weight) + adapter.scale * adapter.b @ adapter.a).norm(dim=1)


def magnitudes_of(adapters: list[lora.Adapted]) -> dict[str, Tensor]:
    """Random ones near the norms, by transformers' module."""
    generator = torch.Generator().manual_seed(17)
    return {
        each.name: norm_of_rows(each, each.module.weight.detach())
        * (1 + 0.3 * torch.randn(len(each.b), generator=generator))
        for each in adapters
    }


@in_float64()
def reference(name: str, targets: str) -> lora.Reference:
    arguments, theirs = CASES[name]().arguments, lora.their_model(name)
    adapters = list(lora.adapted_modules(theirs, targets.split(), {}, {}))
    weights = to_ours({n: p.detach().clone() for n, p in theirs.named_parameters()}, arguments)
    if theirs.config.tie_word_embeddings:
        theirs.lm_head.weight = torch.nn.Parameter(theirs.lm_head.weight.detach().clone())
    theirs.requires_grad_(False)
    leaves, changed = {}, {}
    for each, magnitude in zip(adapters, magnitudes_of(adapters).values(), strict=True):
        a, b, m = leaves[each.name] = [tensor.clone().requires_grad_() for tensor in (each.a, each.b, magnitude)]
        whole = each.in_their_order(each.module.weight) + each.scale * b @ a
        changed[f"{each.name}.weight"] = each.in_their_order(
            (m / norm_of_rows(each, each.module.weight))[:, None] * whole
        )
        names = (*each.ours, name_of(each))
        of_ours = each.a, each.our_rows(each.b), each.our_rows(magnitude[:, None])[:, 0]
        weights |= dict(zip(names, of_ours, strict=True))
    inputs, labels = lora.sample()
    logits = torch.func.functional_call(theirs, changed, (inputs,), {"use_cache": False}, tie_weights=False).logits
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    gradients: dict[str, Any] = {}
    for each in adapters:
        a, b, m = torch.autograd.grad(loss, leaves[each.name], retain_graph=True)
        of_ours = a, each.our_rows(b), each.our_rows(m[:, None])[:, 0]
        gradients |= dict(zip((*each.ours, name_of(each)), of_ours, strict=True))
    arrays = [{n: tensor.numpy() for n, tensor in tensors.items()} for tensors in (weights, gradients)]
    outputs = Outputs(logits.detach().transpose(0, 1).numpy(), float(loss.detach()), arrays[1])
    return lora.Reference(arrays[0], inputs.numpy(), labels.numpy(), outputs)


def flags(name: str, targets: str) -> str:
    return lora.lora(name, targets, "--use-dora")


@pytest.mark.parametrize(("name", "targets"), TARGETS)
def test_logits_and_gradients_are_those_of_the_formula(name: str, targets: str) -> None:
    theirs = reference(name, targets)
    lora.assert_equal(lora.outputs(theirs, flags(name, targets)), theirs)


@pytest.mark.parametrize(
    ("name", "sequence"), [("llama_gqa_tied_wide_heads", True), ("llama_gqa", False), ("bloom_8_heads", False)]
)
def test_two_ranks_compute_what_one_does(ranks: RankPools, name: str, sequence: bool) -> None:
    targets = dict(TARGETS)[name]
    theirs = reference(name, targets)
    arguments = f"{flags(name, targets)} --tensor-model-parallel-size 2 {'--sequence-parallel' * sequence}"
    both = ranks(2)(run_in_float64, arguments, theirs.weights, theirs.tokens, theirs.labels)
    shards = declared_shards(family_of(config_of(arguments)).layers(config_of(arguments)))
    gradients = {
        n: shards[n].assemble([torch.from_numpy(rank.gradients[n]) for rank in both]).numpy() for n in both[0].gradients
    }
    for rank in both:
        lora.assert_equal(dataclasses.replace(rank, gradients=gradients), theirs)


@pytest.mark.parametrize(("name", "targets"), TARGETS)
def test_logits_and_gradients_are_pefts(name: str, targets: str) -> None:
    peft: Any = pytest.importorskip("peft")
    theirs = reference(name, targets)
    with in_float64():
        model = lora.their_model(name)
        adapters = {each.name: each for each in lora.adapted_modules(model, targets.split(), {}, {})}
        magnitudes = magnitudes_of(list(adapters.values()))
        adapted = peft.get_peft_model(
            model,
            peft.LoraConfig(
                r=lora.RANK, lora_alpha=lora.ALPHA, use_dora=True, fan_in_fan_out=name == "gpt2",
                target_modules=[each.split(".")[-1] for each in adapters],
            ),
            autocast_adapter_dtype=False,
        )  # fmt: skip
        for each, adapter in adapters.items():
            module = adapted.get_submodule(f"base_model.model.{each}")
            values = (adapter.a, adapter.b, magnitudes[each])
            with torch.no_grad():
                for matrix, value in zip(_of_peft(module), values, strict=True):
                    matrix.copy_(value)
        inputs, labels = lora.sample()
        logits = adapted(inputs, use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        loss.backward()
    np.testing.assert_allclose(logits.detach().transpose(0, 1).numpy(), theirs.outputs.logits, rtol=0, atol=1e-9)
    for each, adapter in adapters.items():
        found = [matrix.grad for matrix in _of_peft(adapted.get_submodule(f"base_model.model.{each}"))]
        a, b, m = found[0], adapter.our_rows(found[1]), adapter.our_rows(found[2][:, None])[:, 0]
        for n, gradient in zip((*adapter.ours, name_of(adapter)), (a, b, m), strict=True):
            expected = theirs.outputs.gradients[n]
            np.testing.assert_allclose(gradient, expected, rtol=0, atol=1e-9 * np.abs(expected).max(), err_msg=n)


def _of_peft(module: Any) -> list[Any]:
    return [*lora._matrices(module), module.lora_magnitude_vector["default"].weight]


@pytest.mark.parametrize("is_row", [False, True])
def test_dropout_is_pefts(monkeypatch: pytest.MonkeyPatch, is_row: bool) -> None:
    """W x + b + (g - 1) W x' + g s B A x', where x' is x after dropout."""
    context = ParallelContext.single()
    weight = Shard((6, 8), dim=int(is_row), pieces=(8,) if is_row else (2, 4))
    bias = Shard((6,), used_on="stream") if is_row else Shard((6,), dim=0, pieces=(2, 4))
    adapter = Adapter("", 0, 1, 3, 0.5) if is_row else Adapter("_v", 1, 2, 3, 0.5)
    rows = slice(0, 6) if is_row else slice(2, 6)
    size = rows.stop - rows.start
    added = {
        f"lora_A{adapter.suffix}": Shard((3, 8), used_on="stream"),
        f"lora_B{adapter.suffix}": Shard((size, 3), used_on="heads"),
        f"{VECTOR}{adapter.suffix}": Shard((size,), used_on="heads"),
    }
    method = LowRankMethod((adapter,), 0.4, use_dora=True)
    built = RowParallelLinear if is_row else ColumnParallelLinear
    declared = LayerDeclaration(
        "layers.0",
        {"weight": weight, "bias": bias, **added},
        lambda shards, _: built(shards, context),
        methods={"": method},
    )
    layer: Any
    layer, generator = declared.module(SimpleNamespace(ctx=context)).double(), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(generator=generator)
    x = torch.randn(5, 2, 8, generator=generator, dtype=torch.float64)
    kept = (torch.rand(x.shape, generator=generator) < 0.6) / 0.6
    monkeypatch.setattr("megatron.parallel.low_rank.F.dropout", lambda x, p: x * kept)
    a, b, m = (layer.get_parameter(n) for n in added)
    whole, inputs = layer.weight[rows] + 0.5 * b @ a, x * kept
    g = m / whole.norm(dim=1)
    expected = x @ layer.weight.t() + layer.bias
    expected[..., rows] += (g - 1) * (inputs @ layer.weight[rows].t()) + g * 0.5 * (inputs @ a.t() @ b.t())
    torch.testing.assert_close(layer(x), expected, rtol=0, atol=1e-12)


def test_norms_of_rows_convert_few_numbers_at_once(ranks: RankPools) -> None:
    ((peak, norms),) = ranks(1)(norms_of_rows)
    assert peak < WEIGHT.numel(), "far less than a copy in float32"
    torch.testing.assert_close(
        torch.tensor(norms).double(), torch.linalg.vector_norm(WEIGHT.double(), dim=1), rtol=1e-5, atol=0
    )


def norms_of_rows() -> tuple[int, list[float]]:
    """Return the most bytes that were allocated, and the norms."""
    allocations = Allocations()
    allocations.start()
    allocations.reset_peak()
    norms = own_norms(WEIGHT, torch.float32)
    allocations.stop()
    return allocations.peak().tensors, norms.tolist()
