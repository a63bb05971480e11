"""The plan of a run, as text."""

from __future__ import annotations

import operator
import textwrap
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from megatron.options.config import Config, ModelConfig, batch_sizes, samples_after
from megatron.parallel.layout import Layout
from megatron.parallel.shards import LayerDeclaration
from megatron.plan.fit import MOST_DEVICES, Rules, capacity, fit_text, for_device, needed_bytes, propose
from megatron.plan.flops import count_parameters, declared_layers, flops_per_token, layer_flops
from megatron.plan.memory import Stage, StageMemory, memory_by_stage
from megatron.plan.pipeline import cost_shares, schedule_bubble, stage_bounds, stage_text, waits_like_1f1b
from megatron.runtime.device_cpu import WIDENED
from megatron.runtime.devices import GIB, known_chips, planned_device
from megatron.tasks.registry import load_task

_INDENT: Any = {"initial_indent": "  ", "subsequent_indent": "    ", "break_on_hyphens": False}


def describe(config: Config, *, nodes: int, devices_per_node: int, title: str, check: Rules) -> str:
    """Layout, batches, parameters, pipeline bubble, and memory by rank with what fits, at most 80 columns wide.

    `check` yields the rules that proposed layouts keep.
    """
    config = for_device(config)
    model, parallel, training = config.model, config.parallel, config.training
    world_size = nodes * devices_per_node
    sizes = Layout.of(parallel, world_size)
    stages = memory_by_stage(config, sizes)
    shape = f"{model.num_layers} layers, hidden {model.hidden_size}, {model.num_attention_heads} heads"
    vocabulary = f"vocabulary {model.vocab_size} padded to {model.padded_vocab_size(sizes.tensor_size)}"
    largest = max(stage.parameters for stage in stages)
    kind = "device" if parallel.device == "auto" else f"{parallel.device} device"
    ranks = f"{_count(nodes, 'node')} x {_count(devices_per_node, kind)} = {_count(world_size, 'rank')}"
    layout = f"PP {sizes.num_stages} x TP {sizes.tensor_size} x DP {sizes.num_batch_ranks}"
    layout += ", sequence parallel" if parallel.sequence_parallel else ""
    task = load_task(config)
    tokens = training.global_batch_size * task.data.sample_length
    products = f", products in fp8 ({config.fp8.fp8_format})" if config.fp8.uses_fp8 else ""
    most = "at most " if task.data.pads_rows else ""
    rows = [
        ("model", f"{model.architecture}, {shape}{_kv_text(model)}"),
        ("", f"{model.position_embedding_type} positions, sequence {training.seq_length}, {vocabulary}"),
        ("parameters", f"{count_parameters(config):,} in all; at most {largest:,} a rank"),
        *(("", text) for text in _frozen_text(config)),
        ("devices", ranks),
        ("layout", layout + ("" if config.uses_pipeline else ", sequential engine")),
        ("precision", f"{training.precision}{products}, recompute {training.recompute_granularity}"),
        *_widened_row(parallel.device, training.precision),
        ("ZeRO", _zero_text(config)),
        ("batch", task.data.batch_text(sizes.num_batch_ranks)),
    ]
    if training.rampup_batch_size is not None:
        ramp_start, increment, ramp_samples = training.rampup_batch_size
        rows.append(("ramp-up", f"from {ramp_start} by {increment} over {ramp_samples:,} samples"))
    rows.append(("length", _length_text(config)))
    rows.append(("bubble", _bubble_text(config, sizes.num_batch_ranks)))
    forward = task.objective.num_forwards * sum(flops.forward for flops in layer_flops(config))
    tflop = (flops_per_token(config) + forward) * tokens / 1e12
    rows.append(("a step", f"{most}{tokens:,} tokens, {_figure(tflop)} TFLOP, {_figure(tflop / world_size)} a device"))
    if forward:
        passes = _count(task.objective.num_forwards, "forward pass", "es")
        rows.append(("", f"with {passes} over as many tokens before it"))
    lines = [title, ""] + [f"  {name:<11}{text}" for name, text in rows]
    lines += ["", f"  memory per rank, GiB, at the peak of a step ({_schedule_text(config)})"]
    lines += ["  " + line for line in _memory_table(config, stages)]
    lines += ["", *_fit_lines(config, stages, world_size, devices_per_node, check)]
    return "\n".join(lines) + "\n"


def _widened_row(device: str, precision: str) -> list[tuple[str, str]]:
    """Return the row that says how this machine's CPU computes products of 16 bits, if it has no instruction."""
    return [("", WIDENED.format(precision))] if precision in planned_device(device).widened() else []


def _count(number: int, noun: str, plural: str = "s") -> str:
    return f"{number} {noun}" + ("" if number == 1 else plural)


def _frozen_text(config: Config) -> list[str]:
    """Return the number of trained parameters and the form of the frozen ones; nothing where all are trained."""
    trained, quantized = (count_parameters(config, operator.attrgetter(name)) for name in ("trained", "quantized"))
    total = count_parameters(config)
    if trained == total:
        return []
    held = {"4 bits": quantized, config.training.precision: total - trained - quantized}
    frozen = ", ".join(f"{number:,} in {form}" for form, number in held.items() if number)
    return [f"{trained:,} trained ({trained / total:.2%})", f"frozen: {frozen}"]


