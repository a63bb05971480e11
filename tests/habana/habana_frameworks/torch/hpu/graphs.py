"""Graphs: operators over fixed memory, run again as they were. Loaded in lazy mode alone, as the published ones are.

Stricter than a card, which would compute from stale or freed memory: a graph keeps no memory alive but what it made
itself, and a capture refuses what reads results on the host, what has a shape that depends on values, and, without
PT_HPU_ENABLE_LAZY_COLLECTIVES, collectives.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from habana_frameworks.torch import stand_in
from torch import Tensor
from torch._C._distributed_c10d import FakeWork
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

READS = (Tensor.tolist, Tensor.numpy, Tensor.cpu, Tensor.item, Tensor.__bool__, Tensor.__int__, Tensor.__float__)
DYNAMIC = (
    "_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_consecutive", "unique_dim", "equal",
    "repeat_interleave",
)  # fmt: skip


class CaptureError(RuntimeError):
    """An operation that a graph cannot hold."""


def _refuse(name: str) -> None:
    raise CaptureError(f"{name} is not supported during HPU Graph capturing")


class _NoReads(TorchFunctionMode):
    """Refuses to copy results to the host."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in READS or (func is Tensor.to and "cpu" in map(str, args[1:])):
            _refuse(func.__name__)
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class _Outside:
    """A tensor that was there before the capture, by its place in memory."""

    storage: StorageWeakRef
    device: torch.device
    dtype: torch.dtype
    place: tuple[int, tuple[int, ...], tuple[int, ...]]

    def tensor(self) -> Tensor:
        storage = torch.UntypedStorage._new_with_weak_ptr(self.storage.cdata)  # type: ignore[attr-defined]
        if storage is None:
            raise CaptureError("a graph reads memory that was freed after its capture")
        return torch.empty(0, dtype=self.dtype, device=self.device).set_(storage, *self.place)


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operators: list[tuple[Any, Any, Any, list[Tensor | None]]] = []
        """Function, arguments, and results that are the graph's own memory; None for a view of other memory."""
        self._made: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        if name in DYNAMIC or (name in ("index", "index_put_") and any(map(_is_mask, tree_flatten(args[1])[0]))):
            _refuse(name)
        if function.namespace == "c10d" and not stand_in.lazy_collectives:
            _refuse(f"{name} without PT_HPU_ENABLE_LAZY_COLLECTIVES=true")
        kept = tree_map(self._kept, (args, kwargs or {}))
        result = _finished(function, function(*args, **(kwargs or {})))
        outputs = _tensors(result)
        given = {tensor.untyped_storage()._cdata for tensor in _tensors((args, kwargs))}
        self._made |= {tensor.untyped_storage()._cdata for tensor in outputs} - given
        own = [tensor if tensor.untyped_storage()._cdata in self._made else None for tensor in outputs]
        self.operators.append((function, *kept, own))
        return result

    def _kept(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or value.untyped_storage()._cdata in self._made:
            return value
        place = int(value.storage_offset()), tuple(value.shape), value.stride()
        return _Outside(StorageWeakRef(value.untyped_storage()), value.device, value.dtype, place)


def _is_mask(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype in (torch.bool, torch.uint8)


def _tensors(result: Any) -> list[Tensor]:
    return [each for each in tree_flatten(result)[0] if isinstance(each, Tensor)]


def _present(value: Any) -> Any:
    return value.tensor() if isinstance(value, _Outside) else value


def _finished(function: Callable[..., Any], result: Any) -> Any:
    """Wait for a collective, and give back another handle: gloo copies its result when it is waited for, again too."""
    if function.namespace != "c10d":  # type: ignore[attr-defined]
        return result
    work = result[-1] if isinstance(result, tuple) else result
    dist.Work.unbox(work).wait()  # type: ignore[attr-defined]
    done = FakeWork().boxed()
    return (*result[:-1], done) if isinstance(result, tuple) else done


class HPUGraph:
    def __init__(self) -> None:
        self._recorder = _Recorder()
        self._no_reads = _NoReads()
        self._is_captured = False

    def capture_begin(self, dry_run: bool = False) -> None:
        stand_in.calls.append(("capture_begin", {"dry_run": dry_run}))
        self._no_reads.__enter__()
        self._recorder.__enter__()

    def capture_end(self) -> None:
        self._recorder.__exit__(None, None, None)
        self._no_reads.__exit__(None, None, None)
        self._is_captured = True

    def replay(self, asynchronous: bool = False) -> None:
        assert self._is_captured, "nothing was captured"
        stand_in.calls.append(("replay", {"asynchronous": asynchronous}))
        for function, args, kwargs, outputs in self._recorder.operators:
            args, kwargs = tree_map(_present, (args, kwargs))
            result = _finished(function, function(*args, **kwargs))
            for old, new in zip(outputs, _tensors(result), strict=True):
                if old is not None and old.data_ptr() != new.data_ptr():
                    old.copy_(new)

    def reset(self) -> None:
        self._recorder, self._is_captured = _Recorder(), False


class graph:
    def __init__(self, hpu_graph: HPUGraph, stream: Any = None, dry_run: bool = False) -> None:
        self.hpu_graph, self.dry_run = hpu_graph, dry_run

    def __enter__(self) -> None:
        self.hpu_graph.capture_begin(self.dry_run)

    def __exit__(self, exc_type: Any, exc_value: Any, traceback: Any) -> None:
        self.hpu_graph.capture_end()
