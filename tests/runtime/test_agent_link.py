"""What a rank tells its agent, and what the agent tells the watchdogs."""

from __future__ import annotations

import os
import socket

import pytest

from megatron.runtime import agent_link
from megatron.runtime.agent_link import AGENT_SOCKET, AgentLink, Datagrams, RankLink, send_endings


@pytest.fixture
def links(monkeypatch: pytest.MonkeyPatch) -> tuple[RankLink, AgentLink]:
    ours, theirs = socket.socketpair()
    link = RankLink(ours)
    monkeypatch.setenv(AGENT_SOCKET, str(theirs.detach()))
    return link, AgentLink()


def test_the_last_report_of_a_rank_outlives_it(links: tuple[RankLink, AgentLink]) -> None:
    agent, rank = links
    assert AGENT_SOCKET not in os.environ, "a child of the rank would take another descriptor for it"
    for step in range(100):
        rank.send(report={"step": step})
    rank.send(watchdogs={"sender": 7})
    agent.receive()
    assert rank._connection is not None
    rank._connection.close()
    agent.receive()
    assert (agent.report, agent.watchdogs, agent.is_open) == ({"step": 99}, {"sender": 7}, False)


def test_neither_end_needs_the_other(links: tuple[RankLink, AgentLink], monkeypatch: pytest.MonkeyPatch) -> None:
    agent, rank = links
    agent.close()
    for _ in range(3):
        rank.send(report={})
    without_agent = AgentLink()
    monkeypatch.setenv(AGENT_SOCKET, "12345")
    without_descriptor = AgentLink()
    for link in (rank, without_agent, without_descriptor):
        link.send(report={})
        assert link._connection is None


def test_bytes_that_no_rank_sends_end_the_connection_alone(links: tuple[RankLink, AgentLink]) -> None:
    agent, rank = links
    assert rank._connection is not None
    rank._connection.socket.sendall(os.urandom(5000))
    agent.receive()
    assert (agent.report, agent.is_open) == ({}, False)


def test_the_watchdogs_learn_how_a_process_ended() -> None:
    watchdog = Datagrams("127.0.0.1", 0)
    watchdog.key = b"of the ranks"
    send_endings({"places": [watchdog.place], "key": watchdog.key.hex(), "sender": 9}, {3: "was killed by SIGKILL"})
    received = [message for message, _ in watchdog.receive(5.0)]
    assert [message["endings"] for message in received] == [{"3": "was killed by SIGKILL"}] * agent_link.TIMES_SENT
    watchdog.close()
