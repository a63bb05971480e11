"""Text to token ids and back, behind one face and under the names Megatron's users know.

Documents are plain text: a literal `<|endoftext|>` in one is encoded as those thirteen characters, never as the
special id, unless `parse_special_tokens` is asked for. No beginning- or end-of-text ids are added; the end-of-document
id is the caller's to append.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import itertools
import json
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from megatron.data.indexed import DataError

if TYPE_CHECKING:
    import tokenizers

END_OF_TEXT = "<|endoftext|>"
KNOWN_EOD_TOKENS = (END_OF_TEXT, "<|end_of_text|>", "</s>")


class TokenBatch(NamedTuple):
    """Documents as token ids, end to end."""

    ids: NDArray[Any]
    """Ids of all documents in their order, 32-bit integers, signed or not."""
    lengths: NDArray[np.int64]
    """Tokens of each document."""


class Tokenizer(Protocol):
    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""

    @property
    def eod(self) -> int | None:
        """Id that ends a document. None: the tokenizer has none."""

    @property
    def identity(self) -> dict[str, Any]:
        """What decides the ids, for JSON: `type`, `vocab_size`, `eod`, and the `sha256` of its files and options.

        Where they lie and under which alias they were asked for makes no difference.
        """

    @property
    def batch_bytes(self) -> int | None:
        """How much text at once encode_batch is fast with. None: it makes no difference."""

    def encode(self, text: str) -> list[int]:
        """Raises DataError for a text that cannot be encoded, such as one with a lone surrogate."""

    def encode_batch(self, texts: Sequence[str]) -> TokenBatch:
        """All of them, or DataError if any cannot be encoded. Several threads may call it at once."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text. Bytes that are no UTF-8 become U+FFFD; ids outside the vocabulary are left out, or a DataError."""


class _Identified:
    """What all tokenizers share: who they are, and which id ends a document."""

    vocab_size: int
    eod: int | None
    batch_bytes: int | None = None

    def __init__(self, kind: str, *contents: bytes):
        digest = hashlib.sha256(kind.encode())
        for content in contents:
            # lengths keep neighbours apart
            digest.update(len(content).to_bytes(8, "little") + content)
        self._kind = kind
        self._sha256 = digest.hexdigest()

    @property
    def identity(self) -> dict[str, Any]:
        return {"type": self._kind, "vocab_size": self.vocab_size, "eod": self.eod, "sha256": self._sha256}


def _option(name: str, value: object) -> bytes:
    return f"{name}={value}".encode()


def _end_to_end(documents: Sequence[NDArray[Any]], dtype: type[np.integer[Any]]) -> TokenBatch:
    lengths = np.fromiter(map(len, documents), dtype=np.int64, count=len(documents))
    return TokenBatch(np.concatenate(documents) if documents else np.empty(0, dtype), lengths)


def refusal(texts: Sequence[str], error: Exception) -> DataError:
    """Why the library refused one of the texts. Lone surrogates are what it cannot say clearly itself."""
    for text in texts:
        place = re.search("[\ud800-\udfff]", text)
        if place:
            return DataError(
                f"character {place.start()} of the text is the lone surrogate U+{ord(place[0]):04X}, which is half a "
                "character; correct the text, or leave it out"
            )
    return DataError(f"the text cannot be encoded: {error}")


