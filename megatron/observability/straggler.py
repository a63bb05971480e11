"""Measurement of each rank's own work, which shows a slow rank: the whole step takes equally long on all of them.

Own work is the forward passes and the wait for the rank's own data. Where tensor-parallel ranks wait for each other
inside a forward pass, only the parts between their collectives count: from the output of a column-parallel layer to the
input of the row-parallel one after it. On accelerators the times come from events, which are read with the log line: no
step waits for the host.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from typing import Any

from torch import nn

from megatron.observability.rank_times import RankTimes, StragglerStats, straggler_stats
from megatron.parallel.context import ParallelContext
from megatron.parallel.linear import ColumnParallelLinear, RowParallelLinear


class Straggler:
    """Measures this rank's training steps once it is created."""

    def __init__(self, ctx: ParallelContext, module: nn.Module):
        """`module`: the module whose call is the forward pass of a microbatch."""
        self._ctx = ctx
        self._steps = 0
        self._data_wait_s = self._own_s = 0.0
        self._pairs: list[tuple[Any, Any]] = []
        self._makes_events = ctx.device.type != "cpu"
        for first, at_output, last, at_input in _sections(ctx, module):
            began: list[Any] = []
            # torch calls hooks with the module and its inputs (and outputs)
            begin = _Begin(self, began)
            finish = _Finish(self, began)
            (first.register_forward_hook if at_output else first.register_forward_pre_hook)(begin)
            (last.register_forward_pre_hook if at_input else last.register_forward_hook)(finish)

    def add_data_wait(self, seconds: float) -> None:
        """Add the time that a step waited for its data."""
        self._data_wait_s += seconds

    def count_step(self) -> None:
        self._steps += 1

    def _mark(self) -> Any:
        if not self._makes_events:
            return time.perf_counter()
        from deepspeed.accelerator import get_accelerator

        event = get_accelerator().Event(enable_timing=True)
        event.record()
        return event

    def _add(self, begin: Any, end: Any) -> None:
        if self._makes_events:
            self._pairs.append((begin, end))
        else:
            self._own_s += end - begin

    def read(self) -> StragglerStats:
        """Return the statistics over all ranks since the previous call. Collective.

        The device must have ended the last step.
        """
        for begin, end in self._pairs:
            self._own_s += begin.elapsed_time(end) / 1000
        steps = max(1, self._steps)
        mine = RankTimes(self._ctx.stage, socket.gethostname(), self._own_s / steps, self._data_wait_s / steps)
        self._steps, self._own_s, self._data_wait_s = 0, 0.0, 0.0
        self._pairs.clear()
        return straggler_stats(self._ctx.gather_objects(mine))


class _Begin:
    def __init__(self, straggler: Straggler, began: list[Any]):
        self._straggler, self._began = straggler, began

    def __call__(self, module: nn.Module, *values: Any) -> None:
        if module.training:
            self._began[:] = [self._straggler._mark()]


class _Finish(_Begin):
    def __call__(self, module: nn.Module, *values: Any) -> None:
        if module.training and self._began:
            self._straggler._add(self._began.pop(), self._straggler._mark())


def _sections(ctx: ParallelContext, whole: nn.Module) -> Iterator[tuple[nn.Module, bool, nn.Module, bool]]:
    """Yield sections without a wait for others: from a module's input (True: output) to one's output (True: input)."""
    if ctx.tensor_size == 1:
        yield whole, False, whole, False
        return
    for module in whole.modules():
        children = list(module.children())
        columns = [child for child in children if isinstance(child, ColumnParallelLinear)]
        rows = [child for child in children if isinstance(child, RowParallelLinear)]
        # fewer key and value heads than ranks are gathered in between
        if columns and rows and getattr(module, "own_kv_head", None) is None:
            yield columns[-1], True, rows[0], True
