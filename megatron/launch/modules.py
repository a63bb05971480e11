"""Gaudi modules of this machine that a run is to use: whether they are there, and free of other jobs.

Rank i of a node takes the i-th module of HABANA_VISIBLE_MODULES, without it module i. hl-smi lists the modules; one is
in use if a process holds its device file, or if some of its memory is used, as by a process of another container.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron.devices import VISIBLE, query_devices

PROC = Path("/proc")
DEVICE_FILES = ("/dev/accel/accel", "/dev/hl")
"""Beginnings of the names of a device file, by the driver's release; its index follows."""
# An idle module reports less than 1 % of its memory as used, which the driver keeps for itself.
IDLE_SHARE = 0.05
LISTED = VISIBLE["hpu"]


class ModulesError(ValueError):
    """The ranks of this machine cannot have their modules."""


@dataclass(frozen=True)
class GaudiModule:
    """A Gaudi of this machine."""

    number: int
    holders: tuple[int, ...]
    """Ids of the processes that hold its device file, of those that this user may see."""
    memory_share: float
    """Part of its memory that is used."""

    @property
    def use(self) -> str:
        """Sign of its use; empty: nothing uses it."""
        if self.holders:
            return f"held by process {', '.join(map(str, self.holders))}"
        return f"{self.memory_share:.0%} of its memory is used" if self.memory_share > IDLE_SHARE else ""


def modules() -> list[GaudiModule]:
    """Return the modules of this machine in order; none where hl-smi does not list them."""
    try:
        listed = query_devices("hpu", "index", "module_id", "memory.used", "memory.total")
        rows = [[float(word) for word in row] for row in listed]
        holders = _holders()
        found = [
            GaudiModule(int(number), tuple(holders.get(int(index), ())), used / total if total else 0.0)
            for index, number, used, total in rows
        ]
    except (OSError, ValueError):  # the ranks report what they cannot open
        return []
    return sorted(found, key=lambda module: module.number)


def _holders() -> dict[int, list[int]]:
    """Return the processes that have opened each device file, by its index."""
    found: dict[int, list[int]] = {}
    for folder in PROC.glob("[0-9]*/fd"):
        with contextlib.suppress(OSError):  # of another user, or it has ended
            opened = {os.readlink(link) for link in folder.iterdir()}
            for path in opened:
                for beginning in DEVICE_FILES:
                    if (index := path.removeprefix(beginning)) != path and index.isdecimal():
                        found.setdefault(int(index), []).append(int(folder.parent.name))
    return {index: sorted(processes) for index, processes in found.items()}


def check_modules(ranks: int) -> Iterator[str]:
    """Yield what keeps the ranks of this machine from their modules, all modules in one message."""
    if (own := os.environ.get("HLS_MODULE_ID")) and ranks > 1:
        yield f"HLS_MODULE_ID={own} gives all {ranks} ranks of a node one module; unset it, and list them in {LISTED}"
        return
    given = os.environ.get(LISTED)
    words = [word.strip() for word in given.split(",")] if given else [own] if own else [*map(str, range(ranks))]
    source = f"{LISTED}={given}" if given else f"HLS_MODULE_ID={own}" if own else f"{LISTED} is not set"
    if not all(word.isdecimal() for word in words) or len(set(words)) < len(words):
        yield f"{source} must be numbers of modules, each once, such as 0,1,2,3; correct it"
        return
    here = {module.number: module for module in modules()}
    needed = [int(word) for word in words[:ranks]]
    if not here:
        return
    problems = [f"{number} is not on this machine" for number in needed if number not in here]
    problems += [f"{number} is in use ({here[number].use})" for number in needed if number in here and here[number].use]
    if problems:
        free = [str(number) for number, module in here.items() if not module.use]
        remedy = f"set {LISTED} to {ranks} of them" if len(free) >= ranks else "wait, or use fewer devices a node"
        yield (
            f"{source}, so {ranks} ranks need the modules {','.join(map(str, needed))}: {'; '.join(problems)}. Free: "
            f"{','.join(free) or 'none'}; {remedy}"
        )


def require_modules(ranks: int) -> None:
    """Raise ModulesError where `check_modules` yields a fault and the device is HPU. For agents of other machines."""
    if os.environ.get("DS_ACCELERATOR") == "hpu" and (faults := list(check_modules(ranks))):
        raise ModulesError(" ".join(faults))


def warn_of_modules(ranks: int) -> Iterator[str]:
    """Yield a list of modules that Habana does not support, and one that restricts nothing."""
    given = os.environ.get(LISTED, "")
    words = [word.strip() for word in given.split(",") if word.strip()][:ranks]
    if given and 1 < ranks < 8 and all(word.isdecimal() for word in words):
        first = min(map(int, words), default=0)
        if ranks not in (2, 4) or first % ranks or sorted(map(int, words)) != [*range(first, first + ranks)]:
            yield (
                f"{LISTED}={given}: Habana supports parts of a node of 1, 2 or 4 modules, and of several only 0,1 2,3 "
                "4,5 6,7 0,1,2,3 or 4,5,6,7"
            )
    devices = os.environ.get("HABANA_VISIBLE_DEVICES", "all")
    if devices not in ("", "all", "none") and not given and 0 < devices.count(",") + 1 < len(modules()):
        yield (
            f"HABANA_VISIBLE_DEVICES={devices} chooses the devices of a container when it is made, and restricts no "
            f"process; set {LISTED}"
        )
