"""Accepted tokenizers give the reference's ids with gigatoken; others are refused with the reason."""

from __future__ import annotations

import ctypes
import gc
import io
import json
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.data.index.indexed import DataError
from megatron.data.tokenizers.acceleration import (
    UNICODE_17,
    NotAccelerated,
    accelerate,
    check_equal,
    has_unicode_17_character,
)
from megatron.data.tokenizers.base import TokenBatch, Tokenizer
from megatron.data.tokenizers.build import NullTokenizer, build_tokenizer
from megatron.data.tokenizers.sentencepiece import SentencePieceTokenizer

pytest.importorskip("gigatoken")

KINDS = ("gpt2", "gpt2_json", "gpt2_tiny", "mistral_v1", "mistral_v3", "r50k", "cl100k", "llama3", "o200k", "bloom")


@cache
def build(name: str, test_data: Path, **options: Any) -> Tokenizer:
    folder = test_data / "tokenizers"
    gpt2, tiny, mistral = folder / "gpt2", folder / "megatron_gpt2_tiny", folder / "mistral"
    # llama3 and o200k: the patterns are theirs, the ranks GPT-4's
    cl100k = str(folder / "tiktoken" / "cl100k_base.tiktoken")
    if name in ("llama3", "o200k"):
        return build_tokenizer("TikTokenizer", cl100k, tiktoken_pattern=name, **options)
    arguments: dict[str, tuple[str, ...]] = {
        "gpt2": ("GPT2BPETokenizer", "", str(gpt2 / "vocab.json"), str(gpt2 / "merges.txt")),
        "gpt2_tiny": ("GPT2BPETokenizer", "", str(tiny / "vocab.json"), str(tiny / "merges.txt")),
        "gpt2_json": ("HFTokenizer", str(gpt2)),
        "bloom": ("HFTokenizer", str(folder / "bloom_format_trained")),
        "unigram": ("SentencePieceTokenizer", str(folder / "sentencepiece_test" / "test_model.model")),
        "mistral_v1": ("SentencePieceTokenizer", str(mistral / "tokenizer.model.v1")),
        "mistral_v3": ("SentencePieceTokenizer", str(mistral / "mistral_instruct_tokenizer_240323.model.v3")),
        "r50k": ("TikTokenizer", str(folder / "tiktoken" / "r50k_base.tiktoken")),
        "cl100k": ("TikTokenizer", cl100k),
    }
    return build_tokenizer(*arguments[name], **options)  # type: ignore[arg-type]


@cache
def accelerated(name: str, test_data: Path, **options: Any) -> Tokenizer:
    return accelerate(build(name, test_data, **options))


@pytest.fixture(scope="module", autouse=True)
def memory() -> Iterator[None]:
    """Free the tokenizers: 3 GB, whose page tables each later fork of this process would copy."""
    yield
    for built in (accelerated, build):
        built.cache_clear()
    gc.collect()
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).malloc_trim(0)


def corpus(test_data: Path, step: int = 1) -> list[str]:
    """Every `step`-th of the documents in 83 languages."""
    lines = (test_data / "corpus_multi.jsonl").read_text(encoding="utf-8").split("\n")[:-1:step]
    return [json.loads(line)["text"] for line in lines]


LITERALS = ["<|endoftext|>", "<|fim_prefix|>", "<|eot_id|>", "</s>", "<s>", "<unk>", "[INST]", "[REFERENCE_DOC_3]"]

NASTY = [
    *(
        "",
        " ",
        "  ",
        "\n",
        "\n\n",
        " \n ",
        "\t",
        "\r",
        "\r\n\r\n",
        " \n\n x \n",
        "end\n  ",
        " lead",
        "trail ",
        "a\x0b\x0cb",
    ),
    *("\x00", "a\x00b", "\x00\x01\ufeff\ufffd", "".join(map(chr, range(32))), "".join(map(chr, range(127, 160)))),
    *LITERALS,
    *(f"a{token}b {token}{token} c" for token in LITERALS),
    "<0x41><0x0A>",
    *("👩‍👩‍👧 😀🏳️‍🌈👍🏽", "🇩🇪🇫", "e\u0301a\u0308\u0323o\u0302\u0301", "\u0301", " \u0301x", "한\u1100\u1161"),
    *("العربية هذا نص", "עברית שלום", "\u200e\u200f\u202a\u202e", "日本語のテキスト。漢字", "한국어", "हिन्दी में", "ﷺ"),
    *(letter * 3000 for letter in (" ", "a", "\n", "é", "日", "1", "!", "'", "ab", "a ")),
    " " * 3000 + "x",
    *("\ufffd" * 5, "\ufffe\uffff", "\U000e0001\U0010ffff", "\u0378\u0379\u0530", "\ue000\U000f0000"),
    "\u2028\u2029\u0085\u200b\u200c\u200d\u2060\u00a0\u3000\u1680\u202f\u180e",
    *("it's we'll I'D don'T 'LL '\u017f", "x'\u017fy \u017f's", "K Å ﬁ ½ ² Ⅷ", "0123456789 ١٢٣٤ १२३ ①②③", "ǅ ʰ İı ς ẞ"),
    *(
        "\u2581",
        "a\u2581b \u2581\u2581 c",
        "x = 1\n\n\treturn\n```",
        "http://a.b/c?d=e&f=%20",
        "\U0001d49c\U0001d4d1 𐐀𐐨",
    ),
]


