"""Trace of the instructions of a step: what each rank ran when, and the time in which its pipeline stage was idle.

An instruction is one computation or message of one microbatch, a reduction of gradients or the update, by DeepSpeed's
names. The trace has Chrome's format, one process for each rank: https://ui.perfetto.dev opens it.
"""

from __future__ import annotations

import gzip
import json
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megatron.observability.timers import PHASES
from megatron.parallel.context import ParallelContext
from megatron.parallel.phase_clock import ticks_of
from megatron.runtime.files import replacing

TRACE_FILE = "profile_instructions.json.gz"
PASSES = ("ForwardPass", "BackwardPass", "WeightPass")
"""Instructions that compute; the others communicate or wait."""
ONCE = ("ReduceTiedGrads", "ReduceGrads", "OptimizerStep")
"""Instructions of a whole step."""


class Pass(NamedTuple):
    """Computation of one microbatch in one chunk of a stage, by name: one of PASSES."""

    name: str
    chunk: int
    microbatch: int


class InstructionTrace:
    """Records what a rank runs, while it is on. `wanted`: wrap the instructions at all."""

    def __init__(self, ctx: ParallelContext, *, wanted: bool) -> None:
        self.wanted = wanted
        self._ctx = ctx
        self._ticks = ticks_of(ctx.device)
        self._iteration: int | None = None
        self._counts: Counter[tuple[str, int]] = Counter()
        self._spans: list[tuple[tuple[str, int, int], Any, Any]] = []
        self._begin: tuple[Any, float] = (None, 0.0)
        self._events: list[dict[str, Any]] = []

    def recorded(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function, recorded as an instruction. A `chunk` among its arguments says which it belongs to."""
        if not self.wanted:
            return function

        def call(*arguments: Any, **options: Any) -> Any:
            if self._iteration is None:
                return function(*arguments, **options)
            begin = self._ticks.now()
            result = function(*arguments, **options)
            chunk = options.get("chunk", 0)
            # every schedule runs the microbatches of a chunk in order
            self._spans.append(((name, chunk, self._counts[name, chunk]), begin, self._ticks.now()))
            self._counts[name, chunk] += 1
            return result

        return call

    def begin_step(self, iteration: int) -> None:
        """Record from here on."""
        self._iteration = iteration
        # one moment by both clocks: the device's events have no zero, and ranks are compared by the hosts' time
        self._begin = self._ticks.now(), time.time()

    def end_step(self) -> None:
        """Record no further, and wait for the device to end the step."""
        spans, self._spans, iteration, self._iteration = self._spans, [], self._iteration, None
        self._counts.clear()
        origin, origin_s = self._begin
        # seconds since the begin of the step: [begin 0, end 0, begin 1, end 1, ...]
        moments = [(name, origin, moment) for (name, _, _), *both in spans for moment in both]
        # one iterator, from which begin and end are taken in turns
        seconds = iter(self._ticks.seconds(moments))
        for (name, chunk, number), begin_s, end_s in zip((span[0] for span in spans), seconds, seconds, strict=True):
            self._events.append(
                {
                    "name": name if name in ONCE else f"{name} {number}",
                    "cat": PHASES.get(name, "other"),
                    "ph": "X",
                    # Chrome's format counts in microseconds
                    "ts": round((origin_s + begin_s) * 1e6, 1),
                    "dur": round((end_s - begin_s) * 1e6, 1),
                    "pid": self._ctx.rank,
                    "tid": 0,
                    "args": {
                        "instruction": name,
                        "iteration": iteration,
                        "stage": self._ctx.stage,
                        "chunk": chunk,
                        "microbatch": number,
                    },
                }
            )

    def gather(self) -> dict[str, Any]:
        """Return the trace of all ranks so far, and begin another. Collective."""
        events, self._events = self._events, []
        process = {"name": f"rank {self._ctx.rank}, stage {self._ctx.stage}"}
        # metadata of the viewer: one process of the picture is a rank
        title = {"name": "process_name", "ph": "M", "pid": self._ctx.rank, "args": process}
        return {
            "displayTimeUnit": "ms",
            "traceEvents": [event for of_rank in self._ctx.gather_objects([title, *events]) for event in of_rank],
        }


def write_trace(trace: Mapping[str, Any], path: Path) -> None:
    """Replace the file in one piece. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # a viewer must not find half a file
    with replacing(path, partial_name=f"part_{path.name}") as file, gzip.open(file, "wt", encoding="utf-8") as packed:
        json.dump(trace, packed)


def idle_shares(trace: Mapping[str, Any]) -> list[float]:
    """Return the share of time in which each stage computed nothing, mean over its ranks and the steps.

    A step lasts from the first to the last computation of any rank, so reductions and the update do not count.
    """
    shares: defaultdict[int, list[float]] = defaultdict(list)
    for events in _steps(trace):
        # over all ranks, so that the wait for the first microbatch counts as idle
        begin_us = min(event["ts"] for event in events)
        length_us = max(event["ts"] + event["dur"] for event in events) - begin_us
        busy_us: Counter[tuple[int, int]] = Counter()
        for event in events:
            busy_us[event["args"]["stage"], event["pid"]] += event["dur"]
        for (stage, _), busy in busy_us.items():
            shares[stage].append(1 - busy / length_us)
    return [sum(found) / len(found) for _, found in sorted(shares.items())]


def simulated_idle_shares(trace: Mapping[str, Any], cost: Callable[[int, Pass], float] | None = None) -> list[float]:
    """Return the share of time in which each stage would be idle if messages took no time: by order and dependencies.

    The order is that in which the first rank of each stage ran in the first step. `cost` of (stage, pass); None: every
    pass costs 1, which gives a schedule's bubble.
    """
    events = min(_steps(trace), key=lambda found: found[0]["args"]["iteration"])
    ranks: dict[int, int] = {}
    for event in events:
        # one rank for each stage: those of a stage run in the same order
        ranks[event["args"]["stage"]] = min(event["pid"], ranks.get(event["args"]["stage"], event["pid"]))
    orders: list[list[Pass]] = [[] for _ in ranks]
    for event in events:
        arguments = event["args"]
        if event["pid"] == ranks[arguments["stage"]]:
            own = Pass(arguments["instruction"], arguments["chunk"], arguments["microbatch"])
            orders[arguments["stage"]].append(own)
    costs = [[1.0 if cost is None else cost(stage, one) for one in order] for stage, order in enumerate(orders)]
    length = max(_ends(orders, costs).values())
    return [1 - sum(of_stage) / length for of_stage in costs]


def _ends(orders: Sequence[Sequence[Pass]], costs: Sequence[Sequence[float]]) -> dict[tuple[int, Pass], float]:
    """Return when each stage's passes end, each as early as its stage and the passes that it needs allow."""
    ends: dict[tuple[int, Pass], float] = {}
    free, done = [0.0 for _ in orders], [0 for _ in orders]
    num_chunks = 1 + max(one.chunk for order in orders for one in order)
    while any(count < len(order) for count, order in zip(done, orders, strict=True)):
        before = len(ends)
        for stage, order in enumerate(orders):
            while done[stage] < len(order):
                own = order[done[stage]]
                needed = list(_needed(stage, own, len(orders), num_chunks))
                if any(key not in ends for key in needed):
                    break
                start = max([free[stage], *(ends[key] for key in needed)])
                free[stage] = ends[stage, own] = start + costs[stage][done[stage]]
                done[stage] += 1
        # no stage has got on in a whole round
        if len(ends) == before:
            raise ValueError("no order of these passes is possible: every stage waits for another")
    return ends


def _needed(stage: int, own: Pass, num_stages: int, num_chunks: int) -> Iterator[tuple[int, Pass]]:
    """Yield the passes whose results a pass needs, each with its stage."""
    # virtual stage: chunk by chunk through all stages
    place, last = own.chunk * num_stages + stage, num_stages * num_chunks - 1
    if own.name == "WeightPass":
        yield stage, own._replace(name="BackwardPass")
        return
    if own.name == "BackwardPass":
        yield stage, own._replace(name="ForwardPass")
    there = place - 1 if own.name == "ForwardPass" else place + 1
    if 0 <= there <= last:
        yield there % num_stages, own._replace(chunk=there // num_stages)


def _steps(trace: Mapping[str, Any]) -> Iterable[list[dict[str, Any]]]:
    """Return the passes of each step, by time."""
    found: defaultdict[int, list[dict[str, Any]]] = defaultdict(list)
    for event in sorted(trace["traceEvents"], key=lambda event: event.get("ts", 0)):
        if event.get("args", {}).get("instruction") in PASSES:
            found[event["args"]["iteration"]].append(event)
    return found.values()
