"""A plan says whether it fits its device, and proposes layouts that do."""

from __future__ import annotations

import dataclasses
import itertools
import re
from typing import Any

import pytest

from megatron.cli.plan import main
from megatron.plan.fit import capacity, for_device, largest_rank, memory_warning, propose
from megatron.runtime.devices import GIB
from megatron.settings.validation import check
from tests.plan.configs import LLAMA_8B, config

RUN: dict[str, Any] = {
    "training": {"bf16": True, "seq_length": 4096, "global_batch_size": 64, "train_iters": 100},
    "data": {"data_path": ("DATASET",)},
}


def llama(device_memory: str, **parallel: Any) -> Any:
    return config(LLAMA_8B, **RUN, parallel={"device_memory": device_memory, **parallel})


@pytest.mark.parametrize(
    ("memory", "kind", "gib"),
    [
        ("gaudi2", "hpu", 94.6),
        ("gaudi3", "hpu", 126.5),
        ("H100", "cuda", 79.2),
        ("h200", "cuda", 139.8),
        ("40", "auto", 40),
    ],
)
def test_a_device_is_known_by_name_or_gib(memory: str, kind: str, gib: float) -> None:
    run = for_device(llama(memory))
    room = capacity(run, 8)
    assert room is not None
    assert (run.parallel.device, room.size_bytes) == (kind, int(gib * GIB))


def test_ranks_of_a_cpu_share_its_memory() -> None:
    run = config(parallel={"device": "cpu"})
    alone, shared = capacity(run, 1), capacity(run, 4)
    assert alone is not None
    assert shared is not None
    assert alone.size_bytes // 4 == shared.size_bytes
    assert capacity(config(parallel={"device": "hpu"}), 8) is None, "there is no Gaudi here"


def test_replicas_are_given_up_for_room() -> None:
    run = for_device(llama("h100", num_replicas=8))
    room = capacity(run, 8)
    assert room is not None
    assert {"num_replicas": 1} in [dict(found.changes) for found in propose(run, 16, 8, room, check)]


@pytest.mark.parametrize("memory", ["h100", "24"])
def test_proposals_are_valid_fit_and_differ(memory: str) -> None:
    run = for_device(llama(memory))
    room = capacity(run, 8)
    assert room is not None
    assert not room.is_enough_for(largest_rank(run, 8))
    found = propose(run, 8, 8, room, check)
    assert 2 <= len(found) <= 4
    for proposal in found:
        changed = run
        for name, value in proposal.changes:
            section = next(part for part in ("parallel", "training", "optimizer") if hasattr(getattr(run, part), name))
            part = dataclasses.replace(getattr(changed, section), **{name: value})
            changed = dataclasses.replace(changed, **{section: part})
        assert check(changed, 8) == []
        assert largest_rank(changed, 8) == proposal.size_bytes <= 0.9 * room.size_bytes
    options = [{name for name, _ in proposal.changes} for proposal in found]
    assert not [(cheaper, other) for cheaper, other in itertools.combinations(options, 2) if cheaper <= other]


def test_more_devices_are_proposed_where_no_layout_of_these_fits() -> None:
    run = for_device(llama("h100"))
    room = capacity(dataclasses.replace(run, parallel=dataclasses.replace(run.parallel, device_memory="20")), 8)
    assert room is not None
    found = propose(run, 1, 8, room, check)
    assert found
    assert {proposal.num_devices for proposal in found} == {found[0].num_devices}
    assert found[0].num_devices > 1
    assert propose(run, 1, 8, dataclasses.replace(room, size_bytes=GIB // 100), check) == []


def test_the_plan_says_whether_it_fits(capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--config llama31_8b --num-devices 8 --device-memory"
    assert main([*flags.split(), "gaudi3"]) == 0
    assert "  fits: 93.8 of 126.5 GiB (Gaudi 3), 74%" in capsys.readouterr().out
    assert main([*flags.split(), "h100"]) == 0
    text = capsys.readouterr().out
    lines = (
        "  does not fit: 93.8 of 79.2 GiB (H100 80 GB), 118%\n  longest sequence: 3,072 tokens\n  nearest layouts that"
    )
    assert lines in text
    proposed = re.findall(r"^ +([0-9.]+) GiB  --", text, flags=re.MULTILINE)
    assert proposed
    assert all(float(gib) < 0.9 * 79.2 for gib in proposed)
    assert max(map(len, text.splitlines())) <= 80
    assert main([*flags.split(), "100"]) == 0
    assert "too tight" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        ("--device-memory h10", "device_memory='h10' is neither a known device nor a number of GiB; use gaudi2,"),
        ("--device-memory 0", "neither a known device"),
        ("--device-memory h100 --device hpu", "device_memory=h100 is that of a cuda device, but device=hpu; use"),
    ],
)
def test_a_wrong_device_is_refused(flags: str, error: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--config", "tiny_llama", *flags.split()]) == 2
    assert error in capsys.readouterr().err


def test_a_launch_warns_of_a_plan_that_does_not_fit() -> None:
    assert memory_warning(for_device(llama("gaudi3", tensor_model_parallel_size=8)), 8, 8) is None
    assert "does not fit: " in (memory_warning(llama("60"), 8, 8) or "")
    assert memory_warning(config(LLAMA_8B, parallel={"device": "hpu"}), 8, 8) is None


def test_activations_in_host_memory_are_proposed_where_nothing_else_fits() -> None:
    training = {**RUN["training"], "seq_length": 131072, "global_batch_size": 8}
    run = config({**LLAMA_8B, "max_position_embeddings": 131072}, training=training, data=RUN["data"])
    for memory, is_needed in (("h100", False), ("14", True)):
        small = for_device(dataclasses.replace(run, parallel=dataclasses.replace(run.parallel, device_memory=memory)))
        room = capacity(small, 8)
        assert room is not None
        found = propose(small, 8, 8, room, check)
        assert found
        assert {"offload_activations" in proposal.names for proposal in found} == {is_needed}
