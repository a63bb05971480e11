"""The search's order of layouts against the order of their runs, all of them measured.

    python benchmarks/plan_search.py --rates cpu.yaml [--ranks 4] [--only TEXT]

Every division of the ranks that the search knows, with each of the micro batch sizes and ZeRO stages below, trains by
the whole program (benchmarks/plan_time.py). Printed are the layouts by measured time, with the place that the search
gives them. Exit status 1 if the fastest is not among the first two of the search for a model.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.plan_time import COMMON, LONG, SMALL, SMALL_BLOOM, Case, measure
from megatron.cli.planning.start_command import StartCommand
from megatron.plan.fit import Capacity
from megatron.plan.rates.files import load_rates
from megatron.plan.rates.rates import Rates
from megatron.plan.search.search import search
from megatron.plan.timing.cluster import Cluster
from megatron.settings.command_line import parse_arguments
from megatron.settings.validation import check

MODELS = {
    "Llama": f"{SMALL} --global-batch-size 16",
    "Bloom": f"{SMALL_BLOOM} --global-batch-size 16",
    "long": f"{LONG} --global-batch-size 4 --num-layers 4 --seq-length 1024",
}
MICRO_BATCH_SIZES = (1, 2)
ZERO_STAGES = (0, 1, 3)
KEPT = (
    "micro_batch_size",
    "zero_stage",
    "num_replicas",
    "recompute_granularity",
    "offload_optimizer",
    "offload_activations",
    "pipeline_partition_method",
)
"""Options that a search does not change here."""
AMONG = 2
ROOM = Capacity("any", 2**40)


class Ranked(NamedTuple):
    """A layout: its flags and its predicted seconds."""

    flags: str
    predicted_s: float


def layouts(model: str, ranks: int, rates: Rates) -> list[Ranked]:
    """Return all layouts, by predicted time."""
    found = []
    for micro_batch_size, zero_stage in itertools.product(MICRO_BATCH_SIZES, ZERO_STAGES):
        own = f"{model} --micro-batch-size {micro_batch_size} --zero-stage {zero_stage}"
        config, _ = parse_arguments([*COMMON.split(), *own.split(), "--train-iters", "10", "--data-path", "none"])
        result = search(config, [Cluster((ranks,))], rates, ROOM, check, count=100, fixed=KEPT)
        for each in result.found:
            words = StartCommand(each, own.split(), ()).launch_words()
            found.append(Ranked(" ".join(words[words.index("--") + 1 :]), each.time.seconds))
    return sorted(set(found), key=lambda layout: layout.predicted_s)


def rows(name: str, model: str, ranks: int, rates: Rates) -> Iterator[tuple[int, float]]:
    """Yield the place of each layout in the search, and its measured seconds."""
    for place, layout in enumerate(layouts(model, ranks, rates), 1):
        own = layout.flags.removeprefix(model).strip()
        try:
            seconds = statistics.median(measure(Case(name, layout.flags, ranks)))
        except RuntimeError as error:
            print(f"| {place} | {own} | {1000 * layout.predicted_s:.0f} | failed: {error} |", flush=True)
            continue
        print(f"| {place} | {own} | {1000 * layout.predicted_s:.0f} | {1000 * seconds:.0f} |", flush=True)
        yield place, seconds


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Order of the search against measured runs.", allow_abbrev=False)
    parser.add_argument(
        "--rates", required=True, metavar="FILE", help="made by megatron-plan --measure on this machine"
    )
    parser.add_argument("--ranks", type=int, default=4, metavar="N", help="default: 4")
    parser.add_argument("--only", default="", metavar="TEXT", help="models with this text in their name")
    options = parser.parse_args(argv)
    rates = load_rates(options.rates)
    from megatron.train import preload

    os.environ["DS_ACCELERATOR"] = "cpu"
    preload()
    is_reached = True
    for name, model in MODELS.items():
        if options.only not in name:
            continue
        print(f"{name}\n| place | layout | predicted, ms | measured, ms |\n|---|---|---|---|", flush=True)
        measured = sorted(rows(name, model, options.ranks, rates), key=lambda row: row[1])
        places = [place for place, _ in measured]
        first_s = min(seconds for place, seconds in measured if place <= AMONG)
        print(f"places of the fastest: {places[:5]}; the better of the first two is at {first_s / measured[0][1]:.3f}")
        is_reached &= places[0] <= AMONG
    return 0 if is_reached else 1


if __name__ == "__main__":
    sys.exit(main())
