"""megatron-doctor over hosts with sshd, their own disks and addresses."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.host_runs import ROOT, python_processes
from tests.hosts import Host, Hosts, send_signal, why_not
from tests.training import link_runs

pytestmark = [pytest.mark.slow, pytest.mark.skipif(why_not() is not None, reason=str(why_not()))]


PRODUCTS = ROOT / "megatron" / "parallel" / "operators" / "products.py"
WRONG = """
right = mm


def mm(a, b, out=None):
    product = right(a, b, out)
    product[3, 5] += 1
    return product
"""
"""At the end of the file of products: one number is wrong, always by as much."""
SLOW = """
import os

right = mm


def mm(a, b, out=None):
    if os.sched_getaffinity(0) == {max(range(os.cpu_count()))}:
        for _ in range(3):
            right(a, b, out)
    return right(a, b, out)
"""
"""One core takes four times as long."""


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


def test_a_slow_link_a_slow_core_a_full_disk_and_a_wrong_multiplier_are_four_names(tmp_path: Path) -> None:
    if reason := link_runs.why_not():
        pytest.skip(reason)
    with Hosts(4, tmp_path / "hosts") as hosts:
        (tmp_path / "disk").mkdir()
        full, wrong, slow, far = hosts
        full.full_disk(tmp_path / "disk")
        wrong.own_file(PRODUCTS, PRODUCTS.read_text() + WRONG)
        slow.own_file(PRODUCTS, PRODUCTS.read_text() + SLOW)
        slow.slow_link_to(far, 125_000_000)
        far.slow_link_to(slow, 125_000_000)
        words = command(listed(list(hosts), tmp_path), tmp_path / "disk")
        run = hosts.login.run(*words, "--device", "cpu", "--json", folder=ROOT, timeout_s=600)
        assert run.returncode == 1, run.stdout + run.stderr
        found = json.loads(run.stdout)["suspicions"]
    reasons: dict[tuple[str, str], list[str]] = {}
    for each in found:
        reasons.setdefault((each["host"], each["kind"]), []).append(each["reason"])
    assert any("its folder cannot be written" in reason for reason in reasons.pop((full.address, "disk")))
    assert any("computes wrongly" in reason for reason in reasons.pop((wrong.address, "device")))
    core = max(range(os.cpu_count() or 1))
    assert any(reason.startswith(f"core {core} multiplies at") for reason in reasons.pop((slow.address, "device")))
    pairs = {frozenset((each["host"], each["peer"])) for each in found if each["kind"] == "link"}
    assert pairs == {frozenset((slow.address, far.address))}
    # and what else is true: a disk without room, and two hosts whose package is not that of the others
    of_facts = {host: said for (host, kind), said in reasons.items() if kind == "facts"}
    assert set(reasons) - {(host, "facts") for host in of_facts} <= {(slow.address, "link"), (far.address, "link")}
    assert all("GB free" in reason for reason in of_facts.pop(full.address))
    assert set(of_facts) <= {wrong.address, slow.address}
    assert all("its megatron is" in reason for said in of_facts.values() for reason in said), of_facts
