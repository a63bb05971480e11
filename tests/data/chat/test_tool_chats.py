"""Agentic chats under every template: the ids and marks of transformers and whole turns, or a refusal by name."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from megatron.data.chat.conversation import REASONING, BadRow, Chat, parse_row
from megatron.data.chat.encoder import ChatCounts, ChatEncoder
from megatron.data.chat.template import MARKER
from megatron.data.chat.tokenizer import ChatTokenizer
from tests.data.chat.agent_templates import AGENT_TEMPLATES
from tests.data.chat.chat_oracle import Oracle, Refused, Unclear
from tests.data.chat.test_conversation import NAMES, bytes_json, encode, encoder_of, load_written, trained_text, turn
from tests.data.chat.tool_chats import Generator, Row, words

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
DISTORTED = ('"{}"', "&#34;", "{'w", '"{\\"w', "'type': 'text'", '"type": "text"')
"""Traces of calls escaped for HTML, of objects as Python writes them, of JSON text in quotes, of lists of parts."""
WITH_CALLS = {
    *("axolotl_apache2/command_a_tool_use", "axolotl_apache2/mistral_v2v3", "axolotl_apache2/qwen3"),
    *("axolotl_apache2/qwen_25", "chujiezheng_mit/qwen2.5-instruct"),
    *("mistral_common_apache2/v3_spm", "mistral_common_apache2/v7", *AGENT_TEMPLATES),
}
"""Templates that write tool calls. Every other must refuse them."""


def template_of(name: str, test_data: Path) -> str:
    return AGENT_TEMPLATES.get(name) or (test_data / "chat_templates" / f"{name}.jinja").read_text()


def tokenizer_of(template: str) -> ChatTokenizer:
    special = dict.fromkeys([*TOKENS.values(), *(found[0] for found in MARKER.finditer(template))])
    return load_written(bytes_json(tuple(special)), TOKENS["eos_token"], bos_token="<s>")


def forms(messages: list[Row]) -> Iterator[list[Row]]:
    """Yield the forms of messages that docs/guides/chats.md lists, each without null."""
    conversions: tuple[Callable[[Any], Any], ...] = (lambda given: given, as_object, as_text)
    for fills, joins, convert in itertools.product((False, True), (False, True), conversions):
        found = []
        for message in json.loads(json.dumps(messages)):
            message = {key: value for key, value in message.items() if value is not None}
            if fills:
                message.setdefault("content", "")
            if joins and isinstance(message.get("content"), list):
                message["content"] = "\n".join(part["text"] for part in message["content"])
            for call in message.get("tool_calls", ()):
                call["function"]["arguments"] = convert(call["function"]["arguments"])
            found.append(message)
        yield found


def as_object(given: Any) -> Any:
    return json.loads(given) if isinstance(given, str) else given


def as_text(given: Any) -> Any:
    return given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)


def is_distorted(text: str) -> bool:
    """Return true for a trace outside the tools, which have types themselves."""
    return any(trace in text.replace('"type": "text"}, "w', "") for trace in DISTORTED)


def expected_of(oracle: Oracle, row: Row) -> tuple[list[Row], str]:
    """Return the messages in the first form that transformers renders properly, and the text. Raises Refused."""
    for messages in forms(row["messages"]):
        try:
            text = oracle.render(messages)
        except Refused:
            continue
        if not is_distorted(text):
            return messages, text
    raise Refused


def is_left_out(row: Row, messages: list[Row], text: str) -> bool:
    """Return true if transformers' text lacks a part of the row without which it must not be trained."""
    tools = row.get("tools", [])
    wanted = [word for tool in tools for word in words(tool["function"])]
    names = Counter(tool["function"]["name"] for tool in tools)
    for message in messages:
        calls = [call["function"] for call in message.get("tool_calls", ())]
        names.update(call["name"] for call in calls)
        wanted += words([call["arguments"] for call in calls])
        if not calls and message["role"] != "system":
            wanted += words(message["content"])
    return any(word not in text for word in wanted) or any(text.count(name) < count for name, count in names.items())


def is_trained(message: Row) -> bool:
    return message["role"] == "assistant" and message.get("train") is not False and message.get("weight") != 0


