"""A run as its folder records it, for a comparison with its plan: time of its steps, and one step's trace."""

from __future__ import annotations

import gzip
import json
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron.options.config import ConfigError
from megatron.plan.page.content import Bar, Compared, Timeline
from megatron.plan.timing.step import PassSeconds, StepTime
from megatron.runtime.files import parse_json

METRICS_FILE = "metrics.jsonl"
TRACE_FILE = "profile_instructions.json.gz"
WARM_UP = 3
"""First steps of a run, which allocate and compile."""
KINDS = {
    "ForwardPass": "forward",
    "BackwardPass": "backward",
    "WeightPass": "weight",
    "ReduceGrads": "reduction",
    "ReduceTiedGrads": "reduction",
    "OptimizerStep": "update",
    "LoadMicroBatch": "other",
}
"""Kinds of the instructions of a trace; the others are messages."""


class RecordedRun:
    """Times of the steps of a run, from the files in its folder."""

    def __init__(self, folder: Path) -> None:
        """Raises ConfigError if the folder has no steps."""
        self.folder = folder
        self.seconds = _median_seconds(folder / METRICS_FILE)
        self._events = _last_step(folder / TRACE_FILE)

    @property
    def has_trace(self) -> bool:
        return bool(self._events)

    def timeline(self) -> Timeline:
        """Return the last step of the trace, of the first rank of each stage."""
        begin = min(event["ts"] for event in self._events)
        bars = []
        for event in self._first_ranks():
            name, start = event["args"]["instruction"], (event["ts"] - begin) / 1e6
            kind = KINDS.get(name, "message")
            text = f"{name} {event['args']['microbatch']}"
            bars.append(Bar(event["args"]["stage"], kind, start, start + event["dur"] / 1e6, text))
        stages = 1 + max(bar.row for bar in bars)
        names = [f"stage {stage}" for stage in range(stages)]
        title = f"Measured, step {self._events[0]['args']['iteration']}"
        return Timeline(title, names, bars, max(bar.end for bar in bars))

    def _first_ranks(self) -> Iterator[Mapping[str, Any]]:
        first: dict[int, int] = {}
        for event in self._events:
            stage = event["args"]["stage"]
            first[stage] = min(event["pid"], first.get(stage, event["pid"]))
        return (event for event in self._events if event["pid"] == first[event["args"]["stage"]])

    def compared(self, time: StepTime) -> list[Compared]:
        """Return the predicted step and passes beside the measured ones. Raises ConfigError for other stages."""
        rows = [Compared("a step", time.seconds, self.seconds)]
        taken: defaultdict[tuple[int, int, str], list[float]] = defaultdict(list)
        for event in self._events:
            place = event["args"]["stage"], event["args"]["chunk"], KINDS.get(event["args"]["instruction"], "message")
            taken[place].append(event["dur"] / 1e6)
        stages = len({stage for stage, *_ in taken})
        if self.has_trace and stages != len(time.stages):
            raise ConfigError(
                [f"--compare {self.folder}: the run has {stages} stages, the plan {len(time.stages)}; plan its layout"]
            )
        for (stage, chunk, kind), seconds in sorted(taken.items()):
            if kind not in PASSES or chunk >= len(time.stages[stage]):
                continue
            name = f"stage {stage}, {kind} pass"
            if len(time.stages[stage]) > 1:
                name += f" of chunk {chunk}"
            is_deferred = (stage, chunk, "weight") in taken
            predicted = _seconds_of(time.stages[stage][chunk], kind, is_deferred=is_deferred)
            rows.append(Compared(name, predicted, statistics.mean(seconds)))
        return rows


PASSES = ("forward", "backward", "weight")


def _seconds_of(chunk: PassSeconds, kind: str, *, is_deferred: bool) -> float:
    """Return the predicted seconds of a pass; `is_deferred`: the gradients of weights have passes of their own."""
    if kind == "forward":
        return chunk.forward
    if kind == "weight":
        return chunk.weight
    return chunk.input if is_deferred else chunk.backward


def _median_seconds(file: Path) -> float:
    """Return the median time of the steps of a run after the first ones."""
    try:
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        message = f"--compare {file.parent}: {file.name} cannot be read: {error.strerror}; give a run's results folder"
        raise ConfigError([message]) from None
    seconds = []
    for line in lines:
        try:
            row = parse_json(line)
        except ValueError:  # the run is still writing it
            continue
        if isinstance(row, dict) and row.get("kind") == "train" and isinstance(row.get("iteration_time_s"), float):
            seconds.append(row["iteration_time_s"])
    if not seconds:
        raise ConfigError([f"--compare {file.parent}: {file.name} has no training step; wait for the run's first line"])
    return statistics.median(seconds[WARM_UP:] or seconds)


def _last_step(file: Path) -> list[dict[str, Any]]:
    """Return the events of the last step of a trace; nothing where the run has recorded none."""
    if not file.exists():
        return []
    try:
        with gzip.open(file, "rt", encoding="utf-8") as text:
            events = [event for event in json.load(text)["traceEvents"] if event.get("ph") == "X"]
        last = max(event["args"]["iteration"] for event in events)
        return [event for event in events if event["args"]["iteration"] == last]
    except (OSError, EOFError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError([f"{file} is not a trace of --profile-instructions: {error!r}"]) from None
