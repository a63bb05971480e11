"""megatron-run: the scripts by name, and their copies."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.cli.calls import run
from megatron.runtime.commands import DONE, REFUSED
from megatron.runtime.files import IMPORT_ROOT


def test_every_script_that_starts_ranks_has_a_name() -> None:
    starting = {
        path.name for path in (IMPORT_ROOT / "scripts").glob("*.sh") if "\nstart " in path.read_text(encoding="utf-8")
    }
    assert {path.name for path in run.scripts().values()} == starting
    assert {"bloom13b", "llama", "mixtral", "sft", "dpo", "generate", "evaluate"} <= set(run.scripts())


def test_without_a_name_the_scripts_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main([]) == DONE
    printed = capsys.readouterr().out
    assert all(f"  {name} " in printed and str(path) in printed for name, path in run.scripts().items())


def test_an_unknown_name_is_refused_with_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        run.main(["bloom"])
    assert caught.value.code == REFUSED
    assert "bloom13b" in capsys.readouterr().err


def test_a_script_gets_its_flags_and_variables(tmp_path: Path) -> None:
    command = [sys.executable, str(IMPORT_ROOT / "tools" / "run.py"), "llama", "--help", "HL_GBS"]
    shown = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "HL_GBS" in shown.stdout
    wrong = subprocess.run(command[:3], cwd=tmp_path, env=os.environ | {"HL_TP": "x"}, capture_output=True, text=True)
    assert wrong.returncode == REFUSED
    assert "HL_TP='x'" in wrong.stderr


def test_copies_are_whole_and_replace_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["--copy", str(tmp_path / "work")]) == DONE
    for folder in run.FOLDERS:
        for file in (IMPORT_ROOT / folder).rglob("*.*"):
            if "__pycache__" not in file.parts and file.is_file():
                assert (tmp_path / "work" / file.relative_to(IMPORT_ROOT)).read_bytes() == file.read_bytes()
    assert run.main(["--copy", str(tmp_path / "work")]) == REFUSED
    assert "exists" in capsys.readouterr().err


def test_copied_scripts_start_the_installed_package(tmp_path: Path) -> None:
    """They lie beside no tools/, so the commands are those of the Python that runs them."""
    run.copy(tmp_path / "work")
    environment = os.environ | {"PYTHON": sys.executable, "PYTHONPATH": str(IMPORT_ROOT), "HL_DRY_RUN": "1"}
    script = tmp_path / "work" / "scripts" / "run_llama.sh"
    variables = {"HL_CONFIG": "tiny_llama", "HL_TP": "2", "HL_DEVICE": "cpu"}
    done = subprocess.run(
        ["bash", str(script)], cwd=tmp_path, env=environment | variables, capture_output=True, text=True
    )
    assert done.returncode == DONE, done.stderr
    assert "Plan of tiny_llama" in done.stdout
