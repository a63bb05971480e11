"""A launch refuses the model that its ranks would refuse, and plans the one that it loads."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.checkpoint.folders import MANIFEST
from megatron.cli import launch
from megatron.launch.plan import FineTuning, LaunchRequest, RefusedError
from megatron.launch.preflight import preflight
from megatron.options.config import ConfigError
from megatron.settings.command_line import parse_arguments
from tests import runs
from tests.finetuning_files import write_config, write_tokens
from tests.ranks import RankPools


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_config(tmp_path / "model")


def request_of(model: Path, *flags: str, dry_run: bool = True) -> LaunchRequest:
    return LaunchRequest(
        device="cpu", dry_run=dry_run, train_flags=["--train-iters", "2", "--load", str(model), *flags]
    )


def faults(request: LaunchRequest) -> list[str]:
    with pytest.raises(RefusedError) as refused:
        preflight(request)
    return refused.value.faults


def change(model: Path, **values: Any) -> None:
    path = model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_the_plan_is_of_the_model_that_is_loaded(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = preflight(request_of(model))
    found = plan.config.model
    assert (found.architecture, found.num_layers, found.hidden_size, found.ffn_size) == ("llama", 2, 64, 128)
    assert (found.vocab_size, found.num_kv_heads, found.norm_epsilon) == (278, 2, 1e-6)
    assert any("describe no model" in note and str(model) in note for note in plan.notes)
    assert launch.main(["--dry-run", "--device", "cpu", "--", "--train-iters", "2", "--load", str(model)]) == 0
    assert "llama" in capsys.readouterr().out
    # a rank reads the same flags
    assert parse_arguments([*plan.train_flags])[0].model == found


def test_what_is_given_overrides_the_loaded_model(model: Path) -> None:
    assert preflight(request_of(model, "--vocab-size", "300")).config.model.vocab_size == 300
    (fault,) = faults(request_of(model, "--vocab-size", "200"))
    assert "vocab_size=200 here, 278 there" in fault
    (fault,) = faults(request_of(model, "--norm-epsilon", "1e-3"))
    assert "norm_epsilon=0.001 here, 1e-06 there" in fault


@pytest.mark.parametrize("family", ["bloom --position-embedding-type learned", "llama --position-embedding-type rope"])
def test_a_runs_checkpoint_describes_its_model_too(ranks: RankPools, tmp_path: Path, family: str) -> None:
    """But not what a run chooses for itself: its kernels, what it freezes, its length."""
    data, saved = runs.write_dataset(tmp_path / "text"), tmp_path / "saved"
    options = f"--architecture {family} --num-layers 3 --norm-epsilon 1e-4 --hidden-dropout 0.2"
    chosen = "--kernels plain --freeze embedding.word.weight --train-iters 1"
    assert ranks(1)(runs.train, f"{options} {chosen} --data-path {data} --save {saved}") == [""]
    # a folder that only looks like a checkpoint
    (saved / "notes").mkdir()
    request = request_of(saved, "--finetune", "--seq-length", "12", "--data-path", str(data), dry_run=False)
    plan = preflight(request)
    expected, _ = parse_arguments([*runs.TINY.split(), *options.split(), "--data-path", "x"])
    found = plan.config.model
    assert found.computed(12) == expected.model.computed(16)
    assert (found.kernels, found.freeze, found.hidden_dropout) == ("auto", (), 0.2)
    assert any("describe no model" in note and f"{saved}/global_step1" in note for note in plan.notes)
    assert parse_arguments([*plan.train_flags])[0].model == found
    (fault,) = faults(request_of(saved, "--finetune", "--num-layers", "2", "--data-path", str(data)))
    assert "is of another model than the options describe" in fault
    assert "num_layers=2 here, 3 there" in fault


def test_a_launch_recognises_folders_as_its_ranks_do(model: Path) -> None:
    """Names that only look like a checkpoint's hold none; a whole model beside adapters is no folder of adapters."""
    (model / "not a checkpoint").mkdir()
    (model / "not a checkpoint" / MANIFEST).touch()
    (model / "adapter_config.json").write_text("{}")
    (model / "config.json").unlink()
    found = "\n".join(faults(request_of(model, "--config", "tiny_bloom")))
    assert "without their config.json" in found
    assert "base model" not in found


def test_another_model_than_the_options_is_refused(model: Path) -> None:
    fault = next(each for each in faults(request_of(model, "--config", "tiny_bloom")) if "another model" in each)
    assert f"{model} is of another model than the options describe: architecture=bloom here, llama there" in fault
    assert "hidden_size" not in fault.split("Take them")[1]


