"""Memory and messages of attention whose rows lie on several context-parallel ranks, by the exchange between them.

Sizes are of one rank and one microbatch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from megatron.models.attention.exchange_choice import Exchange, exchange_of
from megatron.parallel.costs import Attention, MatrixProduct
from megatron.parallel.operators.block_sizes import ATTENTION_QUERIES, DEVICE_SCORES
from megatron.parallel.shards import LayerDeclaration
from megatron.plan.attention_core import FLOAT32, AttentionCore
from megatron.plan.microbatch import MicrobatchSizes

HOST_KEYS = 512
"""Keys of the scores that torch's kernel on a CPU holds at once."""
HOST_QUERIES = ((768, 256), (192, 64), (0, 32))
"""Queries of them, by the least number of queries that it is given."""


class RingBlock(NamedTuple):
    """A block of scores in a ring: numbers of its rows in each sample."""

    queries: int
    keys: int
    is_own: bool
    """The keys are this rank's own."""


def attention_core(declared: Attention, sizes: MicrobatchSizes) -> AttentionCore:
    """Return the core of an attention, as its layer computes it."""
    if sizes.context_size == 1:
        return AttentionCore(declared, sizes)
    if exchange_of(sizes.config, sizes.device, declared.window) == "ring":
        return RingCore(declared, sizes)
    return HeadsCore(declared, sizes)


