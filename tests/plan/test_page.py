"""The page of a plan, and its picture."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import itertools
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from megatron.cli.plan import main
from megatron.options.config import ConfigError
from megatron.parallel.layout import Layout as Sizes
from megatron.plan.fit import capacity
from megatron.plan.memory import StageMemory, memory_by_stage
from megatron.plan.page import page as writing
from megatron.plan.page.content import (
    Bar,
    Compared,
    Fact,
    Figure,
    LayoutRow,
    MemoryByStage,
    PageContent,
    StageRow,
    Timeline,
)
from megatron.plan.page.document import page_text
from megatron.plan.page.page import check_output, plan_content, write_page
from megatron.plan.page.steps import KIND_OF_PASS
from megatron.plan.page.timeline import MOST_BARS, windows
from megatron.plan.pipeline_schedules import PipelineSchedule
from megatron.plan.timing.text import seconds_text
from megatron.runtime.devices import GIB
from tests.plan.configs import BLOOM_13B, config
from tests.plan.pages import Page, chromium

HOSTILE = (
    "</title></script><script>alert(1)</script><img src=\"http://x.example/?q='&\" onerror='x()'> $\\frac{ \x00\ud800"
)
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
STAGE_TABLE = "Memory of each rank by pipeline stage, GiB"


def timeline(schedule: PipelineSchedule, seconds: float = 0.01) -> Timeline:
    bars = [
        Bar(timed.stage, KIND_OF_PASS[timed.action.kind], timed.start * seconds, timed.end * seconds, str(timed.action))
        for timed in schedule.timeline()
    ]
    names = [f"stage {stage}" for stage in range(schedule.num_stages)]
    return Timeline("Predicted", names, bars, max(bar.end for bar in bars))


def layouts(count: int, title: str = "PP 2 x TP 2 x DP 2") -> list[LayoutRow]:
    return [
        LayoutRow(title, 1.0 + i, 1000.0 / (1 + i), 0.4, GIB * (i * 7 % 5 + 1), 0.1, 2.0**30, title, title)
        for i in range(count)
    ]


def content(text: str = "a name", schedule: PipelineSchedule | None = None) -> PageContent:
    """Return a page with all its sections, and a text wherever a config's text may come."""
    drawn = timeline(schedule or PipelineSchedule("1f1b", 2, 4))
    parts = {"weights": 3 * GIB, text: GIB}
    return PageContent(
        title=text,
        facts=[Fact("model", text)],
        figures=[Figure("time of a step", "1.00 s", text)],
        memory=MemoryByStage([StageRow(text, parts, 5, text, text)] * 2, text, 8 * GIB, 7 * GIB),
        parts={"compute": 0.75, text: 0.25, "none": 0.0},
        timelines=[dataclasses.replace(drawn, title=text, rows=[text] * len(drawn.rows))],
        layouts=layouts(3, text),
        refused={text: 3},
        compared=[Compared(text, 1.0, 1.1), Compared("data", 0.0, 1.0)],
        measured_in=text,
    )


def test_memory_is_that_of_the_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--num-devices", "64", "--device", "gaudi2", "--tensor-model-parallel-size", "2", "--bf16"]
    file = tmp_path / "plan.html"
    words = ["--config", "bloom_13b", "--pipeline-model-parallel-size", "4", *words, "--output", str(file)]
    assert main(words) == 0
    text = capsys.readouterr().out
    assert text.endswith(f"\nwrote {file}\n")
    page = Page(file.read_text(encoding="utf-8"))
    rows = page.table(STAGE_TABLE)
    # as the text has them: GiB by purpose and in all, and the layers
    lines = [line.split() for line in text.splitlines() if re.match(r"     [0-3][* ] ", line)]
    assert len(rows) == len(lines) == 4
    for row, line in zip(rows, lines, strict=True):
        assert [cell.text for cell in row[1:8]] == line[1:8]
        assert row[-1].text == " ".join(line[9:])
    for said in ("12,854,282,240 in all", "PP 4 x TP 2 x DP 8", "fits: 21.1 of 94.6 GiB (Gaudi 2), 22%"):
        assert said in text
        assert said in page.root.text


