"""Replay of a pass as one graph of the device: CUDA graphs and HPU graphs, by DeepSpeed's accelerator."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from megatron.options.config import ConfigError
from megatron.parallel.context import ParallelContext
from megatron.runtime.devices import device_of, graph_faults, name_of

T = TypeVar("T")


def check_graphs(ctx: ParallelContext, option: str = "use_graphs") -> None:
    """Raise ConfigError where the device has no graphs, or cannot hold the collectives of the tensor-parallel ranks."""
    device = device_of(ctx.device.type)
    lazy = device.is_lazy() if device.has_lazy_mode else None
    name, size = name_of(device), ctx.tensor_size
    if faults := list(graph_faults(option, name, lazy=lazy, tensor_size=size, environment=os.environ)):
        raise ConfigError(faults)


def uses_graphs(chosen: bool | None, ctx: ParallelContext) -> bool:
    """Return whether tokens' passes are replayed as graphs: as chosen, or else on CUDA where no ranks share a layer."""
    if chosen is not None:
        return chosen
    return device_of(ctx.device.type).replays_tokens and ctx.tensor_size == 1


def describe_choice(ctx: ParallelContext) -> str:
    """Return the line that says what an unset `use_graphs` means; '': this device needs none."""
    device = device_of(ctx.device.type)
    if not device.replays_tokens:
        return ""
    if uses_graphs(None, ctx):
        return f"each token's pass is replayed as a {device.graphs} graph; --no-use-graphs leaves graphs out"
    return f"{device.graphs} graphs are off: with tensor parallelism they are untested; --use-graphs takes them"


class _Outside(TorchDispatchMode):
    """Collects the tensors that were there before and that operators within read: constants, and weights."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: dict[int, Tensor] = {}
        # by identity, as == of tensors is element-wise; weak, so that an intermediate result is freed as without a
        # graph, and its id does not count for a later tensor
        self._made = WeakIdKeyDictionary()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for each in tree_leaves((args, kwargs)):
            if isinstance(each, Tensor) and each not in self._made:
                # held by a strong reference, so no other tensor can get this id
                self.tensors[id(each)] = each
        result = function(*args, **(kwargs or {}))
        for each in tree_leaves(result):
            # an operator in place returns what was there before, such as the cache: it stays outside
            if isinstance(each, Tensor) and id(each) not in self.tensors:
                self._made[each] = True
        return result


@torch.no_grad()
def what_is_read(function: Callable[..., Any], inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Call the function, and return the tensors that it reads beside what it makes itself.

    To be held as long as a graph of it. Not while it is captured: within, torch.compile's functions run uncompiled.
    """
    with _Outside() as outside:
        function(*inputs)
    return tuple(outside.tensors.values())


def captured(accelerator: Any, function: Callable[[], T], pool: Any = None) -> tuple[Any, T, Any]:
    """Return a graph of the function's operators, its results, which a replay computes, and the pool of its memory.

    Graphs that never run at the same time may share a pool; None: a new one. HPU graphs have none.
    """
    graph = accelerator.create_graph()
    capture = accelerator.capture_to_graph(graph, pool=pool)
    # other threads, such as those that read data ahead, may allocate pinned memory meanwhile
    capture.capture_error_mode = "thread_local"
    with capture:
        results = function()
    if pool is None and hasattr(graph, "pool"):
        pool = graph.pool()
    return graph, results, pool


@dataclass(frozen=True)
class _Captured:
    graph: Any
    inputs: tuple[Tensor, ...]
    output: Any
    outside: tuple[Tensor, ...]
    """Tensors that the graph reads beside its inputs: a table that a longer one replaces would be freed under it."""


class PassGraphs:
    """A captured graph for each key, replayed with new values of its inputs. All share one pool of memory.

    Tensor-parallel ranks call `run` with the same keys in the same order, as their graphs hold collectives.
    """

    def __init__(self, ctx: ParallelContext, option: str = "use_graphs", most: int | None = None) -> None:
        """`most`: largest number of graphs; passes of further keys run without one. Raises ConfigError."""
        check_graphs(ctx, option)
        from deepspeed.accelerator import get_accelerator

        self._accelerator: Any = get_accelerator()
        self._captured: dict[Hashable, _Captured] = {}
        self._most = most
        self._pool: Any = None

    @property
    def count(self) -> int:
        """Number of graphs captured."""
        return len(self._captured)

    def run(self, key: Hashable, function: Callable[..., T], inputs: tuple[Tensor, ...]) -> T:
        """Return function(*inputs), captured at the first call with this key, which stands for the shapes.

        One tensor or a tuple of them. The next call of any key may overwrite what is returned. Raises ValueError for
        inputs of other shapes than those captured under their key.
        """
        if key not in self._captured:
            if self._most is not None and self.count >= self._most:
                return function(*inputs)
            # a capture records and does not compute: the result of this call comes from the replay below
            self._captured[key] = self._capture(function, inputs)
        captured = self._captured[key]
        for static, value in zip(captured.inputs, inputs, strict=True):
            if (static.shape, static.dtype) != (value.shape, value.dtype):  # copy_ would repeat, or convert
                raise ValueError(
                    f"a graph captured for {tuple(static.shape)} {static.dtype} cannot take {tuple(value.shape)} "
                    f"{value.dtype}"
                )
            # a graph reads fixed addresses: new values are written into the captured inputs
            static.copy_(value)
        self._accelerator.replay_graph(captured.graph)
        return captured.output  # type: ignore[no-any-return]

    def _capture(self, function: Callable[..., Any], inputs: tuple[Tensor, ...]) -> _Captured:
        accelerator = self._accelerator
        # clones: the caller's tensors may be freed or reused between replays
        static = tuple(value.clone() for value in inputs)
        # torch's rule for a capture: warm up on a side stream, which waits for the current one and is waited for
        stream = accelerator.Stream()
        stream.wait_stream(accelerator.current_stream())
        with accelerator.stream(stream):
            function(*static)  # compiles kernels, and fills what is kept from call to call
            outside = what_is_read(function, static)
        for each, value in zip(static, inputs, strict=True):
            each.copy_(value)  # a new version: what follows from the values, as a mask, is computed in the graph
        accelerator.current_stream().wait_stream(stream)
        accelerator.synchronize()
        # the first graph makes the pool: each would keep its own activations
        graph, output, self._pool = captured(accelerator, partial(function, *static), self._pool)
        return _Captured(graph, static, output, outside)
