"""Gradients in flat buffers, summed over data-parallel ranks while the backward pass still runs.

A hook adds each parameter's gradient to its place in a flat buffer of the dtype of accumulation. The buffers are cut
into buckets, in the reverse of the order in which the forward pass uses the parameters. As soon as the last gradient of
a bucket is there, its reduction starts, in place and asynchronously; `finish` waits for all of them, once a step.
With several replicas of ZeRO's shards the ranks of one sum to the owner of the shard, and the owners then sum over the
replicas, while the next bucket is summed: what leaves a node is a shard.

The loss, and on CUDA linear layers and embeddings, add the gradient of their weight themselves
(parallel/operators/weight_gradient.py), in forward or backward.

A gradient is final when it was added to as often as the step's microbatches require. That is counted for each
parameter, not concluded from the number of backward passes: a schedule may defer a weight's gradient, and autograd may
hand it on in parts. The first step learns the counts, and reduces at its end. All ranks start the buckets in the same
order.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.parallel.context import ParallelContext
from megatron.parallel.finite_checks import GRADIENT, TIED, UPDATE, PassPlace
from megatron.parallel.messages import wait_for
from megatron.parallel.operators.weight_gradient import GradientSum
from megatron.parallel.phase_clock import WAIT
from megatron.parallel.shards import shard_of


@dataclass(frozen=True)
class ReductionOptions:
    """Settings of the mean of gradients over data-parallel ranks."""

    dtype: torch.dtype
    """Dtype of the sums."""
    bucket_numel: int
    """Numbers from which on a bucket is full. It ends with a parameter, so it may be larger."""
    overlaps: bool = True
    """Start while the backward pass runs; otherwise at its end."""
    is_sharded: bool = True
    """Each rank needs the sums of its own shard of a buffer alone."""
    scale_before: float = 1.0
    """Factor of the gradients before they are summed."""
    scale_after: float = 1.0


@dataclass
class _Slot:
    """Place of one parameter's gradient."""

    parameter: Any
    start: int
    """First number in the buffer."""
    view: Tensor
    """The stretch of the buffer, in the parameter's shape."""
    order: int
    """Place of the parameter in the model."""
    tied_group: dist.ProcessGroup | None = None
    """Pipeline stages over which the gradient is summed too, before it is reduced."""
    buckets: list[_Bucket] = field(default_factory=list)
    is_filled: bool = False
    is_reducing: bool = False
    added: int = 0
    """Gradients added in this step."""
    expected: int = 0
    """Times in a step; 0: not known yet."""
    per_microbatch: int = 0

    @property
    def stop(self) -> int:
        return self.start + self.view.numel()


@dataclass
class _Bucket:
    """Neighbouring gradients that one collective sums."""

    sums: Tensor
    """[numel] in the buffer."""
    slots: list[_Slot]
    group: dist.ProcessGroup | None
    """The ranks that sum."""
    replicas: dist.ProcessGroup | None
    """The owners of the same shard that sum afterwards, one of each replica; None: the sum is complete."""
    owner: int | None
    """The one of them that needs the sums; None: all."""
    is_needed: bool
    """This rank needs the sums."""
    own: list[Tensor]
    """The stretches that hold this rank's gradients until they are summed: not those of tied weights."""
    waits_for: int = 0
    """Gradients that are not final."""
    sent: Tensor | None = None
    """Copy in the dtype of the reduction, where it differs."""
    work: Any = None


