"""Chats become the template's tokens; trained is the text that the assistant writes."""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from megatron.data.chat.conversation import BadRow, Chat, parse_row
from megatron.data.chat.encoder import ChatCounts, ChatEncoder, ChatRules, Sample
from megatron.data.chat.template import MARKER, ChatTemplate, TemplateFailure, TemplateSource, find_template
from megatron.data.chat.template_presets import PRESETS
from megatron.data.chat.tokenizer import ChatTokenizer, load_tokenizer
from megatron.data.chat.turns import TurnFinder
from megatron.data.index.indexed import DataError
from tests.data.chat.chat_oracle import Oracle, Refused, Unclear

Message = dict[str, Any]

NUM_TEMPLATES = 29
NAMES = [
    *(f"axolotl_apache2/{name}" for name in "alpaca chatml command_a_tool_use deepseek_v2 gemma llama3".split()),
    *(f"axolotl_apache2/{name}" for name in "mistral_v1 mistral_v2v3 phi_4 qwen3 qwen_25".split()),
    *(f"chujiezheng_mit/{name}" for name in "alpaca chatml falcon-instruct gemma-it granite-3.0-instruct".split()),
    *(f"chujiezheng_mit/{name}" for name in "llama-2-chat llama-3-instruct mistral-instruct phi-3".split()),
    *(f"chujiezheng_mit/{name}" for name in "qwen2.5-instruct vicuna zephyr".split()),
    *(f"instructlab_apache2/{name}" for name in "ibm_generic_tmpl ibm_legacy_tmpl mistral_tmpl".split()),
    *(f"mistral_common_apache2/{name}" for name in "v1_spm v3_spm v7".split()),
]

QUESTION = {"role": "user", "content": "How many?"}
ANSWER = {"role": "assistant", "content": "Three."}


def turn(*contents: str) -> list[Message]:
    """Messages of user and assistant in turn."""
    return [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]


@pytest.fixture(scope="session")
def chats(test_data: Path) -> list[list[Message]]:
    return [json.loads(line)["messages"] for line in (test_data / "sft_messages.jsonl").open()]


@pytest.fixture(scope="session")
def small() -> ChatTokenizer:
    return BYTES


def tokenizer_of_bytes(eos: str | None = "</s>", **tokens: str) -> ChatTokenizer:
    """Byte-level tokenizer without merges: one token a byte, except for the special tokens."""
    return load_written(bytes_json(("<s>", "</s>", "<|im_start|>", "<|im_end|>")), eos, **tokens)


def bytes_json(special: tuple[str, ...]) -> str:
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    inner = tokenizers.Tokenizer(tokenizers.models.BPE({symbol: i for i, symbol in enumerate(alphabet)}, []))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    inner.decoder = tokenizers.decoders.ByteLevel()
    inner.add_special_tokens(list(special))
    content: str = inner.to_str()
    return content


def load_written(content: str, eos: str | None, **tokens: str) -> ChatTokenizer:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "tokenizer.json").write_text(content)
        Path(folder, "tokenizer_config.json").write_text(json.dumps({"eos_token": eos, **tokens}))
        return load_tokenizer(folder)[0]


def encoder_of(template: str, tokenizer: ChatTokenizer, **rules: Any) -> ChatEncoder:
    source = find_template(template, Path()) if template in PRESETS else TemplateSource(template, "here")
    return ChatEncoder(ChatTemplate(source, tokenizer.tokens), tokenizer, ChatRules(**rules))


def encode(encoder: ChatEncoder, *chats: Chat) -> list[list[Sample] | BadRow]:
    return encoder.encode(chats, ChatCounts())


def sample_of(encoder: ChatEncoder, messages: Sequence[Mapping[str, Any]], unmask: bool = False) -> Sample:
    (result,) = encode(encoder, Chat(list(messages), unmask))
    assert isinstance(result, list), result
    (sample,) = result
    return sample


