"""Raw documents as samples of one length (pretraining_config): continual pretraining by fine-tuning."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import orjson
from numpy.typing import NDArray

from megatron.data.chat.template import named_tokens, read_config
from megatron.data.indexed import DataError, best_dtype
from megatron.data.indexed_builder import IndexedDatasetBuilder

BATCH_DOCUMENTS = 1000
TOKENIZER_NAME = "tokenizer.json"


def write_blocks(
    data_path: Path, model: Path, tokens_prefix: Path, mask_prefix: Path, block_size: int, column: str
) -> tuple[int, int]:
    """Write blocks of tokens, the last one shorter, and masks of ones. Returns the numbers of documents and token ids.

    A document begins with what the tokenizer puts first, and ends with its EOS token. Raises DataError.
    """
    import tokenizers

    path = model / TOKENIZER_NAME
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise DataError(f"{path} is not a tokenizer ({error}); model_path must hold the model's own") from None
    eos = tokenizer.token_to_id(named_tokens(read_config(model)).get("eos_token", ""))
    if eos is None:
        raise DataError(f"the tokenizer in {model} has no EOS token; name it in tokenizer_config.json")
    vocab_size = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
    dtype = best_dtype(vocab_size)
    num_documents, left = 0, np.empty(0, dtype)
    with (
        IndexedDatasetBuilder(tokens_prefix, dtype) as tokens,
        IndexedDatasetBuilder(mask_prefix, np.uint8) as mask,
    ):

        def add(block: NDArray[np.integer]) -> None:
            tokens.add_document(block)
            mask.add_document(np.ones(len(block), np.uint8))

        texts = _texts(data_path, column)
        while batch := list(itertools.islice(texts, BATCH_DOCUMENTS)):
            ids = [encoding.ids for encoding in tokenizer.encode_batch(batch, add_special_tokens=True)]
            ended = (one if one and one[-1] == eos else [*one, eos] for one in ids)
            left = np.concatenate([left, np.fromiter(itertools.chain.from_iterable(ended), dtype)])
            whole = len(left) // block_size * block_size
            for start in range(0, whole, block_size):
                add(left[start : start + block_size])
            left = left[whole:]
            num_documents += len(batch)
        if len(left) > 1:  # a single token predicts nothing
            add(left)
        if not tokens.num_tokens:
            raise DataError(f"{data_path} holds no documents under {column!r}")
        mask.finalize()
        tokens.finalize()
    return num_documents, vocab_size


def _texts(data_path: Path, column: str) -> Iterator[str]:
    """Yield the texts that are not empty. Raises DataError that names the line."""
    with data_path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                text = orjson.loads(line)[column]
            except (ValueError, KeyError, TypeError):
                text = None
            if not isinstance(text, str):
                raise DataError(f"{data_path}, line {number} is not an object with a text under {column!r}; correct it")
            if text:
                yield text
