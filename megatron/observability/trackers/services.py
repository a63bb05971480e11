"""Weights & Biases (`--wandb-project`) and MLflow (`--mlflow-experiment`), each through its own library.

wandb takes its account from `wandb login` or WANDB_API_KEY; WANDB_MODE=offline needs no account, and `wandb sync`
uploads the run later. MLflow's client is mlflow-skinny, which speaks with every server; the whole package, with the
server itself, brings a hundred megabytes of others, and serves too. MLFLOW_TRACKING_USERNAME and
MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN, are the account. Both are optional, and imported only here.
"""

from __future__ import annotations

import importlib
import logging
import os
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from megatron.observability.trackers.tracker import TrackedRow, Tracker, run_name_of, store_id, stored_id
from megatron.options.config import Config, ConfigError
from megatron.runtime.commands import train_name

logger = logging.getLogger(__name__)

WANDB_RUN, MLFLOW_RUN = "wandb_run_id.txt", "mlflow_run_id.txt"
"""Files in the results folder: a resumed run continues the same run of the service."""
VARIABLES = {
    # its own 120 s and 7 attempts are four minutes in which a start says nothing; later TrackerLog tries again itself
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    # of its own makers
    "MLFLOW_DISABLE_TELEMETRY": "true",
}
"""Variables of the client, where the environment does not set them."""
# limits of a request, by MLflow's REST API
MOST_METRICS, MOST_PARAMS, LONGEST_VALUE = 1000, 100, 6000


def tracking_uri(config: Config) -> str | None:
    """Return the address of the server, or of another store. None: there is none."""
    return config.logging.mlflow_tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")


class WandbTracker(Tracker):
    """Run of wandb."""

    name = "wandb"
    queues_itself = True  # its own process sends

    def __init__(self, config: Config, resumed_iteration: int) -> None:
        options = config.logging
        wandb: Any = importlib.import_module("wandb")
        results = options.results_dir
        run_id = stored_id(results, WANDB_RUN) if resumed_iteration > 0 else None
        if run_id is None:
            run_id = secrets.token_hex(4)
            store_id(results, WANDB_RUN, run_id)
        folder = options.wandb_save_dir or results
        if folder is not None:
            Path(folder).mkdir(parents=True, exist_ok=True)
        try:
            self._run: Any = wandb.init(
                project=options.wandb_project,
                entity=options.wandb_entity,
                name=run_name_of(options.wandb_exp_name, results),
                dir=folder,
                id=run_id,
                # goes on if the id is known, and begins a run if it is not, as offline
                resume="allow",
                config=config.to_dict(),
            )
            # by our iteration, not wandb's own count of calls, which refuses to go back when a run is resumed
            self._run.define_metric("iteration")
            self._run.define_metric("*", step_metric="iteration")
        except Exception as error:  # wandb's own, and those of the network beneath it
            raise ConfigError(
                [
                    f"wandb_project={options.wandb_project}: wandb cannot start: {error}; run `wandb login`, or set "
                    "WANDB_MODE=offline"
                ]
            ) from error

    def log(self, rows: Sequence[TrackedRow]) -> None:
        for row in rows:
            self._run.log({**row.values, "iteration": row.iteration})

    def close(self, *, failed: bool) -> None:
        self._run.finish(exit_code=1 if failed else 0)


