"""Options of the model's architecture."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from megatron.options.types import STRICT, NonNegativeFloat, Number, Positive, PositiveFloat, Probability, Whole
from megatron.runtime.device import Device

MIN_FLEX_HEAD_SIZE = 16
"""Smallest number of channels of a head that flex_attention has a kernel for. Source: torch 2.11's error."""
NOT_COMPUTED = frozenset(
    {
        "make_vocab_size_divisible_by", "hidden_dropout", "attention_dropout", "init_method_std", "attention_backend",
        "kernels", "use_fast_softmax", "fused_sdpa_recompute", "use_fused_rmsnorm", "freeze",
        "quantize_base", "moe_aux_loss_coeff", "moe_z_loss_coeff", "moe_expert_capacity_factor",
        "moe_router_bias_update_rate", "moe_input_jitter_eps",
    }
)  # fmt: skip
"""Options that leave the function of given weights as it is: padding, dropout, start, kernels, and what is trained.

All others are compared with those of a checkpoint, so a new option is compared unless it is added here.
"""
PARTICULAR = (
    "attention_window", "attention_window_pattern", "attention_multiplier", "attention_softcap", "rotary_percent",
    "rotary_base_local", "shared_norm",
    "embedding_multiplier", "residual_multiplier", "logits_scaling", "logits_softcap",
    "num_experts", "moe_shared_expert_intermediate_size", "moe_layer_freq", "moe_router_score_function",
    "moe_router_pre_softmax", "moe_router_topk_scaling_factor", "moe_router_enable_expert_bias",
    "moe_router_num_groups", "moe_router_group_topk",
)  # fmt: skip
"""Options that few models have: a form of transformers names those that it can express (models/family.py)."""

ROPE_SCALING: Mapping[str, tuple[str, ...]] = {
    "llama3": ("rope_scaling_original_length", "rope_scaling_low_freq_factor", "rope_scaling_high_freq_factor"),
    "linear": (),
    "dynamic": ("rope_scaling_original_length",),
    "yarn": (
        "rope_scaling_original_length", "rope_scaling_attention_factor", "rope_scaling_beta_fast",
        "rope_scaling_beta_slow", "rope_scaling_truncate",
    ),
    "longrope": (
        "rope_scaling_original_length", "rope_scaling_attention_factor", "rope_scaling_short_factors",
        "rope_scaling_long_factors",
    ),
}  # fmt: skip
"""Options beside the factor that each rope_scaling_type reads."""
ROPE_SCALING_OPTIONS = ("rope_scaling_type", *dict.fromkeys(itertools.chain.from_iterable(ROPE_SCALING.values())))
"""Options that do nothing without a rope_scaling_factor."""