def trained_text(encoder: ChatEncoder, sample: Sample) -> str:
    """Return the trained spans, joined by bars."""
    bounds = np.flatnonzero(np.diff(np.concatenate([[0], sample.mask, [0]]).astype(int)))
    parts = [sample.ids[start:end].tolist() for start, end in bounds.reshape(-1, 2)]
    return "|".join(encoder.tokenizer.decode(part) for part in parts)


BYTES = tokenizer_of_bytes()


# ---------------------------------------------------------------------------------------------------------------------
# Masks against an independent computation


def test_markers_are_whole_words_of_a_template() -> None:
    """A marker that the template puts together is not one: it would be added to the tokenizer as it stands."""
    source = TemplateSource("<|user|>{{x}}<|{{m.role}}|>{{'<|'+m.role+'|>'}}{{\"<|\"+r+\"|>\"}}<|im_end|>", "test")
    assert source.tokens_to_add() == ("<|user|>", "<|im_end|>")


def with_markers(template: str, path: Path, markers: bool) -> ChatTokenizer:
    wanted = [found[0] for found in MARKER.finditer(template)] if markers else []
    return load_tokenizer(str(path), {}, wanted)[0]


def check_template(name: str, test_data: Path, tokenizer_name: str, markers: bool, chats: list[list[Message]]) -> None:
    """Compare every id and mask with the oracle's text, encoded by transformers with offsets."""
    from transformers import PreTrainedTokenizerFast

    template = (test_data / "chat_templates" / f"{name}.jinja").read_text()
    tokenizer = with_markers(template, test_data / "tokenizers" / tokenizer_name, markers)
    eos = tokenizer.tokens["eos_token"]
    reference = PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer.from_str(tokenizer.content.decode()))
    oracle = Oracle(template, {"bos_token": tokenizer.tokens.get("bos_token", ""), "eos_token": eos})
    encoder = encoder_of(template, tokenizer)
    expected: dict[int, tuple[str, list[tuple[int, int]]]] = {}
    for number, messages in enumerate(chats):
        with contextlib.suppress(Refused):
            expected[number] = oracle.trained(messages, eos)
    texts = [text for text, _ in expected.values()]
    read = reference(texts, add_special_tokens=False, return_offsets_mapping=True)
    tokens = dict(zip(expected, zip(read["input_ids"], read["offset_mapping"], strict=True), strict=True))
    differences = []
    for number, result in enumerate(encode(encoder, *[Chat(chat) for chat in chats])):
        if number not in expected:
            if not (isinstance(result, BadRow) and result.kind == "refused by the template"):
                differences.append((number, "the oracle refuses it", result))
            continue
        ids, offsets = tokens[number]
        mask = [int(any(a < end and start < b for start, end in expected[number][1])) for a, b in offsets]
        mask[0] = 0
        if isinstance(result, BadRow) or (result[0].ids.tolist(), result[0].mask.tolist()) != (ids, mask):
            differences.append((number, expected[number][0][:60], result))
    assert differences == []


def test_every_template_is_compared(test_data: Path) -> None:
    found = {f"{path.parent.name}/{path.stem}" for path in (test_data / "chat_templates").glob("*/*.jinja")}
    assert found == set(NAMES)
    assert len(NAMES) == NUM_TEMPLATES


@pytest.mark.parametrize("name", NAMES)
def test_masks_equal_the_oracles_on_some_chats(name: str, test_data: Path, chats: list[list[Message]]) -> None:
    check_template(name, test_data, "bloom_format_trained", True, chats[::390])


@pytest.mark.slow
@pytest.mark.parametrize("markers", [False, True], ids=["plain", "markers_added"])
@pytest.mark.parametrize("tokenizer", ["gpt2/tokenizer.json", "bloom_format_trained"])
@pytest.mark.parametrize("name", NAMES)
def test_masks_equal_the_oracles_on_all_chats(
    name: str, tokenizer: str, markers: bool, test_data: Path, chats: list[list[Message]]
) -> None:
    check_template(name, test_data, tokenizer, markers, chats)


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_masks_of_the_presets_equal_the_oracles(name: str, small: ChatTokenizer, chats: list[list[Message]]) -> None:
    encoder = encoder_of(name, small)
    oracle = Oracle(PRESETS[name].template, {"bos_token": "", "eos_token": "</s>"})
    for messages in chats[::130]:
        text, spans = oracle.trained(messages, "</s>")
        sample = sample_of(encoder, messages)
        assert encoder.tokenizer.decode(sample.ids.tolist()) == text
        assert trained_text(encoder, sample) == "|".join(text[start:end] for start, end in spans)


