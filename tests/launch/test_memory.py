"""Memory of an agent for copies: the user's alone, and gone after any end, at the latest by the next agent's start."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from megatron.launch.agents import ownership

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory for files is Linux's")

AGENT = """
import sys, tempfile, time
from pathlib import Path
from megatron.launch.agents import ownership
ownership.MEMORY, tempfile.tempdir = Path(sys.argv[1]), sys.argv[2]
print(ownership.open_memory(), flush=True)
time.sleep(600)
"""


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The memory of a host, in which all users may write."""
    monkeypatch.setattr(ownership, "MEMORY", tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", "/tmp/megatron-own")
    return tmp_path


def test_a_killed_agent_leaves_memory_that_the_next_one_removes(shared: Path) -> None:
    command = [sys.executable, "-c", AGENT, str(shared), "/tmp/megatron-first"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as agent:
        assert agent.stdout is not None
        theirs = Path(agent.stdout.readline().strip())
        (theirs / "global_step10").mkdir()
        own = ownership.open_memory()
        assert own is not None
        assert stat.S_IMODE(own.stat().st_mode) == 0o700
        assert {path.name for path in shared.iterdir()} == {theirs.name, own.name}, "that of a live agent stays"
        agent.send_signal(signal.SIGKILL)
    ownership.remove_stale_memory()
    assert [path.name for path in shared.iterdir()] == [own.name]


def test_another_agent_that_takes_it_for_one_without_an_owner_is_waited_for(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, locked, waits = ownership.memory_of("/tmp/megatron-own"), ownership._locked, list[float]()

    def wait(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 2:
            place.rmdir()
            monkeypatch.setattr(ownership, "_locked", locked)

    monkeypatch.setattr(ownership, "_locked", lambda path: None)  # the other has it
    monkeypatch.setattr(ownership.time, "sleep", wait)
    assert ownership.open_memory() == place
    assert len(waits) == 2


def test_what_others_put_in_its_place_is_neither_used_nor_removed(shared: Path) -> None:
    place = ownership.memory_of("/tmp/megatron-own")
    (shared / "elsewhere").mkdir()
    os.symlink(shared / "elsewhere", place)
    assert ownership.open_memory() is None
    assert place.is_symlink()
    assert (shared / "elsewhere").is_dir()


def test_a_host_without_memory_for_files_keeps_none(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ownership, "MEMORY", shared / "missing")
    assert ownership.open_memory() is None
