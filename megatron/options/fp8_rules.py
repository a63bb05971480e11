"""Rules of matrix products in fp8, and what its unset options stand for."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.options.config import Config, num_microbatches


def scaling(config: Config, num_batch_ranks: int) -> tuple[int, int]:
    """Return the interval and the length of the history, in microbatches.

    Source of what is unset: examples/llama/pretrain_llama.sh of HabanaAI/Megatron-LM 1.24.
    """
    microbatches, fp8 = num_microbatches(config.training, num_batch_ranks), config.fp8
    interval = fp8.fp8_interval or microbatches
    return interval, fp8.fp8_amax_history_len or -(-min(interval, microbatches) // 16)


def check_fp8(config: Config) -> Iterator[str]:
    """Yield a message for every option that fp8 cannot be combined with, whatever the device."""
    fp8, training = config.fp8, config.training
    if not fp8.uses_fp8:
        return
    given = f"fp8_format={fp8.fp8_format}"
    if training.precision != "bf16":
        yield f"{given} needs bf16, not {training.precision}; turn bf16 on"
    if training.recompute_granularity == "full" or training.recomputed_modules - {"core_attn"}:
        modules = f", recompute_modules={','.join(sorted(training.recomputed_modules))}"
        yield (
            f"{given} recomputes no matrix products, nor what they read, as "
            f"recompute_granularity={training.recompute_granularity}"
            f"{modules if training.recompute_granularity == 'selective' else ''} does; use selective with core_attn "
            "alone, or none"
        )
    if config.lora.lora_rank or config.model.quantize_base != "none":
        yield f"{given} trains whole weights, without adapters and quantize_base; leave these out, or fp8_format"
    if training.task not in ("pretrain", "sft"):
        yield f"{given} trains task=pretrain and task=sft, not {training.task}; leave it out"
    if config.optimizer.zero_stage == 3:
        yield f"{given} needs whole weights on each rank, but zero_stage=3; use 2 or less"
    if config.parallel.schedule != "1f1b":
        yield f"{given} runs under pipeline_schedule=1f1b, not {config.parallel.schedule}; use that"
    packs = training.task == "sft" and config.sft.packing == "step"
    if fp8.fp8_interval is None and (packs or training.rampup_batch_size is not None):
        varied = "packing=step" if packs else "rampup_batch_size"
        yield f"{given} needs fp8_interval, since {varied} varies the microbatches of a step; give their least number"
    if config.sft.compile_ahead:
        yield f"{given} keeps the largest values of each pass, which compile_ahead would change; leave one out"
    # the largest values are those of the last microbatches of an interval
    interval, history = fp8.fp8_interval, fp8.fp8_amax_history_len
    if interval and history and history > interval:
        yield f"fp8_amax_history_len={history} is above fp8_interval={interval}; lower it"


def check_fp8_device(config: Config) -> Iterator[str]:
    """Yield a message for what fp8 cannot run on; device and mode are chosen."""
    device, given = config.parallel.device, f"fp8_format={config.fp8.fp8_format}"
    if not config.fp8.uses_fp8 or device == "auto":
        return
    if device != "hpu":
        yield f"{given} runs on Gaudi's transformer engine, but device={device}; leave it out"
    elif config.training.torch_compile:
        yield (
            f"{given} and torch_compile exclude each other here; turn torch_compile off, and lazy mode on "
            "(HL_USE_LAZY_MODE=1), as Habana trains in fp8"
        )
