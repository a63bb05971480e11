"""The guides' steps, run by gaudi_spawn commands on CPU ranks with a tiny model: SFT, merge, DPO, merge, generation."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from megatron.data.index.indexed import IndexedDataset
from tests import runs
from tests.cli.test_gaudi_spawn import FINETUNE, LLAMA, PAGE, PAIRED, ZERO3, commands
from tests.finetuning_files import write_chats, write_model
from tests.ranks import HANG_S

ROOT = Path(__file__).resolve().parents[2]
SFT, MERGE_SFT, DPO, MERGE_DPO, GENERATE, ONE, SEVEN = commands(PAGE)


def run(folder: Path, words: list[str], *, status: int = 0, **changed: str) -> str:
    """Run a command with some values changed (`world_size="2"`), and return its output, stderr included."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HL_")}
    environment |= {"HL_DEVICE": "cpu", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment["DEEPSPEED_HPU_ZERO3_SYNC_MARK_STEP_REQUIRED"] = "1"
    done = subprocess.run(
        [sys.executable, "-m", "megatron.gaudi_spawn", *with_values(words, changed)],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=HANG_S,
    )
    assert done.returncode == status, done.stdout
    assert "Traceback" not in done.stdout
    return done.stdout


def with_values(words: list[str], changed: Mapping[str, str]) -> list[str]:
    """The words with other values of some flags, each of which they have."""
    words = list(words)
    for name, value in changed.items():
        place = next(number for number, word in enumerate(words) if word.split("=")[0] == f"--{name}")
        joined = "=" in words[place]
        words[place if joined else place + 1] = f"--{name}={value}" if joined else value
    return words


def write_examples(folder: Path, rows: list[dict[str, str]]) -> Path:
    """The folder trl of the guides, with a model, the paired dataset in two files a part, and the ZeRO-3 file."""
    trl = folder / "trl"
    write_model(trl / LLAMA, num_key_value_heads=4, max_position_embeddings=1024)
    tokenizer = trl / LLAMA / "tokenizer_config.json"  # a base model has no chat template
    config = {name: value for name, value in json.loads(tokenizer.read_text()).items() if name != "chat_template"}
    tokenizer.write_text(json.dumps(config))
    for part in ("finetune", "rl"):
        for number in range(2):
            path = trl / PAIRED / "data" / part / f"train-0000{number}-of-00002.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(json.dumps(row) + "\n" for row in rows[number::2]))
    (folder / "language-modeling").mkdir()
    (folder / "language-modeling" / "llama2_ds_zero3_config.json").write_text(json.dumps(ZERO3))
    return trl


def made_up(count: int) -> list[dict[str, str]]:
    return [
        {
            "question": f"What is {number} plus {number}, if you think of it well and without haste?",
            "response_j": f"It is {2 * number}, and nothing else.",
            "response_k": f"It may be {number}, or it may not.",
        }
        for number in range(count)
    ]


def losses(folder: Path) -> list[float]:
    return [row["lm_loss"] for row in runs.rows(folder) if row["kind"] == "train"]


def test_sft_and_its_merge_run_on_two_ranks(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    trl = write_examples(tmp_path, made_up(24))
    printed = run(trl, SFT, world_size="2", max_steps="2", warmup_steps="1", logging_steps="1")
    assert "DEEPSPEED_HPU_ZERO3_SYNC_MARK_STEP_REQUIRED=1 goes to every rank" in printed
    assert printed.count("12 chats in sft/data/") == 2
    # every token of the question and the answer is trained, but the first, which nothing precedes
    tokenizer = tokenizers.Tokenizer.from_file(str(trl / LLAMA / "tokenizer.json"))
    texts = [f"Question: {row['question']}\n\nAnswer: {row['response_j']}<|endoftext|>" for row in made_up(24)]
    found = [IndexedDataset(path.with_suffix("")) for path in sorted((trl / "sft" / "data").rglob("data*.idx"))]
    ids = [dataset.read(number).tolist() for dataset in found[::2] for number in range(len(dataset))]
    trained = [dataset.read(number).tolist() for dataset in found[1::2] for number in range(len(dataset))]
    assert sorted(ids) == sorted(tokenizer.encode(text).ids for text in texts)
    assert trained == [[0] + [1] * (len(sample) - 1) for sample in ids]
    [export] = (trl / "sft" / "hf_format").glob("samples_*")
    assert export.name == "samples_8"  # 2 steps of 2 ranks x 1 x 2
    assert json.loads((export / "adapter_config.json").read_text())["target_modules"] == ["q_proj", "v_proj"]
    printed = run(trl, MERGE_SFT)
    assert "adapter: sft/hf_format/samples_8, the newest export" in printed
    assert (trl / "sft" / "final_merged_checkpoint" / "tokenizer.json").is_file()


@pytest.mark.slow
def test_the_whole_guide_runs_on_real_pairs(tmp_path: Path, test_data: Path) -> None:
    lines = (test_data / "dpo_pairs.jsonl").read_text(encoding="utf-8").splitlines()
    pairs = [pair for pair in map(json.loads, lines) if all(isinstance(pair[key], str) for key in pair)][:80]
    keys = {"question": "prompt", "response_j": "chosen", "response_k": "rejected"}
    trl = write_examples(tmp_path, [{key: pair[theirs][:120] for key, theirs in keys.items()} for pair in pairs])
    run(trl, SFT, world_size="4", max_steps="12", warmup_steps="3", logging_steps="1", learning_rate="1e-2")
    of_sft = losses(trl / "sft")
    assert len(of_sft) == 12
    assert of_sft[-1] < of_sft[0]
    run(trl, MERGE_SFT)
    small = ["--max_steps", "6", "--warmup_steps", "1", "--logging_steps", "1", "--learning_rate", "5e-3"]
    printed = run(trl, [*DPO, *small], world_size="2")
    unmatched = set(re.findall(r"lora_target_modules=(\w+) matches no", printed))
    assert unmatched == {"out_proj", "fc_in", "fc_out", "wte"}
    margins = [row["metrics"]["rewards/margins"] for row in runs.rows(trl / "dpo")]
    assert len(margins) == 6
    assert margins[0] == 0  # the reference is the merged model itself
    assert margins[-1] != 0  # that DPO learns is the claim of tests/test_dpo.py
    # the guide's own last merge, onto another base, says so
    words = with_values(MERGE_DPO, {"base_model_name": LLAMA, "output_name": "wrong-base"})
    assert "trl/sft/final_merged_checkpoint: make sure that" in run(trl, words)
    assert "was trained on" not in run(trl, MERGE_DPO)
    texts = trl.parent / "text-generation"
    texts.mkdir()
    words = with_values(GENERATE, {"model_name_or_path": "../trl/stack-llama-2/", "max_new_tokens": "8"})
    found = [re.findall(r"^Here is my prompt.+", run(texts, words, world_size=count), re.M) for count in ("2", "1")]
    assert len(found[0]) == 1
    assert found[0] == found[1]


@pytest.mark.slow
def test_a_finetune_lora_yaml_runs_on_three_ranks_and_on_one(tmp_path: Path) -> None:
    write_model(tmp_path / LLAMA, max_position_embeddings=4096)
    write_chats(tmp_path / "chats.jsonl", 24)
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "ds_config.json").write_text(json.dumps({"zero_optimization": {"stage": 1}}))
    yaml = tmp_path / "config" / "finetune_lora.yaml"
    found = []
    for name, words in (("one", ONE), ("three", with_values(SEVEN, {"world_size": "3"}))):
        batch = 6 if name == "one" else 2  # the same samples in a step
        text = FINETUNE.replace("num_epochs: 10", "num_epochs: 1").replace("save_dir: save_dir", f"save_dir: {name}")
        yaml.write_text(text.replace("batch_size: 4", f"batch_size: {batch}").replace("dropout: 0.05", "dropout: 0.0"))
        run(tmp_path, words)
        assert (tmp_path / name / "hf_format" / "samples_24" / "adapter_model.safetensors").is_file()
        found.append(losses(tmp_path / name))
    assert len(found[0]) == 4
    assert found[0] == pytest.approx(found[1], rel=1e-3)  # bf16 sums in another order


def test_values_of_a_command_are_changed_where_they_stand() -> None:
    assert with_values(shlex.split("--a 1 --b=2 --c"), {"a": "3", "b": "4"}) == ["--a", "3", "--b=4", "--c"]
