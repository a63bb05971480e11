"""Flags of optimum-habana's scripts sft.py and dpo.py, and what becomes of each here.

One table for each script. A flag sets HL_* variables of run_sft.sh and run_dpo.sh or flags of megatron.train, is
honoured because it always holds here, has no effect and is noted, or is refused with the reason. Where a flag is left
out, the script's own default counts. spawn_requests.py reads command lines by these tables, and
docs/reference/gaudi_spawn_flags.md shows them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from megatron.launch.dialects.hl_variables import WrongValueError, one_of, whole_number

Setting = tuple[str, str]
"""Name and value: of an HL_* variable, of a flag of megatron.train, or of what spawn_requests.py joins with others."""
TRUE, FALSE = ("true", "t", "yes", "y", "1"), ("false", "f", "no", "n", "0")
"""Values of a switch, in any case; a switch alone is true."""


def is_true(text: str) -> bool:
    """Convert a switch. Raises WrongValueError."""
    if text.lower() not in (*TRUE, *FALSE):
        raise WrongValueError("must be True or False")
    return text.lower() in TRUE


@dataclass(frozen=True)
class SpawnFlag:
    """A flag of a script."""

    name: str
    outcome: Literal["sets", "honoured", "no effect", "refused"]
    text: str
    """Text of the table, in Markdown: the variable or flag that it sets, or the reason of the outcome."""
    takes: Literal["value", "switch", "words", "texts"] = "value"
    """`texts`: words that may hold blanks, quoted as in a shell."""
    settings: Callable[[str], list[Setting]] = lambda text: []
    """Returns what a value sets; several words are joined by spaces. Raises WrongValueError."""
    default: str | None = None
    """Value of the script where it is left out. None: what is the default here."""
    accepts: tuple[str, ...] = ()
    """Values of a refused flag that request nothing."""


def _to(name: str, target: str, more: str = "", *, default: str | None = None) -> SpawnFlag:
    """Flag whose value is that of a variable or flag; `more`: further text of the table."""
    text = f"`{target}`{more}" if target.startswith(("HL_", "--")) else more
    return SpawnFlag(name, "sets", text, settings=lambda value: [(target, value)], default=default)


def _switch(name: str, target: str, on: str, off: str | None, more: str = "", default: str | None = None) -> SpawnFlag:
    """Switch that sets a target to a value; `off` None: nothing is set where it is off."""

    def settings(text: str) -> list[Setting]:
        value = on if is_true(text) else off
        return [] if value is None else [(target, value)]

    shown = f"`{target}={on}`" if target.startswith("HL_") else f"`{target} {on}`"
    return SpawnFlag(name, "sets", shown + more, "switch", settings, default)


def _choice(
    name: str, choices: Mapping[str, Sequence[Setting]], text: str, *, no: str = "", default: str | None = None
) -> SpawnFlag:
    def settings(value: str) -> list[Setting]:
        if value not in choices:
            raise WrongValueError(f"must be {one_of(tuple(choices))}" + (f"; {no}" if no else ""))
        return list(choices[value])

    return SpawnFlag(name, "sets", text, settings=settings, default=default)


def _always(name: str, text: str, takes: Literal["value", "switch", "words"] = "switch") -> SpawnFlag:
    return SpawnFlag(name, "honoured", text, takes)


def _idle(name: str, text: str, takes: Literal["value", "switch", "words"] = "value") -> SpawnFlag:
    return SpawnFlag(name, "no effect", text, takes)


def _refused(
    name: str, text: str, takes: Literal["value", "switch", "words"] = "value", accepts: tuple[str, ...] = ()
) -> SpawnFlag:
    return SpawnFlag(name, "refused", text, takes, accepts=FALSE if takes == "switch" and not accepts else accepts)


def _count(name: str, target: str, text: str, *, default: str | None = None) -> SpawnFlag:
    """Whole number above 0, which a request is computed from."""

    def settings(value: str) -> list[Setting]:
        return [(target, str(whole_number(value, 1)))]

    return SpawnFlag(name, "sets", text, settings=settings, default=default)


def _steps(text: str) -> list[Setting]:
    try:
        return [("HL_TRAIN_ITERS", text)] if int(text) > 0 else [("by_epochs", "1")]
    except ValueError:
        raise WrongValueError("must be a whole number") from None


def _trains(text: str) -> list[Setting]:
    if not is_true(text):
        raise WrongValueError("leaves nothing to do; leave it out")
    return []


def _epochs(text: str) -> list[Setting]:
    try:
        number = float(text)
    except ValueError:
        number = 0.5
    if number < 1 or number != int(number):
        raise WrongValueError("must be a whole number, 1 or more; --max_steps ends a run within an epoch")
    return [("HL_NUM_EPOCHS", str(int(number)))]


def _warmup(text: str) -> list[Setting]:
    return [("--lr-warmup-fraction", "none"), ("--lr-warmup-iters", text)]  # a preset may have a fraction


def _max_length(text: str) -> list[Setting]:
    return [("HL_SEQ_LEN", str(whole_number(text, 2) - 1))]


def _buckets(text: str) -> list[Setting]:
    try:
        count = int(text)
    except ValueError:
        raise WrongValueError("must be a whole number; -1 leaves the choice of buckets to the run") from None
    return [("HL_BUCKETING", "optimal"), ("--num-buckets", text)] if count > 0 else []


def _report(text: str) -> list[Setting]:
    known = ("none", "tensorboard", "wandb")
    if unknown := [word for word in text.split() if word not in known]:
        raise WrongValueError(f"has {unknown[0]}, which is not supported; use {one_of(known)}")
    return [("report_to", text)]


_ADAMW = [("HL_OPTIMIZER", "adamw")]
_OPTIMIZERS = {
    "paged_adamw_32bit": [("HL_OPTIMIZER", "paged_adamw_32bit")],
    **dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused"), _ADAMW),
    "sgd": [("HL_OPTIMIZER", "sgd")],
}
_SHAPES = {
    "cosine": [("--lr-decay-style", "cosine")],
    "linear": [("--lr-decay-style", "linear")],
    "constant_with_warmup": [("--lr-decay-style", "constant")],
    "constant": [("--lr-decay-style", "constant"), ("--lr-warmup-fraction", "none"), ("--lr-warmup-iters", "0")],
    "inverse_sqrt": [("--lr-decay-style", "inverse-square-root")],
}
_VALIDATION = (
    "a validation needs its part of the data; leave it out, and set `HL_EVAL_ITERS` and `HL_EVAL_INTERVAL`, with "
    "`-- --split 949,50,1` at the end of the command"
)
_DOWNLOAD = "nothing is downloaded or uploaded; use `hf download` or `hf upload`, and leave it out"


def _model_flags(model: str) -> tuple[SpawnFlag, ...]:
    return (
        _to("--model_name_or_path", "HL_MODEL", ": a folder, or the hub name of a downloaded model", default=model),
        _to("--lora_r", "HL_LORA_RANK", default="8"),
        _to("--lora_alpha", "HL_LORA_ALPHA", default="16"),
        _to("--lora_dropout", "HL_LORA_DROPOUT", default="0.05"),
        SpawnFlag(
            "--lora_target_modules",
            "sets",
            "`HL_LORA_TARGET_MODULES`; a name that the model lacks is named in a warning; left out, PEFT's own: "
            "`q_proj v_proj` for a Llama, `query_key_value` for a BLOOM, `c_attn` for a GPT-2",
            "words",
            lambda text: [("HL_LORA_TARGET_MODULES", text)],
        ),
        _refused("--token", _DOWNLOAD),
        _refused("--trust_remote_code", "code that comes with a model is never run; leave it out", "switch"),
    )


def _schedule_flags(*, rate: str, shape: str, warmup: str, decay: str, optimizer: str, seed: str) -> list[SpawnFlag]:
    of_decay = "; dpo.py declares 0.05, but never uses it" if optimizer == "paged_adamw_32bit" else ""
    return [
        _to("--learning_rate", "HL_LR", default=rate),
        _choice("--lr_scheduler_type", _SHAPES, "`--lr-decay-style`", default=shape),
        SpawnFlag("--warmup_steps", "sets", "`--lr-warmup-iters`", settings=_warmup, default=warmup),
        _to("--weight_decay", "--weight-decay", of_decay, default=decay),
        _choice(
            "--optimizer_type" if optimizer == "paged_adamw_32bit" else "--optim",
            _OPTIMIZERS,
            "`HL_OPTIMIZER`; [paged AdamW](../guides/adapters.md#paged-adamw) on CUDA, AdamW elsewhere, with a warning",
            default=optimizer,
        ),
        _to("--seed", "--seed", default=seed),
        _to("--neftune_noise_alpha", "HL_NEFTUNE_NOISE_ALPHA"),
    ]


def _batch_flags(batch: str, accumulation: str) -> list[SpawnFlag]:
    return [
        _count(
            "--per_device_train_batch_size",
            "batch",
            "with `--gradient_accumulation_steps`, the samples of a data-parallel rank in a step; "
            "`HL_MAX_BATCH_LEN`: this many of the longest samples",
            default=batch,
        ),
        _count(
            "--gradient_accumulation_steps",
            "accumulation",
            "a factor of the samples in a step (`HL_GBS`)",
            default=accumulation,
        ),
        _idle("--per_device_eval_batch_size", "a validation takes batches of the training's size"),
    ]


def _output_flags(folder: str | None, save: str, logging: str | None) -> list[SpawnFlag]:
    return [
        _to("--output_dir", "HL_RESULTS_DIR", ": in it checkpoints/ and hf_format/, the exports", default=folder),
        _to("--logging_steps", "HL_LOG_INTERVAL", default=logging),
        _to("--save_steps", "HL_SAVE_INTERVAL", default=save),
        _to("--eval_steps", "HL_EVAL_INTERVAL", ", where `HL_EVAL_ITERS` is set"),
        SpawnFlag(
            "--report_to",
            "sets",
            "`none`; `tensorboard`, which is always written; `wandb`: `--wandb-project`",
            "words",
            _report,
        ),
    ]


def _adam_flags(note: str = "") -> list[SpawnFlag]:
    """Settings of GaudiTrainingArguments; `note`: further text of the table."""
    return [
        _to("--adam_beta1", "--adam-beta1", note, default="0.9"),
        _to("--adam_beta2", "--adam-beta2", note, default="0.999"),
        _to("--adam_epsilon", "--adam-eps", note, default="1e-6"),
        _to("--max_grad_norm", "--clip-grad", note, default="1.0"),
    ]


def _graphs(name: str) -> SpawnFlag:
    text = "`--eval-graphs`, on HPU, where `HL_EVAL_ITERS` is set; else no effect"
    return SpawnFlag(name, "sets", text, "switch", lambda value: [("graphs", "1" if is_true(value) else "0")])


def _deepspeed_flag() -> SpawnFlag:
    return _to(
        "--deepspeed",
        "deepspeed",
        "`--deepspeed-config`, and `--zero-stage`, `--offload-optimizer`, `--offload-param` as it says",
    )


SFT: tuple[SpawnFlag, ...] = (
    *_model_flags("meta-llama/Llama-2-7b-hf"),
    _to("--dataset_name", "dataset", "`HL_DATA`: a file, or the folder of a downloaded dataset; nothing is downloaded"),
    _to("--subset", "subset", "a folder in that of `--dataset_name`", default="data/finetune"),
    _to("--split", "split", "the files of that split in the folder", default="train"),
    _always("--streaming", "files of any size are read in blocks, and mapped into memory as tokens"),
    _idle("--shuffle_buffer", "each epoch shuffles all samples"),
    _idle("--size_valid_set", "nothing is kept from training unless `-- --split` says so"),
    _idle("--validation_split_percentage", "nothing is kept from training unless `-- --split` says so"),
    _idle("--num_workers", "as many workers as cores tokenize"),
    _idle("--dataset_num_proc", "as many workers as cores tokenize"),
    SpawnFlag("--num_buckets", "sets", "`HL_BUCKETING=optimal` with `--num-buckets`; -1: `auto`", settings=_buckets),
    SpawnFlag(
        "--use_peft",
        "sets",
        "False: no `HL_LORA_*`, the whole model is trained",
        "switch",
        lambda text: [("use_peft", str(is_true(text)))],
    ),
    _to(
        "--max_seq_length",
        "HL_SEQ_LEN",
        ", the tokens of a sample; longer ones are treated by `--packing`",
        default="1024",
    ),
    SpawnFlag(
        "--packing",
        "honoured",
        "True: long samples are split (`HL_TOO_LONG=split`), False: cut (`truncate`). Either way samples are packed, "
        "none attends to another, and a step has as many",
        "switch",
        lambda text: [("packing", "1" if is_true(text) else "0")],
        "True",
    ),
    _always("--remove_unused_columns", "columns that a form of rows does not name are not read"),
    *_schedule_flags(rate="5e-5", shape="linear", warmup="0", decay="0.0", optimizer="adamw_torch", seed="42"),
    _to("--warmup_ratio", "--lr-warmup-fraction"),
    *_adam_flags(),
    *_batch_flags("8", "1"),
    SpawnFlag("--max_steps", "sets", "`HL_TRAIN_ITERS`; -1: `--num_train_epochs` counts", settings=_steps),
    SpawnFlag("--num_train_epochs", "sets", "`HL_NUM_EPOCHS`", settings=_epochs, default="3"),
    *_output_flags(None, "500", None),
    _idle("--overwrite_output_dir", "the same command resumes its run; another run needs another folder", "switch"),
    _always("--resume_from_checkpoint", "the same command resumes from the newest checkpoint of its folder", "value"),
    SpawnFlag("--do_train", "honoured", "training is all that sft.py does here", "switch", _trains),
    _refused("--do_eval", _VALIDATION, "switch"),
    _refused("--do_predict", "use run_generation.py", "switch"),
    _refused("--eval_strategy", _VALIDATION, accepts=("no",)),
    _refused("--evaluation_strategy", _VALIDATION, accepts=("no",)),
    _choice(
        "--save_strategy",
        {"steps": [], "epoch": [("--save-at-epoch", "true")]},
        "`--save-at-epoch` for `epoch`",
        no="the end of a run is always saved, so for fewer checkpoints raise --save_steps",
    ),
    _to("--save_total_limit", "--keep-last"),
    _always("--save_safetensors", "exports are safetensors"),
    _idle("--logging_strategy", "`--logging_steps` counts"),
    _idle("--logging_first_step", "`--logging_steps` counts", "switch"),
    _to("--logging_dir", "HL_TENSORBOARD_DIR"),
    _to("--run_name", "run_name", "`--wandb-exp-name`, where `--report_to` names wandb"),
    _switch("--bf16", "HL_BF16", "1", "0"),
    _refused("--fp16", "Gaudi trains in bfloat16; use --bf16", "switch"),
    _switch("--use_habana", "HL_DEVICE", "hpu", None, "; where `HL_DEVICE` is set, that counts"),
    _switch("--use_cpu", "HL_DEVICE", "cpu", None),
    _switch("--use_lazy_mode", "HL_USE_LAZY_MODE", "1", "0"),
    _idle("--gaudi_config_name", "fused operators are chosen by the device"),
    _graphs("--use_hpu_graphs"),
    _graphs("--use_hpu_graphs_for_inference"),
    _refused(
        "--use_hpu_graphs_for_training",
        "the passes of training are recorded in each step, and no graph of them is kept; leave it out, or use "
        "--use_hpu_graphs_for_inference for validations",
        "switch",
    ),
    _idle("--throughput_warmup_steps", "each log line has the throughput of its own steps"),
    _idle("--adjust_throughput", "each log line has the throughput of its own steps", "switch"),
    _idle("--pipelining_fwd_bwd", "the schedule of the vendor's scripts marks the steps", "switch"),
    _idle("--non_blocking_data_copy", "batches are always copied ahead", "switch"),
    _refused("--distribution_strategy", "DeepSpeed sums the gradients; leave it out", accepts=("ddp",)),
    _refused("--context_parallel_size", "use HL_TP=N and HL_SEQ_PARALLEL=1 instead", accepts=("1",)),
    _refused("--minimize_memory", "use --gradient_checkpointing, or --deepspeed with stage 3", "switch"),
    _switch("--torch_compile", "HL_USE_TORCH_COMPILE", "1", "0"),
    _refused("--torch_compile_backend", "each device has one backend; leave it out", accepts=("hpu_backend",)),
    _always("--use_regional_compilation", "with `--torch_compile`, layers are compiled one by one"),
    _refused("--use_compiled_autograd", "compiled autograd is not supported; leave it out", "switch"),
    _refused("--use_zero3_leaf_promotion", "mixture-of-experts models are not supported; leave it out", "switch"),
    _switch("--gradient_checkpointing", "HL_CKP_ACT", "1", "0"),
    _switch("--use_flash_attention", "HL_USE_FUSED_SDPA", "1", "0"),
    _switch("--flash_attention_recompute", "HL_USE_FUSED_SDPA_WITH_RECOMPUTE", "1", "0", ", on HPU alone"),
    _switch("--flash_attention_fast_softmax", "HL_USE_FAST_SOFTMAX", "1", "0", ", on HPU alone"),
    _always("--flash_attention_causal_mask", "causal attention needs no mask tensor"),
    _switch("--fp8", "HL_FP8", "1", "0", ", on HPU alone"),
    _to("--dataloader_num_workers", "HL_NUM_WORKERS"),
    _idle("--dataloader_pin_memory", "batches are always copied ahead", "switch"),
    _idle("--dataloader_drop_last", "the last step of an epoch takes what is left", "switch"),
    _idle("--ddp_find_unused_parameters", "DeepSpeed sums the gradients", "switch"),
    _idle("--ddp_bucket_cap_mb", "`--deepspeed` sets DeepSpeed's buckets"),
    _idle("--disable_tqdm", "there is no progress bar", "switch"),
    _idle("--log_level", "the log line is always printed"),
    _refused("--group_by_length", "samples are packed; leave it out", "switch"),
    _refused("--load_best_model_at_end", "use HL_KEEP_BEST=1, which exports it", "switch"),
    _to("--label_smoothing_factor", "--label-smoothing-factor", "; validations measure the plain loss"),
    _refused("--auto_find_batch_size", "HL_DRY_RUN=1 prints the memory of a batch; leave it out", "switch"),
    _refused("--profiling_steps", "use HL_PROFILE and HL_PROFILE_STEPS", accepts=("0",)),
    _refused("--profiling_warmup_steps", "use HL_PROFILE and HL_PROFILE_STEPS", accepts=("0",)),
    _refused("--fsdp", "use --deepspeed with stage 3", "words"),
    _refused("--push_to_hub", _DOWNLOAD, "switch"),
    _refused("--hub_model_id", _DOWNLOAD),
    _deepspeed_flag(),
)

DPO: tuple[SpawnFlag, ...] = (
    *_model_flags("../sft/results/final_checkpoint"),
    _always(
        "--tokenizer_name_or_path", "the tokenizer is the one in the model's folder, where merging puts it", "value"
    ),
    _to(
        "--dataset",
        "dataset",
        "`HL_DATA`: a file, or the folder of a downloaded dataset; this flag is not dpo.py's, which has one dataset",
        default="lvwerra/stack-exchange-paired",
    ),
    _to("--beta", "HL_BETA", default="0.1"),
    _to("--loss_type", "HL_PREFERENCE_LOSS", ", by the same names; aot is not among them"),
    _always("--force_use_ref_model", "the reference is the model without its adapters; there is no second copy"),
    _to("--max_prompt_length", "HL_MAX_PROMPT_LEN", default="512"),
    SpawnFlag(
        "--max_length",
        "sets",
        "`HL_SEQ_LEN`, which is one less; tokens count, where dpo.py counts characters, and long answers are cut",
        settings=_max_length,
        default="1024",
    ),
    *_schedule_flags(rate="5e-4", shape="cosine", warmup="100", decay="0.0", optimizer="paged_adamw_32bit", seed="0"),
    *_adam_flags("; dpo.py has no such flag and always uses the default"),
    *_batch_flags("1", "4"),
    SpawnFlag("--max_steps", "sets", "`HL_TRAIN_ITERS`; -1: `--num_train_epochs`", settings=_steps, default="1000"),
    SpawnFlag("--num_train_epochs", "sets", "`HL_NUM_EPOCHS`, with `--max_steps -1`", settings=_epochs),
    *_output_flags("./results", "100", "10"),
    _idle("--log_freq", "`--logging_steps` counts"),
    _switch("--gradient_checkpointing", "HL_CKP_ACT", "1", "0"),
    _idle("--gradient_checkpointing_use_reentrant", "there is one kind of recomputation", "switch"),
    _refused(
        "--sanity_check",
        "write the first 1000 pairs to a file and give it as --dataset; preprocess_preferences.py --show prints pairs",
        "switch",
    ),
    _idle("--ignore_bias_buffers", "there is no DDP", "switch"),
    _idle("--num_workers", "as many workers as cores tokenize"),
    _deepspeed_flag(),
)

TABLES: dict[str, tuple[SpawnFlag, ...]] = {"sft": SFT, "dpo": DPO}
