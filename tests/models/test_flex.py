"""Dropout within flex_attention: against the mask in memory, by numpy's integers; and how random the mask is."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from megatron.models.attention import flex
from megatron.models.attention.flex import FlexAttention, attend_dropped, draw_seeds, is_kept
from megatron.models.attention.layer import SelfAttention
from megatron.models.attention.scores import Scores
from megatron.models.positions import Packing, alibi_slopes
from megatron.parallel.context import ParallelContext

B, HEADS, S, HEAD_SIZE = 2, 4, 12, 16
Inputs = tuple[Tensor, Tensor, Tensor]
"""Queries [B, n, S, d], keys and values [B, k, S, d]."""

SCORES = {
    "": Scores(),
    "alibi": Scores(alibi_slopes(HEADS)),
    "window": Scores(window=3),
    "all": Scores(alibi_slopes(HEADS), window=4, scale=0.5, cap=1.5),
}
STARTS = [[0] * 5 + [5] + [6] * 6, [0] * 12]

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


@pytest.fixture
def plain_flex(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own formulas of flex_attention, without a tracer, and with gradients on a CPU.

    torch refuses these there since it has no compiled kernel for them.
    """
    from torch.nn.attention import flex_attention

    monkeypatch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)


def hashed(x: np.ndarray) -> np.ndarray:
    """C. Wellons' lowbias32, as published: of unsigned integers."""
    x = x ^ (x >> np.uint32(16))
    x = x * np.uint32(0x7FEB352D)
    x = x ^ (x >> np.uint32(15))
    x = x * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))


def kept_of(seeds: Tensor, rate: float, queries: int, keys: int) -> Tensor:
    """[B, n, Q, K] boolean from seeds [B, 3 n]."""
    words = seeds.cpu().numpy().view(np.uint32).reshape(seeds.shape[0], 3, -1, 1)
    query, key = np.arange(queries, dtype=np.uint32), np.arange(keys, dtype=np.uint32)
    multiplier, offset, of_key = hashed(words[:, 0] + query), hashed(words[:, 1] + query), hashed(words[:, 2] + key)
    # signed and unsigned numbers begin at opposite ends
    bits = multiplier[..., None] * of_key[..., None, :] + offset[..., None] + np.uint32(2**31)
    return torch.from_numpy(bits / 2**32 >= rate)


def attention_with_mask(inputs: Inputs, scores: Scores, packing: Packing | None, kept: Tensor, rate: float) -> Tensor:
    """Dropped probabilities times values, everything in memory, in the dtype of the inputs."""
    q, k, v = inputs
    groups, (num_queries, num_keys) = q.shape[1] // k.shape[1], kept.shape[2:]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    logits = q @ k.mT * (scores.scale or 1 / math.sqrt(q.shape[3]))
    if scores.cap is not None:
        logits = scores.cap * torch.tanh(logits / scores.cap)
    key = torch.arange(num_keys, device=q.device)
    query = key[num_keys - num_queries :, None]
    if scores.slopes is not None:
        logits = logits + scores.slopes.to(q)[:, None, None] * (key - query)
    seen = (key <= query) & (key > query - (scores.window or num_keys))
    if packing is not None:
        seen = seen & (key >= packing.starts_BS[:, None, :, None])
    probabilities = logits.masked_fill(~seen, -math.inf).softmax(-1)
    return (probabilities * kept.to(q)) @ v / (1 - rate)


def random_inputs(groups: int = HEADS, *, size: int = HEAD_SIZE, length: int = S) -> Inputs:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(B, heads, length, size, generator=generator) for heads in (HEADS, groups, groups))
    return q, k, v


def leaves(inputs: Inputs, dtype: torch.dtype) -> Inputs:
    q, k, v = (x.detach().to(dtype, copy=True).requires_grad_() for x in inputs)
    return q, k, v


def packing_of(starts: list[list[int]]) -> Packing:
    starts_BS = torch.tensor(starts)
    return Packing(torch.arange(starts_BS.shape[1]) - starts_BS, starts_BS)


