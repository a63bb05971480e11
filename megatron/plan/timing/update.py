"""Exchanges of gradients and weights, and the update, at the end of a step: by ZeRO stage, as the engine runs them.

training/deepspeed/reduction.py for stages 0 and 1, DeepSpeed's own for 2 and 3 and for offload. No torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from megatron.options.config import Config
from megatron.parallel.layout import Layout
from megatron.parallel.shards import LayerDeclaration
from megatron.plan.flops import held_numel, held_shards
from megatron.plan.matrices import MatrixUpdate
from megatron.plan.microbatch import BYTES
from megatron.plan.rates.rates import RatesError
from megatron.plan.timing.cluster import Axis
from megatron.plan.timing.operations import AxisExchange, Item, LinearProduct, Machine, Move, Pointwise, Update
from megatron.plan.zero import ZeroRank, has_gradient_buffers, held_layers

LOSS_BYTES = 5 * BYTES["fp32"]
"""Loss, norm and checks of a step, which all ranks sum."""


@dataclass(frozen=True)
class Reduction:
    """Exchanges of gradients of a stage's rank."""

    at_end: tuple[float, ...]
    """Seconds of each bucket of the step, in the order in which the backward pass completes them."""
    each_microbatch: float
    """Seconds in each backward pass, of ZeRO-2 and 3."""
    last: float
    """Seconds after the last bucket."""


