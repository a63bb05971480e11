"""How far a run has come, and how that is kept with DeepSpeed's checkpoint.

A checkpoint is a folder `global_step<N>` with DeepSpeed's files and `progress.json`; `latest` beside it names the
newest whole one.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.config import Config
from megatron.data.blend import content_of
from megatron.parallel.context import ParallelContext
from megatron.training.engine import Engine

PROGRESS_FILE = "progress.json"


class CheckpointError(ValueError):
    """A folder holds no checkpoint, or one that this run cannot continue."""


@dataclass
class Progress:
    """Counters of a run. Global: equal on every rank, and enough to continue on any data-parallel size."""

    iteration: int = 0
    consumed_samples: int = 0
    skipped_iterations: int = 0
    nan_iterations: int = 0


@dataclass(frozen=True)
class SavedData:
    """What a checkpoint knows of the data it was trained on."""

    checkpoint: Path
    fingerprint: str
    config: Mapping[str, Mapping[str, Any]]
    """The run's config, as Config.to_dict gives it."""


def find_checkpoint(folder: str | None) -> Path | None:
    """The newest whole checkpoint in `folder`, or None where a run starts anew.

    Raises CheckpointError if the folder holds something else, or `latest` names what is not there.
    """
    if folder is None or not os.path.exists(folder):
        return None
    if not os.path.isdir(folder):
        raise CheckpointError(f"load={folder} is a file; give the folder that a run saved its checkpoints in")
    if not os.listdir(folder):
        return None
    latest = Path(folder) / "latest"
    if not latest.is_file():
        raise CheckpointError(
            f"load={folder} holds files, but no checkpoint: it has no `latest`; give the folder that a run saved its "
            "checkpoints in, or an empty one to start anew"
        )
    tag = latest.read_text(encoding="utf-8").strip()
    checkpoint = latest.parent / tag
    if not tag or not (checkpoint / PROGRESS_FILE).is_file():
        raise CheckpointError(
            f"{latest} names {tag!r}, but {checkpoint / PROGRESS_FILE} is not there; write the name of a whole "
            "checkpoint into `latest`, or remove it with the folder's contents to start anew"
        )
    return checkpoint


def read_progress(checkpoint: Path, config: Config, ctx: ParallelContext) -> tuple[Progress, SavedData]:
    """The counters that `checkpoint` was saved with, and what it tells of its data.

    Raises CheckpointError if it was saved on another layout or is damaged.
    """
    path = checkpoint / PROGRESS_FILE
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
        progress, layout = Progress(**saved["progress"]), saved["layout"]
        data = SavedData(checkpoint, saved["data_fingerprint"], saved["config"])
        length_of(data.config)
        options_of(data.config)
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged ({error}); name another checkpoint in `latest`") from None
    ours = _layout(config, ctx)
    wrong = [f"{name} {layout.get(name)} there, {ours[name]} here" for name in ours if layout.get(name) != ours[name]]
    if wrong:
        raise CheckpointError(f"{checkpoint} was saved on another layout: {'; '.join(wrong)}. Resume on the same one")
    return progress, data


def check_data(saved: SavedData, config: Config, fingerprint: str) -> str | None:
    """What has changed in the samples, or their order, since the checkpoint; None: nothing.

    Raises CheckpointError where something has, unless allow_data_change.
    """
    if saved.fingerprint == fingerprint:
        return None
    there, here = saved.config, config.to_dict()
    before, now = options_of(there), options_of(here)
    if content_of(saved.fingerprint) == content_of(fingerprint):
        change = (
            f"{saved.checkpoint} was saved by a run of {length_of(there)}; this one has {length_of(here)}, for which "
            f"data_path={_said(now['data_path'])} is repeated another number of times. Epochs are shuffled together, "
            "so one more or less changes the order of all samples"
        )
        remedy = "Keep the length of that run"
    else:
        found = [
            f"{name}={_said(now[name])} here, {_said(before[name])} there" for name in now if now[name] != before[name]
        ]
        change = (
            f"{saved.checkpoint} was trained on other data than this run finds: "
            + ("; ".join(found) or f"data_path={_said(now['data_path'])} holds other documents or tokens than it did")
            + f" (fingerprint {content_of(fingerprint)[:12]} here, {content_of(saved.fingerprint)[:12]} there)"
        )
        remedy = "Give the data of that run"
    if not config.checkpoint.allow_data_change:
        raise CheckpointError(
            f"{change}. {remedy}, or pass --allow-data-change to go on in the new order, after as many samples as the "
            "checkpoint has seen: some documents are then seen again, others never"
        )
    return change


def length_of(config: Mapping[str, Mapping[str, Any]]) -> str:
    """How long the run of a config is, in its own words."""
    samples, iters = config["training"]["train_samples"], config["training"]["train_iters"]
    size = config["training"]["global_batch_size"]
    return f"train_samples={samples}" if samples else f"train_iters={iters} of global_batch_size={size}"


def options_of(config: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The options that say which training samples there are, and in which order."""
    data, training = config["data"], config["training"]
    return {
        "data_path": data["data_path"] or data["train_data_path"],
        "split": data["split"],
        "seq_length": training["seq_length"],
        "seed": training["seed"],
    }


def _said(value: Any) -> str:
    return " ".join(map(str, value)) or "nothing" if isinstance(value, list | tuple) else str(value)


def _layout(config: Config, ctx: ParallelContext) -> dict[str, Any]:
    return {
        "pipeline_model_parallel_size": ctx.num_stages,
        "tensor_model_parallel_size": ctx.tensor_size,
        "data_parallel_size": ctx.data_size,
        "zero_stage": config.effective_zero_stage,
        "precision": config.training.precision,
    }


def save(engine: Engine, progress: Progress, fingerprint: str) -> Path:
    """Write a checkpoint into the configured folder and return its place. Collective.

    `latest` names it only once every rank has written its part.
    """
    folder = engine.config.checkpoint.save
    assert folder is not None
    tag = f"global_step{progress.iteration}"
    checkpoint = Path(folder) / tag
    if engine.ctx.rank == 0:
        checkpoint.mkdir(parents=True, exist_ok=True)
        content = {
            "progress": dataclasses.asdict(progress),
            "data_fingerprint": fingerprint,
            "layout": _layout(engine.config, engine.ctx),
            "config": engine.config.to_dict(),
        }
        (checkpoint / PROGRESS_FILE).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    engine.save(folder, tag)
    return checkpoint