def test_tokens_of_a_tokenizer_with_a_normalizer_have_the_characters_of_the_text(test_data: Path) -> None:
    path = test_data / "tokenizers" / "bloom_format_trained"
    described = json.loads((path / "tokenizer.json").read_text())
    described["normalizer"] = {"type": "NFKC"}
    tokenizer = load_written(json.dumps(described), "</s>")
    encoder = encoder_of("zephyr", tokenizer)
    sample = sample_of(encoder, turn("\ufb01ne? \u2460\u2461", "\ufb02at \u2462 \ufb03"))
    assert trained_text(encoder, sample) == "flat 3 ffi</s>"


NASTY = (
    *(
        "a",
        "b c",
        "\n",
        " x",
        "y ",
        "\n\nz\n",
        "\r\n\r\n",
        "7",
        "1.5",
        "'\"<&>",
        "\u00e9\u4e2d",
        "model\n",
        "assistant\n",
    ),
    *("<think>\nq\n</think>\n\nr", "ASSISTANT:", "### Response:\n", "[/INST]", "<|im_end|>", "</s>"),
)
"""Parts of contents: white space at the ends, and text that templates write or search for."""


def nasty_chats(count: int) -> list[list[Message]]:
    generator = random.Random(1)

    def content() -> str:
        while not (text := "".join(generator.choices(NASTY, k=generator.randint(1, 4)))).strip():
            continue
        return text

    found = []
    for _ in range(count):
        messages: list[Message] = []
        if generator.random() < 0.4:
            messages.append({"role": "system", "content": content()})
        for _ in range(generator.randint(1, 3)):
            messages += turn(content(), content())
            if generator.random() < 0.2:
                messages[-1]["reasoning_content"] = content()
        found.append(messages)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_turns_of_difficult_chats_equal_the_oracles(name: str, test_data: Path) -> None:
    template = (test_data / "chat_templates" / f"{name}.jinja").read_text()
    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    oracle, finder = Oracle(template, tokens), TurnFinder(ChatTemplate(TemplateSource(template, "here"), tokens))
    num_compared = 0
    for messages in nasty_chats(40):
        try:
            text, spans = oracle.trained(messages, "")
        except Refused:
            with pytest.raises(TemplateFailure):
                finder.find(messages)
            continue
        except Unclear:
            continue
        rendered = finder.find(messages)
        turns = [span for span in rendered.turns if span]
        if "falcon" in name:  # nothing ends its last turn: the oracle has the line ends too, to put EOS behind
            turns, spans = turns[:-1], spans[:-1]
        assert (rendered.text, turns) == (text, spans), messages
        num_compared += 1
    assert num_compared > 20


# ---------------------------------------------------------------------------------------------------------------------
# Templates that rewrite


def test_only_the_assistants_turns_are_trained_up_to_their_end_marker(small: ChatTokenizer) -> None:
    encoder = encoder_of("chatml", small)
    messages = [{"role": "system", "content": "Be brief."}, *turn("One?", "1", "Two?", "2")]
    sample = sample_of(encoder, messages)
    assert trained_text(encoder, sample) == "1<|im_end|>|2<|im_end|>"
    assert encoder.tokenizer.decode(sample.ids.tolist()).endswith("2<|im_end|>\n")


def test_unmask_trains_everything_but_the_system_messages(small: ChatTokenizer) -> None:
    messages = [{"role": "system", "content": "Be brief."}, *turn("One?", "1")]
    encoder = encoder_of("chatml", small)
    assert trained_text(encoder, sample_of(encoder, messages, unmask=True)) == "One?|1<|im_end|>"
    everywhere = encoder_of("chatml", small, train_on="all_but_system")
    assert trained_text(everywhere, sample_of(everywhere, messages)) == "One?|1<|im_end|>"


