"""Totals of a run over the rows of its metrics.jsonl, those of earlier starts included."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron.observability.load_report import LoadReport
from megatron.observability.rank_times import StragglerStats
from megatron.runtime.accelerator import MAX_ALLOCATED, TOTAL


@dataclass(frozen=True)
class LossAt:
    """Loss of an iteration."""

    loss: float
    iteration: int


class RunTotals:
    """Sums and extremes over all logged steps; steps after the last log line are not included."""

    def __init__(self, flops_per_token: float, peak_tflops: float | None, world_size: int) -> None:
        self._flops_per_token, self._peak_tflops, self._world_size = flops_per_token, peak_tflops, world_size
        self.training_s = 0.0
        """Time of the steps, without saves and evaluations."""
        self._device_s = 0.0
        """The same, times the devices, whose number may differ from start to start."""
        self._tflop = 0.0
        self.tokens = 0.0
        """Tokens trained on in that time."""
        self._over_predicted: list[float] = []
        self.predicted_s: float | None = None
        """Last predicted time of a step."""
        self.last: dict[str, LossAt] = {}
        """Last loss by kind of row: train, valid, test."""
        self.lowest: dict[str, LossAt] = {}
        self.peak_memory_gb: float | None = None
        """Peak of the rank with the most."""
        self.total_memory_gb: float | None = None
        """Memory of that device, or of the host."""

    def add(self, row: Mapping[str, Any]) -> None:
        """Add a row of any kind; one of an earlier version may lack values."""
        kind = row.get("kind")
        if kind in ("train", "valid", "test"):
            self._add_loss(str(kind), row.get("lm_loss"), row["iteration"])
        if kind == "train":
            self._add_step(row)
            self._add_memory(row.get(MAX_ALLOCATED), row.get(TOTAL))
        if kind == "memory":
            self._add_memory(row.get(MAX_ALLOCATED, {}).get("max"), row.get(TOTAL, {}).get("max"))

    def _add_step(self, row: Mapping[str, Any]) -> None:
        # a row's time is the mean of the steps since the row before
        seconds = (row.get("iteration_time_s") or 0.0) * row.get("steps", 0)
        if seconds <= 0:
            return
        if row.get("predicted_time_s"):
            self.predicted_s = row["predicted_time_s"]
            self._over_predicted.append(row["iteration_time_s"] / row["predicted_time_s"])
        self.training_s += seconds
        speed, own = row.get("tokens_per_second") or 0.0, row.get("tokens_per_second_per_device")
        self.tokens += speed * seconds
        num_devices = self._world_size
        if speed and own:
            num_devices = round(speed / own)  # of the start that wrote the row
        self._device_s += seconds * num_devices
        tflops = row.get("tflops_per_device")
        if tflops is None:
            tflops = speed / num_devices * self._flops_per_token / 1e12
        # of the row, since rows of tokens may have grown (seq_length_stages)
        self._tflop += tflops * seconds * num_devices

    def _add_loss(self, kind: str, loss: float | None, iteration: int) -> None:
        # null in the file: NaN, which no comparison orders
        if loss is None or not math.isfinite(loss):
            return
        self.last[kind] = LossAt(loss, iteration)
        if kind not in self.lowest or loss < self.lowest[kind].loss:
            self.lowest[kind] = self.last[kind]

    def _add_memory(self, peak_gb: float | None, total_gb: float | None) -> None:
        if peak_gb is not None and peak_gb > (self.peak_memory_gb or 0.0):
            # together: devices of several starts may differ in size
            self.peak_memory_gb, self.total_memory_gb = peak_gb, total_gb

    @property
    def over_predicted(self) -> float | None:
        """Median of the rows' times divided by the predicted ones."""
        # the first one has what allocates and compiles
        ratios = self._over_predicted[1:] or self._over_predicted
        return statistics.median(ratios) if ratios else None

    @property
    def tokens_per_second(self) -> float | None:
        if self.training_s <= 0:
            return None
        return self.tokens / self.training_s

    @property
    def tflops_per_device(self) -> float | None:
        if self._device_s <= 0:
            return None
        return self._tflop / self._device_s

    @property
    def mfu(self) -> float | None:
        tflops = self.tflops_per_device
        if tflops is None or not self._peak_tflops:
            return None
        return tflops / self._peak_tflops


@dataclasses.dataclass(frozen=True)
class StepMetrics:
    """Values that the training loop passes after the last step of a log interval."""

    iteration: int
    steps: int
    """Steps since the previous log line."""
    consumed_samples: int
    """Samples of the run up to and including this step; `consumed_tokens` likewise."""
    consumed_tokens: int
    elapsed_s: float
    """Mean time of the steps since the previous log line."""
    learning_rate: float
    """Learning rate of this step; `global_batch_size` likewise."""
    global_batch_size: int
    lm_loss: float
    """Mean over the finite steps since the previous log line."""
    loss_scale: float
    grad_norm: float | None
    """Norm of this step before clipping. None where the engine has none, as after a skipped step."""
    skipped_iterations: int
    nan_iterations: int
    decoupled_learning_rate: float | None = None
    """Learning rate of word embedding and output layer in this step, where it is another."""
    muon_learning_rate: float | None = None
    """Learning rate of Muon's matrices in this step, where it is another."""
    memory: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Result of `accelerator.memory_stats`."""
    predicted_s: float | None = None
    """Mean predicted time of these steps; None: nothing is predicted."""
    parts: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Mean seconds of a step on rank 0 by part (`PartSeconds`), where its time is predicted."""
    straggler: StragglerStats | None = None
    """Times over the ranks, where log_straggler is on."""
    compiled_graphs: int | None = None
    """Graphs that rank 0's HPU has compiled since the process began; None on other devices."""
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Metrics of the task, and terms and metrics of layers, by name, over the steps since the previous log line."""
    max_attention_logit: float | None = None
    """Largest attention logit of these steps, where log_max_attention_logit is on."""
    experts: LoadReport | None = None
    """Loads of experts over these steps; None: there are no experts, or no step was applied."""


@dataclasses.dataclass(frozen=True)
class Speed:
    """Throughput of the steps since the previous log line. MFU: share of the device's peak, without recomputation."""

    samples_per_second: float
    tokens_per_second: float
    tokens_per_second_per_device: float
    tflops_per_device: float
    mfu: float | None