class LibraryTokenizer(_Identified):
    """What GPT2BPETokenizer and HFTokenizer share: the `tokenizers` library does the work."""

    def __init__(self, kind: str, contents: Sequence[bytes], inner: tokenizers.Tokenizer, eod: int | None, parse: bool):
        super().__init__(kind, *contents, _option("parse_special_tokens", parse))
        inner.encode_special_tokens = not parse  # the library's word for taking them as text
        self._inner = inner
        self.parse_special_tokens = parse
        self.eod = eod
        self.vocab_size = 1 + max(inner.get_vocab(with_added_tokens=True).values())

    def encode(self, text: str) -> list[int]:
        try:
            ids: list[int] = self._inner.encode(text, add_special_tokens=False).ids
        except Exception as error:  # the library raises plain Exception, or TypeError
            raise refusal([text], error) from error
        return ids

    def encode_batch(self, texts: Sequence[str]) -> TokenBatch:
        try:
            # the fast variant leaves out character offsets; ids are the same
            encodings = self._inner.encode_batch_fast(list(texts), add_special_tokens=False)
        except Exception as error:  # the library raises plain Exception, or TypeError
            raise refusal(texts, error) from error
        return _end_to_end([np.array(encoding.ids, dtype=np.int32) for encoding in encodings], np.int32)

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._inner.decode([int(i) for i in ids], skip_special_tokens=False)
        return text

    def token_id(self, token: str) -> int | None:
        found: int | None = self._inner.token_to_id(token)
        return found

    def to_json(self) -> str:
        """The tokenizer.json of it."""
        content: str = self._inner.to_str()
        return content


class GPT2BPETokenizer(LibraryTokenizer):
    """GPT-2's byte-level BPE from vocab.json and merges.txt. Raises DataError."""

    def __init__(self, vocab_file: str | Path, merge_file: str | Path, parse_special_tokens: bool = False):
        import tokenizers
        from tokenizers import decoders, models, pre_tokenizers

        vocab_content = _read_bytes(Path(vocab_file), "a vocab.json, an object of token: id")
        merge_content = _read_bytes(Path(merge_file), "a merges.txt")
        vocab = _parse_vocab(Path(vocab_file), vocab_content)
        merges = _parse_merges(Path(merge_file), merge_content)
        # without all of them some text would silently vanish
        missing = sorted(set(pre_tokenizers.ByteLevel.alphabet()) - vocab.keys())
        if missing:
            raise DataError(
                f"{vocab_file} lacks {len(missing)} of the 256 byte symbols, such as {missing[0]!r}; it is no "
                "byte-level BPE vocabulary, use the vocab.json that belongs to the merges"
            )
        try:
            inner = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
        except Exception as error:  # the library raises plain Exception
            raise DataError(
                f"{merge_file} does not fit {vocab_file}: {error}; use two files of the same tokenizer"
                f"{_looks_like(merge_content, 'a merges.txt')}"
            ) from error
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        inner.decoder = decoders.ByteLevel()
        if parse_special_tokens and END_OF_TEXT in vocab:
            inner.add_special_tokens([END_OF_TEXT])
        contents = (vocab_content, merge_content)
        super().__init__("GPT2BPETokenizer", contents, inner, vocab.get(END_OF_TEXT), parse_special_tokens)


def _parse_vocab(path: Path, content: bytes) -> dict[str, int]:
    vocab = _parse_json(path, content, "a vocab.json, an object of token: id")
    if not isinstance(vocab, dict) or not vocab or not all(type(i) is int and i >= 0 for i in vocab.values()):
        raise DataError(
            f"{path} is no vocab.json; it must be a JSON object of token: id{_looks_like(content, 'a vocab.json')}"
        )
    return vocab


def _parse_merges(path: Path, content: bytes) -> list[tuple[str, str]]:
    merges = []
    for number, line in enumerate(_text(path, content, "a merges.txt").split("\n"), start=1):
        if not line.strip() or (number == 1 and line.startswith("#version")):
            continue
        pair = line.rstrip("\r").split(" ")
        if len(pair) != 2:
            raise DataError(
                f"{path}:{number}: {line[:80]!r} is no pair of tokens; give a merges.txt"
                f"{_looks_like(content, 'a merges.txt')}"
            )
        merges.append((pair[0], pair[1]))
    return merges


