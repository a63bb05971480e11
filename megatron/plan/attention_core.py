"""Memory of the core of an attention, for its backward pass and in it, by the kernel that a device attends with.

Sizes are bytes of one rank and one microbatch.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from megatron.options.config import Config
from megatron.parallel.block_sizes import ATTENTION_QUERIES
from megatron.parallel.costs import Attention
from megatron.plan.flops import num_tokens, number_size
from megatron.runtime.device_cpu import BLOCKWISE_LENGTHS, attends_blockwise
from megatron.runtime.devices import planned_device
from megatron.tasks.registry import load_task


@dataclass(frozen=True)
class AttentionCore:
    """The core of an attention on one rank: sizes in numbers and bytes of a microbatch."""

    declared: Attention
    config: Config

    @property
    def heads(self) -> int:
        return self.declared.num_heads // self.config.parallel.tensor_model_parallel_size

    @property
    def query(self) -> int:
        """Channels of q on a rank."""
        return self.declared.num_heads * self.declared.head_size // self.config.parallel.tensor_model_parallel_size

    @property
    def key(self) -> int:
        """Channels of k, or of v; with fewer key/value heads than ranks, each rank gathers one whole head of both."""
        own = self.declared.num_kv_heads * self.declared.head_size // self.config.parallel.tensor_model_parallel_size
        return max(own, self.declared.head_size)

    @property
    def scores(self) -> int:
        """Number of attention scores."""
        return num_tokens(self.config) * load_task(self.config).data.row_length * self.heads

    @property
    def inputs(self) -> int:
        """Bytes kept where the core is recomputed: the fused projection, and the output."""
        return num_tokens(self.config) * (2 * self.query + 2 * self.key) * number_size(self.config)

    @property
    def kept(self) -> int:
        """Bytes of its inputs, of its output, which the output projection keeps too, and of its statistics."""
        config, query, key = self.config, self.query, self.key
        model, number, tokens = config.model, number_size(config), num_tokens(config)
        rotary = model.position_embedding_type == "rope"
        device = planned_device(config.parallel.device)
        # v is a view of the fused projection, all of which it keeps; q and k too, unless they are rotated
        inputs = query + 2 * key
        if key < query and _repeats_heads(config):  # key and value heads are repeated for their group
            inputs = (query if rotary else inputs) + 2 * query
        elif rotary:
            inputs += query + key
        kept = tokens * (inputs + query) * number + tokens * self.heads * 4
        if load_task(config).data.packs_documents and device.is_host:
            kept += tokens * query * number  # the outputs of documents, concatenated
        if device.has_flash_attention and number == 4 and config.training.micro_batch_size > 1:
            kept += tokens * query * number  # no flash kernel: the output comes by sample, and is copied by position
        if not stores_attention_scores(config):
            return kept
        # torch's plain attention, in float32: probabilities, dropout mask, product; q, k, v; output twice
        if device.is_host:
            copies = 8 * query + (4 * query if number == 2 else number * (query + 2 * key))
            return 12 * self.scores + tokens * (copies + number * query)
        return kept + self.scores * (number + (1 + number if model.attention_dropout > 0 else 0))

    @property
    def blockwise_backward(self) -> int:
        """Bytes that the backward pass of megatron/models/blockwise_attention.py takes, besides what it is given.

        Of 16-bit numbers it holds the keys and values, and the sums of their gradients, in float32, and of a block of
        scores the probabilities, their gradient before and after the softmax, and that rounded.
        """
        if not is_blockwise(self.config):
            return 0
        number, tokens = number_size(self.config), num_tokens(self.config)
        copies = 2 * 4 if number == 2 else 0
        sums = 2 * 4
        scores = 3 * 4 + (number if number == 2 else 0)
        of_tokens = self.query * number + self.key * (copies + sums)
        return tokens * of_tokens + tokens * self.heads * ATTENTION_QUERIES * scores


def stores_attention_scores(config: Config) -> bool:
    """Return True if the attention keeps its S x S probabilities for the backward pass.

    The fused kernels keep none. torch has none on the CPU with dropout, nor on HPU without Habana's FusedSDPA.
    """
    device = planned_device(config.parallel.device)
    if device.is_host:
        return config.model.attention_dropout > 0
    if device.stores_scores:
        return not (config.model.uses_fused_sdpa(device) and config.model.fused_sdpa_recompute)
    return False


def is_blockwise(config: Config) -> bool:
    """Return True if megatron/models/blockwise_attention.py computes the attention."""
    model, training = config.model, config.training
    device = planned_device(config.parallel.device)
    if not device.has_blockwise_attention or model.attention_backend != "auto":
        return False
    if model.kernels == "plain" or training.torch_compile or model.attention_dropout > 0:
        return False
    task = load_task(config)
    if task.data.packs_documents:  # document by document, of lengths that the plan does not know
        return False
    return task.data.row_length in BLOCKWISE_LENGTHS and _attends_blockwise(training.precision)


@functools.cache
def _attends_blockwise(precision: str) -> bool:
    return attends_blockwise(precision)


def _repeats_heads(config: Config) -> bool:
    """Return True if key/value heads are repeated in memory for their groups of query heads."""
    model, device = config.model, planned_device(config.parallel.device)
    if model.kernels == "plain":
        return True
    if device.sdpa_groups == "always":
        return False
    if device.sdpa_groups == "never":
        return not model.uses_fused_sdpa(device)
    masked = model.position_embedding_type == "alibi" or load_task(config).data.packs_documents
    in_sdpa = model.attention_backend == "sdpa" or model.attention_dropout > 0
    return (config.training.precision == "fp32" and (in_sdpa or not masked)) or (masked and in_sdpa)
