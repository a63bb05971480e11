"""Options of generation and of the model to load, and the command line of megatron.generate.

With the names that other programs give them, and their faults. Imports no torch, so that a wrong command is reported at
once.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from megatron.hub.download import Needs, local_folder
from megatron.hub.names import HubError, name_of, pinned
from megatron.options import flags, types
from megatron.options.config import ConfigError
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


_DEFAULTS = {field.name: field.default for field in dataclasses.fields(GenerationOptions)}


OF_HUB: Mapping[str, Needs] = {"load": "model", "lora_base": "model", "tokenizer_model": "tokenizer"}
"""Options that take a name on the hub, and the files that are needed of it."""


@dataclass(frozen=True, config=STRICT)
class LoadOptions:
    """Model to load, its precision, and its layout over the ranks."""

    load: str
    """Folder of the model: the checkpoints of a run, whatever its layout was; one of them; a Hugging Face model; or
    adapters in PEFT's format. Or their name on the hub, ORGANISATION/NAME[@REVISION]."""
    architecture: str | None = None
    """Family outside this package, as module:name, that a Hugging Face folder may be of. A run's checkpoint names its
    own."""
    ckpt_step: NonNegative | None = None
    """Checkpoint of this iteration. Unset: the newest one."""
    weights: Literal["trained", "ema"] = "trained"
    """Weights of a run's checkpoint: those that it trains, or their moving average (ema_decay of the run)."""
    load_fallback: bool = False
    """If the newest checkpoint is damaged, use the newest one that is intact, with a warning. Off: it is an error, as
    the results would be those of another model."""
    lora_base: str | None = None
    """Folder of the base model of adapters, a Hugging Face model or checkpoints of a run, or its name on the hub.
    Unset: the one that they name."""
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
    """Tokenizer file: a tokenizer.json, its folder or its name on the hub; a SentencePiece model; a tiktoken rank
    file."""
    vocab_file: str | None = None
    """GPT2BPETokenizer: vocab.json."""
    merge_file: str | None = None
    """GPT2BPETokenizer: merges.txt."""
    tiktoken_pattern: Literal["r50k", "cl100k", "o200k", "llama3", "v1", "v2"] | None = None
    """TikTokenizer: pattern and special tokens of the rank file. Unset: derived from its number of ranks."""
    eod_token: str | None = None
    """Token that ends a text. Unset: the tokenizer's."""

    @property
    def context_parallel_size(self) -> int:
        """Texts are not cut: copies of the model share the work instead."""
        return 1

    def pinned_flags(self, words: Sequence[str]) -> list[str]:
        """Return flags that name the folders in the hub's cache with their commits, to stand behind `words`."""
        names = dict.fromkeys(OF_HUB)
        flags_of: dict[str, str] = {name: flags.flag(name) for name in names}
        if any(word.split("=", 1)[0] == "--peft-model" for word in words):  # as `_in_our_words` reads them
            flags_of |= {"load": "--peft-model", "lora_base": "--load"}
        found = []
        for name in names:
            folder = getattr(self, name)
            on_hub = None if folder is None else pinned(folder)
            if on_hub is not None:
                found += [flags_of[name], on_hub]
        return found

    def with_local_folders(self, faults: list[str]) -> LoadOptions:
        """Return the options with folders in the hub's cache in place of names, downloaded but for the weights.

        A name that cannot be resolved is added to `faults`.
        """
        found: dict[str, Any] = {}
        for name, needs in OF_HUB.items():
            value = getattr(self, name)
            if value is None or name_of(value) is None:
                continue
            try:
                found[name] = str(local_folder(value, name, needs))
            except HubError as error:
                faults.append(str(error))
        return dataclasses.replace(self, **found)

    def faults(self) -> Iterator[str]:
        # without torch only that it exists; its ranks find what it holds
        if name_of(self.load) is not None:  # reported where it was looked for
            return
        if not Path(self.load).exists():
            yield f"--load {self.load} does not exist; give the folder of a run's checkpoints or of a model"


