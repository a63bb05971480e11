"""The HL_* variables of the scripts: meaning, and flags of megatron.train.

One table, `VARIABLES`. Defaults that are not in a preset are in scripts/run_bloom13b.sh and scripts/run_llama.sh; here
a variable is only translated. A value that cannot be used is a fault: none is ignored. An empty value counts as unset.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

Script = Literal["bloom13b", "llama", "sft"]
ALL: tuple[Script, ...] = ("bloom13b", "llama", "sft")
PRETRAINING: tuple[Script, ...] = ("bloom13b", "llama")
SFT: tuple[Script, ...] = ("sft",)


class WrongValueError(ValueError):
    """A variable's value cannot be used; the message says which can."""


Translate = Callable[[str], list[str]]


@dataclass(frozen=True)
class Variable:
    """A supported HL_* variable."""

    name: str
    meaning: str
    translate: Translate
    """Returns the flags of megatron.train for a value. Raises WrongValueError."""
    scripts: tuple[Script, ...] = ALL
    flag: str | None = None
    """The flag it sets, where it is one."""


def whole_number(text: str, at_least: int = 0) -> int:
    """Convert a variable's text. Raises WrongValueError."""
    try:
        number = int(text)
    except ValueError:
        number = at_least - 1
    if number < at_least:
        raise WrongValueError(f"must be a whole number, {at_least} or more")
    return number


def is_on(text: str) -> bool:
    """Convert a switch. Raises WrongValueError."""
    if text.lower() not in ("0", "1", "false", "true"):
        raise WrongValueError("must be 0 or 1")
    return text.lower() in ("1", "true")


def _number(name: str, flag: str, meaning: str, at_least: int = 1, scripts: tuple[Script, ...] = ALL) -> Variable:
    return Variable(name, meaning, lambda text: [flag, str(whole_number(text, at_least))], scripts, flag)


def _text(name: str, flag: str, meaning: str, scripts: tuple[Script, ...] = ALL) -> Variable:
    return Variable(name, meaning, lambda text: [flag, text], scripts, flag)


def _switch(name: str, flag: str, meaning: str) -> Variable:
    return Variable(name, meaning, lambda text: [flag, "true" if is_on(text) else "false"], flag=flag)


def _load_tag(text: str) -> list[str]:
    step = text.removeprefix("global_step")
    if step == text or not step.isdigit():
        raise WrongValueError("must be global_step and a number, as checkpoints are named")
    return ["--ckpt-step", step]


def _choice(
    name: str,
    choices: Mapping[str, list[str]],
    meaning: str,
    *,
    no: str = "",
    flag: str = "",
    scripts: tuple[Script, ...] = ALL,
) -> Variable:
    def translate(text: str) -> list[str]:
        if text not in choices:
            raise WrongValueError(f"must be {one_of(choices)}" + (f" ({no})" if no else ""))
        return choices[text]

    return Variable(name, meaning, translate, scripts, flag or None)


def _launch(name: str, meaning: str, *scripts: Script) -> Variable:
    """Variable that hl_requests.py reads itself."""
    return Variable(name, meaning, lambda text: [], scripts or ALL)


def one_of(values: Mapping[str, object] | tuple[str, ...]) -> str:
    *most, last = values
    return f"{', '.join(most)} or {last}" if most else last


def _dropout(text: str) -> list[str]:
    return ["--hidden-dropout", text, "--attention-dropout", text]


def _train_iters(text: str) -> list[str]:
    # a preset may count samples, and only one of the two may be given
    return ["--train-iters", str(whole_number(text, 1)), "--train-samples", "none"]


def _profile_steps(text: str) -> list[str]:
    first, comma, last = text.partition(",")
    if not comma:
        raise WrongValueError("must be two iterations, such as 3,4")
    return ["--profile-step-start", str(whole_number(first, 1)), "--profile-step-end", str(whole_number(last, 1) + 1)]


def _profile(text: str) -> list[str]:
    if text == "hltv":
        raise WrongValueError("needs Habana's trace viewer, which is not part of this project; use pt")
    if text not in ("pt", "pt-full"):
        raise WrongValueError("must be pt or pt-full")
    full = ["--pytorch-profiler-collect-shapes", "true", "--pytorch-profiler-collect-callstack", "true"]
    return ["--profile", "true", *_profile_steps("3,4"), *(full if text == "pt-full" else [])]


def _rampup(text: str) -> list[str]:
    return ["--rampup-batch-size", "16", "16", "5000000"] if is_on(text) else ["--rampup-batch-size", "none"]


