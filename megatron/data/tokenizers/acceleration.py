"""Acceleration of tokenizers: the same ids many times faster, or a refusal.

BLOOM's byte-level BPE is our own, in C++. gigatoken 0.10 reimplements the tokenizers of other libraries, and gives
their ids for the kinds accepted here. Those for which it was found to silently give other ids are refused by name.
`check_equal` compares ids on the caller's text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson
from numpy.typing import NDArray

from megatron.data.extension import helpers
from megatron.data.tokenizers.base import TokenBatch, Tokenizer, any_of, refusal
from megatron.data.tokenizers.library import LibraryTokenizer
from megatron.data.tokenizers.sentencepiece import SentencePieceTokenizer
from megatron.data.tokenizers.tiktoken import TikTokenizer

if TYPE_CHECKING:
    import gigatoken

_PUNCTUATION = ".,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c"
_WHITE_SPACE = "\t\n\v\f\r \x85\xa0\u1680" + "".join(map(chr, range(0x2000, 0x200B))) + "\u2028\u2029\u202f\u205f\u3000"

PRE_TOKENIZER = [
    {
        "type": "Split",
        "pattern": {"Regex": rf" ?[^(\s|[{_PUNCTUATION}])]+"},
        "behavior": "Isolated",
        "invert": False,
    },
    {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
]
"""The steps of BLOOM's pre-tokenizer in tokenizer.json, apart from `trim_offsets`, which does not change ids."""

# the library reads the brackets within the brackets as one set, so ( | ) are in it too
SEPARATORS = "(|)" + _PUNCTUATION + _WHITE_SPACE
"""Characters outside words."""


def is_bloom(content: dict[str, Any]) -> bool:
    """Return True if a tokenizer.json has BLOOM's pre-tokenizer, no normalizer, and a BPE that BytePairEncoder has.

    Dropout and affixes of the model are the caller's to refuse.
    """
    steps = (content["pre_tokenizer"] or {}).get("pretokenizers", [])
    plain = [{name: value for name, value in step.items() if name != "trim_offsets"} for step in steps]
    model = content["model"]
    # ignore_merges: a whole word of the vocabulary is one token whatever the merges say, and ours has merges alone
    if plain != PRE_TOKENIZER or content["normalizer"] is not None or model.get("ignore_merges"):
        return False
    return model["vocab"].keys() >= {*byte_symbols()}


def byte_symbols() -> list[str]:
    """Return the character that stands for each byte in a byte-level vocabulary.

    Printable characters of Latin-1 stand for themselves, the next ones from U+0100 for the other bytes, in order.
    """
    from tokenizers import pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    printable = {symbol for symbol in alphabet if ord(symbol) < 256}
    others = iter(alphabet[len(printable) :])
    return [chr(byte) if chr(byte) in printable else next(others) for byte in range(256)]


def load_bloom(content: dict[str, Any]) -> Callable[[], Callable[[list[str]], TokenBatch]]:
    """Return a maker of encoders, each for one thread, of the tokenizer.json of a tokenizer that `is_bloom`."""
    vocab = content["model"]["vocab"]
    byte_ids = np.array([vocab[symbol] for symbol in byte_symbols()], dtype=np.int32)
    # [merges, 3] ids of left, right and result; the number of the row is the rank of the merge
    rows = [(vocab[left], vocab[right], vocab[left + right]) for left, right in content["model"]["merges"]]
    merges = np.array(rows, dtype=np.int32).reshape(-1, 3)

    def load() -> Callable[[list[str]], TokenBatch]:
        encoder = helpers.BytePairEncoder(byte_ids, merges, SEPARATORS)
        return lambda texts: TokenBatch(*encoder.encode_batch(texts))

    return load


# ours -> gigatoken's. Llama 3's pattern is GPT-4's but for white space at the very end of a text, where no vocabulary
# made with either has a token that could show it.
TIKTOKEN_PATTERNS = {"r50k": "gpt2", "cl100k": "gpt4", "llama3": "gpt4", "o200k": "o200k"}

