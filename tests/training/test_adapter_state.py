"""What a run with adapters saves, resumes from and draws: against its own uninterrupted run, and its base."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from megatron.checkpoint.format import CheckpointError
from megatron.checkpoint.reader import newest_checkpoint
from megatron.parallel.shards import named_parameters, shard_of
from megatron.resilience.replica_check import ReplicaCheck
from megatron.training.engine import Engine
from megatron.training.resume import find_start, restore_start
from megatron.weights.merging.adapters import merged_model
from megatron.weights.model import whole_model
from tests.ranks import RankPools
from tests.training import layouts
from tests.training.test_layouts import RECOMPUTE

MODEL, SAVED, LAST = layouts.MODELS["llama_gqa"], 2, 4
TARGETS = "q_proj v_proj down_proj embed_tokens lm_head"
SMALL = f"{MODEL} --lora-rank 4 --lora-alpha 16 --lr 1e-2 --use-dora --lora-target-modules {TARGETS}"
TP2 = "--tensor-model-parallel-size 2 --sequence-parallel"
PP2 = "--pipeline-model-parallel-size 2"


def start(arguments: str) -> tuple[Engine, Any, int]:
    """Build an engine that starts as a run does, and return it with the step to go on with."""
    engine, task = layouts.build(arguments)
    found = find_start(engine.config, engine.ctx)
    if engine.config.training.skip_train:
        found = dataclasses.replace(found, options=dataclasses.replace(found.options, finetune=True))
    if found.checkpoint is not None:
        restore_start(engine, found)
    return engine, task, found.progress.iteration


def make_base(
    folder: str, change: Callable[[dict[str, torch.Tensor]], object] | None = None, model: str = MODEL
) -> None:
    """Save a base model, changed in place by `change`."""
    engine, task = layouts.build(f"{model} --save {folder}")
    layouts.loss_of_step(engine, task, 0)
    if change is not None:
        with torch.no_grad():
            change(dict(named_parameters(engine.module)))
    layouts.save(engine, 1)


def train_adapters(arguments: str, base: str) -> list[float]:
    """Losses of LAST steps, saved after SAVED of them; the base keeps its bits."""
    engine, task, first = start(arguments)
    losses = []
    for step in range(first, LAST):
        if step == SAVED and engine.config.checkpoint.save is not None:
            layouts.save(engine, step)
        losses.append(layouts.loss_of_step(engine, task, step))
    ReplicaCheck(engine.ctx, engine.state.held()).check(LAST)
    checkpoint, ctx = newest_checkpoint(base), engine.ctx
    assert checkpoint is not None
    for name, parameter in named_parameters(engine.module):
        shard = shard_of(parameter)
        if not (shard.trained or shard.added):
            expected = shard.take(checkpoint.read_full(name), ctx.tensor_rank, ctx.tensor_size)
            assert torch.equal(parameter, expected), f"{name} has changed"
    return losses


def failure_of_start(arguments: str) -> str:
    try:
        start(arguments)
    except CheckpointError as error:
        return str(error)
    return ""


@pytest.fixture(scope="module")
def saved(ranks: RankPools, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, list[float]]:
    """A base model, a checkpoint of adapters saved by two ranks, and the losses of their run."""
    folder = tmp_path_factory.mktemp("adapters")
    base, adapters = folder / "base", folder / "adapters"
    ranks(1)(make_base, str(base))
    losses = ranks(2)(train_adapters, f"{SMALL} {TP2} --lora-dropout 0.1 --load {base} --save {adapters}", str(base))
    assert losses[0] == losses[1]
    return base, adapters, losses[0]


Saved = tuple[Path, Path, list[float]]


def test_a_resumed_run_goes_on_bit_for_bit(ranks: RankPools, saved: Saved) -> None:
    base, adapters, losses = saved
    resumed = ranks(2)(train_adapters, f"{SMALL} {TP2} --lora-dropout 0.1 --load {adapters}", str(base))
    assert resumed == [losses[SAVED:]] * 2


def test_adapters_resume_on_other_layouts(ranks: RankPools, saved: Saved, tmp_path: Path) -> None:
    base, _, _ = saved
    folder = tmp_path / "piped"
    (losses, _) = ranks(2)(train_adapters, f"{SMALL} {PP2} --load {base} --save {folder}", str(base))
    for world_size, layout in ((1, ""), (2, f"{TP2} --zero-stage 1"), (2, "--zero-stage 2")):
        resumed = ranks(world_size)(train_adapters, f"{SMALL} {layout} --load {folder}", str(base))
        assert resumed[0] == pytest.approx(losses[SAVED:], rel=1e-6), layout


def test_a_principal_start_is_resumed_on_any_layout(ranks: RankPools, saved: Saved, tmp_path: Path) -> None:
    """The base keeps its bits; what the adapters started from is saved with them."""
    base, _, _ = saved
    arguments = f"{SMALL} --lora-init pissa"
    (losses, _) = ranks(2)(train_adapters, f"{arguments} {TP2} --load {base} --save {tmp_path}", str(base))
    assert ranks(2)(train_adapters, f"{arguments} {TP2} --load {tmp_path}", str(base)) == [losses[SAVED:]] * 2
    (resumed, _) = ranks(2)(train_adapters, f"{arguments} {PP2} --zero-stage 1 --load {tmp_path}", str(base))
    assert resumed == pytest.approx(losses[SAVED:], rel=1e-6)
    merged, adapted = ranks(1)(evaluate_merged, str(tmp_path)), ranks(1)(evaluate, f"{arguments} --load {tmp_path}")
    assert merged == pytest.approx(adapted, rel=1e-6)


def evaluate_merged(adapters: str) -> float:
    """Loss of the base's model with the adapters in its weights."""
    checkpoint = newest_checkpoint(adapters)
    assert checkpoint is not None
    engine, task = layouts.build(MODEL)
    weights, parameters = dict(merged_model(checkpoint).tensors()), dict(named_parameters(engine.module))
    assert weights.keys() == parameters.keys()
    engine.state.set_weights(
        {name: F.pad(w, (0, 0) * (w.dim() - 1) + (0, len(parameters[name]) - len(w))) for name, w in weights.items()}
    )
    return layouts._evaluate(engine, task)


