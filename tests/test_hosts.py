"""The hosts that tests/hosts.py makes are like real ones where it matters, and leave nothing behind."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hosts import Hosts, send_signal, why_not
from tests.ranks import HANG_S

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True)
def _possible() -> None:
    if reason := why_not():
        pytest.skip(reason)


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    with Hosts(2, tmp_path / "hosts") as two:
        yield two


def test_each_host_has_its_own_name_address_processes_and_disk(hosts: Hosts, tmp_path: Path) -> None:
    addresses = ",".join(host.address for host in hosts)
    said = hosts.login.run("pdsh", "-R", "ssh", "-w", addresses, "hostname")
    assert sorted(said.stdout.splitlines()) == ["10.77.0.1: node1", "10.77.0.2: node2"], said.stderr

    sleep = hosts[0].start("sleep", "600")
    while hosts[0].run("pgrep", "-x", "sleep").returncode:  # nsenter and env come before it
        assert sleep.poll() is None
    assert hosts[1].run("pgrep", "-x", "sleep").returncode == 1
    send_signal(sleep, signal.SIGTERM)
    assert sleep.wait(HANG_S) == -signal.SIGTERM

    disk = tmp_path / "disk"
    disk.mkdir()
    (disk / "copied").touch()
    own = hosts[1].own_disk(disk)
    for host in hosts:
        assert hosts.login.run("ssh", host.address, f"touch {disk}/from_{host.name}").returncode == 0
    assert [sorted(path.name for path in folder.iterdir()) for folder in (disk, own)] == [
        ["copied", "from_node1"],
        ["copied", "from_node2"],
    ]


def test_a_host_that_is_cut_off_says_nothing_until_it_is_back(hosts: Hosts) -> None:
    ssh = ("ssh", "-oConnectTimeout=1", hosts[1].address, "true")
    hosts[1].cut_off()
    assert "timed out" in hosts.login.run(*ssh).stderr
    hosts[1].reconnect()
    assert hosts.login.run("ssh", hosts[1].address, "true").returncode == 0


# Says the processes of its hosts, and is killed.
KILLED = """
import os, sys
from pathlib import Path
from tests.hosts import Hosts
with Hosts(1, Path(sys.argv[1])) as hosts:
    started = [host.start("sleep", "600") for host in (hosts.login, hosts[0])]
    own = [os.getpid(), *(process.pid for process in started)]
    for nsenter in own[1:]:
        while len(Path(f"/proc/{nsenter}/task/{nsenter}/children").read_text().split()) != 1:
            pass
    below = [own[0]]
    for pid in below:
        below += [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    print(*below, flush=True)
    os.kill(os.getpid(), 9)
"""


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_nothing_outlives_a_process_that_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED, str(tmp_path / "hosts")]
    killed = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=HANG_S)
    assert killed.returncode == -signal.SIGKILL
    pids = [int(pid) for pid in killed.stdout.split()]
    assert len(pids) >= 9, "itself; of each host unshare, its first process, nsenter and sleep"
    deadline_s = time.monotonic() + HANG_S
    while alive := [pid for pid in pids if is_alive(pid)]:
        assert time.monotonic() < deadline_s, alive
        time.sleep(0.05)
