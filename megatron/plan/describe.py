"""The plan of a run, as text."""

from __future__ import annotations

import operator
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from functools import partial
from typing import Any

from megatron.options.config import Config, batch_sizes, samples_after
from megatron.parallel.layout import Layout
from megatron.parallel.shards import LayerDeclaration
from megatron.plan.campaign.saves import copied_bytes
from megatron.plan.context_exchange import Sent, sent_by_layers
from megatron.plan.expert_memory import exchange_bytes
from megatron.plan.fit import (
    MOST_DEVICES,
    Proposal,
    Rules,
    capacity,
    fit_text,
    for_device,
    longest_text,
    needed_bytes,
    propose,
)
from megatron.plan.flops import active_parameters, count_parameters, declared_layers, flops_per_token, layer_flops
from megatron.plan.memory import Stage, StageMemory, memory_by_stage
from megatron.plan.microbatch import MicrobatchSizes
from megatron.plan.pipeline import (
    cost_shares,
    schedule_bubble,
    stage_bounds,
    stage_ranges,
    stage_text,
    waits_like_1f1b,
)
from megatron.plan.rates.rates import Rates
from megatron.plan.timing.cluster import Cluster
from megatron.plan.timing.text import time_lines
from megatron.plan.zero import bytes_between_replicas, held_layers
from megatron.runtime.device_cpu import WIDENED
from megatron.runtime.devices import GIB, known_chips, planned_device
from megatron.tasks.registry import load_task

_INDENT: Any = {"initial_indent": "  ", "subsequent_indent": "    ", "break_on_hyphens": False}


_TIME_WIDTH = 66
"""Columns of a text on the time, whose lines may name a user's file."""

Row = tuple[str, str]
"""Title and text of a line; without a title it continues the one above."""


def describe(
    config: Config, *, nodes: int, devices_per_node: int, title: str, check: Rules, rates: Rates | None = None
) -> str:
    """Layout, batches, parameters, pipeline bubble, time, and memory by rank with what fits, at most 80 columns wide.

    `check` yields the rules that proposed layouts keep; without `rates` no time is known.
    """
    config = for_device(config)
    num_devices = nodes * devices_per_node
    layout = Layout.of(config.parallel, num_devices)
    stages = memory_by_stage(config, layout)
    rows = [*plan_rows(config, layout, stages, nodes=nodes, devices_per_node=devices_per_node)]
    if rates is not None:
        rows += _time_rows(config, Cluster.of(nodes, devices_per_node), rates)
    lines = [title, "", *(f"  {name:<11}{text}" for name, text in rows), ""]
    lines.append(f"  memory per rank, GiB, at the peak of a step ({_schedule_text(config)})")
    lines += ["  " + line for line in _memory_table(config, stages)]
    if host_bytes := max(stage.host_bytes for stage in stages):
        ranks = min(num_devices, devices_per_node)
        lines.append(f"     host: up to {_gib(ranks * host_bytes)} GiB a node, of {_count(ranks, 'rank')}")
    if config.checkpoint.peer_copy_interval is not None:
        copies = _gib(copied_bytes(config, layout, nodes=nodes, devices_per_node=devices_per_node))
        lines.append(f"     host: {copies} GiB a node for copies of the state (--peer-copy-interval)")
    lines += ["", *_fit_lines(config, stages, num_devices, devices_per_node, check)]
    return "\n".join(lines) + "\n"


def plan_rows(
    config: Config, layout: Layout, stages: Sequence[Stage], *, nodes: int, devices_per_node: int
) -> Iterator[Row]:
    """Yield the lines of a plan on model, devices, layout, batches and the work of a step."""
    num_devices = nodes * devices_per_node
    kind = "device" if config.parallel.device == "auto" else f"{config.parallel.device} device"
    yield from _model_rows(config, layout, stages)
    devices = f"{_count(nodes, 'node')} x {_count(devices_per_node, kind)} = {_count(num_devices, 'rank')}"
    yield "devices", devices
    yield from _layout_rows(config, layout, devices_per_node)
    yield from _batch_rows(config, layout)
    yield from _step_rows(config, layout, num_devices, stages)


