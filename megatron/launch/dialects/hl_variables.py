"""The HL_* variables of the scripts: meaning, and what each sets.

A variable sets flags of the command (`--lr`), fields of the launch request (`nodes`), or what hl_requests.py joins with
others (`data_root`). Defaults that are not in a preset are in the scripts. A value that cannot be used is a fault, an
empty one counts as unset. Variables of Habana's scripts that are not supported are in hl_refused.tsv.
"""

# Long: a row for each variable.
from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, cast, get_args, get_type_hints

from megatron.generation.options import OF_TRAINING
from megatron.options.data import DataConfig
from megatron.options.dialect import Entry, Outcome, Setting, WrongValueError, one_in, one_of, sets, whole
from megatron.options.optimizer import OPTIMIZERS
from megatron.options.types import TooLong, TrainOn
from megatron.runtime.devices import device_fault

Script = Literal["bloom13b", "llama", "mixtral", "sft", "dpo", "generate", "evaluate"]
ALL: tuple[Script, ...] = ("bloom13b", "llama", "mixtral", "sft", "dpo")
"""The scripts that train."""
GENERATE: tuple[Script, ...] = ("generate",)
EVALUATE: tuple[Script, ...] = ("evaluate",)
INFERENCE = (*GENERATE, *EVALUATE)
PRETRAINING: tuple[Script, ...] = ("bloom13b", "llama", "mixtral")
FINE_TUNING: tuple[Script, ...] = ("sft", "dpo")
EXPERTS: tuple[Script, ...] = ("mixtral", *FINE_TUNING)
DPO: tuple[Script, ...] = ("dpo",)


def is_on(text: str) -> bool:
    """Convert a switch. Raises WrongValueError."""
    if text.lower() not in ("0", "1", "false", "true"):
        raise WrongValueError("must be 0 or 1")
    return text.lower() in ("1", "true")


def split(text: str) -> list[str]:
    """Convert words between spaces or commas."""
    return text.replace(",", " ").split()


def _number(name: str, target: str, text: str, at_least: int = 1, scripts: tuple[Script, ...] = ALL) -> Entry:
    return sets(name, target, text, whole(at_least), scripts)


def _text(name: str, target: str, text: str, scripts: tuple[Script, ...] = ALL) -> Entry:
    return sets(name, target, text, scripts=scripts)


def _words(name: str, target: str, text: str, scripts: tuple[Script, ...] = ALL) -> Entry:
    return sets(name, target, text, split, scripts)


def _switch(
    name: str, target: str, text: str, on: Any = True, off: Any = False, scripts: tuple[Script, ...] = ALL
) -> Entry:
    return sets(name, target, text, lambda value: on if is_on(value) else off, scripts)


def _one_in(name: str, target: str, choices: Sequence[str], text: str, scripts: tuple[Script, ...] = ALL) -> Entry:
    return sets(name, target, text, one_in(choices), scripts)


DEVICE = "hpu, cuda, cpu, or your own as package.module:RECORD"


def _device_name(text: str) -> str:
    if fault := device_fault(text):
        raise WrongValueError(f"{fault}; unset it for the first of hpu, cuda and cpu that is there")
    return text


def _choice(
    name: str, target: str, choices: Mapping[str, Any], text: str, hint: str = "", scripts: tuple[Script, ...] = ALL
) -> Entry:
    """Return a row whose values have other names here."""
    check = one_in(choices, hint)
    return sets(name, target, text, lambda value: choices[check(value)], scripts)


def _row(
    name: str,
    targets: tuple[str, ...],
    text: str,
    convert: Callable[[str], list[Setting]],
    scripts: tuple[Script, ...] = ALL,
) -> Entry:
    """Return a row that sets several names."""
    return Entry(name, "sets", text, convert, targets, scripts=scripts)


def _load_tag(text: str) -> str:
    step = text.removeprefix("global_step")
    if step == text or not step.isdigit():
        raise WrongValueError("must be global_step and a number, as checkpoints are named")
    return step


