"""The one check that every foreign weights file passes before a byte of it is used.

| file | carries | checked |
|---|---|---|
| .pt, .bin | a zip with the CRC-32 of every entry | all, and that headers and directory agree and leave no byte out |
| .pt, .bin before torch 1.6, or saved without checksums | none | that it contains tensors and plain values alone |
| .safetensors | none | its header: places and sizes of the tensors, without gap, overlap or repetition |

Pickles are opened with weights_only=True, so that nothing in them is executed, and with the few classes of ALLOWED,
each read as an inert record. Tensors stay mapped files until their bytes are needed.
"""

from __future__ import annotations

import logging
import os
import re
import struct
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from isal import isal_zlib
from safetensors import SafetensorError, safe_open

from megatron.checkpoint.format import PIECE_BYTES, CheckpointError, open_file
from megatron.weights.folder_files import real_path

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


# A file of torch.save is a zip of uncompressed entries: a local header, the name, padding, the content, a descriptor
# (CRC-32 and sizes). The directory and its end follow the last. The headers repeat what the directory says, and nothing
# lies between them, so a changed bit in any of them is found.
# Source: PKWARE's APPNOTE.TXT 6.3.10; caffe2/serialize/inline_container.cc of PyTorch
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


log = logging.getLogger(__name__)

REMEDY = "copy it again from its source"
EAGER_BYTES = 1 << 20
"""Entries up to this size, the pickle among them, are checked when a file is opened; tensors may wait for `verify`."""

ALLOWED = (
    "argparse.Namespace",
    "types.SimpleNamespace",
    "deepspeed.checkpoint.universal_checkpoint.SubparamShape",
    "deepspeed.runtime.bf16_optimizer.fragment_address",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.runtime.zero.offload_config.OffloadDeviceEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
    "megatron.core.enums.ModelType",
    "megatron.enums.PositionEmbeddingType",
    "megatron.model.enums.PositionEmbeddingType",
    # NumPy's random state, which Megatron saves
    "numpy.core.multiarray._reconstruct",
    "numpy._core.multiarray._reconstruct",
    "numpy.dtype",
    "numpy.ndarray",
)
"""The classes, beside torch's own harmless ones, that a foreign file may name. None of them is imported."""


class Inert:
    """Stand-in for the classes of ALLOWED: keeps the state, has no behaviour."""

    state: Any = None

    def __init__(self, *arguments: Any) -> None:
        pass  # nothing is needed of an enumeration or an array

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def get(self, field: str) -> Any:
        return self.state.get(field) if isinstance(self.state, dict) else None


# Files


@dataclass
class _Opened:
    """A file that was opened, and how far it has been checked."""

    is_zip: bool = False
    has_checksum: bool = False
    unchecked: tuple[ZipEntry, ...] = ()


