"""Parameters and FLOPs of a model, from its declared layers.

Nothing here or beside it imports torch or deepspeed, so a plan answers at once on a machine without either.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from megatron.models.registry import family_of
from megatron.options.config import Config, length_stages
from megatron.parallel.costs import Attention, MatrixProduct, Router
from megatron.parallel.layout import Layout
from megatron.parallel.shards import LayerDeclaration, Shard, declared_shards

T = TypeVar("T")


# read at every turn of a plan, and by a search for thousands of layouts of one model
def declared_layers(config: Config) -> list[LayerDeclaration]:
    """Return the layers of the model, in order, as its family declares them."""
    family = family_of(config)
    # what a family declares follows from these alone
    sizes = (config.parallel.tensor_model_parallel_size, config.training.seq_length, config.training.skip_train)
    key = (id(family), config.model, config.lora, *sizes)
    known = _DECLARED.get(key)
    if known is None:
        if len(_DECLARED) == MOST_DECLARED:
            _DECLARED.clear()
        # with the family, so that no other one can have its id
        known = _DECLARED[key] = (family, family.layers(config))
    return list(known[1])


MOST_DECLARED = 64
_DECLARED: dict[tuple[Any, ...], tuple[Any, list[LayerDeclaration]]] = {}


def of_layers(layers: Sequence[LayerDeclaration], function: Callable[[LayerDeclaration], T]) -> list[T]:
    """Return the function of each layer, computed once for those that are declared alike: most are, and with experts
    each is hundreds of parameters."""
    known: dict[tuple[Any, ...], T] = {}
    results = []
    for layer in layers:
        methods = id(layer.methods) if layer.methods else 0
        is_numbered = layer.number is not None
        key = (id(layer.shards), methods, layer.dropouts, layer.keeps_output, layer.projects, is_numbered)
        if key not in known:
            known[key] = function(layer)
        results.append(known[key])
    return results


def count_parameters(config: Config, counts: Callable[[Shard], bool] = lambda shard: True) -> int:
    """Parameters of the whole model that `counts` accepts, vocabulary padding included, each copy counted once."""
    shards = declared_shards(declared_layers(config)).values()
    return sum(_padded_numel(shard) for shard in shards if counts(shard))


def _padded_numel(shard: Shard) -> int:
    if shard.dim is None:
        return math.prod(shard.shape)
    return math.prod(shard.shape) // shard.shape[shard.dim] * (shard.shape[shard.dim] + shard.padding)


def active_parameters(config: Config) -> int:
    """Parameters of the whole model that compute with one token: of experts, those that it passes through."""
    shards = declared_shards(declared_layers(config)).values()
    return round(sum(_padded_numel(shard) * _share(shard) for shard in shards))


def _share(shard: Shard) -> float:
    """Share of the tokens that compute with a parameter."""
    return shard.cost.share if isinstance(shard.cost, MatrixProduct) else 1.0


def held_shards(layer: LayerDeclaration, layout: Layout) -> list[Shard]:
    """Return the shards of a layer that a rank holds, whole or in part. Every rank of a stage holds as many numbers."""
    return [shard for shard in layer.shards.values() if layout.holds(shard)]


def held_numel(shard: Shard, layout: Layout) -> int:
    """Numbers of a parameter on a rank that holds it."""
    _, size = layout.cut_of(shard)
    return math.prod(shard.local_shape(size))


def parameters_of_layer(layer: LayerDeclaration, layout: Layout, *, trained_only: bool = False) -> int:
    """Parameters of one layer that one rank holds."""
    shards = (shard for shard in held_shards(layer, layout) if shard.trained or not trained_only)
    return sum(held_numel(shard, layout) for shard in shards)


@dataclass(frozen=True)
class LayerFlops:
    """FLOPs of one layer for one token, of all tensor-parallel ranks together."""

    forward: int
    backward: int
    """Includes what is recomputed; leaves out the gradients that no trained parameter needs."""
    recomputed: int

    @property
    def total(self) -> int:
        return self.forward + self.backward


def flops_per_token(config: Config) -> float:
    """FLOPs of training on one token, forward and backward: 6 N + 12 L A D S.

    N counts the weights that a token is multiplied with: the matrices of the layers and the output head over the true
    vocabulary; neither the embedding look-up nor positions, norms, biases and padding. L layers, A query heads, D head
    size, S sequence: attention counts the whole S x S square, although half of it is masked; recomputation does not
    count. Where weights are frozen, neither do the gradients that no trained parameter needs: with adapters 4 N, their
    own small products left out.
    Source: the model FLOPs of PaLM, appendix B (Chowdhery et al. 2022, arXiv:2204.02311).
    """
    return float(sum(flops.total - flops.recomputed for flops in layer_flops(config)))


class FlopsOfSamples:
    """`flops_per_token` of a run, whose rows may grow with the consumed samples (seq_length_stages)."""

    def __init__(self, config: Config) -> None:
        begin = 0.0
        self._stages: list[tuple[float, float, float]] = []
        """(FLOPs per token, first sample, first one beyond it)."""
        for length, stop in length_stages(config.training):
            training = replace(config.training, seq_length=length, seq_length_stages=None)
            end = math.inf if stop is None else stop
            self._stages.append((flops_per_token(replace(config, training=training)), begin, end))
            begin = end

    @property
    def last(self) -> float:
        """FLOPs per token in rows of seq_length."""
        return self._stages[-1][0]

    def per_token(self, begin: int, end: int) -> float:
        """Return the mean over the samples from `begin` to `end`, which have as many tokens each."""
        if end <= begin:
            return self.last
        counts = [max(0.0, min(end, stop) - max(begin, start)) for _, start, stop in self._stages]
        return sum(count * flops for count, (flops, _, _) in zip(counts, self._stages, strict=True)) / (end - begin)


def layer_flops(config: Config, places: Sequence[range] | None = None) -> list[LayerFlops]:
    """Return what each declared layer computes, in order: what `flops_per_token` counts, and what is recomputed.

    `places`: of the tokens of a row that count, such as those of a context-parallel rank; None: all.
    """
    layers = declared_layers(config)
    is_trained = itertools.accumulate(_is_trained(layer) for layer in layers)  # this layer, or one before it
    return [
        _flops(layer, config, places, propagates=count > 0) for layer, count in zip(layers, is_trained, strict=True)
    ]


def _is_trained(layer: LayerDeclaration) -> bool:
    return any(shard.trained for shard in layer.shards.values())


def _flops(layer: LayerDeclaration, config: Config, places: Sequence[range] | None, *, propagates: bool) -> LayerFlops:
    """`propagates`: a parameter of this layer or of one before it is trained, so that its input needs a gradient."""
    products = [shard for shard in layer.shards.values() if _multiplies(shard, layer)]
    attention = _attention(products, config.training.seq_length, places)
    forward = _products(products) + attention
    of_weights = _products([shard for shard in products if shard.trained])
    if not propagates:  # no layer before it needs a gradient, so the backward pass ends here
        return LayerFlops(forward, of_weights, 0)
    recomputed = 0
    # nothing is recomputed of the output projection and the loss
    if layer.number is not None and config.training.recompute_granularity == "full":
        recomputed = forward
    if "core_attn" in config.training.recomputed_modules:
        recomputed += attention
    if "mlp" in config.training.recomputed_modules:
        recomputed += _products([shard for shard in products if _is_of_mlp(shard)])
    # each product has one more for the gradient of its input, the core of the attention two
    return LayerFlops(forward, forward + attention + recomputed + of_weights, recomputed)


def _attention(products: Sequence[Shard], seq_length: int, places: Sequence[range] | None) -> int:
    """FLOPs of the cores of attentions whose results these products read."""
    costs = [shard.cost for shard in products if isinstance(shard.cost, MatrixProduct)]
    return sum(cost.reads.flops_per_token(seq_length, places) for cost in costs if isinstance(cost.reads, Attention))


def _multiplies(shard: Shard, layer: LayerDeclaration) -> bool:
    if shard.vocabulary and not shard.added:
        return layer.projects
    return isinstance(shard.cost, MatrixProduct | Router)


def _is_of_mlp(shard: Shard) -> bool:
    return isinstance(shard.cost, MatrixProduct) and shard.cost.part == "mlp"


def _products(matrices: Sequence[Shard]) -> int:
    """FLOPs of the products with these matrices for one token: an addition and a multiplication a number.

    Of an expert's, those of the share of tokens that pass through it.
    """
    return round(sum(2 * math.prod(matrix.shape) * _share(matrix) for matrix in matrices))
