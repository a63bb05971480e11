"""Weights and optimizer state that a rank owns: the only file that knows where DeepSpeed keeps them.

An owned slice is a stretch of a parameter's flattened local tensor: its float32 weights, and the optimizer's moments
for them. Owners:

    float32 without ZeRO   every rank everything; data-parallel ranks take turns, so that each saves a share
    bf16, fp16, ZeRO-1, 2  stretches that DeepSpeed's flat partitions cut out, known to each parameter's `_hp_mapping`
    ZeRO-3                 equal stretches of each parameter

Parameters that every tensor-parallel rank holds are the first one's; tied ones the first stage's. The optimizer has no
part of frozen parameters: they are owned as in float32 without ZeRO, or in ZeRO-3's stretches, and have no moments.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import deepspeed
import torch
from torch import Tensor, nn

from megatron.checkpoint.format import CheckpointError, Fragment
from megatron.checkpoint.reader import Checkpoint
from megatron.checkpoint.source import AVERAGE, Slice, WeightSource
from megatron.models.sequential import compute_dtype
from megatron.options.config import Config
from megatron.options.optimizer import STATES
from megatron.parallel.context import ParallelContext
from megatron.parallel.operators.nf4 import quantized_weights
from megatron.parallel.shards import Shard, named_parameters, shard_of
from megatron.resilience.replica_check import Copy
from megatron.runtime.commands import first_of
from megatron.training.optimizers.average import WeightAverage

SHOWN_NAMES = 4
"""Parameters that an error names."""


@dataclass(frozen=True)
class OwnedSlice:
    """A stretch of a parameter's flattened local tensor that this rank's optimizer updates, or saves if frozen."""

    name: str
    parameter: nn.Parameter
    start: int
    weight: Tensor
    """Flat float32 view: writing to it writes the optimizer's weights. Of 16-bit frozen parameters a copy."""
    moments: dict[str, Tensor]
    """Views like `weight`, by kind; none before the first step, and of frozen parameters."""
    is_saved_here: bool
    """No other rank saves it."""
    tensor: Tensor
    """The tensor of the optimizer's that `weight` is a view of: the parameter, or a flat one of ZeRO's."""
    place: int = 0
    """Its first number in that."""

    @property
    def shard(self) -> Shard:
        return shard_of(self.parameter)


