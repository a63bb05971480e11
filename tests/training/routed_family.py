"""A family from outside the package, whose layers add loss terms and metrics: those of a router, without experts."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.models.decoder import DecoderBlock, LayerKind, below, decoder_layers
from megatron.models.family import Family
from megatron.models.transformer import TransformerLayer
from megatron.options.config import ModelConfig
from megatron.parallel.costs import MatrixProduct
from megatron.parallel.shards import LayerDeclaration, Shard, Shards

ROUTES = 4
COEFFICIENTS = {"balance": 0.5, "z_loss": 0.02}
METRICS = {"highest": "max", "routed": "sum", "entropy": "mean"}


class Router(nn.Module):
    """Probabilities of routes, float32 [rows, B, ROUTES]."""

    def __init__(self, shards: Shards, shared: Any) -> None:
        super().__init__()
        self.weight = shards.allocate("weight", shared.ctx)

    def forward(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden.float(), self.weight.float())


def terms_of(logits: Tensor) -> dict[str, Tensor]:
    """Return the loss terms of each token, [rows, B]."""
    probabilities = logits.softmax(-1)
    return {"balance": ROUTES * probabilities.square().sum(-1), "z_loss": logits.logsumexp(-1).square()}


class RoutedLayer(TransformerLayer):
    def __init__(self, shards: Shards, shared: Any, **parts: Any) -> None:
        super().__init__(shards, shared, **parts)
        self.router = Router(shards.below("router"), shared)

    def _layer(self, hidden: Tensor, packing: Any) -> Tensor:
        hidden = super()._layer(hidden, packing)
        logits = self.router(hidden)
        hidden = hidden * (1 + logits.softmax(-1).amax(-1, keepdim=True).to(hidden.dtype))
        weights = None if packing is None else packing.weights_SB(self.ctx)
        with torch.no_grad():
            shares = logits.softmax(-1)
            kept = torch.ones_like(logits[..., 0]) if weights is None else weights
            metrics = {
                "highest": ((shares.amax(-1) * kept).amax(), 1.0),
                "routed": (kept.sum(), 1.0),
                "entropy": (-(shares.log() * shares).sum(-1).mul(kept).sum(), kept.sum()),
            }
        return self.ctx.state.terms.add(hidden, terms_of(logits), metrics, weights)


class RoutedBlock(DecoderBlock):
    def shards(self, model: ModelConfig, kind: LayerKind) -> dict[str, Shard]:
        cost = MatrixProduct("mlp")
        router = {"weight": Shard((ROUTES, model.hidden_size), std=2.0, used_on="stream", cost=cost)}
        return super().shards(model, kind) | below("router", router)

    def build(self, shards: Shards, shared: Any) -> RoutedLayer:
        return RoutedLayer(shards, shared, **self.parts())


BLOCK = RoutedBlock(norm="rms_norm", activation="silu", is_gated=True)


def declare(config: Any) -> list[LayerDeclaration]:
    layers = decoder_layers(config, BLOCK)
    return [
        layer if layer.number is None else dataclasses.replace(layer, loss_terms=COEFFICIENTS, metrics=METRICS)
        for layer in layers
    ]


FAMILY = Family(declare=declare)
