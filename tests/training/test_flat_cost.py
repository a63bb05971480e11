"""A microbatch costs as much among many as among few, and a step as much after many steps: counted, not timed."""

from __future__ import annotations

import pytest

from tests.ranks import RankPools
from tests.training import layouts


@pytest.mark.parametrize(
    ("num_ranks", "flags"),
    [
        pytest.param(1, "", marks=pytest.mark.slow),
        pytest.param(1, "--zero-stage 2 --bf16", marks=pytest.mark.slow),
        (2, "--pipeline-model-parallel-size 2"),
    ],
)
def test_microbatches_and_steps_take_the_same_work_however_many(ranks: RankPools, num_ranks: int, flags: str) -> None:
    for by_microbatches, first, last, more_objects in ranks(num_ranks)(count_work, flags):
        few, some, many = by_microbatches
        for kind in range(2):
            assert (some[kind] - few[kind]) * 8 == (many[kind] - some[kind]) * 4, "calls in Python, then operators"
        assert first == last, "a step after 20 others calls as much"
        assert more_objects < 10, "nothing is kept of a step"


def count_work(flags: str) -> tuple[list[tuple[int, int]], tuple[int, int], tuple[int, int], int]:
    """Work of steps of 4, 8 and 16 microbatches; of a step before and after 20 others, and the objects these leave."""
    from benchmarks.step_counts import counted_work, live_objects

    model = f"{layouts.MODELS['llama_gqa']} --num-layers 2"
    engine, task = layouts.build(f"{model} {flags} --micro-batch-size 1 --global-batch-size 16")

    def step(number: int) -> None:
        batch = layouts.step_batches(engine, task, 0, 16)[:number]
        engine.train_step(batch, num_microbatches=number, consumed_samples=0, lr=1e-3)

    for number in (16, 8, 4):
        step(number)
    by_microbatches = []
    for number in (4, 8, 16):
        step(number)
        by_microbatches.append(counted_work(lambda: step(number)))  # noqa: B023  # called at once
    step(4)
    first, before = counted_work(lambda: step(4)), live_objects()
    for _ in range(20):
        step(4)
    after = live_objects()
    return by_microbatches, first, counted_work(lambda: step(4)), after - before
