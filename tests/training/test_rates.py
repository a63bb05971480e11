"""Learning rates of word embedding and output layer (decoupled_lr), on layouts and ZeRO stages."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests import runs
from tests.ranks import RankPools
from tests.training import layouts, moves

DECAY = "--lr 1e-3 --min-lr 1e-4 --lr-decay-style linear --lr-decay-samples 800 --decoupled-lr 4e-3"
HALFWAY, OF_OTHERS = 400, 5.5e-4
"""Samples at which the decay is half over, and the rate there."""


@pytest.mark.parametrize(
    ("model", "flags", "lowest"),
    [
        ("llama_mha", "--decoupled-min-lr 2e-3", 2e-3),
        ("llama_gqa_tied", "", 1e-4),  # Megatron's default is min_lr
        ("bloom_learned", "--pipeline-model-parallel-size 2", 1e-4),
        ("llama_mha", "--tensor-model-parallel-size 2 --zero-stage 1", 1e-4),
        ("llama_gqa_tied", "--zero-stage 3", 1e-4),
        pytest.param("llama_gqa_tied", "--zero-stage 2", 1e-4, marks=pytest.mark.slow),
    ],
)
def test_the_tables_of_tokens_alone_move_at_their_own_rate(
    ranks: RankPools, model: str, flags: str, lowest: float
) -> None:
    """Not the table of learned positions: neither in Megatron."""
    world_size = 2 if flags.startswith(("--pipe", "--tensor", "--zero")) else 1
    words = f"{layouts.MODELS[model]} {DECAY} {flags}"
    found: dict[str, float] = {}
    for of_rank in ranks(world_size)(moves.rates_in_effect, words, HALFWAY):
        found |= {name: max(move, found.get(name, 0.0)) for name, move in of_rank.items()}
    tables = {name for name in found if name in ("embedding.word.weight", "output.weight")}
    assert len(tables) == (2 if "untie" in layouts.MODELS[model] else 1)
    for name, move in found.items():
        expected = (4e-3 + lowest) / 2 if name in tables else OF_OTHERS
        assert move == pytest.approx(expected, rel=1e-3), name


def test_a_run_logs_both_rates_and_a_resume_compares_them(
    ranks: RankPools, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = runs.write_dataset(tmp_path / "data")
    words = f"--data-path {data} --train-iters 4 --save {tmp_path / 'saves'} --results-dir {tmp_path / 'out'}"
    assert ranks(1)(runs.train, f"{words} --decoupled-lr 4e-2 --decoupled-min-lr 1e-3") == [""]
    found = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    rates = [(row["learning_rate"], row["decoupled_learning_rate"]) for row in found if row["kind"] == "train"]
    assert len(rates) == 4
    for lr, decoupled in rates:
        assert decoupled == pytest.approx(1e-3 + lr / 1e-2 * (4e-2 - 1e-3), rel=1e-6)
    (fault,) = ranks(1)(runs.train, f"{words} --decoupled-lr 3e-2 --decoupled-min-lr 1e-3")
    assert "decoupled_lr=0.03 here, 0.04 there" in fault
    (fault,) = ranks(1)(runs.train, words)
    assert "decoupled_lr=unused here, 0.04 there" in fault
    assert "decoupled_min_lr=unused here, 0.001 there" in fault
