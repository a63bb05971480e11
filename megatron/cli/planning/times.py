"""Times of a plan beyond a step's: of the whole run, and beside those of a run that has been."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from megatron.options.config import Config, ConfigError
from megatron.plan.campaign.campaign import Campaign, plan_campaign
from megatron.plan.campaign.question import Question
from megatron.plan.page.page import PlannedTimes
from megatron.plan.page.recorded import RecordedRun, recorded_devices
from megatron.plan.rates.rates import Rates, RatesError
from megatron.plan.timing.cluster import Cluster
from megatron.plan.timing.step import StepTime, step_time
from megatron.plan.timing.text import seconds_text
from megatron.runtime.result_files import CONFIG_FILE
from megatron.settings.command_line import presets_of
from megatron.settings.parser import build_parser


def add_compare(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--compare",
        type=Path,
        metavar="DIR",
        help="results folder of a run, whose steps are shown beside the predicted one, by parts where it was predicted "
        "or timed, and by passes with --profile-instructions; without a preset its own config is planned",
    )


def with_run(options: argparse.Namespace, flags: list[str]) -> list[str]:
    """Return the flags of a plan beside a run: without a preset those of the run itself, on as many devices."""
    if options.compare is None or presets_of(build_parser().parse_known_args(flags)[0]):
        return flags
    file = options.compare / CONFIG_FILE
    if not file.is_file():
        # else the default model would stand beside the run
        raise ConfigError([f"--compare {options.compare}: {CONFIG_FILE} is not there; give the run's --config"])
    if options.num_devices is None:
        options.num_devices, options.devices_per_node = recorded_devices(options.compare)
    return ["--config", str(file), *flags]


def planned_times(config: Config, cluster: Cluster, rates: Rates | None, options: argparse.Namespace) -> PlannedTimes:
    """Return what the options and the rates allow to predict. Raises ConfigError with the faults of the options."""
    question = Question.from_arguments(options)
    run = None if options.compare is None else RecordedRun(options.compare)
    if run is not None and rates is None:
        raise ConfigError(["--compare needs a predicted step: give --rates, or a chip by --device"])
    step, hindrance = None, ""
    if rates is not None:
        try:
            step = step_time(config, cluster, rates)
        except RatesError as error:
            if run is not None:
                raise
            hindrance = error.faults[0]
    campaign = None
    if question.is_given:
        # the whole run needs the step: what the rates lack is a fault there
        campaign = _campaign(config, cluster, question, rates)
    return PlannedTimes(rates=rates, step=step, hindrance=hindrance, campaign=campaign, run=run)


def _campaign(config: Config, cluster: Cluster, question: Question, rates: Rates | None) -> Campaign:
    def seconds_of(phase: Config) -> float:
        assert rates is not None
        return step_time(phase, cluster, rates).seconds

    return plan_campaign(
        config,
        num_devices=cluster.num_devices,
        devices_per_node=cluster.node_sizes[0],
        question=question,
        seconds_of=None if rates is None else seconds_of,
        rates=rates,
    )


def times_text(times: PlannedTimes) -> str:
    """Return the lines on the whole run, and on the run beside it, at most 80 columns wide; nothing without either."""
    lines = []
    if times.campaign is not None:
        lines += ["", *times.campaign.lines()]
    if times.run is not None and times.step is not None:
        lines += ["", *_compared_lines(times.run, times.step)]
    return "".join(f"{line}\n" for line in lines)


def _compared_lines(run: RecordedRun, step: StepTime) -> Iterator[str]:
    yield f"  beside the run in {run.folder}"
    yield f"  {'':<36}{'predicted':>12}{'measured':>12}{'ratio':>8}"
    for part in run.compared(step):
        times = f"{seconds_text(part.predicted):>12}{seconds_text(part.measured):>12}"
        yield f"  {part.name:<36}{times}{part.measured / part.predicted:>8.2f}"