def _quoted_words(text: str) -> tuple[str, ...]:
    """Return names between spaces or commas, those with spaces in quotes."""
    try:
        return tuple(shlex.split(text.replace(",", " ")))
    except ValueError as error:
        raise WrongValueError(f"cannot be read ({error}); put a name with spaces in quotes") from None


def _profile_steps(text: str) -> list[Setting]:
    first, comma, last = text.partition(",")
    if not comma:
        raise WrongValueError("must be two iterations, such as 3,4")
    number = whole(1)
    # Habana's last iteration is in the trace; ours is the one before which it ends
    return [("--profile-step-start", number(first)), ("--profile-step-end", number(last) + 1)]


def _profile(last_step: int) -> Callable[[str], list[Setting]]:
    def convert(text: str) -> list[Setting]:
        if text == "hltv":
            raise WrongValueError("needs Habana's trace viewer, which is not part of this project; use pt")
        if text not in ("pt", "pt-full"):
            raise WrongValueError("must be pt or pt-full")
        # HL_PROFILE_STEPS stands below in the table, and so overrides these
        settings = [("--profile", True), *_profile_steps(f"3,{last_step}")]
        if text == "pt-full":
            settings += [("--pytorch-profiler-collect-shapes", True), ("--pytorch-profiler-collect-callstack", True)]
        return settings

    return convert


def _coverage(text: str) -> bool:
    """Convert HL_FP8_COVERAGE, `mlp_row_parallel=True attention=False`."""
    parts = dict(word.partition("=")[::2] for word in text.split())
    if not parts or set(parts) - {"mlp_row_parallel", "attention"}:
        raise WrongValueError('must be such as "mlp_row_parallel=True attention=False"')
    if is_on(parts.get("attention", "0")):
        raise WrongValueError("is not supported: the attention itself stays in bf16; set attention=False")
    return is_on(parts.get("mlp_row_parallel", "1"))


def _recomputed(text: str) -> list[Setting]:
    granularities = {"0": "none", "1": "full", "2": "selective", "3": "selective"}
    number = one_in(granularities, " (4 is 1 by another engine)")(text)
    settings: list[Setting] = [("--recompute-granularity", granularities[number])]
    # Megatron's name of an MLP; Habana's Megatron-LM calls one with experts moe
    return [*settings, ("--recompute-modules", ["mlp"])] if number == "3" else settings


def _prompt_limit(text: str) -> str | int:
    if text in ("half", "none"):
        return text
    try:
        return whole(1)(text)
    except WrongValueError as why:
        raise WrongValueError(f"{why}, or half or none") from None


def _tokenizer(text: str) -> list[Setting]:
    if text == "Llama3Tokenizer":  # of Meta's package `llama`: a tiktoken rank file
        return [("--tokenizer-type", "TikTokenizer"), ("--tiktoken-pattern", "llama3")]
    return [("--tokenizer-type", one_in((*TOKENIZERS, "Llama3Tokenizer"))(text))]


# the type is Literal[...] | None, whose first member has the names
TOKENIZERS: tuple[str, ...] = get_args(get_args(get_type_hints(DataConfig)["tokenizer_type"])[0])
# the first counts where HL_FP8=1 names none
FP8_FORMATS = ("hybrid", "e5m2")

LLAMA_PRESETS: dict[str, dict[str, str]] = {
    "1": {size: f"llama1_{size}b" for size in ("7", "13", "65")},
    "2": {size: f"llama2_{size}b" for size in ("7", "13", "34", "70")},
    "3.1": {size: f"llama31_{size}b" for size in ("8", "70", "405")},
    "3.2": {size: f"llama32_{size}b" for size in ("1", "3")},
}
# run_mixtral.sh sets the sizes of small
MIXTRAL_PRESETS = {"8x7b": "mixtral_8x7b", "8x22b": "mixtral_8x22b", "small": "mixtral_8x7b"}

