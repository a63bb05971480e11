"""Speed of reading samples that the page cache holds, in random order.

    python benchmarks/read_samples.py --peer-python peer/bin/python [--megabytes 400] [--samples 20000] [--rounds 7]

A sample at a time: `GPTDataset[i]` of ours against megatron-core's, with the configuration a training run gives it
(memory-mapped, causal mask made once and cached). Ours gives the 2,049 ids as int64, from which training makes batches;
theirs a dictionary of tokens, labels, masks and positions. The difference is not due to reading alone, so
the ids that theirs makes it from are timed, too. The ids read are checked against each other.

Many at once: `get_batch` of 64 and of 512 samples, int64 [B, 2049], against bare slices at random places of the file,
`numpy.stack([tokens[a : a + 2049] for a in starts])`, uint16 as they lie there, where `tokens` is a `numpy.memmap`. Two
stricter readings are printed beside it: `tokens` a plain array over the same map, which NumPy slices faster, and the
stack of those turned into int64 by `.astype`, which is what `get_batch` gives. `get_batch` checks every id against the
vocabulary, too, as in training.

Documents of lognormal lengths, 665 tokens in the mean, uint16. Exit status 1 if a sample at a time is less than 5 times
as fast as megatron-core's, or `get_batch` takes more than twice as long as the slices of the memory map.
benchmarks/alternating.py says how to make the environment of `--peer-python`.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
from numpy.typing import NDArray

from benchmarks.alternating import PEER_HELP, MegatronCore, PeerError, alternate, positive, quotients, spread
from megatron.data.gpt import GPTDataset
from megatron.data.index.indexed import IndexedDataset
from megatron.data.index.indexed_builder import IndexedDatasetBuilder

SEQ_LENGTH = 2048
SINGLE_LIMIT = 5.0
BATCH_LIMIT = 2.0
BATCH_SIZES = (64, 512)
CHECKED = 100
SEED = 1234


def write_dataset(prefix: Path, megabytes: int) -> None:
    generator = np.random.default_rng(0)
    left = megabytes * 500_000  # tokens of two bytes
    with IndexedDatasetBuilder(prefix, np.uint16) as builder:
        while left > 0:
            lengths = np.maximum(1, generator.lognormal(6, 1, 1000)).astype(np.int64)
            builder.add_documents(generator.integers(0, 50257, int(lengths.sum()), dtype=np.uint16), lengths)
            left -= int(lengths.sum())
        builder.finalize()


def timed(work: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    work()
    return time.perf_counter() - began_s


def report(seconds: dict[str, list[float]], samples: int) -> None:
    for name, times in seconds.items():
        print(f"  {name:36s} {spread([1e6 * value / samples for value in times], 2)} us a sample")


def compare_single(peer: MegatronCore, dataset: GPTDataset, folder: Path, samples: int, rounds: int) -> bool:
    order = np.random.default_rng(1).integers(0, len(dataset), samples)
    np.save(folder / "indices.npy", order)
    indices = order.tolist()
    sums: list[int] = []

    def ours() -> None:
        for index in indices:
            dataset[index]

    def theirs(tokens_only: bool) -> float:
        answer = peer.ask("read_samples", {"indices": str(folder / "indices.npy"), "tokens_only": tokens_only})
        sums[:] = answer["sums"]
        return float(answer["seconds"])

    seconds = alternate(
        {
            "ours": lambda: timed(ours),
            "megatron-core": lambda: theirs(False),
            "megatron-core, its ids alone": lambda: theirs(True),
        },
        rounds,
    )
    equal = sums == [int(dataset[index].sum()) for index in indices[:CHECKED]]
    print(f"a sample at a time, {samples} of {len(dataset)} in random order, {rounds} rounds: median (from to)")
    report(seconds, samples)
    ratios = quotients(seconds["megatron-core"], seconds["ours"])
    alone = quotients(seconds["megatron-core, its ids alone"], seconds["ours"])
    print(f"  ratio {spread(ratios, 2)}, at least {SINGLE_LIMIT:g} wanted; to its ids alone {spread(alone, 2)}")
    print(f"  samples {'equal' if equal else 'DIFFERENT'}")
    return equal and statistics.median(ratios) >= SINGLE_LIMIT


def compare_batches(dataset: GPTDataset, prefix: Path, batch_size: int, samples: int, rounds: int) -> bool:
    generator = np.random.default_rng(2)
    batches = generator.integers(0, len(dataset), (max(1, samples // batch_size), batch_size))
    mapped = np.memmap(f"{prefix}.bin", np.uint16, "r")
    plain = np.asarray(mapped)
    places = generator.integers(0, len(mapped) - SEQ_LENGTH, batches.shape).tolist()
    assert np.array_equal(dataset.get_batch(batches[0]), np.stack([dataset[i] for i in batches[0].tolist()]))

    def ours() -> None:
        for indices in batches:
            dataset.get_batch(indices)

    def slices(tokens: NDArray[np.uint16]) -> None:
        for starts in places:
            np.stack([tokens[a : a + SEQ_LENGTH + 1] for a in starts])

    def converted() -> None:
        for starts in places:
            np.stack([plain[a : a + SEQ_LENGTH + 1] for a in starts]).astype(np.int64)

    seconds = alternate(
        {
            "get_batch": lambda: timed(ours),
            "slices of the numpy.memmap": lambda: timed(lambda: slices(mapped)),
            "slices of a plain array over it": lambda: timed(lambda: slices(plain)),
            "those turned into int64": lambda: timed(converted),
        },
        rounds,
    )
    print(f"batches of {batch_size}, {batches.size} samples, {rounds} rounds: median (from to)")
    report(seconds, batches.size)
    ratios = {name: quotients(seconds["get_batch"], times) for name, times in seconds.items() if name != "get_batch"}
    for name, values in ratios.items():
        print(f"  ratio to {name:35s} {spread(values, 2)}")
    print(f"  at most {BATCH_LIMIT:g} wanted for the first")
    return statistics.median(ratios["slices of the numpy.memmap"]) <= BATCH_LIMIT


def main() -> int:
    parser = argparse.ArgumentParser(description="Random reads of samples, against megatron-core.", allow_abbrev=False)
    parser.add_argument("--peer-python", required=True, metavar="PATH", help=PEER_HELP)
    parser.add_argument("--megabytes", type=positive, default=400, metavar="N", help="of tokens (default: 400)")
    parser.add_argument("--samples", type=positive, default=20_000, metavar="N", help="reads a round (default: 20000)")
    parser.add_argument("--rounds", type=positive, default=7, metavar="N", help="alternations (default: 7)")
    options = parser.parse_args()
    try:
        with MegatronCore(options.peer_python) as peer, tempfile.TemporaryDirectory() as folder:
            print(peer.versions)
            prefix = Path(folder) / "samples"
            write_dataset(prefix, options.megabytes)
            data = IndexedDataset(prefix)
            num_samples = (data.num_tokens - 1) // SEQ_LENGTH
            dataset = GPTDataset(
                data, range(len(data)), num_samples=num_samples, seq_length=SEQ_LENGTH, seed=SEED, vocab_size=50257
            )
            print(f"{len(data)} documents, {data.num_tokens} tokens, samples of {SEQ_LENGTH + 1}")
            asked = {"prefix": str(prefix), "num_samples": num_samples, "seq_length": SEQ_LENGTH, "seed": SEED}
            if peer.ask("open_samples", asked) != len(dataset):
                raise PeerError("megatron-core made another number of samples of the same tokens")
            passed = [compare_single(peer, dataset, Path(folder), options.samples, options.rounds)]
            passed += [
                compare_batches(dataset, prefix, batch_size, options.samples, options.rounds)
                for batch_size in BATCH_SIZES
            ]
    except PeerError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
