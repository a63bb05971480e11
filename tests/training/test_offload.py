"""Activations in host memory, on the stand-in's device: numbers bit for bit, memory as the plan has it, no wait."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.plan.memory import memory_by_stage
from megatron.settings.command_line import parse_arguments
from megatron.settings.validation import check
from tests import runs
from tests.plan.configs import copies
from tests.ranks import RankPools
from tests.tasks import chats
from tests.training import offloads
from tests.training.test_experts import FLAGS as EXPERTS

STEPS = 2
LLAMA = "--architecture llama --position-embedding-type rope --num-query-groups 2 --ffn-hidden-size 96"
BLOOM = "--architecture bloom --position-embedding-type alibi"
COMMON = (
    f"--vocab-size 256 --train-iters {STEPS} --split 1,0,0 --log-memory-interval 0 --micro-batch-size 1 "
    "--global-batch-size 8 --device hpu"
)
SMALL = f"{COMMON} --num-layers 4 --seq-length 32"
PP2, TP2 = "--pipeline-model-parallel-size 2", "--tensor-model-parallel-size 2 --sequence-parallel"
FULL, SELECTIVE = "--recompute-granularity full", "--recompute-granularity selective --recompute-modules"
PACKED = "--task sft --max-batch-len 64 --packing step --no-compile-ahead"


@pytest.mark.parametrize(
    ("ranks_needed", "flags", "mode"),
    [
        (2, f"{LLAMA} {PP2} {FULL} --bf16", "lazy"),
        (2, f"{LLAMA} {PP2} {PACKED} --pipeline-schedule zero-bubble --lora-rank 4", "lazy"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (2, f"{LLAMA} {TP2} {SELECTIVE} layernorm mlp_act core_attn", "eager"),
                (2, f"{LLAMA} --zero-stage 3 --bf16", "lazy"),
                (2, f"{LLAMA} --context-parallel-size 2", "lazy"),
                (4, f"{BLOOM} {PP2} {TP2} --hidden-dropout 0.1", "lazy"),
                # two layers a chunk: an own schedule holds what a chunk receives, the input of its first layer
                (2, f"{LLAMA} {PP2} --num-virtual-stages-per-pipeline-rank 2 {FULL} --num-layers 8", "eager"),
                (2, f"{LLAMA} {PP2} --pipeline-schedule zero-bubble {SELECTIVE} mlp", "lazy"),
                (2, f"{LLAMA} --zero-stage 2 --bf16 {PACKED}", "eager"),
                (2, f"{LLAMA} --zero-stage 3 {SELECTIVE} layernorm mlp_act {PACKED} --lora-rank 4", "lazy"),
                (2, f"{EXPERTS} --expert-model-parallel-size 2 {SELECTIVE} mlp_act", "lazy"),
                (2, f"{EXPERTS} {PP2} {FULL} --num-layers 4", "eager"),
            )
        ),
    ],
)
def test_numbers_are_those_without_it(
    hpu_ranks: RankPools, tmp_path: Path, ranks_needed: int, flags: str, mode: str
) -> None:
    data = chats.write_chats(tmp_path / "data", chats.some_lengths(24, 30))
    if PACKED not in flags:
        data = runs.write_dataset(tmp_path / "text", 200)
    numbers, measured = [], []
    for option in ("", "--offload-activations"):
        folder = tmp_path / f"run{option}"
        command = f"{SMALL} {flags} --data-path {data} --results-dir {folder} {option}"
        found = hpu_ranks(ranks_needed)(offloads.train, command, lazy=mode == "lazy")
        assert {fault for fault, *_ in found} == {""}
        numbers.append([(row["lm_loss"], row["grad_norm"]) for row in runs.rows(folder)])
        measured.append(found)
    assert len(numbers[0]) == STEPS
    assert numbers[0] == numbers[1]
    for (_, calls, before), (_, calls_offloaded, after) in zip(*measured, strict=True):
        assert all(offloaded.peak <= step.peak for offloaded, step in zip(after, before, strict=True))
        for step, one, other in zip(after, calls, calls_offloaded, strict=True):
            assert step.moved > 0
            # all copies run behind the operators, on both ways
            for wait in ("host_read", "host_write", "synchronize"):
                assert one[wait] == other[wait], wait
            assert other["read_behind"] > one["read_behind"]
        if PACKED not in flags:  # rows of other lengths take other buffers
            assert after[0].buffers == after[1].buffers


@pytest.mark.parametrize(
    ("ranks_needed", "flags"),
    [
        (1, f"{SELECTIVE} core_attn"),
        pytest.param(2, f"{PP2} {FULL}", marks=pytest.mark.slow),
        pytest.param(2, f"{PP2} {SELECTIVE} core_attn", marks=pytest.mark.slow),
    ],
)
def test_what_it_saves_is_what_the_plan_says(
    hpu_ranks: RankPools, tmp_path: Path, ranks_needed: int, flags: str
) -> None:
    data = runs.write_dataset(tmp_path / "text", 400)
    # the stand-in's kernels of attention and RMSNorm keep more than Habana's
    command = f"{COMMON} {BLOOM} --num-layers 6 --hidden-size 64 --seq-length 256 --hidden-dropout 0 {flags}"
    measured, planned = [], []
    for option in ("", "--offload-activations"):
        folder = tmp_path / f"run{option}"
        given = f"{command} --data-path {data} --results-dir {folder} {option}"
        found = hpu_ranks(ranks_needed)(offloads.train, given)
        assert {fault for fault, *_ in found} == {""}
        measured.append([steps[1] for _, _, steps in found])
        config, _ = parse_arguments([*runs.TINY.split(), *given.split()])
        planned.append(memory_by_stage(config, copies(config, 1)))
    for before, after, stage, offloaded in zip(*measured, *planned, strict=True):
        saved = stage.memory.total - offloaded.memory.total
        assert saved > 0
        assert before.peak - after.peak == pytest.approx(saved, rel=0.1)
        assert after.buffers == pytest.approx(offloaded.host_bytes, rel=0.1)
        assert after.moved == pytest.approx(8 * offloaded.moved_bytes, rel=0.1)


def test_weights_small_tensors_and_what_layers_share_stay(hpu_ranks: RankPools) -> None:
    moved, are_equal = hpu_ranks(1)(offloads.moved_by_layers)[0]
    # hidden, which is a leaf in the first layer; made and its view; small, weight and its view; table
    assert [kinds[:6] for kinds in moved] == [[index > 0, True, True, False, False, False] for index in range(3)]
    assert [kinds[6] for kinds in moved] == [True, False, False]
    assert are_equal


def test_a_device_whose_memory_is_the_hosts_is_refused() -> None:
    config, _ = parse_arguments(f"{SMALL} --data-path none --offload-activations --device cpu".split())
    assert [fault for fault in check(config, 1) if fault.startswith("offload_activations")]