def _model_rows(config: Config, layout: Layout, stages: Sequence[Stage]) -> Iterator[Row]:
    model = config.model
    shape = f"{model.num_layers} layers, hidden {model.hidden_size}, {model.num_attention_heads} heads"
    if model.num_kv_heads != model.num_attention_heads:
        shape += f", {model.num_kv_heads} key/value heads"
    vocabulary = f"vocabulary {model.vocab_size} padded to {model.padded_vocab_size(layout.tensor_size)}"
    yield "model", f"{model.architecture}, {shape}"
    yield "", f"{model.position_embedding_type} positions, sequence {config.training.seq_length}, {vocabulary}"
    largest = max(stage.parameters for stage in stages)
    yield "parameters", f"{count_parameters(config):,} in all; at most {largest:,} a rank"
    if model.num_experts is not None:
        yield "", f"{active_parameters(config):,} active: those that compute with one token"
    for text in _frozen_text(config):
        yield "", text


def _layout_rows(config: Config, layout: Layout, devices_per_node: int) -> Iterator[Row]:
    parallel, training = config.parallel, config.training
    text = layout.title
    if parallel.sequence_parallel and layout.tensor_size > 1:
        text += ", sequence parallel"
    if not config.uses_pipeline:
        text += ", sequential engine"
    yield "layout", text
    if layout.context_size > 1:
        yield from _context_rows(config, layout)
    if config.model.num_experts is not None:
        yield "experts", _experts_text(config, layout)
    products = ""
    if config.fp8.uses_fp8:
        products = f", products in fp8 ({config.fp8.fp8_format}, {config.fp8_recipe} scales)"
    kept = f"recompute {training.recompute_granularity}"
    if training.offload_activations:
        kept += ", activations in host memory"
    yield "precision", f"{training.precision}{products}, {kept}"
    if training.cuda_graph_impl == "local":
        yield "", "layers run as CUDA graphs, whose memory and time are not counted"
    if training.precision in planned_device(parallel.device).widened():
        yield "", WIDENED.format(training.precision)
    yield "ZeRO", _zero_text(config)
    if layout.num_replicas > 1:
        # a replica's ranks are neighbours on a stage
        is_in_node = devices_per_node % (layout.tensor_size * layout.shard_size) == 0
        where = "within a node" if is_in_node else "across nodes"
        yield "", f"{layout.num_replicas} replicas, each over {_count(layout.shard_size, 'rank')} {where}"


def _context_rows(config: Config, layout: Layout) -> Iterator[Row]:
    """Yield what a rank of the stage with most layers sends, by their exchange, and by another that they could have."""
    sent = _sent_by_largest_stage(config)
    counts = Counter(each.exchange for each in sent)
    num_microbatches = load_task(config).data.num_microbatches(layout.num_batch_ranks)
    text = f"sends {_sent_text([each.size_bytes for each in sent], num_microbatches)}"
    if len(counts) == 1:
        yield "context", f"{sent[0].exchange}: {text}"
    else:
        yield "context", " and ".join(f"{name} in {_count(count, 'layer')}" for name, count in counts.items())
        yield "", text
    for name in sent[0].by_exchange:
        if counts != {name: len(sent)}:
            yield "", f"{name} would send {_sent_text([each.by_exchange[name] for each in sent], num_microbatches)}"
    if "all-to-all" not in sent[0].by_exchange:
        yield "", f"all-to-all: CP {layout.context_size} does not divide the heads of a rank"


def _sent_by_largest_stage(config: Config) -> list[Sent]:
    layers, sizes = declared_layers(config), MicrobatchSizes(config)
    by_stage = []
    for ranges in stage_ranges(config, layers):
        by_stage.append(list(sent_by_layers([layer for start, stop in ranges for layer in layers[start:stop]], sizes)))
    return max(by_stage, key=lambda stage: sum(each.size_bytes for each in stage))


