"""Text for a terminal: lists that stay short, and lines of its width, which break between words alone."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Sequence

INDENT = "    "


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
