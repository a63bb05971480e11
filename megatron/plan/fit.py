"""Comparison of a plan with the memory of its device, and the nearest layouts that fit."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.models.rules import row_multiple
from megatron.options.config import Config, num_microbatches
from megatron.options.flags import flag
from megatron.parallel.layout import Layout
from megatron.plan.memory import Stage, memory_by_stage
from megatron.plan.pipeline import schedule_bubble
from megatron.plan.search.bounds import ModelSize, least_bytes
from megatron.plan.search.space import Changes, Rules, changed
from megatron.runtime.device_cpu import host_memory
from megatron.runtime.devices import GIB, device_memory_bytes, known_chip, parse_memory_gib, planned_device
from megatron.tasks.registry import load_task

RESERVE = 0.1
"""Share of the memory that allocators, communication libraries and kernels need beyond what a plan counts."""
LEAST_PLACES = 8_192
"""Tokens of a row that each rank has where proposals let ranks share rows: shorter rows are cut faster in other ways.
"""
UNIT = 1_024
"""Tokens of which the longest sequence is a multiple."""
LONGEST = 2**30
"""Tokens beyond which no longer sequence is sought."""
PARTS = ("core_attn", "layernorm", "mlp_act")
"""Parts that proposals of selective recomputation name: all but the products of matrices."""
MOST_PROPOSALS = 4
MOST_DEVICES = 64
"""Times the devices of the run, up to which larger numbers are tried."""


@dataclass(frozen=True)
class Capacity:
    """Memory that a rank may use."""

    title: str
    size_bytes: int

    def is_enough_for(self, size_bytes: float) -> bool:
        """Return True if a plan of this size leaves the reserve free."""
        return size_bytes <= (1 - RESERVE) * self.size_bytes


@dataclass(frozen=True)
class Proposal:
    """A layout that fits: the options that differ from the run's, and its largest rank."""

    num_devices: int
    changes: Changes
    size_bytes: int

    @property
    def names(self) -> set[str]:
        return {name for name, _ in self.changes}

    @property
    def flags(self) -> list[str]:
        return [_flag_text(name, value) for name, value in self.changes]


def _flag_text(name: str, value: Any) -> str:
    if value is True:
        return flag(name)
    words = " ".join(value) if isinstance(value, tuple) else value
    return f"{flag(name)} {words}"


def for_device(config: Config) -> Config:
    """Return the config with the kind of the device that `device_memory` names, where its own is auto."""
    known = known_chip(config.parallel.device_memory)
    if known is None or config.parallel.device != "auto":
        return config
    device, _ = known
    return dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, device=device.name))


