"""Operations of one microbatch in a declared layer on one rank: forward, recomputed, and gradients.

They are those of models/transformer.py and models/attention/, read from the declared shards and their costs.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron.models.attention.exchange_choice import exchange_of
from megatron.parallel.costs import Activation, Attention, MatrixProduct, Norm, Projection, Router, Table
from megatron.parallel.layout import Layout
from megatron.parallel.shards import LayerDeclaration
from megatron.plan.attention_core import AttentionCore
from megatron.plan.microbatch import BYTES, MicrobatchSizes
from megatron.plan.rates.rates import Direction
from megatron.plan.timing.experts import ExpertsWork, activation_numbers
from megatron.plan.timing.linears import LinearLayer, LinearWork, Passes, add_sums, linear_layers
from megatron.plan.timing.loss import projection_passes, table_passes
from megatron.plan.timing.operations import (
    AxisExchange,
    CoreAttention,
    Hidden,
    LinearProduct,
    Operation,
    Pointwise,
    Work,
)

TIMED = (Norm, MatrixProduct, Router, Table, Projection)
"""The kinds of declared costs that are timed here."""
DROPOUT_IN_FLEX: dict[Direction, float] = {"forward": 0.92, "backward": 1.06}
"""Time that dropout adds to flex_attention, as a share of that without: a hash of each score, and a second pass.

