"""A planted NaN is attributed to the one rank that it was planted on, though all ranks see it after the sums."""

from __future__ import annotations

import pytest

from megatron.parallel.finite_checks import BACKWARD, FORWARD, GRADIENT, RECEIVED, SENT, UPDATE, FirstBad, PassPlace
from megatron.resilience.attribution import DATA, DEVICE, LINK, WEIGHTS, find_origin
from megatron.resilience.rank_record import RankPlace, RankRecord
from tests.ranks import RankPools
from tests.training import layouts, planted

TP, PP = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2"
CP = "--context-parallel-size 2"
SLOW = pytest.mark.slow
# layout, its number of ranks, and a parameter of each rank
LAYOUTS = [
    pytest.param("", 2, id="DP2", marks=SLOW),
    pytest.param("--zero-stage 1 --bf16", 2, id="DP2 ZeRO-1", marks=SLOW),
    pytest.param("--zero-stage 2", 2, id="DP2 ZeRO-2", marks=SLOW),
    pytest.param("--zero-stage 3", 2, id="DP2 ZeRO-3"),
    pytest.param("--zero-stage 2 --bf16 --offload-optimizer", 2, id="DP2 ZeRO-2 offload", marks=SLOW),
    pytest.param("--zero-stage 1 --offload-optimizer", 2, id="DP2 ZeRO-1 offload", marks=SLOW),
    pytest.param("--zero-stage 3 --bf16 --offload-optimizer", 2, id="DP2 ZeRO-3 offload", marks=SLOW),
    pytest.param(TP, 2, id="TP2"),
    pytest.param(f"{TP} --sequence-parallel", 2, id="TP2 SP", marks=SLOW),
    pytest.param(PP, 2, id="PP2", marks=SLOW),
    pytest.param(f"{PP} {TP}", 4, id="PP2 TP2"),
    pytest.param(CP, 2, id="CP2"),
    pytest.param(f"{CP}", 2, id="CP2 ring", marks=SLOW),
    pytest.param(f"{CP} {TP} --sequence-parallel --zero-stage 1", 4, id="CP2 TP2 SP ZeRO-1", marks=SLOW),
    pytest.param(f"{CP} {PP}", 4, id="CP2 PP2 ring", marks=SLOW),
    pytest.param(f"{PP} --pipeline-schedule zero-bubble", 4, id="PP2 DP2 zero-bubble", marks=SLOW),
    pytest.param(f"{TP} --sequence-parallel --fp16 --initial-loss-scale 1", 4, id="TP2 SP DP2 fp16", marks=SLOW),
]


@pytest.mark.parametrize(("flags", "world_size"), LAYOUTS)
def test_a_nan_is_attributed_to_its_rank_alone(ranks: RankPools, flags: str, world_size: int) -> None:
    stages = 2 if PP in flags else 1
    last = world_size - 1
    name = f"layers.{3 if stages == 2 else 0}.mlp.up.weight"
    norm = f"layers.{3 if stages == 2 else 0}.attention_norm.weight"
    faults = [("gradient", last, name), ("gradient", last, norm), ("forward", last, ""), ("backward", last, "")]
    if stages == 2:  # the earlier stage only sends on what is bad
        faults += [("forward", 0, ""), ("backward", 0, "")]
    returned = ranks(world_size)(planted.origins, f"{layouts.MODELS['bloom_learned']} {flags}", faults)
    for rank, found in enumerate(returned):
        for (fault, planted_on, _), (kind, ranks_named, text, is_loss_finite) in zip(faults, found, strict=True):
            assert ranks_named == (planted_on,), f"{fault} on rank {planted_on}, as rank {rank} tells it: {text}"
            assert is_loss_finite == (fault != "forward")
            assert (kind == DEVICE) == (fault != "forward")
            assert text.startswith(f"rank {planted_on} on node{planted_on}: ")


EXPERTS = (
    "--architecture llama --position-embedding-type rope --num-layers 2 --ffn-hidden-size 48 --num-experts 4 "
    "--moe-aux-loss-coeff 0.01"
)
EP = "--expert-model-parallel-size 2"


@pytest.mark.parametrize(
    ("flags", "world_size", "own"),
    [
        # the rank that holds the expert alone; and one of two that do, which exchange tokens with others
        pytest.param(EP, 2, 3, id="EP2"),
        pytest.param(EP, 4, 2, id="EP2 DP2"),
        pytest.param(f"{TP} {EP}", 4, 2, id="EP2 TP2", marks=SLOW),
        pytest.param(f"{TP} --sequence-parallel {EP} --expert-tensor-parallel-size 1", 2, 3, id="EP2 in TP2"),
        pytest.param(f"{PP} {EP} --zero-stage 1", 4, 3, id="PP2 EP2", marks=SLOW),
    ],
)
def test_a_nan_of_an_expert_is_attributed_to_the_rank_that_holds_it(
    ranks: RankPools, flags: str, world_size: int, own: int
) -> None:
    last = world_size - 1
    parameter = f"layers.1.mlp.experts.{own}.down.weight"
    faults = [("expert forward", last, ""), ("expert backward", last, ""), ("gradient", last, parameter)]
    faults += [("expert forward", 0, "")]
    for found in ranks(world_size)(planted.origins, f"{EXPERTS} {flags}", faults):
        for (fault, planted_on, _), (_, ranks_named, text, _) in zip(faults, found, strict=True):
            assert ranks_named == (planted_on,), f"{fault} on rank {planted_on}: {text}"


def record(rank: int, first: FirstBad | None, *weights: str, stage: int = 0, replica: int = 0) -> RankRecord:
    return RankRecord(
        RankPlace(rank, f"node{rank}", "cpu", stage, 0, replica, replica), first=first, bad_weights=weights
    )


def test_what_arrives_bad_and_was_sent_whole_is_the_links() -> None:
    received = FirstBad(0, RECEIVED, PassPlace(FORWARD, 1))
    sent = FirstBad(3, SENT, PassPlace(FORWARD, 1))
    later = FirstBad(5, RECEIVED, PassPlace(BACKWARD, 1))
    only = find_origin([record(0, None), record(1, received, stage=1)], 2)
    assert (only.kind, only.ranks) == (LINK, (1,))
    # the sender itself was bad
    assert find_origin([record(0, sent), record(1, received, stage=1)], 2).ranks == (0,)
    # what the link damaged comes back in the backward pass
    assert find_origin([record(0, later), record(1, received, stage=1)], 2).ranks == (1,)


def test_weights_are_the_devices_unless_all_copies_are_bad() -> None:
    first = FirstBad(0, GRADIENT, PassPlace(UPDATE))
    one = find_origin([record(0, first), record(1, first, "layers.0.mlp.up.weight", replica=1)], 1)
    assert (one.kind, one.ranks) == (DEVICE, (1,))
    both = find_origin([record(rank, first, "output.weight", replica=rank) for rank in (0, 1)], 1)
    assert (both.kind, both.ranks) == (WEIGHTS, (0, 1))


def test_a_sum_that_no_rank_explains_names_none() -> None:
    found = find_origin([record(0, None), record(1, None, replica=1)], 1)
    assert (found.kind, found.ranks) == (LINK, ())


def test_a_loss_that_is_bad_from_good_activations_is_the_datas(ranks: RankPools) -> None:
    returned = ranks(2)(planted.origins, layouts.MODELS["bloom_learned"], [("loss", 1, "")])
    assert [(kind, named) for ((kind, named, _, _),) in returned] == [(DATA, (1,))] * 2
