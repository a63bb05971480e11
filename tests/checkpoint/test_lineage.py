"""Which runs led to a run's state."""

from __future__ import annotations

from megatron.checkpoint.folders import Ancestor, Run


def run_after(*ancestors: tuple[str, bool]) -> Run:
    return Run(
        "c", {}, tuple(Ancestor(name, f"{name}/global_step10", "", 10, continued) for name, continued in ancestors)
    )


def test_a_run_continues_what_led_to_it() -> None:
    run = run_after(("a", True), ("b", True))
    assert run.continues(Run("b"), 10)
    assert run.continues(Run("a"), 10)
    assert not run.continues(Run("a"), 11), "its own further way"


def test_nothing_before_a_start_from_weights_alone_led_to_a_run() -> None:
    run = run_after(("a", True), ("b", False))
    assert not run.continues(Run("b"), 10)
    assert not run.continues(Run("a"), 10)
