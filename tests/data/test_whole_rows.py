"""Each column of a row is used, counted by its name, or refused: nothing is left out without a word."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from megatron.cli.data.preprocess_chat import main as preprocess_chat
from megatron.cli.data.preprocess_preferences import main as preprocess_preferences
from megatron.data.chat.conversation import BadRow
from megatron.data.chat.preprocessing import ChatJob, preprocess_chats
from megatron.data.chat.row_forms import RowReader
from megatron.data.index.indexed import DataError, IndexedDataset
from megatron.data.preference.encoder import PairCounts
from megatron.data.preference.formats import parse_preference
from megatron.data.preference.preprocessing import PreferenceJob
from megatron.data.preference.preprocessing import preprocess_preferences as run_job
from tests.data.chat.test_conversation import bytes_json

Row = dict[str, Any]
Read = Callable[[Row], tuple[list[str], tuple[str, ...]]]


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def answer(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def chat_texts(row: Row) -> tuple[list[str], tuple[str, ...]]:
    """Texts of the conversation in a row, and the columns that were not read."""
    _, chat, unread = RowReader(takes_texts=True).read(row)
    return [*texts_in([message["content"] for message in chat.messages]), *texts_in(dict(chat.variables))], unread


def pair_texts(row: Row, *, as_chat: bool = True) -> tuple[list[str], tuple[str, ...]]:
    found = parse_preference(row, as_chat=as_chat)
    sides = [found.prompt, *(side for _, side in found.answers)]
    variables = dict(found.variables) if found.is_chat else {}  # a text has no template that writes them
    return [*texts_in(sides), *texts_in(variables)], found.unread


def plain_pair_texts(row: Row) -> tuple[list[str], tuple[str, ...]]:
    return pair_texts(row, as_chat=False)


def texts_in(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | dict):
        for part in value.values() if isinstance(value, dict) else value:
            yield from texts_in(part)


HEAD = "\n\nHuman: Which colour is it?\n\nAssistant:"
CHAT_ROWS: dict[str, Row] = {
    "messages": {"messages": [user("Which colour?"), answer("A red one.")]},
    "sharegpt": {"conversations": [{"from": "human", "value": "Which colour?"}, {"from": "gpt", "value": "Red one."}]},
    "prompt_completion": {"prompt": "Which colour?", "completion": "A red one."},
    "prompt_completion of messages": {"prompt": [user("Which colour?")], "completion": [answer("A red one.")]},
    "alpaca": {"instruction": "Name a colour.", "input": "Only one.", "output": "A red one."},
    "alpaca with history": {
        "instruction": "Name a colour.", "output": "A red one.", "system": "Be brief.", "history": [["Hello?", "Hey."]],
    },
    "question_answer": {"question": "Which colour?", "answer": "A red one."},
    "text": {"text": "Whole texts are trained."},
}  # fmt: skip
PAIR_ROWS: dict[str, Row] = {
    "texts": {"prompt": "Which colour?", "chosen": "A red one.", "rejected": "No idea."},
    "messages": {"prompt": [user("Which colour?")], "chosen": [answer("A red one.")], "rejected": [answer("No.")]},
    "implicit": {"chosen": [user("Which?"), answer("A red one.")], "rejected": [user("Which?"), answer("No idea.")]},
    "transcripts": {"chosen": f"{HEAD} It is red.", "rejected": f"{HEAD} No idea."},
    "alpaca": {"instruction": "Name a colour.", "input": "Only one.", "chosen": "A red one.", "rejected": "No idea."},
    "question": {"system": "Be brief.", "question": "Which colour?", "chosen": "A red one.", "rejected": "No idea."},
    "stack": {"question": "Which colour?", "response_j": "A red one.", "response_k": "No idea."},
    "one answer": {"prompt": "Which colour?", "completion": "A red one.", "label": True},
    "one answer of alpaca": {"instruction": "Name it.", "input": "Once.", "output": "A red one.", "kto_tag": False},
    "a chat with a label": {"messages": [user("Which colour?"), answer("A red one.")], "label": False},
    "turns with a label": {
        "conversations": [{"from": "human", "value": "Which colour?"}, {"from": "gpt", "value": "A red one."}],
        "kto_tag": True,
    },
    "ranked": {"prompt": "Which colour?", "responses": ["A red one.", "No idea."], "scores": [2, 1]},
    "ranked objects": {
        "instruction": "Which colour?",
        "completions": [{"response": "No idea.", "overall_score": 1.0}, {"response": "Red one.", "overall_score": 8.5}],
    },
}  # fmt: skip
ROWS: list[tuple[str, Read, Row]] = [
    *((f"chat, {name}", chat_texts, row) for name, row in CHAT_ROWS.items()),
    *((f"pair as chat, {name}", pair_texts, row) for name, row in PAIR_ROWS.items()),
    *((f"pair, {name}", plain_pair_texts, row) for name, row in PAIR_ROWS.items()),
]
MARK = "This text says what the answer is to."
CONTEXT: dict[str, Any] = {
    **dict.fromkeys(
        "system system_prompt input context question query instruction prompt passage chat_history background".split(),
        MARK,
    ),
    "history": [[MARK, "An older answer."]],
    "messages": [user(MARK)],
    "conversations": [{"from": "human", "value": MARK}],
    "tools": [{"type": "function", "function": {"name": "look", "description": MARK}}],
    "documents": [{"title": "One", "text": MARK}],
    "choices": [MARK, "Another."],
    "retrievedPassages": [MARK],
    "images": [{"bytes": None, "path": MARK}],
}


def outcome(read: Read, row: Row) -> tuple[list[str], tuple[str, ...]] | None:
    """What is read of a row; None if it is refused."""
    try:
        return read(row)
    except BadRow:
        return None


@pytest.mark.parametrize(("read", "row"), [case[1:] for case in ROWS], ids=[case[0] for case in ROWS])
def test_no_column_is_left_out_without_a_word(read: Read, row: Row) -> None:
    """Columns are added and dropped, one at a time, and nested as JSON text."""
    plain = outcome(read, row)
    for name, value in CONTEXT.items():
        if name in row:
            continue
        found = outcome(read, {**row, name: value})
        assert found is None or any(MARK in text for text in found[0]), name
        empty = outcome(read, {**row, name: "" if isinstance(value, str) else []})
        assert empty == plain or empty is None, name
    if plain is not None:
        counted = {**row, "category": "closed", "question_id": 7, "is_prompt": True, "labelling": ["a", {"b": 1.5}]}
        assert outcome(read, counted) == (plain[0], tuple(sorted(counted.keys() - row.keys(), key=list(counted).index)))
    for name in row:
        fewer = {key: value for key, value in row.items() if key != name}
        found = outcome(read, fewer)
        assert found is None or all(any(text in one for one in found[0]) for text in words_of(fewer)), name
        nested = {**row, name: json.dumps(row[name])} if isinstance(row[name], list | dict) else row
        assert outcome(read, nested) == plain, name


def words_of(row: Row) -> list[str]:
    """The texts of a row, without those that only name a part."""
    return [text for text in texts_in(row) if " " in text or text.endswith(("?", "."))]


def test_pairs_and_chats_have_the_same_turns() -> None:
    """What is before the answer is read alike for all tasks."""
    contexts: list[Row] = [
        {"instruction": "Name it.", "system_prompt": "Be brief.", "history": [["One?", "Two."], ["Three?", "Four."]]},
        {"instruction": "Name it.", "history": json.dumps([["One?", "Two."]])},
        {"question": "Which?", "system_prompt": "Be brief."},
        {"prompt": "Which?", "system": "Be brief.", "history": [["One?", "Two."]]},
        {"prompt": [user("Which?")], "system": "Be brief."},
        {"instruction": "Name it.", "input": "Only one.", "context": "Of three."},
    ]
    for row in contexts:
        ends: Any = ("Yes.", "No.") if not isinstance(row.get("prompt"), list) else ([answer("Yes.")], [answer("No.")])
        pair = parse_preference({**row, "chosen": ends[0], "rejected": ends[1]}, as_chat=True)
        kto = parse_preference({**row, "completion": ends[1], "label": False}, as_chat=True)
        key = "answer" if "question" in row else "output" if "instruction" in row else "completion"
        _, chat, _ = RowReader().read({**row, key: ends[0]})
        plain = [{name: value for name, value in message.items() if name != "train"} for message in chat.messages]
        assert [*pair.prompt, *(pair.chosen or ())] == plain, row
        assert (kto.prompt, kto.rejected) == (pair.prompt, pair.rejected)


ASK = user("a")
REFUSED: dict[str, tuple[Row, bool, str]] = {
    "history": ({"prompt": "Q", "history": [["a", "b"]], "chosen": "c", "rejected": "d"}, False, "'history'; pass"),
    "history of KTO": (
        {"instruction": "Q", "history": [["a", "b"]], "output": "c", "label": True}, False, "pass --as-chat",
    ),
    "system_prompt": (
        {"prompt": "Q", "system_prompt": "S", "chosen": "c", "rejected": "d"}, False, "no place for 'system_prompt'",
    ),
    "input beside a prompt": (
        {"prompt": "Q", "input": "I", "chosen": "c", "rejected": "d"}, True,
        "the row has 'input' beside 'prompt', 'chosen', 'rejected'; write it into the prompt, or leave it out with "
        "--ignore-columns input",
    ),
    "context beside a question": ({"question": "Q", "context": "I", "chosen": "c", "rejected": "d"}, True, "'context'"),
    "history beside messages": (
        {"prompt": [user("Q")], "history": [["a", "b"]], "chosen": [answer("c")], "rejected": [answer("d")]}, True,
        "has 'history' beside",
    ),
    "a label beside a pair": ({"prompt": "Q", "chosen": "c", "rejected": "d", "label": 0}, True, "has 'label'"),
    "no turn ends": ({"chosen": "A colour. Red is nice", "rejected": "A colour. Red is bad"}, True, "no prompt"),
    "no turn ends in texts": ({"chosen": "Q: a A: b", "rejected": "Q: a A: c"}, False, "only in transcripts"),
    "a cut after an answer": (
        {"chosen": [user("a"), answer("b"), answer("c")], "rejected": [user("a"), answer("b"), answer("d")]}, False,
        "end with the assistant's",
    ),
    "a user's last turn": (
        {"prompt": [user("a")], "chosen": [answer("b"), user("c")], "rejected": [answer("d")]}, False,
        "'chosen' ends with user",
    ),
    "a user's last turn in a transcript": (
        {"chosen": f"{HEAD} a\n\nHuman: b", "rejected": f"{HEAD} c"}, False, "'chosen' ends with a turn of Human",
    ),
    "a user's last turn of KTO": ({"messages": [user("a"), answer("b"), user("c")], "label": 1}, False, "with user"),
    "a begun answer": ({"prompt": f"{HEAD} It", "chosen": " is", "rejected": " was"}, True, "within a turn"),
    "Python's messages": (
        {"prompt": str([user("a")]), "chosen": "b", "rejected": "c"}, True, "begins as messages do, but is not JSON",
    ),
    "a text that one answer alone holds": (
        {"prompt": "Correct it.", "input": "He go to school.", "chosen": "He goes.", "rejected": "He go to school."},
        True, "has 'input' beside",
    ),
    "choices that are the answers": (
        {"question": "Which?", "choices": ["A red one.", "No idea."], "chosen": "A red one.", "rejected": "No idea."},
        True, "has 'choices' beside",
    ),
    "a whole conversation before answers": (
        {"messages": [user("a"), answer("b")], "chosen": [answer("c")], "rejected": [answer("d")]}, False,
        "the prompt ends with a message of the assistant",
    ),
    "a flag that pairs do not have": (
        {"prompt": [ASK], "chosen": [{**answer("b"), "weight": 0}, user("c"), answer("d")], "rejected": [answer("e")]},
        False, "message 1 of 'chosen' is not to be trained",
    ),
    "scores of two names": (
        {"prompt": "Q", "answers": [{"text": "a", "rank": 1}, {"text": "b", "score": 5}]},
        False, "no scores of one name",
    ),
    "two speakers": (
        {"conversations": [{"from": "human", "role": "assistant", "value": "a"}], "chosen": "b", "rejected": "c"},
        False, "turn 1 has 'from' and 'value' beside another 'role'",
    ),
    "labels that contradict": (
        {"messages": [user("a"), answer("b")], "label": True, "kto_tag": False}, False, "contradict each other",
    ),
    "equal scores": ({"prompt": "Q", "responses": ["a", "b"], "scores": [1, 1]}, False, "so none is preferred"),
    "a score too few": ({"prompt": "Q", "responses": ["a", "b"], "scores": [1]}, False, "a number for each answer"),
    "no scores": ({"prompt": "Q", "responses": ["a", "b"]}, False, "have no scores"),
    "one answer in a list": ({"prompt": "Q", "responses": ["a"], "scores": [1]}, False, "two answers or more"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_pair_would_lose_is_refused(name: str) -> None:
    row, as_chat, said = REFUSED[name]
    with pytest.raises(BadRow) as error:
        parse_preference(row, as_chat=as_chat)
    assert said in str(error.value)


def test_items_of_a_list_are_compared_by_one_score() -> None:
    items = [{"text": "a", "rank": 1}, {"text": "b", "rank": 2, "score": 1}]
    found = parse_preference({"prompt": "Q", "answers": items})
    assert (found.chosen, found.rejected, found.scores) == ("a", "b", (-1, -2))
    assert found.unread == ("answers.score",)


@pytest.mark.parametrize("as_chat", [False, True])
def test_a_prompt_that_answers_repeat_is_counted(as_chat: bool) -> None:
    row = {"prompt": "Which colour? ", "chosen": "Which colour? Red.", "rejected": "Which colour? None."}
    assert parse_preference(row, as_chat=as_chat).repeats_prompt
    assert not parse_preference({**row, "rejected": "None."}, as_chat=as_chat).repeats_prompt
    counts = PairCounts(num_repeated_prompts=2)
    counts.add(PairCounts(num_repeated_prompts=1))
    assert counts.outcomes() == {"rows whose answers begin with the prompt again": 3}


def test_columns_that_hold_what_the_turns_hold_may_stay() -> None:
    rendered = "### Instruction:\nName a colour.\n\n### Response:\nA red one."
    rows: list[Row] = [
        {"messages": [user("Which colour is it?"), answer("Red.")], "prompt": "Which colour is it?", "prompt_id": "7"},
        {"instruction": "Name a colour.", "output": "A red one.", "prompt": rendered},
        {"messages": [{"role": "system", "content": "S"}, user("a"), answer("b")], "system": "S"},
    ]
    assert [chat_texts(row)[1] for row in rows] == [("prompt", "prompt_id"), ("prompt",), ()]
    with pytest.raises(BadRow, match="'system' differs from the first message"):
        chat_texts({**rows[2], "system": "T"})
    assert RowReader(ignored=("notes", "context")).read({**CHAT_ROWS["messages"], "context": MARK})[2] == ("context",)


def test_a_transcript_in_another_hand_is_cut_at_its_turns() -> None:
    found = parse_preference({"prompt": HEAD.strip(), "chosen": " Red", "rejected": " No"}, as_chat=True)
    assert found.prompt == [user("Which colour is it?")]
    longer = {"chosen": f"{HEAD} It is red.\n\nHuman: Sure?\n\nAssistant: Yes", "rejected": f"{HEAD} It was."}
    found = parse_preference(longer, as_chat=True)
    assert found.prompt == [user("Which colour is it?")]
    assert found.chosen == [answer("It is red."), user("Sure?"), answer("Yes")]
    assert found.has_other_turns
    as_text = parse_preference(longer)
    assert (as_text.prompt, as_text.rejected, as_text.has_other_turns) == (HEAD, " It was.", True)


def test_an_unwanted_answer_is_not_learnt() -> None:
    with pytest.raises(BadRow, match="'label' is false, so the answer is not to be learnt"):
        RowReader().read({"prompt": "a", "completion": "b", "label": False})
    for label, said in ((0, "0"), (False, "false")):
        with pytest.raises(BadRow, match=f"'kto_tag' is {said}, so the answer is not to be learnt"):
            RowReader().read({**CHAT_ROWS["messages"], "kto_tag": label})
    read = {value: RowReader().read({**CHAT_ROWS["messages"], "label": value})[2] for value in (True, 1, 3, "spam")}
    assert read == {True: (), 3: ("label",), "spam": ("label",)}, "a class is counted"
    with pytest.raises(BadRow, match="the prompt ends with a message of the assistant"):
        RowReader().read({"prompt": [user("a"), answer("b")], "completion": [answer("c")]})
    with pytest.raises(BadRow, match="has 'input' beside"):
        chat_texts({"prompt": "Repeat it.", "input": "A red one is here.", "completion": "A red one is here."})
    with pytest.raises(BadRow, match="'completion' ends with user"):
        RowReader().read({"prompt": [user("a")], "completion": [answer("b"), user("c")]})


# ---------------------------------------------------------------------------------------------------------------------
# Ids, by transformers


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory, test_data: Path) -> Path:
    path = tmp_path_factory.mktemp("template") / "chatml.jinja"
    path.write_text((test_data / "chat_templates" / "axolotl_apache2" / "chatml.jinja").read_text())
    return path


def test_chats_as_json_text_have_the_ids_of_their_turns(tmp_path: Path, test_data: Path, template: Path) -> None:
    rows: list[Row] = [{"messages": [user("Which colour?"), answer("Red.")], "system": "Be brief."}]
    nested = [{key: value if key == "system" else json.dumps(value) for key, value in row.items()} for row in rows]
    from transformers import AutoTokenizer

    folder = test_data / "tokenizers" / "bloom_format_trained"
    theirs = AutoTokenizer.from_pretrained(folder)
    theirs.chat_template = template.read_text()
    system = {"role": "system", "content": "Be brief."}
    expected = theirs.apply_chat_template([system, *rows[0]["messages"]], return_dict=False)
    prompt = theirs.apply_chat_template([system, rows[0]["messages"][0]], add_generation_prompt=True, return_dict=False)
    for name, given in (("plain", rows), ("nested", nested)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in given))
        flags = ["--input", str(tmp_path / f"{name}.jsonl"), "--output-prefix", str(tmp_path / name)]
        assert preprocess_chat([*flags, "--tokenizer-model", str(folder), "--chat-template", str(template)]) == 0
        ids = IndexedDataset(tmp_path / name).read(0).tolist()
        mask = IndexedDataset(tmp_path / f"{name}_loss_mask").read(0).tolist()
        assert ids == expected
        assert mask[: len(prompt)] == [0] * len(prompt)
        assert mask[len(prompt) :][:3] == [1] * 3


# ---------------------------------------------------------------------------------------------------------------------
# The commands


@pytest.mark.parametrize("kind", ["lines", "table"])
def test_unread_columns_are_in_the_summary(
    tmp_path: Path, test_data: Path, template: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    """Of a table's column that is not read, the rows that have it count; its values need not be such as JSON has."""
    pairs: list[Row] = [
        {"prompt": "Which?", "chosen": "Red.", "rejected": "No.", "topic": "a", "raw": 1.5},
        {"prompt": "Why?", "chosen": "So.", "rejected": "No.", "topic": None, "raw": 2.5},
    ]
    chats = [{"prompt": row["prompt"], "completion": row["chosen"], "topic": row["topic"]} for row in pairs]
    source = tmp_path / ("in.jsonl" if kind == "lines" else "in.parquet")
    common = ["--input", str(source), "--tokenizer-model", str(test_data / "tokenizers" / "bloom_format_trained")]
    common += ["--chat-template", str(template)]
    jobs: list[tuple[Any, list[Row], list[str]]] = [
        (preprocess_preferences, pairs, ["--as-chat"]),
        (preprocess_chat, chats, []),
    ]
    for main, rows, flags in jobs:
        write(source, rows)
        prefix = ["--output-prefix", str(tmp_path / main.__module__)]
        assert main([*common, *flags, *prefix]) == 0
        said = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
        assert "column not read, topic 1" in said
        assert ("column not read, raw 2" in said) == (main is preprocess_preferences)
        write(source, [{**row, "chat_history": "Hello."} for row in rows])
        assert main([*common, *flags, *prefix, "--overwrite"]) == 1
        assert "leave it out with --ignore-columns chat_history" in capsys.readouterr().err
        assert main([*common, *flags, *prefix, "--overwrite", "--ignore-columns", "chat_history"]) == 0
        assert "column not read, chat_history 2" in " ".join(capsys.readouterr().out.split())