class HFTokenizer(LibraryTokenizer):
    """A tokenizer.json, or the folder that holds one. Raises DataError.

    eod is `eos_token` of the tokenizer_config.json beside it, else the first of KNOWN_EOD_TOKENS that it knows.
    """

    def __init__(self, path: str | Path, parse_special_tokens: bool = False):
        import tokenizers

        file = Path(path) / "tokenizer.json" if Path(path).is_dir() else Path(path)
        content = _read_bytes(file, "a tokenizer.json, or the folder that holds one")
        try:
            inner = tokenizers.Tokenizer.from_str(_text(file, content, "a tokenizer.json"))
        except DataError:
            raise
        except Exception as error:  # the library raises plain Exception
            raise DataError(
                f"{file} is no tokenizer.json ({error}); give the file of that name, or its folder"
                f"{_looks_like(content, 'a tokenizer.json')}"
            ) from error
        inner.no_truncation()
        inner.no_padding()
        eod = _eod_of(inner, file.with_name("tokenizer_config.json"))
        super().__init__("HFTokenizer", (content,), inner, eod, parse_special_tokens)


def _eod_of(inner: tokenizers.Tokenizer, config_path: Path) -> int | None:
    if config_path.is_file():
        what = "a tokenizer_config.json"
        config = _parse_json(config_path, _read_bytes(config_path, what), what)
        name = config.get("eos_token") if isinstance(config, dict) else None
        name = name.get("content") if isinstance(name, dict) else name
        if isinstance(name, str):
            named: int | None = inner.token_to_id(name)
            if named is None:
                raise DataError(
                    f"{config_path} names eos_token {name!r}, which the tokenizer.json beside it does not know; "
                    "use two files of the same tokenizer"
                )
            return named
    known = (inner.token_to_id(name) for name in KNOWN_EOD_TOKENS)
    return next((i for i in known if i is not None), None)


class SentencePieceTokenizer(_Identified):
    """A SentencePiece .model. Raises DataError.

    The library never takes text for a control piece such as `</s>`. Where they are to be parsed, the text is cut at
    them, and each stretch between two is encoded as a text of its own, as Megatron does: with the model's space before.
    """

    def __init__(self, path: str | Path, parse_special_tokens: bool = False):
        import sentencepiece

        self.model_proto = _read_bytes(Path(path), "a SentencePiece model")
        super().__init__(
            "SentencePieceTokenizer", self.model_proto, _option("parse_special_tokens", parse_special_tokens)
        )
        try:
            self._inner = sentencepiece.SentencePieceProcessor(model_proto=self.model_proto)
        except Exception as error:  # RuntimeError, or what protobuf raises
            hint = _looks_like(self.model_proto, "a SentencePiece model")
            raise DataError(f"{path} is no SentencePiece model, or not all of one; give a .model file{hint}") from error
        self.vocab_size: int = self._inner.get_piece_size()
        eos: int = self._inner.eos_id()
        self.eod = None if eos < 0 else eos
        control = {self._inner.id_to_piece(i): i for i in range(self.vocab_size) if self._inner.is_control(i)}
        self.special_tokens: dict[str, int] = control if parse_special_tokens else {}
        """Pieces that are taken for themselves where a text holds them."""
        self._special = any_of(self.special_tokens)

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._encode(text).tolist()
        return ids

    def encode_batch(self, texts: Sequence[str]) -> TokenBatch:
        if self._special is not None:
            return _end_to_end([self._encode(text) for text in texts], np.int32)
        try:
            documents = self._inner.encode(list(texts), out_type="numpy", num_threads=1)
        except Exception as error:  # RuntimeError or TypeError
            raise refusal(texts, error) from error
        return _end_to_end(documents, np.int32)

    def _encode(self, text: str) -> NDArray[np.int32]:
        try:
            if self._special is None:
                return self._inner.encode(text, out_type="numpy")
            # stretches of text at even places, control pieces at odd ones
            stretches = self._special.split(text)
            ids = self._inner.encode(stretches[::2], out_type="numpy", num_threads=1)
        except Exception as error:  # RuntimeError or TypeError
            raise refusal([text], error) from error
        parsed = [np.array([self.special_tokens[piece]], dtype=np.int32) for piece in stretches[1::2]]
        both = itertools.zip_longest(ids, parsed, fillvalue=np.empty(0, dtype=np.int32))
        return np.concatenate(list(itertools.chain.from_iterable(both)))

    def decode(self, ids: Sequence[int]) -> str:
        try:
            text: str = self._inner.decode([int(i) for i in ids])
        except IndexError:
            raise _unknown_id(ids, self.vocab_size) from None
        return text

    def token_id(self, token: str) -> int | None:
        # an unknown piece has the id of <unk>
        found: int = self._inner.piece_to_id(token)
        return found if self._inner.id_to_piece(found) == token else None

    def pieces_beyond_text(self) -> tuple[list[str], list[str]]:
        """Pieces that no text becomes: those marked as unused; and the control, unknown and byte pieces."""
        inner, ids = self._inner, range(self.vocab_size)
        unused = [inner.id_to_piece(i) for i in ids if inner.is_unused(i)]
        reserved = [inner.id_to_piece(i) for i in ids if inner.is_control(i) or inner.is_unknown(i) or inner.is_byte(i)]
        return unused, reserved


