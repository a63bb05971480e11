"""Runs on the device of the stand-in: losses of the CPU, and how often its kernels and marks are called."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.habana import devices
from tests.habana.runs import train_on_cpu
from tests.ranks import RankPools
from tests.runs import rows, write_dataset

STEPS, MICROBATCHES, LAYERS = 3, 4, 2
LLAMA = "--architecture llama --position-embedding-type rope --num-query-groups 2 --ffn-hidden-size 48"
BLOOM = "--architecture bloom --position-embedding-type alibi --attention-dropout 0 --hidden-dropout 0"


@pytest.mark.parametrize("model", [LLAMA, BLOOM], ids=["llama", "bloom"])
def test_habanas_kernels_train_as_the_cpus(ranks: RankPools, hpu_ranks: RankPools, tmp_path: Path, model: str) -> None:
    data = write_dataset(tmp_path / "data")
    flags = f"--data-path {data} {model} --train-iters {STEPS} --split 1,0,0 --adam-eps 1e-12 --log-memory-interval 0"
    ((fault, modules),) = ranks(1)(train_on_cpu, f"{flags} --results-dir {tmp_path / 'cpu'}")
    assert (fault, modules) == ("", [])  # found, and neither loaded nor called
    ((fault, calls, _),) = hpu_ranks(1)(devices.train, f"{flags} --device hpu --results-dir {tmp_path / 'hpu'}")
    assert fault == ""
    losses = [[row["lm_loss"] for row in rows(tmp_path / name)] for name in ("cpu", "hpu")]
    assert len(losses[0]) == STEPS
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    passes = STEPS * MICROBATCHES
    is_llama = model == LLAMA
    assert calls["FusedSDPA"] == passes * LAYERS
    assert calls["FusedRMSNorm"] == (passes * (2 * LAYERS + 1) if is_llama else 0)
    assert calls["apply_rotary_pos_emb"] == (passes * LAYERS * 2 if is_llama else 0)
    groups, rest = divmod(calls["FusedAdamW"], STEPS)  # of parameters, each a call
    assert rest == 0
    # after the forward and the backward pass of each microbatch, after the step, and the optimizer's own
    assert calls["mark_step"] == STEPS * (2 * MICROBATCHES + 1 + groups + 1)
    assert calls["synchronize"] == 0  # beside the one read of loss and norm a step
    assert calls["shapes of FusedSDPA"] == 1  # a graph is compiled for each


@pytest.mark.parametrize(
    "flags",
    [
        "--zero-stage 1 --check-replicas-interval 1 --verify-checkpoint --recheck-interval 1",
        pytest.param("--zero-stage 2 --offload-optimizer", marks=pytest.mark.slow),
        "--zero-stage 3 --check-replicas-interval 1",
    ],
)
def test_no_part_of_a_run_needs_float64_or_more_than_32_bits(
    ranks: RankPools, hpu_ranks: RankPools, tmp_path: Path, flags: str
) -> None:
    """Which the device lacks: norms of ZeRO, comparisons of the ranks' copies and of what they compute."""
    flags += (
        f" --data-path {write_dataset(tmp_path / 'data')} {LLAMA} --train-iters {STEPS} --split 1,0,0 --adam-eps 1e-12"
    )
    assert ranks(2)(train_on_cpu, f"{flags} --results-dir {tmp_path / 'cpu'}") == [("", [])] * 2
    flags += f" --device hpu --results-dir {tmp_path / 'hpu'} --save {tmp_path / 'saved'}"
    found = hpu_ranks(2)(devices.train, flags)
    assert [fault for fault, *_ in found] == ["", ""]
    losses, norms = (
        [[row[name] for row in rows(tmp_path / folder)] for folder in ("cpu", "hpu")]
        for name in ("lm_loss", "grad_norm")
    )
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert norms[1] == pytest.approx(norms[0], rel=1e-4)