def check_row(row: Row, template: str, encoder: ChatEncoder, reference: Any, counts: Counter[str]) -> None:
    """Compare a row with transformers and with the oracle of the trained spans."""
    options: dict[str, Any] = {"tools": row.get("tools"), **row.get("chat_template_kwargs", {})}
    oracle = Oracle(template, TOKENS, **options)
    chat_counts = ChatCounts()
    (result,) = encoder.encode([parse_row(row)], chat_counts)
    try:
        messages, text = expected_of(oracle, row)
    except Refused:
        assert isinstance(result, BadRow)
        assert result.kind == "refused by the template"
        counts["refused by transformers"] += 1
        return
    if is_left_out(row, messages, text):
        assert isinstance(result, BadRow), text
        assert result.kind == "left out by the template", result
        counts["left out"] += 1
        return
    if not any(map(is_trained, messages)):
        assert isinstance(result, BadRow)
        assert result.kind == "nothing trained", result
        counts["nothing trained"] += 1
        return
    assert not isinstance(result, BadRow), (result, text)
    (sample,) = result
    given = reference.apply_chat_template(messages, **options, return_dict=True, return_assistant_tokens_mask=True)
    ids, mask = sample.ids.tolist(), sample.mask.tolist()
    if chat_counts.num_appended_eos:
        assert ids.pop() == encoder.tokenizer.eos_id
        assert mask.pop() == 1
    assert ids == given["input_ids"]
    if "{% generation %}" in template:
        if all(is_trained(message) for message in messages if message["role"] == "assistant"):
            assert mask == given["assistant_masks"]
        counts["equal"] += 1
        return
    try:
        _, spans = oracle.trained(messages, "")
    except Unclear:
        counts["equal, turns not compared"] += 1
        return
    for message, (start, end) in zip(filter(is_trained, messages), spans, strict=True):
        calls = [call["function"] for call in message.get("tool_calls", ())]
        assert all(word in text[start:end] for word in words(calls))
        others = [other for other in messages if other is not message and other["role"] != "assistant"]
        assert not any(word in text[start:end] for other in others for word in words(other["content"]))
    read = reference(text, add_special_tokens=False, return_offsets_mapping=True)
    assert read["input_ids"] == ids
    expected = [int(any(a < end and start < b for start, end in spans)) for a, b in read["offset_mapping"]]
    assert mask[1:] == expected[1:], (trained_text(encoder, sample), [text[start:end] for start, end in spans])
    counts["equal"] += 1


