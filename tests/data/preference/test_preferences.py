"""Rows of preferences become TRL's prompt and answers, and what cannot be used is named with its row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron.cli.data.preprocess_preferences import main
from megatron.data.chat.conversation import BadRow
from megatron.data.index.indexed import DataError, IndexedDataset
from megatron.data.preference.formats import parse_preference
from megatron.data.preference.preprocessing import PreferenceJob, preprocess_preferences
from tests.data.chat.test_conversation import bytes_json

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
USER, SYSTEM = {"role": "user", "content": "Why?"}, {"role": "system", "content": "Be brief."}
GOOD, POOR = ({"role": "assistant", "content": text} for text in ("Because.", "Because not."))
CHAT = {"prompt": [SYSTEM, USER], "chosen": [GOOD], "rejected": [POOR]}
SAME_CHAT = [
    CHAT,
    {"messages": [SYSTEM, USER], "chosen": GOOD, "rejected": POOR},
    {"chosen": [SYSTEM, USER, GOOD], "rejected": [SYSTEM, USER, POOR]},
    {"prompt": "Why?", "chosen": [SYSTEM, USER, GOOD], "rejected": [SYSTEM, USER, POOR], "score": 3},
    {"prompt": [SYSTEM, USER], "chosen": [SYSTEM, USER, GOOD], "rejected": [SYSTEM, USER, POOR]},
]
TEXT = {"prompt": "Q: why?\nA:", "chosen": " because", "rejected": " because not"}
HEAD = "\n\nHuman: Why?\n\nAssistant: What?\n\nHuman: That.\n\nAssistant:"
TRANSCRIPT = {"chosen": f"{HEAD} I know", "rejected": f"{HEAD} I do not"}


def answer(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    """One that puts <s> before texts."""
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    described = json.loads(bytes_json(("<s>", "</s>", "<|user|>", "<|assistant|>", "<|system|>")))
    begin = next(token["id"] for token in described["added_tokens"] if token["content"] == "<s>")
    described["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [begin], "tokens": ["<s>"]}},
    }
    (folder / "tokenizer.json").write_text(json.dumps(described))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "bos_token": "<s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": TEMPLATE}))
    return folder


def run(tmp_path: Path, tokenizer: Path, *rows: Any, **options: Any) -> tuple[list[list[list[int]]], Any]:
    """Return [prompt, chosen, rejected] of each row, and the totals."""
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    prefix = tmp_path / "out" / "pairs"
    totals = preprocess_preferences(
        PreferenceJob((str(source),), str(prefix), str(tokenizer), overwrite=True, **options)
    )
    data = IndexedDataset(prefix)
    assert data.document_index.tolist() == list(range(0, len(data) + 1, 3))
    sequences = [data.read(i).tolist() for i in range(len(data))]
    return [sequences[i : i + 3] for i in range(0, len(data), 3)], totals


def common(first: list[int], second: list[int]) -> int:
    return next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(map(len, (first, second)))
    )


def expected(tokenizer: Path, row: dict[str, Any]) -> list[list[int]]:
    """What TRL's DPOTrainer makes of a row, by transformers' tokenizer."""
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(tokenizer)
    if isinstance(row["prompt"], str):
        prompt, *wholes = (
            theirs(text)["input_ids"]
            for text in (row["prompt"], *(row["prompt"] + row[side] + "</s>" for side in ("chosen", "rejected")))
        )
    else:
        prompt = theirs.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=False)
        wholes = [
            theirs.apply_chat_template([*row["prompt"], *row[side]], return_dict=False)
            for side in ("chosen", "rejected")
        ]
    cut = min(common(prompt, whole) for whole in wholes)
    return [prompt[:cut], *(whole[cut:] for whole in wholes)]


def test_rows_have_transformers_ids(tmp_path: Path, tokenizer: Path) -> None:
    merged = {"prompt": "Q: why? A: b", "chosen": "ecause", "rejected": "ut no"}
    found, totals = run(tmp_path, tokenizer, *SAME_CHAT, TEXT, merged)
    assert found == [expected(tokenizer, CHAT)] * len(SAME_CHAT) + [expected(tokenizer, row) for row in (TEXT, merged)]
    assert totals.counts.num_appended_eos == 4
    assert totals.num_pairs == 7


def test_a_transcript_is_cut_before_its_last_answer(tmp_path: Path, tokenizer: Path) -> None:
    """Not where the answers begin to differ, as TRL's common prefix does."""
    ((prompt, chosen, rejected),), _ = run(tmp_path, tokenizer, TRANSCRIPT)
    apart = {"prompt": HEAD, "chosen": " I know", "rejected": " I do not"}
    assert [prompt, chosen, rejected] == expected(tokenizer, apart)
    turns = [
        {"role": role, "content": text} for role, text in [("user", "Why?"), ("assistant", "What?"), ("user", "That.")]
    ]
    answers = {
        side: [{"role": "assistant", "content": text}]
        for side, text in [("chosen", "I know"), ("rejected", "I do not")]
    }
    as_chat, _ = run(tmp_path, tokenizer, TRANSCRIPT, {"prompt": "Why?", "chosen": "A", "rejected": "B"}, as_chat=True)
    assert as_chat[0] == expected(tokenizer, {"prompt": turns, **answers})
    texts = {side: [{"role": "assistant", "content": side[0].upper()}] for side in ("A", "B")}
    assert as_chat[1] == expected(tokenizer, {"prompt": [USER], "chosen": texts["A"], "rejected": texts["B"]})


