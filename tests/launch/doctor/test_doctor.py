"""megatron-doctor on agents of this machine: planted faults are named, hostile answers too, a clean fleet is not.

Each of its "hosts" is a loopback address with an agent of its own. tests/launch/doctor/test_doctor_hosts.py has ssh.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from megatron.cli.doctor import main
from megatron.cli.launch import main as launch_main
from megatron.launch.doctor import examination, links, rules
from megatron.launch.doctor.agent import TaskError, run_programs
from megatron.launch.doctor.examination import Examination, Examined, Extent, Wanted
from megatron.launch.doctor.fleet import Fleet
from megatron.launch.doctor.replies import Facts, Port
from megatron.launch.plan import Host, LaunchPlan, read_hostsfile
from megatron.runtime.messages import SECRET, Connection
from megatron.runtime.network import listening_socket
from tests import runs
from tests.habana import skip_with_cuda, write_distribution

ROOT = Path(__file__).resolve().parents[3]
SMALL = Extent(disk_bytes=2**22, product_s=0.04, link_s=0.2)
MARKER = "MEGATRON_TEST_OF_DOCTOR"
PLANTED = "MEGATRON_TEST_PLANTED"
PRODUCTS = """
import importlib.abc, importlib.util, os, sys

class Planted(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "megatron.parallel.operators.products":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            right = module.mm

            def mm(a, b, out=None):
                product = right(a, b, out)
                if os.environ["MEGATRON_TEST_PLANTED"] == "wrong":
                    product[3, 5] += 1
                elif os.sched_getaffinity(0) == {max(range(os.cpu_count()))}:
                    for _ in range(3):
                        product = right(a, b, out)
                return product

            module.mm = mm

        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Planted())
