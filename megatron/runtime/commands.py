"""Names of this package's commands, as the user of this process types them."""

from __future__ import annotations

import sys
from pathlib import Path

from megatron.runtime.files import IMPORT_ROOT

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


# ---------------------------------------------------------------------------------------------------------------------
# Exit statuses of a training process, read by the launcher and by restarts (docs/guides/launching.md).

DONE = 0
"""Trained to the end or stopped early, or stopped on request: by kill switch, signal, a limit of time or iterations."""
FAILED = 1
"""Unexpected error, or a last save or export that failed. A restart may succeed."""
REFUSED = 2
"""Invalid options, data or environment, reported on stderr. A restart would fail in the same way."""
ABORTED = 3
"""The guard aborted training: too many steps in a row were skipped, or the ranks' copies of a parameter differ.

So does the agent in a crash loop: one rank failed three times in the same step by the same error.
"""
HUNG = 4
"""The watchdog saw no progress. A restart may succeed."""


def shell_status(returncode: int) -> int:
    """Return the exit status as a shell does: 128 + n for a process that signal n killed (returncode -n)."""
    return returncode if returncode >= 0 else 128 - returncode
