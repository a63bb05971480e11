"""The devices by name, those outside the package included, and what this machine has of them. Without torch."""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Iterator, Mapping

from megatron.runtime.device import Chip, Device, DeviceError
from megatron.runtime.device_cpu import CPU
from megatron.runtime.device_cuda import CUDA
from megatron.runtime.device_hpu import HPU, LAZY_MODE

DEVICES = (HPU, CUDA, CPU)
"""Those of this package, in the order in which `auto` tries them."""
CHOSEN = "MEGATRON_DEVICE"
"""Variable that names a device from outside the package to ranks and agents, beside DeepSpeed's DS_ACCELERATOR."""
GIB = 2**30


# ---------------------------------------------------------------------------------------------------------------------
# Records by name


def find_device(name: str) -> Device:
    """Return the record of a device: `cpu`, `cuda`, `hpu`, or that of a user as `package.module:RECORD`.

    Raises DeviceError if there is none.
    """
    for device in DEVICES:
        if device.name == name:
            return device
    if ":" not in name:
        raise DeviceError(f"must be {', '.join(device_names())}, or your own as package.module:RECORD")
    return _imported(name)


@functools.cache
def _imported(name: str) -> Device:
    module, _, attribute = name.partition(":")
    try:
        record = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # a user's module may raise anything while it is imported
        reason = f"{type(error).__name__}: {error}"
        raise DeviceError(f"cannot be loaded: {reason}; give package.module:RECORD, on PYTHONPATH") from error
    if not isinstance(record, Device):
        raise DeviceError(f"is a {type(record).__name__}; give a megatron.runtime.device.Device")
    return record


def device_names() -> list[str]:
    """Return the words that `--device` takes, without those of a user."""
    return ["auto", *(device.name for device in DEVICES)]


def device_fault(name: str) -> str | None:
    """Return the rule that a value of `--device` breaks; None: it breaks none."""
    if name == "auto":
        return None
    try:
        find_device(name)
    except DeviceError as error:
        return str(error)
    return None


def is_device(name: str) -> bool:
    """Return whether a name stands for one device: not for `auto`, nor for `no-hpu` of HL_USE_HPU=0."""
    return name not in ("auto", "no-hpu")


def planned_device(name: str) -> Device:
    """Return the record that a plan is made for: `auto`, where other machines detect theirs, stands for CUDA."""
    if name == "auto":
        return CUDA
    return find_device(name)


def candidates(name: str) -> tuple[Device, ...]:
    """Return the devices that a name may turn out to be: all of this package for `auto`."""
    if name == "auto":
        return DEVICES
    return (find_device(name),)


def device_of(torch_type: str) -> Device:
    """Return the record of the device whose tensors have this type of torch.device, in this process."""
    for device in _own_first():
        if device.torch_type == torch_type:
            return device
    return _undescribed(torch_type)


def device_of_accelerator(accelerator: str) -> Device:
    """Return the record of the device with this name of DeepSpeed's, in this process."""
    for device in _own_first():
        if device.accelerator == accelerator:
            return device
    return _undescribed(accelerator)


def launched_device() -> Device | None:
    """Return the device that the launcher has chosen for this process's ranks; None if they detect it themselves."""
    accelerator = os.environ.get("DS_ACCELERATOR")
    if not accelerator:
        return None
    return device_of_accelerator(accelerator)


def name_of(device: Device) -> str:
    """Return the name by which options choose the device of this process: a user's has that of its record's place."""
    if device in DEVICES:
        return device.name
    return os.environ.get(CHOSEN, device.name)


def rank_variables(name: str) -> dict[str, str]:
    """Return the variables by which ranks and agents know their device; none for `auto`."""
    if name == "auto":
        return {}
    device = find_device(name)
    variables = {"DS_ACCELERATOR": device.accelerator}
    if device not in DEVICES:
        variables[CHOSEN] = name
    return variables


def _own_first() -> tuple[Device, ...]:
    """Return the known records, before them a user's that this process, or its launcher, has chosen."""
    if CHOSEN not in os.environ:
        return DEVICES
    own = find_device(os.environ[CHOSEN])
    if own.accelerator != os.environ.get("DS_ACCELERATOR"):
        return DEVICES  # another device was chosen since
    return (own, *DEVICES)


@functools.cache
def _undescribed(name: str) -> Device:
    """Return what holds for any device of torch's, such as `meta`."""
    return Device(name=name, accelerator=name, torch_type=name, collectives="", missing=str)


# ---------------------------------------------------------------------------------------------------------------------
# Devices of this machine


def detect_device(*, allow_hpu: bool = True) -> str:
    """Return the first available one of hpu, cuda and cpu by device files and installed packages, without torch."""
    tried = [device for device in DEVICES if allow_hpu or device is not HPU]
    # the CPU is last, and always there
    return next(device.name for device in tried if device.is_detected())


def device_memory_bytes(device: Device) -> int | None:
    """Return the memory of this machine's smallest device of a kind, from its driver's tool; None where that fails."""
    try:
        rows = device.query("memory.total", timeout_s=5.0)
        # MiB; the smallest, since each rank needs as much
        return min(int(size) for (size,) in rows) * 2**20
    except ValueError:  # a plan without a verdict is better than none
        return None


# ---------------------------------------------------------------------------------------------------------------------
# Conditions of graphs of a device (CUDA graphs, HPU graphs), known before torch and the device's software are loaded.


def graph_faults(
    option: str, device: str, *, lazy: bool | None, tensor_size: int, environment: Mapping[str, str]
) -> Iterator[str]:
    """Yield what keeps a device from running graphs; nothing for a device that is not chosen yet (`auto`).

    `lazy`: the device is in lazy mode; None: it will be. `tensor_size`: ranks whose collectives are part of a graph.
    """
    if device == "auto":
        return
    record = find_device(device)
    if not record.graphs:
        known = sorted(other.name for other in DEVICES if other.graphs)
        yield f"{option} is for {' and '.join(known)} devices, not {device}; leave it out"
        return
    yield from record.graph_faults(option, lazy, tensor_size, environment)


def graph_variables(device: str, tensor_size: int) -> dict[str, str]:
    """Return the variables with which a device's graphs may hold collectives; for `auto` those of any device."""
    variables: dict[str, str] = {}
    # of `auto` those of all: a variable of software that is not loaded is read by nothing
    for record in candidates(device):
        variables |= record.graph_variables(tensor_size)
    return variables


def set_graph_variables(device: str, tensor_size: int, *, lazy: bool = False) -> None:
    """Set `graph_variables` for this process unless they are set; with `lazy` lazy mode too.

    No effect without the device's software. Call it before `choose_device`, which loads what reads them.
    """
    for record in candidates(device):
        mode = {LAZY_MODE: "1"} if lazy and record.has_lazy_mode else {}
        record.set_variables(record.graph_variables(tensor_size) | mode)


# ---------------------------------------------------------------------------------------------------------------------
# Memory of known chips, for the plan.


def known_chips() -> dict[str, tuple[Device, Chip]]:
    """Return the chips whose memory a plan may name, with their devices, by name."""
    return {chip.name: (device, chip) for device in DEVICES for chip in device.chips}


def known_chip(text: str | None) -> tuple[Device, Chip] | None:
    """Return the device and the chip of this name, in any case."""
    return known_chips().get((text or "").lower())


def parse_memory_gib(text: str) -> float | None:
    """Return the GiB of a chip's name or of a number; None if it is neither."""
    known = known_chip(text)
    if known is not None:
        return known[1].memory_gib
    try:
        number = float(text)
    except ValueError:
        return None
    if not 0 < number < 1e6:
        return None
    return number
