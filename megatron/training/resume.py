"""Start of a run: the checkpoint to resume or to roll back to, and the check that the data still fits it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.checkpoint.format import CheckpointError
from megatron.checkpoint.lineage import START_OPTIONS, Run, of_run, run_in
from megatron.checkpoint.own_run import DEFAULTS, is_same_folder, own_run, resumes_itself
from megatron.checkpoint.reader import (
    Checkpoint,
    checkpoint_folders,
    holds_checkpoints,
)
from megatron.config.options import CheckpointConfig, Config
from megatron.config.options import options as declared_options
from megatron.data.blend import content_of
from megatron.interop.huggingface_config import nothing_to_load
from megatron.interop.huggingface_start import HuggingFaceStart
from megatron.interop.peft_start import PeftStart
from megatron.parallel.context import ParallelContext
from megatron.planning.progress import Progress
from megatron.resilience.errors import raise_on_all_ranks
from megatron.tasks.task import Task
from megatron.training.adapter_values import start_from_base
from megatron.training.engine import Engine
from megatron.training.resume_plan import plan_restore
from megatron.weights.adapter_start import (
    AdapterStart,
    holds_adapters,
    open_adapters,
)
from megatron.weights.opening import TAG, Resumable, find_checkpoint, first_whole


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
    checkpoint: Resumable | AdapterStart | None
    """None: a new run."""
    progress: Progress
    run: Run
    saved_data: SavedData | None = None
    """None: no checkpoint whose data this run continues."""


# Resuming


def find_start(config: Config, ctx: ParallelContext) -> Start:
    """Return where the run starts from: its own newest checkpoint, what `load` names, or nothing. Collective.

    So a run that is started again by the same command, by a supervisor, a scheduler or a user, continues. Raises
    CheckpointError, also if `save` is used by another run.
    """
    options = config.checkpoint
    own = ctx.broadcast_object(raise_on_all_ranks(ctx, lambda: None if ctx.rank else own_run(options)))
    if own is not None:
        options = _resuming_options(options)
    found = find_checkpoint(dataclasses.replace(config, checkpoint=options), ctx, own)
    if found is None:  # on all ranks
        _check_start(config, options)
    checkpoint: Resumable | AdapterStart | None = found
    if config.lora.lora_rank is not None:
        checkpoint = open_adapters(found, config, ctx)
        if not holds_adapters(found):  # a base model: its weights alone are taken
            options = dataclasses.replace(options, finetune=True)
    run = ctx.broadcast_object(
        raise_on_all_ranks(ctx, lambda: None if ctx.rank else _run_of_start(config.checkpoint, own, found, options))
    )
    if checkpoint is None:
        return Start(options, None, Progress(), run)
    progress, saved_data = raise_on_all_ranks(ctx, lambda: read_progress(checkpoint, options))
    return Start(options, checkpoint, progress, run, saved_data)


def restore_start(engine: Engine, start: Start) -> list[str]:
    """Restore what the run starts from into a new engine. Collective.

    Return lines that say what was restored, as WARNING what was not, and which options have changed.
    """
    checkpoint, progress = start.checkpoint, start.progress
    assert checkpoint is not None
    sums = engine.state.base_sums = checkpoint.new_sums() if isinstance(checkpoint, AdapterStart) else None
    lines = raise_on_all_ranks(engine.ctx, lambda: restore(engine, checkpoint, progress, start.options))
    engine.state.base_sums = None
    engine.state.finish_restore()
    if isinstance(checkpoint, AdapterStart) and sums is not None:
        if checkpoint.trained is None:
            start_from_base(engine.module, engine.state, engine.config)
        identity = checkpoint.identity(engine.ctx.gather_objects(sums.totals))
        lines += checkpoint.check_base(identity)
        engine.base = {**checkpoint.record, "identity": identity.to_json()}
    return lines


def _check_start(config: Config, options: CheckpointConfig) -> None:
    """Raise CheckpointError where nothing was found that the run needs to start from."""
    if config.training.skip_train or options.needs_start:
        raise CheckpointError(nothing_to_load(options.load, skip_train=config.training.skip_train))


def _resuming_options(options: CheckpointConfig) -> CheckpointConfig:
    """Return the options that resume the run's own newest checkpoint: START_OPTIONS describe the first start alone."""
    return dataclasses.replace(options, load=options.save, **{name: DEFAULTS[name] for name in START_OPTIONS[1:]})


