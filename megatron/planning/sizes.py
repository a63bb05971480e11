"""Parameters of a model, from its declared layers.

Nothing here or beside it imports torch or deepspeed, so a plan answers at once on a machine without either.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from megatron.config.options import Config
from megatron.config.plugins import load_plugin
from megatron.parallel.shards import LayerDeclaration, Shard, declared_shards


def declared_layers(config: Config) -> list[LayerDeclaration]:
    """Return the layers of the model, in order, as its family declares them."""
    layers: list[LayerDeclaration] = load_plugin("architecture", config.model.architecture).layers(config)
    return layers


def count_parameters(config: Config, counts: Callable[[Shard], bool] = lambda shard: True) -> int:
    """Parameters of the whole model that `counts` accepts, vocabulary padding included, each copy counted once."""
    shards = declared_shards(declared_layers(config)).values()
    return sum(_padded_numel(shard) for shard in shards if counts(shard))


def _padded_numel(shard: Shard) -> int:
    if shard.dim is None:
        return math.prod(shard.shape)
    return math.prod(shard.shape) // shard.shape[shard.dim] * (shard.shape[shard.dim] + shard.padding)


def parameters_of_layer(layer: LayerDeclaration, tensor_model_parallel_size: int, *, trained_only: bool = False) -> int:
    """Parameters of one layer that one tensor-parallel rank holds."""
    shards = (shard for shard in layer.shards.values() if shard.trained or not trained_only)
    return sum(math.prod(shard.local_shape(tensor_model_parallel_size)) for shard in shards)


def is_matrix(shard: Shard) -> bool:
    """True for the weight of a linear layer; not for an adapter's."""
    return len(shard.shape) > 1 and not shard.vocabulary and not shard.added


def number_size(config: Config) -> int:
    """Bytes of a weight, and of an activation."""
    return 4 if config.training.precision == "fp32" else 2
