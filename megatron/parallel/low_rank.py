"""Low-rank adapters, whose products are added to what the base has computed: of linear layers and of vocabularies.

Shapes: S sequence, B batch, H hidden, V vocabulary rows of this rank; R the ranks of a layer's adapters together, A
[R, in], B [out, R]; "rows" as in linear.py. models/adapters.py declares them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megatron.parallel.context import ParallelContext
from megatron.parallel.linear import LinearMethod, ParallelLinear
from megatron.parallel.losses import capped, with_adapter
from megatron.parallel.mappings import all_reduce, copy_to_tensor_region, enter_tensor_region, of_all_ranks
from megatron.parallel.operators import products
from megatron.parallel.rng import derive_seed
from megatron.parallel.shards import Adapter, Shard, Shards, alias, shard_of
from megatron.runtime.devices import device_of

EMBEDDING_MAGNITUDE, OUTPUT_MAGNITUDE = "lora_embedding_magnitude_vector", "lora_magnitude_vector"


def plus(output: Tensor, low: Tensor, up: Tensor) -> Tensor:
    """output [..., out] + low [..., R] up^T, into the memory of `output`, which nothing reads later."""
    if torch.compiler.is_compiling():
        return output + products.linear(low, up)
    return _Plus.apply(output, low, up)  # type: ignore[no-any-return]


def adapted_product(layer: ParallelLinear, x: Tensor, bias: Tensor | None, down: Tensor, up: Tensor) -> Tensor:
    """Return x W^T + bias + x A^T B^T with this rank's frozen weight W: [..., in] -> [..., out]."""
    if torch.compiler.is_compiling():
        return plus(layer.base.linear(layer, x, bias), products.linear(x, down), up)
    return _AdaptedProduct.apply(x, bias, down, up, layer)  # type: ignore[no-any-return]


class _Plus(torch.autograd.Function):
    @staticmethod
    def forward(function: Any, output: Tensor, low: Tensor, up: Tensor) -> Tensor:
        function.save_for_backward(low, up)
        result = output.detach()  # the same memory; autograd forbids changes of a view, which some outputs are
        products.add_mm_(_rows(result), low.flatten(0, -2), up.t())
        return result

    @staticmethod
    @once_differentiable
    def backward(function: Any, grad: Tensor) -> Any:
        (low, up), (_, needs_low, needs_up) = function.saved_tensors, function.needs_input_grad
        grad_low = grad_up = None
        if needs_low:
            grad_low = products.mm(grad, up)
        if needs_up:
            grad_up = _up_gradient(grad, low)
        return grad, grad_low, grad_up


class _AdaptedProduct(torch.autograd.Function):
    """The gradient of x is also one sum. A weight in 4 bits is dequantised again for it."""

    @staticmethod
    def forward(
        function: Any, x: Tensor, bias: Tensor | None, down: Tensor, up: Tensor, layer: ParallelLinear
    ) -> Tensor:
        low, output = products.linear(x, down), products.linear(x, layer.dense_weight(x.dtype), bias)
        function.layer = layer
        function.save_for_backward(x, low, down, up)
        products.add_mm_(_rows(output), low.flatten(0, -2), up.t())
        return output

    @staticmethod
    @once_differentiable
    def backward(function: Any, grad: Tensor) -> Any:
        x, low, down, up = function.saved_tensors
        layer, grad_low, grad_x, grad_bias = function.layer, products.mm(grad, up), None, None
        if function.needs_input_grad[0]:
            grad_x = products.mm(grad, layer.dense_weight(grad.dtype))
            products.add_mm_(_rows(grad_x), grad_low.flatten(0, -2), down)
        if function.needs_input_grad[1]:
            grad_bias = grad.flatten(0, -2).sum(0)
        grad_down = products.mm(grad_low.flatten(0, -2).t(), x.flatten(0, -2))
        return grad_x, grad_bias, grad_down, _up_gradient(grad, low), None


