"""Options that follow from several flags of Megatron together, by the names that megatron_flags.py leaves open."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from megatron.options.config import options, sections
from megatron.options.flags import flag, hints_of, option_of, sequence

Outcome = Literal["translated", "no effect", "refused"]
LEAST = ("num_layers", "hidden_size", "num_attention_heads", "seq_length", "micro_batch_size", "lr")
"""Options without a default in Megatron."""
GPT2_VOCAB = "50257"


@dataclass(frozen=True)
class FlagRow:
    """A flag as it was given, and its outcome."""

    given: str
    outcome: Outcome
    text: str
    """Ours in its place, or the reason."""


@dataclass
class Reading:
    """Settings as they are gathered, by our flags and by the names of what is joined."""

    settings: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    rows: list[FlagRow] = field(default_factory=list)
    behind: set[str] = field(default_factory=set)
    """Flags of ours that the user gives behind `--`."""
    notes: list[str] = field(default_factory=list)
    """Differences that no single flag has."""

    def take(self, name: str, default: Any = None) -> Any:
        """Return and remove what a flag left to be joined with others."""
        return self.settings.pop(name, default)

    def refuse(self, given: str, reason: str) -> None:
        self.rows.append(FlagRow(given, "refused", reason))

    def leave(self, given: str, reason: str) -> None:
        self.rows.append(FlagRow(given, "no effect", reason))

    def number(self, name: str) -> int | None:
        """Return the whole number that a flag of ours is set to."""
        text = str(self.settings.get(name, ""))
        return int(text) if text.isdecimal() else None

    def given(self, *names: str) -> str:
        """Return the flags of theirs that set something, for a table."""
        return " ".join(dict.fromkeys(self.sources[name] for name in names if name in self.sources))


def option_words(name: str, value: Any) -> Any:
    """Return the value of one of our flags: several words where it takes several."""
    option = option_of(name)
    if option not in options() or not isinstance(value, str) or " " not in value:
        return value
    section, _ = options()[option]
    return value.split() if sequence(hints_of(sections()[section])[option]) else value


def join_model(reading: Reading) -> None:
    """Choose the family of the block, and its width where the command leaves it open."""
    # a family has all three or none of them
    parts = {
        "--swiglu": reading.take("swiglu", False),
        "--normalization RMSNorm": reading.take("normalization") == "RMSNorm",
        "--disable-bias-linear": reading.take("disable_bias", False),
    }
    qkv_bias, qk_norm = reading.take("qkv_bias", False), reading.take("qk_norm", False)
    has_experts = "--num-experts" in reading.settings
    if all(parts.values()):
        family = _llama_like(reading, qkv_bias=qkv_bias, qk_norm=qk_norm, has_experts=has_experts)
    else:
        given = [name for name, is_on in parts.items() if is_on]
        lacking = [name for name, is_on in parts.items() if not is_on]
        family = "starcoder2" if reading.settings.get("positions") in ("rope", "yarn") else "bloom"
        if given:
            reading.refuse(
                " ".join(given),
                f"a block has these three together (--architecture llama); {' and '.join(lacking)} is not given",
            )
        elif qkv_bias or qk_norm or has_experts:
            names = reading.given("qkv_bias", "qk_norm", "--num-experts")
            reading.refuse(names, f"only blocks with {', '.join(parts)} have it here")
    reading.settings["--architecture"] = family
    hidden = reading.number("--hidden-size")
    if parts["--swiglu"] and "--ffn-hidden-size" not in reading.settings and hidden:
        # as in Megatron's validate_args: two thirds of 4 x hidden, in steps of 64
        reading.settings["--ffn-hidden-size"] = str(int((4 * hidden * 2 / 3) / 64) * 64)
    _join_groups(reading)


def _join_groups(reading: Reading) -> None:
    """Set the key/value heads, which Megatron reads with a switch alone."""
    groups, is_grouped = reading.take("num_query_groups"), reading.take("grouped", False)
    if groups is not None and is_grouped:
        reading.settings["--num-query-groups"] = groups
    elif groups is not None:
        reading.leave(f"--num-query-groups {groups}", "Megatron reads it with --group-query-attention alone")
    elif is_grouped and "--num-query-groups" not in reading.settings:
        # its default
        reading.settings["--num-query-groups"] = "1"


def _llama_like(reading: Reading, *, qkv_bias: bool, qk_norm: bool, has_experts: bool) -> str:
    # each has one family here
    if qkv_bias and (qk_norm or has_experts):
        reading.refuse("--add-qkv-bias", "only Qwen2's block has it (--architecture qwen2), without --qk-layernorm")
    # experts take the place of the MLP of the same block
    if has_experts:
        return "qwen3_moe" if qk_norm else "mixtral"
    if qkv_bias:
        return "qwen2"
    # over each head
    if qk_norm:
        return "qwen3"
    return "mistral" if "--attention-window" in reading.settings else "llama"


def join_positions(reading: Reading) -> None:
    positions, is_off = reading.take("positions", "learned"), reading.take("no_positions", False)
    scales, factor = reading.take("scales_rotary", False), reading.take("rotary_factor")
    yarn_factor = reading.take("yarn_factor")
    # with rotary positions or ALiBi it only leaves the table out
    if is_off and positions == "learned":
        reading.refuse("--no-position-embedding", "every model here encodes positions; give the encoding")
    if positions == "yarn":
        reading.settings |= {"--rope-scaling-type": "yarn", "--rope-scaling-factor": yarn_factor or factor or "1.0"}
        positions = "rope"
    elif scales:
        # Megatron's default factor, and Llama 3.1's scaling
        reading.settings["--rope-scaling-factor"] = factor or "8.0"
    elif factor is not None:
        reading.leave(f"--rope-scaling-factor {factor}", "Megatron reads it with --use-rope-scaling alone")
    reading.settings["--position-embedding-type"] = positions
    # the length of the rows is --seq-length
    if positions != "learned":
        length = reading.take("--max-position-embeddings")
        if length is not None:
            reading.leave(f"--max-position-embeddings {length}", f"{positions} positions have no table")


def join_experts(reading: Reading, *, is_deepspeed: bool) -> None:
    drops_none, balancing = reading.take("drops_none", False), reading.take("balancing")
    if "--num-experts" not in reading.settings:
        return
    if is_deepspeed:
        # of Megatron-DeepSpeed: an expert for each token, and no more tokens than fit
        reading.settings.setdefault("--moe-router-topk", "1")
        reading.settings.setdefault("--moe-aux-loss-coeff", "0.1")
        reading.settings.setdefault("--moe-expert-capacity-factor", "1.0")
    # it is the last word on the capacity
    if drops_none:
        reading.settings.pop("--moe-expert-capacity-factor", None)
    if balancing == "none":
        reading.settings["--moe-aux-loss-coeff"] = "0.0"


def join_vocabulary(reading: Reading) -> None:
    """Set the vocabulary's size, which Megatron reads from the tokenizer."""
    size, extra = reading.take("vocab_size"), reading.take("extra_ids", 0)
    kind = reading.settings.get("--tokenizer-type")
    if kind == "NullTokenizer" and size is not None:
        # its last id, one more than the size, ends a document
        reading.settings.setdefault("--eod-token-id", size)
        size = str(int(size) + 1)
    if "--vocab-size" in {*reading.settings, *reading.behind}:
        return
    if size is None:
        size = _tokenizer_size(reading, kind)
    if size is not None:
        reading.settings["--vocab-size"] = str(int(size) + int(extra))


