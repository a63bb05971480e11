"""Ranks stop together, for the reason that rank 0 sees; signals let the step finish."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from megatron.config import TrainingConfig
from megatron.training import stop
from megatron.training.stop import StopDecision


class Ranks:
    """Stand-in for a process group: rank 0 speaks first, the others hear its code."""

    def __init__(self) -> None:
        self.codes: list[int] = []

    def rank_0(self, code: int) -> int:
        self.codes.append(code)
        return code

    def other(self, code: int) -> int:
        return self.codes[-1]


def alone(training: TrainingConfig) -> StopDecision:
    return StopDecision(training, broadcast=lambda code: code)


def test_kill_switch_stops_with_the_contracts_text(tmp_path: Path) -> None:
    path = tmp_path / "kill"
    decision = alone(TrainingConfig(kill_switch_path=str(path)))
    assert decision.before_start() is None
    assert decision.after_step(6, 48) is None
    path.touch()
    assert decision.after_step(7, 56) == f"Detected kill switch at {path}, iteration=7. Exiting"
    assert path.exists(), "the kill switch is the user's file; it is not removed"


def test_kill_switch_present_already_prevents_the_start(tmp_path: Path) -> None:
    path = tmp_path / "kill"
    path.touch()
    reason = alone(TrainingConfig(kill_switch_path=str(path))).before_start()
    assert reason is not None
    assert reason.startswith(f"Detected kill switch at {path}")


def test_exit_interval_stops_at_its_multiples_only() -> None:
    decision = alone(TrainingConfig(exit_interval=5))
    stops = [iteration for iteration in range(1, 21) if decision.after_step(iteration, iteration * 8)]
    assert stops == [5, 10, 15, 20]
    assert decision.after_step(5, 40) == "Reached exit_interval=5, iteration=5, consumed_samples=40. Exiting"


def test_exit_interval_zero_never_stops() -> None:
    decision = alone(TrainingConfig(exit_interval=0))
    assert not any(decision.after_step(iteration, 0) for iteration in range(1, 100))


def test_all_ranks_follow_rank_0s_view(tmp_path: Path) -> None:
    # the file is there for rank 1 first, as on a shared file system that lags: no rank may leave before rank 0 sees it
    path = tmp_path / "kill"
    ranks = Ranks()
    training = TrainingConfig(kill_switch_path=str(path))
    first = StopDecision(training, broadcast=ranks.rank_0)
    other = StopDecision(training, broadcast=ranks.other, decides=False)
    assert first.after_step(1, 8) is None
    path.touch()
    assert other.after_step(1, 8) is None
    assert first.after_step(2, 16) == other.after_step(2, 16) == f"Detected kill switch at {path}, iteration=2. Exiting"


def test_other_ranks_do_not_touch_the_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[object] = []
    monkeypatch.setattr(os.path, "exists", lambda path: looked.append(path) is not None)  # type: ignore[func-returns-value]
    ranks = Ranks()
    training = TrainingConfig(kill_switch_path=str(tmp_path / "kill"))
    StopDecision(training, broadcast=ranks.rank_0).after_step(1, 8)
    StopDecision(training, broadcast=ranks.other, decides=False).after_step(1, 8)
    assert looked == [str(tmp_path / "kill")]


def test_broadcast_is_called_once_a_step_with_one_small_int(tmp_path: Path) -> None:
    ranks = Ranks()
    path = tmp_path / "kill"
    decision = StopDecision(TrainingConfig(kill_switch_path=str(path), exit_interval=2), broadcast=ranks.rank_0)
    decision.before_start()
    for iteration in range(1, 5):
        decision.after_step(iteration, iteration)
    path.touch()
    decision.after_step(5, 5)
    assert ranks.codes == [0] * 5 + [stop.KILL_SWITCH]
    assert all(0 <= code < 128 for code in ranks.codes)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_signal_lets_the_step_finish_then_stops_every_rank(signum: signal.Signals) -> None:
    ranks = Ranks()
    before = signal.getsignal(signum)
    other = StopDecision(TrainingConfig(), broadcast=ranks.other, decides=False)
    with StopDecision(TrainingConfig(), broadcast=ranks.rank_0) as decision:
        assert decision.after_step(1, 8) is None
        signal.raise_signal(signum)
        expected = f"Received {signum.name}, iteration=2, consumed_samples=16. Exiting"
        assert decision.after_step(2, 16) == expected
        assert other.after_step(2, 16) == expected
    assert signal.getsignal(signum) is before


def test_signal_to_another_rank_alone_changes_nothing() -> None:
    ranks = Ranks()
    first = StopDecision(TrainingConfig(), broadcast=ranks.rank_0)
    with StopDecision(TrainingConfig(), broadcast=ranks.other, decides=False) as other:
        signal.raise_signal(signal.SIGTERM)
        assert first.after_step(1, 8) is None
        assert other.after_step(1, 8) is None


def test_handlers_are_restored_when_training_fails() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(ZeroDivisionError), alone(TrainingConfig()):
        raise ZeroDivisionError
    assert signal.getsignal(signal.SIGTERM) is before


def test_ignored_sigint_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with alone(TrainingConfig()) as decision:
            signal.raise_signal(signal.SIGINT)
            assert decision.after_step(1, 8) is None
    finally:
        signal.signal(signal.SIGINT, before)


def test_enters_outside_the_main_thread_without_handlers() -> None:
    reasons: list[str | None] = []

    def train() -> None:
        with alone(TrainingConfig(exit_interval=1)) as decision:
            reasons.append(decision.after_step(1, 8))

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert reasons == ["Reached exit_interval=1, iteration=1, consumed_samples=8. Exiting"]


PROGRAM = """
import signal, sys, time
from megatron.config import TrainingConfig
from megatron.training import stop
stop.REPEAT_S = float(sys.argv[1])
with stop.StopDecision(TrainingConfig(), broadcast=lambda code: code) as decision:
    for name in sys.argv[2:]:
        signal.raise_signal(getattr(signal, name))
    print(decision.after_step(3, 24), flush=True)
"""


def run_program(repeat_s: float, *names: str) -> subprocess.CompletedProcess[str]:
    root = Path(__file__).resolve().parents[2]
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, str(repeat_s), *names],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_second_signal_ends_the_process_at_once(name: str) -> None:
    result = run_program(0.0, name, name)
    assert (result.returncode, result.stdout) == (-getattr(signal, name), "")


def test_a_different_signal_is_no_second_request() -> None:
    # DeepSpeed's launcher answers Ctrl-C with a SIGTERM to its ranks, however late
    result = run_program(0.0, "SIGINT", "SIGTERM")
    assert result.stdout == "Received SIGINT, iteration=3, consumed_samples=24. Exiting\n"


def test_ctrl_c_passed_on_by_the_launcher_is_one_request() -> None:
    # the terminal's SIGINT, the launcher's SIGTERM (DeepSpeed) and SIGINT (torchrun)
    result = run_program(60.0, "SIGINT", "SIGTERM", "SIGINT")
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == "Received SIGINT, iteration=3, consumed_samples=24. Exiting\n"
