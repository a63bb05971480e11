"""wandb gets what TensorBoard gets, goes on where it was, and never ends a run. wandb itself is a stand-in."""

from __future__ import annotations

import importlib.machinery
import json
import logging
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from megatron.observability.metrics import MetricsLog
from megatron.observability.rank_times import RankStats
from megatron.observability.step_metrics import StepMetrics
from megatron.options.config import Config, ConfigError, LoggingConfig, TrainingConfig
from megatron.training.configure import check_trackers


class Wandb:
    """What wandb.init was given, and what its run was told (docs.wandb.ai: ref/python)."""

    def __init__(self) -> None:
        self.inits: list[dict[str, Any]] = []
        self.logged: list[dict[str, Any]] = []
        self.metrics: list[tuple[str, str | None]] = []
        self.finished: list[int] = []
        self.fault: Exception | None = None

    def init(self, **options: Any) -> Wandb:
        json.dumps(options)  # as wandb sends the config
        self.inits.append(options)
        if self.fault is not None:
            raise self.fault
        return self

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        self.metrics.append((name, step_metric))

    def log(self, data: dict[str, Any]) -> None:
        if self.fault is not None:
            raise self.fault
        self.logged.append(data)

    def finish(self, exit_code: int) -> None:
        self.finished.append(exit_code)


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> Wandb:
    stand_in, module = Wandb(), ModuleType("wandb")
    module.__dict__["init"] = stand_in.init
    module.__spec__ = importlib.machinery.ModuleSpec("wandb", None)
    monkeypatch.setitem(sys.modules, "wandb", module)
    return stand_in


def config_of(results: Path | None, **options: Any) -> Config:
    folder = None if results is None else str(results)
    return Config(
        training=TrainingConfig(train_iters=100),
        logging=LoggingConfig(results_dir=folder, **{"wandb_project": "bloom", **options}),
    )


def open_log(config: Config, resumed_iteration: int = 0, writes: bool = True) -> MetricsLog:
    return MetricsLog(
        config,
        writes=writes,
        world_size=1,
        device_peak_tflops=None,
        total_iterations=100,
        resumed_iteration=resumed_iteration,
    )


STEP = StepMetrics(
    iteration=10,
    steps=10,
    consumed_samples=80,
    consumed_tokens=10240,
    elapsed_s=0.125,
    learning_rate=1e-4,
    global_batch_size=8,
    lm_loss=5.0,
    loss_scale=1.0,
    grad_norm=1.5,
    skipped_iterations=0,
    nan_iterations=0,
)


def test_it_gets_tensorboards_values_by_iteration(tmp_path: Path, wandb: Wandb) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with open_log(config_of(tmp_path / "run 1")) as log:
        log.log_step(STEP)
        log.log_validation(10, 80, 4.0, 512)
        log.log_memory("interval", 10, {"memory_allocated (GB)": RankStats(1.0, 1.5, 2.0, 1)})
        log.log_timers(10, 80, {"optimizer-time": RankStats(0.25, 0.5, 0.75, 1)})
    events = EventAccumulator(str(tmp_path / "run 1" / "tensorboard"))
    events.Reload()
    tags = [tag for tag in events.Tags()["scalars"] if not tag.endswith(" vs samples")]
    told = {tag: value for each in wandb.logged for tag, value in each.items()}
    assert set(told) == {*tags, "iteration", "consumed_samples"}
    for tag in tags:
        assert told[tag] == pytest.approx(events.Scalars(tag)[0].value)
    assert all(each["iteration"] == 10 for each in wandb.logged)
    assert ("*", "iteration") in wandb.metrics
    assert wandb.finished == [0]
    (init,) = wandb.inits
    assert (init["project"], init["name"], init["dir"]) == ("bloom", "run 1", str(tmp_path / "run 1"))
    assert init["config"]["training"]["train_iters"] == 100


def test_a_resumed_run_goes_on_in_its_own_and_a_new_one_begins_another(tmp_path: Path, wandb: Wandb) -> None:
    for resumed in (0, 10, 0, 10):
        open_log(config_of(tmp_path), resumed).close()
    first, resumed_first, second, resumed_second = (init["id"] for init in wandb.inits)
    assert first == resumed_first != second == resumed_second
    assert {init["resume"] for init in wandb.inits} == {"allow"}


def test_names_and_folder_are_the_users(tmp_path: Path, wandb: Wandb) -> None:
    folder = tmp_path / "w"
    options = {"wandb_entity": "team", "wandb_exp_name": "try", "wandb_save_dir": str(folder)}
    open_log(config_of(None, **options)).close()
    (init,) = wandb.inits
    assert (init["entity"], init["name"], init["dir"]) == ("team", "try", str(folder))
    assert folder.is_dir()


def test_a_failed_run_is_marked_as_failed(tmp_path: Path, wandb: Wandb) -> None:
    with pytest.raises(KeyError), open_log(config_of(tmp_path)):
        raise KeyError
    assert wandb.finished == [1]


def test_a_fault_of_wandbs_ends_its_log_alone(
    tmp_path: Path, wandb: Wandb, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    with open_log(config_of(tmp_path)) as log, caplog.at_level(logging.WARNING):
        log.log_step(STEP)
        wandb.fault = OSError("no network")
        for _ in range(3):
            log.log_step(STEP)
    assert len(wandb.logged) == 1
    assert [record.getMessage() for record in caplog.records] == ["wandb: logging ended at iteration 10: no network"]
    assert len(capsys.readouterr().out.splitlines()) == 4


def test_a_start_that_fails_names_the_remedy(tmp_path: Path, wandb: Wandb) -> None:
    wandb.fault = RuntimeError("api_key not configured")
    with pytest.raises(
        ConfigError, match=r"cannot start: api_key not configured; run `wandb login`, or set WANDB_MODE"
    ):
        open_log(config_of(tmp_path))


def test_only_the_rank_that_writes_asks_for_it(tmp_path: Path, wandb: Wandb) -> None:
    open_log(config_of(tmp_path), writes=False).close()
    assert wandb.inits == []


def test_absent_package_is_told_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    check_trackers(config_of(None, wandb_project=None))
    with pytest.raises(ConfigError, match=r"wandb_project=bloom needs the package wandb.*pip install wandb"):
        check_trackers(config_of(None))


def test_not_asked_for_it_is_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # an import would fail
    with open_log(config_of(tmp_path, wandb_project=None)) as log:
        log.log_step(STEP)
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 1
