"""LoRA on every layout: one process is the reference, itself compared with PEFT in tests/models/test_adapters.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron.checkpoint.reader import Checkpoint
from megatron.config.command_line import parse_arguments
from megatron.config.validation import check, idle
from megatron.parallel.context import ParallelContext
from megatron.parallel.shards import named_parameters
from megatron.planning.progress import Progress
from megatron.resilience.replica_check import checksum
from megatron.tasks.pretrain import PretrainTask
from megatron.training.build import build_engine
from megatron.training.checkpoints import Checkpoints
from megatron.training.resume import find_start, restore_start
from tests.ranks import RankPools
from tests.training import layouts
from tests.training.test_layouts import LAYOUTS, RECOMPUTE, WITH_SEQUENCE, arguments, assert_equals_reference

STEPS = 20
CHEAP = {(0, "221s"), (1, "122s"), (0, "112"), (1, "121")}
"""Model and layout of the cases that are not slow."""
LORA = "--lora-rank 4 --lora-alpha 16 --lr 1e-2"
CASES = {
    "llama_gqa": f"{LORA} --lora-target-modules q_proj v_proj down_proj",
    "bloom_learned": LORA,
}


@pytest.fixture(scope="module")
def reference(ranks: RankPools) -> Any:
    results: dict[str, dict[str, Any]] = {}

    def get(model: str) -> dict[str, Any]:
        if model not in results:
            results[model] = ranks(1)(layouts.train, f"{layouts.MODELS[model]} {CASES[model]}", STEPS)[0]
        return results[model]

    return get


@pytest.mark.parametrize(
    ("model", "layout", "recompute", "zero"),
    [
        pytest.param(
            model,
            layout,
            RECOMPUTE[(place + index) % 3],
            (place + index) % 4 if layout[0] == "1" else (place + index) % 2,
            marks=() if (index, layout) in CHEAP else pytest.mark.slow,
        )
        for index, model in enumerate(CASES)
        for place, layout in enumerate(LAYOUTS + WITH_SEQUENCE)
    ],
)
def test_adapters_learn_on_every_layout_as_on_one_process(
    ranks: RankPools, reference: Any, model: str, layout: str, recompute: str, zero: int
) -> None:
    world_size, flags = arguments(layout, recompute, zero)
    results = ranks(world_size)(layouts.train, f"{layouts.MODELS[model]} {CASES[model]} {flags}", STEPS)
    assert all(result == results[0] for result in results), "ranks disagree"
    assert_equals_reference(results[0], reference(model))


ONE_LAYER = "--lora-target-modules layers.0.attention.qkv"


@pytest.mark.parametrize(
    ("schedule", "targets"),
    [
        ("--pipeline-schedule zero-bubble", ""),
        ("--num-virtual-stages-per-pipeline-rank 2", ONE_LAYER),
        ("--pipeline-schedule zero-bubble", ONE_LAYER),
        ("--zero-stage 1 --loraplus-lr-ratio 4", f"{ONE_LAYER} --lora-bias lora_only"),
    ],
)
def test_adapters_learn_under_every_schedule_also_on_the_first_stage_alone(
    ranks: RankPools, schedule: str, targets: str
) -> None:
    flags = f"{layouts.MODELS['bloom_learned']} {LORA} {targets} --micro-batch-size 4"
    plus = "--loraplus-lr-ratio 4" if "loraplus" in schedule else ""
    (expected,) = ranks(1)(layouts.train, f"{flags} {plus}", 4)
    for result in ranks(2)(layouts.train, f"{flags} {schedule} --pipeline-model-parallel-size 2", 4):
        assert result["losses"] == pytest.approx(expected["losses"], rel=1e-6)
    assert expected["losses"][-1] != expected["losses"][0]


def start(arguments: str) -> tuple[Any, Any, Any, list[str]]:
    """Build an engine and restore what a run with these options starts from, as train.py does."""
    config, _ = parse_arguments([*layouts.COMMON.split(), *arguments.split()])
    ctx = ParallelContext.build(config.parallel, "cpu")
    faults = check(config, ctx.world_size)
    assert not faults, faults
    task = PretrainTask(config)
    begin = find_start(config, ctx)
    engine = build_engine(config, ctx, task, will_restore=True)
    return engine, task, begin, restore_start(engine, begin)


def train_and_save(arguments: str, stop_after: int) -> tuple[list[float], dict[str, str]]:
    """Losses from where the run starts to step 4, with a save after `stop_after`, and the checksums of the base."""
    engine, task, begin, _ = start(arguments)
    losses = []
    for step in range(begin.progress.iteration, 4):
        losses.append(layouts.loss_of_step(engine, task, step))
        if step + 1 == stop_after:
            with Checkpoints(engine.config, engine.ctx, run=begin.run) as checkpoints:
                checkpoints.save(engine, Progress(iteration=step + 1, consumed_samples=8 * step + 8), "data")
                checkpoints.finish(lambda _: None)
    assert engine.base is not None
    frozen = {n: checksum(p.detach().float()) for n, p in named_parameters(engine.module) if not p.requires_grad}
    return losses, {name: f"{int(value)}" for name, value in frozen.items()}


def refusal(arguments: str) -> str:
    try:
        start(arguments)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("world_size", "flags", "then"),
    [
        (2, "--zero-stage 1 --lora-dropout 0.1", (2, "--zero-stage 1 --lora-dropout 0.1")),
        (2, "--tensor-model-parallel-size 2 --sequence-parallel", (2, "--pipeline-model-parallel-size 2")),
        (2, "--bf16", (2, "--bf16 --zero-stage 3")),
    ],
)
def test_adapters_resume_on_any_layout_and_leave_their_base_alone(
    ranks: RankPools, tmp_path: Path, world_size: int, flags: str, then: tuple[int, str]
) -> None:
    base, save = tmp_path / "base", tmp_path / "save"
    model = layouts.MODELS["llama_gqa"]
    ranks(1)(layouts.train_then_save, f"{model} --seed 5", 1, str(base))
    run = f"{model} {LORA} --load {base} --save {save} --lora-target-modules q_proj v_proj down_proj --weight-decay 0.1"
    (losses, frozen), *_ = ranks(world_size)(train_and_save, f"{run} {flags}", 2)
    saved = Checkpoint(save / "global_step2")
    assert {name.rpartition(".")[2] for name in saved.parameters} == {
        "lora_A", "lora_B", "lora_A_q_proj", "lora_B_q_proj", "lora_A_v_proj", "lora_B_v_proj",
    }  # fmt: skip
    resumed = ranks(then[0])(train_and_save, f"{run} {then[1]}", 9)
    if flags == then[1]:
        assert resumed[0] == (losses[2:], frozen), "the same layout goes on bit for bit"
    assert resumed[0][0] == pytest.approx(losses[2:], rel=1e-2 if "bf16" in flags else 1e-5)
    other = tmp_path / "other"
    ranks(1)(layouts.train_then_save, f"{model} --seed 6", 1, str(other))
    (fault,) = ranks(1)(refusal, f"{run} --lora-base {other}")
    assert f"holds adapters of another base model than {other}" in fault
    assert "tensors differ: embedding.word.weight" in fault
    (fault,) = ranks(1)(refusal, f"{run} --lora-alpha 8")
    assert "lora_alpha=8.0 here, 16.0 there" in fault
    (fault,) = ranks(1)(refusal, f"{model} --load {save}")
    assert "holds adapters (lora_rank=4), not a whole model" in fault


def test_faults_of_the_options_are_in_one_message() -> None:
    arguments = f"{layouts.COMMON} {layouts.MODELS['llama_gqa']}".split()
    config, _ = parse_arguments([*arguments, *"--lora-rank 500 --lora-target-modules query --freeze output.*".split()])
    faults = "\n".join(check(config, 1))
    assert "leave freeze out" in faults
    assert "lora_target_modules=query matches no linear layer" in faults
    assert "q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj" in faults
    config, _ = parse_arguments([*arguments, *"--lora-rank 33 --lora-target-modules q_proj v_proj Wqkv".split()])
    (fault,) = check(config, 1)
    assert "rank 33 of the adapter of v_proj, which is [32, 64], is above 32" in fault
    assert any(line.startswith("lora_target_modules=Wqkv matches no linear layer") for line in idle(config))
