"""Reasons for which a test may be skipped where the tests' data is given, as in CI; by any other one it fails.

Else a package that CI lost, or a condition that is never true there, would leave a claim unchecked in silence.
"""

from __future__ import annotations

import os
import re
from collections.abc import Generator
from typing import Any

import pytest

ALLOWED = re.compile(
    "|".join(
        (
            # hardware, and builds of torch for other hardware
            r"needs CUDA",
            r"needs a torch that is built without CUDA",
            r"has no AVX-512",
            r"Triton is not installed|the interpreter of Triton",
            # mpirun
            r"needs mpirun|needs Open MPI",
            # the machine's system, rights and programs, which no wheel brings
            r"Linux|reads /proc|needs root|this machine allows no namespaces|apt-get install",
            r"needs the right to mount|needs a second file system",
            r"needs (pdsh|pkill|nftables)|no Chromium is installed|has no lib\w+\.so|needs a checkout of git",
            # sources and documents of others, which are not ours to install
            r"MEGATRON_(DEEPSPEED_FORK|GAUDI_BRIDGE) names no checkout",
            r"needs .*beside MEGATRON_TEST_DATA",
        )
    )
)


def is_allowed(reason: str) -> bool:
    return bool(ALLOWED.search(reason))


def _checked(report: Any) -> Any:
    """Return a report on a test or a file, as a failure if it was skipped for a reason that is not allowed."""
    is_skipped = report.outcome == "skipped" and not hasattr(report, "wasxfail")
    if not is_skipped or not os.environ.get("MEGATRON_TEST_DATA"):
        return report
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    if not is_allowed(reason):
        report.outcome = "failed"
        report.longrepr = f"{reason}; install .[test], or add a reason that no installation removes to tests/skips.py"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, Any]:
    return _checked((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, Any, Any]:
    return _checked((yield))
