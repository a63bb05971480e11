"""Files in which the launcher brings the secret of a run to its hosts, by what ssh runs there."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megatron.launch.agents import agent_command
from tests.ranks import HANG_S

NAME = ".megatron-login.11.1795440743117060914.0"


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Start the command in a home folder, with the secret as input; its output is the connection."""
    started = []

    def run(limit: int = 1000) -> subprocess.Popen[bytes]:
        assert "\n" not in agent_command.KEEP_SECRET, "csh takes no quoted line end"
        script = agent_command.KEEP_SECRET.replace("NAME", NAME).replace("LIMIT", str(limit))
        started.append(
            subprocess.Popen(
                ["sh", "-c", f"sh -c '{script}'"], cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
        )
        assert started[-1].stdin is not None
        started[-1].stdin.write(b"a secret")
        started[-1].stdin.close()
        return started[-1]

    yield run
    for process in started:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def until(is_so: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + HANG_S
    while not is_so():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_the_file_is_readable_by_its_user_alone_and_the_command_ends_once_it_was_read(
    tmp_path: Path, start: Callable[..., subprocess.Popen[bytes]]
) -> None:
    process, file = start(), tmp_path / NAME
    until(file.exists)
    assert (file.stat().st_mode & 0o777, file.read_text()) == (0o600, "a secret")
    file.unlink()
    assert process.wait(60) == 0


@pytest.mark.parametrize("why", ["the launcher has ended", "the agent has not come in time"])
def test_a_file_that_no_agent_reads_is_removed(
    tmp_path: Path, start: Callable[..., subprocess.Popen[bytes]], why: str
) -> None:
    process, file = start(limit=5 if "agent" in why else 1000), tmp_path / NAME
    assert process.stdout is not None
    if "launcher" in why:
        until(file.exists)
        process.stdout.close()
    assert process.wait(60) == 0
    assert list(tmp_path.iterdir()) == []


def test_files_that_a_host_kept_over_a_loss_of_power_are_removed_and_no_others(
    tmp_path: Path, start: Callable[..., subprocess.Popen[bytes]]
) -> None:
    old = time.time() - 3700
    names = {
        ".megatron-node.12.1795440743117060914.3": old,
        ".megatron-node.12.1795440743117060914.4.partial": old,
        ".megatron-node.13.1795440743117060914.3": time.time(),
        ".megatron-notes.v1": old,
    }
    for name, changed_s in names.items():
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (changed_s, changed_s))
    start(limit=0).wait(60)
    assert {path.name for path in tmp_path.iterdir()} == {
        ".megatron-node.13.1795440743117060914.3",
        ".megatron-notes.v1",
    }
