"""A mixture of experts in place of a layer's MLP: a router, its experts, and those that all tokens share.

Shapes: [rows, B, H] is the residual stream; E experts, of which each token passes through K.
Sources: Shazeer et al. 2017 (arXiv:1701.06538); the balancing loss and the capacity of Fedus et al. 2021
(arXiv:2101.03961); the z-loss of Zoph et al. 2022 (arXiv:2202.08906); shared experts of Dai et al. 2024
(arXiv:2401.06066).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.models.attention.kv_cache import CachedTokens
from megatron.models.attention.layer import Shared
from megatron.models.mlp import MLP
from megatron.models.positions import Packing
from megatron.parallel.context import ParallelContext
from megatron.parallel.expert_exchange import Dispatch, all_tokens, own_tokens, through_all, through_slots
from megatron.parallel.linear import DENSE
from megatron.parallel.mappings import (
    all_gather_rows,
    all_places,
    enter_tensor_region,
    leave_tensor_region,
    own_rows,
)
from megatron.parallel.operators.products import grouped_linear
from megatron.parallel.phase_clock import WAIT
from megatron.parallel.shards import Shards, shard_of
from megatron.runtime.devices import device_of


class Routing(NamedTuple):
    """Choices of a router for the tokens of a residual stream."""

    logits_SBE: Tensor
    """float32."""
    scores_SBE: Tensor
    """Between 0 and 1."""
    experts_SBK: Tensor
    """int64, the highest score first."""
    weights_SBK: Tensor
    """Factors of the outputs of the experts, float32."""


class TokenRouter(nn.Module):
    """The experts of each token, and their weights. It computes in float32: a rounded score picks another expert."""

    def __init__(self, shards: Shards, shared: Shared) -> None:
        super().__init__()
        model = shared.config.model
        self.topk, self.scaling = model.moe_router_topk, model.moe_router_topk_scaling_factor
        self.is_sigmoid = model.moe_router_score_function == "sigmoid"
        self.keeps_scores = model.moe_router_pre_softmax
        self.num_groups, self.group_topk = model.moe_router_num_groups, model.moe_router_group_topk or 1
        self.jitter, self.ctx = model.moe_input_jitter_eps, shared.ctx
        self.weight = shards.allocate("weight", shared.ctx)
        self.bias: nn.Parameter | None = None
        if "bias" in shards:
            self.bias = shards.allocate("bias", shared.ctx)

    def forward(self, hidden: Tensor, *, in_training: bool) -> Routing:
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        hidden = hidden.to(dtype)
        if in_training and self.jitter > 0:
            hidden = hidden * self._factors(hidden)
        logits = F.linear(hidden, self.weight.to(dtype))
        scores = logits.sigmoid() if self.is_sigmoid else logits.softmax(-1)
        choice = scores.detach() if self.bias is None else scores.detach() + self.bias
        if self.num_groups is not None:
            choice = self._in_best_groups(choice, self.num_groups)
        experts = choice.topk(self.topk, dim=-1).indices
        weights = scores.gather(-1, experts)
        if not self.keeps_scores:
            weights = weights / weights.sum(-1, keepdim=True)
        if self.scaling != 1.0:
            weights = weights * self.scaling
        return Routing(logits, scores, experts, weights)

    def _in_best_groups(self, choice: Tensor, num_groups: int) -> Tensor:
        """Return the scores with those of all groups but the best at -inf; a group's is the sum of its best two."""
        grouped = choice.unflatten(-1, (num_groups, -1))
        best = grouped.topk(2, dim=-1).values.sum(-1).topk(self.group_topk, dim=-1).indices
        is_best = torch.zeros_like(grouped[..., 0], dtype=torch.bool).scatter_(-1, best, True)
        return grouped.masked_fill(~is_best.unsqueeze(-1), -math.inf).flatten(-2)

    def _factors(self, hidden: Tensor) -> Tensor:
        """Draw the factors of the input, alike on tensor-parallel ranks that hold the same tokens."""
        ctx = self.ctx
        with ctx.state.streams.sharded() if ctx.sequence_parallel else contextlib.nullcontext():
            return torch.empty_like(hidden).uniform_(1.0 - self.jitter, 1.0 + self.jitter)


