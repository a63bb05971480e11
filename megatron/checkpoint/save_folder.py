"""The folder that a run saves to, as its rank 0 keeps it: locked, without leftovers, with the checkpoints to keep."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import shutil
import socket
import uuid
from collections.abc import Collection
from pathlib import Path

from megatron.checkpoint.folders import LEFTOVER, Run, checkpoint_folders, iteration_of, of_run
from megatron.checkpoint.format import CheckpointError, hidden_path
from megatron.checkpoint.writer import make_folder, remove_checkpoint

logger = logging.getLogger(__name__)


class SaveFolder:
    """A folder of checkpoints, locked until `unlock` or the end of the process. Raises CheckpointError if it cannot be.

    Two runs never save into one folder, so what a killed run has left can be removed. (A file system without locks
    keeps it.)
    """

    def __init__(self, path: Path, keep_last: int | None, retain_interval: int | None) -> None:
        """`keep_last`, `retain_interval`: as of `Saver`."""
        self._path = path
        # Megatron's retain interval removes every other checkpoint but the newest
        self._keep_last = 1 if keep_last is None and retain_interval else keep_last
        self._retain_interval = retain_interval
        self._failed: list[tuple[str, str]] = []  # tag and token of saves whose files are still there
        make_folder(path)
        self._lock: int | None
        self._lock, self._leftovers_are_dead = take_lock(path)

    def unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def remove_leftovers(self, token: str) -> None:
        """Remove what killed runs have left; a checkpoint that was being replaced gets its name back.

        `token`: that of the save in progress, of which other ranks may have written already.
        """
        if not self._leftovers_are_dead:
            return
        self._leftovers_are_dead = False  # later ones are of this run's own saves
        for path in self._path.iterdir():
            left = LEFTOVER.fullmatch(path.name)
            if left is None or left["token"] == token:
                continue
            # killed between the two renames of writer.commit: the new one had not got the name yet
            if left["state"] == "replaced" and not os.path.lexists(self._path / left["tag"]):
                os.rename(path, self._path / left["tag"])
            elif path.is_dir() and not path.is_symlink():
                remove_checkpoint(path, hidden_path(self._path, left["tag"], "deleted", left["token"]))
            else:
                os.unlink(path)

    def note_failed(self, tag: str, token: str) -> None:
        self._failed.append((tag, token))

    def tidy(self, tags: Collection[str], run: Run) -> None:
        """Remove files of failed saves, and the checkpoints of this run that need not be kept, once a save is complete.

        `tags`: checkpoints to keep in any case.
        """
        try:
            self._remove_failed()
            self._remove_old(tags, run)
        except OSError as error:  # the checkpoint is complete all the same
            logger.warning("%s: old checkpoints could not be removed: %s", self._path, error)

    def _remove_failed(self) -> None:
        # every rank has ended those saves: it could not have begun a later one before
        for tag, token in self._failed:
            shutil.rmtree(hidden_path(self._path, tag, "partial", token), ignore_errors=True)
            hidden_path(self._path, tag, "failed", token).unlink(missing_ok=True)
        self._failed.clear()

    def _remove_old(self, tags: Collection[str], run: Run) -> None:
        if self._keep_last is None:
            return
        numbered = [path for path in checkpoint_folders(self._path) if iteration_of(path.name) >= 0]
        # neither what a save is replacing now, nor a checkpoint of elsewhere that a user has linked here
        named = [path for path in numbered if not path.name.startswith(".") and not path.is_symlink()]
        for path in of_run(run, named, with_ancestors=False)[self._keep_last :]:
            if path.name not in tags and not self._is_retained(path):
                remove_checkpoint(path, hidden_path(self._path, path.name, "deleted", uuid.uuid4().hex[:12]))

    def _is_retained(self, path: Path) -> bool:
        return self._retain_interval is not None and iteration_of(path.name) % self._retain_interval == 0


def take_lock(folder: Path) -> tuple[int, bool]:
    """Lock a folder against other runs for as long as the returned descriptor is open. Raises CheckpointError.

    The second value is False where the file system has no locks, so that other runs cannot be excluded.
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
        # POSIX lets a lock that another process holds give either
        if error.errno not in (errno.EACCES, errno.EAGAIN):
            logger.warning("%s cannot be locked (%s); make sure that only one run saves there", path, error.strerror)
            return file, False
        holder = os.read(file, 200).decode("utf-8", "replace").strip() or "unknown"
        os.close(file)
        raise CheckpointError(
            f"{folder} is in use by another run (process {holder}); give each run its own folder"
        ) from None
    # not by O_TRUNC: a run that is refused must leave the holder's line
    os.ftruncate(file, 0)
    os.pwrite(file, f"{os.getpid()} on {socket.gethostname()}\n".encode(), 0)
    return file, True
