"""Messages on a terminal break between words, and elsewhere are a line each."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from megatron.runtime.commands import folded

ROOT = Path(__file__).resolve().parent.parent
MODEL = ["--config", "tiny_llama"]
LONG = "no/such-place" * 9
WORDS = {
    "launch": ["tools/launch.py", "--device", "cpu", "--", *MODEL, "--load", LONG],
    "train": ["-m", "megatron.train", *MODEL, "--tensor-model-parallel-size", "3", "--seq-length", "7"],
    "generate": ["-m", "megatron.generate", "--load", LONG, "--top-k", "-4", "--prompt"],
    "plan": ["tools/plan.py", *MODEL, "--tensor-model-parallel-size", "3"],
}


def on_terminal(width: int, words: list[str]) -> str:
    """Return the stderr of a command on a terminal of `width` columns."""
    own, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 40, width, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    with subprocess.Popen(
        [sys.executable, *words], stdout=its, stderr=its, stdin=subprocess.DEVNULL, cwd=ROOT, env=environment
    ):
        os.close(its)
        parts = []
        try:
            while part := os.read(own, 65536):
                parts.append(part)
        except OSError:  # Linux: the other side is closed
            pass
        finally:
            os.close(own)
    return b"".join(parts).decode().replace("\r\n", "\n")


@pytest.mark.parametrize("name", WORDS)
def test_refusals_break_no_word_at_100_columns(name: str) -> None:
    shown = on_terminal(100, WORDS[name])
    piped = subprocess.run([sys.executable, *WORDS[name]], capture_output=True, text=True, cwd=ROOT)
    assert piped.returncode == 2
    assert max(map(len, piped.stderr.splitlines())) > 100, "a line each"
    assert shown.split() == piped.stderr.split(), "the same words"
    for line in shown.splitlines():
        assert len(line) < 100 or len(line.split()) == 1, line


def test_what_is_to_be_copied_stays_whole() -> None:
    path = "/data/" + "a-long-name/" * 9
    lines = folded(f"load={path} does not exist; leave --no-load-optim out", 40).splitlines()
    assert lines[0] == f"load={path}"
    assert "--no-load-optim" in lines[1] + lines[2]
    assert all(len(line) <= 40 for line in lines[1:])
