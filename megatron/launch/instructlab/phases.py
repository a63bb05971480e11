"""LAB's two phases: knowledge, then skills with a replay of the first phase's data, each a run of its own.

BASE/phase1/checkpoints and BASE/phase2/checkpoints are the folders of the runs. BASE/journalfile.yaml, in ilab's form,
keeps the phase: the same command, given again, goes on in it.
"""

from __future__ import annotations

import logging
import math
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal

import orjson
import yaml

from megatron.launch.instructlab.arguments import TorchrunArgs, TrainingArgs
from megatron.options.config import ConfigError
from megatron.runtime.files import replacing
from megatron.runtime.result_files import METRICS_FILE

logger = logging.getLogger("megatron.api")

TRAIN_1, TRAIN_2, DONE = "train1", "train2", "done"
# evaluations of ilab's, whose training is over
NEXT = {TRAIN_1: TRAIN_1, "eval1": TRAIN_2, TRAIN_2: TRAIN_2, "eval2": DONE, DONE: DONE}


@dataclass(frozen=True)
class LabPhase:
    """A run of the two."""

    number: int
    data: str | None
    folder: Path
    changes: Mapping[str, Any]
    """Fields of TrainingArgs that are the phase's own."""

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"


@dataclass(frozen=True)
class LabPhases:
    """Options of a training in two phases."""

    first: LabPhase
    second: LabPhase
    skips_first: bool
    """Train the second phase alone (lab-skills-only)."""
    replay: float
    """Share of the samples of the second phase that are of the first phase's data."""
    checkpoint: Literal["last", "best"]
    """Export that a phase results in: the last, or that with the lowest validation loss."""
    journal: Path
    clears: bool
    """Start from the beginning, without what an earlier training left."""


def phase_faults(phases: LabPhases, args: TrainingArgs) -> Iterator[str]:
    """Yield what keeps the phases from being trained, before any of them begins."""
    yield from _data_faults(phases)
    for phase in [phases.second] if phases.skips_first else [phases.first, phases.second]:
        if not args.checkpoint_at_epoch and phase.changes["save_samples"] == 0:
            yield (
                f"phase {phase.number} would export nothing; set checkpoint_at_epoch, or "
                f"phased_phase{phase.number}_samples_per_save"
            )
    if phases.journal.is_dir():
        yield f"training_journal={phases.journal} is a folder; give a file"
    if phases.checkpoint == "best" and args.validation_split == 0:
        yield "phased_checkpoint=best needs a validation; give validation_split in train.additional_args, or use last"
    if phases.checkpoint == "best" and args.keep_last_checkpoint_only:
        yield "phased_checkpoint=best needs all exports; leave keep_last_checkpoint_only out, or use last"


def _data_faults(phases: LabPhases) -> Iterator[str]:
    needed = [phases.first, phases.second]
    if phases.skips_first and phases.replay == 0:
        needed = [phases.second]
    for phase in needed:
        flag = f"--phased-phase{phase.number}-data"
        if phase.data is None:
            yield f"{flag} is not given; give the .jsonl file of the phase's chats"
        elif not Path(phase.data).is_file():
            yield f"{flag} {phase.data} is not a file; give the .jsonl file of the phase's chats"


class Journal:
    """Progress of the training, in ilab's form. The first node writes it, the others read it."""

    def __init__(self, path: Path, *, writes: bool) -> None:
        self._path, self._writes = path, writes
        self.values: dict[str, Any] = {
            "run_id": str(uuid.uuid4()),
            "started_at_utc": _now(),
            "ended_at_utc": None,
            "current_phase": TRAIN_1,
            "train_1": None,
            "eval_1": None,
            "train_2": None,
            "eval_2": None,
            "final_output": None,
        }
        self.was_there = path.is_file()
        if self.was_there:
            self.values |= self._read()

    def _read(self) -> dict[str, Any]:
        remedy = "correct it, or start from the beginning with --force-clear-phased-cache"
        try:
            values = yaml.safe_load(self._path.read_text(encoding="utf-8"))
        except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
            raise ConfigError(
                [f"training_journal={self._path} cannot be read: {' '.join(str(error).split())}; {remedy}"]
            ) from None
        if not isinstance(values, dict) or values.get("current_phase") not in NEXT:
            raise ConfigError([f"training_journal={self._path} names no phase as current_phase; {remedy}"])
        return values

    @property
    def phase(self) -> str:
        return NEXT[self.values["current_phase"]]

    def begin(self, phase: LabPhase, model: str) -> str:
        """Note that a phase has begun; return the model that it starts from, which of a resumed one is as before."""
        name = f"train_{phase.number}"
        if not self.values[name]:
            self.values[name] = {
                "started_at_utc": _now(),
                "ended_at_utc": None,
                "checkpoints": str(phase.checkpoints),
            }
        # ilab's own journal has no model
        begun: dict[str, Any] = self.values[name]
        begun.setdefault("model", model)
        self._write()
        return str(begun["model"])

    def end(self, phase: LabPhase, next_phase: str) -> None:
        self.values[f"train_{phase.number}"]["ended_at_utc"] = _now()
        self.values["current_phase"] = next_phase
        self._write()

    def finish(self, checkpoint: Path, score: float | None) -> None:
        now = _now()
        self.values["final_output"] = {"checkpoint": str(checkpoint), "ended_at_utc": now, "score": score}
        self.values |= {"ended_at_utc": now, "current_phase": DONE}
        self._write()

    def _write(self) -> None:
        if not self._writes:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(self._path) as file:
            file.write(yaml.safe_dump(self.values).encode())


