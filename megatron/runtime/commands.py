"""Commands of this package: their names as the user types them, exit statuses, errors and messages for a terminal."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Sequence
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


class UserError(Exception):
    """Base of the errors that a user can remedy: something given to the program is wrong.

    The message says what, the rule, and the remedy, and is enough; a restart would fail in the same way.
    """


def shell_status(returncode: int) -> int:
    """Return the exit status as a shell does: 128 + n for a process that signal n killed (returncode -n)."""
    return returncode if returncode >= 0 else 128 - returncode


# ---------------------------------------------------------------------------------------------------------------------
# Text for a terminal: counts, lists that stay short, and lines of its width, which break between words alone.

INDENT = "    "


def counted(count: int, noun: str) -> str:
    """Return "1 text" or "2,345 texts"."""
    plural = "" if count == 1 else "s"
    return f"{count:,} {noun}{plural}"


def first_of(texts: Sequence[str], most: int, *, separator: str = ", ", noun: str = "more") -> str:
    """Return the first texts of a list as one, and how many were left out: 'a, b and 7 more'."""
    shown = separator.join(texts[:most])
    left_out = len(texts) - most
    if left_out <= 0:
        return shown
    # a semicolon stays before the last part, a comma does not
    return f"{shown}{separator.rstrip(', ')} and {left_out} {noun}"


def folded(text: str, width: int, first: str = "", further: str = INDENT) -> str:
    """Return the text in lines of at most `width` characters, of which longer words stick out.

    `first` and `further`: what the first line and the others begin with.
    """
    return textwrap.fill(
        text,
        width,
        initial_indent=first,
        subsequent_indent=further,
        break_long_words=False,  # a path is to be copied whole
        break_on_hyphens=False,  # as is a flag
    )


def for_stderr(text: str) -> str:
    """Return a message as stderr shows it: on a terminal its long lines are folded, elsewhere a line remains one."""
    if not sys.stderr.isatty():
        return text
    width = shutil.get_terminal_size().columns - 1  # some terminals wrap a line that fills it
    return "\n".join(line if len(line) <= width else _folded_line(line, width) for line in text.split("\n"))


def _folded_line(line: str, width: int) -> str:
    words = line.lstrip()
    # items of a list keep their margin, and go on below their text
    margin = line[: len(line) - len(words)]
    return folded(words, width, margin, margin + ("  " if words.startswith("- ") else INDENT))
