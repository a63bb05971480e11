"""transformers' config.json and our ModelConfig, each as the other; and what transformers calls a model's modules."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from megatron.checkpoint.folders import CheckpointError
from megatron.models.family import HuggingFaceForm
from megatron.models.registry import FAMILIES, family_named
from megatron.models.rules import check_rotary
from megatron.options.config import Config, ModelConfig, TrainingConfig
from megatron.options.extension import forbidden_differences
from megatron.options.model import PARTICULAR, differing
from megatron.runtime.commands import command_name
from megatron.weights.folder_files import Precision, own_file, read_json
from megatron.weights.meta.params import PARAMS, config_json, is_meta_folder

SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
OUTPUT = "lm_head.weight"


def forms(architecture: str | None = None) -> dict[str, tuple[str, HuggingFaceForm]]:
    """Return (architecture, form) by model_type: of this package's families, and of `architecture`, if given."""
    names = list(FAMILIES)
    if architecture is not None and architecture not in FAMILIES:
        names.append(architecture)
    return {form.model_type: (name, form) for name in names for form in family_named(name).huggingface.values()}


def form_of(model: ModelConfig) -> HuggingFaceForm:
    """Return which of transformers' classes computes what this model does. Raises CheckpointError if none does."""
    form = family_named(model.architecture).huggingface_form(model)
    remedy = "such a model has no Hugging Face form, keep it as native or universal"
    if form is None:
        raise CheckpointError(f"transformers has no class for architecture={model.architecture}; {remedy}")
    if wrong := form.cannot_express(model):
        raise CheckpointError(
            f"transformers' {form.class_name}, the nearest to architecture={model.architecture} with "
            f"position_embedding_type={model.position_embedding_type}, has no {', '.join(wrong)}; {remedy}"
        )
    return form


# Reading a config.json. A key that is read in no place may change what the model computes, and numbers that are a
# little wrong look like a model that trains a little worse: so every key is known, off, or refused.

# what changes no number in the forward pass, or follows from what is checked
_HARMLESS = {
    "_name_or_path", "architectures", "attention_softmax_in_fp32", "bias_dropout_fusion", "dtype",
    "gradient_checkpointing", "id2label", "label2id", "masked_softmax_fusion", "model_type", "n_ctx", "offset_alibi",
    "output_past", "pretraining_tp", "reorder_and_upcast_attn", "seq_length", "skip_bias_add", "skip_bias_add_qkv",
    "slow_but_exact", "task_specific_params", "torch_dtype", "transformers_version", "unk_token_id", "use_cache",
    "summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj",
    "is_encoder_decoder", "output_attentions", "output_hidden_states", "return_dict", "chunk_size_feed_forward",
    "problem_type", "finetuning_task", *SPECIAL_TOKENS,
    # of generation
    "bad_words_ids", "begin_suppress_tokens", "decoder_start_token_id", "diversity_penalty", "do_sample",
    "early_stopping", "encoder_no_repeat_ngram_size", "exponential_decay_length_penalty", "forced_bos_token_id",
    "forced_eos_token_id", "length_penalty", "max_length", "max_new_tokens", "min_length", "no_repeat_ngram_size",
    "num_beam_groups", "num_beams", "num_return_sequences", "output_scores", "remove_invalid_values",
    "repetition_penalty", "return_dict_in_generate", "sep_token_id", "suppress_tokens", "temperature", "top_k",
    "top_p", "typical_p",
    # of a person, an implementation, a tool or another kind of model
    "author", "cache_implementation", "datasets", "description", "language", "license", "license_link", "license_name",
    "tags", "_attn_implementation", "_attn_implementation_autoset", "_attn_implementation_internal", "_commit_hash",
    "_flash_attn_2_enabled", "_num_labels", "attn_implementation", "classifier_dropout", "is_decoder",
    "model_max_length", "name_or_path", "num_labels", "prefix", "prune_heads", "tf_legacy_loss", "tie_encoder_decoder",
    "tokenizer_class", "torchscript", "transformers.js_config", "unsloth_fixed", "unsloth_version", "use_bfloat16",
    "use_flash_attention", "use_flash_attention_2", "use_flash_attn",
}  # fmt: skip
_OFF: tuple[Any, ...] = (None, False, 0, "", [], {})
"""Values of a key that no option here stands for, by which it changes nothing."""
_NEUTRAL = {
    **dict.fromkeys(("attn_scale", "embedding_multiplier", "logit_scale", "logits_scaling"), 1),
    **dict.fromkeys(("lm_head_multiplier", "partial_rotary_factor", "residual_multiplier", "rotary_pct"), 1),
    **dict.fromkeys(("routed_scaling_factor", "scale_depth", "scale_emb", "attention_factor", "mscale"), 1),
}
"""Factors that change nothing at 1."""
_ON = (
    "apply_rotary", "causal", "elementwise_affine", "is_causal", "norm_affine", "rms_norm", "use_causal_mask",
    "use_final_norm", "use_rmsnorm", "use_rope",
)  # fmt: skip
"""Switches that change what is computed where they are off."""
_WINDOWED = ("sliding_window", "max_window_layers")
"""Keys without effect where use_sliding_window is false."""

