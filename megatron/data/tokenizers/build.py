"""Tokenizers by the names of Megatron's, and the one for text that is already token ids."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron.data.index.indexed import DataError
from megatron.data.tokenizers.base import Added, TokenBatch, Tokenizer, end_to_end, option_bytes, read_bytes
from megatron.data.tokenizers.library import GPT2BPETokenizer, HFTokenizer
from megatron.data.tokenizers.sentencepiece import SentencePieceTokenizer
from megatron.data.tokenizers.tiktoken import TikTokenizer

if TYPE_CHECKING:
    from megatron.options.config import Config  # pydantic: a third of the start of preprocess_data, which has no config


class NullTokenizer(Tokenizer):
    """Parser of ids separated by white space, for data prepared elsewhere: those of `num_ids` ids, then the eod.

    Source: megatron-core 0.17 and before. From 0.18 on, its eod is the last of the ids.
    """

    def __init__(self, num_ids: int):
        super().__init__("NullTokenizer", option_bytes("num_ids", num_ids))
        self.vocab_size = num_ids + 1
        self.eod = num_ids

    def encode_plain(self, texts: Sequence[str]) -> TokenBatch:
        return end_to_end([self._encode(text) for text in texts], np.int32)

    def _encode(self, text: str) -> NDArray[np.int32]:
        try:
            ids = np.fromiter(map(int, text.split()), dtype=np.int64)
        except (ValueError, OverflowError) as error:
            raise DataError(f"NullTokenizer reads ids separated by white space: {error}") from None
        num_ids = self.vocab_size - 1
        outside = ids[(ids < 0) | (ids >= num_ids)]
        if len(outside):
            what = ", which is the end-of-document id," if outside[0] == num_ids else ""
            raise DataError(f"id {outside[0]}{what} is outside vocab_size={num_ids}; enlarge it, or correct the text")
        return ids.astype(np.int32)

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(str(int(i)) for i in ids)

    def token_id(self, token: str) -> int | None:
        # its length first: int() refuses a text of more than 4,300 digits with an error of its own
        is_id = token.isdecimal() and len(token) <= len(str(self.vocab_size)) and int(token) < self.vocab_size
        return int(token) if is_id else None


class _Type(NamedTuple):
    """Meaning of one of Megatron's names."""

    kind: Literal["GPT2BPETokenizer", "HFTokenizer", "SentencePieceTokenizer", "TikTokenizer", "NullTokenizer"]
    prepend_bos: bool | None
    """Default of `prepend_bos`. None: what the tokenizer's own files put around a text."""
    parse_special: bool
    """Default of `parse_special_tokens`."""


TOKENIZER_TYPES = {
    "GPT2BPETokenizer": _Type("GPT2BPETokenizer", False, True),
    "HFTokenizer": _Type("HFTokenizer", None, True),
    "HuggingFaceTokenizer": _Type("HFTokenizer", None, True),
    "SentencePieceTokenizer": _Type("SentencePieceTokenizer", False, False),
    "GPTSentencePieceTokenizer": _Type("SentencePieceTokenizer", False, False),
    "Llama2Tokenizer": _Type("SentencePieceTokenizer", True, False),
    "TikTokenizer": _Type("TikTokenizer", False, True),
    "NullTokenizer": _Type("NullTokenizer", False, False),
}
"""Sources: megatron-core 0.19; Llama2Tokenizer: Megatron-LM up to core 0.16, whose class of that name prepends BOS;
HFTokenizer: Megatron-DeepSpeed. See the table in docs/guides/pretrain.md."""
MODEL_FILES = {
    "HFTokenizer": "a tokenizer.json or its folder",
    "SentencePieceTokenizer": "a SentencePiece .model",
    "TikTokenizer": "a tiktoken rank file",
}


AnyTokenizer = GPT2BPETokenizer | HFTokenizer | SentencePieceTokenizer | TikTokenizer | NullTokenizer


