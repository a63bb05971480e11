"""Use, temperature, power and graphs of each rank's Gaudi, with stand-ins of Habana's packages."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron.observability.console import memory_row
from megatron.observability.memory import MemoryLog
from megatron.observability.rank_times import RankStats
from megatron.options.config import LoggingConfig
from megatron.parallel.context import ParallelContext
from megatron.runtime import accelerator, device_hpu, hpu_driver
from megatron.runtime.device_hpu import HPU
from megatron.runtime.hpu_driver import module_id
from tests.habana import stand_in_packages


@pytest.fixture
def habana(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    with stand_in_packages(monkeypatch) as stand_in:
        monkeypatch.setattr(accelerator, "current", lambda: HPU)
        for name in ("HLS_MODULE_ID", "HABANA_VISIBLE_MODULES", "LOCAL_RANK"):
            monkeypatch.delenv(name, raising=False)
        hpu_driver._open.cache_clear()
        yield stand_in
        hpu_driver._open.cache_clear()


def test_a_rank_reads_the_gaudi_of_its_module(habana: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "2")
    health = HPU.health()
    assert health == pytest.approx(
        {"utilisation (%)": 90, "temperature (C)": 42, "power (W)": 450, "num_compiled_graphs": 17}
        | {"num_recipe_cache_hits": math.nan, "num_recipe_cache_misses": math.nan},
        nan_ok=True,
    )
    habana.recipe_cache = (5, 2)
    monkeypatch.setenv("PT_HPU_ENABLE_CACHE_METRICS", "1")
    assert [HPU.health()[f"num_recipe_cache_{name}"] for name in ("hits", "misses")] == [5, 2]


@pytest.mark.parametrize(
    ("environment", "module"),
    [
        ({}, 0),
        ({"LOCAL_RANK": "3"}, 3),
        ({"LOCAL_RANK": "1", "HABANA_VISIBLE_MODULES": "4, 6"}, 6),
        ({"LOCAL_RANK": "1", "HLS_MODULE_ID": "5"}, 5),
    ],
)
def test_the_module_is_the_one_that_habana_chooses(environment: dict[str, str], module: int) -> None:
    assert module_id(environment) == module


def test_what_cannot_be_read_is_left_out(habana: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pyhlml = importlib.import_module("pyhlml")
    monkeypatch.setattr(pyhlml.devices[1], "power_mW", -1)  # module 0
    assert math.isnan(HPU.health()["power (W)"])
    assert HPU.health()["temperature (C)"] == 40
    monkeypatch.setattr(pyhlml, "has_library", False)
    hpu_driver._open.cache_clear()
    assert all(math.isnan(HPU.health()[key]) for key in ("utilisation (%)", "temperature (C)", "power (W)"))


def test_the_line_shows_the_hottest_and_fits_into_100_columns() -> None:
    def over_ranks(low: float, high: float, rank: int) -> RankStats:
        return RankStats(low, (low + high) / 2, high, rank)

    values = {
        "max_memory_allocated (GB)": over_ranks(100.5, 121.25, 5),
        "total_memory_available (GB)": over_ranks(126.5, 126.5, 0),
        "host_memory_available (GB)": over_ranks(911.1, 955.5, 0),
        "utilisation (%)": over_ranks(81, 97, 3),
        "temperature (C)": over_ranks(55, 71, 7),
        "num_compiled_graphs": over_ranks(40, 44, 0),
    }
    row = memory_row("first_step", values)
    assert row == ("first step: peak 121.25 of 126.50 GB on rank 5; host 911.1 GB free; 81-97 % busy, 71 C on rank 7")
    assert len(row) <= 100


def test_records_on_cpu_have_none_of_it(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hpu_driver, "_readings", lambda: pytest.fail("read"))
    MemoryLog(LoggingConfig(), ParallelContext()).take("before_model", 0)
    assert "temperature" not in capsys.readouterr().out


def test_records_on_hpu_have_all_of_it(habana: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    import torch

    options = LoggingConfig(log_format="full")
    MemoryLog(options, ParallelContext(device=torch.device("hpu"))).take("before_model", 0)
    said = capsys.readouterr().out
    assert "| utilisation (%): 90 | temperature (C): 40 | power (W): 450 | num_compiled_graphs: 17 |" in said


@pytest.mark.parametrize(
    ("plugin", "says"),
    [("1.24.0.1007", False), ("1.24.1.482", False), ("1.23.0.695", True), ("2.24.0", True), ("unknown", False)],
)
def test_a_driver_of_another_release_is_warned_of(
    habana: Any, monkeypatch: pytest.MonkeyPatch, plugin: str, says: bool
) -> None:
    monkeypatch.setattr(device_hpu, "_plugin_version", lambda: plugin)
    warning = HPU.health_warning()
    assert (warning is not None) is says
    if warning is not None:
        assert warning.startswith(f"the driver is of release 1.24.1-5b2d8f1, habana-torch-plugin of {plugin}; ")
    monkeypatch.setattr(importlib.import_module("pyhlml"), "has_library", False)
    hpu_driver._open.cache_clear()
    assert HPU.health_warning() is None
