"""The files that hold documents, found by paths, folders, globs, URLs and standard input.

Every file found is read, passed over with a reason, or refused by name: none vanishes. A folder often holds more than
documents, so licences, checksums and hidden files are passed over; anything else without a known ending is refused,
because a user who is not stopped there would train on less than was given.
"""

from __future__ import annotations

import fnmatch
import glob
import hashlib
import json
import os
import re
import stat
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple

from megatron.data.index.indexed import DataError
from megatron.runtime.files import path_matches

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
DESCRIPTIONS = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json", "cache-*.arrow")
"""Files of Hugging Face's datasets that describe a downloaded or saved dataset, or cache another form of it."""
"""Files without a known ending that come with data and hold none."""
STDIN = "-"
STDIN_FILENAME = "stdin.jsonl"
SHOWN_REFUSALS = 10
UNKNOWN = "has an unknown ending"
NAMED_TWICE = "is named twice by --input, as {} too; name it once, or leave it out with --exclude"


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
        scheme, _, rest = self.name.split("?")[0].partition("://")
        host, slash, path = rest.partition("/")
        return f"{scheme}://{host.rpartition('@')[2]}{slash}{path}"

    @property
    def size(self) -> int | None:
        """Bytes to read. None: unknown."""
        return self.num_bytes if self.part is None else self.part[1] - self.part[0]


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
        lower = name.lower()
        stem, ending = os.path.splitext(lower)
        if ending in SHORT_ENDINGS:
            lower = stem + SHORT_ENDINGS[ending]
            stem, ending = os.path.splitext(lower)
        compression = COMPRESSIONS.get(ending, "")
        if self._is_text_file(name):
            return "text", compression
        kind = KINDS.get(os.path.splitext(stem)[1] if compression else ending)
        return None if kind is None or (compression and kind in UNCOMPRESSED_ONLY) else (kind, compression)

    def reason_to_pass_over(self, name: str, relative_name: str, form: FileForm | None) -> str | None:
        """Return why a file in a folder or an archive is passed over; None if it is to be read, or refused."""
        if any(part.startswith(".") for part in relative_name.split("/") if part not in ("", ".", "..")):
            return "hidden"
        if self.excludes(name, relative_name):
            return "--exclude"
        if self.text_files is not None and not self._is_text_file(name):
            return "does not match --text-files"
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in DESCRIPTIONS):
            return "a description of a dataset"
        if form is None:
            for reason, patterns in COMPANIONS.items():
                if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns):
                    return reason
        return None

    def excludes(self, name: str, relative_name: str) -> bool:
        return any(fnmatch.fnmatch(name, p) or fnmatch.fnmatch(relative_name, p) for p in self.exclude)

    def refusal(self, name: str, form: FileForm | None, num_bytes: int | None) -> str | None:
        """Return why a file cannot be read, by its name and size, with the remedy; None if it can."""
        if form is None:
            ending = os.path.splitext(name)[1]
            pattern = "*" + ending if ending else name
            return (
                f"{UNKNOWN}; read it as text with --text-files '{pattern}', or leave it out with --exclude '{pattern}'"
            )
        if form[0] not in self.kinds:
            known = [suffix for suffix, kind in KINDS.items() if kind in self.kinds]
            return f"holds no rows; rows are in {', '.join(known)}, all but tables also compressed; convert it"
        return empty_file(*form) if num_bytes == 0 else None

    def _is_text_file(self, name: str) -> bool:
        if self.text_files is None:
            return False
        stem, ending = os.path.splitext(name)
        bare = stem if ending.lower() in COMPRESSIONS else name
        return fnmatch.fnmatch(name, self.text_files) or fnmatch.fnmatch(bare, self.text_files)


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
            digest.update(json.dumps([source.relative_name, source.num_bytes]).encode())
        return digest.hexdigest()

    @property
    def num_bytes(self) -> int | None:
        """Bytes to read, None if a size is unknown."""
        total = 0
        for source in self.sources:
            size = source.size
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


def counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def reasons_in_words(reasons: Counter[str]) -> str:
    """Return such as `3 hidden, 1 documentation`; reasons that name another file are joined."""
    short: Counter[str] = Counter()
    for reason, count in reasons.items():
        short[reason.split(": ", 1)[0]] += count
    return ", ".join(f"{count:,} {reason}" for reason, count in short.most_common())


def find_sources(inputs: Sequence[str], rules: InputRules | None = None) -> InputListing:
    """Return the files of paths, folders (searched recursively, in order of name), globs, URLs, and "-".

    Links are followed. Raises DataError that names every file which can be neither read nor passed over.
    """
    finder = _Finder(rules or InputRules())
    for given in inputs:
        finder.add(given)
    if not finder.listing.sources and not finder.refused:
        passed = reasons_in_words(Counter(reason for _, reason in finder.listing.passed_over))
        raise DataError(
            f"nothing is left of --input {' '.join(inputs)} (passed over: {passed}); give other files, or exclude less"
        )
    if finder.refused:
        raise _refusal_error(finder.refused)
    return finder.listing


