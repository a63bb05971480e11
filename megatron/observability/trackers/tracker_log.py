"""Trackers of a run: each is started, gets the values, and is kept from ending or delaying the training.

Values are sent by a thread, so that training never waits for a network. While a service is away they are kept, and
sent when it is back.
"""

from __future__ import annotations

import importlib.util
import logging
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice

from megatron.observability.trackers.prometheus import PrometheusFile
from megatron.observability.trackers.services import MlflowTracker, WandbTracker, tracking_uri
from megatron.observability.trackers.tracker import TrackedRow, Tracker
from megatron.options.config import Config, ConfigError
from megatron.options.outputs import account_fault
from megatron.options.plugins import import_attribute

logger = logging.getLogger(__name__)

MOST_ROWS = 100
"""Rows that a tracker gets at once."""
MOST_WAITING = 100_000
"""Rows that are kept while a service is away: with some 30 values each, about 300 MB."""
PAUSE_S = 30.0
"""Time between two attempts to reach a service that is away."""
LAST_PAUSE_S = 1.0
"""The same once the run has ended and waits."""
LAST_WAIT_S = 30.0
"""Longest wait at the end of a run for what has not been sent."""


def tracker_faults(config: Config) -> Iterator[str]:
    """Yield what keeps a requested tracker from starting, as far as it is known without the service."""
    options = config.logging
    for option, value, package, install in (
        ("wandb_project", options.wandb_project, "wandb", "wandb"),
        ("mlflow_experiment", options.mlflow_experiment, "mlflow", "mlflow-skinny"),
    ):
        if value is not None and importlib.util.find_spec(package) is None:
            yield (
                f"{option}={value} needs the package {package}, which is not installed; pip install {install}, or "
                "leave it out"
            )
    if options.mlflow_experiment is None:
        return
    uri = tracking_uri(config)
    if uri is None:
        yield (
            f"mlflow_experiment={options.mlflow_experiment} needs a server; give mlflow_tracking_uri, or "
            "MLFLOW_TRACKING_URI in the environment"
        )
    # of the environment's alone: the option was checked with the others
    elif fault := account_fault("MLFLOW_TRACKING_URI", uri):
        yield fault


def start_trackers(config: Config, resumed_iteration: int) -> list[TrackerLog]:
    """Return the logs of the requested trackers. Raises ConfigError if one cannot start."""
    classes: list[type[Tracker]] = []
    if config.logging.wandb_project is not None:
        classes.append(WandbTracker)
    if config.logging.mlflow_experiment is not None:
        classes.append(MlflowTracker)
    if config.logging.prometheus_file is not None:
        classes.append(PrometheusFile)
    classes += [load_tracker(name) for name in config.logging.trackers]
    return [TrackerLog(tracker(config, resumed_iteration)) for tracker in classes]


def load_tracker(name: str) -> type[Tracker]:
    """Return the class that `package.module:CLASS` or `FILE.py:CLASS` names. Raises ConfigError."""
    found = import_attribute("trackers", name)
    if not (isinstance(found, type) and issubclass(found, Tracker)):
        raise ConfigError([f"trackers={name} is not a subclass of megatron.observability.trackers.tracker.Tracker"])
    return found


class TrackerLog:
    """Passes rows to a tracker. No error of the tracker ends the run, and none delays it."""

    def __init__(self, tracker: Tracker) -> None:
        self._tracker, self._name = tracker, tracker.name or type(tracker).__name__
        self._waiting: deque[TrackedRow] = deque()
        # guards all that follows
        self._changed = threading.Condition()
        self._has_ended = self._is_away = False
        self._failed: bool | None = None
        """True: the run has ended by an error, False: without. None: it goes on."""
        # a daemon: a service that never answers must not keep the process
        self._thread = threading.Thread(target=self._send, name=self._name, daemon=True)
        if not tracker.queues_itself:
            self._thread.start()

    def log(self, values: Mapping[str, float], iteration: int) -> None:
        """Have values logged."""
        row = TrackedRow(dict(values), iteration)
        if self._tracker.queues_itself:
            self._log_now(row)
            return
        with self._changed:
            if len(self._waiting) >= MOST_WAITING:
                self._end(f"{MOST_WAITING} rows wait to be sent", row.iteration)
            if not self._has_ended:
                self._waiting.append(row)
                self._changed.notify()

    def _log_now(self, row: TrackedRow) -> None:
        if self._has_ended:
            return
        try:
            self._tracker.log([row])
        except Exception as error:  # no error of a tracker is a reason to stop training
            # once: further calls would each wait for the network
            self._end(error, row.iteration)

    def close(self, *, failed: bool) -> None:
        """Wait until everything is sent, LAST_WAIT_S at most. A second call does nothing."""
        if self._failed is not None:
            return
        with self._changed:
            self._failed = failed
            self._changed.notify()
        if self._tracker.queues_itself:
            self._close_tracker()
            return
        self._thread.join(LAST_WAIT_S)
        if self._waiting and not self._has_ended:
            logger.warning(
                "%s: the rows of the last %d log lines were not sent within %.0f s, from iteration %d on",
                self._name,
                len(self._waiting),
                LAST_WAIT_S,
                self._waiting[0].iteration,
            )

    def _close_tracker(self) -> None:
        if self._has_ended:
            return
        try:
            self._tracker.close(failed=bool(self._failed))
        except Exception as error:  # as in `log`
            logger.warning("%s did not finish: %s", self._name, error)

    def _send(self) -> None:
        """Send rows until the run ends; the thread's own function."""
        while rows := self._next_rows():
            try:
                self._tracker.log(rows)
            except Exception as error:  # a user's tracker may raise anything
                if not self._waits_after(error, rows[0].iteration):
                    return
                continue
            with self._changed:
                # `log` gives up and forgets them if too many wait
                if self._has_ended:
                    return
                for _ in rows:
                    self._waiting.popleft()
            if self._is_away:
                self._is_away = False
                logger.warning("%s: logging goes on at iteration %d", self._name, rows[-1].iteration)
        self._close_tracker()

    def _next_rows(self) -> Sequence[TrackedRow]:
        """Wait for rows, and return the first ones; none at the end of the run. They stay until they are sent."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._waiting) or self._failed is not None or self._has_ended)
            if self._has_ended:
                return ()
            return list(islice(self._waiting, MOST_ROWS))

    def _waits_after(self, error: Exception, iteration: int) -> bool:
        """Wait before the next attempt. Return False if there is none."""
        if not self._tracker.may_recover(error):
            self._end(error, iteration)
            return False
        if not self._is_away:
            self._is_away = True
            logger.warning(
                "%s: nothing can be sent at iteration %d, the values are kept meanwhile: %s",
                self._name,
                iteration,
                error,
            )
        if self._failed is not None:
            time.sleep(LAST_PAUSE_S)
            return True
        with self._changed:
            # the end of the run is worth an attempt at once
            self._changed.wait_for(lambda: self._failed is not None, PAUSE_S)
        return True

    def _end(self, reason: Exception | str, iteration: int) -> None:
        with self._changed:
            if self._has_ended:
                return
            self._has_ended = True
            self._waiting.clear()
        logger.warning("%s: logging ended at iteration %d: %s", self._name, iteration, reason)