@dataclasses.dataclass(frozen=True)
class Validation:
    """Loss and metrics over held-out data."""

    lm_loss: float
    perplexity: float | None
    """None unless the loss is a mean over tokens."""
    count: int
    unit: str
    """Unit of `count`: tokens, or another that the task divides its loss by."""
    metrics: Mapping[str, float]


def step_row(step: StepMetrics, speed: Speed) -> dict[str, Any]:
    """Return the row of metrics.jsonl."""
    row = {field.name: getattr(step, field.name) for field in dataclasses.fields(step)}
    row.pop("experts")
    if step.experts is not None:
        row["experts"] = step.experts.to_json()
    row["iteration_time_s"] = row.pop("elapsed_s")
    memory, straggler = row.pop("memory"), row.pop("straggler")
    row["predicted_time_s"] = row.pop("predicted_s")
    if step.predicted_s is not None:
        row["time_over_predicted"] = step.elapsed_s / step.predicted_s
    # keys that only some devices, tasks and machines have
    for name in (
        "decoupled_learning_rate",
        "muon_learning_rate",
        "compiled_graphs",
        "max_attention_logit",
        "metrics",
        "predicted_time_s",
        "parts",
    ):
        if row[name] in (None, {}):
            del row[name]
    row |= {**vars(speed), **memory}
    if straggler is not None:
        row |= vars(straggler)
    return row


def step_scalars(step: StepMetrics, speed: Speed) -> dict[str, float]:
    """Return the scalars by Megatron-DeepSpeed's tags, and tags of the same form where it has none."""
    scalars: dict[str, float | None] = {
        "lm-loss-training/lm loss": step.lm_loss,
        **{f"metrics-training/{name}": value for name, value in step.metrics.items()},
        "learning-rate/learning-rate": step.learning_rate,
        "learning-rate/decoupled learning-rate": step.decoupled_learning_rate,
        "learning-rate/muon learning-rate": step.muon_learning_rate,
        "batch-size/batch-size": step.global_batch_size,
        "loss-scale/loss-scale": step.loss_scale,
        "grad-norm/grad-norm": step.grad_norm,
        "max-attention-logit/max-attention-logit": step.max_attention_logit,
        "iteration-time/iteration-time": step.elapsed_s,
        "iteration-time/over predicted": None if step.predicted_s is None else step.elapsed_s / step.predicted_s,
        "throughput/samples_per_sec": speed.samples_per_second,
        "throughput/tokens_per_sec": speed.tokens_per_second,
        "throughput/tokens_per_device_per_sec": speed.tokens_per_second_per_device,
        "throughput/tflops": speed.tflops_per_device,
        "throughput/mfu": speed.mfu,
        "memory/max_memory_allocated (GB)": step.memory.get(MAX_ALLOCATED),
        "compiled-graphs/compiled-graphs": step.compiled_graphs,
    }
    if step.straggler is not None:
        scalars |= {
            "straggler/own time min": step.straggler.own_time_min_s,
            "straggler/own time median": step.straggler.own_time_median_s,
            "straggler/own time max": step.straggler.own_time_max_s,
            "straggler/slowest rank": step.straggler.slowest_rank,
            "straggler/slowest ratio": step.straggler.slowest_ratio,
            "straggler/data wait max": step.straggler.data_wait_max_s,
        }
    if step.experts is not None:
        scalars["experts/largest share"] = step.experts.largest[0]
        scalars["experts/dropped tokens"] = step.experts.dropped
    return {tag: value for tag, value in scalars.items() if value is not None}


def validation_row_of(validation: Validation, split: str, dataset: str | None) -> tuple[str, dict[str, Any]]:
    """Return kind and content of the row of metrics.jsonl. `dataset`: the one of several; None: all."""
    row: dict[str, Any] = {"lm_loss": validation.lm_loss}
    if validation.perplexity is not None:
        row["perplexity"] = validation.perplexity
    row[f"num_{validation.unit}"] = validation.count
    if validation.metrics:
        row["metrics"] = validation.metrics
    if dataset is None:
        return split, row
    # a kind of its own, so that curves of `valid` have one row an iteration
    return f"{split}_set", {"set": dataset, **row}


def validation_scalars(validation: Validation, name: str) -> dict[str, float]:
    """Return the scalars; `name` ends their tags."""
    tag = f"lm-loss-validation/lm loss {name}"
    scalars = {tag: validation.lm_loss}
    if validation.perplexity is not None:
        scalars[f"{tag} ppl"] = validation.perplexity
    return scalars | {f"metrics-validation/{metric} {name}": value for metric, value in validation.metrics.items()}
