"""State of Megatron-LM's optimizers, which number their parameters: which tensor of the model each number is.

A group holds the numbers of parameters of one weight decay, in the order of the model: matrices, then vectors, which do
not decay. The shapes of all states must fit this order, and each float32 weight must round to the model's own.
Source: NVIDIA/Megatron-LM, megatron/core/optimizer/{__init__,optimizer}.py
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.checkpoint.format import CheckpointError
from megatron.options.optimizer import STATES
from megatron.weights.foreign_files import ForeignFiles, dense
from megatron.weights.megatron_lm.distributed_optimizer import FILE, Buffers, flat_states
from megatron.weights.megatron_lm.files import RankContent
from megatron.weights.megatron_lm.names import OptimizerError, TensorPlace

REMEDY = "start from its weights alone: --no-load-optim goes on from its iteration, --finetune begins a run"
MAIN_WEIGHTS = ("fp32_from_fp16_params", "fp32_from_fp16")
"""Key of the float32 weights, by release."""


@dataclass(frozen=True)
class RankState:
    """Optimizer state of one rank."""

    tensors: Mapping[TensorPlace, Mapping[str, Tensor]]
    """By kind. `weight`, in float32, where the model's own is rounded."""
    step: float | None
    loss_scaler: Mapping[str, float]
    """DeepSpeed's names of its numbers; empty: none."""
    path: Path
    """File that holds it."""


def rank_state(rank: RankContent, files: ForeignFiles, buffers: Buffers) -> RankState | None:
    """Return the optimizer's state of a rank; None: it was saved without. Raises OptimizerError, CheckpointError.

    `buffers`: where the distributed optimizer keeps each parameter.
    """
    content = rank.content.get("optimizer")
    if content is None:
        return None
    if not isinstance(content, dict):
        raise OptimizerError(f"{rank.path} holds several optimizers, as models with experts have them")
    # the optimizer of float32 models has no wrapper
    inner = content if "param_groups" in content else content.get("optimizer", content.get("optimizer_state_dict"))
    if not isinstance(inner, dict):
        raise OptimizerError(f"{rank.path} holds an optimizer without a state")
    groups = inner.get("param_groups")
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        raise OptimizerError(f"{rank.path} holds an optimizer without parameter groups")
    states = inner.get("state")
    scaler = _loss_scaler(content.get("grad_scaler"))
    if not isinstance(states, dict):
        flat = flat_states(rank, files, buffers)
        return RankState(flat, _step(groups, {}), scaler, rank.path.parent / FILE)
    tensors = dict(_tensors(rank, groups, states, _main_weights(content, groups, rank.path)))
    if not any(set(kinds) - {"weight"} for kinds in tensors.values()):
        return None  # saved before its first step
    return RankState(tensors, _step(groups, states), scaler, rank.path)


def _main_weights(content: Mapping[str, Any], groups: Sequence[Any], path: Path) -> list[Any] | None:
    key = next((key for key in MAIN_WEIGHTS if key in content), None)
    if key is None:
        return None
    main = content[key]
    if not isinstance(main, list) or len(main) != len(groups) or not all(isinstance(group, list) for group in main):
        raise OptimizerError(f"{path} holds {key} that does not fit its {len(groups)} parameter groups")
    return main


def _tensors(
    rank: RankContent, groups: Sequence[Mapping[str, Any]], states: Mapping[Any, Any], main: Sequence[list[Any]] | None
) -> Iterator[tuple[TensorPlace, dict[str, Tensor]]]:
    """Yield the state of each parameter of the rank."""
    model = {
        TensorPlace(number, name): tensor for number, chunk in enumerate(rank.chunks) for name, tensor in chunk.items()
    }
    waiting = [
        [place for place, tensor in model.items() if tensor.dim() > 1],
        [place for place, tensor in model.items() if tensor.dim() <= 1],
        # one group of all, as of runs that let all weights decay alike
        list(model),
    ]
    named: set[TensorPlace] = set()
    for index, numbers in _numbered(groups, rank.path):
        weights = None if main is None else main[index]
        kept = [_states_of(states.get(number), rank.path) for number in numbers]
        members = next((each for each in waiting if _fits(each, model, kept, weights)), None)
        if members is None or not named.isdisjoint(members):
            raise OptimizerError(
                f"{rank.path}: parameter group {index} of the optimizer, of {len(numbers)} tensors, is neither the "
                "matrices of the model nor its vectors, in their order (frozen parameters or a learning rate of "
                "their own make such groups)"
            )
        named.update(members)
        yield from zip(members, _with_weights(members, model, kept, weights, rank.path), strict=True)
    if missing := [place.name for place in model if place not in named]:
        raise OptimizerError(f"{rank.path}: the optimizer has no state of {missing[0]} ({len(missing)} such)")


