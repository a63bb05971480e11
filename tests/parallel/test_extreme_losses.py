"""The loss of extreme inputs, by dtype, whole and in chunks, against a dense float64 cross-entropy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.parallel.context import ParallelContext
from megatron.parallel.losses import linear_cross_entropy, token_log_probs
from megatron.parallel.operators import block_sizes
from tests.parallel import on_ranks
from tests.ranks import RankPools

SINGLE = ParallelContext.single()
# relative error allowed, by dtype: that of probabilities, which are rounded before they are multiplied; in float32
# that of sums of 50,257 products, which a plain cross-entropy has too
TOLERANCES = {torch.float32: 3e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# hidden [S, B, H] and weight [V, H]
INPUTS: dict[str, tuple[Tensor, Tensor]] = {
    "logits of 10,000": (draw(9, 1, 8, seed=1) * 3e3, draw(40, 8, seed=2)),
    "equal logits": (torch.zeros(9, 1, 8), draw(40, 8, seed=2)),
    "one token": (draw(1, 1, 8, seed=1), draw(40, 8, seed=2)),
    "a vocabulary of one": (draw(9, 1, 8, seed=1), draw(1, 8, seed=2)),
    "a vocabulary of 50,257": (draw(5, 1, 8, seed=1), draw(50_257, 8, seed=2)),
    "one channel": (draw(9, 1, 1, seed=1), draw(40, 1, seed=2)),
}


def near(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> bool:
    """Compare by the largest number; where nothing but rounding is expected, by what is rounded."""
    scale = max(float(expected.abs().max()), 1e-3)
    return float((actual.detach().double() - expected).abs().max()) <= TOLERANCES[dtype] * scale


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("least", [1000, 2], ids=["whole", "chunks"])
@pytest.mark.parametrize("name", INPUTS)
@pytest.mark.parametrize("smoothing", [0.0, 0.3], ids=["", "smoothed"])
def test_equals_float64(
    monkeypatch: pytest.MonkeyPatch, name: str, least: int, dtype: torch.dtype, smoothing: float
) -> None:
    monkeypatch.setattr(block_sizes, "least_tokens", lambda _: least)
    hidden, rows = (x.to(dtype, copy=True) for x in INPUTS[name])
    labels = torch.arange(len(hidden)) * 7919 % len(rows)
    labels[-1] = len(rows) - 1
    token_weights = torch.rand(len(hidden), generator=torch.Generator().manual_seed(3)) + 0.5
    token_weights[1:2] = 0.0

    exact_hidden, exact_rows = (x.double().requires_grad_() for x in (hidden, rows))
    logits = exact_hidden[:, 0] @ exact_rows.t()
    token_losses = F.cross_entropy(logits, labels, reduction="none")
    smoothed = F.cross_entropy(logits, labels, reduction="none", label_smoothing=smoothing)
    expected = (smoothed * token_weights).sum()
    expected_grads = torch.autograd.grad(expected, (exact_hidden, exact_rows))

    padded = len(rows) + 47  # such as 50,304
    weight = on_ranks.vocabulary_weight(rows.float().numpy(), padded, SINGLE)
    weight.data = weight.data.to(dtype)
    weight.data[len(rows) :] = 1e3  # would drown every token
    hidden.requires_grad_()
    loss = linear_cross_entropy(hidden, weight, labels[None], token_weights[None], SINGLE, label_smoothing=smoothing)
    log_probs = token_log_probs(hidden, weight, labels[None], SINGLE)[0]
    grads = torch.autograd.grad(loss, (hidden, weight))
    single = grads if smoothing else torch.autograd.grad(log_probs, (hidden, weight), -token_weights)

    assert near(log_probs, -token_losses.detach(), dtype)
    assert near(loss, expected.detach(), dtype)
    for grad_hidden, grad_weight in (grads, single):
        assert near(grad_hidden, expected_grads[0], dtype)
        assert near(grad_weight[: len(rows)], expected_grads[1], dtype)
        assert not grad_weight[len(rows) :].any()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("token_weight", [1.0, 0.0], ids=["trained", "weight 0"])
@pytest.mark.parametrize("least", [1000, 2], ids=["whole", "chunks"])
def test_what_is_not_finite_in_one_token_reaches_the_guard(
    monkeypatch: pytest.MonkeyPatch, least: int, token_weight: float, value: float
) -> None:
    """The guard sees the loss and the norm of the gradient; a token of weight 0 is checked like any other."""
    monkeypatch.setattr(block_sizes, "least_tokens", lambda _: least)
    hidden, rows = INPUTS["one channel"]
    hidden = hidden.clone()
    hidden[4, 0, 0] = value
    hidden.requires_grad_()
    weight = on_ranks.vocabulary_weight(rows.numpy(), len(rows), SINGLE)
    token_weights = torch.ones(1, 9)
    token_weights[0, 4] = token_weight
    loss = linear_cross_entropy(hidden, weight, torch.arange(9)[None], token_weights, SINGLE)
    loss.backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    assert not weight.grad.isfinite().all()
    assert loss.isfinite() == (token_weight == 0)
    others = torch.arange(9) != 4
    assert hidden.grad[others].isfinite().all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("vocabulary", [1, 5])
def test_ranks_without_a_row_of_the_vocabulary(ranks: RankPools, vocabulary: int, dtype: str) -> None:
    """Two ranks hold rows up to 32; the second has padding alone, and both logits of 10,000."""
    hidden, rows = draw(6, 2, 8, seed=1) * 3e3, draw(vocabulary, 8, seed=2)
    hidden, rows = (x.to(getattr(torch, dtype)).float() for x in (hidden, rows))
    labels = np.arange(12).reshape(2, 6) % vocabulary
    token_weights = np.ones((2, 6), dtype=np.float32)
    parts = ranks(2)(
        on_ranks.cross_entropy, 2, False, rows.numpy(), 32, hidden.numpy(), labels, token_weights, 4, 1.0, dtype
    )
    exact_hidden, exact_rows = (x.double().requires_grad_() for x in (hidden, rows))
    logits = exact_hidden @ exact_rows.t()
    expected = F.cross_entropy(logits.flatten(0, 1), torch.from_numpy(labels).t().flatten(), reduction="sum")
    grad_hidden, grad_rows = torch.autograd.grad(expected, (exact_hidden, exact_rows))
    for part in parts:
        assert near(torch.as_tensor(part["loss"]), expected.detach(), getattr(torch, dtype))
        for way in range(2):
            assert near(torch.as_tensor(part["hidden"][way]), grad_hidden, getattr(torch, dtype))
    for way in range(2):
        gradient = torch.cat([torch.as_tensor(part["weight"][way]) for part in parts])
        assert near(gradient[:vocabulary], grad_rows, getattr(torch, dtype))
        assert not gradient[vocabulary:].any()
