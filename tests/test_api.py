"""InstructLab's arguments as they are given: defaults, wrong ones, and a model that is not there.

Whole runs are in test_api_runs.py, what each argument becomes in launch/instructlab/test_mapping.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from megatron import api
from megatron.api import DataProcessArgs, LoraOptions, PretrainingConfig, TorchrunArgs, TrainingArgs, run_training
from megatron.data.index.indexed import DataError, IndexedDataset
from megatron.launch.instructlab import run
from megatron.launch.instructlab.arguments import FSDPOptions
from megatron.options.config import ConfigError
from megatron.weights.model_folder import find_model
from tests.finetuning_files import REQUIRED, write_chats, write_model, write_tokenizer


def arguments(**changed: Any) -> TrainingArgs:
    return TrainingArgs(**(REQUIRED | changed))


def test_defaults_are_those_of_instructlabs_library() -> None:
    # instructlab/training, config.py at fa5b53b (April 2026)
    args = arguments()
    expected: dict[str, Any] = {
        "chat_tmpl_path": None,
        "use_legacy_tmpl": False,
        "num_epochs": 1,
        "save_samples": 0,
        "warmup_steps": 0,
        "adamw_weight_decay": 0.0,
        "adamw_betas": (0.9, 0.95),
        "adamw_eps": 1e-8,
        "random_seed": 42,
        "use_dolomite": False,
        "is_padding_free": False,
        "checkpoint_at_epoch": True,
        "mock_data": False,
        "accelerate_full_state_at_epoch": True,
        "mock_data_len": 0,
        "disable_flash_attn": False,
        "lora": None,
        "process_data": True,
        "keep_last_checkpoint_only": False,
        "pretraining_config": None,
        "use_liger": False,
        "data_process_num_cpu_procs": 16,
        "trust_remote_code": False,
        "log_level": "INFO",
        "wandb_project": None,
        "mlflow_tracking_uri": None,
        "mlflow_experiment_name": None,
        "mlflow_run_name": None,
        "wandb_entity": None,
        "wandb_run_name": None,
        "tensorboard_log_dir": None,
        "validation_split": 0.0,
        "validation_frequency": None,
        "on_demand_checkpointing": False,
        "callbacks": None,
    }
    assert {name: getattr(args, name) for name in expected} == expected
    groups = {"deepspeed_options", "fsdp_options", "distributed_backend", "engine_options"}
    assert set(TrainingArgs.model_fields) == set(expected) | set(REQUIRED) | groups
    assert args.distributed_backend is api.DistributedBackend.FSDP
    assert args.fsdp_options.model_dump(mode="json") == {
        "cpu_offload_params": False,
        "sharding_strategy": "HYBRID_SHARD",
    }
    assert args.deepspeed_options.model_dump() == {
        "cpu_offload_optimizer": False,
        "cpu_offload_optimizer_ratio": 1,
        "cpu_offload_optimizer_pin_memory": False,
        "save_samples": None,
    }
    assert LoraOptions().model_dump(mode="json") == {
        "rank": 4,
        "alpha": 32,
        "dropout": 0.1,
        "target_modules": None,
        "quantize_data_type": None,
    }
    assert PretrainingConfig(block_size=8).document_column_name == "document"
    assert DataProcessArgs(data_path="a", data_output_path="b", max_seq_len=9, model_path="c").num_cpu_procs == 16


@pytest.mark.parametrize(
    ("kind", "given", "said"),
    [
        (TrainingArgs, {"learnign_rate": 1}, "TrainingArgs has no learnign_rate; did you mean learning_rate?"),
        (FSDPOptions, {"zzz": 8}, "FSDPOptions has no zzz; it has cpu_offload_params, sharding_strategy"),
        (TrainingArgs, {"effective_batch_size": 0}, "effective_batch_size"),
        (TrainingArgs, {"learning_rate": float("nan")}, "learning_rate"),
        (TrainingArgs, {"distributed_backend": "horovod"}, "'fsdp' or 'deepspeed'"),
        (TorchrunArgs, {"nproc_per_node": "cpu"}, "nproc_per_node"),
        (TrainingArgs, {"validation_split": 1.0}, "validation_split"),
    ],
)
def test_a_wrong_argument_is_named(kind: type[BaseModel], given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError) as caught:
        kind(**((REQUIRED if kind is TrainingArgs else {}) | given))
    assert said in str(caught.value)


def test_an_unknown_argument_of_torchrun_is_ignored_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    given: dict[str, Any] = {"nproc_per_nodes": 8, "rdzv_backend": "c10d", "nnodes": 1}
    assert TorchrunArgs(**given) == TorchrunArgs()
    assert [record.getMessage().split(";")[0] for record in caplog.records] == [
        "TorchrunArgs has no nproc_per_nodes",
        "TorchrunArgs has no rdzv_backend",
    ]
    assert "did you mean nproc_per_node? The argument is ignored" in caplog.text


@pytest.mark.parametrize("template", [None, "missing.jinja", "missing.py"])
def test_a_missing_template_is_one_sentence(
    template: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_tokenizer(Path("model"))
    write_chats(Path("chats.jsonl"), 1)
    config = json.loads(Path("model/tokenizer_config.json").read_text())
    del config["chat_template"]
    Path("model/tokenizer_config.json").write_text(json.dumps(config))
    args = DataProcessArgs(
        data_path="chats.jsonl", data_output_path="out", max_seq_len=99, model_path="model", chat_tmpl_path=template
    )
    with pytest.raises(DataError) as caught:
        api.data_process.main(args)
    if template is None:
        assert "the tokenizer in model has no chat template" in str(caught.value)
        assert "give a chat template: a .jinja or .py file, or a preset" in str(caught.value)
    else:
        said = f"chat template {template} cannot be read: No such file or directory; give a file that exists"
        assert str(caught.value) == said


def test_every_fault_is_reported_at_once(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    args = arguments(
        model_path=str(model), max_batch_len=1, ckpt_output_dir=str(tmp_path / "out"), engine_options={"num_layer": 3}
    )
    with pytest.raises(ConfigError) as caught:
        run_training(TorchrunArgs(node_rank=1), args)
    assert [fault.split("=")[0].split(" ")[0] for fault in caught.value.faults[:2]] == ["node_rank", "max_batch_len"]
    assert "engine_options has no 'num_layer'; did you mean 'num_layers'?" in str(caught.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("ibm-granite/no-such-model", "run `hf download ibm-granite/no-such-model`"),
        ("models/a/b", "model_path=models/a/b does not exist"),
        (__file__, "is a file; give the folder that transformers wrote"),
        ("adapters", "model_path=adapters holds adapters, not a model; give their base"),
    ],
)
def test_a_model_that_is_not_there_is_named(
    path: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "adapters").mkdir()
    (tmp_path / "adapters" / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError) as caught:
        run_training(TorchrunArgs(), arguments(model_path=path))
    assert said in str(caught.value)


def test_a_downloaded_model_is_found_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = pytest.importorskip("huggingface_hub")
    repository = tmp_path / "models--org--name"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("abc")
    (repository / "snapshots" / "abc").mkdir(parents=True)
    (repository / "snapshots" / "abc" / "config.json").write_text("{}")
    monkeypatch.setattr(hub.constants, "HF_HUB_CACHE", str(tmp_path))
    assert find_model("org/name", "model_path") == repository / "snapshots" / "abc"


def test_the_arguments_are_given_by_one_of_their_names() -> None:
    for given in ({}, {"torch_args": TorchrunArgs(), "torchrun_args": TorchrunArgs()}):
        with pytest.raises(TypeError, match="takes torch_args or, by its other name, torchrun_args"):
            run_training(**given)  # type: ignore[arg-type]


def test_gpu_means_all_devices_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    assert run.ranks_per_node_of(TorchrunArgs(nproc_per_node="gpu"), "cuda") == 3
    assert run.ranks_per_node_of(TorchrunArgs(nproc_per_node="gpu"), "cpu") == 1
    assert run.ranks_per_node_of(TorchrunArgs(nproc_per_node=5), "cuda") == 5


def test_a_list_of_files_is_a_mix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_model(Path("model"))
    write_chats(Path("a b.jsonl"), 30)
    write_chats(Path("c.jsonl"), 10)
    files: list[str | float] = [3, "a b.jsonl", 1, "c.jsonl"]
    args = arguments(model_path="model", data_path=files, data_output_dir="data", ckpt_output_dir="out")
    config = run.prepare(TorchrunArgs(), args, "cpu", 1)
    assert config.data.data_path == ("3", "data/a b/data", "1", "data/c/data")
    made = DataProcessArgs(data_path=files, data_output_path="data", max_seq_len=128, model_path="model")
    api.data_process.main(made)  # finds both
    assert [IndexedDataset(f"data/{name}/data").num_documents for name in ("a b", "c")] == [30, 10]
    args = arguments(model_path="model", data_path=[3, "a b.jsonl", "c.jsonl"], ckpt_output_dir="out")
    with pytest.raises(ConfigError, match=r"data_path=.* must be one file, files alone, or WEIGHT FILE pairs"):
        run.prepare(TorchrunArgs(), args, "cpu", 1)
