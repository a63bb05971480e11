"""The page of one run, or of several side by side: one HTML file that opens without a network."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import Element

from megatron.observability.report.curves import Curve, color, curve_chart, number_text
from megatron.observability.report.history import hosts_of, layout_text, moment, starts_table, time_line
from megatron.observability.report.recorded import ReportedRun
from megatron.observability.run_plots import Row, curve, memory_curve, timer_curves
from megatron.plan.page.content import Fact, Figure
from megatron.plan.page.marks import element
from megatron.plan.page.parts import facts_table, header, number_cell, section, table, whole_page
from megatron.plan.timing.text import seconds_text
from megatron.runtime.accelerator import ALLOCATED, MAX_ALLOCATED, TOTAL
from megatron.runtime.commands import counted
from megatron.runtime.files import replacing

FILES = Path(__file__).with_name("report")
MOST_WARNINGS = 50
MOST_STRAGGLERS = 50
MOST_ANSWERS = 40
"""Answers of a run that are shown, the newest."""


def write_report(runs: Sequence[ReportedRun], output: Path) -> None:
    """Write the page. Raises OSError."""
    text = report_text(runs)
    with replacing(output) as file:
        file.write(text.encode())


def report_text(runs: Sequence[ReportedRun]) -> str:
    """Return the text of the page."""
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs: {', '.join(run.name for run in runs)}"
    return whole_page(title, [header(title, _figures(runs)), *_sections(runs)], further=FILES)


def _sections(runs: Sequence[ReportedRun]) -> Iterator[Element]:
    # what differs comes first, since that is the question of two runs
    if len(runs) > 1:
        yield section("Side by side", _side_by_side(runs))
    for title, charts in (
        ("Loss", _loss_charts),
        ("Steps", _step_charts),
        ("Memory by rank", _memory_charts),
        ("Stragglers", _straggler_charts),
    ):
        drawn = [chart for chart in charts(runs) if chart is not None]
        if drawn:
            figures = [chart for chart in drawn if chart.tag == "figure"]
            others = [chart for chart in drawn if chart.tag != "figure"]
            yield section(title, element("div", *figures, class_="charts"), *others)
    yield from _of_each(runs, "Starts and their ends", _history)
    yield from _of_each(runs, "Evaluation", _evaluation)
    yield from _of_each(runs, "Steps that were refused", _bad_steps)
    yield from _of_each(runs, "Ranks that computed wrongly", _rechecks)
    yield from _of_each(runs, "Warnings", _warnings)
    yield from _of_each(runs, "Samples of text", _answers)
    yield section("Options", *_options(runs))
    yield from _of_each(runs, "Environment", _environment)


def _of_each(
    runs: Sequence[ReportedRun], title: str, parts: Callable[[ReportedRun], Iterator[Element]]
) -> Iterator[Element]:
    """Yield a section with what each run has of it; none, if no run has anything."""
    children: list[Element] = []
    for run in runs:
        own = list(parts(run))
        if own and len(runs) > 1:
            children.append(element("h3", run.name))
        children += own
    if children:
        yield section(title, *children)


# Headlines

NUMBERS: Mapping[str, Callable[[ReportedRun], tuple[str, float] | None]] = {
    "iterations": lambda run: _count(run.last("train", "iteration")),
    "tokens": lambda run: _count(run.last("train", "consumed_tokens")),
    "training loss": lambda run: _shown(run.last("train", "lm_loss")),
    "lowest training loss": lambda run: _shown(_lowest(run, "train")),
    "validation loss": lambda run: _shown(run.last("valid", "lm_loss")),
    "lowest validation loss": lambda run: _shown(_lowest(run, "valid")),
    "tokens a second": lambda run: _count(_median(run, "tokens_per_second")),
    "time of a step": lambda run: _seconds(_median(run, "iteration_time_s")),
    "MFU": lambda run: _share(_median(run, "mfu")),
    "peak memory, GB": lambda run: _shown(_peak_memory(run)),
    "refused steps": lambda run: _count(len(run.of_kind("bad_step"))),
    "rechecks that named ranks": lambda run: _count(len(run.of_kind("recheck"))),
    "starts": lambda run: _count(len(run.starts)),
}
"""Numbers of a run, each as text and as what a table sorts by; None: it has none. Of steps the median."""


NOTES = {
    "iterations": ("tokens", "{} tokens"),
    "training loss": ("lowest training loss", "lowest {}"),
    "validation loss": ("lowest validation loss", "lowest {}"),
    "tokens a second": ("tokens a second", "median of the logged steps, over all ranks"),
    "MFU": ("MFU", "median of the logged steps"),
    "peak memory, GB": ("peak memory, GB", "of the fullest rank"),
}
"""Headlines of a single run: of each the number below it, and its words."""


def _figures(runs: Sequence[ReportedRun]) -> Iterator[Figure]:
    if len(runs) > 1:
        return
    (run,) = runs
    if run.starts:
        newest = run.starts[-1]
        ended = "the last ended" if newest.kind != "open" else "the last row of the last is of"
        note = f"{counted(len(run.starts), 'start')}; {ended} {moment(newest.ended_s or newest.began_s)}"
        yield Figure("state", newest.kind, note)
    for name, (of, words) in NOTES.items():
        number, below = NUMBERS[name](run), NUMBERS[of](run)
        if number is not None:
            yield Figure(name, number[0], words.format(below[0]) if below else "")


def _side_by_side(runs: Sequence[ReportedRun]) -> Element:
    """Return a table with a column for each run."""
    rows = []
    for name, number_of in NUMBERS.items():
        numbers = [number_of(run) for run in runs]
        if any(numbers):
            cells = [element("td", "") if each is None else number_cell(*each) for each in numbers]
            rows.append([element("th", name, scope="row"), *cells])
    ends = [element("td", run.starts[-1].cause if run.starts else "", class_="long") for run in runs]
    rows.append([element("th", "last end", scope="row"), *ends])
    return table("Numbers of the runs", ["", *(run.name for run in runs)], rows)


def _count(value: Any) -> tuple[str, float] | None:
    return None if value is None else (f"{value:,.0f}", float(value))


def _shown(value: Any) -> tuple[str, float] | None:
    return None if value is None else (number_text(float(value)), float(value))


def _seconds(value: float | None) -> tuple[str, float] | None:
    return None if value is None else (seconds_text(value), value)


def _share(value: float | None) -> tuple[str, float] | None:
    return None if value is None else (f"{value:.1%}", value)


def _values(run: ReportedRun, kind: str, key: str) -> list[float]:
    return [value for value in curve(run.rows, kind, key)[1] if math.isfinite(value)]


def _lowest(run: ReportedRun, kind: str) -> float | None:
    return min(_values(run, kind, "lm_loss"), default=None)


def _median(run: ReportedRun, key: str) -> float | None:
    values = sorted(_values(run, "train", key))
    return values[len(values) // 2] if values else None


def _peak_memory(run: ReportedRun) -> float | None:
    return max(memory_curve(run.rows, MAX_ALLOCATED)[1], default=None)


# Curves


def _runs_curves(
    runs: Sequence[ReportedRun], what: str, points: Callable[[ReportedRun], tuple[Sequence[int], Sequence[float]]]
) -> list[Curve]:
    """Return one curve of each run."""
    curves = []
    # a colour for each run, the same in all diagrams
    for number, run in enumerate(runs):
        name = what if len(runs) == 1 else run.name
        curves.append(Curve(name, color(number), *points(run)))
    return curves


def _loss_charts(runs: Sequence[ReportedRun]) -> Iterator[Element | None]:
    curves = _runs_curves(runs, "training", lambda run: curve(run.rows, "train", "lm_loss"))
    for number, run in enumerate(runs):
        name = "validation" if len(runs) == 1 else f"{run.name}, validation"
        curves.append(Curve(name, f"{color(number)} dashed", *curve(run.rows, "valid", "lm_loss")))
    yield curve_chart("Loss", "of the task; tokens: nats", curves)
    yield curve_chart("Validation loss by dataset", "", list(_set_curves(runs)))
    # the objectives of a task, and the terms and metrics of layers, each of a unit of its own
    for kind, words in (("train", ""), ("valid", "validation")):
        names = dict.fromkeys(name for run in runs for row in run.of_kind(kind) for name in row.get("metrics") or {})
        for name in names:
            yield curve_chart(
                name,
                words,
                _runs_curves(runs, name, lambda run, n=name, k=kind: _metric(run, k, n)),  # type: ignore[misc]
            )


def _set_curves(runs: Sequence[ReportedRun]) -> Iterator[Curve]:
    """Yield the loss of each dataset of a run's validations."""
    for number, run in enumerate(runs):
        rows = run.of_kind("valid_set")
        for place, name in enumerate(dict.fromkeys(str(row.get("set")) for row in rows)):
            own = curve([row for row in rows if str(row.get("set")) == name], "valid_set", "lm_loss")
            if len(runs) == 1:
                yield Curve(name, color(place), *own)
            else:
                yield Curve(f"{run.name}, {name}", color(number), *own)


