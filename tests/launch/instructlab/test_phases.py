"""LAB's phases: which run trains what, from which model, and where a training that was interrupted goes on.

The runs are stand-ins that leave what a run leaves; whole ones are in tests/cli/test_ilab_runs.py.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron.cli import ilab
from megatron.launch.instructlab.arguments import TorchrunArgs, TrainingArgs
from megatron.launch.instructlab.phases import train_phases
from megatron.options.config import ConfigError


class Runs:
    """A stand-in of run_training: the losses of a run's validations, one an export; `stops_in` ends that call early."""

    def __init__(self, losses: Sequence[float | None] = (3.0, 2.0, 1.0), stops_in: int | None = None) -> None:
        self.calls: list[TrainingArgs] = []
        self.losses, self.stops_in = losses, stops_in

    def __call__(self, torch_args: TorchrunArgs, args: TrainingArgs) -> None:
        self.calls.append(args)
        folder = Path(args.ckpt_output_dir)
        for epoch, loss in enumerate(self.losses, start=1):
            export = folder / "hf_format" / f"samples_{9 * epoch}"
            export.mkdir(parents=True, exist_ok=True)
            (export / "config.json").touch()
            row = {"kind": "valid", "iteration": epoch, "consumed_samples": 9 * epoch, "lm_loss": loss}
            with (folder / "metrics.jsonl").open("a") as metrics:
                metrics.write(json.dumps(row) + "\n")
            if len(self.calls) == self.stops_in:
                raise KeyboardInterrupt
        # an export that was cut off
        (folder / "hf_format" / "samples_99").mkdir(parents=True, exist_ok=True)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("knowledge", "skills"):
        Path(f"{name}.jsonl").touch()


def train(runs: Runs, flags: str = "", **more: Any) -> Path:
    config = {"train": {"phased_base_dir": "base", "data_output_dir": "data", "additional_args": more}}
    Path("config.yaml").write_text(yaml.safe_dump(config))
    words = "--config config.yaml model train --model-path granite --strategy lab-multiphase"
    words += " --phased-phase1-data knowledge.jsonl --phased-phase2-data skills.jsonl"
    training = ilab.read_command([*words.split(), *flags.split()])
    assert training.phases is not None
    return train_phases(training.phases, training.torch_args, training.train_args, train=runs, count=lambda args: 200)


def journal() -> dict[str, Any]:
    read: dict[str, Any] = yaml.safe_load(Path("base/journalfile.yaml").read_text())
    return read


def export(phase: int, samples: int) -> Path:
    return Path("base") / f"phase{phase}" / "checkpoints" / "hf_format" / f"samples_{samples}"


def test_the_second_phase_starts_from_the_last_export_of_the_first() -> None:
    runs = Runs()
    flags = "--phased-phase1-num-epochs 2 --phased-phase2-samples-per-save 50 --phased-phase2-effective-batch-size 8"
    assert train(runs, flags) == export(2, 27)
    first, second = runs.calls
    assert (first.model_path, first.data_path, first.ckpt_output_dir) == (
        "granite",
        "knowledge.jsonl",
        "base/phase1/checkpoints",
    )
    assert (first.num_epochs, first.save_samples, first.learning_rate, first.effective_batch_size) == (2, 0, 2e-5, 128)
    assert (second.model_path, second.data_path, second.ckpt_output_dir) == (
        str(export(1, 27)),
        "skills.jsonl",
        "base/phase2/checkpoints",
    )
    assert (second.num_epochs, second.save_samples, second.learning_rate, second.effective_batch_size) == (
        10,
        50,
        6e-6,
        8,
    )
    assert {first.data_output_dir, second.data_output_dir} == {"data/phase1", "data/phase2"}
    written = journal()
    assert written["current_phase"] == "done"
    assert written["final_output"]["checkpoint"] == str(export(2, 27))
    assert written["train_1"]["checkpoints"] == "base/phase1/checkpoints"
    # nothing is trained again
    assert train(runs) == export(2, 27)
    assert len(runs.calls) == 2


def test_a_replay_mixes_the_first_phases_data_in() -> None:
    runs = Runs()
    train(runs, "--phased-phase2-replay 0.25")
    assert runs.calls[1].data_path == [0.75, "skills.jsonl", 0.25, "knowledge.jsonl"]