class EngineState:
    """Access to the weights and optimizer state of a DeepSpeed engine, alike for all precisions and ZeRO stages."""

    def __init__(self, module: nn.Module, optimizer: Any, config: Config, ctx: ParallelContext) -> None:
        """`optimizer` is the engine's: DeepSpeed's own, or the bare one."""
        self._module, self._optimizer, self._config, self._ctx = module, optimizer, config, ctx
        # DeepSpeed's wrappers have ours as `optimizer`; in float32 without ZeRO the engine holds ours itself
        self.torch_optimizer: Any = getattr(optimizer, "optimizer", optimizer)
        self._has_adapters = config.lora.lora_rank is not None
        self.average: WeightAverage | None = None
        """None without ema_decay."""
        if config.optimizer.ema_decay is not None and not config.training.skip_train:
            kept = {owned.name: owned.weight for owned in self.owned(with_frozen=False) if owned.is_saved_here}
            self.average = WeightAverage(kept, config.optimizer)
        self.uncounted_gradients = self._uncounted_gradients()
        """Return, while the optimizer steps, this rank's gradients that the norm of the whole model leaves out."""

    # Saving

    def fragments(self, *, with_optimizer: bool) -> list[Fragment]:
        """Return what this rank saves: with adapters, what is trained."""
        fragments = []
        dtype = str(compute_dtype(self._config)).removeprefix("torch.")
        for owned in self.owned():
            # each number of the model is written by one rank alone
            if not owned.is_saved_here:
                continue
            kinds = {"weight": owned.weight}
            if with_optimizer:
                kinds |= owned.moments
            average = None if self.average is None else self.average.of(owned.name)
            if average is not None:
                kinds[AVERAGE] = average
            rank, size = self._ctx.cut_of(owned.shard)
            for kind, tensor in kinds.items():
                flat = tensor.detach().view(-1)
                held_as = "float32" if owned.shard.keeps_float32 else dtype
                fragments.append(Fragment(owned.name, kind, owned.shard, rank, size, owned.start, flat, held_as))
        return fragments

    def scalars(self) -> dict[str, Any]:
        """Return the optimizer's step count and the loss scaler, one for the whole run. JSON values."""
        # the largest: a parameter without a gradient, such as an unused one, has seen fewer
        steps = [float(state["step"]) for state in self.torch_optimizer.state.values() if "step" in state]
        scaler = getattr(self._optimizer, "loss_scaler", None)
        numbers = None
        if scaler is not None and self._config.training.fp16:  # in bf16 DeepSpeed has one too, which is always 1
            numbers = _numbers(scaler)
        return {"step": max(steps, default=None), "loss_scaler": numbers}

    def held(self) -> dict[Copy, Tensor]:
        """Return every tensor that this rank computes with, for the comparison of copies."""
        # in ZeRO-3 the ranks of a replica hold different stretches, which are not copies of each other
        stretches = self._config.optimizer.zero_stage == 3
        held: dict[Copy, Tensor] = {}
        for name, parameter in named_parameters(self._module):
            tensor_rank, _ = self._ctx.cut_of(shard_of(parameter))
            if stretches:
                stretch, _ = self._ctx.shard_place(shard_of(parameter))
                held[Copy(name, tensor_rank, stretch)] = parameter.ds_tensor  # type: ignore[attr-defined]
            else:
                held[Copy(name, tensor_rank, 0)] = parameter
        for name, weight in quantized_weights(self._module):
            held[Copy(name, self._ctx.cut_of(weight.shard)[0], 0)] = weight.packed
        if self._ctx.num_replicas > 1:
            held |= self._master_copies()
        return held

    def _master_copies(self) -> dict[Copy, Tensor]:
        """Return the float32 weights that this rank updates, of which each replica has a copy."""
        copies: dict[Copy, Tensor] = {}
        for owned in self.owned(with_frozen=False):
            # a tied weight's other stage cuts it elsewhere
            if not getattr(owned.parameter, "ds_pipe_replicated", False):
                stretch, _ = self._ctx.shard_place(owned.shard)
                copies[Copy(f"float32 {owned.name}", self._ctx.cut_of(owned.shard)[0], stretch)] = owned.weight
        return copies

    # Restoring

    def check_model(self, checkpoint: Checkpoint, *, with_optimizer: bool) -> None:
        """Raise CheckpointError, with every difference, if the checkpoint is not of this rank's model."""
        is_base = checkpoint.metadata.get("base") is None
        shards = self._shards_in(is_base=is_base)
        wrong = []
        for name, shard in shards.items():
            saved = checkpoint.parameters.get(name)
            if saved is None:
                wrong.append(f"{name} is not in it")
            # a fused weight of the same shape may consist of other pieces
            elif (saved.shape, saved.pieces) != (shard.shape, shard.pieces):
                wrong.append(f"{name} is {list(saved.shape)} there, {list(shard.shape)} here")
        if wrong:
            differences = first_of(wrong, SHOWN_NAMES, separator="; ")
            raise CheckpointError(
                f"{checkpoint.folder} is of another model: {differences}. Give the model's own options, or another "
                "checkpoint"
            )
        # new adapters on a base have no state to restore
        if with_optimizer and not (self._has_adapters and is_base):
            self._check_moments(checkpoint, shards)

    def _shards_in(self, *, is_base: bool) -> dict[str, Shard]:
        """Return the shards of this rank's weights that a checkpoint holds: with adapters the base's, or the others."""
        shards = {name: shard_of(parameter) for name, parameter in named_parameters(self._module)}
        shards |= {name: weight.shard for name, weight in quantized_weights(self._module)}
        if not self._has_adapters:
            return shards
        if is_base:
            return {name: shard for name, shard in shards.items() if not shard.added}
        return {name: shard for name, shard in shards.items() if shard.trained or shard.added}

    def _check_moments(self, checkpoint: Checkpoint, shards: Mapping[str, Shard]) -> None:
        trained = [name for name, parameter in named_parameters(self._module) if parameter.requires_grad]
        held = [name for name in trained if name in shards]

        def is_whole(name: str) -> bool:
            kept = {kind for kind in self._kinds_of(shards[name]) if kind in checkpoint.kinds}
            return kept <= set(checkpoint.kinds_of(name))

        # moments of zero beside others that have seen many steps would be a wrong start in silence
        frozen = [name for name in held if not is_whole(name)]
        if frozen:
            raise CheckpointError(
                f"{checkpoint.folder} has no optimizer state of {first_of(frozen, SHOWN_NAMES)}, frozen when it was "
                "saved; freeze the same parameters, or pass --no-load-optim"
            )

    def restore(
        self,
        checkpoint: WeightSource,
        saved: dict[str, Any] | None,
        *,
        average_steps: int | None = None,
        trained_only: bool = False,
    ) -> None:
        """Read this rank's weights and, unless `saved` (of `scalars`) is None, its optimizer's state.

        `average_steps`: those of the average's record; None: it begins with the restored weights. `trained_only`:
        leave frozen weights as they are. Quantised weights need `finish_restore` afterwards. Raises
        CheckpointError where the checkpoint is of another model. Not collective.
        """
        moments: list[str] = []
        if saved is not None:
            moments = [kind for kind in STATES if kind in checkpoint.kinds]
            if moments:  # first: the slices are views of them
                self._allocate_moments(moments, float(saved["step"] or 0.0))
        slices = self.trained_slices()
        with torch.no_grad():
            self._restore_weights(checkpoint, slices, with_frozen=not trained_only)
            for owned in slices.values():
                for kind in self._kinds_of(owned.shard):
                    if kind in moments:
                        owned.moments[kind].copy_(checkpoint.read(self.slice_of(owned), kind))
        if self.average is not None:
            self.average.restore(average_steps, partial(self._saved_average, checkpoint, slices))
        if saved is not None and self._config.training.fp16:
            # with the scale its counters, so that it grows at the step at which it would have
            for name, value in (saved.get("loss_scaler") or {}).items():
                setattr(self._optimizer.loss_scaler, name, value)

    def _restore_weights(
        self, checkpoint: WeightSource, slices: Mapping[str, OwnedSlice], *, with_frozen: bool
    ) -> None:
        def read(name: str, shard: Shard, start: int, numel: int, is_counted: bool = False) -> Tensor:
            return checkpoint.read(Slice(name, shard, start, numel, *self._ctx.cut_of(shard), is_counted))

        for index, (name, parameter) in enumerate(named_parameters(self._module)):
            shard = shard_of(parameter)
            if parameter.requires_grad:
                self._set_trained(parameter, slices.get(name), partial(read, name, shard))
            elif with_frozen:
                # what one rank saves one rank counts, in the sums that identify a base
                is_counted = self._is_saved_here(index, parameter)
                self._set_frozen(parameter, partial(read, name, shard, is_counted=is_counted))
        if with_frozen:
            for name, weight in quantized_weights(self._module):
                is_first = self._ctx.grad_place(weight.shard)[0] == 0 and self._ctx.counts(weight.shard)
                weight.fill(partial(read, name, weight.shard, is_counted=is_first))

    def _saved_average(
        self, checkpoint: WeightSource, slices: Mapping[str, OwnedSlice], name: str, numel: int
    ) -> Tensor | None:
        if AVERAGE not in checkpoint.kinds_of(name):  # it was frozen
            return None
        return checkpoint.read(self.slice_of(slices[name]), AVERAGE)

    def slice_of(self, owned: OwnedSlice) -> Slice:
        """Return where an owned slice lies in the full parameter."""
        return Slice(owned.name, owned.shard, owned.start, owned.weight.numel(), *self._ctx.cut_of(owned.shard))

    def set_weights(self, values: Mapping[str, Tensor]) -> None:
        """Set parameters, by name, to these local tensors, float32."""
        slices = self.trained_slices()

        with torch.no_grad():
            for name, parameter in named_parameters(self._module):
                if name not in values:
                    continue
                read = partial(values[name].view(-1).narrow, 0)
                if parameter.requires_grad:
                    self._set_trained(parameter, slices.get(name), read)
                else:
                    self._set_frozen(parameter, read)

    def _set_trained(self, parameter: Any, owned: OwnedSlice | None, read: Callable[[int, int], Tensor]) -> None:
        """Set a parameter and what the optimizer has of it; read(start, numel) returns a stretch, float32."""
        if self._config.optimizer.zero_stage != 3:
            whole = read(0, parameter.numel())
            # both copies: the 16-bit weights that the passes use, and the float32 ones that the update reads
            parameter.copy_(whole.view(parameter.shape))
            if owned is not None:
                owned.weight.copy_(whole[owned.start : owned.start + owned.weight.numel()])
        elif owned is not None:
            owned.weight.copy_(read(owned.start, owned.weight.numel()))
            # ds_tensor: what ZeRO-3 keeps of a parameter between passes, on this rank
            parameter.ds_tensor.narrow(0, 0, owned.weight.numel()).copy_(owned.weight)

    def _set_frozen(self, parameter: Any, read: Callable[[int, int], Tensor]) -> None:
        """Set a frozen parameter, of which no float32 copy is held."""
        start, target = 0, parameter.view(-1)
        if hasattr(parameter, "ds_id"):
            stretch = self._stretch(parameter)
            if stretch is None:
                return
            start, target = stretch[0], parameter.ds_tensor.narrow(0, 0, stretch[1])
        target.copy_(read(start, target.numel()))

    def finish_restore(self) -> None:
        """Make restored quantised weights usable. Collective, so that a fault of `restore` on one rank hangs none."""
        for _, weight in quantized_weights(self._module):
            weight.finish()

    def regather(self) -> None:
        """Gather what ZeRO-3 keeps whole on all ranks, after a restore of an engine that has trained. Collective."""
        if self._config.optimizer.zero_stage == 3:
            # small parameters, which ZeRO-3 does not free: their whole would stay the one from before the restore
            persistent = self._optimizer.persistent_parameters
            for parameter in persistent:
                parameter.partition(has_been_updated=False)
            if persistent:
                persistent[0].all_gather(persistent)

    def _kinds_of(self, shard: Shard) -> tuple[str, ...]:
        """Return the kinds of moments that the optimizer keeps of a trained parameter."""
        return self._config.optimizer.states_of(is_linear_weight=shard.is_linear_weight)

    def _allocate_moments(self, kinds: list[str], step: float) -> None:
        """Allocate the moments, as the first step would, and set how many steps they have seen."""
        inner, options = self.torch_optimizer, self._config.optimizer
        if options.zero_stage == 3:
            inner.allocate_states(
                self._optimizer.fp32_partitioned_groups_flat, kinds, step, counts=options.kind.counts_steps
            )
            return
        # ZeRO-1 and 2 have put their flat partitions in the place of the parameters
        for group in inner.param_groups:
            by_muon = group.get("by_muon", False)
            kept = [kind for kind in options.states_of(is_linear_weight=by_muon) if kind in kinds]
            inner.allocate_states(group["params"], kept, step, counts=options.kind.counts_steps and not by_muon)

    # Ownership

    def owned(self, *, with_frozen: bool = True) -> Iterator[OwnedSlice]:
        """Yield the slices that this rank's optimizer updates, and those of frozen parameters that it may save: with
        adapters not of the base."""
        for index, (name, parameter) in enumerate(named_parameters(self._module)):
            is_saved_here = self._is_saved_here(index, parameter)
            is_of_base = self._has_adapters and not shard_of(parameter).added
            if not parameter.requires_grad and (is_of_base or not with_frozen):
                continue
            # frozen: no float32 copy is held, so one is made while it is saved
            if not parameter.requires_grad and not hasattr(parameter, "ds_id"):
                yield OwnedSlice(name, parameter, 0, parameter.view(-1).float(), {}, is_saved_here, parameter)
            elif hasattr(parameter, "ds_id"):
                yield from self._zero3_slice(name, parameter, is_saved_here)
            elif self._config.effective_zero_stage == 0:
                moments = {kind: tensor.view(-1) for kind, tensor in self._moments_of(parameter).items()}
                yield OwnedSlice(name, parameter, 0, parameter.detach().view(-1), moments, is_saved_here, parameter)
            # None where no part of the parameter lies in this rank's partition
            elif (mapping := parameter._hp_mapping) is not None:  # type: ignore[attr-defined]
                where = mapping.get_hp_fragment_address()
                flat = _flat_partitions(self._optimizer)[mapping.param_group_index]
                # lp: place in the 16-bit parameter; hp: place in the rank's flat float32 partition
                start = mapping.lp_fragment_address.start
                yield self._slice_of_flat(name, parameter, start, flat, where.start, where.numel, is_saved_here)

    def trained_slices(self) -> dict[str, OwnedSlice]:
        """Return the slices that this rank's optimizer updates, by the parameter's name."""
        return {owned.name: owned for owned in self.owned(with_frozen=False)}

    def _is_saved_here(self, index: int, parameter: Tensor) -> bool:
        """Return True if no other rank saves what this one owns of a parameter, the `index`-th of the module."""
        shard = shard_of(parameter)
        grad_rank, grad_size = self._ctx.grad_place(shard)
        is_whole = not hasattr(parameter, "ds_id") and (
            not parameter.requires_grad or self._config.effective_zero_stage == 0
        )
        # what all data-parallel ranks hold whole is written by them in turns, and what each replica holds by these
        if is_whole:
            is_turn = index % grad_size == grad_rank
        else:
            is_turn = index % self._ctx.num_replicas == self._ctx.replica
        return self._ctx.counts(shard) and is_turn and not getattr(parameter, "ds_pipe_replicated", False)

    def _moments_of(self, tensor: Tensor) -> dict[str, Tensor]:
        state = self.torch_optimizer.state.get(tensor, {})
        return {kind: moment for kind, moment in state.items() if kind in STATES and moment is not None}

    def _slice_of_flat(
        self, name: str, parameter: Any, start: int, flat: Tensor, offset: int, numel: int, is_saved_here: bool
    ) -> OwnedSlice:
        """Return the slice from `start` on of a parameter whose float32 weights are at `offset` in `flat`."""
        moments = {kind: tensor.narrow(0, offset, numel) for kind, tensor in self._moments_of(flat).items()}
        weight = flat.detach().narrow(0, offset, numel)
        return OwnedSlice(name, parameter, start, weight, moments, is_saved_here, flat, offset)

    def _stretch(self, parameter: Any) -> tuple[int, int] | None:
        """Return start and length of the stretch of a parameter that ZeRO-3 leaves on this rank; None: nothing."""
        # ceil(numel / ranks), so that the last stretches may be short or empty
        per_rank = parameter.ds_tensor.ds_numel
        start = per_rank * self._ctx.shard_place(shard_of(parameter))[0]
        numel = min(per_rank, parameter.ds_numel - start)  # the last ranks' stretches are padded
        return (start, numel) if numel > 0 else None

    def _zero3_slice(self, name: str, parameter: Any, is_saved_here: bool) -> Iterator[OwnedSlice]:
        stretch = self._stretch(parameter)
        if stretch is None:
            return
        start, numel = stretch
        if not parameter.requires_grad:
            weight = parameter.ds_tensor.narrow(0, 0, numel).float()
            yield OwnedSlice(name, parameter, start, weight, {}, is_saved_here, parameter)
            return
        group, offset, _ = self._optimizer.grad_position[self._optimizer.get_param_id(parameter)]
        flat = self._optimizer.fp32_partitioned_groups_flat[group]
        yield self._slice_of_flat(name, parameter, start, flat, offset, numel, is_saved_here)

    # Gradients

    def gradient_norm(self) -> Tensor | float:
        """Return the gradient norm that DeepSpeed has found in this step: under ZeRO-2 and 3, and offload."""
        norm: Tensor | float = self._optimizer._global_grad_norm
        return norm

    def _uncounted_gradients(self) -> Callable[[], list[Tensor]]:
        """Return a function that finds the gradients of parameters that the first tensor-parallel rank holds too.

        Only where DeepSpeed keeps the gradients: under ZeRO-2 and 3, and offload.
        """
        optimizer, stage = self._optimizer, self._config.effective_zero_stage
        # elsewhere they are counted here, or are among the buffers' (reduction.py)
        if self._ctx.tensor_rank == 0 or not hasattr(optimizer, "averaged_gradients") or hasattr(optimizer, "buffers"):
            return list
        parameters: list[Any] = [p for p in self._module.parameters() if p.requires_grad and shard_of(p).dim is None]
        uncounted = {id(p) for p in parameters}
        if stage == 3:
            groups, flats = optimizer.fp16_groups, optimizer.fp32_partitioned_groups_flat
        else:
            groups, flats = optimizer.params_in_partition, _flat_partitions(optimizer)

        def place(parameter: Any) -> tuple[int, int]:
            """Return first number and length in the flat partition."""
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
                # DeepSpeed fills up a partition by a tensor of zeros
                gradients = [g for g in optimizer.averaged_gradients[index] if not getattr(g, "_zero_padding", False)]
                found += [g for p, g in zip(group, gradients, strict=True) if id(p) in uncounted]
            return found

        return find


