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
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
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


class ScheduledPass(NamedTuple):
    """A pass of a schedule, and the numbers of those that it waits for; -1: none."""

    stage: int
    action: Action
    cost: int
    """`cost_index` of the schedule."""
    before: int
    """The one before it on its stage."""
    needed: int
    """The one before it in the model, if that is of another chunk."""
    travels: bool
    """Its input comes from another stage."""


COSTS: Mapping[PassKind, float] = {PassKind.FORWARD: 1, PassKind.BACKWARD: 2, PassKind.INPUT: 1, PassKind.WEIGHT: 1}
"""Costs of matrix products: each gradient takes as long as the forward pass."""


PassCosts = Callable[[int, int, PassKind], float]
"""Cost of a pass by stage, chunk and kind."""
KINDS = tuple(PassKind)


def unit_cost(stage: int, chunk: int, kind: PassKind) -> float:
    """Return the cost of a pass where all chunks cost the same."""
    return COSTS[kind]


GRADIENTS = (PassKind.BACKWARD, PassKind.INPUT)
"""Passes that give the gradient of a chunk's input."""
ALIVE: Mapping[PassKind, tuple[int, int]] = {
    PassKind.FORWARD: (1, 0),
    PassKind.BACKWARD: (-1, 0),
    PassKind.INPUT: (-1, 1),
    PassKind.WEIGHT: (0, -1),
}
"""Change of the forward passes, and of the deferred gradients, whose tensors are alive after a pass."""


PassKey = tuple[PassKind, int, int]
"""Kind, where INPUT stands for BACKWARD too, virtual stage and microbatch."""


