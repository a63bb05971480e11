"""Checkpoints of others are named, each by its own signs, with what to do: by a launch, the ranks and the tools."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint

from megatron.checkpoint.foreign import foreign_format, not_deepspeed
from megatron.checkpoint.format import CheckpointError
from megatron.checkpoint.reader import newest_checkpoint
from megatron.launch.plan import LaunchRequest, RefusedError
from megatron.launch.preflight import preflight
from megatron.weights.conversion import recognise

FOLDERS = {
    "megatron-core": (
        "latest_checkpointed_iteration.txt iter_0000100/metadata.json iter_0000100/common.pt",
        "--ckpt-format torch_dist",
    ),
    "the legacy format of 2023": (
        "latest_checkpointed_iteration.txt iter_0000100/mp_rank_00_000/model_rng.pt",
        "save it with --ckpt-format torch or torch_dist",
    ),
    "Mistral": ("params.json consolidated.safetensors tekken.json", "in transformers' format"),
    "Meta's Llama without their params.json": ("consolidated.00.pth tokenizer.model", "params.json"),
    "of NeMo": ("weights/common.pt weights/metadata.json context/model.yaml", "NeMo"),
    "a checkpoint of NeMo": ("model.nemo", "NeMo"),
    "in GGUF": ("llama-q4_k_m.gguf", "gguf_file"),
    "of litgpt": ("lit_model.pth model_config.yaml", "litgpt convert_from_litgpt"),
    "of TensorFlow or Flax": ("flax_model.msgpack", "from_flax"),
    "of PyTorch Lightning": ("epoch=1-step=10.ckpt", "export it"),
    "without their config.json": ("model.safetensors tokenizer.json", "copy the model's own config.json there"),
    "without their adapter_config.json": ("adapter_model.safetensors", "copy their own adapter_config.json there"),
    "DeepSpeed's format": ("latest global_step10/mp_rank_00_model_states.pt", "--universal-checkpoint (HL_UNIV_CP=1)"),
    "DeepSpeed's format in uni": ("uni/zero/1.weight/fp32.pt", "--universal-checkpoint (HL_UNIV_CP=1)"),
    "folders of models": ("checkpoint-5/config.json checkpoint-5/model.safetensors", "checkpoint-5"),
    "not a model itself": ("refs/main blobs/a snapshots/ab12/config.json", "snapshots/ab12"),
}


def fill(folder: Path, names: str) -> Path:
    for name in names.split():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"global_step10" if name == "latest" else b"what no one may open")
    return folder


def refused_at_launch(folder: Path, *flags: str) -> list[str]:
    words = ["--config", "tiny_bloom", "--data-path", str(folder / "no"), "--load", str(folder), *flags]
    with pytest.raises(RefusedError) as refused:
        preflight(LaunchRequest(device="cpu", train_flags=words))
    return [fault for fault in refused.value.faults if not fault.startswith("dataset")]


@pytest.mark.parametrize("name", FOLDERS)
def test_a_foreign_checkpoint_is_named_with_its_remedy(tmp_path: Path, name: str) -> None:
    names, remedy = FOLDERS[name]
    folder = fill(tmp_path / "theirs", names)
    (at_launch,) = refused_at_launch(folder)
    assert name in at_launch
    assert remedy in at_launch
    with pytest.raises(CheckpointError) as of_ranks:
        newest_checkpoint(folder)
    assert str(of_ranks.value) == at_launch
    if "DeepSpeed" not in name:
        with pytest.raises(CheckpointError) as of_tools:
            recognise(folder)
        assert str(of_tools.value) == at_launch
        (with_flag,) = refused_at_launch(folder, "--universal-checkpoint")
        assert with_flag == at_launch


def test_the_checkpoint_that_torch_writes_is_named(tmp_path: Path) -> None:
    torch.distributed.checkpoint.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    (said,) = refused_at_launch(tmp_path / "dcp")
    assert "torch.distributed.checkpoint" in said


@pytest.mark.parametrize(
    ("name", "content", "kind"), [("a.bin", b"GGUF\x03\x00", "GGUF"), ("a.nemo", b"", "NeMo"), ("a.gguf", b"", "GGUF")]
)
def test_a_foreign_file_is_named(tmp_path: Path, name: str, content: bytes, kind: str) -> None:
    file = tmp_path / name
    file.write_bytes(content)
    (said,) = refused_at_launch(file)
    assert kind in said
    with pytest.raises(CheckpointError, match=kind):
        recognise(file)


def test_what_is_not_known_is_given_no_name(tmp_path: Path) -> None:
    assert foreign_format(fill(tmp_path / "notes", "notes.txt data/corpus.bin")) is None
    assert foreign_format(tmp_path / "nothing") is None
    (tmp_path / "short").write_bytes(b"GG")
    assert foreign_format(tmp_path / "short") is None


def test_a_universal_folder_needs_no_client_state(tmp_path: Path) -> None:
    folder = fill(tmp_path / "universal", "zero/1.weight/fp32.pt")
    assert refused_at_launch(folder, "--universal-checkpoint") == []
    pointed = fill(tmp_path / "pointed", "latest_universal global_step10/zero/1.weight/fp32.pt")
    (pointed / "latest_universal").write_text("global_step10")
    assert refused_at_launch(pointed, "--universal-checkpoint") == []
    (pointed / "latest_universal").write_text("global_step20")
    assert "or one whose `latest_universal`" in refused_at_launch(pointed, "--universal-checkpoint")[0]


def test_a_run_of_ones_own_is_not_called_universal(tmp_path: Path) -> None:
    run = fill(tmp_path / "run", "latest global_step10/checkpoint.json")
    said = "resumed on any layout as they are: leave universal_checkpoint (HL_UNIV_CP) out"
    assert said in refused_at_launch(run, "--universal-checkpoint")[0]
    assert said in not_deepspeed(run)
    model = fill(tmp_path / "model", "config.json model.safetensors")
    assert "leave universal_checkpoint (HL_UNIV_CP) out" in refused_at_launch(model, "--universal-checkpoint")[0]
