"""Construction of tokenizers by type."""

from __future__ import annotations

from megatron.data.indexed import DataError
from megatron.data.tokenizers.base import Tokenizer
from megatron.data.tokenizers.library import GPT2BPETokenizer, HFTokenizer
from megatron.data.tokenizers.null import NullTokenizer
from megatron.data.tokenizers.sentencepiece import SentencePieceTokenizer
from megatron.data.tokenizers.tiktoken import TikTokenizer

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
    """Return the tokenizer of that type, from the files it needs. Raises DataError.

    `eod_token` (for NullTokenizer: an id) replaces the tokenizer's own end of document. With `parse_special_tokens`,
    literal special tokens in a document become their ids; NullTokenizer has none.
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
            raise DataError(f"eod_token {eod_token!r} is not a token of this {tokenizer_type}; name one that is")
    return tokenizer
