"""The MLP of a transformer layer, and outputs that the backward pass computes again instead of keeping them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.models.attention.layer import Shared
from megatron.models.offload import Offload
from megatron.parallel.context import ParallelContext
from megatron.parallel.linear import ColumnParallelLinear, ParallelLinear, RowParallelLinear
from megatron.parallel.shards import Shards

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
}


def activation_of(name: str, shared: Shared, *, is_gated: bool) -> Callable[[Tensor], Tensor]:
    """Return the function between the projections of an MLP. Gated, it halves the channels."""
    if not is_gated:
        return ACTIVATIONS[name]
    kernels: Mapping[str, Callable[[Tensor], Tensor]]
    kernels = {"silu": shared.kernels.swiglu, "gelu_tanh": shared.kernels.geglu}
    return kernels[name]


class MLP(nn.Module):
    """`up` (or the fused [gate; up]), activation, down."""

    def __init__(
        self,
        shards: Shards,
        shared: Shared,
        *,
        activation: str,
        is_gated: bool = False,
        ctx: ParallelContext | None = None,
    ) -> None:
        """`ctx`: of its linear layers; None: that of the model."""
        super().__init__()
        ctx = ctx or shared.ctx
        self._up, self.offload = "gate_up" if is_gated else "up", shared.offload
        self.activation = activation_of(activation, shared, is_gated=is_gated)
        self.discards_activation = "mlp_act" in shared.config.training.recomputed_modules
        self.add_module(self._up, ColumnParallelLinear(shards.below(self._up), ctx))
        self.down = RowParallelLinear(shards.below("down"), ctx)

    # of another name than its module, which is `up` without a gate
    @property
    def first(self) -> ParallelLinear:
        layer: ParallelLinear = getattr(self, self._up)
        return layer

    def forward(self, hidden: Tensor) -> Tensor:
        return self.activated(self.first(hidden), self.down)

    def activated(self, inside: Tensor, down: Callable[[Tensor], Tensor]) -> Tensor:
        """Return down(activation(inside)), what lies between them recomputed where it is to be."""
        # an empty output, as of an expert, has no memory by which it could be recognised
        if self.discards_activation and self.training and len(inside):
            return discard_output(self.activation, down, inside, self.offload)  # type: ignore[no-any-return]
        return down(self.activation(inside))


# torch.compile cannot trace the hooks; what is inside `function` and `reader` it still compiles
@torch._disable_dynamo(recursive=False)  # type: ignore[untyped-decorator]
def discard_output(
    function: Callable[[Tensor], Tensor], reader: Callable[[Tensor], Any], x: Tensor, offload: Offload | None
) -> Any:
    """Return reader(function(x)), where the backward pass of `reader` computes function(x) again instead of keeping it.

    For a cheap `function` in front of a matrix product, such as a norm or an activation: torch.utils.checkpoint around
    both would multiply again too. `function` must not draw random numbers. `offload`: moves all else that is kept.
    """
    output = function(x)
    again = _Again(function, x.detach(), output, offload)
    with torch.autograd.graph.saved_tensors_hooks(again.pack, again.unpack):
        return reader(output)


class _View(NamedTuple):
    """Geometry of a discarded tensor in the memory of the output."""

    size: torch.Size
    stride: tuple[int, ...]
    offset: int | torch.SymInt


class _Again:
    """Stands for a discarded output among the tensors that a backward pass keeps."""

    def __init__(
        self, function: Callable[[Tensor], Tensor], x: Tensor, output: Tensor, offload: Offload | None
    ) -> None:
        self._function, self._offload = function, offload
        self._x = self._kept(x)
        # not its address, which it does not have in HPU's lazy mode
        self._storage = output.untyped_storage()._cdata
        self._layout = output.size(), output.stride()
        self._num_kept = self._num_left = 0
        self._output: Tensor | None = None

    def pack(self, tensor: Tensor) -> Any:
        if tensor.untyped_storage()._cdata != self._storage:
            return self._kept(tensor)
        self._num_kept += 1
        return _View(tensor.size(), tensor.stride(), tensor.storage_offset())

    def unpack(self, packed: Any) -> Tensor:
        if not isinstance(packed, _View):
            return self._restored(packed)
        if self._output is None:
            with torch.no_grad():
                output = self._function(self._restored(self._x))
            if (output.size(), output.stride()) != self._layout:  # what is kept are views of the first one's memory
                output = output.new_empty_strided(*self._layout).copy_(output)
            self._output = output
            self._num_left = self._num_kept
        self._num_left -= 1
        found = self._output.as_strided(*packed)
        if self._num_left == 0:
            self._output = None
        return found

    # of two hooks torch calls the inner one alone
    def _kept(self, tensor: Tensor) -> Any:
        return tensor if self._offload is None else self._offload.pack(tensor)

    def _restored(self, packed: Any) -> Tensor:
        return packed if self._offload is None else self._offload.unpack(packed)
