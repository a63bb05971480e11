"""Options of low-rank adapters."""

from __future__ import annotations

from typing import Any, Literal

from pydantic.dataclasses import dataclass

from megatron.config.types import STRICT, Positive, PositiveFloat, Probability


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
    """Folder of the base model: a Hugging Face model, or checkpoints of a run. Unset: load, where that holds a model;
    for a checkpoint of adapters, the folder of the base that they were trained on; for a folder of PEFT, its
    base_model_name_or_path, a folder or the name of a downloaded model."""
    allow_other_base: bool = False
    """Start from adapters on another base than the one that they belong to, with a warning."""

    def computed(self) -> dict[str, Any]:
        """Return the options that determine what given adapters compute, beside their names and shapes."""
        return {
            "lora_alpha": self.lora_alpha or self.lora_rank,
            "use_rslora": self.use_rslora,
            "use_dora": self.use_dora,
            "lora_init": self.lora_init.partition("_")[0],
            "lora_alpha_pattern": list(self.lora_alpha_pattern),
        }