@pytest.mark.parametrize("name", KINDS)
def test_ids_of_documents_in_83_languages_are_the_references(name: str, test_data: Path) -> None:
    check_equal(accelerated(name, test_data), build(name, test_data), corpus(test_data, step=12))


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_ids_of_every_document_are_the_references(name: str, test_data: Path) -> None:
    check_equal(accelerated(name, test_data), build(name, test_data), corpus(test_data))


@pytest.mark.parametrize(
    ("name", "parse"),
    [
        # as text, special tokens of one tokenizer of each make; -m slow: of all
        pytest.param(name, parse, marks=() if parse or name in ("gpt2", "mistral_v3", "cl100k") else pytest.mark.slow)
        for name in KINDS
        for parse in (False, True)
    ],
)
def test_ids_of_difficult_texts_are_the_references(name: str, parse: bool, test_data: Path) -> None:
    fast, reference = (made(name, test_data, parse_special_tokens=parse) for made in (accelerated, build))
    check_equal(fast, reference, NASTY)
    for text in NASTY:
        assert fast.encode(text) == reference.encode(text)


def around(first: int, last: int, step: int) -> list[str]:
    """Code points among letters, digits and line breaks."""
    points = [chr(i) for i in range(first, last, step) if not 0xD800 <= i < 0xE000]
    return [f"a {c}b {c}{c} 1{c}'{c}\n{c}" for c in points]


@pytest.mark.parametrize("name", KINDS)
def test_ids_around_many_characters_are_the_references(name: str, test_data: Path) -> None:
    texts = [*around(0, 0x3100, 5), *around(0x3100, 0x20000, 97)]
    check_equal(accelerated(name, test_data), build(name, test_data), texts)


@pytest.mark.parametrize("name", ["gpt2", "gpt2_json", "cl100k"])
def test_ids_beside_characters_of_unicode_17_are_the_references(name: str, test_data: Path) -> None:
    """A letter keeps the 's behind it apart, a character without a class does not."""
    ends = [ord(end) for end in UNICODE_17.replace("-", "")]
    texts = [f"{before}{chr(end + step)}'s" for end in ends for step in (-1, 0, 1) for before in ("", "é" * 70)]
    assert sum(map(has_unicode_17_character, texts)) >= 2 * len(ends)
    check_equal(accelerated(name, test_data), build(name, test_data), texts)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "mistral_v1", "mistral_v3", "cl100k", "o200k", "bloom"])
def test_ids_around_every_character_are_the_references(name: str, test_data: Path) -> None:
    check_equal(accelerated(name, test_data), build(name, test_data), around(0, 0x110000, 1))


TEXTS = st.lists(st.text(max_size=20) | st.sampled_from([*LITERALS, " ", "  ", "\n", "'s", "the", "12"]), max_size=12)


@pytest.mark.parametrize("parse", [False, True])
@pytest.mark.parametrize("name", ["gpt2", "mistral_v3", "cl100k"])
@settings(max_examples=60)
@given(data=st.data())
def test_ids_of_any_text_are_the_references(name: str, parse: bool, test_data: Path, data: st.DataObject) -> None:
    texts = ["".join(parts) for parts in data.draw(st.lists(TEXTS, max_size=6))]
    fast, reference = (made(name, test_data, parse_special_tokens=parse) for made in (accelerated, build))
    check_equal(fast, reference, texts)


