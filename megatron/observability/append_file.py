"""Files that grow by whole lines, and write errors that do not end training."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path


class AppendFile:
    """File that grows by whole lines: each is in it when `write` returns, or no part of it is.

    A file that is deleted meanwhile is recreated, with a warning.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = _open(path)

    def write(self, line: bytes) -> None:
        """Append a line. Raises OSError, as on a full disk."""
        status = os.fstat(self._file)
        if status.st_nlink == 0:
            self._recreate()
            status = os.fstat(self._file)
        end = status.st_size
        if os.write(self._file, line) < len(line):
            os.ftruncate(self._file, end)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _recreate(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        file = _open(self._path)
        os.close(self._file)
        self._file = file
        warn_deleted(self._path)

    def close(self) -> None:
        os.close(self._file)


def _open(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)


def warn_deleted(path: Path) -> None:
    """Report a file that was deleted during the run, and is recreated."""
    _warn(f"{path} was deleted during the run: its content so far is lost. It is recreated; training continues")


class WriteErrors:
    """Reports of writes that failed: a warning at the first of each file, and their number at the end."""

    def __init__(self) -> None:
        self._failed: Counter[str] = Counter()

    @contextlib.contextmanager
    def reported(self, name: str) -> Iterator[None]:
        """Report an OSError of the block instead of raising it."""
        try:
            yield
        except OSError as error:
            self._failed[name] += 1
            if self._failed[name] == 1:
                _warn(f"{name} cannot be written: {error.strerror or error}; training continues")

    def close(self) -> None:
        """Report the number of failed writes. A second call does nothing."""
        for name, times in self._failed.items():
            _warn(f"{name}: {times} writes failed, and their content is lost")
        self._failed.clear()


def _warn(text: str) -> None:
    with contextlib.suppress(OSError):
        print(f"WARNING: {text}", file=sys.stderr, flush=True)
