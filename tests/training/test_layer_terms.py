"""Loss terms and metrics that layers add, on every layout, against one process and against plain torch."""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F

from megatron.models.positions import Packing
from megatron.options.config import ConfigError
from megatron.parallel.context import ParallelContext
from megatron.parallel.shards import LayerDeclaration, named_parameters
from megatron.resilience.attribution import find_origin
from megatron.resilience.rank_record import RankPlace
from megatron.settings.command_line import load_config
from megatron.tasks.registry import load_task
from megatron.training.losses import StepLosses
from megatron.training.step_checks import step_record
from tests import runs
from tests.ranks import RankPools
from tests.tasks import chats
from tests.training import layouts, routed_family

FLAGS = "--architecture tests.training.routed_family:FAMILY --position-embedding-type rope"
FLAGS += " --untie-embeddings-and-output-weights --clip-grad 0"
STEPS = 3


def train(arguments: str, steps: int) -> dict[str, Any]:
    """Results of some steps; the gradients of the first one, by name, of this rank's weights."""
    engine, task = layouts.build(arguments)
    gradients: dict[str, torch.Tensor] = {}

    def take(event: str, loss: float | None) -> None:
        if event == "on_pre_optimizer_step" and not gradients:
            named = named_parameters(engine.module)
            gradients.update({name: p.grad.clone() for name, p in named if p.grad is not None})

    engine.watch(take)
    rows = []
    for step in range(steps):
        batches, count = layouts.step_batches(engine, task, step), layouts.num_microbatches(engine)
        lr, consumed = engine.config.optimizer.lr, step * engine.config.training.global_batch_size
        done = engine.train_step(batches, num_microbatches=count, consumed_samples=consumed, lr=lr)
        numbers = {"loss": done.loss, "norm": float(done.grad_norm), "layer_loss": done.layer_loss}
        rows.append(numbers | engine.read_metrics(done.metrics))
    held_out = layouts.step_batches(engine, task, layouts.HELD_OUT)
    evaluated = engine.evaluate(held_out, layouts.num_microbatches(engine))
    validation = {"loss": float(evaluated.loss), **engine.read_metrics(evaluated.metrics)}
    return {"rows": rows, "validation": validation, "gradients": gradients}


def plain(arguments: str) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """Return the first step's numbers and gradients by autograd alone, over the global batch as one."""
    engine, task = layouts.build(arguments)
    batches = layouts.step_batches(engine, task, 0)
    tokens = torch.cat([batch.inputs for batch in batches])
    labels = torch.cat([batch.targets[0] for batch in batches])
    outputs: list[torch.Tensor] = []
    layers = [module for module in engine.module.modules() if isinstance(module, routed_family.RoutedLayer)]
    for layer in layers:
        layer.router.register_forward_hook(lambda module, inputs, output: outputs.append(output))
    hidden, weight = engine.module(tokens)
    logits = (hidden @ weight.t())[..., :250].transpose(0, 1)
    loss = F.cross_entropy(logits.reshape(-1, 250), labels.reshape(-1))
    terms = [routed_family.terms_of(each) for each in outputs]
    means = {name: torch.stack([term[name].mean() for term in terms]) for name in routed_family.COEFFICIENTS}
    added = torch.stack([routed_family.COEFFICIENTS[name] * mean.sum() for name, mean in means.items()]).sum()
    named = dict(named_parameters(engine.module))
    gradients = torch.autograd.grad(loss + added, list(named.values()))
    norm = torch.cat([gradient.flatten() for gradient in gradients]).double().norm()
    shares = torch.cat([each.softmax(-1) for each in outputs])
    return {
        "loss": loss.item(),
        "norm": norm.item(),
        "layer_loss": added.item(),
        **{name: mean.mean().item() for name, mean in means.items()},
        "highest": shares.max().item(),
        "routed": float(len(layers) * tokens.numel()),
        "entropy": torch.special.entr(shares).sum(-1).mean().item(),
    }, dict(zip(named, gradients, strict=True))


