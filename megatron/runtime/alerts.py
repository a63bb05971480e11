"""Alerts of a run: JSON objects for a command's stdin or a webhook, each delivered by a process of its own.

That process is killed after a limit, so that neither a name server nor a webhook that hangs holds anything up. Run as a
program, this file posts to a webhook; it imports Python's library alone.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import queue
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any, NamedTuple
from urllib.error import HTTPError, URLError
from urllib.parse import SplitResult, unquote, urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

ABORT, STALL, SPIKE, SAVE, WRONG, LINK = "abort", "stall", "spike", "save", "wrong", "link"
"""Events: the run has ended by an error; it made no progress; a bad step; saves fail; a rank computes wrongly; a slow
link."""
APART_S = 300.0
"""Least time between two alerts of one event, but for the end of the run. Those between are counted."""
MOST_WAITING = 16
TIMEOUT_S = 5.0
"""Time for one try."""
TRIES, PAUSE_S = 2, 1.0
LAST_WAIT_S = 2 * TIMEOUT_S + 2 * PAUSE_S
"""Longest wait at the end of a run for what has not been delivered."""
LONGEST_TEXT = 2000

_ACCOUNT = re.compile(r"(?<=://)[^/@\s]+@")
_QUERY = re.compile(r"(://[^\s?]+)\?[^\s'\")]+")
"""Query of an address: signed ones carry a key there."""
_SECRET_NAME = re.compile(r"SECRET|TOKEN(?!IZ)|PASSW|API_?KEY|ACCESS_KEY|CREDENTIAL|WEBHOOK", re.IGNORECASE)
SHORTEST_SECRET = 6


# ---------------------------------------------------------------------------------------------------------------------
# Targets


class Target(NamedTuple):
    """A process that delivers an alert: its command, and how it gets the alert on stdin."""

    name: str
    """In messages, without what may be secret."""
    command: list[str]
    url: str | None = None
    """Address of a webhook, whose process gets it with the alert: everybody may read a command line."""


def command_target(text: str) -> Target:
    """Return a command, which is run without a shell. Raises ValueError that states the rule."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ValueError(f"cannot be split into words ({error}); write it as in a shell") from None
    if not words or shutil.which(words[0]) is None:
        program = words[0] if words else ""
        raise ValueError(f"starts no program: {program!r} is not there or not executable on this host; correct it")
    return Target(f"command {Path(words[0]).name}", words)


def webhook_target(text: str) -> Target:
    """Return the webhook at an address, or at the one that a file holds. Raises ValueError, without the address."""
    url, source = text, "the address"
    if "://" not in text:
        try:
            url, source = Path(text).read_text(encoding="utf-8").strip(), f"the address in {text}"
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "not text"
            raise ValueError(f"{text} cannot be read ({why}); give http(s)://..., or a file that holds it") from None
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise ValueError(f"{source} is none; give http(s)://HOST/PATH") from None
    if parts.scheme not in ("http", "https") or not parts.hostname or re.search(r"\s", url):
        raise ValueError(f"{source} is not http(s)://HOST/PATH; correct it")
    secret = _secret_part(parts)
    if "://" in text and secret is not None:
        raise ValueError(f"holds {secret}, which the run would store; write the address into a file, and give that")
    name = f"webhook {parts.scheme}://{parts.hostname}{f':{port}' if port else ''}"
    # isolated: no variable and no folder of the user's adds modules to it
    return Target(name, [sys.executable, "-I", __file__], url)


def _secret_part(parts: SplitResult) -> str | None:
    if "@" in parts.netloc:
        return "an account"
    return "a query" if parts.query else None


def alert_faults(command: str | None, webhook: str | None) -> Iterator[str]:
    """Yield what is wrong with the targets, as this host sees them."""
    for option, text, target in (
        ("alert_command", command, command_target),
        ("alert_webhook", webhook, webhook_target),
    ):
        if text is None:
            continue
        try:
            target(text)
        except ValueError as why:
            # what an address holds may be secret
            shown = f"={text}" if "://" not in text else ""
            yield f"{option}{shown} {why}"


# ---------------------------------------------------------------------------------------------------------------------
# Sender


