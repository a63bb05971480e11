"""Measured rates: a file from one rank and from two, an interruption, starts from planted times, refusals."""

from __future__ import annotations

import argparse
import dataclasses
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron.cli.plan import main, plan_parser
from megatron.cli.planning.measuring import measure_plan
from megatron.measuring import trainings
from megatron.measuring.report import summary
from megatron.measuring.starts import config_of, starts_of
from megatron.measuring.trainings import FEW_LAYERS, FEW_MICROBATCHES, Training
from megatron.options.config import ConfigError
from megatron.plan.rates.files import load_rates
from megatron.plan.rates.rates import Rates, Starts
from megatron.plan.timing.cluster import Cluster
from megatron.plan.timing.step import step_time

TINY = ("--tiny", "--device", "cpu", "--precisions", "fp32")


def started(tmp_path: Path, *flags: str) -> subprocess.Popen[str]:
    """Return a rank that measures alone, whose temporary files are in a folder of its own."""
    (tmp_path / "temporary").mkdir()
    command = [sys.executable, "-m", "megatron.measuring.ranks", "--output", str(tmp_path / "rates.yaml")]
    command += ["--folder", str(tmp_path), *TINY, *flags]
    environment = os.environ | {"TMPDIR": str(tmp_path / "temporary"), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=Path.cwd()
    )


def left(tmp_path: Path) -> set[str]:
    """Return the files that a measurement has left."""
    return {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}


def check_rank(rates: Rates) -> None:
    """Check that each piece of a rank has seconds, which a larger one takes longer for where nothing is a start."""
    for role in ("forward", "input", "weight"):
        assert 0 < rates.product("fp32", role, 16, 32, 32) < rates.product("fp32", role, 1600, 320, 320)  # type: ignore[arg-type]
    sizes: dict[str, Any] = {"rows": 1, "row_tokens": 16, "heads": 2, "kv_heads": 2, "head_size": 8}
    for kind in ("causal", "alibi", "window", "dropout"):
        assert 0 < rates.attention("fp32", "forward", kind=kind, **sizes) < 1
    assert 0 < rates.pointwise("rmsnorm", "backward", "fp32", 1000) < 1
    assert 0 < rates.update("sgd", "fp32", 1000) < 1
    assert rates.update("adam", "fp32", 1000) == rates.update("adamw", "fp32", 1000)
    assert rates.disk_bytes_per_s is not None
    assert rates.peak_flops["fp32"] > 1e6


def test_a_rank_writes_rates_and_leaves_nothing_else(tmp_path: Path) -> None:
    run = started(tmp_path)
    output, errors = run.communicate(timeout=600)
    assert run.returncode == 0, errors
    assert left(tmp_path) == {"rates.yaml"}
    rates = load_rates(str(tmp_path / "rates.yaml"))
    assert (rates.device, rates.is_measured) == ("cpu", True)
    check_rank(rates.for_ranks(1))
    assert "short trainings" in errors
    *lines, path = output.splitlines()
    assert max(map(len, lines)) <= 100
    assert path == f"  --rates {tmp_path / 'rates.yaml'}"
    with pytest.raises(ConfigError, match=r"no fp16 products in .*rates.yaml"):
        rates.product("fp16", "forward", 8, 8, 8)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_measurement_leaves_nothing(number: signal.Signals, tmp_path: Path) -> None:
    run = started(tmp_path)
    assert run.stderr is not None
    for line in run.stderr:
        if "pieces" in line:
            break
    run.send_signal(number)
    run.communicate(timeout=600)
    assert run.returncode == 130
    assert left(tmp_path) == set()


def measured_by_two(tmp_path: str) -> dict[str, Any]:
    """Measure exchanges on each of two ranks."""
    from megatron.measuring.exchanges import ExchangeRates, groups_of
    from megatron.measuring.options import TINY as TINY_SIZES
    from megatron.options.config import ParallelConfig
    from megatron.parallel.context import ParallelContext

    ctx = ParallelContext.build(ParallelConfig(), "cpu")
    rates = ExchangeRates(ctx, TINY_SIZES, groups_of(ctx, per_node=2))
    return {"collectives": rates.measure(lambda text: None), "slowdown": rates.slowdown(2)}


def test_two_ranks_measure_each_exchange_alike(ranks: Callable[..., Any], tmp_path: Path) -> None:
    found = ranks(2)(measured_by_two, str(tmp_path))
    assert found[0]["collectives"] == found[1]["collectives"]
    for kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"):
        (group,) = found[0]["collectives"][kind]
        assert (group["size"], group["per_node"], group["sharing"]) == (2, 2, 1)
        assert all(0 < seconds < 1 for seconds in group["seconds"])
    assert list(found[0]["slowdown"]) == [2]
    assert found[0]["slowdown"][2] >= 1


