"""Flags of optimum-habana's scripts, and what becomes of each here: one table for each script.

A flag sets HL_* variables of run_sft.sh and run_dpo.sh, flags of megatron.train or megatron.generate, or what the
request of the script is made of. Where a flag is left out, the script's own default counts. `--help` and
docs/reference/gaudi_spawn_flags.md show the tables.
"""

# Long: the flags of five scripts, a row each.
from __future__ import annotations

from collections.abc import Mapping, Sequence

from megatron.options.dialect import (
    Entry,
    WrongValueError,
    honoured,
    is_true,
    no_effect,
    number,
    one_in,
    refused,
    sets,
    whole,
)


def _to(name: str, target: str, more: str = "", *, default: str | None = None) -> Entry:
    """Return a flag whose value is that of a variable or flag; `more`: further text of the table."""
    text = f"`{target}`{more}" if target.startswith(("HL_", "--")) else more
    return sets(name, target, text, default=default)


def _switch(name: str, target: str, on: str, off: str | None, text: str, default: str | None = None) -> Entry:
    """Return a switch that sets a target to a value; `off` None: nothing is set where it is off."""

    def convert(value: str) -> list[tuple[str, str]]:
        setting = on if is_true(value) else off
        return [] if setting is None else [(target, setting)]

    return Entry(name, "sets", text, convert, (target,), "switch", default)


def _variable(name: str, target: str, on: str = "1", off: str | None = "0", more: str = "") -> Entry:
    """Return a switch of an HL_* variable."""
    return _switch(name, target, on, off, f"`{target}={on}`{more}")


def _on_off(name: str, target: str, text: str, default: str | None = None) -> Entry:
    return _switch(name, target, "true", "false", text, default)


def _choice(
    name: str, choices: Mapping[str, Sequence[tuple[str, str]]], text: str, *, no: str = "", default: str | None = None
) -> Entry:
    check = one_in(choices, f"; {no}" if no else "")
    return Entry(name, "sets", text, lambda value: choices[check(value)], default=default)


_QUANTISED = "weights that other tools have quantised are not read; use --quantize_with_bnb"
_DATASETS = "only files are read; write the prompts to a .jsonl file, and use `tools/generate.py --input`"
_PROFILER = "text is generated without a profiler; leave it out"
_COMPILED = "text is generated without torch.compile"


def _steps(text: str) -> list[tuple[str, str]]:
    try:
        # transformers counts epochs where max_steps is not above 0
        return [("HL_TRAIN_ITERS", text)] if int(text) > 0 else [("by_epochs", "1")]
    except ValueError:
        raise WrongValueError("must be a whole number") from None


def _trains(text: str) -> list[tuple[str, str]]:
    if not is_true(text):
        raise WrongValueError("leaves nothing to do; leave it out")
    return []


def _epochs(text: str) -> str:
    try:
        number = float(text)
    except ValueError:
        # no number: refused below, as a fraction is
        number = 0.5
    if number < 1 or number != int(number):
        raise WrongValueError("must be a whole number, 1 or more; --max_steps ends a run within an epoch")
    return str(int(number))


_RATIO = number(lambda value: 0 <= value <= 1, "must be a number from 0 to 1")


def _buckets(text: str) -> list[tuple[str, str]]:
    try:
        count = int(text)
    except ValueError:
        raise WrongValueError("must be a whole number; -1 leaves the choice of buckets to the run") from None
    return [("HL_BUCKETING", "optimal"), ("--num-buckets", text)] if count > 0 else []


def _report(text: str) -> str:
    known = ("none", "tensorboard", "wandb", "mlflow")
    if unknown := [word for word in text.split() if word not in known]:
        raise WrongValueError(f"has {unknown[0]}, which is not supported; use none, tensorboard, wandb or mlflow")
    return text


