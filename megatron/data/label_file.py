"""Log-probabilities of a dataset's labels, or of its answers, under a model, in a file beside the dataset.

PREFIX.KIND-KEY.safetensors holds, for all labels of one sample after the other:

    log_probs  [labels, K]  float32 of the labels themselves (K = 1), or float16 of the K likeliest tokens
    ids        [labels, K]  uint16 or uint32: these tokens; absent for the labels themselves
    done       [samples]    uint8: 1 once the sample is written

PREFIX.reference-KEY.safetensors holds one tensor, `log_probs`, float32 [rows, 2]: the sum over the tokens of the chosen
and of the rejected answer of each row of pairs, NaN where it is not computed yet.

A file has its final size from the start, and what is computed is written in place, so a computation that is stopped
goes on where it was. Its metadata has the facts that the numbers depend on, of which KEY is a digest.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from megatron.data.blend import digest
from megatron.data.index.indexed import DataError
from megatron.runtime.files import replacing

LARGEST_HEADER_BYTES = 1 << 16
NUMPY_TYPES = {"F32": "<f4", "F16": "<f2", "U32": "<u4", "U16": "<u2", "U8": "|u1"}

Facts = Mapping[str, str]


def label_path(prefix: str, kind: str, facts: Facts) -> Path:
    """Return the file of a dataset for numbers with these facts."""
    return Path(f"{prefix}.{kind}-{digest(json.dumps(facts, sort_keys=True))[:16]}.safetensors")


def create_label_file(path: Path, facts: Facts, num_samples: int, num_labels: int, top_k: int, num_tokens: int) -> None:
    """Write a file in which no sample is done.

    `top_k`: 0 for the labels themselves. `num_tokens`: size of the vocabulary. Raises OSError, also for a full disk.
    """
    kinds: dict[str, tuple[str, list[int]]] = {"log_probs": ("F32", [num_labels, 1])}
    if top_k:
        kinds["log_probs"] = "F16", [num_labels, top_k]
        kinds["ids"] = "U16" if num_tokens <= 1 << 16 else "U32", [num_labels, top_k]
    kinds["done"] = "U8", [num_samples]
    header, size = _header_of(facts, kinds)
    with replacing(path) as file:
        begin = file.write(header)
        file.flush()
        # a mapped page that the disk has no place for would end the process by a signal
        os.posix_fallocate(file.fileno(), begin, size)


def _header_of(facts: Facts, kinds: Mapping[str, tuple[str, list[int]]]) -> tuple[bytes, int]:
    """Return the beginning of a file of tensors, each of a type and a shape, and the bytes that follow.

    It is one of safetensors, which other tools can read; spaces align the numbers after it.
    """
    header: dict[str, Any] = {"__metadata__": dict(facts)}
    size = 0
    for name, (kind, shape) in kinds.items():
        end = size + np.dtype(NUMPY_TYPES[kind]).itemsize * math.prod(shape)
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [size, end]}
        size = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, size


def read_header(path: Path) -> tuple[dict[str, Any], int]:
    """Return the header of a safetensors file, and where its numbers begin. Raises DataError."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = None
        if size <= LARGEST_HEADER_BYTES:
            with contextlib.suppress(ValueError, RecursionError):
                header = json.loads(file.read(size))
    if not isinstance(header, dict):
        raise DataError(f"{path} has no header of safetensors; remove it, and it is computed again")
    return header, 8 + size


