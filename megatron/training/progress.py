"""How far a run has come, and how that is kept with DeepSpeed's checkpoint.

A checkpoint is a folder `global_step<N>` with DeepSpeed's files and `progress.json`; `latest` beside it names the
newest whole one.
"""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.config import Config
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


def read_progress(checkpoint: Path, config: Config, ctx: ParallelContext) -> tuple[Progress, str]:
    """The counters and the data fingerprint that `checkpoint` was saved with.

    Raises CheckpointError if it was saved on another layout or is damaged.
    """
    path = checkpoint / PROGRESS_FILE
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
        progress, fingerprint, layout = Progress(**saved["progress"]), saved["data_fingerprint"], saved["layout"]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged ({error}); name another checkpoint in `latest`") from None
    ours = _layout(config, ctx)
    wrong = [f"{name} {layout.get(name)} there, {ours[name]} here" for name in ours if layout.get(name) != ours[name]]
    if wrong:
        raise CheckpointError(f"{checkpoint} was saved on another layout: {'; '.join(wrong)}. Resume on the same one")
    return progress, fingerprint


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
