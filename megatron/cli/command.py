"""Run the work of a command, and turn its errors into a message and an exit status."""

from __future__ import annotations

import errno
import functools
import io
import sys
from collections.abc import Callable, Sequence

from megatron.devices import defer_backends
from megatron.exit_codes import DONE, FAILED
from megatron.files import READER_LEFT, discard_output

INTERRUPTED = 130
NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

Main = Callable[[Sequence[str] | None], int]


def command(main: Main) -> Callable[..., int]:
    """Decorate the main function of a command: it ends without a traceback where its output cannot be written.

    Its reader has left, as `| head` does, or the disk is full. Letters that stdout's encoding lacks are escaped.
    """

    @functools.wraps(main)
    def run(argv: Sequence[str] | None = None) -> int:
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")  # as stderr's; a path may have any letter
        if argv is None:  # a process of its own, which computes on the CPU; ranks load their device's themselves
            defer_backends()
        try:
            try:
                return main(argv)
            finally:
                sys.stdout.flush()  # here, where it can be caught; --help ends by SystemExit
        except BrokenPipeError:
            discard_output()
            return READER_LEFT
        except OSError as error:  # such as `> FILE`; run_command has handled those of other files
            if error.errno not in NO_SPACE:
                raise
            discard_output()
            print(f"error: the output cannot be written: {error.strerror}", file=sys.stderr)
            return FAILED

    return run


def run_command(
    work: Callable[[], None],
    errors: tuple[type[Exception], ...],
    output: str,
    kept: Callable[[], str] = lambda: "",
) -> int:
    """Run `work` and return the exit status: 0, 1 after an error, 130 after Ctrl-C.

    Args:
        errors: the types whose message is enough for the user; other errors keep their traceback.
        output: path to name for an OSError that names no file.
        kept: returns the end of the message that says what a later run can resume from, or "".
    """
    try:
        work()
    except errors as error:
        print(f"error: {error}", file=sys.stderr)
        return FAILED
    except BrokenPipeError:
        raise  # `command` handles it
    except OSError as error:
        print(f"error: {error.filename or output}: {error.strerror or error}{kept()}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print(f"interrupted{kept() or '; nothing was written'}", file=sys.stderr)
        return INTERRUPTED
    return DONE
