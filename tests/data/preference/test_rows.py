"""Rows of published datasets give the prompt and the answers that they mean."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from megatron.cli.data.preprocess_preferences import main
from megatron.data.chat.conversation import BadRow
from megatron.data.preference.formats import parse_preference


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def answer(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


SYSTEM = {"role": "system", "content": "Be brief."}
STACK = {
    "qid": 1,
    "question": "Why?",
    "date": "2011/01/01",
    "metadata": ["https://example.org"],
    "response_j": "So.",
    "response_k": "No.",
}
ORCA = {"system": "Be brief.", "question": "Why?", "chosen": "So.", "rejected": "No."}
ALPACA = {"instruction": "Translate.", "input": "Ja", "chosen": "Yes", "rejected": "No"}
SHAREGPT = {
    "conversations": [{"from": "system", "value": "Be brief."}, {"from": "human", "value": "Why?"}],
    "chosen": {"from": "gpt", "value": "So."},
    "rejected": {"from": "gpt", "value": "No."},
}
ULTRA = {
    "prompt": "Why?",
    "prompt_id": "f0e37e9f7800261167ce91143f98f511f768847236f133f2d0aed60b444ebe57",
    "chosen": [user("Why?"), answer("So.")],
    "rejected": [user("Why?"), answer("No.")],
    "messages": [user("Why?"), answer("So.")],
    "score_chosen": 8.5,
    "score_rejected": 7.0,
}
SAME_PROMPT = {key: ULTRA[key] for key in ("prompt", "messages")}
KTO = {"prompt": [user("Why?")], "completion": [answer("So.")], "label": True, "chosen": None}
CHAT_OF_WHY = ([user("Why?")], [answer("So.")], [answer("No.")])

ROWS: list[tuple[dict[str, Any], bool, tuple[Any, Any, Any], str]] = [
    (STACK, False, ("Question: Why?\n\nAnswer: ", "So.", "No."), "question, response_j, response_k"),
    (STACK, True, CHAT_OF_WHY, "question, response_j, response_k"),
    (ORCA, True, ([SYSTEM, user("Why?")], *CHAT_OF_WHY[1:]), "question, chosen, rejected (texts)"),
    ({**ORCA, "system": ""}, True, CHAT_OF_WHY, "question, chosen, rejected (texts)"),
    ({"input": "Why?", "chosen": "So.", "rejected": "No."}, True, CHAT_OF_WHY, "input, chosen, rejected (texts)"),
    (
        ALPACA,
        True,
        ([user("Translate.\n\nJa")], [answer("Yes")], [answer("No")]),
        "instruction, chosen, rejected (texts)",
    ),
    (SHAREGPT, False, ([SYSTEM, user("Why?")], *CHAT_OF_WHY[1:]), "conversations, chosen, rejected (messages)"),
    (ULTRA, False, CHAT_OF_WHY, "prompt, chosen, rejected (messages)"),
    (
        {"prompt": "Why?", "chosen": [answer("So.")], "rejected": [answer("No.")]},
        False,
        CHAT_OF_WHY,
        "prompt, chosen, rejected (messages)",
    ),
    (KTO, False, (*CHAT_OF_WHY[:2], None), "prompt, completion, label (messages)"),
]


@pytest.mark.parametrize(("row", "as_chat", "expected", "form"), ROWS)
def test_rows_of_published_datasets(
    row: dict[str, Any], as_chat: bool, expected: tuple[Any, Any, Any], form: str
) -> None:
    found = parse_preference(row, as_chat=as_chat)
    assert (found.prompt, found.chosen, found.rejected) == expected
    assert found.form == form


BAD: dict[str, dict[str, Any]] = {
    "system beside texts": ORCA,  # the text would lose it
    "a question without a template": ALPACA,
    "another prompt": {**ULTRA, "prompt": "Another one"},
    "another system": {**SHAREGPT, "system": "Be long."},
    "bad system": {**ULTRA, "system": 3},
    "bad question": {**STACK, "question": ["Why?"]},
    "missing content": {**ULTRA, "chosen": [user("Why?"), {"role": "assistant", "content": 3}]},
    "unknown role": {**SHAREGPT, "conversations": [{"from": ["human"], "value": "Why?"}]},
}


@pytest.mark.parametrize("kind", BAD)
def test_what_would_be_lost_is_refused(kind: str) -> None:
    with pytest.raises(BadRow) as error:
        parse_preference(BAD[kind])
    assert error.value.kind == kind


def test_formats_and_scores_are_counted(tmp_path: Path, test_data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of rows of several formats, the first of each is named."""
    rows = [STACK, {"prompt": "Q", "chosen": "A", "rejected": "B", "score_chosen": 1, "score_rejected": 1}, STACK]
    rows.append({"prompt": "Q", "chosen": "A", "rejected": "B", "score_chosen": 1, "score_rejected": 2.5})
    # no numbers, so nothing reads them
    rows.append({"prompt": "Q", "chosen": "A", "rejected": "B", "chosen_score": "1", "rejected_score": "2"})
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = str(test_data / "tokenizers" / "bloom_format_trained")
    flags = ["--input", str(tmp_path / "in.jsonl"), "--tokenizer-model", tokenizer, "--workers", "1"]
    assert main([*flags, "--output-prefix", str(tmp_path / "pairs")]) == 0
    said = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert f"format: question, response_j, response_k 2, first {tmp_path}/in.jsonl:1" in said
    assert f"format: prompt, chosen, rejected (texts) 3, first {tmp_path}/in.jsonl:2" in said
    assert {"column not read, chosen_score 1", "column not read, rejected_score 1"} <= set(said)
    assert "pairs whose answers have the same score 1" in said
    assert "pairs whose rejected answer has the higher score 1" in said


