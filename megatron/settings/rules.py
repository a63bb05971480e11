"""Rules of the pipeline's schedule and stages, and of matrix products in fp8."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.options.config import Config
from megatron.runtime.devices import find_device


def check_schedule(config: Config) -> Iterator[str]:
    """Yield a message for every rule of `pipeline_schedule` and its chunks that is broken."""
    parallel = config.parallel
    given, name, p = parallel.pipeline_schedule, parallel.schedule, parallel.pipeline_model_parallel_size
    v, num_layers = parallel.num_virtual_stages_per_pipeline_rank, config.model.num_layers
    chunks = f"num_virtual_stages_per_pipeline_rank={v}"
    if name == "interleaved" and v == 1:
        yield (
            "pipeline_schedule=interleaved needs several chunks of the model on each stage; set "
            "num_virtual_stages_per_pipeline_rank to 2 or more"
        )
    elif name != "interleaved" and v > 1:
        yield f"{chunks} belongs to the interleaved schedule, but pipeline_schedule={given}; leave one of them out"
    if name == "zero-bubble" and config.training.torch_compile:
        yield (
            "pipeline_schedule=zero-bubble defers the gradients of weights in the backward pass of each layer, which "
            "torch_compile compiles as a whole; turn one of the two off"
        )
    if config.data.eval_graphs:
        yield from _graph_faults(config)
    if name != "1f1b" and p == 1:
        subject = f"pipeline_schedule={given}" if given else chunks
        yield (
            f"{subject} orders the work of several pipeline stages, but pipeline_model_parallel_size=1; raise it, or "
            "leave the option out"
        )
    elif v > 1 and p <= num_layers < p * v:
        yield (
            f"pipeline_model_parallel_size={p} x {chunks} = {p * v} is larger than num_layers={num_layers}; use at "
            f"most {num_layers // p} virtual stages"
        )


def _graph_faults(config: Config) -> Iterator[str]:
    """Yield what the graphs of evaluations cannot be combined with."""
    if not config.uses_pipeline or config.uses_own_schedule:
        yield (
            "eval_graphs replays the passes of DeepSpeed's pipeline; leave it out, or use zero_stage 0 or 1, "
            "pipeline_schedule=1f1b, and neither offload_optimizer nor no_pipeline_parallel"
        )


# ---------------------------------------------------------------------------------------------------------------------
# Rules of the pipeline's stages.

METHODS = ("cost", "parameters", "uniform", "type:TransformerLayer")


def check_partition(config: Config) -> Iterator[str]:
    """Yield a message if `pipeline_partition_method` is neither a method nor a list that cuts the layers."""
    parallel, num_layers = config.parallel, config.model.num_layers
    given, listed, num_ranges = parallel.pipeline_partition_method, parallel.listed_layers, parallel.num_pipeline_ranges
    if given in METHODS:
        return
    size, over = divmod(num_layers, num_ranges)
    example = ",".join(str(size + (place < over)) for place in range(num_ranges))
    num_stages = parallel.pipeline_model_parallel_size
    part = "stage" if num_ranges == num_stages else "chunk"
    parts = "1 stage" if num_ranges == 1 else f"{num_ranges} {part}s"
    if num_ranges != num_stages:
        parts += f" ({num_stages} stages x num_virtual_stages_per_pipeline_rank={num_ranges // num_stages})"
    rule = f"{parts} need a number of transformer layers each, {num_layers} in all"
    if listed is None:
        yield (
            f"pipeline_partition_method={given!r} is unknown; use {', '.join(METHODS)}, or a number of layers for each "
            f"{part}, such as {example}"
        )
        return
    wrong, remedy = [], f"{example}, or cost" if num_ranges <= num_layers else "cost"
    if len(listed) != num_ranges:
        wrong.append(f"has {len(listed)} {'number' if len(listed) == 1 else 'numbers'}")
    if sum(listed) != num_layers:
        wrong.append(f"adds up to {sum(listed)}")
    if 0 in listed[1:-1]:  # the first and the last stage hold the embedding and the output projection
        wrong.append(f"leaves {part} {listed.index(0, 1)} without a layer")
    if wrong:
        yield f"pipeline_partition_method={given} {' and '.join(wrong)}; {rule}: use {remedy}"


# ---------------------------------------------------------------------------------------------------------------------
# Rules of matrix products in fp8.


def check_fp8(config: Config) -> Iterator[str]:
    """Yield a message for every option that fp8 cannot be combined with, whatever the device and the task."""
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
    if config.optimizer.zero_stage == 3:
        yield f"{given} needs whole weights on each rank, but zero_stage=3; use 2 or less"
    if config.parallel.schedule != "1f1b":
        yield f"{given} runs under pipeline_schedule=1f1b, not {config.parallel.schedule}; use that"
    if config.sft.compile_ahead:
        yield f"{given} keeps the largest values of each pass, which compile_ahead would change; leave one out"
    yield from _check_fp8_history(config)


def _check_fp8_history(config: Config) -> Iterator[str]:
    interval, history = config.fp8.fp8_interval, config.fp8.fp8_amax_history_len
    # the largest values are those of the last microbatches of an interval
    if interval and history and history > interval:
        yield f"fp8_amax_history_len={history} is above fp8_interval={interval}; lower it"


def check_fp8_device(config: Config) -> Iterator[str]:
    """Yield a message for what fp8 cannot run on; device and mode are chosen."""
    device, given = config.parallel.device, f"fp8_format={config.fp8.fp8_format}"
    if not config.fp8.uses_fp8 or device == "auto":
        return
    if not find_device(device).has_fp8:
        yield f"{given} runs on Gaudi's transformer engine, but device={device}; leave it out"
    elif config.training.torch_compile:
        yield (
            f"{given} and torch_compile exclude each other here; turn torch_compile off, and lazy mode on "
            "(HL_USE_LAZY_MODE=1), as Habana trains in fp8"
        )
