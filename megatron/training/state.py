"""What a rank owns of weights and optimizer: the only file that knows where DeepSpeed keeps them.

An owned part is a stretch of a parameter's flattened local tensor: its float32 weights, and the optimizer's moments for
them. Who owns what:

    float32 without ZeRO   everyone everything; data-parallel ranks take turns, so that each saves a share
    bf16, fp16, ZeRO-1, 2  stretches that DeepSpeed's flat partitions cut out, known to each parameter's `_hp_mapping`
    ZeRO-3                 equal stretches of each parameter

Parameters that every tensor-parallel rank holds are the first one's; tied ones the first stage's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from megatron.checkpoint.format import CheckpointError, Fragment
from megatron.checkpoint.reader import Checkpoint
from megatron.models.transformer import compute_dtype
from megatron.parallel.shards import Shard, shard_of

if TYPE_CHECKING:
    from megatron.training.engine import Engine

MOMENTS = ("exp_avg", "exp_avg_sq", "momentum_buffer")


class Readable(Protocol):
    """What weights and moments are restored from."""

    kinds: tuple[str, ...]

    def read(
        self, name: str, kind: str, shard: Shard, tensor_rank: int, tensor_size: int, start: int, numel: int
    ) -> Tensor: ...


@dataclass(frozen=True)
class Part:
    """A stretch of a parameter's flattened local tensor that this rank's optimizer updates."""

    name: str
    parameter: nn.Parameter
    start: int
    weight: Tensor
    """Flat float32 view: writing to it writes the optimizer's weights."""
    moments: dict[str, Tensor]
    """Views like `weight`, by kind; none before the first step."""
    is_saved_here: bool
    """Whether no other rank saves it."""

    @property
    def shard(self) -> Shard:
        return shard_of(self.parameter)


def fragments(engine: Engine, *, with_optimizer: bool) -> list[Fragment]:
    """What this rank saves."""
    found = []
    dtype = str(compute_dtype(engine.config)).removeprefix("torch.")
    for part in _parts(engine):
        if not part.is_saved_here:
            continue
        kinds = {"weight": part.weight, **(part.moments if with_optimizer else {})}
        rank, size = _place(engine, part.shard)
        for kind, tensor in kinds.items():
            found.append(Fragment(part.name, kind, part.shard, rank, size, part.start, tensor.detach().view(-1), dtype))
    return found


def scalars(engine: Engine) -> dict[str, Any]:
    """What is one number for the whole run: the optimizer's step count and the loss scaler. JSON values."""
    steps = [float(state["step"]) for state in _torch_optimizer(engine).state.values() if "step" in state]
    scaler = getattr(engine.deepspeed.optimizer, "loss_scaler", None) if engine.config.training.fp16 else None
    return {
        "step": max(steps, default=None),
        "loss_scaler": None if scaler is None else _numbers(scaler),
    }


def restore(engine: Engine, checkpoint: Readable, saved: dict[str, Any] | None) -> None:
    """Read this rank's weights and, unless `saved` is None, its optimizer's state; `saved` is what `scalars` gave.

    Raises CheckpointError where the checkpoint is of another model. Every rank reads its own; none waits for another.
    """
    moments = [kind for kind in MOMENTS if kind in checkpoint.kinds] if saved is not None else []
    if moments:
        _start_optimizer(engine, moments, float(saved["step"] or 0.0))  # type: ignore[index]
    parts = {part.name: part for part in _parts(engine)}

    def read(name: str, kind: str, shard: Shard, start: int, numel: int) -> Tensor:
        return checkpoint.read(name, kind, shard, *_place(engine, shard), start, numel)

    with torch.no_grad():
        for name, parameter in engine.module.named_parameters():
            part = parts.get(name)
            if engine.config.optimizer.zero_stage != 3:
                whole = read(name, "weight", shard_of(parameter), 0, parameter.numel())
                parameter.copy_(whole.view(parameter.shape))
                if part is not None:
                    part.weight.copy_(whole[part.start : part.start + part.weight.numel()])
            elif part is not None:
                part.weight.copy_(read(name, "weight", part.shard, part.start, part.weight.numel()))
                parameter.ds_tensor.narrow(0, 0, part.weight.numel()).copy_(part.weight)  # type: ignore[attr-defined]
        for part in parts.values():
            for kind in moments:
                target = part.moments[kind]
                target.copy_(read(part.name, kind, part.shard, part.start, target.numel()))
    if saved is not None and saved.get("loss_scaler") and engine.config.training.fp16:
        for name, value in saved["loss_scaler"].items():
            setattr(engine.deepspeed.optimizer.loss_scaler, name, value)


