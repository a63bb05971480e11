"""Plan of a resume: what is restored from a checkpoint, what is not, and which options have changed since."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron.checkpoint.folders import START_OPTIONS, Run, checkpoint_folders, holds_checkpoints, run_in
from megatron.checkpoint.format import CheckpointError
from megatron.checkpoint.reader import DEFAULTS, Checkpoint, is_same_folder, own_run, resumes_itself
from megatron.checkpoint.source import AVERAGE, WeightSource
from megatron.data.blend import content_of
from megatron.options.config import CheckpointConfig, Config
from megatron.options.config import options as declared_options
from megatron.options.extension import position_changes
from megatron.options.model import differing
from megatron.options.progress import Progress
from megatron.parallel.context import ParallelContext
from megatron.parallel.shards import declared_shards
from megatron.plan.flops import declared_layers
from megatron.resilience.errors import raise_on_all_ranks
from megatron.tasks.registry import load_task
from megatron.tasks.task import Task
from megatron.training.checkpoints import Kept
from megatron.training.copies import newer_copy, newest_copy, newest_saved
from megatron.training.engine import Engine
from megatron.training.optimizers.average import saved_average
from megatron.training.state import start_from_base
from megatron.weights.adapted import AdaptedSource, check_exports, open_adapters
from megatron.weights.loader import find_checkpoint
from megatron.weights.model import check_quantization, config_of_source, holds_adapters
from megatron.weights.model_folder import nothing_to_load

NO_TRAINING = {
    "device", "distributed_timeout_minutes", "exit_interval", "exit_duration_in_mins", "kill_switch_path",
    "data_cache_path", "num_workers", "watchdog_timeout_s", "check_replicas_interval",
    "recheck_interval", "recheck_action",
    "override_opt_param_scheduler", "use_checkpoint_opt_param_scheduler",
}  # fmt: skip
"""Options of how a run is carried out; a resume does not report their changes."""
SCHEDULE = (
    *("lr", "min_lr", "decoupled_lr", "decoupled_min_lr"),
    *("weight_decay", "start_weight_decay", "end_weight_decay"),
)
"""Beginnings of the names of the schedule's options, which the checkpoint's replace where that is requested."""
SHOWN_CHARACTERS = 300
"""Length at which a changed option is cut: a blend may name thousands of datasets."""


@dataclass(frozen=True)
class RestorePlan:
    """State that a new engine takes from a checkpoint."""

    optimizer: dict[str, Any] | None
    """The optimizer's saved scalars. None: it starts from zero."""
    seed: int | None
    """Seed of dropout. None: the run's own."""
    lines: list[str]
    """Report: the restored state, a WARNING for the rest, and the options that have changed."""
    average_steps: int | None = None
    """Applied steps since the last update of the weights' average. None: it begins with the restored weights."""


def plan_restore(
    checkpoint: WeightSource, progress: Progress, config: Config, options: CheckpointConfig
) -> RestorePlan:
    """Plan to restore what `options` request. A start with `finetune`, or from no run's files, takes weights alone.

    Raises CheckpointError for the state of another kind of optimizer.
    """
    place = f"iteration {progress.iteration}, {progress.consumed_samples} samples"
    # a base with adapters: the base's weights come from its folder, the rest from the run's checkpoint
    if isinstance(checkpoint, AdaptedSource):
        trained, lines = checkpoint.trained, [*checkpoint.lines(), *_extension(checkpoint, config)]
        if trained is None:
            return RestorePlan(None, None, [*lines, f"new adapters; {place}"])
        if not isinstance(trained, Checkpoint):
            return RestorePlan(None, None, [*lines, f"started from {trained.folder}: adapters; {place}"])
        # the part that is trained resumes as any run's
        plan = plan_restore(trained, progress, config, options)
        warned = check_quantization(trained, config, resumes=not options.finetune)
        return replace(plan, lines=[*lines, *plan.lines, *warned])
    if options.finetune or not checkpoint.holds_run:
        lines = [f"started from {checkpoint.folder}: weights; {place}", *_extension(checkpoint, config)]
        return RestorePlan(None, None, lines)
    optimizer, lost = _saved_optimizer(checkpoint, config, options)
    seed, lost_seed = _saved_seed(checkpoint.metadata, config, options)
    average_steps, lost_average = saved_average(checkpoint, config)
    lost += [*lost_seed, *lost_average, *_lost_position(checkpoint, progress)]
    restored = ["weights" if average_steps is None else "weights and their average"]
    if optimizer:
        restored.append("optimizer")
    if seed is not None:
        restored.append("random streams")
    lines = [f"resumed {checkpoint.folder}: {', '.join(restored)}; {place}", *(f"WARNING: {text}" for text in lost)]
    # the config of converted weights describes their model alone: no run had its other options
    run = checkpoint.metadata.get("config") if "data_fingerprint" in checkpoint.metadata else None
    changed = _changed_options(run, config)
    if changed:
        lines.append(f"changed since the checkpoint: {'; '.join(changed)}")
    return RestorePlan(optimizer, seed, lines, average_steps)


