"""Events of the device: a CPU has no streams, so all that was launched is done."""

from __future__ import annotations

import time
from typing import Any


class Event:
    def __init__(self, enable_timing: bool = False) -> None:
        self.time_s = 0.0

    def record(self, stream: Any = None) -> None:
        self.time_s = time.monotonic()

    def query(self) -> bool:
        return True

    def wait(self, stream: Any = None) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end_event: Event) -> float:
        return 1000 * (end_event.time_s - self.time_s)
