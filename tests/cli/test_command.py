"""Every command ends quietly when its reader leaves, as `| head` does."""

from __future__ import annotations

import contextlib
import importlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator

import pytest

from megatron.cli.command import command, run_command
from megatron.config.command_line import load_config
from megatron.files import IMPORT_ROOT, READER_LEFT

TOOLS = sorted(path.stem for path in (IMPORT_ROOT / "tools").glob("*.py") if not path.stem.startswith("document_"))


@contextlib.contextmanager
def reader_left() -> Iterator[None]:
    """Replace stdout by one whose reader has left."""
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w", buffering=1) as pipe, contextlib.redirect_stdout(pipe):
        yield


@pytest.mark.parametrize("tool", TOOLS)
def test_every_tool_ends_quietly_when_the_reader_of_its_help_leaves(tool: str) -> None:
    main = importlib.import_module(f"megatron.cli.{tool}").main
    with reader_left():
        try:
            status = main(["--help"])
        except SystemExit as end:  # argparse itself passes over it
            status = end.code
    assert status in (0, READER_LEFT)


@pytest.mark.parametrize("word", ["--help", "--print-config"])
def test_the_flags_of_training_do_too(word: str) -> None:
    with reader_left(), pytest.raises(SystemExit) as caught:
        load_config([word], 1)
    assert caught.value.code == READER_LEFT


def test_work_whose_reader_leaves_is_no_error(capsys: pytest.CaptureFixture[str]) -> None:
    work = command(lambda argv: run_command(lambda: print("text", flush=True), (ValueError,), "output"))
    with reader_left():
        assert work() == READER_LEFT
    assert capsys.readouterr().err == ""


def test_a_pipe_that_closes_early_shows_nothing() -> None:
    words = f"{sys.executable} {IMPORT_ROOT}/tools/launch.py -- --help all | head -1; echo ${{PIPESTATUS[0]}}"
    ran = subprocess.run(["bash", "-c", words], capture_output=True, text=True)
    assert ran.stderr == ""
    assert ran.stdout.splitlines()[1] in ("0", str(READER_LEFT))


def test_a_full_disk_under_the_output_is_one_line() -> None:
    with open("/dev/full", "w") as full:
        command_line = [sys.executable, f"{IMPORT_ROOT}/tools/plan.py", "--config", "tiny_llama"]
        ran = subprocess.run(command_line, stdout=full, stderr=subprocess.PIPE, text=True)
    assert (ran.returncode, ran.stderr) == (1, "error: the output cannot be written: No space left on device\n")


def test_letters_that_an_encoding_lacks_are_escaped() -> None:
    work = command(lambda argv: print("größer") or 0)  # type: ignore[func-returns-value]
    with tempfile.TemporaryFile("w+", encoding="ascii") as narrow:
        with contextlib.redirect_stdout(narrow):
            assert work() == 0
        narrow.seek(0)
        assert narrow.read() == "gr\\xf6\\xdfer\n"


@pytest.mark.parametrize("tool", TOOLS)
def test_the_help_fits_100_columns(
    tool: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    with contextlib.suppress(SystemExit):
        importlib.import_module(f"megatron.cli.{tool}").main(["--help"])
    assert [line for line in capsys.readouterr().out.splitlines() if len(line) > 100] == []