def _extension(checkpoint: WeightSource, config: Config) -> list[str]:
    """Return a line on the positions in which the run's model is not that of the files that it starts from."""
    model = checkpoint.parts[-1] if checkpoint.parts else checkpoint
    # a foreign checkpoint may state no whole model
    if not config.checkpoint.extend_context or (model.config is None and "config" not in model.metadata):
        return []
    changes = position_changes(config.model, config_of_source(model).model)
    return [f"extended context: {'; '.join(changes)}"] if changes else []


def _saved_optimizer(
    checkpoint: WeightSource, config: Config, options: CheckpointConfig
) -> tuple[dict[str, Any] | None, list[str]]:
    """Return the optimizer's saved scalars, None for a new optimizer, and what is lost.

    Raises CheckpointError for the state of another kind of optimizer.
    """
    kept, held = _kinds_of_moments(config), [kind for kind in checkpoint.kinds if kind not in ("weight", AVERAGE)]
    saved = checkpoint.metadata.get("optimizer")
    if options.no_load_optim:
        return None, ["the optimizer was not restored (no_load_optim); it starts from zero"]
    if checkpoint.optimizer_fault is not None:
        raise CheckpointError(checkpoint.optimizer_fault)
    # converted weights, or those of a run with --no-save-optim
    if saved is None or (kept and not held):
        return None, [
            f"the optimizer was not restored; {checkpoint.folder} was saved without it, so it starts from zero"
        ]
    if set(kept) != set(held):
        raise CheckpointError(
            f"{checkpoint.folder} holds {', '.join(held)} of another optimizer; optimizer={config.optimizer.optimizer} "
            f"keeps {', '.join(kept) or 'no moments'}. Give the optimizer of its run, or pass --no-load-optim"
        )
    # as of a run in bf16, which has no loss scale
    if config.training.fp16 and not saved.get("loss_scaler"):
        scale = config.training.initial_loss_scale
        return saved, [f"the loss scale was not restored; the checkpoint has none, so it starts at {scale:g}"]
    return saved, []


def _kinds_of_moments(config: Config) -> list[str]:
    """Return the kinds of moments that the optimizer keeps of the trained parameters."""
    shards = declared_shards(declared_layers(config)).values()
    trained = {shard.is_linear_weight for shard in shards if shard.trained}
    kinds = (config.optimizer.states_of(is_linear_weight=each) for each in sorted(trained))
    return list(dict.fromkeys(itertools.chain.from_iterable(kinds)))


def _saved_seed(content: Mapping[str, Any], config: Config, options: CheckpointConfig) -> tuple[int | None, list[str]]:
    """Return the seed of dropout to continue with, None for the run's own, and what is lost."""
    saved, own = (content.get("rng") or {}).get("seed"), config.training.seed
    if options.no_load_rng:
        return None, [f"the random streams were not restored (no_load_rng); dropout uses seed={own}"]
    if saved is None:
        return None, [f"the random streams were not restored (the checkpoint has no seed); dropout uses seed={own}"]
    # the checkpoint's, so that dropout goes on as it would have
    if saved != own:
        return saved, [
            f"seed={own} is not applied to dropout, which continues with the checkpoint's {saved}; pass --no-load-rng "
            "to apply it"
        ]
    return saved, []


def _lost_position(checkpoint: WeightSource, progress: Progress) -> list[str]:
    """Return what a foreign checkpoint does not say of its model and its data."""
    lost = []
    if checkpoint.uncompared:
        options = ", ".join(checkpoint.uncompared)
        lost.append(f"{checkpoint.folder} does not state {options}: compare them with its run yourself")
    # foreign checkpoints know their step, and not always their samples
    if progress.iteration and not progress.consumed_samples:
        lost.append("the data position was not restored (no consumed samples): data starts from the beginning")
    elif progress.iteration and "data_fingerprint" not in checkpoint.metadata:
        lost.append(
            "the data was not compared, which the checkpoint does not identify; it continues after "
            f"{progress.consumed_samples} samples"
        )
    return lost