def check_template(name: str, template: str, rows: list[Row]) -> Counter[str]:
    """Check rows, and return the numbers of those that are equal to transformers, and refused by name."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = tokenizer_of(template)
    inner = tokenizers.Tokenizer.from_str(tokenizer.content.decode())
    reference = PreTrainedTokenizerFast(tokenizer_object=inner, chat_template=template, **TOKENS)
    encoder = encoder_of(template, tokenizer)
    counts: Counter[str] = Counter()
    for row in rows:
        check_row(row, template, encoder, reference, counts)
    if name not in WITH_CALLS:
        assert counts["equal"] <= sum(not any("tool_calls" in m for m in row["messages"]) for row in rows)
    return counts


def rows_for(count: int, seed: int) -> list[Row]:
    generator = Generator(seed)
    return [generator.row(most=1 if i % 3 == 0 else 3) for i in range(count)]


@pytest.mark.parametrize("name", [*NAMES, *AGENT_TEMPLATES])
def test_agentic_chats_equal_transformers_or_are_refused_by_name(name: str, test_data: Path) -> None:
    counts = check_template(name, template_of(name, test_data), rows_for(12, seed=1))
    assert counts["equal"] >= (4 if name in WITH_CALLS else 0), counts


@pytest.mark.slow
@pytest.mark.parametrize("name", [*NAMES, *AGENT_TEMPLATES])
def test_many_agentic_chats_equal_transformers_or_are_refused_by_name(name: str, test_data: Path) -> None:
    counts = check_template(name, template_of(name, test_data), rows_for(1000, seed=2))
    print(name, dict(counts))
    assert counts["equal"] >= (300 if name in WITH_CALLS else 0), counts


# ---------------------------------------------------------------------------------------------------------------------
# One case each


QUESTION = {"role": "user", "content": "Weather?"}
CALL = {
    "type": "function",
    "id": "123456789",
    "function": {"name": "look_up", "arguments": {"city": "Oslo", "days": 2}},
}
CALL_TURN: Row = {"role": "assistant", "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "123456789", "content": "rain"}
ANSWER = {"role": "assistant", "content": "Rain."}
TOOL = {"type": "function", "function": {"name": "look_up", "description": "d", "parameters": {}}}
AGENTIC = {"messages": [QUESTION, CALL_TURN, RESULT, ANSWER], "tools": [TOOL]}


def trained_of(name: str, row: Row, test_data: Path | None = None, **rules: Any) -> str:
    """Return the trained text of a row, or the reason why it is bad."""
    template = template_of(name, test_data) if test_data else name
    encoder = encoder_of(template, tokenizer_of(template), **rules)
    try:
        (result,) = encode(encoder, parse_row(row))
    except BadRow as error:
        return f"{error.kind}: {error}"
    if isinstance(result, BadRow):
        return f"{result.kind}: {result}"
    return "|".join(trained_text(encoder, sample) for sample in result)


@pytest.mark.parametrize("content", ["", None, "missing"])
def test_a_turn_of_calls_only_is_trained_whole_under_qwen3_and_command_a(content: str | None, test_data: Path) -> None:
    call_turn = CALL_TURN if content == "missing" else {**CALL_TURN, "content": content}
    row = {**AGENTIC, "messages": [QUESTION, call_turn, RESULT, ANSWER]}
    qwen3 = '<tool_call>\n{"name": "look_up", "arguments": {"city": "Oslo", "days": 2}}\n</tool_call><|im_end|>'
    assert trained_of("axolotl_apache2/qwen3", row, test_data) == f"{qwen3}|</think>\n\nRain.<|im_end|>"
    assert trained_of("axolotl_apache2/command_a_tool_use", row, test_data) == (
        "<|START_THINKING|><|END_THINKING|><|START_ACTION|>[\n"
        '    {"tool_call_id": "0", "tool_name": "look_up", "parameters": {"city": "Oslo", "days": 2}}\n'
        "]<|END_ACTION|><|END_OF_TURN_TOKEN|>|<|START_RESPONSE|>Rain.<|END_RESPONSE|><|END_OF_TURN_TOKEN|>"
    )


def test_arguments_as_json_text_are_not_put_in_quotes_again(test_data: Path) -> None:
    call = {**CALL, "function": {"name": "look_up", "arguments": '{"city": "Oslo", "days": 2}'}}
    row = {**AGENTIC, "messages": [QUESTION, {"role": "assistant", "tool_calls": [call]}, RESULT, ANSWER]}
    for name in sorted(WITH_CALLS):
        assert trained_of(name, row, test_data) == trained_of(name, AGENTIC, test_data)


def test_a_long_integer_in_json_text_is_exact(test_data: Path) -> None:
    number = 123456789012345678901234567890
    call = {**CALL, "function": {"name": "look_up", "arguments": f'{{"city": {number}, "a": "\\"a\\": 1"}}'}}
    row = {**AGENTIC, "messages": [QUESTION, {"role": "assistant", "tool_calls": [call]}, RESULT, ANSWER]}
    for name in sorted(WITH_CALLS):
        assert str(number) in trained_of(name, row, test_data)


def test_calls_without_a_function_and_calls_as_json_text_are_trained_like_others(test_data: Path) -> None:
    bare = [{"id": "123456789", "name": "look_up", "arguments": {"city": "Oslo", "days": 2}}]
    for name in sorted(WITH_CALLS):
        for calls in (bare, json.dumps(bare), json.dumps([CALL])):
            row = {**AGENTIC, "messages": [QUESTION, {"role": "assistant", "tool_calls": calls}, RESULT, ANSWER]}
            assert trained_of(name, row, test_data) == trained_of(name, AGENTIC, test_data)


@pytest.mark.parametrize(
    "flag", [{"weight": 0}, {"weight": 0.0}, {"train": False}, {"training": False}, {"loss": 0}, {"mask": True}]
)
def test_a_turn_with_a_flag_is_read_and_not_trained(flag: Row) -> None:
    messages = turn("a", "b", "c", "d")
    messages[1] |= flag
    assert trained_of("chatml", {"messages": messages}) == "d<|im_end|>"
    assert trained_of("chatml", {"messages": messages, "unmask": True}) == "a|c|d<|im_end|>"
    messages[3] |= flag
    assert trained_of("chatml", {"messages": messages}).startswith("nothing trained: ")


def test_flags_that_train_leave_an_assistants_turn_and_add_anothers() -> None:
    messages = turn("a", "b", "c", "d")
    messages[0]["weight"] = messages[1]["weight"] = 1
    messages[2]["train"] = messages[3]["train"] = True
    assert trained_of("chatml", {"messages": messages}) == "b<|im_end|>|c|d<|im_end|>"


def test_an_untrained_last_turn_gets_no_eos() -> None:
    bare = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    messages = turn("a", "b", "c", "d")
    assert trained_of(bare, {"messages": messages}) == "assistant: b|assistant: d\n</s>"
    messages[3]["weight"] = 0
    assert trained_of(bare, {"messages": messages}) == "assistant: b"


def test_eos_is_appended_to_calls_that_the_template_leaves_open() -> None:
    bare = (
        "{% for t in tools %}{{ t | tojson }}{% endfor %}{% for m in messages %}{{ '\n' + m.role }}: {{ m.content }}"
        "{% for c in m.tool_calls or [] %}[{{ c.function | tojson }}]{% endfor %}{% endfor %}"
        "{% if add_generation_prompt %}\nassistant: {% endif %}"
    )
    row = {**AGENTIC, "messages": [QUESTION, CALL_TURN]}
    calls = '[{"name": "look_up", "arguments": {"city": "Oslo", "days": 2}}]'
    assert trained_of(bare, row) == f"{calls}</s>"
    assert trained_of(bare, AGENTIC) == f"{calls}|Rain.</s>"


@pytest.mark.parametrize("thinks", [True, False])
def test_a_turn_follows_the_prompt_of_inference(thinks: bool, test_data: Path) -> None:
    row = {**AGENTIC, "chat_template_kwargs": {"enable_thinking": thinks}}
    template = template_of("axolotl_apache2/qwen3", test_data)
    encoder = encoder_of(template, tokenizer_of(template))
    (result,) = encode(encoder, parse_row(row))
    assert isinstance(result, list)
    (sample,) = result
    oracle = Oracle(template, TOKENS, tools=[TOOL], enable_thinking=thinks)
    prompt = oracle.render([QUESTION, CALL_TURN, RESULT], prompt=True)
    start = len(sample.mask) - int(sample.mask[::-1].argmin()) - 1  # the line end after the last turn
    first = start - int(sample.mask[start - 1 :: -1].argmin())
    assert encoder.tokenizer.decode(sample.ids[:first].tolist()) == prompt
    assert trained_text(encoder, sample).endswith("|Rain.<|im_end|>" if not thinks else "|</think>\n\nRain.<|im_end|>")


def test_reasoning_in_a_content_is_trained_where_it_is_written_and_counted_where_not(test_data: Path) -> None:
    """As the data sets of reasoning models have it. Qwen 3 writes it in the last turns, DeepSeek's nowhere."""
    template = template_of("axolotl_apache2/qwen3", test_data)
    encoder = encoder_of(template, tokenizer_of(template))

    def trained(*messages: Row) -> tuple[str, int]:
        counts = ChatCounts()
        (result,) = encoder.encode([parse_row({"messages": list(messages), "tools": [TOOL]})], counts)
        assert isinstance(result, list), result
        assert set(counts.left_out) <= {"reasoning"}
        return trained_text(encoder, result[0]), counts.left_out["reasoning"]

    answer = {"role": "assistant", "content": "<think>\nadd\n</think>\n\nIt is <b>4</b>."}
    assert trained(QUESTION, answer) == ("add\n</think>\n\nIt is <b>4</b>.<|im_end|>", 0)
    assert trained(QUESTION, answer, QUESTION, ANSWER) == (
        "It is <b>4</b>.<|im_end|>|</think>\n\nRain.<|im_end|>",
        1,
    )
    call = '<tool_call>\n{"name": "look_up", "arguments": {"city": "Oslo", "days": 2}}\n</tool_call><|im_end|>'
    calling = CALL_TURN | {"content": "<think>\nlook\n</think>\n\n"}
    assert trained(QUESTION, calling) == (f"look\n</think>\n\n{call}", 0)
    assert trained(QUESTION, calling | {"content": "<think>\n\n</think>\n\n"}, RESULT, answer) == (
        f"{call}|add\n</think>\n\nIt is <b>4</b>.<|im_end|>",
        0,
    )
    assert trained_of("deepseek", {"messages": [QUESTION, answer]}, test_data) == "\n\nIt is <b>4</b>.</s>"


