"""Names of this package's commands, as the user of this process types them."""

from __future__ import annotations

import sys
from pathlib import Path

from megatron.files import IMPORT_ROOT

SHORTENED = {"preprocess_data": "preprocess", "convert_checkpoint": "convert"}
"""Commands that are shorter than the name of their file in megatron/cli/."""


def command_name(tool: str) -> str:
    """Return how to start megatron/cli/`tool`.py: `python tools/plan.py` in a checkout, else `megatron-plan`.

    An installed command, in a checkout too, names the others as installed.
    """
    in_checkout = (IMPORT_ROOT / "tools" / f"{tool}.py").is_file() and not _runs_installed()
    return f"python tools/{tool}.py" if in_checkout else f"megatron-{SHORTENED.get(tool, tool).replace('_', '-')}"


def train_name() -> str:
    """Return how to start megatron/train.py."""
    return "megatron-train" if _runs_installed() else "python -m megatron.train"


def _runs_installed() -> bool:
    return Path(sys.argv[0]).name.startswith("megatron-")