def any_of(words: Collection[str]) -> re.Pattern[str] | None:
    """Finds, as its only group, the longest of the words that starts earliest. None: there are no words."""
    longest_first = sorted((word for word in words if word), key=len, reverse=True)
    return re.compile(f"({'|'.join(map(re.escape, longest_first))})") if longest_first else None


# ---------------------------------------------------------------------------------------------------------------------
# tiktoken


class TiktokenScheme(NamedTuple):
    """What belongs to a rank file without being in it."""

    num_ranks: int
    """Ranks of the published file, which tell the scheme where none is named."""
    pattern: str
    """Cuts text into the stretches that are encoded apart."""
    special_tokens: dict[str, int]
    """Special tokens, as offsets from the number of ranks."""
    eod: str


# GPT-4's, which Llama 3 shares, with another end
_WORDS_AND_NUMBERS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_LLAMA3_NAMED = {0: "begin_of_text", 1: "end_of_text", 4: "finetune_right_pad_id", 6: "start_header_id"}
_LLAMA3_NAMED |= {7: "end_header_id", 8: "eom_id", 9: "eot_id", 10: "python_tag"}


def _llama3_special_tokens() -> dict[str, int]:
    """The 256 of Llama 3.1 and later. Llama 3 called four of them, which it did not use, reserved tokens too."""
    reserved = (f"reserved_special_token_{i}" for i in itertools.count())
    return {f"<|{_LLAMA3_NAMED.get(i) or next(reserved)}|>": i for i in range(256)}


# Sources: tiktoken_ext/openai_public.py of tiktoken 0.14; Llama 3.1's tokenizer.py and tokenizer.json.
TIKTOKEN_SCHEMES = {
    "r50k": TiktokenScheme(
        50256,
        r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
        {END_OF_TEXT: 0},
        END_OF_TEXT,
    ),
    "cl100k": TiktokenScheme(
        100256,
        # white space at the very end is one stretch, line breaks included
        rf"{_CONTRACTIONS}|{_WORDS_AND_NUMBERS}|\s++$|\s*[\r\n]+|\s+(?!\S)|\s+",
        {END_OF_TEXT: 1, "<|fim_prefix|>": 2, "<|fim_middle|>": 3, "<|fim_suffix|>": 4, "<|endofprompt|>": 20},
        END_OF_TEXT,
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
        {END_OF_TEXT: 1, "<|endofprompt|>": 20},
        END_OF_TEXT,
    ),
    "llama3": TiktokenScheme(
        128000,
        rf"{_CONTRACTIONS}|{_WORDS_AND_NUMBERS}|\s*[\r\n]+|\s+(?!\S)|\s+",
        _llama3_special_tokens(),
        "<|end_of_text|>",
    ),
}