@dataclass(frozen=True, config=STRICT)
class PromptOptions:
    """Texts to continue, and the place of the results."""

    prompt: tuple[str, ...] = ()
    """Texts to continue, each in quotes."""
    input: str | None = None
    """File of prompts. A .jsonl file has an object a line with `prompt`, or with `messages`, a chat to answer; any
    other text file has a prompt a line. `-`: standard input, of JSON lines."""
    output: str | None = None
    """JSONL file for the results, in the order of the prompts, with what the input's lines say beside them. The same
    command continues an interrupted one. Unset: standard output."""
    overwrite: bool = False
    """Replace the output file."""
    on_bad_line: Literal["fail", "skip"] = "fail"
    """For a line of the input that cannot be used: end the command, or leave the line out and count it."""
    chat: bool = False
    """Talk with the model in the terminal."""
    system: str | None = None
    """System message of chats that have none."""
    as_chat: bool = False
    """Take each prompt as the message of a user, and answer it by the model's chat template."""
    chat_template: str | None = None
    """Template of chats: a preset, or a .jinja or .py file. Unset: the tokenizer's."""
    keep_special_tokens: bool = False
    """Write special tokens, such as that of the end, as text."""
    token_ids: bool = False
    """Give the ids of each text (`ids`) and of its prompt (`prompt_ids`) in its JSON line."""
    batch_size: Positive = 16
    """Largest number of texts that each copy of the model generates at once."""
    use_graphs: bool | None = None
    """Replay each token's pass as a graph of the device (CUDA, HPU). Unset: on CUDA, unless tensor-parallel ranks share
    layers."""
    benchmark: bool = False
    """Measure tokens per second with random prompts, over the batch sizes and lengths below."""
    benchmark_batch_sizes: tuple[Positive, ...] = (1, 4, 16)
    """Batch sizes of --benchmark."""
    benchmark_prompt_lengths: tuple[Positive, ...] = (128, 512)
    """Lengths of the prompts of --benchmark, in tokens. max_new_tokens follow each."""

    def faults(self) -> Iterator[str]:
        """Describe the options that contradict each other."""
        yield from self._faults_of_prompts()
        yield from self._faults_of_output()
        yield from self._faults_of_lines()

    def _faults_of_prompts(self) -> Iterator[str]:
        given = {"--prompt": self.prompt, "--input": self.input, "--chat": self.chat, "--benchmark": self.benchmark}
        sources = [name for name, value in given.items() if value]
        if not sources:
            yield "nothing to continue is given; use --prompt TEXT, --input FILE, --chat or --benchmark"
        elif len(sources) > 1:
            yield f"{' and '.join(sources)} exclude each other; give one of them"
        # --input may hold rows of messages, which only its lines show
        is_plain = bool(self.prompt) and not self.as_chat
        for name in ("system", "chat_template"):
            if is_plain and getattr(self, name) is not None:
                yield f"{flags.flag(name)} is for chats, and --prompt gives plain text; add --as-chat, or leave it out"
        if "" in self.prompt:
            yield "--prompt has an empty text; give at least a word to continue"
        if self.input not in (None, "-") and not Path(str(self.input)).is_file():
            yield f"--input {self.input} is not a file; give a .jsonl or a text file"

    def _faults_of_output(self) -> Iterator[str]:
        if self.output is None:
            return
        if self.chat or self.benchmark:
            yield f"--output {self.output} is for --prompt and --input; leave it out"
        elif not Path(self.output).absolute().parent.is_dir():
            yield f"--output {self.output}: the folder does not exist; create it"
        elif Path(self.output).is_dir():
            yield f"--output {self.output} is a folder; give a file"

    def _faults_of_lines(self) -> Iterator[str]:
        """Describe the options of JSON lines that are neither read nor written."""
        if self.token_ids and self.output is None and self.input is None:
            yield "--token-ids is for JSON lines; give --output FILE or --input FILE, or leave it out"
        if self.overwrite and self.output is None:
            yield f"{flags.flag('overwrite')} has no effect without --output; leave it out"
        if self.on_bad_line != PromptOptions.on_bad_line and self.input is None:
            yield f"{flags.flag('on_bad_line')} has no effect without --input; leave it out"


