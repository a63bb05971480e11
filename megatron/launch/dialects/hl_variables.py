"""The HL_* variables of the scripts: meaning, and flags of megatron.train.

One table, `VARIABLES`. Defaults that are not in a preset are in scripts/run_bloom13b.sh and scripts/run_llama.sh; here
a variable is only translated. A value that cannot be used is a fault: none is ignored. An empty value counts as unset.
Variables of Habana's scripts that are not supported are in hl_help.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, get_args, get_type_hints

from megatron.launch.dialects.hl_values import FORMATS, WrongValueError, coverage, is_on, one_of, whole_number
from megatron.options.data import DataConfig
from megatron.options.optimizer import OPTIMIZERS

Script = Literal["bloom13b", "llama", "sft", "dpo", "generate", "evaluate"]
ALL: tuple[Script, ...] = ("bloom13b", "llama", "sft", "dpo")
"""The scripts that train."""
GENERATE: tuple[Script, ...] = ("generate",)
EVALUATE: tuple[Script, ...] = ("evaluate",)
INFERENCE = (*GENERATE, *EVALUATE)
PRETRAINING: tuple[Script, ...] = ("bloom13b", "llama")
FINE_TUNING: tuple[Script, ...] = ("sft", "dpo")
DPO: tuple[Script, ...] = ("dpo",)


Translate = Callable[[str], list[str]]


@dataclass(frozen=True)
class Variable:
    """A supported HL_* variable."""

    name: str
    meaning: str
    translate: Translate
    """Returns the flags of megatron.train for a value. Raises WrongValueError."""
    scripts: tuple[Script, ...] = ALL
    flags: tuple[str, ...] = ()
    """The flags it sets."""
    unread: tuple[str, ...] = ()
    """Fields of the launch request that cannot be read with it."""


def _number(name: str, flag: str, meaning: str, at_least: int = 1, scripts: tuple[Script, ...] = ALL) -> Variable:
    return Variable(name, meaning, lambda text: [flag, str(whole_number(text, at_least))], scripts, (flag,))


def _text(name: str, flag: str, meaning: str, scripts: tuple[Script, ...] = ALL) -> Variable:
    return Variable(name, meaning, lambda text: [flag, text], scripts, (flag,))


def _words(name: str, flag: str, meaning: str, scripts: tuple[Script, ...] = ALL) -> Variable:
    return Variable(name, meaning, lambda text: [flag, *text.replace(",", " ").split()], scripts, (flag,))


def _switch(name: str, flag: str, meaning: str) -> Variable:
    return Variable(name, meaning, lambda text: [flag, "true" if is_on(text) else "false"], flags=(flag,))


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

    return Variable(name, meaning, translate, scripts, (flag,))


def _algorithm(name: str, meaning: str) -> Variable:
    flag = "--fp8-amax-compute-algo"
    return _choice(name, {value: [flag, value] for value in ("max", "most_recent")}, meaning, flag=flag)


def _launch(name: str, meaning: str, *scripts: Script, unread: str = "") -> Variable:
    """Variable that hl_requests.py reads itself."""
    return Variable(name, meaning, lambda text: [], scripts or ALL, unread=(unread,) if unread else ())


def _dropout(text: str) -> list[str]:
    return ["--hidden-dropout", text, "--attention-dropout", text]


def _profile_steps(text: str) -> list[str]:
    first, comma, last = text.partition(",")
    if not comma:
        raise WrongValueError("must be two iterations, such as 3,4")
    return ["--profile-step-start", str(whole_number(first, 1)), "--profile-step-end", str(whole_number(last, 1) + 1)]


def _profile(last_step: int) -> Translate:
    def translate(text: str) -> list[str]:
        if text == "hltv":
            raise WrongValueError("needs Habana's trace viewer, which is not part of this project; use pt")
        if text not in ("pt", "pt-full"):
            raise WrongValueError("must be pt or pt-full")
        full = ["--pytorch-profiler-collect-shapes", "true", "--pytorch-profiler-collect-callstack", "true"]
        return ["--profile", "true", *_profile_steps(f"3,{last_step}"), *(full if text == "pt-full" else [])]

    return translate


def _profile_ranks(text: str) -> list[str]:
    return ["--profile-ranks", *(str(whole_number(rank)) for rank in text.split())]


def _rampup(text: str) -> list[str]:
    return ["--rampup-batch-size", "16", "16", "5000000"] if is_on(text) else ["--rampup-batch-size", "none"]


def _no_compile(text: str) -> list[str]:
    return ["--torch-compile", "false"] if is_on(text) else []


def _tokenizer(text: str) -> list[str]:
    if text == "Llama3Tokenizer":  # of Meta's package `llama`: a tiktoken rank file
        return ["--tokenizer-type", "TikTokenizer", "--tiktoken-pattern", "llama3"]
    if text not in TOKENIZERS:
        raise WrongValueError(f"must be {one_of((*TOKENIZERS, 'Llama3Tokenizer'))}")
    return ["--tokenizer-type", text]


TOKENIZERS: tuple[str, ...] = get_args(get_args(get_type_hints(DataConfig)["tokenizer_type"])[0])

_VARIABLES: tuple[Variable, ...] = (
    # what is trained
    _launch("HL_CONFIG", "preset (megatron/presets/), or a YAML file, instead of the script's own"),
    _launch("HL_LLAMA_VER", "generation of Llama: 1, 2, 3.1 or 3.2", "llama"),
    _launch("HL_LLAMA_MODEL_SIZE", "billions of parameters: 7, 13, 65 | 7, 13, 34, 70 | 8, 70, 405 | 1, 3", "llama"),
    _launch("HL_MODEL", "the model to fine-tune: a folder that transformers wrote", *FINE_TUNING),
    _launch(
        "HL_CHAT_TEMPLATE", "chat template: a preset, or a .jinja or .py file; unset: the tokenizer's own", *FINE_TUNING
    ),
    _launch("HL_TRAIN_ON", "trained tokens of the chats: assistant (its turns), all_but_system, or all", "sft"),
    _launch("HL_TOO_LONG", "chats of more than HL_SEQ_LEN tokens: drop, truncate (keep the beginning) or split", "sft"),
    _launch("HL_IGNORE_COLUMNS", "columns of the rows that are left out", *FINE_TUNING),
    _number("HL_NUM_LAYERS", "--num-layers", "transformer layers", scripts=PRETRAINING),
    _number("HL_HIDDEN_SIZE", "--hidden-size", "width of the residual stream", scripts=PRETRAINING),
    _number("HL_FFN_HIDDEN_SIZE", "--ffn-hidden-size", "intermediate width of the MLP", scripts=PRETRAINING),
    _number("HL_NUM_HEADS", "--num-attention-heads", "query heads", scripts=PRETRAINING),
    _number("HL_NUM_QUERY_GROUPS", "--num-query-groups", "key and value heads", scripts=PRETRAINING),
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
    Variable(
        "HL_DROPOUT",
        "hidden and attention dropout",
        _dropout,
        flags=("--hidden-dropout", "--attention-dropout"),
    ),
    # layout
    _launch("HL_NUM_NODES", "nodes", unread="nodes"),
    _launch("HL_NGPU_PER_NODE", "devices on each node", unread="devices_per_node"),
    _launch("HL_DEVICES_PER_NODE", "the same, by its later name", unread="devices_per_node"),
    _launch(
        "HL_DP", "data-parallel size; HL_DP x HL_TP x HL_PP must equal nodes x devices", unread="data_parallel_size"
    ),
    _number("HL_TP", "--tensor-model-parallel-size", "tensor-parallel size"),
    _number("HL_PP", "--pipeline-model-parallel-size", "pipeline stages"),
    _switch("HL_SEQ_PARALLEL", "--sequence-parallel", "sequence parallelism between the tensor-parallel regions"),
    _number("HL_ZERO_STAGE", "--zero-stage", "ZeRO stage, 0 to 3; 2 and 3 run without a pipeline", 0),
    _switch("HL_NO_PIPELINE_PARALLEL", "--no-pipeline-parallel", "1: the sequential engine instead of the pipeline"),
    _launch("HL_HOSTSFILE", "DeepSpeed hostfile: one `<host> slots=<n>` a line", unread="hostsfile"),
    _launch(
        "HL_RENDEZVOUS",
        "HOST:PORT of the first node, where this script is started on each node by itself",
        unread="rendezvous",
    ),
    _launch("HL_LAUNCHER_TYPE", "what starts an agent on each host: pdsh or mpirun"),
    _launch("HL_PE", "cores that each rank is bound to"),
    _launch("HL_PPR", "with HL_PE: ranks on each socket"),
    # restarts
    _launch("HL_MAX_RESTARTS", "how often a run whose ranks failed goes on from its newest checkpoint; 0: never"),
    _launch("HL_MIN_NODES", "nodes that the run goes on with, when others are lost"),
    _launch("HL_SPARE_HOSTS", "last hosts of the hostsfile, which replace hosts that are lost or fail twice; 0: none"),
    # batch and length
    _number("HL_MICRO_BATCH", "--micro-batch-size", "samples in one forward pass of a rank"),
    _number("HL_GBS", "--global-batch-size", "samples in one optimizer step"),
    _number(
        "HL_MAX_BATCH_LEN",
        "--max-batch-len",
        "tokens in a microbatch, into which samples are packed",
        scripts=FINE_TUNING,
    ),
    _number("HL_NUM_EPOCHS", "--num-epochs", "times to go through the data", scripts=FINE_TUNING),
    _text("HL_LR", "--lr", "peak learning rate", FINE_TUNING),
    _text("HL_NEFTUNE_NOISE_ALPHA", "--neftune-noise-alpha", "size of NEFTune's noise; unset: none", FINE_TUNING),
    # preferences
    _text(
        "HL_PREFERENCE_LOSS",
        "--preference-loss",
        "objective: sigmoid (DPO), ipo, simpo, kto or another of docs/guides/preference.md",
        DPO,
    ),
    _text("HL_BETA", "--beta", "strength of the preference term; of DPO, how close to the reference", DPO),
    _text("HL_REFERENCE", "--reference", "the reference: adapters_off or stored; unset: what fits the model", DPO),
    _number("HL_MAX_PROMPT_LEN", "--max-prompt-length", "last tokens of a prompt that are kept", scripts=DPO),
    # adapters
    _text("HL_LORA_RANK", "--lora-rank", "rank of LoRA adapters, over the frozen model; unset: none, in run_dpo.sh 8"),
    _text("HL_LORA_ALPHA", "--lora-alpha", "their output is multiplied by this / rank"),
    _text("HL_LORA_DROPOUT", "--lora-dropout", "dropout of their input"),
    _words("HL_LORA_TARGET_MODULES", "--lora-target-modules", "modules with adapters: q_proj v_proj, or all-linear"),
    _words("HL_LORA_MODULES_TO_SAVE", "--lora-modules-to-save", "modules to train whole: embed_tokens lm_head"),
    _choice(
        "HL_QUANTIZE_BASE",
        {name: ["--quantize-base", name] for name in ("none", "nf4")},
        "nf4: hold the frozen model in 4 bits (QLoRA); or none",
        flag="--quantize-base",
    ),
    Variable(
        "HL_RAMPUP_BS",
        "1: grow the global batch from 16 by 16 over 5,000,000 samples",
        _rampup,
        PRETRAINING,
        ("--rampup-batch-size",),
    ),
    _number("HL_TRAIN_ITERS", "--train-iters", "steps to train for, instead of the preset's length"),
    _number(
        "HL_EXIT_INTERVAL", "--exit-interval", "save and exit when the iteration is a multiple of this; 0: never", 0
    ),
    _switch(
        "HL_UNIV_CP", "--universal-checkpoint", "1: the folder resumed from holds a universal checkpoint of DeepSpeed's"
    ),
    Variable(
        "HL_CHECKPOINT_LOAD_TAG",
        "the checkpoint to resume from, such as global_step100",
        _load_tag,
        flags=("--ckpt-step",),
    ),
    _text("HL_LOAD_DIR", "--load", "folder to resume from, where it is not the one that is saved to"),
    _switch("HL_NO_LOAD_OPTIM", "--no-load-optim", "1: start with a new optimizer state"),
    _switch("HL_NO_LOAD_RNG", "--no-load-rng", "1: seed dropout with this run's seed instead of the checkpoint's"),
    _switch(
        "HL_OVERRIDE_OPT_PARAM_SCHEDULER",
        "--override-opt-param-scheduler",
        "1: resume with this command's learning rates and weight decay",
    ),
    _switch(
        "HL_USE_CKPT_OPT_PARAM_SCHEDULER",
        "--use-checkpoint-opt-param-scheduler",
        "1: resume with the checkpoint's",
    ),
    _switch("HL_SKIP_TRAIN", "--skip-train", "1: evaluate the checkpoint and exit"),
    _switch("HL_VERIFY_CP", "--verify-checkpoint", "1: compare all copies before each save"),
    _switch("HL_VERIFY_CKPT", "--verify-checkpoint", "the same, by its later name"),
    _text("HL_KILL_SWITCH", "--kill-switch-path", "when this file appears, all ranks save and exit together"),
    _text("HL_KILL_SWITCH_FILE", "--kill-switch-path", "the same, by its later name"),
    # optimizer, memory, speed
    _choice(
        "HL_OPTIMIZER",
        {name: ["--optimizer", name] for name in OPTIMIZERS},
        one_of(tuple(OPTIMIZERS)),
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
    Variable(
        "HL_USE_FUSED_SDPA",
        "0: torch's attention instead of Habana's FusedSDPA on HPU",
        lambda text: ["--attention-backend", "auto" if is_on(text) else "sdpa"],
        flags=("--attention-backend",),
    ),
    _switch(
        "HL_USE_FUSED_SDPA_WITH_RECOMPUTE",
        "--fused-sdpa-recompute",
        "0: FusedSDPA stores the attention probabilities for the backward pass, HPU only",
    ),
    _switch("HL_USE_FAST_SOFTMAX", "--use-fast-softmax", "FusedSDPA's fast softmax, HPU only"),
    _switch("HL_USE_FUSED_RMSNORM", "--use-fused-rmsnorm", "Habana's fused RMSNorm, HPU only"),
    _switch("HL_USE_TORCH_COMPILE", "--torch-compile", "compile each layer with torch.compile; not in lazy mode"),
    Variable("HL_TORCH_COMPILE_DISABLE", "1: compile nothing", _no_compile, flags=("--torch-compile",)),
    _launch("HL_USE_LAZY_MODE", "HPU: lazy mode (PT_HPU_LAZY_MODE)"),
    _switch("HL_BF16", "--bf16", "0: train in float32"),
    # matrix products in fp8, HPU only
    _launch("HL_FP8", "1: matrix products of the layers in fp8, HPU only"),
    _launch("HL_USE_TRANSFORMER_ENGINE", "the same, by its earlier name"),
    _launch("HL_TRANSFORMER_IMPL", "transformer_engine; or local, which has no fp8"),
    _launch("HL_FP8_FORMAT", f"with HL_FP8=1: {one_of(FORMATS)}"),
    _number("HL_FP8_MARGIN", "--fp8-margin", "scales are smaller by 2 to this power than the largest that fits", 0),
    _number("HL_FP8_MEASURE_INTERVAL", "--fp8-interval", "microbatches between two updates of the scales"),
    _number("HL_FP8_AMAX_HISTORY_LEN", "--fp8-amax-history-len", "microbatches whose largest values are kept"),
    _algorithm("HL_FP8_AMAX_COMPUTE_ALGO", "value of that history that the scale follows: max or most_recent"),
    _algorithm("HL_FP8_AMAX_RECOMPUTE_ALGO", "the same, by its earlier name"),
    _switch("HL_FP8_AMAX_REDUCE", "--fp8-amax-reduce", "1: one scale for all ranks of a stage"),
    Variable(
        "HL_FP8_COVERAGE",
        "products in fp8: mlp_row_parallel=True or False, and attention=False",
        coverage,
        flags=("--fp8-mlp-row-parallel",),
    ),
    _switch("HL_FP8_SMOOTH_SWIGLU", "--fp8-smooth-swiglu", "1: scale the second product of SwiGLU by channels"),
    _switch("HL_CACHE_FP8_WEIGHT", "--cache-fp8-weight", "1: keep the fp8 weights for the backward pass"),
    _switch("HL_USE_CACHE_FP8_WEIGHT", "--cache-fp8-weight", "the same, by its earlier name"),
    _switch("HL_CACHE_FP8_WEIGHT_FWD", "--cache-fp8-weight-fwd", "1: convert weights once a global batch"),
    _switch("HL_USE_CACHE_FP8_WEIGHT_FWD", "--cache-fp8-weight-fwd", "the same, by its earlier name"),
    _launch("HL_FP8_ENFORCE_BF16_AMAX_REDUCTION", "with HL_FP8=1: PT_TE_ENFORCE_BF16_AMAX_REDUCTION; unset: 1"),
    _launch("HL_TE_LIMIT_GRAPH_SIZE", "with HL_FP8=1: PT_TE_LIMIT_GRAPH_SIZE; unset: 0"),
    _switch("HL_DETERMINISTIC_MODE", "--deterministic", "1: deterministic algorithms of torch and of the HPU"),
    _choice(
        "HL_USE_DISTRIBUTED_OPTIMIZER",
        {"0": ["--zero-stage", "0"], "1": ["--zero-stage", "1"]},
        "1: shard the optimizer's state over data-parallel ranks; bf16 always does",
        flag="--zero-stage",
    ),
    _number("HL_NUM_WORKERS", "--num-workers", "threads of a rank that read data ahead; 0: none", 0),
    _choice(
        "HL_BUCKETING",
        {name: ["--bucketing", name] for name in ("auto", "off", "octave", "optimal")},
        "lengths that rows are padded to: auto, off, octave or optimal",
        flag="--bucketing",
        scripts=FINE_TUNING,
    ),
    # device
    _launch("HL_DEVICE", "hpu, cuda or cpu; unset: the first of them that is there", unread="device"),
    _launch("HL_USE_HPU", "1: hpu; 0: not hpu. Unset: what is there", unread="device"),
    _launch("HL_ENV_FLAGS", "variables for the ranks on every node: NAME=VALUE,NAME=VALUE"),
    _launch("HL_HNIC", "1: Gaudi nodes communicate through the hosts' network cards"),
    _launch("HL_HCCL_OVER_OFI", "with HL_HNIC=1: HCCL_OVER_OFI"),
    _launch("HL_HCCL_GAUDI_DIRECT", "with HL_HNIC=1: HCCL_GAUDI_DIRECT"),
    _launch("HL_FI_PROVIDER", "with HL_HNIC=1: FI_PROVIDER"),
    _launch("HL_QNPU_DIR", "folder of an environment whose `activate` is sourced first, on every node"),
    # data
    _launch(
        "HL_DATA",
        "training data: a file of chats, for run_dpo.sh of pairs of answers; several files, or WEIGHT FILE pairs, "
        "are mixed",
        *FINE_TUNING,
    ),
    _launch("HL_DATA_OUTPUT_DIR", "folder of the tokenized data; unset: data/ in the results folder", *FINE_TUNING),
    _launch("HL_DATA_DIR_ROOT", "folder of the dataset and of the tokenizer's files", *PRETRAINING),
    _launch("HL_DATA_FILE_PREFIX", "the dataset in that folder: PREFIX.bin and PREFIX.idx", *PRETRAINING),
    _launch("HL_DATA_IDX_DIR", "folder for the index arrays"),
    _launch("HL_DATA_CACHE_DIR", "the same, by its later name"),
    Variable(
        "HL_TOKENIZER_TYPE",
        "a name that --tokenizer-type takes, or Llama3Tokenizer",
        _tokenizer,
        PRETRAINING,
        ("--tokenizer-type",),
    ),
    _text("HL_TOKENIZER_MODEL", "--tokenizer-model", "the tokenizer's file", PRETRAINING),
    _number("HL_EVAL_ITERS", "--eval-iters", "global batches in one validation; 0: none", 0),
    _number("HL_EVAL_INTERVAL", "--eval-interval", "steps between two validations"),
    # results
    _launch("HL_RESULTS_DIR", "folder of the run; unset: a new one, named after the run, in HL_RESULTS_DIR_PREFIX/out"),
    _launch("HL_RESULTS_DIR_PREFIX", "parent of that `out`"),
    _launch("HL_CHECKPOINTS_DIR", "folder to save to and to resume from; unset: checkpoints/ in the results folder"),
    _text("HL_TENSORBOARD_DIR", "--tensorboard-dir", "TensorBoard events; unset: tensorboard/ in the results folder"),
    _launch("HL_SAVE", "1: save checkpoints"),
    _number("HL_SAVE_INTERVAL", "--save-interval", "steps between two checkpoints"),
    _text("HL_SAVE_HF", "--save-hf", "folder of the exports; unset: hf_format/ in the results folder", FINE_TUNING),
    _number(
        "HL_SAVE_SAMPLES", "--save-samples", "samples between two exports, beside each epoch's", scripts=FINE_TUNING
    ),
    _text("HL_GENERATE_PROMPTS", "--generate-prompts", "file of prompts that the model answers while it trains"),
    _number("HL_GENERATE_INTERVAL", "--generate-interval", "steps between two generations; unset: each validation"),
    _words("HL_LM_EVAL_TASKS", "--lm-eval-tasks", "tasks of lm-eval that measure the model while it trains"),
    _number("HL_LM_EVAL_INTERVAL", "--lm-eval-interval", "steps between two of them; unset: each validation"),
    _switch("HL_KEEP_BEST", "--keep-best", "1: keep, and export to `best`, the checkpoint of the best validation"),
    _number(
        "HL_EARLY_STOPPING_PATIENCE",
        "--early-stopping-patience",
        "end after so many validations in a row without an improvement",
    ),
    _number("HL_LOG_INTERVAL", "--log-interval", "steps between two log lines"),
    Variable(
        "HL_PROFILE",
        "pt: a torch.profiler trace; pt-full: with shapes, Python stacks and memory",
        _profile(4),
        flags=("--profile",),
    ),
    Variable(
        "HL_PROFILE_TYPE",
        "the same, by its later name; by default of iteration 3 alone",
        _profile(3),
        flags=("--profile",),
    ),
    Variable(
        "HL_PROFILE_STEPS",
        "first and last iteration of the trace: 3,4",
        _profile_steps,
        flags=("--profile-step-start", "--profile-step-end"),
    ),
    _number("HL_PROFILE_STEP_START", "--profile-step-start", "first iteration of the trace"),
    _number("HL_PROFILE_STEP_END", "--profile-step-end", "iteration before which the trace ends"),
    Variable("HL_PROFILE_RANKS", "ranks that write a trace: 0 1 4", _profile_ranks, flags=("--profile-ranks",)),
    _launch("HL_DRY_RUN", "1: print the plan and start nothing"),
    # text
    _text("HL_PROMPTS", "--input", "file of prompts: .jsonl, or a prompt a line", GENERATE),
    _text("HL_OUTPUT", "--output", "file for the texts (JSONL) or results (JSON); unset: the terminal", INFERENCE),
    _number("HL_BATCH_SIZE", "--batch-size", "texts that each copy of the model generates at once", scripts=INFERENCE),
    _number("HL_MAX_NEW_TOKENS", "--max-new-tokens", "largest number of tokens of a text", scripts=GENERATE),
    # evaluation
    _words("HL_TASKS", "--tasks", "tasks of lm-eval: YAML files or names", EVALUATE),
    _words("HL_TASK_PATH", "--task-path", "folders with YAML files of tasks", EVALUATE),
    _words("HL_DATASETS", "--dataset", "prefixes of indexed datasets, of which to report the loss", EVALUATE),
    _number("HL_NUM_FEWSHOT", "--num-fewshot", "examples in each prompt of a task", 0, EVALUATE),
)

OF_INFERENCE = frozenset(
    (
        *("HL_MODEL", "HL_CHAT_TEMPLATE", "HL_CHECKPOINT_LOAD_TAG", "HL_QUANTIZE_BASE", "HL_BF16"),
        *("HL_TOKENIZER_TYPE", "HL_TOKENIZER_MODEL", "HL_NUM_NODES", "HL_NGPU_PER_NODE", "HL_DEVICES_PER_NODE"),
        *("HL_DP", "HL_TP", "HL_PP", "HL_HOSTSFILE", "HL_RENDEZVOUS", "HL_DEVICE", "HL_USE_HPU", "HL_ENV_FLAGS"),
        *("HL_HNIC", "HL_HCCL_OVER_OFI", "HL_HCCL_GAUDI_DIRECT", "HL_FI_PROVIDER", "HL_QNPU_DIR", "HL_DRY_RUN"),
    )
)
"""Variables of training that mean the same for scripts/generate.sh and scripts/evaluate.sh."""
VARIABLES = tuple(
    replace(variable, scripts=(*variable.scripts, *INFERENCE)) if variable.name in OF_INFERENCE else variable
    for variable in _VARIABLES
)


def path_of(script: Script) -> str:
    """Return the path of a script in the repository."""
    return f"scripts/{script}.sh" if script in INFERENCE else f"scripts/run_{script}.sh"


LLAMA_PRESETS: dict[str, dict[str, str]] = {
    "1": {size: f"llama1_{size}b" for size in ("7", "13", "65")},
    "2": {size: f"llama2_{size}b" for size in ("7", "13", "34", "70")},
    "3.1": {size: f"llama31_{size}b" for size in ("8", "70", "405")},
    "3.2": {size: f"llama32_{size}b" for size in ("1", "3")},
}
