"""Files of a run's results folder, read for its page. No torch."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

from megatron.observability.run_plots import PlotError, Row, read_run
from megatron.options.stored import UniqueKeyLoader
from megatron.runtime.files import parse_json
from megatron.runtime.result_files import ANSWERS_FILE, CONFIG_FILE, LOG_FILE, METRICS_FILE, RUN_FILE

MOST_LOG_BYTES = 64 << 20
"""Bytes at the end of a log in which warnings are looked for."""
WARNING = re.compile(r"WARNING: ?(.*)")


class ReportError(PlotError):
    """A folder of which no page can be made: the file, and what is wrong with it."""


@dataclass(frozen=True)
class RunStart:
    """One start of a run, as run.json has it."""

    number: int
    row: Mapping[str, Any]
    began_s: float
    ended_s: float | None
    """Unix times. None: no end is recorded, and no row of this start."""

    @property
    def cause(self) -> str:
        """Return why it ended."""
        ended = self.row.get("ended")
        if isinstance(ended, dict):
            return str(ended.get("reason", "no reason is recorded"))
        return "no end is recorded: it was killed, or is under way"

    @property
    def kind(self) -> str:
        """Return done, stopped, failed or open, as run_folder.py records it."""
        ended = self.row.get("ended")
        if not isinstance(ended, dict):
            return "open"
        outcome = ended.get("outcome")
        # a damaged file must not pass for a run that is well
        return outcome if outcome in ("done", "stopped") else "failed"

    @property
    def iterations(self) -> tuple[int, int | None]:
        """Return the iteration from which it went on, and at which it ended."""
        ended = self.row.get("ended")
        last = ended.get("iteration") if isinstance(ended, dict) else None
        first = self.row.get("resumed_iteration")
        return first if isinstance(first, int) else 0, last if isinstance(last, int) else None


@dataclass(frozen=True)
class ReportedRun:
    """Files of one run."""

    name: str
    folder: Path
    rows: Sequence[Row]
    starts: Sequence[RunStart]
    answers: Sequence[Row]
    options: Mapping[str, str]
    """Options of the last start by name, as text."""
    config_text: str
    warnings: Mapping[str, int]
    """Warnings of the log, and how often each came."""
    missing: Sequence[str]
    """Files that are not there, or could not be read, with the reason."""

    def of_kind(self, kind: str) -> list[Row]:
        return [row for row in self.rows if row.get("kind") == kind]

    def last(self, kind: str, key: str) -> Any:
        """Return the newest value of a key; None: there is none."""
        for row in reversed(self.rows):
            if row.get("kind") == kind and row.get(key) is not None:
                return row[key]
        return None


def read_recorded(folder: Path, name: str, *, needs_steps: bool = True) -> ReportedRun:
    """Read a results folder; other files than metrics.jsonl may be missing.

    Raises ReportError if it has no rows of steps although they are needed, or neither rows nor starts.
    """
    try:
        rows = read_run(folder, needs_steps=needs_steps)
    except PlotError as error:
        raise ReportError(str(error)) from None
    if not folder.is_dir():
        folder = folder.parent
    # a page of what is there helps most where a run has been killed within a write
    missing: list[str] = []
    starts = list(_starts(folder, rows, missing))
    if not rows and not starts:
        raise ReportError(
            f"{folder} has no row in {METRICS_FILE}, and no start in {RUN_FILE}; wait until the run has begun"
        )
    options, config_text = _config(folder, missing)
    return ReportedRun(
        name=name,
        folder=folder,
        rows=rows,
        starts=starts,
        answers=_answers(folder, missing),
        options=options,
        config_text=config_text,
        warnings=_warnings(folder, missing),
        missing=missing,
    )


def _text(path: Path, missing: list[str]) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        missing.append(f"{path.name}: {error.strerror or error}")
        return None


def _starts(folder: Path, rows: Sequence[Row], missing: list[str]) -> Iterator[RunStart]:
    text = _text(folder / RUN_FILE, missing)
    if text is None:
        return
    try:
        found = parse_json(text)["starts"]
        began = [datetime.fromisoformat(str(row["started"])).timestamp() for row in found]
    except (ValueError, KeyError, TypeError) as error:
        missing.append(f"{RUN_FILE}: it is damaged ({error!r})")
        return
    # rows of steps that a later start trained again are of the earlier one
    rows = [*rows, *_superseded(folder)]
    times = sorted(float(row["time"]) for row in rows if isinstance(row.get("time"), int | float))
    for number, (row, at, following) in enumerate(zip(found, began, [*began[1:], float("inf")], strict=True)):
        yield RunStart(number, row, at, _end_of(row, at, [time for time in times if at <= time < following]))


def _superseded(folder: Path) -> Iterator[Row]:
    """Yield the whole rows of metrics.superseded.jsonl, which may have torn ones."""
    with contextlib.suppress(OSError):
        for line in (folder / METRICS_FILE).with_suffix(".superseded.jsonl").read_bytes().splitlines():
            with contextlib.suppress(ValueError):
                row = parse_json(line)
                if isinstance(row, dict):
                    yield row


def _end_of(row: Mapping[str, Any], began_s: float, times: Sequence[float]) -> float | None:
    """Return the end of a start: the recorded one, else that of its last row. `times`: of its rows."""
    ended = row.get("ended")
    if isinstance(ended, dict):
        try:
            return max(began_s, datetime.fromisoformat(str(ended.get("time"))).timestamp())
        except ValueError:
            pass
    return times[-1] if times else None


def _answers(folder: Path, missing: list[str]) -> list[Row]:
    # only a run with prompts has the file
    if not (folder / ANSWERS_FILE).exists():
        return []
    rows = []
    for number, line in enumerate((_text(folder / ANSWERS_FILE, missing) or "").splitlines(), start=1):
        try:
            row = parse_json(line)
            rows.append({"iteration": int(row["iteration"]), "prompt": str(row["prompt"]), "text": str(row["text"])})
        except (ValueError, KeyError, TypeError) as error:
            missing.append(f"{ANSWERS_FILE}, line {number}: it is damaged ({error!r})")
    return rows


def _config(folder: Path, missing: list[str]) -> tuple[dict[str, str], str]:
    """Return the options by name, and the text of the file."""
    text = _text(folder / CONFIG_FILE, missing)
    if text is None:
        return {}, ""
    try:
        tree = UniqueKeyLoader(text).get_single_data() or {}
        options = {name: _option_text(value) for section in tree.values() for name, value in section.items()}
    except (yaml.YAMLError, AttributeError, RecursionError) as error:
        missing.append(f"{CONFIG_FILE}: it is damaged ({type(error).__name__})")
        return {}, text
    return options, text


def _option_text(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(str, value))
    return "unset" if value is None else str(value)


def _warnings(folder: Path, missing: list[str]) -> dict[str, int]:
    counts: dict[str, int] = {}
    try:
        # bytes: a log may hold what is not UTF-8, and be larger than memory
        with open(folder / LOG_FILE, "rb") as file:
            file.seek(max(0, file.seek(0, 2) - MOST_LOG_BYTES))
            for line in file:
                if found := WARNING.search(line.decode("utf-8", errors="replace")):
                    counts[found[1].strip()] = counts.get(found[1].strip(), 0) + 1
    except OSError as error:
        missing.append(f"{LOG_FILE}: {error.strerror or error}")
    return counts
