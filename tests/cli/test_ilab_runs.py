"""`ilab model train`, run to the end on the CPU: the published command, and LAB's phases with a stop in the second."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron.settings.command_line import load_config
from tests import runs
from tests.finetuning_files import write_chats, write_model
from tests.ranks import HANG_S

ROOT = Path(__file__).resolve().parents[2]
SMALL = "--max-seq-len 128 --max-batch-len 512 --warmup-steps 1 --model-path model"
BASE = Path("share/instructlab/phased")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_model(tmp_path / "model")
    for name, count in (("data", 40), ("knowledge", 30), ("skills", 30)):
        write_chats(tmp_path / f"{name}.jsonl", count)
    return tmp_path


def start(folder: Path, words: str) -> subprocess.Popen[str]:
    homes = {"XDG_DATA_HOME": str(folder / "share"), "XDG_CONFIG_HOME": str(folder / "etc")}
    return subprocess.Popen(
        [sys.executable, str(ROOT / "tools" / "ilab.py"), *words.split()],
        cwd=folder,
        env=os.environ | homes,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def end(process: subprocess.Popen[str]) -> str:
    """What it printed; it must end with status 0."""
    try:
        said, _ = process.communicate(timeout=HANG_S)
    finally:
        process.kill()
    assert process.returncode == 0, said
    return said


def published(test_data: Path) -> tuple[str, str]:
    """The config.yaml and the command line of the guide for HPUs."""
    seeds = sorted((test_data.parent / "seeds").glob("000_*"))
    if not seeds:
        pytest.skip("needs the published guide beside MEGATRON_TEST_DATA")
    blocks = dict(re.findall(r"```(YAML|BASH)\n(.*?)```", seeds[0].read_text(encoding="utf-8"), re.S))
    return blocks["YAML"], blocks["BASH"].strip().removeprefix("ilab ")


def test_the_published_command_trains(folder: Path, test_data: Path) -> None:
    config, words = published(test_data)
    (folder / "config.yaml").write_text(config)
    said = end(start(folder, f"{words} {SMALL} --device cpu --num-epochs 2 --effective-batch-size 16"))
    assert "Training is complete, iteration=6, 80 samples" in said
    saved = folder / "share" / "instructlab" / "checkpoints"
    assert sorted(path.name for path in (saved / "hf_format").glob("samples_*")) == ["samples_40", "samples_80"]
    assert [row["consumed_samples"] for row in runs.rows(saved)] == [16, 32, 40, 56, 72, 80]
    assert load_config(["--config", str(saved / "run_training.yaml")], 1).optimizer.lr == 2e-5


def journal(folder: Path) -> dict[str, Any]:
    file = folder / BASE / "journalfile.yaml"
    read: dict[str, Any] = yaml.safe_load(file.read_text()) if file.is_file() else {"current_phase": None}
    return read


@pytest.mark.slow  # four starts; tests/launch/instructlab/test_phases.py has the cases
def test_phases_train_end_to_end_and_a_stop_in_the_second_goes_on_there(folder: Path) -> None:
    import transformers

    words = f"model train {SMALL} --strategy lab-multiphase --phased-phase1-data knowledge.jsonl"
    words += " --phased-phase2-data skills.jsonl --phased-phase1-num-epochs 1 --phased-phase1-effective-batch-size 10"
    words += " --phased-phase2-num-epochs 20 --phased-phase2-effective-batch-size 20 --phased-phase2-replay 0.5"
    first = start(folder, words)
    phases = [folder / BASE / f"phase{number}" / "checkpoints" for number in (1, 2)]
    deadline = time.monotonic() + HANG_S
    metrics = phases[1] / "metrics.jsonl"
    while not (metrics.is_file() and runs.rows(phases[1])):
        assert first.poll() is None, first.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.1)
    first.send_signal(signal.SIGTERM)
    said, _ = first.communicate(timeout=HANG_S)
    assert first.returncode != 0, said
    assert journal(folder)["current_phase"] == "train2"
    before = [(phase / "metrics.jsonl").read_bytes() for phase in phases]
    assert 0 < len(runs.rows(phases[1])) < 60

    said = end(start(folder, words))
    assert "goes on in train2" in said
    # nothing of the first phase again, and of the second what was left
    assert (phases[0] / "metrics.jsonl").read_bytes() == before[0]
    assert metrics.read_bytes().startswith(before[1])
    assert [row["iteration"] for row in runs.rows(phases[0])] == [1, 2, 3]
    # half of 60 samples an epoch are replayed, 20 a step
    assert [row["iteration"] for row in runs.rows(phases[1])] == list(range(1, 61))
    loads = [load_config(["--config", str(phase / "run_training.yaml")], 1).checkpoint.load for phase in phases]
    assert loads == ["model", str(phases[0] / "hf_format" / "samples_30")]
    done = journal(folder)
    assert done["current_phase"] == "done"
    assert done["final_output"]["checkpoint"].endswith("phase2/checkpoints/hf_format/samples_1200")
    transformers.AutoModelForCausalLM.from_pretrained(done["final_output"]["checkpoint"])
    # a third time there is nothing to do
    assert "the resulting model is" in end(start(folder, words))
