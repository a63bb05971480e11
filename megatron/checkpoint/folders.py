"""Checkpoints in the folder of a run, by names, what their manifests say first, and the runs that they belong to.

Imports no torch, so that a launcher can read them.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import re
import secrets
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from megatron.runtime.commands import UserError
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


class CheckpointError(UserError, ValueError):
    """A checkpoint is missing, damaged, of another model, or cannot be written. The message names the file."""


class SaveError(CheckpointError):
    """A checkpoint or an export could not be written; earlier ones are as they were. Another attempt may succeed."""


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


# ---------------------------------------------------------------------------------------------------------------------
# Identity of a run and its lineage: the checkpoints that it and the runs before it have saved on the way to its state.
#
# Each manifest holds a run's identity, the options of its first start and its ancestors; `latest` holds those of the
# run that it belongs to.

START_OPTIONS = ("load", "ckpt_step", "universal_checkpoint", "finetune", "upcycle", "no_load_optim", "no_load_rng")
"""Options that select the start of a run; they apply to its first start alone."""
UNRECORDED = "unrecorded"
"""Identity of the runs whose checkpoints hold none."""


class Parent(Protocol):
    """Checkpoint of any format, that a run begins at."""

    folder: Path

    @property
    def metadata(self) -> Mapping[str, Any]: ...


@dataclass(frozen=True)
class Ancestor:
    """The checkpoint at which a run began, of an earlier run."""

    run: str
    folder: str
    token: str
    """Token of its save, which no other checkpoint has. Empty for foreign checkpoints."""
    iteration: int
    is_continued: bool
    """False where only the weights were taken, so that nothing else of that run leads to this one."""


@dataclass(frozen=True)
class Run:
    """A run, over all its starts.

    Its identity is drawn, not derived from options, so that two runs of one command differ. As in Neptune, a run that
    branches keeps what its parent saved up to that step, and nothing later.
    """

    id: str = UNRECORDED
    start: Mapping[str, Any] = field(default_factory=dict)
    """START_OPTIONS of its first start."""
    ancestors: tuple[Ancestor, ...] = ()
    """From the first run to the parent."""

    @classmethod
    def new(cls, start: Mapping[str, Any], parent: Parent | None = None, *, is_continued: bool = False) -> Run:
        """Return a run with a random identity, which begins at the checkpoint `parent`."""
        if parent is None:
            return cls(secrets.token_hex(8), dict(start))
        earlier = cls.of(parent.metadata)
        progress = parent.metadata.get("progress") or {}
        iteration = int(progress.get("iteration") or 0)
        ancestor = Ancestor(earlier.id, str(parent.folder), getattr(parent, "token", ""), iteration, is_continued)
        return cls(secrets.token_hex(8), dict(start), (*earlier.ancestors, ancestor))

    @classmethod
    def of(cls, metadata: Mapping[str, Any]) -> Run:
        """Return the run that saved a checkpoint. Raises CheckpointError if the record in its metadata is damaged."""
        record = metadata.get("run")
        if record is None:  # saved before runs had identities
            options = (metadata.get("config") or {}).get("checkpoint") or {}
            return cls(start={name: options[name] for name in START_OPTIONS if name in options})
        try:
            ancestors = tuple(Ancestor(**ancestor) for ancestor in record["ancestors"])
            return cls(str(record["id"]), dict(record["start"]), ancestors)
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"its run is {str(record)[:200]}, which is damaged ({error!r})") from None

    def to_json(self) -> dict[str, Any]:
        return {"id": self.id, "start": dict(self.start), "ancestors": [asdict(one) for one in self.ancestors]}

    def continues(self, other: Run, iteration: int) -> bool:
        """Return True if the checkpoint of `other` after `iteration` steps led to this run's state, or is its own."""
        if other.id == self.id:
            return True
        # where weights alone were taken, a fallback to that run, or to those before it, would bring its optimizer and
        # progress back
        continued = itertools.takewhile(lambda one: one.is_continued, reversed(self.ancestors))
        # what an ancestor saved after the branch belongs to its own further way
        return any(one.run == other.id and iteration <= one.iteration for one in continued)


def run_in(folder: Path) -> Run | None:
    """Return the run that saved the checkpoint in this folder, without verifying it; None: its manifest is damaged."""
    metadata = read_metadata(folder)
    if metadata is None:
        return None
    try:
        return Run.of(metadata)
    except CheckpointError:
        return None


def of_run(run: Run, folders: Sequence[Path], *, with_ancestors: bool) -> list[Path]:
    """Return the folders of those checkpoints that the run saved, and that its ancestors saved on the way to it."""
    own = []
    for folder in folders:
        saver = run_in(folder)
        # whose it was is not known, so it is neither resumed nor removed for being old
        if saver is None:
            continue
        led_here = with_ancestors and run.continues(saver, iteration_of(folder.name))
        if saver.id == run.id or led_here:
            own.append(folder)
    return own