def test_a_row_with_one_answer_lacks_the_other(tmp_path: Path, tokenizer: Path) -> None:
    whole = expected(tokenizer, TEXT)
    rows = [
        {"prompt": TEXT["prompt"], "completion": TEXT[side], "label": side == "chosen"}
        for side in ("chosen", "rejected")
    ]
    found, totals = run(tmp_path, tokenizer, *rows)
    assert found == [[whole[0], whole[1], []], [whole[0], [], whole[2]]]
    assert totals.counts.num_unpaired == 2


BAD = {
    "equal answers": {**TEXT, "rejected": TEXT["chosen"]},
    "empty rejected": {**TEXT, "rejected": " "},
    "no chosen": {"prompt": "Q", "rejected": "B"},
    "no prompt": {**TEXT, "prompt": ""},
    "no common prompt": {"chosen": "yes", "rejected": "no"},
    "mixed kinds": {**TEXT, "chosen": [GOOD]},
    "no rejected": {**TEXT, "rejected": None},
    "bad chosen": {**CHAT, "chosen": [USER]},
    "bad rejected": {**CHAT, "rejected": 3},
    "missing content": {**CHAT, "rejected": [{"role": "assistant", "content": ""}]},
    "bad label": {"prompt": "Q", "completion": "A", "label": "good"},
    "no label": {"prompt": "Q", "completion": "A"},
}


