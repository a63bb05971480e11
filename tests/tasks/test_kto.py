"""KTO and APO-zero: loss, KL term, metrics and all gradients of packed answers against transformers, each alone.

The objectives are written out by hand here, from the papers; where TRL is installed, against its KTOTrainer too.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron.data.index.indexed import DataError
from megatron.data.preference.dataset import AnswerDataset
from megatron.options.stored import from_dict
from megatron.parallel.context import ParallelContext
from megatron.parallel.shards import named_parameters
from megatron.tasks.preference import PreferenceTask
from tests.models.outputs import build_model, config_of
from tests.models.test_adapters import their_model
from tests.models.test_hf_logits import CASES, VOCABULARY, to_ours
from tests.tasks import pairs
from tests.tasks.test_preference_losses import Result, compare, trainer_folder

FLAGS = "--task preference --micro-batch-size 1 --global-batch-size 8 --max-batch-len 64 --split 1,0,0 --beta 0.3"
FLAGS += " --desirable-weight 1.3 --undesirable-weight 0.6"
METRICS = ("rewards/margins", "rewards/chosen", "rewards/rejected", "kl", "logps/chosen", "logps/rejected")
LENGTHS = [(3, 9, 4), (1, 5, 0), (4, 0, 7), (2, 14, 13), (5, 3, 0)]
"""Tokens of prompt, chosen and rejected: two pairs, and three rows with one answer."""


@cache
def some_rows() -> list[Any]:
    generator = np.random.default_rng(3)
    return [tuple(generator.integers(0, VOCABULARY, n).tolist() for n in lengths) for lengths in LENGTHS]


def reference_values(seed: int) -> np.ndarray[Any, Any]:
    """Log-probabilities [rows, 2] under some other model, which gives less to most answers."""
    lengths = np.array(LENGTHS)[:, 1:]
    values = -(5.6 + 0.4 * np.random.default_rng(seed).random(lengths.shape)) * (lengths + 1)
    return np.where(lengths > 0, values, np.nan).astype(np.float32)


def open_task(folder: Path, case: str, objective: str) -> tuple[PreferenceTask, AnswerDataset]:
    prefix = pairs.write_pairs(folder / "pairs", some_rows())
    flags = f"{CASES[case]().arguments} {FLAGS} --data-path {prefix} --preference-loss {objective}"
    task = PreferenceTask(config_of(flags))
    dataset: Any = task.data.open_samples()[0]
    dataset.pairs.reference, dataset.mismatched_reference = reference_values(1), reference_values(2)
    return task, dataset


def examples(dataset: AnswerDataset) -> list[dict[str, Any]]:
    """The rows of a batch for TRL's collator, in the order of the first epoch, completions turned by one."""
    numbers = [divmod(int(dataset.numbers[sample]), 2) for sample in dataset.order(0)]
    before = [numbers[-1], *numbers[:-1]]
    own, other = reference_values(1), reference_values(2)
    return [
        {
            "prompt_ids": some_rows()[row][0],
            "completion_ids": some_rows()[row][1 + side],
            "KL_completion_ids": some_rows()[other_row][1 + other_side],
            "label": side == 0,
            "ref_logps": float(own[row, side]),
            "ref_KL_logps": float(other[row, side]),
        }
        for (row, side), (other_row, other_side) in zip(numbers, before, strict=True)
    ]


def ours(task: PreferenceTask, dataset: AnswerDataset, case: str, theirs: Any) -> Result:
    ctx = ParallelContext.single()
    weights = to_ours({name: p.detach() for name, p in theirs.named_parameters()}, CASES[case]().arguments)
    model = build_model(task.config, ctx, {name: tensor.numpy() for name, tensor in weights.items()})

    def forward(*arguments: Any, **options: Any) -> list[Tensor]:
        batches, of_outputs = arguments
        with torch.no_grad():
            return [
                model(batch.inputs, project=lambda outputs, batch=batch: of_outputs(outputs, batch.targets))
                for batch in batches
            ]

    _, keys = task.data.plan(dataset, lambda _: len(dataset), 0, 1)(0)
    assert len(keys) > 1  # the KL term is that of all microbatches
    batches = task.objective.before_step([task.read(dataset, key) for key in keys], forward, ctx)
    scale = 1 / sum(batch.normaliser for batch in batches)
    results: list[Any] = [
        model(batch.inputs, project=partial(task.objective.loss, targets=batch.targets, scale=scale, ctx=ctx))
        for batch in batches
    ]
    loss = sum(result.total for result in results)
    loss.backward()
    sums = {name: [result.metrics[name] for result in results] for name in task.objective.metrics}
    metrics = {
        name: float(sum(float(part.sum) for part in parts) / sum(float(part.weight) for part in parts))
        for name, parts in sums.items()
    }
    gradients = {name: p.grad for name, p in named_parameters(model) if p.grad is not None}
    return float(loss.detach()), metrics, gradients


