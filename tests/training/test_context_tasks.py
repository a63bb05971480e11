"""Every task on ranks that share rows of tokens, against one process: losses, norms, metrics and validations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.data.index.indexed_builder import IndexedDatasetBuilder
from tests import runs
from tests.ranks import RankPools
from tests.tasks import chats, pairs

MODEL = (
    "--architecture llama --position-embedding-type rope --hidden-size 64 --vocab-size 250 --seq-length 32 "
    "--micro-batch-size 1 --hidden-dropout 0 --attention-dropout 0 --lr 0.3 --lr-decay-style constant --optimizer sgd "
    "--sgd-momentum 0 --weight-decay 0"
)
LORA = "--lora-rank 4 --lora-alpha 8 --lora-dropout 0 --load {folder}/base --finetune"
VOCABULARY = "--lora-target-modules q_proj v_proj embed_tokens lm_head"
SFT = "--task sft --data-path {data}/chats --global-batch-size 6"
PAIRS = "--task preference --data-path {data}/pairs --global-batch-size 6 --beta 0.5 --max-batch-len 80"
OWN = "--data-path {data}/text --loss {file}"
CASES = {
    "pretrain": "--data-path {data}/text --label-smoothing-factor 0.1 --micro-batch-size 2",
    "neftune": f"{SFT} --neftune-noise-alpha 5",
    "sft": f"{SFT} --max-batch-len 48",
    "sft rows": f"{SFT} --packing dataset --micro-batch-size 2",
    "sft padded": f"{SFT} --packing none --bucketing octave --micro-batch-size 2",
    "dpo": f"{PAIRS} --ld-alpha 0.5",
    "dpo base": f"{PAIRS} {LORA}",
    "dpo buckets": f"{PAIRS} --bucketing octave --micro-batch-size 1 --sft-weight 0.3",
    "kto": f"{PAIRS} --preference-loss kto",
    "kto base": f"{PAIRS} --preference-loss kto {LORA}",
    "orpo": f"{PAIRS} --preference-loss orpo",
    "log_probs": f"{OWN}:random_weights",
    "rows": f"{OWN}:of_rows {LORA}",
    "teacher": f"{OWN}:taught --teacher {{teacher}}",
    "lora": f"{SFT} {LORA} {VOCABULARY}",
    "dora": f"{SFT} {LORA} {VOCABULARY} --use-dora",
    "pissa": f"{SFT} {LORA} --lora-init pissa --use-rslora",
    "4 bits": f"{SFT} {LORA} --quantize-base nf4",
}
"""By their names: the options of the tasks."""

QUICK = ("pretrain", "sft", "sft padded", "dpo", "kto base", "rows", "teacher", "dora")
Expected = Callable[[Sequence[str]], dict[str, list[dict[str, Any]]]]
STEPS = "--train-iters 3 --eval-interval 2 --eval-iters 2"


def random_weights(log_probs: Any, batch: Any) -> Any:
    """Cross-entropy of labels with random weights, and metrics of each reduction."""
    import torch

    # the stream is that of the rank's rows
    drawn = torch.rand(log_probs.shape)
    return -log_probs * drawn, {"drawn": drawn, "likeliest": log_probs, "labels": torch.ones_like(drawn)}


random_weights.metrics = {"drawn": "mean", "likeliest": "max", "labels": "sum"}  # type: ignore[attr-defined]


def of_rows(rows: Any, batch: Any, reference: Any) -> Any:
    """A loss of whole rows, which no sum over places is."""
    return ((rows - reference).mean(1) - 0.1).square() - rows.mean(1)


def taught(log_probs: Any, batch: Any, reference: Any, teacher: Any) -> Any:
    """Cross-entropy of a teacher's tokens, near the model at the start."""
    return 0.1 * (log_probs - reference).square() - (teacher.log_probs.exp() * teacher.student_log_probs).sum(-1)