def test_bad_rows_are_named_or_counted(tmp_path: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for kind, row in BAD.items():
        with pytest.raises(DataError, match=r"in.jsonl:2: .*--bad-rows skip") as error:
            run(tmp_path, tokenizer, TEXT, row)
        assert len(str(error.value)) < 400, kind
        assert not (tmp_path / "out" / "pairs.bin").exists(), kind
    rows = "".join(json.dumps(row) + "\n" for row in (TEXT, *BAD.values()))
    (tmp_path / "in.jsonl").write_text(rows)
    flags = ["--input", str(tmp_path / "in.jsonl"), "--output-prefix", str(tmp_path / "pairs"), "--bad-rows", "skip"]
    assert main([*flags, "--tokenizer-model", str(tokenizer), "--show", "1"]) == 0
    said = capsys.readouterr().out
    for kind in BAD:
        assert f"bad, {kind}" in said, kind
    assert "[chosen: " in said
    assert len(IndexedDataset(tmp_path / "pairs")) == 3
    shown = ["--input", str(tmp_path / "in.jsonl"), "--tokenizer-model", str(tokenizer), "--show", "2"]
    assert main(shown) == 0
    output = capsys.readouterr()
    assert "[chosen: " in output.out
    assert (
        output.err.splitlines()[1]
        == f"skipped {tmp_path / 'in.jsonl'}:3: 'rejected' is empty; write an answer, or leave the row out"
    )
    (tmp_path / "in.jsonl").write_text(json.dumps({"question": "Q", "answer": "A"}) + "\n")
    assert main(shown) == 1
    output = capsys.readouterr()
    assert "in.jsonl:1: no key 'chosen'; the row has 'question', 'answer': write" in output.err


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({**TEXT, "rejected": None}, "'rejected' is null; the row has 'prompt', 'chosen': write it as"),
        ({**TEXT, "rejected": 5}, "'rejected' is 5; write a text, or a list of messages"),
        (
            {"chosen": "\n\nHuman: Who?\n\nAssistant: I", "rejected": "\n\nHuman: Why?\n\nAssistant: So"},
            "are transcripts that differ before the assistant's answer; write answers to the same turns",
        ),
    ],
)
def test_a_bad_row_is_described_as_it_is(row: dict[str, Any], said: str) -> None:
    with pytest.raises(BadRow) as error:
        parse_preference(row)
    assert said in str(error.value)


def test_transcripts_that_part_in_an_answer_are_taken() -> None:
    """Their further turns belong to the answers, as in TRL."""
    head = "\n\nHuman: Why?\n\nAssistant:"
    found = parse_preference({"chosen": f"{head} So.\n\nHuman: Oh.\n\nAssistant: Yes", "rejected": f"{head} No"})
    assert (found.prompt, found.rejected) == (head, " No")


def test_a_json_array_of_rows_is_read_and_its_bad_row_named(tmp_path: Path, tokenizer: Path) -> None:
    source, prefix = tmp_path / "in.json", tmp_path / "out" / "pairs"
    job = PreferenceJob((str(source),), str(prefix), str(tokenizer), overwrite=True)
    source.write_text(json.dumps([TEXT, CHAT, {"prompt": "Q", "completion": "A", "label": True}], indent=1))
    assert preprocess_preferences(job).num_pairs == 3
    data = IndexedDataset(prefix)
    assert [data.read(number).tolist() for number in range(3)] == expected(tokenizer, TEXT)
    source.write_text(json.dumps([TEXT, BAD["equal answers"]], indent=1))
    with pytest.raises(DataError, match=r"in\.json, row 2: 'chosen' and 'rejected' are equal"):
        preprocess_preferences(job)


def test_real_pairs_have_trls_ids(tmp_path: Path, test_data: Path) -> None:
    """Needs TRL: its DPOTrainer tokenizes the same rows."""
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    folder = test_data / "tokenizers" / "bloom_format_trained"
    template = (test_data / "chat_templates" / "axolotl_apache2" / "chatml.jinja").read_text()
    theirs = AutoTokenizer.from_pretrained(folder)
    theirs.chat_template = template
    sizes: dict[str, Any] = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    # of a folder: without a name, transformers looks for a model of no name on its hub
    LlamaForCausalLM(LlamaConfig(vocab_size=32000, **sizes)).save_pretrained(tmp_path / "model")
    model = LlamaForCausalLM.from_pretrained(tmp_path / "model")
    texts = [json.loads(line) for line in (test_data / "dpo_pairs.jsonl").open()][:60]
    chats = [json.loads(line) for line in (test_data / "dpo_pairs_messages.jsonl").open()][:60]
    (tmp_path / "chatml.jinja").write_text(template)
    for rows, as_trl in (
        (texts, [{key: row[key] for key in ("prompt", "chosen", "rejected")} for row in texts]),
        (chats, [{"prompt": r["messages"], "chosen": [r["chosen"]], "rejected": [r["rejected"]]} for r in chats]),
    ):
        trainer = trl.DPOTrainer(
            model,
            args=trl.DPOConfig(
                output_dir=str(tmp_path / "trl"), max_length=None, use_cpu=True, report_to=[], bf16=False
            ),
            train_dataset=datasets.Dataset.from_list(as_trl),
            processing_class=theirs,
        )
        found, _ = run(tmp_path, folder, *rows, chat_template=str(tmp_path / "chatml.jinja"))
        assert found == [
            [row[f"{part}_ids"] for part in ("prompt", "chosen", "rejected")] for row in trainer.train_dataset
        ]


