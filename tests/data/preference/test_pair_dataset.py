"""Which pairs a dataset leaves out, and what it warns of, against cutting each pair by itself."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest

from megatron.data.index.indexed import DataError
from megatron.data.preference.dataset import open_pairs
from megatron.settings.command_line import parse_arguments
from tests.tasks.pairs import write_pairs

Pairs = list[list[list[int]]]
LENGTH = 8


def few_tokens(count: int) -> Pairs:
    """Pairs of two tokens alone, of which many are equal once they are cut, and none before."""
    generator = np.random.default_rng(0)
    pairs = [
        [(generator.random(generator.integers(1, most)) < 0.1).astype(int).tolist() for most in (12, 14, 14)]
        for _ in range(count)
    ]
    return [pair for pair in pairs if pair[1] != pair[2]]


def left_out(pairs: Pairs, truncation: str) -> dict[str, list[int]]:
    """Rows by the reason: an answer is what is left of its ids, and where it begins."""
    found: dict[str, list[int]] = {"no answer": [], "equal": []}
    for row, (prompt, *answers) in enumerate(pairs):
        wholes = [prompt + answer for answer in answers]
        if truncation == "keep_start":
            sides = [(whole[:LENGTH], len(prompt)) for whole in wholes]
        else:
            sides = [(whole[-LENGTH:], max(0, len(prompt) - max(0, len(whole) - LENGTH))) for whole in wholes]
        if any(begin >= LENGTH for _, begin in sides):
            found["no answer"].append(row)
        elif sides[0] == sides[1] and min(map(len, wholes)) > LENGTH:
            found["equal"].append(row)
    return found


def opened(prefix: Path, truncation: str) -> list[int]:
    words = "--config tiny_llama --task preference --num-epochs 1 --train-samples none --split 1,0,0 --device cpu "
    words += f"--data-path {prefix} --seq-length {LENGTH - 1} --truncation {truncation}"
    dataset = open_pairs(parse_arguments(words.split())[0], needs_both=True)[0]
    return dataset.files[0].rows.tolist()


@pytest.mark.parametrize("truncation", ["keep_start", "keep_end"])
def test_pairs_without_an_answer_or_a_difference_are_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, truncation: str
) -> None:
    pairs = few_tokens(600)
    expected = left_out(pairs, truncation)
    with caplog.at_level(logging.WARNING):
        rows = opened(write_pairs(tmp_path / "pairs", pairs), truncation)
    assert rows == [row for row in range(len(pairs)) if all(row not in out for out in expected.values())]
    assert len(expected["equal"]) > 5
    reasons = [("no answer", "so that no answer is left")] * (truncation == "keep_start") + [("equal", "when they are")]
    assert len(caplog.messages) == len(reasons)
    for said, (reason, words) in zip(caplog.messages, reasons, strict=True):
        assert words in said
        assert f"{len(expected[reason])} pairs" in said
        assert f"(the first is row {expected[reason][0]}); left out" in said
    counts = "".join(f".*{len(expected[reason])} pairs .*{words}" for reason, words in reasons)
    with pytest.raises(DataError, match=f"{counts}.*or take unusable_pairs=skip"):
        opened(tmp_path / "pairs", f"{truncation} --unusable-pairs error")


def test_a_pointer_outside_of_the_tokens_is_refused(tmp_path: Path) -> None:
    prefix = write_pairs(tmp_path / "pairs", [[[1] * 4, [2] * 9, [3] * 9]] * 3)
    index = bytearray(prefix.with_suffix(".idx").read_bytes())
    first_pointer = 34 + 4 * 9
    index[first_pointer + 8 * 4 : first_pointer + 8 * 5] = (1 << 40).to_bytes(8, "little")
    prefix.with_suffix(".idx").write_bytes(index)
    with pytest.raises(DataError, match="sequence 4 lies at byte"):
        opened(prefix, "keep_start")
