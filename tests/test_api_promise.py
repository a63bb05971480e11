"""The promised names of megatron.api: their signatures are frozen, and the calls do what the commands do."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron import api
from megatron.cli.calls.commands import CommandError, call_command, command_words
from megatron.cli.entry import module_of
from megatron.generation.text_model import TextModel
from megatron.options.config import ConfigError
from tests.finetuning_files import write_config
from tools import document_api

ROOT = Path(__file__).resolve().parent.parent
PROMISED = {
    "plan": "*, config: str | Path | list[str] | tuple[str, ...] = (), num_devices: int | None = None, "
    "devices_per_node: int = 8, rates: str | Path | None = None, **options: Any -> RunPlan",
    "train_tokenizer": "files: Paths, folder: str | Path, *, vocab_size: int, **options: Any -> Path",
    "prepare": "files: Paths, prefix: str | Path, *, tokenizer: str | Path, key: str = 'text', **options: Any -> str",
    "train": "results_dir: str | Path, *, config: str | Path | list[str] | tuple[str, ...] = (), "
    "model: str | Path | None = None, **options: Any -> TrainedRun",
    "load": "folder: str | Path, **options: Any -> TextModel",
    "convert": "source: str | Path, folder: str | Path, *, to: str, **options: Any -> Path",
    "run_training": "torch_args: TorchrunArgs | None = None, train_args: TrainingArgs | None = None, *, "
    "torchrun_args: TorchrunArgs | None = None, training_args: TrainingArgs | None = None -> None",
}
OF_RESULTS = {
    TextModel.generate: "self, prompts: Prompt | Sequence[Prompt], **options: Any -> Any",
    api.TrainedRun.rows: "self, kind: str = 'train' -> list[dict[str, Any]]",
}
ATTRIBUTES = {
    api.TrainedRun: "folder checkpoints export",
    api.RunPlan: "text num_parameters memory_bytes device_memory_bytes fits step_seconds",
}
OTHERS = (
    "CheckpointError CommandError ConfigError DataError DataProcessArgs DeepSpeedOffloadStrategy DeepSpeedOptions "
    "DistributedBackend FSDPOptions LoraOptions PretrainingConfig QuantizeDataType RunPlan ShardingStrategies "
    "TorchrunArgs TrainedRun TrainerCallback TrainingArgs TrainingContext data_process"
)


def written(function: object) -> str:
    given = inspect.signature(function)  # type: ignore[arg-type]
    arguments, _, returns = str(given).replace("'", "").rpartition(" -> ")
    # the defaults that are texts keep their quotes
    for parameter in given.parameters.values():
        if isinstance(parameter.default, str):
            arguments = arguments.replace(f"= {parameter.default}", f"= {parameter.default!r}")
    return f"{arguments[1:-1]} -> {returns}"


def test_signatures_are_those_that_were_promised() -> None:
    """A change here is a change of the version, and an entry in the changelog (docs/reference/python.md)."""
    assert {name: written(getattr(api, name)) for name in PROMISED} == PROMISED
    assert {function: written(function) for function in OF_RESULTS} == OF_RESULTS
    assert sorted(api.__all__) == sorted([*PROMISED, *OTHERS.split()])


@pytest.mark.parametrize(("cls", "names"), ATTRIBUTES.items())
def test_results_have_the_promised_attributes(cls: type, names: str) -> None:
    assert [name for name in (*cls.__annotations__, *vars(cls)) if name in names.split()] == names.split()


def test_the_page_is_written_from_the_code(capsys: pytest.CaptureFixture[str]) -> None:
    document_api.main()
    page = (ROOT / "docs" / "reference" / "python.md").read_text(encoding="utf-8")
    assert capsys.readouterr().out == page, "run: python tools/document_api.py > docs/reference/python.md"
    assert {name for name in api.__all__ if name not in page} == set()


def test_a_plan_is_that_of_the_command_with_its_figures() -> None:
    sizes: dict[str, Any] = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}
    plan = api.plan(config="tiny_llama", device="h100", num_devices=4, **sizes)
    flags = "--config tiny_llama --device h100 --num-devices 4 --tensor-model-parallel-size 2"
    command = [sys.executable, "tools/plan.py", *flags.split(), "--pipeline-model-parallel-size", "2"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert str(plan) == plan.text == printed
    assert (plan.num_parameters, len(plan.memory_bytes), plan.fits) == (1_774_720, 2, True)
    assert plan.step_seconds is not None
    assert plan.device_memory_bytes is not None
    assert 0 < max(plan.memory_bytes) < plan.device_memory_bytes


def test_faults_come_together_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        api.train(tmp_path / "run", config="tiny_llama", num_layer=3, device="cpu", data_path=str(tmp_path / "none"))
    assert len(caught.value.faults) == 2
    assert "num-layers" in caught.value.faults[0]
    with pytest.raises(ConfigError, match="call plan"):
        api.train(tmp_path / "run", dry_run=True)
    with pytest.raises(ConfigError, match="input is set by files"):
        api.prepare("a", "b", tokenizer="c", input="d")
    with pytest.raises(ConfigError, match="num_layers"):
        api.plan(config="tiny_llama", num_layers=-1)
    assert list(tmp_path.iterdir()) == []


def test_a_model_gives_its_options_and_its_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, chats = write_config(tmp_path / "model"), tmp_path / "chats.jsonl"
    chats.write_text("{}\n")
    called: list[tuple[str, list[str]]] = []
    monkeypatch.setattr("megatron.cli.calls.runs.call_command", lambda name, words: called.append((name, words)))
    options = {"devices_per_node": 2, "lora_rank": 4, "too_long": "split", "seq_length": 64, "max_batch_len": 128}
    run = api.train(tmp_path / "run", config="lora_llama", model=model, chats=str(chats), device="cpu", **options)
    ((name, words),) = called
    own, of_training = words[: words.index("--")], words[words.index("--") :]
    assert name == "launch"
    assert own[own.index("--too-long") + 1] == "split"
    for flag, value in {
        "--load": model,
        "--tokenizer-model": model,
        "--hidden-size": 64,
        "--lora-rank": 4,
        "--save": run.checkpoints,
        "--save-hf": run.folder / "hf_format",
    }.items():
        assert of_training[of_training.index(flag) + 1] == str(value)


def test_the_newest_export_is_that_after_most_samples(tmp_path: Path) -> None:
    run = api.TrainedRun(tmp_path)
    with pytest.raises(api.CheckpointError, match="no export"):
        _ = run.export
    for name in ("samples_600", "samples_1200", "samples_1200.unfinished", "best"):
        (tmp_path / "hf_format" / name).mkdir(parents=True)
    assert run.export == tmp_path / "hf_format" / "samples_1200"
    (tmp_path / "hf_format" / "last_epoch").mkdir()
    assert run.export == tmp_path / "hf_format" / "last_epoch"


def test_folders_that_options_name_elsewhere_are_found(tmp_path: Path) -> None:
    run = api.TrainedRun(tmp_path / "run")
    assert run.checkpoints == tmp_path / "run" / "checkpoints"
    (tmp_path / "models" / "samples_8").mkdir(parents=True)
    run.folder.mkdir()
    folders = f"save: {tmp_path / 'saves'}, save_hf: {tmp_path / 'models'}"
    (run.folder / "config.yaml").write_text(f"checkpoint: {{{folders}}}\n")
    assert (run.checkpoints, run.export) == (tmp_path / "saves", tmp_path / "models" / "samples_8")
    (run.folder / "checkpoints").mkdir()
    assert run.checkpoints == run.folder / "checkpoints", "the results may have been moved"


def test_no_row_of_an_evaluation_is_left_out(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"kind": "valid_set", "iteration": 0, "set": "a", "lm_loss": 2.0},
        {"kind": "valid_set", "iteration": 0, "set": "b", "lm_loss": 3.0},
        {"kind": "valid", "iteration": 0, "lm_loss": 2.5},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = api.TrainedRun(tmp_path)
    assert run.rows("valid_set") == rows[:2]
    assert run.rows("valid") == rows[2:]
    assert run.rows() == [], "it has trained no step"


def test_options_become_flags_of_a_command() -> None:
    options = {"append_eod": True, "verify": False, "workers": 2, "json_keys": ["a", "b"], "dtype": None}
    assert command_words(options) == ["--append-eod", "--no-verify", "--workers", "2", "--json-keys", "a", "b"]


def test_a_command_that_fails_raises_its_message_and_shows_its_output(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(CommandError, match=r"status 2: .*--num-device") as caught:
        call_command("plan", ["--config", "tiny_llama", "--num-device", "2"])
    assert caught.value.status == 2
    assert caught.value.output in capsys.readouterr().out


def test_every_called_command_exists() -> None:
    names = ("train_tokenizer", "preprocess_data", "convert_checkpoint", "launch")
    assert all(module_of(name) for name in names)