@pytest.mark.parametrize("stops_in", [1, 2])
def test_a_training_that_was_interrupted_goes_on_in_its_phase(stops_in: int) -> None:
    runs = Runs(stops_in=stops_in)
    with pytest.raises(KeyboardInterrupt):
        train(runs)
    assert journal()["current_phase"] == f"train{stops_in}"
    resumed = Runs()
    assert train(resumed) == export(2, 27)
    assert [args.ckpt_output_dir for args in resumed.calls] == [
        f"base/phase{phase}/checkpoints" for phase in range(stops_in, 3)
    ]
    # the second phase from the model that it began with
    assert resumed.calls[-1].model_path == str(export(1, 27))


def test_a_resumed_second_phase_keeps_its_model_though_another_is_there() -> None:
    with pytest.raises(KeyboardInterrupt):
        train(Runs(stops_in=2))
    export(1, 300).mkdir()
    (export(1, 300) / "config.json").touch()
    resumed = Runs()
    train(resumed)
    assert [args.model_path for args in resumed.calls] == [str(export(1, 27))]


def test_the_best_export_has_the_lowest_validation_loss() -> None:
    runs = Runs(losses=(3.0, 1.5, None, 2.0))
    assert train(runs, "--phased-checkpoint best", validation_split=0.1) == export(2, 18)
    assert runs.calls[1].model_path == str(export(1, 18))
    assert journal()["final_output"]["score"] == 1.5
    # at the end of each epoch: 180 samples of 200 are trained, 128 and 3840 a step
    assert [args.validation_frequency for args in runs.calls] == [2, 1]


def test_exports_that_were_never_validated_are_named() -> None:
    with pytest.raises(ConfigError, match=r"no export in .* was made in a step that was validated"):
        train(Runs(losses=(None,)), "--phased-checkpoint best", validation_split=0.1, validation_frequency=7)


def test_one_last_export_is_the_result(tmp_path: Path) -> None:
    def run(torch_args: TorchrunArgs, args: TrainingArgs) -> None:
        last = Path(args.ckpt_output_dir) / "hf_format" / "last_epoch"
        last.mkdir(parents=True)
        (last / "config.json").touch()

    assert train(run, keep_last_checkpoint_only=True).name == "last_epoch"  # type: ignore[arg-type]


def test_a_phase_without_an_export_has_no_result() -> None:
    with pytest.raises(ConfigError, match="holds no export, so that phase 1 has no result"):
        train(Runs(losses=()))


def test_skills_alone_start_from_the_model() -> None:
    runs = Runs()
    assert train(runs, "--strategy lab-skills-only") == export(2, 27)
    (second,) = runs.calls
    assert (second.model_path, second.data_path) == ("granite", "skills.jsonl")


def test_a_start_from_the_beginning_forgets_what_was_there() -> None:
    train(Runs())
    marker = export(1, 9) / "earlier"
    marker.touch()
    Path("base/other").touch()
    runs = Runs()
    train(runs, "--force-clear-phased-cache")
    assert len(runs.calls) == 2
    assert not marker.exists()
    assert Path("base/other").exists()


# as ilab v0.26.1 writes it
ILABS = """
current_phase: {phase}
ended_at_utc: null
eval_1: null
eval_2: null
final_output: null
run_id: 0f1d
started_at_utc: 2026-01-01 00:00:00+00:00
train_1: {{checkpoints: /elsewhere, ended_at_utc: null, started_at_utc: 2026-01-01 00:00:00+00:00}}
train_2: null
"""


@pytest.mark.parametrize(("phase", "trained"), [("train1", [1, 2]), ("train2", [2]), ("eval2", [])])
def test_a_journal_of_ilabs_is_read(phase: str, trained: list[int]) -> None:
    train(Runs())
    Path("base/journalfile.yaml").write_text(ILABS.format(phase=phase))
    runs = Runs()
    assert train(runs) == export(2, 27)
    assert [args.ckpt_output_dir for args in runs.calls] == [f"base/phase{number}/checkpoints" for number in trained]


@pytest.mark.parametrize("text", ["{", "[3]", "current_phase: train3", ""])
def test_a_damaged_journal_is_named_and_left(text: str) -> None:
    Path("base").mkdir()
    Path("base/journalfile.yaml").write_text(text)
    runs = Runs()
    with pytest.raises(ConfigError, match=r"training_journal=base/journalfile.yaml .*--force-clear-phased-cache"):
        train(runs)
    assert runs.calls == []
    assert Path("base/journalfile.yaml").read_text() == text


def test_another_node_writes_no_journal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGATRON_RUN_SECRET", "x" * 32)
    train(Runs(), "--nnodes 2 --node-rank 1 --rdzv-endpoint h:1")
    assert not Path("base/journalfile.yaml").exists()
