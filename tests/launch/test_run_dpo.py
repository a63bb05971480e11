"""run_dpo.sh: from a folder of transformers and a file of pairs to adapters in PEFT's format."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron.data.preference.dataset import PairLimits
from megatron.launch.dialects.hl_requests import from_environment
from megatron.launch.plan import RefusedError
from megatron.launch.preflight import preflight
from megatron.options.config import Config
from megatron.settings.command_line import read_command_line
from tests import runs
from tests.finetuning_files import write_model
from tests.launch.test_run_scripts import run

TINY = {"HL_MODEL": "base", "HL_DEVICE": "cpu", "HL_SEQ_LEN": "64", "HL_MAX_BATCH_LEN": "256", "HL_GBS": "8"}
TINY |= {"HL_MAX_PROMPT_LEN": "32"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_model(tmp_path / "base")
    rows = [{"prompt": f"say {n} ", "chosen": f"yes, {n}", "rejected": f"no {n} {n}"} for n in range(20)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def config_of(folder: Path, *flags: str, **variables: str) -> Config:
    given = TINY | {"HL_MODEL": str(folder / "base")} | variables
    return read_command_line(from_environment(given, "dpo", list(flags)).train_flags).config


def test_the_recipe_and_its_variables(folder: Path) -> None:
    config = config_of(folder)
    assert (config.training.task, config.training.num_epochs, config.lora.lora_rank) == ("preference", 1, 8)
    assert (config.preference.preference_loss, config.preference.beta, config.optimizer.lr) == ("sigmoid", 0.1, 2e-5)
    names = {"HL_PREFERENCE_LOSS": "ipo", "HL_BETA": "0.3", "HL_REFERENCE": "stored", "HL_LORA_RANK": "none"}
    options = config_of(folder, **names).preference
    assert (options.preference_loss, options.beta, options.reference) == ("ipo", 0.3, "stored")
    assert options.max_prompt_length == 32
    given = TINY | {"HL_MODEL": str(folder / "base")} | names
    assert any("far too high" in fault for fault in from_environment(given, "dpo", []).faults)
    assert not any("far too high" in fault for fault in from_environment(given, "dpo", ["--lr", "5e-7"]).faults)
    whole = config_of(folder, "--lr", "5e-7", **names)
    assert (whole.lora.lora_rank, whole.optimizer.lr) == (None, 5e-7)


def test_a_short_sequence_needs_no_limit_of_its_own_for_prompts(folder: Path) -> None:
    def limits_of(**variables: str) -> tuple[int, int | None]:
        given = {"HL_MODEL": str(folder / "base"), "HL_DEVICE": "cpu", "HL_DRY_RUN": "1"} | variables
        limits = PairLimits.of(preflight(from_environment(given, "dpo", [])).config)
        return limits.max_length, limits.max_prompt_length

    assert limits_of() == (1024, 512), "as dpo.py"
    assert limits_of(HL_SEQ_LEN="255") == (256, 128)
    assert limits_of(HL_SEQ_LEN="255", HL_MAX_PROMPT_LEN="200") == (256, 200)
    with pytest.raises(RefusedError, match="max_prompt_length=256 leaves no token of an answer"):
        limits_of(HL_SEQ_LEN="255", HL_MAX_PROMPT_LEN="256")


@pytest.mark.slow
def test_a_validation_that_cannot_be_is_said_once(folder: Path) -> None:
    """A launched rank repeated the launcher's warnings; eval_iters alone validated nothing, without a word."""
    given = TINY | {"HL_DATA": "pairs.jsonl", "HL_CHAT_TEMPLATE": "chatml", "HL_RESULTS_DIR": "out"}
    done = run("run_dpo.sh", folder, HL_EVAL_INTERVAL="5", **given)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("eval_interval=5 has no effect without eval_iters") == 1
    plan = run("run_dpo.sh", folder, HL_DRY_RUN="1", HL_EVAL_INTERVAL="5", HL_EVAL_ITERS="2", **given)
    assert "eval_iters=2 has no effect, as split=1,0,0 holds out nothing" in plan.stdout
    plan = run("run_dpo.sh", folder, "--split=9,1,0", HL_DRY_RUN="1", HL_EVAL_INTERVAL="5", HL_EVAL_ITERS="2", **given)
    assert "no effect" not in plan.stdout


def test_wrong_variables_are_refused_by_their_names(folder: Path) -> None:
    wrong = {"HL_DATA": "none.jsonl", "HL_PREFERENCE_LOSS": "aot", "HL_BETA": "-1", "HL_MAX_PROMPT_LEN": "0"}
    done = run("run_dpo.sh", folder, **TINY | wrong)
    assert done.returncode == 2
    for fault in (
        "HL_DATA=none.jsonl is not a file; set it to a JSONL file of pairs of answers",
        "preference.preference_loss='aot'",
        "preference.beta='-1'",
        "HL_MAX_PROMPT_LEN='0' must be a whole number, 1 or more",
    ):
        assert fault in done.stderr
    assert sorted(path.name for path in folder.iterdir()) == ["base", "pairs.jsonl"]
    with pytest.raises(RefusedError, match="does not apply to this script; it belongs to scripts/run_dpo"):
        preflight(from_environment({"HL_BETA": "0.2", "HL_DRY_RUN": "1"}, "sft", []))


def test_a_run_tokenizes_trains_on_a_layout_and_exports_adapters(folder: Path) -> None:
    given = TINY | {"HL_DATA": "pairs.jsonl", "HL_CHAT_TEMPLATE": "chatml", "HL_RESULTS_DIR": "out"}
    plan = run("run_dpo.sh", folder, HL_DRY_RUN="1", **given)
    assert plan.returncode == 0, plan.stderr
    for said in ("Plan of dpo_llama; nothing was started", "--chats pairs.jsonl", "--data-path out/data/data"):
        assert said in plan.stdout
    done = run("run_dpo.sh", folder, "--lr=1e-3", HL_TP="2", **given)
    assert done.returncode == 0, done.stderr
    assert "20 pairs in out/data/data" in done.stdout
    rows = [row for row in runs.rows(folder / "out") if row["kind"] == "train"]
    assert len(rows) == 3  # 8, 8 and 4 pairs
    assert rows[-1]["metrics"]["rewards/margins"] > rows[0]["metrics"]["rewards/margins"] == 0
    exported = folder / "out" / "hf_format" / "samples_20"
    assert {"adapter_model.safetensors", "adapter_config.json", "chat_template.jinja"} <= {
        path.name for path in exported.iterdir()
    }
    # chats are not pairs
    done = run("run_dpo.sh", folder, **TINY, HL_DATA="base/config.json")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
