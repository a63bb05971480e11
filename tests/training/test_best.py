"""Early stopping and the best checkpoint: what counts as better, what is kept, and that a resume changes nothing."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from megatron.checkpoint.reader import Checkpoint
from megatron.options.progress import Progress
from megatron.parallel.context import ParallelContext
from megatron.settings.command_line import load_config
from megatron.training.interludes.evaluation import BestTracker, Evaluator
from tests import runs
from tests.ranks import RankPools


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runs.write_dataset(tmp_path_factory.mktemp("best") / "text")


class Lines:
    """A tracker over given values, and what it says."""

    def __init__(self, flags: str, progress: Progress | None = None, lost: tuple[int, ...] = ()) -> None:
        words = f"{runs.TINY} --data-path x --train-iters 9 --save x --eval-interval 1 {flags}".split()
        self.said: list[str] = []
        self.progress = progress or Progress()
        ctx, config = ParallelContext.single(), load_config(words)
        self.tracker = BestTracker(config, ctx, self.progress, [], self.said.append, lambda step: step in lost)

    def after(self, *values: float) -> tuple[int, int, str | None]:
        """Iteration of the best, validations without an improvement, and reason to stop."""
        for value in values:
            self.progress.iteration += 1
            self.tracker.evaluated(value, {})
        return self.progress.best.iteration, self.progress.best.not_improved, self.tracker.stop_reason


@pytest.mark.parametrize(
    ("flags", "values", "best", "not_improved"),
    [
        ("", [3, 2, 2.5], 2, 1),
        ("--best-metric-mode max", [3, 2, 2.5], 1, 2),
        ("", [3, math.nan, math.inf], 1, 2),
        ("", [math.nan, 3], 2, 0),
        ("", [2, 2], 1, 1),
        ("--early-stopping-min-delta 1", [3, 2.5, 2.2, 1.9], 4, 0),  # small steps add up to an improvement
        ("--early-stopping-min-delta 1", [3, 2.5, 2.2], 3, 2),  # the best all the same
        ("--early-stopping-min-delta 1 --best-metric-mode max", [3, 3.5, 4, 4.1], 4, 0),
    ],
)
def test_the_best_and_the_count(flags: str, values: list[float], best: int, not_improved: int) -> None:
    lines = Lines(f"--keep-best --early-stopping-patience 2 {flags}")
    assert lines.after(*values)[:2] == (best, not_improved)
    assert (lines.tracker.stop_reason is not None) == (not_improved == 2)
    assert lines.tracker.save_is_due == (best == len(values))


def test_what_is_said() -> None:
    lines = Lines("--early-stopping-patience 2 --early-stopping-min-delta 0.1")
    assert lines.after(3, 2.95, 3.25)[2] == (
        "Stopped early: loss has not improved by more than 0.1 in 2 validations, early_stopping_patience=2; best: 2.95 "
        "at iteration 2"
    )
    assert lines.said == [
        "loss 3 at iteration 1 is the best so far",
        "loss 2.95 at iteration 2 is the best so far; 1 of 2 validations without an improvement",
        "loss 3.25 at iteration 3 is not better than 2.95 at iteration 2; 2 of 2 validations without an improvement",
    ]


def test_a_best_that_is_lost_or_of_another_measure_counts_no_more() -> None:
    lines = Lines("--keep-best", lost=(1,))
    assert lines.after(1, 2)[0] == 2
    assert lines.said[1] == "WARNING: the best checkpoint, of iteration 1, is gone; only later validations count"
    other = Lines("--keep-best --eval-iters 3", lines.progress)
    assert "earlier validations were by loss (min) of 2 batches of data , now by loss (min) of 3" in other.said[0]
    assert other.after(5)[0] == 3


RUN = "--train-iters 12 --eval-interval 2 --keep-best --keep-last 1 --best-metric-mode max --early-stopping-patience 3"


def ended(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "run.json").read_text())["starts"][-1]["ended"]
    return found


@pytest.mark.parametrize(
    ("size", "layout"),
    [(2, "--pipeline-model-parallel-size 2"), pytest.param(2, "--zero-stage 3", marks=pytest.mark.slow)],
)
def test_a_run_stops_early_and_keeps_and_exports_the_best(
    ranks: RankPools, data: Path, tmp_path: Path, size: int, layout: str
) -> None:
    """The loss falls, and max looks for the highest: the first validation stays the best."""
    saved, models, results = tmp_path / "saved", tmp_path / "models", tmp_path / "out"
    flags = f"{RUN} {layout} --data-path {data} --save {saved} --save-hf {models} --results-dir {results}"
    flags += " --position-embedding-type learned --architecture bloom"
    for _ in range(2):  # the same command again ends at once
        assert ranks(size)(runs.train, flags) == [""] * size
        assert {path.name for path in saved.glob("global_step*")} == {"global_step2", "global_step8"}
        end = ended(results)
        assert end["iteration"] == 8
        assert end["reason"].startswith("Stopped early: loss has not improved in 3 validations")
        first = runs.rows(results, "valid")[1]["lm_loss"]
        assert end["best"] == {"metric": "loss", "iteration": 2, "checkpoint": "global_step2", "value": first}
    assert {path.name for path in models.glob("[!.]*")} == {"samples_64", "best"}
    assert json.loads((models / "best/export.json").read_text())["iteration"] == 2
    summary = (results / "summary.txt").read_text()
    assert re.search(r"^best +loss 4\.\d+ at iteration 2, kept as global_step2$", summary, re.M)
    assert runs.rows(results, "test")
    assert ranks(size)(runs.train, f"{flags} --early-stopping-patience 4 --exit-interval 9") == [""] * size
    assert ended(results)["iteration"] == 9


def without_validation_at(iteration: int, arguments: str) -> str:
    """A run whose validation there is cut short, as by a signal."""
    validate = Evaluator.run

    def cut(self: Evaluator, split: Any) -> Any:
        return None if self.progress.iteration == iteration else validate(self, split)

    with patch.object(Evaluator, "run", cut):
        return runs.train(arguments)


def test_a_resumed_run_has_the_counts_of_a_whole_one(ranks: RankPools, data: Path, tmp_path: Path) -> None:
    common = f"{RUN} --data-path {data}"
    assert ranks(1)(runs.train, f"{common} --save {tmp_path / 'whole'}") == [""]
    parts = f"{common} --save {tmp_path / 'parts'}"
    assert ranks(1)(runs.train, f"{parts} --exit-interval 3") == [""]
    assert ranks(1)(without_validation_at, 4, f"{parts} --exit-interval 4") == [""]
    assert ranks(1)(runs.train, parts) == [""]
    found = [
        {path.name: Checkpoint(path).metadata["progress"] for path in (tmp_path / name).glob("global_step*")}
        for name in ("whole", "parts")
    ]
    assert found[0] == found[1]
    assert set(found[0]) == {"global_step2", "global_step8"}
    assert found[0]["global_step8"]["best"]["not_improved"] == 3


SETS = "--train-data-path {data} --valid-data-path 1 {data} 1 {other} --multiple-validation-sets"


@pytest.mark.parametrize(
    ("flags", "fault"),
    [
        (
            "--data-path {data} --split 1,0,0",
            "keep_best compares validations, but there is no validation data; raise its share in split",
        ),
        (
            f"{SETS} --best-metric lm_loss/x",
            "best_metric=lm_loss/x names no loss of the validation; give one of loss, lm_loss/text, lm_loss/other",
        ),
        (
            f"{SETS} --best-metric lm_loss/other",
            "",
        ),
    ],
)
def test_validation_data_that_is_missing_is_an_error(
    ranks: RankPools, data: Path, tmp_path: Path, flags: str, fault: str
) -> None:
    other = runs.write_dataset(tmp_path / "other", seed=1)
    flags = f"{RUN} --early-stopping-patience 1 {flags} --save {tmp_path / 'saved'}".format(data=data, other=other)
    flags = flags.replace("--split 8,1,1", "") if "--train" in flags else flags
    assert ranks(1)(runs.train, flags) == [f"DataError: {fault}" if fault else ""]