def test_texts_that_no_template_writes_are_counted(
    tmp_path: Path, test_data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A template that was given changed nothing of such rows, without a word."""
    (tmp_path / "in.jsonl").write_text(json.dumps({"prompt": "Q", "chosen": "A", "rejected": "B"}) + "\n")
    tokenizer = str(test_data / "tokenizers" / "bloom_format_trained")
    flags = ["--input", str(tmp_path / "in.jsonl"), "--tokenizer-model", tokenizer, "--workers", "1"]
    said = "rows of texts, which --chat-template does not write without --as-chat"
    template = ["--chat-template", "chatml"]
    for number, (given, is_said) in enumerate((([], False), (template, True), ([*template, "--as-chat"], False))):
        assert main([*flags, *given, "--output-prefix", str(tmp_path / f"pairs{number}")]) == 0
        assert (said in " ".join(capsys.readouterr().out.split())) is is_said


def test_tables_give_what_lines_give(tmp_path: Path, test_data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a downloaded folder with two splits, one is read. A column that a row lacks holds null there."""
    rows = [ULTRA, {**SAME_PROMPT, "chosen": ULTRA["rejected"], "rejected": ULTRA["chosen"]}]
    (tmp_path / "data").mkdir()
    tables = {"train_prefs": rows, "test_prefs": rows[:1]}
    for split, found in tables.items():
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(found), tmp_path / "data" / f"{split}-00000.parquet")
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    template = str(test_data / "chat_templates" / "axolotl_apache2" / "chatml.jinja")
    flags = ["--tokenizer-model", str(test_data / "tokenizers" / "bloom_format_trained"), "--chat-template", template]
    for source, name in ((["in.jsonl"], "lines"), (["data", "--split", "train_prefs"], "table")):
        given = ["--input", str(tmp_path / source[0]), *source[1:], "--output-prefix", str(tmp_path / name)]
        assert main([*flags, *given, "--workers", "1"]) == 0
    assert (tmp_path / "table.bin").read_bytes() == (tmp_path / "lines.bin").read_bytes()
    capsys.readouterr()
    assert main([*flags, "--input", str(tmp_path / "data"), "--output-prefix", str(tmp_path / "both")]) == 1
    assert "choose one with --split" in capsys.readouterr().err
