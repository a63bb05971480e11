"""Weights in nf4: the codes against float64 and bitsandbytes, every cut against the whole, and what loading holds."""

from __future__ import annotations

import math
from statistics import NormalDist
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.live_bytes import LiveBytes
from benchmarks.step_counts import AllOperators
from megatron.parallel.context import ParallelContext
from megatron.parallel.operators import nf4, products
from megatron.parallel.operators.nf4_layout import num_bytes
from megatron.parallel.shards import Shard
from tests.parallel import on_ranks
from tests.ranks import RankPools

FUSED = Shard((384, 192), dim=0, pieces=(256, 64, 64), std=0.02)
"""Whose pieces have 768 and 192 blocks: groups of 256 that are whole, and one that is not."""
ROW = Shard((96, 512), dim=1, pieces=(512,), std=0.02)
WHOLE = Shard((512, 256), dim=0, pieces=(256, 256), std=0.02)
"""Whose pieces are whole groups, also on each of two ranks."""
DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


def quantized(shard: Shard, full: Tensor, device: str = "cpu") -> nf4.QuantizedWeight:
    weight = nf4.QuantizedWeight("w", shard, ParallelContext.single()).to(device)
    flat = full.reshape(-1)
    weight.fill(lambda start, count: flat[start : start + count])
    weight.finish()
    return weight


def weights(shard: Shard) -> Tensor:
    """Normal weights with a block of zeros, an outlier, and rows of very different size."""
    full = shard.initial("w", 5, 0, 1) * torch.logspace(-3, 1, shard.shape[0]).unsqueeze(1)
    full[3, 64:128] = 0.0
    full[5, 7] = -40.0
    return full


# ---------------------------------------------------------------------------------------------------------------------
# A second implementation in float64, from the papers


def paper_values() -> np.ndarray:
    """Quantiles of the normal distribution, with zero and both ends exact: appendix E of the paper."""
    end, inverse = 0.9677083, NormalDist().inv_cdf
    positive = [inverse(p) for p in np.linspace(end, 0.5, 9)[:-1]]
    negative = [-inverse(p) for p in np.linspace(end, 0.5, 8)[:-1]]
    values = np.sort([*positive, 0.0, *negative])
    return values / np.abs(values).max()


def paper_scale_values() -> np.ndarray:
    """Signed numbers of 7 bits: leading zeros are the decimal exponent, what is left after a one a linear fraction."""
    found = [0.0, 1.0]
    for bits in range(7):
        fractions = 0.1 + 0.9 * (np.arange(2**bits) + 0.5) / 2**bits
        found += [sign * 10.0 ** (bits - 6) * fraction for fraction in fractions for sign in (1, -1)]
    return np.sort(found)


def nearest(numbers: np.ndarray, values: np.ndarray) -> np.ndarray:
    return np.abs(numbers[..., None] - values).argmin(-1)


