"""Options of generation, and of the model to generate with or to evaluate: the flags, declared once.

Imports neither torch nor deepspeed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from megatron.options import types
from megatron.options.types import STRICT, NonNegative, NonNegativeFloat, Number, Positive, PositiveFloat, Probability

# the range of OpenAI's and vLLM's penalties of these names
Penalty = Annotated[Number, Field(ge=-2, le=2)]
Share = Annotated[Number, Field(gt=0, le=1)]


@dataclass(frozen=True, config=STRICT)
class GenerationOptions:
    """Choice of the generated tokens, and where a text ends."""

    max_new_tokens: Positive = 64
    """Largest number of tokens to generate for a prompt."""
    min_new_tokens: NonNegative = 0
    """Smallest number of tokens to generate: before, end-of-text and stop tokens cannot be chosen, and stop strings do
    not count."""
    temperature: NonNegativeFloat = 0.0
    """The logits are divided by it before a token is drawn. 0: greedy, the most probable token."""
    top_k: NonNegative = 0
    """Draw from the k most probable tokens, and those as probable as the last of them. 0: from all."""
    top_p: Share = 1.0
    """Draw from the fewest most probable tokens whose probabilities sum up to it (nucleus), and those as probable as
    the last of them."""
    min_p: Probability = 0.0
    """Draw from the tokens at least this many times as probable as the most probable one."""
    repetition_penalty: PositiveFloat = 1.0
    """Divide positive logits of tokens of the prompt and of the generated text by it, multiply negative ones. Above 1:
    less repetition."""
    frequency_penalty: Penalty = 0.0
    """Subtract it from the logit of a generated token as often as that has been generated."""
    presence_penalty: Penalty = 0.0
    """Subtract it once from the logit of each token that has been generated."""
    num_samples: Positive = 1
    """Texts for each prompt. Of a beam search: the best ones, up to num_beams."""
    num_beams: Positive = 1
    """Beams of a beam search. 1: none."""
    length_penalty: Number = 1.0
    """Beam search: the score of a text is the sum of its log-probabilities divided by its length to this power. Above
    0: longer texts."""
    early_stopping: bool = False
    """Beam search: end as soon as num_beams texts are complete, although a better one might follow."""
    stop: tuple[str, ...] = ()
    """Strings that end a text; they are not part of it."""
    stop_token_ids: tuple[NonNegative, ...] = ()
    """Ids that end a text, beside the end-of-text tokens."""
    ignore_eos: bool = False
    """Go on after an end-of-text token."""
    logit_bias: tuple[tuple[NonNegative, Number], ...] = ()
    """ID=BIAS ...: numbers to add to the logits of these ids."""
    seed: NonNegative = 0
    """A text drawn depends on the seed, the number of its prompt and the number of the sample alone."""
    logprobs: NonNegative | None = None
    """Give the log-probability of each generated token in the model's own distribution, before penalties, temperature
    and filters, and those of so many most probable tokens beside it. Unset: none."""

    @property
    def draws(self) -> bool:
        """True if tokens are drawn, not chosen as the most probable ones."""
        return self.temperature > 0

    def faults(self) -> Iterator[str]:
        """Describe the options that contradict each other."""
        if not self.draws:
            # a beam search gives several texts without drawing
            names = ("top_k", "top_p", "min_p") if self.num_beams > 1 else ("top_k", "top_p", "min_p", "num_samples")
            # an option without effect is a fault: the texts would be taken for those of other settings
            for name, value in self._changed(*names):
                yield (
                    f"{name}={value} has no effect on the most probable token (temperature=0); set a temperature, "
                    "such as 1"
                )
        # final ids would be excluded up to the last token, so that no text could end by itself
        if self.min_new_tokens > self.max_new_tokens:
            yield f"min_new_tokens={self.min_new_tokens} is above max_new_tokens={self.max_new_tokens}"
        if "" in self.stop:
            yield "stop has an empty string, which every text contains; leave it out"
        if self.num_beams > 1:
            yield from self._faults_of_beams()
        else:
            for name, value in self._changed("length_penalty", "early_stopping"):
                yield f"{name}={value} is for a beam search; set num_beams above 1, or leave it out"

    def _faults_of_beams(self) -> Iterator[str]:
        if self.draws:
            yield (
                f"num_beams={self.num_beams} chooses the most probable texts, temperature={self.temperature:g} "
                "draws them; leave one of them out"
            )
        if self.num_samples > self.num_beams:
            yield (
                f"num_samples={self.num_samples} is above num_beams={self.num_beams}, the number of texts that a "
                "beam search finds; raise num_beams"
            )
        for name, value in self._changed("stop", "logprobs"):
            yield f"{name}={value} is not for a beam search (num_beams={self.num_beams}); leave one of them out"

    def _changed(self, *names: str) -> Iterator[tuple[str, object]]:
        """Yield the options of these names that are not the defaults."""
        for name in names:
            value = getattr(self, name)
            if value != _DEFAULTS[name]:
                yield name, value


_DEFAULTS = {field.name: field.default for field in fields(GenerationOptions)}


@dataclass(frozen=True, config=STRICT)
class LoadOptions:
    """Model to load, its precision, and its layout over the ranks."""

    load: str
    """Folder of the model: the checkpoints of a run, whatever its layout was; one of them; a Hugging Face model; or
    adapters in PEFT's format. Options of the model are read from it."""
    architecture: str | None = None
    """Family outside this package, as module:name, that a Hugging Face folder may be of. A run's checkpoint names its
    own."""
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
    expert_model_parallel_size: Positive = 1
    """Number of the tensor-parallel ranks that hold different experts of each layer."""
    expert_tensor_parallel_size: Positive | None = None
    """Number of ranks that share each expert: tensor_model_parallel_size, or 1. Unset: tensor_model_parallel_size."""
    device: types.DeviceName = "auto"
    """Device: hpu, cuda, cpu, or your own as package.module:RECORD. `auto`: the first available of hpu, cuda, cpu."""
    distributed_timeout_minutes: PositiveFloat = 30.0
    """Timeout of collectives; one that waits longer fails the run."""
    tokenizer_type: types.TokenizerType | None = None
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
