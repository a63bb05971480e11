"""The frame of a file that torch.save wrote: a zip of uncompressed entries. Every byte of it is accounted for.

An entry is a local header, its name, padding, its content, a descriptor (its CRC-32 and sizes). The directory and its
end follow the last. The headers repeat what the directory says, and nothing lies between them, so that a changed bit in
any of them is found. Source: PKWARE's APPNOTE.TXT 6.3.10; caffe2/serialize/inline_container.cc of PyTorch.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron.checkpoint.format import CheckpointError

_LOCAL = struct.Struct("<4s5H3I2H")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_END = struct.Struct("<4s4H2IH")
_LOCATOR = struct.Struct("<4sIQI")
_END_64 = struct.Struct("<4sQ2H2I4Q")
_MAX_16, _MAX_32 = 0xFFFF, 0xFFFFFFFF
_HAS_DESCRIPTOR, _UTF_8 = 0x8, 0x800
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


class _DamageError(Exception):
    """The frame is not whole. Says where."""


def zip_entries(descriptor: int, path: Path) -> list[ZipEntry] | None:
    """Return the entries of the zip in an open file, in their order; None: it is another file.

    Raises CheckpointError, naming `path`, where the frame is not whole.
    """
    size = os.fstat(descriptor).st_size
    begins = os.pread(descriptor, 4, 0) == b"PK\3\4"
    end = os.pread(descriptor, _END.size, max(0, size - _END.size))
    if not begins and not end.startswith(b"PK\5\6"):
        return None
    try:
        return list(_entries(descriptor, size, end))
    except (_DamageError, struct.error, OverflowError, UnicodeDecodeError) as error:
        reason = error if isinstance(error, _DamageError) else "its entries cannot be read"
        raise CheckpointError(f"{path} is damaged or truncated: {reason}; copy it again from its source") from None


def _need(is_right: bool, fault: str) -> None:
    if not is_right:
        raise _DamageError(fault)


def _entries(descriptor: int, size: int, end: bytes) -> Iterator[ZipEntry]:
    number, directory_start, directory_stop = _directory(descriptor, size, end)
    directory = os.pread(descriptor, directory_stop - directory_start, directory_start)
    _need(len(directory) == directory_stop - directory_start, "it ends within its directory")
    position, place, same, names = 0, 0, None, set()
    for _ in range(number):
        fields = _CENTRAL.unpack_from(directory, position)
        mark, made_by, *head, crc32, packed, full, name_size, extra_size, comment_size, disk, inner, outer, at = fields
        position += _CENTRAL.size
        name = directory[position : position + name_size]
        extra = directory[position + name_size : position + name_size + extra_size]
        position += name_size + extra_size
        if packed == _MAX_32 or full == _MAX_32 or at == _MAX_32:
            full, packed, at = _large(extra, full, packed, at)
        else:
            _need(not extra, "its directory holds unknown fields")
        # what says nothing of the content is the same in all entries
        same = same or (made_by, inner, outer)
        _need(
            mark == b"PK\1\2" and not comment_size and not disk and same == (made_by, inner, outer),
            "its directory is not as torch.save writes it",
        )
        _need(head[2] == 0 and packed == full, "it holds a compressed entry, which torch.save does not write")
        _need(at == place, f"its directory has {name!r} at {at}, not at {place}")
        _need(name not in names, f"it holds its entry {name!r} twice")
        names.add(name)
        start, place = _local(descriptor, at, name, head, crc32, full)
        yield ZipEntry(name.decode(), start, full, crc32)
    _need(position == len(directory) and place == directory_start, "its entries and its directory leave a gap")


def _directory(descriptor: int, size: int, end: bytes) -> tuple[int, int, int]:
    """Return the number of entries, and begin and end of the directory."""
    mark, disk, disk_2, number, number_2, num_bytes, start, comment_size = _END.unpack(end)
    _need(
        mark == b"PK\5\6" and (disk, disk_2, comment_size) == (0, 0, 0) and number == number_2,
        "it does not end with a zip's directory",
    )
    stop = size - _END.size
    locator = os.pread(descriptor, _LOCATOR.size, max(0, stop - _LOCATOR.size))
    if locator.startswith(b"PK\6\7"):
        _, disk, at, disks = _LOCATOR.unpack(locator)
        found = _END_64.unpack(os.pread(descriptor, _END_64.size, at))
        mark, length, made_by, needed, disk_1, disk_2, *numbers = found
        _need(
            at + _END_64.size + _LOCATOR.size == stop
            and (mark, length, disk, disk_1, disk_2, disks) == (b"PK\6\6", _END_64.size - 12, 0, 0, 0, 1)
            and (made_by, needed) in ((0x31E, 45), (45, 45))
            and number in (numbers[0], _MAX_16)
            and num_bytes in (numbers[2], _MAX_32)
            and start in (numbers[3], _MAX_32)
            and numbers[0] == numbers[1],
            "the two ends of its directory differ",
        )
        stop, number, num_bytes, start = at, numbers[0], numbers[2], numbers[3]
    _need(start + num_bytes == stop, f"its directory is at {start} with {num_bytes} bytes, not before {stop}")
    return number, start, stop


def _large(extra: bytes, full: int, packed: int, at: int) -> tuple[int, int, int]:
    """Return sizes and place of an entry from its field of large numbers, which has those alone that are large."""
    kind, length = struct.unpack_from("<2H", extra)
    _need(kind == _ZIP_64 and len(extra) == 4 + length, "its directory holds unknown fields")
    large = iter(struct.unpack(f"<{length // 8}Q", extra[4:]))
    found = tuple(next(large, -1) if value == _MAX_32 else value for value in (full, packed, at))
    _need(-1 not in found and next(large, None) is None, "its directory has wrong sizes")
    return found  # type: ignore[return-value]


def _local(descriptor: int, at: int, name: bytes, head: list[int], crc32: int, full: int) -> tuple[int, int]:
    """Compare an entry's header and descriptor with the directory; return where content and next entry begin."""
    fault = f"the header of its entry {name.decode(errors='replace')} differs from its directory"
    header = os.pread(descriptor, _LOCAL.size + len(name), at)
    mark, *found, crc, packed, whole, name_size, extra_size = _LOCAL.unpack_from(header)
    _need(mark == b"PK\3\4" and found == head and header[_LOCAL.size :] == name and name_size == len(name), fault)
    extra = os.pread(descriptor, extra_size, at + len(header))
    start = at + len(header) + extra_size
    stop, is_large, sizes = start + full, False, (full, full)
    while extra:
        kind, length = struct.unpack_from("<2H", extra)
        field, extra = extra[4 : 4 + length], extra[4 + length :]
        if kind == _ZIP_64:
            is_large = True  # torch writes no packed size here
            known = [(full, 0), sizes, (at,), (full, 0, at), (*sizes, at)]
            _need(field in [struct.pack(f"<{len(numbers)}Q", *numbers) for numbers in known], fault)
        else:
            _need(kind == _PADDING and field == b"Z" * length, fault)
    _need(head[1] & ~(_HAS_DESCRIPTOR | _UTF_8) == 0, fault)
    plain = (crc32, *((_MAX_32, _MAX_32) if is_large else sizes))
    if not head[1] & _HAS_DESCRIPTOR:
        _need((crc, packed, whole) == plain, fault)
        return start, stop
    _need((crc, packed, whole) in ((0, 0, 0), (0, *plain[1:]), plain), fault)
    descriptor_text = os.pread(descriptor, 24, stop)
    for form in ("<4sI2Q", "<4s3I") if full > _MAX_32 else ("<4s3I", "<4sI2Q"):
        length = struct.calcsize(form)
        if struct.unpack_from(form, descriptor_text) == (b"PK\7\10", crc32, *sizes):
            return start, stop + length
    raise _DamageError(fault)