def test_all_tokens_but_the_first_are_trained_where_that_is_requested(small: ChatTokenizer) -> None:
    encoder = encoder_of("chatml", small, train_on="all")
    system = {"role": "system", "content": "Be brief."}
    for messages in ([system, *turn("One?", "1")], [{**message, "train": False} for message in turn("One?", "1")]):
        sample = sample_of(encoder, messages)
        assert sample.mask.tolist() == [0, *[1] * (sample.length - 1)]
    assert sample_of(encoder, turn("One?")).mask.sum() > 1  # without an answer


def test_earlier_reasoning_that_a_template_drops_is_not_trained(small: ChatTokenizer) -> None:
    template = (
        "{% for m in messages %}<{{ m.role }}>{% if m.reasoning_content and loop.last %}[{{ m.reasoning_content }}]"
        "{% endif %}{{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    messages = turn("One?", "1", "Two?", "2")
    messages[1]["reasoning_content"], messages[3]["reasoning_content"] = "easy", "harder"
    encoder = encoder_of(template, small)
    assert trained_text(encoder, sample_of(encoder, messages)) == "1</s>|[harder]2</s>"


def test_a_template_may_put_the_last_question_first(small: ChatTokenizer) -> None:
    template = (
        "{% for m in messages if m.role == 'user' %}Q{{ m.content | trim }};{% endfor %}"
        "{% for m in messages if m.role == 'assistant' %}A{{ m.content | trim }}</s>{% endfor %}"
        "{% if add_generation_prompt %}A{% endif %}"
    )
    encoder = encoder_of(template, small)
    sample = sample_of(encoder, turn(" One? ", " 1 ", "Two?", "2\n"))
    assert encoder.tokenizer.decode(sample.ids.tolist()) == "QOne?;QTwo?;A1</s>A2</s>"
    assert trained_text(encoder, sample) == "1</s>|2</s>"


def test_a_template_that_depends_on_the_ends_of_contents_is_rendered_without_marks(small: ChatTokenizer) -> None:
    template = (
        "{% for m in messages %}{% if m.content.startswith('!') %}(loud){% endif %}<{{ m.role }}>"
        "{{ m.content[:8] }}</s>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    encoder = encoder_of(template, small)
    sample = sample_of(encoder, turn("!Why is it so?", "Because of that", "!x", "y"))
    assert encoder.tokenizer.decode(sample.ids.tolist()) == (
        "(loud)<user>!Why is </s><assistant>Because </s>(loud)<user>!x</s><assistant>y</s>"
    )
    assert trained_text(encoder, sample) == "Because </s>|y</s>"


def test_text_that_looks_like_the_prompt_moves_no_boundary(small: ChatTokenizer) -> None:
    encoder = encoder_of("vicuna", small)
    messages = turn("USER: a\nASSISTANT: b</s>\nASSISTANT:", "ASSISTANT: c\nUSER: d", "ASSISTANT:", "ASSISTANT:")
    assert trained_text(encoder, sample_of(encoder, messages)) == " ASSISTANT: c\nUSER: d</s>| ASSISTANT:</s>"


def test_contents_with_private_use_characters_are_found_too(small: ChatTokenizer) -> None:
    encoder = encoder_of("chatml", small)
    sample = sample_of(encoder, turn("\ue000 \ue005?", "\ue004!"))
    assert trained_text(encoder, sample) == "\ue004!<|im_end|>"


def test_turns_of_tool_calls_are_trained_and_results_are_not(small: ChatTokenizer) -> None:
    template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}"
        "{% for c in m.tool_calls or [] %}CALL {{ c | tojson }}{% endfor %}</s>{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    messages: list[Message] = [
        QUESTION,
        {"role": "assistant", "content": None, "tool_calls": [{"name": "count"}]},
        {"role": "tool", "content": "3"},
        ANSWER,
    ]
    encoder = encoder_of(template, small)
    assert trained_text(encoder, sample_of(encoder, messages)) == 'CALL {"name": "count"}</s>|Three.</s>'


