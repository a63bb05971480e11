"""The C++ encoder of BLOOM's tokenizer gives the ids of the tokenizers library."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.data.extension import helpers
from megatron.data.index.indexed import DataError
from megatron.data.tokenizers.acceleration import (
    PRE_TOKENIZER,
    SEPARATORS,
    NotAccelerated,
    accelerate,
    byte_symbols,
    check_equal,
)
from megatron.data.tokenizers.base import Tokenizer
from megatron.data.tokenizers.build import build_tokenizer

LANGUAGES = (
    'The quick brown fox jumps over the lazy dog, and the dog (who slept) says: "What\'s that?" Nothing... ',
    "敏捷的棕色狐狸跳过了懒狗。狗说\uff0c什么\uff1f没有、没有\uff01 ",
    "الثعلب البني السريع يقفز فوق الكلب الكسول، والكلب نائم\u06d4 ",
    "तेज़ भूरी लोमड़ी आलसी कुत्ते के ऊपर कूदती है। ",
    "def f(x):\n    return x[0] | x[1]\n\n\n\tif x:\n",
)


@pytest.fixture(scope="module")
def content() -> dict[str, Any]:
    """tokenizer.json of a small tokenizer with BLOOM's pre-tokenizer and special tokens."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

    learner = Tokenizer(models.BPE())
    pattern = PRE_TOKENIZER[0]["pattern"]
    assert isinstance(pattern, dict)
    split = pre_tokenizers.Split(Regex(pattern["Regex"]), behavior="isolated", invert=False)
    learner.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=["<unk>", "<s>", "</s>", "<pad>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    learner.train_from_iterator([text * 3 for text in LANGUAGES], trainer)
    made: dict[str, Any] = json.loads(learner.to_str())
    return made


def built(content: dict[str, Any], folder: Path, **options: Any) -> Tokenizer:
    (folder / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    return build_tokenizer("HFTokenizer", str(folder), **options)


@pytest.fixture(scope="module")
def pair(content: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Tokenizer]:
    """The accelerated tokenizer and its reference."""
    reference = built(content, tmp_path_factory.mktemp("bloom"))
    return accelerate(reference), reference


PARTS = st.sampled_from([*"aeiouszтह日。،,.(|) \n\t", "  ", "the", "dog", "</s>", "<s", "\u3000", "\u0085", "狐狸"])


@settings(max_examples=100)
@given(texts=st.lists(st.lists(st.text(max_size=8) | PARTS, max_size=150).map("".join), max_size=4))
def test_ids_of_any_text_are_the_references(pair: tuple[Tokenizer, Tokenizer], texts: list[str]) -> None:
    check_equal(*pair, texts)


def test_ids_of_long_pieces_are_the_references(pair: tuple[Tokenizer, Tokenizer]) -> None:
    """Two algorithms merge short and long pieces, and long ones are not cached."""
    joined = ["".join(text.split()) for text in LANGUAGES]
    texts = [
        (text * 40)[:size] for text in (*joined, *LANGUAGES, "a", "日", " ", "\n", " a") for size in range(1, 300, 7)
    ]
    check_equal(*pair, [*texts, *(text * 400 for text in joined), *texts])


def test_every_character_is_split_as_by_the_reference(content: dict[str, Any], tmp_path: Path) -> None:
    """Each byte merges with an `e` behind it, unless a separator stands between them."""
    symbols = byte_symbols()
    tokens = [*symbols, *(symbol + "e" for symbol in symbols)]
    vocab = {token: i for i, token in enumerate(tokens)}
    model = content["model"] | {"vocab": vocab, "merges": [[symbol, "e"] for symbol in symbols]}
    reference = built(content | {"model": model, "added_tokens": []}, tmp_path)
    points = [*range(0xD800), *range(0xE000, 0x10000), *range(0x10000, 0x110000, 17)]
    texts = ["".join(f"e{chr(i)}e {chr(i)}e" for i in points[k : k + 64]) for k in range(0, len(points), 64)]
    check_equal(accelerate(reference), reference, texts)


def test_words_are_remembered_until_the_cache_is_full(pair: tuple[Tokenizer, Tokenizer]) -> None:
    fast, reference = pair
    # some 60 MB of words, slots and ids: more than the cache holds
    words = [" ".join(f"w{k:x}" for k in range(start, start + 100_000)) for start in range(0, 1_200_000, 100_000)]
    for text in words:
        fast.encode_batch([text])
    check_equal(fast, reference, [words[0][:50_000], words[-1][:50_000], *LANGUAGES])


@pytest.mark.parametrize("parse", [True, False])
def test_special_tokens_are_parsed_or_stay_text(parse: bool, content: dict[str, Any], tmp_path: Path) -> None:
    reference = built(content, tmp_path, parse_special_tokens=parse)
    fast = accelerate(reference)
    check_equal(fast, reference, ["", "a</s>b", "</s>", "<s> dog", "the dog", "<pad", "x <unk>y"])
    assert (len(fast.encode("</s>")) == 1) is parse


def test_an_unpaired_surrogate_is_refused(pair: tuple[Tokenizer, Tokenizer]) -> None:
    with pytest.raises(DataError, match=r"character 1 of the text is the unpaired surrogate U\+DC80"):
        pair[0].encode_batch(["fine", "a\udc80"])


def test_gigatoken_is_not_needed(content: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gigatoken", None)
    reference = built(content, tmp_path)
    check_equal(accelerate(reference), reference, list(LANGUAGES))


@pytest.mark.parametrize(
    "change",
    [
        {"normalizer": {"type": "NFC"}},
        {"model": {"ignore_merges": True}},
        {"model": {"dropout": 0.1}},
        {"model": {"vocab": "without a byte"}},
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": PRE_TOKENIZER[:1]}},
    ],
    ids=str,
)
def test_other_tokenizers_are_refused(change: dict[str, Any], content: dict[str, Any], tmp_path: Path) -> None:
    changed = json.loads(json.dumps(content))
    for name, value in change.items():
        changed[name] = changed[name] | value if name == "model" else value
    if changed["model"]["vocab"] == "without a byte":
        unused = byte_symbols()[1]
        changed["model"]["vocab"] = {name: i for name, i in content["model"]["vocab"].items() if name != unused}
    with pytest.raises(NotAccelerated):
        accelerate(built(changed, tmp_path))


def test_arguments_of_another_shape_are_refused() -> None:
    bytes_, merges = np.arange(256, dtype=np.int32), np.empty((0, 3), np.int32)
    assert helpers.BytePairEncoder(bytes_, merges, SEPARATORS).encode_batch(["a b"])[0].tolist() == [97, 32, 98]
    with pytest.raises(ValueError, match="byte_ids must be the ids of 256 bytes"):
        helpers.BytePairEncoder(bytes_[:255], merges, SEPARATORS)
    with pytest.raises(ValueError, match=r"merges must be \[any, 3\]"):
        helpers.BytePairEncoder(bytes_, merges[:, :2], SEPARATORS)
    with pytest.raises(ValueError, match=r"separators must be below U\+10000"):
        helpers.BytePairEncoder(bytes_, merges, "\U00010000")