class RouterBalance:
    """Moves the biases of the routers of a rank's layers: balance without a loss.

    Source: Wang et al. 2024 (arXiv:2408.15664); DeepSeek-V3 (arXiv:2412.19437).
    """

    def __init__(self, module: nn.Module, rate: float, ctx: ParallelContext) -> None:
        self._rate, self._ctx = rate, ctx
        self._biases: dict[int, Tensor] = {}
        for layer in module.modules():
            if not isinstance(layer, Experts) or layer.router.bias is None:
                continue
            # one that is frozen stays
            if shard_of(layer.router.bias).balances:
                self._biases[layer.layer] = layer.router.bias

    @torch.no_grad()
    def update(self, by_layer: Mapping[int, Tensor]) -> None:
        """Move each bias by the loads of a step: `ExpertLoads.by_layer`. Collective; waits for nothing."""
        if not self._biases:
            return
        ctx = self._ctx
        # below 2^24 tokens of an expert the sums are exact, so that layouts and ranks agree in every bit
        loads_LE = torch.stack([by_layer[layer][:-1] for layer in self._biases]).float()
        with ctx.state.clock.phase(WAIT):
            if ctx.sequence_parallel:
                dist.all_reduce(loads_LE, group=ctx.tensor_group)
            if ctx.grad_group is not None:
                dist.all_reduce(loads_LE, group=ctx.grad_group)
        moves_LE = self._rate * (loads_LE.mean(1, keepdim=True) - loads_LE).sign()
        for bias, move in zip(self._biases.values(), moves_LE, strict=True):
            bias.add_(move)


class Expert(MLP):
    """An MLP whose caller brings the tokens to it, and adds up its parts over tensor-parallel ranks."""

    def __init__(self, shards: Shards, shared: Shared, *, activation: str) -> None:
        is_gated = bool(shards.below("gate_up"))
        super().__init__(shards, shared, activation=activation, is_gated=is_gated, ctx=shared.ctx.of_experts)

    def forward(self, tokens: Tensor) -> Tensor:
        """[n, H] -> [n, H], this rank's part of the sum. n may be 0: the gradients are zeros then."""
        inside = self.first.method.product(self.first, tokens)
        return self.activated(inside, lambda x: self.down.method.product(self.down, x))


