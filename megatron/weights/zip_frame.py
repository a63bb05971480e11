"""The frame of a file of torch.save: a zip of uncompressed entries, of whose bytes none is left unchecked.

An entry is a local header, the name, padding, the content, a descriptor (CRC-32 and sizes). The directory and its end
follow the last. The headers repeat what the directory says, and nothing lies between them, so a changed bit in any of
them is found; the contents have checksums.

Python's zipfile looks entries up by the directory alone: damaged headers and bytes between entries would pass.

Source: PKWARE's APPNOTE.TXT 6.3.10; caffe2/serialize/inline_container.cc of PyTorch
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from megatron.checkpoint.folders import CheckpointError

_LOCAL = struct.Struct("<4s5H3I2H")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_END = struct.Struct("<4s4H2IH")
_LOCATOR = struct.Struct("<4sIQI")
_END_64 = struct.Struct("<4sQ2H2I4Q")
_MAX_16, _MAX_32 = 0xFFFF, 0xFFFFFFFF
"""In place of a number that is in a field of large numbers instead."""
_HAS_DESCRIPTOR, _UTF_8 = 0x8, 0x800
"""Flags of an entry."""
_STORED = 0
"""The method without compression."""
_ZIP_64, _PADDING = 0x1, 0x4246
"""Kinds of extra fields: large sizes, and torch's padding, "FB", by which tensors lie at multiples of 64 bytes."""


@dataclass(frozen=True)
class ZipEntry:
    """One entry of the zip: a pickle, a tensor's storage, or a version number."""

    name: str
    start: int
    """Offset of its content in the file."""
    num_bytes: int
    crc32: int


class _Repeated(NamedTuple):
    """Fields of the directory that an entry's local header repeats."""

    version: int
    flags: int
    method: int
    time: int
    date: int


class _DamageError(Exception):
    """The frame is not whole. Says where."""


@dataclass(frozen=True)
class _Stretch:
    """The bytes of an open file that a zip takes. Offsets are the zip's own."""

    descriptor: int
    begin: int
    size: int

    def read(self, num_bytes: int, offset: int) -> bytes:
        """Return the bytes that there are."""
        count = max(0, min(num_bytes, self.size - offset))
        return os.pread(self.descriptor, count, self.begin + offset)


def zip_entries(descriptor: int, where: Path | str, at: tuple[int, int] | None = None) -> list[ZipEntry] | None:
    """Return the entries of the zip in an open file, in their order; None: it is another file.

    `at`: offset and number of the bytes that the zip takes, if not all of the file. Raises CheckpointError, naming
    `where`, if the frame is not whole.
    """
    begin, size = at or (0, os.fstat(descriptor).st_size)
    stretch = _Stretch(descriptor, begin, size)
    begins = stretch.read(4, 0) == b"PK\3\4"
    end = stretch.read(_END.size, max(0, size - _END.size))
    # one of both ends is enough: a zip that was cut short, or whose first bytes changed, is a damaged zip
    if not begins and not end.startswith(b"PK\5\6"):
        return None
    try:
        return list(_entries(stretch, end))
    except _DamageError as error:
        reason = str(error)
    except (struct.error, OverflowError, UnicodeDecodeError):
        reason = "its entries cannot be read"
    raise CheckpointError(f"{where} is damaged or truncated: {reason}; copy it again from its source")


def _need(is_right: bool, fault: str) -> None:
    if not is_right:
        raise _DamageError(fault)


def _entries(stretch: _Stretch, end: bytes) -> Iterator[ZipEntry]:
    number, directory_start, directory_stop = _directory(stretch, end)
    directory = stretch.read(directory_stop - directory_start, directory_start)
    _need(len(directory) == directory_stop - directory_start, "it ends within its directory")
    position = 0
    expected_offset, constants, names = 0, None, set()
    for _ in range(number):
        fields = _CENTRAL.unpack_from(directory, position)
        mark, made_by, header = fields[0], fields[1], _Repeated(*fields[2:7])
        crc32, packed, full, name_size, extra_size, comment_size, disk, inner, outer, offset = fields[7:]
        position += _CENTRAL.size
        name = directory[position : position + name_size]
        extra = directory[position + name_size : position + name_size + extra_size]
        position += name_size + extra_size
        if _MAX_32 in (packed, full, offset):
            full, packed, offset = _large(extra, full, packed, offset)
        else:
            _need(not extra, "its directory holds unknown fields")
        # what says nothing of the content is the same in all entries
        own = (made_by, inner, outer)
        constants = constants or own
        _need(
            mark == b"PK\1\2" and not comment_size and not disk and own == constants,
            "its directory is not as torch.save writes it",
        )
        is_stored = header.method == _STORED and packed == full
        _need(is_stored, "it holds a compressed entry, which torch.save does not write")
        # entries follow each other, so that no byte lies between them unchecked
        _need(offset == expected_offset, f"its directory has {name!r} at {offset}, not at {expected_offset}")
        # readers differ in which of two counts
        _need(name not in names, f"it holds its entry {name!r} twice")
        names.add(name)
        start, expected_offset = _local(stretch, offset, name, header, crc32, full)
        yield ZipEntry(name.decode(), stretch.begin + start, full, crc32)
    is_full = position == len(directory) and expected_offset == directory_start
    _need(is_full, "its entries and its directory leave a gap")


