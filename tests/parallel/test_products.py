"""Products of 16-bit numbers through float32, against float64, whatever this processor has."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.live_bytes import LiveBytes
from megatron.models.attention.kernels import SDPAttention
from megatron.models.attention.scores import Scores
from megatron.models.positions import Packing, alibi_slopes
from megatron.parallel.operators import block_sizes, products
from megatron.runtime import accelerator, device_cpu
from megatron.runtime.device_cpu import CPU
from megatron.runtime.device_cuda import CUDA
from tests.ranks import HANG_S

SIXTEEN = (torch.bfloat16, torch.float16)
SIMULATED = {
    "AVX2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
    "AVX512": {"ATEN_CPU_CAPABILITY": "avx512", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE"},
}
"""Processors without bfloat16 products, by what torch uses: limits of its operators, of oneDNN and of MKL."""
ROOMS = ("parallel", "models", "plan", "generation", "tasks", "weights", "checkpoint", "training")
"""Tests of what is computed from 16-bit numbers."""


@pytest.fixture
def widened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "WIDENED", frozenset(SIXTEEN))


@pytest.fixture
def native(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "WIDENED", frozenset())


def numbers(*shapes: tuple[int, ...], dtype: torch.dtype) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(0)
    for shape in shapes:
        yield torch.randn(shape, generator=generator).to(dtype)


def check_rounded_once(result: Tensor, exact: Tensor, sizes: Tensor, terms: int) -> None:
    """`sizes`: the sums of the terms' magnitudes, of which float32 loses at most 2^-24 an addition."""
    limits = torch.finfo(result.dtype)
    bound = exact.abs() * limits.eps / 2 + sizes * terms * 2**-24 + limits.tiny * limits.eps
    assert ((result.double() - exact).abs() <= bound).all()


def linear_and_gradients(dtype: torch.dtype, tokens: int) -> list[Tensor]:
    x, weight, bias, grad = numbers((tokens, 2, 96), (40, 96), (40,), (tokens, 2, 40), dtype=dtype)
    for each in (x, weight, bias):
        each.requires_grad_()
    output = products.linear(x, weight, bias)
    output.backward(grad)
    return [output.detach(), *(each.grad for each in (x, weight, bias) if each.grad is not None)]


