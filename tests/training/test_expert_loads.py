"""Loads of experts: counted once on every layout, in the log, in pictures and in checkpoints."""

from __future__ import annotations

import functools
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.cli import inspect_checkpoint
from megatron.observability.expert_loads import LoadWatch
from megatron.observability.load_report import CELL, LoadReport, load_picture
from megatron.parallel.context import ParallelContext
from megatron.settings.command_line import load_config
from tests import runs
from tests.ranks import RankPools
from tests.training import layouts
from tests.training.test_experts import EP2, ETP1, FLAGS, PP2, SP, TP2

STEPS, NUM_TOKENS = 2, 2 * 8 * 32
"""Steps, and the tokens of all of them."""


def counted(flags: str) -> dict[str, Any]:
    """Loads of two steps over all ranks; each is followed by an evaluation, which adds nothing."""
    engine, task = layouts.build(f"{FLAGS} {flags}")
    watch = LoadWatch(engine.config, engine.ctx)
    for step in range(STEPS):
        result = engine.train_step(
            layouts.step_batches(engine, task, step),
            num_microbatches=layouts.num_microbatches(engine),
            consumed_samples=8 * step,
            lr=1e-3,
        )
        watch.add(result.loads)
        engine.evaluate(layouts.step_batches(engine, task, step), layouts.num_microbatches(engine))
        assert engine.ctx.state.loads.by_layer is result.loads
    report = watch.read()
    assert report is not None
    return {"record": watch.record(), "dropped": report.dropped, "largest": report.largest, "again": watch.record()}


@pytest.fixture(scope="module")
def alone(ranks: RankPools) -> Any:
    return functools.cache(lambda flags="": ranks(1)(counted, f"--micro-batch-size 4 {flags}")[0])


LAYOUTS = [
    (1, "--recompute-granularity full", 4),
    (2, EP2, 2),
    (2, f"{TP2} {ETP1}", 4),
    (2, f"{TP2} {SP} {EP2} {ETP1}", 4),
    (4, f"{PP2} {EP2} --recompute-granularity full", 2),
]
CAPACITIES = ["", "--moe-expert-capacity-factor 0.75"]


@pytest.mark.parametrize(
    ("num_ranks", "flags", "size", "capacity"),
    [
        # each layout with a capacity or without, in turn; -m slow: with both
        pytest.param(*layout, capacity, marks=() if (place + number) % 2 == 1 else pytest.mark.slow)
        for place, layout in enumerate(LAYOUTS)
        for number, capacity in enumerate(CAPACITIES)
    ],
)
def test_each_token_counts_once_on_every_layout(
    ranks: RankPools, alone: Any, num_ranks: int, flags: str, size: int, capacity: str
) -> None:
    expected = alone(capacity)
    assert [sum(counts) for counts in expected["record"]["tokens"].values()] == [2 * NUM_TOKENS] * 2
    assert (expected["dropped"] is not None) == bool(capacity)
    assert expected["again"] is None
    for found in ranks(num_ranks)(counted, f"--micro-batch-size {size} {flags} {capacity}"):
        assert found == expected


def test_padding_is_not_counted() -> None:
    from megatron.models.experts import Experts

    experts, is_token = torch.tensor([[[0, 2]], [[0, 1]], [[1, 2]]]), torch.tensor([[1.0], [1.0], [0.0]])
    layer = type("Layer", (), {"num_experts": 4})
    assert Experts._counts(layer, experts, is_token).tolist() == [2.0, 1.0, 1.0, 0.0]  # type: ignore[arg-type]
    kept = torch.tensor([[[True, False]], [[True, True]], [[True, True]]])
    assert Experts._num_kept(kept, is_token) == 3


def watch_of(flags: str = "") -> LoadWatch:
    return LoadWatch(load_config([*layouts.COMMON.split(), *FLAGS.split(), *flags.split()]), ParallelContext.single())


def test_a_collapse_of_a_hundred_steps_is_warned_of_once() -> None:
    watch = watch_of("--moe-collapse-share 0.75")
    even, collapsed = (torch.tensor(loads, dtype=torch.int32) for loads in ([5, 5, 5, 5, 0], [9, 5, 3, 3, 0]))

    def warnings(steps: int, loads: torch.Tensor) -> tuple[str, ...]:
        for _ in range(steps):
            watch.add({0: even, 1: loads})
        report = watch.read()
        assert report is not None
        return report.warnings

    # 60 and 60 steps with an even one between them are no hundred in a row
    assert [*warnings(60, collapsed), *warnings(1, even), *warnings(60, collapsed)] == []
    (line,) = warnings(40, collapsed)
    assert line.startswith(
        "WARNING: 90% of the tokens chose expert 0 of layer 1, and more than moe_collapse_share=0.75"
    )
    assert warnings(200, collapsed) == ()
    watch = watch_of("--moe-router-topk 4")
    assert warnings(200, torch.tensor([5, 5, 5, 5, 0])) == ()