"""
"""A sitecustomize.py: one number of each product is wrong, always by as much; or one core takes four times as long."""


def hosts(count: int) -> list[Host]:
    return [Host(f"127.0.0.{number + 2}", 1, number + 1) for number in range(count)]


# ---------------------------------------------------------------------------------------------------------------------
# Planted faults


class PlantedFleet(Fleet):
    """Agents whose commands are changed, by host."""

    def __init__(self, count: int, folder: Path, change: dict[int, Callable[[list[str]], list[str]]]) -> None:
        super().__init__(hosts(count), "cpu", str(folder))
        self._change = change

    def command(self, host: Host) -> list[str]:
        command = super().command(host)
        return self._change.get(host.line - 1, lambda words: words)(command)


class SlowLink(threading.Thread):
    """A proxy that passes on few bytes a second, both ways."""

    def __init__(self, rate: float) -> None:
        super().__init__(daemon=True)
        self._rate, self._targets = rate, {}  # type: ignore[var-annotated]
        self._listener = listening_socket("127.0.0.1", 0)

    def to(self, target: Port) -> Port:
        self._target = target
        return Port("127.0.0.1", self._listener.getsockname()[1])

    def run(self) -> None:
        while True:
            with contextlib.suppress(OSError):
                near, _ = self._listener.accept()
                far = socket.create_connection((self._target.address, self._target.port))
                for source, target in ((near, far), (far, near)):
                    threading.Thread(target=self._pass_on, args=(source, target), daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        # small buffers: what fills them would pass at once
        source.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**15)
        with contextlib.suppress(OSError):
            while content := source.recv(2**14):
                target.sendall(content)
                time.sleep(len(content) / self._rate)
            target.shutdown(socket.SHUT_WR)


class OverSlowLink(Examination):
    """One pair of hosts meets over a proxy."""

    pair: set[int]
    proxy: SlowLink

    def endpoint(self, port: Port, server: int, client: int) -> Port:
        return self.proxy.to(port) if {server, client} == self.pair else port


def on_full_disk(folder: Path) -> Callable[[list[str]], list[str]]:
    """Return a change of a command: its disk takes a few kB more; without root no file may become larger."""
    if os.geteuid() == 0 and shutil.which("unshare"):
        mount = 'mount -t tmpfs -o size=64k none "$0" && exec "$@"'
        return lambda words: ["unshare", "--mount", "sh", "-c", mount, str(folder), *words]
    return lambda words: ["prlimit", "--fsize=4096", *words]


def test_a_slow_link_a_slow_core_a_full_disk_and_a_wrong_multiplier_are_four_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(examination, "AGAIN", 1)
    # the tests beside this one, and the machine's neighbours, slow a core to 0.6; the planted one has a quarter
    monkeypatch.setattr(rules, "LOW_PRODUCT", 0.4)
    monkeypatch.setattr(rules, "LOW_MEMORY", 0.3)
    (tmp_path / "planted").mkdir()
    (tmp_path / "planted" / "sitecustomize.py").write_text(PRODUCTS)

    def multiplying(how: str) -> Callable[[list[str]], list[str]]:
        path = f"PYTHONPATH={ROOT}:{tmp_path / 'planted'}"
        return lambda words: [words[0], f"{PLANTED}={how}", path, *words[2:]]

    (tmp_path / "disk").mkdir()
    change = {0: on_full_disk(tmp_path / "disk"), 1: multiplying("wrong"), 2: multiplying("slow")}
    with PlantedFleet(3, tmp_path / "disk", change) as fleet:
        watched = OverSlowLink(fleet, Wanted(extent=SMALL), lambda line: None)
        watched.pair, watched.proxy = {0, 1}, SlowLink(2e6)
        watched.proxy.start()
        found = watched.run()
    reasons: dict[tuple[int, str], list[str]] = {}
    for each in found.suspicions:
        reasons.setdefault((each.host, each.kind), []).append(each.reason)
    assert any("its folder cannot be written" in reason for reason in reasons.pop((0, "disk")))
    assert any("computes wrongly" in reason for reason in reasons.pop((1, "device")))
    core = max(range(os.cpu_count() or 1))
    assert [reason for reason in reasons.pop((2, "device")) if reason.startswith(f"core {core} multiplies at")]
    of_links = [(each.host, each.peer) for each in found.suspicions if each.kind == "link"]
    assert {frozenset(pair) for pair in of_links} == {frozenset({0, 1})}
    left = {key: value for key, value in reasons.items() if key[1] != "link"}
    assert set(left) <= {(0, "facts")}, left
    assert 0 in found.suspects()


@pytest.mark.slow
def test_nothing_is_named_in_twenty_clean_runs(tmp_path: Path) -> None:
    named = []
    for _ in range(20):
        found = examination.examine(hosts(3), "cpu", str(tmp_path), None, Wanted(extent=SMALL), lambda line: None)
        named += [each.reason for each in found.suspicions]
    assert named == []


@pytest.mark.slow
def test_the_groups_of_a_layout_exchange_over_gloo(tmp_path: Path) -> None:
    wanted = Wanted(per_node=2, group_sizes=(2, 1, 1), extent=SMALL)
    found = examination.examine(hosts(2), "cpu", str(tmp_path), None, wanted, lambda line: None)
    assert {(group.kind, group.ranks) for group in found.groups} == {
        ("tensor", (0, 1)),
        ("tensor", (2, 3)),
        ("data", (0, 2)),
        ("data", (1, 3)),
    }
    assert all(0 < group.seconds < 10 for group in found.groups)


@pytest.mark.slow
def test_the_cards_of_the_hpu_stand_in_are_examined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    skip_with_cuda()
    monkeypatch.setenv("PYTHONPATH", write_distribution(tmp_path / "packages"))
    monkeypatch.setenv("HABANA_STAND_IN", "1")
    monkeypatch.setenv("HABANA_VISIBLE_MODULES", "0,1")
    wanted = Wanted(per_node=2, extent=Extent(disk_bytes=2**20, product_s=0.02, device_bytes=2**19))
    found = examination.examine(hosts(1), "hpu", str(tmp_path), None, wanted, lambda line: None)
    assert [each.name for each in found.devices[0].products] == ["hpu 0", "hpu 1"]
    assert all(each.is_exact and each.repeats for each in found.devices[0].products)
    assert len(found.devices[0].memory) == 2
    assert (found.facts[0].device, found.facts[0].devices) == ("hpu", 2)


@pytest.mark.parametrize("stands_out", [True, False])
def test_a_run_starts_nothing_where_a_host_stands_out(
    stands_out: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    examined: list[tuple[Any, ...]] = []
    launched: list[LaunchPlan] = []

    def examine(*arguments: Any) -> Examined:
        examined.append(arguments)
        return planted_findings(*arguments) if stands_out else Examined(tuple(host.name for host in arguments[0]))

    def launch(plan: LaunchPlan) -> int:
        launched.append(plan)
        return 0

    monkeypatch.setattr(examination, "examine", examine)
    monkeypatch.setattr("megatron.cli.launch.launch", launch)
    file = tmp_path / "hosts"
    file.write_text("node1 slots=2\nnode2 slots=2\n")
    own = f"--doctor true --device cpu --nodes 2 --devices-per-node 2 --hostsfile {file}"
    prefix = runs.write_dataset(tmp_path / "text")
    words = f"{own} -- --config tiny_llama --tensor-model-parallel-size 2 --data-path {prefix} --train-samples 6400"
    status = launch_main(words.split())
    ((planned, device, _, _, wanted, _, environment),) = examined
    # what decides how libraries exchange
    assert environment["DS_ACCELERATOR"] == "cpu"
    assert ([host.name for host in planned], device) == (["node1", "node2"], "cpu")
    assert (wanted.per_node, wanted.group_sizes) == (2, (2, 1, 1))
    said = capsys.readouterr().err
    if stands_out:
        assert (status, launched) == (2, [])
        assert "node2: its disk is full" in said
        assert f"--hostsfile {file} --write-hostsfile FILE leaves them out" in said
    else:
        assert status == 0
        assert len(launched) == 1
        assert "Nothing stands out on 2 hosts." in said


def test_a_run_by_a_rendezvous_is_not_examined_in_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(SECRET, "of the nodes of a test")
    own = "--doctor true --device cpu --nodes 2 --devices-per-node 1 --rendezvous 10.0.0.1:29500"
    words = f"{own} -- --config tiny_llama --data-path {runs.write_dataset(tmp_path / 'text')} --train-samples 6400"
    assert launch_main(words.split()) == 2
    assert "knows one of the 2 nodes of a rendezvous; examine them by a hostsfile" in capsys.readouterr().err


def test_an_agent_has_the_variables_of_the_run(tmp_path: Path) -> None:
    fleet = Fleet([Host("localhost", 1, 1), Host("node1", 1, 2)], "cpu", str(tmp_path), None, {"FI_PROVIDER": "verbs"})
    here, there = (" ".join(fleet.command(host)) for host in fleet.hosts)
    assert "FI_PROVIDER=verbs" in here
    assert "FI_PROVIDER=verbs" in there


# ---------------------------------------------------------------------------------------------------------------------
# Hostile answers and strangers

STUB = """
import json, sys, time
first = json.loads(sys.stdin.readline())
key = bytes.fromhex(first["key"])
sys.stdin.readline()
from megatron.launch.doctor.replies import sealed_line
send = sys.stdout.buffer
ANSWER
send.flush()
time.sleep(60)
"""
HOSTILE = {
    "sent a reply whose seal does not fit it": "send.write(sealed_line(b'another key', 0, {'time': 1.0}))",
    "sent a reply whose machine is wrong: Field required": "send.write(sealed_line(key, 0, {'hostname': 'x'}))",
    "sent a reply whose hostname is wrong": "send.write(sealed_line(key, 0, FACTS | {'hostname': '\\x1b[2Jx'}))",
    "sent a reply whose memory_bytes is wrong": "send.write(sealed_line(key, 0, FACTS | {'memory_bytes': -5}))",
    "sent a reply whose ?[2Jx is wrong": "send.write(sealed_line(key, 0, FACTS | {'\\x1b[2Jx': 1}))",
    "sent more than 1,048,576 bytes that are no reply": "send.write(b'x' * 2**21)",
    "is not reached, or its agent has ended: sorry": "print('sorry', file=sys.stderr); sys.exit(3)",
    "does not answer within 20 s": "pass",
}
A_FACT = {
    "hostname": "x",
    "machine": "x",
    "processor": "x",
    "cores": 1,
    "device": "cpu",
    "devices": None,
    "chips": [],
    "driver": "",
    "packages": {},
    "memory_bytes": 1,
    "memory_free": 1,
    "disk_bytes": 1,
    "disk_free": 1,
    "open_files": 1,
    "link_bits": 0,
}


def test_a_program_that_fails_is_named_while_another_waits_for_it() -> None:
    waits = [sys.executable, "-c", "import time; time.sleep(60)"]
    fails = [sys.executable, "-c", "import sys; sys.exit('no such device')"]
    begin_s = time.monotonic()
    with pytest.raises(TaskError, match="status 1: no such device"):
        run_programs([waits, fails], [{}, {}], 50.0)
    assert time.monotonic() - begin_s < 40


class HostileFleet(Fleet):
    """Each host's agent is a program of the test."""

    def command(self, host: Host) -> list[str]:
        answer = list(HOSTILE.values())[host.line - 1].replace("FACTS", json.dumps(A_FACT).replace("null", "None"))
        return ["env", f"PYTHONPATH={ROOT}", sys.executable, "-c", STUB.replace("ANSWER", answer)]


