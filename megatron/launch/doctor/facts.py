"""Facts of a host as its agent states them: devices, versions, memory, disk, limits. Without torch."""

from __future__ import annotations

import importlib.metadata
import platform
import re
import shutil
import socket
from pathlib import Path

from megatron.launch.agents.nodes_rendezvous import code_digest
from megatron.launch.doctor.replies import Facts
from megatron.runtime.descriptors import raise_limit
from megatron.runtime.device import Device
from megatron.runtime.device_cpu import free_host_memory, host_cores, host_memory
from megatron.runtime.devices import detect_device, find_device
from megatron.runtime.network import interface_towards

PACKAGES = ("torch", "deepspeed", "numpy", "safetensors", "pydantic", "habana-torch-plugin", "triton")
"""Those whose versions change what a run computes or writes; one that is not installed has no version."""
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
LONGEST = 300
RESULT = b"\x1eresult "
"""Begins the line by which a program hands its result to the agent: libraries print to stdout too."""
UNKNOWN_SPEED = 65535


def plain(text: str) -> str:
    """Return a text that a reply may hold: printable ASCII, and not long."""
    return re.sub(r"[^\x20-\x7e]", "?", text)[:LONGEST]


def read_facts(device: str, folder: Path, towards: str) -> Facts:
    """Return the facts of this host. `towards`: another host, to whose network an interface is named.

    Raises OSError.
    """
    name = detect_device() if device == "auto" else device
    record = find_device(name)
    disk = shutil.disk_usage(folder)
    rows = record.query("name", "driver_version")
    return Facts(
        hostname=plain(socket.gethostname()),
        machine=_machine(),
        processor=plain(_processor()),
        cores=host_cores(),
        device=plain(name),
        devices=_count(record),
        chips=tuple(plain(chip) for chip, _ in rows[:256]),
        driver=plain(" and ".join(sorted({driver for _, driver in rows}))),
        packages=_packages(),
        memory_bytes=host_memory(),
        memory_free=free_host_memory(),
        disk_bytes=disk.total,
        disk_free=disk.free,
        open_files=raise_limit(),
        link_bits=_link_bits(towards),
    )


def _machine() -> str:
    try:
        return plain(BOOT_ID.read_text().strip())
    except OSError:  # macOS, where one agent a machine is all that is supported
        return plain(socket.gethostname())


def _processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""
    named = re.search(r"^model name\s*:\s*(.*)$", text, re.MULTILINE)
    return named[1] if named else platform.machine()


def _count(record: Device) -> int | None:
    return None if record.count is None else record.count()


def _packages() -> dict[str, str]:
    found = {"python": platform.python_version(), "megatron": code_digest()[:16]}
    for name in PACKAGES:
        try:
            found[name] = plain(importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _link_bits(towards: str) -> int:
    import psutil

    known = psutil.net_if_stats().get(interface_towards(towards) or "")
    # in Mbit/s. The loopback interface has none, and some virtual ones state what stands for unknown
    if known is None or known.speed in (0, UNKNOWN_SPEED):
        return 0
    return int(known.speed) * 10**6
