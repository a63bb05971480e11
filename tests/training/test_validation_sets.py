"""Held-out data of several datasets, evaluated one by one and together."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron.data.blend import names_of
from megatron.settings.command_line import load_config
from megatron.settings.validation import idle
from megatron.training.interludes.evaluation import Evaluated, mean_of
from tests import runs
from tests.ranks import RankPools
from tests.tasks import chats, pairs

SFT = (
    "--vocab-size 250 --seq-length 32 --global-batch-size 7 --micro-batch-size 1 --hidden-dropout 0 "
    "--attention-dropout 0 --architecture llama --position-embedding-type rope"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sets")
    for seed, name in enumerate(("train", "math", "code")):
        (folder / name).mkdir()
        runs.write_dataset(folder / name / "text", 20 + 10 * seed, seed=seed)
        chats.write_chats(folder / name / "chats", chats.some_lengths(20 + 10 * seed, 33, seed), seed)
        pairs.write_pairs(folder / name / "pairs", pairs.some_pairs(6 + 3 * seed, 24, seed))
    return folder


def flags_of(task: str, folder: Path, valid: str) -> str:
    data = {"pretrain": "text", "sft": "chats", "preference": "pairs"}[task]
    paths = " ".join(str(folder / word / data) if word.isalpha() else word for word in valid.split())
    given = {
        "pretrain": "",
        "sft": f"--task sft {SFT}",
        "preference": f"--task preference {SFT} --preference-loss orpo",
    }[task]
    return (
        f"{given} --train-iters 1 --train-data-path {folder / 'train' / data} --valid-data-path {paths} --eval-iters 3"
    )


def validations(results: Path, kind: str = "valid") -> list[dict[str, Any]]:
    return [row for row in runs.rows(results, kind) if row["iteration"] == 0]


@pytest.mark.parametrize("task", ["pretrain", "sft", "preference"])
def test_each_dataset_has_the_loss_that_it_has_alone(ranks: RankPools, folder: Path, tmp_path: Path, task: str) -> None:
    together = flags_of(task, folder, "3 math 1 code") + " --multiple-validation-sets"
    assert ranks(1)(runs.train, f"{together} --results-dir {tmp_path / 'all'}") == [""]
    sets = validations(tmp_path / "all", "valid_set")
    (mean,) = validations(tmp_path / "all")
    data = {"pretrain": "text", "sft": "chats", "preference": "pairs"}[task]
    assert [row["set"] for row in sets] == [f"math/{data}", f"code/{data}"]
    assert mean["lm_loss"] == pytest.approx((3 * sets[0]["lm_loss"] + sets[1]["lm_loss"]) / 4)
    unit = "num_pairs" if task == "preference" else "num_tokens"
    assert mean[unit] == sum(row[unit] for row in sets)
    assert ranks(1)(runs.train, f"{flags_of(task, folder, 'code')} --results-dir {tmp_path / 'code'}") == [""]
    (alone,) = validations(tmp_path / "code")
    known = ("lm_loss", "perplexity", unit, "metrics", "consumed_samples")
    assert [sets[1].get(name) for name in known] == [alone.get(name) for name in known]
    if task == "preference":
        assert mean["metrics"]["rewards/margins"] == pytest.approx(
            (3 * sets[0]["metrics"]["rewards/margins"] + sets[1]["metrics"]["rewards/margins"]) / 4
        )
    else:
        events = EventAccumulator(str(tmp_path / "all" / "tensorboard")).Reload()
        tag = f"lm-loss-validation/lm loss validation math/{data}"
        assert events.Scalars(tag)[0].value == pytest.approx(sets[0]["lm_loss"], rel=1e-6)
        assert f"validation math/{data} loss at iteration 0" in (tmp_path / "all" / "train.log").read_text()


@pytest.mark.parametrize(
    "other", ["--pipeline-model-parallel-size 2", pytest.param("--context-parallel-size 2", marks=pytest.mark.slow)]
)
def test_datasets_are_evaluated_alike_on_another_layout(
    ranks: RankPools, folder: Path, tmp_path: Path, other: str
) -> None:
    flags = flags_of("sft", folder, "math code") + " --multiple-validation-sets --packing dataset"
    layouts = {1: "", 2: other}
    for size, layout in layouts.items():
        assert set(ranks(size)(runs.train, f"{flags} {layout} --results-dir {tmp_path / str(size)}")) == {""}
    one, two = (validations(tmp_path / str(size), "valid_set") for size in layouts)
    assert [row["set"] for row in one] == [row["set"] for row in two] == ["math/chats", "code/chats"]
    for row, same in zip(one, two, strict=True):
        assert row["lm_loss"] == pytest.approx(same["lm_loss"], abs=1e-5)
    (mean,) = validations(tmp_path / "1")  # of all tokens, without weights
    total = sum(row["lm_loss"] * row["num_tokens"] for row in one)
    assert mean["lm_loss"] == pytest.approx(total / mean["num_tokens"])


def test_means_leave_out_what_counts_nothing() -> None:
    found = [Evaluated(2.0, 10, {"a": 1.0}), Evaluated(0.0, 0, {"a": math.nan}), Evaluated(4.0, 30, {"a": 3.0})]
    assert tuple(mean_of(found, None)) == (pytest.approx(3.5), 40, {"a": pytest.approx(2.5)})
    assert tuple(mean_of(found, [0.25, 0.5, 0.25])) == (pytest.approx(3.0), 40, {"a": pytest.approx(2.0)})
    assert mean_of(found[1:2], None).normaliser == 0
    found = [Evaluated(2.0, 10, {"a": 1.0, "b": math.nan}), Evaluated(4.0, 30, {"a": math.nan, "b": math.nan})]
    assert mean_of(found, [0.5, 0.5]).metrics["a"] == 1.0
    assert math.isnan(mean_of(found, None).metrics["b"])
    assert math.isnan(
        mean_of([found[0], Evaluated(math.nan, 30, {"a": math.nan, "b": 1.0})], None).metrics["a"]
    )  # diverged


@pytest.mark.parametrize(
    ("prefixes", "names"),
    [
        (["data/math", "data/code"], ["math", "code"]),
        (["x/math/data", "x/code/data"], ["math/data", "code/data"]),
        (["a/data", "data"], ["a/data", "data"]),
        (["a", "a"], ["a (1)", "a (2)"]),
    ],
)
def test_names_are_the_shortest_that_differ(prefixes: list[str], names: list[str]) -> None:
    assert names_of(prefixes) == names


def test_one_dataset_alone_is_said_to_need_no_flag(folder: Path) -> None:
    words = [*runs.TINY.split(), *flags_of("pretrain", folder, "math").split(), "--multiple-validation-sets"]
    assert [line for line in idle(load_config(words)) if line.startswith("multiple_validation_sets")]
    words = [*runs.TINY.split(), *flags_of("pretrain", folder, "math code").split(), "--multiple-validation-sets"]
    assert not [line for line in idle(load_config(words)) if line.startswith("multiple_validation_sets")]
