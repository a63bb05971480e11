"""Start of the adapters' parameters that follow from the base model's weights."""

from __future__ import annotations

import contextlib
from typing import Any

import deepspeed
from torch import Tensor, nn

from megatron.config.options import Config
from megatron.training.state import EngineState


def start_from_base(module: nn.Module, state: EngineState, config: Config) -> None:
    """Set what depends on the base's weights, once these are there: DoRA's magnitudes. Collective."""
    found: dict[str, Tensor] = {}
    for layer in module.modules():
        method: Any = getattr(layer, "method", None) or getattr(layer, "adapters", None)
        if not getattr(method, "starts_from_base", False):
            continue
        whole = contextlib.nullcontext()
        if config.optimizer.zero_stage == 3:
            whole = deepspeed.zero.GatheredParameters(list(layer.parameters(recurse=False)))
        with whole:
            values = method.start(layer)
        found |= {layer.get_parameter(name).full_name: value for name, value in values.items()}  # type: ignore[attr-defined]
    state.set_weights(found)
