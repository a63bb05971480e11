"""MLflow and trackers from outside get what metrics.jsonl gets, and neither stop nor delay a training.

MLflow's own client speaks with a stand-in of its server, and once writes to a store of its own.
"""

from __future__ import annotations

import json
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from megatron.observability.metrics import MetricsLog
from megatron.observability.rank_times import RankStats
from megatron.observability.trackers import tracker_log
from megatron.observability.trackers.services import metric_name
from megatron.observability.trackers.tracker import TrackedRow, Tracker
from megatron.options.config import Config, ConfigError
from megatron.settings.command_line import load_config
from megatron.training.configure import check_trackers
from tests import runs
from tests.observability.mlflow_server import MlflowServer, mlflow_server
from tests.observability.test_wandb import STEP, config_of, open_log

pytest.importorskip("mlflow")


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("MLFLOW_")]:
        monkeypatch.delenv(name)
    for name in ("MLFLOW_HTTP_REQUEST_TIMEOUT", "MLFLOW_HTTP_REQUEST_MAX_RETRIES", "MLFLOW_DISABLE_TELEMETRY"):
        # set and removed, so that what the tracker sets itself is undone afterwards
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(tracker_log, "PAUSE_S", 0.05)
    monkeypatch.setattr(tracker_log, "LAST_PAUSE_S", 0.05)


@pytest.fixture
def server() -> Iterator[MlflowServer]:
    with mlflow_server() as started:
        yield started


def mlflow_config(results: Path | None, uri: str | None, **options: object) -> Config:
    return config_of(results, wandb_project=None, mlflow_experiment="bloom", mlflow_tracking_uri=uri, **options)


def test_its_values_are_those_of_metrics_jsonl(tmp_path: Path, server: MlflowServer) -> None:
    runs.write_dataset(tmp_path / "text")
    words = f"--data-path {tmp_path}/text --results-dir {tmp_path}/run --mlflow-experiment bloom --timing-log-level 1"
    words += f" --mlflow-tracking-uri {server.uri} --mlflow-tags team=red note=a=b --log-memory-interval 2"
    words += f" --save {tmp_path}/saved --save-interval 2"
    assert runs.train(f"{words} --train-iters 4") == ""
    assert runs.train(f"{words} --train-iters 6 --lr 2e-2 --override-opt-param-scheduler") == ""
    assert list(server.experiments) == ["bloom"]
    (run,) = server.runs.values()
    assert (run.name, run.status) == ("run", "FINISHED")
    assert {"team": "red", "note": "a=b"}.items() <= run.tags.items()
    # what a step has in the file, by the tags that docs/guides/logging.md lists
    tags = {
        "lm_loss": "lm-loss-training/lm loss",
        "learning_rate": "learning-rate/learning-rate",
        "grad_norm": "grad-norm/grad-norm",
        "iteration_time_s": "iteration-time/iteration-time",
        "tokens_per_second": "throughput/tokens_per_sec",
        "consumed_samples": "consumed_samples",
    }
    rows = runs.rows(tmp_path / "run")
    assert [row["iteration"] for row in rows] == [1, 2, 3, 4, 5, 6]
    for key, tag in tags.items():
        expected = [(row["iteration"], row[key]) for row in rows]
        # a validation of the start has a step 0
        assert [(step, value) for step, value in dict(run.metrics[tag]).items() if step > 0] == expected, tag
    for row in runs.rows(tmp_path / "run", "valid"):
        assert (row["iteration"], row["lm_loss"]) in run.metrics["lm-loss-validation/lm loss validation"]
    memory = runs.rows(tmp_path / "run", "memory")[-1]
    assert (memory["iteration"], memory["host_rss (GB)"]["max"]) in run.metrics["memory/host_rss GB max"]
    # of the start; what the second one changed is a tag
    assert run.params["optimizer.lr"] == "0.01"
    assert run.params["training.train_iters"] == "4"
    changed = run.tags["changed after iteration 4"]
    assert "optimizer.lr=0.02" in changed
    assert "training.train_iters=6" in changed


