"""Flags of Megatron's pretrain_gpt.py as options of ours: a row each, of Megatron-LM's, Megatron-DeepSpeed's, Habana's.

docs/reference/megatron_flags.md says what becomes of each flag (settings/megatron_flags.tsv holds its answers); here
are the conversions of values. megatron_requests.py has what depends on several flags, which rows name without dashes.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

from megatron.options.config import options, sections
from megatron.options.dialect import (
    FALSE,
    TRUE,
    Dialect,
    Entry,
    Form,
    Setting,
    WrongValueError,
    is_true,
    number,
    one_of,
    sets,
    suggestion,
    whole,
)
from megatron.options.flags import flag, hints_of, is_bool, sequence
from megatron.settings.parser import MegatronAnswer, megatron_answers

Value = str | list[str]
"""Words behind a flag: the only one, or a list of several. A switch alone is "true"."""


def _switch(name: str, *settings: Setting) -> Entry:
    """Return the row of a switch that sets something where it is on."""
    targets = tuple(target for target, _ in settings)
    return Entry(
        name, "sets", convert=lambda value: settings if is_true(value) else (), targets=targets, takes="switch"
    )


def _chosen(name: str, target: str, choices: dict[str, Any], default: str | None = None) -> Entry:
    """Return the row of a word of theirs for a word of ours; None: it requests nothing."""

    # argparse of theirs has the same choices, or more
    def convert(value: Any) -> Sequence[Setting]:
        # the case of enumerations differs between releases
        word = str(value)
        known = {theirs.lower(): ours for theirs, ours in choices.items()}
        if word.lower() not in known:
            raise WrongValueError(f"must be {one_of(choices)} here")
        ours = known[word.lower()]
        return () if ours is None else [(target, ours)]

    return Entry(name, "sets", convert=convert, targets=(target,), default=default)


def _only(name: str, *accepts: str) -> Entry:
    """Return the row of a flag that requests nothing by some of its values, and is refused for any other."""
    return Entry(name, "refused", accepts=tuple(word.lower() for word in accepts))


def _many(name: str, convert: Callable[[Any], Sequence[Setting]], *targets: str) -> Entry:
    return Entry(name, "sets", convert=convert, targets=targets)


def _count(value: Any) -> str:
    # str: several words come as a list, and is not a number
    return str(whole(1)(_plain(str(value))))


def _positive(value: Any) -> str:
    return number(lambda x: x > 0, "must be a number above 0")(value)


def _window(value: Any) -> Sequence[Setting]:
    """Convert the tokens before and behind each, such as 4095,0."""
    numbers = re.findall(r"-?\d+", str(value))
    if len(numbers) != 2 or int(numbers[1]) != 0:
        raise WrongValueError("must be BEFORE,0: a token sees none behind it")
    before = int(numbers[0])
    # -1: all of them; ours counts the token itself
    return () if before < 0 else [("--attention-window", str(before + 1))]


def _experts(value: Any) -> Sequence[Setting]:
    """Convert the number of experts, which Megatron-DeepSpeed takes for each group of layers, 1 for none."""
    # equal numbers for all groups are one number
    numbers = {whole(1)(word) for word in (value if isinstance(value, list) else [value])}
    if len(numbers) > 1:
        raise WrongValueError("must be one number: all layers with experts have equally many")
    count = numbers.pop()
    return [] if count == 1 else [("--num-experts", str(count))]


def _layer_frequency(value: Any) -> Sequence[Setting]:
    """Convert N, a layer with experts in every N, or a list of 0 and 1 as a Python expression, ([1]*3+[0]*1)."""
    # N: the first of every N layers
    if str(value).isdecimal():
        period = whole(1)(value)
        pattern = [1] + [0] * (period - 1)
    else:
        pattern = _listed(str(value))
    return [("--moe-layer-freq", [str(each) for each in pattern])]


def _listed(text: str) -> list[int]:
    try:
        pattern = _evaluated(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError):
        pattern = None
    if not isinstance(pattern, list) or not pattern:
        raise WrongValueError("must be a number, or a list of 0 and 1 such as ([1]*3+[0]*1)")
    return pattern


MOST_LAYERS = 10_000


def _evaluated(node: ast.AST) -> list[int] | int:
    """Return the value of lists of 0 and 1 that are repeated and joined; nothing else is computed."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return int(node.value)
    if isinstance(node, ast.List):
        return [_member(each) for each in node.elts]
    if not isinstance(node, ast.BinOp):
        raise ValueError(ast.dump(node))
    left, right = _evaluated(node.left), _evaluated(node.right)
    if isinstance(node.op, ast.Add) and isinstance(left, list) and isinstance(right, list):
        return left + right
    # a longer one would only take memory
    is_repeated = isinstance(node.op, ast.Mult) and isinstance(left, list) and isinstance(right, int)
    if not is_repeated or len(left) * right > MOST_LAYERS:  # type: ignore[arg-type, operator]
        raise ValueError(ast.dump(node))
    return left * right  # type: ignore[operator, return-value]


