"""Identity of a run and its lineage: the checkpoints that it and the runs before it have saved on the way to its state.

Each manifest holds a run's identity, the options of its first start and its ancestors; `latest` holds those of the run
that it belongs to.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from megatron.checkpoint.folders import iteration_of, read_metadata
from megatron.checkpoint.format import CheckpointError

START_OPTIONS = ("load", "ckpt_step", "universal_checkpoint", "finetune", "no_load_optim", "no_load_rng")
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