_KINDS = {int: "an integer", float: "a number", bool: "true or false", str: "text"}
LARGEST = 2**63 - 1
"""torch's sizes are int64: a larger integer would fail far from here, without the name of its field."""
SHOWN_CHARACTERS = 60


def shown(value: object) -> str:
    """Return a value of a foreign file for a message, shortened."""
    text = repr(value)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}..."


def _is_of(kind: type, value: object) -> bool:
    # True is an int to Python, but no size
    if isinstance(value, bool) or kind in (bool, str):
        return type(value) is kind
    if isinstance(value, int):
        return abs(value) <= LARGEST
    return isinstance(value, float) and kind is float and math.isfinite(value)


class _Fields:
    """A config.json being read: which keys were, and what is wrong with them."""

    def __init__(
        self, values: Mapping[str, Any], where: Path | str, outer: _Fields | None = None, prefix: str = ""
    ) -> None:
        """`outer`: the fields that these lie in, which report all faults; each begins with `prefix` there."""
        self.values, self.where = values, where
        self._outer, self._prefix = outer, prefix
        self.faults: list[str] = []
        self._read: set[str] = set()

    def take(self, *names: str, default: Any = ..., kind: type | None = None) -> Any:
        """The value under the first of these names that is there; without a default one must be.

        `kind` is int, float (any number), bool or str; None: that of the default, else int.
        """
        self._read.update(names)
        name = next((name for name in names if self.values.get(name) is not None), None)
        if name is None:
            if default is ...:
                raise CheckpointError(f"{self.where} lacks {names[0]}; copy the model's own config.json there")
            return default
        if kind is None:
            kind = int if default in (..., None) else type(default)
        value = self.values[name]
        if not _is_of(kind, value):
            raise CheckpointError(
                f"{self.where}: {name}={shown(value)} must be {_KINDS[kind]}; copy the model's own config.json there"
            )
        return value

    def has(self, name: str) -> bool:
        return name in self.values

    def texts(self, name: str) -> list[str]:
        self._read.add(name)
        value = self.values.get(name) or []
        if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
            raise CheckpointError(f"{self.where}: {name}={shown(value)} must be a list of texts")
        return value

    def integers(self, name: str) -> list[int]:
        self._read.add(name)
        value = self.values.get(name) or []
        if not isinstance(value, list) or not all(_is_of(int, number) for number in value):
            raise CheckpointError(f"{self.where}: {name}={shown(value)} must be a list of integers")
        return value

    def numbers(self, name: str) -> list[float]:
        self._read.add(name)
        value = self.values.get(name)
        if not isinstance(value, (list, tuple)) or not value or not all(_is_of(float, number) for number in value):
            raise CheckpointError(f"{self.where}: {name}={shown(value)} must be a list of numbers")
        return [float(number) for number in value]

    def demand(self, name: str, *allowed: Any) -> None:
        """Refuse other values than these; a missing one is transformers' default, the first of them."""
        self._read.add(name)
        value = self.values.get(name, allowed[0])
        if value not in allowed:
            self.refuse(f"{name}={shown(value)} (supported: {' or '.join(map(repr, allowed))})")

    def refuse(self, fault: str) -> None:
        self.faults.append(fault)
        if self._outer is not None:
            self._outer.refuse(f"{self._prefix}{fault}")

    def nested(self, *names: str, apart_from: str = "") -> _Fields:
        """Return the fields of the mapping under one of these names; none of them: an empty one.

        Refuses several that differ in more than the key `apart_from`: readers do not agree on which one counts.
        """
        self._read.update(names)
        given = {name: self.values[name] for name in names if self.values.get(name) not in (None, {})}
        for name, value in given.items():
            if not isinstance(value, Mapping):
                raise CheckpointError(f"{self.where}: {name} is {shown(value)}; it must be a mapping")
        compared = [{key: value[key] for key in value if key != apart_from} for value in given.values()]
        if any(other != compared[0] for other in compared[1:]):
            self.refuse(f"{' and '.join(given)} differ (supported: one of them, or both alike)")
        name = next(iter(given), names[0])
        return _Fields(given.get(name, {}), f"{self.where}: {name}", self, f"{name}: ")

    @property
    def taken(self) -> set[str]:
        """Keys that describe what the model computes."""
        return self._read - _HARMLESS

    def finish(self) -> None:
        """Raise CheckpointError with every unsupported value, and every key that may change what is computed."""
        unknown = [f"{name}={shown(self.values[name])}" for name in sorted(self.values) if not self._is_idle(name)]
        if unknown:
            verb = "is" if len(unknown) == 1 else "are"
            self.refuse(
                f"{', '.join(unknown)} {verb} not known here; if the model computes the same without, remove from "
                "config.json"
            )
        if self.faults and self._outer is None:
            raise CheckpointError(
                f"{self.where} describes a model that cannot be computed here: {'; '.join(self.faults)}"
            )

    def _is_idle(self, name: str) -> bool:
        """Return True for a key that is read, or has a value by which it changes nothing."""
        value = self.values[name]
        if name in self._read or name in _HARMLESS:
            return True
        if name in _ON:
            return value is True or value is None
        if value in _OFF:
            return True
        if name in _WINDOWED and self.values.get("use_sliding_window") is False:
            return True
        if name == "layer_types":
            return isinstance(value, list) and set(map(str, value)) <= {"full_attention"}
        # True equals 1, but is a switch, whatever it turns on
        return not isinstance(value, bool) and name in _NEUTRAL and value == _NEUTRAL[name]


