"""The sum of gradients over data-parallel ranks while the backward pass runs: order, bytes, dtypes, waits, numerics."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

from megatron.settings.command_line import parse_arguments
from tests.ranks import RankPools
from tests.training import layouts

MODEL = f"{layouts.MODELS['llama_gqa_tied']} --micro-batch-size 1 --global-batch-size 4"
HALF = "--fp16 --initial-loss-scale 1024"
CASES = {
    "": ("all_reduce", "float32"),
    "--no-pipeline-parallel": ("all_reduce", "float32"),
    "--bf16": ("reduce", "float32"),
    "--bf16 --no-pipeline-parallel --recompute-granularity full": ("reduce", "float32"),
    "--bf16 --grad-reduce-dtype bf16": ("reduce", "bfloat16"),
    "--zero-stage 1": ("reduce", "float32"),
    HALF: ("reduce", "float32"),
}
"""By flags: the collective, and its dtype."""


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A function that writes a DeepSpeed JSON with some keys of zero_optimization, and returns its flags."""
    folder = tmp_path_factory.mktemp("settings")

    def write(**keys: Any) -> str:
        path: Path = folder / f"{'-'.join(f'{name}{value}' for name, value in keys.items())}.json"
        path.write_text(json.dumps({"zero_optimization": keys}), encoding="utf-8")
        return f"--deepspeed-config {path}"

    return write


@pytest.fixture(scope="module")
def recorded(ranks: RankPools, settings: Any) -> Any:
    """Events and results of all cases on two ranks, with overlap and without."""
    small = settings(reduce_bucket_size=20_000)
    late = settings(reduce_bucket_size=20_000, overlap_comm=False)
    runs = [f"{MODEL} {flags} {file}" for flags in CASES for file in (small, late)]
    by_rank = ranks(2)(record, runs)
    pairs = [list(zip(found[::2], found[1::2], strict=True)) for found in by_rank]
    return {flags: [found[index] for found in pairs] for index, flags in enumerate(CASES)}


@pytest.mark.parametrize("flags", CASES)
def test_buckets_are_reduced_while_the_last_microbatch_goes_backward(recorded: Any, flags: str) -> None:
    collective, dtype = CASES[flags]
    for early, late in recorded[flags]:
        events = early["events"]
        sums = [event for event in events if isinstance(event, list)]
        assert {(name, kind) for name, kind, *_ in sums} == {(collective, dtype)}
        assert sum(numel for _, _, numel, _ in sums) == early["numel"], "each gradient once"
        first, ends = events.index(sums[0]), [i for i, event in enumerate(events) if event == "backward"]
        assert ends[0] < first < ends[1], "in the last of two microbatches"
        assert events.index("first layer") > first, "before the first layer's gradients exist"
        assert len(events[first : ends[1]]) > len(sums) / 2, "most of them"
        assert events.count("wait") == len(sums)
        assert events.index("wait") > max(i for i, event in enumerate(events) if isinstance(event, list))
        if collective == "reduce":
            owners = [sum(numel for *_, numel, owner in sums if owner == rank) for rank in (0, 1)]
            assert min(owners) > 0.45 * sum(owners), "every rank receives its share alone"
        assert late["events"].index("wait") > late["events"].index("first layer")
        after = late["events"].index("first layer")
        assert not any(isinstance(event, list) for event in late["events"][:after]), "overlap_comm is off"


@pytest.mark.parametrize("flags", CASES)
def test_overlap_changes_no_bit_and_ranks_start_in_one_order(recorded: Any, flags: str) -> None:
    (early, late), (early_1, _) = recorded[flags]
    assert early["losses"] == late["losses"] == early_1["losses"]
    assert early["norms"] == late["norms"] == early_1["norms"]
    sums = [[event for event in found["events"] if isinstance(event, list)] for found in (early, early_1, late)]
    assert sums[0] == sums[1] == sums[2]


def record(runs: list[str]) -> list[dict[str, Any]]:
    """Events of each run's third step: sums, waits, and the ends of backward passes; and losses and norms."""
    with layouts.allows_fp16():
        return [_record(flags) for flags in runs]


