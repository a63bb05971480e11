"""Rules of the pipeline's schedule."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.options.config import Config


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