def _up_gradient(grad: Tensor, low: Tensor) -> Tensor:
    """[out, R]. CPUs compute few rows of a product faster than few columns."""
    return products.mm(low.flatten(0, -2).t(), grad.flatten(0, -2)).t()


def _rows(x: Tensor) -> Tensor:
    """[..., n] -> [tokens, n], the same memory."""
    return x.view(-1, x.shape[-1])


NORM_NUMBERS = 1 << 16
"""Numbers of a weight that a CPU converts at once for the norms of its rows."""
START = "lora_start_"
"""Begins the names of the frozen copies: `lora_start_A`, `lora_start_B`."""


# PiSSA (Meng et al. 2024, arXiv:2404.02948) and PEFT subtract what the adapter holds at its start from the base. Here
# the base stays as it is: the start is kept beside the adapter, frozen, and subtracted from its output.
@torch.no_grad()
def start_of(layer: Any, adapter: Adapter, local: Tensor, whole: Shard, ctx: ParallelContext) -> dict[str, Tensor]:
    """Return this rank's part of the start of A and B and of their frozen copies, by local name, float32. Collective.

    They are the weight's principal singular vectors. `local` is this rank's part of the adapted rows, cut as
    `whole` says. One rank computes for all of its stage.
    """
    parts = [local.contiguous()]
    if ctx.tensor_size > 1:
        parts = of_all_ranks(local, ctx.tensor_group)
    parameters = [layer.get_parameter(f"lora_{name}{adapter.suffix}") for name in "AB"]
    wide = torch.promote_types(local.dtype, torch.float32)
    found = [torch.empty(shard_of(p).shape, dtype=wide, device=local.device) for p in parameters]
    grad_rank, grad_size = ctx.grad_place(shard_of(parameters[0]))
    # one rank decomposes the whole weight, so that every layout starts alike
    if ctx.tensor_rank == 0 and grad_rank == 0:
        seed = derive_seed(parameters[0].full_name)
        computed = _factors(whole.assemble(parts).to(wide), adapter, seed)
        for tensor, values in zip(found, computed, strict=True):
            tensor.copy_(values)
    grad_group = ctx.grad_group_of(shard_of(parameters[0]))
    for group, size in ((ctx.tensor_group, ctx.tensor_size), (grad_group, grad_size)):
        if group is None or size == 1:
            continue
        for tensor in found:
            dist.broadcast(tensor, dist.get_global_rank(group, 0), group=group)
    start: dict[str, Tensor] = {}
    for name, parameter, full in zip("AB", parameters, found, strict=True):
        own = shard_of(parameter).take(full, ctx.tensor_rank, ctx.tensor_size)
        start |= {f"lora_{name}{adapter.suffix}": own, f"{START}{name}{adapter.suffix}": own}
    return start


def _factors(weight: Tensor, adapter: Adapter, seed: int) -> tuple[Tensor, Tensor]:
    """Return A [r, in] and B [out, r]: scale * B A is the best approximation of rank r of weight [out, in]."""
    if not device_of(weight.device.type).has_linear_algebra:
        weight = weight.cpu()
    rank = adapter.rank
    if adapter.svd_iterations is None:
        left, values, right = torch.linalg.svd(weight, full_matrices=False)
    else:
        devices = []
        if weight.is_cuda:
            devices.append(weight.device)
        # the decomposition starts from random numbers: they are the adapter's, and the model's draws stay as they are
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(seed)
            left, values, right = torch.svd_lowrank(weight, rank, niter=adapter.svd_iterations)
        right = right.t()
    roots = (values[:rank] / adapter.scale).sqrt()
    return roots[:, None] * right[:rank], left[:, :rank] * roots


def _enters(layer: ParallelLinear) -> bool:
    """Return True for a column-parallel layer; the caller of an expert has brought the tokens to all ranks already."""
    return layer.weight_shard.dim == 0 and layer.weight_shard.expert is None


