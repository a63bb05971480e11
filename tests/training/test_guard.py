"""A planted NaN, a planted spike and a planted drift are caught at once, named, and leave no trace."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.checkpoint.reader import Checkpoint
from megatron.data.gpt import open_datasets
from megatron.data.index.indexed import IndexedDataset
from megatron.options.progress import Progress, RunningEstimate
from megatron.resilience.replica_check import checksum, odd_ones
from megatron.settings.command_line import load_config
from tests import runs
from tests.habana import devices
from tests.ranks import HANG_S, RankPools
from tests.training import layouts, planted
from tests.training.test_layouts import arguments

# ---------------------------------------------------------------------------------------------------------------------
# Not finite

NAN_CASES = [
    (layout, zero, precision)
    for layout, zero, precision in itertools.product(("221", "122"), range(4), ("", " --bf16", " --fp16"))
    if zero < 2 or layout == "122"
]
OPTIMIZERS = [
    ("221", 0, ""),
    ("221", 1, " --bf16"),
    ("122", 0, " --fp16"),
    ("122", 2, " --bf16"),
    ("122", 3, " --fp16"),
]
"""Each of DeepSpeed's, once."""


@pytest.mark.parametrize(
    ("layout", "zero", "precision"),
    [pytest.param(*case, marks=() if case in OPTIMIZERS else pytest.mark.slow) for case in NAN_CASES],
)
def test_nan_on_one_rank_changes_nothing_on_any(ranks: RankPools, layout: str, zero: int, precision: str) -> None:
    """In a gradient that the norm counts, in one that it leaves out, and in the loss alone."""
    world_size, flags = arguments(layout, zero=zero)
    last = world_size - 1
    faults = [
        ("gradient", 1, "layers.0.attention.qkv.weight"),
        ("gradient", 1, "layers.0.attention_norm.weight"),
        ("loss", last, ""),
    ]
    model = layouts.MODELS["bloom_learned"]
    scale = " --initial-loss-scale 64" if "fp16" in precision else ""
    told = ranks(world_size)(planted.plant_all, f"{model} {flags}{precision}{scale}", faults)
    for rank, found in enumerate(told):
        for fault, result in zip(faults, found, strict=True):
            assert result["changed"] == [], f"{fault} on rank {rank}"
            assert result["good"] == result["following"] == (False, True)
            assert result["bad"] == (True, False)
            assert result["moved"] > 20
            assert math.isfinite(result["loss"])
    assert len({result["loss"] for found in told for result in found[2:]}) == 1


def test_loss_scale_falls_without_counting_and_the_last_one_counts(ranks: RankPools, data: Path) -> None:
    flags = f"--data-path {data} --train-iters 30 --max-skipped-in-a-row 3 --fp16 --zero-stage 2"
    flags += " --initial-loss-scale 8 --hysteresis 1 --eval-iters 0 --save-interval 100"
    (fault, noted), (_, noted_of_another) = ranks(2)(planted.run_and_note, flags, "overflowing", 64)
    # 8, 4 and 2 may still fall; at 1 the row begins
    assert "3 steps in a row were skipped" in fault
    assert "iteration 12 (samples 88 to 95); iteration 13" in fault
    # for the watchdogs: the rank at which they began, and no other
    assert noted == [f"in step {step} its own gradients are not finite, its losses are" for step in (12, 13, 14)]
    assert noted_of_another == []


# ---------------------------------------------------------------------------------------------------------------------
# Spikes


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return runs.write_dataset(tmp_path / "data")