def gather_again(engine: Engine) -> None:
    """After `restore` into an engine that has trained: ZeRO-3 keeps small parameters whole on all ranks. Collective."""
    if engine.config.optimizer.zero_stage == 3:
        optimizer = engine.deepspeed.optimizer
        for parameter in optimizer.persistent_parameters:
            parameter.partition(has_been_updated=False)
        if optimizer.persistent_parameters:
            optimizer.persistent_parameters[0].all_gather(optimizer.persistent_parameters)


def _place(engine: Engine, shard: Shard) -> tuple[int, int]:
    """Tensor-parallel rank and size of a local tensor; (0, 1) where every rank holds the whole."""
    return (0, 1) if shard.dim is None else (engine.ctx.tensor_rank, engine.ctx.tensor_size)


def _torch_optimizer(engine: Engine) -> torch.optim.Optimizer:
    optimizer = engine.deepspeed.optimizer
    return getattr(optimizer, "optimizer", optimizer)  # type: ignore[no-any-return]


def _parts(engine: Engine) -> Iterator[Part]:
    config, ctx = engine.config, engine.ctx
    optimizer, inner = engine.deepspeed.optimizer, _torch_optimizer(engine)
    for index, (name, parameter) in enumerate(engine.module.named_parameters()):
        is_first = ctx.tensor_rank == 0 or shard_of(parameter).dim is not None
        is_saved_here = is_first and not getattr(parameter, "ds_pipe_replicated", False)
        if config.effective_zero_stage == 0:
            moments = {kind: state for kind, state in inner.state.get(parameter, {}).items() if kind in MOMENTS}
            is_turn = index % ctx.grad_size == ctx.grad_rank
            yield Part(
                name,
                parameter,
                0,
                parameter.detach().view(-1),
                {kind: tensor.view(-1) for kind, tensor in moments.items() if tensor is not None},
                is_saved_here and is_turn,
            )
        elif hasattr(parameter, "ds_id"):
            yield from _zero3_part(engine, name, parameter, is_saved_here)
        elif (mapping := parameter._hp_mapping) is not None:  # type: ignore[attr-defined]
            flat = _flat_partitions(optimizer)[mapping.param_group_index]
            where = mapping.get_hp_fragment_address()
            moments = {kind: state for kind, state in inner.state.get(flat, {}).items() if kind in MOMENTS}
            yield Part(
                name,
                parameter,
                mapping.lp_fragment_address.start,
                flat.detach().narrow(0, where.start, where.numel),
                {kind: tensor.narrow(0, where.start, where.numel) for kind, tensor in moments.items()},
                is_saved_here,
            )


def _flat_partitions(optimizer: Any) -> list[Tensor]:
    """The float32 tensors that DeepSpeed gives the torch optimizer, one a group."""
    if hasattr(optimizer, "single_partition_of_fp32_groups"):  # ZeRO-1 and 2
        return optimizer.single_partition_of_fp32_groups  # type: ignore[no-any-return]
    return optimizer.fp32_groups_flat_partition  # type: ignore[no-any-return]  # BF16_Optimizer


def _zero3_part(engine: Engine, name: str, parameter: Any, is_saved_here: bool) -> Iterator[Part]:
    optimizer, inner = engine.deepspeed.optimizer, _torch_optimizer(engine)
    per_rank = parameter.ds_tensor.ds_numel
    start = per_rank * engine.ctx.grad_rank
    numel = min(per_rank, parameter.ds_numel - start)  # the last ranks' stretches are padded
    if numel <= 0:
        return
    group, offset, _ = optimizer.grad_position[optimizer.get_param_id(parameter)]
    flat = optimizer.fp32_partitioned_groups_flat[group]
    moments = {kind: state for kind, state in inner.state.get(flat, {}).items() if kind in MOMENTS}
    yield Part(
        name,
        parameter,
        start,
        flat.detach().narrow(0, offset, numel),
        {kind: tensor.narrow(0, offset, numel) for kind, tensor in moments.items()},
        is_saved_here,
    )


