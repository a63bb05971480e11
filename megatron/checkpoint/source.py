"""Sources of weights: slices by our names, whatever the files are.

Each format of files is one subclass of `WeightSource` in one file; weights/formats.py lists those that a folder may
hold. What wraps another source, such as a base with adapters, is a subclass too.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from megatron.options.config import Config
from megatron.parallel.shards import Shard

if TYPE_CHECKING:
    from megatron.parallel.context import ParallelContext


@dataclass(frozen=True)
class Slice:
    """A stretch of what one of `tensor_size` tensor-parallel ranks holds of a parameter, flattened."""

    name: str
    shard: Shard
    """Padding included, which reads as zero."""
    start: int
    numel: int
    tensor_rank: int = 0
    tensor_size: int = 1
    is_counted: bool = False
    """This rank alone reads these numbers: they count for the identity of a base. See `WeightSource.identify`."""

    @staticmethod
    def whole(name: str, shard: Shard) -> Slice:
        """Return the full tensor, without padding."""
        return Slice(name, replace(shard, padding=0), 0, math.prod(shard.shape))

    @staticmethod
    def of_rank(name: str, shard: Shard, tensor_rank: int, tensor_size: int) -> Slice:
        """Return a whole local tensor; the full one where every rank holds that."""
        if shard.dim is None:  # so that one slice of it has one description on all ranks
            tensor_rank, tensor_size = 0, 1
        numel = math.prod(shard.local_shape(tensor_size))
        return Slice(name, shard, 0, numel, tensor_rank, tensor_size)

    @property
    def tensor(self) -> Slice:
        """The whole local tensor that this is a stretch of."""
        return replace(self, start=0, numel=math.prod(self.local_shape))

    @property
    def local_shape(self) -> tuple[int, ...]:
        return self.shard.local_shape(self.tensor_size)


class WeightSource(ABC):
    """Weights, and moments where the files hold them, as slices for any layout, in float32."""

    format: ClassVar[str]
    """As a checkpoint of adapters records that of its base."""
    title: str
    """The format, for messages."""
    holds_run: bool = True
    """A run can go on from it: it has progress, and may have an optimizer. False: it has weights alone."""
    reads_slices: bool = True
    """A slice costs less than the tensor that it is of."""

    def __init__(
        self,
        folder: Path,
        parameters: Mapping[str, Shard],
        *,
        kinds: Sequence[str] = ("weight",),
        metadata: dict[str, Any] | None = None,
        config: Config | None = None,
    ) -> None:
        self.folder = folder
        self.parameters = parameters
        """Full tensors by name."""
        self.kinds = tuple(kinds)
        """`weight` first, then the optimizer's moments."""
        self.metadata = metadata or {}
        """As of a run's checkpoint, as far as the files have it."""
        self.config = config
        """Model that the files describe; None: it is yet to be read from `metadata`."""
        self.uncompared: Sequence[str] = ()
        """Options of the run's model that nothing in the files settles."""

    @property
    def parts(self) -> Sequence[WeightSource]:
        """Sources of files that this one reads from, in the order in which they say what is beside the weights."""
        return (self,)

    def kinds_of(self, name: str) -> tuple[str, ...]:
        """Kinds that the files hold of a parameter, in the order of `kinds`."""
        return self.kinds

    @abstractmethod
    def read(self, at: Slice, kind: str = "weight") -> Tensor:
        """Return float32 [at.numel]. Raises CheckpointError where the parameter is missing or has another shape."""

    @abstractmethod
    def verify(self, share: tuple[int, int] = (0, 1), kinds: Collection[str] | None = None) -> str:
        """Compare the checksums of the share[0]-th of share[1] parts of the files, and return what was checked.

        `kinds`: those that will be read, if not all. Raises CheckpointError.
        """

    def read_full(self, name: str, kind: str = "weight") -> Tensor:
        """Return a whole tensor without padding, in its full shape."""
        shard = self.parameters[name]
        return self.read(Slice.whole(name, shard), kind).view(shard.shape)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, full tensor), each parameter once. A tensor may be overwritten by the next one."""
        for name in self.parameters:
            yield name, self.read_full(name)

    def identify(self, ctx: ParallelContext) -> list[str]:
        """Return lines about the base of adapters, all of which ranks have read, each number once. Collective.

        Raises CheckpointError if it is another base than that of the adapters.
        """
        return []