def config_of(
    theirs: Mapping[str, Any], where: Path | str, precision: Precision = "fp32", architecture: str | None = None
) -> Config:
    """Return the model that a config.json describes, as a config of ours; `architecture` as in `forms`.

    Raises CheckpointError naming every field whose value changes what is computed, or may, and is not supported.
    """
    name, form = _form_described(theirs, where, architecture)
    fields = _Fields(theirs, where)
    # code of its own, whatever it computes, but for that which became transformers' class; none is run
    code, published = theirs.get("auto_map"), form.published_code or {}
    if isinstance(code, Mapping) and all(published.get(name) == value for name, value in code.items()):
        fields.demand("auto_map", code)
    else:
        fields.demand("auto_map", None)
    fields.demand("quantization_config", None)
    model, seq_length = form.options(fields)
    # keys that every export has, which the form of a family of one's own need not read
    fields.take("initializer_range", default=0.02)
    if "tie_word_embeddings" not in fields.taken:
        fields.demand("tie_word_embeddings", not model.get("untie_embeddings_and_output_weights", False))
    fields.finish()
    try:
        config = Config(
            model=ModelConfig(architecture=name, **model),
            training=TrainingConfig(seq_length=seq_length, bf16=precision == "bf16", fp16=precision == "fp16"),
        )
    except ValidationError as error:
        faults = [f"{fault['loc'][0]}={shown(fault['input'])}: {fault['msg']}" for fault in error.errors()]
        raise CheckpointError(f"{where} describes no model: {'; '.join(faults)}") from None
    _check_heads(config.model, where)
    return config


