"""The layers of decoder-only transformers. Each module is given its `Shards`, and allocates what is declared."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megatron.models.attention.kv_cache import CachedTokens
from megatron.models.attention.layer import SelfAttention, Shared
from megatron.models.embedding import Stream, repack, unpack
from megatron.models.experts import Experts
from megatron.models.mlp import MLP, discard_output
from megatron.models.positions import Packing
from megatron.parallel.layers import LayerNorm, RMSNorm, StreamNorm
from megatron.parallel.rng import dropout
from megatron.parallel.shards import Shards

Build = Callable[[Shards, Shared], nn.Module]


class FinalLayerNorm(LayerNorm):
    """LayerNorm before the output projection, which needs no packing."""

    divisor: float

    def forward(self, stream: Stream) -> Tensor:
        return _divided(super().forward(unpack(stream)[0]), self.divisor)


class FinalRMSNorm(RMSNorm):
    """RMSNorm before the output projection, which needs no packing."""

    divisor: float

    def forward(self, stream: Stream) -> Tensor:
        return _divided(super().forward(unpack(stream)[0]), self.divisor)


def _divided(hidden: Tensor, divisor: float) -> Tensor:
    """Divide by the scaling of the logits, which are linear in the hidden states."""
    return hidden if divisor == 1.0 else hidden / divisor


def _all(x: Tensor) -> Tensor:
    return x


def layer_norm(shards: Shards, shared: Shared, module: type[LayerNorm] = LayerNorm) -> LayerNorm:
    return module(shards, shared.config.model.norm_epsilon, shared.ctx)


def rms_norm(shards: Shards, shared: Shared, module: type[RMSNorm] = RMSNorm, *, adds_one: bool = False) -> RMSNorm:
    return module(shards, shared.config.model.norm_epsilon, shared.ctx, kernels=shared.kernels, adds_one=adds_one)


NORMS: Mapping[str, Build] = {
    "layer_norm": layer_norm,
    "rms_norm": rms_norm,
    "rms_norm_1p": partial(rms_norm, adds_one=True),
}
"""By the kinds of models/decoder.py."""
NORM_NAMES = ("shared_norm", "attention_norm", "attention_output_norm", "mlp_norm", "mlp_output_norm")
"""Norms that a layer may declare."""


def final_norm(shards: Shards, shared: Shared, *, norm: str) -> nn.Module:
    final = FinalLayerNorm if norm == "layer_norm" else FinalRMSNorm
    build: Callable[..., Any] = NORMS[norm]
    module = build(shards, shared, final)
    module.divisor = shared.config.model.logits_divisor
    return module  # type: ignore[no-any-return]


def mlp_or_experts(shards: Shards, shared: Shared, *, activation: str, is_gated: bool = False) -> nn.Module:
    """Build what the layer declares: the MLP, or a router and its experts."""
    if "router.weight" in shards:
        return Experts(shards, shared, activation=activation)
    return MLP(shards, shared, activation=activation, is_gated=is_gated)


class TransformerLayer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)), with the norms that are declared and dropout on both branches.

    `is_parallel`: x + attention(norm(x)) + mlp(norm(x)), by one norm where `shared_norm` is declared.
    `attention_norm` and `mlp_norm` are those of the branches' inputs, `attention_output_norm` and `mlp_output_norm`
    those of their outputs. `norms_add`: RMSNorms of the inputs alone are computed with the addition before them.
    """

    drops_unwanted = False
    """Behind its attention, which needs all tokens of a prompt, it computes those alone whose logits are wanted.

    For the last layer of a model that generates: in a Llama of 8 layers 9 % of a prompt's products."""

    def __init__(
        self,
        shards: Shards,
        shared: Shared,
        *,
        norm: Build,
        mlp: Build,
        attention: Build = SelfAttention,
        is_parallel: bool = False,
    ) -> None:
        super().__init__()
        self.is_parallel = is_parallel
        model, training = shared.config.model, shared.config.training
        self.ctx, self.probability, self.multiplier = shared.ctx, model.hidden_dropout, model.residual_multiplier
        self.offload = shared.offload
        self.recompute_all = training.recompute_granularity == "full"
        self.discards_norms = "layernorm" in training.recomputed_modules
        self.recompute_mlp = "mlp" in training.recomputed_modules

        def declared(name: str) -> nn.Module | None:
            return norm(shards.below(name), shared) if shards.below(name) else None

        # where each norm reads a plain sum, and its output is kept
        reads_sums = model.hidden_dropout == 0 and self.multiplier == 1.0 and not is_parallel
        norms = {name for name in NORM_NAMES if shards.below(name)}
        are_rms_norms = norms == {"attention_norm", "mlp_norm"} and norm is NORMS["rms_norm"]
        self.norms_add = reads_sums and are_rms_norms and not self.discards_norms
        if self.norms_add:
            norm = partial(rms_norm, module=StreamNorm)

        self.shared_norm = declared("shared_norm")
        self.attention_norm = declared("attention_norm")
        self.attention = attention(shards.below("attention"), shared)
        self.attention_output_norm = declared("attention_output_norm")
        self.mlp_norm = declared("mlp_norm")
        self.mlp = mlp(shards.below("mlp"), shared)
        self.mlp_output_norm = declared("mlp_output_norm")

    def forward(self, stream: Stream) -> Stream:
        hidden, packing = unpack(stream)
        if self.recompute_all and self.training:
            return repack(self.ctx.state.streams.recomputed(self._layer, hidden, packing), stream)
        return repack(self._layer(hidden, packing), stream)

    def _layer(self, hidden: Tensor, packing: Packing | CachedTokens | None) -> Tensor:
        wanted: Callable[[Tensor], Tensor] = _all
        if self.drops_unwanted and isinstance(packing, CachedTokens):
            wanted = packing.wanted

        def attention(normed: Tensor) -> Tensor:
            return wanted(self.attention(normed, packing=packing))

        mlp: Callable[[Tensor], Tensor] = self.mlp
        if isinstance(self.mlp, Experts):
            mlp = partial(self.mlp, packing=packing)
        if self.shared_norm is not None:

            def both(normed: Tensor) -> tuple[Tensor, Tensor]:
                return attention(normed), self._branch(None, mlp, wanted(normed), recomputed=self.recompute_mlp)

            attended, output = self._branch(self.shared_norm, both, hidden, recomputed=False)
            hidden = self._add(wanted(hidden), attended, self.attention_output_norm)
            return self._add(hidden, output, self.mlp_output_norm)
        if self.norms_add:
            assert self.attention_norm is not None
            assert self.mlp_norm is not None
            hidden, normed = self.attention_norm(hidden)
            hidden, normed = self.mlp_norm(wanted(hidden), attention(normed))
            return self._add(hidden, self._branch(None, mlp, normed, recomputed=self.recompute_mlp), None)
        output = self._branch(self.attention_norm, attention, hidden, recomputed=False)
        hidden = wanted(hidden)
        attended = self._add(hidden, output, self.attention_output_norm)
        read = hidden if self.is_parallel else attended
        output = self._branch(self.mlp_norm, mlp, read, recomputed=self.recompute_mlp)
        return self._add(attended, output, self.mlp_output_norm)

    def _branch(
        self, norm: nn.Module | None, branch: Callable[[Tensor], Any], hidden: Tensor, *, recomputed: bool
    ) -> Any:
        """branch(norm(hidden)), with what is to be recomputed of it."""
        recomputed, discards = recomputed and self.training, self.discards_norms and self.training
        streams = self.ctx.state.streams
        if norm is None:
            return streams.recomputed(branch, hidden) if recomputed else branch(hidden)
        if recomputed and discards:
            return streams.recomputed(lambda x: branch(norm(x)), hidden)
        if recomputed:
            return streams.recomputed(branch, norm(hidden))
        return discard_output(norm, branch, hidden, self.offload) if discards else branch(norm(hidden))

    def _add(self, hidden: Tensor, branch: Tensor, norm: nn.Module | None) -> Tensor:
        """hidden + multiplier x dropout(norm(branch))"""
        if norm is not None:
            branch = norm(branch)
        sharded = self.ctx.sequence_parallel
        branch = dropout(branch, self.probability, self.training, self.ctx.state.streams, sharded=sharded)
        if self.multiplier != 1.0:
            return torch.add(hidden, branch, alpha=self.multiplier)
        return hidden + branch