class LabelFile:
    """The numbers of a file. Raises DataError if it is damaged."""

    def __init__(self, path: Path, *, writes: bool = False) -> None:
        self.path = path
        header, begin = read_header(path)
        self.facts: dict[str, Any] = header.pop("__metadata__", {})
        tensors = dict[str, NDArray[Any]]()
        mode: Literal["r", "r+"] = "r+" if writes else "r"
        try:
            for name, entry in header.items():
                kind, shape, (first, end) = np.dtype(NUMPY_TYPES[entry["dtype"]]), entry["shape"], entry["data_offsets"]
                # a shape of another size would read the next tensor
                if end - first != kind.itemsize * math.prod(shape):
                    raise ValueError(name)
                tensors[name] = np.memmap(path, kind, mode, begin + first, tuple(shape))
            self.log_probs, self.done = tensors["log_probs"], tensors["done"]
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"{path} is a damaged file of log-probabilities; remove it, and write it again") from error
        self.ids: NDArray[Any] | None = tensors.get("ids")

    def write(self, samples: NDArray[np.int64], labels: NDArray[np.int64], numbers: NDArray[np.float32]) -> None:
        """Write the rows `labels` [n], which are those of `samples`: log-probabilities [n, K], then ids [n, K]."""
        width = self.log_probs.shape[1]
        self.log_probs[labels] = numbers[:, :width]
        self.log_probs.flush()  # type: ignore[attr-defined]
        if self.ids is not None:
            self.ids[labels] = numbers[:, width:]
            self.ids.flush()  # type: ignore[attr-defined]
        self.done[samples] = 1  # after what it stands for
        self.done.flush()  # type: ignore[attr-defined]


@dataclass(frozen=True)
class StoredLabels:
    """A whole file, and where the labels of each sample begin in it."""

    file: LabelFile
    firsts: NDArray[np.int64]

    def read(self, places: Iterable[tuple[int, int, slice]], shape: Sequence[int]) -> list[NDArray[Any]]:
        """Return the numbers of a microbatch of `shape` [B, S]: those of labels [B, S], or of tokens and ids [B, S, K].

        `places`: sample, row and places in the row of all labels. Others have 0.
        """
        stored = [self.file.log_probs]
        numbers = [np.zeros((*shape, self.file.log_probs.shape[1]), np.float32)]
        if self.file.ids is not None:
            stored.append(self.file.ids)
            numbers.append(np.zeros((*shape, self.file.ids.shape[1]), np.int64))
        for sample, row, place in places:
            labels = slice(int(self.firsts[sample]), int(self.firsts[sample + 1]))
            for part, tensor in zip(numbers, stored, strict=True):
                part[row, place] = tensor[labels]
        if self.file.ids is None:
            return [numbers[0][..., 0]]
        return numbers


TENSOR = "log_probs"

Values = np.memmap[tuple[int, int], np.dtype[np.float32]]


def open_reference(path: Path, num_rows: int, facts: Facts) -> Values:
    """Return the numbers [rows, 2] of a file, to which writing writes the file; a new one holds NaN.

    Raises DataError if it is not the file of these facts, OSError if it cannot be written.
    """
    if not path.exists():
        beginning, _ = _header_of(facts, {TENSOR: ("F32", [num_rows, 2])})
        with replacing(path) as file:
            file.write(beginning)
            file.write(np.full((num_rows, 2), np.nan, "<f4").tobytes())
    header, begin = read_header(path)
    stored = header.get("__metadata__", {})
    # KEY is a digest of the facts: another reference has another file, unless it was renamed
    if stored != dict(facts):
        differing = [
            f"{name}={stored.get(name)} there, {value} here"
            for name, value in facts.items()
            if stored.get(name) != value
        ]
        raise DataError(
            f"{path} is another reference's: {'; '.join(differing) or 'it has more facts'}; remove it, and "
            "it is computed again"
        )
    if path.stat().st_size != begin + 8 * num_rows or header.get(TENSOR, {}).get("shape") != [num_rows, 2]:
        raise DataError(
            f"{path} has {path.stat().st_size} bytes, not the {begin + 8 * num_rows} of {num_rows} rows; remove it, "
            "and it is computed again"
        )
    values: Values = np.memmap(path, np.dtype("<f4"), "r+", begin, (num_rows, 2))
    # no probability is above 1: the bytes are of something else
    if (values > 0).any():
        raise DataError(f"{path} holds log-probabilities above 0: it is damaged; remove it, and it is computed again")
    return values