def capacity(config: Config, ranks_per_node: int) -> Capacity | None:
    """Return the memory of a rank's device: as the config names it, or that of this machine; None if it is unknown."""
    given, device = config.parallel.device_memory, planned_device(config.parallel.device)
    given_gib = None if given is None else parse_memory_gib(given)
    if given_gib is not None:
        title, known = "device", known_chip(given)
        if known is not None:
            title = known[1].title
        return Capacity(title, int(given_gib * GIB))
    if device.is_host:  # whose memory the ranks of a node share
        whole, title = host_memory(), "this machine"
        if ranks_per_node > 1:
            title += f" / {ranks_per_node} ranks"
        return Capacity(title, whole // ranks_per_node)
    size = device_memory_bytes(device)
    if size is None:
        return None
    return Capacity(f"this machine's {device.name}", size)


def needed_bytes(config: Config, stage: Stage) -> int:
    """Return what a rank needs of its device: on the CPU, host memory too."""
    if planned_device(config.parallel.device).is_host:
        return stage.memory.total + stage.host_bytes
    return stage.memory.total


def largest_rank(config: Config, num_devices: int) -> int:
    """Return what the rank needs that needs most."""
    stages = memory_by_stage(config, Layout.of(config.parallel, num_devices))
    return max(needed_bytes(config, stage) for stage in stages)


def fit_text(room: Capacity, size_bytes: int) -> str:
    """Return '61.2 of 79.2 GiB (H100 80 GB), 77 %: fits'."""
    share = size_bytes / room.size_bytes
    verdict = "does not fit"
    if room.is_enough_for(size_bytes):
        verdict = "fits"
    elif share <= 1:
        verdict = f"too tight, as allocators and kernels need some {RESERVE:.0%} more"
    sizes = f"{size_bytes / GIB:,.1f} of {room.size_bytes / GIB:,.1f} GiB ({room.title})"
    return f"{verdict}: {sizes}, {share:,.0%}"


def memory_warning(config: Config, num_devices: int, ranks_per_node: int) -> str | None:
    """Return the warning that a run is likely to lack memory; None if it fits, or the device is unknown."""
    room, size = capacity(config, ranks_per_node), largest_rank(config, num_devices)
    if room is None or room.is_enough_for(size):
        return None
    return f"the plan {fit_text(room, size)}; --dry-run (HL_DRY_RUN=1) lists layouts that fit"


def longest_text(config: Config, num_devices: int, room: Capacity) -> Iterator[str]:
    """Yield 'longest sequence: 163,840 tokens', for which the run fits; nothing if rows have a length of their own."""
    rows = {load_task(_with_length(config, length)).data.row_length for length in (UNIT, 2 * UNIT)}
    if len(rows) == 1:
        return
    length, unit = longest_sequence(config, num_devices, room)
    yield f"longest sequence: {length:,} tokens" if length else f"longest sequence: less than {unit:,} tokens"


def longest_sequence(config: Config, num_devices: int, room: Capacity) -> tuple[int, int]:
    """Return the most tokens a sequence for which the run fits, 0 if none, and the number that it is a multiple of."""
    model, multiple = config.model, row_multiple(config)
    most = LONGEST
    if model.position_embedding_type == "learned" and model.max_position_embeddings:
        most = model.max_position_embeddings
    unit = math.lcm(multiple, UNIT)
    if unit > most:
        unit = multiple
    limit = (1 - RESERVE) * room.size_bytes

    def size_of(units: int) -> int:
        return largest_rank(_with_length(config, units * unit), num_devices)

    fits, fitting_size, fails = 0, 0, 1
    while (failing_size := size_of(fails)) <= limit:
        if fails == most // unit:
            return fails * unit, unit
        fits, fitting_size, fails = fails, failing_size, min(2 * fails, most // unit)
    # memory grows nearly in proportion, so the line between two lengths leads close to the one between
    halves = False
    while fails - fits > 1:
        share = 0.5 if halves else (limit - fitting_size) / max(1, failing_size - fitting_size)
        middle = min(max(fits + round(share * (fails - fits)), fits + 1), fails - 1)
        size = size_of(middle)
        if size <= limit:
            fits, fitting_size = middle, size
        else:
            fails, failing_size = middle, size
        halves = not halves
    return fits * unit, unit


def _with_length(config: Config, seq_length: int) -> Config:
    training = dataclasses.replace(config.training, seq_length=seq_length, seq_length_stages=None)
    return dataclasses.replace(config, training=training)


# Nothing here knows which change saves what: candidates in the order of a rough cost are planned until enough of them
# fit.
def propose(config: Config, num_devices: int, devices_per_node: int, room: Capacity, check: Rules) -> list[Proposal]:
    """Return the layouts nearest to the run's that fit, fewest devices first, then by estimated cost.

    Each is a valid config, and fits by its own plan. None changes all the options that a cheaper one changes.
    """
    tried_devices = num_devices
    while tried_devices <= MOST_DEVICES * num_devices:
        # at last in host memory too: as fast as the link to the host, of which a plan knows nothing
        for always in ({}, {"offload_activations": True}):
            candidates = _candidates(config, tried_devices, devices_per_node, always)
            proposals = _proposals(candidates, tried_devices, room, check)
            if proposals:
                return proposals
        tried_devices *= 2
    return []


def _proposals(candidates: Sequence[_Candidate], num_devices: int, room: Capacity, check: Rules) -> list[Proposal]:
    proposals: list[Proposal] = []
    size = ModelSize.of(candidates[0].config)
    for candidate in candidates:
        is_more_than_needed = any(proposal.names <= candidate.names for proposal in proposals)
        if is_more_than_needed or not room.is_enough_for(least_bytes(candidate.config, num_devices, size)):
            continue
        if check(candidate.config, num_devices):
            continue
        size_bytes = largest_rank(candidate.config, num_devices)
        if room.is_enough_for(size_bytes):
            proposals.append(Proposal(num_devices, candidate.changes, size_bytes))
        if len(proposals) == MOST_PROPOSALS:
            break
    return proposals


@dataclass(frozen=True)
class _Candidate:
    """A config with another layout, and the options that it changes."""

    config: Config
    changes: Changes

    @property
    def names(self) -> set[str]:
        return {name for name, _ in self.changes}


def _candidates(config: Config, num_devices: int, devices_per_node: int, always: Mapping[str, Any]) -> list[_Candidate]:
    """Return configs with other layouts, by estimated cost, and with fewer changes first among equals.

    `always`: values that all of them have.
    """
    candidates = []
    axes = _axes(config, num_devices, devices_per_node)
    heads = config.model.num_attention_heads
    most_sharing = max(size for size in axes["tensor_model_parallel_size"] if heads % size == 0)
    for values in itertools.product(*axes.values()):
        layout = dict(zip(axes, values, strict=True))
        if _is_tried(config, layout, num_devices, most_sharing):
            layout |= _dependent_options(config, layout)
            candidates += [_Candidate(*changed(config, {**layout, **extra, **always})) for extra in _extras(layout)]
    return sorted(
        candidates,
        key=lambda candidate: (_cost(candidate.config, num_devices, devices_per_node), len(candidate.changes)),
    )


def _is_tried(config: Config, layout: dict[str, Any], num_devices: int, most_sharing: int) -> bool:
    """`most_sharing`: the most ranks of a node that can share each layer."""
    stages, tensor_size = layout["pipeline_model_parallel_size"], layout["tensor_model_parallel_size"]
    context_size = layout["context_parallel_size"]
    if num_devices % (tensor_size * context_size * stages):
        return False
    # DeepSpeed's pipeline engine runs with ZeRO-1 at most, as do our own groups of experts
    if layout["zero_stage"] >= 2 and (stages > 1 or layout["expert_model_parallel_size"] > 1):
        return False
    # a node's ranks share layers before rows are cut in a pipeline too
    cuts_more = stages > 1 and context_size not in (1, config.parallel.context_parallel_size)
    return not (cuts_more and tensor_size < most_sharing)


def _axes(config: Config, num_devices: int, devices_per_node: int) -> dict[str, list[Any]]:
    """Return the options whose values are combined freely, each with those to try and the run's own."""
    parallel, training = config.parallel, config.training
    powers = [2**power for power in range(num_devices.bit_length())]
    row_length = load_task(config).data.row_length
    micro_batch_sizes = [training.micro_batch_size]
    if load_task(config).data.num_microbatches(1) is not None:  # else the data decides what a microbatch holds
        micro_batch_sizes += [size for size in powers if size < training.micro_batch_size]
    axes: dict[str, list[Any]] = {
        # within a node: its all-reduces are on the critical path of every layer
        "tensor_model_parallel_size": [
            *(size for size in powers if size <= devices_per_node),
            parallel.tensor_model_parallel_size,
        ],
        "context_parallel_size": [
            *(size for size in powers if size == 1 or row_length >= LEAST_PLACES * size),
            parallel.context_parallel_size,
        ],
        "pipeline_model_parallel_size": [
            *(size for size in powers if size <= config.model.num_layers),
            parallel.pipeline_model_parallel_size,
        ],
        "expert_model_parallel_size": [
            *(size for size in powers if (config.model.num_experts or 1) % size == 0),
            parallel.expert_model_parallel_size,
        ],
        "num_replicas": [parallel.num_replicas, 1],
        "zero_stage": [config.optimizer.zero_stage, *range(config.effective_zero_stage + 1, 4)],
        "recompute_granularity": [training.recompute_granularity, "selective", "full"],
        "micro_batch_size": micro_batch_sizes,
    }
    # sorted by text: the order in which candidates of equal cost are tried
    return {name: sorted(set(values), key=str) for name, values in axes.items()}


def _dependent_options(config: Config, layout: dict[str, Any]) -> dict[str, Any]:
    """Return the options that follow from the values of the axes."""
    parallel, training = config.parallel, config.training
    options: dict[str, Any] = {
        "sequence_parallel": parallel.sequence_parallel and layout["tensor_model_parallel_size"] > 1,
        "recompute_modules": training.recompute_modules,
    }
    if parallel.expert_tensor_parallel_size not in (None, 1):  # it is that of the rest
        options["expert_tensor_parallel_size"] = layout["tensor_model_parallel_size"]
    granularity = layout["recompute_granularity"]
    if granularity == "selective" and granularity != training.recompute_granularity:
        options["recompute_modules"] = PARTS
    if layout["pipeline_model_parallel_size"] == 1 and parallel.schedule != "1f1b":  # which needs a pipeline
        options["num_virtual_stages_per_pipeline_rank"] = 1
        if parallel.pipeline_schedule:
            options["pipeline_schedule"] = "1f1b"
    return options


def _extras(layout: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield what a layout may have on top, one at a time."""
    yield {}
    if layout["tensor_model_parallel_size"] > 1:
        yield {"sequence_parallel": True}
    if layout["zero_stage"] >= 2:
        yield {"offload_optimizer": True}


def _cost(config: Config, num_devices: int, devices_per_node: int) -> float:
    """Estimate the time of a step relative to that without any of these means; good for an order alone."""
    # exact are the bubble of the pipeline and the forward pass that full recomputation repeats; the rest stands for
    # communication
    parallel, optimizer = config.parallel, config.optimizer
    layout = Layout.of(parallel, num_devices)
    microbatches = num_microbatches(config.training, layout.num_batch_ranks)
    cost = 1 / (1 - schedule_bubble(config, microbatches))
    # 4 units of work in place of 3: forward, forward again, and two for backward
    cost *= {"none": 1.0, "selective": 1.03, "full": 4 / 3}[config.training.recompute_granularity]
    communication = 0.05 * math.log2(layout.tensor_size)
    if layout.tensor_size > devices_per_node:  # each layer's all-reduces cross nodes
        communication += 1.0
    # most of it travels while the attention computes, and may cross nodes; dearer than a layer's all-reduces within a
    # node, so that its ranks share layers first, which divides weights too
    communication += 0.06 * math.log2(layout.context_size)
    communication += 0.03 * math.log2(layout.expert_size)
    if layout.expert_size * layout.expert_tensor_size > devices_per_node:  # and so do tokens, though not all
        communication += 0.3
    cost *= 1 + communication
    cost *= {3: 1.15, 2: 1.05}.get(optimizer.zero_stage, 1.0)
    if optimizer.offload_optimizer:
        cost *= 2.0
    return cost * (1 + 0.02 * math.log2(1 + microbatches))
