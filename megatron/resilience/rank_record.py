"""Record of a rank's own part of its steps: before anything was summed over ranks, without the waits for other ranks.

After a sum or a wait all ranks look alike. The straggler line compares the times in the records of all ranks
(observability/rank_times.py), the message on a bad step what was not finite in them (attribution.py). What they find
goes into the reports of the ranks that it names, so the watchdog's verdict and the reason of a restart have it too.
"""

from __future__ import annotations

import dataclasses
import socket
from typing import TYPE_CHECKING

from megatron.parallel.phase_clock import BACKWARD, DATA, FORWARD, OPTIMIZER

if TYPE_CHECKING:  # they import torch, which drawing a run does not need
    from megatron.parallel.context import ParallelContext
    from megatron.parallel.finite_checks import FirstBad

OWN_PHASES = (FORWARD, BACKWARD, OPTIMIZER, DATA)
Times = tuple[float, ...]
"""Seconds of a step in each of OWN_PHASES."""


@dataclasses.dataclass(frozen=True)
class RankPlace:
    """A rank, and where it stands; the same in all steps."""

    rank: int
    host: str
    device: str
    stage: int
    tensor_rank: int
    replica: int
    """Its place among the data-parallel ranks."""
    team: int
    """Number of the neighbouring replicas that exchange in their passes: tokens of experts, keys and values of the same
    rows. Without these that of its replica."""

    @classmethod
    def of(cls, ctx: ParallelContext) -> RankPlace:
        """Return that of this rank."""
        team = ctx.grad_rank // ctx.team_size
        return cls(ctx.rank, socket.gethostname(), str(ctx.device), ctx.stage, ctx.tensor_rank, ctx.grad_rank, team)

    @property
    def name(self) -> str:
        return f"rank {self.rank} on {self.host}"

    def __str__(self) -> str:
        return f"{self.name} ({self.device})"


@dataclasses.dataclass(frozen=True)
class RankRecord:
    """A rank's own part of its last steps. What was not measured, or is not needed where the record goes, is left out.

    Times are medians over its last steps, with --log-straggler; `first` and `bad_weights` are of one bad step.
    """

    place: RankPlace
    own: Times = ()
    earlier: Times | None = None
    """Those of the first steps; None until there are enough."""
    step_s: float = 0.0
    num_steps: int = 0
    """Number of steps of `own`."""
    positions: float = 0.0
    """Positions that its data had in these steps; 0 on ranks that read none."""
    work: Times = ()
    """Its work by the plan: FLOPs of forward and backward for a token, and trained parameters; 0 for the data."""
    first: FirstBad | None = None
    """Its first check that failed; None: whatever it computed was finite."""
    bad_weights: tuple[str, ...] = ()
    """Some of its weights that are not finite."""
    loss: str = ""
    """The user's loss function and its file, if there is one."""
