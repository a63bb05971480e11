"""This process in the layout: its process groups, its device, and the state of its passes."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from megatron.parallel import plain_data
from megatron.parallel.layout import AXES, EXPERT_AXES, Cut, Layout
from megatron.parallel.pass_state import DeferredGradients, PassState
from megatron.runtime import network
from megatron.runtime.accelerator import quiet
from megatron.runtime.devices import find_device

if TYPE_CHECKING:
    from megatron.options.config import ParallelConfig
    from megatron.runtime.device import Device

SIZE_BYTES, SHORT_BYTES = 8, 248
"""Parts of a message of `gather_objects`: the size of the object, and what of its content goes with the size."""
LARGEST_TAG = 1  # of messages from rank to rank; DeepSpeed's pipeline sends with 0, on the CPU in the same group


@functools.cache
def _register_rendezvous() -> str:
    """Return the URL under which torch finds `_open_store`."""
    dist.register_rendezvous_handler("megatron", _open_store)
    return "megatron://"


def _open_store(url: str, timeout: timedelta, **ignored: Any) -> Iterator[tuple[Any, int, int]]:
    """Yield the store that the launcher's variables describe, this rank and the number of ranks. Raises OSError.

    As torch's env:// does, except that rank 0 listens on the address MASTER_ADDR alone instead of on all of them.
    """
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    host, port, listener = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), None
    if rank == 0 and not _has_agent_store():
        with network.store_socket(host, port) as listening:
            port = listening.getsockname()[1]
            listener = listening.detach()  # the store closes it
    yield (
        dist.TCPStore(
            host, port, world_size, is_master=listener is not None, timeout=timeout, master_listen_fd=listener
        ),
        rank,
        world_size,
    )


def _has_agent_store() -> bool:
    """Return True if torchrun's agent serves the store."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)


def _set_variables() -> None:
    """Complete the variables of a launcher: place in the world, and the interfaces to listen on.

    A run on one machine listens on the loopback interface alone.
    """
    for name, alone in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"), ("MASTER_ADDR", network.LOOPBACK)):
        os.environ.setdefault(name, alone)
    world_size = os.environ["WORLD_SIZE"]
    port = "29500"
    if world_size == "1":
        port = "0"  # a free one: no other rank has to know it
    os.environ.setdefault("MASTER_PORT", port)
    is_one_machine = os.environ.get("LOCAL_WORLD_SIZE", "1") == world_size
    if is_one_machine and not _has_agent_store():
        os.environ["MASTER_ADDR"] = network.LOOPBACK
    if interface := network.interface_towards(os.environ["MASTER_ADDR"]):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        if network.is_loopback(os.environ["MASTER_ADDR"]):  # by default NCCL takes any other
            os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)


def _join_process_group(device: Device, timeout: timedelta) -> None:
    """Join the process group that the launcher's variables describe; alone without them."""
    import deepspeed

    _set_variables()
    if not deepspeed.comm.is_initialized():
        if device.collectives_are_gloo:
            # DeepSpeed 0.19.8 would compile an all-reduce for inference at the first start on a machine; a run
            # killed while it does leaves a lock behind, which all later ones wait for. To read this table would call
            # a compiler for each operator of DeepSpeed's, in every rank
            vars(deepspeed.ops).setdefault("__compatible_ops__", {})["deepspeed_shm_comm"] = False
        with quiet():
            deepspeed.init_distributed(
                dist_backend=device.collectives,
                timeout=timeout,
                init_method=_register_rendezvous(),
                verbose=False,
            )


def _group_of(layout: Layout, peers: Callable[[Layout], list[int]]) -> dist.ProcessGroup:
    """Return the group of the ranks that are this one's peers, itself included. Collective."""
    # every rank makes all groups, in one order
    places = (dataclasses.replace(layout, rank=rank) for rank in range(layout.world_size))
    groups = dict.fromkeys(tuple(peers(place)) for place in places)
    own, _ = dist.new_subgroups_by_enumeration([list(ranks) for ranks in groups])
    assert own is not None
    return own


