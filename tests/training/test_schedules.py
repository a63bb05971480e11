"""Pipeline schedules compute what 1F1B computes: losses and weights bit for bit, since every sum has the same order.

The norm alone is a sum in another order where chunks move between stages; so nothing is clipped by it here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron.checkpoint.reader import newest_checkpoint
from megatron.options.config import ConfigError
from megatron.settings.command_line import parse_arguments
from megatron.settings.validation import check
from megatron.weights.deepspeed import universal
from tests.ranks import RankPools
from tests.training import layouts

ONE, TWO_CHUNKS, ZERO_BUBBLE = "", "--num-virtual-stages-per-pipeline-rank 2", "--pipeline-schedule zero-bubble"
PP2, PP4 = "--pipeline-model-parallel-size 2", "--pipeline-model-parallel-size 4 --num-layers 8"


@pytest.mark.parametrize(
    ("model", "ranks_needed", "flags"),
    [
        # three microbatches: the last round of the interleaved schedule is incomplete
        ("bloom_learned", 2, f"{PP2} --global-batch-size 6"),
        pytest.param("llama_gqa", 4, f"{PP4} --micro-batch-size 1", marks=pytest.mark.slow),
        ("bloom_alibi", 4, f"{PP2} --tensor-model-parallel-size 2 --sequence-parallel --recompute-granularity full"),
        pytest.param("llama_gqa_tied", 4, f"{PP2} --zero-stage 1 --micro-batch-size 1", marks=pytest.mark.slow),
        ("llama_gqa", 4, f"{PP2} --tensor-model-parallel-size 2 --bf16 --recompute-granularity selective"),
        pytest.param("bloom_learned", 4, f"{PP2} --bf16 --micro-batch-size 1", marks=pytest.mark.slow),
    ],
)
def test_every_schedule_computes_what_1f1b_computes(
    ranks: RankPools, model: str, ranks_needed: int, flags: str
) -> None:
    arguments = f"{layouts.MODELS[model]} {flags} --clip-grad 0"
    results = ranks(ranks_needed)(layouts.train_schedules, arguments, [ONE, TWO_CHUNKS, ZERO_BUBBLE], 3)
    expected, *others = (merged(by_rank) for by_rank in zip(*results, strict=True))
    assert expected["losses"][0] > expected["losses"][-1]
    for found in others:
        assert found["losses"] == expected["losses"]
        assert found["validation"] == expected["validation"]
        assert found["norms"] == pytest.approx(expected["norms"], rel=1e-6)
        assert found["weights"] == expected["weights"]


def merged(by_rank: tuple[dict[str, Any], ...]) -> dict[str, Any]:
    """One run's result, with the weights of all ranks; copies of a weight must be equal."""
    weights: dict[tuple[str, int], str] = {}
    for result in by_rank:
        for name, digest in result["weights"].items():
            assert weights.setdefault((name, result["tensor_rank"]), digest) == digest, f"copies of {name} differ"
    assert all(result["losses"] == by_rank[0]["losses"] for result in by_rank), "ranks disagree"
    return by_rank[0] | {"weights": weights}


def test_fp16_with_chunks_and_deferred_weights(ranks: RankPools) -> None:
    flags = f"{layouts.MODELS['bloom_learned']} {PP2} --initial-loss-scale 1024 --clip-grad 0"
    expected, *others = (
        ranks(2)(layouts.train_fp16, f"{flags} {schedule}", 3)[0] for schedule in (ONE, TWO_CHUNKS, ZERO_BUBBLE)
    )
    for found in others:
        assert found["losses"] == expected["losses"]
        assert found["skipped"] == 0


def test_any_schedule_resumes_any_other(ranks: RankPools, tmp_path: Path) -> None:
    """1F1B, interleaved, zero-bubble, and 1F1B again; each saves what it restored, and goes on alike."""
    flags = f"{layouts.MODELS['llama_gqa_tied']} {PP2} --clip-grad 0"
    folders = [str(tmp_path / name) for name in ("one", "interleaved", "zero-bubble", "one-again")]
    expected = ranks(2)(layouts.train_then_save, flags, 2, folders[0])[0]
    for load, save, schedule in zip(folders, folders[1:], (TWO_CHUNKS, ZERO_BUBBLE, ONE), strict=False):
        assert ranks(2)(layouts.resume_then_save, f"{flags} {schedule}", load, save)[0] == expected


