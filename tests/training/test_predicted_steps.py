"""A run predicts its steps, and names the part and the rank of one that takes much longer than the others."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests import runs
from tests.ranks import RankPools
from tests.training import slowed

TP, PP = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2"
ZERO3 = "--zero-stage 3 --bf16"
FLAGS = "--eval-iters 0 --log-memory-interval 0 --train-iters 30 --log-interval 10"
PAUSE_S = 1.2
"""Of a step, which takes this model some 20 ms."""
SLOW = pytest.mark.slow
RATES = """
version: 1
origin: published
title: some cores
device: cpu
source: none, for a test
peak_flops: {bf16: 1.0e+11, fp16: 1.0e+11, fp8: 1.0e+11, fp32: 1.0e+11}
products: {share: 0.5, half_tokens: 30, half_channels: 15}
attention: {forward_share: 0.2, backward_share: 0.2, half_tokens: 35}
memory_bytes_per_s: 1.0e+10
memory_share: 0.7
host_bytes_per_s: 1.0e+10
kernel_start_s: 1.0e-5
node_devices: 2
within_node: {bytes_per_s: 1.0e+9, share: 0.8, start_s: 1.0e-4, hop_s: 1.0e-5}
across_nodes: {bytes_per_s: 1.0e+8, share: 0.9, start_s: 1.0e-4, hop_s: 1.0e-4}
starts: {step: 5.0e-3, microbatch: 1.0e-3, layer_forward: 5.0e-4, layer_backward: 1.0e-3, message: 1.0e-3}
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runs.write_dataset(tmp_path_factory.mktemp("data") / "data")


@pytest.fixture(scope="module")
def rates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rates") / "cpu.yaml"
    path.write_text(RATES)
    return path


@pytest.mark.parametrize(
    ("layout", "slow_rank", "phase", "said"),
    [
        pytest.param(PP, 1, "forward", "compute", id="PP2 forward"),
        pytest.param(TP, 0, "backward", "compute", id="TP2 backward", marks=SLOW),
        pytest.param("", 1, "data", "data", id="DP2 data", marks=SLOW),
        pytest.param(ZERO3, 1, "data", "data", id="ZeRO-3 data", marks=SLOW),
        pytest.param(f"{PP} --zero-stage 1 --bf16", 0, "optimizer", "compute", id="PP2 optimizer", marks=SLOW),
    ],
)
def test_a_slow_step_is_named_with_its_part_and_its_rank(
    ranks: RankPools, tmp_path: Path, data: Path, rates: Path, layout: str, slow_rank: int, phase: str, said: str
) -> None:
    flags = f"{FLAGS} --data-path {data} --rates {rates} {layout}"
    # at most two layers of two microbatches on a rank
    seconds = PAUSE_S / 4 if phase in ("forward", "backward") else PAUSE_S
    ranks(2)(slowed.train_predicted, str(tmp_path), flags, slow_rank, phase, seconds, 30)
    log = (tmp_path / "train.log").read_text()
    assert (
        len(re.findall(r"^predicted: .* a step \(compute .* by .*cpu.yaml, published rates$", log, re.MULTILINE)) == 1
    )
    (warning,) = re.findall(r"WARNING: step 30 took .* x the usual .*", log)
    assert re.search(rf"\): {said} \+\d+ ms on rank {slow_rank}; ", warning), warning
    for row in runs.rows(tmp_path):
        assert row["time_over_predicted"] == pytest.approx(row["iteration_time_s"] / row["predicted_time_s"])
        # what is in no phase is little
        assert 0 < sum(row["parts"].values()) < 1.001 * row["iteration_time_s"]
    assert " a step, at last; steps took " in (tmp_path / "summary.txt").read_text()


def test_a_run_without_rates_predicts_nothing_on_a_cpu(ranks: RankPools, tmp_path: Path, data: Path) -> None:
    ranks(2)(slowed.train_predicted, str(tmp_path), f"{FLAGS} --data-path {data}", -1, "data", 0.0, 1)
    assert "predicted" not in (tmp_path / "train.log").read_text()
    assert not any({"predicted_time_s", "parts"} & row.keys() for row in runs.rows(tmp_path))


def test_a_prediction_changes_no_loss(ranks: RankPools, tmp_path: Path, data: Path, rates: Path) -> None:
    losses = []
    for number, more in enumerate(("", f"--rates {rates}")):
        folder = tmp_path / str(number)
        flags = f"{FLAGS} --data-path {data} --train-iters 4 --log-interval 2 {PP} {more}"
        ranks(2)(slowed.train_predicted, str(folder), flags, -1, "data", 0.0, 1)
        losses.append([row["lm_loss"] for row in runs.rows(folder)])
    assert losses[0] == losses[1]
