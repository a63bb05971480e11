"""Every form of the pointwise operators against float64: values and gradients, by dtype."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from megatron.options.config import Config, ConfigError, ModelConfig, TrainingConfig
from megatron.parallel.operators import fused
from megatron.parallel.operators.fused import EAGER, PLAIN, Kernels, choose_kernels, compiled
from megatron.runtime import device_cpu, device_cuda

S, B, QUERIES, KEYS, HEAD_SIZE, WIDTH = 6, 2, 4, 2, 8, 24
CPU = torch.device("cpu")

# relative error allowed, by dtype: a few roundings of the result
TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-6, torch.bfloat16: 6e-3, torch.float16: 8e-4}


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def angles(packed: bool) -> tuple[Tensor, Tensor]:
    positions = torch.tensor([[0, 1, 2, 0, 1, 2], [0, 1, 2, 3, 4, 5]]).t() if packed else torch.arange(S)[:, None]
    turns = positions[..., None, None] * 10.0 ** -torch.arange(HEAD_SIZE // 2)
    return turns.float().cos(), turns.float().sin()


def rotated_by_complex_numbers(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    pairs = torch.complex(*x.chunk(2, dim=-1)) * torch.complex(cos.double(), sin.double())
    return torch.cat([pairs.real, pairs.imag], dim=-1)


def gated(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return gate * (1 + (gate / 2).tanh()) / 2 * up


def gelu_gated(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return gate * torch.sigmoid((8 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)) * up


# inputs, the operator of a set of kernels, and the same written otherwise
OPERATORS: dict[str, tuple[list[Tensor], Callable[..., object], Callable[..., object]]] = {
    "rotate": (
        [random(S, B, QUERIES, HEAD_SIZE, seed=1), random(S, B, KEYS, HEAD_SIZE, seed=2)],
        lambda form, q, k: form.rotate(q, k, *angles(False)),
        lambda q, k: [rotated_by_complex_numbers(x, *angles(False)) for x in (q, k)],
    ),
    "rotate packed": (
        [random(S, B, QUERIES, HEAD_SIZE, seed=1), random(S, B, KEYS, HEAD_SIZE, seed=2)],
        lambda form, q, k: form.rotate(q, k, *angles(True)),
        lambda q, k: [rotated_by_complex_numbers(x, *angles(True)) for x in (q, k)],
    ),
    "rotate parts of a projection": (
        [random(S, B, QUERIES + 2 * KEYS, HEAD_SIZE, seed=1)],
        lambda form, x: form.rotate(x[:, :, :QUERIES], x[:, :, QUERIES:-KEYS], *angles(False)),
        lambda x: [rotated_by_complex_numbers(p, *angles(False)) for p in (x[:, :, :QUERIES], x[:, :, QUERIES:-KEYS])],
    ),
    "swiglu": ([3 * random(S, B, 2 * WIDTH, seed=1)], lambda form, x: [form.swiglu(x)], lambda x: [gated(x)]),
    "geglu": (
        [3 * random(S, B, 2 * WIDTH, seed=1)],
        lambda form, x: [form.geglu(x)],
        lambda x: [gelu_gated(x)],
    ),
    "rms_norm": (
        [4 * random(S, B, WIDTH, seed=1), random(WIDTH, seed=2)],
        lambda form, x, weight: [form.rms_norm(x, weight, 1e-2)],
        lambda x, weight: [x / (x.square().mean(-1, keepdim=True) + 1e-2).sqrt() * weight],
    ),
    "rms_norm of a transposed input": (
        [random(B, S, WIDTH, seed=1), random(WIDTH, seed=2)],
        lambda form, x, weight: [form.rms_norm(x.transpose(0, 1), weight, 1e-2)],
        lambda x, weight: [(x / (x.square().mean(-1, keepdim=True) + 1e-2).sqrt() * weight).transpose(0, 1)],
    ),
}


def differentiated(
    function: Callable[..., Sequence[Tensor]], inputs: list[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs, and gradients of the inputs for random gradients of the outputs that are not contiguous."""
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    outputs = list(function(*inputs))
    grads = [random(*reversed(y.shape), seed=9).permute(*reversed(range(y.dim()))).to(y.dtype) for y in outputs]
    return outputs, list(torch.autograd.grad(outputs, inputs, grads))


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("form", [PLAIN, EAGER], ids=lambda form: form.form)
@pytest.mark.parametrize("operator", OPERATORS)
def test_operators_equal_float64(operator: str, form: Kernels, dtype: torch.dtype) -> None:
    check(operator, form, dtype)


def extremes(operator: str) -> list[Tensor]:
    """Numbers near 10,000, whose squares float16 cannot hold, beside a row of zeros."""
    inputs = [x.clone() for x in OPERATORS[operator][0]]
    large = inputs[0][..., :WIDTH]  # of SwiGLU the gates alone
    large *= 1e4 / large.abs().amax()
    large[0, 0] = 0.0
    return inputs


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("form", [PLAIN, EAGER], ids=lambda form: form.form)
@pytest.mark.parametrize("operator", ["rotate", "swiglu", "geglu", "rms_norm"])
def test_large_numbers_and_zeros_equal_float64(operator: str, form: Kernels, dtype: torch.dtype) -> None:
    check(operator, form, dtype, extremes(operator))