@dataclass(frozen=True)
class GenerateCommand:
    """Everything that one start of megatron.generate is to do."""

    load: LoadOptions
    prompts: PromptOptions
    generation: GenerationOptions

    @property
    def use_graphs(self) -> bool | None:
        return self.prompts.use_graphs


GROUPS: tuple[tuple[str, type], ...] = (
    ("model and layout", LoadOptions),
    ("prompts and results", PromptOptions),
    ("choice of tokens", GenerationOptions),
)

OTHER_NAMES = {
    "--model-name-or-path": "--load",
    "--num-return-sequences": "--num-samples",
    "--use-hpu-graphs": "--use-graphs",
    "--use-cuda-graphs": "--use-graphs",
    "--peft-model": "--load",
    "--tokenizer-name": "--tokenizer-model",
    "--use-chat-template": "--as-chat",
}
"""Flags of transformers' and optimum-habana's run_generation.py by the names here."""
_PRECISIONS = {"--bf16": "bf16", "--fp16": "fp16"}
# each of these wants what always holds here: refusing it would only stop a script that is right
WITHOUT_EFFECT = {
    "--use-kv-cache": "keys and values are always kept",
    "--reuse-cache": "the cache is always allocated once and written in place",
    "--trim-logits": "the logits of the last token alone are always computed",
    "--bucket-internal": "lengths of the cache are always rounded up within a batch",
    "--use-flash-attention": "attention never holds a matrix of all positions",
    "--flash-attention-recompute": "nothing is kept for a backward pass",
    "--flash-attention-causal-mask": "attention is always causal",
    "--limit-hpu-graphs": "only the pass of a token is captured",
    "--clear-hpu-graphs-cache": "the graphs are freed with the process",
    "--reduce-recompile": "shapes are always fixed within a batch",
    "--verbose-workers": "rank 0 prints, and errors name their rank",
    "--local-rank": "the launcher numbers the ranks",
}
# each of these would change the results or the work: leaving it out in silence would give others than expected
REFUSED = {
    "--bucket-size": "lengths are rounded up by a rule of this project; leave it out",
    "--torch-compile": "--use-graphs takes its place; leave it out",
    "--n-iterations": "--benchmark measures; leave it out",
    "--warmup": "--benchmark warms up by itself; leave it out",
    "--dataset-name": "only files are read; write the prompts to a .jsonl file and give it as --input",
    "--output-dir": "give a file as --output",
    "--penalty-alpha": "contrastive search is not part of this project",
    "--attn-softmax-bf16": "the softmax is computed in float32",
    "--flash-attention-fast-softmax": "the softmax is computed in float32",
    "--parallel-strategy": "--tensor-model-parallel-size shares each layer, --pipeline-model-parallel-size the layers",
    "--max-input-tokens": "prompts are read whole; shorten them",
    "--trust-remote-code": "code that comes with a model is never run",
    "--token": "log in with hf auth login, or set HF_TOKEN",
    "--model-revision": "write it behind the name: --load NAME@REVISION",
    "--quantize-with-bnb": "--quantize-base nf4 holds weights in 4 bits",
    "--bad-words": "tokens cannot be forbidden; leave it out",
    "--force-words": "tokens cannot be required; leave it out",
    "--profiling-steps": "use --benchmark",
    "--show-graphs-count": "--benchmark prints the graphs' effect; leave it out",
    "--assistant-model": "speculative decoding is not part of this project",
    "--fp8": "text is generated in 16 bits; --quantize-base nf4 holds weights in 4 bits",
    "--no-repeat-ngram-size": "use --repetition-penalty, --frequency-penalty or --presence-penalty",
}
_COPIES = "copies of the model share the texts, so start more ranks; leave it out"
OF_TRAINING = {
    "--context-parallel-size": _COPIES,
    "--context-parallel-exchange": _COPIES,
    "--sequence-parallel": "single tokens cannot be cut; leave it out",
}
"""Flags of a training's layout, which a checkpoint may have had; what computes texts has none of them."""


