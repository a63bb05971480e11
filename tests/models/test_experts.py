"""A layer of experts alone: what its options mean, against each token's sum written out."""

from __future__ import annotations

import dataclasses
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.models import experts
from megatron.models.experts import Experts
from megatron.models.mlp import MLP
from megatron.parallel.context import ParallelContext
from megatron.runtime.device_cpu import CPU
from megatron.settings.command_line import parse_arguments
from tests.models.outputs import build_model

FLAGS = (
    "--architecture llama --position-embedding-type rope --num-layers 4 --hidden-size 16 --num-attention-heads 4 "
    "--ffn-hidden-size 24 --vocab-size 64 --num-experts 4 --hidden-dropout 0 --attention-dropout 0 --device cpu"
)


def layers(flags: str) -> list[Experts | MLP]:
    """The experts and MLPs of a small model, in order."""
    config, _ = parse_arguments([*FLAGS.split(), *flags.split()])
    torch.manual_seed(0)
    model = build_model(config, ParallelContext.single()).double().eval()
    mlps: list[Any] = [layer.mlp for layer in model.modules() if hasattr(layer, "mlp")]
    return mlps


def mlp_of(mlp: torch.nn.Module, x: Tensor) -> Tensor:
    weights = dict(mlp.named_parameters())
    assert len(weights) == 2, "a bias would be left out here"
    if "up.weight" in weights:
        return F.linear(F.gelu(F.linear(x, weights["up.weight"]), approximate="tanh"), weights["down.weight"])
    gate, up = F.linear(x, weights["gate_up.weight"]).chunk(2, -1)
    return F.linear(F.silu(gate) * up, weights["down.weight"])


@pytest.mark.parametrize("static", [False, True], ids=["sorted", "static"])
@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--moe-router-topk 1 --moe-router-pre-softmax --moe-ffn-hidden-size 8",
        "--moe-router-score-function sigmoid --moe-router-topk-scaling-factor 2.5",
        "--moe-router-topk 3 --moe-shared-expert-intermediate-size 12",
        "--architecture bloom",
    ],
)
def test_a_token_is_the_weighed_sum_of_its_experts(flags: str, static: bool) -> None:
    with patch.object(experts, "device_of", lambda kind: dataclasses.replace(CPU, static_experts=static)):
        layer = layers(flags)[0]
    assert isinstance(layer, Experts)
    tokens = torch.randn(6, 2, 16, dtype=torch.float64)
    found = layer(tokens).flatten(0, 1)
    for token, output in zip(tokens.flatten(0, 1), found, strict=True):
        logits = layer.router.weight @ token
        scores = logits.sigmoid() if "sigmoid" in flags else logits.softmax(0)
        chosen = scores.argsort(descending=True)[: layer.topk].tolist()
        total = 1.0 if "pre-softmax" in flags else sum(scores[number] for number in chosen)
        factor = 2.5 if "scaling" in flags else 1.0
        expected = sum(factor * scores[number] / total * mlp_of(layer.experts[str(number)], token) for number in chosen)
        if layer.shared is not None:
            expected = expected + mlp_of(layer.shared, token)
        torch.testing.assert_close(output, expected, rtol=1e-9, atol=1e-12)
    width = {"--moe-ffn-hidden-size 8": 8}.get(" ".join(flags.split()[-2:]), 24)
    assert dict(layer.named_parameters())["experts.0.down.weight"].shape == (16, width)
    assert (layer.shared is not None) == ("shared" in flags)


def test_layers_without_experts_have_one_mlp() -> None:
    kinds = [type(layer) for layer in layers("--moe-layer-freq 0 1")]
    assert kinds == [MLP, Experts, MLP, Experts]
