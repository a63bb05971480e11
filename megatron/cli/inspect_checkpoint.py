"""Say what a checkpoint holds: its run, progress and parameters; check it; compare two.

    python tools/inspect_checkpoint.py out/checkpoints                     the newest one there
    python tools/inspect_checkpoint.py out/checkpoints/global_step100 --norms --verify
    python tools/inspect_checkpoint.py --diff A B

Exit status: 0 all is well, 1 damaged, unreadable or (with --diff) different, 2 a fault in the options.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from megatron.checkpoint.format import MANIFEST, CheckpointError
from megatron.checkpoint.reader import Checkpoint, newest_checkpoint
from megatron.command_names import command_name

CHUNK_NUMEL = 1 << 22
"""Elements of a tensor read at a time: memory does not grow with the model."""
SHOWN_DIFFERENCES = 20


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=command_name("inspect_checkpoint"),
        description="Say what a checkpoint holds, check it, or compare two.",
        epilog="Exit status: 0 all is well, 1 damaged, unreadable or (with --diff) different.",
    )
    parser.add_argument("path", nargs="?", metavar="PATH", help="a checkpoint, or a folder of them: then its newest")
    parser.add_argument(
        "--norms", action="store_true", help="print the L2 norm and the largest magnitude of each tensor"
    )
    parser.add_argument("--verify", action="store_true", help="read everything and compare the checksums")
    parser.add_argument("--diff", nargs=2, metavar=("A", "B"), help="compare two checkpoints, of whatever layouts")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    arguments = parser.parse_args(argv)
    if bool(arguments.path) == bool(arguments.diff):
        parser.error("give either PATH or --diff A B")
    if arguments.diff and (arguments.norms or arguments.verify):
        parser.error("--norms and --verify belong to PATH, not to --diff")
    return arguments


def open_checkpoint(path: str) -> Checkpoint:
    """A checkpoint's own folder, or the newest of a folder of them. Raises CheckpointError."""
    if os.path.lexists(Path(path) / MANIFEST):
        return Checkpoint(path)
    checkpoint = newest_checkpoint(path)
    if checkpoint is None:
        raise CheckpointError(f"{path} holds no checkpoint")
    return checkpoint


def bar(total: int, title: str) -> Any:
    return tqdm(total=total, unit="B", unit_scale=True, desc=title, leave=False, disable=None)


def chunks(checkpoint: Checkpoint, name: str, kind: str) -> Iterator[Tensor]:
    """A whole tensor, flattened, piece by piece."""
    shard = checkpoint.parameters[name]
    numel = math.prod(shard.shape)
    for start in range(0, numel, CHUNK_NUMEL):
        yield checkpoint.read(name, kind, shard, 0, 1, start, min(CHUNK_NUMEL, numel - start))


# ---------------------------------------------------------------------------------------------------------------------
# One checkpoint


def describe(checkpoint: Checkpoint) -> dict[str, Any]:
    parameters = {
        name: {
            "shape": list(shard.shape),
            "dtype": checkpoint.dtypes[name],
            "cut": None if shard.dim is None else {"dim": shard.dim, "pieces": list(shard.pieces)},
            "kinds": list(checkpoint.kinds_of(name)),
        }
        for name, shard in checkpoint.parameters.items()
    }
    return {
        "folder": str(checkpoint.folder),
        "tag": checkpoint.tag,
        "bytes": checkpoint.num_bytes,
        "files": len(checkpoint.file_bytes),
        "num_parameters": sum(math.prod(shard.shape) for shard in checkpoint.parameters.values()),
        "kinds": list(checkpoint.kinds),
        "metadata": checkpoint.metadata,
        "parameters": parameters,
    }


def measure(checkpoint: Checkpoint, found: dict[str, Any]) -> None:
    """Add the norm and the largest magnitude of each tensor: summed in float64."""
    with bar(sum(at.num_bytes for at in checkpoint.fragments), "norms") as progress:
        for name, entry in found["parameters"].items():
            entry["norms"] = {}
            for kind in checkpoint.kinds_of(name):
                squares, largest = 0.0, 0.0
                for chunk in chunks(checkpoint, name, kind):
                    squares += chunk.double().square().sum().item()
                    largest = torch.tensor([largest, chunk.abs().max().item()]).max().item()  # NaN stays NaN
                    progress.update(4 * len(chunk))
                entry["norms"][kind] = {"l2": math.sqrt(squares), "max": largest}


