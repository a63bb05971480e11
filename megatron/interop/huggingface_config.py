"""transformers' config.json and our ModelConfig, each as the other; and what transformers calls a model's modules."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from megatron.checkpoint.format import CheckpointError
from megatron.config.options import Config, ModelConfig, TrainingConfig
from megatron.interop.huggingface_files import DTYPES, Precision, own_file, read_json

log = logging.getLogger(__name__)

SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


@dataclass(frozen=True)
class Family:
    """One of transformers' classes: what it calls its modules, and how its matrices lie."""

    model_type: str
    class_name: str
    prefix: str
    """Of every name but the output projection's; folders saved from the bare model lack it."""
    embedding: str
    positions: str | None
    embedding_norm: str | None
    final_norm: str
    layer: str
    modules: Mapping[str, tuple[str, ...]]
    """Of a transformer layer: our module, and the one of theirs, or those that are the pieces of ours, in order."""
    transposed: bool
    """Matrices of the layers are [in, out] (GPT-2's Conv1D)."""
    qkv_by_head: bool
    """Rows of the fused projection are [head][q, k, v][head size]; ours are [q, k, v][head][head size]."""
    buffers: str
    """Constants that old files hold among the weights: a regular expression of their names."""


_GPT2 = Family(
    model_type="gpt2",
    class_name="GPT2LMHeadModel",
    prefix="transformer.",
    embedding="wte",
    positions="wpe",
    embedding_norm=None,
    final_norm="ln_f",
    layer="h",
    modules={
        "attention_norm": ("ln_1",),
        "attention.qkv": ("attn.c_attn",),
        "attention.dense": ("attn.c_proj",),
        "mlp_norm": ("ln_2",),
        "mlp.up": ("mlp.c_fc",),
        "mlp.down": ("mlp.c_proj",),
    },
    transposed=True,
    qkv_by_head=False,
    buffers=r"transformer\.h\.\d+\.attn\.(bias|masked_bias)",
)
_BLOOM = Family(
    model_type="bloom",
    class_name="BloomForCausalLM",
    prefix="transformer.",
    embedding="word_embeddings",
    positions=None,
    embedding_norm="word_embeddings_layernorm",
    final_norm="ln_f",
    layer="h",
    modules={
        "attention_norm": ("input_layernorm",),
        "attention.qkv": ("self_attention.query_key_value",),
        "attention.dense": ("self_attention.dense",),
        "mlp_norm": ("post_attention_layernorm",),
        "mlp.up": ("mlp.dense_h_to_4h",),
        "mlp.down": ("mlp.dense_4h_to_h",),
    },
    transposed=False,
    qkv_by_head=True,
    buffers=r"(?!)",
)
_LLAMA = Family(
    model_type="llama",
    class_name="LlamaForCausalLM",
    prefix="model.",
    embedding="embed_tokens",
    positions=None,
    embedding_norm=None,
    final_norm="norm",
    layer="layers",
    modules={
        "attention_norm": ("input_layernorm",),
        "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "attention.dense": ("self_attn.o_proj",),
        "mlp_norm": ("post_attention_layernorm",),
        "mlp.gate_up": ("mlp.gate_proj", "mlp.up_proj"),
        "mlp.down": ("mlp.down_proj",),
    },
    transposed=False,
    qkv_by_head=False,
    buffers=r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.(inv_freq|cos_cached|sin_cached)",
)
FAMILIES = {family.model_type: family for family in (_GPT2, _BLOOM, _LLAMA)}
OUTPUT = "lm_head.weight"


