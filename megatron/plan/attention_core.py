"""Memory of the core of an attention, for its backward pass and in it, by the kernel that a device attends with.

Sizes are of one rank and one microbatch.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from megatron.models.attention.exchange_choice import exchange_of
from megatron.options.config import Config
from megatron.options.model import MIN_FLEX_HEAD_SIZE
from megatron.parallel.costs import Attention
from megatron.parallel.operators.block_sizes import ATTENTION_QUERIES
from megatron.plan.microbatch import BYTES, MicrobatchSizes
from megatron.runtime.device_cpu import BLOCKWISE_LENGTHS, attends_blockwise
from megatron.runtime.devices import planned_device
from megatron.tasks.registry import load_task

FLOAT32 = BYTES["fp32"]
"""Bytes of a number that a kernel holds in float32 whatever the precision of the run."""


@dataclass(frozen=True)
class AttentionCore:
    """The core of an attention on one rank: what it is given, keeps, and needs for a moment."""

    declared: Attention
    sizes: MicrobatchSizes

    @property
    def heads(self) -> int:
        """Query heads of this rank."""
        return self.declared.num_heads // self.sizes.tensor_size

    @property
    def query_channels(self) -> int:
        """Channels of q, and of the output."""
        return self.declared.num_heads * self.declared.head_size // self.sizes.tensor_size

    @property
    def key_channels(self) -> int:
        """Channels of k, or of v."""
        return self._projected_key_channels

    @property
    def _projected_key_channels(self) -> int:
        # with fewer key/value heads than ranks, each rank gathers one whole head of both
        own = self.declared.num_kv_heads * self.declared.head_size // self.sizes.tensor_size
        return max(own, self.declared.head_size)

    @property
    def scores(self) -> int:
        """Number of attention scores."""
        return self.sizes.tokens * self.sizes.data.row_length * self.heads

    @property
    def is_blockwise(self) -> bool:
        """megatron/models/attention/blockwise.py computes it."""
        return is_blockwise(self.sizes.config, self.declared)

    @property
    def drops_in_flex(self) -> bool:
        """megatron/models/attention/flex.py computes it, which attends twice."""
        config = self.sizes.config
        return config.model.attention_dropout > 0 and attends_in_flex(config, self.declared)

    @property
    def stores_scores(self) -> bool:
        """All its scores are kept: see `stores_attention_scores`; or plain operators attend, which alone have a cap."""
        is_in_flex = attends_in_flex(self.sizes.config, self.declared)
        is_plain = self.declared.is_capped and not is_in_flex and not self.is_blockwise
        return stores_attention_scores(self.sizes.config) or is_plain

    @property
    def output_bytes(self) -> int:
        return self.sizes.tokens * self.query_channels * self.sizes.number_bytes

    @property
    def statistics_bytes(self) -> int:
        """Bytes of the softmax's sums, a float32 for each token and head, from which backward computes its results."""
        return self.sizes.tokens * self.heads * FLOAT32

    @property
    def recomputed_from_bytes(self) -> int:
        """Bytes kept where the core is recomputed: the fused projection, and the output."""
        channels = 2 * self.query_channels + 2 * self.key_channels
        return self.sizes.tokens * channels * self.sizes.number_bytes

    def kept_bytes(self, *, is_read: bool) -> int:
        """Return the bytes of its inputs, statistics and output; `is_read`: the output projection keeps that too."""
        sizes, device = self.sizes, self.sizes.device
        kept = sizes.tokens * self._input_channels * sizes.number_bytes
        if self.is_blockwise:
            # megatron/models/attention/blockwise.py keeps neither statistics nor its output
            return kept + (self.output_bytes if is_read else 0)
        kept += self.output_bytes + self.statistics_bytes
        if self.drops_in_flex:
            # of all keys the sums, and the output for few values; and what it divides by the sums is not what is read
            few = sizes.tokens * self.heads * MIN_FLEX_HEAD_SIZE * sizes.number_bytes
            kept += self.statistics_bytes + few + (self.output_bytes if is_read else 0)
        if sizes.data.packs_documents and device.is_host:
            kept += self.output_bytes  # documents are attended one by one, and their outputs concatenated
        batch = sizes.config.training.micro_batch_size
        if device.has_flash_attention and not sizes.is_16_bit and batch > 1:
            kept += self.output_bytes  # no flash kernel: the output comes by sample, and is copied by position
        if not self.stores_scores:
            return kept + self._converted_mask_bytes
        if device.is_host:
            return self._unfused_on_host_bytes
        # probabilities, and with dropout its mask of truth values and the product of both
        score_bytes = sizes.number_bytes
        if sizes.config.model.attention_dropout > 0:
            score_bytes += 1 + sizes.number_bytes
        return kept + self.scores * score_bytes

    @property
    def _converted_mask_bytes(self) -> int:
        """Bytes of a window's mask, which is boolean: torch's kernel on a CPU makes numbers of it for each layer."""
        sizes, window, length = self.sizes, self.declared.window, self.sizes.data.row_length
        has_bias = sizes.config.model.position_embedding_type == "alibi"  # in which the window is hidden
        if not sizes.device.is_host or sizes.data.packs_documents or has_bias:
            return 0
        if window is None or window >= length:
            return 0
        return length**2 * (FLOAT32 if sizes.widens_products else sizes.number_bytes)

    @property
    def projection_bytes(self) -> int:
        """Bytes of the fused projection [q; k; v]."""
        channels = self.query_channels + 2 * self._projected_key_channels
        return self.sizes.tokens * channels * self.sizes.number_bytes

    @property
    def keeps_projection(self) -> bool:
        """Its v is a view of the fused projection, all of which that keeps."""
        is_grouped = self.key_channels < self.query_channels
        if self.stores_scores and self.sizes.device.is_host:
            return not is_grouped and (self.declared.is_capped or not self.sizes.is_16_bit)
        is_rotated = self.sizes.config.model.position_embedding_type == "rope"
        return not (is_grouped and is_rotated and _repeats_heads(self.sizes.config))

    @property
    def _input_channels(self) -> int:
        """Channels of q, k and v as the kernel keeps them."""
        # v is a view of the fused projection, all of which it keeps; q and k are too, unless they are rotated
        query, key = self.query_channels, self.key_channels
        fused = query + 2 * key
        is_rotated = self.sizes.config.model.position_embedding_type == "rope"
        if key < query and _repeats_heads(self.sizes.config):
            # k and v are copied for each query head; q is a view of the fused projection unless it is rotated
            own_query = query if is_rotated else fused
            return own_query + 2 * query
        if is_rotated:
            return fused + query + key
        return fused

    @property
    def _unfused_on_host_bytes(self) -> int:
        """Bytes kept by plain operators on the CPU, which compute in float32: torch's, and `attend_capped`."""
        sizes, has_dropout = self.sizes, self.sizes.config.model.attention_dropout > 0
        score_bytes = FLOAT32  # probabilities
        if has_dropout:
            score_bytes += FLOAT32  # its mask
        if self.declared.is_capped:
            score_bytes += FLOAT32  # before the cap is multiplied
        if self.declared.is_capped and sizes.is_16_bit:
            score_bytes += sizes.number_bytes  # probabilities rounded for the product with v
        elif has_dropout:
            score_bytes += FLOAT32  # probabilities times the mask
        kept = self.scores * score_bytes + self.output_bytes
        # q and k: torch multiplies each by the root of the scale, and both repeat k for each query head
        kept += sizes.tokens * 2 * FLOAT32 * self.query_channels
        if self.keeps_projection:
            return kept + self.projection_bytes
        # v is repeated for each query head, and torch converts it
        value_bytes = sizes.number_bytes if self.declared.is_capped else FLOAT32
        return kept + sizes.tokens * value_bytes * self.query_channels

    @property
    def backward_bytes(self) -> int:
        """Bytes that its backward pass takes besides what it is given: what models/attention/blockwise.py makes."""
        sizes = self.sizes
        if not self.is_blockwise:
            return self._widened_bytes
        key_bytes = 2 * FLOAT32  # sums of the gradients of k and v
        score_bytes = 3 * FLOAT32  # of a block: probabilities, and their gradient before and after the softmax
        if sizes.is_16_bit:
            key_bytes += 2 * FLOAT32  # k and v themselves
            score_bytes += sizes.number_bytes  # the gradient rounded
        token_bytes = self.query_channels * sizes.number_bytes + self.key_channels * key_bytes
        return sizes.tokens * (token_bytes + self.heads * ATTENTION_QUERIES * score_bytes)

    @property
    def _widened_bytes(self) -> int:
        """Bytes of the gradient that it is given, and of all that torch's kernel reads and returns, in float32."""
        sizes, training = self.sizes, self.sizes.config.training
        if not sizes.widens_products or self.stores_scores or training.torch_compile:
            return 0
        query, keys = self.query_channels, 2 * self.key_channels
        if _repeats_heads(sizes.config):
            keys = 2 * query
        # the gradient, the output, q, k and v; the gradients of these
        numbers = 3 * query + keys + query + keys
        samples = training.micro_batch_size
        if sizes.data.packs_documents:  # one after the other
            return sizes.tokens // samples * (query * sizes.number_bytes + numbers * FLOAT32)
        if samples > 1:
            numbers += query  # it copies the gradient, which by token is contiguous for one sample alone
        return sizes.tokens * (query * sizes.number_bytes + numbers * FLOAT32)