VARIABLES: tuple[Variable, ...] = (
    # what is trained
    _launch("HL_CONFIG", "preset (megatron/presets/), or a YAML file, instead of the script's own"),
    _launch("HL_LLAMA_VER", "generation of Llama: 1, 2, 3.1 or 3.2", "llama"),
    _launch("HL_LLAMA_MODEL_SIZE", "billions of parameters: 7, 13, 65 | 7, 13, 34, 70 | 8, 70, 405 | 1, 3", "llama"),
    _launch("HL_MODEL", "the model to fine-tune: a folder that transformers wrote", *SFT),
    _launch("HL_CHAT_TEMPLATE", "chat template: a preset, or a .jinja or .py file; unset: the tokenizer's own", *SFT),
    _number("HL_NUM_LAYERS", "--num-layers", "transformer layers", scripts=PRETRAINING),
    _number("HL_SEQ_LEN", "--seq-length", "tokens in a sample"),
    _choice(
        "HL_POSITION_EMBEDDING_TYPE",
        {
            "learned": ["--position-embedding-type", "learned"],
            "alibi": ["--position-embedding-type", "alibi"],
            "rotary": ["--position-embedding-type", "rope"],
        },
        "how a token knows its place: learned, alibi or rotary",
        flag="--position-embedding-type",
        scripts=PRETRAINING,
    ),
    Variable("HL_DROPOUT", "hidden and attention dropout", _dropout, flag="--hidden-dropout"),
    # layout
    _launch("HL_NUM_NODES", "nodes"),
    _launch("HL_NGPU_PER_NODE", "devices on each node"),
    _launch("HL_DEVICES_PER_NODE", "the same, by its later name"),
    _launch("HL_DP", "data-parallel size; HL_DP x HL_TP x HL_PP must equal nodes x devices"),
    _number("HL_TP", "--tensor-model-parallel-size", "tensor-parallel size"),
    _number("HL_PP", "--pipeline-model-parallel-size", "pipeline stages"),
    _switch("HL_SEQ_PARALLEL", "--sequence-parallel", "sequence parallelism between the tensor-parallel regions"),
    _number("HL_ZERO_STAGE", "--zero-stage", "ZeRO stage, 0 to 3; 2 and 3 run without a pipeline", 0),
    _switch("HL_NO_PIPELINE_PARALLEL", "--no-pipeline-parallel", "1: the sequential engine instead of the pipeline"),
    _launch("HL_HOSTSFILE", "DeepSpeed hostfile: one `<host> slots=<n>` a line"),
    _launch("HL_RENDEZVOUS", "HOST:PORT of the first node, where this script is started on each node by itself"),
    # restarts
    _launch("HL_MAX_RESTARTS", "how often a run whose ranks failed goes on from its newest checkpoint; 0: never"),
    _launch("HL_MIN_NODES", "nodes that the run goes on with, when others are lost"),
    # batch and length
    _number("HL_MICRO_BATCH", "--micro-batch-size", "samples in one forward pass of a rank"),
    _number("HL_GBS", "--global-batch-size", "samples in one optimizer step"),
    _number(
        "HL_MAX_BATCH_LEN", "--max-batch-len", "tokens in a microbatch, into which samples are packed", scripts=SFT
    ),
    _number("HL_NUM_EPOCHS", "--num-epochs", "times to go through the data", scripts=SFT),
    _text("HL_LR", "--lr", "peak learning rate", SFT),
    Variable(
        "HL_RAMPUP_BS",
        "1: grow the global batch from 16 by 16 over 5,000,000 samples",
        _rampup,
        PRETRAINING,
        "--rampup-batch-size",
    ),
    Variable(
        "HL_TRAIN_ITERS", "steps to train for, instead of the preset's length", _train_iters, flag="--train-iters"
    ),
    _number(
        "HL_EXIT_INTERVAL", "--exit-interval", "save and exit when the iteration is a multiple of this; 0: never", 0
    ),
    _switch(
        "HL_UNIV_CP", "--universal-checkpoint", "1: the folder resumed from holds a universal checkpoint of DeepSpeed's"
    ),
    Variable(
        "HL_CHECKPOINT_LOAD_TAG", "the checkpoint to resume from, such as global_step100", _load_tag, flag="--ckpt-step"
    ),
    _switch("HL_VERIFY_CP", "--verify-checkpoint", "1: compare all copies before each save"),
    _text("HL_KILL_SWITCH", "--kill-switch-path", "when this file appears, all ranks save and exit together"),
    # optimizer, memory, speed
    _choice(
        "HL_OPTIMIZER",
        {name: ["--optimizer", name] for name in ("adamw", "adam", "sgd", "fusedadamw")},
        "adamw, adam, sgd or fusedadamw",
        flag="--optimizer",
    ),
    _choice(
        "HL_GRAD_ACCUM_DTYPE",
        {name: ["--grad-accum-dtype", name] for name in ("fp32", "bf16")},
        "in which gradients are added up: fp32 or bf16",
        flag="--grad-accum-dtype",
    ),
    _choice(
        "HL_CKP_ACT",
        {
            "0": ["--recompute-granularity", "none"],
            "1": ["--recompute-granularity", "full"],
            "2": ["--recompute-granularity", "selective"],
        },
        "activations recomputed: 0 none, 1 whole layers, 2 the attention core",
        no="3 belongs to Mixtral, 4 is 1 by another engine",
        flag="--recompute-granularity",
    ),
    _choice(
        "HL_USE_FUSED_SDPA",
        {"0": ["--attention-backend", "sdpa"], "1": ["--attention-backend", "auto"]},
        "0: torch's attention instead of Habana's FusedSDPA on HPU",
        flag="--attention-backend",
    ),
    _switch("HL_USE_FAST_SOFTMAX", "--use-fast-softmax", "FusedSDPA's fast softmax, HPU only"),
    _switch("HL_USE_FUSED_RMSNORM", "--use-fused-rmsnorm", "Habana's fused RMSNorm, HPU only"),
    _switch("HL_USE_TORCH_COMPILE", "--torch-compile", "compile each layer with torch.compile; not in lazy mode"),
    _launch("HL_USE_LAZY_MODE", "HPU: lazy mode (PT_HPU_LAZY_MODE)"),
    _choice(
        "HL_BUCKETING",
        {name: ["--bucketing", name] for name in ("auto", "off", "octave", "optimal")},
        "lengths that rows are padded to: auto, off, octave or optimal",
        flag="--bucketing",
        scripts=SFT,
    ),
    # device
    _launch("HL_DEVICE", "hpu, cuda or cpu; unset: the first of them that is there"),
    _launch("HL_USE_HPU", "1: hpu; 0: not hpu. Unset: what is there"),
    _launch("HL_QNPU_DIR", "folder of an environment whose `activate` is sourced first, on every node"),
    # data
    _launch("HL_DATA", "chats to train on, a JSONL file of messages", *SFT),
    _launch("HL_DATA_OUTPUT_DIR", "folder of the tokenized chats; unset: data/ in the results folder", *SFT),
    _launch("HL_DATA_DIR_ROOT", "folder of the dataset and of the tokenizer's files", *PRETRAINING),
    _launch("HL_DATA_FILE_PREFIX", "the dataset in that folder: PREFIX.bin and PREFIX.idx", *PRETRAINING),
    _launch("HL_DATA_IDX_DIR", "folder for the index arrays"),
    _launch("HL_DATA_CACHE_DIR", "the same, by its later name"),
    _launch("HL_TOKENIZER_TYPE", "GPT2BPETokenizer, HFTokenizer or SentencePieceTokenizer", *PRETRAINING),
    _launch("HL_TOKENIZER_MODEL", "the tokenizer's file", *PRETRAINING),
    _number("HL_EVAL_ITERS", "--eval-iters", "global batches in one validation; 0: none", 0),
    _number("HL_EVAL_INTERVAL", "--eval-interval", "steps between two validations"),
    # results
    _launch("HL_RESULTS_DIR", "folder of the run; unset: a new one, named after the run, in HL_RESULTS_DIR_PREFIX/out"),
    _launch("HL_RESULTS_DIR_PREFIX", "parent of that `out`"),
    _launch("HL_CHECKPOINTS_DIR", "folder to save to and to resume from; unset: checkpoints/ in the results folder"),
    _text("HL_TENSORBOARD_DIR", "--tensorboard-dir", "TensorBoard events; unset: tensorboard/ in the results folder"),
    _launch("HL_SAVE", "1: save checkpoints"),
    _number("HL_SAVE_INTERVAL", "--save-interval", "steps between two checkpoints"),
    _text("HL_SAVE_HF", "--save-hf", "folder of the exports; unset: hf_format/ in the results folder", SFT),
    _number("HL_SAVE_SAMPLES", "--save-samples", "samples between two exports, beside each epoch's", scripts=SFT),
    _number("HL_LOG_INTERVAL", "--log-interval", "steps between two log lines"),
    Variable(
        "HL_PROFILE",
        "pt: a torch.profiler trace; pt-full: with shapes, Python stacks and memory",
        _profile,
        flag="--profile",
    ),
    Variable(
        "HL_PROFILE_STEPS", "first and last iteration of the trace: 3,4", _profile_steps, flag="--profile-step-start"
    ),
    _launch("HL_DRY_RUN", "1: print the plan and start nothing"),
)


