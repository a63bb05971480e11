"""tools/prepare_cache.py: a run finds every array that it built."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megatron.cli.data.prepare_cache import main
from tests import runs
from tests.data.datasets import write_dataset
from tests.ranks import HANG_S, RankPools

RUN = "--train-iters 40 --global-batch-size 4 --seq-length 8 --vocab-size 200 --eval-iters 2 --split 8,1,1"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    for name, documents in {"a": 50, "b": 60, "c": 70}.items():
        write_dataset(folder / name, [11] * documents, vocab=200)
    return folder


@pytest.mark.parametrize(
    ("words", "files"),
    [
        ("--data-path {d}/a", (3, 3, 3)),
        ("--data-path 1 {d}/a 2 {d}/b", (8, 8, 8)),
        ("--data-path {d}/a {d}/b {d}/c", (11, 11, 11)),
        ("--train-data-path 1 {d}/a 1 {d}/b --valid-data-path {d}/c", (8, 3, None)),
    ],
    ids=["single", "by weight", "by size", "own paths"],
)
def test_a_second_call_finds_everything(
    data: Path, words: str, files: tuple[int | None, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    given = [*words.format(d=data).split(), *RUN.split()]
    assert main(given) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert [row[0] for row in rows] == ["train", "valid", "test"]
    assert [None if row[1] == "none" else tuple(row[5:9]) for row in rows] == [
        None if count is None else (str(count), "built,", "0", "found") for count in files
    ]
    stamps = {path: path.stat().st_mtime_ns for path in (data / "cache").glob("*.npy")}
    assert stamps
    assert main(given) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert [None if row[1] == "none" else tuple(row[5:9]) for row in rows] == [
        None if count is None else ("0", "built,", str(count), "found") for count in files
    ]
    assert {path: path.stat().st_mtime_ns for path in (data / "cache").glob("*.npy")} == stamps


def test_the_table_shows_documents_tokens_epochs_and_samples(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--data-path", str(data / "a"), *RUN.split()]) == 0
    row = capsys.readouterr().out.splitlines()[1].split()
    # 40 documents of 11 tokens hold 54 samples of 8; 160 take three epochs, which hold 164
    assert row[:5] == ["train", "40", "440", "3", "164"]


def test_a_run_builds_nothing_after_it(
    ranks: RankPools, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data = runs.write_dataset(tmp_path / "data")
    flags = f"--data-path {data} --train-iters 3 --tensor-model-parallel-size 2"
    assert main([*runs.TINY.split(), *flags.split()]) == 0
    built = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").iterdir()}
    assert set(ranks(2)(runs.train, flags)) == {""}
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").iterdir()} == built


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--data-path {d}/absent", "does not exist"),
        ("--data-path {d}/a --data-cache-path {d}/a.bin", "could not be written; free the disk"),
        ("--data-path {d}/a {d}/b --train-iters 400", "119 samples, but 1600 are needed; give weights"),
        ("--data-path {d}/a --vocab-size 50", "outside vocab_size=50"),
        ("--data-path {d}/a --split 0,1", "leaves no documents to train on"),
        ("--data-path 1 {d}/a 2", "WEIGHT PREFIX pairs"),
        ("--data-pth {d}/a", "did you mean --data-path"),
    ],
)
def test_a_fault_is_a_message_and_a_status(
    data: Path, words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*RUN.split(), *words.format(d=data).split()]) == 2
    assert message in capsys.readouterr().err


def test_it_needs_neither_torch_nor_a_launcher(data: Path) -> None:
    program = (
        "import sys; sys.modules['torch'] = sys.modules['deepspeed'] = None\n"
        "from megatron.cli.data.prepare_cache import main; sys.exit(main(sys.argv[1:]))"
    )
    # 8 ranks are not here, and need not be
    flags = ["--tensor-model-parallel-size", "4", "--pipeline-model-parallel-size", "2", "--num-layers", "2"]
    words = ["--data-path", str(data / "a"), *RUN.split(), *flags]
    subprocess.run([sys.executable, "-c", program, *words], check=True, stdout=subprocess.DEVNULL, timeout=HANG_S)
