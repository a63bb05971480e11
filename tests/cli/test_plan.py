"""The command megatron-plan: its own flags, and the chip that a device's name stands for."""

from __future__ import annotations

import pytest

from megatron.cli.plan import main, plan_parser


def output(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(words) == 0
    return capsys.readouterr().out


def test_a_chip_stands_for_its_device_and_its_memory(capsys: pytest.CaptureFixture[str]) -> None:
    common = ("--config", "tiny_llama", "--num-devices", "2")
    by_chip = output(capsys, *common, "--device", "gaudi2")
    assert by_chip == output(capsys, *common, "--device", "hpu", "--device-memory", "gaudi2")
    assert "hpu devices" in by_chip
    assert "(device)" in output(capsys, *common, "--device", "H100", "--device-memory", "40")


def test_the_time_of_the_whole_run_is_planned_where_it_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    common = ("--config", "tiny_llama", "--train-iters", "100", "--no-async-save")
    plain = output(capsys, *common)
    timed = output(capsys, *common, "--step-seconds", "2", "--save-seconds", "1", "--device-mtbf-hours", "9000")
    assert timed.startswith(plain)
    assert "100 steps of 2 s: 3.33 min in the steps themselves" in timed
    assert "effective training time" in timed


def test_the_help_fits_a_terminal_of_100_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    lines = plan_parser().format_help().splitlines()
    assert max(map(len, lines)) <= 100


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (("--num-devices", "0"), "num_devices=0 and devices_per_node=8 must be at least 1"),
        (("--num-devices", "12"), "num_devices=12 is not a multiple of devices_per_node=8; change one"),
        (("--device", "h99"), "device"),
        (("--device-mtbf-hours", "nan"), "--device-mtbf-hours=nan must be a number above 0"),
        (("--device-hour-price", "2", "--train-iters", "9"), "give --rates, or --step-seconds as measured"),
    ],
)
def test_what_cannot_be_planned_is_refused(
    words: tuple[str, ...], fault: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--config", "tiny_llama", "--global-batch-size", "48", *words]) == 2
    assert fault in capsys.readouterr().err
