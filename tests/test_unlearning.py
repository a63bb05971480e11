"""The losses of examples/unlearning raise the loss on one dataset by 1 nat, and leave that on another within 2 %."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import orjson
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from examples.unlearning import losses
from megatron.data.index.indexed_builder import IndexedDatasetBuilder
from megatron.parallel.context import ParallelContext
from megatron.tasks.loss_function import LossBatch
from tests import runs
from tests.ranks import RankPools
from tests.tasks.chats import write_chats

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "examples" / "unlearning"
LOSSES = EXAMPLE / "losses.py"


def commands() -> list[list[str]]:
    """Return the flags of each command of the README, without those of the model."""
    blocks = re.findall(r"```bash\n(.*?)```", (EXAMPLE / "README.md").read_text(), re.DOTALL)
    found = [block.split("-m megatron.train --config llama32_1b", 1)[1].replace("\\\n", " ") for block in blocks]
    return [shlex.split(words.replace("examples/unlearning", str(EXAMPLE))) for words in found]


def write_counting(prefix: Path, first: int, seed: int) -> Path:
    """Documents that count within 60 ids from `first`."""
    starts = np.random.default_rng(seed).integers(0, 60, 200)
    with IndexedDatasetBuilder(prefix, np.uint16) as builder:
        for start in starts:
            builder.add_document((first + (start + np.arange(40)) % 60).astype(np.uint16))
        builder.finalize()
    return prefix


@pytest.fixture(scope="module")
def trained(ranks: RankPools, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the data of the README's first command, and a model of it."""
    folder = tmp_path_factory.mktemp("unlearning")
    (folder / "data").mkdir()
    forget = write_counting(folder / "data" / "forget", 0, 1)
    retain = write_counting(folder / "data" / "retain", 60, 2)
    write_counting(folder / "data" / "heldout", 60, 3)
    flags = f"--train-data-path 0.5 {forget} 0.5 {retain} --train-iters 40 --save {folder / 'models' / 'llama'}"
    assert ranks(1)(runs.train_apart, [str(folder)], flags) == [""]
    return folder


@pytest.mark.parametrize(
    ("loss", "flags"), [("npo", "--train-iters 30"), ("gradient_difference", "--lr 1e-2 --train-iters 10")]
)
def test_what_is_forgotten_and_what_is_kept(ranks: RankPools, trained: Path, loss: str, flags: str) -> None:
    words = " ".join(commands()[0]).replace("losses.py:npo", f"losses.py:{loss}").replace("out/unlearned", loss)
    if loss != "npo":
        words = re.sub(r"--lora-\S+ \S+ ?", "", words)
    assert ranks(1)(runs.train_apart, [str(trained)], f"{words} {flags} --results-dir {loss}-results") == [""]
    before, *_, after = (row["metrics"] for row in runs.rows(trained / f"{loss}-results", "valid"))
    assert after["nll/0"] > before["nll/0"] + 1
    assert after["nll/1"] < 1.02 * before["nll/1"]


def test_the_trainer_is_fine_tuning(ranks: RankPools, tmp_path: Path) -> None:
    chats = write_chats(tmp_path / "chats", [9, 14, 12, 7], seed=1)
    flags = f"--vocab-size 256 --data-path {chats} --split 1,0,0 --num-epochs 2 --micro-batch-size 1"
    found: list[list[tuple[float, float]]] = []
    for task in ("sft", f"{EXAMPLE / 'trainer.py'}:CustomTrainer"):
        results = tmp_path / str(len(found))
        assert ranks(1)(runs.train, f"{flags} --task {task} --results-dir {results}") == [""]
        found.append([(row["lm_loss"], row["grad_norm"]) for row in runs.rows(results)])
    assert found[1] == [pytest.approx(step, rel=1e-5) for step in found[0]]
    assert len((EXAMPLE / "trainer.py").read_text().splitlines()) <= 20


