"""Every command ends quietly when its reader leaves, as `| head` does."""

from __future__ import annotations

import contextlib
import importlib
import os
import subprocess
import sys
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
