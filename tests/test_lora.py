"""LoRA from end to end, by the commands that a user types: run_sft.sh, PEFT's folder, a merged model."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.cli.data import preprocess_data, train_tokenizer
from megatron.cli.merging import merge_adapter
from tests import runs
from tests.finetuning_files import CHAT_TEMPLATE, write_chats, write_model
from tests.ranks import RankPools
from tests.tasks import chats

ROOT = Path(__file__).resolve().parent.parent
ANSWER_TOKENS = 16
TINY = (
    "--architecture llama --position-embedding-type rope --num-layers 2 --hidden-size 32 --ffn-hidden-size 64 "
    "--num-attention-heads 4 --num-query-groups 2 --max-position-embeddings 256 --vocab-size 278 --norm-epsilon 1e-6 "
    "--untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0 --seq-length 128 "
    "--make-vocab-size-divisible-by 128"
)
MODELS = {
    "llama": "--architecture llama --position-embedding-type rope --ffn-hidden-size 384 --num-query-groups 2 "
    "--untie-embeddings-and-output-weights",
    "bloom": "--architecture bloom --position-embedding-type alibi --embed-layernorm",
}
"""Of a size that TP 2 cuts into whole blocks of a 4-bit base."""
SIZE = (
    "--num-layers 2 --hidden-size 128 --num-attention-heads 4 --vocab-size 512 --hidden-dropout 0 --attention-dropout 0"
)


def run_script(script: str, folder: Path, *arguments: str, timeout_s: float = 120, **variables: str) -> str:
    """What a script prints; it must end with 0."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HL_")}
    done = subprocess.run(
        ["bash", str(ROOT / "scripts" / script), *arguments],
        cwd=folder,
        env=environment | {"PYTHON": sys.executable, "HL_DEVICE": "cpu", "HL_BF16": "0"} | variables,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def merge(base: Path, adapter: Path, folder: Path) -> Path:
    assert merge_adapter.main(["--base", str(base), "--adapter", str(adapter), "--save", str(folder)]) == 0
    return folder


def assert_answers_equal(ranks: RankPools, arguments: str, merged: Path, prompts: list[str], **models: Any) -> None:
    """Our adapters over their base, the merged model in transformers, and `models` say the same to each prompt."""
    import transformers

    encoder = transformers.AutoTokenizer.from_pretrained(merged)
    ids = [encoder(prompt)["input_ids"] for prompt in prompts]
    (answers,) = ranks(1)(chats.greedy, f"{arguments} --data-path none --train-iters 1 --finetune", ids, ANSWER_TOKENS)
    models["merged"] = transformers.AutoModelForCausalLM.from_pretrained(merged)
    for model in models.values():
        model.generation_config.eos_token_id = None  # as many tokens from each
        for prompt, answer in zip(ids, answers, strict=True):
            given = torch.tensor([prompt])
            said = model.generate(
                given, attention_mask=torch.ones_like(given), max_new_tokens=ANSWER_TOKENS, do_sample=False
            )
            assert answer == said[0, len(prompt) :].tolist()


def test_a_finetune_lora_file_trains_adapters_that_merge_to_what_was_trained(ranks: RankPools, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    write_model(tmp_path / "base", max_position_embeddings=256)
    write_chats(tmp_path / "chats.jsonl")
    lines = [
        *("model_id: base", "LoRA: {r: 4, alpha: 32, dropout: 0.05}", "data_path: chats.jsonl", "batch_size: 4"),
        *("gradient_accumulation_steps: 2", "num_epochs: 2", "save_dir: out", "lr: 1e-2", "weight_decay: 0", "seed: 1"),
    ]
    (tmp_path / "finetune_lora.yaml").write_text("\n".join(lines))
    run_script("run_sft.sh", tmp_path, "--config", "finetune_lora.yaml", HL_PP="2", HL_SEQ_LEN="128")
    rows = runs.rows(tmp_path / "out")
    assert [row["consumed_samples"] for row in rows] == list(range(8, 81, 8))
    assert rows[-1]["lm_loss"] < rows[0]["lm_loss"] - 0.1
    adapter = tmp_path / "out" / "hf_format" / "samples_80"
    assert {"r": 4, "lora_alpha": 32}.items() <= json.loads((adapter / "adapter_config.json").read_text()).items()
    merged = merge(tmp_path / "base", adapter, tmp_path / "merged")
    arguments = f"{TINY} --lora-rank 4 --lora-alpha 32 --load {tmp_path / 'out' / 'checkpoints'}"
    prompts = [f"<user>What is {number} plus {number}? Think well.<assistant>" for number in (3, 30)]
    assert_answers_equal(ranks, f"{arguments} --lora-base {tmp_path / 'base'}", merged, prompts)


# ---------------------------------------------------------------------------------------------------------------------
# Real chats


@pytest.fixture(scope="module", params=list(MODELS))
def pretrained(request: pytest.FixtureRequest, test_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with text, a tokenizer with a chat template, and a base of 150 steps, all by our own commands."""
    family, folder = request.param, tmp_path_factory.mktemp(request.param)
    corpus = test_data / "quickstart.jsonl"
    words = ["--input", str(corpus), "--vocab-size", "512", "--output-dir", str(folder / "tokenizer")]
    assert train_tokenizer.main(words) in (None, 0)
    words = ["--input", str(corpus), "--output-prefix", str(folder / "text"), "--append-eod", "--workers", "1"]
    words += ["--tokenizer-type", "HFTokenizer", "--tokenizer-model", str(folder / "tokenizer")]
    assert preprocess_data.main(words) == 0
    (folder / "tokenizer" / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    run_script(
        "run_llama.sh" if family == "llama" else "run_bloom13b.sh",
        folder,
        *f"{SIZE} {MODELS[family]} --eval-iters 0 --save-hf base --tokenizer-type HFTokenizer".split(),
        *("--tokenizer-model", "tokenizer", "--log-interval", "50"),
        timeout_s=900,
        HL_CONFIG=f"tiny_{family}",
        HL_DATA_DIR_ROOT=".",
        HL_DATA_FILE_PREFIX="text_text_document",
        HL_RESULTS_DIR="pretraining",
        HL_TRAIN_ITERS="150",
    )
    (folder / "base" / "samples_2400").rename(folder / "model")
    return folder


CHATS = {
    "HL_MODEL": "model",
    "HL_SEQ_LEN": "256",
    "HL_MAX_BATCH_LEN": "1024",
    "HL_GBS": "16",
    "HL_EVAL_INTERVAL": "1000",
}


def fine_tune(folder: Path, chats: Path, results: str, *flags: str, **variables: str) -> list[dict[str, Any]]:
    """Train adapters; return the rows of the run's metrics."""
    of_chats = {"HL_DATA": str(chats), "HL_RESULTS_DIR": results}
    words = ["--split", "9,1,0", "--eval-iters", "9", "--lr", "1e-2", *flags]
    run_script("run_sft.sh", folder, *words, timeout_s=1200, **CHATS, **of_chats, **variables)
    return [json.loads(line) for line in (folder / results / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_adapters_teach_a_pretrained_model_to_chat(ranks: RankPools, pretrained: Path, test_data: Path) -> None:
    transformers = pytest.importorskip("transformers")
    layout = {"HL_TP": "2", "HL_PP": "2", "HL_LORA_RANK": "16", "HL_NUM_EPOCHS": "4"}
    rows = fine_tune(pretrained, test_data / "sft_messages.jsonl", "sft", **layout)
    first, *_, last = [row["lm_loss"] for row in rows if row["kind"] == "valid"]
    assert last < 0.75 * first  # on the answers of held-out chats

    folders = (pretrained / "sft" / "hf_format").glob("samples_*")
    adapter = max(folders, key=lambda folder: int(folder.name.removeprefix("samples_")))
    merged = merge(pretrained / "model", adapter, pretrained / "merged")
    others = {}
    if importlib.util.find_spec("peft"):
        peft = importlib.import_module("peft")
        base = transformers.AutoModelForCausalLM.from_pretrained(pretrained / "model")
        others["peft"] = peft.PeftModel.from_pretrained(base, adapter)
    family = "llama" if pretrained.name.startswith("llama") else "bloom"
    arguments = f"{SIZE} {MODELS[family]} --seq-length 256 --lora-rank 16 --lora-alpha 32"
    arguments += f" --load {pretrained / 'sft' / 'checkpoints'} --lora-base {pretrained / 'model'}"
    with (test_data / "sft_messages.jsonl").open(encoding="utf-8") as file:
        asked = [json.loads(next(file))["messages"][0]["content"][:200] for _ in range(3)]
    assert_answers_equal(ranks, arguments, merged, [f"<user>{text}<assistant>" for text in asked], **others)


@pytest.mark.slow
def test_a_4_bit_base_learns_from_chats_on_layouts_as_on_one_rank(pretrained: Path, test_data: Path) -> None:
    lines = (test_data / "sft_messages.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (pretrained / "few.jsonl").write_text("".join(lines[:400]), encoding="utf-8")
    options = {"HL_LORA_RANK": "16", "HL_QUANTIZE_BASE": "nf4", "HL_LORA_DROPOUT": "0", "HL_NUM_EPOCHS": "3"}
    losses = {
        name: [
            row["lm_loss"]
            for row in fine_tune(pretrained, pretrained / "few.jsonl", name, HL_SAVE="0", **options, **layout)
            if "lm_loss" in row
        ]
        for name, layout in {"one": {}, "tp2": {"HL_TP": "2"}, "pp2": {"HL_PP": "2"}}.items()
    }
    assert len(losses["one"]) > 20
    assert losses["one"][-1] < 0.85 * losses["one"][0]
    # the 4-bit base is the same bit for bit; sums are added in another order
    for name in ("tp2", "pp2"):
        assert losses[name] == pytest.approx(losses["one"], rel=1e-5)


@pytest.mark.slow
def test_seven_ranks_train_adapters_as_one_does(tmp_path: Path) -> None:
    write_model(tmp_path / "base")
    write_chats(tmp_path / "chats.jsonl")
    given = {"HL_MODEL": "base", "HL_DATA": "chats.jsonl", "HL_SEQ_LEN": "128", "HL_LORA_RANK": "4"}
    losses = {}
    for ranks in (1, 7):  # a batch of 32, the preset's, and the 8 chats that are left of each epoch
        words = ["--lora-dropout", "0", "--num-epochs", "2"]
        results = f"dp{ranks}"
        run_script("run_sft.sh", tmp_path, *words, timeout_s=600, HL_DP=str(ranks), HL_RESULTS_DIR=results, **given)
        losses[ranks] = [row["lm_loss"] for row in runs.rows(tmp_path / results)]
    assert len(losses[1]) == 4
    assert losses[7] == pytest.approx(losses[1], rel=1e-5)