@pytest.mark.parametrize("name", KINDS)
def test_an_accelerated_tokenizer_has_its_references_identity(name: str, test_data: Path) -> None:
    fast, reference = accelerated(name, test_data), build(name, test_data)
    assert (fast.vocab_size, fast.eod, fast.identity) == (reference.vocab_size, reference.eod, reference.identity)
    # what blocks are cut to: the reference does not mind, the twin is slow with little text
    assert reference.batch_bytes is None
    assert (fast.batch_bytes or 0) >= 8 << 20
    ids, lengths = fast.encode_batch(["Hello  world", "", "<|endoftext|>"])
    assert ids.dtype in (np.int32, np.uint32)
    assert lengths.dtype == np.int64
    assert (lengths[1], lengths.sum()) == (0, len(ids))
    assert fast.decode(ids[: lengths[0]].tolist()) == "Hello  world"
    assert [len(part) for part in fast.encode_batch([])] == [0, 0]


def test_several_threads_share_an_accelerated_tokenizer(test_data: Path) -> None:
    texts = corpus(test_data, step=30)
    for name in KINDS:
        fast = accelerated(name, test_data)
        expected = fast.encode_batch(texts)
        with ThreadPoolExecutor(4) as pool:
            for ids, lengths in pool.map(fast.encode_batch, [texts] * 8):
                assert np.array_equal(ids, expected.ids)
                assert np.array_equal(lengths, expected.lengths)


@pytest.mark.parametrize("name", KINDS)
def test_an_unpaired_surrogate_is_refused(name: str, test_data: Path) -> None:
    fast = accelerated(name, test_data)
    for texts in (["fine", "ab\udc80"], ["ab\ud800[REFERENCE_DOC_3]"]):
        with pytest.raises(DataError, match=r"character 2 of the text is the unpaired surrogate U\+D"):
            fast.encode_batch(texts)


# ---------------------------------------------------------------------------------------------------------------------
# tokenizer.json of other makes

MANY_SPACES = ["  ", "foo  foo  bar", "foofoo", " foo\n  foo ", "\t  <X><X> x", "   a", "Foo x<X>"]
GPT4_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)


def added(content: str, number: int, **flags: bool) -> dict[str, Any]:
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    return {"id": 50257 + number, "content": content, **plain, **flags}


def byte_level(**options: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False, **options}


def split(behavior: str = "Isolated", invert: bool = False) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": GPT4_WORDS}, "behavior": behavior, "invert": invert}


def sequence(*steps: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "pretokenizers": list(steps)}


@cache
def gpt2_json(test_data: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((test_data / "tokenizers/gpt2/tokenizer.json").read_text(encoding="utf-8"))
    return content


def variant(
    test_data: Path, tmp_path: Path, model: dict[str, Any], *, of_bytes: bool = False, **changes: Any
) -> Tokenizer:
    """GPT-2's tokenizer.json with changes; `of_bytes`: without its words, which take most of the time."""
    content = dict(gpt2_json(test_data))
    content["model"] = content["model"] | model
    if of_bytes:
        vocabulary = {word: number for word, number in content["model"]["vocab"].items() if number < 256}
        content["model"] |= {"vocab": vocabulary, "merges": []}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content | changes), encoding="utf-8")
    return build_tokenizer("HFTokenizer", str(tmp_path), parse_special_tokens=False)


EQUAL_VARIANTS: dict[str, dict[str, Any]] = {
    "a space first": {"pre_tokenizer": byte_level(use_regex=True, add_prefix_space=True)},
    "Llama 3's": {"pre_tokenizer": sequence(split(), byte_level()), "model": {"ignore_merges": True}},
    "GPT-4's": {"pre_tokenizer": sequence(split("Removed", True), byte_level())},
    "Qwen's normalizer": {"normalizer": {"type": "NFC"}},
    "added tokens": {"added_tokens": [added("  ", 0), added("foo", 1), added("<X>", 2, lstrip=True)]},
    "normalized tokens": {"added_tokens": [added("foo", 0, normalized=True), added("foofoo", 1, normalized=True)]},
    "special tokens": {"added_tokens": [added("foo", 0, special=True), added("<X>", 1, special=True, rstrip=True)]},
}


@pytest.mark.parametrize("name", EQUAL_VARIANTS)
def test_an_accepted_tokenizer_json_gives_equal_ids(name: str, test_data: Path, tmp_path: Path) -> None:
    tokenizer = variant(test_data, tmp_path, **{"model": {}, **EQUAL_VARIANTS[name]})
    texts = [*NASTY, *MANY_SPACES, *corpus(test_data, step=60), *around(0, 0x20000, 301)]
    check_equal(accelerate(tokenizer), tokenizer, texts)