# Letters and digits of Unicode 17, which gigatoken 0.10 cuts as such; tokenizers 0.23 and tiktoken 0.14 do not yet.
_NEW_IN_BMP = "\u088f\u0c5c\u0cdc\ua7ce\ua7cf\ua7d2\ua7d4\ua7f1"
UNICODE_17 = _NEW_IN_BMP + (
    "\U00010940-\U00010959 \U00010ec5-\U00010ec7 \U00011db0-\U00011ddb \U00011de0-\U00011de9 "
    "\U00016ea0-\U00016eb8 \U00016ebb-\U00016ed3 \U00016ff2-\U00016ff6 "
    "\U000187f8-\U000187ff \U00018d09-\U00018d1e \U00018d80-\U00018df2 \U0001e6c0-\U0001e6ff \U0002b73a-\U0002b73f "
    "\U0002cea2-\U0002cead \U000323b0-\U00033479"
).replace(" ", "")
_NEW_CHARACTER = re.compile(f"[{UNICODE_17}]")
# first bytes in UTF-8 of its characters beyond the BMP; emoji have others
_NEAR_BYTES = re.compile(b"\xf0[\x90-\x9e\xab-\xb3]")

BATCH_BYTES = 8 << 20
SENTENCEPIECE_BATCH_BYTES = 16 << 20
"""Larger, because its cache lasts for one batch."""

SHOWN_IDS = 8
SHOWN_CHARACTERS = 60


Encoder = Callable[[list[str]], TokenBatch]
"""Encoder of texts, for one thread at a time."""


class NotAccelerated(Exception):
    """The tokenizer keeps its own library, for the reason in this one-line message."""


class AcceleratedTokenizer(Tokenizer):
    """A tokenizer that encodes many times faster. All else is the reference's."""

    def __init__(
        self,
        reference: Tokenizer,
        load: Callable[[], Encoder],
        apart: Callable[[str], object] | None = None,
        batch_bytes: int = BATCH_BYTES,
    ):
        """`load` creates the fast encoder. The reference encodes texts for which `apart` returns a true value."""
        # without the base's, which makes an identity: it is that of the reference
        self._reference = reference
        self.vocab_size, self.eod, self.bos = reference.vocab_size, reference.eod, reference.bos
        self.template, self.added = reference.template, reference.added
        self._load = load
        self._apart = apart
        self.batch_bytes = batch_bytes
        # One for each thread that encodes at the same time, since they would wait for each other at its cache. pop and
        # append of a list are atomic.
        self._idle = [load()]

    @property
    def special_ids(self) -> frozenset[int]:
        return self._reference.special_ids

    @property
    def identity(self) -> dict[str, Any]:
        return self._reference.identity

    def encode_plain(self, texts: Sequence[str]) -> TokenBatch:
        left: list[int] = []
        if self._apart is not None:
            left = [i for i, text in enumerate(texts) if self._apart(text)]
        if not left:
            return self._encode(list(texts))
        # these texts are encoded as empty ones, and the reference's ids inserted
        rest = list(texts)
        for i in left:
            rest[i] = ""
        ids, lengths = self._encode(rest)
        left_ids, left_lengths = self._reference.encode_plain([texts[i] for i in left])
        # neighbours that are both empty share an offset, at which np.insert keeps their order
        starts = np.cumsum(lengths) - lengths
        ids = np.insert(ids, np.repeat(starts[left], left_lengths), left_ids)
        lengths[left] = left_lengths
        return TokenBatch(ids, lengths)

    def _encode(self, texts: list[str]) -> TokenBatch:
        try:
            inner = self._idle.pop()
        except IndexError:
            inner = self._load()
        try:
            return inner(texts)
        except Exception as error:  # TypeError for an unpaired surrogate
            raise refusal(texts, error) from error
        finally:
            self._idle.append(inner)

    def token_id(self, token: str) -> int | None:
        return self._reference.token_id(token)

    def decode(self, ids: Sequence[int]) -> str:
        return self._reference.decode(ids)


def accelerate(tokenizer: Tokenizer) -> AcceleratedTokenizer:
    """Return an equivalent of `tokenizer` that encodes faster. Raises NotAccelerated with the reason."""
    content = {}
    if isinstance(tokenizer, LibraryTokenizer):
        content = _library_json(tokenizer)
        if is_bloom(content):
            special = any_of([token["content"] for token in content["added_tokens"]])
            return AcceleratedTokenizer(tokenizer, load_bloom(content), special.search if special else None)
    try:
        import gigatoken._load.sentencepiece  # noqa: F401  its version may lack this part
    except ImportError as error:
        raise NotAccelerated(f"gigatoken cannot be used ({error}); pip install gigatoken") from None
    try:
        if isinstance(tokenizer, LibraryTokenizer):
            return _of_library(tokenizer, content)
        if isinstance(tokenizer, SentencePieceTokenizer):
            return _of_sentencepiece(tokenizer)
        if isinstance(tokenizer, TikTokenizer):
            return _of_tiktoken(tokenizer)
    except NotAccelerated:
        raise
    except Exception as error:  # gigatoken raises RuntimeError, ValueError and what its parsers raise
        raise NotAccelerated(
            f"gigatoken refuses the model: {' '.join(str(error).split('Location:')[0].split())}"
        ) from None
    raise NotAccelerated(f"gigatoken has no {type(tokenizer).__name__}")


