"""Rules between options, and between options and the number of ranks.

Each `_check` yields a message for every broken rule: the values, the rule, the remedy.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import fields
from itertools import chain

from megatron.models.registry import family_of
from megatron.models.rules import check_experts_of_copies, check_layout, check_model
from megatron.options.config import Config, ConfigError, ModelConfig, batch_sizes, broken, samples_after, sections
from megatron.options.data import DOCUMENT_ENDS, parse_data_path, parse_split
from megatron.options.dependents import idle_options, idle_without
from megatron.options.flags import divisors
from megatron.options.optimizer import OptimizerConfig
from megatron.options.outputs import account_fault
from megatron.options.plugins import import_attribute
from megatron.parallel.layout import parallel_batch_size
from megatron.parallel.shards import declared_shards
from megatron.plan.pipeline import waits_like_1f1b
from megatron.plan.rates.files import rates_faults
from megatron.runtime.alerts import alert_faults
from megatron.settings import rules
from megatron.tasks.registry import TASKS, load_task


def check(config: Config, world_size: int) -> list[str]:
    """Return a message for every broken rule. `idle` returns the options that break none, but have no effect."""
    return [
        *check_layout(config, world_size),
        *rules.check_engine(config),
        *rules.check_replicas(config, world_size),
        *rules.check_recheck(config, world_size),
        *rules.check_partition(config),
        *rules.check_schedule(config),
        *check_model(config),
        *rules.check_precision(config),
        *rules.check_fp8(config),
        *rules.check_device(config),
        *rules.check_widths(config),
        *rules.check_attention(config),
        *rules.check_kernels(config),
        *_check_layer_graphs(config),
        *_check_rampup(config, world_size),
        *_check_learning_rate(config),
        *_check_data(config),
        *_check_task(config, world_size),
        *_check_best(config),
        *_check_tokenizer(config),
        *_check_end_of_document(config),
        *_check_loading(config),
        *_check_extension(config),
        *_check_exports(config),
        *_check_logging(config, world_size),
        *_check_interludes(config),
        *rules.check_straggler(config),
        *rules.check_kept_ranks(config),
        *_check_guard(config),
    ]


def idle(config: Config) -> list[str]:
    """Return a message for every option that has no effect, given the others of a valid config.

    Exempt are those that presets set for every use: save_interval, min_lr, adam_*, spike_*.
    """
    task = load_task(config)
    own = (config.training.task, *task.sections)
    # options of a task that is not chosen
    others = [name for name in TASKS if name in sections().keys() - own]
    return [
        *idle_without(config),
        *chain.from_iterable(idle_options(config, f"task={other}", "choose that", _names(other)) for other in others),
        *task.idle(),
        *family_of(config).idle(config),
        *_idle_schedule(config),
        *_idle_rate(config),
    ]


def _idle_rate(config: Config) -> Iterator[str]:
    """Yield a message where word embedding and output layer, which have a rate of their own, are not trained."""
    rate = config.optimizer.decoupled_lr
    if rate is None or config.training.skip_train:
        return
    with contextlib.suppress(ConfigError):  # reported by `check`
        shards = declared_shards(family_of(config).layers(config)).values()
        if not any(shard.vocabulary and shard.trained and not shard.added for shard in shards):
            yield (
                f"decoupled_lr={rate} has no effect, as word embedding and output layer are not trained; train them "
                "(lora_modules_to_save, freeze), or leave it out"
            )


def _idle_schedule(config: Config) -> Iterator[str]:
    if config.parallel.schedule == "zero-bubble" and waits_like_1f1b(config):
        yield (
            "pipeline_schedule=zero-bubble defers the gradients of linear layers' weights, but all of these are "
            "frozen, so stages wait as long as with 1f1b; leave pipeline_schedule out"
        )


def _names(section: str) -> list[str]:
    return [field.name for field in fields(sections()[section])]


def _check_rampup(config: Config, world_size: int) -> Iterator[str]:
    training, (dp, per_pass) = config.training, parallel_batch_size(config, world_size)
    if training.rampup_batch_size is None:
        return
    start, increment, samples = training.rampup_batch_size
    given, size = f"rampup_batch_size={start} {increment} {samples}", training.global_batch_size
    if start > size:
        yield f"{given} starts above global_batch_size={size}; start lower"
    # Megatron's microbatch calculator demands it too
    elif (size - start) % increment:
        yield (
            f"{given} never reaches global_batch_size={size}: the difference {size - start} is not a multiple of the "
            "increment; change one of the three"
        )
    wrong = [size for size in batch_sizes(training)[:-1] if size % per_pass]
    if wrong:
        # every size is a multiple of the greatest common divisor of start and increment
        shared, left_over = divmod(math.gcd(start, increment), training.micro_batch_size)
        other_size = "" if left_over else f", or a data-parallel size of {divisors(shared, shared)}"
        yield (
            f"{given} passes through {wrong[0]}, which is not a multiple of micro_batch_size x data-parallel size = "
            f"{training.micro_batch_size} x {dp} = {per_pass}; use multiples of {per_pass} for start and increment"
            f"{other_size}"
        )


def _check_learning_rate(config: Config) -> Iterator[str]:
    optimizer = config.optimizer
    for name in ("lr_decay", "lr_warmup", "lr_wsd_decay"):
        yield from _check_length(optimizer, name)
    for name in ("min_lr", "lr_warmup_init"):
        if getattr(optimizer, name) > optimizer.lr:
            yield f"{name}={getattr(optimizer, name)} is above lr={optimizer.lr}; lower it"
    yield from _check_decoupled_rate(optimizer)
    yield from _check_decay(config)
    if optimizer.override_opt_param_scheduler and optimizer.use_checkpoint_opt_param_scheduler:
        yield "override_opt_param_scheduler and use_checkpoint_opt_param_scheduler are both on; turn one of them off"
    yield from _check_weight_decay(config)


def _check_decoupled_rate(optimizer: OptimizerConfig) -> Iterator[str]:
    peak = optimizer.decoupled_lr
    if peak is None:
        return
    lowest = "min_lr" if optimizer.decoupled_min_lr is None else "decoupled_min_lr"
    for name in (lowest, "lr_warmup_init"):
        if getattr(optimizer, name) > peak:
            yield f"{name}={getattr(optimizer, name)} is above decoupled_lr={peak}; lower it, or give decoupled_min_lr"


def _check_length(optimizer: OptimizerConfig, name: str) -> Iterator[str]:
    """Check that a length is given in one unit."""
    # not every length can be given in every unit
    values = {f"{name}_{unit}": getattr(optimizer, f"{name}_{unit}", 0) for unit in ("samples", "iters", "fraction")}
    given = [f"{option}={value}" for option, value in values.items() if value]
    # the schedule takes the first that is given, so that the others would be ignored in silence
    if len(given) > 1:
        how_many = "both" if len(given) == 2 else "all"
        yield f"{' and '.join(given)} are {how_many} given; keep one"


def _check_decay(config: Config) -> Iterator[str]:
    """Check that the parts of the schedule fit into its length."""
    training, optimizer = config.training, config.optimizer

    # 0 is the default of a length, and means that it is not given
    def first_given(*lengths: float | None) -> int:
        return int(next(filter(None, lengths), 0))

    decay = first_given(
        optimizer.lr_decay_samples,
        samples_after(training, optimizer.lr_decay_iters or 0),
        # a schedule without a length of its own is as long as the training
        training.train_samples,
        samples_after(training, training.train_iters or 0),
    )
    warmup = first_given(
        optimizer.lr_warmup_samples,
        samples_after(training, optimizer.lr_warmup_iters),
        (optimizer.lr_warmup_fraction or 0) * decay,
    )
    # the constant style has no decay that a long warm-up would leave no room for
    if decay and warmup >= decay and optimizer.lr_decay_style != "constant":
        rule = f"the warm-up of {warmup} samples must be shorter than the decay of {decay} samples"
        yield f"{rule}; lower {optimizer.given_warmup}"
    if optimizer.lr_decay_style != "WSD":
        return
    # in whole global batches, as the schedule counts this part: a ramp-up is over by then
    last = first_given(optimizer.lr_wsd_decay_samples, (optimizer.lr_wsd_decay_iters or 0) * training.global_batch_size)
    if not last:
        yield "lr_decay_style=WSD needs lr_wsd_decay_samples or lr_wsd_decay_iters; give one"
    # a warm-up that is too long by itself was reported above
    elif warmup < decay < warmup + last:
        yield (
            f"the warm-up of {warmup} samples and WSD's last part of {last} do not fit into {decay}; "
            "shorten lr_wsd_decay_*"
        )


def _check_weight_decay(config: Config) -> Iterator[str]:
    style = config.optimizer.weight_decay_incr_style
    start, end = config.optimizer.start_weight_decay, config.optimizer.end_weight_decay
    if style == "constant":
        needed = "needs weight_decay_incr_style=linear or cosine, not constant; choose one"
        yield from broken(
            (start is not None, f"start_weight_decay={start} {needed}"),
            (end is not None, f"end_weight_decay={end} {needed}"),
        )
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
    # an evaluation alone reads no training data
    elif data.per_split and not data.train_data_path and not config.training.skip_train:
        yield "valid_data_path or test_data_path is given without train_data_path; give it, or data_path for all three"
    paths = {"data_path": data.data_path, **dict(data.paths)}
    for option, words in paths.items():
        try:
            if words:
                parse_data_path(words)
        except ValueError as rule:
            yield f"{option}={' '.join(words)!r} {rule}"


def _check_task(config: Config, world_size: int) -> Iterator[str]:
    try:
        # a task that cannot be loaded is one fault among the others
        yield from load_task(config).faults(world_size)
    except ConfigError as error:
        yield from error.faults


def _check_best(config: Config) -> Iterator[str]:
    training = config.training
    patience, metric = training.early_stopping_patience, training.best_metric
    if not config.compares_validations:
        return
    wanted = "keep_best" if config.checkpoint.keep_best else f"early_stopping_patience={patience}"
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
    if data.tokenizer_type == "GPT2BPETokenizer":
        if not (data.vocab_file and data.merge_file):
            yield "tokenizer_type=GPT2BPETokenizer needs vocab_file and merge_file; give both"
    # NullTokenizer reads ids that were made elsewhere, and has no file
    elif data.tokenizer_type not in (None, "NullTokenizer") and not data.tokenizer_model:
        yield f"tokenizer_type={data.tokenizer_type} needs tokenizer_model; give the file"


def _check_end_of_document(config: Config) -> list[str]:
    data, vocab_size = config.data, config.model.vocab_size
    token, number, has_no_tokenizer = data.eod_token, data.eod_token_id, data.tokenizer_type is None
    needs_eod = next((name for name in DOCUMENT_ENDS if getattr(data, name)), None)
    return broken(
        (
            needs_eod and number is None and has_no_tokenizer,
            f"{needs_eod} needs the end-of-document id; give eod_token_id, or a tokenizer_type",
        ),
        (
            token is not None and has_no_tokenizer,
            f"eod_token={token} needs a tokenizer; give tokenizer_type, or eod_token_id",
        ),
        (
            token is not None and number is not None,
            f"eod_token={token} and eod_token_id={number} are both given; give one of them",
        ),
        (
            number is not None and number >= vocab_size,
            f"eod_token_id={number} is outside vocab_size={vocab_size}; use an id below {vocab_size}",
        ),
    )


def _check_loading(config: Config) -> Iterator[str]:
    checkpoint, skip_train = config.checkpoint, config.training.skip_train
    has_nothing = checkpoint.load is None and checkpoint.save is None
    yield from broken(
        (
            skip_train and config.data.eval_iters == 0,
            "skip_train evaluates, but eval_iters=0; set the number of global batches",
        ),
        (
            checkpoint.upcycle and config.lora.lora_rank is not None,
            f"upcycle makes a new model, and lora_rank={config.lora.lora_rank} trains adapters of one that is stored; "
            "upcycle first, then train adapters of the result",
        ),
        (
            skip_train and has_nothing,
            "skip_train evaluates a checkpoint, but load is not given; give its folder",
        ),
    )
    # without `load` the run in `save` is evaluated
    evaluates_own = skip_train and checkpoint.save is not None
    if checkpoint.load is None and not evaluates_own:
        for name in ("finetune", "upcycle", "extend_context", "universal_checkpoint", "ckpt_step"):
            value = getattr(checkpoint, name)
            if value is not None and value is not False:
                yield f"{name}={value} is about the weights in load, which is not given; give a folder, or leave it out"
    if checkpoint.universal_checkpoint and checkpoint.ckpt_step is not None:
        yield (
            f"ckpt_step={checkpoint.ckpt_step} selects one of our own checkpoints, but universal_checkpoint is on; set "
            "load to the folder of that iteration instead"
        )


def _check_extension(config: Config) -> list[str]:
    extends, encoding = config.checkpoint.extend_context, config.model.position_embedding_type
    return broken(
        (
            extends and config.checkpoint.upcycle,
            "upcycle and extend_context each start from another model than the run's; do one after the other",
        ),
        (
            extends and encoding != "rope",
            f"extend_context changes rotary positions, but position_embedding_type={encoding}: a learned table has "
            "no rows for longer texts, and ALiBi needs no option to read them; leave it out",
        ),
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
    # by spelling alone, since neither folder has to be there yet
    elif os.path.normpath(exports) == os.path.normpath(save):
        yield f"save_hf={exports} is the same folder as save; use another, such as a subfolder of it"


def _check_logging(config: Config, world_size: int) -> Iterator[str]:
    logging = config.logging
    if logging.rates is not None:
        yield from rates_faults(logging.rates, config.parallel.device)
    start, end = logging.profile_step_start, logging.profile_step_end
    for name in ("profile", "profile_instructions"):
        if getattr(logging, name) and logging.results_dir is None:
            yield f"{name} writes its trace to results_dir, which is not given; give a folder, or turn {name} off"
    if start >= end:  # no step would be traced
        yield f"profile_step_end={end}, the step before which the trace ends, must be above profile_step_start={start}"
    ranks = " ".join(map(str, logging.profile_ranks))
    if not logging.profile_ranks or max(logging.profile_ranks) >= world_size:
        yield f"profile_ranks={ranks} must name ranks of this launch, which has {world_size}; use 0 to {world_size - 1}"
    if fault := account_fault("mlflow_tracking_uri", logging.mlflow_tracking_uri or ""):
        yield fault
    for pair in logging.mlflow_tags:
        if not pair.partition("=")[0] or "=" not in pair:
            yield f"mlflow_tags={pair} is not NAME=VALUE; write it so"
    yield from alert_faults(logging.alert_command, logging.alert_webhook)
    yield from _prometheus_faults(logging.prometheus_file)
    yield from _plugin_faults("callbacks", logging.callbacks)
    yield from _plugin_faults("trackers", logging.trackers)


def _prometheus_faults(file: str | None) -> Iterator[str]:
    if file is not None and not file.endswith(".prom"):
        yield f"prometheus_file={file} must end with .prom: node_exporter reads no other file; name it so"


def _plugin_faults(option: str, names: Sequence[str]) -> Iterator[str]:
    for name in names:
        try:
            # imported now, so that a misspelt name is a fault beside the others and does not end a run that has begun
            import_attribute(option, name)
        except ConfigError as error:
            yield from error.faults


def _check_interludes(config: Config) -> Iterator[str]:
    """Check that the run trains and each stage is in one piece, as work between the steps needs."""
    logging, chunks = config.logging, config.parallel.num_virtual_stages_per_pipeline_rank
    for name, value, verb in (
        ("generate_prompts", logging.generate_prompts, "generate from"),
        ("lm_eval_tasks", " ".join(logging.lm_eval_tasks), "evaluate"),
    ):
        if not value:
            continue
        yield from check_experts_of_copies(config, f"{name}={value}")
        if config.training.skip_train:
            yield f"{name}={value} is for a training, but skip_train evaluates alone; leave one out"
        if chunks > 1:
            yield (
                f"{name}={value} needs a pipeline stage in one piece, but num_virtual_stages_per_pipeline_rank="
                f"{chunks}; leave one out, or {verb} the run's checkpoints"
            )


def _check_guard(config: Config) -> Iterator[str]:
    rolls_back = config.guard.spike_action == "rollback"
    yield from broken(
        (
            rolls_back and config.checkpoint.save is None,
            "spike_action=rollback returns to a checkpoint of the run, but save is not given; give a folder",
        ),
        (
            rolls_back and config.checkpoint.no_save_optim,
            "spike_action=rollback needs the optimizer's state, but no_save_optim leaves it out; turn one of them off",
        ),
    )
    # unset: at most the other one (`effective_watchdog_timeout_s`)
    minutes, timeout_s = config.parallel.distributed_timeout_minutes, config.guard.watchdog_timeout_s
    if timeout_s is None:
        return
    if timeout_s > minutes * 60:
        yield (
            f"watchdog_timeout_s={timeout_s:g} is above distributed_timeout_minutes={minutes:g} ({minutes * 60:g} s), "
            "after which a collective fails without a diagnosis; lower it, or raise distributed_timeout_minutes"
        )
    if 0 < timeout_s < 1:
        yield f"watchdog_timeout_s={timeout_s:g} leaves no time for a step; use 1 or more, or 0 for no watchdog"


def _check_layer_graphs(config: Config) -> Iterator[str]:
    """Yield a message for what graphs of layers do not hold: operators of another kind or shape in each pass."""
    parallel, model, training = config.parallel, config.model, config.training
    if training.cuda_graph_impl == "none" or training.skip_train:
        return
    refused = (
        (model.hidden_dropout > 0, f"hidden_dropout={model.hidden_dropout}"),
        (model.attention_dropout > 0, f"attention_dropout={model.attention_dropout}"),
        (config.lora.lora_dropout > 0, f"lora_dropout={config.lora.lora_dropout}"),
        (not config.uses_pipeline, "zero_stage 2 or 3, offload or no_pipeline_parallel"),
        (parallel.schedule == "zero-bubble", "pipeline_schedule=zero-bubble"),
        (parallel.tensor_model_parallel_size > 1, f"tensor_model_parallel_size={parallel.tensor_model_parallel_size}"),
        (parallel.context_parallel_size > 1, f"context_parallel_size={parallel.context_parallel_size}"),
        (model.num_experts is not None, f"num_experts={model.num_experts}"),
        (_takes_flex(model), "flex_attention, which ALiBi, windows and soft caps take on CUDA"),
        (training.recompute_granularity != "none", f"recompute_granularity={training.recompute_granularity}"),
        (training.torch_compile, "torch_compile"),
        (training.offload_activations, "offload_activations"),
        (config.records_logits_above is not None, "qk_clip or log_max_attention_logit"),
        (_varies_rows(config), f"task={training.task} with documents packed into a row, or rows of several lengths"),
    )
    given = "cuda_graph_impl=local"
    yield from broken(*((is_on, f"{given} does not run with {name}; leave one of them out") for is_on, name in refused))


def _takes_flex(model: ModelConfig) -> bool:
    """Return whether a GPU attends by flex_attention."""
    if model.attention_backend != "auto":
        return model.attention_backend == "flex"
    has_bias = model.position_embedding_type == "alibi" or model.attention_softcap is not None
    return model.kernels != "plain" and model.suits_flex and (has_bias or model.attention_window is not None)


def _varies_rows(config: Config) -> bool:
    try:
        data = load_task(config).data
        return bool(data.packs_documents or data.varies_shapes)
    except ConfigError:  # reported by the rules of the task
        return False
