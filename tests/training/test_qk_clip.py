"""QK-clip: heads whose logits exceed the threshold are scaled as published, the same on every layout."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron.models.attention.block_kernels import record_largest_logits
from megatron.models.attention.scores import Scores
from megatron.models.positions import Packing
from megatron.parallel.context import ParallelContext
from megatron.parallel.layout import Layout
from megatron.parallel.shards import declared_shards
from megatron.plan.flops import declared_layers
from megatron.settings.command_line import parse_arguments
from tests import runs
from tests.ranks import RankPools
from tests.training import clips, layouts
from tests.training.test_muon import difference, whole

STEPS = 10
MUON = f"{clips.MODEL} {clips.CLIP} --optimizer muon --lr 1e-2 --adam-eps 1e-2"
TP2 = "--tensor-model-parallel-size 2"
CP2 = "--context-parallel-size 2 --context-parallel-exchange"
SLOW = pytest.mark.slow


@pytest.mark.parametrize(("flags", "alpha"), [("", 0.5), ("--qk-clip-alpha 0.8 --log-max-attention-logit", 0.8)])
def test_every_step_is_that_of_float64(ranks: RankPools, flags: str, alpha: float) -> None:
    """Logits, losses and weights of ten steps, in which many heads exceed the threshold."""
    (found,) = ranks(1)(clips.beside_the_reference, f"{flags} --log-max-attention-logit", STEPS, alpha=alpha)
    assert 5 < found["above"] < found["of"] - 5
    assert max(found["logits"]) < 1e-4
    assert found["losses"] == [(pytest.approx(exact, rel=1e-5), exact) for _, exact in found["losses"]]
    assert found["weights"] < 1e-5


def test_a_wrong_head_is_seen(ranks: RankPools) -> None:
    (found,) = ranks(1)(clips.beside_the_reference, "--log-max-attention-logit", STEPS, "heads of another group")
    assert found["weights"] > 1e-3


def test_without_the_log_a_bound_saves_the_product_and_changes_nothing(ranks: RankPools) -> None:
    (logged,), (bound,) = (ranks(1)(clips.train, f"{MUON} {flags}", 4) for flags in ("--log-max-attention-logit", ""))
    assert logged[0] == bound[0]
    assert all(np.array_equal(a, b) for (*_, a), (*_, b) in zip(logged[1], bound[1], strict=True))


@pytest.mark.parametrize("window", [None, 24])
@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("hidden", ["later", "other documents", "before the window"])
def test_a_key_that_no_query_sees_counts_nothing(window: int | None, is_packed: bool, hidden: str) -> None:
    """The largest score of each of four heads, by hand; a key of great length changes it where some query sees it."""
    generator = torch.Generator().manual_seed(1)
    q, k = (torch.randn(100, 2, heads, 8, generator=generator) for heads in (4, 2))
    place = torch.arange(100)
    start = torch.where(place < 40, 0, 40) if is_packed else torch.zeros_like(place)
    seen = (place <= place[:, None]) & (place >= start[:, None])
    if window is not None:
        seen &= place > place[:, None] - window
    query, key = {"later": (3, 50), "other documents": (60, 20), "before the window": (90, 45)}[hidden]
    k[key, 0, 1] = 100.0 * q[query, 0, 3]  # seen by other queries with smaller scores, or by this one
    scores = torch.einsum("qbnd,kbnd->bnqk", q.double(), k.double().repeat_interleave(2, 2)) * 0.5
    expected = scores.masked_fill(~seen, -torch.inf).amax((0, 2, 3))
    ctx = ParallelContext.single()
    packing = Packing(place.expand(2, -1), start.expand(2, -1)) if is_packed else None
    with ctx.state.logits.step(ctx.state.checks):
        # neither the slopes nor the cap are of q and k
        options = Scores(torch.ones(4), window=window, scale=0.5, cap=1.0)
        record_largest_logits(7, q, k, packing, options, ctx, above=-torch.inf)
        torch.testing.assert_close(ctx.state.logits.by_layer[7].double(), expected, rtol=1e-5, atol=0)
        # a later microbatch of smaller ones changes nothing
        record_largest_logits(7, q * 1e-3, k, packing, options, ctx, above=-torch.inf)
        torch.testing.assert_close(ctx.state.logits.by_layer[7].double(), expected, rtol=1e-5, atol=0)
        bound = 0.5 * float((q.norm(dim=3).amax(0).double() * k.norm(dim=3).amax(0).repeat_interleave(2, 1)).max())
        for above, is_known in ((bound * 1.01, False), (bound * 0.99, True)):
            record_largest_logits(8, q, k, packing, options, ctx, above=above)
            assert bool(ctx.state.logits.by_layer[8].isfinite().all()) is is_known
    assert not ctx.state.logits.is_wanted


@pytest.fixture(scope="module")
def alone(ranks: RankPools) -> Any:
    """What one process without parallelism gives, computed once."""
    return functools.cache(lambda flags: merged([ranks(1)(clips.train, flags, 4)[0]], flags, 1))


def merged(results: list[Any], flags: str, world: int) -> dict[str, np.ndarray]:
    config, _ = parse_arguments([*layouts.COMMON.split(), *flags.split()])
    layout = Layout.of(config.parallel, world)
    return whole([parts for _, parts in results], declared_shards(declared_layers(config)), layout)


@pytest.mark.parametrize(
    ("world", "flags"),
    [
        (2, f"{TP2} --sequence-parallel"),
        (2, "--pipeline-model-parallel-size 2"),
        (2, "--zero-stage 1"),
        (2, f"{CP2} ring"),
        pytest.param(2, "", marks=SLOW),
        pytest.param(2, f"{CP2} all-to-all --zero-stage 1", marks=SLOW),
        pytest.param(2, "--zero-stage 2", marks=SLOW),
        pytest.param(2, "--recompute-granularity full", marks=SLOW),
        pytest.param(2, "--recompute-granularity selective --recompute-modules core_attn", marks=SLOW),
        pytest.param(2, "--pipeline-model-parallel-size 2 --pipeline-schedule zero-bubble", marks=SLOW),
        # each rank has a part of a key head
        pytest.param(4, "--tensor-model-parallel-size 4 --sequence-parallel", marks=SLOW),
        pytest.param(4, f"{TP2} --zero-stage 1", marks=SLOW),
    ],
    ids=str,
)
def test_every_layout_trains_the_same_weights(ranks: RankPools, alone: Any, world: int, flags: str) -> None:
    found = merged(ranks(world)(clips.train, f"{MUON} {flags}", 4), f"{MUON} {flags}", world)
    assert difference(found, alone(MUON)) < 1e-5


@pytest.mark.parametrize("flags", ["--zero-stage 3", "--zero-stage 2 --offload-optimizer"])
def test_adamw_is_clipped_at_every_stage(ranks: RankPools, alone: Any, flags: str) -> None:
    adamw = MUON.replace("muon", "adamw")
    found = merged(ranks(2)(clips.train, f"{adamw} {flags}", 4), f"{adamw} {flags}", 2)
    assert difference(found, alone(adamw)) < 1e-5


def test_the_largest_logit_of_one_rank_is_not_enough(ranks: RankPools, alone: Any) -> None:
    flags = f"{MUON} --zero-stage 1"
    found = merged(ranks(2)(clips.train, flags, 4, "largest logit of this rank alone"), flags, 2)
    assert difference(found, alone(MUON)) > 1e-4


def test_16_bit_weights_are_made_of_the_scaled_ones(ranks: RankPools) -> None:
    flags = f"{MUON} --bf16"
    assert ranks(2)(clips.rounding, flags, 2, late=False) == [0.0, 0.0]
    assert max(ranks(2)(clips.rounding, flags, 2, late=True)) > 0.0


def test_resumed_equals_uninterrupted_bit_for_bit(ranks: RankPools, tmp_path: Path) -> None:
    whole_run, rest = ranks(2)(layouts.train_interrupted, f"{MUON} --zero-stage 1 --bf16", 2, 4, str(tmp_path))[0]
    assert rest == whole_run[2:]


def test_the_largest_logit_is_logged(ranks: RankPools, tmp_path: Path) -> None:
    runs.write_dataset(tmp_path / "data")
    flags = "--log-max-attention-logit --log-interval 2 --train-iters 4 --eval-iters 0 --pipeline-model-parallel-size 2"
    assert ranks(2)(runs.train, f"{flags} --data-path {tmp_path}/data --results-dir {tmp_path}/run") == ["", ""]
    rows = [row for row in runs.rows(tmp_path / "run") if row["kind"] == "train"]
    assert len(rows) == 2
    assert all(row["max_attention_logit"] > 0.0 for row in rows)
    assert "max attention logit: " in (tmp_path / "run" / "train.log").read_text()
