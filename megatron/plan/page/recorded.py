"""A run as its folder records it, for a comparison with its plan: time of its steps, and one step's trace."""

from __future__ import annotations

import gzip
import json
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megatron.options.config import ConfigError
from megatron.plan.page.content import Bar, Compared, Timeline
from megatron.plan.timing.measured_parts import PASSES as WHOLE_PASSES
from megatron.plan.timing.measured_parts import measurable
from megatron.plan.timing.step import PassSeconds, StepTime
from megatron.runtime.files import parse_json
from megatron.runtime.result_files import METRICS_FILE, RUN_FILE

TRACE_FILE = "profile_instructions.json.gz"
TIMER_SUFFIX = "-time"
"""End of the names of timers in a row of the metrics."""
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


class RecordedDevices(NamedTuple):
    """Devices of a run's last start."""

    number: int
    per_node: int


def recorded_devices(folder: Path) -> RecordedDevices:
    """Return the devices of the last start of a run. Raises ConfigError if its folder does not say."""
    file = folder / RUN_FILE
    try:
        start = parse_json(file.read_text(encoding="utf-8"))["starts"][-1]
        return RecordedDevices(int(start["world_size"]), max(len(ranks) for ranks in start["hosts"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise ConfigError([f"--compare {folder}: {RUN_FILE} cannot be read: {error!r}; give the layout"]) from None


class RecordedRun:
    """Times of the steps of a run, from the files in its folder."""

    def __init__(self, folder: Path) -> None:
        """Raises ConfigError if the folder has no steps."""
        self.folder = folder
        rows = _rows(folder / METRICS_FILE)
        self.seconds = _median_seconds(folder, rows)
        self._parts = _median_parts(rows)
        self._timers = _median_timers(rows)
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
        rows = [
            Compared("a step", time.seconds, self.seconds),
            *self._compared_parts(time),
            *self._compared_timers(time),
        ]
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

    def _compared_parts(self, time: StepTime) -> Iterator[Compared]:
        """Yield the parts that a run of predicted steps measures on rank 0."""
        if not self._parts:
            return
        divides = WHOLE_PASSES not in self._parts
        predicted = measurable(time.parts, divides_passes=divides)
        title = "computation" if divides else "passes and update"
        yield Compared(
            f"{title}, rank 0", predicted.compute, self._parts.get("compute", self._parts.get(WHOLE_PASSES, 0.0))
        )
        if predicted.exchange:
            yield Compared("exchanges and waits, rank 0", predicted.exchange, self._parts.get("exchange", 0.0))

    def _compared_timers(self, time: StepTime) -> Iterator[Compared]:
        """Yield the timers of the slowest rank (--timing-log-level)."""
        m = time.num_microbatches
        predicted = {
            "forward-compute": m * max(sum(chunk.forward for chunk in stage) for stage in time.stages),
            "backward-compute": m * max(sum(chunk.backward for chunk in stage) for stage in time.stages),
            "optimizer": time.parts.update,
        }
        for name, seconds in predicted.items():
            if name in self._timers:
                yield Compared(f"timer {name}", seconds, self._timers[name])


PASSES = ("forward", "backward", "weight")


def _seconds_of(chunk: PassSeconds, kind: str, *, is_deferred: bool) -> float:
    """Return the predicted seconds of a pass; `is_deferred`: the gradients of weights have passes of their own."""
    if kind == "forward":
        return chunk.forward
    if kind == "weight":
        return chunk.weight
    return chunk.input if is_deferred else chunk.backward


def _rows(file: Path) -> list[dict[str, Any]]:
    """Return the rows of a run's metrics. Raises ConfigError if they cannot be read."""
    try:
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        message = f"--compare {file.parent}: {file.name} cannot be read: {error.strerror}; give a run's results folder"
        raise ConfigError([message]) from None
    rows = []
    for line in lines:
        try:
            row = parse_json(line)
        except ValueError:  # the run is still writing it
            continue
        if isinstance(row, dict):
            rows.append(row)
    return rows


def _median_seconds(folder: Path, rows: Sequence[Mapping[str, Any]]) -> float:
    """Return the median time of the steps of a run after the first ones."""
    times = (row.get("iteration_time_s") for row in rows if row.get("kind") == "train")
    seconds = [each for each in times if isinstance(each, float)]
    if not seconds:
        raise ConfigError([f"--compare {folder}: {METRICS_FILE} has no training step; wait for the run's first line"])
    return statistics.median(seconds[WARM_UP:] or seconds)


def _median_parts(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the median seconds of each part of the steps, which a run of predicted steps records."""
    parts = [row["parts"] for row in rows if isinstance(row.get("parts"), dict)]
    return _medians(parts[WARM_UP:] or parts)


def _median_timers(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the median of each timer's largest value over the ranks."""
    timers = []
    for row in rows:
        if row.get("kind") != "timers":
            continue
        of_row = {name.removesuffix(TIMER_SUFFIX): value for name, value in row.items() if name.endswith(TIMER_SUFFIX)}
        timers.append({name: value.get("max") for name, value in of_row.items() if isinstance(value, dict)})
    return _medians(timers[WARM_UP:] or timers)


def _medians(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    names = dict.fromkeys(name for row in rows for name in row)
    values = {name: [row[name] for row in rows if isinstance(row.get(name), float)] for name in names}
    return {name: statistics.median(numbers) for name, numbers in values.items() if numbers}


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
