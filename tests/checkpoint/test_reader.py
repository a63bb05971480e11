"""Reading checkpoints: tensors under any layout, by us and by the safetensors library; which checkpoint is found."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from megatron.checkpoint import reader, writer
from megatron.checkpoint.format import CheckpointError, Fragment
from megatron.checkpoint.reader import Checkpoint, newest_checkpoint
from megatron.checkpoint.source import Slice
from megatron.checkpoint.writer import write_checkpoint
from megatron.parallel.shards import Shard
from tests.checkpoint.states import (
    KINDS,
    MODEL,
    assert_holds,
    fragments_of,
    local,
    newest,
    padded,
    save_by_threads,
    write,
)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, int], Path]:
    """The same state as runs of many layouts save it."""
    found = {}
    for tensor_size, data_size in [(1, 1), (2, 1), (4, 1), (1, 3), (2, 2), (4, 2), (1, 8)]:
        folder = tmp_path_factory.mktemp(f"tp{tensor_size}_dp{data_size}")
        save_by_threads(folder, "global_step7", tensor_size, data_size)
        found[tensor_size, data_size] = folder / "global_step7"
    return found


def test_every_layout_saves_the_same_tensors(saved: dict[tuple[int, int], Path]) -> None:
    for folder in saved.values():
        checkpoint = Checkpoint(folder)
        assert_holds(checkpoint)
        assert checkpoint.kinds == KINDS
        assert checkpoint.parameters == MODEL
        assert checkpoint.dtypes["1.qkv.bias"] == "bfloat16"


@settings(max_examples=150)
@given(st.data())
def test_any_stretch_of_any_layout_is_read_from_any_other(
    saved: dict[tuple[int, int], Path], data: st.DataObject
) -> None:
    checkpoint = Checkpoint(data.draw(st.sampled_from(list(saved.values()))))
    name, kind = data.draw(st.sampled_from(list(MODEL))), data.draw(st.sampled_from(KINDS))
    size = data.draw(st.sampled_from([1, 2, 3, 4, 6, 12]))
    rank = data.draw(st.integers(0, size - 1))
    whole = local(name, kind, rank, size)
    start = data.draw(st.integers(0, len(whole)))
    numel = data.draw(st.integers(0, len(whole) - start))
    found = checkpoint.read(Slice(name, padded(name, size), start, numel, rank, size), kind)
    assert found.dtype == torch.float32
    assert torch.equal(found, whole[start : start + numel])


def test_the_safetensors_library_reads_our_files(saved: dict[tuple[int, int], Path]) -> None:
    folder = saved[2, 2]
    for rank in range(4):
        owned = list(fragments_of(rank, 2, 2))
        with safe_open(folder / f"rank_{rank:05d}.safetensors", "pt") as file:
            assert sorted(file.keys()) == sorted(f"{fragment.kind}:{fragment.name}" for fragment in owned)
            for fragment in owned:
                assert torch.equal(file.get_tensor(f"{fragment.kind}:{fragment.name}"), fragment.tensor)
            assert file.metadata()["file"] == f"rank_{rank:05d}.safetensors"


def test_a_folder_holds_nothing_but_what_the_format_says(saved: dict[tuple[int, int], Path]) -> None:
    folder = saved[2, 2]
    assert sorted(path.name for path in folder.iterdir()) == [
        "checkpoint.json",
        *(f"rank_{rank:05d}.safetensors" for rank in range(4)),
    ]
    assert sorted(path.name for path in folder.parent.iterdir()) == [".lock", "global_step7", "latest"]
    assert (folder.parent / "latest").read_text() == "global_step7\n"
    manifest = json.loads((folder / "checkpoint.json").read_text())
    assert manifest["format"] == "megatron-3d"
    assert manifest["parameters"]["1.out.weight"] == {"shape": [12, 24], "dim": 1, "pieces": [24], "dtype": "bfloat16"}
    assert list(manifest["parameters"])[:5] == [
        "0.norm.weight",
        "1.out.weight",
        "1.qkv.bias",
        "1.qkv.weight",
        "10.rows.weight",
    ]


def test_tensors_that_cross_many_pieces_survive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (writer, reader):
        monkeypatch.setattr(module, "PIECE_BYTES", 8192)
    shards = {f"{number}.weight": Shard((length,)) for number, length in enumerate([5000, 1, 2048, 0, 9000, 3, 2047])}
    values = {name: torch.randn(shard.shape) for name, shard in shards.items()}
    pairs = [Fragment(name, "weight", shard, 0, 1, 0, values[name]) for name, shard in shards.items() if shard.shape[0]]
    folder = write_checkpoint(tmp_path, "one", pairs, {})
    checkpoint = Checkpoint(folder)
    checkpoint.verify()
    for fragment in pairs:
        assert torch.equal(checkpoint.read_full(fragment.name), fragment.tensor)


def test_a_stream_of_many_tensors_becomes_several_files(tmp_path: Path) -> None:
    shard = Shard((3,))
    names = [f"{number}.{'long_' * 20}name" for number in range(900)]
    fragments = (Fragment(name, "weight", shard, 0, 1, 0, torch.full((3,), float(i))) for i, name in enumerate(names))
    checkpoint = Checkpoint(write_checkpoint(tmp_path, "many", fragments, {}))
    checkpoint.verify()
    assert len(checkpoint.file_bytes) > 1
    assert list(checkpoint.parameters) == names
    assert all(torch.equal(checkpoint.read_full(name), torch.full((3,), float(i))) for i, name in enumerate(names))


def test_streaming_keeps_one_tensor_in_memory(tmp_path: Path) -> None:
    """24 tensors of 4 MB each, by a child whose memory may grow by half of that."""
    code = f"""
