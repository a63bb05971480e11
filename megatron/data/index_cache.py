"""Index arrays kept on disk: built once, by whichever process of a machine comes first, then mapped by all.

A file appears under its name only when whole, and its name tells its content, so machines that share a folder may
race: they write the same bytes.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.files import replacing

logger = logging.getLogger(__name__)

Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class ArraySpec:
    """What a cached array must be to be believed."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]


def cached_arrays(folder: Path | None, key: str, specs: Mapping[str, ArraySpec], build: Callable[[], Arrays]) -> Arrays:
    """The arrays named in `specs`: mapped from `folder`, or built and stored there.

    `key` must tell every input of `build`. A folder that cannot be written costs the sharing, not the run: the arrays
    are then built in this process's memory, with a warning. None: in memory, without one.
    """
    if folder is None:
        return build()
    paths = dict(zip(specs, cached_paths(folder, key, specs), strict=True))
    arrays = _load(paths, specs)
    if arrays is not None:
        return arrays
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _lock(folder):
            arrays = _load(paths, specs)  # another process may have built them while this one waited
            if arrays is not None:
                return arrays
            arrays = build()
            for name, path in paths.items():
                _store(path, arrays[name])
    except OSError as error:
        logger.warning(
            "cannot write the index cache in %s (%s); every process builds its own in memory. Pass --data-cache-path "
            "with a folder that can be written",
            folder,
            error.strerror or error,
        )
        return arrays or build()
    return _load(paths, specs) or arrays


def cached_paths(folder: Path | None, key: str, specs: Mapping[str, ArraySpec]) -> list[Path]:
    """Where cached_arrays keeps the arrays."""
    return [] if folder is None else [folder / f"{key}-{name}.npy" for name in specs]


def _load(paths: Mapping[str, Path], specs: Mapping[str, ArraySpec]) -> Arrays | None:
    arrays: Arrays = {}
    for name, path in paths.items():
        try:
            mapped = np.load(path, mmap_mode="r", allow_pickle=False)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (ValueError, EOFError, OSError) as error:
            logger.warning("%s cannot be used (%s); it is built anew", path, error)
            return None
        spec = specs[name]
        if mapped.shape != spec.shape or mapped.dtype != spec.dtype:
            logger.warning(
                "%s holds %s %s, not %s %s; it is built anew", path, mapped.dtype, mapped.shape, spec.dtype, spec.shape
            )
            return None
        arrays[name] = np.asarray(mapped)  # a plain view of the map: np.memmap is slow to index
    return arrays


def _store(path: Path, content: NDArray[Any]) -> None:
    with replacing(path) as file:
        np.save(file, content, allow_pickle=False)


@contextlib.contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """One builder at a time in a folder. The system frees the lock of a process that dies."""
    with (folder / ".lock").open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("waiting for another process that builds index arrays in %s", folder)
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            # Some network file systems know no locks. Building twice is wasteful, not wrong.
            logger.info("no lock in %s (%s); several processes may build the same arrays", folder, error.strerror)
        yield
