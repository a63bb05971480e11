"""Exit statuses of a training process, read by the launcher and by restarts (docs/guides/launching.md)."""

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
