"""Activations in host memory: what transformer layers keep between their forward and their backward pass.

The copies run on a stream of their own. What a layer keeps leaves the device while the next layer computes, and comes
back while the layer behind it computes its gradients, so two layers of a stage are on the device at a time.
Prior art: torchtune's OffloadActivations, TransformerEngine's CPU offload.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from megatron.runtime.devices import device_of

SMALLEST = 2**18
"""Bytes of a memory below which it stays: to start a copy takes as long as to copy so much."""


class _Memory:
    """A memory that a layer keeps, on the device or on the host."""

    def __init__(self, layer: _LayerPass, numbers: Tensor) -> None:
        self.layer = layer
        self.on_device: Tensor | None = numbers
        """All its numbers, [n]."""
        self.dtype, self.num_bytes = numbers.dtype, numbers.nbytes
        self.buffer: Tensor | None = None
        """Pinned memory for a copy, as bytes."""

    @property
    def on_host(self) -> Tensor:
        # from the start of the buffer: HPU takes no other address for pinned
        assert self.buffer is not None
        return self.buffer[: self.num_bytes].view(self.dtype)


class _View(NamedTuple):
    """Stands for a tensor among those that autograd keeps."""

    memory: _Memory
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int | torch.SymInt


class _LayerPass:
    """Memories that a layer keeps of one microbatch. Autograd owns them."""

    def __init__(self, before: _LayerPass | None) -> None:
        self.before = before
        """The layer before it in the same pass, whose backward pass is the next."""
        self.memories: dict[int, weakref.ref[_Memory]] = {}
        """By storage; none once its backward pass is near."""
        self.output: weakref.ref[Tensor] | None = None
        self.copied: Any = None
        """Event after the last copy, to the host or back."""
        self.is_open = False
        """Its backward pass has begun."""

    def alive(self) -> Iterator[_Memory]:
        """Yield the memories that a backward pass still needs."""
        for reference in self.memories.values():
            memory = reference()
            if memory is not None:
                yield memory


class Offload:
    """Moves what the layers of a stage keep to pinned host memory and back, without a wait of the host."""

    def __init__(self, device: torch.device) -> None:
        record = device_of(device.type)
        self._device, self._accelerator = device, get_accelerator()
        self._launch = record.mark_step if record.is_lazy() else None
        self._stream = self._accelerator.Stream()
        self._buffers = _PinnedBuffers()
        self._seen: dict[int, StorageWeakRef] = {}
        """Storages that were moved, and are alive."""
        self._weights: frozenset[int] = frozenset()
        """Storages of the weights of the layer that computes now."""
        self._current: _LayerPass | None = None
        self._newest: _LayerPass | None = None
        """The last layer that computed: it stays until another does, since its own backward pass may come next."""
        self._leaving: _LayerPass | None = None
        """The layer whose copies to the host run."""

    def watch(self, module: nn.Module) -> None:
        """Move what the forward passes of a layer keep."""
        forward = module.forward
        weights: list[Tensor] = []

        # torch.compile cannot trace the hooks; the layer inside it still compiles
        @torch._disable_dynamo(recursive=False)  # type: ignore[untyped-decorator]
        def run(stream: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(stream)
            # engines give weights their final memory after the layers are built, and ZeRO-3 in each pass
            if not weights:
                weights.extend([*module.parameters(), *module.buffers()])
            self._weights = frozenset(weight.untyped_storage()._cdata for weight in weights)
            layer = self._begin(_hidden(stream))
            try:
                with torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack):
                    result = forward(stream)
            finally:
                self._current = None
            layer.output, self._newest = weakref.ref(_hidden(result)), layer
            return result

        module.forward = run

    @torch._disable_dynamo  # type: ignore[untyped-decorator]
    def pack(self, tensor: Tensor) -> Any:
        """Return what autograd is to keep in place of a tensor: itself, if it stays on the device."""
        layer = self._current
        if layer is None or tensor.device.type != self._device.type:
            return tensor
        # a leaf's gradient is read from it, by an optimizer or a pipeline: it is held elsewhere too
        if tensor.is_leaf and tensor.requires_grad:
            return tensor
        # under ZeRO-3 a weight and its views are gathered again
        if isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter):
            return tensor
        storage = tensor.untyped_storage()
        if storage.nbytes() < SMALLEST or storage._cdata in self._weights:
            return tensor
        memory = self._memory_of(storage, tensor, layer)
        if memory is None:
            return tensor
        return _View(memory, tensor.dtype, tensor.size(), tensor.stride(), tensor.storage_offset())

    @torch._disable_dynamo  # type: ignore[untyped-decorator]
    def unpack(self, packed: Any) -> Tensor:
        """Return the tensor that `pack` was given."""
        if isinstance(packed, Tensor):
            return packed
        memory, dtype, size, stride, offset = packed
        if not memory.layer.is_open:
            self._open(memory.layer)
        numbers = memory.on_device
        assert numbers is not None
        if numbers.dtype != dtype:
            numbers = numbers.view(dtype)
        return numbers.as_strided(size, stride, offset)

    def _memory_of(self, storage: torch.UntypedStorage, tensor: Tensor, layer: _LayerPass) -> _Memory | None:
        """Return the memory under a tensor; None if several layers keep it, as they do rotary tables and masks."""
        key = storage._cdata
        if key in layer.memories:
            memory = layer.memories[key]()
            # a layer that is frozen may keep nothing after all
            if memory is not None:
                return memory
        elif key in self._seen and not self._seen[key].expired():
            return None
        # the whole memory, which autograd would keep for any view of it; views of one memory share the copy
        numbers = tensor.detach().as_strided((storage.nbytes() // tensor.element_size(),), (1,), 0)
        memory = _Memory(layer, numbers)
        layer.memories[key], self._seen[key] = weakref.ref(memory), StorageWeakRef(storage)
        return memory

    # Forward pass

    def _begin(self, hidden: Tensor) -> _LayerPass:
        """Begin the forward pass of a layer, and the copies of the one before it."""
        before = self._newest
        if before is not None and (before.output is None or before.output() is not hidden):
            before = None  # it is of another microbatch, or of another chunk
        self._advance()
        self._current = _LayerPass(before)
        return self._current

    def _advance(self) -> None:
        """Free what has left the device, and begin to move what the last layer keeps."""
        leaving, self._leaving, self._newest = self._leaving, self._newest, None
        if leaving is not None:
            # later operators may take its memory
            self._accelerator.current_stream().wait_event(leaving.copied)
            for memory in leaving.alive():
                memory.on_device = None
            self._seen = {key: reference for key, reference in self._seen.items() if not reference.expired()}
        if self._leaving is not None:
            self._copy_out(self._leaving)

    def _copy_out(self, layer: _LayerPass) -> None:
        if self._launch is not None:
            self._launch()  # else the first copy would launch the layer on the copies' stream
        self._stream.wait_stream(self._accelerator.current_stream())
        with self._accelerator.stream(self._stream):
            for memory in layer.alive():
                assert memory.on_device is not None
                memory.buffer = self._buffers.take(memory.num_bytes)
                memory.on_host.copy_(memory.on_device, non_blocking=True)
        layer.copied = self._stream.record_event()

    # Backward pass

    def _open(self, layer: _LayerPass) -> None:
        """Begin the backward pass of a layer: have what it keeps on the device, and fetch the next one's."""
        layer.is_open = True
        for near in (layer, layer.before):
            if near is not None:
                self._keep(near)
        # of another microbatch, whose forward pass came between
        self._advance()
        self._fetch(layer)
        if layer.copied is not None:
            self._accelerator.current_stream().wait_event(layer.copied)
        if layer.before is not None:
            self._fetch(layer.before)
            layer.before = None

    def _keep(self, layer: _LayerPass) -> None:
        """Leave what a layer keeps on the device, if it is still there."""
        if layer is self._newest:
            self._newest = None
        if layer is self._leaving:
            self._leaving = None
            for memory in layer.alive():
                self._buffers.give_back(memory)

    def _fetch(self, layer: _LayerPass) -> None:
        """Begin to copy what a layer keeps to the device, unless it is there."""
        away = [memory for memory in layer.alive() if memory.on_device is None]
        layer.memories.clear()
        if not away:
            return
        for memory in away:
            memory.on_device = torch.empty_like(memory.on_host, device=self._device)
        # the memory was last used by operators before
        self._stream.wait_stream(self._accelerator.current_stream())
        with self._accelerator.stream(self._stream):
            for memory in away:
                assert memory.on_device is not None
                memory.on_device.copy_(memory.on_host, non_blocking=True)
                self._buffers.give_back(memory)
        layer.copied = self._stream.record_event()


