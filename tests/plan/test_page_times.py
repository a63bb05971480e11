"""Times on the page of a plan: the predicted step, a run beside it, a search's layouts."""

from __future__ import annotations

import dataclasses
import gzip
import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from megatron.cli.plan import main
from megatron.observability.console import TIMER_SUFFIX
from megatron.options.config import Config, ConfigError
from megatron.options.stored import to_yaml
from megatron.plan.page import recorded
from megatron.plan.page.content import Timeline
from megatron.plan.page.document import page_text
from megatron.plan.page.page import PlannedTimes, plan_content, write_page
from megatron.plan.page.recorded import RecordedRun
from megatron.plan.page.steps import parts_of, predicted_timeline
from megatron.plan.pipeline_schedules import PassKind
from megatron.plan.rates.files import load_rates
from megatron.plan.rates.rates import Span
from megatron.plan.timing.cluster import Cluster
from megatron.plan.timing.step import StepTime, step_time
from megatron.plan.timing.text import seconds_text
from tests.plan.configs import BLOOM_13B, config
from tests.plan.pages import Page

RATES = load_rates("gaudi2")


def run(stages: int, microbatches: int, **parallel: Any) -> Config:
    return config(
        BLOOM_13B,
        parallel={"pipeline_model_parallel_size": stages, "device": "hpu", "device_memory": "gaudi2", **parallel},
        training={"bf16": True, "seq_length": 2048, "micro_batch_size": 1, "global_batch_size": microbatches},
    )


def predicted(stages: int, microbatches: int, **parallel: Any) -> StepTime:
    return step_time(run(stages, microbatches, **parallel), Cluster.of(1, stages), RATES)


def test_the_page_has_the_figures_of_the_step() -> None:
    step = predicted(4, 16)
    content = plan_content(run(4, 16), nodes=1, devices_per_node=4, title="a plan", times=PlannedTimes(RATES, step))
    page = Page(page_text(content))
    values = [node.text for node in page.root.all("dl")[0].all("strong")]
    mfu = step.flops / step.seconds / 4 / RATES.peak_flops["bf16"]
    assert values[:3] == [seconds_text(step.seconds), f"{16 * 2048 / step.seconds:,.0f}", f"{mfu:.1%}"]
    rows = page.table("Time of a step by part")
    shown = {row[0].text: float(row[1].attributes["data-value"]) for row in rows}
    assert sum(shown.values()) == pytest.approx(step.seconds)
    assert shown == {name: seconds for name, seconds in parts_of(step).items() if seconds > 0}
    (bar,) = page.root.all("div", "whole")
    widths = [float(rect.attributes["width"].removesuffix("%")) / 100 for rect in bar.all("rect")]
    assert widths == pytest.approx([seconds / step.seconds for seconds in shown.values()], abs=1e-5)
    for said in (RATES.title, "published, not measured"):
        assert said in page.root.text


def test_every_part_of_a_step_has_words() -> None:
    step = predicted(2, 4)
    assert len(parts_of(step)) == len(dataclasses.fields(step.parts))
    assert sum(parts_of(step).values()) == pytest.approx(step.seconds)


@pytest.mark.parametrize("virtual", [1, 2])
def test_the_timeline_is_that_of_the_step(virtual: int) -> None:
    step = predicted(4, 8, num_virtual_stages_per_pipeline_rank=virtual)
    drawn = predicted_timeline(step)
    assert drawn.seconds == pytest.approx(step.seconds)
    assert drawn.note == ""
    passes = [bar for bar in drawn.bars if bar.kind in ("forward", "backward")]
    assert len(passes) == 2 * 4 * 8 * virtual
    for bar, timed in zip(passes, step.timeline, strict=True):
        assert (bar.row, bar.start, bar.end) == (timed.stage, timed.start, timed.end)
    check_rows(drawn)


def check_rows(drawn: Timeline) -> None:
    """Check that no stage does two things at once, messages excepted, and that all is within the step."""
    for row in range(len(drawn.rows)):
        bars = [bar for bar in drawn.bars if bar.row == row and bar.kind != "message"]
        bars.sort(key=lambda bar: bar.start)
        for before, after in itertools.pairwise(bars):
            assert before.end <= after.start + 1e-9 * drawn.seconds
        assert bars[-1].end <= drawn.seconds * (1 + 1e-9)


def test_messages_are_drawn_as_long_as_the_rates_say() -> None:
    config = run(2, 4)
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, num_layers=2))
    # each stage on a node of its own
    step = step_time(config, Cluster.of(2, 1), RATES)
    activation = 2 * 2048 * 5120
    seconds = RATES.collective("send", activation, Span(size=2, per_node=1))
    messages = [bar for bar in predicted_timeline(step).bars if bar.kind == "message"]
    assert sorted((bar.row, bar.text) for bar in messages) == [
        *((0, f"gradient {microbatch}") for microbatch in range(4)),
        *((1, f"activation {microbatch}") for microbatch in range(4)),
    ]
    assert [bar.end - bar.start for bar in messages] == pytest.approx([seconds] * 8)


