"""Run the README's commands as written."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron.launch.dialects.hl_variables import VARIABLES
from tests import runs

ROOT = Path(__file__).resolve().parent.parent


def blocks_below(heading: str) -> list[str]:
    """Return the bash blocks of a section."""
    section = (ROOT / "README.md").read_text(encoding="utf-8").split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]
    return re.findall(r"```bash\n(.*?)```", section, re.DOTALL)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the files that the commands read, in a folder that they may write to."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("docs", "tools", "scripts", "megatron"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def run(commands: str, folder: Path, timeout_s: float = 300, **variables: str) -> str:
    """Run commands in `folder`; return what they print. They must succeed."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HL_")}
    environment |= {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHON": sys.executable,
        "PYTHONPATH": str(folder),
    }
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", commands],
        cwd=folder,
        env=environment | variables,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_training_and_converting_work_as_written(checkout: Path) -> None:
    (commands,) = blocks_below("Train on your own text")
    assert len(commands.strip().splitlines()) == 6
    printed = run(commands, checkout)
    assert "iteration       40/      40" in printed
    assert "validation loss at iteration 40" in printed
    continued = printed.rpartition("The model")[2]
    assert continued.strip(), "the model continues the prompt"
    # by what 40 steps teach, which may be mostly line ends
    assert len(continued) > 10
    assert (checkout / "out" / "run.png").stat().st_size > 10_000
    assert (checkout / "out" / "run" / "checkpoints" / "latest").read_text().split()[0] == "global_step40"

    (command,) = blocks_below("Convert to and from Hugging Face")
    run(command, checkout)
    assert (checkout / "out" / "huggingface" / "config.json").is_file()


def command_of_experts() -> str:
    """Return the README's command of a tiny Mixtral, with the variables that its text takes from an earlier one."""
    (commands,) = blocks_below("Train on your own text")
    variables = commands.strip().splitlines()[2]
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"`(HL_CONFIG=tiny_mixtral [^`]*)`", text)
    return f"{variables}\n{command.replace(chr(10), ' ')}"


def test_the_command_of_experts_prints_its_plan(checkout: Path) -> None:
    """tests/training/test_experts.py trains such models on four ranks; -m slow: this command does."""
    printed = run(command_of_experts(), checkout, HL_DRY_RUN="1")
    assert " 4 cpu devices = 4 ranks" in printed
    assert "expert_model_parallel_size" in printed or "experts" in printed


@pytest.mark.slow
def test_experts_train_on_four_ranks_as_written(checkout: Path) -> None:
    (commands,) = blocks_below("Train on your own text")
    if not (checkout / "out" / "docs_text_document.bin").is_file():
        run("\n".join(commands.splitlines()[:2]), checkout)
    printed = run(command_of_experts(), checkout)
    assert "iteration       40/      40" in printed
    assert (checkout / "out" / "experts" / "checkpoints" / "latest").read_text().split()[0] == "global_step40"


def train_on_long_rows(checkout: Path, context_size: int) -> Path:
    """Run the README's command for long rows, on as many ranks; return its folder."""
    of_text = blocks_below("Train on your own text")[0].strip().splitlines()
    (command,) = blocks_below("Share long rows of tokens")
    assert command.count("HL_CP=2 ") == command.count("out/long ") == 1
    command = command.replace("HL_CP=2 ", f"HL_CP={context_size} ").replace("out/long ", f"out/long{context_size} ")
    if not (checkout / "out" / "docs_text_document.bin").is_file():
        run("\n".join(of_text[:2]), checkout)
    printed = run(f"{of_text[2]}\n{command}", checkout)
    assert "consumed tokens:        65536" in printed
    return checkout / "out" / f"long{context_size}"


@pytest.mark.slow
def test_two_ranks_train_on_long_rows_as_written(checkout: Path) -> None:
    results = train_on_long_rows(checkout, context_size=2)
    first, last = (row["lm_loss"] for row in runs.rows(results, "valid"))
    assert last < first - 0.05
    assert (results / "checkpoints" / "latest").read_text().split()[0] == "global_step2"


@pytest.mark.slow
def test_two_ranks_train_on_long_rows_as_one_process(checkout: Path) -> None:
    """Losses, norms and the perplexity of a held-out row, of which no rank has more than a half."""
    two, one = (train_on_long_rows(checkout, size) for size in (2, 1))
    for kind, names in (("train", ("lm_loss", "grad_norm")), ("valid", ("lm_loss", "perplexity"))):
        shared, alone = ([[row[name] for name in names] for row in runs.rows(folder, kind)] for folder in (two, one))
        np.testing.assert_allclose(shared, alone, rtol=1e-6)


def test_the_commands_for_large_models_print_their_plans(checkout: Path) -> None:
    commands = "".join(blocks_below("Train BLOOM-13B, Llama or Mixtral"))
    printed = run(commands, checkout, HL_DRY_RUN="1", HL_DEVICE="hpu")
    assert printed.count(" 8 hpu devices = 8 ranks") == 2
    assert printed.count("4 nodes x 8 hpu devices = 32 ranks") == 2
    assert printed.count("memory per rank, GiB") == 4


def test_the_scripts_and_variables_of_the_readme_exist() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert {
        name for name in re.findall(r"(?:scripts|tools|benchmarks)/\w+\.\w+", text) if not (ROOT / name).exists()
    } == set()
    assert set(re.findall(r"HL_[A-Z_]+", text)) <= {variable.name for variable in VARIABLES}
