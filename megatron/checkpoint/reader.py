"""Checkpoints on disk: whole or not there, checked when read, and independent of the layout that wrote them.

    SAVE/latest                                      the tag of the newest whole checkpoint, such as global_step100
    SAVE/global_step100/checkpoint.json              the manifest: what there is, where, and its checksums
    SAVE/global_step100/rank_00000.safetensors, ...  one for each rank that owns something
    SAVE/.global_step100.partial-TOKEN/              a save under way: gets its name when it is whole
    SAVE/.global_step100.failed-TOKEN                why a save failed, for the other ranks to read
    SAVE/.global_step100.replaced-TOKEN/             the old one, while a checkpoint is written over
    SAVE/.global_step100.deleted-TOKEN/              being removed
    SAVE/.lock                                       held by the run that saves here

A file holds flat float32 tensors, under the key KIND:NAME. Each is the stretch [start, start + numel) of a parameter's
flattened local tensor, as rank `tensor_rank` of `tensor_size` tensor-parallel ones has it, padding included. What any
other layout needs is found by `slices.regions`. Nothing here executes what it reads, and no name inside a checkpoint
leads out of its folder.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import json
import logging
import math
import mmap
import os
import re
import stat
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from isal import isal_zlib
from torch import Tensor

from megatron.checkpoint.slices import copy_overlap, regions
from megatron.parallel.context import LayoutError
from megatron.parallel.shards import Shard

FORMAT = "megatron-3d"
VERSION = 1
MANIFEST = "checkpoint.json"
LATEST = "latest"

ITEM_BYTES = 4
PIECE_BYTES = 8 << 20
"""Copied, summed and written at a time: large for the disk, small enough to stay in a cache meanwhile."""
RELEASE_BYTES = 32 << 20
"""Read through a mapping before its pages are let go."""
SHOWN_DAMAGES = 10

_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,150}")
_FILE = re.compile(r"rank_[0-9]{5,}\.safetensors")
_KIND = re.compile(r"[a-z0-9_]+")
_SEAL = re.compile(rb',\n "sha256": "([0-9a-f]{64})"\n}\n')
_SEAL_BYTES = len(',\n "sha256": ""\n}\n') + 64
LEFTOVER = re.compile(
    r"\.(?P<tag>.+)\.(?P<state>partial|failed|replaced|deleted|latest)-(?P<token>[A-Za-z0-9]+)(\.[0-9]+)?"
)
"""What a save under way, or one that was killed, has beside the checkpoints; see `hidden_path`."""

_REMEDY = "copy it anew from where the checkpoint was saved, or load another checkpoint"

Progress = Callable[[int], object]
"""Told how many bytes were handled since the last time."""

logger = logging.getLogger(__name__)


class CheckpointError(ValueError):
    """A folder holds no checkpoint, or one that is damaged or cannot be used or written. Says which file, and why."""


@dataclass(frozen=True, eq=False)
class Fragment:
    """A stretch of a parameter's flattened local tensor, to be saved."""

    name: str
    """`<layer index>.<name>`: the same on every layout."""
    kind: str
    """`weight` (float32), or a moment of the optimizer: `exp_avg`, `exp_avg_sq`, `momentum_buffer`."""
    shard: Shard
    tensor_rank: int
    tensor_size: int
    start: int
    """Of the stretch, in elements of the local tensor of `tensor_rank` of `tensor_size`."""
    tensor: Tensor
    """float32 [numel], on any device."""
    dtype: str = "float32"
    """What the run computes with, such as bfloat16. Told to readers; the fragment itself is float32."""

    def __post_init__(self) -> None:
        what = f"{self.kind} of {self.name}"
        if self.tensor.dtype != torch.float32 or self.tensor.dim() != 1:
            found = f"{self.tensor.dtype} {tuple(self.tensor.shape)}"
            raise CheckpointError(f"{what}: a fragment must be float32 and flat, this one is {found}")
        if not _KIND.fullmatch(self.kind):
            raise CheckpointError(f"{what}: a kind is lower-case letters, digits and underscores")
        if self.shard.dim is None and self.tensor_size != 1:
            raise CheckpointError(f"{what} is not cut, so it is saved once, as tensor rank 0 of 1")
        if not 0 <= self.tensor_rank < self.tensor_size:
            raise CheckpointError(f"{what}: there is no tensor rank {self.tensor_rank} of {self.tensor_size}")
        local_numel, stop = math.prod(self.shard.local_shape(self.tensor_size)), self.start + self.tensor.numel()
        if self.start < 0 or stop > local_numel:
            raise CheckpointError(f"{what}: [{self.start}, {stop}) is outside its {local_numel} local elements")