class LowRankMethod(LinearMethod):
    """The base layer's output plus that of its adapters, with dropout on their input.

    The adapters of fused outputs (q, k, v) are computed together: one product with all their A, one with their B.
    With `use_dora` (Liu et al. 2024, arXiv:2402.09353) each row of the sum of both weights is scaled to a trained
    magnitude. As in PEFT, its norm is a constant to the gradient, and dropout reaches the base's part of the change.
    """

    def __init__(self, adapters: Sequence[Adapter], dropout: float, *, use_dora: bool) -> None:
        self.adapters, self.dropout, self.use_dora = tuple(adapters), dropout, use_dora
        self.is_principal = any(adapter.is_principal for adapter in adapters)
        self.starts_from_base = use_dora or self.is_principal

    def product(self, layer: ParallelLinear, x: Tensor) -> Tensor:
        """Return the partial sums of a row-parallel layer over this rank's channels, or the output of an expert's."""
        # ranks that share an expert see the same tokens
        sharded = layer.weight_shard.dim == 1 or layer.ctx.tensor_size == 1
        return self._with_adapters(layer, layer.base.product, x, sharded=sharded, bias=None)

    def column(self, layer: ParallelLinear, hidden: Tensor) -> Tensor:
        """[rows, B, in] -> [S, B, out/tp]"""
        # A sees this rank's rows alone: what is gathered has R channels, not `in`
        sharded = layer.ctx.sequence_parallel
        return self._with_adapters(layer, layer.base.column, hidden, sharded=sharded, bias=layer.bias)

    def row(self, layer: ParallelLinear, x: Tensor) -> Tensor:
        if layer.ctx.tensor_size > 1:
            return super().row(layer, x)
        return self._with_adapters(layer, layer.base.row, x, sharded=True, bias=layer.bias)

    def start(self, layer: ParallelLinear) -> dict[str, Tensor]:
        """Return DoRA's magnitudes, the norms at the start, and PiSSA's factors."""
        found: dict[str, Tensor] = {}
        norms = None
        if self.use_dora:
            norms = self._norms(layer, self._down(layer), self._up(layer))
        for adapter, rows in self._row_blocks(layer):
            if adapter is not None and norms is not None:
                found[magnitude_of(adapter)] = norms[rows]
            if adapter is not None and adapter.is_principal:
                local = layer.dense_weight(layer.weight.dtype)[rows]
                found |= start_of(layer, adapter, local, _adapted_rows(layer.weight_shard, adapter), layer.ctx)
        return found

    def _with_adapters(
        self,
        layer: ParallelLinear,
        base: Callable[[ParallelLinear, Tensor], Tensor],
        x: Tensor,
        *,
        sharded: bool,
        bias: Tensor | None,
    ) -> Tensor:
        """Return base(x) with the adapters; `bias` is in that already. `sharded`: tensor-parallel ranks differ in x."""
        if not layer.ctx.state.adapters.is_on:
            return base(layer, x)
        if self.is_principal:
            base = partial(self._without_start, base)
        inputs = dropped(x, self.dropout, layer, sharded=sharded)
        down, up = self._down(layer), self._up(layer)
        communicates = layer.ctx.tensor_size > 1 and _enters(layer)
        # base and adapter in one node of the graph, which keeps neither of their outputs
        if inputs is x and layer.base.is_plain and not (self.use_dora or self.is_principal or communicates):
            return adapted_product(layer, x, bias, down, up)
        output, low = base(layer, x), self._entered(layer, products.linear(inputs, down))
        if not self.use_dora:
            return plus(output, low, up)
        # output + (gain - 1) * (base of `inputs`, without its bias) + gain * low up^T
        gains = self._gains(layer, down, up)
        if inputs is x:
            output = plus(output, low, up) * gains
        else:
            inside = base(layer, inputs)
            output = output - inside  # in a statement of its own: `plus` writes over `inside`
            output = output + plus(inside, low, up) * gains
        if bias is None:
            return output
        return output + bias * (1 - gains)  # the gains scale the weight's product, and have multiplied the bias too

    def _without_start(
        self, base: Callable[[ParallelLinear, Tensor], Tensor], layer: ParallelLinear, x: Tensor
    ) -> Tensor:
        """Return base(x) less the adapters' start."""
        low = self._entered(layer, products.linear(x, self._down(layer, START)))
        return plus(base(layer, x), low, -self._up(layer, START))

    def _entered(self, layer: ParallelLinear, low: Tensor) -> Tensor:
        if not _enters(layer):
            return low
        return enter_tensor_region(low, layer.ctx)

    def _gains(self, layer: ParallelLinear, down: Tensor, up: Tensor) -> Tensor:
        """Return the factor of each output, [out/tp]: its magnitude by its norm, 1 without an adapter."""
        norms = self._norms(layer, down, up)
        parts = []
        for adapter, rows in self._row_blocks(layer):
            if adapter is None:
                parts.append(up.new_ones(rows.stop - rows.start))
            else:
                parts.append(gain(layer.get_parameter(magnitude_of(adapter)), norms[rows]))
        return _joined(parts)

    def _norms(self, layer: ParallelLinear, down: Tensor, up: Tensor) -> Tensor:
        """Return the norms of the rows of base and adapters together, [out/tp]. Collective where `in` is cut."""
        if self.is_principal:
            down, up = torch.cat([down, self._down(layer, START)]), torch.cat([up, -self._up(layer, START)], dim=1)
        return row_norms(layer.dense_weight(down.dtype), down, up, layer.ctx, is_partial=layer.weight_shard.dim == 1)

    def _down(self, layer: ParallelLinear, kind: str = "lora_") -> Tensor:
        """[R, in]"""
        parts: list[Tensor] = [layer.get_parameter(f"{kind}A{adapter.suffix}") for adapter in self.adapters]
        return _joined(parts)

    def _up(self, layer: ParallelLinear, kind: str = "lora_") -> Tensor:
        """[out, R], scaled: a block for each adapter, zeros where an output has none."""
        parts = {each.suffix: layer.get_parameter(f"{kind}B{each.suffix}") * each.scale for each in self.adapters}
        total, left, blocks = sum(adapter.rank for adapter in self.adapters), 0, []
        for adapter, rows in self._row_blocks(layer):
            if adapter is None:
                blocks.append(parts[self.adapters[0].suffix].new_zeros(rows.stop - rows.start, total))
                continue
            blocks.append(F.pad(parts[adapter.suffix], (left, total - left - adapter.rank)))
            left += adapter.rank
        return _joined(blocks)

    def _row_blocks(self, layer: ParallelLinear) -> list[tuple[Adapter | None, slice]]:
        """Return the adapters with their rows of this rank's weight, in order; None for rows without one."""
        weight = layer.weight_shard
        if weight.dim != 0:  # its adapter is of the whole output
            return [(self.adapters[0], slice(0, weight.shape[0]))]
        pieces: list[tuple[Adapter | None, int, int]] = []
        done = 0
        for adapter in self.adapters:
            pieces += [(None, done, adapter.first), (adapter, adapter.first, adapter.stop)]
            done = adapter.stop
        pieces.append((None, done, len(weight.pieces)))
        blocks, row = [], 0
        for owner, first, stop in pieces:
            num_rows = sum(weight.pieces[first:stop]) // layer.ctx.tensor_size
            if num_rows:
                blocks.append((owner, slice(row, row + num_rows)))
            row += num_rows
        return blocks


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """Return the parts below each other; one part without a copy."""
    if len(parts) == 1:
        return parts[0]
    return torch.cat([*parts])


