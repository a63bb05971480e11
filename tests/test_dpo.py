"""Preference training from end to end: the walk-through of docs/guides/preference.md as it is typed, on real data."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from megatron.cli.data import preprocess_data, train_tokenizer
from tests import runs
from tests.finetuning_files import CHAT_TEMPLATE
from tests.ranks import RankPools
from tests.tasks import pairs
from tests.test_lora import MODELS, assert_answers_equal, run_script
from tests.test_readme import ROOT, run

SIZE = (
    f"{MODELS['llama']} --num-layers 2 --hidden-size 128 --num-attention-heads 4 --vocab-size 4096 "
    "--hidden-dropout 0 --attention-dropout 0 --max-position-embeddings 1024"
)
ON_CPU = {"HL_DEVICE": "cpu", "HL_BF16": "0"}


def commands() -> list[str]:
    """The bash blocks of the walk-through."""
    page = (ROOT / "docs" / "guides" / "preference.md").read_text(encoding="utf-8")
    section = page.split("## From chats to preferences, step by step\n", 1)[1].split("\n## ", 1)[0]
    return re.findall(r"```bash\n(.*?)```", section, re.S)


@pytest.fixture(scope="module")
def checkout(test_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout with chats, pairs, and a base of 300 steps in models/base, made by our own commands."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("tools", "scripts", "megatron"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "chats.jsonl").symlink_to(test_data / "sft_messages.jsonl")
    (folder / "pairs.jsonl").symlink_to(test_data / "dpo_pairs.jsonl")
    lines = (test_data / "corpus_en.jsonl").read_bytes().splitlines(keepends=True)[:300]
    (folder / "corpus.jsonl").write_bytes(b"".join(lines) + (test_data / "corpus_multi.jsonl").read_bytes())
    words = ["--input", str(folder / "corpus.jsonl"), "--vocab-size", "4096", "--output-dir"]
    assert train_tokenizer.main([*words, str(folder / "tokenizer")]) in (None, 0)
    generation = "{% if add_generation_prompt %}<assistant>{% endif %}"
    (folder / "tokenizer" / "chat_template.jinja").write_text(CHAT_TEMPLATE + generation)
    words = ["--input", str(folder / "corpus.jsonl"), "--output-prefix", str(folder / "text"), "--append-eod"]
    words += ["--tokenizer-type", "HFTokenizer", "--tokenizer-model", str(folder / "tokenizer"), "--workers", "1"]
    assert preprocess_data.main(words) == 0
    run_script(
        "run_llama.sh",
        folder,
        *f"{SIZE} --global-batch-size 8 --micro-batch-size 4 --eval-iters 0 --save-hf exports".split(),
        *"--log-interval 50 --tokenizer-type HFTokenizer --tokenizer-model tokenizer".split(),
        timeout_s=1200,
        HL_CONFIG="tiny_llama",
        HL_DATA_DIR_ROOT=".",
        HL_DATA_FILE_PREFIX="text_text_document",
        HL_RESULTS_DIR="pretraining",
        HL_SEQ_LEN="512",
        HL_TRAIN_ITERS="300",
    )
    (folder / "models").mkdir()
    (folder / "exports" / "samples_2400").rename(folder / "models" / "base")
    return folder


@pytest.fixture(scope="module")
def trained(checkout: Path) -> Path:
    """The checkout after the walk-through; the last block prints an answer of the final folder by transformers."""
    pytest.importorskip("transformers")
    *steps, answer = commands()
    assert len(steps) == 2
    for step in steps:
        run(step, checkout, timeout_s=2400, **ON_CPU)
    assert "models/dpo says: " in run(answer, checkout, 300, **ON_CPU)
    return checkout


@pytest.mark.slow
def test_the_final_folder_says_what_was_trained(ranks: RankPools, trained: Path) -> None:
    arguments = (
        f"{SIZE} --seq-length 512 --lora-rank 8 --lora-alpha 16 --load {trained / 'out' / 'dpo' / 'checkpoints'}"
    )
    with (trained / "chats.jsonl").open(encoding="utf-8") as file:
        asked = [json.loads(next(file))["messages"][0]["content"][:200] for _ in range(3)]
    prompts = [f"<user>{text}<assistant>" for text in asked]
    arguments += f" --lora-base {trained / 'models' / 'sft'}"
    assert_answers_equal(ranks, arguments, trained / "models" / "dpo", prompts)


def margins_and_accuracy(results: Path) -> tuple[list[float], float]:
    """Margins of the validations, and the last one's accuracy: 202 held-out pairs."""
    rows = [row["metrics"] for row in runs.rows(results, "valid")]
    return [row["rewards/margins"] for row in rows], rows[-1]["rewards/accuracies"]


