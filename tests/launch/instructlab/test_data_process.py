"""Chats, documents and mock data as samples: made once, made anew when anything has changed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.api import DataProcessArgs
from megatron.data.index.indexed import DataError, IndexedDataset
from megatron.launch.instructlab import data_process, legacy_template
from megatron.launch.plan import FineTuning
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


def row_of(*lengths: int) -> str:
    """A chat of so many exchanges, whose answers have these numbers of characters."""
    turns = [
        {"role": role, "content": content}
        for length in lengths
        for role, content in (("user", "Go on"), ("assistant", "x" * length))
    ]
    return json.dumps({"messages": turns, "history": []}) + "\n"


def test_each_switch_of_rows_makes_the_data_anew(tmp_path: Path) -> None:
    given = data_args(tmp_path).model_dump()
    # one that fits, one of exchanges that fit, one with an exchange that does not, and one of 24 tokens
    (tmp_path / "chats.jsonl").write_text(row_of(60) + row_of(60, 60) + row_of(300) + row_of(1))
    lengths, outcomes = [], []
    for rows in (
        *(
            {"min_length": 30},
            {"min_length": 1},
            {"min_length": 1, "too_long": "truncate"},
            {"min_length": 1, "too_long": "split"},
        ),
        {"min_length": 90, "too_long": "split"},
    ):
        samples = data_process.process_data(**given, **rows)
        assert samples.longest <= 128
        lengths.append(IndexedDataset(samples.prefix).lengths.tolist())
        outcomes.append(samples.outcomes)
        again = data_process.process_data(**given, **rows)
        assert (again, IndexedDataset(samples.prefix).lengths.tolist()) == (samples, lengths[-1])
    one = 24 - 1 + 60
    assert lengths[0] == [one]
    short = 24
    assert lengths[1] == [one, short]
    whole = one - 60 + 300
    assert lengths[2] == [one, 128, 128, short]
    # no token of the long answer is lost
    assert lengths[3] == [one, one, one, 128, 128, whole - 256, short]
    assert lengths[4] == [128, 128]
    assert outcomes[0] == {"dropped, longer than 128 tokens": 2, "dropped, shorter than 30 tokens": 1}
    assert outcomes[1] == {"dropped, longer than 128 tokens": 2}
    assert outcomes[2] == {"truncated": 2}
    assert outcomes[3] == {"split": 2, "split within an exchange": 1}
    assert outcomes[4] == {
        "split": 2,
        "split within an exchange": 1,
        "dropped, shorter than 90 tokens": 2,
        "dropped, pieces shorter than 90 tokens": 3,
    }


def test_columns_that_are_left_out_make_the_data_anew(tmp_path: Path) -> None:
    given = data_args(tmp_path).model_dump()
    row = json.loads(row_of(30)) | {"context": "Only the reader of this text can answer."}
    (tmp_path / "chats.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(DataError, match="--ignore-columns context"):
        data_process.process_data(**given)
    assert data_process.process_data(**given, ignore_columns=("context",)).num_samples == 1
    with pytest.raises(DataError, match="--ignore-columns context"):
        data_process.process_data(**given)
    pair = {"prompt": "a", "chosen": "b", "rejected": "c", "history": [["d", "e"]], "context": "f"}
    (tmp_path / "chats.jsonl").write_text(json.dumps(pair) + "\n")
    files = (given["data_path"], given["data_output_path"], given["model_path"])
    with pytest.raises(DataError, match="'history'"):
        data_process.process_pairs(*files)
    assert data_process.process_pairs(*files, ignore_columns=("context", "history")).num_samples == 1


def test_a_run_loses_no_real_chat_that_is_split(tmp_path: Path, test_data: Path) -> None:
    given = data_args(tmp_path).model_dump() | {"max_seq_len": 1024}
    rows = (test_data / "sft_messages.jsonl").read_text().splitlines(keepends=True)[:200]
    Path(given["data_path"]).write_text("".join(rows))
    found = FineTuning(
        model=given["model_path"], data=given["data_path"], folder=None, train_on="all", too_long="split"
    )
    (samples,) = data_process.process_files(found, [tmp_path / "data"], 1024, has_pairs=False)
    assert samples.outcomes["split"] > 50
    # a piece of one token, which nothing precedes, trains nothing
    left_out = samples.outcomes.get("dropped, pieces of a split row without anything trained", 0)
    assert not [name for name in samples.outcomes if name.startswith(("dropped, longer", "dropped, short", "trunc"))]
    split = sum(IndexedDataset(samples.prefix).lengths.tolist())
    whole = data_process.process_data(**given | {"max_seq_len": 1 << 20}, train_on="all", min_length=1)
    # no exchange is repeated, but a system message is, before each piece
    assert left_out < 10
    assert split + left_out >= sum(IndexedDataset(whole.prefix).lengths.tolist())


def test_the_legacy_template_adds_its_tokens(tmp_path: Path) -> None:
    path = legacy_template.__file__
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