def test_bars_are_as_long_as_their_memory() -> None:
    run = config(BLOOM_13B, parallel={"pipeline_model_parallel_size": 4, "device": "hpu", "device_memory": "gaudi2"})
    stages, room = memory_by_stage(run, Sizes.of(run.parallel, 8)), capacity(run, 8)
    assert room is not None
    page = Page(page_text(plan_content(run, nodes=1, devices_per_node=8, title="a plan")))
    (chart,) = page.root.all("div", "bars")
    largest = max(stage.memory.total for stage in stages)
    whole = max(largest, room.size_bytes) * 1.02
    for stage, drawing in zip(stages, chart.all("svg"), strict=True):
        sizes = [getattr(stage.memory, field.name) for field in dataclasses.fields(StageMemory)]
        widths = [share(bar.attributes["width"]) for bar in drawing.all("rect")]
        assert widths == pytest.approx([size / whole for size in sizes if size], abs=1e-5)
        starts = [share(bar.attributes["x"]) for bar in drawing.all("rect")]
        assert starts == pytest.approx([0, *itertools.accumulate(widths)][:-1], abs=1e-4)
        (device,) = drawing.all("line", "device")
        assert share(device.attributes["x1"]) == pytest.approx(room.size_bytes / whole, abs=1e-5)


def share(text: str) -> float:
    return float(text.removesuffix("%")) / 100


def test_offloaded_states_of_a_cpu_are_in_the_same_memory() -> None:
    run = config(
        BLOOM_13B,
        parallel={"device": "cpu", "device_memory": "900"},
        optimizer={"offload_optimizer": True, "zero_stage": 2},
        training={"bf16": True},
    )
    page = plan_content(run, nodes=1, devices_per_node=1, title="a plan")
    (stage,) = memory_by_stage(run, Sizes.of(run.parallel, 1))
    assert stage.host_bytes > 0
    assert page.memory.fullest.total == stage.memory.total + stage.host_bytes


@pytest.mark.parametrize("schedule", [("1f1b", 4, 8, 1), ("interleaved", 2, 8, 2), ("zero-bubble", 3, 7, 1)])
def test_a_short_step_is_drawn_whole(schedule: tuple[str, int, int, int]) -> None:
    drawn = timeline(PipelineSchedule(*schedule))
    page = Page(page_text(dataclasses.replace(content(), timelines=[drawn])))
    (lanes,) = page.root.all("svg", "lanes")
    bars = [rect for rect in lanes.all("rect") if rect.attributes["class"] != "ground"]
    assert len(bars) == len(drawn.bars)
    for rect, bar in zip(bars, drawn.bars, strict=True):
        assert rect.attributes["class"] == bar.kind
        assert share(rect.attributes["x"]) * drawn.seconds == pytest.approx(bar.start, abs=1e-5 * drawn.seconds)
        assert share(rect.attributes["width"]) * drawn.seconds == pytest.approx(
            bar.end - bar.start, abs=1e-5 * drawn.seconds
        )
        assert seconds_text(bar.end - bar.start) in rect.all("title")[0].text


@pytest.mark.parametrize("schedule", [("1f1b", 16, 512, 1), ("interleaved", 16, 512, 4)])
def test_a_long_step_is_drawn_in_parts(schedule: tuple[str, int, int, int]) -> None:
    drawn = timeline(PipelineSchedule(*schedule))
    text = page_text(dataclasses.replace(content(), timelines=[drawn]))
    assert len(text.encode()) < 1_000_000
    first, middle, last = windows(drawn)
    assert (first.start, last.end) == (0, drawn.seconds)
    assert first.end < middle.start < drawn.seconds / 2 < middle.end < last.start
    (lanes,) = Page(text).root.all("svg", "lanes")
    bars = [rect for rect in lanes.all("rect") if rect.attributes["class"] != "ground"]
    assert MOST_BARS / 2 < len(bars) <= MOST_BARS
    # in the middle every stage computes all the time
    seen = [rect for rect in bars if middle.left <= share(rect.attributes["x"]) < middle.right]
    widths = sum(share(rect.attributes["width"]) for rect in seen)
    assert widths == pytest.approx(16 * (middle.right - middle.left), rel=0.01)


def test_every_layout_has_a_row_that_a_script_can_sort() -> None:
    found = layouts(7)
    rows = Page(page_text(dataclasses.replace(content(), layouts=found))).table("Layouts, the fastest first")
    assert len(rows) == len(found)
    for row, layout in zip(rows, found, strict=True):
        assert float(row[2].attributes["data-value"]) == layout.seconds
        assert row[2].text == seconds_text(layout.seconds)
        assert float(row[5].attributes["data-value"]) == layout.memory_bytes
        assert [code.text for code in row[-1].all("code")] == [layout.command]