def _adapted_rows(weight: Shard, adapter: Adapter) -> Shard:
    """Return the rows of a weight that have this adapter, as a tensor of their own that is cut as the weight is."""
    if weight.dim != 0:
        return Shard(weight.shape, weight.dim, weight.pieces)
    pieces = weight.pieces[adapter.first : adapter.stop]
    return Shard((sum(pieces), weight.shape[1]), 0, pieces)


def magnitude_of(adapter: Adapter) -> str:
    return f"lora_magnitude_vector{adapter.suffix}"


@torch.no_grad()
def row_norms(weight: Tensor, down: Tensor, up: Tensor, ctx: ParallelContext, *, is_partial: bool) -> Tensor:
    """Return the norms of the rows of weight + up @ down, without that sum: float32 or wider [out].

    weight [out, in], down [R, in], up [out, R]; `is_partial`: `in` is cut over the tensor-parallel ranks.
    """
    # |w + u D|^2 = |w|^2 + (2 w D^T + u D D^T) u^T for the rows w and u: no product has more channels than the adapter
    wide = torch.promote_types(weight.dtype, torch.float32)
    own = own_norms(weight, wide).square()
    both = 2 * products.mm(weight, down.t()) + products.mm(up, products.mm(down, down.t()))
    squares = own + (both.to(wide) * up).sum(1)
    if is_partial and ctx.tensor_size > 1:
        squares = all_reduce(squares, ctx)
    return squares.clamp(min=0).sqrt()  # rounding may leave the square of a row of zeros below 0


