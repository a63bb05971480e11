"""Options of matrix products in fp8."""

from __future__ import annotations

from typing import Literal

from pydantic.dataclasses import dataclass

from megatron.options.types import STRICT, NonNegative, Positive


@dataclass(frozen=True, config=STRICT)
class Fp8Config:
    """Matrix products of the transformer layers in fp8, on Gaudi."""

    fp8_format: Literal["none", "hybrid", "e5m2"] = "none"
    """Format of the operands in training, on HPU. `hybrid`: e4m3 in the forward and e5m2 in the backward pass. `e5m2`:
    in both. Weights, optimizer, evaluation and generation stay as they are without it."""
    fp8_margin: NonNegative = 0
    """Scales are smaller by 2 to this power than the largest that fits."""
    fp8_interval: Positive | None = None
    """Microbatches between two updates of the scales. Unset: those of a global batch, if their number is fixed."""
    fp8_amax_history_len: Positive | None = None
    """Last microbatches of an interval whose largest absolute values are kept. Unset: a sixteenth of
    the interval."""
    fp8_amax_compute_algo: Literal["max", "most_recent"] = "max"
    """Value of the history that the scale follows."""
    fp8_amax_reduce: bool = True
    """Take the largest absolute values over tensor- and data-parallel ranks, so that all of them scale alike."""
    fp8_wgrad: bool = True
    """Compute the gradients of weights in fp8 too."""
    fp8_mlp_row_parallel: bool = True
    """Compute the MLP's second product in fp8 too."""
    fp8_smooth_swiglu: bool = True
    """Scale the second product of a SwiGLU MLP by channels (Smooth-SwiGLU, arXiv:2409.12517)."""
    cache_fp8_weight: bool = True
    """Keep the fp8 weights of the forward pass for the backward pass, a byte a number."""
    cache_fp8_weight_fwd: bool = True
    """Convert weights once a global batch instead of once a microbatch."""

    @property
    def uses_fp8(self) -> bool:
        return self.fp8_format != "none"
