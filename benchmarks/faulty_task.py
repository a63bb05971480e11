"""Pretraining in which a rank can be made to fail from outside: `--task benchmarks.faulty_task:FaultyTask`.

A file in the folder `MEGATRON_FAULTS`, named by the id of a rank's process, holds the errno with which its next step
fails.
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


class FaultyTask(PretrainTask):
    """Pretraining whose steps fail where a file requires it."""

    Objective = FaultyLoss
