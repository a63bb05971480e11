"""A linear layer swapped through the seam: a low-rank method declared in this file, and no model file touched."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.models.families import llama
from megatron.options.config import Config
from megatron.parallel.linear import LinearMethod, ParallelLinear
from megatron.parallel.shards import LayerDeclaration, Shard
from megatron.weights.huggingface import parameters_of
from tests.models import outputs
from tests.models.outputs import Array, Outputs
from tests.plan.test_sizes import assert_planned_is_allocated
from tests.ranks import RankPools

RANK = 4


class LowRank(LinearMethod):
    """W x + up (down x), the two cut as the base weight is; `up_std` 0 starts as the base layer."""

    def __init__(self, up_std: float) -> None:
        self.up_std = up_std

    def shards(self, weight: Shard) -> Mapping[str, Shard]:
        rows, columns = weight.shape
        down, up = Shard((RANK, columns), std=0.1), Shard((rows, RANK), std=self.up_std or None)
        cut: dict[str, Any] = {"dim": weight.dim, "pieces": weight.pieces}
        if weight.dim == 0:
            down, up = dataclasses.replace(down, used_on="heads"), dataclasses.replace(up, **cut)
        else:
            down, up = dataclasses.replace(down, **cut), dataclasses.replace(up, used_on="heads")
        return {"down": down, "up": up}

    def product(self, layer: ParallelLinear, x: Tensor) -> Tensor:
        return F.linear(x, layer.weight) + F.linear(F.linear(x, layer.down), layer.up)  # type: ignore[arg-type]


def declare(config: Config, up_std: float) -> list[LayerDeclaration]:
    layers = llama.FAMILY.declare(config)
    for prefix in ("attention.qkv", "attention.dense", "mlp.down"):
        layers = [layer if layer.number is None else layer.with_method(prefix, LowRank(up_std)) for layer in layers]
    return layers


ADAPTED = dataclasses.replace(llama.FAMILY, declare=lambda config: declare(config, 0.1))
STARTS_AS_BASE = dataclasses.replace(llama.FAMILY, declare=lambda config: declare(config, 0.0))

FLAGS = "--position-embedding-type rope --num-query-groups 2 --init-method-std 0.1"


def run(record: str, extra: str = "", ranks: RankPools | None = None) -> list[Outputs]:
    tokens = np.random.default_rng(0).integers(0, 123, (2, 25))
    arguments = f"{FLAGS} --architecture {record} {extra}"
    given = (arguments, None, np.ascontiguousarray(tokens[:, :-1]), np.ascontiguousarray(tokens[:, 1:]))
    return [outputs.run(*given)] if ranks is None else ranks(2)(outputs.run, *given)


def close(actual: Array, expected: Array, name: str) -> None:
    np.testing.assert_allclose(actual, expected, rtol=0, atol=2e-5 * max(np.abs(expected).max(), 1e-3), err_msg=name)


def test_a_method_that_starts_as_its_base_changes_nothing() -> None:
    (base,), (adapted,) = run("llama"), run(f"{__name__}:STARTS_AS_BASE")
    np.testing.assert_array_equal(adapted.logits, base.logits)
    added = set(adapted.gradients) - set(base.gradients)
    assert added == {
        f"layers.{layer}.{prefix}.{part}"
        for layer in range(2)
        for prefix in ("attention.qkv", "attention.dense", "mlp.down")
        for part in ("up", "down")
    }
    for name, gradient in base.gradients.items():
        close(adapted.gradients[name], gradient, name)


@pytest.mark.parametrize("extra", ["", "--sequence-parallel"])
def test_a_low_rank_method_on_ranks_equals_one_process(ranks: RankPools, extra: str) -> None:
    record = f"{__name__}:ADAPTED"
    (single,), (base,) = run(record), run("llama")
    assert np.abs(single.logits - base.logits).max() > 1e-2
    parallel = run(record, f"--tensor-model-parallel-size 2 {extra}", ranks)
    shards = parameters_of(outputs.config_of(f"{FLAGS} --architecture {record}"))
    for part in parallel:
        close(part.logits, single.logits, "logits")
    for name, shard in shards.items():
        if name in ("embedding.word.weight", "output.weight"):
            continue  # padded otherwise

        parts = [torch.from_numpy(part.gradients[name]) for part in parallel]
        close(shard.assemble(parts).numpy(), single.gradients[name], name)
        for tensor in parts if shard.dim is None else ():
            close(tensor.numpy(), single.gradients[name], name)


def test_its_parameters_are_planned() -> None:
    assert_planned_is_allocated(outputs.config_of(f"{FLAGS} --architecture {__name__}:ADAPTED"))
