"""Steps of a model in a folder of transformers, on any layout. Runs inside the ranks of tests/ranks.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

from megatron.generation.generator import BatchSettings, generate
from megatron.generation.model import training_model
from megatron.generation.options import GenerationOptions
from megatron.generation.requests import Request
from megatron.parallel.shards import named_parameters
from megatron.training.resume import find_start, restore_start
from megatron.weights.huggingface_config import preset_of
from tests.generation import stages
from tests.training import layouts

COMMON = (
    "--make-vocab-size-divisible-by 2 --seq-length 24 --global-batch-size 4 --train-iters 1000 --data-path none "
    "--lr 1e-3 --lr-decay-style constant --clip-grad 1.0 --weight-decay 0 --adam-beta1 0.9 --adam-beta2 0.999 "
    "--adam-eps 1e-8 --device cpu --finetune"
)


def flags_of(folder: str) -> str:
    """Options of the model in a folder."""
    options = preset_of(Path(folder))["model"]
    texts = {name: " ".join(map(str, v)) if isinstance(v, tuple | list) else str(v) for name, v in options.items()}
    return " ".join(f"--{name.replace('_', '-')} {text}" for name, text in texts.items())


def train(folder: str, arguments: str, steps: int) -> dict[str, list[float]]:
    """Loss, weighed terms of the layers and norm of the gradient, step by step."""
    with patch.object(layouts, "COMMON", COMMON):
        engine, task = layouts.build(f"{flags_of(folder)} --load {folder} {arguments}")
    restore_start(engine, find_start(engine.config, engine.ctx))
    found: dict[str, list[float]] = {"losses": [], "terms": [], "norms": []}
    for step in range(steps):
        done = engine.train_step(
            layouts.step_batches(engine, task, step),
            num_microbatches=layouts.num_microbatches(engine),
            consumed_samples=step * engine.config.training.global_batch_size,
            lr=engine.config.optimizer.lr,
        )
        for name, value in (("losses", done.loss), ("terms", done.layer_loss), ("norms", done.grad_norm)):
            found[name].append(float(value))
    return found


def texts(options: dict[str, Any], prompts: list[tuple[int, ...]], count: int) -> list[list[int]]:
    """Ids that the model in a folder generates greedily, three prompts at a time."""
    model = stages.loaded(options)
    requests = [Request(number, prompt) for number, prompt in enumerate(prompts)]
    done = list(
        generate(model, requests, GenerationOptions(max_new_tokens=count), settings=BatchSettings(batch_size=3))
    )
    ids: list[list[int]] = model.ctx.broadcast_object([list(each.ids) for each in done])
    return ids


def started(arguments: str, tokens_BS: Any) -> tuple[dict[str, Any], Any]:
    """Parameters of this rank as a run starts with them, and its logits [S, B, V]."""
    with patch.object(layouts, "COMMON", COMMON):
        engine, _ = layouts.build(arguments)
    restore_start(engine, find_start(engine.config, engine.ctx))
    weights = {name: p.detach().float().numpy().copy() for name, p in named_parameters(engine.module)}
    with training_model(engine.module, engine.config, engine.ctx) as model:
        return weights, stages.logits_of(model, tokens_BS)


def save(arguments: str, folder: str) -> None:
    """A checkpoint of a new run."""
    with patch.object(layouts, "COMMON", COMMON.replace("--finetune", "")):
        engine, _ = layouts.build(f"{arguments} --save {folder}")
    layouts.save(engine, 0)
