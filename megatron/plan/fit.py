"""Comparison of a plan with the memory of its device, and the nearest layouts that fit."""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.options.config import Config, num_microbatches, sections
from megatron.options.flags import flag
from megatron.parallel.layout import Layout
from megatron.plan.memory import Stage, memory_by_stage
from megatron.plan.pipeline import schedule_bubble
from megatron.runtime.devices import GIB, device_memory_bytes, known_chip, parse_memory_gib, planned_device
from megatron.tasks.registry import load_task

RESERVE = 0.1
"""Share of the memory that allocators, communication libraries and kernels need beyond what a plan counts."""
PARTS = ("core_attn", "layernorm", "mlp_act")
"""Parts that proposals of selective recomputation name: all but the products of matrices."""
MOST_PROPOSALS = 4
MOST_DEVICES = 64
"""Times the devices of the run, up to which larger numbers are tried."""


Rules = Callable[[Config, int], Sequence[str]]
"""Returns the faults of a config on a number of ranks: megatron/settings/validation.py, check."""


@dataclass(frozen=True)
class Capacity:
    """Memory that a rank may use."""

    title: str
    size_bytes: int

    def is_enough_for(self, size_bytes: int) -> bool:
        """Return True if a plan of this size leaves the reserve free."""
        return size_bytes <= (1 - RESERVE) * self.size_bytes


@dataclass(frozen=True)
class Proposal:
    """A layout that fits: the flags that differ from the run's, and its largest rank."""

    num_devices: int
    changes: tuple[tuple[str, Any], ...]
    size_bytes: int

    @property
    def flags(self) -> list[str]:
        words = {name: " ".join(value) if isinstance(value, tuple) else value for name, value in self.changes}
        return [flag(name) if value is True else f"{flag(name)} {value}" for name, value in words.items()]


def for_device(config: Config) -> Config:
    """Return the config with the kind of the device that `device_memory` names, where its own is auto."""
    known = known_chip(config.parallel.device_memory)
    if known is None or config.parallel.device != "auto":
        return config
    device, _ = known
    return dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, device=device.name))