class TikTokenizer(_Identified):
    """A tiktoken rank file: lines of a token in base64 and its rank, as .tiktoken or Llama 3's tokenizer.model.

    The pattern and the special tokens are not in the file. `tiktoken_pattern`, one of TIKTOKEN_SCHEMES, names them;
    without it, the number of ranks tells. Raises DataError.
    """

    def __init__(
        self, path: str | Path, tiktoken_pattern: str | None = None, parse_special_tokens: bool = False
    ) -> None:
        import tiktoken

        self.path = Path(path)
        content = _read_bytes(self.path, "a tiktoken rank file")
        ranks = _parse_ranks(self.path, content)
        self.pattern = _scheme_name(self.path, len(ranks), tiktoken_pattern)
        options = _option("tiktoken_pattern", self.pattern), _option("parse_special_tokens", parse_special_tokens)
        super().__init__("TikTokenizer", content, *options)
        scheme = TIKTOKEN_SCHEMES[self.pattern]
        specials = {token: len(ranks) + offset for token, offset in scheme.special_tokens.items()}
        self._inner = tiktoken.Encoding(
            self.path.name, pat_str=scheme.pattern, mergeable_ranks=ranks, special_tokens=specials
        )
        self.special_tokens = specials if parse_special_tokens else {}
        """Tokens that are taken for themselves where a text holds them."""
        self.vocab_size: int = self._inner.max_token_value + 1
        self.eod = specials[scheme.eod]

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._encode(text).tolist()
        return ids

    def encode_batch(self, texts: Sequence[str]) -> TokenBatch:
        return _end_to_end([self._encode(text) for text in texts], np.uint32)

    def _encode(self, text: str) -> NDArray[np.uint32]:
        try:
            # this method, since the others replace lone surrogates without a word
            return self._inner.encode_to_numpy(
                text, allowed_special="all" if self.special_tokens else set(), disallowed_special=()
            )
        except (UnicodeEncodeError, TypeError, ValueError) as error:
            raise refusal([text], error) from error

    def decode(self, ids: Sequence[int]) -> str:
        try:
            return self._inner.decode([int(i) for i in ids])
        except (KeyError, OverflowError):
            raise _unknown_id(ids, self.vocab_size) from None

    def token_id(self, token: str) -> int | None:
        try:
            return self._inner.encode_single_token(token)
        except KeyError:
            return None


def _parse_ranks(path: Path, content: bytes) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(content.split(b"\n"), start=1):
        if not line.strip():
            continue
        shown = line[:60].decode("utf-8", "replace")
        fields = line.split()
        if len(fields) != 2 or not fields[1].isdigit():
            raise DataError(
                f"{path}:{number}: {shown!r} is no token in base64 and its rank; give a tiktoken rank file"
                f"{_looks_like(content, 'a tiktoken rank file')}"
            )
        try:
            token = base64.b64decode(fields[0], validate=True)
        except binascii.Error as error:
            raise DataError(
                f"{path}:{number}: {shown!r} does not begin with base64 ({error}); give a tiktoken rank file"
                f"{_looks_like(content, 'a tiktoken rank file')}"
            ) from None
        if token in ranks:
            raise DataError(f"{path}:{number}: token {token!r} has rank {ranks[token]} already; the file is damaged")
        if int(fields[1]) != len(ranks):
            raise DataError(
                f"{path}:{number}: rank {int(fields[1])} where {len(ranks)} is due; ranks count up from 0 without gap"
            )
        ranks[token] = len(ranks)
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise DataError(
            f"{path} ends at line {number} and lacks {len(missing)} of the 256 single bytes, such as "
            f"0x{missing[0]:02X}; the file is cut short, or no byte-level vocabulary"
        )
    return ranks


