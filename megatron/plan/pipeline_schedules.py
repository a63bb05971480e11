"""Pipeline schedules: the order in which each stage computes, its messages, and the time that it waits. No torch.

p stages, m microbatches, v chunks a stage. The model is cut into p x v virtual stages: chunk c of stage s is virtual
stage c x p + s, so that a microbatch goes round the stages v times.

1f1b            Narayanan et al. 2021 (arXiv:2104.04473), section 2.2.1
interleaved     the same, section 2.2.2, for any number of microbatches: the last round of p may be incomplete
zero-bubble     ZB-H1 of Qi et al. 2023 (arXiv:2401.10241): the gradients of weights are computed apart from those of
                inputs, on stage s as many microbatches later as there are stages before it
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import NamedTuple


class PassKind(Enum):
    """Computation of one microbatch in one chunk."""

    FORWARD = "forward"
    BACKWARD = "backward"
    """Gradients of inputs and weights."""
    INPUT = "input"
    """Gradients of inputs, and of what is not deferred."""
    WEIGHT = "weight"
    """Deferred gradients of weights."""


class Message(Enum):
    """Communication of one microbatch at the edge of one chunk. What is posted or sent runs in the background."""

    POST_ACTIVATION = "post activation"
    WAIT_ACTIVATION = "wait activation"
    SEND_ACTIVATION = "send activation"
    POST_GRAD = "post grad"
    WAIT_GRAD = "wait grad"
    SEND_GRAD = "send grad"


class Action(NamedTuple):
    kind: PassKind
    chunk: int
    microbatch: int


class Instruction(NamedTuple):
    kind: PassKind | Message
    chunk: int
    microbatch: int


class Timed(NamedTuple):
    """A pass in a timeline."""

    stage: int
    action: Action
    start: float
    end: float


COSTS: Mapping[PassKind, float] = {PassKind.FORWARD: 1, PassKind.BACKWARD: 2, PassKind.INPUT: 1, PassKind.WEIGHT: 1}
"""Costs of matrix products: each gradient takes as long as the forward pass."""


class PipelineSchedule(NamedTuple):
    """A schedule and its sizes."""

    name: str
    """1f1b, interleaved, zero-bubble, or forward: the forward passes alone, of an evaluation."""
    num_stages: int
    num_microbatches: int
    num_chunks: int = 1
    """Number on each stage."""

    def order(self, stage: int) -> list[Action]:
        """Return the passes of a stage."""
        p, m, v = self.num_stages, self.num_microbatches, self.num_chunks
        forward = [
            Action(PassKind.FORWARD, chunk, first + index)
            for first in range(0, m, p)
            for chunk in range(v)
            for index in range(p)
        ]
        defers = self.name == "zero-bubble"
        kind, lag = (PassKind.INPUT, stage) if defers else (PassKind.BACKWARD, 0)
        backward = [Action(kind, v - 1 - action.chunk, action.microbatch) for action in forward]
        weight = [action._replace(kind=PassKind.WEIGHT) for action in backward] if defers else []
        ahead = p - stage - 1 if v == 1 else 2 * (p - stage - 1) + (v - 1) * p
        if self.name == "forward":
            backward, ahead = [], len(forward)
        found = forward[:ahead]
        for index, action in enumerate(backward):
            found += forward[ahead + index : ahead + index + 1]
            found.append(action)
            found += weight[index - lag : index - lag + 1] if index >= lag else []
        found += weight[max(0, len(weight) - lag) :]
        # the passes that would complete the last round are left out, which keeps every other in a possible order
        return [action for action in found if action.microbatch < m]

    def timeline(self, costs: Mapping[PassKind, float] = COSTS) -> list[Timed]:
        """Return every pass with its times, each stage's in order, in the unit of the costs of a chunk's passes.

        A stage starts a pass as soon as it is free and the pass before it in the model has ended; messages take no
        time. Raises ValueError if no stage could go on.
        """
        ends: dict[tuple[PassKind, int, int], float] = {}
        orders = [self.order(stage) for stage in range(self.num_stages)]
        free, done = [0.0] * self.num_stages, [0] * self.num_stages
        found: list[Timed] = []
        while any(done[stage] < len(order) for stage, order in enumerate(orders)):
            before = len(found)
            for stage, order in enumerate(orders):
                while done[stage] < len(order):
                    action = order[done[stage]]
                    needed = self._needed(stage, action)
                    if any(key not in ends for key in needed):
                        break
                    start = max([free[stage], *(ends[key] for key in needed)])
                    free[stage] = ends[self._key(stage, action)] = start + costs[action.kind]
                    found.append(Timed(stage, action, start, free[stage]))
                    done[stage] += 1
            if len(found) == before:
                raise ValueError(f"{self} stops: every stage waits for another")
        return found

    def virtual_stage(self, stage: int, chunk: int) -> int:
        """Return the place of a chunk in the model."""
        return chunk * self.num_stages + stage

    def _key(self, stage: int, action: Action) -> tuple[PassKind, int, int]:
        kind = PassKind.INPUT if action.kind is PassKind.BACKWARD else action.kind
        return kind, self.virtual_stage(stage, action.chunk), action.microbatch

    def _needed(self, stage: int, action: Action) -> list[tuple[PassKind, int, int]]:
        """Return the passes whose results a pass needs."""
        kind, place, microbatch = self._key(stage, action)
        last = self.num_stages * self.num_chunks - 1
        if kind is PassKind.FORWARD:
            return [(kind, place - 1, microbatch)] if place > 0 else []
        if kind is PassKind.WEIGHT:
            return [(PassKind.INPUT, place, microbatch)]
        own = (PassKind.FORWARD, place, microbatch)
        return [own, (PassKind.INPUT, place + 1, microbatch)] if place < last else [own]

    def instructions(self, stage: int) -> list[Instruction]:
        """Return what a stage does, in order.

        Two stages send and post their messages to each other in one order, that of one timeline of all stages. So
        neither a device that handles them in the order of their calls nor one that waits in any of them can deadlock.
        """
        return _instructions(self, stage)

    def bubble(self, costs: Mapping[PassKind, float] = COSTS) -> float:
        """Return the part of a step that the stages wait, on average, if all chunks cost the same."""
        timeline = self._shorter().timeline(costs)
        step = max(timed.end for timed in timeline)
        idle = step - sum(timed.end - timed.start for timed in timeline) / self.num_stages
        work = sum(costs[action.kind] for action in self.order(0))
        return idle / (work + idle)

    def _shorter(self) -> PipelineSchedule:
        """Return one with the same time of waiting: in the middle all stages are busy, for as long as it may be."""
        p, m = self.num_stages, self.num_microbatches
        return self if m < 4 * p else self._replace(num_microbatches=3 * p + m % p)

    def in_flight(self, stage: int) -> int:
        """Return the largest number of forward passes of a stage whose activations are alive at once."""
        return self.kept(stage, [1] * self.num_chunks, [0] * self.num_chunks)

    def alive(self, stage: int) -> list[tuple[int, int]]:
        """Return for each chunk its forward passes and deferred gradients that are alive when most of both are."""
        alive = [(0, 0)] * self.num_chunks
        most = alive
        for kind, chunk, _ in self.order(stage):
            forward, deferred = alive[chunk]
            forward += {PassKind.FORWARD: 1, PassKind.WEIGHT: 0}.get(kind, -1)
            deferred += {PassKind.INPUT: 1, PassKind.WEIGHT: -1}.get(kind, 0)
            alive = [*alive[:chunk], (forward, deferred), *alive[chunk + 1 :]]
            most = max(most, alive, key=lambda found: sum(map(sum, found)))
        return most

    def kept(self, stage: int, activations: Sequence[int], deferred: Sequence[int], *, without: int = 0) -> int:
        """Return the largest sum of what is kept at a time.

        A forward pass of chunk c keeps `activations[c]` until its gradient is computed, a gradient of weights that is
        deferred keeps `deferred[c]`. `without`: as if there were so many fewer microbatches.
        """
        schedule = self._replace(num_microbatches=max(1, self.num_microbatches - without))._shorter()
        changes = (
            {
                PassKind.FORWARD: activations[chunk],
                PassKind.BACKWARD: -activations[chunk],
                PassKind.INPUT: deferred[chunk] - activations[chunk],
                PassKind.WEIGHT: -deferred[chunk],
            }[kind]
            for kind, chunk, _ in schedule.order(stage)
        )
        return max(itertools.accumulate(changes))


@functools.lru_cache(maxsize=16)
def _instructions(schedule: PipelineSchedule, stage: int) -> list[Instruction]:
    p, last = schedule.num_stages, schedule.num_stages * schedule.num_chunks - 1
    found: list[Instruction] = []

    def add(there: int, kind: PassKind | Message, chunk: int, microbatch: int) -> None:
        if there == stage:
            found.append(Instruction(kind, chunk, microbatch))

    timeline = schedule.timeline()
    moments = [(timed.start, True, timed.stage, timed.action) for timed in timeline]
    moments += [(timed.end, False, timed.stage, timed.action) for timed in timeline]
    # the messages of a pass that ends are posted before the passes that start then
    for _, is_start, here, (kind, chunk, microbatch) in sorted(moments, key=lambda moment: moment[:3]):
        place = schedule.virtual_stage(here, chunk)
        is_forward, is_backward = kind is PassKind.FORWARD, kind in (PassKind.BACKWARD, PassKind.INPUT)
        if is_start:
            if is_forward and place > 0:
                add(here, Message.WAIT_ACTIVATION, chunk, microbatch)
            if is_backward and place < last:
                add(here, Message.WAIT_GRAD, chunk, microbatch)
            add(here, kind, chunk, microbatch)
        elif is_forward and place < last:
            add(here, Message.SEND_ACTIVATION, chunk, microbatch)
            add((place + 1) % p, Message.POST_ACTIVATION, (place + 1) // p, microbatch)
        elif is_backward and place > 0:
            add(here, Message.SEND_GRAD, chunk, microbatch)
            add((place - 1) % p, Message.POST_GRAD, (place - 1) // p, microbatch)
    return found
