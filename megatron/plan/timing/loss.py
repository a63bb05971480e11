"""Output projection and loss of a microbatch, chunk by chunk as parallel/losses.py computes them, and the embedding."""

from __future__ import annotations

from megatron.parallel.costs import Table
from megatron.parallel.layout import Layout
from megatron.parallel.operators.block_sizes import chunk_size
from megatron.parallel.shards import LayerDeclaration, Shard
from megatron.plan.flops import held_numel
from megatron.plan.loss_memory import adds_to_optimizers_sum
from megatron.plan.microbatch import BYTES, MicrobatchSizes
from megatron.plan.timing.linears import LinearWork, Passes, add_sums
from megatron.plan.timing.operations import AxisExchange, LinearProduct, Move, Pointwise, Work
from megatron.plan.zero import adds_in_float32
from megatron.tasks.objective import CrossEntropy


def projection_passes(
    layer: LayerDeclaration, sizes: MicrobatchSizes, layout: Layout, *, propagates: bool, objective: object
) -> Passes:
    """Return the work of the output projection with the loss. Without gradients it is `forward_only`."""
    passes = Passes.empty()
    return _Projection(layer, sizes, layout, passes, propagates=propagates, objective=objective).passes()


def forward_only(layer: LayerDeclaration, sizes: MicrobatchSizes, layout: Layout, objective: object) -> Work:
    """Return the logits and log-probabilities of a pass without gradients."""
    passes = Passes.empty()
    _Projection(layer, sizes, layout, passes, propagates=False, objective=objective).logits(passes.forward)
    return passes.forward


