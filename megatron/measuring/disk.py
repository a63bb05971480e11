"""Rates of a disk. Without torch."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from pathlib import Path

SYNCS = 5
SMALL = 4096


def disk_rate(folder: Path, size: int) -> float:
    """Return the bytes a second that a file is written and synced with. It has no name, so that none can be left."""
    block = os.urandom(min(size, 2**24))
    with tempfile.TemporaryFile(dir=folder) as file:
        begin = time.perf_counter()
        for _ in range(max(1, size // len(block))):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        return size / (time.perf_counter() - begin)


def sync_seconds(folder: Path) -> float:
    """Return the median seconds of a small write and its sync, as each file of a checkpoint ends.

    The file has no name, so that none can be left.
    """
    seconds = []
    with tempfile.TemporaryFile(dir=folder) as file:
        for _ in range(SYNCS):
            begin = time.perf_counter()
            file.write(bytes(SMALL))
            file.flush()
            os.fsync(file.fileno())
            seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)
