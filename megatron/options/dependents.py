"""Options that have no effect without another one, by what they need."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields

from megatron.options.config import Config, options
from megatron.options.data import DataConfig, parse_split
from megatron.options.model import ROPE_SCALING, ROPE_SCALING_OPTIONS, ModelConfig
from megatron.options.optimizer import READERS
from megatron.options.outputs import LoggingConfig
from megatron.options.training import Fp8Config
from megatron.runtime.devices import candidates, planned_device

SAVING = (
    "save_interval_in_mins",
    "peer_copy_interval",
    "keep_healthy_ranks",
    "save_samples",
    "save_at_epoch",
    "async_save",
    "keep_last",
    "keep_best",
    "save_retain_interval",
    "no_save_optim",
    "verify_checkpoint",
)
LOADING = (
    "no_load_optim",
    "no_load_rng",
)
RESUMING = ("load_fallback", "allow_data_change")
"""They also apply to a run that resumes in the folder that it saves in."""
LOSS_SCALING = ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")
WSD_DECAY = ("lr_wsd_decay_samples", "lr_wsd_decay_iters", "lr_wsd_decay_style")
RECOMPUTED = frozenset({"core_attn", "layernorm", "mlp", "mlp_act"})
TRACING = ("profile_step_start", "profile_step_end")
PROFILING = (
    "profile_ranks",
    "pytorch_profiler_collect_shapes",
    "pytorch_profiler_collect_callstack",
)
ON_HPU = ("use_fast_softmax", "fused_sdpa_recompute")
TIKTOKEN = ("tiktoken_pattern", "tiktoken_num_special_tokens")
PATIENCE = "early_stopping_patience"
LM_EVAL = ("lm_eval_task_path", "lm_eval_interval", "lm_eval_limit")
WANDB = ("wandb_entity", "wandb_exp_name", "wandb_save_dir")
MLFLOW = ("mlflow_tracking_uri", "mlflow_run_name", "mlflow_tags")
FP8 = tuple(field.name for field in fields(Fp8Config) if field.name != "fp8_format")
DELAYED = ("fp8_margin", "fp8_interval", "fp8_amax_history_len", "fp8_amax_compute_algo", "fp8_smooth_swiglu")
ADAPTERS = (
    "lora_alpha",
    "lora_dropout",
    "lora_target_modules",
    "lora_modules_to_save",
    "lora_bias",
    "use_rslora",
    "lora_init",
    "use_dora",
    "loraplus_lr_ratio",
    "lora_rank_pattern",
    "lora_alpha_pattern",
    "lora_base",
    "allow_other_base",
    "save_hf_merged",
)


OF_TRAINING = ("offload_activations", "cuda_graph_impl", "rates")
OF_EXPERTS = tuple(field.name for field in fields(ModelConfig) if field.name.startswith("moe_"))
SHARING_ROWS = ("context_parallel_exchange",)
REPLICAS = ("num_replicas",)
GPT2_FILES = ("vocab_file", "merge_file")


def idle_without(config: Config) -> Iterator[str]:
    """Yield a message for each option that has no effect without another one, which is not given."""
    checkpoint, logging, model = config.checkpoint, config.logging, config.model
    rope = model.position_embedding_type == "rope"
    # with `auto` any device that may be chosen counts: the launch may run on another machine than the ranks
    on_hpu = [device for device in candidates(config.parallel.device) if "fused_hpu" in device.attention]
    by_habana = any(map(model.uses_fused_sdpa, on_hpu))
    traces = logging.profile or logging.profile_instructions
    recompute = config.training.recompute_granularity
    exports = checkpoint.save_hf and not checkpoint.save_hf_last_only
    # (whether the other option is given, its name, the remedy, options without effect otherwise)
    needs: list[tuple[object, str, str, tuple[str, ...]]] = [
        (checkpoint.save, "save", "give the folder to save in", SAVING),
        (
            config.data.num_held_out_sets > 1 and config.data.eval_iters,
            "several datasets to validate on",
            "give them",
            ("multiple_validation_sets",),
        ),
        (config.data.has_weights, "weights in the data's path", "give WEIGHT PREFIX pairs", ("blend_weights",)),
        (config.data.eval_iters, "eval_iters", "set it", ("valid_data_path", "test_data_path", "eval_interval")),
        (checkpoint.save_hf, "save_hf", "give the folder to export to", ("save_hf_last_only", "save_hf_merged")),
        (exports, "exports in folders of their own", "give save_hf alone", ("save_hf_keep_last",)),
        (checkpoint.load, "load", "give the folder to resume from", LOADING),
        (checkpoint.load or checkpoint.save, "load or save", "give the folder to resume from", RESUMING),
        (config.training.early_stopping_patience, PATIENCE, "give one", ("early_stopping_min_delta",)),
        (config.compares_validations, f"{PATIENCE} or keep_best", "give one", ("best_metric", "best_metric_mode")),
        (not config.training.skip_train, "a training", "leave out skip_train", OF_TRAINING),
        (config.training.loss, "loss", "name one", ("loss_options",)),
        (config.training.fp16, "fp16", "turn it on", LOSS_SCALING),
        (config.effective_zero_stage > 0, "ZeRO's shards", "set zero_stage to 1, 2 or 3", REPLICAS),
        *_of_optimizer(config),
        (rope, "position_embedding_type=rope", "choose that", ("rotary_base", "rotary_percent", "rope_scaling_factor")),
        (model.attention_window, "attention_window", "give one", ("attention_window_pattern", "rotary_base_local")),
        *_rotary_scaling(model),
        (model.mup_base_hidden_size, "mup_base_hidden_size", "give it", ("mup_base_head_size",)),
        (model.num_experts, "num_experts", "set it", OF_EXPERTS),
        (config.parallel.context_parallel_size > 1, "context_parallel_size above 1", "set that", SHARING_ROWS),
        (on_hpu, "device=hpu", "choose that", ON_HPU),
        (by_habana or not on_hpu, "attention_backend=fused_hpu", "choose that", ON_HPU),
        (recompute == "selective", "recompute_granularity=selective", "choose that", ("recompute_modules",)),
        *_of_tokenizer(config),
        (logging.profile, "profile", "turn it on", PROFILING),
        (traces, "profile or profile_instructions", "turn one on", TRACING),
        (config.lora.lora_rank, "lora_rank", "give one", ADAPTERS),
        *_fp8(config),
        (config.lora.loraplus_lr_ratio != 1, "loraplus_lr_ratio", "give one", ("loraplus_lr_embedding",)),
        (logging.generate_prompts, "generate_prompts", "give a file", ("generate_interval", "generate_max_new_tokens")),
        (logging.lm_eval_tasks, "lm_eval_tasks", "name one", LM_EVAL),
        *_of_trackers(logging),
        (config.guard.recheck_interval, "recheck_interval", "set it", ("recheck_action",)),
        (logging.callbacks, "callbacks", "name one", ("callback_errors",)),
    ]
    for present, needed, remedy, names in needs:
        if not present:
            yield from idle_options(config, needed, remedy, names)
    yield from _validation_without_data(config)
    start, iters = logging.profile_step_start, config.training.train_iters
    if traces and iters and start > iters:
        yield f"profile_step_start={start} has no effect without so many steps; start within train_iters={iters}"


def _of_tokenizer(config: Config) -> Iterator[tuple[object, str, str, tuple[str, ...]]]:
    kind, exports = config.data.tokenizer_type, config.checkpoint.save_hf
    yield kind == "GPT2BPETokenizer", "tokenizer_type=GPT2BPETokenizer", "choose that", GPT2_FILES
    yield kind == "TikTokenizer", "tokenizer_type=TikTokenizer", "choose that", TIKTOKEN
    # an export copies its files, whatever their kind
    yield kind or exports, "tokenizer_type", "say which kind it is", ("tokenizer_model",)
    reads_model = kind not in ("GPT2BPETokenizer", "NullTokenizer")
    yield reads_model or exports, "a tokenizer_type that reads it", "choose one", ("tokenizer_model",)


def _of_trackers(logging: LoggingConfig) -> Iterator[tuple[object, str, str, tuple[str, ...]]]:
    yield logging.wandb_project, "wandb_project", "give one", WANDB
    yield logging.mlflow_experiment, "mlflow_experiment", "give one", MLFLOW


def _of_optimizer(config: Config) -> Iterator[tuple[object, str, str, tuple[str, ...]]]:
    options = config.optimizer
    yield options.ema_decay, "ema_decay", "give it", ("ema_interval", "offload_ema")
    yield options.qk_clip, "qk_clip", "turn it on", ("qk_clip_alpha", "qk_clip_threshold")
    yield options.decoupled_lr, "decoupled_lr", "give it", ("decoupled_min_lr",)
    yield options.lr_decay_style == "WSD", "lr_decay_style=WSD", "choose that", WSD_DECAY
    for name, reader in READERS.items():
        yield name in options.kind.options, *reader, (name,)


def _fp8(config: Config) -> Iterator[tuple[object, str, str, tuple[str, ...]]]:
    """Yield the rows of fp8's options; of a recipe's own only where it is known."""
    if not config.fp8.uses_fp8:
        yield False, "fp8_format", "choose one", FP8
        return
    may_delay = config.fp8_recipe == "delayed" or config.parallel.device == "auto"
    yield may_delay, "fp8_recipe=delayed", "choose that", DELAYED
    may_exchange = config.fp8_recipe != "rowwise"
    yield may_exchange, "fp8_recipe=delayed or tensorwise", "choose one", ("fp8_amax_reduce",)


def _rotary_scaling(model: ModelConfig) -> Iterator[tuple[object, str, str, tuple[str, ...]]]:
    """Yield a row for the options of a rotary scaling, and one for each: the types that read it are what it needs."""
    yield model.rope_scaling_factor, "rope_scaling_factor", "give it", ROPE_SCALING_OPTIONS
    for name in ROPE_SCALING_OPTIONS:
        readers = [kind for kind, names in ROPE_SCALING.items() if name in names]
        is_read = not model.scales_rotary or name not in model.idle_rope_scaling
        yield is_read, f"rope_scaling_type={' or '.join(readers)}", "choose that", (name,)


def _validation_without_data(config: Config) -> Iterator[str]:
    if config.data.eval_iters and not _holds_out(config.data):
        why, remedy = f"split={config.data.split} holds out nothing", "hold out a share, such as split=98,2,0"
        if config.data.per_split:
            why, remedy = "there is no valid_data_path", "give it"
        yield f"eval_iters={config.data.eval_iters} has no effect, as {why}; {remedy}, or set eval_iters=0"


def _holds_out(data: DataConfig) -> bool:
    """Return True if there are data to validate or test on."""
    if data.per_split:
        return bool(data.valid_data_path or data.test_data_path)
    # a split such as 100 or 1,0,0 is all training
    return any(parse_split(data.split)[1:])


def slow_mode(config: Config, *, lazy: bool) -> Iterator[str]:
    """Yield a warning if an HPU would run each operator by itself; `lazy` as for `on_device`."""
    compiles = planned_device(config.parallel.device).compiles_layers
    if compiles and not lazy and not config.training.torch_compile:
        yield (
            "HPU runs each operator by itself, which is for debugging: neither lazy mode nor torch_compile is on. For "
            "speed leave out --no-torch-compile (HL_TORCH_COMPILE_DISABLE), or set HL_USE_LAZY_MODE=1 "
            "(PT_HPU_LAZY_MODE=1), with fp8 and log_straggler this one"
        )


def idle_options(config: Config, needed: str, remedy: str, names: Sequence[str]) -> Iterator[str]:
    """Yield a message for each option in `names` that differs from its default, for lack of what is `needed`."""
    for name in names:
        section, declared = options()[name]
        value = getattr(getattr(config, section), name)
        # an option given at its default changes nothing, and looks like one that is not given
        if value != declared.default:
            yield f"{name}={value} has no effect without {needed}; {remedy}, or leave it out"