def _changed_options(saved: Any, config: Config) -> list[str]:
    """Return the options that change the training and are not those of a checkpoint's config."""
    now, changed = config.to_dict(), []
    if not isinstance(saved, dict):
        return []
    if config.optimizer.use_checkpoint_opt_param_scheduler:
        now["optimizer"] = {name: value for name, value in now["optimizer"].items() if not name.startswith(SCHEDULE)}
    # logging and checkpoint have nothing that changes what is computed
    for section in ("model", "parallel", "training", "optimizer", "data", "sft", "preference", "lora", "fp8", "guard"):
        before = saved.get(section)
        if isinstance(before, dict):  # an older release may lack the section
            here = {name: value for name, value in now[section].items() if name not in NO_TRAINING}
            changed += differing(here, before)
    return list(map(_shortened, changed))


def _shortened(text: str) -> str:
    if len(text) <= SHOWN_CHARACTERS:
        return text
    return f"{text[:SHOWN_CHARACTERS]} ..."


@dataclass(frozen=True)
class SavedData:
    """Description of a checkpoint's training data."""

    checkpoint: Path
    fingerprint: str
    config: Mapping[str, Mapping[str, Any]]
    """The run's config, as Config.to_dict gives it."""


@dataclass(frozen=True)
class Start:
    """Starting point of a run."""

    options: CheckpointConfig
    """Those that start it now; see `_resuming_options`."""
    checkpoint: WeightSource | None
    """None: a new run."""
    progress: Progress
    run: Run
    saved_data: SavedData | None = None
    """None: no checkpoint whose data this run continues."""
    counted_from: int | None = None
    """seq_length of the checkpoint, whose samples `progress` counts as samples of the run's. None: it has the same."""
    kept: Kept | None = None
    """The copy in the agents' memory that `checkpoint` is; None: it lies on a disk."""


# Resuming


def find_start(config: Config, ctx: ParallelContext) -> Start:
    """Return where the run starts from: its own newest checkpoint, what `load` names, or nothing. Collective.

    So a run that is started again by the same command, by a supervisor, a scheduler or a user, continues. Raises
    CheckpointError, also if `save` is used by another run.
    """
    options = config.checkpoint
    # read by one rank: others may see a newer save of a shared folder, or an older one
    own = _of_rank_0(ctx, lambda: own_run(options))
    saved = newest_saved(config, ctx, own)
    copy, kept = newest_copy(config, ctx, own, saved)
    if copy is not None:
        own = own or Run.of(copy.metadata)  # it may have saved nothing yet
    # --load and --finetune of the command started the run; typed again they must not start it once more
    if own is not None:
        options = _resuming_options(options)
    found = copy or find_checkpoint(dataclasses.replace(config, checkpoint=options), ctx, own)
    if copy is None:
        found, kept = newer_copy(config, ctx, own, found, saved)
    if found is None:  # on all ranks
        _check_start(config, options)
    checkpoint = found
    if config.lora.lora_rank is not None:
        checkpoint = open_adapters(found, config, ctx)
        if not holds_adapters(found):  # a base model: its weights alone are taken
            options = dataclasses.replace(options, finetune=True)
    run = _of_rank_0(ctx, lambda: _run_of_start(config.checkpoint, own, found, options))
    if checkpoint is None:
        return Start(options, None, Progress(), run)
    if isinstance(checkpoint, AdaptedSource):
        check_exports(config, checkpoint)
    progress, saved_data = raise_on_all_ranks(ctx, lambda: read_progress(checkpoint, options))
    other = _other_length(saved_data, config)
    if other is not None:
        progress = counted_in_own_samples(progress, other, config)
    return Start(options, checkpoint, progress, run, saved_data, other, kept)


def _other_length(saved: SavedData | None, config: Config) -> int | None:
    """Return the seq_length of the samples of the run that is continued, where --extend-context changes it."""
    if saved is None or not config.checkpoint.extend_context:
        return None
    there = saved.config["training"]["seq_length"]
    # a chat, or a pair of answers, is one sample at any seq_length
    if there == config.training.seq_length or load_task(config).data.counts_epochs:
        return None
    return int(there)


