"""linear_cross_entropy against a dense float64 cross-entropy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import loss as loss_benchmark
from megatron.parallel.chosen_log_probs import log_probs_of
from megatron.parallel.context import ParallelContext
from megatron.parallel.losses import gather_logits, linear_cross_entropy, token_log_probs
from megatron.parallel.operators import block_sizes, products, softmax, weight_gradient
from megatron.parallel.operators.weight_gradient import GradientSum
from megatron.parallel.shards import Shard, alias, shard_of
from tests.parallel import on_ranks
from tests.ranks import RankPools

S, B, H, VOCABULARY = 8, 3, 6, 10
SINGLE = ParallelContext.single()
Array = np.ndarray[Any, Any]


class Batch:
    """Random tokens, and the dense loss with its gradients in float64. Labels touch both ends of the vocabulary."""

    def __init__(
        self,
        vocabulary: int = VOCABULARY,
        seq_length: int = S,
        scale: float = 1.0,
        dtype: torch.dtype = torch.float32,
        smoothing: float = 0.0,
    ) -> None:
        """The numbers of hidden states and weight are those that `dtype` holds."""
        self.smoothing = smoothing
        generator = np.random.default_rng(0)
        self.hidden = generator.standard_normal((seq_length, B, H)).astype(np.float32)
        self.weight = generator.standard_normal((vocabulary, H)).astype(np.float32)
        self.labels = generator.integers(0, vocabulary, (B, seq_length))
        self.labels[0, :2] = 0, vocabulary - 1
        # not ones and zeros alone: an SFT loss weighs its samples
        self.token_weights = generator.random((B, seq_length)).astype(np.float32)
        self.token_weights[1, 2:5] = 0.0
        for name in ("hidden", "weight"):
            setattr(self, name, torch.from_numpy(getattr(self, name)).to(dtype).float().numpy())
        hidden, weight = (torch.from_numpy(x).double().requires_grad_() for x in (self.hidden, self.weight))
        self.logits = hidden @ weight.t()
        flat = self.logits.flatten(0, 1), self._sequence_first(self.labels)
        self.log_probs = -F.cross_entropy(*flat, reduction="none").view(seq_length, B).t()
        token_losses = F.cross_entropy(*flat, reduction="none", label_smoothing=smoothing)
        self.loss = (token_losses * self._sequence_first(self.token_weights)).sum()
        self.grad_hidden, self.grad_weight = torch.autograd.grad(self.loss * scale, (hidden, weight))

    @staticmethod
    def _sequence_first(x_BS: Array) -> Tensor:
        return torch.from_numpy(x_BS).t().flatten()

    def ours(self, dtype: torch.dtype = torch.float32, padded: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """hidden, weight, loss."""
        hidden = torch.from_numpy(self.hidden).to(dtype).requires_grad_()
        weight = on_ranks.vocabulary_weight(self.weight, padded or self.weight.shape[0], SINGLE)
        weight.data = weight.data.to(dtype)
        loss = linear_cross_entropy(
            hidden, weight, torch.from_numpy(self.labels), torch.from_numpy(self.token_weights), SINGLE
        )
        return hidden, weight, loss


def assert_near(actual: Any, expected: Tensor, tolerance: float = 2e-6) -> None:
    expected = expected.detach()
    actual = torch.as_tensor(actual).detach().double()
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance * float(expected.abs().max()))


RANKS = [(1, False), (2, False), (2, True), (4, False), (4, True)]


def on_all_ranks(
    ranks: RankPools, tp: int, sequence_parallel: bool, batch: Batch, chunk_tokens: int, dtype: str
) -> list[dict[str, Any]]:
    # 32 rows for 10 tokens: of four ranks the second holds padding too, the last two nothing else
    arguments = (tp, sequence_parallel, batch.weight, 32, batch.hidden, batch.labels, batch.token_weights)
    function = on_ranks.cross_entropy
    options = (chunk_tokens, 3.0, dtype, batch.smoothing)
    return [function(*arguments, *options)] if tp == 1 else ranks(tp)(function, *arguments, *options)


@pytest.mark.parametrize("chunk_tokens", [24, 5, 1], ids=["whole", "chunks", "one_token_a_chunk"])
@pytest.mark.parametrize(
    ("tp", "sequence_parallel", "smoothing"),
    [
        # smoothed or not, in turn; -m slow: both
        pytest.param(*where, smoothing, marks=pytest.mark.slow if (place + number) % 2 else ())
        for place, where in enumerate(RANKS)
        for number, smoothing in enumerate((0.0, 0.3))
    ],
)
def test_loss_and_gradients_equal_dense(
    ranks: RankPools, tp: int, sequence_parallel: bool, chunk_tokens: int, smoothing: float
) -> None:
    """Padding is no part of the vocabulary over which a label is smoothed."""
    batch = Batch(scale=3.0, smoothing=smoothing)
    parts = on_all_ranks(ranks, tp, sequence_parallel, batch, chunk_tokens, "float32")
    for part in parts:
        assert_near(part["loss"], batch.loss)
        assert_near(part["log_probs"], batch.log_probs)
        assert_near(part["logits"], batch.logits)
    for way in range(2):  # computed with the sum, and from the log-probabilities of the tokens
        hidden = [part["hidden"][way] for part in parts]
        assert_near(np.concatenate(hidden) if sequence_parallel else hidden[0], batch.grad_hidden)
        gradient = np.concatenate([part["weight"][way] for part in parts])
        assert_near(gradient[:VOCABULARY], batch.grad_weight)
        assert not gradient[VOCABULARY:].any()
    assert [part["own_tokens"] for part in parts] == {1: [10], 2: [10, 0], 4: [8, 2, 0, 0]}[tp]


@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 1e-2), ("float16", 1.5e-3)])
@pytest.mark.parametrize(("tp", "sequence_parallel"), [(1, False), (2, True), (4, False)])
def test_16_bit_gradients_are_near_dense(
    ranks: RankPools, tp: int, sequence_parallel: bool, dtype: str, tolerance: float
) -> None:
    for chunk_tokens, smoothing in ((24, 0.0), (5, 0.0), (24, 0.3)):
        batch = Batch(scale=3.0, dtype=getattr(torch, dtype), smoothing=smoothing)
        parts = on_all_ranks(ranks, tp, sequence_parallel, batch, chunk_tokens, dtype)
        for part in parts:
            assert_near(part["loss"], batch.loss, tolerance)
            assert_near(part["log_probs"], batch.log_probs, tolerance)
        for way in range(2):
            hidden = [part["hidden"][way] for part in parts]
            assert_near(np.concatenate(hidden) if sequence_parallel else hidden[0], batch.grad_hidden, tolerance)
            gradient = np.concatenate([part["weight"][way] for part in parts])
            assert_near(gradient[:VOCABULARY], batch.grad_weight, tolerance)


@pytest.mark.parametrize("least", [1, 2, 11, 12, 13, 23, 24, 25])
def test_the_result_does_not_depend_on_the_chunks(monkeypatch: pytest.MonkeyPatch, least: int) -> None:
    batch = Batch()  # 24 tokens
    monkeypatch.setattr(block_sizes, "least_tokens", lambda _: least)
    hidden, weight, loss = batch.ours()
    loss.backward()
    assert_near(loss, batch.loss)
    assert_near(hidden.grad, batch.grad_hidden)
    assert_near(weight.grad, batch.grad_weight)


def test_chunks_are_neither_short_nor_long() -> None:
    assert block_sizes.least_tokens(512) == 1024
    assert block_sizes.least_tokens(1536) == 1536
    assert block_sizes.least_tokens(8192) == 2048
    for tokens in [0, 1, 1023, 1024, 1025, 2047, 2048, 2049, 3000, 16384]:
        sizes = [part.stop - part.start for part in block_sizes.chunks(tokens, 512)]
        assert sum(sizes) == tokens
        assert all(size < 2048 for size in sizes)
        # even, so that none is a short remainder
        assert tokens < 1024 or max(sizes) - min(sizes) < len(sizes)
        assert tokens < 1024 or min(sizes) >= 1024 - len(sizes)


@pytest.mark.parametrize("least", [24, 5])
def test_gradients_equal_finite_differences(monkeypatch: pytest.MonkeyPatch, least: int) -> None:
    monkeypatch.setattr(block_sizes, "least_tokens", lambda _: least)
    batch = Batch()
    hidden = torch.from_numpy(batch.hidden).double().requires_grad_()
    weight = on_ranks.vocabulary_weight(batch.weight.astype(np.float64), 12, SINGLE)
    labels, token_weights = torch.from_numpy(batch.labels), torch.from_numpy(batch.token_weights).double()

    def total(hidden: Tensor, rows: Tensor) -> Tensor:
        rows.shard = shard_of(weight)  # type: ignore[attr-defined]
        return linear_cross_entropy(hidden, rows, labels, token_weights, SINGLE)

    def log_probs(hidden: Tensor, rows: Tensor) -> Tensor:
        rows.shard = shard_of(weight)  # type: ignore[attr-defined]
        return token_log_probs(hidden, rows, labels, SINGLE).exp()

    for function in (total, log_probs):
        assert torch.autograd.gradcheck(function, (hidden, weight))


def test_padding_takes_no_part_in_the_softmax() -> None:
    batch = Batch()
    _, padded_weight, _ = batch.ours(padded=16)
    padded_weight.data[VOCABULARY:] = 100.0  # would drown every token
    tokens = torch.from_numpy(batch.labels), torch.from_numpy(batch.token_weights)
    hidden = torch.from_numpy(batch.hidden)
    assert_near(linear_cross_entropy(hidden, padded_weight, *tokens, SINGLE), batch.loss)
    assert gather_logits(hidden, padded_weight, SINGLE).shape == (S, B, VOCABULARY)


def test_a_token_of_weight_zero_counts_for_nothing() -> None:
    batch = Batch()
    _, _, loss = batch.ours()
    batch.labels[1, 2:5] = -100, VOCABULARY, 0  # whatever stands there, tokens or not
    hidden, _, other = batch.ours()
    other.backward()
    assert torch.equal(loss, other)
    assert hidden.grad is not None
    assert not hidden.grad[2:5, 1].any()


def test_large_logits_do_not_overflow() -> None:
    batch = Batch()
    batch.hidden *= 1e3
    hidden, weight, loss = batch.ours()
    loss.backward()
    dense = F.cross_entropy(
        (hidden.detach().double() @ weight.detach().double().t()).flatten(0, 1),
        torch.from_numpy(batch.labels).t().flatten(),
        reduction="none",
    )
    assert_near(loss, torch.dot(dense, torch.from_numpy(batch.token_weights).double().t().flatten()))
    assert hidden.grad is not None
    assert torch.isfinite(hidden.grad).all()


def test_bfloat16_is_close_to_float32_of_the_same_numbers() -> None:
    batch = Batch()
    for name in ("hidden", "weight"):  # numbers that bfloat16 holds exactly
        setattr(batch, name, torch.from_numpy(getattr(batch, name)).bfloat16().float().numpy())
    hidden, weight, loss = batch.ours(torch.bfloat16)
    exact_hidden, exact_weight, exact_loss = batch.ours()
    loss.backward()
    exact_loss.backward()
    assert loss.dtype == torch.float32
    assert_near(loss, exact_loss.double(), tolerance=2e-2)
    for ours, exact in ((hidden, exact_hidden), (weight, exact_weight)):
        assert ours.grad is not None
        assert exact.grad is not None
        assert ours.grad.dtype == torch.bfloat16
        assert_near(ours.grad, exact.grad.double(), tolerance=2e-2)


def test_float16_gradients_of_small_token_weights_do_not_vanish() -> None:
    # a token weighs 1 / loss tokens of the batch; the loss scale that lifts it comes only in backward
    batch, scale = Batch(vocabulary=500), 2.0**16
    batch.token_weights *= 2.0**-20
    hidden, weight, loss = batch.ours(torch.float16)
    (loss * scale).backward()
    exact_hidden, exact_weight, exact_loss = batch.ours()
    (exact_loss * scale).backward()
    for ours, exact in ((hidden, exact_hidden), (weight, exact_weight)):
        assert ours.grad is not None
        assert exact.grad is not None
        assert_near(ours.grad, exact.grad.double(), tolerance=1e-2)


def test_a_factor_of_the_loss_is_not_rounded_to_16_bits() -> None:
    # bfloat16 has 0.33398 for 1/3: every gradient below the output layer would be 0.2 % too large
    batch = Batch(dtype=torch.bfloat16)
    whole, _, loss = batch.ours(torch.bfloat16)
    loss.backward()
    third, _, loss = batch.ours(torch.bfloat16)
    (loss / 3).backward()
    assert whole.grad is not None
    assert third.grad is not None
    g, h = whole.grad.double().flatten(), third.grad.double().flatten()
    assert float(g @ h / (g @ g)) == pytest.approx(1 / 3, rel=5e-4)


class Sum(GradientSum):
    """Float32 memory with the remains of an earlier step."""

    def __init__(self, weight: Tensor, loss_gradient: float) -> None:
        self.total = torch.full_like(weight, torch.nan, dtype=torch.float32, requires_grad=False)
        self.loss_gradient, self.has_gradient, self.num_closed = loss_gradient, False, 0

    def open(self) -> tuple[Tensor, bool]:
        had_gradient, self.has_gradient = self.has_gradient, True
        return self.total, had_gradient

    def close(self) -> None:
        self.num_closed += 1


def summed(weight: Tensor, batch: Batch, factor: float) -> tuple[Tensor, Tensor]:
    """hidden and loss of a microbatch, whose backward pass starts with `factor`."""
    hidden = torch.from_numpy(batch.hidden).to(weight.dtype).requires_grad_()
    loss = linear_cross_entropy(
        hidden,
        alias(weight),
        torch.from_numpy(batch.labels),
        torch.from_numpy(batch.token_weights),
        SINGLE,
        is_total=True,
    )
    (loss * factor).backward()
    return hidden, loss


@pytest.mark.parametrize("least", [24, 5], ids=["whole", "chunks"])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 6e-3)], ids=["float32", "bfloat16"]
)
def test_gradients_are_added_to_the_optimizers_sum(
    monkeypatch: pytest.MonkeyPatch, least: int, dtype: torch.dtype, tolerance: float
) -> None:
    """Three microbatches, of which DeepSpeed takes the mean; weights near zero gain nothing from 16-bit remains."""
    monkeypatch.setattr(block_sizes, "least_tokens", lambda _: least)
    batch = Batch(scale=1 / 3, dtype=dtype)
    weight = on_ranks.vocabulary_weight(batch.weight, 16, SINGLE)
    weight.data = weight.data.to(dtype)
    weight.gradient_sum = into = Sum(weight, 1 / 3)  # type: ignore[attr-defined]
    for number in range(1, 4):
        hidden, loss = summed(weight, batch, 1 / 3)
        assert_near(loss, batch.loss, 2e-6 if dtype == torch.float32 else 1e-3)
        assert hidden.grad is not None
        assert_near(hidden.grad, batch.grad_hidden, 2e-6 if dtype == torch.float32 else 1e-2)
        assert_near(into.total[:VOCABULARY], number * batch.grad_weight, tolerance)
        assert not into.total[VOCABULARY:].any()
        assert into.num_closed == number
    assert weight.grad is None


@pytest.mark.parametrize("least", [24, 5], ids=["whole", "chunks"])
def test_a_factor_that_the_sum_does_not_expect_shows(monkeypatch: pytest.MonkeyPatch, least: int) -> None:
    monkeypatch.setattr(block_sizes, "least_tokens", lambda _: least)
    batch = Batch(scale=2.0)
    weight = on_ranks.vocabulary_weight(batch.weight, VOCABULARY, SINGLE)
    weight.gradient_sum = into = Sum(weight, 1.0)  # type: ignore[attr-defined]
    hidden, _ = summed(weight, batch, 2.0)
    assert hidden.grad is not None
    if least == 24:  # both gradients are computed in the backward pass, which knows the factor
        assert_near(hidden.grad, batch.grad_hidden)
        assert_near(into.total, batch.grad_weight)
    else:
        assert hidden.grad[batch.token_weights.T != 0].isnan().all()


def test_float16_holds_the_gradient_of_one_label_many_times() -> None:
    tokens, hidden_size = 2048, 4
    hidden = torch.full((tokens, 1, hidden_size), 40.0, dtype=torch.float16, requires_grad=True)
    weight = on_ranks.vocabulary_weight(np.zeros((1000, hidden_size), dtype=np.float32), 1000, SINGLE)
    weight.data = weight.data.half()
    labels = torch.zeros(1, tokens, dtype=torch.int64)
    linear_cross_entropy(hidden, weight, labels, torch.full((1, tokens), 2.0**-8), SINGLE).backward()
    assert weight.grad is not None
    # the sum over the tokens, 81,838, is beyond float16; times 2^-8 it is not
    assert float(weight.grad[0, 0]) == pytest.approx(-tokens * 40 * 0.999 / 256, rel=2e-3)
    assert float(weight.grad[1, 0]) == pytest.approx(tokens * 40 * 0.001 / 256, rel=2e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_ignored_tokens_alone_give_zero(dtype: torch.dtype) -> None:
    batch = Batch()
    batch.token_weights[:] = 0.0
    batch.labels[:] = -100
    hidden, weight, loss = batch.ours(dtype)
    loss.backward()
    log_probs = token_log_probs(hidden, weight, torch.from_numpy(batch.labels), SINGLE)
    grads = torch.autograd.grad(log_probs.sum(), (hidden, weight))
    for zero in (loss, hidden.grad, weight.grad, log_probs, *grads):
        assert zero is not None
        assert not zero.any()


def test_a_label_outside_of_the_vocabulary_shows() -> None:
    batch = Batch()
    batch.labels[0, 1], batch.labels[0, 2] = VOCABULARY, -100
    hidden, weight, loss = batch.ours()
    assert loss.isinf()
    log_probs = token_log_probs(hidden, weight, torch.from_numpy(batch.labels), SINGLE)
    assert log_probs[0, 1] == -torch.inf
    assert log_probs[0, 2] == 0
    assert log_probs[0, 3:].isfinite().all()


class Recorder(TorchDispatchMode):
    """Every operator that ran, and the numbers in the largest tensor that it gave in memory of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[str] = []
        self.sizes: list[int] = []

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operator(*args, **(kwargs or {}))
        self.operators.append(str(operator))
        given = {leaf.untyped_storage().data_ptr() for leaf in _tensors((args, kwargs))}
        new = [leaf.numel() for leaf in _tensors(result) if leaf.untyped_storage().data_ptr() not in given]
        self.sizes.append(max(new, default=0))
        return result


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_logits_of_one_chunk_are_held(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    # 600 tokens x 64 logits; hidden states and weight are smaller than the logits of 100 tokens
    batch = Batch(vocabulary=64, seq_length=200)
    assert max(batch.hidden.size, batch.weight.size) < 100 * 64
    monkeypatch.setattr(block_sizes, "least_tokens", lambda _: 100)
    with Recorder() as recorder:
        _, _, loss = batch.ours(dtype)
        loss.backward()
    assert max(recorder.sizes) == 100 * 64
    monkeypatch.setattr(block_sizes, "least_tokens", lambda _: 600)
    with Recorder() as recorder:
        _, _, whole = batch.ours(dtype)
    assert max(recorder.sizes) == 600 * 64  # the recorder does see them
    assert_near(loss, whole.double(), tolerance=1e-6)


def test_the_gradient_of_the_weight_is_summed_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = Batch(vocabulary=2000, seq_length=8)
    monkeypatch.setattr(block_sizes, "least_tokens", lambda _: 4)
    monkeypatch.setattr(weight_gradient, "BLOCK_NUMBERS", 600)
    with Recorder() as recorder:
        _, weight, loss = batch.ours(torch.bfloat16)
        loss.backward()
    assert len(list(block_sizes.chunks(24, H))) == 6
    large = [name for name, size in zip(recorder.operators, recorder.sizes, strict=True) if size == weight.numel()]
    of_batch = ["aten.empty.memory_format", "aten.cat.default", "aten._to_copy.default"]
    assert large == [*of_batch, *2 * ["aten.empty_like.default"]]  # the sum in float32 and the rounded gradient


@pytest.mark.parametrize("vocabulary", [128_256, pytest.param(250_880, marks=pytest.mark.slow)])
def test_peak_memory_is_a_twentieth_of_plain(monkeypatch: pytest.MonkeyPatch, vocabulary: int) -> None:
    """Of 16,384 tokens, counted over tensors without memory."""
    # fewer operators to count: larger blocks of logits, and on no processor products by blocks, which hold less
    monkeypatch.setattr(softmax, "BLOCK_LOGITS", 1 << 22)
    monkeypatch.setattr(products, "WIDENED", frozenset())
    device, peaks = torch.device("cpu"), {}
    with FakeTensorMode():
        weight: Any = torch.nn.Parameter(torch.empty(vocabulary, 2048, dtype=torch.bfloat16))
        weight.shard = Shard(tuple(weight.shape), dim=0, pieces=(vocabulary,))
        weight.gradient_sum = loss_benchmark.Sum(weight)
        hidden = torch.empty(16_384, 2048, dtype=torch.bfloat16, requires_grad=True)
        case = loss_benchmark.Case(hidden, weight, torch.empty(16_384, dtype=torch.int64))
        for name, side in loss_benchmark.sides([], device, []).items():
            peaks[name] = case.peak_bytes(side)
    assert peaks["plain"] / peaks["ours"] > 20


def test_no_gradients_are_computed_where_none_are_wanted() -> None:
    batch = Batch()
    with Recorder() as training:
        batch.ours()[2].backward()
    with torch.no_grad(), Recorder() as evaluation:
        _, _, loss = batch.ours()
    assert not loss.requires_grad
    assert sum("mm" in name for name in training.operators) == 3
    assert sum("mm" in name for name in evaluation.operators) == 1


def test_several_chunks_take_three_products_each_and_log_probs_four(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = Batch()
    monkeypatch.setattr(block_sizes, "least_tokens", lambda _: 12)
    with Recorder() as summed:
        hidden, weight, loss = batch.ours()
        loss.backward()
    with Recorder() as single:
        token_log_probs(hidden, weight, torch.from_numpy(batch.labels), SINGLE).sum().backward()
    assert sum("mm" in name for name in summed.operators) == 2 * 3
    assert sum("mm" in name for name in single.operators) == 2 * 4


@pytest.mark.parametrize("least", [24, 2], ids=["whole", "chunks"])
@pytest.mark.parametrize("is_trained", [True, False], ids=["trained", "frozen"])
def test_log_probs_of_some_tokens_take_no_product_of_the_others(
    monkeypatch: pytest.MonkeyPatch, least: int, is_trained: bool
) -> None:
    """In chunks too a frozen weight takes two products for each, one with the logits and one with their gradient."""
    monkeypatch.setattr(block_sizes, "least_tokens", lambda _: least)
    hidden, weight, _ = (batch := Batch()).ours()
    weight.requires_grad_(is_trained)
    places, factors = torch.tensor([11, 0, 3, 17, 8, 20]), torch.tensor([0.5, 0, 2, -1, 3, 0.1])
    labels = torch.from_numpy(batch.labels).t().flatten()[places]
    exact_hidden, exact_weight = (torch.from_numpy(x).double().requires_grad_() for x in (batch.hidden, batch.weight))
    logits = exact_hidden.flatten(0, 1)[places] @ exact_weight.t()
    exact = torch.where(torch.arange(len(places)) == 2, 0, -F.cross_entropy(logits, labels, reduction="none"))
    (exact * factors).sum().backward()
    with Recorder() as recorder:
        found = log_probs_of(places, hidden, weight, labels.index_fill(0, torch.tensor(2), -1), SINGLE)
        (found * factors).sum().backward()
    assert sum("mm" in name for name in recorder.operators) == {24: 1, 2: 3}[least] * (
        2 if not is_trained else 3 if least == 24 else 4
    )
    assert_near(found, exact)
    assert hidden.grad is not None
    assert exact_hidden.grad is not None
    assert_near(hidden.grad, exact_hidden.grad)
    if is_trained:
        assert weight.grad is not None
        assert exact_weight.grad is not None
        assert_near(weight.grad, exact_weight.grad)


def test_token_weights_with_a_gradient_are_refused() -> None:
    batch = Batch()
    hidden, weight, _ = batch.ours()
    weights = torch.from_numpy(batch.token_weights).requires_grad_()
    with pytest.raises(ValueError, match="token_log_probs"):
        linear_cross_entropy(hidden, weight, torch.from_numpy(batch.labels), weights, SINGLE)


def test_no_tokens_give_zero() -> None:
    hidden = torch.zeros(0, 2, H, requires_grad=True)
    weight = on_ranks.vocabulary_weight(Batch().weight, VOCABULARY, SINGLE)
    loss = linear_cross_entropy(hidden, weight, torch.zeros(2, 0, dtype=torch.int64), torch.zeros(2, 0), SINGLE)
    loss.backward()
    assert not loss.any()
    assert weight.grad is not None
    assert not weight.grad.any()


def test_frozen_inputs_get_no_gradient() -> None:
    batch = Batch()
    weight = on_ranks.vocabulary_weight(batch.weight, VOCABULARY, SINGLE).requires_grad_(False)
    hidden = torch.from_numpy(batch.hidden).requires_grad_()
    with Recorder() as recorder:
        linear_cross_entropy(
            hidden, weight, torch.from_numpy(batch.labels), torch.from_numpy(batch.token_weights), SINGLE
        ).backward()
    assert sum("mm" in name for name in recorder.operators) == 2
    assert weight.grad is None
    assert hidden.grad is not None
    assert_near(hidden.grad, batch.grad_hidden)


@pytest.mark.parametrize("loss", ["sum", "log_probs"])
def test_a_second_derivative_is_refused(monkeypatch: pytest.MonkeyPatch, loss: str) -> None:
    """The first is computed without autograd, so a second would lack terms."""
    monkeypatch.setattr(block_sizes, "least_tokens", lambda _: 5)
    batch = Batch()
    hidden, weight, value = batch.ours()
    if loss == "log_probs":
        value = token_log_probs(hidden, weight, torch.from_numpy(batch.labels), SINGLE).sum()
    (gradient,) = torch.autograd.grad(value.square(), hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        gradient.sum().backward()
