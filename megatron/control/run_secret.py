"""Secret of a run over several nodes, by which their agents authenticate each other (messages.py)."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

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
        if path.suffix == ".partial":
            continue
        with contextlib.suppress(FileNotFoundError):  # another agent has taken it, of those that share the folder
            secret = path.read_text().strip()
            path.unlink()
            return secret
    return None