def _tokenizer_size(reading: Reading, kind: str | None) -> str | None:
    file = reading.settings.get("--vocab-file")
    if kind is None and file is not None:
        # pretrain_gpt.py's own default
        reading.settings["--tokenizer-type"] = "GPT2BPETokenizer"
    is_gpt2 = kind in (None, "GPT2BPETokenizer")
    # the command may be translated on another machine than that of its files
    if is_gpt2 and (file is None or not Path(file).is_file()):
        return GPT2_VOCAB
    from megatron.data.index.indexed import DataError  # they read the files
    from megatron.data.tokenizers.build import build_tokenizer

    # its own number of ids, end of document included
    given = {name: reading.settings.get(flag(name)) for name in TOKENIZER}
    try:
        tokenizer = build_tokenizer(kind or "GPT2BPETokenizer", **given)
    except (DataError, ValueError, OSError) as error:
        names = reading.given("--tokenizer-type", "--tokenizer-model") or "--vocab-file"
        reading.refuse(names, f"the vocabulary's size cannot be read: {error}; add `-- --vocab-size N` at the end")
        return None
    return str(tokenizer.vocab_size)


TOKENIZER = ("tokenizer_model", "vocab_file", "merge_file", "tiktoken_pattern")


def join_pipeline(reading: Reading) -> None:
    layers, stages = reading.number("--num-layers"), reading.number("--pipeline-model-parallel-size") or 1
    chunk, first, last = reading.take("chunk_layers"), reading.take("first_layers"), reading.take("last_layers")
    # without the number of layers the command is refused
    if layers is None:
        return
    # theirs is the layers of a chunk, ours the chunks of a stage
    if chunk is not None:
        _join_chunks(reading, layers, stages, chunk)
    if first or last:
        _join_ends(reading, layers, stages, first, last)


def _join_chunks(reading: Reading, layers: int, stages: int, chunk: int) -> None:
    """Set the chunks of a stage by the layers of one."""
    chunks, rest = divmod(layers, stages * chunk)
    if rest or not chunks:
        given = reading.given("chunk_layers")
        reading.refuse(given, f"{stages} stages x {chunk} layers do not divide {layers} layers")
    elif chunks > 1:
        reading.settings["--num-virtual-stages-per-pipeline-rank"] = str(chunks)


