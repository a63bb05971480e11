"""Time to open a dataset of 100 million documents.

    python benchmarks/open_dataset.py [--documents 100000000] [--opens 11] [--folder FOLDER]

Makes an .idx of that size in a new folder (2 GB for 100 million documents, sparse: all but its ends are holes, which
opening must not read anyway), opens it, and deletes it. Prints the time of each open and the median in milliseconds.
Exit status 1 if the median is above 50 ms.
"""

from __future__ import annotations

import argparse
import statistics
import struct
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.data.index.indexed import HEADER_BYTES, MAGIC, VERSION, IndexedDataset

LIMIT_MS = 50.0


def write_sparse(prefix: Path, num_documents: int) -> int:
    """Empty documents, and one token in the last. Returns the size of the .idx in bytes."""
    entries = num_documents + 1
    size = HEADER_BYTES + 12 * num_documents + 8 * entries
    with prefix.with_suffix(".idx").open("wb") as idx:
        idx.truncate(size)
        idx.write(MAGIC + struct.pack("<QBQQ", VERSION, 8, num_documents, entries))
        idx.seek(HEADER_BYTES + 4 * (num_documents - 1))
        idx.write(struct.pack("<i", 1))
        idx.seek(size - 8)
        idx.write(struct.pack("<q", num_documents))
    prefix.with_suffix(".bin").write_bytes(bytes(2))
    return size


def main() -> int:
    parser = argparse.ArgumentParser(description="Time to open a large dataset.", allow_abbrev=False)
    parser.add_argument("--documents", type=int, default=100_000_000, help="default: 100000000")
    parser.add_argument("--opens", type=int, default=11, help="default: 11")
    parser.add_argument("--folder", help="where to make it; default: the folder of temporary files")
    options = parser.parse_args()
    if options.documents < 1 or options.opens < 5:
        parser.error("--documents must be at least 1, --opens at least 5")

    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        prefix = Path(folder, "sparse")
        size = write_sparse(prefix, options.documents)
        times_ms = []
        for _ in range(options.opens):
            began_s = time.perf_counter()
            data = IndexedDataset(prefix)
            times_ms.append((time.perf_counter() - began_s) * 1000)
            assert data.num_documents == options.documents
            del data
    median_ms = statistics.median(times_ms)
    print(f"{options.documents:,} documents, an .idx of {size / 1e9:.2f} GB, opened {options.opens} times")
    print("each   " + " ".join(f"{t:.3f}" for t in times_ms) + " ms")
    print(f"median {median_ms:.3f} ms, limit {LIMIT_MS:.0f} ms")
    return 0 if median_ms <= LIMIT_MS else 1


if __name__ == "__main__":
    sys.exit(main())