_ADAMW = [("HL_OPTIMIZER", "adamw")]
_OPTIMIZERS = {
    "paged_adamw_32bit": [("HL_OPTIMIZER", "paged_adamw_32bit")],
    # one optimizer in several implementations; which kernel computes it is the device's choice
    **dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused"), _ADAMW),
    "sgd": [("HL_OPTIMIZER", "sgd")],
}
_SHAPES = {
    "cosine": [("--lr-decay-style", "cosine")],
    "linear": [("--lr-decay-style", "linear")],
    "constant_with_warmup": [("--lr-decay-style", "constant")],
    # transformers warms up under constant_with_warmup alone
    "constant": [("--lr-decay-style", "constant"), ("no_warmup", "1")],
    "inverse_sqrt": [("--lr-decay-style", "inverse-square-root")],
}
_VALIDATION = (
    "a validation needs its part of the data; leave it out, and set `HL_EVAL_ITERS` and `HL_EVAL_INTERVAL`, with "
    "`-- --split 949,50,1` at the end of the command"
)
_TOKEN = "tokens are the hub's own matter: `hf auth login`, or `HF_TOKEN`; leave it out"
_NOT_OF_DPO = "; dpo.py has no such flag and always uses the default"
_UPLOAD = "merge or convert the export with --push-to-hub NAME, or use `hf upload`; leave it out"


def _model_flags(model: str) -> tuple[Entry, ...]:
    return (
        _to("--model_name_or_path", "HL_MODEL", ": a folder, or a name on the hub", default=model),
        _to("--lora_r", "HL_LORA_RANK", default="8"),
        _to("--lora_alpha", "HL_LORA_ALPHA", default="16"),
        _to("--lora_dropout", "HL_LORA_DROPOUT", default="0.05"),
        sets(
            "--lora_target_modules",
            "HL_LORA_TARGET_MODULES",
            "`HL_LORA_TARGET_MODULES`; a name that the model lacks is named in a warning; left out, PEFT's own: "
            "`q_proj v_proj` for a Llama, `query_key_value` for a BLOOM, `c_attn` for a GPT-2",
            takes="words",
        ),
        refused("--token", _TOKEN),
        refused("--trust_remote_code", "code that comes with a model is never run; leave it out", "switch"),
    )


def _schedule_flags(*, rate: str, shape: str, warmup: str, optimizer: str, seed: str) -> list[Entry]:
    # of the two scripts dpo.py alone has this default, and its own name for the flag of the optimizer
    of_decay = "; dpo.py declares 0.05, but never uses it" if optimizer == "paged_adamw_32bit" else ""
    return [
        _to("--learning_rate", "HL_LR", default=rate),
        _choice("--lr_scheduler_type", _SHAPES, "`--lr-decay-style`", default=shape),
        sets("--warmup_steps", "warmup_steps", "`--lr-warmup-iters`; 0 under `constant`", whole(), default=warmup),
        _to("--weight_decay", "--weight-decay", of_decay, default="0.0"),
        _choice(
            "--optimizer_type" if optimizer == "paged_adamw_32bit" else "--optim",
            _OPTIMIZERS,
            "`HL_OPTIMIZER`; [paged AdamW](../guides/adapters.md#paged-adamw) on CUDA, AdamW elsewhere, with a warning",
            default=optimizer,
        ),
        _to("--seed", "--seed", default=seed),
        _to("--neftune_noise_alpha", "HL_NEFTUNE_NOISE_ALPHA"),
    ]


def _batch_flags(batch: str, accumulation: str) -> list[Entry]:
    return [
        sets(
            "--per_device_train_batch_size",
            "batch",
            "with `--gradient_accumulation_steps`, the samples of a data-parallel rank in a step; "
            "`HL_MAX_BATCH_LEN`: this many of the longest samples",
            whole(1),
            default=batch,
        ),
        sets(
            "--gradient_accumulation_steps",
            "accumulation",
            "a factor of the samples in a step (`HL_GBS`)",
            whole(1),
            default=accumulation,
        ),
        no_effect("--per_device_eval_batch_size", "a validation takes batches of the training's size"),
    ]


