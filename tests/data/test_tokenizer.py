"""Tokenizers give the reference's ids, take documents for plain text, and explain what is wrong with their files."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from megatron.data.indexed import DataError
from megatron.data.tokenizer import TOKENIZER_TYPES, GPT2BPETokenizer, HFTokenizer, NullTokenizer, build_tokenizer

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
    return tmp_path


def test_both_file_forms_give_the_same_ids_and_round_trip(files: Path) -> None:
    bpe = build_tokenizer(
        "GPT2BPETokenizer", vocab_file=str(files / "vocab.json"), merge_file=str(files / "merges.txt")
    )
    from_folder = build_tokenizer("HFTokenizer", str(files))
    from_file = build_tokenizer("HuggingFaceTokenizer", str(files / "tokenizer.json"))
    for tokenizer in (bpe, from_folder, from_file):
        assert (tokenizer.vocab_size, tokenizer.eod) == (259, 258)
        assert tokenizer.encode("hello") == [257, *bpe.encode("lo")]
        batch = tokenizer.encode_batch(ODD_TEXTS)
        assert all(ids.dtype == np.int32 for ids in batch)
        for text, ids in zip(ODD_TEXTS, batch, strict=True):
            assert ids.tolist() == bpe.encode(text)
            assert tokenizer.decode(ids.tolist()) == text
            assert 258 not in ids  # a literal <|endoftext|> stays text
        assert tokenizer.decode([257, 258]) == "hel<|endoftext|>"


def test_gpt2_equals_the_reference_on_real_text(test_data: Path) -> None:
    folder = test_data / "tokenizers" / "gpt2"
    ours = GPT2BPETokenizer(folder / "vocab.json", folder / "merges.txt")
    from_json = HFTokenizer(folder)
    reference = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert (ours.vocab_size, ours.eod) == (from_json.vocab_size, from_json.eod) == (50257, 50256)
    for name, step in (("corpus_en.jsonl", 40), ("corpus_multi.jsonl", 5)):
        lines = (test_data / name).read_text(encoding="utf-8").split("\n")[:-1:step]
        texts = [json.loads(line)["text"] for line in lines]
        # long documents cost time and tell nothing more
        texts = [text[:1500] for text in texts]
        expected = [e.ids for e in reference.encode_batch_fast(texts, add_special_tokens=False)]
        assert [ids.tolist() for ids in ours.encode_batch(texts)] == expected
        assert [ids.tolist() for ids in from_json.encode_batch(texts)] == expected
        assert [ours.decode(ids) for ids in expected] == texts


def test_gpt2_equals_transformers(test_data: Path) -> None:
    transformers = pytest.importorskip("transformers")
    folder = test_data / "tokenizers" / "gpt2"
    reference = transformers.GPT2TokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    ours = GPT2BPETokenizer(folder / "vocab.json", folder / "merges.txt")
    lines = (test_data / "corpus_multi.jsonl").read_text(encoding="utf-8").split("\n")[:-1:60]
    texts = [json.loads(line)["text"][:1000] for line in lines]
    for text in [*texts, *(text for text in ODD_TEXTS if "<|" not in text)]:
        assert ours.encode(text) == reference(text)["input_ids"]


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


@pytest.mark.parametrize("name", ["SentencePieceTokenizer", "Llama2Tokenizer"])
def test_sentencepiece_encodes_as_the_library_does(test_data: Path, name: str) -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    path = str(test_data / "tokenizers" / "mistral" / "tokenizer.model.v1")
    reference = sentencepiece.SentencePieceProcessor(model_file=path)
    tokenizer = build_tokenizer(name, path)
    assert (tokenizer.vocab_size, tokenizer.eod) == (reference.get_piece_size(), reference.eos_id())
    texts = [text for text in ODD_TEXTS if text.strip()]
    for text, ids in zip(texts, tokenizer.encode_batch(texts), strict=True):
        assert ids.tolist() == tokenizer.encode(text) == reference.encode(text)
        assert tokenizer.eod not in ids
    assert tokenizer.decode(tokenizer.encode("Hello world")) == "Hello world"


def test_null_tokenizer_reads_ids() -> None:
    tokenizer = build_tokenizer("NullTokenizer", vocab_size=100)
    assert tokenizer.encode(" 3 14\n15 ") == [3, 14, 15]
    assert tokenizer.eod == 99
    assert tokenizer.decode([3, 14]) == "3 14"
    with pytest.raises(DataError, match="id 100 is outside vocab_size=100"):
        tokenizer.encode("100")
    with pytest.raises(DataError, match="'pi'"):
        NullTokenizer(9).encode("3 pi")


@pytest.mark.parametrize("kind", [*TOKENIZER_TYPES, "Nonsense"])
def test_a_tokenizer_without_its_files_says_what_it_needs(kind: str) -> None:
    with pytest.raises(DataError, match=r"needs --|unknown; use one of GPT2BPETokenizer"):
        build_tokenizer(kind)


BAD_CONTENTS = {"missing": None, "empty": b"", "binary": b"\xff\xfe\x00", "text": b"some text", "list": b"[1, 2]"}


@pytest.mark.parametrize("content", BAD_CONTENTS)
@pytest.mark.parametrize("name", ["vocab.json", "merges.txt", "tokenizer.json", "model.model"])
def test_a_file_of_the_wrong_kind_is_named(files: Path, name: str, content: str) -> None:
    (files / "model.model").write_bytes(b"")
    bad = BAD_CONTENTS[content]
    if bad is None:
        (files / name).unlink()
    else:
        (files / name).write_bytes(bad)
    arguments = {
        "vocab.json": ("GPT2BPETokenizer", None, str(files / "vocab.json"), str(files / "merges.txt")),
        "merges.txt": ("GPT2BPETokenizer", None, str(files / "vocab.json"), str(files / "merges.txt")),
        "tokenizer.json": ("HFTokenizer", str(files), None, None),
        "model.model": ("SentencePieceTokenizer", str(files / "model.model"), None, None),
    }[name]
    with pytest.raises(DataError, match=name.replace(".", r"\.")):
        build_tokenizer(*arguments)


def test_a_vocabulary_without_all_bytes_is_refused(files: Path) -> None:
    vocab = json.loads((files / "vocab.json").read_text())
    del vocab["A"]
    (files / "vocab.json").write_text(json.dumps(vocab))
    with pytest.raises(DataError, match="lacks 1 of the 256 byte symbols, such as 'A'"):
        GPT2BPETokenizer(files / "vocab.json", files / "merges.txt")
