"""Files and folders that appear complete or not at all, and survive a power cut; paths that match a pattern."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import fnmatch
import glob
import json
import os
import re
import secrets
import shutil
import sys
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

IMPORT_ROOT = Path(__file__).resolve().parent.parent.parent
"""Folder that holds megatron/: a checkout, or site-packages."""


READER_LEFT = 141
"""Exit status of a command whose output no one reads any more: that of a process which SIGPIPE has ended."""


def show(text: str) -> None:
    """Print a text on stdout. Exits with READER_LEFT if the reader has left, as `| head` does."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        discard_output()
        raise SystemExit(READER_LEFT) from None


# Python flushes stdout at its end, and would print that BrokenPipeError
def discard_output() -> None:
    """Discard what stdout still holds, so that the end of the process does not fail to write it."""
    with contextlib.suppress(OSError, ValueError):  # a stand-in of stdout may have no descriptor
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def parse_json(text: str | bytes, **options: Any) -> Any:
    """Return the value of a JSON text; options of json.loads. Raises ValueError, also where it is nested too deeply."""
    try:
        return json.loads(text, **options)
    # a text of a few kilobytes can nest that deeply: damaged, or meant to
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def sync_file(file: IO[Any]) -> None:
    """Wait until everything written to an open file is on the disk. Raises OSError."""
    file.flush()
    os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk, before any later rename."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some network file systems cannot do this, and keep the order themselves
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def lock_file(file: IO[Any]) -> bool:
    """Lock an open file until it is closed. Returns False if another process holds the lock.

    True where the file system has no locks, as some over a network.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


@contextlib.contextmanager
def locked_output(path: Path) -> Iterator[bool]:
    """Lock a file that is yet to be written, until the block ends. Yields False if another process holds the lock.

    The lock is on a hidden file beside it, which the block removes: the file itself appears complete or not at all.
    """
    place = path.with_name(f".{path.name}.lock")
    while True:
        with place.open("ab") as file:
            is_held = lock_file(file)
            # the holder before removed the file between our open and our lock: this lock is of a name that is gone
            if is_held and not _is_current(file, place):
                continue
            try:
                yield is_held
            finally:
                if is_held:
                    place.unlink(missing_ok=True)
            return


def _is_current(file: IO[Any], place: Path) -> bool:
    """Return whether an open file is still the one at its place: another process may have removed it meanwhile."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), place.stat())
    except FileNotFoundError:
        return False


def write_durably(path: Path, content: bytes) -> None:
    """Write or overwrite a file, and wait for the disk. A crash may leave a part of it."""
    with path.open("wb") as file:
        file.write(content)
        sync_file(file)


def disk_shortage(folder: Path, needed_bytes: int) -> str | None:
    """Return a sentence that states free and needed space if the disk of `folder` has too little; else None."""
    free = shutil.disk_usage(folder).free
    if free >= needed_bytes:
        return None
    unit, size = ("GB", 1e9) if needed_bytes >= 1e9 else ("MB", 1e6)
    named = folder.parent if folder.name.startswith(".") and folder.name.strip(".") else folder  # a work folder
    return f"{named} has {free / size:.1f} {unit} free, but the result needs {needed_bytes / size:.1f} {unit}"


@contextlib.contextmanager
def replacing(path: Path, *, partial_name: str | None = None) -> Iterator[IO[bytes]]:
    """Open a new file for writing, which replaces `path` when the block ends; if it fails, `path` is unchanged.

    The file is durable at the end. Until then it is beside `path`, under a unique hidden name, or `partial_name`: if
    only one process writes there, the next attempt then overwrites what a kill left.
    """
    partial = path.with_name(partial_name or f".{path.name}.partial-{uuid.uuid4().hex[:12]}")
    try:
        with partial.open("wb") as file:
            yield file
            sync_file(file)
        # the file is on the disk before it gets its name: a power cut leaves the old one or the new
        os.replace(partial, path)
    # also at Ctrl-C
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


@contextlib.contextmanager
def appearing(place: Path, partial: Path, *, replaced: Path | None = None) -> Iterator[Path]:
    """Create the folder `partial`, which is renamed to `place` when the block ends, and removed if anything fails.

    `place` must then be absent or an empty folder; with `replaced`, a name for the old folder during the exchange, it
    may be any folder, which is removed. All three have the same parent. The files must be durable. A kill leaves the
    old folder or the new one, at the worst moment under its other name.
    """
    partial.mkdir()
    try:
        yield partial
        sync_folder(partial)
        old = replaced if replaced is not None and os.path.lexists(place) else None
        if old is not None:
            # rename(2) replaces no folder that holds files, so the old one is moved away first
            os.rename(place, old)
        try:
            os.rename(partial, place)
        except OSError:
            if old is not None:
                os.rename(old, place)
            raise
        # the rename itself must be on the disk before the old folder goes
        sync_folder(place.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    if old is not None:
        shutil.rmtree(old, ignore_errors=True)


@contextlib.contextmanager
def new_output(place: Path) -> Iterator[Path]:
    """Give a hidden folder beside `place` that becomes it when the block ends, and is removed if anything fails.

    What a kill left of earlier attempts is removed first. Raises BusyOutput if another process writes to `place`.
    """
    with locked_output(place) as is_held:
        if not is_held:
            raise BusyOutput(f"another process is writing {place}; wait for it, or give another folder")
        # the lock is held, so that none of these is being written
        for left in place.parent.glob(f".{glob.escape(place.name)}.partial-????????"):
            shutil.rmtree(left, ignore_errors=True)
        with appearing(place, place.with_name(f".{place.name}.partial-{secrets.token_hex(4)}")) as work:
            yield work


class BusyOutput(Exception):
    """Another process writes to the same place."""


def natural_order(name: str) -> list[tuple[int, int, str]]:
    """Return a sort key that compares digits as numbers: shard_2 before shard_10."""
    parts = re.findall(r"([0-9]+)|([^0-9]+)", name)
    return [(0, int(digits), digits) if digits else (1, 0, text) for digits, text in parts]


def path_matches(names: Sequence[str], parts: Sequence[str]) -> bool:
    """Return whether a path, as its names, matches a glob, as its parts, of which `**` is any number of folders."""
    if not parts:
        return not names
    if parts[0] == "**":
        return path_matches(names, parts[1:]) or (bool(names) and path_matches(names[1:], parts))
    return bool(names) and fnmatch.fnmatchcase(names[0], parts[0]) and path_matches(names[1:], parts[1:])


# ---------------------------------------------------------------------------------------------------------------------
# Files that grow by whole lines, and write errors that do not end training.


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
        # deleted, or replaced, while it is open: further lines would be lost with it
        if status.st_nlink == 0:
            self._recreate()
            status = os.fstat(self._file)
        end = status.st_size
        if os.write(self._file, line) < len(line):
            # a full disk takes a part of a line: the file keeps whole ones
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
            # a full disk fails each write of hours
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