def test_a_checkpoint_holds_what_is_trained_alone(saved: Saved) -> None:
    base, adapters, _ = saved
    checkpoint, whole = newest_checkpoint(adapters), newest_checkpoint(base)
    assert checkpoint is not None
    assert whole is not None
    names = set(checkpoint.parameters)
    assert all("lora_" in name for name in names)
    assert len(names) == 3 * (4 * 3 + 2), "A, B, magnitudes of three modules in four layers, the embedding, the output"
    numbers = sum(checkpoint.read_full(name).numel() for name in names)
    stored = sum(path.stat().st_size for path in checkpoint.folder.glob("*.safetensors"))
    assert 12 * numbers <= stored < 12 * numbers + 1_000 * len(names), "weight and two moments, and the headers"
    identity = checkpoint.metadata["base"]["identity"]
    assert identity["algorithm"] == "row-column-sum-1"
    assert len(identity["tensors"]) == len(whole.parameters) + 4 * (2 + 1), "of the files: q, k, v; gate, up"
    with pytest.raises(CheckpointError, match=r"holds adapters of the base model in .*, not a whole model"):
        whole_model(checkpoint)


def change_one_number(parameters: dict[str, torch.Tensor]) -> None:
    parameters["layers.2.mlp.down.weight"][3, 5] += 1e-7


def permute_rotary_rows(parameters: dict[str, torch.Tensor]) -> None:
    for name in (name for name in parameters if name.endswith("attention.qkv.weight")):
        parameters[name].copy_(parameters[name].unflatten(0, (-1, 2)).flip(1).flatten(0, 1))


