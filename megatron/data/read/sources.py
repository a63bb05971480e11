"""Files that hold documents: what each is by its name, and which are read, passed over or refused."""

from __future__ import annotations

import fnmatch
import hashlib
import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple

from megatron.runtime.commands import counted

Kind = Literal["jsonl", "array", "text", "parquet", "arrow", "tar"]  # array: what a .json file turns out to hold
Compression = Literal["", ".gz", ".zst", ".xz", ".bz2"]
Transport = Literal["file", "pipe", "url"]

KINDS: dict[str, Kind] = {
    ".jsonl": "jsonl",
    ".json": "jsonl",
    ".ndjson": "jsonl",
    ".jl": "jsonl",
    ".txt": "text",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".tar": "tar",
}
COMPRESSIONS: dict[str, Compression] = {".gz": ".gz", ".zst": ".zst", ".zstd": ".zst", ".xz": ".xz", ".bz2": ".bz2"}
SHORT_ENDINGS = {".tgz": ".tar.gz", ".txz": ".tar.xz", ".tbz2": ".tar.bz2", ".tzst": ".tar.zst"}
ROW_KINDS: tuple[Kind, ...] = ("jsonl", "tar", "parquet", "arrow")
"""Kinds of which a document is a row, not a text."""
UNCOMPRESSED_ONLY = ("parquet", "arrow")
"""Kinds that are read at any place of the file, and compressed inside."""
KNOWN_NAMES = (
    f"{', '.join('*' + suffix for suffix in KINDS)}; all but *.parquet and *.arrow also with .gz, .zst, .xz or .bz2 "
    "after it"
)
COMPANIONS = {
    "documentation": (
        "*.md",
        "*.rst",
        "README",
        "LICENSE*",
        "LICENCE*",
        "COPYING*",
        "NOTICE*",
        "CITATION*",
        "CHANGES*",
    ),
    "a checksum": ("*.sha256", "*.sha512", "*.sha1", "*.md5", "*.crc", "SHA256SUMS*", "MD5SUMS*"),
    "a mark of another program": ("_SUCCESS", "_COMMITTED_*", "_STARTED_*"),
}
"""Files without a known ending that come with data and hold none."""
DESCRIPTIONS = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json", "cache-*.arrow")
"""Files of Hugging Face's datasets that describe a downloaded or saved dataset, or cache another form of it."""
SPLIT_NAMES = {
    "train": "train",
    "training": "train",
    "test": "test",
    "testing": "test",
    "eval": "validation",
    "evaluation": "validation",
    "dev": "validation",
    "val": "validation",
    "valid": "validation",
    "validation": "validation",
}
"""Words in names of files and folders -> split, as Hugging Face's datasets reads them: train-00000-of-00002.parquet."""
STDIN = "-"
STDIN_FILENAME = "stdin.jsonl"
UNKNOWN = "has an unknown ending"


FileForm = tuple[Kind, Compression]


class SourceFile(NamedTuple):
    """A file of documents."""

    name: str
    """Path or URL, as the user sees it."""
    kind: Kind
    compression: Compression = ""
    num_bytes: int | None = None
    """Size where it lies, compressed if it is. None: unknown."""
    transport: Transport = "file"
    relative_name: str = ""
    """Name within the input, the same on every machine."""
    version: str = ""
    """Time of modification, or what else changes with the content."""
    part: tuple[int, int] | None = None
    """Read only the lines that begin at these bytes. None: the whole file."""
    archive: str = ""
    """Name of the tar file that holds it."""

    @property
    def public_name(self) -> str:
        """The name without a password or the signature of a URL."""
        if self.transport != "url":
            return self.name
        # a manifest is published with its dataset
        scheme, _, rest = self.name.split("?")[0].partition("://")
        host, slash, path = rest.partition("/")
        return f"{scheme}://{host.rpartition('@')[2]}{slash}{path}"

    @property
    def size(self) -> int | None:
        """Bytes to read. None: unknown."""
        if self.part is None:
            return self.num_bytes
        begin, end = self.part
        return end - begin


class PassedOver(NamedTuple):
    """A file, or a folder with a slash at the end, that is not read."""

    name: str
    reason: str


