"""Rules of the pipeline's stages."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.config.options import Config

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