def _record(flags: str) -> dict[str, Any]:
    import torch.distributed as dist

    from megatron.parallel.shards import named_parameters

    engine, task = layouts.build(flags)
    events: list[Any] = []

    def recording(name: str) -> Any:
        collective = getattr(dist, name)

        def call(tensor: Any, *owner: int, **named: Any) -> Any:
            work = collective(tensor, *owner, **named)
            if not named.get("async_op"):
                return work
            kind = str(tensor.dtype).removeprefix("torch.")
            events.append([name, kind, tensor.numel(), owner[0] if owner else None])

            def wait() -> None:
                events.append("wait")
                work.wait()

            return SimpleNamespace(wait=wait)

        return call

    engine.watch(lambda hook, loss: events.append("backward") if hook == "on_after_backward" else None)
    used_first = min(
        (named for named in named_parameters(engine.module) if named[0].startswith("layers.0.")),
        key=lambda named: named[0],
    )[1]
    used_first.register_post_accumulate_grad_hook(lambda _: events.append("first layer"))
    losses, norms = [], []
    with patch.object(dist, "reduce", recording("reduce")), patch.object(dist, "all_reduce", recording("all_reduce")):
        for step in range(4):
            events.clear() if step < 3 else None
            result = engine.train_step(layouts.step_batches(engine, task, step), consumed_samples=4 * step, lr=1e-3)
            losses.append(result.loss)
            norms.append(float(result.grad_norm))
            if step == 2:
                kept = list(events)
                layouts._evaluate(engine, task)  # between steps
    numel = sum(p.numel() for p in engine.module.parameters())
    last = len(kept) - 1 - kept[::-1].index("first layer")
    kept = [event for index, event in enumerate(kept) if event != "first layer" or index == last]
    return {"events": kept, "losses": losses, "norms": norms, "numel": numel}


def test_gradients_are_final_when_counted_not_when_a_backward_pass_ends(ranks: RankPools) -> None:
    """Against plain sums: a weight whose gradient comes in two parts a microbatch, the second after the backward pass
    of the last one; a weight that one rank alone uses; frozen ones; 1 and 64 microbatches; a step that is discarded."""
    for result in ranks(2)(edge_cases):
        assert result["worst"] == 0.0, "every sum, of small integers, is exact"
        assert result["started_early"] == {1: 2, 64: 2}, "the buckets of both other weights"
        assert result["learned"] == 0, "the first step does not know yet what is final"
        assert "weight.deferred: a gradient came after the sum" in result["late"]
        assert result["nothing"] == ([], [])


def edge_cases() -> dict[str, Any]:
    import torch
    from torch import nn

    from megatron.parallel.context import ParallelContext
    from megatron.parallel.shards import Shard
    from megatron.training.deepspeed.reduction import GradientBuffers, ReductionOptions

    ctx = ParallelContext.build(parse_arguments([*layouts.COMMON.split()])[0].parallel, "cpu")
    module, names, size = nn.Module(), ["own", "deferred", "plain", "last"], 6
    for name in [*names, "frozen"]:
        parameter: Any = nn.Parameter(torch.zeros(size), requires_grad=name != "frozen")
        parameter.shard, parameter.full_name = Shard((size,)), f"weight.{name}"
        module.register_parameter(name, parameter)
    places = [(getattr(module, name), index * size) for index, name in enumerate(names)]
    options = ReductionOptions(torch.float32, 1, scale_after=1 / 2)
    buffers = GradientBuffers(module, [(torch.zeros(4 * size), places)], options, ctx)
    results: dict[str, Any] = {"worst": 0.0, "started_early": {}}

    tensors = dict(module.named_parameters())

    def step(num_microbatches: int, parts: int = 2) -> None:
        """Rank r's gradients of microbatch m are (m + 1) (r + 1), of each part of the deferred one too."""
        buffers.begin_step(num_microbatches)
        for microbatch in range(num_microbatches):
            factor = float((microbatch + 1) * (ctx.rank + 1))
            used = [*names[1:], *(names[:1] if ctx.rank == 0 else [])]
            torch.stack([(tensors[name] * factor).sum() for name in used]).sum().backward()
        early = sum(bucket.work is not None for bucket in buffers._buckets)
        for microbatch in range(num_microbatches):
            for _ in range(parts - 1):
                (tensors["deferred"] * float((microbatch + 1) * (ctx.rank + 1))).sum().backward()
        buffers.finish()
        total = num_microbatches * (num_microbatches + 1) / 2
        expected = torch.tensor([total / 2, total * 3 / 2 * parts, total * 3 / 2, total * 3 / 2])
        expected = expected.repeat_interleave(size)[ctx.rank * 2 * size :][: 2 * size]
        results["worst"] = max(results["worst"], float((buffers.shards[0] - expected).abs().max()))
        results["started_early"][num_microbatches] = early

    step(1)
    results["learned"] = results["started_early"][1]
    step(1)
    step(64)
    buffers.begin_step(1)  # as after a step that was given up
    tensors["plain"].sum().backward()
    step(64)
    try:
        step(1, parts=4)
    except RuntimeError as error:
        results["late"] = str(error)
    empty = GradientBuffers(module, [], options, ctx)
    empty.begin_step(1)
    empty.finish()
    results["nothing"] = empty.counted, empty.uncounted
    return results