def attention_mask_bytes(sizes: MicrobatchSizes) -> int:
    """Return the bytes of the attention mask that a rank's layers share: [rows, heads, S, S]."""
    model, device = sizes.config.model, sizes.device
    if sizes.context_size > 1 and exchange_of(sizes.config, device, model.attention_window) == "ring":
        return 0  # blocks hide what their queries do not see
    if "flex" in device.attention and model.suits_flex and model.attention_backend in ("auto", "flex"):
        return 0  # flex_attention computes it within its kernel
    # the CPU attends document by document, so that only positions are masked
    is_packed = sizes.data.packs_documents and not device.is_host
    rows = sizes.config.training.micro_batch_size if is_packed else 1
    square = sizes.data.row_length**2
    if model.position_embedding_type == "alibi":
        number_bytes = FLOAT32 if sizes.widens_products else sizes.number_bytes
        heads = model.num_attention_heads // sizes.tensor_size // sizes.context_size
        return rows * heads * square * number_bytes
    if is_packed or _masks_windows(sizes):
        return rows * square
    return 0


def rotary_bytes(sizes: MicrobatchSizes) -> int:
    """Return the bytes of the angles of rotary positions in float32: of whole rows, and of a rank's part of them."""
    model = sizes.config.model
    if model.position_embedding_type != "rope":
        return 0
    whole = sizes.data.row_length * model.rotary_size * FLOAT32
    if model.rotary_base_local is not None:  # of layers with a window, and of those without
        whole *= len({model.window_of(number) is None for number in range(model.num_layers)})
    if sizes.context_size == 1:
        return whole
    return whole + whole // sizes.context_size


