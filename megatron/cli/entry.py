"""The process of a command: tools/NAME.py of a checkout, and `megatron-NAME` where the package is installed.

`entry.preprocess_data()` imports megatron/cli/preprocess_data.py and runs its `main`. Nothing else is imported before,
so that Ctrl-C ends the process at once, without a traceback, while modules such as torch are imported.
"""

import importlib
import signal
import sys
from collections.abc import Callable

FAILED = 1


def __getattr__(name: str) -> Callable[[], int]:
    if name.startswith("_"):
        raise AttributeError(name)
    return lambda: _run(name)


def _run(name: str) -> int:
    """Return the exit status of a command."""
    interrupt = signal.getsignal(signal.SIGINT)
    if interrupt is signal.default_int_handler:  # not if it is ignored, as in a background job
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        module = importlib.import_module(f"megatron.cli.{name}")
    except ImportError as error:
        print(f"error: {error}", file=sys.stderr)
        return FAILED
    finally:
        signal.signal(signal.SIGINT, interrupt)
    status: int = module.main()
    return status
