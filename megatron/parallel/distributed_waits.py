"""The one place where collectives and messages that run in the background are waited for.

Their own `wait` is native code without a frame in Python: the watchdog, which tells a rank that waits for others from
one that others wait for, recognises the calls of this file.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def wait_for(works: Iterable[Any]) -> None:
    """Wait until each `torch.distributed.Work` is done."""
    for work in works:
        work.wait()
