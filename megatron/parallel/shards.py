"""Declared parameters: which slice of the full tensor a rank holds, how it starts, and how it is used.

Start, gradient sums, checkpoints, resharding, conversion and the plan derive from these declarations; nothing else in
the project says how a tensor is cut. Importable without torch, so that a plan needs none.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from megatron.parallel.costs import Cost, MatrixProduct, PassSizes, Projection, Router
from megatron.parallel.layout import Layout, LayoutError

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from megatron.parallel.context import ParallelContext


class DeclaresShards(Protocol):
    """The declaring part of a LinearMethod (parallel/linear.py), which imports this file."""

    @property
    def scales_weight(self) -> bool: ...
    def shards(self, weight: Shard) -> Mapping[str, Shard]: ...
    def kept_bytes(self, weight: Shard, sizes: PassSizes) -> int: ...
    def linear_method(self) -> Any: ...


@dataclass(frozen=True)
class Shard:
    """Slice of a full tensor that each tensor-parallel rank holds, its start and its roles.

    `dim` is the dimension cut over the tensor-parallel ranks; None: every rank holds the full tensor.
    `pieces` are the lengths along `dim` of the tensors fused in it (q, k, v; gate, up); each piece is cut evenly, so a
    rank holds its part of every piece, one after the other.
    `padding` rows of zeros follow the last piece so that it divides evenly (the vocabulary); they are not part of the
    full tensor.
    `std` is the normal initialisation's standard deviation, `bound` that of the uniform one in [-bound, bound]; without
    them it is filled with `value`.
    `trained`: the optimizer updates it. `vocabulary`: its rows are tokens. `added`: a linear method declares it beside
    the base model's parameters.
    `quantized`: held in 4 bits (nf4.py), in a layout of its own; never trained.
    `used_on`, required where a model declares a replicated parameter: "stream", applied to the residual stream, so that
    its gradient is summed over the tensor-parallel ranks under sequence parallelism only; "heads", applied by each rank
    to its own heads or channels, so that its gradient is always summed.
    `keeps_float32`: held in float32 whatever the precision. `balances`: moved by the loads of its layer's experts after
    each step, and not by the optimizer.
    `expert` is the index of one of `num_experts`: the ranks of the expert axis hold different ones, and those of the
    expert-tensor axis share it along `dim`.
    `cost`, required of every matrix that a family declares: the operation with it, from which FLOPs and memory follow.
    """

    shape: tuple[int, ...]
    dim: int | None = None
    pieces: tuple[int, ...] = ()
    padding: int = 0
    std: float | None = None
    bound: float | None = None
    value: float = 0.0
    trained: bool = True
    vocabulary: bool = False
    quantized: bool = False
    added: bool = False
    keeps_float32: bool = False
    balances: bool = False
    used_on: Literal["stream", "heads"] | None = None
    expert: int | None = None
    num_experts: int = 0
    cost: Cost | None = None

    def __post_init__(self) -> None:
        if self.dim is not None and sum(self.pieces) != self.shape[self.dim]:
            raise LayoutError(f"pieces {self.pieces} do not add up to dimension {self.dim} of {self.shape}")

    @property
    def is_hidden_matrix(self) -> bool:
        """Its matrix reads a vector whose length grows with the model's width: of layers, not of tables or the output.

        Under muP it starts and learns by its width. The output's logits are divided instead, for tied weights too.
        """
        return isinstance(self.cost, MatrixProduct | Router) and len(self.shape) > 1

    @property
    def is_linear_weight(self) -> bool:
        """It is the weight of a linear layer of a block: no table, no output projection, no router, no adapter's part.

        Muon updates these, and leaves the others to AdamW.
        """
        return isinstance(self.cost, MatrixProduct) and len(self.shape) == 2 and not self.added

    def frozen(self) -> Shard:
        """Return the shard of a parameter that nothing moves."""
        return dataclasses.replace(self, trained=False, balances=False)

    def spans(self, rank: int, size: int) -> list[tuple[int, int]]:
        """Return [start, stop) along `dim` of the full (padded) tensor that `rank` of `size` holds, a pair a piece."""
        spans, begin = [], 0
        for index, piece in enumerate(self.pieces):
            length = piece
            if index == len(self.pieces) - 1:
                length += self.padding
            if length % size:
                raise LayoutError(f"{length} rows of {self.shape} cannot be split over {size} tensor-parallel ranks")
            part = length // size
            spans.append((begin + rank * part, begin + (rank + 1) * part))
            begin += length
        return spans

    def local_shape(self, size: int) -> tuple[int, ...]:
        """Shape of one rank's tensor."""
        if self.dim is None:
            return self.shape
        shape = list(self.shape)
        shape[self.dim] = sum(stop - start for start, stop in self.spans(0, size))
        return tuple(shape)

    def take(self, full: Tensor, rank: int, size: int) -> Tensor:
        """Return the local tensor of `rank`: full -> local. Contiguous, its own storage."""
        # imported where it is needed, here and below: a plan and the launcher read declarations alone
        import torch

        if tuple(full.shape) != self.shape:
            raise LayoutError(f"full tensor has shape {tuple(full.shape)}, not {self.shape}")
        if self.dim is None:
            return full.clone()
        if self.padding:
            rest = list(self.shape)
            rest[self.dim] = self.padding
            full = torch.cat([full, full.new_zeros(rest)], dim=self.dim)
        parts = [full.narrow(self.dim, start, stop - start) for start, stop in self.spans(rank, size)]
        return torch.cat(parts, dim=self.dim)

    def assemble(self, local: Sequence[Tensor]) -> Tensor:
        """Return the full tensor of every rank's local one, in order of rank; the inverse of `take`."""
        import torch

        if self.dim is None:
            return local[0].clone()
        size = len(local)
        pieces: list[list[Tensor]] = [[] for _ in self.pieces]
        for rank, tensor in enumerate(local):
            begin = 0
            for index, (start, stop) in enumerate(self.spans(rank, size)):
                pieces[index].append(tensor.narrow(self.dim, begin, stop - start))
                begin += stop - start
        whole = torch.cat([part for parts in pieces for part in parts], dim=self.dim)
        return whole.narrow(self.dim, 0, self.shape[self.dim]).contiguous()

    def initial(self, name: str, seed: int, rank: int, size: int) -> Tensor:
        """Return a rank's tensor at the start of a run, float32: drawn over the full one by (seed, name), then cut."""
        # so every layout starts from the same model; drawn on the CPU, so every device does too
        import torch

        from megatron.parallel.rng import derive_seed

        if self.std is None and self.bound is None:
            return torch.full(self.local_shape(size), self.value, dtype=torch.float32)
        generator = torch.Generator().manual_seed(derive_seed(seed, name))
        full = torch.empty(self.shape, dtype=torch.float32)
        if self.bound is not None:
            full.uniform_(-self.bound, self.bound, generator=generator)
        else:
            full.normal_(0.0, self.std or 0.0, generator=generator)
        return self.take(full, rank, size)


