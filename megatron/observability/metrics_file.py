"""metrics.jsonl and answers.jsonl: a JSON object a line, in which each iteration is logged once."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import orjson

from megatron.files import replacing
from megatron.observability.append_file import AppendFile

METRICS_FILE = "metrics.jsonl"
ANSWERS_FILE = "answers.jsonl"


class RowFile(AppendFile):
    """File of rows in a results folder, for a run that resumes at `iteration` (0: a run that starts).

    Rows of later iterations, and torn ones, are moved to NAME.superseded.jsonl first, not lost; all rows for a run that
    starts at 0, which begins with a validation of its own. `keep` receives each row that stays.
    """

    def __init__(self, path: Path, iteration: int, keep: Callable[[Mapping[str, Any]], None]) -> None:
        _supersede(path, iteration, keep)
        super().__init__(path)

    def write_row(self, row: Mapping[str, Any]) -> None:
        """Append a row. NaN and infinity become null. Raises OSError."""
        self.write(orjson.dumps({**row, "time": time.time()}, option=orjson.OPT_APPEND_NEWLINE))


def _supersede(path: Path, iteration: int, keep: Callable[[Mapping[str, Any]], None]) -> None:
    # the file is replaced in one piece: a crash leaves the old one or the new
    kept: list[bytes] = []
    moved: list[bytes] = []
    for line in path.read_bytes().splitlines(keepends=True) if path.exists() else []:
        row = _row_until(line, iteration)
        (moved if row is None else kept).append(line)
        if row is not None:
            keep(row)
    if not moved:
        return
    with open(path.with_suffix(".superseded.jsonl"), "ab") as file:
        file.writelines(line.rstrip(b"\n") + b"\n" for line in moved)
    with replacing(path, partial_name=f"{path.name}.new") as rows:
        rows.writelines(kept)


def _row_until(line: bytes, iteration: int) -> dict[str, Any] | None:
    """Return the row if the line is whole and of this iteration or an earlier one, and the run does not start at 0."""
    if iteration == 0 or not line.endswith(b"\n"):
        return None  # the writer was killed within the line
    try:
        row = orjson.loads(line)
        return row if isinstance(row, dict) and int(row["iteration"]) <= iteration else None
    except (orjson.JSONDecodeError, KeyError, TypeError, ValueError):
        return None