STEPS, SPIKE = 24, 17
"""Iterations, and the one whose samples are noise."""
GUARDED = (
    f"--train-iters {STEPS} --spike-window 8 --spike-threshold 3 --rollback-skip-steps 3 --save-interval 4 "
    "--eval-iters 0 --lr-decay-style constant"
)
POISON = ((SPIKE - 1) * 8, SPIKE * 8)
LAYOUTS = {
    "TP2 PP2": "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --micro-batch-size 4",
    "TP2 DP2 ZeRO-1": "--tensor-model-parallel-size 2 --zero-stage 1",
    "TP2 DP2 ZeRO-2 bf16": "--tensor-model-parallel-size 2 --zero-stage 2 --bf16",
    "TP2 DP2 ZeRO-3": "--tensor-model-parallel-size 2 --zero-stage 3",
    "DP2 ZeRO-2 bf16": "--zero-stage 2 --bf16",
    "DP2 ZeRO-3": "--zero-stage 3",
}


def num_ranks(layout: str) -> int:
    return 4 if layout.startswith("TP2") else 2


def state_of(folder: Path) -> dict[str, torch.Tensor]:
    checkpoint = Checkpoint(folder / f"global_step{STEPS}")
    return {
        f"{name} {kind}": checkpoint.read_full(name, kind)
        for name, kind in itertools.product(checkpoint.parameters, checkpoint.kinds)
    }


def assert_same_state(one: Path, other: Path) -> None:
    first, second = state_of(one), state_of(other)
    assert first.keys() == second.keys()
    assert [name for name in first if not torch.equal(first[name], second[name])] == []


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param("TP2 PP2", marks=pytest.mark.slow),
        "DP2 ZeRO-2 bf16",
        pytest.param("TP2 DP2 ZeRO-2 bf16", marks=pytest.mark.slow),
    ],
)
def test_a_skipped_spike_leaves_no_trace(ranks: RankPools, tmp_path: Path, data: Path, layout: str) -> None:
    common = f"--data-path {data} {GUARDED} {LAYOUTS[layout]}"
    flags = f"{common} --spike-action skip --save {tmp_path / 'a'} --results-dir {tmp_path / 'results'}"
    assert set(ranks(num_ranks(layout))(planted.run, flags, "poisoned", *POISON)) == {""}
    flags = f"{common} --spike-action off --save {tmp_path / 'b'}"
    assert set(ranks(num_ranks(layout))(planted.run, flags, "absent", *POISON)) == {""}
    assert_same_state(tmp_path / "a", tmp_path / "b")
    (row,) = runs.rows(tmp_path / "results", "bad_step")
    assert (row["iteration"], row["first_sample"], row["action"]) == (SPIKE, POISON[0], "skipped")
    assert "deviations from" in row["reason"]
    assert POISON[0] <= row["suspect_samples"][0] < POISON[1]
    assert runs.rows(tmp_path / "results")[-1]["skipped_iterations"] == 1


def test_a_logged_spike_is_applied_and_names_its_documents(ranks: RankPools, tmp_path: Path, data: Path) -> None:
    flags = f"--data-path 1 {data} {GUARDED} --results-dir {tmp_path / 'results'}"
    assert ranks(1)(planted.run, flags, "poisoned", *POISON) == [""]
    row, *_ = runs.rows(tmp_path / "results", "bad_step")
    assert (row["iteration"], row["action"]) == (SPIKE, "logged")
    assert all(entry["prefix"] == str(data) and entry["documents"] for entry in row["suspect_documents"])
    assert [entry["sample"] for entry in row["suspect_documents"]] == row["suspect_samples"]
    assert runs.rows(tmp_path / "results")[-1]["skipped_iterations"] == 0


@pytest.mark.parametrize("path", ["{d}", "1 {d} 2 {d}"])
def test_a_sample_is_cut_from_the_documents_that_are_named(data: Path, path: str) -> None:
    config = load_config([*runs.TINY.split(), "--data-path", *path.format(d=data).split(), "--train-iters", "20"])
    samples: Any = open_datasets(config)[0]
    documents = IndexedDataset(data)
    for index in range(0, len(samples), 7):
        prefix, named = samples.documents_of(index)
        text = np.concatenate([documents.read(document) for document in named]).tolist()
        sample = samples[index].tolist()
        assert prefix == str(data)
        assert any(text[start : start + len(sample)] == sample for start in range(len(text)))
        # none is named for nothing: each but the outer two is in it whole
        assert sum(len(documents.read(document)) for document in named[1:-1]) <= len(sample)