@dataclass(frozen=True)
class Alert:
    """An event of a run, without what all alerts have."""

    event: str
    message: str
    rank: int | None = None
    iteration: int | None = None
    status: int | None = None
    """Exit status of the run, where it has ended."""

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Alert:
        """Return the alert that a rank has sent."""
        return cls(str(values["event"]), str(values["message"]), values.get("rank"), values.get("iteration"))


class Alerts:
    """Delivers alerts, to each target from a thread. No call waits, but for `close`; no fault of a target is raised.

    `say` gets a line where a target fails, once until it works again.
    """

    def __init__(self, run: str, command: str | None, webhook: str | None, say: Callable[[str], None]) -> None:
        """Raises ValueError for a target that is none."""
        self._say = say
        targets = []
        if command is not None:
            targets.append(command_target(command))
        if webhook is not None:
            targets.append(webhook_target(webhook))
        urls = [target.url for target in targets if target.url is not None]
        self._deliveries = [_Delivery(target, run, urls, say) for target in targets]

    @contextlib.contextmanager
    def held(self) -> Iterator[set[int]]:
        """Start no process within; yield the sessions of those that deliver just now."""
        with contextlib.ExitStack() as stack:
            sessions = [stack.enter_context(delivery.held()) for delivery in self._deliveries]
            yield {session for session in sessions if session is not None}

    def send(self, alert: Alert) -> None:
        """Have an alert delivered, unless one of its event was a short time ago."""
        for delivery in self._deliveries:
            delivery.send(alert)

    def close(self) -> None:
        """Wait until everything is delivered, LAST_WAIT_S at most."""
        deadline_s = time.monotonic() + LAST_WAIT_S
        for delivery in self._deliveries:
            delivery.end()
        late = [delivery for delivery in self._deliveries if not delivery.has_ended(deadline_s)]
        if late:
            names = " and ".join(delivery.target.name for delivery in late)
            self._say(f"alerts: not all were delivered to {names} before the end")
        for delivery in late:
            delivery.kill()


class _Delivery:
    """Delivers to one target, which may hang: the others have threads of their own."""

    def __init__(self, target: Target, run: str, urls: Sequence[str], say: Callable[[str], None]) -> None:
        """`urls`: addresses that no message may hold."""
        self.target = target
        self._run, self._urls, self._say = run, urls, say
        self._waiting: queue.Queue[bytes | None] = queue.Queue(MOST_WAITING)
        self._sent_s: dict[str, float] = {}
        self._left_out: Counter[str] = Counter()
        self._is_failing = False
        self._process: subprocess.Popen[bytes] | None = None
        self._starting = threading.Lock()
        self._thread = threading.Thread(target=self._deliver_all, name=f"alerts to {target.name}", daemon=True)
        self._thread.start()

    @contextlib.contextmanager
    def held(self) -> Iterator[int | None]:
        """Start no process within; yield the session of the one that delivers just now, if one does."""
        with self._starting:
            process = self._process
            yield None if process is None else process.pid

    def send(self, alert: Alert) -> None:
        now_s, ends = time.monotonic(), alert.status is not None
        if not ends and now_s - self._sent_s.get(alert.event, -APART_S) < APART_S:
            self._left_out[alert.event] += 1
            return
        if self._waiting.full():  # one thread puts, so that it stays as it is until the next line
            self._left_out[alert.event] += 1
            return
        self._waiting.put_nowait(self._content(alert))
        self._sent_s[alert.event] = now_s
        self._left_out[alert.event] = 0

    def end(self) -> None:
        """Have the thread end once everything is delivered."""
        with contextlib.suppress(queue.Full):
            self._waiting.put_nowait(None)

    def has_ended(self, deadline_s: float) -> bool:
        """Return whether the thread has ended by then."""
        self._thread.join(max(0.0, deadline_s - time.monotonic()))
        return not self._thread.is_alive()

    def kill(self) -> None:
        """Kill the process that delivers just now, and all of its session."""
        process = self._process
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(1.0)

    def _content(self, alert: Alert) -> bytes:
        host, message = socket.gethostname(), shortened(without_addresses(alert.message, self._urls))
        values = {
            "event": alert.event,
            "run": self._run,
            "host": host,
            "rank": alert.rank,
            "iteration": alert.iteration,
            "status": alert.status,
            "message": message,
            # the one that chat services show
            "text": f"{self._run} on {host}: {alert.event}: {message}",
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "left_out": self._left_out[alert.event],
        }
        return json.dumps(values).encode() + b"\n"

    # The thread

    def _deliver_all(self) -> None:
        while (content := self._waiting.get()) is not None:
            self._deliver(content)

    def _deliver(self, content: bytes) -> None:
        fault = self._try(content)
        for _ in range(TRIES - 1):
            if not fault:
                break
            time.sleep(PAUSE_S)
            fault = self._try(content)
        if fault and not self._is_failing:
            self._say(f"alerts: {self.target.name} {fault}; the run goes on without, later alerts are tried again")
        self._is_failing = bool(fault)

    def _try(self, content: bytes) -> str:
        """Deliver once; return why that failed, or nothing."""
        target, stdout = self.target, subprocess.DEVNULL
        if target.url is not None:
            content = json.dumps({"url": target.url, "content": content.decode()}).encode()
            stdout = subprocess.PIPE
        environment = {name: value for name, value in os.environ.items() if name != "MEGATRON_RUN_SECRET"}
        try:
            with self._starting:
                self._process = subprocess.Popen(
                    target.command,
                    stdin=subprocess.PIPE,
                    stdout=stdout,
                    stderr=subprocess.DEVNULL,
                    env=environment,
                    start_new_session=True,
                )
            said, _ = self._process.communicate(content, timeout=TIMEOUT_S)
            status = self._process.returncode
        except subprocess.TimeoutExpired:
            self.kill()
            return f"does not end within {TIMEOUT_S:g} s"
        except OSError as error:
            return f"cannot be started ({error.strerror})"
        finally:
            self._process = None
        if said:
            return said.decode(errors="replace").strip()
        return f"ended with status {status}" if status else ""


