"""A tokenizer type of Megatron's name gives Megatron's ids by default, and other ids only by its two options."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tokenizers
from tokenizers import processors

from megatron.data.index.indexed import DataError
from megatron.data.tokenizers.acceleration import accelerate
from megatron.data.tokenizers.build import TOKENIZER_TYPES, build_tokenizer
from megatron.options.stored import from_dict
from megatron.tasks.pretrain import end_of_document
from tests.data.tokenizers.test_tokenizers import ROOT, build_real, documents, openai_encoding

TEXTS = ["one two", "", "<|endoftext|>", "a<|endoftext|>b</s><s> c", "naïve 日本語\n\n12345", " "]


@pytest.fixture(scope="module")
def begins_with_bos(test_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """GPT-2's tokenizer.json, whose post-processor puts <|endoftext|> before each text."""
    folder = tmp_path_factory.mktemp("bos")
    inner = tokenizers.Tokenizer.from_file(str(test_data / "tokenizers" / "gpt2" / "tokenizer.json"))
    inner.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 50256)]
    )
    inner.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"add_bos_token": false, "eos_token": "<|endoftext|>"}')
    return folder


def transformers_ids(folder: Path) -> Callable[[str], list[int]]:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(str(folder))
    return lambda text: tokenizer(text)["input_ids"]


def sentencepiece_ids(path: Path, before: list[str]) -> Callable[[str], list[int]]:
    processor = sentencepiece.SentencePieceProcessor(model_file=str(path))
    return lambda text: [*map(processor.piece_to_id, before), *processor.encode(text)]


def test_each_name_gives_megatrons_ids(test_data: Path, begins_with_bos: Path) -> None:
    folder = test_data / "tokenizers"
    model, ranks = folder / "mistral" / "tokenizer.model.v1", folder / "tiktoken" / "r50k_base.tiktoken"
    openai, hub = openai_encoding("r50k_base", ranks), transformers_ids(begins_with_bos)
    gpt2 = (None, str(folder / "gpt2" / "vocab.json"), str(folder / "gpt2" / "merges.txt"))
    cases: dict[str, tuple[tuple[str | None, ...], Callable[[str], list[int]]]] = {
        # one vocabulary in two forms, the second with its special token marked
        "GPT2BPETokenizer": (gpt2, transformers_ids(folder / "gpt2")),
        "HFTokenizer": ((str(begins_with_bos),), hub),
        "HuggingFaceTokenizer": ((str(begins_with_bos),), hub),
        "SentencePieceTokenizer": ((str(model),), sentencepiece_ids(model, [])),
        "GPTSentencePieceTokenizer": ((str(model),), sentencepiece_ids(model, [])),
        "Llama2Tokenizer": ((str(model),), sentencepiece_ids(model, ["<s>"])),
        "TikTokenizer": ((str(ranks),), lambda text: openai.encode(text, allowed_special="all")),
        "NullTokenizer": ((None, None, None, 50), lambda text: [int(word) for word in text.split(" ")]),  # type: ignore[dict-item]
    }
    assert cases.keys() == TOKENIZER_TYPES.keys()
    for name, (files, reference) in cases.items():
        tokenizer = build_tokenizer(name, *files)  # type: ignore[arg-type]
        texts = ["3 14 15", "7"] if name == "NullTokenizer" else TEXTS
        # what has no token of its own stays empty, so that a document without text is left out
        expected = [reference(text) if text else [] for text in texts]
        assert documents(tokenizer.encode_batch(texts)) == expected, name
        assert [tokenizer.encode(text) for text in texts] == expected, name


def test_the_table_of_names_is_that_of_the_code() -> None:
    page = (ROOT / "docs" / "guides" / "pretrain.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| ([\w. ]+) \| (parsed|text) \|", page, flags=re.MULTILINE)
    words = {True: "yes", False: "no", None: "as tokenizer.json says"}
    assert rows == [
        (name, words[kind.prepend_bos], "parsed" if kind.parse_special else "text")
        for name, kind in TOKENIZER_TYPES.items()
    ]


def test_both_options_change_ids_and_identity(test_data: Path, begins_with_bos: Path) -> None:
    def build(kind: str, path: Path, **options: Any) -> Any:
        return build_tokenizer(kind, str(path), **options)

    model = test_data / "tokenizers" / "mistral" / "tokenizer.model.v1"
    plain, with_bos = build("SentencePieceTokenizer", model), build("SentencePieceTokenizer", model, prepend_bos=True)
    assert with_bos.encode("one") == [1, *plain.encode("one")]
    assert build("Llama2Tokenizer", model, prepend_bos=False).identity == plain.identity
    assert build("Llama2Tokenizer", model).identity == with_bos.identity != plain.identity
    without = build("HFTokenizer", begins_with_bos, prepend_bos=False, parse_special_tokens=False)
    assert 50256 not in without.encode("<|endoftext|>")
    assert build("HFTokenizer", begins_with_bos).encode("<|endoftext|>") == [50256, 50256]
    with pytest.raises(DataError, match="this TikTokenizer has no begin-of-text token; turn prepend_bos off"):
        build_real("r50k", test_data, prepend_bos=True)


