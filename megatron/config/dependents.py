"""Options that have no effect without another one, by what they need."""

SAVING = (
    "save_interval_in_mins",
    "save_samples",
    "save_at_epoch",
    "async_save",
    "keep_last",
    "save_retain_interval",
    "no_save_optim",
    "verify_checkpoint",
)
LOADING = (
    "ckpt_step",
    "load_fallback",
    "universal_checkpoint",
    "finetune",
    "no_load_optim",
    "no_load_rng",
    "allow_data_change",
)
LOSS_SCALING = ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")
WSD_DECAY = ("lr_wsd_decay_samples", "lr_wsd_decay_iters", "lr_wsd_decay_style")
ROPE_SCALING = ("rope_scaling_low_freq_factor", "rope_scaling_high_freq_factor", "rope_scaling_original_length")
RECOMPUTED = frozenset({"core_attn", "layernorm", "mlp", "mlp_act"})
TRACING = ("profile_step_start", "profile_step_end")
PROFILING = (
    "profile_ranks",
    "pytorch_profiler_collect_shapes",
    "pytorch_profiler_collect_callstack",
)
TIKTOKEN = ("tiktoken_pattern", "tiktoken_num_special_tokens")
WANDB = ("wandb_entity", "wandb_exp_name", "wandb_save_dir")