def _output_flags(folder: str | None, save: str, logging: str | None, note: str) -> list[Entry]:
    return [
        _to("--output_dir", "HL_RESULTS_DIR", ": in it checkpoints/ and hf_format/, the exports", default=folder),
        _to("--logging_steps", "HL_LOG_INTERVAL", default=logging),
        _to("--save_steps", "HL_SAVE_INTERVAL", default=save),
        _to("--save_total_limit", "--keep-last", f"; `none` keeps all{note}", default="none"),
        _to("--eval_steps", "HL_EVAL_INTERVAL", ", where `HL_EVAL_ITERS` is set"),
        sets(
            "--report_to",
            "report_to",
            "`none`; `tensorboard`, which is always written; `wandb`: `--wandb-project`; `mlflow`: "
            "`--mlflow-experiment`",
            _report,
            takes="words",
        ),
    ]


def _adam_flags(note: str = "") -> list[Entry]:
    """Settings of GaudiTrainingArguments; `note`: further text of the table."""
    return [
        _to("--adam_beta1", "--adam-beta1", note, default="0.9"),
        _to("--adam_beta2", "--adam-beta2", note, default="0.999"),
        # GaudiTrainingArguments' own: transformers has 1e-8
        _to("--adam_epsilon", "--adam-eps", note, default="1e-6"),
        _to("--max_grad_norm", "--clip-grad", note, default="1.0"),
    ]


def _graphs(name: str) -> Entry:
    text = "`--eval-graphs`, on HPU, where `HL_EVAL_ITERS` is set; else no effect"
    return _switch(name, "graphs", "1", "0", text)


def _deepspeed_flag() -> Entry:
    return _to(
        "--deepspeed",
        "deepspeed",
        "`--deepspeed-config`, and `--zero-stage`, `--offload-optimizer`, `--offload-param` as it says",
    )