@pytest.mark.parametrize(
    "layout",
    [
        "DP2 ZeRO-3",
        *(pytest.param(layout, marks=pytest.mark.slow) for layout in ("TP2 PP2", "TP2 DP2 ZeRO-1", "TP2 DP2 ZeRO-3")),
    ],
)
def test_a_rollback_ends_where_a_run_without_the_samples_does(
    ranks: RankPools, tmp_path: Path, data: Path, layout: str
) -> None:
    common = f"--data-path {data} {GUARDED} {LAYOUTS[layout]}"
    results = tmp_path / "results"
    flags = f"{common} --spike-action rollback --save {tmp_path / 'a'} --results-dir {results}"
    assert set(ranks(num_ranks(layout))(planted.run, flags, "poisoned", *POISON)) == {""}
    without = (POISON[0] - 16, POISON[1])  # the spike's step and the two before it
    flags = f"{common} --spike-action off --save {tmp_path / 'b'}"
    assert set(ranks(num_ranks(layout))(planted.run, flags, "absent", *without)) == {""}
    assert_same_state(tmp_path / "a", tmp_path / "b")
    (row,) = runs.rows(results, "bad_step")
    assert (row["iteration"], row["action"], row["rolled_back_to"]) == (SPIKE, "rolled back", 12)
    trained = [row["iteration"] for row in runs.rows(results)]
    assert trained == [i for i in range(1, STEPS + 1) if i not in (SPIKE - 2, SPIKE - 1, SPIKE)]
    superseded = (results / "metrics.superseded.jsonl").read_text().splitlines()
    assert [json.loads(line)["iteration"] for line in superseded if '"train"' in line] == [13, 14, 15, 16]
    progress = Checkpoint(tmp_path / "a" / f"global_step{STEPS}").metadata["progress"]
    assert progress["left_out"] == [list(without)]
    assert (progress["skipped_iterations"], progress["rollbacks"]) == (3, 0)


def test_an_interrupted_run_decides_as_the_undisturbed_one(ranks: RankPools, tmp_path: Path, data: Path) -> None:
    """Stopped between the last checkpoint before the spike and the spike, and again after the rollback."""
    common = f"--data-path {data} {GUARDED} --tensor-model-parallel-size 2 --micro-batch-size 4 --spike-action rollback"
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    flags = f"{common} --save {whole} --results-dir {tmp_path / 'r1'}"
    assert set(ranks(2)(planted.run, flags, "poisoned", *POISON)) == {""}
    for stop in ("--exit-interval 13", "--exit-interval 18", ""):
        flags = f"{common} --save {parts} --load {parts} --results-dir {tmp_path / 'r2'} {stop}"
        assert set(ranks(2)(planted.run, flags, "poisoned", *POISON)) == {""}
    assert_same_state(whole, parts)
    one, other = (Checkpoint(f / f"global_step{STEPS}").metadata["progress"] for f in (whole, parts))
    assert one == other


def test_what_is_left_out_stays_so_on_another_layout(ranks: RankPools, tmp_path: Path, data: Path) -> None:
    common = f"--data-path {data} {GUARDED} --spike-action skip --save {tmp_path / 'a'} --load {tmp_path / 'a'}"
    common += f" --results-dir {tmp_path / 'results'}"
    flags = f"{common} --tensor-model-parallel-size 2 --exit-interval 14"
    assert set(ranks(2)(planted.run, flags, "knowing", POISON[0] - 16, POISON[1])) == {""}
    assert set(ranks(4)(planted.run, f"{common} {LAYOUTS['TP2 DP2 ZeRO-1']}", "poisoned", *POISON)) == {""}
    assert runs.rows(tmp_path / "results", "bad_step") == []
    progress = Checkpoint(tmp_path / "a" / f"global_step{STEPS}").metadata["progress"]
    assert (progress["left_out"], progress["skipped_iterations"]) == ([[POISON[0] - 16, POISON[1]]], 3)


