"""Time to build the index of a large dataset: document, sample and shuffle index, ours against megatron-core's.

    python benchmarks/build_index.py --peer-python peer/bin/python [--documents 20000000] [--epochs 1 2] [--rounds 5]

20 million documents of lognormal lengths, 13.3 billion tokens, in samples of 2,049; the .idx is real, the .bin a hole
of the right size (26.6 GB that take no space), since no token is read. Ours is the making of a `GPTDataset` over the
open dataset, without cache files. Theirs are the calls that its GPTDataset makes for the same arrays, without cache
files: the sum of the lengths, the documents tiled and shuffled by NumPy, `helpers.build_sample_idx`, the samples
shuffled by NumPy. Both map the same .idx, run in turn, and must give the same bytes.

Prints seconds and ratio for each number of epochs. Exit status 1 if a median ratio is below 3 or an array differs.
Needs some gigabytes of memory. benchmarks/alternating.py says how to make the environment of `--peer-python`.
"""

from __future__ import annotations

import argparse
import hashlib
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
from numpy.typing import NDArray

from benchmarks.alternating import PEER_HELP, MegatronCore, PeerError, alternate, positive, quotients, spread
from megatron.data.gpt import GPTDataset
from megatron.data.index.indexed import HEADER_BYTES, MAGIC, IndexedDataset

LIMIT = 3.0
MEAN_TOKENS = 665
SIGMA = 1.0
SEED = 1234


def write_hollow_dataset(prefix: Path, num_documents: int) -> int:
    """A dataset of documents of random lengths whose .bin is a hole. The number of its tokens."""
    generator = np.random.default_rng(0)
    mu = np.log(MEAN_TOKENS) - SIGMA**2 / 2
    lengths = np.maximum(1, generator.lognormal(mu, SIGMA, num_documents)).astype("<i4")
    ends = np.cumsum(lengths, dtype=np.int64) * 2
    with open(f"{prefix}.idx", "xb") as idx:
        idx.write(MAGIC + (1).to_bytes(8, "little") + bytes([8]))  # version 1, uint16
        idx.write(num_documents.to_bytes(8, "little") + (num_documents + 1).to_bytes(8, "little"))
        assert idx.tell() == HEADER_BYTES
        idx.write(lengths.data)
        idx.write((ends - 2 * lengths.astype(np.int64)).astype("<i8").data)
        idx.write(np.arange(num_documents + 1, dtype="<i8").data)
    with open(f"{prefix}.bin", "xb") as tokens:
        tokens.truncate(int(ends[-1]))
    return int(ends[-1]) // 2


def digest(array: NDArray[Any]) -> str:
    """Shape, type and content, in the words of the peer."""
    return f"{array.shape} {array.dtype} {hashlib.sha256(np.ascontiguousarray(array).data).hexdigest()}"


def compare(
    peer: MegatronCore, data: IndexedDataset, num_tokens: int, num_epochs: int, seq_length: int, rounds: int
) -> bool:
    """Return True if both built the same arrays and ours was fast enough."""
    num_samples = (num_epochs * num_tokens - 1) // seq_length
    digests: dict[str, dict[str, str]] = {}

    def ours() -> float:
        began_s = time.perf_counter()
        dataset = GPTDataset(
            data, range(len(data)), num_samples=num_samples, seq_length=seq_length, seed=SEED, cache_dir=None
        )
        elapsed_s = time.perf_counter() - began_s
        names = ("document_index", "sample_index", "shuffle_index")
        digests["ours"] = {name: digest(getattr(dataset, name)) for name in names}
        return elapsed_s

    def theirs() -> float:
        answer = peer.ask("build_index", {"num_samples": num_samples, "seq_length": seq_length, "seed": SEED})
        digests["megatron-core"] = answer["digests"]
        return float(answer["seconds"])

    seconds = alternate({"ours": ours, "megatron-core": theirs}, rounds)
    ratios = quotients(seconds["megatron-core"], seconds["ours"])
    equal = digests["ours"] == digests["megatron-core"]
    print(f"{num_epochs} epochs, {num_samples} samples, {rounds} rounds: median (from to)")
    for name, times in seconds.items():
        print(f"  {name:14s} {spread(times)} s")
    print(f"  ratio          {spread(ratios, 2)}, at least {LIMIT:g} wanted")
    print(f"  arrays         {'identical' if equal else 'DIFFERENT'}")
    if not equal:
        for name, found in digests["ours"].items():
            print(f"    {name}: ours {found}, megatron-core's {digests['megatron-core'][name]}")
    return equal and statistics.median(ratios) >= LIMIT


def main() -> int:
    parser = argparse.ArgumentParser(description="Index of a large dataset, against megatron-core.", allow_abbrev=False)
    parser.add_argument("--peer-python", required=True, metavar="PATH", help=PEER_HELP)
    parser.add_argument("--documents", type=positive, default=20_000_000, metavar="N", help="default: 20000000")
    parser.add_argument("--seq-length", type=positive, default=2048, metavar="N", help="default: 2048")
    parser.add_argument("--epochs", type=positive, nargs="+", default=[1, 2], metavar="N", help="default: 1 and 2")
    parser.add_argument("--rounds", type=positive, default=5, metavar="N", help="alternations (default: 5)")
    options = parser.parse_args()
    try:
        with MegatronCore(options.peer_python) as peer, tempfile.TemporaryDirectory() as folder:
            print(peer.versions)
            prefix = Path(folder) / "hollow"
            num_tokens = write_hollow_dataset(prefix, options.documents)
            data = IndexedDataset(prefix)
            print(f"{options.documents} documents, {num_tokens} tokens, seq_length {options.seq_length}")
            began_s = time.perf_counter()
            assert data.fingerprint  # what a cache would be named after: part of opening, not of the arrays
            print(f"ours reads all lengths for its fingerprint once, before: {time.perf_counter() - began_s:.3f} s")
            peer.ask("open_index", {"prefix": str(prefix)})
            passed = [
                compare(peer, data, num_tokens, epochs, options.seq_length, options.rounds) for epochs in options.epochs
            ]
    except PeerError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
