"""SFT: every chat once an epoch, packed as if alone, the loss divided once by all its tokens, whatever the layout."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.checkpoint.reader import Checkpoint
from megatron.checkpoint.source import Slice
from megatron.data.index import indexed
from megatron.data.index.indexed import LOSS_MASK_SUFFIX, DataError
from megatron.data.index.indexed_builder import IndexedDatasetBuilder
from megatron.options.stored import from_dict
from megatron.parallel.context import ParallelContext
from megatron.tasks.sft import SFTTask
from tests import runs
from tests.ranks import RankPools
from tests.tasks import chats
from tests.training.layouts import MODELS, train

LAYOUTS = {
    "dp2": (2, ""),
    "tp2": (2, "--tensor-model-parallel-size 2"),
    "tp2 sp": (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "pp2": (2, "--pipeline-model-parallel-size 2"),
    "pp2 interleaved": (2, "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"),
    "pp2 zero-bubble": (2, "--pipeline-model-parallel-size 2 --pipeline-schedule zero-bubble"),
    "pp4": (4, "--pipeline-model-parallel-size 4"),
    "pp2 dp2": (4, "--pipeline-model-parallel-size 2 --zero-stage 1"),
    "zero2": (2, "--zero-stage 2"),
    "zero3": (2, "--zero-stage 3"),
    "offload": (2, "--zero-stage 2 --offload-optimizer"),
}
PACKINGS = {
    "dataset": "--packing dataset --micro-batch-size 2",
    "step": "--packing step --max-batch-len 64",
    "buckets": "--packing step --max-batch-len 64 --bucketing octave --buckets-per-octave 4",
    "edges": "--packing step --max-batch-len 64 --bucketing optimal --num-buckets 3",
    "none": "--packing none --micro-batch-size 2",
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chats.write_chats(tmp_path_factory.mktemp("chats") / "chats", chats.some_lengths(41, 33))


def packed_cases() -> list[Any]:
    """Each layout with each model; without -m slow each layout but two with one of them, in turn."""
    models = ["bloom_alibi", "bloom_learned", "llama_gqa"]
    places = [
        ("dp2", "step"),
        ("tp2", "step"),
        ("tp2 sp", "buckets"),
        ("pp2", "step"),
        ("pp4", "edges"),
        ("pp2 dp2", "none"),
        ("pp2", "dataset"),
        ("pp2 interleaved", "step"),
        ("pp2 zero-bubble", "edges"),
    ]
    return [
        pytest.param(model, *where, marks=() if number < 7 and number % 3 == place else pytest.mark.slow)
        for number, where in enumerate(places)
        for place, model in enumerate(models)
    ]


@pytest.mark.parametrize(("model", "layout", "packing"), packed_cases())
def test_packed_chats_have_the_loss_and_gradients_of_chats_alone(
    ranks: RankPools, data: Path, tmp_path: Path, model: str, layout: str, packing: str
) -> None:
    check_gradients(ranks, data, tmp_path, MODELS[model], LAYOUTS[layout], PACKINGS[packing])


@pytest.mark.parametrize(
    ("model", "layout", "packing"),
    [
        ("bloom_alibi", "tp2 sp", "step"),
        ("llama_gqa_tied", "pp2 dp2", "none"),
        pytest.param("bloom_learned", "dp2", "dataset", marks=pytest.mark.slow),
        pytest.param("llama_gqa", "pp2 interleaved", "step", marks=pytest.mark.slow),
        pytest.param("llama_gqa", "zero3", "edges", marks=pytest.mark.slow),
    ],
)
def test_neftune_draws_alike_on_every_layout_and_packing(
    ranks: RankPools, data: Path, tmp_path: Path, model: str, layout: str, packing: str
) -> None:
    check_gradients(ranks, data, tmp_path, MODELS[model], LAYOUTS[layout], PACKINGS[packing], alpha=5.0)


@pytest.mark.parametrize(
    ("model", "layout", "packing"),
    [
        ("llama_gqa", "tp2 sp", "step"),
        ("bloom_alibi", "pp2 dp2", "none"),
        pytest.param("llama_gqa_tied", "zero3", "edges", marks=pytest.mark.slow),
    ],
)
def test_smoothed_labels_have_the_loss_and_gradients_of_transformers(
    ranks: RankPools, data: Path, tmp_path: Path, model: str, layout: str, packing: str
) -> None:
    flags = f"{MODELS[model]} --label-smoothing-factor 0.2"
    check_gradients(ranks, data, tmp_path, flags, LAYOUTS[layout], PACKINGS[packing])


def test_a_validation_measures_the_loss_of_the_labels_themselves(ranks: RankPools) -> None:
    flags = f"{MODELS['llama_gqa']} {LAYOUTS['tp2'][1]}"
    plain, smoothed = (ranks(2)(train, f"{flags}{more}", 0)[0] for more in ("", " --label-smoothing-factor 0.3"))
    assert smoothed["validation"] == plain["validation"]


def check_gradients(
    ranks: RankPools,
    data: Path,
    tmp_path: Path,
    model: str,
    layout: tuple[int, str],
    packing: str,
    alpha: float | None = None,
) -> None:
    """Compare loss and gradient of the first step with those of each chat alone."""
    world_size, flags = layout
    common = f"{model} --data-path {data} --split 1,0,0 --global-batch-size 13 {packing}"
    ((expected, before, gradients),) = ranks(1)(chats.dense_gradient, common, alpha)
    if alpha is not None:
        assert abs(ranks(1)(chats.dense_gradient, common)[0][0] - expected) > 1e-4
        flags += f" --neftune-noise-alpha {alpha}"
    found = ranks(world_size)(chats.gradient_step, f"{common} {flags}", str(tmp_path / "saved"))
    assert max(abs(loss - expected) for loss in found) < 1e-5
    saved = Checkpoint(tmp_path / "saved" / "global_step1")
    assert set(saved.parameters) == set(gradients)
    for name, shard in saved.parameters.items():
        after = saved.read(Slice(name, shard, 0, int(np.prod(shard.shape)))).double()
        there = gradients[name].flatten()[: after.numel()]  # without the vocabulary's padding
        apart = before[name].flatten()[: after.numel()] - there - after
        assert float(apart.abs().max()) < 1e-5 * max(1.0, float(there.abs().max())), name
        assert float(there.abs().max()) > 0 or "bias" in name, name


@pytest.mark.parametrize(
    "layout",
    ["pp2", "zero3", *(pytest.param(name, marks=pytest.mark.slow) for name in ("dp2", "tp2", "zero2", "offload"))],
)
def test_the_loss_curve_is_that_of_one_rank(ranks: RankPools, data: Path, layout: str) -> None:
    world_size, flags = LAYOUTS[layout]
    common = f"{MODELS['llama_gqa']} --data-path {data} --split 1,0,0 --global-batch-size 13 --max-batch-len 64"
    (expected,) = ranks(1)(chats.losses, common, 8)  # two epochs of 4 steps, the last of each over 2 chats
    for found in ranks(world_size)(chats.losses, f"{common} {flags}", 8):
        assert np.allclose(found, expected, rtol=0, atol=1e-4)
    assert expected[7] < expected[0]
    assert torch.isfinite(torch.tensor(expected)).all()


RUN = (
    "--task sft --split 8,2,0 --num-epochs 3 --packing step --max-batch-len 48 --micro-batch-size 1 --vocab-size 250 "
    "--seq-length 32 --global-batch-size 7 --hidden-dropout 0 --attention-dropout 0 --architecture llama "
    "--position-embedding-type rope"
)


@pytest.mark.parametrize(
    ("first", "then", "noise"),
    [
        pytest.param(1, "dp2", "", marks=pytest.mark.slow),
        (2, "", ""),
        (2, "pp2", "--neftune-noise-alpha 5"),
        pytest.param(1, "tp2", "--neftune-noise-alpha 5", marks=pytest.mark.slow),
    ],
)
def test_a_resumed_run_goes_on_with_the_next_chats(
    ranks: RankPools, data: Path, tmp_path: Path, first: int, then: str, noise: str
) -> None:
    """Stopped within the second of three epochs, and gone on with on another layout."""
    common = f"{RUN} --data-path {data} {noise}"
    assert ranks(1)(runs.train, f"{common} --results-dir {tmp_path / 'whole'}") == [""]
    whole = {row["iteration"]: row for row in runs.rows(tmp_path / "whole")}
    assert [row["global_batch_size"] for row in whole.values()] == [7, 7, 7, 7, 5] * 3  # 33 chats to train on
    kept = f"{common} --save {tmp_path / 'saved'} --results-dir {tmp_path / 'parts'}"
    assert set(ranks(first)(runs.train, f"{kept} --exit-interval 8")) == {""}
    size, flags = LAYOUTS[then] if then else (1, "")
    assert set(ranks(size)(runs.train, f"{kept} {flags}")) == {""}
    parts = {row["iteration"]: row for row in runs.rows(tmp_path / "parts")}
    assert list(parts) == list(whole)
    for iteration, row in whole.items():
        assert abs(parts[iteration]["lm_loss"] - row["lm_loss"]) < 1e-4
        assert parts[iteration]["consumed_tokens"] == row["consumed_tokens"]
    held_out = [row["lm_loss"] for row in runs.rows(tmp_path / "whole", "valid")]
    assert held_out[-1] < held_out[0]
    if then == "":
        assert ranks(1)(runs.evaluate_only, f"{kept} --results-dir {tmp_path / 'evaluated'}") == [""]
        (evaluated,) = runs.rows(tmp_path / "evaluated", "valid")
        last = runs.rows(tmp_path / "parts", "valid")[-1]
        assert (evaluated["iteration"], evaluated["lm_loss"]) == (last["iteration"], pytest.approx(last["lm_loss"]))


@pytest.mark.parametrize("packing", ["step", "none"])
def test_a_batch_without_a_trained_token_is_no_nan(ranks: RankPools, tmp_path: Path, packing: str) -> None:
    """Three of four chats, and so some whole steps, have nothing to learn; ranks have fewer chats than places."""
    data = with_mask(tmp_path / "rare", [[0, 0, 0, int(chat % 4 == 0)] for chat in range(12)])
    flags = f"{RUN} --num-epochs 1 --packing {packing} --data-path {data} --split 1,0,0 --global-batch-size 2"
    flags = flags.replace(" --max-batch-len 48", "") if packing == "none" else flags
    assert set(ranks(2)(runs.train, f"{flags} --results-dir {tmp_path / 'results'}")) == {""}
    losses = [row["lm_loss"] for row in runs.rows(tmp_path / "results")]
    assert len(losses) == 6
    assert np.isfinite(losses).all()
    assert 0.0 in losses
    assert max(losses) > 1.0


def test_each_epoch_ends_with_a_checkpoint_and_an_export(ranks: RankPools, data: Path, tmp_path: Path) -> None:
    saved, models = tmp_path / "saved", tmp_path / "models"
    flags = f"{RUN} --data-path {data} --save {saved} --save-hf {models} --save-at-epoch --save-samples 50"
    assert set(ranks(2)(runs.train, flags)) == {""}
    # 33 chats an epoch, 7 a step: that to 54 is the first to reach 50
    assert sorted(path.name for path in models.glob("samples_*")) == [f"samples_{n}" for n in (33, 54, 66, 99)]
    assert {path.name for path in saved.glob("global_step*")} >= {f"global_step{n}" for n in (5, 8, 10, 15)}


def task_of(data: Path, **options: Any) -> SFTTask:
    sections: dict[str, dict[str, Any]] = {
        "model": {"vocab_size": chats.VOCABULARY},
        "training": {"task": "sft", "num_epochs": 2, "seq_length": 32, "global_batch_size": 13},
        "data": {"data_path": [str(data)], "split": "1,0,0"},
        "sft": {},
    }
    if "valid_data_path" in options:
        sections["data"] = {"train_data_path": sections["data"]["data_path"]}
    for name, value in options.items():
        section = "data" if name in ("split", "valid_data_path") else "training" if name in TRAINING else "sft"
        sections[section][name] = value
    return SFTTask(from_dict(sections))


def open_data(task: SFTTask, num_batch_ranks: int = 1) -> Any:
    return task.data.open(ParallelContext(num_batch_ranks=num_batch_ranks))


TRAINING = ("seq_length", "global_batch_size", "micro_batch_size", "seed")


@pytest.mark.parametrize("packing", ["step", "dataset", "none"])
@pytest.mark.parametrize("size", [1, 2, 5])
def test_every_chat_is_read_once_an_epoch(data: Path, packing: str, size: int) -> None:
    task = task_of(data, packing=packing, micro_batch_size=1 if packing == "step" else 2)
    dataset: Any = open_data(task)[0]
    per_epoch = len(dataset)
    assert task.data.facts(dataset).samples_per_epoch == per_epoch

    def size_at(consumed: int) -> int:
        return min(13, per_epoch - consumed % per_epoch)

    plans = [task.data.plan(dataset, size_at, rank, size) for rank in range(size)]
    epochs: list[list[int]] = [[], []]
    consumed, tokens = 0, [0]
    for epoch in epochs:
        while consumed < per_epoch * (epochs.index(epoch) + 1):
            steps = [plan(consumed) for plan in plans]
            assert len({(samples, len(keys)) for samples, keys in steps}) == 1
            for _, keys in steps:
                batches = [task.read(dataset, key) for key in keys]
                assert all(batch.targets[0].shape[1] <= task.data.row_length for batch in batches)
                # rows of one shape in pipeline stages, which announce it once
                if not task.data.varies_shapes:
                    assert {batch.targets[0].shape for batch in batches} == {(2, task.data.row_length)}
                epoch += [chat for key in keys for chat in task.data.samples_of(key)]
            consumed += steps[0][0]
            tokens.append(task.data.facts(dataset).consumed_tokens(consumed))
        assert sorted(epoch) == list(range(41))
    lengths = getattr(dataset, "samples", dataset).lengths
    assert tokens[-1] == 2 * lengths.sum()
    assert all(before < after for before, after in pairwise(tokens))
    assert epochs[0] != epochs[1]


def test_a_row_holds_its_chats_one_after_another_and_nothing_that_counts_behind_them(data: Path) -> None:
    task = task_of(data, max_batch_len=64, bucketing="octave", buckets_per_octave=4)
    dataset: Any = open_data(task)[0]
    row = np.array([3, 17, 5])
    batch = task.read(dataset, [row])
    tokens, positions, starts = (part[0] for part in batch.inputs)
    labels, loss_mask = batch.targets
    begin, counted = 0, 0.0
    for chat in row:
        ids, mask = dataset.read(int(chat))
        place = slice(begin, begin + len(ids) - 1)
        assert tokens[place].tolist() == ids[:-1].tolist()
        assert labels[0, place].tolist() == ids[1:].tolist()
        assert loss_mask[0, place].tolist() == mask[1:].tolist()
        assert positions[place].tolist() == list(range(len(ids) - 1))
        assert set(starts[place].tolist()) == {begin}
        begin, counted = begin + len(ids) - 1, counted + mask[1:].sum()
    length = len(tokens)
    assert begin < length <= begin * 1.25
    assert starts[begin:].tolist() == list(range(begin, length))  # each place of padding sees itself
    assert not loss_mask[0, begin:].any()
    assert batch.normaliser == counted == loss_mask.sum()


def test_a_microbatch_without_chats_counts_nothing(data: Path) -> None:
    task = task_of(data)
    dataset: Any = open_data(task)[0]
    batch = task.read(dataset, [])
    assert (batch.targets[0].shape, batch.normaliser) == ((1, 1), 0.0)


@given(lengths=st.lists(st.integers(2, 33), min_size=1, max_size=40), k=st.integers(1, 6))
@settings(max_examples=30, deadline=None)
def test_optimal_buckets_are_few_and_long_enough(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], k: int
) -> None:
    data = chats.write_chats(tmp_path_factory.mktemp("drawn") / "chats", lengths, trained=1.0)
    task = task_of(data, bucketing="optimal", num_buckets=k, max_batch_len=50)
    open_data(task)
    found = [task.data.padded_length(filled) for filled in range(1, 51)]
    assert all(filled <= length <= 50 for filled, length in enumerate(found, 1))
    assert len(set(found)) <= k
    assert found == sorted(found)


def test_held_out_chats_may_be_longer_than_all_that_are_trained(tmp_path: Path) -> None:
    train = chats.write_chats(tmp_path / "train", [5, 6, 7, 9] * 4)
    valid = chats.write_chats(tmp_path / "valid", [30])
    options: dict[str, Any] = {"packing": "none", "bucketing": "optimal", "num_buckets": 2}
    task = task_of(train, valid_data_path=[str(valid)], **options)
    _, held_out, _ = open_data(task)
    batch = task.read(held_out, [np.array([0])])  # type: ignore[arg-type]
    assert batch.targets[0].shape == (1, 29)


def test_held_out_chats_do_not_hang_on_the_seed_and_are_never_trained_on(data: Path) -> None:
    named = []
    for seed in (1, 2):
        train, valid, test = (
            {dataset.documents_of(chat)[1][0] for chat in range(len(dataset))}
            for dataset in open_data(task_of(data, split="6,3,1", seed=seed))
            if dataset is not None
        )
        assert not train & valid | train & test | valid & test
        assert train | valid | test == set(range(41))
        named.append((train, valid, test))
    assert named[0] == named[1]
    assert named[0][0] != set(range(25))  # not the first ones: files are often sorted


def test_the_run_says_what_its_rows_are_like(data: Path) -> None:
    task = task_of(data, packing="none", micro_batch_size=4)
    dataset: Any = open_data(task)[0]
    description = task.data.facts(dataset).describe() or ""
    assert description.startswith(f"sft: 41 chats, {dataset.lengths.sum():,} tokens an epoch, ")
    assert "packing=none fills " in description
    assert "(of the first 4 steps)" in description


def with_mask(prefix: Path, masks: list[list[int]], dtype: Any = np.uint8) -> Path:
    for name, sequences, kind in (
        (prefix, [[1] * len(m) for m in masks], np.uint16),
        (f"{prefix}{LOSS_MASK_SUFFIX}", masks, dtype),
    ):
        with IndexedDatasetBuilder(name, kind) as builder:
            for sequence in sequences:
                builder.add_document(np.array(sequence, dtype=kind))
            builder.finalize()
    return prefix


def test_bad_data_is_told_at_once(data: Path, tmp_path: Path) -> None:
    def fault(prefix: Path, **options: Any) -> str:
        with pytest.raises(DataError) as raised:
            open_data(task_of(prefix, **options))
        return str(raised.value)

    assert "chats: chat" in (error := fault(data, seq_length=16))
    assert "more than seq_length + 1 = 17; raise seq_length, or preprocess with --max-length 17" in error
    assert "has a token to train on" in fault(with_mask(tmp_path / "masked", [[0, 0], [1, 0]]))
    assert "is not the mask of" in fault(with_mask(tmp_path / "wide", [[0, 1]], np.int32))
    assert "does not exist" in fault(tmp_path / "absent")
    alone = runs.write_dataset(tmp_path / "alone")
    assert "has no loss mask, which task=sft needs" in fault(alone)
    assert "leaves no chats to train on" in fault(data, split="0,1,0")
    other = chats.write_chats(tmp_path / "other", [5, 6])
    (tmp_path / "other_loss_mask.idx").write_bytes((tmp_path / "wide_loss_mask.idx").read_bytes())
    assert "preprocess" in fault(other) or "damaged" in fault(other)


def test_an_id_outside_the_vocabulary_is_named_when_it_is_opened_or_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with IndexedDatasetBuilder(tmp_path / "d", np.uint16) as builder:
        builder.add_document(np.array([1, 250, 3], dtype=np.uint16))
        builder.finalize()
    with IndexedDatasetBuilder(tmp_path / f"d{LOSS_MASK_SUFFIX}", np.uint8) as builder:
        builder.add_document(np.array([0, 1, 1], dtype=np.uint8))
        builder.finalize()
    task = task_of(tmp_path / "d")
    with pytest.raises(DataError, match="d: token 1 is 250, outside vocab_size=250; preprocess it with this model's"):
        open_data(task)
    monkeypatch.setattr(indexed, "VOCABULARY_PARTS", 0)
    dataset: Any = open_data(task)[0]
    with pytest.raises(DataError, match="chat 0 holds token 250, but vocab_size=250"):
        task.read(dataset, [np.array([0])])