def _group_along(layout: Layout, axes: dict[str, str], coordinate: str) -> dist.ProcessGroup:
    """Return the group of the ranks that differ from this one in this coordinate alone. Collective."""
    return _group_of(layout, lambda place: place.peers(axes, coordinate))


def _row_groups(
    layout: Layout, grad_group: dist.ProcessGroup | None
) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
    """Return the groups of context_rank and of batch_rank, which divide the ranks that sum a gradient. Collective."""
    if layout.context_size == 1:
        return None, grad_group
    context_group, batch_group = _group_along(layout, AXES, "context_rank"), None
    if layout.num_batch_ranks > 1:
        batch_group = _group_along(layout, AXES, "batch_rank")
    return context_group, batch_group


@dataclass(frozen=True)
class ShardGroups:
    """The ranks over which the same gradients are summed, in two directions."""

    within: dist.ProcessGroup | None = None
    """Those of one replica, over which ZeRO shards."""
    across: dist.ProcessGroup | None = None
    """Those that hold the same shard, one of each replica. None: there is one replica."""

    @classmethod
    def of(
        cls, layout: Layout, grad_peers: Callable[[Layout], list[int]], grad_group: dist.ProcessGroup | None
    ) -> ShardGroups:
        """Divide the ranks that sum a gradient, each rank's `grad_peers` and this one's `grad_group`. Collective."""
        if layout.num_replicas == 1:
            return cls(grad_group)
        return cls(
            within=_group_of(layout, lambda place: place.shard_peers(grad_peers(place))),
            across=_group_of(layout, lambda place: place.replica_peers(grad_peers(place))),
        )