Measured on an H200 in a step of Bloom 1.7B: 4,096 tokens, heads of 128 channels. See attention/flex.py.
"""


def layer_passes(
    layer: LayerDeclaration, sizes: MicrobatchSizes, layout: Layout, *, propagates: bool, objective: object
) -> Passes:
    """Return the operations of a layer. Raises TypeError for a cost of an unknown kind.

    `propagates`: a parameter of this layer, or of one before it, is trained, so that a gradient passes through it.
    """
    for name, shard in layer.shards.items():
        if shard.cost is not None and not isinstance(shard.cost, TIMED):
            raise TypeError(f"{layer.full_name(name)}: no time is known of {type(shard.cost).__name__}; add it here")
    if layer.projects:
        return projection_passes(layer, sizes, layout, propagates=propagates, objective=objective)
    if layer.number is not None:
        passes = _TransformerLayer(layer, sizes, layout).passes
    else:
        passes = _other_layer(layer, sizes, layout)
    if propagates:
        return passes
    # the backward pass ends behind it
    return Passes(passes.forward, Work(), Work(), Work())


class _TransformerLayer:
    def __init__(self, layer: LayerDeclaration, sizes: MicrobatchSizes, layout: Layout) -> None:
        self._layer, self._sizes, self._layout = layer, sizes, layout
        self._precision = sizes.config.training.precision
        self.passes = Passes.empty()
        self._linear_work = LinearWork(sizes, layout, self.passes)
        linears = list(linear_layers(layer, sizes.config))
        self._whole = [linear for linear in linears if linear.weight.expert is None]
        self._of_expert = [linear for linear in linears if linear.weight.expert is not None]
        self._norms = norms_work(layer, sizes, self.passes)
        attention = self._attention()
        mlp = self._mlp()
        _small_sums(layer, sizes, layout, self.passes)
        residual(layer, sizes, self.passes)
        self._recompute(attention, mlp)

    # Attention

    def _attention(self) -> Work:
        work = Work()
        self._core_work = Work()
        for linear in self._whole:
            if linear.cost.part == "attention":
                if isinstance(linear.cost.reads, Attention):
                    self._add_core(linear.cost.reads)
                work.extend(self._linear_work.add(linear, self._sizes.tokens))
        work.extend(head_norms(self._layer, self._sizes, self._layout, self.passes))
        work.extend(self._core_work)
        return work

    def _add_core(self, declared: Attention) -> None:
        sizes, forward = self._sizes, self._core_work
        core = AttentionCore(declared, sizes)
        self._gather_heads(declared, core, forward)
        model = sizes.config.model
        if model.position_embedding_type == "rope":
            numbers = sizes.tokens * (core.query_channels + core.key_channels) * model.rotary_percent
            forward.add(Pointwise("rotary", "forward", self._precision, numbers))
            self.passes.input.add(Pointwise("rotary", "backward", self._precision, numbers))
        exchanged = exchange_of(sizes.config, sizes.device, declared.window) if sizes.context_size > 1 else None
        heads, kv_heads = float(core.heads), float(core.key_channels // declared.head_size)
        rows = float(sizes.config.training.micro_batch_size)
        kind, share = core_kind(core)
        if exchanged == "ring":
            # of the pairs of whole rows each rank has an equal share
            share /= sizes.context_size
        elif exchanged is not None:
            heads /= sizes.context_size
            kv_heads = max(1.0, kv_heads / sizes.context_size)
        length, size = sizes.data.row_length, declared.head_size
        directions: list[tuple[Direction, Work]] = [("forward", forward), ("backward", self.passes.input)]
        for direction, work in directions:
            attended = CoreAttention(self._precision, direction, rows, length, heads, kv_heads, size, kind, share)
            work.add(attended, 1 + DROPOUT_IN_FLEX[direction] if core.drops_in_flex else 1)
            if declared.is_capped and sizes.device.is_host:
                # passes over the scores that a CPU's kernels have not; elsewhere they are within the kernel
                scores = rows * heads * length * (length + 1) / 2 * share
                work.add(Pointwise("gelu", direction, self._precision, scores))
            if exchanged is not None:
                self._exchange(declared, exchanged, attended, work, is_backward=direction == "backward")
        self.passes.forward.extend(forward)
        self._record_logits(declared, core)

    def _record_logits(self, declared: Attention, core: AttentionCore) -> None:
        """One of the core's two products again, in float32: models/attention/block_kernels.py."""
        sizes, above = self._sizes, self._sizes.config.records_logits_above
        if above is None:
            return
        kv_heads = core.key_channels / declared.head_size
        if sizes.context_size > 1:
            keys = sizes.tokens * core.key_channels * sizes.context_size * sizes.number_bytes
            self.passes.forward.add(AxisExchange("all_gather", keys, "context"))
        # a CPU computes them where a bound exceeds the threshold, which is rare
        if sizes.device.is_host and above > 0.0:
            return
        kind, share = core_kind(core)
        share /= sizes.context_size  # of its own queries
        rows, length = float(sizes.config.training.micro_batch_size), sizes.data.row_length
        attended = CoreAttention(
            "fp32", "forward", rows, length, float(core.heads), kv_heads, declared.head_size, kind, share
        )
        self.passes.forward.add(attended, 0.5)

    def _gather_heads(self, declared: Attention, core: AttentionCore, forward: Work) -> None:
        """Fewer key/value heads than tensor-parallel ranks are gathered."""
        if declared.num_kv_heads >= self._layout.tensor_size:
            return
        size = self._sizes.tokens * declared.num_kv_heads * declared.head_size * self._sizes.number_bytes
        forward.add(AxisExchange("all_gather", size, "tensor"), 2)
        self.passes.input.add(AxisExchange("reduce_scatter", size, "tensor"), 2)

    def _exchange(
        self, declared: Attention, exchange: str, attended: Operation, work: Work, *, is_backward: bool
    ) -> None:
        sizes, ranks = self._sizes, (self._sizes.tensor_size, self._sizes.context_size)
        if exchange == "ring":
            # keys and values, and in the backward pass their gradients too, in as many messages
            sent = declared.ring_exchanged(*ranks, sizes.data.row_length) / 3 * (2 if is_backward else 1)
            steps = (sizes.context_size - 1) * (2 if is_backward else 1)
            message = AxisExchange("send", sent * sizes.tokens * sizes.number_bytes / steps, "context")
            work.add(Hidden((message,) * steps, (attended,)))
            return
        # queries, keys and values one way, the context the other
        sent = declared.heads_exchanged(*ranks) / 2 * sizes.context_size / (sizes.context_size - 1)
        work.add(AxisExchange("all_to_all", sent / 2 * sizes.tokens * sizes.number_bytes, "context"), 2)

    # MLP

    def _mlp(self) -> Work:
        work = Work()
        self._activations = Work()
        for linear in self._whole:
            if linear.cost.part != "mlp":
                continue
            if isinstance(linear.cost.reads, Activation):
                kind, numbers = activation_numbers(linear, linear.cost.reads, self._layout.tensor_size)
                numbers *= self._sizes.tokens
                self._activations.add(Pointwise(kind, "forward", self._precision, numbers))
                self.passes.input.add(Pointwise(kind, "backward", self._precision, numbers))
            work.extend(self._linear_work.add(linear, self._sizes.tokens))
        self.passes.forward.extend(self._activations)
        work.extend(self._activations)
        experts = ExpertsWork(self._layer, self._sizes, self._layout, self.passes)
        if experts.exist:
            work.extend(experts.add(self._of_expert))
        return work

    # Recomputation

    def _recompute(self, attention: Work, mlp: Work) -> None:
        training, again = self._sizes.config.training, self.passes.recomputed
        modules = training.recomputed_modules
        # torch's checkpoint stops once it has what the backward pass reads: what follows the last such operation is
        # not computed again
        without_end = _without_end(mlp, self._last_product())
        if training.recompute_granularity == "full":
            again.extend(self._norms)
            again.extend(attention)
            again.extend(mlp if self._reads_outputs() else without_end)
            if self._reads_outputs():
                residual_of(self._sizes, again, self._layer.dropouts - 1)
            else:
                residual_of(self._sizes, again, max(0, self._layer.dropouts - 2))
            return
        if "core_attn" in modules:
            again.extend(self._core_work)
        if "mlp" in modules:
            again.extend(without_end)
        elif "mlp_act" in modules:
            again.extend(self._activations)
            for each in self._expert_activations():
                again.add(each)
        if "layernorm" in modules:
            again.extend(self._norms)

    def _expert_activations(self) -> Sequence[Operation]:
        experts = ExpertsWork(self._layer, self._sizes, self._layout, Passes.empty())
        if not experts.exist:
            return ()
        return experts.activations(self._of_expert).computed()

    def _last_product(self) -> LinearLayer | None:
        """Return the linear layer that ends the MLP; None: something else does."""
        has_experts = bool(self._of_expert)
        ends = [linear for linear in self._whole if linear.cost.part == "mlp" and not linear.is_column]
        if has_experts or not ends:
            return None
        return ends[-1]

    def _reads_outputs(self) -> bool:
        """The backward pass reads what follows the MLP: a dropout's mask, or the input of a norm."""
        norms_outputs = any(name.startswith("mlp_output_norm") for name in self._layer.shards)
        return self._sizes.config.model.hidden_dropout > 0 or norms_outputs