def _kv_text(model: ModelConfig) -> str:
    return "" if model.num_kv_heads == model.num_attention_heads else f", {model.num_kv_heads} key/value heads"


def _figure(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def _zero_text(config: Config) -> str:
    optimizer, stage = config.optimizer, config.effective_zero_stage
    text = f"stage {stage}" + (", optimizer in host memory" if optimizer.offload_optimizer else "")
    if stage == optimizer.zero_stage:
        return text
    return f"{text}: zero_stage is {optimizer.zero_stage}, and 16 bit always shards its optimizer"


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
    p = config.parallel.pipeline_model_parallel_size
    if p == 1:
        return "none, one stage"
    m = load_task(config).data.num_microbatches(data_parallel_size)
    if m is None:
        return "depends on the data: as many microbatches as the samples of a step fill"
    text = f"{schedule_bubble(config, m):.1%} of a step: {_bubble_formula(config, m)}"
    first = batch_sizes(config.training)[0] // (config.training.micro_batch_size * data_parallel_size)
    if first == m:
        return text
    return f"{text}\n{'':<13}{schedule_bubble(config, max(1, first)):.1%} at the start of the ramp-up"


def _schedule_text(config: Config) -> str:
    v = config.parallel.num_virtual_stages_per_pipeline_rank
    name = config.parallel.schedule.replace("1f1b", "1F1B")
    if config.parallel.pipeline_model_parallel_size == 1:
        return f"{name}, one stage"
    return f"{name}, {v} chunks a stage" if v > 1 else name


def _bubble_formula(config: Config, m: int) -> str:
    p, v = config.parallel.pipeline_model_parallel_size, config.parallel.num_virtual_stages_per_pipeline_rank
    sizes = f"with p={p}, m={m}"
    if waits_like_1f1b(config):
        return f"(p - 1) / (m + p - 1) {sizes}"
    if config.parallel.schedule == "zero-bubble":
        return f"zero-bubble {sizes}" if m < p else f"(p - 1) / (3 m + p - 1) {sizes}"
    if m % p:
        return f"interleaved {sizes}, v={v}; least if p divides m"
    return f"(p - 1) / (v m + p - 1) {sizes}, v={v}"


def _memory_table(config: Config, stages: Sequence[Stage]) -> list[str]:
    host = any(stage.host_bytes for stage in stages)
    heads = ["weights", "grads", "master", "optim", "activ", "temp", "total"] + (["host"] if host else [])
    layers = declared_layers(config)
    worst = max(stages, key=lambda stage: stage.memory.total)
    is_cut = len(stages) > 1
    of_ranges = cost_shares(config, stage_bounds(config, layers))
    shares = [sum(of_ranges[number :: len(stages)]) for number in range(len(stages))]
    lines = [" ".join(["stage", *(f"{head:>7}" for head in heads), *(["cost"] if is_cut else []), "holds"])]
    for number, (stage, share) in enumerate(zip(stages, shares, strict=True)):
        parts = [getattr(stage.memory, field.name) for field in fields(StageMemory)]
        figures = [*parts, stage.memory.total, *([stage.host_bytes] if host else [])]
        mark = "*" if stage is worst and is_cut else " "
        cells = [f"{number:>4}{mark}", *(f"{_gib(figure):>7}" for figure in figures)]
        cells += [f"{share:>4.0%}"] if is_cut else []
        lines.append(" ".join([*cells, _holds_text(layers, stage)]))
    if is_cut:
        lines.append("   * the stage that needs most; cost: share of a microbatch's FLOPs")
    return lines


def _holds_text(layers: Sequence[LayerDeclaration], stage: Stage) -> str:
    return "; ".join(stage_text(layers, start, stop) for start, stop in stage.ranges)


def _fit_lines(
    config: Config, stages: Sequence[Stage], num_devices: int, devices_per_node: int, check: Rules
) -> list[str]:
    """The comparison with the memory of the device, and the nearest layouts that fit if this one does not."""
    room, size = capacity(config, devices_per_node), max(needed_bytes(config, stage) for stage in stages)
    if room is None:
        known = ", ".join(known_chips())
        return textwrap.wrap(f"the device is unknown; --device-memory {known}, or GiB, says if it fits", 78, **_INDENT)
    lines = textwrap.wrap(fit_text(room, size), 78, **_INDENT)
    if room.is_enough_for(size):
        return lines
    found = propose(config, num_devices, devices_per_node, room, check)
    if not found:
        return [
            *lines,
            f"  nothing fits on up to {num_devices * MOST_DEVICES} devices by layout, recomputation and ZeRO",
        ]
    more = "" if found[0].num_devices == num_devices else f" on {found[0].num_devices} devices, as none does on fewer"
    lines.append(f"  nearest layouts that fit{more}, by estimated cost:")
    for proposal in found:
        label = f"  {proposal.size_bytes / GIB:>7.1f} GiB  "
        whole = " ".join(text.replace(" ", "\0") for text in proposal.flags)  # a flag stays beside its value
        wrapped = textwrap.wrap(
            whole or "this layout", 78, **_INDENT | {"initial_indent": label, "subsequent_indent": " " * len(label)}
        )
        lines += [line.replace("\0", " ") for line in wrapped]
    return lines


def _gib(size_bytes: int) -> str:
    return (
        "-" if size_bytes == 0 else f"{size_bytes / GIB:.2f}" if size_bytes >= GIB / 10 else f"{size_bytes / GIB:.4f}"
    )
