"""Cache of index arrays on disk: built by the first process of a host, then memory-mapped by all.

A file gets its name only when whole, and the name is determined by the content, so hosts that share a folder may race:
they write the same bytes.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import mmap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.data.index.indexed import MappedFiles
from megatron.runtime.files import replacing

logger = logging.getLogger(__name__)

Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class ArraySpec:
    """Expected shape and type of a cached array."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]


@dataclass(frozen=True)
class CachedArrays:
    """Arrays, and the files in which they are stored, in their order; none without a cache."""

    arrays: Arrays
    paths: list[Path]

    @cached_property
    def files(self) -> MappedFiles:
        """The files that the arrays are maps of."""
        maps: dict[Path, mmap.mmap] = {}
        for path, array in zip(self.paths, self.arrays.values(), strict=False):
            # an array built in memory has no file that could be truncated
            base: Any = array.base
            if isinstance(base, np.memmap) and isinstance(base.base, mmap.mmap):
                maps[path] = base.base
        return MappedFiles(maps, "delete it, and start again: it is rebuilt")


def cached_arrays(
    folder: Path | None, key: str, specs: Mapping[str, ArraySpec], build: Callable[[], Arrays]
) -> CachedArrays:
    """Return the arrays named in `specs`: mapped from `folder`, or built and stored there.

    `key` must identify every input of `build`. If the folder cannot be written, the arrays are built in memory with a
    warning; if it is None, without one.
    """
    if folder is None:
        return CachedArrays(build(), [])
    paths = {name: folder / f"{key}-{name}.npy" for name in specs}
    arrays = _load(paths, specs)
    if arrays is None:
        arrays = _stored(folder, paths, specs, build)
    return CachedArrays(arrays, list(paths.values()))


def _stored(
    folder: Path, paths: Mapping[str, Path], specs: Mapping[str, ArraySpec], build: Callable[[], Arrays]
) -> Arrays:
    """Return the arrays, built by one process of those that come here at once."""
    arrays = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # ranks of a host come here at once: one builds, the others wait and map
        with _lock(folder):
            arrays = _load(paths, specs)  # another process may have built them in the meantime
            if arrays is not None:
                return arrays
            arrays = build()
            for name, path in paths.items():
                with replacing(path) as file:
                    np.save(file, arrays[name], allow_pickle=False)
    except OSError as error:
        logger.warning(
            "cannot write the index cache in %s (%s); every process builds its own in memory. Pass --data-cache-path "
            "with a folder that can be written",
            folder,
            error.strerror or error,
        )
        return arrays or build()
    # maps even for the builder, so that all ranks of a host share one copy in memory
    return _load(paths, specs) or arrays


def _load(paths: Mapping[str, Path], specs: Mapping[str, ArraySpec]) -> Arrays | None:
    arrays: Arrays = {}
    for name, path in paths.items():
        try:
            # a pickle would run what somebody put into a shared folder
            mapped = np.load(path, mmap_mode="r", allow_pickle=False)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (ValueError, EOFError, OSError) as error:
            logger.warning("%s cannot be used (%s); it is rebuilt", path, error)
            return None
        spec = specs[name]
        # the key covers the content; this finds a file of another version of the program
        if mapped.shape != spec.shape or mapped.dtype != spec.dtype:
            logger.warning(
                "%s holds %s %s, not %s %s; it is rebuilt", path, mapped.dtype, mapped.shape, spec.dtype, spec.shape
            )
            return None
        arrays[name] = np.asarray(mapped)  # a plain view of the map: np.memmap is slow to index
    return arrays


@contextlib.contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Lock a folder for one builder at a time. The kernel releases the lock of a process that dies."""
    # a file of its own: the arrays do not exist yet, and replacing them would take the lock with them
    with (folder / ".lock").open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("waiting for another process that builds index arrays in %s", folder)
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            # some network file systems have no locks; building twice is wasteful, not wrong
            logger.info("no lock in %s (%s); several processes may build the same arrays", folder, error.strerror)
        yield
