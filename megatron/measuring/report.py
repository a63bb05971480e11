"""The file of measured rates, and its summary."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from megatron.plan.rates.files import rates_of
from megatron.plan.timing.text import seconds_text
from megatron.runtime.files import replacing

WIDTH = 100
BUSY_SPREAD = 0.15
"""Middle half of the repeats over their median above which other work disturbed them."""
NOTHING = 1e12
"""Numbers a second above which nothing was computed: such as backward of a loss, whose gradient is made forward."""


def write_rates(path: Path, tree: Mapping[str, Any]) -> None:
    """Write the file of rates, after it was read as any other. Raises ConfigError or OSError."""
    plain = _plain(tree)
    rates_of(plain, str(path))
    with replacing(path) as file:
        text = "# Rates of a machine: docs/guides/planning.md\n" + yaml.safe_dump(plain, sort_keys=False, width=118)
        file.write(text.encode("utf-8"))


def _plain(value: Any) -> Any:
    """Return values as YAML has them: lists of numbers as words, seconds of four digits."""
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, Sequence) and not isinstance(value, str):
        if all(isinstance(each, int | float) for each in value):
            return " ".join(f"{each:.4g}" if isinstance(each, float) else str(each) for each in value)
        return [_plain(each) for each in value]
    return value


def summary(tree: Mapping[str, Any], path: str) -> str:
    """Return a table of the rates, at most 100 columns wide."""
    lines = [f"Rates of {tree['title']}", f"  {tree['source']}", ""]
    for tables in tree["tables"]:
        lines.append(f"  {tables['threads']} threads a rank" if "cores" in tree else "  a rank")
        lines += _rows(tables)
    for kind, groups in tree.get("collectives", {}).items():
        for group in groups:
            at = f"{group['size']} ranks, {group['per_node']} a node, {group['sharing']} at once"
            rate = group["bytes"][-1] / group["seconds"][-1] / 1e9
            lines.append(f"  {kind:<16}{at:<34}start {seconds_text(group['seconds'][0]):>9}{rate:>9.2f} GB/s")
    for ranks, factor in tree.get("slowdown", {}).items():
        lines.append(f"  {ranks} ranks that compute at once take {factor:.2f} times as long as one")
    if tree.get("disk_bytes_per_s"):
        lines.append(f"  disk{tree['disk_bytes_per_s'] / 1e6:>12,.0f} MB/s")
    lines.append(f"  repeats differ by {tree['spread']:.1%}")
    return "\n".join([*lines, "", "Plan with them:", f"  --rates {path}"])


def _rows(tables: Mapping[str, Any]) -> list[str]:
    lines = []
    for precision, product in tables["products"].items():
        shapes = itertools.product(product["tokens"], product["outputs"], product["inputs"])
        rates = [
            2 * tokens * outputs * inputs / seconds / 1e9
            for (tokens, outputs, inputs), seconds in zip(shapes, product["forward"], strict=True)
        ]
        lines.append(f"    {precision} products   {min(rates):>10.1f} to {max(rates):,.1f} GFLOP/s")
    lines.append("    G numbers/s forward / backward")
    for kind, by_precision in tables["pointwise"].items():
        shown = "   ".join(f"{precision} {_both_rates(line)}" for precision, line in by_precision.items())
        lines.append(f"    {kind:<17} {shown}")
    starts = ", ".join(f"{name} {seconds_text(seconds)}" for name, seconds in tables["starts"].items() if seconds)
    return [*lines, *textwrap.wrap(f"starts: {starts}", WIDTH, initial_indent="    ", subsequent_indent="      ")]


def _both_rates(line: Mapping[str, Any]) -> str:
    rates = [line["numbers"][-1] / line[direction][-1] for direction in ("forward", "backward")]
    return " / ".join(f"{rate / 1e9:8.2f}" if rate < NOTHING else f"{'-':>8}" for rate in rates)
