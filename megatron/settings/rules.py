"""Rules between options of the device and of the layout. Without torch."""

from __future__ import annotations

import math
from collections.abc import Iterator

from megatron.options.config import Config, ConfigError, broken
from megatron.options.dependents import RECOMPUTED
from megatron.options.flags import divisors
from megatron.options.model import MIN_FLEX_HEAD_SIZE
from megatron.parallel.layout import Layout
from megatron.runtime.commands import counted
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
        if config.training.offload_activations and record.is_host:
            yield (
                f"offload_activations moves activations to the host's memory, which that of device={device} is; "
                "leave it out"
            )
        if config.data.eval_graphs and not record.replays_evaluations:
            yield f"eval_graphs replays HPU graphs, but device={device}; leave it out"
        if config.training.cuda_graph_impl != "none" and not record.replays_layers:
            yield f"cuda_graph_impl=local replays CUDA graphs, but device={device}; leave it out"
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


def check_widths(config: Config) -> list[str]:
    """Return the faults of muP, whose start and learning rates are those of Adam and of whole matrices."""
    model, optimizer = config.model, config.optimizer
    given = f"mup_base_hidden_size={model.mup_base_hidden_size}"
    is_on = model.mup_base_hidden_size is not None and not config.training.skip_train
    own = f"logits_scaling={model.logits_divisor:g}"
    if model.score_factor is not None:
        own += f" attention_multiplier={model.score_factor:g}"
    return broken(
        (
            None not in (model.mup_base_hidden_size, model.mup_base_head_size, model.attention_multiplier),
            f"mup_base_head_size={model.mup_base_head_size} and attention_multiplier={model.attention_multiplier} both "
            "set the factor of the scores; keep one",
        ),
        (
            is_on and not (optimizer.kind.scales_with_width and optimizer.decoupled_weight_decay),
            f"{given} scales the learning rates and weight decay of AdamW alone, not those of optimizer="
            f"{optimizer.optimizer} with decoupled_weight_decay={optimizer.decoupled_weight_decay}; use adamw",
        ),
        (
            is_on and config.lora.lora_rank is not None,
            f"{given} scales the learning rates of a model's own matrices, not of adapters; leave it out, and give "
            f"{own} for a model that was trained with it",
        ),
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
    fp8 = config.fp8
    if not fp8.uses_fp8:
        return []
    given, edge, layers = f"fp8_format={fp8.fp8_format}", fp8.fp8_first_last_layers_bf16, config.model.num_layers
    return broken(
        (
            config.training.precision != "bf16",
            f"{given} needs bf16, not {config.training.precision}; turn bf16 on",
        ),
        (
            config.optimizer.zero_stage == 3,
            f"{given} needs whole weights on each rank, but zero_stage=3; use 2 or less",
        ),
        (
            2 * edge >= layers,
            f"fp8_first_last_layers_bf16={edge} leaves none of num_layers={layers} in fp8; lower it, or leave "
            "fp8_format out",
        ),
    )


def _check_delayed(config: Config) -> list[str]:
    """Return a message for every option that delayed scales cannot be combined with."""
    fp8, training = config.fp8, config.training
    given = f"fp8_format={fp8.fp8_format}"
    recomputes = f"recompute_granularity={training.recompute_granularity}"
    if training.recompute_granularity == "selective":
        recomputes += f", recompute_modules={','.join(sorted(training.recomputed_modules))}"
    interval, history = fp8.fp8_interval, fp8.fp8_amax_history_len
    return broken(
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
    device, fp8, recipe = config.parallel.device, config.fp8, config.fp8_recipe
    given = f"fp8_format={fp8.fp8_format}"
    if not fp8.uses_fp8 or device == "auto":
        return
    # apart from check_fp8: with device=auto the ranks choose, and check this again
    if recipe == "delayed":
        yield from _check_delayed(config)
    if fp8.fp8_format not in FP8_FORMATS[recipe]:
        yield f"fp8_recipe={recipe} has fp8_format {' or '.join(FP8_FORMATS[recipe])}, not {fp8.fp8_format}; use that"
    yield from _check_fp8_products(config)
    if not config.training.torch_compile:
        return
    if recipe == "delayed":
        yield (
            f"{given} and torch_compile exclude each other here; turn torch_compile off, and lazy mode on "
            "(HL_USE_LAZY_MODE=1), as Habana trains in fp8"
        )
    else:
        yield (
            f"{given} and torch_compile exclude each other here; turn torch_compile off: its kernels are compiled one "
            "by one"
        )


FP8_FORMATS = {"delayed": ("hybrid", "e5m2"), "tensorwise": ("hybrid", "e4m3"), "rowwise": ("e4m3",)}
"""Formats of each recipe. torch multiplies no two e5m2 matrices, and a row of gradients has little range to hold."""


def _check_fp8_products(config: Config) -> Iterator[str]:
    """Yield a message where the device lacks the products of the recipe, and does not emulate them."""
    device, recipe, emulates = config.parallel.device, config.fp8_recipe, config.fp8.fp8_emulate
    able = find_device(device).fp8_recipes
    given = f"fp8_format={config.fp8.fp8_format}"
    if emulates and (recipe == "delayed" or "delayed" in able):
        yield (
            f"fp8_emulate computes fp8_recipe=tensorwise and rowwise on CPU and CUDA, not fp8_recipe={recipe} on "
            f"device={device}; leave it out"
        )
        return
    if emulates or recipe in able:
        return
    if able:
        yield f"fp8_recipe={recipe} does not run on device={device}, which has {', '.join(able)}; use that"
    elif recipe == "delayed":
        yield (
            f"{given} with fp8_recipe=delayed runs on Gaudi's transformer engine, but device={device}; leave it out, "
            "or use fp8_recipe=tensorwise"
        )
    else:
        yield f"{given} needs products that device={device} lacks; leave it out, or emulate them by fp8_emulate"


# ---------------------------------------------------------------------------------------------------------------------
# Rules of the layout.

# `cost` is ours; the others are spelled as for DeepSpeed's PipelineModule
METHODS = ("cost", "parameters", "uniform", "type:TransformerLayer")


def check_engine(config: Config) -> Iterator[str]:
    optimizer, pp = config.optimizer, config.parallel.pipeline_model_parallel_size
    stage = f"zero_stage={optimizer.zero_stage}"
    # for the message: the first of the options that exclude a pipeline
    if config.parallel.no_pipeline_parallel:
        reason = "no_pipeline_parallel"
    else:
        reason = "offload_optimizer" if optimizer.offload_optimizer else stage
    yield from broken(
        (
            not config.uses_pipeline and pp > 1,
            f"{reason} runs without a pipeline, but pipeline_model_parallel_size={pp}; set it to 1, or use zero_stage "
            "0 or 1 without offload and without no_pipeline_parallel",
        ),
        (
            optimizer.offload_param and optimizer.zero_stage != 3,
            f"offload_param needs zero_stage=3, not {optimizer.zero_stage}; set zero_stage or turn it off",
        ),
        (
            optimizer.offload_optimizer and optimizer.zero_stage == 0,
            "offload_optimizer needs zero_stage 1, 2 or 3, not 0; set zero_stage or turn it off",
        ),
        (
            optimizer.kind.needs_whole_matrices and config.lora.lora_rank is not None,
            f"optimizer={optimizer.optimizer} is for whole matrices, which an adapter's factors are not: orthogonal "
            "factors say nothing of their product; use adamw, or leave out lora_rank",
        ),
    )
    yield from optimizer.optimizer_faults()


def check_replicas(config: Config, world_size: int) -> Iterator[str]:
    layout = Layout.of(config.parallel, world_size)
    # of experts fewer ranks may hold the same ones
    size = math.gcd(layout.grad_size, layout.expert_grad_size)
    # ranks that the layout does not fill are another rule's
    if layout.world_size == world_size and size % layout.num_replicas:
        what = "data-parallel ranks"
        if size < layout.grad_size:
            what = "ranks with the same experts"
        elif layout.context_size > 1:
            what = "context x data-parallel ranks"
        yield f"num_replicas={layout.num_replicas} does not divide the {size} {what}; use {divisors(size, 64)}"


def check_recheck(config: Config, world_size: int) -> Iterator[str]:
    """Yield a message for what the pass of a recheck does not compute as the training does."""
    parallel, training = config.parallel, config.training
    given, ranks = f"recheck_interval={config.guard.recheck_interval}", Layout.of(parallel, world_size).num_batch_ranks
    if not config.guard.recheck_interval or training.skip_train:
        return
    if ranks < 2:
        yield f"{given} compares data-parallel ranks, of which there is {ranks}; use more ranks, or 0"
    refused = (
        (config.optimizer.zero_stage == 3, "zero_stage=3"),
        (parallel.context_parallel_size > 1, f"context_parallel_size={parallel.context_parallel_size}"),
        (parallel.expert_model_parallel_size > 1, f"expert_model_parallel_size={parallel.expert_model_parallel_size}"),
        (parallel.schedule == "interleaved", "pipeline_schedule=interleaved"),
        (config.fp8.uses_fp8, f"fp8_format={config.fp8.fp8_format}"),
        (training.torch_compile, "torch_compile"),
        (training.offload_activations, "offload_activations"),
    )
    yield from broken(*((is_on, f"{given} does not run with {name}; leave one of them out") for is_on, name in refused))


def check_schedule(config: Config) -> list[str]:
    """Return a message for every rule of `pipeline_schedule` and its chunks that is broken."""
    parallel = config.parallel
    given, name, p = parallel.pipeline_schedule, parallel.schedule, parallel.pipeline_model_parallel_size
    v, num_layers = parallel.num_virtual_stages_per_pipeline_rank, config.model.num_layers
    chunks = f"num_virtual_stages_per_pipeline_rank={v}"
    has_one_stage = name != "1f1b" and p == 1
    subject = f"pipeline_schedule={given}" if given else chunks
    runs_deepspeeds = config.uses_pipeline and not config.uses_own_schedule
    return broken(
        (
            name == "interleaved" and v == 1,
            "pipeline_schedule=interleaved needs several chunks of the model on each stage; set "
            "num_virtual_stages_per_pipeline_rank to 2 or more",
        ),
        (
            name != "interleaved" and v > 1,
            f"{chunks} belongs to the interleaved schedule, but pipeline_schedule={given}; leave one of them out",
        ),
        (
            name == "zero-bubble" and config.training.torch_compile,
            "pipeline_schedule=zero-bubble defers the gradients of weights in the backward pass of each layer, which "
            "torch_compile compiles as a whole; turn one of the two off",
        ),
        (
            config.data.eval_graphs and not runs_deepspeeds,
            "eval_graphs replays the passes of DeepSpeed's pipeline; leave it out, or use zero_stage 0 or 1, "
            "pipeline_schedule=1f1b, and neither offload_optimizer nor no_pipeline_parallel",
        ),
        (
            has_one_stage,
            f"{subject} orders the work of several pipeline stages, but pipeline_model_parallel_size=1; raise it, or "
            "leave the option out",
        ),
        (
            # fewer layers than stages is another rule's
            not has_one_stage and v > 1 and p <= num_layers < p * v,
            f"pipeline_model_parallel_size={p} x {chunks} = {p * v} is larger than num_layers={num_layers}; use at "
            f"most {num_layers // p} virtual stages",
        ),
    )


def check_partition(config: Config) -> Iterator[str]:
    """Yield a message if `pipeline_partition_method` is neither a method nor a list that cuts the layers."""
    parallel, num_layers = config.parallel, config.model.num_layers
    given, listed, num_ranges = parallel.pipeline_partition_method, parallel.listed_layers, parallel.num_pipeline_ranges
    if given in METHODS:
        return
    num_stages = parallel.pipeline_model_parallel_size
    part = "stage" if num_ranges == num_stages else "chunk"
    size, over = divmod(num_layers, num_ranges)
    # a list for these very sizes, which can be copied from the message
    example = ",".join([str(size + 1)] * over + [str(size)] * (num_ranges - over))
    if listed is None:
        yield (
            f"pipeline_partition_method={given!r} is unknown; use {', '.join(METHODS)}, or a number of layers for each "
            f"{part}, such as {example}"
        )
        return
    wrong = []
    # all that is wrong with the list, in one message: each correction alone would be refused again
    if len(listed) != num_ranges:
        wrong.append(f"has {counted(len(listed), 'number')}")
    if sum(listed) != num_layers:
        wrong.append(f"adds up to {sum(listed)}")
    if 0 in listed[1:-1]:  # the first and the last stage hold the embedding and the output projection
        # from the second on, since the first may be 0
        wrong.append(f"leaves {part} {listed.index(0, 1)} without a layer")
    if wrong:
        parts = counted(num_ranges, part)
        if num_ranges != num_stages:
            parts += f" ({num_stages} stages x num_virtual_stages_per_pipeline_rank={num_ranges // num_stages})"
        rule = f"{parts} need a number of transformer layers each, {num_layers} in all"
        remedy = f"{example}, or cost" if num_ranges <= num_layers else "cost"
        yield f"pipeline_partition_method={given} {' and '.join(wrong)}; {rule}: use {remedy}"


def check_kept_ranks(config: Config) -> Iterator[str]:
    """Yield a message for what prevents ranks from keeping their process where another one ends."""
    if not config.checkpoint.keep_healthy_ranks:
        return
    # a process reads code once: after an edit a new rank would run another loss than those that stay, in silence
    own = {
        "architecture": config.model.architecture,
        "task": config.training.task,
        "loss": config.training.loss or "",
        "trainer": config.training.trainer or "",
        "callbacks": " ".join(config.logging.callbacks),
        "trackers": " ".join(config.logging.trackers),
        "device": config.parallel.device,
    }
    for name, value in own.items():
        if ":" in value:
            yield (
                f"{name}={value} is code of your own, of which ranks that keep_healthy_ranks keeps would not see an "
                "edit; leave keep_healthy_ranks out"
            )
    if config.training.torch_compile:
        yield (
            "keep_healthy_ranks keeps no process that has threads at work, and the compiler of torch_compile leaves "
            "some; leave one of the two out"
        )


def check_straggler(config: Config) -> list[str]:
    if not config.logging.log_straggler:
        return []
    names = ("tensor_model_parallel_size", "context_parallel_size", "expert_model_parallel_size")
    waits = [f"{name}={getattr(config.parallel, name)}" for name in names if getattr(config.parallel, name) > 1]
    return broken(
        (
            config.optimizer.zero_stage == 3,
            "log_straggler measures a rank's own work, but with zero_stage=3 every layer waits for the parameters of "
            "other ranks; turn it off",
        ),
        (
            config.training.torch_compile and bool(waits),
            f"log_straggler leaves out the waits of {' and '.join(waits)} within a layer, which it cannot see in "
            "layers compiled by torch_compile; turn one of the two off",
        ),
    )
