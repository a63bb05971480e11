"""Failures of tools/preprocess_data.py: nothing partial looks finished, and --resume gives the same bytes."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron.cli.data import preprocess_data
from megatron.data.index.checksums import read_checksums
from megatron.data.index.indexed import IndexedDataset
from megatron.data.prepare import text as text_preparation
from megatron.data.read import document_blocks
from tests.ranks import HANG_S

TOOL = Path(__file__).resolve().parents[2] / "tools" / "preprocess_data.py"
NULL = ("--tokenizer-type", "NullTokenizer", "--vocab-size", "1000")
SUFFIXES = (".bin", ".idx", ".manifest.json", ".sha256")


def write_rows(path: Path, count: int, words: int = 20) -> Path:
    source = random.Random(0)
    with path.open("w") as file:
        for _ in range(count):
            row = {"a": ids(source, words), "b": ids(source, 3)}
            file.write(json.dumps(row) + "\n")
    return path


def write_many_rows(path: Path) -> None:
    """A million, so that a test that is slow to see the beginning is still in time for the middle."""
    path.write_bytes(40 * write_rows(path, 25_000).read_bytes())


def ids(source: random.Random, most: int) -> str:
    return " ".join(str(source.randrange(1000)) for _ in range(source.randint(1, most)))


def command(folder: Path, *more: str) -> list[str]:
    """With two keys, two partitions, and a state saved after each block."""
    keys = ("--json-keys", "a", "b", "--partitions", "2", "--workers", "1")
    places = ("--input", str(folder / "in.jsonl"), "--output-prefix", str(folder / "out"))
    return [*places, *keys, "--append-eod", "--resume-interval", "0", *NULL, *more]


def outputs(folder: Path) -> dict[str, bytes]:
    """The files of all datasets, without the name of the folder."""
    found = {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.name.endswith(SUFFIXES)}
    return {name: content.replace(str(folder).encode(), b"") for name, content in found.items()}


def whole_pairs(folder: Path) -> int:
    """Number of datasets that look finished. Raises if one of them is not."""
    indexes = list(folder.glob("*.idx"))
    for index in indexes:
        prefix = str(index.with_suffix(""))
        IndexedDataset(prefix)
        checksums = read_checksums(prefix)
        assert checksums is not None
        for suffix in (".bin", ".idx"):
            assert hashlib.sha256(Path(prefix + suffix).read_bytes()).hexdigest() == checksums.sha256[suffix]
    return len(indexes)


class Killed(BaseException):
    """Not caught by anything: the process ends where it is raised."""


def run_and_die_at(call: int, arguments: list[str], main: Callable[[list[str]], int] = preprocess_data.main) -> bool:
    """The command in a child that ends, as by SIGKILL, right before its nth change of the file system. False: it ended
    by itself."""
    child = os.fork()
    if child == 0:
        try:
            left = call

            def counted(function: Callable[..., Any]) -> Callable[..., Any]:
                def stand_in(*positional: Any, **named: Any) -> Any:
                    nonlocal left
                    left -= 1
                    if left == 0:
                        os.kill(os.getpid(), signal.SIGKILL)
                    return function(*positional, **named)

                return stand_in

            for name in ("replace", "rename", "unlink", "rmdir", "mkdir", "fsync", "ftruncate"):
                setattr(os, name, counted(getattr(os, name)))
            sys.stdout = sys.stderr = io.StringIO()
            os._exit(main(arguments))
        finally:
            os._exit(99)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return True
    assert os.waitstatus_to_exitcode(status) == 0
    return False


@pytest.mark.parametrize("every", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_a_kill_before_any_change_of_the_file_system_can_be_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: int
) -> None:
    """Or before every second one."""
    monkeypatch.setattr(document_blocks, "BLOCK_BYTES", 400)
    (tmp_path / "whole").mkdir()
    write_rows(tmp_path / "whole" / "in.jsonl", 7)
    assert preprocess_data.main(command(tmp_path / "whole")) == 0
    expected = outputs(tmp_path / "whole")
    assert sorted(expected) == [f"out_{key}_document{suffix}" for key in "ab" for suffix in SUFFIXES]
    looked_finished = set()
    for call in range(1, 1000, every):
        folder = tmp_path / str(call)
        folder.mkdir()
        write_rows(folder / "in.jsonl", 7)
        was_killed = run_and_die_at(call, command(folder))
        looked_finished.add(whole_pairs(folder))
        if was_killed:
            assert not run_and_die_at(0, command(folder, "--resume"))
        assert outputs(folder) == expected
        assert not (folder / "out.unfinished").exists()
        if not was_killed:
            break
    assert call > 30
    assert looked_finished == {0, 1, 2}


def start(folder: Path, *more: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, str(TOOL), *command(folder, *more)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )


def test_kills_at_random_moments_leave_nothing_that_looks_finished_and_resume_to_the_same_bytes(tmp_path: Path) -> None:
    """SIGKILL 8 times, each time a little into the run, which goes on from where the last one got to."""
    write_rows(tmp_path / "in.jsonl", 120_000)  # some 7 MB, which this slow tokenizer needs seconds for
    moments = random.Random(1)
    kills = 0
    options: tuple[str, ...] = ()
    while kills < 8:
        with start(tmp_path, *options) as run:
            began_s = time.monotonic()
            while not (tmp_path / "out.unfinished" / "state.json").exists() and run.poll() is None:
                time.sleep(0.01)
            run_for_s = moments.uniform(0.0, 0.6) if kills < 7 else 0.0
            time.sleep(max(0.0, run_for_s - (time.monotonic() - began_s)))
            assert run.poll() is None, "the input is too short for so many kills"
            run.kill()
        kills += 1
        assert outputs(tmp_path) == {}
        options = ("--resume",)
    with start(tmp_path, "--resume") as run:
        assert run.wait(HANG_S) == 0
        assert run.stderr is not None
        assert b"resuming after" in run.stderr.read()
    resumed = outputs(tmp_path)
    for name in resumed:
        (tmp_path / name).unlink()
    assert preprocess_data.main(command(tmp_path)) == 0
    assert outputs(tmp_path) == resumed


def run_main(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    capsys.readouterr()
    status = preprocess_data.main(arguments)
    said = capsys.readouterr()
    return status, said.out + said.err


@pytest.fixture
def stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Path:
    """A folder in which a bad line stopped the run half way, with what was done before it."""
    monkeypatch.setattr(document_blocks, "BLOCK_BYTES", 400)
    write_rows(tmp_path / "in.jsonl", 40)
    rows = (tmp_path / "in.jsonl").read_text().splitlines()
    (tmp_path / "good.jsonl").write_text("\n".join(rows) + "\n")
    (tmp_path / "in.jsonl").write_text("\n".join([*rows[:30], '{"a": "7", "b": 8}', *rows[30:]]) + "\n")
    status, said = run_main(command(tmp_path), capsys)
    assert status == 1
    assert "in.jsonl:31: the value of 'b' is a JSON number, not a string" in said
    assert f"the work so far is kept in {tmp_path / 'out.unfinished'}: --resume continues from there" in said
    assert outputs(tmp_path) == {}
    return tmp_path


def finished(folder: Path, source: str, capsys: pytest.CaptureFixture[str], *options: str) -> list[bytes]:
    """The .bin and .idx files of an undisturbed run over `source`."""
    other = folder / "other"
    other.mkdir()
    (other / "in.jsonl").write_bytes((folder / source).read_bytes())
    assert run_main(command(other, *options), capsys)[0] == 0
    return [content for name, content in outputs(other).items() if name.endswith((".bin", ".idx"))]


def data_files(folder: Path) -> list[bytes]:
    return [content for name, content in outputs(folder).items() if name.endswith((".bin", ".idx"))]


def test_a_bad_line_can_be_repaired_and_the_run_resumed(stopped: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (stopped / "in.jsonl").write_bytes((stopped / "good.jsonl").read_bytes())
    status, said = run_main(command(stopped, "--resume"), capsys)
    assert status == 0
    assert "resuming after" in said
    assert data_files(stopped) == finished(stopped, "good.jsonl", capsys)


def test_a_bad_line_can_be_skipped_and_the_run_resumed(stopped: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, said = run_main(command(stopped, "--resume", "--on-bad-line", "skip"), capsys)
    assert status == 0
    assert "skipped 1 bad documents" in said
    assert data_files(stopped) == finished(stopped, "in.jsonl", capsys, "--on-bad-line", "skip")


def test_unfinished_work_is_not_discarded_without_a_request(stopped: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(path for path in (stopped / "out.unfinished").rglob("*"))
    status, said = run_main(command(stopped), capsys)
    assert status == 1
    assert "of an unfinished run; pass --resume to continue it, or delete it to start over" in said
    assert sorted(path for path in (stopped / "out.unfinished").rglob("*")) == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("--json-keys", "b", "a"), '--json-keys was ["a", "b"]'),
        (("--partitions", "3"), "--partitions was 2"),
        (("--vocab-size", "900"), "the tokenizer was"),
    ],
)
def test_other_options_are_not_resumed(
    stopped: Path, capsys: pytest.CaptureFixture[str], change: tuple[str, ...], message: str
) -> None:
    status, said = run_main(command(stopped, "--resume", *change), capsys)
    assert status == 1
    assert message in said
    assert (stopped / "out.unfinished" / "state.json").exists()


def test_changed_input_is_not_resumed(stopped: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = (stopped / "in.jsonl").read_bytes()
    (stopped / "in.jsonl").write_bytes(content.replace(b'"a": "', b'"a": "1 ', 1))
    status, said = run_main(command(stopped, "--resume"), capsys)
    assert status == 1
    assert "in.jsonl has changed since it was read" in said
    (stopped / "in.jsonl").write_bytes(content)
    assert run_main(command(stopped, "--resume", "--on-bad-line", "skip"), capsys)[0] == 0


def test_a_damaged_state_is_named(stopped: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (stopped / "out.unfinished" / "state.json").write_text("{")
    for options in ((), ("--resume",)):
        status, said = run_main(command(stopped, *options), capsys)
        assert status == 1
        assert "out.unfinished" in said
        assert "delete" in said


def test_resuming_what_is_finished_does_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_rows(tmp_path / "in.jsonl", 5)
    # without anything to go on from, --resume starts
    assert run_main(command(tmp_path, "--resume"), capsys)[0] == 0
    before = outputs(tmp_path)
    status, said = run_main(command(tmp_path, "--resume"), capsys)
    assert (status, said) == (0, "nothing to resume: the datasets are finished\n")
    # other input, so these are not its datasets
    write_rows(tmp_path / "in.jsonl", 6)
    status, said = run_main(command(tmp_path, "--resume"), capsys)
    assert (status, outputs(tmp_path)) == (1, before)
    assert "out_a_document.idx exists already; pass --overwrite to replace that dataset" in said
    assert run_main(command(tmp_path, "--resume", "--overwrite"), capsys)[0] == 0
    assert outputs(tmp_path) != before


def test_two_processes_do_not_write_to_one_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_many_rows(tmp_path / "in.jsonl")
    with start(tmp_path) as first:
        while not (tmp_path / "out.unfinished" / "state.json").exists():
            time.sleep(0.01)
        status, said = run_main(command(tmp_path), capsys)
        assert first.poll() is None
        first.kill()
    assert status == 1
    assert "another process is writing in" in said


def test_an_interrupt_says_what_is_kept(tmp_path: Path) -> None:
    write_many_rows(tmp_path / "in.jsonl")
    with start(tmp_path) as run:
        while not (tmp_path / "out.unfinished" / "state.json").exists():
            time.sleep(0.01)
        run.send_signal(signal.SIGINT)
        assert run.wait(HANG_S) == 130
        assert run.stderr is not None
        said = run.stderr.read().decode()
    assert said.splitlines()[-2:] == [
        "interrupted",
        f"the work so far is kept in {tmp_path / 'out.unfinished'}: --resume continues from there",
    ]
    assert outputs(tmp_path) == {}


def test_a_disk_that_fills_up_loses_nothing(tmp_path: Path) -> None:
    """A limit on the size of files stands for the full disk: the write fails in the middle, with EFBIG for ENOSPC."""
    write_rows(tmp_path / "in.jsonl", 100_000)

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))

    small = subprocess.run(
        [sys.executable, str(TOOL), *command(tmp_path)],
        preexec_fn=limit,
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert small.returncode == 1
    assert "File too large" in small.stderr
    assert "--resume continues from there" in small.stderr
    assert "Traceback" not in small.stderr
    assert outputs(tmp_path) == {}
    assert preprocess_data.main(command(tmp_path, "--resume")) == 0
    assert whole_pairs(tmp_path) == 2


def test_an_early_failure_leaves_no_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_rows(tmp_path / "in.jsonl", 5)
    with (tmp_path / "in.jsonl").open("a") as file:
        file.write("{")
    assert run_main(command(tmp_path, "--resume-interval", "20"), capsys)[0] == 1
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_a_late_difference_restarts_with_the_reference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The accelerated tokenizer agrees on the first sample and the first blocks, then no more."""

    monkeypatch.setattr(document_blocks, "BLOCK_BYTES", 400)
    write_rows(tmp_path / "in.jsonl", 40)

    class Liar:
        """The reference, but for documents that begin with an id below 100."""

        def __init__(self, reference: Any):
            self._reference, self._calls = reference, 0

        def __getattr__(self, name: str) -> Any:
            return getattr(self._reference, name)

        def encode_batch(self, texts: list[str]) -> Any:
            self._calls += 1
            batch = self._reference.encode_batch(texts)
            return batch if self._calls < 30 else batch._replace(ids=(batch.ids + 1) % 1000)

        def encode(self, text: str) -> list[int]:
            found: list[int] = self.encode_batch([text]).ids.tolist()
            return found

    monkeypatch.setattr(text_preparation, "accelerate", Liar)
    arguments = [part.replace("NullTokenizer", "nulltokenizer") for part in command(tmp_path)]
    from megatron.data.tokenizers import build as tokenizers

    build = tokenizers.build_tokenizer
    monkeypatch.setattr(tokenizers, "build_tokenizer", lambda _, *rest, **named: build("NullTokenizer", *rest, **named))
    status, said = run_main(arguments, capsys)
    assert status == 0
    assert "encoding with the reference tokenizer: " in said
    first = data_files(tmp_path)
    assert first == finished(tmp_path, "in.jsonl", capsys)


@pytest.mark.parametrize("content", [b"", b"\xef\xbb\xbf"], ids=["empty", "byte-order mark"])
@pytest.mark.parametrize("packing", ["", ".gz"])
def test_a_file_without_a_byte_of_text_is_passed_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes, packing: str
) -> None:
    """With a tokenizer that is accelerated, whose ids are first compared on the beginning of every file."""
    from tokenizers.pre_tokenizers import ByteLevel

    vocab = {symbol: number for number, symbol in enumerate(sorted(ByteLevel.alphabet()))}
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / f"a.jsonl{packing}").write_bytes(gzip.compress(content) if packing else content)
    (tmp_path / "in" / "b.jsonl").write_text('{"text": "abc"}\n')
    files = ("--vocab-file", str(tmp_path / "vocab.json"), "--merge-file", str(tmp_path / "merges.txt"))
    places = ("--input", str(tmp_path / "in"), "--output-prefix", str(tmp_path / "out"))
    status, said = run_main([*places, "--tokenizer-type", "GPT2BPETokenizer", *files], capsys)
    assert status == 0, said
    assert IndexedDataset(tmp_path / "out_text_document").lengths.tolist() == [3]
