"""Run the work of a command, and turn its errors into a message and an exit status."""

from __future__ import annotations

import argparse
import errno
import functools
import io
import math
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

from megatron.runtime.commands import DONE, FAILED, UserError, command_name, for_stderr
from megatron.runtime.files import READER_LEFT, discard_output
from megatron.runtime.first_steps import defer_backends

if TYPE_CHECKING:
    from tqdm import tqdm

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Stopped(KeyboardInterrupt):
    """A signal has ended the command. As after Ctrl-C, what was begun is removed on the way out."""

    def __init__(self, signum: int) -> None:
        super().__init__()
        self.signum = signum


def command_parser(tool: str, description: str, **more: Any) -> argparse.ArgumentParser:
    """Return a parser of the flags of megatron/cli/`tool`.py, by their whole names; `more`: further arguments."""
    return argparse.ArgumentParser(command_name(tool), description=description, allow_abbrev=False, **more)


UNITS = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3))


def byte_size(num_bytes: int) -> str:
    for unit, scale in UNITS:
        if num_bytes >= scale:
            return f"{num_bytes / scale:.2f} {unit}"
    return f"{num_bytes} bytes"


def progress_bar(title: str, total: int, unit: str = "B") -> tqdm[Any]:
    """Return a bar on stderr, which is shown on a terminal alone and removed when it ends."""
    from tqdm import tqdm  # late: most commands show none

    return tqdm(total=total, unit=unit, unit_scale=True, desc=title, leave=False, disable=None)


def jsonable(value: Any) -> Any:
    """Replace the numbers that JSON cannot express by "nan" and "inf"."""
    if isinstance(value, Mapping):
        return {key: jsonable(each) for key, each in value.items()}
    if isinstance(value, list):
        return [jsonable(each) for each in value]
    # json.dumps would write NaN, which other readers of JSON refuse
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


Main = Callable[[Sequence[str] | None], int]


def command(main: Main) -> Callable[..., int]:
    """Decorate the main function of a command: it ends without a traceback after Ctrl-C, SIGTERM or SIGHUP, and where
    its output cannot be written.

    Its reader has left, as `| head` does, or the disk is full. Letters that stdout's encoding lacks are escaped.
    """

    @functools.wraps(main)
    def run(argv: Sequence[str] | None = None) -> int:
        # a test's or a notebook's stdout may be of another kind
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")  # as stderr's; a path may have any letter
        if argv is None:  # a process of its own, which computes on the CPU; ranks load their device's themselves
            defer_backends()
            _raise_at_signals()
        try:
            try:
                return main(argv)
            finally:
                sys.stdout.flush()  # here, where it can be caught; --help ends by SystemExit
        except KeyboardInterrupt as stop:
            print("interrupted", file=sys.stderr)
            return interrupted(stop)
        except BrokenPipeError:
            discard_output()
            return READER_LEFT
        except OSError as error:  # such as `> FILE`; run_command has handled those of other files
            # another error of the output is unexpected, and keeps its traceback
            if error.errno not in NO_SPACE:
                raise
            discard_output()
            print(f"error: the output cannot be written: {error.strerror}", file=sys.stderr)
            return FAILED

    return run


def interrupted(stop: KeyboardInterrupt) -> int:
    """Return the exit status after a signal, as shells write it: 130 after Ctrl-C, 143 after SIGTERM."""
    return 128 + (stop.signum if isinstance(stop, Stopped) else signal.SIGINT)


def _raise_at_signals() -> None:
    """Raise Stopped in this process at the first signal that would end it at once; in its forks they still do.

    Further ones are ignored, since they would stop the removal of what was begun.
    """
    process = os.getpid()

    def stop(signum: int, _: FrameType | None) -> None:
        if os.getpid() == process:
            # a second signal must not stop the removal
            for taken in taken_over:
                signal.signal(taken, signal.SIG_IGN)
            raise Stopped(signum)
        # in a fork, such as a worker: the default ends it at once
        signal.signal(signum, signal.SIG_DFL)
        signal.raise_signal(signum)

    at_once = (signal.SIG_DFL, signal.default_int_handler)
    taken_over = [signum for signum in STOPPING if signal.getsignal(signum) in at_once]  # nohup ignores SIGHUP
    for signum in taken_over:
        signal.signal(signum, stop)


def run_command(
    work: Callable[[], None],
    output: str,
    kept: Callable[[], str] = lambda: "",
) -> int:
    """Run `work` and return the exit status: 0, 1 after an error, 130 after Ctrl-C, 143 after SIGTERM.

    Args:
        output: path to name for an OSError that names no file.
        kept: returns the end of the message that says what a later run can resume from, or "".
    """
    try:
        work()
    except UserError as error:  # others keep their traceback
        print(for_stderr(f"error: {error}"), file=sys.stderr)
        return FAILED
    except BrokenPipeError:
        raise  # `command` handles it
    except OSError as error:
        print(f"error: {error.filename or output}: {error.strerror or error}{kept()}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt as stop:
        print(f"interrupted{kept() or '; nothing was written'}", file=sys.stderr)
        return interrupted(stop)
    return DONE
