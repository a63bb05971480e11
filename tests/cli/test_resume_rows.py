"""--resume of tools/preprocess_chat.py and preprocess_preferences.py: a kill at any moment, and then the same bytes."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from megatron.cli.data import preprocess_chat, preprocess_preferences
from megatron.data.index.indexed import IndexedDataset
from megatron.data.prepare import rows as row_preparation
from megatron.runtime.files import IMPORT_ROOT
from tests.cli.test_preprocess_faults import outputs, run_and_die_at, whole_pairs
from tests.data.chat.test_preprocessing import chat
from tests.data.chat.test_preprocessing import tokenizer as tokenizer  # the fixture
from tests.ranks import HANG_S

Main = Callable[[Sequence[str] | None], int]
MAINS: dict[str, Main] = {"chats": preprocess_chat.main, "pairs": preprocess_preferences.main}


def rows_of(kind: str, count: int) -> list[dict[str, Any]]:
    """Rows of which every fourth is bad, and every fifth leaves a column unread."""
    rows: list[dict[str, Any]] = []
    for number in range(count):
        row: dict[str, Any] = {"prompt": f"question {number}", "chosen": "a" * (number % 7 + 1), "rejected": "no"}
        if kind == "chats":
            row = chat(f"question {number}", "answer " * (number % 7 + 1))
        if number % 5 == 4:
            row["raw 2"] = number
        rows.append({"messages": []} if number % 4 == 3 else row)
    return rows


def write(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    if path.suffix == ".json":
        path.write_text(json.dumps(rows, indent=1))
    elif path.suffix == ".gz":
        path.write_bytes(gzip.compress(lines.encode()))
    elif path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path, row_group_size=5)
    else:
        path.write_text(lines)


def command(kind: str, source: Path, folder: Path, tokenizer: Path, *more: str) -> list[str]:
    """With a state saved after each block."""
    flags = ["--input", str(source), "--output-prefix", str(folder / "out"), "--resume-interval", "0", "--workers", "1"]
    flags += ["--tokenizer-model", str(tokenizer), "--bad-rows", "skip"]
    if kind == "chats":
        flags += ["--chat-template", "chatml", "--max-length", "60", "--too-long", "split"]
    return [*flags, *more]


def check_pair_of_datasets(folder: Path) -> None:
    """Fail if a reader would take tokens without their mask, or with that of another run."""
    if (folder / "out.idx").exists():
        tokens, mask = IndexedDataset(folder / "out"), IndexedDataset(folder / "out_loss_mask")
        assert tokens.lengths.tolist() == mask.lengths.tolist()


@pytest.mark.parametrize(
    ("kind", "ending", "step"),
    [
        pytest.param("chats", "jsonl", 3, marks=pytest.mark.slow),
        pytest.param("chats", "jsonl", 1, marks=pytest.mark.slow),
        ("chats", "json", 15),
        ("chats", "jsonl.gz", 15),
        pytest.param("pairs", "jsonl", 3, marks=pytest.mark.slow),
        ("pairs", "parquet", 8),
    ],
)
def test_a_kill_before_any_change_of_the_file_system_can_be_resumed(
    kind: str, ending: str, step: int, tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or before each `step`th one, which differs from the others in the reader of the input alone."""
    monkeypatch.setattr(row_preparation, "BLOCK_BYTES", 300)
    source = tmp_path / f"in.{ending}"
    write(source, rows_of(kind, 11))
    (old := tmp_path / "old").mkdir()
    write(tmp_path / "old.jsonl", rows_of(kind, 5))
    assert MAINS[kind](command(kind, tmp_path / "old.jsonl", old, tokenizer)) == 0
    (whole := tmp_path / "whole").mkdir()
    assert MAINS[kind](command(kind, source, whole, tokenizer)) == 0
    expected = outputs(whole)
    num_datasets = 2 if kind == "chats" else 1
    assert len(expected) == 4 * num_datasets
    looked_finished = set()
    for call in range(1, 1000, step):
        folder = tmp_path / str(call)
        folder.mkdir()
        for path in old.iterdir():
            (folder / path.name).write_bytes(path.read_bytes().replace(b"/old/", b"/%d/" % call))
        arguments = command(kind, source, folder, tokenizer, "--overwrite")
        was_killed = run_and_die_at(call, arguments, MAINS[kind])
        looked_finished.add(whole_pairs(folder))
        if kind == "chats":
            check_pair_of_datasets(folder)
        if was_killed:
            assert not run_and_die_at(0, [*arguments, "--resume"], MAINS[kind])
        assert outputs(folder) == expected
        assert not (folder / "out.unfinished").exists()
        if not was_killed:
            break
    assert call > 20
    if step <= 3 and kind == "chats":
        assert looked_finished == set(range(num_datasets + 1))


