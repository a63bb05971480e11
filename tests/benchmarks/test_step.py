"""benchmarks/step.py measures all that a side takes, whatever this process has freed before."""

from __future__ import annotations

import argparse

import pytest

from benchmarks.alternating import on_ranks
from benchmarks.step import _peak_alone, workload
from megatron.parallel.layout import Layout
from megatron.plan.memory import memory_by_stage

FLAGS = "--num-layers 2 --vocab-size 2048 --micro-batch-size 2 --global-batch-size 2"


@pytest.mark.slow
def test_the_peak_of_a_side_is_at_least_what_the_plan_counts() -> None:
    work = workload("llama", "cpu", "bf16", FLAGS.split())
    (stage,) = memory_by_stage(work.config, Layout.of(work.config.parallel))
    freed = [bytearray(2**16) for _ in range(2 * stage.memory.total // 2**16)]  # a side here would live in it
    last = bytearray(2**16)  # or the heap would shrink
    del freed
    assert on_ranks(_peak_alone, 1, "ours", work, argparse.Namespace()) >= 0.95 * stage.memory.total
    del last
