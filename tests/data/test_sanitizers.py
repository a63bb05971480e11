"""Run the tests of the C++ extension with a build that aborts at undefined behaviour or an invalid memory access."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.ranks import HANG_S

ROOT = Path(__file__).resolve().parent.parent.parent
SOURCES = tuple(str(path.relative_to(ROOT)) for path in sorted((ROOT / "megatron/data/native").iterdir()))
READER = "megatron/data/native/samples.cpp"
FOUND = 99
"""Exit status of a process that a sanitizer aborted."""
COMPILER = os.environ.get("CXX", "g++")

# Replaces the installed extension by the sanitized build, and runs pytest.
CHILD = """
import importlib.util, sys
import megatron.data, pytest
spec = importlib.util.spec_from_file_location("megatron.data.helpers", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
sys.modules["megatron.data.helpers"] = megatron.data.helpers = module
status = pytest.main(sys.argv[2:])
assert sys.modules["megatron.data.helpers"] is module
sys.exit(status)
"""


def runtime(library: str) -> str:
    """Return the path of a run-time library of the compiler, or skip the test."""
    try:
        found = subprocess.run([COMPILER, f"-print-file-name={library}"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip(f"no compiler {COMPILER}")
    path = found.stdout.strip()
    if not os.path.isabs(path):
        pytest.skip(f"{COMPILER} has no {library}")
    return path


def build(folder: Path, changed: dict[str, str] | None = None) -> Path:
    """Build the extension in `folder`, with `changed` text for some of its sources."""
    torch = find_spec("torch")
    assert torch is not None
    assert torch.origin is not None
    headers = [sysconfig.get_paths()["include"], os.path.join(os.path.dirname(torch.origin), "include")]
    texts = {source: (ROOT / source).read_text() for source in SOURCES} | (changed or {})
    for source, text in texts.items():
        (folder / Path(source).name).write_text(text)
    out = folder / "helpers.so"
    command = f"{COMPILER} -shared -fPIC -std=c++17 -O1 -g -ffp-contract=off"
    command += " -fsanitize=address,undefined -fno-sanitize-recover=all"
    command += "".join(f" -isystem {header}" for header in headers)  # torch brings pybind11's headers along
    subprocess.run([*command.split(), str(folder / "helpers.cpp"), "-o", str(out)], check=True, timeout=HANG_S)
    return out


def run_tests(extension: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    # the exceptions of libstdc++ are intercepted only where it is loaded with the sanitizer
    preload = " ".join(runtime(library) for library in ("libasan.so", "libstdc++.so.6"))
    environment = os.environ | {
        "LD_PRELOAD": preload,
        # Python leaves memory behind; NumPy may ask for more than there is
        "ASAN_OPTIONS": f"detect_leaks=0:allocator_may_return_null=1:exitcode={FOUND}",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "PYTHONPATH": str(ROOT),
        "HYPOTHESIS_STORAGE_DIRECTORY": str(extension.parent),
    }
    options = ["-q", "--noconftest", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(
        [sys.executable, "-c", CHILD, str(extension), *options],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )


@pytest.mark.slow
def test_helpers_have_no_undefined_behaviour(tmp_path: Path) -> None:
    runtime("libasan.so")
    run = run_tests(build(tmp_path), "tests/data/test_helpers.py", "tests/data/test_packing.py")
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-4000:]
    assert " passed" in run.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    "check", ["document < 0 || document >= lengths_.size()", "length > num_tokens_ - pointer / token_bytes_"]
)
def test_a_missing_check_is_detected(tmp_path: Path, check: str) -> None:
    runtime("libasan.so")
    source = (ROOT / READER).read_text()
    assert source.count(check) == 1
    extension = build(tmp_path, {READER: source.replace(check, "false")})
    run = run_tests(extension, "-s", "-k", "checks_every_array", "tests/data/test_helpers.py")
    assert run.returncode == FOUND, run.stdout[-4000:]
    assert "AddressSanitizer: heap-buffer-overflow" in run.stderr or "AddressSanitizer: SEGV" in run.stderr
