"""How a training process ends. docs/launching.md lists them for users; the launcher and a restart go by them."""

DONE = 0
"""Trained to the end, or stopped as wanted: the kill switch, a signal, a limit of time or iterations."""
FAILED = 1
"""A fault that nobody foresaw. Worth another try."""
REFUSED = 2
"""A fault of the user's, told on stderr. The next try would meet it too."""
ABORTED = 3
"""The guard aborted training: too many steps in a row were skipped, or the ranks' copies of a parameter differ."""
HUNG = 4
"""The watchdog saw no progress. Worth another try."""