def test_hosts_that_answer_damaged_or_not_at_all_are_named_within_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron.launch.doctor.fleet.START_S", 20.0)
    begin_s = time.monotonic()
    with HostileFleet(hosts(len(HOSTILE)), "cpu", ".") as fleet:
        answers = fleet.start({"do": "facts", "towards": "127.0.0.1"}, Facts)
        faults = [agent.fault for agent in fleet.agents.values()]
        pids = [agent.process.pid for agent in fleet.agents.values()]
    assert answers == {}
    for expected, fault in zip(HOSTILE, faults, strict=True):
        assert fault is not None
        assert fault.startswith(expected), (expected, fault)
    assert not any("\x1b" in str(fault) for fault in faults)
    assert time.monotonic() - begin_s < 45
    assert not any(psutil.pid_exists(pid) for pid in pids)


def serving(key: bytes, test: dict[str, Any], outcome: list[Any]) -> tuple[Port, threading.Thread]:
    listener = listening_socket("127.0.0.1", 0)

    def serve() -> None:
        try:
            outcome.append(links.serve(listener, key, test, 0.05))
        except links.LinkError as error:
            outcome.append(error)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    return Port("127.0.0.1", listener.getsockname()[1]), thread


def test_strangers_at_the_port_of_a_link_hold_up_nobody() -> None:
    key, test, outcome = b"k" * 32, {"from": 1, "to": 0}, []  # type: ignore[var-annotated]
    port, thread = serving(key, test, outcome)
    silent = [socket.create_connection((port.address, port.port)) for _ in range(80)]
    silent[5].close()
    for stranger in silent[10:20]:
        stranger.sendall(os.urandom(100_000))
    another = Connection(socket.create_connection((port.address, port.port)), b"another key", is_server=False)
    # of the same run, but of another test
    with pytest.raises(links.LinkError):
        links.connect(port.address, port.port, key, {"from": 2, "to": 0}, 0.05)
    rate = links.connect(port.address, port.port, key, test, 0.05)
    thread.join(20)
    (served,) = outcome
    assert rate.bytes_per_s > 1e6
    assert served.bytes_per_s > 1e6
    assert 0 < rate.round_trip_s < 1
    another.close()
    for stranger in silent:
        stranger.close()