class PipelineSchedule(NamedTuple):
    """A schedule and its sizes."""

    name: str
    """1f1b, interleaved, zero-bubble, or forward: the forward passes alone, of an evaluation."""
    num_stages: int
    num_microbatches: int
    num_chunks: int = 1
    """Number on each stage."""

    def order(self, stage: int) -> list[Action]:
        """Return the passes of a stage: some forward passes ahead, then forward and backward passes in turn."""
        forward, ahead = self._rounds(), self._forward_ahead(stage)
        if self.name == "forward":
            return [action for action in forward if action.microbatch < self.num_microbatches]
        backward = self._backward(forward, PassKind.BACKWARD)
        weight: list[Action] = []
        lag = 0
        if self.name == "zero-bubble":
            backward, weight = self._backward(forward, PassKind.INPUT), self._backward(forward, PassKind.WEIGHT)
            lag = stage
        order = forward[:ahead]
        for index, action in enumerate(backward):
            order += forward[ahead + index : ahead + index + 1]
            order.append(action)
            if index >= lag:
                order += weight[index - lag : index - lag + 1]
        order += weight[max(0, len(weight) - lag) :]
        # the passes that would complete the last round are left out, which keeps every other in a possible order
        return [action for action in order if action.microbatch < self.num_microbatches]

    def _backward(self, forward: Sequence[Action], kind: PassKind) -> list[Action]:
        """Return the passes back through the chunks, which come in the opposite order."""
        return [Action(kind, self.num_chunks - 1 - chunk, microbatch) for _, chunk, microbatch in forward]

    def _rounds(self) -> list[Action]:
        """Return the forward passes of a stage: of p microbatches in its first chunk, then in its next, and so on."""
        p = self.num_stages
        return [
            Action(PassKind.FORWARD, chunk, first + index)
            for first in range(0, self.num_microbatches, p)
            for chunk in range(self.num_chunks)
            for index in range(p)
        ]

    def _forward_ahead(self, stage: int) -> int:
        """Return the forward passes of a stage before the first that is followed by a backward pass."""
        later_stages = self.num_stages - stage - 1
        if self.num_chunks == 1:
            return later_stages
        # as in Megatron-LM: all chunks but the last of this stage for the first p microbatches, and two passes for each
        # later stage, since to there an activation travels and from there its gradient
        return 2 * later_stages + (self.num_chunks - 1) * self.num_stages

    def timeline(self, costs: PassCosts = unit_cost, message: float = 0) -> list[Timed]:
        """Return every pass with its times, each stage's in order, in the unit of the costs of the passes.

        A stage starts a pass as soon as it is free and what the pass before it in the model sends is there: `message`
        after that has ended, from another stage. Raises ValueError if no stage could go on.
        """
        passes = self.passes()
        ends, cost_of = self.ends(costs, message), self._costs(costs)
        return [
            Timed(each.stage, each.action, end - cost_of[each.cost], end)
            for each, end in zip(passes, ends, strict=True)
        ]

    def ends(self, costs: PassCosts = unit_cost, message: float = 0) -> list[float]:
        """Return the end of each of `passes`, as `timeline` has it."""
        cost_of, delay_of = self._costs(costs), (0, message)
        # behind the last, where -1 finds it: the start of the step
        ends = [0.0] * (len(self.passes()) + 1)
        for number, (_, _, cost, before, needed, travels) in enumerate(self.passes()):
            free, arrived = ends[before], ends[needed] + delay_of[travels]
            # not max(), which takes as long as all the rest
            ends[number] = (free if free > arrived else arrived) + cost_of[cost]
        ends.pop()
        return ends

    def passes(self) -> tuple[ScheduledPass, ...]:
        """Return the passes of all stages, each after those that it waits for. Raises ValueError as `timeline`."""
        return _passes(self)

    def cost_index(self, stage: int, action: Action) -> int:
        """Return the number of the cost of a pass: all microbatches have the same."""
        return (stage * self.num_chunks + action.chunk) * len(KINDS) + KINDS.index(action.kind)

    def _costs(self, costs: PassCosts) -> list[float]:
        """Return the cost of each `cost_index`."""
        chunks = itertools.product(range(self.num_stages), range(self.num_chunks), KINDS)
        return [costs(stage, chunk, kind) for stage, chunk, kind in chunks]

    def virtual_stage(self, stage: int, chunk: int) -> int:
        """Return the virtual stage of a chunk: its position in the model."""
        return chunk * self.num_stages + stage

    @property
    def last_virtual_stage(self) -> int:
        return self.num_stages * self.num_chunks - 1

    def key(self, stage: int, action: Action) -> PassKey:
        """Return the name of a pass, whichever stage has it."""
        kind = PassKind.INPUT if action.kind is PassKind.BACKWARD else action.kind
        return kind, self.virtual_stage(stage, action.chunk), action.microbatch

    def needed(self, stage: int, action: Action) -> list[PassKey]:
        """Return the passes whose results a pass needs."""
        kind, virtual_stage, microbatch = self.key(stage, action)
        if kind is PassKind.FORWARD:
            return [(kind, virtual_stage - 1, microbatch)] if virtual_stage > 0 else []
        if kind is PassKind.WEIGHT:
            return [(PassKind.INPUT, virtual_stage, microbatch)]
        needed = [(PassKind.FORWARD, virtual_stage, microbatch)]
        if virtual_stage < self.last_virtual_stage:
            needed.append((PassKind.INPUT, virtual_stage + 1, microbatch))
        return needed

    def instructions(self, stage: int) -> list[Instruction]:
        """Return what a stage does, in order."""
        # Two stages send and post their messages to each other in one order, that of one timeline of all stages. So
        # neither a device that handles them in the order of their calls nor one that waits in any of them can deadlock.
        return _instructions(self, stage)

    def bubble(self) -> float:
        """Return the part of a step that the stages wait, on average, if all chunks cost the same."""
        timeline = self._shorter().timeline()
        step = max(timed.end for timed in timeline)
        idle = step - sum(timed.end - timed.start for timed in timeline) / self.num_stages
        work = sum(COSTS[action.kind] for action in self.order(0))
        return idle / (work + idle)

    def _shorter(self) -> PipelineSchedule:
        """Return one with the same time of waiting: in the middle all stages are busy, for as long as it may be."""
        p, m = self.num_stages, self.num_microbatches
        if m < 4 * p:
            return self
        return self._replace(num_microbatches=3 * p + m % p)

    def in_flight(self, stage: int) -> int:
        """Return the largest number of forward passes of a stage whose activations are alive at once."""
        return self.kept(stage, [1] * self.num_chunks, [0] * self.num_chunks)

    def alive(self, stage: int) -> list[tuple[int, int]]:
        """Return for each chunk its forward passes and deferred gradients that are alive when most of both are."""
        alive = [(0, 0)] * self.num_chunks
        most = list(alive)
        for kind, chunk, _ in self.order(stage):
            forward, deferred = alive[chunk]
            more_forward, more_deferred = ALIVE[kind]
            alive[chunk] = forward + more_forward, deferred + more_deferred
            if sum(map(sum, alive)) > sum(map(sum, most)):
                most = list(alive)
        return most

    def kept(self, stage: int, activations: Sequence[int], deferred: Sequence[int], *, without: int = 0) -> int:
        """Return the largest sum of what is kept at a time.

        A forward pass of chunk c keeps `activations[c]` until its gradient is computed, a gradient of weights that is
        deferred keeps `deferred[c]`. `without`: as if there were so many fewer microbatches.
        """
        schedule = self._replace(num_microbatches=max(1, self.num_microbatches - without))._shorter()
        sums, kept = [], 0
        for kind, chunk, _ in schedule.order(stage):
            more_forward, more_deferred = ALIVE[kind]
            kept += more_forward * activations[chunk] + more_deferred * deferred[chunk]
            sums.append(kept)
        return max(sums)


