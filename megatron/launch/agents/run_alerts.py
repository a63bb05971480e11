"""Alerts of a run, as its agents see it: how it ended, that it hangs, and what its ranks have sent.

The agent of the first node sends them: it hears of all failures. Where it is lost with its host, the agent of the rank
that came to the watchdog's verdict does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

from megatron.launch.agents.agent_command import AgentOptions
from megatron.launch.agents.restart_policy import Failure
from megatron.launch.child_processes import report
from megatron.runtime.agent_link import RankLink
from megatron.runtime.alerts import ABORT, STALL, Alert, Alerts
from megatron.runtime.commands import DONE, HUNG


class RunAlerts:
    """Alerts of one agent. Without a command and a webhook its methods do nothing."""

    def __init__(self, options: AgentOptions) -> None:
        name = options.run_name or options.run_id
        try:
            self._sender = Alerts(name, options.alert_command, options.alert_webhook, report)
        except ValueError as error:  # its ranks are refused by the same check
            report(f"alerts: {error}")
            self._sender = Alerts(name, None, None, report)
        self._is_first = options.nodes == 1 or options.node_rank == 0
        self.verdict: Mapping[str, Any] = {}
        """The watchdog's in this attempt, of a rank of this node (`RankLink.verdict`)."""

    def begin(self, node: int) -> None:
        """Begin an attempt, in which this node has this number."""
        self._is_first, self.verdict = node == 0, {}

    def held(self) -> contextlib.AbstractContextManager[set[int]]:
        """Within it start no process that delivers; yields the sessions of those that run, which must be let alone."""
        return self._sender.held()

    def take(self, link: RankLink) -> None:
        """Send the alerts that a rank has sent, which one of the run does, and note its verdict."""
        for values in link.alerts:
            self._sender.send(Alert.from_json(values))
        link.alerts.clear()
        self.verdict = link.verdict or self.verdict

    def restarted(self, failures: Sequence[Failure]) -> None:
        """Alert of a hang that was followed by a restart. `failures`: those of the last attempt, the first first."""
        first = next(iter(failures), None)
        if first is not None and _hung(first):
            self._send(Alert(STALL, f"{self._story(first)}; the ranks were started again", *_place(first)))

    def ended(self, status: int, reason: str, failures: Sequence[Failure] = ()) -> None:
        """Alert of the end of the run, unless it was a clean one. `reason`: empty where only the failures are known."""
        if status == DONE:
            return
        first = next(iter(failures), None)
        event, rank, step = ABORT, None, None
        if first is not None:
            rank, step = _place(first)
            if _hung(first):
                event = STALL
            if not reason or event == STALL:
                reason = "; ".join(filter(None, (self._story(first), reason)))
        reason = reason or f"exit status {status}"
        self._send(Alert(event, f"the run ended: {reason}", rank, step, status))

    def close(self) -> None:
        """Wait, for a limited time, until all are delivered."""
        self._sender.close()

    def _send(self, alert: Alert) -> None:
        if self._is_first or self.verdict.get("alone"):
            self._sender.send(alert)

    def _story(self, failure: Failure) -> str:
        """Return what is known best of a failure: a rank that was lost, or hangs, is named by the verdict."""
        verdict = str(self.verdict.get("text", ""))
        if failure.is_own and not _hung(failure):
            return str(failure)
        return verdict or str(failure)


def _hung(failure: Failure) -> bool:
    return failure.returncode == HUNG or failure.state == "stuck"


def _place(failure: Failure) -> tuple[int | None, int | None]:
    """Return rank and iteration of a failure."""
    return None if failure.member else failure.rank, failure.step or None