SFT: tuple[Entry, ...] = (
    # model and data
    *_model_flags("meta-llama/Llama-2-7b-hf"),
    _to("--dataset_name", "dataset", "`HL_DATA`: a file, a folder, or a dataset on the hub"),
    sets("--subset", "subset", "a configuration or folder of `--dataset_name`, or `None`", default="data/finetune"),
    _to("--split", "split", "the files of that split in the folder", default="train"),
    honoured("--streaming", "files of any size are read in blocks, and mapped into memory as tokens"),
    no_effect("--shuffle_buffer", "each epoch shuffles all samples"),
    no_effect("--size_valid_set", "nothing is kept from training unless `-- --split` says so"),
    no_effect("--validation_split_percentage", "nothing is kept from training unless `-- --split` says so"),
    no_effect("--num_workers", "as many workers as cores tokenize"),
    no_effect("--dataset_num_proc", "as many workers as cores tokenize"),
    # samples
    Entry("--num_buckets", "sets", "`HL_BUCKETING=optimal` with `--num-buckets`; -1: `auto`", convert=_buckets),
    _switch("--use_peft", "use_peft", "True", "False", "False: no `HL_LORA_*`, the whole model is trained"),
    _to(
        "--max_seq_length",
        "HL_SEQ_LEN",
        ", the tokens of a sample; longer ones are treated by `--packing`",
        default="1024",
    ),
    Entry(
        "--packing",
        "honoured",
        "True: long samples are split (`HL_TOO_LONG=split`), False: cut (`truncate`). Either way samples are packed, "
        "none attends to another, and a step has as many",
        lambda text: [("packing", "1" if is_true(text) else "0")],
        takes="switch",
        default="True",
    ),
    honoured("--remove_unused_columns", "columns that a form of rows does not name are not read"),
    # schedule and length
    *_schedule_flags(rate="5e-5", shape="linear", warmup="0", optimizer="adamw_torch", seed="42"),
    sets("--warmup_ratio", "warmup_ratio", "`--lr-warmup-fraction`; `--warmup_steps` above 0 counts before it", _RATIO),
    *_adam_flags(),
    *_batch_flags("8", "1"),
    Entry("--max_steps", "sets", "`HL_TRAIN_ITERS`; -1: `--num_train_epochs` counts", convert=_steps),
    sets("--num_train_epochs", "HL_NUM_EPOCHS", "`HL_NUM_EPOCHS`", _epochs, default="3"),
    # results: a second command of the same folder goes on with its run
    *_output_flags(None, "500", None, ""),
    no_effect("--overwrite_output_dir", "the same command resumes its run; another run needs another folder", "switch"),
    honoured("--resume_from_checkpoint", "the same command resumes from the newest checkpoint of its folder", "value"),
    Entry("--do_train", "honoured", "training is all that sft.py does here", _trains, takes="switch"),
    refused("--do_eval", _VALIDATION, "switch"),
    refused("--do_predict", "use run_generation.py", "switch"),
    refused("--eval_strategy", _VALIDATION, accepts="no"),
    refused("--evaluation_strategy", _VALIDATION, accepts="no"),
    _choice(
        "--save_strategy",
        {"steps": [("saves", "steps")], "epoch": [("saves", "epoch")]},
        "`epoch`: `--save-at-epoch`, and no saves by `--save_steps`; `no` is refused, since the end of a run is "
        "always saved",
        no="the end of a run is always saved, so for fewer checkpoints raise --save_steps",
    ),
    honoured("--save_safetensors", "exports are safetensors"),
    no_effect("--logging_strategy", "`--logging_steps` counts"),
    no_effect("--logging_first_step", "`--logging_steps` counts", "switch"),
    _to("--logging_dir", "HL_TENSORBOARD_DIR"),
    _to("--run_name", "run_name", "`--wandb-exp-name` and `--mlflow-run-name`, where `--report_to` names them"),
    # precision, device and graphs
    _variable("--bf16", "HL_BF16"),
    refused("--fp16", "Gaudi trains in bfloat16; use --bf16", "switch"),
    _variable("--use_habana", "HL_DEVICE", "hpu", None, "; where `HL_DEVICE` is set, that counts"),
    _variable("--use_cpu", "HL_DEVICE", "cpu", None),
    _variable("--use_lazy_mode", "HL_USE_LAZY_MODE"),
    no_effect("--gaudi_config_name", "fused operators are chosen by the device"),
    _graphs("--use_hpu_graphs"),
    _graphs("--use_hpu_graphs_for_inference"),
    refused(
        "--use_hpu_graphs_for_training",
        "the passes of training are recorded in each step, and no graph of them is kept; leave it out, or use "
        "--use_hpu_graphs_for_inference for validations",
        "switch",
    ),
    no_effect("--throughput_warmup_steps", "each log line has the throughput of its own steps"),
    no_effect("--adjust_throughput", "each log line has the throughput of its own steps", "switch"),
    no_effect("--pipelining_fwd_bwd", "the schedule of the vendor's scripts marks the steps", "switch"),
    no_effect("--non_blocking_data_copy", "batches are always copied ahead", "switch"),
    # layout, memory and speed
    refused("--distribution_strategy", "DeepSpeed sums the gradients; leave it out", accepts="ddp"),
    _to("--context_parallel_size", "HL_CP"),
    refused("--minimize_memory", "use --gradient_checkpointing, or --deepspeed with stage 3", "switch"),
    _variable("--torch_compile", "HL_USE_TORCH_COMPILE"),
    refused("--torch_compile_backend", "each device has one backend; leave it out", accepts="hpu_backend"),
    honoured("--use_regional_compilation", "with `--torch_compile`, layers are compiled one by one"),
    refused("--use_compiled_autograd", "compiled autograd is not supported; leave it out", "switch"),
    honoured(
        "--use_zero3_leaf_promotion",
        "all ranks run the experts in one order, those without a token too, so that ZeRO-3 gathers them alike",
    ),
    _variable("--gradient_checkpointing", "HL_CKP_ACT"),
    _variable("--use_flash_attention", "HL_USE_FUSED_SDPA"),
    _variable("--flash_attention_recompute", "HL_USE_FUSED_SDPA_WITH_RECOMPUTE", more=", on HPU alone"),
    _variable("--flash_attention_fast_softmax", "HL_USE_FAST_SOFTMAX", more=", on HPU alone"),
    honoured("--flash_attention_causal_mask", "causal attention needs no mask tensor"),
    _variable("--fp8", "HL_FP8", more=", on HPU alone"),
    # loading, logging and other arguments of transformers
    _to("--dataloader_num_workers", "HL_NUM_WORKERS"),
    no_effect("--dataloader_pin_memory", "batches are always copied ahead", "switch"),
    no_effect("--dataloader_drop_last", "the last step of an epoch takes what is left", "switch"),
    no_effect("--ddp_find_unused_parameters", "DeepSpeed sums the gradients", "switch"),
    no_effect("--ddp_bucket_cap_mb", "`--deepspeed` sets DeepSpeed's buckets"),
    no_effect("--disable_tqdm", "there is no progress bar", "switch"),
    no_effect("--log_level", "the log line is always printed"),
    refused("--group_by_length", "samples are packed; leave it out", "switch"),
    refused("--load_best_model_at_end", "use HL_KEEP_BEST=1, which exports it", "switch"),
    _to("--label_smoothing_factor", "--label-smoothing-factor", "; validations measure the plain loss"),
    refused("--auto_find_batch_size", "HL_DRY_RUN=1 prints the memory of a batch; leave it out", "switch"),
    refused("--profiling_steps", "use HL_PROFILE and HL_PROFILE_STEPS", accepts="0"),
    refused("--profiling_warmup_steps", "use HL_PROFILE and HL_PROFILE_STEPS", accepts="0"),
    refused("--fsdp", "use --deepspeed with stage 3", "words"),
    refused("--push_to_hub", _UPLOAD, "switch"),
    refused("--hub_model_id", _UPLOAD),
    _deepspeed_flag(),
)

