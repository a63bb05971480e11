"""Files and index arrays, compared with megatron-core in an environment that has it (benchmarks/alternating.py)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent


def test_files_and_arrays_equal_megatron_cores() -> None:
    pytest.importorskip("megatron.core")
    command = [sys.executable, str(ROOT / "benchmarks" / "compare_megatron_core.py"), "--peer-python", sys.executable]
    run = subprocess.run([*command, "--configurations", "12", "--seed", "1"], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.endswith("all equal\n")