def _scheme_name(path: Path, num_ranks: int, name: str | None) -> str:
    choices = ", ".join(f"{known} (of {scheme.num_ranks} ranks)" for known, scheme in TIKTOKEN_SCHEMES.items())
    if name is not None:
        if name not in TIKTOKEN_SCHEMES:
            raise DataError(f"tiktoken_pattern={name} is unknown; use one of {choices}")
        return name
    for known, scheme in TIKTOKEN_SCHEMES.items():
        if scheme.num_ranks == num_ranks:
            return known
    raise DataError(
        f"{path} has {num_ranks} ranks, which tells no pattern to cut text by; name it with tiktoken_pattern, one of "
        f"{choices}"
    )


# ---------------------------------------------------------------------------------------------------------------------


class NullTokenizer(_Identified):
    """Text that is already ids, apart by white space: for data prepared elsewhere. eod is the last id."""

    def __init__(self, vocab_size: int):
        super().__init__("NullTokenizer", _option("vocab_size", vocab_size))
        self.vocab_size = vocab_size
        self.eod = vocab_size - 1

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._encode(text).tolist()
        return ids

    def encode_batch(self, texts: Sequence[str]) -> TokenBatch:
        return _end_to_end([self._encode(text) for text in texts], np.int32)

    def _encode(self, text: str) -> NDArray[np.int32]:
        try:
            ids = np.fromiter(map(int, text.split()), dtype=np.int64)
        except (ValueError, OverflowError) as error:
            raise DataError(f"NullTokenizer reads ids apart by white space: {error}") from None
        outside = ids[(ids < 0) | (ids >= self.vocab_size)]
        if len(outside):
            raise DataError(f"id {outside[0]} is outside vocab_size={self.vocab_size}; enlarge it, or correct the text")
        return ids.astype(np.int32)

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(str(int(i)) for i in ids)

    def token_id(self, token: str) -> int | None:
        is_id = token.isdecimal() and len(token) <= len(str(self.vocab_size)) and int(token) < self.vocab_size
        return int(token) if is_id else None


ALIASES = {"HuggingFaceTokenizer": "HFTokenizer", "Llama2Tokenizer": "SentencePieceTokenizer"}
TOKENIZER_TYPES = (
    "GPT2BPETokenizer",
    "HFTokenizer",
    "SentencePieceTokenizer",
    "TikTokenizer",
    "NullTokenizer",
    *ALIASES,
)
MODEL_FILES = {
    "HFTokenizer": "a tokenizer.json or its folder",
    "SentencePieceTokenizer": "a SentencePiece .model",
    "TikTokenizer": "a tiktoken rank file",
}


def build_tokenizer(
    tokenizer_type: str,
    tokenizer_model: str | None = None,
    vocab_file: str | None = None,
    merge_file: str | None = None,
    vocab_size: int | None = None,
    *,
    eod_token: str | None = None,
    parse_special_tokens: bool = False,
    tiktoken_pattern: str | None = None,
) -> Tokenizer:
    """The tokenizer of that name, from the files it needs. Raises DataError.

    `eod_token` (for NullTokenizer: an id) takes the place of the end of document that the tokenizer itself knows. With
    `parse_special_tokens`, literal special tokens in a document become their ids; NullTokenizer has none.
    """
    kind = ALIASES.get(tokenizer_type, tokenizer_type)
    if kind not in TOKENIZER_TYPES:
        raise DataError(f"tokenizer_type={tokenizer_type} is unknown; use one of {', '.join(TOKENIZER_TYPES)}")
    if tiktoken_pattern is not None and kind != "TikTokenizer":
        raise DataError(
            f"tiktoken_pattern={tiktoken_pattern} is for TikTokenizer, not for {tokenizer_type}; leave it out"
        )
    tokenizer: GPT2BPETokenizer | HFTokenizer | SentencePieceTokenizer | TikTokenizer | NullTokenizer
    if kind == "GPT2BPETokenizer":
        if not (vocab_file and merge_file):
            raise DataError("GPT2BPETokenizer needs --vocab-file and --merge-file: vocab.json and merges.txt")
        tokenizer = GPT2BPETokenizer(vocab_file, merge_file, parse_special_tokens)
    elif kind == "NullTokenizer":
        if not vocab_size or not 1 <= vocab_size <= 2**31:
            raise DataError("NullTokenizer needs --vocab-size: one more than the largest id, at most 2^31")
        tokenizer = NullTokenizer(vocab_size)
    elif not tokenizer_model:
        raise DataError(f"{tokenizer_type} needs --tokenizer-model: {MODEL_FILES[kind]}")
    elif kind == "HFTokenizer":
        tokenizer = HFTokenizer(tokenizer_model, parse_special_tokens)
    elif kind == "SentencePieceTokenizer":
        tokenizer = SentencePieceTokenizer(tokenizer_model, parse_special_tokens)
    else:
        tokenizer = TikTokenizer(tokenizer_model, tiktoken_pattern, parse_special_tokens)
    if eod_token is not None:
        tokenizer.eod = tokenizer.token_id(eod_token)
        if tokenizer.eod is None:
            raise DataError(f"eod_token {eod_token!r} is no token of this {tokenizer_type}; name one that is")
    return tokenizer


def _unknown_id(ids: Sequence[int], vocab_size: int) -> DataError:
    outside = next((int(i) for i in ids if not 0 <= int(i) < vocab_size), None)
    # tiktoken's published vocabularies have gaps before their special tokens
    what = "one of the ids is no token's" if outside is None else f"id {outside} is outside vocab_size={vocab_size}"
    return DataError(f"{what}; decode with the tokenizer that the ids are of")


# ---------------------------------------------------------------------------------------------------------------------
# Files

# Content of the files that people give for one another, and what each is.
_KINDS: tuple[tuple[bytes, str], ...] = (
    (rb"version https://git-lfs", "a Git LFS pointer: the file itself was not downloaded (git lfs pull)"),
    (rb"\s*<(!doctype|html|\?xml)", "a web page, not the file that the link should give"),
    (rb"[A-Za-z0-9+/]+=* \d+\r?\n", "a tiktoken rank file (TikTokenizer)"),
    (rb"#version", "a merges.txt (GPT2BPETokenizer)"),
    (rb'\s*\{\s*"version"', "a tokenizer.json (HFTokenizer)"),
    (rb'\s*\{\s*"[^"]*":\s*\d+\s*,', "a vocab.json (GPT2BPETokenizer, with its merges.txt)"),
    (rb"\n.\n", "a SentencePiece model (SentencePieceTokenizer)"),
    (rb"PK\x03\x04|\x1f\x8b", "an archive; unpack it"),
)


def _looks_like(content: bytes, wanted: str) -> str:
    """A sentence that says what a file seems to be that is not `wanted`; empty where nothing is known."""
    known = (kind for start, kind in _KINDS if re.match(start, content[:1000], re.IGNORECASE | re.DOTALL))
    found = next((kind for kind in known if not kind.startswith(wanted)), None)
    return f". It looks like {found}" if found else ""


def _read_bytes(path: Path, what: str) -> bytes:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}); give {what}") from error
    if not content:
        raise DataError(f"{path} is empty; give {what}")
    return content


def _text(path: Path, content: bytes, what: str) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        hint = _looks_like(content, what)
        raise DataError(f"{path} is no UTF-8 text (byte {error.start}); give {what}{hint}") from None


def _parse_json(path: Path, content: bytes, what: str) -> Any:
    try:
        return json.loads(_text(path, content, what))
    except (json.JSONDecodeError, RecursionError) as error:
        raise DataError(f"{path} is no JSON ({error}); give {what}{_looks_like(content, what)}") from None
