"""Rates of ranks together: exchanges, shared cores, and the start of a message between pipeline stages."""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron.measuring.alone import file_tree
from megatron.measuring.exchanges import ExchangeRates, groups_of
from megatron.measuring.options import Sizes
from megatron.measuring.starts import config_of
from megatron.measuring.trainings import Training, write_data
from megatron.options.config import ParallelConfig
from megatron.parallel.context import ParallelContext
from megatron.plan.rates.files import rates_of
from megatron.plan.rates.rates import Rates
from megatron.plan.timing.cluster import Cluster
from megatron.plan.timing.step import step_time
from megatron.runtime.devices import find_device

Alone = Callable[[], dict[str, Any]]
Say = Callable[[str], None]
MOST_STAGES = 4
"""Stages of the pipeline at most; a longer one would need deeper models."""
TRIED_S = 1e-3


def measure_together(alone: Alone, device: str, sizes: Sizes, per_node: int, say: Say) -> dict[str, Any]:
    """Return what the first of these ranks measures `alone`, and then all together. Collective."""
    record = find_device(device)
    ctx = ParallelContext.build(ParallelConfig(), device)
    found = alone() if ctx.rank == 0 else {}
    dist.barrier(group=ctx.control_group)
    exchanges = ExchangeRates(ctx, sizes, groups_of(ctx, per_node))
    say(f"exchanges of {ctx.world_size} ranks")
    found["collectives"] = exchanges.measure(say)
    if record.is_host and per_node > 1:
        say("ranks that compute at once")
        found["slowdown"] = exchanges.slowdown(per_node)
    # the ranks of several machines have no folder for its data
    if per_node == ctx.world_size:
        _add_message_start(found, ctx, device, sizes, say)
    dist.barrier(group=ctx.control_group)
    return found


def _add_message_start(found: Mapping[str, Any], ctx: ParallelContext, device: str, sizes: Sizes, say: Say) -> None:
    """Train in a pipeline over all ranks, and set the start of a message in the tables. Collective."""
    training = of_messages(ctx.world_size)
    if training is None:
        return
    say("a short training in a pipeline")
    with tempfile.TemporaryDirectory(prefix="megatron-measure-") as own:
        # all read the data of the first, which keeps its folder until they are done
        folder = Path(ctx.gather_objects(own)[0])
        if ctx.rank == 0:
            write_data(folder)
        dist.barrier(group=ctx.control_group)
        for _ in range(2):
            training.run(folder, device, sizes.steps)
        dist.barrier(group=ctx.control_group)
    if ctx.rank > 0:
        return
    cores = os.cpu_count() if find_device(device).is_host else None

    def rates_with(start: float) -> Rates:
        tables = [{**each, "starts": {**each["starts"], "message": start}} for each in found["tables"]]
        return rates_of(file_tree("", device, "", cores, {**found, "tables": tables}), "the measurement")

    start = message_start(training, rates_with, Cluster.of(1, ctx.world_size))
    say(f"  a message starts with {1e6 * start:.0f} us")
    for tables in found["tables"]:
        tables["starts"]["message"] = start


def of_messages(num_ranks: int) -> Training | None:
    """Return the training from which the start of a message follows; None: these ranks make no pipeline of theirs."""
    if not 1 < num_ranks <= MOST_STAGES:
        return None
    return Training("fp32", layers=num_ranks, microbatches=2 * num_ranks, stages=num_ranks)


def message_start(training: Training, rates_with: Callable[[float], Rates], cluster: Cluster) -> float:
    """Return the start of a message with which the plan predicts what a training in a pipeline took.

    `rates_with`: the rates with such a start.
    """
    without, tried = (
        step_time(config_of(training, rates.device), cluster, rates).seconds
        for rates in (rates_with(0.0), rates_with(TRIED_S))
    )
    return max(0.0, (statistics.median(training.steps) - without) / (tried - without) * TRIED_S)
