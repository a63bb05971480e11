"""Small chat datasets, and runs over them inside the ranks of tests/ranks.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from megatron.data.chat.dataset import ChatDataset
from megatron.data.index.indexed import LOSS_MASK_SUFFIX
from megatron.data.index.indexed_builder import IndexedDatasetBuilder
from megatron.models.embedding import WordEmbedding, unpack
from megatron.options.progress import Progress
from megatron.parallel.context import ParallelContext
from megatron.parallel.rng import derive_seed
from megatron.parallel.shards import named_parameters
from megatron.settings.validation import check
from megatron.tasks.pretrain import PretrainTask
from megatron.tasks.sft import SFTTask
from megatron.training.build import build_engine
from megatron.training.checkpoints import Checkpoints
from megatron.training.engine import Engine
from megatron.training.resume import find_start, restore_start
from tests.models.noise import expected_noise
from tests.training import layouts

VOCABULARY = 250


def write_chats(prefix: Path, lengths: list[int], seed: int = 0, trained: float = 0.4) -> Path:
    """Chats of these lengths, of tokens that can be learned, a share of them trained: the last ones of each."""
    generator = np.random.default_rng(seed)
    with (
        IndexedDatasetBuilder(prefix, np.uint16) as tokens,
        IndexedDatasetBuilder(f"{prefix}{LOSS_MASK_SUFFIX}", np.uint8) as mask,
    ):
        for length in lengths:
            ids = (generator.integers(0, VOCABULARY) + 3 * np.arange(length)) % VOCABULARY
            tokens.add_document(ids.astype(np.uint16))
            mask.add_document((np.arange(length) >= round(length * (1 - trained))).astype(np.uint8))
        tokens.finalize()
        mask.finalize()
    return prefix


def some_lengths(count: int, longest: int, seed: int = 0) -> list[int]:
    """Between 2 and `longest`, most of them short."""
    drawn = np.random.default_rng(seed).lognormal(np.log(longest / 4), 0.8, count)
    found: list[int] = np.clip(drawn, 2, longest).astype(int).tolist()
    return found


def build(arguments: str) -> tuple[Engine, SFTTask, ChatDataset]:
    from megatron.settings.command_line import parse_arguments

    words = [*layouts.COMMON.replace("--train-iters 1000 --data-path none", "").split(), "--task", "sft"]
    config, _ = parse_arguments([*words, "--num-epochs", "2", "--micro-batch-size", "1", *arguments.split()])
    ctx = ParallelContext.build(config.parallel, "cpu")
    faults = check(config, ctx.world_size)
    assert not faults, faults
    task = SFTTask(config)
    engine = build_engine(config, ctx, task)
    dataset: Any = task.data.open(ctx)[0]
    return engine, task, dataset


def step(engine: Engine, task: SFTTask, dataset: Any, consumed_samples: int, lr: float = 1e-3) -> tuple[float, int]:
    """Loss of a step, and its samples."""
    ctx, size = engine.ctx, engine.config.training.global_batch_size
    left = len(dataset) - consumed_samples % len(dataset)
    plan = task.data.plan(dataset, lambda _: min(size, left), ctx.batch_rank, ctx.num_batch_ranks)
    samples, keys = plan(consumed_samples)
    batches = [task.read(dataset, key) for key in keys] if engine.reads_data else []
    result = engine.train_step(batches, num_microbatches=len(keys), consumed_samples=consumed_samples, lr=lr)
    return float(result.loss), samples


def losses(arguments: str, steps: int) -> list[float]:
    """Of so many steps from the start on."""
    engine, task, dataset = build(arguments)
    found, consumed = [], 0
    for _ in range(steps):
        loss, samples = step(engine, task, dataset, consumed)
        found.append(loss)
        consumed += samples
    return found


def gradient_step(arguments: str, folder: str) -> float:
    """The loss of the first step, whose whole gradient is then taken off the weights that are saved."""
    plain = "--optimizer sgd --sgd-momentum 0 --weight-decay 0 --clip-grad 0 --lr 1"
    engine, task, dataset = build(f"{arguments} {plain} --save {folder}")
    loss, samples = step(engine, task, dataset, 0, lr=1.0)
    with Checkpoints(engine.config, engine.ctx) as checkpoints:
        checkpoints.save(engine, Progress(iteration=1, consumed_samples=samples), "data")
        checkpoints.finish(lambda _: None)
    return loss


def dense_gradient(
    arguments: str, alpha: float | None = None
) -> tuple[float, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Loss, weights before, and gradient of the first global batch: each chat alone, without padding or packing, in
    float64, with torch's own cross-entropy, or transformers' LabelSmoother, and divided once by the number of all loss
    tokens. `alpha`: with NEFTune's noise of this size."""
    from transformers.trainer_pt_utils import LabelSmoother

    engine, task, dataset = build(f"{arguments} --no-pipeline-parallel")
    module = engine.module.double()

    def add_noise(embedding: Any, inputs: Any, found: torch.Tensor) -> torch.Tensor:
        tokens, key = inputs[0][0].numpy(), derive_seed(engine.dropout_seed, 0, "step")
        return found + torch.from_numpy(expected_noise(tokens, key, found.shape[-1], alpha or 0)).unsqueeze(1)

    if alpha is not None:
        (embedding,) = {part for part in module.modules() if isinstance(part, WordEmbedding)}
        embedding.register_forward_hook(lambda *call: add_noise(*call) if isinstance(call[2], torch.Tensor) else None)
    size = engine.config.training.global_batch_size
    total, count = torch.zeros((), dtype=torch.float64), 0
    _, keys = task.data.plan(dataset, lambda _: size, 0, 1)(0)
    chats = getattr(dataset, "samples", dataset)
    for chat in [chat for key in keys for chat in task.data.samples_of(key)]:
        ids, mask = (torch.from_numpy(part.astype(np.int64)) for part in chats.read(chat))

        def project(outputs: Any) -> Any:
            return unpack(outputs[0])[0], outputs[1]

        hidden, weight = module(ids[None, :-1], project)
        logits = (hidden[:, 0] @ weight.t())[:, :VOCABULARY]
        if smoothing := engine.config.training.label_smoothing_factor:
            labels = ids[1:].masked_fill(mask[1:] == 0, -100)
            total = total + LabelSmoother(smoothing)({"logits": logits}, labels) * mask[1:].sum()
        else:
            total = total + (F.cross_entropy(logits, ids[1:], reduction="none") * mask[1:]).sum()
        count += int(mask[1:].sum())
    loss = total / count
    names, parameters = zip(*named_parameters(module), strict=True)
    gradients = torch.autograd.grad(loss, parameters)
    before = {name: parameter.detach() for name, parameter in zip(names, parameters, strict=True)}
    return float(loss), before, dict(zip(names, gradients, strict=True))


def greedy(arguments: str, prompts: list[list[int]], count: int) -> list[list[int]]:
    """What the loaded weights say to each prompt: so many tokens, each time the likeliest."""
    from megatron.settings.command_line import load_config
    from tests import runs

    config = load_config([*runs.TINY.split(), *arguments.split(), "--no-pipeline-parallel"])
    ctx = ParallelContext.build(config.parallel, "cpu")
    engine = build_engine(config, ctx, PretrainTask(config))
    restore_start(engine, find_start(config, ctx))
    engine.module.eval()
    answers = []
    for prompt in prompts:
        tokens = list(prompt)
        for _ in range(count):
            with torch.no_grad():
                hidden, weight = engine.module(torch.tensor([tokens]), lambda outputs: outputs)
            logits = (hidden[-1, 0] @ weight.t())[: config.model.vocab_size]
            tokens.append(int(logits.argmax()))
        answers.append(tokens[len(prompt) :])
    return answers
