"""Authenticated messages: JSON objects, each with an HMAC that is verified before it is parsed.

Over a connection both ends know the secret of the run. Each sends a nonce first; the key of the connection is derived
from the secret and both nonces, and each message has a number, so nothing recorded can be sent again. A message is its
size (4 bytes), its HMAC-SHA256, and JSON. Nothing is encrypted.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import secrets
import selectors
import socket
import struct
import time
from pathlib import Path
from typing import Any

NONCE_BYTES = 32
MAC_BYTES = hashlib.sha256().digest_size
SIZE = struct.Struct("!I")
LARGEST_BYTES = 16384
"""Size of a message. Those between agents are below 1,000 bytes."""
SEND_TIMEOUT_S = 5.0


class StrangerError(OSError):
    """The other end does not know the secret of this run, or is another program."""


def seal(key: bytes, purpose: bytes, message: dict[str, Any]) -> bytes:
    """Return a message with its HMAC in front. `purpose`: what this message is, so that it is not taken for another."""
    body = json.dumps(message).encode()
    return hmac.digest(key, purpose + b" " + body, "sha256") + body


def unseal(key: bytes, purpose: bytes, content: bytes, largest_bytes: int) -> dict[str, Any]:
    """Return the message that `seal` made with this key and purpose. Raises StrangerError for anything else."""
    mac, body = content[:MAC_BYTES], content[MAC_BYTES:]
    # compare_digest takes as long for any wrong MAC, so that its time gives away nothing
    if len(body) > largest_bytes or not hmac.compare_digest(mac, hmac.digest(key, purpose + b" " + body, "sha256")):
        raise StrangerError("the other end does not know the secret of this run")
    message: dict[str, Any] = json.loads(body)
    return message


class Connection:
    """One end of a connection, which sends and receives without waiting for the other."""

    def __init__(self, connected: socket.socket, secret: bytes, *, is_server: bool) -> None:
        """Send the nonce. Raises OSError."""
        self.socket, self._secret, self._is_server = connected, secret, is_server
        connected.setblocking(False)
        with contextlib.suppress(OSError):
            # messages are small, and must not wait for more; a socket that is not of TCP has no such option
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._key = b""
        self._received = bytearray()
        self._counts = [0, 0]  # sent, received
        self.is_known = False
        """The other end has proved that it knows the secret."""
        self._write(self._nonce)

    def send(self, **message: Any) -> None:
        """Send a message. It must not be called before `receive` has returned for the first time. Raises OSError."""
        content = seal(self._key, self._purpose(sends=True), message)
        self._write(SIZE.pack(len(content)) + content)
        self._counts[0] += 1

    @property
    def can_send(self) -> bool:
        """The nonce of the other end has come."""
        return bool(self._key)

    def receive(self) -> list[dict[str, Any]]:
        """Return the messages that have come. Raises StrangerError, EOFError at the end, and OSError."""
        with contextlib.suppress(BlockingIOError):
            content = self.socket.recv(65536)
            if not content:
                raise EOFError
            self._received += content
        if not self._key and len(self._received) >= NONCE_BYTES:
            theirs, self._received = bytes(self._received[:NONCE_BYTES]), self._received[NONCE_BYTES:]
            nonces = [theirs, self._nonce]
            if self._is_server:
                nonces.reverse()  # the server's comes first, at both ends
            # both nonces: what either end has recorded of another connection has another key
            self._key = hmac.digest(self._secret, b"megatron agents" + b"".join(nonces), "sha256")
        messages = []
        while self._key and len(self._received) >= SIZE.size:
            (size,) = SIZE.unpack_from(self._received)
            # read before the HMAC can be verified: a stranger must not have us wait for gigabytes
            if size > MAC_BYTES + LARGEST_BYTES:
                raise StrangerError(f"a message of {size} bytes")
            if len(self._received) < SIZE.size + size:
                break
            content = bytes(self._received[SIZE.size : SIZE.size + size])
            messages.append(unseal(self._key, self._purpose(sends=False), content, LARGEST_BYTES))
            self._counts[1] += 1
            self.is_known = True
            del self._received[: SIZE.size + size]
        return messages

    def close(self) -> None:
        self.socket.close()

    def _purpose(self, *, sends: bool) -> bytes:
        sender = b"server" if self._is_server == sends else b"client"
        sent, received = self._counts
        # who sends, and the message's number: neither can be sent back, repeated or left out
        return b"%b %d" % (sender, sent if sends else received)

    def _write(self, content: bytes) -> None:
        left, deadline_s = memoryview(content), time.monotonic() + SEND_TIMEOUT_S
        while left:
            try:
                # a socket takes what fits into its buffer
                left = left[self.socket.send(left) :]
            except BlockingIOError:
                with selectors.DefaultSelector() as selector:
                    selector.register(self.socket, selectors.EVENT_WRITE)
                    if not selector.select(deadline_s - time.monotonic()):
                        raise TimeoutError(f"the other end reads nothing for {SEND_TIMEOUT_S:g} s") from None


# ---------------------------------------------------------------------------------------------------------------------
# Secret of a run over several nodes, by which their agents authenticate each other (messages.py).

SECRET = "MEGATRON_RUN_SECRET"
"""Variable with the secret, equal on all nodes."""
SHORTEST_SECRET = 16
SECRET_TIMEOUT_S = 60
"""Time for the launcher to bring the secret to its hosts, which it does while their agents start."""
POLL_S = 0.05


class MissingSecretError(ValueError):
    """The nodes of a run have no secret in common."""


def run_secret() -> bytes:
    """Return the secret of this run. Raises MissingSecretError."""
    secret = os.environ.get(SECRET, "")
    if len(secret) < SHORTEST_SECRET:
        problem = f"has {len(secret)} characters" if secret else "is not set"
        raise MissingSecretError(
            f"{SECRET} {problem}; give all nodes of the run the same {SHORTEST_SECRET} characters or more, which no "
            "one else knows, such as those of `openssl rand -hex 32`"
        )
    return secret.encode()


def find_secret(file: str | None) -> None:
    """Set the variable from the file in the home folder in which the launcher puts the secret, and remove the file.

    A * in its name stands for anything: agents that do not know their numbers take one of the files each.
    Raises MissingSecretError if neither of them gives a secret.
    """
    if file is not None and SECRET not in os.environ:
        deadline_s = time.monotonic() + SECRET_TIMEOUT_S
        while (secret := _taken_secret(file)) is None:
            if time.monotonic() > deadline_s:
                path = Path.home() / file
                raise MissingSecretError(f"the launcher brought no secret of this run to {path} by ssh; start it again")
            time.sleep(POLL_S)
        os.environ[SECRET] = secret
    run_secret()


def _taken_secret(pattern: str) -> str | None:
    """Remove the first file of the home folder with such a name that is complete, and return its text."""
    for path in Path.home().glob(pattern):
        # ssh is still writing it
        if path.suffix == ".partial":
            continue
        with contextlib.suppress(FileNotFoundError):  # another agent has taken it, of those that share the folder
            secret = path.read_text().strip()
            # read once: the secret does not stay on the disk
            path.unlink()
            return secret
    return None
