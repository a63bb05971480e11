"""Bytes that a process holds, counted at its allocators by benchmarks/allocations.cpp (Linux, glibc, torch on a CPU).

A process counts only if it was started with `LD_PRELOAD` of `library()`. Its children inherit that variable.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
from pathlib import Path
from typing import NamedTuple

SOURCE = Path(__file__).with_suffix(".cpp")
MIB = 2**20


class Peak(NamedTuple):
    """Bytes at the moment when tensors and communication together were largest."""

    tensors: int
    communication: int
    """Buffers of gloo's threads."""
    kernels: int
    """The most that kernels held at any moment: work space of MKL, compiled code and work space of oneDNN."""
    process: int
    """Growth of the whole process since the start of counting: its resident memory, at its own peak."""


def library() -> Path:
    """Compile the counter, unless that was done before, and return its path."""
    source = SOURCE.read_bytes()
    path = SOURCE.parent.parent / "build" / f"allocations-{hashlib.sha256(source).hexdigest()[:12]}.so"
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        unfinished = path.with_suffix(f".{os.getpid()}.so")
        command = [os.environ.get("CXX", "g++"), "-O2", "-shared", "-fPIC", str(SOURCE), "-o", str(unfinished)]
        subprocess.run(command, check=True)
        unfinished.replace(path)
    return path


class Allocations:
    """The counter of this process, from `start` on; what was allocated before it is left out."""

    def __init__(self) -> None:
        self._counter = ctypes.CDLL(None)
        if not hasattr(self._counter, "allocations_start"):
            raise RuntimeError(f"the process has to be started with LD_PRELOAD={library()}")
        self._resident_at_start = 0

    def start(self) -> None:
        """Count from here on. Raises RuntimeError before torch is imported."""
        self._resident_at_start = _resident("VmRSS")
        if self._counter.allocations_start():
            raise RuntimeError("torch is not loaded, whose allocations are to be counted")

    def reset_peak(self) -> None:
        self._counter.allocations_reset_peak()
        # since Linux 4.0: sets VmHWM to what is resident now
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")

    def peak(self) -> Peak:
        """The largest moment since `reset_peak`. Raises RuntimeError if there were more blocks than can be counted."""
        counted = (ctypes.c_int64 * 3)()
        if self._counter.allocations_read(counted):
            raise RuntimeError("more blocks were alive than the counter has places for")
        tensors, communication, kernels = counted
        return Peak(tensors, communication, kernels, _resident("VmHWM") - self._resident_at_start)

    def stop(self) -> None:
        self._counter.allocations_stop()


def _resident(name: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no line {name}")