DPO: tuple[Entry, ...] = (
    # model, data and objective
    *_model_flags("../sft/results/final_checkpoint"),
    honoured(
        "--tokenizer_name_or_path", "the tokenizer is the one in the model's folder, where merging puts it", "value"
    ),
    _to(
        "--dataset",
        "dataset",
        "`HL_DATA`: a file, a folder, or a dataset on the hub; this flag is not dpo.py's, which has one dataset",
        default="lvwerra/stack-exchange-paired",
    ),
    _to("--beta", "HL_BETA", default="0.1"),
    _to("--loss_type", "HL_PREFERENCE_LOSS", ", by the same names; aot is not among them"),
    honoured("--force_use_ref_model", "the reference is the model without its adapters; there is no second copy"),
    _to("--max_prompt_length", "HL_MAX_PROMPT_LEN", default="512"),
    sets(
        "--max_length",
        "HL_SEQ_LEN",
        # a prompt with its answer has up to seq_length + 1 tokens: the last one is a target alone
        "`HL_SEQ_LEN`, which is one less; tokens count, where dpo.py counts characters, and long answers are cut",
        lambda text: str(whole(2)(text) - 1),
        default="1024",
    ),
    # schedule and results
    *_schedule_flags(rate="5e-4", shape="cosine", warmup="100", optimizer="paged_adamw_32bit", seed="0"),
    *_adam_flags(_NOT_OF_DPO),
    *_batch_flags("1", "4"),
    Entry("--max_steps", "sets", "`HL_TRAIN_ITERS`; -1: `--num_train_epochs`", convert=_steps, default="1000"),
    sets("--num_train_epochs", "HL_NUM_EPOCHS", "`HL_NUM_EPOCHS`, with `--max_steps -1`", _epochs),
    *_output_flags("./results", "100", "10", _NOT_OF_DPO),
    no_effect("--log_freq", "`--logging_steps` counts"),
    _variable("--gradient_checkpointing", "HL_CKP_ACT"),
    no_effect("--gradient_checkpointing_use_reentrant", "there is one kind of recomputation", "switch"),
    refused(
        "--sanity_check",
        "write the first 1000 pairs to a file and give it as --dataset; preprocess_preferences.py --show prints pairs",
        "switch",
    ),
    no_effect("--ignore_bias_buffers", "there is no DDP", "switch"),
    no_effect("--num_workers", "as many workers as cores tokenize"),
    _deepspeed_flag(),
)

