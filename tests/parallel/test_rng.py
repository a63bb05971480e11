"""Which ranks draw alike, which apart; and that nothing but seed and samples decides what is drawn."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from megatron.parallel.layout import Layout
from megatron.parallel.rng import RandomStreams, derive_seed, dropout
from tests.parallel import on_ranks
from tests.ranks import RankPools

LAYOUT = Layout(tensor_size=2, context_size=2, num_batch_ranks=2, num_stages=2)


def seeded(seed: int = 1234, consumed_samples: int = 96, **coordinates: int) -> RandomStreams:
    """Streams of the rank of LAYOUT with these coordinates, 0 in the others."""
    streams = RandomStreams()
    streams.seed_step(seed, consumed_samples, replace(LAYOUT, rank=LAYOUT.rank_at(**coordinates)))
    return streams


def draw(**changed: int) -> tuple[list[float], list[float]]:
    """What the replicated and the sharded stream give, changed so."""
    streams = seeded(**changed)
    with streams.sharded():
        sharded = torch.rand(8).tolist()
    return torch.rand(8).tolist(), sharded


def test_derive_seed_is_the_same_on_every_machine() -> None:
    assert derive_seed(1234, "2.mlp.up.weight") == 9054659124426105855
    assert derive_seed(1234, 0, 0, 0, "replicated") == 3769978220151370471


def test_derive_seed_keeps_its_parts_apart() -> None:
    seeds = [derive_seed(*parts) for parts in ((1, 23), (12, 3), (123,), ("1", 2, 3), (1, 2, 3, ""))]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_same_place_and_samples_draw_the_same() -> None:
    assert draw() == draw()


def test_streams_are_those_of_torchs_generator_and_look_at_no_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr("traceback.format_stack", lambda: pytest.fail("torch notes a stack for a CUDA not there"))
        replicated, sharded = draw(tensor_rank=1)
    torch.manual_seed(derive_seed(1234, 96, 0, 0, "replicated"))
    assert torch.rand(8).tolist() == replicated
    torch.manual_seed(derive_seed(1234, 96, 0, 0, "sharded", 1))
    assert torch.rand(8).tolist() == sharded


def test_streams_of_one_rank_differ() -> None:
    replicated, sharded = draw()
    assert replicated != sharded


def test_seed_samples_stage_and_ranks_of_other_tokens_draw_apart() -> None:
    replicated, sharded = draw()
    for name in ("seed", "consumed_samples", "stage", "context_rank", "batch_rank"):
        other_replicated, other_sharded = draw(**{name: 1})
        assert other_replicated != replicated, name
        assert other_sharded != sharded, name


def test_tensor_ranks_share_one_stream_and_not_the_other() -> None:
    (replicated, sharded), (other_replicated, other_sharded) = draw(tensor_rank=0), draw(tensor_rank=1)
    assert replicated == other_replicated
    assert sharded != other_sharded


def test_a_loss_draws_alike_on_all_ranks_of_its_rows() -> None:
    def of_loss(**coordinates: int) -> list[float]:
        with seeded(**coordinates).loss():
            return torch.rand(8).tolist()

    assert of_loss() == of_loss(context_rank=1) == of_loss(tensor_rank=1)
    assert of_loss() != of_loss(batch_rank=1)


def test_ranks_drop_alike_and_apart(ranks: RankPools) -> None:
    first, second = ranks(2)(on_ranks.dropped, 2, [0, 8, 0])
    for (replicated, sharded), (other_replicated, other_sharded) in zip(first, second, strict=True):
        np.testing.assert_array_equal(replicated, other_replicated)
        assert (sharded != other_sharded).any()
    for steps in (first, second):
        np.testing.assert_array_equal(steps[0], steps[2])
        assert (steps[0][0] != steps[1][0]).any()


def test_the_streams_do_not_disturb_each_other() -> None:
    def sequence(turns: str) -> dict[str, list[float]]:
        streams = seeded()
        drawn: dict[str, list[float]] = {"r": [], "s": []}
        for turn in turns:
            if turn == "s":
                with streams.sharded():
                    drawn["s"].append(torch.rand(1).item())
            else:
                drawn["r"].append(torch.rand(1).item())
        return drawn

    assert sequence("rrrsss") == sequence("srsrsr")


def test_dropout_scales_what_it_keeps_and_is_off_in_evaluation() -> None:
    streams = seeded()
    ones = torch.ones(10_000)
    dropped = dropout(ones, 0.25, True, streams, sharded=False)
    assert set(dropped.unique().tolist()) == {0.0, torch.tensor(1 / 0.75).item()}
    assert abs(dropped.mean().item() - 1.0) < 0.03
    assert dropout(ones, 0.25, False, streams, sharded=True) is ones
    assert dropout(ones, 0.0, True, streams, sharded=True) is ones


def test_recompute_replays_both_streams() -> None:
    def gradients(recompute: bool) -> tuple[Any, list[float]]:
        streams = seeded()

        def layer(x: torch.Tensor) -> torch.Tensor:
            x = dropout(x * x, 0.5, True, streams, sharded=True)
            return dropout(x * x, 0.5, True, streams, sharded=False)

        leaf = x = torch.linspace(0.5, 1.5, 64).requires_grad_()
        for _ in range(3):
            x = streams.recomputed(layer, x) if recompute else layer(x)
        x.sum().backward()
        # what is drawn after backward must not depend on it either
        with streams.sharded():
            after = torch.rand(2).tolist()
        return leaf.grad, after + torch.rand(2).tolist()

    (plain, after_plain), (recomputed, after_recomputed) = gradients(False), gradients(True)
    assert 0 < plain.count_nonzero() < 64
    assert torch.equal(plain, recomputed)
    assert after_plain == after_recomputed
