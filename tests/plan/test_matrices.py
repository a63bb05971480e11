"""Muon's update in the plan: products counted by torch, shared by the ranks of a stage, and what travels."""

from __future__ import annotations

import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megatron.options.config import Config
from megatron.parallel.layout import Layout
from megatron.plan.flops import declared_layers
from megatron.plan.matrices import MatrixUpdate, owners
from megatron.plan.zero import held_layers
from megatron.training.optimizers.muon import orthogonalised
from tests.plan.test_timing import run, timed

# of a layer: q, k, v and dense; gate and up; down
SHAPES = [*4 * [(64, 64)], *2 * [(96, 64)], (64, 96)]
NUM_LAYERS = 4
MODEL = {"untie_embeddings_and_output_weights": False}
"""The output layer's weight is the embedding's, which is AdamW's."""


def muon(steps: int = 5, zero_stage: int = 0) -> Config:
    return run(MODEL, optimizer={"optimizer": "muon", "muon_num_ns_steps": steps, "zero_stage": zero_stage})


def counted(shape: tuple[int, int], given: Config) -> int:
    """FLOPs that torch counts while a matrix is orthogonalised."""
    with FlopCounterMode(display=False) as counter:
        orthogonalised(torch.ones(shape), given.optimizer)
    return counter.get_total_flops()


def update_of(given: Config, num_ranks: int) -> MatrixUpdate:
    return MatrixUpdate(given, Layout.of(given.parallel, num_ranks), held_layers(declared_layers(given)))


@pytest.mark.parametrize("steps", [1, 5, 6])
def test_the_products_are_those_that_torch_counts(steps: int) -> None:
    given = muon(steps)
    of_update = timed(given, product=1.0).seconds - timed(run(MODEL), product=1.0).seconds
    assert of_update == sum(counted(shape, given) for shape in SHAPES) * NUM_LAYERS
    assert sorted(matrix.shape for matrix in update_of(given, 1).owned) == sorted(SHAPES * NUM_LAYERS)


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_a_step_waits_for_the_rank_with_most_products(num_ranks: int) -> None:
    given = muon()
    of_update = timed(given, num_ranks, product=1.0).seconds - timed(run(MODEL), num_ranks, product=1.0).seconds
    total = sum(counted(shape, given) for shape in SHAPES) * NUM_LAYERS
    # no balance is better than an equal share, or worse by more than one matrix
    largest = max(counted(shape, given) for shape in SHAPES)
    assert total / num_ranks <= of_update <= total / num_ranks + largest
    update = update_of(given, num_ranks)
    assert of_update == sum(counted(matrix.shape, given) for matrix in update.owned)


@pytest.mark.parametrize("zero_stage", [0, 1])
def test_what_one_rank_holds_and_orthogonalises_does_not_travel(zero_stage: int) -> None:
    given, num_ranks = muon(zero_stage=zero_stage), 2
    layout = Layout.of(given.parallel, num_ranks)
    matrices = update_of(given, 1).owned
    # ZeRO-1 cuts the flat tensor of all of them in the middle: by hand, since every layer has the same ones
    half, begin, found = sum(math.prod(matrix.shape) for matrix in matrices) // num_ranks, 0, []
    chosen = owners(matrices, layout, 5)
    for matrix, owner in zip(matrices, chosen, strict=True):
        end = begin + math.prod(matrix.shape)
        is_whole = end <= half if owner == 0 else begin >= half
        if zero_stage == 0 or not is_whole:
            found.append((owner, math.prod(matrix.shape)))
        begin = end
    update = update_of(given, num_ranks)
    busiest = chosen[matrices.index(update.owned[0])]
    sent = sum(numel for owner, numel in found if owner == busiest)
    assert 0 < sent == update.sent_numbers
    assert update.returned_numbers == sent * (2 if zero_stage == 0 else 1)
    if zero_stage == 1:
        assert sent < sum(math.prod(matrix.shape) for matrix in update.owned)