def _form_described(
    theirs: Mapping[str, Any], where: Path | str, architecture: str | None
) -> tuple[str, HuggingFaceForm]:
    """Return the architecture and the form that model_type names. Raises CheckpointError."""
    kind = theirs.get("model_type")
    known = forms(architecture)
    if isinstance(kind, str) and kind in known:
        return known[kind]
    remedy = "" if kind else " (is it a transformers config.json?)"
    raise CheckpointError(f"{where} has model_type={shown(kind)}; only {', '.join(known)} can be converted{remedy}")


def _check_heads(ours: ModelConfig, where: Path | str) -> None:
    if ours.kv_channels is None and ours.hidden_size % ours.num_attention_heads:
        raise CheckpointError(
            f"{where}: num_attention_heads={ours.num_attention_heads} does not divide hidden_size={ours.hidden_size}"
        )
    if ours.num_attention_heads % ours.num_kv_heads:
        raise CheckpointError(
            f"{where}: num_key_value_heads={ours.num_kv_heads} does not divide "
            f"num_attention_heads={ours.num_attention_heads}"
        )
    if ours.position_embedding_type == "rope" and (faults := list(check_rotary(ours))):
        raise CheckpointError(f"{where} describes no model: {'; '.join(faults)}")


# A run's options from a config.json

_OF_THE_RUN = (
    "freeze",
    "quantize_base",
    "make_vocab_size_divisible_by",
    "attention_backend",
    "kernels",
    "use_fast_softmax",
    "fused_sdpa_recompute",
    "use_fused_rmsnorm",
    "moe_z_loss_coeff",
    "moe_expert_capacity_factor",
    "moe_router_bias_update_rate",
    "moe_input_jitter_eps",
)
"""Options of a run or its machine, which no config.json settles."""


def read_config(folder: Path) -> tuple[dict[str, Any], Path]:
    """Return a folder's config.json, or what Meta's params.json says as one, and the file. Raises CheckpointError."""
    if described_in(folder) == PARAMS:
        return config_json(folder)
    path = own_file(folder, "config.json")
    return read_json(path), path


def described_in(folder: Path) -> str:
    """Return the name of the file that describes the model in a folder."""
    return PARAMS if is_meta_folder(folder) and not os.path.lexists(folder / "config.json") else "config.json"


def preset_of(folder: Path, vocab_size: int | None = None) -> dict[str, Any]:
    """Return the preset of the model in a folder of transformers or Meta, as `command_line.from_dict` takes it.

    {"model": every option that config.json settles, "training": {"bf16": whether its weights are 16-bit}}.
    `vocab_size` stands for the folder's where tokens were added. Raises CheckpointError for a smaller one, or a model
    that cannot be computed here.
    """
    theirs, path = read_config(folder)
    model = config_of(theirs, path).model
    if vocab_size is not None and vocab_size < model.vocab_size:
        raise CheckpointError(
            f"vocab_size={vocab_size} is below the {model.vocab_size} of {path}: rows of its embedding would be lost; "
            f"give {model.vocab_size} or more"
        )
    options = described(model) | {"vocab_size": vocab_size or model.vocab_size}
    stored = theirs.get("dtype", theirs.get("torch_dtype"))
    return {"model": options, "training": {"bf16": stored in ("bfloat16", "float16")}}


