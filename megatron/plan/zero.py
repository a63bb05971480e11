"""Memory of weights, gradients and optimizer states as DeepSpeed 0.19.8 allocates them, by optimizer and ZeRO stage.

Its optimizers and training/deepspeed/reduction.py hold flat buffers, and reduce gradients in buckets; both count.
Sizes in bytes, of one rank, where the name does not say numbers.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

from megatron.options.config import Config
from megatron.options.deepspeed_file import zero_settings
from megatron.parallel.layout import Layout
from megatron.parallel.operators import nf4_layout
from megatron.parallel.shards import LayerDeclaration, Shard
from megatron.plan.flops import declared_layers, held_numel, held_shards, of_layers, parameters_of_layer
from megatron.plan.matrices import MatrixUpdate
from megatron.plan.microbatch import BYTES
from megatron.plan.partitions import read_by_forward_alone, whole_parameters
from megatron.plan.pipeline import stage_ranges
from megatron.runtime.device import Device
from megatron.runtime.devices import planned_device

REDUCE_BUCKET = 500_000_000
"""DeepSpeed's `reduce_bucket_size`: numbers that it reduces at once, and allocates a buffer for."""
ALLGATHER_BUCKET = 500_000_000
"""DeepSpeed's `allgather_bucket_size`: updated weights that ranks gather at once."""
REUSE_DISTANCE = 1_000_000_000
"""DeepSpeed's `stage3_max_reuse_distance`: gathered parameters stay until they are used again, if within so many."""
PREFETCH_BUCKET = 50_000_000
"""DeepSpeed's `stage3_prefetch_bucket_size`: numbers that it gathers ahead of their use, into one flat buffer."""
PERSISTENT_PARAMETER = 100_000
"""DeepSpeed's `stage3_param_persistence_threshold`: smaller parameters are never cut."""
BUCKETS = 8
"""Into which we cut the gradients of a model, within the two sizes below: more overlap, and fewer large collectives."""
SMALLEST_BUCKET, LARGEST_BUCKET = 1_000_000, 40_000_000
GLOO_SEGMENT = 2**20
"""Bytes of the largest piece in which gloo sums over ranks."""
FLOAT32 = BYTES["fp32"]
"""Bytes of a number of the master weights and the optimizer's states, whatever the precision of the run."""