@pytest.mark.slow
def test_adapters_tell_held_out_pairs_apart(trained: Path) -> None:
    margins, accuracy = margins_and_accuracy(trained / "out" / "dpo")
    assert len(margins) == 4
    assert margins[0] == 0
    assert margins[0] < margins[1] < margins[3]
    assert accuracy > 0.55


@pytest.mark.slow
def test_a_whole_model_tells_held_out_pairs_apart_better_and_better(trained: Path) -> None:
    words = commands()[1].split("python tools/merge_adapter.py", 1)[0].replace("out/dpo", "out/whole")
    words = words.replace("HL_LR=1e-3", "HL_LR=3e-5 HL_LORA_RANK=none").replace("HL_LORA_DROPOUT=0 ", "")
    run(words, trained, timeout_s=2400, **ON_CPU)
    margins, accuracy = margins_and_accuracy(trained / "out" / "whole")
    assert margins[0] == 0
    assert margins == sorted(margins)
    assert accuracy > 0.6


def without_times(rows: list[dict[str, Any]]) -> dict[int, Any]:
    return {row["iteration"]: (row["lm_loss"], row["metrics"]) for row in rows}


@pytest.mark.slow
@pytest.mark.parametrize("layout", [{"HL_DP": "2"}, {"HL_TP": "2"}], ids=["same layout", "other layout"])
def test_a_stopped_run_goes_on(trained: Path, layout: dict[str, str]) -> None:
    """Bit for bit on its layout, within rounding on another: the first steps of the walk-through's own run."""
    (_, step) = commands()[:2]
    stopped = f"out/stopped_{next(iter(layout))}"
    words = step.split("python tools/merge_adapter.py", 1)[0].replace("out/dpo", stopped)
    run(words, trained, timeout_s=1200, HL_EXIT_INTERVAL="3", **ON_CPU)
    other = words.replace("HL_DP=2", " ".join(f"{name}={value}" for name, value in layout.items()))
    run(other, trained, timeout_s=1200, HL_EXIT_INTERVAL="6", **ON_CPU)
    found, whole = (without_times(runs.rows(trained / name)) for name in (stopped, "out/dpo"))
    assert sorted(found) == [1, 2, 3, 4, 5, 6]
    for iteration, (loss, metrics) in found.items():
        there = whole[iteration]
        if layout == {"HL_DP": "2"}:
            assert (loss, metrics) == there
        else:
            assert loss == pytest.approx(there[0], rel=1e-5)
            assert metrics == pytest.approx(there[1], rel=1e-4, abs=1e-4)


def test_a_tiny_model_learns_and_goes_on_on_another_layout(ranks: RankPools, tmp_path: Path) -> None:
    """Preferred answers have even tokens, and held-out pairs show it. A run stopped on one rank goes on on two."""
    data = pairs.write_pairs(tmp_path / "pairs", pairs.pairs_by_parity(60))
    flags = "--task preference --split 7,3,0 --num-epochs 3 --micro-batch-size 1 --vocab-size 250 --seq-length 32 "
    flags += "--global-batch-size 7 --hidden-dropout 0 --attention-dropout 0 --architecture llama --data-path "
    flags += f"{data} --position-embedding-type rope --lora-rank 4 --lora-alpha 8 --lr 4e-2 --lr-decay-style constant "
    flags += "--eval-interval 6 --eval-iters 3 --lora-target-modules all-linear lm_head"
    whole, parts = (f"{flags} --save {tmp_path / name}/saved --results-dir {tmp_path / name}" for name in ("a", "b"))
    assert ranks(1)(runs.train, whole) == [""]
    assert ranks(1)(runs.train, f"{parts} --exit-interval 5") == [""]
    assert ranks(2)(runs.train, f"{parts} --tensor-model-parallel-size 2") == ["", ""]
    metrics = [row["metrics"] for row in runs.rows(tmp_path / "a", "valid")]
    assert metrics[-1]["rewards/accuracies"] > 0.9
    margins = [row["rewards/margins"] for row in metrics]
    assert margins == sorted(margins)
    assert margins[-1] > 0.1
    log = (tmp_path / "a" / "train.log").read_text()
    assert log.count(" | sigmoid loss value: ") == len(margins)
    assert "lm loss" not in log
    found, expected = (without_times(runs.rows(tmp_path / name)) for name in ("b", "a"))
    assert list(found) == list(expected) == list(range(1, 19))
    for iteration in range(1, 8):  # later, rounding has grown in Adam's small moments
        assert found[iteration][0] == pytest.approx(expected[iteration][0], rel=1e-5)
        assert found[iteration][1] == pytest.approx(expected[iteration][1], rel=1e-4, abs=1e-5)