class StageUpdate:
    """Work of a rank of one stage beside its passes."""

    def __init__(self, config: Config, layout: Layout, layers: Sequence[LayerDeclaration], machine: Machine) -> None:
        self._config, self._layout, self._machine = config, layout, machine
        self._rank = ZeroRank(config, layout, held_layers(layers))
        self._stage = config.effective_zero_stage
        self._numbers: dict[int, int] = {}

    # Gradients

    @property
    def is_of_deepspeed(self) -> bool:
        """DeepSpeed reduces, when a bucket is full."""
        return not has_gradient_buffers(self._config)

    def reduced_numbers(self, layer: LayerDeclaration) -> int:
        """Return the numbers of a layer whose gradients ranks sum."""
        key = id(layer.shards)
        if key not in self._numbers:
            held = held_shards(layer, self._layout)
            summed = (shard for shard in held if shard.trained and self._layout.grad_place(shard)[1] > 1)
            self._numbers[key] = sum(held_numel(shard, self._layout) for shard in summed)
        return self._numbers[key]

    @cached_property
    def reduction(self) -> Reduction:
        rank = self._rank
        if rank.grad_size == 1 or not rank.reduced:
            return Reduction((), 0.0, 0.0)
        numbers = rank.reduced
        if not has_gradient_buffers(self._config):
            seconds = sum(count * self._machine.seconds(each) for each, count in self._of_deepspeed(numbers))
            # stage 1 offloads: at the end of the step alone
            return Reduction((seconds,), 0.0, 0.0) if self._stage == 1 else Reduction((), seconds, 0.0)
        buckets = max(1, round(numbers / rank.bucket))
        within, across = self._of_bucket(numbers / buckets)
        # the sum over replicas of a bucket runs beside that of the next within its replica
        return Reduction((max(within, across),) * buckets, 0.0, min(within, across))

    def _of_bucket(self, numbers: float) -> tuple[float, float]:
        """Return the seconds of a bucket's sum within a replica, and over replicas."""
        rank, machine = self._rank, self._machine
        size = numbers * rank.sent_bytes
        converted = 0.0
        if rank.sent_bytes != rank.sum_bytes:
            converted = 2 * machine.seconds(Pointwise("cast", "forward", self._config.training.precision, numbers))
        if self._stage == 0:
            return machine.seconds(AxisExchange("all_reduce", size, "grad")) + converted, 0.0
        if rank.shard_size == 1:
            # of shards of one rank each the replicas are all that sum
            return machine.seconds(AxisExchange("all_reduce", size, "replica")) + converted, 0.0
        within = machine.seconds(AxisExchange("reduce_scatter", size, "shard")) + converted
        return within, machine.seconds(AxisExchange("all_reduce", size / rank.shard_size, "replica"))

    def _of_deepspeed(self, numbers: float) -> Iterator[Item]:
        """Yield the exchanges of one sum of all gradients by DeepSpeed, which nothing hides."""
        rank = self._rank
        buckets = max(1, -(-int(numbers) // rank.bucket))
        bucket = numbers / buckets
        precision = self._config.training.precision
        if rank.sent_bytes != rank.number_bytes:
            yield Pointwise("cast", "forward", precision, bucket), 2 * buckets
        # into the bucket, and from it to the partition
        yield Move(bucket * rank.number_bytes), buckets
        size = bucket * rank.sent_bytes
        if self._stage == 3 or self._layout.num_replicas > 1:
            yield AxisExchange("reduce_scatter", size, "shard"), buckets
        else:
            yield AxisExchange("all_reduce", size, "shard"), buckets
        yield AxisExchange("all_reduce", size / rank.shard_size, "replica"), buckets

    def reduced_bytes(self, num_microbatches: int) -> Iterator[tuple[Axis, float]]:
        """Yield what a rank sends of its gradients in a step."""
        rank = self._rank
        if rank.grad_size == 1:
            return
        size = rank.reduced * rank.sent_bytes
        sums = 1 if self._stage < 2 else num_microbatches
        exchanges: list[Item] = []
        if self._stage == 0:
            exchanges.append((AxisExchange("all_reduce", size, "grad"), 1))
        elif self._stage == 2 and self._layout.num_replicas == 1:
            exchanges.append((AxisExchange("all_reduce", size, "shard"), sums))
        else:
            exchanges.append((AxisExchange("reduce_scatter", size, "shard"), sums))
            exchanges.append((AxisExchange("all_reduce", size / rank.shard_size, "replica"), sums))
        exchanges += [(each, 1.0) for each in self._gathered()]
        yield from self._machine.sent_bytes(exchanges)

    def _gathered(self) -> Iterator[AxisExchange]:
        """Yield the gathering of the updated weights."""
        rank = self._rank
        if self._stage in (1, 2) and rank.shard_size > 1:
            yield AxisExchange("all_gather", rank.trained * rank.number_bytes, "shard")

    # Tied weights, update

    @cached_property
    def tied(self) -> float:
        """Seconds of the sum of a tied weight's gradient over the first and the last stage."""
        rank = self._rank
        tied = [layer for layer in self._rank.layers if layer.project is not None]
        if not tied or self._layout.num_stages == 1:
            return 0.0
        numbers = sum(
            shard.local_shape(self._layout.tensor_size)[0] * shard.shape[1]
            for layer in tied
            for shard in layer.shards.values()
            if shard.vocabulary and shard.trained and not shard.added
        )
        if not numbers:
            return 0.0
        # of all that the pipeline's neighbours have this is the same way
        return self._machine.seconds(AxisExchange("all_reduce", numbers * rank.sum_bytes, "pipeline"))

    @cached_property
    def update(self) -> float:
        """Seconds of norm, clipping and update, and of the gathering of the updated weights."""
        rank, machine, config = self._rank, self._machine, self._config
        seconds = machine.seconds(AxisExchange("all_reduce", LOSS_BYTES, "world"))
        numbers = rank.share if self._stage else rank.trained
        if not numbers:
            return seconds
        if config.optimizer.offload_optimizer and not machine.is_host:
            # the host's own update has no rate: its time follows neither from the device nor from the link
            raise RatesError("no rate of an update on the host; the time of a step with offload_optimizer is not known")
        if self._stage and has_gradient_buffers(config) and rank.grad_size > 1:
            # the mean of the summed shard
            seconds += machine.seconds(Move(rank.share * rank.sum_bytes))
        optimizer = config.optimizer.optimizer
        if config.optimizer.kind.needs_whole_matrices:
            matrices = MatrixUpdate(config, self._layout, rank.layers)
            seconds += sum(count * machine.seconds(each) for each, count in self._of_matrices(matrices))
            optimizer, numbers = "adamw", max(0, numbers - matrices.held)
        seconds += machine.seconds(Update(optimizer, config.training.precision, numbers))
        return seconds + sum(machine.seconds(each) for each in self._gathered())

    def _of_matrices(self, update: MatrixUpdate) -> Iterator[Item]:
        """Yield what the rank that orthogonalises most does in Muon's update."""
        steps, size = self._config.optimizer.muon_num_ns_steps, BYTES[update.precision]
        # its momentum and its step read and write what SGD's do
        yield Update("sgd", self._config.training.precision, update.held), 1.0
        for matrix in update.owned:
            small, large = sorted(matrix.shape)
            # A = X X^T, A A, and (b A + c A A) X
            for inner, outputs in ((large, small), (small, small), (small, large)):
                yield LinearProduct(update.precision, "forward", small, outputs, inner), steps
        if update.exchanges:
            # into the buffer and out of it, on both ends
            yield Move(size * (update.sent_numbers + update.returned_numbers)), 2.0
            yield AxisExchange("all_to_all", size * update.sent_numbers, "stage"), 1.0
            yield AxisExchange("all_to_all", size * update.returned_numbers, "stage"), 1.0
