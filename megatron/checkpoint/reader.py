"""Reading checkpoints: finding the newest one of a folder, opening it, and reading any slice of its tensors."""

from __future__ import annotations

import itertools
import logging
import math
import mmap
import os
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from isal import isal_zlib
from torch import Tensor

from megatron.checkpoint.format import (
    ITEM_BYTES,
    LATEST,
    LEFTOVER,
    MANIFEST,
    PIECE_BYTES,
    RANK_FILE,
    REMEDY,
    TAG,
    CheckpointError,
    StoredFragment,
    as_damage,
    check_tag,
    count_field,
    described,
    header_metadata,
    iteration_of,
    mapping_field,
    open_file,
    parameter_shard,
    read_manifest,
    safetensors_header,
    string_field,
    tiling_fault,
)
from megatron.checkpoint.slices import copy_overlap, regions
from megatron.parallel.context import LayoutError
from megatron.parallel.shards import Shard

RELEASE_BYTES = 32 << 20
"""Read through a mapping before its pages are let go."""
SHOWN_DAMAGES = 10

ReportBytes = Callable[[int], object]
"""Told how many bytes were handled since the last time."""

logger = logging.getLogger(__name__)


class Checkpoint:
    """A whole checkpoint. Raises CheckpointError if something is missing, or does not belong to the rest.

    Opening reads the manifest and the headers, and checks sizes and that the fragments make up every tensor, once. The
    tensors' own checksums are for `verify`.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        manifest = read_manifest(self.folder)
        path = self.folder / MANIFEST
        with as_damage(path):
            self.tag = string_field(manifest, "tag")
            self.token = string_field(manifest, "token")
            self.metadata: dict[str, Any] = mapping_field(manifest, "metadata")
            self.parameters: dict[str, Shard] = {}
            """Unpadded, without what they started from."""
            self.dtypes: dict[str, str] = {}
            """What the run computed with."""
            for name, entry in mapping_field(manifest, "parameters").items():
                self.parameters[name] = parameter_shard(name, entry)
                self.dtypes[name] = string_field(entry, "dtype")
            files = mapping_field(manifest, "files")
            self.file_bytes: dict[str, int] = {}
            by_file = {}
            for name, entry in files.items():
                by_file[name] = list(self._file(name, entry))
                self.file_bytes[name] = count_field(entry, "bytes")
                count_field(entry, "header_crc32")
            self.fragments: Sequence[StoredFragment] = [at for fragments in by_file.values() for at in fragments]
            """In the order of the files, and within them."""
        self._tensors: dict[tuple[str, str], list[StoredFragment]] = {}
        for at in self.fragments:
            self._tensors.setdefault((at.name, at.kind), []).append(at)
        self.kinds = tuple(sorted({at.kind for at in self.fragments}, key=lambda kind: (kind != "weight", kind)))
        """`weight` first."""
        with as_damage(path):
            self._check_completeness()
        for name, entry in files.items():
            self._check_file(name, entry["header_crc32"], by_file[name])
        self._maps: dict[str, tuple[mmap.mmap, Tensor]] = {}
        self._unreleased_bytes = 0

    def _file(self, file: str, entry: Any) -> Iterator[StoredFragment]:
        """What the manifest says of a file, which is laid out in the order of its fragments."""
        if not RANK_FILE.fullmatch(file):
            raise CheckpointError(f"files: {file!r} is no name of a rank's file, such as rank_00000.safetensors")
        listed = mapping_field(entry, "fragments", list)
        sizes = [count_field(fragment, "numel") * ITEM_BYTES for fragment in listed]
        offset = count_field(entry, "bytes") - sum(sizes)
        if offset < 8 or offset % ITEM_BYTES:
            raise CheckpointError(f"files: {file} has {entry['bytes']} bytes, but its fragments make {sum(sizes)}")
        for fragment, num_bytes in zip(listed, sizes, strict=True):
            name = string_field(fragment, "name")
            if name not in self.parameters:
                raise CheckpointError(f"files: {file} has a fragment of {name!r}, which is no parameter")
            yield StoredFragment(
                file=file,
                name=name,
                kind=string_field(fragment, "kind"),
                tensor_rank=count_field(fragment, "tensor_rank"),
                tensor_size=count_field(fragment, "tensor_size"),
                padding=count_field(fragment, "padding"),
                start=count_field(fragment, "start"),
                numel=count_field(fragment, "numel"),
                crc32=count_field(fragment, "crc32"),
                offset=offset,
            )
            offset += num_bytes

    def _check_file(self, file: str, header_crc32: int, fragments: Sequence[StoredFragment]) -> None:
        """That the file has the size and the header that the manifest says. Reads the header alone."""
        path, expected_bytes = self.folder / file, self.file_bytes[file]
        with open_file(path) as descriptor, as_damage(path):
            num_bytes = os.fstat(descriptor).st_size
            if num_bytes != expected_bytes:
                raise CheckpointError(f"it has {num_bytes} bytes, but {MANIFEST} says {expected_bytes}; {REMEDY}")
            data_start = fragments[0].offset if fragments else num_bytes
            header = os.pread(descriptor, data_start, 0)
            said = header_metadata(header)
            if said.get("save") not in (None, self.token) or said.get("file") not in (None, file):
                raise CheckpointError(
                    f"it is {said.get('file')} of the save {said.get('tag')} {said.get('save')}, not {file} of "
                    f"{self.tag} {self.token}; {REMEDY}"
                )
            if isal_zlib.crc32(header) != header_crc32:
                raise CheckpointError(f"its header (bytes 0 to {data_start}) has another checksum; {REMEDY}")
            if header != safetensors_header(self.tag, self.token, file, fragments, data_start):
                raise CheckpointError(f"its header lists other tensors than {MANIFEST}; {REMEDY}")

    def _check_completeness(self) -> None:
        for name in self.parameters:
            if (name, "weight") not in self._tensors:
                raise CheckpointError(f"there is no weight of {name}; save the checkpoint anew, or load another")
        for (name, kind), fragments in self._tensors.items():
            try:
                problem = tiling_fault(self.parameters[name], fragments)
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
                f"{self.folder} holds {name} as {described(stored)}; this model has it as {described(shard)}. "
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
            with open_file(path) as descriptor, as_damage(path):
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

    def share(self, share: tuple[int, int]) -> list[StoredFragment]:
        """The fragments that number share[0] of share[1] workers verifies, so that each has as many bytes to read."""
        index, count = share
        total, before, own = sum(at.num_bytes for at in self.fragments), 0, []
        for at in self.fragments:
            if index <= before * count // max(total, 1) < index + 1:
                own.append(at)
            before += at.num_bytes
        return own

    def verify(self, share: tuple[int, int] = (0, 1), progress: ReportBytes | None = None) -> None:
        """Compare the checksum of every tensor of this share. Raises CheckpointError naming each damage."""
        own = self.share(share)
        buffer = memoryview(bytearray(min(PIECE_BYTES, max((at.num_bytes for at in own), default=0))))
        damages = []
        for file, fragments in itertools.groupby(own, lambda at: at.file):
            path = self.folder / file
            with open_file(path) as descriptor, as_damage(path):
                for at in fragments:
                    found, done = 0, 0
                    while done < at.num_bytes:
                        count = os.preadv(descriptor, [buffer[: at.num_bytes - done]], at.offset + done)
                        if not count:
                            raise CheckpointError(f"it ends at byte {at.offset + done}; {REMEDY}")
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
        if TAG.fullmatch(tag) and os.path.lexists(path / MANIFEST):
            found.append((iteration_of(tag), tag == path.name, path.name, path))
    return [path for *_, path in sorted(found, reverse=True)]


def _read_latest(save: Path) -> str:
    path = save / LATEST
    remedy = "write the name of a whole checkpoint into it"
    with open_file(path) as descriptor, as_damage(path):
        content = os.read(descriptor, 4096)
        tag = content.decode("ascii", "backslashreplace").strip()
        if not TAG.fullmatch(tag):
            raise CheckpointError(f"it says {tag[:80]!r}, which names no checkpoint; {remedy}")
        if not (save / tag).is_dir():
            raise CheckpointError(f"it names {tag}, but {save / tag} is not there; {remedy}")
    return tag
