"""The commands that run a model without training it: their layouts, HL_* variables, and what starts."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest

from megatron.cli import evaluate, generate
from megatron.launch.dialects.hl_variables import VARIABLES
from megatron.options.config import ConfigError

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = {"generate": (generate.main, "--prompt a"), "evaluate": (evaluate.main, "--dataset DATA")}


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove what a process group of an earlier test has set here: a command would take itself for a rank."""
    for name in ("LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def folder(tmp_path: Path) -> str:
    (tmp_path / "data.idx").touch()
    return str(tmp_path)


def work_of(name: str, folder: str) -> list[str]:
    """Flags that give a command something to do."""
    return COMMANDS[name][1].replace("DATA", f"{folder}/data").split()


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("--tensor-model-parallel-size 3 --devices-per-node 2", "= 3 ranks, but nodes x devices = 1 x 2"),
        ("--nodes 2", "2 nodes need a hostsfile"),
        ("--data-parallel-size 0", "--data-parallel-size 0: input should be greater than 0"),
    ],
)
def test_layouts_that_do_not_fit_are_refused(
    name: str, line: str, expected: str, folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    main = COMMANDS[name][0]
    assert main(["--load", folder, "--device", "cpu", *work_of(name, folder), *line.split()]) == 2
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize("name", COMMANDS)
def test_layouts_that_do_not_fit_the_model_are_refused_before_ranks_start(name: str, folder: str) -> None:
    model = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128, "hidden_size": 32,
        "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
        "max_position_embeddings": 64, "hidden_act": "silu", "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    }  # fmt: skip
    (Path(folder) / "config.json").write_text(json.dumps(model))
    words = ["--load", folder, "--device", "cpu", "--dry-run", *work_of(name, folder)]
    code = (
        f"import sys; from megatron.cli import {name}; "
        f"ran = [{name}.main([*{words}, *line.split()]) for line in sys.argv[1:]]; "
        "print(ran, sorted({'torch', 'deepspeed'} & set(sys.modules)))"
    )
    lines = ["--pipeline-model-parallel-size 3", "--tensor-model-parallel-size 3", "--tensor-model-parallel-size 2"]
    ran = subprocess.run([sys.executable, "-c", code, *lines], cwd=ROOT, capture_output=True, text=True)
    assert ran.stdout.endswith("[2, 2, 0] []\n"), ran.stderr
    assert "pipeline_model_parallel_size=3 is larger than num_layers=2" in ran.stderr
    assert "num_attention_heads=4" in ran.stderr


@pytest.mark.parametrize("name", COMMANDS)
def test_the_script_passes_its_variables(
    name: str, folder: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    main, work = COMMANDS[name][0], work_of(name, folder)
    for variable, value in {"HL_MODEL": folder, "HL_TP": "2", "HL_DP": "2", "HL_BF16": "1", "HL_DEVICE": "cpu"}.items():
        monkeypatch.setenv(variable, value)
    assert main(["--variables", name, *work, "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"4 ranks of megatron.{name} on this machine; nothing was started\n")
    flags = f"--load {folder} --precision bf16 --tensor-model-parallel-size 2 {' '.join(work)} --device cpu"
    assert flags in shown
    monkeypatch.setenv("HL_GBS", "8")
    monkeypatch.setenv("HL_CP", "2")
    assert main(["--variables", name, *work, "--dry-run"]) == 2
    said = capsys.readouterr().err
    assert "HL_GBS=8 does not apply to this script; it belongs to scripts/run_bloom13b.sh" in said
    assert "HL_CP=2 does not apply to this script; copies of the model share the texts, so start more ranks" in said


def test_an_environment_that_training_refuses_is_refused(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The folder without `activate` was passed over, and another device than the one that is chosen overwritten."""
    given = {"HL_MODEL": folder, "HL_DEVICE": "cpu", "HL_QNPU_DIR": folder, "HL_ENV_FLAGS": "DS_ACCELERATOR=cuda"}
    with patch.dict("os.environ", given):
        assert generate.main(["--variables", "generate", "--prompt", "a", "--dry-run"]) == 2
    said = capsys.readouterr().err
    assert f"HL_QNPU_DIR={folder} holds no file `activate`" in said
    assert "DS_ACCELERATOR=cuda: the launcher sets it; leave it out, and set HL_DEVICE" in said


def test_an_evaluation_is_described_by_variables(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    (Path(folder) / "quiz.yaml").touch()
    given = {
        "HL_MODEL": folder, "HL_DEVICE": "cpu", "HL_TASKS": f"arc, {folder}/quiz.yaml", "HL_TASK_PATH": folder,
        "HL_DATASETS": f"{folder}/data", "HL_NUM_FEWSHOT": "0", "HL_BATCH_SIZE": "4", "HL_OUTPUT": f"{folder}/out.json",
    }  # fmt: skip
    with patch.dict("os.environ", given):
        assert evaluate.main(["--variables", "evaluate", "--dry-run"]) == 0
        shown = capsys.readouterr().out
        for flags in (
            f"--tasks arc {folder}/quiz.yaml", f"--task-path {folder}", f"--dataset {folder}/data",
            "--num-fewshot 0", "--batch-size 4", f"--output {folder}/out.json",
        ):  # fmt: skip
            assert flags in shown
    with patch.dict("os.environ", {"HL_MODEL": folder, "HL_PROMPTS": "prompts.txt"}):
        assert evaluate.main(["--variables", "evaluate", "--dry-run"]) == 2
    assert "HL_PROMPTS=prompts.txt does not apply to this script; it belongs to scripts/generate.sh" in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize("name", COMMANDS)
def test_a_rank_of_another_launcher_runs_in_its_process(name: str, folder: str) -> None:
    work = ["--load", folder, *work_of(name, folder), "--tensor-model-parallel-size", "2"]
    with patch.dict("os.environ", LOCAL_RANK="0", RANK="0", WORLD_SIZE="2"), patch(f"megatron.{name}.main") as rank:
        assert COMMANDS[name][0](work) == 0
    rank.assert_called_once_with(work)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_lists_the_variables_of_the_script_and_fits(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert COMMANDS[name][0](["--variables", name, "--help"]) == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 110
    listed = set(re.findall(r"^  (HL_\w+)", shown, re.MULTILINE))
    assert listed == {variable.name for variable in VARIABLES if name in variable.scripts}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_wrong_command_loads_neither_torch_nor_deepspeed(name: str) -> None:
    code = (
        f"import sys; from megatron.cli import {name}; status = {name}.main(['--load', 'none']); "
        "print(status, sorted({'torch', 'deepspeed'} & set(sys.modules)))"
    )
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert ran.stdout == "2 []\n", ran.stderr


def test_a_flag_without_effect_is_noted_once(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--load", folder, "--device", "cpu", "--prompt", "a", "--use_kv_cache"]
    with patch("megatron.runtime.accelerator.choose_device", side_effect=ConfigError(["it ends here"])):
        assert generate.main(words) == 2
    assert capsys.readouterr().err.count("keys and values are always kept") == 1
