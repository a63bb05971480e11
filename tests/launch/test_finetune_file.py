"""A finetune_lora.yaml, as finetune.py reads it, run by run_sft.sh: keys are translated, noted, or refused by name."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron.cli.launch import parse_command_line
from megatron.launch.dialects.finetune_file import KEYS
from megatron.launch.plan import LaunchPlan, RefusedError
from megatron.launch.preflight import preflight
from megatron.options.config import ConfigError
from megatron.settings.command_line import load_config
from tests.finetuning_files import write_chats, write_config

DOCUMENTATION = Path(__file__).resolve().parents[2] / "docs" / "guides" / "optimum_habana.md"
# as published, but for the folders
PUBLISHED = """
model_id: base
model_family: llama2-7b
gaudi_config_name: Habana/llama

LoRA:
  r: 8
  alpha: 32
  dropout: 0.05

data_path: data
split: full
batch_size: 4
gradient_accumulation_steps: 1
num_epochs: 10
save_dir: save_dir
lr: 1e-4
weight_decay: 0
seed: 42
"""
ZERO = {"stage": 1, "offload_optimizer": {"device": "none", "pin_memory": True}}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_config(tmp_path / "base")
    write_chats(tmp_path / "data" / "full.jsonl")
    write(tmp_path / "config" / "finetune_lora.yaml")
    monkeypatch.chdir(tmp_path)
    for name, value in {"HL_DRY_RUN": "1", "HL_DEVICE": "cpu", "HL_SAVE": "0"}.items():
        monkeypatch.setenv(name, value)
    return tmp_path


def write(path: Path, zero: dict[str, Any] | None = None, without: tuple[str, ...] = (), **changed: Any) -> None:
    path.parent.mkdir(exist_ok=True)
    values = {key: value for key, value in yaml.safe_load(PUBLISHED).items() if key not in without}
    path.write_text(yaml.safe_dump(values | changed))
    settings = {"zero_optimization": zero or ZERO, "train_batch_size": "auto"}
    path.with_name("ds_config.json").write_text(json.dumps(settings))


def plan(*arguments: str) -> LaunchPlan:
    return preflight(parse_command_line(["--variables", "sft", "--", *arguments])[0])


CONFIG = "--config=config/finetune_lora.yaml"


def test_the_published_file_is_a_plan_for_seven_devices(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "config" / "finetune_lora.yaml").write_text(PUBLISHED)
    monkeypatch.setenv("HL_DP", "7")
    found = plan("--config", "config/finetune_lora.yaml")
    config, lora = found.config, found.config.lora
    assert (lora.lora_rank, lora.lora_alpha, lora.lora_dropout, lora.lora_target_modules) == (
        *(8, 32, 0.05),
        ("all-linear",),
    )
    training, optimizer = config.training, config.optimizer
    assert (training.num_epochs, training.seed, training.global_batch_size) == (10, 42, 7 * 4)
    assert (optimizer.lr, optimizer.weight_decay, optimizer.zero_stage) == (1e-4, 0, 1)
    theirs = pytest.importorskip("transformers").TrainingArguments(output_dir=str(folder / "theirs"), use_cpu=True)
    assert (optimizer.lr_decay_style, optimizer.lr_warmup_fraction) == (theirs.lr_scheduler_type, None)
    assert (optimizer.lr_warmup_iters, optimizer.lr_warmup_samples, theirs.warmup_steps) == (0, 0, 0)
    ours = (optimizer.adam_beta1, optimizer.adam_beta2, optimizer.adam_eps, optimizer.clip_grad)
    assert ours == (theirs.adam_beta1, theirs.adam_beta2, theirs.adam_epsilon, theirs.max_grad_norm)
    assert (config.checkpoint.load, config.logging.results_dir) == ("base", "save_dir")
    assert training.deepspeed_config == "config/ds_config.json"
    assert found.fine_tuning is not None
    assert found.fine_tuning.data == "data/full.jsonl"
    assert found.devices_per_node == 7
    ranks = load_config(found.train_flags, 7)
    assert (ranks.training.global_batch_size, ranks.lora) == (28, lora)
    for key in ("model_family=llama2-7b", "gaudi_config_name=Habana/llama"):
        assert any(f"{key} has no effect: " in note for note in found.notes)


def test_variables_and_flags_override_the_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HL_LR", "3e-4")
    monkeypatch.setenv("HL_DATA", "data/other.jsonl")
    write_chats(folder / "data" / "other.jsonl")
    write(folder / "config" / "finetune_lora.yaml", gradient_accumulation_steps=8)
    assert plan(CONFIG).config.training.global_batch_size == 32
    found = plan(CONFIG, "--lora-rank", "4", "--global-batch-size", "6", "--seed=1", "--config", "sft_llama")
    config = found.config
    assert (config.lora.lora_rank, config.training.global_batch_size, config.training.seed) == (4, 6, 1)
    assert config.optimizer.lr == 3e-4
    assert found.fine_tuning is not None
    assert found.fine_tuning.data == "data/other.jsonl"


def test_rank_zero_trains_the_whole_model(folder: Path) -> None:
    write(folder / "config" / "finetune_lora.yaml", LoRA={"r": 0, "alpha": 32, "dropout": 0.05})
    found = plan(CONFIG)
    assert found.config.lora.lora_rank is None
    assert not [warning for warning in found.warnings if "lora" in warning]
    assert "sft_llama" in found.train_flags


def test_the_stage_and_the_offload_of_the_json_are_followed(folder: Path) -> None:
    write(folder / "config" / "finetune_lora.yaml", {"stage": 2, "offload_optimizer": {"device": "cpu"}})
    optimizer = plan(CONFIG).config.optimizer
    assert (optimizer.zero_stage, optimizer.offload_optimizer) == (2, True)
    write(folder / "config" / "finetune_lora.yaml", {"stage": 1, "offload_optimiser": {"device": "cpu"}})
    with pytest.raises(RefusedError, match="offload_optimiser is not a key that DeepSpeed reads; did you mean"):
        plan(CONFIG)


@pytest.mark.parametrize(
    ("changed", "faults"),
    [
        ({"batch_size": 0}, ["batch_size=0 must be a whole number, 1 or more"]),
        ({"num_epochs": "ten", "lr": -1}, ["num_epochs='ten' must be a whole number, 1 or", "lr=-1 must be a number"]),
        ({"epochs": 3}, ["unknown key epochs; did you mean num_epochs?"]),
        ({"bf16": 3}, ["unknown key bf16; remove it, or give the flag of megatron.train that does it"]),
        ({"LoRA": {"r": 8, "target": 3}}, ["unknown key LoRA.target; did you mean LoRA.r?"]),
        ({"LoRA": {"r": -8, "dropout": 1}}, ["LoRA.r=-8 must be a whole", "LoRA.dropout=1 must be a number from 0"]),
        ({"LoRA": 8}, ["LoRA=8 must hold r, alpha and dropout, a line each"]),
        ({"without": ("LoRA",)}, ["LoRA.r, the rank of the adapters, is not given; give it, or 0 to train the whole"]),
        ({"without": ("model_id",), "data_path": None}, ["HL_MODEL is not set", "HL_DATA is not set"]),
        (
            {"model_id": "org/name"},
            ["HL_MODEL=org/name is not here as a folder, and not whole in huggingface_hub's cache"],
        ),
        ({"split": "forget10"}, ["HL_DATA=data/forget10.jsonl is not a file"]),
        ({"data_path": "data/full.jsonl", "split": "forget10"}, ["split=forget10 selects a file of a folder"]),
    ],
)
def test_what_cannot_be_used_is_named(
    folder: Path, changed: dict[str, Any], faults: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write(folder / "config" / "finetune_lora.yaml", **changed)
    monkeypatch.delenv("HL_DRY_RUN")
    with pytest.raises(RefusedError) as refusal:
        plan(CONFIG)
    found = refusal.value.faults
    for fault in faults:
        assert [text for text in found if fault in text], found
    assert len(found) <= len(faults) + ("LoRA" in str(changed)), found


def test_elsewhere_such_a_file_is_refused_by_the_name_of_the_script(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"sets model_id or LoRA; only scripts/run_sft.sh --config reads such a file"):
        load_config(["--config", "config/finetune_lora.yaml"], 1)


def test_every_key_is_in_the_documentation() -> None:
    section = DOCUMENTATION.read_text(encoding="utf-8").split("## Run a finetune_lora.yaml\n")[1].split("\n## ")[0]
    named = {word for row in re.findall(r"^\| (`.*?) \|", section, re.M) for word in re.findall(r"`([\w.]+)`", row)}
    assert named == {*(key.name.rstrip("*") for key in KEYS), "ds_config.json"} - {"LoRA"}


def test_a_list_of_data_is_a_mix(folder: Path) -> None:
    write_chats(folder / "data" / "b.jsonl")
    write(folder / "config" / "finetune_lora.yaml", data_path=[0.7, "data", 0.3, "data/b.jsonl"])
    assert plan(CONFIG).config.data.data_path == ("0.7", "save_dir/data/full/data", "0.3", "save_dir/data/b/data")
    write(folder / "config" / "finetune_lora.yaml", data_path=["data/b.jsonl"])
    assert plan(CONFIG).config.data.data_path == ("save_dir/data/data",)
