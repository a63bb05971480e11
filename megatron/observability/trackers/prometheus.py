"""Text file of a run for Prometheus (`--prometheus-file`), which node_exporter's textfile collector reads.

It is replaced in one piece at each log line and each save. Prometheus takes no time of its own from such a file, so
`megatron_updated_timestamp_seconds` has that of the newest value, by which a run that was killed shows.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from megatron.observability.trackers.tracker import TrackedRow, Tracker, run_name_of
from megatron.options.config import Config, ConfigError
from megatron.resilience import job
from megatron.runtime.files import replacing

SAVED = "checkpoints/saved iteration"
"""Tag of the iteration of a complete checkpoint."""
GIB = 2.0**30


class _Metric(NamedTuple):
    name: str
    help: str
    kind: str = "gauge"
    factor: float = 1.0


METRICS = {
    "lm-loss-training/lm loss": _Metric("loss", "Loss of the steps since the log line before."),
    "learning-rate/learning-rate": _Metric("learning_rate", "Learning rate of the last step."),
    "grad-norm/grad-norm": _Metric("grad_norm", "Norm of the last step's gradient before clipping."),
    "iteration-time/iteration-time": _Metric("step_seconds", "Mean time of a step."),
    "throughput/samples_per_sec": _Metric("samples_per_second", "Samples a second, over all ranks."),
    "throughput/tokens_per_sec": _Metric("tokens_per_second", "Tokens a second, over all ranks."),
    "throughput/tflops": _Metric("device_flops", "FLOP/s of a device, without recomputation.", factor=1e12),
    "throughput/mfu": _Metric("mfu", "Share of a device's peak."),
    "memory/max_memory_allocated (GB)": _Metric("memory_bytes", "Peak memory of rank 0's device.", factor=GIB),
    "lm-loss-validation/lm loss validation": _Metric("validation_loss", "Loss of the newest validation."),
    "consumed_samples": _Metric("consumed_samples_total", "Samples since the start of the run.", "counter"),
    SAVED: _Metric("saved_iteration", "Iteration of the newest complete checkpoint."),
}
"""By the tags of TensorBoard."""
ITERATION = _Metric("iteration", "Last step in the log.")
UPDATED = _Metric("updated_timestamp_seconds", "Time of the newest value.")
SAVED_AT = _Metric("saved_timestamp_seconds", "Time at which the newest checkpoint was complete.")
RESTARTS = _Metric("restarts", "Restarts of the job by its agent.")
UP = _Metric("up", "1 while the run goes on, 0 once it has ended.")
FAILED = _Metric("failed", "1 if the run has ended by an error.")


class PrometheusFile(Tracker):
    """File with the newest values of a run. Raises ConfigError where it cannot be written."""

    name = "Prometheus's file"

    def __init__(self, config: Config, resumed_iteration: int) -> None:
        options = config.logging
        assert options.prometheus_file is not None
        self._path = Path(options.prometheus_file)
        name = run_name_of(None, options.results_dir) or "run"
        escaped = name.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        self._label = f'{{run="{escaped}"}}'
        self._values: dict[_Metric, float] = {
            UP: 1,
            FAILED: 0,
            RESTARTS: job.restarts(),
            ITERATION: resumed_iteration,
            UPDATED: time.time(),
        }
        try:
            self._write()
        except OSError as error:
            fault = f"cannot be written ({error.strerror}); give a path in a folder that is there"
            raise ConfigError([f"prometheus_file={self._path} {fault}"]) from error

    def log(self, rows: Sequence[TrackedRow]) -> None:
        for row in rows:
            self._take(row.values, row)
        self._write()

    def _take(self, values: Mapping[str, float], row: TrackedRow) -> None:
        for tag, value in values.items():
            if metric := METRICS.get(tag):
                self._values[metric] = value * metric.factor
        if SAVED in values:
            self._values[SAVED_AT] = row.time_s
        # a save in the background is complete some steps later
        if "consumed_samples" in values:
            self._values[ITERATION] = row.iteration
        self._values[UPDATED] = row.time_s

    def close(self, *, failed: bool) -> None:
        self._values |= {UP: 0, FAILED: int(failed)}
        self._write()

    def _write(self) -> None:
        with replacing(self._path) as file:
            file.write(self.text().encode())
        # its reader is another user
        self._path.chmod(0o644)

    def text(self) -> str:
        """Return the file's content, in Prometheus's text format."""
        lines = []
        for metric, value in self._values.items():
            name = f"megatron_{metric.name}"
            lines += [
                f"# HELP {name} {metric.help}",
                f"# TYPE {name} {metric.kind}",
                f"{name}{self._label} {_number(value)}",
            ]
        return "\n".join(lines) + "\n"


def _number(value: float) -> str:
    """Return a number as the format writes it, which has NaN, +Inf and -Inf."""
    return {"nan": "NaN", "inf": "+Inf", "-inf": "-Inf"}.get(text := repr(float(value)), text)
