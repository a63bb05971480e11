"""Chats become the template's tokens, and what is trained is what the assistant must write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers

from megatron.data.chat import BadRow, Chat, ChatCounts, ChatEncoder, ChatRules, Sample
from megatron.data.chat_presets import PRESETS
from megatron.data.chat_template import MARKER, ChatTemplate, TemplateSource, find_template
from megatron.data.chat_tokenizer import ChatTokenizer, load_tokenizer
from tests.data.chat_oracle import Oracle, Refused

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
    """User and assistant in turn."""
    return [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]


@pytest.fixture(scope="session")
def chats(test_data: Path) -> list[list[Message]]:
    return [json.loads(line)["messages"] for line in (test_data / "sft_messages.jsonl").open()]


@pytest.fixture(scope="session")
def small() -> ChatTokenizer:
    """A byte-level tokenizer without merges: a token is a byte, but for the special ones."""
    return tokenizer_of_bytes()


def tokenizer_of_bytes(eos: str | None = "</s>", **tokens: str) -> ChatTokenizer:
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


def sample_of(encoder: ChatEncoder, messages: list[Message], unmask: bool = False) -> Sample:
    (result,) = encode(encoder, Chat(list(messages), unmask))
    assert isinstance(result, list), result
    (sample,) = result
    return sample


def trained_text(encoder: ChatEncoder, sample: Sample) -> str:
    """The trained stretches, a bar between two."""
    bounds = np.flatnonzero(np.diff(np.concatenate([[0], sample.mask, [0]]).astype(int)))
    parts = [sample.ids[start:end].tolist() for start, end in bounds.reshape(-1, 2)]
    return "|".join(encoder.tokenizer.decode(part) for part in parts)


# ---------------------------------------------------------------------------------------------------------------------
# Masks against an independent computation


def with_markers(template: str, path: Path, markers: bool) -> ChatTokenizer:
    wanted = [found[0] for found in MARKER.finditer(template)] if markers else []
    return load_tokenizer(str(path), {}, wanted)[0]


def check_template(name: str, test_data: Path, tokenizer_name: str, markers: bool, chats: list[list[Message]]) -> None:
    """Every token's id and mask against the oracle's text through transformers' tokenizer and its offsets."""
    from transformers import PreTrainedTokenizerFast

    template = (test_data / "chat_templates" / f"{name}.jinja").read_text()
    tokenizer = with_markers(template, test_data / "tokenizers" / tokenizer_name, markers)
    eos = tokenizer.tokens["eos_token"]
    reference = PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer.from_str(tokenizer.content.decode()))
    oracle = Oracle(template, {"bos_token": tokenizer.tokens.get("bos_token", ""), "eos_token": eos})
    encoder = encoder_of(template, tokenizer)
    differences = []
    for number, (messages, result) in enumerate(
        zip(chats, encode(encoder, *[Chat(list(chat)) for chat in chats]), strict=True)
    ):
        try:
            text, spans = oracle.trained(messages, eos)
        except Refused:
            if not (isinstance(result, BadRow) and result.kind == "refused by the template"):
                differences.append((number, "the oracle refuses it", result))
            continue
        expected = reference(text, add_special_tokens=False, return_offsets_mapping=True)
        mask = [int(any(a < end and start < b for start, end in spans)) for a, b in expected["offset_mapping"]]
        mask[0] = 0
        if isinstance(result, BadRow) or (result[0].ids.tolist(), result[0].mask.tolist()) != (
            expected["input_ids"],
            mask,
        ):
            differences.append((number, text[:60], result))
    assert differences == []


def test_every_template_is_compared(test_data: Path) -> None:
    found = {f"{path.parent.name}/{path.stem}" for path in (test_data / "chat_templates").glob("*/*.jinja")}
    assert found == set(NAMES)
    assert len(NAMES) == NUM_TEMPLATES


@pytest.mark.parametrize("name", NAMES)
def test_masks_equal_the_oracles_on_some_chats(name: str, test_data: Path, chats: list[list[Message]]) -> None:
    check_template(name, test_data, "bloom_format_trained", True, chats[::65])


@pytest.mark.slow
@pytest.mark.parametrize("markers", [False, True], ids=["plain", "markers_added"])
@pytest.mark.parametrize("tokenizer", ["gpt2/tokenizer.json", "bloom_format_trained"])
@pytest.mark.parametrize("name", NAMES)
def test_masks_equal_the_oracles_on_all_chats(
    name: str, tokenizer: str, markers: bool, test_data: Path, chats: list[list[Message]]
) -> None:
    check_template(name, test_data, tokenizer, markers, chats)
