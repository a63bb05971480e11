"""tiktoken rank files."""

from __future__ import annotations

import base64
import binascii
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron.data.index.indexed import DataError
from megatron.data.tokenizers import base


class TiktokenScheme(NamedTuple):
    """Properties of an encoding that its rank file does not contain."""

    num_ranks: int
    """Ranks of the published file, which identify the scheme if none is named."""
    pattern: str
    """Pattern that cuts text into separately encoded stretches."""
    special_tokens: dict[str, int]
    """Special tokens: ids as offsets from the number of ranks."""
    eod: str


# GPT-4's, which Llama 3 shares but for the end
_WORDS_AND_NUMBERS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_LLAMA3_NAMED = {0: "begin_of_text", 1: "end_of_text", 4: "finetune_right_pad_id", 6: "start_header_id"}
_LLAMA3_NAMED |= {7: "end_header_id", 8: "eom_id", 9: "eot_id", 10: "python_tag"}


def _llama3_special_tokens() -> dict[str, int]:
    """Return the 256 special tokens of Llama 3.1 and later. In Llama 3 four of them were reserved and unused."""
    reserved = (f"reserved_special_token_{i}" for i in itertools.count())
    return {f"<|{_LLAMA3_NAMED.get(i) or next(reserved)}|>": i for i in range(256)}


# Sources: tiktoken_ext/openai_public.py of tiktoken 0.14; Llama 3.1's tokenizer.py and tokenizer.json.
TIKTOKEN_SCHEMES = {
    "r50k": TiktokenScheme(
        50256,
        r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
        {base.END_OF_TEXT: 0},
        base.END_OF_TEXT,
    ),
    "cl100k": TiktokenScheme(
        100256,
        # white space at the very end is one stretch, line breaks included
        rf"{_CONTRACTIONS}|{_WORDS_AND_NUMBERS}|\s++$|\s*[\r\n]+|\s+(?!\S)|\s+",
        {base.END_OF_TEXT: 1, "<|fim_prefix|>": 2, "<|fim_middle|>": 3, "<|fim_suffix|>": 4, "<|endofprompt|>": 20},
        base.END_OF_TEXT,
    ),
    "o200k": TiktokenScheme(
        199998,
        "|".join(
            [
                rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+{_CONTRACTIONS}?",
                rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*{_CONTRACTIONS}?",
                r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
            ]
        ),
        {base.END_OF_TEXT: 1, "<|endofprompt|>": 20},
        base.END_OF_TEXT,
    ),
    "llama3": TiktokenScheme(
        128000,
        rf"{_CONTRACTIONS}|{_WORDS_AND_NUMBERS}|\s*[\r\n]+|\s+(?!\S)|\s+",
        _llama3_special_tokens(),
        "<|end_of_text|>",
    ),
}