def test_two_answers_in_a_row_are_both_trained_if_the_template_accepts_them(small: ChatTokenizer) -> None:
    messages = [QUESTION, ANSWER, {"role": "assistant", "content": "Or four."}]
    encoder = encoder_of("chatml", small)
    assert trained_text(encoder, sample_of(encoder, messages)) == "Three.<|im_end|>|Or four.<|im_end|>"
    alternating = (
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}{{ m.content }}</s>{% endfor %}"
    )
    (result,) = encode(encoder_of(alternating, small), Chat(list(messages)))
    assert isinstance(result, BadRow)
    assert "roles must alternate" in str(result)
    assert "template here" in str(result)


@given(
    st.lists(st.text(st.characters(exclude_categories=["Cs", "Co", "Cc"]), min_size=1), min_size=2, max_size=6).filter(
        lambda contents: all(content.strip() for content in contents)
    )
)
def test_any_text_is_trained_unchanged(contents: list[str]) -> None:
    messages = turn(*contents[: len(contents) // 2 * 2])
    encoder = encoder_of("chatml", BYTES)
    expected = "|".join(message["content"] + "<|im_end|>" for message in messages[1::2])
    assert trained_text(encoder, sample_of(encoder, messages)) == expected


# ---------------------------------------------------------------------------------------------------------------------
# EOS


BARE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def test_eos_is_appended_to_an_open_last_turn_and_trained(small: ChatTokenizer) -> None:
    encoder, counts = encoder_of(BARE, small), ChatCounts()
    (result,) = encoder.encode([Chat(turn("a", "b", "c", "d"))], counts)
    assert isinstance(result, list)
    (sample,) = result
    assert trained_text(encoder, sample) == "b|d\n</s>"
    assert sample.ids[-1] == small.eos_id
    assert counts.num_appended_eos == 1


def test_eos_is_not_appended_twice_or_after_a_question(small: ChatTokenizer) -> None:
    counts = ChatCounts()
    chats = [Chat(turn("a", "b</s>")), Chat(turn("a", "b", "c"))]
    encoder = encoder_of(BARE, small)
    for result in encoder.encode(chats, counts):
        assert isinstance(result, list)
    assert counts.num_appended_eos == 0
    kept = encoder_of(BARE, small, append_eos=False)
    assert trained_text(kept, sample_of(kept, turn("a", "b"))) == "b"


def test_a_tokenizer_without_eos_is_an_error_only_if_eos_is_needed() -> None:
    without = tokenizer_of_bytes(eos=None)
    # the known </s> of a tokenizer.json is taken where nothing is named
    assert without.tokens["eos_token"] == "</s>"
    bare = load_written(bytes_json(("<|im_start|>", "<|im_end|>")), None)
    assert (
        trained_text(encoder_of("chatml", bare), sample_of(encoder_of("chatml", bare), turn("a", "b"))) == "b<|im_end|>"
    )
    with pytest.raises(DataError, match=r"no end-of-sequence token.*name it in tokenizer_config.json"):
        encoder_of("zephyr", bare)
    with pytest.raises(DataError, match="no end-of-sequence token"):
        encode(encoder_of(BARE, bare), Chat(turn("a", "b")))


def test_pad_equal_to_eos_changes_nothing() -> None:
    plain, padded = tokenizer_of_bytes(), tokenizer_of_bytes(pad_token="</s>")
    expected = sample_of(encoder_of("zephyr", plain), turn("a", "b"))
    found = sample_of(encoder_of("zephyr", padded), turn("a", "b"))
    assert (found.ids.tolist(), found.mask.tolist()) == (expected.ids.tolist(), expected.mask.tolist())
    assert found.mask[-2] == 1  # EOS; a line end follows


# ---------------------------------------------------------------------------------------------------------------------
# Lengths


def test_long_samples_are_dropped_truncated_or_split_and_counted(small: ChatTokenizer) -> None:
    chat = Chat(turn("one?", "1", "two?", "2", "three?", "3"))
    whole = sample_of(encoder_of("chatml", small), list(chat.messages))
    one = sample_of(encoder_of("chatml", small), list(chat.messages[:2])).length
    limit = 2 * one + 2

    def fitted(too_long: str) -> tuple[list[str], ChatCounts]:
        encoder, counts = encoder_of("chatml", small, max_length=limit, too_long=too_long), ChatCounts()
        (result,) = encoder.encode([chat], counts)
        assert isinstance(result, list)
        assert all(sample.length <= limit for sample in result)
        return [trained_text(encoder, sample) for sample in result], counts

    texts, counts = fitted("drop")
    assert (texts, counts.dropped) == ([], {f"longer than {limit} tokens": 1})
    texts, counts = fitted("truncate")
    assert texts == ["1<|im_end|>|2<|im_end|>"]
    assert counts.num_truncated == 1
    texts, counts = fitted("split")
    assert texts == ["1<|im_end|>|2<|im_end|>", "3<|im_end|>"]
    assert (counts.num_split, counts.dropped) == (1, {})
    assert whole.length > limit


def test_pieces_of_a_split_keep_the_system_message_and_whole_turns(small: ChatTokenizer) -> None:
    system = {"role": "system", "content": "Be brief."}
    parts = [[system, *turn(f"question {i}?", f"answer {i}")] for i in range(5)]
    chat = Chat([system, *(message for part in parts for message in part[1:])])
    limit = sample_of(encoder_of("chatml", small), parts[0]).length
    encoder = encoder_of("chatml", small, max_length=limit, too_long="split")
    (pieces,) = encode(encoder, chat)
    assert isinstance(pieces, list)
    alone = [sample_of(encoder_of("chatml", small), part) for part in parts]
    assert [piece.ids.tolist() for piece in pieces] == [sample.ids.tolist() for sample in alone]


def test_a_turn_longer_than_the_limit_is_split_by_tokens(small: ChatTokenizer) -> None:
    encoder, counts = encoder_of("chatml", small, max_length=50, too_long="split"), ChatCounts()
    chat = Chat(turn("q" * 60, "a" * 110))
    whole = sample_of(encoder_of("chatml", small), list(chat.messages))
    (pieces,) = encoder.encode([chat], counts)
    assert isinstance(pieces, list)
    joined = np.concatenate([piece.ids for piece in pieces])
    assert joined.tolist() == whole.ids.tolist()[50:]  # the first piece holds nothing trained
    assert counts.dropped == {"pieces of a split row without anything trained": 1}
    assert all(piece.mask[0] == 0 for piece in pieces)
    assert (counts.num_split, counts.num_cut_by_tokens) == (1, 1)


def test_a_conversation_that_a_template_refuses_in_parts_is_cut_by_tokens_and_counted(small: ChatTokenizer) -> None:
    template = (
        "{% if messages | length < 4 %}{{ raise_exception('too few') }}{% endif %}"
        "{% for m in messages %}<{{ m.role }}>{% generation %}{{ m.content }}</s>{% endgeneration %}{% endfor %}"
    )
    encoder, counts = encoder_of(template, small, max_length=30, too_long="split"), ChatCounts()
    (pieces,) = encoder.encode([Chat(turn("a", "b", "c", "d"))], counts)
    assert isinstance(pieces, list)
    assert len(pieces) > 1
    assert counts.outcomes() == {"split": 1, "split within an exchange": 1}


def test_eos_that_is_cut_off_does_not_count_as_appended(small: ChatTokenizer) -> None:
    chat = Chat(turn("a", "b" * 20))
    whole = sample_of(encoder_of(BARE, small), list(chat.messages)).length
    for limit, expected in ((whole, {"EOS appended": 1}), (whole - 1, {"truncated": 1})):
        counts = ChatCounts()
        encoder_of(BARE, small, max_length=limit, too_long="truncate").encode([chat], counts)
        assert counts.outcomes() == expected


def test_a_truncated_sample_without_trained_tokens_is_dropped(small: ChatTokenizer) -> None:
    encoder, counts = encoder_of("chatml", small, max_length=10, too_long="truncate"), ChatCounts()
    assert encoder.encode([Chat(turn("a long question", "yes"))], counts) == [[]]
    assert counts.dropped == {"truncated before anything trained": 1}


def test_short_samples_are_dropped_below_min_length(small: ChatTokenizer) -> None:
    encoder, counts = encoder_of("chatml", small, min_length=1000), ChatCounts()
    assert encoder.encode([Chat(turn("a", "b"))], counts) == [[]]
    assert counts.dropped == {"shorter than 1000 tokens": 1}


# ---------------------------------------------------------------------------------------------------------------------
# Rows


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ([], "not a JSON object"),
        ({"text": "x"}, "no key 'messages'; the row has 'text'"),
        ({"messages": []}, "at least one message"),
        ({"messages": 2}, "'messages' is 2; a conversation has at least one message"),
        ({"messages": "x"}, "'messages' is text that is not JSON"),
        ({"messages": '"x"'}, "'messages' is JSON text of a str; write a list"),
        ({"messages": ["x"]}, "message 1 is not an object"),
        ({"messages": [QUESTION, {"content": "x"}]}, "message 2 has no role"),
        (
            {"messages": [{"role": "human", "content": "x"}]},
            "role 'human' of message 1 is unknown; the roles are system",
        ),
        ({"messages": [QUESTION, {"role": "assistant"}]}, r"content of message 2 \(assistant\) is missing"),
        ({"messages": [{"role": "user", "content": None}]}, "is missing; write the text"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "is a JSON list, not a string"),
        ({"messages": [QUESTION, {"role": "assistant", "content": " \n"}]}, "is empty; write what it answers"),
        ({"messages": [QUESTION, ANSWER], "unmask": "yes"}, "'unmask' is 'yes'; write true or false"),
        ({"messages": [{"role": "pretraining", "content": "x"}]}, "conversation as messages of user and assistant"),
    ],
)
def test_bad_rows_are_refused_with_the_message_and_the_remedy(row: object, said: str) -> None:
    with pytest.raises(BadRow, match=said):
        parse_row(row)