def test_a_universal_folder_resumes_under_any_schedule(ranks: RankPools, tmp_path: Path) -> None:
    """Interleaved, zero-bubble and interleaved again, each from the universal folder of the one before."""
    flags = f"{layouts.MODELS['llama_gqa_tied']} {PP2} --clip-grad 0"
    folders = [tmp_path / name for name in ("interleaved", "zero-bubble", "interleaved-again")]
    expected = ranks(2)(layouts.train_then_save, f"{flags} {TWO_CHUNKS}", 2, str(folders[0]))[0]
    for load, save, schedule in zip(folders, folders[1:], (ZERO_BUBBLE, TWO_CHUNKS), strict=False):
        checkpoint = newest_checkpoint(str(load))
        assert checkpoint is not None
        folder = tmp_path / f"universal-{load.name}"
        universal.write(checkpoint, folder / "global_step2_universal")
        universal.point_latest(folder / "global_step2_universal")
        resumed = f"{flags} {schedule} --universal-checkpoint"
        assert ranks(2)(layouts.resume_then_save, resumed, str(folder), str(save))[0] == expected


def hooks_of_a_step(arguments: str) -> tuple[list[str], int]:
    """The hooks that a training step calls within, an evaluation before it left out, and its microbatches."""
    engine, task = layouts.build(arguments)
    called: list[str] = []
    engine.watch(lambda hook, _: called.append(hook))
    number = layouts.num_microbatches(engine)
    engine.evaluate(layouts.step_batches(engine, task, 0), number)
    layouts.loss_of_step(engine, task, 1)
    return called, number


@pytest.mark.parametrize("schedule", [ONE, TWO_CHUNKS, ZERO_BUBBLE])
def test_hooks_are_called_once_a_microbatch(ranks: RankPools, schedule: str) -> None:
    flags = f"{layouts.MODELS['llama_gqa']} {PP2} --micro-batch-size 1 {schedule}"
    for called, number in ranks(2)(hooks_of_a_step, flags):
        assert called.count("on_before_forward") == called.count("on_after_backward") == number
        begun = 0
        for hook in called[:-1]:
            begun += {"on_before_forward": 1, "on_after_backward": -1}[hook]
            assert begun >= 0, "a microbatch ends after it has begun"
        assert called[-1] == "on_pre_optimizer_step"


@pytest.mark.parametrize(
    ("flags", "rule"),
    [
        (f"{PP2} --pipeline-schedule interleaved", "needs several chunks"),
        (f"{PP2} --pipeline-schedule 1f1b {TWO_CHUNKS}", "belongs to the interleaved schedule"),
        (f"{PP2} {ZERO_BUBBLE} {TWO_CHUNKS}", "belongs to the interleaved schedule"),
        (f"{PP2} {ZERO_BUBBLE} --torch-compile", "torch_compile compiles as a whole"),
        (ZERO_BUBBLE, "pipeline_model_parallel_size=1; raise it"),
        (TWO_CHUNKS, "pipeline_model_parallel_size=1; raise it"),
        (f"{PP2} --num-virtual-stages-per-pipeline-rank 3", "use at most 2 virtual stages"),
        (f"{PP2} {TWO_CHUNKS} --zero-stage 2", "zero_stage=2 runs without a pipeline"),
        (f"{PP2} {TWO_CHUNKS} --pipeline-partition-method 3,1", "has 2 numbers"),
        (f"{PP2} --pipeline-schedule gpipe", "pipeline_schedule"),
    ],
)
def test_what_no_schedule_can_run_is_refused_by_name(flags: str, rule: str) -> None:
    try:
        config, _ = parse_arguments([*layouts.COMMON.split(), *flags.split()])
        faults = check(config, 2)
    except ConfigError as error:
        faults = error.faults
    assert any(rule in fault for fault in faults), faults
