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

HOST_SCORES = 256 * 512
"""Scores that torch's kernel on a CPU holds at once."""


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
        own = message + self._of_kernel(query)
        # those that came, and their gradients, for the half of the queries that sees all of them
        theirs = keys * (number_bytes + FLOAT32) + self._of_kernel(query // 2)
        if not self._has_products:
            theirs += (query + keys) * number_bytes  # the gradients of the block before it
        if self.sizes.widens_products:
            theirs += keys * FLOAT32
        if self.sizes.context_size > 2:
            theirs += message
        return self.sizes.tokens * (always + max(own, theirs)) + self._tile_bytes

    def _of_kernel(self, query: int) -> int:
        """Return what a kernel of blocks takes for a token (block_kernels.py): gradients, and copies of what it reads.

        `query`: channels of q times the share of the queries.
        """
        keys, number_bytes = 2 * self.key_channels, self.sizes.number_bytes
        if self.sizes.widens_products:
            number_bytes = FLOAT32
        if not self._has_products:
            gradients = (query + keys) * number_bytes
            if self.sizes.device.is_host:
                # torch's kernel copies the output's gradient, which by token is contiguous for one sample alone
                copies = query if self.sizes.config.training.micro_batch_size > 1 else 0
                return gradients + copies * number_bytes
            # contiguous gradient and output, and key/value gradients of all heads before those of a group are added
            return gradients + 2 * query * number_bytes + (2 * query * number_bytes if keys < 2 * query else 0)
        copied = keys * (number_bytes + FLOAT32)
        return copied + query * number_bytes + keys * FLOAT32 + self.key_channels * FLOAT32

    @property
    def _has_products(self) -> bool:
        """Blocks are computed by products of matrices, tile by tile, not by a fused kernel."""
        sizes, model = self.sizes, self.sizes.config.model
        is_plain = model.kernels == "plain" or model.position_embedding_type == "alibi" or self.declared.is_capped
        if is_plain or self.declared.window is not None:
            return True
        return not (sizes.device.is_host or (sizes.device.has_flash_attention and sizes.is_16_bit))

    @property
    def _tile_bytes(self) -> int:
        """Scores of a tile, their gradient, and both rounded."""
        own_scores = self.scores // self.sizes.context_size
        if not self._has_products:
            tile = HOST_SCORES if self.sizes.device.is_host else 0
        elif self.sizes.device.is_host:
            tile = self.sizes.tokens * self.heads * ATTENTION_QUERIES
        else:
            tile = max(self.sizes.tokens * self.heads * ATTENTION_QUERIES, DEVICE_SCORES)
        number_bytes = FLOAT32
        if self.sizes.is_16_bit:
            number_bytes += self.sizes.number_bytes
        return 2 * number_bytes * min(tile, own_scores)


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
