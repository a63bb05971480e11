"""Folders of PEFT as the start of a run: the options and the tensors that are read, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron.checkpoint.format import CheckpointError
from megatron.checkpoint.source import Slice
from megatron.models.registry import family_of
from megatron.options.config import Config
from megatron.parallel.shards import declared_shards
from megatron.settings.command_line import read_command_line
from megatron.weights.peft.export import AdaptedModel
from megatron.weights.peft.source import PeftSource
from tests.models.outputs import COMMON, config_of
from tests.models.test_hf_logits import CASES as MODELS
from tests.weights.test_peft_export import CASES, PREFIX, expected
from tests.weights.test_peft_export import folders as folders  # a fixture


def arguments_of(name: str, more: str = "") -> list[str]:
    """Flags of the base alone."""
    return [*COMMON.split(), *MODELS[CASES[name].model]().arguments.split(), *more.split()]


def read(name: str, folder: Path, more: str = "") -> Config:
    """The config of a run that loads a folder. Raises ConfigError."""
    command = read_command_line(arguments_of(name, f"--load {folder} {more}"))
    assert not command.faults, command.faults
    return command.config


def faults_of(name: str, folder: Path, more: str = "") -> list[str]:
    return list(read_command_line(arguments_of(name, f"--load {folder} {more}")).faults)


@pytest.mark.parametrize("name", CASES)
def test_options_and_tensors_are_read_as_they_were(folders: dict[str, Path], name: str) -> None:
    """Bit by bit, also the parts of two tensor-parallel ranks."""
    exported, config = config_of(CASES[name].arguments), read(name, folders[name])
    assert config.lora.lora_rank == exported.lora.lora_rank
    declared = [
        [(layer.name, layer.shards, layer.methods) for layer in family_of(each).layers(each)]
        for each in (config, exported)
    ]
    assert declared[0] == declared[1]
    parallel = dataclasses.replace(config.parallel, tensor_model_parallel_size=2)
    config = dataclasses.replace(config, parallel=parallel)
    start, shards = PeftSource(folders[name], config), declared_shards(family_of(config).layers(config))
    assert set(start.parameters) == set(AdaptedModel(exported).shards)
    for parameter in start.parameters:
        weight, shard = torch.from_numpy(expected(name).weights[parameter]).float(), shards[parameter]
        for rank in range(2):
            local = shard.take(weight, rank, 2)
            found = start.read(Slice(parameter, shard, 0, local.numel(), rank, 2))
            assert torch.equal(found, local.flatten()), parameter


def test_a_folder_of_peft_is_read(tmp_path: Path) -> None:
    """As PEFT itself writes one: regular expressions, adapted and tied embeddings, biases beside modules_to_save."""
    peft: Any = pytest.importorskip("peft")
    for name, options in (
        ("llama", {"target_modules": r"model\.layers\.\d+\.self_attn\.[qv]_proj", "rank_pattern": {"1.*q_proj": 2}}),
        ("llama", {"target_modules": ["embed_tokens", "up_proj"]}),
        (
            "llama_tied",
            {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
        ),
        ("bloom", {"target_modules": ["query_key_value"], "bias": "all", "modules_to_save": ["dense"]}),
        ("gpt2", {"target_modules": "all-linear", "use_rslora": True, "lora_dropout": 0.1}),
    ):
        model = MODELS[CASES[name].model]().theirs()
        adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, **options))
        folder = tmp_path / f"{name}{len(list(tmp_path.iterdir()))}"
        adapted.save_pretrained(folder)
        config = read(name, folder)
        start = PeftSource(folder, config)
        tensors = load_file(folder / "adapter_model.safetensors")
        assert sum("lora_" in key for key in tensors) == sum("lora_" in each for each in start.parameters)
        assert config.lora.lora_dropout == options.get("lora_dropout", 0.0)
        for parameter, shard in start.parameters.items():
            found = start.read(Slice(parameter, shard, 0, _numel(shard.shape)))
            full = AdaptedModel(config).map.assemble(parameter, partial(_rows, tensors))
            assert torch.equal(found, full.flatten()), parameter


def _numel(shape: tuple[int, ...]) -> int:
    return int(torch.Size(shape).numel())


def _rows(tensors: Mapping[str, Tensor], key: str, begin: int, end: int) -> Tensor:
    return tensors[key][begin:end]


@pytest.mark.parametrize(
    ("flags", "fault"),
    [
        ("--lora-rank 4 --use-rslora --lora-target-modules down_proj q_proj mlp.up_proj --lora-dropout 0.3", ""),
        (
            "--lora-rank 8",
            "lora_rank=8 contradicts the adapters in load=.*, which have 4; leave it out, or give theirs",
        ),
        ("--no-use-rslora", "use_rslora=False contradicts"),
        ("--lora-alpha 7", "lora_alpha=7.0 contradicts .* which have 12.0"),
        ("--lora-target-modules q_proj v_proj", "which have q_proj up_proj down_proj;"),
        ("--lora-rank-pattern q_proj=2", "lora_rank_pattern=q_proj=2 contradicts .* which have down_proj=6"),
        ("--lora-bias all", None),
        ("--num-layers 1", r"holds adapters of model.layers.1.mlp.down_proj.* which the model of the options does not"),
    ],
)
def test_options_that_contradict_the_folder_are_refused(
    folders: dict[str, Path], flags: str, fault: str | None
) -> None:
    found = faults_of("llama", folders["llama"], flags)
    if not fault:
        assert found == []
    else:
        assert len(found) == 1
        assert re.search(fault, found[0]), found


def _write(folder: Path, change: Callable[[dict[str, Tensor], dict[str, Any]], None]) -> None:
    tensors = load_file(folder / "adapter_model.safetensors")
    config = json.loads((folder / "adapter_config.json").read_text())
    change(tensors, config)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(config))


Q_A = f"{PREFIX}model.layers.0.self_attn.q_proj.lora_A.weight"
Q_B = Q_A.replace("lora_A", "lora_B")
NORM = f"{PREFIX}model.norm.weight"


@pytest.mark.parametrize(
    ("name", "change", "fault"),
    [
        ("llama", lambda t, c: t.pop(Q_A), "holds B of model.layers.0.self_attn.q_proj; it must be A, B"),
        (
            "llama",
            lambda t, c: t.update({Q_A: torch.zeros(4, 65)}),
            r"q_proj.lora_A.weight is \[4, 65\], the model makes",
        ),
        ("llama", lambda t, c: (t.pop(Q_A), t.pop(Q_B)), "lacks model.layers.0.self_attn.q_proj, which its"),
        ("llama", lambda t, c: c["target_modules"].remove("q_proj"), "q_proj, .*which its .* does not name"),
        ("llama_whole", lambda t, c: t.pop(NORM), "lacks model.norm.weight, which its"),
        ("llama", lambda t, c: t.update({Q_B: torch.zeros(64, 5)}), "gives it rank 4"),
        ("llama", lambda t, c: c.update(use_dora=True), "it must be A, B, magnitude"),
        ("llama", lambda t, c: c.update(init_lora_weights="pissa"), "has init_lora_weights: pissa"),
        ("llama", lambda t, c: c.update(use_qalora=True), "use_qalora"),
        ("llama", lambda t, c: c.update(peft_type="LOHA"), "only LORA is read"),
        ("llama", lambda t, c: c.update(r="four"), "another type"),
        ("llama_whole", lambda t, c: t.update({NORM: torch.zeros(65)}), r"norm.weight is \[65\], the model makes"),
        ("bloom_only", lambda t, c: t.popitem(), "it lacks|must be A, B"),
        ("llama_tied", lambda t, c: t[f"{PREFIX}lm_head.weight"].add_(1), "is not the word embedding"),
        ("llama_ends", lambda t, c: c.update(ensure_weight_tying=True), "has ensure_weight_tying, .* lm_head"),
        (
            "llama_ends",  # as PEFT writes it, which leaves the output out of the names
            lambda t, c: (c.update(ensure_weight_tying=True), c["target_modules"].remove("lm_head")),
            "has ensure_weight_tying, .* lm_head",
        ),
        ("llama", lambda t, c: c.update(lora_alpha=-1), "lora_alpha finite and above 0"),
        ("llama", lambda t, c: c.update(lora_dropout=1), "lora_dropout: 1.0; it must be"),
        ("llama", lambda t, c: c.update(layers_to_transform=[0]), "layers.1.* which its .* does not name"),
        (
            "llama",
            lambda t, c: (
                [t.pop(name) for name in list(t) if ".0.self_attn.q_proj" in name]
                + [c.update(layers_to_transform=[0, 1])]
            ),
            "lacks model.layers.0.self_attn.q_proj, which its",
        ),
    ],
)
def test_a_folder_that_is_not_whole_is_refused(
    folders: dict[str, Path], tmp_path: Path, name: str, change: Callable[..., None], fault: str
) -> None:
    shutil.copytree(folders[name], tmp_path / "changed")
    _write(tmp_path / "changed", change)
    if faults := faults_of(name, tmp_path / "changed"):
        with pytest.raises(AssertionError, match=fault):
            raise AssertionError(faults[0])
        return
    with pytest.raises(CheckpointError, match=fault):
        PeftSource(tmp_path / "changed", read(name, tmp_path / "changed"))


def test_a_pickle_passes_the_trust_check_only(folders: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(folders["llama"], tmp_path / "pickled")
    tensors = load_file(tmp_path / "pickled/adapter_model.safetensors")
    (tmp_path / "pickled/adapter_model.safetensors").unlink()
    torch.save(tensors, tmp_path / "pickled/adapter_model.bin")
    start = PeftSource(tmp_path / "pickled", read("llama", tmp_path / "pickled"))
    shard = start.parameters["layers.0.attention.qkv.lora_A_q_proj"]
    found = start.read(Slice("layers.0.attention.qkv.lora_A_q_proj", shard, 0, _numel(shard.shape)))
    assert torch.equal(found, tensors[Q_A].flatten())
    torch.save({Q_A: print}, tmp_path / "pickled/adapter_model.bin")
    assert "is refused: it names" in faults_of("llama", tmp_path / "pickled")[0]
