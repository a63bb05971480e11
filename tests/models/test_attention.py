"""Positions, masks and kernels, against transformers and against attention written as a loop."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from megatron.models.attention import blockwise, kernels
from megatron.models.attention.flex import FlexAttention
from megatron.models.attention.kernels import AttentionMask, SDPAttention, build_kernel, repeat_heads
from megatron.models.attention.layer import SelfAttention, Shared
from megatron.models.attention.scores import Scores
from megatron.models.positions import Packing, RotaryEmbedding, alibi_slopes, rotary_frequencies
from megatron.options.config import ConfigError, ModelConfig
from megatron.parallel.context import ParallelContext
from megatron.parallel.operators.fused import EAGER
from megatron.runtime import device_cpu
from megatron.settings.command_line import parse_arguments

CPU = torch.device("cpu")
S, B, HEADS, HEAD_SIZE = 12, 2, 4, 8


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def packing_of(lengths: list[list[int]]) -> Packing:
    """Documents of these lengths in each sample."""
    positions = [[place for length in sample for place in range(length)] for sample in lengths]
    starts = [[sum(sample[:i]) for i, length in enumerate(sample) for _ in range(length)] for sample in lengths]
    return Packing(torch.tensor(positions), torch.tensor(starts))


PACKED = [[5, 1, 6], [12]]

# ---------------------------------------------------------------------------------------------------------------------
# Positions


@pytest.mark.parametrize("num_heads", [1, 2, 8, 12, 32, 71, 112])
def test_alibi_slopes_equal_transformers(num_heads: int) -> None:
    bloom = pytest.importorskip("transformers.models.bloom.modeling_bloom")
    alibi = bloom.build_alibi_tensor(torch.ones(1, 3), num_heads, torch.float32)  # [heads, 1, S]: slope x key
    torch.testing.assert_close(alibi_slopes(num_heads), alibi[:, 0, 1], rtol=1e-6, atol=0)


def test_alibi_slopes_of_one_rank_are_those_of_its_heads() -> None:
    model = ModelConfig(num_attention_heads=12, position_embedding_type="alibi", attention_backend="sdpa")
    whole = alibi_slopes(12)
    for rank in range(4):
        kernel = build_kernel(model, ParallelContext(tensor_size=4, rank=rank), packed=False)
        bias = kernel.masks.get(None, 2, 2, torch.float32, CPU)  # type: ignore[attr-defined]
        assert torch.equal(bias[0, :, 1, 0], -whole[3 * rank : 3 * rank + 3])


@pytest.mark.parametrize("preset", ["llama2_7b", "llama31_8b", "llama31_405b", "llama32_1b"])
def test_rotary_frequencies_equal_transformers(preset: str) -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    model = parse_arguments(["--config", preset])[0].model
    scaling = {} if model.rope_scaling_factor is None else {"factor": model.rope_scaling_factor}
    config = transformers.LlamaConfig(
        hidden_size=model.hidden_size,
        num_attention_heads=model.num_attention_heads,
        head_dim=model.head_size,
        max_position_embeddings=131072,
        rope_parameters={
            "rope_type": "llama3" if scaling else "default",
            "rope_theta": model.rotary_base,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
            **scaling,
        },
    )
    if scaling:
        expected, attention_factor = ROPE_INIT_FUNCTIONS["llama3"](config, CPU)
        assert attention_factor == 1.0
    else:
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        expected = LlamaRotaryEmbedding(config).inv_freq
    torch.testing.assert_close(rotary_frequencies(model), expected, rtol=2e-6, atol=0)


def rope() -> RotaryEmbedding:
    return RotaryEmbedding(ModelConfig(position_embedding_type="rope", kv_channels=HEAD_SIZE))


def rotated(x: Tensor, packing: Packing | None, rotary: RotaryEmbedding | None = None) -> Tensor:
    """x [S, B, heads, d] turned as queries are."""
    return EAGER.rotate(x, x, *(rotary or rope()).angles(x.shape[0], CPU, packing, ParallelContext.single()))[0]


def test_rotation_turns_pairs_by_their_position() -> None:
    x = random(S, B, HEADS, HEAD_SIZE)
    turned = rotated(x, None)
    pairs = torch.complex(x[..., : HEAD_SIZE // 2].double(), x[..., HEAD_SIZE // 2 :].double())
    angles = torch.arange(S).double()[:, None] * 10000.0 ** (-torch.arange(0, HEAD_SIZE, 2).double() / HEAD_SIZE)
    expected = pairs * torch.polar(torch.ones_like(angles), angles)[:, None, None]
    torch.testing.assert_close(turned.double(), torch.cat([expected.real, expected.imag], -1), rtol=0, atol=2e-6)


def test_rotation_by_packed_positions_equals_each_document_alone() -> None:
    x = random(S, B, HEADS, HEAD_SIZE)
    turned = rotated(x, packing_of(PACKED))
    torch.testing.assert_close(turned[:5, 0], rotated(x[:5, :1], None)[:, 0])
    torch.testing.assert_close(turned[6:, 0], rotated(x[6:, :1], None)[:, 0])
    torch.testing.assert_close(turned[:, 1], rotated(x[:, 1:], None)[:, 0])


def test_a_part_of_each_head_is_rotated() -> None:
    """The first quarter as a head of that size; the rest is left as it is."""
    config = parse_arguments("--architecture llama --position-embedding-type rope --kv-channels 16".split())[0]
    model = replace(config.model, rotary_percent=0.25)
    shared = Shared(replace(config, model=model), ParallelContext.single())
    assert model.rotary_size == 4
    layer = SimpleNamespace(head_size=16, shared=shared)
    x, angles = random(S, B, HEADS, 16), RotaryEmbedding(model).angles(S, CPU, None, ParallelContext.single())
    turned, _ = SelfAttention._rotated(layer, x, x, angles)  # type: ignore[arg-type]
    torch.testing.assert_close(turned[..., 4:], x[..., 4:], rtol=0, atol=0)
    alone = RotaryEmbedding(ModelConfig(position_embedding_type="rope", kv_channels=4))
    torch.testing.assert_close(turned[..., :4], rotated(x[..., :4], None, alone), rtol=0, atol=0)


def test_rotary_table_grows() -> None:
    rotary, x = rope(), random(S, B, HEADS, HEAD_SIZE)
    first = rotated(x[:3], None, rotary)
    whole = rotated(x, None, rotary)
    torch.testing.assert_close(whole, rotated(x, None), rtol=0, atol=0)
    torch.testing.assert_close(whole[:3], first, rtol=0, atol=0)


def test_rotary_table_made_in_evaluation_serves_training() -> None:
    rotary, x = rope(), random(S, B, HEADS, HEAD_SIZE).requires_grad_()
    with torch.no_grad():
        rotated(x, None, rotary)
    rotated(x, None, rotary).square().sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, 2 * x.detach(), rtol=1e-5, atol=1e-5)  # a rotation keeps lengths


def test_bfloat16_is_rotated_in_float32() -> None:
    x = random(2048, 1, 1, HEAD_SIZE).bfloat16()
    turned = rotated(x, None)
    assert turned.dtype == torch.bfloat16
    assert torch.equal(turned, rotated(x.float(), None).bfloat16())


# ---------------------------------------------------------------------------------------------------------------------
# Masks


def test_plainly_causal_attention_needs_no_mask() -> None:
    assert AttentionMask().get(None, S, S, torch.float32, CPU) is None


def test_masks_show_each_token_its_own_document() -> None:
    packing = packing_of(PACKED)
    seen = AttentionMask().get(packing, S, S, torch.float32, CPU)
    assert seen is not None
    documents = [[0] * 5 + [1] + [2] * 6, [0] * 12]
    expected = [[[i >= j and d[i] == d[j] for j in range(S)] for i in range(S)] for d in documents]
    assert seen[:, 0].tolist() == expected
    assert seen.diagonal(dim1=-2, dim2=-1).all()  # no row is empty: softmax would give nan


def test_alibi_of_bfloat16_keeps_the_nearest_keys_exact() -> None:
    bias = AttentionMask(Scores(alibi_slopes(8))).get(None, 2048, 2048, torch.bfloat16, CPU)
    assert bias is not None
    assert bias.dtype == torch.bfloat16
    # counted from the query, not from the start of the sample: bfloat16 cannot hold 2046 and 2047 apart
    assert bias[0, 0, 2047, 2040:].tolist() == [-0.5 * distance for distance in range(7, -1, -1)]


@pytest.mark.parametrize("slopes", [None, alibi_slopes(HEADS)], ids=["bool", "alibi"])
def test_masks_are_made_once_and_never_stale(slopes: Tensor | None) -> None:
    masks, packing = AttentionMask(Scores(slopes)), packing_of(PACKED)

    def fresh(of: Packing, length: int = S, dtype: torch.dtype = torch.float32) -> Tensor:
        mask, expected = (cache.get(of, length, length, dtype, CPU) for cache in (masks, AttentionMask(Scores(slopes))))
        assert mask is not None
        assert expected is not None
        assert torch.equal(mask, expected)
        assert mask.dtype == expected.dtype
        return mask

    first = fresh(packing)
    assert fresh(packing) is first  # the next layer
    assert fresh(Packing(packing.positions_BS.clone(), packing.starts_BS)) is first
    fresh(packing_of([[12], [3, 9]]))  # the next microbatch
    fresh(packing)  # the backward pass of the first recomputes it
    fresh(packing, dtype=torch.bfloat16)
    packing.starts_BS.copy_(packing_of([[2, 10], [12]]).starts_BS)  # a reader that fills its buffers anew
    fresh(packing)
    packing.starts_BS.zero_()
    fresh(packing)
    fresh(packing_of([[4], [4]]), length=4)


# ---------------------------------------------------------------------------------------------------------------------
# Kernels


def attention_by_loops(q: Tensor, k: Tensor, v: Tensor, form: Scores, packing: Packing | None) -> Tensor:
    """softmax over the tokens each query sees, one query at a time, in float64. The queries are the last tokens."""
    q, k, v = q.double(), k.double(), v.double()
    result = torch.empty(*q.shape[:3], v.shape[3], dtype=torch.float64)
    group, before = q.shape[1] // k.shape[1], k.shape[2] - q.shape[2]
    for sample in range(q.shape[0]):
        for head in range(q.shape[1]):
            for query in range(q.shape[2]):
                start = 0 if packing is None else int(packing.starts_BS[sample, query])
                end = before + query + 1
                start = start if form.window is None else max(start, end - form.window)
                keys = k[sample, head // group, start:end]
                scores = keys @ q[sample, head, query] * (form.scale or 1 / math.sqrt(q.shape[3]))
                scores = scores if form.cap is None else form.cap * (scores / form.cap).tanh()
                if form.slopes is not None:
                    scores = scores + form.slopes[head].double() * (torch.arange(start, end) - end + 1)
                result[sample, head, query] = scores.softmax(0) @ v[sample, head // group, start:end]
    return result


KERNELS: dict[str, Callable[[Scores], Any]] = {
    "sdpa": SDPAttention,
    "sdpa by document": lambda scores: SDPAttention(scores, by_document=True),
    "flex": lambda scores: FlexAttention(scores, compiled=False),
}
SLOPES = alibi_slopes(HEADS)
SCORES = {
    "": Scores(),
    "alibi": Scores(SLOPES),
    "window": Scores(window=3),
    "scaled": Scores(scale=0.7),
    "capped": Scores(cap=0.8),
    "all": Scores(SLOPES, window=4, scale=0.5, cap=1.5),
}
scores_of_all_kinds = pytest.mark.parametrize("scores", SCORES.values(), ids=SCORES.keys())


# relative error allowed, by dtype: a few roundings of scores, probabilities and results
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 1.5e-2, torch.float16: 2e-3}
Inputs = tuple[Tensor, Tensor, Tensor]
"""Queries [B, n, S, d], keys and values [B, k, S, d]."""


def to_leaves(inputs: Inputs, dtype: torch.dtype) -> Inputs:
    q, k, v = (x.to(dtype, copy=True).requires_grad_() for x in inputs)
    return q, k, v


def assert_equals_loops(attend: Any, inputs: Inputs, scores: Scores, packing: Packing | None) -> None:
    """Compare values, and gradients of q, k and v, with those of float64; flex computes none on a CPU."""
    dtype = inputs[0].dtype
    exact = to_leaves(inputs, torch.float64)
    expected = attention_by_loops(*exact, scores, packing)
    if isinstance(attend, FlexAttention):
        result = attend(*inputs, packing, 0.0)
        assert (result.double() - expected).norm() / expected.norm() < TOLERANCES[dtype]
        return
    ours = to_leaves(inputs, dtype)
    result = attend(*ours, packing, 0.0)
    slope = random(*result.shape, seed=9).to(dtype)
    grads, exact_grads = torch.autograd.grad(result, ours, slope), torch.autograd.grad(expected, exact, slope.double())
    for what, got, want in zip(("values", "q", "k", "v"), (result, *grads), (expected, *exact_grads), strict=True):
        assert got.dtype == dtype
        error = float((got.detach().double() - want.detach()).norm() / want.detach().norm())
        assert error < TOLERANCES[dtype], f"{what}: relative error {error:.1e}"


ALWAYS = {(False, 1), (True, 2), (False, 4)}
"""Packed or not, and groups of key-value heads; -m slow: the others."""


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("kernel", KERNELS)
@scores_of_all_kinds
@pytest.mark.parametrize(
    ("packed", "groups"),
    [
        pytest.param(*case, id=f"{'packed-' * case[0]}{case[1]}", marks=() if case in ALWAYS else pytest.mark.slow)
        for case in itertools.product((False, True), (1, 2, 4))
    ],
)
def test_kernels_equal_attention_by_loops(
    kernel: str, scores: Scores, packed: bool, groups: int, dtype: torch.dtype
) -> None:
    attend = KERNELS[kernel](scores)
    q, k, v = (
        random(B, heads, S, HEAD_SIZE, seed=seed).to(dtype) for seed, heads in ((1, HEADS), (2, groups), (3, groups))
    )
    inputs = q, k, v
    packing = packing_of(PACKED) if packed else None
    assert_equals_loops(attend, inputs, scores, packing)
    if dtype == torch.float32:
        assert_equals_loops(attend, inputs, scores, packing)  # from the cached mask
    # and the next microbatch, packed otherwise
    for rows in ([[12], [3, 3, 6]], [[1, 1, 10], [4, 1, 1, 2, 1, 1, 1, 1]]) if packed else ():
        assert_equals_loops(attend, inputs, scores, packing_of(rows))


@pytest.mark.parametrize("kernel", ["sdpa", "sdpa by document"])
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_scores_of_ten_thousand_neither_overflow_nor_lose_gradients(kernel: str, dtype: torch.dtype) -> None:
    q, k, v = (random(1, 2, S, HEAD_SIZE, seed=seed) for seed in (1, 2, 3))
    ours = to_leaves((q * 1e4, k, v), dtype)
    packing = packing_of([[5, 1, 6]])
    result = KERNELS[kernel](Scores())(*ours, packing, 0.0)
    expected = attention_by_loops(*ours, Scores(), packing).detach()
    error = (result.detach().double() - expected).norm() / expected.norm()
    assert error < TOLERANCES[dtype]
    result.sum().backward()
    assert all(x.grad is not None and x.grad.isfinite().all() for x in ours)


def test_eight_thousand_documents_in_a_row_see_only_themselves() -> None:
    """Of one and two tokens in turn; the longest, of 300, last."""
    lengths = [1, 2] * 4096 + [300]
    packing = packing_of([lengths])
    q, k, v = (random(1, 1, sum(lengths), 4, seed=seed).requires_grad_() for seed in (1, 2, 3))
    result = SDPAttention(by_document=True)(q, k, v, packing, 0.0)
    result.square().sum().backward()
    pairs = [x.detach()[0, 0, :-300].double().view(4096, 3, 4).requires_grad_() for x in (q, k, v)]
    alone, second = pairs[2][:, :2], pairs[1][:, 1:] @ pairs[0][:, 2:].transpose(1, 2) / 2
    expected = torch.cat([alone, second.softmax(1).transpose(1, 2) @ pairs[2][:, 1:]], dim=1)
    expected.square().sum().backward()
    torch.testing.assert_close(result[0, 0, :-300].view(4096, 3, 4).double(), expected, rtol=0, atol=1e-6)
    for ours, exact in zip((q, k, v), pairs, strict=True):
        assert ours.grad is not None
        torch.testing.assert_close(ours.grad[0, 0, :-300].view(4096, 3, 4).double(), exact.grad, rtol=0, atol=1e-5)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("kernel", KERNELS)
@scores_of_all_kinds
@pytest.mark.parametrize(
    ("packed", "num_queries"),
    [(False, 1), (True, 5), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((True, 1), (False, 5)))],
)
def test_queries_shorter_than_keys_are_the_last_tokens(
    kernel: str, scores: Scores, packed: bool, num_queries: int
) -> None:
    packing = packing_of(PACKED) if packed else None
    if packing is not None:
        packing = Packing(packing.positions_BS[:, -num_queries:], packing.starts_BS[:, -num_queries:])
    q = random(B, HEADS, num_queries, HEAD_SIZE, seed=1)
    k, v = (random(B, 2, S, HEAD_SIZE, seed=seed) for seed in (2, 3))
    expected = attention_by_loops(q, k, v, scores, packing)
    attend = KERNELS[kernel](scores)
    torch.testing.assert_close(attend(q, k, v, packing, 0.0).double(), expected, rtol=0, atol=2e-6)
    whole = random(B, HEADS, S, HEAD_SIZE, seed=4)  # a mask of another length does not stay
    full_packing = packing_of(PACKED) if packed else None
    expected = attention_by_loops(whole, k, v, scores, full_packing)
    torch.testing.assert_close(attend(whole, k, v, full_packing, 0.0).double(), expected, rtol=0, atol=2e-6)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_sees_documents_that_moved_in_place() -> None:
    q, k, v = (random(B, HEADS, S, HEAD_SIZE, seed=seed) for seed in (1, 2, 3))
    attend, packing = FlexAttention(compiled=False), packing_of(PACKED)
    attend(q, k, v, packing, 0.0)
    packing.starts_BS.copy_(packing_of([[12], [3, 9]]).starts_BS)
    expected = attention_by_loops(q, k, v, Scores(), packing)
    torch.testing.assert_close(attend(q, k, v, packing, 0.0).double(), expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float64, 1e-14), (torch.float32, 2e-6), (torch.bfloat16, 1e-2), (torch.float16, 2e-3)]
)
@scores_of_all_kinds
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_blockwise_attention_equals_float64(
    dtype: torch.dtype, bound: float, scores: Scores, groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values and gradients, over blocks of which the last is shorter, of inputs that lie by token."""
    monkeypatch.setattr(blockwise, "ATTENTION_QUERIES", 5)
    inputs = q, k, v = [
        random(S, B, heads, HEAD_SIZE, seed=seed).to(dtype).permute(1, 2, 0, 3).requires_grad_()
        for seed, heads in enumerate((HEADS, groups, groups))
    ]
    grad = random(B, HEADS, S, HEAD_SIZE, seed=5).to(dtype)
    mask = AttentionMask(Scores(scores.slopes)).get(None, S, S, dtype, CPU)
    context = blockwise.attend_blockwise(q, k, v, mask, scale=scores.scale, cap=scores.cap, window=scores.window)
    exact_inputs = exact_q, exact_k, exact_v = [x.detach().double().requires_grad_() for x in inputs]
    exact = attention_by_loops(exact_q, exact_k, exact_v, scores, None)
    torch.testing.assert_close(context.detach().double(), exact.detach(), rtol=0, atol=3 * bound)
    for actual, expected in zip(
        torch.autograd.grad(context, inputs, grad), torch.autograd.grad(exact, exact_inputs, grad.double()), strict=True
    ):
        assert actual.dtype == dtype
        assert ((actual.double() - expected).norm() / expected.norm()).item() < bound