def test_a_long_step_says_what_its_timeline_leaves_out() -> None:
    step = predicted(4, 512)
    drawn = predicted_timeline(step)
    assert drawn.seconds + step.simulated.left_out == pytest.approx(step.seconds)
    assert drawn.note.startswith(f"{step.timed_microbatches} of 512 microbatches; the others take ")
    assert len(drawn.bars) < 1000


def write_run(folder: Path, step: StepTime, *, slower: float = 1.0, stages: int | None = None) -> None:
    """Write the files of a run whose passes take so many times their prediction."""
    folder.mkdir()
    rows: list[dict[str, Any]] = [
        {"kind": "train", "iteration": number, "iteration_time_s": 9.0} for number in (1, 2, 3)
    ]
    rows += [{"kind": "train", "iteration": 3 + n, "iteration_time_s": slower * step.seconds} for n in range(1, 6)]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "metrics.jsonl").write_text(text + '{"kind": "train", "itera')
    names = {PassKind.FORWARD: "ForwardPass", PassKind.BACKWARD: "BackwardPass"}
    events: list[dict[str, Any]] = [{"name": "process_name", "ph": "M", "pid": 0, "args": {"name": "rank 0"}}]
    for iteration, factor in ((1, 7.0), (2, slower)):
        for timed in step.timeline:
            arguments = {
                "instruction": names[timed.action.kind],
                "iteration": iteration,
                "stage": timed.stage if stages is None else min(timed.stage, stages - 1),
                "chunk": timed.action.chunk,
                "microbatch": timed.action.microbatch,
            }
            times = {
                "ts": 1e6 * (iteration * 100 + factor * timed.start),
                "dur": 1e6 * factor * (timed.end - timed.start),
            }
            # two ranks of each stage, the second one later
            for rank in (0, 1):
                pid = 2 * timed.stage + rank
                events.append({"ph": "X", "pid": pid, **times, "ts": times["ts"] + rank, "args": arguments})
    with gzip.open(folder / "profile_instructions.json.gz", "wt") as file:
        json.dump({"traceEvents": events}, file)


def test_a_run_is_shown_beside_its_plan(tmp_path: Path) -> None:
    step = predicted(2, 4)
    write_run(tmp_path / "run", step, slower=1.25)
    times = PlannedTimes(RATES, step, run=RecordedRun(tmp_path / "run"))
    content = plan_content(run(2, 4), nodes=1, devices_per_node=2, title="a plan", times=times)
    rows = Page(page_text(content)).table("Predicted beside measured")
    assert [row[0].text for row in rows] == [
        "a step",
        *(f"stage {stage}, {kind} pass" for stage in (0, 1) for kind in ("backward", "forward")),
    ]
    assert {row[3].text for row in rows} == {"1.25"}
    assert float(rows[0][2].attributes["data-value"]) == 1.25 * step.seconds
    measured = content.timelines[1]
    assert measured.title == "Measured, step 2"
    assert len(measured.bars) == 2 * 2 * 4
    check_rows(measured)
    assert max(bar.end for bar in measured.bars) == pytest.approx(
        1.25 * max(each.end for each in step.timeline), rel=1e-6
    )
    write_page(content, tmp_path / "plan.png")
    assert (tmp_path / "plan.png").stat().st_size > 10_000