def test_a_model_that_cannot_be_computed_is_refused(model: Path) -> None:
    change(model, hidden_act="gelu", mlp_bias=True)
    said = "\n".join(faults(request_of(model)))
    assert "hidden_act='gelu'" in said
    assert "mlp_bias" in said
    assert "architecture" not in said, "nothing is said of a default model"
    assert "hidden_act='gelu'" in "\n".join(faults(request_of(model, "--config", "tiny_llama")))


def test_a_step_is_refused_where_weights_have_none(model: Path) -> None:
    (fault,) = faults(request_of(model, "--ckpt-step", "3"))
    assert "ckpt_step=3 would do nothing" in fault


def test_missing_weights_are_named(model: Path, tmp_path: Path) -> None:
    data = ("--data-path", str(tmp_path / "none"))
    (model / "model.safetensors").unlink()
    said = "\n".join(faults(request_of(model, *data, dry_run=False)))
    assert f"{model} holds config.json, but no weights" in said
    assert "but no weights" in preflight(request_of(model, *data)).warnings[1]
    shards = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    (model / shards["a"]).touch()
    said = "\n".join(faults(request_of(model, *data, dry_run=False)))
    assert f"lacks {shards['b']} (1 of 2 files that model.safetensors.index.json names)" in said
    (model / "model.safetensors.index.json").unlink()
    (model / shards["a"]).rename(model / "model.gguf")
    assert "weights in GGUF" in "\n".join(faults(request_of(model, *data, dry_run=False)))


def test_adapters_need_their_base(model: Path, tmp_path: Path) -> None:
    adapters = tmp_path / "adapters"
    adapters.mkdir()
    config = {"peft_type": "LORA", "base_model_name_or_path": str(model), "r": 8}
    (adapters / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="holds neither adapter_model"):
        preflight_or_fault(adapters)
    (adapters / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": "org/name"}))
    with pytest.raises(ConfigError, match="org/name, which is not a folder on this machine"):
        preflight_or_fault(adapters)


def preflight_or_fault(folder: Path) -> None:
    raise ConfigError(faults(request_of(folder)))


def test_a_run_whose_first_folder_has_gone_knows_its_model(model: Path, tmp_path: Path) -> None:
    saved = tmp_path / "saved" / "global_step2"
    saved.mkdir(parents=True)
    described = parse_arguments(["--load", str(model)])[0]
    metadata = json.dumps({"config": described.to_dict()})
    (saved / "checkpoint.json").write_text(f'{{\n "format": "x",\n "metadata": {metadata},\n "a": 1\n}}\n')
    shutil.rmtree(model)
    again = parse_arguments(["--load", str(model), "--save", str(saved.parent)])[0]
    assert again.model == described.model


def test_a_chat_template_that_nobody_knows_is_refused_in_a_plan_too(model: Path, tmp_path: Path) -> None:
    chats = str(tmp_path / "chats.jsonl")
    Path(chats).write_text("{}\n")
    data = FineTuning(model=str(model), data=chats, folder=None, chat_template="chatml")
    known = dataclasses.replace(request_of(model), fine_tuning=data)
    assert preflight(known).fine_tuning is not None
    unknown = dataclasses.replace(data, chat_template="nosuch")
    (fault,) = faults(dataclasses.replace(known, fine_tuning=unknown))
    assert "chat template 'nosuch' is neither a file nor a preset" in fault


DAMAGES = {
    "ids": "278, outside vocab_size=278",
    "short": "was cut off",
    "header": "MMIDIDY",
    "lengths": "damaged",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_dataset_that_ranks_would_refuse_is_refused(model: Path, tmp_path: Path, damage: str) -> None:
    prefix = write_tokens(tmp_path / "tokens")
    index, tokens = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
    if damage == "ids":
        tokens.write_bytes(np.array([1, 2, 278, 0, 1, 2, 3, 0], np.int32).tobytes())
    elif damage == "short":
        tokens.write_bytes(tokens.read_bytes()[:-2])
    elif damage == "header":
        index.write_bytes(b"MMIDIDY" + index.read_bytes()[7:])
    else:  # a length that no document can have; the lengths follow a header of 34 bytes
        content = bytearray(index.read_bytes())
        content[34:42] = np.array([-4, 4], np.int32).tobytes()
        index.write_bytes(content)
    said = "\n".join(faults(request_of(model, "--data-path", prefix, dry_run=False)))
    assert DAMAGES[damage] in said
    assert prefix in said