def test_blockwise_attention_has_few_shapes_of_products() -> None:
    """oneDNN keeps a kernel of nearly 1 MB for each shape."""
    assert max(device_cpu.BLOCKWISE_LENGTHS) / blockwise.ATTENTION_QUERIES <= 16


def test_blockwise_attention_rounds_no_score_to_16_bits() -> None:
    """Its errors are those of rounded inputs and outputs, also where scores reach 30."""
    q, k, v = [random(1, 2, 70, 64, seed=seed).bfloat16().requires_grad_() for seed in range(3)]
    sharp_q, grad = (8 * q.detach()).requires_grad_(), random(1, 2, 70, 64, seed=5).bfloat16()
    context = blockwise.attend_blockwise(sharp_q, k, v, None)
    exact_inputs = exact_q, exact_k, exact_v = [x.detach().double().requires_grad_() for x in (sharp_q, k, v)]
    exact = attention_by_loops(exact_q, exact_k, exact_v, Scores(), None)
    actual = (context, *torch.autograd.grad(context, (sharp_q, k, v), grad))
    for x, expected in zip(actual, (exact, *torch.autograd.grad(exact, exact_inputs, grad.double())), strict=True):
        assert ((x.double() - expected).norm() / expected.norm()).item() < 0.004


@pytest.mark.parametrize(
    ("length", "dropout", "backend"),
    [(8, 0.0, "auto"), (7, 0.0, "auto"), (10, 0.0, "auto"), (8, 0.1, "auto"), (8, 0.0, "sdpa")],
)
def test_blockwise_attention_is_taken_where_it_is_faster(
    length: int, dropout: float, backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "BLOCKWISE_LENGTHS", range(8, 10))
    monkeypatch.setattr(kernels, "is_faster", lambda dtype: dtype == torch.float32)
    calls: list[int] = []

    def note(q: Tensor, *_: Any, **__: Any) -> Tensor:
        calls.append(q.shape[2])
        return q

    monkeypatch.setattr(kernels, "attend_blockwise", note)
    kernel = build_kernel(ModelConfig(attention_backend=backend), ParallelContext.single(), packed=False)
    q = random(1, 2, length, 8)
    kernel(q, q, q, None, dropout)
    kernel(q.bfloat16(), q.bfloat16(), q.bfloat16(), None, dropout)  # said to be slower
    kernel(q[:, :, -1:], q, q, None, dropout)  # with a cache
    assert calls == ([8] if (length, dropout, backend) == (8, 0.0, "auto") else [])


