"""The page of a run: what its files hold, in the right place, whatever is in them."""

from __future__ import annotations

import json
import math
import shutil
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from megatron.cli import report
from megatron.observability.report.curves import HEIGHT, MOST_POINTS, WIDTH, Curve, curve_chart
from megatron.observability.report.recorded import read_recorded
from megatron.observability.report.report import report_text
from megatron.plan.page.marks import html_text
from megatron.runtime.accelerator import ALLOCATED, MAX_ALLOCATED, TOTAL
from tests.plan.pages import Page, chromium
from tests.plan.test_page import BROWSERS, HOSTILE

START_S = 1_700_000_000.0
"""2023-11-14 22:13:20 UTC"""


def over_ranks(smallest: float, mean: float, largest: float, rank: int) -> dict[str, float]:
    return {"min": smallest, "mean": mean, "max": largest, "max_rank": rank}


def step(iteration: int, **values: Any) -> dict[str, Any]:
    shown = {"lm_loss": 9 - iteration / 10, "tokens_per_second": 1000.0 + iteration, "iteration_time_s": 0.5}
    return {
        "kind": "train",
        "iteration": iteration,
        "time": START_S + 10 * iteration,
        "grad_norm": 1.0,
        "learning_rate": 0.01,
        "muon_learning_rate": 0.02,
        "consumed_tokens": 128 * iteration,
        **shown,
        **values,
    }


def recheck(iteration: int, ranks: list[int], reason: str, *, is_certain: bool) -> dict[str, Any]:
    row = {"kind": "recheck", "iteration": iteration, "ranks": ranks, "is_certain": is_certain, "reason": reason}
    return {**row, "time": START_S + 10 * iteration}


def start(number: int, resumed: int, began_s: float, ended: dict[str, Any] | None = None) -> dict[str, Any]:
    row: dict[str, Any] = {
        "started": datetime.fromtimestamp(START_S + began_s, timezone.utc).isoformat(timespec="seconds"),
        "resumed_iteration": resumed,
        "restart": number,
        "command": ["train", "--lr", "1"],
        "world_size": 4,
        "hosts": {"a": [0, 1], "b": [2, 3]},
        "layout": {"tensor": 2, "data": 2, "zero_stage": 0},
        "versions": {"torch": "2.13"},
    }
    return row if ended is None else {**row, "ended": ended}


def end(ended_s: float, reason: str, outcome: str, iteration: int) -> dict[str, Any]:
    time = datetime.fromtimestamp(START_S + ended_s, timezone.utc).isoformat(timespec="seconds")
    return {"time": time, "reason": reason, "outcome": outcome, "iteration": iteration}


def write_run(folder: Path, *, text: str = "a text", lr: str = "0.01") -> Path:
    """A run of 20 steps in three starts: killed, failed, and trained to the end."""
    folder.mkdir(parents=True)
    rows = [step(number) for number in range(1, 21)]
    rows[4]["lm_loss"] = None
    rows[6] |= {"metrics": {"accuracy": 0.25, text: 7.0}, "slowest_ratio": 1.5, "stragglers": f"rank 3: {text}"}
    rows += [
        {"kind": "valid", "iteration": 10, "lm_loss": 8.25, "perplexity": 3827.6, "time": START_S + 101},
        {"kind": "valid_set", "iteration": 10, "set": text, "lm_loss": 8.5, "time": START_S + 101},
        {"kind": "test", "iteration": 20, "lm_loss": 7.125, "perplexity": 1242.6, "time": START_S + 201},
        {"kind": "lm_eval", "iteration": 20, "results": {text: {"acc,none": 0.375}}, "time": START_S + 201},
        {"kind": "bad_step", "iteration": 8, "reason": text, "action": "skipped", "time": START_S + 80},
        recheck(9, [3], text, is_certain=True),
        recheck(18, [1, 3], text, is_certain=False),
        {
            "kind": "memory",
            "iteration": 1,
            "event": "first_step",
            ALLOCATED: over_ranks(1.0, 1.5, 2.0, 3),
            MAX_ALLOCATED: over_ranks(2.5, 3.0, 4.5, 3),
            TOTAL: over_ranks(80.0, 80.0, 80.0, 0),
            "time": START_S + 11,
        },
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    # of steps that the second start trained again, the last one torn by the kill
    superseded = json.dumps({"kind": "train", "iteration": 6, "time": START_S + 55})
    (folder / "metrics.superseded.jsonl").write_text(f"{superseded}\n{superseded[:-9]}\n")
    starts = [
        start(0, 0, 0),
        start(
            1,
            5,
            60,
            {"time": "2023-11-14T22:14:50+00:00", "reason": f"ValueError: {text}", "iteration": 8, "outcome": "failed"},
        ),
        start(
            1,
            8,
            100,
            {"time": "2023-11-14T22:17:00+00:00", "reason": "trained to the end", "iteration": 20, "outcome": "done"},
        ),
    ]
    (folder / "run.json").write_text(json.dumps({"starts": starts}))
    (folder / "config.yaml").write_text(f"optimizer:\n  lr: {lr}\ndata:\n  data_path: {json.dumps(text)}\n")
    answers = [{"iteration": 10, "prompt": "Once", "text": text, "reason": "stop"}]
    (folder / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in answers))
    (folder / "train.log").write_text(f" iteration 1\nWARNING: {text!a}\nWARNING: {text!a}\n")
    return folder


