"""Ranks killed at whatever moment: a supervised run ends with the weights of the undisturbed one, bit for bit."""

from __future__ import annotations

import random
import re
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from benchmarks import chaos
from tests import runs, strangers
from tests.ranks import RankPools

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="finds the ranks as Linux shows them")

EXACT = ("iteration", "consumed_samples", "lm_loss", "learning_rate", "grad_norm")


def undisturbed(ranks: RankPools, data: Path, folder: Path, num_steps: int, *more: str) -> None:
    flags = " ".join([*chaos.flags_of(data, folder, num_steps, save_interval=5), *more])
    assert set(ranks(chaos.RANKS)(runs.train, flags, timeout_s=600.0)) == {""}


def assert_equal_runs(one: Path, other: Path) -> None:
    assert chaos.differing(one / "saved", other / "saved") == []
    steps = [[[row[key] for key in EXACT] for row in chaos.steps_of(folder / "results")] for folder in (one, other)]
    assert steps[0] == steps[1]


def while_a_save_is_under_way(run: chaos.Disturbed, saved: Path) -> bool:
    return any(".partial-" in path.name for path in saved.iterdir()) if saved.is_dir() else False


@pytest.mark.slow
def test_killed_ranks_leave_no_trace_in_the_weights(ranks: RankPools, tmp_path: Path) -> None:
    data = chaos.write_dataset(tmp_path / "data")
    whole, disturbed = tmp_path / "whole", tmp_path / "disturbed"
    undisturbed(ranks, data, whole, 30)
    places: list[tuple[str, int, socket.SocketKind]] = []

    def strangers_come(run: chaos.Disturbed) -> bool:
        """Once it has saved, attack all that the processes of the run listen on."""
        if "saved" not in "".join(run.lines):
            return False
        places.extend(strangers.listening([run.process.pid, *strangers.children(run.process.pid)]))
        strangers.attack(places, tmp_path / "executed")
        return True

    moments: list[Callable[[chaos.Disturbed], bool]] = [
        chaos.after(0.2),  # while the ranks start
        strangers_come,
        lambda run: while_a_save_is_under_way(run, disturbed / "saved"),
    ]
    outcome = chaos.disturb(chaos.flags_of(data, disturbed, 30, save_interval=5), moments, seed=0, max_restarts=3)
    assert outcome.status == 0, outcome.text
    assert len(outcome.failures) == 3
    assert outcome.text.count(" was killed by SIGKILL; restart ") == 3
    assert "; restart 1 of 3\n" in outcome.text
    assert "; restart 1 of 3 since the checkpoint of iteration " in outcome.text, "progress gives the restarts back"
    assert f"resumed {disturbed / 'saved'}/global_step" in outcome.text
    assert places, "no stranger came"
    assert {address for address, _, _ in places} == {"127.0.0.1"}, "others than this machine may connect"
    assert not (tmp_path / "executed").exists()
    assert_equal_runs(disturbed, whole)


EXPERTS = (
    "--architecture llama --position-embedding-type rope --num-experts 4 --expert-model-parallel-size 2 "
    "--moe-aux-loss-coeff 0.01 --moe-router-enable-expert-bias --moe-input-jitter-eps 0.01"
)
"""Routers that a bias balances."""


@pytest.mark.slow
@pytest.mark.parametrize("layout", [EXPERTS, "--context-parallel-size 2"])
def test_killed_ranks_of_other_axes_leave_no_trace_in_the_weights(
    ranks: RankPools, tmp_path: Path, layout: str
) -> None:
    """Experts or rows over two ranks, beside a pipeline of two."""
    data, whole, disturbed = chaos.write_dataset(tmp_path / "data"), tmp_path / "whole", tmp_path / "disturbed"
    more = ["--tensor-model-parallel-size", "1", *layout.split()]
    undisturbed(ranks, data, whole, 30, *more)
    moments = [chaos.after_save(0.1), chaos.after_save(0.3)]
    flags = [*chaos.flags_of(data, disturbed, 30, save_interval=5), *more]
    outcome = chaos.disturb(flags, moments, seed=0, max_restarts=3)
    assert outcome.status == 0, outcome.text
    assert len(outcome.failures) == 2
    assert_equal_runs(disturbed, whole)


@pytest.mark.slow
def test_killed_ranks_go_on_from_copies_in_memory(ranks: RankPools, tmp_path: Path) -> None:
    """Nothing is on the disk before the end, and at most so many steps are lost as lie between two copies."""
    data, whole, disturbed = chaos.write_dataset(tmp_path / "data"), tmp_path / "whole", tmp_path / "disturbed"
    undisturbed(ranks, data, whole, 12)
    flags = [*chaos.flags_of(data, disturbed, 12, save_interval=5), *chaos.copies_flags(3)]
    outcome = chaos.disturb(flags, [chaos.after_steps(7)], seed=0, max_restarts=1)
    assert outcome.status == 0, outcome.text
    assert len(outcome.failures) == 1
    (resumed,) = [line for line in outcome.text.splitlines() if line.startswith("resumed ")]
    named = re.match(r"resumed (/dev/shm/megatron-copies-[\w-]+)/global_step(6|9): weights, optimizer, random", resumed)
    assert named is not None, resumed
    assert_equal_runs(disturbed, whole)
    assert not Path(named[1]).exists()


NEWEST = chaos.RANKS - 1
"""Victim that is the newest process of its try: the others are those of the first one."""


