"""Totals of a run over the rows of its metrics.jsonl, those of earlier starts included."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron.accelerator import MAX_ALLOCATED, TOTAL


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
        self.tokens = 0.0
        """Tokens trained on in that time."""
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
            seconds = (row.get("iteration_time_s") or 0.0) * row.get("steps", 0)
            self.training_s += seconds
            speed = (row.get("tokens_per_second") or 0.0) if seconds > 0 else 0.0
            own = row.get("tokens_per_second_per_device")
            self.tokens += speed * seconds
            self._device_s += seconds * (round(speed / own) if speed and own else self._world_size)
            self._add_memory(row.get(MAX_ALLOCATED), row.get(TOTAL))
        if kind == "memory":
            self._add_memory(row.get(MAX_ALLOCATED, {}).get("max"), row.get(TOTAL, {}).get("max"))

    def _add_loss(self, kind: str, loss: float | None, iteration: int) -> None:
        if loss is None or not math.isfinite(loss):
            return
        self.last[kind] = LossAt(loss, iteration)
        if kind not in self.lowest or loss < self.lowest[kind].loss:
            self.lowest[kind] = self.last[kind]

    def _add_memory(self, peak_gb: float | None, total_gb: float | None) -> None:
        if peak_gb is not None and peak_gb > (self.peak_memory_gb or 0.0):
            self.peak_memory_gb, self.total_memory_gb = peak_gb, total_gb

    @property
    def tokens_per_second(self) -> float | None:
        return self.tokens / self.training_s if self.training_s > 0 else None

    @property
    def tflops_per_device(self) -> float | None:
        return self.tokens * self._flops_per_token / self._device_s / 1e12 if self._device_s > 0 else None

    @property
    def mfu(self) -> float | None:
        tflops = self.tflops_per_device
        return None if tflops is None or not self._peak_tflops else tflops / self._peak_tflops
