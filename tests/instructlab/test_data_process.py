"""Chats, documents and mock data as samples: made once, made anew when anything has changed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron import api
from megatron.api import DataProcessArgs
from megatron.data.indexed import DataError, IndexedDataset
from megatron.instructlab import data_process
from tests.finetuning_files import write_chats, write_tokenizer


def data_args(folder: Path, **changed: Any) -> DataProcessArgs:
    write_tokenizer(folder / "model")
    write_chats(folder / "chats.jsonl")
    given: dict[str, Any] = {
        "data_path": str(folder / "chats.jsonl"),
        "data_output_path": str(folder / "data"),
        "max_seq_len": 128,
        "model_path": str(folder / "model"),
        "num_cpu_procs": 1,
    }
    return DataProcessArgs(**(given | changed))


def test_data_process_writes_samples_and_masks_once(tmp_path: Path) -> None:
    args = data_args(tmp_path)
    data_process.main(args)
    tokens, mask = (IndexedDataset(tmp_path / "data" / name) for name in ("data", "data_loss_mask"))
    assert len(tokens) == len(mask) == 40
    assert tokens.lengths.tolist() == mask.lengths.tolist()
    assert 0 < sum(int(mask.read(number).sum()) for number in range(40)) < tokens.num_tokens
    written = (tmp_path / "data" / "data.bin").stat().st_mtime_ns
    data_process.main(args)
    assert (tmp_path / "data" / "data.bin").stat().st_mtime_ns == written
    write_chats(tmp_path / "chats.jsonl", 41)
    data_process.main(args)
    assert data_process.open_samples(tmp_path / "data").num_samples == 41


def test_a_new_limit_makes_the_data_anew_and_drops_what_is_longer(tmp_path: Path) -> None:
    args = data_args(tmp_path)
    data_process.main(args)
    longest = data_process.open_samples(tmp_path / "data").longest
    data_process.main(args.model_copy(update={"max_seq_len": longest - 1}))
    again = data_process.open_samples(tmp_path / "data")
    assert again.num_samples < 40
    assert again.longest == longest - 1


def test_other_trained_tokens_make_the_data_anew(tmp_path: Path) -> None:
    given = data_args(tmp_path).model_dump()
    trained = []
    for train_on in ("assistant", "all", "assistant"):
        samples = data_process.process_data(**given, train_on=train_on)
        tokens, mask = (IndexedDataset(tmp_path / "data" / name) for name in ("data", "data_loss_mask"))
        trained.append(sum(int(mask.read(number).sum()) for number in range(samples.num_samples)))
    assert trained[1] == tokens.num_tokens - 40  # nothing precedes the first token of a sample
    assert trained[0] == trained[2] < trained[1]


def test_the_legacy_template_adds_its_tokens(tmp_path: Path) -> None:
    path = api.legacy_template.__file__
    data_process.main(data_args(tmp_path, chat_tmpl_path=path))
    samples = data_process.open_samples(tmp_path / "data")
    plain = json.loads((tmp_path / "model" / "tokenizer.json").read_text())
    assert samples.vocab_size == len(plain["model"]["vocab"]) + 4  # <|endoftext|> and <|pad|> were there
    assert samples.tokenizer == str(tmp_path / "data" / "tokenizer")
    saved = json.loads((tmp_path / "data" / "tokenizer" / "tokenizer.json").read_text())
    assert {"<|system|>", "<|user|>", "<|assistant|>"} <= {token["content"] for token in saved["added_tokens"]}


def test_documents_become_blocks_that_are_trained_on_whole(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "model")
    texts = [f"A document about the number {number}." * (1 + number % 3) for number in range(30)]
    lines = [json.dumps({"text": text}) for text in [*texts, ""]]
    (tmp_path / "documents.jsonl").write_text("\n".join(lines))
    samples = data_process.process_documents(
        str(tmp_path / "documents.jsonl"), str(tmp_path / "data"), str(tmp_path / "model"), 64, "text"
    )
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "model" / "tokenizer.json"))
    whole = [token for text in texts for token in [*tokenizer.encode(text).ids, 0]]
    tokens, mask = (IndexedDataset(tmp_path / "data" / name) for name in ("data", "data_loss_mask"))
    assert np.concatenate([tokens.read(number) for number in range(len(tokens))]).tolist() == whole
    assert set(tokens.lengths[:-1].tolist()) == {64}
    assert all(mask.read(number).all() for number in range(len(mask)))
    assert (samples.num_samples, samples.longest) == (-(-len(whole) // 64), 64)


def test_mock_data_is_random_and_within_its_length(tmp_path: Path) -> None:
    samples = data_process.make_mock_data(tmp_path, 50, 40, 300, seed=1)
    tokens = IndexedDataset(samples.prefix)
    assert samples.num_samples == 50
    assert 20 <= tokens.lengths.min() <= tokens.lengths.max() <= 40
    assert max(int(tokens.read(number).max()) for number in range(50)) < 300


@pytest.mark.parametrize(
    ("line", "said"),
    [("not json", "line 1"), ('{"document": 3}', "line 1"), ('{"text": "a"}', "a text under 'document'")],
)
def test_a_wrong_document_is_named(tmp_path: Path, line: str, said: str) -> None:
    write_tokenizer(tmp_path / "model")
    (tmp_path / "documents.jsonl").write_text(line + "\n")
    with pytest.raises(DataError, match=said):
        data_process.process_documents(
            str(tmp_path / "documents.jsonl"), str(tmp_path / "d"), str(tmp_path / "model"), 8
        )
    assert not (tmp_path / "d" / "data.idx").exists()


def test_data_that_is_not_there_is_named(tmp_path: Path) -> None:
    args = data_args(tmp_path, data_path=str(tmp_path / "none.jsonl"))
    with pytest.raises(DataError, match="is not a file; give the JSONL file of the messages"):
        data_process.main(args)
    with pytest.raises(DataError, match="holds no processed data"):
        data_process.open_samples(tmp_path)
