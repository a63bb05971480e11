"""Pretraining in which a rank can be made to fail from outside.

A file in the folder `MEGATRON_FAULTS`, named by the id of a rank's process, holds the errno with which its next step
fails. The same folder, on PYTHONPATH, has every process of the run `plant` this loss at its start: code of a user's own
excludes --keep-healthy-ranks.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.tasks.data import Microbatch
from megatron.tasks.objective import CrossEntropy, Forward
from megatron.tasks.pretrain import PretrainTask

if TYPE_CHECKING:
    from megatron.parallel.context import ParallelContext

FOLDER = "MEGATRON_FAULTS"
REPOSITORY = Path(__file__).resolve().parent.parent


class FaultyLoss(CrossEntropy):
    """A cross-entropy whose steps fail where a file requires it."""

    def before_step(
        self, microbatches: Sequence[Microbatch], forward: Forward, ctx: ParallelContext
    ) -> list[Microbatch]:
        """Raise OSError where a file says so."""
        if folder := os.environ.get(FOLDER):
            path = Path(folder, str(os.getpid()))
            if path.exists():
                number = int(path.read_text())
                path.unlink()
                raise OSError(number, os.strerror(number))
        return super().before_step(microbatches, forward, ctx)


def plant() -> None:
    """Replace the loss of pretraining in this process."""
    PretrainTask.Objective = FaultyLoss


def variables(folder: Path) -> dict[str, str]:
    """Return the variables of a run whose faults lie in this folder, once it has what Python runs at each start."""
    (folder / "sitecustomize.py").write_text("from benchmarks import faulty_task\n\nfaulty_task.plant()\n")
    path = [str(folder), str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {FOLDER: str(folder), "PYTHONPATH": os.pathsep.join(path)}
