"""Test this software on Gaudi cards, once, and write a report to send back: about ten minutes.

    scripts/gaudi_acceptance.sh --devices 8

Compares each of Habana's kernels with its plain twin and the losses of tiny models with the CPU's, and measures the
throughput of a larger model. The report holds versions, numbers and error messages, and no names of hosts or users.
Exit status: 0 if every check passed, 1 if one failed, 2 if the test cannot start, 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import datetime
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from megatron.cli.acceptance import runs
from megatron.cli.acceptance.kernels import read_checks
from megatron.cli.acceptance.report import AcceptanceReport, Check, Group, check_software, summary
from megatron.cli.command import command, command_parser, run_command
from megatron.launch.child_processes import InterruptedBySignal, interruptible
from megatron.runtime.commands import DONE, FAILED, REFUSED, counted, for_stderr, shell_status
from megatron.runtime.device_hpu import count_devices, has_gaudi_plugin

PARTS = ("kernels", "losses", "throughput")
MODES = ("lazy", "eager")
# Ctrl-C is `run_command`'s
STOPPING = (signal.SIGTERM, signal.SIGHUP)


def build_acceptance_parser() -> argparse.ArgumentParser:
    lines = (__doc__ or "").strip().splitlines()
    parser = command_parser("gaudi_acceptance", lines[0], epilog=" ".join(lines[4:]))
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
    for name, default, text in (("steps", 20, "its steps"), ("seq-length", 2048, "tokens of its sequences")):
        parser.add_argument(
            f"--throughput-{name}", type=int, default=default, metavar="INT", help=f"{text} (default: {default})"
        )
    parser.add_argument("--identify", action="store_true", help="keep names of hosts, users and folders in the report")
    return parser


@command
def main(argv: Sequence[str] | None = None) -> int:
    options = build_acceptance_parser().parse_args(argv)
    found = count_devices()
    if options.devices is None:
        options.devices = found
    folder = options.output or Path(f"gaudi_acceptance_{datetime.datetime.now():%Y%m%d_%H%M%S}")
    if faults := list(_faults(options, found, folder)):
        lines = ["refused; nothing was started:", *(f"  - {fault}" for fault in faults)]
        print(for_stderr("\n".join(lines)), file=sys.stderr)
        return REFUSED
    acceptance = _Test(options, folder)
    try:
        with interruptible(STOPPING, deque()):
            status = run_command(acceptance.run, str(folder), acceptance.kept)
    except InterruptedBySignal as stop:
        print(f"stopped by {signal.Signals(stop.number).name}{acceptance.kept()}", file=sys.stderr)
        return shell_status(-stop.number)
    # a test that ran to its end may have failed checks
    if status == DONE and not acceptance.report.passed:
        return FAILED
    return status


def _faults(options: argparse.Namespace, found: int, folder: Path) -> Iterator[str]:
    if not has_gaudi_plugin():
        yield (
            f"habana_frameworks.torch is not installed in {sys.executable}; name the Python of the Gaudi software by "
            "PYTHON (docs/start/gaudi.md)"
        )
    if found == 0:
        yield "no Gaudi card is visible on this machine; hl-smi shows which are there"
    elif not 1 <= options.devices <= found:
        yield f"--devices {options.devices}: this machine shows {found} cards; take 1 to {found}"
    for name, steps in (("steps", options.steps), ("throughput-steps", options.throughput_steps)):
        if steps < 2:
            yield f"--{name} {steps} must be 2 or more, to see a loss after an update"
    # the files of an earlier test would be appended to
    if folder.exists():
        yield f"--output {folder} exists; name a new folder"


class _Test:
    """The parts, and the report: written again after each of them, so that a machine that goes down leaves one."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self._folder = folder
        self._file = folder / "report.txt"
        self._identifies = options.identify
        self._parts = dict(_parts(options, folder))
        title = f"Gaudi acceptance test, {counted(options.devices, 'card')}"
        self.report = AcceptanceReport(title, (), tuple(self._parts))

    def run(self) -> None:
        """Run the parts. Raises OSError if the report cannot be written; it is on stdout then."""
        self._folder.mkdir(parents=True)
        for number, (name, part) in enumerate(self._parts.items(), start=1):
            print(f"{name} ...", flush=True)
            began = time.monotonic()
            try:
                group = part()
            except Exception as error:  # whatever it is, the report must name it, and the other parts are run
                group = Group(name, [Check(name, None, 0.0, f"{type(error).__name__}: {error}")])
            # a new report after each part: a machine that goes down leaves the last one
            groups, left = [*self.report.groups, group], tuple(self._parts)[number:]
            self.report = AcceptanceReport(self.report.title, groups, left)
            sent = self.report
            if not self._identifies:
                sent = sent.anonymous(self._folder)
            try:
                sent.write(self._file)
            except OSError:
                # the disk may be full: the results are printed instead
                print(f"\n{sent.text()}", flush=True)
                raise
            print(f"{name}: {summary([group])}, {time.monotonic() - began:.0f} s", flush=True)
        print(f"\n{sent.text()}\n{summary(self.report.groups)}; report: {self._file}")

    def kept(self) -> str:
        """Return the end of a message that says what is left of a test that did not end."""
        left = len(self.report.not_run)
        text = ""
        if left:
            text += f"; {left} of {len(self._parts)} parts have not ended"
        if self._file.is_file():
            text += f"; report so far: {self._file}"
        return text


def _parts(options: argparse.Namespace, folder: Path) -> Iterator[tuple[str, Callable[[], Group]]]:
    yield "software", partial(check_software, options.devices)
    for mode in options.modes:
        if "kernels" in options.parts:
            yield f"kernels, {mode} mode", partial(_kernels, folder, mode)
        if "losses" in options.parts:
            for model in options.models:
                part = partial(runs.compare_losses, folder, model, mode, options.devices, options.steps)
                yield f"{model}, {mode} mode", part
        if "throughput" in options.parts:
            yield (
                f"throughput, {mode} mode",
                partial(
                    runs.measure_throughput,
                    folder,
                    options.throughput_preset,
                    mode,
                    options.devices,
                    options.throughput_steps,
                    options.throughput_seq_length,
                ),
            )


def _kernels(folder: Path, mode: str) -> Group:
    """Compare the kernels in a process of their own, since a card belongs to one."""
    file = folder / f"kernels_{mode}.jsonl"
    words = [sys.executable, "-m", "megatron.cli.acceptance.kernels", str(file)]
    fault = runs.run_process(words, runs.environment(mode), file.with_suffix(".log"))
    title = f"kernels in {mode} mode on one card, against the plain operators in float64 on the CPU"
    return Group(title, read_checks(file, fault or "the process did not reach it"))