@pytest.fixture(scope="module")
def folder(ranks: RankPools, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data of each kind, and a base model."""
    folder = tmp_path_factory.mktemp("context")
    runs.write_dataset(folder / "text", vocabulary=250)
    chats.write_chats(folder / "chats", chats.some_lengths(40, 33))
    pairs.write_pairs(folder / "pairs", pairs.some_pairs(40, 32))
    flags = f"{MODEL} --data-path {folder / 'text'} --train-iters 2 --save {folder / 'base'}"
    assert ranks(1)(runs.train, flags) == [""]
    flags = f"{MODEL} {STEPS} --data-path {folder / 'text'} --load {folder / 'base'} --skip-train --teacher-top-k 5"
    assert ranks(1)(runs.train, flags) == [""]
    return folder


def results_of(
    ranks: RankPools, folder: Path, cases: Sequence[str], world_size: int = 1, layout: str = ""
) -> dict[str, list[dict[str, Any]]]:
    """The rows of the steps and of the validations of each case."""
    places = {name: folder / f"{world_size} {layout} {name}".replace(" ", "_") for name in cases}
    for name, place in places.items():
        place.mkdir()
        # what a run computes beside its data is its own: stored references
        for file in folder.glob("*.[bi]*"):
            (place / file.name).symlink_to(file)
        teacher = " ".join(map(str, folder.glob("text.teacher-*")))
        given = CASES[name].format(folder=folder, data=place, file=__file__, teacher=teacher)
        # one task each: the ranks let go of a run's process groups at the end of a task
        flags = f"{MODEL} {STEPS} {given} {layout} --results-dir {place}"
        assert ranks(world_size)(runs.train, flags) == [""] * world_size
    return {name: [row for kind in ("train", "valid") for row in runs.rows(places[name], kind)] for name in cases}


def assert_equal(found: dict[str, list[dict[str, Any]]], expected: dict[str, list[dict[str, Any]]]) -> None:
    """Within 1e-6; metrics of log-ratios within 1e-6 of the log-probabilities whose differences they are."""
    faults: list[tuple[Any, ...]] = []
    for name, rows in expected.items():
        for mine, row in zip(found[name], rows, strict=True):
            for key in ("lm_loss", "grad_norm", "num_tokens", "perplexity"):
                one, other = (numbers.get(key) or 0.0 for numbers in (mine, row))
                if one != pytest.approx(other, rel=1e-6):
                    faults.append((name, row["kind"], row["iteration"], key, one, other))
            metrics = row.get("metrics") or {}
            size = max(map(abs, metrics.values()), default=0.0)
            if (mine.get("metrics") or {}) != pytest.approx(metrics, rel=1e-6, abs=1e-6 * size):
                faults.append((name, row["kind"], row["iteration"], mine["metrics"], metrics))
    assert not faults, "\n".join(map(str, faults))


@pytest.fixture(scope="module")
def expected(ranks: RankPools, folder: Path) -> Expected:
    """Return a function that returns the numbers of one process for some cases."""
    known: dict[str, list[dict[str, Any]]] = {}

    def of(cases: Sequence[str]) -> dict[str, list[dict[str, Any]]]:
        known.update(results_of(ranks, folder, [name for name in cases if name not in known]))
        return {name: known[name] for name in cases}

    return of


def test_two_ranks_have_the_numbers_of_one_process(ranks: RankPools, folder: Path, expected: Expected) -> None:
    assert_equal(results_of(ranks, folder, QUICK, 2, "--context-parallel-size 2"), expected(QUICK))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "layout", "left_out"),
    [
        (2, "--context-parallel-size 2", QUICK),
        (4, "--context-parallel-size 4", ()),
        (4, "--context-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel", ("4 bits",)),
        # stages and data-parallel ranks draw apart
        (4, "--context-parallel-size 2 --pipeline-model-parallel-size 2", ("log_probs",)),
        (4, "--context-parallel-size 2 --zero-stage 1", ("log_probs",)),
        (2, "--context-parallel-size 2 --zero-stage 3", ()),
    ],
)
def test_layouts_have_the_numbers_of_one_process(
    ranks: RankPools, folder: Path, expected: Expected, world_size: int, layout: str, left_out: Sequence[str]
) -> None:
    cases = [name for name in CASES if name not in left_out]
    assert_equal(results_of(ranks, folder, cases, world_size, layout), expected(cases))


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_long_documents_have_the_perplexity_of_one_process(
    ranks: RankPools, test_data: Path, tmp_path: Path, size: int
) -> None:
    """Of real text, one token a byte, before the first step."""
    text = np.frombuffer((test_data / "corpus_en.jsonl").read_bytes()[:40_000], np.uint8)
    with IndexedDatasetBuilder(tmp_path / "bytes", np.uint16) as builder:
        builder.add_document(text.astype(np.uint16))
        builder.finalize()
    flags = f"{MODEL} --vocab-size 256 --seq-length 4096 --valid-data-path {tmp_path / 'bytes'} --train-iters 1"
    flags += f" --train-data-path {tmp_path / 'bytes'} --eval-iters 2 --global-batch-size 2"
    found = []
    for each, layout in ((1, ""), (size, f"--context-parallel-size {size}")):
        assert set(ranks(each)(runs.train, f"{flags} {layout} --results-dir {tmp_path / str(each)}")) == {""}
        row, *_ = runs.rows(tmp_path / str(each), "valid")
        found.append((row["lm_loss"], row["perplexity"], row["num_tokens"]))
    assert found[1] == pytest.approx(found[0], rel=1e-6)
