"""A user's loss function gives plain torch's losses and gradients on every layout; what is wrong with one is named."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron.options.config import ConfigError
from megatron.parallel.context import ParallelContext
from megatron.parallel.losses import token_log_probs
from megatron.settings.command_line import load_config
from megatron.tasks.loss_function import LossBatch
from megatron.tasks.pretrain import PretrainTask
from megatron.tasks.sft import SFTTask
from tests import runs
from tests.models.outputs import build_model
from tests.ranks import RankPools
from tests.tasks.chats import write_chats

STEPS = "--train-iters 3 --hidden-dropout 0 --attention-dropout 0 --split 8,2,0 --eod-mask-loss --eod-token-id 0"


def focal(log_probs: Tensor, batch: LossBatch) -> Tensor:
    """The first dataset is unlearned, by a loss that is not linear in the log-probabilities."""
    losses = -log_probs * (1 - log_probs.exp()) ** 2
    return torch.where(batch.sources == 0, -0.5 * losses, losses)


def focal_of_hidden(hidden: Tensor, batch: LossBatch) -> Tensor:
    return focal(token_log_probs(hidden, batch.output_weight, batch.labels, batch.ctx), batch)


def beyond_reference(log_probs: Tensor, batch: LossBatch, reference: Tensor) -> Tensor:
    """0 where the model is its reference."""
    return (reference - log_probs).exp() - 1


def of_one_argument(log_probs: Tensor) -> Tensor:
    return log_probs


def a_mean(log_probs: Tensor, batch: LossBatch) -> Tensor:
    return -log_probs.mean()


def a_number(log_probs: Tensor, batch: LossBatch) -> float:
    return 1.0


def no_gradient(log_probs: Tensor, batch: LossBatch) -> Tensor:
    return -log_probs.detach()


def infinite(log_probs: Tensor, batch: LossBatch) -> Tensor:
    return log_probs / 0


def raises_on_rank_one(log_probs: Tensor, batch: LossBatch) -> Tensor:
    if os.environ["RANK"] == "1":
        raise ValueError("no such label")
    return -log_probs


def differs(log_probs: Tensor, batch: LossBatch) -> Tensor:
    return -log_probs * (1 + int(os.environ["RANK"]))


def own(function: str) -> str:
    return f"--loss {__name__}:{function}"


@pytest.fixture(scope="module")
def blend(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("sources")
    paths = [runs.write_dataset(folder / f"{seed}", seed=seed) for seed in range(2)]
    return f"--data-path 0.25 {paths[0]} 0.75 {paths[1]}"


def expected_first_step(flags: str) -> tuple[float, float, list[float]]:
    """Loss, gradient norm and nll of all and each dataset in the first step, in float64 by torch alone."""
    config = load_config([*runs.TINY.split(), *flags.split()])
    data: Any = PretrainTask(config).data.open(ParallelContext.single())[0]
    tokens = torch.from_numpy(data.get_batch(range(8)))
    sources = torch.tensor([int(Path(data.documents_of(sample)[0]).name) for sample in range(8)])[:, None]
    assert set(sources.flatten().tolist()) == {0, 1}
    inputs, labels = tokens[:, :-1], tokens[:, 1:]
    model = build_model(config, ParallelContext.single()).double()
    logits = model(inputs, lambda outputs: outputs[0] @ outputs[1][: config.model.vocab_size].t()).transpose(0, 1)
    log_probs = logits.log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    counts = (inputs != 0).double()
    losses = -log_probs * (1 - log_probs.exp()).pow(2) * torch.where(sources == 0, -0.5, 1.0)
    loss = (losses * counts).sum() / counts.sum()
    loss.backward()
    norm = math.sqrt(sum(float((p.grad**2).sum()) for p in model.parameters() if p.grad is not None))
    masks = [counts, counts * (sources == 0), counts * (sources == 1)]
    return loss.item(), norm, [float(-(log_probs.detach() * mask).sum() / mask.sum()) for mask in masks]


def test_losses_and_gradients_are_those_of_plain_torch_on_every_layout(
    ranks: RankPools, tmp_path: Path, blend: str
) -> None:
    loss, norm, nll = expected_first_step(f"{STEPS} {blend}")
    found: list[list[dict[str, Any]]] = []
    for world_size, function, layout in (
        (1, "focal", ""),
        (4, "focal", "--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2"),
        (2, "focal_of_hidden", "--tensor-model-parallel-size 2 --sequence-parallel --no-pipeline-parallel"),
        (2, "focal", "--zero-stage 2"),
    ):
        results = tmp_path / str(len(found))
        flags = f"{STEPS} {blend} {own(function)} {layout} --results-dir {results}"
        assert set(ranks(world_size)(runs.train, flags)) == {""}
        first = runs.rows(results)[0]
        assert first["lm_loss"] == pytest.approx(loss, rel=1e-5)
        assert f" | {function} loss: " in (results / "train.log").read_text()
        assert first["grad_norm"] == pytest.approx(norm, rel=1e-5)
        if function == "focal":
            names = ["nll", "nll/0", "nll/1"]
            assert [first["metrics"][name] for name in names] == pytest.approx(nll, rel=1e-5)
        found.append(runs.rows(results))
    for other in found[1:]:
        assert [row["lm_loss"] for row in other] == pytest.approx([row["lm_loss"] for row in found[0]], abs=1e-5)


def test_the_reference_is_the_model_without_its_adapters(ranks: RankPools, tmp_path: Path, blend: str) -> None:
    flags = f"{STEPS} {blend} {own('beyond_reference')} --lora-rank 2 --lora-alpha 4 --no-load-optim"
    flags += f" --pipeline-model-parallel-size 2 --results-dir {tmp_path / 'out'}"
    assert set(ranks(2)(runs.train, flags)) == {""}
    losses = [row["lm_loss"] for row in runs.rows(tmp_path / "out")]
    assert losses[0] == pytest.approx(0, abs=1e-6)  # B of a new adapter is 0
    assert losses[1] < -1e-5 > losses[2]


def test_without_adapters_the_reference_is_the_model_at_the_start(ranks: RankPools, tmp_path: Path, blend: str) -> None:
    """It is computed once, also for a run that is resumed on another layout."""
    flags = f"{STEPS} {blend} {own('beyond_reference')} --eval-interval 3"
    save = f"--save {tmp_path / 'state'} --exit-interval 2"
    results = [tmp_path / name for name in ("whole", "stopped", "resumed")]
    assert ranks(1)(runs.train, f"{flags} --results-dir {results[0]}") == [""]
    data = Path(blend.split()[2]).parent
    files = sorted(data.glob("*.labels-*"))
    assert len(files) == 2  # training and validation
    pipeline = "--pipeline-model-parallel-size 2"
    assert set(ranks(2)(runs.train, f"{flags} {save} {pipeline} --results-dir {results[1]}")) == {""}
    assert ranks(1)(runs.train, f"{flags} {save} --results-dir {results[2]}") == [""]
    assert sorted(data.glob("*.labels-*")) == files
    whole, *parts = ([row["lm_loss"] for row in runs.rows(folder)] for folder in results)
    assert whole[0] == pytest.approx(0, abs=1e-6)
    assert whole[1] < -1e-5 > whole[2]
    assert [*parts[0], *parts[1]] == pytest.approx(whole, abs=1e-5)
    assert runs.rows(results[2], "valid")[-1]["lm_loss"] == pytest.approx(
        runs.rows(results[0], "valid")[-1]["lm_loss"], abs=1e-5
    )
    for file in files:
        file.unlink()
    flags += " --train-iters 4 --override-opt-param-scheduler"
    (message,) = ranks(1)(runs.train, f"{flags} {save} --results-dir {results[2]}")
    assert "and this run has trained the model since; put the file back" in message


@pytest.mark.parametrize(
    ("flags", "fault"),
    [
        (own("nothing"), "loss=tests.tasks.test_objective:nothing cannot be loaded: AttributeError"),
        ("--loss none.py:focal", "loss=none.py:focal cannot be loaded: FileNotFoundError"),
        (own("STEPS"), "is a str; give a function"),
        (own("of_one_argument"), "has the arguments (log_probs); use one of (log_probs, batch), ("),
        (f"{own('beyond_reference')} --lora-rank 2 --lora-alpha 2 --lora-bias all", "trains a part of the base, which"),
        (f"{own('focal_of_hidden')} --context-parallel-size 2", "takes hidden states, and context-parallel ranks have"),
        (f"{own('focal')} --task preference", "task=preference has a loss of its own; leave one out"),
        (f"{own('focal')} --data-path 1 a 1 b 1 a", "has a at two places"),
    ],
)
def test_faults_of_a_loss_are_reported_with_the_others(flags: str, fault: str) -> None:
    words = [*runs.TINY.split(), "--train-iters", "4", "--data-path", "none", "--min-lr", "9", *flags.split()]
    with pytest.raises(ConfigError) as refused:
        load_config(words, 1)
    assert any(fault in found for found in refused.value.faults), refused.value.faults
    assert any("min_lr=9" in found for found in refused.value.faults)


@pytest.mark.parametrize(
    ("layout", "function", "fault"),
    [
        ("pipeline", "a_mean", "returned torch.float32 []; return the loss of each label"),
        pytest.param("pipeline", "a_number", "returned a float; return a tensor [2, 16]", marks=pytest.mark.slow),
        pytest.param("pipeline", "no_gradient", "returned losses without a gradient", marks=pytest.mark.slow),
        ("pipeline", "infinite", "is -inf in a first microbatch"),
        ("pipeline", "raises_on_rank_one", "raised ValueError: no such label (line "),
        pytest.param("tensor", "raises_on_rank_one", "raised ValueError: no such label", marks=pytest.mark.slow),
        ("context", "raises_on_rank_one", "raised ValueError: no such label (line "),
        ("tensor", "differs", "differs between tensor-parallel ranks"),
        ("context", "differs", "differs between context-parallel ranks"),
    ],
)
def test_a_wrong_loss_ends_all_ranks_before_training(
    ranks: RankPools, tmp_path: Path, blend: str, layout: str, function: str, fault: str
) -> None:
    size = {"context": "--context-parallel-size 2"}.get(layout, f"--{layout}-model-parallel-size 2")
    found = ranks(2)(runs.train, f"{STEPS} {blend} {own(function)} {size} --results-dir {tmp_path / 'out'}")
    assert all(fault in message for message in found), found
    assert not (tmp_path / "out").exists()


def test_chats_have_the_number_of_their_dataset(tmp_path: Path) -> None:
    paths = [write_chats(tmp_path / name, [7, 5], seed=seed) for seed, name in enumerate("ab")]
    words = f"--task sft --num-epochs 1 --data-path {paths[0]} {paths[1]} --split 1,0,0 {own('focal')}"
    config = load_config([*runs.TINY.split(), *words.split(), "--micro-batch-size", "1", "--vocab-size", "250"])
    task = SFTTask(config)
    dataset: Any = task.data.open(ParallelContext.single())[0]
    _, _, sources, begins = task.read(dataset, [np.array([2, 0])]).targets  # chats of 6 and 4 tokens in the loss
    assert sources[0].tolist() == [1] * 6 + [0] * 6
    assert begins[0].tolist() == [0] * 6 + [6] * 6
