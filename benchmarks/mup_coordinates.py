"""The coordinate test of muP: how much the activations of a layer move in a few steps, over widths.

    python benchmarks/mup_coordinates.py docs/images/mup_coordinates.png

Under muP (--mup-base-hidden-size) a step moves the activations of every width alike, so a learning rate that suits one
suits all; under the standard parametrisation it moves those of wider models more. Source: Yang et al. 2022
(arXiv:2203.03466), appendix D.1.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import Tensor

from megatron.models.sequential import SequentialModel, build_layers
from megatron.options.config import Config
from megatron.parallel.context import ParallelContext
from megatron.parallel.losses import gather_logits, linear_cross_entropy
from megatron.parallel.shards import initialise, named_parameters
from megatron.settings.command_line import parse_arguments
from megatron.training.optimizers.build import build_optimizer

HEAD_SIZE, LENGTH, BATCH, VOCABULARY = 16, 32, 4, 128
MODEL = (
    "--architecture llama --position-embedding-type rope --num-layers 2 --untie-embeddings-and-output-weights "
    f"--vocab-size {VOCABULARY} --seq-length {LENGTH} --hidden-dropout 0 --attention-dropout 0 --data-path none "
    "--train-iters 1 --lr 3e-3 --weight-decay 0 --device cpu"
)
LOGITS = "logits"
PLACES = ("layers.1.attention", "layers.1.mlp", LOGITS)
"""Outputs that are looked at: of the last layer's branches, and of the model."""
COLUMNS = {"standard parametrisation": False, "muP": True}

Moves = list[dict[str, float]]
"""Mean absolute change of each place's numbers since the start, after each step."""


def config_of(width: int, base: int | None, flags: str = "") -> Config:
    words = f"{MODEL} --hidden-size {width} --num-attention-heads {width // HEAD_SIZE} {flags}"
    if base is not None:
        words += f" --mup-base-hidden-size {base}"
    return parse_arguments(words.split())[0]


def moves(config: Config, steps: int, seed: int) -> Moves:
    """Train on one batch of random tokens, and return how far the activations have moved after each step."""
    ctx = ParallelContext.single()
    model = SequentialModel(build_layers(config, ctx))
    initialise(named_parameters(model), seed, ctx)
    optimizer = build_optimizer(model, config, ctx).inner
    tokens = torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(seed))
    labels, start, found = tokens[:, 1:], activations(model, tokens, ctx), list[dict[str, float]]()

    def mean_loss(outputs: tuple[Tensor, Tensor]) -> Tensor:
        return linear_cross_entropy(*outputs, labels, torch.full(labels.shape, 1 / labels.numel()), ctx)

    for _ in range(steps):
        optimizer.zero_grad()
        model(tokens[:, :-1], project=mean_loss).backward()
        optimizer.step()
        now = activations(model, tokens, ctx)
        found.append({place: float((now[place] - start[place]).abs().mean()) for place in PLACES})
    return found


def logits_of(ctx: ParallelContext) -> Callable[[tuple[Tensor, Tensor]], Tensor]:
    return lambda outputs: gather_logits(outputs[0], outputs[1], ctx)


@torch.no_grad()
def activations(model: SequentialModel, tokens: Tensor, ctx: ParallelContext) -> dict[str, Tensor]:
    """Return the outputs at PLACES."""
    found: dict[str, Tensor] = {}

    def keep(place: str) -> Callable[[Any, Any, Tensor], None]:
        def hook(module: Any, inputs: Any, output: Tensor) -> None:
            found[place] = output.detach()

        return hook

    handles = []
    for name, module in module_by_place(model).items():
        handles.append(module.register_forward_hook(keep(name)))
    found[LOGITS] = model(tokens[:, :-1], project=logits_of(ctx))
    for handle in handles:
        handle.remove()
    return found


def module_by_place(model: SequentialModel) -> dict[str, Any]:
    """Return the modules of PLACES, found by the full names of their parameters."""
    modules: dict[str, Any] = {}
    for module in model.modules():
        for branch in ("attention", "mlp"):
            child = getattr(module, branch, None)
            if isinstance(child, torch.nn.Module):
                name = next(named_parameters(child))[0]
                modules[name[: name.index(branch) + len(branch)]] = child
    return {place: modules[place] for place in PLACES if place != LOGITS}


def mean_moves(width: int, base: int | None, steps: int, seeds: Sequence[int], flags: str = "") -> Moves:
    runs = [moves(config_of(width, base, flags), steps, seed) for seed in seeds]
    return [{place: statistics.fmean(run[step][place] for run in runs) for place in PLACES} for step in range(steps)]


def slope(widths: Sequence[int], values: Sequence[float]) -> float:
    """Return the exponent of the width by which the values grow: that of the line of least squares."""
    x, y = [math.log2(width) for width in widths], [math.log2(value) for value in values]
    return statistics.linear_regression(x, y).slope


def draw(found: dict[str, list[Moves]], widths: Sequence[int], output: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(len(PLACES), len(COLUMNS), figsize=(6.4, 6.4), sharex=True, sharey="row")
    for column, (title, by_width) in enumerate(found.items()):
        for row, place in enumerate(PLACES):
            panel = panels[row][column]
            for step in range(len(by_width[0])):
                values = [each[step][place] for each in by_width]
                shade = 0.25 + 0.75 * step / max(1, len(by_width[0]) - 1)
                panel.loglog(widths, values, "o-", color=pyplot.get_cmap("Blues")(shade), label=f"step {step + 1}")
            panel.set_xscale("log", base=2)
            panel.set_xticks(widths, [str(width) for width in widths])
            panel.minorticks_off()
            panel.text(0.04, 0.9, f"slope {slope(widths, values):.2f}", transform=panel.transAxes, fontsize=8)
            if column == 0:
                panel.set_ylabel(f"{place}\nmean change", fontsize=8)
        panels[0][column].set_title(title, fontsize=10)
        panels[-1][column].set_xlabel("hidden_size", fontsize=8)
    panels[0][0].legend(fontsize=7, loc="lower right")
    figure.tight_layout()
    figure.savefig(output, dpi=72)


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw the coordinate test of muP.", allow_abbrev=False)
    parser.add_argument("output", type=Path, help="PNG to write")
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 128, 256, 512])
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=2)
    arguments = parser.parse_args()
    base, seeds = arguments.widths[0], range(arguments.seeds)
    found: dict[str, list[Moves]] = {}
    for title, scales in COLUMNS.items():
        found[title] = [
            mean_moves(width, base if scales else None, arguments.steps, seeds) for width in arguments.widths
        ]
        for place in PLACES:
            by_width = [each[-1][place] for each in found[title]]
            numbers = " ".join(f"{value:.4g}" for value in by_width)
            print(f"{title}, {place}: {numbers}, slope {slope(arguments.widths, by_width):.2f}")
    draw(found, arguments.widths, arguments.output)


if __name__ == "__main__":
    main()
