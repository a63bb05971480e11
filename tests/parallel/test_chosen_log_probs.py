"""Log-probabilities of chosen tokens, and the likeliest tokens, against dense float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.parallel import on_ranks
from tests.parallel.test_losses import VOCABULARY, B, H, S, assert_near
from tests.ranks import RankPools


def on_all(ranks: RankPools, tp: int, *arguments: Any) -> list[dict[str, Any]]:
    # 32 rows for 10 tokens: of four ranks the second holds padding too, the last two nothing else
    return [on_ranks.chosen(1, *arguments)] if tp == 1 else ranks(tp)(on_ranks.chosen, tp, *arguments)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 2e-6), ("bfloat16", 1e-2), ("float16", 1.5e-3)])
@pytest.mark.parametrize(("tp", "sequence_parallel"), [(1, False), (2, True), (4, False)])
def test_values_and_gradients_equal_dense(
    ranks: RankPools, tp: int, sequence_parallel: bool, dtype: str, tolerance: float
) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(*shape, generator=generator) for shape in ((S, B, H), (VOCABULARY, H)))
    hidden, weight = (x.to(getattr(torch, dtype)).float() for x in (hidden, weight))
    ids = torch.randint(0, VOCABULARY, (B, S, 3), generator=generator)
    ids[0, 0], ids[0, 1] = torch.tensor([0, VOCABULARY - 1, 4]), torch.tensor([7, 7, 7])
    grads = 1e-3 * torch.randn(B, S, 3, generator=generator)
    grads[1, 2:5] = 0
    inputs = hidden.double().requires_grad_(), weight.double().requires_grad_()
    whole = (inputs[0] @ inputs[1].t()).log_softmax(-1).transpose(0, 1)
    log_probs = whole.gather(-1, ids)
    grad_hidden, grad_weight = torch.autograd.grad((log_probs * grads).sum(), inputs)
    parts = on_all(ranks, tp, sequence_parallel, weight.numpy(), hidden.numpy(), ids.numpy(), grads.numpy(), dtype)
    for part in parts:
        assert_near(part["log_probs"], log_probs, tolerance)
        assert_near(part["top"], whole.topk(4).values, tolerance)
    found = [part["hidden"] for part in parts]
    assert_near(np.concatenate(found) if sequence_parallel else found[0], grad_hidden, tolerance)
    gradient = np.concatenate([part["weight"] for part in parts])
    assert_near(gradient[:VOCABULARY], grad_weight, tolerance)
    assert not gradient[VOCABULARY:].any()


@pytest.mark.parametrize(("tp", "sequence_parallel"), [(1, False), (2, True), (4, False)])
def test_of_equally_likely_tokens_the_first_are_chosen(ranks: RankPools, tp: int, sequence_parallel: bool) -> None:
    generator = np.random.default_rng(0)
    hidden = generator.integers(-1, 2, (S, B, H)).astype(np.float32)
    weight = generator.integers(-1, 2, (VOCABULARY, H)).astype(np.float32)
    logits = (hidden @ weight.T).swapaxes(0, 1)
    expected = np.argsort(-logits, axis=-1, kind="stable")[..., :4]
    ties = np.sort(logits)[..., -5] == np.sort(logits)[..., -4]
    assert ties.any()
    ids = np.zeros((B, S, 1), np.int64)
    for part in on_all(ranks, tp, sequence_parallel, weight, hidden, ids, np.ones(ids.shape, np.float32), "bfloat16"):
        assert part["ids"].tolist() == expected.tolist()
