"""Lines of a plan on the time of a step. No torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from megatron.options.config import Config
from megatron.plan.rates.files import load_rates, machine_names
from megatron.plan.rates.rates import Rates, RatesError
from megatron.plan.timing.cluster import Cluster
from megatron.plan.timing.step import StepTime, step_time
from megatron.runtime.devices import planned_device

SHOWN_PARTS, LEAST_SHARE = 3, 0.005
"""Number of the parts of a step that are shown, and the least share of one."""


def rates_of_plan(name_or_path: str | None, config: Config) -> Rates | None:
    """Return the rates of this name or file; without one those of the chip that `device_memory` names, if it is a
    machine of the package; None: they are not known. Raises ConfigError."""
    if name_or_path is not None:
        return load_rates(name_or_path)
    chip = (config.parallel.device_memory or "").lower()
    if chip in machine_names():
        return load_rates(chip)
    return None


def for_rates(config: Config, rates: Rates) -> Config:
    """Return the config on the device of the rates, where its own is auto. Raises RatesError if they are of another."""
    if config.parallel.device == "auto":
        return dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, device=rates.device))
    rates.check_device(planned_device(config.parallel.device).name)
    return config


def time_lines(config: Config, cluster: Cluster, rates: Rates) -> Iterator[str]:
    """Yield the time of a step and its largest parts, or why it is not known."""
    try:
        time = step_time(config, cluster, rates)
    except RatesError as error:
        yield f"not known: {error.faults[0]}"
        return
    yield from time_text(time, rates)


def time_text(time: StepTime, rates: Rates) -> Iterator[str]:
    """Yield the lines of a predicted step."""
    rate = time.tokens_per_second
    text = f"{seconds_text(time.seconds)} a step, {rate:,.0f} tokens/s"
    if time.num_devices > 1:
        text += f", {rate / time.num_devices:,.0f} a device"
    if time.precision in rates.peak_flops:
        text += f", MFU {time.mfu(rates.peak_flops[time.precision]):.1%}"
    yield text
    shares = [(name, seconds / time.seconds) for name, seconds in time.parts.largest()[:SHOWN_PARTS]]
    yield ", ".join(f"{name} {share:.0%}" for name, share in shares if share >= LEAST_SHARE)
    kind = "measured" if rates.is_measured else "published, not measured"
    yield f"by the rates of {rates.title}, {kind}"
    if time.assumption:
        yield f"if {time.assumption}"


def seconds_text(seconds: float) -> str:
    """Return '12.3 ms' or '4.56 s', of three digits."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if abs(seconds) >= scale:
            return f"{three_digits(seconds / scale)} {unit}"
    if seconds:
        return f"{three_digits(seconds / 1e-6)} µs"
    return "0 s"


def three_digits(number: float) -> str:
    """Return a number of about three digits, without an exponent."""
    for digits, least in ((0, 100), (1, 10), (2, 1)):
        # of the rounded number, so that 9.999 is 10.0
        if abs(round(number, digits)) >= least:
            return f"{number:,.{digits}f}"
    return f"{number:.3f}"
