"""HL_* variables of Habana's scripts that are recognised but not supported, with the reason and the remedy."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.launch.dialects.hl_variables import VARIABLES, Script, Variable
from megatron.options.config import ConfigError
from megatron.runtime.terminal import folded
from megatron.settings.parser import help_text, sections_text


@dataclass(frozen=True)
class Refused:
    """A known variable of Habana's scripts that is not supported."""

    names: tuple[str, ...]
    """A trailing * matches every name that starts so."""
    off: tuple[str, ...]
    """Accepted values: they request nothing, or what a note says is done otherwise."""
    reason: str
    is_noted: bool = False


_EXPERTS = "mixture-of-experts models (Mixtral, DeepSeek) are not supported. Unset it"
_COMPILE = "layers are compiled one by one, without further settings. Unset it"
_TASKS = (
    "HL_LM_EVAL_TASKS names the tasks of lm-eval that measure a run, and HL_TASKS of scripts/evaluate.sh those of a "
    "checkpoint. {}"
)
REFUSED: tuple[Refused, ...] = (
    Refused(
        ("HL_USE_FUSED_SDPA_FP8",),
        ("0",),
        "under HL_FP8=1 the attention itself stays in bf16. Set 0",
    ),
    Refused(
        ("HL_USE_TE_CUSTOM_OP", "HL_TE_DISABLE_TCOMPILE_ON_FUSED_ATTN"),
        ("0",),
        "it belongs to fp8 under torch.compile, which is not supported; use HL_USE_LAZY_MODE=1. Set 0",
    ),
    Refused(("HL_FP8_MANUAL_MODE",), ("1",), "HL_FP8_MEASURE_INTERVAL says when scales are updated. Unset it"),
    Refused(("HL_CP",), ("1",), "context parallelism is not supported. Unset it, and use HL_TP with HL_SEQ_PARALLEL=1"),
    Refused(("HL_CP_COMM_TYPE",), ("p2p",), "context parallelism is not supported. Unset it"),
    Refused(("HL_MOE_*",), (), _EXPERTS),
    Refused(
        (
            *("HL_EP", "HL_ETP", "HL_TOKEN_DROP", "HL_TOKEN_DISPATCHER_TYPE", "HL_MIXTRAL_MODEL"),
            *("HL_CAPACITY_BINS_EXP_BASE", "HL_AUX_LOSS_COEFF", "HL_ENABLE_SHARED_EXPERT_OVERLAP"),
        ),
        (),
        _EXPERTS,
    ),
    Refused(("HL_USE_REGIONAL_COMPILATION",), ("0", "1"), _COMPILE),
    Refused(("HL_ALLOW_UNSPEC_INT_ON_NN_MODULE", "HL_CACHE_SIZE_LIMIT"), ("0",), _COMPILE),
    Refused(
        ("HL_CKPT_FORMAT", "HL_CKPT_CONVERT_FORMAT", "HL_CKPT_CONVERT_SAVE"),
        (),
        "checkpoints have a format of this project; tools/convert_checkpoint.py converts them. Unset it",
    ),
    Refused(("HL_CKPT_FULLY_PARALLEL_LOAD",), ("0", "1"), "each rank reads its own part of a checkpoint. Unset it"),
    Refused(
        ("HL_SAVE_DISTRIB_OPTIMIZER_METHOD",), ("serial_per_node",), "each rank writes its own part. Unset it", True
    ),
    Refused(
        ("HL_LOAD_DISTRIB_OPTIMIZER_METHOD",), ("serial_per_dp_groups",), "each rank reads its own part. Unset it", True
    ),
    Refused(("HL_NO_LOAD_STRICT",), ("0",), "a checkpoint must have every parameter of the model. Set 0"),
    Refused(("HL_RECOMPUTE_NUM_LAYERS",), ("1",), "HL_CKP_ACT=1 recomputes each layer by itself. Set 1"),
    Refused(
        ("HL_OVERLAP_GRAD_REDUCE",),
        ("0", "1"),
        "gradients are always summed while the backward pass runs, with the same result; overlap_comm in "
        "--deepspeed-config turns it off. Unset it",
    ),
    Refused(("HL_MICRO_BATCH_SYNC_INTERVAL",), ("0",), "ranks do not wait between microbatches. Unset it"),
    Refused(("HL_USE_CPU_INIT",), ("0", "1"), "weights are always initialised on the CPU. Unset it"),
    Refused(("HL_REDIRECT_LOGS",), ("0", "1"), "the log is always in train.log of the results folder. Unset it"),
    Refused(
        ("HL_SSH_PORT",),
        ("22",),
        'set PDSH_SSH_ARGS_APPEND="-p PORT", or Port in ~/.ssh/config. Unset it',
    ),
    Refused(
        ("HL_TORCHRUN_MULTINODE", "HL_TORCHRUN_NODE_RANK", "HL_TORCHRUN_MASTER_ADDR"),
        ("0", "localhost"),
        "set HL_RENDEZVOUS=HOST:PORT, where this script is started on each node by itself. Unset it",
    ),
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
    Refused(("HL_USE_TORCH_COMPILED_AUTOGRAD",), ("0", "false"), "compiled autograd is not supported. Set 0"),
    Refused(("HL_COMPILED_AUTOGRAD_FALLBACK_MODE",), ("nothing",), "compiled autograd is not supported. Unset it"),
    Refused(("HL_IMMEDIATE_GRAD_UPDATE",), ("1", "true"), "bf16 gradients are always added up at once. Unset it"),
    Refused(
        ("HL_TRUST_REMOTE_CODE",), ("0",), "code that comes with a tokenizer is never run. Use a tokenizer.json; set 0"
    ),
    Refused(("HL_LM_EVAL", "HL_RUN_EVAL_HARNESS"), ("0",), _TASKS.format("Set 0")),
    Refused(("HL_EVAL_TASKS",), (), _TASKS.format("Unset it")),
)


