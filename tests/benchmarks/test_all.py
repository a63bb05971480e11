"""benchmarks/all.sh runs every benchmark, and its table says how each ended."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
ALL = ROOT / "benchmarks" / "all.sh"
PYTHON = """#!/bin/sh
case $1 in
    */start.py) echo "one rank: 2.7 times"; exit 1 ;;
    */loss.py) exit 2 ;;
    */kernels.py) echo "Traceback (most recent call last):" ;;
esac
"""


def test_every_benchmark_is_run() -> None:
    benchmarks = {path.stem for path in ALL.parent.glob("*.py") if "\ndef main(" in path.read_text(encoding="utf-8")}
    assert len(benchmarks) > 20
    assert set(re.findall(r"^run (\w+)", ALL.read_text(encoding="utf-8"), re.MULTILINE)) == benchmarks


def test_the_table_says_how_each_ended(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(PYTHON, encoding="utf-8")
    python.chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if name != "PEER"} | {"PYTHON": str(python)}
    command = [str(ALL), "--only", "^(start|loss|kernels|step|build_index)$", str(tmp_path / "out")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    rows = (tmp_path / "out" / "summary.md").read_text(encoding="utf-8").splitlines()[4:]
    assert rows == [
        "| step | ok | 0 |  |",
        "| start | missed | 0 | one rank: 2.7 times |",
        "| loss | failed with status 2 | 0 |  |",
        "| kernels | failed: kernels.log | 0 |  |",
        "| build_index | skipped: set PEER |  |  |",
    ]
    assert done.returncode == 1, done.stderr