@pytest.mark.parametrize("blocks", [(2048, 1024, 1024), (7, 11, 13)], ids=["one block", "many"])
@pytest.mark.parametrize("dtype", SIXTEEN)
def test_a_linear_layer_and_its_gradients_are_rounded_once(
    dtype: torch.dtype, blocks: tuple[int, int, int], widened: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, size in zip(("ROWS", "SUMMED", "COLUMNS"), blocks, strict=True):
        monkeypatch.setattr(block_sizes, name, size)
    x, weight, bias, grad = (each.double() for each in numbers((50, 2, 96), (40, 96), (40,), (50, 2, 40), dtype=dtype))
    output, grad_x, grad_weight, _ = linear_and_gradients(dtype, 50)
    rows = grad.flatten(0, 1).t(), x.flatten(0, 1)
    check_rounded_once(output, F.linear(x, weight, bias), F.linear(x.abs(), weight.abs(), bias.abs()), 97)
    check_rounded_once(grad_x, grad @ weight, grad.abs() @ weight.abs(), 40)
    check_rounded_once(grad_weight, rows[0] @ rows[1], rows[0].abs() @ rows[1].abs(), 100)


@pytest.mark.parametrize("tokens", [1, 3, 200])
@pytest.mark.parametrize("dtype", SIXTEEN)
def test_no_result_is_less_exact_than_the_native_one(
    dtype: torch.dtype, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact = linear_and_gradients(torch.float64, tokens)
    x, weight, bias, grad = (
        each.double() for each in numbers((tokens, 2, 96), (40, 96), (40,), (tokens, 2, 40), dtype=dtype)
    )
    exact = [
        F.linear(x, weight, bias),
        grad @ weight,
        grad.flatten(0, 1).t() @ x.flatten(0, 1),
        grad.flatten(0, 1).sum(0),
    ]
    errors = []
    for dtypes in (frozenset(SIXTEEN), frozenset[torch.dtype]()):
        monkeypatch.setattr(products, "WIDENED", dtypes)
        found = linear_and_gradients(dtype, tokens)
        errors.append([float((a.double() - b).norm()) for a, b in zip(found, exact, strict=True)])
    # a sum in another order may fall on the other side of a tie
    assert all(ours <= 1.001 * theirs for ours, theirs in zip(*errors, strict=True)), errors


@pytest.mark.parametrize("total_dtype", [torch.float32, torch.bfloat16])
def test_a_product_is_added_to_what_is_there(total_dtype: torch.dtype, widened: None) -> None:
    a, b = numbers((20, 30), (30, 10), dtype=torch.bfloat16)
    (start,) = numbers((20, 10), dtype=total_dtype)
    exact, sizes = a.double() @ b.double(), a.double().abs() @ b.double().abs()
    added = products.add_mm_(start.clone(), a, b)
    check_rounded_once(added, start.double() + exact, start.double().abs() + sizes, 31)
    replaced = products.add_mm_(torch.full_like(start, torch.nan), a, b, beta=0)
    check_rounded_once(replaced, exact, sizes, 30)
    out = torch.empty(20, 12, dtype=total_dtype)[:, 1:11]
    assert torch.equal(products.mm(a, b, out=out), replaced)
    assert products.mm(a[:0], b).shape == (0, 10)
    assert torch.equal(products.mm(a[:, :0], b[:0]), torch.zeros(20, 10, dtype=a.dtype))


@pytest.mark.usefixtures("widened")
def test_an_added_products_gradients_are_those_of_float64() -> None:
    given = [*numbers((20, 10), (20, 30), (30, 10), (20, 10), dtype=torch.bfloat16)]
    ours, theirs = (
        [each.detach().clone().to(dtype).requires_grad_() for each in given]
        for dtype in (torch.bfloat16, torch.float64)
    )
    products.add_mm(*ours[:3]).backward(given[3])
    torch.addmm(*theirs[:3]).backward(given[3].double())
    for own, exact in zip(ours[:3], theirs[:3], strict=True):
        torch.testing.assert_close(own.grad.double(), exact.grad, rtol=2**-8, atol=1e-5)  # type: ignore[union-attr]


@pytest.mark.usefixtures("widened")
def test_no_matrix_is_held_in_float32() -> None:
    weight = torch.zeros(16384, 2048, dtype=torch.bfloat16)
    x, grad = torch.zeros(64, 2048, dtype=torch.bfloat16), torch.zeros(64, 16384, dtype=torch.bfloat16)
    given = sum(each.nbytes for each in (x, weight, grad))
    for compute, result in (
        (lambda: products.linear(x, weight), grad),
        (lambda: products.mm(grad, weight), x),
        (lambda: products.mm(grad.t(), x), weight),
    ):
        with LiveBytes([x, weight, grad]) as live:
            compute()
        assert live.peak - given - result.nbytes <= 20 * 2**20, "the three blocks"


@pytest.mark.usefixtures("widened")
@pytest.mark.parametrize(("m", "k", "n"), [(4000, 1536, 256), (256, 1025, 3000), (60, 1024, 200), (1, 2, 3)])
def test_the_plan_counts_the_largest_block(m: int, k: int, n: int) -> None:
    a, b, out = (torch.zeros(shape, dtype=torch.bfloat16) for shape in ((m, k), (k, n), (m, n)))
    with LiveBytes([a, b, out]) as live:
        products.mm(a, b, out=out)
    assert live.peak - sum(each.nbytes for each in (a, b, out)) == block_sizes.block_bytes(m, k, n)


@pytest.mark.usefixtures("widened")
@pytest.mark.parametrize("beta", [0, 1])
def test_a_float32_sum_is_added_to_where_it_is(beta: int) -> None:
    a, b = torch.zeros(2048, 64, dtype=torch.bfloat16), torch.zeros(64, 1024, dtype=torch.bfloat16)
    total = torch.zeros(2048, 1024)
    with LiveBytes([a, b, total]) as live:
        products.add_mm_(total, a, b, beta=beta)
    assert live.peak == 2 * (a.nbytes + b.nbytes) + a.nbytes + b.nbytes + total.nbytes, "the operands in float32"


# ---------------------------------------------------------------------------------------------------------------------
# Attention


def attended(
    kernel: SDPAttention, given: list[Tensor], grad: Tensor, packing: Packing | None
) -> tuple[list[Tensor], int]:
    """Context and gradients, and the bytes kept for the backward pass."""
    inputs = q, k, v = [each.detach().requires_grad_() for each in given]
    kept = dict[int, int]()

    def note(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        context = kernel(q, k, v, packing, 0.0)
    context.backward(grad)
    return [context.detach(), *(each.grad for each in inputs if each.grad is not None)], sum(kept.values())


@pytest.mark.parametrize("positions", ["causal", "alibi", "packed", "packed rows"])
@pytest.mark.parametrize("dtype", SIXTEEN)
def test_attention_is_no_less_exact_and_keeps_no_more(
    dtype: torch.dtype, positions: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = [*numbers((2, 8, 70, 16), (2, 4, 70, 16), (2, 4, 70, 16), dtype=dtype)]
    (grad,) = numbers((2, 8, 70, 16), dtype=dtype)
    starts = torch.tensor([[0] * 30 + [30] * 40, [0] * 70])
    packing = Packing(torch.arange(70) - starts, starts) if "packed" in positions else None

    def make() -> SDPAttention:
        return SDPAttention(
            Scores(alibi_slopes(8) if positions == "alibi" else None), by_document=positions == "packed"
        )

    exact, _ = attended(make(), [each.double() for each in given], grad.double(), packing)
    results = []
    for dtypes in (frozenset(SIXTEEN), frozenset[torch.dtype]()):
        monkeypatch.setattr(products, "WIDENED", dtypes)
        found, kept = attended(make(), given, grad, packing)
        results.append(([float((a.double() - b).norm()) for a, b in zip(found, exact, strict=True)], kept))
    (ours, own_bytes), (theirs, their_bytes) = results
    assert all(own <= 1.001 * their for own, their in zip(ours, theirs, strict=True)), (ours, theirs)
    mask_bytes = 2 * 8 * 70 * 70 * 4 if positions in ("alibi", "packed rows") else 0
    assert own_bytes <= their_bytes + mask_bytes


# ---------------------------------------------------------------------------------------------------------------------
# What a processor has


FLAGS = {
    "laptop": ("avx2 fma", {"bf16", "fp16"}),
    "Ice Lake": ("avx2 avx512f avx512bw avx512_vnni", {"bf16", "fp16"}),
    "Zen 4": ("avx2 avx512f avx512_bf16", {"fp16"}),
    "Sapphire Rapids": ("avx2 avx512f avx512_bf16 avx512_fp16 amx_bf16", set()),
    "Sierra Forest": ("avx2 avx_ne_convert", set()),
}


@pytest.mark.parametrize("name", FLAGS)
def test_a_processors_flags_say_which_products_it_lacks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    flags, missing = FLAGS[name]
    for variable in device_cpu.MAX_CPU_ISA:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(Path, "read_text", lambda path: f"processor\t: 0\nflags\t\t: {flags}\n")
    assert device_cpu.missing_products() == missing
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "avx512_core_vnni")
    assert device_cpu.missing_products() == {"bf16", "fp16"}
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
    assert device_cpu.missing_products() == missing | {"fp16"}


def test_blocks_attend_faster_with_avx512_and_in_bf16_without_amx(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in (*device_cpu.MAX_CPU_ISA, "ATEN_CPU_CAPABILITY"):
        monkeypatch.delenv(variable, raising=False)
    avx512 = "avx2 avx512f avx512bw avx512dq avx512vl"
    for flags, fp32, bf16 in (
        ("avx2 fma", False, False),
        (avx512, True, False),
        (f"{avx512} avx512_bf16", True, True),
        (f"{avx512} avx512_bf16 amx_bf16 amx_tile", True, False),
    ):
        monkeypatch.setattr(Path, "read_text", lambda path, flags=flags: f"flags\t\t: {flags}\n")
        attends = [device_cpu.attends_blockwise(precision) for precision in ("fp32", "bf16", "fp16")]
        assert attends == [fp32, bf16, False]
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "avx2")
    assert not device_cpu.attends_blockwise("fp32")


def test_another_architecture_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in device_cpu.MAX_CPU_ISA:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(Path, "read_text", lambda path: "Features\t: fp asimd bf16\n")
    assert device_cpu.missing_products() == frozenset()


PROGRAM = """
import torch
from megatron.runtime import accelerator
from megatron.runtime.device_cpu import CPU
from megatron.models.attention import blockwise
from megatron.parallel.operators import cpu_weights, products
print(accelerator.processor())
print(sorted(map(str, products.WIDENED)), cpu_weights.pack(torch.ones(16, 16, dtype=torch.bfloat16)))
print(blockwise.is_faster(torch.bfloat16), accelerator.widened_line(CPU, "bf16"))
"""


@pytest.mark.skipif("avx512f" not in device_cpu._cpu_flags(), reason="has no AVX-512 to simulate other processors by")
@pytest.mark.parametrize("name", SIMULATED)
def test_a_simulated_processor_computes_in_float32_and_says_so(name: str) -> None:
    said = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=os.environ | SIMULATED[name], capture_output=True, text=True, check=True
    ).stdout
    assert said.splitlines() == [
        name,
        "['torch.bfloat16', 'torch.float16'] None",
        f"False this CPU has no bf16 products; they are computed in float32 and rounded once ({name})",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("room", ROOMS)
@pytest.mark.parametrize("name", SIMULATED)
def test_the_suite_passes_on_a_simulated_processor(name: str, room: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"tests/{room}"]
    # what torch.compile made for this machine's own processor computes NaN on a simulated one
    env = os.environ | SIMULATED[name] | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=3 * HANG_S)
    assert ended.returncode == 0, ended.stdout


def test_where_there_are_products_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerator, "processor", lambda: accelerator.Processor("AVX512", frozenset({"bf16"})))
    assert accelerator.widened_line(CPU, "bf16") is None
    assert accelerator.widened_line(CUDA, "fp16") is None
    assert accelerator.widened_line(CPU, "fp32") is None
    assert str(accelerator.processor()) == "AVX512, products in bf16"
