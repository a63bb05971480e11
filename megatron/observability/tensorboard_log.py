"""TensorBoard's events, written by torch.utils.tensorboard."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.observability.append_file import warn_deleted


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

    def _write(self, values: Sequence[Any], step: int) -> None:
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
