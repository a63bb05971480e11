"""A user's own scripts under gaudi_spawn: none is replaced unsaid; a trainer in one is trained, or the remedy named."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from megatron.cli import gaudi_spawn
from megatron.launch.dialects import published_scripts
from megatron.launch.dialects.published_scripts import digest
from tests import runs
from tests.cli.test_gaudi_spawn import FINETUNE, LLAMA, SFT
from tests.cli.test_gaudi_spawn import trl as trl
from tests.cli.test_gaudi_spawn_runs import ONE, SEVEN, run
from tests.finetuning_files import write_chats, write_model
from tests.tasks.trainers import LIGHT

HEAD = "    def compute_loss(self, model, inputs, return_outputs=False):\n"
ASCENT = f"""
class CustomTrainer(BASE):
{HEAD}        input_ids, labels, attention_mask = inputs
        outputs = model(input_ids, labels=labels, attention_mask=attention_mask)
        loss = -outputs.loss
        return (loss, outputs) if return_outputs else loss
"""
# as the walk-through of the YAML file describes it
FINETUNE_PY = """
import hydra
from optimum.habana import GaudiTrainingArguments
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from dataloader import CustomTrainer
from data_module import TextDataset, custom_data_collator


@hydra.main(version_base=None, config_path="config", config_name="finetune")
def main(cfg):
    tokenizer = AutoTokenizer.from_pretrained(cfg.model_id)
    model = AutoModelForCausalLM.from_pretrained(cfg.model_id)
    if cfg.LoRA.r != 0:
        model = get_peft_model(model, LoraConfig(r=cfg.LoRA.r, lora_alpha=cfg.LoRA.alpha, task_type="CAUSAL_LM"))
    dataset = TextDataset(cfg.data_path, tokenizer=tokenizer, split=cfg.split)
    arguments = GaudiTrainingArguments(use_habana=True, use_lazy_mode=False, seed=cfg.seed)
    trainer = CustomTrainer(model=model, train_dataset=dataset, args=arguments, data_collator=custom_data_collator)
    model.config.use_cache = False
    trainer.train()


if __name__ == "__main__":
    main()
