"""Rules of a model and its layout over ranks: a message for every broken one, with the values, the rule, the remedy."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.models.registry import family_of
from megatron.options.config import Config, ConfigError, ModelConfig
from megatron.options.flags import divisors


def check_layout(config: Config, world_size: int) -> list[str]:
    """Return a message for every broken rule of a model and its layout, without those of a training."""
    return [*check_ranks(config, world_size), *check_tensor_parallel(config), *check_family(config)]


def check_ranks(config: Config, world_size: int) -> Iterator[str]:
    parallel, num_layers = config.parallel, config.model.num_layers
    tp, pp = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    if world_size % (tp * pp):
        yield (
            f"tensor_model_parallel_size={tp} x pipeline_model_parallel_size={pp} = {tp * pp} does not divide "
            f"the {world_size} ranks of this launch; start a multiple of {tp * pp} ranks, or change the layout"
        )
    if pp > num_layers:
        yield (f"pipeline_model_parallel_size={pp} is larger than num_layers={num_layers}; use at most {num_layers}")


def check_tensor_parallel(config: Config) -> Iterator[str]:
    model, seq_length = config.model, config.training.seq_length
    tp, kv = config.parallel.tensor_model_parallel_size, config.model.num_kv_heads
    if model.num_attention_heads % tp:
        yield (
            f"tensor_model_parallel_size={tp} does not divide num_attention_heads={model.num_attention_heads}; "
            f"use {divisors(model.num_attention_heads, 64)}"
        )
    if kv % tp and tp % kv:
        yield (
            f"tensor_model_parallel_size={tp} neither divides num_query_groups={kv} nor is a multiple of it; "
            f"use {divisors(kv, 64)}, or a multiple of {kv}"
        )
    elif tp > kv and (kv * model.head_size) % tp:
        yield (
            f"tensor_model_parallel_size={tp} does not divide num_query_groups x head size = {kv * model.head_size}; "
            f"use {divisors(kv * model.head_size, 64)}"
        )
    if model.ffn_size % tp:
        yield (
            f"tensor_model_parallel_size={tp} does not divide ffn_hidden_size={model.ffn_size}; "
            f"use {divisors(model.ffn_size, 64)}"
        )
    if config.parallel.sequence_parallel and seq_length % tp:
        yield (
            f"sequence_parallel needs tensor_model_parallel_size={tp} to divide seq_length={seq_length}; "
            f"use {divisors(seq_length, 64)}, or turn it off"
        )


def check_family(config: Config) -> Iterator[str]:
    try:
        yield from family_of(config).faults(config)
    except ConfigError as error:
        yield from error.faults


def check_model(config: Config) -> Iterator[str]:
    model, seq_length = config.model, config.training.seq_length
    if model.kv_channels is None and model.hidden_size % model.num_attention_heads:
        yield (
            f"num_attention_heads={model.num_attention_heads} does not divide hidden_size={model.hidden_size}; "
            f"use {divisors(model.hidden_size, 128)}, or set kv_channels"
        )
    if model.num_attention_heads % model.num_kv_heads:
        yield (
            f"num_query_groups={model.num_kv_heads} does not divide num_attention_heads={model.num_attention_heads}; "
            f"use {divisors(model.num_attention_heads, 128)}"
        )
    if model.position_embedding_type == "rope":
        yield from _check_rotary(model)
    if not model.attention_window_pattern or not set(model.attention_window_pattern) <= {0, 1}:
        given = " ".join(map(str, model.attention_window_pattern)) or "nothing"
        yield f"attention_window_pattern={given} must be 1 (a window) or 0 for each layer; correct it, or leave it out"
    positions = model.max_position_embeddings
    if model.position_embedding_type == "learned" and positions and positions < seq_length:
        yield (
            f"seq_length={seq_length} is larger than max_position_embeddings={positions}; "
            "shorten it, or enlarge max_position_embeddings"
        )


def _check_rotary(model: ModelConfig) -> Iterator[str]:
    if model.rotary_percent == 1 and model.head_size % 2:
        yield (
            f"position_embedding_type=rope needs an even head size, not {model.head_size}; change hidden_size or "
            "kv_channels"
        )
    # rotating no channel would leave the model without positions
    if model.rotary_percent < 1 and (model.rotary_size % 2 or model.rotary_size == 0):
        yield (
            f"rotary_percent={model.rotary_percent} rotates {model.rotary_size} of the {model.head_size} channels of a "
            "head, which must be an even number, 2 or more; change it"
        )
    low, high = model.rope_scaling_low_freq_factor, model.rope_scaling_high_freq_factor
    if model.rope_scaling_factor and low >= high:
        yield f"rope_scaling_low_freq_factor={low} must be below rope_scaling_high_freq_factor={high}; lower it"
