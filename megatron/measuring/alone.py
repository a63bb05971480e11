"""Rates of a single rank: pieces, short trainings, the disk; on a CPU by the threads of a rank."""

from __future__ import annotations

import itertools
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.measuring import trainings
from megatron.measuring.disk import disk_rate
from megatron.measuring.options import MeasureOptions, Sizes
from megatron.measuring.pieces import HALF, Pieces, seen_share
from megatron.measuring.starts import mean_starts, starts_of
from megatron.measuring.stopwatch import Case, Pool, copies, measure, spread
from megatron.measuring.trainings import Training
from megatron.options.config import Config
from megatron.parallel.context import ParallelContext
from megatron.parallel.operators.products import DTYPES
from megatron.plan.rates.files import rates_of
from megatron.plan.rates.rates import Rates, Starts
from megatron.runtime import accelerator
from megatron.runtime.devices import find_device
from megatron.settings.command_line import load_config
from megatron.training.optimizers.build import BUILDERS

Say = Callable[[str], None]
Table = dict[str, Any]


class AloneRates:
    """Measures the rates of a rank alone on a device."""

    def __init__(self, options: MeasureOptions, device: str, say: Say) -> None:
        self._options, self._device, self._say = options, device, say
        self._record = find_device(device)
        self._sizes = options.sizes(is_host=self._record.is_host)
        self._folder: Path | None = None

    def measure(self, thread_counts: Sequence[int]) -> Table:
        """Return `tables`, `peak_flops`, the disk's rate and the spread of a file."""
        with tempfile.TemporaryDirectory(prefix="megatron-measure-") as name:
            folder = Path(name)
            trainings.write_data(folder)
            config = load_config(Training("fp32").flags(folder / "data", folder, self._device, 1))
            ctx = ParallelContext.build(config.parallel, self._device)
            found, spreads = [], []
            for threads in thread_counts:
                with trainings.threads_of(threads if self._record.is_host else None):
                    self._say(f"pieces of a rank{self._of_threads(threads)}")
                    table, cases = self._tables(config, ctx, threads)
                    self._say(f"short trainings{self._of_threads(threads)}")
                    self._train(table, folder)
                found.append(table)
                spreads.append(spread(cases))
        peaks = {precision: self._peak(found, precision) for precision in found[0]["products"]}
        self._say("the disk")
        return {
            "tables": found,
            "peak_flops": peaks,
            "disk_bytes_per_s": disk_rate(Path(self._options.folder), self._sizes.disk_bytes),
            "spread": max(spreads),
        }

    def _of_threads(self, threads: int) -> str:
        return f", {threads} threads" if self._record.is_host else ""

    def precisions(self) -> list[str]:
        """Return the precisions that the device computes by itself."""
        return [each for each in self._options.precisions if each not in self._record.widened()]

    def _tables(self, config: Config, ctx: ParallelContext, threads: int) -> tuple[Table, list[Case]]:
        cases = list(copies(self._sizes.bytes, ctx.device))
        for precision in self.precisions():
            pool = Pool(self._sizes.pool_numbers, DTYPES[precision], ctx.device)
            pieces = Pieces(config, ctx, precision, self._sizes, pool)
            cases += [*pieces.cases(), *pieces.others()]
        shown = 0.0

        def beat(share: float) -> None:
            nonlocal shown
            if share >= shown + 0.25:
                shown = share
                self._say(f"  {share:.0%}")

        measure(cases, ctx.device, self._sizes.rounds, beat)
        seconds = {case.key: case.median for case in cases}
        return tables_of(seconds, self._sizes, self.precisions(), threads), cases

    def _train(self, table: Table, folder: Path) -> None:
        """Add updates and starts to the tables of a rank."""
        wanted: dict[str, tuple[list[Training], list[Training]]] = {}
        for precision in self.precisions():
            wanted[precision] = trainings.of_starts(precision), trainings.of_updates(precision, self._sizes.hidden)
        # starts twice, in turn: a disturbance does not reach one of them alone
        for _, (of_starts, _) in itertools.product(range(2), wanted.values()):
            for training in of_starts:
                training.run(folder, self._device, self._sizes.steps)
        for _, of_updates in wanted.values():
            for training in of_updates:
                training.run(folder, self._device, self._sizes.steps)
        for precision, (_, of_updates) in wanted.items():
            for optimizer, by_precision in update_tables(of_updates, self._record.has_bitsandbytes).items():
                table["update"].setdefault(optimizer, {})[precision] = by_precision
        starts = []
        for precision, (of_starts, _) in wanted.items():
            starts.append(starts_of(of_starts, self._rates(table)))
            shown = ", ".join(f"{name} {1e6 * value:.0f} us" for name, value in starts[-1]._asdict().items())
            self._say(f"  starts in {precision}: {shown}")
        table["starts"] = mean_starts(starts)._asdict()

    def _rates(self, table: Table) -> Rates:
        no_starts = dict.fromkeys(Starts._fields, 0.0)
        tree = file_tree(
            "", self._device, "", None, {"tables": [{**table, "starts": no_starts}], "peak_flops": {"fp32": 1.0}}
        )
        return rates_of(tree, "the measurement")

    def _peak(self, tables: Sequence[Table], precision: str) -> float:
        """Return the FLOP/s that the MFU is of: the published ones, or the best of a product."""
        known = accelerator.peak_tflops()
        if precision == "bf16" and known is not None:
            return 1e12 * known
        best = 0.0
        for table in tables:
            product = table["products"][precision]
            shapes = itertools.product(product["tokens"], product["outputs"], product["inputs"])
            for (tokens, outputs, inputs), seconds in zip(shapes, product["forward"], strict=True):
                best = max(best, 2 * tokens * outputs * inputs / seconds)
        return best


