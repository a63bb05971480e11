"""SFT: every chat once an epoch, packed as if alone, the loss divided once by all its tokens, whatever the layout."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from megatron.checkpoint.store import Checkpoint
from tests.ranks import RankPools
from tests.tasks import chats
from tests.training.layouts import MODELS

LAYOUTS = {
    "dp2": (2, ""),
    "tp2": (2, "--tensor-model-parallel-size 2"),
    "tp2 sp": (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "pp2": (2, "--pipeline-model-parallel-size 2"),
    "pp4": (4, "--pipeline-model-parallel-size 4"),
    "pp2 dp2": (4, "--pipeline-model-parallel-size 2 --zero-stage 1"),
    "zero2": (2, "--zero-stage 2"),
    "zero3": (2, "--zero-stage 3"),
    "offload": (2, "--zero-stage 2 --offload-optimizer"),
}
PACKINGS = {
    "step": "--packing step --max-batch-len 64",
    "buckets": "--packing step --max-batch-len 64 --bucketing octave --buckets-per-octave 4",
    "edges": "--packing step --max-batch-len 64 --bucketing optimal --num-buckets 3",
    "none": "--packing none --micro-batch-size 2",
}
"""--packing dataset has other global batches: of rows, not of chats."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chats.write_chats(tmp_path_factory.mktemp("chats") / "chats", chats.some_lengths(41, 33))


@pytest.mark.parametrize("model", ["bloom_alibi", "bloom_learned", "llama_gqa"])
@pytest.mark.parametrize(
    ("layout", "packing"),
    [("dp2", "step"), ("tp2", "step"), ("tp2 sp", "buckets"), ("pp2", "step"), ("pp4", "edges"), ("pp2 dp2", "none")],
)
def test_packed_chats_have_the_loss_and_gradients_of_chats_alone(
    ranks: RankPools, data: Path, tmp_path: Path, model: str, layout: str, packing: str
) -> None:
    world_size, flags = LAYOUTS[layout]
    common = f"{MODELS[model]} --data-path {data} --split 1,0,0 --global-batch-size 13"
    ((expected, before, gradients),) = ranks(1)(chats.dense_gradient, common)
    found = ranks(world_size)(chats.gradient_step, f"{common} {PACKINGS[packing]} {flags}", str(tmp_path / "saved"))
    assert max(abs(loss - expected) for loss in found) < 1e-5
    saved = Checkpoint(tmp_path / "saved" / "global_step1")
    assert set(saved.parameters) == set(gradients)
    for name, shard in saved.parameters.items():
        after = saved.read(name, "weight", shard, 0, 1, 0, int(np.prod(shard.shape))).double()
        there = gradients[name].flatten()[: after.numel()]  # without the vocabulary's padding
        apart = before[name].flatten()[: after.numel()] - there - after
        assert float(apart.abs().max()) < 1e-5 * max(1.0, float(there.abs().max())), name
        assert float(there.abs().max()) > 0 or "bias" in name, name


@pytest.mark.parametrize("layout", ["dp2", "pp2", "tp2", "zero2", "zero3", "offload"])
def test_the_loss_curve_is_that_of_one_rank(ranks: RankPools, data: Path, layout: str) -> None:
    world_size, flags = LAYOUTS[layout]
    common = f"{MODELS['llama_gqa']} --data-path {data} --split 1,0,0 --global-batch-size 13 --max-batch-len 64"
    (expected,) = ranks(1)(chats.losses, common, 8)  # two epochs of 4 steps, the last of each over 2 chats
    for found in ranks(world_size)(chats.losses, f"{common} {flags}", 8):
        assert np.allclose(found, expected, rtol=0, atol=1e-4)
    assert expected[7] < expected[0]
    assert torch.isfinite(torch.tensor(expected)).all()