# Source: megatron-core 0.19, core/tokenizers/text/libraries/tiktoken_tokenizer.py; the same since 0.15.
MEGATRON_PATTERNS = {
    "v1": r"[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    "v2": rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}
"""Patterns of Megatron's JSON vocabularies."""
MEGATRON_SPECIAL_TOKENS = ("<unk>", "<s>", "</s>", "<mask>", "<pad>", "<cls>", "<sep>")
MEGATRON_VOCAB_SIZE, MEGATRON_NUM_SPECIAL_TOKENS = 1 << 17, 1000


class TikTokenizer(base.Tokenizer):
    """A tiktoken rank file, or the JSON vocabulary of Megatron's TikTokenizer. Raises DataError.

    A rank file (.tiktoken, Llama 3's tokenizer.model) has a token in base64 and its rank a line. The pattern and the
    special tokens are not in it. `tiktoken_pattern`, one of TIKTOKEN_SCHEMES, names them; without it, the number of
    ranks decides.

    A JSON vocabulary (.json) is a list of {"rank", "token_bytes", "token_str"}. `num_special_tokens` ids come first:
    MEGATRON_SPECIAL_TOKENS, then <SPECIAL_7> and so on. Then come as many tokens of the file as `vocab_size` leaves
    room for. `tiktoken_pattern` is v1 or v2, by default v2.
    """

    def __init__(
        self,
        path: str | Path,
        tiktoken_pattern: str | None = None,
        parse_special_tokens: bool = False,
        vocab_size: int | None = None,
        num_special_tokens: int | None = None,
    ) -> None:
        import tiktoken

        self.path = Path(path)
        content = base.read_bytes(self.path, "a tiktoken rank file")
        bos: int | None
        if self.path.suffix == ".json":
            size, num_special = vocab_size or MEGATRON_VOCAB_SIZE, num_special_tokens or MEGATRON_NUM_SPECIAL_TOKENS
            ranks, specials = _megatron_vocabulary(self.path, content, size, num_special)
            self.pattern, pattern = _megatron_pattern(self.path, tiktoken_pattern)
            eod, bos = specials["</s>"], specials["<s>"]
        else:
            if num_special_tokens is not None:
                raise DataError(
                    f"tiktoken_num_special_tokens={num_special_tokens} is for a JSON vocabulary, not for {self.path}; "
                    "leave it out"
                )
            ranks = _parse_ranks(self.path, content)
            self.pattern = _scheme_name(self.path, len(ranks), tiktoken_pattern)
            scheme = TIKTOKEN_SCHEMES[self.pattern]
            pattern = scheme.pattern
            # offsets, since a file of another size may be named as of a scheme
            specials = {token: len(ranks) + offset for token, offset in scheme.special_tokens.items()}
            eod, bos = specials[scheme.eod], specials.get("<|begin_of_text|>")
        options = (
            base.option_bytes("tiktoken_pattern", self.pattern),
            base.option_bytes("parse_special_tokens", parse_special_tokens),
            base.option_bytes("num_special_tokens", len(specials)),
        )
        super().__init__("TikTokenizer", content, *options)
        self._inner = tiktoken.Encoding(self.path.name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=specials)
        self.special_tokens = specials if parse_special_tokens else {}
        """Tokens that are parsed in text."""
        self.vocab_size: int = self._inner.max_token_value + 1
        self.eod, self.bos = eod, bos

    def encode_plain(self, texts: Sequence[str]) -> base.TokenBatch:
        return base.end_to_end([self._encode(text) for text in texts], np.uint32)

    def _encode(self, text: str) -> NDArray[np.uint32]:
        try:
            # other methods silently replace unpaired surrogates
            # disallowed_special=(): by default tiktoken raises for a literal special token in a text
            return self._inner.encode_to_numpy(
                text, allowed_special="all" if self.special_tokens else set(), disallowed_special=()
            )
        except (UnicodeEncodeError, TypeError, ValueError) as error:
            raise base.refusal([text], error) from error

    def decode(self, ids: Sequence[int]) -> str:
        try:
            return self._inner.decode([int(i) for i in ids])
        except (KeyError, OverflowError):
            raise base.unknown_id(ids, self.vocab_size) from None

    @property
    def special_ids(self) -> frozenset[int]:
        return super().special_ids.union(map(self._inner.encode_single_token, self._inner.special_tokens_set))

    def token_id(self, token: str) -> int | None:
        try:
            return self._inner.encode_single_token(token)
        except KeyError:
            return None


def _megatron_pattern(path: Path, name: str | None) -> tuple[str, str]:
    """Return name and pattern."""
    if name not in (None, *MEGATRON_PATTERNS):
        raise DataError(f"tiktoken_pattern={name} is for rank files, but {path} is a JSON vocabulary; use v1 or v2")
    return name or "v2", MEGATRON_PATTERNS[name or "v2"]


def _megatron_vocabulary(
    path: Path, content: bytes, vocab_size: int, num_special: int
) -> tuple[dict[bytes, int], dict[str, int]]:
    """Return the ids of the tokens and of the special tokens in a JSON vocabulary of Megatron's TikTokenizer."""
    what = "a list of objects with rank, token_bytes and token_str"
    entries = base.parse_json(path, content, what)
    if not len(MEGATRON_SPECIAL_TOKENS) <= num_special < vocab_size:
        raise DataError(
            f"tiktoken_num_special_tokens={num_special} must be at least {len(MEGATRON_SPECIAL_TOKENS)} and below "
            f"vocab_size={vocab_size}; change one of them"
        )
    if not isinstance(entries, list) or len(entries) < vocab_size - num_special:
        what_it_has = f"{len(entries)} tokens" if isinstance(entries, list) else "no list of tokens"
        raise DataError(
            f"{path} has {what_it_has}; vocab_size={vocab_size} with {num_special} special tokens takes "
            f"{vocab_size - num_special}. Give a smaller vocab_size, or {what}"
        )
    ranks: dict[bytes, int] = {}
    for number, entry in enumerate(entries[: vocab_size - num_special]):
        try:
            token = base64.b64decode(entry["token_bytes"], validate=True)
            is_next = entry["rank"] == number and token not in ranks and (number >= 256 or token == bytes([number]))
        except (TypeError, KeyError, ValueError):
            is_next = False
        if not is_next:
            raise DataError(
                f"{path}: entry {number} is {str(entry)[:80]}; ranks count up from 0, the first 256 are the bytes, and "
                "no token is there twice"
            )
        ranks[token] = num_special + number
    fillers = (f"<SPECIAL_{number}>" for number in range(len(MEGATRON_SPECIAL_TOKENS), num_special))
    return ranks, {token: number for number, token in enumerate([*MEGATRON_SPECIAL_TOKENS, *fillers])}


def _parse_ranks(path: Path, content: bytes) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(content.split(b"\n"), start=1):
        if not line.strip():
            continue
        shown = line[:60].decode("utf-8", "replace")
        fields = line.split()
        if len(fields) != 2 or not fields[1].isdigit():
            raise DataError(
                f"{path}:{number}: {shown!r} is not a token in base64 and its rank; give a tiktoken rank file"
                f"{base.looks_like(content, 'a tiktoken rank file')}"
            )
        try:
            token = base64.b64decode(fields[0], validate=True)
        except binascii.Error as error:
            raise DataError(
                f"{path}:{number}: {shown!r} does not begin with base64 ({error}); give a tiktoken rank file"
                f"{base.looks_like(content, 'a tiktoken rank file')}"
            ) from None
        if token in ranks:
            raise DataError(f"{path}:{number}: token {token!r} has rank {ranks[token]} already; the file is damaged")
        if int(fields[1]) != len(ranks):
            raise DataError(
                f"{path}:{number}: rank {int(fields[1])} where {len(ranks)} is due; ranks count up from 0 without gaps"
            )
        ranks[token] = len(ranks)
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise DataError(
            f"{path} ends at line {number} and lacks {len(missing)} of the 256 single bytes, such as "
            f"0x{missing[0]:02X}; the file is cut short, or not a byte-level vocabulary"
        )
    return ranks


def _scheme_name(path: Path, num_ranks: int, name: str | None) -> str:
    choices = ", ".join(f"{known} (of {scheme.num_ranks} ranks)" for known, scheme in TIKTOKEN_SCHEMES.items())
    # before the general message: this name is known, and the file is of the other form
    if name in MEGATRON_PATTERNS:
        raise DataError(
            f"tiktoken_pattern={name} is for JSON vocabularies, but {path} is a rank file; use one of {choices}"
        )
    if name is not None:
        if name not in TIKTOKEN_SCHEMES:
            raise DataError(f"tiktoken_pattern={name} is unknown; use one of {choices}")
        return name
    for known, scheme in TIKTOKEN_SCHEMES.items():
        if scheme.num_ranks == num_ranks:
            return known
    raise DataError(
        f"{path} has {num_ranks} ranks, which identify no known pattern; name it with tiktoken_pattern, one of "
        f"{choices}"
    )
