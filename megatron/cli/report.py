"""Write the page of a run, or of several side by side: one HTML file with curves, restarts, texts and options.

python tools/report.py RESULTS_DIR [RESULTS_DIR ...] --output run.html
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from megatron.cli.command import command, command_parser
from megatron.observability.report.recorded import ReportError, read_recorded
from megatron.observability.report.report import write_report
from megatron.observability.run_plots import run_names
from megatron.runtime.commands import DONE, REFUSED

PAGE = "report.html"


@command
def main(argv: Sequence[str] | None = None) -> int:
    parser = command_parser(
        "report",
        "Write a page about training runs: loss, throughput, memory by rank, restarts and their causes, "
        "stragglers, evaluation, samples of text, options, environment. It opens without a network.",
    )
    parser.add_argument("runs", nargs="+", metavar="RESULTS_DIR", help="results folder of a run")
    parser.add_argument("--output", metavar="HTML", help=f"file to write (default: {PAGE} in the first folder)")
    options = parser.parse_args(argv)
    paths = [Path(path) for path in options.runs]
    try:
        runs = [read_recorded(path, name) for path, name in zip(paths, run_names(paths), strict=True)]
        output = runs[0].folder / PAGE if options.output is None else Path(options.output)
        if output.suffix.lower() != ".html":
            raise ReportError(f"--output {output} does not end in .html")
        write_report(runs, output)
    except ReportError as error:
        print(f"report: {error}", file=sys.stderr)
        return REFUSED
    except OSError as error:
        print(f"report: {error.filename}: {error.strerror or error}", file=sys.stderr)
        return REFUSED
    print(f"wrote {output}")
    return DONE