# A bucket is summed to the owner of its shard: half the bytes of an all-reduce. A reduce_scatter over all ranks would
# have to copy it first, and took twice as long over gloo. DeepSpeed 0.19.8 reduces after the last backward pass, in
# one call.
class GradientBuffers:
    """The gradients of a rank's trained parameters, from the first of a step to its update."""

    def __init__(
        self,
        module: nn.Module,
        groups: Sequence[tuple[Tensor, Sequence[tuple[nn.Parameter, int]]]],
        options: ReductionOptions,
        ctx: ParallelContext,
    ) -> None:
        """`groups`: flat buffers, each with its parameters and the index of their first number.

        The gradients of a buffer are summed over the same ranks. Its length is a multiple of their number; equal
        stretches are their shards.
        """
        self._options, self._ctx = options, ctx
        self.flats = [flat for flat, _ in groups]
        places = [ctx.shard_place(shard_of(starts[0][0])) for _, starts in groups]
        sizes = [ctx.grad_place(shard_of(starts[0][0]))[1] for _, starts in groups]
        self.shards = [flat.chunk(size)[rank] for flat, (rank, size) in zip(self.flats, places, strict=True)]
        """This rank's shard of each buffer."""
        by_group = _slots_of(module, groups)
        self._slots = [slot for slots in by_group for slot in slots]
        self._alone = [flat for flat, size in zip(self.flats, sizes, strict=True) if size == 1]
        self.counted, self.uncounted = self._parts(by_group)
        """Gradients in this rank's shards that the norm of the whole model counts here, and those that another
        tensor-parallel rank's copies count. Sums after `finish`."""
        self._buckets: list[_Bucket] = []
        for flat, slots, size in zip(self.flats, by_group, sizes, strict=True):
            if size > 1:
                self._buckets += self._cut(flat, slots)
        # a bucket is complete with the gradient of the parameter that the forward pass uses first
        self._buckets.sort(key=lambda bucket: min(slot.order for slot in bucket.slots), reverse=True)
        self._next, self._num_microbatches = 0, 1
        self._last_started: _Bucket | None = None
        self._attach()
        self.begin_step(1)

    def _attach(self) -> None:
        """Have the gradients of the parameters come here."""
        itself = weakref.ref(self)
        for index, slot in enumerate(self._slots):
            # after autograd has accumulated into `.grad`, from where it is moved
            slot.parameter.register_post_accumulate_grad_hook(partial(_add, itself, index))
            # where the sum has the parameter's own dtype nothing is gained
            is_wider = (slot.parameter.dtype, slot.view.dtype) == (torch.bfloat16, torch.float32)
            if is_wider and slot.parameter.dim() == 2:
                slot.parameter.gradient_sum = BufferedSum(itself, index)

    def begin_step(self, num_microbatches: int) -> None:
        """Expect the gradients of so many microbatches."""
        self.clear()
        self._next, self._num_microbatches, self._last_started = 0, num_microbatches, None
        for bucket in self._buckets:
            bucket.work = bucket.sent = None
            # a tied weight counts twice: its own gradient, and its sum over stages
            bucket.waits_for = len(bucket.slots) + sum(slot.tied_group is not None for slot in bucket.slots)
        for slot in self._slots:
            slot.added, slot.is_reducing = 0, False
            slot.expected = 0
            if self._options.overlaps:
                # 0 in the first step, so that nothing starts before `finish`
                slot.expected = num_microbatches * slot.per_microbatch
            if (own_sum := getattr(slot.parameter, "gradient_sum", None)) is not None:
                # the loss computes this gradient in forward, before backward says with which one it starts
                own_sum.loss_gradient = 1.0 / num_microbatches  # DeepSpeed takes the mean over the microbatches

    def clear(self) -> None:
        """Discard the gradients. Their memory keeps its content until the first gradient of the next step."""
        for slot in self._slots:
            slot.is_filled = False

    @torch.no_grad()
    def add(self, index: int, parameter: nn.Parameter) -> None:
        """Move a parameter's gradient to its place. Raises RuntimeError if its sum over ranks has begun."""
        if parameter.grad is None:
            return
        total, has_gradient = self.open(index)
        if has_gradient:
            total.add_(parameter.grad)
        else:  # what the memory holds is of an earlier step
            total.copy_(parameter.grad)
        parameter.grad = None
        self.close(index)

    def place(self, index: int) -> Tensor:
        """Return the place of a gradient, the same in all steps."""
        return self._slots[index].view

    def open(self, index: int) -> tuple[Tensor, bool]:
        """Return the place of a gradient, and True if it holds gradients of this step already.

        Raises RuntimeError if its sum over ranks has begun.
        """
        slot = self._slots[index]
        if slot.is_reducing:
            raise RuntimeError(
                f"{slot.parameter.full_name}: a gradient came after the sum over data-parallel ranks had begun, the "
                f"{slot.added + 1}th of this step, where earlier steps had {slot.per_microbatch} a microbatch; start "
                'the run with "overlap_comm": false in zero_optimization of --deepspeed-config'
            )
        # set before the gradient is there: whoever opens a place fills it
        has_gradient, slot.is_filled = slot.is_filled, True
        return slot.view, has_gradient

    def close(self, index: int) -> None:
        """Count a gradient that has been added, and start the reduction of buckets that it completes."""
        slot = self._slots[index]
        slot.added += 1
        # only at the exact number: an earlier one would send a part, and a later one is an error of `open`
        if slot.added == slot.expected:
            self._complete(slot)

    def sum_tied(self) -> None:
        """Sum the gradients of tied weights over their stages. Collective over these."""
        for slot in self._slots:
            if slot.tied_group is not None:
                # all stages of the group sum, those without a gradient too
                self._zero_missing(slot)
                self._ctx.state.checks.whole(slot.view, TIED, PassPlace(UPDATE))
                with self._ctx.state.clock.phase(WAIT):
                    dist.all_reduce(slot.view, group=slot.tied_group)
                # the second of the two that a tied weight's buckets wait for
                self._complete(slot)

    @torch.no_grad()
    def finish(self) -> None:
        """Start what has not started, and wait for all sums; unused parameters count as zeros. Collective."""
        for slot in self._slots:
            self._zero_missing(slot)
            # rounded up, and never lowered: a gradient that comes more often than counted would be an error
            slot.per_microbatch = max(slot.per_microbatch, 1, -(-slot.added // self._num_microbatches))
        # in the order of all ranks; what has not started is unused, or of the first step
        for bucket in self._buckets[self._next :]:
            self._start(bucket)
        self._next = len(self._buckets)
        self._sum_over_replicas()
        for bucket in self._buckets:
            with self._ctx.state.clock.phase(WAIT):
                wait_for([bucket.work])
            # a `reduce` gives its sums to the owner alone
            if bucket.sent is not None and bucket.is_needed:
                bucket.sums.copy_(bucket.sent)
            bucket.work = bucket.sent = None
        if self._ctx.grad_size > 1:  # of one rank alone the update checks the norm
            for flat in self._alone:
                self._ctx.state.checks.whole(flat, GRADIENT, PassPlace(UPDATE))
        if self._alone and self._options.scale_before != 1.0:
            # what no other rank adds to was in no bucket
            torch._foreach_mul_(self._alone, self._options.scale_before)
        # a stage may train nothing
        if self.flats and self._options.scale_after != 1.0:
            summed = self.shards if self._options.is_sharded else self.flats
            torch._foreach_mul_(summed, self._options.scale_after)

    def assign(self) -> None:
        """Let each parameter's `.grad` be its sum."""
        for slot in self._slots:
            slot.parameter.grad = slot.view

    def _complete(self, slot: _Slot) -> None:
        for bucket in slot.buckets:
            bucket.waits_for -= 1
        # never out of order: a bucket that is ready waits for those before it, or ranks would sum different ones
        while self._next < len(self._buckets) and self._buckets[self._next].waits_for == 0:
            self._start(self._buckets[self._next])
            self._next += 1

    def _start(self, bucket: _Bucket) -> None:
        options, group = self._options, bucket.group
        assert group is not None
        for slot in bucket.slots:
            slot.is_reducing = True
        # before the sum, after which a NaN is on all ranks
        for piece in bucket.own:
            self._ctx.state.checks.whole(piece, GRADIENT, PassPlace(UPDATE))
        tensor = bucket.sums
        # a copy for this one collective; else the sum is in place
        if tensor.dtype != options.dtype:
            tensor = bucket.sent = tensor.to(options.dtype)
        if options.scale_before != 1.0:
            tensor.mul_(options.scale_before)
        with self._ctx.state.clock.phase(WAIT):
            if bucket.owner is None:
                bucket.work = dist.all_reduce(tensor, group=group, async_op=True)
            else:
                # torch's `reduce` takes the rank in the world
                owner = dist.get_global_rank(group, bucket.owner)
                bucket.work = dist.reduce(tensor, owner, group=group, async_op=True)
        self._sum_over_replicas()
        self._last_started = bucket

    def _sum_over_replicas(self) -> None:
        """Start the sum over replicas of the bucket that was started last.

        It waits for the sum within the replica, which has run since; so all ranks start the same sums in one order.
        """
        bucket = self._last_started
        if bucket is None or bucket.replicas is None or not bucket.is_needed:
            return
        tensor = bucket.sums if bucket.sent is None else bucket.sent
        with self._ctx.state.clock.phase(WAIT):
            wait_for([bucket.work])
            bucket.work = dist.all_reduce(tensor, group=bucket.replicas, async_op=True)

    @staticmethod
    def _zero_missing(slot: _Slot) -> None:
        if not slot.is_filled:
            slot.view.zero_()
            slot.is_filled = True

    def _parts(self, by_group: list[list[_Slot]]) -> tuple[list[Tensor], list[Tensor]]:
        counted: list[Tensor] = []
        uncounted: list[Tensor] = []
        ctx = self._ctx
        for flat, shard, slots in zip(self.flats, self.shards, by_group, strict=True):
            # where this rank's shard begins in the buffer, and in it this replica's part of the norm
            first, numel, replicas = shard.storage_offset() - flat.storage_offset(), shard.numel(), ctx.num_replicas
            low, high = (first + numel * replica // replicas for replica in (ctx.replica, ctx.replica + 1))
            for slot in slots:
                start, stop = max(slot.start, low), min(slot.stop, high)
                if start >= stop or getattr(slot.parameter, "ds_pipe_replicated", False):
                    continue
                own = flat.narrow(0, start, stop - start)
                if ctx.counts(shard_of(slot.parameter)):
                    counted.append(own)
                else:
                    uncounted.append(own)
        return counted, uncounted

    def _cut(self, flat: Tensor, slots: list[_Slot]) -> Iterator[_Bucket]:
        """Yield the buckets of a buffer, each within one shard if ranks need no more than theirs."""
        taken: list[_Slot] = []
        # from the end: the backward pass has the gradients of the last layers first
        for slot in reversed(slots):
            taken.append(slot)
            if slot is slots[0] or sum(slot.view.numel() for slot in taken) >= self._options.bucket_numel:
                yield from self._buckets_of(flat, taken)
                taken = []

    def _buckets_of(self, flat: Tensor, slots: list[_Slot]) -> Iterator[_Bucket]:
        """Yield the bucket of neighbouring slots, the last of them first, cut where a shard ends."""
        start, stop = slots[-1].start, slots[0].stop
        shard = shard_of(slots[0].parameter)
        rank, size = self._ctx.shard_place(shard)
        # of shards of one rank each the replicas are all ranks that sum
        is_sharded = self._options.is_sharded and size > 1
        group, replicas, width = self._ctx.grad_group_of(shard), None, flat.numel()
        if is_sharded:
            groups = self._ctx.shard_groups_of(shard)
            # a shard: no bucket lies in two
            group, replicas, width = groups.within, groups.across, width // size
        for owner in range(start // width, -(-stop // width)):
            low, high = max(start, owner * width), min(stop, (owner + 1) * width)
            inside = [slot for slot in slots if slot.start < high and slot.stop > low]
            bucket = _Bucket(
                flat.narrow(0, low, high - low),
                inside,
                group,
                replicas,
                owner if is_sharded else None,
                is_needed=not is_sharded or owner == rank,
                own=list(_untied(flat, inside, low, high)),
            )
            for slot in inside:
                slot.buckets.append(bucket)
            yield bucket


def _slots_of(
    module: nn.Module, groups: Sequence[tuple[Tensor, Sequence[tuple[nn.Parameter, int]]]]
) -> list[list[_Slot]]:
    """Return the slots of each buffer, in the order of their numbers."""
    # by identity: tied parameters have several names
    order = {id(parameter): number for number, parameter in enumerate(module.parameters())}
    tied = dict(_tied_weights(module))
    by_group = []
    for flat, starts in groups:
        slots = []
        for parameter, start in sorted(starts, key=lambda pair: pair[1]):
            view = flat.narrow(0, start, parameter.numel()).view(parameter.shape)
            slots.append(_Slot(parameter, start, view, order[id(parameter)], tied.get(id(parameter))))
        by_group.append(slots)
    return by_group


def _untied(flat: Tensor, slots: list[_Slot], low: int, high: int) -> Iterator[Tensor]:
    """Yield the stretches of [low, high) without the gradients of tied weights."""
    for slot in sorted((slot for slot in slots if slot.tied_group is not None), key=lambda slot: slot.start):
        if slot.start > low:
            yield flat.narrow(0, low, slot.start - low)
        low = max(low, slot.stop)
    if low < high:
        yield flat.narrow(0, low, high - low)


class BufferedSum(GradientSum):
    """A parameter's place in the buffers, to which the loss adds. Holds neither parameter nor buffers, see `_add`."""

    def __init__(self, buffers: weakref.ref[GradientBuffers], index: int) -> None:
        self._buffers, self._index = buffers, index

    @property
    def memory(self) -> Tensor:
        """The place in the buffers, whatever it holds now."""
        return self._resolve().place(self._index)

    def open(self) -> tuple[Tensor, bool]:
        return self._resolve().open(self._index)

    def close(self) -> None:
        self._resolve().close(self._index)

    def _resolve(self) -> GradientBuffers:
        buffers = self._buffers()
        assert buffers is not None, "the engine is gone"
        return buffers


def _add(buffers: weakref.ref[GradientBuffers], index: int, parameter: nn.Parameter) -> None:
    # the engine holds its buffers, not the hook: a cycle through autograd is never collected
    held = buffers()
    if held is not None:
        held.add(index, parameter)


def _tied_weights(module: Any) -> Iterator[tuple[int, dist.ProcessGroup]]:
    """Yield the identity of each trained weight that several pipeline stages hold, and its group."""
    if hasattr(module, "get_tied_weights_and_groups"):
        for weight, group in module.get_tied_weights_and_groups():
            if weight.requires_grad and dist.get_world_size(group) > 1:
                yield id(weight), group