def covers(refused: Refused, name: str) -> bool:
    return any(name == known or (known.endswith("*") and name.startswith(known[:-1])) for known in refused.names)


# ---------------------------------------------------------------------------------------------------------------------
# The --help of the scripts: their HL_* variables, and the flags of megatron.train.

PURPOSE: dict[Script, str] = {
    "bloom13b": "Train BLOOM-13B in tensor, pipeline and data parallel.",
    "llama": "Train Llama 1, 2, 3.1 or 3.2 in tensor, pipeline and data parallel.",
    "sft": "Fine-tune a Hugging Face model on chats: tokenize them, train, and export Hugging Face folders.",
    "dpo": "Train a Hugging Face model on preferences (DPO): tokenize pairs, train adapters, and export them.",
}
# the variables that most runs set
FIRST = (
    *(
        "HL_LLAMA_VER",
        "HL_LLAMA_MODEL_SIZE",
        "HL_MODEL",
        "HL_DATA",
        "HL_BETA",
        "HL_DATA_DIR_ROOT",
        "HL_DATA_FILE_PREFIX",
    ),
    *("HL_DEVICE", "HL_NUM_NODES", "HL_HOSTSFILE", "HL_DP", "HL_TP", "HL_PP", "HL_GBS", "HL_MICRO_BATCH"),
    *("HL_SEQ_LEN", "HL_TRAIN_ITERS", "HL_NUM_EPOCHS", "HL_RESULTS_DIR", "HL_SAVE_INTERVAL", "HL_DRY_RUN"),
)


def script_help(script: Script, topic: str) -> str:
    """Return the help of a script on a topic: `variables`, one of them, a topic of the flags, or "" for an overview.

    Raises ConfigError for any other.
    """
    taken = [variable for variable in VARIABLES if script in variable.scripts]
    if not topic:
        return _overview(script, taken)
    if topic == "variables":
        return f"Variables of run_{script}.sh (defaults: docs/reference/variables.md)\n" + _lines(taken)
    if topic.startswith("HL_"):
        found = [variable for variable in taken if variable.name == topic]
        refused = next((entry for entry in REFUSED if covers(entry, topic)), None)
        if refused is not None:
            accepted = f" Accepted: {', '.join(refused.off)}." if refused.off else ""
            return f"{topic}: {refused.reason}.{accepted}\n"
        if not found:
            raise ConfigError([f"run_{script}.sh has no variable {topic}; --help variables lists those it has"])
        flags = "".join(f"  flag: {flag}\n" for flag in found[0].flags)
        return _lines(found) + flags
    return help_text(topic)


def _overview(script: Script, taken: list[Variable]) -> str:
    first = [variable for name in FIRST for variable in taken if variable.name == name]
    return "\n".join(
        [
            f"usage: [HL_NAME=VALUE ...] scripts/run_{script}.sh [--flag VALUE ...]\n",
            PURPOSE[script],
            "Flags override variables. HL_DRY_RUN=1 prints the plan and the command that launches it.\n",
            "variables that most runs set:",
            _lines(first),
            f"  --help variables   all {len(taken)} variables of this script",
            "  --help HL_NAME     explain one variable",
            "  --help SECTION     list the flags of a section; --help FLAG explains one, --help all lists all\n",
            "sections of the flags:",
            *sections_text(),
            "",
        ]
    )


def _lines(variables: list[Variable]) -> str:
    width = max(len(variable.name) for variable in variables) + 4
    return "".join(
        folded(f"  {variable.name}".ljust(width) + variable.meaning, 100, further=" " * width) + "\n"
        for variable in variables
    )
