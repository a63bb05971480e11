"""The files that hold documents, found by paths, folders and globs."""

from __future__ import annotations

import fnmatch
import glob
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megatron.data.indexed import DataError

Kind = Literal["jsonl", "text", "parquet"]
Compression = Literal["", ".gz", ".zst"]

KINDS: dict[str, Kind] = {
    ".jsonl": "jsonl",
    ".json": "jsonl",
    ".ndjson": "jsonl",
    ".txt": "text",
    ".parquet": "parquet",
}
COMPRESSIONS: tuple[Compression, ...] = (".gz", ".zst")
KNOWN_NAMES = f"{', '.join('*' + suffix for suffix in KINDS)}; all but *.parquet also with .gz or .zst after it"


@dataclass(frozen=True)
class SourceFile:
    """A file of documents."""

    path: Path
    kind: Kind
    compression: Compression = ""


def find_sources(inputs: Sequence[str], text_files: str | None = None) -> list[SourceFile]:
    """Return the files of paths, folders (searched recursively, in order of name) and globs.

    With `text_files`, such as '*.py', matching files are text, and folders are searched for them only. Without it the
    suffix of a name decides, and other files of a folder are ignored. Raises DataError, also for a file that cannot be
    opened.
    """
    sources: list[SourceFile] = []
    for given in inputs:
        mode = _mode(given)
        if mode is not None and stat.S_ISDIR(mode):
            found = [s for s in (_source(path, text_files) for path in _files_below(given)) if s]
            if not found:
                raise DataError(
                    f"{given} holds no {text_files or KNOWN_NAMES}; give another folder, or --text-files 'PATTERN'"
                )
            sources += found
        elif mode is not None and not stat.S_ISREG(mode):
            raise DataError(f"{given} is a pipe or a device, which cannot be read twice; give a file")
        elif mode is not None:
            sources.append(_named_source(Path(given), text_files))
        else:
            matches = sorted(filter(os.path.isfile, glob.glob(given, recursive=True)))
            if not matches:
                raise DataError(f"{given} does not exist, and as a pattern matches no file; correct --input")
            sources += [_named_source(Path(match), text_files) for match in matches]
    seen: set[Path] = set()
    for source in sources:
        real = source.path.resolve()
        if real in seen:
            raise DataError(f"{source.path} is named twice by --input; name it once")
        seen.add(real)
        try:
            source.path.open("rb").close()
        except OSError as error:
            raise unreadable(source, error) from error
    return sources


def _mode(path: str) -> int | None:
    """Return the mode of a path, None if it does not exist."""
    try:
        return os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}; correct its permissions, or --input") from error


def _files_below(folder: str) -> Iterator[Path]:
    for parent, folders, files in os.walk(folder):
        folders.sort()
        yield from (Path(parent) / name for name in sorted(files))


def _source(path: Path, text_files: str | None) -> SourceFile | None:
    compression: Compression = next((c for c in COMPRESSIONS if path.name.endswith(c)), "")
    name = path.name.removesuffix(compression)
    if text_files is not None:
        is_text = fnmatch.fnmatch(path.name, text_files) or fnmatch.fnmatch(name, text_files)
        return SourceFile(path, "text", compression) if is_text else None
    kind = KINDS.get(os.path.splitext(name)[1])
    if kind is None or (kind == "parquet" and compression):
        return None
    return SourceFile(path, kind, compression)


def _named_source(path: Path, text_files: str | None) -> SourceFile:
    source = _source(path, text_files) or _source(path, None)
    if source is None:
        raise DataError(
            f"{path} has an unknown suffix; known are {KNOWN_NAMES}: rename it, or pass --text-files '*{path.suffix}' "
            "to read it as text"
        )
    return source


def unreadable(source: SourceFile, error: OSError) -> DataError:
    return DataError(f"{source.path} cannot be read: {error.strerror or error}; repair the file, or leave it out")