REFUSED_VARIANTS: dict[str, tuple[dict[str, Any], str]] = {
    "dropout": ({"model": {"dropout": 0.5}}, "ignores the model's dropout=0.5"),
    "suffix": ({"model": {"end_of_word_suffix": "o"}}, "ignores the model's end_of_word_suffix='o'"),
    "whole words": ({"added_tokens": [added("foo", 0, single_word=True)]}, "single_word of the added token 'foo'"),
    "stripping": ({"added_tokens": [added("foo", 0, rstrip=True)]}, "rstrip of the added token 'foo'"),
    "normalized token": (
        {"normalizer": {"type": "NFC"}, "added_tokens": [added("e\u0301", 0, normalized=True)]},
        "the added token 'e\u0301' before normalizing",
    ),
    "normalizer": ({"normalizer": {"type": "NFKC"}}, "Unsupported normalizer type: NFKC"),
    "no words": ({"pre_tokenizer": byte_level()}, "always cuts ByteLevel text into words"),
    "no pre-tokenizer": ({"pre_tokenizer": None}, "needs a pre-tokenizer"),
    "split alone": ({"pre_tokenizer": split()}, "no pre-tokenizer of Split"),
    "white space": ({"pre_tokenizer": {"type": "Whitespace"}}, "no pre-tokenizer of Whitespace"),
    "contiguous": ({"pre_tokenizer": sequence(split("Contiguous"), byte_level())}, "behavior=Contiguous"),
    "removed": ({"pre_tokenizer": sequence(split("Removed"), byte_level())}, "behavior=Removed"),
    "prefix": ({"pre_tokenizer": sequence(split(), byte_level(add_prefix_space=True))}, "no pre-tokenizer of Split"),
    "other words": (
        {"pre_tokenizer": sequence(split() | {"pattern": {"Regex": "[a-z]+"}}, byte_level())},
        "no fast pretokenizer for",
    ),
}


@pytest.mark.parametrize("name", REFUSED_VARIANTS)
def test_a_tokenizer_json_with_other_ids_is_refused(name: str, test_data: Path, tmp_path: Path) -> None:
    changes, reason = REFUSED_VARIANTS[name]
    with pytest.raises(NotAccelerated) as caught:
        accelerate(variant(test_data, tmp_path, of_bytes=True, **{"model": {}, **changes}))
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_tokenizer_json_of_another_model_is_refused(tmp_path: Path) -> None:
    import tokenizers

    vocab = {"[UNK]": 0, "a": 1}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab=vocab, unk_token="[UNK]"))
    (tmp_path / "tokenizer.json").write_text(words.to_str())
    with pytest.raises(NotAccelerated, match="gigatoken has no WordLevel models"):
        accelerate(build_tokenizer("HFTokenizer", str(tmp_path)))


# ---------------------------------------------------------------------------------------------------------------------
# SentencePiece


@pytest.fixture(scope="module")
def sentences(test_data: Path) -> list[str]:
    return [line for text in corpus(test_data, step=40) for line in text.split("\n") if line]


def trained(sentences: Sequence[str], folder: Path, **options: Any) -> SentencePieceTokenizer:
    sentencepiece = pytest.importorskip("sentencepiece")
    model = io.BytesIO()
    usual = {
        "model_type": "bpe",
        "byte_fallback": True,
        "vocab_size": 1500,
        "character_coverage": 0.98,
        "minloglevel": 2,
    }
    usual |= {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences), model_writer=model, **{**usual, **options}
    )
    (folder / "trained.model").write_bytes(model.getvalue())
    return SentencePieceTokenizer(folder / "trained.model")


EQUAL_MODELS: dict[str, dict[str, Any]] = {
    "as Llama's": {},
    "no space first": {"add_dummy_prefix": False},
    "pieces of spaces": {"allow_whitespace_only_pieces": True, "split_by_whitespace": False},
    "user-defined pieces": {"user_defined_symbols": ["foo", "<X>", "\n"]},
    "words as control pieces": {"control_symbols": ["the", "<X>"], "split_digits": True},
}


@pytest.mark.parametrize("name", EQUAL_MODELS)
def test_an_accepted_sentencepiece_model_gives_equal_ids(
    name: str, sentences: list[str], test_data: Path, tmp_path: Path
) -> None:
    tokenizer = trained(sentences, tmp_path, **EQUAL_MODELS[name])
    texts = [*NASTY, *MANY_SPACES, "the others", *corpus(test_data, step=60), *around(0, 0x20000, 301)]
    check_equal(accelerate(tokenizer), tokenizer, texts)


REFUSED_MODELS: dict[str, tuple[dict[str, Any], str]] = {
    "unigram": ({"model_type": "unigram"}, "only BPE sentencepiece models are supported, got model_type 'unigram'"),
    "no byte fallback": ({"byte_fallback": False}, "only byte_fallback sentencepiece models are supported"),
    "NFKC": ({"normalization_rule_name": "nfkc"}, "gives other ids than SentencePiece with this normalizer"),
    "stripping": ({"remove_extra_whitespaces": True}, "gives other ids than SentencePiece with this normalizer"),
    "defined spaces": ({"user_defined_symbols": ["\u2581\u2581"]}, "misses user-defined pieces with a space"),
}