def test_hostile_names_are_text() -> None:
    plain, hostile = (Page(page_text(content(text))) for text in ("a name", HOSTILE))
    shown = HOSTILE.replace("\x00", "\ufffd").replace("\ud800", "\ufffd")
    assert [head.text for head in hostile.root.all("h1")] == [shown]

    def structure(page: Page) -> list[tuple[str, list[str]]]:
        return [(node.tag, sorted(node.attributes)) for node in walk(page.root)]

    assert structure(hostile) == structure(plain)


def walk(node: Any) -> Any:
    yield node
    for child in node.children:
        yield from walk(child)


def test_nothing_is_loaded_and_no_other_script_runs() -> None:
    page = Page(page_text(content()))
    for node in walk(page.root):
        assert not {"src", "href", "style", "srcset"} & set(node.attributes), node
        assert not [name for name in node.attributes if name.startswith("on")]
    (style,), (script,) = page.root.all("style"), page.root.all("script")
    assert not re.search(r"url\(|@import|https?:|//", style.text)
    assert not re.search(r"https?:|fetch|import |XMLHttp|innerHTML", script.text)
    (policy,) = [meta.attributes["content"] for meta in page.root.all("meta") if "http-equiv" in meta.attributes]
    assert policy.startswith("default-src 'none'; ")
    for part, text in (("style-src", style.text), ("script-src", script.text)):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{part} 'sha256-{digest}'" in policy


def test_the_picture_opens(tmp_path: Path) -> None:
    file = tmp_path / "plan.PNG"
    write_page(content(HOSTILE, PipelineSchedule("1f1b", 2, 2000)), file)
    with Image.open(file) as picture:
        picture.load()
        assert picture.format == "PNG"
        assert picture.width > 1000
        assert len(picture.convert("RGB").getcolors(1 << 24) or []) > 10


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("plan.pdf", "--output {}/plan.pdf must end in .html, for a page, or .png, for a picture"),
        ("plan", "must end in .html"),
        ("none/plan.html", "--output {0}/none/plan.html: {0}/none is not a folder; create it"),
        ("folder.html", "--output {}/folder.html is a folder; name a file"),
    ],
)
def test_a_place_without_a_page_is_refused_before_the_plan(
    name: str, fault: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "folder.html").mkdir()
    assert main(["--config", "tiny_llama", "--output", str(tmp_path / name)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert fault.format(tmp_path) in printed.err
    with pytest.raises(ConfigError):
        check_output(tmp_path / name)


def test_a_failed_write_leaves_the_page_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "plan.html"
    file.write_text("before")

    def fail(_: PageContent) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writing, "page_text", fail)
    with pytest.raises(OSError, match="space") as failed:
        write_page(content(), file)
    assert failed.value.filename == str(file)
    assert [path.name for path in tmp_path.iterdir()] == ["plan.html"]
    assert file.read_text() == "before"


def test_a_page_needs_no_torch() -> None:
    code = "import sys, megatron.plan.page.page; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_browser_shows_it(tmp_path: Path) -> None:
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        pytest.skip("no Chromium is installed")
    file = tmp_path / "plan.html"
    write_page(dataclasses.replace(content(HOSTILE), layouts=layouts(6)), file)
    with chromium(program, tmp_path / "profile") as browser:
        for width, scheme in ((1400, "dark"), (400, "light")):
            browser.open(file, width, scheme)
            assert browser.value("document.documentElement.scrollWidth") <= width
            assert browser.named("Log.entryAdded") == browser.named("Runtime.exceptionThrown") == []
            urls = [sent["request"]["url"] for sent in browser.named("Network.requestWillBeSent")]
            assert urls == [file.as_uri()]
            ground = browser.value("getComputedStyle(document.body).backgroundColor")
            assert ground == {"light": "rgb(255, 255, 255)", "dark": "rgb(20, 23, 27)"}[scheme]
        shown = "[...document.querySelectorAll('.sortable tbody tr')].map(row => Number(row.cells[5].dataset.value))"
        click = "document.querySelectorAll('.sortable th button')[5].click()"
        sizes = sorted(layout.memory_bytes for layout in layouts(6))
        browser.value(click)
        assert browser.value(shown) == sizes
        browser.value(click)
        assert browser.value(shown) == sizes[::-1]
        assert browser.value("document.querySelector('.sortable [aria-sort]').ariaSort") == "descending"
        wide = "document.querySelector('.lanes').clientWidth"
        before = browser.value(wide)
        browser.value("document.querySelector('.zoom button').click()")
        assert browser.value(wide) >= 1.1 * before