def _masks_windows(sizes: MicrobatchSizes) -> bool:
    """Return True if a window of attention is a mask in memory."""
    model = sizes.config.model
    if model.attention_window is None or model.attention_window >= sizes.data.row_length:
        return False
    window, is_capped = model.attention_window, model.attention_softcap is not None
    core = Attention(model.num_attention_heads, model.num_kv_heads, model.head_size, window, is_capped)
    return not is_blockwise(sizes.config, core)


def stores_attention_scores(config: Config) -> bool:
    """Return True if the attention keeps its S x S probabilities for the backward pass."""
    # the fused kernels keep none; torch has none on the CPU with dropout, nor on HPU without Habana's FusedSDPA
    device = planned_device(config.parallel.device)
    if device.is_host:
        return config.model.attention_dropout > 0
    if device.stores_scores:
        return not (config.model.uses_fused_sdpa(device) and config.model.fused_sdpa_recompute)
    return False


def attends_in_flex(config: Config, core: Attention) -> bool:
    """Return True if torch's flex_attention computes the attention: see models/attention/kernels.py."""
    model, device = config.model, planned_device(config.parallel.device)
    if model.attention_backend != "auto" or model.kernels == "plain":
        return model.attention_backend == "flex"
    if "flex" not in device.attention or not model.suits_flex:
        return False
    data = load_task(config).data
    is_cut = core.window is not None and core.window < data.row_length
    return model.position_embedding_type == "alibi" or data.packs_documents or is_cut or core.is_capped


def is_blockwise(config: Config, core: Attention) -> bool:
    """Return True if megatron/models/attention/blockwise.py computes the attention."""
    model, training = config.model, config.training
    device = planned_device(config.parallel.device)
    if not device.has_blockwise_attention or model.attention_backend != "auto":
        return False
    if model.kernels == "plain" or training.torch_compile or model.attention_dropout > 0:
        return False
    data = load_task(config).data
    if data.packs_documents:  # document by document, of lengths that the plan does not know
        return False
    is_cut = core.window is not None and core.window < data.row_length
    # torch's kernel has no soft cap, and computes the whole square of a window
    if core.is_capped or (is_cut and data.row_length >= BLOCKWISE_LENGTHS.start):
        return not MicrobatchSizes(config).widens_products
    return data.row_length in BLOCKWISE_LENGTHS and _attends_blockwise(training.precision)


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
    # SDPA has kernels for groups where nothing is masked, and of 16-bit numbers alone
    data, window = load_task(config).data, model.attention_window
    is_cut = window is not None and window < data.row_length
    is_masked = model.position_embedding_type == "alibi" or data.packs_documents or is_cut
    in_sdpa = model.attention_backend == "sdpa" or not model.suits_flex
    if is_masked:
        return in_sdpa
    return config.training.precision == "fp32"