class RingCore(AttentionCore):
    """Keys and values travel (megatron/models/attention/ring.py): own rows with all heads."""

    @property
    def is_blockwise(self) -> bool:
        return False

    @property
    def stores_scores(self) -> bool:
        return False

    @property
    def keeps_projection(self) -> bool:
        return True

    def kept_bytes(self, *, is_read: bool) -> int:
        # q, k and v; v is a view of the fused projection, all of which it keeps, as are q and k unless they are rotated
        channels = self.query_channels + 2 * self.key_channels
        if self.sizes.config.model.position_embedding_type == "rope":
            channels += self.query_channels + self.key_channels
        return self.sizes.tokens * channels * self.sizes.number_bytes + self.output_bytes + self.statistics_bytes

    @property
    def backward_bytes(self) -> int:
        query, keys, number_bytes = self.query_channels, 2 * self.key_channels, self.sizes.number_bytes
        # the gradient of the output, and float32 sums of those of q, k and v
        always = query * number_bytes + (query + keys) * FLOAT32
        if self.sizes.widens_products:
            always += (3 * query + keys) * FLOAT32  # that gradient, the output, q, k and v
        # the keys and values that go and that come
        message = 2 * keys * number_bytes
        # those that came, and their gradients
        came = keys * (number_bytes + FLOAT32)
        if self.sizes.widens_products:
            came += keys * FLOAT32
        if self.sizes.context_size > 2:
            came += message
        own, theirs = self._blocks
        of_own, of_theirs = self._of_kernel(own), self._of_kernel(theirs)
        # the gradients of the block before it are there until its own are
        of_theirs += self._gradients(own)
        if not self._joins_blocks:
            of_own += self._gradients(own)
        of_own += self.sizes.tokens * message
        of_theirs += self.sizes.tokens * came
        of_answer = self._gradients(theirs) + self.sizes.tokens * (came + self._answer_bytes)
        return self.sizes.tokens * always + max(of_own, of_theirs, of_answer)

    @property
    def _answer_bytes(self) -> int:
        """Bytes a token of the gradients that go back, rounded; the check that they are finite copies them on a CPU."""
        keys = 2 * self.key_channels
        if not self.sizes.is_16_bit:
            return 0
        if not self.sizes.device.is_host:
            return keys * self.sizes.number_bytes
        return keys * (self.sizes.number_bytes + FLOAT32)

    @property
    def _blocks(self) -> tuple[RingBlock, RingBlock]:
        """The largest block of own keys, and of keys that came (models/attention/ring_plan.py)."""
        rows = self.sizes.data.row_length // self.sizes.context_size
        if self._joins_blocks:
            # half of the queries see all that came
            return RingBlock(rows, rows, is_own=True), RingBlock(rows // 2, rows, is_own=False)
        return RingBlock(rows // 2, rows // 2, is_own=True), RingBlock(rows // 2, rows // 2, is_own=False)

    @property
    def _joins_blocks(self) -> bool:
        """No score depends on places, by which a rank's rows are two chunks."""
        has_slopes = self.sizes.config.model.position_embedding_type == "alibi"
        return not has_slopes and not self.sizes.data.packs_documents and self.declared.window is None

    @property
    def _kernel_number_bytes(self) -> int:
        """Bytes of a number that a kernel of blocks reads, and of most that it returns."""
        return FLOAT32 if self.sizes.widens_products else self.sizes.number_bytes

    def _numbers(self, block: RingBlock) -> tuple[int, int]:
        """Return the numbers of a block's queries, and of its keys and values."""
        samples = self.sizes.config.training.micro_batch_size
        return samples * block.queries * self.query_channels, samples * block.keys * 2 * self.key_channels

    def _gradients(self, block: RingBlock) -> int:
        """Return the bytes of what a kernel of blocks returns: the gradients of q, k and v."""
        query, keys = self._numbers(block)
        key_bytes = FLOAT32 if self._has_products else self._kernel_number_bytes
        return query * self._kernel_number_bytes + keys * key_bytes

    def _of_kernel(self, block: RingBlock) -> int:
        """Return what a kernel of blocks takes (block_kernels.py): gradients, copies of what it reads, some scores."""
        query, keys = self._numbers(block)
        samples, number_bytes = self.sizes.config.training.micro_batch_size, self._kernel_number_bytes
        rounds = self.sizes.is_16_bit and not self.sizes.widens_products
        copied = 0
        if self._has_products:
            copied += keys // 2 * FLOAT32  # a product, before it is added to a gradient
            if rounds:
                copied += keys * FLOAT32  # transposed
            if block.is_own and samples > 1 and not self.sizes.widens_products:
                copied += keys * number_bytes  # views of the fused projection, whose samples lie apart
        elif self.sizes.device.is_host and samples > 1:
            # torch's kernel copies the output's gradient, which by token is contiguous for one sample alone
            copied += query * number_bytes
        elif not self.sizes.device.is_host:
            # contiguous gradient and output, and key/value gradients of all heads before those of a group are added
            copied += 2 * query * number_bytes
            if self.key_channels < self.query_channels:
                copied += 2 * query * number_bytes
        score_bytes = FLOAT32 + (self.sizes.number_bytes if rounds else 0)
        return self._gradients(block) + copied + 2 * score_bytes * self._scores_at_once(block)

    @property
    def _has_products(self) -> bool:
        """Blocks are computed by products of matrices, tile by tile, not by a fused kernel."""
        sizes, model = self.sizes, self.sizes.config.model
        is_plain = model.kernels == "plain" or model.position_embedding_type == "alibi" or self.declared.is_capped
        if is_plain or self.declared.window is not None:
            return True
        return not (sizes.device.is_host or (sizes.device.has_flash_attention and sizes.is_16_bit))

    def _scores_at_once(self, block: RingBlock) -> int:
        """Return the number of scores of a tile; beside them is their gradient, and both are rounded."""
        sizes = self.sizes
        if not self._has_products:
            if not sizes.device.is_host:
                return 0
            queries = next(queries for least, queries in HOST_QUERIES if block.queries >= least)
            return min(queries, block.queries) * min(HOST_KEYS, block.keys)
        of_query = sizes.config.training.micro_batch_size * self.heads * block.keys
        tile = of_query * ATTENTION_QUERIES
        if not sizes.device.is_host:
            tile = max(tile, DEVICE_SCORES)
        return min(tile, of_query * block.queries)


class HeadsCore(AttentionCore):
    """Heads for places (megatron/models/attention/head_exchange.py): whole rows with a share of the heads."""

    @property
    def key_channels(self) -> int:
        """Channels of k, or of v, with repeated heads: as if this rank had all heads for its own tokens."""
        heads = super().key_channels // self.declared.head_size
        return math.lcm(heads, self.sizes.context_size) * self.declared.head_size

    @property
    def keeps_projection(self) -> bool:
        return False

    @property
    def _input_channels(self) -> int:
        # all that came is one tensor, of which q, k and v are views
        return self.query_channels + 2 * self.key_channels

    def kept_bytes(self, *, is_read: bool) -> int:
        # the output of whole rows, and what is exchanged for it
        return super().kept_bytes(is_read=False) + (self.output_bytes if is_read else 0)

    @property
    def backward_bytes(self) -> int:
        sizes = self.sizes
        # gradients of whole rows, the message, what came and its copies, less the inputs and the output of the kernel
        exchanged = (4 - 1) * self._input_channels
        if not self.is_blockwise:
            exchanged -= self.query_channels
        return max(sizes.tokens * exchanged * sizes.number_bytes, super().backward_bytes)


class Sent(NamedTuple):
    """Bytes that a rank sends to those that share its rows, in the passes of one microbatch through one layer."""

    exchange: Exchange
    """The one of this layer."""
    by_exchange: dict[Exchange, int]
    """Those of each exchange that the layer could have."""

    @property
    def size_bytes(self) -> int:
        return self.by_exchange[self.exchange]


def sent_by_layers(layers: Sequence[LayerDeclaration], sizes: MicrobatchSizes) -> Iterator[Sent]:
    """Yield what each layer with an attention sends, if nothing of a row is padding or another document."""
    for layer in layers:
        for shard in layer.shards.values():
            if isinstance(shard.cost, MatrixProduct) and isinstance(shard.cost.reads, Attention):
                yield _sent(shard.cost.reads, sizes)


def _sent(declared: Attention, sizes: MicrobatchSizes) -> Sent:
    training, parallel = sizes.config.training, sizes.config.parallel
    forwards = 1
    # the core is in the layer
    if training.recompute_granularity == "full" or "core_attn" in training.recomputed_modules:
        forwards = 2
    ranks = sizes.tensor_size, sizes.context_size
    of_pass = sizes.tokens * sizes.number_bytes
    # forward, and twice as much in the backward pass: keys and values, and their gradients
    by_exchange: dict[Exchange, int] = {
        "ring": round(declared.ring_exchanged(*ranks, sizes.data.row_length) * (forwards + 2) / 3 * of_pass)
    }
    if declared.num_heads // parallel.tensor_model_parallel_size % parallel.context_parallel_size == 0:
        by_exchange["all-to-all"] = round(declared.heads_exchanged(*ranks) * (forwards + 1) / 2 * of_pass)
    return Sent(exchange_of(sizes.config, sizes.device, declared.window), by_exchange)