SMALL_BLOCKS = """
import sys
from megatron.cli.data import preprocess_chat
from megatron.data.prepare import rows, workers
workers.BYTES_WORTH_A_PROCESS = rows.BLOCK_BYTES = 1 << 12
sys.exit(preprocess_chat.main(sys.argv[1:]))
"""


def test_a_run_of_several_processes_is_killed_and_resumed(tmp_path: Path, tokenizer: Path) -> None:
    source = tmp_path / "in.jsonl"
    write(source, rows_of("chats", 6000))
    arguments = command("chats", source, tmp_path, tokenizer, "--workers", "2")
    words = [sys.executable, "-c", SMALL_BLOCKS, *arguments]
    options: dict[str, Any] = {"env": {"PYTHONPATH": str(IMPORT_ROOT)}, "stderr": subprocess.PIPE}
    options["stdout"] = subprocess.DEVNULL
    with subprocess.Popen(words, **options) as run:
        while not (tmp_path / "out.unfinished" / "state.json").exists() and run.poll() is None:
            time.sleep(0.01)
        assert run.poll() is None, "the input is too short for a kill"
        run.kill()
    assert outputs(tmp_path) == {}
    with subprocess.Popen([*words, "--resume"], **options) as run:
        said = run.communicate(timeout=HANG_S)[1]
        assert run.returncode == 0, said
        assert b"resuming after" in said
    resumed = outputs(tmp_path)
    for name in resumed:
        (tmp_path / name).unlink()
    assert preprocess_chat.main(arguments) == 0
    assert outputs(tmp_path) == resumed


def test_a_resumed_run_must_be_the_same_run(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(row_preparation, "BLOCK_BYTES", 300)
    source = tmp_path / "in.jsonl"
    rows = rows_of("chats", 3) * 5
    write(source, [*rows, {"messages": []}])
    arguments = command("chats", source, tmp_path, tokenizer)
    arguments[arguments.index("skip")] = "error"
    assert preprocess_chat.main(arguments) == 1
    assert "--bad-rows skip)\nthe work so far is kept in " in capsys.readouterr().err
    assert preprocess_chat.main(arguments) == 1
    assert "pass --resume to continue it" in capsys.readouterr().err
    for change, said in (
        (("--max-length", "50"), "--max-length was 60 in the run that left"),
        (("--chat-template", "plain"), "--chat-template was "),
        (("--no-append-eos",), "--append-eos was true"),
    ):
        assert preprocess_chat.main([*arguments, *change, "--resume"]) == 1
        assert said in capsys.readouterr().err
    # the bad row may be left out, or repaired
    write(source, [*rows, chat("one more", "answer")])
    assert preprocess_chat.main([*arguments, "--resume"]) == 0
    assert IndexedDataset(tmp_path / "out").num_documents == 16
    capsys.readouterr()
    assert preprocess_chat.main([*arguments, "--resume"]) == 0
    assert capsys.readouterr().out == "nothing to resume: the datasets are finished\n"
