"""Predicted step for a page: its parts, its timeline, and the layouts of a search."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megatron.plan.page.content import Bar, Timeline
from megatron.plan.pipeline_schedules import PassKind, PipelineSchedule, Timed
from megatron.plan.timing.step import StepTime
from megatron.plan.timing.text import seconds_text

PARTS = {
    "compute": "compute",
    "recompute": "recomputation",
    "tensor": "tensor exchange",
    "context": "context exchange",
    "expert": "expert exchange",
    "gather": "gathering of weights",
    "offload": "activations to and from the host",
    "messages": "messages between stages",
    "wait": "wait for other stages",
    "sharing": "sharing of cores",
    "reduction": "reduction of gradients",
    "update": "update",
    "before": "forward passes before the step",
    "start": "starts on the host",
}
"""Parts of StepParts, with their words."""
KIND_OF_PASS = {
    PassKind.FORWARD: "forward",
    PassKind.BACKWARD: "backward",
    PassKind.INPUT: "backward",
    PassKind.WEIGHT: "weight",
}
ROUNDING = 1e-9
LEAST_MESSAGE = 1e-3
"""Share of a step from which messages are drawn: shorter ones would not be seen."""


def parts_of(time: StepTime) -> dict[str, float]:
    """Return the seconds of the parts of a step by their words; 0 for what is not one."""
    parts = {words: getattr(time.parts, name) for name, words in PARTS.items()}
    # differences of sums are not quite zero
    return {words: 0.0 if seconds < ROUNDING * time.seconds else seconds for words, seconds in parts.items()}


def predicted_timeline(time: StepTime) -> Timeline:
    """Return the passes of a step, with the sums of gradients and the update that follow."""
    end = max(timed.end for timed in time.timeline)
    bars = [*_passes(time.timeline), *_messages(time, end)]
    after = time.seconds - time.parts.before - time.simulated.seconds
    update_at = end + min(time.parts.reduction, after - time.parts.update)
    updated_at = update_at + time.parts.update
    for stage in range(len(time.stages)):
        done = max(timed.end for timed in time.timeline if timed.stage == stage)
        bars.append(Bar(stage, "reduction", max(done, update_at - time.parts.reduction), update_at, "gradients' sums"))
        bars.append(Bar(stage, "update", update_at, updated_at, "update"))
        bars.append(Bar(stage, "other", updated_at, end + after, "start of a step on the host"))
    bars = [bar for bar in bars if bar.end > bar.start]
    names = [f"stage {stage}" for stage in range(len(time.stages))]
    left_out = time.num_microbatches - time.timed_microbatches
    note = ""
    if left_out:
        note = (
            f"{time.timed_microbatches} of {time.num_microbatches} microbatches; the others take "
            f"{seconds_text(time.simulated.left_out)} in the middle, which repeats itself."
        )
    return Timeline("Predicted", names, bars, end + after, note)


def _passes(timeline: Sequence[Timed]) -> Iterator[Bar]:
    num_chunks = 1 + max(timed.action.chunk for timed in timeline)
    for timed in timeline:
        text = f"{timed.action.kind.value} {timed.action.microbatch}"
        if num_chunks > 1:
            text += f", chunk {timed.action.chunk}"
        yield Bar(timed.stage, KIND_OF_PASS[timed.action.kind], timed.start, timed.end, text)


def _messages(time: StepTime, end: float) -> Iterator[Bar]:
    """Yield the messages between stages, from the end of the pass that sends them."""
    schedule = time.simulated.schedule
    passes = {_place(schedule, timed): timed for timed in time.timeline if timed.action.kind is not PassKind.WEIGHT}
    sent = []
    for (is_forward, virtual_stage, microbatch), timed in passes.items():
        sender = virtual_stage - 1 if is_forward else virtual_stage + 1
        if (is_forward, sender, microbatch) in passes:
            sent.append((timed, passes[is_forward, sender, microbatch].end))
    # as long as the shortest wait for one: on some stage nothing else holds it up
    seconds = min((timed.start - sent_at for timed, sent_at in sent), default=0.0)
    if schedule.num_stages == 1 or seconds < LEAST_MESSAGE * end:
        return
    for timed, sent_at in sent:
        name = "activation" if timed.action.kind is PassKind.FORWARD else "gradient"
        yield Bar(timed.stage, "message", sent_at, sent_at + seconds, f"{name} {timed.action.microbatch}")


def _place(schedule: PipelineSchedule, timed: Timed) -> tuple[bool, int, int]:
    """Return whether a pass is forward, its place in the model, and its microbatch."""
    kind, chunk, microbatch = timed.action
    return kind is PassKind.FORWARD, schedule.virtual_stage(timed.stage, chunk), microbatch