class Experts(nn.Module):
    """Router, experts and shared experts, [rows, B, H] -> [rows, B, H].

    The tokens of one rank's rows are sorted by expert. With experts over the ranks of the expert group, they travel
    there and back. Experts are cut over the tensor-parallel ranks as an MLP is, or are whole on each; then each of
    these ranks sends its own share of the tokens. On some devices the router decides no size.
    """

    def __init__(self, shards: Shards, shared: Shared, *, activation: str) -> None:
        super().__init__()
        model = shared.config.model
        self.ctx, self.num_experts = shared.ctx, model.num_experts or 0
        self.layer = shards.layer_number or 0
        self.topk, self.capacity = model.moe_router_topk, model.moe_expert_capacity_factor
        device = device_of(shared.ctx.device.type)
        self.is_static = device.static_experts
        self.balances, self.has_z_loss = model.moe_aux_loss_coeff > 0, model.moe_z_loss_coeff > 0
        self.router = TokenRouter(shards.below("router"), shared)
        views = [shards.below(f"experts.{number}") for number in range(self.num_experts)]
        # whichever rank holds it
        self.is_trained = any(shard.trained for view in views for shard in view.values())
        held = {
            str(number): Expert(view, shared, activation=activation)
            for number, view in enumerate(views)
            if all(map(shared.ctx.holds, view.values()))
        }
        self.experts = nn.ModuleDict(held)
        # adapters, 4 bits and fp8 compute an expert by itself; ZeRO-3 gathers its weights when it is called, and a
        # pipeline schedule that defers their gradients takes them one by one
        methods = {layer.method for expert in held.values() for layer in (expert.first, expert.down)}
        self.is_grouped = (
            device.groups_products
            and methods == {DENSE}
            and shared.config.optimizer.zero_stage < 3
            and shared.ctx.state.deferred is None
        )
        self.shared: MLP | None = None
        if shards.below("shared"):
            is_gated = bool(shards.below("shared.gate_up"))
            self.shared = MLP(shards.below("shared"), shared, activation=activation, is_gated=is_gated)

    def forward(self, hidden: Tensor, packing: Packing | CachedTokens | None = None) -> Tensor:
        in_training = self.training and not isinstance(packing, CachedTokens)
        routing = self.router(hidden, in_training=in_training)
        is_token_SB = packing.weights_SB(self.ctx) if isinstance(packing, Packing) else None
        kept = None
        if in_training and self.capacity is not None:
            kept = self._kept(routing, is_token_SB)
        output = self._routed(hidden, routing, kept)
        if self.shared is not None:
            output = output + self.shared(hidden)
        state = self.ctx.state
        # a validation has the terms too; generation and passes before a step have neither
        if isinstance(packing, CachedTokens) or not (state.terms.is_recorded or state.loads.is_on):
            return output
        return self._with_terms(output, routing, kept, is_token_SB)

    def _routed(self, hidden: Tensor, routing: Routing, kept_SBK: Tensor | None) -> Tensor:
        """Return the weighed sum of the outputs of each token's experts."""
        ctx, experts, weights = self.ctx, routing.experts_SBK, routing.weights_SBK
        slots = hidden.shape[1] * self._room(len(hidden))
        if not ctx.experts_are_whole:
            hidden, weights = enter_tensor_region(hidden, ctx), enter_tensor_region(weights, ctx)
            if ctx.sequence_parallel:
                experts = all_gather_rows(experts, ctx)
                kept_SBK = None if kept_SBK is None else all_gather_rows(kept_SBK, ctx)
            output = self._dispatched(hidden.flatten(0, 1), experts, weights, kept_SBK, slots)
            return leave_tensor_region(output.view(hidden.shape), ctx)
        if ctx.sequence_parallel:
            return self._dispatched(hidden.flatten(0, 1), experts, weights, kept_SBK, slots).view(hidden.shape)
        # all tensor-parallel ranks hold the same tokens: each takes its share
        tokens = hidden.flatten(0, 1)
        experts, weights = own_tokens(experts.flatten(0, 1), ctx), own_tokens(weights.flatten(0, 1), ctx)
        if kept_SBK is not None:
            kept_SBK = own_tokens(kept_SBK.flatten(0, 1), ctx)
        output = self._dispatched(own_tokens(tokens, ctx), experts, weights, kept_SBK, slots)
        return all_tokens(output, len(tokens), ctx).view(hidden.shape)

    def _dispatched(
        self, tokens_NH: Tensor, experts: Tensor, weights: Tensor, kept: Tensor | None, slots: int
    ) -> Tensor:
        """`slots`: the most choices that any expert keeps of all these tokens, and of other ranks'."""
        experts_NK, weights_NK = experts.reshape(-1, self.topk), weights.reshape(-1, self.topk)
        kept_NK = None if kept is None else kept.reshape(-1, self.topk)
        own: list[Any] = list(self.experts.values())
        if self.is_static:
            ways, is_trained = (tokens_NH, experts_NK, weights_NK), self.is_trained
            if kept_NK is None:
                return through_all(*ways, own, self.ctx, is_trained=is_trained)
            return through_slots(*ways, kept_NK, min(slots, len(tokens_NH)), own, self.ctx, is_trained=is_trained)
        dispatch = Dispatch.of(experts_NK, self.num_experts, self.ctx, kept_NK)
        tokens = dispatch.to_experts(tokens_NH)
        if self.is_grouped:
            ends, downs = dispatch.ends, [expert.down.weight for expert in own]
            inside = grouped_linear(tokens, ends, [expert.first.weight for expert in own])
            output = own[0].activated(inside, lambda x: grouped_linear(x, ends, downs))
        else:
            # those without a token too: each parameter has a gradient then, on every rank and in every microbatch
            parts = zip(own, tokens.split(dispatch.sizes), strict=True)
            output = torch.cat([expert(part) for expert, part in parts])
        return dispatch.from_experts(output, weights_NK, is_trained=self.is_trained)

    @torch.no_grad()
    def _kept(self, routing: Routing, is_token_SB: Tensor | None) -> Tensor:
        """Return True for the choices that their expert has room for, [rows, B, K].

        Tokens compete within their sequence of the batch, so that a layout decides nothing.
        """
        ctx = self.ctx
        chosen = torch.zeros_like(routing.scores_SBE).scatter_(-1, routing.experts_SBK, 1.0)
        if is_token_SB is not None:
            chosen = chosen * is_token_SB.unsqueeze(-1)
        # the score of what was not chosen is below all others
        competing_SBE = torch.where(chosen > 0, routing.scores_SBE, -1.0)
        if ctx.sequence_parallel:
            competing_SBE = all_gather_rows(competing_SBE, ctx)
        if ctx.context_size > 1:
            competing_SBE = all_places(competing_SBE, ctx)
        best = competing_SBE.topk(self._room(len(routing.experts_SBK)), dim=0).indices
        has_room_SBE = torch.zeros_like(competing_SBE, dtype=torch.bool).scatter_(0, best, True)
        return (own_rows(has_room_SBE, ctx) & (chosen > 0)).gather(-1, routing.experts_SBK)

    def _room(self, rows: int) -> int:
        """Return the most tokens of a sequence that an expert takes. `rows`: those of it on this rank."""
        length = rows * self.ctx.context_size
        if self.ctx.sequence_parallel:
            length *= self.ctx.tensor_size
        if self.capacity is None:
            return length
        return min(length, math.ceil(self.capacity * self.topk * length / self.num_experts))

    def _with_terms(
        self, output: Tensor, routing: Routing, kept_SBK: Tensor | None, is_token_SB: Tensor | None
    ) -> Tensor:
        """Return `output`, whose gradient is joined by that of the router's losses."""
        state = self.ctx.state
        losses: dict[str, Tensor] = {}
        counts_E = self._counts(routing.experts_SBK, is_token_SB)
        state.loads.add(self.layer, counts_E, None if kept_SBK is None else self._num_kept(kept_SBK, is_token_SB))
        if self.balances:
            shares = self._shares(counts_E)
            # E sum_e share_e score_te: its mean over the tokens is E sum_e (share of e) x (mean score of e)
            scores = routing.scores_SBE
            scores = scores / scores.sum(-1, keepdim=True)
            losses["load_balancing_loss"] = self.num_experts * (scores * shares.to(scores.dtype)).sum(-1)
        if self.has_z_loss:
            losses["router_z_loss"] = routing.logits_SBE.logsumexp(-1).square()
        return state.terms.add(output, losses, weights=is_token_SB)

    @torch.no_grad()
    def _counts(self, experts_SBK: Tensor, is_token_SB: Tensor | None) -> Tensor:
        """Return the number of choices of each expert by the tokens of this rank, float32 [E]."""
        weights = torch.ones(experts_SBK.shape, dtype=torch.float32, device=experts_SBK.device)
        if is_token_SB is not None:
            weights = weights * is_token_SB.unsqueeze(-1)
        counts = torch.zeros(self.num_experts, dtype=torch.float32, device=experts_SBK.device)
        return counts.scatter_add_(0, experts_SBK.flatten(), weights.flatten())

    @staticmethod
    def _num_kept(kept_SBK: Tensor, is_token_SB: Tensor | None) -> Tensor:
        """Return the number of choices that are not dropped; padding has none."""
        if is_token_SB is not None:
            kept_SBK = kept_SBK & (is_token_SB > 0).unsqueeze(-1)
        return kept_SBK.sum()

    @torch.no_grad()
    def _shares(self, counts_E: Tensor) -> Tensor:
        """Return each expert's share of the choices of all ranks in this microbatch, [E]. Collective."""
        ctx, counts = self.ctx, counts_E.clone()
        with ctx.state.clock.phase(WAIT):
            if ctx.sequence_parallel:
                ctx.state.checks.gathered(counts)
                dist.all_reduce(counts, group=ctx.tensor_group)
            # in a recheck a wrong count of one replica must not reach the others
            if ctx.grad_group is not None and not ctx.state.is_recheck:
                dist.all_reduce(counts, group=ctx.grad_group)
        return counts / counts.sum().clamp(min=1.0)