@pytest.mark.parametrize("name", REFUSED_MODELS)
def test_a_sentencepiece_model_with_other_ids_is_refused(name: str, sentences: list[str], tmp_path: Path) -> None:
    options, reason = REFUSED_MODELS[name]
    with pytest.raises(NotAccelerated, match=reason):
        accelerate(trained(sentences, tmp_path, **options))


def test_text_that_merges_to_a_control_piece_stays_text(sentences: list[str], tmp_path: Path) -> None:
    markup = ["as> bs> cs> ds> </a </b </c"] * 300
    tokenizer = trained([*sentences, *markup], tmp_path, split_by_unicode_script=False)
    assert None not in (tokenizer.token_id("</"), tokenizer.token_id("s>"))
    fast = accelerate(tokenizer)
    check_equal(fast, tokenizer, ["</s>", "a</s>b", "<s></s>", *markup[:1]])


# ---------------------------------------------------------------------------------------------------------------------
# Refusals and check_equal


def test_tokenizers_without_a_counterpart_are_refused(test_data: Path) -> None:
    with pytest.raises(NotAccelerated, match="gigatoken has no NullTokenizer"):
        accelerate(NullTokenizer(9))
    with pytest.raises(NotAccelerated, match="model_type 'unigram'"):
        accelerate(build("unigram", test_data))


def test_without_gigatoken_the_reason_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gigatoken", None)
    with pytest.raises(NotAccelerated, match=r"gigatoken cannot be used .*; pip install gigatoken"):
        accelerate(NullTokenizer(9))


class Altered(NullTokenizer):
    """Tokenizer that gives other ids for one document."""

    def __init__(self, document: str, alteration: list[int] | Exception):
        super().__init__(100)
        self._document, self._alteration = document, alteration

    def encode_batch(self, texts: Sequence[str]) -> TokenBatch:
        if isinstance(self._alteration, Exception):
            raise self._alteration
        correct = [super(Altered, self).encode_batch([text]).ids.tolist() for text in texts]
        ids = [
            self._alteration if text == self._document else right for text, right in zip(texts, correct, strict=True)
        ]
        flat = np.array([i for document in ids for i in document], dtype=np.int32)
        return TokenBatch(flat, np.array([len(document) for document in ids], dtype=np.int64))


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ([1, 2, 9, 4], r"the text '1 2 3 4' differ from token 2 on: \[9, 4\], where the reference gives \[3, 4\]"),
        ([1, 2, 3], r"differ from token 3 on: \[\], where the reference gives \[4\]"),
        ([1, 2, 3, 4, 5], r"differ from token 4 on: \[5\], where the reference gives \[\]"),
        ([], r"differ from token 0 on: \[\], where the reference gives \[1, 2, 3, 4\]"),
    ],
)
def test_the_first_text_with_other_ids_is_named(found: list[int], message: str) -> None:
    reference = NullTokenizer(100)
    texts = ["5", "", "1 2 3 4", "6 7"]
    check_equal(Altered("none", []), reference, texts)
    with pytest.raises(NotAccelerated, match=message):
        check_equal(Altered("1 2 3 4", found), reference, texts)


def test_ids_shifted_to_the_next_text_are_detected() -> None:
    class Shifted(NullTokenizer):
        def encode_batch(self, texts: Sequence[str]) -> TokenBatch:
            return TokenBatch(np.array([1, 2, 3]), np.array([2, 1]))

    with pytest.raises(NotAccelerated, match="the text '1' differ"):
        check_equal(Shifted(9), NullTokenizer(9), ["1", "2 3"])


def test_a_long_text_is_shortened() -> None:
    text = "7 " * 1000
    with pytest.raises(NotAccelerated) as caught:
        check_equal(Altered(text, [7] * 500), NullTokenizer(100), [text])
    assert "7 7 '... differ from token 500" in str(caught.value)
    assert len(str(caught.value)) < 250


def test_text_that_only_the_accelerated_tokenizer_refuses_is_an_error() -> None:
    with pytest.raises(NotAccelerated, match="refuses text that the reference encodes: no"):
        check_equal(Altered("", RuntimeError("no")), NullTokenizer(100), ["1"])
    with pytest.raises(DataError, match="'pi'"):
        check_equal(NullTokenizer(100), NullTokenizer(100), ["pi"])