@dataclass(frozen=True, config=STRICT)
class ModelConfig:
    """Architecture of the model."""

    architecture: str = "bloom"
    """Model family, a file of megatron/models/families/: `bloom`, `falcon`, `gemma2`, `gemma3`, `gpt_neox`, `granite`,
    `granitemoe`, `llama`, `mistral`, `mixtral`, `olmo2`, `olmoe`, `phi3`, `qwen2`, `qwen3`, `qwen3_moe`, `starcoder2`.
    `package.module:RECORD`: a family of your own."""
    num_layers: Positive = 2
    """Number of transformer layers."""
    hidden_size: Positive = 64
    """Width of the residual stream."""
    ffn_hidden_size: Positive | None = None
    """Intermediate width of the MLP (for llama: of the gate and of the up projection each). Unset: 4 x hidden_size."""
    num_attention_heads: Positive = 4
    """Number of query heads."""
    num_query_groups: Positive | None = None
    """Number of key and value heads (GQA). Unset: one for each query head (MHA)."""
    kv_channels: Positive | None = None
    """Size of one head. Unset: hidden_size / num_attention_heads."""
    vocab_size: Positive = 50257
    """Vocabulary size of the tokenizer, before padding. Padded rows are excluded from the softmax."""
    make_vocab_size_divisible_by: Positive = 128
    """Pad the embedding to a multiple of this number times the tensor-parallel size."""
    max_position_embeddings: Positive | None = None
    """Rows of the learned position table. Unset: seq_length."""
    position_embedding_type: Literal["learned", "alibi", "rope"] = "learned"
    """Position encoding: a learned table, ALiBi's linear bias, or rotary embedding."""
    rotary_base: PositiveFloat = 10000.0
    """Base of the rotary frequencies (theta)."""
    rotary_base_local: PositiveFloat | None = None
    """Base in layers with the attention_window, without rope scaling. Unset: as in the others."""
    rotary_percent: Annotated[Number, Field(gt=0, le=1)] = 1.0
    """Share of the channels of each head that are rotated, the first ones."""
    rope_scaling_factor: PositiveFloat | None = None
    """Factor by which the rotary positions are scaled. Unset: no scaling."""
    rope_scaling_type: Literal["llama3", "linear", "dynamic", "yarn", "longrope"] = "llama3"
    """Form of that scaling: Llama 3.1's, all wavelengths alike, a base that grows with the length of a text (dynamic
    NTK), YaRN, or LongRoPE."""
    rope_scaling_original_length: Positive = 8192
    """Context length of the original training, for all but linear."""
    rope_scaling_low_freq_factor: PositiveFloat = 1.0
    """llama3: divide wavelengths above original length / this number by rope_scaling_factor."""
    rope_scaling_high_freq_factor: PositiveFloat = 4.0
    """llama3: keep wavelengths below original length / this number unchanged."""
    rope_scaling_attention_factor: PositiveFloat | None = None
    """yarn, longrope: factor of rotated queries and keys each. Unset: the method's own, by factor and original
    length."""
    rope_scaling_beta_fast: PositiveFloat = 32.0
    """yarn: keep wavelengths below original length / this number unchanged."""
    rope_scaling_beta_slow: PositiveFloat = 1.0
    """yarn: divide wavelengths above original length / this number by rope_scaling_factor."""
    rope_scaling_truncate: bool = True
    """yarn: round these two bounds to whole channels."""
    rope_scaling_short_factors: tuple[PositiveFloat, ...] = ()
    """longrope: divisor of each frequency in texts up to the original length."""
    rope_scaling_long_factors: tuple[PositiveFloat, ...] = ()
    """longrope: divisor of each frequency in longer texts. As with dynamic, each packed document counts for itself."""
    attention_window: Positive | None = None
    """Latest tokens that a token sees, itself included (sliding-window attention). Unset: all before it."""
    attention_window_pattern: tuple[Whole, ...] = (1,)
    """Layers with the attention_window: 1 with it, 0 without; repeated over all layers."""
    attention_multiplier: PositiveFloat | None = None
    """Factor of the attention scores. Unset: 1 / sqrt(head size)."""
    attention_softcap: PositiveFloat | None = None
    """Bound of the attention scores: s becomes cap * tanh(s / cap). Unset: none."""
    embedding_multiplier: PositiveFloat = 1.0
    """Factor of the word embedding."""
    residual_multiplier: PositiveFloat = 1.0
    """Factor of the outputs of attention and MLP before they are added to the residual stream."""
    logits_scaling: PositiveFloat = 1.0
    """Divisor of the logits."""
    logits_softcap: PositiveFloat | None = None
    """Bound of the logits: z becomes cap * tanh(z / cap). Unset: none."""
    shared_norm: bool = False
    """Attention and MLP read one norm of the stream, in families that compute both in parallel: falcon, gpt_neox."""
    embed_layernorm: bool = False
    """Apply a LayerNorm to the word embedding, as in BLOOM-176B."""
    untie_embeddings_and_output_weights: bool = False
    """Use separate weights for the word embedding and the output layer."""
    norm_epsilon: PositiveFloat = 1e-5
    """Value added to the variance in every normalisation."""
    hidden_dropout: Probability = 0.1
    """Dropout after the embedding, the attention output and the MLP output."""
    attention_dropout: Probability = 0.1
    """Dropout of the attention probabilities."""
    init_method_std: PositiveFloat = 0.02
    """Standard deviation of the normal initialisation; for residual projections it is divided by sqrt(2 num_layers)."""
    mup_base_hidden_size: Positive | None = None
    """hidden_size of the model that lr, init_method_std and the multipliers were tuned on (muP). With m = hidden_size /
    this width, matrices between widths have lr / m, weight_decay x m and init_method_std / sqrt(m), the logits are
    divided by m too, and adam_eps by m. The head size is best kept, so that the number of heads grows. Unset: no
    muP."""
    mup_base_head_size: Positive | None = None
    """muP: size of that model's heads, where it differs: the factor of the scores is sqrt(this size) / head size."""
    kernels: Literal["auto", "plain", "fused"] = "auto"
    """Form of rotary embedding, SwiGLU, RMSNorm and attention. `plain`: torch's operators, the
    reference. `fused`: compiled by torch.compile on CUDA and CPU, Habana's on HPU. `auto`: as fused, but on CPU
    operators that need no compiler. docs/reference/kernels.md has the table."""
    attention_backend: Literal["auto", "sdpa", "flex", "fused_hpu"] = "auto"
    """Attention kernel. `sdpa`: torch's. `flex`: flex_attention, CUDA only. `fused_hpu`: Habana's FusedSDPA. `auto`:
    fused_hpu on HPU, flex on CUDA for ALiBi or packed documents with heads of 16 channels or more, matrix products by
    blocks of queries on a CPU where they are faster, otherwise and with `kernels=plain` sdpa."""
    use_fast_softmax: bool = False
    """Use the fast softmax of Habana's FusedSDPA. HPU only."""
    fused_sdpa_recompute: bool = True
    """Let Habana's FusedSDPA compute the attention probabilities again in the backward pass instead of storing them.
    HPU only."""
    use_fused_rmsnorm: bool = True
    """Use Habana's FusedRMSNorm on HPU; no effect on other devices."""
    num_experts: Positive | None = None
    """Number of experts of a layer: MLPs, of which each token passes through the few that a router chooses. Unset: one
    MLP for all tokens."""
    moe_router_topk: Positive = 2
    """Experts that each token passes through."""
    moe_ffn_hidden_size: Positive | None = None
    """Intermediate width of each expert. Unset: ffn_hidden_size."""
    moe_shared_expert_intermediate_size: Positive | None = None
    """Intermediate width of the shared experts, one MLP beside the others that every token passes through. Unset: none.
    """
    moe_layer_freq: tuple[int, ...] = (1,)
    """Layers with experts: 1 with them, 0 with one MLP of ffn_hidden_size; repeated over all layers."""
    moe_router_score_function: Literal["softmax", "sigmoid"] = "softmax"
    """Scores of the experts from the router's logits."""
    moe_router_pre_softmax: bool = False
    """Weigh the chosen experts by their scores among all experts. Otherwise the weights of a token add up to 1."""
    moe_router_topk_scaling_factor: PositiveFloat = 1.0
    """Factor of the weights of the chosen experts."""
    moe_router_num_groups: Positive | None = None
    """Groups of experts, one after the other, of which a token passes through experts of moe_router_group_topk alone
    (DeepSeek-V3's n_group). Unset: one group."""
    moe_router_group_topk: Positive | None = None
    """Groups that a token chooses first, by the sum of the two highest scores in each."""
    moe_router_enable_expert_bias: bool = False
    """Add a bias to the scores of the experts for the choice alone, not for the weights. After each step that of an
    expert with fewer tokens of the global batch than the mean rises, and the others' fall: balance without a loss."""
    moe_router_bias_update_rate: NonNegativeFloat = 1e-3
    """moe_router_enable_expert_bias: what a bias rises or falls by in a step."""
    moe_input_jitter_eps: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Multiply the input of the routers in training by random numbers between 1 - eps and 1 + eps. 0: none."""
    moe_aux_loss_coeff: NonNegativeFloat = 0.0
    """Coefficient of Switch's balancing loss: experts x sum over the experts of (share of the tokens) x (mean score),
    which is 1 where all are used alike. Shares are those of one microbatch of all data-parallel ranks; the terms of
    all layers are added. 0: none."""
    moe_z_loss_coeff: NonNegativeFloat = 0.0
    """Coefficient of the router's z-loss: the mean square of log(sum(exp(logits))). 0: none."""
    moe_expert_capacity_factor: PositiveFloat | None = None
    """Largest number of tokens of a sequence that an expert takes in training: this factor times moe_router_topk x
    tokens / num_experts, rounded up. Those with the lowest scores pass it by. Unset: all tokens are taken."""
    freeze: tuple[str, ...] = ()
    """Names of parameters to exclude from training, or shell patterns such as `embedding.*` or `layers.[0-7].*`."""
    quantize_base: Literal["none", "nf4"] = "none"
    """Hold the frozen weights of the layers' linear layers in 4 bits, quantised while they are loaded (QLoRA). `nf4`:
    4-bit NormalFloat with double quantisation, as in bitsandbytes. Embeddings, norms, biases and the output layer stay
    as they are."""

    @property
    def ffn_size(self) -> int:
        return self.ffn_hidden_size or 4 * self.hidden_size

    @property
    def expert_ffn_size(self) -> int:
        return self.moe_ffn_hidden_size or self.ffn_size

    def has_experts(self, layer: int) -> bool:
        """Return True if the transformer layer of this number has experts in place of one MLP."""
        return self.num_experts is not None and bool(self.moe_layer_freq[layer % len(self.moe_layer_freq)])

    @property
    def idle_of_experts(self) -> set[str]:
        """Options that do nothing where no layer has experts, or all have."""
        if self.num_experts is None:
            return {field.name for field in dataclasses.fields(self) if field.name.startswith("moe_")}
        return {"ffn_hidden_size"} if all(self.moe_layer_freq) else set()

    @property
    def num_kv_heads(self) -> int:
        return self.num_query_groups or self.num_attention_heads

    @property
    def head_size(self) -> int:
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def width_multiplier(self) -> float:
        """Width over that of muP's base model."""
        return self.hidden_size / (self.mup_base_hidden_size or self.hidden_size)

    @property
    def logits_divisor(self) -> float:
        """Divisor of the logits: logits_scaling, times muP's."""
        return self.logits_scaling * self.width_multiplier

    @property
    def score_factor(self) -> float | None:
        """Factor of the attention scores: attention_multiplier, or muP's. None: 1 / sqrt(head size)."""
        # a part of muP, which mup_base_hidden_size switches on; a rule keeps it apart from attention_multiplier
        base = self.mup_base_head_size if self.mup_base_hidden_size is not None else None
        if base is None or base == self.head_size:
            return self.attention_multiplier
        return math.sqrt(base) / self.head_size

    @property
    def rotary_size(self) -> int:
        """Channels of a head that are rotated."""
        return int(self.head_size * self.rotary_percent)

    @property
    def scales_rotary(self) -> bool:
        return self.position_embedding_type == "rope" and self.rope_scaling_factor is not None

    @property
    def idle_rope_scaling(self) -> set[str]:
        """Options of ROPE_SCALING_OPTIONS that do nothing."""
        if not self.scales_rotary:
            return set(ROPE_SCALING_OPTIONS)
        return set(ROPE_SCALING_OPTIONS) - {"rope_scaling_type", *ROPE_SCALING[self.rope_scaling_type]}

    @property
    def rotary_border(self) -> int | None:
        """Length of a text beyond which the angles of its tokens depend on its length. None: they never do."""
        depends = self.scales_rotary and self.rope_scaling_type in ("dynamic", "longrope")
        return self.rope_scaling_original_length if depends else None

    def encodes_alike(self, length: int, other: int) -> bool:
        """Return True if the tokens of a text of this length are encoded as those of one of another length."""
        border = self.rotary_border
        if border is None or max(length, other) <= border:
            return True
        return self.rope_scaling_type == "longrope" and min(length, other) > border

    @property
    def rotary_amplitude(self) -> float:
        """Factor of rotated queries and keys each.

        Source: Peng et al. 2023 (arXiv:2309.00071), equation 22; Ding et al. 2024 (arXiv:2402.13753), section 4.
        """
        factor, kind = self.rope_scaling_factor, self.rope_scaling_type
        if not self.scales_rotary or factor is None or kind not in ("yarn", "longrope"):
            return 1.0
        if self.rope_scaling_attention_factor is not None:
            return self.rope_scaling_attention_factor
        if factor <= 1:
            return 1.0
        if kind == "yarn":
            return 0.1 * math.log(factor) + 1.0
        return math.sqrt(1 + math.log(factor) / math.log(self.rope_scaling_original_length))

    @property
    def suits_flex(self) -> bool:
        """flex_attention has no kernel for heads of fewer than 16 channels."""
        return self.head_size >= MIN_FLEX_HEAD_SIZE

    def window_of(self, layer: int | None) -> int | None:
        """Return the attention window of the transformer layer of this number; None: it has none."""
        if layer is None:
            return None
        pattern = self.attention_window_pattern
        return self.attention_window if pattern[layer % len(pattern)] else None

    def particular(self) -> dict[str, Any]:
        """Return the options of PARTICULAR that do something, by name, with muP's part in their values."""
        idle = set() if self.attention_window else {"attention_window_pattern", "rotary_base_local"}
        idle |= self.idle_of_experts
        # a value at its default needs nothing of a form of transformers
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        values = {name: getattr(self, name) for name in PARTICULAR if name not in idle} | self._multipliers()
        return {name: value for name, value in values.items() if value != defaults[name]}

    def _multipliers(self) -> dict[str, Any]:
        return {"logits_scaling": self.logits_divisor, "attention_multiplier": self.score_factor}

    def uses_fused_sdpa(self, device: Device) -> bool:
        """Return True if the attention runs in Habana's FusedSDPA on this device. It has no soft cap."""
        fused = self.attention_backend == "auto" and self.kernels != "plain" and self.attention_softcap is None
        return "fused_hpu" in device.attention and (fused or self.attention_backend == "fused_hpu")

    def padded_vocab_size(self, tensor_model_parallel_size: int) -> int:
        """Rows of the embedding over all tensor-parallel ranks."""
        multiple = self.make_vocab_size_divisible_by * tensor_model_parallel_size
        # equal parts for all tensor-parallel ranks, each a multiple that suits the kernels
        return -(-self.vocab_size // multiple) * multiple

    def computed(self, seq_length: int) -> dict[str, Any]:
        """Return the options that determine what the model computes, with unset ones resolved.

        Options that do nothing at its position encoding are left out. `seq_length`: that of its run.
        """
        # an option without effect may differ: two models that compute the same are one
        # muP's multipliers are compared instead
        idle = {*NOT_COMPUTED, "mup_base_hidden_size", "mup_base_head_size"}
        if self.attention_window is None:
            idle |= {"attention_window_pattern", "rotary_base_local"}
        if self.position_embedding_type != "learned":
            idle.add("max_position_embeddings")
        if self.position_embedding_type != "rope":
            idle |= {"rotary_base", "rotary_base_local", "rotary_percent", "rope_scaling_factor"}
        idle |= self.idle_rope_scaling
        idle |= self.idle_of_experts
        # unset and written out are the same model
        resolved = {
            "moe_ffn_hidden_size": self.expert_ffn_size,
            # 1 and 1 1 are one pattern
            "moe_layer_freq": ",".join(str(int(self.has_experts(layer))) for layer in range(self.num_layers)),
            "ffn_hidden_size": self.ffn_size,
            "num_query_groups": self.num_kv_heads,
            "kv_channels": self.head_size,
            "max_position_embeddings": self.max_position_embeddings or seq_length,
            "rope_scaling_attention_factor": self.rotary_amplitude,
            **self._multipliers(),
        }
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)} | resolved
        return {name: value for name, value in values.items() if name not in idle}


