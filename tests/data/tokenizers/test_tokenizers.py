"""Tokenizers give the reference's ids, treat documents as plain text, and report faults of their files."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import regex
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from megatron.data.index.indexed import DataError
from megatron.data.tokenizers.base import TokenBatch, Tokenizer
from megatron.data.tokenizers.build import TOKENIZER_TYPES, NullTokenizer, build_tokenizer
from megatron.data.tokenizers.library import GPT2BPETokenizer, HFTokenizer
from megatron.data.tokenizers.tiktoken import TIKTOKEN_SCHEMES, TikTokenizer
from megatron.options.stored import from_dict
from megatron.tasks.pretrain import end_of_document

ODD_TEXTS = [
    "",
    " ",
    "Hello world",
    " leading and trailing ",
    "line\r\nbreaks\n\n\tand tabs",
    "<|endoftext|>",
    "a<|endoftext|>b</s>c",
    "naïve café — ﬁ ½ 日本語 한국어 العربية हिन्दी 😀👩‍👩‍👧",
    "\x00\x01\ufeff\ufffd",
    "it's we'll I'D 12345 ,.!?",
]


# Llama 3's, as its tokenizer.json writes it
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)

ROOT = Path(__file__).resolve().parents[3]

REAL = ("gpt2", "gpt2_json", "bloom", "mistral_v1", "mistral_v3", "r50k", "cl100k")


PLAIN: dict[str, Any] = {"prepend_bos": False, "parse_special_tokens": False}


def build_real(name: str, test_data: Path, **options: Any) -> Tokenizer:
    folder = test_data / "tokenizers"
    gpt2, mistral, tiktoken = folder / "gpt2", folder / "mistral", folder / "tiktoken"
    arguments: dict[str, tuple[str, ...]] = {
        "gpt2": ("GPT2BPETokenizer", "", str(gpt2 / "vocab.json"), str(gpt2 / "merges.txt")),
        "gpt2_json": ("HFTokenizer", str(gpt2)),
        "bloom": ("HFTokenizer", str(folder / "bloom_format_trained")),
        "mistral_v1": ("SentencePieceTokenizer", str(mistral / "tokenizer.model.v1")),
        "mistral_v3": ("Llama2Tokenizer", str(mistral / "mistral_instruct_tokenizer_240323.model.v3")),
        "r50k": ("TikTokenizer", str(tiktoken / "r50k_base.tiktoken")),
        "cl100k": ("TikTokenizer", str(tiktoken / "cl100k_base.tiktoken")),
    }
    return build_tokenizer(*arguments[name], **PLAIN | options)  # type: ignore[arg-type]


def corpus(test_data: Path, step: int = 1) -> list[str]:
    """Every `step`-th of the documents in 83 languages."""
    lines = (test_data / "corpus_multi.jsonl").read_text(encoding="utf-8").split("\n")[:-1:step]
    return [json.loads(line)["text"] for line in lines]


def documents(batch: TokenBatch) -> list[list[int]]:
    """Return the ids of each document in a batch."""
    assert batch.ids.dtype in (np.int32, np.uint32)
    assert batch.ids.ndim == 1
    assert batch.lengths.dtype == np.int64
    assert batch.lengths.sum() == len(batch.ids)
    return [ids.tolist() for ids in np.split(batch.ids, np.cumsum(batch.lengths)[:-1])] if len(batch.lengths) else []


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A byte-level tokenizer of 256 bytes, two merges and an end-of-text token, in every file form."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*alphabet, "he", "hel", "<|endoftext|>"]
    vocab = {word: i for i, word in enumerate(words)}
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    (tmp_path / "merges.txt").write_text("#version: 0.2\nh e\nhe l\n")
    inner = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[("h", "e"), ("he", "l")]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(["<|endoftext|>"])
    inner.enable_truncation(3)
    inner.enable_padding(length=50)
    (tmp_path / "tokenizer.json").write_text(inner.to_str())
    (tmp_path / "ranks.tiktoken").write_bytes(rank_file([bytes([i]) for i in range(256)] + [b"he", b"hel"]))
    return tmp_path


def rank_file(tokens: list[bytes]) -> bytes:
    return b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens))


def test_both_file_formats_give_the_same_ids_and_round_trip(files: Path) -> None:
    bpe = build_tokenizer("GPT2BPETokenizer", "", str(files / "vocab.json"), str(files / "merges.txt"), **PLAIN)
    from_folder = build_tokenizer("HFTokenizer", str(files), **PLAIN)
    from_file = build_tokenizer("HuggingFaceTokenizer", str(files / "tokenizer.json"), **PLAIN)
    for tokenizer in (bpe, from_folder, from_file):
        assert (tokenizer.vocab_size, tokenizer.eod) == (259, 258)
        assert tokenizer.encode("hello") == [257, *bpe.encode("lo")]
        for text, ids in zip(ODD_TEXTS, documents(tokenizer.encode_batch(ODD_TEXTS)), strict=True):
            assert ids == bpe.encode(text)
            assert tokenizer.decode(ids) == text
            assert 258 not in ids  # a literal <|endoftext|> stays text
        assert tokenizer.decode([257, 258]) == "hel<|endoftext|>"


# ---------------------------------------------------------------------------------------------------------------------
# Against independent references


def reference_of(name: str, test_data: Path) -> Callable[[str], list[int]]:
    """Ids by the reference library for the same files."""
    folder = test_data / "tokenizers"
    if name in ("gpt2", "gpt2_json", "r50k"):  # one vocabulary in three forms
        transformers = pytest.importorskip("transformers")
        gpt2 = transformers.GPT2TokenizerFast(
            vocab=str(folder / "gpt2" / "vocab.json"), merges=str(folder / "gpt2" / "merges.txt")
        )
        return lambda text: gpt2(text, add_special_tokens=False)["input_ids"]
    if name == "bloom":
        transformers = pytest.importorskip("transformers")
        fast = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "bloom_format_trained/tokenizer.json"))
        return lambda text: fast(text, add_special_tokens=False)["input_ids"]
    if name == "cl100k":
        return openai_encoding("cl100k_base", folder / "tiktoken" / "cl100k_base.tiktoken").encode_ordinary
    sentencepiece = pytest.importorskip("sentencepiece")
    file = {"mistral_v1": "tokenizer.model.v1", "mistral_v3": "mistral_instruct_tokenizer_240323.model.v3"}[name]
    processor = sentencepiece.SentencePieceProcessor(model_file=str(folder / "mistral" / file))
    return lambda text: processor.encode(text, out_type=int)


def openai_encoding(name: str, path: Path) -> Any:
    """Encoding as tiktoken defines it, with a local rank file instead of a download."""
    import tiktoken
    from tiktoken.load import load_tiktoken_bpe
    from tiktoken_ext import openai_public  # type: ignore[import-untyped]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(openai_public, "load_tiktoken_bpe", lambda url, expected_hash: load_tiktoken_bpe(str(path)))
        return tiktoken.Encoding(**openai_public.ENCODING_CONSTRUCTORS[name]())


def check_real(name: str, test_data: Path, texts: list[str]) -> None:
    tokenizer, reference = build_real(name, test_data), reference_of(name, test_data)
    for text, ids in zip(texts, documents(tokenizer.encode_batch(texts)), strict=True):
        assert ids == reference(text)
        assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("name", REAL)
def test_documents_in_83_languages_equal_the_reference_and_round_trip(name: str, test_data: Path) -> None:
    check_real(name, test_data, corpus(test_data, step=12))


@pytest.mark.slow
@pytest.mark.parametrize("name", REAL)
def test_every_document_in_83_languages_equals_the_reference_and_round_trips(name: str, test_data: Path) -> None:
    texts = corpus(test_data)
    if name.startswith("mistral"):
        # SentencePiece writes a space as U+2581, so that a document with that very character cannot come back
        texts = [text for text in texts if "\u2581" not in text]
        assert len(texts) == 892
    check_real(name, test_data, texts)


@pytest.mark.parametrize("name", REAL)
def test_odd_texts_equal_the_reference(name: str, test_data: Path) -> None:
    tokenizer, reference = build_real(name, test_data), reference_of(name, test_data)
    texts = [text for text in ODD_TEXTS if "<|" not in text and "</s>" not in text]  # transformers parses these
    assert documents(tokenizer.encode_batch(texts)) == [reference(text) for text in texts]


def test_o200k_cuts_text_as_tiktoken_does(test_data: Path) -> None:
    path = test_data / "tokenizers" / "tiktoken" / "cl100k_base.tiktoken"
    ours, theirs = TikTokenizer(path, "o200k"), openai_encoding("o200k_base", path)
    texts = [*corpus(test_data, step=12), *ODD_TEXTS, "HTTPServer's aB/\r\n/x \u01c5a 12345", "end \n  "]
    assert documents(ours.encode_batch(texts)) == [theirs.encode_ordinary(text) for text in texts]


def test_llama3_cuts_text_as_its_tokenizer_json_says(test_data: Path) -> None:
    path = test_data / "tokenizers" / "tiktoken" / "cl100k_base.tiktoken"
    tokenizer = TikTokenizer(path, "llama3")
    for text in [*corpus(test_data, step=60), *ODD_TEXTS, "end \n  ", "it'S 12345 \r\n\r\n x\t\ty"]:
        pieces = regex.findall(LLAMA3_PATTERN, text)
        assert "".join(pieces) == text
        assert tokenizer.encode(text) == [i for piece in pieces for i in tokenizer._inner._encode_single_piece(piece)]


def test_several_threads_share_a_tokenizer(test_data: Path) -> None:
    texts = corpus(test_data, step=40)
    for name in REAL:
        tokenizer = build_real(name, test_data)
        expected = tokenizer.encode_batch(texts)
        with ThreadPoolExecutor(4) as pool:
            for ids, lengths in pool.map(tokenizer.encode_batch, [texts] * 4):
                assert np.array_equal(ids, expected.ids)
                assert np.array_equal(lengths, expected.lengths)


# ---------------------------------------------------------------------------------------------------------------------
# Each kind


def test_megatrons_small_gpt2_loads(test_data: Path) -> None:
    folder = test_data / "tokenizers" / "megatron_gpt2_tiny"
    tokenizer = GPT2BPETokenizer(folder / "vocab.json", folder / "merges.txt")
    assert (tokenizer.vocab_size, tokenizer.eod) == (5000, 4999)
    for text in ODD_TEXTS:
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_eod_is_the_configs_eos_token(test_data: Path, files: Path) -> None:
    assert HFTokenizer(test_data / "tokenizers" / "bloom_format_trained").eod == 2  # </s>
    (files / "tokenizer_config.json").write_text('{"eos_token": {"content": "hel", "lstrip": false}}')
    assert HFTokenizer(files).eod == 257
    (files / "tokenizer_config.json").write_text('{"eos_token": "absent"}')
    with pytest.raises(DataError, match="eos_token 'absent'"):
        HFTokenizer(files)


def test_null_tokenizer_reads_ids() -> None:
    tokenizer = build_tokenizer("NullTokenizer", vocab_size=100)
    assert tokenizer.encode(" 3 14\n15 ") == [3, 14, 15]
    assert (tokenizer.vocab_size, tokenizer.eod) == (101, 100)  # as in megatron-core 0.16: no id of a text
    assert tokenizer.decode([3, 14]) == "3 14"
    with pytest.raises(DataError, match="id 100, which is the end-of-document id, is outside vocab_size=100"):
        tokenizer.encode("100")
    with pytest.raises(DataError, match="id 101 is outside vocab_size=100"):
        tokenizer.encode("101")
    with pytest.raises(DataError, match="'pi'"):
        NullTokenizer(9).encode("3 pi")


def test_null_tokenizer_batches(files: Path) -> None:
    tokenizer = NullTokenizer(100)
    assert documents(tokenizer.encode_batch(["3 14", "", "15"])) == [[3, 14], [], [15]]
    assert documents(tokenizer.encode_batch([])) == []
    for bad in ("1 -1", "9" * 30, "9" * 5000, "1.5", "\ud800"):
        with pytest.raises(DataError):
            tokenizer.encode_batch(["1", bad])


@pytest.mark.parametrize(
    ("pattern", "num_ranks", "eod", "vocab_size", "some"),
    [
        ("r50k", 50256, 50256, 50257, {"<|endoftext|>": 50256}),
        ("cl100k", 100256, 100257, 100277, {"<|fim_suffix|>": 100260, "<|endofprompt|>": 100276}),
        ("o200k", 199998, 199999, 200019, {"<|endofprompt|>": 200018}),
        (
            "llama3",
            128000,
            128001,
            128256,
            {"<|begin_of_text|>": 128000, "<|eot_id|>": 128009, "<|reserved_special_token_247|>": 128255},
        ),
    ],
)
def test_the_number_of_ranks_identifies_the_encoding(
    pattern: str, num_ranks: int, eod: int, vocab_size: int, some: dict[str, int], tmp_path: Path
) -> None:
    tokens = [bytes([i]) for i in range(256)] + [b"%06d" % i for i in range(256, num_ranks)]
    (tmp_path / "tokenizer.model").write_bytes(rank_file(tokens))
    tokenizer = TikTokenizer(tmp_path / "tokenizer.model", parse_special_tokens=True)
    assert tokenizer.pattern == pattern
    assert (tokenizer.eod, tokenizer.vocab_size) == (eod, vocab_size)
    for token, expected in some.items():
        assert tokenizer.encode(f"a{token}") == [97, expected]
        assert tokenizer.decode([97, expected]) == f"a{token}"


@pytest.mark.parametrize("name", ["r50k", "cl100k"])
def test_special_tokens_of_openais_encodings_are_tiktokens(name: str, test_data: Path) -> None:
    theirs = openai_encoding(f"{name}_base", test_data / "tokenizers" / "tiktoken" / f"{name}_base.tiktoken")
    ours = build_real(name, test_data, parse_special_tokens=True)
    assert ours.vocab_size == theirs.n_vocab
    assert ours.eod == theirs.eot_token
    for token in theirs.special_tokens_set:
        assert ours.encode(token) == theirs.encode(token, allowed_special="all")


def test_a_rank_file_of_another_size_needs_its_pattern(files: Path) -> None:
    path = str(files / "ranks.tiktoken")
    with pytest.raises(DataError, match=r"has 258 ranks.*tiktoken_pattern, one of r50k \(of 50256 ranks\), cl100k"):
        build_tokenizer("TikTokenizer", path)
    with pytest.raises(DataError, match="tiktoken_pattern=p50k is unknown; use one of r50k"):
        build_tokenizer("TikTokenizer", path, tiktoken_pattern="p50k")
    with pytest.raises(DataError, match="tiktoken_pattern=r50k is for TikTokenizer"):
        build_tokenizer("HFTokenizer", str(files), tiktoken_pattern="r50k")
    tokenizer = build_tokenizer("TikTokenizer", path, tiktoken_pattern="r50k")
    assert (tokenizer.eod, tokenizer.vocab_size) == (258, 259)
    assert tokenizer.encode("hello") == [257, *b"lo"]
    for text, ids in zip(ODD_TEXTS, documents(tokenizer.encode_batch(ODD_TEXTS)), strict=True):
        assert tokenizer.decode(ids) == text


BYTES = [bytes([i]) for i in range(256)]
BAD_RANKS = {
    "bad base64": (b"!!!! 0\n", r":1: '!!!! 0' does not begin with base64"),
    "one field": (rank_file(BYTES) + b"aGU=\n", ":257: 'aGU=' is not a token in base64 and its rank"),
    "a word for a rank": (rank_file(BYTES) + b"aGU= six\n", ":257: 'aGU= six' is not a token"),
    "a negative rank": (rank_file(BYTES) + b"aGU= -1\n", ":257: 'aGU= -1' is not a token"),
    "a token twice": (rank_file([*BYTES, b"he", b"A"]), ":258: token b'A' has rank 65 already"),
    "a rank twice": (rank_file(BYTES) + b"aGU= 255\n", ":257: rank 255 where 256 is due"),
    "a gap": (rank_file(BYTES) + b"aGU= 300\n", ":257: rank 300 where 256 is due"),
    "a lost line": (rank_file(BYTES).replace(b"Qg== 66\n", b""), ":67: rank 67 where 66 is due"),
    "cut short": (rank_file(BYTES[:100]), "ends at line 101 and lacks 156 of the 256 single bytes, such as 0x64"),
    "cut in a line": (rank_file(BYTES)[:-6], ":256: '/w=' is not a token"),
    "not all bytes": (rank_file([*BYTES[:9], *BYTES[10:], b"he"]), "lacks 1 of the 256 single bytes, such as 0x09"),
}


@pytest.mark.parametrize("case", BAD_RANKS)
def test_a_damaged_rank_file_is_named_with_the_line(case: str, tmp_path: Path) -> None:
    content, message = BAD_RANKS[case]
    (tmp_path / "bad.tiktoken").write_bytes(content)
    with pytest.raises(DataError, match="bad.tiktoken.*" + message):
        TikTokenizer(tmp_path / "bad.tiktoken", "r50k")


# ---------------------------------------------------------------------------------------------------------------------
# End of document, special tokens, identity


@pytest.mark.parametrize(
    ("name", "token", "expected"),
    [
        ("gpt2", " the", None),
        ("gpt2", "Ġthe", 262),
        ("gpt2_json", "<|endoftext|>", 50256),
        ("bloom", "<pad>", 3),
        ("mistral_v1", "<s>", 1),
        ("mistral_v3", "[INST]", 3),
        ("mistral_v3", "no piece", None),
        ("cl100k", "<|endofprompt|>", 100276),
        ("cl100k", " the", 279),
        ("r50k", "</s>", None),
    ],
)
def test_the_end_of_document_can_be_named(name: str, token: str, expected: int | None, test_data: Path) -> None:
    if expected is None:
        with pytest.raises(DataError, match=f"eod_token '{token}' is not a token of this"):
            build_real(name, test_data, eod_token=token)
    else:
        tokenizer = build_real(name, test_data, eod_token=token)
        assert tokenizer.eod == tokenizer.identity["eod"] == expected


def test_the_end_of_document_of_ids_is_an_id() -> None:
    assert build_tokenizer("NullTokenizer", vocab_size=100, eod_token="7").eod == 7
    for bad in ("101", "-1", "x", "", "9" * 5000):
        with pytest.raises(DataError, match="is not a token of this NullTokenizer"):
            build_tokenizer("NullTokenizer", vocab_size=100, eod_token=bad)


def test_training_uses_the_named_end_of_document(files: Path) -> None:
    data = {"tokenizer_type": "TikTokenizer", "tokenizer_model": str(files / "ranks.tiktoken")}
    data["tiktoken_pattern"] = "r50k"
    model = {"vocab_size": 259}
    assert end_of_document(from_dict({"data": data, "model": model})) == 258
    assert end_of_document(from_dict({"data": data | {"eod_token": "hel"}, "model": model})) == 257
    with pytest.raises(DataError, match="eod_token 'absent' is not a token of this TikTokenizer"):
        end_of_document(from_dict({"data": data | {"eod_token": "absent"}, "model": model}))


SPECIAL = {
    "gpt2": ("<|endoftext|>", 50256),
    "gpt2_json": ("<|endoftext|>", 50256),
    "bloom": ("<pad>", 3),
    "mistral_v1": ("</s>", 2),
    "mistral_v3": ("[/INST]", 4),
    "r50k": ("<|endoftext|>", 50256),
    "cl100k": ("<|fim_prefix|>", 100258),
}


@pytest.mark.parametrize("name", REAL)
def test_literal_special_tokens_stay_text_unless_parsed(name: str, test_data: Path) -> None:
    token, special = SPECIAL[name]
    plain = build_real(name, test_data)
    parsing = build_real(name, test_data, parse_special_tokens=True)
    texts = [token, f"one{token}two", f"{token}{token} three", "four", ""]
    for text, ids in zip(texts, documents(plain.encode_batch(texts)), strict=True):
        assert special not in ids
        assert plain.encode(text) == ids
        assert plain.decode(ids) == text
    one, two, four = (plain.encode(text) for text in ("one", "two", "four"))
    found = documents(parsing.encode_batch(texts))
    assert [parsing.encode(text) for text in texts] == found
    assert found[:2] == [[special], [*one, special, *two]]
    assert found[2][:2] == [special, special]
    assert found[3:] == [four, []]
    assert plain.identity["sha256"] != parsing.identity["sha256"]


def test_user_defined_pieces_are_always_parsed(test_data: Path) -> None:
    # SentencePiece itself takes them for themselves, whatever is asked
    for parse in (False, True):
        tokenizer = build_real("mistral_v3", test_data, parse_special_tokens=parse)
        assert 767 in tokenizer.encode("see [REFERENCE_DOC_3]")


def test_identity_depends_on_contents_and_options_only(files: Path, tmp_path: Path) -> None:
    vocab, merges = files / "vocab.json", files / "merges.txt"

    def identity(kind: str, *paths: Any, **options: Any) -> dict[str, Any]:
        arguments: list[Any] = [str(path) for path in paths]
        found = build_tokenizer(kind, *arguments, **options).identity
        assert json.loads(json.dumps(found)) == found
        return found

    bpe = identity("GPT2BPETokenizer", "", vocab, merges)
    assert bpe["type"] == "GPT2BPETokenizer"
    assert (bpe["vocab_size"], bpe["eod"], len(bpe["sha256"])) == (259, 258, 64)
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in (vocab, merges, files / "tokenizer.json"):
        (copy / file.name).write_bytes(file.read_bytes())
    assert identity("GPT2BPETokenizer", "", copy / vocab.name, copy / merges.name) == bpe
    assert identity("HFTokenizer", files) == identity("HuggingFaceTokenizer", copy / "tokenizer.json")
    (copy / merges.name).write_text("#version: 0.2\nh e\n")
    different = [
        identity("GPT2BPETokenizer", "", copy / vocab.name, copy / merges.name),
        identity("GPT2BPETokenizer", "", vocab, merges, eod_token="he"),
        identity("GPT2BPETokenizer", "", vocab, merges, parse_special_tokens=False),
        identity("GPT2BPETokenizer", "", vocab, merges, prepend_bos=True),
        *(identity("TikTokenizer", files / "ranks.tiktoken", tiktoken_pattern=name) for name in TIKTOKEN_SCHEMES),
        build_tokenizer("NullTokenizer", vocab_size=259).identity,
        bpe,
    ]
    assert len({json.dumps(found) for found in different}) == len(different)


# ---------------------------------------------------------------------------------------------------------------------
# Bad input


@pytest.mark.parametrize("name", REAL)
@pytest.mark.parametrize("parse", [False, True])
def test_an_unpaired_surrogate_is_refused_and_named(name: str, parse: bool, test_data: Path) -> None:
    tokenizer = build_real(name, test_data, parse_special_tokens=parse)
    for bad in ("ab\udc80", f"ab\ud83d{SPECIAL[name][0]}"):
        with pytest.raises(DataError, match=r"character 2 of the text is the unpaired surrogate U\+D"):
            tokenizer.encode_batch(["fine", bad])
        with pytest.raises(DataError, match=r"unpaired surrogate U\+D"):
            tokenizer.encode(bad)


@pytest.mark.parametrize("name", ["mistral_v1", "r50k", "cl100k"])
def test_unknown_ids_are_refused_or_left_out(name: str, test_data: Path) -> None:
    tokenizer = build_real(name, test_data)
    with pytest.raises(DataError, match="id 300000 is outside vocab_size="):
        tokenizer.decode([5, 300000])
    with pytest.raises(DataError, match="id -1 is outside"):
        tokenizer.decode([-1])


def test_a_gap_in_the_vocabulary_is_reported(test_data: Path) -> None:
    with pytest.raises(DataError, match="one of the ids has no token"):
        build_real("cl100k", test_data).decode([100256])


@pytest.mark.parametrize("kind", [*TOKENIZER_TYPES, "Nonsense"])
def test_a_tokenizer_without_its_files_names_what_it_needs(kind: str) -> None:
    with pytest.raises(DataError, match=r"needs --|unknown; use one of GPT2BPETokenizer"):
        build_tokenizer(kind)


BAD_CONTENTS: dict[str, tuple[bytes | None, str]] = {
    "missing": (None, r"cannot be read \(No such file or directory\)"),
    "empty": (b"", "is empty"),
    "binary": (b"\xff\xfe\x00", ""),
    "garbage": (bytes(range(256)) * 9, ""),
    "zeros": (bytes(1000), ""),
    "text": (b"some text", ""),
    "list": (b"[1, 2]", ""),
    "object": (b'{"model": {"type": "BPE"}}', ""),
    "web page": (b"<!DOCTYPE html>\n<html><body>Not found</body></html>\n", "It looks like a web page"),
    "pointer": (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n",
        "It looks like a Git LFS pointer",
    ),
    "archive": (b"PK\x03\x04\x14\x00\x00\x00", "It looks like an archive"),
}


def arguments_for(folder: Path, name: str) -> tuple[Any, ...]:
    return {
        "vocab.json": ("GPT2BPETokenizer", None, str(folder / "vocab.json"), str(folder / "merges.txt")),
        "merges.txt": ("GPT2BPETokenizer", None, str(folder / "vocab.json"), str(folder / "merges.txt")),
        "tokenizer.json": ("HFTokenizer", str(folder)),
        "model.model": ("SentencePieceTokenizer", str(folder / "model.model")),
        "ranks.tiktoken": ("TikTokenizer", str(folder / "ranks.tiktoken")),
    }[name]


FILES = ("vocab.json", "merges.txt", "tokenizer.json", "model.model", "ranks.tiktoken")


@pytest.mark.parametrize("content", BAD_CONTENTS)
@pytest.mark.parametrize("name", FILES)
def test_a_file_of_the_wrong_kind_is_named(files: Path, name: str, content: str) -> None:
    bad, message = BAD_CONTENTS[content]
    (files / name).unlink(missing_ok=True)
    if bad is not None:
        (files / name).write_bytes(bad)
    with pytest.raises(DataError, match=name.replace(".", r"\.") + f".*{message}"):
        build_tokenizer(*arguments_for(files, name))


GIVEN_FOR_ANOTHER = {
    "gpt2/vocab.json": "It looks like a vocab.json",
    "gpt2/merges.txt": "It looks like a merges.txt",
    "gpt2/tokenizer.json": "It looks like a tokenizer.json",
    "mistral/tokenizer.model.v1": "It looks like a SentencePiece model",
    "tiktoken/cl100k_base.tiktoken": "It looks like a tiktoken rank file",
}


@pytest.mark.parametrize(
    ("name", "real"),
    [
        (name, real)
        for name, right in zip(FILES, GIVEN_FOR_ANOTHER, strict=True)
        for real in GIVEN_FOR_ANOTHER
        if real != right
    ],
)
def test_a_file_given_by_mistake_is_recognized(files: Path, name: str, real: str, test_data: Path) -> None:
    source = test_data / "tokenizers" / real
    (files / name).write_bytes(source.read_bytes())
    with pytest.raises(DataError, match=f"{name}.*{GIVEN_FOR_ANOTHER[real]}"):
        build_tokenizer(*arguments_for(files, name))


@pytest.mark.parametrize("kind", ["HFTokenizer", "SentencePieceTokenizer", "TikTokenizer"])
def test_a_folder_without_the_file_is_named(kind: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"cannot be read \((No such file|Is a directory)"):
        build_tokenizer(kind, str(tmp_path))


def test_a_truncated_sentencepiece_model_is_refused(tmp_path: Path, test_data: Path) -> None:
    content = (test_data / "tokenizers" / "mistral" / "tokenizer.model.v1").read_bytes()
    (tmp_path / "cut.model").write_bytes(content[:200_000])
    with pytest.raises(DataError, match=r"cut\.model is not a SentencePiece model"):
        build_tokenizer("SentencePieceTokenizer", str(tmp_path / "cut.model"))


def test_a_vocabulary_without_all_bytes_is_refused(files: Path) -> None:
    vocab = json.loads((files / "vocab.json").read_text())
    del vocab["A"]
    (files / "vocab.json").write_text(json.dumps(vocab))
    with pytest.raises(DataError, match="lacks 1 of the 256 byte symbols, such as 'A'"):
        GPT2BPETokenizer(files / "vocab.json", files / "merges.txt")
