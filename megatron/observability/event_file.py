"""TensorBoard's event file, written at once.

TensorBoard's own writer computes its checksums in Python, byte by byte, in a thread that competes with training for the
interpreter: 0.3 ms a logged step, more than everything else that is told. The format is TFRecord's: length, its CRC,
the event, its CRC; CRC-32C, masked (tensorflow/core/lib/io/record_writer.h).
"""

from __future__ import annotations

import errno
import itertools
import os
import socket
import struct
import time
from pathlib import Path
from typing import Any

import google_crc32c

_number = itertools.count()


class EventFile:
    """A new file of the folder; faults of writing are raised where they happen."""

    def __init__(self, folder: str | Path) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self._event: Any = Event
        Path(folder).mkdir(parents=True, exist_ok=True)
        # as TensorBoard's own are called: it sorts the files of a folder by their names
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{next(_number)}"
        self._file = os.open(Path(folder) / name, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self._write(file_version="brain.Event:2")

    def add_summary(self, summary: Any, global_step: int) -> None:
        self._write(summary=summary, step=global_step)

    def _write(self, **content: Any) -> None:
        data = self._event(wall_time=time.time(), **content).SerializeToString()
        length = struct.pack("<Q", len(data))
        record = length + struct.pack("<I", masked_crc32c(length)) + data + struct.pack("<I", masked_crc32c(data))
        end = os.fstat(self._file).st_size
        if os.write(self._file, record) < len(record):
            os.ftruncate(self._file, end)  # the disk is full: TensorBoard reads no further than a torn event
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def close(self) -> None:
        os.close(self._file)


def masked_crc32c(data: bytes) -> int:
    """CRC-32C as TFRecord masks it."""
    crc: int = google_crc32c.value(data)
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF
