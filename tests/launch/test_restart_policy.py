"""The policy of restarts: budget, delays, crash loops, and which failure is the cause."""

from __future__ import annotations

import signal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.launch.agents.restart_policy import LONGEST_DELAY_S, REPEATS, Failure, RestartPolicy
from megatron.runtime.commands import ABORTED, FAILED, HUNG

KILLED = -int(signal.SIGKILL)


def failed(rank: int = 0, step: int = 7, fault: str = "ValueError: boom", **more: Any) -> Failure:
    return Failure(rank, f"node{rank}", FAILED, step=step, phase="train", state="failed", fault=fault, **more)


def lost(rank: int) -> Failure:
    return Failure(rank, f"node{rank}", FAILED, step=7, phase="train", state="lost", fault="Connection reset by peer")


def policy(max_restarts: int, drawn: float = 0.0) -> RestartPolicy:
    return RestartPolicy(max_restarts, lambda: drawn)


def test_the_first_restart_comes_at_once_and_the_next_ones_later_and_later() -> None:
    for drawn, share in ((0.0, 1.0), (1.0, 0.5)):
        unlucky = policy(10, drawn)
        delays = [unlucky.after([failed(step=step)]).delay_s for step in range(10)]
        assert delays == [share * delay for delay in (0, 1, 2, 4, 8, 16, 32, 60, 60, 60)]
        assert not unlucky.after([failed(step=10)]).restarts


def test_a_later_checkpoint_gives_all_restarts_back() -> None:
    slow = policy(2)
    slow.note_saved(100)
    said = [slow.after([failed(step=101)]).text, slow.after([failed(step=102)]).text]
    assert said[0].endswith(": boom; restart 1 of 2 since the checkpoint of iteration 100")
    assert said[1].endswith("; restart 2 of 2 since the checkpoint of iteration 100, in 1.0 s")
    for iteration in (50, 100, None):  # saved again after a rollback, or an older one resumed
        slow.note_saved(iteration)
    ended = slow.after([failed(step=103)])
    assert (ended.restarts, ended.status) == (False, FAILED)
    assert ended.text.endswith("; all 2 restarts are used up without a new checkpoint")
    slow.note_saved(150)
    again = slow.after([failed(step=151)])
    assert (again.restarts, again.delay_s, again.has_progressed) == (True, 0.0, True)
    assert not slow.after([failed(step=152)]).has_progressed
    assert slow.restarts == 4


@pytest.mark.parametrize("faults", [["ValueError: at 0x7f10", "ValueError: at 0x7e20", "ValueError: at 0xab"]])
def test_the_third_failure_of_one_rank_in_one_step_by_one_error_ends_the_run(faults: list[str]) -> None:
    repeats = policy(10)
    decisions = [repeats.after([failed(3, 41, fault), failed(fault=f"{n}")]) for n, fault in enumerate(faults)]
    assert [decision.restarts for decision in decisions] == [True, True, False]
    assert decisions[2].status == ABORTED
    assert decisions[2].text.startswith(f"rank 3 on node3 ended with status 1 in step 41, train: {faults[2]}: the same")
    assert "Correct its cause, then start the run again" in decisions[2].text


def test_numbers_addresses_and_paths_do_not_make_an_error_another_one() -> None:
    faults = [f"OSError: /data/run{n}/part-{n}.bin is short: {n} of 800{n} bytes at 0x{n}f" for n in range(REPEATS)]
    repeats = policy(10)
    assert [repeats.after([failed(fault=fault)]).restarts for fault in faults] == [True, True, False]
    assert failed(fault="KeyError: 'a'").signature != failed(fault="KeyError: 'b'").signature


@pytest.mark.parametrize(
    "others",
    [
        [failed(1)],  # of another rank
        [failed(step=8)],  # in another step
        [failed(fault="KeyError: 'a'")],
        [failed(may_pass=True)],
        [failed(repeats_another=True)],
        [lost(0)],
        [Failure(0, "node0", HUNG, step=7, state="stuck", waits=True)],
        [Failure(0, "node0", -signal.SIGABRT, step=7, state="lost")],
        [Failure(0, "node0", FAILED)],  # it reported nothing
    ],
)
def test_only_the_same_own_error_that_may_not_pass_is_a_crash_loop(others: list[Failure]) -> None:
    differs = policy(10)
    assert all(differs.after(failures).restarts for failures in ([failed()], others, [failed()], others))
    assert differs.after([failed()]).status == ABORTED, "the third of its kind, whatever came between"


