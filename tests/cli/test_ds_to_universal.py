"""tools/ds_to_universal.py, as Habana's documented flow calls DeepSpeed's tool of that name."""

from __future__ import annotations

import argparse
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron.checkpoint.format import CheckpointError, Fragment
from megatron.checkpoint.reader import Checkpoint
from megatron.checkpoint.writer import write_checkpoint
from megatron.cli.ds_to_universal import main
from megatron.options.config import Config
from megatron.settings.command_line import parse_arguments
from megatron.weights.deepspeed.deepspeed_checkpoint import read
from megatron.weights.deepspeed.origins import PipelineNames
from megatron.weights.huggingface import parameters_of
from tests.training import layouts


@pytest.fixture
def config() -> Config:
    parsed, _ = parse_arguments([*layouts.COMMON.split(), *layouts.MODELS["llama_gqa"].split()])
    return parsed


@pytest.fixture
def native(tmp_path: Path, config: Config) -> Path:
    """A native checkpoint of a tiny Llama, with moments."""
    fragments = [
        Fragment(name, kind, shard, 0, 1, 0, torch.randn(shard.shape).flatten())
        for name, shard in parameters_of(config).items()
        for kind in ("weight", "exp_avg", "exp_avg_sq")
    ]
    metadata = {
        "progress": {"iteration": 9, "consumed_samples": 72},
        "optimizer": {"step": 8.0},
        "config": config.to_dict(),
    }
    return write_checkpoint(tmp_path / "run", "global_step9", fragments, metadata)


def arguments_of(source: Path, target: Path) -> list[str]:
    return [
        *("--input_folder", str(source), "--output_folder", str(target)),
        *("--num_extract_workers", "4", "--num_merge_workers", "2"),
    ]


@pytest.mark.parametrize("whole_run", [False, True])
def test_a_native_checkpoint_becomes_a_universal_folder(
    native: Path, capsys: pytest.CaptureFixture[str], whole_run: bool
) -> None:
    target = native.parent / "global_step9_universal"
    assert main(arguments_of(native.parent if whole_run else native, target)) == 0
    assert "(fp32, exp_avg, exp_avg_sq)" in capsys.readouterr().out
    assert (native.parent / "latest_universal").read_text() == "global_step9_universal"
    universal, checkpoint = read(target), Checkpoint(native)
    names = PipelineNames.of_ours(checkpoint.parameters)
    folders = {names.theirs(name) for name in checkpoint.parameters}
    assert {"0.weight", "3.attention.qkv.weight", "6.weight", "7.weight"} <= folders
    assert {path.name for path in (target / "zero").iterdir()} == {*folders, "optimizer_state.pt"}
    assert (universal.facts["iteration"], universal.facts["consumed_samples"], universal.facts["step"]) == (9, 72, 8)
    assert universal.facts["metadata"] == checkpoint.metadata
    assert universal.parameters.keys() == checkpoint.parameters.keys()
    for name in universal.parameters:
        for kind in ("weight", "exp_avg", "exp_avg_sq"):
            assert torch.equal(universal.read_full(name, kind), checkpoint.read_full(name, kind))


def test_frozen_parameters_have_no_moments_in_the_universal_folder(tmp_path: Path, config: Config) -> None:
    frozen = replace(config, model=replace(config.model, freeze=("layers.0.*",)))
    fragments = [
        Fragment(name, kind, shard, 0, 1, 0, torch.randn(shard.shape).flatten())
        for name, shard in parameters_of(config).items()
        for kind in ("weight", "exp_avg", "exp_avg_sq")
        if kind == "weight" or not name.startswith("layers.0.")
    ]
    native = write_checkpoint(tmp_path / "run", "global_step9", fragments, {"config": frozen.to_dict()})
    assert main(arguments_of(native, tmp_path / "universal")) == 0
    universal, checkpoint = read(tmp_path / "universal"), Checkpoint(native)
    for name in checkpoint.parameters:
        assert universal.kinds_of(name) == checkpoint.kinds_of(name)
        for kind in universal.kinds_of(name):
            assert torch.equal(universal.read_full(name, kind), checkpoint.read_full(name, kind))
    with pytest.raises(CheckpointError, match=r"lacks exp_avg of layers\.0\.attention.*or freeze the parameter"):
        read(tmp_path / "universal", config)