def test_the_command_prints_and_draws_the_comparison(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--config", "bloom_13b", "--device", "gaudi2", "--pipeline-model-parallel-size", "2", "--num-devices", "2"]
    words += ["--global-batch-size", "4", "--output", str(tmp_path / "plan.html")]
    assert main(words) == 0
    (row,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  time ")]
    seconds = float(row.split()[1])
    write_run(tmp_path / "run", predicted(2, 4), slower=1.0)
    assert main([*words, "--compare", str(tmp_path / "run")]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if " pass " in line or "  a step  " in line]
    assert [row[-1] for row in rows if row[0] == "stage"] == ["1.00"] * 4
    # that of the plan itself is the first
    step = [row for row in rows if row[:2] == ["a", "step"]][-1]
    assert float(step[2]) == pytest.approx(seconds, rel=0.01)
    assert "Measured, step 2" in (tmp_path / "plan.html").read_text(encoding="utf-8")


def test_time_to_train_and_cost_are_those_of_the_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--config", "bloom_13b", "--device", "gaudi2", "--num-devices", "64", "--tensor-model-parallel-size", "8"]
    words += ["--device-mtbf-hours", "50000", "--disk-gb-per-second", "20", "--device-hour-price", "3"]
    assert main([*words, "--output", str(tmp_path / "plan.html")]) == 0
    text = capsys.readouterr().out
    page = Page((tmp_path / "plan.html").read_text(encoding="utf-8"))
    figures = {each.all("dt")[0].text: each.all("strong")[0].text for each in page.root.all("dl")[0].all("div")}
    assert f"expected   {figures['time to train']} with " in text
    assert f"cost       {figures['cost']} at 3 an hour" in text
    # each line of the text is on the page
    (table,) = page.root.all("table", "facts")
    shown = " ".join(cell.text for cell in table.all("td"))
    (failures,) = [line for line in text.splitlines() if line.startswith("  failures ")]
    assert failures.removeprefix("  failures ").strip() in shown


def test_a_comparison_needs_rates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "run", predicted(1, 4))
    assert main(["--config", "tiny_llama", "--compare", str(tmp_path / "run")]) == 2
    assert "--compare needs a predicted step: give --rates, or a chip by --device" in capsys.readouterr().err
    assert main(["--config", "tiny_llama", "--device", "gaudi2", "--compare", str(tmp_path / "none")]) == 2
    assert "metrics.jsonl cannot be read" in capsys.readouterr().err


def test_a_run_without_a_trace_is_compared_by_its_steps(tmp_path: Path) -> None:
    step = predicted(2, 4)
    write_run(tmp_path / "run", step, slower=2.0)
    (tmp_path / "run" / "profile_instructions.json.gz").unlink()
    recorded = RecordedRun(tmp_path / "run")
    assert not recorded.has_trace
    assert recorded.compared(step) == [("a step", step.seconds, 2.0 * step.seconds)]


def test_what_cannot_be_compared_is_refused_by_name(tmp_path: Path) -> None:
    step, folder = predicted(4, 8), tmp_path / "run"
    with pytest.raises(ConfigError, match=r"metrics\.jsonl cannot be read: No such file .* results folder"):
        RecordedRun(folder)
    write_run(folder, step, stages=2)
    with pytest.raises(ConfigError, match="the run has 2 stages, the plan 4; plan its layout"):
        RecordedRun(folder).compared(step)
    for broken in (
        b"not gzip",
        gzip.compress(b"[1]"),
        gzip.compress(b'{"traceEvents": []}'),
        gzip.compress(b"{}" * 9)[:-4],
    ):
        (folder / "profile_instructions.json.gz").write_bytes(broken)
        with pytest.raises(ConfigError, match="not a trace of --profile-instructions"):
            RecordedRun(folder)
    (folder / "metrics.jsonl").write_text('{"kind": "valid", "iteration": 1}\n')
    with pytest.raises(ConfigError, match="has no training step"):
        RecordedRun(folder)


def test_parts_and_timers_of_a_run_are_beside_the_predicted_ones(tmp_path: Path) -> None:
    step = predicted(2, 4)
    write_run(tmp_path / "run", step)
    (tmp_path / "run" / "profile_instructions.json.gz").unlink()
    metrics = tmp_path / "run" / "metrics.jsonl"
    rows: list[dict[str, Any]] = []
    for number in range(9):
        # the first rows compile
        factor = 9.0 if number < 3 else 2.0
        parts = {"passes": factor * 0.3, "exchange": factor * 0.1, "data": 0.0}
        rows.append({"kind": "train", "iteration": number, "iteration_time_s": factor * 0.4, "parts": parts})
        timers = {
            name + TIMER_SUFFIX: {"min": 0.1, "max": factor} for name in ("forward-compute", "optimizer", "evaluate")
        }
        rows.append({"kind": "timers", "iteration": number, **timers})
    metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    compared = {part.name: part for part in RecordedRun(tmp_path / "run").compared(step)}
    assert compared["a step"].measured == 0.8
    passes = compared["passes and update, rank 0"]
    exchange = compared["exchanges and waits, rank 0"]
    assert (passes.measured, exchange.measured) == (0.6, 0.2)
    assert passes.predicted + exchange.predicted == pytest.approx(step.seconds)
    forward = compared["timer forward-compute"]
    assert forward.measured == 2.0
    assert forward.predicted == 4 * max(sum(chunk.forward for chunk in stage) for stage in step.stages)
    assert compared["timer optimizer"].predicted == step.parts.update
    assert "timer evaluate" not in compared
    assert recorded.TIMER_SUFFIX == TIMER_SUFFIX


def test_a_run_is_planned_by_its_own_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    write_run(folder, predicted(2, 4))
    (folder / "config.yaml").write_text(to_yaml(run(2, 4)))
    words = ["--compare", str(folder), "--train-iters", "9"]
    (folder / "config.yaml").rename(folder / "other.yaml")
    assert main([*words, "--device", "gaudi2", "--num-devices", "4"]) == 2, "beside the default model"
    assert "config.yaml is not there; give the run's --config" in capsys.readouterr().err
    (folder / "other.yaml").rename(folder / "config.yaml")
    assert main(words) == 2
    assert "run.json cannot be read" in capsys.readouterr().err
    (folder / "run.json").write_text('{"starts": [{"world_size": 4, "hosts": {"a": [0, 1], "b": [2, 3]}}]}')
    assert main(words) == 0
    text = capsys.readouterr().out
    assert "2 nodes x 2 hpu devices = 4 ranks" in text
    assert "PP 2 x TP 1 x DP 2" in text
    assert "beside the run in" in text
