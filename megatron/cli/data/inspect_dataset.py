"""Print statistics and documents of indexed datasets, and verify them.

    python tools/inspect_dataset.py data/corpus_text_document
    python tools/inspect_dataset.py data/corpus_text_document --documents 0 5 -1 \\
        --tokenizer-type HFTokenizer --tokenizer-model tokenizer
    python tools/inspect_dataset.py data/*.idx --verify

`--verify` reads every byte once: lengths against pointers, the document index, token ids against the vocabulary,
end-of-document ids, and PREFIX.sha256 and PREFIX.manifest.json if they exist. Memory does not grow with the dataset.
Exit status 1 if anything is wrong.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.cli.command import byte_size, command, command_parser, progress_bar
from megatron.cli.data.flags import TOKENIZER, add_flags, tokenizer_of
from megatron.data.index import verification
from megatron.data.index.checksums import read_checksums
from megatron.data.index.indexed import DataError, IndexedDataset
from megatron.runtime.commands import DONE, FAILED

if TYPE_CHECKING:
    from megatron.data.tokenizers.base import Tokenizer

SHOWN_IDS = 100
SHOWN_DAMAGES = 3
SHOWN_CHARACTERS = 2000
BAR_WIDTH = 40


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = command_parser("inspect_dataset", "Print statistics and documents of indexed datasets, and verify them.")
    parser.add_argument(
        "prefix", nargs="+", metavar="PREFIX", help="datasets: PREFIX for PREFIX.bin and PREFIX.idx, or PREFIX.idx"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object a dataset, with whole documents")
    shown = parser.add_argument_group("documents")
    shown.add_argument(
        "--documents",
        nargs="+",
        type=int,
        default=[],
        metavar="N",
        help="documents to print; -1 is the last",
    )
    shown.add_argument("--head", type=int, default=0, metavar="N", help="print the first N documents")
    check = parser.add_argument_group("verification")
    check.add_argument("--verify", action="store_true", help="verify everything; exit status 1 if anything is wrong")
    add_flags(check, "--append-eod", help="every document must end with the end-of-document id")
    description = "to print text; --verify takes the rules for ids from it, or from the notes in PREFIX.sha256"
    add_flags(parser.add_argument_group("tokenizer", description), *TOKENIZER)
    arguments = parser.parse_args(argv)
    if arguments.head < 0:
        parser.error(f"--head {arguments.head} must not be negative")
    if arguments.vocab_size is not None and arguments.vocab_size < 1:
        parser.error(f"--vocab-size {arguments.vocab_size} must be at least 1")
    if arguments.append_eod and not arguments.verify:
        parser.error("--append-eod is a rule for --verify; give both")
    for name in ("tokenizer_model", "vocab_file", "merge_file", "eod_token", "tiktoken_pattern"):
        if getattr(arguments, name) and not arguments.tokenizer_type:
            parser.error(f"--{name.replace('_', '-')} needs --tokenizer-type")
    return arguments


def print_statistics(found: dict[str, Any]) -> None:
    def line(name: str, value: object) -> None:
        print(f"  {name:15s}{value}")

    print(found["prefix"])
    documents = f"{found['documents']:,}"
    if found["empty_documents"]:
        documents += f", {found['empty_documents']:,} of them empty"
    line("documents", documents)
    line("sequences", f"{found['sequences']:,}")
    line("tokens", f"{found['tokens']:,} ({found['dtype']})")
    line("size", f"{byte_size(found['bin_bytes'])} .bin, {byte_size(found['idx_bytes'])} .idx")
    line("checksums", f"{found['prefix']}.sha256" if found["checksum_file"] else "none")
    line("manifest", found["manifest"]["summary"] if found["manifest"] else "none")
    for name, note in found["notes"].items():
        line(name, note if isinstance(note, str) else json.dumps(note, ensure_ascii=False))
    line("doc. lengths", lengths_in_words(found["document_lengths"]))
    if found["sequences"] != found["documents"]:
        line("seq. lengths", lengths_in_words(found["sequence_lengths"]))
    rows = [(str(a) if a == b else f"{a}-{b}", count) for a, b, count in found["document_length_histogram"]]
    largest = max(count for _, count in rows)
    print(f"  {'tokens':>21s} documents")
    for name, count in rows:
        # rounded up, so that one in a million shows
        print(f"  {name:>21s} {count:>13,} {'#' * -(-count * BAR_WIDTH // largest)}".rstrip())


def lengths_in_words(found: dict[str, Any]) -> str:
    percentiles = ", ".join(f"p{name} {value:,}" for name, value in found["percentiles"].items())
    return f"{found['shortest']:,} to {found['longest']:,}, mean {found['mean']:,.1f}; {percentiles}"


def print_document(found: dict[str, Any]) -> None:
    """Print a document; --json prints long ones in full."""
    sequences = found["sequences"]
    count = sum(len(sequence) for sequence in sequences)
    tokens = f"{count:,} tokens"
    if len(sequences) != 1:
        tokens += f" in {len(sequences)} sequences"
    print(f"\ndocument {found['document']}: {tokens}")
    left = SHOWN_IDS
    for sequence in sequences:
        if left <= 0:
            break
        print("  " + (" ".join(map(str, sequence[:left])) or "(empty)"))
        # an empty sequence counts too, so that a document of many of them ends
        left -= max(1, len(sequence))
    if count > SHOWN_IDS or left <= 0:
        print(f"  ... {count:,} in all; --json prints them all")
    if "text" in found:
        text = found["text"]
        # a document must not send control characters to the terminal
        clean = "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text[:SHOWN_CHARACTERS])
        print("  | " + clean.replace("\n", "\n  | "))
        if len(text) > SHOWN_CHARACTERS:
            print(f"  ... {len(text):,} characters in all")


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


def expectation(
    arguments: argparse.Namespace, tokenizer: Tokenizer | None, notes: dict[str, Any]
) -> verification.Expected:
    """Return the rules for the ids: from the flags, else the tokenizer, else PREFIX.sha256. Raises DataError."""
    identity = None
    if tokenizer is None:
        vocab_size, eod = arguments.vocab_size or _noted(notes, "vocab_size"), _noted(notes, "eod")
    else:
        vocab_size, eod, identity = arguments.vocab_size or tokenizer.vocab_size, tokenizer.eod, tokenizer.identity
        if arguments.tokenizer_type in ("NullTokenizer", "TikTokenizer"):
            vocab_size = tokenizer.vocab_size  # which --vocab-size describes, without NullTokenizer's end of document
    if arguments.append_eod and eod is None:
        raise DataError("--append-eod: the end-of-document id is unknown; give --tokenizer-type and its files")
    # by the flag, or as preprocess_data has noted it
    every_document_ends = arguments.append_eod or (eod is not None and notes.get("append_eod") is True)
    return verification.Expected(vocab_size, eod, every_document_ends, identity)


def _noted(notes: dict[str, Any], name: str) -> int | None:
    """Return a whole number of the tokenizer that preprocess_data has noted; None: it has not."""
    noted = notes.get("tokenizer")
    # a note comes from a file: True and 1.0 are no ids
    if isinstance(noted, dict) and type(noted.get(name)) is int:
        return int(noted[name])
    return None


def inspect(prefix: str, arguments: argparse.Namespace, tokenizer: Tokenizer | None) -> bool:
    """Print the requested output for one dataset, and return True if nothing is wrong. Raises DataError."""
    data = IndexedDataset(prefix)
    checksums = read_checksums(prefix)
    verified: dict[str, Any] = {}
    if arguments.verify:
        expected = expectation(arguments, tokenizer, checksums.notes if checksums else {})
        total = verification.num_bytes_to_verify(data, checksums)
        with progress_bar(Path(prefix).name, total) as bar:
            verified = {"verified": verification.verify(data, expected, checksums, bar.update)}
    else:
        _check_index(data)
    is_wrong, damage = bool(verified and verified["verified"]["findings"]), None
    found: dict[str, Any] = {"prefix": prefix}
    try:
        found = verification.measure(data, checksums)
        numbers = [*range(min(arguments.head, data.num_documents)), *arguments.documents]
        found["shown"] = [verification.read_document(data, number, tokenizer) for number in numbers]
    except DataError as error:
        if not is_wrong:
            raise
        damage = str(error)  # the findings are printed nevertheless
    if arguments.json:
        print(json.dumps(found | verified, ensure_ascii=False))
    else:
        print_text(found | verified, damage)
    return not is_wrong


def print_text(found: dict[str, Any], damage: str | None) -> None:
    if damage is None:
        print_statistics(found)
    else:
        print(f"{found['prefix']}\n  no statistics: {damage}")
    for document in found.get("shown", []):
        print_document(document)
    if "verified" in found:
        print_verification(found["verified"])


def _check_index(data: IndexedDataset) -> None:
    """Raise DataError if the index is damaged. It is small beside the tokens, so it is always checked."""
    findings = verification.Findings()
    verification.verify_index(data, findings)
    for messages in findings.shown.values():
        raise DataError(
            f"{data.prefix}.idx is damaged: {'; '.join(messages[:SHOWN_DAMAGES])}; copy it again, or see --verify"
        )


@command
def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    tokenizer = None
    try:
        if arguments.tokenizer_type:
            tokenizer = tokenizer_of(arguments)
    except DataError as error:
        print(f"error: {error}", file=sys.stderr)
        return FAILED
    status = DONE
    for number, prefix in enumerate(arguments.prefix):
        if number and not arguments.json:
            print()
        try:
            # a dataset that is wrong does not keep the next ones from being inspected
            if not inspect(prefix.removesuffix(".idx"), arguments, tokenizer):
                status = FAILED
        except DataError as error:
            print(f"error: {error}", file=sys.stderr)
            status = FAILED
        except BrokenPipeError:
            raise  # `command` handles it
        except OSError as error:
            print(f"error: {error.filename or prefix}: {error.strerror or error}", file=sys.stderr)
            status = FAILED
    return status
