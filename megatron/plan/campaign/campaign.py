"""Time to train and to fail: what a whole run takes on devices that fail, when to save, spares, the cost."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron.options.config import Config, ConfigError
from megatron.parallel.layout import Layout
from megatron.plan.campaign.failures import (
    ExpectedTime,
    Failures,
    Save,
    best_interval,
    daly_interval,
    duration,
    expected,
    spares,
    young_interval,
)
from megatron.plan.campaign.length import Phase, seconds_by_phase
from megatron.plan.campaign.question import Question
from megatron.plan.campaign.saves import checkpoint_bytes, save_interval_s, save_time
from megatron.runtime.commands import counted

if TYPE_CHECKING:
    from megatron.plan.rates.rates import Rates

PARTED = 0.05
"""Difference from which on Young's interval and Daly's are worth figures of their own."""
WIDTH = 78


@dataclass(frozen=True)
class Campaign:
    """A run on devices that fail."""

    num_devices: int
    devices_per_node: int
    question: Question
    by_phase: Sequence[tuple[Phase, float]]
    """Steps of each size, and the seconds of one."""
    save: Save | None
    """None: no time of a save is known."""
    interval_s: float
    """Training between two saves, by the options of the run."""
    checkpoint_bytes: int
    failures: Failures
    planned: ExpectedTime | None
    """None: with this interval the run does not end."""
    best_s: float
    best: ExpectedTime | None
    hindrance: str | None
    """Reason why there are no expected times; None: there are."""

    @property
    def step_s(self) -> float:
        """Seconds of a step of the last size."""
        return self.by_phase[-1][1]

    @property
    def training_s(self) -> float:
        return sum(phase.steps * seconds for phase, seconds in self.by_phase)

    @property
    def num_steps(self) -> int:
        return sum(phase.steps for phase, _ in self.by_phase)

    @property
    def spare_nodes(self) -> int:
        """Nodes that are enough for those in repair: each failure takes its node away."""
        per_s = 1 / self.failures.mean_s
        return spares(per_s * 3600 * self.question.repair_h, self.question.sureness)

    @property
    def expects_failures(self) -> bool:
        return self.question.device_mtbf_hours is not None

    def cost(self, seconds: float, *, spare_nodes: int = 0) -> float:
        devices = self.num_devices + spare_nodes * self.devices_per_node
        return (self.question.device_hour_price or 0.0) * devices * seconds / 3600

    def lines(self) -> list[str]:
        """Return the text of a plan, at most 80 columns wide."""
        lines = []
        for title, text in self.rows():
            first, further = f"  {title:<11}", " " * 13
            lines += textwrap.wrap(text, WIDTH, initial_indent=first, subsequent_indent=further, break_on_hyphens=False)
        return lines

    def rows(self) -> Iterator[tuple[str, str]]:
        """Yield title and text of each line; without a title it continues the one above."""
        steps = counted(self.num_steps, "step")
        yield "time", f"{steps} of {duration(self.step_s)}: {duration(self.training_s)} in the steps themselves"
        if len(self.by_phase) > 1:
            phase, seconds = self.by_phase[0]
            size = f"{phase.global_batch_size:,} samples, in rows of {phase.row_length:,}"
            yield "", f"at first {duration(seconds)} each, of {size}"
        if self.save is not None:
            yield "saves", self._saves_text(self.save)
        if self.expects_failures:
            yield from self._failure_rows()
        elif self.planned is not None and self.save is not None:
            yield "expected", f"{duration(self.planned.total_s)} with the waits for saves, without failures"
        if self.question.device_hour_price is not None:
            yield "cost", self._cost_text()

    def _saves_text(self, save: Save) -> str:
        text = f"every {self._interval_text(self.interval_s)}, {_size(self.checkpoint_bytes)}; "
        if save.hidden_s:
            return f"{text}training waits {duration(save.wait_s)}, and {duration(save.hidden_s)} later it is whole"
        return f"{text}training waits {duration(save.wait_s)}"

    def _interval_text(self, seconds: float) -> str:
        steps = max(1, round(seconds / self.step_s))
        return f"{counted(steps, 'step')} = {duration(steps * self.step_s)}"

    def _failure_rows(self) -> Iterator[tuple[str, str]]:
        failures = self.failures
        yield "failures", f"one every {duration(failures.mean_s)} on {counted(self.num_devices, 'device')}"
        if self.hindrance is not None:
            yield "expected", self.hindrance
            return
        if self.planned is None:
            yield "expected", "with this interval the run does not end: failures come sooner than its saves"
        else:
            yield "expected", _expected_text(self.planned)
        yield from self._interval_rows()
        nodes = self.spare_nodes
        yield (
            "spares",
            f"{counted(nodes, 'node')}: enough with a probability of {self.question.sureness:.6g} for those in repair, "
            f"{self.question.repair_h:g} h each",
        )

    def _interval_rows(self) -> Iterator[tuple[str, str]]:
        assert self.save is not None
        wait_s, mean_s = self.save.wait_s, self.failures.mean_s
        text = f"best: every {self._interval_text(self.best_s)}"
        if self.best is not None:
            text += f", {duration(self.best.total_s)}, effective {self.best.effective:.1%}"
        yield "interval", text
        if self.best_s <= self.save.hidden_s:
            yield "", f"as often as the disk allows: a save takes {duration(self.save.total_s)}"
            return
        young_s, daly_s = young_interval(wait_s, mean_s), daly_interval(wait_s, mean_s)
        if abs(young_s / daly_s - 1) > PARTED:
            yield (
                "",
                f"Young's {duration(young_s)} and Daly's {duration(daly_s)} part: a wait of {duration(wait_s)} is not "
                f"short against {duration(mean_s)} between failures",
            )

    def _cost_text(self) -> str:
        price = f"at {self.question.device_hour_price:,.6g} an hour of a device"
        if self.planned is None or self.hindrance is not None:
            return f"{self.cost(self.training_s):,.0f} for the steps themselves, {price}"
        text = f"{self.cost(self.planned.total_s):,.0f} {price}"
        if not self.expects_failures:
            return text
        nodes = self.spare_nodes
        best = ""
        if self.best is not None:
            best = f"; {self.cost(self.best.total_s):,.0f} with the best interval"
        if nodes:
            text += f", {self.cost(self.planned.total_s, spare_nodes=nodes):,.0f} with the spare nodes"
        return text + best


def _size(size_bytes: int) -> str:
    if size_bytes < 1e12:
        return f"{size_bytes / 1e9:.3g} GB"
    return f"{size_bytes / 1e12:.3g} TB"


def _expected_text(time: ExpectedTime) -> str:
    parts = {"restarts": time.restarting_s, "steps trained again": time.lost_s, "saves": time.saving_s}
    shares = ", ".join(f"{name} {seconds / time.total_s:.1%}" for name, seconds in parts.items())
    return (
        f"{duration(time.total_s)} with {time.failures:,.3g} failures, effective training time {time.effective:.1%}: "
        f"{shares}"
    )


def plan_campaign(
    config: Config,
    *,
    num_devices: int,
    devices_per_node: int,
    question: Question,
    seconds_of: Callable[[Config], float] | None = None,
    rates: Rates | None = None,
) -> Campaign:
    """Return the plan of a whole run. Raises ConfigError where something that it needs is not given.

    `seconds_of` predicts the time of a step of a config, by `rates`; None: the question has it. Validations and exports
    are left out.
    """
    layout = Layout.of(config.parallel, num_devices)
    by_phase = seconds_by_phase(config, layout, question.step_seconds, seconds_of)
    step_s = by_phase[-1][1]
    training_s = sum(phase.steps * seconds for phase, seconds in by_phase)
    save = save_time(config, layout, question, rates)
    failures = Failures(float("inf"), 0.0)
    if question.device_mtbf_hours is not None:
        failures = Failures.of_devices(num_devices, 3600 * question.device_mtbf_hours, question.restart_s)
        if save is None:
            raise ConfigError(
                [
                    "--device-mtbf-hours needs the time of a save: give --save-seconds, or --disk-gb-per-second, the "
                    "rate at which all ranks together write"
                ]
            )
    # an interval beyond the end is one save, at the end
    interval_s = min(save_interval_s(config, step_s), training_s)
    # without a time of a save: what is left is the time of the steps
    known = save or Save(0.0)
    best_s = min(max(step_s, best_interval(known, failures)), training_s)
    hindrance = failures.hinder(known)
    planned = best = None
    if hindrance is None:
        planned = expected(training_s, interval_s, known, failures)
        best = expected(training_s, best_s, known, failures)
    return Campaign(
        num_devices=num_devices,
        devices_per_node=devices_per_node,
        question=question,
        by_phase=by_phase,
        save=save,
        interval_s=interval_s,
        checkpoint_bytes=checkpoint_bytes(config),
        failures=failures,
        planned=planned,
        best_s=best_s,
        best=best,
        hindrance=hindrance,
    )
