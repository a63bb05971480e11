"""Each region's forward, and its backward as the adjoint of the forward over all ranks together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from megatron.parallel import linear, losses, mappings
from megatron.parallel.operators import fused
from tests.parallel import on_ranks
from tests.ranks import RankPools

Array = np.ndarray[Any, Any]
S, B, H = 8, 2, 4


def cat(parts: list[Array], axis: int = 0) -> list[Array]:
    return [np.concatenate(parts, axis)] * len(parts)


def total(parts: list[Array], axis: int = 0) -> list[Array]:
    return [np.sum(parts, axis=0)] * len(parts)


def total_cut(parts: list[Array], axis: int = 0) -> list[Array]:
    return np.split(np.sum(parts, axis=0), len(parts), axis)


def own(parts: list[Array], axis: int = 0) -> list[Array]:
    return parts


# region: (what every rank gets from all inputs, what every rank's input gets from all slopes, axis, cut input)
Rule = Callable[..., list[Array]]
RULES: dict[str, tuple[Rule, Rule, int, bool]] = {
    "copy_to_tensor_region": (own, total, 0, False),
    "reduce_from_tensor_region": (total, own, 0, False),
    "gather_from_sequence": (cat, total_cut, 0, True),
    "reduce_scatter_to_sequence": (total_cut, cat, 0, False),
    "gather_channels": (cat, total_cut, -1, True),
    "enter_tensor_region": (cat, total_cut, 0, True),
    "leave_tensor_region": (total_cut, cat, 0, False),
}


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("tp", [2, 4])
def test_region_and_its_backward(ranks: RankPools, name: str, tp: int) -> None:
    forward, backward, axis, is_cut = RULES[name]
    generator = np.random.default_rng(0)
    whole = [generator.standard_normal((S, B, H)) for _ in range(tp)]
    inputs = [np.split(x, tp, axis)[rank] for rank, x in enumerate(whole)] if is_cut else whole
    expected = forward(inputs, axis)
    slopes = [generator.standard_normal(expected[0].shape) for _ in range(tp)]
    for rank, (output, gradient) in enumerate(ranks(tp)(on_ranks.region, name, tp, inputs, slopes)):
        np.testing.assert_allclose(output, expected[rank], rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(gradient, backward(slopes, axis)[rank], rtol=1e-12, atol=1e-12)


def test_profiles_name_what_a_backward_pass_computes(ranks: RankPools) -> None:
    names = ["copy_to_tensor_region", "gather_from_sequence", "reduce_scatter_to_sequence"]
    for found in ranks(2)(on_ranks.names_of_backward_passes, names):
        assert found == ["all_reduceBackward", "reduce_scatter_rowsBackward", "all_gather_rowsBackward"]


def test_rows_that_do_not_divide_are_refused_on_every_rank(ranks: RankPools) -> None:
    for message in ranks(2)(on_ranks.reduce_scatter_of_odd_rows, 2):
        assert message == "5 rows cannot be split over 2 tensor-parallel ranks"


def test_no_function_is_differentiated_twice_in_silence() -> None:
    """Autograd sees neither a collective nor what a forward pass has computed for its backward."""
    functions = [
        value
        for module in (fused, linear, losses, mappings)
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, torch.autograd.Function)
    ]
    assert len(functions) >= 11
    assert not [function.__name__ for function in functions if not hasattr(function.backward, "__wrapped__")]