def _member(node: ast.AST) -> int:
    value = node.value if isinstance(node, ast.Constant) else None
    if not isinstance(value, int) or value not in (0, 1):
        raise ValueError(ast.dump(node))
    return value


def _optimizer(value: Any) -> Sequence[Setting]:
    # the one whose matrices are divided among the ranks has their states divided too
    if str(value) == "dist_muon":
        return [("--optimizer", "muon"), ("--zero-stage", "1")]
    return [("--optimizer", str(value))]


def _modules(value: Any) -> Sequence[Setting]:
    names = {"core_attn": "core_attn", "layernorm": "layernorm", "mlp": "mlp", "moe": "mlp", "moe_act": "mlp_act"}
    words = value if isinstance(value, list) else [value]
    if not set(words) <= set(names):
        raise WrongValueError(f"must be some of {one_of(names)} here")
    return [("--recompute-modules", list(dict.fromkeys(names[word] for word in words)))]


def _profile(value: Any) -> Sequence[Setting]:
    """Convert the switch of Megatron-LM, or the kind of Habana's."""
    word = str(value).lower()
    if word in FALSE:
        return ()
    if word not in (*TRUE, "pt", "pt-full"):
        raise WrongValueError("must be pt or pt-full: torch.profiler's traces alone")
    shown: list[Setting] = [("--profile", "true")]
    if word == "pt-full":
        shown += [("--pytorch-profiler-collect-shapes", "true"), ("--pytorch-profiler-collect-callstack", "true")]
    return shown


def _profile_steps(value: Any) -> Sequence[Setting]:
    """Convert Habana's first and last step."""
    numbers = re.findall(r"\d+", str(value))
    if len(numbers) != 2:
        raise WrongValueError("must be FIRST,LAST")
    return [("--profile-step-start", numbers[0]), ("--profile-step-end", str(int(numbers[1]) + 1))]


def _coverage(value: Any) -> Sequence[Setting]:
    """Convert Habana's parts of a layer that are computed in fp8, PART=BOOL each."""
    words = value if isinstance(value, list) else str(value).split()
    settings: list[Setting] = []
    for word in words:
        part, _, given = word.partition("=")
        is_on = is_true(given or "true")
        if part == "mlp_row_parallel":
            settings.append(("--fp8-mlp-row-parallel", "true" if is_on else "false"))
        elif part != "attention" or is_on:
            raise WrongValueError("must be mlp_row_parallel=BOOL and attention=False: attention is computed in bf16")
    return settings


def _partition(value: Any) -> Sequence[Setting]:
    # scripts write its quotation marks into the variable
    word = str(value).strip("'\"")
    # their classes of layers, whatever else is counted with them
    if word.lower().startswith("type:transformer"):
        return [("--pipeline-partition-method", "type:TransformerLayer")]
    return [("--pipeline-partition-method", word)]


def _split(value: Any) -> Sequence[Setting]:
    # unquoted, 949, 50, 1 is three words
    text = ",".join(value) if isinstance(value, list) else str(value)
    return [("--split", re.sub(r",+", ",", text.replace(" ", "")))]