def test_picture_has_a_square_for_each_expert() -> None:
    from matplotlib.image import imread

    report = LoadReport({1: [0.0, 0.5, 1.0], 3: [0.5, 0.25, 4.0]}, balanced=0.5, dropped=None)
    pixels = imread(io.BytesIO(load_picture(report)), format="png")
    assert pixels.shape[:2] == (2 * CELL, 3 * CELL)
    unused, even, double = (pixels[CELL // 2, CELL * column + 3] for column in range(3))
    assert unused[2] > unused[0]
    assert (even == 1).all()
    assert double[0] > double[2]
    assert (pixels[-1, -1] == double).all()
    assert (pixels[-1, 0] == even).all()


RUN = (
    "--architecture llama --position-embedding-type rope --num-experts 16 --moe-router-topk 1 --moe-aux-loss-coeff 0.1 "
    "--moe-expert-capacity-factor 1 --train-iters 4 --log-interval 2 --save-interval 3"
)


def test_a_run_shows_its_loads(ranks: RankPools, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    data, results = runs.write_dataset(tmp_path / "data"), tmp_path / "results"
    flags = f"{RUN} --data-path {data} --save {tmp_path / 'saved'} --results-dir {results}"
    assert set(ranks(2)(runs.train, f"{flags} --expert-model-parallel-size 2")) == {""}
    rows = [json.loads(line) for line in (results / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if row["kind"] == "train"]
    pictures = [row for row in rows if row["kind"] == "experts"]
    assert [row["iteration"] for row in pictures] == [2, 4]  # the first line, and the last step
    for row, picture in zip(steps, pictures, strict=True):
        assert row["metrics"]["load_balancing_loss"] >= 1.0
        assert 0 < row["experts"]["dropped"] < 1
        layer, expert = row["experts"]["layer"], row["experts"]["expert"]
        shares = picture["shares"]
        assert shares[str(layer)][expert] == pytest.approx(row["experts"]["largest_share"], abs=1e-4)
        assert shares[str(layer)][expert] == max(max(each) for each in shares.values())
        assert [sum(each) for each in shares.values()] == pytest.approx([1.0, 1.0], abs=1e-3)
    log = (results / "train.log").read_text()
    assert "| load_balancing_loss: " in log
    assert "| largest share of an expert: " in log
    assert "| dropped tokens: " in log
    events = EventAccumulator(str(results / "tensorboard"))
    events.Reload()
    (first, last) = events.Images("experts/loads")
    assert (first.step, last.step, first.width, first.height) == (2, 4, 16 * CELL, 2 * CELL)
    assert "experts/largest share" in events.Tags()["scalars"]
    for tag, num_steps in (("global_step3", 3), ("global_step4", 1)):
        assert inspect_checkpoint.main([str(tmp_path / "saved" / tag), "--json"]) == 0
        record = json.loads(capsys.readouterr().out)["metadata"]["expert_loads"]
        assert record["steps"] == num_steps
        assert [sum(counts) for counts in record["tokens"].values()] == [num_steps * 8 * 16] * 2
        assert inspect_checkpoint.main([str(tmp_path / "saved" / tag)]) == 0
        shown = capsys.readouterr().out
        dead = [expert for expert, tokens in enumerate(record["tokens"]["1"]) if tokens == 0]
        if dead:
            assert f"layer 1: {', '.join(map(str, dead))}" in shown
        assert "dead experts" in shown


def test_dead_experts_are_named_by_layer() -> None:
    record = {"steps": 1200, "tokens": {"0": [5, 0, 3, 0], "2": [1, 1, 1, 1], "3": [0, 9, 9, 9]}}
    assert (
        inspect_checkpoint.dead_experts(record)
        == "without a token in the 1,200 steps before it: layer 0: 1, 3; layer 3: 0"
    )
    record = {"steps": 1, "tokens": {"0": [5, 1]}}
    assert inspect_checkpoint.dead_experts(record) == "none: each had tokens in the step before it"
