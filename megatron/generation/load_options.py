"""Options of the model to generate with or to evaluate: what to load, and the layout. Imports no torch."""

from __future__ import annotations

from typing import Literal

from pydantic.dataclasses import dataclass

from megatron.config.types import STRICT, NonNegative, Positive, PositiveFloat, TokenizerType


@dataclass(frozen=True, config=STRICT)
class LoadOptions:
    """Model to load, its precision, and its layout over the ranks."""

    load: str
    """Folder of the model: the checkpoints of a run, whatever its layout was; one of them; a Hugging Face model; or
    adapters in PEFT's format. Options of the model are read from it."""
    ckpt_step: NonNegative | None = None
    """Checkpoint of this iteration. Unset: the newest one."""
    load_fallback: bool = False
    """If the newest checkpoint is damaged, use the newest one that is intact, with a warning. Off: it is an error, as
    the results would be those of another model."""
    lora_base: str | None = None
    """Folder of the base model of adapters: a Hugging Face model, or checkpoints of a run. Unset: the one that they
    name."""
    allow_other_base: bool = False
    """Compute with adapters on another base than the one that they belong to, with a warning."""
    merge_adapter: bool = False
    """Add adapters to the weights of their base as these are read: a token costs what it costs the base. Not for a base
    in 4 bits, where merged weights would lose what the adapters add."""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Precision of the weights and the computation. `auto`: that of the run that saved the checkpoint, or of the
    tensors of a Hugging Face model."""
    quantize_base: Literal["auto", "none", "nf4"] = "auto"
    """Hold the linear layers of the transformer layers in 4 bits. `auto`: nf4 for adapters that were trained so,
    otherwise none."""
    tensor_model_parallel_size: Positive = 1
    """Number of ranks that share each layer. It need not be that of the checkpoint."""
    pipeline_model_parallel_size: Positive = 1
    """Number of pipeline stages. The number of ranks divided by both is the number of copies of the model, which share
    the work."""
    device: Literal["auto", "hpu", "cuda", "cpu"] = "auto"
    """Device type. `auto`: the first available of hpu, cuda, cpu."""
    distributed_timeout_minutes: PositiveFloat = 30.0
    """Timeout of collectives; one that waits longer fails the run."""
    tokenizer_type: TokenizerType | None = None
    """Kind of tokenizer. Unset: that of the folder, or of the run that saved the checkpoint."""
    tokenizer_model: str | None = None
    """Tokenizer file: a tokenizer.json or its folder, a SentencePiece model, or a tiktoken rank file."""
    vocab_file: str | None = None
    """GPT2BPETokenizer: vocab.json."""
    merge_file: str | None = None
    """GPT2BPETokenizer: merges.txt."""
    tiktoken_pattern: Literal["r50k", "cl100k", "o200k", "llama3", "v1", "v2"] | None = None
    """TikTokenizer: pattern and special tokens of the rank file. Unset: derived from its number of ranks."""
    eod_token: str | None = None
    """Token that ends a text. Unset: the tokenizer's."""
