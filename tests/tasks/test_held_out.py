"""Held-out chats and pairs: none of them is trained on, also where a file holds it twice or two files hold it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.data.index.indexed import LOSS_MASK_SUFFIX
from megatron.data.index.indexed_builder import IndexedDatasetBuilder
from megatron.data.splits import rows_of_split
from megatron.options.dependents import idle_without
from megatron.options.stored import from_dict
from megatron.parallel.context import ParallelContext
from megatron.tasks.preference import PreferenceTask
from megatron.tasks.sft import SFTTask
from tests.tasks import chats, pairs

PackedTask = SFTTask | PreferenceTask


def write(prefix: Path, found: list[Any], kind: type[PackedTask], dtype: Any = np.uint16) -> str:
    if kind is PreferenceTask:
        return str(pairs.write_pairs(prefix, found))
    with (
        IndexedDatasetBuilder(prefix, dtype) as tokens,
        IndexedDatasetBuilder(f"{prefix}{LOSS_MASK_SUFFIX}", np.uint8) as mask,
    ):
        for ids in found:
            tokens.add_document(np.array(ids, dtype))
            mask.add_document(np.ones(len(ids), np.uint8))
        tokens.finalize()
        mask.finalize()
    return str(prefix)


def some(kind: type[PackedTask], count: int) -> list[Any]:
    """Samples that begin and end alike, of few lengths."""
    if kind is PreferenceTask:
        return [([1, 2, number % 200], [5, number // 200, 7], [8]) for number in range(count)]
    return [[1, 2, 3, number % 200, number // 200, *range(6 + number % 2), 9] for number in range(count)]


def opened(kind: type[PackedTask], *, split: str = "6,3,1", **paths: list[str]) -> list[Any]:
    sections = {
        "model": {"vocab_size": chats.VOCABULARY},
        "training": {
            "task": "sft" if kind is SFTTask else "preference",
            "num_epochs": 2,
            "seq_length": 32,
            "global_batch_size": 13,
        },
        "data": {"split": split, **paths} if "data_path" in paths else paths,
        "preference": {"preference_loss": "orpo"} if kind is PreferenceTask else {},
    }
    return list(kind(from_dict(sections)).data.open(ParallelContext()))


def contents(dataset: Any) -> list[tuple[int, ...]]:
    found = []
    for sample in range(len(dataset)):
        parts = dataset.read(sample)
        ids = parts[0] if isinstance(parts[0], np.ndarray) else [*parts[0].ids, -1, *parts[1].ids]
        found.append(tuple(int(token) for token in ids))
    return found


@pytest.mark.parametrize("kind", [SFTTask, PreferenceTask])
def test_no_held_out_sample_is_also_trained_on(
    tmp_path: Path, kind: type[PackedTask], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    first = some(kind, 60)
    second = [*some(kind, 100)[80:], *first[:30]]  # half of one file once more in another
    path = [write(tmp_path / "a", first + first[:15], kind), write(tmp_path / "b", second, kind, np.int32)]
    train, valid, test = opened(kind, data_path=path)
    trained, held_out, tested = (contents(dataset) for dataset in (train, valid, test))
    assert not set(trained) & set(held_out)
    assert not set(tested) & {*trained, *held_out}
    sizes = [75, 50]
    config = from_dict({"data": {"data_path": path, "split": "6,3,1"}})
    # the training data is what it was, and so are held-out samples that occur once
    for file, size in zip(train.files, sizes, strict=True):
        assert np.array_equal(file.rows, rows_of_split(size, config, 0))
    for file, size in zip(valid.files, sizes, strict=True):
        every = contents_of_file(file, kind)
        expected = [row for row in rows_of_split(size, config, 1) if every[row] not in set(trained)]
        assert file.rows.tolist() == expected
    whole = sum(len(rows_of_split(size, config, 1)) for size in sizes)
    assert 0 < len(held_out) < whole
    warnings = [record.getMessage() for record in caplog.records if "too; left out" in record.getMessage()]
    counts = [int(line.split(": ")[1].split()[0]) for line in warnings if line.startswith("valid: ")]
    assert sum(counts) == whole - len(held_out)


@pytest.mark.parametrize("kind", [SFTTask, PreferenceTask])
def test_a_file_too_small_for_validation_samples_is_named(
    tmp_path: Path, kind: type[PackedTask], caplog: pytest.LogCaptureFixture
) -> None:
    path = [write(tmp_path / "a", some(kind, 4), kind)]
    assert opened(kind, data_path=path, split="95,5")[1] is None
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith("no validation ")
    assert said.endswith(f" in {path[0]}; the run has no validation loss")


@pytest.mark.parametrize("kind", [SFTTask, PreferenceTask])
def test_samples_that_are_held_out_and_not_evaluated_are_warned_of(kind: type[PackedTask]) -> None:
    """As of `run_sft.sh --split 9,1,0`: the recipes have eval_iters=0."""
    for split, eval_iters, warns in (("9,1,0", 0, True), ("9,1,0", 4, False), ("1,0,0", 0, False)):
        config = from_dict({"data": {"data_path": ["a"], "split": split, "eval_iters": eval_iters}})
        said = [line for line in kind(config).idle() if "nothing evaluates" in line]
        assert [line.startswith(f"split={split} holds out ") for line in said] == [True] * warns
    config = from_dict({"data": {"train_data_path": ["a"], "valid_data_path": ["b"], "eval_iters": 0}})
    assert "valid_data_path=('b',) has no effect without eval_iters; set it, or leave it out" in idle_without(config)


def contents_of_file(file: Any, kind: type[PackedTask]) -> list[tuple[int, ...]]:
    if kind is SFTTask:
        return [tuple(file.tokens.read(row).tolist()) for row in range(len(file.tokens))]
    found = []
    for row in range(len(file.tokens) // 3):
        prompt, chosen, rejected = (file.tokens.read(3 * row + part).tolist() for part in range(3))
        found.append((*prompt, *chosen, -1, *prompt, *rejected))
    return found


def test_samples_that_differ_in_one_token_are_all_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    found = [[7] * 30 for _ in range(29)]
    for place, ids in enumerate(found):
        ids[place] = 8
    train, valid, _ = opened(SFTTask, data_path=[write(tmp_path / "a", found, SFTTask)], split="1,1,0")
    assert len(train) + len(valid) == 29
    assert not caplog.records


def test_pairs_with_the_same_tokens_in_other_parts_are_not_the_same(tmp_path: Path) -> None:
    found = [([1, 2], [3], [4, 5]), ([1], [2, 3], [4, 5])] * 1
    train, valid, _ = opened(PreferenceTask, data_path=[write(tmp_path / "a", found, PreferenceTask)], split="1,1,0")
    assert (len(train), len(valid)) == (1, 1)


def test_validation_data_of_the_users_own_is_kept_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = [write(tmp_path / "a", some(SFTTask, 20), SFTTask)]
    train, valid, _ = opened(SFTTask, train_data_path=path, valid_data_path=path)
    assert len(train) == len(valid) == 20
    assert f"valid: 20 of 20 chats of {path[0]} are in the training data too; the loss over them" in caplog.text


def test_a_file_of_one_chat_many_times_leaves_no_validation(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train, valid, _ = opened(SFTTask, data_path=[write(tmp_path / "a", [[1, 2, 3]] * 20, SFTTask)])
    assert (len(train), valid) == (12, None)
    assert "valid: 6 of 6 chats of " in caplog.text
