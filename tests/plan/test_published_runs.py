"""Published runs, predicted from published rates: the promised ones within the limit, all as the table prints them."""

from __future__ import annotations

import re

import pytest

from benchmarks.published_runs import (
    LIMIT,
    RUNS,
    Prediction,
    Run,
    config_of,
    largest_parts,
    line_of,
    main,
    predict,
    published_seconds,
    rates_of_run,
)
from megatron.plan.flops import flops_per_token
from megatron.plan.rates.rates import Rates

PROMISED = [run for run in RUNS if run.is_promised]


def test_the_three_promised_runs_are_those_of_the_largest_models() -> None:
    assert [(run.name, run.devices) for run in PROMISED] == [
        ("Llama 3 405B", 16384),
        ("MegaScale 175B", 12288),
        ("BLOOM 176B, TP 4, PP 12", 384),
    ]
    assert LIMIT == 0.15


@pytest.mark.parametrize("run", PROMISED, ids=lambda run: run.name)
def test_a_promised_run_is_predicted_within_15_percent(run: Run) -> None:
    prediction = predict(run)
    assert prediction.time.seconds == pytest.approx(prediction.published, rel=LIMIT)
    assert prediction.time.parts.total == pytest.approx(prediction.time.seconds)


@pytest.mark.parametrize("run", RUNS, ids=lambda run: f"{run.name} {run.devices}")
def test_every_run_is_a_config_that_all_rules_accept(run: Run) -> None:
    """Devices and published seconds are those of its source: a rate of more than the device's peak is a wrong copy."""
    config = config_of(run)
    assert run.devices % config.parallel.tensor_model_parallel_size == 0
    peak = rates_of_run(run).peak_flops[config.training.precision]
    flops = flops_per_token(config) * config.training.global_batch_size * config.training.seq_length
    assert 0.2 < flops / (published_seconds(run, config) * run.devices * peak) < 0.7


def test_published_flops_become_seconds() -> None:
    """BLOOM's chronicles have both: 105.2 s, and 149 to 150 TFLOP/s by the formula of Narayanan et al."""
    bloom = next(run for run in RUNS if run.name.startswith("BLOOM"))
    by_formula = published_seconds(Run("", "", 384, hardware_tflops=149.5), config_of(bloom))
    assert by_formula == pytest.approx(105.2, rel=0.01)


def test_figures_of_a_run_stand_in_place_of_the_machines() -> None:
    bloom = next(run for run in RUNS if run.name.startswith("BLOOM"))
    own, machine = rates_of_run(bloom), rates_of_run(Run("", "", 8))

    def attention(rates: Rates) -> float:
        return rates.attention("bf16", "forward", rows=1, row_tokens=2048, heads=8, kv_heads=8, head_size=128)

    assert attention(own) > 3 * attention(machine)
    assert own.product("bf16", "forward", 4096, 4096, 4096) == machine.product("bf16", "forward", 4096, 4096, 4096)


def test_the_table_has_a_line_for_each_run_and_names_misses(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--only", "BLOOM 176B", "--notes"]) == 0
    title, line = capsys.readouterr().out.splitlines()
    assert title.split() == ["run", "devices", "published", "predicted", "ratio", "largest", "parts"]
    assert re.fullmatch(r"BLOOM 176B, TP 4, PP 12 +384 +105\.20 +[\d.]+ +[\d.]+  compute \d+%(, [a-z]+ \d+%){3}", line)
    prediction = predict(PROMISED[2])
    assert largest_parts(prediction.time, 1) in line
    wrong = Prediction(prediction.run, 2 * prediction.published, prediction.time)
    assert line_of(wrong).endswith("  misses")