def _sent_text(by_layer: Sequence[int], num_microbatches: int | None) -> str:
    of_layer = f"{_gib(max(by_layer))} GiB a layer and microbatch"
    if num_microbatches is None:
        return of_layer
    return f"{of_layer}, {_gib(num_microbatches * sum(by_layer))} a step"


def _experts_text(config: Config, layout: Layout) -> str:
    model = config.model
    each = _count(model.num_experts or 0, "expert")
    text = f"{each} a layer, {model.moe_router_topk} a token; EP {layout.expert_size} x TP {layout.expert_tensor_size}"
    return f"{text} x DP {layout.expert_grad_size}"


def _batch_rows(config: Config, layout: Layout) -> Iterator[Row]:
    yield "batch", load_task(config).data.batch_text(layout.num_batch_ranks)
    if config.training.rampup_batch_size is not None:
        ramp_start, increment, ramp_samples = config.training.rampup_batch_size
        yield "ramp-up", f"from {ramp_start} by {increment} over {ramp_samples:,} samples"
    yield "length", _length_text(config)
    yield "bubble", _bubble_text(config, layout.num_batch_ranks)


def _step_rows(config: Config, layout: Layout, num_devices: int, stages: Sequence[Stage]) -> Iterator[Row]:
    task = load_task(config)
    tokens = config.training.global_batch_size * task.data.sample_length
    # an objective may compute with the model before a step, such as a reference's log-probabilities
    forward_flops = task.objective.num_forwards * sum(flops.forward for flops in layer_flops(config))
    tflop = (flops_per_token(config) + forward_flops) * tokens / 1e12
    most = "at most " if task.data.pads_rows else ""
    yield "a step", f"{most}{tokens:,} tokens, {_figure(tflop)} TFLOP, {_figure(tflop / num_devices)} a device"
    if forward_flops:
        passes = _count(task.objective.num_forwards, "forward pass", "es")
        yield "", f"with {passes} over as many tokens before it"
    num_microbatches = task.data.num_microbatches(layout.num_batch_ranks)
    if layout.num_replicas > 1 and num_microbatches is not None:
        # under ZeRO-2 and 3 DeepSpeed sums those of each microbatch
        sums = 1 if config.effective_zero_stage == 1 else num_microbatches
        sent = sums * max(_by_stage(config, partial(bytes_between_replicas, config, layout)))
        yield "", f"{_gib(sent)} GiB of gradients that a rank sends to other replicas"
    if layout.expert_size > 1 and num_microbatches is not None:
        sizes = MicrobatchSizes(config)
        sent = num_microbatches * max(_by_stage(config, partial(exchange_bytes, sizes=sizes)))
        yield "", f"{_gib(sent)} GiB that a rank sends to experts elsewhere, if all are used alike"
    moved = max(stage.moved_bytes for stage in stages)
    if moved and num_microbatches is not None:
        yield "", f"{_gib(num_microbatches * moved)} GiB of activations that a rank moves to the host and back"
    elif moved:
        yield "", f"{_gib(moved)} GiB of activations a microbatch that a rank moves to the host and back"


def _time_rows(config: Config, cluster: Cluster, rates: Rates) -> Iterator[Row]:
    lines = [part for line in time_lines(config, cluster, rates) for part in textwrap.wrap(line, _TIME_WIDTH)]
    yield "time", lines[0]
    yield from (("", line) for line in lines[1:])


def _by_stage(config: Config, bytes_of: Callable[[list[LayerDeclaration]], int]) -> Iterator[int]:
    """Yield what a rank of each stage sends for its layers."""
    layers = declared_layers(config)
    for ranges in stage_ranges(config, layers):
        yield bytes_of(held_layers([layer for start, stop in ranges for layer in layers[start:stop]]))