def page_of(*folders: Path) -> Page:
    return Page(report_text([read_recorded(folder, folder.name) for folder in folders]))


def texts(page: Page, caption: str) -> list[list[str]]:
    return [[cell.text for cell in row] for row in page.table(caption)]


def test_every_file_of_a_run_is_on_its_page(tmp_path: Path) -> None:
    page = page_of(write_run(tmp_path / "run"))
    figures = {each.all("dt")[0].text: each.all("strong")[0].text for each in page.root.all("dl")[0].children}
    assert figures == {
        "state": "done",
        "iterations": "20",
        "training loss": "7",
        "validation loss": "8.25",
        "tokens a second": "1,011",
        "peak memory, GB": "4.5",
    }
    assert [row[3:] for row in texts(page, "Starts of run")] == [
        ["0 to ?", "by a command", "4 on 2", "tensor 2, data 2", "no end is recorded: it was killed, or is under way"],
        ["5 to 8", "by its agents", "4 on 2", "tensor 2, data 2", "ValueError: a text"],
        ["8 to 20", "by its agents", "4 on 2", "tensor 2, data 2", "trained to the end"],
    ]
    # of the killed one until its last row, which was superseded
    assert [row[2] for row in texts(page, "Starts of run")] == ["55 s", "30 s", "2 min"]
    assert texts(page, "Memory at the start of a run") == [
        ["1", "first step", "2.50", "3.00", "4.50", "3", "80.0"],
    ]
    assert texts(page, "Tasks of lm-eval") == [["20", "a text", "acc,none", "0.375"]]
    assert texts(page, "Test") == [["20", "", "7.125", "1,243"]]
    assert texts(page, "Validations by dataset") == [["10", "a text", "8.5", ""]]
    assert texts(page, "Steps that were refused") == [["8", "a text", "skipped", ""]]
    assert texts(page, "Rechecks that named ranks") == [["9", "3", "yes", "a text"], ["18", "1, 3", "no", "a text"]]
    assert texts(page, "Ranks that held up the others") == [["run", "7", "rank 3: a text"]]
    assert texts(page, "Warnings of the log") == [["2", "'a text'"]]
    assert [(each.all("q")[0].text, each.texts) for each in page.root.all("p", "answer")] == [("Once", ["a text"])]
    titles = [figure.all("strong")[0].text for figure in page.root.all("figure", "chart")]
    assert titles[:4] == ["Loss", "Validation loss by dataset", "accuracy", "a text"]
    assert {"Throughput", "Gradient norm", "Own time of the slowest rank", "Peak of the process so far"} <= set(titles)
    assert {"Learning rate", "Learning rate of Muon"} <= set(titles)
    (config,) = page.root.all("pre")
    assert "lr: 0.01" in config.text


@pytest.mark.parametrize(
    ("outcome", "kind"),
    [("done", "done"), ("stopped", "stopped"), ("failed", "failed"), ([], "failed"), (None, "failed")],
)
def test_a_start_ended_as_it_recorded(tmp_path: Path, outcome: Any, kind: str) -> None:
    """By the outcome, not by the words of the reason: validations that no longer improve stop a run too."""
    run = write_run(tmp_path / "run")
    ended = {**end(9, "the validation loss has not improved", "", 1), "outcome": outcome}
    (run / "run.json").write_text(json.dumps({"starts": [start(0, 0, 0, ended)]}))
    assert read_recorded(run, "run").starts[0].kind == kind