@dataclass(frozen=True)
class Adapter:
    """The adapter of one module, as a part of the linear layer that holds it: declared and computed by one record."""

    suffix: str
    first: int
    stop: int
    """[first, stop) are its pieces of the base weight's rows."""
    rank: int
    scale: float
    is_principal: bool = False
    """It starts from the principal singular vectors of its weight (PiSSA)."""
    svd_iterations: int | None = None
    """Iterations of an approximate decomposition for that; None: an exact one."""


class Shards(Mapping[str, Shard]):
    """Declared parameters of one module: shards by the names below its prefix, and what allocates them.

    A module is given its view and allocates what is in it, no more and no less.
    """

    def __init__(self, layer: LayerDeclaration, prefix: str = "") -> None:
        self._layer, self._prefix = layer, prefix
        self._names = [name.removeprefix(prefix) for name in layer.shards if name.startswith(prefix)]

    def __getitem__(self, name: str) -> Shard:
        return self._layer.shards[self._prefix + name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def below(self, module: str) -> Shards:
        """Return the view of a submodule: `below("qkv")["weight"]` is this one's `qkv.weight`."""
        return Shards(self._layer, f"{self._prefix}{module}.")

    @property
    def layer_number(self) -> int | None:
        """Number of the transformer layer that the module is of; None: it is of none."""
        return self._layer.number

    @property
    def method(self) -> Any:
        """Linear method declared for this module; None: dense."""
        declared = self._layer.methods.get(self._prefix.removesuffix("."))
        if declared is None:
            return None
        return declared.linear_method()

    @property
    def base_method(self) -> Any:
        """Method declared for the product with this module's own weight; None: that of its storage."""
        return self._layer.base_methods.get(self._prefix.removesuffix("."))

    def full_name(self, name: str) -> str:
        return self._layer.full_name(self._prefix + name)

    def allocate(self, name: str, ctx: ParallelContext) -> nn.Parameter:
        """Return the uninitialised parameter of this rank, with its description.

        Its gradient is summed over the tensor-parallel ranks, once a backward pass, where `used_on` demands it.
        """
        if name not in self:
            raise LayoutError(
                f"{self.full_name(name)} is allocated but not declared; declare it in the family, or do not allocate it"
            )
        return allocate(self.full_name(name), self[name], ctx)


BuildModule = Callable[[Shards, Any], "nn.Module"]


@dataclass(frozen=True)
class LayerDeclaration:
    """One layer of a model: its parameters, and what builds its module.

    `shards` are by local name, `attention.qkv.weight`, which is the path of the parameter in the module. `build` is
    given their view and what the layers of a model share (`Shared` of models/attention). Layers of one name are one
    module with tied weights; `project` is called in place of the module where a pipeline ends with it.
    `methods` compute linear layers otherwise than dense, by prefix; `base_methods` their products with the weight,
    to which a method may add. `dropouts` counts those over the residual stream;
    `keeps_output`: what the layer returns is kept by the one after it.
    `loss_terms`: coefficients of the terms that it adds to the loss; `metrics`: reductions (mean, sum, max) of the
    numbers that it reports beside. Both by name; the module passes the values to `LayerTerms.add` (pass_state.py).
    """

    name: str
    shards: Mapping[str, Shard]
    build: BuildModule
    project: Callable[..., Any] | None = None
    methods: Mapping[str, DeclaresShards] = field(default_factory=dict)
    base_methods: Mapping[str, Any] = field(default_factory=dict)
    dropouts: int = 0
    keeps_output: bool = False
    loss_terms: Mapping[str, float] = field(default_factory=dict)
    metrics: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        unclear = [name for name, shard in self.shards.items() if shard.dim is None and shard.used_on is None]
        if unclear:
            raise LayoutError(
                f"{self.full_name(unclear[0])} is replicated without used_on; declare used_on='stream' if it is "
                "applied to the residual stream, 'heads' if each rank applies it to its own heads or channels"
            )

    # both are read at every turn of a plan
    @functools.cached_property
    def number(self) -> int | None:
        """Number of a transformer layer, `layers.<number>`; None for the others."""
        room, _, number = self.name.partition(".")
        if room != "layers":
            return None
        return int(number)

    @functools.cached_property
    def projects(self) -> bool:
        """Its weight multiplies the hidden states: it is the last layer."""
        return self.project is not None or any(isinstance(shard.cost, Projection) for shard in self.shards.values())

    def full_name(self, local: str) -> str:
        return f"{self.name}.{local}"

    def module(self, shared: Any) -> nn.Module:
        """Build the module, its parameters allocated and uninitialised."""
        module = self.build(Shards(self), shared)
        # a parameter that nothing computes with; quantised weights and adapters are held in forms of their own
        held = {name: shard for name, shard in self.shards.items() if shared.ctx.holds(shard)}
        needed = {name for name, shard in held.items() if not (shard.quantized or shard.added)}
        left_out = {self.full_name(name) for name in needed} - {name for name, _ in named_parameters(module)}
        if left_out:
            raise LayoutError(
                f"{min(left_out)} is declared but not allocated; allocate it from the Shards of its module, or do not "
                "declare it"
            )
        return module

    def with_method(self, prefix: str, method: DeclaresShards) -> LayerDeclaration:
        """Return this layer with the linear layer at `prefix` computed by `method`, whose own shards are added.

        An empty prefix is the layer itself: an embedding, or the output projection.
        """
        start = ""
        if prefix:
            start = f"{prefix}."
        weight = self.shards[f"{start}weight"]
        added = {
            # of an expert's weight they lie where it does
            f"{start}{name}": dataclasses.replace(
                shard, added=True, expert=weight.expert, num_experts=weight.num_experts
            )
            for name, shard in method.shards(weight).items()
        }
        return dataclasses.replace(self, shards={**self.shards, **added}, methods={**self.methods, prefix: method})

    def with_base_method(self, prefix: str, method: Any) -> LayerDeclaration:
        """Return this layer with the product of the linear layer at `prefix` computed by `method`, a BaseMethod."""
        return dataclasses.replace(self, base_methods={**self.base_methods, prefix: method})


def declared_shards(layers: Iterable[LayerDeclaration]) -> dict[str, Shard]:
    """Every parameter of the model once, by full name, in the order of the layers."""
    return {layer.full_name(local): shard for layer in layers for local, shard in layer.shards.items()}


def allocate(full_name: str, shard: Shard, ctx: ParallelContext, dtype: torch.dtype | None = None) -> nn.Parameter:
    """Return an uninitialised parameter that carries its name and shard; see `Shards.allocate`."""
    import torch
    from torch import nn

    if shard.keeps_float32:
        dtype = torch.float32
    parameter: Any = nn.Parameter(torch.empty(shard.local_shape(ctx.tensor_size), dtype=dtype), shard.trained)
    parameter.shard, parameter.full_name = shard, full_name
    # DeepSpeed's name for it: counted on every tensor-parallel rank in the norm of the gradient
    parameter.tensor_model_parallel = shard.dim is not None
    is_partial = shard.used_on == "heads" or (shard.used_on == "stream" and ctx.sequence_parallel)
    if is_partial and ctx.tensor_size > 1 and shard.trained:
        parameter.register_hook(lambda gradient: _summed(gradient, ctx))
    return parameter  # type: ignore[no-any-return]


def _summed(gradient: Tensor, ctx: ParallelContext) -> Tensor:
    """Sum over the tensor-parallel ranks in at least float32, rounded once."""
    # 16-bit sums would round at each rank, and these are small
    import torch
    import torch.distributed as dist

    from megatron.parallel.phase_clock import WAIT

    dtype = torch.promote_types(gradient.dtype, torch.float32)
    total = gradient.to(dtype, copy=True, memory_format=torch.contiguous_format)
    ctx.state.checks.partial(total.view(-1))
    with ctx.state.clock.phase(WAIT):
        dist.all_reduce(total, group=ctx.tensor_group)
    return total.to(gradient.dtype)


def shard_of(parameter: Tensor) -> Shard:
    return parameter.shard  # type: ignore[attr-defined,no-any-return]


def named_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield (full name, parameter), each once, in the order of the module; the same names in every engine."""
    declared = (parameter for parameter in module.parameters() if not hasattr(parameter, "is_placeholder"))
    return ((parameter.full_name, parameter) for parameter in declared)  # type: ignore[attr-defined,misc]


def alias(parameter: Tensor) -> Tensor:
    """Return the parameter as a tensor that a module may return."""
    # DeepSpeed starts its bookkeeping of a backward pass, clearing old gradients included, from hooks on the outputs of
    # the model. A parameter that is itself an output gets its gradient before any hook has run, and loses it; this
    # view's gradient passes a hook first.
    view = parameter.view_as(parameter)
    view.shard = shard_of(parameter)  # type: ignore[attr-defined]
    view.gradient_sum = getattr(parameter, "gradient_sum", None)  # type: ignore[attr-defined]
    return view


def initialise(named: Iterable[tuple[str, Tensor]], seed: int, layout: Layout) -> None:
    """Fill each parameter with its start, by name. Deterministic, and the same model on every layout."""
    import torch

    with torch.no_grad():
        for name, parameter in named:
            shard = shard_of(parameter)
            parameter.copy_(shard.initial(name, seed, *layout.cut_of(shard)))


def numel(shards: Iterable[Shard]) -> int:
    """Numbers in the full tensors, without padding."""
    return sum(math.prod(shard.shape) for shard in shards)