def test_without_an_old_checkpoint_a_spike_is_skipped(ranks: RankPools, tmp_path: Path, data: Path) -> None:
    flags = f"--data-path {data} {GUARDED} --spike-action rollback --save {tmp_path / 'a'} --save-interval 100"
    flags += f" --results-dir {tmp_path / 'results'}"
    assert ranks(1)(planted.run, flags, "poisoned", *POISON) == [""]
    (row,) = runs.rows(tmp_path / "results", "bad_step")
    assert (row["iteration"], row["action"]) == (SPIKE, "skipped")


def test_rollbacks_end_where_they_bring_nothing(ranks: RankPools, tmp_path: Path, data: Path) -> None:
    flags = f"--data-path {data} {GUARDED} --spike-action rollback --save {tmp_path / 'a'} --save-interval 12"
    flags += " --max-rollbacks 2 --rollback-skip-steps 1"
    told = ranks(1)(planted.run, flags, "poisoned", POISON[0], POISON[1] + 1000)
    assert "2 rollbacks, max_rollbacks=2, have brought the run past no new checkpoint" in told[0]
    assert f"Samples left out so far: {POISON[0]} to {POISON[1] + 7}" in told[0]


def test_too_many_in_a_row_end_the_run_with_their_samples(ranks: RankPools, tmp_path: Path, data: Path) -> None:
    flags = f"--data-path {data} --train-iters 20 --max-skipped-in-a-row 3 --save {tmp_path / 'a'} --save-interval 2"
    told = ranks(2)(planted.run, flags, "nan_from", 32)
    for message in told:
        assert message.startswith("TrainingAborted: 3 steps in a row were skipped, max_skipped_in_a_row=3: ")
        assert (
            "iteration 5 (samples 32 to 39); iteration 6 (samples 40 to 47); iteration 7 (samples 48 to 55)" in message
        )
        assert "is not finite; rank 0 on " in message
        assert ": data: its loss is not finite" in message
    assert (tmp_path / "a" / "latest").read_text().split()[0] == "global_step6"


def test_too_many_of_the_last_steps_end_the_run_over_a_restart_too(
    ranks: RankPools, tmp_path: Path, data: Path
) -> None:
    """Two of three steps are lost, which never makes many in a row."""
    flags = f"--data-path {data} --train-iters 30 --eval-iters 0 --save {tmp_path / 'a'} --exit-interval 6"
    flags += " --max-skipped-in-window 5 --skipped-window 8"
    began = ranks(1)(planted.run, flags, "nan_from", 8, 24)[0]
    assert "TrainingAborted" not in began
    (message,) = ranks(1)(planted.run, flags, "nan_from", 8, 24)
    assert message.startswith(
        "TrainingAborted: 5 of the last 8 steps were skipped, max_skipped_in_window=5. The last one: "
    )
    assert "iteration 8 (samples 56 to 63): loss nan or gradient" in message


def test_saves_that_fail_for_too_long_end_the_run(ranks: RankPools, tmp_path: Path, data: Path) -> None:
    flags = f"--data-path {data} --train-iters 20 --eval-iters 0 --save {tmp_path / 'a'} --save-interval 1"
    flags += f" --no-async-save --save-failure-limit-in-mins 1e-6 --results-dir {tmp_path / 'results'}"
    (message,) = ranks(1)(planted.run, flags, "full_disk", 3)
    assert message.startswith("SaveError: saving global_step")
    log = (tmp_path / "results" / "train.log").read_text()
    # the third save is the first to fail, and the fourth one fails long enough after it
    assert re.search(r"global_step4 was not saved.*The run ends: saves have failed for [\d.e-]+ minutes, ", log)
    assert "global_step6" not in log
    assert (tmp_path / "a" / "latest").read_text().split()[0] == "global_step2"


