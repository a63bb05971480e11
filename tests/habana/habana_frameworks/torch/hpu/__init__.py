"""The device as torch.hpu shows it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
from habana_frameworks.torch import stand_in
from habana_frameworks.torch.hpu import random as random
from habana_frameworks.torch.hpu.events import Event as Event
from habana_frameworks.torch.utils.internal import is_lazy
from torch.utils.checkpoint import DefaultDeviceType

if is_lazy():
    from habana_frameworks.torch.hpu.graphs import HPUGraph as HPUGraph
    from habana_frameworks.torch.hpu.graphs import graph as graph


HABANA_VISIBLE_MODULES_VAR = "HABANA_VISIBLE_MODULES"
HLS_MODULE_ID_VAR = "HLS_MODULE_ID"


def _lazy_init() -> None:
    """torch's generic code calls it before it uses the device."""
    DefaultDeviceType.set_device_type("hpu")


def is_available() -> bool:
    return device_count() > 0


def device_count() -> int:
    return stand_in.count


def get_device_name(device: Any = None) -> str:
    return stand_in.name


def current_device() -> int:
    return 0


def set_device(device: Any) -> None:
    """One device a process: which of the node's it is, the process's environment says."""


class device:
    """The device for a while: there is one."""

    def __init__(self, device: Any) -> None:
        self.idx = device

    def __enter__(self) -> None:
        pass

    def __exit__(self, type: Any, value: Any, traceback: Any) -> None:
        pass


def synchronize() -> None:
    stand_in.calls.append(("synchronize", {}))


def memory_stats(device: Any = None) -> dict[str, Any]:
    return dict(stand_in.memory)


def memory_allocated(device: Any = None) -> int:
    return int(memory_stats(device=device)["InUse"])


def max_memory_allocated(device: Any = None) -> int:
    return int(memory_stats(device=device)["MaxInUse"])


def memory_reserved(device: Any = None) -> int:
    return int(memory_stats(device)["Limit"])


def max_memory_reserved(device: Any = None) -> int:
    return memory_reserved(device)


def reset_peak_memory_stats(device: Any = None) -> None:
    stand_in.memory["MaxInUse"] = stand_in.memory["InUse"]


def mem_get_info(device: Any = None) -> tuple[int, int]:
    stats = memory_stats(device)
    return stats["Limit"] - stats["InUse"], stats["Limit"]


def enable_recompute_sdp(enabled: bool) -> None:
    stand_in.recompute_sdp[0] = enabled


def recompute_sdp_enabled() -> bool:
    return stand_in.recompute_sdp[0]


@contextlib.contextmanager
def sdp_kernel(enable_recompute: bool = True) -> Iterator[dict[str, Any]]:
    before = recompute_sdp_enabled()
    try:
        enable_recompute_sdp(enable_recompute)
        yield {}
    finally:
        enable_recompute_sdp(before)


class Stream(torch.Stream):
    """The one stream, on which the CPU computes at once."""

    def __new__(cls) -> Stream:
        return super().__new__(cls, device="hpu" if "torch.hpu" in sys.modules else "cpu")

    def wait_stream(self, stream: torch.Stream) -> None:
        assert isinstance(stream, Stream)


def current_stream(device: Any = None) -> Stream:
    return Stream()


def default_stream(device: Any = None) -> Stream:
    return Stream()


@contextlib.contextmanager
def stream(stream: Stream) -> Iterator[None]:
    assert isinstance(stream, Stream)
    yield