@pytest.mark.parametrize(
    "layout", ["", pytest.param("--pipeline-model-parallel-size 1 --zero-stage 1", marks=pytest.mark.slow)]
)
def test_healthy_ranks_keep_their_processes_and_train_on_to_the_same_bits(
    ranks: RankPools, tmp_path: Path, layout: str
) -> None:
    """A kill, and an error that may pass, of which the others learn by its message. `layout`: the second is DP 2."""
    data, whole, disturbed = chaos.write_dataset(tmp_path / "data"), tmp_path / "whole", tmp_path / "disturbed"
    undisturbed(ranks, data, whole, 14, layout)
    flags = [*chaos.flags_of(data, disturbed, 14, save_interval=5), *chaos.copies_flags(2), chaos.KEEP]
    flags += layout.split()
    processes: list[list[int]] = []

    def after_steps(count: int) -> Callable[[chaos.Disturbed], bool]:
        moment = chaos.after_steps(count)

        def has_come(run: chaos.Disturbed) -> bool:
            if moment(run):
                processes.append(run.ranks())
                return True
            return False

        return has_come

    # no rank is stopped: where other tests keep the cores busy, a step has taken more than the 4 s of QUICK
    flags += ["--watchdog-timeout-s", "60"]
    faults, victims = ["SIGKILL", chaos.PASSING], [NEWEST]
    outcome = chaos.disturb(
        flags, [after_steps(5), after_steps(5)], seed=0, max_restarts=2, faults=faults, victims=victims
    )
    assert outcome.status == 0, outcome.text
    assert [failure.is_kept for failure in outcome.failures] == [True, True], outcome.text
    assert "the run ends" not in outcome.text, outcome.text
    first, second = processes
    assert first[:NEWEST] == second[:NEWEST]
    assert first[NEWEST] != second[NEWEST]
    assert_equal_runs(disturbed, whole)


@pytest.mark.slow
def test_ten_rounds_leave_nothing_in_the_processes_that_stay(tmp_path: Path) -> None:
    """Neither threads nor descriptors, nor the memory of an engine."""
    data = chaos.write_dataset(tmp_path / "data")
    flags = [*chaos.flags_of(data, tmp_path / "run", chaos.ENDLESS, save_interval=5), *chaos.copies_flags(1)]
    rounds: list[dict[int, tuple[int, int, int]]] = []

    def at_the_fourth_step() -> Callable[[chaos.Disturbed], bool]:
        moment = chaos.after_steps(4)

        def has_come(run: chaos.Disturbed) -> bool:
            if not moment(run):
                return False
            processes = [psutil.Process(pid) for pid in run.ranks()[:NEWEST]]
            rounds.append({one.pid: (one.num_threads(), one.num_fds(), one.memory_info().rss) for one in processes})
            return True

        return has_come

    # an engine takes 6 MiB of each rank, and with it the group's threads and sockets
    more = ["--hidden-size", "256", chaos.KEEP]
    moments = [at_the_fourth_step() for _ in range(11)]
    outcome = chaos.disturb([*flags, *more], moments, seed=0, stop=True, victims=[NEWEST])
    assert outcome.status == 0, outcome.text
    assert all(failure.is_kept for failure in outcome.failures), outcome.text
    # the first time costs what stays, such as compiled kernels and the allocator's arenas
    _, second, *_, last = rounds
    assert second.keys() == last.keys()
    for pid, (threads, descriptors, num_bytes) in second.items():
        assert last[pid][0] <= threads + 3, rounds
        assert last[pid][1] <= descriptors + 3, rounds
        assert last[pid][2] <= num_bytes + (24 << 20), rounds


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["disk", "peers", "kept"])
def test_a_hundred_faults_leave_no_trace_in_the_weights(ranks: RankPools, tmp_path: Path, mode: str) -> None:
    """Kills, stops, segmentation faults and passing errors: from the start of the ranks, or after a checkpoint.

    `peers`: nothing is saved on the disk before the end, and restarts go on from copies in memory; `kept`: so they do,
    and healthy ranks keep their processes.
    """
    seed = random.SystemRandom().getrandbits(32)
    print(f"seed {seed}")
    generator = random.Random(seed)
    data, disturbed, whole = chaos.write_dataset(tmp_path / "data"), tmp_path / "disturbed", tmp_path / "whole"
    # without any checkpoint between, restarts would come later and later
    moments = [moment(generator.uniform(0.0, 3.0)) for _ in range(50) for moment in (chaos.after, chaos.after_save)]
    more = chaos.QUICK
    flags = [*chaos.flags_of(data, disturbed, chaos.ENDLESS, save_interval=5), *more]
    if mode != "disk":
        # a copy is known to be whole at the next one
        steps_between = [generator.randint(11, 20) for _ in range(50)]
        moments = [
            each
            for start, steps in zip(moments[::2], steps_between, strict=True)
            for each in (start, chaos.after_steps(steps))
        ]
        flags += chaos.copies_flags(5)
    if mode == "kept":
        flags.append(chaos.KEEP)
    outcome = chaos.disturb(flags, moments, seed, stop=True, faults=chaos.FAULTS)
    assert outcome.status == 0, outcome.text
    assert len(outcome.failures) == 100
    steps = chaos.steps_of(disturbed / "results")
    print(chaos.report(outcome, steps))
    if mode == "kept":
        # three of four faults are no hangs, and of these most come after the first step
        assert sum(failure.is_kept for failure in outcome.failures) >= 25
    if mode != "disk":
        assert outcome.text.count("resumed /dev/shm/megatron-copies-") >= 50
        assert f"resumed {disturbed}" not in outcome.text
    undisturbed(ranks, data, whole, chaos.ENDLESS, f"--exit-interval {len(steps)}", *more)
    assert_equal_runs(disturbed, whole)