@pytest.mark.parametrize("name", ["gpt2", "mistral_v1", "mistral_v3"])
def test_accelerated_tokenizers_prepend_the_same_bos(name: str, test_data: Path) -> None:
    """Texts that gigatoken leaves to the reference, such as one with a user-defined piece, have one BOS too."""
    pytest.importorskip("gigatoken")
    reference = build_real(name, test_data, prepend_bos=True)
    texts = ["one", "", "[INST] two [/INST]", "", "see [REFERENCE_DOC_3]", "three"]
    expected = documents(reference.encode_batch(texts))
    assert [ids[:1] == [reference.added.before[0]] for ids in expected] == [bool(text) for text in texts]  # type: ignore[attr-defined]
    assert documents(accelerate(reference).encode_batch(texts)) == expected


# ---------------------------------------------------------------------------------------------------------------------
# Megatron's JSON vocabulary

TOKENS = [*(bytes([i]) for i in range(256)), b"he", b"hel", b"12"]


def json_vocabulary(folder: Path, tokens: list[bytes] = TOKENS, **changed: Any) -> Path:
    entries = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": token.decode("utf-8", "replace")}
        for rank, token in enumerate(tokens)
    ]
    if changed:
        entries[-1] |= changed
    (folder / "vocab.json").write_text(json.dumps(entries))
    return folder / "vocab.json"


def test_megatrons_json_vocabulary(tmp_path: Path) -> None:
    path = str(json_vocabulary(tmp_path))
    tokenizer = build_tokenizer("TikTokenizer", path, vocab_size=1258)
    assert (tokenizer.vocab_size, tokenizer.eod) == (1258, 2)
    # a thousand special tokens come first; vocab_size leaves out the last token of the file
    assert tokenizer.encode("hello</s>12") == [1257, 1000 + ord("l"), 1000 + ord("o"), 2, 1049, 1050]
    assert tokenizer.encode("<unk><sep><SPECIAL_7><SPECIAL_999>") == [0, 6, 7, 999]
    assert tokenizer.decode([1257, 1108, 2]) == "hell</s>"
    small = build_tokenizer(
        "TikTokenizer", path, vocab_size=266, tiktoken_num_special_tokens=7, parse_special_tokens=False
    )
    assert small.encode("hel</s>")[:2] == [264, 7 + ord("<")]
    assert build_tokenizer("TikTokenizer", path, vocab_size=1258, prepend_bos=True).encode("h") == [1, 1104]
    # each digit is a word of its own: the token "12" is never used
    assert small.encode("12") == [7 + ord("1"), 7 + ord("2")]


def test_patterns_of_the_json_vocabulary(tmp_path: Path) -> None:
    tokens = [*TOKENS[:256], b"aB", b"\n/"]
    path = str(json_vocabulary(tmp_path, tokens))
    options: dict[str, Any] = {"vocab_size": 265, "tiktoken_num_special_tokens": 7}
    v1, v2 = (build_tokenizer("TikTokenizer", path, tiktoken_pattern=name, **options) for name in ("v1", "v2"))
    assert build_tokenizer("TikTokenizer", path, **options).identity == v2.identity != v1.identity
    # v2 cuts before a capital letter, v1 before a slash that follows a line break
    assert (v1.encode("aB"), v2.encode("aB")) == ([263], [7 + ord("a"), 7 + ord("B")])
    assert (v1.encode(".\n/"), v2.encode(".\n/")) == ([53, 17, 54], [53, 264])


@pytest.mark.parametrize(
    ("changed", "options", "message"),
    [
        ({}, {}, "has 259 tokens; vocab_size=131072 with 1000 special tokens takes 130072"),
        ({}, {"vocab_size": 1260}, "has 259 tokens; vocab_size=1260 with 1000 special tokens takes 260"),
        ({}, {"vocab_size": 900}, "tiktoken_num_special_tokens=1000 must be at least 7 and below vocab_size=900"),
        ({}, {"tiktoken_pattern": "cl100k", "vocab_size": 1259}, "tiktoken_pattern=cl100k is for rank files.*v1 or v2"),
        ({"rank": 7}, {"vocab_size": 1259}, "entry 258 is .*ranks count up from 0"),
        ({"token_bytes": "aGU="}, {"vocab_size": 1259}, "entry 258 is .*no token is there twice"),
        ({"token_bytes": "!"}, {"vocab_size": 1259}, "entry 258 is "),
    ],
)
def test_a_wrong_json_vocabulary_is_refused(
    changed: dict[str, Any], options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=message):
        build_tokenizer("TikTokenizer", str(json_vocabulary(tmp_path, **changed)), **options)


def test_options_of_one_form_of_file_are_refused_for_the_other(test_data: Path) -> None:
    for option in ({"tiktoken_pattern": "v2"}, {"tiktoken_num_special_tokens": 7}):
        with pytest.raises(DataError, match=r"is for (JSON vocabularies, but|a JSON vocabulary, not for) .*r50k_base"):
            build_real("r50k", test_data, **option)


def test_training_ends_documents_with_the_id_of_preprocessing(tmp_path: Path) -> None:
    """vocab_size is the model's there, which includes the end of document."""
    null = build_tokenizer("NullTokenizer", vocab_size=100)
    model = {"vocab_size": null.vocab_size}
    assert end_of_document(from_dict({"data": {"tokenizer_type": "NullTokenizer"}, "model": model})) == null.eod == 100
    data = {"tokenizer_type": "TikTokenizer", "tokenizer_model": str(json_vocabulary(tmp_path))}
    assert end_of_document(from_dict({"data": data, "model": {"vocab_size": 1259}})) == 2