def _run_of_start(
    options: CheckpointConfig, own: Run | None, checkpoint: Resumable | None, effective: CheckpointConfig
) -> Run:
    """Return the run that starts from this checkpoint. Raises CheckpointError if `save` is used by another run.

    It is that of the checkpoint where it is resumed in its own folder, and a new one elsewhere. `effective`: the
    options as they apply now.
    """
    if own is not None:
        return own
    if isinstance(checkpoint, Checkpoint) and resumes_itself(options) and not effective.finetune:
        return Run.of(checkpoint.metadata)
    parent = None if isinstance(checkpoint, HuggingFaceStart | PeftStart) else checkpoint
    is_continued = isinstance(checkpoint, Checkpoint) and not (effective.finetune or options.no_load_optim)
    start = {name: getattr(options, name) for name in START_OPTIONS}
    run = Run.new(start, parent, is_continued=is_continued)
    goes_back = checkpoint is not None and is_same_folder(options.load, options.save) and not effective.finetune
    if options.save is not None and not options.allow_used_save and not goes_back:
        _check_unused(Path(options.save), run)
    return run


def _check_unused(save: Path, run: Run) -> None:
    """Raise CheckpointError if the folder of the new `run` holds checkpoints: it is another run's."""
    if not holds_checkpoints(save):
        return
    newest, started = checkpoint_folders(save)[0], ""
    if (other := run_in(newest)) is not None:
        started = f", started with {_said_start(other)}; this one starts with {_said_start(run)}"
    raise CheckpointError(
        f"save={save} holds checkpoints of another run (newest {newest.name}{started}). Give another folder, resume "
        f"that run with --load {save}, or pass --allow-used-save to save beside them"
    )


def _said_start(run: Run) -> str:
    given = [f"{name}={value}" for name, value in run.start.items() if value != DEFAULTS.get(name)]
    return ", ".join([*([] if run.start.get("load") else ["no load"]), *given])


def read_progress(checkpoint: Resumable | AdapterStart, options: CheckpointConfig) -> tuple[Progress, SavedData | None]:
    """Return the saved progress and description of the data; a new start with `finetune`, or from Hugging Face.

    Raises CheckpointError if the metadata is damaged.
    """
    content = checkpoint.metadata
    if options.finetune or isinstance(checkpoint, HuggingFaceStart):
        return Progress(), None
    try:
        progress = Progress.from_saved(content["progress"])
        if "data_fingerprint" not in content:  # converted from elsewhere
            return progress, None
        return progress, SavedData(checkpoint.folder, content["data_fingerprint"], content["config"])
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{checkpoint.folder} has no usable progress ({error!r}); load another one") from None


def restore(
    engine: Engine, checkpoint: Resumable | AdapterStart, progress: Progress, options: CheckpointConfig | None = None
) -> list[str]:
    """Restore weights, optimizer and counters into a new engine, and return the lines of `restore_start`.

    `options`: those of `Start`, where they are not the engine's own. Not collective; `EngineState.finish_restore` is.
    """
    plan = plan_restore(checkpoint, progress, engine.config, options or engine.config.checkpoint)
    for one in (checkpoint.trained, checkpoint.base) if isinstance(checkpoint, AdapterStart) else (checkpoint,):
        if isinstance(one, Checkpoint):  # a foreign one was checked when it was opened
            engine.state.check_model(one, with_optimizer=plan.optimizer is not None)
    engine.state.restore(checkpoint, plan.optimizer)
    if plan.seed is not None:
        engine.dropout_seed = plan.seed
    engine.count_from(progress)
    return plan.lines


# Rolling back


