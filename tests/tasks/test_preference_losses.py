"""Every objective: loss, metrics and all gradients of packed pairs against transformers, each answer alone.

The objectives are written out by hand here, from the papers; where TRL is installed, against TRL's trainers too.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron.parallel.context import ParallelContext
from megatron.parallel.shards import named_parameters
from megatron.tasks.preference import PreferenceTask
from tests.models.outputs import build_model, config_of
from tests.models.test_adapters import their_model
from tests.models.test_hf_logits import CASES, VOCABULARY, to_ours
from tests.tasks import pairs

FLAGS = "--task preference --micro-batch-size 1 --global-batch-size 4 --max-batch-len 192 --split 1,0,0 --beta 0.3"
OBJECTIVES = {
    "sigmoid": "",
    "hinge": "",
    "ipo": "",
    "robust": "--label-smoothing 0.2 --sft-weight 0.7",
    "orpo": "",
    "simpo": "--simpo-gamma 0.4",
}
Result = tuple[float, dict[str, float], dict[str, Tensor]]
"""Loss, metrics, gradients by our names."""


@cache
def some_pairs() -> list[tuple[list[int], list[int], list[int]]]:
    """Prompts of one token, of which TRL's ORPO has no further loss."""
    generator = np.random.default_rng(3)
    lengths = [(1, 9, 4), (1, 5, 12), (1, 1, 7), (1, 14, 14)]
    return [tuple(generator.integers(0, VOCABULARY, n).tolist() for n in triple) for triple in lengths]  # type: ignore[misc]


def reference_values() -> Tensor:
    """Log-probabilities [P, 2] under some other model."""
    return (
        -5
        * torch.rand(len(some_pairs()), 2, generator=torch.Generator().manual_seed(1))
        * torch.tensor([[len(chosen), len(rejected)] for _, chosen, rejected in some_pairs()])
    )


def ours(folder: Path, case: str, objective: str, theirs: Any) -> Result:
    prefix = pairs.write_pairs(folder / "pairs", some_pairs())
    arguments = CASES[case]().arguments
    weights = to_ours({name: p.detach() for name, p in theirs.named_parameters()}, arguments)
    config = config_of(
        f"{arguments} {FLAGS} --data-path {prefix} --preference-loss {objective} {OBJECTIVES[objective]}"
    )
    task, ctx = PreferenceTask(config), ParallelContext.single()
    dataset: Any = task.open_samples()[0]
    if config.preference.needs_reference:
        dataset.reference = reference_values().numpy()
    (key,) = task.keys_of_step(dataset, [[np.arange(len(some_pairs()))]])
    batch = task.read(dataset, key)
    targets = batch.targets
    model = build_model(config, ctx, {name: tensor.numpy() for name, tensor in weights.items()})
    result: Any = model(batch.inputs, project=lambda outputs: task.loss(outputs, targets, 1 / batch.normaliser, ctx))
    result.total.backward()
    metrics = {name: float(metric.sum / metric.weight) for name, metric in result.metrics.items()}
    gradients = {name: p.grad for name, p in named_parameters(model) if p.grad is not None}
    return float(result.total.detach()), metrics, gradients


def answer_logps(theirs: Any) -> Tensor:
    """Log-probabilities [P, 2] of the answers, each alone."""

    def of(prompt: list[int], answer: list[int]) -> Tensor:
        ids = torch.tensor([prompt + answer])
        of_tokens = theirs(ids, use_cache=False).logits[0, :-1].log_softmax(-1)
        return of_tokens.gather(1, ids[0, 1:, None])[len(prompt) - 1 :].sum()

    return torch.stack([torch.stack([of(prompt, answer) for answer in answers]) for prompt, *answers in some_pairs()])


def by_hand(theirs: Any, objective: str, folder: Path) -> tuple[Tensor, dict[str, float]]:
    beta, sums, lengths = 0.3, answer_logps(theirs), answer_lengths()
    ratios, means = sums - reference_values(), sums / lengths
    h = ratios[:, 0] - ratios[:, 1]
    odds = torch.log(means.exp() / (1 - means.exp()))
    nll = -sums[:, 0].sum() / lengths[:, 0].sum()
    loss = {
        "sigmoid": lambda: torch.log(1 + torch.exp(-beta * h)),
        "hinge": lambda: torch.clamp(1 - beta * h, min=0),
        "ipo": lambda: ((ratios / lengths)[:, 0] - (ratios / lengths)[:, 1] - 1 / (2 * beta)) ** 2,
        "robust": lambda: (
            (0.8 * torch.log(1 + torch.exp(-beta * h)) - 0.2 * torch.log(1 + torch.exp(beta * h))) / 0.6 + 0.7 * nll
        ),
        "orpo": lambda: nll + beta * torch.log(1 + torch.exp(odds[:, 1] - odds[:, 0])),
        "simpo": lambda: torch.log(1 + torch.exp(0.4 - beta * (means[:, 0] - means[:, 1]))),
    }[objective]()
    logps = means if objective in ("orpo", "simpo") else sums
    rewards = beta * (means if objective in ("orpo", "simpo") else ratios)
    return loss.mean(), metrics_of(rewards, logps)


def answer_lengths() -> Tensor:
    return torch.tensor([[len(chosen), len(rejected)] for _, chosen, rejected in some_pairs()])


