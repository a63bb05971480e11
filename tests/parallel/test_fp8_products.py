"""Products in fp8 against an oracle in numpy: rounding, scales, values and gradients; and torch's call for CUDA."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron.options.training import Fp8Config
from megatron.parallel.context import ParallelContext
from megatron.parallel.linear import ColumnParallelLinear, ParallelLinear
from megatron.parallel.operators import fp8_products
from megatron.parallel.operators.fp8_linear import ScaledMethod
from megatron.parallel.operators.fp8_products import E4M3, E5M2, Operand, by_row, by_tensor, largest_of, product
from megatron.parallel.shards import LayerDeclaration, Shard, Shards

Array = np.ndarray[Any, Any]
TOKENS, INPUTS, OUTPUTS = 21, 64, 32
"""Tokens, whose number is no multiple of 16."""
RECIPES = [("tensorwise", "hybrid"), ("tensorwise", "e4m3"), ("rowwise", "e4m3")]


class Form(NamedTuple):
    """A format of fp8 by its definition: bits behind the point, exponent of the least normal number, largest."""

    bits: int
    least_exponent: int
    largest: float


FORMS = {"e4m3": Form(3, -6, 448.0), "e5m2": Form(2, -14, 57344.0)}


def rounded(x: Array, form: Form) -> Array:
    """The nearest numbers of a format, to even."""
    exponents = np.maximum(np.frexp(x)[1] - 1, form.least_exponent)
    steps = np.ldexp(1.0, exponents - form.bits)
    return np.clip(np.rint(x / steps) * steps, -form.largest, form.largest)


def in_fp8(x: Array, form: Form, *, by_row: bool) -> Array:
    """x [rows, k] as fp8 holds it, float64."""
    largest = np.abs(x).max(-1, keepdims=True) if by_row else np.abs(x).max()
    factors = np.float32(form.largest) / largest.astype(np.float32)
    if by_row:
        factors = np.exp2(np.floor(np.log2(factors))).astype(np.float32)
    return rounded((x.astype(np.float32) * factors).astype(np.float64), form) / factors.astype(np.float64)


def layer_of(
    recipe: str, fp8_format: str, *, dtype: torch.dtype = torch.float32, quantized: bool = False, **options: Any
) -> ParallelLinear:
    given: dict[str, Any] = {"fp8_format": fp8_format, **options}
    method = ScaledMethod(Fp8Config(**given), recipe)
    weight = Shard((OUTPUTS, INPUTS), dim=0, pieces=(OUTPUTS,), std=1.0, quantized=quantized)
    declared = LayerDeclaration("test", {"weight": weight}, build=torch.nn.Module).with_base_method("", method)
    ctx = ParallelContext.single()
    ctx.state.fp8.is_on = True
    return ColumnParallelLinear(Shards(declared), ctx).to(dtype)


def numbers(seed: int, *shape: int) -> Array:
    """Numbers whose rows are of very different sizes, as activations are; exact in bfloat16."""
    generator = np.random.default_rng(seed)
    wide = generator.standard_normal(shape) * np.exp(generator.standard_normal((*shape[:-1], 1)))
    return torch.from_numpy(wide).bfloat16().double().numpy()


def computed(layer: ParallelLinear, x: Array, weight: Array, slope: Array) -> list[Array]:
    """Output, and the gradients of <output, slope> by input and weight."""
    dtype = layer.weight.dtype
    with torch.no_grad():
        layer.weight.copy_(torch.from_numpy(weight))
    layer.weight.grad = None
    device = layer.weight.device
    hidden = torch.from_numpy(x).to(device, dtype).unsqueeze(1).requires_grad_()
    output = layer(hidden)
    output.backward(torch.from_numpy(slope).to(device, dtype).unsqueeze(1))
    assert hidden.grad is not None
    assert layer.weight.grad is not None
    return [each.detach().double().cpu().numpy() for each in (output[:, 0], hidden.grad[:, 0], layer.weight.grad)]


def expected(recipe: str, fp8_format: str, x: Array, weight: Array, slope: Array) -> list[Array]:
    ahead, back = FORMS["e4m3"], FORMS["e5m2" if fp8_format == "hybrid" else "e4m3"]
    by_row = recipe == "rowwise"
    pairs = [((x, ahead), (weight, ahead)), ((slope, back), (weight.T, ahead)), ((slope.T, back), (x.T, ahead))]
    return [in_fp8(*a, by_row=by_row) @ in_fp8(*b, by_row=by_row).T for a, b in pairs]


X, WEIGHT, SLOPE = numbers(0, TOKENS, INPUTS), numbers(1, OUTPUTS, INPUTS), numbers(2, TOKENS, OUTPUTS)


@pytest.mark.parametrize(("recipe", "fp8_format"), RECIPES)
@pytest.mark.parametrize("emulates", [True, False])
def test_values_and_gradients_are_those_of_the_rounded_operands(recipe: str, fp8_format: str, emulates: bool) -> None:
    # in float32 both differ from the oracle by the order of sums; in bfloat16 by its half unit
    for dtype, bound in ((torch.float32, 0.0), (torch.bfloat16, 2**-8)):
        layer = layer_of(recipe, fp8_format, dtype=dtype, fp8_emulate=emulates)
        oracle = expected(recipe, fp8_format, X, WEIGHT, SLOPE)
        for found, exact in zip(computed(layer, X, WEIGHT, SLOPE), oracle, strict=True):
            np.testing.assert_allclose(found, exact, rtol=bound, atol=1e-6 * np.abs(exact).max())
    plain = X @ WEIGHT.T
    assert 0.005 < np.abs(oracle[0] - plain).max() / np.abs(plain).max() < 0.06  # rounded, and to what fits


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize(("recipe", "fp8_format"), RECIPES)
def test_cuda_computes_what_is_emulated(recipe: str, fp8_format: str) -> None:
    given = [computed(layer_of(recipe, fp8_format, dtype=torch.bfloat16).cuda(), X, WEIGHT, SLOPE)]
    given.append(computed(layer_of(recipe, fp8_format, dtype=torch.bfloat16, fp8_emulate=True), X, WEIGHT, SLOPE))
    for found, emulated in zip(*given, strict=True):
        # Hopper's tensor cores keep 14 bits of a sum where it may be fast (DeepSeek-V3, section 3.5.2)
        np.testing.assert_allclose(found, emulated, rtol=2**-7, atol=2e-3 * np.abs(emulated).max())


def test_formats_and_scales_are_not_interchangeable() -> None:
    """What would pass if a recipe took the scales or the formats of another one."""
    found = [expected(*recipe, X, WEIGHT, SLOPE) for recipe in RECIPES]
    assert np.abs(found[0][1] - found[1][1]).max() > 1e-2
    for index in range(3):
        assert np.abs(found[1][index] - found[2][index]).max() > 1e-2


def test_gradients_of_weights_may_stay_in_16_bits() -> None:
    layer = layer_of("tensorwise", "hybrid", fp8_emulate=True, fp8_wgrad=False)
    _, grad_x, grad_weight = computed(layer, X, WEIGHT, SLOPE)
    np.testing.assert_allclose(grad_weight, SLOPE.T @ X, rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(grad_x, expected("tensorwise", "hybrid", X, WEIGHT, SLOPE)[1], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(("forward", "backward"), [(True, True), (True, False), (False, True), (False, False)])
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_a_kept_weight_is_that_of_its_step(recipe: str, forward: bool, backward: bool) -> None:
    fp8_format = "e4m3"
    kept: dict[str, Any] = {"cache_fp8_weight_fwd": forward, "cache_fp8_weight": backward}
    layer = layer_of(recipe, fp8_format, fp8_emulate=True, **kept)
    passes = layer.ctx.state.fp8
    for number in range(3):
        passes.begin_step()
        for microbatch in range(2):
            weight, x = numbers(10 + number, OUTPUTS, INPUTS), numbers(20 + microbatch, TOKENS, INPUTS)
            oracle = expected(recipe, fp8_format, x, weight, SLOPE)
            for found, exact in zip(computed(layer, x, weight, SLOPE), oracle, strict=True):
                np.testing.assert_allclose(found, exact, rtol=1e-5, atol=1e-6 * np.abs(exact).max())
    # within a step the weight is not converted again, if it is to be kept
    changed = computed(layer, x, numbers(30, OUTPUTS, INPUTS), SLOPE)[0]
    assert np.allclose(changed, oracle[0], rtol=1e-5, atol=1e-5) == forward


def test_evaluation_is_in_16_bits() -> None:
    layer = layer_of("tensorwise", "hybrid", fp8_emulate=True)
    layer.ctx.state.fp8.is_on = False
    np.testing.assert_allclose(computed(layer, X, WEIGHT, SLOPE)[0], X @ WEIGHT.T, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("wrong", [float("inf"), float("nan")])
def test_what_is_not_finite_stays_visible(recipe: str, wrong: float) -> None:
    """fp8 has its largest number for what is beyond it, which must not hide an overflow."""
    x = X.copy()
    x[3, 5] = wrong
    output, _, grad_weight = computed(layer_of(recipe, "e4m3", fp8_emulate=True), x, WEIGHT, SLOPE)
    assert np.isnan(output[3]).all()
    assert np.isnan(grad_weight[:, 5]).all()


def test_zeros_stay_zeros() -> None:
    for recipe in ("tensorwise", "rowwise"):
        for each in computed(layer_of(recipe, "e4m3"), np.zeros_like(X), WEIGHT, np.zeros_like(SLOPE)):
            assert (each == 0).all()


def test_an_expert_without_tokens_has_gradients_of_zero() -> None:
    layer = layer_of("tensorwise", "e4m3")
    tokens = torch.empty(0, INPUTS, requires_grad=True)
    output = layer.method.product(layer, tokens)
    assert output.shape == (0, OUTPUTS)
    output.sum().backward()
    assert layer.weight.grad is not None
    assert (layer.weight.grad == 0).all()


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_a_weight_in_4_bits_is_rounded_to_fp8_from_what_it_stands_for(recipe: str) -> None:
    layer = layer_of(recipe, "e4m3", fp8_emulate=True, quantized=True)
    layer.quantized.initialise(seed=1)
    dense = layer.dense_weight(torch.float32).double().numpy()
    x = torch.from_numpy(X).float().requires_grad_()
    output = layer.method.product(layer, x)
    output.backward(torch.from_numpy(SLOPE).float())
    assert x.grad is not None
    oracle = expected(recipe, "e4m3", X, dense, SLOPE)
    for found, exact in zip((output.detach(), x.grad), oracle[:2], strict=True):
        np.testing.assert_allclose(found.numpy(), exact, rtol=1e-5, atol=1e-6 * np.abs(exact).max())


# ---------------------------------------------------------------------------------------------------------------------
# The call for CUDA, by torch's own rules for its operands


@pytest.mark.parametrize(("recipe", "fp8_format"), RECIPES)
def test_cuda_accepts_each_call(recipe: str, fp8_format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # the steps of the autograd function, which itself would need a device, as would the kernels
    monkeypatch.setattr(fp8_products, "compiled_kernels", lambda: None)
    layer = layer_of(recipe, fp8_format)
    with FakeTensorMode(), torch.no_grad():
        layer.weight = torch.nn.Parameter(torch.empty(OUTPUTS, INPUTS, dtype=torch.bfloat16, device="cuda"))
        method: Any = layer.base
        x, grad = (torch.empty(TOKENS, size, dtype=torch.bfloat16, device="cuda") for size in (INPUTS, OUTPUTS))
        output, largest = method.output(layer, x)
        gradient, gradient_Nn = method.gradient(layer, grad, for_weight=True)
        grad_x = method.input_gradient(gradient, method.backward_weight(layer, x.dtype), x.dtype)
        grad_weight = method.weight_gradient(grad, x, largest, gradient_Nn)
        found = {each.shape for each in (output, grad_x, grad_weight)}
    assert found == {(TOKENS, OUTPUTS), (TOKENS, INPUTS), (OUTPUTS, INPUTS)}
    assert {each.dtype for each in (output, grad_x, grad_weight)} == {torch.bfloat16}
    assert all(each.is_cuda for each in (output, grad_x, grad_weight))


def operand(rows: int, k: int, *, by_row: bool = False, dtype: torch.dtype = E4M3) -> Operand:
    unit = torch.empty((rows, 1) if by_row else (), device="cuda")
    return Operand(torch.empty(rows, k, dtype=dtype, device="cuda"), unit)


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        (lambda: operand(32, 24), lambda: operand(16, 24), "divisible by 16"),
        (lambda: operand(32, 32), lambda: operand(24, 32), "divisible by 16"),
        (lambda: operand(32, 32), lambda: transpose_of(operand(32, 32)), "mat2 must be col_major"),
        (lambda: transpose_of(operand(32, 48)), lambda: operand(16, 32), "self must be row_major"),
        (lambda: operand(32, 32, by_row=True), lambda: operand(16, 32), "scal"),
        (lambda: operand(32, 32)._replace(unit=unit64()), lambda: operand(16, 32), "fp32"),
        (lambda: operand(32, 32, dtype=torch.bfloat16), lambda: operand(16, 32), "fp8"),
    ],
)
def test_cuda_refuses_other_layouts_scales_and_dtypes(a: Any, b: Any, message: str) -> None:
    with FakeTensorMode(), pytest.raises(RuntimeError, match=message):
        product(a(), b(), torch.bfloat16, is_fast=True, emulates=False)


def transpose_of(each: Operand) -> Operand:
    return each._replace(values=each.values.t())


def unit64() -> Tensor:
    return torch.empty((), dtype=torch.float64, device="cuda")


def test_no_two_e5m2_operands_and_fast_sums_in_the_forward_pass_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[torch.dtype, torch.dtype, bool]] = []
    real = torch._scaled_mm

    def noted(a: Tensor, b: Tensor, **options: Any) -> Tensor:
        calls.append((a.dtype, b.dtype, options["use_fast_accum"]))
        return real(a, b, **options)

    monkeypatch.setattr(torch, "_scaled_mm", noted)
    computed(layer_of("tensorwise", "hybrid"), X, WEIGHT, SLOPE)
    assert calls == [(E4M3, E4M3, True), (E5M2, E4M3, False), (E5M2, E4M3, False)]


def test_an_operand_is_the_nearest_of_its_format() -> None:
    for dtype, form in ((E4M3, FORMS["e4m3"]), (E5M2, FORMS["e5m2"])):
        x = torch.from_numpy(X).float()
        for is_rowwise, (values, unit) in enumerate((by_tensor(x, largest_of(x), dtype), by_row(x, dtype))):
            held = values.double().numpy() * unit.double().numpy()
            np.testing.assert_allclose(held, in_fp8(X, form, by_row=bool(is_rowwise)), rtol=1e-6)


@pytest.mark.parametrize("other", [7.0, float("nan")])
def test_ranks_exchange_one_largest_value_of_however_many_parts(monkeypatch: pytest.MonkeyPatch, other: float) -> None:
    """A host without a compiler has one part, and exchanges with those that have many."""
    sent: list[Tensor] = []

    def all_reduce(bits: Tensor, op: Any, group: Any) -> None:
        sent.append(bits.view(torch.float32).clone())
        bits.copy_(torch.maximum(bits, torch.tensor(other).view(torch.int32)))

    monkeypatch.setattr(fp8_products.dist, "all_reduce", all_reduce)
    group: Any = object()
    of_torch = largest_of(torch.tensor([[1.0, -5.0]]), group)
    kernels = SimpleNamespace(largest=lambda x: torch.tensor([1.0, 5.0, 2.0]))
    monkeypatch.setattr(fp8_products, "_kernels_for", lambda x: kernels)
    of_kernels = largest_of(torch.tensor([[1.0, -5.0]]), group)
    assert [(each.shape, each.item()) for each in sent] == [(torch.Size([]), 5.0)] * 2
    expected = torch.tensor(other)
    assert torch.equal(of_torch.view(torch.int32), expected.view(torch.int32))
    assert torch.equal(of_kernels.view(torch.int32), expected.expand(3).contiguous().view(torch.int32))
