"""Replay of a pass as one graph of the device: CUDA graphs and HPU graphs, by DeepSpeed's accelerator."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from megatron.accelerator import is_lazy
from megatron.config.options import ConfigError
from megatron.parallel.context import ParallelContext

T = TypeVar("T")

DEVICES = ("cuda", "hpu")
"""Devices with graphs."""


def check_graphs(device: torch.device, option: str = "use_graphs") -> None:
    """Raise ConfigError where a device has no graphs, or HPU, in eager mode, does not load them."""
    if device.type not in DEVICES:
        raise ConfigError([f"{option} is for {' and '.join(DEVICES)} devices, not {device.type}; leave it out"])
    if device.type == "hpu" and not is_lazy("hpu"):
        raise ConfigError([f"{option} on HPU needs lazy mode; set PT_HPU_LAZY_MODE=1, or leave {option} out"])


def uses_graphs(chosen: bool | None, ctx: ParallelContext) -> bool:
    """Return whether tokens' passes are replayed as graphs: as chosen, or else on CUDA where no ranks share a layer."""
    return ctx.device.type == "cuda" and ctx.tensor_size == 1 if chosen is None else chosen


def describe_choice(ctx: ParallelContext) -> str:
    """Return the line that says what an unset `use_graphs` means; '': this device needs none."""
    if ctx.device.type != "cuda":
        return ""
    if uses_graphs(None, ctx):
        return "each token's pass is replayed as a CUDA graph; --no-use-graphs leaves graphs out"
    return "CUDA graphs are off: with tensor parallelism they are untested; --use-graphs takes them"


@dataclass(frozen=True)
class _Captured:
    graph: Any
    inputs: tuple[Tensor, ...]
    output: Any


class PassGraphs:
    """A captured graph for each key, replayed with new values of its inputs. All share one pool of memory."""

    def __init__(self, device: torch.device, option: str = "use_graphs") -> None:
        check_graphs(device, option)
        from deepspeed.accelerator import get_accelerator

        self._accelerator: Any = get_accelerator()
        self._captured: dict[Hashable, _Captured] = {}
        self._pool: Any = None

    def run(self, key: Hashable, function: Callable[..., T], inputs: tuple[Tensor, ...]) -> T:
        """Return function(*inputs), captured at the first call with this key, which stands for the shapes.

        One tensor or a tuple of them. The next call of any key may overwrite what is returned.
        """
        if key not in self._captured:
            self._captured[key] = self._capture(function, inputs)
        captured = self._captured[key]
        for static, value in zip(captured.inputs, inputs, strict=True):
            static.copy_(value)
        self._accelerator.replay_graph(captured.graph)
        return captured.output  # type: ignore[no-any-return]

    def _capture(self, function: Callable[..., Any], inputs: tuple[Tensor, ...]) -> _Captured:
        accelerator = self._accelerator
        static = tuple(value.clone() for value in inputs)
        stream = accelerator.Stream()
        stream.wait_stream(accelerator.current_stream())
        with accelerator.stream(stream):
            function(*static)  # compiles kernels, and fills what is kept from call to call
        accelerator.current_stream().wait_stream(stream)
        accelerator.synchronize()
        graph = accelerator.create_graph()
        with accelerator.capture_to_graph(graph, pool=self._pool):
            output = function(*static)
        if self._pool is None and hasattr(graph, "pool"):  # HPU graphs have none
            self._pool = graph.pool()
        return _Captured(graph, static, output)
