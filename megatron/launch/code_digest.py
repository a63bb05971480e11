"""Digest of the code of this project, by which the hosts of a run find out whether one has another version."""

from __future__ import annotations

import functools
import hashlib

from megatron.files import IMPORT_ROOT

KINDS = (".py", ".yaml", ".cpp", ".h")


@functools.cache
def code_digest() -> str:
    """Return a digest of the project's files as they lay on the disk when it was first called, names included."""
    folder, digest = IMPORT_ROOT / "megatron", hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.suffix in KINDS):
        digest.update(f"{path.relative_to(folder)} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()