def test_new_forms_have_the_ids_of_trl(tmp_path: Path, test_data: Path) -> None:
    """Rows are brought to TRL's form by hand, and rendered by its own functions where it takes that form."""
    trl = pytest.importorskip("trl")
    from transformers import AutoTokenizer

    folder = test_data / "tokenizers" / "bloom_format_trained"
    theirs = AutoTokenizer.from_pretrained(folder)
    path = test_data / "chat_templates" / "axolotl_apache2" / "chatml.jinja"
    theirs.chat_template = path.read_text()
    ask, hello = ({"role": "user", "content": text} for text in ("Which colour is it?", "Hello?"))
    sure = {"role": "user", "content": "Sure?"}
    red, no = [answer("It is red.")], [answer("No idea.")]
    more = [answer("It is red."), sure, answer("Yes.")]
    cases: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"messages": [ask, *red], "label": True}, {"prompt": [ask], "chosen": red}),
        ({"conversations": [{"from": "human", "value": ask["content"]}, {"from": "gpt", "value": "No idea."}],
          "kto_tag": False, "system": "Be brief."}, {"prompt": [SYSTEM, ask], "rejected": no}),
        ({"messages": json.dumps([SYSTEM, ask, *more]), "label": 0}, {"prompt": [SYSTEM, ask, *more[:2]],
                                                                    "rejected": more[2:]}),
        ({"prompt": ask["content"], "responses": ["So so.", "It is red.", "No idea."], "scores": [2, 3.5, 1]},
         {"prompt": [ask], "chosen": red, "rejected": no}),
        ({"instruction": ask["content"], "completions": [{"response": "It is red.", "overall_score": 8.5},
                                                         {"response": "No idea.", "overall_score": 1.0}]},
         {"prompt": [ask], "chosen": red, "rejected": no}),
        ({"prompt": "Human: Which colour is it?\n\nAssistant:",
          "answers": [{"answer": "No idea.", "rank": 2}, {"answer": "It is red.", "rank": 1}]},
         {"prompt": [ask], "chosen": red, "rejected": no}),
        ({"instruction": ask["content"], "history": [["Hello?", "Hey."]], "system_prompt": "Be brief.",
          "chosen": "It is red.", "rejected": "No idea."},
         {"prompt": [SYSTEM, hello, answer("Hey."), ask], "chosen": red, "rejected": no}),
        ({"chosen": [ask, *more], "rejected": [ask, *no]}, {"chosen": [ask, *more], "rejected": [ask, *no]}),
        ({"chosen": json.dumps([ask, *red]), "rejected": json.dumps([ask, *no])},
         {"chosen": [ask, *red], "rejected": [ask, *no]}),
    ]  # fmt: skip
    rows = [row for row, _ in cases]
    found, totals = run(tmp_path, folder, *rows, chat_template=str(path), as_chat=True)
    for ours, (_, canonical) in zip(found, cases, strict=True):
        split = trl.data_utils.maybe_extract_prompt(canonical)
        wholes = {}
        for side in ("chosen", "rejected"):
            if side in split:
                one = trl.apply_chat_template({"prompt": split["prompt"], "completion": split[side]}, theirs)
                prompt, wholes[side] = one["prompt"], one["prompt"] + one["completion"]
        ids = theirs(prompt)["input_ids"]
        expected = [ids, *(theirs(wholes[side])["input_ids"][len(ids) :] if side in wholes else [] for side in
                           ("chosen", "rejected"))]  # fmt: skip
        assert ours == expected
    assert totals.counts.num_passed_over == 1
    assert totals.counts.num_other_turns == 1
