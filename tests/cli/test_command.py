"""Every command ends quietly when its reader leaves, as `| head` does."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import tomllib

from megatron.checkpoint.folders import CheckpointError
from megatron.cli import entry
from megatron.cli.command import command, run_command
from megatron.data.index.indexed import DataError
from megatron.hub.names import HubError
from megatron.parallel.layout import LayoutError
from megatron.runtime.commands import FAILED
from megatron.runtime.files import IMPORT_ROOT, READER_LEFT
from megatron.settings.command_line import load_config

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
    main = importlib.import_module(entry.module_of(tool)).main
    with reader_left():
        try:
            status = main(["--help"])
        except SystemExit as end:  # argparse itself passes over it
            status = end.code
    assert status in (0, READER_LEFT)


@pytest.mark.parametrize("tool", TOOLS)
def test_every_tool_takes_whole_names_of_flags_alone(tool: str) -> None:
    try:
        status = importlib.import_module(entry.module_of(tool)).main(["--hel"])
    except SystemExit as end:
        status = end.code
    assert status == 2


@pytest.mark.parametrize("word", ["--help", "--print-config"])
def test_the_flags_of_training_do_too(word: str) -> None:
    with reader_left(), pytest.raises(SystemExit) as caught:
        load_config([word], 1)
    assert caught.value.code == READER_LEFT


def test_work_whose_reader_leaves_is_no_error(capsys: pytest.CaptureFixture[str]) -> None:
    work = command(lambda argv: run_command(lambda: print("text", flush=True), "output"))
    with reader_left():
        assert work() == READER_LEFT
    assert capsys.readouterr().err == ""


def test_an_error_of_the_user_is_a_line_and_others_keep_their_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    def fail(error: Exception) -> None:
        raise error

    # of any room: it needs no list of its own
    for kind in (CheckpointError, DataError, HubError, LayoutError):
        assert run_command(lambda kind=kind: fail(kind("x is wrong")), "output") == FAILED  # type: ignore[misc]
        assert capsys.readouterr().err == "error: x is wrong\n"
    with pytest.raises(ValueError, match="a fault of ours"):
        run_command(lambda: fail(ValueError("a fault of ours")), "output")


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
        importlib.import_module(entry.module_of(tool)).main(["--help"])
    assert [line for line in capsys.readouterr().out.splitlines() if len(line) > 100] == []


COMMANDS = {
    "slow_to_import": "import time\nprint('begun', flush=True)\ntime.sleep(100)\n",
    "not_built": "raise ImportError('the extension is not built; build it')\n",
    "at_work": (
        "import pathlib, time\nfrom megatron.cli.command import command, run_command\n"
        "def work():\n    pathlib.Path('part').touch()\n"
        "    try:\n        print('begun', flush=True)\n        time.sleep(100)\n"
        "    finally:\n        pathlib.Path('part').unlink()\n"
        "@command\ndef main(argv=None):\n    return run_command(work, 'out')\n"
    ),
    "slow_to_clean": (
        "import pathlib, time\nfrom megatron.cli.command import command, run_command\n"
        "def work():\n    pathlib.Path('part').touch()\n"
        "    try:\n        print('begun', flush=True)\n        time.sleep(100)\n"
        "    finally:\n        print('cleaning', flush=True)\n        time.sleep(0.5)\n"
        "        pathlib.Path('part').unlink()\n"
        "@command\ndef main(argv=None):\n    return run_command(work, 'out')\n"
    ),
    "before_work": (
        "import time\nfrom megatron.cli.command import command\n"
        "@command\ndef main(argv=None):\n    print('begun', flush=True)\n    time.sleep(100)\n"
    ),
}


@pytest.mark.parametrize(
    ("name", "signum", "status", "said"),
    [
        ("slow_to_import", signal.SIGINT, -signal.SIGINT, ""),
        ("slow_to_import", signal.SIGTERM, -signal.SIGTERM, ""),
        ("not_built", None, 1, "error: the extension is not built; build it\n"),
        ("at_work", signal.SIGINT, 130, "interrupted; nothing was written\n"),
        ("at_work", signal.SIGTERM, 143, "interrupted; nothing was written\n"),
        ("at_work", signal.SIGHUP, 129, "interrupted; nothing was written\n"),
        ("before_work", signal.SIGINT, 130, "interrupted\n"),
        ("before_work", signal.SIGTERM, 143, "interrupted\n"),
    ],
)
def test_a_command_that_is_stopped_says_so_in_a_line(
    name: str, signum: signal.Signals | None, status: int, said: str, tmp_path: Path
) -> None:
    (tmp_path / f"{name}.py").write_text(COMMANDS[name])
    program = f"import megatron.cli as c; c.__path__.append('.'); from megatron.cli import entry; exit(entry.{name}())"
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(IMPORT_ROOT)},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    if signum is not None:
        assert process.stdout.readline() == "begun\n"
        process.send_signal(signum)
    _, errors = process.communicate()
    assert (process.returncode, errors) == (status, said)
    assert not (tmp_path / "part").exists()


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_further_signals_do_not_stop_the_removal_of_what_was_begun(first: signal.Signals, tmp_path: Path) -> None:
    (tmp_path / "slow_to_clean.py").write_text(COMMANDS["slow_to_clean"])
    program = (
        "import megatron.cli as c; c.__path__.append('.'); from megatron.cli import entry; exit(entry.slow_to_clean())"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(IMPORT_ROOT)},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    process.send_signal(first)
    assert process.stdout.readline() == "cleaning\n"
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        process.send_signal(signum)
    _, errors = process.communicate()
    assert (process.returncode, errors) == (128 + first, "interrupted; nothing was written\n")
    assert not (tmp_path / "part").exists()


# Ctrl-C comes when the program imports the first room that it does not begin with.
SLOW_IMPORTS = """
import importlib.abc, os, runpy, signal, sys, time

BEFORE = {f"megatron.{name}" for name in ("train", "generate", "evaluate", "gaudi_spawn", "cli", "runtime")}

class Slow(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.startswith("megatron.") and name.count(".") == 1 and name not in BEFORE:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(100)


sys.meta_path.insert(0, Slow())
"""


@pytest.mark.parametrize(
    "begin",
    [
        *(f"runpy.run_module('megatron.{name}', run_name='__main__')" for name in ("train", "generate", "evaluate")),
        "runpy.run_module('megatron.gaudi_spawn', run_name='__main__')",
        "from megatron.cli import entry; entry.train()",
    ],
)
def test_ctrl_c_amid_the_imports_of_a_program_shows_no_traceback(begin: str) -> None:
    program = [sys.executable, "-c", f"{SLOW_IMPORTS}\n{begin}"]
    done = subprocess.run(program, cwd=IMPORT_ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


def test_every_tool_and_installed_command_begins_at_the_entry() -> None:
    scripts = tomllib.loads((IMPORT_ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert {target for target in scripts.values() if "cli" in target} == {
        f"megatron.cli.entry:{tool}" for tool in (*TOOLS, "train")
    }
    for tool in TOOLS:
        assert f"sys.exit(entry.{tool}())" in (IMPORT_ROOT / "tools" / f"{tool}.py").read_text()
