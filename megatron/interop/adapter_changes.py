"""Changes that adapters make to one tensor of their base, by blocks of rows, in the order of PEFT's operations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from megatron.interop.huggingface_files import StoredTensor
from megatron.interop.merged_files import BLOCK_NUMEL, Rows, cuts
from megatron.interop.peft import PeftFactors

LEAST_COLUMNS = 16
"""Columns of which norms are computed at a time: a cache line of float32."""

Update = Callable[[Tensor, Tensor, int, int], object]
"""(rows, base, first, end): change the rows in place; `base` holds them as no adapter has changed them."""


class Step(Protocol):
    """Change of one tensor by one adapter."""

    def prepare(self, base: StoredTensor) -> Update:
        """Read and compute what all rows need."""
        ...


@dataclass
class TensorChange:
    """All changes of one tensor: first what replaces it, then what is added, adapter by adapter."""

    whole: list[tuple[float, StoredTensor]] = field(default_factory=list)
    """(weight, tensor) of adapters that replace it."""
    added: list[Step] = field(default_factory=list)

    def prepare(self, base: StoredTensor) -> Rows:
        """Return the function that applies all changes to rows."""
        updates = [step.prepare(base) for step in self.added]

        def change(rows: Tensor, first: int, end: int) -> None:
            unchanged = rows.clone() if bool(self.whole) + len(updates) > 1 else rows
            if self.whole:
                self._replace(rows, first, end)
            for update in updates:
                update(rows, unchanged, first, end)

        return change

    def _replace(self, rows: Tensor, first: int, end: int) -> None:
        if len(self.whole) == 1 and self.whole[0][0] == 1:
            rows.copy_(self.whole[0][1].rows(first, end))
            return
        base = rows.float()
        rows.copy_(sum((w * (saved.rows(first, end).float() - base) for w, saved in self.whole), base))


class LowRankUpdate:
    """`scaling * B @ A`, added in the dtype of the base and rounded after each adapter.

    DoRA: every row of the sum with the base is scaled to its magnitude, and what was merged before with it. PiSSA: the
    product that the adapter began with, a part of the base, is subtracted first.
    """

    def __init__(self, factors: PeftFactors, weight: float, transposed: bool) -> None:
        """`transposed`: the base holds (in_features, out_features)."""
        self._factors, self._weight, self.transposed = factors, weight, transposed

    def _products(self, base: StoredTensor) -> tuple[_Product, _Product | None]:
        """Return what is added, not yet scaled, and what is subtracted first."""
        product = _Product(_all(self._factors.b), _all(self._factors.a), self.transposed)
        if not self._factors.starts_from_svd:
            return product, None
        return product, _principal(_all(base), product, self._factors.scaling(1), self._factors.scaling(self._weight))

    def in_float64(self, base: StoredTensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return B, scaled, A, and DoRA's magnitudes: the rows of `base + B @ A` are scaled to these."""
        product, start = self._products(base)
        b, a = self._factors.scaling(self._weight) * product.b.double(), product.a.double()
        if start is not None:
            b, a = torch.cat([b, -start.b.double()], dim=1), torch.cat([a, start.a.double()])
        magnitude = self._factors.magnitude
        return b, a, None if magnitude is None else _all(magnitude).double()

    def prepare(self, base: StoredTensor) -> Update:
        """Read the factors, and compute the start of PiSSA and the norms of whole columns."""
        product, start = self._products(base)
        scaling = self._factors.scaling(self._weight)

        def residual(rows: Tensor, first: int, end: int) -> Tensor:
            return rows if start is None else (rows.float() - start.rows(first, end)).to(rows.dtype)

        def add(rows: Tensor, base: Tensor, first: int, end: int) -> None:
            change = product.rows(first, end).mul_(scaling)
            if start is not None:
                rows.copy_(residual(rows, first, end))
            # PEFT rounds an embedding's alone before the sum
            rows += change.to(rows.dtype) if self._factors.of_embedding else change

        def scale(rows: Tensor, base: Tensor, first: int, end: int) -> None:
            change = product.rows(first, end).mul_(scaling)
            if self.transposed:
                factor = column_factor
            else:
                norms = torch.linalg.norm(residual(base, first, end) + change, dim=1)
                factor = (magnitude[first:end] / norms)[:, None]
            rows.copy_(factor * (residual(rows, first, end) + change))

        if self._factors.magnitude is None:
            return add
        magnitude = _all(self._factors.magnitude)
        if self.transposed:
            column_factor = magnitude / _column_norms(residual(_whole(base), 0, base.shape[0]), product, scaling)
        return scale


@dataclass(frozen=True)
class _Product:
    """`B @ A` of the rows of a weight, which holds (in_features, out_features) if it is transposed."""

    b: Tensor
    a: Tensor
    transposed: bool

    def rows(self, first: int, end: int) -> Tensor:
        return self.a[:, first:end].T @ self.b.T if self.transposed else self.b[first:end] @ self.a


def _principal(weight: Tensor, product: _Product, full_scaling: float, scaling: float) -> _Product:
    """Return what PiSSA took out of a weight in float32, multiplied by `scaling`.

    `full_scaling` is that of the whole adapter, by which its factors were divided.
    """
    rank = product.a.shape[0]
    left, values, right = torch.linalg.svd(weight.T if product.transposed else weight, full_matrices=False)
    root = torch.diag(torch.sqrt(values[:rank] / full_scaling))
    return _Product(scaling * (left[:, :rank] @ root), root @ right[:rank], product.transposed)


def _column_norms(weight: Tensor, product: _Product, scaling: float) -> Tensor:
    """Return the length of each column of `weight`, in its own dtype, with the scaled product added."""
    norms = []
    for first, end in cuts(0, weight.shape[1], max(2 * LEAST_COLUMNS, BLOCK_NUMEL // max(1, weight.shape[0]))):
        change = (product.b[first:end] @ product.a).mul_(scaling)
        norms.append(torch.linalg.norm(weight[:, first:end].T + change, dim=1))
    return torch.cat(norms)


@dataclass(frozen=True)
class BiasUpdate:
    """`scaling * bias` of lora_bias."""

    bias: StoredTensor
    scaling: float

    def prepare(self, base: StoredTensor) -> Update:
        """Return the function that adds it."""

        def add(rows: Tensor, base: Tensor, first: int, end: int) -> None:
            rows += self.bias.rows(first, end).float() * self.scaling

        return add


def _whole(tensor: StoredTensor) -> Tensor:
    return tensor.rows(0, tensor.shape[0])


def _all(tensor: StoredTensor) -> Tensor:
    """Read a tensor as float32, to which PEFT raises an adapter's dtype."""
    return _whole(tensor).float()
