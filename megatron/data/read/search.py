"""Search for the files that hold documents, by paths, folders, globs, URLs and standard input.

Every file found is read, passed over with a reason, or refused by name: none vanishes. A folder often holds more than
documents, so licences, checksums and hidden files are passed over; anything else without a known ending is refused,
because a user who is not stopped there would train on less than was given.
"""

from __future__ import annotations

import glob
import os
import re
import stat
from collections import Counter
from collections.abc import Sequence, Set
from typing import NamedTuple

from megatron.data.index.indexed import DataError
from megatron.data.read import sources
from megatron.data.read.hub_dataset import find_dataset
from megatron.data.read.remote import RemoteFile, find_remote
from megatron.hub.names import is_dataset
from megatron.runtime.files import path_matches

SHOWN_REFUSALS = 10
NAMED_TWICE = "is named twice by --input, as {} too; name it once, or leave it out with --exclude"


def find_sources(inputs: Sequence[str], rules: sources.InputRules | None = None) -> sources.InputListing:
    """Return the files of paths, folders (searched recursively, in order of name), globs, URLs, and "-".

    Links are followed. Raises DataError that names every file which can be neither read nor passed over.
    """
    finder = _Finder(rules or sources.InputRules())
    for given in inputs:
        finder.add(given)
    if not finder.listing.sources and not finder.refused:
        passed = sources.reasons_in_words(Counter(reason for _, reason in finder.listing.passed_over))
        raise DataError(
            f"nothing is left of --input {' '.join(inputs)} (passed over: {passed}); give other files, or exclude less"
        )
    if finder.refused:
        raise _refusal_error(finder.refused)
    return finder.listing


def _refusal_error(refused: Sequence[tuple[str, str]]) -> DataError:
    # all at once, so that one repair is enough
    lines = [f"{name} {reason}" for name, reason in refused[:SHOWN_REFUSALS]]
    if len(refused) > len(lines):
        lines.append(f"and {len(refused) - len(lines)} more")
    if any(sources.UNKNOWN in reason for _, reason in refused):
        lines.append(f"known endings are {sources.KNOWN_NAMES}")
    if len(refused) == 1:
        return DataError("; ".join(lines))
    return DataError("\n  ".join([f"{len(refused)} files of --input cannot be read:", *lines]))


class _Found(NamedTuple):
    """A file or folder that was found before."""

    name: str
    given: str
    """The input that led to it."""