def _without_end(mlp: Work, last: LinearLayer | None) -> Work:
    """Return the work of an MLP up to the input of its last product, which torch's own linear keeps before it runs."""
    if last is None or last.added or last.weight.quantized:
        return mlp
    items = list(mlp.items)
    # the products come in the order of the layers, and what follows the last one with it
    place = max(index for index, (each, _) in enumerate(items) if isinstance(each, LinearProduct))
    ends = [item for item in items[place:] if not isinstance(item[0], AxisExchange | LinearProduct)]
    return Work([*items[:place], *ends])


def core_kind(core: AttentionCore) -> tuple[str, float]:
    """Return the kind of kernel that attends, and the share of the scores of the causal half that tokens see."""
    declared, sizes = core.declared, core.sizes
    model, length = sizes.config.model, sizes.data.row_length
    seen = 2 * declared.seen(length) / (length * (length + 1))
    if model.attention_dropout > 0 and not core.drops_in_flex:
        return "dropout", seen
    if declared.window is not None and declared.window < length:
        return "window", seen
    if model.position_embedding_type == "alibi":
        return "alibi", seen
    return "causal", seen


# Parts that layers have in common


def norms_work(layer: LayerDeclaration, sizes: MicrobatchSizes, passes: Passes) -> Work:
    """Add the norms over the residual stream; return their forward part."""
    forward, precision = Work(), sizes.config.training.precision
    for shard in layer.shards.values():
        if not isinstance(shard.cost, Norm) or shard.used_on != "stream":
            continue
        kind, numbers = "rmsnorm" if shard.cost.is_rms else "layernorm", sizes.own_tokens * shard.cost.channels
        forward.add(Pointwise(kind, "forward", precision, numbers))
        passes.input.add(Pointwise(kind, "backward", precision, numbers))
    passes.forward.extend(forward)
    return forward