def own_norms(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the norms of the rows of weight [out, in], [out]."""
    rows = max(1, len(weight))
    if weight.is_cpu:  # which converts all that one call is given
        rows = max(1, NORM_NUMBERS // weight.shape[1])
    return torch.cat([torch.linalg.vector_norm(block, dim=1, dtype=dtype) for block in weight.split(rows)])


def gain(magnitude: Tensor, norms: Tensor) -> Tensor:
    """Return magnitude / norm, both in the dtype of the magnitude, so that it starts at 1; 0 for a row of zeros."""
    norms = norms.to(magnitude.dtype)
    return magnitude / norms.masked_fill(norms == 0, 1)


def dropped(x: Tensor, probability: float, layer: Any, *, sharded: bool) -> Tensor:
    """Return x with the dropout of a layer's adapters, from their stream: `sharded`, this tensor-parallel rank's own.

    Where nothing is dropped it is x itself.
    """
    if probability == 0.0 or not layer.training:
        return x
    with layer.ctx.state.streams.adapters(sharded=sharded):
        return F.dropout(x, probability)


class Vocabulary(Protocol):
    """An embedding, or an output projection."""

    ctx: ParallelContext
    weight: nn.Parameter
    adapters: VocabularyAdapters | None
    logits_cap: float | None
    training: bool

    def get_parameter(self, target: str) -> nn.Parameter: ...


@dataclass(frozen=True)
class VocabularyAdapters:
    """Computation of the adapters of a weight that is an embedding, an output projection, or both."""

    embedding: Adapter | None
    output: Adapter | None
    dropout: float
    use_dora: bool

    @property
    def starts_from_base(self) -> bool:
        return self.use_dora or (self.output is not None and self.output.is_principal)

    def is_used(self, name: str, ctx: ParallelContext) -> bool:
        """Return whether this pipeline stage uses an adapter's parameter: a tied weight is on the first and last."""
        if name.startswith("lora_embedding"):
            return ctx.is_first_stage
        return ctx.is_last_stage

    def embed(self, layer: Vocabulary, rows_SB: Tensor, found: Tensor) -> Tensor:
        """Return the rows of the table that the base has `found`, [S, B, H], with the adapter's added."""
        if self.embedding is None or not layer.ctx.state.adapters.is_on:
            return found
        low = F.embedding(rows_SB, layer.get_parameter("lora_embedding_A").t())
        found = plus(found, low, layer.get_parameter("lora_embedding_B") * self.embedding.scale)
        if not self.use_dora:
            return found
        return found * gain(layer.get_parameter(EMBEDDING_MAGNITUDE), self._embedding_norms(layer))

    def project(self, layer: Vocabulary, hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return (hidden, weight) for the loss, [rows, B, H] with the adapter's R channels after those of `hidden`."""
        if self.output is None or not layer.ctx.state.adapters.is_on:
            return hidden, weight
        sharded = layer.ctx.sequence_parallel
        inputs = dropped(hidden, self.dropout, layer, sharded=sharded)
        down, up = self._factors(layer)
        started = []
        if self.output.is_principal:
            started.append(self._factors(layer, START))
        less = [(products.linear(hidden, start_down), -start_up) for start_down, start_up in started]
        if not self.use_dora:
            return with_adapter(hidden, weight, [(products.linear(inputs, down), up), *less])
        # a magnitude's gradient needs that of all logits: the scaled weight is made instead, and its gradient
        if not layer.ctx.sequence_parallel:  # of A each rank has the part of its rows; else A's role sums the parts
            down = copy_to_tensor_region(down, layer.ctx)
        base = weight
        for start_down, start_up in started:
            base = products.add_mm(weight, -start_up, start_down)
        norms = row_norms(base, down, up, layer.ctx, is_partial=False)
        scaled: Any = products.add_mm(base, up, down) * gain(layer.get_parameter(OUTPUT_MAGNITUDE), norms).unsqueeze(1)
        if inputs is not hidden:
            return with_adapter(hidden, weight, [(inputs, scaled - base), *less])
        scaled.shard = shard_of(weight)
        return hidden, scaled

    def start(self, layer: Vocabulary) -> dict[str, Tensor]:
        """Return DoRA's magnitudes, the norms at the start, and PiSSA's factors by local name, float32. Collective."""
        found: dict[str, Tensor] = {}
        ctx = layer.ctx
        if self.embedding is not None and self.use_dora and ctx.is_first_stage:
            found[EMBEDDING_MAGNITUDE] = self._embedding_norms(layer)
        if self.output is not None and ctx.is_last_stage:
            if self.use_dora:
                found[OUTPUT_MAGNITUDE] = row_norms(layer.weight, *self._factors(layer), ctx, is_partial=False)
            if self.output.is_principal:
                found |= start_of(layer, self.output, layer.weight, shard_of(layer.weight), ctx)
        return found

    def _factors(self, layer: Vocabulary, kind: str = "lora_") -> tuple[Tensor, Tensor]:
        """Return A [R, H] and B [V, R] of the output, scaled."""
        assert self.output is not None
        return layer.get_parameter(f"{kind}A"), layer.get_parameter(f"{kind}B") * self.output.scale

    def _embedding_norms(self, layer: Vocabulary) -> Tensor:
        """Return the norms of the channels over the vocabulary, as PEFT takes them, [H]."""
        assert self.embedding is not None
        down, up = layer.get_parameter("lora_embedding_A"), layer.get_parameter("lora_embedding_B")
        return row_norms(layer.weight.t(), down, up * self.embedding.scale, layer.ctx, is_partial=True)


def vocabulary_adapters(module: nn.Module, shards: Shards, ctx: ParallelContext) -> VocabularyAdapters | None:
    """Return the adapters declared for a module, and give it their parameters; None: it has none."""
    method: VocabularyAdapters | None = shards.method
    for name in shards:
        if method is not None and shards[name].added and method.is_used(name, ctx):
            module.register_parameter(name, shards.allocate(name, ctx))
    return method


def output_weight(layer: Any, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Return hidden [rows, B, H] and the weight [V, H] of an output layer, for the functions of losses.py."""
    weight = alias(layer.weight)
    if layer.adapters is not None:
        hidden, weight = layer.adapters.project(layer, hidden, weight)
    return hidden, capped(weight, layer.logits_cap)
