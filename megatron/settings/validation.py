"""Rules between options, and between options and the number of ranks.

Each `_check` yields a message for every broken rule: the values, the rule, the remedy.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from dataclasses import fields
from itertools import chain

from megatron.models.registry import family_of
from megatron.models.rules import check_family, check_model, check_ranks, check_tensor_parallel
from megatron.options.config import Config, ConfigError, batch_sizes, samples_after, sections
from megatron.options.data import DOCUMENT_ENDS, parse_data_path, parse_split
from megatron.options.dependents import RECOMPUTED, idle_options, idle_without
from megatron.options.flags import divisors
from megatron.options.model import MIN_FLEX_HEAD_SIZE
from megatron.options.optimizer import OptimizerConfig
from megatron.parallel.layout import parallel_batch_size
from megatron.plan.pipeline import waits_like_1f1b
from megatron.runtime.devices import DEVICES, find_device, known_chip, known_chips, parse_memory_gib, planned_device
from megatron.runtime.plugins import import_attribute
from megatron.settings.rules import check_fp8, check_fp8_device, check_partition, check_schedule
from megatron.tasks.registry import TASKS, load_task


def check(config: Config, world_size: int) -> list[str]:
    """Return a message for every broken rule. `idle` returns the options that break none, but have no effect."""
    return [
        *check_ranks(config, world_size),
        *check_tensor_parallel(config),
        *_check_engine(config),
        *check_partition(config),
        *check_schedule(config),
        *check_family(config),
        *check_model(config),
        *_check_precision(config),
        *check_fp8(config),
        *check_device(config),
        *_check_attention(config),
        *_check_kernels(config),
        *_check_rampup(config, world_size),
        *_check_learning_rate(config),
        *_check_data(config),
        *_check_task(config, world_size),
        *_check_best(config),
        *_check_tokenizer(config),
        *_check_end_of_document(config),
        *_check_loading(config),
        *_check_exports(config),
        *_check_logging(config, world_size),
        *_check_interludes(config),
        *_check_straggler(config),
        *_check_guard(config),
    ]


def idle(config: Config) -> list[str]:
    """Return a message for every option that has no effect, given the others of a valid config.

    Exempt are those that presets set for every use: save_interval, min_lr, adam_*, spike_*.
    """
    task = load_task(config)
    own = (config.training.task, *task.sections)
    others = [name for name in TASKS if name in sections().keys() - own]
    return [
        *idle_without(config),
        *chain.from_iterable(idle_options(config, f"task={other}", "choose that", _names(other)) for other in others),
        *task.idle(),
        *family_of(config).idle(config),
        *_idle_schedule(config),
    ]


def _idle_schedule(config: Config) -> Iterator[str]:
    if config.parallel.schedule == "zero-bubble" and waits_like_1f1b(config):
        yield (
            "pipeline_schedule=zero-bubble defers the gradients of linear layers' weights, but all of these are "
            "frozen, so stages wait as long as with 1f1b; leave pipeline_schedule out"
        )


def _names(section: str) -> list[str]:
    return [field.name for field in fields(sections()[section])]


def _check_engine(config: Config) -> Iterator[str]:
    optimizer, pp = config.optimizer, config.parallel.pipeline_model_parallel_size
    if not config.uses_pipeline and pp > 1:
        reason = "offload_optimizer" if optimizer.offload_optimizer else f"zero_stage={optimizer.zero_stage}"
        reason = "no_pipeline_parallel" if config.parallel.no_pipeline_parallel else reason
        yield (
            f"{reason} runs without a pipeline, but pipeline_model_parallel_size={pp}; set it to 1, or use zero_stage "
            "0 or 1 without offload and without no_pipeline_parallel"
        )
    if optimizer.offload_param and optimizer.zero_stage != 3:
        yield f"offload_param needs zero_stage=3, not {optimizer.zero_stage}; set zero_stage or turn it off"
    if optimizer.offload_optimizer and optimizer.zero_stage == 0:
        yield "offload_optimizer needs zero_stage 1, 2 or 3, not 0; set zero_stage or turn it off"
    yield from optimizer.optimizer_faults()


def _check_precision(config: Config) -> Iterator[str]:
    training = config.training
    if training.bf16 and training.fp16:
        yield "bf16 and fp16 are both on; turn one of them off"
    if training.grad_accum_dtype == "bf16" and not training.bf16:
        yield f"grad_accum_dtype=bf16 needs bf16, but the precision is {training.precision}; set fp32, or turn bf16 on"
    if training.grad_reduce_dtype not in (None, "fp32", training.precision):
        yield (
            f"grad_reduce_dtype={training.grad_reduce_dtype} must be fp32 or the precision of the run, "
            f"{training.precision}; change it, or unset it"
        )
    if training.fp16 and math.frexp(training.initial_loss_scale)[0] != 0.5:
        yield f"initial_loss_scale={training.initial_loss_scale} must be a power of two, such as 65536; change it"
    if training.fp16 and training.min_loss_scale > training.initial_loss_scale:
        yield (
            f"min_loss_scale={training.min_loss_scale} is above initial_loss_scale={training.initial_loss_scale}; "
            "lower it"
        )


def check_device(config: Config) -> Iterator[str]:
    """Yield a message for every broken rule of the device; none is checked before it is chosen (device=auto)."""
    model, device = config.model, config.parallel.device
    backend = model.attention_backend
    if device != "auto":
        record = find_device(device)
        if backend != "auto" and backend not in record.attention:
            able = " and ".join(other.name for other in DEVICES if backend in other.attention)
            yield f"attention_backend={backend} runs on {able} only, but device={device}; use auto or sdpa"
        if config.data.eval_graphs and not record.replays_evaluations:
            yield f"eval_graphs replays HPU graphs, but device={device}; leave it out"
    yield from check_fp8_device(config)
    memory = config.parallel.device_memory
    if memory is None:
        return
    if parse_memory_gib(memory) is None:
        yield (
            f"device_memory={memory!r} is neither a known device nor a number of GiB; use {', '.join(known_chips())}, "
            "or a number such as 80"
        )
    elif (known := known_chip(memory)) is not None and device not in ("auto", known[0].name):
        kind = known[0].name
        yield f"device_memory={memory} is that of a {kind} device, but device={device}; use device={kind}, or give GiB"


_FAST = "works with the causal mask alone"


def _packs_documents(config: Config) -> bool:
    try:
        return bool(load_task(config).data.packs_documents)
    except ConfigError:  # reported by the rules of the task
        return False


def _check_attention(config: Config) -> Iterator[str]:
    model, device = config.model, config.parallel.device
    # source: FusedSDPA.py of HabanaAI/gaudi-pytorch-bridge, which asserts is_causal there
    if model.use_fast_softmax and model.fused_sdpa_recompute and model.uses_fused_sdpa(planned_device(device)):
        if model.position_embedding_type == "alibi":
            yield f"use_fast_softmax {_FAST}, but position_embedding_type=alibi adds a bias to it; turn it off"
        if _packs_documents(config):
            yield f"use_fast_softmax {_FAST}, but documents or chats packed into a row add one to it; turn it off"
    if model.attention_backend == "flex" and model.attention_dropout > 0:
        yield (
            f"attention_backend=flex does not support dropout, but attention_dropout={model.attention_dropout}; "
            "set it to 0, or use sdpa"
        )
    if model.attention_backend == "flex" and model.head_size < MIN_FLEX_HEAD_SIZE:
        yield (
            f"attention_backend=flex takes heads of {MIN_FLEX_HEAD_SIZE} channels or more, but these have "
            f"{model.head_size}; use sdpa"
        )


def _check_kernels(config: Config) -> Iterator[str]:
    model, backend = config.model, config.model.attention_backend
    if model.kernels == "plain" and backend in ("flex", "fused_hpu"):
        yield f"kernels=plain attends by torch's SDPA, but attention_backend={backend}; use kernels=auto, or sdpa"
    unknown = sorted(config.training.recomputed_modules - RECOMPUTED)
    if unknown:
        names = ", ".join(sorted(RECOMPUTED))
        yield f"recompute_modules={' '.join(unknown)} does not name a part of a layer; use {names}"


def _check_rampup(config: Config, world_size: int) -> Iterator[str]:
    training, (dp, per_pass) = config.training, parallel_batch_size(config, world_size)
    if training.rampup_batch_size is None:
        return
    start, increment, samples = training.rampup_batch_size
    given = f"rampup_batch_size={start} {increment} {samples}"
    if start > training.global_batch_size:
        yield f"{given} starts above global_batch_size={training.global_batch_size}; start lower"
    elif (training.global_batch_size - start) % increment:
        yield (
            f"{given} never reaches global_batch_size={training.global_batch_size}: the difference "
            f"{training.global_batch_size - start} is not a multiple of the increment; change one of the three"
        )
    wrong = [size for size in batch_sizes(training)[:-1] if size % per_pass]
    if wrong:
        # every size is a multiple of the greatest common divisor of start and increment
        shared, left_over = divmod(math.gcd(start, increment), training.micro_batch_size)
        yield (
            f"{given} passes through {wrong[0]}, which is not a multiple of micro_batch_size x data-parallel size "
            f"= {training.micro_batch_size} x {dp} = {per_pass}; use multiples of {per_pass} for start and increment"
            + ("" if left_over else f", or a data-parallel size of {divisors(shared, shared)}")
        )


def _check_learning_rate(config: Config) -> Iterator[str]:
    optimizer = config.optimizer
    for name in ("lr_decay", "lr_warmup", "lr_wsd_decay"):
        yield from _check_length(optimizer, name)
    if optimizer.min_lr > optimizer.lr:
        yield f"min_lr={optimizer.min_lr} is above lr={optimizer.lr}; lower it"
    if optimizer.lr_warmup_init > optimizer.lr:
        yield f"lr_warmup_init={optimizer.lr_warmup_init} is above lr={optimizer.lr}; lower it"
    yield from _check_decay(config)
    if optimizer.override_opt_param_scheduler and optimizer.use_checkpoint_opt_param_scheduler:
        yield "override_opt_param_scheduler and use_checkpoint_opt_param_scheduler are both on; turn one of them off"
    yield from _check_weight_decay(config)


def _check_length(optimizer: OptimizerConfig, name: str) -> Iterator[str]:
    """Check that a length is given in one unit."""
    values = {f"{name}_{unit}": getattr(optimizer, f"{name}_{unit}", 0) for unit in ("samples", "iters", "fraction")}
    given = [f"{option}={value}" for option, value in values.items() if value]
    if len(given) > 1:
        yield f"{' and '.join(given)} are {'both' if len(given) == 2 else 'all'} given; keep one"


def _check_decay(config: Config) -> Iterator[str]:
    """Check that the parts of the schedule fit into its length, which the training has where it has none of its own."""
    training, optimizer = config.training, config.optimizer
    decay = optimizer.lr_decay_samples or samples_after(training, optimizer.lr_decay_iters or 0)
    decay = decay or training.train_samples or samples_after(training, training.train_iters or 0)
    warmup = optimizer.lr_warmup_samples or samples_after(training, optimizer.lr_warmup_iters)
    warmup = warmup or int((optimizer.lr_warmup_fraction or 0) * decay)
    if decay and warmup >= decay and optimizer.lr_decay_style != "constant":
        rule = f"the warm-up of {warmup} samples must be shorter than the decay of {decay} samples"
        yield f"{rule}; lower {optimizer.given_warmup}"
    if optimizer.lr_decay_style != "WSD":
        return
    last = optimizer.lr_wsd_decay_samples or (optimizer.lr_wsd_decay_iters or 0) * training.global_batch_size
    if not last:
        yield "lr_decay_style=WSD needs lr_wsd_decay_samples or lr_wsd_decay_iters; give one"
    elif warmup < decay < warmup + last:
        yield (
            f"the warm-up of {warmup} samples and WSD's last part of {last} do not fit into {decay}; "
            "shorten lr_wsd_decay_*"
        )


def _check_weight_decay(config: Config) -> Iterator[str]:
    optimizer, style = config.optimizer, config.optimizer.weight_decay_incr_style
    start, end = optimizer.start_weight_decay, optimizer.end_weight_decay
    if style == "constant":
        for name, value in (("start_weight_decay", start), ("end_weight_decay", end)):
            if value is not None:
                yield f"{name}={value} needs weight_decay_incr_style=linear or cosine, not constant; choose one"
    elif start is None or end is None:
        yield f"weight_decay_incr_style={style} needs start_weight_decay and end_weight_decay; give both"
    elif start > end:
        yield f"start_weight_decay={start} is above end_weight_decay={end}; the weight decay only grows: lower it"


def _check_data(config: Config) -> Iterator[str]:
    data = config.data
    try:
        parse_split(data.split)
    except ValueError:
        yield f"split={data.split!r} must be one to three proportions, not all zero, such as 949,50,1"
    if data.data_path and data.per_split:
        option = next(option for option, words in data.paths if words)
        yield f"data_path and {option} are both given; keep data_path and split, or give each split its own path"
    elif data.per_split and not data.train_data_path and not config.training.skip_train:
        yield "valid_data_path or test_data_path is given without train_data_path; give it, or data_path for all three"
    for option, words in [("data_path", data.data_path), *(data.paths if data.per_split else [])]:
        try:
            if words:
                parse_data_path(words)
        except ValueError as rule:
            yield f"{option}={' '.join(words)!r} {rule}"


def _check_task(config: Config, world_size: int) -> Iterator[str]:
    try:
        yield from load_task(config).faults(world_size)
    except ConfigError as error:
        yield from error.faults


def _check_best(config: Config) -> Iterator[str]:
    training = config.training
    patience, metric = training.early_stopping_patience, training.best_metric
    wanted = "keep_best" if config.checkpoint.keep_best else f"early_stopping_patience={patience}" if patience else ""
    if not wanted:
        return
    if training.skip_train:
        yield f"{wanted} is for a training, but skip_train evaluates alone; leave one out"
    elif config.data.eval_iters == 0:
        yield f"{wanted} compares validations, but eval_iters=0; set the number of global batches"
    with contextlib.suppress(ConfigError):  # reported by the check of the task
        names = ("loss", *load_task(config).objective.metrics)
        is_loss = metric == "loss" or (config.data.multiple_validation_sets and metric.startswith("lm_loss/"))
        if metric not in names and not is_loss:
            yield f"best_metric={metric} is not a metric of task={training.task}; give one of {', '.join(names)}"
        elif not is_loss and training.best_metric_mode is None:
            yield f"best_metric={metric} does not say which direction is better; give best_metric_mode, min or max"


def _check_tokenizer(config: Config) -> Iterator[str]:
    data = config.data
    if data.tokenizer_type == "GPT2BPETokenizer" and not (data.vocab_file and data.merge_file):
        yield "tokenizer_type=GPT2BPETokenizer needs vocab_file and merge_file; give both"
    needs_no_model = (None, "GPT2BPETokenizer", "NullTokenizer")
    if data.tokenizer_type not in needs_no_model and not data.tokenizer_model:
        yield f"tokenizer_type={data.tokenizer_type} needs tokenizer_model; give the file"


def _check_end_of_document(config: Config) -> Iterator[str]:
    data, vocab_size = config.data, config.model.vocab_size
    needs_eod = [name for name in DOCUMENT_ENDS if getattr(data, name)]
    if needs_eod and data.eod_token_id is None and data.tokenizer_type is None:
        yield f"{needs_eod[0]} needs the end-of-document id; give eod_token_id, or a tokenizer_type"
    if data.eod_token is not None and data.tokenizer_type is None:
        yield f"eod_token={data.eod_token} needs a tokenizer; give tokenizer_type, or eod_token_id"
    if data.eod_token is not None and data.eod_token_id is not None:
        yield f"eod_token={data.eod_token} and eod_token_id={data.eod_token_id} are both given; give one of them"
    if data.eod_token_id is not None and data.eod_token_id >= vocab_size:
        yield f"eod_token_id={data.eod_token_id} is outside vocab_size={vocab_size}; use an id below {vocab_size}"


def _check_loading(config: Config) -> Iterator[str]:
    checkpoint, skip_train = config.checkpoint, config.training.skip_train
    if skip_train and config.data.eval_iters == 0:
        yield "skip_train evaluates, but eval_iters=0; set the number of global batches"
    if skip_train and checkpoint.load is None and checkpoint.save is None:
        yield "skip_train evaluates a checkpoint, but load is not given; give its folder"
    evaluates_own = skip_train and checkpoint.save is not None
    if checkpoint.load is None and not evaluates_own:
        for name in ("finetune", "universal_checkpoint", "ckpt_step"):
            value = getattr(checkpoint, name)
            if value is not None and value is not False:
                yield f"{name}={value} is about the weights in load, which is not given; give a folder, or leave it out"
    if checkpoint.universal_checkpoint and checkpoint.ckpt_step is not None:
        yield (
            f"ckpt_step={checkpoint.ckpt_step} selects one of our own checkpoints, but universal_checkpoint is on; set "
            "load to the folder of that iteration instead"
        )


def _check_exports(config: Config) -> Iterator[str]:
    save, exports = config.checkpoint.save, config.checkpoint.save_hf
    if exports is None:
        return
    if save is None:
        yield (
            f"save_hf={exports} is exported from the checkpoints in save, which is not given; give a folder, with "
            "no_save_optim and keep_last=1 if only the exports are needed"
        )
    elif os.path.normpath(exports) == os.path.normpath(save):
        yield f"save_hf={exports} is the same folder as save; use another, such as a subfolder of it"


def _check_logging(config: Config, world_size: int) -> Iterator[str]:
    logging = config.logging
    start, end = logging.profile_step_start, logging.profile_step_end
    for name in ("profile", "profile_instructions"):
        if getattr(logging, name) and logging.results_dir is None:
            yield f"{name} writes its trace to results_dir, which is not given; give a folder, or turn {name} off"
    if start >= end:
        yield f"profile_step_end={end}, the step before which the trace ends, must be above profile_step_start={start}"
    ranks = " ".join(map(str, logging.profile_ranks))
    if not logging.profile_ranks or max(logging.profile_ranks) >= world_size:
        yield f"profile_ranks={ranks} must name ranks of this launch, which has {world_size}; use 0 to {world_size - 1}"
    for name in logging.callbacks:
        try:
            import_attribute("callbacks", name)
        except ConfigError as error:
            yield from error.faults


def _check_interludes(config: Config) -> Iterator[str]:
    """Check that the run trains and each stage is in one piece, as work between the steps needs."""
    logging, chunks = config.logging, config.parallel.num_virtual_stages_per_pipeline_rank
    given = {"generate_prompts": logging.generate_prompts, "lm_eval_tasks": " ".join(logging.lm_eval_tasks)}
    for name, value in given.items():
        if value and config.training.skip_train:
            yield f"{name}={value} is for a training, but skip_train evaluates alone; leave one out"
        if value and chunks > 1:
            verb = "generate from" if name == "generate_prompts" else "evaluate"
            yield (
                f"{name}={value} needs a pipeline stage in one piece, but num_virtual_stages_per_pipeline_rank="
                f"{chunks}; leave one out, or {verb} the run's checkpoints"
            )


def _check_straggler(config: Config) -> Iterator[str]:
    tp = config.parallel.tensor_model_parallel_size
    if not config.logging.log_straggler:
        return
    if config.optimizer.zero_stage == 3:
        yield (
            "log_straggler measures a rank's own work, but with zero_stage=3 every layer waits for the parameters of "
            "other ranks; turn it off"
        )
    if config.training.torch_compile and tp > 1:
        yield (
            f"log_straggler leaves out the waits within a layer that tensor_model_parallel_size={tp} brings, which it "
            "cannot see in layers compiled by torch_compile; turn one of the two off"
        )


def _check_guard(config: Config) -> Iterator[str]:
    guard, checkpoint = config.guard, config.checkpoint
    if guard.spike_action == "rollback" and checkpoint.save is None:
        yield "spike_action=rollback returns to a checkpoint of the run, but save is not given; give a folder"
    if guard.spike_action == "rollback" and checkpoint.no_save_optim:
        yield "spike_action=rollback needs the optimizer's state, but no_save_optim leaves it out; turn one of them off"
    minutes, timeout_s = config.parallel.distributed_timeout_minutes, config.guard.watchdog_timeout_s
    if timeout_s is not None and timeout_s > minutes * 60:
        yield (
            f"watchdog_timeout_s={timeout_s:g} is above distributed_timeout_minutes={minutes:g} ({minutes * 60:g} s), "
            "after which a collective fails without a diagnosis; lower it, or raise distributed_timeout_minutes"
        )
    if timeout_s is not None and 0 < timeout_s < 1:
        yield f"watchdog_timeout_s={timeout_s:g} leaves no time for a step; use 1 or more, or 0 for no watchdog"
