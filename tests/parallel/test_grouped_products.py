"""Products of groups with a weight each, against one product a group."""

from __future__ import annotations

import pytest
import torch

from megatron.parallel.operators.products import grouped_linear, stacked

SIZES = [5, 0, 3, 8]


@pytest.mark.parametrize("is_flat", [False, True])
@pytest.mark.parametrize("trained", [[0, 1, 2, 3], [2], []])
def test_each_group_is_multiplied_by_its_own_weight(is_flat: bool, trained: list[int]) -> None:
    """A weight of an empty group has a gradient of zeros; a frozen one has none."""
    torch.manual_seed(1)
    flat = torch.randn(len(SIZES), 12 * 8 + 16)  # other weights lie between them
    weights = [row[: 12 * 8].view(12, 8) if is_flat else row[: 12 * 8].clone().view(12, 8) for row in flat]
    parameters = [torch.nn.Parameter(weight, requires_grad=number in trained) for number, weight in enumerate(weights)]
    assert (stacked(parameters).data_ptr() == parameters[0].data_ptr()) == is_flat
    x = torch.randn(sum(SIZES), 8, requires_grad=True)
    ends = torch.tensor(SIZES).cumsum(0).int()
    gradient = torch.randn(sum(SIZES), 12)
    output = grouped_linear(x, ends, parameters)
    one_by_one = torch.cat([part @ weight.t() for part, weight in zip(x.split(SIZES), parameters, strict=True)])
    torch.testing.assert_close(output, one_by_one)
    inputs = [x, *(parameters[number] for number in trained)]
    found = torch.autograd.grad(output, inputs, gradient)
    for own, expected in zip(found, torch.autograd.grad(one_by_one, inputs, gradient), strict=True):
        torch.testing.assert_close(own, expected)
