"""Every schedule is possible, complete and as good as published, for any sizes; messages are in one order."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import pytest

from megatron.plan.pipeline_schedules import Action, Instruction, Message, PassKind, PipelineSchedule

MICROBATCHES = (1, 2, 3, 5, 7, 8, 12, 16, 24, 31, 32)
BACKWARD = {"zero-bubble": (PassKind.INPUT, PassKind.WEIGHT), "forward": ()}


def schedules() -> Iterator[PipelineSchedule]:
    for p in range(2, 9):
        for m in MICROBATCHES:
            yield PipelineSchedule("1f1b", p, m)
            yield PipelineSchedule("zero-bubble", p, m)
            for v in range(1, 5):
                yield PipelineSchedule("forward", p, m, v)
                if v > 1:
                    yield PipelineSchedule("interleaved", p, m, v)


def activations(schedule: PipelineSchedule, stage: int) -> float:
    """The most microbatches, in units of a stage, whose activations 1F1B, Narayanan et al. and Qi et al. keep."""
    p, m, v = schedule.num_stages, schedule.num_microbatches, schedule.num_chunks
    ahead = {
        "1f1b": p - stage,
        "zero-bubble": p,
        "interleaved": (2 * (p - stage - 1) + (v - 1) * p + 1) / v,
    }
    return min(m, ahead[schedule.name])


def test_every_schedule_is_complete_and_keeps_no_more_than_it_promises() -> None:
    for schedule in schedules():
        p, m, v = schedule.num_stages, schedule.num_microbatches, schedule.num_chunks
        kinds = (PassKind.FORWARD, *BACKWARD.get(schedule.name, (PassKind.BACKWARD,)))
        for stage in range(p):
            order = schedule.order(stage)
            assert sorted(order, key=repr) == sorted(
                (Action(kind, chunk, microbatch) for kind in kinds for chunk in range(v) for microbatch in range(m)),
                key=repr,
            )
            if schedule.name != "forward":
                alive = most = 0
                for kind, _, _ in order:
                    alive += {PassKind.FORWARD: 1, PassKind.BACKWARD: -1, PassKind.INPUT: 0, PassKind.WEIGHT: -1}[kind]
                    most = max(most, alive)
                assert most <= activations(schedule, stage) * v
                assert schedule.in_flight(stage) <= most


@pytest.mark.parametrize("p", range(2, 9))
def test_the_bubble_is_that_of_the_formulas(p: int) -> None:
    """(p-1)(F+B), a v-th of it, and (p-1)(F+B-2W): in units of a stage's forward pass, with B = 2, W = 1."""
    for m in (p, 2 * p, 4 * p, 8 * p):
        for v in (2, 3, 4):
            assert waits(PipelineSchedule("interleaved", p, m, v)) == pytest.approx((p - 1) * 3 / v)
    for m in {p, p + 1, 2 * p, 4 * p + 1, 32}:
        assert waits(PipelineSchedule("1f1b", p, m)) == pytest.approx((p - 1) * 3)
        if m >= p:
            assert waits(PipelineSchedule("zero-bubble", p, m)) == pytest.approx((p - 1) * (3 - 2))


def waits(schedule: PipelineSchedule) -> float:
    """Time that each stage waits in a step, by an own simulation, as `bubble` says too."""
    ends = {
        (timed.stage, timed.action): (timed.start, timed.end) for timed in schedule.timeline()
    }  # each in a unit of one chunk's forward pass
    step = max(end for _, end in ends.values())
    busy = {sum(e - b for (s, _), (b, e) in ends.items() if s == stage) for stage in range(schedule.num_stages)}
    (work,) = busy  # alike on all
    assert schedule.bubble() == pytest.approx((step - work) / step)
    return (step - work) / schedule.num_chunks


def test_messages_of_two_stages_are_in_one_order_and_cannot_deadlock() -> None:
    """Neither over a network that delivers at once only, nor with a sender that waits for its receiver."""
    for schedule in schedules():
        if schedule.num_stages > 4 and schedule.num_microbatches > 12:
            continue  # no other pattern
        queues = [deque(schedule.instructions(stage)) for stage in range(schedule.num_stages)]
        run_by_rendezvous(schedule, queues)
        assert not any(queues), f"{schedule} deadlocks"


def run_by_rendezvous(schedule: PipelineSchedule, queues: list[deque[Instruction]]) -> None:
    """Run the stages; a send and its post happen together, when both are the next instruction of their stages."""
    posts = {Message.SEND_ACTIVATION: (Message.POST_ACTIVATION, 1), Message.SEND_GRAD: (Message.POST_GRAD, -1)}
    p, has_run = schedule.num_stages, True
    posted: set[tuple[int, Instruction]] = set()
    while has_run:
        has_run = False
        for stage, queue in enumerate(queues):
            while queue:
                kind, chunk, microbatch = queue[0]
                if kind in (Message.POST_ACTIVATION, Message.POST_GRAD):
                    break
                if kind in (Message.WAIT_ACTIVATION, Message.WAIT_GRAD):
                    post = Message.POST_ACTIVATION if kind is Message.WAIT_ACTIVATION else Message.POST_GRAD
                    assert (stage, Instruction(post, chunk, microbatch)) in posted
                if isinstance(kind, Message) and kind in posts:
                    post, step = posts[kind]
                    there, other = divmod(chunk * p + stage + step, p)
                    expected = Instruction(post, there, microbatch)
                    if not queues[other] or queues[other][0] != expected:
                        break
                    posted.add((other, queues[other].popleft()))
                queue.popleft()
                has_run = True


def test_a_schedule_that_cannot_go_on_is_refused() -> None:
    class Reversed(PipelineSchedule):
        def order(self, stage: int) -> list[Action]:
            return super().order(stage)[::-1]

    with pytest.raises(ValueError, match="every stage waits"):
        Reversed("1f1b", 2, 2).timeline()
