"""Graphs: operators over fixed memory, run again as they were. Loaded in lazy mode alone, as the published ones are."""

from __future__ import annotations

from typing import Any

import torch
from habana_frameworks.torch import stand_in
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operators: list[tuple[Any, Any, Any, list[torch.Tensor]]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        self.operators.append((function, args, kwargs or {}, _tensors(result)))
        return result


def _tensors(result: Any) -> list[torch.Tensor]:
    return [each for each in tree_flatten(result)[0] if isinstance(each, torch.Tensor)]


class HPUGraph:
    def __init__(self) -> None:
        self._recorder = _Recorder()

    def capture_begin(self, dry_run: bool = False) -> None:
        stand_in.calls.append(("capture_begin", {"dry_run": dry_run}))
        self._recorder.__enter__()

    def capture_end(self) -> None:
        self._recorder.__exit__(None, None, None)

    def replay(self, asynchronous: bool = False) -> None:
        stand_in.calls.append(("replay", {"asynchronous": asynchronous}))
        for function, args, kwargs, outputs in self._recorder.operators:
            for old, new in zip(outputs, _tensors(function(*args, **kwargs)), strict=True):
                if old.data_ptr() != new.data_ptr():
                    old.copy_(new)

    def reset(self) -> None:
        self._recorder = _Recorder()


class graph:
    def __init__(self, hpu_graph: HPUGraph, stream: Any = None, dry_run: bool = False) -> None:
        self.hpu_graph, self.dry_run = hpu_graph, dry_run

    def __enter__(self) -> None:
        self.hpu_graph.capture_begin(self.dry_run)

    def __exit__(self, exc_type: Any, exc_value: Any, traceback: Any) -> None:
        self.hpu_graph.capture_end()
