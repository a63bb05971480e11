"""Rows in the forms in which people have them become the conversations that they stand for."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest

from megatron.cli.data.preprocess_chat import main
from megatron.data.chat.preprocessing import ChatJob, preprocess_chats
from megatron.data.index.indexed import DataError
from megatron.data.read.input_shards import InputShard
from megatron.data.read.json_array import lines_of_array
from tests.data.chat.test_conversation import bytes_json
from tests.data.chat.test_preprocessing import SPECIAL, job_of, rows_of, samples, texts

Rows = Sequence[dict[str, Any]]


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    (folder := tmp_path / "tokenizer").mkdir()
    (folder / "tokenizer.json").write_text(bytes_json(SPECIAL))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    return folder


def chatml(*turns: str) -> str:
    return "".join(f"<|im_start|>{turn.replace(': ', chr(10), 1)}<|im_end|>\n" for turn in turns)


FORMS: dict[str, tuple[dict[str, Any], str, str]] = {
    "sharegpt": (
        {
            "system": "S",
            "conversations": [
                {"from": "human", "value": "a"}, {"from": "gpt", "value": "b"},
                {"from": "human", "value": "c"}, {"from": "gpt", "value": "d"},
            ],
        },
        chatml("user: a", "assistant: b", "user: c", "assistant: d"),
        "b<|im_end|>d<|im_end|>",
    ),
    "prompt_completion": ({"prompt": "a", "completion": "b"}, chatml("user: a", "assistant: b"), "b<|im_end|>"),
    "prompt_completion of messages": (
        {
            "prompt": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"},
                       {"role": "user", "content": "c"}],
            "completion": [{"role": "assistant", "content": "d"}],
        },
        chatml("user: a", "assistant: b", "user: c", "assistant: d"),
        "d<|im_end|>",
    ),
    "alpaca": (
        {"instruction": "a", "input": "b", "output": "c", "text": "all of it"},
        chatml("user: a\n\nb", "assistant: c"),
        "c<|im_end|>",
    ),
    "alpaca of LLaMA-Factory": (
        {"instruction": "c", "input": "", "output": "d", "system": "S", "history": [["a", "b"]]},
        chatml("system: S", "user: a", "assistant: b", "user: c", "assistant: d"),
        "b<|im_end|>d<|im_end|>",
    ),
    "alpaca of Dolly": (
        {"instruction": "a", "context": "b", "response": "c", "category": "closed_qa"},
        chatml("user: a\n\nb", "assistant: c"),
        "c<|im_end|>",
    ),
    "question_answer of GSM8K": (
        {"question": "a", "answer": "b #### 72"}, chatml("user: a", "assistant: b #### 72"), "b #### 72<|im_end|>",
    ),
    "question_answer of stack-exchange-paired": (
        {"qid": 1, "question": "a", "date": "2020", "metadata": ["url"], "response_j": "b", "response_k": "worse"},
        chatml("user: a", "assistant: b"),
        "b<|im_end|>",
    ),
    "question_answer of OpenOrca": (
        {"id": "niv.1", "system_prompt": "S", "question": "a", "response": "b"},
        chatml("system: S", "user: a", "assistant: b"),
        "b<|im_end|>",
    ),
}  # fmt: skip
FORMS["sharegpt"] = (FORMS["sharegpt"][0], chatml("system: S") + FORMS["sharegpt"][1], FORMS["sharegpt"][2])


@pytest.mark.parametrize("name", FORMS)
def test_a_row_is_known_by_its_keys(tmp_path: Path, tokenizer: Path, name: str) -> None:
    row, text, trained = FORMS[name]
    job = job_of(rows_of(tmp_path / "in.jsonl", row), tokenizer)
    assert preprocess_chats(job).counts.forms == {name.split()[0]: 1}
    assert texts(job) == [(text, trained)]


def write_array(path: Path, rows: Rows) -> None:  # as Alpaca's and ShareGPT's files are
    path.with_suffix(".json").write_text(json.dumps(rows, indent=2, ensure_ascii=False), encoding="utf-8")


def write_parquet(path: Path, rows: Rows) -> None:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path.with_suffix(".parquet"))


def write_arrow(path: Path, rows: Rows) -> None:  # as Hugging Face's datasets saves it, a stream
    table = pyarrow.Table.from_pylist(list(rows))
    with pyarrow.ipc.new_stream(path.with_suffix(".arrow"), table.schema) as writer:
        writer.write_table(table, max_chunksize=7)


@pytest.mark.parametrize("write", [write_array, write_parquet, write_arrow])
def test_real_chats_have_the_same_tokens_in_a_table(
    tmp_path: Path, tokenizer: Path, test_data: Path, write: Callable[[Path, Rows], None]
) -> None:
    with open(test_data / "sft_messages.jsonl", encoding="utf-8") as file:
        rows = [json.loads(line) for line, _ in zip(file, range(40), strict=False)]
    speakers = {"user": "human", "assistant": "gpt", "system": "system"}
    turns = [
        {"conversations": [{"from": speakers[m["role"]], "value": m["content"]} for m in row["messages"]]}
        for row in rows
    ]
    expected = job_of(rows_of(tmp_path / "in.jsonl", *rows), tokenizer)
    preprocess_chats(expected)
    for name, kind in (("messages", rows), ("sharegpt", turns)):
        folder = tmp_path / name / "data"
        folder.mkdir(parents=True)
        write(folder / "train-00000-of-00001", kind)
        write(folder / "test-00000-of-00001", [{"prompt": "?", "completion": "!"}])
        (tmp_path / name / "dataset_infos.json").write_text("{}")
        (tmp_path / name / "README.md").write_text("# A dataset")
        job = job_of(tmp_path / name, tokenizer, output_prefix=str(tmp_path / f"{name}_out"), split="train")
        assert preprocess_chats(job).counts.forms == {name: len(rows)}
        assert samples(job) == samples(expected)


def test_nulls_of_a_table_are_absent(tmp_path: Path, tokenizer: Path) -> None:
    rows = [{"prompt": "a", "completion": "b"}, {"instruction": "a", "output": "b"}]
    write_parquet(tmp_path / "in", [{**dict.fromkeys(rows[1 - i]), **row} for i, row in enumerate(rows)])
    job = job_of(tmp_path / "in.parquet", tokenizer, row_format="mixed")
    assert preprocess_chats(job).counts.forms == {"prompt_completion": 1, "alpaca": 1}
    first, second = samples(job)
    assert first == second


TEMPLATES = {
    "columns": (
        {"post": {"title": "a"}, "n": 7, "reply": "b"},
        {"prompt_template": r"Title: {post.title} {{{n}}}\nReply:", "answer_key": "reply"},
        "Title: a {7}\nReply:",
        "b",
    ),
    "alpaca": (
        {"instruction": "a", "input": "", "output": "b"},
        {"prompt_template": "alpaca"},
        "Below is an instruction that describes a task. Write a response that appropriately completes the request."
        "\n\n### Instruction:\na\n\n### Response:\n",
        "b",
    ),
    "alpaca with an input": (
        {"instruction": "a", "input": "i", "output": "b"},
        {"prompt_template": "alpaca"},
        "Below is an instruction that describes a task, paired with an input that provides further context. Write a "
        "response that appropriately completes the request.\n\n### Instruction:\na\n\n### Input:\ni\n\n### Response:\n",
        "b",
    ),
    "pair": ({"prompt": "a ", "completion": "b"}, {}, "a ", "b"),
    "text": ({"text": "a b"}, {}, "", "a b"),
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_texts_are_written_as_they_are(tmp_path: Path, tokenizer: Path, name: str) -> None:
    row, options, prompt, answer = TEMPLATES[name]
    job = job_of(rows_of(tmp_path / "in.jsonl", row), tokenizer, chat_template="plain", **options)
    preprocess_chats(job)
    # nothing predicts the first token
    assert texts(job) == [(f"{prompt}{answer}</s>", f"{answer if prompt else answer[1:]}</s>")]


def test_plain_text_begins_as_the_tokenizer_begins_texts(tmp_path: Path, tokenizer: Path) -> None:
    content = json.loads((tokenizer / "tokenizer.json").read_text())
    begin = {"SpecialToken": {"id": "<s>", "type_id": 0}}
    ids = next(token["id"] for token in content["added_tokens"] if token["content"] == "<s>")
    content["post_processor"] = {
        "type": "TemplateProcessing", "single": [begin, {"Sequence": {"id": "A", "type_id": 0}}], "pair": [],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [ids], "tokens": ["<s>"]}},
    }  # fmt: skip
    content["post_processor"]["pair"] = [
        *content["post_processor"]["single"], {"Sequence": {"id": "B", "type_id": 1}}
    ]  # fmt: skip
    (tokenizer / "tokenizer.json").write_text(json.dumps(content))
    job = job_of(rows_of(tmp_path / "in.jsonl", {"prompt": "a", "completion": "b"}), tokenizer, chat_template="plain")
    preprocess_chats(job)
    assert texts(job) == [("<s>ab</s>", "b</s>")]


FAULTS: dict[str, tuple[Rows, dict[str, Any], str]] = {
    "two forms in a file": (
        [{"prompt": "a", "completion": "b"}, {"question": "a", "answer": "b"}], {},
        r"in.jsonl:2: the row is of the form question_answer, and the file began with prompt_completion.*mixed",
    ),
    "a row that may be two": (
        [{"prompt": "a", "completion": "b", "question": "a", "answer": "b"}], {},
        r"in.jsonl:1: .*'prompt' with 'completion'.*'question' with 'answer'.*--row-format prompt_completion",
    ),
    "two answers": (
        [{"question": "a", "answer": "b", "response": "c"}], {},
        r"in.jsonl:1: .*--prompt-template '\{question\}' --answer-key answer",
    ),
    "no known keys": ([{"title": "a", "body": "b"}], {}, r"in.jsonl:1: .*the row has 'title', 'body': .*--answer-key"),
    "choices": (
        [{"question": "a", "choices": ["b", "c"], "answer": "b"}], {}, r"in.jsonl:1: the row has 'choices' beside",
    ),
    "an answer by number": ([{"question": "a", "answer": 2}], {}, r"in.jsonl:1: 'answer' is '2', not a text"),
    "an empty answer": ([{"prompt": "a", "completion": " "}], {}, r"in.jsonl:1: 'completion' is empty"),
    "an unknown speaker": (
        [{"conversations": [{"from": "narrator", "value": "a"}]}], {}, r"in.jsonl:1: turn 1 is from 'narrator'",
    ),
    "a speaker that is no text": (
        [{"conversations": [{"from": ["gpt"], "value": "a"}]}], {}, r"in.jsonl:1: turn 1 is from \['gpt'\]; the speak",
    ),
    "a call with a key twice": (
        [{"conversations": [{"from": "function_call", "value": '{"name": "f", "name": "g"}'}]}], {},
        r"in.jsonl:1: the call in turn 1 is JSON text: the key 'name' occurs 2 times",
    ),
    "messages of a prompt with a key twice": (
        [{"prompt": '[{"role": "user", "content": "a", "content": "b"}]', "completion": "c"}], {},
        r"in.jsonl:1: 'prompt' is JSON text: the key 'content' occurs 2 times",
    ),
    "messages that are a number": ([{"messages": 2}], {}, r"in.jsonl:1: 'messages' is 2; a conversation has at least"),
    "a text and a template": ([{"text": "a"}], {}, r"in.jsonl:1: .*--chat-template plain"),
    "another form": ([{"prompt": "a", "completion": "b"}], {"row_format": "alpaca"}, r"in.jsonl:1: .*not of --row-for"),
    "a column that is not there": (
        [{"a": "b"}], {"prompt_template": "{q}", "answer_key": "a"}, r"in.jsonl:1: the row has no 'q'",
    ),
    "a context that is not there": (
        [{"q": "a", "context": None, "a": "b"}, {"q": "a", "contxt": "c", "a": "b"}],
        {"prompt_template": "{context}{q}", "answer_key": "a"}, r"in.jsonl:2: the row has no 'context'",
    ),
    "an unwanted answer to a template": (
        [{"q": "a", "a": "b", "label": False}], {"prompt_template": "{q}", "answer_key": "a"},
        r"in.jsonl:1: 'label' is false",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_row_that_is_not_clear_is_named(tmp_path: Path, tokenizer: Path, name: str) -> None:
    rows, options, message = FAULTS[name]
    job = job_of(rows_of(tmp_path / "in.jsonl", *rows), tokenizer, **options)
    with pytest.raises(DataError, match=message):
        preprocess_chats(job)


def test_options_that_contradict_each_other_are_refused(tmp_path: Path, tokenizer: Path) -> None:
    for options, message in (
        ({"answer_key": "a"}, "give that too"),
        ({"prompt_template": "{q}"}, "name it with --answer-key"),
        ({"prompt_template": "{q", "answer_key": "a"}, "cannot be read"),
        ({"prompt_template": "q", "answer_key": "a"}, "names no column"),
        ({"prompt_template": "{q} {}", "answer_key": "a"}, "more or less than the name of a column"),
        ({"prompt_template": "{q!r}", "answer_key": "a"}, "more or less than the name of a column"),
        ({"prompt_template": "{q:>9}", "answer_key": "a"}, "more or less than the name of a column"),
        ({"prompt_template": "{q}", "answer_key": "a", "row_format": "alpaca"}, "drop one"),
    ):
        with pytest.raises(DataError, match=message):
            ChatJob(("in.jsonl",), "out", str(tokenizer), **options)  # type: ignore[arg-type]


def test_what_a_template_names_is_read_once(tmp_path: Path, tokenizer: Path) -> None:
    row = {"system": "S", "q": "a", "label": 0}
    for template, expected in (("{system} {q}", chatml("user: S a")), ("{q}", chatml("system: S", "user: a"))):
        job = job_of(
            rows_of(tmp_path / "in.jsonl", row), tokenizer, prompt_template=template, answer_key="label", overwrite=True
        )
        preprocess_chats(job)
        assert texts(job) == [(expected + chatml("assistant: 0"), "0<|im_end|>")]


def test_null_is_an_empty_context_in_tables_too_and_parts_that_are_not_read_are_counted(
    tmp_path: Path, tokenizer: Path
) -> None:
    rows: list[dict[str, Any]] = [
        {"context": None, "d": {"q": "a", "e": {"x": "b", "y": "c"}, "z": "lost", "none": None}, "a": "d"},
        {"context": "C", "d": {"q": "a", "e": {"x": "b", "y": ""}, "z": "", "none": None}, "a": "d"},
    ]
    rows_of(tmp_path / "in.jsonl", *rows)
    write_parquet(tmp_path / "in.parquet", rows)
    for name in ("in.jsonl", "in.parquet"):
        job = job_of(
            tmp_path / name, tokenizer, prompt_template="{context}{d.q}{d.e.x}", answer_key="a", overwrite=True
        )
        totals = preprocess_chats(job)
        assert [text.split("user\n")[1][:3] for text, _ in texts(job)] == ["ab<", "Cab"]
        assert totals.counts.unread == {"d.z": 1, "d.e.y": 1}


def test_answers_in_a_prompt_are_not_trained_whatever_their_flags(tmp_path: Path, tokenizer: Path) -> None:
    user = {"role": "user", "content": "a"}
    for flag in ({"weight": 1}, {"train": True}, {"mask": False}):
        prompt = [user, {"role": "assistant", "content": "b", **flag}, user]
        row = {"prompt": prompt, "completion": [{"role": "assistant", "content": "c"}]}
        job = job_of(rows_of(tmp_path / "in.jsonl", row), tokenizer, overwrite=True)
        preprocess_chats(job)
        assert [trained for _, trained in texts(job)] == ["c<|im_end|>"]


def test_splits_are_not_read_as_one(tmp_path: Path, tokenizer: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    for split in ("train", "test"):
        rows_of(folder / f"{split}.jsonl", {"prompt": split, "completion": "b"})
    with pytest.raises(DataError, match=r"holds the splits test, train.*--split"):
        preprocess_chats(job_of(folder, tokenizer))
    with pytest.raises(DataError, match=r"--split dev: no file.*they have test, train"):
        preprocess_chats(job_of(folder, tokenizer, split="dev"))
    job = job_of(folder, tokenizer, split="test")
    preprocess_chats(job)
    assert [text for text, _ in texts(job)] == [chatml("user: test", "assistant: b")]
    both = tuple(str(folder / f"{split}.jsonl") for split in ("train", "test"))
    assert preprocess_chats(replace(job, inputs=both, split=None, overwrite=True)).counts.num_rows == 2


def test_the_command_says_which_forms_it_found(
    tmp_path: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = rows_of(tmp_path / "in.jsonl", {"instruction": "a", "output": "b"})
    options = ["--input", str(source), "--tokenizer-model", str(tokenizer), "--chat-template", "chatml"]
    assert main([*options, "--output-prefix", str(tmp_path / "out" / "chats"), "--show", "1"]) == 0
    assert "format: alpaca  1" in capsys.readouterr().out


ODD_ARRAY = (
    ' [ {"prompt": "a ] , [\\" \\\\", "completion": "b"} ,\n\n'
    '{"prompt":"\u00e9\\n","completion":"}","x":[{}, [1, "],"]]}]\n'
)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_an_array_is_read_in_pieces_of_any_size(size: int) -> None:
    content = ODD_ARRAY.encode()
    pieces = (content[at : at + size] for at in range(0, len(content), size))
    lines = b"".join(lines_of_array(pieces))
    assert len(lines) == len(content)
    assert [json.loads(line) for line in lines.split(b"\n")] == json.loads(content)


ARRAYS = {
    "cut off": (
        '[{"prompt": "a", "completion": "b"}, {"prompt',
        r"in.json, row 2: the content ends in row 2 without a \]: .*cut off",
    ),
    "no comma": (
        '[{"prompt": "a", "completion": "b"} {}]',
        r"in.json, row 1: a comma or \] must come after row 1, not \{",
    ),
    "more behind": (
        '[{"prompt": "a", "completion": "b"}] {}',
        r"in.json, row 1: nothing must come after row 1, not \{",
    ),
    "no objects": ("[1, 2]", r"in.json, row 1: an object must come at the beginning, not 1"),
    "a text over lines": (
        '[{"prompt": "a\nb", "completion": "b"}]',
        r"in.json, row 1: a text in row 1 goes on after the end of its line",
    ),
    "a bad row": (
        '[\n{"prompt": "a",\n"completion": "b"},\n{"prompt": "a"}]', r"in.json, row 2: no key 'messages', nor the keys",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ARRAYS)
def test_a_damaged_array_is_named(tmp_path: Path, tokenizer: Path, name: str) -> None:
    content, message = ARRAYS[name]
    (tmp_path / "in.json").write_text(content)
    with pytest.raises(DataError, match=message):
        preprocess_chats(job_of(tmp_path / "in.json", tokenizer))


def test_an_array_is_not_cut_for_shards(tmp_path: Path, tokenizer: Path) -> None:
    write_array(tmp_path / "in", [{"prompt": str(i), "completion": "b"} for i in range(9)])
    with pytest.raises(DataError, match="only plain JSONL is cut within a file"):
        preprocess_chats(job_of(tmp_path / "in.json", tokenizer, shard=InputShard(1, 2)))