def counted_in_own_samples(progress: Progress, seq_length: int, config: Config) -> Progress:
    """Raises CheckpointError where the samples of that length are no whole number of the run's."""
    try:
        return progress.counted_in(seq_length, config.training.seq_length)
    except ValueError as error:
        raise CheckpointError(
            f"the checkpoint has consumed {error}; give one that divides them, or --finetune to take its weights alone"
        ) from None


def _of_rank_0(ctx: ParallelContext, read: Callable[[], Any]) -> Any:
    """Return on every rank what rank 0 reads, or raise its error. Collective."""
    return ctx.broadcast_object(raise_on_all_ranks(ctx, lambda: read() if ctx.rank == 0 else None))


def restore_start(engine: Engine, start: Start) -> list[str]:
    """Restore what the run starts from into a new engine. Collective.

    Return lines that say what was restored, as WARNING what was not, and which options have changed.
    """
    checkpoint, progress = start.checkpoint, start.progress
    assert checkpoint is not None
    lines = raise_on_all_ranks(engine.ctx, lambda: restore(engine, checkpoint, progress, start.options))
    engine.state.finish_restore()
    # after each rank has read its slices: the base is identified by sums over them
    lines += checkpoint.identify(engine.ctx)
    if isinstance(checkpoint, AdaptedSource):
        # new adapters: DoRA's magnitudes and PiSSA's vectors follow from the base, which is there now
        if checkpoint.trained is None:
            start_from_base(engine.module, engine.state, engine.config)
        engine.base = checkpoint.record
    return lines


def _check_start(config: Config, options: CheckpointConfig) -> None:
    """Raise CheckpointError where nothing was found that the run needs to start from."""
    if config.training.skip_train or options.needs_start:
        raise CheckpointError(nothing_to_load(options.load, skip_train=config.training.skip_train))


def _resuming_options(options: CheckpointConfig) -> CheckpointConfig:
    """Return the options that resume the run's own newest checkpoint: START_OPTIONS describe the first start alone."""
    return dataclasses.replace(options, load=options.save, **{name: DEFAULTS[name] for name in START_OPTIONS[1:]})


def _run_of_start(
    options: CheckpointConfig, own: Run | None, checkpoint: WeightSource | None, effective: CheckpointConfig
) -> Run:
    """Return the run that starts from this checkpoint. Raises CheckpointError if `save` is used by another run.

    It is that of the checkpoint where it is resumed in its own folder, and a new one elsewhere. `effective`: the
    options as they apply now.
    """
    if own is not None:
        return own
    if isinstance(checkpoint, Checkpoint) and resumes_itself(options) and not effective.finetune:
        return Run.of(checkpoint.metadata)
    parent = checkpoint
    if checkpoint is not None and not checkpoint.holds_run:
        parent = None
    is_continued = isinstance(checkpoint, Checkpoint) and not (effective.finetune or options.no_load_optim)
    start = {name: getattr(options, name) for name in START_OPTIONS}
    run = Run.new(start, parent, is_continued=is_continued)
    # an older checkpoint of the same folder: a branch, whose saves lie beside those that it leaves
    goes_back = checkpoint is not None and is_same_folder(options.load, options.save) and not effective.finetune
    if options.save is not None and not options.allow_used_save and not goes_back:
        _check_unused(Path(options.save), run)
    return run


def _check_unused(save: Path, run: Run) -> None:
    """Raise CheckpointError if the folder of the new `run` holds checkpoints: it is another run's."""
    if not holds_checkpoints(save):
        return
    newest, started = checkpoint_folders(save)[0], ""
    other = run_in(newest)
    if other is not None:
        started = f", started with {_said_start(other)}; this one starts with {_said_start(run)}"
    raise CheckpointError(
        f"save={save} holds checkpoints of another run (newest {newest.name}{started}). Give another folder, resume "
        f"that run with --load {save}, or pass --allow-used-save to save beside them"
    )


def _said_start(run: Run) -> str:
    given = [f"{name}={value}" for name, value in run.start.items() if value != DEFAULTS.get(name)]
    if not run.start.get("load"):
        given.insert(0, "no load")
    return ", ".join(given)


def read_progress(checkpoint: WeightSource, options: CheckpointConfig) -> tuple[Progress, SavedData | None]:
    """Return the saved progress and description of the data; a new start with `finetune`, or from no run's files.

    Raises CheckpointError if the metadata is damaged.
    """
    content = checkpoint.metadata
    if options.finetune or not checkpoint.holds_run:
        return Progress(), None
    try:
        progress = Progress.from_saved(content["progress"])
        if "data_fingerprint" not in content:  # converted from elsewhere
            return progress, None
        return progress, SavedData(checkpoint.folder, content["data_fingerprint"], content["config"])
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{checkpoint.folder} has no usable progress ({error!r}); load another one") from None