@pytest.fixture(scope="module")
def alone(ranks: RankPools) -> Any:
    return functools.cache(lambda flags="": ranks(1)(train, f"{FLAGS} {flags}", STEPS)[0])


def test_one_process_computes_what_plain_torch_does(ranks: RankPools, alone: Any) -> None:
    numbers, gradients = ranks(1)(plain, FLAGS)[0]
    found = alone()
    assert found["rows"][0] == pytest.approx(numbers, rel=2e-6)
    assert found["gradients"].keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert (found["gradients"][name] - gradient).norm() < 1e-6 * gradient.norm(), name
    # the terms reach the gradient, are no part of the loss, and are no part of a validation's
    assert numbers["layer_loss"] > 0.1 * numbers["loss"]
    assert found["rows"][-1]["balance"] < found["rows"][0]["balance"]


PP2, TP2 = "--pipeline-model-parallel-size 2", "--tensor-model-parallel-size 2"


@pytest.mark.parametrize(
    ("ranks_needed", "flags"),
    [
        pytest.param(1, "--zero-stage 2", marks=pytest.mark.slow),
        pytest.param(2, TP2, marks=pytest.mark.slow),
        (2, f"{TP2} --sequence-parallel --recompute-granularity full"),
        pytest.param(2, PP2, marks=pytest.mark.slow),
        pytest.param(2, f"{PP2} --pipeline-schedule zero-bubble", marks=pytest.mark.slow),
        (2, f"{PP2} --num-virtual-stages-per-pipeline-rank 2 --recompute-granularity full"),
        pytest.param(2, "--zero-stage 1", marks=pytest.mark.slow),
        (2, "--zero-stage 3 --recompute-granularity full"),
        pytest.param(4, f"{PP2} {TP2}", marks=pytest.mark.slow),
        pytest.param(
            4,
            f"{PP2} {TP2} --sequence-parallel --recompute-granularity selective --recompute-modules layernorm mlp",
            marks=pytest.mark.slow,
        ),
        pytest.param(4, "--pipeline-model-parallel-size 4 --micro-batch-size 1", marks=pytest.mark.slow),
        (4, f"{PP2} --zero-stage 1 --micro-batch-size 1"),
    ],
)
def test_every_layout_computes_what_one_process_does(
    ranks: RankPools, alone: Any, ranks_needed: int, flags: str
) -> None:
    expected = alone()
    for found in ranks(ranks_needed)(train, f"{FLAGS} {flags}", STEPS):
        assert found["rows"][0] == pytest.approx(expected["rows"][0], rel=1e-6)
        for row, of_one in zip(found["rows"], expected["rows"], strict=True):
            assert row == pytest.approx(of_one, rel=1e-5)
        assert found["validation"] == pytest.approx(expected["validation"], rel=1e-5)


def test_a_scaled_loss_scales_the_terms(ranks: RankPools, alone: Any) -> None:
    found = ranks(2)(train_fp16, f"{FLAGS} {PP2} --initial-loss-scale 1024", 1)[0]
    assert found["rows"][0] == pytest.approx(alone()["rows"][0], rel=2e-3)


def train_fp16(arguments: str, steps: int) -> dict[str, Any]:
    with layouts.allows_fp16():
        return train(f"{arguments} --fp16", steps)


def test_padding_is_no_token() -> None:
    starts = torch.tensor([[0, 0, 2, 2, 4, 5], [0, 1, 2, 3, 4, 5], [0, 0, 0, 3, 3, 3], [0, 1, 1, 3, 4, 5]])
    packing = Packing(torch.zeros_like(starts), starts)
    expected = [[1, 1, 1, 1, 0, 0], [0] * 6, [1] * 6, [1, 1, 1, 0, 0, 0]]
    assert packing.is_token_BS.int().tolist() == expected