# typed: a subclass may have another order
@functools.lru_cache(maxsize=64, typed=True)
def _passes(schedule: PipelineSchedule) -> tuple[ScheduledPass, ...]:
    numbers: dict[PassKey, int] = {}
    last = [-1] * schedule.num_stages
    """The pass that each stage has started last."""
    passes: list[ScheduledPass] = []
    left = [deque(schedule.order(stage)) for stage in range(schedule.num_stages)]
    while any(left):
        num_before = len(passes)
        for stage, actions in enumerate(left):
            while actions and all(key in numbers for key in schedule.needed(stage, actions[0])):
                action = actions.popleft()
                key = schedule.key(stage, action)
                # of the same chunk it is before this one on the stage
                sources = [each for each in schedule.needed(stage, action) if each[1] != key[1]]
                needed, travels = -1, False
                for source in sources:
                    needed, travels = numbers[source], source[1] % schedule.num_stages != stage
                numbers[key] = len(passes)
                cost = schedule.cost_index(stage, action)
                passes.append(ScheduledPass(stage, action, cost, last[stage], needed, travels))
                last[stage] = numbers[key]
        if len(passes) == num_before:
            raise ValueError(f"{schedule} stops: every stage waits for another")
    return tuple(passes)


@functools.lru_cache(maxsize=16)
def _instructions(schedule: PipelineSchedule, stage: int) -> list[Instruction]:
    instructions: list[Instruction] = []
    timeline = schedule.timeline()
    events = [(timed.start, True, timed) for timed in timeline] + [(timed.end, False, timed) for timed in timeline]
    # the messages of a pass that ends are posted before the passes that start then
    for _, is_start, timed in sorted(events, key=lambda event: (event[0], event[1], event[2].stage)):
        steps = _at_start(schedule, timed) if is_start else _at_end(schedule, timed)
        instructions += [instruction for on_stage, instruction in steps if on_stage == stage]
    return instructions


Step = tuple[int, Instruction]
"""A stage, and what it does."""


def _at_start(schedule: PipelineSchedule, timed: Timed) -> Iterator[Step]:
    """Yield what the stage of a pass does when the pass starts."""
    kind, chunk, microbatch = timed.action
    virtual_stage = schedule.virtual_stage(timed.stage, chunk)
    if kind is PassKind.FORWARD and virtual_stage > 0:
        yield timed.stage, Instruction(Message.WAIT_ACTIVATION, chunk, microbatch)
    if kind in GRADIENTS and virtual_stage < schedule.last_virtual_stage:
        yield timed.stage, Instruction(Message.WAIT_GRAD, chunk, microbatch)
    yield timed.stage, Instruction(kind, chunk, microbatch)


def _at_end(schedule: PipelineSchedule, timed: Timed) -> Iterator[Step]:
    """Yield what the stage of a pass, and the stage that needs its result, do when the pass ends."""
    kind, chunk, microbatch = timed.action
    virtual_stage = schedule.virtual_stage(timed.stage, chunk)
    if kind is PassKind.FORWARD and virtual_stage < schedule.last_virtual_stage:
        next_chunk, next_stage = divmod(virtual_stage + 1, schedule.num_stages)
        yield timed.stage, Instruction(Message.SEND_ACTIVATION, chunk, microbatch)
        yield next_stage, Instruction(Message.POST_ACTIVATION, next_chunk, microbatch)
    if kind in GRADIENTS and virtual_stage > 0:
        previous_chunk, previous_stage = divmod(virtual_stage - 1, schedule.num_stages)
        yield timed.stage, Instruction(Message.SEND_GRAD, chunk, microbatch)
        yield previous_stage, Instruction(Message.POST_GRAD, previous_chunk, microbatch)