def _now() -> str:
    return str(datetime.now(timezone.utc))


Train = Callable[[TorchrunArgs, TrainingArgs], None]
CountSamples = Callable[[TrainingArgs], int]


def train_phases(
    phases: LabPhases, torch_args: TorchrunArgs, args: TrainingArgs, train: Train, count: CountSamples
) -> Path:
    """Train what is left of the phases, and return the export that they result in.

    `train` is run_training, `count` processes the data and returns the number of samples.
    """
    is_first_node = torch_args.node_rank == 0
    if phases.clears and is_first_node:
        _clear(phases)
    journal = Journal(phases.journal, writes=is_first_node)
    if journal.was_there:
        logger.info("%s: the training goes on in %s", phases.journal, journal.phase)
    if journal.phase == TRAIN_1 and not phases.skips_first:
        _run(phases.first, journal, torch_args, _arguments(phases, phases.first, args, args.model_path, count), train)
        journal.end(phases.first, TRAIN_2)
    if journal.phase in (TRAIN_1, TRAIN_2):
        model = args.model_path
        if not phases.skips_first:
            model = str(_result(phases, phases.first)[0])
        _run(phases.second, journal, torch_args, _arguments(phases, phases.second, args, model, count), train)
        journal.end(phases.second, "eval2")
    if journal.values["current_phase"] == DONE and journal.values["final_output"]:
        return Path(journal.values["final_output"]["checkpoint"])
    checkpoint, score = _result(phases, phases.second)
    journal.finish(checkpoint, score)
    return checkpoint


def _clear(phases: LabPhases) -> None:
    for phase in (phases.first, phases.second):
        shutil.rmtree(phase.folder, ignore_errors=True)
    phases.journal.unlink(missing_ok=True)


def _run(phase: LabPhase, journal: Journal, torch_args: TorchrunArgs, args: TrainingArgs, train: Train) -> None:
    model = journal.begin(phase, args.model_path)
    logger.info("phase %d of 2: %s from %s", phase.number, args.data_path, model)
    train(torch_args, args.model_copy(update={"model_path": model}))


def _arguments(phases: LabPhases, phase: LabPhase, args: TrainingArgs, model: str, count: CountSamples) -> TrainingArgs:
    """Return the arguments of a phase's run."""
    assert phase.data is not None
    data: str | list[str | float] = phase.data
    if phase is phases.second and phases.replay > 0:
        assert phases.first.data is not None
        data = [1 - phases.replay, phase.data, phases.replay, phases.first.data]
    changes = {
        **phase.changes,
        "model_path": model,
        "data_path": data,
        "ckpt_output_dir": str(phase.checkpoints),
        "data_output_dir": str(Path(args.data_output_dir) / f"phase{phase.number}"),
    }
    # validated: a learning rate of a phase must be one of TrainingArgs too
    own = TrainingArgs(**{**dict(args), **changes})
    if phases.checkpoint == "best" and own.validation_frequency is None:
        # at the end of each epoch, where an export is made
        from megatron.launch.instructlab.mapping import steps_of  # it imports torch

        steps = steps_of(own.model_copy(update={"num_epochs": 1}), count(own))
        own = own.model_copy(update={"validation_frequency": steps})
    return own


def _result(phases: LabPhases, phase: LabPhase) -> tuple[Path, float | None]:
    """Return the export that a phase results in, and its validation loss where that is why. Raises ConfigError."""
    folder = phase.checkpoints / "hf_format"
    exports = {path: _samples(path) for path in folder.glob("*") if (path / "config.json").is_file()}
    if not exports:
        raise ConfigError(
            [
                f"{folder} holds no export, so that phase {phase.number} has no result; start from the beginning with "
                "--force-clear-phased-cache"
            ]
        )
    if phases.checkpoint == "last":
        return max(exports, key=lambda path: exports[path]), None
    losses = _validation_losses(phase.checkpoints / METRICS_FILE)
    measured = {path: losses[samples] for path, samples in exports.items() if samples in losses}
    if not measured:
        raise ConfigError(
            [
                f"no export in {folder} was made in a step that was validated; leave validation_frequency out, or use "
                "phased_checkpoint=last"
            ]
        )
    best = min(measured, key=lambda path: measured[path])
    return best, measured[best]


def _samples(export: Path) -> float:
    # samples_400; last_epoch stands for all
    number = export.name.rpartition("_")[2]
    return int(number) if number.isdigit() else math.inf


def _validation_losses(metrics: Path) -> dict[float, float]:
    """Return the validation losses of a run by the number of samples before them."""
    losses: dict[float, float] = {}
    for line in metrics.read_bytes().splitlines():
        row = orjson.loads(line)
        # NaN is null
        if row["kind"] == "valid" and row["lm_loss"] is not None:
            losses[row["consumed_samples"]] = row["lm_loss"]
    return losses