def _of_library(tokenizer: LibraryTokenizer, content: dict[str, Any]) -> AcceleratedTokenizer:
    import gigatoken

    _check_for_gigatoken(content)
    # what was checked, not the file: added tokens that stay text are left out
    text = orjson.dumps(content).decode()
    load = _loads(lambda: gigatoken.Tokenizer.from_json(text))
    return AcceleratedTokenizer(tokenizer, load, has_unicode_17_character)


def _of_sentencepiece(tokenizer: SentencePieceTokenizer) -> AcceleratedTokenizer:
    import gigatoken
    from gigatoken._load.sentencepiece import sentencepiece_to_tokenizer_json

    text, apart = _sentencepiece_json(tokenizer, json.loads(sentencepiece_to_tokenizer_json(tokenizer.model_proto)))
    load = _loads(lambda: gigatoken.Tokenizer.from_json(text))
    return AcceleratedTokenizer(tokenizer, load, apart.search if apart else None, SENTENCEPIECE_BATCH_BYTES)


def _of_tiktoken(tokenizer: TikTokenizer) -> AcceleratedTokenizer:
    import gigatoken

    pattern = TIKTOKEN_PATTERNS.get(tokenizer.pattern)
    if pattern is None:
        raise NotAccelerated(f"gigatoken has no pattern {tokenizer.pattern}")
    load = _loads(lambda: gigatoken.Tokenizer.from_tiktoken(tokenizer.path, pattern, tokenizer.special_tokens))
    return AcceleratedTokenizer(tokenizer, load, has_unicode_17_character)


def _loads(create: Callable[[], gigatoken.Tokenizer]) -> Callable[[], Encoder]:
    """Return a maker of encoders that use gigatoken's tokenizers, which `create` creates."""

    def load() -> Encoder:
        inner = create()

        def encode(texts: list[str]) -> TokenBatch:
            # in this thread: callers have their own threads
            rows = inner.encode_batch(texts, parallel=False)
            # [texts + 1] into the ids of all texts; nothing is copied
            offsets: NDArray[np.int64] = rows.layout.offsets.data
            return TokenBatch(rows.layout.content.data, np.diff(offsets))

        return encode

    return load


def has_unicode_17_character(text: str) -> bool:
    """Return True if the text holds one of UNICODE_17."""
    if text.isascii():
        return False
    if any(character in text for character in _NEW_IN_BMP):
        return True
    # a search by _NEW_CHARACTER alone takes longer than encoding. Only a text with a character beyond the BMP takes 4
    # bytes a character; its size says so from 64 characters on
    if len(text) >= 64 and text.__sizeof__() < 3 * len(text) + 80:
        return False
    near = _NEAR_BYTES.search(text.encode("utf-8", "surrogatepass"))
    return near is not None and _NEW_CHARACTER.search(text) is not None


def _library_json(tokenizer: LibraryTokenizer) -> dict[str, Any]:
    """Return the tokenizer.json, of special tokens only those to be parsed. Raises NotAccelerated."""
    content: dict[str, Any] = orjson.loads(tokenizer.to_json())
    if not tokenizer.parse_special_tokens:
        # as the library's encode_special_tokens: special tokens are text then, and other added tokens still tokens
        content["added_tokens"] = [token for token in content["added_tokens"] if not token["special"]]
    model = content["model"]
    if model["type"] != "BPE":
        raise NotAccelerated(f"gigatoken has no {model['type']} models")
    for name in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(name):
            raise NotAccelerated(f"gigatoken ignores the model's {name}={model[name]!r}")
    return content