def roll_vocabulary(parameters: dict[str, torch.Tensor]) -> None:
    for name in ("embedding.word.weight", "output.weight"):
        parameters[name].copy_(parameters[name].roll(1, 0))


def swap_layers(parameters: dict[str, torch.Tensor]) -> None:
    one, other = (parameters[f"layers.{number}.mlp.down.weight"] for number in (0, 1))
    kept = one.clone()
    one.copy_(other)
    other.copy_(kept)


OTHERS: dict[str, tuple[Callable[[dict[str, torch.Tensor]], object], str]] = {
    "one number": (
        change_one_number,
        "1 of 39 tensors differ: model.layers.2.mlp.down_proj.weight. Give the folder of their base as --lora-base",
    ),
    "rotary": (permute_rotary_rows, "self_attn.q_proj.weight"),
    "vocabulary": (roll_vocabulary, "2 of 39 tensors differ: lm_head.weight, model.embed_tokens.weight"),
    "layers": (swap_layers, "tensors differ: model.layers.0.mlp.down_proj.weight"),
}


@pytest.mark.parametrize(
    "other", [pytest.param(other, marks=pytest.mark.slow if other in ("rotary", "layers") else ()) for other in OTHERS]
)
def test_adapters_of_another_base_are_refused(ranks: RankPools, saved: Saved, tmp_path: Path, other: str) -> None:
    """Also of one whose numbers are the same in another order; --allow-other-base takes it with a warning."""
    _, adapters, _ = saved
    change, named = OTHERS[other]
    ranks(1)(make_base, str(tmp_path / "other"), change)
    words = f"{SMALL} {TP2} --load {adapters} --lora-base {tmp_path / 'other'}"
    for fault in ranks(2)(failure_of_start, words):
        assert "holds adapters of another base model" in fault
        assert named in fault, fault
        assert "or pass --allow-other-base" in fault
    assert ranks(2)(failure_of_start, f"{words} --allow-other-base") == ["", ""]


IN_BLOCKS = f"{MODEL} --hidden-size 128 --ffn-hidden-size 256"
NF4 = f"{SMALL} --hidden-size 128 --ffn-hidden-size 256 --quantize-base nf4"


def base_sums(arguments: str) -> dict[str, str]:
    """Start, take a step where the run saves, and return the sums of the base."""
    engine, task, _ = start(arguments)
    if engine.config.checkpoint.save is not None:
        layouts.loss_of_step(engine, task, 0)
        layouts.save(engine, 1)
    return dict(engine.base["identity"]["tensors"])  # type: ignore[index]


def test_a_4_bit_base_is_known_by_what_it_was_made_of(ranks: RankPools, tmp_path: Path) -> None:
    base, other, adapters = tmp_path / "base", tmp_path / "other", tmp_path / "adapters"
    ranks(1)(make_base, str(base), None, IN_BLOCKS)
    ranks(1)(make_base, str(other), change_one_number, IN_BLOCKS)
    (saved, _) = ranks(2)(base_sums, f"{NF4} {TP2} --load {base} --save {adapters}")
    dense = NF4.replace("--quantize-base nf4", "")
    (whole, _) = ranks(2)(base_sums, f"{dense} --load {base}")
    assert saved == whole
    (fault,) = ranks(1)(failure_of_start, f"{NF4} --load {adapters} --lora-base {other}")
    assert " tensors differ: model.layers.2.mlp.down_proj.weight. Give the folder" in fault
    (fault,) = ranks(1)(failure_of_start, f"{dense} --load {adapters}")
    assert "trained with quantize_base=nf4; with quantize_base=none the base computes something else" in fault
    assert "Give --quantize-base nf4, or --finetune to start a new run" in fault
    assert ranks(1)(failure_of_start, f"{dense} --load {adapters} --finetune") == [""]


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ("", "holds adapters (lora_rank=4), not a whole model; give the lora options of their run"),
        (SMALL.removeprefix(MODEL).replace("--lora-alpha 16", "--lora-alpha 8"), "lora_alpha"),
        (
            SMALL.removeprefix(MODEL).replace("--lora-rank 4", "--lora-rank 2").replace("--lora-alpha 16", ""),
            "lora_rank=2 here, 4 there; lora_alpha=2 here, 16",
        ),
        (SMALL.removeprefix(MODEL).replace("--lora-rank 4", "--lora-rank 8"), "lora_"),
        (SMALL.removeprefix(MODEL).replace("v_proj", "k_proj"), "lora_B_v_proj and 7 more, which these options do not"),
        (SMALL.removeprefix(MODEL).replace("v_proj", "v_proj o_proj"), "attention.dense.lora_A is not in it"),
        (f"{SMALL.removeprefix(MODEL)} --lora-base nowhere", "lora_base=nowhere is not there"),
    ],
)
def test_other_options_than_those_of_the_adapters_are_refused(
    ranks: RankPools, saved: Saved, options: str, fault: str
) -> None:
    assert fault in ranks(1)(failure_of_start, f"{MODEL} {options} --load {saved[1]}")[0]