ON, OFF = "true", "false"
FULL = ("--recompute-granularity", "full")
CPU = {"none": None, "cpu": ON}
POSITIONS = {
    "learned_absolute": "learned",
    "learnable": "learned",
    "absolute": "learned",
    "learned": "learned",
    "rope": "rope",
    "rotary": "rope",
    "alibi": "alibi",
    "yarn": "yarn",
}
ATTENTION = {
    "auto": "auto",
    "flash": "auto",
    "fused": "auto",
    "unfused": "sdpa",
    "local": "sdpa",
    "sdpa": "sdpa",
    "flex": "flex",
    "fused_hpu": "fused_hpu",
}
TRANSLATED: tuple[Entry, ...] = (
    # the model: its family follows from several of them
    _switch("--swiglu", ("swiglu", True)),
    _chosen("--normalization", "normalization", {"LayerNorm": "LayerNorm", "RMSNorm": "RMSNorm"}),
    _switch("--disable-bias-linear", ("disable_bias", True)),
    _switch("--add-qkv-bias", ("qkv_bias", True)),
    _switch("--qk-layernorm", ("qk_norm", True)),
    _switch("--group-query-attention", ("grouped", True)),
    sets("--num-query-groups", "num_query_groups", read=_count),
    sets("--num-key-value-heads", "--num-query-groups", read=_count),
    sets("--layernorm-epsilon", "--norm-epsilon", read=_positive),
    _many("--window-size", _window, "--attention-window"),
    _chosen("--position-embedding-type", "positions", POSITIONS),
    _switch("--use-rotary-position-embeddings", ("positions", "rope")),
    _switch("--use-alibi-position-embeddings", ("positions", "alibi")),
    _switch("--no-position-embedding", ("no_positions", True)),
    sets("--rotary-position-embeddings-theta", "--rotary-base", read=_positive),
    _switch("--use-rope-scaling", ("scales_rotary", True)),
    sets("--rope-scaling-factor", "rotary_factor", read=_positive),
    _many(
        "--rotary-seq-len-interpolation-factor",
        lambda value: [("--rope-scaling-type", "linear"), ("--rope-scaling-factor", _positive(value))],
        "--rope-scaling-type",
        "--rope-scaling-factor",
    ),
    sets("--yarn-rotary-scaling-factor", "yarn_factor", read=_positive),
    sets("--yarn-original-max-position-embeddings", "--rope-scaling-original-length", read=_count),
    sets("--yarn-beta-fast", "--rope-scaling-beta-fast", read=_positive),
    sets("--yarn-beta-slow", "--rope-scaling-beta-slow", read=_positive),
    _switch("--yarn-correction-range-round-to-int", ("--rope-scaling-truncate", ON)),
    sets("--vocab-size", "vocab_size", read=_count),
    sets("--pad-vocab-size-to", "--vocab-size", read=_count),
    sets("--padded-vocab-size", "--vocab-size", read=_count),
    sets("--vocab-extra-ids", "extra_ids", read=whole(0)),
    sets("--tokenizer-name-or-path", "--tokenizer-model"),
    sets("--null-tokenizer-eod-id", "--eod-token-id", read=whole(0)),
    _chosen("--attention-backend", "--attention-backend", ATTENTION),
    *(
        _switch(name, ("--attention-backend", "auto"))
        for name in (
            *("--use-flash-attn", "--use-flash-attn-v1", "--use-flash-attn-v2"),
            *("--use-flash-attn-triton", "--use-flash-attn-builder"),
        )
    ),
    # Habana's scripts write its value
    Entry(
        "--use-fused-sdpa",
        "sets",
        convert=lambda value: [("--attention-backend", "fused_hpu" if is_true(str(value)) else "sdpa")],
        targets=("--attention-backend",),
    ),
    _chosen(
        "--use-fused-sdpa-with-recompute",
        "--fused-sdpa-recompute",
        dict.fromkeys(TRUE, ON) | dict.fromkeys(FALSE, OFF),
    ),
    # experts
    _many("--num-experts", _experts, "--num-experts"),
    _many("--num-moe-experts", _experts, "--num-experts"),
    _many("--moe-layer-freq", _layer_frequency, "--moe-layer-freq"),
    sets("--topk", "--moe-router-topk", read=_count),
    sets("--moe-loss-coeff", "--moe-aux-loss-coeff"),
    sets("--moe-train-capacity-factor", "--moe-expert-capacity-factor", read=_positive),
    _switch("--disable-moe-token-dropping", ("drops_none", True)),
    _chosen("--moe-router-load-balancing-type", "balancing", {"aux_loss": None, "none": "none"}),
    _only("--moe-token-drop-policy", "probs"),
    _only("--moe-router-dtype", "fp32"),
    _switch("--moe-use-upcycling", ("--upcycle", ON)),
    _switch("--moe-layer-recompute", ("--recompute-granularity", "selective"), ("--recompute-modules", "mlp")),
    # layout and device
    sets("--model-parallel-size", "--tensor-model-parallel-size", read=_count),
    sets("--moe-expert-parallel-size", "--expert-model-parallel-size", read=_count),
    _many(
        "--ds-sequence-parallel-size",
        lambda value: [("--context-parallel-size", _count(value)), ("--context-parallel-exchange", "all-to-all")],
        "--context-parallel-size",
        "--context-parallel-exchange",
    ),
    _chosen("--cp-comm-type", "--context-parallel-exchange", {"p2p": "ring", "a2a": "all-to-all"}),
    _many("--pp-partition-method", _partition, "--pipeline-partition-method"),
    sets("--decoder-first-pipeline-num-layers", "first_layers", read=whole(1)),
    sets("--decoder-last-pipeline-num-layers", "last_layers", read=whole(1)),
    sets("--num-layers-per-virtual-pipeline-stage", "chunk_layers", read=whole(1)),
    _switch("--enable-zbh1-pipeline", ("--pipeline-schedule", "zero-bubble")),
    _switch("--use-hpu", ("device", "hpu")),
    _chosen("--distributed-backend", "device", {"hccl": "hpu", "nccl": "cuda", "gloo": "cpu"}),
    _switch("--hpu-deterministic", ("--deterministic", ON)),
    _switch("--deterministic-mode", ("--deterministic", ON)),
    # the step
    # older releases counted in tokens, and had one batch size
    sets("--batch-size", "--micro-batch-size", read=_count),
    sets("--train-tokens", "train_tokens", read=whole(1)),
    sets("--lr-decay-tokens", "decay_tokens", read=whole(1)),
    sets("--lr-warmup-tokens", "warmup_tokens", read=whole(0)),
    sets("--stop-after-num-samples", "stop_samples", read=whole(1)),
    _switch("--accumulate-allreduce-grads-in-fp32", ("--grad-accum-dtype", "fp32")),
    _chosen("--main-grads-dtype", "--grad-accum-dtype", {"fp32": "fp32", "bf16": "bf16"}),
    _switch("--grad-reduce-in-bf16", ("--grad-accum-dtype", "bf16")),
    _switch("--checkpoint-activations", FULL),
    _switch("--deepspeed-activation-checkpointing", FULL),
    _switch("--pytorch-activation-checkpointing", FULL),
    _chosen("--checkpoint-activations-granularity", "granularity", {"full": "full", "selective": "selective"}),
    _switch("--recompute-activations", ("--recompute-granularity", "selective")),
    _many("--recompute-modules", _modules, "--recompute-modules"),
    _switch("--use-torch-compile", ("--torch-compile", ON)),
    _switch("--enable-cuda-graph", ("--cuda-graph-impl", "local")),
    _switch("--external-cuda-graph", ("--cuda-graph-impl", "local")),
    _many("--fp8-coverage", _coverage, "--fp8-mlp-row-parallel"),
    _switch("--first-last-layers-bf16", ("bf16_ends", ON)),
    sets("--num-layers-at-start-in-bf16", "bf16_start", read=whole(0)),
    sets("--num-layers-at-end-in-bf16", "bf16_end", read=whole(0)),
    # sharded states are ZeRO of some stage
    _switch("--use-distributed-optimizer", ("--zero-stage", "1")),
    _switch("--use-torch-fsdp2", ("--zero-stage", "3")),
    _switch("--use-megatron-fsdp", ("--zero-stage", "3")),
    sets("--num-distributed-optimizer-instances", "--num-replicas", read=_count),
    _many("--optimizer", _optimizer, "--optimizer", "--zero-stage"),
    _switch("--muon-use-nesterov", ("--muon-nesterov", ON)),
    _chosen("--muon-tp-mode", "muon_tp_mode", {mode: mode for mode in ("blockwise", "duplicated", "distributed")}),
    _only("--muon-scalar-optimizer", "adam"),
    _switch("--cpu-optimizer", ("--offload-optimizer", ON)),
    _switch("--optimizer-cpu-offload", ("--offload-optimizer", ON)),
    *(
        _switch(name, ("--offload-activations", ON))
        for name in (
            *("--cpu-offloading", "--cpu-offloading-activations"),
            *("--checkpoint-in-cpu", "--fine-grained-activation-offloading"),
        )
    ),
    _chosen("--remote-device", "--offload-param", CPU),
    _switch("--check-for-spiky-loss", ("--spike-action", "log")),
    _switch("--check-for-large-grads", ("--spike-action", "log")),
    # a step computed again where its loss looks wrong, or for a report of repeats: neither is a recheck every N steps
    _only("--rerun-mode", "disabled", "validate_results"),
    sets("--check-weight-hash-across-dp-replicas-interval", "--check-replicas-interval", read=_count),
    # schedule, data, files
    _switch("--override-lr-scheduler", ("--override-opt-param-scheduler", ON)),
    _switch("--use-checkpoint-lr-scheduler", ("--use-checkpoint-opt-param-scheduler", ON)),
    sets("--kill-switch-file", "--kill-switch-path"),
    _switch("--sft", ("--task", "sft")),
    _many("--split", _split, "--split"),
    sets("--data-idx-path", "--data-cache-path"),
    _only("--dataloader-type", "single"),
    _only("--data-impl", "mmap", "infer"),
    _switch("--log-memory-to-tensorboard", ("--log-memory-interval", "100")),
    _many("--profile", _profile, "--profile"),
    _switch("--use-pytorch-profiler", ("--profile", ON)),
    _many("--profile-steps", _profile_steps, "--profile-step-start", "--profile-step-end"),
)


