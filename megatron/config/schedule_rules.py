"""Rules of the pipeline's schedule."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.config.options import Config


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
