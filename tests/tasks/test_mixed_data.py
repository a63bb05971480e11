"""Several datasets of chats, pairs or text in one run: mixed by weight, counted, and resumed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.data.blend import SHOWN_DATASETS, Drawn, describe_mix
from megatron.data.index.indexed import DataError
from megatron.options.stored import from_dict
from megatron.parallel.context import ParallelContext
from megatron.tasks.objective import StartWeights
from megatron.tasks.preference import PreferenceTask
from megatron.tasks.sft import SFTTask
from megatron.tasks.stored_reference import StoredReference
from tests import runs
from tests.ranks import RankPools
from tests.tasks import chats, pairs

LARGE, SMALL = 40, 12
WEIGHTS = (0.4, 0.6)
COMMON = (
    "--num-epochs 2 --max-batch-len 66 --micro-batch-size 1 --vocab-size 250 --seq-length 32 --global-batch-size 7 "
    "--hidden-dropout 0 --attention-dropout 0 --architecture llama --position-embedding-type rope --split 1,0,0 "
    "--lr 1e-3"
)

PackedTask = SFTTask | PreferenceTask


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sets")
    chats.write_chats(folder / "large", chats.some_lengths(LARGE, 33))
    chats.write_chats(folder / "small", chats.some_lengths(SMALL, 33, seed=1), seed=1)
    pairs.write_pairs(folder / "pairs", pairs.some_pairs(20, 30))
    pairs.write_pairs(folder / "more", pairs.some_pairs(5, 30, seed=1))
    return folder


def task_of(kind: type[PackedTask], path: list[str], packing: str = "step", split: str = "1,0,0") -> PackedTask:
    name = "sft" if kind is SFTTask else "preference"
    return kind(
        from_dict(
            {
                "model": {"vocab_size": chats.VOCABULARY},
                "training": {"task": name, "num_epochs": 2, "seq_length": 32, "global_batch_size": 13},
                "data": {"data_path": path, "split": split},
                "sft": {"packing": packing},
            }
        )
    )


def read_by(task: PackedTask, dataset: Any, ranks: int, epochs: int) -> list[str]:
    """The prefix of every sample of some epochs, in the order of the steps."""
    per_epoch, found, consumed = len(dataset), list[str](), 0
    plans = [
        task.data.plan(dataset, lambda done: min(13, per_epoch - done % per_epoch), r, ranks) for r in range(ranks)
    ]
    while consumed < epochs * per_epoch:
        steps = [plan(consumed) for plan in plans]
        step = sorted(sample for _, keys in steps for key in keys for sample in task.data.samples_of(key))
        found += [Path(dataset.documents_of(sample)[0]).name for sample in step]
        consumed += steps[0][0]
    return found


@pytest.mark.parametrize("packing", ["step", "none"])
@pytest.mark.parametrize("kind", [SFTTask, PreferenceTask])
def test_samples_are_mixed_by_weight_whatever_the_ranks(folder: Path, kind: type[PackedTask], packing: str) -> None:
    names = ["large", "small"] if kind is SFTTask else ["pairs", "more"]
    words = [word for name, weight in zip(names, WEIGHTS, strict=True) for word in (str(weight), str(folder / name))]
    task = task_of(kind, words, packing)
    dataset: Any = task.data.open(ParallelContext())[0]
    found = read_by(task, dataset, 1, epochs=3)
    assert found == read_by(task, dataset, 4, epochs=3)
    assert abs(found.count(names[0]) / len(found) - WEIGHTS[0]) < 0.01
    drawn = task.data.facts(dataset).drawn(len(found))
    assert [(Path(each.prefix).name, each.samples) for each in drawn] == [(name, found.count(name)) for name in names]
    assert [each.epochs for each in drawn] == [
        found.count(name) / (LARGE if name == "large" else SMALL if name == "small" else 20 if name == "pairs" else 5)
        for name in names
    ]
    assert sum(each.tokens for each in drawn) == task.data.facts(dataset).consumed_tokens(len(found))


def test_rows_of_a_whole_dataset_are_mixed_by_weight(folder: Path) -> None:
    words = ["3", str(folder / "large"), "1", str(folder / "small")]
    task = task_of(SFTTask, words, "dataset")
    dataset: Any = task.data.open(ParallelContext())[0]
    per_epoch = len(dataset)
    rows = [dataset.row(epoch, place) for epoch in range(4) for place in range(per_epoch)]
    names = [{Path(dataset.documents_of(int(sample))[0]).name for sample in row} for row in rows]
    assert all(len(each) == 1 for each in names)  # one dataset a row
    share = sum(each == {"large"} for each in names) / len(names)
    assert abs(share - 0.75) <= 1 / per_epoch
    lengths = dataset.samples.lengths
    assert all(lengths[row].sum() <= 32 for row in rows)
    tokens = [task.data.facts(dataset).consumed_tokens(count) for count in range(len(rows) + 1)]
    assert np.diff(tokens).tolist() == [lengths[row].sum() for row in rows]
    of_large = [row for row, each in zip(rows, names, strict=True) if each == {"large"}]
    first_pass = np.concatenate(of_large)[:LARGE]
    assert len(set(first_pass.tolist())) == LARGE  # none twice before all were read once


def test_a_dataset_that_no_epoch_would_read_is_refused(tmp_path: Path) -> None:
    names = [str(chats.write_chats(tmp_path / name, [9])) for name in ("a", "b", "c")]
    task = task_of(SFTTask, ["90", names[0], "5", names[1], "5", names[2]])
    with pytest.raises(DataError, match="c has the weight 5 of 100, less than one of the 3 samples of an epoch; raise"):
        task.data.open(ParallelContext())


def test_a_mixed_run_says_what_it_reads_and_resumes_on_another_layout(
    ranks: RankPools, folder: Path, tmp_path: Path
) -> None:
    common = f"--task sft {COMMON} --data-path 0.4 {folder / 'large'} 0.6 {folder / 'small'}"
    (said,) = ranks(1)(runs.announced, f"{common} --results-dir {tmp_path / 'whole'}")
    whole = runs.rows(tmp_path / "whole")
    # 2 epochs of 52 samples, as many as there are chats
    expected = [(21 + 21, 42 / LARGE), (31 + 31, 62 / SMALL)]
    mixes = [line for line in said if line.startswith("mix: ")]
    for line, name, (samples, epochs) in zip(mixes, ("large", "small"), expected, strict=True):
        assert f"{folder / name}: {samples} samples ({samples / 104:.1%}), " in line
        assert line.endswith(f", {epochs:.2f} epochs")
    summary = (tmp_path / "whole" / "summary.txt").read_text()
    assert [line.split(None, 1)[1] for line in summary.splitlines() if line.startswith("mix ")] == [
        line.removeprefix("mix: ") for line in mixes
    ]
    ended = json.loads((tmp_path / "whole" / "run.json").read_text())["starts"][-1]["ended"]
    assert [each["samples"] for each in ended["mix"]] == [42, 62]
    assert sum(each["tokens"] for each in ended["mix"]) == whole[-1]["consumed_tokens"]

    kept = f"{common} --save {tmp_path / 'saved'} --results-dir {tmp_path / 'parts'}"
    assert set(ranks(1)(runs.train, f"{kept} --exit-interval 10")) == {""}  # within the second epoch
    (refused,) = ranks(1)(runs.train, kept.replace("0.6", "0.7"))
    assert refused.startswith("CheckpointError: ")
    assert "data_path=0.4 " in refused
    assert "--allow-data-change" in refused
    assert set(ranks(2)(runs.train, f"{kept} --pipeline-model-parallel-size 2")) == {""}
    parts = runs.rows(tmp_path / "parts")
    for row, before in zip(parts, whole, strict=True):
        assert row["consumed_tokens"] == before["consumed_tokens"]
        exact = row["iteration"] <= 10
        assert row["lm_loss"] == (before["lm_loss"] if exact else pytest.approx(before["lm_loss"], abs=1e-5))


def test_a_mixed_run_resumes_bit_for_bit_and_pretraining_counts_its_mix(
    ranks: RankPools, folder: Path, tmp_path: Path
) -> None:
    sft = f"--task sft {COMMON} --data-path 0.4 {folder / 'large'} 0.6 {folder / 'small'} --num-epochs 1"
    for data, count in ((sft, 8), (text_run(tmp_path), 6)):
        results, saved = (tmp_path / f"{name}{count}" for name in ("results", "saved"))
        kept = f"{data} --save {saved} --results-dir {results}"
        (said,) = ranks(1)(runs.announced, f"{data} --results-dir {results}-whole")
        assert len([line for line in said if line.startswith("mix: ")]) == 2
        assert ranks(1)(runs.train, f"{kept} --exit-interval 3") == [""]
        assert ranks(1)(runs.train, kept) == [""]
        whole, parts = (runs.rows(Path(path)) for path in (f"{results}-whole", results))
        assert len(whole) == count
        assert [row["lm_loss"] for row in parts] == [row["lm_loss"] for row in whole]
    ended = json.loads((Path(f"{results}-whole") / "run.json").read_text())["starts"][-1]["ended"]
    assert [each["samples"] for each in ended["mix"]] == [36, 12]  # 6 steps of 8 samples, 3 to 1
    assert ended["mix"][1]["tokens"] == 12 * 16


def text_run(folder: Path) -> str:
    a, b = (runs.write_dataset(folder / name, seed=seed) for seed, name in enumerate(("a", "b")))
    return f"--data-path 3 {a} 1 {b} --train-iters 6"


def test_long_mixes_are_cut_short() -> None:
    lines = describe_mix([Drawn(f"set{number}", 10, 100, 1.0) for number in range(100)])
    assert len(lines) == SHOWN_DATASETS + 1
    assert lines[0] == "set0: 10 samples (1.0%), 100 tokens (1.0%), 1.00 epochs"
    assert lines[-1] == "and 60 datasets more"


def test_the_stored_reference_of_each_dataset_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [str(pairs.write_pairs(tmp_path / name, pairs.some_pairs(rows, 30))) for name, rows in (("a", 6), ("b", 2))]
    monkeypatch.setattr(StoredReference, "_compute", lambda self, numbers, forward: -np.ones(len(numbers), np.float32))
    for computed in ((12, 4), (0, 0)):
        task, ctx = task_of(PreferenceTask, paths), ParallelContext.single()
        lines = task.objective.before_training(task.data.open(ctx)[:1], None, StartWeights("", True), ctx)  # type: ignore[arg-type]
        for line, path, count, new in zip(lines, paths, (12, 4), computed, strict=True):
            assert line.startswith(f"reference of {count} answers, {new} of them computed now: {path}.reference-")
