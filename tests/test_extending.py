"""Run the examples of CONTRIBUTING.md and docs/internals/extending.md."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests import runs

ROOT = Path(__file__).resolve().parent.parent


def blocks(page: str, heading: str) -> list[str]:
    """Return the Python blocks below a heading of a page."""
    text = (ROOT / page).read_text(encoding="utf-8")
    section = re.split(rf"^##+ {re.escape(heading)}$", text, flags=re.MULTILINE)[1].split("\n## ", 1)[0]
    return re.findall(r"```python\n(.*?)```", section, re.DOTALL)


def python(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run Python with `folder` as the first place of imports."""
    environment = os.environ | {"PYTHONPATH": f"{folder}:{ROOT}"}
    return subprocess.run([sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True)


def test_the_example_of_a_new_option_works(tmp_path: Path) -> None:
    for name in ("megatron", "tools"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    field, rule = blocks("CONTRIBUTING.md", "Add an option")
    outputs = tmp_path / "megatron" / "options" / "outputs.py"
    validation = tmp_path / "megatron" / "settings" / "validation.py"
    outputs.write_text(outputs.read_text() + field)  # the file ends with LoggingConfig
    head, tail = validation.read_text().split("def _check_logging", 1)
    body, rest = tail.split("\n\n\n", 1)
    validation.write_text(f"{head}def _check_logging{body}\n{rule}\n\n{rest}")

    read = "from megatron.settings.command_line import load_config; print(load_config(__import__('sys').argv[1:], 1))"
    words = ["--data-path", "corpus", "--train-iters", "1", "--log-loss-digits"]
    assert "log_loss_digits=9" in python(tmp_path, "-c", read, *words, "9").stdout
    assert "less than or equal to 12" in python(tmp_path, "-c", read, *words, "13").stderr
    assert (
        "log_loss_digits=9 needs fp32, not bf16; use 8 or less"
        in python(tmp_path, "-c", read, *words, "9", "--bf16").stderr
    )
    page = python(tmp_path, "tools/document_config.py").stdout
    assert "| `--log-loss-digits` | int ≥ 1 and ≤ 12 | 6 | Number of digits of the loss in the log line. |" in page


@pytest.fixture
def extensions(tmp_path: Path) -> Path:
    """Return a folder with the examples of docs/internals/extending.md as modules, and a dataset."""
    for heading, module in [
        ("Add a model family", "my_family"),
        ("Add a task", "my_task"),
        ("A linear layer", "my_kernel"),
        ("Add a tracker", "my_tracker"),
    ]:
        (tmp_path / f"{module}.py").write_text(blocks("docs/internals/extending.md", heading)[0])
    runs.write_dataset(tmp_path / "text")
    return tmp_path


def test_the_examples_of_a_family_a_task_a_kernel_and_a_tracker_train(extensions: Path) -> None:
    words = f"{runs.TINY} --data-path text --train-iters 2 --position-embedding-type rope --results-dir out"
    words += " --architecture my_kernel:FAMILY --task my_task:SkipTask --task-options below=4"
    words += " --trackers my_tracker:Lines"
    done = python(extensions, "-m", "megatron.train", *words.split())
    assert done.returncode == 0, done.stdout + done.stderr
    rows = runs.rows(extensions / "out")
    assert len(rows) == 2
    losses = (extensions / "out" / "losses.txt").read_text().splitlines()
    assert [line for line in losses if not line.endswith("None")] == [
        f"{row['iteration']} {row['lm_loss']}" for row in rows
    ]
    # three of 127 labels, and the ends of documents, are below 4
    assert all(0.9 < row["metrics"]["trained_share"] < 1 for row in rows)


def test_the_example_of_a_family_computes_its_product_in_float32_and_the_kernels_in_bfloat16(extensions: Path) -> None:
    losses = []
    for family in ("my_family", "my_kernel"):
        words = f"{runs.TINY} --data-path text --train-iters 1 --position-embedding-type rope --results-dir {family}"
        done = python(extensions, "-m", "megatron.train", *words.split(), "--architecture", f"{family}:FAMILY")
        assert done.returncode == 0, done.stdout + done.stderr
        losses.append(runs.rows(extensions / family)[0]["lm_loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    assert losses[0] != losses[1]


def test_the_example_of_a_family_refuses_what_it_does_not_support(extensions: Path) -> None:
    words = f"{runs.TINY} --data-path text --train-iters 1 --position-embedding-type alibi"
    done = python(extensions, "-m", "megatron.train", *words.split(), "--architecture", "my_family:FAMILY")
    assert done.returncode == 2
    assert "position_embedding_type=alibi is not supported by my_family; use rope or learned" in done.stderr


def test_a_family_from_outside_adds_named_loss_terms(tmp_path: Path) -> None:
    shutil.copy(ROOT / "tests" / "training" / "routed_family.py", tmp_path / "my_router.py")
    runs.write_dataset(tmp_path / "text")
    words = f"{runs.TINY} --data-path text --train-iters 4 --position-embedding-type rope --results-dir out"
    words += " --architecture my_router:FAMILY --log-format full"
    done = python(tmp_path, "-m", "megatron.train", *words.split())
    assert done.returncode == 0, done.stdout + done.stderr
    train, valid = runs.rows(tmp_path / "out"), runs.rows(tmp_path / "out", "valid")
    assert set(train[0]["metrics"]) == set(valid[0]["metrics"]) == {"balance", "z_loss", "highest", "routed", "entropy"}
    first = re.search(r"lm loss: (\S+) \| balance: (\S+) \| z_loss: (\S+) \| highest: ", done.stdout)
    assert first is not None, done.stdout
    assert float(first[2]) == pytest.approx(train[0]["metrics"]["balance"], rel=1e-5)
    events = EventAccumulator(str(tmp_path / "out" / "tensorboard")).Reload()
    written = [event.value for event in events.Scalars("metrics-training/balance")]
    assert written == pytest.approx([row["metrics"]["balance"] for row in train], rel=1e-6)
    assert len(events.Scalars("metrics-validation/z_loss validation")) == len(valid)


def test_the_example_of_a_device_is_refused_by_name_where_it_is_missing(tmp_path: Path) -> None:
    (tmp_path / "my_device.py").write_text(blocks("docs/internals/extending.md", "Add a device")[0])
    words = f"{runs.TINY} --data-path text --train-iters 1 --device my_device:RECORD"
    done = python(tmp_path, "-m", "megatron.train", *words.split())
    assert done.returncode != 0
    assert "device my_device:RECORD is not there: torch sees no XPU; install a build of torch with" in done.stderr
