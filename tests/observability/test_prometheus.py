"""The text file for Prometheus, read by Prometheus's own parser."""

from __future__ import annotations

import math
import stat
import time
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from megatron.observability.trackers import prometheus
from megatron.observability.trackers.prometheus import METRICS, SAVED, PrometheusFile
from megatron.observability.trackers.tracker import TrackedRow
from megatron.options.config import ConfigError
from megatron.settings.command_line import load_config
from tests import runs
from tests.ranks import RankPools


def tracker_at(path: Path, *flags: str, iteration: int = 0) -> PrometheusFile:
    words = [*runs.TINY.split(), "--data-path", "d", "--train-iters", "1", "--prometheus-file", str(path)]
    return PrometheusFile(load_config([*words, *flags], 1), iteration)


def read(path: Path) -> dict[str, float]:
    """Return the values by name; each has one sample, a help and a type."""
    values = {}
    text = path.read_text()
    for family in text_string_to_metric_families(text):
        (sample,) = family.samples
        assert family.documentation
        assert family.type == ("counter" if sample.name.endswith("_total") else "gauge")
        assert set(sample.labels) == {"run"}
        values[sample.name.removeprefix("megatron_")] = sample.value
    assert text.endswith("\n")
    return values


def test_a_run_writes_its_newest_values(tmp_path: Path, ranks: RankPools) -> None:
    file, results = tmp_path / "run.prom", tmp_path / "results"
    data = runs.write_dataset(tmp_path / "text")
    flags = (
        f"--data-path {data} --train-iters 4 --log-interval 2 --save {tmp_path / 'a'} --save-interval 2 "
        f"--results-dir {results} --prometheus-file {file}"
    )
    began_s = time.time()
    assert ranks(1)(runs.train, flags) == [""]
    values, row = read(file), runs.rows(results)[-1]
    assert (values["iteration"], values["saved_iteration"]) == (4, 4)
    assert values["loss"] == row["lm_loss"]
    assert values["tokens_per_second"] == row["tokens_per_second"]
    assert values["consumed_samples_total"] == row["consumed_samples"]
    assert values["memory_bytes"] == row["max_memory_allocated (GB)"] * 2**30
    assert (values["up"], values["failed"], values["restarts"]) == (0, 0, 0)
    assert began_s < values["saved_timestamp_seconds"] <= time.time()
    assert began_s < values["updated_timestamp_seconds"] <= time.time()
    assert stat.S_IMODE(file.stat().st_mode) == 0o644


def test_numbers_and_names_that_are_not_plain_are_parsed(tmp_path: Path) -> None:
    name = 'a "quoted" run\\with\nall'
    tracker = tracker_at(tmp_path / "run.prom", "--results-dir", str(tmp_path / name))
    loss, norm = "lm-loss-training/lm loss", "grad-norm/grad-norm"
    tracker.log([TrackedRow({loss: math.nan, norm: math.inf, "consumed_samples": 8}, 3)])
    values = read(tmp_path / "run.prom")
    assert math.isnan(values["loss"])
    assert (values["grad_norm"], values["iteration"], values["up"]) == (math.inf, 3, 1)
    families = text_string_to_metric_families((tmp_path / "run.prom").read_text())
    assert {sample.labels["run"] for family in families for sample in family.samples} == {name}


def test_a_save_that_completes_late_does_not_set_the_step_back(tmp_path: Path) -> None:
    tracker = tracker_at(tmp_path / "run.prom", iteration=7)
    assert read(tmp_path / "run.prom")["iteration"] == 7
    tracker.log([TrackedRow({"consumed_samples": 8}, 12), TrackedRow({SAVED: 10}, 10, time_s=99.5)])
    values = read(tmp_path / "run.prom")
    assert (values["iteration"], values["saved_iteration"], values["saved_timestamp_seconds"]) == (12, 10, 99.5)


def test_the_end_of_a_run_shows(tmp_path: Path) -> None:
    tracker_at(tmp_path / "run.prom").close(failed=True)
    values = read(tmp_path / "run.prom")
    assert (values["up"], values["failed"]) == (0, 1)


def test_every_metric_has_a_name_of_its_own() -> None:
    metrics = [
        *METRICS.values(),
        *(value for value in vars(prometheus).values() if isinstance(value, prometheus._Metric)),
    ]
    assert len({metric.name for metric in metrics}) == len(metrics)


def test_a_file_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot be written .*; give a path in a folder that is there"):
        tracker_at(tmp_path / "none" / "run.prom")
    with pytest.raises(ConfigError, match=r"must end with \.prom: node_exporter reads no other file"):
        tracker_at(tmp_path / "run.txt")
