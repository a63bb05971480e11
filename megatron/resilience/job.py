"""The job that this rank belongs to: the agent that started it, through all restarts, and the command that was typed.

A rank without an agent is a job by itself.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time

BEGAN = "MEGATRON_JOB_BEGAN_S"
"""Variable with the start of the agent, before any restart, on the host's monotonic clock."""
COMMAND = "MEGATRON_JOB_COMMAND"
"""Variable with the command that started the agent, a JSON list: a forked rank has that of its fork server."""
COPIES = "MEGATRON_PEER_COPIES"
"""Variable with the folder in the agent's memory, in which ranks keep copies of their state (peer_copies.py)."""
NO_MEMORY = ""
"""Its value where the agent restarts ranks, but could make no such folder."""
RESTARTS = "TORCHELASTIC_RESTART_COUNT"
"""Variable with the number of restarts by the agent so far, as torchrun calls it."""


def began_s() -> float:
    """Return when the job began, by time.monotonic()."""
    began = os.environ.get(BEGAN)
    if began is None:
        return time.monotonic() - process_age_s()
    return float(began)


def identity() -> str | None:
    """Return a name that no other job has; None without an agent."""
    began = os.environ.get(BEGAN)
    if began is None:
        return None
    # monotonic clocks count from a host's own start: two hosts may have the same number
    return f"{socket.gethostname()} {began}"


def is_launched() -> bool:
    """Return True if the launcher has started this rank, and has printed what it knows of the options."""
    return COMMAND in os.environ


def has_restarts() -> bool:
    """Return True if the agent of this rank restarts ranks."""
    return COPIES in os.environ


def restarts() -> int:
    """Return the number of restarts of this job so far."""
    return int(os.environ.get(RESTARTS, "0"))


def command() -> list[str]:
    """Return the words of the command that started the job."""
    typed: list[str] = json.loads(os.environ.get(COMMAND, "null")) or sys.orig_argv
    return typed


def process_age_s() -> float:
    """Return the seconds since this process began."""
    import psutil

    created_s: float = psutil.Process().create_time()
    return time.time() - created_s