def test_giving_up_exits_with_3(data: Path) -> None:
    """A learning rate at which every model is lost after a step."""
    flags = f"--data-path {data} --train-iters 30 --max-skipped-in-a-row 3 --lr 1e30 --lr-decay-style constant"
    command = [sys.executable, "-m", "megatron.train", *runs.TINY.split(), *flags.split()]
    run = subprocess.run(
        command, capture_output=True, text=True, timeout=HANG_S, env={**os.environ, "DS_ACCELERATOR": "cpu"}
    )
    assert run.returncode == 3, run.stderr
    assert "training aborted: 3 steps in a row were skipped" in run.stderr
    assert "Traceback" not in run.stderr


# ---------------------------------------------------------------------------------------------------------------------
# Copies


@pytest.mark.parametrize(
    ("layout", "rank", "name"),
    [
        ("TP2 PP2", 1, "layers.0.attention_norm.weight"),
        pytest.param("TP2 DP2 ZeRO-1", 3, "layers.0.attention_norm.weight", marks=pytest.mark.slow),
        ("TP2 DP2 ZeRO-2 bf16", 2, "layers.0.attention.qkv.weight"),
        pytest.param("TP2 DP2 ZeRO-3", 1, "layers.0.attention_norm.weight", marks=pytest.mark.slow),
    ],
)
def test_drift_of_one_rank_is_named_within_one_check(
    ranks: RankPools, tmp_path: Path, data: Path, layout: str, rank: int, name: str
) -> None:
    flags = f"--data-path {data} --train-iters 12 --check-replicas-interval 2 --save {tmp_path / 'a'} --save-interval 1"
    told = ranks(4)(planted.run, f"{flags} {LAYOUTS[layout]}", "drift", rank, name, 32)
    assert len(set(told)) == 1
    assert "TrainingAborted: the ranks' copies are not equal after iteration 5" in told[0]
    # of two copies nothing tells which is right: the first is taken
    assert f"{name} on rank {rank} (" in told[0]
    assert "differs from its copy on rank" in told[0] or "differs from its copies on 3 other ranks" in told[0]
    assert "numbers, by up to 0.2" in told[0]
    assert (tmp_path / "a" / "latest").read_text().split()[0] == "global_step4"


def test_the_odd_one_of_four_is_named(ranks: RankPools, data: Path) -> None:
    flags = f"--data-path {data} --train-iters 12 --check-replicas-interval 3"
    told = ranks(4)(planted.run, flags, "drift", 0, "layers.0.attention_norm.weight", 32)
    assert "after iteration 6" in told[0]
    assert "layers.0.attention_norm.weight on rank 0 (" in told[0]
    assert "differs from its copies on 3 other ranks, such as 1: 1 of 32 numbers, by up to 0.25" in told[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(7,), (3, 5000), (4096, 3)])
