"""Test this software on Gaudi cards, once, and write a report to send back: about ten minutes.

    scripts/gaudi_acceptance.sh --devices 8

Compares each of Habana's kernels with its plain twin and the losses of tiny models with the CPU's, and measures the
throughput of a larger model. The report holds versions, numbers and error messages, and no names of hosts or users.
Exit status: 0 if every check passed, 1 if one failed, 2 if the test cannot start.
"""

from __future__ import annotations

import argparse
import datetime
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from megatron.acceptance import runs
from megatron.acceptance.kernels import read_checks
from megatron.acceptance.report import Group, failures, summary, write_report
from megatron.acceptance.software import check_software
from megatron.cli.command import command, run_command
from megatron.command_names import command_name
from megatron.data.indexed import DataError
from megatron.devices import count_devices, has_gaudi_plugin
from megatron.exit_codes import DONE, FAILED, REFUSED

PARTS = ("kernels", "losses", "throughput")
MODES = ("lazy", "eager")
LARGER_STEPS = 20


def build_acceptance_parser() -> argparse.ArgumentParser:
    lines = (__doc__ or "").strip().splitlines()
    parser = argparse.ArgumentParser(
        prog=command_name("gaudi_acceptance"), description=lines[0], epilog=" ".join(lines[4:]), allow_abbrev=False
    )
    parser.add_argument("--devices", type=int, metavar="INT", help="cards of this machine (default: all)")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="new folder (default: gaudi_acceptance_TIME)")
    models = tuple(runs.MODELS)
    for name, values, more in (
        ("parts", PARTS, "; versions are always checked"),
        ("modes", MODES, ""),
        ("models", models, ", for the losses"),
    ):
        text = f"of {', '.join(values)}{more} (default: all)"
        parser.add_argument(
            f"--{name}", nargs="+", choices=values, default=values, metavar=name[:-1].upper(), help=text
        )
    parser.add_argument("--steps", type=int, default=50, metavar="INT", help="steps of a tiny model (default: 50)")
    parser.add_argument(
        "--throughput-preset",
        default="llama32_1b",
        metavar="NAME",
        help="model whose throughput is measured (default: llama32_1b)",
    )
    parser.add_argument("--identify", action="store_true", help="keep names of hosts, users and folders in the report")
    return parser


@command
def main(argv: Sequence[str] | None = None) -> int:
    options = build_acceptance_parser().parse_args(argv)
    found = count_devices("hpu")
    if options.devices is None:
        options.devices = found
    folder = options.output or Path(f"gaudi_acceptance_{datetime.datetime.now():%Y%m%d_%H%M%S}")
    if faults := list(_faults(options, found, folder)):
        print("\n".join(["refused; nothing was started:", *(f"  - {fault}" for fault in faults)]), file=sys.stderr)
        return REFUSED
    groups: list[Group] = []
    status = run_command(lambda: _test(options, folder, groups), (DataError,), str(folder))
    return FAILED if status == DONE and failures(groups) else status


def _faults(options: argparse.Namespace, found: int, folder: Path) -> Iterator[str]:
    if not has_gaudi_plugin():
        yield "habana_frameworks.torch is not installed in this Python; run it in the Gaudi software's (docs/gaudi.md)"
    if found == 0:
        yield "no Gaudi card is visible on this machine; hl-smi shows which are there"
    elif not 1 <= options.devices <= found:
        yield f"--devices {options.devices}: this machine shows {found} cards; take 1 to {found}"
    if options.steps < 2:
        yield f"--steps {options.steps} must be 2 or more, to compare losses after an update"
    if folder.exists():
        yield f"--output {folder} exists; name a new folder"


def _test(options: argparse.Namespace, folder: Path, groups: list[Group]) -> None:
    """Run the parts, and write the report after each of them, so that a machine that goes down leaves one."""
    folder.mkdir(parents=True)
    file = folder / "report.txt"
    title = f"Gaudi acceptance test, {options.devices} card{'s' * (options.devices > 1)}"
    text = ""
    for name, part in _parts(options, folder):
        began = time.monotonic()
        group = part()
        groups.append(group)
        text = write_report(file, title, groups, identifies=options.identify)
        print(f"{name}: {summary([group])}, {time.monotonic() - began:.0f} s", flush=True)
    print(f"\n{text}\nreport: {file}")


def _parts(options: argparse.Namespace, folder: Path) -> Iterator[tuple[str, Callable[[], Group]]]:
    yield "software", partial(check_software, options.devices)
    for mode in options.modes:
        if "kernels" in options.parts:
            yield f"kernels, {mode} mode", partial(_kernels, folder, mode)
        for model in options.models if "losses" in options.parts else ():
            yield (
                f"{model}, {mode} mode",
                partial(runs.compare_losses, folder, model, mode, options.devices, options.steps),
            )
        if "throughput" in options.parts:
            yield (
                f"throughput, {mode} mode",
                partial(
                    runs.measure_throughput, folder, options.throughput_preset, mode, options.devices, LARGER_STEPS
                ),
            )


def _kernels(folder: Path, mode: str) -> Group:
    """Compare the kernels in a process of their own, since a card belongs to one."""
    file = folder / f"kernels_{mode}.jsonl"
    words = [sys.executable, "-m", "megatron.acceptance.kernels", str(file)]
    fault = runs.run_process(words, runs.environment(mode), file.with_suffix(".log"))
    title = f"kernels in {mode} mode on one card, against the plain operators in float64 on the CPU"
    return Group(title, read_checks(file, fault or "the process did not reach it"))
