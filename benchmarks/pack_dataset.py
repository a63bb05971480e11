"""Time to pack a dataset, and the number of packs: ours against TRL's strategy "bfd".

    MEGATRON_TEST_DATA=... python benchmarks/pack_dataset.py --peer-python tuning/bin/python [--samples 5000000]

5 million samples in packs of 4,096 tokens: lognormal lengths (665 tokens on average), uniform ones, and those of real
chats, drawn again and again (left out without MEGATRON_TEST_DATA). Theirs takes minutes for so many, so it gets the
first --peer-samples, and the ratio is that of lengths a second; its time grows in proportion. Both run in turn, in
processor time, so that other work on the machine does not count; of the samples that both had, ours must not make more
packs.

Prints lengths a second, ratio, and packs beside ceil(sum / capacity). Exit status 1 if a median ratio is below 200,
packs are more than 1.0005 times that bound, or a pack is not right. benchmarks/alternating.py says how to make the
environment.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
from numpy.typing import NDArray

from benchmarks.alternating import TUNING_PEER_HELP, PeerError, TuningPeer, alternate, positive, quotients, spread
from benchmarks.sample_lengths import CAPACITY, available, draw
from megatron.data.packing import Packs, pack_dataset

LIMIT = 200.0
MOST_PACKS = 1.0005
"""Most packs, as a multiple of the lower bound."""


def is_right(packs: Packs, lengths: NDArray[np.int64]) -> bool:
    """Every sample once, no pack above its capacity."""
    once = np.array_equal(np.sort(packs.order), np.arange(len(lengths)))
    return once and int(np.add.reduceat(lengths[packs.order], packs.starts[:-1]).max()) <= CAPACITY


def compare(peer: TuningPeer, distribution: str, samples: int, peer_samples: int, rounds: int, folder: Path) -> bool:
    """Return True if ours was fast enough and its packs are few and correct."""
    lengths = draw(distribution, samples, np.random.default_rng(0))
    file = folder / f"{distribution}.npy"
    np.save(file, lengths[:peer_samples])
    made: dict[str, int] = {}

    def ours() -> float:
        began_s = time.process_time()
        packs = pack_dataset(lengths, CAPACITY)
        rate = len(lengths) / (time.process_time() - began_s)
        made["ours"] = len(packs)
        return rate

    def theirs() -> float:
        answer = peer.ask("pack_dataset", {"lengths": str(file), "capacity": CAPACITY})
        made["theirs"] = answer["packs"]
        return min(peer_samples, len(lengths)) / float(answer["seconds"])

    rates = alternate({"ours": ours, "TRL bfd": theirs}, rounds)
    ratios = quotients(rates["ours"], rates["TRL bfd"])
    bound = -(-int(lengths.sum()) // CAPACITY)
    shared_packs = len(pack_dataset(lengths[:peer_samples], CAPACITY))
    few = shared_packs <= made["theirs"]
    right = is_right(pack_dataset(lengths, CAPACITY, seed=1), lengths)
    shared = min(peer_samples, samples)
    print(f"{distribution}: {samples} samples, {shared} of them for TRL, {rounds} rounds: median (from to)")
    for name, values in rates.items():
        print(f"  {name:10s} {spread([value / 1e6 for value in values])} million lengths/s")
    print(f"  ratio      {spread(ratios, 0)}, at least {LIMIT:g} wanted")
    print(f"  packs      {made['ours']}, {made['ours'] / bound:.6f} of the bound {bound}, at most {MOST_PACKS} wanted")
    print(f"  of TRL's samples {shared_packs} packs, TRL {made['theirs']}")
    if not right:
        print("  WRONG: a sample is missing or twice, or a pack is above its capacity")
    return statistics.median(ratios) >= LIMIT and made["ours"] <= MOST_PACKS * bound and few and right


def main() -> int:
    parser = argparse.ArgumentParser(description="Packing of a dataset, against TRL.", allow_abbrev=False)
    parser.add_argument("--peer-python", required=True, metavar="PATH", help=TUNING_PEER_HELP)
    parser.add_argument("--samples", type=positive, default=5_000_000, metavar="N", help="default: 5000000")
    parser.add_argument("--peer-samples", type=positive, default=100_000, metavar="N", help="default: 100000")
    parser.add_argument("--rounds", type=positive, default=5, metavar="N", help="alternations (default: 5)")
    options = parser.parse_args()
    try:
        with TuningPeer(options.peer_python) as peer, tempfile.TemporaryDirectory() as folder:
            print(peer.versions)
            sizes = (options.samples, options.peer_samples, options.rounds)
            passed = [compare(peer, distribution, *sizes, Path(folder)) for distribution in available()]
    except PeerError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