def with_gradients(result: Tensor, inputs: Inputs) -> Iterator[tuple[str, Tensor]]:
    generator = torch.Generator().manual_seed(9)
    slope = torch.randn(result.shape, generator=generator, dtype=torch.float64).to(result)
    yield "values", result.detach()
    yield from zip("qkv", torch.autograd.grad(result, inputs, slope), strict=True)


def largest_error(attend: Any, inputs: Inputs, scores: Scores, packing: Packing | None, rate: float) -> float:
    """Of values and of gradients of q, k and v, relative to float64 with the mask that the same seeds give."""
    exact = leaves(inputs, torch.float64)
    device = inputs[0].device
    torch.manual_seed(7)
    seeds = draw_seeds(inputs[0])
    kept = kept_of(seeds, rate, inputs[0].shape[2], inputs[1].shape[2]).to(device)
    expected = dict(with_gradients(attention_with_mask(exact, scores, packing, kept, rate), exact))
    torch.manual_seed(7)
    found = dict(with_gradients(attend(*inputs, packing, rate), inputs))
    errors = [(found[what].double() - expected[what]).norm() / expected[what].norm() for what in expected]
    assert all(x.isfinite().all() for x in found.values())
    return max(map(float, errors))


# ---------------------------------------------------------------------------------------------------------------------
# Values and gradients


@pytest.mark.usefixtures("plain_flex")
@pytest.mark.parametrize("scores", SCORES.values(), ids=SCORES.keys())
@pytest.mark.parametrize(("packed", "groups"), [(False, HEADS), (True, 2)])
def test_flex_with_dropout_equals_a_mask_in_memory(scores: Scores, packed: bool, groups: int) -> None:
    packing = packing_of(STARTS) if packed else None
    attend, inputs = FlexAttention(scores, compiled=False), random_inputs(groups)
    assert largest_error(attend, leaves(inputs, torch.float64), scores, packing, 0.3) < 1e-12
    assert largest_error(attend, leaves(inputs, torch.float32), scores, packing, 0.3) < 2e-6


@pytest.mark.usefixtures("plain_flex")
def test_queries_all_of_whose_keys_are_dropped_attend_to_nothing() -> None:
    inputs = leaves(random_inputs(), torch.float64)
    attend, rate = FlexAttention(SCORES["alibi"], compiled=False), 0.9
    torch.manual_seed(7)
    context = attend(*inputs, None, rate)
    torch.manual_seed(7)
    sees_none = ~kept_of(draw_seeds(inputs[0]), rate, S, S).tril().any(-1)
    assert sees_none.sum() > 10
    assert torch.equal((context == 0).all(-1), sees_none)
    assert largest_error(attend, inputs, SCORES["alibi"], None, rate) < 1e-12


@pytest.mark.usefixtures("plain_flex")
def test_a_later_query_keeps_what_its_seeds_say() -> None:
    """Queries are counted from the first of them, also where keys come before."""
    q, k, v = (x.double() for x in random_inputs())
    attend = FlexAttention(SCORES["alibi"], compiled=False)
    torch.manual_seed(7)
    context = attend(q[:, :, -5:], k, v, None, 0.3)
    torch.manual_seed(7)
    kept = kept_of(draw_seeds(q), 0.3, 5, S)
    expected = attention_with_mask((q[:, :, -5:], k, v), SCORES["alibi"], None, kept, 0.3)
    torch.testing.assert_close(context, expected, rtol=0, atol=1e-12)


@pytest.mark.usefixtures("plain_flex")
def test_without_dropout_nothing_is_drawn_and_the_result_is_torchs() -> None:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    inputs, slopes = random_inputs(), alibi_slopes(HEADS)
    before = torch.get_rng_state()
    context = FlexAttention(SCORES["alibi"], compiled=False)(*inputs, None, 0.0)
    assert torch.equal(torch.get_rng_state(), before)
    causal = create_block_mask(lambda _b, _h, query, key: key <= query, None, None, S, S, device="cpu")
    expected = flex_attention(
        *inputs, score_mod=lambda score, _b, head, query, key: score + slopes[head] * (key - query), block_mask=causal
    )
    assert torch.equal(context, expected)  # type: ignore[arg-type]