def _refusal_error(refused: Sequence[tuple[str, str]]) -> DataError:
    lines = [f"{name} {reason}" for name, reason in refused[:SHOWN_REFUSALS]]
    if len(refused) > len(lines):
        lines.append(f"and {len(refused) - len(lines)} more")
    if any(UNKNOWN in reason for _, reason in refused):
        lines.append(f"known endings are {KNOWN_NAMES}")
    if len(refused) == 1:
        return DataError("; ".join(lines))
    return DataError("\n  ".join([f"{len(refused)} files of --input cannot be read:", *lines]))


class _Finder:
    """Search for files; a file is known by its device and inode, whatever its name."""

    def __init__(self, rules: InputRules):
        self._rules = rules
        self.listing = InputListing()
        self.refused: list[tuple[str, str]] = []
        self._found: dict[tuple[int, int], tuple[str, str]] = {}
        """File -> its name, and the input that it was found by."""
        self._urls: set[str] = set()
        self._given = ""

    def add(self, given: str) -> None:
        self._given = given
        if given == STDIN:
            self._add_pipe(given, "standard input")
        elif "://" in given:
            self._add_remote(given)
        elif (status := _status(given)) is None:
            self._add_matches(given)
        elif stat.S_ISDIR(status.st_mode):
            self._add_folder(given)
        elif stat.S_ISFIFO(status.st_mode):
            self._add_pipe(given, given)
        else:
            name = os.path.basename(given)
            if self._rules.excludes(name, name):  # a shell wrote the names of a pattern out
                self.listing.passed_over.append(PassedOver(given, "--exclude"))
            else:
                self._add_file(given, name, name, status, self._rules.form(name))

    def _add_matches(self, pattern: str) -> None:
        parts = pattern.split("/")
        if "**" in parts:
            self._add_matches_below(pattern, parts, parts.index("**"))
            return
        matches = sorted(glob.glob(pattern)) if glob.has_magic(pattern) else []
        folders = [match for match in matches if os.path.isdir(match)]
        matches = [match for match in matches if not os.path.isdir(match)]
        if not matches and not folders:
            raise _nothing_matches(pattern)
        top = re.split(r"[*?[]", pattern, maxsplit=1)[0].rpartition("/")[0]
        for match in matches:
            self._add_entry(match, os.path.basename(match), match.removeprefix(top).lstrip("/"))
        for folder in folders:
            self._walk(folder)

    def _add_matches_below(self, pattern: str, parts: Sequence[str], depth: int) -> None:
        """Add what matches a pattern with `**` at this depth; Python's own glob would follow links in a circle."""
        top = "/".join(parts[:depth]) or ("/" if depth else ".")
        num_before = self._num_found()
        for folder in sorted(glob.glob(top)):
            if os.path.isdir(folder):
                self._walk(folder, parts[depth:])
        if self._num_found() == num_before:
            raise _nothing_matches(pattern)

    def _num_found(self) -> int:
        return len(self.listing.sources) + len(self.listing.passed_over) + len(self.refused)

    def _add_folder(self, folder: str) -> None:
        before = len(self.listing.sources), len(self.listing.passed_over), len(self.refused)
        self._walk(folder)
        if (len(self.listing.sources), len(self.refused)) == (before[0], before[2]):
            skipped = Counter(reason for _, reason in self.listing.passed_over[before[1] :])
            passed = f" (passed over: {reasons_in_words(skipped)})" if skipped else ""
            wanted = self._rules.text_files or KNOWN_NAMES
            raise DataError(f"{folder} holds no {wanted}{passed}; give another folder, or --text-files 'PATTERN'")

    def _walk(self, top: str, wanted: Sequence[str] = ("**",)) -> None:
        """Add the files below a folder: those of a folder before its subfolders, each in order of name.

        Those are left out whose name below it does not match `wanted`, the parts of a glob.
        """
        root = os.path.join(top, "")
        left = [top]
        while left:
            folder = left.pop()
            try:
                with os.scandir(folder) as entries:
                    found = sorted(entries, key=lambda entry: entry.name)
                status = os.stat(folder)
            except OSError as error:
                self.refused.append((folder, f"cannot be searched: {error.strerror}; correct its permissions"))
                continue
            if not self._is_new_folder(folder, status):
                continue
            datasets = {entry.name[:-4] for entry in found if entry.name.endswith(".idx")}
            folders = []
            for entry in found:
                relative_name = entry.path[len(root) :]
                if _is_folder(entry):
                    if reason := self._reason_to_skip_folder(entry, relative_name):
                        self.listing.passed_over.append(PassedOver(entry.path + "/", reason))
                    else:
                        folders.append(entry.path)
                elif not path_matches(relative_name.split("/"), wanted):
                    continue
                elif any(
                    entry.name.removesuffix(end) in datasets for end in DATASET_ENDINGS if entry.name.endswith(end)
                ):
                    self.listing.passed_over.append(PassedOver(entry.path, "an indexed dataset"))
                else:
                    self._add_entry(entry.path, entry.name, relative_name)
            left += reversed(folders)

    def _reason_to_skip_folder(self, entry: os.DirEntry[str], relative_name: str) -> str | None:
        if entry.name.startswith("."):
            return "hidden"
        if self._rules.excludes(entry.name, relative_name):
            return "--exclude"
        if entry.name.endswith(".unfinished") and os.path.exists(os.path.join(entry.path, "lock")):
            return "unfinished work of this tool"
        return None

    def _is_new_folder(self, folder: str, status: os.stat_result) -> bool:
        identity = (status.st_dev, status.st_ino)
        if identity not in self._found:
            self._found[identity] = folder, self._given
            return True
        known, given = self._found[identity]
        is_loop = os.path.join(folder, "").startswith(os.path.join(known, ""))
        if given != self._given:
            self.refused.append((folder, NAMED_TWICE.format(known)))
            return False
        reason = f"a loop of links: leads back to {known}" if is_loop else f"a second name of a folder: {known}"
        self.listing.passed_over.append(PassedOver(os.path.join(folder, ""), reason))
        return False

    def _add_entry(self, path: str, name: str, relative_name: str) -> None:
        """Add a file that was found, not named by the user."""
        form = self._rules.form(name)
        if reason := self._rules.reason_to_pass_over(name, relative_name, form):
            self.listing.passed_over.append(PassedOver(path, reason))
            return
        try:
            status = os.stat(path)
        except OSError as error:
            broken = os.path.islink(path)
            why = f"is a broken link to {os.readlink(path)}" if broken else f"cannot be read: {error.strerror}"
            self.refused.append((path, f"{why}; repair it, or leave it out with --exclude '{name}'"))
            return
        self._add_file(path, name, relative_name, status, form)

    def _add_file(
        self, path: str, name: str, relative_name: str, status: os.stat_result, form: FileForm | None
    ) -> None:
        identity = (status.st_dev, status.st_ino)
        known = self._found.get(identity)
        if known is not None:
            if known[1] == self._given:
                self.listing.passed_over.append(PassedOver(path, f"a second name of a file: {known[0]}"))
            else:
                self.refused.append((path, NAMED_TWICE.format(known[0])))
            return
        if not stat.S_ISREG(status.st_mode):
            reason: str | None = "is a pipe, socket or device; give files, or leave it out with --exclude"
        else:
            reason = self._rules.refusal(name, form, status.st_size)
        if reason is None and not os.access(path, os.R_OK):
            reason = "cannot be read: Permission denied; correct its permissions, or leave it out"
        if reason is not None or form is None:
            self.refused.append((path, reason or ""))
            return
        self._found[identity] = path, self._given
        version = str(status.st_mtime_ns)
        self.listing.sources.append(SourceFile(path, *form, status.st_size, "file", relative_name, version))

    def _add_pipe(self, given: str, name: str) -> None:
        if any(source.transport == "pipe" and source.name == name for source in self.listing.sources):
            self.refused.append((name, "is named twice by --input; name it once"))
            return
        filename = self._rules.stdin_filename
        form = self._rules.form(filename)
        reason = self._rules.refusal(filename, form, None)
        if reason is not None or form is None or form[0] in UNCOMPRESSED_ONLY:
            known = [suffix for suffix, kind in KINDS.items() if kind not in UNCOMPRESSED_ONLY]
            raise DataError(
                f"--stdin-filename {filename}: a pipe can be read as {', '.join(known)}, also compressed; give a name "
                "with one of these endings"
            )
        self.listing.sources.append(SourceFile(name, *form, None, "pipe", given))

    def _add_remote(self, url: str) -> None:
        from megatron.data.read.remote import find_remote

        for found, is_named in find_remote(url):
            name = found.name.rsplit("/", 1)[-1].split("?")[0]
            form = self._rules.form(name)
            if not is_named and (reason := self._rules.reason_to_pass_over(name, found.relative_name, form)):
                self.listing.passed_over.append(PassedOver(found.name, reason))
                continue
            reason = self._rules.refusal(name, form, found.num_bytes)
            if found.kind != "file":
                reason = f"is a link, pipe or device; give the file itself, or leave it out with --exclude '{name}'"
            if reason is not None or form is None:
                self.refused.append((found.name, reason or ""))
                continue
            if found.name in self._urls:
                self.refused.append((found.name, "is named twice by --input; name it once"))
                continue
            self._urls.add(found.name)
            self.listing.sources.append(
                SourceFile(found.name, *form, found.num_bytes, "url", found.relative_name, found.version)
            )


DATASET_ENDINGS = (".idx", ".bin", ".sha256", ".manifest.json")


def empty_file(kind: str, compression: str) -> str | None:
    """Return why a file of 0 bytes is refused; None for a kind of which an empty file is whole."""
    if compression or kind in (*UNCOMPRESSED_ONLY, "tar"):
        return (
            f"has 0 bytes: not a {compression or '.' + kind} file, but a failed download; copy it again, or leave it "
            "out with --exclude"
        )
    return None


def _nothing_matches(pattern: str) -> DataError:
    return DataError(f"{pattern} does not exist, and as a pattern matches no file; correct --input")


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:
        return False


def _status(path: str) -> os.stat_result | None:
    """Return the status of a path, None if it does not exist."""
    try:
        return os.stat(path)
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}; correct its permissions, or --input") from error