def _join_ends(reading: Reading, layers: int, stages: int, first: int | None, last: int | None) -> None:
    """Set the layers of every stage by those of the first and the last."""
    before, behind = [first] if first else [], [last] if last else []
    others = stages - len(before) - len(behind)
    inner, rest = divmod(layers - sum(before) - sum(behind), max(1, others))
    if rest or inner < 1 or others < 1:
        given = reading.given("first_layers", "last_layers")
        reading.refuse(given, f"the other layers of {layers} are not divided evenly by the other stages of {stages}")
        return
    sizes = [*before, *([inner] * others), *behind]
    reading.settings["--pipeline-partition-method"] = ",".join(map(str, sizes))


def join_fp8(reading: Reading) -> None:
    """Set the layers in 16 bits, which Megatron counts apart at both ends."""
    given = reading.given("bf16_start", "bf16_end")
    is_on = reading.take("bf16_ends", False)
    start, end = reading.take("bf16_start", 1), reading.take("bf16_end", 1)
    if not is_on:
        if given:
            reading.leave(given, "Megatron reads it with --first-last-layers-bf16 alone")
        return
    if start != end:
        reading.refuse(given, f"as many layers stay in 16 bits at either end, not {start} and {end}")
        return
    reading.settings["--fp8-first-last-layers-bf16"] = str(start)


MUON_NOTE = (
    "Muon takes the gate and the up projection apart here, and AdamW takes routers and tables of positions; Megatron's "
    "Muon takes the two as one matrix, and these too"
)


def join_muon(reading: Reading) -> None:
    """Refuse Muon by pieces: of matrices that tensor parallelism divides, each rank's part by itself."""
    given, mode = reading.given("muon_tp_mode"), reading.take("muon_tp_mode")
    if reading.settings.get("--optimizer") != "muon":
        if given:
            reading.leave(given, "Megatron reads it with --optimizer muon alone")
        return
    reading.notes.append(MUON_NOTE)
    ranks = reading.number("--tensor-model-parallel-size") or 1
    # one rank holds whole matrices
    if ranks > 1 and mode in (None, "blockwise"):
        # up to core_v0.19.0 it is blockwise
        stated = "" if given else "it is not given, and its default is blockwise in Megatron's releases: "
        reading.refuse(
            given or "--muon-tp-mode",
            f"{stated}each of {ranks} tensor-parallel parts of a matrix is orthogonalised by itself, here the whole "
            "matrix; give duplicated or distributed, which do so too",
        )


def join_lengths(reading: Reading) -> int | None:
    """Convert lengths in tokens; return the samples of a rank where the global batch is left out."""
    length = reading.number("--seq-length")
    for name, ours in (
        ("train_tokens", "--train-samples"),
        ("decay_tokens", "--lr-decay-samples"),
        ("warmup_tokens", "--lr-warmup-samples"),
    ):
        tokens = reading.take(name)
        if tokens is not None and length:
            reading.settings[ours] = str(-(-tokens // length))
    batch, stop = reading.number("--global-batch-size"), reading.take("stop_samples")
    if stop is not None:
        if batch is None or "--rampup-batch-size" in reading.settings:
            reading.refuse(f"--stop-after-num-samples {stop}", "give --exit-interval, in iterations")
        else:
            reading.settings["--exit-interval"] = str(-(-stop // batch))
    granularity = reading.take("granularity")
    if granularity is not None and "--recompute-granularity" in reading.settings:
        reading.settings["--recompute-granularity"] = granularity
    # Megatron's default is one microbatch of each data-parallel rank
    if "--global-batch-size" in reading.settings:
        return None
    return reading.number("--micro-batch-size")


DEFAULTS = {
    "--lr-decay-style": "linear",
    "--eval-interval": "1000",
    "--eval-iters": "100",
    "--log-interval": "100",
}
"""Megatron's, where ours differ and the training or its log would."""
MUON_DEFAULTS = {
    # of its arguments, which replace the 0.95 of OptimizerConfig
    "--muon-momentum": "0.9",
    "--muon-nesterov": "false",
    "--muon-coefficient-type": "quintic",
    "--muon-extra-scale-factor": "1.0",
}
"""The same with --optimizer muon."""


def add_defaults(reading: Reading) -> None:
    for name, value in DEFAULTS.items():
        reading.settings.setdefault(name, value)
    if reading.settings.get("--optimizer") == "muon":
        for name, value in MUON_DEFAULTS.items():
            reading.settings.setdefault(name, value)
    if str(reading.settings.get("--fp16", "false")).lower() == "true":
        reading.settings.setdefault("--initial-loss-scale", "4294967296")
    # ours have defaults, which would be another training
    for name in LEAST:
        if flag(name) not in {*reading.settings, *reading.behind}:
            reading.refuse(flag(name), "it is not given, and has no default in Megatron")
