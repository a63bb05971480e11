"""What tests set and read: the calls of kernels, and the numbers that the device would report."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

calls: list[tuple[str, dict[str, Any]]] = []
"""(name, arguments by name) of each call of a kernel, a step mark or a wait."""
memory = {
    "Limit": 96 * 2**30,
    "InUse": 3 * 2**29,
    "MaxInUse": 2**31,
    "NumAllocs": 12,
    "NumFrees": 5,
    "ActiveAllocs": 7,
    "MaxAllocSize": 2**28,
    "TotalSystemAllocs": 34,
    "TotalSystemFrees": 2,
    "TotalActiveAllocs": 32,
}
count = 8
"""Devices of this machine."""
name = "GAUDI2"
lazy: bool | None = None
"""None: as PT_HPU_LAZY_MODE says."""
compiled = 17
"""Graphs."""
fallbacks: dict[str, int] = {}
"""Calls of each operator that the device lacks, so that the CPU computes it."""
defragmentations = [0, 0]
"""Tried, successful."""
recipe_cache = (0, 0)
"""Compiled graphs found in the cache, and not found."""
recompute_sdp = [True]
lazy_collectives = os.environ.get("PT_HPU_ENABLE_LAZY_COLLECTIVES", "False").lower() in ("true", "1")
"""Graphs may hold collectives: read once, as the bridge does when it is loaded."""


def called(name: str) -> list[dict[str, Any]]:
    """Return the arguments of the calls of one name."""
    return [arguments for recorded, arguments in calls if recorded == name]


def record_import() -> None:
    """Write the variables that this process had when the package was imported to the folder HABANA_STAND_IN_IMPORTS.

    HABANA_STAND_IN_ENDS=1,0 ends it there: by status 1 in the first attempt, by 0 in all others.
    """
    if (folder := os.environ.get("HABANA_STAND_IN_IMPORTS")) is None:
        return
    (Path(folder) / f"{os.getpid()}.json").write_text(json.dumps(dict(os.environ)))
    if (statuses := os.environ.get("HABANA_STAND_IN_ENDS")) is not None and "LOCAL_RANK" in os.environ:
        attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        os._exit(int(statuses.split(",")[min(attempt, 1)]))