class ForeignFiles:
    """Weights files of one foreign checkpoint, and how far each has been checked. Raises CheckpointError by file name.

    A tensor's bytes may be used after `ensure` of its file, or after `verify`, with which ranks share the work.
    """

    def __init__(self) -> None:
        self._opened: dict[Path, _Opened] = {}
        self._all_verified = False

    def load(self, path: Path) -> Any:
        """Return the content of a .pt or .bin file, its tensors mapped, nothing executed."""
        opened, place = self._open(path), real_path(path)
        try:
            names: list[Any] = [(Inert, name) for name in ALLOWED]
            with torch.serialization.safe_globals(names), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch's about a pickle that this refuses
                return torch.load(str(place), map_location="cpu", weights_only=True, mmap=opened.is_zip)
        except FileNotFoundError:
            raise CheckpointError(f"{path} is not there; {REMEDY}") from None
        except Exception as error:  # a hostile file may make torch raise anything
            found = re.search(r"GLOBAL (\S+)|unsupported GLOBAL (\S+)", str(error))
            if found:
                raise CheckpointError(
                    f"{path} is refused: it names {found[1] or found[2]}, and opening a pickle that names code may run "
                    "it. Only tensors and plain values are read from foreign files; save the checkpoint again without "
                    "it, or as safetensors"
                ) from None
            if type(error).__name__ == "UnpicklingError":  # torch's own text advises to open it without the check
                raise CheckpointError(
                    f"{path} is refused: it is not a file of tensors and plain values as torch.save writes them. "
                    f"{REMEDY.capitalize()}, or save the checkpoint again, best as safetensors"
                ) from None
            reason = str(error).strip().split("\n")[0][:200]
            raise CheckpointError(f"{path} cannot be read ({type(error).__name__}: {reason}); {REMEDY}") from None

    def safetensors_header(self, path: Path) -> tuple[bytes, int]:
        """Return the JSON in the header of a safetensors file, and the offset at which its tensors begin."""
        place = real_path(path)
        try:
            with safe_open(place, framework="pt"):
                pass  # it checks the header: offsets within the file, no holes, no overlaps
        except SafetensorError as error:
            raise CheckpointError(f"{path} is damaged ({error}); {REMEDY}") from None
        self._opened[path] = _Opened()
        with place.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            return file.read(length), 8 + length

    def ensure(self, path: Path) -> None:
        """Compare the checksums of a file that have not been compared yet, by this rank or in a shared `verify`."""
        if self._all_verified:
            return
        opened = self._open(path)
        if opened.unchecked:
            with open_file(real_path(path)) as descriptor:
                _compare(path, descriptor, opened.unchecked)
            opened.unchecked = ()

    def verify(self, paths: Iterable[Path], share: tuple[int, int] = (0, 1)) -> str:
        """Compare all checksums of this share of the files: every share[1]-th, from the largest down.

        Returns which of the opened files carried a checksum, and which none.
        """
        by_size = sorted(paths, key=lambda path: (-real_path(path).stat().st_size, path))
        for path in by_size[share[0] :: share[1]]:
            self.ensure(path)
        self._all_verified = True
        without = sorted(path.name for path, opened in self._opened.items() if not opened.has_checksum)
        number = len(self._opened) - len(without)
        texts = [f"the CRC-32 of every byte of {number} file{'s' if number > 1 else ''}"] if number else []
        if without:
            more = f" and {len(without) - 1} more" if len(without) > 1 else ""
            verb = "carry" if more else "carries"
            texts.append(f"names, shapes and sizes alone of {without[0]}{more}, which {verb} no checksum")
        return "; ".join(texts)

    def _open(self, path: Path) -> _Opened:
        """Check a .pt or .bin file that is opened for the first time, but for its large entries."""
        if path in self._opened:
            return self._opened[path]
        with open_file(real_path(path)) as descriptor:
            entries = zip_entries(descriptor, path)
            opened = _Opened(is_zip=entries is not None)
            if entries and any(entry.crc32 for entry in entries):  # torch writes zeros where it computes none
                opened.has_checksum = True
                _compare(path, descriptor, [entry for entry in entries if entry.num_bytes <= EAGER_BYTES])
                opened.unchecked = tuple(entry for entry in entries if entry.num_bytes > EAGER_BYTES)
        if not opened.has_checksum:
            log.warning("%s carries no checksum, so damage to its tensors cannot be found", path)
        self._opened[path] = opened
        return opened


def _compare(path: Path, descriptor: int, entries: Iterable[ZipEntry]) -> None:
    """Read the entries, and raise CheckpointError for the first with another checksum."""
    buffer = memoryview(bytearray(min(PIECE_BYTES, max((entry.num_bytes for entry in entries), default=0))))
    for entry in entries:
        found, done = 0, 0
        while done < entry.num_bytes:
            count = os.preadv(descriptor, [buffer[: entry.num_bytes - done]], entry.start + done)
            if not count:
                raise CheckpointError(f"{path} is damaged: it ends within {entry.name}; {REMEDY}")
            found, done = isal_zlib.crc32(buffer[:count], found), done + count
        if found != entry.crc32:
            raise CheckpointError(
                f"{path} is damaged: its entry {entry.name} has the checksum {found:08x}, not {entry.crc32:08x}; "
                f"{REMEDY}"
            )
