"""Router and experts of a layer in a pass, all experts used alike: models/experts.py, parallel/expert_exchange.py."""

from __future__ import annotations

import math
from collections.abc import Sequence

from megatron.parallel.costs import Activation, Router
from megatron.parallel.layout import Layout
from megatron.parallel.shards import LayerDeclaration, Shard
from megatron.plan.microbatch import BYTES, MicrobatchSizes
from megatron.plan.rates.rates import Direction
from megatron.plan.timing.linears import LinearLayer, LinearWork, Passes, add_sums
from megatron.plan.timing.operations import AxisExchange, LinearProduct, Pointwise, Work

FLOAT32, INT64 = BYTES["fp32"], 8


class ExpertsWork:
    """Adds a router and its experts to the passes of a layer."""

    def __init__(self, layer: LayerDeclaration, sizes: MicrobatchSizes, layout: Layout, passes: Passes) -> None:
        self._layer, self._sizes, self._layout, self._passes = layer, sizes, layout, passes
        self._model, self._precision = sizes.config.model, sizes.config.training.precision
        shards = layer.shards.values()
        self._router = next((shard for shard in shards if isinstance(shard.cost, Router)), None)
        self._is_trained = any(shard.trained for shard in shards if shard.expert is not None)
        tokens = sizes.tokens
        if layout.experts_are_whole:
            # each tensor-parallel rank sends its own share
            tokens = -(-tokens // layout.tensor_size)
        self._tokens = tokens

    @property
    def exist(self) -> bool:
        return self._router is not None

    def add(self, linears: Sequence[LinearLayer]) -> Work:
        """Add all of it; `linears`: those of one expert. Return the forward part, which a recomputation does again."""
        forward = Work()
        assert self._router is not None
        self._route(self._router, forward)
        if not self._layout.experts_are_whole:
            self._enter_region(forward)
        elif self._layout.tensor_size > 1 and not self._sizes.config.parallel.sequence_parallel:
            # each rank takes its own share of what all hold, and they gather the outputs
            shared = AxisExchange("all_gather", self._stream_bytes(self._sizes.tokens), "tensor")
            forward.add(shared)
            self._passes.input.add(shared)
        self._dispatch(forward)
        per_expert, count = self._of_one_expert()
        for linear in linears:
            added = Passes.empty()
            work = LinearWork(self._sizes, self._layout, added)
            forward.extend(work.add(linear, per_expert, count, inside_experts=True))
            self._passes.input.extend(added.input)
            self._passes.weight.extend(added.weight)
        forward.extend(self.activations(linears))
        if not self._layout.experts_are_whole and self._layout.tensor_size > 1:
            LinearWork(self._sizes, self._layout, self._passes).leave(
                forward, self._sizes.tokens, self._model.hidden_size
            )
        self._passes.forward.extend(forward)
        return forward

    def activations(self, linears: Sequence[LinearLayer]) -> Work:
        """Add the gradients of the experts' activations; return these themselves."""
        forward = Work()
        per_expert, count = self._of_one_expert()
        for linear in linears:
            if not isinstance(linear.cost.reads, Activation):
                continue
            kind, numbers = activation_numbers(linear, linear.cost.reads, self._layout.expert_tensor_size)
            forward.add(Pointwise(kind, "forward", self._precision, per_expert * count * numbers))
            self._passes.input.add(Pointwise(kind, "backward", self._precision, per_expert * count * numbers))
        return forward

    def _route(self, router: Shard, forward: Work) -> None:
        """Scores in float32 of a rank's own rows of the stream, and the choices."""
        sizes, (num_experts, hidden), passes = self._sizes, router.shape, self._passes
        if sizes.is_16_bit:
            cast = Pointwise("cast", "forward", self._precision, sizes.own_tokens * hidden)
            forward.add(cast)
            passes.input.add(cast)
        forward.add(LinearProduct("fp32", "forward", sizes.own_tokens, num_experts, hidden))
        forward.add(Pointwise("router", "forward", "fp32", sizes.own_tokens * num_experts))
        passes.input.add(Pointwise("router", "backward", "fp32", sizes.own_tokens * num_experts))
        passes.input.add(LinearProduct("fp32", "input", sizes.own_tokens, num_experts, hidden))
        if router.trained:
            passes.input.add(LinearProduct("fp32", "weight", sizes.own_tokens, num_experts, hidden))
            add_sums(passes.weight, [router], sizes, self._layout)
        if self._model.moe_aux_loss_coeff > 0:
            # shares of the choices of all ranks in this microbatch
            counts = num_experts * FLOAT32
            if sizes.config.parallel.sequence_parallel and self._layout.tensor_size > 1:
                forward.add(AxisExchange("all_reduce", counts, "tensor"))
            forward.add(AxisExchange("all_reduce", counts, "grad"))

    def _enter_region(self, forward: Work) -> None:
        if self._layout.tensor_size == 1:
            return
        linear, topk = LinearWork(self._sizes, self._layout, self._passes), self._model.moe_router_topk
        linear.enter(forward, self._sizes.tokens, self._model.hidden_size)
        # weights of the choices, and under sequence parallelism the choices
        linear.enter(forward, self._sizes.tokens, topk, FLOAT32)
        if self._sizes.config.parallel.sequence_parallel:
            forward.add(AxisExchange("all_gather", self._sizes.tokens * topk * INT64, "tensor"))

    def _dispatch(self, forward: Work) -> None:
        """Sort the tokens by expert, send them there and back, and add up the outputs."""
        passes, layout = self._passes, self._layout
        moved = self._moved
        directions: list[tuple[Direction, Work]] = [("forward", forward), ("backward", passes.input)]
        for direction, work in directions:
            # there, and back
            work.add(Pointwise("dispatch", direction, self._precision, moved * self._model.hidden_size), 2)
            if layout.expert_size > 1 and (direction == "forward" or self._is_trained):
                work.add(AxisExchange("all_to_all", self._stream_bytes(moved), "expert"), 2)
        if layout.expert_size > 1 and not self._sizes.device.static_experts:
            # numbers of tokens for each expert
            forward.add(AxisExchange("all_to_all", (self._model.num_experts or 1) * INT64, "expert"))

    @property
    def _moved(self) -> float:
        """Rows that a rank sends to experts: choices, or where no router decides a size more."""
        if not self._sizes.device.static_experts:
            return self._tokens * self._model.moe_router_topk
        if self._model.moe_expert_capacity_factor is None:
            # all tokens to each rank
            return self._tokens * self._layout.expert_size
        return self._slots * (self._model.num_experts or 1)

    @property
    def _slots(self) -> float:
        """Slots of an expert for the tokens of a rank."""
        model = self._model
        assert model.moe_expert_capacity_factor is not None
        share = model.moe_expert_capacity_factor * model.moe_router_topk / (model.num_experts or 1)
        return min(self._tokens, math.ceil(share * self._tokens))

    def _of_one_expert(self) -> tuple[float, float]:
        """Return the tokens of one expert of this rank, and the number of its experts."""
        model, size = self._model, self._layout.expert_size
        count = (model.num_experts or 1) / size
        if not self._sizes.device.static_experts:
            return max(1.0, self._tokens * model.moe_router_topk * size / (model.num_experts or 1)), count
        if model.moe_expert_capacity_factor is None:
            return self._tokens * size, count
        return self._slots * size, count

    def _stream_bytes(self, rows: float) -> float:
        return rows * self._model.hidden_size * self._sizes.number_bytes


def activation_numbers(linear: LinearLayer, activation: Activation, cut: int) -> tuple[str, int]:
    """Return the kind of an activation, and the numbers that it reads for a token on one of `cut` ranks."""
    inputs = linear.weight.shape[1] // cut
    if activation.is_gated:
        return "swiglu", 2 * inputs
    return "gelu", inputs
