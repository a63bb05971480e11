"""Work folder of an indexed dataset: its files before they have their names, and how they get them.

open        the builder adds documents
sealed      the dataset is whole, under SEALED_NAME; the .idx gets its name last in `seal`
published   the files have moved to PREFIX, the .idx last
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

from megatron.data.index.indexed import DataError
from megatron.runtime.files import sync_folder

SEALED_NAME = "dataset"
"""Name of the dataset in a sealed work folder, where it can be read before it is published."""
BIN, SHA256, MANIFEST, IDX = (SEALED_NAME + suffix for suffix in (".bin", ".sha256", ".manifest.json", ".idx"))
LENGTHS, DOCUMENT_ENDS, UNSEALED_IDX = "lengths.int32", "document_ends.int64", "idx.unsealed"
WORK_FILES = (BIN, SHA256, MANIFEST, IDX, LENGTHS, DOCUMENT_ENDS, UNSEALED_IDX)


def is_sealed(work_dir: str | Path) -> bool:
    """Return true if a builder's work folder holds a whole dataset that is not published yet."""
    return (Path(work_dir) / IDX).exists()


def is_open(work_dir: str | Path) -> bool:
    """Return true if a builder's work folder holds a dataset that is neither sealed nor published."""
    return (Path(work_dir) / BIN).exists() and not is_sealed(work_dir)


def publish(work_dir: str | Path, prefix: str | Path) -> None:
    """Move a sealed dataset to its names, .idx last, replacing an older one, and remove its work folder.

    At every moment the pair is whole, or the .idx is missing. If the process is killed in here, another can call this
    again. Raises DataError if the folder is not sealed, or if there is neither a folder nor a dataset.
    """
    work, base = Path(work_dir), str(prefix)
    targets = {name: Path(base + name.removeprefix(SEALED_NAME)) for name in (BIN, SHA256, MANIFEST, IDX)}
    if not is_sealed(work):
        # without a folder, an earlier call may have published it: then all is done
        if (work / BIN).exists() or not targets[IDX].exists():
            raise DataError(f"{work} holds no finished dataset to publish as {base}; finish it first, or start over")
    elif (work / BIN).exists():
        # an old index, checksum or manifest would be read with the new .bin
        for name in (IDX, SHA256, MANIFEST):
            targets[name].unlink(missing_ok=True)
        sync_folder(targets[IDX].parent)
    # the .idx is the last: a reader opens it first, and finds the pair whole or no dataset
    for name, target in targets.items():
        if (work / name).exists():
            os.replace(work / name, target)
            sync_folder(target.parent)  # keeps this order through a power failure
    remove_work_files(work)


def check_absent(prefixes: Sequence[str], overwrite: bool) -> None:
    """Raise DataError if a dataset would be replaced without `overwrite`."""
    for prefix in () if overwrite else prefixes:
        for suffix in (".idx", ".bin"):
            # a broken link is in the way too
            if os.path.lexists(prefix + suffix):
                raise DataError(
                    f"{prefix}{suffix} exists already; pass --overwrite to replace that dataset, or give another "
                    "--output-prefix"
                )


def remove_work_files(work_dir: Path) -> None:
    for name in WORK_FILES:
        (work_dir / name).unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # removed already, or it holds other files of the caller
        work_dir.rmdir()