@pytest.mark.parametrize("form", [PLAIN, EAGER], ids=lambda form: form.form)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("operator", OPERATORS)
def test_what_is_not_finite_is_passed_on(operator: str, value: float, form: Kernels) -> None:
    inputs, ours, _ = OPERATORS[operator]
    inputs = [x.float() for x in inputs]
    inputs[0].view(-1)[0] = value
    values, _ = differentiated(lambda *tensors: ours(form, *tensors), inputs)  # type: ignore[arg-type, return-value]
    assert not values[0].isfinite().all()


def check(operator: str, form: Kernels, dtype: torch.dtype, inputs: list[Tensor] | None = None) -> None:
    drawn, ours, reference = OPERATORS[operator]
    inputs = inputs or drawn
    rounded = [x.to(dtype) for x in inputs]
    found = differentiated(lambda *tensors: ours(form, *tensors), rounded)  # type: ignore[arg-type, return-value]
    expected = differentiated(reference, [x.double() for x in rounded])  # type: ignore[arg-type]
    for what, ours_, theirs in zip(("values", "gradients"), found, expected, strict=True):
        for number, (a, b) in enumerate(zip(ours_, theirs, strict=True)):
            assert a.dtype == dtype
            error = float((a.detach().double() - b.detach()).norm() / b.detach().norm())
            assert error < TOLERANCES[dtype], f"{operator}, {what} {number}: relative error {error:.1e}"


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on CPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("operator", OPERATORS)
def test_compiled_operators_equal_float64(operator: str, dtype: torch.dtype) -> None:
    torch._dynamo.reset()  # after eight shapes of the other tests it would compute as it is written
    check(operator, compiled("inductor", device_cpu.CPU), dtype)
    check(operator, compiled("inductor", device_cpu.CPU), dtype, extremes(operator))


def test_eager_operators_keep_their_inputs_alone() -> None:
    gate_up, x, weight = torch.randn(S, B, 2 * WIDTH), torch.randn(S, B, WIDTH), torch.ones(WIDTH)
    q, k = torch.randn(S, B, QUERIES, HEAD_SIZE), torch.randn(S, B, KEYS, HEAD_SIZE)
    kept: list[int] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        EAGER.swiglu(gate_up.requires_grad_())
        assert kept == [gate_up.numel()]
        kept.clear()
        EAGER.rms_norm(x.requires_grad_(), weight.requires_grad_(), 1e-5)
        assert sorted(kept) == sorted([S * B, WIDTH, x.numel()])  # a scale a row, the weight, the input
        kept.clear()
        EAGER.rotate(q.requires_grad_(), k, *angles(False))
        assert sum(kept) == S * HEAD_SIZE  # cos and sin


# ---------------------------------------------------------------------------------------------------------------------
# The choice


def config_with(choice: str, torch_compile: bool = False) -> Config:
    return Config(model=ModelConfig(kernels=choice), training=TrainingConfig(torch_compile=torch_compile))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("device", "choice", "torch_compile", "missing", "form"),
    [
        ("cpu", "auto", False, "", "eager"),
        ("cpu", "plain", False, "", "plain"),
        ("cpu", "fused", False, "", "compiled"),
        ("cpu", "fused", True, "no compiler", "plain"),  # a compiled layer fuses them itself
        ("cuda", "auto", False, "", "compiled"),
        ("cuda", "auto", False, "no Triton", "eager"),
        ("cuda", "plain", False, "", "plain"),
        ("cuda", "fused", False, "", "compiled"),
    ],
)
def test_form_by_device_and_option(
    monkeypatch: pytest.MonkeyPatch, device: str, choice: str, torch_compile: bool, missing: str, form: str
) -> None:
    monkeypatch.setattr(fused, "missing_compiler", lambda device: missing)
    assert choose_kernels(config_with(choice, torch_compile), torch.device(device)).form == form


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("width", [24, 5000])
def test_swiglu_on_cuda_equals_float64(width: int, dtype: torch.dtype) -> None:
    form, rounded = compiled("inductor", device_cuda.CUDA), (3 * random(S, B, 2 * width, seed=1)).to(dtype)
    found = differentiated(lambda x: [form.swiglu(x.cuda()).cpu()], [rounded])
    expected = differentiated(lambda x: [gated(x)], [rounded.double()])
    for ours, exact in zip(found, expected, strict=True):
        error = float((ours[0].detach().double() - exact[0].detach()).norm() / exact[0].detach().norm())
        assert error < TOLERANCES[dtype]


def test_rms_norm_without_gradients_is_torchs_own_where_that_is_one_kernel() -> None:
    assert compiled("inductor", device_cuda.CUDA, trains=False).rms_norm is PLAIN.rms_norm
    assert compiled("inductor", device_cuda.CUDA).rms_norm is not PLAIN.rms_norm
    assert compiled("inductor", device_cpu.CPU).rms_norm is not PLAIN.rms_norm


def test_fused_without_a_compiler_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(ConfigError, match="kernels=fused compiles operators, but no C compiler is on the PATH"):
        choose_kernels(config_with("fused"), CPU)
