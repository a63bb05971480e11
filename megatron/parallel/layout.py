"""Sizes of all parallel axes, and where on them one rank stands. Importable without torch, so that a plan needs none.

Nothing else in the project divides numbers of ranks.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Protocol

from megatron.options.config import Config
from megatron.runtime.commands import UserError

AXES = {
    "tensor_rank": "tensor_size",
    "context_rank": "context_size",
    "batch_rank": "num_batch_ranks",
    "stage": "num_stages",
}
"""Coordinates and sizes of the axes, fastest first: tensor-parallel neighbours share a node. DeepSpeed's topology
numbers the ranks alike: its data axis is all that lies between tensor and pipeline."""
EXPERT_AXES = {
    "expert_tensor_rank": "expert_tensor_size",
    "expert_rank": "expert_size",
    "expert_grad_rank": "expert_grad_size",
    "stage": "num_stages",
}
"""The same ranks, as a layer of experts divides them."""


class LayoutError(UserError, ValueError):
    """A tensor or a world does not fit the parallel layout."""


class ModelSizes(Protocol):
    """The options that cut one copy of the model: of training or of generation."""

    @property
    def tensor_model_parallel_size(self) -> int: ...
    @property
    def context_parallel_size(self) -> int: ...
    @property
    def pipeline_model_parallel_size(self) -> int: ...
    @property
    def expert_model_parallel_size(self) -> int: ...
    @property
    def expert_tensor_parallel_size(self) -> int | None: ...


class Cut(Protocol):
    """The part of a parameter's Shard that says which ranks hold what of it."""

    @property
    def dim(self) -> int | None: ...
    @property
    def expert(self) -> int | None: ...
    @property
    def num_experts(self) -> int: ...