def _of_answer(answer: MegatronAnswer) -> Entry:
    """Return the row of a flag without a conversion: it is left out, or refused."""
    if answer.is_refused:
        # any value: a switch of theirs is on where it stands
        return Entry(answer.name, "refused", answer.note or "there is none")
    return Entry(answer.name, "no effect", answer.note or "there is none")


def _with_reason(entry: Entry, answers: dict[str, MegatronAnswer]) -> Entry:
    answer = answers.get(entry.name)
    if answer is None or entry.text:
        return entry
    return Entry(**{**vars(entry), "text": answer.note})


def _of_option(name: str) -> Entry:
    """Return the row of a flag that is ours too."""
    # its own type reads and checks it
    section, _ = options()[name]
    hint = hints_of(sections()[section])[name]
    target = flag(name)

    def read(value: Any) -> Any:
        if isinstance(value, list) and not sequence(hint):
            raise WrongValueError("takes one value")
        if isinstance(value, list):
            return [_plain(word) for word in value]
        return _plain(value)

    takes: Form = "switch" if is_bool(hint) else "value"
    return sets(target, target, read=read, takes=takes)


def _plain(word: str) -> str:
    # Megatron's parser reads 300_000_000, as Python does
    return word.replace("_", "") if word.replace("_", "").isdecimal() else word


@functools.cache
def rows() -> tuple[Entry, ...]:
    """Return the row of every flag: conversions first, then answers of the page, then flags that are ours too."""
    answers = {answer.name: answer for answer in megatron_answers()}
    translated = {entry.name: _with_reason(entry, answers) for entry in TRANSLATED}
    # what the page says is enough for a flag that is left out
    others = [_of_answer(answer) for answer in answers.values() if answer.name not in translated]
    same = [_of_option(name) for name in options() if flag(name) not in translated]
    # families such as --mtp-* last: a flag's own row counts
    return tuple(sorted((*translated.values(), *others, *same), key=lambda entry: entry.name.endswith("*")))


def _unknown(name: str, value: Any, near: str | None) -> str:
    return f"no flag of Megatron's that is known here; {suggestion(near, 'remove it')}"


@functools.cache
def dialect() -> Dialect:
    """Return the rows with the wording of a table, whose first column names the flag."""
    return Dialect(rows(), _unknown, prefix="--", refused="{reason}", no_effect="{reason}")