def test_a_store_of_its_own_holds_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow import MlflowClient

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    store = f"file:{tmp_path}/mlruns"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
    config = mlflow_config(tmp_path / "run 1", None, mlflow_run_name="try")
    check_trackers(config)
    for resumed in (0, 10):
        with open_log(config, resumed) as log:
            log.log_step(STEP)
            log.log_validation(10, 80, math.nan, 512)
            log.log_memory("interval", 10, {"utilisation (%)": RankStats(1.0, 1.5, 2.0, 1)})
    client = MlflowClient(tracking_uri=store)
    experiment = client.get_experiment_by_name("bloom")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.run_name == "try"
    assert run.info.status == "FINISHED"
    assert run.data.metrics["lm-loss-training/lm loss"] == 5.0
    assert math.isnan(run.data.metrics["lm-loss-validation/lm loss validation"])
    assert run.data.metrics["memory/utilisation mean"] == 1.5
    assert run.data.params["training.train_iters"] == "100"
    history = client.get_metric_history(run.info.run_id, "learning-rate/learning-rate")
    assert {(point.step, point.value) for point in history} == {(10, 1e-4)}


def test_a_new_run_begins_another_and_so_does_one_whose_run_was_deleted(
    tmp_path: Path, server: MlflowServer, caplog: pytest.LogCaptureFixture
) -> None:
    config = mlflow_config(tmp_path, server.uri)
    for resumed in (0, 10, 0):
        open_log(config, resumed).close()
    assert len(server.runs) == 2
    list(server.runs.values())[-1].lifecycle_stage = "deleted"
    open_log(config, 10).close()
    assert [run.status for run in server.runs.values()] == ["FINISHED"] * 3
    server.runs.clear()
    open_log(config, 10).close()
    assert [run.status for run in server.runs.values()] == ["FINISHED"]
    assert caplog.text.count("this start begins another") == 2


def test_a_failed_run_is_marked_as_failed(tmp_path: Path, server: MlflowServer) -> None:
    with pytest.raises(KeyError), open_log(mlflow_config(tmp_path, server.uri)):
        raise KeyError
    assert [run.status for run in server.runs.values()] == ["FAILED"]


def test_a_server_that_is_away_for_a_while_gets_everything_later(
    tmp_path: Path, server: MlflowServer, caplog: pytest.LogCaptureFixture
) -> None:
    with open_log(mlflow_config(tmp_path, server.uri)) as log:
        log.log_validation(1, 8, 5.0, 512)
        server.fault = 503
        for iteration in (2, 3, 4):
            log.log_validation(iteration, 8, 5.0, 512)
        waited_since = time.monotonic()
        while "kept meanwhile" not in caplog.text and time.monotonic() < waited_since + 20:
            time.sleep(0.02)
        server.fault = None
    (run,) = server.runs.values()
    assert sorted({step for step, _ in run.metrics["lm-loss-validation/lm loss validation"]}) == [1, 2, 3, 4]
    assert run.status == "FINISHED"
    # once each, whatever the number of attempts
    assert [sum(text in record.getMessage() for record in caplog.records) for text in ("kept", "goes on")] == [1, 1]


def test_a_server_that_never_answers_delays_neither_the_steps_nor_the_end(
    tmp_path: Path, server: MlflowServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tracker_log, "LAST_WAIT_S", 0.3)
    log = open_log(mlflow_config(tmp_path, server.uri))
    server.hang = threading.Event()
    began = time.monotonic()
    for _ in range(50):
        log.log_step(STEP)
    stepped = time.monotonic()
    log.close()
    # without the thread: the client's own 10 s for each of them, on a machine however slow
    assert stepped - began < 60
    assert time.monotonic() - stepped < 60
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 50
    assert "the rows of the last 50 log lines were not sent" in caplog.text
    server.hang.set()
    server.hang = None
    # it would go on in the next test
    log._trackers[0]._thread.join()


