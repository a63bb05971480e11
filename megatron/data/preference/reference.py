"""Log-probabilities of a dataset's answers under a reference, in a file beside the dataset.

PREFIX.reference-KEY.safetensors holds one tensor, `log_probs`, float32 [rows, 2]: the sum over the tokens of the
chosen and of the rejected answer of each row, NaN where it is not computed yet. Rows are written in place as they are
computed, so a computation that is stopped goes on where it was. Its metadata has the facts that the numbers depend on,
of which KEY is a digest.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from megatron.data.blend import digest
from megatron.data.indexed import DataError
from megatron.data.label_file import read_header
from megatron.files import replacing

TENSOR = "log_probs"

Values = np.memmap[tuple[int, int], np.dtype[np.float32]]


def reference_path(prefix: str, facts: Mapping[str, str]) -> Path:
    """Return the file of a dataset for a reference with these facts."""
    return Path(f"{prefix}.reference-{digest(json.dumps(facts, sort_keys=True))[:16]}.safetensors")


def open_reference(path: Path, num_rows: int, facts: Mapping[str, str]) -> Values:
    """Return the numbers [rows, 2] of a file, to which writing writes the file; a new one holds NaN.

    Raises DataError if it is not the file of these facts, OSError if it cannot be written.
    """
    if not path.exists():
        _create(path, num_rows, facts)
    header, begin = read_header(path)
    if (found := header.get("__metadata__")) != dict(facts):
        differing = [
            f"{name}={(found or {}).get(name)} there, {value} here"
            for name, value in facts.items()
            if (found or {}).get(name) != value
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
    if (values > 0).any():
        raise DataError(f"{path} holds log-probabilities above 0: it is damaged; remove it, and it is computed again")
    return values


def _create(path: Path, num_rows: int, facts: Mapping[str, str]) -> None:
    tensor = {"dtype": "F32", "shape": [num_rows, 2], "data_offsets": [0, 8 * num_rows]}
    header = json.dumps({"__metadata__": dict(facts), TENSOR: tensor}).encode()
    header += b" " * (-len(header) % 8)
    with replacing(path) as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.write(np.full((num_rows, 2), np.nan, "<f4").tobytes())
