"""Reading checkpoints: finding the newest one of a folder, opening it, and reading any slice of its tensors."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import mmap
import os
import warnings
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from isal import isal_zlib
from torch import Tensor

from megatron.checkpoint.folders import (
    MANIFEST,
    REMEDY,
    START_OPTIONS,
    TAG,
    UNRECORDED,
    Run,
    checkpoint_folders,
    holds_checkpoints,
    of_run,
    open_file,
    run_in,
)
from megatron.checkpoint.foreign import foreign_format, is_model
from megatron.checkpoint.format import (
    ITEM_BYTES,
    LATEST,
    PIECE_BYTES,
    CheckpointError,
    RankFile,
    StoredFragment,
    as_damage,
    check_tag,
    described,
    header_metadata,
    read_manifest,
    safetensors_header,
)
from megatron.checkpoint.source import AVERAGE, Slice, WeightSource, copy_overlap, regions
from megatron.hub.names import repository_of
from megatron.options.config import CheckpointConfig
from megatron.parallel.shards import Shard
from megatron.runtime.files import parse_json

LATEST_BYTES = 1 << 20
LATEST_REMEDY = "write the name of a complete checkpoint into it"
RELEASE_BYTES = 32 << 20
"""Bytes read through a mapping before its pages are released."""
SHOWN_DAMAGES = 10
ReportBytes = Callable[[int], object]
"""Callback for progress: receives the number of bytes processed since its previous call."""

logger = logging.getLogger(__name__)


class Checkpoint(WeightSource):
    """A complete checkpoint. Opening it reads the manifest and the headers and checks names, sizes and completeness.

    The checksums of the tensors are checked by `verify`. Raises CheckpointError if anything is missing or wrong.
    """

    format, title = "native", "native"

    def __init__(self, folder: str | Path):
        manifest = read_manifest(Path(folder))
        self.tag, self.token, self.dtypes = manifest.tag, manifest.token, manifest.dtypes
        self._tensors = manifest.tensors
        self.file_bytes = {name: file.num_bytes for name, file in manifest.files.items()}
        self.fragments: Sequence[StoredFragment] = [at for file in manifest.files.values() for at in file.fragments]
        """In the order of the files, and within them."""
        kinds = sorted({at.kind for at in self.fragments}, key=lambda kind: (kind != "weight", kind))
        super().__init__(Path(folder), manifest.parameters, kinds=kinds, metadata=manifest.metadata)
        # cheap, so at every opening: a file of another save must not wait for its checksums to be found
        for name, file in manifest.files.items():
            self._check_file(name, file)
        self._maps: dict[str, tuple[mmap.mmap, Tensor]] = {}
        self._unreleased_bytes = 0
        self._reads_average = False

    def use_average(self) -> None:
        """Read the moving average of the run's trained weights in their place. Raises CheckpointError without one."""
        if AVERAGE not in self.kinds:
            raise CheckpointError(
                f"{self.folder} holds no moving average of the weights, which its run kept with --ema-decay; leave "
                "--weights ema out"
            )
        self._reads_average = True

    def _kind_read(self, name: str, kind: str) -> str:
        """Return the kind of tensor that `read` takes for one."""
        # frozen weights have no average
        if kind == "weight" and self._reads_average and (name, AVERAGE) in self._tensors:
            return AVERAGE
        return kind

    def _check_file(self, name: str, file: RankFile) -> None:
        """Compare size and header with the manifest. Reads the header alone."""
        path = self.folder / name
        with open_file(path) as descriptor, as_damage(path):
            num_bytes = os.fstat(descriptor).st_size
            if num_bytes != file.num_bytes:
                raise CheckpointError(f"it has {num_bytes} bytes, but {MANIFEST} says {file.num_bytes}; {REMEDY}")
            data_start = file.fragments[0].offset if file.fragments else num_bytes
            header = os.pread(descriptor, data_start, 0)
            # before the checksum: a whole file of another save is not damaged, but in the wrong folder
            stated = header_metadata(header)
            if stated.get("save") not in (None, self.token) or stated.get("file") not in (None, name):
                raise CheckpointError(
                    f"it is {stated.get('file')} of the save {stated.get('tag')} {stated.get('save')}, not {name} of "
                    f"{self.tag} {self.token}; {REMEDY}"
                )
            if isal_zlib.crc32(header) != file.header_crc32:
                raise CheckpointError(f"its header (bytes 0 to {data_start}) has another checksum; {REMEDY}")
            # made again from the manifest, not parsed: nothing can be in a header that the manifest does not say
            if header != safetensors_header(self.tag, self.token, name, file.fragments, data_start):
                raise CheckpointError(f"its header lists other tensors than {MANIFEST}; {REMEDY}")

    @property
    def num_bytes(self) -> int:
        """Size of all files but the manifest."""
        return sum(self.file_bytes.values())

    def kinds_of(self, name: str) -> tuple[str, ...]:
        return tuple(kind for kind in self.kinds if (name, kind) in self._tensors)

    def read(self, at: Slice, kind: str = "weight") -> Tensor:
        """Reads only what it needs of the files."""
        kind = self._kind_read(at.name, kind)
        shard = self._shard_like(at.name, kind, at.shard)
        wanted = regions(at.shard, at.tensor_rank, at.tensor_size, at.start, at.numel)
        # padding is in no file, and reads as zero
        target = torch.zeros(at.numel) if at.shard.padding else torch.empty(at.numel)
        for stored in self._tensors[at.name, kind]:
            start, numel = stored.start, stored.numel
            is_cut_alike = stored.tensor_size == at.tensor_size and stored.padding == at.shard.padding
            if is_cut_alike and at.shard.dim is not None:
                # on the same layout only fragments of this rank within the stretch can overlap it
                start = max(at.start, stored.start)
                numel = min(at.start + at.numel, stored.start + stored.numel) - start
                if stored.tensor_rank != at.tensor_rank or numel <= 0:
                    continue
            held = regions(replace(shard, padding=stored.padding), stored.tensor_rank, stored.tensor_size, start, numel)
            # in elements from the beginning of the file, which is mapped as float32 with its header
            begin = stored.offset // ITEM_BYTES + start - stored.start
            copy_overlap(self._map(stored.file)[begin : begin + numel], held, target, wanted)
        self._release(at.numel * ITEM_BYTES)
        return target

    def read_full(self, name: str, kind: str = "weight") -> Tensor:
        self._shard(name)
        return super().read_full(name, kind)

    def _shard(self, name: str) -> Shard:
        if name not in self.parameters:
            some = ", ".join(list(self.parameters)[:3])
            raise CheckpointError(
                f"{self.folder} holds no parameter {name!r}, but {len(self.parameters)} others, such as {some}"
            )
        return self.parameters[name]

    def _shard_like(self, name: str, kind: str, shard: Shard) -> Shard:
        stored = self._shard(name)
        if (name, kind) not in self._tensors:
            there = ", ".join(self.kinds_of(name))
            raise CheckpointError(f"{self.folder} holds no {kind} of {name}, only {there}")
        if (stored.shape, stored.dim, stored.pieces) != (shard.shape, shard.dim, shard.pieces):
            raise CheckpointError(
                f"{self.folder} holds {name} as {described(stored)}; this model has it as {described(shard)}. "
                "Give the options of the model that was saved"
            )
        return stored

    def _map(self, file: str) -> Tensor:
        """Map a whole file as float32, header included."""
        if file not in self._maps:
            path = self.folder / file
            with open_file(path) as descriptor, as_damage(path):
                if os.fstat(descriptor).st_size != self.file_bytes[file]:
                    raise CheckpointError("its size has changed since the checkpoint was opened")
                # mapped: slices of any layout are scattered over the file, and copied once
                mapped = mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the tensor is read-only, and no code writes to it
                tensor = torch.frombuffer(mapped, dtype=torch.float32, count=len(mapped) // ITEM_BYTES)
            self._maps[file] = (mapped, tensor)
        return self._maps[file][1]

    def _release(self, num_bytes: int) -> None:
        """Release the mapped pages from time to time, so that memory does not grow with the bytes read."""
        self._unreleased_bytes += num_bytes
        if self._unreleased_bytes >= RELEASE_BYTES:
            # of a shared mapping that only reads: a page that is touched again comes from the file again
            for mapped, _ in self._maps.values():
                mapped.madvise(mmap.MADV_DONTNEED)
            self._unreleased_bytes = 0

    def share(self, share: tuple[int, int]) -> list[StoredFragment]:
        """Fragments that worker share[0] of share[1] verifies, so that each worker reads as many bytes."""
        index, count = share
        # by bytes: one embedding is larger than a thousand norms
        total = sum(at.num_bytes for at in self.fragments)
        own, before = [], 0
        for at in self.fragments:
            # a fragment is that worker's in whose share of the bytes it begins, so none is left out or read twice
            if before * count // max(total, 1) == index:
                own.append(at)
            before += at.num_bytes
        return own

    def verify(
        self,
        share: tuple[int, int] = (0, 1),
        kinds: Collection[str] | None = None,
        progress: ReportBytes = lambda num_bytes: None,
    ) -> str:
        """Compare the checksum of every tensor of this share and of `kinds` (None: all); return what was checked.

        Of weights in whose place averages are read, the averages are checked. Raises CheckpointError that names each
        damaged one.
        """
        own = self.share(share)
        if kinds is not None:
            own = [at for at in own if at.kind in {self._kind_read(at.name, kind) for kind in kinds}]
        buffer = memoryview(bytearray(min(PIECE_BYTES, max((at.num_bytes for at in own), default=0))))
        damages = []
        # groups are of neighbours: the fragments are in the order of their files
        for file, fragments in itertools.groupby(own, lambda at: at.file):
            path = self.folder / file
            with open_file(path) as descriptor, as_damage(path):
                for at in fragments:
                    checksum = _crc32(descriptor, at, buffer, progress)
                    if checksum != at.crc32:
                        damages.append(
                            f"{path}: {at.kind} of {at.name} (bytes {at.offset} to {at.offset + at.num_bytes}) has the "
                            f"checksum {checksum:08x}, not {at.crc32:08x}"
                        )
        if damages:
            lines = damages[:SHOWN_DAMAGES]
            if len(damages) > SHOWN_DAMAGES:
                lines.append(f"... {len(damages)} damaged tensors in all")
            lines.append("Load another checkpoint, or copy these files again from where it was saved")
            raise CheckpointError("\n".join(lines))
        return f"the CRC-32 of {len(own)} tensors and the SHA-256 of {MANIFEST}"


def use_average(source: WeightSource) -> None:
    """Read the moving average of a run's weights in their place. Raises CheckpointError where there is none."""
    if not isinstance(source, Checkpoint):
        raise CheckpointError(
            f"--weights ema reads the moving average in a run's own checkpoint, but {source.folder} is {source.title}; "
            "leave it out"
        )
    source.use_average()


def _crc32(descriptor: int, at: StoredFragment, buffer: memoryview, progress: ReportBytes) -> int:
    checksum, done = 0, 0
    while done < at.num_bytes:
        count = os.preadv(descriptor, [buffer[: at.num_bytes - done]], at.offset + done)
        if not count:
            raise CheckpointError(f"it ends at byte {at.offset + done}; {REMEDY}")
        checksum = isal_zlib.crc32(buffer[:count], checksum)
        done += count
        progress(count)
    return checksum


def open_checkpoint(folder: Path) -> Checkpoint | None:
    """Open the checkpoint in `folder` itself, or the newest one in a folder of them, never an older one instead.

    Raises CheckpointError.
    """
    if os.path.lexists(folder / MANIFEST):
        return Checkpoint(folder)
    return newest_checkpoint(folder, fall_back=False)


def newest_checkpoint(
    folder: str | Path,
    *,
    tag: str | None = None,
    fall_back: bool = True,
    excluding: Collection[str] = (),
    run: Run | None = None,
) -> Checkpoint | None:
    """Return the checkpoint that `latest` names, or `tag`; None where `folder` is missing or empty.

    With `fall_back`, a checkpoint that is missing or damaged is replaced by the newest complete one of the same run or
    its ancestors, with a warning; a `tag` never is. `run`: only checkpoints that this run itself saved. `excluding`
    lists names of folders known to be damaged. Hidden files and folders, as a killed run leaves them, are ignored.
    Raises CheckpointError if `folder` holds other things, or no complete checkpoint.
    """
    save = Path(folder)
    if not os.path.lexists(save):
        return None
    if not save.is_dir():
        other = foreign_format(save)
        raise CheckpointError(other or f"{save} is a file; give the folder that a run saved its checkpoints in")
    candidates = checkpoint_folders(save)
    if not candidates:
        _refuse_others(save)
        # hidden names are leftovers of a first save that was killed: the run is as good as new
        if all(entry.name.startswith(".") for entry in save.iterdir()):
            return None
    if tag is not None:
        check_tag(tag)
        return Checkpoint(save / tag)
    if not candidates and not os.path.lexists(save / LATEST):
        raise _no_run_folder(save)
    return _newest_of(save, candidates, run, excluding, fall_back=fall_back)


def _newest_of(
    save: Path, candidates: Sequence[Path], run: Run | None, excluding: Collection[str], *, fall_back: bool
) -> Checkpoint:
    lineage, problems = run, []
    try:
        latest, of_latest = read_latest(save)
        if run is None:
            lineage = of_latest
        # several runs may save into one folder (allow_used_save), and `latest` is of the one that saved last
        is_own = run is None or (of_latest is not None and of_latest.id == run.id)
        if is_own and latest not in excluding:
            return _named_by_latest(save, latest)
        if is_own:
            problems.append(f"{latest} is damaged")
    except CheckpointError as error:
        if not fall_back:
            raise
        problems.append(str(error))
    return _older_one(save, candidates, lineage, problems, excluding, with_ancestors=run is None)


def _older_one(
    save: Path,
    candidates: Sequence[Path],
    lineage: Run | None,
    problems: list[str],
    excluding: Collection[str],
    *,
    with_ancestors: bool,
) -> Checkpoint:
    """Return the newest complete checkpoint of a lineage. `problems`: those of the newer ones, for messages."""
    # a newer one of another run in the folder would continue that run
    for path in _lineage_of(save, candidates, lineage, with_ancestors=with_ancestors):
        if path.name in excluding:
            continue
        try:
            checkpoint = Checkpoint(path)
        except CheckpointError as error:
            if str(error) not in problems:
                problems.append(str(error))
            continue
        if problems:
            logger.warning("%s is loaded instead of a newer one: %s", path, "; ".join(problems))
        return checkpoint
    whose = ""
    if lineage is not None and lineage.id != UNRECORDED:
        whose = f" of run {lineage.id}"
    raise CheckpointError(f"{save} holds no complete checkpoint{whose}: " + "; ".join(problems))


def _refuse_others(save: Path) -> None:
    """Raise CheckpointError where a folder without checkpoints of a run holds something else that is known."""
    if is_model(save):
        raise CheckpointError(
            f"{save} holds a model of transformers, or adapters, not checkpoints of a run; give the folder that a run "
            "saved its checkpoints in, or one that convert_checkpoint --to native wrote"
        )
    other = foreign_format(save)
    # `checkpoints`: where the scripts save, in the folder of a run's results
    if other is not None and not (save / "checkpoints").is_dir():
        raise CheckpointError(other)


def _no_run_folder(save: Path) -> CheckpointError:
    if os.path.lexists(save / MANIFEST):
        return CheckpointError(f"{save} is a checkpoint; give the folder that contains it: {save.parent}")
    inner = save / "checkpoints"  # where the scripts save, in the folder of a run's results
    remedy = f": {inner}" if (inner / LATEST).is_file() else ", or an empty folder for a new run"
    return CheckpointError(
        f"{save} holds files but no checkpoint (no `{LATEST}`); give the folder that a run saved its checkpoints "
        f"in{remedy}"
    )


def _lineage_of(save: Path, candidates: Sequence[Path], run: Run | None, *, with_ancestors: bool) -> list[Path]:
    """Return the candidates to fall back to. Raises CheckpointError if they are of several runs and none is known."""
    if run is not None:
        return of_run(run, candidates, with_ancestors=with_ancestors)
    newest = {}
    # from the oldest on: of each run the last one stays, its newest
    for path in reversed(candidates):
        saver = run_in(path)
        if saver is not None:
            newest[saver.id] = path.name
    if len(newest) > 1:
        runs = ", ".join(f"{tag} of run {name}" for name, tag in newest.items())
        raise CheckpointError(
            f"{save} holds checkpoints of several runs, and `{LATEST}` does not say which to resume: {runs}. Write the "
            "name of a checkpoint into it"
        )
    return list(candidates)


def read_latest(save: Path) -> tuple[str, Run | None]:
    """Return the tag in `latest`, and the run that it belongs to; None: unknown. Raises CheckpointError."""
    path = save / LATEST
    with open_file(path) as descriptor, as_damage(path):
        # whatever bytes a damaged file has must reach the message instead of a UnicodeDecodeError
        tag, _, record = os.read(descriptor, LATEST_BYTES).decode("ascii", "backslashreplace").strip().partition("\n")
        tag = tag.strip()
        if not TAG.fullmatch(tag):
            raise CheckpointError(f"it says {tag[:80]!r}, which is not the name of a checkpoint; {LATEST_REMEDY}")
    if record:  # a file of an older release has the tag alone
        with contextlib.suppress(ValueError, CheckpointError):
            return tag, Run.of({"run": parse_json(record)})
    return tag, run_in(save / tag)


def _named_by_latest(save: Path, tag: str) -> Checkpoint:
    if not (save / tag).is_dir():
        raise CheckpointError(f"{save / LATEST}: it names {tag}, but {save / tag} is not there; {LATEST_REMEDY}")
    return Checkpoint(save / tag)


DEFAULTS: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(CheckpointConfig)}