def _count(number: int, noun: str, plural: str = "s") -> str:
    if number == 1:
        plural = ""
    return f"{number} {noun}{plural}"


def _frozen_text(config: Config) -> list[str]:
    """Return the number of trained parameters and the form of the frozen ones; nothing where all are trained."""
    trained, quantized = (count_parameters(config, operator.attrgetter(name)) for name in ("trained", "quantized"))
    total = count_parameters(config)
    if trained == total:
        return []
    held = {"4 bits": quantized, config.training.precision: total - trained - quantized}
    frozen = ", ".join(f"{number:,} in {form}" for form, number in held.items() if number)
    return [f"{trained:,} trained ({trained / total:.2%})", f"frozen: {frozen}"]


def _figure(number: float) -> str:
    if number >= 100:
        return f"{number:,.0f}"  # .3g would round it, or write an exponent
    return f"{number:.3g}"


def _zero_text(config: Config) -> str:
    optimizer, stage = config.optimizer, config.effective_zero_stage
    text = f"stage {stage}"
    if optimizer.offload_optimizer:
        text += ", optimizer in host memory"
    if stage != optimizer.zero_stage:
        text += f": zero_stage is {optimizer.zero_stage}, and 16 bit always shards its optimizer"
    return text


def _length_text(config: Config) -> str:
    training, sample_length = config.training, load_task(config).data.sample_length
    if training.train_samples is not None:
        samples = training.train_samples
        return f"{samples:,} samples = {samples * sample_length:,} tokens"
    if training.train_iters is not None:
        samples = samples_after(training, training.train_iters)
        return f"{training.train_iters:,} steps = {samples * sample_length:,} tokens"
    if training.num_epochs is not None:
        return _count(training.num_epochs, "epoch")
    return "neither train_samples nor train_iters is given"


def _bubble_text(config: Config, data_parallel_size: int) -> str:
    if config.parallel.pipeline_model_parallel_size == 1:
        return "none, one stage"
    num_microbatches = load_task(config).data.num_microbatches(data_parallel_size)
    if num_microbatches is None:
        return "depends on the data: as many microbatches as the samples of a step fill"
    bubble = schedule_bubble(config, num_microbatches)
    text = f"{bubble:.1%} of a step: {_bubble_formula(config, num_microbatches)}"
    first = batch_sizes(config.training)[0] // (config.training.micro_batch_size * data_parallel_size)
    if first == num_microbatches:
        return text
    return f"{text}\n{'':<13}{schedule_bubble(config, max(1, first)):.1%} at the start of the ramp-up"


def _schedule_text(config: Config) -> str:
    v = config.parallel.num_virtual_stages_per_pipeline_rank
    text = config.parallel.schedule.replace("1f1b", "1F1B")
    if config.parallel.pipeline_model_parallel_size == 1:
        text += ", one stage"
    elif v > 1:
        text += f", {v} chunks a stage"
    return text


def _bubble_formula(config: Config, m: int) -> str:
    """The formula of p stages, m microbatches and v chunks a stage, where the schedule has a closed one."""
    p, v = config.parallel.pipeline_model_parallel_size, config.parallel.num_virtual_stages_per_pipeline_rank
    sizes = f"with p={p}, m={m}"
    if waits_like_1f1b(config):
        return f"(p - 1) / (m + p - 1) {sizes}"
    if config.parallel.schedule == "zero-bubble":
        if m < p:
            return f"zero-bubble {sizes}"
        return f"(p - 1) / (3 m + p - 1) {sizes}"
    if m % p:
        return f"interleaved {sizes}, v={v}; least if p divides m"
    return f"(p - 1) / (v m + p - 1) {sizes}, v={v}"


