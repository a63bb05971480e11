"""Small datasets of pairs, and runs over them inside the ranks of tests/ranks.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron.checkpoint.folders import Run
from megatron.data.index.indexed_builder import IndexedDatasetBuilder
from megatron.models.embedding import unpack
from megatron.options.progress import Progress
from megatron.parallel.context import ParallelContext
from megatron.parallel.shards import named_parameters
from megatron.settings.command_line import parse_arguments
from megatron.settings.validation import check
from megatron.tasks.packed import samples_of
from megatron.tasks.preference import PreferenceTask
from megatron.training.build import build_engine
from megatron.training.engine import Engine
from megatron.training.resume import Start
from megatron.training.start import prepare_task
from tests.training import layouts

VOCABULARY = 250
SGD = "--optimizer sgd --sgd-momentum 0 --weight-decay 0 --clip-grad 0"


def some_pairs(count: int, longest: int, seed: int = 0) -> list[tuple[list[int], list[int], list[int]]]:
    """Prompts, chosen and rejected answers of random tokens, each of at most a third of `longest`."""
    generator = np.random.default_rng(seed)
    return [
        tuple(generator.integers(0, VOCABULARY, generator.integers(1, longest // 3)).tolist() for _ in range(3))  # type: ignore[misc]
        for _ in range(count)
    ]


def pairs_by_parity(count: int) -> list[tuple[list[int], list[int], list[int]]]:
    """Prompts of random tokens, chosen answers of even ones, rejected ones of odd ones."""
    generator = np.random.default_rng(0)
    return [
        (
            generator.integers(0, VOCABULARY, 6).tolist(),
            *((2 * generator.integers(0, VOCABULARY // 2, generator.integers(5, 12)) + odd).tolist() for odd in (0, 1)),
        )  # type: ignore[misc]
        for _ in range(count)
    ]


def write_pairs(prefix: Path, pairs: list[Any]) -> Path:
    with IndexedDatasetBuilder(prefix, np.uint16) as builder:
        for pair in pairs:
            builder.add_document(np.concatenate(pair).astype(np.uint16), [len(part) for part in pair])
        builder.finalize()
    return prefix


def build(arguments: str) -> tuple[Engine, PreferenceTask, Any]:
    words = [*layouts.COMMON.replace("--train-iters 1000 --data-path none", "").split(), "--task", "preference"]
    words += ["--num-epochs", "2", "--micro-batch-size", "1", "--split", "1,0,0", *SGD.split(), *arguments.split()]
    config, _ = parse_arguments(words)
    ctx = ParallelContext.build(config.parallel, "cpu")
    faults = check(config, ctx.world_size)
    assert not faults, faults
    task = PreferenceTask(config)
    engine = build_engine(config, ctx, task)
    datasets: Any = task.data.open(ctx)
    prepare_task(engine, task, datasets, Start(config.checkpoint, None, Progress(), Run()), lambda: None)
    return engine, task, datasets[0]


def train(arguments: str, steps: int) -> list[dict[str, float]]:
    """Loss and metrics of so many steps from the start on."""
    engine, task, dataset = build(arguments)
    ctx, size, found = engine.ctx, engine.config.training.global_batch_size, []
    plan = task.data.plan(dataset, lambda _: size, ctx.batch_rank, ctx.num_batch_ranks)
    for step in range(steps):
        _, keys = plan(step * size)
        batches = [task.read(dataset, key) for key in keys] if engine.reads_data else []
        lr = engine.config.optimizer.lr
        result = engine.train_step(batches, num_microbatches=len(keys), consumed_samples=step * size, lr=lr)
        found.append({"loss": result.loss, **engine.read_metrics(result.metrics)})
    return found


def reference_files(arguments: str, data: str) -> int:
    """Number of the stored references once a run with these arguments has begun."""
    build(arguments)
    return len(list(Path(f"{data}.bin").parent.glob("*.reference-*")))


def labels_of_a_step(arguments: str) -> tuple[int, int, int]:
    """Labels, places and tokens of answers in the first step."""
    engine, task, dataset = build(arguments)
    _, keys = task.data.plan(dataset, lambda _: engine.config.training.global_batch_size, 0, 1)(0)
    batches = [task.read(dataset, key) for key in keys]
    answers = sum(int(samples_of(dataset).labels[task.data.samples_of(key)].sum()) for key in keys)
    return sum(len(batch.targets[0]) for batch in batches), sum(b.inputs[0].numel() for b in batches), answers


def dense(arguments: str, steps: int) -> list[dict[str, float]]:
    """The same by DPO's or KTO's formulas: every answer alone in float64, not packed, by torch's own log_softmax."""
    engine, task, dataset = build(f"{arguments} --no-pipeline-parallel")
    module = engine.module.double().eval()
    score = _kto if engine.config.preference.is_unpaired else _dpo
    size, found = engine.config.training.global_batch_size, []
    start = [parameter.detach().clone() for parameter in module.parameters()]
    trained = [parameter for _, parameter in named_parameters(module) if parameter.requires_grad]

    ld_alpha = engine.config.preference.ld_alpha

    def logp(side: tuple[Any, Any], shared: int | None = None) -> Any:
        ids, begin = torch.from_numpy(np.concatenate(side).astype(np.int64)), len(side[0])
        hidden, weight = module(ids[None, :-1], lambda outputs: (unpack(outputs[0])[0], outputs[1]))
        of_tokens = (hidden[:, 0] @ weight.t())[:, :VOCABULARY].log_softmax(-1)
        own = of_tokens.gather(1, ids[1:, None])[begin - 1 :]
        return own.sum() if shared is None else own[:shared].sum() + ld_alpha * own[shared:].sum()

    def logps_of(read: list[Any]) -> Any:
        rows = []
        for pair in read:
            shared = None if ld_alpha is None else min(len(answer) for _, answer in pair)
            rows.append(torch.stack([logp(side, shared) for side in pair]))
        return torch.stack(rows)

    def exchange(weights: Any) -> list[Any]:
        """Put these weights into the model, and return those before."""
        before = [parameter.detach().clone() for parameter in module.parameters()]
        with torch.no_grad():
            for parameter, weight in zip(module.parameters(), weights, strict=True):
                parameter.copy_(weight)
        return before

    for step in range(steps):
        _, keys = task.data.plan(dataset, lambda _: size, 0, 1)(step * size)
        samples = samples_of(dataset)
        numbers = [sample for key in keys for sample in task.data.samples_of(key)]
        read = [[(one.ids[: one.begin], one.ids[one.begin :]) for one in samples.read(number)] for number in numbers]
        if score is _kto:
            order = samples.order(0).tolist()
            others = [samples.read(order[order.index(number) - 1])[0] for number in numbers]
            read = [[own, (own[0], other.ids[other.begin :])] for (own,), other in zip(read, others, strict=True)]
        now = exchange(start)
        with torch.no_grad():
            reference = logps_of(read)
        exchange(now)
        logps = logps_of(read)
        is_chosen = torch.tensor([bool(samples.is_chosen[number]) for number in numbers]) if score is _kto else None
        loss, means = score(logps, reference, is_chosen, engine.config.preference)
        gradients = torch.autograd.grad(loss, trained)
        with torch.no_grad():
            for parameter, gradient in zip(trained, gradients, strict=True):
                parameter.sub_(gradient, alpha=engine.config.optimizer.lr)
        found.append({"loss": float(loss.detach()), **{name: float(value.detach()) for name, value in means.items()}})
    return found


