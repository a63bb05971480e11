"""Every kind of run on the device `hpu` of the stand-in, tensor and pipeline parallel: losses and texts of the CPU, and
how often each rank calls Habana's kernels and marks a step.
"""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path
from typing import Literal

import pytest

from tests import runs
from tests.generation import commands
from tests.habana import devices
from tests.ranks import RankPools
from tests.tasks import chats, pairs

LAYERS, OWN_LAYERS, STEPS = 4, 2, 2
PARALLEL = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"
MODELS = {
    "llama": "--architecture llama --position-embedding-type rope --num-query-groups 2 --ffn-hidden-size 48",
    "bloom": "--architecture bloom --position-embedding-type alibi",
}
# what is compiled ahead would be counted too
PACKED = "--packing step --no-compile-ahead --micro-batch-size 1 --global-batch-size 6"
KINDS = {
    "pretrain": "--micro-batch-size 2 --global-batch-size 8",
    "sft": f"--task sft --max-batch-len 64 {PACKED}",
    "lora": f"--task sft --max-batch-len 64 --lora-rank 4 {PACKED}",
    "dpo": f"--task preference --max-batch-len 96 --lora-rank 4 {PACKED}",
}
IN_CI = {
    *(
        ("llama", "pretrain", "lazy"),
        ("bloom", "sft", "lazy"),
        ("llama", "dpo", "lazy"),
        ("bloom", "pretrain", "eager"),
    ),
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("data")
    some_chats = chats.write_chats(folder / "chats", chats.some_lengths(24, 30))
    return {
        "pretrain": runs.write_dataset(folder / "text"),
        "sft": some_chats,
        "lora": some_chats,
        "dpo": pairs.write_pairs(folder / "pairs", pairs.some_pairs(18, 30)),
    }


@pytest.mark.parametrize(
    ("model", "kind", "mode"),
    [
        pytest.param(*run, marks=() if run in IN_CI else pytest.mark.slow)
        for run in itertools.product(MODELS, KINDS, ("lazy", "eager"))
    ],
)
def test_a_run_on_hpu_has_the_losses_of_the_cpu(
    ranks: RankPools, hpu_ranks: RankPools, data: dict[str, Path], tmp_path: Path, model: str, kind: str, mode: str
) -> None:
    flags = (
        f"--num-layers {LAYERS} --vocab-size 256 --seq-length 32 --train-iters {STEPS} --split 1,0,0 {MODELS[model]}"
    )
    flags += f" {KINDS[kind]} --data-path {data[kind]} --hidden-dropout 0 --attention-dropout 0 --adam-eps 1e-12"
    assert ranks(1)(runs.train, f"{flags} --results-dir {tmp_path / 'cpu'}") == [""]
    flags += f" {PARALLEL} --device hpu --results-dir {tmp_path / 'hpu'}"
    lazy = mode == "lazy"
    found = hpu_ranks(4)(devices.train, flags if lazy else f"{flags} --no-torch-compile", lazy=lazy)
    assert {fault for fault, *_ in found} == {""}
    losses = [[row["lm_loss"] for row in runs.rows(tmp_path / name)] for name in ("cpu", "hpu")]
    assert len(losses[0]) == STEPS
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    for rank, (_, calls, steps) in enumerate(found):
        assert_documented(calls, model, is_last=rank >= 2, forwards=2 if kind == "dpo" else 1, lazy=lazy)
        # loss and gradient norm, in one read; the first step allocates the optimizer's state by copies
        assert [step["host_read"] for step in steps] == [1] * STEPS
        assert [step["host_write"] for step in steps[1:]] == [0] * (STEPS - 1)


def assert_documented(calls: Counter[str], model: str, *, is_last: bool, forwards: int, lazy: bool) -> None:
    """The calls of a rank are those that docs/start/gaudi.md describes for its layers and microbatches.

    `forwards`: forward passes of a microbatch; DPO has one of the reference.
    """
    passes, rest = divmod(calls["FusedSDPA"], OWN_LAYERS)
    assert (passes >= STEPS, rest) == (True, 0)
    is_llama = model == "llama"
    assert calls["FusedRMSNorm"] == (passes * (2 * OWN_LAYERS + is_last) if is_llama else 0)
    assert calls["apply_rotary_pos_emb"] == (passes * OWN_LAYERS * 2 if is_llama else 0)
    groups, rest = divmod(calls["FusedAdamW"], STEPS)
    assert (groups >= 1, rest) == (True, 0)
    microbatches = passes // forwards
    # after each forward and the backward pass of a microbatch, after the step, and the optimizer's own
    assert calls["mark_step"] == ((forwards + 1) * microbatches + STEPS * (1 + groups + 1) if lazy else 0)
    assert calls["synchronize"] == 0


@pytest.mark.parametrize("model", ["llama", "bloom"])
def test_texts_on_hpu_are_those_of_the_cpu(
    ranks: RankPools, hpu_ranks: RankPools, tmp_path: Path, model: Literal["llama", "bloom"]
) -> None:
    folder = str(commands.write_model(tmp_path, model))
    words = ["--load", folder, "--prompt", "a story", "--max-new-tokens", "12", "--tensor-model-parallel-size"]
    ((expected, _),) = ranks(1)(commands.generate, [*words, "1"])
    found = hpu_ranks(4)(devices.generate, [*words, "2", "--pipeline-model-parallel-size", "2"])
    assert found[0][0] == expected != ""
    for _, _, calls in found:
        for kernel in ("apply_rotary_pos_emb", "FusedRMSNorm"):
            assert (calls[kernel] > 0) == (model == "llama")
