"""Number of microbatches of a global batch, and the time to plan them: ours against InstructLab's sampler.

    MEGATRON_TEST_DATA=... python benchmarks/pack_steps.py --peer-python tuning/bin/python [--batches 100]

Batches of 2,048 samples for 8 ranks of at most 16,384 tokens a microbatch: lognormal lengths (665 tokens on average),
uniform ones up to 4,096, and those of real chats (left out without MEGATRON_TEST_DATA). The lower bound is
ceil(sum / (8 * 16384)) microbatches. Both get the same lengths, in turn, in processor time, so that other work on the
machine does not count; theirs is compiled before. It works out one rank's share, which every rank does for itself; ours
works out all ranks'.

Prints the share of batches at the bound, microbatches, milliseconds a batch and their ratio, and how even the cells
are. Exit status 1 if, for lognormal lengths, fewer than 95 % of our batches are at the bound or the median ratio is
below 20. benchmarks/alternating.py says how to make the environment.
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
from benchmarks.sample_lengths import available, draw
from megatron.data.packing import StepPlan, pack_step

SPEED_LIMIT = 20.0
AT_BOUND_LIMIT = 0.95
SAMPLES = 2048
RANKS = 8
MAX_TOKENS = 16384


def totals(plan: StepPlan, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Tokens of each cell: [microbatch, rank]. Raises AssertionError if the plan is not right."""
    assert np.array_equal(np.sort(plan.order), np.arange(len(lengths)))
    ends = np.concatenate(([0], np.cumsum(lengths[plan.order])))[plan.starts]
    found = np.diff(ends).reshape(-1, RANKS)
    assert found.max() <= MAX_TOKENS
    return found


def compare(peer: TuningPeer, distribution: str, num_batches: int, rounds: int, folder: Path) -> bool:
    """Return True if ours was fast enough and reached the bound often enough."""
    generator = np.random.default_rng(0)
    batches = draw(distribution, num_batches * SAMPLES, generator).reshape(num_batches, SAMPLES)
    file = folder / f"{distribution}.npy"
    np.save(file, batches)
    microbatches: dict[str, list[int]] = {}

    def ours() -> float:
        seconds, microbatches["ours"] = [], []
        for lengths in batches:
            began_s = time.process_time()
            plan = pack_step(lengths, MAX_TOKENS, RANKS)
            seconds.append(time.process_time() - began_s)
            microbatches["ours"].append(plan.num_microbatches)
        return statistics.median(seconds) * 1000

    def theirs() -> float:
        answer = peer.ask("pack_steps", {"lengths": str(file), "max_tokens": MAX_TOKENS, "num_ranks": RANKS})
        microbatches["InstructLab"] = answer["microbatches"]
        return statistics.median(answer["seconds"]) * 1000

    milliseconds = alternate({"ours": ours, "InstructLab": theirs}, rounds)
    ratios = quotients(milliseconds["InstructLab"], milliseconds["ours"])
    bounds = [-(-int(lengths.sum()) // (MAX_TOKENS * RANKS)) for lengths in batches]
    cells = [totals(pack_step(lengths, MAX_TOKENS, RANKS), lengths) for lengths in batches]
    above = [int(cell.max()) - -(-int(cell.sum()) // cell.size) for cell in cells]
    print(f"{distribution}: {num_batches} batches, {rounds} rounds of all: median (from to)")
    at_bound = {}
    for name, found in microbatches.items():
        at_bound[name] = statistics.mean(a == b for a, b in zip(found, bounds, strict=True))
        print(
            f"  {name:12s} {spread(milliseconds[name])} ms a batch; {at_bound[name]:.1%} of the batches at the bound; "
            f"{sum(found)} microbatches, the bound is {sum(bounds)}"
        )
    print(f"  ratio        {spread(ratios, 1)}, at least {SPEED_LIMIT:g} wanted")
    print(f"  the fullest cell is {statistics.median(above)} tokens above the mean, at most {max(above)}")
    if distribution != "lognormal":
        return True
    return at_bound["ours"] >= AT_BOUND_LIMIT and statistics.median(ratios) >= SPEED_LIMIT


def main() -> int:
    parser = argparse.ArgumentParser(description="Packing of a step, against InstructLab.", allow_abbrev=False)
    parser.add_argument("--peer-python", required=True, metavar="PATH", help=TUNING_PEER_HELP)
    parser.add_argument("--batches", type=positive, default=100, metavar="N", help="default: 100")
    parser.add_argument("--rounds", type=positive, default=5, metavar="N", help="alternations (default: 5)")
    options = parser.parse_args()
    try:
        with TuningPeer(options.peer_python) as peer, tempfile.TemporaryDirectory() as folder:
            print(peer.versions)
            passed = [
                compare(peer, distribution, options.batches, options.rounds, Path(folder))
                for distribution in available()
            ]
    except PeerError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
