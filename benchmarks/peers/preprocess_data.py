"""The usual way from JSONL to a dataset: worker processes that tokenize line by line, one that writes.

A Pool whose workers each build the tokenizer, `imap` over the lines, `json.loads` and `encode` in the workers,
megatron-core's IndexedDatasetBuilder in the main process. Runs in an interpreter with megatron-core in it and without
this project (see benchmarks/alternating.py), so it imports nothing of ours.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import warnings
from typing import Any

CHUNK_LINES = 32

tokenizer: Any = None
eod = -1


def start_worker(kind: str, files: list[str]) -> None:
    """Builds the worker's tokenizer from vocab.json and merges.txt, a tokenizer.json, or a SentencePiece model."""
    global tokenizer, eod
    if kind == "gpt2":
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers

        tokenizer = Tokenizer(models.BPE.from_file(files[0], files[1]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        eod = tokenizer.token_to_id("<|endoftext|>")
    elif kind == "bloom":
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(files[0])
        eod = tokenizer.token_to_id("</s>")
    else:
        import sentencepiece

        tokenizer = sentencepiece.SentencePieceProcessor(model_file=files[0])
        eod = tokenizer.eos_id()


def vocabulary_size(kind: str) -> int:
    return int(tokenizer.get_piece_size() if kind == "sentencepiece" else tokenizer.get_vocab_size())


def encode_bpe(line: str) -> list[int]:
    ids: list[int] = tokenizer.encode(json.loads(line)["text"]).ids
    return [*ids, eod] if ids else ids


def encode_sentencepiece(line: str) -> list[int]:
    ids: list[int] = tokenizer.encode(json.loads(line)["text"])
    return [*ids, eod] if ids else ids


def main() -> None:
    parser = argparse.ArgumentParser(description="Tokenize JSONL with a pool of workers.")
    parser.add_argument("--input", required=True)
    parser.add_argument("--output-prefix", required=True)
    parser.add_argument("--tokenizer", choices=("gpt2", "bloom", "sentencepiece"), required=True)
    parser.add_argument("--files", nargs="+", required=True, help="vocab.json merges.txt, tokenizer.json, or .model")
    parser.add_argument("--workers", type=int, required=True)
    options = parser.parse_args()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of optional packages that the builder does not use
        from megatron.core.datasets import indexed_dataset

    start_worker(options.tokenizer, options.files)
    prefix = f"{options.output_prefix}_text_document"
    dtype = indexed_dataset.DType.optimal_dtype(vocabulary_size(options.tokenizer))
    builder = indexed_dataset.IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    encode = encode_sentencepiece if options.tokenizer == "sentencepiece" else encode_bpe
    arguments = (options.tokenizer, options.files)
    with (
        open(options.input, encoding="utf-8") as lines,
        multiprocessing.Pool(options.workers, initializer=start_worker, initargs=arguments) as pool,
    ):
        for ids in pool.imap(encode, lines, CHUNK_LINES):
            if ids:
                builder.add_document(ids, [len(ids)])
    builder.finalize(f"{prefix}.idx")


if __name__ == "__main__":
    main()
