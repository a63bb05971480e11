"""Alerts: what a command and a webhook get, what never leaves, and that no target holds a run up."""

from __future__ import annotations

import base64
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from megatron.runtime import alerts
from megatron.runtime.alerts import ABORT, SAVE, SPIKE, Alert, Alerts, alert_faults, shortened, without_secrets
from megatron.runtime.messages import SECRET
from tests.ranks import HANG_S, free_port

KEYS = {"event", "run", "host", "rank", "iteration", "status", "message", "text", "time", "left_out"}


class Hook(BaseHTTPRequestHandler):
    """Webhook that answers as its server says."""

    def do_POST(self) -> None:
        server: Any = self.server
        content = self.rfile.read(int(self.headers["Content-Length"]))
        server.requests.append((self.path, dict(self.headers), content))
        if server.status is None:
            server.release.wait(30)
            return
        self.send_response(server.status)
        if 300 <= server.status < 400:
            self.send_header("Location", server.leads_to)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_GET = do_POST

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def hook() -> Iterator[Any]:
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), Hook)
    server.daemon_threads = True
    server.requests, server.status, server.release, server.leads_to = [], 200, threading.Event(), ""
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield server
    server.release.set()
    server.shutdown()
    server.server_close()


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alerts, "PAUSE_S", 0.01)
    # those that test a limit set it: a busy machine takes seconds to start a process
    monkeypatch.setattr(alerts, "TIMEOUT_S", HANG_S)
    monkeypatch.setattr(alerts, "LAST_WAIT_S", HANG_S)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)


def recorder(tmp_path: Path) -> tuple[str, Path]:
    """Return a command that appends what it gets, its words and its environment's names to a file."""
    script, file = tmp_path / "record.py", tmp_path / "got.jsonl"
    script.write_text(
        "import json, os, sys\n"
        "row = {'stdin': json.load(sys.stdin), 'words': sys.argv[2:], 'names': list(os.environ)}\n"
        "open(sys.argv[1], 'a').write(json.dumps(row) + '\\n')\n"
    )
    return f"{sys.executable} -S {script} {file}", file