def _metric(run: ReportedRun, kind: str, name: str) -> tuple[list[int], list[float]]:
    rows = [row for row in run.of_kind(kind) if name in (row.get("metrics") or {})]
    values = [math.nan if row["metrics"][name] is None else float(row["metrics"][name]) for row in rows]
    return [row["iteration"] for row in rows], values


def _step_charts(runs: Sequence[ReportedRun]) -> Iterator[Element | None]:
    for key, title, unit in (
        ("tokens_per_second", "Throughput", "tokens a second, over all ranks"),
        ("mfu", "MFU", "share of the devices' peak"),
        ("iteration_time_s", "Time of a step", "seconds"),
        ("time_over_predicted", "Time of a step to its prediction", ""),
    ):
        curves = _runs_curves(runs, title, lambda run, k=key: curve(run.rows, "train", k))  # type: ignore[misc]
        yield curve_chart(title, unit, curves, from_zero=True)
    # of several runs there would be too many
    if len(runs) == 1:
        timers = timer_curves(runs[0].rows).items()
        curves = [Curve(name, color(number), *points) for number, (name, points) in enumerate(timers)]
        yield curve_chart("Phases of a step", "milliseconds on the slowest rank", curves, from_zero=True)
    for key, title, unit in (
        ("grad_norm", "Gradient norm", "before clipping"),
        ("learning_rate", "Learning rate", ""),
        ("decoupled_learning_rate", "Learning rate of embedding and head", ""),
        ("muon_learning_rate", "Learning rate of Muon", ""),
        ("global_batch_size", "Global batch", "samples"),
    ):
        curves = _runs_curves(runs, title, lambda run, k=key: curve(run.rows, "train", k))  # type: ignore[misc]
        # drawn where it is ramped up
        if key == "global_batch_size" and not any(len(set(each.values)) > 1 for each in curves):
            continue
        yield curve_chart(title, unit, curves, from_zero=key.endswith("learning_rate"))