@dataclass(frozen=True)
class ParallelContext(Layout):
    """The layout with this rank's process groups and device, built once in `main` and passed down.

    It is frozen; what changes from pass to pass is in `state`.
    """

    tensor_group: dist.ProcessGroup | None = None
    context_group: dist.ProcessGroup | None = None
    """The ranks that share each row of tokens."""
    batch_group: dist.ProcessGroup | None = None
    """The ranks that read different shares of a batch for the same part of the model."""
    grad_group: dist.ProcessGroup | None = None
    """The ranks over which the gradients of this part of the model are summed."""
    shard_groups: ShardGroups = field(default_factory=ShardGroups)
    """The same, by ZeRO's shards and their replicas."""
    expert_group: dist.ProcessGroup | None = None
    """The ranks that hold different experts of this part of the model, and between which tokens travel."""
    expert_grad_group: dist.ProcessGroup | None = None
    """The ranks over which the gradients of this rank's experts are summed."""
    expert_shard_groups: ShardGroups = field(default_factory=ShardGroups)
    control_group: dist.ProcessGroup | None = None
    """All ranks, over the host's network: what is decided there waits for no device."""
    sequence_parallel: bool = False
    device: torch.device = torch.device("cpu")
    topology: Any = None
    """DeepSpeed's ProcessTopology (pipe, data, model)."""
    grid: Any = None
    """DeepSpeed's PipelineParallelGrid, its `mpu`."""
    state: PassState = field(default_factory=PassState)

    @classmethod
    def single(cls) -> ParallelContext:
        """One process alone, without torch.distributed: every layer works in a plain unit test."""
        return cls()

    @classmethod
    def build(cls, parallel: ParallelConfig, device_name: str) -> ParallelContext:
        """Join the process group that the launcher describes (RANK, WORLD_SIZE, MASTER_ADDR, LOCAL_RANK).

        `device_name`: that which was chosen. Raises LayoutError where the layout does not fill the world.
        """
        from deepspeed.accelerator import get_accelerator
        from deepspeed.runtime.pipe.topology import PipelineParallelGrid, PipeModelDataParallelTopology

        record = find_device(device_name)
        _join_process_group(record, timedelta(minutes=parallel.distributed_timeout_minutes))
        layout = Layout.of(parallel, dist.get_world_size(), dist.get_rank())
        layout.check(dist.get_world_size())
        if record.is_host:
            device = torch.device(record.torch_type)
        else:
            get_accelerator().set_device(int(os.environ["LOCAL_RANK"]))
            device = torch.device(get_accelerator().current_device_name())
        # DeepSpeed's data axis is what lies between tensor and pipeline
        topology = PipeModelDataParallelTopology(
            num_pp=layout.num_stages, num_mp=layout.tensor_size, num_dp=layout.grad_size
        )
        with quiet():
            grid = PipelineParallelGrid(topology=topology, process_group=dist.group.WORLD)
        tensor_group = grad_group = deferred = None
        if layout.tensor_size > 1:
            tensor_group = grid.get_slice_parallel_group()
        if layout.grad_size > 1:
            grad_group = grid.get_data_parallel_group()
        context_group, batch_group = _row_groups(layout, grad_group)
        shard_groups = ShardGroups.of(layout, Layout.grad_peers, grad_group)
        expert_group, expert_grad_group, expert_shard_groups = None, grad_group, shard_groups
        if layout.divides_experts:
            expert_group = _group_along(layout, EXPERT_AXES, "expert_rank")
            expert_grad_group = _group_along(layout, EXPERT_AXES, "expert_grad_rank")
            expert_shard_groups = ShardGroups.of(layout, Layout.expert_grad_peers, expert_grad_group)
        control_group = dist.group.WORLD
        if not record.collectives_are_gloo:
            control_group = dist.new_group(backend="gloo")
        if parallel.schedule == "zero-bubble":
            deferred = DeferredGradients()
        return cls(
            **vars(layout),
            tensor_group=tensor_group,
            context_group=context_group,
            batch_group=batch_group,
            grad_group=grad_group,
            shard_groups=shard_groups,
            expert_group=expert_group,
            expert_grad_group=expert_grad_group,
            expert_shard_groups=expert_shard_groups,
            control_group=control_group,
            sequence_parallel=parallel.sequence_parallel and layout.tensor_size > 1,
            device=device,
            topology=topology,
            grid=grid,
            state=PassState(deferred=deferred),
        )

    @property
    def of_copies(self) -> ParallelContext:
        """The context of passes that share no rows: ranks that train on parts of a row compute rows of their own."""
        return dataclasses.replace(
            self,
            context_size=1,
            num_batch_ranks=self.grad_size,
            context_group=None,
            batch_group=self.grad_group,
            sequence_parallel=False,
        )

    @functools.cached_property
    def of_experts(self) -> ParallelContext:
        """The context of the linear layers of experts, whose callers have brought the tokens to them already."""
        if not self.experts_are_whole:
            return dataclasses.replace(self, sequence_parallel=False)
        # each rank alone has the whole of its experts
        return ParallelContext(device=self.device, state=self.state)

    def grad_group_of(self, shard: Cut) -> dist.ProcessGroup | None:
        """The ranks over which the parameter's gradient is summed."""
        if shard.expert is None:
            return self.grad_group
        return self.expert_grad_group

    def shard_groups_of(self, shard: Cut) -> ShardGroups:
        """The same, by ZeRO's shards of the parameter and their replicas."""
        if shard.expert is None:
            return self.shard_groups
        return self.expert_shard_groups

    def broadcast(self, number: int) -> int:
        """Return rank 0's number, on every rank. Collective."""
        if self.world_size == 1:
            return number
        tensor = torch.tensor([number], dtype=torch.int64)
        dist.broadcast(tensor, src=0, group=self.control_group)
        return int(tensor.item())

    def largest(self, number: int) -> int:
        """Return the largest of all ranks' numbers, on every rank. Collective.

        Up a binary tree, and down again by a broadcast, which is one too: 2 log2(ranks) hops one after the other.
        gloo's all-reduce goes round a ring twice, which at 1024 ranks makes 2046.
        """
        if self.world_size == 1:
            return number
        largest = torch.tensor([number], dtype=torch.int64)
        theirs = torch.empty_like(largest)
        distance = 1
        while distance < self.world_size:
            if self.rank & distance:
                dist.send(largest, self.rank - distance, group=self.control_group, tag=LARGEST_TAG)
                break
            if self.rank + distance < self.world_size:
                dist.recv(theirs, self.rank + distance, group=self.control_group, tag=LARGEST_TAG)
                largest = torch.maximum(largest, theirs)
            distance *= 2
        dist.broadcast(largest, src=0, group=self.control_group)
        return int(largest.item())

    def gather_objects(self, mine: Any) -> list[Any]:
        """Return every rank's object, in order of rank. Collective. Raises TypeError unless it is plain data."""
        if self.world_size == 1:
            return [mine]
        content = plain_data.encode(mine)
        # most are short, and go with their sizes
        message = len(content).to_bytes(SIZE_BYTES, "little") + content[:SHORT_BYTES]
        messages = self._gather_bytes(message, SIZE_BYTES + SHORT_BYTES)
        longest = max(int.from_bytes(each[:SIZE_BYTES], "little") for each in messages)
        if longest <= SHORT_BYTES:
            contents = [each[SIZE_BYTES:] for each in messages]
        else:
            contents = self._gather_bytes(content, longest)
        return [plain_data.decode(each) for each in contents]

    def _gather_bytes(self, mine: bytes, length: int) -> list[bytes]:
        """Return every rank's bytes, padded with blanks to a length, in order of rank. Collective."""
        padded = torch.frombuffer(bytearray(mine.ljust(length)), dtype=torch.uint8)
        gathered = torch.empty(self.world_size, length, dtype=torch.uint8)
        dist.all_gather(list(gathered), padded, group=self.control_group)
        return [row.tobytes() for row in gathered.numpy()]

    def broadcast_object(self, mine: Any) -> Any:
        """Return rank 0's object, on every rank. Collective. Raises TypeError unless it is plain data."""
        if self.world_size == 1:
            return mine
        content = bytearray()
        if self.rank == 0:
            content += plain_data.encode(mine)
        content = content.ljust(self.broadcast(len(content)))
        received = torch.frombuffer(content, dtype=torch.uint8)
        dist.broadcast(received, src=0, group=self.control_group)
        return plain_data.decode(bytes(content))

    def from_first_stage(self, number: float) -> float:
        """Return the number of this pipeline's first stage, on every stage. Collective in the pipeline."""
        if self.num_stages == 1:
            return number
        tensor = torch.tensor([number], dtype=torch.float32, device=self.device)
        dist.broadcast(tensor, src=self.grid.stage_to_global(stage_id=0), group=self.grid.get_pipe_parallel_group())
        return float(tensor.item())

    def sum_over_batch_ranks(self, number: float) -> float:
        """Sum over the ranks of batch_group. Collective in that group."""
        if self.batch_group is None:
            return number
        tensor = torch.tensor([number], dtype=torch.float32, device=self.device)
        dist.all_reduce(tensor, group=self.batch_group)
        return float(tensor.item())


def group_of_stage(ctx: ParallelContext) -> dist.ProcessGroup | None:
    """Return the group of all ranks that hold layers of this rank's stage; None: it is alone. Collective."""
    if ctx.world_size == ctx.num_stages:
        return None
    if ctx.tensor_size == 1:
        return ctx.grad_group
    if ctx.grad_size == 1:
        return ctx.tensor_group
    if ctx.num_stages == 1:
        return dist.group.WORLD
    return _group_of(ctx, lambda place: place.ranks_of(place.stage))