def in_float64(tensor: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Codes [n], and dequantised numbers [n], of one tensor."""
    blocks = tensor.double().numpy().reshape(-1, 64)
    scales = np.abs(blocks).max(1)
    codes = nearest(blocks / np.maximum(scales, 1e-38)[:, None], paper_values())
    offset = scales.mean()
    groups = np.split(scales - offset, range(256, len(scales), 256))
    values = paper_scale_values()
    rounded = [values[nearest(group / np.abs(group).max(), values)] * np.abs(group).max() for group in groups]
    return codes.ravel(), (paper_values()[codes] * (np.concatenate(rounded) + offset)[:, None]).ravel()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shard", [FUSED, ROW, WHOLE], ids=["fused", "row", "whole"])
def test_codes_and_weights_equal_the_papers_in_float64(shard: Shard, device: str) -> None:
    full = weights(shard)
    weight = quantized(shard, full, device)
    packed = weight.packed.split(weight.sections)[3].cpu().numpy()
    codes = np.stack([packed >> 4, packed & 15], axis=1).reshape(shard.shape)
    dense = weight.dense(torch.float32).double().cpu().numpy()
    parts = np.split(np.arange(shard.shape[0]), np.cumsum(shard.pieces)[:-1]) if shard.dim == 0 else [slice(None)]
    for rows in parts:
        expected, numbers = in_float64(full[rows])
        assert np.array_equal(codes[rows].ravel(), expected)
        np.testing.assert_allclose(dense[rows].ravel(), numbers, rtol=0, atol=3e-7 * np.abs(numbers).max())


@pytest.mark.parametrize("device", DEVICES)
def test_dequantised_numbers_are_rounded_once(device: str) -> None:
    weight = quantized(FUSED, weights(FUSED), device)
    assert torch.equal(weight.dense(torch.bfloat16), weight.dense(torch.float32).bfloat16())


def test_scales_take_few_operators() -> None:
    """The host starts each of them; with 31 of them it took 0.35 ms, a GPU 0.03 ms for the weight."""
    weight = quantized(WHOLE, weights(WHOLE))
    with AllOperators() as operators:
        weight._block_scales()
    assert operators.number <= 16


@pytest.mark.parametrize(
    ("device", "fault", "said"),
    [
        ("cpu", None, "nf4: weights are dequantised by torch's operators"),
        ("cuda", None, "nf4: weights are dequantised by bitsandbytes"),
        ("cuda", "no library", "WARNING: nf4: weights are dequantised by torch's operators: no library"),
    ],
)
def test_what_dequantises_is_said(device: str, fault: str | None, said: str) -> None:
    with patch.object(nf4, "_bitsandbytes_fault", return_value=fault):
        assert nf4.dequantizer(torch.device(device)) == said


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("shard", [FUSED, ROW, WHOLE], ids=["fused", "row", "whole"])
def test_a_gpu_holds_what_a_cpu_holds(shard: Shard) -> None:
    """Bitwise; with bitsandbytes' kernel, where it is installed, and without."""
    on_cpu, on_gpu = (quantized(shard, weights(shard), device) for device in ("cpu", "cuda"))
    assert torch.equal(on_gpu.packed.cpu(), on_cpu.packed)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        dense = on_gpu.dense(dtype).cpu()
        with patch.object(nf4, "_bitsandbytes_kernel", return_value=None):
            plain = on_gpu.dense(dtype).cpu()
        assert torch.equal(dense, on_cpu.dense(dtype))
        assert torch.equal(plain, dense)


def test_codes_and_weights_equal_bitsandbytes() -> None:
    """Its CPU search of scales takes a neighbour now and then; of every other number the two agree bit for bit."""
    functional = pytest.importorskip("bitsandbytes.functional")
    full = weights(FUSED)
    weight = quantized(FUSED, full)
    _, _, scales, packed = (part.view(torch.uint8) for part in weight.packed.split(weight.sections))
    scales, packed, start = scales.view(384, 3), packed.view(384, 96), 0
    for rows in FUSED.pieces:
        own = slice(start, start + rows)
        theirs, state = functional.quantize_4bit(full[own], blocksize=64, quant_type="nf4", compress_statistics=True)
        assert torch.equal(theirs.view(rows, 96), packed[own])
        apart = (state.absmax.view(rows, 3).int() - scales[own].int()).abs()
        assert int(apart.max()) <= 1
        assert float((apart > 0).float().mean()) < 0.02
        state.absmax = scales[own].reshape(-1)
        for dtype in (torch.float32, torch.bfloat16):
            state.dtype = dtype
            dense = functional.dequantize_4bit(theirs, state)
            assert torch.equal(dense, weight.dense(dtype)[own])
        start += rows


# ---------------------------------------------------------------------------------------------------------------------
# Cuts


def dense_part(shard: Shard) -> tuple[np.ndarray, int]:
    """This rank's part of the weight, dequantised, and its bytes. The scales are filled by chunks of a few blocks."""
    ctx = on_ranks.context(2, sequence_parallel=False)
    weight = nf4.QuantizedWeight("w", shard, ctx)
    flat = shard.take(weights(shard), ctx.tensor_rank, ctx.tensor_size).view(-1)
    with patch.object(nf4, "QUANTIZED_AT_ONCE", 64 * 7):
        weight.fill(lambda start, count: flat[start : start + count])
    weight.finish()
    return weight.dense(torch.float32).numpy(), weight.packed.numel()


@pytest.mark.parametrize("shard", [FUSED, ROW, WHOLE], ids=["column", "row", "whole"])
def test_ranks_hold_exactly_the_parts_of_the_whole(ranks: RankPools, shard: Shard) -> None:
    parts = ranks(2)(dense_part, shard)
    whole = quantized(shard, weights(shard)).dense(torch.float32)
    assert torch.equal(shard.assemble([torch.from_numpy(part) for part, _ in parts]), whole)
    assert {size for _, size in parts} == {num_bytes(shard, 2)}


def test_a_large_weight_takes_at_most_0_52_bytes_a_number() -> None:
    shard = Shard((22016, 4096), dim=0, pieces=(11008, 11008))
    assert num_bytes(shard, 1) / math.prod(shard.shape) < 0.516
    assert num_bytes(shard, 8) / (math.prod(shard.shape) / 8) < 0.518


def test_filling_holds_a_chunk_at_a_time() -> None:
    shard = Shard((512, 1024), dim=0, pieces=(512,))
    weight = nf4.QuantizedWeight("w", shard, ParallelContext.single())
    chunk = 2**14
    with patch.object(nf4, "QUANTIZED_AT_ONCE", chunk), LiveBytes() as live:
        weight.fill(lambda start, count: torch.full((count,), 0.5))
        filled = live.peak
        weight.finish()
    scales = 4 * 512 * 1024 // 64
    assert filled < scales + 32 * chunk < 2 * 512 * 1024
    assert live.peak < 2 * 512 * 1024, "less than the weight in 16 bits"


# ---------------------------------------------------------------------------------------------------------------------
# The product


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_product_is_that_of_the_dequantised_weight_and_keeps_nothing(dtype: torch.dtype, device: str) -> None:
    weight = quantized(ROW, weights(ROW), device)
    inputs = torch.randn(5, 2, 512, dtype=dtype, device=device)
    x, y = inputs.clone().requires_grad_(), inputs.clone().requires_grad_()
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, keep):
        output = weight.product(x)
    assert kept == []
    expected = products.linear(y, weight.dense(dtype))
    assert torch.equal(output, expected)
    gradient = torch.randn_like(output)
    output.backward(gradient)
    expected.backward(gradient)
    assert torch.equal(x.grad, y.grad)  # type: ignore[arg-type]
