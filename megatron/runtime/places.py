"""Places of a rank: its environment of each round, by a pipe from its agent, with the descriptors that go with it.

A rank that its agent may keep has the pipe for good. Where another rank ends, this one leaves its round, says so by its
link, and waits here for its place in the next one.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any

from megatron.runtime.agent_link import AGENT_SOCKET
from megatron.runtime.network import STORE_SOCKET

PIPE = "MEGATRON_PLACES_PIPE"
"""Variable of a rank that its agent may keep: the number of the pipe's descriptor."""
NOTICE_S = 10.0
"""Time for another rank to end by its error, and the agent to see it. Else the network has failed between them."""
BEAT_S = 0.2
WAIT, END = "wait", "end"
"""Messages to a rank that has left its round: a place comes, however late; none comes."""


def give_place(pipe: Connection, environment: Mapping[str, str], store: socket.socket | None, *, keeps: bool) -> int:
    """Give a rank its place, and rank 0 the socket on which it serves the store. Returns the descriptor of the link.

    `keeps`: the rank may have further places, so the link is none of the pipe's. Raises OSError.
    """
    pipe.send(dict(environment))
    if store is not None:
        send_handle(pipe, store.fileno(), None)
    if not keeps:
        # a copy of the descriptor, since the pipe's owner closes its own
        return os.dup(pipe.fileno())
    ours, theirs = socket.socketpair()
    with theirs:
        send_handle(pipe, theirs.fileno(), None)
    return ours.detach()


def take_place(pipe: Connection, *, is_kept: bool) -> None:
    """Take the place that comes by the pipe. Raises EOFError where the agent has ended."""
    _set_place(pipe, pipe.recv(), is_kept=is_kept)


def _set_place(pipe: Connection, environment: Mapping[str, str], *, is_kept: bool) -> None:
    os.environ.update(environment)
    if os.environ["RANK"] == "0":
        os.environ[STORE_SOCKET] = str(recv_handle(pipe))
    os.environ[AGENT_SOCKET] = str(pipe.fileno())
    if is_kept:
        os.environ[AGENT_SOCKET] = str(recv_handle(pipe))
        os.environ[PIPE] = str(pipe.fileno())


class Places:
    """The rank's end of the pipe. Of a rank that its agent does not keep there is none, and no further place."""

    def __init__(self) -> None:
        self._pipe: Connection | None = None
        # popped, so that no process that the rank starts takes the descriptor for its own
        if (inherited := os.environ.pop(PIPE, None)) is not None:
            self._pipe = Connection(int(inherited))

    @property
    def may_come(self) -> bool:
        return self._pipe is not None

    def take_next(self, beat: Callable[[], None]) -> bool:
        """Wait for the next place and take it; return False where none comes. `beat` is called while this waits."""
        if self._pipe is None:
            return False
        message: Any = ""
        deadline_s = time.monotonic() + NOTICE_S
        with contextlib.suppress(EOFError, OSError):  # the agent has ended
            while not message or message == WAIT:
                beat()
                if self._pipe.poll(BEAT_S):
                    message = self._pipe.recv()
                elif not message and time.monotonic() > deadline_s:
                    return False
            if message != END:
                _set_place(self._pipe, message, is_kept=True)
                os.environ.pop(PIPE)
                return True
        return False
