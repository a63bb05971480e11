"""Which function gives the layers of which architecture."""

from __future__ import annotations

from collections.abc import Callable

from deepspeed.pipe import LayerSpec

from megatron.config.options import Config
from megatron.models.families import bloom, llama
from megatron.parallel.context import ParallelContext

ARCHITECTURES: dict[str, Callable[[Config, ParallelContext], list[LayerSpec]]] = {
    "bloom": bloom.layers,
    "llama": llama.layers,
}


def build_layers(config: Config, ctx: ParallelContext) -> list[LayerSpec]:
    """The model as a list of layers, not yet allocated."""
    return ARCHITECTURES[config.model.architecture](config, ctx)
