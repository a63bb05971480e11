"""Time to train: phases of a run, sizes of its checkpoints, options, and the text of the plan."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from megatron.options.config import Config, ConfigError, length_stages
from megatron.options.schedule import Schedule
from megatron.parallel.layout import Layout
from megatron.plan.campaign.campaign import plan_campaign
from megatron.plan.campaign.length import Phase, config_of, phases
from megatron.plan.campaign.question import Question
from megatron.plan.campaign.saves import checkpoint_bytes, rank_bytes, save_interval_s
from megatron.plan.flops import count_parameters
from tests.plan.configs import LLAMA_8B, config

LONG = {"bf16": True, "seq_length": 8192, "global_batch_size": 512, "train_samples": 1_000_000}


def question(words: str) -> Question:
    parser = argparse.ArgumentParser()
    Question.add_options(parser.add_argument_group("times"))
    return Question.from_arguments(parser.parse_args(words.split()))


def text(run: Config, words: str, num_devices: int = 64) -> str:
    return " ".join(" ".join(lines(run, words, num_devices)).split())


def lines(run: Config, words: str, num_devices: int = 64) -> list[str]:
    return plan_campaign(run, num_devices=num_devices, devices_per_node=8, question=question(words)).lines()


@pytest.mark.parametrize(
    "training",
    [
        {"train_iters": 300, "global_batch_size": 8},
        {"train_samples": 5000, "global_batch_size": 8},
        {"train_samples": 5003, "global_batch_size": 64, "rampup_batch_size": (16, 16, 2000)},
        {"train_iters": 300, "global_batch_size": 64, "rampup_batch_size": (8, 8, 100)},
        {"train_iters": 40, "global_batch_size": 64, "rampup_batch_size": (16, 16, 2000)},
        {"train_iters": 300, "global_batch_size": 8, "seq_length": 512, "seq_length_stages": (128, 40, 256, 50)},
        {
            "train_samples": 9000,
            "global_batch_size": 64,
            "rampup_batch_size": (16, 16, 2000),
            "seq_length": 512,
            "seq_length_stages": (128, 40, 256, 50),
        },
    ],
)
def test_phases_are_the_steps_that_the_run_takes(training: dict[str, Any]) -> None:
    run = config(training=training)
    schedule, consumed = Schedule(run.training, run.optimizer), 0
    steps: list[tuple[int, int]] = []
    while not schedule.is_complete(consumed) and len(steps) < (run.training.train_iters or 10**9):
        size = schedule.global_batch_size(consumed)
        row = next(length for length, end in length_stages(run.training) if end is None or consumed < end)
        steps.append((size, row))
        consumed += size
    found = phases(run)
    assert [phase[1:] for phase in found for _ in range(phase.steps)] == steps
    # each size once
    assert len(found) == len(dict.fromkeys(phase[1:] for phase in found))


def test_a_length_that_the_data_decides_is_refused() -> None:
    with pytest.raises(ConfigError, match="num_epochs=3 has as many steps as the data makes"):
        phases(config(training={"task": "sft", "num_epochs": 3}))
    with pytest.raises(ConfigError, match="give train_iters or train_samples"):
        phases(config())


def test_a_phase_of_short_rows_has_as_many_tokens_a_microbatch() -> None:
    run = config(training={"seq_length": 512, "micro_batch_size": 2, "global_batch_size": 16, "train_iters": 9})
    steady = config_of(run, Phase(5, 8, 128)).training
    assert (steady.seq_length, steady.micro_batch_size, steady.global_batch_size) == (128, 8, 32)


def test_steps_of_a_ramp_up_are_counted_by_their_microbatches_and_bubble() -> None:
    parallel = {"pipeline_model_parallel_size": 4}
    training = LONG | {"global_batch_size": 64, "rampup_batch_size": (16, 48, 1600), "train_samples": 8000}
    run = config(LLAMA_8B, parallel=parallel, training=training)
    plan = plan_campaign(run, num_devices=4, devices_per_node=4, question=question("--step-seconds 10"))
    assert [phase.steps for phase, _ in plan.by_phase] == [100, 100]
    # 1F1B takes m + p - 1 passes
    assert [seconds for _, seconds in plan.by_phase] == pytest.approx([10 * (16 + 3) / (64 + 3), 10.0])


def test_a_checkpoint_holds_weights_and_states_in_float32() -> None:
    run = config(LLAMA_8B, training=LONG)
    numbers = count_parameters(run)
    assert checkpoint_bytes(run) == 12 * numbers
    assert checkpoint_bytes(config(LLAMA_8B, optimizer={"optimizer": "sgd", "sgd_momentum": 0.0})) == 4 * numbers
    assert checkpoint_bytes(config(LLAMA_8B, checkpoint={"no_save_optim": True})) == 4 * numbers
    adapted = config(LLAMA_8B, lora={"lora_rank": 8})
    assert checkpoint_bytes(adapted) == 12 * count_parameters(adapted, lambda shard: shard.trained)
    # alone, a rank saves all of it; two stages differ, as the last one holds the output projection too
    assert rank_bytes(run, Layout.of(run.parallel)) == checkpoint_bytes(run)
    halves = config(LLAMA_8B, parallel={"pipeline_model_parallel_size": 2}, training=LONG)
    share = rank_bytes(halves, Layout.of(halves.parallel, 8)) * 8 / checkpoint_bytes(halves)
    assert 1.0 < share < 1.2


@pytest.mark.parametrize(
    ("checkpoint", "seconds"),
    [
        ({"save_interval": 100}, 200.0),
        ({"save_interval": 100, "save_samples": 16}, 4.0),
        ({"save_interval": 100, "save_interval_in_mins": 1.0}, 50.0),
        ({"save_interval": 100, "save_interval_in_mins": 60.0}, 200.0),
        ({"save_interval": 100, "save_samples": 1}, 2.0),
    ],
)
def test_a_run_saves_by_steps_samples_and_minutes(checkpoint: dict[str, Any], seconds: float) -> None:
    assert save_interval_s(config(checkpoint=checkpoint), step_s=2.0) == pytest.approx(seconds)


def test_a_plan_names_the_time_the_failures_the_interval_the_spares_and_the_cost() -> None:
    run = config(LLAMA_8B, training=LONG)
    words = "--step-seconds 10 --save-seconds 300 --save-wait-seconds 30 --device-mtbf-hours 5000 --device-hour-price 2"
    plan = text(run, words)
    for said in (
        "time 1,953 steps of 10 s: 5.42 h in the steps themselves",
        "saves every 1,000 steps = 2.78 h, 96.4 GB; training waits 30 s, and 4.5 min later it is whole",
        "failures one every 3.26 days on 64 devices",
        "effective training time",
        "best: every 409 steps",
        "spares 1 node: enough with a probability of 0.95 for those in repair, 24 h each",
        "at 2 an hour of a device",
        "with the spare nodes",
    ):
        assert said in plan
    assert max(map(len, lines(run, words))) <= 80


def test_a_plan_without_failures_has_no_line_on_them() -> None:
    run = config(LLAMA_8B, training=LONG, checkpoint={"async_save": False})
    assert text(run, "--step-seconds 10") == "time 1,953 steps of 10 s: 5.42 h in the steps themselves"
    saved = text(run, "--step-seconds 10 --disk-gb-per-second 2 --device-hour-price 1.5")
    assert "training waits 48.2 s" in saved
    assert "expected 5.45 h with the waits for saves, without failures" in saved
    assert "failures one" not in saved
    assert "spare" not in saved


def test_frequent_failures_are_named_instead_of_figures() -> None:
    run = config(LLAMA_8B, training=LONG, checkpoint={"async_save": False})
    plan = text(run, "--step-seconds 10 --save-seconds 600 --device-mtbf-hours 5 --device-hour-price 1")
    assert "a failure comes every 4.69 min, sooner than a save is written (10 min)" in plan
    assert "effective" not in plan
    assert "best" not in plan
    never = text(run, "--step-seconds 10 --save-seconds 5 --restart-minutes 0 --device-mtbf-hours 0.2")
    assert "with this interval the run does not end" in never
    assert "best: every 1 step = 10 s" in never


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        ("--device-mtbf-hours 0", "--device-mtbf-hours=0 must be a number above 0"),
        ("--device-mtbf-hours=-3", "--device-mtbf-hours=-3 must be a number above 0"),
        ("--device-mtbf-hours nan", "--device-mtbf-hours=nan must be a number above 0"),
        ("--step-seconds inf", "--step-seconds=inf must be a number above 0"),
        ("--restart-minutes=-1", "--restart-minutes=-1 must be a number, 0 or above"),
        ("--device-hour-price two", "--device-hour-price=two must be a number above 0"),
        ("--device-mtbf-hours 9 --spare-probability 1", "--spare-probability=1 must be a probability"),
        ("--repair-hours 24", "--repair-hours has no effect without failures"),
        ("--save-seconds 3 --disk-gb-per-second 2", "give one"),
        ("--save-seconds 3 --save-wait-seconds 4", "--save-wait-seconds=4 is a part of --save-seconds=3"),
    ],
)
def test_wrong_values_are_refused_by_name(words: str, fault: str) -> None:
    with pytest.raises(ConfigError) as error:
        question(words)
    assert fault in str(error.value)


@pytest.mark.parametrize(
    ("words", "checkpoint", "fault"),
    [
        ("--device-hour-price 2", {}, "needs that of a step: give --rates, or --step-seconds"),
        ("--step-seconds 1 --device-mtbf-hours 9", {}, "--device-mtbf-hours needs the time of a save"),
        ("--step-seconds 1 --save-seconds 9", {}, "give --save-wait-seconds"),
        ("--step-seconds 1 --save-wait-seconds 9", {"async_save": False}, "has no effect without async_save"),
    ],
)
def test_what_a_plan_lacks_is_named(words: str, checkpoint: dict[str, Any], fault: str) -> None:
    with pytest.raises(ConfigError) as error:
        lines(config(LLAMA_8B, training=LONG, checkpoint=checkpoint), words)
    assert fault in str(error.value)
