"""State of unfinished preprocessing, from which a killed run can resume.

PREFIX.unfinished/ holds a work folder for each dataset being built, the entries of its manifest, sources.json: the
files of the input, and state.json: how much is safely on disk, and the place in the input where that ends. That is
replaced atomically, so a kill at any moment leaves the last good one.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from megatron.data.index.indexed import DataError
from megatron.data.index.indexed_builder import BuilderState
from megatron.data.read.document_blocks import Position
from megatron.data.read.sources import SourceFile
from megatron.runtime.files import lock_file, parse_json, replacing

TAIL_BYTES = 1 << 16
"""Length of the input before a position that is compared before resuming there."""


@dataclass(frozen=True)
class State:
    """Progress that is safely on disk."""

    position: Position
    """End of the processed input."""
    is_complete: bool
    """All input is processed."""
    totals: dict[str, Any]
    manifest: dict[str, Any]
    """Result of ManifestLog.save_state."""
    builders: dict[str, BuilderState]
    """Builders by the name of their work folder."""


class UnfinishedWork:
    """Folder of the unfinished work of an output prefix, locked while the context manager is active.

    `identity` holds everything that decides the output, except the content of the input, as JSON values. Without
    `is_kept` nothing is saved to resume from, and the folder is of this process alone: on a file system without locks,
    two nodes that make the same datasets do not share it.
    """

    def __init__(self, output_prefix: str, identity: dict[str, Any], sources: Sequence[SourceFile], is_kept: bool):
        # random, since two nodes may make the same dataset on a file system without locks
        ending = "unfinished" if is_kept else f"partial-{uuid.uuid4().hex[:12]}"
        self.folder = Path(f"{output_prefix}.{ending}")
        self.is_kept = is_kept
        # as it will be read back: tuples become lists
        self._identity = json.loads(json.dumps(identity))
        self._sources = sources
        self._has_saved_sources = False
        self._lock: IO[bytes] | None = None

    def __enter__(self) -> UnfinishedWork:
        """Lock the folder. Raises DataError if another process holds it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        # the kernel releases it when the process dies, however it dies
        self._lock = (self.folder / "lock").open("ab")
        if not lock_file(self._lock):
            self._lock.close()
            raise DataError(
                f"another process is writing in {self.folder}; wait until it ends, or give another --output-prefix"
            )
        return self

    def __exit__(self, *_: object) -> None:
        if self._lock is not None:
            self._lock.close()
        if not self.is_saved:
            self.remove()

    def remove(self) -> None:
        """Remove the folder, state.json first: without it there is nothing to resume."""
        # a folder that cannot be removed must not hide how the run ended
        with contextlib.suppress(OSError):
            self._state_path.unlink(missing_ok=True)
        shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def is_saved(self) -> bool:
        """True if there is a state to resume from."""
        return self._state_path.exists()

    def work_dir(self, name: str) -> Path:
        return self.folder / name

    @property
    def _state_path(self) -> Path:
        return self.folder / "state.json"

    def start(self) -> None:
        """Start with an empty folder. Raises DataError if there is a state to resume from."""
        if self.is_saved:
            try:
                done = f"{self._read()['position']['documents']} documents"
            except DataError:
                done = "documents"
            raise DataError(
                f"{self.folder} holds {done} of an unfinished run; pass --resume to continue it, or delete it to "
                "start over"
            )
        self.clear()

    def clear(self) -> None:
        """Discard all saved work."""
        # first the state: without its builders it would be resumed into nothing
        self._state_path.unlink(missing_ok=True)
        for path in self.folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path)

    def save(self, state: State) -> None:
        """Replace state.json."""
        if not self._has_saved_sources:
            # in a file of its own: a list of a million files is too long to write every few seconds
            self._write("sources.json", [_describe(source) for source in self._sources])
            self._has_saved_sources = True
        content = {
            "identity": self._identity,
            "tail": _tail_digest(self._sources, state.position),
            "position": asdict(state.position),
            "is_complete": state.is_complete,
            "totals": state.totals,
            "manifest": state.manifest,
            "builders": {name: builder.to_json() for name, builder in state.builders.items()},
        }
        self._write(self._state_path.name, content)

    def _write(self, name: str, content: Any) -> None:
        with replacing(self.folder / name, partial_name=f"{name}.partial") as file:
            file.write(json.dumps(content).encode())

    def load(self) -> State | None:
        """Return the saved state, None without one. Raises DataError if this run differs from the saving one."""
        if not self.is_saved:
            return None
        content = self._read()
        # one by one, to name what differs
        for name, now in self._identity.items():
            before = content["identity"].get(name)
            if before != now:
                raise DataError(
                    f"--resume: {name} was {json.dumps(before)} in the run that left {self.folder}, and is "
                    f"{json.dumps(now)} now; repeat that command, or delete the folder to start over"
                )
        position = Position(**content["position"])
        self._check_sources(self._saved_sources(), content["tail"], position)
        # the builders compare the sizes with what is on disk
        builders = {name: BuilderState.from_json(builder) for name, builder in content["builders"].items()}
        return State(position, content["is_complete"], content["totals"], content["manifest"], builders)

    def _read(self) -> dict[str, Any]:
        try:
            content: dict[str, Any] = parse_json(self._state_path.read_text(encoding="utf-8"))
            Position(**content["position"])
            return content
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{self._state_path} is damaged ({error}); delete {self.folder} to start over") from error

    def _saved_sources(self) -> list[list[Any]]:
        path = self.folder / "sources.json"
        try:
            sources: list[list[Any]] = parse_json(path.read_text(encoding="utf-8"))
            return sources
        except (ValueError, FileNotFoundError) as error:
            raise DataError(f"{path} is damaged ({error}); delete {self.folder} to start over") from error

    def _check_sources(self, saved: list[list[Any]], saved_tail: str, position: Position) -> None:
        """Raise DataError if input before the position has changed. Later input may: the user may repair a bad line."""
        now = [_describe(source) for source in self._sources]
        if [path for path, *_ in saved] != [path for path, *_ in now]:
            raise DataError(
                f"--resume: --input had {len(saved)} files in the run that left {self.folder}, and has {len(now)} or "
                "others now; give the same, or delete the folder to start over"
            )
        for number, (before, after) in enumerate(zip(saved, now, strict=True)):
            # a size or time that changed means other content, except of what is still to be read
            if number > position.source or before == after:
                continue
            # a user may repair the line at which a run stopped, and resume
            is_read_in_part = number == position.source and _can_be_compared(self._sources[number])
            if not is_read_in_part or _tail_digest(self._sources, position) != saved_tail:
                raise DataError(
                    f"--resume: {before[0]} has changed since it was read; delete {self.folder} to start over"
                )


def _describe(source: SourceFile) -> list[Any]:
    name = source.public_name
    if source.transport == "file":
        name = os.path.abspath(source.name)
    return [name, source.num_bytes, source.version]


def _can_be_compared(source: SourceFile) -> bool:
    return source.transport == "file" and source.kind in ("jsonl", "text") and not source.compression


def _tail_digest(sources: Sequence[SourceFile], position: Position) -> str:
    """Return a digest of the last bytes before the position; empty if it does not count bytes of the file."""
    if position.source >= len(sources) or not _can_be_compared(sources[position.source]):
        return ""
    # not all of the file: hashing terabytes would take longer than the rest of the work
    begin = max(0, position.offset - TAIL_BYTES)
    with open(sources[position.source].name, "rb") as file:
        file.seek(begin)
        return hashlib.sha256(file.read(position.offset - begin)).hexdigest()


def kept_work(output_prefix: str) -> str:
    """Return the end of an error message that names the work to resume from; "" if there is none."""
    folder = Path(f"{output_prefix}.unfinished")
    if not folder.exists():
        return ""
    return f"\nthe work so far is kept in {folder}: --resume continues from there"
