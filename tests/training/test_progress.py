"""A run is resumed on the data it was trained on, in the same order, or it is told so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron.checkpoint.format import CheckpointError
from megatron.checkpoint.reader import Checkpoint
from megatron.data.gpt import open_datasets
from megatron.options.config import Config
from megatron.options.stored import from_dict
from megatron.tasks.pretrain import PretrainTask
from megatron.training.resume import SavedData, check_data
from tests import runs
from tests.ranks import RankPools


def config(data: Path | str, iters: int, **others: Any) -> Config:
    sections: dict[str, Any] = {
        "model": {"vocab_size": 128},
        "training": {"train_iters": iters, "global_batch_size": 4, "seq_length": 16},
        "data": {"data_path": str(data).split(), "split": "1", "eval_iters": 0},
        "checkpoint": {},
    }
    for name, value in others.items():
        section = "checkpoint" if name == "allow_data_change" else "training" if name == "seed" else "data"
        sections[section][name] = value
    return from_dict(sections)


def fingerprint(run: Config) -> str:
    train: Any = open_datasets(run)[0]
    return str(train.fingerprint)


def resume(before: Config, now: Config, saved_fingerprint: str | None = None) -> str | None:
    """What check_data says of continuing `before` as `now`. The config goes through JSON, as it does on disk."""
    saved = json.loads(json.dumps(before.to_dict()))
    known = SavedData(Path("ckpt"), saved_fingerprint or fingerprint(before), saved)
    return check_data(known, now, PretrainTask(now), fingerprint(now))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """60 documents: about 2,900 tokens, 180 samples of 16."""
    return runs.write_dataset(tmp_path / "data")


def test_more_iterations_within_the_same_epochs_are_accepted(data: Path) -> None:
    assert resume(config(data, 5), config(data, 40)) is None
    assert resume(config(data, 40), config(data, 5)) is None


def test_a_moved_dataset_is_the_same_data(data: Path, tmp_path: Path) -> None:
    before = config(data, 5)
    known = fingerprint(before)
    (tmp_path / "elsewhere").mkdir()
    for ending in (".bin", ".idx"):
        Path(f"{data}{ending}").rename(tmp_path / "elsewhere" / f"d{ending}")
    assert resume(before, config(tmp_path / "elsewhere" / "d", 5), known) is None


@pytest.mark.parametrize("path", ["{d}", "1 {d} 2 {d}"])
def test_an_epoch_that_joins_in_is_refused_as_that(data: Path, path: str) -> None:
    words = path.format(d=data)
    with pytest.raises(CheckpointError) as refused:
        resume(config(words, 5), config(words, 400))
    message = str(refused.value)
    assert f"data_path={words} is repeated another number of times" in message
    assert "train_iters=5 of global_batch_size=4" in message
    assert "train_iters=400 of global_batch_size=4" in message
    assert "--allow-data-change" in message


def test_other_documents_at_the_same_place_are_refused(data: Path) -> None:
    before = config(data, 5)
    known = fingerprint(before)
    runs.write_dataset(data, seed=1)
    with pytest.raises(CheckpointError, match=f"data_path={data} holds other documents or tokens than it did"):
        resume(before, config(data, 5), known)
    assert "holds other documents" in str(resume(before, config(data, 5, allow_data_change=True), known))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"split": "9,1"}, "split=9,1 here, 1 there"),
        ({"seed": 5}, "seed=5 here, 1234 there"),
    ],
)
def test_a_changed_option_is_named(data: Path, change: dict[str, Any], said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        resume(config(data, 5), config(data, 5, **change))


def test_another_path_is_named_with_the_saved_one(data: Path, tmp_path: Path) -> None:
    other = runs.write_dataset(tmp_path / "other", seed=3)
    with pytest.raises(CheckpointError, match=f"data_path={other} here, {data} there"):
        resume(config(data, 5), config(other, 5))
    with pytest.raises(CheckpointError, match=f"data_path=1 {data} 1 {other} here, {data} there"):
        resume(config(data, 5), config(f"1 {data} 1 {other}", 5))


def test_one_rank_of_a_host_warns_of_its_data(ranks: RankPools, tmp_path: Path) -> None:
    small = runs.write_dataset(tmp_path / "small", documents=4)
    flags = f"--data-path {small} --split 99,1,0 --train-iters 1 --lr-warmup-iters 0"
    first, second = ranks(2)(runs.warned_of_data, flags)
    assert (first, second) == (
        [f"no validation documents in {small} (split=99,1,0); the run has no validation loss"],
        [],
    )


def test_a_run_is_refused_before_anything_is_built_and_goes_on_when_allowed(
    ranks: RankPools, tmp_path: Path, data: Path
) -> None:
    flags = f"--data-path {data} --save {tmp_path / 'saved'} --load {tmp_path / 'saved'} --lr-warmup-iters 0"
    flags += " --position-embedding-type alibi"
    assert set(ranks(2)(runs.train, f"{flags} --train-iters 3")) == {""}
    longer = f"{flags} --train-iters 4 --exit-interval 4"  # in the same order, with another learning rate
    for fault in ranks(2)(runs.train, longer):
        assert "global_step3 was trained with another schedule" in fault
        assert "lr_decay_samples=32 here, 24 there" in fault
    kept = f"{longer} --use-checkpoint-opt-param-scheduler --results-dir {tmp_path / 'results'}"
    assert set(ranks(2)(runs.train, kept)) == {""}
    assert runs.rows(tmp_path / "results")[0]["learning_rate"] == pytest.approx(0)  # the end of 3 steps of decay
    assert Checkpoint(tmp_path / "saved" / "global_step4").metadata["schedule"]["lr_decay_samples"] == 24
    flags += " --override-opt-param-scheduler"
    runs.write_dataset(data, seed=1)
    refused = ranks(2)(runs.train, f"{flags} --train-iters 5")
    assert all("CheckpointError" in fault and "holds other documents" in fault for fault in refused), refused
    flags += f" --seq-length 8 --results-dir {tmp_path / 'shorter'}"
    said = ranks(2)(runs.announced, f"{flags} --train-iters 5 --allow-data-change")[0]
    assert said[0].startswith("WARNING: the data is not that of the checkpoint (allow_data_change): ")
    assert said[-1] == "changed since the checkpoint: seq_length=8 here, 16 there; train_iters=5 here, 4 there"
    # the tokens of the earlier steps count as they were read, four of 8 samples of 16 tokens
    assert runs.rows(tmp_path / "shorter")[0]["consumed_tokens"] == 4 * 8 * 16 + 8 * 8
    assert Checkpoint(tmp_path / "saved" / "global_step5").metadata["progress"]["consumed_tokens"] == 576
    assert (tmp_path / "saved" / "latest").read_text().split()[0] == "global_step5"
