"""The HL_* variables that drive the scripts: what each one means, and which flags of megatron.train it stands for.

One table, `VARIABLES`. The defaults that a preset does not hold are in scripts/run_bloom13b.sh and
scripts/run_llama.sh, in plain view; here a variable is only translated, and a value that cannot be honoured is a fault:
none is ever silently ignored. An empty value counts as unset.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from megatron.command_line import build_parser, presets_of, read_preset
from megatron.config import ConfigError

Script = Literal["bloom13b", "llama"]


class WrongValueError(ValueError):
    """Why a variable's value cannot be used, and what can."""


Translate = Callable[[str], list[str]]


@dataclass(frozen=True)
class Variable:
    """One HL_* variable that is honoured."""

    name: str
    meaning: str
    translate: Translate
    """The flags of megatron.train for a value. Raises WrongValueError."""
    scripts: tuple[Script, ...] = ("bloom13b", "llama")
    flag: str | None = None
    """The flag it sets, where it is one."""


def whole_number(text: str, at_least: int = 0) -> int:
    """Raises WrongValueError."""
    try:
        number = int(text)
    except ValueError:
        number = at_least - 1
    if number < at_least:
        raise WrongValueError(f"must be a whole number, {at_least} or more")
    return number


def is_on(text: str) -> bool:
    """Raises WrongValueError unless the text is a switch."""
    if text.lower() not in ("0", "1", "false", "true"):
        raise WrongValueError("must be 0 or 1")
    return text.lower() in ("1", "true")


def _number(name: str, flag: str, meaning: str, at_least: int = 1) -> Variable:
    return Variable(name, meaning, lambda text: [flag, str(whole_number(text, at_least))], flag=flag)


def _text(name: str, flag: str, meaning: str) -> Variable:
    return Variable(name, meaning, lambda text: [flag, text], flag=flag)


def _switch(name: str, flag: str, meaning: str) -> Variable:
    return Variable(name, meaning, lambda text: [flag, "true" if is_on(text) else "false"], flag=flag)


def _load_tag(text: str) -> list[str]:
    step = text.removeprefix("global_step")
    if step == text or not step.isdigit():
        raise WrongValueError("must be global_step and a number, as checkpoints are named")
    return ["--ckpt-step", step]


def _choice(name: str, choices: Mapping[str, list[str]], meaning: str, *, no: str = "", flag: str = "") -> Variable:
    def translate(text: str) -> list[str]:
        if text not in choices:
            raise WrongValueError(f"must be {_one_of(choices)}" + (f" ({no})" if no else ""))
        return choices[text]

    return Variable(name, meaning, translate, flag=flag or None)


def _launch(name: str, meaning: str, *scripts: Script) -> Variable:
    """A variable that `translate` reads itself."""
    return Variable(name, meaning, lambda text: [], scripts=scripts or ("bloom13b", "llama"))


def _one_of(values: Mapping[str, object] | tuple[str, ...]) -> str:
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
    return ["--profile-steps", str(whole_number(first, 1)), str(whole_number(last, 1))]


def _profile(text: str) -> list[str]:
    if text == "hltv":
        raise WrongValueError("needs Habana's trace viewer, which is not part of this project; use pt")
    if text not in ("pt", "pt-full"):
        raise WrongValueError("must be pt or pt-full")
    full = ["--pytorch-profiler-collect-shapes", "true", "--pytorch-profiler-collect-callstack", "true"]
    return ["--profile", "true", *(full if text == "pt-full" else [])]


def _rampup(text: str) -> list[str]:
    return ["--rampup-batch-size", "16", "16", "5000000"] if is_on(text) else ["--rampup-batch-size", "none"]