def own_run(options: CheckpointConfig) -> Run | None:
    """Return the run that saved in `save` and had the same START_OPTIONS at its first start; None: there is none.

    Of several it is the one that `latest` names, or else the one with the newest checkpoint.
    """
    if options.save is None or not holds_checkpoints(Path(options.save)) or resumes_itself(options):
        return None
    runs = [run_in(path) for path in checkpoint_folders(Path(options.save))]
    # first: after a branch the newest checkpoint may be of the other run
    with contextlib.suppress(CheckpointError):
        runs.insert(0, read_latest(Path(options.save))[1])
    for run in runs:
        if run is not None and run.start and _was_started_by(run, options):
            return run
    return None


def _was_started_by(run: Run, options: CheckpointConfig) -> bool:
    load = run.start.get("load")
    if _source(load, options) != _source(options.load, options) and not _are_of_one_name(load, options.load):
        return False
    # an option that is newer than the record had its default then
    return all(run.start.get(name, DEFAULTS[name]) == getattr(options, name) for name in START_OPTIONS[1:])


def resumes_itself(options: CheckpointConfig) -> bool:
    """Return True if the options resume the newest checkpoint of the folder that the run saves to."""
    return is_same_folder(options.load, options.save) and all(
        getattr(options, name) == DEFAULTS[name] for name in START_OPTIONS[1:]
    )


def _source(load: str | None, options: CheckpointConfig) -> str | None:
    """Return the folder that a run begins with, however it is spelled; None for its own, which is empty then."""
    if load is None or is_same_folder(load, options.save):
        return None
    return os.path.realpath(load)


def _are_of_one_name(one: str | None, other: str | None) -> bool:
    """Return True for a name on the hub, or its folders in the cache: a later commit makes no other run of it."""
    if one is None or other is None:
        return False
    name = repository_of(one)
    return name is not None and name == repository_of(other)


def is_same_folder(one: str | None, other: str | None) -> bool:
    return one is not None and other is not None and os.path.realpath(one) == os.path.realpath(other)