def verify(checkpoint: Checkpoint) -> str | None:
    """What is damaged; None: nothing."""
    with bar(sum(at.num_bytes for at in checkpoint.fragments), "verify") as progress:
        try:
            checkpoint.verify(progress=progress.update)
        except CheckpointError as error:
            return str(error)
    return None


def said(value: Any) -> str:
    """A value of the metadata on one line."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {said(each)}" for key, each in value.items())
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return value if isinstance(value, str) else json.dumps(value)


def size(num_bytes: int) -> str:
    number, unit = float(num_bytes), "B"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if number < 1000 or unit == "TB":
            break
        number /= 1000
    return f"{num_bytes} B" if unit == "B" else f"{number:.2f} {unit}"


def jsonable(value: Any) -> Any:
    """With "nan" and "inf" for the numbers that JSON has no way to write."""
    if isinstance(value, Mapping):
        return {key: jsonable(each) for key, each in value.items()}
    if isinstance(value, list):
        return [jsonable(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]], right: set[int]) -> None:
    """Columns as wide as they need to be; those numbered in `right` end flush."""
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    for row in (head, *rows):
        cells = [
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        print("  " + "  ".join(cells).rstrip())


def print_description(found: dict[str, Any]) -> None:
    metadata = found["metadata"]
    lines = {
        "tag": found["tag"],
        "size": f"{size(found['bytes'])} in {found['files']} file{'s' if found['files'] != 1 else ''}",
        "parameters": f"{found['num_parameters']:,} in {len(found['parameters'])} tensors",
        "kinds": ", ".join(found["kinds"]),
    }
    for key in ("progress", "layout", "versions", "data_fingerprint", "optimizer"):
        if metadata.get(key) not in (None, {}, ""):
            lines[key.replace("_", " ")] = said(metadata[key])
    others = [key for key in metadata if key not in ("progress", "layout", "versions", "data_fingerprint", "optimizer")]
    if others:
        lines["also"] = f"{', '.join(others)} (--json prints all)"
    print(found["folder"])
    width = max(map(len, lines))
    for key, value in lines.items():
        text = value if len(value) <= 400 else value[:400] + " ..."
        print(f"  {key.ljust(width)}  {''.join(c if c.isprintable() else '?' for c in text)}")
    print()
    with_norms = any("norms" in entry for entry in found["parameters"].values())
    head = ["parameter", "shape", "dtype", "cut", *(["kind", "L2 norm", "largest"] if with_norms else ["kinds"])]
    rows = []
    for name, entry in found["parameters"].items():
        cut = entry["cut"]
        pieces = f" ({' + '.join(map(str, cut['pieces']))})" if cut and len(cut["pieces"]) > 1 else ""
        cells = [name, " x ".join(map(str, entry["shape"])) or "scalar", entry["dtype"]]
        cells.append(f"dim {cut['dim']}{pieces}" if cut else "whole")
        if not with_norms:
            rows.append([*cells, ", ".join(entry["kinds"])])
            continue
        for kind, norm in entry["norms"].items():
            rows.append([*cells, kind, f"{norm['l2']:.6g}", f"{norm['max']:.6g}"])
            cells = [""] * 4
    print_table(head, rows, {5, 6} if with_norms else set())


def inspect(path: str, arguments: argparse.Namespace) -> bool:
    """Print what was asked for. Returns whether all is well. Raises CheckpointError."""
    checkpoint = open_checkpoint(path)
    found = describe(checkpoint)
    damage = verify(checkpoint) if arguments.verify else None
    if arguments.norms:
        measure(checkpoint, found)
    if arguments.verify:
        found["verified"] = {"damage": damage}
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


@dataclass
class Difference:
    """Of two tensors, or of all tensors of a kind."""

    largest: float = 0.0
    """Largest absolute difference of two elements; infinite where one of them is no number."""
    squares: float = 0.0
    """Of the differences, summed."""
    reference_squares: float = 0.0
    """Of the first one's elements, summed."""

    @property
    def relative_norm(self) -> float:
        """||a - b|| / ||a||."""
        if self.squares == 0:
            return 0.0
        return math.sqrt(self.squares / self.reference_squares) if self.reference_squares else math.inf

    def add(self, first: Tensor, second: Tensor) -> None:
        reference = first.double()
        same = (first == second) | (first.isnan() & second.isnan())
        delta = (reference - second.double()).abs().masked_fill(same, 0.0).nan_to_num(nan=math.inf)
        self.largest = max(self.largest, delta.max().item())
        self.squares += delta.square().sum().item()
        self.reference_squares += reference[reference.isfinite()].square().sum().item()

    def merge(self, other: Difference) -> None:
        self.largest = max(self.largest, other.largest)
        self.squares += other.squares
        self.reference_squares += other.reference_squares