class _Projection:
    def __init__(
        self,
        layer: LayerDeclaration,
        sizes: MicrobatchSizes,
        layout: Layout,
        passes: Passes,
        *,
        propagates: bool,
        objective: object,
    ) -> None:
        self._layer, self._sizes, self._layout, self._result = layer, sizes, layout, passes
        self._propagates, self._objective = propagates, objective
        self._precision = sizes.config.training.precision
        self._weight = next(shard for shard in layer.shards.values() if shard.vocabulary and not shard.added)
        self._rows = self._weight.local_shape(layout.tensor_size)[0]
        self._hidden = self._weight.shape[1]
        self._adapter = sum(s.shape[0] for n, s in layer.shards.items() if n.startswith("lora_A") and s.added)
        self._added = [s for n, s in layer.shards.items() if s.added and not n.startswith("lora_embedding")]
        chunk = chunk_size(sizes.tokens, self._hidden)
        self._chunks = max(1, -(-sizes.tokens // chunk))
        self._tokens = sizes.tokens / self._chunks

    def passes(self) -> Passes:
        result, precision, sizes = self._result, self._precision, self._sizes
        self.logits(result.forward)
        is_trained = self._weight.trained
        if not (self._propagates or is_trained or self._added):
            return result
        # several chunks compute their gradients while their logits are there, in the forward pass
        is_one, is_sum = self._chunks == 1, isinstance(self._objective, CrossEntropy)
        gradients = result.input
        if not is_one and (is_sum or not is_trained):
            gradients = result.forward
        elif not is_one:
            self._logits_again(gradients)
        gradients.add(Pointwise("cross_entropy", "backward", precision, self._tokens * self._rows), self._chunks)
        if self._propagates:
            gradients.add(LinearProduct(precision, "input", self._tokens, self._rows, self._hidden), self._chunks)
        if is_trained:
            gradients.add(LinearProduct(precision, "weight", self._tokens, self._rows, self._hidden), self._chunks)
        if self._adapter:
            gradients.add(LinearProduct(precision, "input", self._tokens, self._rows, self._adapter), self._chunks)
            gradients.add(LinearProduct(precision, "weight", self._tokens, self._rows, self._adapter), self._chunks)
            result.input.add(LinearProduct(precision, "input", sizes.own_tokens, self._adapter, self._hidden))
            result.input.add(LinearProduct(precision, "weight", sizes.own_tokens, self._adapter, self._hidden))
        self._scale(is_trained=is_trained, is_one=is_one)
        trained = [shard for shard in self._added if shard.trained]
        add_sums(result.weight, trained, sizes, self._layout)
        return result

    def logits(self, forward: Work) -> None:
        """Add the logits of all chunks and their softmax."""
        precision, sizes = self._precision, self._sizes
        if self._adapter:
            forward.add(LinearProduct(precision, "forward", sizes.own_tokens, self._adapter, self._hidden))
        if self._layout.tensor_size > 1:
            LinearWork(sizes, self._layout, self._result).enter(forward, sizes.tokens, self._hidden + self._adapter)
            # sums of the rows of each chunk, of three numbers a token
            size = 3 * self._tokens * BYTES["fp32"] * self._layout.tensor_size
            forward.add(AxisExchange("all_gather", size, "tensor"), self._chunks)
        self._logits_again(forward)

    def _logits_again(self, work: Work) -> None:
        precision = self._precision
        work.add(LinearProduct(precision, "forward", self._tokens, self._rows, self._hidden), self._chunks)
        if self._adapter:
            work.add(LinearProduct(precision, "forward", self._tokens, self._rows, self._adapter), self._chunks)
        work.add(Pointwise("cross_entropy", "forward", precision, self._tokens * self._rows), self._chunks)
        if self._sizes.config.model.logits_softcap is not None:
            # the cap and its slope, each a pass over the logits
            work.add(Pointwise("gelu", "forward", precision, self._tokens * self._rows), self._chunks)

    def _scale(self, *, is_trained: bool, is_one: bool) -> None:
        """Add what is done to the gradients once they are complete."""
        result, precision, sizes = self._result, self._precision, self._sizes
        numbers = self._rows * self._hidden
        in_place = is_trained and adds_to_optimizers_sum(sizes.config)
        if not is_one and self._propagates:
            result.input.add(Pointwise("cast", "forward", precision, sizes.tokens * self._hidden))
        if is_trained and not is_one and not in_place:
            result.input.add(Pointwise("cast", "forward", precision, numbers))
        if is_trained and in_place and not adds_in_float32(sizes.config):
            # without a product that adds, each chunk's is added by itself
            result.forward.add(Pointwise("accumulate", "forward", precision, numbers), self._chunks)
        if is_trained and not in_place:
            result.weight.add(Pointwise("accumulate", "forward", precision, numbers))


def table_passes(name: str, shard: Shard, layer: LayerDeclaration, sizes: MicrobatchSizes, layout: Layout) -> Passes:
    """Return the work of a table whose rows are read by number: the vocabulary's, or that of positions."""
    assert isinstance(shard.cost, Table), name
    passes, precision = Passes.empty(), sizes.config.training.precision
    if not shard.vocabulary:
        # its rows are added to the stream, and their gradients summed over the batch
        numbers = sizes.own_tokens * shard.shape[1]
        passes.forward.add(Pointwise("residual", "forward", precision, numbers))
        if shard.trained:
            passes.weight.add(Pointwise("residual", "backward", precision, numbers))
            add_sums(passes.weight, [shard], sizes, layout)
        return passes
    hidden = shard.shape[1]
    numbers = sizes.tokens * hidden
    passes.forward.add(Pointwise("embedding", "forward", precision, numbers))
    if layout.tensor_size > 1:
        LinearWork(sizes, layout, passes).leave(passes.forward, sizes.tokens, hidden)
    if rank := sum(s.shape[0] for n, s in layer.shards.items() if n == "lora_embedding_A"):
        passes.forward.add(LinearProduct(precision, "forward", sizes.tokens, hidden, rank))
        passes.input.add(LinearProduct(precision, "input", sizes.tokens, hidden, rank))
        passes.input.add(LinearProduct(precision, "weight", sizes.tokens, hidden, rank))
        own = [s for n, s in layer.shards.items() if n.startswith("lora_embedding") and s.trained]
        add_sums(passes.weight, own, sizes, layout)
    if shard.trained:
        passes.input.add(Pointwise("embedding", "backward", precision, numbers))
        if not adds_in_float32(sizes.config):
            # autograd's gradient is a whole table, of zeros but for the rows that were read
            passes.input.add(Move(held_numel(shard, layout) * sizes.number_bytes / 2))
            add_sums(passes.weight, [shard], sizes, layout)
    return passes
