"""The event file is TensorBoard's, byte for byte in its checksums."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from megatron.observability import event_file
from megatron.observability.event_file import EventFile, masked_crc32c


@pytest.mark.parametrize("length", [0, 1, 3, 4, 5, 8, 255, 700, 5000])
def test_checksum_is_tensorboards(length: int) -> None:
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c as theirs

    for data in (bytes(length), b"\xff" * length, random.Random(length).randbytes(length)):
        assert masked_crc32c(data) == theirs(data)


def test_tensorboard_reads_what_is_written_at_once_and_of_every_file(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.compat.proto.summary_pb2 import Summary

    for part in range(2):
        file = EventFile(tmp_path)
        for step in (1, 2):
            summary = Summary(value=[Summary.Value(tag="loss", simple_value=step + 10 * part)])
            file.add_summary(summary, 10 * part + step)
        events = EventAccumulator(str(tmp_path))
        events.Reload()
        assert events.Scalars("loss")[-1].value == 10 * part + 2, "before it is closed"
        file.close()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 1), (2, 2), (11, 11), (12, 12)]


def test_full_disk_leaves_no_torn_event(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorboard.compat.proto.summary_pb2 import Summary

    file = EventFile(tmp_path)
    (path,) = tmp_path.iterdir()
    before, write = path.read_bytes(), event_file.os.write
    monkeypatch.setattr(event_file.os, "write", lambda descriptor, data: write(descriptor, data[:7]))
    with pytest.raises(OSError, match="No space"):
        file.add_summary(Summary(), 1)
    assert path.read_bytes() == before
    file.close()
