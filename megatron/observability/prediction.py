"""Predicted time of a run's steps, by the rates of the machine, and its parts in few words. Without torch."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence

from megatron.options.config import Config, ConfigError, length_stages
from megatron.plan.campaign.length import Phase, config_of
from megatron.plan.rates.files import load_rates, machine_names
from megatron.plan.rates.rates import Rates
from megatron.plan.timing.cluster import Cluster
from megatron.plan.timing.measured_parts import sums_of
from megatron.plan.timing.step import StepTime, step_time
from megatron.runtime.accelerator import named_peak_tflops
from megatron.runtime.device import Device

SAME_PEAK = 0.12
"""Largest difference of two peaks of one chip: sources differ by a tenth, variants by more."""


def detected_machine(device: Device, chip_name: str | None) -> str | None:
    """Return the machine of the package whose rates those of a detected chip are; None: there is none."""
    if chip_name is None:
        return None
    peak = named_peak_tflops(device, chip_name)
    letters = re.sub(r"[^a-z0-9]", "", chip_name.lower())
    for name in machine_names():
        # a variant of a chip, such as one of PCIe, has another peak than the one that the rates are of
        if name in letters and peak is not None and _has_peak(load_rates(name), peak):
            return name
    return None


def _has_peak(rates: Rates, tflops: float) -> bool:
    return abs(rates.peak_flops["bf16"] / (tflops * 1e12) - 1) < SAME_PEAK


class Prediction:
    """Predicts the steps of a run, whose sizes may change."""

    def __init__(self, config: Config, ranks_by_node: Sequence[int], rates: Rates) -> None:
        """Raises ConfigError for what the rates do not hold."""
        self._config, self._rates = config, rates
        self._cluster = Cluster(tuple(ranks_by_node))
        self._stages = length_stages(config.training)
        # of few sizes: a packed step has one of some numbers of microbatches
        self._predict = functools.lru_cache(maxsize=64)(self._predicted)
        self.first = self.of(config.training.global_batch_size, 0, None)
        """A step of full size, in rows of the first length."""

    @property
    def is_steady(self) -> bool:
        """Steps of one size take as long: the data does not decide how long their rows are."""
        return not self.first.assumption

    def of(self, global_batch_size: int, consumed_samples: int, num_microbatches: int | None) -> StepTime:
        """Return the predicted time of the step that begins there; `num_microbatches`: those of a rank, if known."""
        length = next(length for length, end in self._stages if end is None or consumed_samples < end)
        return self._predict(global_batch_size, length, num_microbatches)

    def _predicted(self, global_batch_size: int, length: int, num_microbatches: int | None) -> StepTime:
        config = config_of(self._config, Phase(1, global_batch_size, length))
        return step_time(config, self._cluster, self._rates, num_microbatches=num_microbatches)

    @property
    def machine(self) -> str:
        """Name of the rates, and of their kind."""
        kind = "measured" if self._rates.is_measured else "published"
        return f"{self._rates.origin}, {kind} rates"

    def line(self) -> str:
        """Return the line of the log that says what is predicted."""
        time = self.first
        scale, unit = (1e3, "ms") if time.seconds < 1 else (1.0, "s")
        parts = ", ".join(
            f"{name} {seconds * scale:.3g}"
            for name, seconds in sums_of(time.parts).items()
            if seconds * scale >= 0.5e-3
        )
        text = f"predicted: {time.seconds * scale:.3g} {unit} a step ({parts}) by {self.machine}"
        if not self.is_steady:
            text += f", if {time.assumption}; steps of this data differ, so that slow ones are not named"
        return text


def predict(
    config: Config, ranks_by_node: Sequence[int], machine: str, say: Callable[[str], None]
) -> Prediction | None:
    """Return the prediction of a run by the rates of a machine, and say it; None: they lack something, which is said.

    A run that trains must not end for want of a prediction; rates that cannot be read at all are refused before it.
    """
    try:
        prediction = Prediction(config, ranks_by_node, load_rates(machine))
    except ConfigError as error:
        say(f"WARNING: the time of a step is not predicted: {'; '.join(error.faults)}")
        return None
    say(prediction.line())
    return prediction
