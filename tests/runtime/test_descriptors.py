"""Limits of open files: raised where they may be, refused by name where they do not suffice."""

from __future__ import annotations

import resource
from types import SimpleNamespace

import pytest

from megatron.launch.plan import LaunchRequest, RefusedError
from megatron.launch.preflight import preflight
from megatron.runtime import descriptors
from megatron.runtime.device_cpu import CPU


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Limits that stand in for those of this process; the last pair is in force."""
    pairs = [(1024, 4096)]
    stand_in = SimpleNamespace(
        RLIMIT_NOFILE=resource.RLIMIT_NOFILE,
        RLIM_INFINITY=resource.RLIM_INFINITY,
        getrlimit=lambda which: pairs[-1],
        setrlimit=lambda which, pair: pairs.append(pair),
    )
    monkeypatch.setattr(descriptors, "resource", stand_in)
    return pairs


def test_the_limit_is_raised_as_far_as_it_may(limits: list[tuple[int, int]]) -> None:
    assert descriptors.limit_fault(CPU, 480, 1) is None
    assert limits[-1] == (4096, 4096)
    limits.append((1024, resource.RLIM_INFINITY))
    assert descriptors.raise_limit() == descriptors.HIGHEST
    limits.append((resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert descriptors.raise_limit() == descriptors.HIGHEST


def test_a_kernel_with_a_lower_limit_gives_what_it_has(
    limits: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def setrlimit(which: int, pair: tuple[int, int]) -> None:
        if pair[0] > 10240:
            raise ValueError("not allowed to raise maximum limit")
        limits.append(pair)

    monkeypatch.setattr(descriptors.resource, "setrlimit", setrlimit)
    limits.append((256, resource.RLIM_INFINITY))
    assert descriptors.raise_limit() == 10240


@pytest.mark.usefixtures("limits")
def test_a_run_that_needs_more_is_refused_before_it_starts() -> None:
    flags = "--config tiny_bloom --data-path d --micro-batch-size 1 --global-batch-size 1024".split()
    request = LaunchRequest(device="cpu", nodes=128, devices_per_node=8, rendezvous="node0:29500", train_flags=flags)
    with pytest.raises(RefusedError) as refused:
        preflight(request)
    (fault,) = [fault for fault in refused.value.faults if "open files" in fault]
    assert fault.startswith("the limit of open files is 4096 (ulimit -Hn), but a rank of 1024 needs up to 7436; ")
