"""Checkpoints of torchtitan by the names of their files. Imports no torch."""

from __future__ import annotations

import mmap
import re
from pathlib import Path

METADATA = ".metadata"
FILES = "*.distcp"
_STEP = re.compile(r"step-([0-9]+)")
_EMBEDDING = b"tok_embeddings.weight"
"""Name of a tensor that Meta's Llama and torchtitan's models alone have."""


def titan_folder(path: Path) -> Path | None:
    """Return the folder of one step: `path`, or the newest step-N in it that is complete; None: there is none."""
    if _is_step(path):
        return path
    if not path.is_dir():
        return None
    steps = {int(match[1]): each for each in path.iterdir() if (match := _STEP.fullmatch(each.name))}
    # .metadata comes last: a save that was killed has none
    return next((steps[number] for number in sorted(steps, reverse=True) if _is_step(steps[number])), None)


def is_titan_folder(path: Path) -> bool:
    return titan_folder(path) is not None


def _is_step(folder: Path) -> bool:
    path = folder / METADATA
    if not path.is_file() or not path.stat().st_size or not any(folder.glob(FILES)):
        return False
    # the names of the tensors are plain text in it, so that others' checkpoints in torch's format are known apart
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return content.find(_EMBEDDING) >= 0