def capacity(config: Config, ranks_per_node: int) -> Capacity | None:
    """Return the memory of a rank's device: as the config names it, or that of this machine; None if it is unknown.

    On the CPU the ranks of a node share its memory.
    """
    given, device = config.parallel.device_memory, planned_device(config.parallel.device)
    if given is not None and (gib := parse_memory_gib(given)) is not None:
        known = known_chip(given)
        return Capacity("device" if known is None else known[1].title, int(gib * GIB))
    if device.is_host:
        whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        shared = "" if ranks_per_node == 1 else f" / {ranks_per_node} ranks"
        return Capacity(f"this machine{shared}", whole // ranks_per_node)
    size = device_memory_bytes(device)
    return None if size is None else Capacity(f"this machine's {device.name}", size)


def needed_bytes(config: Config, stage: Stage) -> int:
    """Return what a rank needs of its device: on the CPU, host memory too."""
    on_host = planned_device(config.parallel.device).is_host
    return stage.memory.total + (stage.host_bytes if on_host else 0)


def largest_rank(config: Config, num_devices: int) -> int:
    """Return what the rank needs that needs most."""
    stages = memory_by_stage(config, Layout.of(config.parallel, num_devices))
    return max(needed_bytes(config, stage) for stage in stages)


def fit_text(room: Capacity, size_bytes: int) -> str:
    """Return '61.2 of 79.2 GiB (H100 80 GB), 77 %: fits'."""
    share = size_bytes / room.size_bytes
    verdict = "fits" if room.is_enough_for(size_bytes) else "does not fit"
    if verdict != "fits" and share <= 1:
        verdict = f"too tight, as allocators and kernels need some {RESERVE:.0%} more"
    sizes = f"{size_bytes / GIB:,.1f} of {room.size_bytes / GIB:,.1f} GiB ({room.title})"
    return f"{verdict}: {sizes}, {share:,.0%}"


def memory_warning(config: Config, num_devices: int, ranks_per_node: int) -> str | None:
    """Return the warning that a run is likely to lack memory; None if it fits, or the device is unknown."""
    room, size = capacity(config, ranks_per_node), largest_rank(config, num_devices)
    if room is None or room.is_enough_for(size):
        return None
    return f"the plan {fit_text(room, size)}; --dry-run (HL_DRY_RUN=1) lists layouts that fit"


# Nothing here knows which change saves what: candidates in the order of a rough cost are planned until enough of them
# fit.
def propose(config: Config, num_devices: int, devices_per_node: int, room: Capacity, check: Rules) -> list[Proposal]:
    """Return the layouts nearest to the run's that fit, fewest devices first, then by estimated cost.

    Each is a valid config, and fits by its own plan. None changes all the options that a cheaper one changes.
    """
    number = num_devices
    while number <= MOST_DEVICES * num_devices:
        found: list[Proposal] = []
        for candidate, changes in _candidates(config, number, devices_per_node):
            names = {name for name, _ in changes}
            if any({name for name, _ in other.changes} <= names for other in found) or check(candidate, number):
                continue
            size = largest_rank(candidate, number)
            if room.is_enough_for(size):
                found.append(Proposal(number, changes, size))
            if len(found) == MOST_PROPOSALS:
                break
        if found:
            return found
        number *= 2
    return []


def _candidates(
    config: Config, num_devices: int, devices_per_node: int
) -> Iterator[tuple[Config, tuple[tuple[str, Any], ...]]]:
    """Yield configs with other layouts and their changes, by estimated cost."""
    parallel, training = config.parallel, config.training
    powers = [2**power for power in range(num_devices.bit_length())]
    tensor = [size for size in powers if size <= devices_per_node] + [parallel.tensor_model_parallel_size]
    pipeline = [size for size in powers if size <= config.model.num_layers] + [parallel.pipeline_model_parallel_size]
    zero = [config.optimizer.zero_stage, *range(config.effective_zero_stage + 1, 4)]
    own = training.recompute_granularity
    recompute = [own, "selective", "full"]
    micro = [training.micro_batch_size] + [size for size in powers if size < training.micro_batch_size]
    if load_task(config).data.num_microbatches(1) is None:
        micro = micro[:1]  # the data decides what a microbatch holds
    choices = itertools.product(
        *(sorted(set(values), key=str) for values in (tensor, pipeline, zero, recompute, micro))
    )
    found = []
    for t, p, stage, granularity, size in choices:
        if num_devices % (t * p) or (p > 1 and stage >= 2):
            continue
        layout = {
            "tensor_model_parallel_size": t,
            "pipeline_model_parallel_size": p,
            "sequence_parallel": parallel.sequence_parallel and t > 1,
            "zero_stage": stage,
            "recompute_granularity": granularity,
            "recompute_modules": PARTS if granularity == "selective" != own else training.recompute_modules,
            "micro_batch_size": size,
        }
        if p == 1 and parallel.schedule != "1f1b":  # which needs a pipeline
            layout |= {"num_virtual_stages_per_pipeline_rank": 1}
            layout |= {"pipeline_schedule": "1f1b"} if parallel.pipeline_schedule else {}
        for extra in ({}, {"sequence_parallel": True} if t > 1 else None, {"offload_optimizer": True}):
            if extra is None or ("offload_optimizer" in extra and stage < 2):
                continue
            candidate, changes = _changed(config, layout | extra)
            found.append((_cost(candidate, num_devices, devices_per_node), len(changes), candidate, changes))
    for _, _, candidate, changes in sorted(found, key=lambda entry: entry[:2]):
        yield candidate, changes


def _changed(config: Config, values: dict[str, Any]) -> tuple[Config, tuple[tuple[str, Any], ...]]:
    """Return the config with these values, and those that differ from its own."""
    changes: list[tuple[str, Any]] = []
    for section, cls in sections().items():
        names = {field.name for field in dataclasses.fields(cls)} & set(values)
        own = getattr(config, section)
        differing = {name: values[name] for name in sorted(names) if getattr(own, name) != values[name]}
        if differing:
            config = dataclasses.replace(config, **{section: dataclasses.replace(own, **differing)})
            changes += differing.items()
    return config, tuple(changes)


def _cost(config: Config, num_devices: int, devices_per_node: int) -> float:
    """Estimate the time of a step relative to that without any of these means; good for an order alone.

    Counted exactly are the bubble of the pipeline and the forward pass that full recomputation repeats; the rest stands
    for communication.
    """
    parallel, optimizer = config.parallel, config.optimizer
    layout = Layout.of(parallel, num_devices)
    t, m = layout.tensor_size, num_microbatches(config.training, layout.num_batch_ranks)
    cost = 1 / (1 - schedule_bubble(config, m))
    cost *= {"none": 1.0, "selective": 1.03, "full": 4 / 3}[config.training.recompute_granularity]
    cost *= 1 + 0.05 * math.log2(t) + (1.0 if t > devices_per_node else 0.0)
    cost *= {3: 1.15, 2: 1.05}.get(optimizer.zero_stage, 1.0)
    cost *= 2.0 if optimizer.offload_optimizer else 1.0
    return cost * (1 + 0.02 * math.log2(1 + m))