"""


def of_light(folder: Path, text: str = ASCENT) -> str:
    """The text of a file with a trainer that needs no transformers, but a file beside it."""
    (folder / "mine_base.py").write_text(LIGHT)
    return "from mine_base import Trainer\n" + text.replace("BASE", "Trainer")


def outcome(words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """The exit status of a command, and what it prints, the command of a plan last and on one line."""
    status = gaudi_spawn.main(words)
    shown = capsys.readouterr()
    assert "Traceback" not in shown.err
    return status, f"{shown.err}{shown.out}".replace("\\\n", "")


def test_a_trainer_that_only_dataloader_py_changes_is_trained_as_the_command_stands(
    trl: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (trl / "dataloader.py").write_text(of_light(trl))
    (trl / "finetune.py").write_text(FINETUNE_PY)
    published = {"finetune": (digest(FINETUNE_PY),)}
    monkeypatch.setattr(published_scripts, "PUBLISHED", published_scripts.PUBLISHED | published)
    for words in (ONE, SEVEN):
        status, said = outcome(words, capsys)
        assert status == 0, said
        assert "--trainer dataloader.py:CustomTrainer" in said.splitlines()[-1]
        note = "with its own compute_loss (line 4) in dataloader.py is trained, as by --trainer"
        assert note in " ".join(said.split())
    # code beside the class is not what the published file has: whatever it does would be left out
    (trl / "dataloader.py").write_text(of_light(trl) + "\n\ndef collate(samples):\n    return samples[::-1]\n")
    status, said = outcome(ONE, capsys)
    assert status == 2
    assert "Give -- --trainer dataloader.py:CustomTrainer" in " ".join(said.split())


def test_a_finetune_py_of_the_users_own_is_refused_with_the_flag_that_trains_by_its_trainer(
    trl: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (trl / "finetune.py").write_text(FINETUNE_PY)
    (trl / "dataloader.py").write_text(of_light(trl))
    status, said = outcome(ONE, capsys)
    assert status == 2
    assert "finetune.py has code of its own, which is not run here" in said
    found = "class CustomTrainer(Trainer) with its own compute_loss (line 4)"
    assert f"{found}. Give -- --trainer dataloader.py:CustomTrainer behind the command" in " ".join(said.split())
    for words in (ONE, SEVEN):
        status, said = outcome([*words, "--", "--trainer", "dataloader.py:CustomTrainer"], capsys)
        assert status == 0, said
        note = (
            "finetune.py has code of its own, of which the loss of --trainer dataloader.py:CustomTrainer alone is run"
        )
        assert note in " ".join(said.split())
        assert "--trainer dataloader.py:CustomTrainer" in said.splitlines()[-1]
    # what cannot be trained is named before anything starts
    (trl / "dataloader.py").write_text(of_light(trl).replace("-outputs.loss", "-self.state.epoch * outputs.loss"))
    status, said = outcome([*ONE, "--", "--trainer=./dataloader.py:CustomTrainer"], capsys)
    assert status == 2
    assert "uses self.state (line 7)" in said


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (
            f"class Mine(SFTTrainer):\n{HEAD}        return 0\n",
            "class Mine(SFTTrainer) with its own compute_loss (line 2)",
        ),
        ("class Mine(T):\n    def training_step(self, *a):\n        return 0\n", "its own training_step (line 2)"),
        ("def train():\n    loss.backward()\n", "a training loop (line 2: loss.backward)"),
        ("accelerator.backward(-loss)\n", "a training loop (line 1: accelerator.backward)"),
        ("SFTTrainer.compute_loss = mine\n", "SFTTrainer.compute_loss set to another function (line 1)"),
        ("t = SFTTrainer(model, compute_loss_func=mine)\n", "a compute_loss_func (line 1)"),
        (
            f"def main():\n    class M(T):\n{HEAD.replace('    def', '        def')}            return 0\n",
            "within a fun",
        ),
        ("print('another release')\n", "does what the published sft.py does. Write a changed loss"),
    ],
)
@pytest.mark.parametrize("script", ["sft.py", "run_lora_clm.py", "unlearn.py"])
def test_what_a_script_trains_with_is_named(
    trl: Path, script: str, text: str, found: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (trl / script).write_text(text)
    status, said = outcome([script, "--model_name_or_path", LLAMA, "--dataset_name", "chats.jsonl"], capsys)
    assert status == 2
    said = " ".join(said.split())
    if "another release" in text and script != "sft.py":
        assert f"{script} is not" in said
        return
    assert found in said
    # the remedy, where a class can be named
    assert ("--trainer sft.py:Mine" in said) == (script == "sft.py" and "class Mine" in text)


def test_a_copy_with_another_loss_is_not_trained_as_the_original(trl: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In a folder, under a link, without its ending, or as a package beside it."""
    own = of_light(trl)
    (trl / "mine").mkdir()
    (trl / "mine" / "sft.py").write_text(own)
    (trl / "sft.py").symlink_to(trl / "mine" / "sft.py")
    words = ["--model_name_or_path", LLAMA, "--dataset_name", "chats.jsonl"]
    for script in ("mine/sft.py", "sft.py", "sft", "./sft.py"):
        status, said = outcome([script, *words], capsys)
        assert status == 2
        assert "class CustomTrainer(Trainer) with its own compute_loss" in said, script
    status, said = outcome(["sft.py", *words, "--", "--trainer", "sft.py:CustomTrainer"], capsys)
    assert status == 0, said
    (trl / "sft.py").unlink()
    (trl / "dataloader").mkdir()
    (trl / "dataloader" / "__init__.py").write_text(own)
    assert "dataloader/__init__.py has code of its own" in outcome(ONE, capsys)[1]
    # two trainers, of which one is named
    (trl / "sft.py").write_text(own + own.replace("CustomTrainer", "Second"))
    status, said = outcome(["sft.py", *words, "--", "--trainer", "sft.py:Second"], capsys)
    assert status == 2
    assert "and --trainer names sft.py:Second, which alone is trained" in said


