"""Log-probabilities of chosen tokens, and the likeliest tokens, against dense float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.parallel import on_ranks
from tests.parallel.test_losses import VOCABULARY, B, H, S, assert_near
from tests.ranks import RankPools

SLOPES = {"label": (B, S), "chosen": (B, S, 3), "some": (7,)}


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


@pytest.mark.parametrize(("cp", "tp"), [(2, 1), (2, 2), pytest.param(4, 1, marks=pytest.mark.slow)])
def test_ranks_that_share_rows_have_whole_ones(ranks: RankPools, cp: int, tp: int) -> None:
    """Values alike on all, gradients of their own places, times the number of context-parallel ranks."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(*shape, generator=generator) for shape in ((S, B, H), (VOCABULARY, H)))
    labels = torch.randint(0, VOCABULARY, (B, S), generator=generator)
    ids = torch.randint(0, VOCABULARY, (B, S, 3), generator=generator)
    places = torch.tensor([23, 0, 3, 17, 8, 20, 5])
    slopes = {name: torch.randn(*shape, generator=generator) for name, shape in SLOPES.items()}
    inputs = hidden.double().requires_grad_(), weight.double().requires_grad_()
    logits = inputs[0] @ inputs[1].t()
    whole = logits.log_softmax(-1).transpose(0, 1)
    label = whole.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    exact = {"label": label, "chosen": whole.gather(-1, ids), "some": label.t().flatten()[places]}
    found = ranks(cp * tp)(
        on_ranks.of_shared_rows,
        *(cp, tp, weight.numpy(), hidden.numpy(), labels.numpy(), ids.numpy(), places.numpy()),
        {name: slope.numpy() for name, slope in slopes.items()},
    )
    for name in ("label", "chosen", "some", "some by all"):
        values, slope = exact[name.split()[0]], slopes[name.split()[0]]
        grad_hidden, grad_weight = torch.autograd.grad((values * slope).sum(), inputs, retain_graph=True)
        by_rank = {part["coordinates"]: part[name] for part in found}
        for mine, _, _ in by_rank.values():
            assert_near(mine, values)
        of_hidden = [np.concatenate([by_rank[c, t][1] for t in range(tp)]) for c in range(cp)]
        halves = [np.split(part, 2) for part in of_hidden]
        joined = [first for first, _ in halves] + [last for _, last in reversed(halves)]
        assert_near(np.concatenate(joined) / cp, grad_hidden)
        of_weight = [np.concatenate([by_rank[c, t][2] for t in range(tp)])[:VOCABULARY] for c in range(cp)]
        assert_near(np.mean(of_weight, axis=0), grad_weight)
    best = whole.topk(4)
    twice = torch.cat(
        [exact["some"], whole.gather(-1, ((labels + 1) % VOCABULARY).unsqueeze(-1)).squeeze(-1).t().flatten()[places]]
    )
    largest = whole.amax(-1).t().flatten()[places].repeat(2)
    for part in found:
        assert_near(part["top"][0], best.values)
        assert part["top"][1].tolist() == best.indices.tolist()
        assert_near(part["scores"][0], twice)
        assert part["scores"][1].tolist() == (twice == largest).tolist()
        assert_near(part["logits"], logits)
    # each label is computed by one context-parallel rank
    assert sorted(number for part in found if part["coordinates"][1] == 0 for number in part["own"]) == list(range(7))
