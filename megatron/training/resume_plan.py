"""Plan of a resume: what is restored from a checkpoint, what is not, and which options have changed since."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from megatron.checkpoint.format import CheckpointError
from megatron.config.model import differing
from megatron.config.options import CheckpointConfig, Config
from megatron.interop.huggingface_start import HuggingFaceStart
from megatron.interop.peft_start import PeftStart
from megatron.planning.progress import Progress
from megatron.training.state import moments_of
from megatron.weights.adapter_start import AdapterStart, check_quantization
from megatron.weights.opening import Resumable

NO_TRAINING = {
    "device", "distributed_timeout_minutes", "exit_interval", "exit_duration_in_mins", "kill_switch_path",
    "data_cache_path", "num_workers", "watchdog_timeout_s", "check_replicas_interval",
    "override_opt_param_scheduler", "use_checkpoint_opt_param_scheduler",
}  # fmt: skip
"""Options of how a run is carried out; a resume does not report their changes."""
SCHEDULE = ("lr", "min_lr", "weight_decay", "start_weight_decay", "end_weight_decay")
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


def plan_restore(
    checkpoint: Resumable | AdapterStart, progress: Progress, config: Config, options: CheckpointConfig
) -> RestorePlan:
    """Plan to restore what `options` request. A start with `finetune`, or from Hugging Face, takes weights alone.

    Raises CheckpointError for the state of another kind of optimizer.
    """
    place = f"iteration {progress.iteration}, {progress.consumed_samples} samples"
    if isinstance(checkpoint, AdapterStart):
        if checkpoint.trained is None:
            return RestorePlan(None, None, [*checkpoint.lines(), f"new adapters; {place}"])
        if isinstance(checkpoint.trained, PeftStart):
            line = f"started from {checkpoint.trained.folder}: adapters; {place}"
            return RestorePlan(None, None, [*checkpoint.lines(), line])
        plan = plan_restore(checkpoint.trained, progress, config, options)
        warned = check_quantization(checkpoint.trained, config, resumes=not options.finetune)
        return replace(plan, lines=[*checkpoint.lines(), *plan.lines, *warned])
    if options.finetune or isinstance(checkpoint, HuggingFaceStart):
        return RestorePlan(None, None, [f"started from {checkpoint.folder}: weights; {place}"])
    optimizer, lost = _saved_optimizer(checkpoint, config, options)
    seed, lost_seed = _saved_seed(checkpoint.metadata, config, options)
    lost += [*lost_seed, *_lost_position(checkpoint, progress)]
    restored = ["weights", *(["optimizer"] if optimizer else []), *(["random streams"] if seed is not None else [])]
    lines = [f"resumed {checkpoint.folder}: {', '.join(restored)}; {place}", *(f"WARNING: {text}" for text in lost)]
    # the config of converted weights describes their model alone: no run had its other options
    run = checkpoint.metadata.get("config") if "data_fingerprint" in checkpoint.metadata else None
    if changed := _changed_options(run, config):
        lines.append(f"changed since the checkpoint: {'; '.join(changed)}")
    return RestorePlan(optimizer, seed, lines)


def _saved_optimizer(
    checkpoint: Resumable, config: Config, options: CheckpointConfig
) -> tuple[dict[str, Any] | None, list[str]]:
    """Return the optimizer's saved scalars, None for a new optimizer, and what is lost.

    Raises CheckpointError for the state of another kind of optimizer.
    """
    kept, held = moments_of(config.optimizer), [kind for kind in checkpoint.kinds if kind != "weight"]
    saved = checkpoint.metadata.get("optimizer")
    if options.no_load_optim:
        return None, ["the optimizer was not restored (no_load_optim); it starts from zero"]
    if saved is None or (kept and not held):
        return None, [
            f"the optimizer was not restored; {checkpoint.folder} was saved without it, so it starts from zero"
        ]
    if set(kept) != set(held):
        raise CheckpointError(
            f"{checkpoint.folder} holds {', '.join(held)} of another optimizer; optimizer={config.optimizer.optimizer} "
            f"keeps {', '.join(kept) or 'no moments'}. Give the optimizer of its run, or pass --no-load-optim"
        )
    if config.training.fp16 and not saved.get("loss_scaler"):
        scale = config.training.initial_loss_scale
        return saved, [f"the loss scale was not restored; the checkpoint has none, so it starts at {scale:g}"]
    return saved, []


def _saved_seed(content: Mapping[str, Any], config: Config, options: CheckpointConfig) -> tuple[int | None, list[str]]:
    """Return the seed of dropout to continue with, None for the run's own, and what is lost."""
    saved, own = (content.get("rng") or {}).get("seed"), config.training.seed
    if options.no_load_rng or saved is None:
        reason = "no_load_rng" if options.no_load_rng else "the checkpoint has no seed"
        return None, [f"the random streams were not restored ({reason}); dropout uses seed={own}"]
    if saved != own:
        return saved, [
            f"seed={own} is not applied to dropout, which continues with the checkpoint's {saved}; pass --no-load-rng "
            "to apply it"
        ]
    return saved, []


def _lost_position(checkpoint: Resumable, progress: Progress) -> list[str]:
    """Return what a foreign checkpoint does not say of its model and its data."""
    lost = []
    if uncompared := getattr(checkpoint, "uncompared", []):
        lost.append(f"{checkpoint.folder} does not state {', '.join(uncompared)}: compare them with its run yourself")
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
    now, found = config.to_dict(), []
    if config.optimizer.use_checkpoint_opt_param_scheduler:
        now["optimizer"] = {name: value for name, value in now["optimizer"].items() if not name.startswith(SCHEDULE)}
    for section in ("model", "parallel", "training", "optimizer", "data", "sft", "preference", "lora", "fp8", "guard"):
        before = saved.get(section) if isinstance(saved, dict) else None
        if isinstance(before, dict):
            here = {name: value for name, value in now[section].items() if name not in NO_TRAINING}
            found += differing(here, before)
    return [text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]} ..." for text in found]
