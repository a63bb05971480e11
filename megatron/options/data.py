"""Options of the dataset and the tokenizer, and the syntax of data paths and splits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from pydantic.dataclasses import dataclass

from megatron.options.types import STRICT, NonNegative, Positive, TokenizerType

LARGEST_BLEND = 2**15 - 1
"""Maximum number of datasets in a blend: the index stores a dataset's number in 16 bits."""
DOCUMENT_ENDS = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")
"""Options that need to know where documents end."""


@dataclass(frozen=True, config=STRICT)
class DataConfig:
    """Datasets, tokenizer and validation."""

    data_path: tuple[str, ...] = ()
    """Prefix of an indexed dataset (`PREFIX.bin`, `PREFIX.idx`), or a blend: WEIGHT PREFIX WEIGHT PREFIX ..., or
    prefixes alone, which are mixed in proportion to their size and read once, for one epoch."""
    blend_weights: Literal["samples", "documents"] = "samples"
    """Meaning of the weights of data_path, train_data_path and the others: shares of samples, and so of tokens, as
    Megatron's; or of documents, such as their numbers: each weight is multiplied by the mean length of its dataset's
    documents."""
    split: str = "969,30,1"
    """Proportions of data_path's documents for training, validation and test. Separate paths (train_data_path) are not
    split."""
    train_data_path: tuple[str, ...] = ()
    """Separate training data, in the syntax of data_path, which it replaces."""
    valid_data_path: tuple[str, ...] = ()
    """Validation data, with train_data_path. Unset: none."""
    test_data_path: tuple[str, ...] = ()
    """Test data, with train_data_path. Unset: none."""
    data_cache_path: str | None = None
    """Folder for the index arrays. Unset: `cache/` beside the dataset."""
    tokenizer_type: TokenizerType | None = None
    """Kind of tokenizer, if one is needed (eod_mask_loss, reset_*)."""
    tokenizer_model: str | None = None
    """Tokenizer file: a tokenizer.json, its folder or its name on the hub; a SentencePiece model; a tiktoken rank
    file."""
    vocab_file: str | None = None
    """GPT2BPETokenizer: vocab.json."""
    merge_file: str | None = None
    """GPT2BPETokenizer: merges.txt."""
    tiktoken_pattern: Literal["r50k", "cl100k", "o200k", "llama3", "v1", "v2"] | None = None
    """TikTokenizer: pattern and special tokens of the rank file. Unset: derived from its number of ranks. `v1`, `v2`:
    of Megatron's JSON vocabulary, for which unset is v2."""
    tiktoken_num_special_tokens: Positive | None = None
    """TikTokenizer: number of ids before those of the text in Megatron's JSON vocabulary. Unset: 1000."""
    eod_token: str | None = None
    """Token that ends a document, such as `<|endoftext|>`. Unset: the tokenizer's."""
    eod_token_id: NonNegative | None = None
    """Id that ends a document. Unset: that of eod_token, or the tokenizer's."""
    reset_position_ids: bool = False
    """Restart the position count after each end of document."""
    reset_attention_mask: bool = False
    """Restrict attention to the token's own document."""
    eod_mask_loss: bool = False
    """Exclude the prediction that follows an end-of-document token from the loss."""
    num_workers: NonNegative = 1
    """Number of threads that prefetch data. 0: read in the training thread."""
    eval_interval: Positive = 1000
    """Steps between two validations."""
    eval_iters: NonNegative = 10
    """Global batches per validation. 0: no validation."""
    eval_graphs: bool = False
    """HPU in lazy mode: replay the forward passes of validations as HPU graphs, one for each shape, whose memory stays
    allocated."""
    multiple_validation_sets: bool = False
    """Evaluate each dataset of the validation and test data by itself, over eval_iters global batches of its own. The
    loss of the validation is their mean by the weights of the path, without weights by what their losses are divided
    by, such as tokens."""

    @property
    def per_split(self) -> bool:
        """True if training, validation and test have separate paths."""
        return bool(self.train_data_path or self.valid_data_path or self.test_data_path)

    @property
    def paths(self) -> list[tuple[str, tuple[str, ...]]]:
        """(option that names the data, its words) for training, validation and test."""
        if not self.per_split:
            return [("data_path", self.data_path)] * 3
        return [
            ("train_data_path", self.train_data_path),
            ("valid_data_path", self.valid_data_path),
            ("test_data_path", self.test_data_path),
        ]

    @property
    def has_weights(self) -> bool:
        """True if a path has weights. Raises ValueError if one is malformed."""
        return any(words and parse_data_path(words)[1] is not None for _, words in self.paths)

    @property
    def num_held_out_sets(self) -> int:
        """Datasets of the longer one of the validation and test paths. Raises ValueError if a path is malformed."""
        # [1:]: without the training data
        return max(len(parse_data_path(words)[0]) if words else 0 for _, words in self.paths[1:])

    @property
    def prefixes(self) -> list[str]:
        """Every dataset that the paths name, without duplicates. Raises ValueError if a path is malformed."""
        return list(dict.fromkeys(prefix for _, words in self.paths if words for prefix in parse_data_path(words)[0]))


def parse_data_path(words: Sequence[str]) -> tuple[list[str], list[float] | None]:
    """Return prefixes and weights; the weights are None for prefixes alone. Raises ValueError that states the rule."""
    prefixes, weights = list(words), None
    # a single word is a prefix even if it reads as a number
    are_prefixes = len(words) == 1 or all(_number(word) is None for word in words)
    if not words or not are_prefixes:
        # 0 for what is not a number: the next line refuses both alike
        prefixes, weights = list(words[1::2]), [_number(word) or 0.0 for word in words[::2]]
        # a comparison with NaN is false, so that is refused too
        if not words or len(words) % 2 or not all(0 < weight < math.inf for weight in weights):
            raise ValueError("must be one prefix, prefixes alone, or WEIGHT PREFIX pairs with weights above 0")
    if len(prefixes) > LARGEST_BLEND:
        raise ValueError(f"names {len(prefixes)} datasets; a blend has at most {LARGEST_BLEND}, merge some of them")
    return prefixes, weights


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None


def parse_split(text: str) -> tuple[float, float, float]:
    """Return the three proportions of '949,50,1', summing to 1. Raises ValueError."""
    # Megatron takes both separators, and fills a shorter list up with zeros
    parts = [float(part) for part in text.replace("/", ",").split(",")]
    if not 1 <= len(parts) <= 3 or not all(0 <= part < math.inf for part in parts) or sum(parts) == 0:
        raise ValueError(text)
    train, valid, test = [*parts, 0.0, 0.0][:3]
    total = train + valid + test
    return train / total, valid / total, test / total