def build_generate_parser(prog: str = "megatron-generate") -> argparse.ArgumentParser:
    """Return the parser of the flags, grouped; values stay strings."""
    return flags.grouped_parser(
        GROUPS,
        prog=prog,
        usage=f"{prog} --load FOLDER --prompt TEXT [--flag VALUE ...]",
        description="Continue texts and answer chats with a checkpoint of a run, a Hugging Face model or adapters, on "
        "any layout.",
        epilog="A BOOL flag alone means true; `none` unsets an option. docs/guides/generation.md has examples, and a "
        "table of the flags of transformers and optimum-habana that are understood.",
    )


def read_command(arguments: Sequence[str]) -> tuple[GenerateCommand, list[str]]:
    """Return the command, and a note for each flag without effect. Raises ConfigError with every fault."""
    # other programs' names first, so that argparse and its suggestions know only ours
    words, notes, faults = translated(arguments)
    namespace, rest = build_generate_parser().parse_known_args(words)
    faults += flags.unknown_flags(rest, map(flags.flag, vars(namespace)), OF_TRAINING)
    load = flags.read_flags(LoadOptions, namespace, faults)
    if load is not None:
        load = load.with_local_folders(faults)
    prompts = flags.read_flags(PromptOptions, namespace, faults)
    generation = flags.read_flags(GenerationOptions, namespace, faults)
    # a shell passes "\n" as two characters; after reading, before the rules look at it
    if generation is not None:
        generation = dataclasses.replace(generation, stop=tuple(map(flags.unescaped, generation.stop)))
        faults += generation.faults()
    if prompts is not None:
        faults += prompts.faults()
    if load is not None:
        faults += load.faults()
    if prompts is not None and generation is not None:
        faults += _faults_of_both(prompts, generation)
    if faults or load is None or prompts is None or generation is None:
        # dict.fromkeys: each fault once, in the order found
        raise ConfigError(list(dict.fromkeys(faults)))
    return GenerateCommand(load, prompts, generation), notes


def _faults_of_both(prompts: PromptOptions, generation: GenerationOptions) -> Iterator[str]:
    """Describe the options of the choice of tokens that do not fit those of the prompts."""
    if (prompts.chat or prompts.benchmark) and generation.num_samples > 1:
        yield f"--num-samples {generation.num_samples} is for --prompt and --input; leave it out"
    has_lines = prompts.output is not None or prompts.input is not None or prompts.benchmark
    if generation.logprobs is not None and not has_lines:
        yield f"--logprobs {generation.logprobs} is for JSON lines; give --output FILE or --input FILE, or leave it out"
    # which text wins is known at its end alone
    if prompts.chat and generation.num_beams > 1:
        yield "--num-beams is not for --chat, which prints a text while it grows; leave it out"


def translated(arguments: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
    """Return the words with other programs' flags by the names here, notes on those without effect, and faults."""
    words, notes, faults = list[str](), list[str](), list[str]()
    given = flags.dashed(arguments)
    names = [word.split("=", 1)[0] for word in given]
    is_left_out = False  # the flag before this word, and so its values
    for word, name in zip(given, names, strict=True):
        if not word.startswith("--"):
            if not is_left_out:
                words.append(word)
            continue
        is_left_out = name in WITHOUT_EFFECT or name in REFUSED
        if name in WITHOUT_EFFECT:
            notes.append(f"{name} has no effect: {WITHOUT_EFFECT[name]}")
        elif name in REFUSED:
            faults.append(f"{name} is not supported: {REFUSED[name]}")
        else:
            words += _in_our_words(word, name, names)
    return words, notes, faults


def _in_our_words(word: str, name: str, names: Sequence[str]) -> list[str]:
    """Return a flag, with its value behind `=` if it has one, by its name here. `names`: all flags that are given."""
    if name in ("--model-name-or-path", "--load") and "--peft-model" in names:
        # the adapters are loaded, onto this base
        return ["--lora-base" + word[len(name) :]]
    # the rest of the word is "=VALUE", or empty
    if name in OTHER_NAMES:
        return [OTHER_NAMES[name] + word[len(name) :]]
    if name in _PRECISIONS:
        return ["--precision", _PRECISIONS[name]]
    if name == "--do-sample":
        # transformers draws at temperature 1; here a temperature alone makes it draw
        return [] if "--temperature" in names else ["--temperature", "1.0"]
    return [word]