def wait_for(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def runs(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except OSError:
        return False


def rows(file: Path) -> list[Any]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_a_command_gets_json_and_no_shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command, file = recorder(tmp_path)
    monkeypatch.setenv(SECRET, "the secret of the run's agents")
    said: list[str] = []
    sender = Alerts("run7", f"{command} '; touch {tmp_path}/never' $HOME *", None, said.append)
    sender.send(Alert(ABORT, "rank 3 was killed by SIGKILL", 3, 120, status=137))
    sender.close()
    (row,) = rows(file)
    assert set(row["stdin"]) == KEYS
    expected = {
        "event": "abort",
        "run": "run7",
        "host": socket.gethostname(),
        "rank": 3,
        "iteration": 120,
        "status": 137,
    }
    assert expected.items() <= row["stdin"].items()
    assert row["stdin"]["text"] == f"run7 on {socket.gethostname()}: abort: rank 3 was killed by SIGKILL"
    assert row["words"] == [f"; touch {tmp_path}/never", "$HOME", "*"]
    assert SECRET not in row["names"]
    assert said == []


def test_a_webhook_gets_the_same_and_its_account_only_in_the_header(hook: Any, tmp_path: Path) -> None:
    port, said = hook.server_address[1], list[str]()
    (tmp_path / "hook").write_text(f"http://user:p%40ss@127.0.0.1:{port}/services/T0/key?x=1\n")
    sender = Alerts("run7", None, str(tmp_path / "hook"), said.append)
    sender.send(Alert(SPIKE, "loss 9.1", 0, 5))
    sender.close()
    ((path, headers, content),) = hook.requests
    assert path == "/services/T0/key?x=1"
    assert headers["Host"] == f"127.0.0.1:{port}"
    assert headers["Authorization"] == f"Basic {base64.b64encode(b'user:p@ss').decode()}"
    assert set(json.loads(content)) == KEYS
    assert said == []


@pytest.mark.parametrize(
    ("status", "fault"),
    [
        (500, "answers 500"),
        (302, "redirects (302), which is not followed"),
        (307, "redirects (307), which is not followed"),
    ],
)
def test_a_webhook_that_fails_is_named_once(hook: Any, tmp_path: Path, status: int, fault: str) -> None:
    hook.status, port = status, hook.server_address[1]
    # to another path here, by which a followed one would show; a file would be read by what follows any scheme
    hook.leads_to = f"http://127.0.0.1:{port}/elsewhere" if status == 302 else (tmp_path / "hook").as_uri()
    (tmp_path / "hook").write_text(f"http://user:secretword@127.0.0.1:{port}/services/hidden")
    said: list[str] = []
    sender = Alerts("run7", None, str(tmp_path / "hook"), said.append)
    sender.send(Alert(SAVE, "disk full"))
    sender.send(Alert(ABORT, "ended", status=1))
    sender.close()
    (line,) = said
    assert f"webhook http://127.0.0.1:{port} {fault}" in line
    assert "hidden" not in line
    assert "secretword" not in line
    assert [path for path, _, _ in hook.requests] == ["/services/hidden"] * 4


def test_a_webhook_that_hangs_is_named_and_holds_nothing_up(hook: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alerts, "TIMEOUT_S", 1.0)
    hook.status, said = None, list[str]()
    sender = Alerts("run7", None, f"http://127.0.0.1:{hook.server_address[1]}/", said.append)
    sender.send(Alert(ABORT, "ended", status=1))
    assert said == [], "the call has waited for the target"
    sender.close()
    (line,) = said
    assert "does not end within 1 s" in line


def test_a_webhook_that_is_not_there_is_named_and_a_command_beside_it_works(tmp_path: Path) -> None:
    command, file = recorder(tmp_path)
    said: list[str] = []
    sender = Alerts("run7", command, f"http://127.0.0.1:{free_port()}/", said.append)
    sender.send(Alert(ABORT, "ended", status=1))
    sender.close()
    assert len(rows(file)) == 1
    (line,) = said
    assert "cannot be reached ([Errno 111] Connection refused)" in line


def test_a_webhook_that_works_again_is_named_again_when_it_fails(hook: Any) -> None:
    said: list[str] = []
    sender = Alerts("run7", None, f"http://127.0.0.1:{hook.server_address[1]}/", said.append)
    (delivery,) = sender._deliveries
    for status in (500, 500, 200, 500):
        hook.status = status
        delivery._deliver(b"{}")
    sender.close()
    assert len(said) == 2


def test_a_command_that_hangs_or_fails_is_named_and_killed_with_what_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pids = tmp_path / "pids"
    pids.touch()
    begun: list[int] = []

    class Noted(subprocess.Popen[bytes]):
        """A command whose time begins once it has noted what it started: on a busy machine that may take long."""

        def communicate(self, input: bytes | None = None, timeout: float | None = None) -> tuple[bytes, bytes]:
            begun.append(self.pid)
            wait_for(lambda: len(pids.read_text().splitlines()) == len(begun))
            return super().communicate(input, timeout)

    said: list[str] = []
    with monkeypatch.context() as patched:
        patched.setattr(alerts, "TIMEOUT_S", 0.5)
        patched.setattr(subprocess, "Popen", Noted)
        sender = Alerts("run7", f"sh -c 'sleep 600 & echo $! >> {pids}; wait'", None, said.append)
        sender.send(Alert(ABORT, "ended", status=1))
        sender.close()
    assert len(begun) == alerts.TRIES
    # killed, they may run for a moment more
    wait_for(lambda: not any(map(runs, pids.read_text().split())))
    failing = Alerts("run7", "sh -c 'exit 3'", None, said.append)
    failing.send(Alert(ABORT, "ended", status=1))
    failing.close()
    assert ["does not end within 0.5 s" in said[0], "ended with status 3" in said[1], len(said)] == [True, True, 2]


def test_alerts_of_one_event_keep_apart_but_for_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command, file = recorder(tmp_path)
    sender = Alerts("run7", command, None, print)
    for number in range(50):
        sender.send(Alert(SPIKE, f"spike {number}"))
    sender.send(Alert(SAVE, "another event"))
    sender.send(Alert(ABORT, "the end", status=3))
    monkeypatch.setattr(alerts, "APART_S", 0.0)
    sender.send(Alert(SPIKE, "later"))
    sender.close()
    got = [(row["stdin"]["message"], row["stdin"]["left_out"]) for row in rows(file)]
    assert got == [("spike 0", 0), ("another event", 0), ("the end", 0), ("later", 49)]


def test_a_target_that_hangs_fills_a_bounded_queue_and_delays_no_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alerts, "TIMEOUT_S", 60.0)
    monkeypatch.setattr(alerts, "LAST_WAIT_S", 0.3)
    said: list[str] = []
    sender = Alerts("run7", "sleep 600", None, said.append)
    began_s = time.monotonic()
    for _ in range(1000):
        sender.send(Alert(ABORT, "x" * 10_000, status=1))
    assert said == [], "a call has waited for the target"
    sender.close()
    assert time.monotonic() - began_s < alerts.TIMEOUT_S
    assert said == ["alerts: not all were delivered to command sleep before the end"]


def test_a_command_that_hangs_keeps_no_webhook_from_the_end(hook: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alerts, "LAST_WAIT_S", 1.0)
    said: list[str] = []
    sender = Alerts("run7", "sleep 600", f"http://127.0.0.1:{hook.server_address[1]}/", said.append)
    sender.send(Alert(SPIKE, "loss 9.1"))
    sender.send(Alert(ABORT, "ended", status=1))
    wait_for(lambda: len(hook.requests) == 2)
    began_s = time.monotonic()
    sender.close()
    assert time.monotonic() - began_s < 3.0, "one deadline"
    assert [json.loads(content)["event"] for _, _, content in hook.requests] == [SPIKE, ABORT]
    assert said == ["alerts: not all were delivered to command sleep before the end"]


def test_the_address_of_the_webhook_is_in_no_message(hook: Any, tmp_path: Path) -> None:
    command, file = recorder(tmp_path)
    address = f"http://127.0.0.1:{hook.server_address[1]}/services/T0/hidden"
    (tmp_path / "hook").write_text(address)
    sender = Alerts("run7", command, str(tmp_path / "hook"), print)
    sender.send(Alert(ABORT, f"cannot post to {address}: no answer, url: /services/T0/hidden", status=1))
    sender.close()
    for got in (rows(file)[0]["stdin"], json.loads(hook.requests[0][2])):
        assert got["message"] == "cannot post to [removed]: no answer, url: [removed]"
        assert "hidden" not in got["text"]


def test_a_text_is_cut_behind_what_is_removed_and_between_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefgh")
    filler = "x " * (alerts.LONGEST_TEXT // 2 - 3)
    for secret in ("hf_abcdefgh", "s3://me:password@host/path"):
        text = shortened(f"{filler}{secret} and more")
        assert len(text) <= alerts.LONGEST_TEXT
        assert set(text.removesuffix("[removed]")) == {"x", " "}


def test_no_delivery_begins_while_an_agent_ends_processes(tmp_path: Path) -> None:
    sender = Alerts("run7", f"tee {tmp_path}/got", None, print)
    with sender.held() as sessions:
        assert sessions == set()
        sender.send(Alert(ABORT, "ended", status=1))
        time.sleep(0.3)
        assert not (tmp_path / "got").exists()
    sender.close()
    assert (tmp_path / "got").exists()


def test_no_secret_is_in_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefgh")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "tokenizers off")
    text = "cannot read s3://me:pw@host/a?X-Amz-Signature=f00 with hf_abcdefgh, tokenizers off"
    assert without_secrets(text) == "cannot read s3://host/a?[removed] with [removed], tokenizers off"


@pytest.mark.parametrize(
    ("command", "webhook", "fault"),
    [
        ("no-such-program --flag", None, "alert_command=no-such-program --flag starts no program"),
        ("sh 'open", None, "alert_command=sh 'open cannot be split into words (No closing quotation)"),
        ("", None, "alert_command= starts no program"),
        (None, "file:///etc/passwd", "alert_webhook the address is not http(s)://HOST/PATH; correct it"),
        (None, "http://", "alert_webhook the address is not http(s)://HOST/PATH; correct it"),
        (None, "http://host:port/", "alert_webhook the address is none; give http(s)://HOST/PATH"),
        (None, "https://user:hidden@host/", "alert_webhook holds an account, which the run would store"),
        (None, "https://host/path?sig=hidden", "alert_webhook holds a query, which the run would store; write the"),
        (None, "no/such/file", "alert_webhook=no/such/file no/such/file cannot be read"),
    ],
)
def test_a_target_that_is_none_is_refused(command: str | None, webhook: str | None, fault: str) -> None:
    (line,) = alert_faults(command, webhook)
    assert line.startswith(fault)
    assert "hidden" not in line


def test_a_file_of_another_scheme_is_refused_without_its_content(tmp_path: Path) -> None:
    (tmp_path / "hook").write_text("ftp://user:hidden@host/")
    (line,) = alert_faults(None, str(tmp_path / "hook"))
    assert "is not http(s)://HOST/PATH" in line
    assert "hidden" not in line
    assert list(alert_faults("true", "https://host/path")) == []
