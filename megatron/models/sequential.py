"""Declared layers as modules: DeepSpeed's layer list for a pipeline, and the same list in one process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import Tensor, nn

from megatron.models.attention.layer import Shared
from megatron.models.registry import family_of
from megatron.options.config import Config
from megatron.parallel.context import ParallelContext
from megatron.parallel.operators.fp8 import with_fp8
from megatron.parallel.operators.products import DTYPES
from megatron.parallel.shards import LayerDeclaration


class _Layer(LayerSpec):
    """A declared layer as DeepSpeed's LayerSpec."""

    def __init__(self, layer: LayerDeclaration, shared: Shared) -> None:
        LayerSpec.__init__(self, nn.Module)
        self.layer, self.shared = layer, shared

    def build(self, log: bool = False) -> nn.Module:
        module = self.layer.module(self.shared)
        if self.shared.offload is not None and self.layer.number is not None:
            self.shared.offload.watch(module)
        if self.shared.config.training.torch_compile and self.layer.number is not None:
            # the device's own backend: torch's default does not support HPU
            module.compile(backend=get_accelerator().get_compile_backend())
        return module


class _TiedLayer(_Layer, TiedLayerSpec):
    """A layer whose module several places of the pipeline hold; DeepSpeed sums its gradient over their stages."""

    def __init__(self, layer: LayerDeclaration, shared: Shared) -> None:
        super().__init__(layer, shared)
        self.key = _tied_key(layer.name)
        self.forward_fn = layer.project
        self.tied_weight_attr = ["weight"]


def build_layers(
    config: Config, ctx: ParallelContext, *, packs_documents: bool = False, trains: bool = True
) -> list[LayerSpec]:
    """The model as a list of layers, not yet allocated."""
    layers = family_of(config).layers(config)
    shared = Shared(config, ctx, packs_documents=packs_documents, trains=trains)
    if trains and config.fp8.uses_fp8:
        layers = with_fp8(layers, config)
    names = [layer.name for layer in layers]
    return [(_TiedLayer if names.count(layer.name) > 1 else _Layer)(layer, shared) for layer in layers]


def module_names(layers: Sequence[str]) -> list[str]:
    """Return the names that DeepSpeed's PipelineModule gives the modules of these layers, in order.

    They are `<index of the layer>`, and `tied_modules.<key>` for a layer that is listed twice.
    """
    return [
        f"tied_modules.{_tied_key(layer)}" if layers.count(layer) > 1 else str(index)
        for index, layer in enumerate(layers)
    ]


def _tied_key(layer: str) -> str:
    return layer.replace(".", "_")  # the name of a submodule


class SequentialModel(nn.Module):
    """The list of layers in one process, in modules named as PipelineModule names them: `module_names`."""

    def __init__(self, specs: Sequence[LayerSpec]) -> None:
        super().__init__()
        self.tied_modules = nn.ModuleDict()
        self._names: list[str] = []
        for index, spec in enumerate(specs):
            name = str(index)
            if isinstance(spec, TiedLayerSpec):
                name = f"tied_modules.{spec.key}"
                if spec.key not in self.tied_modules:
                    self.tied_modules[spec.key] = spec.build()
            else:
                self.add_module(name, spec.build())
            self._names.append(name)

    def forward(self, inputs: Any, project: Callable[[tuple[Tensor, Tensor]], Any]) -> Any:
        """Return project((hidden, output weight)), called inside the last layer."""
        *body, last = (self.get_submodule(name) for name in self._names)
        for layer in body:
            inputs = layer(inputs)
        return last(inputs, project)


def compute_dtype(config: Config) -> torch.dtype:
    return DTYPES[config.training.precision]


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Create tensors in this dtype by default."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
