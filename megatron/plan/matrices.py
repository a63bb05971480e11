"""Matrices that Muon orthogonalises as wholes: where their parts lie, and which rank does it.

A function of the declared shards and the layout alone, so that a plan knows it too. No torch.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from megatron.options.config import Config
from megatron.options.optimizer import OptimizerConfig
from megatron.parallel.layout import Layout, LayoutError
from megatron.parallel.shards import LayerDeclaration, Shard
from megatron.plan.microbatch import BYTES
from megatron.runtime.devices import planned_device

Precision = Literal["bf16", "fp32"]


@dataclass(frozen=True)
class Matrix:
    """A weight of a linear layer, or one of those that are fused in it: q, k or v, gate or up."""

    name: str
    """Full name of the parameter."""
    shard: Shard
    piece: int
    """Index among the fused ones."""

    @property
    def shape(self) -> tuple[int, int]:
        """Rows (outputs) and columns (inputs) of the whole."""
        rows, columns = self.shard.shape
        if self.shard.dim == 0:
            rows = self.shard.pieces[self.piece]
        return rows, columns

    def block(self, size: int) -> tuple[int, int]:
        """Return rows and columns of the block that each of `size` ranks of the parameter's cut holds."""
        rows, columns = self.shape
        if self.shard.dim == 0:
            return rows // size, columns
        return rows, columns // size

    def begin(self, size: int) -> int:
        """Return the first number of a rank's block in its flattened tensor of the parameter."""
        if self.shard.dim != 0:
            return 0
        return sum(self.shard.pieces[: self.piece]) // size * self.shard.shape[1]

    def flops(self, steps: int) -> int:
        """Return the FLOPs of so many steps of Newton-Schulz: A = X X^T, A A and (b A + c A A) X, X the wide way."""
        small, large = sorted(self.shape)
        return steps * (4 * small * small * large + 2 * small**3)


def matrices_of(named: Iterable[tuple[str, Shard]]) -> list[Matrix]:
    """Return the matrices of trained parameters, fused ones apart, in the order of the parameters.

    Raises LayoutError for fused matrices whose numbers lie in each other's rows.
    """
    found = []
    for name, shard in named:
        if not (shard.is_linear_weight and shard.trained):
            continue
        if shard.dim == 1 and len(shard.pieces) > 1:
            raise LayoutError(
                f"{name} fuses matrices along its columns, which Muon cannot take apart; declare them as parameters of "
                "their own, or use optimizer=adamw"
            )
        number = max(1, len(shard.pieces))
        found += [Matrix(name, shard, piece) for piece in range(number)]
    return found