def described(model: ModelConfig) -> dict[str, Any]:
    """Return the options that settle a model, without those that a run chooses for it."""
    idle = set(_OF_THE_RUN) | (set(PARTICULAR) - model.particular().keys()) | model.idle_rope_scaling
    if model.position_embedding_type != "rope":
        idle.add("rotary_base")
    # the experts' width may follow from it
    idle |= model.idle_of_experts - {"ffn_hidden_size"}
    return {name: value for name, value in asdict(model).items() if value is not None and name not in idle}


def differences(config: Config, theirs: Config) -> list[str]:
    """Each option in which a run's model is not that of a folder: "name=here, there". A larger vocabulary is none."""
    return differing(*_computed(config, theirs))


def _computed(config: Config, theirs: Config) -> tuple[dict[str, Any], dict[str, Any]]:
    here, there = (side.model.computed(side.training.seq_length) for side in (config, theirs))
    there["vocab_size"] = max(here["vocab_size"], there["vocab_size"])
    return here, there


def other_model(folder: Path, config: Config, theirs: Config) -> str | None:
    """Return the fault of options that describe another model than the folder does; None: they describe it."""
    different, hint = forbidden_differences(*_computed(config, theirs), extends=config.checkpoint.extend_context)
    if not different:
        return None
    return (
        f"{folder} is of another model than the options describe: {'; '.join(different)}. Take them from it: leave "
        f"all of them out, or {command_name('model_config')} --load {folder} > model.yaml, then --config "
        f"model.yaml{hint}"
    )


# Ours to theirs


def their_config(config: Config, precision: Precision, special_tokens: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json of a model of ours, readable by transformers 4 and 5."""
    model, form = config.model, form_of(config.model)
    return {
        "architectures": [form.class_name],
        "model_type": form.model_type,
        "vocab_size": model.vocab_size,
        "initializer_range": model.init_method_std,
        "tie_word_embeddings": not model.untie_embeddings_and_output_weights,
        "use_cache": True,
        "torch_dtype": {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}[precision],
        # null too: transformers' defaults are ids of other vocabularies
        **{name: special_tokens.get(name) for name in SPECIAL_TOKENS},
        **form.config_fields(config),
    }


def restored_config(
    theirs: Mapping[str, Any], config: Config, precision: Precision, tokens: tuple[Mapping[str, Any], Mapping[str, Any]]
) -> dict[str, Any]:
    """Return the config.json that a model came with, changed only where the model has changed since.

    So keys that have no option of ours survive, and the spelling of the others. `tokens` are the special tokens by the
    same rules before and now.
    """
    form, ours = form_of(config.model), their_config(config, precision, tokens[1])
    if theirs.get("model_type") != form.model_type:
        return ours
    # against our own spelling of what it was: a key that theirs spells otherwise has not changed by that
    before = their_config(config_of(theirs, "source", precision, config.model.architecture), precision, tokens[0])
    changed = {name: value for name, value in ours.items() if before.get(name, ...) != value}
    for name in SPECIAL_TOKENS:
        if theirs.get(name) is None and ours[name] is not None:
            changed[name] = ours[name]
    result = {**theirs, "architectures": [form.class_name], **changed}
    if not _describes(result, config):  # what changed has another spelling in theirs
        fields = _Fields(theirs, "source")
        form.options(fields)
        result = {name: value for name, value in theirs.items() if name not in fields.taken} | ours
    # the files that it names are not written
    result.pop("auto_map", None)
    # transformers 4 writes torch_dtype, 5 dtype: where both are, both must say the same
    result.pop("torch_dtype", None)
    spellings = [name for name in ("torch_dtype", "dtype") if name in theirs]
    if not spellings and precision != "fp32":  # fp32 is the default
        spellings = ["torch_dtype"]
    return result | dict.fromkeys(spellings, ours["torch_dtype"])


def _describes(theirs: Mapping[str, Any], config: Config) -> bool:
    try:
        return not differences(config, config_of(theirs, "result", architecture=config.model.architecture))
    except CheckpointError:
        return False