def metrics_of(rewards: Tensor, logps: Tensor) -> dict[str, float]:
    chosen, rejected = rewards.unbind(1)
    values = {
        "rewards/chosen": chosen,
        "rewards/rejected": rejected,
        "rewards/accuracies": (chosen > rejected).float(),
        "rewards/margins": chosen - rejected,
        "logps/chosen": logps[:, 0],
        "logps/rejected": logps[:, 1],
    }
    return {name: float(value.detach().mean()) for name, value in values.items()}


def trainer_folder(theirs: Any, folder: Path) -> Any:
    """Write the model, of which a trainer of TRL makes a reference that is not used here, and return a tokenizer."""
    from transformers import AutoTokenizer

    from tests.data.chat.test_conversation import bytes_json

    (folder / "tokenizer.json").write_text(bytes_json(("<s>", "</s>")))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "pad_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    theirs.save_pretrained(folder)
    theirs.config._name_or_path = str(folder)
    return AutoTokenizer.from_pretrained(folder)


def by_trl(theirs: Any, objective: str, folder: Path) -> tuple[Tensor, dict[str, float]]:
    trl = pytest.importorskip("trl")
    if objective in ("orpo", "simpo"):
        return by_trl_without_reference(theirs, objective)
    rows = [{"prompt": "a", "chosen": "b", "rejected": "c"}] * 4
    kinds, weights = ([objective, "sft"], [1.0, 0.7]) if objective == "robust" else ([objective], None)
    trainer = trl.DPOTrainer(
        theirs,
        args=trl.DPOConfig(
            output_dir=str(folder / "trl"),
            use_cpu=True,
            report_to=[],
            bf16=False,
            beta=0.3,
            loss_type=kinds,
            loss_weights=weights,
            label_smoothing=0.2 if objective == "robust" else 0.0,
            gradient_checkpointing=False,
            per_device_train_batch_size=4,
        ),
        train_dataset=pytest.importorskip("datasets").Dataset.from_list(rows),
        processing_class=trainer_folder(theirs, folder),
    )
    trainer.precompute_ref_logps = True
    trainer.data_collator.pad_token_id = 0  # the tokenizer has more tokens than the model
    reference = reference_values().tolist()
    batch = trainer.data_collator(
        [
            {"prompt_ids": prompt, "chosen_ids": chosen, "rejected_ids": rejected}
            | {"ref_chosen_logps": of_chosen, "ref_rejected_logps": of_rejected}
            for (prompt, chosen, rejected), (of_chosen, of_rejected) in zip(some_pairs(), reference, strict=True)
        ]
    )
    theirs.train()
    loss = trainer.compute_loss(theirs, batch)
    found = trainer._metrics["train"]
    return loss, {name: float(found[name][-1]) for name in PreferenceTask.metrics}


def by_trl_without_reference(theirs: Any, objective: str) -> tuple[Tensor, dict[str, float]]:
    """TRL's formulas over transformers' log-probabilities."""
    device = SimpleNamespace(device=torch.device("cpu"))
    means = answer_logps(theirs) / answer_lengths()
    if objective == "orpo":
        ORPOTrainer = pytest.importorskip("trl.experimental.orpo").ORPOTrainer
        losses, *rewards, _, _ = ORPOTrainer.odds_ratio_loss(
            SimpleNamespace(beta=0.3, accelerator=device), *means.unbind(1)
        )  # type: ignore[arg-type]
        nll = -(means * answer_lengths())[:, 0].sum() / answer_lengths()[:, 0].sum()
        return nll - losses.mean(), metrics_of(torch.stack(rewards, 1), means)
    CPOTrainer = pytest.importorskip("trl.experimental.cpo").CPOTrainer
    options = {"beta": 0.3, "loss_type": "simpo", "simpo_gamma": 0.4, "label_smoothing": 0.0, "alpha": 0.0}
    trainer = SimpleNamespace(accelerator=device, **options)
    losses, *rewards = CPOTrainer.cpo_loss(trainer, *means.unbind(1))
    return losses.mean(), metrics_of(torch.stack(rewards, 1), means)


@pytest.mark.parametrize("oracle", [by_hand, by_trl])
@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("case", ["llama_gqa", "bloom_12_heads"])
def test_loss_metrics_and_gradients(
    tmp_path: Path, case: str, objective: str, oracle: Callable[..., tuple[Tensor, dict[str, float]]]
) -> None:
    theirs = their_model(case)
    expected, metrics = oracle(theirs, objective, tmp_path)
    compare(case, theirs, expected, metrics, ours(tmp_path, case, objective, theirs))


def compare(case: str, theirs: Any, expected: Tensor, metrics: dict[str, float], found: Result) -> None:
    """Fail unless loss, metrics and every gradient are equal within 1e-5."""
    expected.backward()
    loss, own_metrics, gradients = found
    assert math.isclose(loss, float(expected.detach()), rel_tol=1e-5)
    assert own_metrics == pytest.approx(metrics, rel=1e-5, abs=1e-5)
    there = to_ours({name: p.grad for name, p in theirs.named_parameters()}, CASES[case]().arguments)
    assert set(there) == set(gradients)
    for name, gradient in gradients.items():
        apart = (gradient[: len(there[name])] - there[name]).abs().max()
        assert float(apart) < 1e-5 * max(1.0, float(there[name].abs().max())), name
