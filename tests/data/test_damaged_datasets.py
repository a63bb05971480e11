"""Damaged datasets are refused by opening, tools/inspect_dataset.py --verify and tools/merge_datasets.py.

Every tool must fail with exit status 1 and a message that names the file, and leave nothing behind.
"""

from __future__ import annotations

import os
import re
import resource
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections import namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from megatron.cli.data import inspect_dataset, merge_datasets
from megatron.data.index.indexed import HEADER_BYTES, DataError, IndexedDataset
from megatron.data.index.indexed_builder import IndexedDatasetBuilder
from tests.data.datasets import write_dataset
from tests.ranks import HANG_S

REPOSITORY = Path(__file__).resolve().parents[2]
LENGTHS = [2, 3, 4]
POINTERS, DOCUMENTS = HEADER_BYTES + 4 * len(LENGTHS), HEADER_BYTES + 12 * len(LENGTHS)


def cut(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


def overwrite(path: Path, at: int, content: bytes) -> None:
    whole = bytearray(path.read_bytes())
    whole[at : at + len(content)] = content
    path.write_bytes(whole)


def no_documents(prefix: Path) -> None:
    prefix.with_suffix(".idx").write_bytes(b"MMIDIDX\x00\x00" + struct.pack("<QBQQq", 1, 8, 0, 1, 0))


def folder_instead(path: Path) -> None:
    path.unlink()
    path.mkdir()


def unreadable(path: Path) -> None:
    # a link to itself: permissions stop everyone but root, this stops everyone
    path.unlink()
    path.symlink_to(path)


Case = namedtuple("Case", "damage message")
"""Damage to the dataset d of LENGTHS, uint16, and the message about it."""


def in_idx(at: int, layout: str, *values: int) -> Callable[[Path], None]:
    return lambda prefix: overwrite(prefix.with_suffix(".idx"), at, struct.pack(layout, *values))


def on(suffix: str, action: Callable[..., None], *arguments: int) -> Callable[[Path], None]:
    return lambda prefix: action(prefix.with_suffix(suffix), *arguments)


REFUSED_AT_OPEN = {
    "bin cut": Case(on(".bin", cut, 16), r"d\.bin has 16 bytes, but .*d\.idx describes 18"),
    "bin cut within a token": Case(on(".bin", cut, 17), r"d\.bin has 17 bytes"),
    "bin empty": Case(on(".bin", cut, 0), r"d\.bin is empty"),
    "bin missing": Case(on(".bin", Path.unlink), r"d\.bin does not exist; .*d\.idx does"),
    "bin unreadable": Case(on(".bin", unreadable), r"d\.bin cannot be read: Too many levels"),
    "idx cut in its header": Case(on(".idx", cut, 20), r"d\.idx has 20 bytes, less than its header"),
    "idx cut in its lengths": Case(on(".idx", cut, 40), r"d\.idx has 40 bytes.* cut off"),
    "idx cut in its pointers": Case(on(".idx", cut, 60), r"d\.idx has 60 bytes.* cut off"),
    "idx cut in its documents": Case(on(".idx", cut, 98), r"d\.idx has 98 bytes.* cut off"),
    "idx empty": Case(on(".idx", cut, 0), r"d\.idx is empty"),
    "idx missing": Case(on(".idx", Path.unlink), r"d\.idx does not exist; .*d\.bin does"),
    "idx a folder": Case(on(".idx", folder_instead), r"d\.idx cannot be read: Is a directory"),
    "idx of text": Case(
        lambda p: p.with_suffix(".idx").write_text("The quick brown fox\n" * 9), "not a Megatron index"
    ),
    "idx legacy": Case(in_idx(0, "8s", b"TNTIDX\x00\x00"), "legacy TNTIDX"),  # type: ignore[arg-type]
    "no documents": Case(no_documents, "holds no documents"),
    "first pointer": Case(in_idx(POINTERS, "<q", 2), r"d\.idx: the first sequence starts at byte 2"),
    "last pointer": Case(in_idx(POINTERS + 16, "<q", 1 << 40), r"d\.idx describes 1099511627784"),
    "last pointer negative": Case(in_idx(POINTERS + 16, "<q", -8), r"d\.idx describes 0"),
    "last length": Case(in_idx(HEADER_BYTES + 8, "<i", 5), r"d\.idx describes 20"),
    "first document": Case(in_idx(DOCUMENTS, "<q", 1), "the document index runs from 1 to 3"),
    "last document": Case(in_idx(DOCUMENTS + 24, "<q", 4), "the document index runs from 0 to 4"),
    "pair of others": Case(
        lambda p: shutil.copy(write_dataset(p.with_name("e"), [2, 3]).with_suffix(".idx"), p.with_suffix(".idx")),
        "the two belong to different datasets",
    ),
    "uncounted ends": Case(on(".bin", lambda path: path.write_bytes(bytes(2 * (9 + 3)))), "without counting them"),
}

FOUND_BY_VERIFY = {
    "middle pointer": Case(in_idx(POINTERS + 8, "<q", 2), "sequence 1 at byte 2 has 3 tokens of 2 bytes"),
    "middle pointer beyond the bin": Case(
        in_idx(POINTERS + 8, "<q", 1 << 40), "sequence 1 starts at byte 1099511627776"
    ),
    "middle pointer negative": Case(in_idx(POINTERS + 8, "<q", -2), "sequence 1 starts at byte -2, outside the 18"),
    "middle length": Case(in_idx(HEADER_BYTES + 4, "<i", 7), "sequence 1 at byte 4 has 7 tokens"),
    "negative length": Case(in_idx(HEADER_BYTES + 4, "<i", -3), "sequence 1 has -3 tokens"),
    "documents backwards": Case(in_idx(DOCUMENTS + 8, "<qq", 2, 1), "document 1 runs from sequence 2 to 1"),
    "document beyond": Case(in_idx(DOCUMENTS + 8, "<q", 9), "document 0 runs from sequence 0 to 9 of 3"),
    "document before": Case(in_idx(DOCUMENTS + 8, "<q", -9), "document 0 runs from sequence 0 to -9"),
}

FOUND_BY_CHECKSUM = {
    "one bit of a token": Case(lambda p: overwrite(p.with_suffix(".bin"), 5, b"\x01"), r"d\.bin has the SHA-256"),
    "bin of another of the same shape": Case(
        lambda p: shutil.copy(another(p).with_suffix(".bin"), p.with_suffix(".bin")), r"d\.bin has the SHA-256"
    ),
    "idx of another of the same size": Case(
        lambda p: shutil.copy(another(p, [3, 2, 4]).with_suffix(".idx"), p.with_suffix(".idx")),
        r"d\.idx has the SHA-256",
    ),
    "checksums of another": Case(
        lambda p: shutil.copy(another(p).with_suffix(".sha256"), p.with_suffix(".sha256")), r"d\.bin has the SHA-256"
    ),
    "checksums of text": Case(
        lambda p: p.with_suffix(".sha256").write_text("hi\n"), r"d\.sha256:1: 'hi' is not a line"
    ),
    "checksums unreadable": Case(on(".sha256", unreadable), r"d\.sha256 cannot be read"),
}


def another(prefix: Path, lengths: list[int] = LENGTHS) -> Path:
    """Write a dataset of other tokens in another folder."""
    folder = prefix.parent / "other"
    folder.mkdir()
    with IndexedDatasetBuilder(folder / "d", np.uint16) as builder:
        builder.add_documents(np.arange(100, 100 + sum(lengths)), lengths)
        builder.finalize()
    return folder / "d"


def tree(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def check_tools(prefix: Path, message: str, capsys: pytest.CaptureFixture[str], *flags: str, merges: bool) -> None:
    """Check that both tools print `message`, exit with 1 and leave nothing; a merge may miss the damage."""
    present = tree(prefix.parent)
    assert inspect_dataset.main([str(prefix), "--verify", *flags]) == 1
    said = capsys.readouterr()
    assert re.search(message, said.out + said.err), said
    assert tree(prefix.parent) == present
    if merges:
        whole = write_dataset(prefix.parent / "whole", [5])
        present = tree(prefix.parent)
        assert merge_datasets.main(["--input", str(whole), str(prefix), "--output-prefix", str(prefix) + "_out"]) == 1
        said = capsys.readouterr()
        assert re.search("error: .*d", said.err), said
        assert tree(prefix.parent) == present


@pytest.mark.parametrize("name", REFUSED_AT_OPEN)
def test_opening_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    prefix = write_dataset(tmp_path / "d", LENGTHS)
    damage, message = REFUSED_AT_OPEN[name]
    damage(prefix)
    with pytest.raises(DataError, match=message):
        IndexedDataset(prefix)
    check_tools(prefix, message, capsys, merges=True)


@pytest.mark.parametrize("name", FOUND_BY_VERIFY)
def test_verification_finds(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    prefix = write_dataset(tmp_path / "d", LENGTHS)
    (tmp_path / "d.sha256").unlink()  # it must not need the checksums for that
    damage, message = FOUND_BY_VERIFY[name]
    damage(prefix)
    IndexedDataset(prefix)
    check_tools(prefix, message, capsys, merges=True)


@pytest.mark.parametrize("name", FOUND_BY_CHECKSUM)
def test_checksums_find(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    prefix = write_dataset(tmp_path / "d", LENGTHS)
    damage, message = FOUND_BY_CHECKSUM[name]
    damage(prefix)
    IndexedDataset(prefix)
    check_tools(prefix, message, capsys, merges=True)


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_ids_beyond_the_vocabulary_and_below_zero_are_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], suffix: str
) -> None:
    dtype = np.uint16 if suffix == ".bin" else np.int32
    prefix = write_dataset(tmp_path / "d", LENGTHS, dtype)
    check_tools(
        prefix, r"id 8 at byte \d+ of the \.bin \(document 2, sequence 2\)", capsys, "--vocab-size", "8", merges=False
    )
    if dtype == np.int32:
        (tmp_path / "d.sha256").unlink()
        overwrite(tmp_path / "d.bin", 12, struct.pack("<i", -1))
        check_tools(prefix, r"id -1 at byte 12 of the \.bin \(document 1, sequence 1\)", capsys, merges=False)


def test_a_pointer_out_of_range_is_an_error_when_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prefix = write_dataset(tmp_path / "d", LENGTHS)
    FOUND_BY_VERIFY["middle pointer beyond the bin"].damage(prefix)
    with pytest.raises(DataError, match=r"d\.idx: sequence 1 lies at byte 1099511627776"):
        IndexedDataset(prefix).read(1)
    assert inspect_dataset.main([str(prefix), "--documents", "1"]) == 1
    assert "error: " in capsys.readouterr().err


def test_a_folder_is_refused_as_a_prefix(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    write_dataset(tmp_path / "data", LENGTHS)
    with pytest.raises(DataError, match=f"{tmp_path} is a folder, give a dataset in it, such as {tmp_path / 'data'}"):
        IndexedDataset(tmp_path)
    with pytest.raises(DataError, match="is a folder, without datasets"):
        IndexedDataset(tmp_path / "empty")
    assert inspect_dataset.main([str(tmp_path)]) == 1
    assert "such as" in capsys.readouterr().err
    assert merge_datasets.main(["--input", str(tmp_path / "empty"), "--output-prefix", str(tmp_path / "out")]) == 1
    assert "holds no datasets" in capsys.readouterr().err


def test_a_folder_with_half_a_dataset_is_not_merged_without_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in").mkdir()
    for suffix, missing in ((".bin", ".idx"), (".idx", ".bin")):
        write_dataset(tmp_path / "in" / "a", LENGTHS)
        write_dataset(tmp_path / "in" / "b", LENGTHS)
        (tmp_path / "in" / f"b{missing}").unlink()
        assert merge_datasets.main(["--input", str(tmp_path / "in"), "--output-prefix", str(tmp_path / "out")]) == 1
        assert f"b{suffix} lacks its other half, b{missing}" in capsys.readouterr().err
        assert os.listdir(tmp_path) == ["in"]


@pytest.mark.parametrize("byte", range(HEADER_BYTES))
@pytest.mark.parametrize("lengths", [LENGTHS, [1] * 8, [1] * 13, [4] * 16])
def test_a_flipped_header_bit_is_refused_or_means_the_same(tmp_path: Path, byte: int, lengths: list[int]) -> None:
    """Numbers of sequences are chosen so that a flip may pass for an index with modes: 13 -> 12, 8 -> 9."""
    prefix = write_dataset(tmp_path / "d", lengths)
    whole = IndexedDataset(prefix)
    original = (tmp_path / "d.idx").read_bytes()
    for flip in [*(1 << bit for bit in range(8)), 0xFF]:
        damaged = bytearray(original)
        damaged[byte] ^= flip
        (tmp_path / "e.idx").write_bytes(damaged)
        shutil.copy(tmp_path / "d.bin", tmp_path / "e.bin")
        try:
            opened = IndexedDataset(tmp_path / "e")
        except DataError:
            continue
        assert opened.dtype == whole.dtype
        assert opened.lengths.tolist() == whole.lengths.tolist()
        assert opened.document_index.tolist() == whole.document_index.tolist()


# ---------------------------------------------------------------------------------------------------------------------
# A full disk

ORDERS = pytest.mark.parametrize("order", [[], ["--shuffle", "1"]], ids=["in order", "shuffled"])


def merge_command(folder: Path, num_tokens: int, order: list[str]) -> list[str]:
    """Write two datasets of one document to folder/in; the command merges them to folder/out/d."""
    for name in ("in", "out"):
        (folder / name).mkdir()
    for name in "ab":
        write_dataset(folder / "in" / name, [num_tokens])
    tool = REPOSITORY / "tools" / "merge_datasets.py"
    return [sys.executable, str(tool), "--input", f"{folder}/in", "--output-prefix", f"{folder}/out/d", *order]


@ORDERS
def test_a_merge_beyond_the_file_size_limit_leaves_nothing(tmp_path: Path, order: list[str]) -> None:
    run = subprocess.run(
        merge_command(tmp_path, 200_000, order),
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, 500_000)),
        capture_output=True,
        text=True,
    )
    assert run.returncode == 1
    assert "File too large" in run.stderr
    assert "Traceback" not in run.stderr
    assert os.listdir(tmp_path / "out") == []


@pytest.mark.parametrize(
    ("order", "ending"),
    [([], signal.SIGKILL), (["--shuffle", "1"], signal.SIGKILL), (["--shuffle", "1"], signal.SIGTERM)],
)
def test_a_killed_merge_leaves_nothing_that_looks_finished(tmp_path: Path, order: list[str], ending: int) -> None:
    command = merge_command(tmp_path, 10_000_000, order)
    merge = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    deadline_s = time.monotonic() + HANG_S
    while not any((tmp_path / "out").glob("*/dataset.bin")) and merge.poll() is None:
        assert time.monotonic() < deadline_s
        time.sleep(0.001)
    merge.send_signal(ending)
    assert merge.wait() == (-signal.SIGKILL if ending == signal.SIGKILL else 128 + signal.SIGTERM)
    left = os.listdir(tmp_path / "out")
    if ending == signal.SIGTERM:
        assert left == []
    assert not {"d.bin", "d.idx", "d.sha256"} & set(left)
    assert merge_datasets.main(command[2:]) == 0
    assert IndexedDataset(tmp_path / "out" / "d").num_tokens == 20_000_000
    # what the killed one left is gone too
    assert sorted(os.listdir(tmp_path / "out")) == ["d.bin", "d.idx", "d.sha256"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 512 KiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(folder)]
    if os.geteuid() != 0 or not shutil.which("mount") or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs the right to mount a small file system")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@ORDERS
def test_a_full_disk_is_predicted_and_handled(
    tmp_path: Path,
    small_disk: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    order: list[str],
) -> None:
    inputs = [str(write_dataset(tmp_path / name, [200_000])) for name in "ab"]
    command = ["--input", *inputs, "--output-prefix", str(small_disk / "d"), *order]
    assert merge_datasets.main(command) == 1
    assert f"{small_disk} has 0.5 MB free, but the result needs 0.8 MB" in capsys.readouterr().err
    # others may fill the disk during the merge
    monkeypatch.setattr("megatron.data.index.merge.check_space", lambda inputs, folder: None)
    assert merge_datasets.main(command) == 1
    assert "No space left on device" in capsys.readouterr().err
    assert os.listdir(small_disk) == []


READ_AFTER_A_CUT = """
import os, sys, time
from pathlib import Path
from megatron.data.blend import blend_by_weight
from megatron.data.gpt import GPTDataset
from megatron.data.index.indexed import SIZE_CHECK_INTERVAL_S, DataError, IndexedDataset

for case in range(10):
    folder = Path(sys.argv[1], str(case))
    data = IndexedDataset(folder / "d")
    build = lambda *_: GPTDataset(
        data, range(len(data)), num_samples=4, seq_length=4, seed=1, cache_dir=folder / "cache"
    )
    build()  # the second maps what the first has built
    blend_by_weight([1.0], 4, build, folder / "cache")
    samples, blend = build(), blend_by_weight([1.0], 4, build, folder / "cache")
    index = samples.cache_paths[1], blend.cache_paths[0]
    path = [*[f"{data.prefix}.bin"] * 3, *[f"{data.prefix}.idx"] * 3, *index * 2][case]
    reads = [lambda: data.read(1), lambda: samples[2], lambda: samples.get_batch([0, 3])]
    read = [*reads, *reads, lambda: samples[2], lambda: blend[2], reads[2], lambda: blend.get_batch([0, 3])][case]
    read()
    size = os.path.getsize(path)
    os.truncate(path, 0)
    if case not in (2, 5, 8, 9):  # batches look each time
        time.sleep(2 * SIZE_CHECK_INTERVAL_S)
    try:
        read()
    except DataError as error:
        print(str(error) == f"{path} has 0 bytes, but had {size} when it was opened: it was truncated while it was "
              f"read; {'copy it again' if case < 6 else 'delete it, and start again: it is rebuilt'}" or error)
"""


def test_a_file_truncated_while_it_is_read_is_named(tmp_path: Path) -> None:
    """In a process of its own, which reading beyond the end of a mapped file would kill."""
    for case in range(10):
        (tmp_path / str(case)).mkdir()
        write_dataset(tmp_path / str(case) / "d", [20, 30])
    command = [sys.executable, "-c", READ_AFTER_A_CUT, str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, check=False)
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout.splitlines() == ["True"] * 10
