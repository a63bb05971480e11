"""Rules of the precision and the device: the kernels that it has, and what matrix products in fp8 exclude."""

from __future__ import annotations

import math
from collections.abc import Iterator

from megatron.options.config import Config, ConfigError, broken
from megatron.options.dependents import RECOMPUTED
from megatron.options.model import MIN_FLEX_HEAD_SIZE
from megatron.runtime.devices import DEVICES, find_device, known_chip, known_chips, parse_memory_gib, planned_device
from megatron.tasks.registry import load_task


def check_precision(config: Config) -> list[str]:
    training, scale = config.training, config.training.initial_loss_scale
    return broken(
        (training.bf16 and training.fp16, "bf16 and fp16 are both on; turn one of them off"),
        (
            training.grad_accum_dtype == "bf16" and not training.bf16,
            f"grad_accum_dtype=bf16 needs bf16, but the precision is {training.precision}; set fp32, or turn bf16 on",
        ),
        (
            training.grad_reduce_dtype not in (None, "fp32", training.precision),
            f"grad_reduce_dtype={training.grad_reduce_dtype} must be fp32 or the precision of the run, "
            f"{training.precision}; change it, or unset it",
        ),
        (
            # a scale is halved and doubled, and must divide out of the gradients without rounding
            training.fp16 and math.frexp(scale)[0] != 0.5,
            f"initial_loss_scale={scale} must be a power of two, such as 65536; change it",
        ),
        (
            training.fp16 and training.min_loss_scale > scale,
            f"min_loss_scale={training.min_loss_scale} is above initial_loss_scale={scale}; lower it",
        ),
    )


def check_device(config: Config) -> Iterator[str]:
    """Yield a message for every broken rule of the device; none is checked before it is chosen (device=auto)."""
    device, backend = config.parallel.device, config.model.attention_backend
    if device != "auto":  # a launcher has no devices; the ranks choose, and check again
        record = find_device(device)
        if backend != "auto" and backend not in record.attention:
            able = " and ".join(other.name for other in DEVICES if backend in other.attention)
            yield f"attention_backend={backend} runs on {able} only, but device={device}; use auto or sdpa"
        if config.data.eval_graphs and not record.replays_evaluations:
            yield f"eval_graphs replays HPU graphs, but device={device}; leave it out"
    yield from check_fp8_device(config)
    if config.parallel.device_memory is not None:
        yield from _check_memory(config.parallel.device_memory, device)


def _check_memory(memory: str, device: str) -> Iterator[str]:
    # a chip's name stands for its memory, and belongs to one kind of device
    known = known_chip(memory)
    if known is not None and device not in ("auto", known[0].name):
        kind = known[0].name
        yield f"device_memory={memory} is that of a {kind} device, but device={device}; use device={kind}, or give GiB"
    if parse_memory_gib(memory) is None:
        yield (
            f"device_memory={memory!r} is neither a known device nor a number of GiB; use {', '.join(known_chips())}, "
            "or a number such as 80"
        )


def check_attention(config: Config) -> list[str]:
    model = config.model
    uses_flex = model.attention_backend == "flex"
    # source: FusedSDPA.py of HabanaAI/gaudi-pytorch-bridge, which asserts is_causal there
    is_causal_alone = model.use_fast_softmax and model.fused_sdpa_recompute
    is_causal_alone = is_causal_alone and model.uses_fused_sdpa(planned_device(config.parallel.device))
    alone = "works with the causal mask alone"
    return broken(
        (
            is_causal_alone and model.position_embedding_type == "alibi",
            f"use_fast_softmax {alone}, but position_embedding_type=alibi adds a bias to it; turn it off",
        ),
        (
            is_causal_alone and model.attention_window is not None,
            f"use_fast_softmax {alone}, but attention_window={model.attention_window} adds one to it; turn it off",
        ),
        (
            is_causal_alone and _packs_documents(config),
            f"use_fast_softmax {alone}, but documents or chats packed into a row add one to it; turn it off",
        ),
        (
            model.attention_backend == "fused_hpu" and model.attention_softcap is not None,
            f"attention_backend=fused_hpu has no soft cap, but attention_softcap={model.attention_softcap}; use auto, "
            "which then takes torch's plain operators",
        ),
        (
            uses_flex and model.attention_dropout > 0,
            f"attention_backend=flex does not support dropout, but attention_dropout={model.attention_dropout}; "
            "set it to 0, or use sdpa",
        ),
        (
            # torch would refuse it too, but in the first forward pass
            uses_flex and model.head_size < MIN_FLEX_HEAD_SIZE,
            f"attention_backend=flex takes heads of {MIN_FLEX_HEAD_SIZE} channels or more, but these have "
            f"{model.head_size}; use sdpa",
        ),
    )