VARIABLES: tuple[Variable, ...] = (
    # what is trained
    _launch("HL_CONFIG", "preset in configs/, or a YAML file, instead of the script's own"),
    _launch("HL_LLAMA_VER", "generation of Llama: 1, 2, 3.1 or 3.2", "llama"),
    _launch("HL_LLAMA_MODEL_SIZE", "billions of parameters: 7, 13, 65 | 7, 13, 34, 70 | 8, 70, 405 | 1, 3", "llama"),
    _number("HL_NUM_LAYERS", "--num-layers", "transformer layers"),
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
    Variable(
        "HL_RAMPUP_BS",
        "1: grow the global batch from 16 by 16 over 5,000,000 samples",
        _rampup,
        flag="--rampup-batch-size",
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
    # device
    _launch("HL_DEVICE", "hpu, cuda or cpu; unset: the first of them that is there"),
    _launch("HL_USE_HPU", "1: hpu; 0: not hpu. Unset: what is there"),
    _launch("HL_QNPU_DIR", "folder of an environment whose `activate` is sourced first, on every node"),
    # data
    _launch("HL_DATA_DIR_ROOT", "folder of the dataset and of the tokenizer's files"),
    _launch("HL_DATA_FILE_PREFIX", "the dataset in that folder: PREFIX.bin and PREFIX.idx"),
    _launch("HL_DATA_IDX_DIR", "folder for the index arrays"),
    _launch("HL_DATA_CACHE_DIR", "the same, by its later name"),
    _launch("HL_TOKENIZER_TYPE", "GPT2BPETokenizer, HFTokenizer or SentencePieceTokenizer"),
    _launch("HL_TOKENIZER_MODEL", "the tokenizer's file"),
    _number("HL_EVAL_ITERS", "--eval-iters", "global batches in one validation; 0: none", 0),
    _number("HL_EVAL_INTERVAL", "--eval-interval", "steps between two validations"),
    # results
    _launch("HL_RESULTS_DIR", "folder of the run; unset: a new one, named after the run, in HL_RESULTS_DIR_PREFIX/out"),
    _launch("HL_RESULTS_DIR_PREFIX", "parent of that `out`"),
    _launch("HL_CHECKPOINTS_DIR", "folder to save to and to resume from; unset: checkpoints/ in the results folder"),
    _text("HL_TENSORBOARD_DIR", "--tensorboard-dir", "TensorBoard events; unset: tensorboard/ in the results folder"),
    _launch("HL_SAVE", "1: save checkpoints"),
    _number("HL_SAVE_INTERVAL", "--save-interval", "steps between two checkpoints"),
    _number("HL_LOG_INTERVAL", "--log-interval", "steps between two log lines"),
    Variable(
        "HL_PROFILE",
        "pt: a torch.profiler trace; pt-full: with shapes, Python stacks and memory",
        _profile,
        flag="--profile",
    ),
    Variable("HL_PROFILE_STEPS", "first and last iteration of the trace: 3,4", _profile_steps, flag="--profile-steps"),
    _launch("HL_DRY_RUN", "1: print the plan and start nothing"),
)


@dataclass(frozen=True)
class Refused:
    """A variable of Habana's scripts that is known and not honoured."""

    names: tuple[str, ...]
    """A trailing * stands for every name that starts so."""
    off: tuple[str, ...]
    """Values that ask for nothing, accepted."""
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


@dataclass
class Request:
    """What a user asked for: where to launch, and the flags of megatron.train."""

    nodes: int = 1
    devices_per_node: int | None = None
    """None: 8, or on the CPU of this machine as many as the layout needs."""
    data_parallel_size: int | None = None
    """None: what the layout leaves of the devices."""
    hostsfile: str | None = None
    device: str = "auto"
    master_port: int | None = None
    max_restarts: int = 0
    min_nodes: int | None = None
    """None: all of them."""
    rendezvous: str | None = None
    dry_run: bool = False
    activate_dir: str | None = None
    """Folder whose `activate` every node sources first."""
    results_parent: str | None = None
    """Folder for a results folder named after the run, where --results-dir is not given."""
    checkpoints_dir: str | None = None
    save: bool = False
    resume: bool = False
    environment: dict[str, str] = field(default_factory=dict)
    """For the ranks."""
    train_flags: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    layout_known: bool = True
    """False where nodes, devices or parallel sizes are among the faults, and say nothing of each other."""


def from_environment(environment: Mapping[str, str], script: Script, passed_on: list[str]) -> Request:
    """Translate the HL_* variables for one of the scripts; `passed_on` are its arguments, which win.

    Every value that cannot be honoured is in `faults`.
    """
    given = {name: value for name, value in environment.items() if name.startswith("HL_") and value != ""}
    if passed := presets_of(build_parser().parse_known_args(passed_on)[0]):
        given["HL_CONFIG"] = passed[0]  # it names the run; the others are laid over it
    request = Request(faults=_unknown_or_refused(given, script))
    reader = _Reader(given, request)

    preset = _preset(given, script, request)
    request.train_flags += ["--config", preset]
    for variable in VARIABLES:
        if variable.name in given:
            with reader.faults_of(variable.name):
                request.train_flags += variable.translate(given[variable.name])

    request.nodes = reader.number("HL_NUM_NODES") or 1
    request.devices_per_node = reader.number("HL_NGPU_PER_NODE") or reader.number("HL_DEVICES_PER_NODE")
    reader.same("HL_NGPU_PER_NODE", "HL_DEVICES_PER_NODE")
    request.data_parallel_size = reader.number("HL_DP")
    request.layout_known = not any(fault.startswith(LAYOUT) for fault in request.faults)
    request.hostsfile = given.get("HL_HOSTSFILE")
    request.rendezvous = given.get("HL_RENDEZVOUS")
    request.max_restarts = reader.number("HL_MAX_RESTARTS", at_least=0) or 0
    request.min_nodes = reader.number("HL_MIN_NODES")
    request.dry_run = reader.switch("HL_DRY_RUN") or False
    request.activate_dir = given.get("HL_QNPU_DIR")
    request.device = _device(given, reader)
    _lazy_mode(reader)
    _data(given, script, preset, reader)

    if "HL_RESULTS_DIR" in given:
        request.train_flags += ["--results-dir", given["HL_RESULTS_DIR"]]
    else:
        parent = Path(given.get("HL_RESULTS_DIR_PREFIX", "."), "out")
        request.results_parent = str(parent / _run_name(given, script, preset))
    request.checkpoints_dir = given.get("HL_CHECKPOINTS_DIR")
    save = reader.switch("HL_SAVE")
    request.save, request.resume = save is None or save, True
    request.train_flags += passed_on
    return request


class _Reader:
    """Reads variables into numbers and switches; a value that is neither becomes a fault, reported once."""

    def __init__(self, given: Mapping[str, str], request: Request):
        self.given, self.request = given, request

    @contextmanager
    def faults_of(self, name: str) -> Iterator[None]:
        try:
            yield
        except WrongValueError as why:
            self.fault(f"{name}={self.given[name]!r} {why}")

    def fault(self, text: str) -> None:
        if text not in self.request.faults:
            self.request.faults.append(text)

    def number(self, name: str, at_least: int = 1) -> int | None:
        """None where it is unset or wrong."""
        if name in self.given:
            with self.faults_of(name):
                return whole_number(self.given[name], at_least)
        return None

    def switch(self, name: str) -> bool | None:
        """None where it is unset or wrong."""
        if name in self.given:
            with self.faults_of(name):
                return is_on(self.given[name])
        return None

    def same(self, name: str, other: str) -> None:
        if name in self.given and other in self.given and self.given[name] != self.given[other]:
            self.fault(
                f"{name}={self.given[name]} and {other}={self.given[other]} mean the same thing; set one of them"
            )


def _unknown_or_refused(given: Mapping[str, str], script: Script) -> list[str]:
    known = {variable.name: variable for variable in VARIABLES}
    faults = []
    for name, value in sorted(given.items()):
        variable = known.get(name)
        if variable is not None:
            if script not in variable.scripts:
                faults.append(f"{name}={value} means nothing to this script; it belongs to scripts/run_llama.sh")
            continue
        refused = next((entry for entry in REFUSED if _covers(entry, name)), None)
        if refused is None:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else "docs/launching.md lists the variables"
            faults.append(f"unknown variable {name}={value}; {hint}")
        elif value.lower() not in refused.off:
            faults.append(f"{name}={value} is not supported: {refused.reason}")
    return faults


def _covers(refused: Refused, name: str) -> bool:
    return any(name == known or (known.endswith("*") and name.startswith(known[:-1])) for known in refused.names)


def _preset(given: Mapping[str, str], script: Script, request: Request) -> str:
    if "HL_CONFIG" in given:
        return given["HL_CONFIG"]
    if script == "bloom13b":
        return "bloom_13b"
    version, size = given.get("HL_LLAMA_VER", "3.1"), given.get("HL_LLAMA_MODEL_SIZE", "8")
    sizes = LLAMA_PRESETS.get(version)
    if sizes is None:
        request.faults.append(f"HL_LLAMA_VER={version} must be {_one_of(LLAMA_PRESETS)}")
    elif size not in sizes:
        request.faults.append(f"HL_LLAMA_MODEL_SIZE={size} must be {_one_of(sizes)} with HL_LLAMA_VER={version}")
    else:
        return sizes[size]
    # any preset will do: the request is refused, and the rest can still be judged
    return LLAMA_PRESETS["3.1"]["8"]


def preset_holds(preset: str, section: str, option: str) -> bool:
    """Whether a preset gives an option a value."""
    try:
        return bool((read_preset(preset).get(section) or {}).get(option))
    except (ConfigError, AttributeError):
        return False  # whoever loads the preset says what is wrong with it


def _run_name(given: Mapping[str, str], script: Script, preset: str) -> str:
    """The folder below `out`: bloom13b, llama3.1_8b, or the preset's name."""
    if "HL_CONFIG" not in given or preset == "bloom_13b":
        if script == "bloom13b":
            return script
        if "HL_CONFIG" not in given:
            return f"llama{given.get('HL_LLAMA_VER', '3.1')}_{given.get('HL_LLAMA_MODEL_SIZE', '8')}b"
    return Path(preset).stem if preset.endswith((".yaml", ".yml")) else preset


def _device(given: Mapping[str, str], reader: _Reader) -> str:
    """hpu, cuda, cpu, auto, or `no-hpu`: the first of cuda and cpu that is there."""
    device, use_hpu = given.get("HL_DEVICE"), reader.switch("HL_USE_HPU")
    if device is not None and device not in ("hpu", "cuda", "cpu"):
        reader.fault(f"HL_DEVICE={device!r} must be hpu, cuda or cpu; unset it for the first of them that is there")
        return "auto"
    if device is not None and use_hpu is not None and use_hpu != (device == "hpu"):
        reader.fault(f"HL_USE_HPU={given['HL_USE_HPU']} contradicts HL_DEVICE={device}; set one of them")
    if device is not None:
        return device
    return "auto" if use_hpu is None else "hpu" if use_hpu else "no-hpu"


def _lazy_mode(reader: _Reader) -> None:
    lazy, compiled = reader.switch("HL_USE_LAZY_MODE"), reader.switch("HL_USE_TORCH_COMPILE")
    if lazy and compiled:
        reader.fault("HL_USE_LAZY_MODE=1 and HL_USE_TORCH_COMPILE=1 exclude each other; set one of them to 0")
    if lazy is not None or compiled:
        reader.request.environment["PT_HPU_LAZY_MODE"] = "1" if lazy else "0"


def _data(given: Mapping[str, str], script: Script, preset: str, reader: _Reader) -> None:
    """Dataset, index folder and tokenizer."""
    flags = reader.request.train_flags
    root, prefix = given.get("HL_DATA_DIR_ROOT"), given.get("HL_DATA_FILE_PREFIX")
    if prefix is not None:
        flags += ["--data-path", str(Path(root or ".", prefix))]
    elif root is not None:
        reader.fault(
            f"HL_DATA_DIR_ROOT={root} needs HL_DATA_FILE_PREFIX, the dataset's name in it without .bin; set it"
        )
    reader.same("HL_DATA_IDX_DIR", "HL_DATA_CACHE_DIR")
    cache = given.get("HL_DATA_CACHE_DIR") or given.get("HL_DATA_IDX_DIR")
    if cache is not None:
        flags += ["--data-cache-path", cache]

    kind, model = given.get("HL_TOKENIZER_TYPE"), given.get("HL_TOKENIZER_MODEL")
    if kind is not None and kind not in TOKENIZERS:
        more = (
            "; for Llama 3 use HFTokenizer with its tokenizer.json, or TikTokenizer with its tokenizer.model"
            if kind == "Llama3Tokenizer"
            else ""
        )
        reader.fault(f"HL_TOKENIZER_TYPE={kind} must be {_one_of(TOKENIZERS)}{more}")
        return
    gpt2 = [Path(root or ".", name) for name in ("gpt2-vocab.json", "gpt2-merges.txt")]
    if kind is None and model is None and root is not None:
        # what Habana's layout of the folder implies; a preset that names a tokenizer keeps it
        if preset_holds(preset, "data", "tokenizer_model"):
            return
        if script == "bloom13b" and all(path.is_file() for path in gpt2):
            kind = "GPT2BPETokenizer"
        elif script == "llama" and Path(root, "tokenizer.json").is_file():
            kind, model = "HFTokenizer", str(Path(root, "tokenizer.json"))
    if kind is not None:
        flags += ["--tokenizer-type", TOKENIZERS[kind]]
    if kind == "GPT2BPETokenizer":
        flags += ["--vocab-file", str(gpt2[0]), "--merge-file", str(gpt2[1])]
    if model is not None:
        flags += ["--tokenizer-model", model]


def legend(faults: list[str]) -> str:
    """'HL_TP sets tensor_model_parallel_size' for the options that faults name, for users who know the variables."""
    text = " ".join(faults)
    names = {
        variable.flag.removeprefix("--").replace("-", "_"): variable.name for variable in VARIABLES if variable.flag
    }
    pairs = [
        f"{variable} sets {option}" for option, variable in names.items() if option in text and variable not in text
    ]
    return "; ".join(pairs)
