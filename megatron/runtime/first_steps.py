"""First steps of a process, before it imports the rest of its modules.

This module imports next to nothing: every command waits for it, `--help` too.
"""

import contextlib
import gc
import os
import signal
import sys
from collections.abc import Iterator


def end_process_at_interrupt() -> None:
    """Let Ctrl-C end this process at once, without a traceback, unless it is ignored, as in a background job."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def raise_at_interrupt() -> None:
    """Let Ctrl-C raise KeyboardInterrupt again, for a program that catches it from now on."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def defer_backends() -> None:
    """Keep torch from loading backends of devices when it is imported; `choose_device` loads the one of the device.

    For a rank, before anything imports torch: in eager mode the Gaudi software registers to be loaded by that import
    (the entry point `torch.backends`). It then chooses the rank's module, and reads its variables, once: the rank
    must know its place by then, and the variables of its record must be set.
    """
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Import without collections: imports of torch make a million objects and no garbage, which a fifth of their time
    would be spent to look for. MLflow is kept out.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    # DeepSpeed's autotuner imports it where it is installed, with pandas and with pyarrow, which starts a thread
    keeps_out = "mlflow" not in sys.modules
    if keeps_out:
        sys.modules["mlflow"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        if keeps_out:
            del sys.modules["mlflow"]
        if was_enabled:
            gc.enable()