# In the order in which they count: a later one overrides what an earlier one implies. Earlier and later releases of
# Habana's scripts name some differently: both names are here, and two values that differ are a fault.
_VARIABLES: tuple[Entry, ...] = (
    # what is trained
    _text("HL_CONFIG", "config", "preset (megatron/presets/), or a YAML file, instead of the script's own"),
    _text("HL_LLAMA_VER", "llama_version", "generation of Llama: 1, 2, 3.1 or 3.2", ("llama",)),
    _text(
        "HL_LLAMA_MODEL_SIZE",
        "llama_size",
        "billions of parameters: 7, 13, 65 | 7, 13, 34, 70 | 8, 70, 405 | 1, 3",
        ("llama",),
    ),
    _one_in("HL_MIXTRAL_MODEL", "mixtral_model", tuple(MIXTRAL_PRESETS), one_of(MIXTRAL_PRESETS), scripts=("mixtral",)),
    _text("HL_MODEL", "model", "the model to fine-tune: a folder that transformers wrote", FINE_TUNING),
    _text(
        "HL_CHAT_TEMPLATE",
        "chat_template",
        "chat template: a preset, or a .jinja or .py file; unset: the tokenizer's own",
        FINE_TUNING,
    ),
    _one_in(
        "HL_TRAIN_ON",
        "train_on",
        get_args(TrainOn),
        "trained tokens of the chats: assistant (its turns), all_but_system, or all",
        scripts=("sft",),
    ),
    _one_in(
        "HL_TOO_LONG",
        "too_long",
        get_args(TooLong),
        "chats of more than HL_SEQ_LEN tokens: drop, truncate (keep the beginning) or split",
        scripts=("sft",),
    ),
    sets("HL_IGNORE_COLUMNS", "ignore_columns", "columns of the rows that are left out", _quoted_words, FINE_TUNING),
    _switch("HL_BF16", "--bf16", "0: train in float32"),
    _number("HL_NUM_LAYERS", "--num-layers", "transformer layers", scripts=PRETRAINING),
    _number("HL_HIDDEN_SIZE", "--hidden-size", "width of the residual stream", scripts=PRETRAINING),
    _number("HL_FFN_HIDDEN_SIZE", "--ffn-hidden-size", "intermediate width of the MLP", scripts=PRETRAINING),
    _number("HL_NUM_HEADS", "--num-attention-heads", "query heads", scripts=PRETRAINING),
    _number("HL_NUM_QUERY_GROUPS", "--num-query-groups", "key and value heads", scripts=PRETRAINING),
    _number("HL_SEQ_LEN", "--seq-length", "tokens in a sample"),
    _choice(
        "HL_POSITION_EMBEDDING_TYPE",
        "--position-embedding-type",
        {"learned": "learned", "alibi": "alibi", "rotary": "rope"},
        "how a token knows its place: learned, alibi or rotary",
        scripts=PRETRAINING,
    ),
    _number("HL_MOE_NUM_EXPERTS", "--num-experts", "experts of a layer", scripts=("mixtral",)),
    _number("HL_MOE_TOPK", "--moe-router-topk", "experts that each token passes through", scripts=("mixtral",)),
    _switch(
        "HL_MOE_ROUTER_PRE_SOFTMAX",
        "--moe-router-pre-softmax",
        "1: weights of a token's experts are their scores among all; 0: they add up to 1",
        scripts=("mixtral",),
    ),
    _text(
        "HL_MOE_AUX_LOSS_COEFF", "--moe-aux-loss-coeff", "coefficient of the router's balancing loss; 0: none", EXPERTS
    ),
    _text("HL_AUX_LOSS_COEFF", "--moe-aux-loss-coeff", "the same, by its later name", EXPERTS),
    _text("HL_MOE_ZLOSS_COEFF", "--moe-z-loss-coeff", "coefficient of the router's z-loss", EXPERTS),
    _text(
        "HL_MOE_EXPERT_CAPACITY_FACTOR",
        "--moe-expert-capacity-factor",
        "an expert takes so many times its even share of a sequence; others pass it by. Unset: it takes all",
        EXPERTS,
    ),
    _row(
        "HL_MOE_DYNAMIC",
        ("--moe-expert-capacity-factor",),
        "1: experts take all their tokens, as without a capacity factor",
        lambda text: [("--moe-expert-capacity-factor", "none")] if is_on(text) else [],
        EXPERTS,
    ),
    _row(
        "HL_DROPOUT",
        ("--hidden-dropout", "--attention-dropout"),
        "hidden and attention dropout",
        lambda text: [("--hidden-dropout", text), ("--attention-dropout", text)],
    ),
    # layout
    _number("HL_NUM_NODES", "nodes", "nodes"),
    _number("HL_NGPU_PER_NODE", "devices_per_node", "devices on each node"),
    _number("HL_DEVICES_PER_NODE", "devices_per_node", "the same, by its later name"),
    _number(
        "HL_DP",
        "data_parallel_size",
        "data-parallel size; HL_DP x HL_TP x HL_CP x HL_PP must equal nodes x devices",
    ),
    _number("HL_TP", "--tensor-model-parallel-size", "tensor-parallel size"),
    _number("HL_CP", "--context-parallel-size", "context-parallel size: ranks that share each row of tokens"),
    _choice(
        "HL_CP_COMM_TYPE",
        "--context-parallel-exchange",
        {"p2p": "ring", "a2a": "all-to-all"},
        "exchange between these ranks: p2p (keys and values in a ring) or a2a (heads)",
        "; all layers exchange alike, and no rank gathers whole rows",
    ),
    _number("HL_PP", "--pipeline-model-parallel-size", "pipeline stages"),
    _number("HL_MOE_EP", "--expert-model-parallel-size", "ranks that hold different experts", scripts=EXPERTS),
    _number("HL_EP", "--expert-model-parallel-size", "the same, by its later name", scripts=EXPERTS),
    _row(
        "HL_ETP",
        ("--expert-tensor-parallel-size",),
        "ranks that share each expert: 1, or 0 for HL_TP",
        lambda text: [("--expert-tensor-parallel-size", whole(0)(text) or "none")],
        EXPERTS,
    ),
    _row(
        "HL_MOE_ENABLE_EXPERT_TP",
        ("--expert-tensor-parallel-size",),
        "1: HL_TP ranks share each expert; 0: each is whole on its rank",
        lambda text: [("--expert-tensor-parallel-size", "none" if is_on(text) else 1)],
        EXPERTS,
    ),
    _switch("HL_SEQ_PARALLEL", "--sequence-parallel", "sequence parallelism between the tensor-parallel regions"),
    _number("HL_ZERO_STAGE", "--zero-stage", "ZeRO stage, 0 to 3; 2 and 3 run without a pipeline", 0),
    _switch("HL_NO_PIPELINE_PARALLEL", "--no-pipeline-parallel", "1: the sequential engine instead of the pipeline"),
    _text("HL_HOSTSFILE", "hostsfile", "DeepSpeed hostfile: one `<host> slots=<n>` a line"),
    _text(
        "HL_RENDEZVOUS",
        "rendezvous",
        "HOST:PORT of the first node, where this script is started on each node by itself",
    ),
    _text("HL_LAUNCHER_TYPE", "launcher", "what starts an agent on each host: pdsh or mpirun"),
    _number("HL_PE", "cores_per_rank", "cores that each rank is bound to; 0: ranks are not bound", 0),
    _number("HL_PPR", "ranks_per_socket", "with HL_PE: ranks on each socket; 0: as many on each", 0),
    # restarts
    _number(
        "HL_MAX_RESTARTS",
        "max_restarts",
        "how often a run whose ranks failed goes on from its newest checkpoint; 0: never",
        0,
    ),
    _number("HL_MIN_NODES", "min_nodes", "nodes that the run goes on with, when others are lost"),
    _number(
        "HL_SPARE_HOSTS",
        "spare_hosts",
        "last hosts of the hostsfile, which replace hosts that are lost or fail twice; 0: none",
        0,
    ),
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
    sets(
        "HL_MAX_PROMPT_LEN",
        "--max-prompt-length",
        "last tokens of a prompt that are kept: a number, half (of HL_SEQ_LEN + 1) or none (no limit)",
        _prompt_limit,
        DPO,
    ),
    # adapters
    _text("HL_LORA_RANK", "--lora-rank", "rank of LoRA adapters, over the frozen model; unset: none, in run_dpo.sh 8"),
    _text("HL_LORA_ALPHA", "--lora-alpha", "their output is multiplied by this / rank"),
    _text("HL_LORA_DROPOUT", "--lora-dropout", "dropout of their input"),
    _words("HL_LORA_TARGET_MODULES", "--lora-target-modules", "modules with adapters: q_proj v_proj, or all-linear"),
    _words("HL_LORA_MODULES_TO_SAVE", "--lora-modules-to-save", "modules to train whole: embed_tokens lm_head"),
    _one_in(
        "HL_QUANTIZE_BASE",
        "--quantize-base",
        ("none", "nf4"),
        "nf4: hold the frozen model in 4 bits (QLoRA); or none",
    ),
    _switch(
        "HL_RAMPUP_BS",
        "--rampup-batch-size",
        "1: grow the global batch from 16 by 16 over 5,000,000 samples",
        # start, increment and samples of Habana's run_bloom13b.sh
        on=("16", "16", "5000000"),
        off="none",
        scripts=PRETRAINING,
    ),
    _number("HL_TRAIN_ITERS", "--train-iters", "steps to train for, instead of the preset's length"),
    _number("HL_LR_WARMUP_ITERS", "--lr-warmup-iters", "steps of the learning rate's warm-up", 0, PRETRAINING),
    _number(
        "HL_EXIT_INTERVAL", "--exit-interval", "save and exit when the iteration is a multiple of this; 0: never", 0
    ),
    _switch(
        "HL_UNIV_CP", "--universal-checkpoint", "1: the folder resumed from holds a universal checkpoint of DeepSpeed's"
    ),
    sets(
        "HL_CHECKPOINT_LOAD_TAG", "--ckpt-step", "the checkpoint to resume from, such as global_step100", _load_tag, ALL
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
    _one_in("HL_OPTIMIZER", "--optimizer", tuple(OPTIMIZERS), one_of(OPTIMIZERS)),
    _one_in(
        "HL_GRAD_ACCUM_DTYPE", "--grad-accum-dtype", ("fp32", "bf16"), "in which gradients are added up: fp32 or bf16"
    ),
    _row(
        "HL_CKP_ACT",
        ("--recompute-granularity", "--recompute-modules"),
        "activations recomputed: 0 none, 1 whole layers, 2 the attention core, 3 the MLPs or experts",
        _recomputed,
    ),
    _switch(
        "HL_USE_FUSED_SDPA",
        "--attention-backend",
        "0: torch's attention instead of Habana's FusedSDPA on HPU",
        # not the kernel's name: a device without it would be refused, and the variable is 1 in Habana's scripts
        on="auto",
        off="sdpa",
    ),
    _switch(
        "HL_USE_FUSED_SDPA_WITH_RECOMPUTE",
        "--fused-sdpa-recompute",
        "0: FusedSDPA stores the attention probabilities for the backward pass, HPU only",
    ),
    _switch("HL_USE_FAST_SOFTMAX", "--use-fast-softmax", "FusedSDPA's fast softmax, HPU only"),
    _switch("HL_USE_FUSED_RMSNORM", "--use-fused-rmsnorm", "Habana's fused RMSNorm, HPU only"),
    _switch("HL_USE_TORCH_COMPILE", "--torch-compile", "compile each layer with torch.compile; not in lazy mode"),
    _row(
        "HL_TORCH_COMPILE_DISABLE",
        ("--torch-compile",),
        "1: compile nothing",
        lambda text: [("--torch-compile", False)] if is_on(text) else [],
    ),
    _switch("HL_USE_LAZY_MODE", "lazy", "HPU: lazy mode (PT_HPU_LAZY_MODE)"),
    # matrix products in fp8
    _switch("HL_FP8", "fp8", "1: matrix products of the layers in fp8, on HPU and CUDA"),
    _switch("HL_USE_TRANSFORMER_ENGINE", "transformer_engine", "the same, by its earlier name"),
    _one_in(
        "HL_TRANSFORMER_IMPL",
        "transformer_impl",
        ("transformer_engine", "local"),
        "transformer_engine; or local, which has no fp8",
    ),
    _one_in("HL_FP8_FORMAT", "fp8_format", FP8_FORMATS, f"with HL_FP8=1: {one_of(FP8_FORMATS)}"),
    _number("HL_FP8_MARGIN", "--fp8-margin", "scales are smaller by 2 to this power than the largest that fits", 0),
    _number("HL_FP8_MEASURE_INTERVAL", "--fp8-interval", "microbatches between two updates of the scales"),
    _number("HL_FP8_AMAX_HISTORY_LEN", "--fp8-amax-history-len", "microbatches whose largest values are kept"),
    _one_in(
        "HL_FP8_AMAX_COMPUTE_ALGO",
        "--fp8-amax-compute-algo",
        ("max", "most_recent"),
        "value of that history that the scale follows: max or most_recent",
    ),
    _one_in(
        "HL_FP8_AMAX_RECOMPUTE_ALGO",
        "--fp8-amax-compute-algo",
        ("max", "most_recent"),
        "the same, by its earlier name",
    ),
    _switch("HL_FP8_AMAX_REDUCE", "--fp8-amax-reduce", "1: one scale for all ranks of a stage"),
    sets(
        "HL_FP8_COVERAGE",
        "--fp8-mlp-row-parallel",
        "products in fp8: mlp_row_parallel=True or False, and attention=False",
        _coverage,
        ALL,
    ),
    _switch("HL_FP8_SMOOTH_SWIGLU", "--fp8-smooth-swiglu", "1: scale the second product of SwiGLU by channels"),
    _switch("HL_CACHE_FP8_WEIGHT", "--cache-fp8-weight", "1: keep the fp8 weights for the backward pass"),
    _switch("HL_USE_CACHE_FP8_WEIGHT", "--cache-fp8-weight", "the same, by its earlier name"),
    _switch("HL_CACHE_FP8_WEIGHT_FWD", "--cache-fp8-weight-fwd", "1: convert weights once a global batch"),
    _switch("HL_USE_CACHE_FP8_WEIGHT_FWD", "--cache-fp8-weight-fwd", "the same, by its earlier name"),
    _switch(
        "HL_FP8_ENFORCE_BF16_AMAX_REDUCTION",
        "PT_TE_ENFORCE_BF16_AMAX_REDUCTION",
        "with HL_FP8=1: PT_TE_ENFORCE_BF16_AMAX_REDUCTION; unset: 1",
    ),
    _switch("HL_TE_LIMIT_GRAPH_SIZE", "PT_TE_LIMIT_GRAPH_SIZE", "with HL_FP8=1: PT_TE_LIMIT_GRAPH_SIZE; unset: 0"),
    _switch("HL_DETERMINISTIC_MODE", "--deterministic", "1: deterministic algorithms of torch and of the HPU"),
    _choice(
        "HL_USE_DISTRIBUTED_OPTIMIZER",
        "--zero-stage",
        {"0": 0, "1": 1},
        "1: shard the optimizer's state over data-parallel ranks; bf16 always does",
    ),
    _choice("HL_DIST_OPTIMIZER", "--zero-stage", {"0": 0, "1": 1}, "the same, by its earlier name"),
    _number("HL_NUM_WORKERS", "--num-workers", "threads of a rank that read data ahead; 0: none", 0),
    _one_in(
        "HL_BUCKETING",
        "--bucketing",
        ("auto", "off", "octave", "optimal"),
        "lengths that rows are padded to: auto, off, octave or optimal",
        scripts=FINE_TUNING,
    ),
    # device
    sets("HL_DEVICE", "device", f"{DEVICE}; unset: the first of hpu, cuda and cpu that is there", _device_name, ALL),
    _switch("HL_USE_HPU", "use_hpu", "1: hpu; 0: not hpu. Unset: what is there"),
    _text("HL_ENV_FLAGS", "environment", "variables for the ranks on every node: NAME=VALUE,NAME=VALUE"),
    _switch("HL_HNIC", "hnic", "1: Gaudi nodes communicate through the hosts' network cards"),
    _text("HL_HCCL_OVER_OFI", "HCCL_OVER_OFI", "with HL_HNIC=1: HCCL_OVER_OFI"),
    _text("HL_HCCL_GAUDI_DIRECT", "HCCL_GAUDI_DIRECT", "with HL_HNIC=1: HCCL_GAUDI_DIRECT"),
    _text("HL_FI_PROVIDER", "FI_PROVIDER", "with HL_HNIC=1: FI_PROVIDER"),
    _text("HL_QNPU_DIR", "activate", "folder of an environment whose `activate` is sourced first, on every node"),
    # data
    _text(
        "HL_DATA",
        "data",
        "training data: a file of chats, for run_dpo.sh of pairs of answers; several files, or WEIGHT FILE pairs, "
        "are mixed",
        FINE_TUNING,
    ),
    _text(
        "HL_DATA_OUTPUT_DIR", "folder", "folder of the tokenized data; unset: data/ in the results folder", FINE_TUNING
    ),
    _text("HL_DATA_DIR_ROOT", "data_root", "folder of the dataset and of the tokenizer's files", PRETRAINING),
    _text("HL_DATA_FILE_PREFIX", "data_prefix", "the dataset in that folder: PREFIX.bin and PREFIX.idx", PRETRAINING),
    _text("HL_DATA_IDX_DIR", "index_folder", "folder for the index arrays", PRETRAINING),
    _text("HL_DATA_CACHE_DIR", "index_folder", "the same, by its later name", PRETRAINING),
    _text("HL_CACHE_PATH", "index_folder", "the same, by its later name", PRETRAINING),
    _row(
        "HL_TOKENIZER_TYPE",
        ("--tokenizer-type",),
        "a name that --tokenizer-type takes, or Llama3Tokenizer",
        _tokenizer,
        PRETRAINING,
    ),
    _text("HL_TOKENIZER_MODEL", "--tokenizer-model", "the tokenizer's file", PRETRAINING),
    _number("HL_EVAL_ITERS", "--eval-iters", "global batches in one validation; 0: none", 0),
    _number("HL_EVAL_INTERVAL", "--eval-interval", "steps between two validations"),
    # results
    _text(
        "HL_RESULTS_DIR",
        "--results-dir",
        "folder of the run; unset: a new one, named after the run, in HL_RESULTS_DIR_PREFIX/out",
    ),
    _text("HL_RESULTS_DIR_PREFIX", "results_prefix", "parent of that `out`"),
    _text(
        "HL_CHECKPOINTS_DIR",
        "checkpoints_dir",
        "folder to save to and to resume from; unset: checkpoints/ in the results folder",
    ),
    _text("HL_TENSORBOARD_DIR", "--tensorboard-dir", "TensorBoard events; unset: tensorboard/ in the results folder"),
    _switch("HL_SAVE", "save", "1: save checkpoints"),
    _number("HL_SAVE_INTERVAL", "--save-interval", "steps between two checkpoints"),
    _text("HL_SAVE_HF", "--save-hf", "folder of the exports; unset: hf_format/ in the results folder", FINE_TUNING),
    _number(
        "HL_SAVE_SAMPLES", "--save-samples", "samples between two exports, beside each epoch's", scripts=FINE_TUNING
    ),
    _text("HL_GENERATE_PROMPTS", "--generate-prompts", "file of prompts that the model answers while it trains"),
    _number("HL_GENERATE_INTERVAL", "--generate-interval", "steps between two generations; unset: each validation"),
    _words("HL_LM_EVAL_TASKS", "--lm-eval-tasks", "tasks of lm-eval that measure the model while it trains"),
    _number("HL_LM_EVAL_INTERVAL", "--lm-eval-interval", "steps between two of them; unset: each validation"),
    _switch(
        "HL_KEEP_BEST",
        "--keep-best",
        "1: keep the checkpoint of the best validation; a run that exports has it in `best` too",
    ),
    _number(
        "HL_EARLY_STOPPING_PATIENCE",
        "--early-stopping-patience",
        "end after so many validations in a row without an improvement",
    ),
    _number("HL_LOG_INTERVAL", "--log-interval", "steps between two log lines"),
    _row(
        "HL_PROFILE",
        ("--profile",),
        "pt: a torch.profiler trace; pt-full: with shapes, Python stacks and memory",
        _profile(4),
    ),
    _row(
        "HL_PROFILE_TYPE", ("--profile",), "the same, by its later name; by default of iteration 3 alone", _profile(3)
    ),
    _row(
        "HL_PROFILE_STEPS",
        ("--profile-step-start", "--profile-step-end"),
        "first and last iteration of the trace: 3,4",
        _profile_steps,
    ),
    _number("HL_PROFILE_STEP_START", "--profile-step-start", "first iteration of the trace"),
    _number("HL_PROFILE_STEP_END", "--profile-step-end", "iteration before which the trace ends"),
    sets(
        "HL_PROFILE_RANKS",
        "--profile-ranks",
        "ranks that write a trace: 0 1 4",
        lambda text: [whole()(rank) for rank in text.split()],
        ALL,
    ),
    _switch("HL_DOCTOR", "doctor", "1: examine the hosts first, and start nothing where one stands out"),
    _switch("HL_DRY_RUN", "dry_run", "1: print the plan and start nothing"),
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

_OF_INFERENCE = (
    *("HL_MODEL", "HL_CHAT_TEMPLATE", "HL_CHECKPOINT_LOAD_TAG", "HL_QUANTIZE_BASE", "HL_BF16"),
    *("HL_TOKENIZER_TYPE", "HL_TOKENIZER_MODEL", "HL_NUM_NODES", "HL_NGPU_PER_NODE", "HL_DEVICES_PER_NODE"),
    *(
        "HL_DP",
        "HL_TP",
        "HL_PP",
        "HL_MOE_EP",
        "HL_EP",
        "HL_ETP",
        "HL_MOE_ENABLE_EXPERT_TP",
        "HL_HOSTSFILE",
        "HL_RENDEZVOUS",
        "HL_DEVICE",
        "HL_USE_HPU",
        "HL_ENV_FLAGS",
    ),
    *("HL_HNIC", "HL_HCCL_OVER_OFI", "HL_HCCL_GAUDI_DIRECT", "HL_FI_PROVIDER", "HL_QNPU_DIR", "HL_DRY_RUN"),
)
"""Variables of training that scripts/generate.sh and scripts/evaluate.sh have too."""
_THERE = {
    "HL_MODEL": _text("HL_MODEL", "--load", ""),
    "HL_CHAT_TEMPLATE": _text("HL_CHAT_TEMPLATE", "--chat-template", ""),
    "HL_BF16": _switch("HL_BF16", "--precision", "", on="bf16", off="fp32"),
}
"""Those that set something else there."""
# one row of each name: _OF_INFERENCE adds scripts to it, and _THERE replaces what it sets in these
VARIABLES = tuple(
    replace(row, scripts=(*row.scripts, *INFERENCE)) if row.name in _OF_INFERENCE else row for row in _VARIABLES
)


def _refused() -> Iterator[Entry]:
    """Yield the rows of hl_refused.tsv: variables of one reason, the outcome, accepted values and the reason."""
    for line in Path(__file__).with_name("hl_refused.tsv").read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            continue
        names, outcome, accepts, reason = line.split("\t")
        for name in names.split():
            yield Entry(name, cast(Outcome, outcome), reason, accepts=tuple(accepts.split()))


# a value that it accepts requests what is done anyway, so a command that spells it out still runs
REFUSED = tuple(_refused())
"""Variables of Habana's scripts that are recognised but not supported, with the reason and the remedy."""


def variables_of(script: Script) -> tuple[Entry, ...]:
    """Return the variables that a script has."""
    rows = tuple(row for row in VARIABLES if script in row.scripts)
    if script not in INFERENCE:
        return rows
    return tuple(replace(_THERE.get(row.name, row), text=row.text) for row in rows)


def why_not(row: Entry, script: Script) -> str:
    """Return why a script does not have a variable that others have."""
    if script in INFERENCE:
        for name in row.flags:
            if name in OF_TRAINING:
                return OF_TRAINING[name]
    return "it belongs to " + " and ".join(path_of(home) for home in row.scripts)


def path_of(script: str) -> str:
    """Return the path of a script in the repository."""
    return f"scripts/{script}.sh" if script in INFERENCE else f"scripts/run_{script}.sh"