def _directory(stretch: _Stretch, end: bytes) -> tuple[int, int, int]:
    """Return the number of entries, and begin and end of the directory."""
    mark, disk, disk_2, number, number_2, num_bytes, start, comment_size = _END.unpack(end)
    _need(
        mark == b"PK\5\6" and (disk, disk_2, comment_size) == (0, 0, 0) and number == number_2,
        "it does not end with a zip's directory",
    )
    stop = stretch.size - _END.size
    locator = stretch.read(_LOCATOR.size, max(0, stop - _LOCATOR.size))
    # a large zip has a second end with large numbers, and a locator of it, before the first
    if locator.startswith(b"PK\6\7"):
        _, disk, at, disks = _LOCATOR.unpack(locator)
        fields = _END_64.unpack(stretch.read(_END_64.size, at))
        mark, length, made_by, needed, disk_1, disk_2, *numbers = fields
        large_number, large_number_2, large_bytes, large_start = numbers
        _need(
            at + _END_64.size + _LOCATOR.size == stop
            and (mark, length, disk, disk_1, disk_2, disks) == (b"PK\6\6", _END_64.size - 12, 0, 0, 0, 1)
            and (made_by, needed) in ((0x31E, 45), (45, 45))
            and number in (large_number, _MAX_16)
            and num_bytes in (large_bytes, _MAX_32)
            and start in (large_start, _MAX_32)
            and large_number == large_number_2,
            "the two ends of its directory differ",
        )
        stop, number, num_bytes, start = at, large_number, large_bytes, large_start
    # with the offsets of the entries, this leaves no byte of the file outside the frame
    _need(start + num_bytes == stop, f"its directory is at {start} with {num_bytes} bytes, not before {stop}")
    return number, start, stop


def _large(extra: bytes, full: int, packed: int, offset: int) -> tuple[int, int, int]:
    """Return sizes and offset of an entry from its field of large numbers, which has those alone that are large."""
    kind, length = struct.unpack_from("<2H", extra)
    _need(kind == _ZIP_64 and len(extra) == 4 + length, "its directory holds unknown fields")
    large = iter(struct.unpack(f"<{length // 8}Q", extra[4:]))
    full, packed, offset = (next(large, -1) if value == _MAX_32 else value for value in (full, packed, offset))
    _need(-1 not in (full, packed, offset) and next(large, None) is None, "its directory has wrong sizes")
    return full, packed, offset


def _local(
    stretch: _Stretch, offset: int, name: bytes, expected: _Repeated, crc32: int, num_bytes: int
) -> tuple[int, int]:
    """Compare an entry's header and descriptor with the directory; return where content and next entry begin."""
    fault = f"the header of its entry {name.decode(errors='replace')} differs from its directory"
    content = stretch.read(_LOCAL.size + len(name), offset)
    mark, *repeated, crc, packed, full, name_size, extra_size = _LOCAL.unpack_from(content)
    _need(mark == b"PK\3\4" and _Repeated(*repeated) == expected, fault)
    _need(content[_LOCAL.size :] == name and name_size == len(name), fault)
    _need(expected.flags & ~(_HAS_DESCRIPTOR | _UTF_8) == 0, fault)
    extra = stretch.read(extra_size, offset + len(content))
    start = offset + len(content) + extra_size
    is_large = _has_large_sizes(extra, offset, num_bytes, fault)
    sizes = (_MAX_32, _MAX_32) if is_large else (num_bytes, num_bytes)
    if not expected.flags & _HAS_DESCRIPTOR:
        _need((crc, packed, full) == (crc32, *sizes), fault)
        return start, start + num_bytes
    # zeros stand for numbers that were not known yet when the header was written
    _need((crc, packed, full) in ((0, 0, 0), (0, *sizes), (crc32, *sizes)), fault)
    return start, _end_of_descriptor(stretch, start + num_bytes, crc32, num_bytes, fault)


def _has_large_sizes(extra: bytes, offset: int, num_bytes: int, fault: str) -> bool:
    """Check a local header's extra fields; return True if its sizes are in one of them."""
    is_large = False
    full = packed = num_bytes
    # torch writes no packed size here
    known = [(full, 0), (full, packed), (offset,), (full, 0, offset), (full, packed, offset)]
    while extra:
        kind, length = struct.unpack_from("<2H", extra)
        field, extra = extra[4 : 4 + length], extra[4 + length :]
        if kind == _ZIP_64:
            is_large = True
            _need(field in [struct.pack(f"<{len(numbers)}Q", *numbers) for numbers in known], fault)
        else:
            _need(kind == _PADDING and field == b"Z" * length, fault)
    return is_large


def _end_of_descriptor(stretch: _Stretch, offset: int, crc32: int, num_bytes: int, fault: str) -> int:
    """Check the descriptor behind a content; return where it ends."""
    content = stretch.read(24, offset)
    # with sizes of 64 bits or of 32, and nothing says which: writers differ also for small entries
    forms = ["<4s3I", "<4sI2Q"]
    if num_bytes > _MAX_32:
        forms.reverse()
    for form in forms:
        if struct.unpack_from(form, content) == (b"PK\7\10", crc32, num_bytes, num_bytes):
            return offset + struct.calcsize(form)
    raise _DamageError(fault)
