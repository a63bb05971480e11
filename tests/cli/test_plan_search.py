"""megatron-plan --search: its table, the commands that start the first layout, and what it refuses."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron.cli.launch import parse_command_line
from megatron.cli.plan import main
from megatron.cli.planning.start_command import StartCommand, command_lines
from megatron.launch.dialects.hl_requests import from_environment
from megatron.options.config import Config
from megatron.plan.fit import capacity, for_device
from megatron.plan.rates.files import load_rates
from megatron.plan.search.found import Found
from megatron.plan.search.search import search
from megatron.plan.timing.cluster import Cluster
from megatron.settings.command_line import read_command_line
from megatron.settings.validation import check
from tests.plan.pages import Page

RUN = "--config tiny_llama --global-batch-size 32 --train-iters 100 --device h100".split()
SMALL = ["--recompute-granularity", "none", "--no-offload-activations", "--zero-stage", "1"]


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["--search", *RUN, *SMALL, *words]) == 0
    return capsys.readouterr().out


def test_the_table_fits_a_terminal_of_100_columns(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "--num-devices", "4")
    assert max(map(len, text.splitlines())) <= 100
    assert "Fastest layouts of tiny_llama on 4 devices (nodes: 1 x 4)" in text
    assert "megatron-launch --nodes 1 --devices-per-node 4 -- " in text
    assert "computes" in text


def test_a_node_down_is_compared_with_all(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("a slots=2\nb slots=2\nc slots=2\n")
    text = printed(capsys, "--hostsfile", str(hosts), "--nodes-down", "1")
    assert "without 1 on 4 of 6 devices" in text
    text = printed(capsys, "--node-sizes", "4", "4", "2")
    assert "10 devices (nodes: 2 x 4 + 1 x 2)" in text


def test_a_config_may_name_the_rates(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text("logging: {rates: a100}\nparallel: {device_memory: h100, device: cuda}\n")
    words = ["--search", *RUN[:-2], "--config", str(config), *SMALL, "--num-devices", "2"]
    assert main(words) == 0
    assert "rates of A100" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (("--search",), "--search needs one of --num-devices, --node-sizes and --hostsfile"),
        (("--search", "--num-devices", "0"), "--search needs one of"),
        (("--search", "--num-devices", "12"), "num_devices=12 is not a multiple of devices_per_node=8"),
        (
            ("--search", "--node-sizes", "8", "8", "--devices-per-node", "4"),
            "--devices-per-node 4 is for --num-devices, and --node-sizes has its own; leave it out",
        ),
        (("--search", "--node-sizes", "8", "0"), "--node-sizes 8 0 must be 1 or more each"),
        (("--search", "--node-sizes", "8", "--nodes-down", "1"), "--nodes-down 1 leaves none of 1 node"),
        (("--nodes-down", "1"), "--nodes-down is for --search"),
        (("--search", "--num-devices", "8", "--rates", "gaudi2"), "the rates of gaudi2 are those of hpu"),
        (("--search", "--num-devices", "4", "--lr", "x"), "lr"),
    ],
)
def test_what_cannot_be_searched_is_refused(
    words: tuple[str, ...], fault: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*RUN, *words]) == 2
    assert fault in capsys.readouterr().err


def test_where_nothing_fits_the_least_number_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--search --config llama32_1b --global-batch-size 64 --device cuda --device-memory 8 --rates h100".split()
    small = [*SMALL, "--micro-batch-size", "1", "--context-parallel-size", "1", "--sequence-parallel", "false"]
    small += ["--devices-per-node", "1", "--num-devices"]
    assert main([*flags, *small, "1"]) == 2
    error = capsys.readouterr().err
    assert "no layout of 1 devices can run this: none fits; the least number with one is 10 devices" in error
    assert [number for number in (8, 9, 10) if main([*flags, *small, str(number)]) == 0] == [10]


def layout_of(config: Config) -> tuple[object, ...]:
    parallel, optimizer = config.parallel, config.optimizer
    return parallel, config.training, optimizer.zero_stage, optimizer.offload_optimizer


@pytest.mark.parametrize("preset", ["bloom_13b", "llama31_8b", "mixtral_8x7b"])
def test_the_printed_commands_give_the_same_config(preset: str) -> None:
    flags = ["--config", preset, "--device", "hpu", "--device-memory", "gaudi3", "--global-batch-size", "64"]
    run = for_device(read_command_line([*flags, "--data-path", "X"]).config)
    fixed = {"zero_stage", "offload_activations", "sequence_parallel", "pipeline_partition_method"}
    room = capacity(run, 8)
    assert room is not None
    found = search(run, [Cluster.of(2, 8)], load_rates("gaudi3"), room, check, count=2, fixed=fixed).found
    assert len(found) == 2
    for each in found:
        _same_config(each, flags, preset)


def _same_config(found: Found, flags: list[str], preset: str) -> None:
    start = StartCommand(found, flags, [preset])
    request, _ = parse_command_line(start.launch_words()[1:])
    assert request.faults == []
    assert (request.nodes, request.devices_per_node) == (2, 8)
    assert layout_of(read_command_line(request.train_flags).config) == layout_of(found.config)
    of_script = start.script_words()
    assert of_script is not None
    variables, (script, *words) = of_script
    assert Path(script).exists()
    assert max(map(len, command_lines([script, *words], variables))) <= 100
    name = {"run_bloom13b.sh": "bloom13b", "run_llama.sh": "llama", "run_mixtral.sh": "mixtral"}[Path(script).name]
    request = from_environment(variables, name, words)  # type: ignore[arg-type]
    assert request.faults == []
    assert (request.nodes, request.devices_per_node) == (2, 8)
    assert request.data_parallel_size == found.layout.num_batch_ranks
    assert layout_of(read_command_line(request.train_flags).config) == layout_of(found.config)


def test_the_layouts_are_drawn_as_they_are_printed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "plan.html"
    text = printed(capsys, "--num-devices", "4", "--output", str(file))
    assert text.endswith(f"wrote {file}\n")
    rows = Page(file.read_text(encoding="utf-8")).table("Layouts, the fastest first")
    lines = [line.split() for line in text.splitlines() if re.match(r" +\d+ .*%", line)]
    assert len(rows) == len(lines) > 1
    for row, line in zip(rows, lines, strict=True):
        number, seconds, _, tokens, mfu, bubble, *_ = line
        assert row[0].text == number
        assert row[3].text == tokens
        assert float(row[2].attributes["data-value"]) == pytest.approx(float(seconds) * 1e-3, rel=0.01)
        assert (row[4].text, row[6].text) == (mfu, bubble)
    # each with its command: that of the first is printed
    (command,) = rows[0][-1].all("code")
    assert command.text in re.sub(r"\s*\\\n\s*", " ", text)


def test_questions_on_one_layout_are_none_of_the_search(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["--search", *RUN, "--num-devices", "4", "--compare", str(tmp_path), "--save-seconds", "3"]) == 2
    fault = capsys.readouterr().err
    for name in ("--compare", "--save-seconds"):
        assert f"{name} is for the plan of one layout; leave out --search, or it" in fault
    assert main(["--search", *RUN, "--num-devices", "4", "--output", str(tmp_path / "plan.pdf")]) == 2
    assert "must end in .html" in capsys.readouterr().err
