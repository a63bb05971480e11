"""Choice of the products that run in fp8, and delayed scaling by the transformer engine of Gaudi's software.

Scales follow from the largest absolute values (amax) of earlier microbatches. The engine quantises, multiplies and
keeps the scales; parameters, communication and bias stay with the layers here, so layouts and checkpoints are the same
as without it.
Source: HabanaAI/Megatron-LM 1.24, core/extensions/intel_transformer_engine.py and core/transformer/
transformer_block.py; Micikevicius et al. 2022 (arXiv:2209.05433).
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from megatron.options.config import Config, num_microbatches
from megatron.options.training import Fp8Config
from megatron.parallel.context import ParallelContext, group_of_stage
from megatron.parallel.costs import Activation
from megatron.parallel.linear import DENSE, BaseMethod, ParallelLinear, plus_bias
from megatron.parallel.mappings import enter_tensor_region
from megatron.parallel.operators.fp8_linear import ScaledMethod
from megatron.parallel.operators.fp8_weights import fp8_weights
from megatron.parallel.pass_state import Fp8Passes
from megatron.parallel.shards import LayerDeclaration
from megatron.runtime.device import DeviceError


def transformer_engine() -> Any:
    """Return Intel's transformer engine. Raises DeviceError where it is missing or does not load."""
    try:
        return importlib.import_module("intel_transformer_engine")
    except (ImportError, OSError, AttributeError) as error:
        raise DeviceError(
            f"fp8 needs intel_transformer_engine, which does not load: {error}; it comes with the image or the "
            "installer of the Gaudi software, never by pip from the public index. Or leave fp8_format out"
        ) from None


def with_fp8(layers: Iterable[LayerDeclaration], config: Config) -> list[LayerDeclaration]:
    """Return the layers with the matrix products of transformer layers in fp8."""
    return [_with_fp8(layer, config) for layer in layers]


def _with_fp8(layer: LayerDeclaration, config: Config) -> LayerDeclaration:
    for name, cost in fp8_weights(layer, config):
        method: BaseMethod
        if config.fp8_recipe == "delayed":
            is_gated = isinstance(cost.reads, Activation) and cost.reads.is_gated
            method = Fp8Method(config.fp8, smooth_swiglu=config.fp8.fp8_smooth_swiglu and is_gated)
        else:
            method = ScaledMethod(config.fp8, config.fp8_recipe)
        layer = layer.with_base_method(name.removesuffix(".weight"), method)
    return layer


def set_up(passes: Fp8Passes, config: Config, ctx: ParallelContext) -> None:
    """Prepare the context in which this rank's training passes run. Collective. Raises DeviceError."""
    if config.fp8_recipe != "delayed":
        passes.autocast = contextlib.nullcontext
        return
    engine, fp8 = transformer_engine(), config.fp8
    interval, history = _scaling(config, ctx.num_batch_ranks)
    recipe = engine.recipe.DelayedScaling(
        margin=fp8.fp8_margin,
        interval=interval,
        fp8_format=getattr(engine.recipe.Format, fp8.fp8_format.upper()),
        amax_compute_algo=fp8.fp8_amax_compute_algo,
        amax_history_len=history,
        override_linear_precision=engine.recipe._OverrideLinearPrecision(False, False, not fp8.fp8_wgrad),
        # a stage of one rank has no other rank's amax to join
        reduce_amax=fp8.fp8_amax_reduce and ctx.world_size > ctx.num_stages,
    )
    passes.autocast = functools.partial(
        engine.fp8_autocast, enabled=True, fp8_recipe=recipe, fp8_group=group_of_stage(ctx)
    )


# Switched on around the forward passes of training alone: evaluation measures the model that is exported, and moves
# no scale. Scales are not saved, since the engine's own form of them is a pickle; one interval measures them again.
class Fp8Method(BaseMethod):
    """x @ W^T + b with operands in fp8 during a training pass, in 16 bits otherwise. One method for each layer."""

    def __init__(self, options: Fp8Config, *, smooth_swiglu: bool) -> None:
        self._keeps_weight, self._converts_once = options.cache_fp8_weight, options.cache_fp8_weight_fwd
        self._smooth_swiglu = smooth_swiglu
        self._product: Callable[..., Tensor] | None = None

    def linear(self, layer: ParallelLinear, x: Tensor, bias: Tensor | None) -> Tensor:
        passes = layer.ctx.state.fp8
        if not passes.is_on:
            return DENSE.linear(layer, x, bias)
        if self._product is None:  # evaluation and generation, which stay in 16 bits, need no engine
            self._product = self._build(layer)
        is_first = None
        if self._converts_once:
            is_first = passes.is_first_microbatch
        output = self._product(x, layer.weight, is_first_microbatch=is_first)
        return plus_bias(output, bias)

    def column(self, layer: ParallelLinear, hidden: Tensor) -> Tensor:
        if not layer.ctx.state.fp8.is_on:
            return DENSE.column(layer, hidden)
        return self.linear(layer, enter_tensor_region(hidden, layer.ctx), layer.bias)

    def _build(self, layer: ParallelLinear) -> Callable[..., Tensor]:
        """Return the engine's layer, which is given the weight with each call and holds none."""
        out_features, in_features = layer.weight.shape
        smooth = {}
        if self._smooth_swiglu:  # an argument that is new in 1.22
            smooth["use_fp8_smooth_swiglu"] = True
        product: Callable[..., Tensor] = transformer_engine().Linear(
            in_features,
            out_features,
            bias=False,
            skip_weight_param_allocation=True,
            params_dtype=layer.weight.dtype,
            parallel_mode=None,
            tp_group=layer.ctx.tensor_group,
            tp_size=layer.ctx.tensor_size,
            minimize_memory=not self._keeps_weight,
            device=layer.weight.device.type,
            **smooth,
        )
        return product


def _scaling(config: Config, num_batch_ranks: int) -> tuple[int, int]:
    """Return the interval and the length of the history, in microbatches.

    Source of what is unset: examples/llama/pretrain_llama.sh of HabanaAI/Megatron-LM 1.24.
    """
    microbatches, fp8 = num_microbatches(config.training, num_batch_ranks), config.fp8
    interval = fp8.fp8_interval or microbatches
    return interval, fp8.fp8_amax_history_len or -(-min(interval, microbatches) // 16)