class _PinnedBuffers:
    """Pinned memory, allocated where none is free, and used again by later copies of the same stream."""

    def __init__(self) -> None:
        self.free: list[Tensor] = []

    def take(self, num_bytes: int) -> Tensor:
        """Return the smallest free buffer of the size or up to twice of it, or a new one."""
        fitting = [buffer for buffer in self.free if num_bytes <= buffer.nbytes <= 2 * num_bytes]
        if fitting:
            taken = min(fitting, key=lambda buffer: buffer.nbytes)
            self._remove(taken)
            return taken
        # it takes the place of those that shorter rows have left
        short = [buffer for buffer in self.free if buffer.nbytes < num_bytes <= 2 * buffer.nbytes]
        freed = 0
        while short and freed < num_bytes:
            freed += short[-1].nbytes
            self._remove(short.pop())
        return get_accelerator().pin_memory(torch.empty(num_bytes, dtype=torch.uint8, device="cpu"))

    def give_back(self, memory: _Memory) -> None:
        assert memory.buffer is not None
        self.free.append(memory.buffer)
        memory.buffer = None

    def _remove(self, buffer: Tensor) -> None:
        self.free = [other for other in self.free if other is not buffer]


def _hidden(stream: Any) -> Tensor:
    """Return the hidden state of what flows between layers."""
    hidden: Tensor = stream if isinstance(stream, Tensor) else stream[0]
    return hidden