def by_hand(theirs: Any, dataset: AnswerDataset, objective: str, folder: Path) -> tuple[Tensor, dict[str, float]]:
    def logp(prompt: list[int], answer: list[int]) -> Tensor:
        ids = torch.tensor([prompt + answer])
        of_tokens = theirs(ids, use_cache=False).logits[0, :-1].log_softmax(-1)
        return of_tokens.gather(1, ids[0, 1:, None])[len(prompt) - 1 :].sum()

    rows, beta, kl = examples(dataset), 0.3, 0.0
    if objective == "kto":
        ratios = [logp(row["prompt_ids"], row["KL_completion_ids"]) - row["ref_KL_logps"] for row in rows]
        kl = max(0.0, float(sum(ratio.detach() for ratio in ratios)) / len(rows))
        assert kl > 0.1
    logps = [logp(row["prompt_ids"], row["completion_ids"]) for row in rows]
    losses: list[Tensor] = []
    by_label: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for row, value in zip(rows, logps, strict=True):
        ratio = value - row["ref_logps"]
        utility = torch.sigmoid(beta * (ratio - kl)) if row["label"] else torch.sigmoid(beta * (kl - ratio))
        losses.append((1.3 if row["label"] else 0.6) * (1 - utility))
        by_label[row["label"]].append((beta * float(ratio.detach()), float(value.detach())))
    chosen, rejected = (np.mean(by_label[label], axis=0) for label in (True, False))
    metrics = {"rewards/chosen": chosen[0], "rewards/rejected": rejected[0], "rewards/margins": chosen[0] - rejected[0]}
    metrics |= {"kl": kl, "logps/chosen": chosen[1], "logps/rejected": rejected[1]}
    return torch.stack(losses).mean(), {name: float(value) for name, value in metrics.items()}


def by_trl(theirs: Any, dataset: AnswerDataset, objective: str, folder: Path) -> tuple[Tensor, dict[str, float]]:
    trl = pytest.importorskip("trl")
    rows = [{"prompt": "a", "completion": "b", "label": bool(number % 2)} for number in range(8)]
    trainer = trl.KTOTrainer(
        theirs,
        args=trl.KTOConfig(
            output_dir=str(folder / "trl"),
            use_cpu=True,
            report_to=[],
            bf16=False,
            beta=0.3,
            loss_type=objective,
            desirable_weight=1.3,
            undesirable_weight=0.6,
            gradient_checkpointing=False,
            per_device_train_batch_size=8,
        ),
        train_dataset=pytest.importorskip("datasets").Dataset.from_list(rows),
        processing_class=trainer_folder(theirs, folder),
    )
    trainer.precompute_ref_logps = True
    trainer.data_collator.pad_token_id = 0  # the tokenizer has more tokens than the model
    theirs.train()
    loss = trainer.compute_loss(theirs, trainer.data_collator(examples(dataset)))
    return loss, {name: float(trainer._metrics["train"][name][-1]) for name in METRICS}


@pytest.mark.parametrize("oracle", [by_hand, by_trl])
@pytest.mark.parametrize("objective", ["kto", "apo_zero_unpaired"])
@pytest.mark.parametrize("case", ["llama_gqa", "bloom_12_heads"])
def test_loss_metrics_and_gradients(tmp_path: Path, case: str, objective: str, oracle: Callable[..., Any]) -> None:
    theirs = their_model(case)
    task, dataset = open_task(tmp_path, case, objective)
    expected, metrics = oracle(theirs, dataset, objective, tmp_path)
    compare(case, theirs, expected, metrics, ours(task, dataset, case, theirs))


def test_each_answer_is_mismatched_with_one_prompt_of_its_batch(tmp_path: Path) -> None:
    prefix = pairs.write_pairs(tmp_path / "pairs", [([9], [n + 10], [n + 50]) for n in range(40)])
    task = PreferenceTask(config_of(f"{FLAGS} --data-path {prefix} --preference-loss kto"))
    dataset: Any = task.data.open_samples()[0]
    order = dataset.order(0)
    own = [int(dataset.read(sample)[0].ids[1]) for sample in order]
    others = [int(dataset.mismatched(int(dataset.numbers[sample])).ids[1]) for sample in order]
    assert sorted(own) == [*range(10, 50), *range(50, 90)]
    assert others == [own[-1], *own[:-1]]
    (keys,) = [task.data.plan(dataset, lambda _: 16, 0, 1)(16)[1]]
    read = [int(dataset.mismatched(int(number)).ids[1]) for key in keys for row in key.mismatched for number in row]
    assert sorted(read) == sorted(others[16:32])


def test_what_kto_cannot_use_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    one = pairs.write_pairs(tmp_path / "one", [([1], [2], [])])
    few = pairs.write_pairs(tmp_path / "few", [([1], [2], []), ([1], [3], []), ([1], [], [4])])
    task = PreferenceTask(config_of(f"{FLAGS} --data-path {one} --preference-loss kto"))
    with pytest.raises(DataError, match="the train split has one answer"):
        task.data.open_samples()
    with pytest.raises(DataError, match=r"1 of 1 rows have one answer, row 0 is the first.*preference_loss=kto"):
        PreferenceTask(config_of(f"{FLAGS.partition(' --desirable')[0]} --data-path {one}")).data.open_samples()
    PreferenceTask(config_of(f"{FLAGS} --data-path {few} --preference-loss kto")).data.open_samples()
    assert "2 answers are desirable and 1 are not; a desirable_weight of 0.3 to 0.4 would balance them" in caplog.text
    common = {"task": "preference", "num_epochs": 1, "global_batch_size": 1}
    single = from_dict({"training": common, "preference": {"preference_loss": "kto"}})
    assert any("one answer a step" in fault for fault in PreferenceTask(single).faults(1))
    unread = from_dict({"training": common, "preference": {"desirable_weight": 2.0, "undesirable_weight": 0.5}})
    assert sum("no effect without preference_loss=kto" in fault for fault in PreferenceTask(unread).faults(1)) == 2
