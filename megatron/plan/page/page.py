"""The page of a plan: its content from the plan's own records, written as the ending of the file says."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

from megatron.options.config import Config, ConfigError
from megatron.parallel.layout import Layout
from megatron.plan.campaign.campaign import Campaign
from megatron.plan.campaign.failures import duration
from megatron.plan.describe import holds_text, plan_rows
from megatron.plan.fit import RESERVE, Capacity, capacity, fit_text, for_device, needed_bytes
from megatron.plan.flops import declared_layers
from megatron.plan.memory import Stage, StageMemory, memory_by_stage
from megatron.plan.page.content import Fact, Figure, MemoryByStage, PageContent, StageRow, gib_text
from megatron.plan.page.document import page_text
from megatron.plan.page.picture import draw_picture
from megatron.plan.page.recorded import RecordedRun
from megatron.plan.page.steps import parts_of, predicted_timeline
from megatron.plan.rates.rates import Rates
from megatron.plan.timing.step import StepTime
from megatron.plan.timing.text import seconds_text
from megatron.runtime.devices import planned_device
from megatron.runtime.files import replacing

ENDINGS = (".html", ".png")


@dataclass(frozen=True)
class PlannedTimes:
    """Predicted times of a plan, as far as they were wanted."""

    rates: Rates | None = None
    step: StepTime | None = None
    hindrance: str = ""
    """Fault of the rates, for which no step is predicted."""
    campaign: Campaign | None = None
    run: RecordedRun | None = None
    """A run to compare with."""


def plan_content(
    config: Config, *, nodes: int, devices_per_node: int, title: str, times: PlannedTimes | None = None
) -> PageContent:
    """Return the page of one layout. Raises ConfigError where the run to compare with is another one."""
    config, times = for_device(config), times or PlannedTimes()
    layout = Layout.of(config.parallel, nodes * devices_per_node)
    stages, room = memory_by_stage(config, layout), capacity(config, devices_per_node)
    facts = list(_facts(plan_rows(config, layout, stages, nodes=nodes, devices_per_node=devices_per_node)))
    figures = [_memory_figure(config, stages, room)]
    if times.hindrance:
        facts.append(Fact("step", f"not predicted: {times.hindrance}"))
    if times.rates is not None:
        facts += _rates_facts(times.rates)
    content = PageContent(title, facts, figures, _memory(config, stages, room))
    if times.step is not None:
        content = _with_step(content, times.step, times)
    if times.campaign is not None:
        added = [*_facts(times.campaign.rows())], [*_campaign_figures(times.campaign)]
        content = replace(content, facts=[*content.facts, *added[0]], figures=[*content.figures, *added[1]])
    return content


def _rates_facts(rates: Rates) -> Iterator[Fact]:
    kind = "measured" if rates.is_measured else "published, not measured"
    yield Fact("rates", f"{rates.title}: {kind}")
    yield from (Fact("", line) for line in rates.source.splitlines())


def _with_step(content: PageContent, step: StepTime, times: PlannedTimes) -> PageContent:
    """Return the content with the predicted step, and with the measured one."""
    note = "predicted"
    if step.assumption:
        note = f"predicted, if {step.assumption}"
    figures = [
        Figure("time of a step", seconds_text(step.seconds), note),
        Figure("tokens a second", f"{step.tokens_per_second:,.0f}", f"{step.tokens:,} tokens a step"),
    ]
    if times.rates is not None and step.precision in times.rates.peak_flops:
        peak = times.rates.peak_flops[step.precision]
        figures.append(Figure("MFU", f"{step.mfu(peak):.1%}", f"of {peak / 1e12:,.0f} TFLOP/s a device"))
    timelines, compared, folder = [predicted_timeline(step)], [], ""
    if times.run is not None:
        compared, folder = times.run.compared(step), str(times.run.folder)
        if times.run.has_trace:
            timelines.append(times.run.timeline())
    return replace(
        content,
        figures=[*figures, *content.figures],
        parts=parts_of(step),
        timelines=timelines,
        compared=compared,
        measured_in=folder,
    )


def _facts(rows: Iterator[tuple[str, str]]) -> Iterator[Fact]:
    for name, text in rows:
        # a text of the terminal may have lines of its own
        first, *further = text.splitlines()
        yield Fact(name, first)
        for line in further:
            yield Fact("", line.strip())


def _memory_figure(config: Config, stages: Sequence[Stage], room: Capacity | None) -> Figure:
    size = max(needed_bytes(config, stage) for stage in stages)
    note = "of each rank of the fullest stage; the device is unknown"
    if room is not None:
        note = fit_text(room, size)
    return Figure("memory", f"{gib_text(size)} GiB", note)


def _campaign_figures(campaign: Campaign) -> Iterator[Figure]:
    seconds, note = campaign.training_s, "in the steps themselves"
    if campaign.planned is not None:
        seconds, note = campaign.planned.total_s, f"expected, {campaign.planned.effective:.1%} of it effective"
    yield Figure("time to train", duration(seconds), note)
    if campaign.question.device_hour_price is not None:
        price = f"at {campaign.question.device_hour_price:,.6g} an hour of a device"
        yield Figure("cost", f"{campaign.cost(seconds):,.0f}", price)


def _memory(config: Config, stages: Sequence[Stage], room: Capacity | None) -> MemoryByStage:
    layers = declared_layers(config)
    rows = []
    for number, stage in enumerate(stages):
        parts = {field.name.replace("_", " "): getattr(stage.memory, field.name) for field in fields(StageMemory)}
        # a rank on the CPU keeps it in the same memory
        if planned_device(config.parallel.device).is_host:
            parts["offloaded"] = stage.host_bytes
        rows.append(StageRow(f"stage {number}", parts, stage.host_bytes, stage.peak, holds_text(layers, stage)))
    if room is None:
        return MemoryByStage(rows)
    return MemoryByStage(rows, room.title, room.size_bytes, int((1 - RESERVE) * room.size_bytes))


def check_output(output: Path) -> None:
    """Raise ConfigError if a page cannot be written there; before the work on its content."""
    if output.suffix.lower() not in ENDINGS:
        raise ConfigError([f"--output {output} must end in .html, for a page, or .png, for a picture"])
    if not output.parent.is_dir():
        raise ConfigError([f"--output {output}: {output.parent} is not a folder; create it"])
    if output.is_dir():
        raise ConfigError([f"--output {output} is a folder; name a file"])


def write_page(content: PageContent, output: Path) -> None:
    """Write the page or the picture, in one piece. Raises ConfigError, and OSError with its name as on a full disk."""
    check_output(output)
    try:
        with replacing(output) as file:
            if output.suffix.lower() == ".png":
                draw_picture(content, file)
            else:
                file.write(page_text(content).encode())
    except OSError as error:  # a write knows no name
        raise OSError(error.errno, error.strerror or str(error), str(output)) from error
