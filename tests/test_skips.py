"""The tests' own rule: where their data is given, none is skipped but for hardware, mpirun and what is listed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.skips import is_allowed

ROOT = Path(__file__).resolve().parent.parent
SKIPS = """
import pytest

@pytest.mark.skipif(True, reason="needs CUDA")
def test_of_hardware(): pass

@pytest.mark.skipif(True, reason="it is Thursday")
def test_of_a_whim(): pass

def test_of_a_lost_package(): pytest.importorskip("no_such_package")

@pytest.fixture
def broken(): pytest.skip("no fixture today")

def test_of_a_fixture(broken): pass

@pytest.mark.xfail(reason="known", strict=True)
def test_that_is_known(): raise ValueError
"""


@pytest.mark.parametrize("data", ["somewhere", ""])
def test_a_skip_for_another_reason_fails_where_the_data_is_given(tmp_path: Path, data: str) -> None:
    (tmp_path / "test_some.py").write_text(SKIPS)
    (tmp_path / "test_file.py").write_text("import pytest\npytest.importorskip('no_such_module')\n")
    command = [sys.executable, "-m", "pytest", "-p", "tests.skips", "-q", "-rA", "--rootdir", str(tmp_path)]
    command += ["-p", "no:cacheprovider", "-c", os.devnull, "--continue-on-collection-errors", str(tmp_path)]
    environment = os.environ | {"MEGATRON_TEST_DATA": data, "PYTHONPATH": str(ROOT)}
    run = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    last = run.stdout.splitlines()[-1]
    counts = {word.rstrip("s"): int(number) for number, word in re.findall(r"(\d+) (\w+)", last)}
    # a mark and a fixture skip before the test, a file before it has any: what fails there is an error
    expected = {"failed": 1, "error": 3, "skipped": 1, "xfailed": 1} if data else {"skipped": 5, "xfailed": 1}
    assert {name: counts[name] for name in counts if name != "in"} == expected, run.stdout
    assert ("it is Thursday; install .[test], or add a reason" in run.stdout) == bool(data)


@pytest.mark.parametrize(
    ("reason", "allowed"),
    [
        ("Skipped: needs CUDA", True),
        ("Skipped: needs mpirun", True),
        ("Skipped: needs ip: apt-get install iproute2", True),
        ("Skipped: could not import 'peft': No module named 'peft'", False),
        ("Skipped: lm-eval is installed", False),
        ("Skipped: needs shellcheck", False),
        ("Skipped: needs MEGATRON_TEST_DATA, the folder of real text and tokenizers", False),
    ],
)
def test_what_is_allowed(reason: str, allowed: bool) -> None:
    assert is_allowed(reason) == allowed
