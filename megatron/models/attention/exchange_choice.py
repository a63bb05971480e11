"""Choice of the exchange by which context ranks attend over whole rows. Without torch, so that a plan needs none."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from megatron.options.config import Config, ModelConfig
from megatron.options.flags import divisors
from megatron.parallel.costs import Attention
from megatron.runtime.device import Device

Exchange = Literal["ring", "all-to-all"]


def exchange_of(config: Config, device: Device, window: int | None) -> Exchange:
    """Return the exchange of layers with this window.

    By `auto` the one that can be; of two that where blocks have a fast kernel, else the one that sends fewer numbers.
    """
    model, parallel = config.model, config.parallel
    if parallel.context_parallel_exchange != "auto":
        return parallel.context_parallel_exchange
    if not _divides_heads(config):
        return "ring"
    if _ring_faults(config) or not _has_fast_blocks(model, device, window):
        return "all-to-all"
    attention = Attention(model.num_attention_heads, model.num_kv_heads, model.head_size, window)
    sizes = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    in_ring = attention.ring_exchanged(*sizes, config.training.seq_length)
    # of equals the ring, most of whose messages travel while it computes
    return "ring" if in_ring <= attention.heads_exchanged(*sizes) else "all-to-all"


def exchange_faults(config: Config) -> Iterator[str]:
    """Yield why the attention of this model cannot be exchanged between its context ranks."""
    parallel = config.parallel
    if parallel.context_parallel_size == 1:
        return
    exchange, divides = parallel.context_parallel_exchange, _divides_heads(config)
    heads = config.model.num_attention_heads // parallel.tensor_model_parallel_size
    if exchange == "all-to-all" and not divides:
        yield (
            f"context_parallel_exchange=all-to-all gives each context rank a share of the heads, but "
            f"context_parallel_size={parallel.context_parallel_size} does not divide the {heads} of a tensor-parallel "
            f"rank; use {divisors(heads, 64)}, or context_parallel_exchange=ring"
        )
    if exchange == "ring" or (exchange == "auto" and not divides):
        remedy = "context_parallel_exchange=all-to-all"
        if not divides:
            remedy += f" with context_parallel_size {divisors(heads, 64)}"
        for fault in _ring_faults(config):
            yield f"{fault}, or use {remedy}"


def _ring_faults(config: Config) -> list[str]:
    model, faults = config.model, []
    if model.attention_dropout > 0:
        faults.append(
            f"attention_dropout={model.attention_dropout} does not go with the exchange of keys and values in a ring, "
            "where no rank has all probabilities of a query; set it to 0"
        )
    if model.attention_backend in ("flex", "fused_hpu"):
        faults.append(
            f"attention_backend={model.attention_backend} returns no log-sum-exp, by which a ring joins its blocks; "
            "leave it at auto"
        )
    return faults


def _divides_heads(config: Config) -> bool:
    parallel = config.parallel
    return config.model.num_attention_heads // parallel.tensor_model_parallel_size % parallel.context_parallel_size == 0


def _has_fast_blocks(model: ModelConfig, device: Device, window: int | None) -> bool:
    """Return True if the blocks of a ring take no longer than the kernels for whole rows (block_kernels.py)."""
    if device.is_host:
        return True
    has_plain_scores = model.attention_softcap is None and model.position_embedding_type != "alibi" and window is None
    return device.has_flash_attention and has_plain_scores
