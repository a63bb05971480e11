"""Muon: weights of linear layers step along their orthogonalised momentum, all other parameters by AdamW.

Source: Keller Jordan et al. 2024 (kellerjordan.github.io/posts/muon); for large models Liu et al. 2025, "Muon is
Scalable for LLM Training" (arXiv:2502.16982). torch's own (torch.optim.Muon) takes whole matrices that one rank holds.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from megatron.options.optimizer import NS_COEFFICIENTS, OptimizerConfig
from megatron.parallel.context import ParallelContext, group_of_stage
from megatron.parallel.shards import shard_of
from megatron.plan.matrices import Matrix, matrices_of, owners, scale_of
from megatron.training.optimizers.gated import OptimizerAround
from megatron.training.optimizers.groups import Groups
from megatron.training.optimizers.matrix_exchange import MatrixExchange, gather_parts

EPS = 1e-7
"""Least norm by which a matrix is divided."""


def orthogonalised(matrix: Tensor, options: OptimizerConfig) -> Tensor:
    """Return what steps of Newton-Schulz make of a matrix: with its singular vectors, and singular values near 1.

    In the matrix's own dtype; a norm of 16 bits is taken in float32.
    """
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.mT if is_tall else matrix
    norm = torch.linalg.vector_norm(x, dtype=torch.promote_types(x.dtype, torch.float32))
    x = x / norm.clamp(min=EPS).to(x.dtype)
    steps = options.muon_num_ns_steps
    for a, b, c in itertools.islice(itertools.cycle(NS_COEFFICIENTS[options.muon_coefficient_type]), steps):
        gram = x @ x.mT
        # a X + (b A + c A A) X, with A = X X^T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x


class Owned(Protocol):
    """A slice of a parameter's flattened local tensor that the optimizer updates: state.py's OwnedSlice."""

    @property
    def start(self) -> int: ...
    @property
    def weight(self) -> Tensor: ...
    @property
    def tensor(self) -> Tensor: ...
    @property
    def place(self) -> int: ...


@dataclass(frozen=True)
class HeldStretch:
    """This rank's stretch of a matrix, and its place in a tensor that the optimizer updates."""

    tensor: Tensor
    place: int
    """First number in the flattened tensor."""
    start: int
    """First number in the matrix's block."""
    numel: int

    def of(self, flat: Tensor) -> Tensor:
        """Return the stretch of the tensor's weights, gradient or momentum."""
        return flat.view(-1).narrow(0, self.place, self.numel)