@dataclass(frozen=True, slots=True)
class Stored:
    """A fragment in a file."""

    file: str
    name: str
    kind: str
    tensor_rank: int
    tensor_size: int
    padding: int
    start: int
    numel: int
    crc32: int
    offset: int
    """Of its first byte in the file."""

    @property
    def num_bytes(self) -> int:
        return self.numel * ITEM_BYTES


def rank_file(rank: int) -> str:
    return f"rank_{rank:05d}.safetensors"


def hidden_path(save: Path, tag: str, state: str, token: str) -> Path:
    return save / f".{tag}.{state}-{token}"


def check_tag(tag: str) -> None:
    if not _TAG.fullmatch(tag):
        raise CheckpointError(f"{tag!r} is no name of a checkpoint, such as global_step100")


def safetensors_header(tag: str, token: str, file: str, fragments: Sequence[Stored], header_bytes: int) -> bytes:
    """The beginning of a safetensors file, filled up with spaces to `header_bytes`. Raises CheckpointError."""
    entries: dict[str, Any] = {"__metadata__": {"format": FORMAT, "tag": tag, "save": token, "file": file}}
    for at in fragments:
        begin = at.offset - header_bytes
        key = f"{at.kind}:{at.name}"
        if key in entries:
            raise CheckpointError(f"{file} has two fragments of the {at.kind} of {at.name}; a file can hold one")
        entries[key] = {"dtype": "F32", "shape": [at.numel], "data_offsets": [begin, begin + at.num_bytes]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    if len(text) > header_bytes - 8:
        raise CheckpointError(f"the header of {file} has {len(text)} bytes, more than the {header_bytes - 8} for it")
    return (header_bytes - 8).to_bytes(8, "little") + text.ljust(header_bytes - 8)


def _metadata_of(header: bytes) -> dict[str, Any]:
    """What the header says of where it belongs; empty where it cannot be read."""
    try:
        found = json.loads(header[8:])["__metadata__"]
    except (ValueError, RecursionError, KeyError, TypeError):
        return {}
    return found if isinstance(found, dict) else {}


# ---------------------------------------------------------------------------------------------------------------------
# Reading


class Checkpoint:
    """A whole checkpoint. Raises CheckpointError if something is missing, or does not belong to the rest.

    Opening reads the manifest and the headers, and checks sizes and that the fragments make up every tensor, once. The
    tensors' own checksums are for `verify`.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        manifest = _read_manifest(self.folder)
        path = self.folder / MANIFEST
        with _as_damage(path):
            self.tag = _string(manifest, "tag")
            self.token = _string(manifest, "token")
            self.metadata: dict[str, Any] = _mapping(manifest, "metadata")
            self.parameters: dict[str, Shard] = {}
            """Unpadded, without what they started from."""
            self.dtypes: dict[str, str] = {}
            """What the run computed with."""
            for name, entry in _mapping(manifest, "parameters").items():
                self.parameters[name] = _parameter(name, entry)
                self.dtypes[name] = _string(entry, "dtype")
            files = _mapping(manifest, "files")
            self.file_bytes: dict[str, int] = {}
            by_file = {}
            for name, entry in files.items():
                by_file[name] = list(self._file(name, entry))
                self.file_bytes[name] = _count(entry, "bytes")
                _count(entry, "header_crc32")
            self.fragments: Sequence[Stored] = [at for fragments in by_file.values() for at in fragments]
            """In the order of the files, and within them."""
        self._tensors: dict[tuple[str, str], list[Stored]] = {}
        for at in self.fragments:
            self._tensors.setdefault((at.name, at.kind), []).append(at)
        self.kinds = tuple(sorted({at.kind for at in self.fragments}, key=lambda kind: (kind != "weight", kind)))
        """`weight` first."""
        with _as_damage(path):
            self._check_completeness()
        for name, entry in files.items():
            self._check_file(name, entry["header_crc32"], by_file[name])
        self._maps: dict[str, tuple[mmap.mmap, Tensor]] = {}
        self._unreleased_bytes = 0

    def _file(self, file: str, entry: Any) -> Iterator[Stored]:
        """What the manifest says of a file, which is laid out in the order of its fragments."""
        if not _FILE.fullmatch(file):
            raise CheckpointError(f"files: {file!r} is no name of a rank's file, such as rank_00000.safetensors")
        listed = _mapping(entry, "fragments", list)
        sizes = [_count(fragment, "numel") * ITEM_BYTES for fragment in listed]
        offset = _count(entry, "bytes") - sum(sizes)
        if offset < 8 or offset % ITEM_BYTES:
            raise CheckpointError(f"files: {file} has {entry['bytes']} bytes, but its fragments make {sum(sizes)}")
        for fragment, num_bytes in zip(listed, sizes, strict=True):
            name = _string(fragment, "name")
            if name not in self.parameters:
                raise CheckpointError(f"files: {file} has a fragment of {name!r}, which is no parameter")
            yield Stored(
                file=file,
                name=name,
                kind=_string(fragment, "kind"),
                tensor_rank=_count(fragment, "tensor_rank"),
                tensor_size=_count(fragment, "tensor_size"),
                padding=_count(fragment, "padding"),
                start=_count(fragment, "start"),
                numel=_count(fragment, "numel"),
                crc32=_count(fragment, "crc32"),
                offset=offset,
            )
            offset += num_bytes

    def _check_file(self, file: str, header_crc32: int, fragments: Sequence[Stored]) -> None:
        """That the file has the size and the header that the manifest says. Reads the header alone."""
        path, expected_bytes = self.folder / file, self.file_bytes[file]
        with _open_file(path) as descriptor, _as_damage(path):
            num_bytes = os.fstat(descriptor).st_size
            if num_bytes != expected_bytes:
                raise CheckpointError(f"it has {num_bytes} bytes, but {MANIFEST} says {expected_bytes}; {_REMEDY}")
            data_start = fragments[0].offset if fragments else num_bytes
            header = os.pread(descriptor, data_start, 0)
            said = _metadata_of(header)
            if said.get("save") not in (None, self.token) or said.get("file") not in (None, file):
                raise CheckpointError(
                    f"it is {said.get('file')} of the save {said.get('tag')} {said.get('save')}, not {file} of "
                    f"{self.tag} {self.token}; {_REMEDY}"
                )
            if isal_zlib.crc32(header) != header_crc32:
                raise CheckpointError(f"its header (bytes 0 to {data_start}) has another checksum; {_REMEDY}")
            if header != safetensors_header(self.tag, self.token, file, fragments, data_start):
                raise CheckpointError(f"its header lists other tensors than {MANIFEST}; {_REMEDY}")

    def _check_completeness(self) -> None:
        for name in self.parameters:
            if (name, "weight") not in self._tensors:
                raise CheckpointError(f"there is no weight of {name}; save the checkpoint anew, or load another")
        for (name, kind), fragments in self._tensors.items():
            try:
                problem = _tiling_fault(self.parameters[name], fragments)
            except LayoutError as error:
                problem = str(error)
            if problem:
                raise CheckpointError(f"{kind} of {name}: {problem}; save the checkpoint anew, or load another")

    @property
    def num_bytes(self) -> int:
        """Of all files but the manifest."""
        return sum(self.file_bytes.values())

    def kinds_of(self, name: str) -> tuple[str, ...]:
        """What is stored of a parameter, `weight` first."""
        return tuple(kind for kind in self.kinds if (name, kind) in self._tensors)

    def read(
        self, name: str, kind: str, shard: Shard, tensor_rank: int, tensor_size: int, start: int, numel: int
    ) -> Tensor:
        """[start, start + numel) of the flattened local tensor that `tensor_rank` of any `tensor_size` has: float32.

        Padding is zero. Reads only what it needs. Raises CheckpointError for a parameter or kind that is not there, or
        has another shape.
        """
        stored = self._shard_like(name, kind, shard)
        wanted = regions(shard, tensor_rank, tensor_size, start, numel)
        target = torch.zeros(numel) if shard.padding else torch.empty(numel)
        for at in self._tensors[name, kind]:
            source_start, source_numel = at.start, at.numel
            if at.tensor_size == tensor_size and at.padding == shard.padding and shard.dim is not None:
                # cut the same way: only what lies in the stretch itself can overlap
                source_start, stop = max(start, at.start), min(start + numel, at.start + at.numel)
                source_numel = stop - source_start
                if at.tensor_rank != tensor_rank or source_numel <= 0:
                    continue
            source_shard = replace(stored, padding=at.padding)
            held = regions(source_shard, at.tensor_rank, at.tensor_size, source_start, source_numel)
            begin = at.offset // ITEM_BYTES + source_start - at.start
            copy_overlap(self._map(at.file)[begin : begin + source_numel], held, target, wanted)
        self._release(numel * ITEM_BYTES)
        return target

    def read_full(self, name: str, kind: str = "weight") -> Tensor:
        """A whole tensor, without padding: float32 of its full shape."""
        if name not in self.parameters:
            raise CheckpointError(self._unknown(name))
        shard = self.parameters[name]
        return self.read(name, kind, shard, 0, 1, 0, math.prod(shard.shape)).view(shard.shape)

    def _shard_like(self, name: str, kind: str, shard: Shard) -> Shard:
        if name not in self.parameters:
            raise CheckpointError(self._unknown(name))
        stored = self.parameters[name]
        if (name, kind) not in self._tensors:
            there = ", ".join(self.kinds_of(name))
            raise CheckpointError(f"{self.folder} holds no {kind} of {name}, only {there}")
        if (stored.shape, stored.dim, stored.pieces) != (shard.shape, shard.dim, shard.pieces):
            raise CheckpointError(
                f"{self.folder} holds {name} as {_said(stored)}; this model has it as {_said(shard)}. "
                "Give the options of the model that was saved"
            )
        return stored

    def _unknown(self, name: str) -> str:
        some = ", ".join(list(self.parameters)[:3])
        return f"{self.folder} holds no parameter {name!r}, but {len(self.parameters)} others, such as {some}"

    def _map(self, file: str) -> Tensor:
        """The whole file as float32, whatever its header is; mapped, not read."""
        if file not in self._maps:
            path = self.folder / file
            with _open_file(path) as descriptor, _as_damage(path):
                if os.fstat(descriptor).st_size != self.file_bytes[file]:
                    raise CheckpointError("it has changed its size since the checkpoint was opened")
                mapped = mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that it cannot be written to, which nobody does
                tensor = torch.frombuffer(mapped, dtype=torch.float32, count=len(mapped) // ITEM_BYTES)
            self._maps[file] = (mapped, tensor)
        return self._maps[file][1]

    def _release(self, num_bytes: int) -> None:
        """Let go of the pages read so far now and then, so that memory does not grow with what was read."""
        self._unreleased_bytes += num_bytes
        if self._unreleased_bytes >= RELEASE_BYTES:
            for mapped, _ in self._maps.values():
                mapped.madvise(mmap.MADV_DONTNEED)
            self._unreleased_bytes = 0

    def share(self, share: tuple[int, int]) -> list[Stored]:
        """The fragments that number share[0] of share[1] workers verifies, so that each has as many bytes to read."""
        index, count = share
        total, before, own = sum(at.num_bytes for at in self.fragments), 0, []
        for at in self.fragments:
            if index <= before * count // max(total, 1) < index + 1:
                own.append(at)
            before += at.num_bytes
        return own

    def verify(self, share: tuple[int, int] = (0, 1), progress: Progress | None = None) -> None:
        """Compare the checksum of every tensor of this share. Raises CheckpointError naming each damage."""
        own = self.share(share)
        buffer = memoryview(bytearray(min(PIECE_BYTES, max((at.num_bytes for at in own), default=0))))
        damages = []
        for file, fragments in itertools.groupby(own, lambda at: at.file):
            path = self.folder / file
            with _open_file(path) as descriptor, _as_damage(path):
                for at in fragments:
                    found, done = 0, 0
                    while done < at.num_bytes:
                        count = os.preadv(descriptor, [buffer[: at.num_bytes - done]], at.offset + done)
                        if not count:
                            raise CheckpointError(f"it ends at byte {at.offset + done}; {_REMEDY}")
                        found = isal_zlib.crc32(buffer[:count], found)
                        done += count
                        if progress:
                            progress(count)
                    if found != at.crc32:
                        place = f"bytes {at.offset} to {at.offset + at.num_bytes}"
                        damages.append(
                            f"{path}: {at.kind} of {at.name} ({place}) has the checksum {found:08x}, not {at.crc32:08x}"
                        )
        if damages:
            more = f"\n... {len(damages)} damaged tensors in all" if len(damages) > SHOWN_DAMAGES else ""
            raise CheckpointError(
                "\n".join(damages[:SHOWN_DAMAGES]) + f"{more}\nLoad another checkpoint, or copy these "
                "files anew from where it was saved"
            )


def newest_checkpoint(
    folder: str | Path, *, tag: str | None = None, fall_back: bool = True, excluding: Collection[str] = ()
) -> Checkpoint | None:
    """The checkpoint that `latest` names, or `tag`, or None where `folder` is missing or empty: a run starts anew.

    Those in `excluding`, names of folders, are known to be damaged.

    With `fall_back`, where `latest` names none that is whole, the newest that is, which a warning tells. A `tag` has no
    substitute. Files and folders whose names begin with a dot, as a killed run leaves them, count as nothing.
    Raises CheckpointError if there is something else, or nothing whole.
    """
    save = Path(folder)
    if not os.path.lexists(save):
        return None
    if not save.is_dir():
        raise CheckpointError(f"{save} is a file; give the folder that a run saved its checkpoints in")
    if tag is not None:
        check_tag(tag)
        return Checkpoint(save / tag)
    candidates = checkpoint_folders(save)
    if not candidates and not any(not entry.name.startswith(".") for entry in save.iterdir()):
        return None
    if not candidates and not os.path.lexists(save / LATEST):
        if os.path.lexists(save / MANIFEST):
            raise CheckpointError(f"{save} is itself a checkpoint; give the folder that it is in: {save.parent}")
        raise CheckpointError(
            f"{save} holds files, but no checkpoint: it has no `{LATEST}`; give the folder that a run saved its "
            "checkpoints in, or an empty one to start anew"
        )
    problems = []
    try:
        latest = _read_latest(save)
        if latest not in excluding:
            return Checkpoint(save / latest)
        problems.append(f"{latest} is damaged")
    except CheckpointError as error:
        if not fall_back:
            raise
        problems.append(str(error))
    for path in candidates:
        if path.name in excluding:
            continue
        try:
            checkpoint = Checkpoint(path)
        except CheckpointError as error:
            if str(error) not in problems:
                problems.append(str(error))
            continue
        logger.warning("%s is loaded instead of a newer one: %s", path, "; ".join(problems))
        return checkpoint
    raise CheckpointError(f"{save} holds no whole checkpoint: " + "; ".join(problems))


def holds_checkpoints(folder: Path) -> bool:
    """Whether something in the folder looks like a checkpoint, whole or not."""
    return folder.is_dir() and bool(checkpoint_folders(folder))


def checkpoint_folders(save: Path) -> list[Path]:
    """Folders that may be checkpoints, newest first; one that was about to be replaced comes behind its namesake."""
    found = []
    for path in save.iterdir():
        left = LEFTOVER.fullmatch(path.name)
        tag = left["tag"] if left and left["state"] == "replaced" else path.name
        if _TAG.fullmatch(tag) and os.path.lexists(path / MANIFEST):
            found.append((iteration_of(tag), tag == path.name, path.name, path))
    return [path for *_, path in sorted(found, reverse=True)]


def iteration_of(tag: str) -> int:
    """The number that a tag ends with; -1: none."""
    number = re.search(r"[0-9]+$", tag)
    return int(number[0]) if number else -1


def _read_latest(save: Path) -> str:
    path = save / LATEST
    remedy = "write the name of a whole checkpoint into it"
    with _open_file(path) as descriptor, _as_damage(path):
        content = os.read(descriptor, 4096)
        tag = content.decode("ascii", "backslashreplace").strip()
        if not _TAG.fullmatch(tag):
            raise CheckpointError(f"it says {tag[:80]!r}, which names no checkpoint; {remedy}")
        if not (save / tag).is_dir():
            raise CheckpointError(f"it names {tag}, but {save / tag} is not there; {remedy}")
    return tag


@contextlib.contextmanager
def _open_file(path: Path) -> Iterator[int]:
    """A descriptor to read a regular file, never through a link. Raises CheckpointError."""
    try:
        # a pipe in its place must not keep us waiting
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is not there; {_REMEDY}") from None
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise CheckpointError(f"{path} is a link, which is never followed; put the file itself there") from None
        raise CheckpointError(f"{path} cannot be read: {error.strerror}; {_REMEDY}") from error
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise CheckpointError(f"{path} is no regular file; {_REMEDY}")
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _as_damage(path: Path) -> Iterator[None]:
    """Say of every fault found inside in which file it is."""
    try:
        yield
    except (CheckpointError, LayoutError) as error:
        raise CheckpointError(f"{path}: {error}") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}; {_REMEDY}") from error


def _read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not there; give the folder of a checkpoint")
    with _open_file(path) as descriptor, _as_damage(path):
        with os.fdopen(os.dup(descriptor), "rb") as file:
            text = file.read()
        seal = _SEAL.fullmatch(text[-_SEAL_BYTES:])
        body = text[:-_SEAL_BYTES] + b"\n}\n"
        whole = seal and hashlib.sha256(body).hexdigest().encode() == seal[1]
        try:
            manifest = json.loads(body if whole else text)
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"it is no JSON ({error}), so it is damaged; {_REMEDY}") from None
        # of another kind or version rather than damaged: another seal, perhaps
        if isinstance(manifest, dict) and isinstance(manifest.get("format"), str) and manifest["format"] != FORMAT:
            raise CheckpointError(f"its format is {manifest['format'][:80]!r}; only {FORMAT!r} is read")
        if isinstance(manifest, dict) and type(manifest.get("version")) is int and manifest["version"] != VERSION:
            raise CheckpointError(
                f"its version is {manifest['version']}; only {VERSION} is known: use the release that wrote it"
            )
        if not whole or not isinstance(manifest, dict):
            raise CheckpointError(f"its checksum is not that of its text, so it was changed; {_REMEDY}")
        if _string(manifest, "format") != FORMAT or _count(manifest, "version") != VERSION:
            raise CheckpointError(f"it is not of format {FORMAT!r}, version {VERSION}")
    return manifest


def _field(entry: Any, key: str) -> Any:
    if not isinstance(entry, dict) or key not in entry:
        raise CheckpointError(f"{str(entry)[:80]} has no {key!r}, so it is damaged; {_REMEDY}")
    return entry[key]


def _string(entry: Any, key: str) -> str:
    value = _field(entry, key)
    if not isinstance(value, str):
        raise CheckpointError(f"{key} is {str(value)[:80]}, which is no text; {_REMEDY}")
    return value


def _count(entry: Any, key: str) -> int:
    value = _field(entry, key)
    if type(value) is not int or not 0 <= value < 2**62:
        raise CheckpointError(f"{key} is {str(value)[:80]}, which is no count; {_REMEDY}")
    return value


def _mapping(entry: Any, key: str, of: type = dict) -> Any:
    value = _field(entry, key)
    if not isinstance(value, of):
        raise CheckpointError(f"{key} is {str(value)[:80]}, which is no {of.__name__}; {_REMEDY}")
    return value


def _parameter(name: str, entry: Any) -> Shard:
    numbers = {key: tuple(_mapping(entry, key, list)) for key in ("shape", "pieces")}
    dim = _field(entry, "dim")
    well = all(type(i) is int and 0 < i < 2**62 for i in (*numbers["shape"], *numbers["pieces"]))
    well &= dim is None or (type(dim) is int and 0 <= dim < len(numbers["shape"]))
    if not well or (dim is None) != (not numbers["pieces"]):
        raise CheckpointError(f"parameters: {name} is described as {str(entry)[:200]}, which is no cut of a tensor")
    return Shard(numbers["shape"], dim, numbers["pieces"])


def _said(shard: Shard) -> str:
    if shard.dim is None:
        return f"{list(shard.shape)}, not cut"
    return f"{list(shard.shape)}, cut along dimension {shard.dim} in pieces of {', '.join(map(str, shard.pieces))}"


def _tiling_fault(shard: Shard, fragments: Sequence[Stored]) -> str | None:
    """Why these fragments are not exactly one whole tensor; None: they are. Raises LayoutError."""
    layouts = {(at.tensor_size, at.padding) for at in fragments}
    size, padding = fragments[0].tensor_size, fragments[0].padding
    if len(layouts) > 1:
        return f"its fragments are of several layouts, of {sorted(layouts)} (tensor-parallel ranks, padding rows)"
    if size < 1 or (shard.dim is None and (size > 1 or padding)):
        return f"it cannot be split over {size} ranks with {padding} rows of padding"
    local_numel = math.prod(replace(shard, padding=padding).local_shape(size))
    by_rank: dict[int, list[Stored]] = {}
    for at in fragments:
        by_rank.setdefault(at.tensor_rank, []).append(at)
    if max(by_rank) >= size:
        return f"a fragment is of tensor rank {max(by_rank)}, but there are {size}"
    if len(by_rank) < size:
        missing = next(rank for rank in range(size) if rank not in by_rank)
        return f"nothing of tensor rank {missing} of {size} is there"
    for rank, parts in by_rank.items():
        position, of_rank = 0, f"of tensor rank {rank} of {size}" if size > 1 else "of it"
        for at in sorted(parts, key=lambda at: (at.start, at.numel)):
            if at.start > position:
                return f"elements [{position}, {at.start}) {of_rank} are missing"
            if at.start < position:
                return f"elements [{at.start}, {min(position, at.start + at.numel)}) {of_rank} are there twice"
            position += at.numel
        if position < local_numel:
            return f"elements [{position}, {local_numel}) {of_rank} are missing"
        if position > local_numel:
            return f"there are {position} elements {of_rank}, but {_said(shard)} makes {local_numel}"
    return None
