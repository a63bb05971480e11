"""Pieces of a pass on one rank, through the project's seams: products, attention, operations on each number, copies.

Shapes: S tokens of a row, n query heads, k key/value heads, d head size.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.measuring.options import Sizes
from megatron.measuring.stopwatch import Case, Pool, Run
from megatron.models.attention.kernels import build_kernel
from megatron.models.attention.scores import PLAIN, Scores
from megatron.models.positions import rotary_embedding
from megatron.options.config import Config
from megatron.parallel.context import ParallelContext
from megatron.parallel.losses import Head
from megatron.parallel.operators import nf4, products
from megatron.parallel.operators.fused import choose_kernels

CHANNELS = 64
"""Channels of the rows of an operation on each number, where it has rows."""
EXPERTS = 16
HALF = ("forward", "backward")


@dataclass(frozen=True)
class Pieces:
    """Cases of one precision."""

    config: Config
    """Config of a model with rotary positions; its widths are not used."""
    ctx: ParallelContext
    precision: str
    sizes: Sizes
    pool: Pool

    def cases(self) -> Iterator[Case]:
        yield from self.of_products()
        yield from self.of_attention()
        for kind, make in self.operations().items():
            for numbers in self.sizes.numbers:
                for direction in HALF:
                    yield Case((kind, self.precision, numbers, direction), self._prepared(make, numbers, direction))

    # -----------------------------------------------------------------------------------------------------------------
    # Products

    def of_products(self) -> Iterator[Case]:
        shapes = itertools.product(self.sizes.tokens, self.sizes.channels, self.sizes.channels)
        for (tokens, outputs, inputs), role in itertools.product(shapes, ("forward", "input", "weight")):
            key = ("product", self.precision, role, tokens, outputs, inputs)
            yield Case(key, functools.partial(self._products, role, tokens, outputs, inputs))

    def _products(self, role: str, tokens: int, outputs: int, inputs: int) -> list[Run]:
        def run() -> Run:
            take = self.pool.take
            if role == "forward":
                x, weight = take(tokens, 1, inputs, trained=True), take(outputs, inputs, trained=True)
                return lambda: products.linear(x, weight, None)
            grad = take(tokens, 1, outputs)
            if role == "input":
                weight = take(outputs, inputs)
                return lambda: products.mm(grad, weight)
            x = take(tokens, 1, inputs)
            return lambda: products.mm(grad.flatten(0, -2).t(), x.flatten(0, -2))

        return [run() for _ in range(self.pool.copies(tokens * (outputs + inputs) + outputs * inputs))]

    # -----------------------------------------------------------------------------------------------------------------
    # Attention

    def of_attention(self) -> Iterator[Case]:
        sizes = self.sizes
        for kind, length in itertools.product(("causal", "alibi", "window", "dropout"), sizes.row_tokens):
            groups = (1, 4) if kind == "causal" else (1,)
            for n, d, group, direction in itertools.product(sizes.heads, sizes.head_size, groups, HALF):
                key = ("attention", self.precision, kind, n, length, d, group, direction)
                yield Case(key, functools.partial(self._attention, kind, n, length, d, max(1, n // group), direction))

    def _attention(self, kind: str, n: int, length: int, d: int, k: int, direction: str) -> list[Run]:
        scores, dropout = scores_of_kind(kind, n, length, self.ctx.device), 0.1 if kind == "dropout" else 0.0
        kernel = build_kernel(
            self.config.model, self.ctx, packed=False, window=scores.window, length=length, scores=scores
        )

        def operands() -> list[Tensor]:
            # views of the fused projection, as a layer has them
            fused = self.pool.take(length, 1, (n + 2 * k) * d)
            parts = fused.split([n * d, k * d, k * d], dim=-1)
            return [part.unflatten(-1, (-1, d)).permute(1, 2, 0, 3).detach().requires_grad_() for part in parts]

        def run() -> Run:
            q, k_, v = operands()
            if direction == "forward":
                return lambda: kernel(q, k_, v, None, dropout)
            output = kernel(q, k_, v, None, dropout)
            grad = self.pool.take(*output.shape)
            return lambda: torch.autograd.grad(output, (q, k_, v), grad, retain_graph=True)

        return [run() for _ in range(min(3, self.pool.copies(8 * length * n * d)))]

    # -----------------------------------------------------------------------------------------------------------------
    # Operations on each number

    def operations(self) -> dict[str, Callable[[int], tuple[Callable[..., Tensor], Sequence[Tensor]]]]:
        """Return what makes each operation, and its operands, for so many numbers; gradients are of the operands."""
        kernels = choose_kernels(self.config, self.ctx.device)
        take, epsilon = self.pool.take, self.config.model.norm_epsilon

        def rows(numbers: int, **options: Any) -> Tensor:
            return take(numbers // CHANNELS, 1, CHANNELS, **options)

        def norm(function: Callable[..., Tensor], channels: int) -> Callable[[int], Any]:
            return lambda numbers: (
                function,
                (take(numbers // channels, 1, channels, trained=True), take(channels, trained=True)),
            )

        def rotary(numbers: int) -> Any:
            length = max(1, numbers // (2 * CHANNELS))
            angles = rotary_embedding(self.config.model).angles(length, self.ctx.device, None, self.ctx)
            d = 2 * angles[0].shape[-1]
            q, k = (take(length, 1, CHANNELS // d, d, trained=True) for _ in range(2))
            return lambda q, k: torch.cat([part.flatten() for part in kernels.rotate(q, k, *angles)]), (q, k)

        wide = 4 * CHANNELS
        return {
            "rmsnorm": norm(lambda x, weight: kernels.rms_norm(x, weight, epsilon), wide),
            "layernorm": norm(lambda x, weight: F.layer_norm(x, x.shape[-1:], weight, weight, epsilon), wide),
            "head_norm": norm(lambda x, weight: kernels.rms_norm(x, weight, epsilon), CHANNELS),
            "gelu": lambda numbers: (lambda x: F.gelu(x, approximate="tanh"), (rows(numbers, trained=True),)),
            "swiglu": lambda numbers: (kernels.swiglu, (rows(numbers, trained=True),)),
            "residual": lambda numbers: (torch.add, (rows(numbers), rows(numbers))),
            "residual_dropout": lambda numbers: (
                lambda x, branch: x + F.dropout(branch, 0.1),
                (rows(numbers, trained=True), rows(numbers, trained=True)),
            ),
        } | {"rotary": rotary}

    def _prepared(self, make: Callable[[int], Any], numbers: int, direction: str) -> Callable[[], list[Run]]:
        def run() -> Run:
            function, operands = make(numbers)
            # the backward pass of a sum is one of the branches' gradients
            if direction == "forward" or not operands[0].requires_grad:
                return lambda: function(*operands)
            output = function(*operands)
            grad = self.pool.take(*output.shape)
            return lambda: torch.autograd.grad(output, operands, grad, retain_graph=True)

        return lambda: [run() for _ in range(self.pool.copies(4 * numbers))]

    # -----------------------------------------------------------------------------------------------------------------
    # Operations whose two directions are not a function and its gradient

    def others(self) -> Iterator[Case]:
        makers: dict[str, Callable[[int, str], Run]] = {
            "cross_entropy": self._cross_entropy,
            "accumulate": self._accumulate,
            "cast": self._cast,
            "embedding": self._embedding,
            "router": self._router,
            "dispatch": self._dispatch,
            "quantized": self._quantized,
        }
        for (kind, make), numbers, direction in itertools.product(makers.items(), self.sizes.numbers, HALF):
            key = (kind, self.precision, numbers, direction)

            def prepare(make: Any = make, numbers: int = numbers, direction: str = direction) -> list[Run]:
                return [make(numbers, direction) for _ in range(self.pool.copies(3 * numbers))]

            yield Case(key, prepare)

    def _cross_entropy(self, numbers: int, direction: str) -> Run:
        """Softmax, losses and gradient of logits: all of it runs forward, beside the products."""
        vocabulary = max(16, min(4096, numbers // 16))
        count = max(1, numbers // vocabulary)
        labels = torch.zeros(count, 1, dtype=torch.int64, device=self.ctx.device)
        weight = self.pool.take(vocabulary, 1)
        head = Head(self.pool.take(count, 1), weight, labels, 0, vocabulary, self.ctx, None, vocabulary=vocabulary)
        logits, whole = self.pool.take(count, vocabulary).clone(), slice(0, count)
        if direction == "backward":
            return lambda: None  # it scales gradients by one number, which the products read anyway

        def run() -> None:
            log_probs, _ = head.log_probs(whole, logits, to_softmax=True)
            head.subtract_labels_(whole, logits, log_probs, None)

        return run

    def _accumulate(self, numbers: int, direction: str) -> Run:
        total = self.pool.take(numbers).float()
        gradient = self.pool.take(numbers)
        return lambda: total.add_(gradient)

    def _cast(self, numbers: int, direction: str) -> Run:
        exact = self.pool.take(numbers).float()
        rounded = self.pool.take(numbers)
        if direction == "backward":
            return lambda: exact.copy_(rounded)
        return lambda: rounded.copy_(exact)

    def _quantized(self, numbers: int, direction: str) -> Run:
        # forward and backward convert the weight alike
        packed, scales = nf4.quantize(self.pool.take(numbers).float())
        return lambda: nf4.dequantize(packed, scales, products.DTYPES[self.precision])

    def _embedding(self, numbers: int, direction: str) -> Run:
        tokens = max(1, numbers // CHANNELS)
        table = self.pool.take(512, CHANNELS, trained=True)
        ids = torch.arange(tokens, device=self.ctx.device).remainder_(512).unsqueeze(-1)
        if direction == "forward":
            return lambda: F.embedding(ids, table)
        output = F.embedding(ids, table)
        grad = self.pool.take(*output.shape)
        return lambda: torch.autograd.grad(output, table, grad, retain_graph=True)

    def _router(self, numbers: int, direction: str) -> Run:
        scores = self.pool.take(max(1, numbers // EXPERTS), EXPERTS).float().requires_grad_()
        if direction == "forward":
            return lambda: scores.softmax(-1).topk(2, -1)
        chosen = scores.softmax(-1).topk(2, -1).values
        grad = torch.ones_like(chosen)
        return lambda: torch.autograd.grad(chosen, scores, grad, retain_graph=True)

    def _dispatch(self, numbers: int, direction: str) -> Run:
        count = max(1, numbers // CHANNELS)
        rows, order = self.pool.take(count, CHANNELS), torch.randperm(count, device=self.ctx.device)
        if direction == "forward":
            return lambda: rows.index_select(0, order)
        return lambda: torch.zeros_like(rows).index_add_(0, order, rows)


def scores_of_kind(kind: str, n: int, length: int, device: torch.device) -> Scores:
    """Return what an attention of a kind does with its scores."""
    if kind == "alibi":
        return Scores(slopes=torch.full((n,), 0.1, device=device))
    if kind == "window":
        return Scores(window=max(1, length // 4))
    return PLAIN


def seen_share(kind: str, length: int) -> float:
    """Return the share of the causal half that the measured scores are."""
    if kind != "window":
        return 1.0
    window = max(1, length // 4)
    return (window * (window + 1) / 2 + (length - window) * window) / (length * (length + 1) / 2)