class _Finder:
    """Search for files; a file is known by its device and inode, whatever its name."""

    def __init__(self, rules: sources.InputRules):
        self._rules = rules
        self.listing = sources.InputListing()
        self.refused: list[tuple[str, str]] = []
        self._found: dict[tuple[int, int], _Found] = {}
        self._urls: set[str] = set()
        self._given = ""

    def add(self, given: str) -> None:
        self._given = given
        if given == sources.STDIN:
            self._add_pipe(given, "standard input")
        elif "://" in given:
            self._add_remote(given)
        else:
            self._add_path(given)

    def _add_path(self, path: str) -> None:
        status = _status(path)
        if status is None:
            self._add_matches(path)
        elif stat.S_ISDIR(status.st_mode):
            self._add_folder(path)
        elif stat.S_ISFIFO(status.st_mode):
            self._add_pipe(path, path)
        else:
            name = os.path.basename(path)
            # only --exclude: a file that the user names is read, hidden or not
            if self._rules.excludes(name, name):  # a shell wrote the names of a pattern out
                self._pass_over(path, "--exclude")
            else:
                self._add_file(path, name, name, status, self._rules.form(name))

    def _pass_over(self, name: str, reason: str) -> None:
        self.listing.passed_over.append(sources.PassedOver(name, reason))

    def _add_matches(self, pattern: str) -> None:
        parts = pattern.split("/")
        # any number of folders
        if "**" in parts:
            self._add_matches_below(pattern, parts, parts.index("**"))
            return
        # the caller has looked for a name without a wildcard already
        matches = sorted(glob.glob(pattern)) if glob.has_magic(pattern) else []
        if not matches:
            raise _nothing_matches(pattern)
        top = re.split(r"[*?[]", pattern, maxsplit=1)[0].rpartition("/")[0]
        folders = []
        for match in matches:
            if os.path.isdir(match):
                folders.append(match)
            else:
                self._add_entry(match, os.path.basename(match), match.removeprefix(top).lstrip("/"))
        for folder in folders:
            self._walk(folder)

    def _add_matches_below(self, pattern: str, parts: Sequence[str], depth: int) -> None:
        """Add what matches a pattern with `**` at this depth; Python's own glob would follow links in a circle."""
        # the search of folders follows links once, and has the same rules
        top = "."
        if depth:
            top = "/".join(parts[:depth]) or "/"
        num_before = self._num_found()
        for folder in sorted(glob.glob(top)):
            if os.path.isdir(folder):
                self._walk(folder, parts[depth:])
        if self._num_found() == num_before:
            raise _nothing_matches(pattern)

    def _num_found(self) -> int:
        return len(self.listing.sources) + len(self.listing.passed_over) + len(self.refused)

    def _add_folder(self, folder: str) -> None:
        # a folder of which all is passed over is a mistake, one with refused files has an error of its own
        num_sources, num_refused = len(self.listing.sources), len(self.refused)
        num_passed_over = len(self.listing.passed_over)
        self._walk(folder)
        if len(self.listing.sources) > num_sources or len(self.refused) > num_refused:
            return
        skipped = Counter(reason for _, reason in self.listing.passed_over[num_passed_over:])
        passed = f" (passed over: {sources.reasons_in_words(skipped)})" if skipped else ""
        wanted = self._rules.text_files or sources.KNOWN_NAMES
        raise DataError(f"{folder} holds no {wanted}{passed}; give another folder, or --text-files 'PATTERN'")

    def _walk(self, top: str, wanted: Sequence[str] = ("**",)) -> None:
        """Add the files below a folder: those of a folder before its subfolders, each in order of name.

        Those are left out whose name below it does not match `wanted`, the parts of a glob.
        """
        # a separator at the end, whether the user gave one or not
        root = os.path.join(top, "")
        left = [top]
        while left:
            entries = self._new_entries(left.pop())
            datasets = {entry.name.removesuffix(".idx") for entry in entries if entry.name.endswith(".idx")}
            folders = []
            for entry in entries:
                # relative to what the user gave: the same on every machine
                relative_name = entry.path[len(root) :]
                if _is_folder(entry):
                    reason = self._reason_to_skip_folder(entry, relative_name)
                    if reason is None:
                        folders.append(entry.path)
                    else:
                        self._pass_over(entry.path + "/", reason)
                elif not path_matches(relative_name.split("/"), wanted):
                    continue
                elif _is_of_dataset(entry.name, datasets):
                    self._pass_over(entry.path, "an indexed dataset")
                else:
                    self._add_entry(entry.path, entry.name, relative_name)
            # a stack: the first folder is searched next, with all below it
            left += reversed(folders)

    def _new_entries(self, folder: str) -> list[os.DirEntry[str]]:
        """Return the entries of a folder in order of name; none if it was found before, or cannot be searched."""
        try:
            with os.scandir(folder) as scan:
                entries = sorted(scan, key=lambda entry: entry.name)
            status = os.stat(folder)
        except OSError as error:
            self.refused.append((folder, f"cannot be searched: {error.strerror}; correct its permissions"))
            return []
        # links are followed, also in a circle
        identity = (status.st_dev, status.st_ino)
        earlier = self._found.get(identity)
        if earlier is None:
            self._found[identity] = _Found(folder, self._given)
            return entries
        reason = f"a second name of a folder: {earlier.name}"
        if os.path.join(folder, "").startswith(os.path.join(earlier.name, "")):
            reason = f"a loop of links: leads back to {earlier.name}"
        self._add_again(folder, earlier, reason, os.path.join(folder, ""))
        return []

    def _add_again(self, path: str, earlier: _Found, reason: str, shown: str) -> None:
        """Pass over what one input leads to twice; refuse what two inputs name, of which one may be a mistake."""
        if earlier.given == self._given:
            self._pass_over(shown, reason)
        else:
            self.refused.append((path, NAMED_TWICE.format(earlier.name)))

    def _reason_to_skip_folder(self, entry: os.DirEntry[str], relative_name: str) -> str | None:
        if entry.name.startswith("."):
            return "hidden"
        if self._rules.excludes(entry.name, relative_name):
            return "--exclude"
        if entry.name.endswith(".unfinished") and os.path.exists(os.path.join(entry.path, "lock")):
            return "unfinished work of this tool"
        return None

    def _add_entry(self, path: str, name: str, relative_name: str) -> None:
        """Add a file that was found, not named by the user."""
        form = self._rules.form(name)
        reason = self._rules.reason_to_pass_over(name, relative_name, form)
        if reason is not None:
            self._pass_over(path, reason)
            return
        try:
            status = os.stat(path)
        except OSError as error:
            why = f"cannot be read: {error.strerror}"
            if os.path.islink(path):
                why = f"is a broken link to {os.readlink(path)}"
            self.refused.append((path, f"{why}; repair it, or leave it out with --exclude '{name}'"))
            return
        self._add_file(path, name, relative_name, status, form)

    def _add_file(
        self, path: str, name: str, relative_name: str, status: os.stat_result, form: sources.FileForm | None
    ) -> None:
        identity = (status.st_dev, status.st_ino)
        earlier = self._found.get(identity)
        if earlier is not None:
            self._add_again(path, earlier, f"a second name of a file: {earlier.name}", path)
            return
        if not stat.S_ISREG(status.st_mode):
            refusal: str | None = "is a pipe, socket or device; give files, or leave it out with --exclude"
        else:
            refusal = self._rules.refusal(name, form, status.st_size)
        # hours later it would be an error in the middle of the work
        if refusal is None and not os.access(path, os.R_OK):
            refusal = "cannot be read: Permission denied; correct its permissions, or leave it out"
        if refusal is not None:
            self.refused.append((path, refusal))
            return
        assert form is not None  # the rules refuse a name without one
        self._found[identity] = _Found(path, self._given)
        # with the size: a changed file is noticed when a run is resumed
        version = str(status.st_mtime_ns)
        self.listing.sources.append(sources.SourceFile(path, *form, status.st_size, "file", relative_name, version))

    def _add_pipe(self, given: str, name: str) -> None:
        if any(source.transport == "pipe" and source.name == name for source in self.listing.sources):
            self.refused.append((name, "is named twice by --input; name it once"))
            return
        filename = self._rules.stdin_filename
        form = self._rules.form(filename)
        is_refused = self._rules.refusal(filename, form, None) is not None
        if form is None or is_refused or form[0] in sources.UNCOMPRESSED_ONLY:
            known = [suffix for suffix, kind in sources.KINDS.items() if kind not in sources.UNCOMPRESSED_ONLY]
            raise DataError(
                f"--stdin-filename {filename}: a pipe can be read as {', '.join(known)}, also compressed; give a name "
                "with one of these endings"
            )
        self.listing.sources.append(sources.SourceFile(name, *form, None, "pipe", given))

    def _add_remote(self, url: str) -> None:
        found = find_dataset(url) if is_dataset(url) else find_remote(url)
        for file, is_named in found:
            self._add_remote_file(file, is_named)

    def _add_remote_file(self, file: RemoteFile, is_named: bool) -> None:
        name = file.name.rsplit("/", 1)[-1].split("?")[0]
        form = self._rules.form(name)
        if not is_named:
            reason = self._rules.reason_to_pass_over(name, file.relative_name, form)
            if reason is not None:
                self._pass_over(file.name, reason)
                return
        refusal = self._rules.refusal(name, form, file.num_bytes)
        if file.kind != "file":
            refusal = f"is a link, pipe or device; give the file itself, or leave it out with --exclude '{name}'"
        elif refusal is None and file.name in self._urls:
            refusal = "is named twice by --input; name it once"
        if refusal is not None:
            self.refused.append((file.name, refusal))
            return
        assert form is not None  # the rules refuse a name without one
        self._urls.add(file.name)
        self.listing.sources.append(
            sources.SourceFile(file.name, *form, file.num_bytes, "url", file.relative_name, file.version)
        )


DATASET_ENDINGS = (".idx", ".bin", ".sha256", ".manifest.json")


def _is_of_dataset(name: str, datasets: Set[str]) -> bool:
    """Return true for a file of one of these indexed datasets."""
    return any(name.endswith(ending) and name.removesuffix(ending) in datasets for ending in DATASET_ENDINGS)


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
