"""On a terminal each record is a short row that fits, above a progress bar; train.log has Megatron's full lines."""

from __future__ import annotations

import dataclasses
import fcntl
import math
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from megatron.observability.console import step_columns
from megatron.observability.rank_times import straggler_stats
from megatron.observability.step_metrics import Speed
from tests.observability.test_metrics import STEP
from tests.observability.test_rank_times import rank_times
from tests.ranks import HANG_S

ROOT = Path(__file__).resolve().parents[2]
SPEED = Speed(128.0, 16384.0, 4096.0, 0.0123, None)

PROGRAM = """
import dataclasses, multiprocessing, os, sys
multiprocessing.set_start_method("spawn")  # as a rank's is; in others a semaphore is never reported
from megatron.options.config import Config, LoggingConfig, TrainingConfig
from megatron.observability import metrics
from megatron.observability.rank_times import RankStats
from tests.observability.test_metrics import STEP, at
metrics.TensorBoardLog = lambda folder: None
results, log_format = sys.argv[1:]
config = Config(
    training=TrainingConfig(global_batch_size=16, seq_length=128, train_iters=100),
    logging=LoggingConfig(results_dir=results, log_format=log_format),
)
keys = [f"{key} (GB)" for key in ("memory_allocated", "max_memory_allocated", "total_memory_available")]
memory = dict.fromkeys([*keys, "host_memory_available (GB)"], RankStats(1.0, 1.5, 2.5, 3))
timers = {f"{name}-time": RankStats(0.5, 1.0, 1.5, 0) for name in ("forward-compute", "backward-compute", "optimizer")}
log = metrics.MetricsLog(config, writes=True, world_size=4, device_peak_tflops=None, total_iterations=100)
with log:
    log.log_validation(0, 0, 11.25, 5120)
    for iteration in range(1, 31):
        log.log_step(at(iteration, metrics={"accuracy": 0.5} if iteration > 28 else {}))
        if iteration == 5:
            log.log_memory("first_step", iteration, memory)
            log.log_timers(iteration, 16 * iteration, timers)
            log.message("WARNING: a message that is " + "long " * 30 + "and ends here")
    log.log_validation(30, 480, 5.25, 5120, metrics={"accuracy": 0.25})
    log.message("saved out/checkpoints/global_step30 in 0.3 s")
sys.stdout.flush()
os._exit(0)  # as a rank ends
"""


def screen_of(text: str, width: int) -> tuple[list[str], int]:
    """Return the lines that remain on a terminal, and how many were wrapped because they were too long."""
    lines, column, wrapped = [""], 0, 0
    for char in text:
        if char == "\r":
            column = 0
        elif char == "\n":
            lines.append("")
        else:
            assert char.isprintable(), repr(char)
            if column == width:
                lines.append("")
                column, wrapped = 0, wrapped + 1
            lines[-1] = lines[-1][:column].ljust(column) + char + lines[-1][column + 1 :]
            column += 1
    return [line.rstrip() for line in lines], wrapped


def run_on_terminal(width: int, *arguments: str) -> str:
    """Return what PROGRAM writes to a terminal of `width` columns."""
    own, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 40, width, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *arguments], stdout=its, stderr=subprocess.PIPE, cwd=ROOT, env=environment
    )
    os.close(its)
    parts = []
    try:
        while part := os.read(own, 65536):
            parts.append(part)
    except OSError:  # Linux: the other side is closed
        pass
    finally:
        os.close(own)
    _, errors = process.communicate(timeout=HANG_S)
    assert (process.returncode, errors) == (0, b""), errors.decode()
    return b"".join(parts).decode()


@pytest.mark.parametrize("width", [80, 100])
def test_each_record_is_one_row_of_a_terminal(width: int, tmp_path: Path) -> None:
    lines, wrapped = screen_of(run_on_terminal(width, str(tmp_path), "auto"), width)
    assert wrapped == 0
    assert not [line for line in lines if "%|" in line], "the bar leaves nothing behind"
    steps = [line for line in lines if re.match(r" +\d+/100  ", line)]
    assert [int(line.split("/")[0]) for line in steps] == list(range(1, 31))
    headers = [place for place, line in enumerate(lines) if line.split()[:2] == ["iteration", "loss"]]
    assert len(headers) == 3, "at the start, after 20 rows, and for a new column"
    for place in headers:
        assert len(lines[place]) == len(lines[place + 1])
    assert ("mem GB" in lines[headers[-1]]) == (width == 100)
    assert lines[headers[-1]].split()[2] == "accuracy"
    assert steps[-1].split()[2] == "0.5"
    loss_end = lines[headers[0]].index("loss") + 4
    assert {line[:loss_end] for line in lines if line.lstrip().startswith("validation")} == {
        "validation  11.2500",
        "validation   5.2500",
    }
    assert "    memory  first step: peak 2.50 of 2.50 GB on rank 3; host 1.0 GB free" in "\n".join(lines)
    assert "        ms  forward-compute 1500.0 backward-compute 1500.0 optimizer 1500.0" in "\n".join(lines)
    assert "saved out/checkpoints/global_step30 in 0.3 s" in lines
    long = next(place for place, line in enumerate(lines) if line.startswith("WARNING"))
    assert lines[long + 1].startswith("    long "), "wrapped between words"


def test_log_file_has_the_full_lines_whatever_is_printed(tmp_path: Path) -> None:
    run_on_terminal(100, str(tmp_path), "auto")
    full = (tmp_path / "train.log").read_text().splitlines()
    assert full[0].startswith(" validation loss at iteration 0 | lm loss value: 1.125000E+01 | lm loss PPL:")
    assert full[1].startswith(" iteration        1/     100 | consumed samples:")
    assert sum("consumed samples:" in line for line in full) == 30
    assert "| accuracy: 5.000000E-01 | loss scale: 1.0 |" in full[-3]
    assert "(min, max) time across ranks (ms):" in full
    assert " memory at iteration 5, first step | memory_allocated (GB): 1 / 1.500 / 2.500 on rank 3 |" in "\n".join(
        full
    )
    assert full[-1] == "saved out/checkpoints/global_step30 in 0.3 s"


def test_full_lines_on_a_terminal_leave_the_bar_whole(tmp_path: Path) -> None:
    text = run_on_terminal(100, str(tmp_path), "full")
    assert text.count("consumed samples:") == 30
    assert re.search(r"\r 30%\|.*\| 30/100 \[", text)
    assert "tokens/s  " not in text


def test_compact_rows_in_a_pipe_have_no_bar(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path), "compact"], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert "\r" not in run.stdout
    assert "consumed samples" not in run.stdout
    assert max(map(len, run.stdout.splitlines())) < 100


@pytest.mark.parametrize("width", [20, 60, 79, 99])
def test_columns_of_a_step_fit_the_width_or_are_left_out(width: int) -> None:
    step = dataclasses.replace(
        STEP,
        iteration=123456,
        metrics={"accuracy": 0.123456, "a metric of a long name": 1e-9},
        skipped_iterations=3,
        grad_norm=math.inf,
        lm_loss=math.nan,
        straggler=straggler_stats([rank_times(0, 1.0), rank_times(1, 3.0)]),
    )
    columns = step_columns(step, SPEED, 500000, width)
    assert [column.name for column in columns][:2] == ["iteration", "loss"]
    assert sum(column.width + 2 for column in columns) - 2 <= max(width, 22)
    if width == 99:
        assert "skip/nan" in [column.name for column in columns]
    assert all(len(column.text) <= column.width for column in columns)