def _dpo(logps: Any, reference: Any, is_chosen: Any, options: Any) -> tuple[Any, dict[str, Any]]:
    rewards = options.beta * (logps - reference)
    margins = rewards[:, 0] - rewards[:, 1]
    values = {"rewards/accuracies": (margins > 0).double(), "rewards/margins": margins}
    values |= {"rewards/chosen": rewards[:, 0], "rewards/rejected": rewards[:, 1]}
    values |= {"logps/chosen": logps[:, 0], "logps/rejected": logps[:, 1]}
    return torch.log1p(torch.exp(-margins)).mean(), {name: value.mean() for name, value in values.items()}


def _kto(logps: Any, reference: Any, is_chosen: Any, options: Any) -> tuple[Any, dict[str, Any]]:
    """Of each answer and of the mismatched one."""
    ratios = logps - reference
    kl = ratios[:, 1].mean().detach().clamp(min=0)
    rewards, leads = options.beta * ratios[:, 0], options.beta * (ratios[:, 0] - kl)
    desirable, undesirable = 1 - torch.sigmoid(leads), 1 - torch.sigmoid(-leads)
    losses = torch.where(is_chosen, options.desirable_weight * desirable, undesirable)
    means: dict[str, Any] = {}
    for name, values in (("rewards", rewards), ("logps", logps[:, 0])):
        means |= {f"{name}/chosen": values[is_chosen].mean(), f"{name}/rejected": values[~is_chosen].mean()}
    return losses.mean(), {**means, "rewards/margins": means["rewards/chosen"] - means["rewards/rejected"], "kl": kl}
