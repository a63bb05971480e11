"""Trainings that keep an average of their weights. Runs inside the ranks of tests/ranks.py."""

from __future__ import annotations

from typing import Any

from megatron.checkpoint.reader import newest_checkpoint
from megatron.options.progress import Progress
from megatron.training.guard import restore_whole
from tests.training import layouts, planted

Numbers = dict[str, Any]
"""Of this rank's slices, by name: float64 arrays."""


def weights_of(engine: Any) -> Numbers:
    owned = engine.state.owned(with_frozen=False)
    return {each.name: each.weight.double().numpy().copy() for each in owned if each.is_saved_here}


def averages_of(engine: Any) -> Numbers:
    found = {name: engine.state.average.of(name) for name in weights_of(engine)}
    return {name: average.double().cpu().numpy().copy() for name, average in found.items()}


def by_hand(arguments: str, steps: int, decay: float, interval: int) -> tuple[float, float]:
    """Largest distance of the average after so many steps from the recurrence in float64, and from the last weights."""
    engine, task = layouts.build(f"{arguments} --ema-decay {decay} --ema-interval {interval}")
    expected = weights_of(engine)
    for step in range(steps):
        layouts.loss_of_step(engine, task, step)
        if (step + 1) % interval == 0:
            now = weights_of(engine)
            expected = {name: decay * old + (1 - decay) * now[name] for name, old in expected.items()}
    found, last = averages_of(engine), weights_of(engine)
    assert found.keys() == expected.keys()
    return (
        max(float(abs(found[name] - value).max()) for name, value in expected.items()),
        max(float(abs(found[name] - value).max()) for name, value in last.items()),
    )


def train_and_save(arguments: str, first: int, last: int, folder: str) -> int:
    """Train steps [first, last) and save, having resumed if first is not 0. Return the numbers kept on this rank."""
    engine, task = layouts.build(f"{arguments} --save {folder}")
    if first:
        assert layouts.resume(engine) == first
    for step in range(first, last):
        layouts.loss_of_step(engine, task, step)
    layouts.save(engine, last)
    return sum(average.size for average in averages_of(engine).values())


def after_a_bad_step(arguments: str) -> tuple[bool, bool, bool, list[int]]:
    """Whether a good step moves the average, whether one of NaN does, whether one whose update is refused does, and the
    steps that the record counts after each."""
    engine, task = layouts.build(arguments)
    average = engine.state.average
    assert average is not None
    layouts.loss_of_step(engine, task, 0)
    moved, counts = [], []

    def note(before: Numbers) -> None:
        after = averages_of(engine)
        moved.append(any((before[name] != after[name]).any() for name in before))
        counts.append(average.record()["steps"])

    before = averages_of(engine)
    layouts.loss_of_step(engine, task, 1)
    note(before)
    before = averages_of(engine)
    with planted.nan_gradient(engine, 0, "layers.0.mlp.down.weight"):
        layouts.loss_of_step(engine, task, 2)
    note(before)
    before = averages_of(engine)
    batches = layouts.step_batches(engine, task, 3)
    engine.run_without_update(batches, num_microbatches=layouts.num_microbatches(engine), consumed_samples=24)
    note(before)
    return moved[0], moved[1], moved[2], counts


def after_a_rollback(arguments: str, folder: str) -> tuple[bool, bool]:
    """Whether two steps after a save move the average, and whether a rollback to it brings that of the save back."""
    engine, task = layouts.build(f"{arguments} --save {folder}")
    for step in range(3):
        layouts.loss_of_step(engine, task, step)
    layouts.save(engine, 3)
    saved, record = averages_of(engine), engine.state.average.record()  # type: ignore[union-attr]
    for step in range(3, 5):
        layouts.loss_of_step(engine, task, step)
    moved = averages_of(engine)
    checkpoint = newest_checkpoint(folder)
    assert checkpoint is not None
    restore_whole(engine, checkpoint, Progress(iteration=3, consumed_samples=24))
    back = averages_of(engine)
    is_back = all((back[name] == value).all() for name, value in saved.items())
    assert engine.state.average.record() == record  # type: ignore[union-attr]
    return any((moved[name] != value).any() for name, value in saved.items()), is_back
