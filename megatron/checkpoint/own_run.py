"""The run that the options of a command belong to: that in its `save`, if it was first started in the same way."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from pathlib import Path
from typing import Any

from megatron.checkpoint.format import CheckpointError
from megatron.checkpoint.lineage import START_OPTIONS, Run, run_in
from megatron.checkpoint.reader import checkpoint_folders, holds_checkpoints, read_latest
from megatron.config.options import CheckpointConfig

DEFAULTS: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(CheckpointConfig)}


def own_run(options: CheckpointConfig) -> Run | None:
    """Return the run that saved in `save` and had the same START_OPTIONS at its first start; None: there is none.

    Of several it is the one that `latest` names, or else the one with the newest checkpoint.
    """
    if options.save is None or not holds_checkpoints(Path(options.save)) or resumes_itself(options):
        return None
    runs = [run_in(path) for path in checkpoint_folders(Path(options.save))]
    with contextlib.suppress(CheckpointError):
        runs.insert(0, read_latest(Path(options.save))[1])

    def is_own(run: Run) -> bool:
        return (
            bool(run.start)
            and _source(run.start.get("load"), options) == _source(options.load, options)
            and all(run.start.get(name, DEFAULTS[name]) == getattr(options, name) for name in START_OPTIONS[1:])
        )

    return next((run for run in runs if run is not None and is_own(run)), None)


def resumes_itself(options: CheckpointConfig) -> bool:
    """Return True if the options resume the newest checkpoint of the folder that the run saves to."""
    return is_same_folder(options.load, options.save) and all(
        getattr(options, name) == DEFAULTS[name] for name in START_OPTIONS[1:]
    )


def _source(load: str | None, options: CheckpointConfig) -> str | None:
    """Return the folder that a run begins with, however it is spelled; None for its own, which is empty then."""
    return None if load is None or is_same_folder(load, options.save) else os.path.realpath(load)


def is_same_folder(one: str | None, other: str | None) -> bool:
    return one is not None and other is not None and os.path.realpath(one) == os.path.realpath(other)
