"""A stand-in of habana-pyhlml 1.24.2: names and units of its functions, with numbers that tests set."""

from __future__ import annotations

from dataclasses import dataclass


class HLMLError(Exception):
    pass


@dataclass
class Device:
    module: int
    utilisation: int = 90
    temperature: int = 40
    power_mW: int = 450_000


@dataclass
class c_hlml_utilization:
    aip: int
    memory: int


devices = [Device(module, temperature=40 + module) for module in (3, 0, 1, 2)]
"""Not in the order of the modules."""
driver = b"1.24.1-5b2d8f1"
is_open = False
has_library = True


def hlmlInit() -> None:
    global is_open
    if not has_library:
        raise HLMLError("uninitialized")
    is_open = True


def hlmlGetDriverVersion() -> bytes:
    return driver


def hlmlDeviceGetCount() -> int:
    assert is_open
    return len(devices)


def hlmlDeviceGetHandleByIndex(index: int) -> Device:
    return devices[index]


def hlmlDeviceGetModuleID(device: Device) -> int:
    return device.module


def hlmlDeviceGetUtilizationRates(device: Device) -> c_hlml_utilization:
    return c_hlml_utilization(device.utilisation, 0)


def hlmlDeviceGetTemperature(device: Device, sensor_type: int) -> int:
    assert sensor_type == 0
    return device.temperature


def hlmlDeviceGetPowerUsage(device: Device) -> int:
    if device.power_mW < 0:
        raise HLMLError("not supported")
    return device.power_mW