def test_a_trainer_is_only_for_scripts_that_train_by_the_cross_entropy(
    trl: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (trl / "mine.py").write_text(of_light(trl))
    status, said = outcome(
        shlex.split("dpo.py --model_name_or_path stack-llama-2 -- --trainer mine.py:CustomTrainer"), capsys
    )
    assert status == 2
    assert "task=preference has a loss of its own; leave one out" in said
    assert outcome([*SFT.split(), "--", "--trainer", "mine.py:CustomTrainer"], capsys)[0] == 0


OVERRIDES = [
    ("batch_size=2 LoRA.r=16 lr=2e-4", {"--lora-rank": "16", "--lr": "2e-4"}, ""),
    ("++seed=7 +num_epochs=2", {}, "'+num_epochs=2' adds a key that the file has; write num_epochs=2"),
    ("++seed=7 ~weight_decay", {"--seed": "7"}, ""),
    ("~seed=42", {}, ""),
    ("~seed=43", {}, "'~seed=43' takes out seed=43, and the file has 42"),
    ("'data_path=[0.7, chats.jsonl,0.3,chats.jsonl]'", {}, ""),
    ("'save_dir=\"a b,c\"'", {"--results-dir": "a b,c"}, ""),
    ("save_dir=${split}-run", {"--results-dir": "full-run"}, ""),
    ("save_dir=${nothing}", {}, "save_dir: ${nothing} refers to no key of the file"),
    ("save_dir=${save_dir}", {}, "save_dir: ${save_dir} refers to no key of the file"),
    ("learning_rate=1", {}, "'learning_rate=1' is not a key of the file; write +learning_rate=1 to add it"),
    ("batchsize=1", {}, "'batchsize=1' is not a key of the file; did you mean batch_size?"),
    ("+model.lr=1e-4", {}, "unknown key model.lr; "),
    ("LoRA.r.x=1", {}, "'LoRA.r.x=1' is not a key of the file"),
    ("lr=1e-4,2e-4", {}, "'lr=1e-4,2e-4' gives several values, a sweep"),
    ("lr=choice(1,2)", {}, "calls a function of Hydra's; write the value itself"),
    ("model/llama=big", {}, "chooses another file of a group"),
    ("hydra.run.dir=out", {}, ""),
    ("--multirun", {}, "--multirun=True is not supported: start a command for each value"),
    ("-m", {}, "--multirun=True is not supported"),
    ("--lr=1", {}, "unknown flag --lr of finetune.py"),
    ("LoRA={r:4,alpha:8,dropout:0}", {"--lora-rank": "4", "--lora-alpha": "8"}, ""),
    ("LoRA.r=x", {}, "LoRA.r='x' must be a whole number, 0 or more"),
]


@pytest.mark.parametrize(("words", "flags", "fault"), OVERRIDES)
def test_overrides_are_read_as_hydra_reads_them(
    trl: Path, words: str, flags: dict[str, str], fault: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, said = outcome([*ONE, *shlex.split(words)], capsys)
    assert status == (2 if fault else 0), said
    assert fault in said
    ran = shlex.split(said.splitlines()[-1]) if status == 0 else []
    for name, value in flags.items():
        # the last one counts
        assert ran[len(ran) - 1 - ran[::-1].index(name) + 1] == value, said
    if "hydra" in words:
        assert "hydra.run.dir=out has no effect: Hydra is not run" in " ".join(said.split())


@pytest.mark.slow
def test_ascent_of_the_walk_through_raises_the_loss_of_what_is_forgotten(tmp_path: Path) -> None:
    """With transformers' own Trainer under the name of optimum-habana's, which is not installed."""
    pytest.importorskip("transformers")
    write_model(tmp_path / LLAMA, max_position_embeddings=4096)
    write_chats(tmp_path / "chats.jsonl", 24)
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "ds_config.json").write_text(json.dumps({"zero_optimization": {"stage": 1}}))
    (tmp_path / "config" / "finetune_lora.yaml").write_text(FINETUNE)
    text = "import torch\nfrom optimum.habana import GaudiTrainer\n" + ASCENT.replace("BASE", "GaudiTrainer")
    (tmp_path / "dataloader.py").write_text(text)
    words = [*ONE, "num_epochs=8", "lr=1e-2", "LoRA.dropout=0.0"]
    found = []
    for name, sign in (("ascent", "-"), ("descent", "")):
        (tmp_path / "dataloader.py").write_text(text.replace("-outputs", f"{sign}outputs"))
        said = run(tmp_path, [*words, f"save_dir={name}"])
        assert "is trained, as by --trainer" in " ".join(said.split())
        found.append([row for row in runs.rows(tmp_path / name) if row["kind"] == "train"])
    ascent, descent = found
    nll = [row["metrics"]["nll"] for row in ascent]
    assert nll[-1] > nll[0] + 0.5
    assert [row["lm_loss"] for row in ascent] == pytest.approx([-each for each in nll], rel=1e-3)
    assert descent[-1]["lm_loss"] < descent[0]["lm_loss"]
    assert nll[0] == pytest.approx(descent[0]["lm_loss"], rel=1e-3)
    # the user's own finetune.py, and two ranks
    (tmp_path / "finetune.py").write_text(FINETUNE_PY)
    assert "Give -- --trainer dataloader.py:CustomTrainer" in " ".join(run(tmp_path, words, status=2).split())
    two = [
        "--world_size",
        "2",
        *words,
        "batch_size=2",
        "save_dir=two",
        "--",
        "--trainer",
        "dataloader.py:CustomTrainer",
    ]
    (tmp_path / "dataloader.py").write_text(text)
    run(tmp_path, two)
    again = [row["lm_loss"] for row in runs.rows(tmp_path / "two") if row["kind"] == "train"]
    assert again == pytest.approx([row["lm_loss"] for row in ascent], rel=1e-3)
