"""QK-clip in whole engines, and in float64 without them. Runs inside the ranks of tests/ranks.py."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.parallel.shards import named_parameters
from megatron.training.optimizers.qk_clip import QKClip
from tests.training import layouts, matrices

HEADS, GROUPS, SIZE, LAYERS, LENGTH, VOCABULARY = 4, 2, 16, 2, 32, 250
THRESHOLD, LR = 1.5, 0.5
# qwen2: biases of q, k and v
MODEL = (
    f"--architecture qwen2 --position-embedding-type rope --num-query-groups {GROUPS} --num-layers {LAYERS} "
    "--untie-embeddings-and-output-weights --init-method-std 0.1"
)
CLIP = f"--qk-clip --qk-clip-threshold {THRESHOLD}"
SGD = f"{MODEL} --optimizer sgd --sgd-momentum 0 --lr {LR} --weight-decay 0 --clip-grad 0"


# ---------------------------------------------------------------------------------------------------------------------
# Without the project's model, optimizer and kernels


class Reference:
    """The model in float64, from written-out formulas, trained by gradient descent with QK-clip as published."""

    def __init__(self, weights: dict[str, Tensor], *, alpha: float = 0.5) -> None:
        self.weights = {name: weight.double().clone().requires_grad_() for name, weight in weights.items()}
        self._alpha = alpha
        self.largest: list[list[float]] = []
        """Of each step the largest logits, layer by layer and head by head."""
        self._of_step: list[Tensor] = []

    def step(self, tokens: Tensor) -> float:
        self._of_step = []
        loss = self._loss(tokens)
        gradients = torch.autograd.grad(loss, list(self.weights.values()))
        with torch.no_grad():
            for weight, gradient in zip(self.weights.values(), gradients, strict=True):
                weight -= LR * gradient
            for layer, largest in enumerate(self._of_step):
                self._clip(layer, largest)
        self.largest.append(torch.cat(self._of_step).tolist())
        return float(loss.detach())

    def _loss(self, tokens: Tensor) -> Tensor:
        w = self.weights
        x = F.embedding(tokens[:, :-1], w["embedding.word.weight"])
        for layer in range(LAYERS):
            p = f"layers.{layer}."
            x = x + self._attention(_norm(x, w[f"{p}attention_norm.weight"]), p)
            gate, up = (_norm(x, w[f"{p}mlp_norm.weight"]) @ w[f"{p}mlp.gate_up.weight"].T).chunk(2, -1)
            x = x + (F.silu(gate) * up) @ w[f"{p}mlp.down.weight"].T
        logits = _norm(x, w["final_norm.weight"]) @ w["output.weight"][:VOCABULARY].T
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    def _attention(self, x: Tensor, p: str) -> Tensor:
        fused = x @ self.weights[f"{p}attention.qkv.weight"].T + self.weights[f"{p}attention.qkv.bias"]
        q, k, v = fused.split([HEADS * SIZE, GROUPS * SIZE, GROUPS * SIZE], -1)
        contexts, largest = [], []
        hidden = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
        for head in range(HEADS):
            of_key = head // (HEADS // GROUPS)
            own = _rotated(q[..., head * SIZE : (head + 1) * SIZE])
            key = _rotated(k[..., of_key * SIZE : (of_key + 1) * SIZE])
            scores = (own @ key.mT / SIZE**0.5).masked_fill(hidden, -torch.inf)
            largest.append(scores.detach().max())
            contexts.append(scores.softmax(-1) @ v[..., of_key * SIZE : (of_key + 1) * SIZE])
        self._of_step.append(torch.stack(largest))
        return torch.cat(contexts, -1) @ self.weights[f"{p}attention.dense.weight"].T

    def _clip(self, layer: int, largest: Tensor) -> None:
        parameters = [self.weights[f"layers.{layer}.attention.qkv.{kind}"] for kind in ("weight", "bias")]
        for group in range(GROUPS):
            heads = range(group * HEADS // GROUPS, (group + 1) * HEADS // GROUPS)
            factor = min(1.0, THRESHOLD / max(float(largest[head]) for head in heads))
            for parameter in parameters:
                for head in heads:
                    parameter[head * SIZE : (head + 1) * SIZE] *= factor**self._alpha
                begin = (HEADS + group) * SIZE
                parameter[begin : begin + SIZE] *= factor ** (1 - self._alpha)


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def _rotated(x: Tensor) -> Tensor:
    """[B, S, d], of which channels i and i + d/2 are a pair."""
    frequencies = 10000.0 ** (-torch.arange(0, SIZE, 2, dtype=torch.float64) / SIZE)
    turns = torch.polar(torch.ones(LENGTH, SIZE // 2).double(), torch.arange(LENGTH).double()[:, None] * frequencies)
    turned = torch.complex(*x.chunk(2, -1)) * turns
    return torch.cat([turned.real, turned.imag], -1)


# ---------------------------------------------------------------------------------------------------------------------
# Engines


@contextlib.contextmanager
def planted(wrong: str) -> Iterator[None]:
    """Break the clip in one way; "": in none."""
    if wrong == "":
        yield
    elif wrong == "largest logit of this rank alone":

        def forget(clip: QKClip, *arguments: Any) -> None:
            made(clip, *arguments)
            clip._group = None

        made = QKClip.__init__
        with patch.object(QKClip, "__init__", forget):
            yield
    else:
        assert wrong == "heads of another group"
        rows = QKClip._rows
        with patch.object(QKClip, "_rows", lambda clip, factors: rows(clip, factors.flip(0))):
            yield


def beside_the_reference(flags: str, steps: int, wrong: str = "", alpha: float = 0.5) -> dict[str, Any]:
    """Train in one process and in float64; what they differ by, and how many heads were above the threshold."""
    with planted(wrong):
        engine, task = layouts.build(f"{SGD} {CLIP} {flags}")
        start = {name: parameter.detach() for name, parameter in named_parameters(engine.module)}
        reference = Reference(start, alpha=alpha)
        losses, differences = [], []
        for step in range(steps):
            loss = matrices.step_of(engine, task, step)
            of_reference = reference.step(torch.from_numpy(layouts.step_tokens(step, 8, LENGTH)))
            losses.append((loss, of_reference))
            logits = engine.ctx.state.logits.by_layer
            found = torch.cat([logits[layer] for layer in range(LAYERS)]).double()
            differences.append((found - torch.tensor(reference.largest[-1])).abs().max().item())
    now = dict(named_parameters(engine.module))
    weights = max((now[name].double() - weight).abs().max().item() for name, weight in reference.weights.items())
    above = [largest > THRESHOLD for of_step in reference.largest for largest in of_step]
    return {"losses": losses, "logits": differences, "weights": weights, "above": sum(above), "of": len(above)}


def train(flags: str, steps: int, wrong: str = "") -> tuple[list[float], list[matrices.Stretch]]:
    with planted(wrong):
        return matrices.train(flags, steps)


def rounding(flags: str, steps: int, *, late: bool) -> float:
    """The largest difference between a 16-bit weight and the float32 one, rounded, that it is made of.

    `late`: clip the float32 weights once the step has made 16-bit ones of them.
    """
    engine, task = layouts.build(flags)
    optimizer: Any = engine.state.torch_optimizer
    clip = optimizer.after_update
    if late:
        optimizer.after_update = None
    for step in range(steps):
        matrices.step_of(engine, task, step)
        if late:
            clip(optimizer.param_groups)
    largest = 0.0
    for owned in engine.state.owned():
        held = owned.parameter.detach().view(-1)[owned.start :][: owned.weight.numel()]
        largest = max(largest, float((held.float() - owned.weight.to(held.dtype).float()).abs().max()))
    return largest
