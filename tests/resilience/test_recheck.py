"""The verdict on ranks that computed one microbatch and do not agree: pure functions, no processes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import pytest

from megatron.parallel.finite_checks import (
    BACKWARD,
    COMPUTED,
    FORWARD,
    GRADIENT,
    LAYER_TERM,
    LOSS,
    LOSS_FUNCTION,
    LOSS_GRADIENT,
    LOSS_INPUT,
    RECEIVED,
    SENT,
    PassPlace,
)
from megatron.resilience.rank_record import RankPlace
from megatron.resilience.recheck import Number, Recomputed, Traced, WrongRanks, find_wrong

AHEAD, BACK = PassPlace(FORWARD, 0), PassPlace(BACKWARD, 0)
ONE_STAGE = (
    Traced(COMPUTED, AHEAD),
    Traced(LOSS, AHEAD),
    Traced(GRADIENT, BACK, "layers.1.weight"),
    Traced(COMPUTED, BACK),
    Traced(GRADIENT, BACK, "layers.0.weight"),
)
FIRST_STAGE = (Traced(SENT, AHEAD), Traced(RECEIVED, BACK), Traced(GRADIENT, BACK, "layers.0.weight"))
LAST_STAGE = (
    Traced(RECEIVED, AHEAD),
    Traced(LOSS, AHEAD),
    Traced(GRADIENT, BACK, "layers.1.weight"),
    Traced(SENT, BACK),
)

Wrong = Mapping[int, tuple[int, Number]]
"""By rank: the first number that is wrong, and what is added to it and to all behind it."""


def ranks_of(
    replicas: int, tensor: int = 1, stages: int = 1, *, wrong: Wrong, again: Wrong | None = None
) -> list[Recomputed]:
    """Ranks in the order of a layout; `again`: what is wrong in each further pass, if it is something else."""
    found = []
    for rank in range(replicas * tensor * stages):
        stage, replica = rank // (tensor * replicas), rank // tensor % replicas
        place = RankPlace(rank, f"node{rank}", "cpu", stage, rank % tensor, replica, replica)
        traced = ONE_STAGE if stages == 1 else (FIRST_STAGE, LAST_STAGE)[stage]

        def numbers(faults: Wrong, rank: int = rank, count: int = len(traced)) -> tuple[Number, ...]:
            start, added = faults.get(rank, (count, 0))
            return tuple(100 + index + (added if index >= start else 0) for index in range(count))

        second = numbers(wrong if again is None else again)
        found.append(Recomputed(place, traced, numbers(wrong), (second, second)))
    return found


def verdict(ranks: list[Recomputed], stages: int = 1, noise: float = 0.0) -> WrongRanks:
    wrong = find_wrong(ranks, stages, noise)
    assert wrong is not None
    return wrong


def test_the_odd_one_of_three_is_named() -> None:
    wrong = verdict(ranks_of(3, wrong={1: (2, 1)}))
    assert (wrong.ranks, wrong.is_certain) == ((1,), True)
    assert wrong.text == "rank 1 on node1 (cpu): its gradient of layers.1.weight differs"


def test_two_that_agree_are_right_though_two_others_differ_each_in_its_own_way() -> None:
    assert verdict(ranks_of(4, wrong={0: (2, 1), 2: (0, 7)})).ranks == (0, 2)


def test_two_against_two_are_all_named_in_doubt() -> None:
    wrong = verdict(ranks_of(4, wrong={0: (2, 1), 2: (2, 1)}))
    assert (wrong.ranks, wrong.is_certain) == ((0, 1, 2, 3), False)


def test_of_two_the_one_that_does_not_repeat_itself_is_named() -> None:
    wrong = verdict(ranks_of(2, wrong={0: (4, 1)}, again={}))
    assert (wrong.ranks, wrong.is_certain) == ((0,), True)
    assert "layers.0.weight differs, and it did not repeat its own result" in wrong.text
    # and also one whose first result was right
    assert verdict(ranks_of(2, wrong={1: (2, 1)}, again={1: (2, 1), 0: (3, 9)})).ranks == (0,)


def test_a_rank_that_does_not_repeat_itself_in_the_last_pass_alone_is_named() -> None:
    ranks = ranks_of(2, wrong={0: (2, 1)})
    wrong_once = dataclasses.replace(ranks[0], again=(ranks[0].numbers, ranks[1].numbers))
    wrong = verdict([wrong_once, ranks[1]])
    assert (wrong.ranks, wrong.is_certain) == ((0,), True)


def test_no_rank_is_certain_to_be_wrong_where_another_does_not_repeat_itself_either() -> None:
    # of four, two do not repeat themselves
    wrong = verdict(ranks_of(4, wrong={0: (2, 1)}, again={3: (4, 5)}))
    assert (wrong.ranks, wrong.is_certain) == ((0, 3), False)
    assert "may be kernels" in wrong.doubt
    # nor where one does, and differs from most
    assert not verdict(ranks_of(4, wrong={0: (2, 1)}, again={0: (2, 1), 3: (4, 5)})).is_certain
    # ranks of one replica get what is wrong from each other
    neighbours = {3: (0, 1), 2: (1, 5)}
    wrong = verdict(ranks_of(3, tensor=2, wrong=neighbours, again={}))
    assert (wrong.ranks, wrong.is_certain) == ((3,), True)


@pytest.mark.parametrize(
    ("traced", "what"),
    [
        (Traced(LOSS_INPUT, AHEAD), "the log-probabilities that its loss function is given differ"),
        (Traced(LOSS_FUNCTION, AHEAD), "the result of its loss function differs"),
        (Traced(LOSS_GRADIENT, BACK), "the gradient of its loss function differs"),
        (Traced(LAYER_TERM, AHEAD), "a loss term of its layers differs"),
        (Traced("kind of a later version", BACK), "its kind of a later version in the backward pass differs"),
    ],
)
def test_each_kind_of_number_has_words(traced: Traced, what: str) -> None:
    ranks = [dataclasses.replace(each, traced=(traced,) * 5) for each in ranks_of(3, wrong={1: (0, 1)})]
    assert verdict(ranks).text == f"rank 1 on node1 (cpu): {what}"


def test_a_tensor_parallel_neighbour_that_got_the_wrong_sum_is_not_named() -> None:
    """Ranks 2 and 3 are a replica: 3 computes a wrong part of the first sum, and both go on with the sum."""
    wrong = verdict(ranks_of(3, tensor=2, wrong={3: (0, 1), 2: (1, 5)}))
    assert wrong.ranks == (3,)
    assert "its part of sum 1 of 1 in the forward pass differs" in wrong.text


@pytest.mark.parametrize(
    ("wrong", "named", "what"),
    [
        # ranks 0, 1, 2 are the first stage; 4 is the last one of replica 1
        ({1: (0, 1), 4: (0, 3)}, (1,), "the activations that it sends differ"),
        ({4: (2, 1), 1: (1, 3)}, (4,), "its gradient of layers.1.weight differs"),
        ({4: (0, 3), 1: (1, 3)}, (4,), "and those that were sent do not: a link"),
        ({1: (1, 3)}, (1,), "the gradients that came differ, and those that were sent do not: a link"),
    ],
)
def test_a_stage_that_received_what_is_wrong_is_not_named(wrong: Wrong, named: tuple[int, ...], what: str) -> None:
    found = verdict(ranks_of(3, stages=2, wrong=wrong), stages=2)
    assert found.ranks == named
    assert what in found.text


def test_no_rank_is_named_where_most_do_not_repeat_their_results() -> None:
    unsteady = {0: (1, 3), 1: (1, 4), 2: (1, 5)}
    assert find_wrong(ranks_of(4, wrong={}, again=unsteady), 1) is None
    assert find_wrong(ranks_of(2, wrong={}, again={0: (1, 3), 1: (1, 4)}), 1) is None


def test_norms_within_the_noise_of_the_device_agree() -> None:
    """A device that states noise is compared by norms: what lies within it names no rank, what does not is named."""
    noisy = {0: (0, 1e-4), 1: (0, -1e-4), 2: (1, 2e-4)}
    assert find_wrong(ranks_of(4, wrong=noisy, again={}), 1, noise=1e-5) == WrongRanks((), "")
    assert verdict(ranks_of(4, wrong=noisy | {3: (2, 1.0)}, again=noisy | {3: (2, 1.0)}), noise=1e-5).ranks == (3,)


def test_not_a_number_is_a_difference_unless_all_have_it() -> None:
    nan = float("nan")
    assert verdict(ranks_of(3, wrong={1: (2, nan)}), noise=1e-5).ranks == (1,)
    assert find_wrong(ranks_of(2, wrong={0: (2, nan), 1: (2, nan)}), 1, noise=1e-5) == WrongRanks((), "")
