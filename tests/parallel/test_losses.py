"""linear_cross_entropy against a dense float64 cross-entropy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.parallel import losses
from megatron.parallel.context import ParallelContext
from megatron.parallel.losses import gather_logits, linear_cross_entropy
from tests.parallel import on_ranks
from tests.ranks import RankPools

S, B, H, VOCABULARY = 8, 3, 6, 10
SINGLE = ParallelContext.single()
Array = np.ndarray[Any, Any]


class Batch:
    """Random tokens, and the dense loss with its gradients in float64. Labels touch both ends of the vocabulary."""

    def __init__(self, vocabulary: int = VOCABULARY, seq_length: int = S, scale: float = 1.0) -> None:
        generator = np.random.default_rng(0)
        self.hidden = generator.standard_normal((seq_length, B, H)).astype(np.float32)
        self.weight = generator.standard_normal((vocabulary, H)).astype(np.float32)
        self.labels = generator.integers(0, vocabulary, (B, seq_length))
        self.labels[0, :2] = 0, vocabulary - 1
        # not ones and zeros alone: an SFT loss weighs its samples
        self.token_weights = generator.random((B, seq_length)).astype(np.float32)
        self.token_weights[1, 2:5] = 0.0
        hidden, weight = (torch.from_numpy(x).double().requires_grad_() for x in (self.hidden, self.weight))
        self.logits = hidden @ weight.t()
        token_losses = F.cross_entropy(self.logits.flatten(0, 1), self._sequence_first(self.labels), reduction="none")
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


@pytest.mark.parametrize("max_logits", [1 << 22, 25, 1], ids=["whole", "chunks", "one_token_a_chunk"])
@pytest.mark.parametrize(("tp", "sequence_parallel"), [(1, False), (2, False), (2, True), (4, False), (4, True)])
def test_loss_and_gradients_equal_dense(ranks: RankPools, tp: int, sequence_parallel: bool, max_logits: int) -> None:
    batch = Batch(scale=3.0)
    # 32 rows for 10 tokens: of four ranks the second holds padding too, the last two nothing else
    arguments = (tp, sequence_parallel, batch.weight, 32, batch.hidden, batch.labels, batch.token_weights)
    function = on_ranks.cross_entropy
    parts = [function(*arguments, max_logits, 3.0)] if tp == 1 else ranks(tp)(function, *arguments, max_logits, 3.0)
    for part in parts:
        assert_near(part["loss"], batch.loss)
        assert_near(part["logits"], batch.logits)
    hidden = np.concatenate([p["hidden"] for p in parts]) if sequence_parallel else parts[0]["hidden"]
    assert_near(hidden, batch.grad_hidden)
    gradient = np.concatenate([part["weight"] for part in parts])
    assert_near(gradient[:VOCABULARY], batch.grad_weight)
    assert not gradient[VOCABULARY:].any()
    assert [part["own_tokens"] for part in parts] == {1: [10], 2: [10, 0], 4: [8, 2, 0, 0]}[tp]


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


class Recorder(TorchDispatchMode):
    """Every operator that ran, and the sizes of the float32 tensors that it gave."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[str] = []
        self.largest = 0

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operator(*args, **(kwargs or {}))
        self.operators.append(str(operator))
        for tensor in torch.utils._pytree.tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.dtype == torch.float32:
                self.largest = max(self.largest, tensor.numel())
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_more_logits_than_the_bound_are_held(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    # 600 tokens x 64 logits; hidden states and weights are smaller than the bound
    batch, bound = Batch(vocabulary=64, seq_length=200), 5000
    assert max(batch.hidden.size, batch.weight.size) < bound
    monkeypatch.setattr(losses, "MAX_FLOAT32_LOGITS", bound)
    with Recorder() as recorder:
        _, _, loss = batch.ours(dtype)
        loss.backward()
    assert bound * 0.9 < recorder.largest <= bound
    monkeypatch.setattr(losses, "MAX_FLOAT32_LOGITS", 1 << 22)
    with Recorder() as recorder:
        _, _, whole = batch.ours(dtype)
    assert recorder.largest == 600 * 64  # the recorder does see them
    assert_near(loss, whole.double(), tolerance=1e-6)


def test_no_gradients_are_computed_where_none_are_wanted() -> None:
    batch = Batch()
    with Recorder() as training:
        batch.ours()
    with torch.no_grad(), Recorder() as evaluation:
        _, _, loss = batch.ours()
    assert not loss.requires_grad
    assert sum("mm" in name for name in training.operators) == 3
    assert sum("mm" in name for name in evaluation.operators) == 1


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