@dataclass(frozen=True)
class Refused:
    """A known variable of Habana's scripts that is not supported."""

    names: tuple[str, ...]
    """A trailing * matches every name that starts so."""
    off: tuple[str, ...]
    """Accepted values: they request nothing."""
    reason: str


_FP8 = "there is no FP8 here; the run would be bf16. Unset it"
REFUSED: tuple[Refused, ...] = (
    Refused(("HL_USE_TRANSFORMER_ENGINE", "HL_USE_CACHE_FP8_WEIGHT", "HL_USE_CACHE_FP8_WEIGHT_FWD"), ("0",), _FP8),
    Refused(("HL_FP8_FORMAT",), ("hybrid",), _FP8),
    Refused(("HL_FP8_MARGIN",), ("0",), _FP8),
    Refused(("HL_FP8_AMAX_RECOMPUTE_ALGO",), ("max",), _FP8),
    Refused(("HL_FP8_AMAX_REDUCE", "HL_FP8_MANUAL_MODE"), ("1",), _FP8),
    Refused(("HL_FP8_MEASURE_INTERVAL", "HL_FP8_AMAX_HISTORY_LEN"), (), _FP8),
    Refused(("HL_MOE_*",), (), "mixture-of-experts models (Mixtral) are not supported. Unset it"),
    Refused(("HL_TENSOR_LOGGER",), ("0",), "there is no tensor logger. Unset it"),
    Refused(("HL_TENSOR_LOGGER_*",), ("0",), "there is no tensor logger. Unset it"),
    Refused(
        ("HL_CHECK_TP_NORM",),
        ("0",),
        "activations are not compared over tensor-parallel ranks; --check-replicas-interval compares parameters. "
        "Unset it",
    ),
    Refused(
        ("HL_START_CHECK_TP_NORM_ITER", "HL_END_CHECK_TP_NORM_ITER", "HL_CHECK_TP_NORM_TYPE"),
        ("-1", "all"),
        "it belongs to HL_CHECK_TP_NORM. Unset it",
    ),
    Refused(
        ("HL_LATEST_CHECKPOINT", "HL_UNIV_CP_EXTRACT_WORKERS", "HL_UNIV_CP_MERGE_WORKERS"),
        (),
        "it belongs to Habana's wrapper of the conversion; call tools/ds_to_universal.py. Unset it",
    ),
    Refused(
        ("HL_SCHEDULER_BATCH_SIZE", "HL_BATCH_SCHED_SAMPLES", "HL_STOP_AFTER_NUM_SAMPLES"),
        ("0",),
        "the batch scheduler is not supported; HL_RAMPUP_BS or --rampup-batch-size grows the batch, --train-samples "
        "ends the run. Unset it",
    ),
    Refused(("HL_USE_FUSED_SDPA_WITH_RECOMPUTE",), ("0",), "HL_CKP_ACT=2 recomputes the attention core instead. Set 0"),
    Refused(("HL_USE_TORCH_COMPILED_AUTOGRAD",), ("0", "false"), "compiled autograd is not supported. Set 0"),
    Refused(("HL_COMPILED_AUTOGRAD_FALLBACK_MODE",), ("nothing",), "compiled autograd is not supported. Unset it"),
    Refused(("HL_IMMEDIATE_GRAD_UPDATE",), ("1", "true"), "bf16 gradients are always added up at once. Unset it"),
    Refused(
        ("HL_TRUST_REMOTE_CODE",), ("0",), "code that comes with a tokenizer is never run. Use a tokenizer.json; set 0"
    ),
    Refused(("HL_RUN_EVAL_HARNESS",), ("0",), "there is no evaluation harness. Set 0"),
    Refused(("HL_EVAL_TASKS",), (), "there is no evaluation harness. Unset it"),
)

LLAMA_PRESETS: dict[str, dict[str, str]] = {
    "1": {size: f"llama1_{size}b" for size in ("7", "13", "65")},
    "2": {size: f"llama2_{size}b" for size in ("7", "13", "34", "70")},
    "3.1": {size: f"llama31_{size}b" for size in ("8", "70", "405")},
    "3.2": {size: f"llama32_{size}b" for size in ("1", "3")},
}

# what a layout is made of
LAYOUT = tuple(f"HL_{name}=" for name in ("NUM_NODES", "NGPU_PER_NODE", "DEVICES_PER_NODE", "DP", "TP", "PP"))

# as Habana's scripts call them -> ours
TOKENIZERS = {
    "GPT2BPETokenizer": "GPT2BPETokenizer",
    "HFTokenizer": "HFTokenizer",
    "SentencePieceTokenizer": "SentencePieceTokenizer",
    "GPTSentencePieceTokenizer": "SentencePieceTokenizer",
    "NullTokenizer": "NullTokenizer",
}
