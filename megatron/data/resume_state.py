"""The folder in which a dataset grows until it is whole, and from which a killed run can go on.

PREFIX.unfinished/ holds a work folder for each dataset being built and state.json, which says how much of them is
safely on disk and where in the input that ends. It is replaced whole, so a kill at any moment leaves the last good one.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from megatron.data.document_blocks import Position
from megatron.data.indexed import DataError
from megatron.data.indexed_builder import BuilderState
from megatron.data.sources import SourceFile
from megatron.files import replacing

TAIL_BYTES = 1 << 16
"""How much of what was read of a file is compared before going on behind it."""


@dataclass(frozen=True)
class State:
    """What is safely on disk."""

    position: Position
    """Where in the input it ends."""
    is_complete: bool
    """Nothing is left to read."""
    totals: dict[str, Any]
    builders: dict[str, BuilderState]
    """By the name of their work folder."""


class UnfinishedWork:
    """The folder of one output prefix. A context manager: its lock is held inside.

    `identity` is all that decides what is written, apart from the input's content; JSON values.
    """

    def __init__(self, output_prefix: str, identity: dict[str, Any], sources: Sequence[SourceFile]):
        self.folder = Path(f"{output_prefix}.unfinished")
        self._identity = json.loads(json.dumps(identity))
        self._sources = sources
        self._lock: IO[bytes] | None = None

    def __enter__(self) -> UnfinishedWork:
        """Raises DataError if another process has it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = (self.folder / "lock").open("ab")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.close()
            raise DataError(
                f"another process is writing in {self.folder}; wait for its end, or give another --output-prefix"
            ) from None
        except OSError:
            pass  # some network file systems know no locks
        return self

    def __exit__(self, *_: object) -> None:
        if self._lock is not None:
            self._lock.close()
        if not self.is_saved:
            self.remove()

    def remove(self) -> None:
        """All of it, state.json first: what is left after that is no work to go on from."""
        with contextlib.suppress(OSError):
            self._state_path.unlink(missing_ok=True)
        shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def is_saved(self) -> bool:
        """Whether there is anything to go on from."""
        return self._state_path.exists()

    def work_dir(self, name: str) -> Path:
        return self.folder / name

    @property
    def _state_path(self) -> Path:
        return self.folder / "state.json"

    def start(self) -> None:
        """Begin with an empty folder. Raises DataError if there is work to go on from."""
        if self.is_saved:
            try:
                done = f"{self._read()['position']['documents']} documents"
            except DataError:
                done = "documents"
            raise DataError(
                f"{self.folder} holds {done} of an unfinished run; pass --resume to go on with it, or delete it to "
                "start anew"
            )
        self.clear()

    def clear(self) -> None:
        """Throw away what is there, and begin with an empty folder."""
        self._state_path.unlink(missing_ok=True)
        for path in self.folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path)

    def save(self, state: State) -> None:
        """Replace state.json."""
        content = {
            "identity": self._identity,
            "sources": [_describe(source) for source in self._sources],
            "tail": _tail_digest(self._sources, state.position),
            "position": asdict(state.position),
            "is_complete": state.is_complete,
            "totals": state.totals,
            "builders": {name: builder.to_json() for name, builder in state.builders.items()},
        }
        with replacing(self._state_path, partial_name=f"{self._state_path.stem}.partial") as file:
            file.write(json.dumps(content).encode())

    def load(self) -> State | None:
        """What was saved; None: nothing. Raises DataError where this run differs from the one that saved it."""
        if not self.is_saved:
            return None
        content = self._read()
        for name, now in self._identity.items():
            before = content["identity"].get(name)
            if before != now:
                raise DataError(
                    f"--resume: {name} was {json.dumps(before)} in the run that left {self.folder}, and is "
                    f"{json.dumps(now)} now; repeat that command, or delete the folder to start anew"
                )
        position = Position(**content["position"])
        self._check_sources(content["sources"], content["tail"], position)
        builders = {name: BuilderState.from_json(builder) for name, builder in content["builders"].items()}
        return State(position, content["is_complete"], content["totals"], builders)

    def _read(self) -> dict[str, Any]:
        try:
            content: dict[str, Any] = json.loads(self._state_path.read_text(encoding="utf-8"))
            Position(**content["position"])
            return content
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{self._state_path} is damaged ({error}); delete {self.folder} to start anew") from error

    def _check_sources(self, saved: list[list[Any]], saved_tail: str, position: Position) -> None:
        """What was read must not have changed since. What was not may have: a bad line is there to be mended."""
        now = [_describe(source) for source in self._sources]
        if [path for path, *_ in saved] != [path for path, *_ in now]:
            raise DataError(
                f"--resume: --input had {len(saved)} files in the run that left {self.folder}, and has {len(now)} or "
                "others now; give the same, or delete the folder to start anew"
            )
        for number, (before, after) in enumerate(zip(saved, now, strict=True)):
            if number > position.source or before == after:
                continue
            is_read_in_part = number == position.source and _can_be_compared(self._sources[number])
            if not is_read_in_part or _tail_digest(self._sources, position) != saved_tail:
                raise DataError(
                    f"--resume: {before[0]} has changed since it was read; delete {self.folder} to start anew"
                )


def _describe(source: SourceFile) -> list[Any]:
    status = source.path.stat()
    return [str(source.path.resolve()), status.st_size, status.st_mtime_ns]


def _can_be_compared(source: SourceFile) -> bool:
    return source.kind != "parquet" and not source.compression


def _tail_digest(sources: Sequence[SourceFile], position: Position) -> str:
    """Of the last bytes before the position, where they are bytes of the file; empty elsewhere."""
    if position.source >= len(sources) or not _can_be_compared(sources[position.source]):
        return ""
    begin = max(0, position.offset - TAIL_BYTES)
    with sources[position.source].path.open("rb") as file:
        file.seek(begin)
        return hashlib.sha256(file.read(position.offset - begin)).hexdigest()