@pytest.mark.usefixtures("plain_flex")
def test_the_mean_over_seeds_is_attention_without_dropout() -> None:
    """Of 512 samples that differ in their seeds alone: within 5 of their standard errors."""
    q, k, v = (x[:1].double().expand(512, -1, -1, -1) for x in random_inputs())
    attend = FlexAttention(SCORES["alibi"], compiled=False)
    torch.manual_seed(0)
    dropped, whole = attend(q, k, v, None, 0.25), attend(q[:1], k[:1], v[:1], None, 0.0)
    distance = (dropped.mean(0) - whole[0]) / (dropped.std(0) / math.sqrt(512))
    assert distance.abs().max() < 5
    assert distance.std() < 1.3  # a factor of 1.05 would be 4 or more in many places
    assert dropped.std(0).min() > 0


def test_recomputation_drops_the_same_keys_and_other_seeds_compile_nothing_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_: None)
    counter = CompileCounterWithBackend("aot_eager")
    ctx, attend = ParallelContext.single(), FlexAttention(SCORES["alibi"], compiled=False)
    attend._dropping_kernel = torch.compile(attend_dropped, backend=counter, dynamic=False, fullgraph=True)
    streams = ctx.state.streams

    def core(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with streams.sharded():
            return attend(q, k, v, None, 0.3)

    found = []
    for recomputes, samples in ((False, 0), (True, 0), (False, 1)):
        streams.seed_step(1, samples, ctx)
        inputs = leaves(random_inputs(), torch.float32)
        context = streams.recomputed(core, *inputs) if recomputes else core(*inputs)
        torch.rand(3)  # the next layer draws too
        found.append(list(with_gradients(context, inputs)))
    for (name, kept), (_, recomputed), (_, next_step) in zip(*found, strict=True):
        assert torch.equal(kept, recomputed), name
        assert not torch.allclose(kept, next_step)
    assert counter.frame_count == 1


def test_tensor_parallel_ranks_and_layers_drop_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Tensor] = []

    def note(q: Tensor, _k: Tensor, _v: Tensor, seeds: Tensor, *_: Any, **__: Any) -> Tensor:
        drawn.append(seeds)
        return q

    monkeypatch.setattr(flex, "attend_dropped", note)
    kernel = FlexAttention(compiled=False)
    for rank in (0, 1, 0):
        ctx = ParallelContext(tensor_size=2, rank=rank)
        ctx.state.streams.seed_step(1, 0, ctx)
        layer: Any = SimpleNamespace(
            ctx=ctx, rotary=None, kernel=kernel, dropout=0.1, training=True, records_above=None
        )
        x = torch.zeros(S, B, HEADS, HEAD_SIZE)
        SelfAttention._core(layer, x, x, x, None)
        SelfAttention._core(layer, x, x, x, None)  # the next layer
    assert torch.equal(drawn[0], drawn[4])
    assert torch.equal(drawn[1], drawn[5])
    assert len({int(word) for seeds in drawn[:4] for word in seeds.flatten()}) == 4 * B * 3 * HEADS


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 4e-3), (torch.bfloat16, 1.5e-2)], ids=str)
@pytest.mark.parametrize("scores", [SCORES["alibi"], SCORES["all"]], ids=["alibi", "all"])
@pytest.mark.parametrize(("packed", "groups"), [(False, HEADS), (True, 2)])
def test_flex_with_dropout_on_cuda_equals_float64(
    scores: Scores, packed: bool, groups: int, dtype: torch.dtype, bound: float
) -> None:
    length = 300
    packing = None
    if packed:
        starts = torch.tensor([[0] * 130 + [130] * 170, [0] * length], device="cuda")
        packing = Packing(torch.arange(length, device="cuda") - starts, starts)
    scores = replace(scores, window=None if scores.window is None else 100)
    q, k, v = (x.cuda() for x in random_inputs(groups, size=64, length=length))
    attend = FlexAttention(scores)
    for rate in (0.1, 0.9):
        assert largest_error(attend, leaves((q, k, v), dtype), scores, packing, rate) < bound


# ---------------------------------------------------------------------------------------------------------------------
# The hash

RATE, ROWS, COLUMNS, STREAMS = 0.1, 384, 512, 16
"""Of masks [STREAMS heads, ROWS queries, COLUMNS keys]."""


