"""Print the content of a checkpoint (run, progress, parameters), verify it, or compare two.

    python tools/inspect_checkpoint.py out/checkpoints                     the newest one there
    python tools/inspect_checkpoint.py out/checkpoints/global_step100 --norms --verify
    python tools/inspect_checkpoint.py --diff A B

Exit status: 0 success, 1 damaged, unreadable or (with --diff) different, 2 wrong options.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.cli.command import byte_size, command, command_parser, jsonable, progress_bar
from megatron.runtime.commands import DONE, FAILED, counted

if TYPE_CHECKING:
    from megatron.checkpoint.reader import Checkpoint

SHOWN_DIFFERENCES = 20


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = command_parser(
        "inspect_checkpoint",
        "Print the content of a checkpoint, verify it, or compare two.",
        epilog="Exit status: 0 success, 1 damaged, unreadable or (with --diff) different.",
    )
    parser.add_argument(
        "path", nargs="?", metavar="PATH", help="a checkpoint, or a folder of checkpoints (uses the newest)"
    )
    parser.add_argument(
        "--norms", action="store_true", help="print the L2 norm and the largest magnitude of each tensor"
    )
    parser.add_argument("--verify", action="store_true", help="read all tensors and compare their checksums")
    parser.add_argument("--diff", nargs=2, metavar=("A", "B"), help="compare two checkpoints, saved on any layouts")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    arguments = parser.parse_args(argv)
    # exactly one of the two
    if bool(arguments.path) == bool(arguments.diff):
        parser.error("give either PATH or --diff A B")
    if arguments.diff and (arguments.norms or arguments.verify):
        parser.error("--norms and --verify belong to PATH, not to --diff")
    return arguments


def opened(path: str) -> Checkpoint:
    """Open a checkpoint, or the newest in a folder of them. Raises CheckpointError."""
    from megatron.checkpoint.format import CheckpointError
    from megatron.checkpoint.reader import open_checkpoint

    checkpoint = open_checkpoint(Path(path))
    if checkpoint is None:
        raise CheckpointError(f"{path} holds no checkpoint; give a checkpoint's folder, or a run's --save folder")
    return checkpoint


def verify(checkpoint: Checkpoint) -> str | None:
    """Return the damage found; None if there is none."""
    from megatron.checkpoint.format import CheckpointError

    with progress_bar("verify", sum(at.num_bytes for at in checkpoint.fragments)) as progress:
        try:
            checkpoint.verify(progress=progress.update)
        except CheckpointError as error:
            return str(error)
    return None


def said(value: Any) -> str:
    """Format a value of the metadata on one line."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {said(each)}" for key, each in value.items())
    # True is an int too
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    if isinstance(value, str):
        return value
    return json.dumps(value)


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]], right: set[int]) -> None:
    """Print aligned columns; those whose numbers are in `right` are right-aligned."""
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    for row in (head, *rows):
        cells = [
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        print("  " + "  ".join(cells).rstrip())


METADATA = ("progress", "layout", "versions", "data_fingerprint", "optimizer")
"""Parts of a checkpoint's metadata that the text shows, beside `run`."""
LONGEST = 400
"""Characters of a part that are shown."""


def print_description(found: dict[str, Any]) -> None:
    lines = [
        ("tag", found["tag"]),
        ("size", f"{byte_size(found['bytes'])} in {counted(found['files'], 'file')}"),
        ("parameters", f"{found['num_parameters']:,} in {len(found['parameters'])} tensors"),
        ("kinds", ", ".join(found["kinds"])),
        *metadata_lines(found["metadata"]),
    ]
    print(found["folder"])
    width = max(len(key) for key, _ in lines)
    for key, value in lines:
        if len(value) > LONGEST:
            value = value[:LONGEST] + " ..."
        # the metadata come from a file, and must not send control characters to the terminal
        print(f"  {key.ljust(width)}  {''.join(c if c.isprintable() else '?' for c in value)}")
    print()
    print_parameters(found["parameters"])


def metadata_lines(metadata: dict[str, Any]) -> Iterator[tuple[str, str]]:
    if run := metadata.get("run"):
        yield "run", said(run["id"])
        # from the parent back to the first run
        for ancestor in reversed(run["ancestors"]):
            taken = "" if ancestor["is_continued"] else ", weights alone"
            yield "began at", f"{said(ancestor['folder'])}, of run {said(ancestor['run'])}{taken}"
    for key in METADATA:
        if metadata.get(key) not in (None, {}, ""):
            yield key.replace("_", " "), said(metadata[key])
    if metadata.get("expert_loads"):
        yield "dead experts", dead_experts(metadata["expert_loads"])
    others = [key for key in metadata if key not in ("run", *METADATA)]
    if others:
        yield "also", f"{', '.join(others)} (--json prints all)"


def dead_experts(record: dict[str, Any]) -> str:
    """Name the experts that no token chose in the steps before the checkpoint."""
    from megatron.checkpoint.inspection import unused_experts

    steps = record["steps"]
    since = f"in the {steps:,} steps before it" if steps > 1 else "in the step before it"
    unused = unused_experts(record)
    if not unused:
        return f"none: each had tokens {since}"
    named = "; ".join(f"layer {layer}: {', '.join(map(str, experts))}" for layer, experts in unused.items())
    return f"without a token {since}: {named}"


def print_parameters(parameters: dict[str, Any]) -> None:
    head = ["parameter", "shape", "dtype", "cut"]
    # with norms a parameter has a line for each kind of tensor
    if not any("norms" in entry for entry in parameters.values()):
        rows = [[*cells_of(name, entry), ", ".join(entry["kinds"])] for name, entry in parameters.items()]
        print_table([*head, "kinds"], rows, set())
        return
    rows = []
    for name, entry in parameters.items():
        cells = cells_of(name, entry)
        for kind, norm in entry["norms"].items():
            rows.append([*cells, kind, f"{norm['l2']:.6g}", f"{norm['max']:.6g}"])
            # further kinds stand below the same name
            cells = [""] * len(head)
    print_table([*head, "kind", "L2 norm", "largest"], rows, {5, 6})


def cells_of(name: str, entry: dict[str, Any]) -> list[str]:
    """Return a parameter's name, shape, dtype and cut."""
    cut = "whole"
    if entry["cut"]:
        pieces = entry["cut"]["pieces"]
        cut = f"dim {entry['cut']['dim']}"
        if len(pieces) > 1:
            cut += f" ({' + '.join(map(str, pieces))})"
    return [name, " x ".join(map(str, entry["shape"])) or "scalar", entry["dtype"], cut]


def inspect(path: str, arguments: argparse.Namespace) -> bool:
    """Print the requested facts. Returns True if nothing is damaged. Raises CheckpointError."""
    from megatron.checkpoint import inspection

    checkpoint = opened(path)
    found = inspection.describe(checkpoint)
    damage = None
    # the description needs the manifest alone, and is printed of a damaged checkpoint too
    if arguments.verify:
        damage = verify(checkpoint)
        found["verified"] = {"damage": damage}
    if arguments.norms:
        with progress_bar("norms", sum(at.num_bytes for at in checkpoint.fragments)) as progress:
            for name, by_kind in inspection.norms(checkpoint, progress.update).items():
                found["parameters"][name]["norms"] = by_kind
    if arguments.json:
        print(json.dumps(jsonable(found)))
        return damage is None
    print_description(found)
    if damage is not None:
        print(f"\nDAMAGED\n{damage}")
    elif arguments.verify:
        print(f"\nverified: the checksums of all {len(checkpoint.fragments)} fragments are right")
    return damage is None


# ---------------------------------------------------------------------------------------------------------------------
# Two checkpoints


def print_comparison(found: dict[str, Any]) -> None:
    print(f"A {found['first']}\nB {found['second']}")
    for label, key in (("only in A", "only_in_first"), ("only in B", "only_in_second")):
        print_some(label, found[key])
    print_some("another shape", [f"{name}: {a} in A, {b} in B" for name, (a, b) in found["shapes"].items()])
    rows = [
        [kind, f"{each['largest']:.6g}", f"{each['relative_norm']:.6g}", each["worst"] or "equal"]
        for kind, each in found["kinds"].items()
    ]
    if rows:
        print()
        print_table(["kind", "largest difference", "relative norm", "largest in"], rows, {1, 2})
    # relative, so that a small tensor with a large fault comes before a large one with rounding
    different = sorted(found["tensors"].items(), key=lambda item: -item[1]["relative_norm"])
    if different:
        print(f"\n{len(different)} tensors differ, by relative norm:")
        shown = [
            [name, f"{each['largest']:.6g}", f"{each['relative_norm']:.6g}"]
            for name, each in different[:SHOWN_DIFFERENCES]
        ]
        print_table(["tensor", "largest difference", "relative norm"], shown, {1, 2})
        if len(different) > SHOWN_DIFFERENCES:
            print(f"  ... --json prints all {len(different)}")
    if not found["different"]:
        print("\nequal in every tensor")


def print_some(label: str, lines: Sequence[str]) -> None:
    if lines:
        print(f"\n{label}: {len(lines)}")
        for line in lines[:SHOWN_DIFFERENCES]:
            print(f"  {line}")
        if len(lines) > SHOWN_DIFFERENCES:
            print(f"  ... {len(lines)} in all")


def diff(arguments: argparse.Namespace) -> bool:
    """Print the comparison. Returns True if the two are equal. Raises CheckpointError."""
    from megatron.checkpoint import inspection
    from megatron.checkpoint.format import ITEM_BYTES

    first, second = (opened(path) for path in arguments.diff)
    pairs = inspection.comparable(first, second)
    # each pair has one shape: the bytes of one side are those of the other
    num_bytes = sum(ITEM_BYTES * math.prod(first.parameters[name].shape) for name, _ in pairs)
    with progress_bar("diff", num_bytes) as progress:
        found = inspection.compare(first, second, progress.update)
    if arguments.json:
        print(json.dumps(jsonable(found)))
    else:
        print_comparison(found)
    return not found["different"]


@command
def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    from megatron.checkpoint.format import CheckpointError

    logging.basicConfig(format="%(levelname)s: %(message)s", level=logging.WARNING)
    try:
        if arguments.diff:
            is_good = diff(arguments)
        else:
            is_good = inspect(arguments.path, arguments)
    except CheckpointError as error:
        print(f"error: {error}", file=sys.stderr)
        return FAILED
    return DONE if is_good else FAILED
