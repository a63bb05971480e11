"""Runs on the device `hpu` of the stand-in, with what their activations take of it. Inside the ranks of `hpu_ranks`."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron.models import offload
from megatron.training.engine import Engine
from tests.habana import devices

SMALLEST = 2048


@dataclass
class Step:
    """What a rank saw of a step."""

    peak: int = 0
    """Most bytes of tensors on the device that the step has made."""
    buffers: int = 0
    """Bytes of free pinned buffers after it."""
    moved: int = 0
    """Bytes copied to the host."""


class _Alive(TorchDispatchMode):
    """Counts the bytes of what operators return on the device, for as long as it is alive."""

    def __init__(self) -> None:
        super().__init__()
        self._sizes: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        results = func(*args, **(kwargs or {}))
        made = {}
        for leaf in tree_leaves(results):
            if isinstance(leaf, Tensor) and leaf.device.type == "hpu":
                storage = leaf.untyped_storage()
                if storage._cdata not in given:
                    made[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        if made:
            self._sizes = {key: held for key, held in self._sizes.items() if not held[0].expired()} | made
            self.peak = max(self.peak, sum(size for _, size in self._sizes.values()))
        return results


def train(arguments: str, *, lazy: bool = True) -> tuple[str, list[Counter[str]], list[Step]]:
    """Return the fault of a run, the calls of each step, and what the rank saw of it."""
    steps: list[Step] = []
    made: list[offload.Offload] = []
    train_step, build, copy_out = Engine.train_step, offload.Offload.__init__, offload.Offload._copy_out

    def stepped(engine: Engine, *batches: Any, **options: Any) -> Any:
        steps.append(Step())
        with _Alive() as alive:
            result = train_step(engine, *batches, **options)
        steps[-1].peak = alive.peak
        steps[-1].buffers = sum(buffer.nbytes for each in made for buffer in each._buffers.free)
        return result

    def built(self: offload.Offload, device: torch.device) -> None:
        build(self, device)
        made.append(self)

    def copied(self: offload.Offload, layer: Any) -> None:
        copy_out(self, layer)
        steps[-1].moved += sum(memory.num_bytes for memory in layer.alive())

    with (
        patch.object(offload, "SMALLEST", SMALLEST),
        patch.object(Engine, "train_step", stepped),
        patch.object(offload.Offload, "__init__", built),
        patch.object(offload.Offload, "_copy_out", copied),
    ):
        fault, _, calls = devices.train(arguments, lazy=lazy)
    return fault, calls, steps


class _Keeps(torch.autograd.Function):
    """Keeps what it is given."""

    @staticmethod
    def forward(function: Any, hidden: Tensor, *others: Tensor) -> Tensor:
        function.save_for_backward(hidden, *others)
        return hidden + 1

    @staticmethod
    def backward(function: Any, grad: Tensor) -> Any:
        hidden, *others = function.saved_tensors
        return grad * hidden.sum() * sum(other.sum() for other in others), *[None] * len(others)


class _Layer(nn.Module):
    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.weight, self.table = nn.Parameter(torch.ones(32, 32, device="hpu")), table

    def forward(self, hidden: Tensor) -> Tensor:
        made = hidden * 2
        small = made[0, :4].clone()
        return _Keeps.apply(hidden, made, made.t(), small, self.weight, self.weight.t(), self.table)


def moved_by_layers() -> tuple[list[list[bool]], bool]:
    """Return whether each tensor that two layers keep moves, and whether gradients are those without that."""
    with devices.on_hpu(lazy=False), patch.object(offload, "SMALLEST", 1024):
        table = torch.rand(32, 32).to("hpu")
        layers = [_Layer(table) for _ in range(3)]
        moved: list[list[bool]] = []
        pack, gradients = offload.Offload.pack, []
        for mover in (None, offload.Offload(torch.device("hpu"))):
            if mover is not None:
                for layer in layers:
                    mover.watch(layer)

            def noted(self: Any, tensor: Tensor) -> Any:
                packed = pack(self, tensor)
                moved[-1].append(packed is not tensor)
                return packed

            hidden = start = torch.rand(32, 32, generator=torch.Generator().manual_seed(0)).to("hpu").requires_grad_()
            with patch.object(offload.Offload, "pack", noted):
                for layer in layers:
                    moved.append([])
                    hidden = layer(hidden)
                hidden.sum().backward()
            assert start.grad is not None
            gradients.append(start.grad)
        return moved[len(layers) :], torch.equal(*gradients)
