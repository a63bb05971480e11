"""Checkpoints in the folder of a run, by names, and what their manifests say first.

Imports no torch, so that a launcher can read them.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron.checkpoint.errors import CheckpointError
from megatron.runtime.files import parse_json

MANIFEST = "checkpoint.json"
"""File of each checkpoint of a run."""
HEAD_LINES = 8
"""Lines of a manifest before its parameters; the metadata is one of them."""
TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,150}")
# `.RANK` at its end: the reason of a failed save while that rank still writes it (saver.py)
LEFTOVER = re.compile(
    r"\.(?P<tag>.+)\.(?P<state>partial|failed|replaced|deleted|latest)-(?P<token>[A-Za-z0-9]+)(\.[0-9]+)?"
)
"""Hidden names beside the checkpoints, of a save in progress or of one that was killed; see `hidden_path`."""
REMEDY = "copy it again from where the checkpoint was saved, or load another checkpoint"


def iteration_of(tag: str) -> int:
    """Number at the end of a tag; -1 where there is none."""
    number = re.search(r"[0-9]+$", tag)
    return int(number[0]) if number else -1


def holds_checkpoints(folder: Path) -> bool:
    """Return True if the folder contains a checkpoint, complete or not."""
    return folder.is_dir() and bool(checkpoint_folders(folder))


def checkpoint_folders(save: Path) -> list[Path]:
    """Folders that may be checkpoints, newest first; one that was being replaced follows its successor."""
    keys = {}
    for path in save.iterdir():
        # the one that a save was replacing when it was killed is whole, under its hidden name
        tag = path.name
        left = LEFTOVER.fullmatch(path.name)
        if left is not None and left["state"] == "replaced":
            tag = left["tag"]
        if TAG.fullmatch(tag) and os.path.lexists(path / MANIFEST):
            # by number, not by text: global_step1000 is newer than global_step200
            keys[path] = (iteration_of(tag), tag == path.name, path.name)
    return sorted(keys, key=lambda path: keys[path], reverse=True)


def read_metadata(folder: Path) -> dict[str, Any] | None:
    """Return the metadata of a checkpoint, of which nothing else is read or verified; None if it is damaged."""
    begin = b' "metadata": '
    # one line of the text: the manifest of a large model has tens of thousands
    with contextlib.suppress(CheckpointError, OSError, ValueError), open_file(folder / MANIFEST) as at:
        # a duplicate: closing the file object closes its descriptor, and `at` is open_file's to close
        with os.fdopen(os.dup(at), "rb") as file:
            line = next((line for line in itertools.islice(file, HEAD_LINES) if line.startswith(begin)), b"")
        metadata = parse_json(line.removeprefix(begin).rstrip(b",\n"))
        if isinstance(metadata, dict):
            return metadata
    return None


@contextlib.contextmanager
def open_file(path: Path) -> Iterator[int]:
    """Open a regular file for reading, never through a link, and give its descriptor. Raises CheckpointError."""
    try:
        # O_NONBLOCK: a pipe in its place must not block us
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        # the whole folder has gone: it was removed as an old one while this was being read, and is not damaged
        if not path.parent.exists():
            raise CheckpointError(
                f"{path.parent} is not there any more; a run that goes on removes its older checkpoints (--keep-last). "
                "Start again, or let the run keep more"
            ) from None
        raise CheckpointError(f"{path} is not there; {REMEDY}") from None
    except OSError as error:
        # Linux's answer to O_NOFOLLOW for a link at the end of the path
        if error.errno == errno.ELOOP:
            raise CheckpointError(f"{path} is a link, which is never followed; put the file itself there") from None
        raise CheckpointError(f"{path} cannot be read: {error.strerror}; {REMEDY}") from error
    try:
        # of what was opened, not of the path, behind which another file may be by now
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise CheckpointError(f"{path} is not a regular file; {REMEDY}")
        yield descriptor
    finally:
        os.close(descriptor)