class MlflowTracker(Tracker):
    """Run of MLflow."""

    name = "MLflow"

    def __init__(self, config: Config, resumed_iteration: int) -> None:
        for name, value in VARIABLES.items():
            os.environ.setdefault(name, value)
        self._mlflow: Any = importlib.import_module("mlflow")
        self._entities: Any = importlib.import_module("mlflow.entities")
        self._config, self._resumed_iteration = config, resumed_iteration
        self._run_id: str | None = None
        """None: a resumed run has begun while the server was away."""
        uri = tracking_uri(config)
        try:
            self._client: Any = self._mlflow.MlflowClient(tracking_uri=uri)
            self._connect()
        except Exception as error:  # MLflow's own, and those of the network or the store beneath it
            # a restart at night must not wait for somebody who starts the server
            if resumed_iteration > 0 and self.may_recover(error):
                logger.warning("MLflow cannot be reached, the values are kept meanwhile: %s", error)
                return
            raise ConfigError(
                [
                    f"mlflow_tracking_uri={uri}: MLflow cannot start: {error}; start the server there, or correct the "
                    "address. A database needs `pip install mlflow`, a folder MLFLOW_ALLOW_FILE_STORE=true"
                ]
            ) from error

    def _connect(self) -> str:
        """Return the id of the run, which is continued or begun first."""
        if self._run_id is None:
            self._run_id = self._continued_run() or self._new_run()
            store_id(self._config.logging.results_dir, MLFLOW_RUN, self._run_id)
        return self._run_id

    def _new_run(self) -> str:
        options = self._config.logging
        experiment = self._client.get_experiment_by_name(options.mlflow_experiment)
        if experiment is None:
            experiment_id = self._client.create_experiment(options.mlflow_experiment)
        else:
            experiment_id = experiment.experiment_id
        tags = {"mlflow.source.name": train_name()}
        # a container may have no user by name
        if user := os.environ.get("USER"):
            tags["mlflow.user"] = user
        run = self._client.create_run(
            experiment_id,
            run_name=run_name_of(options.mlflow_run_name, options.results_dir),
            tags=tags | dict(pair.split("=", 1) for pair in options.mlflow_tags),
        )
        run_id: str = run.info.run_id
        self._log_params(run_id, params_of(self._config))
        return run_id

    def _continued_run(self) -> str | None:
        """Return the run of the results folder, which runs again. None: there is none, or it was deleted."""
        run_id = None
        if self._resumed_iteration > 0:
            run_id = stored_id(self._config.logging.results_dir, MLFLOW_RUN)
        if run_id is None:
            return None
        try:
            stored = self._client.get_run(run_id)
        except self._mlflow.exceptions.MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            stored = None
        # a deleted run is still there for some days, and takes no values
        if stored is None or stored.info.lifecycle_stage == "deleted":
            logger.warning("MLflow has no run %s any more; this start begins another", run_id)
            return None
        self._client.update_run(run_id, status="RUNNING")
        earlier, now = stored.data.params, params_of(self._config)
        self._log_params(run_id, {name: value for name, value in now.items() if name not in earlier})
        changed = {name: value for name, value in now.items() if earlier.get(name, value) != value}
        if changed:
            # a param of MLflow is never changed
            text = " ".join(f"{name}={value}" for name, value in changed.items())
            self._client.set_tag(run_id, f"changed after iteration {self._resumed_iteration}", text[:LONGEST_VALUE])
        return run_id

    def _log_params(self, run_id: str, params: Mapping[str, str]) -> None:
        made = (self._entities.Param(name, value) for name, value in params.items())
        for part in _parts(made, MOST_PARAMS):
            self._client.log_batch(run_id, params=part)

    def log(self, rows: Sequence[TrackedRow]) -> None:
        run_id = self._connect()
        metrics = (
            # the time of the row: values that are sent again after a lost answer are the same ones
            self._entities.Metric(metric_name(tag), float(value), int(row.time_s * 1000), row.iteration)
            for row in rows
            for tag, value in row.values.items()
        )
        for part in _parts(metrics, MOST_METRICS):
            self._client.log_batch(run_id, metrics=part)

    def may_recover(self, error: Exception) -> bool:
        if not isinstance(error, self._mlflow.exceptions.MlflowException):
            return super().may_recover(error)
        # of an error of the client's it says 500: there was no answer
        status: int = error.get_http_status_code()
        return status >= 500 or status == 429  # too many requests

    def close(self, *, failed: bool) -> None:
        self._client.set_terminated(self._connect(), status="FAILED" if failed else "FINISHED")


def metric_name(tag: str) -> str:
    """Return the tag in the letters that MLflow allows: `memory/memory_allocated (GB) max` without its brackets."""
    allowed = re.sub(r"[^\w\-. :/]", "", tag, flags=re.ASCII)
    return re.sub(r" +", " ", allowed).strip()


def params_of(config: Config) -> dict[str, str]:
    """Return every option that has a value, as `optimizer.lr`."""
    params = {}
    for section, values in config.to_dict().items():
        for name, value in values.items():
            if value is not None:
                params[f"{section}.{name}"] = str(value)[:LONGEST_VALUE]
    return params


def _parts(items: Iterable[Any], size: int) -> Iterator[list[Any]]:
    rest = iter(items)
    while part := list(islice(rest, size)):
        yield part