def _flat_partitions(optimizer: Any) -> list[Tensor]:
    """Return the float32 tensors that DeepSpeed gives the torch optimizer, one a group."""
    if hasattr(optimizer, "single_partition_of_fp32_groups"):  # ZeRO-1 and 2
        return optimizer.single_partition_of_fp32_groups  # type: ignore[no-any-return]
    return optimizer.fp32_groups_flat_partition  # type: ignore[no-any-return]  # BF16_Optimizer


def _numbers(scaler: Any) -> dict[str, float | int | bool]:
    return {name: value for name, value in vars(scaler).items() if isinstance(value, float | int | bool)}


def start_from_base(module: nn.Module, state: EngineState, config: Config) -> None:
    """Set what depends on the base's weights, once these are there: DoRA's magnitudes. Collective."""
    found: dict[str, Tensor] = {}
    for layer in module.modules():
        method: Any = getattr(layer, "method", None) or getattr(layer, "adapters", None)
        # most layers have no adapter, and LoRA's starts from nothing of the base
        if not getattr(method, "starts_from_base", False):
            continue
        whole = contextlib.nullcontext()
        if config.optimizer.zero_stage == 3:
            whole = deepspeed.zero.GatheredParameters(list(layer.parameters(recurse=False)))
        with whole:
            values = method.start(layer)
        found |= {layer.get_parameter(name).full_name: value for name, value in values.items()}  # type: ignore[attr-defined]
    state.set_weights(found)
