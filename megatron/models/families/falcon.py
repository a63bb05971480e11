"""Falcon: LayerNorm, exact GELU, no biases, rotary positions, attention and MLP in parallel, few key/value heads.

The 7B has one key/value head and one norm for both branches; the 40B and 180B have groups and a norm for each branch,
Falcon2 11B groups and one norm. Falcon-RW is refused: transformers rounds its ALiBi to bfloat16, at every precision.
Source: Almazrouei et al. 2023 (arXiv:2311.16867); the published checkpoints' config.json.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from megatron.models.config_json import heads_of_the_width, rope_fields, rope_options, rotary_only
from megatron.models.decoder import DecoderBlock, decoder_layers
from megatron.models.family import ConfigFields, Family, HuggingFaceForm
from megatron.options.config import Config, ModelConfig

BLOCK = DecoderBlock(norm="layer_norm", activation="gelu", is_parallel=True)


def _options(fields: ConfigFields) -> tuple[dict[str, Any], Any]:
    fields.demand("alibi", False, None)
    fields.demand("bias", False, None)
    fields.demand("parallel_attn", True)
    fields.demand("activation", "gelu")
    hidden, heads = fields.take("n_embed", "hidden_size"), fields.take("num_attention_heads")
    ffn = fields.take("ffn_hidden_size", default=4 * hidden)
    fields.demand("ff_factor", None, ffn / max(1, hidden))  # Falcon2's, which says the same
    is_new = fields.take("new_decoder_architecture", default=False)
    groups = fields.take("num_kv_heads", default=heads)
    # left out, it is true; null: false
    is_multi_query = fields.take("multi_query", default=not fields.has("multi_query"))
    norms = [2, 1]
    if not is_new:
        norms = [1]
        if is_multi_query:
            groups = 1
        elif groups != heads:
            fields.refuse(f"num_kv_heads={groups} without multi_query (supported: {heads})")
    num_norms = fields.take("num_ln_in_parallel_attn", default=norms[0])
    if num_norms not in norms:
        fields.refuse(f"num_ln_in_parallel_attn={num_norms} (supported: 1, and 2 with new_decoder_architecture)")
    fields.take("attention_dropout", default=0.0)  # transformers applies it with ALiBi alone
    length = fields.take("max_position_embeddings", default=2048)
    return {
        "num_layers": fields.take("num_hidden_layers"),
        "hidden_size": hidden,
        "ffn_hidden_size": ffn,
        "num_attention_heads": heads,
        "num_query_groups": None if groups == heads else groups,
        "vocab_size": fields.take("vocab_size"),
        "max_position_embeddings": length,
        "position_embedding_type": "rope",
        **rope_options(fields, length),
        "shared_norm": num_norms == 1,
        "untie_embeddings_and_output_weights": not fields.take("tie_word_embeddings", default=True),
        "norm_epsilon": fields.take("layer_norm_epsilon", default=1e-5),
        "hidden_dropout": fields.take("hidden_dropout", default=0.0),
        "attention_dropout": 0.0,
        "init_method_std": fields.take("initializer_range", default=0.02),
    }, length


def _config_fields(config: Config) -> dict[str, Any]:
    model = config.model
    heads, groups = model.num_attention_heads, model.num_kv_heads
    # the older form, as of the 7B, where it says all: more programs read it
    is_old = model.shared_norm and groups in (1, heads)
    form = {"num_kv_heads": groups, "num_ln_in_parallel_attn": 2 - int(model.shared_norm)}
    if is_old:
        form = {"multi_query": groups == 1}
    return {
        "hidden_size": model.hidden_size,
        "ffn_hidden_size": model.ffn_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": heads,
        "new_decoder_architecture": not is_old,
        **form,
        "alibi": False,
        "bias": False,
        "parallel_attn": True,
        "activation": "gelu",
        "layer_norm_epsilon": model.norm_epsilon,
        "max_position_embeddings": model.max_position_embeddings or config.training.seq_length,
        **rope_fields(model),
        "hidden_dropout": model.hidden_dropout,
        "attention_dropout": model.attention_dropout,
    }


def _unsupported(model: ModelConfig) -> list[str]:
    return rotary_only(model) + heads_of_the_width(model)


FALCON = HuggingFaceForm(
    model_type="falcon",
    class_name="FalconForCausalLM",
    prefix="transformer.",
    modules={
        "embedding.word": ("word_embeddings",),
        "layers.*.shared_norm": ("h.*.input_layernorm",),
        "layers.*.attention_norm": ("h.*.ln_attn",),
        "layers.*.attention.qkv": ("h.*.self_attention.query_key_value",),
        "layers.*.attention.dense": ("h.*.self_attention.dense",),
        "layers.*.mlp_norm": ("h.*.ln_mlp",),
        "layers.*.mlp.up": ("h.*.mlp.dense_h_to_4h",),
        "layers.*.mlp.down": ("h.*.mlp.dense_4h_to_h",),
        "final_norm": ("ln_f",),
    },
    options=_options,
    config_fields=_config_fields,
    unsupported=_unsupported,
    expresses=frozenset({"shared_norm"}),
    qkv_by_head=True,
    buffers=r"transformer\.h\.\d+\.self_attention\.(maybe_rotary|rotary|rotary_emb)\.inv_freq",
    published_code={
        "AutoConfig": "configuration_falcon.FalconConfig",
        "AutoModel": "modeling_falcon.FalconModel",
        "AutoModelForSequenceClassification": "modeling_falcon.FalconForSequenceClassification",
        "AutoModelForTokenClassification": "modeling_falcon.FalconForTokenClassification",
        "AutoModelForQuestionAnswering": "modeling_falcon.FalconForQuestionAnswering",
        "AutoModelForCausalLM": "modeling_falcon.FalconForCausalLM",
    },
)

FAMILY = Family(declare=partial(decoder_layers, block=BLOCK), huggingface={"": FALCON})