def write(path: Path, rows: list[Row]) -> None:
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_key_that_is_there_twice_is_refused(tmp_path: Path, test_data: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"prompt": "a \\"prompt\\"", "chosen": "b", "rejected": "c", "prompt": "d"}\n')
    job = PreferenceJob(
        (str(tmp_path / "in.jsonl"),), str(tmp_path / "out"), str(test_data / "tokenizers" / "bloom_format_trained")
    )
    with pytest.raises(DataError, match=r"in\.jsonl:1: the key 'prompt' occurs 2 times in the line"):
        run_job(job)


@pytest.mark.parametrize(
    ("row", "name"),
    [
        ('{"messages": [{"role": "user", "content": "a", "content": "b"}, ANSWER]}', "content"),
        ('{"messages" : [{"role" : "user", "content": "a", "role": "x"}, ANSWER]}', "role"),
        # one name with a space behind it, and one that ends with an escape: as many colons behind quotes as names
        ('{"messages" : [{"role": "user", "content": "a", "content": "b"}, ANSWER]}', "content"),
        ('{"messages": [{"role": "user", "content": "a", "content": "b", "x\\\\": 1}, ANSWER]}', "content"),
        # what a text holds is not a key, nor is read what is beside the messages
        ('{"messages": [{"role": "user", "content": "\\"content\\": \\"content\\":"}, ANSWER]}', ""),
        ('{"messages" : [{"role": "user", "content": "a"}, ANSWER], "note": {"a": 1, "a": 2}}', ""),
    ],
)
def test_a_key_that_is_there_twice_in_what_is_read_is_refused(row: str, name: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(bytes_json(("<|im_start|>", "<|im_end|>", "</s>")))
    (tmp_path / "in.jsonl").write_text(row.replace("ANSWER", json.dumps(answer("c"))) + "\n")
    job = ChatJob((str(tmp_path / "in.jsonl"),), str(tmp_path / "out"), str(tmp_path), chat_template="chatml")
    if not name:
        assert preprocess_chats(job).num_samples == 1
        return
    with pytest.raises(DataError, match=rf"in\.jsonl:1: the key '{name}' occurs 2 times in the line"):
        preprocess_chats(job)


def test_a_chat_that_ends_without_an_answer_is_counted(
    tmp_path: Path, test_data: Path, template: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "in.jsonl", [{"messages": [user("a"), answer("b"), user("c")]}, CHAT_ROWS["messages"]])
    flags = ["--input", str(tmp_path / "in.jsonl"), "--output-prefix", str(tmp_path / "out"), "--chat-template"]
    tokenizer = str(test_data / "tokenizers" / "bloom_format_trained")
    assert preprocess_chat([*flags, str(template), "--tokenizer-model", tokenizer]) == 0
    assert "conversations that end without an answer 1" in " ".join(capsys.readouterr().out.split())