def test_generation_marks_are_the_trained_tokens(test_data: Path) -> None:
    chats = [json.loads(line) for line in (test_data / "sft_messages.jsonl").open()][:12]
    template = template_of("axolotl_apache2/phi_4", test_data)
    from transformers import PreTrainedTokenizerFast

    tokenizer = tokenizer_of(template)
    inner = tokenizers.Tokenizer.from_str(tokenizer.content.decode())
    reference = PreTrainedTokenizerFast(tokenizer_object=inner, chat_template=template, **TOKENS)
    encoder = encoder_of(template, tokenizer)
    for row in chats:
        given: Any = reference.apply_chat_template(row["messages"], return_dict=True, return_assistant_tokens_mask=True)
        (result,) = encode(encoder, parse_row(row))
        assert isinstance(result, list)
        assert (result[0].ids.tolist(), result[0].mask.tolist()) == (given["input_ids"], given["assistant_masks"])
    messages = turn("a", "b", "c", "d")
    messages[1]["train"] = False
    assert trained_of(template, {"messages": messages}) == "d<|im_end|>"


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("{% generation %}{{ m.content }}{% endgeneration %}<|im_end|>\n", "a generation mark before the end of"),
        (
            "{{ m.content[:1] }}{% generation %}{{ m.content[1:] }}<|im_end|>\n{% endgeneration %}",
            "hold message 2 alone",
        ),
    ],
)
def test_generation_marks_beside_the_turn_are_refused(body: str, said: str) -> None:
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
        f"{body}{{% else %}}{{{{ m.content }}}}<|im_end|>\n{{% endif %}}{{% endfor %}}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    refused = trained_of(template, {"messages": turn("a", "bcd", "e", "fgh")})
    assert refused.startswith("turn not identified: chat template here has")
    assert said in refused


