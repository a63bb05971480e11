"""Memory and cores of a host as its control groups leave them: folders as the kernel writes them, of both versions."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from megatron.runtime import device_cpu
from megatron.runtime.device_cpu import free_host_memory, host_cores, host_memory

GIB = 2**30
HOST = SimpleNamespace(available=40 * GIB)
PAGES = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 64 * GIB // 4096}
UNLIMITED = 9_223_372_036_854_771_712
"""Limit of a group of version 1 that has none."""


@pytest.fixture(autouse=True)
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: HOST)
    monkeypatch.setattr(os, "sysconf", PAGES.__getitem__)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(48))
    monkeypatch.setattr(device_cpu, "CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(device_cpu, "OWN_CGROUPS", tmp_path / "own")
    host_memory.cache_clear()
    yield tmp_path
    host_memory.cache_clear()


def write(folder: Path, own: str, files: Mapping[str, object]) -> None:
    (folder / "own").write_text(own)
    for name, content in files.items():
        path = folder / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")


def stat(prefix: str = "", *, active: int, inactive: int, shmem: int) -> str:
    """Some lines of a memory.stat. A tmpfs counts as cache, which the kernel cannot drop."""
    cache = "cache" if prefix else "file"
    lines = [
        f"{cache} {active + inactive + shmem}",
        f"anon {GIB}",
        f"inactive_file {inactive}",
        f"active_file {active}",
    ]
    # version 1 has those of the group alone beside those of all groups within
    if prefix:
        lines = [*(f"{line.split()[0]} 7" for line in lines), *(f"{prefix}{line}" for line in lines)]
    return "\n".join(lines)


def test_a_container_of_version_2_has_its_limit_without_what_it_holds(groups: Path) -> None:
    files = {
        "memory.max": 16 * GIB,
        "memory.current": 9 * GIB,
        "memory.stat": stat(active=GIB, inactive=2 * GIB, shmem=3 * GIB),
        "cpu.max": "350000 100000",
    }
    write(groups, "0::/\n", files)
    assert (host_memory(), free_host_memory(), host_cores()) == (16 * GIB, 10 * GIB, 3)


@pytest.mark.parametrize("path", ["/docker/c0ffee", "/../../elsewhere"])
def test_a_container_of_version_1_may_see_its_group_as_the_root(groups: Path, path: str) -> None:
    files = {
        "memory/memory.limit_in_bytes": 16 * GIB,
        "memory/memory.usage_in_bytes": 9 * GIB,
        "memory/memory.stat": stat("total_", active=GIB, inactive=2 * GIB, shmem=3 * GIB),
        "cpu/cpu.cfs_quota_us": 350000,
        "cpu/cpu.cfs_period_us": 100000,
    }
    write(groups, f"5:memory:{path}\n3:cpuacct,cpu:{path}\n1:name=systemd:/\n0::/\n", files)
    assert (host_memory(), free_host_memory(), host_cores()) == (16 * GIB, 10 * GIB, 3)


def test_the_least_of_a_group_and_those_around_it_counts(groups: Path) -> None:
    empty = stat(active=0, inactive=0, shmem=0)
    inner = {"memory.max": 30 * GIB, "memory.current": GIB, "memory.stat": empty, "cpu.max": "max 100000"}
    outer = {"memory.max": 32 * GIB, "memory.current": 27 * GIB, "memory.stat": empty, "cpu.max": "400000 100000"}
    both = {f"job.slice/{name}": value for name, value in outer.items()}
    both |= {f"job.slice/step/{name}": value for name, value in inner.items()}
    write(groups, "0::/job.slice/step\n", both)
    assert (host_memory(), free_host_memory(), host_cores()) == (30 * GIB, 5 * GIB, 4)


def test_without_limits_the_host_counts(groups: Path) -> None:
    expected = (64 * GIB, 40 * GIB, 48)
    assert (host_memory(), free_host_memory(), host_cores()) == expected, "no control groups"
    nothing = stat(active=0, inactive=0, shmem=0)
    write(groups, "0::/a\n", {"a/memory.max": "max", "a/memory.current": 5, "a/memory.stat": nothing})
    assert (host_memory(), free_host_memory(), host_cores()) == expected
    first = {
        "memory/memory.limit_in_bytes": UNLIMITED,
        "memory/memory.usage_in_bytes": 60 * GIB,
        "memory/memory.stat": stat("total_", active=0, inactive=0, shmem=0),
        "cpu/cpu.cfs_quota_us": -1,
        "cpu/cpu.cfs_period_us": 100000,
    }
    write(groups, "4:memory:/\n1:cpu:/\n", first)
    assert (host_memory(), free_host_memory(), host_cores()) == expected


def test_a_group_above_its_limit_has_nothing_left(groups: Path) -> None:
    empty = stat(active=0, inactive=0, shmem=0)
    write(groups, "0::/\n", {"memory.max": GIB, "memory.current": 2 * GIB, "memory.stat": empty, "cpu.max": "5 100"})
    assert (free_host_memory(), host_cores()) == (0, 1)


def test_the_hosts_own_numbers_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not a stand-in: whatever groups this machine has."""
    monkeypatch.undo()
    host_memory.cache_clear()
    assert 0 < free_host_memory() <= host_memory() <= psutil.virtual_memory().total
    assert 1 <= host_cores() <= (os.cpu_count() or 1)