def test_heads_of_a_group_share_their_key_head() -> None:
    x = torch.arange(2.0).reshape(1, 2, 1, 1)
    assert repeat_heads(x, 6).flatten().tolist() == [0, 0, 0, 1, 1, 1]
    assert repeat_heads(x, 2) is x


def test_dropout_reaches_the_kernel_of_sdpa() -> None:
    q, k, v = (random(B, HEADS, S, HEAD_SIZE, seed=seed) for seed in (1, 2, 3))
    attend = SDPAttention()
    plain = attend(q, k, v, None, 0.0)
    torch.manual_seed(0)
    assert not torch.allclose(attend(q, k, v, None, 0.5), plain)


# ---------------------------------------------------------------------------------------------------------------------
# The choice


@pytest.mark.parametrize(
    ("device", "position", "packed", "dropout", "kernel"),
    [
        ("cpu", "learned", False, 0.1, "SDPAttention"),
        ("cpu", "alibi", True, 0.0, "SDPAttention"),
        ("cuda", "rope", False, 0.0, "SDPAttention"),
        ("cuda", "alibi", False, 0.0, "FlexAttention"),
        ("cuda", "rope", True, 0.0, "FlexAttention"),
        ("cuda", "alibi", False, 0.1, "FlexAttention"),
        ("cuda", "rope", False, 0.1, "SDPAttention"),  # its flash kernel has dropout
    ],
)
def test_kernel_is_chosen_by_device_and_need(
    device: str, position: Any, packed: bool, dropout: float, kernel: str
) -> None:
    model = ModelConfig(position_embedding_type=position, attention_dropout=dropout)
    ctx = ParallelContext(device=torch.device(device))
    assert type(build_kernel(model, ctx, packed=packed)).__name__ == kernel


