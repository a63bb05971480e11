"""End of a rank's process: the message of an error, the exit status, and how it leaves."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import NoReturn

from megatron.options.config import ConfigError
from megatron.runtime.commands import DONE, REFUSED
from megatron.runtime.devices import defer_backends
from megatron.runtime.early_interrupt import raise_at_interrupt
from megatron.runtime.files import READER_LEFT, discard_output
from megatron.runtime.network import adopt_mpi_variables
from megatron.runtime.terminal import for_stderr

INTERRUPTED = 130


def status_of(main: Callable[[Sequence[str]], None], arguments: Sequence[str]) -> int:
    """Run the main function of a rank that does not train, and return its exit status.

    A user's fault is a message without traceback, which one rank prints.
    """
    try:
        raise_at_interrupt()
        adopt_mpi_variables()
        defer_backends()
        main(arguments)
        sys.stdout.flush()
    except ConfigError as error:  # equal on every rank
        print_error(str(error) if _is_first() else "")
        return REFUSED
    except BrokenPipeError:
        discard_output()
        return READER_LEFT
    except KeyboardInterrupt:
        print_error("interrupted" if _is_first() else "")
        return INTERRUPTED
    except Exception as error:
        from megatron.resilience.errors import USER_FAULTS, OtherRankFailed, exit_status, is_lost_peer, message_of

        if isinstance(error, USER_FAULTS):
            is_own = isinstance(error, OSError) and not isinstance(error, OtherRankFailed)
            print_error(message_of(error) if _is_first() or is_own else "")
        elif is_lost_peer(error):
            print_error("another rank has ended, and this one with it" if _is_first() else "")
        else:
            print_error(traceback.format_exc().rstrip())
        return exit_status(error)
    return DONE


def _is_first() -> bool:
    return os.environ.get("RANK", "0") == "0"


def print_error(text: str) -> None:
    """Print on stderr. On a full disk nothing is printed, and the exit status remains."""
    with contextlib.suppress(OSError):
        if text:
            print(for_stderr(text), file=sys.stderr, flush=True)


def leave(status: int) -> NoReturn:
    """End the process here, without Python's own finalization.

    gloo's threads release the tensors of the last collective after it has returned. One that does so while the
    interpreter is being torn down aborts the process: status 134 after a run that went well.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # a full disk, a reader that left
            stream.flush()
    os._exit(status)
