"""Text of ids as they arrive: equal to decoding all at once, whole characters only, ended by stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from megatron.data.tokenizers.base import Tokenizer
from megatron.data.tokenizers.build import build_tokenizer
from megatron.generation.options import GenerationOptions
from megatron.generation.text import REPLACEMENT, GeneratedText, TextDecoder

TEXT = " The café 東京 costs 5 € 👩‍👩‍👧 — naïve\n\n  indented\tİstanbul नमस्ते"


def byte_fallback(folder: Path) -> Tokenizer:
    """A tokenizer.json of sentencepiece's kind: words with a mark for the space, bytes for all else."""
    import tokenizers
    from tokenizers import decoders, models, normalizers

    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2, **{f"<0x{byte:02X}>": 3 + byte for byte in range(256)}}
    vocab |= {letter: 259 + place for place, letter in enumerate("▁abcdefghijklmnopqrstuvwxyzTIé")}
    inner = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    inner.add_special_tokens(["<s>", "</s>"])
    inner.save(str(folder / "tokenizer.json"))
    return build_tokenizer("HFTokenizer", str(folder))


def byte_level(folder: Path) -> Tokenizer:
    """A byte-level BPE without merges: each id is a byte."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = tokenizers.Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(["<|endoftext|>"])
    inner.save(str(folder / "tokenizer.json"))
    return build_tokenizer("HFTokenizer", str(folder))


@pytest.fixture(params=[byte_fallback, byte_level])
def tokenizer(request: pytest.FixtureRequest, tmp_path: Path) -> Tokenizer:
    made: Tokenizer = request.param(tmp_path)
    return made


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode_plain([text]).ids.tolist()
    return ids


def pieces(tokenizer: Tokenizer, prompt: Sequence[int], ids: Sequence[int]) -> list[str]:
    decoder = TextDecoder(tokenizer, prompt)
    return [*(decoder.add(token) for token in ids), decoder.finish()]


def check_decoding(tokenizer: Tokenizer, text: str) -> None:
    """The same text from every place on, and never a part of a character."""
    ids = ids_of(tokenizer, text)
    whole = tokenizer.decode(ids)
    begins = [begin for begin in range(len(ids)) if whole.startswith(tokenizer.decode(ids[:begin]))]
    for begin in begins[:: 1 + len(begins) // 6]:
        found = "".join(pieces(tokenizer, ids[:begin], ids[begin:]))
        assert tokenizer.decode(ids[:begin]) + found == whole
        assert REPLACEMENT not in found


def test_characters_come_whole(tokenizer: Tokenizer) -> None:
    check_decoding(tokenizer, TEXT)
    check_decoding(tokenizer, TEXT * 4)


@pytest.mark.parametrize(
    ("kind", "file"),
    [
        ("HFTokenizer", "gpt2/tokenizer.json"),
        ("HFTokenizer", "bloom_format_trained/tokenizer.json"),
        ("SentencePieceTokenizer", "mistral/tokenizer.model.v1"),
        ("TikTokenizer", "tiktoken/cl100k_base.tiktoken"),
    ],
)
def test_characters_come_whole_from_real_tokenizers(kind: str, file: str, test_data: Path) -> None:
    check_decoding(build_tokenizer(kind, str(test_data / "tokenizers" / file)), TEXT)


def test_bytes_that_are_no_character_appear_at_the_end(tokenizer: Tokenizer) -> None:
    ids = ids_of(tokenizer, "aé")
    found = pieces(tokenizer, [], [*ids_of(tokenizer, "a"), ids_of(tokenizer, "€")[-1]])
    assert "".join(found).strip().rstrip(REPLACEMENT) == "a"
    assert found[-1]
    assert ids


def test_special_tokens_and_unknown_ids_are_left_out(tokenizer: Tokenizer) -> None:
    eod = tokenizer.eod
    assert eod is not None
    ids = [*ids_of(tokenizer, "ab"), eod, tokenizer.vocab_size + 5, *ids_of(tokenizer, "c")]
    assert "".join(pieces(tokenizer, [], ids)).replace(" ", "") == "abc"
    decoder = TextDecoder(tokenizer, keep_special=True)
    assert tokenizer.decode([eod]) in "".join([decoder.add(token) for token in ids])


def generated(tokenizer: Tokenizer, text: str, **options: Any) -> tuple[list[str], bool]:
    """Pieces of text as they are printed, and whether a stop string ended it."""
    made = GeneratedText(tokenizer, ids_of(tokenizer, "x"), GenerationOptions(**options))
    found = []
    for token in ids_of(tokenizer, text):
        found.append(made.add(token))
        if made.is_stopped:
            break
    return [*found, made.finish()], made.is_stopped


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        (("END",), " one é two "),
        (("nothing",), " one é two END three EN"),
        (("three", " two EN"), " one é"),
        (("é",), " one "),
        (("EN!", "EN"), " one é two "),
    ],
)
def test_a_stop_string_ends_the_text_before_it(tokenizer: Tokenizer, stop: tuple[str, ...], expected: str) -> None:
    found, is_stopped = generated(tokenizer, " one é two END three EN", stop=stop)
    assert "".join(found).strip() == expected.strip()
    assert is_stopped == (stop != ("nothing",))
    held = "".join(found[:-1])
    assert not any(held.endswith(string[:size]) for string in stop for size in range(1, len(string)))


def test_stop_strings_wait_for_the_minimum(tokenizer: Tokenizer) -> None:
    found, is_stopped = generated(tokenizer, "ab cccc ab", stop=("ab",), min_new_tokens=4)
    assert is_stopped
    assert "".join(found).strip() == "ab cccc"


@pytest.mark.parametrize(
    ("text", "stop", "minimum", "expected"),
    [
        ("xyabc z", ("yab",), 3, "x"),  # begun before the minimum, ended after it
        ("xyabc z", ("ya", "yab"), 4, "x"),  # the shorter one ended before it
        ("xyabc z", ("ab", "xyabc"), 5, ""),  # a stop string within the beginning of another one does not count
        ("xyabc z", ("yab",), 6, "xyabc z"),
    ],
)
def test_a_stop_string_that_ends_after_the_minimum_counts(
    tokenizer: Tokenizer, text: str, stop: tuple[str, ...], minimum: int, expected: str
) -> None:
    # the marker of a space is a token of its own, which a tokenizer of sentencepiece's kind puts first
    space = len(ids_of(tokenizer, "x")) - 1
    found, _ = generated(tokenizer, text, stop=stop, min_new_tokens=minimum + space)
    assert "".join(found).strip() == expected
