"""Experts on a device that compiles a graph for each shape: results of the others, and no wait of the host."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

from megatron.settings.command_line import parse_arguments
from megatron.tasks.registry import load_task
from tests import runs
from tests.habana import devices
from tests.ranks import RankPools
from tests.training import layouts, static_experts
from tests.training.test_experts import EP2, EP4, ETP1, FLAGS, PP2, SP, STEPS, TP2

CAPACITY = "--moe-expert-capacity-factor 0.75"


@pytest.fixture(scope="module")
def sorted_alone(ranks: RankPools) -> Any:
    return functools.cache(lambda flags="": ranks(1)(layouts.train, f"{FLAGS} {flags}", STEPS)[0])


LAYOUTS = [
    (1, "", 4),
    (2, f"{EP2} --zero-stage 1", 2),
    (4, f"{EP4} --recompute-granularity full", 1),
    (2, f"{TP2} {SP} {EP2} {ETP1}", 4),
    (2, f"{TP2} {EP2} {ETP1}", 4),
    (4, f"{TP2} {SP} {EP2}", 2),
    (4, f"{PP2} {EP2}", 2),
]


@pytest.mark.parametrize(
    ("ranks_needed", "flags", "micro_batch_size", "capacity"),
    [
        # each layout with a capacity or without, in turn; -m slow: with both
        pytest.param(*layout, capacity, marks=() if (place + number) % 2 == 0 else pytest.mark.slow)
        for place, layout in enumerate(LAYOUTS)
        for number, capacity in enumerate(("", CAPACITY))
    ],
)
def test_losses_are_those_of_sorted_tokens(
    ranks: RankPools, sorted_alone: Any, ranks_needed: int, flags: str, micro_batch_size: int, capacity: str
) -> None:
    expected = sorted_alone(f"--micro-batch-size 4 {capacity}")
    for found in ranks(ranks_needed)(
        static_experts.train, f"{FLAGS} --micro-batch-size {micro_batch_size} {flags} {capacity}", STEPS
    ):
        for name in ("losses", "norms", "validation"):
            assert found[name] == pytest.approx(expected[name], rel=1e-6), name


@pytest.mark.parametrize(
    ("layout", "of_experts"),
    [("--micro-batch-size 2", EP2), (f"--micro-batch-size 4 {TP2} {SP}", CAPACITY)],
)
def test_a_run_on_hpu_has_the_losses_of_the_cpu_and_experts_read_nothing(
    ranks: RankPools, hpu_ranks: RankPools, tmp_path: Path, layout: str, of_experts: str
) -> None:
    capacity = of_experts if of_experts == CAPACITY else ""
    common = (
        f"--vocab-size 256 --train-iters {STEPS} --split 1,0,0 --hidden-dropout 0 --attention-dropout 0 "
        f"--data-path {runs.write_dataset(tmp_path / 'text')} --global-batch-size 8 --adam-eps 1e-12"
    )
    results = f"--results-dir {tmp_path}"
    assert ranks(1)(runs.train, f"{common} {FLAGS} {capacity} --micro-batch-size 4 {results}/cpu") == [""]
    found = hpu_ranks(2)(devices.train, f"{common} {FLAGS} {layout} {of_experts} --device hpu {results}/hpu")
    assert {fault for fault, *_ in found} == {""}
    losses = [[row["lm_loss"] for row in runs.rows(tmp_path / name)] for name in ("cpu", "hpu")]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    for _, calls, _ in found:
        assert [name for name in calls if name.endswith((" experts.py", " expert_exchange.py"))] == []


def test_rows_of_different_lengths_do_not_fit_messages_of_one_size() -> None:
    def faults(*words: str) -> list[str]:
        flags = f"{FLAGS} --task sft --train-iters 1 --data-path none --max-batch-len 64 {EP2}".split()
        config, _ = parse_arguments([*layouts.COMMON.split(), *flags, "--micro-batch-size", "1", *words])
        return [fault for fault in load_task(config).faults(2) if "messages of one size" in fault]

    assert faults("--device", "cpu") == []
    (fault,) = faults("--device", "hpu")
    assert "expert_model_parallel_size=2 on hpu sends messages of one size" in fault
    assert faults("--device", "hpu", *f"{TP2} {ETP1}".split()) == []
    assert faults("--device", "hpu", "--packing", "dataset") == []
