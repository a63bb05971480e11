"""HL_* variables of Habana's scripts that are recognised but not supported, with the reason and the remedy."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.options.dialect import Entry, refused

_BINS = "there are no bins: on HPU experts compute all tokens, or the slots of HL_MOE_EXPERT_CAPACITY_FACTOR"
_DEEPSEEK = "it belongs to DeepSeek, which no preset here is"
_COMPILE = "layers are compiled one by one, without further settings. Unset it"
_TASKS = (
    "HL_LM_EVAL_TASKS names the tasks of lm-eval that measure a run, and HL_TASKS of scripts/evaluate.sh those of a "
    "checkpoint."
)


def _refused(names: str, reason: str, accepts: str = "") -> Iterator[Entry]:
    """Yield the variables of one reason. `accepts`: values that request nothing, or what is done otherwise."""
    for name in names.split():
        yield refused(name, reason, accepts=accepts)


def _idle(name: str, reason: str, accepts: str) -> Entry:
    """Return a variable that has no effect with some values, and is refused with others."""
    return Entry(name, "no effect", reason, accepts=tuple(accepts.split()))


# A value in `accepts` requests what is done anyway, so a command that spells it out still runs.
REFUSED: tuple[Entry, ...] = (
    # attention and fp8
    *_refused("HL_USE_FLASH_ATTN", "HL_USE_FUSED_SDPA chooses the attention kernel. Unset it", "0 1"),
    *_refused("HL_USE_FUSED_SDPA_FP8", "under HL_FP8=1 the attention itself stays in bf16. Set 0", "0"),
    *_refused(
        "HL_USE_TE_CUSTOM_OP HL_TE_DISABLE_TCOMPILE_ON_FUSED_ATTN",
        "it belongs to fp8 under torch.compile, which is not supported; use HL_USE_LAZY_MODE=1. Set 0",
        "0",
    ),
    *_refused("HL_FP8_MANUAL_MODE", "HL_FP8_MEASURE_INTERVAL says when scales are updated. Unset it", "1"),
    # parallelism and experts
    *_refused("HL_MOE_NUM_CAPACITY_BINS", f"{_BINS}. Set 0", "0"),
    *_refused(
        # the defaults of each
        "HL_MOE_CAPACITY_BINS HL_MOE_CAPACITY_BINS_EXP_BASE HL_CAPACITY_BINS_EXP_BASE HL_MOE_CAPACITY_BINS_ALIGNMENT "
        "HL_MOE_CAPACITY_BINS_OPTIMIZE_INTERVAL HL_MOE_CAPACITY_BINS_OPTIMIZE_MAX_GROUP "
        "HL_MOE_CAPACITY_BINS_MAX_OVERHEAD_FACTOR",
        f"{_BINS}. Unset it",
        "1.5 64 300 4 0.0",
    ),
    *_refused("HL_MOE_MIN_CAP", "an expert has no least capacity. Unset it", "64"),
    *_refused(
        "HL_MOE_TOKEN_DROP_POLICY", "the choices with the lowest scores pass a full expert by. Set probs", "probs"
    ),
    *_refused(
        "HL_MOE_PAD_EXPERT_INPUT_TO_CAPACITY",
        "free slots are padded where the device needs it, with the same result. Unset it",
        "0 1",
    ),
    *_refused("HL_MOE_ROUTER_FP32", "the router always computes in float32. Set 1", "1"),
    *_refused(
        "HL_MOE_LOAD_BALANCING_TYPE",
        "experts are balanced by Switch's loss, HL_MOE_AUX_LOSS_COEFF=0 for none. Set aux_loss",
        "aux_loss",
    ),
    *_refused("HL_TOKEN_DISPATCHER_TYPE", "tokens travel by all-to-all. Set alltoall", "alltoall"),
    *_refused(
        "HL_MOE_PERMUTED_WEIGHTS HL_MOE_FUSED_WEIGHTS HL_MOE_GROUPED_GEMM HL_FP8_FORCE_SEQ_MOE",
        "the device decides how the products of the experts are computed, with the same result. Unset it",
        "0 1",
    ),
    *_refused("HL_MOE_USE_DATA_BEFORE_EXPERT_PARALLEL", "neighbouring ranks hold different experts. Set 0", "0"),
    *_refused("HL_MOE_TOKEN_DISTRIBUTION_LOGGING", "the loads of the experts are always logged. Unset it", "0 1"),
    *_refused("HL_MOE_TOKEN_DISTRIBUTION_LOGGING_INTERVAL", "they are logged at HL_LOG_INTERVAL. Unset it", "50"),
    *_refused("HL_MOE_LAYER_RECOMPUTE", "HL_CKP_ACT=3 recomputes the experts. Set 0", "0"),
    *_refused("HL_MOE_SKIP_FIRST_LAYERS", f"{_DEEPSEEK}; --moe-layer-freq says which layers have experts. Unset it"),
    *_refused("HL_TOKEN_DROP", f"{_DEEPSEEK}; HL_MOE_EXPERT_CAPACITY_FACTOR lets experts pass tokens by. Set 0", "0"),
    *_refused("HL_ENABLE_SHARED_EXPERT_OVERLAP", f"{_DEEPSEEK}. Set 0", "0"),
    *_refused("HL_MOE_*", "experts have no such setting here; docs/guides/experts.md has those there are. Unset it"),
    *_refused("HL_PARTITIONED_MODE", "messages between stages are sent whole. Set false", "false"),
    # compilation
    *_refused("HL_USE_REGIONAL_COMPILATION", _COMPILE, "0 1"),
    *_refused("HL_ALLOW_UNSPEC_INT_ON_NN_MODULE HL_CACHE_SIZE_LIMIT", _COMPILE, "0"),
    *_refused(
        "HL_CKPT_FORMAT HL_CKPT_CONVERT_FORMAT HL_CKPT_CONVERT_SAVE",
        "checkpoints have a format of this project; tools/convert_checkpoint.py converts them. Unset it",
    ),
    *_refused("HL_CKPT_FULLY_PARALLEL_LOAD", "each rank reads its own part of a checkpoint. Unset it", "0 1"),
    # defaults of scripts: they name a way of writing, not a result, and there is one way here
    _idle(
        "HL_SAVE_DISTRIB_OPTIMIZER_METHOD",
        "each rank writes its own part. Unset it",
        "serial_per_node parallel_multi_node",
    ),
    _idle(
        "HL_LOAD_DISTRIB_OPTIMIZER_METHOD",
        "each rank reads its own part. Unset it",
        "serial_per_dp_groups serial_per_node",
    ),
    *_refused("HL_NO_LOAD_STRICT", "a checkpoint must have every parameter of the model. Set 0", "0"),
    *_refused("HL_RECOMPUTE_NUM_LAYERS", "HL_CKP_ACT=1 recomputes each layer by itself. Set 1", "1"),
    *_refused(
        "HL_OVERLAP_GRAD_REDUCE",
        "gradients are always summed while the backward pass runs, with the same result; overlap_comm "
        "in --deepspeed-config turns it off. Unset it",
        "0 1",
    ),
    *_refused("HL_MICRO_BATCH_SYNC_INTERVAL", "ranks do not wait between microbatches. Unset it", "0"),
    *_refused("HL_USE_CPU_INIT", "weights are always initialised on the CPU. Unset it", "0 1"),
    *_refused("HL_REDIRECT_LOGS", "the log is always in train.log of the results folder. Unset it", "0 1"),
    *_refused("HL_SSH_PORT", 'set PDSH_SSH_ARGS_APPEND="-p PORT", or Port in ~/.ssh/config. Unset it', "22"),
    *_refused(
        # one list for three names: 0 of the first two, localhost of the address
        "HL_TORCHRUN_MULTINODE HL_TORCHRUN_NODE_RANK HL_TORCHRUN_MASTER_ADDR",
        "set HL_RENDEZVOUS=HOST:PORT, where this script is started on each node by itself. Unset it",
        "0 localhost",
    ),
    *_refused("HL_TENSOR_LOGGER", "there is no tensor logger. Unset it", "0"),
    *_refused("HL_TENSOR_LOGGER_*", "there is no tensor logger. Unset it", "0"),
    *_refused(
        "HL_CHECK_TP_NORM",
        "activations are not compared over tensor-parallel ranks; --check-replicas-interval compares "
        "parameters. Unset it",
        "0",
    ),
    *_refused(
        # -1 of the first two, all of the type
        "HL_START_CHECK_TP_NORM_ITER HL_END_CHECK_TP_NORM_ITER HL_CHECK_TP_NORM_TYPE",
        "it belongs to HL_CHECK_TP_NORM. Unset it",
        "-1 all",
    ),
    *_refused(
        "HL_LATEST_CHECKPOINT HL_UNIV_CP_EXTRACT_WORKERS HL_UNIV_CP_MERGE_WORKERS",
        "it belongs to Habana's wrapper of the conversion; call tools/ds_to_universal.py. Unset it",
    ),
    *_refused(
        "HL_SCHEDULER_BATCH_SIZE HL_BATCH_SCHED_SAMPLES HL_STOP_AFTER_NUM_SAMPLES",
        "the batch scheduler is not supported; HL_RAMPUP_BS or --rampup-batch-size grows the batch, "
        "--train-samples ends the run. Unset it",
        "0",
    ),
    *_refused("HL_USE_TORCH_COMPILED_AUTOGRAD", "compiled autograd is not supported. Set 0", "0 false"),
    *_refused("HL_COMPILED_AUTOGRAD_FALLBACK_MODE", "compiled autograd is not supported. Unset it", "nothing"),
    *_refused("HL_IMMEDIATE_GRAD_UPDATE", "bf16 gradients are always added up at once. Unset it", "1 true"),
    *_refused(
        "HL_TRUST_REMOTE_CODE", "code that comes with a tokenizer is never run. Use a tokenizer.json; set 0", "0"
    ),
    *_refused("HL_LM_EVAL HL_RUN_EVAL_HARNESS", f"{_TASKS} Set 0", "0"),
    *_refused("HL_EVAL_TASKS", f"{_TASKS} Unset it"),
)
