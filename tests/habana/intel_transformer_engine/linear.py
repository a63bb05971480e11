"""A linear layer in fp8."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from habana_frameworks.torch import stand_in
from torch import Tensor

from .fp8 import FP8GlobalStateManager
from .recipe import DelayedScaling
from .scales import FP8TensorMeta

E5M2_MAX = 57344.0
INPUT, WEIGHT = 0, 1
built: list[Linear] = []
"""Every layer of the process."""


def quantised(x: Tensor, scale: Tensor, largest: float) -> Tensor:
    """x rounded to fp8 under this scale, and scaled back, in float32."""
    dtype = torch.float8_e5m2 if largest == E5M2_MAX else torch.float8_e4m3fn
    return (x.float() * scale).clamp(-largest, largest).to(dtype).float() / scale


class Linear(torch.nn.Module):
    """Weight and bias are given with each call: the stand-in allocates none."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        sequence_parallel: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Any = None,
        init_method: Any = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype = torch.float32,
        parallel_mode: str | None = None,
        skip_weight_param_allocation: bool = False,
        minimize_memory: bool = False,
        device: str = "hpu",
        rng_tracker_name: str | None = None,
        use_fp8_smooth_swiglu: bool = False,
    ) -> None:
        super().__init__()
        stand_in.calls.append(("te.Linear", {k: v for k, v in locals().items() if k not in ("self", "__class__")}))
        assert skip_weight_param_allocation, "the stand-in allocates no weight"
        assert parallel_mode is None, "the stand-in does not communicate"
        assert not return_bias
        self.in_features, self.out_features, self.use_bias = in_features, out_features, bias
        self.minimize_memory, self.use_fp8_smooth_swiglu = minimize_memory, use_fp8_smooth_swiglu
        self.fp8_meta: dict[str, Any] = {}
        self.run_cnt = 0
        self._cached: Tensor | None = None
        self.casts = 0
        """How often the weight was quantised."""
        built.append(self)

    def forward(
        self, inp: Tensor, weight: Tensor, bias: Tensor | None = None, is_first_microbatch: bool | None = None
    ) -> Tensor:
        assert weight.shape == (self.out_features, self.in_features) == (*weight.shape[:1], inp.shape[-1])
        assert self.use_bias == (bias is not None)
        state = FP8GlobalStateManager
        if not state.enabled:
            return F.linear(inp, weight, bias)
        measures = self._advance(state.recipe, weight.device)
        output: Tensor = _Product.apply(inp, weight, self, state.recipe, measures, is_first_microbatch)
        return output if bias is None else output + bias

    def _advance(self, recipe: DelayedScaling, device: torch.device) -> bool:
        """Count a pass, update the scales at the start of an interval; return True in the last passes of one."""
        if not self.fp8_meta:
            self.fp8_meta = {
                "scaling_fwd": FP8TensorMeta(recipe.amax_history_len, 2, device),
                "scaling_hybrid": FP8TensorMeta(recipe.amax_history_len, 2, device),
                "scaling_bwd": FP8TensorMeta(recipe.amax_history_len, 1, device),
            }
        self.fp8_meta["recipe"] = recipe
        largest = {"fwd": recipe.fp8_format.value.max_fwd, "hybrid": E5M2_MAX, "bwd": recipe.fp8_format.value.max_bwd}
        place = self.run_cnt % recipe.interval
        self.run_cnt += 1
        for name, limit in largest.items():
            meta = self.fp8_meta[f"scaling_{name}"]
            if len(meta.amax_history) != recipe.amax_history_len:
                meta.resize(recipe.amax_history_len)
            if place == 0:
                meta.update(limit, recipe.amax_compute_algo, recipe.margin)
        return place >= recipe.interval - recipe.amax_history_len

    def measure(self, index: int, x: Tensor) -> None:
        for name in ("fwd", "hybrid"):
            self.fp8_meta[f"scaling_{name}"].measure(index, x.detach().abs().amax().float())

    def weight_of(self, weight: Tensor, is_first: bool | None, largest: float) -> Tensor:
        if is_first is None or is_first or self._cached is None:
            self.casts += 1
            self._cached = quantised(weight, self.fp8_meta["scaling_fwd"].scale[WEIGHT], largest)
        return self._cached


class _Product(torch.autograd.Function):
    """x W^T from fp8 operands, summed in float32; HYBRID computes gradients from e5m2 operands."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, layer: Linear, recipe: DelayedScaling, measures: bool, first: bool | None
    ) -> Tensor:
        ctx.layer, ctx.recipe, ctx.measures = layer, recipe, measures
        smooth = torch.ones((), device=x.device)
        if layer.use_fp8_smooth_swiglu:  # per channel; source: arXiv:2409.12517, section 4.4
            smooth = x.detach().abs().flatten(0, -2).amax(0).float().clamp(min=2.0**-24).log2().ceil().exp2()
        ctx.smooth = smooth
        scaled_x, scaled_weight = x.detach().float() / smooth, weight.detach().float() * smooth
        if measures:
            layer.measure(INPUT, scaled_x)
            layer.measure(WEIGHT, scaled_weight)
            for name in ("fwd", "hybrid"):
                FP8GlobalStateManager.forward.append(layer.fp8_meta[f"scaling_{name}"])
        scales, largest = layer.fp8_meta["scaling_fwd"].scale, recipe.fp8_format.value.max_fwd
        own_weight = layer.weight_of(scaled_weight, None if layer.use_fp8_smooth_swiglu else first, largest)
        output = quantised(scaled_x, scales[INPUT], largest) @ own_weight.t()
        hybrid = layer.fp8_meta["scaling_hybrid"].scale
        ctx.save_for_backward(
            x if recipe.override_linear_precision.wgrad else quantised(scaled_x, hybrid[INPUT], E5M2_MAX),
            quantised(scaled_weight, hybrid[WEIGHT], E5M2_MAX),
        )
        return output.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        meta = ctx.layer.fp8_meta["scaling_bwd"]
        if ctx.measures:
            meta.measure(0, grad.abs().amax().float())
            FP8GlobalStateManager.backward.append(meta)
        rounded = quantised(grad, meta.scale[0], E5M2_MAX)
        grad_x = (rounded @ weight / ctx.smooth).to(grad.dtype)
        rows, smooth = (grad.float(), 1) if ctx.recipe.override_linear_precision.wgrad else (rounded, ctx.smooth)
        grad_weight = (rows.flatten(0, -2).t() @ x.float().flatten(0, -2) * smooth).to(grad.dtype)
        return grad_x, grad_weight, None, None, None, None