def _numbered(groups: Sequence[Mapping[str, Any]], path: Path) -> Iterator[tuple[int, list[Any]]]:
    """Yield the number of each group, and those of its parameters."""
    for index, group in enumerate(groups):
        numbers = group.get("params")
        if not isinstance(numbers, list):
            raise OptimizerError(f"{path} holds a parameter group without its parameters")
        # ranks have the groups of all ranks, also those of which they have no parameter
        if numbers:
            yield index, numbers


def _states_of(state: Any, path: Path) -> dict[str, Tensor]:
    if not isinstance(state, dict):
        return {}
    return {kind: dense(state[kind], path, kind) for kind in STATES if isinstance(state.get(kind), Tensor)}


def _fits(
    members: Sequence[TensorPlace],
    model: Mapping[TensorPlace, Tensor],
    kept: Sequence[Mapping[str, Tensor]],
    weights: Sequence[Any] | None,
) -> bool:
    """Return True if the states have the shapes of these parameters, in their order."""
    if len(members) != len(kept):
        return False
    shapes = [model[place].shape for place in members]
    for shape, states in zip(shapes, kept, strict=True):
        if any(tensor.shape != shape for tensor in states.values()):
            return False
    if weights is None:
        return True
    rounded = [model[place].shape for place in members if model[place].dtype != torch.float32]
    return [getattr(tensor, "shape", None) for tensor in weights] == rounded


def _with_weights(
    members: Sequence[TensorPlace],
    model: Mapping[TensorPlace, Tensor],
    kept: Sequence[dict[str, Tensor]],
    weights: Sequence[Any] | None,
    path: Path,
) -> Iterator[dict[str, Tensor]]:
    remaining = iter(weights or ())
    for place, states in zip(members, kept, strict=True):
        # float32 parameters of a 16-bit model are their own
        if weights is None or model[place].dtype == torch.float32:
            yield states
        else:
            yield {"weight": dense(next(remaining), path, f"float32 weights of {place.name}"), **states}


def _step(groups: Sequence[Mapping[str, Any]], states: Mapping[Any, Any]) -> float | None:
    """Return the number of steps: torch counts them for each parameter, NVIDIA's optimizers for each group."""
    counted = [state.get("step") for state in states.values() if isinstance(state, dict)]
    numbers = [_number(value) for value in [*counted, *(group.get("step") for group in groups)]]
    return max((number for number in numbers if number is not None), default=None)


def _loss_scaler(content: Any) -> dict[str, float]:
    if not isinstance(content, dict) or (scale := _number(content.get("scale"))) is None:
        return {}
    numbers = {"cur_scale": scale}
    # DeepSpeed counts from the step after the last overflow
    tracker = _number(content.get("growth_tracker"))
    if tracker is not None:
        numbers |= {"cur_iter": int(tracker), "last_overflow_iter": -1}
    hysteresis = _number(content.get("hysteresis_tracker"))
    return numbers if hysteresis is None else {**numbers, "cur_hysteresis": int(hysteresis)}


def _number(value: Any) -> float | None:
    if isinstance(value, Tensor):
        return float(value) if value.numel() == 1 else None
    return float(value) if isinstance(value, int | float) else None


def check_kinds(states: Sequence[RankState]) -> tuple[str, ...]:
    """Return the kinds of moments that all parameters of all ranks have. Raises CheckpointError."""
    held = {frozenset(set(kinds) - {"weight"}) for state in states for kinds in state.tensors.values()}
    if len(held) != 1:
        raise CheckpointError(
            f"{states[0].path.parent.parent} has other kinds of optimizer state of some parameters than of others; "
            f"copy the whole checkpoint, or {REMEDY}"
        )
    (kinds,) = held
    return tuple(kind for kind in STATES if kind in kinds)