def _memory_charts(runs: Sequence[ReportedRun]) -> Iterator[Element | None]:
    for key, title in ((MAX_ALLOCATED, "Peak of the process so far"), (ALLOCATED, "In use at the moment")):
        curves = []
        for number, run in enumerate(runs):
            for which, words, kind in (
                ("max", "the fullest rank", ""),
                ("mean", "the mean", " dashed"),
                ("min", "the emptiest", " faint"),
            ):
                name = words if len(runs) == 1 else f"{run.name}, {words}"
                curves.append(Curve(name, f"{color(number)}{kind}", *memory_curve(run.rows, key, which)))
        yield curve_chart(title, "GB of 2^30 bytes", curves, from_zero=True)
    # of several runs the curves are enough
    if len(runs) > 1:
        return
    rows = []
    for row in runs[0].of_kind("memory"):
        peak = row.get(MAX_ALLOCATED)
        if isinstance(peak, dict) and row.get("event") != "interval":
            rows.append(_memory_row(row, peak))
    if rows:
        heads = ["iteration", "event", "peak, GB: min", "mean", "max", "fullest rank", "of, GB"]
        yield table("Memory at the start of a run", heads, rows)


def _memory_row(row: Row, peak: Mapping[str, Any]) -> list[Element]:
    total, fullest = row.get(TOTAL), peak.get("max_rank", -1)
    whole = total["min"] if isinstance(total, dict) else None
    return [
        number_cell(f"{row['iteration']:,}", row["iteration"]),
        element("td", str(row["event"]).replace("_", " ")),
        *(number_cell(f"{peak[which]:.2f}", peak[which]) for which in ("min", "mean", "max")),
        number_cell(str(fullest), fullest),
        element("td", "") if whole is None else number_cell(f"{whole:.1f}", whole),
    ]


def _straggler_charts(runs: Sequence[ReportedRun]) -> Iterator[Element | None]:
    curves = _runs_curves(runs, "slowest rank", lambda run: curve(run.rows, "train", "slowest_ratio"))
    yield curve_chart("Own time of the slowest rank", "to what is expected of its work", curves)
    rows = []
    for run in runs:
        for row in run.of_kind("train"):
            if row.get("stragglers"):
                cells = [number_cell(f"{row['iteration']:,}", row["iteration"])]
                rows.append([element("th", run.name), *cells, element("td", str(row["stragglers"]), class_="long")])
    if rows:
        yield table("Ranks that held up the others", ["run", "until step", "rank, phase"], rows[-MOST_STRAGGLERS:])


# Sections of one run


def _history(run: ReportedRun) -> Iterator[Element]:
    if run.starts:
        yield time_line(run)
        yield starts_table(run)