def checkpoint_before(sample: int, config: Config, ctx: ParallelContext, run: Run) -> Checkpoint | None:
    """Return the newest undamaged checkpoint, optimizer included, from before `sample` was consumed, or None.

    Collective. It is the run's own or its ancestors', in the run's folder, or else in the one that it resumed from.
    """
    options = config.checkpoint
    folders = [options.save]
    if options.load != options.save and not (options.universal_checkpoint or options.finetune or options.no_load_optim):
        folders.append(options.load)

    def choose(damaged: set[Path]) -> Path | None:
        for folder in (Path(folder) for folder in folders if folder is not None):
            steps = [(path, path.name.removeprefix(TAG)) for path in folder.glob(f"{TAG}*")]
            for path, _ in sorted(((p, int(step)) for p, step in steps if step.isdigit()), key=lambda x: -x[1]):
                if path not in damaged and of_run(run, [path], with_ancestors=True) and _is_before(path, sample):
                    return path
        return None

    return first_whole(ctx, choose, load=None)


def _is_before(folder: Path, sample: int) -> bool:
    try:
        checkpoint = Checkpoint(folder)
        return len(checkpoint.kinds) > 1 and int(checkpoint.metadata["progress"]["consumed_samples"]) <= sample
    except (CheckpointError, KeyError, TypeError, ValueError):
        return False


def restore_whole(engine: Engine, checkpoint: Checkpoint, progress: Progress) -> None:
    """Restore a running engine to one of its own checkpoints. Collective."""
    optimizer, lora = checkpoint.metadata["optimizer"], engine.config.lora
    raise_on_all_ranks(
        engine.ctx, lambda: engine.state.restore(checkpoint, optimizer, trained_only=lora.lora_rank is not None)
    )
    engine.state.regather()
    engine.dropout_seed = checkpoint.metadata["rng"]["seed"]
    engine.count_from(progress)


# The data


def check_data(saved: SavedData, config: Config, task: Task, fingerprint: str) -> str | None:
    """Return what has changed in the samples, or their order, since the checkpoint; None: nothing.

    Raises CheckpointError where something has, unless allow_data_change is on.
    """
    if saved.fingerprint == fingerprint:
        return None
    there, here = saved.config, config.to_dict()
    names = ("training.task", *task.order_options)
    before, now = ({name: _value(run, name) for name in names} for run in (there, here))
    if content_of(saved.fingerprint) == content_of(fingerprint):
        change = (
            f"{saved.checkpoint} was saved by a run of {length_of(there)}; this one has {length_of(here)}, for which "
            f"data_path={_said(_value(here, 'data.data_path'))} is repeated another number of times. Epochs are "
            "shuffled together, so one more or less changes the order of all samples"
        )
        remedy = "Keep the length of that run"
    else:
        found = [
            f"{name.partition('.')[2]}={_said(now[name])} here, {_said(before[name])} there"
            for name in names
            if now[name] != before[name]
        ]
        unchanged = f"data_path={_said(_value(here, 'data.data_path'))} holds other documents or tokens than it did"
        change = (
            f"{saved.checkpoint} was trained on other data than this run finds: {'; '.join(found) or unchanged} "
            f"(fingerprint {content_of(fingerprint)[:12]} here, {content_of(saved.fingerprint)[:12]} there)"
        )
        remedy = "Give the data of that run"
    if not config.checkpoint.allow_data_change:
        raise CheckpointError(
            f"{change}. {remedy}, or pass --allow-data-change to continue in the new order, after as many samples as "
            "the checkpoint has consumed: some documents are then read again, others never"
        )
    return change


def length_of(config: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the length of a config's run, in the config's own options."""
    samples, iters = config["training"]["train_samples"], config["training"]["train_iters"]
    size, epochs = config["training"]["global_batch_size"], config["training"].get("num_epochs")
    if epochs:
        return f"num_epochs={epochs}"
    return f"train_samples={samples}" if samples else f"train_iters={iters} of global_batch_size={size}"


def _value(config: Mapping[str, Mapping[str, Any]], option: str) -> Any:
    """Return an option, such as `data.split`, of a config from Config.to_dict; its default in one that is older."""
    section, _, name = option.partition(".")
    if option == "data.data_path":
        return config["data"]["data_path"] or config["data"]["train_data_path"]
    value = config.get(section, {}).get(name, declared_options()[name][1].default)
    return list(value) if isinstance(value, tuple) else value


def _said(value: Any) -> str:
    return " ".join(map(str, value)) or "nothing" if isinstance(value, list | tuple) else str(value)
