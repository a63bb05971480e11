"""megatron-doctor over two hosts with sshd, their own disks and addresses."""

from __future__ import annotations

import json
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.host_runs import ROOT, python_processes
from tests.hosts import Host, Hosts, send_signal, why_not

pytestmark = [pytest.mark.slow, pytest.mark.skipif(why_not() is not None, reason=str(why_not()))]


def command(file: Path, folder: Path) -> list[str]:
    return [sys.executable, str(ROOT / "tools" / "doctor.py"), "--hostsfile", str(file), "--folder", str(folder)]


def listed(hosts: list[Host], folder: Path) -> Path:
    file = folder / "hostsfile"
    file.write_text("".join(f"{host.address} slots=1\n" for host in hosts))
    return file


def test_two_sound_hosts_and_one_with_a_full_disk_over_ssh(tmp_path: Path) -> None:
    with Hosts(2, tmp_path / "hosts") as hosts:
        both = [hosts[0], hosts[1]]
        (tmp_path / "disk").mkdir()
        words = command(listed(both, tmp_path), tmp_path / "disk")
        groups = ["--device", "cpu", "--tensor-model-parallel-size", "2"]
        sound = hosts.login.run(*words, *groups, "--json", folder=ROOT, timeout_s=600)
        assert sound.returncode == 0, sound.stdout + sound.stderr
        found = json.loads(sound.stdout)
        assert {(link["from"], link["to"]) for link in found["links"]} == {
            (hosts[0].address, hosts[1].address),
            (hosts[1].address, hosts[0].address),
        }
        assert [host["facts"]["hostname"] for host in found["hosts"]] == ["node1", "node2"]
        assert [(group["kind"], group["ranks"]) for group in found["groups"]] == [("tensor", [0, 1])]
        assert not any(python_processes(host) for host in both)

        hosts[1].full_disk(tmp_path / "disk")
        full = hosts.login.run(*words, folder=ROOT, timeout_s=600)
        assert full.returncode == 1, full.stdout + full.stderr
        assert f"- {hosts[1].address}: its folder cannot be written" in full.stdout
        assert f"- {hosts[0].address}:" not in full.stdout
        print(full.stdout)


def test_a_host_that_is_cut_off_is_named_and_a_kill_leaves_nothing(tmp_path: Path) -> None:
    with Hosts(3, tmp_path / "hosts") as hosts:
        every = [hosts[0], hosts[1], hosts[2]]
        words = command(listed(every, tmp_path), tmp_path)
        hosts[1].cut_off()
        begin_s = time.monotonic()
        run = hosts.login.run(*words, folder=ROOT, timeout_s=600)
        assert run.returncode == 1, run.stdout + run.stderr
        assert f"- {hosts[1].address}: it is not reached, or its agent has ended: ssh: connect to host" in run.stdout
        print(f"{time.monotonic() - begin_s:.0f} s")
        hosts[1].reconnect()

        started = hosts.login.start(*words, folder=ROOT)
        deadline_s = time.monotonic() + 120
        while not all("device_program" in host.run("pgrep", "-af", "doctor").stdout for host in every[:1]):
            assert time.monotonic() < deadline_s
            time.sleep(0.2)
        send_signal(started, signal.SIGKILL)
        deadline_s = time.monotonic() + 10
        while any(python_processes(host) for host in every):
            assert time.monotonic() < deadline_s, [host.run("pgrep", "-af", "python").stdout for host in every]
            time.sleep(0.1)