def test_dropout_takes_sdpa_where_torch_is_too_old_for_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from torch.nn.attention import flex_attention

    monkeypatch.delattr(flex_attention, "AuxRequest")
    ctx = ParallelContext(device=torch.device("cuda"))
    dropping, plain = (ModelConfig(position_embedding_type="alibi", attention_dropout=rate) for rate in (0.1, 0.0))
    assert isinstance(build_kernel(plain, ctx, packed=False), FlexAttention)
    assert caplog.text == ""
    assert isinstance(build_kernel(dropping, ctx, packed=False), SDPAttention)
    assert "has no dropout in torch" in caplog.text
    wanted = ModelConfig(attention_backend="flex", attention_dropout=0.1)
    with pytest.raises(
        ConfigError, match=r"attention_dropout=0\.1, but flex_attention has no dropout in torch .*; install torch 2\.9"
    ):
        build_kernel(wanted, ctx, packed=False)


def test_heads_too_small_for_flex_take_sdpa() -> None:
    ctx = ParallelContext(device=torch.device("cuda"))
    model = ModelConfig(position_embedding_type="alibi", attention_dropout=0.0, kv_channels=8)
    assert isinstance(build_kernel(model, ctx, packed=True), SDPAttention)


def test_prompts_of_many_lengths_compile_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """flex_attention is compiled for each shape."""
    monkeypatch.setattr("megatron.models.attention.layer.build_kernel", lambda *_, **__: FlexAttention(compiled=False))
    assert isinstance(Shared(parse_arguments([])[0], ParallelContext.single()).cores[None].prompt_kernel, SDPAttention)


def test_kernel_asked_for_is_taken() -> None:
    ctx = ParallelContext(device=torch.device("cuda"))
    model = ModelConfig(position_embedding_type="alibi", attention_dropout=0.0, attention_backend="sdpa")
    assert isinstance(build_kernel(model, ctx, packed=True), SDPAttention)
    for dropout in (0.0, 0.1):
        model = ModelConfig(attention_dropout=dropout, attention_backend="flex")
        assert isinstance(build_kernel(model, ctx, packed=False), FlexAttention)


def test_a_window_costs_what_its_area_says() -> None:
    """An eighth of the tokens: less than 0.3 of the products of all before each, forward and backward."""

    def flops(window: int | None) -> int:
        q, k, v = (random(1, 1, 4096, 4, seed=seed).requires_grad_() for seed in range(3))
        with FlopCounterMode(display=False) as counter:
            blockwise.attend_blockwise(q, k, v, None, window=window).sum().backward()
        return counter.get_total_flops()

    assert flops(512) < 0.3 * flops(None)
