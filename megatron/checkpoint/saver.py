"""Saves of a run: ranks coordinate through files in one locked folder, in the background if wanted.

`format.py` lists the hidden files that this leaves in the folder meanwhile.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from megatron.checkpoint.folders import Run
from megatron.checkpoint.format import (
    ITEM_BYTES,
    CheckpointError,
    Fragment,
    SaveError,
    check_tag,
    hidden_path,
    part_file,
    rank_file,
)
from megatron.checkpoint.reader import read_latest
from megatron.checkpoint.save_folder import SaveFolder
from megatron.checkpoint.writer import ManifestEntries, Writer, anonymous_memory, commit, header_bytes_for
from megatron.runtime.commands import first_of
from megatron.runtime.files import write_durably

ABANDON_S = 2.0
"""Longest wait for the thread of a save that is abandoned."""
LEAVING_TIMEOUT_S = 5.0
"""Longest wait for the other ranks of a save, without a sign of them, once this rank is leaving by an error."""

_TOKEN = re.compile(r"[A-Za-z0-9]+")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SaveResult:
    """Outcome of one save on one rank."""

    tag: str
    seconds: float
    """Duration on this rank, from the call of `save` to the end."""
    error: SaveError | None
    """None: the checkpoint is complete and durable, and `latest` names it."""
    retried: str | None = None
    """Reason why this rank had to write its file a second time."""


class Saver:
    """Saves the checkpoints of a run; each rank has one. Ranks coordinate through files, so nothing is collective.

    A rank whose file is on disk writes rank_00003.json, its entries of the manifest, beside it. Rank 0 waits for all of
    them and renames the folder; the others wait for that. An error on one rank ends the save on all, with its message,
    and leaves the previous checkpoints intact.

    The `keep_last` newest checkpoints of the run by number are kept (None: all, or 1 with a `retain_interval`), those
    whose number is a multiple of `retain_interval`, and always the one just saved. A save fails when its folder has not
    changed for `timeout_s`. `beat` is called at each sign of progress, in the thread that saves. `attend` waits for a
    save in progress: it gets a function that waits for at most so many seconds and returns True at the end. Every rank
    calls it alike, so it may be collective. Raises CheckpointError if the folder cannot be used.
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
        attend: Callable[[Callable[[float | None], bool]], object] = lambda has_ended: has_ended(None),
    ):
        self.folder = Path(folder)
        self.rank, self.world_size, self._asynchronous = rank, world_size, asynchronous
        self.timeout_s, self.beat, self._attend = timeout_s, beat, attend
        self.abandoned = ""
        """Reason why a save in progress must end; a thread reads it."""
        self.own_folder = SaveFolder(self.folder, keep_last, retain_interval) if rank == 0 else None
        self._thread: threading.Thread | None = None
        self._is_attended = True  # False once a save was begun, until every rank's has ended
        self._outcomes: deque[SaveResult] = deque()  # a thread appends, `finished` takes
        self._buffer = torch.empty(0)

    def save(
        self, tag: str, token: str, fragments: Iterable[Fragment], metadata: Mapping[str, Any], *, keep: str = ""
    ) -> None:
        """Save what this rank owns. Every rank calls it, with the same tag and a token that no other save has had.

        `keep`: tag of a checkpoint to keep beside those that `keep_last` keeps.

        Waits for the previous save. If asynchronous, returns when the tensors have been copied, otherwise at the end.
        Errors are raised by `wait` and reported by `finished`. Rank 0's metadata is saved.
        """
        began_s = time.monotonic()
        self.join()
        check_tag(tag)
        if not _TOKEN.fullmatch(token):
            raise CheckpointError(f"the token {token!r} of a save must be letters and digits")
        job = _Job(self, tag, token, Run.of(metadata), began_s, keep)
        self._is_attended = False
        try:
            # now, not in the thread: the run goes on, and its progress with it
            text = json.dumps(metadata, allow_nan=False)
            owned = list(fragments)
            if self._asynchronous:
                owned, entries = self._copy(owned), None
            else:
                entries = job.write(owned)
        except Exception as error:
            self._outcomes.append(job.fail(error))
        else:
            # not a daemon: a process that ends waits for its save
            # of a synchronous save too: the main thread attends to the other ranks meanwhile (`attend`)
            self._thread = threading.Thread(
                target=self._carry_out, args=(job, owned, entries, text), name=f"save {tag}"
            )
            self._thread.start()
        if not self._asynchronous:
            self.join()

    def reserve(self, fragments: Iterable[Fragment]) -> None:
        """Allocate the host memory of an asynchronous save now, so that the first one takes no longer than the next."""
        if self._asynchronous:
            self.join()
            self._reserve(list(fragments))

    def wait(self) -> None:
        """Return when no save is in progress. Raises CheckpointError for failures not reported yet."""
        self.join()
        failed = [outcome for outcome in self._outcomes if outcome.error]
        self._outcomes = deque(outcome for outcome in self._outcomes if not outcome.error)
        if failed:
            raise SaveError("; ".join(str(outcome.error) for outcome in failed))

    @property
    def is_writing(self) -> bool:
        """A thread of this rank carries out a save."""
        return self._thread is not None and self._thread.is_alive()

    def finished(self) -> list[SaveResult]:
        """Return the saves that ended since the previous call, in order. Does not wait."""
        outcomes = []
        while self._outcomes:
            outcomes.append(self._outcomes.popleft())
        return outcomes

    def close(self) -> None:
        """Wait for the save in progress, and unlock the folder; the end of the process unlocks it too."""
        self.join()
        self._unlock()

    def leave(self, *, lost: bool) -> None:
        """Unlock the folder on the way out by an error, in which other ranks may have ended already.

        A save in progress fails, for all ranks, if another rank is lost, or gives no sign for LEAVING_TIMEOUT_S.
        """
        if self._thread is not None:
            if lost:
                self.abandoned = "another rank has ended"
            self.timeout_s = LEAVING_TIMEOUT_S
            self._thread.join(ABANDON_S if lost else None)
        if self._thread is None or not self._thread.is_alive():  # else the end of the process unlocks
            self._unlock()

    def _unlock(self) -> None:
        if self.own_folder is not None:
            self.own_folder.unlock()

    def _reserve(self, fragments: Sequence[Fragment]) -> bool:
        """Allocate a host buffer for these. Returns True if it is pinned, for copies from CUDA devices."""
        numel = sum(fragment.tensor.numel() for fragment in fragments)
        on_cuda = any(fragment.tensor.is_cuda for fragment in fragments)
        if numel > len(self._buffer):
            self._buffer = torch.empty(0)  # free the previous one first
            if on_cuda:  # pinned, or copies would not run beside each other
                self._buffer = torch.empty(numel, pin_memory=True)
            else:
                self._buffer = torch.frombuffer(anonymous_memory(numel * ITEM_BYTES), dtype=torch.float32)
                self._buffer.zero_()  # touch every page
        return on_cuda

    def join(self) -> None:
        """Return when no save is in progress, whatever its outcome. Every rank calls it."""
        if not self._is_attended:
            self._attend(self._has_ended)
            self._thread, self._is_attended = None, True

    def _has_ended(self, timeout_s: float | None) -> bool:
        """Wait for this rank's save for so many seconds, None: to its end. Return True at its end."""
        if self._thread is not None:
            self._thread.join(timeout_s)
        return self._thread is None or not self._thread.is_alive()

    def _copy(self, fragments: Sequence[Fragment]) -> list[Fragment]:
        """Copy the fragments into host memory that is kept from save to save."""
        on_cuda = self._reserve(fragments)
        copies, begin = [], 0
        for fragment in fragments:
            copy = self._buffer[begin : begin + fragment.tensor.numel()]
            copy.copy_(fragment.tensor.detach(), non_blocking=on_cuda)
            copies.append(replace(fragment, tensor=copy))
            begin += len(copy)
        if on_cuda:
            # once for all copies, and before the next step changes what they copy
            torch.cuda.synchronize()
        return copies

    def _carry_out(
        self, job: _Job, fragments: Sequence[Fragment], entries: ManifestEntries | None, metadata_text: str
    ) -> None:
        try:
            outcome = job.complete(entries or job.write(fragments), metadata_text)
        except Exception as error:  # any kind: in a thread it would otherwise be lost
            outcome = job.fail(error)
        self._outcomes.append(outcome)