def compare(first: Checkpoint, second: Checkpoint) -> dict[str, Any]:
    """What differs in the tensors of two checkpoints. `different`: whether anything does."""
    names = [name for name in first.parameters if name in second.parameters]
    shapes = {
        name: [list(first.parameters[name].shape), list(second.parameters[name].shape)]
        for name in names
        if first.parameters[name].shape != second.parameters[name].shape
    }
    kinds: dict[str, Difference] = {}
    worst: dict[str, str] = {}
    tensors: dict[str, dict[str, Any]] = {}
    only = {
        label: [f"{kind} of {name}" for name in a.parameters for kind in a.kinds_of(name) if lacks(b, name, kind)]
        for label, a, b in (("only_in_first", first, second), ("only_in_second", second, first))
    }
    pairs = [
        (name, kind)
        for name in names
        if name not in shapes
        for kind in first.kinds_of(name)
        if kind in second.kinds_of(name)
    ]
    total = 4 * sum(math.prod(first.parameters[name].shape) for name, _ in pairs)
    with bar(total, "diff") as progress:
        for name, kind in pairs:
            difference = Difference()
            for ours, theirs in zip(chunks(first, name, kind), chunks(second, name, kind), strict=True):
                difference.add(ours, theirs)
                progress.update(4 * len(ours))
            of_kind = kinds.setdefault(kind, Difference())
            if difference.largest > of_kind.largest:
                worst[kind] = name
            of_kind.merge(difference)
            if difference.largest:
                tensors[f"{kind} of {name}"] = as_json(difference)
    return {
        "first": str(first.folder),
        "second": str(second.folder),
        **only,
        "shapes": shapes,
        "kinds": {kind: as_json(found) | {"worst": worst.get(kind)} for kind, found in kinds.items()},
        "tensors": tensors,
        "different": bool(shapes or tensors or any(only.values())),
    }


def lacks(checkpoint: Checkpoint, name: str, kind: str) -> bool:
    return name not in checkpoint.parameters or kind not in checkpoint.kinds_of(name)


def as_json(difference: Difference) -> dict[str, Any]:
    return {"largest": difference.largest, "relative_norm": difference.relative_norm}


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
    different = sorted(found["tensors"].items(), key=lambda item: -item[1]["relative_norm"])
    if different:
        print(f"\n{len(different)} tensors differ" + (", by relative norm:" if len(different) > 1 else ":"))
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
    """Print the comparison. Returns whether the two are equal. Raises CheckpointError."""
    first, second = (open_checkpoint(path) for path in arguments.diff)
    found = compare(first, second)
    print(json.dumps(jsonable(found))) if arguments.json else print_comparison(found)
    return not found["different"]


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    logging.basicConfig(format="%(levelname)s: %(message)s", level=logging.WARNING)
    try:
        return 0 if (diff(arguments) if arguments.diff else inspect(arguments.path, arguments)) else 1
    except CheckpointError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # `| head` has seen enough
        return 0
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
