"""Rules of the engine and of the pipeline's schedule and stages."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.options.config import Config, broken

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
    )
    yield from optimizer.optimizer_faults()


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
        noun = "number" if len(listed) == 1 else "numbers"
        wrong.append(f"has {len(listed)} {noun}")
    if sum(listed) != num_layers:
        wrong.append(f"adds up to {sum(listed)}")
    if 0 in listed[1:-1]:  # the first and the last stage hold the embedding and the output projection
        # from the second on, since the first may be 0
        wrong.append(f"leaves {part} {listed.index(0, 1)} without a layer")
    if wrong:
        parts = "1 stage" if num_ranges == 1 else f"{num_ranges} {part}s"
        if num_ranges != num_stages:
            parts += f" ({num_stages} stages x num_virtual_stages_per_pipeline_rank={num_ranges // num_stages})"
        rule = f"{parts} need a number of transformer layers each, {num_layers} in all"
        remedy = f"{example}, or cost" if num_ranges <= num_layers else "cost"
        yield f"pipeline_partition_method={given} {' and '.join(wrong)}; {rule}: use {remedy}"


def check_straggler(config: Config) -> list[str]:
    tp = config.parallel.tensor_model_parallel_size
    if not config.logging.log_straggler:
        return []
    return broken(
        (
            config.optimizer.zero_stage == 3,
            "log_straggler measures a rank's own work, but with zero_stage=3 every layer waits for the parameters of "
            "other ranks; turn it off",
        ),
        (
            config.training.torch_compile and tp > 1,
            f"log_straggler leaves out the waits within a layer that tensor_model_parallel_size={tp} brings, which it "
            "cannot see in layers compiled by torch_compile; turn one of the two off",
        ),
    )