@pytest.mark.parametrize("packing", ["step", pytest.param("dataset", marks=pytest.mark.slow)])
def test_padded_rows_weigh_by_their_tokens_on_every_layout(ranks: RankPools, tmp_path: Path, packing: str) -> None:
    """Ranks differ in their tokens and have microbatches of padding alone; inner stages read none."""
    data = chats.write_chats(tmp_path / "data", chats.some_lengths(40, 30))
    flags = f"{FLAGS} --num-layers 4 --vocab-size 256 --seq-length 32 --train-iters 3 --data-path {data} --task sft"
    flags += " --hidden-dropout 0 --attention-dropout 0"
    flags += f" --packing {packing} --split 6,4,0 --eval-interval 3 --global-batch-size 3 --micro-batch-size 1"
    flags += " --max-batch-len 40" if packing == "step" else ""
    results = []
    for number, layout in enumerate(["", "--pipeline-model-parallel-size 4", f"{TP2} --sequence-parallel", PP2]):
        folder = tmp_path / f"out{number}"
        assert set(ranks([1, 4, 4, 2][number])(runs.train, f"{flags} {layout} --results-dir {folder}")) == {""}
        results.append([runs.rows(folder), runs.rows(folder, "valid")])
    for found in results[1:]:
        for kind, expected in zip(found, results[0], strict=True):
            for row, of_one in zip(kind, expected, strict=True):
                assert row["lm_loss"] == pytest.approx(of_one["lm_loss"], rel=1e-5)
                assert row["metrics"] == pytest.approx(of_one["metrics"], rel=1e-5)
            assert {*routed_family.COEFFICIENTS, *routed_family.METRICS} == set(kind[0]["metrics"])
        norms = [[row["grad_norm"] for row in rows] for rows in (found[0], results[0][0])]
        assert norms[0] == pytest.approx(norms[1], rel=1e-5)


def faulty(arguments: str, bad_rank: int) -> tuple[Any, ...]:
    """One step in which the terms of a rank are not numbers, though its loss and its gradient are finite."""
    engine, task = layouts.build(arguments)
    before = [p.detach().clone() for _, p in named_parameters(engine.module)]
    of_logits, is_bad = routed_family.terms_of, engine.ctx.rank == bad_rank

    def terms_of(logits: torch.Tensor) -> dict[str, torch.Tensor]:
        terms = of_logits(logits)
        return {name: term.detach() * math.nan for name, term in terms.items()} if is_bad else terms

    batches, count = layouts.step_batches(engine, task, 0), layouts.num_microbatches(engine)
    with patch.object(routed_family, "terms_of", terms_of):
        done = engine.train_step(batches, num_microbatches=count, consumed_samples=0, lr=1e-3)
    is_equal = all(torch.equal(a, b) for a, (_, b) in zip(before, named_parameters(engine.module), strict=True))
    record = step_record(engine.module, engine.ctx, RankPlace.of(engine.ctx))
    return math.isfinite(done.loss), done.is_finite, done.skipped, is_equal, record


@pytest.mark.parametrize("bad_rank", [0, 3])
def test_a_term_that_is_not_finite_is_refused_and_attributed(ranks: RankPools, bad_rank: int) -> None:
    found = ranks(4)(faulty, f"{FLAGS} {PP2}", bad_rank)
    assert {each[:4] for each in found} == {(True, False, True, True)}
    assert find_origin([each[4] for each in found], 2).ranks == (bad_rank,)


def test_layers_that_disagree_on_a_term_are_refused() -> None:
    build = routed_family.BLOCK.build
    layers = [LayerDeclaration(f"layers.{i}", {}, build, loss_terms={"z": i + 1.0}) for i in range(2)]
    objective = load_task(load_config([*runs.TINY.split(), "--train-iters", "1", "--data-path", "none"], 1)).objective
    with pytest.raises(ConfigError, match=r"layers.1 declares z=2.0, an earlier layer 1.0; make them equal"):
        StepLosses(objective, ParallelContext.single(), layers)
