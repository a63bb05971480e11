"""Weights of linear layers held in 4 bits: the nf4 format of QLoRA, and the product with such a weight.

Source: Dettmers et al. 2023 (arXiv:2305.14314). 4-bit codes equal those of bitsandbytes 0.50 for the same tensor, and
dequantised weights too where it takes the nearest code of a scale.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megatron.parallel.mappings import of_all_ranks
from megatron.parallel.operators import products
from megatron.parallel.operators.nf4_layout import BLOCK, DEQUANTIZED_AT_ONCE, GROUP, groups_of_units, sections, units
from megatron.parallel.shards import Shard
from megatron.runtime.devices import device_of

if TYPE_CHECKING:
    from megatron.parallel.context import ParallelContext

NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""Value of each 4-bit code: quantiles of the normal distribution (appendix E of the paper)."""
QUANTIZED_AT_ONCE = 2**22
"""Numbers that are read and quantised at once, which bounds the temporary memory."""


@functools.cache
def _values(device: torch.device) -> Tensor:
    """float32 [16]."""
    return torch.tensor(NF4, dtype=torch.float32, device=device)


@functools.cache
def _pairs(device: torch.device) -> Tensor:
    """The two values in each byte, the first in its high bits: float32 [256, 2]."""
    values = _values(torch.device("cpu"))
    return torch.stack([values.repeat_interleave(16), values.repeat(16)], dim=1).to(device)


@functools.cache
def _scale_values(device: torch.device) -> Tensor:
    """Value of each 8-bit code of a scale, float32 [256], ascending.

    Source: "dynamic tree quantization", Dettmers 2015 (arXiv:1511.04561): the more leading zeros, the smaller the
    exponent and the fewer bits of the fraction.
    """
    found = [torch.tensor([0.0, 1.0], dtype=torch.float32)]
    for exponent in range(7):
        ends = torch.linspace(0.1, 1, 2**exponent + 1, dtype=torch.float32)
        middles = 10.0 ** (exponent - 6) * ((ends[:-1] + ends[1:]) / 2)
        found += [middles, -middles]
    return torch.cat(found).sort().values.to(device)


