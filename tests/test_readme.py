"""The README's run in five commands, run as it stands there."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def block_after(heading: str) -> str:
    """The first bash block under a heading."""
    section = (ROOT / "README.md").read_text(encoding="utf-8").split(f"## {heading}\n", 1)[1]
    return re.search(r"```bash\n(.*?)```", section, re.DOTALL)[1]  # type: ignore[index]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """What the commands read, in a place of their own to write to."""
    for name in ("docs", "tools", "scripts", "megatron"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def test_run_in_five_commands_works_as_written(checkout: Path) -> None:
    commands = block_after("A run in five commands")
    assert len(commands.strip().splitlines()) == 5
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HL_")}
    environment |= {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHON": sys.executable,
        "PYTHONPATH": str(checkout),
    }
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", commands],
        cwd=checkout,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "iteration       40/      40" in done.stdout
    assert "validation loss at iteration 40" in done.stdout
    assert (checkout / "out" / "run.png").stat().st_size > 10_000
    assert (checkout / "out" / "run" / "checkpoints" / "latest").read_text().strip() == "global_step40"


def test_every_link_of_the_documentation_leads_somewhere() -> None:
    broken = []
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8")):
            if "://" not in target and not (page.parent / target).exists():
                broken.append(f"{page.name}: {target}")
    assert broken == []
