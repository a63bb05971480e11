"""Ctrl-C while a program imports its modules: it ends the process at once, without a traceback.

This module imports nothing else, and is called before all others where a program begins.
"""

import signal


def end_process_at_interrupt() -> None:
    """Let Ctrl-C end this process, unless it is ignored, as in a background job."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def raise_at_interrupt() -> None:
    """Let Ctrl-C raise KeyboardInterrupt again, for a program that catches it from now on."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