def test_a_template_without_calls_tools_or_a_role_is_refused_by_name(test_data: Path) -> None:
    calls = {"messages": [QUESTION, {**CALL_TURN, "content": "I look it up."}, RESULT, ANSWER]}
    refused = trained_of("chatml", calls)
    assert refused == (
        "left out by the template: chat template preset chatml does not write the tool calls of message 2; use a "
        "template that writes tool calls"
    )
    refused = trained_of("chatml", {"messages": [QUESTION, ANSWER], "tools": [TOOL]})
    assert "does not write the tool look_up; use a template that does, or drop them" in refused
    refused = trained_of("chatml", {"messages": [QUESTION, ANSWER], "documents": [{"text": "t"}]})
    assert "does not write the row's documents" in refused
    developer = [{"role": "developer", "content": "Be brief."}, QUESTION, ANSWER]
    assert trained_of("chatml", {"messages": developer}) == "Rain.<|im_end|>"
    refused = trained_of("axolotl_apache2/qwen3", {"messages": developer}, test_data)
    assert "leaves out message 1 (developer); give it a role that the template writes" in refused


def test_reasoning_only_is_no_empty_answer_under_a_template_without_reasoning(test_data: Path) -> None:
    messages = [QUESTION, {"role": "assistant", "content": "", "reasoning_content": "Hm."}]
    assert trained_of("chatml", {"messages": messages}).startswith("turn not identified: ")
    assert trained_of("axolotl_apache2/qwen3", {"messages": messages}, test_data) == "Hm.\n</think>\n\n<|im_end|>"


