"""Trace of instructions: every one that ran, and idle time that equals the schedule's formula."""

from __future__ import annotations

import gzip
import json
import re
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deepspeed.accelerator
import pytest
import torch

from megatron.observability.instruction_trace import (
    TRACE_FILE,
    InstructionTrace,
    idle_shares,
    simulated_idle_shares,
)
from megatron.observability.profiling import Profile
from megatron.plan.page.recorded import RecordedRun
from megatron.plan.pipeline import bubble_fraction
from tests.observability.test_timers import Stream
from tests.ranks import RankPools
from tests.training import layouts


def traced_steps(arguments: str, folder: str) -> list[str]:
    """Three steps of which two are traced, with an evaluation between them; the lines that were said."""
    flags = "--profile-instructions --profile-step-start 2 --profile-step-end 4"
    engine, task = layouts.build(f"{arguments} {flags} --results-dir {folder}")
    said: list[str] = []
    profile = Profile(engine.config.logging, rank=engine.ctx.rank, iteration=0, trace=engine.trace, say=said.append)
    with profile:
        for step in range(4):
            with profile.mark(step + 1):
                engine.train_step(
                    layouts.step_batches(engine, task, step),
                    num_microbatches=layouts.num_microbatches(engine),
                    consumed_samples=0,
                    lr=1e-3,
                )
            profile.step(step + 1)
            engine.evaluate(layouts.step_batches(engine, task, step), layouts.num_microbatches(engine))
    return said


def spans(trace: dict[str, Any], rank: int) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event["ph"] == "X" and event["pid"] == rank]


SCHEDULES = {
    "1f1b": ("", 1, 2),
    "interleaved": ("--num-virtual-stages-per-pipeline-rank 2", 2, 2),
    "zero-bubble": ("--pipeline-schedule zero-bubble", 1, 3),
}
"""Options of each schedule, chunks a stage, and passes of a microbatch in a chunk."""


@pytest.mark.parametrize(
    ("num_stages", "schedule"),
    [
        # of four stages the schedule with most to order; -m slow: the others too
        pytest.param(stages, schedule, marks=() if stages == 2 or schedule == "interleaved" else pytest.mark.slow)
        for stages in (2, 4)
        for schedule in SCHEDULES
    ],
)
def test_idle_time_of_a_run_in_instructions_is_the_formula(
    ranks: RankPools, tmp_path: Path, num_stages: int, schedule: str
) -> None:
    """(p - 1)(F + B) units beside m microbatches, a v-th of them, or (p - 1)(F + B - W), all passes of one unit."""
    options, num_chunks, num_passes = SCHEDULES[schedule]
    flags = f"{layouts.MODELS['llama_gqa']} --pipeline-model-parallel-size {num_stages} {options}"
    flags += f" --micro-batch-size 1 --num-layers {num_stages * num_chunks}"
    said = ranks(num_stages)(traced_steps, flags, str(tmp_path))
    trace, num_microbatches = json.loads(gzip.decompress((tmp_path / TRACE_FILE).read_bytes())), 8
    waits = (num_stages - 1) * (1 if schedule == "zero-bubble" else 2) / num_chunks
    expected = waits / (num_microbatches * num_passes + waits)
    if schedule == "1f1b":
        assert expected == bubble_fraction(num_stages, num_microbatches)
    assert simulated_idle_shares(trace) == pytest.approx([expected] * num_stages, abs=1e-12)
    assert all(0 < share < 1 for share in idle_shares(trace))
    assert said[1:] == [[]] * (num_stages - 1)
    assert re.search(rf"idle by stage: .*; by the order of the passes.*: {expected:.1%}", said[0][0])
    # as the page of a plan draws the last step
    (tmp_path / "metrics.jsonl").write_text('{"kind": "train", "iteration": 1, "iteration_time_s": 0.5}\n')
    drawn = Counter((bar.row, bar.kind) for bar in RecordedRun(tmp_path).timeline().bars)
    kinds = ("forward", "backward", "weight")[:num_passes]
    assert all(drawn[stage, kind] == num_chunks * num_microbatches for stage in range(num_stages) for kind in kinds)
    passes = {"ForwardPass", "BackwardPass", *(["WeightPass"] if schedule == "zero-bubble" else [])}
    for rank in range(num_stages):
        found = [one["args"] for one in spans(trace, rank)]
        counts = Counter((one["iteration"], one["instruction"], one["chunk"]) for one in found)
        assert {name for _, name, _ in counts} & {"ForwardPass", "BackwardPass", "WeightPass"} == passes
        for iteration in (2, 3):
            for chunk in range(num_chunks):
                place = chunk * num_stages + rank
                received = num_microbatches if place > 0 else 0
                sent = num_microbatches if place < num_stages * num_chunks - 1 else 0
                assert all(counts[iteration, name, chunk] == num_microbatches for name in passes)
                assert counts[iteration, "SendActivation", chunk] == counts[iteration, "RecvGrad", chunk] == sent
                assert counts[iteration, "RecvActivation", chunk] == counts[iteration, "SendGrad", chunk] == received
            assert counts[iteration, "OptimizerStep", 0] == counts[iteration, "ReduceGrads", 0] == 1
        assert {iteration for iteration, _, _ in counts} == {2, 3}, "neither other steps nor evaluations"
        last = 0.0
        for one in spans(trace, rank):
            assert one["ts"] >= last
            last = one["ts"] + one["dur"]


