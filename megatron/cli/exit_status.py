"""How a tool ends: 0, 1 with the fault's message, or 130 when it was interrupted."""

from __future__ import annotations

import sys
from collections.abc import Callable


def exit_status(
    work: Callable[[], None],
    faults: tuple[type[Exception], ...],
    output: str,
    left_behind: Callable[[], str] = lambda: "",
) -> int:
    """Run `work`; `faults` are the user's, whose message is enough. `output` is named where the system names no file.

    `left_behind` says what is kept for a later run, for the end of the message; empty: nothing is.
    """
    try:
        work()
    except faults as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"error: {error.filename or output}: {error.strerror or error}{left_behind()}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"interrupted{left_behind() or '; nothing was written'}", file=sys.stderr)
        return 130
    return 0