class Muon(OptimizerAround):
    """Updates the groups `by_muon` by Muon, and the others by the AdamW inside. `place` comes before its first step."""

    def __init__(self, adamw: torch.optim.Optimizer, options: OptimizerConfig) -> None:
        """`adamw` has all groups."""
        super().__init__(adamw)  # which counts the steps, and knows torch's forms
        self._options, self._dtype = options, torch.float32
        self.grad_scale: Tensor | None = None
        """Divisor of the gradients in the next update, where `defaults` has a fused AdamW: it reads it too."""
        # ZeRO puts flat tensors in the place of the parameters
        self._group_of: dict[str, int] = {}
        for number, group in enumerate(adamw.param_groups):
            group["number"] = number
            if group["by_muon"]:
                self._group_of |= {parameter.full_name: number for parameter in group["params"]}
        self._matrices: list[Matrix] = []
        self._held: list[HeldStretch | None] = []
        self._made: dict[tuple[int, ...], MatrixExchange] = {}
        self._make: Callable[[Mapping[int, Matrix]], MatrixExchange] | None = None

    def place(
        self,
        named: Iterable[tuple[str, nn.Parameter]],
        owned: Mapping[str, Owned],
        ctx: ParallelContext,
        dtype: torch.dtype,
    ) -> None:
        """Learn where the matrices lie: the slices of the parameters `named` that this rank updates.

        `dtype` is that of the iterations and of what ranks exchange; float64 weights stay in theirs. Collective over
        all ranks.
        """
        self._dtype = dtype
        self._matrices = matrices_of((name, shard_of(parameter)) for name, parameter in named)
        self._held = [_stretch(each, owned.get(each.name), ctx.cut_of(each.shard)[1]) for each in self._matrices]
        stretches = [(0, 0) if each is None else (each.start, each.start + each.numel) for each in self._held]
        group = group_of_stage(ctx)
        parts = gather_parts(self._matrices, stretches, ctx, group)
        owned_by = owners(self._matrices, ctx, self._options.muon_num_ns_steps)
        self._make = partial(MatrixExchange, owners=owned_by, parts=parts, ctx=ctx, group=group)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        groups = self.param_groups  # under ZeRO-2 one at a time
        matrices = [group for group in groups if group["by_muon"]]
        others = [group for group in groups if not group["by_muon"]]
        finish: Callable[[], None] | None = None
        if matrices:
            finish = self._start(matrices)
        if others:
            self._step_adamw(others)  # while parts travel
        if finish is not None:
            finish()

    def _step_adamw(self, others: Groups) -> None:
        adamw = self.inner
        groups = adamw.param_groups
        adamw.param_groups, adamw.grad_scale = others, self.grad_scale
        try:
            adamw.step()
        finally:
            adamw.param_groups = groups

    def _start(self, groups: Groups) -> Callable[[], None] | None:
        """Advance the momentum and send what is to be orthogonalised; return what ends the update."""
        for tensor in _tensors(groups):
            self._advance(tensor)
        exchange = self._exchange(groups)
        if exchange is None:
            return None
        dtype = self._dtype
        if any(tensor.dtype == torch.float64 for tensor in _tensors(groups)):
            dtype = torch.float64

        def read(index: int) -> Tensor:
            held = self._held[index]
            assert held is not None
            assert held.tensor.grad is not None
            return held.of(held.tensor.grad)

        message = exchange.gather(read, dtype)
        return lambda: self._update(
            groups, exchange.spread(message, read, partial(orthogonalised, options=self._options))
        )

    def _advance(self, tensor: Tensor) -> None:
        """Add a gradient to its momentum, and leave in its place what is to be orthogonalised."""
        options, state = self._options, self.state[tensor]
        if state.get("momentum_buffer") is None:
            state["momentum_buffer"] = torch.zeros_like(tensor, requires_grad=False)
        if tensor.grad is None:  # of an expert without tokens; with data-parallel ranks a sum of zeros
            tensor.grad = torch.zeros_like(tensor)
        if self.grad_scale is not None:
            tensor.grad.div_(self.grad_scale)
        momentum: Tensor = state["momentum_buffer"]
        momentum.lerp_(tensor.grad, 1.0 - options.muon_momentum)
        if options.muon_nesterov:
            tensor.grad.lerp_(momentum, options.muon_momentum)
        else:
            tensor.grad.copy_(momentum)

    def _update(self, groups: Groups, updates: Iterator[tuple[int, Tensor]]) -> None:
        rates = {group["number"]: group["lr"] for group in groups}
        for group in groups:
            for tensor in group["params"]:
                tensor.mul_(1.0 - group["lr"] * group["weight_decay"])
        for index, update in updates:
            held, matrix = self._held[index], self._matrices[index]
            assert held is not None
            size = rates[self._group_of[matrix.name]] * scale_of(matrix, self._options)
            held.of(held.tensor).add_(update, alpha=-size)

    def _exchange(self, groups: Groups) -> MatrixExchange | None:
        """Return the exchange of all matrices of these groups; None while DeepSpeed is being built."""
        if self._make is None:
            return None
        numbers = tuple(group["number"] for group in groups)
        if numbers not in self._made:
            chosen = {index: each for index, each in enumerate(self._matrices) if self._group_of[each.name] in numbers}
            self._made[numbers] = self._make(chosen)
        return self._made[numbers]


def _tensors(groups: Groups) -> Iterator[Tensor]:
    for group in groups:
        yield from group["params"]


def _stretch(matrix: Matrix, owned: Owned | None, size: int) -> HeldStretch | None:
    """Return what an owned slice of a parameter has of a matrix; None: nothing."""
    if owned is None:
        return None
    begin = matrix.begin(size)
    first = max(begin, owned.start)
    stop = min(begin + math.prod(matrix.block(size)), owned.start + owned.weight.numel())
    if first >= stop:
        return None
    return HeldStretch(owned.tensor, owned.place + first - owned.start, first - begin, stop - first)
