"""Messages of agents to the launcher in the stderr of pdsh or mpirun: when they take signals, and how they ended."""

from __future__ import annotations

import os
import re
import socket
import sys

_MARK = "\x1e"
_OF_PDSH = re.compile(rb"\S+: ")
"""Prefix that pdsh writes before each line of a host."""
_MESSAGE = re.compile(rb"\x1eagent (\S+) (ready|ended (\d+))\n?")


def announce(text: str) -> None:
    """Write a message in one piece. `text`: ready, or ended STATUS."""
    sys.stderr.flush()
    os.write(sys.stderr.fileno(), f"{_MARK}agent {socket.gethostname()} {text}\n".encode())


def without_messages(line: bytes) -> tuple[bytes, list[tuple[str, int | None]]]:
    """Return a line without the messages in it, and host and status of each; None: it is ready."""
    found = [(match[1].decode(), None if match[3] is None else int(match[3])) for match in _MESSAGE.finditer(line)]
    rest = _MESSAGE.sub(b"", line)
    return b"" if found and _OF_PDSH.fullmatch(rest) else rest, found
