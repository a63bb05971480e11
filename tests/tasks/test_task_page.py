"""Run the examples of docs/guides/own_loss.md."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import Tensor

from megatron.tasks.loss_function import LossBatch
from tests import runs
from tests.ranks import RankPools
from tests.test_extending import blocks

EXAMPLES = {
    "From log-probabilities": "focal",
    "Options and metrics": "focal",
    "One sample a row": "mean_of_means",
    "Data that is unlearned and data that is kept": "gradient_difference",
    "A reference": "drift",
    "A teacher": "teacher_cross_entropy",
    "From hidden states": "small_hidden",
    "A Trainer of your own": "Ascent",
}


def with_gamma(log_probs: Tensor, batch: LossBatch, *, gamma: float = 2.0) -> Tensor:
    return -log_probs * (1 - log_probs.exp()) ** gamma


@pytest.mark.parametrize(("heading", "function"), EXAMPLES.items())
def test_an_example_trains(ranks: RankPools, tmp_path: Path, heading: str, function: str) -> None:
    (tmp_path / "my_loss.py").write_text(blocks("docs/guides/own_loss.md", heading)[0])
    data = [str(runs.write_dataset(tmp_path / f"{seed}", seed=seed)) for seed in range(2)]
    flags = f"--train-iters 2 --data-path 1 {data[0]} 1 {data[1]}"
    if function == "teacher_cross_entropy":
        assert ranks(1)(runs.train, f"{flags} --save {tmp_path / 'teacher'}") == [""]
        assert ranks(1)(runs.train, f"{flags} --load {tmp_path / 'teacher'} --skip-train --teacher-top-k 4") == [""]
        flags += " --teacher " + " ".join(map(str, tmp_path.glob("0.teacher-*")))
    option = "--trainer" if function == "Ascent" else "--loss"
    flags += f" {option} {tmp_path}/my_loss.py:{function}"
    if heading == "Options and metrics":
        flags += " --loss-options gamma=1.5"
    if function == "drift":
        flags += " --lora-rank 2 --lora-alpha 2"
    assert ranks(1)(runs.train, f"{flags} --results-dir {tmp_path / 'out'}") == [""]
    assert len(runs.rows(tmp_path / "out")) == 2