def family_of(model: ModelConfig) -> Family:
    """Which of transformers' classes computes what this model does. Raises CheckpointError if none, saying why."""
    positions = model.position_embedding_type
    family = _LLAMA if model.architecture == "llama" else _BLOOM if positions == "alibi" else _GPT2
    wanted: dict[str, tuple[Any, Any]] = {}
    """By option: what it is, and what it has to be."""
    if family is _LLAMA:
        wanted["position_embedding_type"] = (positions, "rope")
        wanted["embed_layernorm"] = (model.embed_layernorm, False)
        # transformers' own rule, even where head_dim is given
        divided = model.num_attention_heads * (model.hidden_size // model.num_attention_heads)
        wanted["hidden_size"] = (model.hidden_size, divided)
    else:
        if family is _GPT2:
            wanted["position_embedding_type"] = (positions, "learned")
        wanted["embed_layernorm"] = (model.embed_layernorm, family is _BLOOM)
        wanted["num_query_groups"] = (model.num_kv_heads, model.num_attention_heads)
        wanted["kv_channels"] = (model.head_size * model.num_attention_heads, model.hidden_size)
        if family is _BLOOM:
            wanted["ffn_hidden_size"] = (model.ffn_size, 4 * model.hidden_size)
    wrong = [
        f"{name}={getattr(model, name)}"
        + (f" (it has {must} only)" if name in ("embed_layernorm", "position_embedding_type") else "")
        for name, (value, must) in wanted.items()
        if value != must
    ]
    if wrong:
        raise CheckpointError(
            f"transformers' {family.class_name}, the nearest to architecture={model.architecture} with "
            f"position_embedding_type={positions}, has no {', '.join(wrong)}; such a model has no Hugging Face form, "
            "keep it as native or universal"
        )
    return family


# ---------------------------------------------------------------------------------------------------------------------
# config.json

# What changes no number in the forward pass, or follows from what is checked.
_HARMLESS = {
    "_name_or_path", "architectures", "attention_softmax_in_fp32", "bias_dropout_fusion", "dtype",
    "gradient_checkpointing", "id2label", "label2id", "masked_softmax_fusion", "model_type", "n_ctx", "offset_alibi",
    "output_past", "pretraining_tp", "reorder_and_upcast_attn", "seq_length", "skip_bias_add", "skip_bias_add_qkv",
    "slow_but_exact", "task_specific_params", "torch_dtype", "transformers_version", "unk_token_id", "use_cache",
    "summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj",
    "is_encoder_decoder", "output_attentions", "output_hidden_states", "return_dict", "chunk_size_feed_forward",
    "problem_type", "finetuning_task", *SPECIAL_TOKENS,
}  # fmt: skip


class _Fields:
    """A config.json being read: which keys were, and what is wrong with them."""

    def __init__(self, values: Mapping[str, Any], where: Path | str) -> None:
        self.values, self.where = values, where
        self.faults: list[str] = []
        self._read = set(_HARMLESS)

    def take(self, *names: str, default: Any = ...) -> Any:
        """The value under the first of these names that is there; without a default one must be."""
        self._read.update(names)
        for name in names:
            if self.values.get(name) is not None:
                return self.values[name]
        if default is ...:
            raise CheckpointError(f"{self.where} lacks {names[0]}; copy the model's own config.json there")
        return default

    def demand(self, name: str, *allowed: Any) -> None:
        """The value must be one of these; a missing one is transformers' default, the first of them."""
        self._read.add(name)
        value = self.values.get(name, allowed[0])
        if value not in allowed:
            self.faults.append(f"{name}={value!r} (supported: {' or '.join(map(repr, allowed))})")

    def finish(self) -> None:
        """Raises CheckpointError with every unsupported value; warns of keys that nobody knows."""
        if self.faults:
            raise CheckpointError(
                f"{self.where} describes a model that cannot be computed here: {'; '.join(self.faults)}"
            )
        unknown = sorted(set(self.values) - self._read)
        if unknown:
            log.warning("%s: keys without a known meaning are passed over: %s", self.where, ", ".join(unknown))


def config_of(theirs: Mapping[str, Any], where: Path | str, precision: Precision = "fp32") -> Config:
    """The model that a config.json describes, as a config of ours.

    Raises CheckpointError naming every field whose value changes what is computed and is not supported.
    """
    fields = _Fields(theirs, where)
    fields.demand("auto_map", None)  # code of its own: whatever it computes
    fields.demand("quantization_config", None)
    kind = theirs.get("model_type")
    if kind == "llama":
        model, seq_length = _from_llama(fields)
    elif kind == "bloom":
        model, seq_length = _from_bloom(fields)
    elif kind == "gpt2":
        model, seq_length = _from_gpt2(fields)
    else:
        raise CheckpointError(
            f"{where} has model_type={kind!r}; only {', '.join(FAMILIES)} can be converted"
            + ("" if kind else " (is it a transformers config.json?)")
        )
    fields.finish()
    try:
        config = Config(
            model=ModelConfig(**model),
            training=TrainingConfig(seq_length=seq_length, bf16=precision == "bf16", fp16=precision == "fp16"),
        )
    except ValidationError as error:
        faults = [f"{fault['loc'][0]}={fault['input']!r}: {fault['msg']}" for fault in error.errors()]
        raise CheckpointError(f"{where} describes no model: {'; '.join(faults)}") from None
    ours = config.model
    if ours.kv_channels is None and ours.hidden_size % ours.num_attention_heads:
        raise CheckpointError(f"{where}: {ours.num_attention_heads} heads do not divide width {ours.hidden_size}")
    if ours.num_attention_heads % ours.num_kv_heads:
        raise CheckpointError(
            f"{where}: num_key_value_heads={ours.num_kv_heads} does not divide "
            f"num_attention_heads={ours.num_attention_heads}"
        )
    return config


def _from_llama(fields: _Fields) -> tuple[dict[str, Any], Any]:
    fields.demand("hidden_act", "silu")
    fields.demand("attention_bias", False)
    fields.demand("mlp_bias", False)
    hidden, heads = fields.take("hidden_size"), fields.take("num_attention_heads")
    groups, head_size = fields.take("num_key_value_heads", default=heads), fields.take("head_dim", default=None)
    length = fields.take("max_position_embeddings", default=2048)
    plain_size = hidden // heads if isinstance(hidden, int) and isinstance(heads, int) and heads > 0 else None
    return {
        "architecture": "llama",
        "num_layers": fields.take("num_hidden_layers"),
        "hidden_size": hidden,
        "ffn_hidden_size": fields.take("intermediate_size"),
        "num_attention_heads": heads,
        "num_query_groups": None if groups == heads else groups,
        "kv_channels": None if head_size == plain_size else head_size,
        "vocab_size": fields.take("vocab_size"),
        "max_position_embeddings": length,
        "position_embedding_type": "rope",
        **_from_rope(fields),
        "untie_embeddings_and_output_weights": not fields.take("tie_word_embeddings", default=False),
        "norm_epsilon": fields.take("rms_norm_eps", default=1e-6),
        "hidden_dropout": 0.0,
        "attention_dropout": fields.take("attention_dropout", default=0.0),
        "init_method_std": fields.take("initializer_range", default=0.02),
    }, length


def _from_rope(fields: _Fields) -> dict[str, Any]:
    """Of transformers 5's rope_parameters, or of rope_theta and rope_scaling before."""
    theta = fields.take("rope_theta", default=10000.0)
    rope = fields.take("rope_parameters", "rope_scaling", default={})
    fields.demand("partial_rotary_factor", 1.0)
    if not isinstance(rope, Mapping):
        raise CheckpointError(f"{fields.where}: rope_scaling is {rope!r}; it must be a mapping")
    inner = _Fields(rope, f"{fields.where}: rope_scaling")
    kind = inner.take("rope_type", "type", default="default")
    options = {"rotary_base": inner.take("rope_theta", default=theta)}
    inner.demand("partial_rotary_factor", 1.0)
    if kind == "llama3":
        inner.demand("attention_factor", None, 1.0)
        options["rope_scaling_factor"] = inner.take("factor")
        options["rope_scaling_low_freq_factor"] = inner.take("low_freq_factor")
        options["rope_scaling_high_freq_factor"] = inner.take("high_freq_factor")
        options["rope_scaling_original_length"] = inner.take("original_max_position_embeddings")
    elif kind != "default":
        inner.faults.append(f"rope_type={kind!r} (supported: 'default' or 'llama3')")
    inner.finish()
    return options


def _from_bloom(fields: _Fields) -> tuple[dict[str, Any], Any]:
    fields.demand("apply_residual_connection_post_layernorm", False)
    hidden, length = fields.take("n_embed", "hidden_size"), fields.values.get("seq_length") or 2048
    fields.demand("n_inner", None, 4 * hidden)
    return {
        "architecture": "bloom",
        "num_layers": fields.take("n_layer", "num_hidden_layers"),
        "hidden_size": hidden,
        "num_attention_heads": fields.take("n_head", "num_attention_heads"),
        "vocab_size": fields.take("vocab_size"),
        "position_embedding_type": "alibi",
        "embed_layernorm": True,
        "untie_embeddings_and_output_weights": not fields.take("tie_word_embeddings", default=True),
        "norm_epsilon": fields.take("layer_norm_epsilon", default=1e-5),
        "hidden_dropout": fields.take("hidden_dropout", default=0.0),
        "attention_dropout": fields.take("attention_dropout", default=0.0),
        "init_method_std": fields.take("initializer_range", default=0.02),
    }, length


def _from_gpt2(fields: _Fields) -> tuple[dict[str, Any], Any]:
    # three spellings of the same tanh approximation
    fields.demand("activation_function", "gelu_new", "gelu_pytorch_tanh", "gelu_fast")
    fields.demand("scale_attn_weights", True)
    fields.demand("scale_attn_by_inverse_layer_idx", False)
    fields.demand("add_cross_attention", False)
    dropout = fields.take("resid_pdrop", default=0.1)
    if fields.take("embd_pdrop", default=0.1) != dropout:
        log.warning("%s: resid_pdrop=%s becomes the dropout after the embedding too", fields.where, dropout)
    length = fields.take("n_positions", "max_position_embeddings", default=1024)
    return {
        "architecture": "bloom",
        "num_layers": fields.take("n_layer", "num_hidden_layers"),
        "hidden_size": fields.take("n_embd", "hidden_size"),
        "ffn_hidden_size": fields.take("n_inner", default=None),
        "num_attention_heads": fields.take("n_head", "num_attention_heads"),
        "vocab_size": fields.take("vocab_size"),
        "max_position_embeddings": length,
        "position_embedding_type": "learned",
        "untie_embeddings_and_output_weights": not fields.take("tie_word_embeddings", default=True),
        "norm_epsilon": fields.take("layer_norm_epsilon", default=1e-5),
        "hidden_dropout": dropout,
        "attention_dropout": fields.take("attn_pdrop", default=0.1),
        "init_method_std": fields.take("initializer_range", default=0.02),
    }, length


# ---------------------------------------------------------------------------------------------------------------------
# A run's options from a folder

# What a model computes; the rest of its section is about dropout, the start, padding and speed.
_COMPUTED = (
    "architecture", "num_layers", "hidden_size", "num_attention_heads", "position_embedding_type", "embed_layernorm",
    "untie_embeddings_and_output_weights", "norm_epsilon",
)  # fmt: skip
_OF_THE_RUN = ("make_vocab_size_divisible_by", "attention_backend", "use_fast_softmax", "use_fused_rmsnorm")
_ROPE_SCALING = ("rope_scaling_low_freq_factor", "rope_scaling_high_freq_factor", "rope_scaling_original_length")


def preset_of(folder: Path, vocab_size: int | None = None) -> dict[str, Any]:
    """What a preset says of the model in a folder of transformers, as `command_line.from_dict` takes it.

    {"model": every option that config.json settles, "training": {"bf16": whether its weights are 16-bit}}.
    `vocab_size` stands for the folder's where tokens were added. Raises CheckpointError for a smaller one, or a model
    that cannot be computed here.
    """
    path = own_file(folder, "config.json")
    theirs = read_json(path)
    model = config_of(theirs, path).model
    if vocab_size is not None and vocab_size < model.vocab_size:
        raise CheckpointError(
            f"vocab_size={vocab_size} is below the {model.vocab_size} of {path}: rows of its embedding would be lost; "
            f"give {model.vocab_size} or more"
        )
    idle = {*_OF_THE_RUN, *(() if model.rope_scaling_factor else _ROPE_SCALING)}
    if model.position_embedding_type != "rope":
        idle.add("rotary_base")
    options = {name: value for name, value in asdict(model).items() if value is not None and name not in idle}
    options["vocab_size"] = vocab_size or model.vocab_size
    stored = theirs.get("dtype", theirs.get("torch_dtype"))
    return {"model": options, "training": {"bf16": stored in ("bfloat16", "float16")}}


def differences(config: Config, theirs: Config) -> list[str]:
    """Each option in which a run's model is not that of a folder: "name=here, there". A larger vocabulary is none."""
    here, there = config.model, theirs.model
    pairs = {name: (getattr(here, name), getattr(there, name)) for name in _COMPUTED}
    pairs["ffn_hidden_size"] = here.ffn_size, there.ffn_size
    pairs["num_query_groups"] = here.num_kv_heads, there.num_kv_heads
    pairs["kv_channels"] = here.head_size, there.head_size
    if "learned" in (here.position_embedding_type, there.position_embedding_type):
        rows = (side.model.max_position_embeddings or side.training.seq_length for side in (config, theirs))
        pairs["max_position_embeddings"] = next(rows), next(rows)
    if here.position_embedding_type == there.position_embedding_type == "rope":
        pairs["rotary_base"] = here.rotary_base, there.rotary_base
        pairs["rope_scaling_factor"] = here.rope_scaling_factor, there.rope_scaling_factor
        if here.rope_scaling_factor and there.rope_scaling_factor:
            pairs |= {name: (getattr(here, name), getattr(there, name)) for name in _ROPE_SCALING}
    if here.vocab_size < there.vocab_size:
        pairs["vocab_size"] = here.vocab_size, there.vocab_size
    return [f"{name}={ours} here, {others} there" for name, (ours, others) in pairs.items() if ours != others]


# ---------------------------------------------------------------------------------------------------------------------
# Ours to theirs


def their_config(config: Config, precision: Precision, special_tokens: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json of a model of ours, readable by transformers 4 and 5."""
    model, length = config.model, config.model.max_position_embeddings or config.training.seq_length
    family = family_of(model)
    theirs: dict[str, Any] = {
        "architectures": [family.class_name],
        "model_type": family.model_type,
        "vocab_size": model.vocab_size,
        "initializer_range": model.init_method_std,
        "tie_word_embeddings": not model.untie_embeddings_and_output_weights,
        "use_cache": True,
        "torch_dtype": str(DTYPES[precision]).removeprefix("torch."),
        # null too: transformers' defaults are ids of other vocabularies
        **{name: special_tokens.get(name) for name in SPECIAL_TOKENS},
    }
    if family is _LLAMA:
        scaling = None
        if model.rope_scaling_factor is not None:
            scaling = {
                "rope_type": "llama3",
                "factor": model.rope_scaling_factor,
                "low_freq_factor": model.rope_scaling_low_freq_factor,
                "high_freq_factor": model.rope_scaling_high_freq_factor,
                "original_max_position_embeddings": model.rope_scaling_original_length,
            }
        return theirs | {
            "hidden_size": model.hidden_size,
            "intermediate_size": model.ffn_size,
            "num_hidden_layers": model.num_layers,
            "num_attention_heads": model.num_attention_heads,
            "num_key_value_heads": model.num_kv_heads,
            "head_dim": model.head_size,
            "hidden_act": "silu",
            "max_position_embeddings": length,
            "rms_norm_eps": model.norm_epsilon,
            "rope_theta": model.rotary_base,
            "rope_scaling": scaling,
            "attention_bias": False,
            "mlp_bias": False,
            "attention_dropout": model.attention_dropout,
        }
    theirs |= {
        "n_layer": model.num_layers,
        "n_head": model.num_attention_heads,
        "layer_norm_epsilon": model.norm_epsilon,
    }
    if family is _BLOOM:
        return theirs | {
            "hidden_size": model.hidden_size,
            "hidden_dropout": model.hidden_dropout,
            "attention_dropout": model.attention_dropout,
            "apply_residual_connection_post_layernorm": False,
            "seq_length": config.training.seq_length,
        }
    return theirs | {
        "n_embd": model.hidden_size,
        "n_inner": model.ffn_size,
        "n_positions": length,
        "activation_function": "gelu_new",
        "resid_pdrop": model.hidden_dropout,
        "embd_pdrop": model.hidden_dropout,
        "attn_pdrop": model.attention_dropout,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
    }
