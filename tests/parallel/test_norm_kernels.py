"""RMSNorm by Triton, alone and with the addition before it, against float64. Its interpreter runs without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from megatron.parallel.operators import fused
from megatron.parallel.operators.fused import EAGER, PLAIN, Kernels, compiled
from megatron.runtime import device_cuda
from tests.parallel.test_softmax import triton_fault

EPSILON = 1e-2
# relative errors: a few roundings of the result; Triton's interpreter truncates to bfloat16, where a GPU rounds
TOLERANCES = {torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 1e-3}
# rows and widths: tiles of many rows, of one, and more tiles than programs of the backward pass
INTERPRETED = [(1, 24), (300, 24), (9, 5000)]
ON_CUDA = [(rows, width) for rows in (1, 7, 8192) for width in (24, 2048, 5000, 8192)]


def random(*shape: int, seed: int, device: str) -> Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64, device=device)


def drawn(rows: int, width: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    """x, branch and weight, and the gradients of the stream and of its norm; x with numbers near 10,000 and zeros."""
    x, branch, of_stream, of_normed = (random(rows, width, seed=seed, device=device) for seed in range(4))
    x[-1] *= 1e4 / x[-1].abs().amax()
    if rows > 1:
        x[0], branch[0] = 0.0, 0.0
    weight = random(width, seed=5, device=device)
    return [each.to(dtype) for each in (x, branch, weight, of_stream, of_normed)]


def add_norm(form: Kernels, x: Tensor, branch: Tensor | None, weight: Tensor) -> tuple[Tensor, Tensor]:
    return form.add_norm(x, branch, weight, EPSILON)


def exactly(stream: Tensor, weight: Tensor) -> Tensor:
    return stream / (stream.square().mean(-1, keepdim=True) + EPSILON).sqrt() * weight


def gradients(outputs: tuple[Tensor, ...], inputs: list[Tensor], grads: list[Tensor]) -> list[Tensor]:
    return list(torch.autograd.grad(outputs, inputs, grads))


def leaves(*inputs: Tensor) -> list[Tensor]:
    return [x.detach().clone().requires_grad_() for x in inputs]


def check(found: list[Tensor], expected: list[Tensor]) -> None:
    for number, (ours, exact) in enumerate(zip(found, expected, strict=True)):
        error = float((ours.detach().double() - exact.detach()).norm() / exact.detach().norm())
        assert error < TOLERANCES[ours.dtype], f"result {number} of {list(ours.shape)}, {ours.dtype}: {error:.1e}"


def compare(form: Kernels, rows: int, width: int, dtype: torch.dtype, device: str) -> None:
    """Raise AssertionError if a norm, a sum or a gradient is not that of float64."""
    x, branch, weight, of_stream, of_normed = drawn(rows, width, dtype, device)
    exact = [each.double() for each in (x, branch, weight, of_stream, of_normed)]

    # alone, and of rows that do not lie side by side in memory
    expected_in, given = leaves(exact[0], exact[2]), leaves(x.t().contiguous(), weight)
    expected_out, normed = exactly(*expected_in), form.rms_norm(given[0].t(), given[1], EPSILON)
    expected = gradients((expected_out,), expected_in, [exact[4]])
    found = gradients((normed,), given, [of_normed.t().contiguous().t()])
    check([normed, found[0].t(), found[1]], [expected_out, *expected])

    # with the addition before it, of what is rounded there as everywhere
    given = leaves(x, branch, weight)
    stream, normed = add_norm(form, *given)
    assert torch.equal(stream, x + branch) or device == "cpu"
    check([stream], [exact[0] + exact[1]])
    rounded, expected_weight = leaves(stream.double(), exact[2])
    expected_out = exactly(rounded, expected_weight)
    of_stream_, of_weight = gradients((expected_out,), [rounded, expected_weight], [exact[4]])
    found = gradients((stream, normed), given, [of_stream, of_normed])
    check([normed, *found], [expected_out, *[of_stream_ + exact[3]] * 2, of_weight])


def compare_with_apart(form: Kernels, rows: int, width: int, dtype: torch.dtype, device: str) -> None:
    """Raise AssertionError if one operator and two, whose gradients autograd adds, differ by a bit of 16 bits.

    In float32 the compiler may join the last multiplication with the addition of the stream's gradient.
    """
    nearness = 1e-6 if dtype == torch.float32 else 0.0
    x, branch, weight, of_stream, of_normed = drawn(rows, width, dtype, device)
    for with_branch in (True, False):
        results = []
        for is_fused in (True, False):
            given = leaves(x, branch, weight) if with_branch else leaves(x, weight)
            if is_fused:
                stream, normed = form.add_norm(given[0], given[1] if with_branch else None, given[-1], EPSILON)
            else:
                stream = given[0] + given[1] if with_branch else given[0] * 1
                normed = form.rms_norm(stream, given[-1], EPSILON)
            results.append([stream, normed, *gradients((stream, normed), given, [of_stream, of_normed])])
        same = [torch.allclose(one, two, rtol=nearness, atol=nearness) for one, two in zip(*results, strict=True)]
        assert all(same), f"{same} of {rows} rows of {width} {dtype} numbers, {with_branch=}"


def check_edges(form: Kernels, device: str) -> None:
    x, branch, weight, of_stream, of_normed = drawn(5, 40, torch.float32, device)
    # a frozen weight, and a stream whose gradient alone comes back
    given = leaves(x, branch)
    stream, normed = add_norm(form, given[0], given[1], weight)
    check(gradients((normed,), given, [of_normed])[:1], [gradient_of_double(x + branch, weight, of_normed)])
    stream, _ = add_norm(form, given[0], given[1], weight)
    assert all(torch.equal(grad, of_stream) for grad in gradients((stream,), given, [of_stream]))
    # float64, and rows that no program holds, are torch's
    wide = torch.ones(1, fused.MAX_NORM_WIDTH + 1, device=device)
    for exact in (x.double(), wide):
        own = torch.ones(exact.shape[-1], dtype=exact.dtype, device=device)
        assert torch.equal(form.rms_norm(exact, own, EPSILON), PLAIN.rms_norm(exact, own, EPSILON))
    # without rows
    none, of_none = leaves(x[:0], weight)
    found = gradients((form.rms_norm(none, of_none, EPSILON),), [none, of_none], [x[:0]])
    assert found[0].shape == x[:0].shape
    assert torch.equal(found[1], torch.zeros_like(weight))


def gradient_of_double(x: Tensor, weight: Tensor, grad: Tensor) -> Tensor:
    (leaf,) = leaves(x.double())
    return gradients((exactly(leaf, weight.double()),), [leaf], [grad.double()])[0]


def check_kept(form: Kernels, device: str) -> None:
    """Raise AssertionError if more is kept for the backward pass than the stream, the weight and a number a row."""
    x, branch, weight, *_ = drawn(5, 40, torch.bfloat16, device)
    kept: list[int] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor.nbytes)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        leaf, own = leaves(x, weight)
        form.rms_norm(leaf, own, EPSILON)
        add_norm(form, *leaves(x, branch, weight))
    assert sorted(kept) == sorted(2 * [x.nbytes, weight.nbytes, 5 * 4])


def check_all(sizes: list[tuple[int, int]], device: str) -> None:
    form = compiled("inductor", device_cuda.CUDA)
    for dtype in TOLERANCES:
        for rows, width in sizes:
            compare(form, rows, width, dtype, device)
            if device == "cuda" or dtype != torch.bfloat16:  # where the interpreter truncates, torch rounds
                compare_with_apart(form, rows, width, dtype, device)
    check_edges(form, device)
    check_kept(form, device)


@pytest.mark.skipif(triton_fault() != "", reason=triton_fault())
def test_triton_equals_float64() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1"}  # read when Triton is imported
    subprocess.run([sys.executable, "-m", "tests.parallel.test_norm_kernels"], env=environment, check=True)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_cuda_equals_float64() -> None:
    check_all(ON_CUDA, "cuda")


@pytest.mark.parametrize("form", [PLAIN, EAGER], ids=lambda form: form.form)
def test_two_operators_equal_float64(form: Kernels) -> None:
    for dtype in TOLERANCES:
        compare(form, 7, 24, dtype, "cpu")


if __name__ == "__main__":
    check_all(INTERPRETED, "cpu")