def _check_for_gigatoken(content: dict[str, Any]) -> None:
    for token in content["added_tokens"]:
        for name in ("single_word", "rstrip"):
            if token[name]:
                raise NotAccelerated(f"gigatoken ignores {name} of the added token {token['content']!r}")
        if token["normalized"] and content["normalizer"]:
            raise NotAccelerated(f"gigatoken looks for the added token {token['content']!r} before normalizing")
    if not content["model"].get("byte_fallback"):
        _check_pre_tokenizer(content["pre_tokenizer"])


def _check_pre_tokenizer(pre_tokenizer: dict[str, Any] | None) -> None:
    """Accept pre-tokenizers that gigatoken implements for byte-level models; it mistakes some others for these."""
    if pre_tokenizer is None:
        raise NotAccelerated("gigatoken needs a pre-tokenizer")
    if pre_tokenizer["type"] == "ByteLevel":
        if not pre_tokenizer["use_regex"]:
            raise NotAccelerated("gigatoken always cuts ByteLevel text into words; this model does not")
        return
    steps = pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    *splits, last = steps
    if last["type"] != "ByteLevel" or last["add_prefix_space"] or any(step["type"] != "Split" for step in splits):
        raise NotAccelerated(f"gigatoken has no pre-tokenizer of {' + '.join(step['type'] for step in steps)}")
    for step in splits:
        # of a pattern that covers any text, both leave its matches
        if (step["behavior"], step["invert"]) not in (("Isolated", False), ("Removed", True)):
            raise NotAccelerated(f"gigatoken ignores the behavior={step['behavior']} of the pre-tokenizer's Split")


def _sentencepiece_json(
    tokenizer: SentencePieceTokenizer, content: dict[str, Any]
) -> tuple[str, re.Pattern[str] | None]:
    """Return the tokenizer.json for gigatoken, and a pattern of texts that it must not encode.

    The pattern includes user-defined pieces: gigatoken puts a space before the text after one.
    """
    steps = content["normalizer"]["normalizers"]
    if any(step["type"] in ("Precompiled", "Strip") for step in steps):
        raise NotAccelerated("gigatoken gives other ids than SentencePiece with this normalizer; identity is safe")
    defined = [token["content"] for token in content["added_tokens"] if not token["special"]]
    if any("\u2581" in piece for piece in defined):
        raise NotAccelerated("gigatoken misses user-defined pieces with a space in them")
    unused, reserved = tokenizer.pieces_beyond_text()
    if unused:
        raise NotAccelerated(f"gigatoken uses pieces that the model marks as unused, such as {unused[0]!r}")
    # `</` and `s>` may both be pieces, but text never becomes the control piece
    barred = set(reserved)
    content["model"]["merges"] = [pair for pair in content["model"]["merges"] if "".join(pair) not in barred]
    content["added_tokens"] = []
    return json.dumps(content), any_of([*defined, *tokenizer.special_tokens])


def check_equal(fast: Tokenizer, reference: Tokenizer, texts: Sequence[str]) -> None:
    """Raise NotAccelerated, naming the text, unless both give the same ids for all `texts`.

    The reference's own errors are raised as they are.
    """
    expected = reference.encode_batch(texts)
    try:
        actual = fast.encode_batch(texts)
    except Exception as error:
        raise NotAccelerated(f"the accelerated tokenizer refuses text that the reference encodes: {error}") from error
    # lengths too: the same ids, shifted to the next text, are another result
    if np.array_equal(actual.lengths, expected.lengths) and np.array_equal(actual.ids, expected.ids):
        return
    for text, ours, theirs in zip(texts, _rows_of(actual), _rows_of(expected), strict=True):
        if not np.array_equal(ours, theirs):
            raise NotAccelerated(_difference(text, ours.tolist(), theirs.tolist()))
    raise AssertionError("batches differ, no text does")


def _rows_of(batch: TokenBatch) -> list[NDArray[Any]]:
    """Return the ids of each text."""
    return np.split(batch.ids, np.cumsum(batch.lengths)[:-1])


def _difference(text: str, ours: list[int], theirs: list[int]) -> str:
    pairs = enumerate(zip(ours, theirs, strict=False))
    same = next((k for k, (our, their) in pairs if our != their), min(len(ours), len(theirs)))
    shown = repr(text[:SHOWN_CHARACTERS]) + ("..." if len(text) > SHOWN_CHARACTERS else "")
    return (
        f"ids of the text {shown} differ from token {same} on: {ours[same : same + SHOWN_IDS]}, "
        f"where the reference gives {theirs[same : same + SHOWN_IDS]}"
    )