def restore(
    engine: Engine, checkpoint: WeightSource, progress: Progress, options: CheckpointConfig | None = None
) -> list[str]:
    """Restore weights, optimizer and counters into a new engine, and return the lines of `restore_start`.

    `options`: those of `Start`, where they are not the engine's own. Not collective; `EngineState.finish_restore` is.
    """
    plan = plan_restore(checkpoint, progress, engine.config, options or engine.config.checkpoint)
    for part in checkpoint.parts:
        if isinstance(part, Checkpoint):  # a foreign one was checked when it was opened
            engine.state.check_model(part, with_optimizer=plan.optimizer is not None)
    engine.state.restore(checkpoint, plan.optimizer, average_steps=plan.average_steps)
    if plan.seed is not None:
        engine.dropout_seed = plan.seed
    engine.count_from(progress)
    return plan.lines


# The data


def check_data(saved: SavedData, config: Config, task: Task, fingerprint: str) -> str | None:
    """Return what has changed in the samples, or their order, since the checkpoint; None: nothing.

    Raises CheckpointError where something has, unless allow_data_change is on.
    """
    if saved.fingerprint == fingerprint:
        return None
    change, remedy = _change_of_data(saved, config, task, fingerprint)
    # of another length, where the run continues in tokens
    counted = "samples" if _other_length(saved, config) is None else "tokens"
    if not config.checkpoint.allow_data_change:
        raise CheckpointError(
            f"{change}. {remedy}, or pass --allow-data-change to continue in the new order, after as many {counted} as "
            "the checkpoint has consumed: some documents are then read again, others never"
        )
    return change


def _change_of_data(saved: SavedData, config: Config, task: Task, fingerprint: str) -> tuple[str, str]:
    """Return what has changed since the checkpoint, and the remedy."""
    there, here = saved.config, config.to_dict()
    names = ("training.task", *task.data.order_options)
    before, now = ({name: _value(run, name) for name in names} for run in (there, here))
    # the same documents in another number of epochs
    if content_of(saved.fingerprint) == content_of(fingerprint):
        change = (
            f"{saved.checkpoint} was saved by a run of {length_of(there)}; this one has {length_of(here)}, for which "
            f"data_path={_said(_value(here, 'data.data_path'))} is repeated another number of times. Epochs are "
            "shuffled together, so one more or less changes the order of all samples"
        )
        return change, "Keep the length of that run"
    changed = [name for name in names if now[name] != before[name]]
    options = [f"{name.partition('.')[2]}={_said(now[name])} here, {_said(before[name])} there" for name in changed]
    unchanged = f"data_path={_said(_value(here, 'data.data_path'))} holds other documents or tokens than it did"
    change = (
        f"{saved.checkpoint} was trained on other data than this run finds: {'; '.join(options) or unchanged} "
        f"(fingerprint {content_of(fingerprint)[:12]} here, {content_of(saved.fingerprint)[:12]} there)"
    )
    if "training.seq_length" in changed and not task.data.counts_epochs:
        return change, (
            "Keep its seq_length, or begin with its weights alone by --finetune (in a run with seq_length_stages rows "
            "grow within the same samples)"
        )
    return change, "Give the data of that run"


def length_of(config: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the length of a config's run, in the config's own options."""
    samples, iters = config["training"]["train_samples"], config["training"]["train_iters"]
    size, epochs = config["training"]["global_batch_size"], config["training"].get("num_epochs")
    if epochs:
        return f"num_epochs={epochs}"
    if samples:
        return f"train_samples={samples}"
    return f"train_iters={iters} of global_batch_size={size}"


def _value(config: Mapping[str, Mapping[str, Any]], option: str) -> Any:
    """Return an option, such as `data.split`, of a config from Config.to_dict; its default in one that is older."""
    section, _, name = option.partition(".")
    # either option names the training data
    if option == "data.data_path":
        return config["data"]["data_path"] or config["data"]["train_data_path"]
    value = config.get(section, {}).get(name, declared_options()[name][1].default)
    if isinstance(value, tuple):  # JSON has lists
        return list(value)
    return value


def _said(value: Any) -> str:
    if isinstance(value, list | tuple):
        return " ".join(map(str, value)) or "nothing"
    return str(value)
