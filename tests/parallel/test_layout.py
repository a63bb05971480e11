"""The layout numbers every rank once on all its axes, and its groups are those of DeepSpeed's topology."""

from __future__ import annotations

import dataclasses
import itertools
import subprocess
import sys

import pytest
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

from megatron.options.config import ParallelConfig
from megatron.parallel.layout import AXES, EXPERT_AXES, Layout, LayoutError
from megatron.parallel.shards import Shard

SIZES = (1, 2, 3)


def ranks_of(layout: Layout) -> list[Layout]:
    return [dataclasses.replace(layout, rank=rank) for rank in range(layout.world_size)]


@pytest.mark.parametrize(("tensor", "context", "data", "stages"), list(itertools.product(SIZES, repeat=4)))
def test_ranks_are_those_of_nested_loops(tensor: int, context: int, data: int, stages: int) -> None:
    layout = Layout(tensor_size=tensor, context_size=context, num_batch_ranks=data, num_stages=stages)
    expected = itertools.product(range(stages), range(data), range(context), range(tensor))
    for each, (stage, batch_rank, context_rank, tensor_rank) in zip(ranks_of(layout), expected, strict=True):
        found = each.stage, each.batch_rank, each.context_rank, each.tensor_rank
        assert found == (stage, batch_rank, context_rank, tensor_rank)
        assert each.grad_rank == batch_rank * context + context_rank
        assert each.rank in layout.ranks_of(stage)
        assert (each.is_first_stage, each.is_last_stage) == (stage == 0, stage == stages - 1)
        # a neighbour on any axis
        for name, size in AXES.items():
            other = (getattr(each, name) + 1) % getattr(each, size)
            neighbour = dataclasses.replace(layout, rank=each.rank_at(**{name: other}))
            differing = [axis for axis in AXES if getattr(neighbour, axis) != getattr(each, axis)]
            assert differing == ([name] if getattr(each, size) > 1 else [])
            assert getattr(neighbour, name) == other
    assert (layout.grad_size, layout.model_size) == (data * context, tensor * context * stages)


@pytest.mark.parametrize(("is_whole", "expert"), [(True, 1), (True, 4), (False, 2), (False, 4), (True, 8)])
def test_experts_divide_the_same_ranks(is_whole: bool, expert: int) -> None:
    layout = Layout(tensor_size=2, context_size=2, num_batch_ranks=4, num_stages=2)
    layout = dataclasses.replace(layout, experts_are_whole=is_whole, expert_size=expert)
    expert_tensor = 1 if is_whole else 2
    every = [tuple(getattr(each, name) for name in EXPERT_AXES) for each in ranks_of(layout)]
    sizes = [getattr(layout, size) for size in EXPERT_AXES.values()]
    assert sorted(every) == list(itertools.product(*map(range, sizes)))
    assert layout.expert_grad_size * expert_tensor * expert == 16
    assert [each.expert_tensor_rank for each in ranks_of(layout)][:expert_tensor] == list(range(expert_tensor))
    for each in ranks_of(layout):
        for name in EXPERT_AXES:
            others = {other: getattr(each, other) for other in EXPERT_AXES if other != name}
            expected = [
                rank
                for rank, other in enumerate(ranks_of(layout))
                if all(getattr(other, axis) == value for axis, value in others.items())
            ]
            assert each.peers(EXPERT_AXES, name) == expected


@pytest.mark.parametrize(("expert", "replicas"), [(1, 1), (1, 2), (1, 4), (1, 8), (2, 2), (2, 4), (4, 2)])
def test_replicas_are_neighbours_and_each_has_every_shard(expert: int, replicas: int) -> None:
    layout = Layout(tensor_size=2, context_size=2, num_batch_ranks=4, num_stages=2, expert_size=expert)
    layout = dataclasses.replace(layout, num_replicas=replicas)
    layout.check(32)
    # a stage's 16 ranks are cut into stretches, one a replica: whole nodes, where these hold a replica each
    assert [each.replica for each in ranks_of(layout)] == [rank % 16 // (16 // replicas) for rank in range(32)]
    for shard in (Shard((8,)), Shard((8,), expert=0, num_experts=4)):
        peers = Layout.grad_peers if shard.expert is None else Layout.expert_grad_peers
        for each in ranks_of(layout):
            others = [dataclasses.replace(layout, rank=rank) for rank in peers(each)]
            rank, size = each.shard_place(shard)
            assert size * replicas == len(others)
            within = [other.rank for other in others if other.replica == each.replica]
            across = [other.rank for other in others if other.shard_place(shard)[0] == rank]
            assert (each.shard_peers(peers(each)), each.replica_peers(peers(each))) == (within, across)
            assert [dataclasses.replace(layout, rank=r).shard_place(shard)[0] for r in within] == list(range(size))
            assert [dataclasses.replace(layout, rank=r).replica for r in across] == list(range(replicas))


def test_replicas_that_do_not_divide_the_ranks_are_refused() -> None:
    layout = Layout(num_batch_ranks=4, expert_size=2, num_replicas=4)
    with pytest.raises(LayoutError, match="num_replicas=4 does not divide the 2 ranks that sum a gradient"):
        layout.check(4)


def test_ranks_are_numbered_as_deepspeed_numbers_them() -> None:
    layout = Layout(tensor_size=2, context_size=2, num_batch_ranks=3, num_stages=2)
    topology = PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=layout.grad_size)
    for each in ranks_of(layout):
        place = topology.get_coord(each.rank)
        assert (each.stage, each.tensor_rank, each.grad_rank) == (place.pipe, place.model, place.data)
    for stage in range(2):
        assert layout.ranks_of(stage) == topology.get_axis_list("pipe", stage)


def test_the_options_leave_the_rest_to_data_parallelism() -> None:
    options = ParallelConfig(tensor_model_parallel_size=2, pipeline_model_parallel_size=3)
    assert Layout.of(options, 24, 7) == Layout(tensor_size=2, num_batch_ranks=4, num_stages=3, rank=7)
    assert Layout.of(options).world_size == Layout.of(options, 5).world_size == 6
    Layout.of(options, 24).check(24)
    with pytest.raises(LayoutError, match="25 ranks are not a multiple of tensor x context x pipeline = 2 x 1 x 3"):
        Layout.of(options, 25).check(25)


def test_a_layout_needs_no_torch() -> None:
    code = "import sys, megatron.parallel.layout; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