def test_texts_that_a_template_leaves_out_of_whole_turns_are_counted(test_data: Path) -> None:
    messages = [QUESTION, {**CALL_TURN, "content": "I look."}, RESULT, {**ANSWER, "thinking": "Hm."}]
    template = template_of("axolotl_apache2/command_a_tool_use", test_data)
    counts = ChatCounts()
    row = {**AGENTIC, "messages": messages, "chat_template_kwargs": {"enable_thinking": True}}
    encoder_of(template, tokenizer_of(template)).encode([parse_row(row)], counts)
    kinds = ("content beside tool calls", "reasoning", "chat_template_kwargs enable_thinking")
    assert counts.left_out == dict.fromkeys(kinds, 1)


def test_further_keys_of_messages_are_written_counted_or_refused() -> None:
    for key in ("images", "context", "chat_history"):
        refused = trained_of("chatml", {"messages": [{**QUESTION, key: ["A picture."]}, ANSWER]})
        assert f"left out by the template: chat template preset chatml does not write {key!r} of message 1" in refused
    template = (
        "{% for message in messages %}{{ message.role }}: {{ message.content }}{{ message['context'] }}</s>{% endfor %}"
    )
    notes = {"context": "In May.", "note": "Checked.", "weight": 1, "stars": 5, "name": "Ola"}
    row = {"messages": [{**QUESTION, **notes}, ANSWER]}
    counts = ChatCounts()
    (samples,) = encoder_of(template, tokenizer_of(template)).encode([parse_row(row)], counts)
    assert isinstance(samples, list)
    assert counts.left_out == {"'note' of messages": 1, "'name' of messages": 1}


@pytest.mark.parametrize("read", REASONING)
@pytest.mark.parametrize("given", REASONING)
def test_a_reasoning_is_written_whatever_its_name(read: str, given: str) -> None:
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m." + read + " }}{{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    answer = {**ANSWER, **dict.fromkeys(REASONING, ""), given: "Hm. "}
    assert trained_of(template, {"messages": [QUESTION, answer]}) == "Hm. Rain.<|im_end|>"


@pytest.mark.parametrize("given", [{"tools": [TOOL]}, {"documents": [{"text": "Rain."}]}])
def test_tools_and_documents_that_a_template_knows_and_does_not_write_are_refused(given: Row) -> None:
    template = (
        "{% if messages[0].role == 'system' %}{{ tools }}{{ documents }}{% endif %}{% for m in messages %}"
        "<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls %}{{ c.function.name }}{% endfor %}"
        "<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    # the call has the name of the tool
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "look_up", "arguments": "{}"}}]}
    messages: list[Row] = [QUESTION, call]
    (name,) = given
    assert f"does not write the row's {name}" in trained_of(template, {"messages": messages, **given})
    messages.insert(0, {"role": "system", "content": "Be brief."})
    assert "look_up" in trained_of(template, {"messages": messages, **given})


def test_rows_that_are_not_cut_before_turns_are_counted() -> None:
    counts = ChatCounts()
    encoder = encoder_of("chatml", tokenizer_of("chatml"), turns="as_prompted")
    rows = [{"messages": turn("a", "b", "c", "d")}, {"messages": turn("a", "b", "c", "d"), "unmask": True}]
    encoder.encode([parse_row(row) for row in rows], counts)
    assert counts.outcomes()["not as prompted, as messages of others are trained"] == 1


def test_messages_that_a_template_merges_are_one_turn_from_the_prompt_to_the_end(test_data: Path) -> None:
    messages = [QUESTION, {"role": "assistant", "content": "I look it up."}, CALL_TURN, RESULT, ANSWER]
    calls = '[TOOL_CALLS][{"name": "look_up", "arguments": {"city": "Oslo", "days": 2}, "id": "123456789"}]</s>'
    row = {**AGENTIC, "messages": messages}
    assert trained_of("mistral_common_apache2/v7", row, test_data) == f"I look it up.{calls}|Rain.</s>"
    messages[1]["train"] = False
    refused = trained_of("mistral_common_apache2/v7", row, test_data)
    assert "does not show the begin of the turn of message 3" in refused


