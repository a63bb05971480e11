"""Loads of experts over the run: shares for the log, a warning of a collapse, and the record of a checkpoint.

A load is the number of tokens that chose an expert. Each rank adds up its own on the device; they are reduced, and the
host waits for them, once a log interval and once a save.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.observability.load_report import LoadReport
from megatron.options.config import Config
from megatron.parallel.context import ParallelContext

COLLAPSE_STEPS = 100
"""Steps of log lines in a row after which one expert that most tokens choose is a collapse."""


class LoadWatch:
    """Adds up the loads of the steps. Collective in `read` and `record`; on every rank alike."""

    def __init__(self, config: Config, ctx: ParallelContext) -> None:
        model = config.model
        self._ctx, self._topk, self._num_experts = ctx, model.moe_router_topk, model.num_experts or 0
        self._layers = [number for number in range(model.num_layers) if model.has_experts(number)]
        self._has_capacity = model.moe_expert_capacity_factor is not None
        self._limit = config.logging.moe_collapse_share
        self._above: dict[tuple[int, int], int] = {}
        """Steps in a row for which an expert has been above the limit."""
        self._warned: set[int] = set()
        self.restart()

    def restart(self) -> None:
        """Forget the steps so far: after a rollback they are no longer part of the run."""
        self._pending: dict[int, Tensor] = {}
        self._pending_steps = 0
        shape = len(self._layers), self._num_experts + 1
        # float64 on the host: counts of any run are exact
        self._of_interval, self._interval_steps = torch.zeros(shape, dtype=torch.float64), 0
        self._of_save, self._save_steps = torch.zeros(shape, dtype=torch.float64), 0

    def add(self, by_layer: Mapping[int, Tensor]) -> None:
        """Add the loads of a step that was applied: `ExpertLoads.by_layer`. Waits for nothing."""
        if not self._layers:
            return
        self._pending_steps += 1
        for layer, counts in by_layer.items():
            before = self._pending.get(layer)
            self._pending[layer] = counts if before is None else before + counts

    def read(self) -> LoadReport | None:
        """Return the loads since the previous call; None: no step was applied, or there are no experts. Collective."""
        self._reduce()
        loads, steps = self._of_interval, self._interval_steps
        self._of_interval, self._interval_steps = torch.zeros_like(loads), 0
        choices = loads[:, :-1].sum(1)
        if not steps or not choices.any():
            return None
        tokens = (choices / self._topk).clamp(min=1.0)
        shares = (loads[:, :-1] / tokens.unsqueeze(1)).tolist()
        dropped = float(loads[:, -1].sum() / choices.sum()) if self._has_capacity else None
        by_layer = dict(zip(self._layers, shares, strict=True))
        return LoadReport(by_layer, self._topk / self._num_experts, dropped, tuple(self._collapses(by_layer, steps)))

    def record(self) -> dict[str, Any] | None:
        """Return the loads since the previous call, for a checkpoint: JSON values. None: as `read`. Collective."""
        self._reduce()
        loads, steps = self._of_save, self._save_steps
        self._of_save, self._save_steps = torch.zeros_like(loads), 0
        if not steps:
            return None
        by_layer = zip(self._layers, loads[:, :-1].long().tolist(), strict=True)
        return {"steps": steps, "tokens": {str(layer): counts for layer, counts in by_layer}}

    def _reduce(self) -> None:
        """Move what is on the devices to the host, summed over all ranks. Collective."""
        if not self._pending_steps:
            return
        ctx = self._ctx
        # the same tokens are on all tensor-parallel ranks, unless these share the sequence
        own = self._pending if ctx.tensor_rank == 0 or ctx.sequence_parallel else {}
        nothing = torch.zeros(self._num_experts + 1, dtype=torch.float32, device=ctx.device)
        # other stages hold the other layers
        table = torch.stack([own[layer].float() if layer in own else nothing for layer in self._layers])
        if ctx.world_size > 1:
            dist.all_reduce(table)
        loads = table.cpu().double()
        self._of_interval += loads
        self._of_save += loads
        self._interval_steps += self._pending_steps
        self._save_steps += self._pending_steps
        self._pending, self._pending_steps = {}, 0

    def _collapses(self, by_layer: Mapping[int, list[float]], steps: int) -> list[str]:
        """Return a warning, once a layer, where one expert was above the limit in each log line of so many steps."""
        above = {
            (layer, expert): self._above.get((layer, expert), 0) + steps
            for layer, shares in by_layer.items()
            for expert, share in enumerate(shares)
            if share > self._limit
        }
        self._above = above
        # with every expert for every token there is no choice
        if self._topk >= self._num_experts:
            return []
        warnings = []
        for (layer, expert), so_many in above.items():
            if so_many < COLLAPSE_STEPS or layer in self._warned:
                continue
            self._warned.add(layer)
            share = by_layer[layer][expert]
            warnings.append(
                f"WARNING: {share:.0%} of the tokens chose expert {expert} of layer {layer}, and more than "
                f"moe_collapse_share={self._limit:g} in each log line of {so_many} steps: the router has collapsed. "
                "Raise moe_aux_loss_coeff or moe_z_loss_coeff, lower the learning rate, or resume from an earlier "
                "checkpoint"
            )
        return warnings
