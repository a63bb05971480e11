"""Loads of experts between two log lines, and their picture: a PNG without a library for pictures, nor torch."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

CELL = 8
"""Pixels of a side of the square of one expert."""
UNUSED, BALANCED, DOUBLE = (20, 50, 140), (255, 255, 255), (190, 20, 30)
"""Colours of an expert without tokens, of one with its even share, and of one with twice as many or more."""


@dataclass(frozen=True)
class LoadReport:
    """Shares of the tokens that chose each expert, over the steps since the previous log line."""

    shares: Mapping[int, list[float]]
    """[expert] of each layer with experts."""
    balanced: float
    """The share of each where all are used alike."""
    dropped: float | None
    """Share of the choices for which their expert had no room; None: there is no capacity."""
    warnings: tuple[str, ...] = ()
    """Lines to print."""

    @property
    def largest(self) -> tuple[float, int, int]:
        """The largest share, its layer and its expert."""
        return max(
            (
                (share, layer, expert)
                for layer, of_layer in self.shares.items()
                for expert, share in enumerate(of_layer)
            ),
            key=lambda each: each[0],
        )

    def to_json(self) -> dict[str, Any]:
        """Return what a row of metrics.jsonl has of it."""
        share, layer, expert = self.largest
        row: dict[str, Any] = {"largest_share": share, "layer": layer, "expert": expert}
        if self.dropped is not None:
            row["dropped"] = self.dropped
        return row


def load_picture(report: LoadReport) -> bytes:
    """Return a PNG: a row of squares a layer, the first on top, and a column an expert."""
    relative = np.array(list(report.shares.values()), dtype=np.float64) / report.balanced
    low, even, high = (np.array(colour, dtype=np.float64) for colour in (UNUSED, BALANCED, DOUBLE))
    up = np.clip(relative - 1.0, 0.0, 1.0)[..., None]
    down = np.clip(1.0 - relative, 0.0, 1.0)[..., None]
    colours = even + up * (high - even) + down * (low - even)
    return _png(colours.round().astype(np.uint8).repeat(CELL, axis=0).repeat(CELL, axis=1))


def _png(pixels: np.ndarray) -> bytes:
    """Encode [height, width, RGB] of 8 bits. Source: the PNG specification, ISO/IEC 15948."""
    height, width, _ = pixels.shape
    # each line begins with the number of its filter: 0, none
    lines = b"".join(b"\0" + line.tobytes() for line in pixels)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(lines)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, content) for kind, content in parts)


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