def test_runs_lie_side_by_side(tmp_path: Path) -> None:
    page = page_of(write_run(tmp_path / "one"), write_run(tmp_path / "two", lr="0.5"))
    assert texts(page, "Options that differ") == [["lr", "0.01", "0.5"]]
    numbers = {row[0]: row[1:] for row in texts(page, "Numbers of the runs")}
    assert numbers["lowest training loss"] == ["7", "7"]
    assert numbers["refused steps"] == ["1", "1"]
    assert numbers["rechecks that named ranks"] == ["2", "2"]
    loss = page.root.all("figure", "chart")[0]
    assert [each["name"] for each in json.loads(loss.attributes["data-curves"])] == [
        *("one", "two", "one, validation", "two, validation"),
    ]


def test_a_curve_lies_where_its_values_are() -> None:
    drawn = curve_chart("t", "", [Curve("a", "c0", [0, 1, 2, 3, 4], [0.0, 10.0, math.nan, 5.0, 2.5])])
    assert drawn is not None
    lines = [line.attributes["points"] for line in Page(html_text(drawn)).root.all("polyline")]
    assert lines == [f"0.0,{HEIGHT:.1f} 250.0,0.0", f"750.0,{HEIGHT / 2:.1f} {WIDTH:.1f},{0.75 * HEIGHT:.1f}"]
    assert curve_chart("t", "", [Curve("a", "c0", [1], [math.nan])]) is None


def test_a_long_curve_keeps_its_peaks_and_gaps() -> None:
    count = 50 * MOST_POINTS
    values = [1.0] * count
    values[31_337], values[777], values[20_000] = 9.0, -9.0, math.nan
    drawn = curve_chart("t", "", [Curve("a", "c0", range(count), values)])
    assert drawn is not None
    page = Page(html_text(drawn))
    points = json.loads(page.root.all("figure")[0].attributes["data-curves"])[0]["points"]
    assert [31_337, 9.0] in points
    assert [777, -9.0] in points
    assert len(points) <= 2 * MOST_POINTS
    assert len(page.root.all("polyline")) == 2


def test_what_is_damaged_is_named(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    (run / "run.json").write_text('{"starts": [{"started": "yesterday"}]}')
    (run / "config.yaml").write_text("model: [")
    (run / "answers.jsonl").write_text('{"iteration": 1}\n')
    (run / "train.log").unlink()
    page = page_of(run)
    found = [item.text for item in page.root.all("li") if "damaged" in item.text or "No such" in item.text]
    assert [text.partition(":")[0] for text in found] == [
        *("run.json", "config.yaml", "answers.jsonl, line 1", "train.log"),
    ]
    assert page.root.all("figure", "chart")


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "run")
    assert report.main([str(run)]) == 0
    assert capsys.readouterr().out == f"wrote {run / 'report.html'}\n"
    assert (run / "report.html").read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    assert report.main([str(run), "--output", str(tmp_path / "page.pdf")]) == 2
    assert report.main([str(tmp_path / "nothing")]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert errors[0].endswith("does not end in .html")
    assert errors[1].startswith(f"report: {tmp_path / 'nothing'} does not exist")
    assert not (tmp_path / "page.pdf").exists()


def test_a_browser_shows_it(tmp_path: Path) -> None:
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        pytest.skip("no Chromium is installed")
    file = tmp_path / "report.html"
    run = write_run(tmp_path / "run", text=HOSTILE)
    file.write_text(report_text([read_recorded(run, HOSTILE)]), encoding="utf-8")
    with chromium(program, tmp_path / "profile") as browser:
        for width, scheme in ((1400, "dark"), (400, "light")):
            browser.open(file, width, scheme)
            assert browser.value("document.documentElement.scrollWidth") <= width
            assert browser.named("Log.entryAdded") == browser.named("Runtime.exceptionThrown") == []
            urls = [sent["request"]["url"] for sent in browser.named("Network.requestWillBeSent")]
            assert urls == [file.as_uri()]
        # the middle of 20 steps, of which the fifth has no loss
        browser.value(
            "const drawing = document.querySelector('.chart .plot > svg:last-child');"
            "const place = drawing.getBoundingClientRect();"
            "drawing.dispatchEvent(new PointerEvent('pointermove', {clientX: place.left + place.width / 2}));"
        )
        readout = browser.value("document.querySelector('.chart .readout').textContent")
        assert readout == "training: 8 at 10; validation: 8.25 at 10"