def test_errors_that_may_pass_use_the_budget_alone() -> None:
    weak = policy(5)
    assert [weak.after([failed(may_pass=True)]).restarts for _ in range(6)] == [True] * 5 + [False]


def test_a_killed_rank_repeats_by_the_step_that_it_had_begun() -> None:
    killed = policy(10)
    report = {"rank": 1, "step": 40, "state": "running", "phase": "train"}
    decisions = [killed.after([Failure.of(1, "node1", KILLED, 41, report)]) for _ in range(3)]
    assert [decision.restarts for decision in decisions] == [True, True, False]
    assert "rank 1 on node1 was killed by SIGKILL in step 41, train: the same error 3 times" in decisions[2].text


def test_what_was_wrong_with_a_rank_before_it_failed_is_told_with_its_end() -> None:
    killed = policy(10)
    remark = "in step 38 its own gradients are not finite, its losses are"
    report = {"rank": 1, "step": 40, "state": "running", "phase": "train", "remark": remark}
    failure = Failure.of(1, "node1", KILLED, 41, report)
    assert Failure.from_json(failure.to_json()) == failure
    decisions = [killed.after([failure]) for _ in range(3)]
    assert decisions[0].text == f"rank 1 on node1 was killed by SIGKILL; {remark}; restart 1 of 10"
    assert f"was killed by SIGKILL in step 41, train ({remark}): the same error 3 times" in decisions[2].text


def test_the_rank_that_hangs_is_the_cause_rather_than_those_that_wait_for_it() -> None:
    hang = policy(10)
    ranks = [Failure(n, f"node{n}", HUNG, step=7, phase="train", state="stuck", waits=n != 2) for n in range(4)]
    decisions = [hang.after(ranks) for _ in range(3)]
    assert decisions[0].text.startswith("rank 2 on node2 ended with status 4; restart 1 of 10")
    assert (decisions[2].restarts, decisions[2].status) == (False, ABORTED)


def test_what_only_follows_from_a_failure_is_not_named() -> None:
    failures = [lost(0), failed(1, fault="rank 2 failed: boom", repeats_another=True), failed(2), lost(3)]
    assert policy(3).after(failures).text.startswith("rank 2 on node2 ended with status 1 in step 7, train: ValueError")
    gone = policy(3).after([lost(0), lost(3)], "the node at 10.0.0.2 was lost")
    assert gone.text == "the node at 10.0.0.2 was lost; restart 1 of 3"
    assert policy(3).after([], "the node at 10.0.0.2 was lost") == gone
    assert policy(3).after([failed(2)], "the node at 10.0.0.2 was lost").text.startswith("rank 2")


EVENTS = st.one_of(
    st.integers(0, 50),  # a checkpoint
    st.builds(failed, st.integers(0, 2), st.integers(0, 2), st.sampled_from("abc"), may_pass=st.booleans()),
    st.builds(lost, st.integers(0, 2)),
)


@given(st.integers(1, 6), st.lists(EVENTS, max_size=60), st.floats(0, 1))
def test_what_holds_for_every_course_of_a_run(max_restarts: int, events: list[Any], drawn: float) -> None:
    """Against a plain list of what happened since the last checkpoint later than all before."""
    decides, best, since = policy(max_restarts, drawn), -1, list[Failure]()
    for event in events:
        if isinstance(event, int):
            decides.note_saved(event)
            if event > best:
                best, since = event, []
            continue
        since.append(event)
        decision = decides.after([event])
        alike = [
            one
            for one in since
            if (one.rank, one.step, one.fault) == (event.rank, event.step, event.fault) and not one.may_pass
        ]
        if event.state == "failed" and not event.may_pass and len(alike) >= 3:
            assert (decision.restarts, decision.status) == (False, ABORTED)
        else:
            assert decision.restarts is (len(since) <= max_restarts)
        assert (decision.delay_s == 0) is (len(since) == 1 or not decision.restarts)
        assert decision.delay_s <= min(LONGEST_DELAY_S, 2.0 ** (len(since) - 2))
        if not decision.restarts:
            return


def test_a_failure_survives_its_way_to_the_first_node() -> None:
    failure = Failure.of(2, "node2", KILLED, 9, {"step": 8, "state": "running", "pid": 77, "since_s": 0.1})
    assert Failure.from_json(failure.to_json() | {"unknown": 1}) == failure
    for wrong in ({}, {"rank": [], "host": "", "returncode": 1}, {"rank": 1, "host": "", "returncode": "x"}):
        with pytest.raises((ValueError, TypeError, KeyError)):
            Failure.from_json(wrong)
