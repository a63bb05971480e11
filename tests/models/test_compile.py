"""torch.compile of the layers: needs a C++ compiler on CPU, and minutes."""

from __future__ import annotations

import shutil

import pytest
import torch
from torch import Tensor, nn

from megatron.parallel.layout import Layout
from megatron.parallel.rng import RandomStreams, dropout
from tests.ranks import RankPools
from tests.training import layouts

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on CPU"),
]


COMPILED = "--num-layers 2 --torch-compile"


@pytest.mark.parametrize(
    ("arguments", "compiled"),
    [
        (layouts.MODELS["llama_gqa"], COMPILED),
        (f"{layouts.MODELS['bloom_alibi']} --reset-position-ids --reset-attention-mask --eod-token-id 7", COMPILED),
        (f"{layouts.MODELS['bloom_learned']} --recompute-granularity selective", COMPILED),
        (
            f"{layouts.MODELS['llama_gqa']} --recompute-granularity selective --recompute-modules norm,mlp_act",
            COMPILED,
        ),
        (f"{layouts.MODELS['llama_gqa']} --no-pipeline-parallel --recompute-granularity full", COMPILED),
        (f"{layouts.MODELS['llama_gqa']} --tensor-model-parallel-size 2 --sequence-parallel", COMPILED),
        (f"{layouts.MODELS['bloom_learned']} --tensor-model-parallel-size 2 --recompute-granularity full", COMPILED),
        (f"{layouts.MODELS['llama_gqa']} --pipeline-model-parallel-size 2", COMPILED),
    ],
    ids=[
        "llama",
        "packed",
        "selective",
        "parts",
        "sequential",
        "sequence_parallel",
        "tensor_parallel_full",
        "pipeline",
    ],
)
def test_compiled_layers_train_alike(ranks: RankPools, arguments: str, compiled: str) -> None:
    size = 2 if "model-parallel-size 2" in arguments else 1
    plain, *_ = ranks(size)(layouts.train, f"{arguments} --num-layers 2 --kernels plain", 3)
    ours, *_ = ranks(size)(layouts.train, f"{arguments} {compiled}", 3, timeout_s=900)
    assert ours["losses"] == pytest.approx(plain["losses"], rel=1e-5)
    assert ours["norms"] == pytest.approx(plain["norms"], rel=1e-4)
    assert ours["validation"] == pytest.approx(plain["validation"], rel=1e-5)


class Dropping(nn.Module):
    """Both streams, recomputed."""

    def __init__(self) -> None:
        super().__init__()
        self.streams = RandomStreams()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.streams.recomputed(self._inside, x)
        return result

    def _inside(self, x: Tensor) -> Tensor:
        x = dropout(x * x, 0.5, True, self.streams, sharded=True)
        return dropout(x * x, 0.5, True, self.streams, sharded=False)


def test_compiled_recomputation_drops_the_same_again() -> None:
    model = Dropping()
    model.compile()
    dropped = []
    for step in range(2):
        model.streams.seed_step(1, step, Layout())
        x = torch.linspace(0.5, 1.5, 256).requires_grad_()
        y = model(x)
        y.sum().backward()
        assert x.grad is not None
        assert 0 < y.count_nonzero() < 256
        assert torch.equal(y == 0, x.grad == 0)
        dropped.append(y == 0)
    assert not torch.equal(*dropped)
