"""Files of JSON objects a line, whose writer may have been killed within one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_rows(file: Path) -> list[dict[str, Any]]:
    """Return the whole lines of a file; [] if there is none."""
    lines = file.read_bytes().splitlines(keepends=True) if file.is_file() else []
    return [json.loads(line) for line in lines if line.endswith(b"\n")]