def _evaluation(run: ReportedRun) -> Iterator[Element]:
    rows = []
    for row in run.of_kind("lm_eval"):
        for task, metrics in (row.get("results") or {}).items():
            for name, value in metrics.items():
                # beside the numbers lm-eval has texts, such as a metric's alias
                if isinstance(value, int | float):
                    place = number_cell(f"{row['iteration']:,}", row["iteration"])
                    cells = [element("td", task), element("td", name), number_cell(number_text(value), value)]
                    rows.append([place, *cells])
    if rows:
        yield table("Tasks of lm-eval", ["iteration", "task", "metric", "value"], rows, is_sortable=True)
    for kind, title in (("valid_set", "Validations by dataset"), ("test", "Test"), ("test_set", "Test by dataset")):
        own = [row for row in run.of_kind(kind) if row.get("lm_loss") is not None]
        if own:
            heads = ["iteration", "dataset", "loss", "perplexity"]
            yield table(title, heads, [_validation_row(row) for row in own], is_sortable=True)


def _validation_row(row: Row) -> list[Element]:
    perplexity = row.get("perplexity")
    return [
        number_cell(f"{row['iteration']:,}", row["iteration"]),
        element("td", str(row.get("set", ""))),
        number_cell(number_text(row["lm_loss"]), row["lm_loss"]),
        element("td", "") if perplexity is None else number_cell(number_text(perplexity), perplexity),
    ]


def _bad_steps(run: ReportedRun) -> Iterator[Element]:
    rows = []
    for row in run.of_kind("bad_step"):
        place = number_cell(f"{row['iteration']:,}", row["iteration"])
        texts = [str(row.get(key, "")) for key in ("reason", "action")]
        origin = ", ".join(str(row[key]) for key in ("origin", "origin_ranks") if row.get(key) not in (None, [], ""))
        rows.append([place, *(element("td", text, class_="long") for text in (*texts, origin))])
    if rows:
        yield table("Steps that were refused", ["iteration", "reason", "action", "origin"], rows, is_sortable=True)


def _rechecks(run: ReportedRun) -> Iterator[Element]:
    rows = []
    for row in run.of_kind("recheck"):
        place = number_cell(f"{row['iteration']:,}", row["iteration"])
        ranks = ", ".join(map(str, row.get("ranks") or []))
        certain = "yes" if row.get("is_certain") else "no"
        reason = element("td", str(row.get("reason", "")), class_="long")
        rows.append([place, element("td", ranks), element("td", certain), reason])
    if rows:
        heads = ["after iteration", "ranks", "for certain", "what differed"]
        yield table("Rechecks that named ranks", heads, rows, is_sortable=True)


def _warnings(run: ReportedRun) -> Iterator[Element]:
    if run.warnings:
        shown = list(run.warnings.items())[-MOST_WARNINGS:]
        rows = [[number_cell(f"{count:,}", count), element("td", text, class_="long")] for text, count in shown]
        if len(run.warnings) > len(shown):
            yield element("p", f"The last {len(shown)} of {len(run.warnings)}.")
        yield table("Warnings of the log", ["times", "warning"], rows)
    if run.missing:
        yield element("p", "Not on this page:")
        yield element("ul", *[element("li", each) for each in run.missing])


def _answers(run: ReportedRun) -> Iterator[Element]:
    # the newest first: earlier ones are of a model that no longer is
    for answer in reversed(run.answers[-MOST_ANSWERS:]):
        text = element("p", element("q", answer["prompt"]), element("br"), answer["text"], class_="answer")
        yield element("div", element("span", f"iteration {answer['iteration']:,}", class_="quiet"), text)


def _options(runs: Sequence[ReportedRun]) -> Iterator[Element]:
    if len(runs) > 1:
        # in the order of config.yaml, by which related options are neighbours
        names = list(dict.fromkeys(name for run in runs for name in run.options))
        rows = []
        for name in names:
            values = [run.options.get(name, "") for run in runs]
            if len(set(values)) > 1:
                cells = [element("td", value, class_="long") for value in values]
                rows.append([element("th", name, scope="row"), *cells])
        if rows:
            yield table("Options that differ", ["option", *(run.name for run in runs)], rows)
        else:
            yield element("p", "The runs have the same options.")
    for run in runs:
        if run.config_text:
            summary = element("summary", f"config.yaml of {run.name}")
            yield element("details", summary, element("pre", run.config_text))


def _environment(run: ReportedRun) -> Iterator[Element]:
    if not run.starts:
        return
    row = run.starts[-1].row
    facts = [Fact("layout", layout_text(row)), Fact("ranks", f"{row.get('world_size')}")]
    hosts = hosts_of(run.starts[-1])
    facts.append(Fact("hosts", ", ".join(hosts)))
    for name, key in (("versions", "versions"), ("code", "project")):
        named = row.get(key)
        if isinstance(named, dict):
            facts.append(Fact(name, ", ".join(f"{each} {value}" for each, value in named.items() if value)))
    command = row.get("command")
    if isinstance(command, list):
        facts.append(Fact("command", " ".join(map(str, command))))
    facts += [Fact("in", str(row.get("folder", ""))), Fact("results", str(run.folder))]
    yield facts_table(facts)