def test_losses_are_their_formulas() -> None:
    """Two rows: a sample to forget of 3 labels with one of 2 to keep beside it; one to keep."""
    generator = torch.Generator().manual_seed(0)
    log_probs, reference = (-torch.rand(2, 5, generator=generator, dtype=torch.float64) for _ in range(2))
    weights, sources, begins = (
        torch.ones(2, 5),
        torch.ones(2, 5, dtype=torch.int64),
        torch.zeros(2, 5, dtype=torch.int64),
    )
    sources[0, :3], begins[0, 3:], weights[0, 0] = 0, 3, 0.0
    log_probs[0, 0] = torch.nan  # a label that does not count
    batch = LossBatch(sources, weights, sources, begins, torch.empty(0), ParallelContext.single())
    forget, retain = log_probs[0, 1:3], torch.cat([log_probs[0, 3:], log_probs[1]])
    base = torch.cat([reference[0, 3:], reference[1]])
    ratio = forget.sum() - reference[0, 1:3].sum()
    expected: dict[str, Tensor] = {
        "gradient_ascent": forget.sum(),
        "gradient_difference": forget.sum() - retain.sum(),
        "npo": -20 * F.logsigmoid(-0.1 * ratio) - retain.sum(),
        "near_reference": forget.sum() + ((base - retain).exp() - (base - retain) - 1).sum(),
    }
    for name, total in expected.items():
        more = [reference] if name in ("npo", "near_reference") else []
        found = getattr(losses, name)(log_probs, batch, *more)
        assert torch.where(weights == 0, 0.0, found).sum().item() == pytest.approx(total.item(), rel=1e-6), name


def real_data(folder: Path, test_data: Path) -> None:
    """Twelve passages of a book, other books, and parts of these that training does not see, in 2,048 tokens."""
    rows = [orjson.loads(row) for row in (test_data / "corpus_en.jsonl").read_bytes().splitlines()]
    rows = [row for row in rows if row["source"].startswith("gutenberg")]
    moby_dick = [{"text": row["text"][:1000]} for row in rows if row["source"] == "gutenberg:2701"]
    others = [{"text": row["text"]} for row in rows if row["source"] != "gutenberg:2701"]
    parts = {"forget": moby_dick[:12], "retain": others[60:], "heldout": others[:60]}
    for name, part in parts.items():
        (folder / f"{name}.jsonl").write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in part))
    learn = "--input retain.jsonl --vocab-size 2048 --output-dir tokenizer"
    subprocess.run([sys.executable, ROOT / "tools" / "train_tokenizer.py", *learn.split()], cwd=folder, check=True)
    for name in parts:
        words = f"--input {name}.jsonl --append-eod --tokenizer-type HFTokenizer --tokenizer-model tokenizer"
        words += f" --output-prefix {name}"
        subprocess.run([sys.executable, ROOT / "tools" / "preprocess_data.py", *words.split()], cwd=folder, check=True)


@pytest.mark.slow
def test_passages_of_a_book_are_forgotten_and_other_books_kept(
    ranks: RankPools, tmp_path: Path, test_data: Path
) -> None:
    real_data(tmp_path, test_data)
    model = "--config tiny_llama --num-layers 2 --hidden-size 128 --vocab-size 2048 --seq-length 128"
    model += " --make-vocab-size-divisible-by 128 --micro-batch-size 16 --global-batch-size 32 --lr-warmup-samples 0"
    data = "--train-data-path 0.3 forget_text_document 0.7 retain_text_document"
    flags = f"{model} {data} --lr 4e-3 --lr-warmup-samples 960 --train-iters 300 --save base"
    assert ranks(1)(runs.train_apart, [str(tmp_path)], flags, timeout_s=1800) == [""]
    model += f" {data} --valid-data-path 0.5 forget_text_document 0.5 heldout_text_document --load base --finetune"
    npo = "--lora-rank 16 --lora-alpha 32 --lora-target-modules all-linear --lr 3e-3 --train-iters 60"
    for loss, flags in (("npo", npo), ("gradient_difference", "--lr 3e-4 --train-iters 10")):
        words = f"{model} {flags} --lr-decay-style constant --eval-interval 10 --eval-iters 8 --loss {LOSSES}:{loss}"
        assert ranks(1)(runs.train_apart, [str(tmp_path)], f"{words} --results-dir {loss}", timeout_s=1800) == [""]
        before, *_, after = (row["metrics"] for row in runs.rows(tmp_path / loss, "valid"))
        assert after["nll/0"] > before["nll/0"] + 1, loss
        assert abs(after["nll/1"] / before["nll/1"] - 1) < 0.02, loss