def test_checksum_sees_every_single_change_and_pairs_that_cancel(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(1)
    tensor = torch.randn(shape, generator=generator).to(dtype)
    expected = int(checksum(tensor))
    assert int(checksum(tensor.clone())) == expected
    integers = {4: torch.int32, 2: torch.int16}[tensor.element_size()]
    for _ in range(50):
        spoiled = tensor.clone()
        bits = spoiled.view(-1).view(integers)
        one, other = torch.randperm(bits.numel(), generator=generator)[:2].tolist()
        bits[one] += 1
        assert int(checksum(spoiled)) != expected
        bits[other] -= 1
        assert int(checksum(spoiled)) != expected
        bits[one], bits[other] = tensor.view(-1).view(integers)[[other, one]]
        assert int(checksum(spoiled)) != expected


def sums_on_hpu() -> list[tuple[int, int]]:
    """Return the checksums of tensors on the device and on the host."""
    with devices.on_hpu():
        tensors = [torch.randn(3, 5000, generator=torch.Generator().manual_seed(n)) for n in range(3)]
        tensors += [tensor.bfloat16() for tensor in tensors]
        return [(int(checksum(tensor.to("hpu"))), int(checksum(tensor))) for tensor in tensors]


def test_a_checksum_has_64_bits_where_the_device_has_32(hpu_ranks: RankPools) -> None:
    (found,) = hpu_ranks(1)(sums_on_hpu)
    assert [there for there, _ in found] == [here for _, here in found]
    assert len({here % 2**32 for _, here in found}) == len(found)
    assert all(abs(here) >= 2**31 for _, here in found)


def test_the_majority_is_believed() -> None:
    assert odd_ones({0: 5, 3: 7, 4: 7}) == [(0, 3, "differs from its copies on 2 other ranks, such as 3")]
    assert odd_ones({1: 5, 2: 7}) == [(2, 1, "differs from its copy on rank 1")]
    assert odd_ones({1: 5, 2: 5}) == []


# ---------------------------------------------------------------------------------------------------------------------
# The estimate, and what is kept of it


def test_the_estimate_is_the_weighted_mean_and_deviation() -> None:
    values = np.random.default_rng(0).normal(3.0, 0.5, 200)
    estimate = RunningEstimate()
    for value in values:
        estimate.follow(float(value), 100.0, 16)
    # weights of an exponential mean whose first values count alike, from their definition
    weights = np.zeros(0)
    for step in range(1, len(values) + 1):
        new = max(1 / step, 2 / 17)
        weights = np.append(weights * (1 - new), new)
    assert weights.sum() == pytest.approx(1.0)
    mean = weights @ values
    assert estimate.mean == pytest.approx(mean)
    assert estimate.variance == pytest.approx(weights @ (values - mean) ** 2)


def test_nothing_is_judged_before_the_window_is_full_and_a_drift_is_followed() -> None:
    generator = np.random.default_rng(1)
    estimate, spikes = RunningEstimate(), 0
    for step in range(400):
        value = 5.0 - step * 0.01 + generator.normal(0.0, 0.05)
        spikes += value > estimate.limit(6.0, 32)
        assert step >= 32 or estimate.limit(6.0, 32) == math.inf
        estimate.follow(value, 6.0, 32)
    assert spikes == 0
    assert estimate.limit(6.0, 32) < estimate.mean + 1.5  # the lag of the mean, and the drift, widen it


def test_one_outlier_moves_the_estimate_no_more_than_its_limit() -> None:
    estimate = RunningEstimate(steps=100, mean=2.0, variance=0.01)
    estimate.follow(1e9, 6.0, 32)
    assert estimate.mean == pytest.approx(2.0 + 2 / 33 * 0.6)
    # a lasting change gets there in time
    for _ in range(200):
        estimate.follow(3.0, 6.0, 32)
    assert estimate.limit(6.0, 32) > 3.0


def test_progress_survives_json_bit_for_bit() -> None:
    progress = Progress(iteration=3, left_out=[(8, 16)], loss=RunningEstimate(9, 0.1 + 0.2, 1e-300))
    saved = json.loads(json.dumps(dataclasses.asdict(progress)))
    assert Progress.from_saved(saved) == progress
    assert Progress.from_saved({"iteration": 3, "consumed_samples": 24}) == Progress(3, 24)
    for damaged in ({"iterations": 3}, {"loss": {"mu": 1.0}}, {"left_out": [[1]]}):
        with pytest.raises((TypeError, ValueError)):
            Progress.from_saved(damaged)


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 10)), max_size=6), st.integers(0, 50), st.integers(1, 9))
def test_left_out_samples_are_a_set(stretches: list[tuple[int, int]], begin: int, size: int) -> None:
    progress, expected = Progress(), set[int]()
    for start, length in stretches:
        progress.leave_out(start, start + length)
        expected |= set(range(start, start + length))
    assert {sample for start, stop in progress.left_out for sample in range(start, stop)} == expected
    assert all(one[1] < other[0] for one, other in itertools.pairwise(progress.left_out))
    assert progress.leaves_out(begin, begin + size) == bool(expected & set(range(begin, begin + size)))