def _nearest(numbers: Tensor, size: int, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the uint8 codes of `numbers` [n], relative to the largest magnitude of each `size`, and that: float32."""
    blocks = numbers.view(-1, size)
    largest = blocks.abs().amax(dim=1)
    # times the inverse, as bitsandbytes rounds
    relative = (blocks * largest.clamp(min=1e-38).reciprocal().unsqueeze(1)).clamp_(-1.0, 1.0)
    codes = torch.bucketize(relative, (values[:-1] + values[1:]) / 2, out_int32=True)
    return codes.to(torch.uint8).view(-1), largest


def quantize(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Return the packed codes, uint8 [n / 2], and the blocks' scales, float32 [n / 64], of float32 numbers [n]."""
    codes, scales = _nearest(numbers, BLOCK, _values(numbers.device))
    return (codes[::2] << 4) | codes[1::2], scales


def dequantize(packed: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the numbers [n] of `quantize`, computed in float32 and rounded once to `dtype`."""
    if packed.is_cuda and (kernel := _bitsandbytes_kernel()) is not None:
        found: Tensor = kernel(packed, scales, BLOCK, "nf4", [2 * packed.numel()], dtype)
        return found
    return dequantize_plainly(packed, scales, dtype)


def dequantize_plainly(packed: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """`dequantize` by torch's operators, on any device."""
    table, step = _pairs(packed.device), QUANTIZED_AT_ONCE // 2
    if packed.is_cpu:
        # one 8-byte number is moved faster than a row of two; not every device has float64
        table, step = table.view(torch.float64).view(-1), DEQUANTIZED_AT_ONCE // 2
    result = torch.empty(2 * packed.numel() // BLOCK, BLOCK, dtype=dtype, device=packed.device)
    for begin in range(0, packed.numel(), step):
        part = packed[begin : begin + step]
        numbers = torch.index_select(table, 0, part.int()).view(torch.float32).view(-1, BLOCK)
        blocks = slice(2 * begin // BLOCK, 2 * (begin + step) // BLOCK)
        torch.mul(numbers, scales[blocks].unsqueeze(1), out=result[blocks])
        del numbers  # before the next part's
    return result.view(-1)


def dequantizer(device: torch.device) -> str:
    """Return the line that says what dequantises weights on a device; a WARNING where bitsandbytes could, but fails."""
    said = "nf4: weights are dequantised by"
    if not device_of(device.type).has_bitsandbytes:
        return f"{said} torch's operators"
    fault = _bitsandbytes_fault()
    if fault is not None:
        return f"WARNING: {said} torch's operators: {fault}"
    return f"{said} bitsandbytes"


@functools.cache
def _bitsandbytes_fault() -> str | None:
    """Import bitsandbytes, which registers its operators; return why it is not usable, or None."""
    try:
        import bitsandbytes  # noqa: F401
    except Exception as error:  # its native library fails in many ways
        return f"bitsandbytes is not usable ({error})"
    return None


@functools.cache
def _bitsandbytes_kernel() -> Callable[..., Tensor] | None:
    """Return bitsandbytes' operator, which gives the same numbers, or None."""
    if _bitsandbytes_fault() is not None:
        return None
    return torch.ops.bitsandbytes.dequantize_4bit.default  # type: ignore[no-any-return]


def quantize_scales(scales: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the 8-bit codes [m], the groups' float32 scales [m / 256, rounded up], and the float32 offset of `scales`.

    `scales`: float32 [m], those of a whole tensor, on the CPU.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the rounding of a mean depends on the number of threads
    try:
        offset = scales.mean()
    finally:
        torch.set_num_threads(threads)
    padded = F.pad(scales - offset, (0, -scales.numel() % GROUP))
    codes, largest = _nearest(padded, GROUP, _scale_values(scales.device))
    return codes[: scales.numel()], largest, offset


class QuantizedWeight(nn.Module):
    """This rank's shard of a linear layer's weight in nf4, [out, in] or its part. Never trained.

    `nf4_layout.sections` lie one after the other in one buffer. `fill`, then `finish` give it its values.
    """

    packed: Tensor

    def __init__(self, full_name: str, shard: Shard, ctx: ParallelContext) -> None:
        super().__init__()
        self.full_name, self.shard, self.ctx = full_name, shard, ctx
        self.sections = sections(shard, ctx.tensor_size)
        self._units = list(self._units_here())
        # a buffer rather than parameters: nothing that handles parameters (optimizers, casts to 16 bits, ZeRO's cuts)
        # then sees it
        self.register_buffer("packed", torch.empty(sum(self.sections), dtype=torch.uint8))
        self._scales: Tensor | None = None
        """Between `fill` and `finish`: the blocks' scales, float32 [rows, blocks of a row]."""

    @property
    def shape(self) -> tuple[int, int]:
        """Rows (output channels) and columns (input channels) of this rank."""
        rows, columns = self.shard.local_shape(self.ctx.tensor_size)
        return rows, columns

    def initialise(self, seed: int) -> None:
        """Draw the weight as a dense one starts (`Shard.initial`), and quantise it. Collective, as `finish`."""
        start = self.shard.initial(self.full_name, seed, self._tensor_rank, self.ctx.tensor_size).view(-1)
        self.fill(lambda begin, count: start[begin : begin + count])
        self.finish()

    def fill(self, read: Callable[[int, int], Tensor]) -> None:
        """Quantise this rank's numbers. `read(start, n)` returns n of the flattened local weight, float32."""
        rows, columns = self.shape
        numel, device = rows * columns, self.packed.device
        codes = self.packed.split(self.sections)[3]
        scales = torch.empty(numel // BLOCK, dtype=torch.float32, device=device)
        # a part at a time: the weight in float32 takes eight times the memory of its codes
        for begin in range(0, numel, QUANTIZED_AT_ONCE):
            count = min(QUANTIZED_AT_ONCE, numel - begin)
            part, of_blocks = quantize(read(begin, count).to(device))
            codes[begin // 2 : (begin + count) // 2] = part
            scales[begin // BLOCK : (begin + count) // BLOCK] = of_blocks
        self._scales = scales.view(rows, columns // BLOCK)

    # Ranks quantise the blocks of their own shard, but the scales of the whole tensor together: so the quantised model
    # does not depend on the layout.
    def finish(self) -> None:
        """Quantise the blocks' scales after `fill`. Collective over the tensor-parallel ranks."""
        if self._scales is None:
            return
        shard, size = self._scale_shard(), self.ctx.tensor_size
        local = [self._scales]
        if shard.dim is not None and size > 1:
            local = of_all_ranks(self._scales, self.ctx.tensor_group)
        full = shard.assemble([scales.cpu() for scales in local])
        found = [quantize_scales(full[start:stop].reshape(-1)) for start, stop in units(self.shard)]
        codes = torch.cat([codes for codes, _, _ in found]).view(shard.shape)
        own = shard.take(codes, self._tensor_rank, size)
        numbers = torch.cat([*(groups for _, groups, _ in found), torch.stack([offset for _, _, offset in found])])
        into, offsets, of_blocks, _ = self.packed.split(self.sections)
        into.copy_(numbers[: -len(found)].view(torch.uint8))
        offsets.copy_(numbers[-len(found) :].view(torch.uint8))
        of_blocks.copy_(own.view(-1))
        self._scales = None

    def dense(self, dtype: torch.dtype) -> Tensor:
        """Return this rank's weight, [out, in] or its part, dequantised."""
        assert self._scales is None, f"{self.full_name} was filled, but not finished"
        codes = self.packed.split(self.sections)[3]
        return dequantize(codes, self._block_scales(), dtype).view(self.shape)

    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return x [..., in] times this rank's weight plus the bias, [..., out], in the dtype of x.

        Keeps nothing for the backward pass, which dequantises the weight again.
        """
        return _Product.apply(x, bias, self)  # type: ignore[no-any-return]

    @property
    def _tensor_rank(self) -> int:
        if self.shard.dim is None:
            return 0
        return self.ctx.tensor_rank

    def _scale_shard(self) -> Shard:
        """Describe the blocks' scales as the weight is: float32 [rows, columns / 64]."""
        (rows, columns), pieces = self.shard.shape, self.shard.pieces
        if self.shard.dim == 1:
            pieces = tuple(n // BLOCK for n in pieces)
        return Shard((rows, columns // BLOCK), self.shard.dim, pieces)

    # In few operators: on an H100 the host needed 348 us to start 31 of them for a weight of 25 million numbers, which
    # the kernel dequantises in 34.
    def _block_scales(self) -> Tensor:
        """Return this rank's scales, float32 [blocks], from their codes."""
        groups, offsets, codes, _ = self.packed.split(self.sections)
        of_groups, of_units = groups.view(torch.float32), offsets.view(torch.float32).unbind()
        scales = torch.index_select(_scale_values(codes.device), 0, codes.int())
        parts = scales.split([unit.numel for unit in self._units])
        # every group is full, and this rank has them all
        if scales.numel() == of_groups.numel() * GROUP:
            scales.view(-1, GROUP).mul_(of_groups.unsqueeze(1))
        else:
            for unit, part in zip(self._units, parts, strict=True):
                unit.multiply_(part, of_groups)
        for part, offset in zip(parts, of_units, strict=True):
            part += offset
        return scales

    def _units_here(self) -> Iterator[_Unit]:
        """Yield this rank's blocks of each tensor whose scales are quantised together, in the order in memory."""
        shard, rank, size = self._scale_shard(), self._tensor_rank, self.ctx.tensor_size
        whole = held = units(self.shard)
        stride = shard.shape[1]
        left, right = 0, stride
        if shard.dim == 0:
            held = shard.spans(rank, size)
        elif shard.dim == 1:
            ((left, right),) = shard.spans(rank, size)
        firsts = itertools.accumulate(groups_of_units(self.shard), initial=0)
        for (start, _), (begin, end), first in zip(whole, held, firsts, strict=False):
            yield _Unit(first, (begin - start) * stride + left, end - begin, right - left, stride)


class _Unit(NamedTuple):
    """A rank's blocks of one tensor whose scales are quantised together: `rows` stretches of `blocks`."""

    first_group: int
    """Index of the tensor's first group."""
    first: int
    """Number of the first block in the tensor, row by row."""
    rows: int
    blocks: int
    stride: int
    """Blocks of a whole row."""

    @property
    def numel(self) -> int:
        return self.rows * self.blocks

    def multiply_(self, scales: Tensor, of_groups: Tensor) -> None:
        """Multiply the scales [numel] by those of their groups, in place."""
        if self.blocks == self.stride and self.first % GROUP == self.numel % GROUP == 0:  # whole groups side by side
            begin = self.first_group + self.first // GROUP
            scales.view(-1, GROUP).mul_(of_groups[begin : begin + self.numel // GROUP].unsqueeze(1))
            return
        options: Any = {"dtype": torch.int32, "device": scales.device}
        rows = torch.arange(self.first, self.first + self.rows * self.stride, self.stride, **options)
        groups = (rows.unsqueeze(1) + torch.arange(self.blocks, **options)).div_(GROUP, rounding_mode="floor")
        scales *= torch.index_select(of_groups[self.first_group :], 0, groups.view(-1))


class _Product(torch.autograd.Function):
    """x @ W^T + b; forward and backward dequantise W for themselves, and keep neither W nor x."""

    @staticmethod
    def forward(function: Any, x: Tensor, bias: Tensor | None, weight: QuantizedWeight) -> Tensor:
        function.weight = weight
        return products.linear(x, weight.dense(x.dtype), bias)

    @staticmethod
    @once_differentiable
    def backward(function: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        needs_x, needs_bias, _ = function.needs_input_grad
        grad_x = grad_bias = None
        if needs_x:
            grad_x = products.mm(grad, function.weight.dense(grad.dtype))
        if needs_bias:
            grad_bias = grad.flatten(0, -2).sum(0)
        return grad_x, grad_bias, None


def quantized_weights(module: nn.Module) -> Iterator[tuple[str, QuantizedWeight]]:
    """Yield (full name, weight) of every quantised weight, in the order of the module."""
    return ((each.full_name, each) for each in module.modules() if isinstance(each, QuantizedWeight))