def test_pieces_of_a_split_keep_tools_and_flags(test_data: Path) -> None:
    again = [{"role": "user", "content": "And now? " + "x" * 200}, {**ANSWER, "weight": 0}, QUESTION, ANSWER]
    row = {**AGENTIC, "messages": [*AGENTIC["messages"], *again]}
    template = template_of("axolotl_apache2/qwen_25", test_data)
    whole = encode(encoder_of(template, tokenizer_of(template)), parse_row(row))[0]
    assert isinstance(whole, list)
    limit = whole[0].length - 1
    trained = trained_of("axolotl_apache2/qwen_25", row, test_data, max_length=limit, too_long="split")
    call = '<tool_call>\n{"name": "look_up", "arguments": {"city": "Oslo", "days": 2}}\n</tool_call><|im_end|>'
    assert trained == f"{call}|Rain.<|im_end|>|Rain.<|im_end|>"
    encoder = encoder_of(template, tokenizer_of(template), max_length=limit, too_long="split")
    (pieces,) = encode(encoder, parse_row(row))
    assert isinstance(pieces, list)
    assert len(pieces) == 2
    assert all("look_up" in encoder.tokenizer.decode(piece.ids.tolist()).split("<|im_end|>")[0] for piece in pieces)


@pytest.mark.parametrize("name", sorted(WITH_CALLS - {"mistral_common_apache2/v3_spm", "mistral_common_apache2/v7"}))
@pytest.mark.parametrize("thinks", [True, False])
def test_turns_as_prompted_follow_exactly_their_prompts(name: str, thinks: bool, test_data: Path) -> None:
    again: list[Row] = [{"role": "user", "content": "Sure?"}, {**ANSWER, "content": "Yes."}]
    messages: list[Row] = [{"role": "system", "content": "Be brief."}, *AGENTIC["messages"], *again]
    if thinks:
        messages = [
            {**message, "thinking": "Hm."} if message["role"] == "assistant" else message for message in messages
        ]
    row = {"messages": messages, "tools": [TOOL], "chat_template_kwargs": {"enable_thinking": thinks}}
    template = template_of(name, test_data)
    oracle = Oracle(template, TOKENS, tools=[TOOL], enable_thinking=thinks)
    form, _ = expected_of(oracle, row)
    prompts = {oracle.render(form[:i], prompt=True) for i in (2, 4, 6)}
    encoder = encoder_of(template, tokenizer_of(template), turns="as_prompted")
    (samples,) = encode(encoder, parse_row(row))
    assert isinstance(samples, list)
    found = set()
    for sample in samples:
        starts = [i for i in range(1, sample.length) if sample.mask[i] > sample.mask[i - 1]]
        found |= {encoder.tokenizer.decode(sample.ids[:start].tolist()) for start in starts}
    assert found == prompts
    assert len(samples) == 1 or name in {"axolotl_apache2/qwen3", "axolotl_apache2/mistral_v2v3", "channels", "xml"}


def test_an_assistant_may_begin() -> None:
    row = {"messages": [{"role": "assistant", "content": "Hi!"}, QUESTION, ANSWER]}
    assert trained_of("llama2", row) == "Hi! </s>| Rain. </s>"
    assert trained_of("mistral", row) == "Hi!</s>| Rain.</s>"
    assert trained_of("chatml", row) == "Hi!<|im_end|>|Rain.<|im_end|>"
    final = "<|channel|>final<|message|>"
    assert trained_of(template_of("channels", Path()), row) == f"{final}Hi!<|end|>|{final}Rain.<|return|>"


def test_a_text_with_characters_of_every_private_area_is_refused_by_name() -> None:
    messages = turn("\ue000 \U000f0001", "\U00100000")
    assert "characters of all three private-use areas" in trained_of("chatml", {"messages": messages})
    messages[1]["content"] = "x"
    assert trained_of("chatml", {"messages": messages}) == "x<|im_end|>"


