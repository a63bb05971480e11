"""docs/finetuning.md and preference.md map optimum-habana's commands: the options exist, and a command is a plan."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from megatron.cli.launch import parse_command_line
from megatron.config.flags import flag
from megatron.config.options import options
from megatron.launch.hl_variables import VARIABLES
from megatron.launch.plan import LaunchPlan
from megatron.launch.preflight import preflight
from tests.finetuning_files import write_config

ROOT = Path(__file__).resolve().parent.parent


def section(page: str, heading: str) -> str:
    return (ROOT / "docs" / page).read_text().split(f"## {heading}\n")[1].split("\n## ")[0]


SECTIONS = {
    "sft.py": section("finetuning.md", "Run optimum-habana's sft.py commands"),
    "dpo.py": section("preference.md", "Run Optimum-Habana's dpo.py command"),
}
ROWS = {name: [row.split(" | ", 1) for row in re.findall(r"^\| (`.*) \|$", SECTIONS[name], re.M)] for name in SECTIONS}


@pytest.mark.parametrize("script", SECTIONS)
def test_every_option_of_the_table_exists(script: str) -> None:
    here = " ".join(row[1] for row in ROWS[script])
    variables, flags = set(re.findall(r"`(HL_\w+)", here)), set(re.findall(r"`(--[\w-]+)", here))
    assert variables <= {variable.name for variable in VARIABLES}
    assert flags <= {flag(name) for name in options()}
    assert len(variables) > 15
    assert len(flags) > 5


@pytest.mark.parametrize(("script", "count"), [("sft.py", 20), ("dpo.py", 10)])
def test_every_flag_of_the_published_commands_is_in_the_table(test_data: Path, script: str, count: int) -> None:
    found = sorted((test_data.parent / "seeds").glob("002_*"))
    if not found:
        pytest.skip("needs optimum-habana's page beside MEGATRON_TEST_DATA")
    blocks = re.findall(r"```bash\n(.*?)```", found[0].read_text(encoding="utf-8"), re.S)
    published = {word for block in blocks if script in block for word in re.findall(r"--\w+|[A-Z]\w+(?==1)", block)}
    assert len(published) >= count
    assert published <= set(re.findall(r"--\w+|[A-Z]\w+(?==1)", " ".join(row[0] for row in ROWS[script])))


def planned(script: str, folder: Path, monkeypatch: pytest.MonkeyPatch, **more: str) -> LaunchPlan:
    """The plan of the last command in a section, in a folder with its model and data."""
    command = re.findall(r"```bash\n(.*?)```", SECTIONS[f"{script}.py"], re.S)[-1]
    words = shlex.split(command.replace("\\\n", " "))
    place = words.index(f"scripts/run_{script}.sh")
    settings = dict(variable.split("=", 1) for variable in words[:place])
    write_config(folder / settings["HL_MODEL"])
    (folder / settings["HL_DATA"]).touch()
    monkeypatch.chdir(folder)
    for name, value in (settings | {"HL_DRY_RUN": "1"} | more).items():
        monkeypatch.setenv(name, value)
    return preflight(parse_command_line(["--variables", script, "--", *words[place + 1 :]])[0])


def test_the_command_is_a_plan_of_what_sft_py_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # the names in the command for DPO, most of which no Llama has
    names = "q_proj v_proj k_proj out_proj fc_in fc_out wte"
    plan = planned("sft", tmp_path, monkeypatch, HL_LORA_TARGET_MODULES=names)
    config, optimizer = plan.config, plan.config.optimizer
    assert (config.training.train_iters, config.training.num_epochs, config.training.global_batch_size) == (
        500,
        None,
        16,
    )
    assert (optimizer.lr, optimizer.lr_decay_style, optimizer.lr_warmup_iters) == (1e-4, "cosine", 100)
    assert (optimizer.weight_decay, optimizer.zero_stage, optimizer.lr_warmup_fraction) == (0.05, 3, None)
    assert (config.lora.lora_rank, config.lora.lora_alpha, config.lora.lora_dropout) == (8, 16, 0.05)
    assert plan.environment["PT_HPU_LAZY_MODE"] == "1"
    unmatched = re.findall(r"lora_target_modules=(\w+) matches no", " ".join(plan.warnings))
    assert unmatched == ["out_proj", "fc_in", "fc_out", "wte"]


def test_the_command_is_a_plan_of_what_dpo_py_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned("dpo", tmp_path, monkeypatch)
    training, lora, preference = plan.config.training, plan.config.lora, plan.config.preference
    assert (training.task, training.train_iters, training.num_epochs, training.seq_length) == (
        *("preference", 1000),
        *(None, 511),
    )
    assert (training.global_batch_size, plan.config.optimizer.lr, plan.config.optimizer.zero_stage) == (32, 5e-4, 3)
    assert (lora.lora_rank, lora.lora_alpha, lora.lora_dropout) == (8, 16, 0.05)
    assert (preference.beta, preference.max_prompt_length, preference.preference_loss) == (0.1, 256, "sigmoid")
    unmatched = re.findall(r"lora_target_modules=(\w+) matches no", " ".join(plan.warnings))
    assert unmatched == ["out_proj", "fc_in", "fc_out", "wte"]