def _start_optimizer(engine: Engine, kinds: list[str], step: float) -> None:
    """Allocate the moments, as the first step would, and set how many steps they have seen."""
    inner = _torch_optimizer(engine)
    if engine.config.effective_zero_stage == 0:
        tensors = [p for group in inner.param_groups for p in group["params"]]
    elif engine.config.optimizer.zero_stage == 3:
        tensors = list(engine.deepspeed.optimizer.fp32_partitioned_groups_flat)
    else:
        tensors = list(_flat_partitions(engine.deepspeed.optimizer))
    for tensor in tensors:
        state = inner.state[tensor]
        for kind in kinds:
            if state.get(kind) is None:
                state[kind] = torch.zeros_like(tensor, requires_grad=False)
        if "momentum_buffer" not in kinds:
            # torch's optimizers keep it per tensor, on the device where they are fused
            state["step"] = torch.tensor(step, dtype=torch.float32, device=tensor.device)
    for group in inner.param_groups:
        if "step" in group:  # Habana's FusedAdamW counts in the group
            group["step"] = int(step)


def uncounted_gradients(engine: Engine) -> Callable[[], list[Tensor]]:
    """Finds, while the optimizer steps, this rank's gradients that the norm of the whole model leaves out: of
    parameters that the first tensor-parallel rank holds too.
    """
    if engine.ctx.tensor_rank == 0:
        return list
    optimizer, stage = engine.deepspeed.optimizer, engine.config.effective_zero_stage
    parameters: list[Any] = [p for p in engine.module.parameters() if p.requires_grad and shard_of(p).dim is None]
    if stage == 0:
        return lambda: [p.grad for p in parameters if p.grad is not None]
    if not hasattr(optimizer, "averaged_gradients"):  # BF16_Optimizer, which has whole gradients
        return lambda: [p._hp_grad for p in parameters if getattr(p, "_hp_grad", None) is not None]  # type: ignore[attr-defined]
    uncounted = {id(p) for p in parameters}
    if stage == 3:
        groups, flats = optimizer.fp16_groups, optimizer.fp32_partitioned_groups_flat
    else:
        groups, flats = optimizer.params_in_partition, _flat_partitions(optimizer)

    def place(parameter: Any) -> tuple[int, int]:
        """First number and length in the flat partition."""
        if stage == 3:
            return optimizer.grad_position[optimizer.get_param_id(parameter)][1:]  # type: ignore[no-any-return]
        where = parameter._hp_mapping.get_hp_fragment_address()
        return where.start, where.numel

    def find() -> list[Tensor]:
        found: list[Tensor] = []
        for index, (group, flat) in enumerate(zip(groups, flats, strict=True)):
            if flat.grad is not None:  # of the update that is about to be; offloaded ones are always there
                found += [flat.grad.narrow(0, *place(p)) for p in group if id(p) in uncounted]
                continue
            gradients = [g for g in optimizer.averaged_gradients[index] if not getattr(g, "_zero_padding", False)]
            found += [g for p, g in zip(group, gradients, strict=True) if id(p) in uncounted]
        return found

    return find


def _numbers(scaler: Any) -> dict[str, float | int | bool]:
    return {name: value for name, value in vars(scaler).items() if isinstance(value, float | int | bool)}


def check_model(engine: Engine, checkpoint: Checkpoint) -> None:
    """Raise CheckpointError, with every difference, if the checkpoint is not of this rank's model."""
    wrong = []
    for name, parameter in engine.module.named_parameters():
        shard = shard_of(parameter)
        saved = checkpoint.parameters.get(name)
        if saved is None:
            wrong.append(f"{name} is not in it")
        elif (saved.shape, saved.pieces) != (shard.shape, shard.pieces):
            wrong.append(f"{name} is {list(saved.shape)} there, {list(shard.shape)} here")
    if wrong:
        more = f"; and {len(wrong) - 4} more" if len(wrong) > 4 else ""
        raise CheckpointError(
            f"{checkpoint.folder} is of another model: {'; '.join(wrong[:4])}{more}. Give the model's own options, or "
            "another checkpoint"
        )