def _memory_table(config: Config, stages: Sequence[Stage]) -> list[str]:
    """A line for each stage: GiB by purpose, and with several stages the share of the FLOPs and which needs most."""
    layers = declared_layers(config)
    is_cut, has_host = len(stages) > 1, any(stage.host_bytes for stage in stages)
    worst = max(stages, key=lambda stage: stage.memory.total)
    heads = ["weights", "grads", "master", "optim", "activ", "temp", "total"]
    if has_host:
        heads.append("host")
    rows = [["stage", *(f"{head:>7}" for head in heads), "cost", "holds"]]
    for number, (stage, share) in enumerate(zip(stages, _shares_by_stage(config, len(stages)), strict=True)):
        mark = "*" if stage is worst and is_cut else " "
        cells = _size_cells(stage, with_host=has_host)
        rows.append([f"{number:>4}{mark}", *cells, f"{share:>4.0%}", holds_text(layers, stage)])
    if not is_cut:
        for row in rows:
            del row[-2]  # the only stage computes all
    lines = [" ".join(row) for row in rows]
    if is_cut:
        lines.append("   * the stage that needs most; cost: share of a microbatch's FLOPs")
    return lines


def _size_cells(stage: Stage, *, with_host: bool) -> list[str]:
    sizes = [getattr(stage.memory, field.name) for field in fields(StageMemory)] + [stage.memory.total]
    if with_host:
        sizes.append(stage.host_bytes)
    return [f"{_gib(size):>7}" for size in sizes]


def _shares_by_stage(config: Config, num_stages: int) -> list[float]:
    """Return each stage's share of a microbatch's FLOPs; its chunks lie `num_stages` ranges apart."""
    of_ranges = cost_shares(config, stage_bounds(config, declared_layers(config)))
    return [sum(of_ranges[stage::num_stages]) for stage in range(num_stages)]


def holds_text(layers: Sequence[LayerDeclaration], stage: Stage) -> str:
    """Return '0-9; 20-29': the layers of each chunk of a stage."""
    return "; ".join(stage_text(layers, start, stop) for start, stop in stage.ranges)


def _fit_lines(
    config: Config, stages: Sequence[Stage], num_devices: int, devices_per_node: int, check: Rules
) -> list[str]:
    """The comparison with the memory of the device, and the nearest layouts that fit if this one does not."""
    room, size = capacity(config, devices_per_node), max(needed_bytes(config, stage) for stage in stages)
    if room is None:
        known = ", ".join(known_chips())
        return textwrap.wrap(f"the device is unknown; --device-memory {known}, or GiB, says if it fits", 78, **_INDENT)
    lines = [f"  {text}" for text in longest_text(config, num_devices, room)]
    lines = textwrap.wrap(fit_text(room, size), 78, **_INDENT) + lines
    if room.is_enough_for(size):
        return lines
    proposals = propose(config, num_devices, devices_per_node, room, check)
    if not proposals:
        most = num_devices * MOST_DEVICES
        return [*lines, f"  nothing fits on up to {most} devices by layout, recomputation and ZeRO"]
    number, more = proposals[0].num_devices, ""
    if number != num_devices:
        more = f" on {number} devices, as none does on fewer"
    lines.append(f"  nearest layouts that fit{more}, by estimated cost:")
    for proposal in proposals:
        lines += _proposal_lines(proposal)
    return lines


def _proposal_lines(proposal: Proposal) -> list[str]:
    label = f"  {proposal.size_bytes / GIB:>7.1f} GiB  "
    indent = _INDENT | {"initial_indent": label, "subsequent_indent": " " * len(label)}
    # textwrap keeps NUL within a word, so that a flag stays beside its value
    flags = " ".join(text.replace(" ", "\0") for text in proposal.flags)
    return [line.replace("\0", " ") for line in textwrap.wrap(flags or "this layout", 78, **indent)]


def _gib(size_bytes: int) -> str:
    if size_bytes == 0:
        return "-"
    # a small model takes less than 0.1 GiB, of which two digits would show little
    digits = 2 if size_bytes >= GIB / 10 else 4
    return f"{size_bytes / GIB:.{digits}f}"
