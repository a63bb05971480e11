"""Draw runs from their metrics.jsonl into one PNG: loss, learning rate, gradient norm, throughput, memory, step time.

python tools/plot_run.py RESULTS_DIR [RESULTS_DIR ...] --output run.png
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from megatron.cli.command import command, command_parser
from megatron.observability.run_plots import PlotError, draw, draw_experts, draw_loss, read_run, run_names
from megatron.runtime.commands import DONE, REFUSED


@command
def main(argv: Sequence[str] | None = None) -> int:
    parser = command_parser(
        "plot_run",
        "Draw training runs from their metrics.jsonl: loss, learning rate, gradient norm, throughput, "
        "memory, time of a step.",
    )
    parser.add_argument("runs", nargs="+", metavar="RESULTS_DIR", help="folder with a metrics.jsonl, or such a file")
    parser.add_argument("--output", default="run.png", metavar="PNG", help="picture to write (default: run.png)")
    parser.add_argument("--loss-only", action="store_true", help="draw only the loss, in a small picture")
    parser.add_argument("--experts", action="store_true", help="draw only the loads of experts by layer")
    options = parser.parse_args(argv)
    paths, output = [Path(path) for path in options.runs], Path(options.output)
    try:
        runs = [read_run(path) for path in paths]
        if output.suffix.lower() != ".png":
            raise PlotError(f"--output {output} does not end in .png")
        by_name = dict(zip(run_names(paths), runs, strict=True))
        drawing = draw
        if options.loss_only:
            drawing = draw_loss
        elif options.experts:
            drawing = draw_experts
        drawing(by_name, output)
    except PlotError as error:
        print(f"plot_run: {error}", file=sys.stderr)
        return REFUSED
    except OSError as error:
        print(f"plot_run: {error.filename or output}: {error.strerror or error}", file=sys.stderr)
        return REFUSED
    print(f"wrote {output}")
    return DONE
