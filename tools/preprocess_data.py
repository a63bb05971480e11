#!/usr/bin/env python3
"""Text to an indexed dataset: PREFIX_KEY_document.bin and .idx, ready for --data-path PREFIX_KEY_document.

    python tools/preprocess_data.py --input corpus.jsonl --output-prefix data/corpus \\
        --tokenizer-type GPT2BPETokenizer --vocab-file vocab.json --merge-file merges.txt --append-eod --workers 4

Threads parse and encode blocks of documents while the main thread writes them in order; a bounded number is on the way,
so memory does not grow with the input. The files get their names only when all of them are whole.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # runs from any folder, installed or not

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from megatron.data.documents import Block, Fault, OnBadLine
    from megatron.data.indexed import IndexedDatasetBuilder
    from megatron.data.tokenizer import Tokenizer

A = TypeVar("A")
B = TypeVar("B")

BLOCKS_AHEAD = 2
"""Blocks read beyond those being encoded."""
SHOWN_FAULTS = 10


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Tokenize text into PREFIX_KEY_document.bin and .idx, Megatron's indexed format.",
        allow_abbrev=False,
    )
    source = parser.add_argument_group("input")
    source.add_argument(
        "--input",
        nargs="+",
        required=True,
        metavar="PATH",
        help="files, folders or globs; .jsonl and .json hold a JSON object a line, a .txt file is one document",
    )
    source.add_argument(
        "--text-files",
        metavar="PATTERN",
        help="files of this name, such as '*.py', are one document of text each; folders are searched for these alone",
    )
    source.add_argument(
        "--json-keys",
        nargs="+",
        default=["text"],
        metavar="KEY",
        help="keys to extract, a dataset each (default: text)",
    )
    source.add_argument(
        "--on-bad-line",
        choices=("fail", "skip"),
        default="fail",
        help="what to do with a document that cannot be used (default: fail)",
    )
    tokenizer = parser.add_argument_group("tokenizer")
    tokenizer.add_argument(
        "--tokenizer-type",
        required=True,
        metavar="TYPE",
        help="GPT2BPETokenizer, HFTokenizer, SentencePieceTokenizer or NullTokenizer",
    )
    tokenizer.add_argument(
        "--tokenizer-model", metavar="PATH", help="tokenizer.json or its folder; SentencePiece .model"
    )
    tokenizer.add_argument("--vocab-file", metavar="PATH", help="GPT2BPETokenizer: vocab.json")
    tokenizer.add_argument("--merge-file", metavar="PATH", help="GPT2BPETokenizer: merges.txt")
    tokenizer.add_argument("--vocab-size", type=int, metavar="N", help="NullTokenizer: one more than the largest id")
    tokenizer.add_argument("--append-eod", action="store_true", help="end every document with the end-of-document id")
    output = parser.add_argument_group("output")
    output.add_argument(
        "--output-prefix", required=True, metavar="PREFIX", help="files are PREFIX_KEY_document.bin, .idx"
    )
    output.add_argument(
        "--workers", type=int, default=os.cpu_count() or 1, metavar="N", help="threads (default: all cores)"
    )
    output.add_argument("--log-interval", type=int, default=10000, metavar="N", help="documents between progress lines")
    arguments = parser.parse_args(argv)
    if arguments.workers < 1 or arguments.log_interval < 1:
        parser.error("--workers and --log-interval must be at least 1")
    if len(set(arguments.json_keys)) < len(arguments.json_keys):
        parser.error(f"--json-keys {' '.join(arguments.json_keys)} names a key twice")
    return arguments


@dataclass
class Encoded:
    """A block after the tokenizer: for each key, its documents laid end to end and the length of each."""

    num_bytes: int
    tokens: list[NDArray[Any]] = field(default_factory=list)
    lengths: list[NDArray[Any]] = field(default_factory=list)
    num_empty: list[int] = field(default_factory=list)
    num_documents: int = 0
    num_blank: int = 0
    faults: list[Fault] = field(default_factory=list)


@dataclass
class Totals:
    """What came of the input so far."""

    num_keys: int
    num_bytes: int = 0
    num_documents: int = 0
    num_blank: int = 0
    num_bad: int = 0
    num_empty: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.num_empty = [0] * self.num_keys

    def add(self, block: Encoded) -> None:
        self.num_bytes += block.num_bytes
        self.num_documents += block.num_documents
        self.num_blank += block.num_blank
        self.num_bad += len(block.faults)
        self.num_empty = [a + b for a, b in zip(self.num_empty, block.num_empty, strict=True)]


def encode_block(block: Block, keys: Sequence[str], tokenizer: Tokenizer, eod: int | None) -> Encoded:
    """Parse and tokenize. A document without a token is counted as empty and left out, its eod too."""
    import numpy as np

    from megatron.data.documents import parse

    parsed = parse(block, keys)
    places, texts = parsed.places, parsed.texts
    encoded = Encoded(num_bytes=block.num_bytes, num_blank=parsed.num_blank, faults=parsed.faults)
    columns = [[row[k] for row in texts] for k in range(len(keys))]
    try:
        ids_by_key = [tokenizer.encode_batch(column) for column in columns]
    except Exception:  # of whatever kind the tokenizer's library raises: find the document it was
        good, more_faults = sift(places, texts, tokenizer)
        encoded.faults += more_faults
        ids_by_key = [tokenizer.encode_batch([texts[row][k] for row in good]) for k in range(len(keys))]
    encoded.num_documents = len(ids_by_key[0])
    for ids in ids_by_key:
        kept = [document for document in ids if len(document)]
        encoded.num_empty.append(len(ids) - len(kept))
        if eod is not None:
            tail = np.array([eod], dtype=np.int32)
            # lengths are taken from what is written, the end-of-document id included
            kept = [np.concatenate((document, tail)) for document in kept]
        encoded.lengths.append(np.array([len(document) for document in kept], dtype=np.int64))
        encoded.tokens.append(np.concatenate(kept) if kept else np.empty(0, dtype=np.int32))
    return encoded


def sift(
    places: Sequence[str], texts: Sequence[tuple[str, ...]], tokenizer: Tokenizer
) -> tuple[list[int], list[Fault]]:
    """Rows that the tokenizer accepts, and why it refuses the others."""
    from megatron.data.documents import Fault

    good, faults = [], []
    for row, document in enumerate(texts):
        try:
            for text in document:
                tokenizer.encode(text)
        except Exception as error:
            faults.append(Fault(places[row], str(error)))
        else:
            good.append(row)
    return good, faults


def map_in_order(pool: ThreadPoolExecutor, work: Callable[[A], B], items: Iterator[A], ahead: int) -> Iterator[B]:
    """`pool.map` that never holds more than `ahead` items at once."""
    waiting: deque[Future[B]] = deque()
    try:
        for item in items:
            waiting.append(pool.submit(work, item))
            if len(waiting) >= ahead:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        for future in waiting:
            future.cancel()


def report_progress(totals: Totals, started_s: float) -> None:
    elapsed_s = max(time.monotonic() - started_s, 1e-9)
    print(
        f"{totals.num_documents} documents, {totals.num_documents / elapsed_s:.0f} docs/s, "
        f"{totals.num_bytes / 1e6 / elapsed_s:.2f} MB/s",
        file=sys.stderr,
        flush=True,
    )


def write_blocks(
    blocks: Iterator[Encoded], builders: Sequence[IndexedDatasetBuilder], on_bad_line: OnBadLine, log_interval: int
) -> Totals:
    """Add every block to the builders. Raises DataError at the first fault, unless they are to be skipped."""
    from megatron.data.documents import bad_line_error

    totals = Totals(len(builders))
    started_s, next_report = time.monotonic(), log_interval
    for block in blocks:
        if block.faults and on_bad_line == "fail":
            raise bad_line_error(block.faults[0])
        for fault in block.faults[: max(0, SHOWN_FAULTS - totals.num_bad)]:
            print(f"skipped {fault}", file=sys.stderr)
        for builder, tokens, lengths in zip(builders, block.tokens, block.lengths, strict=True):
            builder.add_documents(tokens, lengths)
        totals.add(block)
        if totals.num_documents >= next_report:
            report_progress(totals, started_s)
            next_report = totals.num_documents // log_interval * log_interval + log_interval
    report_progress(totals, started_s)
    return totals


def run(arguments: argparse.Namespace) -> None:
    """The whole command. Raises DataError or OSError, with no final file written."""
    # one thread a worker: --workers alone says how many cores are used
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from megatron.data.documents import find_sources, read_blocks
    from megatron.data.indexed import DataError, IndexedDatasetBuilder, best_dtype
    from megatron.data.tokenizer import build_tokenizer

    keys = arguments.json_keys
    sources = find_sources(arguments.input, arguments.text_files)
    tokenizer = build_tokenizer(
        arguments.tokenizer_type,
        arguments.tokenizer_model,
        arguments.vocab_file,
        arguments.merge_file,
        arguments.vocab_size,
    )
    eod = tokenizer.eod if arguments.append_eod else None
    if arguments.append_eod and eod is None:
        raise DataError("--append-eod: this tokenizer has no end-of-document token; name eos_token in its config file")
    if len(keys) > 1 and any(source.kind == "text" for source in sources):
        raise DataError(f"--json-keys {' '.join(keys)}: text files have no keys; give JSONL, or one key")

    Path(arguments.output_prefix).parent.mkdir(parents=True, exist_ok=True)
    prefixes = [f"{arguments.output_prefix}_{key}_document" for key in keys]
    dtype = best_dtype(tokenizer.vocab_size)
    with contextlib.ExitStack() as stack:
        builders = [stack.enter_context(IndexedDatasetBuilder(prefix, dtype)) for prefix in prefixes]
        pool = stack.enter_context(ThreadPoolExecutor(arguments.workers, thread_name_prefix="encode"))
        encoded = map_in_order(
            pool,
            lambda block: encode_block(block, keys, tokenizer, eod),
            read_blocks(sources),
            arguments.workers + BLOCKS_AHEAD,
        )
        totals = write_blocks(encoded, builders, arguments.on_bad_line, arguments.log_interval)
        for key, builder in zip(keys, builders, strict=True):
            if builder.num_tokens == 0:
                raise DataError(
                    f"no text under key {key!r} in {len(sources)} files: {totals.num_empty[keys.index(key)]} empty, "
                    f"{totals.num_blank} blank, {totals.num_bad} bad; give text that is not empty"
                )
        for builder in builders:
            builder.seal()
        for builder in builders:
            builder.finalize()

    for builder, num_empty in zip(builders, totals.num_empty, strict=True):
        print(
            f"{builder.prefix}.bin, .idx: {builder.num_documents} documents, {builder.num_tokens} tokens "
            f"({dtype}, vocabulary {tokenizer.vocab_size}); {num_empty} empty documents left out"
        )
    if totals.num_bad or totals.num_blank:
        print(f"skipped {totals.num_bad} bad documents and {totals.num_blank} blank ones")


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    from megatron.data.indexed import DataError

    try:
        run(arguments)
    except DataError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"error: {error.filename or arguments.output_prefix}: {error.strerror or error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; nothing was written", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
