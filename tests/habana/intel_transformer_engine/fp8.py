"""The state of fp8 in a process: switched on in a context, with maxima reduced over the ranks of a group."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from habana_frameworks.torch import stand_in

from .recipe import DelayedScaling
from .scales import FP8TensorMeta


class FP8GlobalStateManager:
    """Maxima are reduced once a context: those of the forward pass at its end, of backward passes at the next start."""

    depth = 0
    enabled = False
    recipe = DelayedScaling()
    group: Any = None
    forward: ClassVar[list[FP8TensorMeta]] = []
    backward: ClassVar[list[FP8TensorMeta]] = []

    @classmethod
    def reset_global_state(cls) -> None:
        cls.depth, cls.enabled, cls.recipe, cls.group = 0, False, DelayedScaling(), None
        cls.forward, cls.backward = [], []

    @classmethod
    def reduce(cls, measured: list[FP8TensorMeta]) -> None:
        if cls.recipe.reduce_amax and measured and dist.is_initialized() and dist.get_world_size(cls.group) > 1:
            newest = torch.cat([meta.amax_history[0] for meta in measured])
            dist.all_reduce(newest, op=dist.ReduceOp.MAX, group=cls.group)
            stand_in.calls.append(("reduce_amax", {"tensors": len(newest)}))
            for meta, amax in zip(measured, newest.split([meta.scale.numel() for meta in measured]), strict=True):
                meta.amax_history[0] = amax
        measured.clear()


@contextlib.contextmanager
def fp8_autocast(
    enabled: bool = False,
    force_measurement: bool | None = None,
    fp8_recipe: DelayedScaling | None = None,
    fp8_group: Any = None,
) -> Iterator[None]:
    assert force_measurement is None, "the stand-in measures by the recipe's interval alone"
    state = FP8GlobalStateManager
    before = state.enabled, state.recipe, state.group
    stand_in.calls.append(("fp8_autocast", {"enabled": enabled, "recipe": fp8_recipe, "group": fp8_group}))
    state.enabled, state.recipe, state.group = enabled, fp8_recipe or DelayedScaling(), fp8_group
    if state.depth == 0 and enabled:
        state.reduce(state.backward)
    state.depth += 1
    try:
        yield
    finally:
        state.depth -= 1
        if state.depth == 0 and enabled:
            state.reduce(state.forward)
        state.enabled, state.recipe, state.group = before
