"""run_sft.sh: from a folder of transformers and a file of chats to such a folder again."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

from megatron.cli.launch import launch_command, parse_command_line
from megatron.launch.checks import warn_of_new_tokens
from megatron.launch.dialects.hl_requests import from_environment
from megatron.launch.plan import RefusedError
from megatron.launch.preflight import preflight
from megatron.options.config import Config
from megatron.options.model import LoraConfig
from megatron.settings.command_line import read_command_line
from tests import runs
from tests.finetuning_files import write_chats, write_model
from tests.launch.test_run_scripts import run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_model(tmp_path / "base")
    write_chats(tmp_path / "chats.jsonl")
    return tmp_path


TINY = {"HL_MODEL": "base", "HL_DEVICE": "cpu", "HL_SEQ_LEN": "128", "HL_MAX_BATCH_LEN": "256", "HL_GBS": "16"}


def test_a_dry_run_takes_the_model_from_its_folder_and_writes_nothing(folder: Path) -> None:
    plan = run("run_sft.sh", folder, HL_DRY_RUN="1", **TINY)
    assert plan.returncode == 0, plan.stderr
    for said in (
        *("Plan of sft_llama; nothing was started or written", "PP 1 x TP 1 x DP 1", "2 layers, hidden 32, 4 heads"),
        *("--config sft_llama", "--load base", "--tokenizer-model base", "--vocab-size 278", "--seq-length 128"),
        *("--data-path out/sft_base/ds_", "--save-hf out/sft_base/ds_", "--max-batch-len 256"),
    ):
        assert said in plan.stdout
    assert sorted(path.name for path in folder.iterdir()) == ["base", "chats.jsonl"]


def config_of(folder: Path, *flags: str, **variables: str) -> Config:
    given = TINY | {"HL_MODEL": str(folder / "base")} | variables
    return read_command_line(from_environment(given, "sft", list(flags)).train_flags).config


def test_adapters_have_a_recipe_of_their_own(folder: Path) -> None:
    names = {"HL_LORA_RANK": "8", "HL_LORA_TARGET_MODULES": "q_proj, v_proj", "HL_QUANTIZE_BASE": "nf4"}
    config = config_of(folder, **names)
    assert (config.optimizer.lr, config.training.global_batch_size, config.model.quantize_base) == (2e-4, 16, "nf4")
    expected = LoraConfig(lora_rank=8, lora_alpha=32, lora_dropout=0.05, lora_target_modules=("q_proj", "v_proj"))
    assert config.lora == expected
    assert config_of(folder, "--lora_rank", "8", "--lora-target-modules", "q_proj", "v_proj").lora == expected
    # as requested: none, or another recipe
    assert config_of(folder, "--lora-rank", "none", **names).optimizer.lr == 2e-5
    assert config_of(folder, HL_CONFIG="sft_llama", **names).optimizer.lr == 2e-5


def test_a_misspelt_or_wrong_variable_of_adapters_is_refused(folder: Path) -> None:
    wrong = {"HL_LORA_RNK": "8", "HL_LORA_RANK": "0", "HL_LORA_DROPOUT": "2", "HL_QUANTIZE_BASE": "int8"}
    with pytest.raises(RefusedError) as refusal:
        preflight(from_environment(TINY | wrong | {"HL_MODEL": str(folder / "base"), "HL_DRY_RUN": "1"}, "sft", []))
    for fault in (
        "unknown variable HL_LORA_RNK=8; did you mean HL_LORA_RANK?",
        "lora.lora_rank='0': input should be greater than 0",
        "lora.lora_dropout='2': input should be less than 1",
        "HL_QUANTIZE_BASE='int8' must be none or nf4",
    ):
        assert fault in refusal.value.faults


def refused(folder: Path, **variables: str) -> str:
    done = run("run_sft.sh", folder, **variables)
    assert done.returncode == 2
    assert sorted(path.name for path in folder.iterdir()) == ["base", "chats.jsonl"]
    return done.stderr


def test_everything_that_is_wrong_is_reported_at_once(folder: Path) -> None:
    said = refused(
        folder,
        **(TINY | {"HL_DATA": "none.jsonl", "HL_LLAMA_VER": "2", "HL_BUCKETING": "x", "HL_MAX_BATCH_LEN": "64"}),
        HL_NUM_EPOCHS="0",
    )
    for fault in (
        "HL_DATA=none.jsonl is not a file",
        "HL_LLAMA_VER=2 does not apply to this script; it belongs to scripts/run_llama.sh",
        "HL_BUCKETING='x' must be auto, off, octave or optimal",
        "HL_NUM_EPOCHS='0' must be a whole number, 1 or more",
        "max_batch_len=64 is less than seq_length=128",
    ):
        assert fault in said


def test_a_model_and_chats_are_needed(folder: Path) -> None:
    assert "HL_MODEL is not set; set it to the folder or the name on the hub" in refused(folder)
    assert "HL_DATA is not set; set it to a JSONL file of chats" in refused(folder, **TINY)


def test_a_variable_of_fine_tuning_does_not_apply_to_pretraining(tmp_path: Path) -> None:
    refused = run("run_llama.sh", tmp_path, HL_DRY_RUN="1", HL_NUM_EPOCHS="2")
    assert "HL_NUM_EPOCHS=2 does not apply to this script; it belongs to scripts/run_sft.sh" in refused.stderr


def test_the_trained_tokens_are_chosen_by_name(folder: Path) -> None:
    given = TINY | {"HL_DATA": "chats.jsonl"}
    plan = run("run_sft.sh", folder, HL_DRY_RUN="1", HL_TRAIN_ON="all", **given)
    assert "--train-on all" in plan.stdout.replace("'", "")
    assert "--train-on" not in run("run_sft.sh", folder, HL_DRY_RUN="1", HL_TRAIN_ON="assistant", **given).stdout
    assert "HL_TRAIN_ON='answers' must be assistant, all_but_system or all" in refused(
        folder, HL_TRAIN_ON="answers", **given
    )
    assert "HL_TRAIN_ON=all has no effect on the data in HL_DATA_OUTPUT_DIR" in refused(
        folder, HL_TRAIN_ON="all", HL_DATA_OUTPUT_DIR="data", **TINY
    )


def test_how_rows_are_read_is_in_the_plan_and_its_command_makes_the_same_plan(folder: Path) -> None:
    given = TINY | {"HL_MODEL": str(folder / "base"), "HL_DATA": str(folder / "chats.jsonl"), "HL_RESULTS_DIR": "r"}
    rows = {"HL_TOO_LONG": "split", "HL_TRAIN_ON": "all", "HL_IGNORE_COLUMNS": "history, 'my context'"}
    plan = preflight(from_environment(given | rows, "sft", []))
    assert plan.fine_tuning is not None
    assert plan.fine_tuning.too_long == "split"
    assert plan.fine_tuning.ignore_columns == ("history", "my context")
    words = launch_command(plan)
    request, _ = parse_command_line(words[words.index("--devices-per-node") :])
    assert not request.faults
    assert request.fine_tuning == dataclasses.replace(plan.fine_tuning, folder=None)
    plain = preflight(from_environment(given, "sft", []))
    assert {"--too-long", "--ignore-columns", "--train-on"}.isdisjoint(launch_command(plain))


@pytest.mark.parametrize(
    ("script", "variables", "fault"),
    [
        ("sft", {"HL_TOO_LONG": "cut"}, "HL_TOO_LONG='cut' must be drop, truncate or split"),
        ("sft", {"HL_IGNORE_COLUMNS": "'a"}, "cannot be read (No closing quotation); put a name with spaces in quotes"),
        ("dpo", {"HL_TOO_LONG": "split"}, "HL_TOO_LONG=split does not apply to this script"),
        (
            "sft",
            {"HL_TOO_LONG": "split", "HL_DATA": "", "HL_DATA_OUTPUT_DIR": "data"},
            "HL_TOO_LONG=split has no effect on the data in HL_DATA_OUTPUT_DIR",
        ),
        (
            "dpo",
            {"HL_IGNORE_COLUMNS": "history", "HL_DATA": "", "HL_DATA_OUTPUT_DIR": "data"},
            "HL_IGNORE_COLUMNS=history has no effect on the data in HL_DATA_OUTPUT_DIR",
        ),
    ],
)
def test_how_rows_are_read_is_refused_by_name_where_it_cannot_be(
    folder: Path, script: Any, variables: dict[str, str], fault: str
) -> None:
    given = TINY | {"HL_MODEL": str(folder / "base"), "HL_DATA": str(folder / "chats.jsonl")}
    assert fault in " ".join(from_environment(given | variables, script, []).faults)


def test_a_column_that_must_be_left_out_is_refused_under_the_variables_name(folder: Path) -> None:
    row = {"question": "What is it?", "answer": "A sum.", "context": "Two and two are to be added to a sum."}
    (folder / "rows.jsonl").write_text(json.dumps(row) + "\n")
    done = run("run_sft.sh", folder, **TINY, HL_DATA="rows.jsonl")
    assert done.returncode == 2
    assert "leave it out with --ignore-columns context" in done.stderr
    assert "(HL_IGNORE_COLUMNS sets --ignore-columns)" in done.stderr


@pytest.mark.parametrize(
    ("flags", "fault"),
    [
        ("--too-long cut", "--too-long cut: input should be 'drop', 'truncate' or 'split'"),
        ("--too-long split", "--too-long split needs --chats with a file"),
        ("--chats {chats} --too-long split -- --task preference", "--too-long split has no effect on pairs of answers"),
        ("--chats {chats} --train-on all -- --task preference", "--train-on all has no effect on pairs of answers"),
        ("--chats {folder} --ignore-columns a b", "--ignore-columns a b needs --chats with a file"),
    ],
)
def test_the_launchers_flags_for_rows_are_refused_where_they_have_no_effect(
    folder: Path, flags: str, fault: str
) -> None:
    words = flags.format(chats=folder / "chats.jsonl", folder=folder).split()
    request, _ = parse_command_line(words)
    assert fault in " ".join(request.faults)


def test_a_run_tokenizes_trains_on_a_layout_and_exports(folder: Path) -> None:
    write_chats(folder / "more chats.jsonl", 8)
    long = {"messages": [{"role": "user", "content": "count"}, {"role": "assistant", "content": "one two " * 200}]}
    with (folder / "more chats.jsonl").open("a") as chats:
        chats.write(json.dumps(long) + "\n")
    done = run(
        "run_sft.sh",
        folder,
        "--lr=1e-3",
        **(
            {"HL_DATA": "3 chats.jsonl 1 'more chats.jsonl'", "HL_CHAT_TEMPLATE": "chatml", "HL_RESULTS_DIR": "results"}
            | TINY
        ),
        HL_NUM_EPOCHS="2",
        HL_TP="2",
        HL_SAVE_SAMPLES="30",
    )
    assert done.returncode == 0, done.stderr
    results = folder / "results"
    # steps of 16 samples, 48 in each epoch; 30, 60 and 90 are passed by the second, the fourth and the last
    exports = sorted(path.name for path in (results / "hf_format").iterdir() if not path.name.startswith("."))
    assert exports == ["samples_32", "samples_48", "samples_64", "samples_96"]
    losses = [row["lm_loss"] for row in runs.rows(results)]
    assert losses[-1] < losses[1]
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(results / "hf_format" / "samples_96")
    tokenizer = transformers.AutoTokenizer.from_pretrained(results / "hf_format" / "samples_96")
    assert len(tokenizer) == model.config.vocab_size == 280  # <|im_start|> and <|im_end|> were added
    assert sorted(path.name for path in results.glob("data/*/data.json")) == ["data.json"] * 2
    left_out = r"\n8 chats in results/data/more chats/data, \d+ tokens at most; dropped, longer than 128 tokens: 1\n"
    assert re.search(left_out, done.stdout)
    assert "mix: results/data/chats/data: 72 samples (75.0%), " in done.stdout
    assert "mix: results/data/more chats/data: 24 samples (25.0%), " in done.stdout
    assert "3.00 epochs" in done.stdout


def test_several_files_are_datasets_of_one_mix(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    for name in ("b.jsonl", "other/chats.jsonl"):
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text("{}")
    given = {"HL_RESULTS_DIR": "r"}
    for data, expected in (
        ("chats.jsonl", "r/data/data"),
        ("0.7 chats.jsonl 0.3 b.jsonl", "0.7 r/data/chats/data 0.3 r/data/b/data"),
        ("chats.jsonl other/chats.jsonl", "r/data/chats/data r/data/chats_2/data"),
    ):
        plan = preflight(from_environment(TINY | given | {"HL_DATA": data}, "sft", []))
        assert " ".join(plan.config.data.data_path) == expected
        assert plan.fine_tuning is not None
        assert plan.fine_tuning.data == data


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (
            "0.7 chats.jsonl none.jsonl",
            "must be one file, files alone, or WEIGHT FILE pairs with weights above 0; put a",
        ),
        ("chats.jsonl 'b", "HL_DATA=chats.jsonl 'b No closing quotation"),
        ("1 chats.jsonl 2 none.jsonl", "HL_DATA=1 chats.jsonl 2 none.jsonl: none.jsonl is not a file; set it to"),
    ],
)
def test_a_mix_of_files_that_cannot_be_read_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, data: str, said: str
) -> None:
    monkeypatch.chdir(folder)
    with pytest.raises(RefusedError) as refusal:
        preflight(from_environment(TINY | {"HL_DATA": data, "HL_RESULTS_DIR": "r"}, "sft", []))
    assert [fault for fault in refusal.value.faults if said in fault], refusal.value.faults


def test_tokens_that_a_template_adds_are_not_frozen_unnoticed(folder: Path) -> None:
    adapted = config_of(folder, HL_LORA_RANK="8", HL_LORA_MODULES_TO_SAVE="embed_tokens")
    (warning,) = warn_of_new_tokens(adapted, 280)
    assert "adds 2 tokens, whose rows of output start alike and are frozen" in warning
    assert "--lora-modules-to-save embedding.word output" in warning
    assert not list(warn_of_new_tokens(adapted, 278))
    assert not list(warn_of_new_tokens(config_of(folder), 280))
    whole = config_of(folder, HL_LORA_RANK="8", HL_LORA_MODULES_TO_SAVE="embedding.word output")
    assert not list(warn_of_new_tokens(whole, 280))