@dataclass(frozen=True)
class InputRules:
    """Rules for the names of files."""

    text_files: str | None = None
    """Pattern of files that are text, such as '*.py'. Folders and archives are searched for these only."""
    exclude: tuple[str, ...] = ()
    """Patterns of files and folders in a folder or archive that are passed over."""
    stdin_filename: str = STDIN_FILENAME
    """Name whose ending says what standard input, or a pipe, holds."""
    kinds: tuple[Kind, ...] = tuple(dict.fromkeys(KINDS.values()))
    """Kinds that the reader can use."""

    def form(self, name: str) -> FileForm | None:
        """Return what a file holds by its name, in capitals or not. None: unknown."""
        # .JSONL and .TXT come from other systems
        lower = name.lower()
        stem, ending = os.path.splitext(lower)
        if ending in SHORT_ENDINGS:
            lower = stem + SHORT_ENDINGS[ending]
            stem, ending = os.path.splitext(lower)
        compression = COMPRESSIONS.get(ending, "")
        # the user's pattern comes before the known endings: source code has .json too
        if self._is_text_file(name):
            return "text", compression
        if compression:
            ending = os.path.splitext(stem)[1]
        kind = KINDS.get(ending)
        # a table is compressed inside; .parquet.gz would have to be unpacked whole
        if kind is None or (compression and kind in UNCOMPRESSED_ONLY):
            return None
        return kind, compression

    def reason_to_pass_over(self, name: str, relative_name: str, form: FileForm | None) -> str | None:
        """Return why a file in a folder or an archive is passed over; None if it is to be read, or refused."""
        if _is_hidden(relative_name):
            return "hidden"
        if self.excludes(name, relative_name):
            return "--exclude"
        if self.text_files is not None and not self._is_text_file(name):
            return "does not match --text-files"
        # they have known endings, and hold no documents
        if _matches_any(name, DESCRIPTIONS):
            return "a description of a dataset"
        if form is not None:
            return None
        return next((reason for reason, patterns in COMPANIONS.items() if _matches_any(name, patterns)), None)

    def excludes(self, name: str, relative_name: str) -> bool:
        return _matches_any(name, self.exclude) or _matches_any(relative_name, self.exclude)

    def refusal(self, name: str, form: FileForm | None, num_bytes: int | None) -> str | None:
        """Return why a file cannot be read, by its name and size, with the remedy; None if it can."""
        if form is None:
            ending = os.path.splitext(name)[1]
            pattern = "*" + ending if ending else name
            return (
                f"{UNKNOWN}; read it as text with --text-files '{pattern}', or leave it out with --exclude '{pattern}'"
            )
        # a text has no fields, so it cannot be a chat
        if form[0] not in self.kinds:
            known = [suffix for suffix, kind in KINDS.items() if kind in self.kinds]
            return f"holds no rows; rows are in {', '.join(known)}, all but tables also compressed; convert it"
        if num_bytes == 0:
            return _empty_file(*form)
        return None

    def _is_text_file(self, name: str) -> bool:
        if self.text_files is None:
            return False
        if fnmatch.fnmatchcase(name, self.text_files):
            return True
        stem, ending = os.path.splitext(name)
        return ending.lower() in COMPRESSIONS and fnmatch.fnmatchcase(stem, self.text_files)


def _matches_any(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _is_hidden(relative_name: str) -> bool:
    parts = set(relative_name.split("/")) - {".", ".."}
    return any(part.startswith(".") for part in parts)


@dataclass
class InputListing:
    """Everything that was found, in the order in which it is read."""

    sources: list[SourceFile] = field(default_factory=list)
    passed_over: list[PassedOver] = field(default_factory=list)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the names within the input and the sizes: the same on every machine that has the same files."""
        digest = hashlib.sha256()
        for source in self.sources:
            # not the content, which has not been read yet
            digest.update(json.dumps([source.relative_name, source.num_bytes]).encode())
        return digest.hexdigest()

    @property
    def num_bytes(self) -> int | None:
        """Bytes to read, None if a size is unknown."""
        total = 0
        for source in self.sources:
            size = source.size
            # one unknown size makes the sum unknown: progress without a total is better than a wrong one
            if size is None:
                return None
            total += size
        return total

    def describe(self) -> str:
        """Return one line for the user: how many files are read, and how many passed over for which reason."""
        text = f"input: {counted(len(self.sources), 'file')}"
        if self.passed_over:
            text += f"; passed over: {reasons_in_words(Counter(skipped.reason for skipped in self.passed_over))}"
        return text


def reasons_in_words(reasons: Counter[str]) -> str:
    """Return such as `3 hidden, 1 documentation`; reasons that name another file are joined."""
    short: Counter[str] = Counter()
    for reason, count in reasons.items():
        # "a second name of a file: PATH" has a path of its own each time
        short[reason.split(": ", 1)[0]] += count
    return ", ".join(f"{count:,} {reason}" for reason, count in short.most_common())


def _empty_file(kind: str, compression: str) -> str | None:
    """Return why a file of 0 bytes is refused; None for a kind of which an empty file is whole."""
    if compression or kind in (*UNCOMPRESSED_ONLY, "tar"):
        return (
            f"has 0 bytes: not a {compression or '.' + kind} file, but a failed download; copy it again, or leave it "
            "out with --exclude"
        )
    return None
