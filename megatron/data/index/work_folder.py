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
SUFFIXES = (".bin", ".sha256", ".manifest.json", ".idx")


class WorkFolder:
    """Files of a dataset that is being built."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.bin, self.sha256, self.manifest, self.idx = (self.path / (SEALED_NAME + suffix) for suffix in SUFFIXES)
        self.unsealed_idx = self.path / "idx.unsealed"
        self.lengths = self.path / "lengths.int32"
        self.document_ends = self.path / "document_ends.int64"

    @property
    def files(self) -> list[Path]:
        sealed = [self.bin, self.sha256, self.manifest, self.idx]
        return [*sealed, self.unsealed_idx, self.lengths, self.document_ends]

    @property
    def is_sealed(self) -> bool:
        """True if the folder holds a whole dataset that is not published yet."""
        return self.idx.exists()

    @property
    def is_open(self) -> bool:
        """True if the folder holds a dataset that is neither sealed nor published."""
        return self.bin.exists() and not self.is_sealed

    def publish(self, prefix: str | Path) -> None:
        """Move a sealed dataset to its names, .idx last, replacing an older one, and remove the folder.

        At every moment the pair is whole, or the .idx is missing. If the process is killed in here, another can call
        this again. Raises DataError if the folder is not sealed, or if there is neither a folder nor a dataset.
        """
        targets = {suffix: Path(f"{prefix}{suffix}") for suffix in SUFFIXES}
        if not self.is_sealed:
            # without a folder, an earlier call may have published it: then all is done
            if self.bin.exists() or not targets[".idx"].exists():
                raise DataError(
                    f"{self.path} holds no finished dataset to publish as {prefix}; finish it first, or start over"
                )
        elif self.bin.exists():
            # an old index, checksum or manifest would be read with the new .bin
            for suffix in (".idx", ".sha256", ".manifest.json"):
                targets[suffix].unlink(missing_ok=True)
            sync_folder(targets[".idx"].parent)
        # the .idx is the last: a reader opens it first, and finds the pair whole or no dataset
        for suffix, target in targets.items():
            sealed = self.path / (SEALED_NAME + suffix)
            if sealed.exists():
                os.replace(sealed, target)
                sync_folder(target.parent)  # keeps this order through a power failure
        self.remove()

    def remove(self) -> None:
        """Remove the files, and the folder unless it holds others."""
        for path in self.files:
            path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # removed already, or it holds other files of the caller
            self.path.rmdir()


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
