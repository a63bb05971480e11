"""Frozen parameters: they never change, are saved once and whole, and the others train as if alone."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpoint.reader import Checkpoint
from megatron.parallel.context import ParallelContext
from megatron.parallel.shards import named_parameters, shard_of
from megatron.resilience.replica_check import ReplicaCheck
from megatron.settings.command_line import load_config
from tests.models.outputs import build_model
from tests.ranks import RankPools
from tests.training import layouts, planted

PATTERNS = ("*mlp*", "*word*", "*norm.weight")
"""About half of the parameters; where they are tied, the embeddings of both ends."""
FREEZE = f"--freeze {' '.join(PATTERNS)}"
STEPS = 3
PRECISIONS = ("", "--bf16", "--fp16 --initial-loss-scale 64")
TIED, UNTIED = (f"{layouts.MODELS[name]} --num-layers 2" for name in ("bloom_learned", "llama_gqa"))


def is_frozen(name: str) -> bool:
    return any(fnmatch(name, pattern) for pattern in PATTERNS)


def train_and_save(arguments: str, folder: str) -> list[float]:
    """Return the losses of STEPS steps, with a checkpoint before each."""
    with planted.float16_allowed(arguments):
        engine, task = layouts.build(f"{arguments} {FREEZE} --save {folder}")
        losses = []
        for step in range(STEPS):
            layouts.save(engine, step)
            losses.append(layouts.loss_of_step(engine, task, step))
        ReplicaCheck(engine.ctx, engine.state.held()).check(STEPS)
        return losses


def resume_and_save(arguments: str, folder: str, resumed: str) -> float:
    """Resume at the last checkpoint, save what was restored, and return the loss of one more step."""
    with planted.float16_allowed(arguments):
        engine, task = layouts.build(f"{arguments} {FREEZE} --load {folder} --save {resumed}")
        step = layouts.resume(engine)
        layouts.save(engine, step)
        return layouts.loss_of_step(engine, task, step)


def tensors(folder: Path, step: int) -> dict[tuple[str, str], torch.Tensor]:
    checkpoint = Checkpoint(folder / f"global_step{step}")
    return {
        (name, kind): checkpoint.read_full(name, kind)
        for name in checkpoint.parameters
        for kind in checkpoint.kinds_of(name)
    }


def assert_equal(one: dict[Any, torch.Tensor], other: dict[Any, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [key for key in one if not torch.equal(one[key], other[key])] == []


def cases() -> Iterator[Any]:
    """Each precision with each ZeRO stage on two data-parallel ranks, and pipelines and tensor parallelism.

    A case is (model, ranks, flags, ranks and flags to resume on).
    """
    tp2, pp2 = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2"
    for (index, precision), stage, tied in itertools.product(enumerate(PRECISIONS), range(4), (True, False)):
        # not -m slow: each stage once, and each precision, with either model
        marks = () if (index + stage) % 3 == 0 and tied == (stage % 2 == 0) else pytest.mark.slow
        name = f"{'tied' if tied else 'untied'} dp2 {precision} zero{stage}"
        flags, then = f"{precision} --zero-stage {stage}", (2, f"{tp2} {precision}")
        yield pytest.param(TIED if tied else UNTIED, 2, flags, then, id=name, marks=marks)
    for precision in PRECISIONS:
        marks = () if precision == "--bf16" else pytest.mark.slow
        yield pytest.param(TIED, 2, f"{pp2} {precision}", (1, precision), id=f"tied pp2 {precision}", marks=marks)
    yield pytest.param(UNTIED, 4, f"{tp2} --zero-stage 3", (2, f"{pp2} --zero-stage 1"), id="untied tp2 dp2 zero3")


@pytest.mark.parametrize(("model", "world_size", "flags", "then"), list(cases()))
def test_frozen_parameters_never_change_and_move_to_another_layout(
    ranks: RankPools, tmp_path: Path, model: str, world_size: int, flags: str, then: tuple[int, str]
) -> None:
    folder, same, other = tmp_path / "saved", tmp_path / "same", tmp_path / "other"
    (losses, *_) = ranks(world_size)(train_and_save, f"{model} {flags}", str(folder))
    before, after = tensors(folder, 0), tensors(folder, STEPS - 1)
    weights = {name for name, _ in after}
    assert {is_frozen(name) for name in weights} == {True, False}
    for name in weights:
        kinds = [kind for at, kind in after if at == name]
        assert (kinds == ["weight"]) == is_frozen(name), f"{name} has {kinds}"
        is_equal = torch.equal(before[name, "weight"], after[name, "weight"])
        assert is_equal == is_frozen(name), f"{name} is {'as' if is_equal else 'not as'} it was"
    resumed = ranks(world_size)(resume_and_save, f"{model} {flags}", str(folder), str(same))
    assert set(resumed) == {losses[-1]}, "the same layout goes on bit for bit"
    assert_equal(tensors(same, STEPS - 1), after)
    then_size, then_flags = then
    moved = ranks(then_size)(resume_and_save, f"{model} {then_flags}", str(folder), str(other))
    assert_equal(tensors(other, STEPS - 1), after)
    precise = not ("bf16" in flags or "fp16" in flags)
    assert moved[0] == pytest.approx(losses[-1], rel=1e-5 if precise else 1e-2)


def plain_losses(model: str) -> list[float]:
    """Return the losses of an independent loop on one process: torch's AdamW and clipping over what is trained."""
    config = load_config([*layouts.COMMON.split(), *model.split(), *FREEZE.split()])
    module = build_model(config, ParallelContext.single())
    trained = [parameter for name, parameter in named_parameters(module) if not is_frozen(name)]
    assert 0 < len(trained) < len(list(module.parameters()))
    for name, parameter in named_parameters(module):
        parameter.requires_grad_(not is_frozen(name))
    groups = [
        {"params": [p for p in trained if len(shard_of(p).shape) > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if len(shard_of(p).shape) == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    losses = []
    for step in range(STEPS):
        total = 0.0
        tokens = torch.from_numpy(layouts.step_tokens(step, 8, 32))
        for begin in range(0, 8, 2):
            inputs, labels = tokens[begin : begin + 2, :-1], tokens[begin : begin + 2, 1:]
            logits = module(inputs, lambda outputs: outputs[0] @ outputs[1][: config.model.vocab_size].t())
            loss = torch.nn.functional.cross_entropy(logits.transpose(0, 1).flatten(0, 1), labels.flatten()) / 4
            loss.backward()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


@pytest.mark.parametrize(
    ("model", "flags"),
    [(TIED, ""), (UNTIED, "--no-pipeline-parallel"), (UNTIED, "--zero-stage 1"), (TIED, "--zero-stage 3")],
)
def test_the_others_train_as_in_plain_torch(ranks: RankPools, tmp_path: Path, model: str, flags: str) -> None:
    (losses,) = ranks(1)(train_and_save, f"{model} {flags}", str(tmp_path / "saved"))
    assert losses == pytest.approx(plain_losses(model), rel=2e-6)


@pytest.mark.parametrize(
    ("world_size", "flags"),
    [
        (2, "--bf16"),
        (4, "--zero-stage 2"),
        pytest.param(2, "", marks=pytest.mark.slow),
        pytest.param(4, "--zero-stage 1", marks=pytest.mark.slow),
        pytest.param(4, "--zero-stage 3", marks=pytest.mark.slow),
    ],
)
def test_a_gradient_that_is_not_finite_changes_nothing(ranks: RankPools, world_size: int, flags: str) -> None:
    """In a parameter that the first tensor-parallel rank counts for the others too."""
    name = "layers.0.attention_norm.bias"
    arguments = f"{TIED} --tensor-model-parallel-size 2 {flags} {FREEZE}"
    for (result,) in ranks(world_size)(planted.plant_all, arguments, [("gradient", 1, name)]):
        assert result["changed"] == []
        assert (result["good"], result["bad"], result["following"]) == ((False, True), (True, False), (False, True))


def test_a_run_that_trains_more_than_it_did_needs_no_optimizer_state(ranks: RankPools, tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    ranks(1)(train_and_save, TIED, str(folder))
    (fault,) = ranks(1)(resume_unfrozen, f"{TIED} --load {folder}")
    assert "frozen when it was saved; freeze the same parameters, or pass --no-load-optim" in fault
    assert ranks(1)(resume_unfrozen, f"{TIED} --load {folder} --no-load-optim") == [""]


def resume_unfrozen(arguments: str) -> str:
    engine, _ = layouts.build(arguments)
    try:
        layouts.resume(engine)
    except ValueError as error:
        return str(error)
    return ""


STAGES = "--pipeline-model-parallel-size 2 --pipeline-partition-method 1,1"


HALF = "--fp16 --initial-loss-scale 64"


@pytest.mark.parametrize(
    ("trained", "precision"),
    [
        pytest.param(trained, precision, marks=() if precision in often else pytest.mark.slow)
        for trained, often in (("first", ("--bf16",)), ("last", ("--zero-stage 1",)))
        for precision in ("", "--zero-stage 1", "--bf16", HALF)
    ],
)
def test_a_pipeline_stage_may_train_nothing(ranks: RankPools, tmp_path: Path, trained: str, precision: str) -> None:
    """Losses are those of one process, and a run that resumes on the other layout goes on as it did."""
    frozen = "layers.1.* final_norm.* output.*" if trained == "first" else "embedding.* layers.0.*"
    model = f"{UNTIED} {precision} --freeze {frozen}"
    single, piped = tmp_path / "single", tmp_path / "piped"
    (expected,) = ranks(1)(train_frozen, model, str(single))
    for losses in ranks(2)(train_frozen, f"{model} {STAGES}", str(piped)):
        assert losses == pytest.approx(expected, rel=1e-5 if not precision or "zero" in precision else 5e-3)
    assert_equal_scalars(single, piped)
    (resumed,) = ranks(1)(resume_frozen, f"{model} --load {piped}")
    assert resumed == pytest.approx(expected[-1], rel=1e-5 if not precision or "zero" in precision else 5e-3)


def assert_equal_scalars(one: Path, other: Path) -> None:
    steps = [Checkpoint(folder / f"global_step{STEPS - 1}").metadata["optimizer"]["step"] for folder in (one, other)]
    assert steps == [STEPS - 1] * 2


def train_frozen(arguments: str, folder: str) -> list[float]:
    with planted.float16_allowed(arguments):
        engine, task = layouts.build(f"{arguments} --save {folder}")
        losses = [layouts.loss_of_step(engine, task, step) for step in range(STEPS - 1)]
        layouts.save(engine, STEPS - 1)
        return [*losses, layouts.loss_of_step(engine, task, STEPS - 1)]


def resume_frozen(arguments: str) -> float:
    with planted.float16_allowed(arguments):
        engine, task = layouts.build(arguments)
        return layouts.loss_of_step(engine, task, layouts.resume(engine))