@dataclass(frozen=True)
class Layout:
    """Sizes of the axes and this rank. All other sizes and coordinates follow."""

    tensor_size: int = 1
    """Ranks that share each layer."""
    context_size: int = 1
    """Ranks that share each row of tokens: the context-parallel size."""
    num_batch_ranks: int = 1
    """Ranks that read different shares of each global batch: the data-parallel size."""
    num_replicas: int = 1
    """Groups of neighbours among the ranks that sum a gradient: ZeRO shards within each, and all hold the same."""
    num_stages: int = 1
    """Stages of the pipeline."""
    experts_are_whole: bool = False
    """Each expert is whole on its ranks, not cut over the tensor-parallel ones."""
    expert_size: int = 1
    """Ranks that hold different experts of a layer."""
    rank: int = 0

    @classmethod
    def of(cls, model: ModelSizes, world_size: int | None = None, rank: int = 0) -> Layout:
        """Return the layout of as many copies of the model as `world_size` ranks hold, but at least one; None: one.

        Where the sizes do not divide `world_size`, the layout's own is another one; `check` says so.
        """
        tensor_size = model.tensor_model_parallel_size
        copy = Layout(
            tensor_size=tensor_size,
            context_size=model.context_parallel_size,
            num_stages=model.pipeline_model_parallel_size,
            experts_are_whole=model.expert_tensor_parallel_size == 1 < tensor_size,
            expert_size=model.expert_model_parallel_size,
            rank=rank,
        )
        if world_size is None:
            return copy
        return dataclasses.replace(
            copy,
            num_batch_ranks=max(1, world_size // copy.model_size),
            num_replicas=getattr(model, "num_replicas", 1),  # which generation does not have
        )

    def check(self, world_size: int) -> None:
        """Raise LayoutError unless the layout fills the world."""
        if self.world_size != world_size:
            raise LayoutError(
                f"{world_size} ranks are not a multiple of tensor x context x pipeline = {self.tensor_size} x "
                f"{self.context_size} x {self.num_stages}; change one of them"
            )
        # of experts there may be fewer
        size = math.gcd(self.grad_size, self.expert_grad_size)
        if size % self.num_replicas:
            raise LayoutError(
                f"num_replicas={self.num_replicas} does not divide the {size} ranks that sum a gradient; use a divisor"
            )

    @property
    def world_size(self) -> int:
        return math.prod(getattr(self, size) for size in AXES.values())

    @property
    def title(self) -> str:
        """'PP 1 x TP 2 x CP 4 x DP 1': sizes of all axes, those of context parallelism where there is some."""
        context = f" x CP {self.context_size}" if self.context_size > 1 else ""
        return f"PP {self.num_stages} x TP {self.tensor_size}{context} x DP {self.num_batch_ranks}"

    @property
    def model_size(self) -> int:
        """Ranks that together hold one copy of the model."""
        return self.world_size // self.num_batch_ranks

    @property
    def grad_size(self) -> int:
        """Ranks over which the gradients of one part of the model are summed."""
        return self.context_size * self.num_batch_ranks

    @property
    def shard_size(self) -> int:
        """Ranks over which ZeRO shards one part of the model; of experts `shard_place` has them."""
        return self.grad_size // self.num_replicas

    @property
    def expert_tensor_size(self) -> int:
        """Ranks that share each expert."""
        return 1 if self.experts_are_whole else self.tensor_size

    @property
    def expert_grad_size(self) -> int:
        """The same for the experts of a layer."""
        return self.tensor_size * self.grad_size // (self.expert_tensor_size * self.expert_size)

    @property
    def team_size(self) -> int:
        """Neighbours that sum gradients and exchange in their passes too: tokens of experts, parts of the same rows."""
        with_experts = max(1, self.expert_size * self.expert_tensor_size // self.tensor_size)
        return math.lcm(with_experts, self.context_size)

    @property
    def tensor_rank(self) -> int:
        return self._coordinate(AXES, "tensor_rank")

    @property
    def context_rank(self) -> int:
        return self._coordinate(AXES, "context_rank")

    @property
    def leads_rows(self) -> bool:
        """True on one of the ranks that compute the same rows: what they have alike is counted there."""
        return self.tensor_rank == 0 and self.context_rank == 0

    @property
    def batch_rank(self) -> int:
        """Index of the share of each global batch that this rank reads."""
        return self._coordinate(AXES, "batch_rank")

    @property
    def grad_rank(self) -> int:
        """Index among the ranks over which the gradients of this part of the model are summed."""
        return self.rank // self.tensor_size % self.grad_size

    @property
    def replica(self) -> int:
        """Index of the replica that this rank belongs to, of experts as of the rest."""
        return self.grad_rank // self.shard_size

    @property
    def stage(self) -> int:
        return self._coordinate(AXES, "stage")

    @property
    def expert_tensor_rank(self) -> int:
        return self._coordinate(EXPERT_AXES, "expert_tensor_rank")

    @property
    def expert_rank(self) -> int:
        return self._coordinate(EXPERT_AXES, "expert_rank")

    @property
    def expert_grad_rank(self) -> int:
        return self._coordinate(EXPERT_AXES, "expert_grad_rank")

    @property
    def is_first_stage(self) -> bool:
        return self.stage == 0

    @property
    def is_last_stage(self) -> bool:
        return self.stage == self.num_stages - 1

    def rank_at(self, **coordinates: int) -> int:
        """Return the rank with these coordinates, such as `stage=1`, and otherwise this one's."""
        rank, stride = 0, 1
        for name, size in AXES.items():
            rank += stride * coordinates.get(name, getattr(self, name))
            stride *= getattr(self, size)
        return rank

    @property
    def divides_experts(self) -> bool:
        """Experts lie over the ranks otherwise than the rest of the model, and so have gradient groups of their own."""
        return self.expert_size > 1 or self.experts_are_whole

    def holds(self, shard: Cut) -> bool:
        """Return True if this rank's stage, where it has the layer of the parameter, holds it on this rank."""
        if shard.expert is None:
            return True
        # neighbours on one rank, so that what travels to a rank is one stretch
        return shard.expert // (shard.num_experts // self.expert_size) == self.expert_rank

    def cut_of(self, shard: Cut) -> tuple[int, int]:
        """Return rank and size on the axis that cuts the parameter; (0, 1) where every rank holds the whole."""
        if shard.dim is None:
            return 0, 1
        if shard.expert is not None:
            return self.expert_tensor_rank, self.expert_tensor_size
        return self.tensor_rank, self.tensor_size

    def counts(self, shard: Cut) -> bool:
        """Return True if this rank's numbers of the parameter are no copies of another tensor-parallel rank's.

        Copies of experts on such ranks are those of the ranks over which their gradients are summed.
        """
        if shard.expert is not None and self.divides_experts:
            return True
        return shard.dim is not None or self.tensor_rank == 0

    def grad_place(self, shard: Cut) -> tuple[int, int]:
        """Return rank and size among the ranks over which the parameter's gradient is summed."""
        if shard.expert is not None:
            return self.expert_grad_rank, self.expert_grad_size
        return self.grad_rank, self.grad_size

    def shard_place(self, shard: Cut) -> tuple[int, int]:
        """Return rank and size among the ranks over which ZeRO shards the parameter's states."""
        rank, size = self.grad_place(shard)
        size //= self.num_replicas
        return rank % size, size

    def shard_peers(self, grad_peers: list[int]) -> list[int]:
        """Return, of the ranks that sum a gradient, in their order, those over which ZeRO shards it on this rank."""
        size = len(grad_peers) // self.num_replicas
        return grad_peers[self.replica * size : (self.replica + 1) * size]

    def replica_peers(self, grad_peers: list[int]) -> list[int]:
        """Return those that hold the same shard as this rank, one of each replica."""
        size = len(grad_peers) // self.num_replicas
        return grad_peers[grad_peers.index(self.rank) % size :: size]

    def grad_peers(self) -> list[int]:
        """Return the ranks over which the gradients of this part of the model are summed, in their order."""
        first = self.rank - self.tensor_size * self.grad_rank
        return [first + self.tensor_size * index for index in range(self.grad_size)]

    def expert_grad_peers(self) -> list[int]:
        """The same for this rank's experts."""
        return self.peers(EXPERT_AXES, "expert_grad_rank")

    def peers(self, axes: dict[str, str], name: str) -> list[int]:
        """Return the ranks that differ from this one in this coordinate alone, itself included, in their order."""
        stride = 1
        for axis, size_name in axes.items():
            if axis == name:
                break
            stride *= getattr(self, size_name)
        first = self.rank - stride * self._coordinate(axes, name)
        return [first + stride * index for index in range(getattr(self, axes[name]))]

    def ranks_of(self, stage: int) -> list[int]:
        """Return all ranks that hold the layers of a stage."""
        size = self.world_size // self.num_stages
        return list(range(stage * size, (stage + 1) * size))

    def places(self, length: int) -> list[range]:
        """Return the places of a row of this length that this rank computes. Raises LayoutError for a wrong length.

        The row is cut into twice as many stretches as ranks share it. Of causal attention the last stretch costs most
        and the first one least, so a rank has one from either end.
        """
        if self.context_size == 1:
            return [range(length)]
        stretch, left_over = divmod(length, self.stretches)
        if left_over:
            raise LayoutError(
                f"{length} tokens cannot be cut into {self.stretches} stretches for {self.context_size} "
                "context-parallel ranks"
            )
        numbers = (self.context_rank, 2 * self.context_size - 1 - self.context_rank)
        return [range(number * stretch, (number + 1) * stretch) for number in numbers]

    @property
    def stretches(self) -> int:
        """The length of a row is a multiple of this: the equal stretches that ranks of context parallelism compute."""
        return 2 * self.context_size if self.context_size > 1 else 1

    def slice_size(self, total: int) -> int:
        """Return one tensor-parallel rank's part of `total`. Raises LayoutError if it does not divide evenly."""
        if total % self.tensor_size:
            raise LayoutError(f"{total} cannot be split evenly over {self.tensor_size} tensor-parallel ranks")
        return total // self.tensor_size

    def _coordinate(self, axes: dict[str, str], name: str) -> int:
        rank = self.rank
        for axis, size_name in axes.items():
            size: int = getattr(self, size_name)
            if axis == name:
                return rank % size
            rank //= size
        raise KeyError(name)


def parallel_batch_size(config: Config, world_size: int) -> tuple[int, int]:
    """Return the data-parallel size, and the samples in one microbatch of all data-parallel ranks."""
    size = Layout.of(config.parallel, world_size).num_batch_ranks
    return size, config.training.micro_batch_size * size