def differing(here: Mapping[str, Any], there: Mapping[str, Any]) -> list[str]:
    """Return "name=here, there" for each option that both have with different values, in the order of `here`."""
    return [
        f"{name}={value} here, {there[name]} there"
        for name, value in here.items()
        if name in there and there[name] != value
    ]


# ---------------------------------------------------------------------------------------------------------------------
# Options of low-rank adapters.


@dataclass(frozen=True, config=STRICT)
class LoraConfig:
    """Low-rank adapters (LoRA). The base model is frozen; small matrices beside its linear layers are trained."""

    lora_rank: Positive | None = None
    """Rank of the adapters (PEFT's r). Unset: no adapters, the model itself is trained."""
    lora_alpha: PositiveFloat | None = None
    """The adapters' output is multiplied by lora_alpha / rank. Unset: lora_rank, a factor of 1."""
    lora_dropout: Probability = 0.0
    """Dropout of the adapters' input."""
    lora_target_modules: tuple[str, ...] = ("all-linear",)
    """Modules to adapt, by their Hugging Face names (`q_proj v_proj`, `query_key_value`, `c_attn`), the names of this
    project (`attention.qkv`), the end of such a name, or a shell pattern (`*.layers.[0-7].*`). `all-linear`: every
    linear layer but the output projection. The embedding (`embed_tokens`, `wte`, `word_embeddings`) and the output
    projection (`lm_head`) are adapted where they are named."""
    lora_modules_to_save: tuple[str, ...] = ()
    """Modules to train whole and to save with the adapters, by the same names: `lm_head`, `embed_tokens`."""
    lora_bias: Literal["none", "all", "lora_only"] = "none"
    """Biases to train: none, all of the model, or those of the adapted modules."""
    use_rslora: bool = False
    """Multiply the adapters' output by lora_alpha / sqrt(rank) instead (rsLoRA)."""
    lora_init: str = "default"
    """Start of the adapters: default, A drawn and B zero; pissa, the principal singular vectors of their weights, or
    pissa_niter_N, these by N iterations of a faster, approximate decomposition."""
    use_dora: bool = False
    """Train a magnitude for each row of an adapted weight, and its direction by the adapter (DoRA)."""
    loraplus_lr_ratio: PositiveFloat = 1.0
    """Learning rate of the adapters' B matrices and of DoRA's magnitudes, relative to that of A (LoRA+)."""
    loraplus_lr_embedding: PositiveFloat = 1e-6
    """With a loraplus_lr_ratio other than 1, the learning rate of the embedding's adapter, which follows lr's
    schedule."""
    lora_rank_pattern: tuple[str, ...] = ()
    """NAME=RANK ...: another rank for the modules of this name. The first that matches applies."""
    lora_alpha_pattern: tuple[str, ...] = ()
    """NAME=ALPHA ...: another lora_alpha for the modules of this name. The first that matches applies."""
    lora_base: str | None = None
    """Folder of the base model, a Hugging Face model or checkpoints of a run, or its name on the hub. Unset: load,
    where that holds a model; for a checkpoint of adapters, the base that they were trained on; for a folder of PEFT,
    its base_model_name_or_path."""
    allow_other_base: bool = False
    """Start from adapters on another base than the one that they belong to, with a warning."""

    def computed(self) -> dict[str, Any]:
        """Return the options that determine what given adapters compute, beside their names and shapes."""
        return {
            # unset and written out are the same adapters
            "lora_alpha": self.lora_alpha or self.lora_rank,
            "use_rslora": self.use_rslora,
            "use_dora": self.use_dora,
            "lora_init": self.lora_init.partition("_")[0],
            "lora_alpha_pattern": list(self.lora_alpha_pattern),
        }
