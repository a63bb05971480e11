"""Plain files of a folder that others have written: no name leads out of it, no link is followed, no JSON is trusted.

Imports no torch, so that a launcher can read a model's config.json.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from megatron.checkpoint.folders import CheckpointError
from megatron.runtime.files import BusyOutput, disk_shortage, new_output, parse_json

ADAPTER_CONFIG = "adapter_config.json"
Precision = Literal["fp32", "bf16", "fp16"]
EXPORT_RECORD = "export.json"
"""Record beside the export of a run: the checkpoint that it was made of, and what was checked of it."""
EXPORT_NAME = re.compile(r"samples_\d+|last_epoch")
"""Name of a run's export: training/exports.py."""


def is_adapter_folder(folder: Path) -> bool:
    """Return True if the folder holds adapters in PEFT's format, and no whole model beside them."""
    # by weights, not by config.json, which adapters may have beside them too
    has_model = any(folder.glob("model*.safetensors")) or any(folder.glob("pytorch_model*.bin"))
    return os.path.lexists(folder / ADAPTER_CONFIG) and not has_model


def is_model_folder(folder: Path) -> bool:
    """Return True if the folder holds a model of transformers."""
    return os.path.lexists(folder / "config.json") and not is_adapter_folder(folder)


def missing_base(folder: Path, base: str | None) -> str:
    """Return the fault of adapters whose base is not there. `base`: what adapter_config.json names."""
    return (
        f"{folder} holds adapters of the base model {base or '(no name)'}, which is not a folder on this machine; give "
        "the base's folder as --lora-base"
    )


def newest_export(folder: Path) -> Path:
    """Return the newest export of a run's folder, or of hf_format in it; any other folder itself.

    Raises CheckpointError for a damaged record.
    """
    # adapters themselves, or what the caller refuses by name
    if not folder.is_dir() or os.path.lexists(folder / ADAPTER_CONFIG):
        return folder
    # whole ones alone: an unfinished export has another name, and `best` is not the newest
    places = [place for place in (folder, folder / "hf_format") if place.is_dir()]
    exports = [path for place in places for path in place.iterdir() if EXPORT_NAME.fullmatch(path.name)]
    return max(exports, key=_samples_of, default=folder)


def _samples_of(export: Path) -> float:
    """Return the samples after which an export was made, by its name, or by its record if that names none."""
    # as text samples_900 would come after samples_4096
    number = export.name.removeprefix("samples_")
    if number.isdigit():
        return int(number)
    # a run that was resumed with other options leaves the last_epoch of before beside newer exports
    record = export / EXPORT_RECORD
    samples = read_json(record).get("consumed_samples") if record.is_file() else None
    return samples if isinstance(samples, int) else math.inf


def real_path(path: Path) -> Path:
    """Return the file itself. Raises CheckpointError for a link.

    The links of Hugging Face's cache, from snapshots/<commit>/ to blobs/ beside, are its way to store files.
    """
    if not path.is_symlink():
        return path
    snapshots = next((parent for parent in path.parents if parent.name == "snapshots"), None)
    target = path.resolve()
    # any other link in a folder that others made may point to any file of this machine
    if snapshots is None or target.parent != (snapshots.parent / "blobs").resolve():
        raise CheckpointError(f"{path} is a link; links are not followed, put the file itself there")
    return target


def own_file(folder: Path, name: str) -> Path:
    """Return the file of that plain name in `folder`. Raises CheckpointError for a path, a link or no file."""
    # names come from an index or a config, which anybody may have written
    if not name or name != os.path.basename(name) or name in (".", "..") or "\\" in name or "\0" in name:
        raise CheckpointError(f"{folder} names {name!r} as a file of its own; only plain file names in it are read")
    path = folder / name
    if not real_path(path).is_file():
        raise CheckpointError(f"{path} is missing, or no file; copy the whole folder")
    return path


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object without a key twice. Raises CheckpointError."""
    return json_object(path.read_bytes(), path)


def json_object(text: bytes, path: Path) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        # readers differ in which of two counts: what we check would not be what transformers reads
        twice = [name for name, count in Counter(name for name, _ in pairs).items() if count > 1]
        if twice:
            raise ValueError(f"{twice[0]!r} is there twice")
        return dict(pairs)

    # Python reads NaN and Infinity, which JSON does not have
    def finite(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    try:
        content = parse_json(text, object_pairs_hook=unique, parse_constant=finite)
    except ValueError as error:
        raise CheckpointError(f"{path} is not valid JSON ({error}); copy it again") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a {type(content).__name__}; it must be a JSON object")
    return content


@contextlib.contextmanager
def new_folder(save: Path) -> Iterator[Path]:
    """Give a folder beside `save` to write into, which becomes `save` at the end, or is removed if anything fails.

    Raises CheckpointError if `save` has content, or another process writes there.
    """
    save = Path(os.path.abspath(save))
    if os.path.lexists(save) and (save.is_symlink() or not save.is_dir() or any(save.iterdir())):
        raise CheckpointError(f"{save} is there already; give a new or empty folder")
    save.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        try:
            work = stack.enter_context(new_output(save))
        except BusyOutput as error:
            raise CheckpointError(str(error)) from None
        yield work


def check_space(folder: Path, needed_bytes: int, option: str) -> None:
    """Raise CheckpointError if the disk has too little space for the result; `option` is what sets its folder."""
    if shortage := disk_shortage(folder, needed_bytes):
        raise CheckpointError(f"{shortage}; free space, or set {option} to another disk")
