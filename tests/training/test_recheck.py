"""Ranks that compute wrongly in silence: one microbatch is computed by all data-parallel ranks, and compared."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from megatron.parallel.context import ParallelContext
from megatron.settings.command_line import parse_arguments
from megatron.settings.validation import check
from megatron.tasks.preference_losses import mean_kl
from megatron.training.recheck import PassTrace
from tests import runs
from tests.ranks import RankPools
from tests.training import rechecked

LAYOUTS = {
    "DP4": "",
    "DP2 TP2": "--tensor-model-parallel-size 2",
    "DP2 TP2 SP": "--tensor-model-parallel-size 2 --sequence-parallel",
    "DP2 PP2": "--pipeline-model-parallel-size 2",
    "DP4 ZeRO-1 bf16": "--zero-stage 1 --bf16",
    "DP4 ZeRO-2": "--zero-stage 2",
    "DP2 TP2 ZeRO-2 bf16": "--tensor-model-parallel-size 2 --zero-stage 2 --bf16",
    "DP2 PP2 zero-bubble": "--pipeline-model-parallel-size 2 --pipeline-schedule zero-bubble",
}
SECOND_CHECK = 4 * 2 + 2
"""Its first pass, after four steps of two microbatches, with an interval of 2: the first check has two passes."""
FIRST, LAST = "layers.0.mlp.down", "layers.1.mlp.down"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runs.write_dataset(tmp_path_factory.mktemp("data") / "corpus")


def run(ranks: RankPools, arguments: str, *fault: Any, world_size: int = 4) -> list[dict[str, Any]]:
    return ranks(world_size)(rechecked.run, arguments, *fault)


@pytest.mark.parametrize("direction", ["forward", "backward", "weight"])
def test_a_rank_that_flips_a_bit_in_each_pass_is_named_within_n_steps(
    ranks: RankPools, data: Path, direction: str
) -> None:
    told = run(ranks, f"--data-path {data} --train-iters 9 --recheck-interval 3", 2, LAST, direction, None)
    assert len({each["fault"] for each in told}) == 1
    assert "TrainingAborted: recheck after iteration 3: ranks do not compute the same" in told[0]["fault"]
    (row,) = told[0]["rows"]
    assert (row["ranks"], row["is_certain"]) == ([2], True)
    assert "rank 2 on " in row["reason"]
    # a loss alone would not show it: rounded to float32 it is often that of the others
    where = r"its gradient of layers\.|its loss differs"
    if direction == "forward":
        where += "|its gradient of final_norm"  # the first that reads what the last layer gives
    assert re.search(where, row["reason"])
    assert [bool(each["notes"]) for each in told] == [False, False, True, False]
    assert told[0]["alerts"] == ["wrong"]


@pytest.mark.parametrize(
    ("layout", "rank", "layer", "direction", "what"),
    [
        ("DP2 TP2", 3, FIRST, "forward", "its part of sum"),
        ("DP2 PP2", 1, FIRST, "forward", "the activations that it sends differ"),
        pytest.param("DP2 PP2", 3, LAST, "backward", "its gradient of layers.1", marks=pytest.mark.slow),
        pytest.param("DP2 TP2", 0, LAST, "backward", "its ", marks=pytest.mark.slow),
        pytest.param("DP2 TP2 SP", 1, FIRST, "forward", "its part of sum", marks=pytest.mark.slow),
        pytest.param("DP2 TP2 SP", 2, LAST, "weight", "its gradient of layers.1.mlp.down", marks=pytest.mark.slow),
        pytest.param("DP2 PP2 zero-bubble", 0, FIRST, "weight", "its gradient of layers.0", marks=pytest.mark.slow),
        pytest.param("DP2 TP2 ZeRO-2 bf16", 1, FIRST, "backward", "its ", marks=pytest.mark.slow),
    ],
)
def test_of_two_ranks_the_one_that_does_not_repeat_its_own_result_is_named(
    ranks: RankPools, data: Path, layout: str, rank: int, layer: str, direction: str, what: str
) -> None:
    """It flips a bit in the check after the fourth step alone, neither in the one before nor when it is repeated."""
    passes = (SECOND_CHECK,)
    flags = f"--data-path {data} --train-iters 9 --recheck-interval 2 {LAYOUTS[layout]}"
    told = run(ranks, flags, rank, layer, direction, passes)
    assert "TrainingAborted: recheck after iteration 4: " in told[0]["fault"]
    (row,) = told[0]["rows"]
    assert (row["ranks"], row["is_certain"]) == ([rank], True)
    assert f"rank {rank} on " in row["reason"]
    assert what in row["reason"]
    assert row["reason"].endswith("and it did not repeat its own result")


@pytest.mark.parametrize(
    ("layout", "rank", "suspects"),
    [("DP2 TP2", 3, [1, 3]), pytest.param("DP2 PP2", 2, [2, 3], marks=pytest.mark.slow)],
)
def test_of_two_ranks_that_repeat_their_results_both_are_named(
    ranks: RankPools, data: Path, layout: str, rank: int, suspects: list[int]
) -> None:
    layer = LAST if "PP2" in layout else FIRST
    flags = f"--data-path {data} --train-iters 9 --recheck-interval 2 {LAYOUTS[layout]}"
    told = run(ranks, flags, rank, layer, "forward", None)
    assert "after iteration 2: " in told[0]["fault"]
    assert "each repeats its own result, so that it is unknown which of them is wrong" in told[0]["fault"]
    assert (told[0]["rows"][0]["ranks"], told[0]["rows"][0]["is_certain"]) == (suspects, False)


def test_a_passing_fault_that_changes_the_choice_of_experts_stays_in_its_replica(ranks: RankPools, data: Path) -> None:
    """Shares of the balance loss are those of one replica in a check: summed, they would be wrong on both."""
    experts = "--architecture mixtral --num-experts 4 --moe-router-topk 1 --moe-aux-loss-coeff 0.1"
    flags = f"--data-path {data} --train-iters 9 --recheck-interval 2 {experts}"
    # a large number: one token goes to other experts
    fault = (1, "layers.0.attention.dense", "forward", (SECOND_CHECK,), 30)
    told = run(ranks, flags, *fault, world_size=2)
    assert "TrainingAborted: recheck after iteration 4: " in told[0]["fault"]
    assert (told[0]["rows"][0]["ranks"], told[0]["rows"][0]["is_certain"]) == ([1], True)


def test_a_term_of_ktos_divergence_stays_in_its_replica() -> None:
    # not a group: a collective would raise
    ctx = dataclasses.replace(ParallelContext.single(), batch_group=cast(Any, object()))
    ctx.state.is_recheck = True
    assert float(mean_kl([torch.tensor([3.0, 5.0])], [torch.tensor([1.0, 1.0])], 4.0, ctx)) == 1.5


def test_wrong_logits_of_labels_are_found_where_they_were_computed(ranks: RankPools, data: Path) -> None:
    """Not on the tensor-parallel ranks that they are joined on. Both replicas repeat theirs, so one rank of either."""
    flags = f"--data-path {data} --train-iters 9 --recheck-interval 2 {LAYOUTS['DP2 TP2']}"
    told = ranks(4)(rechecked.run_with_wrong_label_logits, flags, 3)
    assert (told[0]["rows"][0]["ranks"], told[0]["rows"][0]["is_certain"]) == ([1, 3], False)


def test_the_check_ends_where_a_rank_does_not_repeat_its_result_in_the_first_one(ranks: RankPools, data: Path) -> None:
    flags = f"--data-path {data} --train-iters 6 --recheck-interval 2"
    told = run(ranks, flags, 2, LAST, "weight", (3,))  # after two steps of a microbatch, when it is repeated
    assert [(each["fault"], each["rows"], each["checks"]) for each in told] == [("", [], 2)] * 4
    (warning,) = [text for text in told[0]["messages"] if "recheck" in text]
    assert "recheck after iteration 2: rank 2 did not get the same results again" in warning
    assert "the run goes on without the check" in warning


def test_a_step_that_a_rollback_leaves_out_is_not_checked(ranks: RankPools, data: Path) -> None:
    flags = f"--data-path {data} --train-iters 4 --recheck-interval 2"
    told = ranks(2)(rechecked.run_that_leaves_out, flags, 8)
    # the second step is left out, so the third is checked, twice as the first of the run; then the fourth
    assert [(each["fault"], each["begins"]) for each in told] == [("", [16, 16, 24])] * 2


def test_a_read_error_of_one_rank_ends_all(ranks: RankPools, data: Path) -> None:
    flags = f"--data-path {data} --train-iters 4 --recheck-interval 2"
    told = ranks(2)(rechecked.run_that_cannot_read, flags, 1)
    assert all("sample 5 is damaged" in each["fault"] for each in told)
    assert "OtherRankFailed: rank 1 on " in told[0]["fault"]
    assert [each["checks"] for each in told] == [0, 0]


@pytest.mark.slow
def test_inner_stages_read_nothing_and_are_checked(ranks: RankPools, data: Path) -> None:
    experts = "--architecture mixtral --num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 0.01"
    flags = f"--data-path {data} --train-iters 5 --num-layers 4 --pipeline-model-parallel-size 4 {experts}"
    plain = ranks(8)(rechecked.bits_of_run, flags)
    checked = ranks(8)(rechecked.bits_of_run, f"{flags} --recheck-interval 2")
    for with_check, without in zip(checked, plain, strict=True):
        assert (with_check["losses"], with_check["weights"]) == (without["losses"], without["weights"])
        assert with_check["checks"] == 3
    # the second rank of the third of four stages
    fault = (5, "layers.2.attention.dense", "forward", (SECOND_CHECK,))
    told = run(ranks, f"{flags} --recheck-interval 2", *fault, world_size=8)
    assert (told[0]["rows"][0]["ranks"], told[0]["rows"][0]["is_certain"]) == ([5], True)
    assert [each["reads"] for each in told] == [True] * 2 + [False] * 4 + [True] * 2


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["DP4 TP2", "DP4 PP2"])
def test_of_four_replicas_of_two_ranks_the_rank_is_named(ranks: RankPools, data: Path, layout: str) -> None:
    size = {"DP4 TP2": "--tensor-model-parallel-size 2", "DP4 PP2": "--pipeline-model-parallel-size 2"}[layout]
    flags = f"--data-path {data} --train-iters 5 --recheck-interval 2 {size}"
    for rank, layer, direction in ((5, LAST, "backward"), (4, LAST, "forward"), (2, FIRST, "weight")):
        holder = rank if layout == "DP4 TP2" else {LAST: 4 + rank % 4, FIRST: rank % 4}[layer]
        told = run(ranks, flags, holder, layer, direction, None, world_size=8)
        assert (told[0]["rows"][0]["ranks"], told[0]["rows"][0]["is_certain"]) == ([holder], True), direction


def test_a_weight_that_has_changed_on_one_rank_is_not_taken_for_a_wrong_product(ranks: RankPools, data: Path) -> None:
    flags = f"--data-path {data} --train-iters 6 --recheck-interval 3"
    told = ranks(4)(rechecked.run_with_flipped_weight, flags, 1, f"{FIRST}.weight", 16)
    assert (told[0]["rows"][0]["ranks"], told[0]["rows"][0]["is_certain"]) == ([1], True)
    assert "its weights differ, since an earlier step" in told[0]["fault"]


@pytest.mark.slow
def test_on_a_device_that_states_noise_what_lies_within_it_is_no_fault(ranks: RankPools, data: Path) -> None:
    flags, exponent = f"--data-path {data} --train-iters 4 --recheck-interval 2", 29
    small = ranks(4)(rechecked.run_with_noise, flags, 1e-3, 3, FIRST, "forward", None)
    assert [(each["fault"], each["rows"], each["checks"]) for each in small] == [("", [], 3)] * 4
    large = ranks(4)(rechecked.run_with_noise, flags, 1e-3, 3, FIRST, "forward", None, exponent)
    assert large[0]["rows"][0]["ranks"] == [3]
    # the device states it because a norm of the same differs: without that, the small one is a fault
    exact = ranks(4)(rechecked.run_with_noise, flags, 0.0, 3, FIRST, "forward", None)
    assert exact[0]["rows"][0]["ranks"] == [3]


def test_numbers_of_a_pass_show_bits_signs_and_order() -> None:
    one, two = torch.arange(12.0).view(3, 4), torch.arange(12.0).view(3, 4) + 1

    def numbers(*tensors: torch.Tensor) -> tuple[float, ...]:
        trace = PassTrace(noise=0.0)
        trace.before_pass(iter(tensors), "weights")
        trace.gradient("weight", tensors[0])
        return trace.numbers()

    assert numbers(one, two) == numbers(one.clone(), two.clone())
    # a sum of the numbers would show none of these
    for others in ((two, one), (one.flip(0), two), (one.flip(1), two)):
        assert numbers(*others)[0] != numbers(one, two)[0]
    assert numbers(torch.tensor([-0.0, 1.0])) != numbers(torch.tensor([0.0, 1.0]))
    for bit in range(32):
        assert numbers(rechecked.flipped(one, bit)) != numbers(one)


def test_the_run_goes_on_where_it_is_to(ranks: RankPools, data: Path) -> None:
    flags = f"--data-path {data} --train-iters 4 --recheck-interval 2 --recheck-action log"
    told = run(ranks, flags, 0, FIRST, "weight", None)
    assert [each["fault"] for each in told] == [""] * 4
    assert [row["iteration"] for row in told[0]["rows"]] == [2, 4]
    assert told[0]["alerts"] == ["wrong", "wrong"]
    assert sum("The run goes on (recheck_action=log)" in text for text in told[0]["messages"]) == 2


@pytest.mark.parametrize(
    "layout",
    [
        "DP4",
        "DP2 TP2 SP dropout",
        "DP2 PP2 dropout",
        *(pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS if name not in ("DP4", "DP2 TP2 SP")),
    ],
)
def test_a_clean_run_names_no_rank_and_is_bit_for_bit_that_without_the_check(
    ranks: RankPools, data: Path, layout: str
) -> None:
    flags = f"--data-path {data} --train-iters 5 {LAYOUTS[layout.removesuffix(' dropout')]}"
    if layout.endswith("dropout"):
        flags += " --hidden-dropout 0.1 --attention-dropout 0.1"
    plain = ranks(4)(rechecked.bits_of_run, flags)
    checked = ranks(4)(rechecked.bits_of_run, f"{flags} --recheck-interval 2")
    for with_check, without in zip(checked, plain, strict=True):
        assert with_check["losses"] == without["losses"]
        assert with_check["weights"] == without["weights"]
        # the cost: one microbatch every second step, one more in the first check, and nothing else
        assert (with_check["checks"], without["checks"]) == (3, 0)
        per_microbatch = without["passes"] / (5 * microbatches(layout))
        assert with_check["passes"] - without["passes"] == 3 * per_microbatch


@pytest.mark.slow
def test_no_rank_is_named_in_many_clean_steps(ranks: RankPools, data: Path) -> None:
    model = "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --hidden-dropout 0.1 --seq-length 8"
    flags = f"--data-path {data} --train-iters 200 --log-interval 100 --eval-iters 0 --split 1,0,0 {model}"
    batches = "--micro-batch-size 1 --global-batch-size 2"
    told = run(ranks, f"{flags} {batches} --recheck-interval 1", world_size=2)
    assert [(each["fault"], each["rows"]) for each in told] == [("", [])] * 2
    # one pass a step: none but the first was repeated
    assert [each["checks"] for each in told] == [201] * 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "flags"),
    [
        (2, "--architecture mixtral --num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 0.01"),
        (2, "--lora-rank 4 --lora-dropout 0.1"),
        (2, "--optimizer muon"),
        (2, "--zero-stage 2 --offload-optimizer"),
        (2, "--recompute-granularity full --hidden-dropout 0.1"),
        (2, "--untie-embeddings-and-output-weights --bf16 --grad-accum-dtype fp32"),
    ],
)
def test_other_kinds_of_models_and_optimizers_train_as_without_the_check(
    ranks: RankPools, data: Path, world_size: int, flags: str
) -> None:
    flags = f"--data-path {data} --train-iters 5 {flags}"
    plain = ranks(world_size)(rechecked.bits_of_run, flags)
    checked = ranks(world_size)(rechecked.bits_of_run, f"{flags} --recheck-interval 1")
    for with_check, without in zip(checked, plain, strict=True):
        assert with_check["losses"] == without["losses"]
        assert with_check["weights"] == without["weights"]
        assert with_check["checks"] == 6


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        ("--zero-stage 3", "zero_stage=3"),
        ("--context-parallel-size 2", "context_parallel_size=2"),
        ("--torch-compile", "torch_compile"),
    ],
)
def test_layouts_that_the_pass_does_not_compute_are_refused_by_name(flags: str, name: str) -> None:
    arguments = f"{runs.TINY} --data-path x --train-iters 8 --recheck-interval 4 {flags}"
    config, _ = parse_arguments(arguments.split())
    assert f"recheck_interval=4 does not run with {name}; leave one of them out" in check(config, 4)


def test_one_data_parallel_rank_is_refused() -> None:
    config, _ = parse_arguments([*runs.TINY.split(), *"--data-path x --train-iters 8 --recheck-interval 4".split()])
    assert "recheck_interval=4 compares data-parallel ranks, of which there is 1; use more ranks, or 0" in check(
        config, 1
    )
    assert check(config, 2) == []


def microbatches(layout: str) -> int:
    """Of each rank, in a step."""
    return 1 if layout.startswith("DP4") else 2
