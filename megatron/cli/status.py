"""Print the state of training runs: step, rate, time left, newest save, hosts, faults. It reads files only.

python tools/status.py RESULTS_DIR [RESULTS_DIR ...]
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron.cli.command import command, command_parser
from megatron.observability.report.recorded import ReportError, read_recorded
from megatron.observability.status import MARGIN, status_of
from megatron.runtime.commands import DONE, REFUSED, folded

UNWELL = 1
"""Exit status where a run has failed, or is silent."""


def _shown(line: str) -> str:
    """Return a line as stdout shows it: on a terminal what is too long goes on below its value."""
    if not sys.stdout.isatty():
        return line
    width = shutil.get_terminal_size().columns - 1  # some terminals wrap a line that fills it
    return folded(line[MARGIN:], width, line[:MARGIN], " " * MARGIN) if len(line) > width else line


@command
def main(argv: Sequence[str] | None = None) -> int:
    parser = command_parser(
        "status",
        "Print the state of training runs by the files of their results folders. The exit status is 1 if "
        "one has failed or is silent.",
    )
    parser.add_argument("runs", nargs="+", metavar="RESULTS_DIR", help="results folder of a run")
    parser.add_argument("--json", action="store_true", help="print a JSON object a run")
    options = parser.parse_args(argv)
    paths = [Path(path) for path in options.runs]
    try:
        found = [status_of(read_recorded(path, str(path), needs_steps=False)) for path in paths]
    except ReportError as error:
        print(f"status: {error}", file=sys.stderr)
        return REFUSED
    for status in found:
        text = json.dumps(dataclasses.asdict(status)) if options.json else "\n".join(map(_shown, status.lines()))
        print(text)
    return DONE if all(status.is_well for status in found) else UNWELL