def test_a_deepspeed_checkpoint_becomes_a_universal_folder(
    tmp_path: Path, config: Config, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Layer files of two tensor-parallel ranks, whose model only --config describes."""
    full = {name: torch.randn(shard.shape) for name, shard in parameters_of(config).items()}
    source = tmp_path / "global_step3"
    source.mkdir()
    theirs = {name: PipelineNames.of_config(config).theirs(name).split(".", 1) for name in full}
    for layer in {layer for layer, _ in theirs.values()}:
        for rank in range(2):
            state = {
                theirs[name][1]: shard.take(full[name], rank, 2)
                for name, shard in parameters_of(config).items()
                if theirs[name][0] == layer
            }
            torch.save(state, source / f"layer_{int(layer):02d}-model_{rank:02d}-model_states.pt")
    torch.save({"module": None, "global_steps": 3}, source / "mp_rank_00_model_states.pt")
    (tmp_path / "latest").write_text("global_step3")
    target = tmp_path / "universal"
    assert main(arguments_of(tmp_path, target)) == 1
    assert "--config" in capsys.readouterr().err
    assert not target.exists()

    from megatron.options.stored import to_yaml

    (tmp_path / "model.yaml").write_text(to_yaml(config))
    assert main([*arguments_of(tmp_path, target), "--config", str(tmp_path / "model.yaml")]) == 0
    assert re.search(r"does not state num_attention_heads, .*norm_epsilon: compare --config", caplog.text)
    universal = read(target)
    assert universal.facts["iteration"] == 3
    assert universal.facts["metadata"]["config"] == config.to_dict()
    for name, tensor in full.items():
        assert torch.equal(universal.read_full(name), tensor)


def test_megatrons_args_need_no_config(tmp_path: Path) -> None:
    """The tool converts without --config; tests/weights/test_deepspeed_checkpoint.py checks the tensors."""
    block = {
        "input_layernorm.weight": torch.ones(8),
        "self_attention.query_key_value.weight": torch.randn(24, 8),
        "self_attention.dense.weight": torch.randn(8, 8),
        "post_attention_layernorm.weight": torch.ones(8),
        "mlp.dense_h_to_4h.weight": torch.randn(32, 8),
        "mlp.dense_4h_to_h.weight": torch.randn(8, 16),
    }
    layers = {1: {"word_embeddings.weight": torch.randn(16, 8)}, 3: block, 5: {"weight": torch.ones(8)}}
    source = tmp_path / "global_step1"
    source.mkdir()
    for number, state in layers.items():
        torch.save(state, source / f"layer_{number:02d}-model_00-model_states.pt")
    client = {"module": None, "iteration": 1, "args": argparse.Namespace(num_attention_heads=2)}
    torch.save(client, source / "mp_rank_00_model_states.pt")
    assert main(arguments_of(source, tmp_path / "universal")) == 0
    universal = read(tmp_path / "universal")
    assert universal.parameters["layers.0.attention.qkv.weight"].pieces == (8, 8, 8)
    assert universal.parameters["layers.0.mlp.gate_up.weight"].pieces == (16, 16)
    grouped = block["self_attention.query_key_value.weight"].view(2, 3, 4, 8)
    assert torch.equal(universal.read_full("layers.0.attention.qkv.weight").view(3, 2, 4, 8), grouped.transpose(0, 1))


def test_errors_are_reported_and_leave_nothing(native: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = native.parent / "universal"
    shard = native / "rank_00000.safetensors"
    content = bytearray(shard.read_bytes())
    content[-5] ^= 1
    shard.write_bytes(content)
    assert main(arguments_of(native, target)) == 1
    assert "rank_00000.safetensors" in capsys.readouterr().err
    assert main(arguments_of(native.parent / "missing", target)) == 1
    assert "missing is not there" in capsys.readouterr().err
    assert not target.exists()
    assert not (native.parent / "latest_universal").exists()