def build_tokenizer(
    tokenizer_type: str,
    tokenizer_model: str | None = None,
    vocab_file: str | None = None,
    merge_file: str | None = None,
    vocab_size: int | None = None,
    *,
    eod_token: str | None = None,
    prepend_bos: bool | None = None,
    parse_special_tokens: bool | None = None,
    tiktoken_pattern: str | None = None,
    tiktoken_num_special_tokens: int | None = None,
) -> Tokenizer:
    """Return the tokenizer of that type, from the files it needs. Raises DataError.

    `eod_token` (for NullTokenizer: an id) replaces the tokenizer's own end of document. With `prepend_bos`, each text
    begins with the BOS id (and ends as the tokenizer's own files say); with `parse_special_tokens`, literal special
    tokens in a document become their ids. None: as Megatron's tokenizer of that name. NullTokenizer has neither.
    """
    if tokenizer_type not in TOKENIZER_TYPES:
        raise DataError(f"tokenizer_type={tokenizer_type} is unknown; use one of {', '.join(TOKENIZER_TYPES)}")
    kind, prepends, parses = TOKENIZER_TYPES[tokenizer_type]
    if prepend_bos is not None:
        prepends = prepend_bos
    if parse_special_tokens is not None:
        parses = parse_special_tokens
    of_tiktoken = {"tiktoken_pattern": tiktoken_pattern, "tiktoken_num_special_tokens": tiktoken_num_special_tokens}
    # another tokenizer would ignore them in silence
    for name, value in of_tiktoken.items():
        if value is not None and kind != "TikTokenizer":
            raise DataError(f"{name}={value} is for TikTokenizer, not for {tokenizer_type}; leave it out")
    if kind in MODEL_FILES and not tokenizer_model:
        raise DataError(f"{tokenizer_type} needs --tokenizer-model: {MODEL_FILES[kind]}")
    model = tokenizer_model or ""
    tokenizer: AnyTokenizer
    match kind:
        case "GPT2BPETokenizer":
            tokenizer = _gpt2(vocab_file, merge_file, parses)
        case "NullTokenizer":
            tokenizer = _null(vocab_size, parses)
        case "HFTokenizer":
            tokenizer = HFTokenizer(model, parses)
        case "SentencePieceTokenizer":
            tokenizer = SentencePieceTokenizer(model, parses)
        case "TikTokenizer":
            tokenizer = TikTokenizer(model, tiktoken_pattern, parses, vocab_size, tiktoken_num_special_tokens)
    if eod_token is not None:
        tokenizer.eod = tokenizer.token_id(eod_token)
        if tokenizer.eod is None:
            raise DataError(f"eod_token {eod_token!r} is not a token of this {tokenizer_type}; name one that is")
    tokenizer.added = _added(tokenizer, tokenizer_type, prepends)
    return tokenizer


def meta_tokenizer(path: Path, eod_token: str | None) -> Tokenizer:
    """Return the tokenizer of a Llama as Meta publishes it, which begins each text with the begin of text.

    Llama 1 and 2 have a SentencePiece model under the name under which Llama 3 has tiktoken's ranks. Raises DataError.
    """
    first_line = read_bytes(path, "the tokenizer.model of a Llama")[:1000].partition(b"\n")[0]
    if re.fullmatch(rb"[A-Za-z0-9+/]+=* [0-9]+", first_line):
        kind, pattern = "TikTokenizer", "llama3"
    else:
        kind, pattern = "Llama2Tokenizer", None
    return build_tokenizer(kind, str(path), eod_token=eod_token, prepend_bos=True, tiktoken_pattern=pattern)


def _gpt2(vocab_file: str | None, merge_file: str | None, parses: bool) -> GPT2BPETokenizer:
    if not vocab_file or not merge_file:
        raise DataError("GPT2BPETokenizer needs --vocab-file and --merge-file: vocab.json and merges.txt")
    return GPT2BPETokenizer(vocab_file, merge_file, parses)


def _null(vocab_size: int | None, parses: bool) -> NullTokenizer:
    if not vocab_size or not 1 <= vocab_size < 2**31:
        raise DataError("NullTokenizer needs --vocab-size: one more than the largest id of a text, below 2^31")
    if parses:
        raise DataError("parse_special_tokens is not for NullTokenizer, which has no special tokens; leave it out")
    return NullTokenizer(vocab_size)


def tokenizer_of_run(config: Config, *, prepend_bos: bool | None = None) -> Tokenizer:
    """Return the tokenizer that a run's options name, which must not have more tokens than its model.

    `prepend_bos`: as in `build_tokenizer`. Raises DataError.
    """
    data, vocab_size = config.data, config.model.vocab_size
    tokenizer = build_tokenizer(
        data.tokenizer_type or "",
        data.tokenizer_model,
        data.vocab_file,
        data.merge_file,
        # the model's vocabulary includes the end of document, which follows NullTokenizer's
        vocab_size - (data.tokenizer_type == "NullTokenizer"),
        eod_token=data.eod_token,
        prepend_bos=prepend_bos,
        tiktoken_pattern=data.tiktoken_pattern,
        tiktoken_num_special_tokens=data.tiktoken_num_special_tokens,
    )
    # fewer are right: models pad their vocabulary
    if tokenizer.vocab_size > vocab_size:
        raise DataError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, the model vocab_size={vocab_size}; set vocab_size to "
            f"{tokenizer.vocab_size} or more"
        )
    return tokenizer


def _added(tokenizer: AnyTokenizer, tokenizer_type: str, prepends: bool | None) -> Added:
    """Return the ids around each text; None for `prepends`: those of the tokenizer's own files."""
    if prepends is False:
        return Added()
    # a BOS of the files' own is there already: a second one would be another text to the model
    if prepends is None or tokenizer.template.before:
        return tokenizer.template
    if tokenizer.bos is None:
        raise DataError(f"this {tokenizer_type} has no begin-of-text token; turn prepend_bos off")
    return Added((tokenizer.bos,), tokenizer.template.after)
