"""Loss and bits per byte of a dataset equal those by transformers' logits, and the loss of a run's validation."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from megatron import evaluate
from megatron.data.index.indexed import DataError
from megatron.data.index.indexed_builder import IndexedDatasetBuilder
from megatron.evaluation import report
from megatron.options.config import ConfigError
from megatron.runtime.files import locked_output
from tests import runs as training_runs
from tests.evaluation import runs
from tests.evaluation.local_tasks import SENTENCES, write_model
from tests.generation.theirs import their_logits
from tests.ranks import RankFailure, RankPools

LENGTH = 24


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def documents(model: Path) -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    return [[*tokenizer.encode(text, add_special_tokens=False).ids, 1] for text in SENTENCES]


@pytest.fixture(scope="module")
def prefix(documents: list[list[int]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("data") / "text"
    with IndexedDatasetBuilder(place, np.uint16) as builder:
        for document in documents:
            builder.add_document(np.array(document, dtype=np.uint16))
        builder.finalize()
    return place


@pytest.mark.parametrize(("num_ranks", "flags"), [(1, ""), (2, ""), (2, "--pipeline-model-parallel-size 2")])
def test_loss_and_bits_per_byte_are_those_of_transformers(
    ranks: RankPools, model: Path, documents: list[list[int]], prefix: Path, tmp_path: Path, num_ranks: int, flags: str
) -> None:
    words = ["--load", str(model), "--dataset", str(prefix), "--max-length", str(LENGTH)]
    said = ranks(num_ranks)(runs.run, [*words, "--output", str(tmp_path / "out.json"), *flags.split()])
    tokens, nats = np.concatenate([np.array(document) for document in documents]), 0.0
    for begin in range(0, len(tokens) - 1, LENGTH):
        window = tokens[begin : begin + LENGTH + 1]
        log_probs = torch.from_numpy(their_logits(model, window[None, :-1])).double().log_softmax(-1)[:, 0]
        nats -= float(log_probs[range(len(window) - 1), window[1:]].sum())
    num_bytes = sum(len(text.encode()) for text in SENTENCES)
    found: dict[str, Any] = json.loads((tmp_path / "out.json").read_text())["datasets"][str(prefix)]
    assert found["num_tokens"] == len(tokens) - 1
    assert found["num_bytes"] == num_bytes
    assert found["nats"] == pytest.approx(nats, rel=1e-6)
    assert found["loss"] == pytest.approx(nats / (len(tokens) - 1), rel=1e-6)
    assert found["bits_per_byte"] == pytest.approx(nats / math.log(2) / num_bytes, rel=1e-6)
    assert said[0].startswith(f"text: loss {found['loss']:.6f}, perplexity ")
    assert said[1:] == [""] * (num_ranks - 1)


def test_wrong_commands_are_refused_with_every_fault(ranks: RankPools, model: Path, prefix: Path) -> None:
    words = ["--load", str(model / "lost"), "--dataset", f"{prefix}.bin", "--num-fewshot", "2", "--log-samples"]
    words += ["--context-parallel-size", "2"]
    with pytest.raises(RankFailure) as failure:
        ranks(1)(runs.run, words)
    for said in ("lost does not exist", "text.bin.idx; give the path without", "--num-fewshot is for --tasks",
                 "--log-samples writes into the output file",
                 "--context-parallel-size is not supported: copies of the model share the texts"):  # fmt: skip
        assert said in str(failure.value)


def test_the_output_of_another_evaluation_is_refused(
    ranks: RankPools, model: Path, prefix: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out.json"
    words = ["--load", str(model), "--dataset", str(prefix), "--output", str(output)]
    with locked_output(output) as is_held:
        assert is_held
        with pytest.raises(RankFailure, match=r"another evaluation will write to --output .*out\.json; wait"):
            ranks(2)(runs.run, words)
        assert not output.exists()
    ranks(2)(runs.run, words)
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]


@pytest.mark.parametrize("flags", ["", "--tensor-model-parallel-size 2", "--context-parallel-size 2"])
def test_the_loss_of_a_dataset_is_that_of_a_runs_validation(ranks: RankPools, tmp_path: Path, flags: str) -> None:
    train = training_runs.write_dataset(tmp_path / "train")
    length, batch, batches = 16, 8, 3
    # as many tokens as the validation reads, in one document
    tokens = np.random.default_rng(1).integers(1, 128, length * batch * batches + 1)
    with IndexedDatasetBuilder(tmp_path / "valid", np.uint16) as builder:
        builder.add_document(tokens.astype(np.uint16))
        builder.finalize()
    words = (
        "--architecture llama --position-embedding-type rope --split 969,30,1 --lr 1e-3 "
        f"--train-data-path {train} --valid-data-path {tmp_path / 'valid'} --eval-iters {batches} --train-iters 4 "
        f"--save {tmp_path / 'saved'} --results-dir {tmp_path / 'out'} {flags}"
    )
    size = 2 if flags else 1
    assert ranks(size)(training_runs.train, words) == [""] * size
    row = training_runs.rows(tmp_path / "out", "valid")[-1]
    assert (row["iteration"], row["num_tokens"]) == (4, length * batch * batches)
    evaluation = ["--load", str(tmp_path / "saved"), "--dataset", str(tmp_path / "valid")]
    ranks(1)(runs.run, [*evaluation, "--output", str(tmp_path / "out.json")])
    results = json.loads((tmp_path / "out.json").read_text())
    assert results["model"]["ckpt_step"] == 4
    found = results["datasets"][str(tmp_path / "valid")]
    assert found["num_tokens"] == row["num_tokens"]
    assert found["loss"] == pytest.approx(row["lm_loss"], rel=1e-6)


@pytest.mark.parametrize("ids", [[5, 60000, 7], [5, 6, 7]])
def test_a_dataset_of_another_tokenizer_is_refused_or_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ids: list[int]
) -> None:
    with IndexedDatasetBuilder(tmp_path / "text", np.uint16) as builder:
        builder.add_document(np.array(ids, dtype=np.uint16))
        builder.finalize()
    made_by = {"type": "HFTokenizer", "vocab_size": 900, "sha256": "0" * 64}
    monkeypatch.setattr(report, "read_manifest", lambda prefix: SimpleNamespace(header={"tokenizer": made_by}))
    said: list[str] = []

    def opened(sha256: str) -> None:
        tokenizer = SimpleNamespace(identity=made_by | {"sha256": sha256})
        report._opened(
            cast(Any, SimpleNamespace(vocab_size=1000, tokenizer=tokenizer)), str(tmp_path / "text"), said.append
        )

    if max(ids) >= 1000:
        with pytest.raises(DataError, match="text: token 1 is 60000, outside vocab_size=1000"):
            opened("0" * 64)
        return
    opened("0" * 64)
    assert said == []
    opened("1" * 64)
    assert "was written with another tokenizer (HFTokenizer of 900 tokens" in said[0]
    (tmp_path / "text_loss_mask.bin").touch()
    opened("0" * 64)
    assert "text is of chats; every token counts here" in said[1]


def test_tasks_without_lm_eval_are_refused_before_the_model_is_loaded(model: Path, tmp_path: Path) -> None:
    (tmp_path / "quiz.yaml").touch()
    with patch("importlib.util.find_spec", return_value=None), pytest.raises(ConfigError, match="install the extra"):
        evaluate.main(["--load", str(model), "--tasks", str(tmp_path / "quiz.yaml")])
