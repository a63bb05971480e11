"""Files that are whole or not there, and that outlast a power cut."""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

IMPORT_ROOT = Path(__file__).resolve().parent.parent
"""Folder in which `import megatron` finds this package: a checkout, or site-packages."""


def sync_file(file: IO[Any]) -> None:
    """Return when all that was written to an open file is on the disk. Raises OSError."""
    file.flush()
    os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Return when the names in a folder are on the disk, so that what is renamed next comes after them."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some network file systems cannot, and keep the order in their own way
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_durably(path: Path, content: bytes) -> None:
    """Write a file, over an older one if need be, and wait for the disk. A crash may leave a part of it."""
    with path.open("wb") as file:
        file.write(content)
        sync_file(file)


@contextlib.contextmanager
def replacing(path: Path, *, partial_name: str | None = None) -> Iterator[IO[bytes]]:
    """A file to write that takes the place of `path` when the block ends; until then, and if it fails, `path` stays.

    Durable at the end. Meanwhile it lies beside `path`, under a hidden name of its own, or `partial_name`: where one
    process alone writes there, what a kill leaves is then overwritten by the next attempt.
    """
    partial = path.with_name(partial_name or f".{path.name}.partial-{uuid.uuid4().hex[:12]}")
    try:
        with partial.open("wb") as file:
            yield file
            sync_file(file)
        os.replace(partial, path)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


@contextlib.contextmanager
def appearing(place: Path, partial: Path, *, replaced: Path | None = None) -> Iterator[Path]:
    """`partial`, a new folder to write into, which becomes `place` when the block ends, and goes if anything fails.

    What is at `place` by then must be an empty folder; or, if a name `replaced` is given for the moment between, any,
    which is then removed. All three are beside each other. The files must be durable; a kill leaves the old one or the
    new one, at the worst moment under their other names.
    """
    partial.mkdir()
    try:
        yield partial
        sync_folder(partial)
        old = replaced if replaced is not None and os.path.lexists(place) else None
        if old is not None:
            os.rename(place, old)
        try:
            os.rename(partial, place)
        except OSError:
            if old is not None:
                os.rename(old, place)
            raise
        sync_folder(place.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    if old is not None:
        shutil.rmtree(old, ignore_errors=True)
