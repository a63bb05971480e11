"""Memory of known devices, for the plan."""

from __future__ import annotations

from typing import NamedTuple

GIB = 2**30


class KnownDevice(NamedTuple):
    """A device by its name in `device_memory`."""

    title: str
    kind: str
    """hpu or cuda."""
    memory_gib: float
    """Memory that its driver gives to programs."""


# the drivers' own figures, below the round ones of the data sheets (96 and 128 GB; 80, 80 and 141 GB)
KNOWN_DEVICES = {
    "gaudi2": KnownDevice("Gaudi 2", "hpu", 94.6),
    "gaudi3": KnownDevice("Gaudi 3", "hpu", 126.5),
    "a100": KnownDevice("A100 80 GB", "cuda", 79.2),
    "h100": KnownDevice("H100 80 GB", "cuda", 79.2),
    "h200": KnownDevice("H200", "cuda", 139.8),
}


def known_device(text: str | None) -> KnownDevice | None:
    """Return the device of this name, in any case."""
    return KNOWN_DEVICES.get((text or "").lower())


def parse_memory_gib(text: str) -> float | None:
    """Return the GiB of a device's name or of a number; None if it is neither."""
    if (device := known_device(text)) is not None:
        return device.memory_gib
    try:
        number = float(text)
    except ValueError:
        return None
    return number if 0 < number < 1e6 else None