# DeepSpeed allocates the whole bucket, 2 GB in float32 by its default, for a model of any size.
@functools.lru_cache(maxsize=256)
def reduce_bucket_size(config: Config) -> int:
    """Return the number of gradients that are reduced at once, no more than a rank has.

    Under ZeRO-2 and 3 and offload DeepSpeed's default.
    """
    layers, layout = declared_layers(config), Layout.of(config.parallel)
    largest_stage = 1
    for ranges in stage_ranges(config, layers):
        stage = held_layers([layer for start, stop in ranges for layer in layers[start:stop]])
        largest_stage = max(largest_stage, _parameters(stage, layout, trained_only=True))
    if not has_gradient_buffers(config):
        return min(REDUCE_BUCKET, largest_stage)
    bucket = max(SMALLEST_BUCKET, min(LARGEST_BUCKET, largest_stage // BUCKETS))
    return min(bucket, largest_stage)


def has_gradient_buffers(config: Config) -> bool:
    """Return True where gradients are summed from flat buffers of ours; under ZeRO-2 and 3 and offload by DeepSpeed."""
    return config.effective_zero_stage < 2 and not config.optimizer.offload_optimizer


def adds_in_float32(config: Config) -> bool:
    """Return True where products that give gradients of weights add to their float32 sums by themselves, and tables'
    look-ups too (parallel/operators/weight_gradient.py)."""
    training, device = config.training, planned_device(config.parallel.device)
    is_wider = (training.precision, training.grad_accum_dtype) == ("bf16", "fp32")
    return device.adds_16_bit_products and is_wider and has_gradient_buffers(config) and not training.torch_compile


def held_layers(layers: Sequence[LayerDeclaration]) -> list[LayerDeclaration]:
    """Return each layer once: a stage holds a tied weight once."""
    return list({layer.name: layer for layer in layers}.values())


@dataclass(frozen=True)
class SharedState:
    """Bytes that a rank allocates for its parameters, by when it holds them."""

    weights: int
    master_weights: int = 0
    optimizer_states: int = 0
    """With the average of the weights."""
    gradients: int = 0
    """Held always."""
    step_gradients: int = 0
    """Held from the first gradient of a step to its end."""
    later_gradients: int = 0
    """Held from the end of a step's first microbatch to the end of the step."""
    microbatch_gradients: int = 0
    """Held from the first to the last gradient of each microbatch: the buckets."""
    bucket: int = 0
    """Gradients of so many numbers are reduced together, while the backward pass runs; 0: all of a step at its end."""
    keeps_gradients: bool = True
    """Each parameter's gradient, in the dtype of the weights, stays from its first microbatch to the end of the step;
    otherwise it moves into the bucket as soon as it is complete."""
    at_reduction: int = 0
    """Allocated for a moment to reduce the gradients of a step, or of a full bucket."""
    at_update: int = 0
    """Allocated for a moment when the optimizer updates, instead of `microbatch_gradients`."""
    gathered: int = 0
    """Weights gathered, from other ranks or the host, at the end of the forward pass (ZeRO-3)."""
    prefetched: int = 0
    """The flat buffer that ranks gathered weights into: it lives, beside the weights copied from it, until the forward
    pass has come to the last of them."""
    host: int = 0
    """Offloaded to the host's memory."""


def shared_state(config: Config, layout: Layout, layers: Sequence[LayerDeclaration]) -> SharedState:
    """Return what a rank that holds these layers allocates for its parameters and quantised weights."""
    rank = ZeroRank(config, layout, layers)
    if config.training.skip_train:
        state = _of_evaluation(rank)
    else:
        state = _with_average(rank, _of_training(rank))
    # each rank's own at every stage: DeepSpeed cuts and offloads parameters alone
    quantized = sum(
        nf4_layout.num_bytes(shard, layout.cut_of(shard)[1]) for layer in layers for shard in _quantized(layer, layout)
    )
    return replace(state, weights=state.weights + quantized)


@dataclass(frozen=True)
class ZeroRank:
    """Parameters of a rank and the buffers that DeepSpeed makes for them."""

    config: Config
    layout: Layout
    layers: Sequence[LayerDeclaration]

    # Numbers

    @property
    def grad_size(self) -> int:
        """The largest number of ranks that hold copies of some parameter, over which its gradient is summed."""
        return max((size for size, _ in self.trained_by_size), default=self.layout.grad_size)

    @property
    def shard_size(self) -> int:
        """The largest number of ranks over which ZeRO shards some parameter."""
        return self.grad_size // self.layout.num_replicas

    @cached_property
    def parameters(self) -> int:
        return _parameters(self.layers, self.layout)

    @cached_property
    def trained(self) -> int:
        return _parameters(self.layers, self.layout, trained_only=True)

    @cached_property
    def trained_by_size(self) -> list[tuple[int, int]]:
        """Numbers of ranks over which gradients are summed, and trained numbers: of experts they may be fewer."""
        totals: Counter[int] = Counter()
        for of_layer in of_layers(self.layers, self._trained_of):
            totals += of_layer
        return list(totals.items())

    @property
    def gathered(self) -> int:
        """Numbers of the largest group of parameters, whose updated weights are gathered one group after the other."""
        kinds: tuple[bool | None, ...] = (None,)
        if self.config.optimizer.kind.needs_whole_matrices:  # they are groups of their own
            kinds = (True, False)
        largest = 0
        for kind in kinds:
            totals: Counter[int] = Counter()
            for layer in self.layers:
                totals += self._trained_of(layer, kind)
            # one set of ranks after the other
            cut = [numel for size, numel in totals.items() if size > self.layout.num_replicas]
            largest = max([largest, *cut])
        return largest

    def _trained_of(self, layer: LayerDeclaration, is_linear_weight: bool | None = None) -> Counter[int]:
        """Return trained numbers of a layer by the ranks that sum their gradients; of one kind, or of both (None)."""
        totals: Counter[int] = Counter()
        for shard in held_shards(layer, self.layout):
            if shard.trained and is_linear_weight in (None, shard.is_linear_weight):
                _, size = self.layout.grad_place(shard)
                totals[size] += held_numel(shard, self.layout)
        return totals

    @cached_property
    def state_numbers(self) -> int:
        """Numbers of the optimizer's states on this rank."""
        options, total = self.config.optimizer, 0
        for is_linear_weight in (False, True):
            kinds = len(options.states_of(is_linear_weight=is_linear_weight))
            for of_size in of_layers(self.layers, partial(self._trained_of, is_linear_weight=is_linear_weight)):
                for size, numel in of_size.items():
                    shards = 1 if self.config.effective_zero_stage == 0 else size // self.layout.num_replicas
                    total += kinds * -(-numel // shards)
        return total

    @property
    def share(self) -> int:
        """Trained numbers that this rank updates where ZeRO cuts the optimizer's states."""
        return sum(-(-numel // (size // self.layout.num_replicas)) for size, numel in self.trained_by_size)

    @property
    def most_saved(self) -> int:
        """Trained numbers that the rank with the most of them saves: whole parameters are taken in turns."""
        if self.config.effective_zero_stage > 0:
            return -(-self.share // self.layout.num_replicas)
        shards = [shard for layer in self.layers for shard in held_shards(layer, self.layout)]
        by_turn: Counter[int] = Counter()
        for index, shard in enumerate(shards):
            if shard.trained:
                _, size = self.layout.grad_place(shard)
                by_turn[index % size] += held_numel(shard, self.layout)
        return max(by_turn.values(), default=0)

    @property
    def reduced(self) -> int:
        """Trained numbers whose gradients are summed over ranks."""
        return sum(numel for size, numel in self.trained_by_size if size > 1)

    @cached_property
    def parameter_sizes(self) -> list[int]:
        """Numbers of each parameter of the rank."""
        shards = [shard for layer in self.layers for shard in held_shards(layer, self.layout)]
        return [held_numel(shard, self.layout) for shard in shards if not shard.quantized]

    @property
    def largest_parameter(self) -> int:
        return max(self.parameter_sizes, default=0)

    @property
    def bucket(self) -> int:
        """Numbers of DeepSpeed's bucket: the user's own size, or ours."""
        size: int = self.user.get("reduce_bucket_size", reduce_bucket_size(self.config))
        return size

    @cached_property
    def user(self) -> dict[str, Any]:
        return zero_settings(self.config)

    # Bytes of a number

    @property
    def number_bytes(self) -> int:
        """A weight, and its gradient as autograd makes it."""
        return BYTES[self.config.training.precision]

    @property
    def sum_bytes(self) -> int:
        """A gradient summed over microbatches."""
        return BYTES[self.config.training.grad_accum_dtype]

    @property
    def sent_bytes(self) -> int:
        """A gradient summed over ranks."""
        training = self.config.training
        return BYTES[training.grad_reduce_dtype or training.grad_accum_dtype]

    @property
    def float32_bytes(self) -> int:
        """The float32 copy of this rank's gradients that an update makes: the optimizer reads float32."""
        if self.sum_bytes == FLOAT32:
            return 0
        return FLOAT32 * self.share

    @property
    def bucket_numbers(self) -> int:
        """Numbers of all its buckets: with `overlap_comm` one fills while the other is reduced."""
        buffers = 2 if self.user.get("overlap_comm", False) else 1
        return self.bucket * buffers

    @property
    def sums_apart(self) -> bool:
        """Gradients are summed over microbatches in another dtype than theirs, so in other memory."""
        return self.sum_bytes != self.number_bytes

    @property
    def device(self) -> Device:
        return planned_device(self.config.parallel.device)

    def without_gradients(self) -> SharedState:
        """Return weights and optimizer states, as every optimizer but that of ZeRO-3 holds them."""
        weights = self.parameters * self.number_bytes
        state_bytes = FLOAT32 * self.state_numbers
        if self.config.effective_zero_stage == 0:  # float32: the weights are their own master weights
            return SharedState(weights, optimizer_states=state_bytes)
        return SharedState(weights, FLOAT32 * self.share, state_bytes)

    def flat_bucket(self, staged_bytes: int) -> int:
        """Return what DeepSpeed makes of a full bucket, whose numbers have so many bytes, to reduce it."""
        numbers, flat = min(self.bucket, self.trained), 0
        if self.layout.num_replicas > 1:
            # one owner's after the other's
            numbers = -(-numbers // self.shard_size)
        if self.grad_size > 1 or self.sums_apart:
            flat += staged_bytes * numbers
        if self.sent_bytes != staged_bytes:  # and in the dtype of communication, where that differs
            flat += self.sent_bytes * numbers
        return flat + self.received_pieces(self.sent_bytes * numbers)

    def received_pieces(self, num_bytes: int) -> int:
        """Return the two pieces that gloo receives into, one while it adds the other, to sum so many bytes."""
        if self.grad_size == 1 or not self.device.collectives_are_gloo:
            return 0
        pieces = max(-(-num_bytes // GLOO_SEGMENT), 2 * self.grad_size)
        pieces += -pieces % self.grad_size  # as many for each rank
        return 2 * -(-num_bytes // pieces)


def _with_average(rank: ZeroRank, state: SharedState) -> SharedState:
    """Add the average of the weights, each number of which is kept by the rank that saves it."""
    options = rank.config.optimizer
    if options.ema_decay is None:
        return state
    average = FLOAT32 * rank.most_saved
    if options.offload_ema or options.offload_optimizer:
        return replace(state, host=state.host + average)
    return replace(state, optimizer_states=state.optimizer_states + average)


def _of_evaluation(rank: ZeroRank) -> SharedState:
    if rank.config.effective_zero_stage < 3:
        return SharedState(rank.parameters * rank.number_bytes)
    state = _zero_3(rank)
    return SharedState(state.weights, gathered=state.gathered, prefetched=state.prefetched)


def _of_training(rank: ZeroRank) -> SharedState:
    config, stage = rank.config, rank.config.effective_zero_stage
    if stage == 0 and rank.grad_size == 1:
        # torch's own optimizer reads each gradient where autograd has left it
        return _with_matrices(rank, rank.without_gradients())
    if stage == 3:
        state = _zero_3(rank)
    elif has_gradient_buffers(config):
        state = _buffered(rank)
    elif stage == 2:
        state = _zero_2(rank)
    else:
        state = _zero_1(rank)
    if config.optimizer.kind.copies_gradient and config.optimizer.weight_decay > 0:
        state = replace(state, at_update=state.at_update + FLOAT32 * rank.share)
    state = _with_matrices(rank, state)
    if config.optimizer.offload_optimizer:
        state = _offloaded(rank, state)
    if stage in (1, 2) and rank.shard_size > 1 and rank.device.collectives_are_gloo:
        # gloo gathers the updated weights into a tensor of its own before it copies them
        gathered = rank.number_bytes * min(rank.gathered, ALLGATHER_BUCKET)
        state = replace(state, at_update=max(state.at_update, gathered))
    return state


def _with_matrices(rank: ZeroRank, state: SharedState) -> SharedState:
    """Add what an optimizer of whole matrices allocates for its update."""
    if not rank.config.optimizer.kind.needs_whole_matrices:
        return state
    update = MatrixUpdate(rank.config, rank.layout, rank.layers)
    return replace(state, at_update=state.at_update + update.temporary_bytes)


def _buffered(rank: ZeroRank) -> SharedState:
    """Gradients are added to flat buffers as soon as they exist, and reduced in place, or as copies in `sent_bytes`."""
    at_reduction = 0
    if rank.sent_bytes != rank.sum_bytes:
        at_reduction = rank.sent_bytes * rank.reduced
    return replace(
        rank.without_gradients(),
        gradients=rank.sum_bytes * rank.trained,
        keeps_gradients=False,
        at_reduction=at_reduction,
        at_update=rank.float32_bytes,
    )


# DeepSpeedZeroOptimizer: gradients are copied into a bucket, reduced, and kept as this rank's partition.


def _zero_1(rank: ZeroRank) -> SharedState:
    """The bucket takes the sums over microbatches, at the end of a step."""
    flat, partition = rank.flat_bucket(rank.sum_bytes), rank.sum_bytes * rank.share
    step_gradients = rank.sum_bytes * rank.bucket_numbers
    if rank.sums_apart:
        # each slice of the partition is added as it comes, while all sums live
        step_gradients += rank.sum_bytes * rank.trained
        reduced = flat + partition
    else:
        reduced = max(flat, partition)
    return replace(
        rank.without_gradients(),
        step_gradients=step_gradients,
        keeps_gradients=not rank.sums_apart,
        # the full bucket is counted in `step_gradients`, and its memory used for what it is flattened to
        at_reduction=max(0, reduced - rank.sum_bytes * min(rank.bucket, rank.trained)),
    )


def _zero_2(rank: ZeroRank) -> SharedState:
    """The bucket takes each microbatch's gradients, in the dtype of the weights."""
    flat, partition = rank.flat_bucket(rank.number_bytes), rank.sum_bytes * rank.share
    state = replace(
        rank.without_gradients(),
        microbatch_gradients=rank.number_bytes * rank.bucket_numbers,
        bucket=rank.bucket,
        keeps_gradients=False,
    )
    if rank.sums_apart:
        return replace(state, step_gradients=partition, at_reduction=flat)
    # for the update the partition is flattened, and converted to float32
    at_update = partition + rank.float32_bytes
    kept = rank.sum_bytes * whole_parameters(rank.layers, rank.layout)
    return replace(state, later_gradients=kept, at_reduction=max(flat, kept), at_update=at_update)


def _zero_3(rank: ZeroRank) -> SharedState:
    """DeepSpeedZeroOptimizer_Stage3: weights are cut too, and gathered for use; gradients are one flat partition."""
    weights, whole = -(-rank.parameters // rank.shard_size), 0
    if rank.shard_size > 1:
        # beside its share every rank holds small parameters whole
        whole = sum(size for size in rank.parameter_sizes if size <= PERSISTENT_PARAMETER)
        weights += whole
    # those of the first and the last layer are still gathered at the reduction
    ends = _parameters(held_layers([rank.layers[0], rank.layers[-1]]), rank.layout)
    unread = read_by_forward_alone(rank.config, rank.layers, rank.layout)
    offloads_to_host = rank.config.optimizer.offload_param and not rank.device.is_host
    gathers = rank.shard_size > 1 or offloads_to_host
    full_bucket = rank.sent_bytes * min(rank.bucket, rank.parameters)
    at_reduction, gathered, prefetched = full_bucket, 0, 0
    if rank.device.collectives_are_gloo:  # it copies what it reduces
        at_reduction += full_bucket + rank.received_pieces(full_bucket)
    if gathers:
        at_reduction += ends * rank.number_bytes
        cut = rank.parameters if rank.config.optimizer.offload_param else rank.parameters - whole
        given_back = sum(size for size in unread if size > PERSISTENT_PARAMETER)
        gathered = min(cut - given_back, REUSE_DISTANCE // 2) * rank.number_bytes
        if rank.shard_size > 1:  # DeepSpeed gathers all that the bucket takes before the first layer
            prefetched = min(cut, rank.user.get("stage3_prefetch_bucket_size", PREFETCH_BUCKET)) * rank.number_bytes
    return replace(
        rank.without_gradients(),
        weights=weights * rank.number_bytes,
        gradients=rank.sent_bytes * rank.bucket + rank.sum_bytes * rank.share,
        bucket=rank.bucket,
        keeps_gradients=False,
        at_reduction=at_reduction,
        gathered=gathered,
        prefetched=prefetched,
    )


def _offloaded(rank: ZeroRank, state: SharedState) -> SharedState:
    """Master weights, moments and a copy of the gradients in host memory."""
    host = state.master_weights + state.optimizer_states + FLOAT32 * rank.share
    state = replace(state, master_weights=0, optimizer_states=0, at_update=0)
    if rank.config.effective_zero_stage == 3:
        partition = rank.sum_bytes * rank.share
        host += partition
        state = replace(state, gradients=state.gradients - partition)
        if rank.config.optimizer.offload_param:
            host += state.weights
            state = replace(state, weights=0)
        return replace(state, host=host)
    host += rank.number_bytes * (rank.share + rank.largest_parameter)
    # its norm is computed in the widest floating-point numbers that the device has
    norm_bytes = 8 if rank.device.has_64_bits else FLOAT32
    at_reduction = norm_bytes * rank.largest_parameter
    if rank.sums_apart:
        at_reduction = max(at_reduction, state.at_reduction)
    else:
        host += rank.number_bytes * rank.share  # partial sums of the microbatches
    return replace(
        state,
        gradients=state.gradients + rank.number_bytes * rank.largest_parameter,
        later_gradients=0,
        at_reduction=at_reduction,
        host=host,
    )


def _parameters(layers: Sequence[LayerDeclaration], layout: Layout, *, trained_only: bool = False) -> int:
    """Numbers of the parameters that a rank holds, which quantised weights are not among."""
    total = sum(of_layers(layers, partial(parameters_of_layer, layout=layout, trained_only=trained_only)))
    if trained_only:
        return total
    return total - sum(held_numel(shard, layout) for layer in layers for shard in _quantized(layer, layout))


def bytes_between_replicas(config: Config, layout: Layout, layers: Sequence[LayerDeclaration]) -> int:
    """Return what a rank that holds these layers sends to other replicas for one sum of gradients, in a ring."""
    rank, replicas = ZeroRank(config, layout, layers), layout.num_replicas
    return 2 * (replicas - 1) * rank.share * rank.sent_bytes // replicas


def _quantized(layer: LayerDeclaration, layout: Layout) -> list[Shard]:
    return [shard for shard in held_shards(layer, layout) if shard.quantized]
