"""Finite checks of the messages between pipeline stages, and the microbatch that each check belongs to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from torch import Tensor

from megatron.parallel.context import ParallelContext
from megatron.parallel.finite_checks import BACKWARD, FORWARD, RECEIVED, SENT, PassPlace
from megatron.parallel.phase_clock import WAIT
from megatron.parallel.shards import named_parameters
from megatron.resilience.rank_record import RankPlace, RankRecord

DIRECTIONS = {"ForwardPass": FORWARD, "BackwardPass": BACKWARD, "WeightPass": BACKWARD}
SENDS = {"SendActivation": FORWARD, "SendGrad": BACKWARD}
RECEIPTS = {"RecvActivation": FORWARD, "RecvGrad": BACKWARD}
SHOWN_WEIGHTS = 2


class PassCounter:
    """Counts the passes and messages of a step: every schedule runs the microbatches of a chunk in order."""

    def __init__(self, ctx: ParallelContext) -> None:
        self._checks, self._clock = ctx.state.checks, ctx.state.clock
        self._counts: Counter[tuple[str, int]] = Counter()

    def begin_step(self) -> None:
        self._counts.clear()

    def place(self, name: str, direction: str, chunk: int = 0) -> PassPlace:
        """Return the place of the next instruction of this name."""
        self._counts[name, chunk] += 1
        return PassPlace(direction, self._counts[name, chunk] - 1, chunk)

    def counted(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a pass that says to which microbatch the checks within it belong."""

        def call(*arguments: Any, **options: Any) -> Any:
            self._checks.place = self.place(name, DIRECTIONS[name], options.get("chunk", 0))
            with self._clock.phase(DIRECTIONS[name]):
                return function(*arguments, **options)

        return call

    def checked(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return an instruction of DeepSpeed's table that checks what it sends or has received."""

        def call(engine: Any, buffer_id: int, **options: Any) -> None:
            chunk = options.get("chunk", 0)
            if name in SENDS:
                place = self.place(name, SENDS[name], chunk)
                # on both sides: what was finite when it was sent, and is not when it arrives, is the link's fault
                self._checks.whole(_message(engine, name, buffer_id, chunk), SENT, place)
            with self._clock.phase(WAIT):
                function(engine, buffer_id, **options)
            if name in RECEIPTS:
                place = self.place(name, RECEIPTS[name], chunk)
                self._checks.whole(_message(engine, name, buffer_id, chunk), RECEIVED, place)

        return call

    def watch_pipeline(self, engine: Any) -> None:
        """Wrap the instructions of a pipeline."""
        table = dict(engine._INSTRUCTION_MAP)
        for kind, function in table.items():
            if kind.__name__ in DIRECTIONS:
                table[kind] = self.counted(kind.__name__, function)
            elif kind.__name__ in SENDS or kind.__name__ in RECEIPTS:
                table[kind] = self.checked(kind.__name__, function)
        engine._INSTRUCTION_MAP = table


def _message(engine: Any, name: str, buffer_id: int, chunk: int) -> Tensor:
    """Return the hidden state, or its gradient, that an instruction sends or has received."""
    # our executor; below it is DeepSpeed's own, which keeps its buffers in other places
    if hasattr(engine, "message"):
        return engine.message(name, chunk, buffer_id)  # type: ignore[no-any-return]
    if name == "RecvGrad":
        return _first(engine.grad_layer)
    found = _first(engine.pipe_buffers["outputs" if name == "SendActivation" else "inputs"][buffer_id])
    return found.grad if name == "SendGrad" else found  # type: ignore[return-value]


def _first(stream: Any) -> Tensor:
    return stream if isinstance(stream, Tensor) else stream[0]


def step_record(module: Any, ctx: ParallelContext, place: RankPlace, loss: str = "") -> RankRecord:
    """Return this rank's record of a step that was not applied. Waits for the device.

    `loss`: the user's loss function, if there is one.
    """
    # of ZeRO-3 the stretch of this rank: the parameter itself is empty between passes
    weights = ((name, getattr(p, "ds_tensor", p)) for name, p in named_parameters(module))
    damaged = [name for name, weight in weights if weight.is_floating_point() and not weight.isfinite().all()]
    return RankRecord(place, first=ctx.state.checks.first_bad(), bad_weights=tuple(damaged[:SHOWN_WEIGHTS]), loss=loss)
