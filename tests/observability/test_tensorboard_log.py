"""TensorBoard reads the events of every file, and an error of its writing thread costs events, not the run."""

from __future__ import annotations

import math
import re
import resource
import shutil
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from megatron.observability.metric_writers import TensorBoardLog
from megatron.runtime.files import WriteErrors


def points(folder: Path, tag: str) -> list[tuple[int, Any]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    # TensorBoard reads files in the order of their names, which two of one second and process may not keep
    return sorted((event.step, event.value) for event in events.Scalars(tag))


def test_each_start_writes_a_file_that_continues_the_curve(tmp_path: Path) -> None:
    for part in range(2):
        log = TensorBoardLog(tmp_path)
        for step in (1, 2):
            log.write({"loss": step + 10 * part, "lr": math.nan}, 10 * part + step)
        log.close()
    assert len(list(tmp_path.iterdir())) == 2
    assert points(tmp_path, "loss") == [(1, 1), (2, 2), (11, 11), (12, 12)]
    assert [step for step, value in points(tmp_path, "lr") if math.isnan(value)] == [1, 2, 11, 12]


def test_full_disk_is_raised_by_a_later_call_without_a_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    errors, excepthook = WriteErrors(), threading.excepthook
    log = TensorBoardLog(tmp_path)
    log.write({"loss": 1.0}, 1)
    log._writer.flush()
    (path,) = tmp_path.iterdir()
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size, hard))
    try:
        for step in range(2, 60):  # more than its queue holds
            with errors.reported("TensorBoard's event file"):
                log.write({"loss": 1.0}, step)
        with errors.reported("TensorBoard's event file"):
            log.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, previous)
    warning = "WARNING: TensorBoard's event file cannot be written: File too large; training continues\n"
    assert capsys.readouterr().err == warning
    errors.close()
    assert "writes failed, and their content is lost" in capsys.readouterr().err
    assert points(tmp_path, "loss") == [(1, 1.0)], "what was written before can still be read"
    assert threading.excepthook is excepthook


def test_only_its_own_errors_are_kept_from_stderr(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[type[BaseException]] = []
    monkeypatch.setattr(threading, "excepthook", lambda arguments: seen.append(arguments.exc_type))
    log = TensorBoardLog(tmp_path)

    def fail() -> None:
        raise OSError

    thread = threading.Thread(target=fail)
    thread.start()
    thread.join()
    log.close()
    assert seen == [OSError]


def test_a_deleted_folder_is_reported_once_and_recreated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "tensorboard"
    log = TensorBoardLog(folder)
    log.write({"loss": 1.0}, 1)
    log._writer.flush()  # its thread would write the file while the folder is being removed
    shutil.rmtree(folder)
    for step in (2, 3):
        log.write({"loss": float(step)}, step)
    log.close()
    (warning,) = capsys.readouterr().err.splitlines()
    assert re.fullmatch(rf"WARNING: {folder}/events\S+ was deleted during the run: .* training continues", warning)
    assert points(folder, "loss") == [(2, 2), (3, 3)]
