"""Statistics of indexed datasets, documents of them as ids and text, and a check of everything.

    python tools/inspect_dataset.py data/corpus_text_document
    python tools/inspect_dataset.py data/corpus_text_document --documents 0 5 -1 \\
        --tokenizer-type HFTokenizer --tokenizer-model tokenizer
    python tools/inspect_dataset.py data/*.idx --verify

`--verify` reads every byte once: lengths against pointers, the document index, token ids against the vocabulary,
end-of-document ids, and PREFIX.sha256 where there is one. Memory does not grow with the dataset. Exit status 1 if
anything is wrong.
"""

from __future__ import annotations

import argparse
import bisect
import hashlib
import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from megatron.cli.text_flags import add_tokenizer_flags, tokenizer_of
from megatron.command_names import command_name
from megatron.data.checksums import Checksums, file_sha256, read_checksums
from megatron.data.indexed import BLOCK_ENTRIES, DataError, IndexedDataset

if TYPE_CHECKING:
    from megatron.data.tokenizers.base import Tokenizer

Integers = NDArray[np.int64]

SHOWN_FINDINGS = 10
TOKENS_AT_A_TIME = 4 << 20
COUNTED_BELOW = 1 << 20
"""Lengths below this are counted in a table, longer ones kept: of those there is one in a million tokens at most."""
PERCENTILES = (1, 10, 50, 90, 99)
SHOWN_IDS = 100
SHOWN_CHARACTERS = 2000
BAR_WIDTH = 40


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=command_name("inspect_dataset"),
        description="Print statistics and documents of indexed datasets, and verify them.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "prefix", nargs="+", metavar="PREFIX", help="datasets: PREFIX for PREFIX.bin and PREFIX.idx, or PREFIX.idx"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object a dataset, documents whole")
    shown = parser.add_argument_group("documents")
    shown.add_argument(
        "--documents", nargs="+", type=int, default=[], metavar="N", help="print these; -1 is the last document"
    )
    shown.add_argument("--head", type=int, default=0, metavar="N", help="print the first N documents")
    check = parser.add_argument_group("verification")
    check.add_argument("--verify", action="store_true", help="check everything; exit status 1 if anything is wrong")
    check.add_argument("--append-eod", action="store_true", help="every document must end with the end-of-document id")
    add_tokenizer_flags(
        parser,
        required=False,
        description="for text, and for what --verify expects of ids; default: the note in PREFIX.sha256, without text",
    )
    arguments = parser.parse_args(argv)
    if arguments.head < 0:
        parser.error(f"--head {arguments.head} must not be negative")
    if arguments.vocab_size is not None and arguments.vocab_size < 1:
        parser.error(f"--vocab-size {arguments.vocab_size} must be at least 1")
    if arguments.append_eod and not arguments.verify:
        parser.error("--append-eod says what --verify expects; give both")
    needy = [
        name
        for name in ("tokenizer_model", "vocab_file", "merge_file", "eod_token", "tiktoken_pattern")
        if getattr(arguments, name)
    ]
    if needy and not arguments.tokenizer_type:
        parser.error(f"--{needy[0].replace('_', '-')} needs --tokenizer-type")
    return arguments


# ---------------------------------------------------------------------------------------------------------------------
# Statistics


