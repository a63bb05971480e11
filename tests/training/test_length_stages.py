"""Rows that grow over a run: the same text in the same steps, cut into the rows of each stage."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from megatron.checkpoint.reader import Checkpoint
from megatron.data.blend import BlendedDataset
from megatron.data.gpt import cut, open_datasets
from megatron.options.config import Config, length_stages
from megatron.options.schedule import Schedule
from megatron.parallel.context import ParallelContext
from megatron.parallel.layout import Layout
from megatron.plan.flops import FlopsOfSamples, flops_per_token
from megatron.plan.memory import memory_by_stage
from megatron.settings.command_line import load_config
from megatron.tasks.loss_function import LossBatch
from megatron.tasks.pretrain import PretrainData, PretrainTask
from tests import runs
from tests.ranks import RankPools

SLOW = pytest.mark.slow
LENGTHS = [16, 16, 32, 32, 64, 64]
STAGES = "--seq-length 64 --global-batch-size 4 --micro-batch-size 1 --seq-length-stages 16 2 32 2"
LLAMA = (
    "--architecture llama --position-embedding-type rope --lr-warmup-iters 0 --lr-decay-iters 12 --eval-iters 0 "
    "--split 1 --hidden-dropout 0 --attention-dropout 0 --train-iters 6"
)
"""Six steps of four samples of 64 tokens."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runs.write_dataset(tmp_path_factory.mktemp("data") / "d", documents=200)


def config_of(words: str) -> Config:
    return load_config([*runs.TINY.split(), *words.split()])


# ---------------------------------------------------------------------------------------------------------------------
# The text that is read


def rows_read(config: Config, num_ranks: int = 1) -> list[list[tuple[np.ndarray, np.ndarray]]]:
    """(inputs, labels) of each row of each step, in the order of all ranks' microbatches."""
    task = PretrainTask(config)
    dataset = task.data.open(ParallelContext.single())[0]
    size = Schedule(config.training, config.optimizer).global_batch_size
    plans = [task.data.plan(dataset, size, rank, num_ranks) for rank in range(num_ranks)]
    steps, consumed = [], 0
    for _ in range(config.training.train_iters or 0):
        keys = [plan(consumed)[1] for plan in plans]
        batches = [task.data.read(dataset, key) for key in itertools.chain.from_iterable(zip(*keys, strict=True))]
        steps.append([row for b in batches for row in zip(b.inputs.numpy(), b.targets[0].numpy(), strict=True)])
        consumed += size(consumed)
    return steps


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("ramp", ["", "--rampup-batch-size 4 4 12 --global-batch-size 8"])
def test_each_step_reads_the_text_of_a_run_without_stages(data: Path, num_ranks: int, ramp: str) -> None:
    common = f"{LLAMA} --data-path {data}"
    staged = rows_read(config_of(f"{common} {STAGES} {ramp}"), num_ranks)
    whole = rows_read(config_of(f"{common} {STAGES} {ramp} --seq-length-stages none"), num_ranks)
    assert [{len(inputs) for inputs, _ in step} for step in staged] == [{length} for length in LENGTHS]
    for step, expected in zip(staged, whole, strict=True):
        for place in (0, 1):
            # token for token, in order
            assert np.array_equal(
                np.concatenate([row[place] for row in step]), np.concatenate([row[place] for row in expected])
            )
        # each row is text: a label is the next input, within the row
        assert all(np.array_equal(inputs[1:], labels[:-1]) for inputs, labels in step)


def test_a_blend_is_read_alike_and_validations_are_whole(data: Path, tmp_path: Path) -> None:
    other = runs.write_dataset(tmp_path / "other", seed=5, documents=100)
    config = config_of(f"{LLAMA} --data-path 2 {data} 1 {other} {STAGES} --split 8,2,0 --eval-iters 1")
    plain = dataclasses.replace(config, training=dataclasses.replace(config.training, seq_length_stages=None))
    assert len(rows_read(config)[0]) == 4 * len(rows_read(plain)[0])
    task = PretrainTask(config)
    train, valid, _ = task.data.open(ParallelContext.single())
    facts, bare = task.data.facts(train), open_datasets(plain)[0]
    assert isinstance(bare, BlendedDataset)
    assert train.fingerprint == bare.fingerprint
    assert facts.drawn(8) == bare.drawn(8)
    assert facts.documents_of(3) == bare.documents_of(3)
    assert facts.consumed_tokens(8) == 8 * 64
    (key,) = task.data.plan(valid, lambda _: 1, 0, 1)(0)[1]
    assert task.data.read(valid, key).inputs.shape == (1, 64)


