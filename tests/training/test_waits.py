"""Waits for the device in a training step: on a device, each would leave it idle while the host catches up."""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from typing import Any

import pytest

from tests.ranks import RankPools
from tests.training import layouts

GATE = {"tolist megatron/training/optimizers/update_gate.py": 1}
"""The one read of loss and norm, in the update gate."""
NORM = {"item deepspeed/runtime/utils.py": 1}
"""DeepSpeed's ZeRO-3 reads the norm too, where it may be refused."""
CASES = {
    "": GATE,
    "--bf16": GATE,
    "--no-pipeline-parallel": GATE,
    "--bf16 --grad-accum-dtype bf16": GATE,
    "--zero-stage 1": GATE,
    "--bf16 --zero-stage 2": GATE,
    "--bf16 --zero-stage 3": GATE | NORM,
}


@pytest.mark.parametrize("flags", CASES)
def test_a_step_waits_for_the_device_once(ranks: RankPools, flags: str) -> None:
    waits, *_ = ranks(1)(step_counts, flags)[0]
    by_file: dict[str, int] = {}
    for place, number in waits.items():
        where = re.sub(r":\d+$", "", place)
        by_file[where] = by_file.get(where, 0) + number
    assert by_file == CASES[flags]


SHARES = {"reduce": 4, "_allgather_base": 2}
"""Two shares of the sums to each rank, and the updated weights back: one a parameter group."""
GATE_BYTES, GATE_OPERATORS = 16, 11
"""Norm, check and decision of a step: what a rank sends, and torch's operators on its host, those of the norm too.

The norm alone takes six: norms of the tensors, joined, squared, summed, over all ranks, and its root. Of the other five
two join the losses of four microbatches, one divides them by the ranks, one joins the numbers, one selects the norm.
"""


@pytest.mark.parametrize(
    ("flags", "gradients"), [("", {"allreduce": 2}), ("--bf16", SHARES), ("--zero-stage 1", SHARES)]
)
def test_norm_loss_check_and_stop_share_a_collective(ranks: RankPools, flags: str, gradients: dict[str, int]) -> None:
    _, collectives, sent_bytes, operators = ranks(2)(step_counts, flags)[0]
    assert Counter(collectives) == Counter(gradients) + Counter(allreduce=1)
    # all else is of gradients and weights; four numbers, each of float32
    assert sorted(sent_bytes)[0] == GATE_BYTES < sorted(sent_bytes)[1]
    assert operators == GATE_OPERATORS


@pytest.mark.parametrize(
    ("flags", "operators"),
    [
        # a sum for each of the two buckets of gradients, none for the losses
        ("", 2),
        # 4 microbatches, each of 19 checks; in all but one of them, of numbers in a row, a channel is selected first
        ("--tensor-model-parallel-size 2", 4 * (18 * 2 + 1)),
    ],
)
def test_a_finite_check_is_one_sum_and_of_a_number_none(ranks: RankPools, flags: str, operators: int) -> None:
    for counted in ranks(2)(check_operators, flags):
        assert counted == operators


def check_operators(flags: str) -> int:
    """Operators of a step's finite checks: more than in a step whose checks are off."""
    from benchmarks.step_counts import AllOperators

    engine, task = layouts.build(f"{layouts.MODELS['llama_gqa']} {flags}")
    checks = engine.ctx.state.checks

    def count() -> int:
        with AllOperators() as operators:
            engine.train_step(layouts.step_batches(engine, task, 0), consumed_samples=0, lr=1e-3)
        return operators.number

    for _ in range(2):
        count()
    on = count()
    checks.step = contextlib.nullcontext  # type: ignore[method-assign,assignment]
    return on - count()


def step_counts(flags: str) -> tuple[dict[str, int], dict[str, int], list[int], int]:
    """Waits, collectives and their bytes in a rank's third step, of four microbatches; the update gate's operators."""
    from benchmarks.step_counts import AllOperators, counted

    engine, task = layouts.build(f"{layouts.MODELS['llama_gqa']} {flags}")

    def step(index: int = 0) -> Any:
        return engine.train_step(
            layouts.step_batches(engine, task, index), consumed_samples=index, lr=engine.config.optimizer.lr
        )

    for index in range(2):  # allocate, and pass the steps that DeepSpeed's own timer leaves out
        step(index)
    counts = counted(step)
    gate, buffers = engine._gate, getattr(engine.deepspeed.optimizer, "buffers", None)
    with AllOperators() as operators:
        gate.begin_step()
        if buffers is not None:
            gate.find_norm(buffers.counted, buffers.uncounted)
            gate.is_open()
    return dict(counts.waits), dict(counts.collectives), counts.sent_bytes, operators.number


@pytest.mark.parametrize(
    "flags",
    [
        "--bf16",
        *(
            pytest.param(flags, marks=pytest.mark.slow)
            for flags in ("--bf16 --grad-accum-dtype bf16", "--zero-stage 3")
        ),
    ],
)
def test_the_update_is_that_of_deepspeeds_own_optimizer(ranks: RankPools, flags: str) -> None:
    """Its passes over memory are fewer; its gradients, norm, clipping and weights are the same."""
    flags = f"{layouts.MODELS['llama_gqa_tied']} {flags} --clip-grad 0.3"
    ours, theirs, stale = ranks(1)(both_updates, flags, 4)[0]
    assert ours["norms"] == pytest.approx(theirs["norms"], rel=1e-3)
    assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-4)
    assert min(ours["norms"]) > 0.3, "nothing was clipped"
    assert stale == 0.0, "a parameter without gradient would be updated by that of the step before"


def both_updates(flags: str, steps: int) -> tuple[dict[str, Any], dict[str, Any], float]:
    """A run with our changes and one without, and the largest gradient of a step in which none is computed."""
    from unittest.mock import patch

    from megatron.training import build as module

    ours = layouts.train(flags, steps)
    with patch.object(module, "lean", lambda engine, config, ctx: None):
        theirs = layouts.train(flags, steps)
    engine, task = layouts.build(flags)
    engine.train_step(layouts.step_batches(engine, task, 0), consumed_samples=0, lr=1e-3)
    buffers = getattr(engine.deepspeed.optimizer, "buffers", None)
    if buffers is None:
        return ours, theirs, 0.0
    buffers.begin_step(1)
    buffers.finish()
    return ours, theirs, max(float(flat.abs().max()) for flat in buffers.flats)