class _Job:
    """Steps of one save on one rank."""

    def __init__(self, saver: Saver, tag: str, token: str, run: Run, began_s: float, keep: str):
        self._saver, self._tag, self._token, self._run, self._began_s = saver, tag, token, run, began_s
        self._keep = keep
        self._rank, self._world_size = saver.rank, saver.world_size
        self._partial = hidden_path(saver.folder, tag, "partial", token)
        self._failure = hidden_path(saver.folder, tag, "failed", token)
        self._retried: str | None = None
        self._own_folder: os.stat_result

    def write(self, fragments: Sequence[Fragment]) -> ManifestEntries:
        """Write this rank's file, and return its entries of the manifest."""
        if self._saver.own_folder is not None:
            self._saver.own_folder.remove_leftovers(self._token)
        # before the folder is made: rank 0 removes it where another rank has failed, and it would come back
        self._raise_failure()
        self._saver.folder.mkdir(parents=True, exist_ok=True)
        # every rank tries, so that none waits for another to begin
        with contextlib.suppress(FileExistsError):
            os.mkdir(self._partial)
        # by which it is known under its final name: another save of this tag may be there already
        self._own_folder = os.stat(self._partial)
        return self._write(fragments)

    def complete(self, entries: ManifestEntries, metadata_text: str) -> SaveResult:
        """Rank 0 gives the checkpoint its name when every rank has written; the others wait for that."""
        path = self._partial / part_file(self._rank)
        # renamed when it is whole: its name is the sign that rank 0 waits for
        write_durably(path.with_suffix(".tmp"), json.dumps(asdict(entries)).encode())
        os.rename(path.with_suffix(".tmp"), path)
        own_folder = self._saver.own_folder
        if own_folder is None:
            # rank 0 times out first, and reports the reason
            self._await(self._is_committed, patience=2)
        else:
            self._await(lambda: not self._missing_ranks())
            for rank in range(1, self._world_size):
                entries.merge(json.loads((self._partial / part_file(rank)).read_text(encoding="utf-8")))
            commit(self._saver.folder, self._tag, self._token, entries, metadata_text)
            own_folder.tidy((self._tag, self._keep), self._run)
        return SaveResult(self._tag, time.monotonic() - self._began_s, None, self._retried)

    def fail(self, error: Exception) -> SaveResult:
        """Report the error to the other ranks, unless it came from them, and remove what was written."""
        own = [self._partial / f"rank_{self._rank:05d}.{suffix}" for suffix in ("json", "tmp", "safetensors")]
        for path in own:  # first: on a full disk the message needs the space
            with contextlib.suppress(OSError):
                os.unlink(path)
        with contextlib.suppress(FileNotFoundError):  # our own error may only follow from it
            error = _FailedElsewhere(self._failure.read_text(encoding="utf-8"))
        if not isinstance(error, _FailedElsewhere):
            error = SaveError(f"saving {self._tag} failed on rank {self._rank}: {self._reason_of(error)}")
            self._report_failure(str(error))
        own_folder = self._saver.own_folder
        if own_folder is None:
            with contextlib.suppress(OSError):  # other ranks' files are in it, or it is already removed
                os.rmdir(self._partial)
        else:
            own_folder.note_failed(self._tag, self._token)
            shutil.rmtree(self._partial, ignore_errors=True)
        return SaveResult(self._tag, time.monotonic() - self._began_s, SaveError(str(error)), self._retried)

    def _reason_of(self, error: Exception) -> str:
        if isinstance(error, OSError):
            return f"{error.filename or self._partial}: {error.strerror}"
        if isinstance(error, CheckpointError):
            return str(error)
        return f"{type(error).__name__}: {error}"

    def _report_failure(self, reason: str) -> None:
        # renamed when it is whole, since others read it at any moment; by rank, since two may fail at once
        message = self._failure.with_name(f"{self._failure.name}.{self._rank}")
        try:
            write_durably(message, reason.encode())
            os.rename(message, self._failure)
        except OSError:  # the other ranks will time out
            message.unlink(missing_ok=True)

    def _write(self, fragments: Sequence[Fragment]) -> ManifestEntries:
        try:
            return self._write_once(fragments)
        except OSError as error:  # once more: that of a network file system may pass
            self._retried = self._reason_of(error)
            logger.warning("%s: rank %d writes its file again: %s", self._tag, self._rank, self._retried)
            self._raise_failure()
            return self._write_once(fragments)

    def _write_once(self, fragments: Sequence[Fragment]) -> ManifestEntries:
        entries = ManifestEntries({}, {})
        if not fragments:
            return entries
        path = self._partial / rank_file(self._rank)
        # left by a first attempt: Writer creates its file, and opens none that is there
        path.unlink(missing_ok=True)
        header_bytes = header_bytes_for(self._tag, self._token, fragments)
        writer = Writer(path, tag=self._tag, token=self._token, header_bytes=header_bytes)
        try:
            for fragment in fragments:
                if self._saver.abandoned:
                    raise SaveError(self._saver.abandoned)
                entries.add_parameter(fragment)
                writer.add(fragment)
                self._saver.beat()
            entries.files[path.name] = writer.close()
        finally:
            writer.abandon()
        return entries

    def _await(self, is_there: Callable[[], bool], patience: int = 1) -> None:
        """Wait. Raises CheckpointError if another rank fails, or the folder has not changed for `patience` timeouts."""
        # sizes of files are the sign: ranks on other hosts have no clock in common, and no collective in a thread
        pause_s, changed_s, seen = 0.001, time.monotonic(), self._sizes()
        while not is_there():
            self._raise_failure()
            sizes = self._sizes()
            timeout_s = patience * self._saver.timeout_s  # shorter once this rank is leaving
            if sizes != seen:
                changed_s, seen = time.monotonic(), sizes
                self._saver.beat()
            elif time.monotonic() - changed_s > timeout_s:
                raise CheckpointError(f"timeout after {timeout_s:.0f} s without a sign of {self._missing()}")
            time.sleep(pause_s)
            pause_s = min(0.1, 1.3 * pause_s)

    def _sizes(self) -> dict[str, int]:
        sizes = {}
        # rank 0 renames the folder, and ranks rename files in it, while this one looks
        with contextlib.suppress(FileNotFoundError), os.scandir(self._partial) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    sizes[entry.name] = entry.stat().st_size
        return sizes

    def _missing_ranks(self) -> list[int]:
        there = self._sizes()
        return [rank for rank in range(self._world_size) if part_file(rank) not in there]

    def _missing(self) -> str:
        ranks = self._missing_ranks() if self._partial.exists() else []
        if not ranks:  # rank 0 has every file, but has not committed
            ranks = [0]
        noun = "rank" if len(ranks) == 1 else "ranks"
        return f"{noun} {first_of([str(rank) for rank in ranks], 10)}"

    def _is_committed(self) -> bool:
        """Return True if the folder we wrote into has its final name, and `latest` names it."""
        try:
            committed = os.path.samestat(os.stat(self._saver.folder / self._tag), self._own_folder)
            return committed and read_latest(self._saver.folder)[0] == self._tag
        except (OSError, CheckpointError):
            return False

    def _raise_failure(self) -> None:
        if self._saver.abandoned:
            raise SaveError(self._saver.abandoned)
        with contextlib.suppress(FileNotFoundError):
            raise _FailedElsewhere(self._failure.read_text(encoding="utf-8"))


class _FailedElsewhere(SaveError):
    """Failure on another rank, with its message."""