def without_secrets(text: str) -> str:
    """Return a text without accounts and queries of addresses, and without the values of secret variables."""
    text = _QUERY.sub(r"\1?[removed]", _ACCOUNT.sub("", text))
    for name, value in os.environ.items():
        if _SECRET_NAME.search(name) and len(value) >= SHORTEST_SECRET:
            text = text.replace(value, "[removed]")
    return text


def shortened(text: str) -> str:
    """Return a text without secrets, cut where it is too long."""
    text = without_secrets(text)
    if len(text) <= LONGEST_TEXT:
        return text
    # between words: what is to be removed later, as an address that the agent alone knows, is found as a whole only
    end = max(text.rfind(space, 0, LONGEST_TEXT + 1) for space in " \n")
    return text[: end if end > 0 else LONGEST_TEXT]


def without_addresses(text: str, urls: Sequence[str]) -> str:
    """Return a text without these addresses, and without their paths, which are the secret of chat services."""
    for url in urls:
        parts = urlsplit(url)
        path = url.partition(parts.netloc)[2]
        for secret in (url, f"{parts.netloc}{path}", path, parts.path):
            if len(secret) >= SHORTEST_SECRET:
                text = text.replace(secret, "[removed]")
    return text


# ---------------------------------------------------------------------------------------------------------------------
# Process that posts to a webhook


class _NoRedirects(HTTPRedirectHandler):
    """Follows none: the content would go to an address that the user has not given, by another scheme too."""

    def redirect_request(self, *arguments: Any, **named: Any) -> None:
        return None


def post(url: str, content: str) -> str:
    """Post JSON; return why that failed, without the address, or nothing."""
    parts = urlsplit(url)
    headers = {"Content-Type": "application/json", "User-Agent": "megatron-3d"}
    if parts.username is not None:
        account = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        headers["Authorization"] = f"Basic {base64.b64encode(account.encode()).decode()}"
    address = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
    try:
        request = Request(address, content.encode(), headers, method="POST")
        with build_opener(_NoRedirects).open(request, timeout=TIMEOUT_S):
            return ""
    except HTTPError as error:
        if 300 <= error.code < 400:
            return f"redirects ({error.code}), which is not followed; give the address where it leads"
        return f"answers {error.code}"
    except URLError as error:
        return f"cannot be reached ({error.reason})"
    except (OSError, HTTPException, ValueError) as error:
        return f"gives no answer ({type(error).__name__})"


def main() -> int:
    """Post what stdin holds, and print why that failed; return the exit status."""
    given = json.loads(sys.stdin.buffer.read())
    fault = post(given["url"], given["content"])
    sys.stdout.write(fault)
    return 1 if fault else 0


if __name__ == "__main__":
    sys.exit(main())
