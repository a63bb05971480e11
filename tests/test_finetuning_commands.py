"""docs/finetuning.md maps optimum-habana's commands: every option that it names exists, and the command is a plan."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from megatron.cli.launch import parse_command_line
from megatron.config.options import flag, options
from megatron.launch.hl_variables import VARIABLES
from megatron.launch.preflight import preflight
from tests.finetuning_files import write_config

ROOT = Path(__file__).resolve().parent.parent
SECTION = (
    (ROOT / "docs" / "finetuning.md")
    .read_text()
    .split("## Run optimum-habana's sft.py commands\n")[1]
    .split("\n## ")[0]
)
ROWS = [row.split(" | ", 1) for row in re.findall(r"^\| (`.*) \|$", SECTION, re.M)]


def test_every_option_of_the_table_exists() -> None:
    here = " ".join(row[1] for row in ROWS)
    variables, flags = set(re.findall(r"`(HL_\w+)", here)), set(re.findall(r"`(--[\w-]+)", here))
    assert variables <= {variable.name for variable in VARIABLES}
    assert flags <= {flag(name) for name in options()}
    assert len(variables) > 15
    assert len(flags) > 5


def test_every_flag_of_the_published_commands_is_in_the_table(test_data: Path) -> None:
    found = sorted((test_data.parent / "seeds").glob("002_*"))
    if not found:
        pytest.skip("needs optimum-habana's page beside MEGATRON_TEST_DATA")
    blocks = re.findall(r"```bash\n(.*?)```", found[0].read_text(encoding="utf-8"), re.S)
    published = {word for block in blocks if "sft.py" in block for word in re.findall(r"--\w+|[A-Z]\w+(?==1)", block)}
    assert len(published) > 20
    assert published <= set(re.findall(r"--\w+|[A-Z]\w+(?==1)", " ".join(row[0] for row in ROWS)))


def test_the_command_is_a_plan_of_what_sft_py_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (command,) = re.findall(r"```bash\n(.*?)```", SECTION, re.S)
    words = shlex.split(command.replace("\\\n", " "))
    variables, flags = words[: words.index("scripts/run_sft.sh")], words[words.index("scripts/run_sft.sh") + 1 :]
    write_config(tmp_path / "meta-llama" / "Llama-2-70b-hf")
    (tmp_path / "chats.jsonl").touch()
    monkeypatch.chdir(tmp_path)
    # the names in the command for DPO, most of which no Llama has
    names = "q_proj v_proj k_proj out_proj fc_in fc_out wte"
    settings = dict(variable.split("=", 1) for variable in variables)
    for name, value in (settings | {"HL_DRY_RUN": "1", "HL_LORA_TARGET_MODULES": names}).items():
        monkeypatch.setenv(name, value)
    plan = preflight(parse_command_line(["--variables", "sft", "--", *flags])[0])
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
