"""How far a run has come, and whether it still finds the data that its checkpoint knew."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.checkpoint.format import CheckpointError
from megatron.config.options import Config
from megatron.data.blend import content_of


@dataclass
class RunningEstimate:
    """Mean and variance of what was seen, weighted exponentially, so that they follow a value that drifts.

    An outlier counts no more than the limit it went over: a single one moves the estimate little, a lasting change
    moves it there in time. Source: ZClip (arXiv:2504.02507), there for gradient norms.
    """

    steps: int = 0
    mean: float = 0.0
    variance: float = 0.0

    def limit(self, threshold: float, window: int) -> float:
        """What is `threshold` standard deviations above the mean; infinite before `window` steps."""
        return self.mean + threshold * math.sqrt(self.variance) if self.steps >= window else math.inf

    def follow(self, value: float, threshold: float, window: int) -> None:
        """Take in one more finite value."""
        value = min(value, self.limit(threshold, window))
        self.steps += 1
        # all alike at first, so that the estimate does not hang on the very first value
        weight = max(1 / self.steps, 2 / (window + 1))
        difference = value - self.mean
        self.mean += weight * difference
        self.variance = (1 - weight) * (self.variance + weight * difference * difference)


@dataclass
class Progress:
    """Counters of a run. Global: equal on every rank, and enough to continue on any data-parallel size."""

    iteration: int = 0
    consumed_samples: int = 0
    skipped_iterations: int = 0
    nan_iterations: int = 0
    skipped_in_a_row: int = 0
    rollbacks: int = 0
    """Since the last checkpoint from beyond all samples that are left out."""
    left_out: list[tuple[int, int]] = field(default_factory=list)
    """[from, to) of the samples that a rollback leaves out; in order, apart from each other."""
    loss: RunningEstimate = field(default_factory=RunningEstimate)
    log_grad_norm: RunningEstimate = field(default_factory=RunningEstimate)

    @classmethod
    def from_saved(cls, saved: Mapping[str, Any]) -> Progress:
        """From what dataclasses.asdict made of one, by way of JSON. Raises TypeError or ValueError for others."""
        values = dict(saved)
        for name in ("loss", "log_grad_norm"):
            if name in values:
                values[name] = RunningEstimate(**values[name])
        if "left_out" in values:
            values["left_out"] = [(int(begin), int(end)) for begin, end in values["left_out"]]
        return cls(**values)

    def leaves_out(self, begin: int, end: int) -> bool:
        """Whether a step over these samples is left out: where the batch size has changed, as a whole."""
        return any(begin < stop and start < end for start, stop in self.left_out)

    def leave_out(self, begin: int, end: int) -> None:
        merged = [(begin, end)]
        for start, stop in sorted(self.left_out):
            if start <= merged[0][1] and merged[0][0] <= stop:
                merged[0] = (min(start, merged[0][0]), max(stop, merged[0][1]))
            else:
                merged.append((start, stop))
        self.left_out = sorted(merged)


@dataclass(frozen=True)
class SavedData:
    """What a checkpoint knows of the data it was trained on."""

    checkpoint: Path
    fingerprint: str
    config: Mapping[str, Mapping[str, Any]]
    """The run's config, as Config.to_dict gives it."""


def check_data(saved: SavedData, config: Config, fingerprint: str) -> str | None:
    """What has changed in the samples, or their order, since the checkpoint; None: nothing.

    Raises CheckpointError where something has, unless allow_data_change.
    """
    if saved.fingerprint == fingerprint:
        return None
    there, here = saved.config, config.to_dict()
    before, now = options_of(there), options_of(here)
    if content_of(saved.fingerprint) == content_of(fingerprint):
        change = (
            f"{saved.checkpoint} was saved by a run of {length_of(there)}; this one has {length_of(here)}, for which "
            f"data_path={_said(now['data_path'])} is repeated another number of times. Epochs are shuffled together, "
            "so one more or less changes the order of all samples"
        )
        remedy = "Keep the length of that run"
    else:
        found = [
            f"{name}={_said(now[name])} here, {_said(before.get(name))} there"
            for name in now
            if now[name] != before.get(name)
        ]
        change = (
            f"{saved.checkpoint} was trained on other data than this run finds: "
            + ("; ".join(found) or f"data_path={_said(now['data_path'])} holds other documents or tokens than it did")
            + f" (fingerprint {content_of(fingerprint)[:12]} here, {content_of(saved.fingerprint)[:12]} there)"
        )
        remedy = "Give the data of that run"
    if not config.checkpoint.allow_data_change:
        raise CheckpointError(
            f"{change}. {remedy}, or pass --allow-data-change to go on in the new order, after as many samples as the "
            "checkpoint has seen: some documents are then seen again, others never"
        )
    return change


def length_of(config: Mapping[str, Mapping[str, Any]]) -> str:
    """How long the run of a config is, in its own words."""
    samples, iters = config["training"]["train_samples"], config["training"]["train_iters"]
    size, epochs = config["training"]["global_batch_size"], config["training"].get("num_epochs")
    if epochs:
        return f"num_epochs={epochs}"
    return f"train_samples={samples}" if samples else f"train_iters={iters} of global_batch_size={size}"


def options_of(config: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The options that say which training samples there are, and in which order."""
    data, training = config["data"], config["training"]
    found = {
        "task": training.get("task", "pretrain"),
        "data_path": data["data_path"] or data["train_data_path"],
        "split": data["split"],
        "seq_length": training["seq_length"],
        "seed": training["seed"],
    }
    if found["task"] == "sft":
        found["packing"] = config["sft"]["packing"]
    return found


def _said(value: Any) -> str:
    return " ".join(map(str, value)) or "nothing" if isinstance(value, list | tuple) else str(value)