def test_other_keys_of_a_row_are_ignored() -> None:
    row = {"messages": [QUESTION, {**ANSWER, "name": "x"}], "source": "y", "unmask": None}
    assert parse_row(row) == Chat([QUESTION, {**ANSWER, "name": "x"}], False)


@pytest.mark.parametrize(
    "text",
    [
        "<|user|>\nHow many?\n<|assistant|>\nThree < four.<|endoftext|>\n",
        "<|start_of_role|>user<|end_of_role|>How many?\n<|end_of_text|>\n<|start_of_role|>assistant<|end_of_role|>"
        "Three < four.<|end_of_text|>\n",
    ],
)
def test_a_pretraining_message_is_unrolled_and_unmasked(text: str) -> None:
    chat = parse_row({"messages": [{"role": "pretraining", "content": text}]})
    assert chat.unmask
    assert [(message["role"], message["content"].strip()) for message in chat.messages] == [
        ("user", "How many?"),
        ("assistant", "Three < four."),
    ]


def test_a_conversation_without_an_answer_is_a_bad_row(small: ChatTokenizer) -> None:
    (result,) = encode(encoder_of("chatml", small), Chat([QUESTION]))
    assert isinstance(result, BadRow)
    assert "no token of the conversation is trained" in str(result)


def test_one_bad_conversation_does_not_affect_others(small: ChatTokenizer) -> None:
    strict = (
        "{% for m in messages %}{% if m.content == 'x' %}{{ raise_exception('no x') }}{% endif %}"
        "{{ m.content }}</s>{% endfor %}"
    )
    results = encode(encoder_of(strict, small), Chat(turn("a", "b")), Chat(turn("x", "b")), Chat(turn("c", "d")))
    assert [isinstance(result, BadRow) for result in results] == [False, True, False]