GENERATION: tuple[Entry, ...] = (
    # model, prompts and the choice of tokens
    _to("--model_name_or_path", "--load", ": a folder, or a name on the hub"),
    sets("--peft_model", "adapter", "`--load`, with the model as `--lora-base`"),
    _to("--device", "--device"),
    _on_off(
        "--bf16", "bf16", "`--precision bf16`; left out: float32 on one rank, bfloat16 on several, as there", "False"
    ),
    sets("--prompt", "prompts", "`--prompt`; the script's own sentences are not there", takes="texts"),
    _to("--max_new_tokens", "--max-new-tokens", default="100"),
    _to(
        "--batch_size",
        "--batch-size",
        "; the script cuts or repeats the prompts to as many, here all count",
        default="1",
    ),
    _on_off("--do_sample", "sample", "draws; without it the most probable token or the beams are taken", "False"),
    _to("--temperature", "--temperature", ", with `--do_sample`; left out, the model's, else 1"),
    _to("--top_p", "--top-p", ", with `--do_sample`; left out, the model's, else 1"),
    _to("--top_k", "--top-k", ", with `--do_sample`; left out: all tokens"),
    _to("--num_beams", "--num-beams", default="1"),
    _to("--num_return_sequences", "--num-samples", default="1"),
    _to("--seed", "--seed", "; what is drawn differs", default="27"),
    _on_off("--ignore_eos", "--ignore-eos", "`--ignore-eos`; `--no-ignore_eos` stops at the end of a text", "True"),
    _on_off("--use_hpu_graphs", "--use-graphs", "`--use-graphs`, on HPU; else no effect"),
    _on_off("--use_chat_template", "--as-chat", "`--as-chat`: each prompt is a chat of its own, which is answered"),
    _on_off("--quantize_with_bnb", "nf4", "`--quantize-base nf4`"),
    # optimisations that always hold here
    honoured("--use_kv_cache", "keys and values are always kept"),
    honoured("--reuse_cache", "the cache is always allocated once and written in place"),
    honoured("--trim_logits", "the logits of the last token alone are always computed"),
    honoured("--bucket_internal", "lengths of the cache are always rounded up within a batch"),
    honoured("--use_flash_attention", "attention never holds a matrix of all positions"),
    honoured("--flash_attention_recompute", "nothing is kept for a backward pass"),
    honoured("--flash_attention_causal_mask", "attention is always causal"),
    honoured("--limit_hpu_graphs", "only the pass of a token is captured"),
    honoured("--clear_hpu_graphs_cache", "the graphs are freed with the process"),
    honoured("--reduce_recompile", "shapes are always fixed within a batch"),
    honoured("--local_rank", "the launcher numbers the ranks", "value"),
    # measurements, and kernels that the device chooses here
    no_effect("--warmup", "each text is generated once; `tools/generate.py --benchmark` measures"),
    no_effect("--n_iterations", "each text is generated once; `tools/generate.py --benchmark` measures"),
    no_effect("--bucket_size", "lengths are rounded up by a rule of this project"),
    no_effect("--attn_implementation", "the device chooses the kernel of attention"),
    no_effect("--attn_batch_split", "layers are not split by samples"),
    no_effect("--decode_attn_batch_split", "layers are not split by samples"),
    no_effect("--cache_size_limit", _COMPILED),
    no_effect("--const_serialization_path", "weights are read into the device"),
    no_effect("--use_flex_attention", "the device chooses the kernel of attention", "switch"),
    no_effect("--attn_softmax_bf16", "the softmax is computed in float32", "switch"),
    no_effect("--sdp_on_bf16", "the softmax is computed in float32", "switch"),
    no_effect("--flash_attention_fast_softmax", "the softmax is computed in float32", "switch"),
    no_effect("--verbose_workers", "rank 0 prints, and errors name their rank", "switch"),
    no_effect("--show_graphs_count", "the last line has the number of graphs", "switch"),
    no_effect("--input_embeds", "embeddings are part of the passes", "switch"),
    no_effect("--torch_compile", _COMPILED, "switch"),
    no_effect("--regional_compile", _COMPILED, "switch"),
    no_effect("--force_static_compile", _COMPILED, "switch"),
    no_effect("--dynamo_specialize_float", _COMPILED, "switch"),
    no_effect("--dynamo_allow_unspec_int_on_nn_module", _COMPILED, "switch"),
    # what would change the texts, and cannot be passed over
    refused("--dataset_name", _DATASETS),
    refused("--mlcommons_dataset", _DATASETS),
    refused("--column_name", _DATASETS),
    refused("--dataset_max_samples", _DATASETS, accepts="-1"),
    refused("--run_partial_dataset", _DATASETS, "switch"),
    refused("--book_source", "nothing is downloaded; give the text as --prompt", "switch"),
    refused("--output_dir", "use `-- --output FILE.jsonl` at the end of the command"),
    refused("--penalty_alpha", "contrastive search is not part of this project"),
    refused("--assistant_model", "speculative decoding is not part of this project"),
    refused("--bad_words", "tokens cannot be forbidden; leave it out", "words"),
    refused("--force_words", "tokens cannot be required; leave it out", "words"),
    refused("--simulate_dyn_prompt", "prompts keep their lengths; leave it out", "words"),
    refused(
        "--max_input_tokens",
        "prompts are read whole; shorten them",
        accepts="0 -1",
    ),
    refused(
        "--parallel_strategy",
        "ranks share each layer; leave it out",
        accepts="none tp",
    ),
    refused("--token", _TOKEN),
    refused("--model_revision", "write it behind the name: NAME@REVISION", accepts="main"),
    refused("--trust_remote_code", "code that comes with a model is never run; leave it out", "switch"),
    refused("--trust_remote_code_tokenizer", "code that comes with a model is never run; leave it out", "switch"),
    refused("--profiling_steps", _PROFILER, accepts="0"),
    refused("--profiling_warmup_steps", _PROFILER, accepts="0"),
    refused("--profiling_record_shapes", _PROFILER, "switch"),
    refused("--profile_whole_sequences", _PROFILER, "switch"),
    refused("--disk_offload", "weights are kept in the device's memory; use more ranks", "switch"),
    refused("--load_quantized_model_with_autogptq", _QUANTISED, "switch"),
    refused("--load_quantized_model_with_autoawq", _QUANTISED, "switch"),
    refused("--load_quantized_model_with_inc", _QUANTISED, "switch"),
    refused("--save_quantized_model_with_inc", _QUANTISED, "switch"),
    refused("--pt2e_save", _QUANTISED, "switch"),
    refused("--local_quantized_inc_model_path", _QUANTISED),
    refused("--saved_model_path", _QUANTISED, accepts="inc_quantized_model"),
    refused("--pt2e_path", _QUANTISED),
    refused("--pt2e_quant_dtype", _QUANTISED, accepts="fp8_143"),
)

MERGING: tuple[Entry, ...] = (
    sets("--base_model_name", "", "folder of the Hugging Face model"),
    sets("--adapter_model_name", "", "folder of the adapter, or of a run, whose newest export is taken"),
    sets("--output_name", "", "folder to write, new or empty; nothing is uploaded"),
)
"""Flags of merge_peft_adapter.py, which cli/merging/merge_peft_adapter.py reads itself."""

FINETUNE: tuple[Entry, ...] = (
    sets("--config-name", "name", "the YAML file, in the folder config beside the script, or beside it"),
    sets("--config-path", "path", "another folder than config, from the script's own"),
    sets("--config-dir", "dir", "another folder, from the current one"),
    honoured("key=value", "overrides a key of the file, as do `+key=value`, `++key=value` and `~key`"),
    refused("--multirun", "start a command for each value", "switch"),
    refused("--cfg", "`HL_DRY_RUN=1` in front prints what becomes of the file"),
)
"""Hydra's words of finetune.py."""

TABLES: dict[str, tuple[Entry, ...]] = {"sft": SFT, "dpo": DPO}
"""Scripts that train by flags."""
