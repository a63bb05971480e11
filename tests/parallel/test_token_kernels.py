"""The operators of single tokens by formulas in float64 written out here, and what they leave to torch's operators."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.options.config import Config
from megatron.parallel.operators import token_kernels
from megatron.parallel.operators.fused import choose_kernels

DTYPES = (torch.float32, torch.bfloat16)
TOLERANCES = {torch.float32: 1e-6, torch.bfloat16: 2**-8}
"""Relative to the largest number: rounding of one result."""


def drawn(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))) * scale).to(dtype)


def assert_equal(found: Tensor | None, expected: Tensor) -> None:
    assert found is not None
    tolerance = TOLERANCES[found.dtype]
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance * float(expected.abs().max()))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [5, 16, 37, 64])
def test_norm_and_swiglu(width: int, dtype: torch.dtype) -> None:
    x, weight = drawn(2, 3, width, dtype=dtype, scale=3), drawn(width, dtype=dtype)
    gate, up = drawn(2, 3, width, dtype=dtype, scale=20), drawn(3, 2, width, dtype=dtype).view(2, 3, width)
    exact = x.double()
    with torch.no_grad():
        found = token_kernels.rms_norm(x, weight, 1e-5)
        assert_equal(found, exact / (exact.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double())
        silu = gate.double() / (1 + (-gate.double()).exp())
        assert_equal(token_kernels.swiglu(torch.cat([gate, up], -1)), silu.to(dtype).double() * up.double())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_tokens", "num_rows"), [(1, 1), (1, 3), (4, 1), (2, 3)])
@pytest.mark.parametrize("size", [20, 64])
def test_rotation_of_parts_of_a_projection(size: int, num_tokens: int, num_rows: int, dtype: torch.dtype) -> None:
    qkv = drawn(num_tokens, num_rows, 7 * size, dtype=dtype)
    heads = [part.unflatten(-1, (-1, size)) for part in qkv.split([4 * size, 2 * size, size], -1)[:2]]
    phases = drawn(num_tokens, num_rows, 1, size // 2, dtype=torch.float32, scale=9)
    turns = torch.polar(torch.ones_like(phases).double(), phases.double())
    with torch.no_grad():
        found = token_kernels.rotate(heads[0], heads[1], phases.cos(), phases.sin())
    assert found is not None
    for own, x in zip(found, heads, strict=True):
        pairs = torch.complex(*x.double().chunk(2, -1)) * turns  # type: ignore[call-overload]
        assert own.is_contiguous()
        assert_equal(own, torch.cat([pairs.real, pairs.imag], -1))


def expected_context(
    qkv: Tensor, angles: tuple[Tensor, Tensor] | None, slopes: Tensor | None, positions: list[int], cache: list[Tensor]
) -> Tensor:
    """Return the context [B, n d] in float64, and write the token into the cache, keys and values [B, k, T, d]."""
    rows, kv_heads, _, size = cache[0].shape
    heads = qkv[0].view(rows, -1, size)
    num_heads = heads.shape[1] - 2 * kv_heads
    context = torch.zeros(rows, num_heads, size, dtype=torch.float64)
    for row, position in enumerate(positions):

        def turned(x: Tensor, row: int = row) -> Tensor:
            if angles is None:
                return x
            pairs = torch.complex(*x.double().chunk(2))  # type: ignore[call-overload]
            pairs = pairs * torch.complex(*(each[0, row, 0].double() for each in angles))
            return torch.cat([pairs.real, pairs.imag]).to(x.dtype)

        for head in range(kv_heads):
            cache[0][row, head, position] = turned(heads[row, num_heads + head])
            cache[1][row, head, position] = heads[row, num_heads + kv_heads + head]
        for head in range(num_heads):
            keys, values = (part[row, head * kv_heads // num_heads, : position + 1].double() for part in cache)
            scores = keys @ turned(heads[row, head]).double() / math.sqrt(size)
            if slopes is not None:
                scores += float(slopes[head]) * (torch.arange(position + 1) - position)
            context[row, head] = scores.softmax(0) @ values
    return context.flatten(1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("kv_heads", "group", "size"), [(1, 1, 8), (2, 3, 20), (3, 2, 64)])
@pytest.mark.parametrize("places", ["rotary", "alibi", "neither"])
def test_attention_writes_the_token_and_reads_its_row_alone(
    places: str, kv_heads: int, group: int, size: int, dtype: torch.dtype
) -> None:
    positions = [0, 40, 17]
    heads = kv_heads * group
    cache = [drawn(3, kv_heads, 64, size, dtype=dtype, scale=scale) for scale in (2.0, 1.0)]
    expected_cache = [part.clone() for part in cache]
    for part in cache:
        for row, position in enumerate(positions):
            part[row, :, position:] = math.nan  # not to be read before it is written
    qkv = drawn(1, 3, (heads + 2 * kv_heads) * size, dtype=dtype)
    phases = drawn(1, 3, 1, size // 2, dtype=torch.float32, scale=9)
    angles = (phases.cos(), phases.sin()) if places == "rotary" else None
    slopes = torch.arange(1, heads + 1) / heads if places == "alibi" else None
    with torch.no_grad():
        found = token_kernels.attend(qkv, angles, slopes, torch.tensor(positions), 64, cache[0], cache[1])
    expected = expected_context(qkv, angles, slopes, positions, expected_cache)
    assert_equal(found, expected[None])
    for part, wanted in zip(cache, expected_cache, strict=True):
        for row, position in enumerate(positions):
            assert_equal(part[row, :, : position + 1], wanted[row, :, : position + 1].double())
            assert part[row, :, position + 1 :].isnan().all()


X = drawn(1, 2, 32, dtype=torch.float32)
CACHE = torch.zeros(2, 1, 64, 8)


def attend(num_places: int = 64, **changed: Any) -> Tensor | None:
    given = {
        "qkv": X[..., :24].contiguous(),
        "angles": None,
        "slopes": None,
        "positions": torch.tensor([3, 4]),
        "num_places": num_places,
        "keys": CACHE,
        "values": CACHE,
    }
    return token_kernels.attend(**given | changed)


@pytest.mark.parametrize(
    "call",
    [
        lambda: token_kernels.rms_norm(X.double(), X[0, 0].double(), 1e-5),
        lambda: token_kernels.rms_norm(X, X[0, 0].bfloat16(), 1e-5),
        lambda: token_kernels.swiglu(X[..., :16]),
        lambda: token_kernels.swiglu(X.half()),
        lambda: token_kernels.rotate(X.view(2, 1, 2, 16), X.view(2, 1, 2, 16), X[..., :8], X[..., :8]),
        lambda: token_kernels.rotate(X.view(2, 1, 2, 16).mT, X.view(2, 1, 2, 16), X[0, 0, :16], X[0, 0, :16]),
        lambda: attend(angles=(X[:, :, None, ::8], X[:, :, None, ::8])),
        lambda: attend(slopes=torch.ones(1, dtype=torch.float64)),
        lambda: attend(keys=CACHE.transpose(2, 3).contiguous().transpose(2, 3)),
    ],
)
def test_other_dtypes_and_layouts_are_left_to_torch(call: Callable[[], Tensor | None]) -> None:
    with torch.no_grad():
        assert call() is None


def test_a_missing_extension_is_reported_where_text_is_generated(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(token_kernels, "operators", None)
    monkeypatch.setattr(token_kernels, "missing", "no such module")
    with torch.no_grad():
        assert token_kernels.swiglu(X) is None
    choose_kernels(Config(), torch.device("cpu"))
    assert not caplog.messages
    assert choose_kernels(Config(), torch.device("cpu"), trains=False).swiglu(X).shape == (1, 2, 16)
    assert [message.partition(":")[0] for message in caplog.messages] == ["text is generated more slowly"]


def test_gradients_are_left_to_torch() -> None:
    assert token_kernels.rms_norm(X, X[0, 0], 1e-5) is None
    assert token_kernels.swiglu(X) is None
    assert attend() is None


def test_many_keys_are_left_to_torch_where_it_has_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.no_grad():
        for num_threads, num_places, is_taken in ((1, 2**30, True), (2, 2**17, True), (2, 2**18, False)):
            monkeypatch.setattr(torch, "get_num_threads", lambda count=num_threads: count)
            assert (attend(num_places) is not None) == is_taken


@pytest.mark.parametrize("position", [-1, 64])
def test_a_position_outside_of_the_cache_is_refused(position: int) -> None:
    with (
        torch.no_grad(),
        pytest.raises(IndexError, match=rf"row 1 is at position {position} of a cache with 64 places"),
    ):
        attend(positions=torch.tensor([3, position]))