# ---------------------------------------------------------------------------------------------------------------------
# Starts


def test_starts_are_those_of_planted_times() -> None:
    """Steps take what the plan predicts with known starts, which must come back."""
    planted = Starts(step=7e-3, microbatch=4e-3, layer_forward=5e-4, layer_backward=8e-4, message=0.0)
    rates = load_rates("h100")
    measured = trainings.of_starts("bf16")
    for each in measured:
        time = step_time(config_of(each, "cuda"), Cluster.of(1, 1), dataclasses.replace(rates, starts=planted))
        each.steps = [time.seconds]
        each.forward = [each.microbatches * sum(chunk.forward for stage in time.stages for chunk in stage)]
    assert starts_of(measured, rates) == pytest.approx(planted)


def test_a_training_is_a_llama_of_its_sizes() -> None:
    training = Training("bf16", FEW_LAYERS, FEW_MICROBATCHES, hidden=128, optimizer="sgd")
    flags = training.flags(Path("data"), Path("results"), "cpu", 4)
    assert {"--bf16", "llama", "sgd", "128"} <= set(flags)


# ---------------------------------------------------------------------------------------------------------------------
# Command


def options_of(*flags: str) -> tuple[argparse.Namespace, list[str]]:
    return plan_parser().parse_known_args(list(flags))


def test_the_ranks_of_a_node_are_launched(tmp_path: Path) -> None:
    plan = measure_plan(*options_of("--measure", str(tmp_path / "r.yaml"), "--num-devices", "2", "--device", "cpu"))
    assert (plan.main, plan.nodes, plan.devices_per_node) == ("megatron.measuring.ranks", 1, 2)
    assert str(tmp_path / "r.yaml") in plan.train_flags


def test_all_nodes_of_a_hostsfile_are_launched(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("node1 slots=4\nnode2 slots=2\n", encoding="utf-8")
    words = ("--measure", str(tmp_path / "r.yaml"), "--hostsfile", str(hosts), "--device", "cpu")
    plan = measure_plan(*options_of(*words))
    assert (plan.nodes, plan.devices_per_node) == (2, 2)


@pytest.mark.parametrize(
    ("flags", "fault"),
    [
        (("--measure", "rates.json"), r"--measure rates.json must end with .yaml"),
        (("--measure", "no/folder/r.yaml"), "its folder does not exist"),
        (("--measure", "r.yaml", "--num-devices", "0"), "--num-devices 0 must be at least 1"),
        (("--measure", "r.yaml", "--device", "tpu"), "--device 'tpu' must be auto, hpu, cuda, cpu"),
        (("--measure", "r.yaml", "--config", "bloom_13b"), "not --config bloom_13b; leave it out"),
        (("--measure", "r.yaml", "--search"), "--measure FILE does not read --search; leave one of them out"),
        (("--measure", "r.yaml", "--output", "p.html"), "does not read --output"),
        (("--measure", "r.yaml", "--devices-per-node", "4"), "does not read --devices-per-node"),
        (("--measure", "r.yaml", "--device-hour-price", "2"), "does not read --device-hour-price"),
        (("--measure", "r.yaml", "--measure-folder", "none"), "--measure-folder none is not a folder"),
        (("--measure", "r.yaml", "--hostsfile", "none"), "hostsfile none does not exist"),
        (
            ("--config", "tiny_llama", "--hostsfile", "f"),
            "--hostsfile without --measure FILE or --search has no effect",
        ),
    ],
)
def test_a_fault_of_the_command_is_named(
    flags: tuple[str, ...], fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(flags) == 2
    assert fault in capsys.readouterr().err
    assert left(tmp_path) == set()


def test_the_summary_of_many_groups_is_narrow() -> None:
    group = {"size": 128, "per_node": 8, "sharing": 8, "bytes": [8, 10**9], "seconds": [1e-5, 1.0]}
    line = {"numbers": [10**9], "forward": [1e-5], "backward": [1e-5]}
    tables = {
        "threads": 1,
        "products": {"bf16": {"tokens": [8], "outputs": [8], "inputs": [8], "forward": [1e-9]}},
        "pointwise": {"residual_dropout": dict.fromkeys(("fp32", "bf16", "fp16"), line)},
        "starts": dict.fromkeys(("step", "microbatch", "layer_forward", "layer_backward", "message"), 0.1234),
    }
    tree = {"title": "t", "source": "s", "tables": [tables], "spread": 0.1, "cores": 8, "slowdown": {2: 1.5}}
    text = summary(tree | {"collectives": {"reduce_scatter": [group]}, "disk_bytes_per_s": 1e9}, "r.yaml")
    assert max(map(len, text.splitlines())) <= 100
    assert "128 ranks, 8 a node, 8 at once" in text
