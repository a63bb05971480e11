"""Files and index arrays, compared with megatron-core in an environment that has it (benchmarks/alternating.py)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent


def test_files_and_arrays_equal_megatron_cores() -> None:
    python = os.environ.get("MEGATRON_CORE_PYTHON")
    if not python:
        pytest.skip("needs MEGATRON_CORE_PYTHON, the interpreter of an environment with megatron-core 0.16.1")
    command = [sys.executable, str(ROOT / "benchmarks" / "compare_megatron_core.py"), "--peer-python", python]
    run = subprocess.run([*command, "--configurations", "12", "--seed", "1"], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.endswith("all equal\n")
