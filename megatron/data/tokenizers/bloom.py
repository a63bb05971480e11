"""BLOOM's byte-level BPE in C++, with the ids of the `tokenizers` library."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from megatron.data.extension import helpers
from megatron.data.tokenizers.base import TokenBatch

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
    return (
        plain == PRE_TOKENIZER
        and content["normalizer"] is None
        and not model.get("ignore_merges")
        and all(symbol in model["vocab"] for symbol in byte_symbols())
    )


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
    rows = [(vocab[left], vocab[right], vocab[left + right]) for left, right in content["model"]["merges"]]
    merges = np.array(rows, dtype=np.int32).reshape(-1, 3)

    def load() -> Callable[[list[str]], TokenBatch]:
        encoder = helpers.BytePairEncoder(byte_ids, merges, SEPARATORS)
        return lambda texts: TokenBatch(*encoder.encode_batch(texts))

    return load
