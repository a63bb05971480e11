"""The check of foreign weights files: every changed bit of a file with checksums is found, whatever its use."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpoint.format import CheckpointError
from megatron.cli import convert_checkpoint
from megatron.options.stored import to_yaml
from megatron.parallel.context import ParallelContext
from megatron.settings.command_line import parse_arguments
from megatron.weights import foreign_files
from megatron.weights.foreign_files import ForeignFiles
from megatron.weights.huggingface_source import HuggingFaceSource
from megatron.weights.loader import find_checkpoint
from tests.models import outputs
from tests.weights.test_deepspeed_origins import BLOOM, HEADS, megatron_layers, their_model, write_megatron
from tests.weights.test_huggingface import as_bin, save

# ---------------------------------------------------------------------------------------------------------------------
# One file


@pytest.fixture
def path(tmp_path: Path) -> Path:
    place = tmp_path / "tensors.pt"
    torch.save(
        {"param": torch.arange(24.0).view(6, 4), "cat_dim": 0, "more": torch.ones(3), "none": torch.ones(0)}, place
    )
    return place


def checked(path: Path) -> ForeignFiles:
    files = ForeignFiles()
    files.ensure(path)
    return files


def flipped(content: bytes, at: int, bit: int = 2) -> bytes:
    return content[:at] + bytes([content[at] ^ (1 << bit)]) + content[at + 1 :]


def test_a_changed_bit_in_any_byte_is_found(path: Path) -> None:
    """Pickle, tensors, headers, padding, directory and its end."""
    content = path.read_bytes()
    checked(path)
    with path.open("r+b", buffering=0) as file:
        for at in range(len(content)):
            os.pwrite(file.fileno(), bytes([content[at] ^ (1 << at % 8)]), at)
            with pytest.raises(CheckpointError, match=r"tensors\.pt is damaged"):
                checked(path)
            os.pwrite(file.fileno(), content[at : at + 1], at)
    checked(path)


def test_a_file_that_ends_early_or_has_more_is_refused(path: Path) -> None:
    content = path.read_bytes()
    for end in range(4, len(content), 13):
        path.write_bytes(content[:end])
        with pytest.raises(CheckpointError, match=r"tensors\.pt is damaged or truncated"):
            checked(path)
    for more in (content + b"\0", b"\0" + content, content + content):
        path.write_bytes(more)
        with pytest.raises(CheckpointError, match=r"tensors\.pt"):
            ForeignFiles().load(path)


def test_large_entries_wait_for_the_share_of_their_rank(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foreign_files, "EAGER_BYTES", 50)
    other = path.with_name("other.pt")
    content = path.read_bytes()
    at = content.index(torch.arange(24.0).numpy().tobytes()) + 40
    for place in (path, other):
        place.write_bytes(flipped(content, at))
    for rank, named in ((0, "other.pt"), (1, "tensors.pt")):
        with pytest.raises(CheckpointError, match=rf"{named} is damaged: its entry tensors/data/"):
            ForeignFiles().verify([path, other], (rank, 2))
    other.write_bytes(content)
    ForeignFiles().verify([path, other], (0, 2))


@pytest.mark.parametrize("kind", ["before torch 1.6", "without checksums"])
def test_files_without_checksums_are_read_as_tensors_alone_with_a_warning(
    path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    content = {"param": torch.arange(5.0)}
    torch.serialization.set_crc32_options(kind != "without checksums")
    try:
        torch.save(content, path, _use_new_zipfile_serialization=kind != "before torch 1.6")
    finally:
        torch.serialization.set_crc32_options(True)
    files = ForeignFiles()
    assert torch.equal(files.load(path)["param"], content["param"])
    assert "tensors.pt carries no checksum" in caplog.text
    assert files.verify([path]) == "names, shapes and sizes alone of tensors.pt, which carries no checksum"


def test_links_and_pipes_are_refused_but_for_the_hubs_cache(path: Path) -> None:
    link = path.with_name("link.pt")
    link.symlink_to(path)
    with pytest.raises(CheckpointError, match=r"link\.pt is a link"):
        ForeignFiles().load(link)
    os.mkfifo(path.with_name("pipe.pt"))
    with pytest.raises(CheckpointError, match=r"pipe\.pt is not a regular file"):
        ForeignFiles().load(path.with_name("pipe.pt"))
    snapshot, blobs = path.parent / "snapshots/0a1b/global_step5", path.parent / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    path.rename(blobs / "7c")
    (snapshot / "tensors.pt").symlink_to("../../../blobs/7c")
    assert ForeignFiles().load(snapshot / "tensors.pt")["more"].tolist() == [1.0] * 3


# ---------------------------------------------------------------------------------------------------------------------
# Conversions and runs


def convert(load: Path, save: Path, to: str, *more: str) -> int:
    return convert_checkpoint.main(["--load", str(load), "--save", str(save), "--to", to, *more])


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, str, list[str], str]]:
    """By format: its folder, the file to damage, options of a conversion, and those of a run that starts from it."""
    folder = tmp_path_factory.mktemp("sources")
    as_bin(folder / "bin", save("llama_mha", folder / "bin"))
    (folder / "llama.yaml").write_text(to_yaml(HuggingFaceSource(folder / "bin").config))
    llama = f"--config {folder / 'llama.yaml'}"
    assert convert(folder / "bin", folder / "universal", "universal", "--no-verify") == 0
    layers = megatron_layers(their_model("bloom"), "bloom", 8, 2)
    write_megatron(folder / "megatron", layers, 3, {"num_attention_heads": HEADS})
    (folder / "bloom.yaml").write_text(to_yaml(outputs.config_of(BLOOM)))
    return {
        "bin": (folder / "bin", "pytorch_model.bin", [], llama),
        "universal": (
            folder / "universal",
            "zero/2.attention.qkv.weight/fp32.pt",
            [],
            f"{llama} --universal-checkpoint",
        ),
        "megatron": (
            folder / "megatron",
            "layer_04-model_01-model_states.pt",
            ["--config", str(folder / "bloom.yaml")],
            f"--config {folder / 'bloom.yaml'} --universal-checkpoint",
        ),
    }


PLACES: dict[str, Callable[[bytes], int]] = {
    "start": lambda content: 0,
    "middle": lambda content: len(content) // 2,
    "directory": lambda content: content.index(b"PK\1\2") + 17,
    "end": lambda content: len(content) - 1,
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("source", ["bin", "universal", "megatron"])
def test_damaged_weights_are_neither_converted_nor_trained(
    source: str, place: str, sources: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, file, options, run = sources[source]
    folder = tmp_path / source
    shutil.copytree(whole, folder)
    content = (folder / file).read_bytes()
    (folder / file).write_bytes(flipped(content, PLACES[place](content)))
    for to in ("hf", "native", "universal"):
        assert convert(folder, tmp_path / f"to_{to}", to, "--no-verify", *options) == 1
        assert f"{folder / file} is damaged" in capsys.readouterr().err
    assert sorted(os.listdir(tmp_path)) == [source]
    config, _ = parse_arguments([*run.split(), "--load", str(folder)])
    with pytest.raises(CheckpointError, match=f"{file} is damaged"):
        find_checkpoint(config, ParallelContext.single())


def test_a_conversion_says_what_was_checked(sources: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert convert(sources["bin"][0], tmp_path / "native", "native") == 0
    assert capsys.readouterr().out.count("the CRC-32 of every byte of 1 file\n") == 2
    assert convert(tmp_path / "native", tmp_path / "hf", "hf", "--no-verify") == 0
    assert "checked: the CRC-32 of 15 tensors and the SHA-256 of checkpoint.json" in capsys.readouterr().out
    assert convert(tmp_path / "hf", tmp_path / "again", "native", "--no-verify") == 0
    said = "checked: names, shapes and sizes alone of model.safetensors, which carries no checksum"
    assert said in capsys.readouterr().out
