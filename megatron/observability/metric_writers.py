"""metrics.jsonl and answers.jsonl: a JSON object a line, in which each iteration is logged once."""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from megatron.runtime.files import AppendFile, replacing, warn_deleted


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
    if not path.exists():
        return
    for line in path.read_bytes().splitlines(keepends=True):
        row = _row_until(line, iteration)
        if row is None:
            moved.append(line)
        else:
            kept.append(line)
            keep(row)
    if not moved:
        return
    # first, and appended: a crash before the next line leaves rows twice, and never none
    with open(path.with_suffix(".superseded.jsonl"), "ab") as file:
        # a torn row gets an end, so that the next one begins a line
        file.writelines(line.rstrip(b"\n") + b"\n" for line in moved)
    with replacing(path, partial_name=f"{path.name}.new") as rows:
        rows.writelines(kept)


def _row_until(line: bytes, iteration: int) -> dict[str, Any] | None:
    """Return the row if the line is whole and of this iteration or an earlier one, and the run does not start at 0."""
    if iteration == 0 or not line.endswith(b"\n"):
        return None  # the writer was killed within the line
    try:
        row = orjson.loads(line)
        if isinstance(row, dict) and int(row["iteration"]) <= iteration:
            return row
    except (orjson.JSONDecodeError, KeyError, TypeError, ValueError):
        pass
    return None


class TensorBoardLog:
    """One event file, which holds all the scalars of a step as one event.

    This is the FileWriter below SummaryWriter, whose `add_scalar` writes an event for each tag: 2 ms a logged step
    instead of 0.2. A resumed run writes a file of its own; TensorBoard drops the points that it supersedes. (A
    SessionLog would purge by step, which is an iteration for some tags and a number of samples for others.) A file that
    is deleted meanwhile is recreated, with a warning.

    A thread writes the events. After its first error, such as a full disk, every call raises that OSError.
    """

    def __init__(self, folder: str | Path) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        self._summary, self._folder = Summary, Path(folder)
        # the thread raises its error too, which prints a traceback: the calls report it
        self._excepthook = threading.excepthook
        threading.excepthook = self._ignore_writer
        self._open()

    def _open(self) -> None:
        from torch.utils.tensorboard import FileWriter  # late: the import takes 0.1 s

        # FileWriter does not say how it calls its file; ranks other than 0 write none here
        earlier = set(self._folder.glob("*"))
        self._writer = FileWriter(str(self._folder))
        self._file = (set(self._folder.glob("*")) - earlier).pop()

    def write(self, scalars: Mapping[str, float], step: int) -> None:
        """Write one event. Raises OSError."""
        self._write([self._summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()], step)

    def write_texts(self, texts: Mapping[str, str], step: int) -> None:
        """Write one event of texts in Markdown. Raises OSError."""
        from torch.utils.tensorboard.summary import text as text_summary

        self._write([value for tag, text in texts.items() for value in text_summary(tag, text).value], step)

    def write_image(self, tag: str, png: bytes, step: int) -> None:
        """Write one event of a picture in RGB. Raises OSError."""
        width, height = struct.unpack(">II", png[16:24])
        image = self._summary.Image(height=height, width=width, colorspace=3, encoded_image_string=png)
        self._write([self._summary.Value(tag=tag, image=image)], step)

    def _write(self, values: Sequence[Any], step: int) -> None:
        # the writer would go on into a file that has no name any more
        if not self._file.exists():
            self._writer.close()
            self._open()
            warn_deleted(self._file)
        self._writer.add_summary(self._summary(value=values), step)

    def close(self) -> None:
        """Wait until every event is written. Raises OSError."""
        try:
            self._writer.flush()
        finally:
            self._writer.close()
            threading.excepthook = self._excepthook

    def _ignore_writer(self, arguments: threading.ExceptHookArgs) -> None:
        ours = type(arguments.thread).__module__.startswith("tensorboard.")
        if not (ours and isinstance(arguments.exc_value, OSError)):
            self._excepthook(arguments)