def head_norms(layer: LayerDeclaration, sizes: MicrobatchSizes, layout: Layout, passes: Passes) -> Work:
    """Add the norms over the heads of queries and keys; return their forward part."""
    forward, precision = Work(), sizes.config.training.precision
    for shard in layer.shards.values():
        if not isinstance(shard.cost, Norm) or shard.used_on == "stream":
            continue
        numbers = sizes.tokens * shard.cost.channels / layout.tensor_size
        forward.add(Pointwise("head_norm", "forward", precision, numbers))
        passes.input.add(Pointwise("head_norm", "backward", precision, numbers))
        if shard.dim == 0 and layout.tensor_size > 1:
            # of all heads together: their squares are summed over the ranks
            summed = AxisExchange("all_reduce", sizes.tokens * BYTES["fp32"], "tensor")
            forward.add(summed)
            passes.input.add(summed)
    passes.forward.extend(forward)
    return forward


def residual(layer: LayerDeclaration, sizes: MicrobatchSizes, passes: Passes) -> None:
    """Add what adds the branches of a layer to the stream."""
    residual_of(sizes, passes.forward, layer.dropouts)
    residual_of(sizes, passes.input, layer.dropouts, is_backward=True)


def residual_of(sizes: MicrobatchSizes, work: Work, count: int, *, is_backward: bool = False) -> None:
    model = sizes.config.model
    kind = "residual_dropout" if model.hidden_dropout > 0 else "residual"
    numbers = sizes.own_tokens * model.hidden_size
    direction: Direction = "backward" if is_backward else "forward"
    work.add(Pointwise(kind, direction, sizes.config.training.precision, numbers), count)


def _small_sums(layer: LayerDeclaration, sizes: MicrobatchSizes, layout: Layout, passes: Passes) -> None:
    """Add the gradients of norms, and of whatever else no product or table counts, to their sums."""
    counted = {
        _module(name)
        for name, shard in layer.shards.items()
        if shard.cost is not None and not isinstance(shard.cost, Norm)
    }
    trained = [
        shard
        for name, shard in layer.shards.items()
        if shard.trained and not shard.added and _module(name) not in counted
    ]
    add_sums(passes.weight, trained, sizes, layout)


def _module(name: str) -> str:
    """Return the module of a parameter, which a weight and its bias share."""
    return name.rpartition(".")[0]


def _other_layer(layer: LayerDeclaration, sizes: MicrobatchSizes, layout: Layout) -> Passes:
    """Embedding, its output, and the final norm."""
    passes = Passes.empty()
    norms_work(layer, sizes, passes)
    for name, shard in layer.shards.items():
        if isinstance(shard.cost, Table):
            table = table_passes(name, shard, layer, sizes, layout)
            passes.forward.extend(table.forward)
            passes.input.extend(table.input)
            passes.weight.extend(table.weight)
    _small_sums(layer, sizes, layout, passes)
    if sizes.config.model.hidden_dropout > 0:
        residual(layer, sizes, passes)
    return passes