def test_evaluation_of_adapters_sees_them(ranks: RankPools, saved: Saved) -> None:
    """As the run that trained them does, and unlike its base."""
    base, adapters, _ = saved
    (trained, of_base) = (ranks(1)(evaluate, f"{SMALL} --load {folder}")[0] for folder in (adapters, base))
    assert ranks(1)(evaluate, f"{SMALL} --skip-train --eval-iters 1 --load {adapters}") == [trained]
    assert trained < of_base
    of_model = ranks(1)(evaluate, f"{MODEL} --load {base}")[0]
    assert of_base == pytest.approx(of_model, rel=1e-6), "new adapters change nothing: magnitudes are the base's norms"


@pytest.mark.parametrize("flags", ["", "--save elsewhere", "--skip-train --eval-iters 1"])
def test_a_folder_without_a_base_is_refused(ranks: RankPools, tmp_path: Path, flags: str) -> None:
    """A misspelt folder would otherwise train adapters of a model drawn from the seed."""
    (fault,) = ranks(1)(failure_of_start, f"{SMALL} {flags} --load {tmp_path / 'misspelt'}")
    assert ("misspelt holds none" if "--skip-train" in flags else "misspelt does not exist") in fault


def evaluate(arguments: str) -> float:
    engine, task, _ = start(arguments)
    return layouts._evaluate(engine, task)


# ---------------------------------------------------------------------------------------------------------------------
# Dropout


def first_losses(arguments: str) -> list[float]:
    engine, task = layouts.build(arguments)
    return [layouts.loss_of_step(engine, task, step) for step in range(3)]


def test_dropout_is_replayed_where_activations_are_recomputed(ranks: RankPools) -> None:
    arguments = f"{MODEL} --num-layers 2 --lora-rank 4 --lr 1e-1 --lora-dropout 0.3 {TP2}"
    expected = ranks(2)(first_losses, arguments)
    for recompute in RECOMPUTE[1:]:
        assert ranks(2)(first_losses, f"{arguments} --recompute-granularity {recompute}") == expected
    without = ranks(2)(first_losses, arguments.replace("--lora-dropout 0.3", ""))
    assert abs(without[0][-1] - expected[0][-1]) > 1e-4


def test_dropout_of_a_whole_input_is_that_of_one_process(ranks: RankPools) -> None:
    arguments = f"{MODEL} --lora-rank 4 --lr 1e-1 --lora-dropout 0.3 --lora-target-modules q_proj up_proj"
    (expected,) = ranks(1)(first_losses, arguments)
    for losses in ranks(2)(first_losses, f"{arguments} --tensor-model-parallel-size 2"):
        assert losses == pytest.approx(expected, rel=1e-5)