def test_a_refusal_ends_its_log_alone(
    tmp_path: Path, server: MlflowServer, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    with open_log(mlflow_config(tmp_path, server.uri)) as log:
        server.runs.clear()
        for _ in range(3):
            log.log_step(STEP)
    said = [record.getMessage() for record in caplog.records if record.name.startswith("megatron")]
    assert len(said) == 1
    assert said[0].startswith("MLflow: logging ended at iteration 10: RESOURCE_DOES_NOT_EXIST")
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_a_server_that_is_not_there_is_named_at_the_start(tmp_path: Path) -> None:
    with mlflow_server() as gone:
        uri = gone.uri
    with pytest.raises(ConfigError, match=rf"mlflow_tracking_uri={uri}: MLflow cannot start: .*; start the server"):
        open_log(mlflow_config(tmp_path, uri))


def test_a_resumed_run_starts_while_the_server_is_away(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with mlflow_server() as server:
        config = mlflow_config(tmp_path, server.uri)
        open_log(config).close()
    log = open_log(config, 10)
    assert "MLflow cannot be reached, the values are kept meanwhile" in caplog.text
    log.log_step(STEP)
    with mlflow_server(server) as back:
        log.close()
    (run,) = back.runs.values()
    assert run.metrics["lm-loss-training/lm loss"] == [(10, 5.0)]
    assert run.status == "FINISHED"


def test_a_token_goes_to_the_server_and_nowhere_else(
    tmp_path: Path, server: MlflowServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "s3cret")
    caplog.set_level(logging.DEBUG, "megatron")
    with open_log(mlflow_config(tmp_path, server.uri)) as log:
        log.log_step(STEP)
    assert server.headers[0]["Authorization"] == "Bearer s3cret"
    (run,) = server.runs.values()
    stored = json.dumps([run.params, run.tags, list(run.metrics)])
    stored += "".join(file.read_text(errors="replace") for file in tmp_path.rglob("*") if file.is_file())
    assert "s3cret" not in stored + caplog.text


def test_an_address_that_cannot_be_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ConfigError, match="mlflow_experiment=bloom needs a server; give mlflow_tracking_uri, or MLFLOW"
    ):
        check_trackers(mlflow_config(None, None))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:s3cret@host:5000")
    with pytest.raises(ConfigError, match="MLFLOW_TRACKING_URI holds an account, which the run would store") as caught:
        check_trackers(mlflow_config(None, None))
    assert "s3cret" not in str(caught.value)


def test_an_absent_package_is_named_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracker_log.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        ConfigError, match=r"mlflow_experiment=bloom needs the package mlflow.*pip install mlflow-skinny"
    ):
        check_trackers(mlflow_config(None, "http://host"))


def test_not_asked_for_it_is_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)  # an import would fail
    with open_log(config_of(tmp_path, wandb_project=None)) as log:
        log.log_step(STEP)


@pytest.mark.parametrize(
    ("tag", "name"),
    [
        ("lm-loss-training/lm loss", "lm-loss-training/lm loss"),
        ("memory/utilisation (%) max", "memory/utilisation max"),
        ("lm-eval/arc/acc,none", "lm-eval/arc/accnone"),
        ("metrics-training/größe", "metrics-training/gre"),
    ],
)
def test_names_are_those_that_mlflow_allows(tag: str, name: str) -> None:
    assert metric_name(tag) == name


class Broken(Tracker):
    def __init__(self, config: Config, resumed_iteration: int) -> None:
        pass

    def log(self, rows: Sequence[TrackedRow]) -> None:
        raise ZeroDivisionError("division by zero")

    def close(self, *, failed: bool) -> None:
        raise AssertionError("its log has ended")


def test_a_broken_tracker_ends_itself_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with open_log(config_of(tmp_path, wandb_project=None, trackers=(f"{__file__}:Broken",))) as log:
        for _ in range(3):
            log.log_step(STEP)
    assert [record.getMessage() for record in caplog.records] == [
        "Broken: logging ended at iteration 10: division by zero"
    ]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--trackers nowhere:Lines", "trackers=nowhere:Lines cannot be loaded"),
        ("--mlflow-tracking-uri http://me:s3cret@host", "mlflow_tracking_uri holds an account, which the run would"),
        ("--mlflow-experiment a --mlflow-tags red", "mlflow_tags=red is not NAME=VALUE; write it so"),
    ],
)
def test_options_that_are_wrong_are_refused(flags: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_config([*runs.TINY.split(), "--data-path", "x", "--train-iters", "1", *flags.split()], 1)


def test_what_is_no_tracker_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"trackers=json:dumps is not a subclass of .*tracker.Tracker"):
        open_log(config_of(tmp_path, wandb_project=None, trackers=("json:dumps",)))


def test_only_the_rank_that_writes_asks_for_it(tmp_path: Path, server: MlflowServer) -> None:
    open_log(mlflow_config(tmp_path, server.uri), writes=False).close()
    assert server.num_requests == 0


def test_the_rows_that_wait_are_bounded(
    tmp_path: Path, server: MlflowServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tracker_log, "MOST_WAITING", 5)
    log: MetricsLog = open_log(mlflow_config(tmp_path, server.uri))
    server.fault = 503
    for _ in range(20):
        log.log_step(STEP)
    log.close()
    assert "MLflow: logging ended at iteration 10: 5 rows wait to be sent" in caplog.text