def _packs_documents(config: Config) -> bool:
    try:
        return bool(load_task(config).data.packs_documents)
    except ConfigError:  # reported by the rules of the task
        return False


def check_kernels(config: Config) -> list[str]:
    backend = config.model.attention_backend
    unknown = sorted(config.training.recomputed_modules - RECOMPUTED)
    return broken(
        (
            config.model.kernels == "plain" and backend in ("flex", "fused_hpu"),
            f"kernels=plain attends by torch's SDPA, but attention_backend={backend}; use kernels=auto, or sdpa",
        ),
        (
            unknown,
            f"recompute_modules={' '.join(unknown)} does not name a part of a layer; use "
            f"{', '.join(sorted(RECOMPUTED))}",
        ),
    )


def check_fp8(config: Config) -> list[str]:
    """Return a message for every option that fp8 cannot be combined with, whatever the device and the task."""
    fp8, training = config.fp8, config.training
    if not fp8.uses_fp8:
        return []
    given = f"fp8_format={fp8.fp8_format}"
    recomputes = f"recompute_granularity={training.recompute_granularity}"
    if training.recompute_granularity == "selective":
        recomputes += f", recompute_modules={','.join(sorted(training.recomputed_modules))}"
    interval, history = fp8.fp8_interval, fp8.fp8_amax_history_len
    return broken(
        (training.precision != "bf16", f"{given} needs bf16, not {training.precision}; turn bf16 on"),
        (
            training.recompute_granularity == "full" or training.recomputed_modules - {"core_attn"},
            f"{given} recomputes no matrix products, nor what they read, as {recomputes} does; use selective with "
            "core_attn alone, or none",
        ),
        (
            config.lora.lora_rank or config.model.quantize_base != "none",
            f"{given} trains whole weights, without adapters and quantize_base; leave these out, or fp8_format",
        ),
        (
            config.optimizer.zero_stage == 3,
            f"{given} needs whole weights on each rank, but zero_stage=3; use 2 or less",
        ),
        (
            config.parallel.schedule != "1f1b",
            f"{given} runs under pipeline_schedule=1f1b, not {config.parallel.schedule}; use that",
        ),
        (
            config.sft.compile_ahead,
            f"{given} keeps the largest values of each pass, which compile_ahead would change; leave one out",
        ),
        (
            # the largest values are those of the last microbatches of an interval
            interval and history and history > interval,
            f"fp8_amax_history_len={history} is above fp8_interval={interval}; lower it",
        ),
    )


def check_fp8_device(config: Config) -> Iterator[str]:
    """Yield a message for what fp8 cannot run on; device and mode are chosen."""
    device, given = config.parallel.device, f"fp8_format={config.fp8.fp8_format}"
    if not config.fp8.uses_fp8 or device == "auto":
        return
    # apart from check_fp8: with device=auto the ranks choose, and check this again
    if not find_device(device).has_fp8:
        yield f"{given} runs on Gaudi's transformer engine, but device={device}; leave it out"
    elif config.training.torch_compile:
        yield (
            f"{given} and torch_compile exclude each other here; turn torch_compile off, and lazy mode on "
            "(HL_USE_LAZY_MODE=1), as Habana trains in fp8"
        )