def test_a_step_that_crosses_an_end_is_of_its_begin(data: Path) -> None:
    """As after a resume with another batch size; microbatches of different lengths would depend on the layout."""
    words = f"{LLAMA} --data-path {data} {STAGES} --train-iters 3 --global-batch-size 4"
    config = config_of(words)
    task = PretrainTask(config)
    dataset = task.data.open(ParallelContext.single())[0]
    size, keys = task.data.plan(dataset, lambda _: 4, 0, 1)(6)
    assert (size, [key.length for key in keys]) == (4, [16] * 4)
    assert list(itertools.chain.from_iterable(map(task.data.samples_of, keys))) == [6, 7, 8, 9]


def test_rows_of_a_sample_share_a_token() -> None:
    rows = cut(np.arange(26).reshape(2, 13), 4)
    assert rows.tolist() == [[a, a + 1, a + 2, a + 3, a + 4] for a in (0, 4, 8, 13, 17, 21)]


# ---------------------------------------------------------------------------------------------------------------------
# Runs


def losses_of(results: Path) -> list[tuple[float, float]]:
    return [(row["lm_loss"], row["grad_norm"]) for row in runs.rows(results)]


def train_in_places(arguments: str) -> str:
    """Six steps of whole samples in which tokens see only the place of their row, of LENGTHS: an oracle of stages."""
    microbatches = itertools.count()

    def starts(_: PretrainData, tokens: np.ndarray) -> np.ndarray:
        length = LENGTHS[next(microbatches) // 4]
        return np.broadcast_to(np.arange(tokens.shape[1]) // length * length, tokens.shape)

    with patch.object(PretrainData, "_document_starts", starts):
        return runs.train(f"{arguments} --reset-position-ids --reset-attention-mask --eod-token-id 0 --num-workers 0")


@pytest.mark.parametrize("positions", ["rope", *(pytest.param(name, marks=SLOW) for name in ("alibi", "learned"))])
def test_losses_are_those_of_rows_that_see_themselves_alone(
    ranks: RankPools, data: Path, tmp_path: Path, positions: str
) -> None:
    model = LLAMA
    if positions != "rope":
        model = LLAMA.replace("llama", "bloom").replace("rope", positions)
    common = f"{model} --data-path {data} {STAGES} --seed 3 --results-dir"
    assert ranks(1)(runs.train, f"{common} {tmp_path / 'staged'}") == [""]
    assert ranks(1)(train_in_places, f"{common} {tmp_path / 'oracle'} --seq-length-stages none") == [""]
    staged, oracle = losses_of(tmp_path / "staged"), losses_of(tmp_path / "oracle")
    assert len(staged) == len(LENGTHS)
    np.testing.assert_allclose(staged, oracle, rtol=2e-5)
    assert ranks(1)(runs.train, f"{common} {tmp_path / 'whole'} --seq-length-stages none") == [""]
    assert abs(np.array(losses_of(tmp_path / "whole")) - staged)[:4].max() > 1e-3, "whole rows see more"


def likelihood(log_probs: torch.Tensor, batch: LossBatch) -> torch.Tensor:
    return -log_probs


def of_rows(rows: torch.Tensor, batch: LossBatch) -> torch.Tensor:
    return -rows.sum(dim=1)


def test_a_loss_of_ones_own_has_the_rows_and_datasets_of_its_labels(
    ranks: RankPools, data: Path, tmp_path: Path
) -> None:
    common = f"{LLAMA} --data-path {data} {STAGES} --results-dir"
    assert ranks(1)(runs.train, f"{common} {tmp_path / 'plain'}") == [""]
    loss = f"--loss {__name__}:likelihood"
    assert ranks(1)(runs.train, f"{common} {tmp_path / 'own'} {loss}") == [""]
    np.testing.assert_allclose(losses_of(tmp_path / "own"), losses_of(tmp_path / "plain"), rtol=2e-5)
    task = PretrainTask(config_of(f"{LLAMA} --data-path {data} {STAGES} --micro-batch-size 2 {loss}"))
    dataset = task.data.open(ParallelContext.single())[0]
    (first, _) = task.data.plan(dataset, lambda _: 4, 0, 1)(8)[1]
    places = task.data.labels.places(dataset, first)
    assert [(place.sample, place.row) for place in places] == [(8, 0), (8, 1), (9, 2), (9, 3)]
    assert task.read(dataset, first).inputs.shape == (4, 32)
    rows = PretrainTask(
        config_of(f"{LLAMA} --data-path {data} {STAGES} --micro-batch-size 2 --loss {__name__}:of_rows")
    )
    assert rows.read(dataset, first).normaliser == 4


def weights(folder: Path) -> dict[str, torch.Tensor]:
    checkpoint = Checkpoint(folder)
    return {
        f"{name} {kind}": checkpoint.read_full(name, kind)
        for name in checkpoint.parameters
        for kind in checkpoint.kinds
    }


@pytest.mark.parametrize("stop", [2, 3, pytest.param(4, marks=SLOW)])
def test_a_resume_at_an_end_or_between_goes_on_bit_for_bit(
    ranks: RankPools, data: Path, tmp_path: Path, stop: int
) -> None:
    common = f"{LLAMA} --data-path {data} {STAGES}"
    assert ranks(1)(runs.train, f"{common} --save {tmp_path / 'whole'}") == [""]
    halves = f"{common} --save {tmp_path / 'halves'}"
    assert ranks(1)(runs.train, f"{halves} --exit-interval {stop}") == [""]
    assert Checkpoint(tmp_path / "halves" / f"global_step{stop}").metadata["progress"]["consumed_tokens"] == stop * 256
    assert ranks(1)(runs.train, f"{halves} --load {tmp_path / 'halves'}") == [""]
    expected, found = (weights(tmp_path / name / "global_step6") for name in ("whole", "halves"))
    assert all(torch.equal(tensor, found[name]) for name, tensor in expected.items())


def test_stages_to_come_may_change_at_a_resume(ranks: RankPools, data: Path, tmp_path: Path) -> None:
    common = f"{LLAMA} --data-path {data} {STAGES} --save {tmp_path / 'saved'} --load {tmp_path / 'saved'}"
    assert ranks(1)(runs.train, f"{common} --exit-interval 3") == [""]
    said = ranks(1)(runs.announced, f"{common} --seq-length-stages 16 2 32 1")[0]
    assert any("seq_length_stages=[16, 2, 32, 1] here, [16, 2, 32, 2] there" in line for line in said)
    assert not any("WARNING" in line for line in said)


@pytest.mark.parametrize(
    ("world_size", "layout"),
    [
        (2, "--pipeline-model-parallel-size 2"),
        (2, "--context-parallel-size 2"),
        (2, "--zero-stage 1"),
        pytest.param(2, "--tensor-model-parallel-size 2 --sequence-parallel", marks=SLOW),
        pytest.param(2, "--pipeline-model-parallel-size 2 --pipeline-schedule zero-bubble", marks=SLOW),
        pytest.param(1, "--zero-stage 3", marks=SLOW),
    ],
)
def test_layouts_go_on_from_another_with_the_same_losses(
    ranks: RankPools, data: Path, tmp_path: Path, world_size: int, layout: str
) -> None:
    """From the middle of the first stage."""
    common = f"{LLAMA} --data-path {data} {STAGES}"
    assert ranks(1)(
        runs.train, f"{common} --results-dir {tmp_path / 'one'} --save {tmp_path / 'saved'} --save-interval 1"
    ) == [""]
    on = f"{common} {layout} --load {tmp_path / 'saved'} --ckpt-step 1 --results-dir {tmp_path / 'on'}"
    assert set(ranks(world_size)(runs.train, on)) == {""}
    np.testing.assert_allclose(losses_of(tmp_path / "on"), losses_of(tmp_path / "one")[1:], rtol=2e-5)
    assert [row["consumed_tokens"] for row in runs.rows(tmp_path / "on")] == [256 * step for step in range(2, 7)]


# ---------------------------------------------------------------------------------------------------------------------
# Plan and figures


def test_the_plan_takes_the_longest_rows(data: Path) -> None:
    words = f"{LLAMA} --data-path {data} {STAGES}"
    staged, whole = config_of(words), config_of(f"{words} --seq-length-stages none")
    layout = Layout.of(staged.parallel, 1)
    assert memory_by_stage(staged, layout) == memory_by_stage(whole, layout)
    text = PretrainTask(staged).data.batch_text(1)
    assert text.endswith("; in rows of 16 for 2 steps, 32 for 2 steps, then 64")


def test_flops_follow_the_length_of_the_rows(data: Path) -> None:
    words = f"{LLAMA} --data-path {data}"
    config = config_of(f"{words} {STAGES}")
    assert length_stages(config.training) == [(16, 8), (32, 16), (64, None)]
    each = [flops_per_token(config_of(f"{words} --seq-length {length}")) for length in (16, 32, 64)]
    flops = FlopsOfSamples(config)
    assert [flops.per_token(*place) for place in ((0, 4), (8, 16), (16, 999))] == pytest.approx(each)
    assert flops.per_token(4, 12) == pytest.approx((each[0] + each[1]) / 2)
    assert flops.last == each[2]


def test_the_log_counts_the_flops_of_its_rows(ranks: RankPools, data: Path, tmp_path: Path) -> None:
    common = f"{LLAMA} --data-path {data} {STAGES} --results-dir {tmp_path}"
    assert ranks(1)(runs.train, common) == [""]
    flops = FlopsOfSamples(config_of(common))
    rows: list[dict[str, Any]] = runs.rows(tmp_path)
    for step, row in enumerate(rows):
        expected = row["tokens_per_second_per_device"] * flops.per_token(4 * step, 4 * step + 4) / 1e12
        assert row["tflops_per_device"] == pytest.approx(expected)