import resource, torch
from megatron.checkpoint.format import Fragment
from megatron.checkpoint.reader import Checkpoint
from megatron.checkpoint.writer import write_checkpoint
from megatron.parallel.shards import Shard
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
shard = Shard((1 << 20,))
before = peak()
fragments = (Fragment(f"{{i}}.w", "weight", shard, 0, 1, 0, torch.full((1 << 20,), float(i))) for i in range(24))
write_checkpoint({str(tmp_path)!r}, "big", fragments, {{}})
print(peak() - before)
"""
    root = Path(__file__).resolve().parents[2]
    run = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert int(run.stdout) < 48_000


def test_a_fragment_that_cannot_be_is_refused() -> None:
    shard = MODEL["1.qkv.weight"]
    with pytest.raises(CheckpointError, match=r"is torch\.bfloat16 \(48, 12\); a fragment must be float32 and flat"):
        Fragment("a", "weight", shard, 0, 1, 0, torch.zeros(48, 12, dtype=torch.bfloat16))
    with pytest.raises(CheckpointError, match=r"\[280, 290\) is outside its 288 local elements"):
        Fragment("a", "weight", shard, 0, 2, 280, torch.zeros(10))
    with pytest.raises(CheckpointError, match="is not sharded; it must be saved once"):
        Fragment("a", "weight", Shard((3,)), 0, 2, 0, torch.zeros(3))
    with pytest.raises(CheckpointError, match="tensor rank 2 is outside the 2 ranks"):
        Fragment("a", "weight", shard, 2, 2, 0, torch.zeros(3))


def test_another_model_is_reported_by_name_and_shape(tmp_path: Path) -> None:
    checkpoint = Checkpoint(write(tmp_path, "global_step1"))
    with pytest.raises(CheckpointError, match=r"holds no parameter '2\.x', but 6 others, such as 0\.norm\.weight"):
        checkpoint.read(Slice("2.x", Shard((3,)), 0, 3))
    with pytest.raises(CheckpointError, match=r"holds no momentum_buffer of 0\.norm\.weight, only weight, exp_avg, "):
        checkpoint.read_full("0.norm.weight", "momentum_buffer")
    other = Shard((64, 12), dim=0, pieces=(40, 12, 12))
    with pytest.raises(
        CheckpointError,
        match=r"holds 1\.qkv\.weight as \[48, 12\], sharded along dimension 0 in pieces of 24, 12, 12; this model has "
        r"it as \[64, 12\], sharded along dimension 0 in pieces of 40, 12, 12\. Give the options",
    ):
        checkpoint.read(Slice("1.qkv.weight", other, 0, 10))


# ---------------------------------------------------------------------------------------------------------------------
# Which checkpoint is found


def test_an_empty_or_missing_folder_starts_a_new_run(tmp_path: Path) -> None:
    assert newest_checkpoint(tmp_path) is None
    assert newest_checkpoint(tmp_path / "missing") is None
    (tmp_path / ".lock").touch()
    (tmp_path / ".global_step1.partial-abc").mkdir()
    assert newest_checkpoint(tmp_path) is None


def test_latest_is_loaded_or_the_requested_tag(tmp_path: Path) -> None:
    for seed in (1, 2, 10):
        write(tmp_path, f"global_step{seed}", seed)
    assert_holds(newest(tmp_path), 10)
    assert_holds(newest(tmp_path, tag="global_step2"), 2)
    (tmp_path / "latest").write_text("global_step1\n")
    assert_holds(newest(tmp_path), 1)


@pytest.mark.parametrize(
    "content", [b"", b"\n", b"global_step9", b"../global_step1", b"/", b"\xff\x00\xfe", b"a" * 9999]
)
def test_a_stale_or_damaged_latest_falls_back_with_a_warning(
    tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    for seed in (2, 10, 9):
        write(tmp_path, f"global_step{seed}", seed)
    (tmp_path / "global_step9").rename(tmp_path / "elsewhere")
    (tmp_path / "latest").write_bytes(content)
    with caplog.at_level(logging.WARNING):
        assert_holds(newest(tmp_path), 10)
    assert f"{tmp_path / 'global_step10'} is loaded instead of a newer one: {tmp_path / 'latest'}" in caplog.text
    with pytest.raises(CheckpointError, match="write the name of a complete checkpoint into it"):
        newest_checkpoint(tmp_path, fall_back=False)


def test_damaged_checkpoints_are_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for seed in (1, 2, 3, 4):
        write(tmp_path, f"global_step{seed}", seed)
    (tmp_path / "global_step4" / "checkpoint.json").write_text("{")
    (tmp_path / "global_step3" / "rank_00000.safetensors").unlink()
    with caplog.at_level(logging.WARNING):
        assert_holds(newest(tmp_path), 2)
    assert "global_step4/checkpoint.json: it is not JSON" in caplog.text
    assert "global_step3/rank_00000.safetensors is not there" in caplog.text
    with pytest.raises(CheckpointError, match=r"global_step4/checkpoint\.json: it is not JSON"):
        newest_checkpoint(tmp_path, fall_back=False)
    with pytest.raises(CheckpointError, match=r"rank_00000\.safetensors is not there"):
        newest_checkpoint(tmp_path, tag="global_step3")


def test_other_folders_are_distinguished_from_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    with pytest.raises(CheckpointError, match=r"holds files but no checkpoint \(no `latest`\)"):
        newest_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match=r"notes\.txt is a file; give the folder"):
        newest_checkpoint(tmp_path / "notes.txt")
    write(tmp_path / "checkpoints", "global_step1")
    (tmp_path / "checkpoints" / "latest").touch()
    with pytest.raises(CheckpointError, match=f"saved its checkpoints in: {tmp_path / 'checkpoints'}"):
        newest_checkpoint(tmp_path)
    inside = write(tmp_path / "save", "global_step1")
    with pytest.raises(CheckpointError, match=f"is a checkpoint; give the folder that contains it: {inside.parent}"):
        newest_checkpoint(inside)
    with pytest.raises(CheckpointError, match=r"'\.\./save' is not the name of a checkpoint"):
        newest_checkpoint(tmp_path, tag="../save")