class Lengths:
    """How often each length occurs. Exact, in memory that does not grow with their number."""

    def __init__(self) -> None:
        self._short: Integers = np.zeros(COUNTED_BELOW, np.int64)
        self._long: list[Integers] = []

    def add(self, lengths: Integers) -> None:
        short = lengths < COUNTED_BELOW
        counts = np.bincount(lengths[short])
        self._short[: len(counts)] += counts
        if not short.all():
            self._long.append(lengths[~short])

    @cached_property
    def _table(self) -> tuple[Integers, Integers]:
        """The lengths there are, ascending, and how often each."""
        values = np.flatnonzero(self._short)
        long_values, long_counts = np.unique(np.concatenate([*self._long, np.empty(0, np.int64)]), return_counts=True)
        return np.concatenate([values, long_values]), np.concatenate([self._short[values], long_counts])

    @property
    def num_empty(self) -> int:
        return int(self._short[0])

    def describe(self) -> dict[str, Any]:
        """Smallest, largest, mean, and nearest-rank percentiles."""
        values, counts = self._table
        up_to = np.cumsum(counts)
        total = int(up_to[-1])
        ranks = [max(1, -(-total * percent // 100)) for percent in PERCENTILES]
        return {
            "shortest": int(values[0]),
            "longest": int(values[-1]),
            "mean": float(values @ counts / total),
            "percentiles": {
                str(p): int(values[np.searchsorted(up_to, r)]) for p, r in zip(PERCENTILES, ranks, strict=True)
            },
        }

    def histogram(self) -> list[tuple[int, int, int]]:
        """(first length, last length, how many) of 0, 1, 2-3, 4-7, ..., from the first to the last that occur."""
        values, counts = self._table
        bins = np.frexp(values.astype(np.float64))[1]  # 0 for 0, 1 for 1, 2 for 2 and 3, 3 for 4 to 7
        rows = []
        for power in range(int(bins[0]), int(bins[-1]) + 1):
            first, last = (0, 0) if power == 0 else (1 << (power - 1), (1 << power) - 1)
            rows.append((first, last, int(counts[bins == power].sum())))
        return rows


def token_positions(data: IndexedDataset, sequences: Integers) -> Integers:
    """The token at which each of these sequences starts; the number of tokens for the one after the last."""
    inside = np.minimum(sequences, len(data) - 1)
    return np.where(sequences < len(data), data.pointers[inside] // data.dtype.itemsize, data.num_tokens)


def document_bounds(data: IndexedDataset) -> Iterator[tuple[int, Integers]]:
    """(first document, tokens at which it and those after it start, and the last ends), in blocks.

    Raises DataError where the index makes no sense.
    """
    for start in range(0, data.num_documents, BLOCK_ENTRIES):
        sequences = np.array(data.document_index[start : start + BLOCK_ENTRIES + 1])
        if sequences.min() < 0 or sequences.max() > len(data):
            raise DataError(
                f"{data.prefix}.idx: the document index leaves the {len(data)} sequences; --verify says more"
            )
        bounds = token_positions(data, sequences)
        if (np.diff(bounds) < 0).any():
            raise DataError(f"{data.prefix}.idx: documents of negative length; the file is damaged, --verify says more")
        data.release_memory()
        yield start, bounds


def measure(data: IndexedDataset, checksums: Checksums | None) -> dict[str, Any]:
    """Statistics, as --json prints them. Raises DataError where the index makes no sense."""
    documents, sequences = Lengths(), Lengths()
    for _, bounds in document_bounds(data):
        documents.add(np.diff(bounds))
    for start in range(0, len(data), BLOCK_ENTRIES):
        lengths = data.lengths[start : start + BLOCK_ENTRIES].astype(np.int64)
        if lengths.min() < 0:
            raise DataError(f"{data.prefix}.idx: sequences of negative length; the file is damaged, --verify says more")
        sequences.add(lengths)
        data.release_memory()
    return {
        "prefix": data.prefix,
        "documents": data.num_documents,
        "empty_documents": documents.num_empty,
        "sequences": len(data),
        "tokens": data.num_tokens,
        "dtype": str(data.dtype),
        "bin_bytes": Path(data.prefix + ".bin").stat().st_size,
        "idx_bytes": Path(data.prefix + ".idx").stat().st_size,
        "checksum_file": checksums is not None,
        "notes": checksums.notes if checksums else {},
        "document_lengths": documents.describe(),
        "sequence_lengths": sequences.describe(),
        "document_length_histogram": documents.histogram(),
    }


def print_statistics(found: dict[str, Any]) -> None:
    def line(name: str, value: object) -> None:
        print(f"  {name:15s}{value}")

    print(found["prefix"])
    empty = f", {found['empty_documents']:,} of them empty" if found["empty_documents"] else ""
    line("documents", f"{found['documents']:,}{empty}")
    line("sequences", f"{found['sequences']:,}")
    line("tokens", f"{found['tokens']:,} ({found['dtype']})")
    line("size", f"{size(found['bin_bytes'])} .bin, {size(found['idx_bytes'])} .idx")
    line("checksums", f"{found['prefix']}.sha256" if found["checksum_file"] else "none")
    for name, note in found["notes"].items():
        line(name, note if isinstance(note, str) else json.dumps(note, ensure_ascii=False))
    line("doc. lengths", lengths_in_words(found["document_lengths"]))
    if found["sequences"] != found["documents"]:
        line("seq. lengths", lengths_in_words(found["sequence_lengths"]))
    rows = [(str(a) if a == b else f"{a}-{b}", count) for a, b, count in found["document_length_histogram"]]
    largest = max(count for _, count in rows)
    print(f"  {'tokens':>21s} documents")
    for name, count in rows:
        # something for one of a million, nothing for none
        print(f"  {name:>21s} {count:>13,} {'#' * -(-count * BAR_WIDTH // largest)}".rstrip())


def size(num_bytes: int) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.2f} {unit}"
    return f"{num_bytes} bytes"


def lengths_in_words(found: dict[str, Any]) -> str:
    percentiles = ", ".join(f"p{name} {value:,}" for name, value in found["percentiles"].items())
    return f"{found['shortest']:,} to {found['longest']:,}, mean {found['mean']:,.1f}; {percentiles}"


# ---------------------------------------------------------------------------------------------------------------------
# Documents


def read_document(data: IndexedDataset, number: int, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Ids of its sequences, and its text. A negative number counts from the end. Raises DataError."""
    count = data.num_documents
    if not -count <= number < count:
        raise DataError(f"{data.prefix} has documents 0 to {count - 1}; there is no document {number}")
    document = number % count
    first, last = (int(i) for i in data.document_index[document : document + 2])
    if not 0 <= first <= last <= len(data):
        raise DataError(
            f"{data.prefix}.idx: document {document} runs from sequence {first} to {last}; the file is damaged, "
            "--verify says more"
        )
    sequences = [data.read(sequence).tolist() for sequence in range(first, last)]
    found: dict[str, Any] = {"document": document, "sequences": sequences}
    if tokenizer is not None:
        try:
            found["text"] = tokenizer.decode([i for sequence in sequences for i in sequence])
        except Exception as error:  # of whatever kind the tokenizer's library raises
            raise DataError(
                f"document {document} of {data.prefix} cannot be decoded ({type(error).__name__}: {error}); use the "
                "tokenizer the data was made with"
            ) from error
    return found


def print_document(found: dict[str, Any]) -> None:
    """Long ones shortened: --json prints them whole."""
    sequences = found["sequences"]
    count = sum(len(sequence) for sequence in sequences)
    several = f" in {len(sequences)} sequences" if len(sequences) != 1 else ""
    print(f"\ndocument {found['document']}: {count:,} tokens{several}")
    left = SHOWN_IDS
    for sequence in sequences:
        if left <= 0:
            break
        print("  " + (" ".join(map(str, sequence[:left])) or "(empty)"))
        left -= max(1, len(sequence))
    if count > SHOWN_IDS or left <= 0:
        print(f"  ... {count:,} in all; --json prints every one")
    if "text" in found:
        text = found["text"]
        # no control character of a document reaches the terminal
        clean = "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text[:SHOWN_CHARACTERS])
        print("  | " + clean.replace("\n", "\n  | "))
        if len(text) > SHOWN_CHARACTERS:
            print(f"  ... {len(text):,} characters in all")


# ---------------------------------------------------------------------------------------------------------------------
# Verification


class Findings:
    """What is wrong: of each kind the number, and the first in words."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self.shown: dict[str, list[str]] = {}

    def add(self, kind: str, messages: Iterable[str], count: int) -> None:
        """`count` more findings of a kind; only as many messages are taken as are shown."""
        if not count:
            return
        self.counts[kind] = self.counts.get(kind, 0) + count
        shown = self.shown.setdefault(kind, [])
        shown.extend(message for message, _ in zip(messages, range(SHOWN_FINDINGS - len(shown)), strict=False))

    def as_json(self) -> dict[str, Any]:
        return {kind: {"count": count, "first": self.shown[kind]} for kind, count in self.counts.items()}


@dataclass(frozen=True)
class Expected:
    """What ids must be. None: nothing is known about it."""

    vocab_size: int | None
    eod: int | None
    every_document_ends: bool
    """With `eod`."""
    tokenizer: dict[str, Any] | None = None
    """The identity of the one given."""


def verify_tokenizer(data: IndexedDataset, expected: Expected, checksums: Checksums | None, findings: Findings) -> None:
    """Whether the tokenizer is the one the data was made with, and its ids fit the file's type."""
    noted = checksums.notes.get("tokenizer") if checksums else None
    if expected.tokenizer and noted and noted != expected.tokenizer:
        given, made_with = json.dumps(expected.tokenizer), json.dumps(noted)
        findings.add("tokenizer", [f"{data.prefix}.sha256 says {made_with}, the one given is {given}"], 1)
    largest = np.iinfo(data.dtype).max if data.dtype.kind in "iu" else 0
    if expected.vocab_size and expected.vocab_size - 1 > largest:
        message = f"{data.dtype} holds no ids above {largest}, but the vocabulary has {expected.vocab_size:,}"
        findings.add("tokenizer", [message], 1)


def verify_index(data: IndexedDataset, findings: Findings) -> None:
    """Lengths, pointers and document index, each against its neighbours. Opening has checked their ends."""
    item_bytes, bin_bytes, count = data.dtype.itemsize, data.num_tokens * data.dtype.itemsize, len(data)
    for start in range(0, count, BLOCK_ENTRIES):
        lengths = data.lengths[start : start + BLOCK_ENTRIES].astype(np.int64)
        pointers = np.append(data.pointers[start : start + len(lengths) + 1], bin_bytes)[: len(lengths) + 1]
        negative = np.flatnonzero(lengths < 0)
        findings.add("length", (f"sequence {start + i} has {lengths[i]} tokens" for i in negative), len(negative))
        outside = np.flatnonzero((pointers[:-1] < 0) | (pointers[:-1] > bin_bytes))
        findings.add(
            "pointer",
            (
                f"sequence {start + i} starts at byte {pointers[i]}, outside the {bin_bytes} of the .bin"
                for i in outside
            ),
            len(outside),
        )
        wrong = np.flatnonzero(np.diff(pointers) != lengths * item_bytes)
        findings.add(
            "pointer",
            (
                f"sequence {start + i} at byte {pointers[i]} has {lengths[i]} tokens of {item_bytes} bytes, but the "
                f"next one starts at byte {pointers[i + 1]}"
                for i in wrong
            ),
            len(wrong),
        )
        data.release_memory()
    for start in range(0, data.num_documents, BLOCK_ENTRIES):
        sequences = np.array(data.document_index[start : start + BLOCK_ENTRIES + 1])
        wrong = np.flatnonzero((np.diff(sequences) < 0) | (sequences[1:] > count))
        findings.add(
            "document index",
            (f"document {start + i} runs from sequence {sequences[i]} to {sequences[i + 1]} of {count}" for i in wrong),
            len(wrong),
        )
        data.release_memory()


def verify_bin(
    data: IndexedDataset, expected: Expected, ends: DocumentEnds | None, checksums: Checksums | None, findings: Findings
) -> None:
    """Token ids, ends of documents and checksums, reading everything once."""
    paths = [Path(data.prefix + suffix) for suffix in (".bin", ".idx")]
    total = sum(path.stat().st_size for path in paths[: 2 if checksums else 1])
    digest = hashlib.sha256()
    with tqdm(total=total, unit="B", unit_scale=True, desc=Path(data.prefix).name, leave=False, disable=None) as bar:
        for start in range(0, data.num_tokens, TOKENS_AT_A_TIME):
            tokens = data.tokens[start : start + TOKENS_AT_A_TIME]
            verify_ids(data, start, tokens, expected.vocab_size, findings)
            if ends:
                ends.check(start, tokens)
            if checksums:
                digest.update(tokens.data)
            bar.update(tokens.nbytes)
            data.release_memory()
        if checksums:
            for suffix, found in ((".bin", digest.hexdigest()), (".idx", file_sha256(paths[1], bar.update))):
                try:
                    checksums.compare(data.prefix, suffix, found)
                except DataError as error:
                    findings.add("checksum", [str(error)], 1)


class DocumentEnds:
    """Whether documents end with the end-of-document id. Fed with the .bin, block by block from its start."""

    def __init__(self, data: IndexedDataset, expected: Expected, findings: Findings):
        self._expected, self._findings = expected, findings
        self.num_with_tokens = 0
        self.num_ended = 0
        self._blocks = last_tokens(data)
        # of the block of documents that is under way, those whose last token is still to come
        self._documents, self._positions = next(self._blocks)

    def check(self, start: int, tokens: NDArray[Any]) -> None:
        """`tokens` begin at token `start` of the .bin."""
        while True:
            here = int(np.searchsorted(self._positions, start + len(tokens)))
            documents, found = self._documents[:here], tokens[self._positions[:here] - start]
            lacking = np.flatnonzero(found != self._expected.eod)
            self.num_with_tokens += here
            self.num_ended += here - len(lacking)
            if self._expected.every_document_ends:
                eod = self._expected.eod
                messages = (f"document {documents[i]} ends with {found[i]}, not {eod}" for i in lacking)
                self._findings.add("end of document", messages, len(lacking))
            self._documents, self._positions = self._documents[here:], self._positions[here:]
            block = None if len(self._positions) else next(self._blocks, None)
            if block is None:
                return
            self._documents, self._positions = block


def last_tokens(data: IndexedDataset) -> Iterator[tuple[Integers, Integers]]:
    """(document, place of its last token in the .bin) of every document that has tokens, in blocks."""
    for first, bounds in document_bounds(data):
        filled = np.flatnonzero(np.diff(bounds))
        yield first + filled, bounds[1:][filled] - 1


def verify_ids(
    data: IndexedDataset, start: int, tokens: NDArray[Any], vocab_size: int | None, findings: Findings
) -> None:
    """`tokens` begin at token `start` of the .bin."""
    if data.dtype.kind not in "iu":
        if start == 0:
            findings.add("token id", [f"the .bin holds {data.dtype}, not integers"], 1)
        return
    limit = np.iinfo(data.dtype).max + 1 if vocab_size is None else vocab_size
    # almost always right, and twice as fast as looking at each
    if int(tokens.max()) < limit and int(tokens.min()) >= 0:
        return
    wrong = np.flatnonzero((tokens < 0) | (tokens >= limit))
    findings.add("token id", (outside(data, start + int(i), tokens[i], limit) for i in wrong), len(wrong))


def outside(data: IndexedDataset, position: int, token: int, limit: int) -> str:
    byte = position * data.dtype.itemsize
    sequence = bisect.bisect_right(data.pointers, byte) - 1
    document = bisect.bisect_right(data.document_index, sequence) - 1
    rule = "is negative" if token < 0 else f"is not below {limit}"
    return f"id {token} at byte {byte} of the .bin (document {document}, sequence {sequence}) {rule}"


def print_verification(result: dict[str, Any]) -> None:
    print("\nverified")
    for line in result["checked"]:
        print(f"  {line}")
    for kind, found in result["findings"].items():
        print(f"  WRONG: {kind}")
        for message in found["first"]:
            print(f"    {message}")
        if found["count"] > len(found["first"]):
            print(f"    ... {found['count']:,} of them in all")
    if not result["findings"]:
        print("  nothing is wrong")


def verify(data: IndexedDataset, expected: Expected, checksums: Checksums | None) -> dict[str, Any]:
    """`checked`: what was, in words. `findings`: what is wrong, by kind."""
    findings = Findings()
    verify_tokenizer(data, expected, checksums, findings)
    verify_index(data, findings)
    checked = [f"{len(data):,} lengths and pointers, {data.num_documents:,} documents"]
    index_is_whole = not findings.counts.keys() & {"length", "pointer", "document index"}
    ends = DocumentEnds(data, expected, findings) if expected.eod is not None and index_is_whole else None
    verify_bin(data, expected, ends, checksums, findings)
    below = f"below {expected.vocab_size:,}" if expected.vocab_size else "not negative (the vocabulary is unknown)"
    checked.append(f"{data.num_tokens:,} ids: {below}")
    if ends:
        checked.append(
            f"{ends.num_ended:,} of {ends.num_with_tokens:,} documents with tokens end with id {expected.eod}"
        )
    else:
        why = "the index is damaged" if not index_is_whole else "the end-of-document id is unknown"
        checked.append(f"ends of documents: not checked, {why}")
    checked.append(f"SHA-256 of both files: {'compared' if checksums else 'not checked, there is no .sha256'}")
    result: dict[str, Any] = {"checked": checked, "findings": findings.as_json()}
    if ends:
        result |= {"documents_with_tokens": ends.num_with_tokens, "documents_ending_with_eod": ends.num_ended}
    return result


def expectation(arguments: argparse.Namespace, tokenizer: Tokenizer | None, notes: dict[str, Any]) -> Expected:
    """The command line's word first, then the tokenizer's, then that of PREFIX.sha256. Raises DataError."""
    noted = notes.get("tokenizer")
    noted = noted if isinstance(noted, dict) else {}

    def integer(name: str) -> int | None:
        value = noted.get(name)
        return value if type(value) is int else None

    vocab_size = arguments.vocab_size or (tokenizer.vocab_size if tokenizer else integer("vocab_size"))
    eod = tokenizer.eod if tokenizer else integer("eod")
    if arguments.append_eod and eod is None:
        raise DataError("--append-eod: the end-of-document id is unknown; give --tokenizer-type and what belongs to it")
    every_document_ends = arguments.append_eod or (eod is not None and notes.get("append_eod") is True)
    return Expected(vocab_size, eod, every_document_ends, tokenizer.identity if tokenizer else None)


def inspect(prefix: str, arguments: argparse.Namespace, tokenizer: Tokenizer | None) -> bool:
    """Print what was asked for about one dataset. Returns whether all is well. Raises DataError."""
    data = IndexedDataset(prefix)
    checksums = read_checksums(prefix)
    expected = expectation(arguments, tokenizer, checksums.notes if checksums else {})
    verified = verify(data, expected, checksums) if arguments.verify else None
    fault = None
    found: dict[str, Any] = {"prefix": prefix}
    try:
        found = measure(data, checksums)
        numbers = [*range(min(arguments.head, data.num_documents)), *arguments.documents]
        found["shown"] = [read_document(data, number, tokenizer) for number in numbers]
    except DataError as error:
        if verified is None or not verified["findings"]:
            raise
        fault = str(error)  # of a dataset known to be damaged: what was found is said all the same
    if arguments.json:
        print(json.dumps(found | ({"verified": verified} if verified else {}), ensure_ascii=False))
    else:
        print_statistics(found) if fault is None else print(f"{prefix}\n  no statistics: {fault}")
        for document in found.get("shown", []):
            print_document(document)
        if verified:
            print_verification(verified)
    return not (verified and verified["findings"])


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    tokenizer = None
    try:
        if arguments.tokenizer_type:
            tokenizer = tokenizer_of(arguments)
    except DataError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    all_well = True
    for number, prefix in enumerate(arguments.prefix):
        if number and not arguments.json:
            print()
        try:
            all_well &= inspect(prefix.removesuffix(".idx"), arguments, tokenizer)
        except DataError as error:
            print(f"error: {error}", file=sys.stderr)
            all_well = False
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # `| head` has seen enough
            return 0
        except OSError as error:
            print(f"error: {error.filename or prefix}: {error.strerror or error}", file=sys.stderr)
            all_well = False
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            return 130
    return 0 if all_well else 1