def test_a_peer_that_does_not_come_or_sends_nothing_ends_the_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "HANDSHAKE_S", 0.5)
    monkeypatch.setattr(links, "DRAIN_S", 0.5)
    outcome: list[Any] = []
    _, thread = serving(b"k" * 32, {"from": 1, "to": 0}, outcome)
    thread.join(10)
    assert str(outcome[0]) == "the other end did not come within 0.5 s"
    with pytest.raises(links.LinkError, match="is not reached"):
        links.connect("127.0.0.1", 1, b"k" * 32, {}, 0.05)
    deaf = listening_socket("127.0.0.1", 0)
    with pytest.raises(links.LinkError, match="broke amid the test"):
        links.connect("127.0.0.1", deaf.getsockname()[1], b"k" * 32, {}, 0.05)


# ---------------------------------------------------------------------------------------------------------------------
# Endings and the command


def of_marker(value: str) -> list[int]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(MARKER) == value and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
    return found


@contextlib.contextmanager
def started_doctor(tmp_path: Path, *flags: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    file = tmp_path / "hosts"
    file.write_text("".join(f"{host.name} slots=1\n" for host in hosts(2)))
    marker = f"{os.getpid()} {tmp_path.name}"
    process = subprocess.Popen(
        [
            sys.executable,
            str(ROOT / "tools" / "doctor.py"),
            "--hostsfile",
            str(file),
            "--folder",
            str(tmp_path),
            *flags,
        ],
        env=os.environ | {MARKER: marker},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process, marker
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_nothing_is_left_where_the_doctor_is_ended(number: signal.Signals, tmp_path: Path) -> None:
    with started_doctor(tmp_path) as (process, marker):
        deadline_s = time.monotonic() + 120
        while not any("device_program" in " ".join(psutil.Process(pid).cmdline()) for pid in of_marker(marker)):
            assert time.monotonic() < deadline_s
            assert process.poll() is None
            time.sleep(0.1)
        assert len(of_marker(marker)) >= 6, "the doctor, two agents of two processes, and a check"
        process.send_signal(number)
        process.wait(30)
        deadline_s = time.monotonic() + 10
        while of_marker(marker) and time.monotonic() < deadline_s:
            time.sleep(0.05)
        assert of_marker(marker) == []
    assert [path.name for path in tmp_path.iterdir()] == ["hosts"]


@pytest.mark.parametrize(
    ("lines", "flags", "expected"),
    [
        ("127.0.0.2 slots=1\nnode2 slots=1\n", "", "127.0.0.2 means another machine on every host"),
        ("", "", "lists no host"),
        ("node1\n", "", "is not `<host> slots=<n>`"),
        (None, "--write-hostsfile x", "--write-hostsfile without --hostsfile has no effect"),
        (None, "--measure x.txt", "must end with .yaml"),
        (None, "--measure x.yaml --activate .venv", "--measure starts hosts without --activate"),
        (None, "--tensor-model-parallel-size 2", "1 host of 1 rank have no groups of a layout of 2"),
        (None, "--device tpu", "--device 'tpu' must be auto"),
    ],
)
def test_what_cannot_be_examined_is_refused(
    lines: str | None, flags: str, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = flags.split()
    if lines is not None:
        (tmp_path / "hosts").write_text(lines)
        words += ["--hostsfile", str(tmp_path / "hosts")]
    assert main(words) == 2
    assert expected in capsys.readouterr().err


def planted_findings(*arguments: Any) -> Examined:
    found = Examined(tuple(host.name for host in arguments[0]))
    found.suspicions = [examination.Suspicion(1, "disk", "its disk is full")]
    return found


def test_suspects_are_left_out_of_the_hostsfile_on_request(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron.cli.doctor.examine", planted_findings)
    (tmp_path / "hosts").write_text("node1 slots=8\nroot@node2 slots=8\nnode3 slots=8 # spare\n")
    words = ["--hostsfile", str(tmp_path / "hosts"), "--write-hostsfile", str(tmp_path / "left"), "--json"]
    assert main(words) == 1
    found = json.loads(capsys.readouterr().out)
    assert [each["is_suspect"] for each in found["hosts"]] == [False, True, False]
    (named,) = found["suspicions"]
    expected = {"host": "root@node2", "peer": None, "kind": "disk", "reason": "its disk is full", "leaves_out": True}
    assert named == expected
    left, faults = read_hostsfile(str(tmp_path / "left"))
    assert ([host.name for host in left], faults) == (["node1", "node3"], [])
    # rates of a fleet with a suspect are not a plan's
    assert main([*words[:2], "--measure", str(tmp_path / "rates.yaml")]) == 1
    assert "is not written: hosts stand out" in capsys.readouterr().err