def test_the_keys_of_older_interfaces_become_tools_and_calls() -> None:
    function = {"name": "look_up", "arguments": "{}"}
    older = {"role": "assistant", "content": None, "function_call": function}
    row = {"messages": [QUESTION, older, ANSWER], "functions": [TOOL["function"]]}
    call = {"type": "function", "function": {"name": "look_up", "arguments": {}}}
    expected: list[Row] = [QUESTION, {"role": "assistant", "tool_calls": [call]}, ANSWER]
    assert parse_row(row) == Chat(expected, variables={"tools": [TOOL]})
    assert parse_row({"messages": [QUESTION, ANSWER], "tools": json.dumps([TOOL])}).variables == {"tools": [TOOL]}
    as_text = {**older, "function_call": json.dumps(function)}
    assert parse_row({**row, "messages": [QUESTION, as_text, ANSWER]}) == Chat(expected, variables={"tools": [TOOL]})
    empty: Row = {"messages": [QUESTION, {**ANSWER, "tool_calls": [], "name": None}], "tools": [], "documents": None}
    assert parse_row(empty) == Chat([QUESTION, ANSWER])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"tools": "x"}, "'tools' is text that is not JSON"),
        ({"tools": ["x"]}, r"'tools' is \"\['x'\]\"; write a list of objects"),
        ({"tools": [TOOL], "functions": [{}]}, "the row has 'tools' and 'functions'; keep 'tools'"),
        ({"chat_template_kwargs": []}, None),
        ({"chat_template_kwargs": "x"}, "'chat_template_kwargs' is 'x'; write an object of options"),
        ({"chat_template_kwargs": {"tools": []}}, "holds tools, a key of the row"),
        ({"messages": [{**QUESTION, "tool_calls": [CALL]}]}, "a list of calls belongs to the assistant"),
        ({"messages": [{"role": "assistant", "tool_calls": ["x"]}]}, "a tool call of message 1 is x; write"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"name": ""}]}]}, "a tool call of message 1 is"),
        (
            {"messages": [{**CALL_TURN, "tool_calls": [{"name": "f", "arguments": "{"}]}]},
            "'arguments' of f in message 1 is text that is not JSON",
        ),
        ({"messages": [{**CALL_TURN, "tool_calls": [{"name": "f", "arguments": "[1]"}]}]}, "write a JSON object"),
        (
            {"messages": [{**CALL_TURN, "tool_calls": [{"name": "f", "arguments": '{"a": {"b": 1, "b": 2}}'}]}]},
            "'arguments' of f in message 1 is JSON text: the key 'b' occurs 2 times in the text; one of them would be",
        ),
        (
            {"messages": [{**ANSWER, "function_call": '{"name": "f", "arguments": {"a": 1, "a": 1}}'}]},
            "'function_call' of message 1 is JSON text: the key 'a' occurs 2 times",
        ),
        ({"tools": '[{"type": "function", "type": "x"}]'}, "'tools' is JSON text: the key 'type' occurs 2 times"),
        ({"messages": '[{"role": "user", "content": "a", "content": "b"}]'}, "'messages' is JSON text: the key 'con"),
        ({"messages": [{**ANSWER, "weight": 0.5}]}, "'weight' of message 1 is '0.5'; write true or false, or 1 or 0"),
        ({"messages": [{**ANSWER, "train": True, "weight": 0}]}, "train and weight of message 1 contradict each other"),
        ({"messages": [{**ANSWER, "train_detail": [{"train": False}]}]}, "'train_detail' of message 1 trains a part"),
        (
            {"messages": [{"role": "assistant", "tool_calls": "[{"}]},
            "'tool_calls' of message 1 is text that is not JSON",
        ),
        ({"messages": [{**ANSWER, "thinking": ["x"]}]}, "the reasoning of message 1 is"),
        ({"messages": [{**ANSWER, "thinking": "x", "reasoning": "y"}]}, "message 1 has two reasonings"),
        ({"messages": [{**ANSWER, "function_call": "x"}]}, "'function_call' of message 1 is text that is not JSON"),
        ({"messages": [{**CALL_TURN, "function_call": {"name": "f"}}]}, "message 1 has tool_calls and function_call"),
        ({"messages": [{**ANSWER, "content": [{"type": "image", "url": "x"}]}]}, "one is of type 'image'; a part is"),
        ({"messages": [{**ANSWER, "content": []}]}, r"content of message 1 \(assistant\) is empty"),
    ],
)
def test_bad_parts_of_agentic_rows_are_refused_with_the_remedy(change: Row, said: str | None) -> None:
    row = {"messages": [QUESTION, ANSWER], **change}
    if said is None:
        assert parse_row(row) == Chat([QUESTION, ANSWER])
        return
    with pytest.raises(BadRow, match=said):
        parse_row(row)