class Holders:
    """Ranks of a stage by what they hold: all of them the same, but for experts that lie over them otherwise."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self.places = {
            rank: dataclasses.replace(layout, rank=rank)  # of a context too: it is a layout
            for rank in layout.ranks_of(layout.stage)
        }
        """The layout as each of them sees it."""
        self._teams: dict[int, list[int]] = {}
        for rank, place in self.places.items():
            self._teams.setdefault(place.expert_rank, []).append(rank)

    @property
    def stage(self) -> list[int]:
        return list(self.places)

    def divides(self, matrix: Matrix) -> bool:
        """Return True if other ranks hold another expert in its place."""
        return matrix.shard.expert is not None and self._layout.divides_experts

    @property
    def team(self) -> list[int]:
        """The ranks that hold the same experts as this one."""
        return self._teams[self._layout.expert_rank]

    def of(self, matrix: Matrix) -> list[int]:
        """Return the ranks that together hold a matrix of this rank, copies included."""
        return self.team if self.divides(matrix) else self.stage

    def place_in_team(self, rank: int) -> int:
        """Return the index of a rank among those that hold the same experts as it."""
        return self._teams[self.places[rank].expert_rank].index(rank)


def owners(matrices: Sequence[Matrix], layout: Layout, steps: int) -> list[int]:
    """Return for each matrix of this rank the rank that orthogonalises it: one of those that hold it.

    The largest come first, each to the rank that has least to do. Experts come before the rest, which any rank can
    take. All ranks that hold a matrix find the same.
    """
    holders = Holders(layout)
    costs = [matrix.flops(steps) for matrix in matrices]
    experts = [index for index, matrix in enumerate(matrices) if holders.divides(matrix)]
    others = [index for index, matrix in enumerate(matrices) if not holders.divides(matrix)]
    of_team = _balanced([costs[index] for index in experts], dict.fromkeys(holders.team, 0))
    loads = dict.fromkeys(holders.team, 0)
    for index, rank in zip(experts, of_team, strict=True):
        loads[rank] += costs[index]
    # each team holds as many experts of the same shapes, and shares them in the same way
    load_at = list(loads.values())
    of_stage = {rank: load_at[holders.place_in_team(rank)] for rank in holders.stage}
    chosen = dict(zip(experts, of_team, strict=True))
    chosen |= dict(zip(others, _balanced([costs[index] for index in others], of_stage), strict=True))
    return [chosen[index] for index in range(len(matrices))]


def _balanced(costs: Sequence[int], loads: Mapping[int, int]) -> list[int]:
    """Return a rank for each cost, the largest first to the rank that has least; `loads`: what ranks have already."""
    heap = [(load, rank) for rank, load in loads.items()]
    heapq.heapify(heap)
    chosen = [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda each: -costs[each]):
        load, rank = heapq.heappop(heap)
        chosen[index] = rank
        heapq.heappush(heap, (load + costs[index], rank))
    return chosen


def scale_of(matrix: Matrix, options: OptimizerConfig) -> float:
    """Return the factor of an orthogonalised matrix in its update, beside the learning rate."""
    rows, columns = matrix.shape
    scale = {
        "spectral": math.sqrt(max(rows, columns)),
        "shape_scaling": math.sqrt(max(1.0, rows / columns)),
        "unit_rms_norm": math.sqrt(rows / columns),
    }[options.muon_scale_mode]
    return scale * options.muon_scale_factor


def ns_precision(config: Config) -> Precision:
    """Return the precision of the Newton-Schulz iteration."""
    chosen = config.optimizer.muon_ns_dtype
    if chosen != "auto":
        return chosen
    is_slow = "bf16" in planned_device(config.parallel.device).widened()
    if config.training.precision == "fp32" or is_slow:
        return "fp32"
    return "bf16"


class MatrixUpdate:
    """The update of a stage's matrices, of the rank that orthogonalises most."""

    def __init__(self, config: Config, layout: Layout, layers: Sequence[LayerDeclaration]) -> None:
        self._config, self._layout = config, layout
        self.precision = ns_precision(config)
        held = [
            (layer.full_name(name), shard)
            for layer in layers
            for name, shard in layer.shards.items()
            if layout.holds(shard)
        ]
        self._matrices = matrices_of(held)

    @cached_property
    def _owners(self) -> list[int]:
        return owners(self._matrices, self._layout, self._config.optimizer.muon_num_ns_steps)

    @cached_property
    def _of_busiest(self) -> list[int]:
        """Places in the list of the matrices of the rank with most to do."""
        steps = self._config.optimizer.muon_num_ns_steps
        by_rank: dict[int, list[int]] = {}
        for index, rank in enumerate(self._owners):
            by_rank.setdefault(rank, []).append(index)
        return max(by_rank.values(), key=lambda own: sum(self._matrices[each].flops(steps) for each in own), default=[])

    @property
    def owned(self) -> list[Matrix]:
        """Return the matrices of the rank with most to do."""
        return [self._matrices[index] for index in self._of_busiest]

    @cached_property
    def travelling(self) -> list[Matrix]:
        """Those of them of which another rank updates a part."""
        holders, found = Holders(self._layout), []
        for index in self._of_busiest:
            matrix = self._matrices[index]
            updates = [
                rank
                for rank in holders.of(matrix)
                if holders.places[rank].shard_place(matrix.shard)[0] % self._shards(matrix) in self._cuts[index]
            ]
            if updates != [self._owners[index]]:
                found.append(matrix)
        return found

    @cached_property
    def _cuts(self) -> list[range]:
        """Return for each matrix the ranks that have some of it, among those over which ZeRO cuts its group."""
        ends = {True: 0, False: 0}
        """Numbers of the experts' group, where it is one, and of the others'."""
        stretches = []
        for matrix in self._matrices:
            group = self._is_divided(matrix)
            begin, ends[group] = ends[group], ends[group] + self._local_numel(matrix)
            stretches.append((matrix, begin, ends[group]))
        cuts = []
        for matrix, begin, end in stretches:
            # equal parts of one flat tensor
            per_rank = -(-ends[self._is_divided(matrix)] // self._shards(matrix))
            cuts.append(range(begin // per_rank, (end - 1) // per_rank + 1))
        return cuts

    @cached_property
    def held(self) -> int:
        """Numbers of matrices that a rank updates: of its blocks, or what ZeRO leaves it of them."""
        return sum(-(-self._local_numel(matrix) // self._shards(matrix)) for matrix in self._matrices)

    def _local_numel(self, matrix: Matrix) -> int:
        return math.prod(matrix.block(self._layout.cut_of(matrix.shard)[1]))

    def _is_divided(self, matrix: Matrix) -> bool:
        return self._layout.divides_experts and matrix.shard.expert is not None

    def _shards(self, matrix: Matrix) -> int:
        if self._config.effective_zero_stage == 0:
            return 1
        return self._layout.shard_place(matrix.shard)[1]

    def _copies(self, matrix: Matrix) -> int:
        """Return how many ranks update each number of a matrix."""
        copies = self._layout.grad_place(matrix.shard)[1] // self._shards(matrix)
        if matrix.shard.dim is None and not self._is_divided(matrix):
            copies *= self._layout.tensor_size
        return copies

    @property
    def exchanges(self) -> bool:
        return len(self._layout.ranks_of(self._layout.stage)) > 1

    @property
    def sent_numbers(self) -> int:
        """Numbers that a rank sends to owners, of copies one."""
        return sum(math.prod(matrix.shape) for matrix in self.travelling)

    @property
    def returned_numbers(self) -> int:
        """Numbers that a rank sends back: to each rank that updates them."""
        return sum(math.prod(matrix.shape) * self._copies(matrix) for matrix in self.travelling)

    @property
    def temporary_bytes(self) -> int:
        """Return the most bytes that are allocated during the update (training/optimizers/muon.py)."""
        size = BYTES[self.precision]
        assembled = size * max((self._work(matrix, copies=True) for matrix in self.travelling), default=0)
        is_rounded = self.precision != "fp32"
        alone = [self._work(matrix, copies=is_rounded) for matrix in self.owned if matrix not in self.travelling]
        sent, returned = size * self.sent_numbers, size * self.returned_numbers
        arrived = min(returned, size * self.held)
        # those that did not travel are orthogonalised while the others' parts come back
        return max(2 * sent, sent + returned + assembled, returned + arrived + size * max(alone, default=0))

    def _work(self, matrix: Matrix, *, copies: bool) -> int:
        """Numbers that are allocated while a matrix is orthogonalised. `copies`: put together of parts, or rounded."""
        # X before and after a step, A and its polynomial
        numbers = 2 * math.prod(matrix.shape) + 2 * min(matrix.shape) ** 2
        return numbers + math.prod(matrix.shape) if copies else numbers
