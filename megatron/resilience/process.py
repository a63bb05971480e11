"""End of a rank's process: the message of an error, the exit status, and how it leaves; or stays for another round."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import NoReturn

from megatron.options.config import ConfigError
from megatron.runtime.commands import DONE, REFUSED, for_stderr
from megatron.runtime.files import READER_LEFT, discard_output
from megatron.runtime.first_steps import defer_backends, raise_at_interrupt
from megatron.runtime.network import Ends, adopt_mpi_variables, break_connections, is_first_rank, rank_connections

INTERRUPTED = 130
THREADS_S = 2.0
"""Time for the threads of a round to end, once this rank has left it."""


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
        print_once(str(error))
        return REFUSED
    except BrokenPipeError:
        discard_output()
        return READER_LEFT
    except KeyboardInterrupt:
        print_once("interrupted")
        return INTERRUPTED
    except Exception as error:
        from megatron.resilience import errors

        if isinstance(error, OSError) and not isinstance(error, errors.OtherRankFailed):
            print_error(errors.message_of(error))  # the disk of one node may fail alone
        elif isinstance(error, errors.USER_FAULTS):
            print_once(errors.message_of(error))
        elif errors.is_lost_peer(error):
            print_once("another rank has ended, and this one with it")
        else:
            print_error(traceback.format_exc().rstrip())
        return errors.exit_status(error)
    return DONE


def print_once(text: str) -> None:
    """Print on stderr, by the first rank, what every rank has to say alike."""
    if is_first_rank():
        print_error(text)


def print_error(text: str) -> None:
    """Print on stderr. On a full disk nothing is printed, and the exit status remains."""
    if text:
        with contextlib.suppress(OSError):
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


# ---------------------------------------------------------------------------------------------------------------------
# A process that stays where another rank has ended


@dataclass(frozen=True)
class ProcessState:
    """Threads and connections of the process before a round."""

    threads: Collection[threading.Thread]
    connections: Collection[Ends]

    @classmethod
    def now(cls) -> ProcessState:
        return cls(set(threading.enumerate()), set(rank_connections()))

    def restore(self, leave_groups: Callable[[], None]) -> bool:
        """Leave the process groups of the round, and wait until its threads have ended.

        Return whether they have, so that this process may have another round; print why it does not. Other ranks that
        wait for this one notice it at once.
        """
        remains = f"rank {os.environ['RANK']} does not stay"
        try:
            # gloo has no call that ends a wait, and keeps its connections as long as an engine knows a group
            break_connections(number for ends, number in rank_connections().items() if ends not in self.connections)
            leave_groups()
        except Exception as error:  # the fault that has ended the round remains the one to report
            print_error(f"{remains}: {type(error).__name__}: {error}")
            return False
        deadline_s = time.monotonic() + THREADS_S
        for thread in self._further():
            thread.join(max(0.0, deadline_s - time.monotonic()))
        # a copy or a save that goes on would write into those of the next round
        left = [thread.name for thread in self._further()]
        if left:
            print_error(f"{remains}: still at work are {', '.join(left)}")
        return not left

    def _further(self) -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread not in self.threads]
