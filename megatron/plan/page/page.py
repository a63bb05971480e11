"""The page of a plan: its content from the plan's own records, written as the ending of the file says."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields
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
from megatron.runtime.devices import planned_device
from megatron.runtime.files import replacing

ENDINGS = (".html", ".png")


def plan_content(
    config: Config, *, nodes: int, devices_per_node: int, title: str, campaign: Campaign | None = None
) -> PageContent:
    """Return the page of one layout; `campaign`: the time of the whole run, if it is planned."""
    config = for_device(config)
    layout = Layout.of(config.parallel, nodes * devices_per_node)
    stages, room = memory_by_stage(config, layout), capacity(config, devices_per_node)
    rows = plan_rows(config, layout, stages, nodes=nodes, devices_per_node=devices_per_node)
    facts, figures = list(_facts(rows)), [_memory_figure(config, stages, room)]
    if campaign is not None:
        facts += _facts(campaign.rows())
        figures += _campaign_figures(campaign)
    return PageContent(
        title=title,
        facts=facts,
        figures=figures,
        memory=_memory(config, stages, room),
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
    """Write the page or the picture, in one piece. Raises ConfigError, and OSError as on a full disk."""
    check_output(output)
    with replacing(output) as file:
        if output.suffix.lower() == ".png":
            draw_picture(content, file)
        else:
            file.write(page_text(content).encode())