@pytest.fixture(scope="module")
def dropped() -> Tensor:
    """Whether keys are dropped, less the rate, in standard deviations: [heads, queries, keys] float64."""
    torch.manual_seed(3)
    return standardised(draw_seeds(torch.empty(1, STREAMS, 1, 1)), RATE)


def standardised(seeds: Tensor, rate: float) -> Tensor:
    head, query, key = torch.meshgrid(
        *(torch.arange(n, dtype=torch.int32) for n in (seeds.shape[1] // 3, ROWS, COLUMNS)), indexing="ij"
    )
    kept = is_kept(seeds, rate, torch.zeros_like(head), head, query, key)
    return ((~kept).double() - rate) / math.sqrt(rate * (1 - rate))


def test_the_hash_is_the_published_one() -> None:
    """And wraps as unsigned numbers do, at the ends of 32 bits too."""
    numbers = np.array([0, 1, 2**31 - 1, 2**31, 2**32 - 1, *range(12345, 2**32, 2**25 + 1)], dtype=np.uint32)
    found = flex._hashed(torch.from_numpy(numbers.view(np.int32)))
    assert np.array_equal(found.numpy().view(np.uint32), hashed(numbers))


@pytest.mark.parametrize("rate", [0.01, 0.1, 0.5, 0.9])
def test_the_share_of_dropped_keys_is_the_rate(rate: float) -> None:
    torch.manual_seed(5)
    masks = standardised(draw_seeds(torch.empty(1, STREAMS, 1, 1)), rate)
    assert abs(float(masks.sum()) / math.sqrt(masks.numel())) < 4
    by_head = masks.sum((1, 2)) / math.sqrt(ROWS * COLUMNS)
    assert float(by_head.abs().max()) < 4.5


@pytest.mark.parametrize(
    ("heads", "queries", "keys"),
    [(0, 0, 1), (0, 1, 0), (0, 1, 1), (0, 1, -1), (1, 0, 0), (1, 1, 1), (0, 0, 2), (0, 2, 0), (0, 0, 64), (0, 64, 0)],
)
def test_neighbours_are_dropped_independently(heads: int, queries: int, keys: int, dropped: Tensor) -> None:
    shifted = dropped.roll((-heads, -queries, -keys), (0, 1, 2))
    correlation = float((dropped * shifted).sum()) / math.sqrt(dropped.numel())
    assert abs(correlation) < 4.5


def test_squares_of_neighbours_are_dropped_independently(dropped: Tensor) -> None:
    """Sums of a number of the query and one of the key alone would make their product 1."""
    square = dropped[:, 1:, 1:] * dropped[:, 1:, :-1] * dropped[:, :-1, 1:] * dropped[:, :-1, :-1]
    assert abs(float(square.sum())) / math.sqrt(square.numel()) < 4.5


@pytest.mark.parametrize("dim", [1, 2], ids=["keys", "queries"])
def test_counts_of_rows_and_columns_are_binomial(dim: int, dropped: Tensor) -> None:
    """By chi-square."""
    counts = dropped.sum(dim) / math.sqrt(dropped.shape[dim])
    chi_square = float(counts.square().sum())
    assert abs(chi_square - counts.numel()) < 4.5 * math.sqrt(2 * counts.numel())


@pytest.mark.parametrize("dim", [1, 2], ids=["keys", "queries"])
def test_no_two_rows_or_columns_are_alike(dim: int, dropped: Tensor) -> None:
    """Correlations of all pairs within a head: their square is 1 / length on the mean."""
    lines = dropped if dim == 2 else dropped.mT
    products = lines @ lines.mT / math.sqrt(lines.shape[2])
    pairs = products.triu(1)[products.triu(1) != 0]
    assert abs(float(pairs.square().mean()) - 1) < 0.02
    assert float(pairs.abs().max()) < 0.6 * math.sqrt(lines.shape[2])


def test_consecutive_seeds_give_masks_that_differ(dropped: Tensor) -> None:
    """Words that differ by 1, as no generator draws them."""
    words = torch.arange(3 * STREAMS, dtype=torch.int32)[None]
    masks = standardised(words, RATE).flatten(1)
    products = masks @ masks.T / math.sqrt(masks.shape[1])
    pairs = products.triu(1)
    assert float(pairs.abs().max()) < 5
