"""PREFIX.sha256: the checksums of an indexed dataset, and notes about it."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.data.index.indexed import DataError

ReportBytes = Callable[[int], object]
"""Called with the number of bytes processed since the previous call."""

COPY_BYTES = 4 << 20


def file_blocks(path: Path, size: int) -> Iterator[memoryview]:
    """Yield the first `size` bytes of a file in blocks, each valid until the next."""
    buffer = memoryview(bytearray(min(COPY_BYTES, size)))
    with path.open("rb") as file:
        while size:
            count = file.readinto(buffer[:size])
            if not count:
                raise DataError(f"{path} ends {size} bytes too early; it was changed while it was read")
            yield buffer[:count]
            size -= count


@dataclass(frozen=True)
class Checksums:
    """Content of PREFIX.sha256."""

    sha256: dict[str, str]
    """Hexadecimal digests of ".bin" and ".idx"."""
    notes: dict[str, Any]
    """Notes of the builder about the data, such as its tokenizer."""

    def content(self, name: str) -> bytes:
        """Return the content of the file for a dataset of this name."""
        lines = [_checksum_line(digest, name + suffix) for suffix, digest in self.sha256.items()]
        return note_lines(self.notes) + b"".join(lines)

    def compare(self, prefix: str, suffix: str, sha256: str) -> None:
        """Raise DataError unless the SHA-256 of that file is the recorded one."""
        if sha256 != self.sha256[suffix]:
            raise DataError(
                f"{prefix}{suffix} has the SHA-256 {sha256[:12]}…, not {self.sha256[suffix][:12]}… as {prefix}.sha256 "
                "says: it was changed, or belongs to another dataset; copy all three files again"
            )


def file_sha256(path: str | Path, progress: ReportBytes | None = None) -> str:
    """Return the SHA-256 of a whole file, in hexadecimal."""
    digest = hashlib.sha256()
    for block in file_blocks(Path(path), os.path.getsize(path)):
        digest.update(block)
        if progress:
            progress(len(block))
    return digest.hexdigest()


REMEDY = "delete it, or copy it again"
_CHECKSUM_LINE = re.compile(r"\\?([0-9a-f]{64}) [ *].*(\.bin|\.idx)")
_NOTE_LINE = re.compile(r"# ([A-Za-z_][A-Za-z0-9_]*): (.*)")


def read_checksums(prefix: str | Path) -> Checksums | None:
    """Read PREFIX.sha256, in the format of `sha256sum`; None if it is missing, as for datasets written by Megatron.

    Only the suffixes of the names in it count: the dataset may have been renamed. Raises DataError naming the line.
    """
    path = Path(f"{prefix}.sha256")
    try:
        # names need not be UTF-8: sha256sum writes a file's name as it is
        text = os.fsdecode(path.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    digests: dict[str, str] = {}
    notes: dict[str, Any] = {}
    # not splitlines, which also cuts at characters that a name may hold
    for number, line in enumerate(text.removesuffix("\n").split("\n"), start=1):
        place = f"{path}:{number}"
        if line.startswith("#"):
            note = _NOTE_LINE.fullmatch(line)
            if note is None:  # a comment of the user's
                continue
            try:
                notes[note[1]] = json.loads(note[2])
            except (ValueError, RecursionError) as error:
                raise DataError(f"{place}: the note {note[1]!r} is not JSON ({error}); {REMEDY}") from None
            continue
        checksum = _CHECKSUM_LINE.fullmatch(line)
        if checksum is None:
            raise DataError(f"{place}: {line[:80]!r} is not a line of sha256sum for a .bin or .idx; {REMEDY}")
        # of two lines for one file, one would count by chance
        if checksum[2] in digests:
            raise DataError(f"{place}: {line[:80]!r} is a second one for {checksum[2]}; {REMEDY}")
        digests[checksum[2]] = checksum[1]
    for suffix in (".bin", ".idx"):
        if suffix not in digests:
            raise DataError(f"{path} has no line for the {suffix}; {REMEDY}")
    return Checksums(digests, notes)


def note_lines(notes: Mapping[str, Any]) -> bytes:
    text = ""
    for name, value in notes.items():
        line = f"# {name}: {json.dumps(value)}"
        if not _NOTE_LINE.fullmatch(line):
            raise ValueError(f"note {name!r} cannot be written; its name must be letters, digits and underscores")
        text += line + "\n"
    return text.encode()


def _checksum_line(digest: str, name: str) -> bytes:
    """Return the line that sha256sum writes: special characters are escaped, marked by a leading backslash."""
    escaped = name.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r")
    mark = "" if escaped == name else "\\"
    return os.fsencode(f"{mark}{digest}  {escaped}\n")
