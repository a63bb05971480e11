"""The move of each parameter in a step. Runs inside the ranks of tests/ranks.py."""

from __future__ import annotations

from typing import Any

from megatron.options.schedule import Schedule
from megatron.training.engine import Engine
from tests.training import layouts


def weights_of(engine: Engine) -> list[tuple[str, int, Any]]:
    """(name, start, float32 copy) of each slice that this rank updates."""
    return [(owned.name, owned.start, owned.weight.clone()) for owned in engine.state.owned(with_frozen=False)]


def rates_in_effect(arguments: str, consumed_samples: int) -> dict[str, float]:
    """Largest move of each parameter in one step of Adam without decay, which is its learning rate.

    The first step moves a number by lr g / (|g| + eps), whatever its gradient g.
    """
    engine, task = layouts.build(f"{arguments} --weight-decay 0 --adam-eps 1e-30")
    schedule = Schedule(engine.config.training, engine.config.optimizer)
    before = weights_of(engine)
    engine.train_step(
        layouts.step_batches(engine, task, 0),
        num_microbatches=layouts.num_microbatches(engine),
        consumed_samples=consumed_samples,
        lr=schedule.learning_rate(consumed_samples),
        decoupled_lr=schedule.decoupled_learning_rate(consumed_samples),
        weight_decay=schedule.weight_decay(consumed_samples),
    )
    moves: dict[str, float] = {}
    for (name, _, old), (_, _, new) in zip(before, weights_of(engine), strict=True):
        moves[name] = max(moves.get(name, 0.0), float((new.double() - old.double()).abs().max()))
    return moves