def test_microbatches_pass_from_stage_to_stage_by_one_clock(ranks: RankPools, tmp_path: Path) -> None:
    flags = f"{layouts.MODELS['llama_gqa']} --pipeline-model-parallel-size 2 --micro-batch-size 1"
    ranks(2)(traced_steps, flags, str(tmp_path))
    trace = json.loads(gzip.decompress((tmp_path / TRACE_FILE).read_bytes()))
    ends = {
        (one["pid"], one["args"]["iteration"], one["name"]): one["ts"] + one["dur"]
        for rank in range(2)
        for one in spans(trace, rank)
    }
    for iteration in (2, 3):
        for number in range(8):
            assert ends[0, iteration, f"ForwardPass {number}"] < ends[1, iteration, f"ForwardPass {number}"]
            assert ends[1, iteration, f"BackwardPass {number}"] < ends[0, iteration, f"BackwardPass {number}"]


@pytest.mark.parametrize("arguments", ["--zero-stage 2", "--zero-stage 1"])
def test_one_stage_is_traced_and_never_idle_by_its_order(ranks: RankPools, tmp_path: Path, arguments: str) -> None:
    ranks(2)(traced_steps, f"{layouts.MODELS['llama_gqa']} {arguments}", str(tmp_path))
    trace = json.loads(gzip.decompress((tmp_path / TRACE_FILE).read_bytes()))
    assert simulated_idle_shares(trace) == [0]
    assert {"ForwardPass", "BackwardPass", "OptimizerStep"} <= {one["args"]["instruction"] for one in spans(trace, 1)}


def test_a_device_is_timed_by_events_and_waited_for_once_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Stream()
    monkeypatch.setattr(deepspeed.accelerator, "get_accelerator", lambda: SimpleNamespace(Event=stream.event))
    ctx: Any = SimpleNamespace(device=torch.device("cuda"), rank=0, stage=0, gather_objects=lambda mine: [mine])
    trace = InstructionTrace(ctx, wanted=True)
    forward = trace.recorded("ForwardPass", lambda: None)
    for iteration in (1, 2):
        trace.begin_step(iteration)
        forward()
        forward()
        trace.end_step()
        assert stream.waits == iteration
    found = spans(trace.gather(), 0)
    assert [one["dur"] for one in found] == [1e6] * 4, "events are a second apart"
    assert [one["name"] for one in found] == ["ForwardPass 0", "ForwardPass 1"] * 2
    assert found[1]["ts"] - found[0]["ts"] == 2e6
    assert stream.made == 5, "events are used again"


def trace_of(orders: list[list[tuple[str, int, int]]]) -> dict[str, Any]:
    """A trace of one step in which each stage runs its passes in this order."""
    return {
        "traceEvents": [
            {
                "ts": place,
                "dur": 1,
                "pid": stage,
                "args": {"instruction": name, "iteration": 1, "stage": stage, "chunk": chunk, "microbatch": number},
            }
            for stage, order in enumerate(orders)
            for place, (name, chunk, number) in enumerate(order)
        ]
    }


def test_unequal_stages_idle_as_by_hand() -> None:
    """Two stages, one microbatch: 3 and 1 units a pass, so 8 in all, of which they work 6 and 2."""
    order = [("ForwardPass", 0, 0), ("BackwardPass", 0, 0)]
    assert simulated_idle_shares(trace_of([order, order]), lambda stage, _: 1 if stage else 3) == [0.25, 0.75]


def passes(words: str) -> list[tuple[str, int, int]]:
    """'F01' is the forward pass of chunk 0, microbatch 1."""
    names = {"F": "ForwardPass", "B": "BackwardPass", "W": "WeightPass"}
    return [(names[word[0]], int(word[1]), int(word[2])) for word in words.split()]


def test_two_chunks_halve_the_bubble_of_two_stages_and_deferred_weights_fill_it() -> None:
    """Two stages. Interleaved, of 2 microbatches and chunks: (p - 1)(F + B) = 2 units of a chunk's pass beside 8."""
    interleaved = [passes("F00 F01 F10 F11 B10 B11 B00 B01"), passes("F00 F01 F10 B10 F11 B11 B00 B01")]
    assert simulated_idle_shares(trace_of(interleaved)) == pytest.approx([2 / 10, 2 / 10])
    deferred = passes("F00 B00 W00")
    assert simulated_idle_shares(trace_of([deferred, deferred])) == pytest.approx([2 / 5, 2 / 5])


def test_order_that_waits_for_itself_is_an_error() -> None:
    backward_first = [("BackwardPass", 0, 0), ("ForwardPass", 0, 0)]
    with pytest.raises(ValueError, match="every stage waits for another"):
        simulated_idle_shares(trace_of([backward_first, backward_first]))
