"""The saves of a run: many ranks that agree by files, in the background if wanted, on a folder that is theirs alone.

What is in the folder meanwhile is told in `format.py`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import re
import shutil
import socket
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from megatron.checkpoint.format import (
    ITEM_BYTES,
    LATEST,
    LEFTOVER,
    CheckpointError,
    Fragment,
    check_tag,
    hidden_path,
    iteration_of,
    rank_file,
)
from megatron.checkpoint.reader import checkpoint_folders
from megatron.checkpoint.writer import (
    ManifestEntries,
    Writer,
    anonymous_memory,
    commit,
    header_bytes_for,
    make_folder,
    remove_checkpoint,
)
from megatron.files import write_durably

_TOKEN = re.compile(r"[A-Za-z0-9]+")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SaveResult:
    """How a save ended."""

    tag: str
    seconds: float
    """From the call of `save` to the end on this rank."""
    error: CheckpointError | None
    """None: the checkpoint is whole, durable and what `latest` names."""
    retried: str | None = None
    """Why this rank had to write its file a second time."""


class Saver:
    """Saves the checkpoints of a run; each of its processes has one. Ranks agree by files, so nothing is collective.

    A rank that has its file on disk leaves rank_00003.json, its part of the manifest, beside it. Rank 0 waits for all
    of them and gives the folder its name; the others wait for that. What goes wrong on one rank ends the save on all,
    with its message, and leaves the older checkpoints as they were.

    Rank 0 keeps SAVE/.lock locked while its process lives, so two runs never save into one folder, and what an earlier
    run left unfinished belongs to no living one: it is removed at the first save. (Where the file system knows no
    locks, it stays.)

    `keep_last` newest checkpoints by their number are kept (None: all), and those whose number is a multiple of
    `retain_interval`; never is the one just saved removed. `timeout_s` is how long nothing may happen in a save's
    folder before the ranks that are missing are given up. `beat` is called, in whichever thread saves, at each sign of
    progress. Raises CheckpointError if the folder cannot be used.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        rank: int,
        world_size: int,
        asynchronous: bool,
        keep_last: int | None,
        retain_interval: int | None,
        timeout_s: float,
        beat: Callable[[], None] = lambda: None,
    ):
        self.folder = Path(folder)
        self._beat = beat
        self._rank, self._world_size, self._asynchronous = rank, world_size, asynchronous
        self._keep_last, self._retain_interval, self._timeout_s = keep_last, retain_interval, timeout_s
        self._thread: threading.Thread | None = None
        self._outcomes: deque[SaveResult] = deque()  # a thread appends, `finished` takes
        self._buffer = torch.empty(0)
        self._leftovers_are_dead = False
        self._failed: list[tuple[str, str]] = []  # tag and token of saves whose traces are still there
        self._lock: int | None = None
        if rank == 0:
            make_folder(self.folder)
            self._lock, self._leftovers_are_dead = take_lock(self.folder)

    def save(self, tag: str, token: str, fragments: Iterable[Fragment], metadata: Mapping[str, Any]) -> None:
        """Save what this rank owns. Every rank calls it, with the same tag and token, which no other save has had.

        Waits for the save before. If asynchronous, returns when the tensors have been copied, otherwise at the end.
        Does not raise what fails: `wait` does, and `finished` tells. The metadata of rank 0 is the one that is saved.
        """
        began_s = time.monotonic()
        self.join()
        check_tag(tag)
        if not _TOKEN.fullmatch(token):
            raise CheckpointError(f"the token {token!r} of a save must be letters and digits")
        job = _Job(self, tag, token, began_s)
        try:
            text = json.dumps(metadata, allow_nan=False)
            owned = list(fragments)
            if self._asynchronous:
                owned = self._copy(owned)
        except Exception as error:
            self._outcomes.append(job.fail(error))
            return
        if self._asynchronous:
            # not a daemon: a process that ends waits for its save
            self._thread = threading.Thread(target=self._carry_out, args=(job, owned, text), name=f"save {tag}")
            self._thread.start()
        else:
            self._carry_out(job, owned, text)

    def reserve(self, fragments: Iterable[Fragment]) -> None:
        """Get the host memory of an asynchronous save of these now, so that the first one is as quick as the next."""
        if self._asynchronous:
            self.join()
            self._reserve(list(fragments))

    def wait(self) -> None:
        """Return when no save is under way. Raises CheckpointError if one failed that was not told of yet."""
        self.join()
        failed = [outcome for outcome in self._outcomes if outcome.error]
        self._outcomes = deque(outcome for outcome in self._outcomes if not outcome.error)
        if failed:
            raise CheckpointError("; ".join(str(outcome.error) for outcome in failed))

    def finished(self) -> list[SaveResult]:
        """The saves that ended since the last call, in their order. Returns at once."""
        outcomes = []
        while self._outcomes:
            outcomes.append(self._outcomes.popleft())
        return outcomes

    def close(self) -> None:
        """Wait for what is under way, and let another process save into the folder. Without it, our end does so."""
        self.join()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _reserve(self, fragments: Sequence[Fragment]) -> bool:
        """See that the host buffer holds these. Returns whether it is pinned, for copies from CUDA devices."""
        numel = sum(fragment.tensor.numel() for fragment in fragments)
        on_cuda = any(fragment.tensor.is_cuda for fragment in fragments)
        if numel > len(self._buffer):
            self._buffer = torch.empty(0)  # the old one goes before the new one comes
            if on_cuda:
                self._buffer = torch.empty(numel, pin_memory=True)
            else:
                self._buffer = torch.frombuffer(anonymous_memory(numel * ITEM_BYTES), dtype=torch.float32)
                self._buffer.zero_()  # touch every page
        return on_cuda

    def join(self) -> None:
        """Return when no save is under way, however it ended."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _copy(self, fragments: Sequence[Fragment]) -> list[Fragment]:
        """The same fragments in host memory that is kept from save to save."""
        on_cuda = self._reserve(fragments)
        copies, begin = [], 0
        for fragment in fragments:
            copy = self._buffer[begin : begin + fragment.tensor.numel()]
            copy.copy_(fragment.tensor.detach(), non_blocking=on_cuda)
            copies.append(replace(fragment, tensor=copy))
            begin += len(copy)
        if on_cuda:
            torch.cuda.synchronize()
        return copies

    def _carry_out(self, job: _Job, fragments: Sequence[Fragment], metadata_text: str) -> None:
        try:
            outcome = job.run(fragments, metadata_text)
        except Exception as error:  # of whatever kind: nobody else would hear of it
            outcome = job.fail(error)
        self._outcomes.append(outcome)

    def _remove_leftovers(self, token: str) -> None:
        """What runs before this one left. An old checkpoint that was being replaced gets its name back."""
        if not self._leftovers_are_dead:
            return
        self._leftovers_are_dead = False
        for path in self.folder.iterdir():
            left = LEFTOVER.fullmatch(path.name)
            if not left or left["token"] == token:
                continue
            if left["state"] == "replaced" and not os.path.lexists(self.folder / left["tag"]):
                os.rename(path, self.folder / left["tag"])
            elif path.is_dir() and not path.is_symlink():
                remove_checkpoint(path, hidden_path(self.folder, left["tag"], "deleted", left["token"]))
            else:
                os.unlink(path)

    def _remove_traces(self) -> None:
        """Of saves of this run that failed. Every rank has ended them when a later one is whole."""
        for tag, token in self._failed:
            shutil.rmtree(hidden_path(self.folder, tag, "partial", token), ignore_errors=True)
            hidden_path(self.folder, tag, "failed", token).unlink(missing_ok=True)
        self._failed.clear()

    def _prune(self, tag: str) -> None:
        if self._keep_last is None:
            return
        paths = [path for path in checkpoint_folders(self.folder) if iteration_of(path.name) >= 0]
        numbered = [path for path in paths if not path.name.startswith(".") and not path.is_symlink()]
        for path in numbered[self._keep_last :]:
            retained = self._retain_interval and iteration_of(path.name) % self._retain_interval == 0
            if path.name != tag and not retained:
                remove_checkpoint(path, hidden_path(self.folder, path.name, "deleted", uuid.uuid4().hex[:12]))


def take_lock(folder: Path) -> tuple[int, bool]:
    """Keep other runs out of a folder for as long as the descriptor is open; and whether nobody else is there now.

    (False where the file system knows no locks.) Raises CheckpointError.
    """
    path = folder / ".lock"
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        raise CheckpointError(
            f"{folder} cannot be written to: {error.strerror}; give a folder that this run may write to"
        ) from error
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EAGAIN):
            logger.warning("%s cannot be locked (%s): see to it that one run alone saves there", path, error.strerror)
            return file, False
        holder = os.read(file, 200).decode("utf-8", "replace").strip() or "unknown"
        os.close(file)
        raise CheckpointError(
            f"{folder} is in use by another run (process {holder}); give each run a folder of its own"
        ) from None
    os.ftruncate(file, 0)
    os.pwrite(file, f"{os.getpid()} on {socket.gethostname()}\n".encode(), 0)
    return file, True


class _Job:
    """One save on one rank."""

    def __init__(self, saver: Saver, tag: str, token: str, began_s: float):
        self._saver, self._tag, self._token, self._began_s = saver, tag, token, began_s
        self._rank, self._world_size = saver._rank, saver._world_size
        self._partial = hidden_path(saver.folder, tag, "partial", token)
        self._failure = hidden_path(saver.folder, tag, "failed", token)
        self._retried: str | None = None

    def run(self, fragments: Sequence[Fragment], metadata_text: str) -> SaveResult:
        saver = self._saver
        if self._rank == 0:
            saver._remove_leftovers(self._token)
        self._raise_failure()
        saver.folder.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            os.mkdir(self._partial)
        own_folder = os.stat(self._partial)
        part = self._write(fragments)
        part_path = self._partial / f"rank_{self._rank:05d}.json"
        write_durably(
            part_path.with_suffix(".tmp"), json.dumps({"parameters": part.parameters, "files": part.files}).encode()
        )
        os.rename(part_path.with_suffix(".tmp"), part_path)
        if self._rank == 0:
            self._await(self._all_parts, saver._timeout_s)
            for rank in range(1, self._world_size):
                part.merge(json.loads((self._partial / f"rank_{rank:05d}.json").read_text(encoding="utf-8")))
            commit(saver.folder, self._tag, self._token, part, metadata_text)
            try:
                saver._remove_traces()
                saver._prune(self._tag)
            except OSError as error:  # the checkpoint is whole all the same
                logger.warning("%s: what is no longer needed could not be removed: %s", saver.folder, error)
        else:
            # rank 0 gives up first, and says why
            self._await(lambda: self._is_committed(own_folder), 2 * saver._timeout_s)
        return SaveResult(self._tag, time.monotonic() - self._began_s, None, self._retried)

    def fail(self, error: Exception) -> SaveResult:
        """Tell the other ranks, unless they have told us, and remove what was written."""
        saver = self._saver
        own = [self._partial / f"rank_{self._rank:05d}.{suffix}" for suffix in ("json", "tmp", "safetensors")]
        for path in own:  # first: where the disk is full, the message needs room
            with contextlib.suppress(OSError):
                os.unlink(path)
        with contextlib.suppress(FileNotFoundError):  # ours may only follow from it: the folder has gone
            error = _FailedElsewhere(self._failure.read_text(encoding="utf-8"))
        if not isinstance(error, _FailedElsewhere):
            reason = (
                f"{error.filename or self._partial}: {error.strerror}" if isinstance(error, OSError) else str(error)
            )
            if not isinstance(error, OSError | CheckpointError):
                reason = f"{type(error).__name__}: {reason}"
            error = CheckpointError(f"saving {self._tag} failed on rank {self._rank}: {reason}")
            message = self._failure.with_name(f"{self._failure.name}.{self._rank}")
            try:
                write_durably(message, str(error).encode())
                os.rename(message, self._failure)
            except OSError:  # they will miss us in time
                message.unlink(missing_ok=True)
        if self._rank == 0:
            saver._failed.append((self._tag, self._token))
            shutil.rmtree(self._partial, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):  # others' files are in it, or it has gone
                os.rmdir(self._partial)
        assert isinstance(error, CheckpointError)
        return SaveResult(self._tag, time.monotonic() - self._began_s, error, self._retried)

    def _write(self, fragments: Sequence[Fragment]) -> ManifestEntries:
        try:
            return self._write_once(fragments)
        except OSError as error:
            self._retried = f"{error.filename or self._partial}: {error.strerror}"
            logger.warning("%s of rank %d is written again: %s", self._tag, self._rank, self._retried)
            self._raise_failure()
            return self._write_once(fragments)

    def _write_once(self, fragments: Sequence[Fragment]) -> ManifestEntries:
        part = ManifestEntries({}, {})
        if not fragments:
            return part
        path = self._partial / rank_file(self._rank)
        path.unlink(missing_ok=True)
        header_bytes = header_bytes_for(self._tag, self._token, fragments)
        writer = Writer(path, tag=self._tag, token=self._token, header_bytes=header_bytes)
        try:
            for fragment in fragments:
                part.add_parameter(fragment)
                writer.add(fragment)
                self._saver._beat()
            part.files[path.name] = writer.close()
        finally:
            writer.abandon()
        return part

    def _await(self, is_there: Callable[[], bool], timeout_s: float) -> None:
        """Raises CheckpointError if another rank fails, or nothing has happened in the folder for `timeout_s`."""
        pause_s, changed_s, seen = 0.001, time.monotonic(), self._sizes()
        while not is_there():
            self._raise_failure()
            sizes = self._sizes()
            if sizes != seen:
                changed_s, seen = time.monotonic(), sizes
                self._saver._beat()
            elif time.monotonic() - changed_s > timeout_s:
                raise CheckpointError(f"nothing was heard of {self._missing()} for {timeout_s:.0f} s")
            time.sleep(pause_s)
            pause_s = min(0.1, 1.3 * pause_s)

    def _sizes(self) -> dict[str, int]:
        sizes = {}
        with contextlib.suppress(FileNotFoundError), os.scandir(self._partial) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    sizes[entry.name] = entry.stat().st_size
        return sizes

    def _all_parts(self) -> bool:
        return not self._missing_ranks()

    def _missing_ranks(self) -> list[int]:
        there = self._sizes()
        return [rank for rank in range(self._world_size) if f"rank_{rank:05d}.json" not in there]

    def _missing(self) -> str:
        ranks = self._missing_ranks() if self._partial.exists() else []
        ranks = ranks or [0]  # which has all it needs, and yet has not ended the save
        shown = ", ".join(map(str, ranks[:10])) + (f" and {len(ranks) - 10} more" if len(ranks) > 10 else "")
        return f"rank{'s' if len(ranks) > 1 else ''} {shown}"

    def _is_committed(self, own_folder: os.stat_result) -> bool:
        """Whether the very folder we wrote into has got its name, and `latest` names it."""
        try:
            committed = os.path.samestat(os.stat(self._saver.folder / self._tag), own_folder)
            return committed and (self._saver.folder / LATEST).read_text(encoding="utf-8").strip() == self._tag
        except (OSError, ValueError):
            return False

    def _raise_failure(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            raise _FailedElsewhere(self._failure.read_text(encoding="utf-8"))


class _FailedElsewhere(CheckpointError):
    """Another rank could not do its part; the message is its own."""