def tables_of(seconds: Mapping[Any, float], sizes: Sizes, precisions: Sequence[str], threads: int) -> Table:
    """Return the tables of a file from the seconds of each case."""
    table: Table = {"threads": threads, "products": {}, "attention": {}, "pointwise": {}, "update": {}}
    for precision in precisions:
        shapes = list(itertools.product(sizes.tokens, sizes.channels, sizes.channels))
        product: Table = {"tokens": sizes.tokens, "outputs": sizes.channels, "inputs": sizes.channels}
        for role in ("forward", "input", "weight"):
            product[role] = [seconds[("product", precision, role, *shape)] for shape in shapes]
        table["products"][precision] = product
    table["attention"] = _attention_tables(seconds)
    others = {key[:2] for key in seconds if key[0] not in ("product", "attention", "copy", "host_copy")}
    for kind, precision in sorted(others):
        table["pointwise"].setdefault(kind, {})[precision] = {"numbers": sizes.numbers} | {
            direction: [seconds[kind, precision, numbers, direction] for numbers in sizes.numbers] for direction in HALF
        }
    for kind in ("copy", "host_copy"):
        if (kind, sizes.bytes[0]) in seconds:
            table[kind] = {"bytes": sizes.bytes, "seconds": [seconds[kind, each] for each in sizes.bytes]}
    return table


def _attention_tables(seconds: Mapping[Any, float]) -> Table:
    tables: Table = {}
    keys = [key for key in seconds if key[0] == "attention"]
    for kind, precision in dict.fromkeys((key[2], key[1]) for key in keys):
        own = [key for key in keys if key[1:3] == (precision, kind)]
        axes = {
            name: sorted({key[place] for key in own})
            for place, name in ((3, "heads"), (4, "row_tokens"), (5, "head_size"), (6, "group"))
        }
        points = list(itertools.product(*axes.values()))
        of_kind: Table = dict(axes)
        for direction in HALF:
            whole = [seconds[("attention", precision, kind, *point, direction)] for point in points]
            shares = [seen_share(kind, point[1]) for point in points]
            of_kind[direction] = [each / share for each, share in zip(whole, shares, strict=True)]
        tables.setdefault(kind, {})[precision] = of_kind
    return tables


def update_tables(measured: Sequence[Training], has_paged: bool) -> dict[str, Table]:
    """Return the update tables by optimizer; names that build the same optimizer share one."""
    tables: dict[str, Table] = {}
    for training in measured:
        of_optimizer = tables.setdefault(training.optimizer, {"numbers": [], "seconds": []})
        of_optimizer["numbers"].append(training.numbers)
        of_optimizer["seconds"].append(statistics.median(training.update))
    for name, build in BUILDERS.items():
        is_adam = build is BUILDERS["adamw"] or (name == "paged_adamw_32bit" and not has_paged)
        if is_adam:
            tables[name] = tables["adamw"]
    return tables


def file_tree(title: str, device: str, source: str, cores: int | None, measured: Table) -> Table:
    """Return the values of a file of rates."""
    tree: Table = {"version": 1, "origin": "measured", "title": title, "device": device, "source": source}
    if cores is not None:
        tree["cores"] = cores
    return tree | measured
